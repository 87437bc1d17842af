# SPDX-License-Identifier: Apache-2.0
# A served checkpoint against transformers on the same folder: ids of texts, ids of chats, log-probabilities.
#
#   served.py http://127.0.0.1:8080 FOLDER [FILE...]
# The server must serve FOLDER. Texts are the lines of the files, pairs of them, and runs and mixtures made here. Chats
# are compared where the folder has a template, messages that write special tokens excepted: those differ on purpose.
# Prints one line a comparison; exit status 1 when one fails. Needs torch and transformers.
import json
import random
import sys
import urllib.request

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

URL, FOLDER, FILES = sys.argv[1], sys.argv[2], sys.argv[3:]
LOGPROB_BOUND = 1e-3
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Once upon a time, in 1984, there was a small village near the sea \U0001f3e1",
    "import numpy as np\nx = np.array([1, 2, 3])\nprint(",
    "Water boils at 100 degrees, and 12345 + 678 =",
]
PIECES = [" ", "  ", "\n", "\t", "\r\n", "1", "23", "4567", "0.5", "\u00e9", "\u00df", "\U0001f600", "\u4e2d\u6587",
          "\ud55c\uad6d\uc5b4", "\u0939\u093f\u0928\u094d\u0926\u0940", "a", "The", "don't", "I'LL", "foo_bar",
          "x=", "->", "::", "()", '"', "\u00a0", "\u200b", "\u00bd", "e\u0301", "_", "--", "//", "#", "{", "}"]
failures = 0


def check(condition, what):
    global failures
    failures += not condition
    print("ok  " if condition else "FAIL", what)


def post(path, body):
    request = urllib.request.Request(URL + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)


def texts():
    draw = random.Random(1)
    for name in FILES:
        with open(name, encoding="utf-8") as file:
            lines = file.read().split("\n")
        yield from (line for line in lines if line)
        yield from ("\n".join(pair) for pair in zip(lines[::7], lines[1::7]))
    for length in (1, 2, 3, 5, 17, 64, 200):
        yield from (piece * length for piece in PIECES)
    for _ in range(2000):
        yield "".join(draw.choice(PIECES) for _ in range(draw.randrange(1, 40)))


def compare_texts(tokenizer):
    count = wrong = 0
    for text in texts():
        wanted = tokenizer(text, add_special_tokens=False)["input_ids"]
        got = post("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]
        count += 1
        wrong += got != wanted
        if got != wanted and wrong < 4:
            print(f"     {text[:60]!r}: {got[:12]}, wanted {wanted[:12]}")
    check(wrong == 0, f"{count} texts, {wrong} with other ids")


def chats():
    def message(role, content):
        return {"role": role, "content": content}

    for content in ("Hello", "  padded \n", "\n\n", "12345", "\U0001f600 caf\u00e9", "def f(x):\n    return x"):
        yield [message("user", content)]
        yield [message("system", "You are a pirate."), message("user", content)]
        yield [message("user", "a"), message("assistant", content), message("user", "b")]


def compare_chats(tokenizer):
    count = wrong = 0
    for messages in chats():
        try:
            wanted = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        except Exception:  # a template that refuses such a conversation
            continue
        answer = post("/v1/chat/completions", {"messages": messages, "max_tokens": 1, "return_token_ids": True})
        count += 1
        wrong += answer["choices"][0]["prompt_token_ids"] != wanted
    check(count > 0 and wrong == 0, f"{count} chats, {wrong} with other ids")


def compare_logprobs(tokenizer):
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    worst = 0.0
    for prompt in PROMPTS:
        ids = tokenizer(prompt)["input_ids"]
        answer = post("/v1/completions", {"prompt": ids, "max_tokens": 1, "echo": True, "logprobs": 1})
        got = answer["choices"][0]["logprobs"]["token_logprobs"][1 : len(ids)]
        with torch.no_grad():
            logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1)
        wanted = [logprobs[i, ids[i + 1]].item() for i in range(len(ids) - 1)]
        worst = max([worst] + [abs(a - b) for a, b in zip(got, wanted)])
    check(worst <= LOGPROB_BOUND, f"{len(PROMPTS)} prompts, log-probabilities differ by at most {worst:.1e}")


tokenizer = AutoTokenizer.from_pretrained(FOLDER)
compare_texts(tokenizer)
if tokenizer.chat_template:
    compare_chats(tokenizer)
compare_logprobs(tokenizer)
sys.exit(failures > 0)
