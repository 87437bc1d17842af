#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Time to the first token of a long prompt, through the server: nothing kept, kept for others, and begun from what was
# kept. Two servers of one model answer in turns, one without a prefix cache. Prints a Markdown table: medians over the
# rounds and their range, and the share of what the cache costs a prompt that it does not know. Then continuations of
# one context that are scored at once, which read it once even without a cache.
#
#   tests/bench/prefix.sh MODEL [TOKENS]        tokens of a prompt, default 4000
# Environment: MESA_BUILD (default build; any folder with the programs), DEVICE (default cpu; cuda:0), ROUNDS (default
# 7), REQUESTS a round (default 2). A model to measure: mesa-trainer init.
set -euo pipefail
build=${MESA_BUILD:-$(dirname "$0")/../../build}
model=$1
tokens=${2:-4000}
# shellcheck source=tests/bench/serving.sh
. "$(dirname "$0")/serving.sh"
serve --model "bench=$model" --device "${DEVICE:-cpu}"
without=$MESA_URL
everything=$folder
folder=$everything/with
mkdir "$folder"
trap 'kill "$first" "$server"; rm -rf "$everything"' EXIT
first=$server
PREFIX_BUDGET=4G serve --model "bench=$model" --device "${DEVICE:-cpu}"
with=$MESA_URL

ask() { # KIND URL SEED: one more round's time to the first token, their mean
    MESA_URL=$2 "$build/mesa" bench --csv --concurrency 1 --requests "${REQUESTS:-2}" --prompt-tokens "$tokens" \
        --max-tokens 2 --seed "$3" >"$folder/csv"
    [ "$(column failed)" = 0 ] || { echo "a request failed" >&2; exit 1; }
    column first_mean_ms >>"$folder/$1"
}
median() { # KIND: and the range
    sort -n "$folder/$1" | awk '{ v[NR] = $1 } END { printf "%.1f (%.1f-%.1f)", v[int((NR + 1) / 2)], v[1], v[NR] }'
}
score() { # KIND COUNT SEED: that many continuations of 16 tokens behind one context, scored at once without a cache
    awk -v n="$2" -v seed="$3" -v tokens="$tokens" 'BEGIN {
        srand(seed)
        for (i = 0; i < tokens; i++) context = context int(rand() * 20000) + 100 ","
        printf "{\"max_tokens\":0,\"echo\":true,\"logprobs\":0,\"prompt\":["
        for (k = 0; k < n; k++) {
            printf "%s[%s", (k ? "," : ""), context
            for (i = 0; i < 16; i++) printf "%s%d", (i ? "," : ""), rand() * 20000 + 100
            printf "]"
        }
        print "]}"
    }' >"$folder/body"
    curl -sS -o "$folder/answer" -w '%{time_total}\n' --unix-socket "${without#unix:}" --data-binary "@$folder/body" \
        -H 'Content-Type: application/json' http://localhost/v1/completions |
        awk '{ print 1000 * $1 }' >>"$folder/$1"
    grep -q '"choices"' "$folder/answer" || { head -c 300 "$folder/answer" >&2; exit 1; }
}
for round in $(seq "${ROUNDS:-7}"); do
    ask off "$without" "$((round * 1000))"
    ask cold "$with" "$((round * 1000 + 1))"
    ask kept "$with" "$((round * 1000 + 1))"
    score one 1 "$round"
    score many 16 "$((round + 1000))"
    paste "$folder/cold" "$folder/off" | tail -n 1 | awk '{ print 100 * ($1 / $2 - 1) }' >>"$folder/cost"
done
echo "| $tokens tokens | first token, ms |"
echo "|---|---|"
echo "| no cache | $(median off) |"
echo "| cache on, a new prompt | $(median cold) |"
echo "| cache on, known but for its last chunk | $(median kept) |"
echo "| what the cache costs a new prompt, % | $(median cost) |"
echo
echo "| a context of $tokens tokens, scored without a cache | the whole answer, ms |"
echo "|---|---|"
echo "| one continuation of 16 tokens | $(median one) |"
echo "| 16 of them at once | $(median many) |"
