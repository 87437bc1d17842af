# SPDX-License-Identifier: Apache-2.0
"""The variations: one line a config of each public class that differs from the golden models, and where it may hurt.

A case is (name, config, options). Options: tokens, split (ids read as prompt), equal (that many equal ids in the
middle), long (gates that forget little), scale (pairs of a part of names and a factor, which make epsilons count); of
the files only: only (the name under which a tied map's tensors lie), names
(pairs of spellings), float32 (ends of names that are F32 among BF16, as public files have them), spelling (matrices
that are rows of one), file (another spelling of the config), gradient (how a name differs in the gradients). The first
case of a model type is the one that the audit of keys starts from.
"""


def fla(kind, d=48, layers=1, **keys):
    return dict(model_type=kind, hidden_size=d, num_hidden_layers=layers, vocab_size=61, intermediate_size=40,
                norm_eps=1e-5, bos_token_id=1, eos_token_id=2, **keys)


def mamba2_fla(d=48, layers=1, **keys):
    return dict(model_type='mamba2', hidden_size=d, num_hidden_layers=layers, vocab_size=61, norm_eps=1e-5, **keys)


def mamba2_hf(d=48, layers=1, **keys):
    return dict(model_type='mamba2', hidden_size=d, num_hidden_layers=layers, vocab_size=61, layer_norm_epsilon=1e-5,
                **keys)


def llama(d=48, layers=1, **keys):
    return dict(model_type='llama', hidden_size=d, num_hidden_layers=layers, vocab_size=61, intermediate_size=40,
                rms_norm_eps=1e-5, **keys)


def xlstm(d=48, layers=1, **keys):
    return dict(model_type='xlstm', hidden_size=d, num_hidden_layers=layers, vocab_size=61, **keys)


def gemma(d=48, layers=1, **keys):
    return dict(model_type='recurrent_gemma', hidden_size=d, num_hidden_layers=layers, vocab_size=61,
                intermediate_size=64, **keys)


SMALL_QK = dict(scale=[('q_conv1d', 0.01), ('k_conv1d', 0.005)])
FLOAT32 = ('A_log', 'dt_bias', 'lambda_params', '.D', 'norm.weight')
LLAMA3 = dict(rope_type='llama3', factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=32)
SWA = dict(layers=[1], num_heads=4, num_kv_heads=2, window_size=20, rope_theta=500.0)

SSM = dict(d_model=48, n_layer=1, vocab_size=61, d_intermediate=0, rms_norm=True, residual_in_fp32=True,
           fused_add_norm=True, pad_vocab_size_multiple=4, tie_embeddings=False, attn_layer_idx=[],
           ssm_cfg=dict(layer='Mamba2', headdim=16, d_state=24, ngroups=2, rmsnorm=True, norm_before_gate=False))

CASES = [
    ('mesa: 3 heads of 24', fla('mesa_net', num_heads=3, head_dim=24), {}),
    ('mesa: 1 head of 40, gate, bound 0.1', fla('mesa_net', num_heads=1, head_dim=40, use_output_gate=True,
                                                lambda_lower_bound=0.1), {}),
    ('mesa: bound 0, taps 2', fla('mesa_net', num_heads=2, head_dim=16, lambda_lower_bound=0, conv_size=2),
     dict(float32=FLOAT32)),
    ('mesa: a head of 80', fla('mesa_net', num_heads=1, head_dim=80, conv_size=3), {}),
    ('mesa: a head of 128, 5 steps', fla('mesa_net', num_heads=1, head_dim=128, max_cg_step_training=5), {}),
    ('mesa: heads of 7, tied', fla('mesa_net', num_heads=5, head_dim=7, tie_word_embeddings=True), {}),
    ('mesa: taps 1, width from the ratio', fla('mesa_net', num_heads=2, head_dim=16, conv_size=1) |
     dict(intermediate_size=None, hidden_ratio=5), {}),
    ('mesa: the paper\'s backbone', fla('mesa_net', num_heads=2, head_dim=24, tie_word_embeddings=True,
                                        scale_embeddings=True, logits_soft_cap=30.0, gamma_cap_b=0.9975), {}),
    ('mesa: cap on gamma, equal ids', fla('mesa_net', num_heads=2, head_dim=24, gamma_cap_b=0.9),
     dict(tokens=140, equal=60)),
    ('mesa: short queries and keys', fla('mesa_net', num_heads=2, head_dim=16), SMALL_QK),
    ('mesa: long memory', fla('mesa_net', num_heads=2, head_dim=24),
     dict(tokens=330, split=300, long=True, equal=80)),
    ('mesa: hybrid with a window', fla('mesa_net', layers=3, num_heads=2, head_dim=24, attn=SWA), {}),
    ('mesa: hybrid, list of softmax layers', fla('mesa_net', layers=3, num_heads=2, head_dim=24, attn=[
        dict(layers=[0], num_heads=2, qkv_bias=True), dict(layers=[2], num_heads=6, num_kv_heads=3, window_size=7)]),
     {}),

    ('gdn: 3 heads of 24, expand 2', fla('gated_deltanet', num_heads=3, head_dim=24), {}),
    ('gdn: value groups', fla('gated_deltanet', num_heads=2, num_v_heads=6, head_dim=12, expand_v=1.5,
                              allow_neg_eigval=True), dict(float32=FLOAT32)),
    ('gdn: no gate', fla('gated_deltanet', num_heads=1, head_dim=40, expand_v=1, use_gate=False), {}),
    ('gdn: no convolution', fla('gated_deltanet', num_heads=2, head_dim=16, use_short_conv=False), {}),
    ('gdn: a head of 96, taps 5', fla('gated_deltanet', num_heads=1, head_dim=96, expand_v=0.5, conv_size=5,
                                      tie_word_embeddings=True), {}),
    ('gdn: a head of 256 by 512', fla('gated_deltanet', d=64, num_heads=1, head_dim=256), {}),
    ('gdn: short queries and keys', fla('gated_deltanet', num_heads=2, head_dim=16), SMALL_QK),
    ('gdn: long memory', fla('gated_deltanet', num_heads=2, num_v_heads=4, head_dim=16),
     dict(tokens=330, split=290, long=True, equal=70)),
    ('gdn: hybrid', fla('gated_deltanet', layers=2, num_heads=2, head_dim=24, attn=dict(layers=[0], num_heads=3)), {}),

    ('delta: 3 heads of 16', fla('delta_net', num_heads=3), {}),
    ('delta: gate, expanded', fla('delta_net', num_heads=2, expand_k=0.5, expand_v=2.0, use_gate=True), {}),
    ('delta: relu, negative eigenvalues', fla('delta_net', num_heads=2, qk_activation='relu', allow_neg_eigval=True),
     {}),
    ('delta: elu, sums', fla('delta_net', num_heads=2, qk_activation='elu', qk_norm='sum'), {}),
    ('delta: identity', fla('delta_net', num_heads=1, qk_activation='identity'), {}),
    ('delta: identity, no convolution', fla('delta_net', num_heads=2, qk_activation='identity', use_short_conv=False),
     {}),
    ('delta: relu, no convolution, taps ignored',
     fla('delta_net', num_heads=2, qk_activation='relu', use_short_conv=False, conv_size=7), {}),
    ('delta: silu, no convolution', fla('delta_net', num_heads=2, use_short_conv=False), {}),
    ('delta: no beta', fla('delta_net', num_heads=2, use_beta=False), {}),
    ('delta: no beta, negative eigenvalues', fla('delta_net', num_heads=2, use_beta=False, allow_neg_eigval=True), {}),
    ('delta: heads of 80', fla('delta_net', d=80, num_heads=1, use_output_norm=False, head_dim=13), {}),
    ('delta: a head of 128', fla('delta_net', d=128, num_heads=1), {}),
    ('delta: short queries and keys', fla('delta_net', num_heads=2), SMALL_QK),
    ('delta: long', fla('delta_net', num_heads=2), dict(tokens=330, split=260, equal=70)),

    ('gla: 3 heads', fla('gla', num_heads=3, expand_k=1), {}),
    ('gla: shared keys', fla('gla', num_heads=4, num_kv_heads=2), {}),
    ('gla: one key head', fla('gla', num_heads=3, num_kv_heads=1, expand_v=2), {}),
    ('gla: convolution, shared keys', fla('gla', num_heads=4, num_kv_heads=2, use_short_conv=True, conv_size=3), {}),
    ('gla: convolution and feature map', fla('gla', num_heads=2, use_short_conv=True, feature_map='relu'), {}),
    ('gla: clamp', fla('gla', num_heads=2, clamp_min=-0.05), {}),
    ('gla: sigmoid map, no gate', fla('gla', num_heads=2, feature_map='sigmoid', use_output_gate=False), {}),
    ('gla: silu map, plain norm name', fla('gla', num_heads=2, feature_map='swish', fuse_norm=False), {}),
    ('gla: norm without weight', fla('gla', num_heads=2, elementwise_affine=False), {}),
    ('gla: keys that no layer reads', fla('gla', num_heads=2, gate_low_rank_dim=8, gate_logit_normalizer=4,
                                          use_gk=False, use_gv=True), {}),
    ('gla: a head of 80 by 160', fla('gla', d=80, num_heads=1, expand_k=1, expand_v=2), {}),
    ('gla: a head of 256 by 512', fla('gla', d=256, num_heads=1, expand_k=1, expand_v=2), {}),
    ('gla: long memory', fla('gla', num_heads=2, expand_k=1), dict(tokens=330, split=300, long=True, equal=80)),

    ('kda: 3 heads of 24', fla('kda', num_heads=3, head_dim=24), {}),
    ('kda: value groups, negative eigenvalues', fla('kda', num_heads=2, num_v_heads=4, head_dim=12, expand_v=1.5,
                                                    allow_neg_eigval=True), {}),
    ('kda: bounded', fla('kda', num_heads=2, head_dim=16, lower_bound=-5, safe_gate=True), {}),
    ('kda: bounded, without its kernel', fla('kda', num_heads=1, head_dim=40, lower_bound=-1.5), {}),
    ('kda: no convolution', fla('kda', num_heads=2, head_dim=16, use_short_conv=False), {}),
    ('kda: a head of 96', fla('kda', num_heads=1, head_dim=96, expand_v=0.25, conv_size=2), {}),
    ('kda: a head of 128', fla('kda', d=64, num_heads=1), {}),
    ('kda: short queries and keys', fla('kda', num_heads=2, head_dim=16), SMALL_QK),
    ('kda: long memory', fla('kda', num_heads=2, head_dim=16), dict(tokens=330, split=300, long=True, equal=80)),

    ('retnet: 3 heads of 16', fla('retnet', num_heads=3), {}),
    ('retnet: shared keys, map', fla('retnet', num_heads=4, num_kv_heads=2, expand_v=1, feature_map='relu'), {}),
    ('retnet: no gate', fla('retnet', num_heads=1, use_output_gate=False), {}),
    ('retnet: norm without weight, ignored convolution',
     fla('retnet', num_heads=2, elementwise_affine=False, use_short_conv=True), {}),
    ('retnet: width without a ratio', fla('retnet', d=240, num_heads=6) | dict(intermediate_size=None,
                                                                                hidden_ratio=None), {}),
    ('retnet: width from its own ratio', {k: v for k, v in fla('retnet', d=240, num_heads=6).items()
                                          if k != 'intermediate_size'}, {}),
    ('retnet: a head of 256 by 512', fla('retnet', d=256, num_heads=1), {}),
    ('retnet: long, 8 heads', fla('retnet', d=80, num_heads=8, expand_v=1), dict(tokens=330, split=300, equal=60)),

    ('linear: product', fla('linear_attn', num_heads=3), {}),
    ('linear: product, tied', fla('linear_attn', num_heads=2, tie_feature_map_qk=True), {}),
    ('linear: product, tied, one name', fla('linear_attn', num_heads=2, tie_feature_map_qk=True),
     dict(only='feature_map_k')),
    ('linear: hedgehog, normaliser', fla('linear_attn', num_heads=2, feature_map='hedgehog', norm_feature_map=True),
     {}),
    ('linear: hedgehog, tied, shared keys',
     fla('linear_attn', num_heads=4, num_kv_heads=2, feature_map='hedgehog', tie_feature_map_qk=True), {}),
    ('linear: t2r, sums', fla('linear_attn', num_heads=2, feature_map='t2r', norm_q=True, norm_k=True), {}),
    ('linear: t2r, tied', fla('linear_attn', num_heads=2, feature_map='t2r', tie_feature_map_qk=True), {}),
    ('linear: dpfp', fla('linear_attn', num_heads=4, feature_map='dpfp'), {}),
    ('linear: elu, one key head, normaliser',
     fla('linear_attn', num_heads=3, num_kv_heads=1, feature_map='elu', norm_feature_map=True), {}),
    ('linear: relu, expanded', fla('linear_attn', num_heads=2, feature_map='relu', expand_k=2, expand_v=0.5), {}),
    ('linear: identity', fla('linear_attn', num_heads=1, feature_map='identity'), {}),
    ('linear: norm without weight', fla('linear_attn', num_heads=2, feature_map='elu', elementwise_affine=False), {}),
    ('linear: dpfp of a head of 80', fla('linear_attn', d=80, num_heads=1, feature_map='dpfp'), {}),
    ('linear: hedgehog of a head of 128',
     fla('linear_attn', d=128, num_heads=1, feature_map='hedgehog', norm_feature_map=True), {}),
    ('linear: small sums', fla('linear_attn', num_heads=2, feature_map='elementwise_product', norm_q=True),
     dict(scale=[('layer1', 0.05), ('layer1.bias', 0), ('q_proj', 0.1)])),
    ('linear: long, normaliser', fla('linear_attn', num_heads=2, feature_map='elu', norm_feature_map=True),
     dict(tokens=330, split=300, equal=80)),

    ('transformer: 3 heads', fla('transformer', num_heads=3), {}),
    ('transformer: gate and up in one', fla('transformer', num_heads=2), dict(spelling='old gate_proj')),
    ('transformer: qk norm, biases, window', fla('transformer', num_heads=4, num_kv_heads=2, qk_norm=True,
                                                 qkv_bias=True, window_size=10, rope_theta=300.0), {}),
    ('transformer: a head of 80, tied', fla('transformer', d=80, num_heads=1, tie_word_embeddings=True), {}),
    ('transformer: a window of 1', fla('transformer', num_heads=2, num_kv_heads=1, window_size=1), {}),
    ('transformer: a head of 256', fla('transformer', d=256, num_heads=1), {}),
    ('transformer: short queries and keys', fla('transformer', num_heads=2, qk_norm=True),
     dict(scale=[('q_proj', 0.01), ('k_proj', 0.003)])),
    ('transformer: heads of 6, long', fla('transformer', num_heads=8, num_kv_heads=2, qk_norm=True),
     dict(tokens=200, split=150)),

    ('llama: 3 heads, biases', llama(num_attention_heads=3, attention_bias=True, mlp_bias=True), {}),
    ('llama: its own head width', llama(num_attention_heads=4, num_key_value_heads=1, head_dim=24), {}),
    ('llama: linear scaling', llama(num_attention_heads=2, rope_scaling=dict(type='linear', factor=4.0)), {}),
    ('llama: llama3 scaling', llama(num_attention_heads=2, rope_theta=5000.0, rope_scaling=LLAMA3), {}),
    ('llama: rope_parameters', llama(num_attention_heads=2, tie_word_embeddings=True,
                                     rope_parameters=dict(LLAMA3, rope_theta=800.0)), {}),

    ('mamba2: 3 groups, norm over all', mamba2_hf(num_heads=6, head_dim=16, state_size=24, n_groups=3), {}),
    ('mamba2: keys of the other dialect', mamba2_hf(num_heads=4, head_dim=24, state_size=16, n_groups=2,
                                                    norm_before_gate=True, D_has_hdim=True, rms_norm=False,
                                                    rmsnorm=False, dt_limit=[0.1, 0.2]), {}),
    ('mamba2: limits, biases', mamba2_hf(num_heads=3, head_dim=32, state_size=40, n_groups=1, use_bias=True,
                                         time_step_limit=[0.02, 0.3]), {}),
    ('mamba2: 3 groups, norm a group', mamba2_fla(head_dim=16, state_size=24, n_groups=3, layers=2), {}),
    ('mamba2: norm before gate', mamba2_fla(head_dim=24, state_size=16, n_groups=2, norm_before_gate=True),
     dict(float32=FLOAT32)),
    ('mamba2: no norm, no bias of the convolution',
     mamba2_fla(head_dim=96, state_size=8, rmsnorm=False, use_conv_bias=False, conv_kernel=2), {}),
    ('mamba2: skip a channel, limits, tied', mamba2_fla(head_dim=8, state_size=80, D_has_hdim=True,
                                                        dt_limit=[0.01, 0.5], tie_word_embeddings=True), {}),
    ('mamba2: expand 3', mamba2_fla(head_dim=36, state_size=20, expand=3), {}),
    ('mamba2: mamba_ssm', mamba2_fla(head_dim=16, state_size=24, n_groups=2) | dict(vocab_size=64),
     dict(file=SSM, names=[('embeddings', 'embedding')], gradient=('embeddings', 'embedding'))),
    ('mamba2: a state of 256', mamba2_fla(head_dim=24, state_size=256, n_groups=4), {}),
    ('mamba2: long memory', mamba2_fla(head_dim=24, state_size=16, n_groups=2),
     dict(tokens=330, split=300, long=True, equal=80)),

    ('xlstm: 3 heads', xlstm(num_heads=3), {}),
    ('xlstm: other names of projections', xlstm(num_heads=2, layers=2),
     dict(names=[('.q.', '.query.'), ('.k.', '.key.'), ('.v.', '.value.')])),
    ('xlstm: fused', xlstm(num_heads=2, weight_mode='fused'), dict(spelling='fused xlstm')),
    ('xlstm: biases', xlstm(num_heads=2, layers=2, use_bias=True), {}),
    ('xlstm: biases, fused', xlstm(num_heads=3, weight_mode='fused', use_bias=True), dict(spelling='fused xlstm')),
    ('xlstm: other names of sizes', dict(model_type='xlstm', embedding_dim=48, num_blocks=1, vocab_size=61,
                                         num_heads=1, qk_dim_factor=1.0, v_dim_factor=0.5), {}),
    ('xlstm: tight caps', xlstm(num_heads=2, gate_soft_cap=1.5, output_logit_soft_cap=2.0, norm_eps=1e-4, eps=1e-3,
                                ffn_proj_factor=1.3, ffn_round_up_to_multiple_of=8, tie_word_embeddings=True), {}),
    ('xlstm: a head of 80', xlstm(d=80, num_heads=1), {}),
    ('xlstm: a head of 256', xlstm(d=256, num_heads=1), {}),
    ('xlstm: long memory', xlstm(num_heads=2), dict(tokens=330, split=300, long=True, equal=80)),

    ('griffin: hawk, 3 blocks', gemma(num_attention_heads=3, block_types=['recurrent']), {}),
    ('griffin: usual blocks, one key head', gemma(layers=3, num_attention_heads=4, num_key_value_heads=1,
                                                  attention_window_size=20), {}),
    ('griffin: other widths, biases', gemma(layers=2, num_attention_heads=3, lru_width=72, head_dim=24,
                                            attention_window_size=9, attention_bias=True, conv1d_width=3,
                                            block_types=['attention', 'recurrent']), {}),
    ('griffin: rope_parameters, cap, untied',
     gemma(layers=1, num_attention_heads=2, block_types=['attention'], logits_soft_cap=5.0, tie_word_embeddings=False,
           partial_rotary_factor=0.25, rope_parameters=dict(rope_theta=500.0, partial_rotary_factor=0.25,
                                                            rope_type='default')), {}),
    ('griffin: all channels rotated', gemma(layers=1, num_attention_heads=2, block_types=['attention'],
                                            partial_rotary_factor=1.0, rope_theta=700.0), {}),
    ('griffin: a head of 256', gemma(num_attention_heads=1, head_dim=256, block_types=['attention', 'recurrent'],
                                      layers=2), {}),
    ('griffin: long', gemma(num_attention_heads=2, block_types=['recurrent']), dict(tokens=330, split=300, equal=80)),

    ('recurrence: none', fla('recurrence', num_heads=3, head_dim=24), {}),
    ('recurrence: head decay, bare', fla('recurrence', num_heads=2, head_dim=16, recurrence=dict(
        decay='head', conv=False, qk_norm=False, out_norm=False, out_gate=True)), {}),
    ('recurrence: scalar, input gate', fla('recurrence', num_heads=1, head_dim=40, recurrence=dict(
        decay='scalar', input_gate=True, out_gate=True)), {}),
    ('recurrence: channel, delta', fla('recurrence', num_heads=2, head_dim=16, conv_size=3, recurrence=dict(
        decay='channel', update='delta')), {}),
    ('recurrence: scalar, delta, no gate', fla('recurrence', num_heads=2, head_dim=16, recurrence=dict(
        decay='scalar', update='delta', input_gate=False)), dict(long=True, tokens=140)),
    ('named layers', fla('mesa_net', layers=4, num_heads=2, head_dim=24, layer_types=[
        'gated_deltanet', 'attention', 'recurrence', 'mesa_net'], attn=dict(num_heads=3, window_size=12)), {}),
    ('named layers: keys of their own', fla('mesa_net', layers=3, num_heads=2, head_dim=16, layer_types=[
        dict(mixer='mesa_net', num_heads=3, head_dim=8), dict(mixer='kda', lower_bound=-3.0), 'attention'],
        attn=dict(num_heads=6), kda=dict(expand_v=2)), {}),
    ('named layers: top-level softmax keys', fla('gla', layers=3, num_heads=4, layer_types=[
        'linear_attn', 'attention', 'retnet'], feature_map='relu', qk_norm=True), {}),
]

# Configs that must not load, and the key that the message must name.
REFUSED = [
    (fla('mesa_net', num_heads=2, head_dim=16, attnres_block_size=2), 'attnres_block_size'),
    (fla('mesa_net', num_heads=2, head_dim=16, hidden_act='powlu'), 'hidden_act'),
    (fla('mesa_net', num_heads=2, head_dim=256), 'head_dim'),
    (fla('gated_deltanet', num_heads=4, num_v_heads=6, head_dim=8), 'num_heads'),
    (fla('gated_deltanet', num_heads=2, head_dim=24, expand_v=1.3), 'expand_v'),
    (fla('delta_net', num_heads=5), 'expand_k'),
    (fla('delta_net', num_heads=2, qk_norm='none'), 'qk_norm'),
    (fla('gla', num_heads=2, feature_map='gelu'), 'feature_map'),
    (fla('linear_attn', num_heads=2, feature_map='exp'), 'feature_map'),
    (fla('kda', num_heads=2, head_dim=8, lower_bound=2), 'lower_bound'),
    (fla('retnet', num_heads=4, num_kv_heads=3), 'num_kv_heads'),
    (fla('mesa_net', layers=2, num_heads=2, head_dim=16, attn=dict(layers=[2], num_heads=2)), 'layers'),
    (fla('mesa_net', layers=2, num_heads=2, head_dim=16, attn=dict(layers=[1])), 'num_heads'),
    (fla('mesa_net', num_heads=2, head_dim=16, num_loops=0), 'num_loops'),
    (llama(num_attention_heads=2, rope_scaling=dict(rope_type='yarn', factor=4.0)), 'rope_type'),
    (llama(num_attention_heads=2, rope_scaling=dict(rope_type='dynamic', factor=4.0)), 'rope_type'),
    (llama(num_attention_heads=2, partial_rotary_factor=0.5), 'partial_rotary_factor'),
    (llama(num_attention_heads=2, hidden_act='gelu'), 'hidden_act'),
    (mamba2_hf(num_heads=4, head_dim=16), 'num_heads'),
    (mamba2_hf(num_heads=6, head_dim=16, n_groups=4), 'n_groups'),
    (mamba2_hf(num_heads=6, head_dim=16, hidden_act='gelu', n_groups=1), 'hidden_act'),
    (xlstm(num_heads=2, add_out_norm=False), 'add_out_norm'),
    (xlstm(num_heads=2, weight_mode='other'), 'weight_mode'),
    (SSM | dict(ssm_cfg=dict(layer='Mamba1')), 'layer'),
    (SSM | dict(d_intermediate=64), 'd_intermediate'),
    (SSM | dict(attn_layer_idx=[0]), 'attn_layer_idx'),
    (SSM | dict(rms_norm=False), 'rms_norm'),
    (gemma(num_attention_heads=2, hidden_activation='silu'), 'hidden_activation'),
    (gemma(num_attention_heads=2, block_types=['mamba']), 'block_types'),
    (fla('rwkv7', num_heads=2), 'model_type'),
]
