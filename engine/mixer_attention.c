// SPDX-License-Identifier: Apache-2.0
// Softmax attention: FLA's transformer and its hybrid layers, HF llama (models.md 1.5, 9).
//
//   q, k, v = W x (+ b), q and k RMS-normed a head where the config says so, then rotated (NeoX halves)
//   o = softmax(q k^T / sqrt(w)) v over the document, or the last `window` tokens of it;  y = W_o o (+ b)
//
// A windowed layer's keys and values are a ring in the state slot (constant size); a full layer's lie in KV pages.
#include "engine/config_internal.h"
#include "engine/forward_internal.h"
#include "engine/model_internal.h"

#include <math.h>
#include <stdlib.h>

enum attention_tensor { Q_PROJ, Q_BIAS, K_PROJ, K_BIAS, V_PROJ, V_BIAS, Q_NORM, K_NORM, O_PROJ, O_BIAS };

enum attention_kept { Q_PRE, K_PRE, Q, K, V, OUT, LSE };

static const float qk_norm_eps = 1e-5F; // fixed in the public code (models.md 9.1)

// Angular frequencies of the rotated pairs, with linear or Llama 3 scaling (models.md 9.2).
static float *rope_frequencies(const eng_attention_config *attention) {
    int32_t pairs = attention->rotary / 2;
    float *frequency = malloc(sizeof *frequency * (size_t)pairs);
    if (!frequency)
        return NULL;
    const double two_pi = 6.283185307179586476925286766559;
    for (int32_t i = 0; i < pairs; i++) {
        double omega = pow(attention->rope_theta, -2.0 * i / attention->rotary);
        if (attention->rope_scaling == ENG_ROPE_LINEAR)
            omega /= attention->rope_factor;
        if (attention->rope_scaling == ENG_ROPE_LLAMA3) {
            double length = attention->rope_original_length, wavelength = two_pi / omega;
            double low = attention->rope_low, high = attention->rope_high;
            double mix = (length / wavelength - low) / (high - low);
            mix = fmin(1.0, fmax(0.0, mix)); // beyond the ends: all scaled, or not at all
            omega = (1.0 - mix) * omega / attention->rope_factor + mix * omega;
        }
        frequency[i] = (float)omega;
    }
    return frequency;
}

static eng_status declare_storage(eng_model *model, int32_t layer, eng_error *error) {
    const eng_attention_config *attention = &model->config.layer[layer].attention;
    size_t key_bytes = sizeof(float) * (size_t)attention->kv_heads * (size_t)attention->head_width;
    if (attention->window > 0)
        eng_model_add_state(model, layer, 2 * key_bytes * (size_t)attention->window);
    else
        eng_model_add_pages(model, layer, 2 * key_bytes * KERN_PAGE_TOKENS);
    float *frequency = rope_frequencies(attention);
    int32_t constant = frequency ? eng_model_add_constant(model, frequency, attention->rotary / 2) : -1;
    if (constant < 0)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for the RoPE table");
    model->layer[layer].constant = constant;
    return ENG_OK;
}

static void read(eng_keys *keys, const eng_config *config, eng_layer_config *layer) {
    static const int32_t usual_heads = 32; // of flash-linear-attention's Transformer
    layer->attention = eng_config_attention(keys, config->hidden_size, usual_heads);
}

static eng_status declare(eng_model *model, int32_t layer, const char *prefix, eng_error *error) {
    const eng_config *config = &model->config;
    const eng_attention_config *attention = &config->layer[layer].attention;
    int64_t d = config->hidden_size, head = attention->head_width;
    int64_t q_width = attention->heads * head, kv_width = attention->kv_heads * head;
    eng_init normal = {.kind = ENG_INIT_NORMAL, .value = config->initializer_range}, residual = normal;
    eng_init zero = {.kind = ENG_INIT_CONSTANT}, one = {.kind = ENG_INIT_CONSTANT, .value = 1};
    if (!config->init_fla)
        residual.value /= sqrtf(2.0F * (float)eng_config_depth(config));
    const struct {
        enum attention_tensor which;
        bool present;
        const char *leaf;
        eng_role role;
        eng_init init;
        int ndim;
        int64_t shape[2];
    } table[] = {
        {Q_PROJ, true, "q_proj.weight", ENG_ROLE_MATRIX, normal, 2, {q_width, d}},
        {Q_BIAS, attention->qkv_bias, "q_proj.bias", ENG_ROLE_VECTOR, zero, 1, {q_width}},
        {K_PROJ, true, "k_proj.weight", ENG_ROLE_MATRIX, normal, 2, {kv_width, d}},
        {K_BIAS, attention->qkv_bias, "k_proj.bias", ENG_ROLE_VECTOR, zero, 1, {kv_width}},
        {V_PROJ, true, "v_proj.weight", ENG_ROLE_MATRIX, normal, 2, {kv_width, d}},
        {V_BIAS, attention->qkv_bias, "v_proj.bias", ENG_ROLE_VECTOR, zero, 1, {kv_width}},
        {Q_NORM, attention->qk_norm, "q_norm.weight", ENG_ROLE_VECTOR, one, 1, {head}},
        {K_NORM, attention->qk_norm, "k_norm.weight", ENG_ROLE_VECTOR, one, 1, {head}},
        {O_PROJ, true, "o_proj.weight", ENG_ROLE_MATRIX, residual, 2, {d, q_width}},
        {O_BIAS, attention->output_bias, "o_proj.bias", ENG_ROLE_VECTOR, zero, 1, {d}},
    };
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        if (!table[i].present)
            continue;
        int32_t index =
            eng_model_add_tensor(model, layer, prefix, table[i].leaf, table[i].role, table[i].role == ENG_ROLE_MATRIX,
                                 table[i].init, table[i].ndim, table[i].shape);
        if (index < 0)
            return eng_fail(error, ENG_NO_MEMORY, "out of memory for the tensor table");
        model->layer[layer].mixer[table[i].which] = index;
    }
    return declare_storage(model, layer, error);
}

static void emit_rope(eng_emit *emit, int32_t layer, kern_ptr x, int32_t heads, bool inverse) {
    const eng_attention_config *attention = &emit->model->config.layer[layer].attention;
    eng_emit_op(emit, KERN_OP_ROPE,
                &(kern_rope_args){.x = x,
                                  .frequency = eng_param(emit->model->tensors + emit->model->layer[layer].constant),
                                  .heads = heads,
                                  .head_width = attention->head_width,
                                  .rotary = attention->rotary,
                                  .inverse = inverse});
}

// Projection, optional norm, rotation of queries or keys. Without a norm kept[pre] and kept[rotated] are one buffer.
static void emit_rotated(eng_emit *emit, int32_t layer, kern_ptr x, int32_t weight, int32_t bias, int32_t norm,
                         int32_t heads, enum attention_kept pre, enum attention_kept rotated) {
    kern_ptr *kept = emit->kept[layer];
    int32_t width = heads * emit->model->config.layer[layer].attention.head_width;
    kept[pre] = kept[rotated] = eng_emit_activation(emit, width);
    eng_emit_linear(emit, x, weight, bias, eng_null(), kept[pre]);
    if (norm >= 0) {
        kept[rotated] = eng_emit_activation(emit, width);
        eng_emit_norm(emit, kept[pre], norm, eng_null(), kept[rotated], heads, qk_norm_eps);
    }
    emit_rope(emit, layer, kept[rotated], heads, false);
}

static kern_attention core(const eng_attention_config *attention) {
    return (kern_attention){.heads = attention->heads,
                            .kv_heads = attention->kv_heads,
                            .head_width = attention->head_width,
                            .window = attention->window,
                            .scale = 1.0F / sqrtf((float)attention->head_width)};
}

static void forward(eng_emit *emit, int32_t layer, kern_ptr x, kern_ptr residual, kern_ptr y) {
    const eng_attention_config *attention = &emit->model->config.layer[layer].attention;
    const eng_layer *parts = &emit->model->layer[layer];
    const int32_t *tensor = parts->mixer;
    kern_ptr *kept = emit->kept[layer];
    bool paged = eng_serves(emit) && attention->window == 0;

    emit_rotated(emit, layer, x, tensor[Q_PROJ], tensor[Q_BIAS], tensor[Q_NORM], attention->heads, Q_PRE, Q);
    emit_rotated(emit, layer, x, tensor[K_PROJ], tensor[K_BIAS], tensor[K_NORM], attention->kv_heads, K_PRE, K);
    kept[V] = eng_emit_activation(emit, (int64_t)attention->kv_heads * attention->head_width);
    eng_emit_linear(emit, x, tensor[V_PROJ], tensor[V_BIAS], eng_null(), kept[V]);
    kept[OUT] = eng_emit_activation(emit, (int64_t)attention->heads * attention->head_width);
    kept[LSE] = eng_trains(emit) ? eng_emit_activation(emit, attention->heads) : eng_null();
    eng_emit_op(
        emit, KERN_OP_ATTENTION,
        &(kern_attention_args){.q = kept[Q],
                               .k = kept[K],
                               .v = kept[V],
                               .ring = attention->window > 0 ? eng_emit_state(emit, layer, 0) : eng_null(),
                               .pages = paged ? kern_ref(KERN_CLASS_PAGES, 0) : eng_null(),
                               .o = kept[OUT],
                               .lse = kept[LSE],
                               .attention = core(attention),
                               .page_offset = (int64_t)(parts->page_offset + parts->page_bytes * (size_t)emit->level)});
    if (y.ref != 0)
        eng_emit_linear(emit, kept[OUT], tensor[O_PROJ], tensor[O_BIAS], residual, y);
}

static void emit_rotated_backward(eng_emit *emit, int32_t layer, kern_ptr x, int32_t weight, int32_t bias, int32_t norm,
                                  int32_t heads, enum attention_kept pre, kern_ptr d, kern_ptr dx, bool accumulate) {
    emit_rope(emit, layer, d, heads, true);
    if (norm >= 0) {
        kern_ptr d_pre = eng_emit_scratch(emit, (int64_t)heads * emit->model->config.layer[layer].attention.head_width);
        eng_emit_norm_backward(emit, emit->kept[layer][pre], norm, eng_null(), d, d_pre, eng_null(), heads, qk_norm_eps,
                               false);
        d = d_pre;
    }
    eng_emit_linear_backward(emit, x, weight, bias, d, dx, accumulate);
}

static void backward(eng_emit *emit, int32_t layer, kern_ptr x, kern_ptr dy, kern_ptr dx) {
    const eng_attention_config *attention = &emit->model->config.layer[layer].attention;
    const int32_t *tensor = emit->model->layer[layer].mixer;
    const kern_ptr *kept = emit->kept[layer];
    int64_t q_width = (int64_t)attention->heads * attention->head_width;
    int64_t kv_width = (int64_t)attention->kv_heads * attention->head_width;
    kern_ptr d_o = eng_emit_scratch(emit, q_width), dq = eng_emit_scratch(emit, q_width);
    kern_ptr dk = eng_emit_scratch(emit, kv_width), dv = eng_emit_scratch(emit, kv_width);

    eng_emit_linear_backward(emit, kept[OUT], tensor[O_PROJ], tensor[O_BIAS], dy, d_o, false);
    eng_emit_op(emit, KERN_OP_ATTENTION_BACKWARD,
                &(kern_attention_backward_args){.q = kept[Q],
                                                .k = kept[K],
                                                .v = kept[V],
                                                .o = kept[OUT],
                                                .lse = kept[LSE],
                                                .d_o = d_o,
                                                .dq = dq,
                                                .dk = dk,
                                                .dv = dv,
                                                .attention = core(attention)});
    emit_rotated_backward(emit, layer, x, tensor[Q_PROJ], tensor[Q_BIAS], tensor[Q_NORM], attention->heads, Q_PRE, dq,
                          dx, false);
    emit_rotated_backward(emit, layer, x, tensor[K_PROJ], tensor[K_BIAS], tensor[K_NORM], attention->kv_heads, K_PRE,
                          dk, dx, true);
    eng_emit_linear_backward(emit, x, tensor[V_PROJ], tensor[V_BIAS], dv, dx, true);
}

static double flops(const eng_model *model, int32_t layer, double position, double cg_steps) {
    const eng_attention_config *attention = &model->config.layer[layer].attention;
    double keys = attention->window > 0 ? fmin(position + 1.0, attention->window) : position + 1.0;
    (void)cg_steps;
    return 4.0 * attention->heads * attention->head_width * keys;
}

const eng_mixer eng_mixer_attention = {
    .name = "attention", .read = read, .declare = declare, .forward = forward, .backward = backward, .flops = flops};
