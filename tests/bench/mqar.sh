#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Multi-query associative recall: which mixers learn to look up, on a CPU in minutes. tests/bench/RESULTS.md has the
# hypothesis and what came out.
#
#   tests/bench/mqar.sh FOLDER MIXER...     (all: every mixer)
#
# Every mixer is trained once a learning rate on the same examples in the same order: 2 blocks of width 64 with the
# mixer and an MLP, 512 ids, 128 a row, 4, 8 and 16 pairs mixed, until 99 % of the answers at the most pairs are right,
# the steps are done or the time is up. Then 3000 new examples of each number of pairs are asked. Prints one Markdown
# table. Heads are 2 x 32 where there are heads. All have short convolutions over 4 ids but mlstm and attention, which
# know none: in attention's place for them stands a first layer that sees 4 ids (attention-plain: two full layers, which
# take ten times as long to find each other). Output gates are off where they can be, as in mesa_net: gated_deltanet
# starts to recall after 500 steps without and more than 1000 with one. mamba2, gla and mlstm are the public mixers; the
# -rival lines have their law of decay in mesa_net's place: scalar decay and addition, without and with an input gate.
#
# Needs only mesa-trainer: MESA_BUILD (default build) is its folder. RATES (default "0.001 0.003"), RUN_SECONDS a run
# (360), STEPS (6000), EXAMPLES (200000), SEED (1), PAIRS (4,8,16, ascending), HEAD_WIDTH (32). JOBS (1) runs stand
# beside each other, each of OMP_NUM_THREADS threads (default: the processors / JOBS). Everything goes to FOLDER, one
# for each choice of these; runs that are finished there are not made again.
set -euo pipefail

every="attention attention-plain mesa_net delta_net gated_deltanet kda mamba2 mamba2-rival gla gla-rival mlstm"
every+=" linear_attn retnet hawk"
if [ $# -lt 2 ]; then
    echo "usage: tests/bench/mqar.sh FOLDER MIXER...    ($every; all)" >&2
    exit 2
fi
folder=$1
shift
[ "$*" = all ] && set -- $every
for mixer; do
    [[ " $every " == *" $mixer "* ]] || { echo "mqar.sh: no mixer $mixer (of $every)" >&2; exit 2; }
done
export FOLDER=$folder TRAINER=${MESA_BUILD:-build}/mesa-trainer
export RUN_SECONDS=${RUN_SECONDS:-360} STEPS=${STEPS:-6000} SEED=${SEED:-1}
export PAIRS=${PAIRS:-4,8,16} HEAD_WIDTH=${HEAD_WIDTH:-32}
most=${PAIRS##*,}
rates=${RATES:-0.001 0.003}
jobs=${JOBS:-1}
threads=$(($(nproc) / jobs))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
# Operations take microseconds: a thread that waits spins briefly, then leaves its processor to the other runs.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive} GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-20000}
[ -x "$TRAINER" ] || { echo "mqar.sh: no $TRAINER; set MESA_BUILD" >&2; exit 2; }
mkdir -p "$folder"

if [ ! -e "$folder/data/valid-$most-00000.tok" ]; then
    rm -rf "$folder/data"
    "$TRAINER" task mqar --out "$folder/data" --vocab 512 --length 128 --pairs "$PAIRS" \
        --examples "${EXAMPLES:-200000}" --seed "$SEED" >&2
fi

cat >"$folder/run.ini" <<END
[model]
model_type = mesa_net
vocab_size = 512
hidden_size = 64
num_hidden_layers = 2
num_heads = 2
head_dim = $HEAD_WIDTH
intermediate_size = 128
tie_word_embeddings = true
initializer_range = 0.1

[data]
train = $folder/data/train
valid = $folder/data/valid-$most
context = 128

[optim]
warmup_steps = 200
weight_decay = 0.1
schedule = wsd
decay_fraction = 0.3

[train]
batch_tokens = 4096
micro_rows = 32
eval_every = 100
eval_rows = 256
save_every = 0
keep = 1
stop_accuracy = 0.99
END

# What sets a mixer apart from run.ini, one --set a line. A name in layer_types takes its keys from [model]; some take
# the width of their 2 heads as a share of the model's 64.
settings() {
    local name=$1 first="" share
    share=$(awk "BEGIN { print 2 * $HEAD_WIDTH / 64 }")
    case $1 in
    attention) first='{"mixer": "attention", "window_size": 4}' ;;
    attention-plain) name=attention ;;
    delta_net) printf 'model.%s\n' expand_k="$share" expand_v="$share" ;;
    gated_deltanet) printf 'model.%s\n' expand_v=1 use_gate=false ;;
    kda) echo model.expand_v=1 ;;
    mamba2) printf 'model.%s\n' expand="$share" state_size="$HEAD_WIDTH" ;;
    gla) printf 'model.%s\n' expand_k="$share" expand_v="$share" use_short_conv=true use_output_gate=false ;;
    mlstm) printf 'model.%s\n' qk_dim_factor="$share" v_dim_factor="$share" ;;
    mamba2-rival) name=recurrence; echo 'model.recurrence={"decay": "scalar"}' ;;
    gla-rival) name=recurrence; echo 'model.recurrence={"decay": "scalar", "input_gate": true}' ;;
    linear_attn) name=recurrence; echo 'model.recurrence={"decay": "none"}' ;;
    retnet) name=recurrence; echo 'model.recurrence={"decay": "head"}' ;;
    hawk) name=rglru; printf 'model.%s\n' lru_width=80 num_attention_heads=2 ;;
    esac
    echo "model.layer_types=[${first:-\"$name\"}, \"$name\"]"
}

number() { # KEY TEXT: the number behind "KEY" in a report
    sed -nE "s/^$1 +([0-9.,]+).*/\1/p" <<<"$2" | tr -d ,
}

last() { # KEY: its last value in a log
    grep -oE "\"$1\": ?[0-9.e+-]+" "$2" | tail -n 1 | sed 's/.*: *//'
}

# One run and its row of the table. Attention's state are the keys and values of a row of 128.
run_one() {
    local mixer=$1 rate=$2 run=$FOLDER/$1-$2 sets=() line checkpoint summary state pairs report row
    [ -e "$run.row" ] && return
    rm -rf "$run"
    while read -r line; do sets+=(--set "$line"); done < <(settings "$mixer")
    "$TRAINER" train --config "$FOLDER/run.ini" --out "$run" --max-seconds "$RUN_SECONDS" --set optim.lr="$rate" \
        --set train.steps="$STEPS" --set train.seed="$SEED" "${sets[@]}" >"$run.log" 2>&1 ||
        { echo "mqar.sh: $mixer at $rate: $(tail -n 1 "$run.log")" >&2; return; }
    checkpoint=$(printf '%s\n' "$run"/step-* | tail -n 1)
    summary=$("$TRAINER" inspect "$checkpoint" --summary)
    state=$(sed -nE 's/^state .*\(([0-9,]+) bytes\)/\1/p' <<<"$summary" | tr -d ,)
    state=$((state + 128 * $(sed -nE 's/^KV +([0-9,]+) bytes.*/\1/p' <<<"$summary" | tr -d , | grep . || echo 0)))
    row="| $mixer | $(number parameters "$summary") | $state | $rate | $(last step "$run/log.jsonl")"
    row+=" | $(last seconds "$run/log.jsonl" | xargs printf %.0f)"
    for pairs in ${PAIRS//,/ }; do
        report=$("$TRAINER" eval "$checkpoint" --data "$FOLDER/data/valid-$pairs")
        row+=" | $(number right "$report")"
    done
    echo "$row |" >"$run.row"
    echo "$row |" >&2
}
export -f settings number last run_one

for mixer; do
    for rate in $rates; do echo "$mixer $rate"; done
done | xargs -P "$jobs" -L 1 bash -c 'run_one "$@"' run_one

head="| mixer | parameters | state bytes | learning rate | steps | seconds |" rule="|---|---|---|---|---|---|"
for pairs in ${PAIRS//,/ }; do
    head+=" $pairs pairs, % |" rule+="---|"
done
printf '%s\n' "$head" "$rule"
for mixer; do
    for rate in $rates; do
        [ ! -e "$folder/$mixer-$rate.row" ] || cat "$folder/$mixer-$rate.row"
    done
done
