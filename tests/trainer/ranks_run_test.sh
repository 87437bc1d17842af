#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# mesa-trainer train as several processes: one curve whatever their number, checkpoints that any number goes on from,
# one voice, and an end that names the rank when one is killed, differs or fails.
# shellcheck source=tests/shell.sh
. "$(dirname "$0")/../shell.sh"
need_built mesa-trainer
need_installed python3
trainer=$build/mesa-trainer
for variable in $(compgen -e | grep -E '^(RANK|WORLD_SIZE|LOCAL_RANK|MASTER_|OMPI_COMM_|PMI_|SLURM_)'); do
    unset "$variable"
done
export OMP_NUM_THREADS=1
# An address of the loopback network that is this test's own: no two want the same port.
MASTER_ADDR=127.$((64 + ($$ >> 16) % 128)).$(($$ >> 8 & 255)).$(($$ & 255))
export MASTER_ADDR
trap 'kill -9 $(jobs -p) 2>/dev/null; rm -rf "$folder"' EXIT
cd "$folder" || exit 1

for data in data other; do
    "$trainer" task mqar --out $data --seed ${#data} --examples 400 --valid-examples 20 --vocab 64 --length 32 \
        --pairs 2,4 >out 2>&1 || { cat out; exit 1; }
done
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
[data]
train = $folder/data/train
valid = $folder/data/valid-4
context = 32
[optim]
lr = 0.003
warmup_steps = 2
[train]
steps = 12
batch_tokens = 224
micro_rows = 2
eval_every = 6
save_every = 0
END

# ranks N ARGUMENTS...: runs them, rank R's words in out.R and its exit status in status.R
ranks() {
    local count=$1 rank
    shift
    for rank in $(seq 0 $((count - 1))); do
        (
            RANK=$rank LOCAL_RANK=$rank WORLD_SIZE=$count timeout 300 "$trainer" train "$@" >"out.$rank" 2>"err.$rank"
            echo $? >"status.$rank"
        ) &
    done
    wait
}

well() { # N WHAT: all of N ranks ended well, and only the first spoke
    local rank
    for rank in $(seq 0 $(($1 - 1))); do
        [ "$(cat "status.$rank")" = 0 ] || fail "$2: rank $rank ended with $(cat "status.$rank"): $(cat "err.$rank")"
        [ "$rank" = 0 ] || [ ! -s "out.$rank" ] || fail "$2: rank $rank spoke: $(head -n 2 "out.$rank")"
    done
    [ -s out.0 ] || fail "$2: rank 0 said nothing"
}

ended() { # N STATUS WORDS: every rank ended so, with these words
    local rank
    for rank in $(seq 0 $(($1 - 1))); do
        [ "$(cat "status.$rank")" = "$2" ] ||
            fail "rank $rank ended with $(cat "status.$rank"), not $2: $(cat "err.$rank")"
        grep -qF -e "$3" "err.$rank" || fail "rank $rank: no word of \"$3\": $(cat "err.$rank")"
    done
}

# same A B TOLERANCE: the same steps, rows and targets in two logs, losses within a relative difference, and norms of
# gradients, which feel rounding more, within 20 times that
same() {
    python3 - "$@" <<'END' || fail "$1 and $2 differ"
import json, sys
a, b = ([json.loads(line) for line in open(name + "/log.jsonl")] for name in sys.argv[1:3])
assert len(a) == len(b) == 12, (len(a), len(b))
for x, y in zip(a, b):
    for key in ("step", "targets", "tokens", "epoch", "row"):
        assert x[key] == y[key], (key, x, y)
    for key, times in (("loss", 1), ("divergence", 1), ("gradient_norm", 20), ("valid_loss", 1),
                       ("valid_divergence", 1)):
        p, q = x.get(key, 0), y.get(key, 0)
        assert (key in x) == (key in y) and abs(p - q) <= float(sys.argv[3]) * times * p, (key, x, y)
END
}

# ---- one curve

ranks 1 --config run.ini --out one
well 1 "one rank"
ranks 2 --config run.ini --out two
well 2 "two ranks"
grep -q '^2 ranks, ' out.0 || fail "two ranks: not told: $(head -n 1 out.0)"
same one two 1e-4
ls two/step-00000012/trainer >files
printf 'optim-0.safetensors\noptim-1.safetensors\nstate.json\n' | diff - files || fail "two ranks: other files"
grep -q '"ranks": *2' two/step-00000012/trainer/state.json || fail "two ranks: state.json says otherwise"
ranks 2 --config run.ini --out again
well 2 "two ranks again"
same two again 0
for name in model trainer/optim-0 trainer/optim-1; do
    cmp two/step-00000012/$name.safetensors again/step-00000012/$name.safetensors || fail "two runs: another $name"
done

# ---- going on: FIRST ranks to step 5, then SECOND
for pair in "2 2" "2 1" "1 2" "2 3"; do
    read -r first second <<<"$pair"
    rm -rf on
    ranks "$first" --config run.ini --out on --set train.save_every=5
    well "$first" "the first part of $pair"
    rm -rf on/step-00000010 on/step-00000012
    ranks "$second" --config run.ini --out on --set train.save_every=5 --resume
    well "$second" "the second part of $pair"
    grep -q 'going on from .*step-00000005' out.0 || fail "$pair: did not go on: $(cat out.0)"
    same one on 1e-4
    [ "$(find on/step-00000012/trainer -name 'optim-*' | wc -l)" = "$second" ] || fail "$pair: other files"
    [ "$pair" = "2 2" ] || continue
    same two on 0
    for name in model trainer/optim-0 trainer/optim-1; do
        cmp two/step-00000012/$name.safetensors on/step-00000012/$name.safetensors || fail "going on: another $name"
    done
done

# ---- a teacher that all of them have

for count in 1 2; do
    ranks $count --config run.ini --out "taught_$count" --set "teacher.model=$folder/one/step-00000012"
    well $count "$count ranks with a teacher"
done
same taught_1 taught_2 1e-4
grep -q '"valid_divergence":' taught_2/log.jsonl || fail "with a teacher: no divergence is told"

# ---- devices that sum by themselves: pretended ones, late and strict

modules=$build/tests/device
if [ -f "$modules/libmesa_kern_cuda.so" ]; then
    for count in 1 2; do
        MESA_LIBRARY_DIR=$modules ranks $count --config run.ini --out "device_$count" --set train.device=cuda
        well $count "$count devices"
    done
    same device_1 device_2 1e-4
    MESA_LIBRARY_DIR=$modules ranks 2 --config run.ini --out device_taught --set train.device=cuda \
        --set "teacher.model=$folder/one/step-00000012"
    well 2 "2 devices with a teacher"
    same taught_1 device_taught 1e-4
    grep -q 'cuda:0' out.0 || fail "not on a device: $(head -n 1 out.0)"
else
    echo "SKIP: $modules is not built: several devices"
fi

# ---- who differs is named before the first step

differ() { # WORDS ARGUMENTS-OF-RANK-1...
    local words=$1
    shift
    rm -rf other_run
    (
        RANK=0 WORLD_SIZE=2 timeout 300 "$trainer" train --config run.ini --out other_run >out.0 2>err.0
        echo $? >status.0
    ) &
    (
        RANK=1 WORLD_SIZE=2 timeout 300 "$trainer" train "$@" >out.1 2>err.1
        echo $? >status.1
    ) &
    wait
    ended 2 2 "$words"
    [ ! -e other_run/log.jsonl ] || fail "$words: a step was made"
}
differ 'rank 1 has another configuration than rank 0: "lr = 0.002", not "lr = 0.003"' \
    --config run.ini --out other_run --set optim.lr=0.002

# Another data set under the same name, as on a host whose copy is old
mkdir a b
cp data/* a
cp other/* b
sed "s|$folder/data|here|" run.ini >here.ini
for rank in 0 1; do
    mkdir "host.$rank"
    ln -s "$folder/$([ $rank = 0 ] && echo a || echo b)" "host.$rank/here"
    (
        cd "host.$rank" || exit 1
        RANK=$rank WORLD_SIZE=2 timeout 300 "$trainer" train --config ../here.ini --out ../other_data \
            >../out.$rank 2>../err.$rank
        echo $? >"../status.$rank"
    ) &
done
wait
ended 2 2 'rank 1 has another data set than rank 0'

# Another teacher under the same name
ln -s "$folder/one/step-00000012" host.0/teacher
ln -s "$folder/two/step-00000012" host.1/teacher
for rank in 0 1; do
    (
        cd "host.$rank" || exit 1
        RANK=$rank WORLD_SIZE=2 timeout 300 "$trainer" train --config ../run.ini --out ../other_teacher \
            --set teacher.model=teacher >../out.$rank 2>../err.$rank
        echo $? >"../status.$rank"
    ) &
done
wait
ended 2 2 'rank 1 has another teacher than rank 0'

# A folder that is not the same for all
for rank in 0 1; do
    (
        cd "host.$rank" || exit 1
        RANK=$rank WORLD_SIZE=2 timeout 300 "$trainer" train --config ../run.ini --out run >../out.$rank 2>../err.$rank
        echo $? >"../status.$rank"
    ) &
done
wait
ended 2 2 'run: rank 1 does not see what rank 0 writes there'

ranks 2 --config run.ini --out small --set train.batch_tokens=32
ended 2 2 'a step of 1 rows is too small for 2 ranks'

# ---- who is killed is named; what stands is whole, and nothing half-written stays when the run goes on

await() { # COMMAND...: until it succeeds
    for _ in $(seq 3000); do
        "$@" && return 0
        sleep 0.1
    done
    fail "never: $*"
    return 1
}
has_steps() {
    [ -f killed/log.jsonl ] && [ "$(wc -l <killed/log.jsonl)" -ge 3 ]
}
for victim in 0 1 2; do
    rm -rf killed
    pids=()
    for rank in 0 1 2; do
        RANK=$rank WORLD_SIZE=3 "$trainer" train --config run.ini --out killed --set train.steps=1000000 \
            --set train.save_every=1 --set train.eval_every=0 --set train.keep=2 >out.$rank 2>err.$rank &
        pids+=($!)
    done
    await has_steps
    kill -9 "${pids[$victim]}"
    for rank in 0 1 2; do
        wait "${pids[$rank]}"
        status=$?
        [ "$rank" != "$victim" ] || continue
        [ $status = 1 ] || fail "rank $victim was killed: rank $rank ended with $status: $(cat err.$rank)"
        grep -q "rank $rank: rank $victim is gone" err.$rank ||
            fail "rank $victim was killed: rank $rank says $(cat err.$rank)"
    done
    saved=$(find killed -maxdepth 1 -name 'step-*' | sort | tail -n 1)
    [ -n "$saved" ] || { fail "three steps and nothing saved: $(ls -A killed)"; continue; }
    step=$((10#${saved##*-}))
    ranks 2 --config run.ini --out killed --resume --set train.steps=$((step + 1)) --set train.eval_every=0
    well 2 "going on without the killed rank $victim"
    [ -z "$(find killed -name '*.tmp*')" ] || fail "half-written: $(find killed -name '*.tmp*')"
done

# ---- a signal to one stops all behind the same step, saved

rm -rf stopped killed
pids=()
for rank in 0 1; do
    RANK=$rank WORLD_SIZE=2 "$trainer" train --config run.ini --out killed --set train.steps=1000000 \
        --set train.eval_every=0 >out.$rank 2>err.$rank &
    pids+=($!)
done
await has_steps
kill -TERM "${pids[1]}"
wait "${pids[0]}" || fail "rank 0 ended badly: $(cat err.0)"
wait "${pids[1]}" || fail "rank 1 ended badly: $(cat err.1)"
grep -q 'asked to end' out.0 || fail "rank 0 does not say why: $(cat out.0)"
ls -d killed/step-* >/dev/null 2>&1 || fail "nothing was saved"

# ---- launchers

for rank in 0 1; do
    OMPI_COMM_WORLD_RANK=$rank OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=$rank \
        timeout 300 "$trainer" train --config run.ini --out mpi >out.$rank 2>err.$rank &
done
wait
same two mpi 0
for rank in 0 1; do
    SLURM_PROCID=$rank SLURM_NTASKS=2 SLURM_LOCALID=$rank SLURM_STEP_ID=0 SLURM_JOB_NODELIST="localhost" \
        timeout 300 "$trainer" train --config run.ini --out slurm >out.$rank 2>err.$rank &
done
wait
same two slurm 0
RANK=1 "$trainer" train --config run.ini --out half >out 2>err && fail "half a place was accepted"
grep -q 'RANK is set, WORLD_SIZE is not' err || fail "half a place: $(cat err)"

[ -z "$(jobs -pr)" ] || fail "processes are left: $(jobs -pr)"
exit $((failures > 0))
