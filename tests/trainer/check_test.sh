#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# mesa-trainer check --against: gradients of one checkpoint on two devices, by tensor. The other device is the one that
# pretends: it computes on the CPU with another length of chunks, so that the recurrences' sums have another order.
# shellcheck source=tests/shell.sh
. "$(dirname "$0")/../shell.sh"
need_built mesa-trainer
trainer=$build/mesa-trainer
[ -d "$build/tests/device" ] || { echo "SKIP: no device that pretends is built"; exit 77; }
export OMP_NUM_THREADS=1 MESA_LIBRARY_DIR=$build/tests/device
cd "$folder" || exit 1

check() { # STATUS ARGUMENTS...: of the checkpoint
    local wanted=$1 status
    shift
    "$trainer" check run/step-00000003 "$@" >told 2>err
    status=$?
    [ $status = "$wanted" ] || fail "status $status, want $wanted: $*: $(tail -n 3 told err)"
}
figure() { # WORDS: behind a line's words
    awk -v words="$1" 'index($0, words) == 1 { sub(words, ""); print $1 }' told
}
holds() { # WHAT CONDITION
    awk "BEGIN { exit !($2) }" || fail "$1: not $2: $(tail -n 8 told)"
}

# Rows of 4 and 8 pairs have unlike numbers of answers.
"$trainer" task mqar --out data --examples 200 --valid-examples 20 --vocab 64 --length 96 --pairs 4,8 >told 2>&1 ||
    fail "task: $(cat told)"
cat >run.ini <<END
[model]
model_type = mesa_net
hidden_size = 32
num_hidden_layers = 2
num_heads = 2
head_dim = 16
intermediate_size = 64
vocab_size = 64
tie_word_embeddings = true
layer_types = ["mesa_net", "gated_deltanet"]
[data]
train = data/train
context = 96
[train]
steps = 3
batch_tokens = 384
eval_every = 0
save_every = 0
END
MESA_LIBRARY_DIR=/none "$trainer" train --config run.ini --out run --set train.device=auto >told 2>&1 ||
    fail "train: $(tail -n 1 told)"
grep -q ', not CUDA: no CUDA module: /none/' told || fail "a GPU that is not there is not spoken of: $(head -n 1 told)"

# ---- itself: the same bits, or sums in another order
check 0 --data data/train --against cpu --rows 4
grep -q '^model' told || fail "no tensor is compared: $(cat told)"
[ "$(awk '$1 ~ /^model/ && $2 > 0 && $4 == 0 && $6 < 1e-12' told | wc -l)" = "$(grep -c '^model' told)" ] ||
    fail "the same device has other gradients: $(cat told)"
grep -q '^model.layers.1.attn.q_proj.weight ' told || fail "no line of a tensor: $(cat told)"
check 0 --data data/train --against cpu --rows 8 --micro-rows 2 --batches 6 --solver exact
holds "two rows at once" "0 < $(figure 'error of a tensor, largest') && $(figure 'error of a tensor, largest') < 1e-5"
holds "and all gradients as one" "$(awk '$1 == "(all)" { print $4 }' told) < 1e-6"
grep -q '^6 batches of 8 rows of 96, 2 at once' told || fail "other batches: $(head -n 3 told)"

# Rows that share a chunk, as in a step of training, against the same by themselves.
"$trainer" task mqar --out short --examples 50 --valid-examples 5 --vocab 64 --length 16 --pairs 2,4 >told 2>&1 ||
    fail "task: $(cat told)"
check 0 --data short/train --against cpu --rows 8 --context 16 --solver exact
holds "short rows" "$(figure 'error of a tensor, largest') < 1e-5"

# ---- another device
check 0 --data data/train --device cuda:0 --against cpu --rows 2 --batches 4 --solver exact
holds "a device" "0 < $(figure 'error of a tensor, median') && $(figure 'error of a tensor, largest') < 1e-4"
grep -q 'pretended.*float32, against cpu' told || fail "other devices: $(head -n 3 told)"
holds "its loss" "$(figure 'loss') < 1e-6"
cp told exact
check 0 --data data/train --device cuda:0 --against cpu --rows 2 --batches 4 --solver steps:1 --seed 2
cmp -s told exact && fail 'solver and order have no effect'
check 1 --data data/train --against cpu --solver tolerance:0.01 --against-solver exact
holds "a solver" "1e-4 < $(figure 'error of a tensor, largest')"
grep -q "OUTSIDE$" told || fail "a solver of few steps: $(tail -n 6 told)"
grep -q 'solver tolerance:0.01 against exact$' told || fail "other solvers: $(head -n 3 told)"
check 0 --data data/train --device cuda:0 --precision bf16 --against cpu --rows 2 --batches 4
grep -q 'batches. mean, median .*(1e+00)$' told || fail "no verdict on a bias: $(tail -n 4 told)"
PRETEND_LOST=$folder/data/train-00000.tok "$trainer" check run/step-00000003 --data data/train --device cuda:0 \
    --against cpu >told 2>err && fail 'a lost device'
[ "$(wc -l <err)" = 1 ] || fail "a lost device: $(cat err)"

# ---- what is none
check 2 --against cpu
grep -q -e '--against: needs --data' err || fail "no data: $(cat err)"
check 2 --data data/train --against none
check 2 --data data/none --against cpu
check 2 --precision bf16
grep -q -e 'go with --against' err || fail "alone: $(cat err)"
check 2 --data data/train --against cpu --precision half
check 2 --data data/train --against cpu --solver soon
check 2 --data data/train --against cpu --against-solver soon
check 2 --data data/train --against cpu --rows 0
check 2 --data data/train --against cpu --rows 65536 --context 4194304
[ $failures = 0 ] && echo 'check_test: passed'
exit $((failures > 0))
