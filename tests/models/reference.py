# SPDX-License-Identifier: Apache-2.0
"""What the outside reference program computes, and what models.md defines beyond it: token by token, in float64.

The program ref_models.py lies beside the golden models and is imported, never copied. It wants every key of a config
present, so the defaults of the public configuration classes stand here; a config that leaves keys out therefore tests
ours. Beyond it: hybrids by layer_types, the plain recurrence, xLSTM's biases, embedding scale and soft cap of the
logits, the norms of Mamba-2's other dialect, scaled rotary frequencies.
"""
import math
import os
import sys

import numpy as np

FLA = dict(vocab_size=32000, hidden_size=2048, num_hidden_layers=24, norm_eps=1e-6, tie_word_embeddings=False,
           hidden_ratio=4, intermediate_size=None, attn=None)
GROUPED = dict(num_kv_heads=None, feature_map=None, use_output_gate=True, hidden_act='swish')
DEFAULTS = {
    'mesa_net': dict(FLA, num_heads=16, head_dim=128, conv_size=4, use_output_gate=False, lambda_lower_bound=0.25,
                     max_cg_step_training=30),
    'gated_deltanet': dict(FLA, num_heads=6, head_dim=256, expand_v=2.0, num_v_heads=None, use_gate=True, conv_size=4,
                           use_short_conv=True, allow_neg_eigval=False, num_hidden_layers=21),
    'delta_net': dict(FLA, num_heads=16, expand_k=1.0, expand_v=1.0, use_beta=True, use_gate=False, conv_size=4,
                      use_short_conv=True, qk_norm='l2', qk_activation='silu', allow_neg_eigval=False),
    'gla': dict(FLA, **GROUPED, num_heads=4, expand_k=0.5, expand_v=1.0, use_short_conv=False, conv_size=4,
                clamp_min=None),
    'kda': dict(FLA, num_heads=16, head_dim=128, expand_v=1.0, num_v_heads=None, use_short_conv=True, conv_size=4,
                allow_neg_eigval=False, lower_bound=None),
    'retnet': dict(FLA, **GROUPED, num_heads=8, expand_k=1.0, expand_v=2.0, hidden_ratio=2),
    'linear_attn': dict(FLA, num_heads=4, num_kv_heads=None, expand_k=1.0, expand_v=1.0, norm_q=False, norm_k=False,
                        feature_map='elementwise_product', tie_feature_map_qk=False, norm_feature_map=False),
    'recurrence': dict(FLA, num_heads=16, head_dim=128, conv_size=4),
    'transformer': dict(FLA, num_heads=32, num_kv_heads=None, qkv_bias=False, qk_norm=False, window_size=None,
                        rope_theta=10000.0),
    'llama': dict(vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32,
                  num_attention_heads=32, num_key_value_heads=None, rms_norm_eps=1e-6, tie_word_embeddings=False,
                  attention_bias=False, mlp_bias=False, head_dim=None),
    'xlstm': dict(vocab_size=50304, num_heads=8, norm_eps=1e-6, eps=1e-6, qk_dim_factor=0.5, v_dim_factor=1.0,
                  ffn_proj_factor=2.667, ffn_round_up_to_multiple_of=64, gate_soft_cap=15.0,
                  output_logit_soft_cap=30.0, tie_word_embeddings=False, use_bias=False),
    'recurrent_gemma': dict(vocab_size=256000, hidden_size=2560, num_hidden_layers=26, intermediate_size=7680,
                            num_attention_heads=10, num_key_value_heads=None, attention_window_size=2048,
                            conv1d_width=4, logits_soft_cap=30.0, rms_norm_eps=1e-6, lru_width=None,
                            attention_bias=False, block_types=['recurrent', 'recurrent', 'attention'],
                            tie_word_embeddings=True),
}
MAMBA2 = dict(head_dim=64, state_size=128, expand=2, conv_kernel=4, use_bias=False, use_conv_bias=True,
              tie_word_embeddings=False)
MAMBA2_FLA = dict(MAMBA2, vocab_size=32000, hidden_size=2048, num_hidden_layers=48, norm_eps=1e-5, n_groups=1,
                  dt_limit=[0.0, math.inf], rmsnorm=True, norm_before_gate=False, D_has_hdim=False)
MAMBA2_HF = dict(MAMBA2, vocab_size=32768, hidden_size=4096, num_hidden_layers=64, layer_norm_epsilon=1e-5,
                 n_groups=8, num_heads=128, time_step_limit=[0.0, math.inf])


def whole(config):
    """The config with the public class's defaults for what it leaves out."""
    kind = config['model_type']
    if config.get('layer_types') and kind != 'llama':
        return {**FLA, **config}    # each layer has the defaults of its own class
    defaults = (MAMBA2_FLA if 'norm_eps' in config else MAMBA2_HF) if kind == 'mamba2' else DEFAULTS[kind]
    c = {**defaults, **config}
    if kind == 'xlstm':
        c.setdefault('num_hidden_layers', c.get('num_blocks'))
        c.setdefault('hidden_size', c.get('embedding_dim'))
    return c


def named_layers(c):
    """(mixer, its config) of layer_types: the layer's own keys, then its mixer's object, then the top level."""
    for entry in c['layer_types']:
        entry = entry if isinstance(entry, dict) else dict(mixer=entry)
        name = entry['mixer']
        kind = c.get('attn' if name == 'attention' else name) or {}
        defaults = DEFAULTS['transformer' if name == 'attention' else name]
        yield name, {**defaults, **c, **(kind if name != 'recurrence' else {}), **entry}


def recurrence_options(c):
    own = dict(decay='none', update='add', conv=True, qk_norm=True, out_norm=True, out_gate=False)
    own.update(c.get('recurrence') or {})
    own.setdefault('input_gate', own['update'] == 'delta')
    return own


class Reference:
    def __init__(self, golden):
        sys.path.insert(0, golden)
        sys.dont_write_bytecode = True
        import ref_models
        self.ref = ref_models
        self.plain_rope = ref_models.rope
        ref_models.MIXERS['recurrence'] = self.recurrence
        ref_models.MIXERS['attention'] = self.named_attention

    def forward(self, P, config, tokens, exact=False):
        c = whole(config)
        self.ref.rope = self.plain_rope
        if c['model_type'] == 'llama':
            self.ref.rope = self.scaled_rope(c)
        if c['model_type'] == 'mamba2':
            return self.mamba2(P, c, np.asarray(tokens))
        if c['model_type'] == 'recurrent_gemma' and not c['tie_word_embeddings']:
            # the program reads ids and head from one table: the head's rows, then the embeddings'
            name = 'model.embed_tokens.weight'
            both = {**P, name: np.concatenate([P['lm_head.weight'], P[name]])}
            return self.ref.forward(both, c, np.asarray(tokens) + c['vocab_size'])[:, :c['vocab_size']]
        if c['model_type'] == 'xlstm' and c['use_bias']:
            return self.biased_xlstm(P, c, np.asarray(tokens))
        if c['model_type'] in self.ref.HF:
            return self.ref.forward(P, c, tokens, exact)
        return self.fla(P, c, np.asarray(tokens), exact)

    def fla(self, P, c, tokens, exact):
        if c.get('scale_embeddings'):
            P = {**P, 'model.embeddings.weight': P['model.embeddings.weight'] * math.sqrt(c['hidden_size'])}
            if c['tie_word_embeddings']:
                P['lm_head.weight'] = P['model.embeddings.weight'] / math.sqrt(c['hidden_size'])
                c = {**c, 'tie_word_embeddings': False}
        if c.get('layer_types'):
            y = self.by_layer_types(P, c, tokens, exact)
        else:
            y = self.ref.fla_model(P, c, tokens, exact)
        soft_cap = c.get('logits_soft_cap')
        return self.ref.cap(y, soft_cap) if soft_cap else y

    def by_layer_types(self, P, c, tokens, exact):
        r, eps = self.ref, c['norm_eps']
        x = P['model.embeddings.weight'][tokens]
        for i, (name, own) in enumerate(named_layers(c)):
            L = f'model.layers.{i}.'
            x = x + r.MIXERS[name](P, own, L + 'attn.', r.rms(x, P[L + 'attn_norm.weight'], eps), exact)
            u = r.rms(x, P[L + 'mlp_norm.weight'], eps)
            gated = r.silu(r.linear(P, L + 'mlp.gate_proj', u)) * r.linear(P, L + 'mlp.up_proj', u)
            x = x + r.linear(P, L + 'mlp.down_proj', gated)
        head = P['model.embeddings.weight'] if c['tie_word_embeddings'] else P['lm_head.weight']
        return r.rms(x, P['model.norm.weight'], eps) @ head.T

    def named_attention(self, P, c, a, x, exact):
        return self.ref.fla_attention(P, c, a, x, exact)

    def recurrence(self, P, c, a, x, exact):
        r, own, H = self.ref, recurrence_options(c), c['num_heads']
        if own['conv']:
            q, k, v = r.qkv_conv(P, a, x)
        else:
            q, k, v = (r.linear(P, a + n + '_proj', x) for n in 'qkv')
        q, k, v = (r.heads(y, H) for y in (q, k, v))
        if own['qk_norm']:
            q, k = r.l2(q), r.l2(k)
        decay = None
        if own['decay'] == 'head':
            decay = np.log(1.0 - 2.0 ** (-5.0 - np.arange(H)))
        elif own['decay'] != 'none':
            decay = r.logsig(r.linear(P, a + 'a_proj', x))
            decay = r.heads(decay, H) if own['decay'] == 'channel' else decay
        beta = r.sigmoid(r.linear(P, a + 'b_proj', x)) if own['input_gate'] else None
        o = r.recurrence(q, k, v, q.shape[-1] ** -0.5, decay, beta, delta=own['update'] == 'delta')
        if own['out_norm']:
            return r.out_gate_norm(P, c, a, x, o, 'o_norm')
        if own['out_gate']:
            o = o * r.silu(r.heads(r.linear(P, a + 'g_proj', x), H))
        return r.linear(P, a + 'o_proj', o.reshape(len(x), -1))

    def mamba2(self, P, c, tokens):
        r, hf = self.ref, 'norm_eps' not in c
        eps = c['layer_norm_epsilon'] if hf else c['norm_eps']
        lo, hi = c['time_step_limit'] if hf else c['dt_limit']
        N, G, width, T = c['state_size'], c['n_groups'], c['head_dim'], len(tokens)
        inner = int(c['expand'] * c['hidden_size'])
        H, parts = inner // width, 1 if hf else G
        x = P['backbone.embeddings.weight'][tokens]
        for i in range(c['num_hidden_layers']):
            m = f'backbone.layers.{i}.mixer.'
            u = r.linear(P, m + 'in_proj', r.rms(x, P[f'backbone.layers.{i}.norm.weight'], eps))
            z, xbc, dt = u[:, :inner], u[:, inner:2 * inner + 2 * G * N], u[:, 2 * inner + 2 * G * N:]
            xbc = r.conv(P, m + 'conv1d', xbc, r.silu)
            v = r.heads(xbc[:, :inner], H)
            k, q = (np.repeat(r.heads(y, G), H // G, 1) for y in (xbc[:, inner:inner + G * N], xbc[:, inner + G * N:]))
            dt = np.clip(r.softplus(dt + P[m + 'dt_bias']), lo, hi)
            y = r.recurrence(q, k, v, 1.0, -np.exp(P[m + 'A_log']) * dt, dt) + P[m + 'D'].reshape(H, -1) * v
            y = self.gated_norm(P, m, y.reshape(T, inner), r.silu(z), parts, eps, not hf and c['norm_before_gate'])
            x = x + r.linear(P, m + 'out_proj', y)
        head = P['backbone.embeddings.weight'] if c['tie_word_embeddings'] else P['lm_head.weight']
        return r.rms(x, P['backbone.norm_f.weight'], eps) @ head.T

    def gated_norm(self, P, m, y, gate, parts, eps, norm_first):
        weight = P.get(m + 'norm.weight')
        if weight is None:
            return y * gate
        norm = lambda t: self.ref.rms(t.reshape(len(t), parts, -1), None, eps).reshape(len(t), -1) * weight
        return norm(y) * gate if norm_first else norm(y * gate)

    def biased_xlstm(self, P, c, tokens):
        """use_bias: every linear map, the norms of the blocks and that of the heads, but not the last norm."""
        r, eps = self.ref, c['norm_eps']
        norm = lambda name, x: r.rms(x, P[name + '.weight'], eps) + P[name + '.bias']
        x = P['backbone.embeddings.weight'][tokens]
        for i in range(c['num_hidden_layers']):
            L = f'backbone.blocks.{i}.'
            m = L + 'mlstm_layer.'
            u = norm(L + 'norm_mlstm', x)
            shift = r.sigmoid(r.linear(P, m + 'ogate_preact', u)) * P[m + 'multihead_norm.bias']
            x = x + r.mlstm(P, c, m, u) + shift @ P[m + 'out_proj.weight'].T
            u = norm(L + 'norm_ffn', x)
            x = x + r.linear(P, L + 'ffn.proj_down',
                             r.silu(r.linear(P, L + 'ffn.proj_up_gate', u)) * r.linear(P, L + 'ffn.proj_up', u))
        head = P['backbone.embeddings.weight'] if c['tie_word_embeddings'] else P['lm_head.weight']
        return r.cap(r.rms(x, P['backbone.out_norm.weight'], eps) @ head.T, c['output_logit_soft_cap'])

    def scaled_rope(self, c):
        """RoPE with the frequencies of rope_scaling or rope_parameters (models.md 9.2)."""
        s = c.get('rope_parameters') or c.get('rope_scaling') or {}
        kind = s.get('rope_type', s.get('type', 'default'))

        def frequencies(theta, width):
            w = theta ** (-np.arange(0, width, 2) / width)
            if kind == 'linear':
                return w / s['factor']
            if kind == 'llama3':
                length, low, high = (s[n] for n in
                                     ('original_max_position_embeddings', 'low_freq_factor', 'high_freq_factor'))
                wave = 2 * math.pi / w
                a = (length / wave - low) / (high - low)
                mixed = (1 - a) * w / s['factor'] + a * w
                return np.where(wave > length / low, w / s['factor'], np.where(wave < length / high, w, mixed))
            return w

        def rope(x, theta, rot=None):
            angle = np.arange(len(x))[:, None, None] * frequencies(theta, x.shape[-1])
            x1, x2 = np.split(x, 2, -1)
            return np.concatenate([x1 * np.cos(angle) - x2 * np.sin(angle), x2 * np.cos(angle) + x1 * np.sin(angle)],
                                  -1)
        return rope


def open_reference(shared):
    """The reference, or None where the golden models are absent."""
    golden = os.path.join(shared, 'golden')
    return Reference(golden) if os.path.exists(os.path.join(golden, 'ref_models.py')) else None
