#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Clients of sessions that leave at any moment: creating, completing, forking, exporting, rolling back. Afterwards every
# session that is listed can be used, none is busy, those that were made for nobody are gone, and a conversation that
# went on meanwhile says what it says alone. With the sessions in memory, and with a store.
# shellcheck source=tests/clients/server.sh
. "$(dirname "$0")/../clients/server.sh"
need_installed python3
cat >"$folder/leave.py" <<'END'
import http.client, json, random, socket, sys, threading, time

PATH, ROUNDS = sys.argv[1], int(sys.argv[2])


class Connection(http.client.HTTPConnection):
    def __init__(self):
        super().__init__("localhost")

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(300)
        self.sock.connect(PATH)


def ask(method, path, body=None):
    connection = Connection()
    connection.request(method, path, json.dumps(body) if body is not None else None,
                       {"Content-Type": "application/json"} if body is not None else {})
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    try:
        return answer.status, json.loads(text)
    except ValueError:
        return answer.status, text


def leave(chance, method, path, body=None):
    """Sends a request, perhaps not all of it, and goes away after a moment."""
    text = json.dumps(body or {}).encode()
    raw = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    raw += f"Content-Length: {len(text)}\r\n\r\n"
    raw = raw.encode() + (text if method != "GET" else b"")
    if method == "GET":
        raw = f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(PATH)
        client.sendall(raw[:chance.randrange(len(raw))] if chance.random() < 0.1 else raw)
        time.sleep(chance.choice((0, 0, 0.0005, 0.002, 0.01, 0.05)) * chance.random())


def converse():
    status, made = ask("POST", "/v1/sessions", {"prompt": "The king"})
    assert status == 201, made
    said = []
    for _ in range(8):
        status, answer = ask("POST", "/v1/completions",
                             {"session": made["id"], "prompt": " and", "max_tokens": 4, "temperature": 0})
        assert status == 200, answer
        said.append(answer["choices"][0]["text"])
    assert ask("DELETE", "/v1/sessions/" + made["id"])[0] == 204
    return said


def annoy(seed):
    chance = random.Random(seed)
    own = [ask("POST", "/v1/sessions", {"prompt": "Once"})[1]["id"] for _ in range(2)]
    for _ in range(ROUNDS):
        name = chance.choice(own)
        leave(chance, *chance.choice((
            ("POST", "/v1/sessions", {"prompt": "Once upon a time " * chance.randrange(1, 60)}),
            ("POST", "/v1/sessions", {}),
            ("POST", f"/v1/sessions/{name}/fork", {"position": chance.randrange(3)}),
            ("POST", f"/v1/sessions/{name}/fork", {}),
            ("POST", f"/v1/sessions/{name}/rollback", {"position": chance.randrange(3)}),
            ("GET", f"/v1/sessions/{name}/state"),
            ("GET", f"/v1/sessions/{name}"),
            ("POST", "/v1/completions", {"session": name, "prompt": "a", "max_tokens": 9, "logprobs": 3}),
            ("POST", "/v1/completions", {"session": name, "prompt": "a", "max_tokens": 9, "stream": True}),
        )))


def gauge(name):
    connection = Connection()
    connection.request("GET", "/metrics")
    for line in connection.getresponse().read().decode().splitlines():
        if line.startswith(name + "{"):
            return float(line.split()[-1])


alone = converse()
threads = [threading.Thread(target=annoy, args=(seed,)) for seed in range(6)]
for thread in threads:
    thread.start()
meanwhile = [converse() for _ in range(3)]
for thread in threads:
    thread.join()
assert all(said == alone for said in meanwhile), (alone, meanwhile)
for _ in range(3000):  # what they left behind ends
    listed = [made["id"] for made in ask("GET", "/v1/sessions")[1]["data"]]
    looks = [ask("GET", "/v1/sessions/" + name) for name in listed]
    if all(status == 200 for status, _ in looks) and gauge("mesa_sessions") == len(listed):
        break
    time.sleep(0.1)
else:
    sys.exit(f"{gauge('mesa_sessions')} sessions for {len(listed)} that are listed: {looks}")
for name in listed:
    for _ in range(3000):
        status, answer = ask("POST", "/v1/completions", {"session": name, "prompt": " and", "max_tokens": 1})
        if status != 409:
            break
        time.sleep(0.1)
    assert status == 200, (name, answer)
    assert ask("DELETE", "/v1/sessions/" + name)[0] == 204, name
assert converse() == alone
for _ in range(3000):  # figures follow a step
    left = gauge("mesa_sessions"), gauge("mesa_rows")
    if left == (0, 0):
        break
    time.sleep(0.1)
assert left == (0, 0), left
print(f"{len(listed)} sessions were known")
END
for store in none "$folder/store"; do
    start_server --store "$store"
    python3 "$folder/leave.py" "$folder/socket" "${1:-60}" >"$folder/left" 2>&1 ||
        fail "store $store: $(tail -n 20 "$folder/left")"
    tail -n 1 "$folder/left"
    kill -0 "$server" || fail "the server has ended: $(tail -n 40 "$folder/server.log")"
    kill "$server"
    wait "$server" || fail "the server ended with status $?: $(tail -n 40 "$folder/server.log")"
    server=
done

exit $((failures > 0))
