// SPDX-License-Identifier: Apache-2.0
// The Mesa mixer (von Oswald et al. 2025, arXiv 2506.05233; tensor names of flash-linear-attention's MesaNet).
//
//   q, k = L2(silu(conv(W x)))   v = W x   beta = sigmoid(W x + b)   g = logsigmoid(W x + b), capped by beta where the
//   config says so o = Hv^T (Hk + diag(lambda))^-1 q      y = W_o (RMS(o) [silu(W_g x)])
//
// State of a layer: Hk (H, D, D), Hv (H, D, D), then the last W - 1 inputs of both convolutions.
#include "engine/forward_internal.h"
#include "engine/model_internal.h"

#include <math.h>

enum mesa_tensor {
    Q_PROJ,
    K_PROJ,
    V_PROJ,
    A_PROJ,
    A_BIAS,
    B_PROJ,
    B_BIAS,
    LAMBDA,
    Q_CONV,
    K_CONV,
    G_PROJ,
    O_NORM,
    O_PROJ
};

enum mesa_kept {
    Q_PRE,
    K_PRE,
    Q_CONVOLVED,
    K_CONVOLVED,
    Q,
    K,
    V,
    A,
    B,
    DECAY,
    BETA,
    SOLUTION,
    SNAPSHOTS,
    GATE,
    OUT,
    NORMED
};

static const float l2_eps = 1e-6F; // models.md trap 7

// Where the parts of a layer's state begin; each at a multiple of 64 bytes, as eng_model_add_state lays them.
typedef struct state_layout {
    size_t matrices_bytes, window_bytes; // Hk and Hv together; one convolution's inputs
    size_t q_window, k_window;           // offsets
} state_layout;

static state_layout layout_of(const eng_mesa_config *mesa) {
    size_t width = (size_t)mesa->heads * (size_t)mesa->head_width;
    state_layout layout = {.matrices_bytes = 2 * sizeof(float) * width * (size_t)mesa->head_width,
                           .window_bytes = sizeof(float) * (size_t)(mesa->conv_taps - 1) * width};
    layout.q_window = (layout.matrices_bytes + 63) & ~(size_t)63;
    layout.k_window = layout.q_window + ((layout.window_bytes + 63) & ~(size_t)63);
    return layout;
}

static eng_status declare(eng_model *model, int32_t layer, const char *prefix, eng_error *error) {
    const eng_config *config = &model->config;
    const eng_mesa_config *mesa = &config->layer[layer].mesa;
    int64_t d = config->hidden_size, width = (int64_t)mesa->heads * mesa->head_width;
    eng_init normal = {.kind = ENG_INIT_NORMAL, .value = config->initializer_range};
    eng_init residual = normal, zero = {.kind = ENG_INIT_CONSTANT}, one = {.kind = ENG_INIT_CONSTANT, .value = 1};
    eng_init decay = zero;
    // softplus + bound = 1
    eng_init lambda = {.kind = ENG_INIT_CONSTANT, .value = logf(expf(1.0F - mesa->lambda_bound) - 1.0F)};
    if (!config->init_fla) {
        residual.value /= sqrtf(2.0F * (float)config->layers);
        decay = (eng_init){.kind = ENG_INIT_HORIZON,
                           .value = (float)(config->trained_length > 0 ? config->trained_length : 2048),
                           .divisor = 1};
    }
    if (mesa->lambda_bound >= 1.0F)
        lambda.value = 0;
    const struct {
        enum mesa_tensor which;
        const char *leaf;
        eng_role role;
        bool decayed;
        eng_init init;
        int ndim;
        int64_t shape[3];
    } table[] = {
        {Q_PROJ, "q_proj.weight", ENG_ROLE_MATRIX, true, normal, 2, {width, d}},
        {K_PROJ, "k_proj.weight", ENG_ROLE_MATRIX, true, normal, 2, {width, d}},
        {V_PROJ, "v_proj.weight", ENG_ROLE_MATRIX, true, normal, 2, {width, d}},
        {A_PROJ, "a_proj.weight", ENG_ROLE_MATRIX, true, normal, 2, {mesa->heads, d}},
        {A_BIAS, "a_proj.bias", ENG_ROLE_VECTOR, false, decay, 1, {mesa->heads}},
        {B_PROJ, "b_proj.weight", ENG_ROLE_MATRIX, true, normal, 2, {mesa->heads, d}},
        {B_BIAS, "b_proj.bias", ENG_ROLE_VECTOR, false, zero, 1, {mesa->heads}},
        {LAMBDA, "lambda_params", ENG_ROLE_VECTOR, false, lambda, 1, {width}},
        {Q_CONV, "q_conv1d.weight", ENG_ROLE_VECTOR, false, normal, 3, {width, 1, mesa->conv_taps}},
        {K_CONV, "k_conv1d.weight", ENG_ROLE_VECTOR, false, normal, 3, {width, 1, mesa->conv_taps}},
        {G_PROJ, "g_proj.weight", ENG_ROLE_MATRIX, true, normal, 2, {width, d}},
        {O_NORM, "o_norm.weight", ENG_ROLE_VECTOR, false, one, 1, {mesa->head_width}},
        {O_PROJ, "o_proj.weight", ENG_ROLE_MATRIX, true, residual, 2, {d, width}},
    };
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        if (table[i].which == G_PROJ && !mesa->output_gate)
            continue;
        int32_t index = eng_model_add_tensor(model, layer, prefix, table[i].leaf, table[i].role, table[i].decayed,
                                             table[i].init, table[i].ndim, table[i].shape);
        if (index < 0)
            return eng_fail(error, ENG_NO_MEMORY, "out of memory for the tensor table");
        model->layer[layer].mixer[table[i].which] = index;
    }
    state_layout layout = layout_of(mesa);
    eng_model_add_state(model, layer, layout.matrices_bytes);
    eng_model_add_state(model, layer, layout.window_bytes);
    eng_model_add_state(model, layer, layout.window_bytes);
    return ENG_OK;
}

static void emit_conv_and_norm(eng_emit *emit, int32_t layer, enum mesa_kept pre, enum mesa_tensor weight, size_t state,
                               enum mesa_kept convolved, enum mesa_kept normed) {
    const eng_mesa_config *mesa = &emit->model->config.layer[layer].mesa;
    kern_ptr *kept = emit->kept[layer];
    int32_t width = mesa->heads * mesa->head_width;
    kept[convolved] = eng_emit_activation(emit, width);
    kept[normed] = eng_emit_activation(emit, width);
    eng_emit_op(emit, KERN_OP_SHORT_CONV,
                &(kern_short_conv_args){.x = kept[pre],
                                        .weight = eng_param(emit->model->layer[layer].mixer[weight]),
                                        .state = eng_emit_state(emit, layer, state),
                                        .y = kept[convolved],
                                        .channels = width,
                                        .taps = mesa->conv_taps,
                                        .activation = KERN_SILU});
    eng_emit_op(
        emit, KERN_OP_L2NORM,
        &(kern_l2norm_args){
            .x = kept[convolved], .y = kept[normed], .groups = mesa->heads, .width = mesa->head_width, .eps = l2_eps});
}

static kern_mesa core(const eng_mesa_config *mesa) {
    return (kern_mesa){.heads = mesa->heads,
                       .key_width = mesa->head_width,
                       .value_width = mesa->head_width,
                       .lambda_bound = mesa->lambda_bound};
}

static kern_gates gates(const eng_mesa_config *mesa) {
    return (kern_gates){.heads = mesa->heads,
                        .channels = 1,
                        .decay_law = KERN_DECAY_LAW_SIGMOID,
                        .write_law = KERN_WRITE_LAW_SIGMOID,
                        .divisor = 1,
                        .gamma_cap = mesa->gamma_cap,
                        .write_factor = 1};
}

static void emit_core(eng_emit *emit, int32_t layer) {
    const eng_mesa_config *mesa = &emit->model->config.layer[layer].mesa;
    kern_ptr *kept = emit->kept[layer];
    int32_t width = mesa->heads * mesa->head_width;
    uint64_t snapshot = sizeof(float) * 2 * (uint64_t)width * (uint64_t)mesa->head_width;
    kept[OUT] = eng_emit_activation(emit, width);
    kept[SOLUTION] = eng_trains(emit) ? eng_emit_activation(emit, width) : eng_null();
    // Serving runs a chunk a row and step, which the heads alone spread over the team; long rows gain from the chunks
    // too.
    kept[SNAPSHOTS] =
        eng_serves(emit) ? eng_null() : eng_emit_activation_bytes(emit, snapshot * (uint64_t)emit->chunks);
    if (emit->plan->report[layer].ref == 0)
        emit->plan->report[layer] =
            eng_emit_saved_bytes(emit, sizeof(kern_solve_report) * (uint64_t)mesa->heads * (uint64_t)emit->tokens);
    eng_emit_op(emit, KERN_OP_MESA,
                &(kern_mesa_args){.q = kept[Q],
                                  .k = kept[K],
                                  .v = kept[V],
                                  .g = kept[DECAY],
                                  .beta = kept[BETA],
                                  .lambda_params = eng_param(emit->model->layer[layer].mixer[LAMBDA]),
                                  .state = eng_emit_state(emit, layer, 0),
                                  .o = kept[OUT],
                                  .x = kept[SOLUTION],
                                  .snapshots = kept[SNAPSHOTS],
                                  .report = emit->plan->report[layer],
                                  .mesa = core(mesa)});
}

static void forward(eng_emit *emit, int32_t layer, kern_ptr x, kern_ptr residual, kern_ptr y) {
    const eng_mesa_config *mesa = &emit->model->config.layer[layer].mesa;
    const int32_t *tensor = emit->model->layer[layer].mixer;
    kern_ptr *kept = emit->kept[layer];
    int32_t width = mesa->heads * mesa->head_width;
    state_layout layout = layout_of(mesa);

    kept[Q_PRE] = eng_emit_activation(emit, width);
    kept[K_PRE] = eng_emit_activation(emit, width);
    kept[V] = eng_emit_activation(emit, width);
    kept[A] = eng_emit_activation(emit, mesa->heads);
    kept[B] = eng_emit_activation(emit, mesa->heads);
    kept[DECAY] = eng_emit_activation(emit, mesa->heads);
    kept[BETA] = eng_emit_activation(emit, mesa->heads);
    eng_emit_linear(emit, x, tensor[Q_PROJ], -1, eng_null(), kept[Q_PRE]);
    eng_emit_linear(emit, x, tensor[K_PROJ], -1, eng_null(), kept[K_PRE]);
    eng_emit_linear(emit, x, tensor[V_PROJ], -1, eng_null(), kept[V]);
    eng_emit_linear(emit, x, tensor[A_PROJ], tensor[A_BIAS], eng_null(), kept[A]);
    eng_emit_linear(emit, x, tensor[B_PROJ], tensor[B_BIAS], eng_null(), kept[B]);
    emit_conv_and_norm(emit, layer, Q_PRE, Q_CONV, layout.q_window, Q_CONVOLVED, Q);
    emit_conv_and_norm(emit, layer, K_PRE, K_CONV, layout.k_window, K_CONVOLVED, K);
    eng_emit_op(
        emit, KERN_OP_GATES,
        &(kern_gates_args){.a = kept[A], .b = kept[B], .g = kept[DECAY], .beta = kept[BETA], .gates = gates(mesa)});
    emit_core(emit, layer);

    kept[GATE] = eng_null();
    if (mesa->output_gate) {
        kept[GATE] = eng_emit_activation(emit, width);
        eng_emit_linear(emit, x, tensor[G_PROJ], -1, eng_null(), kept[GATE]);
    }
    kept[NORMED] = eng_emit_activation(emit, width);
    eng_emit_norm(emit, kept[OUT], tensor[O_NORM], kept[GATE], kept[NORMED], mesa->heads, emit->model->config.norm_eps);
    if (y.ref != 0)
        eng_emit_linear(emit, kept[NORMED], tensor[O_PROJ], -1, residual, y);
}

// From the gradient of the normalised vector (in place) to that of the projection's output, through norm and
// convolution.
static void emit_conv_backward(eng_emit *emit, int32_t layer, enum mesa_kept pre, enum mesa_tensor weight,
                               enum mesa_kept convolved, kern_ptr d_normed, kern_ptr d_pre) {
    const eng_mesa_config *mesa = &emit->model->config.layer[layer].mesa;
    const kern_ptr *kept = emit->kept[layer];
    int32_t tensor = emit->model->layer[layer].mixer[weight];
    eng_emit_op(emit, KERN_OP_L2NORM_BACKWARD,
                &(kern_l2norm_backward_args){.x = kept[convolved],
                                             .dy = d_normed,
                                             .dx = d_normed,
                                             .groups = mesa->heads,
                                             .width = mesa->head_width,
                                             .eps = l2_eps});
    eng_emit_op(emit, KERN_OP_SHORT_CONV_BACKWARD,
                &(kern_short_conv_backward_args){.x = kept[pre],
                                                 .weight = eng_param(tensor),
                                                 .dy = d_normed,
                                                 .dx = d_pre,
                                                 .grad_weight = eng_grad(tensor),
                                                 .channels = mesa->heads * mesa->head_width,
                                                 .taps = mesa->conv_taps,
                                                 .activation = KERN_SILU});
}

typedef struct core_gradients {
    kern_ptr q, k, v, g, beta;
} core_gradients;

static core_gradients emit_core_backward(eng_emit *emit, int32_t layer, kern_ptr d_o) {
    const eng_mesa_config *mesa = &emit->model->config.layer[layer].mesa;
    const kern_ptr *kept = emit->kept[layer];
    int32_t width = mesa->heads * mesa->head_width, lambda = emit->model->layer[layer].mixer[LAMBDA];
    core_gradients d = {eng_emit_scratch(emit, width), eng_emit_scratch(emit, width), eng_emit_scratch(emit, width),
                        eng_emit_scratch(emit, mesa->heads), eng_emit_scratch(emit, mesa->heads)};
    float tolerance = emit->options->backward_tolerance;
    emit->plan->backward_report[layer] =
        eng_emit_saved_bytes(emit, sizeof(kern_solve_report) * (uint64_t)mesa->heads * (uint64_t)emit->tokens);
    eng_emit_op(emit, KERN_OP_MESA_BACKWARD,
                &(kern_mesa_backward_args){.q = kept[Q],
                                           .k = kept[K],
                                           .v = kept[V],
                                           .g = kept[DECAY],
                                           .beta = kept[BETA],
                                           .lambda_params = eng_param(lambda),
                                           .o = kept[OUT],
                                           .x = kept[SOLUTION],
                                           .snapshots = kept[SNAPSHOTS],
                                           .d_o = d_o,
                                           .dq = d.q,
                                           .dk = d.k,
                                           .dv = d.v,
                                           .dg = d.g,
                                           .dbeta = d.beta,
                                           .grad_lambda_params = eng_grad(lambda),
                                           .report = emit->plan->backward_report[layer],
                                           .mesa = core(mesa),
                                           .backward_tolerance = tolerance > 0 ? tolerance : 1e-5F});
    return d;
}

static void backward(eng_emit *emit, int32_t layer, kern_ptr x, kern_ptr dy, kern_ptr dx) {
    const eng_mesa_config *mesa = &emit->model->config.layer[layer].mesa;
    const int32_t *tensor = emit->model->layer[layer].mixer;
    const kern_ptr *kept = emit->kept[layer];
    int32_t width = mesa->heads * mesa->head_width;
    kern_ptr d_normed = eng_emit_scratch(emit, width), d_o = eng_emit_scratch(emit, width);
    kern_ptr d_gate = mesa->output_gate ? eng_emit_scratch(emit, width) : eng_null();

    eng_emit_linear_backward(emit, kept[NORMED], tensor[O_PROJ], -1, dy, d_normed, false);
    eng_emit_norm_backward(emit, kept[OUT], tensor[O_NORM], kept[GATE], d_normed, d_o, d_gate, mesa->heads,
                           emit->model->config.norm_eps, false);
    core_gradients d = emit_core_backward(emit, layer, d_o);
    eng_emit_op(
        emit, KERN_OP_GATES_BACKWARD,
        &(kern_gates_backward_args){
            .a = kept[A], .b = kept[B], .dg = d.g, .dbeta = d.beta, .da = d.g, .db = d.beta, .gates = gates(mesa)});
    kern_ptr dq = d_normed, dk = d_o; // both are read to the end by now
    emit_conv_backward(emit, layer, Q_PRE, Q_CONV, Q_CONVOLVED, d.q, dq);
    emit_conv_backward(emit, layer, K_PRE, K_CONV, K_CONVOLVED, d.k, dk);

    eng_emit_linear_backward(emit, x, tensor[Q_PROJ], -1, dq, dx, false);
    eng_emit_linear_backward(emit, x, tensor[K_PROJ], -1, dk, dx, true);
    eng_emit_linear_backward(emit, x, tensor[V_PROJ], -1, d.v, dx, true);
    eng_emit_linear_backward(emit, x, tensor[A_PROJ], tensor[A_BIAS], d.g, dx, true);
    eng_emit_linear_backward(emit, x, tensor[B_PROJ], tensor[B_BIAS], d.beta, dx, true);
    if (mesa->output_gate)
        eng_emit_linear_backward(emit, x, tensor[G_PROJ], -1, d_gate, dx, true);
}

// Two rank-one updates, the read-out, and a matrix-vector product each step and one for the start.
static double flops(const eng_model *model, int32_t layer, double position, double cg_steps) {
    const eng_mesa_config *mesa = &model->config.layer[layer].mesa;
    double square = (double)mesa->head_width * mesa->head_width;
    (void)position;
    return mesa->heads * square * (3.0 * 2.0 + 2.0 + 2.0 * (cg_steps + 1.0));
}

const eng_mixer eng_mixer_mesa = {
    .name = "mesa_net", .declare = declare, .forward = forward, .backward = backward, .flops = flops};
