#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# What prompts have in common, through the server: read once for a key and never for another, told in the usage and in
# the metrics, of no influence on an answer, and off where the configuration says so.
# shellcheck source=tests/clients/server.sh
. "$(dirname "$0")/../clients/server.sh"
chunk=32

keys=(the-first-long-enough-key the-other-long-enough-key)
for i in 0 1; do
    echo "client$i $(echo "${keys[$i]}" | "$build/mesa-server" --hash-key)"
done >"$folder/keys"
curl() { # as KEY: a request with that key
    command curl -sS --max-time 300 --unix-socket "$folder/socket" -H "Authorization: Bearer $key" "$@"
}
ask() { # BODY: the answer
    curl -H 'Content-Type: application/json' --data-binary "$1" http://localhost/v1/completions
}
cached() { # of an answer
    grep -oE '"cached_tokens":[0-9]+' <<<"$1" | cut -d: -f2
}
choices() { # of an answer, without what it was to read
    grep -oE '"choices":\[.*\],"usage"' <<<"$1"
}
metric() { # NAME: its value
    curl http://localhost/metrics | awk -v name="$1" 'index($0, name "{") == 1 { print $2 }'
}
answers() { # WHAT BODY CACHED: as many are cached, and the choices are those of before
    local answer
    answer=$(ask "$2")
    [ "$(cached "$answer")" = "$3" ] || fail "$1: $(cached "$answer") cached, not $3: $answer"
    [ -n "$wanted" ] || wanted=$(choices "$answer")
    [ -n "$wanted" ] && [ "$(choices "$answer")" = "$wanted" ] || fail "$1: $(choices "$answer"), not $wanted"
}

ids=$(seq 100 299 | paste -sd,)
body="{\"prompt\":[$ids],\"max_tokens\":6,\"seed\":3,\"logprobs\":2}"
last=$((199 / chunk * chunk))
key=${keys[0]} wanted=
start_server --keys "$folder/keys" --prefix-budget 64M --prefix-audit 1
answers 'a new prompt' "$body" 0
answers 'the same prompt' "$body" $last
key=${keys[1]}
answers 'of another key' "$body" 0
answers 'of another key, again' "$body" $last
[ "$(metric mesa_prefix_hits_total)" = 2 ] && [ "$(metric mesa_prefix_misses_total)" = 2 ] &&
    [ "$(metric mesa_prefix_states)" = 2 ] && [ "$(metric mesa_prefix_budget_bytes)" = 67108864 ] ||
    fail "metrics: $(curl http://localhost/metrics | grep mesa_prefix)"

# A session's first prompt; echo with logprobs only from where they were kept; several prompts at once.
session=$(curl -d "{\"prompt\":[$ids]}" http://localhost/v1/sessions | grep -oE '"id":"[^"]*"' | cut -d'"' -f4)
wanted=
first=$(ask "{\"session\":\"$session\",\"prompt\":[7,8],\"max_tokens\":4,\"seed\":3}")
[ "$(cached "$first")" = 0 ] || fail "a second turn: $first"
echo_body="{\"prompt\":[$ids],\"max_tokens\":2,\"seed\":3,\"logprobs\":2,\"echo\":true}"
answers 'echo where no logprobs were kept' "$echo_body" 0
answers 'echo where they were' "$echo_body" $last
wanted=
twice="{\"prompt\":[[1$ids],[1$ids]],\"max_tokens\":3,\"seed\":3}"
answers 'two equal ones at once' "$twice" $last
answers 'and again' "$twice" $((2 * last))
were_read_again() { # in room that nobody wants
    [ "$(metric mesa_prefix_audits_total)" -ge 2 ]
}
wait_until were_read_again || fail 'nothing was read again'
[ "$(metric mesa_state_audit_mismatch_total)" = 0 ] || fail 'a state was wrong'
stop_server

key=${keys[0]} wanted=
start_server --keys "$folder/keys" --prefix-budget 0
answers 'a new prompt without a cache' "$body" 0
answers 'the same prompt without a cache' "$body" 0
[ "$(metric mesa_prefix_states)" = 0 ] || fail 'states without a budget'

[ $failures -eq 0 ]
