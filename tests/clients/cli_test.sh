#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# The program `mesa` against the real server: what it prints, where, and its exit statuses.
# shellcheck source=tests/clients/server.sh
. "$(dirname "$0")/server.sh"
give_template
start_server

# ---- completions -----------------------------------------------------------------------------------------------------
greedy=(--temperature 0 --max-tokens 24)
expect 0 '.' '' "$mesa" complete "${greedy[@]}" 'Once upon a time'
cp "$folder/out" "$folder/streamed"
expect 0 '.' '' "$mesa" complete "${greedy[@]}" --no-stream 'Once upon a time'
cmp -s "$folder/out" "$folder/streamed" || fail 'streamed and whole text differ'
expect 0 '.' '' "$mesa" complete "${greedy[@]}" --json 'Once upon a time'
jq -j '.choices[0].text, "\n"' "$folder/out" | cmp -s - "$folder/streamed" || fail '--json tells another text'
expect 0 '.' '' bash -c "printf 'Once upon a time' | '$mesa' complete ${greedy[*]} -"
cmp -s "$folder/out" "$folder/streamed" || fail 'a prompt from standard input gives another text'

ids=$(curl -fsS --unix-socket "$folder/socket" http://localhost/tokenize -d '{"prompt":"Once upon a time"}' |
    jq -r '.tokens | map(tostring) | join(",")')
expect 0 '.' '' "$mesa" complete "${greedy[@]}" --ids "$ids"
cmp -s "$folder/out" "$folder/streamed" || fail "the ids $ids give another text"

expect 0 '.' '^[0-9]+ tokens read, 24 written in [0-9.]+ s, the first after [0-9.]+ s, ended by length$' \
    "$mesa" complete "${greedy[@]}" --usage 'Once upon a time'
grep -qE '^writing: [0-9.]+ solver steps on average' "$folder/err" || fail '--usage says nothing of the solver'
expect 0 '^==> choice 1 <==$' '' "$mesa" complete --n 2 --max-tokens 4 --seed 1 x
expect 0 '^1$' '' bash -c "'$mesa' complete --max-tokens 0 x | wc -l"
expect 0 '.' 'exit_threshold has no meaning' "$mesa" complete "${greedy[@]}" --exit-threshold 0.5 --usage x
# What a knob does is seen in the figures.
expect 0 '.' '^writing: 3.00 solver steps' "$mesa" complete "${greedy[@]}" --cg-mode steps --cg-max-steps 3 --usage x

# A pipe that closes early ends the program quietly.
"$mesa" complete --max-tokens 2000 --temperature 0 --ignore-eos x 2>"$folder/err" | head -c 1 >/dev/null
[ ! -s "$folder/err" ] || fail "a closed pipe is complained about: $(cat "$folder/err")"
expect 1 '' 'standard output' bash -c "'$mesa' complete ${greedy[*]} x >/dev/full"

# ---- sessions --------------------------------------------------------------------------------------------------------
expect 0 '^sess-[0-9a-f]+$' '' "$mesa" session create --cg-mode exact 'Once upon a time'
id=$(cat "$folder/out")
expect 0 '^position +[1-9]' '' "$mesa" session show "$id"
at=$(awk '$1 == "position" { print $2 }' "$folder/out")
expect 0 "^$id +demo +$at +3[56][0-9][0-9]$" '' "$mesa" session list
more=(--temperature 0 --max-tokens 12 --ignore-eos)
expect 0 '.' '' "$mesa" complete "${more[@]}" --session "$id" ''
cp "$folder/out" "$folder/went-on"
expect 0 '^sess-' '' "$mesa" session fork --position "$at" --ttl 60 "$id"
copy=$(cat "$folder/out")
expect 0 '.' '' "$mesa" complete "${more[@]}" --session "$copy" --session-rollback ''
cmp -s "$folder/out" "$folder/went-on" || fail 'a fork goes on otherwise'
expect 0 '' '' "$mesa" session export "$copy" "$folder/state"
expect 0 '^sess-' '' "$mesa" session import "$folder/state"
moved=$(cat "$folder/out")
expect 0 "^$moved$" '' bash -c "'$mesa' session export '$copy' - | '$mesa' session import - '$moved'"
expect 0 '.' '' "$mesa" complete "${more[@]}" --cg-mode exact --session "$moved" ''
cmp -s "$folder/out" "$folder/went-on" || fail 'a state from a file goes on otherwise'
expect 0 '' '' "$mesa" session rollback "$id" "$at"
expect 0 "\"position\":${at}[^0-9]" '' "$mesa" session show --json "$id"
expect 0 '.' '' "$mesa" complete "${more[@]}" --session "$id" ''
cmp -s "$folder/out" "$folder/went-on" || fail 'what was taken back goes on otherwise'
known=$("$mesa" session list | wc -l)
head -c 100 "$folder/state" >"$folder/short"
expect 1 '' 'answered 400 invalid_state' "$mesa" session import "$folder/short"
[ "$("$mesa" session list | wc -l)" = "$known" ] || fail 'a refused state leaves a session behind'
expect 2 '' '/none/x.part: No such file' "$mesa" session export "$copy" "$folder/none/x"
expect 2 '' 'is no session.s name' "$mesa" session show ../models
expect 2 '' 'temperature has no meaning for create' "$mesa" session create --temperature 1
expect 2 '' '--position has no meaning for create' "$mesa" session create --position 1
expect 2 '' 'unknown action' "$mesa" session sing
expect 2 '' 'an action is needed' "$mesa" session
expect 2 '' '^mesa: rollback: "five" is not an integer' "$mesa" session rollback "$id" five
expect 1 '' 'ttl_s must be between' "$mesa" session create --ttl -1
expect 1 '' 'position' "$mesa" session fork --position -1 "$id"
expect 2 '' '1 argument is needed, not 0' "$mesa" session drop
expect 1 '' 'answered 409 session_conflict' "$mesa" session rollback "$id" 99999
for session in "$id" "$copy" "$moved"; do
    expect 0 '' '' "$mesa" session drop "$session"
done
expect 1 '' 'answered 404 session_not_found' "$mesa" session drop "$id"
expect 0 '^SESSION +MODEL' '' "$mesa" session list
[ "$(wc -l <"$folder/out")" = 1 ] || fail 'sessions are left that were dropped'

# ---- refusals --------------------------------------------------------------------------------------------------------
expect 1 '' '^mesa: the server answered 400 out_of_range: temperature must be' "$mesa" complete --temperature 101 x
expect 1 '' 'answered 404 model_not_found' "$mesa" complete --model none x
expect 1 '' 'answered 400 .*\(?prompt' "$mesa" complete --ids 99999999
expect 2 '' 'a prompt is needed' "$mesa" complete
expect 2 '' 'unknown option' "$mesa" complete --colour red x
expect 2 '' '--max-tokens: "five" is not an integer' "$mesa" complete --max-tokens five x
expect 2 '' '--logit-bias: "x" is not an integer' "$mesa" complete --logit-bias x=1 x
for command in "complete --timeout -1 x" "chat --timeout 1e7 x" "session --timeout -0.5 list"; do
    # shellcheck disable=SC2086
    expect 2 '' '--timeout: not in 0..1000000' "$mesa" $command
done
expect 2 '' 'not UTF-8' bash -c "printf '\\xff' | '$mesa' complete -"
expect 2 '' 'not a token id' "$mesa" complete --ids 1,x
expect 2 '' 'neither http' "$mesa" complete --url ftp://x y
expect 2 '' 'No such file' "$mesa" complete --key-file "$folder/none" y
expect 2 '' 'unknown command' "$mesa" sing
expect 2 '' '^usage: mesa' "$mesa"
expect 0 '^usage: mesa COMMAND' '' "$mesa" --help
expect 0 '^mesa [0-9]' '' "$mesa" --version
expect 0 '--cg-tolerance X' '' "$mesa" complete --help
expect 3 '' 'no-socket: no server answers there: No such file' "$mesa" complete --url "unix:$folder/no-socket" x
expect 3 '' "127.0.0.1:1: no server answers there: Connection refused" "$mesa" models --url http://127.0.0.1:1
expect 3 '' 'timed out|Timeout' "$mesa" complete --max-tokens 60000 --ignore-eos --no-stream --timeout 0.3 x
printf 'a key\n' >"$folder/key"
expect 2 '' 'has no spaces' "$mesa" models --key-file "$folder/key"
expect 2 '' 'a key has 1 to' env MESA_API_KEY= "$mesa" models --key-file /dev/null

# The key goes out as a bearer token, from the file before the environment.
printf 'from-file\n' >"$folder/key"
header_of() { # [VARIABLE=VALUE...] COMMAND...: the Authorization line of a request
    rm -f "$folder/port"
    python3 -c "
import os, socket
s = socket.create_server(('127.0.0.1', 0))
s.settimeout(300)
with open('$folder/port.new', 'w') as file:
    print(s.getsockname()[1], file=file)
os.rename('$folder/port.new', '$folder/port')
c = s.accept()[0]
print(next((l for l in c.recv(65536).decode().split('\r\n') if l.startswith('Authorization')), 'none'))" \
        >"$folder/header" &
    wait_until [ -s "$folder/port" ] || fail 'nobody listens'
    env "MESA_URL=http://127.0.0.1:$(cat "$folder/port")" "$@" >/dev/null 2>&1
    wait $!
    cat "$folder/header"
}
if command -v python3 >/dev/null; then
    [ "$(header_of MESA_API_KEY=from-environment "$mesa" models)" = 'Authorization: Bearer from-environment' ] ||
        fail 'the key of the environment is not sent'
    [ "$(header_of MESA_API_KEY=from-environment "$mesa" models --key-file "$folder/key")" = \
        'Authorization: Bearer from-file' ] || fail 'the key of the file is not sent'
    [ "$(header_of "$mesa" models)" = none ] || fail 'a key is sent that nobody gave'
fi

# ---- chats -----------------------------------------------------------------------------------------------------------
short=(--temperature 0 --max-tokens 8)
expect 0 '.' '' "$mesa" chat "${short[@]}" 'Once upon a time'
cp "$folder/out" "$folder/alone"
expect 0 '.' '' bash -c "printf 'Once upon a time\n' | '$mesa' chat ${short[*]}"
cmp -s "$folder/out" "$folder/alone" || fail 'a message from standard input gives another answer'
# A chat is the completion of what the template makes of it.
expect 0 '.' '' "$mesa" complete "${short[@]}" $'user: Once upon a time\nassistant: '
cmp -s "$folder/out" "$folder/alone" || fail 'the chat is not the completion of its prompt'
# The second turn knows the first; after /reset it does not, and the system text stays.
turns() { printf '%s\n' "$@" | "$mesa" chat "${short[@]}" --system S; }
first=$(turns One && printf .)
first=${first%?.} # with the line ends that are the model's own
printf '%s\n' "$first" >"$folder/wanted"
prompt=$'system: S\nuser: One\nassistant: '$first$'\nuser: Two\nassistant: '
"$mesa" complete "${short[@]}" "$prompt" >>"$folder/wanted"
turns Two >>"$folder/wanted"
turns One Two /reset Two | cmp -s - "$folder/wanted" || fail 'a conversation is not what its prompts make of it'
expect 0 '.' '' bash -c "printf 'One\\\\\ntwo\n/quit\nthree\n' | '$mesa' chat ${short[*]}"
cp "$folder/out" "$folder/joined"
expect 0 '.' '' "$mesa" chat "${short[@]}" $'One\ntwo'
cmp -s "$folder/out" "$folder/joined" || fail 'a line that goes on, or /quit'
expect 0 '.' '^[0-9]+ tokens read, 8 written in' "$mesa" chat "${short[@]}" --usage Hello
expect 0 '' '/reset begins anew' bash -c "echo /help | '$mesa' chat"
expect 0 '' '' bash -c "'$mesa' chat </dev/null"
expect 1 '' 'answered 400 out_of_range: temperature' "$mesa" chat --temperature 101 x
expect 2 '' 'n has no meaning in a chat' "$mesa" chat --n 2 x
expect 2 '' 'session_position has no meaning in a chat' "$mesa" chat --session-position 2 x
expect 2 '' 'not UTF-8' bash -c "printf '\\xff\n' | '$mesa' chat"
expect 3 '' 'no-socket' "$mesa" chat --url "unix:$folder/no-socket" x

# ---- interruption ----------------------------------------------------------------------------------------------------
interrupt() { # COMMAND...: sends SIGINT once it has begun to write
    rm -f "$folder/out" # what another one wrote
    "$@" >"$folder/out" 2>"$folder/err" &
    local pid=$!
    wait_until [ -s "$folder/out" ] || fail "nothing is written: $*"
    kill -INT $pid
    wait $pid
}
interrupt "$mesa" complete --max-tokens 60000 --temperature 0 --ignore-eos x
status=$?
[ $status -eq 130 ] || fail "interrupted: status $status"
[ ! -s "$folder/err" ] || fail "interrupted: $(cat "$folder/err")"
[ "$(tail -c 1 "$folder/out" | od -An -tx1 | tr -d ' ')" = 0a ] || fail 'interrupted: the line is not ended'
# The request is gone from the server: the next one does not wait for sixty thousand tokens.
expect 0 '.' '' "$mesa" complete "${greedy[@]}" x

# ---- models ----------------------------------------------------------------------------------------------------------
expect 0 '^demo +5\.[0-9]*M +6 +[0-9]+K +unbounded +1\.02K +mesa_net +cpu' '' "$mesa" models
expect 0 '^demo' '' "$mesa" models --url "unix:$folder/socket"
expect 0 '.' '' "$mesa" models --json
[ "$(jq -r '.data[0].id' "$folder/out")" = demo ] || fail 'models --json is not the answer'
expect 2 '' 'unexpected argument' "$mesa" models demo

# ---- bench -----------------------------------------------------------------------------------------------------------
load=(--requests 6 --max-tokens 4:8 --prompt-tokens 8:16 --stop-at-eos)
expect 0 '^streaming, 2 at a time: 6 answered, 0 failed' '' "$mesa" bench --concurrency 2 --warm-up 1 "${load[@]}"
expect 0 '^plain, 50 arrivals a second: 6 answered, 0 failed' '' "$mesa" bench --rate 50 --plain "${load[@]}"
expect 0 '^stream,2,0,6,0,' '' "$mesa" bench --concurrency 1,2 --csv "${load[@]}"
fields=$(awk -F, '{ print NF }' "$folder/out" | sort -u)
[ "$(wc -l <<<"$fields")" -eq 1 ] || fail "the CSV has lines of different length: $fields"
[ "$(wc -l <"$folder/out")" -eq 3 ] || fail 'the CSV has not one line a level'
# The same seed asks the same: prompts and lengths, so the same number of tokens is read.
column() { awk -F, -v name="$1" 'NR == 1 { for (i = 1; i <= NF; i++) if ($i == name) at = i } NR == 2 { print $at }'; }
first=$("$mesa" bench --csv --seed 3 "${load[@]}" | column prompt_tokens)
second=$("$mesa" bench --csv --seed 3 --plain --concurrency 6 "${load[@]}" | column prompt_tokens)
[ -n "$first" ] && [ "$first" = "$second" ] || fail "one seed, two loads: $first and $second tokens"
expect 1 'failed 6 times: 400 .*temperature' '' "$mesa" bench --temperature 101 "${load[@]}"
expect 1 '' 'no such model' "$mesa" bench --model none "${load[@]}"
expect 2 '' 'exclude each other' "$mesa" bench --rate 1 --concurrency 1
expect 2 '' '--concurrency: not in' "$mesa" bench --concurrency 0
expect 3 '' '.' "$mesa" bench --url "unix:$folder/no-socket"
answers() { # so far
    curl -sS --unix-socket "$folder/socket" http://localhost/metrics |
        awk '/^mesa_requests_total\{model="demo",.*status="200"/ { sum += $2 } END { print sum + 0 }'
}
more_answers() { [ "$(answers)" -gt "$1" ]; }
interrupt_bench() { # when it has begun
    local before pid
    before=$(answers)
    "$mesa" bench --seconds 10000 --concurrency 2 --max-tokens 4 --stop-at-eos >"$folder/out" 2>&1 &
    pid=$!
    wait_until more_answers "$before" || fail 'a load is not answered'
    kill -INT $pid
    wait $pid
}
interrupt_bench
status=$?
[ $status -eq 130 ] || fail "an interrupted load: status $status"
grep -q '(interrupted)' "$folder/out" || fail 'an interrupted load does not print its figures'

# ---- keys ------------------------------------------------------------------------------------------------------------
stop_server
printf '%s\n' "$(printf 'k%.0s' $(seq 64))" >"$folder/key"
echo "somebody $("$build/mesa-server" --hash-key <"$folder/key")" >"$folder/keys"
start_server --keys "$folder/keys"
expect 1 '' 'the server answered 401 ' "$mesa" complete --max-tokens 2 x
expect 1 '' 'the server answered 401 ' env MESA_API_KEY=wrong "$mesa" models
expect 0 '.' '' "$mesa" complete "${greedy[@]}" --key-file "$folder/key" x
expect 0 '^demo ' '' env "MESA_API_KEY=$(cat "$folder/key")" "$mesa" models
expect 0 ' 4 answered, 0 failed' '' "$mesa" bench --key-file "$folder/key" --requests 4 --max-tokens 2

exit $((failures > 0))
