#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the small tokenizers and the reference ids of tests/engine/tokenizer_test.c.

Needs Hugging Face's `tokenizers` (made with 0.23.3): pip install tokenizers. Run: python3 make_tokenizers.py
Every tokenizer here is trained on TEXT below, which was written for this purpose. Output, beside this file:
NAME.tokenizer.json and tokenizer_golden.json, a list of [tokenizer, special, text, ids]; special is false where special
tokens in the text are to be plain text. The same version writes the same files.
"""
import json
import os
import random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

HERE = os.path.dirname(os.path.abspath(__file__))

TEXT = """
The river was low that summer, and the children walked across it without wetting their knees. Old Marta kept the ferry
anyway. "A ferry isn't only for water," she said; "it's for waiting." They'd wait with her, then, and she'd tell them
what she'd seen in 1947, in 1963, in 2004: floods, 12 boats, 350 sheep, one wedding. I'm told we'll never know which
of her stories were true. You've heard the one about the bell? It rang 3.14 times, he'd say, and then it didn't.
def total(values):
    result = 0
    for value in values:
        if value is not None:
            result += value
    return result

{"name": "ferry", "depth": [1, 2, 3], "open": true}
Señor Núñez took a naïve façade for a café; the menu said: crème brûlée — 4 ½ euros, or 456 for all of it.
Straße, Ærø, Łódź, Dvořák. Привет, река была низкая тем летом. नमस्ते दुनिया। สวัสดีชาวโลก مَرْحَبًا بِالعَالَم 川は低かった。 물이 낮았다.
🙂 🦫 👨‍👩‍👧‍👦 🇫🇷🇯🇵 x² + y² = z² … end.


    four spaces,\tone tab,\r\nanother line end.\u00a0\u00a0Two hard spaces.\u3000A wide one.
""" * 4

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r"|\s+(?!\S)|\s+")
O200K = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
         r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
         r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")

STRINGS = [
    "", "a", "a  b", "a   b", "  a", "a  ", "def f():\n    return  x", "\t\ta\t b", "a\r\n\r\nb \r\n", "a\u00a0b\u00a0\u00a0c",
    "a\u3000b", " \n \n  x", "\n\n\n", "   ", "a \u00a0 b", "a\u180eb \u200b c\u0085d",
    "1234567", "3.14", "１２３", "we'LL don't I'm", "'s's", "x²", "a.b!!c", "٣٤٥ Ⅷ ½x", "I'M we'Ve 'ſ 'S",
    "Señor, naïve façade — 456 🙂", "It is 🦫.txt", "👨‍👩‍👧‍👦", "🇫🇷🇯🇵", "नमस्ते", "สวัสดีชาวโลก", "مَرْحَبًا",
    "e\u0301 vs é", "4 ½", "ﬁ ﬃ", "\u1112\u1161\u11ab 한", "a\u0323\u0307 a\u0307\u0323", "Å Å \u212b", "\u0958 \u0344",
    "a\\nb", "a\nb", "\\r\\t", '{"k":[1,22,333]}', "The ferry isn't only for water,", " leading", "trailing ",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "ababababababababababababababababababababa",
    "________________________________________", "=" * 70, " " * 70 + "x", "川は低かった。물이 낮았다.", "\u0000\u0001\u007f",
    "\U0010ffff\ufffd\ufeffx", "ЗДРАВСТВУЙТЕ мир", "HelloWorldFOO barBaz", "http://a.b/c?d=e&f=%20",
]
SPECIAL_STRINGS = [
    "<s>G", "<s> G", "a<sep> b", "a <sep>b", "<s><s>", "<s>", "x</s>", "</s> \n x", "a<sep>", "<s", "<s><sep></s>", "a  <sep>  b",
    "one<mask>two", "one <mask> two", "one  <left>  two", "one  <right>  two", "xword word wordx word", "word", "aword",
    "<s>word</s>", "CAFE\u0301 café", "  \u00a0<left>x<right> \n\u3000y", "<left><right><left>", "ＮＯＲＭ NORM", "ab abc abcd bcd",
    "<right>  <left>", "word_ word- 'word' wordé", "abcdabc", "a<sep>\n<sep> b",
]


def trained(tokenizer, vocab_size, special):
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


def byte_level(*stages, vocab_size=420, normalizer=None, prefix_space=False, regex=False, special=("<s>", "</s>")):
    tokenizer = Tokenizer(models.BPE())
    stages = list(stages) + [pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=regex)]
    tokenizer.pre_tokenizer = stages[0] if len(stages) == 1 else pre_tokenizers.Sequence(stages)
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    return trained(tokenizer, vocab_size, list(special))


def character_level(metaspace):
    """Llama-2 style: ▁ for spaces, bytes for characters outside the vocabulary."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    space = "▁"
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(space, prepend_scheme="first", split=True)
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(space), normalizers.Replace(" ", space)])
        # Trained on words; used without a pre-tokenizer, as such files are.
        tokenizer.pre_tokenizer = pre_tokenizers.Split(space, "merged_with_next")
    alphabet_text = "".join(c for c in TEXT if ord(c) < 0x250)
    trainer = trainers.BpeTrainer(vocab_size=260, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(alphabet_text.split("\n"), trainer)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse(),
                                           decoders.Strip(" ", 1, 0)])
    file = json.loads(tokenizer.to_str())
    old = sorted(file["model"]["vocab"].items(), key=lambda item: item[1])
    names = [name for name, _ in old[:3]] + ["<0x%02X>" % byte for byte in range(256)] + [name for name, _ in old[3:]]
    file["model"]["vocab"] = {name: i for i, name in enumerate(names)}
    if not metaspace:
        file["pre_tokenizer"] = None
    return Tokenizer.from_str(json.dumps(file))


def odd_merges():
    """Tokens of white space, merges as pairs, characters instead of bytes."""
    vocab = {}
    for name in ["\n", "\u00a0", "Ġ", " ", "a", "b", "\n\n", "\u00a0\u00a0", "ĠĠ", "  ", "a b", " b", "\n\n\n\n"]:
        vocab[name] = len(vocab)
    for byte in range(256):
        vocab["<0x%02X>" % byte] = len(vocab)
    merges = [("\n", "\n"), ("\u00a0", "\u00a0"), ("Ġ", "Ġ"), (" ", " "), (" ", "b"), ("a", " b"), ("\n\n", "\n\n")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def with_added(normalizer):
    tokenizer = byte_level(pre_tokenizers.Split(Regex(GPT2), "isolated"), normalizer=normalizer)
    tokenizer.add_special_tokens([AddedToken("<sep>", special=True, normalized=False),
                                  AddedToken("<mask>", special=True, lstrip=True, normalized=False),
                                  AddedToken("<left>", special=True, lstrip=True, normalized=False),
                                  AddedToken("<right>", special=True, rstrip=True, normalized=False)])
    tokenizer.add_tokens([AddedToken("word", single_word=True), AddedToken("CAFE\u0301", normalized=True),
                          AddedToken("ＮＯＲＭ", normalized=True), AddedToken("abc"), AddedToken("abcd", normalized=False),
                          AddedToken("bcd")])
    return tokenizer


def make():
    sequence, split = normalizers.Sequence, pre_tokenizers.Split
    made = {
        "gpt2": byte_level(regex=True),
        "prefix_space": byte_level(regex=True, prefix_space=True),
        "llama3": byte_level(split(Regex(LLAMA3), "isolated")),
        "o200k": byte_level(split(Regex(O200K), "removed", invert=True)),
        "digits": byte_level(pre_tokenizers.Digits(individual_digits=True), regex=True),
        "digit_runs": byte_level(pre_tokenizers.Digits(), pre_tokenizers.Punctuation(), regex=True),
        "behaviors": byte_level(split(" ", "merged_with_next"), split(Regex(r"[a-e]+"), "merged_with_previous"),
                                split(Regex(r"\d"), "contiguous"), split(Regex(r"\w"), "contiguous", invert=True)),
        "nfc": byte_level(regex=True, normalizer=normalizers.NFC()),
        "nfkc": byte_level(regex=True, normalizer=normalizers.NFKC()),
        "nfd": byte_level(regex=True, normalizer=sequence([normalizers.NFD(), normalizers.Replace("\r\n", "\n")])),
        "nfkd": byte_level(regex=True, normalizer=normalizers.NFKD()),
        "fallback": character_level(False),
        "metaspace": character_level(True),
        "odd_merges": odd_merges(),
        "added": with_added(None),
        "added_nfkc": with_added(normalizers.NFKC()),
    }
    ignoring = json.loads(made["llama3"].to_str())
    ignoring["model"]["ignore_merges"] = True
    ignoring["model"]["merges"] = ignoring["model"]["merges"][:40]
    made["ignore_merges"] = Tokenizer.from_str(json.dumps(ignoring))
    return made


def random_strings(count):
    rng = random.Random(7)
    alphabet = list("aab  \n\t'Tts1239.,!é") + ["the", " and", "\u0301", "\u0323", "🙂", "न", "स्", "\u00a0", "\r\n", "ｶ", "ﬁ", "각"]
    return ["".join(rng.choice(alphabet) for _ in range(rng.randrange(1, 60))) for _ in range(count)]


def write(path, text):
    with open(os.path.join(HERE, path), "w", encoding="utf-8", newline="\n") as file:
        file.write(text + "\n")


def main():
    golden = []
    random_texts = random_strings(30)
    for name, tokenizer in make().items():
        write(name + ".tokenizer.json", json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False, separators=(",", ":")))
        for text in STRINGS + SPECIAL_STRINGS + random_texts:
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            golden.append([name, True, text, ids])
            tokenizer.encode_special_tokens = True
            plain = tokenizer.encode(text, add_special_tokens=False).ids
            tokenizer.encode_special_tokens = False
            if plain != ids:
                golden.append([name, False, text, plain])
    rows = [json.dumps(row, ensure_ascii=True, separators=(",", ":")) for row in golden]
    write("tokenizer_golden.json", "[\n" + ",\n".join(rows) + "\n]")


if __name__ == "__main__":
    main()
