#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# tests/bench/looped.sh at a size of seconds: rates that are searched, what is done once and gone on with, what the
# tables say, gates behind both stages.
# shellcheck source=tests/shell.sh
. "$(dirname "$0")/../shell.sh"
need_built mesa-trainer
need_installed python3
export MESA_BUILD=$build OMP_NUM_THREADS=1 PARALLEL=1
trainer=$build/mesa-trainer looped=$source_dir/tests/bench/looped.sh
cd "$folder" || exit 1

column() { # FILE MODEL SEED HEAD: the cell of the first table
    awk -F' *[|] *' -v model="$2" -v seed="$3" -v head="$4" '
        NR == 1 { for (i = 1; i <= NF; i++) { if ($i == head) at = i; if ($i == "seed") by = i } }
        $2 == model && $by == seed { print $at; exit }' "$1"
}
last() { # KEY RUN
    grep -oE "\"$1\":[0-9.e+-]+" "$2/log.jsonl" | tail -n 1 | cut -d: -f2
}
refused() { # WORDS ARGUMENT...
    local words=$1
    shift
    "$looped" "$@" >told 2>&1 && fail "accepted: $*"
    grep -qF "$words" told || fail "$*: $(cat told)"
}

# ---- arithmetic: rates, seeds, curves
mano() { # OUT
    MODULUS=3 OPERATIONS=2 EXAMPLES=800 STEPS=16 BATCH=8 WIDTHS=32 CURVE=4 RATES="0.001 0.002" SEEDS="1 2" \
        "$looped" "$1" mano 1x1 1x2 >told 2>err
}
mano a || fail "mano: status $?: $(tail -n 3 err)"
same 'a model and seed a row' 6 "$(grep -c '^|' a/looped.md)"
for model in gated_deltanet-32-1x1 gated_deltanet-32-1x2; do
    best=$(for run in a/search/$model@*; do echo "$(last valid_loss "$run") ${run##*@}"; done | sort -g | head -n 1)
    best=${best##* }
    for seed in 1 2; do
        found=$(column a/looped.md $model $seed 'learning rate')
        same "$model: the rate of least loss" "${best%%,*}" "${found%% *}"
        same "$model, seed $seed: right at the end" "$(awk -v x="$(last valid_accuracy "a/train/$model,seed=$seed")" \
            'BEGIN { printf "%.1f", 100 * x }')" "$(column a/looped.md $model $seed 'at the end')"
        same 'points on the way' 3 "$(column a/looped.md $model $seed 'right, %, on the way' | wc -w)"
    done
done
same 'loops have no parameters' "$(column a/looped.md gated_deltanet-32-1x1 1 parameters)" \
    "$(column a/looped.md gated_deltanet-32-1x2 1 parameters)"
grep -q 'gated_deltanet-32-1x2,seed=2' a/looped.html || fail 'no curve on the page'
find a -name '*.jsonl' -newer a/looped.md >before
mano a || fail "again: status $?"
find a -name '*.jsonl' -newer a/looped.md | cmp -s - before || fail 'something was done again'

# ---- cut at once, then gone on with: the same numbers
MAX_SECONDS=0.000001 mano b
mano b || fail "gone on with: status $?: $(tail -n 3 err)"
same 'the same curves' "$(cut -d'|' -f2-7,9- a/looped.md)" "$(cut -d'|' -f2-7,9- b/looped.md)"

# ---- hops: every part of the validation
HOPS=1,2 LENGTH=16 EXAMPLES=500 STEPS=4 BATCH=8 WIDTHS=32 "$looped" hop hop 1x2 >told 2>err ||
    fail "hop: status $?: $(tail -n 3 err)"
same 'parts' 2 "$(column hop/looped.md gated_deltanet-32-1x2 1 'part by part, %' | wc -w)"

# ---- text: shapes against each other, both stages of gates
python3 - <<'PROGRAM'
import random
draw, words = random.Random(3), 'the a river forest king ran saw old under stone and of light never rain'.split()
for name, count in (('train', 60), ('valid', 8)):
    with open(name + '.txt', 'w') as out:
        out.write('\n<|endoftext|>\n'.join(' '.join(draw.choices(words, k=60)) for _ in range(count)) + '\n')
PROGRAM
mkdir data
"$trainer" tokenizer --vocab 300 --out data/tokenizer train.txt >told 2>&1 || fail "tokenizer: $(cat told)"
for name in train valid; do
    "$trainer" pack --tokenizer data/tokenizer --out data/$name $name.txt >told 2>&1 || fail "pack: $(cat told)"
done
text() {
    DATA=data MIXERS="hybrid mesa_net" VOCABULARY=300 CONTEXT=32 BATCH=128 STEPS=8 WIDTHS=32 GATED=hybrid-32-4x2 \
        PHASES="search train eval gates table" "$looped" text text "$@" >told 2>err
}
text 4x1 4x2 8x1 || fail "text: status $?: $(tail -n 3 err)"
for model in hybrid-32-4x1 hybrid-32-8x1 mesa_net-32-4x2; do
    same "$model: loss" "$(printf %.4f "$(last valid_loss "text/train/$model,seed=1")")" \
        "$(column text/looped.md $model 1 loss)"
done
same 'shapes that are compared' 'hybrid-32-4x2 mesa_net-32-4x2' \
    "$(grep -E '^[|] [a-z].* [|] [-+][0-9.]+ .* [|] [-+][0-9.]+ ' text/looped.md | grep -v gate | cut -d' ' -f2 |
        paste -sd' ')"
loss_of() {
    "$trainer" eval "text/train/hybrid-32-$1,seed=1"/step-* --data data/valid --context 32 |
        sed -nE 's/^loss +([0-9.]+).*/\1/p'
}
for stage in 1 2; do
    grep -q "^Gate of hybrid-32-4x2, stage $stage\. .*: 4x1 $(loss_of 4x1); 4x2 $(loss_of 4x2)\.$" text/looped.md ||
        fail "no gate of stage $stage: $(grep ^Gate text/looped.md)"
done
same 'thresholds of both stages' 18 "$(grep -c '^| gate 0' text/looped.md)"
same 'what stands in the row of a gate' 0 "$(grep -c '^| matched' text/looped.md)"
same 'stage 2 goes on from stage 1' text/stage1/hybrid-32-4x2/step-00000002 \
    "$(sed -n 's/^train.warm_start = //p' text/stage2.ini)"

# ---- what is no shape, no phase, no model
refused 'is no shape' c mano 4
refused 'usage' c sums 4x1
MIXERS=hybrid refused 'multiple of 4' c mano 4x1 2x1
PHASES="train nothing" refused 'no phase nothing' c mano 4x1
PHASES=gates refused 'on text' c mano 4x1
GATED=mamba2-32-4x1 refused 'no model mamba2-32-4x1' c mano 4x1
[ ! -e c ] || fail 'something was made of what is refused'
exit $((failures > 0))
