// SPDX-License-Identifier: Apache-2.0
// Emits a model's plan: embed, blocks, norm, head, and their backward in reverse.
//
// The residual stream of a serving plan is one buffer that every block adds to. A training plan writes each block's
// output to a buffer of its own, since the norms' backward reads their inputs. The loops of a looped model are so many
// more blocks, with the same tensors and states of their own. With recomputation a block's (or a
// mixer's) activations lie in scratch, and backward emits their operations again just before it needs them.
#include "engine/forward_internal.h"

#include <math.h>
#include <stdlib.h>

// 16 MiB of logits at a vocabulary of 32,000; as many as fill a device that is not the host.
enum { HEAD_TILE_TOKENS = 128, HEAD_TILE_DEVICE_TOKENS = 2048 };

typedef struct block_kept {
    kern_ptr input, mixer_unit, mixer_normed, middle, mlp_unit, mlp_normed, gate, up, activated;
} block_kept;

// One of a block's norms; with a bias the unit vector is kept between.
static kern_ptr emit_block_norm(eng_emit *emit, kern_ptr x, int32_t weight, int32_t bias, kern_ptr *unit) {
    const eng_config *config = &emit->model->config;
    kern_ptr y = eng_emit_activation(emit, config->hidden_size);
    *unit = bias >= 0 ? eng_emit_activation(emit, config->hidden_size) : eng_null();
    if (bias < 0) {
        eng_emit_norm(emit, x, weight, eng_null(), y, 1, config->norm_eps);
        return y;
    }
    eng_emit_op(
        emit, KERN_OP_RMSNORM,
        &(kern_rmsnorm_args){.x = x, .y = *unit, .groups = 1, .width = config->hidden_size, .eps = config->norm_eps});
    eng_emit_affine(emit, *unit, weight, bias, y);
    return y;
}

// Adds to d_residual.
static void emit_block_norm_backward(eng_emit *emit, kern_ptr x, int32_t weight, int32_t bias, kern_ptr unit,
                                     kern_ptr dy, kern_ptr d_residual) {
    const eng_config *config = &emit->model->config;
    if (bias < 0) {
        eng_emit_norm_backward(emit, x, weight, eng_null(), dy, d_residual, eng_null(), 1, config->norm_eps, true);
        return;
    }
    kern_ptr d_unit = eng_emit_scratch(emit, config->hidden_size);
    eng_emit_affine_backward(emit, unit, weight, bias, dy, d_unit);
    eng_emit_op(emit, KERN_OP_RMSNORM_BACKWARD,
                &(kern_rmsnorm_backward_args){.x = x,
                                              .dy = d_unit,
                                              .dx = d_residual,
                                              .groups = 1,
                                              .width = config->hidden_size,
                                              .eps = config->norm_eps,
                                              .accumulate = true});
}

// The MLP's half of a block: output = middle + down(silu(gate) * up).
static void emit_mlp(eng_emit *emit, int32_t layer, block_kept *block, kern_ptr output) {
    const eng_config *config = &emit->model->config;
    const eng_layer *tensor = &emit->model->layer[layer];
    block->mlp_normed = emit_block_norm(emit, block->middle, tensor->mlp_norm, tensor->mlp_norm_bias, &block->mlp_unit);
    block->gate = eng_emit_activation(emit, config->intermediate_size);
    block->up = eng_emit_activation(emit, config->intermediate_size);
    block->activated = eng_emit_activation(emit, config->intermediate_size);
    eng_emit_linear(emit, block->mlp_normed, tensor->gate_proj, tensor->gate_bias, eng_null(), block->gate);
    eng_emit_linear(emit, block->mlp_normed, tensor->up_proj, tensor->up_bias, eng_null(), block->up);
    eng_emit_op(emit, KERN_OP_GLU,
                &(kern_glu_args){.gate = block->gate,
                                 .up = block->up,
                                 .y = block->activated,
                                 .width = config->intermediate_size,
                                 .activation = config->mlp_activation});
    if (output.ref != 0)
        eng_emit_linear(emit, block->activated, tensor->down_proj, tensor->down_bias, block->middle, output);
}

// The mixer's half: middle = input + mixer(norm(input)). A null `middle` leaves the last product out (recomputation).
static void emit_mixer(eng_emit *emit, int32_t layer, block_kept *block, kern_ptr middle) {
    const eng_config *config = &emit->model->config;
    const eng_layer *tensor = &emit->model->layer[layer];
    block->mixer_normed =
        emit_block_norm(emit, block->input, tensor->mixer_norm, tensor->mixer_norm_bias, &block->mixer_unit);
    config->layer[layer].mixer->forward(emit, layer, block->mixer_normed, block->input, middle);
}

// fresh: the input stays as it is.
static kern_ptr emit_block(eng_emit *emit, int32_t layer, kern_ptr input, bool fresh, block_kept *block) {
    int32_t hidden = emit->model->config.hidden_size;
    eng_recompute recompute = emit->options->recompute;
    uint64_t mark = emit->scratch;
    bool has_mlp = emit->model->config.intermediate_size > 0, keeps = eng_trains(emit) && !emit->constant;
    kern_ptr output = input;
    block->input = input;
    if (keeps || fresh)
        output = eng_emit_saved_bytes(emit, sizeof(float) * (uint64_t)hidden * (uint64_t)emit->tokens);
    block->middle = output;
    if (keeps) {
        emit->keep = recompute != ENG_RECOMPUTE_BLOCK;
        block->middle = has_mlp ? eng_emit_activation(emit, hidden) : output;
        emit->keep = recompute == ENG_RECOMPUTE_NONE;
    }
    emit_mixer(emit, layer, block, block->middle);
    emit->keep = keeps && recompute != ENG_RECOMPUTE_BLOCK;
    if (has_mlp)
        emit_mlp(emit, layer, block, output);
    emit->keep = false;
    emit->scratch = mark;
    return output;
}

static void emit_mlp_backward(eng_emit *emit, int32_t layer, const block_kept *block, kern_ptr d_residual) {
    const eng_config *config = &emit->model->config;
    const eng_layer *tensor = &emit->model->layer[layer];
    kern_ptr d_activated = eng_emit_scratch(emit, config->intermediate_size);
    kern_ptr d_gate = eng_emit_scratch(emit, config->intermediate_size);
    kern_ptr d_normed = eng_emit_scratch(emit, config->hidden_size);
    eng_emit_linear_backward(emit, block->activated, tensor->down_proj, tensor->down_bias, d_residual, d_activated,
                             false);
    eng_emit_op(emit, KERN_OP_GLU_BACKWARD,
                &(kern_glu_backward_args){.gate = block->gate,
                                          .up = block->up,
                                          .dy = d_activated,
                                          .dgate = d_gate,
                                          .dup = d_activated,
                                          .width = config->intermediate_size,
                                          .activation = config->mlp_activation});
    eng_emit_linear_backward(emit, block->mlp_normed, tensor->gate_proj, tensor->gate_bias, d_gate, d_normed, false);
    eng_emit_linear_backward(emit, block->mlp_normed, tensor->up_proj, tensor->up_bias, d_activated, d_normed, true);
    emit_block_norm_backward(emit, block->middle, tensor->mlp_norm, tensor->mlp_norm_bias, block->mlp_unit, d_normed,
                             d_residual);
}

// d_residual: in, the gradient of the block's output; out, of its input.
static void emit_block_backward(eng_emit *emit, int32_t layer, block_kept *block, kern_ptr d_residual) {
    const eng_config *config = &emit->model->config;
    eng_recompute recompute = emit->options->recompute;
    bool has_mlp = config->intermediate_size > 0;
    uint64_t mark = emit->scratch;
    emit->keep = false;
    emit->again = true;
    if (recompute == ENG_RECOMPUTE_BLOCK) {
        block->middle = has_mlp ? eng_emit_scratch(emit, config->hidden_size) : eng_null();
        emit_mixer(emit, layer, block, block->middle);
        if (has_mlp)
            emit_mlp(emit, layer, block, eng_null());
    }
    if (has_mlp)
        emit_mlp_backward(emit, layer, block, d_residual);
    if (recompute == ENG_RECOMPUTE_MIXER)
        emit_mixer(emit, layer, block, eng_null());
    kern_ptr d_normed = eng_emit_scratch(emit, config->hidden_size);
    config->layer[layer].mixer->backward(emit, layer, block->mixer_normed, d_residual, d_normed);
    const eng_layer *tensor = &emit->model->layer[layer];
    emit_block_norm_backward(emit, block->input, tensor->mixer_norm, tensor->mixer_norm_bias, block->mixer_unit,
                             d_normed, d_residual);
    emit->scratch = mark;
}

// Everything the forward pass leaves for backward, by level: levels are the loops; layers outside count as level 0.
typedef struct model_kept {
    block_kept *block;                  // (loops, layers)
    kern_ptr (*mixer)[ENG_MAX_KEPT];    // likewise
    kern_ptr before[ENG_MAX_LOOPS + 1]; // what went into each loop, and what came out of the last
} model_kept;

static void set_level(eng_emit *emit, model_kept *kept, int32_t level) {
    emit->level = level;
    emit->kept = kept->mixer + (size_t)level * (size_t)emit->model->config.layers;
}

static block_kept *block_of(const eng_emit *emit, model_kept *kept, int32_t layer) {
    return &kept->block[(size_t)emit->level * (size_t)emit->model->config.layers + (size_t)layer];
}

// Layers [first, end). fresh: the first leaves its input as it is.
static kern_ptr emit_layers(eng_emit *emit, int32_t first, int32_t end, kern_ptr stream, bool fresh, model_kept *kept) {
    for (int32_t layer = first; layer < end; layer++)
        stream = emit_block(emit, layer, stream, fresh && layer == first, block_of(emit, kept, layer));
    return stream;
}

static void emit_layers_backward(eng_emit *emit, int32_t first, int32_t end, model_kept *kept, kern_ptr d_residual) {
    for (int32_t layer = end; layer-- > first;)
        emit_block_backward(emit, layer, block_of(emit, kept, layer), d_residual);
}

// Loops before this one are constant.
static int32_t first_differentiated(const eng_emit *emit) {
    const int32_t loops = emit->model->config.loop.loops, wanted = emit->options->backward_loops;
    return wanted > 0 && wanted < loops ? loops - wanted : 0;
}

static kern_ptr emit_loop(eng_emit *emit, int32_t level, kern_ptr stream, model_kept *kept) {
    const eng_loop_config *loop = &emit->model->config.loop;
    set_level(emit, kept, level);
    kept->before[level] = stream;
    stream = emit_layers(emit, loop->first, loop->first + loop->layers, eng_emit_loop_input(emit, stream),
                         eng_trains(emit) || (level == 0 && loop->residual_gate), kept);
    eng_emit_loop_output(emit, kept->before[0], stream);
    return stream;
}

static kern_ptr emit_loops(eng_emit *emit, kern_ptr stream, model_kept *kept) {
    const eng_loop_config *loop = &emit->model->config.loop;
    for (int32_t level = 0; level < loop->loops; level++) {
        emit->constant = eng_trains_gate_alone(emit) || level < first_differentiated(emit);
        stream = emit_loop(emit, level, stream, kept);
        eng_emit_exit(emit, stream);
    }
    kept->before[loop->loops] = stream;
    emit->constant = false;
    set_level(emit, kept, 0);
    return stream;
}

static void emit_loops_backward(eng_emit *emit, model_kept *kept, kern_ptr d_residual) {
    const eng_loop_config *loop = &emit->model->config.loop;
    kern_ptr d_start = eng_emit_loop_start_gradient(emit);
    for (int32_t level = loop->loops; level-- > 0;) {
        set_level(emit, kept, level);
        eng_emit_exit_backward(emit, kept->before[level + 1], d_residual);
        eng_emit_loop_output_backward(emit, kept->before[0], d_residual, d_start);
        if (level >= first_differentiated(emit))
            emit_layers_backward(emit, loop->first, loop->first + loop->layers, kept, d_residual);
        eng_emit_loop_input_backward(emit, kept->before[level], d_residual);
    }
    eng_emit_loop_start_backward(emit, d_start, d_residual);
}

static float embed_scale(const eng_config *config) {
    if (!config->scale_embeddings)
        return 1.0F;
    float scale = sqrtf((float)config->hidden_size);
    return config->round_scale ? eng_bf16_to_f32(eng_bf16_from_f32(scale)) : scale;
}

static void emit_head_logits(eng_emit *emit) {
    const eng_config *config = &emit->model->config;
    eng_plan *plan = emit->plan;
    uint64_t rows = (uint64_t)emit->options->max_logits;
    plan->logits = eng_emit_saved_bytes(emit, sizeof(float) * rows * (uint64_t)config->vocab_size);
    plan->top_id = eng_emit_saved_bytes(emit, sizeof(int32_t) * rows * KERN_MAX_TOP);
    plan->top_logprob = eng_emit_saved_bytes(emit, sizeof(float) * rows * KERN_MAX_TOP);
    eng_emit_op(emit, KERN_OP_HEAD_LOGITS,
                &(kern_head_logits_args){.x = plan->hidden,
                                         .weight = eng_param(emit->model->head),
                                         .logits = plan->logits,
                                         .finite = plan->finite,
                                         .width = config->hidden_size,
                                         .vocabulary = config->vocab_size,
                                         .soft_cap = config->logits_soft_cap});
    eng_emit_op(emit, KERN_OP_SAMPLE,
                &(kern_sample_args){.logits = plan->logits,
                                    .id = plan->sampled,
                                    .logprob = plan->logprob,
                                    .top_id = plan->top_id,
                                    .top_logprob = plan->top_logprob,
                                    .vocabulary = config->vocab_size});
}

static void add_teacher(eng_emit *emit, kern_head_loss_args *args) {
    const eng_plan_options *options = emit->options;
    eng_plan *plan = emit->plan;
    plan->divergence = eng_emit_saved_bytes(emit, sizeof(float) * (uint64_t)emit->tokens);
    args->teacher_x = plan->teacher_hidden;
    args->teacher_weight = eng_param(eng_model_lent(emit->model));
    args->divergence = plan->divergence;
    args->teacher_width = options->teacher->config.hidden_size;
    args->teacher_soft_cap = options->teacher->config.logits_soft_cap;
    args->temperature = options->temperature;
    args->loss_share = options->loss_share;
    args->divergence_share = options->divergence_share;
}

void eng_emit_head_loss(eng_emit *emit, const eng_head_loss *head) {
    const eng_config *config = &emit->model->config;
    int32_t tile = emit->tokens < emit->head_tile ? emit->tokens : emit->head_tile;
    const uint64_t mark = emit->scratch, tile_bytes = sizeof(float) * (uint64_t)tile * (uint64_t)config->vocab_size;
    kern_head_loss_args args = {.x = head->x,
                                .weight = eng_param(emit->model->head),
                                .loss = head->loss,
                                .best = head->best,
                                .dx = head->dx,
                                .grad_weight = head->dx.ref ? eng_grad(emit->model->head) : eng_null(),
                                .factor = head->factor,
                                .tile = eng_emit_scratch_bytes(emit, tile_bytes),
                                .width = config->hidden_size,
                                .vocabulary = config->vocab_size,
                                .tile_tokens = tile,
                                .soft_cap = config->logits_soft_cap,
                                .scale = head->scale};
    if (emit->options->teacher) {
        args.teacher_tile = eng_emit_scratch_bytes(emit, tile_bytes);
        add_teacher(emit, &args);
    }
    eng_emit_op(emit, KERN_OP_HEAD_LOSS, &args);
    emit->scratch = mark;
}

// Small outputs lie side by side, so that one copy brings them to the host.
static void place_results(eng_emit *emit) {
    eng_plan *plan = emit->plan;
    uint64_t rows = (uint64_t)emit->options->max_logits, begin = emit->saved;
    if (eng_serves(emit)) {
        plan->results = plan->finite = eng_emit_saved_bytes(emit, sizeof(int32_t) * rows);
        plan->sampled = eng_emit_saved_bytes(emit, sizeof(int32_t) * rows);
        plan->logprob = eng_emit_saved_bytes(emit, sizeof(float) * rows);
    }
    if (eng_reads_loops(emit) && !eng_trains(emit))
        plan->loops = eng_emit_saved_bytes(emit, sizeof(int32_t) * (uint64_t)emit->tokens);
    if (eng_model_has_mesa(emit->model))
        plan->solves = eng_emit_saved_bytes(emit, sizeof(kern_solve_sum) * (uint64_t)emit->tokens);
    if (eng_model_has_mesa(emit->model) && eng_trains(emit))
        plan->backward_solves = eng_emit_saved_bytes(emit, sizeof(kern_solve_sum) * (uint64_t)emit->tokens);
    plan->results_bytes = (size_t)(emit->saved - begin);
}

static void emit_no_solves(eng_emit *emit, kern_ptr solves) {
    if (solves.ref != 0)
        eng_emit_op(emit, KERN_OP_CLEAR, &(kern_clear_args){.y = solves, .width = sizeof(kern_solve_sum) / 4});
}

static void emit_results(eng_emit *emit) {
    place_results(emit);
    emit_no_solves(emit, emit->plan->solves);
    emit_no_solves(emit, emit->plan->backward_solves);
}

static kern_ptr emit_embedding(eng_emit *emit) {
    const eng_config *config = &emit->model->config;
    kern_ptr stream =
        eng_emit_saved_bytes(emit, sizeof(float) * (uint64_t)config->hidden_size * (uint64_t)emit->tokens);
    eng_emit_op(emit, KERN_OP_EMBED,
                &(kern_embed_args){.weight = eng_param(emit->model->embed),
                                   .drawn = emit->plan->sampled,
                                   .y = stream,
                                   .width = config->hidden_size,
                                   .scale = embed_scale(config)});
    return stream;
}

static kern_ptr emit_blocks(eng_emit *emit, model_kept *kept) {
    const eng_config *config = &emit->model->config;
    const int32_t behind = config->loop.first + config->loop.layers;
    emit->constant = eng_trains_gate_alone(emit);
    kern_ptr stream = emit_embedding(emit);
    stream = emit_layers(emit, 0, config->loop.first, stream, false, kept);
    if (eng_reads_loops(emit))
        eng_emit_exits_begin(emit);
    stream = emit_loops(emit, stream, kept);
    return emit_layers(emit, behind, config->layers, stream, false, kept);
}

// From the gradient of the last block's output.
static void emit_blocks_backward(eng_emit *emit, model_kept *kept, kern_ptr d_residual) {
    const eng_config *config = &emit->model->config;
    emit_layers_backward(emit, config->loop.first + config->loop.layers, config->layers, kept, d_residual);
    emit_loops_backward(emit, kept, d_residual);
    emit_layers_backward(emit, 0, config->loop.first, kept, d_residual);
    eng_emit_op(emit, KERN_OP_EMBED_BACKWARD,
                &(kern_embed_backward_args){.dy = d_residual,
                                            .grad = eng_grad(emit->model->embed),
                                            .width = config->hidden_size,
                                            .scale = embed_scale(config)});
}

static void emit_training(eng_emit *emit, kern_ptr stream, model_kept *kept) {
    const eng_config *config = &emit->model->config;
    eng_plan *plan = emit->plan;
    plan->loss = eng_emit_saved_bytes(emit, sizeof(float) * (uint64_t)emit->tokens);
    if (eng_reads_loops(emit)) {
        eng_emit_exit_losses(emit);
        if (eng_trains_gate_alone(emit))
            return;
        kern_ptr d_residual = eng_emit_scratch(emit, config->hidden_size);
        eng_emit_op(emit, KERN_OP_CLEAR, &(kern_clear_args){.y = d_residual, .width = config->hidden_size});
        emit_blocks_backward(emit, kept, d_residual);
        return;
    }
    kern_ptr d_hidden = eng_emit_scratch(emit, config->hidden_size);
    kern_ptr d_residual = eng_emit_scratch(emit, config->hidden_size);
    eng_emit_head_loss(emit, &(eng_head_loss){.x = plan->hidden, .loss = plan->loss, .dx = d_hidden});
    eng_emit_norm_backward(emit, stream, emit->model->final_norm, eng_null(), d_hidden, d_residual, eng_null(), 1,
                           config->norm_eps, false);
    emit_blocks_backward(emit, kept, d_residual);
}

static void emit_scores(eng_emit *emit) {
    eng_plan *plan = emit->plan;
    plan->loss = eng_emit_saved_bytes(emit, sizeof(float) * (uint64_t)emit->tokens);
    plan->best = eng_emit_saved_bytes(emit, sizeof(int32_t) * (uint64_t)emit->tokens);
    eng_emit_head_loss(emit, &(eng_head_loss){.x = plan->hidden, .loss = plan->loss, .best = plan->best});
    if (emit->options->loop_loss != ENG_LOOP_LOSS_FINAL)
        eng_emit_exit_losses(emit);
}

static kern_ptr emit_stream(eng_emit *emit) {
    return eng_emit_saved_bytes(emit,
                                sizeof(float) * (uint64_t)emit->model->config.hidden_size * (uint64_t)emit->tokens);
}

static void emit_resume(eng_emit *emit) {
    emit_results(emit);
    emit->plan->hidden = emit_stream(emit);
    if (eng_reads_loops(emit))
        eng_emit_exits_begin(emit);
    eng_emit_final_all(emit, true);
    if (eng_reads_loops(emit))
        eng_emit_exit_read(emit);
    emit_head_logits(emit);
}

// From plan->hidden: the gate's logits, and what the slots keep of the loop.
static void emit_loop_end(eng_emit *emit, kern_ptr stream) {
    const eng_model *model = emit->model;
    eng_plan *plan = emit->plan;
    kern_ptr gate = eng_null();
    eng_emit_norm(emit, stream, model->final_norm, eng_null(), plan->hidden, 1, model->config.norm_eps);
    if (model->exit_gate >= 0) {
        gate = eng_emit_saved_bytes(emit, sizeof(float) * (uint64_t)emit->tokens);
        eng_emit_linear(emit, plan->hidden, model->exit_gate, model->exit_bias, eng_null(), gate);
    }
    eng_emit_final(emit, plan->hidden, gate, 1, emit->tokens, false);
}

// What went into the first loop is there for those that join it to their output.
static kern_ptr emit_waited(eng_emit *emit, model_kept *kept) {
    kern_ptr stream = emit_stream(emit);
    kept->before[0] = emit->model->config.loop.residual_gate ? emit_stream(emit) : eng_null();
    eng_emit_waiting(emit, emit->options->level, stream, kept->before[0], true);
    return stream;
}

static void emit_part(eng_emit *emit, model_kept *kept) {
    const eng_loop_config *loop = &emit->model->config.loop;
    const int32_t level = emit->options->level;
    const bool first = emit->options->part == ENG_PART_FIRST;
    eng_plan *plan = emit->plan;
    place_results(emit);
    if (plan->solves.ref != 0)
        plan->sum = eng_emit_saved_bytes(emit, sizeof(kern_solve_sum) * (uint64_t)emit->tokens);
    if (!first && emit->options->part != ENG_PART_LOOP) {
        eng_emit_follow(emit);
        return;
    }
    emit_no_solves(emit, plan->solves);
    plan->hidden = emit_stream(emit);
    kern_ptr stream =
        first ? emit_layers(emit, 0, loop->first, emit_embedding(emit), false, kept) : emit_waited(emit, kept);
    stream = emit_loop(emit, level, stream, kept);
    emit_loop_end(emit, stream);
    if (level + 1 < loop->loops)
        eng_emit_waiting(emit, level + 1, stream, kept->before[0], false);
}

// What a teacher leaves for its student's loss lies first, at the same place in the plans of both.
static void place_taught(eng_emit *emit) {
    const eng_model *teacher = emit->options->teacher;
    if (eng_teaches(emit))
        emit->plan->hidden = emit_stream(emit);
    else if (teacher)
        emit->plan->teacher_hidden =
            eng_emit_saved_bytes(emit, sizeof(float) * (uint64_t)teacher->config.hidden_size * (uint64_t)emit->tokens);
}

static void emit_model(eng_emit *emit, model_kept *kept) {
    const eng_config *config = &emit->model->config;
    place_taught(emit);
    emit_results(emit);
    kern_ptr stream = emit_blocks(emit, kept);
    if (!eng_teaches(emit) && (!eng_trains(emit) || !eng_reads_loops(emit)))
        emit->plan->hidden = emit_stream(emit);
    if (!eng_reads_loops(emit))
        eng_emit_norm(emit, stream, emit->model->final_norm, eng_null(), emit->plan->hidden, 1, config->norm_eps);
    else if (!eng_trains(emit))
        eng_emit_exit_read(emit);
    if (eng_serves(emit)) {
        emit_head_logits(emit);
        eng_emit_final_all(emit, false);
    } else if (eng_trains(emit))
        emit_training(emit, stream, kept);
    else if (!eng_teaches(emit))
        emit_scores(emit);
}

static void emit_plan(eng_emit *emit, model_kept *kept) {
    switch (emit->options->part) {
    case ENG_PART_WHOLE:
        emit_model(emit, kept);
        return;
    case ENG_PART_RESUME:
        emit_resume(emit);
        return;
    case ENG_PART_HEAD:
        emit_results(emit);
        emit->plan->hidden = emit_stream(emit);
        emit_head_logits(emit);
        return;
    default:
        emit_part(emit, kept);
    }
}

static eng_status check_loops(const eng_model *model, const eng_plan_options *options, eng_error *error) {
    const eng_loop_config *loop = &model->config.loop;
    const bool whole = options->part == ENG_PART_WHOLE || options->part == ENG_PART_RESUME;
    if (options->part == ENG_PART_RESUME && options->kind != ENG_PLAN_SERVE)
        return eng_fail(error, ENG_UNSUPPORTED, "only what serves goes on from a slot");
    const int32_t levels = options->part == ENG_PART_FOLLOW ? loop->loops + 1 : loop->loops;
    if (!whole && (options->kind != ENG_PLAN_SERVE || !eng_model_reads_loops(model) || options->level < 0 ||
                   options->level >= levels))
        return eng_fail(error, ENG_UNSUPPORTED, "a plan in parts is for serving a model that ends with its loop");
    if (options->loop_loss == ENG_LOOP_LOSS_FINAL || options->kind == ENG_PLAN_SERVE)
        return ENG_OK;
    if (!eng_model_reads_loops(model))
        return eng_fail(error, ENG_UNSUPPORTED, "losses of loops need a model that ends with its loop");
    if (options->loop_loss != ENG_LOOP_LOSS_WEIGHTED && !model->config.loop.exit_gate)
        return eng_fail(error, ENG_UNSUPPORTED, "a loss of exits needs a model with an exit gate");
    return ENG_OK;
}

static eng_status check_teacher(const eng_model *model, const eng_plan_options *options, eng_error *error) {
    const eng_model *teacher = options->teacher;
    if (!teacher)
        return ENG_OK;
    if (options->kind != ENG_PLAN_SCORE && options->kind != ENG_PLAN_TRAIN)
        return eng_fail(error, ENG_UNSUPPORTED, "a teacher is for plans that score or train");
    if (options->loop_loss != ENG_LOOP_LOSS_FINAL)
        return eng_fail(error, ENG_UNSUPPORTED, "a loss with a teacher is that of the last loop alone");
    if (teacher->config.vocab_size != model->config.vocab_size)
        return eng_fail(error, ENG_INVALID, "the teacher has a vocabulary of %d ids, the model one of %d",
                        teacher->config.vocab_size, model->config.vocab_size);
    return ENG_OK;
}

static eng_status check_options(const eng_plan_options *options, eng_error *error) {
    if (options->max_tokens < 1 || options->max_rows < 1 ||
        (options->kind == ENG_PLAN_SERVE && options->max_logits < 1))
        return eng_fail(error, ENG_INVALID, "a plan needs at least one token, one row and, to serve, one logits row");
    return ENG_OK;
}

eng_status eng_plan_create(const eng_model *model, kern_device *device, const eng_plan_options *options, eng_plan **out,
                           eng_error *error) {
    eng_status status = check_options(options, error);
    if (status == ENG_OK)
        status = check_loops(model, options, error);
    if (status == ENG_OK)
        status = check_teacher(model, options, error);
    if (status != ENG_OK)
        return status;
    size_t layers = (size_t)model->config.layers, blocks = layers * (size_t)model->config.loop.loops;
    const kern_device_info *info = kern_device_describe(device);
    int32_t chunk = info->chunk;
    eng_emit emit = {.model = model,
                     .options = options,
                     .tokens = options->max_tokens,
                     .chunks = options->max_tokens / chunk + 2 * options->max_rows,
                     .head_tile = info->asynchronous ? HEAD_TILE_DEVICE_TOKENS : HEAD_TILE_TOKENS,
                     .error = error};
    model_kept kept = {.block = calloc(blocks, sizeof *kept.block), .mixer = calloc(blocks, sizeof *kept.mixer)};
    emit.kept = kept.mixer;
    eng_plan *plan = emit.plan = calloc(1, sizeof *plan);
    if (plan) {
        plan->model = model;
        plan->options = *options;
    }
    if (!kept.block || !kept.mixer || !plan) {
        emit.status = eng_fail(error, ENG_NO_MEMORY, "out of memory for a plan of %zu layers", layers);
        goto out;
    }
    kern_status made = kern_plan_create(device, &plan->plan);
    if (made != KERN_OK) {
        emit.status = eng_fail_kernel(error, made, "making a plan");
        goto out;
    }
    emit_plan(&emit, &kept);
    if (emit.status == ENG_OK && (made = kern_plan_seal(plan->plan)) != KERN_OK)
        emit.status = eng_fail_kernel(error, made, "sealing a plan");
    plan->saved_bytes = emit.saved;
    plan->scratch_bytes = emit.scratch_peak;
out:
    free(kept.block);
    free(kept.mixer);
    if (emit.status == ENG_OK)
        *out = plan;
    else
        eng_plan_free(plan);
    return emit.status;
}

void eng_plan_free(eng_plan *plan) {
    if (!plan)
        return;
    kern_plan_free(plan->plan);
    free(plan);
}
