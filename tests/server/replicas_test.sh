#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Two servers that share a Redis, behind HAProxy with deploy/haproxy's configuration: conversations go on while each
# server is killed, or ends as asked, in turn; no turn is lost and none is made twice. Without HAProxy the clients
# choose for themselves. Before that, a session that goes to and fro between them.
#
#   tests/server/replicas_test.sh [RESTARTS]        4 by default
# SEED: of other moments.
# shellcheck source=tests/clients/server.sh
. "$(dirname "$0")/../clients/server.sh"
need_installed python3 redis-server
front=
if command -v haproxy >/dev/null; then
    front=$folder/front
    sed -E "s|bind :8080|bind unix@$folder/front|; s|127.0.0.1:808([12])|unix@$folder/replica\1|" \
        "$source_dir/deploy/haproxy/haproxy.cfg" >"$folder/haproxy.cfg"
    haproxy -c -q -f "$folder/haproxy.cfg" || fail "HAProxy refuses its configuration"
fi

cat >"$folder/replicas.py" <<'END'
import os, random, signal, subprocess, sys, time

sys.path.insert(0, sys.argv[1])
import conversations as talk

program, model, folder, front, restarts = sys.argv[2:6] + [int(sys.argv[6])]
log = open(folder + "/replicas.log", "ab")
places = [folder + "/replica1", folder + "/replica2"]
children = []


def run(*command):
    child = subprocess.Popen(command, stdout=log, stderr=log)
    children.append(child)
    return child


def start(number, *more):
    options = more or ("--store", f"redis+unix://{folder}/redis", "--store-lease", "2")
    process = run(program, "--model", "demo=" + model, "--listen", "unix:" + places[number], *options)
    talk.wait_until_ready(places[number], process)
    return process


def choose():
    """Without a proxy: the one that clients of this moment like, or the other where that is not there."""
    return front or places[int(time.monotonic() * 2) % 2]


def restart_in_turn(conversations):
    for i in range(restarts):
        talk.wait_for_turns(conversations, chance.randrange(4))
        time.sleep(chance.uniform(0.1, 0.8))
        number = i % 2
        assert all(server.poll() is None for server in servers), "a server has ended by itself"
        servers[number].send_signal(signal.SIGKILL if i // 2 % 2 == 0 else signal.SIGTERM)
        servers[number].wait(timeout=600)
        time.sleep(chance.uniform(0, 0.5))
        servers[number] = start(number)
    talk.wait_for_turns(conversations, 6)


def turn(place, session, position):
    return talk.patiently(lambda: place, "POST", "/v1/completions", {
        "session": session, "session_position": position, "prompt": " and", "max_tokens": 3, "ignore_eos": True})


def go_between():
    """A session whose turns go to the servers by turns: each says where it stands now, not where it left it."""
    status, made = talk.patiently(lambda: places[0], "POST", "/v1/sessions", {"prompt": "Once"})
    assert status == 201, made
    position = made["position"]
    for i in range(6):
        status, answer = turn(places[i % 2], made["id"], position)
        assert status == 200, f"turn {i}: {status} {answer}"
        before, position = position, answer["usage"]["session"]["position"]
    status, answer = turn(places[0], made["id"], before)  # whose own knowledge is as old
    assert status == 409 and f"stands at position {position}" in answer["error"]["message"], (status, answer)


chance = random.Random(int(os.environ.get("SEED", 1)))
try:
    run("redis-server", "--port", "0", "--unixsocket", folder + "/redis", "--dir", folder, "--save", "",
        "--appendonly", "yes", "--appendfsync", "always")
    for _ in range(10000):
        if os.path.exists(folder + "/redis"):
            break
        time.sleep(0.02)
    servers = [start(0), start(1)]
    go_between()
    if front:
        talk.wait_until_ready(front, run("haproxy", "-db", "-f", folder + "/haproxy.cfg"))
    held = talk.hold(3, choose, restart_in_turn)
    listed = [talk.ask(place, "GET", "/v1/sessions")[2]["data"] for place in places]
    assert [sorted(one["id"] for one in several) for several in listed][0] == sorted(
        one["id"] for one in listed[1]), listed
    servers[0].terminate()
    assert servers[0].wait(timeout=600) == 0
    start(0, "--store", "none")
    talk.compare(held, places[0])
finally:
    for child in children:
        child.kill()
        child.wait()
print(f"{restarts} restarts, {sum(len(c.said) for c in held)} turns: {sum(c.lost for c in held)} answers lost, "
      f"{sum(c.again for c in held)} turns made again{', behind HAProxy' if front else ''}")
END
python3 "$folder/replicas.py" "$source_dir/tests/server" "$build/mesa-server" "$model" "$folder" "$front" "${1:-4}" \
    >"$folder/replicas" 2>&1 || fail "$(tail -n 12 "$folder/replicas"; tail -n 30 "$folder/replicas.log")"
tail -n 1 "$folder/replicas"

exit $((failures > 0))
