#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Served against offline: the load generator at several levels, streaming and plain, between runs of mesa-trainer bench
# on the same model in the same minutes. Prints a Markdown table.
#
#   tests/bench/load.sh MODEL [LEVEL...]        levels: requests at a time, default 1 8 32
# Environment: MESA_BUILD (default build), REQUESTS a level for each one at a time (default 4), PROMPT and TOKENS
# (default 128 and 64). CPU figures are the kernel's own: of the loop thread and of the pool that parses bodies, which
# is all that the server does beside its engine, and of the engine with its team.
set -euo pipefail
build=${MESA_BUILD:-$(dirname "$0")/../../build}
model=$1
shift
levels=("$@")
[ ${#levels[@]} -gt 0 ] || levels=(1 8 32)
folder=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server"; rm -rf "$folder"' EXIT

OMP_WAIT_POLICY=passive GOMP_SPINCOUNT=20000 "$build/mesa-server" --model "bench=$model" --listen "unix:$folder/socket" \
    >"$folder/log" 2>&1 &
server=$!
export MESA_URL=unix:$folder/socket
for _ in $(seq 300); do
    curl -fsS -o /dev/null --unix-socket "$folder/socket" http://localhost/health/ready 2>/dev/null && break
    sleep 0.1
done

ticks=$(getconf CLK_TCK)
cpu_seconds() { # loop | engine: user and system time of the threads
    local file name
    for file in /proc/$server/task/*/stat; do
        name=$(sed -E 's/^[0-9]+ \((.*)\) .*/\1/' "$file")
        [ "$(basename "$(dirname "$file")")" = "$server" ] && name=loop
        case $name in
        loop | libuv-worker) name=loop ;;
        *) name=engine ;;
        esac
        [ "$name" != "$1" ] || sed -E 's/^[0-9]+ \(.*\) //' "$file"
    done | awk -v ticks="$ticks" '{ sum += $12 + $13 } END { printf "%.2f", sum / ticks }'
}
offline() { # tokens a second of one stream, and of a prompt
    "$build/mesa-trainer" bench "$model" --rounds 1 --tokens "${TOKENS:-64}" --prompt "${PROMPT:-128}" --context 64 \
        --rows 1 | awk -F'|' '/generating/ { split($3, g, " ") } /prefill/ { split($3, p, " ") } END { print g[1], p[1] }'
}
column() { # NAME, of a CSV with a heading and one line
    awk -F, -v name="$1" 'NR == 1 { for (i = 1; i <= NF; i++) if ($i == name) at = i } NR == 2 { print $at }' \
        "$folder/csv"
}

"$build/mesa" bench --requests 4 --concurrency 4 --max-tokens 8 >/dev/null
echo "| at a time | kind | written/s | of offline | read/s | first token p50 / p99 ms | between p50 / p99 ms | end to end p50 ms |" \
    "CPU beside the engine, us a token | engine, us a token | generator, us a token | resident MB | offline |"
echo "|---|---|---|---|---|---|---|---|---|---|---|---|---|"
for level in "${levels[@]}"; do
    for kind in stream plain; do
        arguments=(--prompt-tokens "${PROMPT:-128}" --max-tokens "${TOKENS:-64}")
        [ $kind = stream ] || arguments+=(--plain)
        before=$(offline)
        loop=$(cpu_seconds loop)
        engine=$(cpu_seconds engine)
        "$build/mesa" bench --csv --concurrency "$level" --requests $((level * ${REQUESTS:-4})) \
            "${arguments[@]}" >"$folder/csv" || true
        loop_after=$(cpu_seconds loop)
        engine_after=$(cpu_seconds engine)
        after=$(offline)
        resident=$(awk '/^VmRSS/ { printf "%.0f", $2 / 1024 }' "/proc/$server/status")
        awk -v level="$level" -v kind=$kind -v rate="$(column tokens_per_second)" -v tokens="$(column completion_tokens)" \
            -v prompt="$(column prompt_tokens)" -v seconds="$(column seconds)" -v f50="$(column first_p50_ms)" \
            -v f99="$(column first_p99_ms)" -v fm="$(column first_max_ms)" -v b50="$(column between_p50_ms)" \
            -v b99="$(column between_p99_ms)" -v w50="$(column whole_p50_ms)" -v l="$loop" -v la="$loop_after" \
            -v e="$engine" -v ea="$engine_after" -v g="$(column generator_cpu_seconds)" -v rss="$resident" \
            -v before="$before" -v after="$after" '
            function ms(x) { return x == "" ? "-" : sprintf("%.1f", x) }
            BEGIN {
                split(before, b, " "); split(after, a, " ")
                offline = (b[1] + a[1]) / 2
                printf "| %d | %s | %.0f | %.2f | %.0f | %s / %s | %s / %s | %s | %.0f | %.0f | %.0f | %s | %.0f, %.0f |\n",
                    level, kind, rate, rate / offline, prompt / seconds, ms(f50), ms(f99 == "" ? fm : f99), ms(b50),
                    ms(b99), ms(w50), 1e6 * (la - l) / tokens, 1e6 * (ea - e) / tokens, 1e6 * g / tokens, rss, b[1], a[1]
            }'
    done
done
