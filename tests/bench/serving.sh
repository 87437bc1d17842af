#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# What the measurements of a running server share; sourced. The caller has set `build`, the folder of the programs.

build=${build:?the folder of the programs}
folder=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server"; rm -rf "$folder"' EXIT

# Prompts that come again are read again, unless PREFIX_BUDGET says how many bytes are kept for them.
serve() { # OPTION...: starts a server, ended with the script, and waits until it answers; MESA_URL is its address
    OMP_WAIT_POLICY=passive GOMP_SPINCOUNT=20000 "$build/mesa-server" --listen "unix:$folder/socket" \
        --prefix-budget "${PREFIX_BUDGET:-0}" "$@" \
        >"$folder/log" 2>&1 &
    server=$!
    export MESA_URL=unix:$folder/socket
    until "$build/mesa" complete --no-stream --max-tokens 1 a >/dev/null 2>&1; do
        kill -0 "$server" 2>/dev/null || { cat "$folder/log" >&2; exit 1; }
        sleep 0.1
    done
}

column() { # NAME [FILE], by default of the file csv: a heading and one line
    awk -F, -v name="$1" 'NR == 1 { for (i = 1; i <= NF; i++) if ($i == name) at = i } NR == 2 { print $at }' \
        "${2:-$folder/csv}"
}
