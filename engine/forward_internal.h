// SPDX-License-Identifier: Apache-2.0
// The emitter: what forward.c and the mixers share while a plan is written.
//
// Buffers are byte offsets handed out by two bump allocators. *Activations* are what backward reads: they live in the
// saved class, or in scratch when nothing will read them (serving, scoring) or when they are computed again
// (recomputation). *Scratch* dies with the block. The first failure sticks; eng_plan_create reports it.
#ifndef ENGINE_FORWARD_INTERNAL_H
#define ENGINE_FORWARD_INTERNAL_H

#include "engine/forward.h"
#include "engine/mixer.h"

enum { ENG_MAX_KEPT = 40 };

struct eng_emit {
    const eng_model *model;
    const eng_plan_options *options;
    eng_plan *plan;
    int32_t tokens;    // max_tokens of the plan
    int32_t chunks;    // the most chunks that many tokens and rows can make
    int32_t head_tile; // tokens whose logits are there at once, in training
    uint64_t saved, scratch, scratch_peak;
    bool keep;                     // activations go to saved
    bool again;                    // operations of the forward pass are being emitted once more (recomputation)
    int32_t level;                 // loop that is being emitted, from 0; 0 outside the loop
    struct {                       // a plane a loop, `stride` tokens each; null where outputs of loops are not read
        kern_ptr hidden, gate;     // (loops, stride, hidden), (loops, stride): after the final norm, the gate's logits
        kern_ptr d_hidden, d_gate; // their gradients, where they are wanted
        int32_t stride;
    } exits;
    bool constant;                  // backward will leave these blocks out
    kern_ptr (*kept)[ENG_MAX_KEPT]; // (layers) the mixer's own references for backward, of this level
    eng_status status;
    eng_error *error;
};

static inline kern_ptr eng_null(void) {
    return kern_ref(KERN_CLASS_NULL, 0);
}
// Tensor `index` of the table; null for -1.
static inline kern_ptr eng_param(int32_t index) {
    return index < 0 ? eng_null() : kern_ref(KERN_CLASS_PARAM, (uint64_t)index);
}
static inline kern_ptr eng_grad(int32_t index) {
    return index < 0 ? eng_null() : kern_ref(KERN_CLASS_GRAD, (uint64_t)index);
}
static inline bool eng_trains(const eng_emit *emit) {
    return emit->options->kind == ENG_PLAN_TRAIN;
}
static inline bool eng_teaches(const eng_emit *emit) {
    return emit->options->kind == ENG_PLAN_TEACH;
}
static inline bool eng_serves(const eng_emit *emit) {
    return emit->options->kind == ENG_PLAN_SERVE;
}

// Appends an operation; args is the operation's struct with references.
void eng_emit_op(eng_emit *emit, kern_op op, const void *args);

kern_ptr eng_emit_saved_bytes(eng_emit *emit, uint64_t bytes);
kern_ptr eng_emit_scratch_bytes(eng_emit *emit, uint64_t bytes);
kern_ptr eng_emit_activation_bytes(eng_emit *emit, uint64_t bytes);
kern_ptr eng_emit_activation(eng_emit *emit, int64_t width); // (T, width)
kern_ptr eng_emit_scratch(eng_emit *emit, int64_t width);    // (T, width)

// The layer's state of this level at `offset` bytes of its part of the slot; null when the plan has no slots.
kern_ptr eng_emit_state(const eng_emit *emit, int32_t layer, size_t offset);

// forward_loop.c, of emit->level: the loop's input; start * its gate is added to stream in place.
kern_ptr eng_emit_loop_input(eng_emit *emit, kern_ptr stream);
void eng_emit_loop_output(eng_emit *emit, kern_ptr start, kern_ptr stream);
// stream and start as in forward. The gradient of the loops' start is gathered in d_start and joins d_residual last.
void eng_emit_loop_input_backward(eng_emit *emit, kern_ptr stream, kern_ptr d_residual);
void eng_emit_loop_output_backward(eng_emit *emit, kern_ptr start, kern_ptr d_residual, kern_ptr d_start);
kern_ptr eng_emit_loop_start_gradient(eng_emit *emit);
void eng_emit_loop_start_backward(eng_emit *emit, kern_ptr d_start, kern_ptr d_residual);

// forward_exit.c, the outputs of the loops: whether they are wanted; makes room; keeps that of emit->level; the wanted
// one to plan->hidden.
bool eng_reads_loops(const eng_emit *emit);
void eng_emit_exits_begin(eng_emit *emit);
void eng_emit_exit(eng_emit *emit, kern_ptr stream);
void eng_emit_exit_read(eng_emit *emit);
// What of each row's last token the next id is drawn from, to its slot or back: `planes` from emit->level on.
void eng_emit_final(eng_emit *emit, kern_ptr hidden, kern_ptr gate, int32_t planes, int32_t stride, bool back);
// That of the whole pass.
void eng_emit_final_all(eng_emit *emit, bool back);
// Vectors that wait for a loop, to the slots' lists or back, stream and start as in forward; and who goes through
// emit->options->level.
void eng_emit_waiting(eng_emit *emit, int32_t loop, kern_ptr stream, kern_ptr start, bool back);
void eng_emit_follow(eng_emit *emit);
// The losses of all loops, and in training of the objective, with the gradients of the gate and of the outputs.
bool eng_trains_gate_alone(const eng_emit *emit);
void eng_emit_exit_losses(eng_emit *emit);
// Adds what the output of emit->level, read from stream, gives to d_residual.
void eng_emit_exit_backward(eng_emit *emit, kern_ptr stream, kern_ptr d_residual);

// forward.c: the loss of x (T, hidden); null members are not wanted.
typedef struct eng_head_loss {
    kern_ptr x, loss, best, dx, factor;
    float scale;
} eng_head_loss;
void eng_emit_head_loss(eng_emit *emit, const eng_head_loss *head);

// Shorthands for the operations that every mixer uses. weight and bias are tensor indices.
void eng_emit_linear(eng_emit *emit, kern_ptr x, int32_t weight, int32_t bias, kern_ptr residual, kern_ptr y);
// dx (written, or added with accumulate; null: not wanted) and the gradients of weight and bias.
void eng_emit_linear_backward(eng_emit *emit, kern_ptr x, int32_t weight, int32_t bias, kern_ptr dy, kern_ptr dx,
                              bool accumulate);
void eng_emit_norm(eng_emit *emit, kern_ptr x, int32_t weight, kern_ptr gate, kern_ptr y, int32_t groups, float eps);
void eng_emit_norm_backward(eng_emit *emit, kern_ptr x, int32_t weight, kern_ptr gate, kern_ptr dy, kern_ptr dx,
                            kern_ptr dgate, int32_t groups, float eps, bool accumulate);
// y = weight x + bias, channel by channel: what a norm with a bias does to a unit vector. dx may not be dy.
void eng_emit_affine(eng_emit *emit, kern_ptr x, int32_t weight, int32_t bias, kern_ptr y);
void eng_emit_affine_backward(eng_emit *emit, kern_ptr x, int32_t weight, int32_t bias, kern_ptr dy, kern_ptr dx);

#endif
