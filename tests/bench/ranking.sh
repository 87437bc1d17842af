#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# A ranking of models: each in the same block, of about one size, trained on the same text in the same order.
#
#   tests/bench/ranking.sh DATA OUT [PHASE...]      (speed search train eval table; all)
#
# speed   each model alone for a few steps: tokens a second
# search  each at every learning rate of RATES on a quarter of the steps; while the best is the least or the largest
#         tried, half or twice of it is tried too, WIDER times at most
# train   each at its best rate, once a seed; models of a seed read the same rows in the same order
# eval    every trained model on all windows of the validation shards and on TASKS, results by document and item
# table   one Markdown table, OUT/ranking.md: means over seeds, deviations, differences from the first of MODELS; and
#         OUT/ranking.html, mesa-trainer's report of all runs and results
# What is done is not done again, so that a call that was ended goes on with the next one; of runs that were scored the
# checkpoints may be gone by then, and OUT may lie on another machine.
#
# DATA has the shards train, valid, elsewhere, long-36k and long-144k (tests/bench/ranking_data.py makes their texts,
# `mesa-trainer tokenizer` and `pack` the rest), their tokenizer in DATA/tokenizer, and the TASKS as JSONL.
# ranking.ini and ranking_models.ini beside this script say what is trained.
#
# Needs mesa-trainer (MESA_BUILD, default build, is its folder) and for the table python3. DEVICE (cpu), STEPS (700) or
# BUDGET (seconds that search and train may take by what speed has measured, from which STEPS follow), MODELS (all, by
# their names; the first is what others are held against), RATES ("0.001 0.002 0.004"), WIDER (1), SEEDS ("1 2 3"),
# PARALLEL (as many runs at once as suit the device), MAX_SECONDS (0, none) of a sweep, SPEED_STEPS (12), SETTINGS
# ("section.key=value ..." of all runs), EVALS ("valid:2048 elsewhere:2048 long-36k:16384 long-144k:65536", shards and
# the length of their windows), TASKS ("lambada_openai blimp"), ITEMS (5360 of each), BATCH_TOKENS (65536; on a CPU
# 4096), READERS (1; evaluations at once).
set -euo pipefail

if [ $# -lt 2 ]; then
    echo "usage: tests/bench/ranking.sh DATA OUT [speed|search|train|eval|table|all]..." >&2
    exit 2
fi
here=$(cd "$(dirname "$0")" && pwd)
data=$1 out=$2
shift 2
phases=${*:-all}
[ "$phases" != all ] || phases="speed search train eval table"
export TRAINER=${MESA_BUILD:-build}/mesa-trainer DATA=$data OUT=$out DEVICE=${DEVICE:-cpu}
read -ra seeds <<<"${SEEDS:-1 2 3}"
every=$(sed -n 's/^\[variant \(.*\)\]$/\1/p' "$here/ranking_models.ini" | paste -sd' ')
read -ra models <<<"${MODELS:-$every}"
read -ra rates <<<"${RATES:-0.001 0.002 0.004}"
wider=${WIDER:-1} config=$here/ranking.ini
export EVALS=${EVALS:-valid:2048 elsewhere:2048 long-36k:16384 long-144k:65536}
export TASKS=${TASKS-lambada_openai blimp} ITEMS=${ITEMS:-5360}
export BATCH_TOKENS=${BATCH_TOKENS:-$([[ $DEVICE == cpu* ]] && echo 4096 || echo 65536)}
# shellcheck source=tests/bench/training.sh
. "$here/training.sh"
[ -x "$TRAINER" ] || { echo "ranking.sh: no $TRAINER; set MESA_BUILD" >&2; exit 2; }
for phase in $phases; do
    [[ " speed search train eval table " == *" $phase "* ]] || { echo "ranking.sh: no phase $phase" >&2; exit 2; }
done
for model in "${models[@]}"; do
    [[ " $every " == *" $model "* ]] || { echo "ranking.sh: no model $model (of $every)" >&2; exit 2; }
done
mkdir -p "$out"

set_all data.train="$data/train" data.valid="$data/valid" data.tokenizer="$data/tokenizer" \
    train.device="$DEVICE" train.precision=bf16

variant() { # MODEL NAME
    sed -n "/^\[variant $1\]$/,/^\[/p" "$here/ranking_models.ini" | grep '^model\.' | sed "1i [variant $2]"
}

for phase in $phases; do
    case $phase in
    search | train) choose_steps $((${#rates[@]} + wider + 4 * ${#seeds[@]})) 700 ;;&
    train) train --set train.eval_every="$steps" ;;
    eval) evaluate ;;
    table)
        python3 "$here/ranking_table.py" "$out" "${models[@]}" | tee "$out/ranking.md"
        "$TRAINER" report "$out/search" "$out/train" "$out/train"/*,seed=* "$out/eval"/*.json --title Ranking \
            --out "$out/ranking.html" >&2
        ;;
    *) "$phase" ;;
    esac
done
