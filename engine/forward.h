// SPDX-License-Identifier: Apache-2.0
// A model's plan: the operations of a forward pass, and of the backward pass for training, emitted from the mixer
// table.
//
// A model that ends with its loop is read at one of its loops, as the row says (kern_exit), when it serves or scores;
// all loops run whatever is read. A plan is made once per model and size and run with any batch up to that size.
// Serving, scoring and training are three kinds of the same emission, so what is trained is what is served.
#ifndef ENGINE_FORWARD_H
#define ENGINE_FORWARD_H

#include "engine/checkpoint.h"
#include "engine/model.h"
#include "kernels/kernels.h"

typedef enum eng_plan_kind {
    ENG_PLAN_SERVE, // logits of rows->logits_token, then sampling; reads and writes state slots and pages
    ENG_PLAN_SCORE, // loss of every target
    ENG_PLAN_TRAIN, // loss, and gradients of every parameter added to weights->grad
    ENG_PLAN_TEACH, // plan->hidden alone, for the plans of a student (options->teacher)
} eng_plan_kind;

typedef enum eng_recompute { ENG_RECOMPUTE_NONE, ENG_RECOMPUTE_MIXER, ENG_RECOMPUTE_BLOCK } eng_recompute;

// A serving plan in parts (loop.h), each a plan of its own, of models that end with their loop. All but the last two
// run in one memory by turns; what one leaves for another lies in the slots, or in plan->solves and plan->sum, which
// stand at the same place in all of them.
typedef enum eng_plan_part {
    ENG_PART_WHOLE,
    ENG_PART_FIRST,  // ids through the first loop to what waits for the next one
    ENG_PART_FOLLOW, // who goes through loop number options->level, from 1 on: memory->next (EXIT_FOLLOW)
    ENG_PART_SETTLE, // likewise through loop 1, where no token has gone through the first one in this run
    ENG_PART_LOOP,   // with those rows: what waits for loop options->level through it to what waits for the next one
    ENG_PART_HEAD,   // plan->hidden to logits and what is drawn
    ENG_PART_RESUME, // of any model: what the rows' slots keep of the last token to logits and what is drawn
} eng_plan_part;

// What a training plan of a model that ends with its loop minimises, of each token (kern_exit_objective). A scoring
// plan with one of them but FINAL tells the losses of all loops besides.
typedef enum eng_loop_loss {
    ENG_LOOP_LOSS_FINAL,    // the last loop's loss
    ENG_LOOP_LOSS_WEIGHTED, // a sum of the loops'
    ENG_LOOP_LOSS_EXPECTED, // their mean over the gate's exits, with an entropy; the rest needs a gate too
    ENG_LOOP_LOSS_NEXT,     // the gate alone, on what the next loop gains,
    ENG_LOOP_LOSS_PREVIOUS, // or on what the loop itself has gained; nothing else has a gradient
} eng_loop_loss;

typedef struct eng_plan_options {
    eng_plan_kind kind;
    int32_t max_tokens, max_rows, max_logits;
    eng_plan_part part; // SERVE
    int32_t level;
    eng_recompute recompute;
    float backward_tolerance; // TRAIN; 0: 1e-5
    // TRAIN: the last so many loops are differentiated, 0: all; what the blocks of those before add to the residual
    // stream counts as constant, so that the layers and the embedding before the loop learn by the stream alone.
    int32_t backward_loops;
    eng_loop_loss loop_loss;
    float loop_constant[ENG_MAX_LOOPS]; // WEIGHTED: a weight a loop; EXPECTED: the logarithms of a prior, 0: entropy
                                        // alone
    float gate_sharpness, gate_margin;  // NEXT, PREVIOUS
    // SCORE, TRAIN with a loop_loss of FINAL: another model of the same vocabulary, from which divergence is told and
    // in TRAIN counts too (kern_head_loss_args, whose figures the last three are). A TEACH plan of it, of as many
    // tokens, runs before on the same rows in the same saved memory; weights are those of eng_weights_lend.
    const eng_model *teacher; // NULL: none
    float temperature, loss_share, divergence_share;
} eng_plan_options;

typedef struct eng_plan {
    const eng_model *model;
    eng_plan_options options;
    kern_plan *plan;
    size_t saved_bytes, scratch_bytes;
    // references of outputs (resolve with eng_plan_address); null where the kind has none
    kern_ptr logits;  // (max_logits, vocab)
    kern_ptr finite;  // int32 (max_logits)
    kern_ptr sampled; // int32 (max_logits)
    kern_ptr logprob; // (max_logits)
    kern_ptr loops;   // int32 (max_tokens), from 1, where each token is read; null where outputs of loops are not
    kern_ptr results; // SERVE: finite, sampled, logprob, loops and solves lie in this one block
    size_t results_bytes;
    kern_ptr top_id;      // int32 (max_logits, KERN_MAX_TOP)
    kern_ptr top_logprob; // (max_logits, KERN_MAX_TOP)
    kern_ptr hidden;      // (max_tokens, hidden) after the final norm
    kern_ptr sum;         // FIRST to LOOP: kern_solve_sum (max_tokens), a row: what FOLLOW has added up; null without
                          // Mesa layers
    kern_ptr loss;        // (max_tokens); TRAIN without a teacher: of what is minimised
    kern_ptr divergence;  // (max_tokens), with a teacher
    kern_ptr teacher_hidden; // with a teacher: where its TEACH plan's hidden lies
    // With a loop_loss but FINAL, planes of loop_stride tokens, a loop each; entropy: TRAIN with EXPECTED, float[1]
    // that the caller writes before the first run.
    kern_ptr loop_loss, exit_probability, entropy;
    // SCORE of a model whose loops have outputs: planes of loop_stride tokens, a loop each, of what hidden is chosen
    // from, and of the gate's logits (null without one).
    kern_ptr loop_hidden, loop_gate;
    int32_t loop_stride;
    kern_ptr best;            // SCORE: int32 (max_tokens), the likeliest id of each token with a target, else -1
    kern_ptr solves;          // kern_solve_sum (max_tokens), over all Mesa layers; null without one
    kern_ptr backward_solves; // TRAIN: those of the second solve
} eng_plan;

ENG_CHECKED eng_status eng_plan_create(const eng_model *model, kern_device *device, const eng_plan_options *options,
                                       eng_plan **out, eng_error *error);
void eng_plan_free(eng_plan *plan);

// The memory a plan runs in: saved and scratch are allocated here and freed with eng_memory_free; params and grads are
// the weights'; state and pages are the caller's (NULL without slots). Kinds that never run at the same time may share
// one memory made with the larger of their sizes.
ENG_CHECKED eng_status eng_memory_create(kern_device *device, const eng_weights *weights, size_t saved_bytes,
                                         size_t scratch_bytes, void *state, void *pages, kern_memory *out,
                                         eng_error *error);
void eng_memory_free(kern_device *device, kern_memory *memory);
// The device address of a saved or scratch reference.
void *eng_plan_address(const kern_memory *memory, kern_ptr reference);

// kern_device_open with the engine's status and text: ENG_INVALID for a name that is none, else NO_MEMORY or DEVICE.
// why (NULL: not asked) gets, where the device is open, what "auto" says of CUDA.
ENG_CHECKED eng_status eng_open_device(const kern_device_options *options, char *why, size_t why_size,
                                       kern_device **out, eng_error *error);
// The engine's status and text for a kernel's (code INTERNAL, NO_MEMORY, UNSUPPORTED or DEVICE).
eng_status eng_fail_kernel(eng_error *error, kern_status status, const char *doing);

// Adds the figures of `tokens` tokens (a host copy; NULL: no Mesa layer) to *sum.
void eng_add_solves(const kern_solve_sum *solves, int32_t tokens, eng_compute *sum);
// What lies at a reference into a host copy of plan->results.
static inline void *eng_plan_result(const eng_plan *plan, void *copy, kern_ptr reference) {
    return reference.ref ? (char *)copy + (reference.ref - plan->results.ref) : NULL;
}

#endif
