# SPDX-License-Identifier: Apache-2.0
"""The texts of tests/bench/ranking.sh, from folders of files whose documents a line of only <|endoftext|> separates.

usage: ranking_data.py CORPUS VALID OUT

VALID has held-out documents already. Long ones are taken out of CORPUS by the SHA-256 of their text, before anything is
trained: of the documents of at least 144 KiB the 24 with the least digests, then of those of at least 36 KiB the 60
with the least. OUT gets
  train.txt         all others in the order of their digests, so that every part of it is a fair sample of it
  valid.txt         the files of VALID whose name CORPUS has too
  elsewhere.txt     those whose name it has not: sources without training text
  long-36k.txt      all 84 to their first 36 KiB (in whole paragraphs): beyond 8192 tokens of this ranking's vocabulary
  long-144k.txt     the 24 to their first 144 KiB: beyond 32768 tokens
"""
import hashlib
import os
import sys

SEPARATOR = '\n<|endoftext|>\n'
LONGEST, LONG = (144 << 10, 24), (36 << 10, 60)


def documents(folder):
    """(file, text) in the order of names and places."""
    for name in sorted(os.listdir(folder)):
        with open(os.path.join(folder, name), encoding='utf-8', newline='') as file:
            for text in file.read().removesuffix('\n').split(SEPARATOR):
                yield name, text


def size(text):
    return len(text.encode())


def digest(text):
    return hashlib.sha256(text.encode()).digest()


def beginning(text, most):
    """Whole paragraphs of at most so many bytes, the first in any case."""
    kept, paragraphs = 0, text.split('\n\n')
    for number, paragraph in enumerate(paragraphs):
        kept += size(paragraph) + (2 if number else 0)
        if kept > most and number:
            return '\n\n'.join(paragraphs[:number])
    return text


def write(folder, name, texts):
    with open(os.path.join(folder, name), 'w', encoding='utf-8', newline='') as out:
        out.write(SEPARATOR.join(texts) + '\n')
    print('%-14s %6d documents %12d bytes' % (name, len(texts), sum(map(size, texts))))


def main(corpus, valid, out):
    os.makedirs(out, exist_ok=True)
    texts = sorted((text for _, text in documents(corpus)), key=digest)
    known = set(os.listdir(corpus))
    longest = [text for text in texts if size(text) >= LONGEST[0]][:LONGEST[1]]
    long = [text for text in texts if size(text) >= LONG[0] and text not in longest][:LONG[1]]
    taken = set(longest + long)
    write(out, 'train.txt', [text for text in texts if text not in taken])
    held_out = list(documents(valid))
    write(out, 'valid.txt', [text for name, text in held_out if name in known])
    write(out, 'elsewhere.txt', [text for name, text in held_out if name not in known])
    write(out, 'long-36k.txt', [beginning(text, LONG[0]) for text in longest + long])
    write(out, 'long-144k.txt', [beginning(text, LONGEST[0]) for text in longest])


if __name__ == '__main__':
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
