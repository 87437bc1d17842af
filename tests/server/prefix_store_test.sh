#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# What prompts have in common, in a store, through the server: after a restart and on another server of the same Redis
# it is not read again, for its key alone and without influence on an answer; what is damaged is deleted; a Redis that
# hangs or is gone costs nothing but the reading.
# shellcheck source=tests/clients/server.sh
. "$(dirname "$0")/../clients/server.sh"
chunk=32

keys=(the-first-long-enough-key the-other-long-enough-key)
for i in 0 1; do
    echo "client$i $(echo "${keys[$i]}" | "$build/mesa-server" --hash-key)"
done >"$folder/keys"
socket=$folder/socket
curl() { # as KEY, of the server at SOCKET
    command curl -sS --max-time 300 --unix-socket "$socket" -H "Authorization: Bearer $key" "$@"
}
metric() { # NAME: its value
    curl http://localhost/metrics | awk -v name="$1" 'index($0, name "{") == 1 || index($0, name " ") == 1 { print $2 }'
}
choices() { # of an answer, without what it was to read
    grep -oE '"choices":\[.*\],"usage"' <<<"$1"
}
ask() { # WHAT: the prompt, which is answered as it was first; cached: so many tokens of it
    local answer
    answer=$(curl -H 'Content-Type: application/json' --data-binary "$body" http://localhost/v1/completions)
    cached=$(grep -oE '"cached_tokens":[0-9]+' <<<"$answer" | cut -d: -f2)
    wanted=${wanted:-$(choices "$answer")}
    if [ -z "$wanted" ] || [ "$(choices "$answer")" != "$wanted" ]; then
        fail "$1: $(choices "$answer"), not $wanted"
    fi
}
answers() { # WHAT CACHED
    ask "$1"
    [ "$cached" = "$2" ] || fail "$1: $cached cached, not $2"
}
# WHAT START STOP: a server that is new begins from what the store has. On a busy machine the prompt may not have waited
# for that; then another one.
begins_from_store() {
    for _ in $(seq 50); do
        $2
        ask "$1"
        [ "$cached" = "$last" ] && break
        [ "$cached" = 0 ] || fail "$1: $cached cached"
        $3
    done
    comes_to mesa_prefix_fetched_total 1
    answers "$1, again" "$last"
}
is() { # NAME VALUE: of a metric
    [ "$(metric "$1")" = "$2" ]
}
comes_to() { # NAME VALUE
    wait_until is "$1" "$2" || fail "$1 is $(metric "$1"), not $2: $(curl http://localhost/metrics | grep mesa_prefix)"
}

ids=$(seq 100 299 | paste -sd,)
body="{\"prompt\":[$ids],\"max_tokens\":6,\"seed\":3,\"logprobs\":2}"
last=$((199 / chunk * chunk))
options=(--keys "$folder/keys")

# A folder, and a restart.
start_with_folder() {
    start_server "${options[@]}" --store-prefixes 64 --store "$folder/store"
}
key=${keys[0]} wanted=
start_with_folder
answers 'a new prompt' 0
answers 'the same' $last
comes_to mesa_prefix_stored_total 1
stop_server
begins_from_store 'after a restart' start_with_folder stop_server
comes_to mesa_store_prefixes 1
comes_to mesa_prefix_damaged_total 0
comes_to mesa_store_failing 0
stop_server
start_with_folder
key=${keys[1]}
answers 'of another key' 0
key=${keys[0]}
stop_server
start_server "${options[@]}" --store "$folder/store" --store-prefixes 0
answers 'where none goes there' 0
stop_server

ask_redis() {
    redis-cli -s "$folder/redis" "$@"
}
replica=
stop_replica() {
    if [ -n "$replica" ]; then
        kill "$replica"
        wait "$replica"
    fi
    replica=
}
trap 'stop_server; stop_replica; stop_redis; rm -rf "$folder"' EXIT
if ! start_redis; then
    echo 'SKIP: there is no redis-server'
    exit $((failures > 0 ? 1 : 77))
fi
options+=(--store-prefixes 64 --store "$redis_place" --store-lease 2)

start_replica() { # beside the server, at its own socket
    "$build/mesa-server" --model "demo=$model" --listen "unix:$folder/replica" "${options[@]}" \
        >"$folder/replica.log" 2>&1 &
    replica=$!
    socket=$folder/replica
    wait_until command curl -fsS -o /dev/null --unix-socket "$socket" http://localhost/health/ready 2>/dev/null ||
        fail "the replica does not become ready: $(cat "$folder/replica.log")"
}

# Two servers, one Redis.
start_server "${options[@]}"
answers 'a new prompt, with Redis' 0
answers 'the same, with Redis' $last
comes_to mesa_prefix_stored_total 1
begins_from_store 'on a replica' start_replica stop_replica
key=${keys[1]}
answers 'of another key on a replica' 0
key=${keys[0]}
stop_replica

# A record that was written over.
if command -v redis-cli >/dev/null; then
    record=$(ask_redis --scan --pattern '{mesa}:p*:*')
    ask_redis hset "$record" 0 nonsense >/dev/null
    start_replica
    answers 'of what is damaged' 0
    comes_to mesa_prefix_damaged_total 1
    answers 'of what is damaged, again' $last
    comes_to mesa_prefix_stored_total 1 # whole
    is mesa_prefix_fetched_total 0 || fail 'what is damaged was brought in'
    stop_replica
fi

# A Redis that hangs, then one that is gone: prompts are answered as without.
socket=$folder/socket
key=${keys[1]}
kill -STOP "$redis"
for turn in 0 $last; do
    answers 'while Redis hangs' "$turn"
done
kill -CONT "$redis"
stop_redis
ids=$(seq 101 300 | paste -sd,)
body="{\"prompt\":[$ids],\"max_tokens\":6,\"seed\":3,\"logprobs\":2}" wanted=
for turn in 0 $last $last; do
    answers 'while Redis is gone' "$turn"
done
stop_server

[ $failures -eq 0 ]
