# SPDX-License-Identifier: Apache-2.0
# SmolLM2-135M-Instruct served here against llama.cpp on the GGUF file that it came from, by llama-cpp-python.
#
#   llama_cpp_client.py http://127.0.0.1:PORT FILE.gguf FOLDER
# The server has the file's values as the model `float` and its blocks as `blocks`. llama.cpp requantises the file to
# F32 into FOLDER; keys and values are float32 and there is no flash attention. Twenty prompts:
# * ids: /tokenize gives those of llama.cpp
# * float against F32: log-probabilities of the prompt and of 64 greedy tokens; greedy texts are equal up to the first
#   place where the two likeliest tokens are nearer than the bound
# * the file as it is: mean |difference| of log-probabilities over the prompts and F32's greedy tokens, three ways:
#   blocks and llama.cpp from each other, and each from F32, which tells who rounds how much
# Prints a table and exits with status 1 when a bound is missed.
import ctypes
import json
import math
import os
import sys
import urllib.request

import llama_cpp
import numpy as np

URL, FILE, FOLDER = sys.argv[1:4]
GENERATED = 64
LOGPROB_BOUND = 1e-3  # of float against F32, and the gap at which greedy texts may part
BLOCKS_BOUND = 0.03  # mean |difference| of the file as it is


def chat(*messages):
    turns = (f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in messages)
    return "".join(turns) + "<|im_start|>assistant\n"


PROMPTS = {
    "fable": "Once upon a time, in a small village between the mountains and the sea, there lived an old clockmaker who "
    "had never been late in his life. One winter morning he woke up and found that every clock in the house had stopped",
    "encyclopaedia": "The water cycle describes how water evaporates from the surface of the earth, rises into the "
    "atmosphere, cools and condenses into clouds, and falls again to the surface as precipitation. The water falling on "
    "land collects in rivers and lakes, soil, and porous layers of rock, and much of it flows back into the oceans",
    "letter": "Dear Mrs Harrington,\n\nThank you for your letter of 14 March. I am sorry to hear that the delivery did not "
    "arrive in the condition that you expected. We have looked into the matter and would like to offer you",
    "dialogue": '"I don\'t think you understand," said Mary, putting down her cup. "It isn\'t about the money."\n"Then what '
    'is it about?"\n"You\'ve never asked me that before."\nHe looked out of the window for a long time before he answered.',
    "python": "import os\n\n\ndef find_files(folder, suffix):\n    \"\"\"Returns the paths of all files below folder that end "
    "with suffix, sorted.\"\"\"\n    found = []\n    for root, _, names in os.walk(folder):\n        for name in names:\n",
    "c": "#include <stdio.h>\n#include <stdlib.h>\n\nstruct node {\n    int value;\n    struct node *next;\n};\n\n/* Reverses a "
    "singly linked list in place. */\nstruct node *reverse(struct node *head) {\n    struct node *previous = NULL;\n",
    "sql": "CREATE TABLE orders (id INTEGER PRIMARY KEY, customer_id INTEGER NOT NULL, total NUMERIC(10, 2), created_at "
    "TIMESTAMP);\n\n-- total revenue of each customer in 2023, highest first\nSELECT",
    "html": "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n  <meta charset=\"utf-8\">\n  <title>Contact</title>\n</head>\n<body>\n"
    "  <h1>Contact us</h1>\n  <form action=\"/send\" method=\"post\">\n",
    "json": '{"users": [{"id": 1, "name": "Ada", "roles": ["admin", "editor"]}, {"id": 2, "name": "Grace", "roles": '
    '["viewer"]}, {"id": 3, "name": "Alan",',
    "sums": "12 + 7 = 19\n45 + 38 = 83\n102 - 57 = 45\n9 * 8 = 72\n144 / 12 = 12\n250 + 375 = 625\n81 - 46 = 35\n13 * 11 =",
    "digits": "3.14159265358979323846264338327950288419716939937510 2.71828182845904523536028747135266249775724709369995 "
    "1.41421356237309504880168872420969807856967187537694",
    "table": "| Year | Population | Growth |\n| --- | --- | --- |\n| 1990 | 1,204,000 | 1.2 % |\n| 2000 | 1,371,500 | 1.3 % |\n"
    "| 2010 | 1,498,250 | 0.9 % |\n|",
    "french": "La Révolution française est une période de bouleversements sociaux et politiques de grande envergure en France "
    "et en Europe. Elle commence en 1789 avec l'ouverture des États généraux",
    "german": "Der Rhein entspringt in den Schweizer Alpen, fließt durch den Bodensee und mündet nach rund 1230 Kilometern in "
    "die Nordsee. An seinen Ufern liegen zahlreiche Städte, darunter Köln, Düsseldorf",
    "spanish": "En un lugar de la Mancha, de cuyo nombre no quiero acordarme, no ha mucho tiempo que vivía un hidalgo de los "
    "de lanza en astillero, adarga antigua, rocín flaco y galgo corredor.",
    "scripts": "Привет, как дела? 今日はいい天気ですね。 안녕하세요, 만나서 반갑습니다. مرحبا بالعالم 🌍🚀",
    "chat": chat(("system", "You are a helpful AI assistant named SmolLM, trained by Hugging Face"),
                 ("user", "What is the capital of France, and which river runs through it?")),
    "chat turns": chat(("user", "Give me a name for a black cat."), ("assistant", "How about Midnight?"),
                       ("user", "I like it. And one for a white dog?")),
    "chat code": chat(("system", "You write short answers."), ("user", "Write a Python function that tells whether a "
                                                                        "number is prime, with a docstring.")),
    "chat rewrite": chat(("system", "You are a careful editor."), ("user", "Rewrite this in a formal tone: hey, the "
                         "meeting got moved to friday, cant make it before 3, can u tell the others? thx!")),
}


def post(path, body):
    request = urllib.request.Request(URL + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)


def ours(model, ids, tokens):
    """Log-probabilities of ids behind the first and of `tokens` greedy tokens behind them, and their ids."""
    body = {"model": model, "prompt": ids, "max_tokens": tokens, "temperature": 0, "echo": True, "logprobs": 1,
            "ignore_eos": True, "return_token_ids": True}
    choice = post("/v1/completions", body)["choices"][0]
    return np.array(choice["logprobs"]["token_logprobs"][1:]), choice["token_ids"]


class Peer:
    def __init__(self, path):
        options = {"type_k": 0, "type_v": 0, "flash_attn": False}  # 0: F32
        options |= {"n_threads": 1, "n_threads_batch": 1}  # two would wait for each other on a machine that is busy
        self.model = llama_cpp.Llama(path, n_ctx=512, n_batch=512, logits_all=True, verbose=False, **options)

    def tokenize(self, text):
        return self.model.tokenize(text.encode(), add_bos=False, special=True)

    def distributions(self, begin, end):
        logits = self.model.scores[begin:end].astype(np.float64)
        top = logits.max(-1, keepdims=True)
        return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))

    def score(self, ids):
        """Log-probabilities of ids behind the first."""
        self.model.reset()
        self.model.eval(ids)
        return self.distributions(0, len(ids) - 1)[np.arange(len(ids) - 1), ids[1:]]

    def greedy(self, ids, tokens):
        """As ours, one token at a time, and by how much each greedy token is likelier than the second."""
        logprobs, made, gaps = self.score(ids).tolist(), [], []
        for _ in range(tokens):
            here = self.distributions(self.model.n_tokens - 1, self.model.n_tokens)[0]
            here[self.model.token_eos()] = -math.inf  # ours goes on by ignore_eos
            second, first = np.argsort(here)[-2:]
            logprobs.append(here[first])
            gaps.append(here[first] - here[second])
            made.append(int(first))
            self.model.eval(made[-1:])
        return np.array(logprobs), made, gaps


def requantise(path):
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype, options.allow_requantize, options.nthread = 0, True, 2  # 0: all F32
    if llama_cpp.llama_model_quantize(FILE.encode(), path.encode(), ctypes.byref(options)) != 0:
        sys.exit("llama.cpp does not requantise the file")


@llama_cpp.llama_log_callback
def silent(*_):
    pass


class Row:
    """What one prompt gives."""

    def __init__(self, text, exact):
        self.ids = exact.tokenize(text)
        self.wanted, self.greedy, gaps = exact.greedy(self.ids, GENERATED)
        got, made = ours("float", self.ids, GENERATED)
        self.equal = next((i for i in range(GENERATED) if made[i] != self.greedy[i]), GENERATED)
        known = len(self.ids) - 1 + self.equal  # behind it the texts are others
        apart = np.abs(got - self.wanted)
        self.prompt = apart[: len(self.ids) - 1].max()
        self.generated = apart[len(self.ids) - 1 : known].max(initial=0)
        self.gap = gaps[self.equal] if self.equal < GENERATED else math.inf
        tokenize = {"model": "float", "prompt": text, "add_special_tokens": False}
        self.same_ids = post("/tokenize", tokenize)["tokens"] == self.ids

    def passes(self):
        parted = self.equal < GENERATED and self.gap >= LOGPROB_BOUND
        return self.same_ids and max(self.prompt, self.generated) <= LOGPROB_BOUND and not parted

    def measure_stored(self, stored):
        """|Difference| token by token: blocks from llama.cpp, blocks from F32, llama.cpp from F32."""
        ids = self.ids + self.greedy
        here, there = ours("blocks", ids, 0)[0], stored.score(ids)
        self.apart = [np.abs(a - b) for a, b in ((here, there), (here, self.wanted), (there, self.wanted))]


def main():
    llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
    path = os.path.join(FOLDER, "f32.gguf")
    requantise(path)
    exact, stored = Peer(path), Peer(FILE)
    print("prompt         tokens | F32: prompt  greedy  equal | as stored: from llama.cpp, from F32; llama.cpp from F32")
    rows = []
    for name, text in PROMPTS.items():
        row = Row(text, exact)
        row.measure_stored(stored)
        rows.append(row)
        equal = f"{row.equal}" if row.equal == GENERATED else f"{row.equal} (gap {row.gap:.1e})"
        print(f"{name:14} {len(row.ids):6} | {row.prompt:11.1e} {row.generated:7.1e}  {equal:5} |",
              *(f"{apart.mean():.4f}" for apart in row.apart), "" if row.passes() else "FAIL", flush=True)
    here, ours_rounds, theirs_rounds = (np.concatenate([row.apart[i] for row in rows]) for i in range(3))
    print(f"{len(rows)} prompts: F32 differs by at most {max(max(r.prompt, r.generated) for r in rows):.1e}")
    print(f"{len(here)} tokens as stored, mean |difference|: {here.mean():.4f} from llama.cpp, {ours_rounds.mean():.4f} "
          f"from F32; llama.cpp from F32 {theirs_rounds.mean():.4f}")
    passed = here.mean() <= BLOCKS_BOUND or ours_rounds.mean() < BLOCKS_BOUND < theirs_rounds.mean()
    if not passed:
        print("FAIL: blocks")
    sys.exit(not (passed and all(row.passes() for row in rows)))


main()
