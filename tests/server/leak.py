#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Many keys' completions and sessions at once, with cancels, forks and failures; then each answer is asked for alone.

    leak.py PROGRAM MODEL FOLDER OPERATIONS SEED STORE

The server that is hunted has memory for few sessions and prefixes and a store, so that states move all the time. Every
answer is written down with what it was an answer to: a completion by its body, a session by its history, step by step
up to the position that was acknowledged. A second server without store, cache and neighbours gets the same steps, one
at a time, and must say the same, bit for bit, but for what an answer tells of other requests: cached tokens and the
solver's steps over the part of the prompt that was read. What each thread does is drawn from the seed. MIXED=1: the
turns of a session have knobs of their own, not only the session's.
"""
import collections
import hashlib
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time

import conversations as talk

PROGRAM, MODEL, FOLDER, OPERATIONS, SEED = sys.argv[1:4] + [int(number) for number in sys.argv[4:6]]
KEYS, THREADS, VOCABULARY, NOBODY = 20, 8, 4096, "sess-" + 32 * "0"
STORE = sys.argv[6]
ADDRESS, KEYS_FILE = FOLDER + "/hunt.socket", FOLDER + "/keys"
SESSION_BUDGET, PREFIX_BUDGET = 512 << 10, 1 << 20
HUNTED = ("--store", STORE, "--store-prefixes", "64", "--session-budget", str(SESSION_BUDGET),
          "--prefix-budget", str(PREFIX_BUDGET), "--prefix-audit", "2", "--snapshot-tokens", "64", "--rows", "6", "--keys",
          KEYS_FILE)
ALONE = ("--store", "none", "--prefix-budget", "0", "--rows", "1")
MOST_GROWTH_MIB = 32
MIXED = os.environ.get("MIXED") == "1"
KNOBS = ({}, {}, {}, {"cg_tolerance": 0.3}, {"cg_mode": "steps", "cg_max_steps": 2}, {"cg_mode": "exact"})
SAMPLING = ({"temperature": 0}, {}, {"temperature": 1.3, "top_p": 0.9}, {"top_k": 30}, {"min_p": 0.02},
            {"presence_penalty": 1.5, "frequency_penalty": 0.7}, {"repetition_penalty": 1.4, "temperature": 0},
            {"logit_bias": {"17": 6, "300": -100}}, {"stop": ["e"], "temperature": 0.7}, {"stop": ["th", " "]},
            {"stop": ["a"], "include_stop_str_in_output": True}, {"ignore_eos": True, "min_tokens": 1})
WRONG = ({"temperature": -1}, {"n": 0}, {"logprobs": 21}, {"cg_max_steps": 1 << 20}, {"logit_bias": {"4096": 1}},
         {"prompt": [VOCABULARY]}, {"max_tokens": "many"}, {"stop": [""]}, {"session_position": 1}, {"suffix": "x"})
WORDS = "the king said that a river of the city would stand once upon time".split()


class Fault(Exception):
    pass


def check(right, what):
    if not right:
        raise Fault(what)


def secret(key):
    return hashlib.sha256(f"key {key}".encode()).hexdigest()


def write_keys(order):
    lines = [f"tenant{key} {hashlib.sha256(secret(key).encode()).hexdigest()}\n" for key in order]
    with open(KEYS_FILE + ".new", "w", encoding="ascii") as file:
        file.writelines(lines)
    os.rename(KEYS_FILE + ".new", KEYS_FILE)


# ---- servers ---------------------------------------------------------------------------------------------------------

class Server:
    def __init__(self, name, options):
        self.address = f"{FOLDER}/{name}.socket"
        self.log = open(f"{FOLDER}/{name}.log", "ab")
        command = [PROGRAM, "--model", "demo=" + MODEL, "--listen", "unix:" + self.address, *options]
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log)

    def wait_until_ready(self):
        talk.wait_until_ready(self.address, self.process)

    def end(self):
        self.process.terminate()
        status = self.process.wait(timeout=600)
        self.log.close()
        check(status == 0, f"a server ended with status {status}")

    def kill(self):
        self.process.kill()
        self.process.wait()


class Client:
    """One connection, opened again whenever it was closed."""

    def __init__(self, address):
        self.address, self.connection = address, None

    def send(self, method, path, body, key):
        headers = {"Authorization": "Bearer " + secret(key)} if key is not None else {}
        if isinstance(body, bytes):
            headers["Content-Type"] = "application/octet-stream"
        elif body is not None:
            headers["Content-Type"] = "application/json"
            body = json.dumps(body)
        self.connection = self.connection or talk.Connection(self.address)
        self.connection.timeout = 300
        self.connection.request(method, path, body, headers)
        return self.connection.getresponse()

    def close(self):
        if self.connection:
            self.connection.close()
        self.connection = None

    def ask(self, method, path, body=None, key=None):
        """Status and answer: JSON where it is, the one of all its events where it is a stream."""
        end = time.monotonic() + 300
        while time.monotonic() < end:
            answer = self.send(method, path, body, key)
            status, kind, data = answer.status, answer.getheader("Content-Type", ""), answer.read()
            if answer.will_close:
                self.close()
            if status in (429, 503) or status == 409 and answer.getheader("Retry-After"):
                waits[status] += 1
                time.sleep(0.02)
                continue
            if "event-stream" in kind:
                return status, joined(events_of(data.decode().split("\n")))
            return status, json.loads(data) if "json" in kind and data else data
        raise Fault(f"{method} {path} {body}: waits for ever: {status} {data[:300]}")


def events_of(lines):
    events = [line[6:] for line in lines if line.startswith("data: ")]
    check(events and events[-1] == "[DONE]", f"a stream does not end: {events[-1:]}")
    return [json.loads(event) for event in events[:-1]]


def joined(events):
    """The plain answer that a stream's events are the parts of."""
    whole = {"usage": None, "choices": {}}
    for event in events:
        check("error" not in event, event)
        for part in event.pop("choices"):
            choice = whole["choices"].setdefault(part["index"], part)
            if choice is part:
                continue
            choice["text"] += part["text"]
            choice["finish_reason"] = part["finish_reason"]
            if "token_ids" in part:
                choice["token_ids"] += part["token_ids"]
            for name, values in (part["logprobs"] or {}).items():
                choice["logprobs"][name] += values
        event.pop("session", None)
        whole.update({name: value for name, value in event.items() if value is not None})
    whole["choices"] = [whole["choices"][index] for index in sorted(whole["choices"])]
    return whole


# ---- what is remembered ----------------------------------------------------------------------------------------------

class Step:
    """Of a session's history: what was asked, what was answered (None: the client left), where it stood then."""

    def __init__(self, kind, body=None, answer=None, position=None, heard=None):
        self.kind, self.body, self.answer, self.position, self.heard = kind, body, answer, position, heard
        self.compared = False


class Session:
    def __init__(self, key, name, knobs, history, first=0):
        self.key, self.name, self.knobs, self.history = key, name, knobs, history
        self.first = first  # position that it may go back to; of a state that was brought in two ids before it are here
        self.taken = True

    @property
    def position(self):
        return self.history[-1].position


lock = threading.Lock()
sessions = [[] for _ in range(KEYS)]     # that each key has
past = []                                # that were dropped
named = [set() for _ in range(KEYS)]     # the names that it was told
listed = [set() for _ in range(KEYS)]    # the names that lists told it
begun = [[] for _ in range(KEYS)]        # prompts that it sent, as ids
unheard = collections.Counter()          # of each key, sessions whose maker did not wait
short = []                               # (key, name, when it must have gone)
completions = []                         # (body, answer)
left = []                                # (body, what was heard of the stream)
done, waits = collections.Counter(), collections.Counter()
faults = []


def take(chance, key):
    """One of the key's sessions that nobody is using."""
    with lock:
        free = [session for session in sessions[key] if not session.taken]
        if not free:
            return None
        session = chance.choice(free)
        session.taken = True
        return session


def give_back(session):
    with lock:
        session.taken = False


def keep(key, name, knobs, history, first=0):
    session = Session(key, name, knobs, history, first)
    with lock:
        named[key].add(name)
        sessions[key].append(session)
    return session


# ---- operations ------------------------------------------------------------------------------------------------------

def documents():
    chance = random.Random(SEED)
    return [[chance.randrange(1, VOCABULARY) for _ in range(300)] for _ in range(3)]


DOCUMENTS = documents()


def draw_prompt(chance, key):
    if chance.random() < 0.25:
        return " ".join(chance.choice(WORDS) for _ in range(chance.randrange(1, 12)))
    own = [chance.randrange(1, VOCABULARY) for _ in range(chance.randrange(1, 6))]
    prompt = chance.choice(DOCUMENTS)[:chance.choice((0, 3, 63, 64, 65, 128, 129, chance.randrange(300)))] + own
    begun[key].append(prompt)
    return prompt


def draw_body(chance, key):
    body = {"prompt": draw_prompt(chance, key), "max_tokens": chance.choice((0, 1, 2, 5, 9, 14)),
            **chance.choice(SAMPLING), **chance.choice(KNOBS)}
    body["max_tokens"] = max(body["max_tokens"], body.get("min_tokens", 0))
    if chance.random() < 0.7:
        body["seed"] = chance.randrange(1 << 30)
    if chance.random() < 0.4:
        body["logprobs"] = chance.randrange(6)
    if chance.random() < 0.7:
        body["return_token_ids"] = True
    return body


class Hunter:
    """One thread's client."""

    def __init__(self, number, part):
        self.chance = random.Random(f"{SEED} {number} {part}")
        self.client = Client(ADDRESS)

    def run(self, operations):
        kinds, weights = zip(*(
            (self.complete, 24), (self.leave_stream, 6), (self.fail, 4), (self.make, 9), (self.turn, 24),
            (self.leave_turn, 8), (self.fork, 8), (self.roll_back, 4), (self.bring_in, 4), (self.damage, 3),
            (self.drop, 6), (self.make_short, 1), (self.make_for_nobody, 2), (self.spy, 6), (self.list, 3),
            (self.watch, 3)))
        for _ in range(operations):
            key = self.chance.randrange(KEYS)
            operation = self.chance.choices(kinds, weights)[0]
            operation(key)
            done[operation.__name__] += 1
            if faults:
                break

    def ask(self, method, path, body, key):
        return self.client.ask(method, path, body, key)

    def expect(self, status, method, path, body, key):
        got, answer = self.ask(method, path, body, key)
        check(got == status, f"{method} {path} {body}: {got}, not {status}: {answer}")
        return answer

    def stream_until(self, body, key):
        """The events that were heard until the client left; None: it was too late."""
        client, heard, count = Client(ADDRESS), [], self.chance.randrange(1, 6)
        try:
            answer = client.send("POST", "/v1/completions", {**body, "stream": True}, key)
            while answer.status == 200 and len(heard) < count:
                line = answer.readline().decode()
                if line.startswith("data: [DONE]") or not line:
                    break
                if line.startswith("data: "):
                    heard.append(json.loads(line[6:]))
            return heard if answer.status == 200 else None
        finally:
            client.close()

    # completions

    def complete(self, key):
        body = draw_body(self.chance, key)
        if self.chance.random() < 0.25:
            body["n"] = self.chance.randrange(2, 4)
        if self.chance.random() < 0.15:
            body["echo"] = True
        streams = self.chance.random() < 0.3
        if not streams and self.chance.random() < 0.1:
            body["best_of"] = body.get("n", 1) + 1
        sent = {**body, "stream": True, "stream_options": {"include_usage": True}} if streams else body
        answer = self.expect(200, "POST", "/v1/completions", sent, key)
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        check(cached == 0 or "n" in body or "best_of" in body or self.has_sent(key, body["prompt"], cached),
              f"{cached} tokens of {body['prompt']} were cached, which key {key} never sent")
        completions.append(({**body, "seed": answer["seed"]}, answer))

    def has_sent(self, key, prompt, cached):
        same = [sent for sent in list(begun[key]) if sent[:cached] == prompt[:cached]]
        return len(same) > 1

    def leave_stream(self, key):
        body = draw_body(self.chance, key)
        body["seed"] = self.chance.randrange(1 << 30)
        heard = self.stream_until(body, key)
        if heard:
            left.append((body, heard))

    def fail(self, key):
        body = {**draw_body(self.chance, key), **self.chance.choice(WRONG)}
        status, answer = self.ask("POST", "/v1/completions", body, key)
        check(status == 400 and answer["error"]["message"], f"a wrong field: {status} {answer}")

    # sessions

    def make(self, key):
        knobs = dict(self.chance.choice(KNOBS))
        body = dict(knobs)
        if self.chance.random() < 0.6:
            body["prompt"] = draw_prompt(self.chance, key)
        with lock:
            many = len(sessions[key]) > 4
        if many:
            self.drop(key)
        made = self.expect(201, "POST", "/v1/sessions", body, key)
        session = keep(key, made["id"], knobs, [Step("make", body, position=made["position"])])
        self.stands(session)
        give_back(session)

    def becomes_durable(self, session):
        """A slow store's answer may come after the turn's."""
        end = time.monotonic() + 300
        while not self.expect(200, "GET", "/v1/sessions/" + session.name, None, session.key)["durable"]:
            check(time.monotonic() < end, f"{session.name} does not become durable")
            time.sleep(0.05)

    def stands(self, session):
        """It is where it was left, by its own word."""
        told = self.expect(200, "GET", "/v1/sessions/" + session.name, None, session.key)
        check(told["position"] == session.position, f"session {session.name} stands at {told}, not {session.position}")
        return told

    def body_of_turn(self, session):
        body = draw_body(self.chance, session.key)
        if not MIXED:
            body = {name: value for name, value in body.items() if not name.startswith("cg_")}
        if self.chance.random() < 0.3 and session.position >= max(2, session.first):
            body["prompt"] = ""
        body["seed"] = self.chance.randrange(1 << 30)
        body["session"] = session.name
        if self.chance.random() < 0.3:
            body["session_position"] = session.position
        if self.chance.random() < 0.15:
            body["session_rollback"] = True
        return body

    def remember(self, session, body, **more):
        knobs = dict(session.knobs)
        if "cg_tolerance" in body:
            knobs.pop("cg_mode", None)  # the mode and the tolerance are one choice
        session.history.append(Step("turn", {**knobs, **body}, **more))

    def turn(self, key):
        session = take(self.chance, key)
        if not session:
            return self.make(key)
        body = self.body_of_turn(session)
        if self.chance.random() < 0.1:  # conditions that do not hold
            body["session_position"] = session.position + 1
            answer = self.expect(409, "POST", "/v1/completions", body, key)
            check(answer["error"]["code"] == "position_mismatch", answer)
        elif self.chance.random() < 0.1:
            self.expect(400, "POST", "/v1/completions", {**body, "n": 2}, key)
        elif self.chance.random() < 0.1:  # solves that may not converge
            body.update(on_unconverged="error", cg_tolerance=1e-6, cg_mode="tolerance",
                        cg_max_steps=self.chance.randrange(1, 4))
        else:
            streams = {"stream": True, "stream_options": {"include_usage": True}} if self.chance.random() < 0.3 else {}
            answer = self.expect(200, "POST", "/v1/completions", {**body, **streams}, key)
            told = answer["usage"]["session"]
            check(told["id"] == session.name, f"{told} of {session.name}")
            if not told["durable"]:
                self.becomes_durable(session)
            self.remember(session, body, answer=answer, position=told["position"])
            give_back(session)
            return None
        if "on_unconverged" in body:
            status, answer = self.ask("POST", "/v1/completions", body, key)
            told = self.expect(200, "GET", "/v1/sessions/" + session.name, None, key)
            self.remember(session, body, answer=answer, position=told["position"])
        self.stands(session)
        give_back(session)
        return None

    def leave_turn(self, key):
        session = take(self.chance, key)
        if not session:
            return
        body = {**self.body_of_turn(session), "return_token_ids": True}
        heard = self.stream_until(body, key)
        if heard is not None:
            nowhere = {"session": session.name, "session_position": 1 << 40}
            self.expect(409, "POST", "/v1/completions", nowhere, key)  # once it is free
            told = self.expect(200, "GET", "/v1/sessions/" + session.name, None, key)
            self.remember(session, body, position=told["position"], heard=heard)
        else:
            self.stands(session)
        give_back(session)

    def earlier(self, session):
        return self.chance.randrange(min(session.first, session.position), session.position + 1)

    def fork(self, key):
        session = take(self.chance, key)
        if not session:
            return
        early = self.earlier(session) if self.chance.random() < 0.6 else None
        body = {} if early is None else {"position": early}
        made = self.expect(201, "POST", f"/v1/sessions/{session.name}/fork", body, key)
        check(made["position"] == (session.position if early is None else early), made)
        more = [] if early is None else [Step("rollback", position=early)]
        copy = keep(key, made["id"], session.knobs, session.history + more, session.first)
        self.stands(copy)
        give_back(copy)
        answer = self.expect(409, "POST", f"/v1/sessions/{session.name}/fork", {"position": session.position + 1}, key)
        check("from position" in answer["error"]["message"], answer)
        give_back(session)

    def roll_back(self, key):
        session = take(self.chance, key)
        if not session:
            return
        position = self.earlier(session)
        told = self.expect(200, "POST", f"/v1/sessions/{session.name}/rollback", {"position": position}, key)
        check(told["position"] == position, told)
        session.history.append(Step("rollback", position=position))
        give_back(session)

    def bring_in(self, key):
        """A state goes out, and into another session, a new one or not."""
        session = take(self.chance, key)
        if not session:
            return
        other = take(self.chance, key) if self.chance.random() < 0.5 else None
        if not other:
            made = self.expect(201, "POST", "/v1/sessions", {}, key)
            other = keep(key, made["id"], {}, [Step("make", {}, position=0)])
        bytes_ = self.expect(200, "GET", f"/v1/sessions/{session.name}/state", None, key)
        told = self.expect(200, "PUT", f"/v1/sessions/{other.name}/state", bytes_, key)
        check(told["position"] == session.position, f"{told}, not at {session.position}")
        with lock:
            past.append(Session(key, None, other.knobs, other.history))
        other.history, other.first = list(session.history), told["earliest"] + 2 * (told["earliest"] > 0)
        give_back(other)
        give_back(session)

    def damage(self, key):
        session = take(self.chance, key)
        if not session:
            return
        bytes_ = bytearray(self.expect(200, "GET", f"/v1/sessions/{session.name}/state", None, key))
        if self.chance.random() < 0.3:
            del bytes_[self.chance.randrange(len(bytes_)):]
        else:
            bytes_[self.chance.randrange(len(bytes_))] ^= 1 << self.chance.randrange(8)
        status, answer = self.ask("PUT", f"/v1/sessions/{session.name}/state", bytes(bytes_), key)
        check(status in (400, 409), f"a damaged state: {status} {answer}")
        self.stands(session)
        give_back(session)

    def drop(self, key):
        session = take(self.chance, key)
        if not session:
            return
        with lock:
            sessions[key].remove(session)
        self.expect(204, "DELETE", "/v1/sessions/" + session.name, None, key)
        self.expect(404, "GET", "/v1/sessions/" + session.name, None, key)
        self.expect(404, "POST", "/v1/completions", {"session": session.name}, key)
        with lock:
            past.append(session)

    def make_short(self, key):
        made = self.expect(201, "POST", "/v1/sessions", {"ttl_s": 1, "prompt": draw_prompt(self.chance, key)}, key)
        with lock:
            named[key].add(made["id"])
            short.append((key, made["id"], time.monotonic() + 4))

    def make_for_nobody(self, key):
        unheard[key] += 1
        connection = talk.Connection(ADDRESS)
        connection.request("POST", "/v1/sessions", json.dumps({"prompt": draw_prompt(self.chance, key)}),
                           {"Authorization": "Bearer " + secret(key), "Content-Type": "application/json"})
        time.sleep(self.chance.choice((0, 0.001, 0.01)))
        connection.close()

    # what nobody may know

    def spy(self, key):
        """A session of another key is one that there is not."""
        other = (key + self.chance.randrange(1, KEYS)) % KEYS
        with lock:
            victims = sorted(named[other])
        name = self.chance.choice(victims) if victims else NOBODY
        method, path, body = self.chance.choice((
            ("GET", "/v1/sessions/{}", None), ("GET", "/v1/sessions/{}/state", None),
            ("DELETE", "/v1/sessions/{}", None), ("PUT", "/v1/sessions/{}/state", b"MESA"),
            ("POST", "/v1/sessions/{}/fork", {}),
            ("POST", "/v1/sessions/{}/rollback", {"position": 0}),
            ("POST", "/v1/completions", {"session": "{}", "prompt": "a", "max_tokens": 1})))

        def spied(name):
            named_body = {**body, "session": name} if isinstance(body, dict) and "session" in body else body
            return self.ask(method, path.format(name), named_body, key)
        got, none = spied(name), spied(NOBODY)
        check(got == none and got[0] == 404, f"key {key} learns of {method} {path} {name}: {got}, else {none}")

    def list(self, key):
        with lock:
            before = {session.name for session in sessions[key]}
        told = {one["id"] for one in self.expect(200, "GET", "/v1/sessions", None, key)["data"]}
        with lock:
            lost = before & {session.name for session in sessions[key]} - told
            listed[key] |= told
        check(not lost, f"key {key} does not see its {lost}")

    def watch(self, key):
        """Who looks at a session while others may use it sees it whole."""
        with lock:
            names = [session.name for session in sessions[key]]
        if not names:
            return
        name = self.chance.choice(names)
        status, answer = self.ask("GET", "/v1/sessions/" + name + self.chance.choice(("", "/state")), None, key)
        check(status in (200, 404), f"a session that is looked at: {status} {answer}")


# ---- the hunt --------------------------------------------------------------------------------------------------------

def figures(client):
    text = client.send("GET", "/metrics", None, 0).read().decode()
    check("sess-" not in text and "tenant" not in text, "the figures name a session or a key")
    samples = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
    return {name.replace('model="demo",', "").replace('{model="demo"}', ""): float(value) for name, value in samples}


def memory_of(process):
    with open(f"/proc/{process.pid}/status", encoding="ascii") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith(("RssAnon", "VmSwap"))) // 1024


def is_sanitized():
    """What was freed is kept then for a while."""
    with open(PROGRAM, "rb") as file:
        return b"__asan_init" in file.read()


def in_thread(function, *arguments):
    def run():
        try:
            function(*arguments)
        except BaseException as fault:  # whatever it is, it is told of
            faults.append(fault)
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def hunt(server, part, operations):
    """Returns memory in MiB at each look."""
    threads = [in_thread(Hunter(number, part).run, operations // THREADS) for number in range(THREADS)]
    chance, client, order, memory = random.Random(f"{SEED} {part}"), Client(server.address), list(range(KEYS)), []
    while any(thread.is_alive() for thread in threads):
        chance.shuffle(order)
        write_keys(order)
        server.process.send_signal(signal.SIGHUP)
        next((thread for thread in threads if thread.is_alive()), threads[0]).join(chance.uniform(0.2, 0.6))
        now = figures(client)
        memory.append(memory_of(server.process))
        for what, budget in (("sessions", SESSION_BUDGET), ("prefixes", PREFIX_BUDGET)):
            used = now[f'mesa_memory_bytes{{what="{what}"}}']
            check(used <= budget, f"{used} bytes of {what}, of {budget}")
    for thread in threads:
        thread.join()
    if faults:
        raise faults[0]
    return memory


EMPTY = ("mesa_rows", "mesa_queue_requests", "mesa_queue_tokens", "mesa_sessions", "mesa_sessions_behind",
         "mesa_store_queue",
         'mesa_states{residence="device"}', 'mesa_states{residence="host"}', 'mesa_states{model="",residence="store"}',
         'mesa_memory_bytes{what="sessions"}', 'mesa_memory_bytes{model="",what="bodies"}')


def finish(server):
    """Everything that is kept is compared and dropped; nothing is left."""
    client = Client(server.address)
    while short:
        key, name, gone = short.pop()
        time.sleep(max(0, gone - time.monotonic()))
        status, answer = client.ask("GET", "/v1/sessions/" + name, None, key)
        check(status == 404, f"a session whose time is over: {status} {answer}")
    for key in range(KEYS):
        for session in sessions[key]:
            status, told = client.ask("GET", "/v1/sessions/" + session.name, None, key)
            check(status == 200 and told["position"] == session.position,
                  f"{session.name}: {told}, not {session.position}")
            status, answer = client.ask("DELETE", "/v1/sessions/" + session.name, None, key)
            check(status == 204, f"a drop: {status} {answer}")
            past.append(session)
        foreign = listed[key] & set().union(*(named[other] for other in range(KEYS) if other != key))
        check(not foreign, f"key {key} was told of {foreign}")
        strangers = [one["id"] for one in client.ask("GET", "/v1/sessions", None, key)[1]["data"]]
        check(len(strangers) <= unheard[key] and not named[key] & set(strangers), f"key {key} still has {strangers}")
        for name in strangers:  # their answers were sent before the client left
            check(client.ask("DELETE", "/v1/sessions/" + name, None, key)[0] == 204, f"{name} is not dropped")
    for _ in range(6000):
        now = figures(client)
        if not any(now[name] for name in EMPTY):
            break
        time.sleep(0.05)
    full = {name: now[name] for name in EMPTY if now[name]}
    check(not full, f"left behind: {full}")
    check(now["mesa_state_audit_mismatch_total"] == 0, "the audit found states that are wrong")
    return now


def check_log():
    with open(FOLDER + "/hunt.log", encoding="utf-8") as file:
        for line in file:
            check('"level":"error"' not in line and '"level":"warning"' not in line, line)


# ---- alone -----------------------------------------------------------------------------------------------------------

def own(answer):
    """What an answer owes to nobody but its request."""
    if not isinstance(answer, dict) or "usage" not in answer:
        return answer
    usage = json.loads(json.dumps(answer["usage"]))
    del usage["prompt_tokens_details"], usage["compute"]["prompt"]
    if "session" in usage:
        del usage["session"]["id"], usage["session"]["durable"]
    return {"choices": answer["choices"], "usage": usage, "seed": answer["seed"]}


def compare(what, got, alone):
    check(own(got) == own(alone), f"{what}:\n     got {json.dumps(own(got))}\n   alone {json.dumps(own(alone))}")


def is_beginning(what, heard, alone):
    """What was heard of a stream is what a whole answer begins with; returns it."""
    text = "".join(part["text"] for event in heard for part in event["choices"])
    whole = alone["choices"][0]["text"]
    check(whole.startswith(text), f"{what}: heard {text!r}, alone {whole!r}")
    return text


class Alone:
    def __init__(self, address):
        self.client, self.path = Client(address), None

    def ask(self, method, path, body=None):
        return self.client.ask(method, path, body)

    def complete(self, body):
        status, answer = self.ask("POST", "/v1/completions", body)
        check(status == 200, f"alone: {status} {answer}")
        return answer

    def turn(self, name, step, before):
        body = {**step.body, "session": name}
        what = f"session at {before}, {step.body}, after {self.path}"
        status, answer = self.ask("POST", "/v1/completions", body)
        if step.heard is None:
            compare(what, step.answer, answer)
            return
        check(status == 200, f"alone: {what}: {status} {answer}")
        is_beginning(what, step.heard, answer)
        end = answer["usage"]["session"]["position"]
        if not body.get("session_rollback"):
            # Of a character that is not whole the ids come before the text, and what stands before it in its token comes
            # before the token is told; where a stop string may begin, so may a part of the first token's text.
            texts = sum(any(part["text"] for part in event["choices"]) for event in step.heard)
            told = texts > 1 and not body.get("stop")
            least = min(end, before + (answer["usage"]["prompt_tokens"] + 1 if told else 0))
            check(least <= step.position <= end, f"{what}: left at {step.position}, not of {least} to {end}")
            self.rollback(name, step.position)

    def rollback(self, name, position):
        status, answer = self.ask("POST", f"/v1/sessions/{name}/rollback", {"position": position})
        check(status == 200, f"alone: rollback to {position}: {status} {answer}")

    def replay(self, session):
        last = max((i for i, step in enumerate(session.history) if step.kind == "turn" and not step.compared),
                   default=-1)
        if last < 0:
            return
        # Each step has the knobs of the session that it was asked of: this one has none of its own.
        status, made = self.ask("POST", "/v1/sessions", {})
        check(status == 201, f"alone: {status} {made}")
        name, before = made["id"], 0
        for i, step in enumerate(session.history[:last + 1]):
            self.path = [(one.kind, one.body, one.position) for one in session.history[:i]]
            if step.kind == "turn":
                self.turn(name, step, before)
            elif step.kind == "rollback":
                self.rollback(name, step.position)
            elif "prompt" in step.body:
                self.complete({**step.body, "session": name, "max_tokens": 0})
            status, told = self.ask("GET", "/v1/sessions/" + name)
            check(told["position"] == step.position,
                  f"step {i}, {step.kind} {step.body}: at {step.position}, alone at {told['position']}")
            step.compared = True
            before = step.position
        self.ask("DELETE", "/v1/sessions/" + name)

    def run(self):
        for body, answer in completions:
            compare(f"completion {body}", answer, self.complete(body))
        for body, heard in left:
            is_beginning(f"stream {body}", heard, self.complete(body))
        for session in past:
            self.replay(session)


def main():
    write_keys(range(KEYS))
    servers, memory = [], []
    try:
        for part in range(2):
            servers.append(Server("hunt", HUNTED))
            servers[-1].wait_until_ready()
            memory.append(hunt(servers[-1], part, OPERATIONS // 2))
            if part == 0:
                servers[-1].end()  # and the next one goes on with the sessions
        now = finish(servers[-1])
        if not is_sanitized():
            check(max(memory[-1]) < memory[-1][0] + MOST_GROWTH_MIB, f"memory at each look, MiB: {memory[-1]}")
        servers[-1].end()
        check_log()
        begun_at = time.monotonic()
        servers.append(Server("alone", ALONE))
        servers[-1].wait_until_ready()
        Alone(servers[-1].address).run()
        servers[-1].end()
    finally:
        for server in servers:
            server.kill()
    shown = ("prefix_hits", "prefix_evictions", "prefix_audits", "prefix_stored", "prefix_fetched", "sessions_parked",
             "cancelled")
    print(f"operations: {dict(done)}, alone after {time.monotonic() - begun_at:.1f} s")
    print(f"asked to wait: {dict(waits)}; {({name: int(now[f'mesa_{name}_total']) for name in shown})}; "
          f"memory {[(part[0], max(part), part[-1]) for part in memory]} MiB")


main()
