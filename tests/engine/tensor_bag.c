// SPDX-License-Identifier: Apache-2.0
// Tensors in memory that tests change and write back; see tensor_bag.h.
//
// The bag's sources own their names and data although eng_st_source only borrows them: drop() takes both.
#include "tests/engine/tensor_bag.h"

#include <check.h>
#include <stdlib.h>
#include <string.h>

void bag_read(tensor_bag *bag, const char *path) {
    *bag = (tensor_bag){0};
    eng_st_file *file;
    eng_error error = {0};
    ck_assert_msg(eng_st_open(path, &file, &error) == ENG_OK, "%s", error.text);
    for (size_t i = 0; i < eng_st_count(file); i++) {
        const eng_st_entry *entry = eng_st_at(file, i);
        float *data = malloc((size_t)(entry->count + 1) * sizeof *data);
        ck_assert_int_eq(eng_st_read_f32(file, entry, 0, entry->count, data, NULL), ENG_OK);
        bag_add(bag, entry->name, entry->ndim, entry->shape, data);
        bag->tensor[i].dtype = entry->dtype;
        free(data);
    }
    eng_st_close(file);
}

void bag_write(const tensor_bag *bag, const char *path) {
    eng_error error = {0};
    ck_assert_msg(eng_st_write(path, bag->tensor, bag->count, NULL, &error) == ENG_OK, "%s", error.text);
}

static void drop(eng_st_source *tensor) {
    free((char *)tensor->name);
    free((void *)tensor->data);
}

void bag_free(tensor_bag *bag) {
    for (size_t i = 0; i < bag->count; i++)
        drop(&bag->tensor[i]);
    bag->count = 0;
}

eng_st_source *bag_find(tensor_bag *bag, const char *name) {
    for (size_t i = 0; i < bag->count; i++) {
        if (strcmp(bag->tensor[i].name, name) == 0)
            return &bag->tensor[i];
    }
    ck_abort_msg("no tensor %s", name);
    return NULL;
}

float *bag_data(tensor_bag *bag, const char *name) {
    return (float *)bag_find(bag, name)->data;
}

void bag_add(tensor_bag *bag, const char *name, int ndim, const int64_t *shape, const float *data) {
    ck_assert_uint_lt(bag->count, BAG_TENSORS);
    eng_st_source *tensor = &bag->tensor[bag->count++];
    *tensor = (eng_st_source){.name = strdup(name), .dtype = ENG_F32, .ndim = ndim};
    size_t count = 1;
    for (int i = 0; i < ndim; i++) {
        tensor->shape[i] = shape[i];
        count *= (size_t)shape[i];
    }
    float *copy = malloc((count + 1) * sizeof *copy);
    memcpy(copy, data, count * sizeof *copy);
    tensor->data = copy;
}

void bag_remove(tensor_bag *bag, const char *name) {
    eng_st_source *tensor = bag_find(bag, name);
    drop(tensor);
    *tensor = bag->tensor[--bag->count];
}

void bag_rename(tensor_bag *bag, const char *name, const char *new_name) {
    eng_st_source *tensor = bag_find(bag, name);
    free((char *)tensor->name);
    tensor->name = strdup(new_name);
}

void bag_set_dtype(tensor_bag *bag, eng_dtype dtype) {
    for (size_t i = 0; i < bag->count; i++)
        bag->tensor[i].dtype = dtype;
}

kern_device *open_cpu(void) {
    kern_device *device = NULL;
    char reason[256] = "";
    ck_assert_msg(kern_device_open(&(kern_device_options){.name = "cpu"}, &device, reason, sizeof reason) == KERN_OK,
                  "%s", reason);
    return device;
}

eng_model *model_from(const char *json) {
    eng_config config;
    eng_error error = {0};
    ck_assert_msg(eng_config_parse(json, strlen(json), "config.json", &config, &error) == ENG_OK, "%s", error.text);
    eng_model *model = NULL;
    ck_assert_msg(eng_model_create(&config, &model, &error) == ENG_OK, "%s", error.text);
    return model;
}

void make_checkpoint(const char *dir, const char *json, uint64_t seed) {
    kern_device *device = open_cpu();
    eng_model *model = model_from(json);
    eng_weights *weights = NULL;
    eng_error error = {0};
    ck_assert_msg(eng_weights_init(model, device, seed, false, &weights, &error) == ENG_OK, "%s", error.text);
    ck_assert_msg(eng_checkpoint_save(dir, weights, ENG_F32, NULL, &error) == ENG_OK, "%s", error.text);
    eng_weights_free(weights);
    eng_model_free(model);
    kern_device_close(device);
}

float *master_values(const eng_weights *weights) {
    float *values = malloc((size_t)weights->count * sizeof *values);
    kern_stream *stream;
    ck_assert_int_eq(kern_stream_open(weights->device, &stream), KERN_OK);
    ck_assert_int_eq(kern_download(stream, values, weights->masters, (size_t)weights->count * sizeof *values), KERN_OK);
    ck_assert_int_eq(kern_synchronize(stream), KERN_OK);
    kern_stream_close(stream);
    return values;
}
