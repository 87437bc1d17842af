#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# How right are the gradients that a device trains with? Models of about 30 million parameters at their start and after
# STEPS steps of training on the device: gradients in float32 and in bf16 against those of the CPU in float32.
#
#   tests/bench/gradients.sh DATA OUT [PHASE...]      (train check pieces table; all)
#
# train   each of MODELS on DEVICE in bf16: OUT/MODEL-0 holds its start, OUT/MODEL-STEPS what it is then
# check   each on BATCHES (32) batches of ROWS (1) rows: OUT/MODEL-STEP-bf16.txt, Mesa layers as training solves them
#         against exact solves; and on 4 batches in float32, exact against exact
# pieces  a batch of 8 rows at once and in pieces of 4, in float32, both on DEVICE: OUT/MODEL-STEPS-pieces.txt
# table   a Markdown table of them
# What is done is not done again. The tables of `mesa-trainer check` say what each column is.
#
# DATA has the shards train and their tokenizer in DATA/tokenizer, as for ranking.sh. Needs mesa-trainer (MESA_BUILD,
# default build, is its folder). DEVICE (cpu), REFERENCE (cpu), MODELS ("mesa gdn mamba2 attention"), STEPS (500),
# WIDTH (512), LAYERS (8), CONTEXT (2048), SETTINGS ("section.key=value ..." of all runs), MAX_SECONDS (0, none) of a
# check.
set -euo pipefail

if [ $# -lt 2 ]; then
    echo "usage: tests/bench/gradients.sh DATA OUT [train|check|pieces|table|all]..." >&2
    exit 2
fi
trainer=${MESA_BUILD:-build}/mesa-trainer data=$1 out=$2
shift 2
phases=${*:-all}
[ "$phases" != all ] || phases="train check pieces table"
every="mesa gdn mamba2 attention"
read -ra models <<<"${MODELS:-$every}"
steps=${STEPS:-500} device=${DEVICE:-cpu} reference=${REFERENCE:-cpu} limit=${MAX_SECONDS:-0}
width=${WIDTH:-512} layers=${LAYERS:-8} context=${CONTEXT:-2048}
[ -x "$trainer" ] || { echo "gradients.sh: no $trainer; set MESA_BUILD" >&2; exit 2; }
for phase in $phases; do
    [[ " train check pieces table " == *" $phase "* ]] || { echo "gradients.sh: no phase $phase" >&2; exit 2; }
done
for model in "${models[@]}"; do
    [[ " $every " == *" $model "* ]] || { echo "gradients.sh: no model $model (of $every)" >&2; exit 2; }
done
mkdir -p "$out"

layer() { # MODEL: what its layers mix with
    case $1 in
    mesa) echo '"mesa_net"' ;;
    gdn) echo '"gated_deltanet"' ;;
    mamba2) echo "{\"mixer\": \"mamba2\", \"num_heads\": $((width / 32)), \"state_size\": 64}" ;; # of twice the width
    attention) echo '"attention"' ;;
    esac
}

checkpoint_of() { # FOLDER STEPS: of a run that took them all
    printf '%s/step-%08d' "$1" "$2"
}

# MODEL STEPS RATE FOLDER: a run whose last checkpoint is kept, unless it is there. A rate of 0 leaves the start as is.
run_of() {
    local settings=() setting kind list
    [ ! -d "$(checkpoint_of "$4" "$2")" ] || return 0
    rm -rf "$4"
    kind=$(layer "$1")
    list=$(seq "$layers" | sed "s/.*/$kind/" | paste -sd,)
    for setting in ${SETTINGS:-}; do settings+=(--set "$setting"); done
    "$trainer" train --config "$out/gradients.ini" --out "$4" \
        --set model.layer_types="[$list]" --set data.train="$data/train" --set data.tokenizer="$data/tokenizer" \
        --set train.device="$device" "${settings[@]}" --set train.steps="$2" --set optim.lr="$3" >"$4.log" 2>&1 ||
        { echo "gradients.sh: $1: $(tail -n 1 "$4.log")" >&2; return 1; }
}

train() {
    local model
    cat >"$out/gradients.ini" <<END
[model]
vocab_size = 8192
model_type = mesa_net
hidden_size = $width
num_hidden_layers = $layers
num_heads = $((width / 64))
head_dim = 64
intermediate_size = $((width * 11 / 4))
tie_word_embeddings = true
scale_embeddings = true
logits_soft_cap = 30.0
max_position_embeddings = 65536

[data]
context = $context

[optim]
min_lr_ratio = 0.1
warmup_steps = 50
beta2 = 0.98

[train]
batch_tokens = $((8 * context))
micro_rows = 8
precision = bf16
eval_every = 0
save_every = 0
END
    for model in "${models[@]}"; do
        run_of "$model" 1 0 "$out/$model-0" || continue
        run_of "$model" "$steps" 0.002 "$out/$model-$steps" || true
    done
}

# NAME MODEL STEP ARGUMENTS...: `check` into OUT/NAME.txt, whole or not at all; status 1 is a figure outside, and kept.
check_of() {
    local to=$out/$1.txt checkpoint status=0
    checkpoint=$(checkpoint_of "$out/$2-$3" "$(($3 > 0 ? $3 : 1))")
    shift 3
    [ ! -e "$to" ] && [ -d "$checkpoint" ] || return 0
    timeout "$limit" "$trainer" check "$checkpoint" --data "$data/train" --context "$context" --seed 2 \
        --device "$device" "$@" >"$to.part" 2>"$to.err" || status=$?
    [ $status -le 1 ] || { echo "gradients.sh: $to: status $status: $(tail -n 1 "$to.err")" >&2; return 0; }
    mv "$to.part" "$to"
    echo "$to: $(tail -n 1 "$to")" >&2
}

check() {
    local model step
    for step in "$steps" 0; do
        for model in "${models[@]}"; do
            check_of "$model-$step-bf16" "$model" "$step" --against "$reference" --against-solver exact \
                --precision bf16 --rows "${ROWS:-1}" --batches "${BATCHES:-32}"
            check_of "$model-$step-float32" "$model" "$step" --against "$reference" --solver exact \
                --rows "${ROWS:-1}" --batches 4
        done
    done
}

pieces() {
    local model
    for model in "${models[@]}"; do
        check_of "$model-$steps-pieces" "$model" "$steps" --against "$device" --solver exact --rows 8 --micro-rows 4
    done
}

table() {
    local path name
    printf '| %s ' 'model, steps, products' 'error of a tensor, median' largest '1 - cosine' loss 'of all as one' \
        'left in the mean' 'the worst tensors'
    printf '|\n|---|---|---|---|---|---|---|---|\n'
    for path in "$out"/*.txt; do
        [ -e "$path" ] || continue
        name=$(basename "$path" .txt)
        awk -v name="${name//-/, }" '
            function told(at) { return $at ($(at + 1) == "" ? "" : " " $(at + 1)) ($(at + 2) == "" ? "" : " OUTSIDE") }
            /^error of a tensor, median/ { median = told(6) }
            /^error of a tensor, largest/ { largest = told(6) }
            /^1 - cosine/ { cosine = told(5) }
            /^loss/ { loss = told(2) }
            /^left of it/ { left = told(9) }
            $1 == "(all)" { all = $4 }
            $1 ~ /^model|^lm_head/ { error[$1] = $4 }
            END {
                for (n = 0; n < 3; n++) {
                    top = ""
                    for (t in error) if (top == "" || error[t] > error[top]) top = t
                    if (top != "") { worst = worst (n ? ", " : "") top " " error[top]; delete error[top] }
                }
                gsub(/model\.(layers\.)?/, "", worst)
                gsub(/\.weight/, "", worst)
                printf "| %s | %s | %s | %s | %s | %s | %s | %s |\n", name, median, largest, cosine, loss, all,
                    left == "" ? "-" : left, worst
            }' "$path"
    done
}

for phase in $phases; do
    case $phase in
    table) table | tee "$out/gradients.md" ;;
    *) "$phase" ;;
    esac
done
