#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# What the solver of Mesa layers is worth while a model learns: one model trained with 5, 10 and 30 steps and with three
# tolerances, then read with every setting, "train 5, infer 30" among them.
#
#   tests/bench/solver.sh DATA OUT [PHASE...]      (speed train eval table; all)
#
# speed   each of SETTINGS_TRIED alone for a few steps: its time
# train   all of them once a seed, on the same rows in the same order, as one sweep
# eval    the solver table of each model on DATA/valid, OUT/eval/NAME.txt
# table   OUT/solver.md: time and loss of training; loss by the setting that reads, as a whole and of late tokens
# What is done is not done again, so that a call that was ended goes on with the next one.
#
# DATA is that of ranking.sh, the model the first one of ranking.ini. Needs mesa-trainer (MESA_BUILD, default build, is
# its folder). DEVICE (cpu), SETTINGS_TRIED (steps-5 steps-10 steps-30 tolerance-0.01 tolerance-0.001 tolerance-0.0001),
# STEPS (700) or BUDGET (seconds that `train` may take by what `speed` has measured), RATE (0.002), SEEDS (1), WINDOWS
# (0, all) of `eval`, CONTEXT (2048) of its windows, BATCH_TOKENS (65536; on a CPU 4096), READERS (1; evaluations at
# once), PARALLEL (as many runs at once as suit the device), MAX_SECONDS (0, none) of the sweep, SETTINGS
# ("section.key=value ..." of all runs).
set -euo pipefail

if [ $# -lt 2 ]; then
    echo "usage: tests/bench/solver.sh DATA OUT [speed|train|eval|table|all]..." >&2
    exit 2
fi
here=$(cd "$(dirname "$0")" && pwd)
export TRAINER=${MESA_BUILD:-build}/mesa-trainer DATA=$1 OUT=$2 DEVICE=${DEVICE:-cpu} EVALS='' TASKS='' ITEMS=0
shift 2
phases=${*:-all}
[ "$phases" != all ] || phases="speed train eval table"
export BATCH_TOKENS=${BATCH_TOKENS:-$([[ $DEVICE == cpu* ]] && echo 4096 || echo 65536)}
export WINDOWS=${WINDOWS:-0} CONTEXT=${CONTEXT:-2048}
read -ra models <<<"${SETTINGS_TRIED:-steps-5 steps-10 steps-30 tolerance-0.01 tolerance-0.001 tolerance-0.0001}"
read -ra seeds <<<"${SEEDS:-1}"
# shellcheck disable=SC2034 # training.sh reads them
rates=("${RATE:-0.002}") wider=0 config=$here/ranking.ini
# shellcheck source=tests/bench/training.sh
. "$here/training.sh"
[ -x "$TRAINER" ] || { echo "solver.sh: no $TRAINER; set MESA_BUILD" >&2; exit 2; }
for phase in $phases; do
    [[ " speed train eval table " == *" $phase "* ]] || { echo "solver.sh: no phase $phase" >&2; exit 2; }
done
for model in "${models[@]}"; do
    [[ $model =~ ^(steps|tolerance)-[0-9.e-]+$ ]] || { echo "solver.sh: no setting $model" >&2; exit 2; }
done
mkdir -p "$OUT/eval"

set_all data.train="$DATA/train" data.valid="$DATA/valid" data.tokenizer="$DATA/tokenizer" \
    train.device="$DEVICE" train.precision=bf16

variant() { # SETTING NAME
    printf '[variant %s]\nsolver.mode = %s\n' "$2" "${1%%-*}"
    case $1 in
    steps-*) echo "solver.max_steps = ${1#*-}" ;;
    *) echo "solver.tolerance = ${1#*-}" ;;
    esac
}

# RUN: its solver table, whole or not at all.
read_run() {
    local run=$1 to
    to=$OUT/eval/$(basename "$run").txt
    [ ! -e "$to" ] && grep -q '"end": *"done"' "$run/run.json" || return 0
    "$TRAINER" eval "$(newest "$run")" --data "$DATA/valid" --context "$CONTEXT" --windows "$WINDOWS" --solver-table \
        --batch-tokens "$BATCH_TOKENS" --device "$DEVICE" >"$to.part" 2>"$run/eval.log" && mv "$to.part" "$to"
}
export -f read_run

read_all() {
    printf '%s\0' "$OUT/train"/*,seed=* | xargs -0 -P "${READERS:-1}" -n 1 bash -euc 'read_run "$@"' read_run >&2
}

# The median step behind the first two, in milliseconds.
step_time() { # SETTING
    grep -oE '"step_seconds": ?[0-9.e+-]+' "$OUT/speed/$1/log.jsonl" 2>/dev/null | sed 's/.*: *//' | tail -n +3 |
        sort -g | awk '{ time[NR] = $1 } END { if (NR) printf "%.1f", 1000 * time[int((NR + 1) / 2)]; else printf "-" }'
}

# The loss of every reading, and, of the last positions, what some of them lose against the exact solve.
row() { # SETTING SEED
    local run=$OUT/train/$1,seed=$2 time
    time=$(step_time "$1")
    [ -e "$OUT/eval/$1,seed=$2.txt" ] || return 0
    awk -F' *[|] *' -v name="$1" -v seed="$2" -v time="$time" -v steps="$(number cg_steps "$run/log.jsonl")" \
        -v trained="$(number loss "$run/run.json")" '
        /^. solver/ { for (i = 2; i < NF; i++) if ($i ~ /^[0-9]+-[0-9]+$/) late = i }
        /^. (steps|tolerance|exact)/ { loss[$2] = $3; last[$2] = $late }
        function lost(x) { return sprintf("%+.4f", last[x] - last["exact"]) }
        BEGIN {
            settings = "steps 4,steps 6,steps 10,steps 30,tolerance 0.1,tolerance 0.01,tolerance 0.001,exact"
            count = split(settings, x, ",")
        }
        END {
            printf "| %s | %s | %s | %.1f | %.4f", name, seed, time, steps, trained
            for (i = 1; i <= count; i++) printf " | %s", loss[x[i]]
            printf " | %s | %s | %s | %s |\n", last["exact"], lost("steps 4"), lost("steps 10"), lost("tolerance 0.1")
        }' "$OUT/eval/$1,seed=$2.txt"
}

table() {
    local model seed
    printf '| %s ' 'trained with' seed 'ms a step' 'solver steps at the end' 'loss of training' 'read with 4 steps' \
        6 10 30 'tolerance 0.1' 0.01 0.001 exact 'late tokens, exact' 'they lose with 4 steps' 'with 10' \
        'with tolerance 0.1'
    printf '|\n%s|\n' "$(printf '|---%.0s' {1..17})"
    for model in "${models[@]}"; do
        for seed in "${seeds[@]}"; do row "$model" "$seed"; done
    done
}

for phase in $phases; do
    case $phase in
    train)
        choose_steps $((4 * ${#seeds[@]})) 700
        train --set train.eval_every="$steps" >&2
        ;;
    eval) read_all ;;
    table) table | tee "$OUT/solver.md" ;;
    *) "$phase" ;;
    esac
done
