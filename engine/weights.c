// SPDX-License-Identifier: Apache-2.0
// Weights on a device: from a checkpoint or from a random start, for serving or for training.
//
// Serving keeps each matrix in the file's own precision (F16 widens to float32, which every backend has; blocks stay
// blocks, which only the CPU reads) and each vector in float32, in one allocation a tensor. Training keeps float32
// masters and gradients in one allocation each, every tensor padded to 16 floats, and matrices read the masters in
// place. A weight that is not finite is refused with its tensor and the count: one NaN would silently spoil every
// answer. Host memory: one tensor at a time. Not for an event loop's thread.
#include "engine/checkpoint_internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/files.h"
#include "engine/forward.h"
#include "engine/random.h"

enum { PADDING = 16 };

typedef struct loader {
    eng_weights *weights;
    kern_stream *stream;
    float *host;    // values of the tensor at hand, float32
    uint16_t *half; // or bf16
    eng_error *error;
} loader;

static int64_t padded(int64_t count) {
    return (count + PADDING - 1) / PADDING * PADDING;
}

static int64_t largest_tensor(const eng_model *model) {
    int64_t largest = 0;
    for (int32_t i = 0; i < model->tensors; i++) {
        if (model->tensor[i].count > largest)
            largest = model->tensor[i].count;
    }
    return largest;
}

static eng_status allocate_trainable(eng_weights *weights, eng_error *error) {
    const eng_model *model = weights->model;
    size_t tensors = (size_t)model->tensors;
    weights->master = calloc(tensors, sizeof *weights->master);
    weights->grad = calloc(tensors, sizeof *weights->grad);
    if (!weights->master || !weights->grad)
        return eng_fail(error, ENG_NO_MEMORY, "no memory for the tensor table");
    for (size_t i = 0; i < tensors; i++)
        weights->count += padded(model->tensor[i].count);
    size_t bytes = (size_t)weights->count * sizeof(float);
    void *masters = NULL, *grads = NULL;
    kern_status status = kern_alloc(weights->device, bytes, &masters);
    if (status == KERN_OK)
        status = kern_alloc(weights->device, bytes, &grads);
    weights->masters = masters;
    weights->grads = grads;
    if (status != KERN_OK)
        return eng_fail_kernel(error, status, "allocating weights and gradients");
    weights->bytes = 2 * bytes;
    int64_t offset = 0;
    for (size_t i = 0; i < tensors; i++) {
        weights->master[i] = weights->masters + offset;
        weights->grad[i] = weights->grads + offset;
        offset += padded(model->tensor[i].count);
    }
    return ENG_OK;
}

static void loader_close(loader *loader) {
    if (loader->stream)
        kern_stream_close(loader->stream);
    free(loader->host);
    free(loader->half);
}

// The model's computed tables, behind the tensors in param.
static eng_status upload_constants(loader *loader, eng_weights *weights) {
    const eng_model *model = weights->model;
    for (int32_t i = 0; i < model->constants; i++) {
        size_t bytes = (size_t)model->constant[i].count * sizeof(float);
        void **memory = &weights->param[model->tensors + i];
        kern_status status = kern_alloc(weights->device, bytes, memory);
        if (status == KERN_OK)
            status = kern_upload(loader->stream, *memory, model->constant[i].value, bytes);
        if (status == KERN_OK)
            status = kern_synchronize(loader->stream);
        if (status != KERN_OK)
            return eng_fail_kernel(loader->error, status, "loading a table of constants");
        weights->bytes += bytes;
    }
    return ENG_OK;
}

// Makes empty weights and what is needed to fill them; on failure loader->weights is NULL.
static eng_status loader_open(loader *loader, const eng_model *model, kern_device *device, bool trainable,
                              eng_error *error) {
    *loader = (struct loader){.error = error};
    size_t largest = (size_t)largest_tensor(model);
    loader->host = malloc(largest * sizeof *loader->host);
    loader->half = malloc(largest * sizeof *loader->half);
    loader->weights = calloc(1, sizeof *loader->weights);
    eng_weights *weights = loader->weights;
    if (weights)
        *weights = (eng_weights){.device = device, .model = model, .trainable = trainable};
    if (weights)
        weights->param = calloc((size_t)eng_model_lent(model) + 1, sizeof *weights->param);
    eng_status status = ENG_OK;
    if (!loader->host || !loader->half || !weights || !weights->param)
        status = eng_fail(error, ENG_NO_MEMORY, "no memory to load weights");
    if (status == ENG_OK) {
        kern_status opened = kern_stream_open(device, &loader->stream);
        if (opened != KERN_OK)
            status = eng_fail_kernel(error, opened, "opening a stream for the weights");
    }
    if (status == ENG_OK && trainable)
        status = allocate_trainable(weights, error);
    if (status == ENG_OK)
        status = upload_constants(loader, weights);
    if (status != ENG_OK) {
        loader_close(loader);
        eng_weights_free(weights);
        loader->weights = NULL;
    }
    return status;
}

static eng_status loader_finish(loader *loader, eng_status status, eng_weights **out) {
    loader_close(loader);
    if (status == ENG_OK)
        *out = loader->weights;
    else
        eng_weights_free(loader->weights);
    return status;
}

static eng_status upload(loader *loader, void *memory, const eng_tensor *tensor) {
    kern_status status =
        kern_upload(loader->stream, memory, loader->host, (size_t)tensor->count * sizeof *loader->host);
    if (status == KERN_OK)
        status = kern_synchronize(loader->stream); // the host buffer is used for the next tensor
    return status == KERN_OK ? ENG_OK : eng_fail_kernel(loader->error, status, tensor->name);
}

// desc: dtype and memory; its shape is the tensor's.
static eng_status create_matrix(loader *loader, int32_t index, kern_weight_desc desc) {
    eng_weights *weights = loader->weights;
    const eng_tensor *tensor = &weights->model->tensor[index];
    desc.cols = tensor->shape[tensor->ndim - 1];
    desc.rows = tensor->count / desc.cols;
    kern_weight *weight = NULL;
    kern_status status = kern_weight_create(weights->device, &desc, &weight);
    if (status == KERN_UNSUPPORTED && desc.scale)
        return eng_fail(loader->error, ENG_UNSUPPORTED, "tensor '%.96s': %s weights run on the CPU, not on %s",
                        tensor->name, desc.dtype == KERN_Q8 ? "int8" : "int4",
                        kern_device_describe(weights->device)->name);
    if (status != KERN_OK)
        return eng_fail_kernel(loader->error, status, tensor->name);
    weights->param[index] = weight;
    if (!desc.master)
        weights->bytes += kern_weight_bytes(weight);
    return ENG_OK;
}

static eng_status create_blocks(loader *loader, int32_t index, const eng_blocks *blocks) {
    return create_matrix(
        loader, index,
        (kern_weight_desc){
            .dtype = blocks->dtype, .host = blocks->code, .scale = blocks->scale, .minimum = blocks->minimum});
}

// The values in loader->host as a matrix in blocks.
static eng_status round_to_blocks(loader *loader, int32_t index, kern_dtype dtype) {
    const eng_tensor *tensor = &loader->weights->model->tensor[index];
    eng_blocks blocks = {0};
    eng_status status = eng_blocks_create(dtype, tensor->shape[0], tensor->shape[1], false, &blocks, loader->error);
    if (status == ENG_OK)
        status = eng_blocks_round(loader->host, tensor->name, &blocks, loader->error);
    if (status == ENG_OK)
        status = create_blocks(loader, index, &blocks);
    eng_blocks_free(&blocks);
    return status;
}

// Stores the float32 values in loader->host as tensor index; dtype: what matrices of serving weights are rounded to.
static eng_status store_tensor(loader *loader, int32_t index, kern_dtype dtype) {
    eng_weights *weights = loader->weights;
    const eng_tensor *tensor = &weights->model->tensor[index];
    bool matrix = tensor->role == ENG_ROLE_MATRIX;
    if (weights->trainable) {
        eng_status status = upload(loader, weights->master[index], tensor);
        if (status != ENG_OK)
            return status;
        if (matrix)
            return create_matrix(loader, index,
                                 (kern_weight_desc){.dtype = KERN_F32, .master = weights->master[index]});
        weights->param[index] = weights->master[index];
        return ENG_OK;
    }
    if (matrix && dtype == KERN_BF16) {
        for (int64_t i = 0; i < tensor->count; i++)
            loader->half[i] = eng_bf16_from_f32(loader->host[i]);
        return create_matrix(loader, index, (kern_weight_desc){.dtype = KERN_BF16, .host = loader->half});
    }
    const bool quantises = dtype == KERN_Q8 || dtype == KERN_Q4;
    const kern_dtype blocks = quantises ? eng_quantized_dtype(weights->model, index, dtype) : KERN_F32;
    if (blocks != KERN_F32)
        return round_to_blocks(loader, index, blocks);
    if (matrix)
        return create_matrix(loader, index, (kern_weight_desc){.dtype = KERN_F32, .host = loader->host});
    size_t bytes = (size_t)padded(tensor->count) * sizeof(float);
    kern_status allocated = kern_alloc(weights->device, bytes, &weights->param[index]);
    if (allocated != KERN_OK)
        return eng_fail_kernel(loader->error, allocated, tensor->name);
    weights->bytes += bytes;
    return upload(loader, weights->param[index], tensor);
}

static eng_status refuse_nonfinite(const eng_place *place, int64_t found, int64_t count, eng_error *error) {
    return eng_fail(error, ENG_NUMERIC, "%s: tensor '%.96s': %lld of %lld values are not finite",
                    eng_path_tail(eng_st_path(place->file)), place->entry->name, (long long)found, (long long)count);
}

static int64_t count_nonfinite_bf16(const uint16_t *values, int64_t count) {
    int64_t found = 0;
    for (int64_t i = 0; i < count; i++)
        found += (values[i] & 0x7F80) == 0x7F80;
    return found;
}

static eng_status load_blocks(loader *loader, int32_t index, const eng_place *place) {
    eng_blocks blocks;
    eng_status status = eng_place_read_blocks(place, &loader->weights->model->tensor[index], &blocks, loader->error);
    if (status != ENG_OK)
        return status;
    if (loader->weights->trainable) {
        eng_blocks_widen(&blocks, loader->host);
        status = store_tensor(loader, index, KERN_F32);
    } else {
        status = create_blocks(loader, index, &blocks);
    }
    eng_blocks_free(&blocks);
    return status;
}

static eng_status load_tensor(loader *loader, int32_t index, const eng_place *place) {
    const eng_st_entry *entry = place->entry;
    const eng_tensor *tensor = &loader->weights->model->tensor[index];
    bool matrix = tensor->role == ENG_ROLE_MATRIX;
    eng_status status;
    int64_t nonfinite, first = place->first, count = tensor->count;
    if (eng_place_is_blocks(place))
        return load_blocks(loader, index, place);
    if (matrix && entry->dtype == ENG_BF16 && !loader->weights->trainable) {
        status = eng_st_read(place->file, entry, first, count, loader->half, loader->error);
        if (status != ENG_OK)
            return status;
        nonfinite = count_nonfinite_bf16(loader->half, count);
        if (nonfinite > 0)
            return refuse_nonfinite(place, nonfinite, count, loader->error);
        return create_matrix(loader, index, (kern_weight_desc){.dtype = KERN_BF16, .host = loader->half});
    }
    status = eng_st_read_f32(place->file, entry, first, count, loader->host, loader->error);
    if (status != ENG_OK)
        return status;
    nonfinite = eng_count_nonfinite(loader->host, count);
    return nonfinite > 0 ? refuse_nonfinite(place, nonfinite, count, loader->error)
                         : store_tensor(loader, index, KERN_F32);
}

uint64_t eng_weights_measure(const eng_checkpoint *checkpoint) {
    const eng_model *model = checkpoint->model;
    uint64_t bytes = 0;
    for (int32_t i = 0; i < model->tensors; i++) {
        const eng_place *place = &checkpoint->place[i];
        bool half = model->tensor[i].role == ENG_ROLE_MATRIX && place->entry->dtype == ENG_BF16;
        if (eng_place_is_blocks(place))
            bytes += place->entry->bytes + place->scale.entry->bytes +
                     (place->minimum.entry ? place->minimum.entry->bytes : 0);
        else
            bytes += (uint64_t)model->tensor[i].count * (half ? sizeof(uint16_t) : sizeof(float));
    }
    for (int32_t i = 0; i < model->constants; i++)
        bytes += (uint64_t)model->constant[i].count * sizeof(float);
    return bytes;
}

eng_status eng_weights_load(const eng_checkpoint *checkpoint, kern_device *device, bool trainable, eng_weights **out,
                            eng_error *error) {
    loader loader;
    eng_status status = loader_open(&loader, checkpoint->model, device, trainable, error);
    if (status != ENG_OK)
        return status;
    for (int32_t i = 0; status == ENG_OK && i < checkpoint->model->tensors; i++)
        status = load_tensor(&loader, i, &checkpoint->place[i]);
    return loader_finish(&loader, status, out);
}

// The bias of a decay gate that remembers `horizon` tokens: decay 1 - 1 / horizon.
static double horizon_bias(const eng_init *init, double horizon) {
    double log_decay = log1p(-1 / horizon);
    if (init->kind == ENG_INIT_HORIZON_STEP)
        return log(expm1(-log_decay));
    double s = init->kind == ENG_INIT_HORIZON ? exp(init->divisor * log_decay) : -log_decay / init->divisor;
    return log(s) - log1p(-s);
}

// Horizons log-spaced over the groups from 4 tokens to the context.
static float horizon_at(const eng_init *init, double fraction) {
    const double shortest = 4, longest = init->value > shortest ? init->value : shortest;
    return (float)horizon_bias(init, shortest * pow(longest / shortest, fraction));
}

static float uniform_start(const eng_init *init, double fraction) {
    double uniform = init->low + fraction * ((double)init->value - init->low);
    switch (init->kind) {
    case ENG_INIT_LOG_UNIFORM:
        return (float)log(uniform);
    case ENG_INIT_STEP: { // floored, as the public code does
        double step = fmax(init->low * pow((double)init->value / init->low, fraction), 1e-4);
        return (float)log(expm1(step));
    }
    default:
        return (float)log(expm1(-log(uniform) / 16)); // ENG_INIT_RGLRU: a^2 = e^-16 softplus(b)
    }
}

static double uniform_at(uint64_t seed, int32_t index, int64_t element) {
    uint32_t words[4];
    eng_philox(seed, (uint64_t)index, (uint64_t)element, words);
    return (words[0] + 0.5) * 0x1p-32;
}

static void fill_start(float *values, const eng_tensor *tensor, uint64_t seed, int32_t index) {
    const eng_init *init = &tensor->init;
    int64_t groups = init->groups > 0 ? init->groups : tensor->count, members = tensor->count / groups;
    if (init->kind == ENG_INIT_NORMAL) {
        eng_normals(seed, (uint64_t)index, 0, tensor->count, init->value, values);
        return;
    }
    for (int64_t i = 0; i < tensor->count; i++) {
        double fraction = groups > 1 ? (double)(i / members) / (double)(groups - 1) : 0.5;
        switch (init->kind) {
        case ENG_INIT_NORMAL:
        case ENG_INIT_CONSTANT:
            values[i] = init->value;
            break;
        case ENG_INIT_HORIZON:
        case ENG_INIT_HORIZON_STEP:
        case ENG_INIT_HORIZON_BOUNDED:
            values[i] = horizon_at(init, fraction);
            break;
        case ENG_INIT_LINEAR:
            values[i] = (float)(init->low + fraction * ((double)init->value - init->low));
            break;
        case ENG_INIT_LOG_UNIFORM:
        case ENG_INIT_STEP:
        case ENG_INIT_RGLRU:
            values[i] = uniform_start(init, uniform_at(seed, index, i));
        }
    }
}

eng_status eng_weights_init(const eng_model *model, kern_device *device, uint64_t seed, kern_dtype dtype,
                            eng_weights **out, eng_error *error) {
    loader loader;
    eng_status status = loader_open(&loader, model, device, dtype == KERN_F32, error);
    if (status != ENG_OK)
        return status;
    for (int32_t i = 0; status == ENG_OK && i < model->tensors; i++) {
        fill_start(loader.host, &model->tensor[i], seed, i);
        status = store_tensor(&loader, i, dtype);
    }
    return loader_finish(&loader, status, out);
}

void eng_weights_free(eng_weights *weights) {
    if (!weights)
        return;
    for (int32_t i = 0; weights->param && i < weights->model->tensors; i++) {
        if (weights->model->tensor[i].role == ENG_ROLE_MATRIX)
            kern_weight_free(weights->param[i]);
        else if (!weights->trainable)
            kern_free(weights->device, weights->param[i]);
    }
    for (int32_t i = 0; weights->param && i < weights->model->constants; i++)
        kern_free(weights->device, weights->param[weights->model->tensors + i]);
    kern_free(weights->device, weights->masters);
    kern_free(weights->device, weights->grads);
    free(weights->param);
    free(weights->master);
    free(weights->grad);
    free(weights);
}

void eng_weights_lend(const eng_weights *teacher, eng_weights *student) {
    student->param[eng_model_lent(student->model)] = teacher->param[teacher->model->head];
}
