# SPDX-License-Identifier: Apache-2.0
"""Every key of the public configuration classes: what changing it must do.

SAME: the public code computes the same numbers, so must we, bit for bit. COUNTS: the numbers, or the tensors asked for,
must change (that they change rightly is what the cases compare). REFUSED: the message names the key. A key that is
missing here is missing in the audit, so the tables follow the classes' own lists.
"""
import json
import os
import subprocess

import cases
import tensors

SAME, COUNTS, REFUSED = 'same', 'counts', 'refused'
HOUSEKEEPING = {
    'use_cache': [False], 'bos_token_id': [5, None], 'eos_token_id': [7, [3, 4], None], 'pad_token_id': [9, None],
    'initializer_range': [0.5], 'torch_dtype': ['float16'], 'dtype': ['float32', None], 'transformers_version': ['4.2'],
    'architectures': [['Another']], 'max_position_embeddings': [17], 'chunk_size_feed_forward': [3],
    'output_hidden_states': [True], '_name_or_path': ['x'], 'id2label': [{}], 'attention_dropout': [0.5],
}
FUSED = {'fuse_norm': [False], 'fuse_swiglu': [False], 'fuse_cross_entropy': [False],
         'fuse_linear_cross_entropy': [True], 'use_l2warp': [True], 'attn_mode': ['fused_recurrent']}
FLA_COUNTS = {'norm_eps': [0.1], 'tie_word_embeddings': [True], 'hidden_size': [96], 'num_hidden_layers': [2],
              'vocab_size': [62], 'intermediate_size': [48, None],
              'attn': [dict(layers=[0], num_heads=2), [dict(layers=[0], num_heads=2, window_size=4)]]}
FLA_REFUSED = {'attnres_block_size': [2], 'hidden_act': ['powlu', 'gelu'], 'num_loops': [0], 'num_experts': [4],
               'quantization_config': [dict(bits=4)]}


def fla(same=None, counts=None, refused=None):
    # hidden_ratio counts only without intermediate_size
    return {SAME: {**HOUSEKEEPING, **FUSED, 'hidden_ratio': [7, None], 'attn': [None], **(same or {})},
            COUNTS: {**FLA_COUNTS, **(counts or {})}, REFUSED: {**FLA_REFUSED, **(refused or {})}}


DELTA = {'conv_size': [3], 'use_short_conv': [False], 'allow_neg_eigval': [True]}
GROUPS = {'num_heads': [6], 'num_kv_heads': [1], 'expand_k': [2], 'expand_v': [3], 'elementwise_affine': [False]}
TABLES = {
    'mesa_net': fla(
        same={'use_short_conv': [False], 'max_cg_step_decoding': [3], 'max_cg_step_training': [3], 'conv_bias': [True]},
        counts={'use_output_gate': [True], 'conv_size': [3], 'num_heads': [2], 'head_dim': [16],
                'lambda_lower_bound': [1.0], 'gamma_cap_b': [0.5], 'scale_embeddings': [True],
                'logits_soft_cap': [1.0]}),
    'gated_deltanet': fla(
        counts={**DELTA, 'expand_v': [1], 'use_gate': [False], 'head_dim': [12], 'num_heads': [1],
                'num_v_heads': [6]}),
    'delta_net': fla(
        same={'use_output_norm': [False], 'head_dim': [5]},
        counts={**DELTA, 'expand_k': [2], 'expand_v': [2], 'use_gate': [True], 'use_beta': [False], 'num_heads': [2],
                'qk_norm': ['sum'], 'qk_activation': ['relu', 'elu', 'identity']},
        refused={'qk_norm': ['none'], 'qk_activation': ['gelu']}),
    'gla': fla(
        same={'use_gk': [False], 'use_gv': [True], 'conv_size': [3], 'gate_low_rank_dim': [8],
              'gate_logit_normalizer': [4]},
        counts={**GROUPS, 'feature_map': ['relu', 'sigmoid', 'swish'], 'use_short_conv': [True],
                'use_output_gate': [False], 'clamp_min': [-0.01]},
        refused={'feature_map': ['gelu', 'sqrelu', 'logsigmoid']}),
    'kda': fla(
        same={'safe_gate': [True]},
        counts={**DELTA, 'expand_v': [2], 'head_dim': [16], 'num_heads': [1], 'num_v_heads': [6],
                'lower_bound': [-5]}),
    'retnet': fla(
        same={'use_short_conv': [True], 'conv_size': [3]},
        counts={**GROUPS, 'feature_map': ['relu'], 'use_output_gate': [False]},
        refused={'feature_map': ['gelu']}),
    'linear_attn': fla(
        counts={**GROUPS, 'feature_map': ['hedgehog', 't2r', 'dpfp', 'elu', 'relu', 'identity'],
                'norm_q': [True], 'norm_k': [True], 'norm_feature_map': [True]},
        refused={'feature_map': ['gelu']}),
    'transformer': fla(
        same={'elementwise_affine': [False], 'rope_scaling': [dict(type='linear', factor=2.0)], 'attn': [None]},
        counts={'num_heads': [2], 'num_kv_heads': [1], 'qkv_bias': [True], 'qk_norm': [True], 'window_size': [5],
                'rope_theta': [100.0], 'attn': []}),
    'llama': {
        SAME: {**HOUSEKEEPING, 'pretraining_tp': [2], 'rope_scaling': [dict(rope_type='default')],
               'rope_parameters': [dict(rope_type='default', rope_theta=10000.0)],
               'layer_types': [['full_attention']], 'partial_rotary_factor': [1.0]},
        COUNTS: {'rms_norm_eps': [0.1], 'tie_word_embeddings': [True], 'hidden_size': [96], 'num_hidden_layers': [2],
                 'vocab_size': [62], 'intermediate_size': [48], 'num_attention_heads': [2], 'num_key_value_heads': [1],
                 'head_dim': [32], 'attention_bias': [False], 'mlp_bias': [False], 'rope_theta': [100.0],
                 'rope_scaling': [dict(type='linear', factor=2.0), cases.LLAMA3],
                 'rope_parameters': [dict(rope_type='default', rope_theta=100.0), dict(rope_theta=100.0)]},
        REFUSED: {'hidden_act': ['gelu'], 'partial_rotary_factor': [0.5], 'num_local_experts': [2],
                  'layer_types': [['sliding_attention']]}},
    'mamba2': {
        SAME: {**HOUSEKEEPING, 'chunk_size': [32], 'residual_in_fp32': [False], 'rescale_prenorm_residual': [True],
               'time_step_min': [0.5], 'time_step_max': [0.6], 'time_step_floor': [0.4], 'time_step_rank': [3],
               'rms_norm': [False], 'norm_before_gate': [True], 'D_has_hdim': [True], 'rmsnorm': [False],
               'intermediate_size': [96], 'dt_limit': [[0.1, 0.2]], 'hidden_act': ['silu', 'swish']},
        COUNTS: {'layer_norm_epsilon': [0.1], 'tie_word_embeddings': [True], 'hidden_size': [24],
                 'num_hidden_layers': [2], 'vocab_size': [62], 'state_size': [12], 'expand': [3], 'conv_kernel': [3],
                 'use_bias': [True], 'use_conv_bias': [False], 'num_heads': [3], 'head_dim': [8], 'n_groups': [1],
                 'time_step_limit': [[0.01, 0.05]]},
        REFUSED: {'hidden_act': ['gelu']}},
    'xlstm': {
        SAME: {**HOUSEKEEPING, 'norm_reduction_force_float32': [False], 'chunkwise_kernel': ['x'],
               'sequence_kernel': ['x'], 'step_kernel': ['x'], 'mode': ['inference'], 'chunk_size': [16],
               'return_last_states': [False], 'weight_mode': ['fused'], 'autocast_kernel_dtype': ['bfloat16'],
               'inference_state_dtype': ['bfloat16'], 'max_inference_chunksize': [8], 'embedding_dim': [48, None],
               'num_blocks': [1, None]},
        COUNTS: {'tie_word_embeddings': [True], 'hidden_size': [96], 'num_hidden_layers': [2], 'vocab_size': [62],
                 'num_heads': [1], 'norm_eps': [0.1], 'eps': [0.5], 'qk_dim_factor': [1.0], 'v_dim_factor': [0.5],
                 'ffn_proj_factor': [4.0], 'ffn_round_up_to_multiple_of': [100], 'gate_soft_cap': [0.5],
                 'output_logit_soft_cap': [0.5], 'use_bias': [True]},
        REFUSED: {'add_out_norm': [False], 'weight_mode': ['other']}},
    'recurrent_gemma': {
        SAME: {**HOUSEKEEPING, 'w_init_variance_scale': [1.0], 'final_w_init_variance_scale': [1.0],
               'lru_width': [48, None], 'rope_theta': [5.0], 'num_key_value_heads': [1],
               'attention_window_size': [5], 'attention_bias': [True]},     # the first case has no softmax layer
        COUNTS: {'rms_norm_eps': [0.1], 'hidden_size': [96], 'num_hidden_layers': [2], 'vocab_size': [62],
                 'intermediate_size': [96], 'num_attention_heads': [2], 'lru_width': [72], 'conv1d_width': [3],
                 'logits_soft_cap': [1.0], 'tie_word_embeddings': [False],
                 'block_types': [['attention'], ['attention', 'recurrent']]},
        REFUSED: {'hidden_activation': ['silu'], 'block_types': [['mamba']]}},
}


def logits_of(trainer, folder, config):
    """The bytes of the logits, or the refusal."""
    with open(os.path.join(folder, 'config.json'), 'w') as f:
        json.dump(config, f)
    out = os.path.join(folder, 'out.safetensors')
    done = subprocess.run([trainer, 'logits', folder, '--tokens', '5,9,30,9,5,9,11,7', '--out', out, '--cg-mode',
                           'exact'], capture_output=True, text=True)
    if done.returncode != 0:
        return None, done.stderr.replace(folder, '').strip()
    with open(out, 'rb') as f:
        return f.read(), ''


def judge(kind, key, plain, changed, message):
    if kind == SAME:
        return changed == plain
    if kind == COUNTS:
        return changed != plain
    return changed is None and key in message


def audit(trainer, root, one_in):
    """Tries one change in `one_in`, and every refusal."""
    results, seen = [], 0
    for model_type, table in TABLES.items():
        folder = os.path.join(root, model_type)
        os.makedirs(folder, exist_ok=True)
        config = next(c for _, c, _ in cases.CASES if c['model_type'] == model_type)
        tensors.write(os.path.join(folder, 'model.safetensors'), tensors.random_weights(config, 1))
        plain, message = logits_of(trainer, folder, config)
        results.append(plain is not None)
        if plain is None:
            print(f'    FAIL {model_type}: {message}')
            continue
        for kind, changes in table.items():
            for key, values in changes.items():
                for value in values:
                    seen += 1
                    if seen % one_in != 0 and kind != REFUSED:
                        continue
                    changed, message = logits_of(trainer, folder, {**config, key: value})
                    results.append(judge(kind, key, plain, changed, message))
                    if not results[-1]:
                        print(f'    FAIL {model_type}: {key} {value!r} must be {kind}: {message or "it is not"}')
    print(f'keys of the configs: {len(results)} tried', flush=True)
    return results
