#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# The example in trainer/README.md of a run with a teacher, its block marked sh, with fewer and shorter rows: the table
# of start weights is told, the divergence from the teacher falls, and what was learned is evaluated beside it.
# shellcheck source=tests/shell.sh
. "$(dirname "$0")/../shell.sh"
need_built mesa-trainer
need_installed python3
export OMP_NUM_THREADS=1
program=$(cd "$build" && pwd)/mesa-trainer
cd "$folder" || exit 1

mkdir build
ln -s "$program" build/mesa-trainer
for name in README.md deploy engine kernels server trainer; do
    ln -s "$source_dir/$name" $name
done
awk '/^```sh$/ { inside = 1; next } /^```/ { inside = 0 } inside' trainer/README.md >commands
smaller() { # KEY FROM TO
    grep -qx "$1 = $2" commands || fail "the example has no line \"$1 = $2\""
    sed -i "s/^$1 = $2\$/$1 = $3/" commands
}
smaller steps 40 20
smaller batch_tokens 512 128
smaller context 128 32
smaller eval_every 10 2
smaller eval_rows 8 4
bash -e ./commands >out 2>&1 || fail "a command of the example failed: $(cat out)"
grep -qF '| model.layers.*.attn.q_proj.weight | 4 | taken |' out || fail "no table of start weights: $(cat out)"
grep -qF '| model.layers.*.attn.A_log | 4 | its own: another mixer there |' out || fail "no fresh weights: $(cat out)"
python3 - <<'END' || fail "the divergence did not fall"
import json
steps = [json.loads(line) for line in open("try/student/log.jsonl")]
valid = [step["valid_divergence"] for step in steps if "valid_divergence" in step]
assert len(steps) == 20 and len(valid) == 10, steps
assert 0 < valid[-1] < 0.95 * valid[0], valid
END

build/mesa-trainer eval try/student/step-00000020 --teacher deploy/models/demo --data try/text-valid --windows 2 \
    >out 2>&1 || fail "what was learned is not read again: $(cat out)"
grep -q '^divergence  *[0-9.]* nats a token from the teacher' out || fail "eval tells no divergence: $(cat out)"
echo '{"ctx": "a", "target": "b"}' >task.jsonl
build/mesa-trainer eval deploy/models/demo --teacher deploy/models/demo --task task.jsonl >out 2>&1 &&
    fail "a teacher of tasks is not refused"
grep -qF -e '--teacher: is for --data' out || fail "a teacher of tasks is refused without a word: $(cat out)"
exit $((failures > 0))
