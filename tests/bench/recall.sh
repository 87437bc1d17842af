#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Which mixers learn to look up, at any size and on any device: multi-query associative recall by width, with and
# without short convolutions, and the six tasks of the mechanistic design suite. mqar.sh is the first on a CPU.
#
#   tests/bench/recall.sh OUT mqar|mad [PHASE...]      (data search train table; all)
#
# mqar: VOCABULARY (8192) ids, LENGTH (256) of them an example, PAIRS (4,8,16,32,64) mixed, validated on the most pairs;
# a model is called MIXER-WIDTH-conv or MIXER-WIDTH-plain, of WIDTHS (64 128 256); each at every learning rate of RATES
# ("0.001 0.003") on a quarter of the steps, then at its best, once for each of SEEDS ("1 2 3").
# mad: in-context, noisy and fuzzy recall, selective copying, compression and memorization; a model is called
# TASK-MIXER, of width 128, each at every rate of RATES ("0.0005 0.002"), once for each of SEEDS (1).
# A model is two blocks of a mixer with heads of 64 and an MLP of twice the width. The mixers are those of ranking.sh in
# mesa_net's block. Without convolution they see one id; attention knows none, in its place a first layer sees 4 ids.
#
# data, search (mqar), train; table: OUT/recall.md, answers that are right by model. A run ends when 99 % are. What is
# done is not done again, so that a call that was ended goes on with the next one, and OUT may lie on another machine.
#
# Needs mesa-trainer (MESA_BUILD, default build, is its folder). DEVICE (cpu), PRECISION (float32), MIXERS ("mesa gdn
# delta-net gla-rival mamba2-rival attention"), TASKS_OF_MAD (all six), STEPS (2000), BATCH (examples a step: 64; mad:
# 128), EXAMPLES (100000; mad: 12800), PARALLEL (as many runs at once as suit the device), MAX_SECONDS (0, none) of a
# sweep, SETTINGS ("section.key=value ..." of all runs).
set -euo pipefail

if [ $# -lt 2 ] || [[ " mqar mad " != *" $2 "* ]]; then
    echo "usage: tests/bench/recall.sh OUT mqar|mad [data|search|train|table|all]..." >&2
    exit 2
fi
fail() {
    echo "recall.sh: $1" >&2
    exit 2
}
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
OUT=$(cd "$1" && pwd)
[ -x "${MESA_BUILD:-build}/mesa-trainer" ] || fail "no ${MESA_BUILD:-build}/mesa-trainer; set MESA_BUILD"
TRAINER=$(cd "${MESA_BUILD:-build}" && pwd)/mesa-trainer
export OUT TRAINER DEVICE=${DEVICE:-cpu} DATA=. EVALS='' TASKS='' ITEMS=0 BATCH_TOKENS=0
kind=$2
shift 2
phases=${*:-all}
[ "$phases" != all ] || phases="data search train table"
for phase in $phases; do
    [[ " data search train table " == *" $phase "* ]] || fail "no phase $phase"
done
read -ra mixers <<<"${MIXERS:-mesa gdn delta-net gla-rival mamba2-rival attention}"
read -ra tasks <<<"${TASKS_OF_MAD:-in-context-recall noisy-recall fuzzy-recall selective-copy compression memorization}"
read -ra widths <<<"${WIDTHS:-64 128 256}"
vocabulary=${VOCABULARY:-8192} length=${LENGTH:-256} pairs=${PAIRS:-4,8,16,32,64}
steps=${STEPS:-2000}
models=()
case $kind in
mqar)
    default_rates="0.001 0.003" default_seeds="1 2 3"
    for mixer in "${mixers[@]}"; do
        for width in "${widths[@]}"; do models+=("$mixer-$width-conv" "$mixer-$width-plain"); done
    done
    ;;
mad)
    default_rates="0.0005 0.002" default_seeds=1
    for name in "${tasks[@]}"; do
        for mixer in "${mixers[@]}"; do models+=("$name-$mixer"); done
    done
    ;;
esac
read -ra rates <<<"${RATES:-$default_rates}"
read -ra seeds <<<"${SEEDS:-$default_seeds}"
# shellcheck disable=SC2034 # training.sh reads them
wider=0 config=$OUT/recall.ini
# shellcheck source=tests/bench/training.sh
. "$here/training.sh"

# MIXER CONV: what the two layers mix with.
layers() {
    local own=\"recurrence\" first='' extra=''
    case $1 in
    mesa) own='"mesa_net"' ;;
    gdn) extra='{"decay": "scalar", "update": "delta"}' ;;
    delta-net) extra='{"decay": "none", "update": "delta"}' ;;
    gla-rival) extra='{"decay": "scalar", "update": "add", "input_gate": true}' ;;
    mamba2-rival) extra='{"decay": "scalar", "update": "add"}' ;;
    attention)
        own='"attention"'
        [ "$2" = plain ] || first='{"mixer": "attention", "window_size": 4}'
        ;;
    *) fail "no mixer $1" ;;
    esac
    echo "model.layer_types = [${first:-$own}, $own]"
    [ -z "$extra" ] || echo "model.recurrence = $extra"
    [ "$2" != plain ] || [ "$1" = attention ] || echo "model.conv_size = 1"
}

width_keys() { # WIDTH
    printf 'model.%s\n' "hidden_size = $1" "num_heads = $(($1 / 64))" "intermediate_size = $((2 * $1))"
}

# TASK: its ids and the tokens of an example.
shape() {
    case $1 in
    in-context-recall | fuzzy-recall) echo 16 128 ;;
    noisy-recall) echo 32 128 ;;
    selective-copy) echo 16 256 ;;
    compression) echo 16 63 ;; # 31 tokens and the mark, read and answered
    memorization) echo 256 32 ;;
    *) fail "no task $1" ;;
    esac
}

variant() { # MODEL NAME
    local model=$1 mixer name ids tokens
    echo "[variant $2]"
    if [ "$kind" = mqar ]; then
        mixer=${model%-*-*}
        layers "$mixer" "${model##*-}"
        model=${model%-*}
        width_keys "${model##*-}"
        return
    fi
    for name in "${tasks[@]}"; do
        mixer=${model#"$name-"}
        [ "$mixer" = "$model" ] || break
    done
    read -r ids tokens <<<"$(shape "$name")"
    layers "$mixer" conv
    width_keys 128
    printf '%s\n' "model.vocab_size = $ids" "data.train = $name/train" "data.valid = $name/valid" \
        "data.context = $tokens" "train.batch_tokens = $((${BATCH:-128} * tokens))"
}

# Paths in what a run was made with are relative to OUT, so that it is the same run elsewhere.
cat >"$config" <<END
[model]
model_type = mesa_net
vocab_size = $vocabulary
num_hidden_layers = 2
head_dim = 64
tie_word_embeddings = true
initializer_range = 0.1

[data]
train = mqar/train
valid = mqar/valid-${pairs##*,}
context = $length

[optim]
weight_decay = 0.1
schedule = wsd
decay_fraction = 0.3

[train]
batch_tokens = $((${BATCH:-64} * length))
micro_rows = ${BATCH:-128}
eval_rows = 512
save_every = 0
keep = 1
stop_accuracy = 0.99
END
set_all train.device="$DEVICE" train.precision="${PRECISION:-float32}" train.eval_every=$(((steps + 9) / 10))

make_data() { # NAME TASK OPTION...: once
    local name=$1 task=$2
    shift 2
    [ ! -e "$name/train-00000.tok" ] || return 0
    rm -rf "$name" "$name.part"
    "$TRAINER" task "$task" --out "$name.part" "$@" >&2 && mv "$name.part" "$name"
}

make_all() {
    local name size=()
    if [ "$kind" = mqar ]; then
        make_data mqar mqar --vocab "$vocabulary" --length "$length" --pairs "$pairs" --examples "${EXAMPLES:-100000}"
        return
    fi
    for name in "${tasks[@]}"; do
        size=()
        [ "$name" = memorization ] || size=(--examples "${EXAMPLES:-12800}")
        make_data "$name" "$name" "${size[@]}"
    done
}

# All rates in one sweep.
train_mad() {
    local model
    printf '[sweep]\nseeds = %s\n[grid]\noptim.lr = %s\n' "${seeds[*]}" "${rates[*]}" >train.ini
    for model in "${models[@]}"; do variant "$model" "$model"; done >>train.ini
    sweep "$steps" train.ini "$OUT/train"
}

# Lines "MODEL ACCURACY STEP" of the runs that ended.
ended() {
    local run
    for run in "$OUT"/train/*,seed=*/run.json; do
        grep -qs '"end": *"done"' "$run" || continue
        run=${run%/run.json}
        echo "$(basename "$run") $(number valid_accuracy "$run/run.json") $(number step "$run/run.json")"
    done
}

# Reads those lines: a row a mixer, a column a task or width. Of several learning rates the best one's; of seeds the
# mean, behind ± the deviation, and the mean steps that were taken.
table() {
    ended | awk -v kind="$kind" -v tasks="${tasks[*]}" -v widths="${widths[*]}" -v mixers="${mixers[*]}" '
        {
            model = $1
            sub(/,.*/, "", model)
            rate = match($1, /lr=[^,]*/) ? substr($1, RSTART, RLENGTH) : ""
            key = model SUBSEP rate
            n[key]++; sum[key] += 100 * $2; square[key] += 1e4 * $2 * $2; step[key] += $3
            rates[rate]
        }
        function cell(model,    rate, key, best, mean, off) {
            best = ""
            for (rate in rates) {
                key = model SUBSEP rate
                if (n[key] && (best == "" || sum[key] / n[key] > sum[best] / n[best])) best = key
            }
            if (best == "") return "-"
            mean = sum[best] / n[best]
            off = n[best] > 1 ? (square[best] - n[best] * mean * mean) / (n[best] - 1) : 0
            return sprintf("%.1f%s (%d)", mean, n[best] > 1 ? sprintf(" ± %.1f", sqrt(off > 0 ? off : 0)) : "",
                step[best] / n[best])
        }
        END {
            columns = split(kind == "mad" ? tasks : widths, column, " ")
            rows = split(mixers, mixer, " ")
            forms = split(kind == "mad" ? "-" : "-conv -plain", form, " ")
            printf "| right, %% (steps) |"
            for (c = 1; c <= columns; c++) printf " %s |", column[c]
            printf "\n|---|"
            for (c = 1; c <= columns; c++) printf "---|"
            printf "\n"
            for (r = 1; r <= rows; r++)
                for (f = 1; f <= forms; f++) {
                    printf "| %s%s |", mixer[r], kind == "mad" ? "" : form[f]
                    for (c = 1; c <= columns; c++)
                        printf " %s |", cell(kind == "mad" ? column[c] "-" mixer[r] : mixer[r] "-" column[c] form[f])
                    printf "\n"
                }
        }'
}

cd "$OUT"
for phase in $phases; do
    case $phase in
    data) make_all ;;
    search) [ "$kind" = mad ] || search >&2 ;;
    train)
        # shellcheck disable=SC2119 # no options
        if [ "$kind" = mad ]; then train_mad; else train; fi >&2
        ;;
    table) table | tee recall.md ;;
    esac
done
