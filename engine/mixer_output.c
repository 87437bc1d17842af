// SPDX-License-Identifier: Apache-2.0
// From a recurrent layer's read-out to the input of its last projection: norm over the heads, gate; and its backward.
//
// A norm without bias takes the gate with it. One with a bias is a norm without weights, then weight and bias channel
// by channel, then the gate.
#include "engine/mixer_recurrent.h"

// The norm over the heads, with the gate where it is the norm's own.
static void emit_norm(eng_emit *emit, const eng_recurrent *d, kern_ptr x, int32_t weight, kern_ptr gate, kern_ptr y) {
    int32_t width = eng_readers(&d->family) * d->family.value_width;
    eng_emit_op(emit, KERN_OP_RMSNORM,
                &(kern_rmsnorm_args){.x = x,
                                     .weight = eng_param(weight),
                                     .gate = gate,
                                     .y = y,
                                     .groups = d->norm_groups,
                                     .width = width / d->norm_groups,
                                     .eps = d->norm_eps,
                                     .activation = d->gate_activation,
                                     .gate_first = d->gate_first,
                                     .center = d->center,
                                     .group_weights = d->group_weights});
}

void eng_emit_output(eng_emit *emit, const eng_recurrent *d, eng_recurrent_kept *kept) {
    int32_t width = eng_readers(&d->family) * d->family.value_width;
    kept->normed = kept->shifted = kept->out;
    if (d->norm && d->norm_bias < 0) {
        kept->normed = eng_emit_activation(emit, width);
        emit_norm(emit, d, kept->out, d->norm_weight, kept->gate, kept->normed);
        return;
    }
    if (d->norm) {
        kept->unit = eng_emit_activation(emit, width);
        kept->normed = kept->shifted = eng_emit_activation(emit, width);
        emit_norm(emit, d, kept->out, -1, eng_null(), kept->unit);
        eng_emit_affine(emit, kept->unit, d->norm_weight, d->norm_bias, kept->shifted);
    }
    if (d->gate.rows == 0)
        return;
    kept->normed = eng_emit_activation(emit, width);
    eng_emit_op(emit, KERN_OP_GLU,
                &(kern_glu_args){.gate = kept->gate,
                                 .up = kept->shifted,
                                 .y = kept->normed,
                                 .width = width,
                                 .activation = d->gate_activation});
}

static void emit_norm_backward(eng_emit *emit, const eng_recurrent *d, kern_ptr x, int32_t weight, kern_ptr gate,
                               kern_ptr dy, kern_ptr dx, kern_ptr dgate) {
    int32_t width = eng_readers(&d->family) * d->family.value_width;
    eng_emit_op(emit, KERN_OP_RMSNORM_BACKWARD,
                &(kern_rmsnorm_backward_args){.x = x,
                                              .weight = eng_param(weight),
                                              .gate = gate,
                                              .dy = dy,
                                              .dx = dx,
                                              .dgate = dgate,
                                              .grad_weight = eng_grad(weight),
                                              .groups = d->norm_groups,
                                              .width = width / d->norm_groups,
                                              .eps = d->norm_eps,
                                              .activation = d->gate_activation,
                                              .gate_first = d->gate_first,
                                              .center = d->center,
                                              .group_weights = d->group_weights});
}

void eng_emit_output_backward(eng_emit *emit, const eng_recurrent *d, const eng_recurrent_kept *kept, kern_ptr d_normed,
                              kern_ptr d_gate) {
    int32_t width = eng_readers(&d->family) * d->family.value_width;
    if (d->norm && d->norm_bias < 0) {
        emit_norm_backward(emit, d, kept->out, d->norm_weight, kept->gate, d_normed, d_normed, d_gate);
        return;
    }
    if (d->gate.rows > 0)
        eng_emit_op(emit, KERN_OP_GLU_BACKWARD,
                    &(kern_glu_backward_args){.gate = kept->gate,
                                              .up = kept->shifted,
                                              .dy = d_normed,
                                              .dgate = d_gate,
                                              .dup = d_normed,
                                              .width = width,
                                              .activation = d->gate_activation});
    if (!d->norm)
        return;
    kern_ptr d_unit = eng_emit_scratch(emit, width);
    eng_emit_affine_backward(emit, kept->unit, d->norm_weight, d->norm_bias, d_normed, d_unit);
    emit_norm_backward(emit, d, kept->out, -1, eng_null(), d_unit, d_normed, eng_null());
}
