# SPDX-License-Identifier: Apache-2.0
"""Exported folders in the hands of those they are written for: transformers and flash-linear-attention.

usage: loaders.py TRAINER SHARED [FLA]
TRAINER is the program mesa-trainer, SHARED the folder that holds golden/, FLA a checkout of flash-linear-attention;
without it only transformers is asked. Each golden model is exported, loaded by the other project's own classes on the
CPU (no tensor may be missing or left over), and its logits are compared with those of the trainer for the folder.
flash-linear-attention's kernels run in Triton's interpreter; two functions that it cannot run are replaced by plain
ones. Needs torch, transformers, safetensors, and triton for FLA; exit status 77 without them, 1 when something differs.
"""
import json
import os
import subprocess
import sys
import tempfile
import warnings

TOLERANCE = 1e-5
# golden model, forms in which it goes out one after another, and the project that reads the last
CASES = [
    ('llama_hf', ['transformers'], 'transformers'), ('mamba2_hf', ['transformers'], 'transformers'),
    ('xlstm_hf', ['transformers'], 'transformers'), ('hawk_hf', ['transformers'], 'transformers'),
    ('transformer', ['transformers'], 'transformers'),
    ('mamba2_hf', ['state-spaces', 'mesa', 'transformers'], 'transformers'),
    ('mesa_net', ['fla'], 'fla'), ('mesa_hybrid_swa', ['fla'], 'fla'), ('gla', ['fla'], 'fla'), ('kda', ['fla'], 'fla'),
    ('delta_net', ['fla'], 'fla'), ('gated_deltanet', ['fla'], 'fla'), ('retnet', ['fla'], 'fla'),
    ('linear_attn', ['fla'], 'fla'), ('transformer', ['transformers', 'fla'], 'fla'), ('mamba2_hf', ['fla'], 'fla'),
    ('mamba2_hf', ['state-spaces', 'mesa'], 'fla'),
]

os.environ['TRITON_INTERPRET'] = '1'
os.environ.setdefault('TRITON_F32_DEFAULT', 'ieee')
warnings.filterwarnings('ignore')
try:
    import numpy as np
    import torch
    import transformers
    from safetensors.numpy import load_file
except ImportError as missing:
    print('SKIP: %s' % missing)
    sys.exit(77)


class FirstConfig:
    """A kernel with the first of its configurations: the interpreter has no clock to choose by."""

    def __init__(self, kernel, configs):
        self.kernel = kernel
        self.chosen = configs[0].kwargs if configs else {}

    def __getitem__(self, grid):
        return lambda *args, **options: self.kernel[grid](*args, **{**self.chosen, **options})

    def run(self, *args, grid=None, warmup=False, **options):
        return self[grid](*args, **options)

    def __getattr__(self, name):
        return getattr(self.kernel, name)


def softmax_attention(q, k, v, causal=True, window_size=(-1, -1), **_):
    """What flash-attn computes: (batch, length, heads, width), grouped keys, a window to the left."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    row, column = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None]
    seen = column <= row
    if window_size[0] >= 0:
        seen &= column >= row - window_size[0]
    scores = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(~seen, float('-inf'))
    return (scores.softmax(-1) @ v).transpose(1, 2)


def mesa_steps(q, k, v, g, beta, lamb, max_CG_iteration=30, **_):
    """Its own plain chunks, whose length must be a multiple of 64."""
    from fla.ops.mesa_net.naive import naive_mesa_net_CG
    length = q.shape[1]

    def padded(x):
        return torch.nn.functional.pad(x, [0, 0] * (x.ndim - 2) + [0, -length % 64])

    q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    o = naive_mesa_net_CG(padded(q), padded(k), padded(v), padded(g), lamb, padded(beta), 64, max_CG_iteration)[0]
    return o[:, :length], None, None


def load_fla(folder):
    import triton
    import triton.runtime.autotuner as autotuner
    triton.autotune = lambda configs=None, **_: lambda kernel: FirstConfig(kernel, configs)
    autotuner.Autotuner._bench = lambda self, *args, config=None, **options: [0.0, 0.0, 0.0]
    sys.path.insert(0, folder)
    import fla.layers.attn
    import fla.layers.mesa_net
    import fla.models
    fla.layers.attn.flash_attn_func = softmax_attention
    fla.layers.mesa_net.chunk_mesa_net = mesa_steps
    return fla.models


def run(trainer, *arguments):
    subprocess.run([trainer, *arguments], check=True, stdout=subprocess.DEVNULL)


def compare(trainer, folder, project, models):
    with open(os.path.join(folder, 'config.json')) as file:
        config = json.load(file)
    ids = [(i * i * 7 + 3 * i + i // 5) % config['vocab_size'] for i in range(64)]
    output = os.path.join(folder, 'logits.safetensors')
    run(trainer, 'logits', folder, '--tokens', ','.join(map(str, ids)), '--out', output, '--cg-mode', 'fixed')
    ours = load_file(output)['logits']
    name = config['architectures'][0]
    options = {'mode': 'train'} if config['model_type'] == 'xlstm' else {}  # its other mode reads no whole rows
    model, found = getattr(models, name).from_pretrained(folder, dtype=torch.float32, output_loading_info=True,
                                                         **options)
    left = {key: sorted(value)[:3] for key, value in found.items() if value}
    with torch.no_grad():
        theirs = model.eval()(torch.tensor([ids]), use_cache=False).logits[0].float().numpy()
    error = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
    print('%-14s %-28s %-34s %.1e %s' % (project, name, os.path.basename(folder), error, left or ''), flush=True)
    return error <= TOLERANCE and not left


def main():
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    trainer, shared = sys.argv[1], sys.argv[2]
    projects = {'transformers': transformers}
    if len(sys.argv) == 4:
        projects['fla'] = load_fla(sys.argv[3])
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        for model, forms, project in CASES:
            if project not in projects:
                continue
            at = os.path.join(shared, 'golden', model)
            for i in range(len(forms)):
                to = os.path.join(folder, '-'.join([model] + forms[:i + 1]))
                run(trainer, 'export', at, '--out', to, '--as', forms[i])
                at = to
            failures += not compare(trainer, at, project, projects[project])
    print('%d of %d differ' % (failures, len([c for c in CASES if c[2] in projects])))
    sys.exit(1 if failures else 0)


main()
