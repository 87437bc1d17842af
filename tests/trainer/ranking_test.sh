#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# tests/bench/ranking.sh at a size of seconds: what is held out, what is tried, trained, scored and done once, and the
# table, whose differences are held against results that were made up.
# shellcheck source=tests/shell.sh
. "$(dirname "$0")/../shell.sh"
need_built mesa-trainer
need_installed python3
export MESA_BUILD=$build OMP_NUM_THREADS=1
trainer=$build/mesa-trainer bench=$source_dir/tests/bench
cd "$folder" || exit 1

# ---- texts: 30 documents of about 150 KB, 70 of about 40 KB, 200 of about 300 bytes
python3 - <<'END'
import os, random
draw, words = random.Random(3), 'the a river forest king ran saw old under stone and of light never rain'.split()
def text(size):
    out = ''
    while len(out) < size:
        out += ' '.join(draw.choices(words, k=12)) + '.\n\n'
    return out.rstrip()
corpus = [150000] * 30 + [40000] * 70 + [300] * 200
for name, sizes in (('corpus/a', corpus), ('valid/a', [700] * 5), ('valid/b', [700])):
    os.makedirs(os.path.dirname(name), exist_ok=True)
    with open(name + '.txt', 'w') as out:
        out.write('\n<|endoftext|>\n'.join(map(text, sizes)) + '\n')
END
python3 "$bench/ranking_data.py" corpus valid texts >told || fail "ranking_data.py: status $?"
same 'what is held out' 'train.txt 216,valid.txt 5,elsewhere.txt 1,long-36k.txt 84,long-144k.txt 24,' \
    "$(awk '{ printf "%s %s,", $1, $2 }' told)"
python3 - <<'END' || fail 'texts that are held out'
SEPARATOR = '\n<|endoftext|>\n'
read = lambda name: open('texts/%s.txt' % name).read().rstrip('\n').split(SEPARATOR)
train, long, longest = read('train'), read('long-36k'), read('long-144k')
assert not {text[:200] for text in train} & {text[:200] for text in long}, 'a text is on both sides'
assert all(36000 < len(text) <= 36 << 10 for text in long) and all(147000 < len(text) <= 144 << 10 for text in longest)
assert {text[:200] for text in longest} == {text[:200] for text in long[:24]}, 'the longest are among the long'
END

# ---- runs
mkdir data
"$trainer" tokenizer --vocab 300 --out data/tokenizer texts/valid.txt >told 2>&1 || fail "tokenizer: $(cat told)"
mv texts/train.txt texts/whole && head -c 20000 texts/whole >texts/train.txt
for name in train valid elsewhere; do
    "$trainer" pack --tokenizer data/tokenizer --out "data/$name" "texts/$name.txt" >told 2>&1 ||
        fail "pack: $(cat told)"
done
printf '{"ctx": "the old", "target": "king"}\n{"ctx": "a", "target": "river"}\n' >data/words.jsonl
ranking() {
    MODELS="gdn transformer-256" BUDGET=0.001 RATES="0.001 0.002" SEEDS="1 2" PARALLEL=2 SPEED_STEPS=4 TASKS=words \
        EVALS="valid:64 elsewhere:64" SETTINGS="model.vocab_size=300 model.hidden_size=32 model.num_heads=1
        model.head_dim=32 model.intermediate_size=32 data.context=64 train.batch_tokens=256 train.micro_rows=2" \
        "$bench/ranking.sh" data out "$@"
}
ranking >told 2>err || fail "ranking.sh: status $?: $(tail -n 5 told err)"
same 'runs' 'gdn,seed=1 gdn,seed=2 transformer-256,seed=1 transformer-256,seed=2' \
    "$(cd out/train && printf '%s\n' *,seed=* | paste -sd' ')"
same 'steps of the least budget' '20 5' "$(cat out/steps) $(wc -l <out/search/gdn@0.001,seed=1/log.jsonl)"
same 'rates tried, with one beyond the edge' 3 "$(printf '%s\n' out/search/gdn@*,seed=1 | wc -l)"
same 'lines of the table' 4 "$(wc -l <out/ranking.md)"
for words in 'Sweep' 'transformer-256,seed=2' 'elsewhere 64'; do
    grep -q "$words" out/ranking.html || fail "no $words on the page"
done
column() { # MODEL HEAD: the cell
    awk -F' *[|] *' -v model="$1" -v head="$2" '
        NR == 1 { for (i = 1; i <= NF; i++) if ($i == head && !at) at = i }
        $2 == model { print $at }' out/ranking.md
}
for model in gdn transformer-256; do
    wanted=$(awk '/^bits per byte/ && n++ % 2 == 0 { sum += $4; seeds++ } END { printf "%.4f", sum / seeds }' \
        "out/train/$model,seed=1/eval.log" "out/train/$model,seed=2/eval.log")
    found=$(column "$model" 'bits per byte')
    same "$model: bits per byte" "$wanted" "${found%% *}"
    [[ $(column "$model" 'tokens/s trained') =~ ^[0-9]+$ ]] || fail "$model: no rate"
done
[[ $(column transformer-256 'state, bytes') =~ ^[0-9,]+ ]] || fail 'no state'

# Once more, without checkpoints: nothing is done again.
rm -r out/train/*/step-*
cp out/ranking.md before.md
sums() {
    find out/speed out/search out/train out/eval -name '*.json*' ! -name 'sweep.json' | sort | xargs cat | sha256sum
}
before=$(sums)
ranking >told 2>err || fail "again: status $?: $(tail -n 5 told err)"
same 'done again' "$before" "$(sums)"
cmp -s before.md out/ranking.md || fail 'another table'
ranking nothing >told 2>err && fail 'a phase that is none'
grep -q 'no phase nothing' err || fail "a phase that is none: $(cat err)"
MODELS=none "$bench/ranking.sh" data out2 >told 2>err && fail 'a model that is none'
grep -q 'no model none' err || fail "a model that is none: $(cat err)"

# ---- differences: b is 0.1 bits a byte above a on every document, c by seed above and below, d on one document alone
python3 - <<'END'
import json, os
def write(model, seed, bits):
    name = '%s,seed=%d' % (model, seed)
    weights = [10 * (i + 1) for i in range(len(bits))]
    values = [b * w for b, w in zip(bits, weights)]
    for folder in ('made/eval', 'made/train/' + name):
        os.makedirs(folder, exist_ok=True)
    metric = {'name': 'bits_per_byte', 'mean': sum(values) / sum(weights), 'values': values, 'weights': weights}
    with open('made/eval/%s-valid.json' % name, 'w') as out:
        json.dump({'parameters': 7, 'rows': [{'task': 'valid 64', 'metrics': [metric], 'positions': []}]}, out)
    with open('made/eval/%s.txt' % name, 'w') as out:
        out.write('state             1 KiB a session (1,024 bytes)\nKV                512 bytes a token more\n')
    with open('made/train/%s/run.json' % name, 'w') as out:
        json.dump({'set': ['model.x=1', 'optim.lr=0.002']}, out)
base = [1, 2, 1.5, 1.2, 1.9, 1.1]
for seed, shift in ((1, 0), (2, 0.01)):
    write('a', seed, [b + shift for b in base])
    write('b', seed, [b + shift + 0.1 for b in base])
    write('c', seed, [b + shift + (0.3 if seed == 1 else -0.1) for b in base])
    write('d', seed, [b + shift + (0.5 if i == 0 else 0) for i, b in enumerate(base)])
END
python3 "$bench/ranking_table.py" made a b c d >table || fail "ranking_table.py: status $?"
same 'the best first' 'a d' "$(awk -F' *[|] *' 'NR > 2 && NR < 5 { print $2 }' table | paste -sd' ')"
cell() { awk -F' *[|] *' -v model="$1" -v at="$2" '$2 == model { print $at }' table; }
same 'mean and deviation' '1.4526 ± 0.0071' "$(cell a 7)"
same 'state' '1,024 + 512 a token' "$(cell a 4)"
same 'apart' '+0.1000 (+0.1000 .. +0.1000)' "$(cell b 8)"
same 'seeds that differ' '+0.1000 (+0.1000 .. +0.1000) =' "$(cell c 8)"
[[ $(cell d 8) == '+0.0238 (+0.0000 .. '*') =' ]] || fail "one document: $(cell d 8)"
exit $((failures > 0))
