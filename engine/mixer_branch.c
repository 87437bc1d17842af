// SPDX-License-Identifier: Apache-2.0
// A branch of a recurrent layer: projection, convolution, activation, feature map, norm, rotation; and its backward.
//
// Stages that a branch does not have cost neither an operation nor a buffer: its neighbours share one. A low-rank
// projection keeps the vector between its factors. Rotation is in place, so `ready` may be any stage's buffer, which is
// sound because no stage before a rotation reads its own output in backward.
#include "engine/mixer_recurrent.h"

kern_ptr eng_emit_low(eng_emit *emit, const eng_projection *projection, bool activation) {
    if (projection->rows == 0 || projection->down < 0)
        return eng_null();
    int64_t rank = emit->model->tensor[projection->down].shape[0];
    return activation ? eng_emit_activation(emit, rank) : eng_emit_scratch(emit, rank);
}

static void emit_rows(eng_emit *emit, const eng_projection *projection, kern_ptr x, kern_ptr residual, kern_ptr y) {
    eng_emit_op(emit, KERN_OP_LINEAR,
                &(kern_linear_args){.x = x,
                                    .weight = eng_param(projection->weight),
                                    .bias = eng_param(projection->bias),
                                    .residual = residual,
                                    .y = y,
                                    .cols = (int32_t)emit->model->tensor[projection->weight].shape[1],
                                    .rows = projection->rows,
                                    .row0 = projection->row0});
}

void eng_emit_down(eng_emit *emit, const eng_projection *projection, kern_ptr x, kern_ptr low) {
    if (low.ref != 0)
        eng_emit_linear(emit, x, projection->down, -1, eng_null(), low);
}

void eng_emit_projection(eng_emit *emit, const eng_projection *projection, kern_ptr x, kern_ptr low, kern_ptr residual,
                         kern_ptr y) {
    emit_rows(emit, projection, low.ref != 0 ? low : x, residual, y);
}

static void emit_rows_backward(eng_emit *emit, const eng_projection *projection, kern_ptr x, kern_ptr dy, kern_ptr dx,
                               bool accumulate) {
    int32_t cols = (int32_t)emit->model->tensor[projection->weight].shape[1];
    eng_emit_op(emit, KERN_OP_LINEAR_BACKWARD_INPUT,
                &(kern_linear_backward_input_args){.dy = dy,
                                                   .weight = eng_param(projection->weight),
                                                   .dx = dx,
                                                   .cols = cols,
                                                   .rows = projection->rows,
                                                   .accumulate = accumulate,
                                                   .row0 = projection->row0});
    eng_emit_op(emit, KERN_OP_LINEAR_BACKWARD_WEIGHT,
                &(kern_linear_backward_weight_args){.x = x,
                                                    .dy = dy,
                                                    .grad_weight = eng_grad(projection->weight),
                                                    .grad_bias = eng_grad(projection->bias),
                                                    .cols = cols,
                                                    .rows = projection->rows,
                                                    .row0 = projection->row0});
}

void eng_emit_projection_backward(eng_emit *emit, const eng_projection *projection, kern_ptr x, kern_ptr low,
                                  kern_ptr dy, kern_ptr dx, bool accumulate) {
    if (projection->down < 0) {
        emit_rows_backward(emit, projection, x, dy, dx, accumulate);
        return;
    }
    kern_ptr d_low = eng_emit_low(emit, projection, false);
    emit_rows_backward(emit, projection, low, dy, d_low, false);
    eng_emit_linear_backward(emit, x, projection->down, -1, d_low, dx, accumulate);
}

int32_t eng_branch_width(const eng_branch *branch) {
    return branch->feature >= 0 ? kern_feature_width(branch->feature, branch->width) : branch->width;
}

static int64_t projected_width(const eng_branch *branch) {
    return (int64_t)branch->heads * branch->width;
}

static kern_ptr emit_activation(eng_emit *emit, const eng_branch *branch, int32_t activation, kern_ptr x) {
    if (activation == KERN_IDENTITY)
        return x;
    kern_ptr y = eng_emit_activation(emit, projected_width(branch));
    eng_emit_op(
        emit, KERN_OP_ACTIVATION,
        &(kern_activation_args){.x = x, .y = y, .width = (int32_t)projected_width(branch), .activation = activation});
    return y;
}

static kern_ptr emit_conv(eng_emit *emit, int32_t layer, const eng_branch *branch, kern_ptr x) {
    kern_ptr y = eng_emit_activation(emit, projected_width(branch));
    eng_emit_op(
        emit, KERN_OP_SHORT_CONV,
        &(kern_short_conv_args){.x = x,
                                .weight = eng_param(branch->conv),
                                .bias = eng_param(branch->conv_bias),
                                .state = branch->taps > 1 ? eng_emit_state(emit, layer, branch->window) : eng_null(),
                                .y = y,
                                .channels = (int32_t)projected_width(branch),
                                .taps = branch->taps,
                                .activation = branch->activation,
                                .channel0 = branch->channel0});
    return y;
}

// One of a learned feature map's products: every head's vector meets the same matrix.
static kern_ptr emit_map(eng_emit *emit, const eng_branch *branch, int32_t weight, int32_t bias, kern_ptr x) {
    kern_ptr y = eng_emit_activation(emit, projected_width(branch));
    eng_emit_op(emit, KERN_OP_LINEAR,
                &(kern_linear_args){.x = x,
                                    .weight = eng_param(weight),
                                    .bias = eng_param(bias),
                                    .y = y,
                                    .cols = branch->width,
                                    .rows = branch->width,
                                    .groups = branch->heads});
    return y;
}

static kern_ptr emit_features(eng_emit *emit, const eng_branch *branch, kern_ptr x, int32_t feature, int32_t width,
                              float eps) {
    kern_ptr y = eng_emit_activation(emit, (int64_t)branch->heads * kern_feature_width(feature, width));
    eng_emit_op(emit, KERN_OP_FEATURE_MAP,
                &(kern_feature_map_args){
                    .x = x, .y = y, .groups = branch->heads, .width = width, .feature = feature, .eps = eps});
    return y;
}

static void emit_rotation(eng_emit *emit, const eng_branch *branch, kern_ptr x, bool inverse) {
    if (branch->frequency < 0)
        return;
    int32_t width = eng_branch_width(branch);
    eng_emit_op(emit, KERN_OP_ROPE,
                &(kern_rope_args){.x = x,
                                  .frequency = eng_param(branch->frequency),
                                  .heads = branch->heads,
                                  .head_width = width,
                                  .rotary = width,
                                  .inverse = inverse});
}

static kern_ptr emit_norm(eng_emit *emit, const eng_branch *branch, kern_ptr x) {
    int32_t width = eng_branch_width(branch);
    if (branch->norm == ENG_VECTOR_NORM_SUM)
        return emit_features(emit, branch, x, KERN_FEATURE_SUM, width, branch->eps);
    if (branch->norm == ENG_VECTOR_NORM_NONE)
        return x;
    kern_ptr y = eng_emit_activation(emit, (int64_t)branch->heads * width);
    eng_emit_op(emit, KERN_OP_L2NORM,
                &(kern_l2norm_args){.x = x, .y = y, .groups = branch->heads, .width = width, .eps = branch->eps});
    return y;
}

void eng_emit_branch_input(eng_emit *emit, const eng_branch *branch, kern_ptr x, eng_branch_kept *kept) {
    kept->projected = eng_emit_activation(emit, projected_width(branch));
    eng_emit_projection(emit, &branch->projection, x, eng_null(), eng_null(), kept->projected);
}

void eng_emit_branch_window(eng_emit *emit, int32_t layer, const eng_branch *branch, eng_branch_kept *kept) {
    if (branch->taps > 0)
        kept->activated = emit_conv(emit, layer, branch, kept->projected);
    else
        kept->activated = emit_activation(emit, branch, branch->activation, kept->projected);
}

void eng_emit_branch_features(eng_emit *emit, const eng_branch *branch, eng_branch_kept *kept) {
    kept->mapped = kept->activated;
    kept->product = kept->projected;
    if (branch->map >= 0)
        kept->mapped = emit_map(emit, branch, branch->map, branch->map_bias, kept->activated);
    kept->features = emit_activation(emit, branch, branch->map_activation, kept->mapped);
    if (branch->product >= 0) {
        kept->product = emit_map(emit, branch, branch->product, branch->product_bias, kept->activated);
        kept->features = eng_emit_activation(emit, projected_width(branch));
        eng_emit_op(emit, KERN_OP_GLU,
                    &(kern_glu_args){.gate = kept->mapped,
                                     .up = kept->product,
                                     .y = kept->features,
                                     .width = (int32_t)projected_width(branch),
                                     .activation = KERN_IDENTITY});
    }
    if (branch->feature >= 0)
        kept->features = emit_features(emit, branch, kept->mapped, branch->feature, branch->width, 0);
}

void eng_emit_branch_ready(eng_emit *emit, const eng_branch *branch, eng_branch_kept *kept) {
    kept->ready = emit_norm(emit, branch, kept->features);
    emit_rotation(emit, branch, kept->ready, false);
}

void eng_emit_branch(eng_emit *emit, int32_t layer, const eng_branch *branch, kern_ptr x, eng_branch_kept *kept) {
    eng_emit_branch_input(emit, branch, x, kept);
    eng_emit_branch_window(emit, layer, branch, kept);
    eng_emit_branch_features(emit, branch, kept);
    eng_emit_branch_ready(emit, branch, kept);
}

static void emit_norm_backward(eng_emit *emit, const eng_branch *branch, const eng_branch_kept *kept, kern_ptr d) {
    int32_t width = eng_branch_width(branch);
    if (branch->norm == ENG_VECTOR_NORM_L2)
        eng_emit_op(
            emit, KERN_OP_L2NORM_BACKWARD,
            &(kern_l2norm_backward_args){
                .x = kept->features, .dy = d, .dx = d, .groups = branch->heads, .width = width, .eps = branch->eps});
    if (branch->norm == ENG_VECTOR_NORM_SUM)
        eng_emit_op(emit, KERN_OP_FEATURE_MAP_BACKWARD,
                    &(kern_feature_map_backward_args){.x = kept->features,
                                                      .dy = d,
                                                      .dx = d,
                                                      .groups = branch->heads,
                                                      .width = width,
                                                      .feature = KERN_FEATURE_SUM,
                                                      .eps = branch->eps});
}

static void emit_activation_backward(eng_emit *emit, const eng_branch *branch, int32_t activation, kern_ptr x,
                                     kern_ptr d) {
    if (activation != KERN_IDENTITY)
        eng_emit_op(emit, KERN_OP_ACTIVATION_BACKWARD,
                    &(kern_activation_backward_args){
                        .x = x, .dy = d, .dx = d, .width = (int32_t)projected_width(branch), .activation = activation});
}

static void emit_one_map_backward(eng_emit *emit, const eng_branch *branch, int32_t weight, int32_t bias, kern_ptr x,
                                  kern_ptr dy, kern_ptr dx, bool accumulate) {
    eng_emit_op(emit, KERN_OP_LINEAR_BACKWARD_INPUT,
                &(kern_linear_backward_input_args){.dy = dy,
                                                   .weight = eng_param(weight),
                                                   .dx = dx,
                                                   .cols = branch->width,
                                                   .rows = branch->width,
                                                   .accumulate = accumulate,
                                                   .groups = branch->heads});
    eng_emit_op(emit, KERN_OP_LINEAR_BACKWARD_WEIGHT,
                &(kern_linear_backward_weight_args){.x = x,
                                                    .dy = dy,
                                                    .grad_weight = eng_grad(weight),
                                                    .grad_bias = eng_grad(bias),
                                                    .cols = branch->width,
                                                    .rows = branch->width,
                                                    .groups = branch->heads});
}

// From the gradient of the features to that of the map's input.
static kern_ptr emit_map_backward(eng_emit *emit, const eng_branch *branch, const eng_branch_kept *kept, kern_ptr d) {
    if (branch->feature >= 0) {
        kern_ptr narrow = eng_emit_scratch(emit, projected_width(branch));
        eng_emit_op(emit, KERN_OP_FEATURE_MAP_BACKWARD,
                    &(kern_feature_map_backward_args){.x = kept->mapped,
                                                      .dy = d,
                                                      .dx = narrow,
                                                      .groups = branch->heads,
                                                      .width = branch->width,
                                                      .feature = branch->feature});
        d = narrow;
    }
    if (branch->product < 0)
        emit_activation_backward(emit, branch, branch->map_activation, kept->mapped, d);
    if (branch->map < 0)
        return d;
    kern_ptr dx = eng_emit_scratch(emit, projected_width(branch));
    if (branch->product >= 0) {
        kern_ptr d_product = eng_emit_scratch(emit, projected_width(branch));
        eng_emit_op(emit, KERN_OP_GLU_BACKWARD,
                    &(kern_glu_backward_args){.gate = kept->mapped,
                                              .up = kept->product,
                                              .dy = d,
                                              .dgate = d,
                                              .dup = d_product,
                                              .width = (int32_t)projected_width(branch),
                                              .activation = KERN_IDENTITY});
        emit_one_map_backward(emit, branch, branch->product, branch->product_bias, kept->activated, d_product, dx,
                              false);
    }
    emit_one_map_backward(emit, branch, branch->map, branch->map_bias, kept->activated, d, dx, branch->product >= 0);
    return dx;
}

void eng_emit_branch_backward(eng_emit *emit, const eng_branch *branch, const eng_branch_kept *kept, kern_ptr x,
                              kern_ptr d, kern_ptr dx, bool accumulate) {
    emit_rotation(emit, branch, d, true);
    emit_norm_backward(emit, branch, kept, d);
    d = emit_map_backward(emit, branch, kept, d);
    if (branch->taps > 0) {
        kern_ptr d_projected = eng_emit_scratch(emit, projected_width(branch));
        eng_emit_op(emit, KERN_OP_SHORT_CONV_BACKWARD,
                    &(kern_short_conv_backward_args){.x = kept->projected,
                                                     .weight = eng_param(branch->conv),
                                                     .bias = eng_param(branch->conv_bias),
                                                     .dy = d,
                                                     .dx = d_projected,
                                                     .grad_weight = eng_grad(branch->conv),
                                                     .grad_bias = eng_grad(branch->conv_bias),
                                                     .channels = (int32_t)projected_width(branch),
                                                     .taps = branch->taps,
                                                     .activation = branch->activation,
                                                     .channel0 = branch->channel0});
        d = d_projected;
    } else {
        emit_activation_backward(emit, branch, branch->activation, kept->projected, d);
    }
    eng_emit_projection_backward(emit, &branch->projection, x, eng_null(), d, dx, accumulate);
}
