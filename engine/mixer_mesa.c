// SPDX-License-Identifier: Apache-2.0
// The Mesa mixer (von Oswald et al. 2025, arXiv 2506.05233; tensor names of flash-linear-attention's MesaNet).
//
//   q, k = L2(silu(conv(W x)))   v = W x   beta = sigmoid(W x + b)   g = logsigmoid(W x + b), capped by beta where the
//   config says so   o = Hv^T (Hk + diag(lambda))^-1 q   y = W_o (RMS(o) [silu(W_g x)])
//
// A recurrent layer with a core of its own. State of a layer: Hk and Hv (H, D, D), then the last W - 1 inputs of both
// convolutions.
#include "engine/mixer_recurrent.h"

#include <math.h>

// lambda = softplus(its parameter) + bound starts at 1.
static eng_init init_lambda(float bound) {
    return eng_init_constant(bound < 1.0F ? logf(expf(1.0F - bound) - 1.0F) : 0);
}

enum { MAX_HEAD_WIDTH = 128, MAX_STEPS = 256 };

static void read(eng_keys *keys, const eng_config *config, eng_layer_config *layer) {
    eng_recurrent_config *own = &layer->recurrent;
    (void)config;
    eng_config_equal_heads(own, eng_config_heads(keys, "num_heads", 16));
    own->key_width = own->value_width = (int32_t)eng_keys_integer(keys, "head_dim", 128, 1, ENG_CONFIG_MAX_HEAD_WIDTH);
    if (own->key_width > MAX_HEAD_WIDTH)
        eng_keys_fail(keys, ENG_UNSUPPORTED, "head_dim", "is %d, Mesa layers take at most %d", own->key_width,
                      MAX_HEAD_WIDTH);
    own->taps = eng_config_taps(keys, "conv_size");
    own->plain_values = true;
    own->key_activation = KERN_SILU;
    own->qk_norm = own->weighted = true;
    own->write_factor = 1;
    own->decay = KERN_DECAY_SCALAR;
    own->output_gate = eng_keys_flag(keys, "use_output_gate", false);
    layer->mesa = (eng_mesa_config){
        .lambda_bound = (float)eng_keys_number(keys, "lambda_lower_bound", 0.25, 0, 1e6),
        .cg_steps_training = (int32_t)eng_keys_integer(keys, "max_cg_step_training", 30, 0, MAX_STEPS),
        .cg_steps_decoding = (int32_t)eng_keys_integer(keys, "max_cg_step_decoding", 30, 0, MAX_STEPS),
        .gamma_cap = (float)eng_keys_number(keys, "gamma_cap_b", 1, 0.5, 1), // what the gates take
    };
}

static eng_status declare(eng_model *model, int32_t layer, const char *prefix, eng_error *error) {
    const eng_config *config = &model->config;
    const eng_recurrent_config *own = &config->layer[layer].recurrent;
    int64_t d = config->hidden_size, heads = own->heads, width = heads * own->key_width;
    eng_init normal = eng_init_normal(config), zero = eng_init_constant(0), one = eng_init_constant(1);
    eng_init horizon = eng_init_horizon(config, ENG_INIT_HORIZON, own->heads, 1);
    eng_init lambda = init_lambda(config->layer[layer].mesa.lambda_bound);
    const eng_tensor_row rows[] = {
        {ENG_Q_PROJ, true, "q_proj.weight", NULL, ENG_ROLE_MATRIX, normal, 2, {width, d}},
        {ENG_K_PROJ, true, "k_proj.weight", NULL, ENG_ROLE_MATRIX, normal, 2, {width, d}},
        {ENG_V_PROJ, true, "v_proj.weight", NULL, ENG_ROLE_MATRIX, normal, 2, {width, d}},
        {ENG_A_PROJ, true, "a_proj.weight", NULL, ENG_ROLE_MATRIX, normal, 2, {heads, d}},
        {ENG_A_BIAS, true, "a_proj.bias", NULL, ENG_ROLE_VECTOR, horizon, 1, {heads}},
        {ENG_B_PROJ, true, "b_proj.weight", NULL, ENG_ROLE_MATRIX, normal, 2, {heads, d}},
        {ENG_B_BIAS, true, "b_proj.bias", NULL, ENG_ROLE_VECTOR, zero, 1, {heads}},
        {ENG_LAMBDA, true, "lambda_params", NULL, ENG_ROLE_VECTOR, lambda, 1, {width}},
        {ENG_Q_CONV, true, "q_conv1d.weight", NULL, ENG_ROLE_VECTOR, normal, 3, {width, 1, own->taps}},
        {ENG_K_CONV, true, "k_conv1d.weight", NULL, ENG_ROLE_VECTOR, normal, 3, {width, 1, own->taps}},
        {ENG_G_PROJ, own->output_gate, "g_proj.weight", NULL, ENG_ROLE_MATRIX, normal, 2, {width, d}},
        {ENG_O_NORM, true, "o_norm.weight", NULL, ENG_ROLE_VECTOR, one, 1, {own->value_width}},
        {ENG_O_PROJ, true, "o_proj.weight", NULL, ENG_ROLE_MATRIX, eng_init_residual(config), 2, {d, width}},
    };
    eng_declare_recurrent_state(model, layer, (eng_state_matrix){own->heads, own->key_width, own->value_width, true});
    return eng_declare_rows(model, layer, prefix, rows, sizeof rows / sizeof *rows, error);
}

static kern_mesa core_of(const eng_emit *emit, int32_t layer) {
    const eng_layer_config *config = &emit->model->config.layer[layer];
    return (kern_mesa){.heads = config->recurrent.heads,
                       .key_width = config->recurrent.key_width,
                       .value_width = config->recurrent.value_width,
                       .lambda_bound = config->mesa.lambda_bound,
                       .storage = emit->model->state_storage};
}

static int64_t width_of(const kern_mesa *mesa) {
    return (int64_t)mesa->heads * mesa->value_width;
}

static void emit_core(eng_emit *emit, int32_t layer, const eng_recurrent *d, eng_recurrent_kept *kept) {
    kern_mesa mesa = core_of(emit, layer);
    uint64_t snapshot = sizeof(float) * (uint64_t)width_of(&mesa) * (uint64_t)(mesa.key_width + mesa.value_width);
    kept->read = eng_emit_activation(emit, width_of(&mesa));
    kept->solution = eng_trains(emit) ? eng_emit_activation(emit, width_of(&mesa)) : eng_null();
    // Serving runs a chunk a row and step, which the heads alone spread over the team; long rows gain from the chunks
    // too.
    kept->snapshots =
        eng_serves(emit) ? eng_null() : eng_emit_activation_bytes(emit, snapshot * (uint64_t)emit->chunks);
    (void)d;
    eng_emit_op(emit, KERN_OP_MESA,
                &(kern_mesa_args){.q = kept->q.ready,
                                  .k = kept->k.ready,
                                  .v = kept->v.ready,
                                  .g = kept->g,
                                  .beta = kept->beta,
                                  .lambda_params = eng_param(emit->model->layer[layer].mixer[ENG_LAMBDA]),
                                  .state = eng_emit_state(emit, layer, 0),
                                  .o = kept->read,
                                  .x = kept->solution,
                                  .snapshots = kept->snapshots,
                                  .sum = emit->again ? eng_null() : emit->plan->solves,
                                  .mesa = mesa});
}

static void emit_core_backward(eng_emit *emit, int32_t layer, const eng_recurrent *d, const eng_recurrent_kept *kept,
                               kern_ptr d_read, const eng_recurrent_gradients *grad) {
    kern_mesa mesa = core_of(emit, layer);
    int32_t lambda = emit->model->layer[layer].mixer[ENG_LAMBDA];
    float tolerance = emit->options->backward_tolerance;
    (void)d;
    eng_emit_op(emit, KERN_OP_MESA_BACKWARD,
                &(kern_mesa_backward_args){.q = kept->q.ready,
                                           .k = kept->k.ready,
                                           .v = kept->v.ready,
                                           .g = kept->g,
                                           .beta = kept->beta,
                                           .lambda_params = eng_param(lambda),
                                           .o = kept->read,
                                           .x = kept->solution,
                                           .snapshots = kept->snapshots,
                                           .d_o = d_read,
                                           .dq = grad->q,
                                           .dk = grad->k,
                                           .dv = grad->v,
                                           .dg = grad->g,
                                           .dbeta = grad->beta,
                                           .grad_lambda_params = eng_grad(lambda),
                                           .sum = emit->plan->backward_solves,
                                           .mesa = mesa,
                                           .backward_tolerance = tolerance > 0 ? tolerance : 1e-5F});
}

static void describe(const eng_model *model, int32_t layer, eng_recurrent *out) {
    static const eng_core core = {emit_core, emit_core_backward};
    eng_recurrent_begin(model, layer, out);
    out->core = &core;
    out->gates.decay_law = KERN_DECAY_LAW_SIGMOID;
    out->gates.gamma_cap = model->config.layer[layer].mesa.gamma_cap;
}

// Two rank-one updates, the read-out, and a matrix-vector product each step and one for the start.
static double flops(const eng_model *model, int32_t layer, double position, double cg_steps) {
    const eng_recurrent_config *own = &model->config.layer[layer].recurrent;
    double square = (double)own->key_width * own->value_width;
    (void)position;
    return own->heads * square * (3.0 * 2.0 + 2.0 + 2.0 * (cg_steps + 1.0));
}

const eng_mixer eng_mixer_mesa = {.name = "mesa_net",
                                  .read = read,
                                  .declare = declare,
                                  .forward = eng_recurrent_forward,
                                  .backward = eng_recurrent_backward,
                                  .flops = flops,
                                  .describe = describe};
