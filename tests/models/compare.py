# SPDX-License-Identifier: Apache-2.0
"""Variations of every model type against the reference: logits, loss, gradients, keys of configs.

usage: compare.py TRAINER SHARED [--all | --random COUNT SEED | NAME...] [--keep FOLDER]
TRAINER is the program mesa-trainer, SHARED the folder that holds golden/. Without --all a selection runs that has every
model type. For each case a folder as the golden ones is written (config.json, model.safetensors, expected.json,
expected.safetensors) and run: logits in chunks and step by step, loss, and of every tensor's gradient its product with
itself and with a random direction, which are slopes of the reference's loss (central differences in float64).
Exit status: 0 all agree, 1 not.
"""
import json
import os
import subprocess
import sys
import tempfile

import numpy as np

import cases
import keys
import random_cases
import reference
import tensors

# As the golden models' README has them; xLSTM's gradients carry more rounding than others'.
LOGITS, LONG_LOGITS, LOSS, GRADIENT, LONG_GRADIENT, SMALL, XLSTM_MARGIN = 1e-5, 3e-5, 1e-5, 1e-4, 1e-3, 1e-3, 3
# Rounding alone gives a gradient of float32 about a thousandth of this norm.
NOISE = 1e-3
# An entry's error is estimated by one random direction: sqrt(entries) times its error, far from sure of itself.
RANDOM_MARGIN = 8
# The quick selection: the golden models have the usual forms already.
QUICK = ['mesa: 3 heads of 24', 'mesa: 1 head of 40, gate, bound 0.1', 'mesa: hybrid, list of softmax layers',
         'gdn: value groups', 'gdn: no gate', 'gdn: short queries and keys', 'delta: elu, sums',
         'delta: gate, expanded',
         'delta: no beta, negative eigenvalues', 'gla: convolution, shared keys', 'gla: norm without weight',
         'kda: value groups, negative eigenvalues', 'kda: bounded', 'retnet: shared keys, map',
         'linear: hedgehog, tied, shared keys', 'linear: elu, one key head, normaliser', 'linear: dpfp',
         'transformer: qk norm, biases, window', 'llama: llama3 scaling', 'llama: 3 heads, biases',
         'mamba2: keys of the other dialect', 'mamba2: norm before gate', 'mamba2: skip a channel, limits, tied',
         'xlstm: tight caps', 'xlstm: other names of projections', 'griffin: other widths, biases',
         'recurrence: scalar, input gate', 'named layers']


class Failed(Exception):
    pass


def run(trainer, *arguments):
    done = subprocess.run([trainer, *arguments], capture_output=True, text=True)
    return done.returncode, done.stderr


def ids_of(options, vocabulary, seed):
    rng = np.random.default_rng(seed)
    count = options.get('tokens', 75)
    ids = rng.integers(3, vocabulary, count)
    ids[count // 2:count // 2 + count // 4] = ids[count // 8:count // 8 + count // 4]
    ids[count // 3:count // 3 + options.get('equal', 0)] = ids[0]
    return [int(i) for i in ids]


class Case:
    """A variation written to a folder, and what the reference says about it."""

    def __init__(self, ref, folder, name, config, options):
        self.ref, self.folder, self.name, self.options = ref, folder, name, options
        self.config, seed = config, sum(name.encode())
        self.device = ('cpu', 'cpu:16', 'cpu:32')[seed % 3]     # chunks of 64, 16 and 32
        self.weights = tensors.random_weights(config, seed, options.get('long', False))
        for part, factor in options.get('scale', ()):
            for name in [n for n in self.weights if part in n]:
                self.weights[name] = tensors.bf16(factor * tensors.widen(self.weights[name]))
        self.P = {n: tensors.widen(w) for n, w in self.weights.items()}
        self.ids = ids_of(options, config['vocab_size'], seed)
        self.split = options.get('split', len(self.ids) - 9)
        self.prompt = self.ids[:self.split]
        layers = [n for n, _ in reference.named_layers(config)] if config.get('layer_types') else [config['model_type']]
        self.mesa = 'mesa_net' in layers
        self.write()

    def forward(self, exact):
        return self.ref.forward(self.P, self.config, self.ids, exact)

    def loss(self):
        """Of the prompt alone, as the gradients of the golden folders."""
        return self.ref.ref.loss(self.ref.forward(self.P, self.config, self.prompt, True), self.prompt)

    def write(self):
        os.makedirs(self.folder, exist_ok=True)
        kept = self.spelled(self.weights)
        with open(os.path.join(self.folder, 'config.json'), 'w') as f:
            json.dump(self.options.get('file', self.config), f)
        tensors.write(os.path.join(self.folder, 'model.safetensors'), kept)
        self.logits, self.exact = self.forward(False), self.forward(True) if self.mesa else None
        self.expected = expected = {'logits': self.logits.astype('<f4')}
        told = dict(name=self.name + ('_long' if self.options.get('long') else ''), prompt_tokens=self.prompt,
                    decode_tokens=self.ids[self.split:], notes='',
                    loss_mean_ce_over_prompt=self.ref.ref.loss(self.logits, self.prompt))
        if self.mesa:
            expected['logits_exact_solve'] = self.exact.astype('<f4')
            told['loss_exact_solve'] = self.ref.ref.loss(self.exact, self.prompt)
        tensors.write(os.path.join(self.folder, 'expected.safetensors'), expected)
        with open(os.path.join(self.folder, 'expected.json'), 'w') as f:
            json.dump(told, f)

    def spelled(self, values):
        """The values under the names that the case's file has, and as rows of larger tensors."""
        if 'only' in self.options:
            values = {n.replace('feature_map_q', self.options['only']): v for n, v in values.items()
                      if 'feature_map_k' not in n}
        if 'spelling' in self.options:
            values = tensors.respelled(values, self.options['spelling'])
        for ours, theirs in self.options.get('names', ()):
            values = {n.replace(ours, theirs): v for n, v in values.items()}
        return values

    def add_gradients(self, gradients):
        """The folder becomes one as the golden ones: gradients by the names of model.safetensors."""
        kind = 'grad_exact.' if self.mesa else 'grad.'
        values = self.spelled({n: g.astype('<f4') for n, g in gradients.items()})
        self.expected.update({kind + n: g for n, g in values.items()})
        tensors.write(os.path.join(self.folder, 'expected.safetensors'), self.expected)

    def slope(self, name, direction, step):
        """d loss / d step along direction, of a tied feature map under both of its names."""
        names = [n for n in (name, name.replace('map_q', 'map_k')) if n in self.P] \
            if self.config.get('tie_feature_map_qk') else [name]
        kept, ends = [self.P[n] for n in names], []
        for sign in (1, -1):
            for n, w in zip(names, kept):
                self.P[n] = w + sign * step * direction
            ends.append(self.loss())
        for n, w in zip(names, kept):
            self.P[n] = w
        return (ends[0] - ends[1]) / (2 * step)


def relative(mine, expected):
    return float(np.linalg.norm(mine - expected) / np.linalg.norm(expected))


class Judge:
    def __init__(self, case):
        self.case, self.worst, self.faults = case, {}, []

    def __call__(self, what, kind, error, tolerance):
        self.worst[kind] = max(self.worst.get(kind, 0.0), error / tolerance)
        if not error <= tolerance:
            self.faults.append(f'{what}: {error:.2e} ({tolerance:.0e})')


def compare_logits(case, trainer, judge, mode, expected):
    tolerance = LONG_LOGITS if case.options.get('long') and case.mesa else LOGITS
    for form, split in (('chunks', len(case.ids)), ('steps', case.split)):
        out = os.path.join(case.folder, 'out.safetensors')
        steps = case.config.get('max_cg_step_training', 30)
        code, error = run(trainer, 'logits', case.folder, '--tokens', ','.join(map(str, case.ids)), '--out', out,
                          '--split', str(split), '--device', case.device, '--cg-mode', mode, '--cg-steps', str(steps))
        if code != 0:
            raise Failed(error.strip())
        mine = case.ref.ref.read_safetensors(out)['logits']
        judge(f'logits, {mode}, {form}', 'logits', relative(mine, expected), tolerance)


def compare_gradients(case, trainer, judge):
    out = os.path.join(case.folder, 'out.safetensors')
    code, error = run(trainer, 'logits', case.folder, '--tokens', ','.join(map(str, case.prompt)), '--out', out,
                      '--grads', '--device', case.device, '--cg-mode', 'exact')
    if code != 0:
        raise Failed(error.strip())
    G = case.ref.ref.read_safetensors(out)
    judge('loss', 'loss', abs(float(G['loss'][0]) - case.loss()), LOSS)
    rng = np.random.default_rng(5)
    named = [n for n in case.P if not (case.config.get('tie_feature_map_qk') and 'feature_map_k' in n)]
    gradients = {}
    for name in named:
        own = 'grad.' + name.replace(*case.options.get('gradient', ('', '')))
        if own in G:
            gradients[name] = G[own]
            compare_gradient(case, judge, name, G[own], rng)
        else:
            judge.faults.append(f'no gradient of {name}')
    case.add_gradients(gradients)


def compare_by_check(case, trainer):
    """The folder in the trainer's own command, whose gradients were confirmed before."""
    done = subprocess.run([trainer, 'check', case.folder], capture_output=True, text=True)
    if done.returncode != 0:
        outside = [line for line in done.stdout.splitlines() if 'OUTSIDE' in line]
        raise Failed(f'mesa-trainer check: {done.stderr.strip()} {outside[:3]}')


def compare_gradient(case, judge, name, g, rng):
    norm, r = float(np.linalg.norm(g)), rng.standard_normal(g.shape)
    r /= np.linalg.norm(r)
    scale = max(norm, NOISE)
    tolerance = LONG_GRADIENT if case.options.get('long') or norm < SMALL else GRADIENT
    tolerance *= XLSTM_MARGIN if case.config['model_type'] == 'xlstm' else 1
    for along, u, slope, width in (('itself', g / scale, norm * norm / scale, 1.0),
                                   ('random', r, float(np.sum(g * r)), RANDOM_MARGIN / np.sqrt(g.size))):
        error = min_error(case, name, u, slope, tolerance * width * scale) / scale
        judge(f'gradient of {name} along {along}, norm {norm:.1e}', 'gradient', error, tolerance * width)


def min_error(case, name, u, slope, enough):
    """Of a wide step and, where a kink may lie inside it, a narrow one."""
    error = np.inf
    for step in (1e-5, 3e-7):
        error = min(error, abs(case.slope(name, u, step) - slope))
        if error <= enough:
            break
    return error


def check_case(ref, trainer, folder, name, config, options):
    case = Case(ref, folder, name, config, options)
    judge = Judge(case)
    try:
        compare_logits(case, trainer, judge, 'fixed' if case.mesa else 'exact', case.logits)
        if case.mesa:
            compare_logits(case, trainer, judge, 'exact', case.exact)
        compare_gradients(case, trainer, judge)
        compare_by_check(case, trainer)
    except Failed as failed:
        judge.faults.append(str(failed))
    shares = ' '.join(f'{k} {v:.2f}' for k, v in judge.worst.items())
    print(f'{name:52s} {shares}', flush=True)
    for fault in judge.faults:
        print(f'    FAIL {fault}', flush=True)
    if judge.faults:
        print(f'    {json.dumps(config)} {options}', flush=True)
    return not judge.faults


def check_refused(trainer, folder, config, key):
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, 'config.json'), 'w') as f:
        json.dump(config, f)
    tensors.write(os.path.join(folder, 'model.safetensors'), {'x': np.zeros(1, '<f4')})
    code, error = run(trainer, 'logits', folder, '--tokens', '1,2', '--out', os.path.join(folder, 'out'))
    good = code == 2 and key in error.replace(folder, '')
    if not good:
        print(f'    FAIL {config["model_type"]} is not refused for {key}: {error.strip()}')
    return good


def choose(arguments, chosen):
    if '--random' in arguments:
        return random_cases.draw_cases(int(chosen[0]), int(chosen[1]))
    names = chosen or QUICK
    return [case for case in cases.CASES if '--all' in arguments or case[0] in names]


def main(arguments):
    trainer, shared, *rest = arguments
    ref = reference.open_reference(shared)
    if ref is None:
        print(f'SKIP: {shared}/golden/ref_models.py is absent')
        return 77
    keep = rest[rest.index('--keep') + 1] if '--keep' in rest else None
    chosen = [a for a in rest if not a.startswith('--') and a != keep]
    with tempfile.TemporaryDirectory() as temporary:
        root, good = keep or temporary, []
        for i, (name, config, options) in enumerate(choose(rest, chosen)):
            good.append(check_case(ref, trainer, os.path.join(root, f'{i:03d}'), name, config, options))
        if not chosen:
            for i, (config, key) in enumerate(cases.REFUSED):
                good.append(check_refused(trainer, os.path.join(root, f'refused{i}'), config, key))
            good += keys.audit(trainer, os.path.join(root, 'keys'), 1 if '--all' in rest else 7)
    print(f'{sum(good)} of {len(good)} agree')
    return 0 if good and all(good) else 1


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
