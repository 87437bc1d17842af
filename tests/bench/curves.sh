#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Does training on a device in bf16 end where float32 on the CPU ends? The same small models, the same rows in the same
# order, the mean loss of the last 50 steps.
#
#   tests/bench/curves.sh DATA OUT [PHASE...]      (reference device table; all)
#
# reference  each of MODELS in float32 on REFERENCE (cpu), with the first of SEEDS
# device     the same on DEVICE (cpu) in bf16 with every one of SEEDS ("1 2"), and in float32 with the first
# table      OUT/curves.md: they agree where bf16 is no farther from the reference of the same seed than twice what the
#            seeds of bf16 are apart; OUT/curves.html: all curves
# What is done is not done again; OUT may lie on another machine by then, and the checkpoints may be gone.
#
# DATA has the shards train and their tokenizer in DATA/tokenizer, as for ranking.sh. Needs mesa-trainer (MESA_BUILD,
# default build, is its folder). MODELS ("mesa gdn mamba2 attention"), STEPS (500), SETTINGS ("section.key=value ..." of
# all runs), PARALLEL (as many runs at once as suit the device).
set -euo pipefail

if [ $# -lt 2 ]; then
    echo "usage: tests/bench/curves.sh DATA OUT [reference|device|table|all]..." >&2
    exit 2
fi
mkdir -p "$2"
build=${MESA_BUILD:-build} data=$1 out=$(cd "$2" && pwd)
shift 2
phases=${*:-all}
[ "$phases" != all ] || phases="reference device table"
[ -x "$build/mesa-trainer" ] || { echo "curves.sh: no $build/mesa-trainer; set MESA_BUILD" >&2; exit 2; }
trainer=$(cd "$build" && pwd)/mesa-trainer
read -ra seeds <<<"${SEEDS:-1 2}"
every="mesa gdn mamba2 attention"
read -ra models <<<"${MODELS:-$every}"
steps=${STEPS:-500}
device=${DEVICE:-cpu}
for phase in $phases; do
    [[ " reference device table " == *" $phase "* ]] || { echo "curves.sh: no phase $phase" >&2; exit 2; }
done
for model in "${models[@]}"; do
    [[ " $every " == *" $model "* ]] || { echo "curves.sh: no model $model (of $every)" >&2; exit 2; }
done

mixer() { # MODEL: what its four layers mix with
    case $1 in
    mesa) echo '"mesa_net"' ;;
    gdn) echo '"gated_deltanet"' ;;
    mamba2) echo '{"mixer": "mamba2", "num_heads": 4}' ;; # 4 heads of 128: its channels are twice the width
    attention) echo '"attention"' ;;
    esac
}

# Paths in what a run was made with are relative to DATA, so that it is the same run elsewhere.
cat >"$out/curves.ini" <<END
[model]
model_type = mesa_net
vocab_size = 8192
hidden_size = 256
num_hidden_layers = 4
num_heads = 2
head_dim = 128
intermediate_size = 704
tie_word_embeddings = true
scale_embeddings = true
logits_soft_cap = 30.0
gamma_cap_b = 0.9975
max_position_embeddings = 2048

[data]
train = train
tokenizer = tokenizer
context = 1024

[optim]
lr = 0.003
min_lr_ratio = 0.1
warmup_steps = 50
beta2 = 0.98

[train]
batch_tokens = 4096
micro_rows = 4
eval_rows = 0
eval_every = 0
save_every = 100
keep = 1
END

# PART DEVICE PRECISION SEED...: every model's runs in OUT/PART.
sweep() {
    local part=$1 on=$2 precision=$3 model kind setting sets=()
    shift 3
    printf '[sweep]\nseeds = %s\n' "$*" >"$out/$part.ini"
    for model in "${models[@]}"; do
        kind=$(mixer "$model")
        printf '[variant %s]\nmodel.layer_types = [%s, %s, %s, %s]\n' "$model" "$kind" "$kind" "$kind" "$kind"
    done >>"$out/$part.ini"
    for setting in ${SETTINGS:-}; do sets+=(--set "$setting"); done
    (cd "$data" && "$trainer" train --config "$out/curves.ini" --sweep "$out/$part.ini" --out "$out/$part" \
        ${PARALLEL:+--parallel "$PARALLEL"} "${sets[@]}" --set train.steps="$steps" --set train.device="$on" \
        --set train.precision="$precision") >&2
}

loss() { # PART MODEL SEED: the mean of its last 50 steps; a dash where it did not end
    local run="$out/$1/$2,seed=$3/run.json"
    if [ -e "$run" ] && grep -q '"end": *"done"' "$run"; then
        sed -nE 's/^ *"loss": *([0-9.e+-]+).*/\1/p' "$run"
    else
        echo -
    fi
}

row() { # MODEL
    local seed all=()
    for seed in "${seeds[@]}"; do all+=("$(loss bf16 "$1" "$seed")"); done
    awk -v model="$1" -v reference="$(loss reference "$1" "${seeds[0]}")" -v same="$(loss float32 "$1" "${seeds[0]}")" \
        -v all="${all[*]}" '
        function number(x) { return x == "-" ? "-" : sprintf("%.4f", x) }
        function apart(x, y) { return x == "-" || y == "-" ? "-" : sprintf("%+.4f", x - y) }
        BEGIN {
            count = split(all, value, " ")
            least = most = value[1]
            for (i = 1; i <= count; i++) {
                text = text (i > 1 ? ", " : "") number(value[i])
                whole = whole value[i] == "-"
                if (value[i] + 0 < least + 0) least = value[i]
                if (value[i] + 0 > most + 0) most = value[i]
                missing = missing || value[i] == "-"
            }
            off = reference - value[1]
            off = off < 0 ? -off : off
            verdict = missing || reference == "-" ? "-" : off <= 2 * (most - least) ? "yes" : "no"
            printf "| %s | %s | %s | %s | %s | %s | %s | %s |\n", model, number(reference), number(same),
                apart(same, reference), text, missing ? "-" : sprintf("%.4f", most - least), apart(value[1], reference),
                verdict
        }'
}

table() {
    printf '| %s ' model "float32, ${REFERENCE:-cpu}" "float32, $device" apart "bf16, seeds ${seeds[*]}" \
        'their spread' 'bf16 less the reference' 'within twice the spread'
    printf '|\n|---|---|---|---|---|---|---|---|\n'
    for model in "${models[@]}"; do row "$model"; done
}

page() {
    local log runs=()
    for log in "$out"/*/*,seed=*/log.jsonl; do
        [ ! -e "$log" ] || runs+=("${log%/*}")
    done
    [ ${#runs[@]} = 0 ] || "$trainer" report "${runs[@]}" --title Curves --out "$out/curves.html" >&2
}

for phase in $phases; do
    case $phase in
    reference) sweep reference "${REFERENCE:-cpu}" float32 "${seeds[0]}" ;;
    device)
        sweep bf16 "$device" bf16 "${seeds[@]}"
        sweep float32 "$device" float32 "${seeds[0]}"
        ;;
    table)
        table | tee "$out/curves.md"
        page
        ;;
    esac
done
