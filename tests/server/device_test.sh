#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# A GPU that is not there, too old, too small, or lost while requests run: what the server says, and how it ends; two
# that share the requests. The GPU is tests/device/module.c, which computes on the CPU; its environment says what it
# does.
# shellcheck source=tests/clients/server.sh
. "$(dirname "$0")/../clients/server.sh"
pretended=$build/tests/device
[ -d "$pretended" ] || { echo "SKIP: $pretended is not built"; exit 77; }
export MESA_LIBRARY_DIR=$pretended

serve=("$build/mesa-server" --model "demo=$source_dir/deploy/models/demo" --listen "unix:$folder/none" --device)

# ---- devices that cannot be had --------------------------------------------------------------------------------------

mkdir "$folder/empty"
none='model demo cannot be loaded: device cuda'
missing=$folder/empty/libmesa_kern_cuda.so
old='no CUDA device: the driver is too old'
expect 4 '' "$none:0: no CUDA module: $missing: " env MESA_LIBRARY_DIR="$folder/empty" "${serve[@]}" cuda:0
expect 4 '' "$none:7: device .*: this host has 2 CUDA devices" "${serve[@]}" cuda:7
expect 4 '' "$none:0: $old" env PRETEND_REFUSAL="$old" "${serve[@]}" cuda:0
expect 4 '' 'cuda:0 has 9.5 of 9.5 MiB free; [0-9.]+ are needed: weights [0-9.]+, 256 states [0-9.]+, 0 KV pages 0.0,' \
    env PRETEND_MEMORY=10000000 "${serve[@]}" cuda:0
expect 2 '' 'device .*gpu.* is not known; it is cpu, cpu:16, cpu:32, cpu:64, cuda:N or auto' "${serve[@]}" gpu

# ---- auto ------------------------------------------------------------------------------------------------------------

MESA_LIBRARY_DIR=$folder/empty start_server --device auto
grep -q "device auto is cpu (.*), not CUDA: no CUDA module: " "$folder/server.log" ||
    fail "auto does not tell why not CUDA"
stop_server
start_server --device auto
grep -q 'device auto is cuda:0 (pretended)"' "$folder/server.log" || fail "auto does not tell what it took"
stop_server
if [ -x "$build/mesa-trainer" ]; then
    expect 0 '^all ' '' "$build/mesa-trainer" quantize "$model" --out "$folder/q8"
    model=$folder/q8 start_server --device auto
    grep -q 'device auto is cpu (.*), not CUDA: the weights are quantised"' "$folder/server.log" ||
        fail "auto does not leave quantised weights on the CPU"
    stop_server
fi

# ---- two devices -----------------------------------------------------------------------------------------------------

expect 2 '' 'device: a name of the list is empty' "${serve[@]}" cuda:0,,cuda:1
start_server --device cuda:0,cuda:1 --rows 8 --admin-listen "unix:$folder/admin"
grep -q 'on cuda:0 (pretended), 8 rows, model demo .* on cuda:1 (pretended), 8 rows' "$folder/server.log" ||
    fail "the server does not tell of both devices"
[ "$("$mesa" models | grep -c demo)" = 1 ] || fail "a model on two devices is not one model"
"$mesa" bench --concurrency 8 --requests 16 --max-tokens 16 --prompt-tokens 8 >"$folder/bench" 2>&1 ||
    fail "$(cat "$folder/bench")"
curl -sS --unix-socket "$folder/admin" http://localhost/metrics >"$folder/metrics"
for device in cuda:0 cuda:1; do
    tokens=$(sed -n "s/^mesa_tokens_total{model=\"demo\",device=\"$device\",kind=\"completion\"} //p" "$folder/metrics")
    # How the rest is shared out is up to which of them is quicker.
    [ "${tokens:-0}" -ge 32 ] || fail "$device wrote ${tokens:-no} of 256 tokens"
done
sort "$folder/metrics" | grep -v '^#' | sed 's/ [^ ]*$//' | uniq -d | grep . && fail "a series is there twice"
stop_server

# ---- a device that is lost -------------------------------------------------------------------------------------------

expect_end() { # the server ends by itself, with status 1
    local status
    for _ in $(seq 3000); do
        kill -0 "$server" 2>/dev/null || break
        sleep 0.1
    done
    kill -0 "$server" 2>/dev/null && fail "the server goes on without its device" && kill "$server"
    wait "$server"
    status=$?
    server=
    [ $status -eq 1 ] || fail "exit status $status (want 1, which systemd restarts)"
}

PRETEND_LOST=$folder/lost start_server --device cuda:0 --rows 8
"$mesa" complete --max-tokens 60000 --ignore-eos "A long" >"$folder/stream" 2>"$folder/stream.err" &
stream=$!
"$mesa" complete --no-stream --max-tokens 60000 --ignore-eos "A long" >"$folder/plain" 2>"$folder/plain.err" &
plain=$!
both_run() { # and one of them has told something
    [ -s "$folder/stream" ] &&
        curl -sS --unix-socket "$folder/socket" http://localhost/metrics | grep -q '^mesa_rows{.*} 2$'
}
wait_until both_run || fail "two requests do not run"
touch "$folder/lost"
wait $stream && fail "a stream of a lost device ends well"
wait $plain && fail "an answer of a lost device ends well"
grep -q 'the device failed' "$folder/stream.err" || fail "the stream does not say why: $(cat "$folder/stream.err")"
grep -q 'answered 500 .*: the device failed' "$folder/plain.err" ||
    fail "the answer does not say why: $(cat "$folder/plain.err")"
[ ! -s "$folder/plain" ] || fail "a plain answer of a lost device has text"
expect_end
grep -q 'model demo failed on cuda:0 (pretended): running a step: device lost' "$folder/server.log" ||
    fail "the log does not tell of the loss"

# ---- one of two devices ----------------------------------------------------------------------------------------------

ready() { curl -sS -o "$folder/ready" -w '%{http_code}' --unix-socket "$folder/admin" http://localhost/health/ready; }

# The second of two requests goes to the second device, which runs 5 plans when it warms up.
PRETEND_LOST_AFTER='cuda:1 60' start_server --device cuda:0,cuda:1 --rows 8 --admin-listen "unix:$folder/admin" \
    --drain-time 3600
rm "$folder/stream" # of the device before
[ "$(ready)" = 200 ] || fail "not ready: $(cat "$folder/ready")"
"$mesa" complete --max-tokens 1500 --ignore-eos --usage "A long" >"$folder/stream" 2>"$folder/stream.err" &
stream=$!
wait_until [ -s "$folder/stream" ] || fail "the stream does not begin"
kill -STOP $stream # so that it does not end before it was seen to go on: more is to come than the system keeps for it
"$mesa" complete --max-tokens 1500 --ignore-eos "A long" >"$folder/short" 2>"$folder/short.err" &&
    fail "a stream of a lost device ends well"
grep -q 'the device failed' "$folder/short.err" || fail "the stream does not say why: $(cat "$folder/short.err")"
[ "$(ready)" = 503 ] || fail "ready without a device: $(cat "$folder/ready")"
grep -q '"failed"' "$folder/ready" || fail "health does not tell what failed: $(cat "$folder/ready")"
"$mesa" complete --max-tokens 4 "More" >"$folder/plain" 2>"$folder/plain.err" && fail "a new request is taken"
grep -q 'answered 503 .*: a device failed' "$folder/plain.err" ||
    fail "a refusal does not say why: $(cat "$folder/plain.err")"
kill -CONT $stream
wait $stream || fail "the request on the other device did not finish: $(cat "$folder/stream.err")"
grep -q "1500" "$folder/stream.err" || fail "the request on the other device was cut: $(cat "$folder/stream.err")"
expect_end
grep -q 'model demo failed on cuda:1 (pretended): running a step: device lost' "$folder/server.log" ||
    fail "the log does not tell which device was lost"

[ $failures -eq 0 ] || cat "$folder/server.log"
exit $((failures > 0))
