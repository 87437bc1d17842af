// SPDX-License-Identifier: Apache-2.0
// Start weights from another model; see start.h.
// A part goes through host memory, where heads are repeated and a norm's weight gets the offset of its new model.
#include "trainer/start.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/forward.h"
#include "engine/mixer.h"

// --------------------------------------------------------------------------------------------------------------- parts

// The last two words of a tensor's name.
static const char *leaf_of(const char *name) {
    int dots = 0;
    const char *at = name + strlen(name);
    while (at > name && (at[-1] != '.' || ++dots < 2))
        at--;
    return at;
}

static bool is_projection(const char *leaf) {
    return strchr("qkvo", leaf[0]) && strncmp(leaf + 1, "_proj.", 6) == 0;
}

static int32_t find_in_mixer(const eng_model *to, const eng_tensor *tensor, const eng_model *from) {
    const int32_t layer = tensor->layer;
    const char *leaf = leaf_of(tensor->name);
    if (to->config.layer[layer].mixer != from->config.layer[layer].mixer && !is_projection(leaf))
        return -1;
    for (int i = 0; i < ENG_MAX_MIXER_TENSORS; i++) {
        const int32_t other = from->layer[layer].mixer[i];
        if (other >= 0 && strcmp(leaf_of(from->tensor[other].name), leaf) == 0)
            return other;
    }
    return -1;
}

// The tensor of `from` that plays the part of tensor `index` of `to`; -1: none.
static int32_t find_part(const eng_model *to, int32_t index, const eng_model *from) {
    const eng_tensor *tensor = &to->tensor[index];
    if (index == to->embed)
        return from->embed;
    if (index == to->head)
        return from->head;
    if (index == to->final_norm)
        return from->final_norm;
    if (tensor->layer < 0)
        return eng_model_find(from, tensor->name);
    if (tensor->layer >= from->config.layers)
        return -1;
    const eng_layer *own = &to->layer[tensor->layer], *other = &from->layer[tensor->layer];
    const int32_t parts[][2] = {
        {own->mixer_norm, other->mixer_norm}, {own->mixer_norm_bias, other->mixer_norm_bias},
        {own->mlp_norm, other->mlp_norm},     {own->mlp_norm_bias, other->mlp_norm_bias},
        {own->gate_proj, other->gate_proj},   {own->gate_bias, other->gate_bias},
        {own->up_proj, other->up_proj},       {own->up_bias, other->up_bias},
        {own->down_proj, other->down_proj},   {own->down_bias, other->down_bias},
    };
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (parts[i][0] == index)
            return parts[i][1];
    return find_in_mixer(to, tensor, from);
}

static bool same_shape(const eng_tensor *a, const eng_tensor *b) {
    return a->ndim == b->ndim && memcmp(a->shape, b->shape, sizeof *a->shape * (size_t)a->ndim) == 0;
}

// How often each head of keys or values is needed; 0: the shapes do not agree so either.
static int32_t repeats(const eng_tensor *wanted, const eng_tensor *part, const eng_model *from) {
    const char *leaf = leaf_of(part->name);
    if (part->layer < 0 || strcmp(from->config.layer[part->layer].mixer->name, "attention") != 0 ||
        !strchr("kv", *leaf) || !is_projection(leaf) || wanted->ndim != part->ndim)
        return 0;
    const eng_attention_config *attention = &from->config.layer[part->layer].attention;
    const bool rest = part->ndim == 1 || wanted->shape[1] == part->shape[1];
    return rest && wanted->shape[0] == (int64_t)attention->heads * attention->head_width
               ? attention->heads / attention->kv_heads
               : 0;
}

static bool is_norm(const eng_model *model, int32_t index) {
    const int32_t layer = model->tensor[index].layer;
    return index == model->final_norm ||
           (layer >= 0 && (index == model->layer[layer].mixer_norm || index == model->layer[layer].mlp_norm));
}

// --------------------------------------------------------------------------------------------------------------- table

typedef struct group {
    char tensor[ENG_NAME_SIZE + 1]; // without the layer's number
    char start[96];
    int32_t layers;
} group;

typedef struct table {
    group *group; // (tensors of the model)
    int32_t groups;
    uint64_t taken; // parameters
} table;

static void add_row(table *table, const eng_tensor *tensor, const char *start) {
    char number[16], name[ENG_NAME_SIZE + 1];
    snprintf(name, sizeof name, "%s", tensor->name);
    snprintf(number, sizeof number, ".%d.", tensor->layer);
    const char *layer = tensor->layer >= 0 ? strstr(tensor->name, number) : NULL;
    if (layer)
        snprintf(name, sizeof name, "%.*s.*.%s", (int)(layer - tensor->name), tensor->name, layer + strlen(number));
    for (int32_t i = 0; i < table->groups; i++)
        if (strcmp(table->group[i].tensor, name) == 0 && strcmp(table->group[i].start, start) == 0) {
            table->group[i].layers++;
            return;
        }
    group *made = &table->group[table->groups++];
    made->layers = tensor->layer >= 0;
    snprintf(made->tensor, sizeof made->tensor, "%s", name);
    snprintf(made->start, sizeof made->start, "%s", start);
}

static char *table_text(const table *table, uint64_t parameters) {
    char *text = NULL;
    size_t length = 0;
    FILE *out = open_memstream(&text, &length);
    if (!out)
        return NULL;
    fprintf(out, "| tensor | layers | start |\n|---|---|---|\n");
    for (int32_t i = 0; i < table->groups; i++) {
        const group *row = &table->group[i];
        fprintf(out, "| %s | %d | %s |\n", row->tensor, row->layers, row->start);
    }
    fprintf(out, "%.1f %% of %llu parameters are taken\n", 100 * (double)table->taken / (double)parameters,
            (unsigned long long)parameters);
    if (fclose(out) == 0)
        return text;
    free(text);
    return NULL;
}

// -------------------------------------------------------------------------------------------------------------- copies

typedef struct copier {
    const eng_weights *from, *to;
    kern_stream *stream;
    float *part, *made; // room for the largest tensor of either
    table table;
} copier;

// Heads of `width` rows, each `times` in a row.
static void repeat_heads(const copier *copier, const eng_tensor *part, int32_t width, int32_t times) {
    const int64_t head = width * (part->ndim == 1 ? 1 : part->shape[1]), heads = part->count / head;
    for (int64_t h = 0; h < heads * times; h++)
        memcpy(copier->made + h * head, copier->part + h / times * head, sizeof(float) * (size_t)head);
}

static kern_status copy(const copier *copier, int32_t index, int32_t other, int32_t times) {
    const eng_model *to = copier->to->model, *from = copier->from->model;
    const eng_tensor *tensor = &to->tensor[index], *part = &from->tensor[other];
    float *made = copier->part;
    kern_status status =
        kern_download(copier->stream, copier->part, copier->from->master[other], sizeof(float) * (size_t)part->count);
    if (status == KERN_OK)
        status = kern_synchronize(copier->stream);
    if (times > 1) {
        repeat_heads(copier, part, from->config.layer[part->layer].attention.head_width, times);
        made = copier->made;
    }
    const float offset = is_norm(to, index) ? from->config.norm_offset - to->config.norm_offset : 0;
    for (int64_t i = 0; i < tensor->count && offset != 0; i++)
        made[i] += offset;
    if (status == KERN_OK)
        status = kern_upload(copier->stream, copier->to->master[index], made, sizeof(float) * (size_t)tensor->count);
    return status == KERN_OK ? kern_synchronize(copier->stream) : status;
}

static bool is_in_mixer(const eng_model *model, int32_t index) {
    const int32_t layer = model->tensor[index].layer;
    for (int i = 0; layer >= 0 && i < ENG_MAX_MIXER_TENSORS; i++)
        if (model->layer[layer].mixer[i] == index)
            return true;
    return false;
}

// Why a tensor has no part.
static const char *reason(const eng_model *to, int32_t index, const eng_model *from) {
    const int32_t layer = to->tensor[index].layer;
    if (layer >= from->config.layers)
        return "fewer layers there";
    return is_in_mixer(to, index) && to->config.layer[layer].mixer != from->config.layer[layer].mixer
               ? "another mixer there"
               : "none there";
}

static kern_status start_tensor(copier *copier, int32_t index) {
    const eng_model *to = copier->to->model, *from = copier->from->model;
    const eng_tensor *tensor = &to->tensor[index];
    const int32_t other = find_part(to, index, from);
    const eng_tensor *part = other >= 0 ? &from->tensor[other] : NULL;
    const int32_t times = !part ? 0 : same_shape(tensor, part) ? 1 : repeats(tensor, part, from);
    const bool rescaled = index == to->embed && to->config.scale_embeddings != from->config.scale_embeddings;
    char start[96] = "taken";
    if (!part)
        snprintf(start, sizeof start, "its own: %s", reason(to, index, from));
    else if (times == 0)
        snprintf(start, sizeof start, "its own: %lld x %lld there", (long long)part->shape[0],
                 (long long)(part->count / part->shape[0]));
    else if (rescaled)
        snprintf(start, sizeof start, "its own: scale_embeddings differs");
    else if (times > 1)
        snprintf(start, sizeof start, "taken, every head %d times", times);
    add_row(&copier->table, tensor, start);
    if (times == 0 || rescaled)
        return KERN_OK;
    copier->table.taken += (uint64_t)tensor->count;
    return copy(copier, index, other, times);
}

static int64_t largest(const eng_model *model) {
    int64_t most = 0;
    for (int32_t i = 0; i < model->tensors; i++)
        most = model->tensor[i].count > most ? model->tensor[i].count : most;
    return most;
}

eng_status trn_start_weights(const eng_weights *from, const eng_weights *to, kern_stream *stream, char **text,
                             eng_error *error) {
    const int64_t own = largest(to->model), other = largest(from->model);
    const size_t room = sizeof(float) * (size_t)(own > other ? own : other);
    copier copier = {.from = from, .to = to, .stream = stream, .part = malloc(room), .made = malloc(room)};
    copier.table.group = calloc((size_t)to->model->tensors, sizeof *copier.table.group);
    kern_status status = copier.part && copier.made && copier.table.group ? KERN_OK : KERN_NO_MEMORY;
    for (int32_t i = 0; status == KERN_OK && i < to->model->tensors; i++)
        status = start_tensor(&copier, i);
    eng_status done = eng_fail_kernel(error, status, "taking start weights");
    if (done == ENG_OK && copier.table.taken == 0)
        done = eng_fail(error, ENG_INVALID, "no tensor has the part and the shape of one of this model");
    if (done == ENG_OK && !(*text = table_text(&copier.table, to->model->parameters)))
        done = eng_fail(error, ENG_NO_MEMORY, "out of memory for the table of start weights");
    free(copier.part);
    free(copier.made);
    free(copier.table.group);
    return done;
}
