#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# tests/bench/gradients.sh, curves.sh, solver.sh and recall.sh at a size of seconds, on the device that pretends: what
# they run, that they run it once, and their tables, where it matters on results that were made up.
# shellcheck source=tests/shell.sh
. "$(dirname "$0")/../shell.sh"
need_built mesa-trainer
export MESA_BUILD=$build OMP_NUM_THREADS=1
trainer=$build/mesa-trainer bench=$source_dir/tests/bench
[ -d "$MESA_BUILD/tests/device" ] || { echo "SKIP: no device that pretends is built"; exit 77; }
export MESA_LIBRARY_DIR=$MESA_BUILD/tests/device DEVICE=cuda:0
cd "$folder" || exit 1

script() { # NAME ARGUMENTS...: its table in told
    "$bench/$1" "${@:2}" >told 2>err || fail "$*: status $?: $(tail -n 5 err)"
}
cell() { # ROW COLUMN: of told, rows by their first words
    awk -F' *[|] *' -v row="$1" -v column="$2" '$2 == row { print $column }' told
}

# ---- data
awk 'BEGIN { srand(3); split("the a river forest king ran saw old under stone and of light never rain", w, " ")
             for (i = 0; i < 60; i++) { for (j = 0; j < 60; j++) printf "%s ", w[1 + int(15 * rand())]
                                        print "\n<|endoftext|>" } }' >text.txt
mkdir data
"$trainer" tokenizer --vocab 300 --out data/tokenizer text.txt >told 2>&1 || fail "tokenizer: $(cat told)"
for name in train valid; do
    "$trainer" pack --tokenizer data/tokenizer --out data/$name text.txt >told 2>&1 || fail "pack: $(cat told)"
done
small="model.vocab_size=300 data.context=64 train.batch_tokens=256 train.micro_rows=2"

# ---- gradients
export SETTINGS=$small
gradients() {
    MODELS="gdn attention" STEPS=3 CONTEXT=64 BATCHES=4 WIDTH=64 LAYERS=1 script gradients.sh data gradients "$@"
}
gradients
same 'rows of gradients' 12 "$(wc -l <told)"
same 'start and end' 'step-00000001 step-00000003' \
    "$(printf '%s ' gradients/gdn-[03]/step-* | sed 's/[^ ]*\///g; s/ $//')"
cmp -s gradients/gdn-0/step-00000001/model.safetensors gradients/gdn-3/step-00000003/model.safetensors &&
    fail 'the trained model is its start'
largest=$(awk '/^error of a tensor, largest/ { print $6 }' gradients/gdn-3-bf16.txt)
same 'largest error' "$largest (5e-02)" "$(cell 'gdn, 3, bf16' 4)"
awk "BEGIN { exit !(0 < $largest) }" || fail "the devices do not differ"
grep -q '8 rows of 64, 4 at once' gradients/attention-3-pieces.txt || fail 'no pieces'
before=$(find gradients -type f | sort | xargs cat | sha256sum)
gradients
same 'gradients again' "$before" "$(find gradients -type f | sort | xargs cat | sha256sum)"
sed -i 's/^1 - cosine.*/1 - cosine, largest  nan (1e-03)  OUTSIDE/' gradients/gdn-0-bf16.txt
gradients table
same 'outside' 'nan (1e-03) OUTSIDE' "$(cell 'gdn, 0, bf16' 5)"

# ---- curves
SETTINGS+=" model.hidden_size=32 model.num_heads=1 model.head_dim=32 model.intermediate_size=32"
MODELS="mesa attention" STEPS=5 PARALLEL=2 script curves.sh data curves
same 'runs of curves' 'bf16 bf16 bf16 bf16 float32 float32 reference reference' \
    "$(find curves -name run.json | cut -d/ -f2 | sort | paste -sd' ')"
loss=$(awk -F'[:,]' '/"loss"/ { printf "%.4f", $2 }' 'curves/reference/mesa,seed=1/run.json')
same 'loss of the reference' "$loss" "$(cell mesa 3)"
[[ $(cell attention 6) =~ ^[0-9.]+,\ [0-9.]+$ ]] || fail "seeds: $(cat told)"
grep -q 'bf16/attention,seed=2' curves/curves.html || fail 'no page of curves'
mv data elsewhere && mkdir data # what was made stays what it is wherever the data lie
MODELS="mesa attention" STEPS=5 PARALLEL=2 script curves.sh elsewhere curves
grep -q 'at once' err && fail "curves again: $(cat err)"
made() { # MODEL PART SEED LOSS
    mkdir -p "curves/$2/$1,seed=$3"
    printf '{\n  "end": "done",\n  "loss": %s\n}\n' "$4" >"curves/$2/$1,seed=$3/run.json"
}
for part in reference float32; do made gdn $part 1 5.0; made mamba2 $part 1 5.0; done
made gdn bf16 1 5.1; made gdn bf16 2 4.95
made mamba2 bf16 1 4.9; made mamba2 bf16 2 4.86
MODELS="gdn mamba2" script curves.sh elsewhere curves table
same 'their spread' '0.1500 0.0400' "$(cell gdn 7) $(cell mamba2 7)"
same 'verdicts' '+0.1000 yes -0.1000 no' "$(cell gdn 8) $(cell gdn 9) $(cell mamba2 8) $(cell mamba2 9)"
rm -r 'curves/bf16/gdn,seed=2'
MODELS="gdn" script curves.sh elsewhere curves table
same 'a seed that is missing' '5.1000, - -' "$(cell gdn 6) $(cell gdn 9)"

# ---- solver
rmdir data && mv elsewhere data
SETTINGS+=" train.eval_rows=2"
solver() {
    SETTINGS_TRIED="steps-1 tolerance-0.01" CONTEXT=64 WINDOWS=4 SPEED_STEPS=4 BUDGET=0.001 PARALLEL=2 \
        script solver.sh data solver
}
solver
same 'rows of the solver' 4 "$(wc -l <told)"
same 'steps of the least budget' 20 "$(cat solver/steps)"
same 'steps that were taken' 1.0 "$(cell steps-1 5)"
exact=$(awk -F' *[|] *' '$2 == "exact" { print $3 }' 'solver/eval/tolerance-0.01,seed=1.txt')
same 'read exactly' "$exact" "$(cell tolerance-0.01 14)"
grep -q 'solver.mode=steps' 'solver/train/steps-1,seed=1/run.json' || fail 'the solver of a run'
rm -r solver/train/*/step-*
before=$(find solver -name '*.json*' ! -name sweep.json | sort | xargs cat | sha256sum)
solver
same 'solver again' "$before" "$(find solver -name '*.json*' ! -name sweep.json | sort | xargs cat | sha256sum)"

# ---- recall
export SETTINGS=train.eval_rows=8
recall() { # OUT KIND PHASE...
    VOCABULARY=64 LENGTH=32 PAIRS=2,4 WIDTHS=64 MIXERS="mesa gdn attention" TASKS_OF_MAD="noisy-recall compression" \
        STEPS=2 BATCH=2 EXAMPLES=100 PARALLEL=2 script recall.sh "$@"
}
export SEEDS="1 2"
recall mqar mqar
same 'rows of recall' 8 "$(wc -l <told)"
same 'runs of recall' '12 12' \
    "$(printf '%s\n' mqar/search/*@*,seed=1 | wc -l) $(printf '%s\n' mqar/train/*,seed=* | wc -l)"
has() { # RUN KEY...: what it was made with
    local run=$1 key
    shift
    for key; do grep -qF -e "$key" "$run/run.json" || fail "$run: no $key"; done
}
has mqar/train/mesa-64-plain,seed=1 '\"mesa_net\", \"mesa_net\"' model.conv_size=1
grep -q conv_size mqar/train/mesa-64-conv,seed=1/run.json && fail 'a convolution of one id'
has mqar/train/gdn-64-conv,seed=2 '\"update\": \"delta\"'
has mqar/train/attention-64-conv,seed=1 '\"window_size\": 4'
mv mqar moved && recall moved mqar
grep -q 'at once' err && fail "recall again: $(cat err)"
score() { # RUN ACCURACY STEP
    mkdir -p "moved/train/$1"
    printf '{\n  "end": "done",\n  "valid_accuracy": %s,\n  "step": %s\n}\n' "$2" "$3" >"moved/train/$1/run.json"
}
score gdn-64-conv,seed=1 0.99 200
score gdn-64-conv,seed=2 0.97 400
recall moved mqar table
same 'mean, deviation, steps' '98.0 ± 1.4 (300)' "$(cell gdn-conv 3)"
unset SEEDS
recall mad mad
same 'runs of MAD' 12 "$(printf '%s\n' mad/train/*,seed=1 | wc -l)"
has mad/train/compression-mesa,lr=0.002,seed=1 data.train=compression/train data.context=63 model.vocab_size=16
rm -r moved/train
score noisy-recall-gdn,lr=0.0005,seed=1 0.5 2000
score noisy-recall-gdn,lr=0.002,seed=1 0.25 2000
recall moved mad table
same 'the best rate' '50.0 (2000)' "$(cell gdn 3)"

"$bench/recall.sh" none mqar nothing >told 2>err && fail 'recall: a phase that is none'
grep -q 'no phase nothing' err || fail "recall: a phase that is none: $(cat err)"
for name in gradients curves solver; do
    "$bench/$name.sh" data none nothing >told 2>err && fail "$name: a phase that is none"
    grep -q 'no phase nothing' err || fail "$name: a phase that is none: $(cat err)"
done
exit $((failures > 0))
