# SPDX-License-Identifier: Apache-2.0
"""How far a state and its logits are from double precision after 1,000, 10,000 and 100,000 tokens.

usage: drift.py make SHARED FOLDER              two models (Mesa, gated delta rule, both with a long memory), ids, what float64 gives
       drift.py compare SHARED FOLDER NAME OUT  errors of what mesa-trainer wrote for FOLDER/NAME, by relative norm
Between the two, on the machine to be measured, for NAME mesa and gdn:
  mesa-trainer logits FOLDER/NAME --tokens @FOLDER/ids --split 1 --at 1000,10000,100000 --device cuda:0 --out OUT \\
      --cg-tolerance 1e-6 --cg-steps 256
SHARED holds golden/, whose program ref_models.py is the float64 reference: token by token, Mesa by a direct solve.
"""
import json
import os
import sys

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'models'))

PLACES = [1000, 10000, 100000]
SOURCES = {'mesa': 'mesa_long', 'gdn': 'gated_deltanet'}


def decayed_sum(keys, values, decay, weight, delta, kept):
    """S = decay S + weight k (v [- S^T k])^T, (H, K, V); yields it after each token and keeps copies at PLACES."""
    S = np.zeros((keys.shape[1], keys.shape[2], values.shape[2]))
    for t in range(len(keys)):
        S *= decay[t][:, None, None]
        v = values[t] - np.einsum('hkv,hk->hv', S, keys[t]) if delta else values[t]
        S += keys[t][:, :, None] * (weight[t][:, None] * v)[:, None, :]
        if t + 1 in PLACES:
            kept.append(S.copy())
        yield S


def watch(ref, layers):
    """Puts recurrences that keep their states in `layers` in the place of the reference program's."""
    def recurrence(q, k, v, scale, log_a=None, w=None, delta=False, state=None):
        kept = []
        o = [scale * np.einsum('hkv,hk->hv', S, q[t])
             for t, S in enumerate(decayed_sum(k, v, np.exp(log_a), w, delta, kept))]
        layers.append(kept)
        return np.array(o)

    def mesa(P, c, a, x, exact):
        H = c['num_heads']
        q, k = (ref.l2(ref.heads(ref.conv(P, a + n + '_conv1d', ref.linear(P, a + n + '_proj', x), ref.silu), H))
                for n in 'qk')
        v = ref.heads(ref.linear(P, a + 'v_proj', x), H)
        beta, gamma = ref.sigmoid(ref.linear(P, a + 'b_proj', x)), ref.sigmoid(ref.linear(P, a + 'a_proj', x))
        ridge = ref.softplus(P[a + 'lambda_params']).reshape(H, -1) + c['lambda_lower_bound']
        ridge = ridge[:, :, None] * np.eye(ridge.shape[1])
        keys, values, o = [], [], []
        both = zip(decayed_sum(k, k, gamma, beta, False, keys), decayed_sum(k, v, gamma, beta, False, values))
        for t, (Hk, Hv) in enumerate(both):
            x_t = np.linalg.solve(Hk + ridge, q[t][:, :, None])[:, :, 0]
            o.append(np.einsum('hkv,hk->hv', Hv, x_t))
        layers.append([np.stack(pair) for pair in zip(keys, values)])
        return ref.out_gate_norm(P, c, a, x, np.array(o), 'o_norm')

    ref.recurrence = recurrence
    ref.MIXERS['mesa_net'] = mesa


def reference(shared):
    sys.path.insert(0, os.path.join(shared, 'golden'))
    import ref_models
    return ref_models


def make(shared, folder):
    ref = reference(shared)
    from tensors import write

    ids = np.random.default_rng(7).integers(0, 256, PLACES[-1])
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, 'ids'), 'w') as out:
        out.write(','.join(map(str, ids)))
    for name, source in SOURCES.items():
        path = os.path.join(folder, name)
        os.makedirs(path, exist_ok=True)
        with open(os.path.join(shared, 'golden', source, 'config.json')) as config:
            text = config.read()
        with open(os.path.join(path, 'config.json'), 'w') as out:
            out.write(text)
        weights = ref.read_safetensors(os.path.join(shared, 'golden', source, 'model.safetensors'))
        for tensor in weights:
            if tensor.endswith('dt_bias'):
                weights[tensor] = np.full_like(weights[tensor], -8)  # forgets over thousands of tokens
        write(os.path.join(path, 'model.safetensors'), {n: w.astype(np.float32) for n, w in weights.items()})
        layers = []
        watch(ref, layers)
        logits = ref.forward(weights, json.loads(text), ids, True)
        states = {f'state.{p}.{i}': kept[n] for i, kept in enumerate(layers) for n, p in enumerate(PLACES)}
        np.savez(os.path.join(folder, name + '.npz'), logits=logits[[p - 1 for p in PLACES]], **states)
        print(name, 'made')


def error(mine, expected):
    return float(np.linalg.norm(mine.ravel() - expected.ravel()) / np.linalg.norm(expected))


def compare(shared, folder, name, out):
    mine, expected = reference(shared).read_safetensors(out), np.load(os.path.join(folder, name + '.npz'))
    layers = sum(key.startswith(f'state.{PLACES[0]}.') for key in expected.files)
    for n, place in enumerate(PLACES):
        slot, row = mine[f'state.{place}'], []
        whole = len(slot) >= sum(expected[f'state.{place}.{i}'].size for i in range(layers))
        for i in range(layers if whole else 0):  # a state in bf16 is seen by its logits
            state = expected[f'state.{place}.{i}']
            begin = i * (len(slot) // layers)   # a layer's matrices come first in its part of the slot
            row.append('%.1e' % error(slot[begin:begin + state.size], state))
        print('%s, %d tokens: logits %.1e, states by layer %s' % (
            name, place, error(mine['logits'][n], expected['logits'][n]), ' '.join(row)))


if __name__ == '__main__':
    if len(sys.argv) == 4 and sys.argv[1] == 'make':
        make(sys.argv[2], sys.argv[3])
    elif len(sys.argv) == 6 and sys.argv[1] == 'compare':
        compare(*sys.argv[2:])
    else:
        sys.exit(__doc__)
