#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# A server with a store that is killed at random moments under load: it starts each time, every position that was
# acknowledged is there, and each conversation says what it says undisturbed. Then one that ends as asked, one with
# memory for fewer sessions than there are, and sessions in a state folder of the service manager's.
#
#   tests/server/durable_test.sh [KILLS]        4 by default
# SEED: of other moments. MESA_TEST_STORE: another store than a folder of its own.
# shellcheck source=tests/clients/server.sh
. "$(dirname "$0")/../clients/server.sh"
need_installed python3
store=${MESA_TEST_STORE:-$folder/store}

cat >"$folder/killed.py" <<'END'
import os, random, signal, subprocess, sys, time

sys.path.insert(0, sys.argv[1])
import conversations as talk

server, model, folder, store, kills = sys.argv[2:6] + [int(sys.argv[6])]
address = folder + "/killed.socket"
log = open(folder + "/killed.log", "ab")


def start(*more):
    process = subprocess.Popen([server, "--model", "demo=" + model, "--listen", "unix:" + address, *more],
                               stdout=log, stderr=log)
    talk.wait_until_ready(address, process)
    return process


def moved():
    connection = talk.Connection(address)
    connection.request("GET", "/metrics")
    figures = connection.getresponse().read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in figures if line.startswith("mesa_sessions_parked_total{"))


def kill_again(conversations):
    global process
    for _ in range(kills):
        talk.wait_for_turns(conversations, chance.randrange(3))
        time.sleep(chance.uniform(0.02, 0.5))
        assert process.poll() is None, f"the server has ended by itself: {process.returncode}"
        process.send_signal(signal.SIGKILL)
        process.wait()
        process = start("--store", store)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)  # in the middle of turns: those end, the sessions are parked
    assert process.wait(timeout=600) == 0, "the server did not end well"
    process = start("--store", store)


def crowd_out(conversations):
    end = time.monotonic() + 300
    while moved() == 0:
        assert time.monotonic() < end, "no session left memory"
        time.sleep(0.1)
    talk.wait_for_turns(conversations, 30)


chance = random.Random(int(os.environ.get("SEED", 1)))
process = start("--store", store)
try:
    held = talk.hold(4, lambda: address, kill_again)
    listed = talk.ask(address, "GET", "/v1/sessions")[2]["data"]
    assert len(listed) >= 4, listed
    process.terminate()
    assert process.wait(timeout=600) == 0
    process = start("--store", store, "--session-budget", "4M")
    crowd = talk.hold(8, lambda: address, crowd_out)
    process.terminate()
    assert process.wait(timeout=600) == 0
    process = start("--store", "none")
    assert talk.ask(address, "GET", "/v1/sessions")[2]["data"] == []
    talk.compare(held + crowd, address)
finally:
    process.kill()
    process.wait()
print(f"{kills} kills, {sum(len(c.said) for c in held)} turns: {sum(c.lost for c in held)} answers lost, "
      f"{sum(c.again for c in held)} turns made again; {sum(len(c.said) for c in crowd)} turns in a crowd")
END
python3 "$folder/killed.py" "$source_dir/tests/server" "$build/mesa-server" "$model" "$folder" "$store" "${1:-4}" \
    >"$folder/killed" 2>&1 || fail "$(tail -n 12 "$folder/killed"; tail -n 20 "$folder/killed.log")"
tail -n 1 "$folder/killed"

# The service manager's folder is used without being asked for.
mkdir "$folder/state"
STATE_DIRECTORY=$folder/state:/nowhere start_server
id=$("$mesa" session create 'Once upon a time')
is_durable() {
    "$mesa" session show "$id" | grep -qE '^durable +true$'
}
wait_until is_durable || fail "a session of the state folder is not durable"
stop_server
STATE_DIRECTORY=$folder/state start_server
"$mesa" session show "$id" | grep -qE '^residence +store$' || fail "a session of the state folder is not in the store"
[ -n "$("$mesa" complete --session "$id" --max-tokens 3 --ignore-eos --temperature 0 '')" ] || fail "it does not go on"
wait_until is_durable || fail "it is not durable"
stop_server

# What was asked for when a session was made holds when it comes from the store, is rolled back there, and comes again.
STATE_DIRECTORY=$folder/state start_server
loose=$("$mesa" session create --ttl 100000 --cg-mode steps --cg-max-steps 1 'Once upon a time')
for _ in 1 2; do
    stop_server
    STATE_DIRECTORY=$folder/state start_server
    "$mesa" session rollback "$loose" 3 || fail "a session in the store is not rolled back"
done
expect 0 '"completion":\{"cg_steps_mean":1,"cg_steps_max":1,' '' "$mesa" complete --json --no-stream \
    --session "$loose" --max-tokens 2 --ignore-eos ' the'
over=$("$mesa" session show --json "$loose" | grep -oE '"expires_at":[0-9]+' | cut -d: -f 2)
[ "$((over - $(date +%s)))" -gt 90000 ] || fail "a session of 100000 s is over at $over"
stop_server

# Another model's server knows of it and does not touch it; one that has both goes on when the model is named.
"$build/mesa-trainer" init --random tiny --out "$folder/tiny" >"$folder/log" 2>&1 || fail "$(cat "$folder/log")"
STATE_DIRECTORY=$folder/state served_as=tiny model=$folder/tiny start_server
expect 1 '' 'answered 409 foreign_state: .*fingerprint [0-9a-f]+' "$mesa" complete --session "$id" ''
expect 1 '' 'answered 409 foreign_state' "$mesa" session fork "$id"
expect 0 'residence +store' '' "$mesa" session show "$id"
stop_server
STATE_DIRECTORY=$folder/state start_server --model "tiny=$folder/tiny"
expect 0 '.' '' "$mesa" complete --session "$id" --max-tokens 3 --ignore-eos --temperature 0 ''
expect 1 '' 'of another model; name it' "$mesa" complete --session "$id" --model tiny ''
expect 0 '^sess-' '' "$mesa" session fork "$id"
"$mesa" session drop "$id" || fail "it is not dropped"
expect 0 '^SESSION +MODEL' '' "$mesa" session list
grep -q "$id" "$folder/out" && fail "it is listed when it was dropped"
stop_server

exit $((failures > 0))
