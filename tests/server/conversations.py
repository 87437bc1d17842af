#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Conversations on sessions while servers die: what was acknowledged stands, and the text is an undisturbed one's.

Each conversation is a script: turn t of conversation c has a prompt, a length and a seed of its own, so that whoever
says it again says the same. A turn whose answer did not come was made or not, whole: the session's position tells
which, and is one of the two. At the end a server that nobody disturbs is given the same scripts, and every text is
compared.

The caller gives the addresses of the servers (paths of unix sockets, or host:port), a function that is called to
disturb them, and takes what went wrong as an exception.
"""
import http.client
import json
import random
import socket
import threading
import time

PROMPTS = ("The king said", " and", " But the river", " Then she", " because", " Once more", "")


class Connection(http.client.HTTPConnection):
    """HTTP on a unix socket, or on host:port."""

    def __init__(self, address):
        self.address = address
        super().__init__("localhost" if address.startswith("/") else address, timeout=300)

    def connect(self):
        if self.address.startswith("/"):
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.settimeout(self.timeout)
            self.sock.connect(self.address)
        else:
            super().connect()


def ask(address, method, path, body=None, headers=None):
    """The status, the headers and the JSON of an answer; OSError or HTTPException where none came whole."""
    connection = Connection(address)
    try:
        text = json.dumps(body) if body is not None else None
        connection.request(method, path, text, {"Content-Type": "application/json", **(headers or {})})
        answer = connection.getresponse()
        data = answer.read()
        return answer.status, answer.headers, json.loads(data) if data else None
    finally:
        connection.close()


def wait_until_ready(address, process, seconds=300):
    """Until the server of that process answers; an AssertionError where it ends or does not become ready."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert process.poll() is None, "the process has ended: see its log"
        try:
            if ask(address, "GET", "/health/ready")[0] == 200:
                return
        except (OSError, http.client.HTTPException, ValueError):
            pass
        time.sleep(0.02)
    raise AssertionError(f"{address} does not become ready")


def patiently(choose, method, path, body=None, headers=None, seconds=300):
    """Asks until there is an answer that is none to wait for: not while servers start, nor while another has it."""
    until = time.monotonic() + seconds
    while True:
        address = choose()
        last = None
        try:
            status, answered, answer = ask(address, method, path, body, headers)
            last = status, answer
            if status not in (429, 502, 503, 504) and not (status == 409 and answered.get("Retry-After")):
                return status, answer
            pause = 0.2
        except (OSError, http.client.HTTPException, ValueError) as fault:
            last = fault
            pause = 0.05
        if time.monotonic() > until:
            raise AssertionError(f"{method} {path} at {address}: {last}")
        time.sleep(pause)


def turn_of(conversation, turn):
    """The request of a turn, the same whenever it is asked for."""
    chance = random.Random(conversation * 100003 + turn)
    return {
        "prompt": PROMPTS[0] if turn == 0 else chance.choice(PROMPTS[1:]),
        "max_tokens": chance.randrange(1, 12),
        "temperature": 0.8,
        "seed": chance.randrange(1 << 30),
        "ignore_eos": True,
    }


class Conversation(threading.Thread):
    """Goes on turn by turn until it is told to stop, whatever happens to the servers."""

    def __init__(self, number, choose, stop, headers_of, check_durable=True):
        super().__init__()
        self.number, self.choose, self.stop, self.headers_of = number, choose, stop, headers_of
        self.check_durable = check_durable
        self.said = []  # (text or None, position after it) of each turn
        self.lost = self.again = 0
        self.fault = None

    def run(self):
        try:
            self.converse()
        except BaseException as fault:  # for whoever joins
            self.fault = fault

    def begin(self):
        status, made = patiently(self.choose, "POST", "/v1/sessions", {"ttl_s": 3600})
        assert status == 201, made
        return made["id"]

    def look(self, session):
        status, answer = patiently(self.choose, "GET", "/v1/sessions/" + session, None, self.headers_of(session))
        assert status == 200, f"session {session} is lost: {status} {answer}"
        return answer

    def where(self, session):
        return self.look(session)["position"]

    def is_kept(self, session, position):
        """Of a turn that a slow store did not have yet when it was answered: whether it has it after a while. A server
        that dies before may have forgotten the turn."""
        for _ in range(3000):
            told = self.look(session)
            if told["durable"] or told["position"] != position:
                return told["position"] == position
            time.sleep(0.1)
        raise AssertionError(f"session {session} does not become durable: {told}")

    def take_turn(self, session, position):
        """Position and text after the next turn; text None: it was made, and its answer lost."""
        request = {**turn_of(self.number, len(self.said)), "session": session, "session_position": position}
        until = time.monotonic() + 600
        while time.monotonic() < until:
            try:
                status, answered, answer = ask(self.choose(), "POST", "/v1/completions", request,
                                               self.headers_of(session))
            except (OSError, http.client.HTTPException, ValueError):
                now = self.where(session)
                if now != position:
                    self.lost += 1
                    return now, None
                self.again += 1
                continue
            if status == 200:
                told = answer["usage"]["session"]
                if self.check_durable and not told["durable"] and not self.is_kept(session, told["position"]):
                    self.again += 1
                    continue
                return told["position"], answer["choices"][0]["text"]
            if status == 409 and answer["error"]["code"] == "position_mismatch":
                now = self.where(session)
                assert now > position, f"session {session} was at {position}, is at {now}: {answer}"
                self.lost += 1
                return now, None
            if status not in (429, 502, 503, 504) and not (status == 409 and answered.get("Retry-After")):
                raise AssertionError(f"turn {len(self.said)} of {session}: {status} {answer}")
            time.sleep(0.1)
        raise AssertionError(f"turn {len(self.said)} of {session}: no answer in ten minutes")

    def converse(self):
        session, position = self.begin(), 0
        while not self.stop.is_set():
            position, text = self.take_turn(session, position)
            self.said.append((text, position))
        now = self.where(session)
        assert now == position, f"session {session} was acknowledged at {position}, is at {now}"


def compare(conversations, address):
    """The same scripts, undisturbed; one turn after the other on a session of its own."""
    def choose():
        return address

    for conversation in conversations:
        status, made = patiently(choose, "POST", "/v1/sessions", {})
        assert status == 201, made
        for turn, (text, position) in enumerate(conversation.said):
            request = {**turn_of(conversation.number, turn), "session": made["id"]}
            status, answer = patiently(choose, "POST", "/v1/completions", request)
            assert status == 200, answer
            alone, stands = answer["choices"][0]["text"], answer["usage"]["session"]["position"]
            assert position == stands, f"turn {turn} of {conversation.number}: at {position}, alone at {stands}"
            assert text in (None, alone), f"turn {turn} of {conversation.number}: {text!r}, alone {alone!r}"


def wait_for_turns(conversations, count, seconds=300):
    """Until so many turns more have been made, or one of the conversations has ended."""
    begin = sum(len(conversation.said) for conversation in conversations)
    end = time.monotonic() + seconds
    while sum(len(conversation.said) for conversation in conversations) < begin + count:
        if time.monotonic() > end or not all(conversation.is_alive() for conversation in conversations):
            break
        time.sleep(0.01)


def hold(count, choose, disturb, headers_of=lambda session: {}, check_durable=True):
    """Lets so many conversations go on while disturb(conversations) runs; returns them, ended."""
    stop = threading.Event()
    conversations = [Conversation(n, choose, stop, headers_of, check_durable) for n in range(count)]
    for conversation in conversations:
        conversation.start()
    try:
        disturb(conversations)
    finally:
        stop.set()
        for conversation in conversations:
            conversation.join()
    for conversation in conversations:
        if conversation.fault:
            raise conversation.fault
    return conversations
