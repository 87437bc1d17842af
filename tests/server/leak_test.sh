#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Twenty keys' completions and sessions at once, with cancels, forks, failures, reloads and a restart, on a server that
# has memory for few of their states: every answer is what it is alone, bit for bit, no key learns of another's
# sessions, and nothing is left behind.
#
#   tests/server/leak_test.sh [OPERATIONS]      400 by default
# SEED: of another hunt. MIXED=1: turns change the knobs of their sessions. STORE=redis: the store is a redis-server.
# shellcheck source=tests/clients/server.sh
. "$(dirname "$0")/../clients/server.sh"
need_built mesa-trainer
need_installed python3

echo '{"model_type": "mesa_net", "vocab_size": 4096, "hidden_size": 32, "num_hidden_layers": 3, "num_heads": 2,
    "head_dim": 16, "intermediate_size": 32, "layer_types": ["mesa_net", "attention", "mesa_net"],
    "attn": {"num_heads": 2}, "tie_word_embeddings": true, "initializer_range": 0.3, "max_position_embeddings": 65536,
    "bos_token_id": 0, "eos_token_id": 0}' >"$folder/small.json"
train_a_step small
model=$(echo "$folder"/small/step-*)
place=$folder/hunted
if [ "${STORE:-folder}" = redis ]; then
    start_redis || { echo "SKIP: there is no redis-server"; exit 77; }
    place=$redis_place
fi
PYTHONPATH=$source_dir/tests/server python3 "$source_dir/tests/server/leak.py" "$build/mesa-server" "$model" "$folder" \
    "${1:-400}" "${SEED:-1}" "$place" >"$folder/said" 2>&1 ||
    fail "seed ${SEED:-1}: $(tail -n 20 "$folder/said"; tail -n 20 "$folder/hunt.log")"
tail -n 2 "$folder/said"

exit $((failures > 0))
