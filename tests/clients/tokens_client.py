# SPDX-License-Identifier: Apache-2.0
# Ids of a running server's /tokenize against another tokenizer's: 10,000 mixed lines, and a megabyte of one character.
#
#   tokens_client.py http://127.0.0.1:PORT MODEL tokenizers|llama_cpp FILE LINES TEXTS
# FILE is a tokenizer.json for `tokenizers`, a GGUF file for `llama_cpp` (llama-cpp-python). Two fifths of the lines are
# of the files below the folder TEXTS, the rest is made here: digits, runs of white space and of one character, emoji,
# other scripts, code, markup, and mixtures of all that. Prints counts, the first texts whose ids differ, and seconds a
# megabyte of one character on either side; exit status 1 when an id differs.
import http.client
import json
import pathlib
import random
import sys
import time
import urllib.parse

URL, MODEL, PEER, FILE, LINES, TEXTS = *sys.argv[1:5], int(sys.argv[5]), pathlib.Path(sys.argv[6])
LONG = ["a", " ", "\n", "1", "-", "\u00e9", "\u4e2d", "\U0001f600"]
WORDS = ["the", "The", "don't", "I'LL", "we\u2019ve", "na\u00efve", "Stra\u00dfe", "foo_bar", "camelCase", "HTTP2",
         "x=", "->", "::", "!=", "()", "[]", "{", "}", "//", "#", '"', "\\n", "\\", "$", "%", "@", "&amp;", "<br/>",
         "http://a.b/c?d=e&f", "a@b.org", "C:\\x", "<|im_start|>", "<|endoftext|>", "<|im_end", "...", "\u2026",
         "\u2014"]
SCRIPTS = ["\u041f\u0440\u0438\u0432\u0435\u0442", "\u4eca\u65e5\u306f\u3044\u3044\u5929\u6c17", "\u4e2d\u6587",
           "\ud55c\uad6d\uc5b4", "\u0645\u0631\u062d\u0628\u0627", "\u0939\u093f\u0928\u094d\u0926\u0940",
           "\u05e9\u05dc\u05d5\u05dd", "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35", "e\u0301a\u0308", "\u00bd", "\u2167",
           "\u0663\u0664"]
EMOJI = ["\U0001f600", "\U0001f44d\U0001f3fd", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\U0001f1eb\U0001f1f7",
         "\u2764\ufe0f", "\U0001f680", "\u2603"]
SPACES = [" ", "  ", "   ", "\t", "\t\t", "\n", "\n\n", "\r\n", "\u00a0", "\u3000", "\u200b", " \n", "\n "]


def stored_lines(draw, count):
    found = []
    for path in sorted(TEXTS.rglob("*")):
        if path.suffix in (".md", ".c", ".h", ".py", ".sh", ".html") and "build" not in path.parts:
            found += path.read_text(encoding="utf-8", errors="replace").split("\n")
    return draw.sample(found, min(count, len(found)))


def made_line(draw):
    kind = draw.randrange(6)
    if kind == 0:
        number = str(draw.randrange(10 ** draw.randrange(1, 20)))
        return draw.choice(["", "-", "$", "0x"]) + number + draw.choice(["", ".5", "e-7", " %", ",000", "th"])
    if kind == 1:
        return draw.choice(WORDS) + "".join(draw.choice(SPACES) * draw.randrange(1, 30) for _ in range(3)) + "x"
    if kind == 2:
        return draw.choice("ab1 -=_*.\n\t#\u00e9\u4e2d") * draw.randrange(1, 300)
    pieces = {3: EMOJI + SPACES[:2], 4: SCRIPTS + SPACES[:1], 5: WORDS + SCRIPTS + EMOJI + SPACES}[kind]
    return "".join(draw.choice(pieces) for _ in range(draw.randrange(1, 30)))


class Server:
    def __init__(self):
        self.connection = http.client.HTTPConnection(urllib.parse.urlsplit(URL).netloc, timeout=300)

    def encode(self, text):
        body = json.dumps({"model": MODEL, "prompt": text, "add_special_tokens": False})
        self.connection.request("POST", "/tokenize", body, {"Content-Type": "application/json"})
        answer = json.load(self.connection.getresponse())
        return answer["tokens"] if "tokens" in answer else sys.exit(f"FAIL: /tokenize answers {answer}")


def peer():
    if PEER == "tokenizers":
        import tokenizers

        other = tokenizers.Tokenizer.from_file(FILE)
        return f"tokenizers {tokenizers.__version__}", lambda text: other.encode(text, add_special_tokens=False).ids
    import llama_cpp

    other = llama_cpp.Llama(FILE, vocab_only=True, verbose=False)
    return f"llama.cpp of llama-cpp-python {llama_cpp.__version__}", lambda text: other.tokenize(
        text.encode(), add_bos=False, special=True)


def timed(encode, text):
    start = time.perf_counter()
    ids = encode(text)
    return ids, time.perf_counter() - start


def main():
    draw = random.Random(7)
    texts = stored_lines(draw, 2 * LINES // 5)
    texts += [made_line(draw) for _ in range(LINES - len(texts))]
    server, (name, theirs) = Server(), peer()
    tokens = wrong = 0
    for text in texts:
        got, wanted = server.encode(text), theirs(text)
        tokens += len(got)
        wrong += got != wanted
        if got != wanted and wrong <= 5:
            print(f"FAIL: {text[:80]!r}: {got[:16]}, wanted {wanted[:16]}")
    print(f"{MODEL}, {name}: {len(texts)} lines, {tokens} ids, {wrong} lines differ")
    for character in LONG if LINES >= 10000 else LONG[:2]:
        text = character * (1_000_000 // len(character.encode()))
        quarter = timed(server.encode, text[: len(text) // 4])[1]
        (got, here), (wanted, there) = timed(server.encode, text), timed(theirs, text)
        wrong += got != wanted
        print(f"{'FAIL: ' if got != wanted else ''}1 MB of {character!r}: {len(got)} ids, {here:.2f} s served "
              f"({quarter:.2f} s a quarter of it), {there:.2f} s there")
    sys.exit(wrong > 0)


main()
