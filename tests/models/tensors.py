# SPDX-License-Identifier: Apache-2.0
"""Names, shapes and random values of a model's tensors, by models.md alone; safetensors files.

Nothing here asks the engine what it expects: a name that it spells differently is a fault that shows. Values are
bf16-exact, so reading them loses nothing.
"""
import json
import struct

import numpy as np

from reference import named_layers, recurrence_options, whole


def ceil_to(n, grain):
    return (n + grain - 1) // grain * grain


def mesa(c, d):
    H, w = c['num_heads'], c['num_heads'] * c['head_dim']
    yield from ((f'{n}_proj.weight', (w, d)) for n in 'qkv')
    for n in 'ab':
        yield f'{n}_proj.weight', (H, d)
        yield f'{n}_proj.bias', (H,)
    yield 'lambda_params', (w,)
    yield from ((f'{n}_conv1d.weight', (w, 1, c['conv_size'])) for n in 'qk')
    if c['use_output_gate']:
        yield 'g_proj.weight', (w, d)
    yield 'o_norm.weight', (c['head_dim'],)
    yield 'o_proj.weight', (d, w)


def branches(d, q, k, v, o, taps):
    for n, width in (('q', q), ('k', k), ('v', v)):
        yield f'{n}_proj.weight', (width, d)
        if taps:
            yield f'{n}_conv1d.weight', (width, 1, taps)
    yield 'o_proj.weight', (d, o)


def taps_of(c):
    return c['conv_size'] if c['use_short_conv'] else 0


def gated_deltanet(c, d):
    H, HV = c['num_heads'], c['num_v_heads'] or c['num_heads']
    V = int(c['head_dim'] * c['expand_v'])
    yield from branches(d, H * c['head_dim'], H * c['head_dim'], HV * V, HV * V, taps_of(c))
    yield from ((f'{n}_proj.weight', (HV, d)) for n in 'ab')
    yield from ((n, (HV,)) for n in ('A_log', 'dt_bias'))
    if c['use_gate']:
        yield 'g_proj.weight', (HV * V, d)
    yield 'o_norm.weight', (V,)


def kda(c, d):
    H, HV, K = c['num_heads'], c['num_v_heads'] or c['num_heads'], c['head_dim']
    V = int(K * c['expand_v'])
    yield from branches(d, H * K, H * K, HV * V, HV * V, taps_of(c))
    yield 'b_proj.weight', (HV, d)
    yield 'f_proj.0.weight', (V, d)
    yield 'f_proj.1.weight', (HV * K, V)
    yield 'A_log', (HV,)
    yield 'dt_bias', (HV * K,)
    yield 'g_proj.0.weight', (V, d)
    yield 'g_proj.1.weight', (HV * V, V)
    yield 'g_proj.1.bias', (HV * V,)
    yield 'o_norm.weight', (V,)


def delta_net(c, d):
    k, v = int(d * c['expand_k']), int(d * c['expand_v'])
    yield from branches(d, k, k, v, v, taps_of(c))
    if c['use_beta']:
        yield 'b_proj.weight', (c['num_heads'], d)
    if c['use_gate']:
        yield 'g_proj.weight', (v, d)
    yield 'o_norm.weight', (v // c['num_heads'],)


def grouped(c, d):
    groups = c['num_heads'] // (c['num_kv_heads'] or c['num_heads'])
    return int(d * c['expand_k']), int(d * c['expand_v']), groups


def gate_and_norm(c, d, v):
    if c['use_output_gate']:
        yield 'g_proj.weight', (v, d)
    if c.get('elementwise_affine', True):
        fused = c.get('fuse_norm', True) and c['use_output_gate'] and c['hidden_act'] == 'swish'
        yield ('g_norm_swish_gate.weight' if fused else 'g_norm.weight'), (v // c['num_heads'],)


def gla(c, d):
    k, v, groups = grouped(c, d)
    yield from branches(d, k, k // groups, v // groups, v, taps_of(c))
    yield 'gk_proj.0.weight', (16, d)
    yield 'gk_proj.1.weight', (k // groups, 16)
    yield 'gk_proj.1.bias', (k // groups,)
    yield from gate_and_norm(c, d, v)


def retnet(c, d):
    k, v, groups = grouped(c, d)
    yield from branches(d, k, k // groups, v // groups, v, 0)
    yield from gate_and_norm(c, d, v)


def linear_attn(c, d):
    k, v, groups = grouped(c, d)
    yield from branches(d, k, k // groups, v // groups, v, 0)
    K = k // c['num_heads']
    layers = {'elementwise_product': ('layer1', 'layer2'), 'hedgehog': ('layer',), 't2r': ('layer',)}
    for x in 'qk':
        for layer in layers.get(c['feature_map'], ()):
            yield f'feature_map_{x}.{layer}.weight', (K, K)
            if c['feature_map'] != 't2r':
                yield f'feature_map_{x}.{layer}.bias', (K,)
    if c.get('elementwise_affine', True):
        yield 'norm.weight', (v // c['num_heads'],)


def recurrence(c, d):
    own, H, w = recurrence_options(c), c['num_heads'], c['num_heads'] * c['head_dim']
    yield from branches(d, w, w, w, w, c['conv_size'] if own['conv'] else 0)
    if own['decay'] in ('scalar', 'channel'):
        a = w if own['decay'] == 'channel' else H
        yield 'a_proj.weight', (a, d)
        yield 'a_proj.bias', (a,)
    if own['input_gate']:
        yield 'b_proj.weight', (H, d)
        yield 'b_proj.bias', (H,)
    if own['out_gate']:
        yield 'g_proj.weight', (w, d)
    if own['out_norm']:
        yield 'o_norm.weight', (c['head_dim'],)


def attention(c, d):
    H = c['num_heads']
    kv, bias = (c.get('num_kv_heads') or H) * (d // H), c.get('qkv_bias', False)
    for n, width in (('q', d), ('k', kv), ('v', kv)):
        yield f'{n}_proj.weight', (width, d)
        if bias:
            yield f'{n}_proj.bias', (width,)
    if c.get('qk_norm'):
        yield from ((f'{n}_norm.weight', (d // H,)) for n in 'qk')
    yield 'o_proj.weight', (d, d)


MIXERS = dict(mesa_net=mesa, gated_deltanet=gated_deltanet, kda=kda, delta_net=delta_net, gla=gla, retnet=retnet,
              linear_attn=linear_attn, recurrence=recurrence, transformer=attention, attention=attention)


def fla_layers(c):
    """(mixer name, its config) of each layer."""
    if c.get('layer_types'):
        yield from named_layers(c)
        return
    hybrid = {}
    for h in [c['attn']] if isinstance(c.get('attn'), dict) else c.get('attn') or []:
        hybrid.update({i: h for i in h['layers']})
    for i in range(c['num_hidden_layers']):
        yield ('attention', hybrid[i]) if i in hybrid else (c['model_type'], c)


def fla(c):
    d = c['hidden_size']
    inner = c['intermediate_size'] or ceil_to(int(d * (c['hidden_ratio'] or 4) * 2 / 3), 256)
    yield 'model.embeddings.weight', (c['vocab_size'], d)
    for i, (name, own) in enumerate(fla_layers(c)):
        L = f'model.layers.{i}.'
        yield from ((L + n, (d,)) for n in ('attn_norm.weight', 'mlp_norm.weight'))
        yield from ((L + 'attn.' + n, shape) for n, shape in MIXERS[name](own, d))
        yield from ((L + f'mlp.{n}_proj.weight', (inner, d)) for n in ('gate', 'up'))
        yield L + 'mlp.down_proj.weight', (d, inner)
    yield 'model.norm.weight', (d,)


def llama(c):
    d, inner, H = c['hidden_size'], c['intermediate_size'], c['num_attention_heads']
    w = c['head_dim'] or d // H
    kv = (c['num_key_value_heads'] or H) * w
    yield 'model.embed_tokens.weight', (c['vocab_size'], d)
    for i in range(c['num_hidden_layers']):
        L = f'model.layers.{i}.'
        yield from ((L + n + '_layernorm.weight', (d,)) for n in ('input', 'post_attention'))
        linears = [('self_attn.q', H * w, d), ('self_attn.k', kv, d), ('self_attn.v', kv, d), ('self_attn.o', d, H * w),
                   ('mlp.gate', inner, d), ('mlp.up', inner, d), ('mlp.down', d, inner)]
        for n, rows, cols in linears:
            yield L + n + '_proj.weight', (rows, cols)
            if c['mlp_bias' if n.startswith('mlp') else 'attention_bias']:
                yield L + n + '_proj.bias', (rows,)
    yield 'model.norm.weight', (d,)


def mamba2(c):
    d, N, G = c['hidden_size'], c['state_size'], c['n_groups']
    inner = int(c['expand'] * d)
    H, conv = inner // c['head_dim'], inner + 2 * G * N
    yield 'backbone.embeddings.weight', (c['vocab_size'], d)
    for i in range(c['num_hidden_layers']):
        m = f'backbone.layers.{i}.mixer.'
        yield f'backbone.layers.{i}.norm.weight', (d,)
        yield m + 'in_proj.weight', (conv + inner + H, d)
        yield m + 'conv1d.weight', (conv, 1, c['conv_kernel'])
        if c['use_conv_bias']:
            yield m + 'conv1d.bias', (conv,)
        yield from ((m + n, (H,)) for n in ('dt_bias', 'A_log'))
        yield m + 'D', (inner if 'norm_eps' in c and c['D_has_hdim'] else H,)
        if 'norm_eps' not in c or c['rmsnorm']:
            yield m + 'norm.weight', (inner,)
        yield m + 'out_proj.weight', (d, inner)
        if c['use_bias']:
            yield m + 'in_proj.bias', (conv + inner + H,)
            yield m + 'out_proj.bias', (d,)
    yield 'backbone.norm_f.weight', (d,)


def xlstm(c):
    d, H = c['hidden_size'], c['num_heads']
    qk, v = int(d * c['qk_dim_factor']), int(d * c['v_dim_factor'])
    grain = c['ffn_round_up_to_multiple_of']
    F = int((d * c['ffn_proj_factor'] + grain - 1) / grain) * grain
    yield 'backbone.embeddings.weight', (c['vocab_size'], d)
    for i in range(c['num_hidden_layers']):
        L = f'backbone.blocks.{i}.'
        m = L + 'mlstm_layer.'
        if c['use_bias']:
            for n, rows in (('mlstm_layer.q', qk), ('mlstm_layer.k', qk), ('mlstm_layer.v', v), ('norm_mlstm', d),
                            ('mlstm_layer.ogate_preact', v), ('mlstm_layer.multihead_norm', v), ('norm_ffn', d),
                            ('mlstm_layer.out_proj', d), ('ffn.proj_up_gate', F), ('ffn.proj_up', F),
                            ('ffn.proj_down', d)):
                yield L + n + '.bias', (rows,)
        yield L + 'norm_mlstm.weight', (d,)
        for n, rows in (('q', qk), ('k', qk), ('v', v), ('ogate_preact', v)):
            yield m + n + '.weight', (rows, d)
        for n in ('igate_preact', 'fgate_preact'):
            yield m + n + '.weight', (H, d)
            yield m + n + '.bias', (H,)
        yield m + 'multihead_norm.weight', (v,)
        yield m + 'out_proj.weight', (d, v)
        yield L + 'norm_ffn.weight', (d,)
        yield from ((L + f'ffn.{n}.weight', (F, d)) for n in ('proj_up_gate', 'proj_up'))
        yield L + 'ffn.proj_down.weight', (d, F)
    yield 'backbone.out_norm.weight', (d,)


def griffin(c):
    d, H, R = c['hidden_size'], c['num_attention_heads'], c['lru_width'] or c['hidden_size']
    w, inner, types = c.get('head_dim') or d // H, c['intermediate_size'] // 2, c['block_types']
    kv = (c['num_key_value_heads'] or H) * w
    yield 'model.embed_tokens.weight', (c['vocab_size'], d)
    for i in range(c['num_hidden_layers']):
        L = f'model.layers.{i}.'
        t = L + 'temporal_block.'
        yield from ((L + n + '_pre_norm.weight', (d,)) for n in ('temporal', 'channel'))
        if types[i % len(types)] == 'recurrent':
            for n, rows, cols in (('linear_x', R, d), ('linear_y', R, d), ('linear_out', d, R)):
                yield t + n + '.weight', (rows, cols)
                yield t + n + '.bias', (rows,)
            yield t + 'conv_1d.weight', (R, 1, c['conv1d_width'])
            yield t + 'conv_1d.bias', (R,)
            yield t + 'rg_lru.recurrent_param', (R,)
            for n in ('input_gate', 'recurrent_gate'):
                yield t + f'rg_lru.{n}_weight', (H, R // H, R // H)
                yield t + f'rg_lru.{n}_bias', (H, R // H)
        else:
            for n, rows in (('q', H * w), ('k', kv), ('v', kv)):
                yield t + n + '_proj.weight', (rows, d)
                if c['attention_bias']:
                    yield t + n + '_proj.bias', (rows,)
            yield t + 'o_proj.weight', (d, H * w)
            yield t + 'o_proj.bias', (d,)
        for n, rows, cols in (('gate', inner, d), ('up', inner, d), ('down', d, inner)):
            yield L + f'mlp_block.{n}_proj.weight', (rows, cols)
            yield L + f'mlp_block.{n}_proj.bias', (rows,)
    yield 'model.final_norm.weight', (d,)


def shapes(config):
    c = whole(config)
    kinds = dict(llama=llama, mamba2=mamba2, xlstm=xlstm, recurrent_gemma=griffin)
    table = dict(kinds.get(c['model_type'], fla)(c))
    if not c['tie_word_embeddings']:
        table['lm_head.weight'] = next(iter(table.values()))
    return table


def respelled(weights, spelling):
    """The same values as files of another spelling hold them: several matrices as rows of one."""
    groups = {'fused xlstm': [(('mlstm_layer.q', 'mlstm_layer.k', 'mlstm_layer.v', 'mlstm_layer.ogate_preact'),
                               'mlstm_layer.qkv_opreact'),
                              (('mlstm_layer.igate_preact', 'mlstm_layer.fgate_preact'), 'mlstm_layer.ifgate_preact'),
                              (('ffn.proj_up_gate', 'ffn.proj_up'), 'ffn.proj_up_gate_z')],
              'old gate_proj': [(('mlp.gate_proj', 'mlp.up_proj'), 'mlp.gate_proj')]}[spelling]
    made = dict(weights)
    for parts, whole_name in groups:
        for name in weights:
            stem, _, leaf = name.rpartition('.')
            if stem.endswith(parts[0]):
                prefix = stem[:-len(parts[0])]
                pieces = [made.pop(f'{prefix}{part}.{leaf}') for part in parts]
                made[f'{prefix}{whole_name}.{leaf}'] = np.concatenate(pieces)
    return made


def bf16(x):
    u = np.ascontiguousarray(x, '<f4').view('<u4').astype(np.uint64)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype('<u2')


def widen(u):
    return (u.astype('<u4') << 16).view('<f4').astype(np.float64)


def value(name, shape, rng, long_memory):
    r, leaf = rng.standard_normal(shape), name.split('.')[-1]
    if 'conv' in name and leaf == 'weight':
        return 0.5 * r
    if long_memory and name.endswith(('a_proj.bias', 'fgate_preact.bias')):
        return rng.uniform(3, 7, shape)
    if long_memory and name.endswith('gk_proj.1.bias'):
        return rng.uniform(1, 5, shape)
    if long_memory and leaf == 'dt_bias':
        return rng.uniform(-7, -3, shape)
    if leaf == 'A_log':
        return np.minimum(0.5 + 0.5 * r, 1.5)
    if leaf == 'dt_bias':
        return -3 + r
    if leaf == 'lambda_params':
        return 0.1 + 0.5 * r
    if leaf == 'recurrent_param':       # a^2 = U(0.81, 0.998), a = e^(-8 softplus)
        return np.log(np.expm1(-np.log(rng.uniform(0.81, 0.998, shape)) / 16))
    if leaf == 'D':
        return 1 + 0.3 * r
    if 'norm' in name and leaf == 'weight':
        return 0.2 * r + (0 if 'pre_norm' in name or 'final_norm' in name else 1)
    if 'embed' in name:
        return 0.5 * r
    return r * shape[-1] ** -0.5 if len(shape) > 1 and 'bias' not in leaf else 0.3 * r


def random_weights(config, seed, long_memory=False):
    """{name: bf16 values as uint16}; a tied feature map has its tensors under both names, as the public files have."""
    rng = np.random.default_rng(seed)
    made = {n: bf16(value(n, s, rng, long_memory)) for n, s in shapes(config).items()}
    if config.get('tie_feature_map_qk'):
        made.update({n: made[n.replace('map_k', 'map_q')] for n in made if 'feature_map_k' in n})
    return made


def write(path, tensors):
    """float32 arrays as F32, uint16 arrays as BF16."""
    head, at = {}, 0
    for n, t in tensors.items():
        head[n] = dict(dtype='BF16' if t.dtype == np.uint16 else 'F32', shape=t.shape, data_offsets=[at, at + t.nbytes])
        at += t.nbytes
    text = json.dumps(head).encode()
    text += b' ' * (-len(text) % 8)
    with open(path, 'wb') as f:
        f.write(struct.pack('<Q', len(text)) + text + b''.join(t.tobytes() for t in tensors.values()))
