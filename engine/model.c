// SPDX-License-Identifier: Apache-2.0
// The tensor table of a model in the names of its dialect, and where each layer's state and pages lie.
//
// The backbone's tensors are declared here, the mixers' by themselves. Start values follow models.md 1.8: linear
// weights N(0, initializer_range), those that write into the residual stream divided by sqrt(2 layers) unless "init"
// is "fla", norms 1, biases 0. Sizes come from a checked config, so their products cannot overflow.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/mixer.h"
#include "engine/model_internal.h"

enum { SLOT_ALIGNMENT = 64, FIRST_CAPACITY = 64 };

typedef struct names {
    const char *embed, *embed_alias, *block, *mixer_norm, *mixer, *mlp_norm, *gate, *up, *down, *final_norm;
    const char *gate_and_up, *gate_and_up_bias; // one tensor in some files; NULL: never
} names;

static const names dialect_names[] = {
    [ENG_DIALECT_FLA] = {"model.embeddings.weight", NULL, "model.layers.%d.", "attn_norm.weight", "attn.",
                         "mlp_norm.weight", "mlp.gate_proj.", "mlp.up_proj.", "mlp.down_proj.", "model.norm.weight",
                         "mlp.gate_proj.weight", NULL}, // before February 2025
    [ENG_DIALECT_LLAMA] = {"model.embed_tokens.weight", NULL, "model.layers.%d.", "input_layernorm.weight",
                           "self_attn.", "post_attention_layernorm.weight", "mlp.gate_proj.", "mlp.up_proj.",
                           "mlp.down_proj.", "model.norm.weight", NULL, NULL},
    [ENG_DIALECT_MAMBA2] = {.embed = "backbone.embeddings.weight",
                            .embed_alias = "backbone.embedding.weight",
                            .block = "backbone.layers.%d.",
                            .mixer_norm = "norm.weight",
                            .mixer = "mixer.",
                            .final_norm = "backbone.norm_f.weight"},
    [ENG_DIALECT_STATE_SPACES] = {.embed = "backbone.embedding.weight",
                                  .block = "backbone.layers.%d.",
                                  .mixer_norm = "norm.weight",
                                  .mixer = "mixer.",
                                  .final_norm = "backbone.norm_f.weight"},
    [ENG_DIALECT_XLSTM] = {"backbone.embeddings.weight", "embedding.weight", "backbone.blocks.%d.", "norm_mlstm.weight",
                           "mlstm_layer.", "norm_ffn.weight", "ffn.proj_up_gate.", "ffn.proj_up.", "ffn.proj_down.",
                           "backbone.out_norm.weight", "ffn.proj_up_gate_z.weight", "ffn.proj_up_gate_z.bias"},
    [ENG_DIALECT_GEMMA] = {"model.embed_tokens.weight", NULL, "model.layers.%d.", "temporal_pre_norm.weight",
                           "temporal_block.", "channel_pre_norm.weight", "mlp_block.gate_proj.", "mlp_block.up_proj.",
                           "mlp_block.down_proj.", "model.final_norm.weight", NULL, NULL},
};

static const eng_init zeros = {.kind = ENG_INIT_CONSTANT, .value = 0};

static eng_tensor *next_tensor(eng_model *model) {
    bool full =
        model->tensors == 0 || (model->tensors >= FIRST_CAPACITY && (model->tensors & (model->tensors - 1)) == 0);
    if (full) {
        size_t capacity = model->tensors == 0 ? FIRST_CAPACITY : 2 * (size_t)model->tensors;
        eng_tensor *larger = realloc(model->tensor, capacity * sizeof *larger);
        if (!larger)
            return NULL;
        model->tensor = larger;
    }
    return &model->tensor[model->tensors];
}

int32_t eng_model_add_tensor(eng_model *model, int32_t layer, const char *prefix, const char *leaf, eng_role role,
                             bool decay, eng_init init, int ndim, const int64_t *shape) {
    eng_tensor *tensor = next_tensor(model);
    if (!tensor)
        return -1;
    *tensor = (eng_tensor){.ndim = ndim, .count = 1, .role = role, .decay = decay, .init = init, .layer = layer};
    snprintf(tensor->name, sizeof tensor->name, "%s%s", prefix, leaf);
    for (int i = 0; i < ndim; i++) {
        tensor->shape[i] = shape[i];
        tensor->count *= shape[i];
    }
    model->parameters += (uint64_t)tensor->count;
    return model->tensors++;
}

void eng_model_add_alias(eng_model *model, int32_t tensor, const char *prefix, const char *leaf) {
    snprintf(model->tensor[tensor].alias, sizeof model->tensor[tensor].alias, "%s%s", prefix, leaf);
}

void eng_model_add_whole(eng_model *model, int32_t tensor, const char *prefix, const char *leaf, int64_t row,
                         int64_t rows) {
    eng_tensor *part = &model->tensor[tensor];
    snprintf(part->whole, sizeof part->whole, "%s%s", prefix, leaf);
    part->whole_row = row;
    part->whole_rows = rows;
}

static size_t aligned(size_t bytes) {
    return (bytes + SLOT_ALIGNMENT - 1) / SLOT_ALIGNMENT * SLOT_ALIGNMENT;
}

void eng_model_add_state(eng_model *model, int32_t layer, size_t bytes) {
    eng_layer *owner = &model->layer[layer];
    if (owner->state_bytes == 0)
        owner->state_offset = model->state_bytes;
    owner->part_bytes[owner->state_parts] = bytes;
    owner->state_part[owner->state_parts++] = owner->state_bytes;
    owner->state_bytes += aligned(bytes);
    model->state_bytes += aligned(bytes);
}

// The layouts of kern_recurrence_args and kern_mesa_args.
static size_t matrix_bytes(const eng_state_matrix *matrix, kern_storage storage) {
    size_t heads = (size_t)matrix->heads, rows = (size_t)matrix->rows, columns = (size_t)matrix->columns;
    size_t square = matrix->symmetric ? rows * rows : 0, triangle = matrix->symmetric ? rows * (rows + 1) / 2 : 0;
    if (storage == KERN_STORE_BF16)
        return heads * ((triangle + 3) / 4 * 4 * sizeof(float) + rows * columns * sizeof(uint16_t));
    return heads * (square + rows * columns) * sizeof(float);
}

void eng_model_add_matrix(eng_model *model, int32_t layer, eng_state_matrix matrix) {
    model->layer[layer].state_matrix = matrix;
    eng_model_add_state(model, layer, matrix_bytes(&matrix, model->state_storage));
}

int32_t eng_model_levels(const eng_model *model, int32_t layer) {
    const eng_loop_config *loop = &model->config.loop;
    return layer >= loop->first && layer < loop->first + loop->layers ? loop->loops : 1;
}

bool eng_model_reads_loops(const eng_model *model) {
    const eng_loop_config *loop = &model->config.loop;
    return loop->loops > 1 && loop->first + loop->layers == model->config.layers;
}

int32_t eng_config_depth(const eng_config *config) {
    return config->layers + (config->loop.loops - 1) * config->loop.layers;
}

// The states of a layer's further loops, laid out like the first's.
static void repeat_states(eng_model *model, int32_t layer) {
    model->state_bytes += model->layer[layer].state_bytes * (size_t)(eng_model_levels(model, layer) - 1);
}

// Behind the state, which is copied without it.
static void add_waiting(eng_model *model) {
    const eng_loop_config *loop = &model->config.loop;
    if (!eng_model_reads_loops(model))
        return;
    model->waiting_offset = model->state_bytes;
    model->waiting_stride = aligned(sizeof(float) * ENG_PENDING_TOKENS * (size_t)model->config.hidden_size);
    model->waiting_bytes = aligned(sizeof(kern_exit_waiting)) +
                           model->waiting_stride * (size_t)(loop->loops - 1) * (loop->residual_gate ? 2 : 1);
}

// Behind the layers' states.
static void add_final(eng_model *model) {
    const bool loops = eng_model_reads_loops(model), gates = loops && model->config.loop.exit_gate;
    model->final_planes = loops ? model->config.loop.loops : 1;
    model->final_stride = aligned(sizeof(float) * (size_t)model->config.hidden_size);
    model->final_offset = model->state_bytes;
    model->state_bytes += model->final_stride * (size_t)model->final_planes;
    model->gates_stride = gates ? aligned(sizeof(float)) : 0;
    model->gates_offset = gates ? model->state_bytes : 0;
    model->state_bytes += model->gates_stride * (size_t)model->final_planes;
    add_waiting(model);
}

size_t eng_model_waiting(const eng_model *model, int32_t loop, bool start) {
    const size_t lists = (size_t)(loop - 1 + (start ? model->config.loop.loops - 1 : 0));
    return model->waiting_offset + aligned(sizeof(kern_exit_waiting)) + model->waiting_stride * lists;
}

void eng_model_store_states(eng_model *model, kern_storage storage) {
    model->state_storage = storage;
    model->state_bytes = 0;
    for (int32_t i = 0; i < model->config.layers; i++) {
        eng_layer *layer = &model->layer[i];
        int32_t parts = layer->state_parts;
        layer->state_parts = 0;
        layer->state_bytes = 0;
        for (int32_t part = 0; part < parts; part++)
            eng_model_add_state(model, i,
                                part == 0 && layer->state_matrix.heads > 0 ? matrix_bytes(&layer->state_matrix, storage)
                                                                           : layer->part_bytes[part]);
        repeat_states(model, i);
    }
    add_final(model);
}

void eng_model_add_pages(eng_model *model, int32_t layer, size_t bytes) {
    eng_layer *owner = &model->layer[layer];
    if (owner->page_bytes == 0)
        owner->page_offset = model->page_bytes;
    owner->page_bytes += aligned(bytes);
    model->page_bytes += aligned(bytes);
}

int32_t eng_model_add_constant(eng_model *model, float *value, int32_t count) {
    size_t wanted = ((size_t)model->constants + 1) * sizeof *model->constant;
    eng_constant *larger = realloc(model->constant, wanted);
    if (!larger) {
        free(value);
        return -1;
    }
    model->constant = larger;
    larger[model->constants] = (eng_constant){value, count};
    return model->constants++;
}

static int32_t add_matrix(eng_model *model, int32_t layer, const char *prefix, const char *leaf, bool decay,
                          eng_init init, int64_t rows, int64_t columns) {
    return eng_model_add_tensor(model, layer, prefix, leaf, ENG_ROLE_MATRIX, decay, init, 2,
                                (int64_t[]){rows, columns});
}

static int32_t add_vector(eng_model *model, int32_t layer, const char *prefix, const char *leaf, eng_init init,
                          int64_t width) {
    return eng_model_add_tensor(model, layer, prefix, leaf, ENG_ROLE_VECTOR, false, init, 1, &width);
}

// A norm starts as multiplication by 1.
static int32_t add_norm(eng_model *model, int32_t layer, const char *prefix, const char *leaf) {
    eng_init one = {.kind = ENG_INIT_CONSTANT, .value = 1.0F - model->config.norm_offset};
    return add_vector(model, layer, prefix, leaf, one, model->config.hidden_size);
}

// The bias beside the norm called leaf, "norm_ffn.weight" and the like; -1 where there is none.
static bool add_norm_bias(eng_model *model, int32_t layer, const char *prefix, const char *leaf, int32_t *bias) {
    char name[48];
    *bias = -1;
    if (!model->config.norm_bias)
        return true;
    snprintf(name, sizeof name, "%.*s.bias", (int)(strrchr(leaf, '.') - leaf), leaf);
    *bias = add_vector(model, layer, prefix, name, zeros, model->config.hidden_size);
    return *bias >= 0;
}

// One of the MLP's linear maps, stem "mlp.up_proj." and the like, with its bias.
static bool add_linear(eng_model *model, int32_t layer, const char *prefix, const char *stem, eng_init init,
                       int64_t rows, int64_t columns, int32_t *weight, int32_t *bias) {
    char leaf[48];
    snprintf(leaf, sizeof leaf, "%sweight", stem);
    *weight = add_matrix(model, layer, prefix, leaf, true, init, rows, columns);
    *bias = -1;
    if (!model->config.mlp_bias)
        return *weight >= 0;
    snprintf(leaf, sizeof leaf, "%sbias", stem);
    *bias = add_vector(model, layer, prefix, leaf, zeros, rows);
    return *weight >= 0 && *bias >= 0;
}

static bool declare_mlp(eng_model *model, int32_t layer, const char *prefix) {
    const eng_config *config = &model->config;
    const names *names = &dialect_names[config->dialect];
    int64_t hidden = config->hidden_size, inner = config->intermediate_size;
    eng_init linear = {.kind = ENG_INIT_NORMAL, .value = config->initializer_range}, residual = linear;
    if (!config->init_fla)
        residual.value /= sqrtf(2.0F * (float)eng_config_depth(config));
    eng_layer *owner = &model->layer[layer];
    owner->mlp_norm = add_norm(model, layer, prefix, names->mlp_norm);
    bool done =
        owner->mlp_norm >= 0 && add_norm_bias(model, layer, prefix, names->mlp_norm, &owner->mlp_norm_bias) &&
        add_linear(model, layer, prefix, names->gate, linear, inner, hidden, &owner->gate_proj, &owner->gate_bias) &&
        add_linear(model, layer, prefix, names->up, linear, inner, hidden, &owner->up_proj, &owner->up_bias) &&
        add_linear(model, layer, prefix, names->down, residual, hidden, inner, &owner->down_proj, &owner->down_bias);
    if (done && config->fused_weights && config->mlp_bias) {
        eng_model_add_whole(model, owner->gate_bias, prefix, names->gate_and_up_bias, 0, 2 * inner);
        eng_model_add_whole(model, owner->up_bias, prefix, names->gate_and_up_bias, inner, 2 * inner);
    }
    if (done && names->gate_and_up && (config->dialect != ENG_DIALECT_XLSTM || config->fused_weights)) {
        eng_model_add_whole(model, owner->gate_proj, prefix, names->gate_and_up, 0, 2 * inner);
        eng_model_add_whole(model, owner->up_proj, prefix, names->gate_and_up, inner, 2 * inner);
    }
    return done;
}

static eng_status declare_layer(eng_model *model, int32_t layer, eng_error *error) {
    const names *names = &dialect_names[model->config.dialect];
    eng_layer *owner = &model->layer[layer];
    for (int i = 0; i < ENG_MAX_MIXER_TENSORS; i++)
        owner->mixer[i] = -1;
    owner->constant = -1;
    char block[32], mixer_prefix[64];
    snprintf(block, sizeof block, names->block, layer);
    snprintf(mixer_prefix, sizeof mixer_prefix, "%s%s", block, names->mixer);
    owner->mixer_norm = add_norm(model, layer, block, names->mixer_norm);
    owner->mlp_norm_bias = -1;
    if (!add_norm_bias(model, layer, block, names->mixer_norm, &owner->mixer_norm_bias))
        return eng_fail(error, ENG_NO_MEMORY, "no memory for the tensor table");
    eng_status status = model->config.layer[layer].mixer->declare(model, layer, mixer_prefix, error);
    if (status != ENG_OK)
        return status;
    repeat_states(model, layer);
    model->page_bytes += owner->page_bytes * (size_t)(eng_model_levels(model, layer) - 1);
    bool done = owner->mixer_norm >= 0 && (model->config.intermediate_size == 0 || declare_mlp(model, layer, block));
    return done ? ENG_OK : eng_fail(error, ENG_NO_MEMORY, "no memory for the tensor table");
}

// What tells the loops apart starts as nothing, and every exit as likely as what is left.
static bool declare_loop(eng_model *model) {
    const eng_loop_config *loop = &model->config.loop;
    const int64_t hidden = model->config.hidden_size, shape[] = {loop->loops, hidden};
    model->loop_embedding = model->loop_residual_gate = model->exit_gate = model->exit_bias = model->ones = -1;
    bool done = true;
    if (loop->embedding) {
        float *one = malloc(sizeof *one * (size_t)(hidden * loop->loops));
        for (int64_t i = 0; one && i < hidden * loop->loops; i++)
            one[i] = 1;
        model->ones = one ? eng_model_add_constant(model, one, (int32_t)(hidden * loop->loops)) : -1;
        model->loop_embedding =
            eng_model_add_tensor(model, -1, "", "loop_embedding.weight", ENG_ROLE_VECTOR, false, zeros, 2, shape);
        done = model->ones >= 0 && model->loop_embedding >= 0;
    }
    if (loop->residual_gate) {
        model->loop_residual_gate =
            eng_model_add_tensor(model, -1, "", "loop_residual_gate.weight", ENG_ROLE_VECTOR, false, zeros, 2, shape);
        done = done && model->loop_residual_gate >= 0;
    }
    if (loop->exit_gate) {
        model->exit_gate = add_matrix(model, -1, "", "exit_gate.weight", true, zeros, 1, hidden);
        model->exit_bias = add_vector(model, -1, "", "exit_gate.bias", zeros, 1);
        done = done && model->exit_gate >= 0 && model->exit_bias >= 0;
    }
    return done;
}

static eng_status declare_all(eng_model *model, eng_error *error) {
    const eng_config *config = &model->config;
    const names *names = &dialect_names[config->dialect];
    int64_t vocabulary = config->vocab_size, hidden = config->hidden_size;
    eng_init linear = {.kind = ENG_INIT_NORMAL, .value = config->initializer_range}, embed = linear;
    if (config->scale_embeddings)
        embed.value = 1.0F / sqrtf((float)hidden);
    model->embed = add_matrix(model, -1, "", names->embed, false, embed, vocabulary, hidden);
    if (model->embed >= 0 && names->embed_alias)
        eng_model_add_alias(model, model->embed, "", names->embed_alias);
    for (int32_t i = 0; i < config->layers; i++) {
        eng_status status = declare_layer(model, i, error);
        if (status != ENG_OK)
            return status;
    }
    add_final(model);
    model->final_norm = add_norm(model, -1, "", names->final_norm);
    model->head =
        config->tied ? model->embed : add_matrix(model, -1, "", "lm_head.weight", true, linear, vocabulary, hidden);
    bool done = declare_loop(model) && model->embed >= 0 && model->final_norm >= 0 && model->head >= 0;
    return done ? ENG_OK : eng_fail(error, ENG_NO_MEMORY, "no memory for the tensor table");
}

eng_status eng_model_create(eng_config *config, eng_model **out, eng_error *error) {
    eng_model *model = calloc(1, sizeof *model);
    if (!model) {
        eng_config_free(config);
        return eng_fail(error, ENG_NO_MEMORY, "no memory for a model");
    }
    model->config = *config;
    memset(config, 0, sizeof *config);
    model->layer = calloc((size_t)model->config.layers, sizeof *model->layer);
    eng_status status =
        model->layer ? declare_all(model, error) : eng_fail(error, ENG_NO_MEMORY, "no memory for the layers");
    if (status == ENG_OK)
        *out = model;
    else
        eng_model_free(model);
    return status;
}

void eng_model_free(eng_model *model) {
    if (!model)
        return;
    eng_config_free(&model->config);
    for (int32_t i = 0; i < model->constants; i++)
        free(model->constant[i].value);
    free(model->constant);
    free(model->tensor);
    free(model->layer);
    free(model);
}

int32_t eng_model_find(const eng_model *model, const char *name) {
    for (int32_t i = 0; i < model->tensors; i++) {
        if (strcmp(model->tensor[i].name, name) == 0)
            return i;
    }
    return -1;
}

double eng_model_flops(const eng_model *model, double position, double cg_steps) {
    const int32_t loops = model->config.loop.loops;
    double flops = 0;
    for (int32_t i = 0; i < model->tensors; i++) {
        const eng_tensor *tensor = &model->tensor[i];
        bool only_looked_up = i == model->embed && i != model->head;
        int32_t times = i == model->exit_gate ? loops : tensor->layer < 0 ? 1 : eng_model_levels(model, tensor->layer);
        if (tensor->role == ENG_ROLE_MATRIX && !only_looked_up)
            flops += 2.0 * (double)tensor->count * times;
    }
    for (int32_t i = 0; i < model->config.layers; i++)
        flops += eng_model_levels(model, i) * model->config.layer[i].mixer->flops(model, i, position, cg_steps);
    return flops;
}

bool eng_model_has_pages(const eng_model *model) {
    return model->page_bytes > 0;
}

static const eng_layer_config *first_mesa(const eng_model *model) {
    for (int32_t i = 0; i < model->config.layers; i++)
        if (model->config.layer[i].mixer == &eng_mixer_mesa)
            return &model->config.layer[i];
    return NULL;
}

bool eng_model_has_mesa(const eng_model *model) {
    return first_mesa(model) != NULL;
}

int32_t eng_model_training_steps(const eng_model *model) {
    const eng_layer_config *mesa = first_mesa(model);
    return mesa ? mesa->mesa.cg_steps_training : 0;
}
