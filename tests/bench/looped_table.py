# SPDX-License-Identifier: Apache-2.0
"""The tables of tests/bench/looped.sh from what its runs left in OUT: looped_table.py OUT TASK MODEL...

Every model and seed, with its curve. Of texts besides: each shape N x R against N x 1 (equal parameters) and against
N R x 1 (equal work), in bits per byte over the same documents with the intervals of ranking_table.py; and the tables
of exits of the gates, beside what models say that were trained with so many loops.
"""
import glob
import json
import os
import re
import sys

import ranking_table as ranking

MOST_POINTS = 16  # of a curve in a cell


def shape_of(model):
    """(blocks, loops)"""
    return tuple(int(n) for n in model.rpartition('-')[2].split('x'))


def sibling(model, blocks, loops):
    return '%s-%dx%d' % (model.rpartition('-')[0], blocks, loops)


class Trained:
    """A run of OUT/train: what its log and its configuration say."""

    def __init__(self, folder):
        with open(os.path.join(folder, 'log.jsonl'), encoding='utf-8') as file:
            self.lines = [json.loads(line) for line in file]
        with open(os.path.join(folder, 'output.txt'), encoding='utf-8') as file:
            self.parameters = re.search(r'^(\d+) parameters', file.read(), re.M).group(1)
        result = ranking.load(os.path.join(folder, 'run.json'))
        self.done = result['end'] == 'done'
        self.rate = [text.split('=')[1] for text in result['set'] if text.startswith('optim.lr=')][0]
        self.seed = folder.rpartition('=')[2]
        self.scored = [line for line in self.lines if 'valid_loss' in line]
        log = os.path.join(folder, 'eval.log')
        self.parts = []
        if os.path.exists(log):
            with open(log, encoding='utf-8') as file:
                self.parts = re.findall(r'^right +([\d.]+) %', file.read(), re.M)

    def last(self, key):
        return self.scored[-1][key] if self.scored else None


def trained(out, model):
    folders = sorted(glob.glob(glob.escape(os.path.join(out, 'train', model)) + ',seed=*'))
    logs = [os.path.join(folder, 'log.jsonl') for folder in folders]
    return [Trained(os.path.dirname(log)) for log in logs if os.path.exists(log) and os.path.getsize(log)]


def print_table(head, rows):
    print('| ' + ' | '.join(head) + ' |')
    print('|---' * len(head) + '|')
    for row in rows:
        print('| ' + ' | '.join(row) + ' |')
    print()


def percent(value):
    return '-' if value is None else '%.1f' % (100 * value)


def of_all_runs(out, task, models):
    parts = any(run.parts for model in models for run in trained(out, model)) and task == 'hop'
    head = ['model', 'parameters', 'blocks a token', 'learning rate', 'seed', 'steps', 'seconds']
    head += ['loss', 'training'] if task == 'text' else ['right, %, on the way', 'at the end']
    head += ['part by part, %'] if parts else []
    for model in models:
        blocks, loops = shape_of(model)
        for run in trained(out, model):
            last = run.lines[-1]
            row = [model, run.parameters, str(blocks * loops), ranking.rate(out, model, run), run.seed,
                   '%d%s' % (last['step'], '' if run.done else ', cut'), '%.0f' % last['seconds']]
            if task == 'text':
                recent = [line['loss'] for line in run.lines[-50:]]
                row += ['%.4f' % run.last('valid_loss') if run.scored else '-', '%.4f' % (sum(recent) / len(recent))]
            else:
                before = run.scored[:-1]
                shown = before[::max(1, -(-len(before) // MOST_POINTS))]
                row += [' '.join(percent(line['valid_accuracy']) for line in shown),
                        percent(run.last('valid_accuracy'))]
            yield head, row + ([', '.join(run.parts)] if parts else [])


def of_shapes(out, models):
    """Texts: equal parameters, equal work."""
    groups = {model: ranking.runs_of(out, model) for model in models}
    for model, runs in groups.items():
        blocks, loops = shape_of(model)
        if not runs:
            continue
        row = [model, runs[0].result['parameters'], str(blocks * loops), len(runs),
               ranking.spread(ranking.means(runs, 'valid', 'bits_per_byte'), 4)]
        for other in (sibling(model, blocks, 1), sibling(model, blocks * loops, 1)):
            row.append('' if loops == 1 or not groups.get(other) else ranking.difference(runs, groups[other], 'valid'))
        yield [str(cell) for cell in row]


def trained_loss(out, model):
    """On the windows of the tables of exits; None where it was not read."""
    path = os.path.join(out, 'exits', 'trained-%s.md' % model)
    if not os.path.exists(path):
        return None
    with open(path, encoding='utf-8') as file:
        return re.search(r'^loss +([\d.]+)', file.read(), re.M).group(1)


def of_gates(out):
    for path in sorted(glob.glob(os.path.join(glob.escape(out), 'exits', 'stage*.md'))):
        stage, _, model = os.path.basename(path)[:-len('.md')].partition('-')
        blocks, loops = shape_of(model)
        losses = [(r, trained_loss(out, sibling(model, blocks, r))) for r in range(1, loops + 1)]
        print('Gate of %s, %s. Models that were trained with so many loops, on the same windows: %s.\n' % (
            model, stage.replace('stage', 'stage '), '; '.join('%dx%d %s' % (blocks, r, l) for r, l in losses if l)))
        with open(path, encoding='utf-8') as file: # what a gate is held against stands in its own row too
            print(''.join(line for line in file if re.match(r'[|](?! (matched|between) )', line)))


def main(out, task, models):
    rows = list(of_all_runs(out, task, models))
    if not rows:
        sys.exit('looped_table.py: %s: no model was trained' % out)
    print_table(rows[0][0], [row for _, row in rows])
    if task == 'text':
        print_table(['model', 'parameters', 'blocks a token', 'seeds', 'bits per byte', 'less N x 1, equal parameters',
                     'less N R x 1, equal work'], of_shapes(out, models))
        of_gates(out)


if __name__ == '__main__':
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
