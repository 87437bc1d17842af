// SPDX-License-Identifier: Apache-2.0
// The optimizer's moments in a file; see optimizer.h. Host memory: a copy of the moments while they are written, one
// tensor while they are read.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/files.h"
#include "engine/forward.h"
#include "engine/safetensors.h"
#include "trainer/optimizer.h"

enum { PREFIXED_NAME = ENG_NAME_SIZE + 4 };

static eng_st_source describe(const trn_optimizer *optimizer, int32_t index, const char *name, const float *host) {
    const eng_weights *weights = optimizer->weights;
    const eng_tensor *tensor = &weights->model->tensor[index];
    eng_st_source source = {.name = name,
                            .dtype = ENG_F32,
                            .ndim = tensor->ndim,
                            .data = host + (weights->master[index] - weights->masters)};
    memcpy(source.shape, tensor->shape, sizeof tensor->shape);
    return source;
}

eng_status trn_optimizer_save(trn_optimizer *optimizer, const char *path, eng_error *error) {
    const eng_model *model = optimizer->weights->model;
    size_t floats = (size_t)optimizer->weights->count, tensors = (size_t)model->tensors;
    float *host = malloc(2 * floats * sizeof *host);
    eng_st_source *source = calloc(2 * tensors, sizeof *source);
    char(*name)[PREFIXED_NAME] = calloc(2 * tensors, sizeof *name);
    eng_status status = ENG_OK;
    if (!host || !source || !name) {
        status = eng_fail(error, ENG_NO_MEMORY, "%s: out of memory for the moments", eng_path_tail(path));
        goto out;
    }
    kern_status copied = kern_download(optimizer->stream, host, optimizer->m, floats * sizeof *host);
    if (copied == KERN_OK)
        copied = kern_download(optimizer->stream, host + floats, optimizer->v, floats * sizeof *host);
    if (copied == KERN_OK)
        copied = kern_synchronize(optimizer->stream);
    status = eng_fail_kernel(error, copied, "reading the moments");
    for (size_t i = 0; i < 2 * tensors; i++) {
        int32_t index = (int32_t)(i % tensors);
        snprintf(name[i], sizeof name[i], "%c.%s", i < tensors ? 'm' : 'v', model->tensor[index].name);
        source[i] = describe(optimizer, index, name[i], i < tensors ? host : host + floats);
    }
    if (status == ENG_OK)
        status = eng_st_write(path, source, 2 * tensors, NULL, error);
out:
    free(host);
    free(source);
    free(name);
    return status;
}

static bool same_shape(const eng_tensor *tensor, const eng_st_entry *entry) {
    return entry->dtype == ENG_F32 && entry->ndim == tensor->ndim &&
           memcmp(entry->shape, tensor->shape, sizeof *entry->shape * (size_t)tensor->ndim) == 0;
}

static eng_status load_tensor(trn_optimizer *optimizer, const eng_st_file *file, int32_t index, char letter,
                              float *device, eng_error *error) {
    const eng_weights *weights = optimizer->weights;
    const eng_tensor *tensor = &weights->model->tensor[index];
    char name[PREFIXED_NAME];
    snprintf(name, sizeof name, "%c.%s", letter, tensor->name);
    const char *path = eng_path_tail(eng_st_path(file));
    const eng_st_entry *entry = eng_st_find(file, name);
    if (!entry || !same_shape(tensor, entry))
        return eng_fail(error, ENG_FORMAT, "%s: %s: %s", path, name,
                        entry ? "not the model's shape in F32" : "missing");
    float *host = malloc(sizeof *host * (size_t)tensor->count);
    if (!host)
        return eng_fail(error, ENG_NO_MEMORY, "%s: %s: out of memory", path, name);
    eng_status status = eng_st_read_f32(file, entry, 0, tensor->count, host, error);
    if (status == ENG_OK && eng_count_nonfinite(host, tensor->count) > 0)
        status = eng_fail(error, ENG_NUMERIC, "%s: %s: values that are not finite", path, name);
    if (status == ENG_OK) {
        kern_status copied = kern_upload(optimizer->stream, device + (weights->master[index] - weights->masters), host,
                                         sizeof *host * (size_t)tensor->count);
        if (copied == KERN_OK)
            copied = kern_synchronize(optimizer->stream);
        status = eng_fail_kernel(error, copied, "loading the moments");
    }
    free(host);
    return status;
}

eng_status trn_optimizer_load(trn_optimizer *optimizer, const char *path, eng_error *error) {
    eng_st_file *file = NULL;
    eng_status status = eng_st_open(path, &file, error);
    for (int32_t i = 0; status == ENG_OK && i < optimizer->weights->model->tensors; i++) {
        status = load_tensor(optimizer, file, i, 'm', optimizer->m, error);
        if (status == ENG_OK)
            status = load_tensor(optimizer, file, i, 'v', optimizer->v, error);
    }
    eng_st_close(file);
    return status;
}
