#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# What a request pays and gets at several exit_thresholds of a looped model with a gate, through the server.
#
#   tests/bench/exits.sh MODEL TEXT [TOKENS]
#
# The first 200 bytes of TEXT are a prompt behind which TOKENS (256) ids are generated, likeliest first, one request at
# a time; the first 4000 are scored by an echo of their log-probabilities. Thresholds take turns. Prints a Markdown
# table: the time of an id that is generated (by the quickest of the rounds) and the server's processor time of it (of
# all rounds, since what else the machine does hardly moves it), its loops and how many were read at each by
# usage.compute, and the loss of the text read at such exits, with its mean loop.
# Environment: MESA_BUILD (default build), DEVICE (cpu), ROUNDS (5), THRESHOLDS ("0.3 0.6 0.9 1.0").
set -euo pipefail
build=${MESA_BUILD:-$(dirname "$0")/../../build}
model=$1 text=$2
tokens=${3:-256}
thresholds=${THRESHOLDS:-0.3 0.6 0.9 1.0}
# shellcheck source=tests/bench/serving.sh
. "$(dirname "$0")/serving.sh"
serve --model "bench=$model" --device "${DEVICE:-cpu}"

ask() { # BODY: answer to $folder/answer; prints the milliseconds
    curl -sS -o "$folder/answer" -w '%{time_total}\n' --unix-socket "${MESA_URL#unix:}" --data-binary "$1" \
        -H 'Content-Type: application/json' http://localhost/v1/completions | awk '{ print 1000 * $1 }'
    jq -e .choices "$folder/answer" >"$folder/choices" || { head -c 300 "$folder/answer" >&2; exit 1; }
}
body() { # THRESHOLD BYTES OPTION: a request's JSON
    head -c "$2" "$text" | iconv -c -f UTF-8 -t UTF-8 |
        jq -Rs --argjson at "$1" --argjson more "$3" '{prompt: ., exit_threshold: $at, temperature: 0} + $more'
}
generate() { # THRESHOLD COUNT
    ask "$(body "$1" 200 "{\"max_tokens\": $2, \"ignore_eos\": true}")"
}
processor() { # the server's milliseconds so far
    awk -v tick="$(getconf CLK_TCK)" '{ print 1000 * ($14 + $15) / tick }' "/proc/$server/stat"
}
times() { # THRESHOLD: of an id behind the first
    paste "$folder/one-$1" "$folder/all-$1" | awk -v n="$tokens" '
        NR == 1 || $1 < one { one = $1 }
        NR == 1 || $3 < all { all = $3 }
        { spent += $4 - $2 }
        END { printf "%.3f | %.3f", (all - one) / (n - 1), spent / NR / (n - 1) }'
}

for _ in $(seq "${ROUNDS:-5}"); do
    for at in $thresholds; do
        for count in one all; do
            before=$(processor)
            took=$(generate "$at" "$([ $count = one ] && echo 1 || echo "$tokens")")
            echo "$took $(awk -v a="$before" -v b="$(processor)" 'BEGIN { print b - a }')" >>"$folder/$count-$at"
        done
        jq -r '.usage.compute.completion | "\(.loops_mean) | \(.exit_histogram)"' "$folder/answer" >"$folder/loops-$at"
    done
done
echo "| exit_threshold | ms an id | of a processor | loops | ids read at each loop | loss of the text | its loops |"
echo "|---|---|---|---|---|---|---|"
for at in $thresholds; do
    ask "$(body "$at" 4000 '{"max_tokens": 0, "echo": true, "logprobs": 0, "compute_details": true}')" >/dev/null
    loss=$(jq -r '[.choices[0].logprobs.token_logprobs[] | numbers] | -add / length' "$folder/answer")
    loops=$(jq -r '[.choices[0].compute_details.loops[] | numbers] | add / length' "$folder/answer")
    echo "| $at | $(times "$at") | $(cat "$folder/loops-$at") | $(printf '%.4f | %.3f' "$loss" "$loops") |"
done
