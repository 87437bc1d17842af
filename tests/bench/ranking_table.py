# SPDX-License-Identifier: Apache-2.0
"""The table of tests/bench/ranking.sh from what its runs left in OUT: ranking_table.py OUT MODEL...

The least bits per byte come first. Numbers are means over seeds, behind ± their standard deviation. A difference from
the first MODEL is of bits per byte over the same documents, each document's bits being their mean over seeds; its 95 %
interval is the bootstrap's over documents. "=" says that the two cannot be told apart: the interval holds 0, or not
every seed has the difference's sign (models of a seed have read the same rows in the same order).
"""
import glob
import json
import os
import random
import re
import statistics
import sys

RESAMPLES = 4000


def load(path):
    with open(path, encoding='utf-8') as file:
        return json.load(file)


class Run:
    """One trained model: its seed, and the row of results of each part."""

    def __init__(self, out, name):
        self.seed = name.rpartition('=')[2]
        self.part, self.result = {}, {}
        for path in glob.glob(glob.escape(os.path.join(out, 'eval', name)) + '-*.json'):
            self.result = load(path)
            for row in self.result['rows']:
                self.part[row['task'].split(' ')[0]] = row  # shards stand there with the length of their windows
        with open(os.path.join(out, 'eval', name + '.txt'), encoding='utf-8') as file:
            self.summary = file.read()
        self.rate = [text.split('=')[1] for text in load(os.path.join(out, 'train', name, 'run.json'))['set']
                     if text.startswith('optim.lr=')][0]

    def metric(self, part, name, kind='metrics'):
        """The entry of a metric, or of a range of positions; None where there is none."""
        return next((m for m in self.part.get(part, {}).get(kind, []) if m['name'] == name), None)


def runs_of(out, model):
    names = sorted(os.path.basename(path)[:-len('.txt')]
                   for path in glob.glob(glob.escape(os.path.join(out, 'eval', model)) + ',seed=*.txt'))
    return [Run(out, name) for name in names]


# ---- numbers of a model's seeds --------------------------------------------------------------------------------------

def spread(values, digits, scale=1.0):
    values = [scale * v for v in values if v is not None]
    if not values:
        return '-'
    text = '%.*f' % (digits, statistics.fmean(values))
    return text if len(values) < 2 else text + ' ± %.*f' % (digits, statistics.stdev(values))


def means(runs, part, name, kind='metrics'):
    return [entry['mean'] for entry in (run.metric(part, name, kind) for run in runs) if entry]


def per_item(metrics):
    """(value, weight) of each item that has one: values are means over seeds."""
    pairs = {}
    for i, weight in enumerate(metrics[0]['weights']):
        values = [m['values'][i] for m in metrics]
        if weight and None not in values:
            pairs[i] = (statistics.fmean(values), weight)
    return pairs


def ratio(pairs):
    return sum(v for v, _ in pairs) / sum(w for _, w in pairs)


def difference(runs, base, part):
    """Of bits per byte, with its interval over documents."""
    own, other = ([run.metric(part, 'bits_per_byte') for run in group] for group in (runs, base))
    if not own or not other or None in own + other:
        return '-'
    mine, theirs = per_item(own), per_item(other)
    pairs = [(mine[i][0] - theirs[i][0], mine[i][1]) for i in mine if i in theirs]
    draw = random.Random(1)
    drawn = sorted(ratio(draw.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES))
    least, most = drawn[int(0.025 * RESAMPLES)], drawn[int(0.975 * RESAMPLES)]
    by_seed = {run.seed: m['mean'] for run, m in zip(base, other)}
    signs = {m['mean'] > by_seed[run.seed] for run, m in zip(runs, own) if run.seed in by_seed}
    apart = (least > 0 or most < 0) and len(signs) == 1
    return '%+.4f (%+.4f .. %+.4f)%s' % (ratio(pairs), least, most, '' if apart else ' =')


# ---- what is not of the seeds ----------------------------------------------------------------------------------------

def state(run):
    """Bytes of a session; keys and values by the token."""
    fixed = re.search(r'^state .*\(([\d,]+) bytes\)', run.summary, re.M)
    growing = re.search(r'^KV +([\d,]+) bytes', run.summary, re.M)
    texts = [fixed.group(1)] if fixed else []
    if growing:
        texts.append(growing.group(1) + ' a token')
    return ' + '.join(texts) or '-'


def rate(out, model, run):
    """That of training, and whether a neighbour in the search might be better."""
    tried = [float(path.rpartition('@')[2].partition(',')[0])
             for path in glob.glob(glob.escape(os.path.join(out, 'search', model)) + '@*')]
    used = float(run.rate)
    edge = len(tried) > 1 and used in (min(tried), max(tried))
    return run.rate + (' (%s tried)' % ('least' if used == min(tried) else 'largest') if edge else '')


def tokens_per_second(out, model):
    """Of training alone on the device: the median step behind the first two."""
    path = os.path.join(out, 'speed', model, 'log.jsonl')
    if not os.path.exists(path):
        return '-'
    with open(path, encoding='utf-8') as file:
        lines = [json.loads(line) for line in file]
    tokens = [b['tokens'] - a['tokens'] for a, b in zip(lines, lines[1:])]
    rates = [t / line['step_seconds'] for t, line in zip(tokens, lines[1:])][1:]
    return '%.0f' % statistics.median(rates) if rates else '-'


# ---- table -----------------------------------------------------------------------------------------------------------

def positions(groups, part):
    """Names of the ranges that every run has, in order."""
    names = {}
    for runs in groups.values():
        for run in runs:
            for entry in run.part.get(part, {}).get('positions', []):
                names[entry['bucket']] = entry['name']
    return [names[bucket] for bucket in sorted(names)]


def columns(out, groups):
    base_name, base = next(iter(groups.items()))
    yield 'parameters', lambda m, r: '%d' % r[0].result['parameters']
    yield 'state, bytes', lambda m, r: state(r[0])
    yield 'learning rate', lambda m, r: rate(out, m, r[0])
    yield 'seeds', lambda m, r: '%d' % len(r)
    for part, what in (('valid', 'bits per byte'), ('elsewhere', 'out of domain')):
        yield what, lambda m, r, p=part: spread(means(r, p, 'bits_per_byte'), 4)
        yield 'less ' + base_name, lambda m, r, p=part: '' if r is base else difference(r, base, p)
    for name in positions(groups, 'valid'):
        yield 'loss at ' + name, lambda m, r, n=name: spread(means(r, 'valid', n, 'positions'), 3)
    for part in ('long-36k', 'long-144k'):
        for name in positions(groups, part)[-3:]:
            yield '%s at %s' % (part, name), lambda m, r, p=part, n=name: spread(means(r, p, n, 'positions'), 3)
    yield 'LAMBADA, nats', lambda m, r: spread([-v for v in means(r, 'lambada_openai', 'logprob')], 3)
    yield 'right, %', lambda m, r: spread(means(r, 'lambada_openai', 'exact'), 2, 100)
    yield 'BLiMP, %', lambda m, r: spread(means(r, 'blimp', 'acc'), 2, 100)
    yield 'tokens/s trained', lambda m, r: tokens_per_second(out, m)


def main(out, models):
    groups = {model: runs_of(out, model) for model in models}
    groups = {model: runs for model, runs in groups.items() if runs}
    if not groups:
        sys.exit('ranking_table.py: %s: no model was scored' % out)
    made = list(columns(out, groups))
    print('| model | ' + ' | '.join(name for name, _ in made) + ' |')
    print('|---' * (len(made) + 1) + '|')
    for model, runs in sorted(groups.items(), key=lambda item: statistics.fmean(
            means(item[1], 'valid', 'bits_per_byte') or [float('inf')])):
        print('| %s | ' % model + ' | '.join(cell(model, runs) for _, cell in made) + ' |')


if __name__ == '__main__':
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2:])
