#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Quantised weights beside llama.cpp, in turns: quantised.sh FOLDER FILE.gguf [TURNS]
#
# FOLDER is a quantised checkpoint of the shape that the GGUF file has. PYTHON has llama-cpp-python, built for this
# processor. PROMPT (default 512), TOKENS (48) and ROUNDS (3) a turn; SESSIONS (8) at once. A turn prints our share of
# the machine's read rate, our streams at once, and the other's speed.
set -uo pipefail
source_dir=${MESA_SOURCE:-$(cd "$(dirname "$0")/../.." && pwd)}
build=${MESA_BUILD:-$source_dir/build}
folder=${1:?a quantised checkpoint}
file=${2:?a GGUF file}
for _ in $(seq "${3:-3}"); do
    "$build/mesa-trainer" bench "$folder" --prompt "${PROMPT:-512}" --tokens "${TOKENS:-48}" --rounds "${ROUNDS:-3}" |
        grep -E 'reading memory|one stream|prefill'
    "$build/mesa-trainer" bench "$folder" --sessions "1,${SESSIONS:-8}" --tokens "${TOKENS:-48}" \
        --rounds "${ROUNDS:-3}" | tail -n 2
    "${PYTHON:-python3}" "$source_dir/tests/bench/llama_peer.py" "$file" "${PROMPT:-512}" "${TOKENS:-48}" \
        "${ROUNDS:-3}" "${SESSIONS:-8}"
done
