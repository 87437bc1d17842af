#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# One server holds models of three different mixers: requests by `model`, all at once, are answered as by a server with
# that model alone, and the list of models tells each one's own figures.
# shellcheck source=tests/clients/server.sh
. "$(dirname "$0")/../clients/server.sh"
need_built mesa-trainer
trainer=$build/mesa-trainer
demo=$source_dir/deploy/models/demo

# ---- two models more, a step from their random start -----------------------------------------------------------------

common='"vocab_size": 4096, "hidden_size": 64, "num_hidden_layers": 2, "tie_word_embeddings": true,
    "initializer_range": 0.3, "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 0'
echo "{\"model_type\": \"gla\", $common, \"num_heads\": 2, \"intermediate_size\": 96,
    \"layer_types\": [\"gla\", \"attention\"], \"attn\": {\"num_heads\": 4}}" >"$folder/gla.json"
echo "{\"model_type\": \"mamba2\", $common, \"norm_eps\": 1e-5, \"head_dim\": 32, \"state_size\": 16}" \
    >"$folder/mamba2.json"
train_a_step gla mamba2
declare -A path=([demo]=$demo [gla]=$(echo "$folder"/gla/step-*) [mamba2]=$(echo "$folder"/mamba2/step-*))

# ---- asking ----------------------------------------------------------------------------------------------------------

ask() { # MODEL SEED: what was chosen, and the logprobs
    curl -sS --max-time 600 --unix-socket "$folder/socket" -H 'Content-Type: application/json' \
        --data-binary "{\"model\": \"$1\", \"prompt\": \"Of the city and the river $2\", \"seed\": $2,
            \"max_tokens\": 24, \"temperature\": 0.8, \"logprobs\": 2}" http://localhost/v1/completions |
        sed -E 's/"id":"cmpl-[0-9a-f]+"//; s/"created":[0-9]+//; s/"timings":\{[^}]*\}//'
}
serve() { # NAME...: one server with these models
    local name options=()
    for name; do options+=(--model "$name=${path[$name]}"); done
    "$build/mesa-server" "${options[@]}" --listen "unix:$folder/socket" >"$folder/server.log" 2>&1 &
    server=$!
    for _ in $(seq 3000); do
        curl -fsS -o /dev/null --max-time 60 --unix-socket "$folder/socket" http://localhost/health/ready 2>/dev/null &&
            return 0
        kill -0 "$server" 2>/dev/null || break
        sleep 0.1
    done
    cat "$folder/server.log"
    echo "FAIL: the server does not become ready"
    exit 1
}
models() {
    curl -sS --max-time 300 --unix-socket "$folder/socket" http://localhost/v1/models
}

names=(demo gla mamba2)
for name in "${names[@]}"; do
    serve "$name"
    for seed in 1 2 3 4; do
        ask "$name" $seed >"$folder/alone.$name.$seed"
        grep -q '"text":"' "$folder/alone.$name.$seed" ||
            fail "$name alone answers $(head -c 300 "$folder/alone.$name.$seed")"
    done
    models | jq -c ".data[] | select(.id == \"$name\") | del(.created)" >"$folder/listed.$name"
    stop_server
done

serve "${names[@]}"
waiting=()
for seed in 1 2 3 4; do
    for name in "${names[@]}"; do
        ask "$name" $seed >"$folder/together.$name.$seed" &
        waiting+=($!)
    done
done
wait "${waiting[@]}"
for seed in 1 2 3 4; do
    for name in "${names[@]}"; do
        cmp -s "$folder/alone.$name.$seed" "$folder/together.$name.$seed" || {
            fail "$name answers otherwise beside others"
            head -c 400 "$folder/alone.$name.$seed" "$folder/together.$name.$seed"
        }
    done
done
cmp -s "$folder/alone.gla.1" "$folder/alone.mamba2.1" && fail "two models give one answer: nothing is compared"

# ---- the list --------------------------------------------------------------------------------------------------------

models >"$folder/list"
[ "$(jq -c '[.data[].id]' "$folder/list")" = '["demo","gla","mamba2"]' ] || fail "listed: $(cat "$folder/list")"
for name in "${names[@]}"; do
    jq -c ".data[] | select(.id == \"$name\") | del(.created)" "$folder/list" | cmp -s - "$folder/listed.$name" ||
        fail "$name is listed otherwise beside others"
    bytes=$("$trainer" inspect "${path[$name]}" --summary | sed -nE 's/^state .*\(([0-9,]+) bytes\)/\1/p' | tr -d ,)
    [ "$(jq ".data[] | select(.id == \"$name\").meta.state_bytes" "$folder/list")" = "$bytes" ] ||
        fail "$name: meta has $(jq -c ".data[] | select(.id == \"$name\").meta" "$folder/list"), state bytes are $bytes"
done
[ "$(jq -c '[.data[].meta.state_bytes] | unique | length' "$folder/list")" = 3 ] || fail "two models have one state"
answer=$(ask rwkv 1)
grep -q 'model' <<<"$answer" && grep -q '"error"' <<<"$answer" || fail "an unknown model: $answer"
stop_server

[ $failures -eq 0 ] || exit 1
echo "three models: $((3 * 4)) answers at once as alone"
