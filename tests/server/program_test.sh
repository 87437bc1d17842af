#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# The program itself: exit statuses, what it prints, signals while a model cannot be had, the re-execution.
# shellcheck source=tests/shell.sh
. "$(dirname "$0")/../shell.sh"
need_built mesa-server
server=$build/mesa-server

expect() { # WANTED-STATUS PATTERN COMMAND...
    local wanted=$1 pattern=$2 status
    shift 2
    timeout 300 "$@" >"$folder/out" 2>&1
    status=$?
    if [ $status -ne "$wanted" ] || ! grep -q -- "$pattern" "$folder/out"; then
        fail "status $status (want $wanted) or no '$pattern': $*: $(cat "$folder/out")"
    fi
}

expect 0 '--queue-tokens N' "$server" --help
expect 0 '^mesa-server [0-9]' "$server" --version
expect 2 'no model is named' "$server"
expect 2 'mesa-server: --unknown: unknown option' "$server" --model x --unknown 1
expect 2 'x.ini:2: unknown key' bash -c "printf '[server]\ncolour = 1\n' >$folder/x.ini; $server --config $folder/x.ini"
expect 0 '^rows = 7$' "$server" --model x=/x --rows 7 --check-config
expect 3 'cannot listen on 192.0.2.1:8080: bind: ' "$server" --model "$folder" --listen 192.0.2.1:8080 --allow-anonymous
expect 2 'will not listen on 0.0.0.0:0, which other machines reach' "$server" --model "$folder" --listen 0.0.0.0:0
expect 2 'will not listen on \*:0' "$server" --model "$folder" --listen '*:0' --allow-anonymous no

# Keys: what --hash-key prints is what sha256sum says, and goes into a file that --check-config takes.
key=0123456789abcdef0123456789abcdef
expect 0 "^$(printf %s $key | sha256sum | cut -d' ' -f1)\$" bash -c "echo $key | $server --hash-key"
expect 2 'a key has 16' bash -c "echo short | $server --hash-key"
expect 2 'no key' bash -c "$server --hash-key </dev/null"
echo "alice $(echo $key | "$server" --hash-key) rate=60" >"$folder/keys"
expect 0 "^keys = $folder/keys\$" "$server" --model x=/x --keys "$folder/keys" --check-config
expect 0 "^keys = $folder/keys\$" env CREDENTIALS_DIRECTORY="$folder" "$server" --model x=/x --keys credential:keys \
    --check-config
expect 2 'needs CREDENTIALS_DIRECTORY' "$server" --model x=/x --keys credential:keys --check-config
echo "bob nothex" >>"$folder/keys"
expect 2 "$folder/keys:2: " "$server" --model x=/x --keys "$folder/keys" --check-config
expect 2 "$folder/none: No such file" "$server" --model x=/x --keys "$folder/none" --check-config
expect 2 "$folder/file: the file is empty" bash -c "touch $folder/file; $server --model x=/x \
    --tls-cert $folder/file --tls-key $folder/file --check-config"
expect 2 'one needs the other' "$server" --model x=/x --tls-cert "$folder/file" --check-config
rm "$folder/file"
expect 3 'not a socket' bash -c "touch $folder/file; $server --model $folder --listen unix:$folder/file"
[ -f "$folder/file" ] || fail 'the file is gone'
expect 4 'cannot be loaded' "$server" --model "$folder" --listen "unix:$folder/socket"
touch "$folder/x.gguf"
expect 4 'x.gguf: not a folder; mesa-trainer import' "$server" --model "$folder/x.gguf" --listen "unix:$folder/socket"
expect 4 'none: cannot open: No such file' "$server" --model "$folder/none" --listen "unix:$folder/socket"
expect 2 'models/demo: not an option; --model DIR names a model' "$server" models/demo
expect 2 '--model: the value is missing' "$server" --model
expect 4 'the store cannot be opened: .*none/store' "$server" --model "$folder" --listen "unix:$folder/socket" \
    --store "$folder/none/store"
[ ! -e "$folder/socket" ] || fail 'the socket is left over'
# The printed configuration is a configuration.
"$server" --model x=/x --ping 0.5 --check-config >"$folder/printed.ini"
expect 0 '^ping = 0.5$' "$server" --config "$folder/printed.ini" --check-config
# Variables count, and a loop of re-executions would never end.
expect 2 'MESA_ROWS' env MESA_ROWS=many "$server" --model x
expect 4 'cannot be loaded' env -u OMP_WAIT_POLICY "$server" --model "$folder" --listen "unix:$folder/socket"

exit $((failures > 0))
