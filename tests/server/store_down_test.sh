#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# A store that goes away, hangs, or is full: a session goes on until its lease is nearly over and says that it is not
# durable, then 503 with Retry-After; requests without a session do not notice; health and metrics tell. Once it is back
# everything is durable again, at the position that was acknowledged.
# shellcheck source=tests/clients/server.sh
. "$(dirname "$0")/../clients/server.sh"
need_installed python3

cat >"$folder/down.py" <<'END'
import os, signal, socket, subprocess, sys, time

sys.path.insert(0, sys.argv[1])
import conversations as talk

program, model, folder, case = sys.argv[2:6]
address, children = f"{folder}/{case}.socket", []
log = open(folder + "/down.log", "ab")


def run(*command):
    child = subprocess.Popen(command, stdout=log, stderr=log)
    children.append(child)
    return child


def start_redis():
    process = run("redis-server", "--port", "0", "--unixsocket", folder + "/redis", "--dir", folder, "--save", "",
                  "--appendonly", "yes", "--appendfsync", "always")
    for _ in range(10000):
        try:
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(folder + "/redis")
                return process
        except OSError:
            time.sleep(0.02)
    raise AssertionError("Redis does not start")


def serve(*options):
    process = run(program, "--model", "demo=" + model, "--listen", "unix:" + address, *options)
    talk.wait_until_ready(address, process)
    return process


def turn(session):
    status, headers, answer = talk.ask(address, "POST", "/v1/completions", {
        "session": session, "prompt": " and", "max_tokens": 3, "ignore_eos": True})
    return status, headers.get("Retry-After"), answer


def store_is():
    return talk.ask(address, "GET", "/health")[2]["store"]


def until(what, seconds=300):
    end = time.monotonic() + seconds
    while True:
        found = what()
        if found:
            return found
        assert time.monotonic() < end, what.__name__
        time.sleep(0.2)


def make(prompt):
    status, _, made = talk.ask(address, "POST", "/v1/sessions", {"prompt": prompt})
    assert status == 201, made
    return made["id"]


def durable_turn(session):
    """Turns, until one is answered when the store has it: a store may be slow. Its answer."""
    for _ in range(100):
        status, _, answer = turn(session)
        assert status == 200, answer
        if answer["usage"]["session"]["durable"]:
            return answer
    raise AssertionError(f"no turn is durable: {answer}")


def lost(redis):
    """The store goes away; redis is what it was, and what is to be done to bring it back."""
    session = make("Once")
    answer = durable_turn(session)
    began = time.monotonic()
    redis.send_signal(signal.SIGKILL if case == "killed" else signal.SIGSTOP)
    position = answer["usage"]["session"]["position"]
    went_on = 0
    while True:
        sent = time.monotonic()
        status, retry, answer = turn(session)
        if status != 200:
            break
        told = answer["usage"]["session"]
        assert not told["durable"] and told["position"] > position, answer
        position = told["position"]
        went_on += 1
    assert went_on or sent > began + 2, "it did not go on at all"  # late on a busy machine: the lease was over
    assert status == 503 and retry and answer["error"]["code"] == "store_unavailable", (status, answer)
    assert until(store_is) and until(lambda: store_is() == "failing")
    for method, path, body in (("GET", "/v1/sessions", None), ("POST", "/v1/sessions", {}),
                               ("DELETE", "/v1/sessions/sess-" + "0" * 32, None),
                               ("POST", f"/v1/sessions/sess-{'0' * 32}/fork", {})):
        status, headers, answer = talk.ask(address, method, path, body)
        assert status == 503 and headers.get("Retry-After"), (method, path, status, answer)
    assert talk.ask(address, "POST", "/v1/completions", {"prompt": "Once", "max_tokens": 2})[0] == 200
    assert talk.ask(address, "GET", "/health/ready")[0] == 200
    if case == "killed":
        redis.wait()
        start_redis()
    else:
        redis.send_signal(signal.SIGCONT)

    def durable():
        nonlocal position
        status, _, answer = turn(session)
        if status != 200:
            return False
        position += 4  # as it was acknowledged, and no turn more
        assert answer["usage"]["session"]["position"] == position, (answer, position)
        return answer["usage"]["session"]["durable"]
    until(durable)
    until(lambda: store_is() == "ok")
    return f"{went_on} turns on the lease"


def full():
    """A folder of a mebibyte does not take four states of 800 KB: they are read again, and nothing else is noticed."""
    process = serve("--store", folder + "/small", "--store-budget", "1M")
    made = {}
    for i in range(4):
        session = make("Once upon a time " * (i + 1))
        answer = durable_turn(session)
        made[session] = answer["usage"]["session"]["position"]
    process.terminate()  # they are parked, as far as there is room
    assert process.wait(timeout=600) == 0
    serve("--store", folder + "/small", "--store-budget", "1M")
    for session, position in made.items():
        status, _, answer = turn(session)
        assert status == 200 and answer["usage"]["session"]["position"] == position + 4, (answer, position)
    assert talk.ask(address, "POST", "/v1/completions", {"prompt": "Once", "max_tokens": 2})[0] == 200
    return f"{len(made)} sessions"


try:
    if case == "full":
        print(case, full())
    else:
        redis = start_redis()
        server = serve("--store", f"redis+unix://{folder}/redis", "--store-lease", "8")
        print(case, lost(redis))
finally:
    for child in children:
        child.send_signal(signal.SIGCONT)
        child.kill()
        child.wait()
END
cases=full
if command -v redis-server >/dev/null; then
    cases="full killed stopped"
else
    echo "SKIP: there is no redis-server"
fi
for case in $cases; do
    python3 "$folder/down.py" "$source_dir/tests/server" "$build/mesa-server" "$model" "$folder" "$case" \
        >"$folder/down" 2>&1 || fail "$case: $(tail -n 8 "$folder/down"; tail -n 8 "$folder/down.log")"
    tail -n 1 "$folder/down"
done

exit $((failures > 0))
