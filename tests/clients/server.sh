#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Shared by the tests of the clients: a real server with the demo model on a unix socket, and what they check with.
#
# Sourced, with shell.sh. The folder goes at the end, and the servers with it.
# shellcheck source=tests/shell.sh
. "$(dirname "${BASH_SOURCE[0]}")/../shell.sh"
need_built mesa mesa-server
mesa=$build/mesa
server=

stop_server() {
    if [ -n "$server" ]; then
        kill "$server" 2>/dev/null
        wait "$server" 2>/dev/null
    fi
    server=
}

# A redis-server of the test's own, which syncs what it acknowledges; redis_place is where stores find it. False: there
# is none to start.
redis=
export redis_place=redis+unix://$folder/redis
start_redis() {
    command -v redis-server >/dev/null || return 1
    redis-server --port 0 --unixsocket "$folder/redis" --dir "$folder" --save "" --appendonly yes --appendfsync always \
        >"$folder/redis.log" 2>&1 &
    redis=$!
    wait_until test -S "$folder/redis" || fail 'redis-server does not listen'
}
stop_redis() {
    if [ -n "$redis" ]; then
        kill -KILL "$redis" 2>/dev/null
        wait "$redis" 2>/dev/null
    fi
    redis=
}
trap 'stop_server; stop_redis; rm -rf "$folder"' EXIT

# COMMAND...: until it is true; false after five minutes, which no machine needs however busy.
wait_until() {
    for _ in $(seq 3000); do
        "$@" && return 0
        sleep 0.1
    done
    return 1
}

# The model with a chat template, for start_server to take.
model=$source_dir/deploy/models/demo
give_template() {
    mkdir "$folder/talking"
    ln -s "$model"/* "$folder/talking/"
    model=$folder/talking
    cat >"$model/chat_template.jinja" <<'TEMPLATE'
{{- bos_token }}
{%- for message in messages %}
    {{- message.role + ': ' + message.content + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- 'assistant: ' }}
{%- endif %}
TEMPLATE
}

# NAME...: of each $folder/NAME.json the run $folder/NAME, a step from the random start, with the demo's tokenizer.
train_a_step() {
    local demo=$source_dir/deploy/models/demo name
    "$build/mesa-trainer" pack --tokenizer "$demo" --out "$folder/data" "$source_dir/README.md" >"$folder/log" 2>&1 ||
        { cat "$folder/log"; exit 1; }
    for name; do
        cat >"$folder/run.ini" <<CONFIG
[model]
base = $folder/$name.json
[data]
train = $folder/data
tokenizer = $demo
context = 64
[train]
steps = 1
batch_tokens = 64
micro_rows = 1
CONFIG
        "$build/mesa-trainer" train --config "$folder/run.ini" --out "$folder/$name" >"$folder/log" 2>&1 ||
            { cat "$folder/log"; exit 1; }
    done
}

# [OPTION...]: more options of the server; served_as, where it is set, is the model's name. Exports MESA_URL and waits
# until it is ready; address is that of its TCP listener, where it has one.
start_server() {
    "$build/mesa-server" --model "${served_as:-demo}=$model" --listen "unix:$folder/socket" "$@" \
        >"$folder/server.log" 2>&1 &
    server=$!
    export MESA_URL=unix:$folder/socket
    for _ in $(seq 3000); do
        if curl -fsS -o /dev/null --max-time 60 --unix-socket "$folder/socket" http://localhost/health/ready 2>/dev/null
        then
            export address
            address=$(grep -oE 'listening on .*' "$folder/server.log" | grep -oE 'http://[0-9.]+:[0-9]+' | head -n 1)
            return 0
        fi
        kill -0 "$server" 2>/dev/null || break
        sleep 0.1
    done
    cat "$folder/server.log"
    echo "FAIL: the server does not become ready"
    exit 1
}

# STATUS OUT-PATTERN ERR-PATTERN COMMAND...: extended regular expressions; "" matches only nothing at all.
expect() {
    local wanted=$1 out=$2 err=$3 status
    shift 3
    timeout 600 "$@" >"$folder/out" 2>"$folder/err"
    status=$?
    if [ $status -ne "$wanted" ] || ! matches "$folder/out" "$out" || ! matches "$folder/err" "$err"; then
        fail "status $status (want $wanted), or its output is not as wanted: $*"
        sed 's/^/    out: /' "$folder/out" | head -n 20
        sed 's/^/    err: /' "$folder/err" | head -n 20
    fi
}

matches() {
    if [ -z "$2" ]; then
        [ ! -s "$1" ]
    else
        grep -qE -- "$2" "$1"
    fi
}

# Whether the request field named $1 is taken with the JSON value $2: what a server refuses by name it does not have.
server_takes() {
    "$mesa" complete --no-stream --max-tokens 1 --field "$1=$2" x >/dev/null 2>"$folder/err"
}
