#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Served against offline: the load generator at several levels, streaming and plain, between runs of mesa-trainer bench
# on the same model in the same minutes. Prints a Markdown table.
#
#   tests/bench/load.sh MODEL [LEVEL...]        levels: requests at a time, default 1 8 32, on a GPU 1 64 256
# Environment: MESA_BUILD (default build; any folder with the three programs, and the CUDA module for a GPU), DEVICE
# (default cpu; cuda:0), REQUESTS a level for each one at a time (default 4), PROMPT and TOKENS (default 128 and 64),
# KINDS (default all three). Kind `light` is a stream that tells its usage at the end, `stream` with each event. CPU
# figures are the kernel's own: of the loop thread and of the pool that parses bodies, which is all that the server
# does beside its engine, and of the engine with its team. Offline is as many sessions as the level has requests, which
# only generate; on a CPU the share of it is without the generator's own time. A model to measure: mesa-trainer init.
set -euo pipefail
build=${MESA_BUILD:-$(dirname "$0")/../../build}
model=$1
shift
levels=("$@")
device=${DEVICE:-cpu}
case $device in
cpu*) [ ${#levels[@]} -gt 0 ] || levels=(1 8 32) ;;
*) [ ${#levels[@]} -gt 0 ] || levels=(1 64 256) ;;
esac
# shellcheck source=tests/bench/serving.sh
. "$(dirname "$0")/serving.sh"
serve --model "bench=$model" --device "$device"

cpu_ns() { # loop | engine: time on a processor of the threads, in nanoseconds
    local task name
    for task in /proc/$server/task/*; do
        name=engine
        if [ "${task##*/}" = "$server" ] || [ "$(cat "$task/comm")" = libuv-worker ]; then
            name=loop
        fi
        [ "$name" != "$1" ] || cut -d' ' -f1 "$task/schedstat"
    done | awk '{ sum += $1 } END { printf "%.0f", sum }'
}
offline() { # SESSIONS that only generate, in one program: tokens a second
    "$build/mesa-trainer" bench "$model" --device "$device" --sessions "$1" --rounds 3 --tokens "${TOKENS:-64}" |
        awk -F'|' -v sessions="$1" '$2 + 0 == sessions { rate = $3 } END { print rate + 0 }'
}
# The generator's time on a processor, spread over all of them, is the server's to lose where it computes on them.
shared=0
[[ $device != cpu* ]] || shared=$(nproc)

"$build/mesa" bench --requests 4 --concurrency 4 --max-tokens 8 >/dev/null
echo "| at a time | kind | written/s | of offline | read/s | first token p50, p99 ms | between p50, p99 ms |" \
    "end to end p50 ms | CPU beside the engine, us a token | engine, us a token | generator, us a token |" \
    "resident MB | offline/s before, after |"
echo "|---|---|---|---|---|---|---|---|---|---|---|---|---|"
for level in "${levels[@]}"; do
    for kind in ${KINDS:-stream light plain}; do
        arguments=(--prompt-tokens "${PROMPT:-128}" --max-tokens "${TOKENS:-64}")
        [ $kind != plain ] || arguments+=(--plain)
        [ $kind != light ] || arguments+=(--final-usage)
        before=$(offline "$level")
        loop=$(cpu_ns loop)
        engine=$(cpu_ns engine)
        "$build/mesa" bench --csv --concurrency "$level" --requests $((level * ${REQUESTS:-4})) \
            "${arguments[@]}" >"$folder/csv" || true
        [ "$(column failed)" = 0 ] || echo "$(column failed) requests of the next line failed" >&2
        loop_after=$(cpu_ns loop)
        engine_after=$(cpu_ns engine)
        after=$(offline "$level")
        resident=$(awk '/^VmRSS/ { printf "%.0f", $2 / 1024 }' "/proc/$server/status")
        awk -v level="$level" -v kind=$kind -v rate="$(column tokens_per_second)" \
            -v tokens="$(column completion_tokens)" -v prompt="$(column prompt_tokens)" \
            -v seconds="$(column seconds)" -v f50="$(column first_p50_ms)" -v f99="$(column first_p99_ms)" \
            -v fm="$(column first_max_ms)" -v b50="$(column between_p50_ms)" -v b99="$(column between_p99_ms)" \
            -v w50="$(column whole_p50_ms)" -v l="$loop" -v la="$loop_after" -v e="$engine" -v ea="$engine_after" \
            -v g="$(column generator_cpu_seconds)" -v rss="$resident" -v before="$before" -v after="$after" \
            -v shared="$shared" '
            function ms(x) { return x == "" ? "-" : sprintf("%.1f", x) }
            BEGIN {
                own = shared ? seconds - g / shared : seconds
                printf "| %d | %s | %.0f | %.2f | %.0f |", level, kind, rate,
                    2 * rate * seconds / own / (before + after), prompt / seconds
                printf " %s, %s | %s, %s | %s |", ms(f50), ms(f99 == "" ? fm : f99), ms(b50), ms(b99), ms(w50)
                printf " %.0f | %.0f | %.0f | %s | %.0f, %.0f |\n", 1e-3 * (la - l) / tokens,
                    1e-3 * (ea - e) / tokens, 1e6 * g / tokens, rss, before, after
            }'
    done
done
