#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Ten benchmarks by `mesa-trainer eval` and by lm-evaluation-harness through the server: benchmarks.sh MODEL DATA [OUT]
#
# MODEL is a checkpoint, DATA a folder of JSONL (trainer/eval_item.h). ITEMS (default 200) of each task, evenly from
# its file, are the same on both sides. TASKS names others. Prints what each side says, which choices differ and by how
# much, and the wall time of each. OUT (default: nothing is kept) takes what `mesa-trainer report` reads.
set -uo pipefail
source_dir=${MESA_SOURCE:-$(cd "$(dirname "$0")/../.." && pwd)}
build=${MESA_BUILD:-$source_dir/build}
model=${1:?a checkpoint}
data=${2:?a folder of JSONL}
tasks=${TASKS:-lambada_openai hellaswag_val piqa arc_easy arc_challenge openbook_qa winogrande boolq commonsense_qa
    siqa_dev}
# shellcheck source=tests/bench/serving.sh
. "$source_dir/tests/bench/serving.sh"
# shellcheck source=tests/clients/venv.sh
. "$source_dir/tests/clients/venv.sh"
need_python lm_eval lm_eval datasets aiohttp tenacity
client=$source_dir/tests/bench/benchmarks_client.py

# shellcheck disable=SC2086
"$python" "$client" draw "$data" "$folder" "${ITEMS:-200}" $tasks || exit 1
arguments=() choices=()
for task in $tasks; do
    arguments+=(--task "$folder/$task.jsonl")
    choices+=(--task "$folder/$task.choices.jsonl")
done
start=$(date +%s.%N)
"$build/mesa-trainer" eval "$model" "${arguments[@]}" --name "${NAME:-$(basename "$model")}" --out "$folder/eval.json" \
    >"$folder/table" || exit 1
echo "eval: $(awk -v a="$start" -v b="$(date +%s.%N)" 'BEGIN { printf "%.1f", b - a }') s in all"
grep -E '^\| (task|---)|\*' "$folder/table"
[ -z "${3:-}" ] || cp "$folder/eval.json" "$3"
# Every choice as a target of its own: the sums that eval chose by.
"$build/mesa-trainer" eval "$model" "${choices[@]}" --out "$folder/choices.json" >/dev/null || exit 1
serve --model "model=$model" --listen 127.0.0.1:0
address=$(grep -oE 'http://[0-9.]+:[0-9]+' "$folder/log" | head -n 1)
# shellcheck disable=SC2086
"$python" "$client" compare "$folder" "$address" $tasks 2>"$folder/harness" || {
    tail -n 20 "$folder/harness"
    exit 1
}
