#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# The exported state of a tiny model with matrix states and attention: with any one byte changed, cut, or with more
# behind it it is refused over HTTP, and the session that it was for is what it was, to the byte.
# shellcheck source=tests/clients/server.sh
. "$(dirname "$0")/../clients/server.sh"
need_built mesa-trainer
need_installed python3

echo '{"model_type": "mesa_net", "vocab_size": 4096, "hidden_size": 8, "num_hidden_layers": 2, "num_heads": 1,
    "head_dim": 8, "intermediate_size": 8, "layer_types": ["mesa_net", "attention"], "attn": {"num_heads": 1},
    "tie_word_embeddings": true, "initializer_range": 0.3, "max_position_embeddings": 512, "bos_token_id": 0,
    "eos_token_id": 0}' >"$folder/tiny.json"
train_a_step tiny
model=$(echo "$folder"/tiny/step-*)
start_server
cat >"$folder/flip.py" <<'END'
import http.client, json, socket, sys


class Connection(http.client.HTTPConnection):
    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(300)
        self.sock.connect(sys.argv[1])


server = Connection("localhost")


def ask(method, path, body=None, kind="application/json"):
    server.request(method, path, body, {"Content-Type": kind} if body is not None else {})
    answer = server.getresponse()
    return answer.status, answer.read()


def session(prompt):
    status, answer = ask("POST", "/v1/sessions", json.dumps({"prompt": prompt}))
    assert status == 201, answer
    name = json.loads(answer)["id"]
    status, answer = ask("POST", "/v1/completions", json.dumps({"session": name, "max_tokens": 2, "ignore_eos": True}))
    assert status == 200, answer
    return name


def state(name):
    status, answer = ask("GET", f"/v1/sessions/{name}/state")
    assert status == 200, answer
    return answer


victim = session("a b c d")
good, before = state(session("x")), state(victim)
faults = []


def refused(what, bytes):
    status, answer = ask("PUT", f"/v1/sessions/{victim}/state", bytes, "application/octet-stream")
    try:
        error = json.loads(answer)["error"]["code"]
    except (ValueError, KeyError):
        error = None
    if (status, error) not in ((400, "invalid_state"), (409, "foreign_state")):
        faults.append(f"{what}: {status} {answer[:200]}")


for at in range(len(good)):
    changed = bytearray(good)
    changed[at] ^= 1 << at % 8
    refused(f"byte {at} changed", bytes(changed))
    if at % 16 == 0:
        refused(f"cut at {at}", good[:at])
    if at % 512 == 0 and state(victim) != before:
        faults.append(f"after byte {at} the session is another")
refused("a byte more", good + b"\0")
if state(victim) != before:
    faults.append("the session is not what it was")
status, answer = ask("PUT", f"/v1/sessions/{victim}/state", good, "application/octet-stream")
if status != 200 or state(victim) != good:
    faults.append(f"the whole state is not taken: {status} {answer[:200]}")
print(f"{len(good)} bytes")
print("\n".join(faults[:20]))
sys.exit(bool(faults))
END
python3 "$folder/flip.py" "$folder/socket" >"$folder/flips" 2>&1 || fail "$(cat "$folder/flips")"
grep -E '^[0-9]+ bytes$' "$folder/flips"

exit $((failures > 0))
