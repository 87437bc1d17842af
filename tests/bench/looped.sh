#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# What loops buy: shapes N x R (N blocks that run R times) of one mixer, trained alike on a CPU in minutes.
# tests/bench/RESULTS.md has the hypotheses and what came out.
#
#   tests/bench/looped.sh FOLDER hop|mano|text SHAPE...     (1x1 1x4 1x8; 4x1 4x6 24x1)
#
# hop: p-hop induction over 64 letters of 4, examples of 1, 2 and 4 hops mixed, the target at every letter that has one;
# scored at the last. mano: arithmetic modulo MODULUS (7) in prefix order, 1 to OPERATIONS (3) in training, scored with
# all of them. text: the shards DATA and VALID of `mesa-trainer pack` (VOCABULARY 4096, TOKENIZER the folder of their
# tokenizer); scored by loss over VALID. A task's run ends when 99 % of its hardest part are right, a text's with its
# steps.
#
# Needs only mesa-trainer: MESA_BUILD (default build) is its folder. MIXER (gated_deltanet), WIDTH (128; mano: 64), RATE
# (0.003), SEED (1), STEPS (1200), RUN_SECONDS a call and run (600): what they cut goes on with the next call. Blocks
# have 2 heads and an MLP of twice the width. Everything goes to FOLDER. Prints one Markdown table.
set -euo pipefail

if [ $# -lt 3 ] || [[ " hop mano text " != *" $2 "* ]]; then
    echo "usage: tests/bench/looped.sh FOLDER hop|mano|text SHAPE..." >&2
    exit 2
fi
folder=$1 task=$2
shift 2
trainer=${MESA_BUILD:-build}/mesa-trainer
mixer=${MIXER:-gated_deltanet} rate=${RATE:-0.003} steps=${STEPS:-1200} seed=${SEED:-1}
modulus=${MODULUS:-7} operations=${OPERATIONS:-3}
[ -x "$trainer" ] || { echo "looped.sh: no $trainer; set MESA_BUILD" >&2; exit 2; }
for shape; do
    [[ $shape =~ ^[1-9][0-9]*x[1-9][0-9]*$ ]] || { echo "looped.sh: \"$shape\" is no shape such as 4x6" >&2; exit 2; }
done
mkdir -p "$folder"

make_task() { # NAME OPTION...
    local name=$1
    shift
    rm -rf "$data.part"
    [ -d "$data" ] || { "$trainer" task "$name" --out "$data.part" --seed "$seed" "$@" >&2 && mv "$data.part" "$data"; }
}

case $task in
hop)
    data=$folder/hop-$seed width=${WIDTH:-128} vocabulary=7 context=65 tokens=4160 parts="1 2 4" hardest=4
    make_task p-hop --vocab 7 --length 64 --hops 1,2,4 --train-every-letter --examples 200000 --valid-examples 1000
    train=$data/train valid=$data/valid-$hardest
    ;;
mano)
    data=$folder/mano-$modulus-$operations-$seed width=${WIDTH:-64}
    vocabulary=$((modulus + 5 + operations)) context=$((2 * operations + 4)) parts=""
    tokens=$((256 * context))
    make_task mano --modulus "$modulus" --operations "$operations" --train-answers-only --examples 400000
    train=$data/train valid=$data/valid
    ;;
text)
    train=${DATA:?shards of text} valid=${VALID:?shards of text} width=${WIDTH:-128} vocabulary=${VOCABULARY:-4096}
    context=256 tokens=4096 parts=""
    ;;
esac

run_of() { # SHAPE
    echo "$folder/$task-$(basename "$(dirname "$train")")-$mixer-$width-$rate-$seed-$1"
}

settings() { # SHAPE
    cat <<END
[model]
model_type = $mixer
vocab_size = $vocabulary
hidden_size = $width
num_hidden_layers = ${1%x*}
num_loops = ${1#*x}
num_heads = 2
head_dim = $((width / 2))
$([ "$mixer" != gated_deltanet ] || echo expand_v = 1)
intermediate_size = $((2 * width))
tie_word_embeddings = $([ "$task" = text ] && echo true || echo false)
max_position_embeddings = $context

[data]
train = $train
valid = $valid
${TOKENIZER:+tokenizer = $TOKENIZER}
context = $context

[optim]
lr = $rate
min_lr_ratio = 0.1
warmup_steps = 50
schedule = wsd
decay_fraction = 0.2

[train]
seed = $seed
steps = $steps
batch_tokens = $tokens
micro_rows = $((tokens / context))
eval_every = 100
eval_rows = 500
save_every = 0
keep = 1
$([ "$task" = text ] || echo stop_accuracy = 0.99)
END
}

number() { # KEY TEXT: the number behind "KEY" in a report
    sed -nE "s/^$1 +([0-9.,]+).*/\1/p" <<<"$2" | tr -d ,
}

last() { # KEY FILE: its last value in a log
    grep -oE "\"$1\": ?[0-9.e+-]+" "$2" | tail -n 1 | sed 's/.*: *//'
}

scores() { # CHECKPOINT: a column a validation part
    local part
    if [ -z "$parts" ]; then
        number "$([ "$task" = text ] && echo loss || echo right)" "$("$trainer" eval "$1" --data "$valid")"
        return
    fi
    for part in $parts; do
        number right "$("$trainer" eval "$1" --data "$data/valid-$part")"
    done
}

finished() { # RUN
    grep -qs 'the accuracy is reached' "$1.log" || [ "$(last step "$1/log.jsonl" 2>/dev/null)" = "$steps" ]
}

run_one() { # SHAPE
    local run checkpoint row
    run=$(run_of "$1")
    if ! finished "$run"; then
        settings "$1" >"$run.ini"
        "$trainer" train --config "$run.ini" --out "$run" --resume --max-seconds "${RUN_SECONDS:-600}" \
            >>"$run.log" 2>&1 || { echo "looped.sh: $1: $(tail -n 1 "$run.log")" >&2; return; }
    elif [ -e "$run.row" ]; then
        return
    fi
    checkpoint=$(printf '%s\n' "$run"/step-* | tail -n 1)
    row="| $1 | $(number parameters "$("$trainer" inspect "$checkpoint" --summary)") | $(last step "$run/log.jsonl")"
    row+=" | $(last seconds "$run/log.jsonl" | xargs printf %.0f)"
    row+=" | $(scores "$checkpoint" | paste -sd' ' | sed 's/ / | /g') |"
    echo "$row" >"$run.row"
    echo "$row" >&2
}

for shape; do
    run_one "$shape"
done
head="| shape | parameters | steps | seconds |" rule="|---|---|---|---|"
for part in ${parts:-$([ "$task" = text ] && echo loss || echo all)}; do
    [ "$part" = loss ] && head+=" loss |" || head+=" $part, % |"
    rule+="---|"
done
printf '%s\n' "$head" "$rule"
for shape; do
    [ ! -e "$(run_of "$shape").row" ] || cat "$(run_of "$shape").row"
done
