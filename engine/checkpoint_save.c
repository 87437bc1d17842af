// SPDX-License-Identifier: Apache-2.0
// Writing a Hugging Face folder that this engine and the public Python loaders read.
//
// config.json keeps every key that the model was made from and says the new element type; tensors have the first of
// their names, one by one. Everything is written into a
// folder beside the target, made durable and renamed, so a kill or a full disk at any moment leaves the old checkpoint
// or the new one whole. A target that exists is replaced only if it is a checkpoint: a mistyped path must not cost
// somebody's data. Values that the loader would refuse are not written.
// Host memory: one float32 copy of the model, and its blocks if it is quantised. Not for an event loop's thread.
#include "engine/checkpoint_internal.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "engine/config_internal.h"
#include "engine/files.h"
#include "engine/forward.h"

enum { MAX_TOKENIZER_BYTES = 512 << 20 };

static const char *const tokenizer_files[] = {
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt",     "tokenizer.model",       "chat_template.jinja",
};

// What is written: elements of dtype, or matrices in blocks and the rest F32.
typedef struct form {
    eng_dtype dtype;
    kern_dtype blocks;      // KERN_F32: none
    eng_rounding *rounding; // optional
} form;

static eng_status no_memory(eng_error *error) {
    return eng_fail(error, ENG_NO_MEMORY, "no memory to save a checkpoint");
}

static bool holds_file(const char *dir, const char *name) {
    char *path = eng_join_path(dir, name);
    struct stat facts;
    bool found = path && stat(path, &facts) == 0 && S_ISREG(facts.st_mode);
    free(path);
    return found;
}

eng_status eng_checkpoint_check_target(const char *dir, eng_error *error) {
    struct stat facts;
    if (lstat(dir, &facts) != 0)
        return ENG_OK; // what else is wrong with it shows when its neighbour is made
    bool weights = holds_file(dir, "model.safetensors") || holds_file(dir, "model.safetensors.index.json");
    if (S_ISDIR(facts.st_mode) && holds_file(dir, "config.json") && weights)
        return ENG_OK;
    return eng_fail(error, ENG_INVALID, "%s: exists and is no checkpoint to replace", eng_path_tail(dir));
}

static eng_status write_json(const char *dir, const char *name, const json_t *object, eng_error *error) {
    char *path = eng_join_path(dir, name), *text = eng_json_write(object);
    eng_status status = path && text ? eng_write_file_atomic(path, text, strlen(text), error) : no_memory(error);
    free(text);
    free(path);
    return status;
}

// ---- config.json and generation_config.json

static int write_quantization(json_t *root, kern_dtype blocks) {
    if (blocks == KERN_F32) {
        (void)json_object_del(root, "quantization_config"); // it may not be there
        return 0;
    }
    return json_object_set_new(root, "quantization_config", eng_config_quantization(blocks == KERN_Q8 ? 8 : 4));
}

static eng_status write_config(const char *dir, const eng_config *config, const form *form, eng_error *error) {
    json_t *root;
    eng_status status = eng_json_parse(config->json, strlen(config->json), "config.json", &root, error);
    if (status != ENG_OK)
        return status;
    const char *name = form->dtype == ENG_F32 ? "float32" : "bfloat16";
    int failed = json_object_set_new(root, "torch_dtype", json_string(name));
    if (json_object_get(root, "dtype"))
        failed |= json_object_set_new(root, "dtype", json_string(name));
    failed |= write_quantization(root, form->blocks);
    if (config->fused_weights)
        failed |= json_object_set_new(root, "weight_mode", json_string("single")); // as its tensors are written
    if (!json_object_get(root, "architectures"))
        failed |= json_object_set_new(root, "architectures", json_pack("[s]", config->architecture));
    status = failed ? no_memory(error) : write_json(dir, "config.json", root, error);
    json_decref(root);
    return status;
}

static json_t *eos_json(const eng_config *config) {
    if (config->eos_count == 1)
        return json_integer(config->eos_id[0]);
    json_t *list = json_array();
    for (int32_t i = 0; i < config->eos_count; i++)
        json_array_append_new(list, json_integer(config->eos_id[i]));
    return list;
}

static eng_status write_generation_config(const char *dir, const eng_config *config, eng_error *error) {
    json_t *root = json_object();
    int failed = json_object_set_new(root, "_from_model_config", json_true());
    if (config->bos_id >= 0)
        failed |= json_object_set_new(root, "bos_token_id", json_integer(config->bos_id));
    if (config->eos_count > 0)
        failed |= json_object_set_new(root, "eos_token_id", eos_json(config));
    if (config->pad_id >= 0)
        failed |= json_object_set_new(root, "pad_token_id", json_integer(config->pad_id));
    eng_status status = failed ? no_memory(error) : write_json(dir, "generation_config.json", root, error);
    json_decref(root);
    return status;
}

// ---- tokenizer files

static eng_status copy_file(const char *from_dir, const char *to_dir, const char *name, eng_error *error) {
    char *from = eng_join_path(from_dir, name), *to = eng_join_path(to_dir, name), *data = NULL;
    size_t length = 0;
    eng_status status = from && to ? eng_read_file(from, MAX_TOKENIZER_BYTES, &data, &length, error) : no_memory(error);
    if (status == ENG_OK)
        status = eng_write_file_atomic(to, data, length, error);
    free(data);
    free(to);
    free(from);
    return status;
}

static eng_status copy_tokenizer(const char *from_dir, const char *to_dir, eng_error *error) {
    if (!holds_file(from_dir, tokenizer_files[0]))
        return eng_fail(error, ENG_NOT_FOUND, "%s: holds no %s", eng_path_tail(from_dir), tokenizer_files[0]);
    eng_status status = ENG_OK;
    for (size_t i = 0; status == ENG_OK && i < sizeof tokenizer_files / sizeof tokenizer_files[0]; i++) {
        if (holds_file(from_dir, tokenizer_files[i]))
            status = copy_file(from_dir, to_dir, tokenizer_files[i], error);
    }
    return status;
}

// ---- model.safetensors

static eng_status download(const eng_weights *weights, float *host, eng_error *error) {
    kern_stream *stream;
    kern_status status = kern_stream_open(weights->device, &stream);
    if (status != KERN_OK)
        return eng_fail_kernel(error, status, "opening a stream to save weights");
    status = kern_download(stream, host, weights->masters, (size_t)weights->count * sizeof *host);
    if (status == KERN_OK)
        status = kern_synchronize(stream);
    kern_stream_close(stream);
    return status == KERN_OK ? ENG_OK : eng_fail_kernel(error, status, "reading weights from the device");
}

static eng_status check_values(const eng_tensor *tensor, const float *values, eng_dtype dtype, eng_error *error) {
    int64_t found = eng_count_nonfinite(values, tensor->count);
    for (int64_t i = 0; found == 0 && dtype == ENG_BF16 && i < tensor->count; i++) {
        float rounded = eng_bf16_to_f32(eng_bf16_from_f32(values[i]));
        found += eng_count_nonfinite(&rounded, 1);
    }
    if (found == 0)
        return ENG_OK;
    return eng_fail(error, ENG_NUMERIC, "tensor '%.96s': %lld of %lld values are not finite as %s", tensor->name,
                    (long long)found, (long long)tensor->count, eng_dtype_name(dtype));
}

// The tensors of the file as they are gathered.
typedef struct sources {
    eng_st_source *source; // up to two a tensor
    size_t count;
    eng_blocks *blocks;               // (tensors)
    char (*scale)[ENG_NAME_SIZE + 8]; // (tensors) their names
} sources;

static void add_source(sources *all, const char *name, eng_dtype dtype, const eng_tensor *tensor, const void *data) {
    eng_st_source *source = &all->source[all->count++];
    *source = (eng_st_source){.name = name, .dtype = dtype, .ndim = tensor->ndim, .data = data};
    memcpy(source->shape, tensor->shape, (size_t)tensor->ndim * sizeof *tensor->shape);
}

static eng_status measure_rounding(const eng_blocks *blocks, const float *values, eng_rounding *out, eng_error *error) {
    const int64_t count = blocks->rows * blocks->cols;
    float *widened = malloc((size_t)count * sizeof *widened);
    if (!widened)
        return no_memory(error);
    eng_blocks_widen(blocks, widened);
    *out = (eng_rounding){0};
    for (int64_t i = 0; i < count; i++) {
        const double lost = (double)widened[i] - (double)values[i];
        out->lost += lost * lost;
        out->size += (double)values[i] * (double)values[i];
    }
    free(widened);
    return ENG_OK;
}

static eng_status add_blocks(sources *all, int32_t index, const eng_model *model, const float *values, const form *form,
                             eng_error *error) {
    const eng_tensor *tensor = &model->tensor[index];
    const kern_dtype dtype = eng_quantized_dtype(model, index, form->blocks);
    eng_blocks *blocks = &all->blocks[index];
    eng_status status = eng_blocks_create(dtype, tensor->shape[0], tensor->shape[1], false, blocks, error);
    if (status == ENG_OK)
        status = eng_blocks_round(values, tensor->name, blocks, error);
    if (status == ENG_OK && form->rounding)
        status = measure_rounding(blocks, values, &form->rounding[index], error);
    if (status != ENG_OK)
        return status;
    snprintf(all->scale[index], sizeof all->scale[index], "%s.scale", tensor->name);
    add_source(all, tensor->name, dtype == KERN_Q8 ? ENG_I8 : ENG_U8, tensor, blocks->code);
    all->source[all->count - 1].shape[1] = eng_blocks_row_bytes(dtype, blocks->cols);
    add_source(all, all->scale[index], ENG_F16, tensor, blocks->scale);
    all->source[all->count - 1].shape[1] = eng_blocks_of_row(blocks->cols);
    return ENG_OK;
}

static eng_status add_tensors(sources *all, const eng_weights *weights, const eng_model *model, const float *host,
                              const form *form, eng_error *error) {
    eng_status status = ENG_OK;
    for (int32_t i = 0; status == ENG_OK && i < model->tensors; i++) {
        const eng_tensor *tensor = &model->tensor[i];
        const float *values = host + (weights->master[i] - weights->masters);
        status = check_values(tensor, values, form->dtype, error);
        if (status == ENG_OK && form->blocks != KERN_F32 && eng_quantized_dtype(model, i, form->blocks) != KERN_F32)
            status = add_blocks(all, i, model, values, form, error);
        else if (status == ENG_OK)
            add_source(all, tensor->name, form->dtype, tensor, values);
    }
    return status;
}

static eng_status write_tensors(const char *dir, const eng_weights *weights, const eng_model *model, const float *host,
                                const form *form, eng_error *error) {
    static const char *const metadata[] = {"format", "pt", NULL}; // the public Python loaders insist on it
    size_t tensors = (size_t)model->tensors;
    sources all = {.source = calloc(2 * tensors + 1, sizeof *all.source),
                   .blocks = calloc(tensors, sizeof *all.blocks),
                   .scale = calloc(tensors, sizeof *all.scale)};
    char *path = eng_join_path(dir, "model.safetensors");
    eng_status status = all.source && all.blocks && all.scale && path ? ENG_OK : no_memory(error);
    if (status == ENG_OK)
        status = add_tensors(&all, weights, model, host, form, error);
    if (model->config.tied && model->config.dialect == ENG_DIALECT_STATE_SPACES && form->blocks == KERN_F32) {
        all.source[all.count] = all.source[model->embed]; // as mamba_ssm saves and loads it
        all.source[all.count++].name = "lm_head.weight";
    }
    if (status == ENG_OK)
        status = eng_st_write(path, all.source, all.count, metadata, error);
    for (size_t i = 0; all.blocks && i < tensors; i++)
        eng_blocks_free(&all.blocks[i]);
    free(all.scale);
    free(all.blocks);
    free(all.source);
    free(path);
    return status;
}

static eng_status write_weights(const char *dir, const eng_weights *weights, const eng_model *model, const form *form,
                                eng_error *error) {
    float *host = malloc((size_t)weights->count * sizeof *host);
    if (!host)
        return no_memory(error);
    eng_status status = download(weights, host, error);
    if (status == ENG_OK)
        status = write_tensors(dir, weights, model, host, form, error);
    free(host);
    return status;
}

// ---- the door

static eng_status fill(const char *temp, const eng_weights *weights, const eng_model *model, const form *form,
                       const char *tokenizer_dir, eng_error *error) {
    const eng_config *config = &model->config;
    eng_status status = write_config(temp, config, form, error);
    if (status == ENG_OK)
        status = write_generation_config(temp, config, error);
    if (status == ENG_OK && tokenizer_dir)
        status = copy_tokenizer(tokenizer_dir, temp, error);
    if (status == ENG_OK)
        status = write_weights(temp, weights, model, form, error);
    return status;
}

static eng_status save(const char *dir, const eng_weights *weights, const eng_model *model, const form *form,
                       const char *tokenizer_dir, eng_error *error) {
    if (!weights->trainable)
        return eng_fail(error, ENG_INVALID, "only weights that were loaded for training can be saved");
    eng_status status = eng_checkpoint_check_target(dir, error);
    if (status != ENG_OK)
        return status;
    char *temp;
    status = eng_make_temp_dir(dir, &temp, error);
    if (status != ENG_OK)
        return status;
    status = fill(temp, weights, model, form, tokenizer_dir, error);
    if (status == ENG_OK)
        status = eng_commit_temp_dir(temp, dir, error);
    if (status != ENG_OK) {
        eng_error ignored = {0};
        eng_status removed = eng_remove_tree(temp, &ignored); // the first fault is the one to report
        (void)removed;
    }
    free(temp);
    return status;
}

eng_status eng_checkpoint_save(const char *dir, const eng_weights *weights, eng_dtype dtype, const char *tokenizer_dir,
                               eng_error *error) {
    return eng_checkpoint_save_as(dir, weights, weights->model, dtype, tokenizer_dir, error);
}

eng_status eng_checkpoint_save_as(const char *dir, const eng_weights *weights, const eng_model *model, eng_dtype dtype,
                                  const char *tokenizer_dir, eng_error *error) {
    if (dtype != ENG_F32 && dtype != ENG_BF16)
        return eng_fail(error, ENG_INVALID, "checkpoints are saved as F32 or BF16, not %s", eng_dtype_name(dtype));
    return save(dir, weights, model, &(form){.dtype = dtype, .blocks = KERN_F32}, tokenizer_dir, error);
}

eng_status eng_checkpoint_quantize(const char *dir, const eng_weights *weights, kern_dtype blocks,
                                   const char *tokenizer_dir, eng_rounding *rounding, eng_error *error) {
    if (blocks != KERN_Q8 && blocks != KERN_Q4)
        return eng_fail(error, ENG_INVALID, "matrices are quantised to int8 or 4 bits");
    if (rounding)
        memset(rounding, 0, (size_t)weights->model->tensors * sizeof *rounding);
    const form form = {.dtype = ENG_F32, .blocks = blocks, .rounding = rounding};
    return save(dir, weights, weights->model, &form, tokenizer_dir, error);
}
