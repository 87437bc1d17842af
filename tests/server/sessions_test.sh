#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Sessions through the server: ten turns are one straight conversation, forks and rollbacks, conditions on the position,
# states taken to a second server, damaged states, other keys, names that are none. With the sessions in memory, and
# once more with a store.
# shellcheck source=tests/clients/server.sh
. "$(dirname "$0")/../clients/server.sh"
stored=${1:-} store=none durable=false
[ -z "$stored" ] || store=$folder/store durable='(true|false)' # a slow store's answer may come later

alice=$(printf 'a%.0s' $(seq 64)) bob=$(printf 'b%.0s' $(seq 64))
for name in alice bob; do
    printf '%s %s\n' "$name" "$(printf %s "${!name}" | sha256sum | cut -d' ' -f 1)"
done >"$folder/keys"
start_server --keys "$folder/keys" --store "$store"
key=$alice socket=$folder/socket

call() { # METHOD PATH [BODY]: the answer, a line with its status behind it
    curl -sS --max-time 300 --unix-socket "$socket" -w '\n%{http_code}' -X "$1" -H "Authorization: Bearer $key" \
        -H 'Content-Type: application/json' ${3:+--data-binary "$3"} "http://localhost$2"
}
expect() { # STATUS PATTERN WHAT ANSWER
    [ "$(tail -n 1 <<<"$4")" = "$1" ] && grep -qE "$2" <<<"$4" || fail "$3: not $1 with $2: $4"
}
create() {
    call POST /v1/sessions "${1:-{\}}" | grep -oE '"id":"sess-[0-9a-f]+"' | cut -d'"' -f 4
}
field() { # NAME ANSWER: of an integer
    grep -oE "\"$1\":[0-9]+" <<<"$2" | head -n 1 | cut -d: -f 2
}
said() { # what an answer says
    grep -oE '"text":"([^"\\]|\\.)*"' <<<"$1"
}
turn() { # SESSION FIELDS: a completion
    call POST /v1/completions "{\"session\":\"$1\",\"temperature\":0,$2}"
}
position() {
    field position "$(call GET "/v1/sessions/$1")"
}

# ---- turns -----------------------------------------------------------------------------------------------------------

id=$(create) twin=$(create '{"ttl_s":6000}')
[ -n "$id" ] || fail "no session was made"
expect 200 '"position":0,"state_bytes":[1-9]' "a new session" "$(call GET "/v1/sessions/$id")"
whole=$(call POST /v1/completions '{"prompt":"The king said","temperature":0,"max_tokens":40,"ignore_eos":true}')
parts=
for i in 1 2 3 4 5 6 7 8 9 10; do
    answer=$(turn "$id" "\"prompt\":\"$([ "$i" -gt 1 ] || echo The king said)\",\"max_tokens\":4,\"ignore_eos\":true")
    expect 200 "\"session\":\{\"id\":\"$id\",\"position\":[0-9]+,\"durable\":$durable" "turn $i" "$answer"
    parts+=$(said "$answer" | sed 's/^"text":"//; s/"$//')
done
[ "\"text\":\"$parts\"" = "$(said "$whole")" ] || fail "ten turns: $parts, at once: $(said "$whole")"
end=$(position "$id")
is_durable() {
    grep -q '"durable":true' <<<"$(call GET "/v1/sessions/$id")"
}
[ -z "$stored" ] || wait_until is_durable || fail "ten turns are not durable: $(call GET "/v1/sessions/$id")"
[ "$end" = "$(field total_tokens "$whole")" ] ||
    fail "position $end is not that of $(field total_tokens "$whole") tokens"

# A prompt that was only read goes on as one that was answered at once.
turn "$twin" '"prompt":"The king said","max_tokens":0' >"$folder/read"
[ "$(said "$(turn "$twin" '"max_tokens":40,"ignore_eos":true')")" = "$(said "$whole")" ] || fail "read, then answered"

# ---- forks, rollback, conditions -------------------------------------------------------------------------------------

want=$(said "$(turn "$id" '"prompt":" And","max_tokens":8,"session_rollback":true')")
[ "$(position "$id")" = "$end" ] || fail "a rollback moved the session to $(position "$id")"
fork=$(call POST "/v1/sessions/$id/fork" '{}')
expect 201 "\"position\":$end" "a fork" "$fork"
fork=$(grep -oE 'sess-[0-9a-f]+' <<<"$fork")
[ "$(said "$(turn "$fork" '"prompt":" And","max_tokens":8')")" = "$want" ] || fail "a fork goes on otherwise"
early=$(call POST "/v1/sessions/$id/fork" "{\"position\":$((end - 20))}")
expect 201 "\"position\":$((end - 20))," "an early fork" "$early"
early=$(grep -oE 'sess-[0-9a-f]+' <<<"$early")
again=$(said "$(turn "$early" '"max_tokens":20,"ignore_eos":true')" | sed 's/^"text":"//; s/"$//')
[ "${parts%"$again"}" != "$parts" ] || fail "an early fork says $again, not the end of $parts"
expect 409 "from position 0 to $end" "a fork beyond" \
    "$(call POST "/v1/sessions/$id/fork" "{\"position\":$((end + 1))}")"
expect 409 position_mismatch "another position" "$(turn "$id" "\"session_position\":$((end + 1)),\"max_tokens\":1")"
expect 200 "\"position\":$((end + 1))," "the right position" \
    "$(turn "$id" "\"session_position\":$end,\"max_tokens\":1,\"ignore_eos\":true")"

# One that begins with a prompt has read it when it is answered, and knobs given then are those of all its completions.
begun=$(call POST /v1/sessions '{"prompt":"The king said"}')
expect 201 '"position":[1-9]' "a session with a prompt" "$begun"
begun=$(grep -oE 'sess-[0-9a-f]+' <<<"$begun")
[ "$(said "$(turn "$begun" '"max_tokens":40,"ignore_eos":true')")" = "$(said "$whole")" ] ||
    fail "a session that began with a prompt"
knobs='"cg_tolerance":0.5,"cg_max_steps":2'
loose=$(create "{\"prompt\":\"The king said\",$knobs}")
expect 200 '"loosest":\{"cg_tolerance":0.5,"cg_max_steps":2,' "its knobs" "$(call GET "/v1/sessions/$loose")"
loosely=$(said "$(call POST /v1/completions \
    "{\"prompt\":\"The king said\",\"temperature\":0,\"max_tokens\":8,$knobs}")")
copy=$(grep -oE 'sess-[0-9a-f]+' <<<"$(call POST "/v1/sessions/$loose/fork" '{}')")
for session in "$loose" "$copy"; do
    [ "$(said "$(turn "$session" '"max_tokens":8')")" = "$loosely" ] || fail "the knobs of session $session"
done
expect 200 '"cg_steps_max":0' "knobs of its own" "$(turn "$copy" '"max_tokens":2,"cg_mode":"steps","cg_max_steps":0')"
expect 400 '"param":"prompt"' "two prompts to begin with" "$(call POST /v1/sessions '{"prompt":["a","b"]}')"
expect 400 '"param":"cg_tolerance"' "a knob out of range" "$(call POST /v1/sessions '{"cg_tolerance":2}')"

# Back in place, and on as if it had never gone beyond.
expect 200 '"position":5,' "a rollback" "$(call POST "/v1/sessions/$begun/rollback" '{"position":5}')"
[ "$(position "$begun")" = 5 ] || fail "after a rollback to 5 a session is at $(position "$begun")"
straight=$(grep -oE 'sess-[0-9a-f]+' <<<"$(call POST "/v1/sessions/$id/fork" '{"position":5}')")
[ "$(said "$(turn "$begun" '"prompt":" and","max_tokens":9')")" = "$(said "$(turn "$straight" \
    '"prompt":" and","max_tokens":9')")" ] || fail "after a rollback it goes on otherwise"
expect 409 'from position 0 to' "a rollback beyond" "$(call POST "/v1/sessions/$begun/rollback" '{"position":999}')"
expect 400 '"param":"position"' "a rollback to nowhere" "$(call POST "/v1/sessions/$begun/rollback" '{}')"
expect 404 session_not_found "a rollback of none" "$(call POST "/v1/sessions/sess-0/rollback" '{"position":1}')"

# What a stop string cuts is not part of it.
cut=$(grep -oE 'sess-[0-9a-f]+' <<<"$(call POST "/v1/sessions/$twin/fork" '{"position":4}')")
before=$(position "$cut")
fields='"prompt":" the","max_tokens":30,"stop":[" "],"stream":true,"stream_options":{"include_usage":true}'
answer=$(turn "$cut" "$fields")
expect 200 "\"finish_reason\":\"stop\".*\"session\":\{\"id\":\"$cut\"" "a stream" \
    "$(grep finish_reason\":\"stop <<<"$answer"; tail -n 1 <<<"$answer")"
[ "$(position "$cut")" -ge "$before" ] || fail "a stop string moved the session back"

# ---- refusals --------------------------------------------------------------------------------------------------------

expect 400 'one choice' "two choices" "$(turn "$id" '"prompt":"a","n":2')"
expect 400 'one prompt' "two prompts" "$(turn "$id" '"prompt":["a","b"]')"
expect 400 'needs a session' "a position without a session" \
    "$(call POST /v1/completions '{"prompt":"a","session_position":1}')"
expect 400 ttl_s "no time at all" "$(call POST /v1/sessions '{"ttl_s":0}')"
expect 400 'empty' "nothing to read" "$(turn "$(create)" '"prompt":"","add_special_tokens":false,"max_tokens":3')"
for name in nope .. %2e%2e%2f sess- "$(printf 'x%.0s' $(seq 300))"; do
    expect 404 'not_found' "the session $name" "$(call GET "/v1/sessions/$name")"
    expect 404 session_not_found "the session $name" "$(turn "$name" '"prompt":"a"')"
done
key=$bob
for path in "/v1/sessions/$id" "/v1/sessions/$id/state"; do
    answer=$(call GET "$path")
    expect 404 session_not_found "another key" "$answer"
    [ "$answer" = "$(call GET "${path/sess-/sess0}")" ] || fail "another key learns of $path"
done
expect 404 session_not_found "another key" "$(turn "$id" '"prompt":"a"')"
expect 404 session_not_found "another key's fork" "$(call POST "/v1/sessions/$id/fork" '{}')"
expect 404 session_not_found "another key's drop" "$(call DELETE "/v1/sessions/$id")"
expect 200 '"data":\[\]' "another key's list" "$(call GET /v1/sessions)"
key=$alice
expect 200 "$id.*|.*$id" "the list" "$(call GET /v1/sessions)"

# A key's line moves in the file: its sessions stay its own.
tac "$folder/keys" >"$folder/turned" && cp "$folder/turned" "$folder/keys"
kill -HUP "$server"
wait_until grep -q '"event":"reload".*keys are read' "$folder/server.log" || fail "the keys are not read again"
expect 200 "\"id\":\"$id\"" "after a reload" "$(call GET "/v1/sessions/$id")"
key=$bob
expect 404 session_not_found "another key after a reload" "$(call GET "/v1/sessions/$id")"
key=$alice

# Two at once: who comes while the first one's answer flows is told to come back.
curl -sSN --max-time 600 --unix-socket "$socket" -H "Authorization: Bearer $key" -H 'Content-Type: application/json' \
    -d "{\"session\":\"$fork\",\"prompt\":\" and\",\"max_tokens\":65536,\"ignore_eos\":true,\"stream\":true}" \
    http://localhost/v1/completions >"$folder/first" 2>/dev/null &
first=$!
wait_until [ -s "$folder/first" ] || fail "the first of two does not begin"
expect 409 session_busy "two at once" "$(turn "$fork" '"prompt":" or","max_tokens":1')"
kill "$first"
wait "$first"
grep -q '"text":' "$folder/first" || fail "the first of two: $(tail -c 500 "$folder/first")"
for _ in $(seq 3000); do
    after=$(turn "$fork" '"prompt":" or","max_tokens":1')
    [ "$(tail -n 1 <<<"$after")" = 409 ] || break
    sleep 0.1
done
expect 200 '"text"' "after the first of two was given up" "$after"

# ---- states ----------------------------------------------------------------------------------------------------------

state() { # METHOD SESSION FILE: the status
    local options=(-o "$3")
    [ "$1" = GET ] || options=(-o "$folder/answer" --data-binary "@$3" -H 'Content-Type: application/octet-stream')
    curl -sS --max-time 300 --unix-socket "$socket" -w '%{http_code}' -X "$1" -H "Authorization: Bearer $key" \
        "${options[@]}" "http://localhost/v1/sessions/$2/state"
}
[ "$(state GET "$id" "$folder/state")" = 200 ] || fail "no state came out"
want=$(said "$(turn "$id" '"prompt":" And","max_tokens":8,"session_rollback":true')")
other=$(create)
turn "$other" '"prompt":"Once upon","max_tokens":3' >"$folder/other"
stands=$(position "$other") size=$(stat -c %s "$folder/state")
for offset in $(seq 0 8 200) $(seq 201 $((size / 29)) $((size - 1))); do
    cp "$folder/state" "$folder/damaged"
    byte=$(od -An -tu1 -j "$offset" -N 1 "$folder/state")
    printf '%b' "$(printf '\\x%02x' $((byte ^ 4)))" |
        dd of="$folder/damaged" bs=1 seek="$offset" conv=notrunc status=none
    status=$(state PUT "$other" "$folder/damaged")
    [ "$status" = 400 ] || [ "$status" = 409 ] || fail "a state with byte $offset changed: $status"
done
head -c $((size - 1)) "$folder/state" >"$folder/damaged"
[ "$(state PUT "$other" "$folder/damaged")" = 400 ] || fail "a short state was taken"
[ "$(position "$other")" = "$stands" ] || fail "refused states moved the session to $(position "$other")"
stop_server
start_server --keys "$folder/keys" --store "$store"
again=$(turn "$id" '"prompt":" And","max_tokens":8')
if [ -n "$stored" ]; then
    expect 200 '' "a session of the server before" "$again"
    [ "$(said "$again")" = "$want" ] || fail "a session of the server before goes on otherwise"
    key=$bob
    expect 404 session_not_found "another key, of the server before" "$(turn "$twin" '"prompt":"a"')"
    key=$alice
else
    expect 404 session_not_found "a session of the server before" "$again"
fi
moved=$(create)
[ "$(state PUT "$moved" "$folder/state")" = 200 ] || fail "the state was not taken: $(cat "$folder/answer")"
[ "$(said "$(turn "$moved" '"prompt":" And","max_tokens":8')")" = "$want" ] ||
    fail "a moved session goes on otherwise"
expect 204 '' "a drop" "$(call DELETE "/v1/sessions/$moved")"
expect 404 session_not_found "a second drop" "$(call DELETE "/v1/sessions/$moved")"
short=$(create '{"ttl_s":1}')
sleep 2.5
expect 404 session_not_found "a session whose time is over" "$(call GET "/v1/sessions/$short")"
if [ -n "$stored" ]; then
    short=$(create '{"ttl_s":2}')
    stop_server
    sleep 2.5
    start_server --keys "$folder/keys" --store "$store"
    expect 404 session_not_found "one whose time was over before the start" "$(call GET "/v1/sessions/$short")"
    expect 404 session_not_found "it, to go on" "$(turn "$short" '"prompt":"a"')"
else
    stop_server
    bash "$0" stored || fail "with a store"
fi

exit $((failures > 0))
