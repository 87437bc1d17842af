#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Prometheus' own checker over /metrics: before the first request, with labels, after refusals and a cancelled stream.
# shellcheck source=tests/clients/server.sh
. "$(dirname "$0")/server.sh"
command -v promtool >/dev/null || { echo "SKIP: promtool is not installed (package prometheus)"; exit 77; }
start_server --admin-listen "unix:$folder/admin"

check_metrics() { # WHEN
    curl -fsS --max-time 60 --unix-socket "$folder/admin" http://localhost/metrics >"$folder/metrics" ||
        fail "$1: no metrics"
    [ -s "$folder/metrics" ] || fail "$1: nothing"
    promtool check metrics <"$folder/metrics" >"$folder/out" 2>&1 || fail "$1: $(cat "$folder/out")"
    [ ! -s "$folder/out" ] || fail "$1: $(cat "$folder/out")"
}
value() { # NAME{LABELS}
    awk -v name="$1" '$1 == name { print $2 }' "$folder/metrics"
}

check_metrics 'before the first request'
"$mesa" bench --requests 8 --concurrency 4 --prompt-tokens 16 --max-tokens 8 >/dev/null
"$mesa" complete --temperature 101 x 2>/dev/null
"$mesa" complete --model 'no "such" model\' x 2>/dev/null
"$mesa" complete --ignore-eos --max-tokens 60000 x >"$folder/stream" &
stream=$!
wait_until [ -s "$folder/stream" ] || fail 'the stream does not begin'
kill -INT $stream
wait $stream
cancelled() {
    check_metrics 'while a cancellation is awaited'
    [ "$(awk '/^mesa_cancelled_total/ { sum += $2 } END { print sum }' "$folder/metrics")" -ge 1 ]
}
wait_until cancelled || fail 'cancelled requests are not counted'
check_metrics 'after some'
[ "$(value 'mesa_requests_total{model="demo",status="200"}')" -ge 9 ] 2>/dev/null || fail 'requests are not counted'
[ "$(awk '/^mesa_ttft_seconds_count/ { sum += $2 } END { print sum }' "$folder/metrics")" -ge 9 ] ||
    fail 'the time to the first token is not counted'
exit $((failures > 0))
