#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# One checkpoint under two names: a session of the one goes on under the other with the same bits, in memory, from the
# store and after a reload that changes the name; not with another checkpoint, nor for a key that may not use its model.
# shellcheck source=tests/clients/server.sh
. "$(dirname "$0")/../clients/server.sh"

mkdir "$folder/other"
ln -s "$model"/* "$folder/other/"
rm "$folder/other/config.json"
sed 's/"rms_norm_eps": *[^,]*/"norm_eps": 1e-5/; s/"norm_eps": *[^,]*/"norm_eps": 1e-5/' "$model/config.json" \
    >"$folder/other/config.json"
cmp -s "$model/config.json" "$folder/other/config.json" && fail 'the other model is no other'

secret=a-key-that-is-long-enough
hash=$(echo "$secret" | "$build/mesa-server" --hash-key)
keys() { # [LIMIT]: of the key
    echo "client $hash ${1:-}" >"$folder/keys"
}
call() { # METHOD PATH [BODY]: the answer, a line with its status behind it
    curl -sS --max-time 300 --unix-socket "$folder/socket" -w '\n%{http_code}' -X "$1" \
        -H "Authorization: Bearer $secret" -H 'Content-Type: application/json' \
        ${3:+--data-binary "$3"} "http://localhost$2"
}
create() { # NAME: a session's id
    call POST /v1/sessions "{\"model\":\"$1\"}" | grep -oE 'sess-[0-9a-f]+' | head -n 1
}
turn() { # SESSION MODEL-FIELD [FIELDS]
    call POST /v1/completions "{\"session\":\"$1\",$2\"temperature\":0,\"max_tokens\":4,\"ignore_eos\":true${3:-}}"
}
says() { # STATUS PATTERN WHAT ANSWER
    if [ "$(tail -n 1 <<<"$4")" != "$1" ] || ! grep -qE "$2" <<<"$4"; then
        fail "$3: not $1 with $2: $4"
    fi
}
text_of() {
    grep -oE '"text":"([^"\\]|\\.)*"' <<<"$1" | sed 's/^"text":"//; s/"$//'
}
parts=
goes_on() { # WHAT MODEL-FIELD [FIELDS]: the session id, whose text is collected
    local answer
    answer=$(turn "$id" "$2" "${3:-}")
    says 200 "\"id\":\"$id\"" "$1" "$answer"
    says 200 "\"model\":\"$where\"" "$1: the name" "$answer"
    parts+=$(text_of "$answer")
}
begin_text=',"prompt":"The king said"'
wanted() { # TURNS: at once
    text_of "$(call POST /v1/completions \
        "{\"prompt\":\"The king said\",\"temperature\":0,\"max_tokens\":$((4 * $1)),\"ignore_eos\":true}")"
}
is_whole() { # TURNS WHAT
    local whole
    whole=$(wanted "$1")
    if [ -z "$whole" ] || [ "$parts" != "$whole" ]; then
        fail "$2: $parts, at once $whole"
    fi
}
reload() { # NAME=FOLDER...
    local before one
    printf '%s\n' '[server]' "keys = $folder/keys" >"$folder/server.conf"
    for one; do
        echo "model = $one" >>"$folder/server.conf"
    done
    [ -n "$server" ] || return 0
    before=$(metric mesa_reloads_total)
    kill -HUP "$server"
    wait_until has_reloaded "$before" || fail "no reload: $(tail -n 3 "$folder/server.log")"
}
metric() {
    call GET /metrics | awk -v name="$1" 'index($0, name "{result=\"done\"") == 1 { print $2 }'
}
has_reloaded() {
    [ "$(metric mesa_reloads_total)" != "$1" ]
}
start() { # OPTION...: with the configuration file
    "$build/mesa-server" --config "$folder/server.conf" --listen "unix:$folder/socket" "$@" >"$folder/server.log" 2>&1 &
    server=$!
    wait_until curl -fsS -o /dev/null --unix-socket "$folder/socket" http://localhost/health/ready 2>/dev/null ||
        fail "the server does not become ready: $(cat "$folder/server.log")"
}

stores=(none "$folder/store")
start_redis && stores+=("$redis_place")
for store in "${stores[@]}"; do
    keys
    reload "demo=$model" "twin=$model" "other=$folder/other"
    start --store "$store"
    id=$(create twin) parts='' where=twin
    goes_on 'the name that it was made under' '"model":"twin",' "$begin_text"
    goes_on 'the other name' '"model":"demo",'
    goes_on 'no name' ''
    says 400 'another model' 'another checkpoint' "$(turn "$id" '"model":"other",')"
    if [ "$store" != none ]; then
        stop_server
        start --store "$store"
        where=demo
        goes_on 'the other name, after a restart' '"model":"demo",'
        goes_on 'its own, after that' '"model":"twin",'
        stop_server
        start --store "$store"
        says 400 'another model' 'another checkpoint, after a restart' "$(turn "$id" '"model":"other",')"
        goes_on 'no name, after a restart' ''
        is_whole 6 'from the store'
    else
        is_whole 3 'in memory'
    fi
    id=$(create twin) parts='' where=twin
    goes_on 'before a reload' '"model":"twin",' "$begin_text"
    reload "demo=$model" "other=$folder/other"
    where=demo
    goes_on 'after its name is gone' ''
    reload "other=$folder/other" "renamed=$model"
    where=renamed
    goes_on 'under a new name' '"model":"renamed",'
    says 400 'another model' 'no name, where the first model is another' "$(turn "$id" '')"
    is_whole 3 'through reloads'
    id=$(create renamed)
    says 200 '"model":"renamed"' 'while the key may use it' "$(turn "$id" '"model":"renamed",')"
    keys models=other,again
    reload "other=$folder/other" "renamed=$model" "again=$model"
    says 403 model_not_allowed 'a model that the key may not use' "$(turn "$id" '"model":"again",')"
    stop_server
done

[ $failures -eq 0 ]
