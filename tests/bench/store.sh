#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Stores beside the disk and the socket under them: entries appended, states put and read back, on LMDB and on a
# redis-server of its own that syncs always, or keeps nothing. Prints Markdown tables.
#
#   tests/bench/store.sh [SECONDS]    of a measurement, default 3
# Environment: MESA_BUILD (default build), FOLDER on the disk that is meant (default: a new one in /var/tmp).
set -euo pipefail
build=${MESA_BUILD:-$(dirname "$0")/../../build}
seconds=${1:-3}
folder=$(mktemp -d "${FOLDER:-/var/tmp}/mesa-bench-XXXXXX")
server=
trap '[ -z "$server" ] || kill "$server"; rm -rf "$folder"' EXIT

# rate BYTES COUNT: writes one after another, each synced, into a file that is there already.
rate() {
    local begin end
    dd if=/dev/zero of="$folder/raw" bs="$1" count="$2" conv=fsync status=none
    begin=$(date +%s%N)
    dd if=/dev/zero of="$folder/raw" bs="$1" count="$2" oflag=dsync conv=notrunc status=none
    end=$(date +%s%N)
    rm "$folder/raw"
    awk -v b="$1" -v n="$2" -v ns=$((end - begin)) \
        'BEGIN { printf "| %d bytes | %.0f | %.1f |\n", b, n * 1e9 / ns, b * n * 1e3 / ns }'
}

start_redis() {
    redis-server --port 0 --unixsocket "$folder/redis.sock" --dir "$folder" --logfile redis.log --save "" "$@" &
    server=$!
    until redis-cli -s "$folder/redis.sock" ping >/dev/null 2>&1; do sleep 0.1; done
}

stop_redis() {
    kill "$server"
    wait "$server" || true
    server=
    rm -rf "${folder:?}"/*
}

head_of() {
    printf '\n%s\n\n| what | a second | MB/s | ms, median | ms, 99 of 100 |\n| --- | --- | --- | --- | --- |\n' "$1"
}

printf 'The disk, written and synced step by step:\n\n| a step | a second | MB/s |\n| --- | --- | --- |\n'
rate 4096 200
rate 65536 100
rate $((4 << 20)) 20
head_of 'LMDB:'
"$build/tests/bench_store" "$folder/lmdb" "$seconds"
rm -rf "$folder/lmdb"
if ! command -v redis-server >/dev/null; then
    echo "no redis-server is installed" >&2
    exit 0
fi
start_redis --appendonly yes --appendfsync always
head_of 'Redis that syncs always, over a unix socket:'
"$build/tests/bench_store" "redis+unix://$folder/redis.sock" "$seconds"
stop_redis
start_redis --appendonly no
head_of 'Redis that keeps nothing:'
"$build/tests/bench_store" "redis+unix://$folder/redis.sock" "$seconds"
printf '\nThe same server and socket, by redis-benchmark:\n\n'
redis-benchmark -s "$folder/redis.sock" -t set,get -d 262144 -c 1 -P 8 -n 4000 --csv | sed 1d |
    awk -F, '{ gsub(/"/, ""); printf "* %s of 262144 bytes, 8 in flight: %.0f MB/s\n", $1, $2 * 0.262144 }'
redis-benchmark -s "$folder/redis.sock" -t set -d 256 -c 1 -P 1 -n 20000 --csv | sed 1d |
    awk -F, '{ gsub(/"/, ""); printf "* %s of 256 bytes, one at a time: %.0f a second\n", $1, $2 }'
stop_redis
