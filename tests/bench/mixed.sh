#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Sessions that generate while long prompts arrive: the gaps between a client's tokens, and what both kinds of work get
# of what each gets alone. Prints a Markdown table, a line a round: alone, the other alone, together.
#
#   tests/bench/mixed.sh MODEL [SESSIONS [TOKENS]]    sessions that generate (default 128), tokens of a prompt (8192)
# Environment: MESA_BUILD (default build; any folder with the programs), DEVICE (default cpu; cuda:0), ROUNDS (default
# 3), SECONDS_EACH (default 5) of a measurement, PROMPTS at a time (default 2), WRITE (default 256) tokens a session
# writes before the next one takes its place. A model to measure: mesa-trainer init.
set -euo pipefail
build=${MESA_BUILD:-$(dirname "$0")/../../build}
model=$1
sessions=${2:-128}
tokens=${3:-8192}
prompts=${PROMPTS:-2}
# shellcheck source=tests/bench/serving.sh
. "$(dirname "$0")/serving.sh"
serve --model "bench=$model" --device "${DEVICE:-cpu}" --rows $((sessions + prompts)) \
    --queue-tokens $((16 * tokens * prompts))

generate() { # FILE: sessions that write
    "$build/mesa" bench --csv --concurrency "$sessions" --requests 1000000 --seconds "${SECONDS_EACH:-5}" \
        --prompt-tokens 16 --max-tokens "${WRITE:-256}" --final-usage --seed "$round" >"$1"
}
read_prompts() { # FILE: prompts of which one token is wanted
    "$build/mesa" bench --csv --concurrency "$prompts" --requests 1000000 --seconds "${SECONDS_EACH:-5}" \
        --prompt-tokens "$tokens" --max-tokens 1 --seed $((round + 1000)) >"$1"
}
prompt_rate() { # FILE: tokens read a second
    awk -v n="$(column prompt_tokens "$1")" -v s="$(column seconds "$1")" 'BEGIN { print n / s }'
}

echo "| written/s alone | beside prompts | read/s alone | beside sessions | sum of shares |" \
    "gap p50, p99, most ms alone | beside prompts | first token of a prompt p50 ms alone | beside sessions |"
echo "|---|---|---|---|---|---|---|---|---|"
for round in $(seq "${ROUNDS:-3}"); do
    generate "$folder/written"
    read_prompts "$folder/read"
    generate "$folder/written_beside" &
    generator=$!
    read_prompts "$folder/read_beside"
    wait "$generator"
    for file in written read written_beside read_beside; do
        [ "$(column failed "$folder/$file")" = 0 ] || { echo "$file: requests failed" >&2; exit 1; }
    done
    gaps() { # FILE
        echo "$(column between_p50_ms "$1"), $(column between_p99_ms "$1"), $(column between_max_ms "$1")"
    }
    awk -v w="$(column tokens_per_second "$folder/written")" \
        -v wb="$(column tokens_per_second "$folder/written_beside")" \
        -v r="$(prompt_rate "$folder/read")" -v rb="$(prompt_rate "$folder/read_beside")" \
        -v g="$(gaps "$folder/written")" -v gb="$(gaps "$folder/written_beside")" \
        -v f="$(column first_p50_ms "$folder/read")" -v fb="$(column first_p50_ms "$folder/read_beside")" 'BEGIN {
        printf "| %.0f | %.0f | %.0f | %.0f | %.2f |", w, wb, r, rb, wb / w + rb / r
        printf " %s | %s | %s | %s |\n", g, gb, f, fb
    }'
done
