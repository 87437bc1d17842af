// SPDX-License-Identifier: Apache-2.0
// The outputs of a model's loops: at which each token is read, and what all of them cost in training.
//
// Outputs (after the final norm), the gate's logits and what is made of them lie in planes, a loop each, that live as
// long as the pass. The losses of all loops are made behind the last, since a gate's gradient needs all of them; their
// gradients wait in planes until backward comes to their loop.
#include "engine/forward_internal.h"

enum { PLANE_GRAIN = 16 }; // tokens: planes begin at multiples of 64 bytes

_Static_assert((int)ENG_MAX_LOOPS == (int)KERN_MAX_LOOPS, "as many loops as the kernels take");

static int32_t loops_of(const eng_emit *emit) {
    return emit->model->config.loop.loops;
}

static uint64_t planes_bytes(const eng_emit *emit, int64_t width) {
    return sizeof(float) * (uint64_t)width * (uint64_t)emit->exits.stride * (uint64_t)loops_of(emit);
}

// That of emit->level.
static kern_ptr plane(const eng_emit *emit, kern_ptr planes, int64_t width) {
    uint64_t bytes = sizeof(float) * (uint64_t)width * (uint64_t)emit->exits.stride;
    return (kern_ptr){.ref = planes.ref + (uint64_t)emit->level * bytes};
}

bool eng_reads_loops(const eng_emit *emit) {
    const bool chooses = !eng_trains(emit) || emit->options->loop_loss != ENG_LOOP_LOSS_FINAL;
    return chooses && eng_model_reads_loops(emit->model);
}

void eng_emit_exits_begin(eng_emit *emit) {
    const eng_config *config = &emit->model->config;
    emit->exits.stride = (emit->tokens + PLANE_GRAIN - 1) / PLANE_GRAIN * PLANE_GRAIN;
    emit->exits.hidden = eng_emit_scratch_bytes(emit, planes_bytes(emit, config->hidden_size));
    if (config->loop.exit_gate)
        emit->exits.gate = eng_emit_scratch_bytes(emit, planes_bytes(emit, 1));
    if (emit->options->kind != ENG_PLAN_SCORE)
        return;
    emit->plan->loop_hidden = emit->exits.hidden; // nothing is put there again
    emit->plan->loop_gate = emit->exits.gate;
    emit->plan->loop_stride = emit->exits.stride;
}

void eng_emit_exit(eng_emit *emit, kern_ptr stream) {
    const eng_model *model = emit->model;
    if (emit->exits.hidden.ref == 0)
        return;
    kern_ptr hidden = plane(emit, emit->exits.hidden, model->config.hidden_size);
    eng_emit_norm(emit, stream, model->final_norm, eng_null(), hidden, 1, model->config.norm_eps);
    if (emit->exits.gate.ref != 0)
        eng_emit_linear(emit, hidden, model->exit_gate, model->exit_bias, eng_null(), plane(emit, emit->exits.gate, 1));
}

void eng_emit_exit_read(eng_emit *emit) {
    eng_emit_op(emit, KERN_OP_EXIT_READ,
                &(kern_exit_read_args){.x = emit->exits.hidden,
                                       .z = emit->exits.gate,
                                       .y = emit->plan->hidden,
                                       .loop = emit->plan->loops,
                                       .width = emit->model->config.hidden_size,
                                       .loops = loops_of(emit),
                                       .stride = emit->exits.stride});
}

void eng_emit_final(eng_emit *emit, kern_ptr hidden, kern_ptr gate, int32_t planes, int32_t stride, bool back) {
    const eng_model *model = emit->model;
    const size_t level = (size_t)emit->level;
    eng_emit_op(
        emit, KERN_OP_ROW_END,
        &(kern_row_end_args){.x = hidden,
                             .state = kern_ref(KERN_CLASS_STATE, model->final_offset + level * model->final_stride),
                             .width = model->config.hidden_size,
                             .planes = planes,
                             .stride = stride,
                             .state_stride = (int32_t)(model->final_stride / sizeof(float)),
                             .back = back});
    if (gate.ref != 0)
        eng_emit_op(
            emit, KERN_OP_ROW_END,
            &(kern_row_end_args){.x = gate,
                                 .state = kern_ref(KERN_CLASS_STATE, model->gates_offset + level * model->gates_stride),
                                 .width = 1,
                                 .planes = planes,
                                 .stride = stride,
                                 .state_stride = (int32_t)(model->gates_stride / sizeof(float)),
                                 .back = back});
}

void eng_emit_final_all(eng_emit *emit, bool back) {
    if (eng_reads_loops(emit))
        eng_emit_final(emit, emit->exits.hidden, emit->exits.gate, loops_of(emit), emit->exits.stride, back);
    else
        eng_emit_final(emit, emit->plan->hidden, eng_null(), 1, emit->tokens, back);
}

static kern_ptr state_at(size_t offset) {
    return kern_ref(KERN_CLASS_STATE, offset);
}

static void emit_wait(eng_emit *emit, int32_t loop, kern_ptr x, bool start, bool back) {
    const eng_model *model = emit->model;
    eng_emit_op(emit, KERN_OP_EXIT_WAIT,
                &(kern_exit_wait_args){.x = x,
                                       .list = state_at(eng_model_waiting(model, loop, start)),
                                       .waiting = state_at(model->waiting_offset),
                                       .width = model->config.hidden_size,
                                       .loop = loop,
                                       .back = back});
}

void eng_emit_waiting(eng_emit *emit, int32_t loop, kern_ptr stream, kern_ptr start, bool back) {
    emit_wait(emit, loop, stream, false, back);
    if (emit->model->config.loop.residual_gate)
        emit_wait(emit, loop, start, true, back);
}

void eng_emit_follow(eng_emit *emit) {
    const eng_model *model = emit->model;
    eng_emit_op(emit, KERN_OP_EXIT_FOLLOW,
                &(kern_exit_follow_args){.next = kern_ref(KERN_CLASS_ROWS, 0),
                                         .waiting = state_at(model->waiting_offset),
                                         .z = model->exit_gate >= 0 ? state_at(model->gates_offset) : eng_null(),
                                         .solves = emit->plan->solves,
                                         .sum = emit->plan->sum,
                                         .loop = emit->options->level,
                                         .loops = loops_of(emit),
                                         .z_stride = (int32_t)(model->gates_stride / sizeof(float)),
                                         .begin = emit->options->part == ENG_PART_FOLLOW && emit->options->level == 1});
}

// -------------------------------------------------------------------------------------------------------------- losses

static bool is_gate_alone(const eng_emit *emit) {
    return emit->options->loop_loss == ENG_LOOP_LOSS_NEXT || emit->options->loop_loss == ENG_LOOP_LOSS_PREVIOUS;
}

bool eng_trains_gate_alone(const eng_emit *emit) {
    return eng_trains(emit) && is_gate_alone(emit);
}

static void emit_probabilities(eng_emit *emit) {
    eng_plan *plan = emit->plan;
    if (emit->exits.gate.ref == 0)
        return;
    plan->exit_probability = eng_emit_saved_bytes(emit, planes_bytes(emit, 1));
    eng_emit_op(
        emit, KERN_OP_EXIT_PROBABILITY,
        &(kern_exit_probability_args){
            .z = emit->exits.gate, .p = plan->exit_probability, .loops = loops_of(emit), .stride = emit->exits.stride});
}

// Of the loop emit->level: its loss, and the gradient of its output where that counts.
static void emit_loop_loss(eng_emit *emit) {
    const eng_plan_options *options = emit->options;
    const int32_t hidden = emit->model->config.hidden_size;
    const bool weighted = options->loop_loss == ENG_LOOP_LOSS_WEIGHTED;
    const float scale = weighted ? options->loop_constant[emit->level] : 0;
    eng_head_loss head = {
        .x = plane(emit, emit->exits.hidden, hidden), .loss = plane(emit, emit->plan->loop_loss, 1), .scale = scale};
    if (emit->exits.d_hidden.ref != 0 && !(weighted && scale == 0))
        head.dx = plane(emit, emit->exits.d_hidden, hidden);
    if (options->loop_loss == ENG_LOOP_LOSS_EXPECTED && eng_trains(emit))
        head.factor = plane(emit, emit->plan->exit_probability, 1);
    eng_emit_head_loss(emit, &head);
}

static void emit_objective(eng_emit *emit) {
    static const int32_t objectives[] = {[ENG_LOOP_LOSS_WEIGHTED] = KERN_EXIT_WEIGHTED,
                                         [ENG_LOOP_LOSS_EXPECTED] = KERN_EXIT_EXPECTED,
                                         [ENG_LOOP_LOSS_NEXT] = KERN_EXIT_NEXT,
                                         [ENG_LOOP_LOSS_PREVIOUS] = KERN_EXIT_PREVIOUS};
    const eng_plan_options *options = emit->options;
    const bool gated = options->loop_loss != ENG_LOOP_LOSS_WEIGHTED;
    kern_exit_loss_args args = {.losses = emit->plan->loop_loss,
                                .z = gated ? emit->exits.gate : eng_null(),
                                .entropy = emit->plan->entropy,
                                .loss = emit->plan->loss,
                                .dz = emit->exits.d_gate,
                                .loops = loops_of(emit),
                                .stride = emit->exits.stride,
                                .objective = objectives[options->loop_loss],
                                .sharpness = options->gate_sharpness,
                                .margin = options->gate_margin};
    for (int32_t r = 0; r < args.loops; r++)
        args.constant[r] = options->loop_constant[r];
    eng_emit_op(emit, KERN_OP_EXIT_LOSS, &args);
}

static void emit_gate_backward(eng_emit *emit) {
    const eng_model *model = emit->model;
    const int32_t width = model->config.hidden_size;
    kern_ptr dx = emit->exits.d_hidden.ref ? plane(emit, emit->exits.d_hidden, width) : eng_null();
    eng_emit_linear_backward(emit, plane(emit, emit->exits.hidden, width), model->exit_gate, model->exit_bias,
                             plane(emit, emit->exits.d_gate, 1), dx, true);
}

void eng_emit_exit_losses(eng_emit *emit) {
    eng_plan *plan = emit->plan;
    const bool trains = eng_trains(emit), gated = emit->options->loop_loss != ENG_LOOP_LOSS_WEIGHTED;
    plan->loop_stride = emit->exits.stride;
    plan->loop_loss = eng_emit_saved_bytes(emit, planes_bytes(emit, 1));
    if (trains && emit->options->loop_loss == ENG_LOOP_LOSS_EXPECTED)
        plan->entropy = eng_emit_saved_bytes(emit, sizeof(float));
    if (trains && !is_gate_alone(emit))
        emit->exits.d_hidden = eng_emit_scratch_bytes(emit, planes_bytes(emit, emit->model->config.hidden_size));
    if (trains && gated)
        emit->exits.d_gate = eng_emit_scratch_bytes(emit, planes_bytes(emit, 1));
    emit_probabilities(emit);
    for (emit->level = 0; emit->level < loops_of(emit); emit->level++)
        emit_loop_loss(emit);
    if (trains)
        emit_objective(emit);
    for (emit->level = 0; trains && gated && emit->level < loops_of(emit); emit->level++)
        emit_gate_backward(emit);
    emit->level = 0;
}

void eng_emit_exit_backward(eng_emit *emit, kern_ptr stream, kern_ptr d_residual) {
    const eng_model *model = emit->model;
    const bool weighted = emit->options->loop_loss == ENG_LOOP_LOSS_WEIGHTED;
    if (emit->exits.d_hidden.ref == 0 || (weighted && emit->options->loop_constant[emit->level] == 0))
        return;
    eng_emit_norm_backward(emit, stream, model->final_norm, eng_null(),
                           plane(emit, emit->exits.d_hidden, model->config.hidden_size), d_residual, eng_null(), 1,
                           model->config.norm_eps, true);
}
