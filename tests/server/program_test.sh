#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# The program itself: exit statuses, what it prints, signals while a model cannot be had, the re-execution.
set -uo pipefail
server=${MESA_BUILD:-build}/mesa-server
[ -x "$server" ] || { echo "SKIP: $server is not built"; exit 77; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
failures=0

expect() { # WANTED-STATUS PATTERN COMMAND...
    local wanted=$1 pattern=$2 status
    shift 2
    timeout 20 "$@" >"$folder/out" 2>&1
    status=$?
    if [ $status -ne "$wanted" ] || ! grep -q -- "$pattern" "$folder/out"; then
        echo "FAIL: status $status (want $wanted) or no '$pattern': $*"
        cat "$folder/out"
        failures=$((failures + 1))
    fi
}

expect 0 '--queue-tokens N' "$server" --help
expect 0 '^mesa-server [0-9]' "$server" --version
expect 2 'no model is named' "$server"
expect 2 -- "$server" --model x --unknown 1
expect 2 'x.ini:2: unknown key' bash -c "printf '[server]\ncolour = 1\n' >$folder/x.ini; $server --config $folder/x.ini"
expect 0 '^rows = 7$' "$server" --model x=/x --rows 7 --check-config
expect 3 'cannot listen on 192.0.2.1:8080: bind: ' "$server" --model "$folder" --listen 192.0.2.1:8080
expect 3 'not a socket' bash -c "touch $folder/file; $server --model $folder --listen unix:$folder/file"
[ -f "$folder/file" ] || { echo "FAIL: the file is gone"; failures=$((failures + 1)); }
expect 4 'cannot be loaded' "$server" --model "$folder" --listen "unix:$folder/socket"
[ ! -e "$folder/socket" ] || { echo "FAIL: the socket is left over"; failures=$((failures + 1)); }
# The printed configuration is a configuration.
"$server" --model x=/x --ping 0.5 --check-config >"$folder/printed.ini"
expect 0 '^ping = 0.5$' "$server" --config "$folder/printed.ini" --check-config
# Variables count, and a loop of re-executions would never end.
expect 2 'MESA_ROWS' env MESA_ROWS=many "$server" --model x
expect 4 'cannot be loaded' env -u OMP_WAIT_POLICY "$server" --model "$folder" --listen "unix:$folder/socket"

exit $((failures > 0))
