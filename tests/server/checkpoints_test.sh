#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# SIGHUP with real checkpoints: one of two models changes, does not fit, is damaged, and comes back, while requests and
# sessions go on. Without a store, with a folder, and with a redis-server.
# shellcheck source=tests/clients/server.sh
. "$(dirname "$0")/../clients/server.sh"
need_built mesa-trainer
need_installed jq
demo=$source_dir/deploy/models/demo
common='"vocab_size": 4096, "hidden_size": 64, "num_hidden_layers": 2, "tie_word_embeddings": true,
    "initializer_range": 0.3, "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 0'
echo "{\"model_type\": \"gla\", $common, \"num_heads\": 2, \"intermediate_size\": 96,
    \"layer_types\": [\"gla\", \"attention\"], \"attn\": {\"num_heads\": 4}}" >"$folder/first.json"
echo "{\"model_type\": \"mamba2\", $common, \"norm_eps\": 1e-5, \"head_dim\": 32, \"state_size\": 16}" \
    >"$folder/second.json"
train_a_step first second
first=$(echo "$folder"/first/step-*) second=$(echo "$folder"/second/step-*)
cp -r "$first" "$folder/damaged"
truncate -s -64 "$folder/damaged/model.safetensors"

# ---- asking ----------------------------------------------------------------------------------------------------------

ask() { # METHOD PATH [BODY]: the answer, a line with its status behind it
    curl -sS --max-time 600 --unix-socket "$folder/socket" -w '\n%{http_code}' -X "$1" \
        -H 'Content-Type: application/json' ${3:+--data-binary "$3"} "http://localhost$2"
}
expect() { # STATUS PATTERN WHAT ANSWER
    [ "$(tail -n 1 <<<"$4")" = "$1" ] && grep -qE "$2" <<<"$4" || fail "$where: $3: not $1 with $2: $4"
}
same() { # WHAT A B
    [ -n "$2" ] && [ "$2" = "$3" ] || fail "$where: $1: '$2' is not '$3'"
}
text() {
    head -n 1 <<<"$1" | jq -c '.choices[0].text'
}
turn() { # MODEL SESSION PROMPT
    ask POST /v1/completions "{\"model\":\"$1\",\"session\":\"$2\",\"prompt\":\"$3\",\"temperature\":0,
        \"max_tokens\":6,\"ignore_eos\":true}"
}
create() { # MODEL
    ask POST /v1/sessions "{\"model\":\"$1\"}" | head -n 1 | jq -r .id
}
model_field() { # MODEL PATH
    ask GET /v1/models | head -n 1 | jq -r ".data[] | select(.id == \"$1\") | $2"
}
figure() { # SAMPLE: its value
    ask GET /metrics | awk -v sample="$1" '$1 == sample { print $2 }'
}
wait_for() { # WHAT COMMAND...
    local what=$1
    shift
    for _ in $(seq 6000); do
        "$@" && return 0
        kill -0 "$server" 2>/dev/null || break
        sleep 0.05
    done
    fail "$where: waited in vain: $what"
    tail -n 5 "$folder/server.log"
    return 1
}
is() { # SAMPLE VALUE
    [ "$(figure "$1")" = "$2" ]
}
declare -A rounds
reload() { # "done"|failed: one round
    rounds[$1]=$((rounds[$1] + 1))
    kill -HUP "$server"
    wait_for "a round that is $1" is "mesa_reloads_total{result=\"$1\"}" "${rounds[$1]}"
}
configure() { # LINE...
    printf '%s\n' "[server]" "model = still=$demo" "model = moving=$folder/current" "$@" >"$folder/server.ini"
}
point_to() { # FOLDER
    ln -sfn "$1" "$folder/next" && mv -T "$folder/next" "$folder/current"
}

# ---- one server's life -----------------------------------------------------------------------------------------------

# The end in the middle of a load waits for no thread: it is not one that was forgotten.
export TSAN_OPTIONS=${TSAN_OPTIONS:-}:report_thread_leaks=0
long='"prompt":"Of the city","temperature":0.8,"seed":5,"max_tokens":300,"ignore_eos":true'
live() { # STORE
    local still moving twin answer before after stream expected options=(--config "$folder/server.ini" --store "$1")
    rounds=(["done"]=0 [failed]=0)
    point_to "$first"
    configure
    "$build/mesa-server" "${options[@]}" --listen "unix:$folder/socket" >"$folder/server.log" 2>&1 &
    server=$!
    wait_for "readiness" curl -fsS -o "$folder/ready" --max-time 60 --unix-socket "$folder/socket" \
        http://localhost/health/ready 2>/dev/null || return
    expected=$(text "$(ask POST /v1/completions "{\"model\":\"moving\",$long}")")
    still=$(create still) moving=$(create moving)
    expect 200 text "a turn" "$(turn still "$still" "The king")"
    twin=$(ask POST "/v1/sessions/$still/fork" '{}' | head -n 1 | jq -r .id)
    expect 200 text "a turn of the other" "$(turn moving "$moving" "The queen")"
    before=$(model_field moving .meta.fingerprint) created=$(model_field still .created)

    # Another checkpoint, while a stream of the old one runs.
    rm -f "$folder/stream"
    curl -sSN --max-time 600 --unix-socket "$folder/socket" -H 'Content-Type: application/json' \
        -d "{\"model\":\"moving\",$long,\"stream\":true}" http://localhost/v1/completions >"$folder/stream" &
    stream=$!
    wait_for "the stream begins" test -s "$folder/stream"
    point_to "$second"
    reload "done"
    expect 200 '"status":"ok"' "readiness" "$(ask GET /health/ready)"
    after=$(model_field moving .meta.fingerprint)
    [ "$before" != "$after" ] || fail "$where: the fingerprint is still $before"
    same "the untouched model's time" "$(model_field still .created)" "$created"
    wait "$stream" || fail "$where: the stream broke"
    same "the stream's text" "$expected" \
        "$(sed -n 's/^data: {/{/p' "$folder/stream" | jq -s -c 'map(.choices[0].text // "") | add')"
    wait_for "the old engine is closed" is mesa_models_retired 0
    answer=$(turn moving "$moving" "and")
    expect 409 "foreign_state.*" "a session of the old checkpoint" "$answer"
    grep -q "${before:0:12}.*${after:0:12}" <<<"$answer" || fail "$where: $answer names not $before and $after"
    expect 409 foreign_state "and again" "$(turn moving "$moving" "and")"
    expect 200 text "a session of the untouched model" "$(turn still "$still" " and")"

    # What is wrong, or too large, leaves all as it is.
    point_to "$folder/damaged"
    reload failed
    grep -q 'moving cannot be loaded: .*model.safetensors.*nothing is changed' "$folder/server.log" ||
        fail "$where: the damaged file is not named: $(grep reload "$folder/server.log")"
    same "the fingerprint" "$(model_field moving .meta.fingerprint)" "$after"
    point_to "$first"
    configure "state_budget = 900G"
    reload failed
    grep -qE 'has [0-9.]+ of [0-9.]+ MiB free; [0-9.]+ are needed.*nothing is changed' "$folder/server.log" ||
        fail "$where: no figures of memory: $(grep reload "$folder/server.log")"
    same "the fingerprint" "$(model_field moving .meta.fingerprint)" "$after"
    expect 200 text "the present engine" "$(ask POST /v1/completions '{"model":"moving","max_tokens":2}')"

    # Files that hold the same are the same.
    point_to "$second"
    configure
    touch "$second/config.json"
    created=$(model_field moving .created)
    reload "done"
    same "the time of a touched folder" "$(model_field moving .created)" "$created"

    # Other options of the engines: their sessions go over and say what they would have said.
    configure "rows = 3"
    reload "done"
    same "rows" "$(model_field still .meta.rows)" 3
    answer=$(turn still "$still" " the")
    expect 200 text "a session that went over" "$answer"
    expect 200 text "its twin" "$(turn still "$twin" " and")"
    same "what both say" "$(text "$answer")" "$(text "$(turn still "$twin" " the")")"
    wait_for "the old engines are closed" is mesa_models_retired 0

    # The old checkpoint comes back, and with it what the store kept.
    point_to "$first"
    reload "done"
    same "the fingerprint" "$(model_field moving .meta.fingerprint)" "$before"
    if [ "$1" = none ]; then
        expect 404 session_not_found "a session whose state is gone" "$(turn moving "$moving" "and")"
    else
        twin=$(create moving)
        expect 200 text "its twin's first turn" "$(turn moving "$twin" "The queen")"
        answer=$(turn moving "$moving" "and")
        expect 200 text "a session that was parked" "$answer"
        same "what both say" "$(text "$answer")" "$(text "$(turn moving "$twin" "and")")"
    fi

    # Two signals at once, and the end in the middle.
    point_to "$second"
    kill -HUP "$server"
    kill -HUP "$server"
    kill -TERM "$server"
    wait "$server"
    same "the exit status" $? 0
    server=
}

where="without a store"
live none
where="with a store"
live "$folder/store"
stores="a folder"
if start_redis; then
    where="with a Redis"
    live "$redis_place"
    stores+=" and Redis"
fi
[ $failures -eq 0 ] || exit 1
echo "checkpoints read again: without a store, and with $stores"
