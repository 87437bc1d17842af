#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Ids that the real server gives for 10,000 mixed lines against those of Hugging Face's tokenizers.
# shellcheck source=tests/clients/server.sh
. "$(dirname "$0")/server.sh"
# shellcheck source=tests/clients/venv.sh
. "$(dirname "$0")/venv.sh"
need_python tokenizers tokenizers
lines=10000
if grep -q '^SANITIZE:STRING=.' "$build/CMakeCache.txt" 2>/dev/null; then
    lines=1000
fi
start_server --listen 127.0.0.1:0
"$python" "$source_dir/tests/clients/tokens_client.py" "$address" demo tokenizers "$model/tokenizer.json" "$lines" \
    "$source_dir" || fail 'see above'
exit $((failures > 0))
