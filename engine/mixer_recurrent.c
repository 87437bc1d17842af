// SPDX-License-Identifier: Apache-2.0
// Recurrent layers: from branches and gates through the core to the output, and backward; what their mixers declare.
//
// The description of a layer is made anew for every plan from config and tensor table, so nothing of it is stored.
// Backward reads what forward kept; the gates' gradients are made in place of the core's.
#include "engine/mixer_recurrent.h"

_Static_assert(sizeof(eng_recurrent_kept) <= ENG_MAX_KEPT * sizeof(kern_ptr), "kept references");

static eng_recurrent_kept *kept_of(eng_emit *emit, int32_t layer) {
    return (eng_recurrent_kept *)emit->kept[layer];
}

static int64_t decay_width(const eng_recurrent *d) {
    return d->family.decay == KERN_DECAY_CHANNEL ? (int64_t)d->family.heads * d->family.key_width : d->family.heads;
}

static bool decay_moves(const eng_recurrent *d) {
    return d->family.decay == KERN_DECAY_SCALAR || d->family.decay == KERN_DECAY_CHANNEL;
}

// ---- forward

static kern_ptr emit_gate_input(eng_emit *emit, const eng_projection *projection, kern_ptr x, kern_ptr low) {
    if (projection->rows == 0)
        return eng_null();
    kern_ptr y = eng_emit_activation(emit, projection->rows);
    eng_emit_projection(emit, projection, x, low, eng_null(), y);
    return y;
}

// Everything that reads x, then what reads the first factors: neighbours that a backend may run as one.
static void emit_inputs(eng_emit *emit, const eng_recurrent *d, kern_ptr x, eng_recurrent_kept *kept) {
    kept->a_low = eng_emit_low(emit, &d->a, true);
    kept->gate_low = eng_emit_low(emit, &d->gate, true);
    eng_emit_down(emit, &d->a, x, kept->a_low);
    eng_emit_down(emit, &d->gate, x, kept->gate_low);
    eng_emit_branch_input(emit, &d->q, x, &kept->q);
    eng_emit_branch_input(emit, &d->k, x, &kept->k);
    eng_emit_branch_input(emit, &d->v, x, &kept->v);
    kept->b = emit_gate_input(emit, &d->b, x, eng_null());
    kept->a = emit_gate_input(emit, &d->a, x, kept->a_low);
    kept->gate = emit_gate_input(emit, &d->gate, x, kept->gate_low);
}

static void emit_branches(eng_emit *emit, int32_t layer, const eng_recurrent *d, eng_recurrent_kept *kept) {
    const eng_branch *const branch[] = {&d->q, &d->k, &d->v};
    eng_branch_kept *const own[] = {&kept->q, &kept->k, &kept->v};
    for (int i = 0; i < 3; i++)
        eng_emit_branch_window(emit, layer, branch[i], own[i]);
    for (int i = 0; i < 3; i++)
        eng_emit_branch_features(emit, branch[i], own[i]);
    for (int i = 0; i < 3; i++)
        eng_emit_branch_ready(emit, branch[i], own[i]);
}

static void emit_gates(eng_emit *emit, int32_t layer, const eng_recurrent *d) {
    eng_recurrent_kept *kept = kept_of(emit, layer);
    kept->g = decay_moves(d) ? eng_emit_activation(emit, decay_width(d)) : eng_param(d->decay);
    kept->beta = d->family.weighted ? eng_emit_activation(emit, d->family.heads) : eng_null();
    kept->stabiliser = d->max_plus ? eng_emit_activation(emit, d->family.heads) : eng_null();
    if (d->max_plus) {
        eng_emit_op(emit, KERN_OP_MAXPLUS_GATES,
                    &(kern_maxplus_gates_args){.input = kept->b,
                                               .forget = kept->a,
                                               .state = eng_emit_state(emit, layer, d->stabiliser),
                                               .g = kept->g,
                                               .beta = kept->beta,
                                               .m = kept->stabiliser,
                                               .heads = d->family.heads,
                                               .soft_cap = d->gate_soft_cap});
        return;
    }
    if (d->gates.decay_law == KERN_DECAY_LAW_NONE && d->gates.write_law == KERN_WRITE_LAW_NONE)
        return;
    eng_emit_op(emit, KERN_OP_GATES,
                &(kern_gates_args){.a = kept->a,
                                   .b = kept->b,
                                   .A_log = eng_param(d->A_log),
                                   .dt_bias = eng_param(d->dt_bias),
                                   .g = decay_moves(d) ? kept->g : eng_null(),
                                   .beta = kept->beta,
                                   .gates = d->gates});
}

static void emit_family(eng_emit *emit, int32_t layer, const eng_recurrent *d, eng_recurrent_kept *kept) {
    const kern_recurrence *family = &d->family;
    uint64_t snapshot =
        sizeof(float) * (uint64_t)family->heads * (uint64_t)family->key_width * (uint64_t)eng_columns(family);
    kept->read = eng_emit_activation(emit, (int64_t)eng_readers(family) * eng_columns(family));
    kept->snapshots =
        eng_trains(emit) ? eng_emit_activation_bytes(emit, snapshot * (uint64_t)emit->chunks) : eng_null();
    eng_emit_op(emit, KERN_OP_RECURRENCE,
                &(kern_recurrence_args){.q = kept->q.ready,
                                        .k = kept->k.ready,
                                        .v = kept->v.ready,
                                        .g = kept->g,
                                        .beta = kept->beta,
                                        .skip = eng_param(d->skip),
                                        .state = eng_emit_state(emit, layer, 0),
                                        .o = kept->read,
                                        .snapshots = kept->snapshots,
                                        .family = *family});
}

static void emit_core(eng_emit *emit, int32_t layer, const eng_recurrent *d) {
    eng_recurrent_kept *kept = kept_of(emit, layer);
    const kern_recurrence *family = &d->family;
    const eng_core *core = d->core;
    (core ? core->forward : emit_family)(emit, layer, d, kept);
    kept->out = kept->read;
    if (!d->normalise)
        return;
    kept->out = eng_emit_activation(emit, (int64_t)eng_readers(family) * family->value_width);
    eng_emit_op(emit, KERN_OP_NORMALISE,
                &(kern_normalise_args){.o = kept->read,
                                       .m = kept->stabiliser,
                                       .h = kept->out,
                                       .heads = eng_readers(family),
                                       .value_width = family->value_width,
                                       .eps = d->normaliser_eps});
}

void eng_recurrent_forward(eng_emit *emit, int32_t layer, kern_ptr x, kern_ptr residual, kern_ptr y) {
    eng_recurrent d = eng_recurrent_describe(emit->model, layer);
    eng_recurrent_kept *kept = kept_of(emit, layer);
    emit_inputs(emit, &d, x, kept);
    emit_branches(emit, layer, &d, kept);
    emit_gates(emit, layer, &d);
    emit_core(emit, layer, &d);
    eng_emit_output(emit, &d, kept);
    if (y.ref != 0)
        eng_emit_projection(emit, &d.out, kept->normed, eng_null(), residual, y);
}

// ---- backward

// From the gradient of the output projection's input to that of the core's read-out.
static kern_ptr emit_output_backward(eng_emit *emit, int32_t layer, const eng_recurrent *d, kern_ptr d_normed,
                                     kern_ptr d_gate) {
    const eng_recurrent_kept *kept = kept_of(emit, layer);
    eng_emit_output_backward(emit, d, kept, d_normed, d_gate);
    if (!d->normalise)
        return d_normed;
    kern_ptr d_read = eng_emit_scratch(emit, (int64_t)eng_readers(&d->family) * eng_columns(&d->family));
    eng_emit_op(emit, KERN_OP_NORMALISE_BACKWARD,
                &(kern_normalise_backward_args){.o = kept->read,
                                                .m = kept->stabiliser,
                                                .dh = d_normed,
                                                .d_o = d_read,
                                                .heads = eng_readers(&d->family),
                                                .value_width = d->family.value_width,
                                                .eps = d->normaliser_eps});
    return d_read;
}

static void emit_family_backward(eng_emit *emit, int32_t layer, const eng_recurrent *d, const eng_recurrent_kept *kept,
                                 kern_ptr d_read, const eng_recurrent_gradients *grad) {
    (void)layer;
    eng_emit_op(emit, KERN_OP_RECURRENCE_BACKWARD,
                &(kern_recurrence_backward_args){.q = kept->q.ready,
                                                 .k = kept->k.ready,
                                                 .v = kept->v.ready,
                                                 .g = kept->g,
                                                 .beta = kept->beta,
                                                 .skip = eng_param(d->skip),
                                                 .snapshots = kept->snapshots,
                                                 .d_o = d_read,
                                                 .dq = grad->q,
                                                 .dk = grad->k,
                                                 .dv = grad->v,
                                                 .dg = grad->g,
                                                 .dbeta = grad->beta,
                                                 .grad_skip = eng_grad(d->skip),
                                                 .family = d->family});
}

static eng_recurrent_gradients emit_core_backward(eng_emit *emit, int32_t layer, const eng_recurrent *d,
                                                  kern_ptr d_read) {
    const eng_core *core = d->core;
    eng_recurrent_gradients grad = {
        .q = eng_emit_scratch(emit, (int64_t)d->q.heads * eng_branch_width(&d->q)),
        .k = eng_emit_scratch(emit, (int64_t)d->k.heads * eng_branch_width(&d->k)),
        .v = eng_emit_scratch(emit, (int64_t)d->v.heads * d->v.width),
        .g = decay_moves(d) ? eng_emit_scratch(emit, decay_width(d)) : eng_null(),
        .beta = d->family.weighted ? eng_emit_scratch(emit, d->family.heads) : eng_null(),
    };
    (core ? core->backward : emit_family_backward)(emit, layer, d, kept_of(emit, layer), d_read, &grad);
    return grad;
}

// In place: the gradients of g and beta become those of a and b.
static void emit_gates_backward(eng_emit *emit, int32_t layer, const eng_recurrent *d,
                                const eng_recurrent_gradients *grad) {
    const eng_recurrent_kept *kept = kept_of(emit, layer);
    if (d->max_plus) {
        eng_emit_op(emit, KERN_OP_MAXPLUS_GATES_BACKWARD,
                    &(kern_maxplus_gates_backward_args){.input = kept->b,
                                                        .forget = kept->a,
                                                        .beta = kept->beta,
                                                        .dg = grad->g,
                                                        .dbeta = grad->beta,
                                                        .dinput = grad->beta,
                                                        .dforget = grad->g,
                                                        .heads = d->family.heads,
                                                        .soft_cap = d->gate_soft_cap});
        return;
    }
    if (d->a.rows == 0 && d->b.rows == 0)
        return;
    eng_emit_op(emit, KERN_OP_GATES_BACKWARD,
                &(kern_gates_backward_args){.a = kept->a,
                                            .b = kept->b,
                                            .A_log = eng_param(d->A_log),
                                            .dt_bias = eng_param(d->dt_bias),
                                            .dg = grad->g,
                                            .dbeta = grad->beta,
                                            .da = d->a.rows > 0 ? grad->g : eng_null(),
                                            .db = d->b.rows > 0 ? grad->beta : eng_null(),
                                            .grad_A_log = eng_grad(d->A_log),
                                            .grad_dt_bias = eng_grad(d->dt_bias),
                                            .gates = d->gates});
}

void eng_recurrent_backward(eng_emit *emit, int32_t layer, kern_ptr x, kern_ptr dy, kern_ptr dx) {
    eng_recurrent d = eng_recurrent_describe(emit->model, layer);
    const eng_recurrent_kept *kept = kept_of(emit, layer);
    int64_t width = (int64_t)eng_readers(&d.family) * d.family.value_width;
    kern_ptr d_normed = eng_emit_scratch(emit, width);
    kern_ptr d_gate = d.gate.rows > 0 ? eng_emit_scratch(emit, width) : eng_null();
    eng_emit_projection_backward(emit, &d.out, kept->normed, eng_null(), dy, d_normed, false);
    kern_ptr d_read = emit_output_backward(emit, layer, &d, d_normed, d_gate);
    eng_recurrent_gradients grad = emit_core_backward(emit, layer, &d, d_read);
    emit_gates_backward(emit, layer, &d, &grad);
    eng_emit_branch_backward(emit, &d.q, &kept->q, x, grad.q, dx, false);
    eng_emit_branch_backward(emit, &d.k, &kept->k, x, grad.k, dx, true);
    eng_emit_branch_backward(emit, &d.v, &kept->v, x, grad.v, dx, true);
    if (d.a.rows > 0)
        eng_emit_projection_backward(emit, &d.a, x, kept->a_low, grad.g, dx, true);
    if (d.b.rows > 0)
        eng_emit_projection_backward(emit, &d.b, x, eng_null(), grad.beta, dx, true);
    if (d.gate.rows > 0)
        eng_emit_projection_backward(emit, &d.gate, x, kept->gate_low, d_gate, dx, true);
}
