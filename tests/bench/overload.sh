#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# More than the server can do: a closed loop measures its rate, then an open loop offers several times as much, first
# without coming back after a refusal, then coming back when Retry-After says so. Prints a Markdown table.
#
#   tests/bench/overload.sh MODEL [TIMES...]    times the measured rate, default 4
# Environment: MESA_BUILD (default build), ROWS (default 32) and QUEUE (default 64) of the server, PROMPT and TOKENS
# (default 32 and 32), SECONDS_OFFERED (default 20) that arrivals last. The bound of a request that is taken in is what
# stands before it and itself at the measured rate: (QUEUE + ROWS) / rate.
set -euo pipefail
build=${MESA_BUILD:-$(dirname "$0")/../../build}
model=$1
shift
times=("$@")
[ ${#times[@]} -gt 0 ] || times=(4)
rows=${ROWS:-32} queue=${QUEUE:-64}
# shellcheck source=tests/bench/serving.sh
. "$(dirname "$0")/serving.sh"
serve --model "bench=$model" --rows "$rows" --queue-requests "$queue"

bench() {
    "$build/mesa" bench --csv --prompt-tokens "${PROMPT:-32}" --max-tokens "${TOKENS:-32}" "$@" >"$folder/csv" || true
}

bench --concurrency "$rows" --requests $((rows * 32)) --warm-up "$rows"
rate=$(awk -v n="$(column succeeded)" -v s="$(column seconds)" 'BEGIN { printf "%.3f", n / s }')
alone="$(column first_p99_ms) $(column between_p99_ms) $(column whole_p99_ms)"
read -r first between whole <<<"$alone"
echo "Closed loop, $rows at a time: $rate requests a second; p99 first token $first ms, between $between ms," \
    "end to end $whole ms."
echo
echo "| offered | coming back | taken in | refused at last | first token p50, p99 ms | between p50, p99 ms |" \
    "end to end p50, p99, bound ms | of which sent late, p99 ms | until refused p50, p99, max ms |" \
    "came back, of these taken in |"
echo "|---|---|---|---|---|---|---|---|---|---|"
for factor in "${times[@]}"; do
    for retries in 0 1 8; do
        offered=$(awk -v r="$rate" -v f="$factor" 'BEGIN { printf "%.3f", r * f }')
        requests=$(awk -v r="$offered" -v s="${SECONDS_OFFERED:-20}" 'BEGIN { printf "%d", r * s }')
        bench --rate "$offered" --requests "$requests" --retries "$retries"
        awk -v factor="$factor" -v retries="$retries" -v ok="$(column succeeded)" -v failed="$(column failed)" \
            -v f50="$(column first_p50_ms)" -v f99="$(column first_p99_ms)" -v b50="$(column between_p50_ms)" \
            -v b99="$(column between_p99_ms)" -v w50="$(column whole_p50_ms)" -v w99="$(column whole_p99_ms)" \
            -v late="$(column late_p99_ms)" -v r50="$(column refused_p50_ms)" \
            -v r99="$(column refused_p99_ms)" -v rmax="$(column refused_max_ms)" -v again="$(column tried_again)" \
            -v taken="$(column accepted_again)" -v bound="$(awk -v n=$((queue + rows)) -v r="$rate" \
                'BEGIN { print 1000 * n / r }')" '
            BEGIN {
                printf "| %s times | %s | %d | %d | %.0f, %.0f | %.1f, %.1f | %.0f, %.0f, %.0f | %.0f |", factor,
                    retries ? (retries == 1 ? "once" : "up to " retries " times") : "no", ok, failed, f50, f99, b50,
                    b99, w50, w99, bound, late
                printf " %.1f, %.1f, %.1f | %s |\n", r50, r99, rmax,
                    again ? sprintf("%d, %.0f %%", again, 100 * taken / again) : "-"
            }'
        sleep 1
    done
done
