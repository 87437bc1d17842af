# SPDX-License-Identifier: Apache-2.0
"""Configs drawn at random from what the public classes accept, for compare.py --random COUNT [SEED].

Sizes stay small; what a class refuses by itself (widths that do not divide, odd rotated heads) is not drawn, nor what
float32 cannot tell: solves cut off halfway over gates that forget little, gradients through a window of one id.
"""
import numpy as np

import cases

INF = float('inf')


class Draw:
    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def __call__(self, *choices):
        return choices[int(self.rng.integers(len(choices)))]

    def maybe(self, share=0.5):
        return bool(self.rng.random() < share)


def hybrid(draw, layers, d):
    """FLA's attn key: null, one object, a list."""
    def spec(numbers):
        heads = draw(*[h for h in (1, 2, 3, 4, 6) if d % (2 * h) == 0])
        made = dict(layers=numbers, num_heads=heads)
        if draw.maybe():
            made['num_kv_heads'] = draw(*[k for k in range(1, heads + 1) if heads % k == 0])
        if draw.maybe():
            made['window_size'] = draw(2, 7, 33, 64, 100)
        if draw.maybe():
            made['rope_theta'] = draw(100.0, 5000, 1e6)
        if draw.maybe():
            made['qkv_bias'] = True
        return made
    if layers < 2 or draw.maybe(0.6):
        return None
    numbers = [int(i) for i in draw.rng.permutation(layers)[:draw(1, layers - 1)]]
    return spec(numbers) if draw.maybe() else [spec([i]) for i in numbers]


def grouped(draw, d, k_shares, v_shares):
    heads = draw(*[h for h in (1, 2, 3, 4, 6) if d % (4 * h) == 0])
    keys = dict(num_heads=heads, expand_k=draw(*k_shares), expand_v=draw(*v_shares))
    if draw.maybe():
        keys['num_kv_heads'] = draw(*[k for k in range(1, heads + 1) if heads % k == 0])
    if draw.maybe(0.25):
        keys['elementwise_affine'] = False
    return keys


def delta(draw):
    return dict(use_short_conv=draw.maybe(0.8), conv_size=draw(1, 2, 3, 4, 7), allow_neg_eigval=draw.maybe())


def value_groups(draw):
    heads = draw(1, 2, 3)
    keys = dict(num_heads=heads, head_dim=draw(8, 12, 20, 24, 36, 40), expand_v=draw(0.5, 1, 1.25, 2))
    if draw.maybe():
        keys['num_v_heads'] = heads * draw(1, 2, 3)
    return keys


MIXERS = {
    'mesa_net': lambda draw, d: dict(
        num_heads=draw(1, 2, 3, 5), head_dim=draw(5, 8, 12, 17, 24, 40, 48), conv_size=draw(1, 2, 3, 4, 6),
        use_output_gate=draw.maybe(), lambda_lower_bound=draw(0.0, 0.1, 0.25, 1.0),
        max_cg_step_training=draw(1, 3, 30), **(dict(gamma_cap_b=draw(0.5, 0.9, 0.9975)) if draw.maybe() else {})),
    'gated_deltanet': lambda draw, d: dict(use_gate=draw.maybe(), **value_groups(draw), **delta(draw)),
    'kda': lambda draw, d: dict(lower_bound=draw(None, -5, -0.5), **value_groups(draw), **delta(draw)),
    'delta_net': lambda draw, d: dict(
        num_heads=draw(1, 2, 3), expand_k=draw(0.5, 1, 1.5), expand_v=draw(0.5, 1, 2), use_gate=draw.maybe(),
        use_beta=draw.maybe(0.7), qk_norm=draw('l2', 'l2', 'sum'),
        qk_activation=draw('silu', 'relu', 'elu', 'identity'), **delta(draw)),
    'gla': lambda draw, d: dict(
        **grouped(draw, d, (0.5, 1, 1.5), (0.5, 1, 2)), feature_map=draw(None, 'relu', 'sigmoid', 'silu', 'swish'),
        use_short_conv=draw.maybe(), conv_size=draw(2, 3, 4), use_output_gate=draw.maybe(0.7), fuse_norm=draw.maybe(),
        clamp_min=draw(None, -0.03, -1.0)),
    'retnet': lambda draw, d: dict(
        **grouped(draw, d, (0.5, 1), (0.5, 1, 2)), feature_map=draw(None, 'relu', 'sigmoid', 'silu'),
        use_output_gate=draw.maybe(0.7), fuse_norm=draw.maybe()),
    'linear_attn': lambda draw, d: dict(
        **grouped(draw, d, (0.5, 1), (0.5, 1, 2)), tie_feature_map_qk=draw.maybe(), norm_q=draw.maybe(0.3),
        norm_k=draw.maybe(0.3), norm_feature_map=draw.maybe(), feature_map=draw(
            'elementwise_product', 'hedgehog', 't2r', 'dpfp', 'elu', 'relu', 'identity')),
    'recurrence': lambda draw, d: dict(num_heads=draw(1, 2, 3), head_dim=draw(8, 12, 24, 40), conv_size=draw(
        1, 2, 4), recurrence=plain(draw)),
}


def plain(draw):
    update = draw('add', 'delta')
    keys = dict(decay=draw('none', 'head', 'scalar', 'channel'), update=update, conv=draw.maybe(),
                qk_norm=update == 'delta' or draw.maybe(), out_norm=draw.maybe(), out_gate=draw.maybe())
    if draw.maybe():
        keys['input_gate'] = draw.maybe()
    return keys


def ill_conditioned(c):
    """Read-outs divided by what passes through 0 (a sum, the norm): the public code's float32 has no digits there."""
    signed = c.get('feature_map') in ('elementwise_product', 'identity', 'dpfp')
    sums = c.get('norm_q') or c.get('norm_k') or c.get('norm_feature_map')
    delta_sums = c.get('qk_norm') == 'sum' and c.get('qk_activation') != 'elu'
    return delta_sums or (signed and (sums or c['num_hidden_layers'] > 1)) or \
        (sums and c.get('feature_map') in ('relu', 't2r'))


def fla(draw, kind):
    d, layers = draw(24, 36, 48, 60, 72), draw(1, 1, 2, 3)
    while True:
        own = MIXERS[kind](draw, d)
        if not ill_conditioned({**own, 'num_hidden_layers': layers}):
            break
    config = cases.fla(kind, d, layers, **own, attn=hybrid(draw, layers, d), tie_word_embeddings=draw.maybe())
    config.update(intermediate_size=draw(8, 40, 52), norm_eps=draw(1e-6, 1e-5, 1e-2), vocab_size=draw(33, 61, 96))
    if kind == 'mesa_net' and draw.maybe(0.3):
        config.update(scale_embeddings=True, logits_soft_cap=draw(5.0, 30.0))
    return config


def transformer(draw, kind):
    spec = hybrid(draw, 2, d := draw(24, 36, 48)) or dict(num_heads=2)
    spec = spec[0] if isinstance(spec, list) else spec
    spec.pop('layers', None)
    return cases.fla('transformer', d, draw(1, 2), qk_norm=draw.maybe(), tie_word_embeddings=draw.maybe(), **spec)


def llama(draw, kind):
    heads = draw(1, 2, 3, 6)
    config = cases.llama(draw(24, 36, 48), draw(1, 2), num_attention_heads=heads, attention_bias=draw.maybe(),
                         mlp_bias=draw.maybe(), tie_word_embeddings=draw.maybe(), rope_theta=draw(50.0, 10000.0, 5e5))
    config['num_key_value_heads'] = draw(*[k for k in range(1, heads + 1) if heads % k == 0])
    if draw.maybe():
        config['head_dim'] = draw(2, 6, 16, 40)
    elif config['hidden_size'] // heads % 2:
        config['head_dim'] = 8
    if draw.maybe():
        config['rope_scaling'] = draw(dict(type='linear', factor=3.0), cases.LLAMA3, dict(rope_type='default'))
    return config


def mamba2(draw, kind):
    d, expand = draw(24, 36, 48), draw(1, 2, 3)
    width = draw(*[w for w in (4, 6, 12, 24, 36) if expand * d % w == 0])
    heads = expand * d // width
    groups = draw(*[g for g in (1, 2, 3, 4, 6) if heads % g == 0])
    keys = dict(expand=expand, head_dim=width, n_groups=groups, state_size=draw(5, 8, 16, 33, 40), conv_kernel=draw(
        2, 3, 4), use_bias=draw.maybe(), use_conv_bias=draw.maybe(), tie_word_embeddings=draw.maybe())
    limits = draw([0.0, INF], [0.01, 0.2], [0.0, 0.1])
    if draw.maybe():
        return cases.mamba2_hf(d, draw(1, 2), num_heads=heads, time_step_limit=limits, **keys)
    return cases.mamba2_fla(d, draw(1, 2), dt_limit=limits, rmsnorm=draw.maybe(0.7), norm_before_gate=draw.maybe(),
                            D_has_hdim=draw.maybe(), **keys)


def xlstm(draw, kind):
    return cases.xlstm(draw(24, 36, 48), draw(1, 2), use_bias=draw.maybe(), num_heads=draw(1, 2, 3),
                       qk_dim_factor=draw(0.5, 1.0), v_dim_factor=draw(0.5, 1.0), gate_soft_cap=draw(2.0, 15.0),
                       output_logit_soft_cap=draw(3.0, 30.0), ffn_proj_factor=draw(1.0, 2.667),
                       ffn_round_up_to_multiple_of=draw(8, 64),
                       norm_eps=draw(1e-6, 1e-3), eps=draw(1e-6, 1e-4), tie_word_embeddings=draw.maybe())


def griffin(draw, kind):
    d, heads = draw(24, 36, 48), draw(1, 2, 3)
    return cases.gemma(d, draw(1, 2, 3), num_attention_heads=heads, lru_width=heads * draw(8, 12, 20),
                       num_key_value_heads=draw(*[k for k in range(1, heads + 1) if heads % k == 0]),
                       head_dim=draw(8, 16, 24), attention_window_size=draw(1, 8, 30, 64, 200),
                       attention_bias=draw.maybe(), conv1d_width=draw(1, 2, 4), logits_soft_cap=draw(2.0, 30.0),
                       block_types=draw(['recurrent'], ['attention'], ['recurrent', 'attention']),
                       tie_word_embeddings=draw.maybe(), rope_theta=draw(300.0, 10000.0))


KINDS = {**{kind: fla for kind in MIXERS}, 'transformer': transformer, 'llama': llama, 'mamba2': mamba2,
         'xlstm': xlstm, 'recurrent_gemma': griffin}


def draw_cases(count, seed):
    kinds = list(KINDS)
    for i in range(count):
        draw, kind = Draw((seed, i)), kinds[i % len(kinds)]
        config = KINDS[kind](draw, kind)
        options = dict(tokens=draw(17, 66, 75, 129, 140), long=draw.maybe(0.3))
        options['split'] = draw(15, options['tokens'] // 2, options['tokens'] - 3)
        if kind == 'xlstm' and draw.maybe(0.3):
            config['weight_mode'], options['spelling'] = 'fused', 'fused xlstm'
        options['float32'] = draw((), cases.FLOAT32, ('.weight', '.bias'))
        options['equal'] = draw(0, 0, options['tokens'] // 3)
        yield f'random {seed}/{i}: {kind}', config, options
