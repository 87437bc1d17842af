// SPDX-License-Identifier: Apache-2.0
// What the mixers on the recurrence family share: branches, gates, core, output norm, and their backward.
//
//   q, k, v = rotate(norm(act(map(act(conv(W x))))))   g, beta = gates(W x)   o = recurrence(q, k, v, g, beta)
//   y = W_o (norm(o [/ its normaliser]) [act(W_g x)])
//
// A mixer declares its tensors under the roles below and describes its layer; eng_recurrent_forward and
// eng_recurrent_backward emit it. A part whose sizes are 0 is absent. Tensor indices are -1 where there is none.
#ifndef ENGINE_MIXER_RECURRENT_H
#define ENGINE_MIXER_RECURRENT_H

#include "engine/config_internal.h"
#include "engine/forward_internal.h"
#include "engine/model_internal.h"

// Roles of a layer's tensors, indices into eng_layer.mixer.
enum {
    ENG_Q_PROJ,
    ENG_K_PROJ,
    ENG_V_PROJ,
    ENG_O_PROJ,
    ENG_Q_CONV,
    ENG_K_CONV,
    ENG_V_CONV,
    ENG_CONV_BIAS,
    ENG_IN_BIAS,
    ENG_O_BIAS,
    ENG_Q_BIAS,
    ENG_K_BIAS,
    ENG_V_BIAS,
    ENG_A_DOWN, // first factor of a low-rank decay gate
    ENG_A_PROJ,
    ENG_A_BIAS,
    ENG_B_PROJ,
    ENG_B_BIAS,
    ENG_A_LOG,
    ENG_DT_BIAS,
    ENG_SKIP,
    ENG_LAMBDA,
    ENG_G_DOWN, // first factor of a low-rank output gate
    ENG_G_PROJ,
    ENG_G_BIAS,
    ENG_O_NORM,
    ENG_O_NORM_BIAS,
    ENG_Q_MAP, // learned feature maps: weight, bias, second weight, second bias
    ENG_K_MAP = ENG_Q_MAP + 4,
    ENG_RECURRENT_TENSORS = ENG_K_MAP + 4
};

// y = W x + b, W rows [row0, row0 + rows) of the tensor; with `down`, y = W (W_down x) + b.
typedef struct eng_projection {
    int32_t down, weight, bias;
    int32_t row0, rows;
} eng_projection;

typedef enum eng_vector_norm { ENG_VECTOR_NORM_NONE, ENG_VECTOR_NORM_L2, ENG_VECTOR_NORM_SUM } eng_vector_norm;

typedef struct eng_branch {
    eng_projection projection;
    int32_t heads, width;
    int32_t conv, conv_bias, taps, channel0; // taps 0: no convolution
    size_t window;                           // its inputs in the layer's state
    int32_t activation;                      // behind the convolution or the projection
    int32_t map, map_bias, product, product_bias;
    int32_t map_activation; // behind the learned map, or behind the activation where there is none
    int32_t feature;        // kern_feature; -1: none
    eng_vector_norm norm;
    float eps;
    int32_t frequency; // param of the angular frequencies; -1: not rotated
} eng_branch;

typedef struct eng_branch_kept {
    kern_ptr projected, activated, mapped, product, features, ready;
} eng_branch_kept;

// Width of a head of the branch as the recurrence sees it.
int32_t eng_branch_width(const eng_branch *branch);
// A branch as a whole, or stage by stage, so that the same stages of several branches can follow one another: the
// projection; convolution and activation; learned features; norm and rotation.
void eng_emit_branch(eng_emit *emit, int32_t layer, const eng_branch *branch, kern_ptr x, eng_branch_kept *kept);
void eng_emit_branch_input(eng_emit *emit, const eng_branch *branch, kern_ptr x, eng_branch_kept *kept);
void eng_emit_branch_window(eng_emit *emit, int32_t layer, const eng_branch *branch, eng_branch_kept *kept);
void eng_emit_branch_features(eng_emit *emit, const eng_branch *branch, eng_branch_kept *kept);
void eng_emit_branch_ready(eng_emit *emit, const eng_branch *branch, eng_branch_kept *kept);
// d (T, heads * eng_branch_width) is overwritten.
void eng_emit_branch_backward(eng_emit *emit, const eng_branch *branch, const eng_branch_kept *kept, kern_ptr x,
                              kern_ptr d, kern_ptr dx, bool accumulate);
// The first factor of a low-rank projection into low (T, rank); nothing where low is null.
void eng_emit_down(eng_emit *emit, const eng_projection *projection, kern_ptr x, kern_ptr low);
// The rows themselves: of low where it is not null, else of x.
void eng_emit_projection(eng_emit *emit, const eng_projection *projection, kern_ptr x, kern_ptr low, kern_ptr residual,
                         kern_ptr y);
void eng_emit_projection_backward(eng_emit *emit, const eng_projection *projection, kern_ptr x, kern_ptr low,
                                  kern_ptr dy, kern_ptr dx, bool accumulate);
// The buffer between the factors of a low-rank projection; null without `down`.
kern_ptr eng_emit_low(eng_emit *emit, const eng_projection *projection, bool activation);

typedef struct eng_recurrent eng_recurrent;

// What forward keeps of a layer.
typedef struct eng_recurrent_kept {
    eng_branch_kept q, k, v;
    kern_ptr a_low, a, b, g, beta, stabiliser, read, out, snapshots, solution, gate_low, gate, unit, shifted, normed;
} eng_recurrent_kept;

typedef struct eng_recurrent_gradients {
    kern_ptr q, k, v, g, beta;
} eng_recurrent_gradients;

// From q, k, v, g, beta to kept->read, and from its gradient to theirs. NULL in eng_recurrent: the recurrence family.
typedef struct eng_core {
    void (*forward)(eng_emit *emit, int32_t layer, const eng_recurrent *d, eng_recurrent_kept *kept);
    void (*backward)(eng_emit *emit, int32_t layer, const eng_recurrent *d, const eng_recurrent_kept *kept,
                     kern_ptr d_read, const eng_recurrent_gradients *grad);
} eng_core;

struct eng_recurrent {
    eng_branch q, k, v;
    eng_projection a, b; // before the gates; rows 0: none. Of max-plus gates a is the forget gate, b the input gate
    kern_gates gates;
    bool max_plus;
    float gate_soft_cap;
    int32_t A_log, dt_bias, skip;
    int32_t decay; // param of the constant decays
    kern_recurrence family;
    const eng_core *core;
    size_t stabiliser; // of max-plus gates, in the layer's state
    bool normalise;    // by the unit column
    float normaliser_eps;
    bool norm; // of the output, over norm_groups groups
    int32_t norm_weight, norm_groups;
    int32_t norm_bias; // -1: none; else the gate follows it
    float norm_eps;
    bool center, group_weights;
    eng_projection gate; // rows 0: none
    int32_t gate_activation;
    bool gate_first;
    eng_projection out;
};

// From kept->out and kept->gate to kept->normed, and in place from d_normed to the gradient of kept->out.
void eng_emit_output(eng_emit *emit, const eng_recurrent *d, eng_recurrent_kept *kept);
void eng_emit_output_backward(eng_emit *emit, const eng_recurrent *d, const eng_recurrent_kept *kept, kern_ptr d_normed,
                              kern_ptr d_gate);
// What the config and the tensors' roles say by themselves: branches, core, gate, norm over the heads, state parts in
// the order S, q, k, v windows. Gate laws are the mixer's.
void eng_recurrent_begin(const eng_model *model, int32_t layer, eng_recurrent *out);
// The whole description, by the mixer.
eng_recurrent eng_recurrent_describe(const eng_model *model, int32_t layer);
// Heads of the read-out, and columns of a state and of a head of the read-out.
int32_t eng_readers(const kern_recurrence *family);
int32_t eng_columns(const kern_recurrence *family);
void eng_recurrent_forward(eng_emit *emit, int32_t layer, kern_ptr x, kern_ptr residual, kern_ptr y);
void eng_recurrent_backward(eng_emit *emit, int32_t layer, kern_ptr x, kern_ptr dy, kern_ptr dx);
double eng_recurrent_flops(const eng_model *model, int32_t layer, double position, double cg_steps);

// ---- declaring

typedef struct eng_tensor_row {
    int32_t which;
    bool present;
    const char *leaf, *alias; // alias: the other name it may have in a file, or NULL
    eng_role role;
    eng_init init;
    int ndim;
    int64_t shape[3];
} eng_tensor_row;

// Declares the rows that are present, and their roles.
eng_status eng_declare_rows(eng_model *model, int32_t layer, const char *prefix, const eng_tensor_row *row, size_t rows,
                            eng_error *error);
// q, k, v, their convolutions and o by the names and shapes of flash-linear-attention, then the rows, then the state.
eng_status eng_declare_layer(eng_model *model, int32_t layer, const char *prefix, const eng_tensor_row *row,
                             size_t rows, int32_t key_width, int32_t columns, eng_error *error);
// The log decays of RetNet's heads, 1 - 2^(-5-h), among the model's constants.
eng_status eng_declare_head_decays(eng_model *model, int32_t layer, int32_t *constant, eng_error *error);
// State parts in the order that eng_recurrent_begin expects, the matrix states first.
void eng_declare_recurrent_state(eng_model *model, int32_t layer, eng_state_matrix matrix);

static inline eng_init eng_init_constant(float value) {
    return (eng_init){.kind = ENG_INIT_CONSTANT, .value = value};
}
static inline eng_init eng_init_normal(const eng_config *config) {
    return (eng_init){.kind = ENG_INIT_NORMAL, .value = config->initializer_range};
}
eng_init eng_init_residual(const eng_config *config);
// Decay biases with horizons log-spaced over `groups` heads, or zeros where "init" is "fla".
eng_init eng_init_horizon(const eng_config *config, eng_init_kind kind, int32_t groups, float divisor);

#endif
