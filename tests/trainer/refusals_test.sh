#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# What newcomers give import, quantize, export, eval, report and train by mistake: every refusal names the fault, comes
# before the work, and leaves what stood there as it was.
# shellcheck source=tests/shell.sh
. "$(dirname "$0")/../shell.sh"
need_built mesa-trainer
trainer=$build/mesa-trainer
export OMP_NUM_THREADS=1
cd "$folder" || exit 1
cp -r "$source_dir/deploy/models/demo" demo
printf '{"ctx": "Once upon a", "target": "time"}\n' >task.jsonl

# STATUS WORDS COMMAND...: the exit status, and words of what it prints to stderr; nothing goes to stdout before.
refused() {
    local wanted=$1 words=$2 status
    shift 2
    timeout 600 "$trainer" "$@" >out 2>err
    status=$?
    [ $status -eq "$wanted" ] || fail "status $status, want $wanted: $*: $(cat err)"
    grep -qF -e "$words" err || fail "no word of \"$words\": $*: $(cat err)"
    [ "$(wc -l <err)" -eq 1 ] || fail "more than a line: $*: $(cat err)"
    [ ! -s out ] || fail "it began to work: $*: $(head -n 2 out)"
}

# A path that is none, a file for a folder, a folder for a file
for command in "eval none --task task.jsonl" "quantize none --out new" "export none --out new" "import none --out new"
do
    # shellcheck disable=SC2086
    refused 2 'none: cannot open: No such file' $command
done
touch model.gguf
refused 2 'model.gguf: not a folder; mesa-trainer import' eval model.gguf --task task.jsonl
refused 2 'model.gguf: not a folder; mesa-trainer import' quantize model.gguf --out new
refused 2 'task.jsonl: not a folder' export task.jsonl --out new
refused 2 'demo: not a regular file' eval demo --task demo
refused 2 'none.jsonl: cannot open' eval demo --task task.jsonl --task none.jsonl
refused 2 'demo: neither a run (no log.jsonl) nor a sweep (no sweep.json)' report demo --out page.html
refused 2 'format: missing' report demo/config.json --out page.html

# What would be written over what is read, or over what is none of its kind
before=$(cat demo/* | sha256sum)
ln -s demo link
for command in "quantize demo --out demo" "export demo --out demo/" "import demo --out ./demo" "export link --out demo"
do
    # shellcheck disable=SC2086
    refused 2 'is what is read; another folder is needed' $command
done
refused 2 'exists and is no checkpoint' quantize demo --out task.jsonl
refused 2 'is what is read' quantize link --out demo
[ "$before" = "$(cat demo/* | sha256sum)" ] || fail 'the model has changed'

# Results that cannot be written are known before anything is read
refused 2 'page/results.json.tmp: cannot create' eval demo --task task.jsonl --out page/results.json
refused 2 'demo: not a regular file' eval demo --task task.jsonl --out demo
mkfifo pipe
refused 2 'pipe: not a regular file' eval demo --task task.jsonl --out pipe
[ -p pipe ] || fail 'the pipe was replaced'
refused 2 '--in-domain: no task "tsak"' eval demo --task task.jsonl --in-domain tsak
"$trainer" eval demo --task task.jsonl --out results.json >out 2>&1 || fail "eval: $(cat out)"
before=$(sha256sum <results.json)
refused 2 'results.json is one of the results' report results.json --out ./results.json
refused 2 'pipe: not a regular file' report results.json --out pipe
[ "$before" = "$(sha256sum <results.json)" ] || fail 'the results have changed'
ls -A ./*.tmp .*.tmp 2>/dev/null && fail 'something is left over'

# Nothing to learn from is told at once, not by who reads it later
touch empty.txt
refused 2 'empty.txt: no text in 2 files' pack --tokenizer demo --out new empty.txt empty.txt
refused 2 '--vocab is needed' tokenizer --out new empty.txt
ls -d new* 2>/dev/null && fail 'shards of nothing'

# A bad record is named by file and line, empty lines and a byte order mark in front notwithstanding
record='{"ctx": "a", "choices": ["b", "c"], "gold": 0}'
bad() { # RECORD WORDS
    printf '\xef\xbb\xbf%s\r\n\n%b\n%s\n' "$record" "$1" "$record" >bad.jsonl
    refused 2 "bad.jsonl:3: $2" eval demo --task bad.jsonl
}
bad '{' 'not a JSON object'
bad '{"ctx": "a"}' 'none of the keys'
bad '{"ctx": "a", "choices": ["b"], "gold": 0}' 'choices: fewer than two'
bad '{"ctx": "a", "choices": ["b", 3], "gold": 0}' 'choices[1]: not a string'
bad '{"ctx": "a", "choices": ["b", "c"], "gold": 2}' 'gold: not a place in choices'
bad '{"ctx": "a", "target": ""}' 'target: empty'
bad '{"ctx": "\\xff", "target": "b"}' 'not a JSON object'
printf '\xef\xbb\xbf%s\r\n' "$record" >marked.jsonl
"$trainer" eval demo --task marked.jsonl >out 2>&1 || fail "a byte order mark: $(cat out)"

# A model that takes the same choice whatever the question is no measure, and eval says so
for i in $(seq 20); do
    echo "{\"ctx\": \"$i\", \"choices\": [\"the king\", \"q7#_zzx\"], \"gold\": $((i % 2))}"
done >one.jsonl
"$trainer" eval demo --task one.jsonl >out 2>err || fail "eval: $(cat err)"
grep -q 'one: choice 0 is the likeliest in 20 of 20 items' err || fail "no word of it: $(cat err)"
grep -q '^| one | default | acc [ *]*| 0.5000' out || fail "$(cat out)"

# A run that cannot start leaves no folder
"$trainer" task mano --out sums --examples 64 --valid-examples 16 >out 2>&1 || fail "task: $(cat out)"
cat >run.ini <<'END'
[model]
model_type = transformer
vocab_size = 64
hidden_size = 16
num_hidden_layers = 1
num_heads = 1
[data]
train = sums/train
context = 64
[train]
steps = 1
batch_tokens = 128
END
touch empty.ini
refused 2 'device "gpu" is not known' train --config run.ini --out new --set train.device=gpu
refused 2 'device "gpu" is not known' eval demo --task task.jsonl --device gpu
refused 2 'device "gpu" is not known' bench demo --device gpu
refused 2 'cpu:5": the chunk is 16, 32 or 64' logits demo --tokens 1,2 --device cpu:5 --out new
refused 2 'lost/train-00000.tok: cannot open' train --config run.ini --out new --set data.train=lost/train
refused 2 'empty.ini:1: nothing to try' train --config run.ini --sweep empty.ini --out new
printf '[grid]\noptim.lr = 1 2\n' >lr.ini
refused 2 'is not known' train --config run.ini --sweep lr.ini --out new --set train.device=gpu
refused 2 'examples' task mano --out new --examples 0
refused 2 '"--steps"; try mesa-trainer task mano --help' task mano --out new --steps 1
refused 2 '"--steps"; try mesa-trainer eval --help' eval demo --steps 1
refused 2 'none/new: cannot make: No such file' train --config run.ini --out none/new
refused 2 'run.ini: not a folder' train --config run.ini --out run.ini
refused 2 'run.ini: not a folder' task mano --out run.ini --examples 4 --valid-examples 4
refused 2 'none/new: cannot make: No such file' tokenizer --vocab 270 --out none/new run.ini
[ ! -e new ] || fail "a folder is left over: $(ls -A new)"
mkdir old
refused 2 'is not known' train --config run.ini --out old --set train.device=gpu
[ -d old ] || fail 'a folder that was there is gone'

# A run that started from weights and has no checkpoint yet does not go on from random ones
"$trainer" train --config run.ini --out first >out 2>&1 || fail "train: $(cat out)"
"$trainer" train --config run.ini --out second --warm-start first/step-00000001 >out 2>&1 || fail "train: $(cat out)"
rm -r second/step-*
refused 2 'it started from first/step-00000001: --warm-start is needed' train --config run.ini --out second --resume
"$trainer" train --config run.ini --out second --resume --warm-start first/step-00000001 >out 2>&1 ||
    fail "going on: $(cat out)"
rm -r second/step-*
"$trainer" train --out second --resume >out 2>&1 || fail "going on by its own configuration: $(cat out)"

# Weights to start from are needed once: a run goes on without their folder. Two of them are refused, however they are
# said, and so is a gate with a teacher.
for start in "--warm-start first/step-00000001" "--set train.start_from=first/step-00000001"; do
    rm -rf second
    cp -r first/step-00000001 lent
    # shellcheck disable=SC2086
    "$trainer" train --config run.ini --out second ${start/first*/lent} >out 2>&1 || fail "train $start: $(cat out)"
    rm -r lent
    "$trainer" train --out second --resume --set train.steps=2 >out 2>&1 || fail "no way on after $start: $(cat out)"
    [ -d second/step-00000002 ] || fail "nothing was trained after $start"
done
refused 2 'train.start_from, train.warm_start: a run starts from one of them' train --config run.ini --out new \
    --warm-start first/step-00000001 --set train.start_from=first/step-00000001
refused 2 'teacher.model: goes with loop.loss = final alone' gate --stage 1 --config run.ini --out new \
    --warm-start first/step-00000001 --set teacher.model=first/step-00000001

# An option without a value that should have one does not mean that it was not given
refused 2 '--warm-start: empty' train --config run.ini --out new --warm-start ''
refused 2 '--teacher: empty' eval first/step-00000001 --data sums/train --teacher=

# A run where one of its checkpoints is wanted; a teacher whose tokenizer is damaged
refused 2 'first: a run; its checkpoints are the folders first/step-N' eval first --data sums/train
refused 2 'first: a run; its checkpoints are the folders first/step-N' train --config run.ini --out new \
    --set teacher.model=first
cp -r first/step-00000001 damaged
: >damaged/tokenizer.json
refused 2 'teacher: tokenizer.json: line 1' eval first/step-00000001 --data sums/train --teacher damaged

# Who ends eval early keeps the rows that are done
for i in $(seq 4000); do
    echo "{\"ctx\": \"Item $i of a long list is\", \"target\": \"not read\"}"
done >long.jsonl
"$trainer" eval demo --task task.jsonl --task long.jsonl --out early.json >out 2>&1 &
eval=$!
for _ in $(seq 3000); do
    [ -s early.json ] || ! kill -0 $eval 2>/dev/null && break
    sleep 0.1
done
[ "$(cat /proc/$eval/comm 2>/dev/null)" != exe ] || fail 'the process has lost its name'
kill -INT $eval
wait $eval
"$trainer" report early.json --out early.html 2>err || fail "what was done is lost: $(cat err)"
grep -q '<summary>task' early.html || fail 'the row that was done is lost'

exit $((failures > 0))
