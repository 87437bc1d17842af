#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# What loops buy: shapes N x R (N blocks that run R times) of several mixers, trained alike.
# tests/bench/RESULTS.md has the hypotheses and what came out.
#
#   tests/bench/looped.sh OUT hop|mano|text SHAPE...     (1x1 1x4 1x8; 4x1 4x6 24x1; 4x1 4x2 4x4 16x1)
#
# hop: p-hop induction over LENGTH (64) letters of 4, examples of HOPS ("1,2,4") hops mixed, the target at every letter
# that has one; validated on the last of HOPS. mano: arithmetic modulo MODULUS (7) in prefix order, 1 to OPERATIONS (3)
# in training, validated with all of them, loss on the answers alone. text: DATA has the shards train and valid and
# their tokenizer (VOCABULARY, 8192). A task's run ends when 99 % of what it is validated on are right, a text's with
# its steps.
#
# PHASES ("search train eval table"):
# search  each model at every learning rate of RATES on a quarter of the steps, and beyond them where the best lies at
#         an edge, WIDER (1) times; nothing where there is one rate
# train   each at its best rate, once a seed
# eval    every trained model on all parts of the validation
# gates   of GATED, models of the first seed: stage 1 of the exit gate on STEPS / 4 at 0.3 of the model's rate, stage 2
#         from that on STEPS / 8, a table of exits of each (text alone)
# table   OUT/looped.md: every model and seed, its curve; what shapes lose and gain at equal parameters and equal work;
#         gates against what they have to be better than. OUT/looped.html: all curves
# What is done is not done again, so that a call that was ended goes on with the next one.
#
# A model is called MIXER-WIDTH-SHAPE, as in mamba2-256-4x4, for every one of MIXERS (gated_deltanet) and WIDTHS (64;
# text: 128): a mixer of mesa-trainer, or hybrid, Mamba-2 with one attention layer in four, the last. A block is a mixer
# with heads of 64 (two heads at widths below), and an MLP of twice the width.
#
# Needs mesa-trainer (MESA_BUILD, default build, is its folder) and for the table python3. DEVICE (cpu), PRECISION
# (float32), RATES (0.001), SEEDS (1), STEPS (6000; hop: 1200, text: 450), BATCH (examples a step: 64; tokens of text:
# 4096), CONTEXT (of text: 256), EXAMPLES (2000000), CURVE (points of a task's curve: 10), ENTROPY (of stage 1: 0.05),
# WINDOWS and EXIT_TOKENS (of the tables of exits: 0, all; 512), PARALLEL (as many runs at once as suit the device),
# MAX_SECONDS (0, none) of a sweep, READERS (1; evaluations at once, beside which no time of a token is to be quoted),
# SETTINGS ("section.key=value ..." of all runs).
set -euo pipefail

if [ $# -lt 3 ] || [[ " hop mano text " != *" $2 "* ]]; then
    echo "usage: tests/bench/looped.sh OUT hop|mano|text SHAPE..." >&2
    exit 2
fi
fail() {
    echo "looped.sh: $1" >&2
    exit 2
}
here=$(cd "$(dirname "$0")" && pwd)
task=$2
export OUT=$1 TRAINER=${MESA_BUILD:-build}/mesa-trainer DEVICE=${DEVICE:-cpu} TASKS='' ITEMS=0
shift 2
modulus=${MODULUS:-7} operations=${OPERATIONS:-3} hops=${HOPS:-1,2,4} length=${LENGTH:-64}
read -ra seeds <<<"${SEEDS:-1}"
# shellcheck disable=SC2034 # training.sh reads them
config=$here/looped.ini wider=${WIDER:-1} first_seeds=${#seeds[@]}
# shellcheck disable=SC2034
read -ra rates <<<"${RATES:-0.001}"
phases=${PHASES:-search train eval table}
[ -x "$TRAINER" ] || fail "no $TRAINER; set MESA_BUILD"
for phase in $phases; do
    [[ " search train eval gates table " == *" $phase "* ]] || fail "no phase $phase"
done

case $task in
hop)
    steps=${STEPS:-1200} rows=${BATCH:-64} context=$((length + 1)) vocabulary=7 width=64
    export DATA=$OUT/hop-$length-$hops EVALS=''
    for part in ${hops//,/ }; do EVALS+="valid-$part:$context "; done
    making=(p-hop --vocab 7 --length "$length" --hops "$hops" --train-every-letter --valid-examples 1000)
    valid=valid-${hops##*,}
    ;;
mano)
    steps=${STEPS:-6000} rows=${BATCH:-64} context=$((2 * operations + 4)) width=64
    vocabulary=$((modulus + 5 + operations))
    export DATA=$OUT/mano-$modulus-$operations EVALS=''
    making=(mano --modulus "$modulus" --operations "$operations" --train-answers-only)
    valid=valid
    ;;
text)
    steps=${STEPS:-450} context=${CONTEXT:-256} width=128
    vocabulary=${VOCABULARY:-8192}
    rows=$((${BATCH:-4096} / context))
    export DATA=${DATA:?the folder of the shards of text} EVALS="valid:$context"
    valid=valid
    ;;
esac
export BATCH_TOKENS=$((rows * context)) CONTEXT=$context WINDOWS=${WINDOWS:-0} EXIT_TOKENS=${EXIT_TOKENS:-512}

models=()
for width in ${WIDTHS:-$width}; do
    for mixer in ${MIXERS:-gated_deltanet}; do
        for shape; do
            [[ $shape =~ ^[1-9][0-9]*x[1-9][0-9]*$ ]] || fail "\"$shape\" is no shape such as 4x6"
            [ "$mixer" != hybrid ] || [ $((${shape%x*} % 4)) = 0 ] || fail "a hybrid has a multiple of 4 blocks"
            models+=("$mixer-$width-$shape")
        done
    done
done
for model in ${GATED:-}; do
    [[ " ${models[*]} " == *" $model "* ]] || fail "no model $model (of ${models[*]})"
done
[[ $phases != *gates* ]] || [ "$task" = text ] || fail "gates are trained on text"

# shellcheck source=tests/bench/training.sh
. "$here/training.sh"
of_text=()
[ "$task" != text ] || of_text=(data.tokenizer="$DATA/tokenizer" model.tie_word_embeddings=true)
set_all data.train="$DATA/train" data.valid="$DATA/$valid" data.context="$context" \
    model.vocab_size="$vocabulary" model.max_position_embeddings="$context" train.device="$DEVICE" \
    train.precision="${PRECISION:-float32}" train.batch_tokens="$BATCH_TOKENS" train.micro_rows="$rows" \
    "${of_text[@]}"

layers() { # MIXER COUNT: a JSON list
    local name i
    for i in $(seq "$2"); do
        case $1-$((i % 4)) in
        hybrid-0) name=attention ;;
        hybrid-*) name=mamba2 ;;
        *) name=$1 ;;
        esac
        echo "\"$name\""
    done | paste -sd, | sed 's/.*/[&]/'
}

variant() { # MODEL NAME
    local mixer width shape heads
    IFS=- read -r mixer width shape <<<"$1"
    heads=$((width < 128 ? 2 : width / 64))
    cat <<-END_OF_SECTION
	[variant $2]
	model.layer_types = $(layers "$mixer" "${shape%x*}")
	model.num_hidden_layers = ${shape%x*}
	model.num_loops = ${shape#*x}
	model.hidden_size = $width
	model.intermediate_size = $((2 * width))
	model.head_dim = $((width / heads))
	model.num_heads = $([[ $mixer =~ mamba2|hybrid ]] && echo $((2 * heads)) || echo "$heads")
	model.attn = {"num_heads": $heads}
	model.expand_v = 1
	model.state_size = 64
	END_OF_SECTION
}

make_task() {
    [ ! -e "$DATA" ] || return 0
    rm -rf "$DATA.part"
    "$TRAINER" task "${making[@]}" --out "$DATA.part" --examples "${EXAMPLES:-2000000}" >"$OUT/task.txt"
    mv "$DATA.part" "$DATA"
}

# STAGE STEPS FROM ENDING OPTION...: of all models of GATED that have ended in FROM/MODEL+ENDING.
train_gates() {
    local model from list=$OUT/$1.ini
    : >"$list"
    for model in ${GATED:-}; do
        from=$(newest "$3/$model$4")
        { is_done "$3/$model$4" && [ -e "$from" ]; } || { echo "looped.sh: $model: nothing in $3" >&2; continue; }
        { variant "$model" "$model"; echo "train.warm_start = $from"; } >>"$list"
        [ "$1" = stage2 ] || tried "$model" | awk 'NR == 1 { print "optim.lr = " 0.3 * $2 }' >>"$list"
    done
    [ ! -s "$list" ] || sweep "$2" "$list" "$OUT/$1" --set model.exit_gate=true --set train.eval_every="$2" \
        --set train.seed="${seeds[0]}" "${@:5}"
}

# A run of a stage: its table of exits. A trained model: its loss on the same windows.
read_exits() { # RUN NAME
    local to=$OUT/exits/$2 what=()
    [ ! -e "$to.md" ] || return 0
    [[ $2 == trained-* ]] || what=(--name "$2" --out "$to.json" --exit-table --exit-tokens "$EXIT_TOKENS")
    "$TRAINER" eval "$(newest "$1")" --data "$DATA/valid" --context "$CONTEXT" --windows "$WINDOWS" \
        --batch-tokens "$BATCH_TOKENS" --device "$DEVICE" "${what[@]}" >"$to.part"
    mv "$to.part" "$to.md"
}
export -f read_exits

gates() {
    local run model name
    mkdir -p "$OUT/exits"
    train_gates stage1 $(((steps + 3) / 4)) "$OUT/train" ",seed=${seeds[0]}" \
        --set loop.loss=expected --set loop.entropy="${ENTROPY:-0.05}"
    train_gates stage2 $(((steps + 7) / 8)) "$OUT/stage1" '' --set loop.loss=next --set optim.lr=0.003
    for model in ${GATED:-}; do
        for run in "$OUT"/{stage1,stage2}/"$model" "$OUT/train/${model%x*}"x*",seed=${seeds[0]}"; do
            name=$(basename "$(dirname "$run")" | sed s/^train/trained/)-$(basename "${run%,*}")
            { is_done "$run" && [ -e "$(newest "$run")" ] && printf '%s\0' "$run" "$name"; } || true
        done
    done | xargs -0 -r -P "${READERS:-1}" -n 2 bash -euc 'read_exits "$@"' read_exits
}

table() {
    python3 "$here/looped_table.py" "$OUT" "$task" "${models[@]}" | tee "$OUT/looped.md"
    local sweep log parts=()
    for sweep in "$OUT"/{search,train,stage1,stage2}; do
        [ ! -e "$sweep" ] || parts+=("$sweep")
    done
    for log in "$OUT"/{train,stage1,stage2}/*/log.jsonl; do
        [ ! -s "$log" ] || parts+=("${log%/log.jsonl}")
    done
    "$TRAINER" report "${parts[@]}" --title 'Looped models' --out "$OUT/looped.html" >&2
}

mkdir -p "$OUT"
[ "$task" = text ] || make_task
if [ "$task" = text ]; then
    curve=(--set train.eval_every="$steps")
else
    curve=(--set train.eval_every=$(((steps + ${CURVE:-10} - 1) / ${CURVE:-10})) --set train.stop_accuracy=0.99)
fi
for phase in $phases; do
    case $phase in
    train) train "${curve[@]}" >&2 ;;
    eval) [ -z "$EVALS" ] || evaluate ;;
    table) table ;;
    *) "$phase" >&2 ;;
    esac
done
