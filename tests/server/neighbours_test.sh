#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# A request alone equals the same request among 31 others of mixed knobs, byte for byte, through the server; a seed
# gives the same text at any place in a list; choices share one reading of their prompt and keep the bits that they have
# without.
# shellcheck source=tests/clients/server.sh
. "$(dirname "$0")/../clients/server.sh"
start_server

ask() { # BODY: the answer
    curl -sS --max-time 600 --unix-socket "$folder/socket" -H 'Content-Type: application/json' --data-binary "$1" \
        http://localhost/v1/completions
}
choices() { # what an answer says beside its name, the time and how much of the prompts was read: what others have read
    # of them need not be read again
    sed -E 's/"id":"cmpl-[0-9a-f]+"//; s/"created":[0-9]+//; s/"cached_tokens":[0-9]+//' |
        sed -E 's/("compute":\{"prompt":)\{[^}]*\}/\1/'
}
texts() { # of each choice, a line each, without its number
    grep -oE '"text":"([^"\\]|\\.)*","logprobs":(null|\{[^}]*(\{[^}]*\}[^}]*)*\}),"finish_reason":"[a-z]*"'
}

# ---- alone and among others ------------------------------------------------------------------------------------------

long=$(printf 'The king said that the %s of the city would stand. ' walls gates towers people fields rivers roads ships)
prompts=("Once upon a time" "$long" "The" "It was the best of times, it was the worst of times")
knobs=('' '"n":3' '"best_of":4,"n":2' '"presence_penalty":1.5,"frequency_penalty":0.5' '"repetition_penalty":1.3'
    '"logprobs":5' '"logprobs":2,"echo":true,"n":2' '"cg_tolerance":0.05' '"cg_max_steps":2' '"cg_mode":"exact"'
    '"cg_mode":"steps","cg_max_steps":3' '"temperature":0' '"top_p":0.8,"top_k":40' '"min_p":0.1,"temperature":1.7'
    '"logit_bias":{"17":4,"300":-100}' '"stop":[" the"],"min_tokens":4')
for i in $(seq 0 31); do
    fields="\"prompt\":\"${prompts[$((i % 4))]}\",\"max_tokens\":$((5 + i % 11)),\"seed\":$((i * 7919))"
    [ -z "${knobs[$((i % 16))]}" ] || fields+=",${knobs[$((i % 16))]}"
    [ $((i / 16)) -eq 0 ] || fields+=',"return_token_ids":true'
    printf '{%s}' "$fields" >"$folder/body$i"
    ask "@$folder/body$i" | choices >"$folder/alone$i"
    grep -q '"finish_reason":"' "$folder/alone$i" || fail "request $i alone: $(cat "$folder/alone$i")"
    [ "$i" -eq 0 ] || echo next
    printf 'url = "http://localhost/v1/completions"\nunix-socket = "%s"\ndata-binary = "@%s"\noutput = "%s"\n' \
        "$folder/socket" "$folder/body$i" "$folder/among$i"
    printf 'header = "Content-Type: application/json"\n'
done >"$folder/config"
for round in 1 2; do
    curl -sS --no-progress-meter --max-time 900 --parallel --parallel-immediate --parallel-max 32 -K "$folder/config" ||
        fail "round $round of 32 at a time"
    for i in $(seq 0 31); do
        choices <"$folder/among$i" >"$folder/got"
        cmp -s "$folder/alone$i" "$folder/got" || {
            fail "round $round, request $i is not what it is alone: $(cat "$folder/body$i")"
            diff "$folder/alone$i" "$folder/got" | cut -c 1-400
        }
    done
done
grep -q '"cached_tokens":[1-9]' "$folder/among1" || fail "a long prompt was read again: $(cat "$folder/among1")"

# ---- any place in a list ---------------------------------------------------------------------------------------------

tail='"seed":11,"max_tokens":9,"logprobs":1'
alone=$(ask "{\"prompt\":\"The king\",$tail}" | texts)
[ -n "$alone" ] || fail "no text alone"
for list in '"The king","A","B"' '"A","The king","B"' '"A","B","C","The king"'; do
    place=$(awk -F, '{ for (i = 1; i <= NF; i++) if ($i == "\"The king\"") print i }' <<<"$list")
    got=$(ask "{\"prompt\":[$list],$tail}" | texts | sed -n "${place}p")
    [ "$got" = "$alone" ] || fail "place $place of a list: $got, alone: $alone"
done

# ---- choices ---------------------------------------------------------------------------------------------------------

count() { # kind: of the tokens so far
    curl -sS --unix-socket "$folder/socket" http://localhost/metrics |
        awk -v kind="kind=\"$1\"" '/^mesa_tokens_total/ && index($0, kind) { print $2 }'
}
ids=$(seq 100 1099 | paste -sd,)
before=$(count prompt)
ask "{\"prompt\":[$ids],\"n\":16,\"max_tokens\":8,\"seed\":5,\"logprobs\":2}" | texts >"$folder/sixteen"
read_once=$(($(count prompt) - before))
ask "{\"prompt\":[$ids],\"n\":1,\"max_tokens\":8,\"seed\":5,\"logprobs\":2}" | texts >"$folder/one"
ask "{\"prompt\":[$ids],\"n\":5,\"max_tokens\":8,\"seed\":5,\"logprobs\":2}" | texts >"$folder/five"
[ "$(wc -l <"$folder/sixteen")" -eq 16 ] || fail "not 16 choices: $(cat "$folder/sixteen")"
[ "$(sort -u "$folder/sixteen" | wc -l)" -gt 8 ] || fail "the choices are alike"
cmp -s <(head -n 1 "$folder/sixteen") "$folder/one" || fail "the first of 16 choices is not what it is alone"
cmp -s <(head -n 5 "$folder/sixteen") "$folder/five" || fail "the first 5 of 16 choices are not the 5"
# The first reads 1,000 ids, the others what is left after its last whole chunk.
[ "$read_once" -eq 1120 ] || fail "16 choices read $read_once ids of a prompt of 1000"

# ---- what sampling must not change -----------------------------------------------------------------------------------

same() { # WHAT BODY BODY: the texts and their logprobs
    local first second
    first=$(ask "$2" | texts)
    second=$(ask "$3" | texts)
    [ -n "$first" ] && [ "$first" = "$second" ] || fail "$1: $first against $second"
}
base='"prompt":"The king","max_tokens":9,"logprobs":2'
same 'top_p 0 is greedy' "{$base,\"temperature\":0}" "{$base,\"top_p\":0,\"temperature\":1.5,\"seed\":4}"
same 'a tiny top_p is greedy' "{$base,\"temperature\":0}" "{$base,\"top_p\":1e-9,\"seed\":4}"
same 'greedy choices are alike' "{$base,\"temperature\":0,\"top_p\":0.5,\"n\":2}" \
    "{$base,\"temperature\":0,\"top_k\":5,\"seed\":8,\"n\":2}"
same 'a seed with choices gives them again' "{$base,\"n\":3,\"seed\":7}" "{$base,\"n\":3,\"seed\":7}"
flat=$(seq 0 4095 | awk '{ printf "%s\"%d\":-100", (NR > 1 ? "," : ""), $1 }')
[ ${#flat} -gt 30000 ] || fail "no bias of all ids"
same 'a bias that all ids have is none' "{$base,\"temperature\":0}" "{$base,\"temperature\":0,\"logit_bias\":{$flat}}"
score='"prompt":[100,200,300,400,500],"max_tokens":0,"echo":true,"logprobs":3'
for knobs in '"temperature":0.1' '"temperature":2,"top_k":1' '"logit_bias":{"200":50,"300":-100}' \
    '"repetition_penalty":3,"presence_penalty":2'; do
    same "logprobs are the model's own ($knobs)" "{$score}" "{$score,$knobs}"
done

[ $failures -eq 0 ]
