#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# lm-evaluation-harness against the real server: 300 questions, choices equal to those of the trainer's logits.
# shellcheck source=tests/clients/server.sh
. "$(dirname "$0")/server.sh"
# shellcheck source=tests/clients/venv.sh
. "$(dirname "$0")/venv.sh"
need_built mesa-trainer
if grep -q '^SANITIZE:STRING=.' "$build/CMakeCache.txt" 2>/dev/null; then
    echo "SKIP: a build with sanitizers computes the same numbers, too slowly for 300 questions"
    exit 77
fi
need_python lm_eval lm_eval datasets aiohttp tenacity
start_server --listen 127.0.0.1:0
"$python" "$source_dir/tests/clients/lm_eval_client.py" "$address" "$source_dir" "$folder" "$build/mesa-trainer" \
    "$source_dir/deploy/models/demo" >"$folder/harness" 2>&1 || {
    tail -n 30 "$folder/harness"
    fail 'see above'
}
tail -n 1 "$folder/harness"
exit $((failures > 0))
