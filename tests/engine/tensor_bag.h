// SPDX-License-Identifier: Apache-2.0
// A safetensors file in memory that tests change and write back, and a small checkpoint folder to start from.
//
// Every helper ends the test case on a failure of its own.
#ifndef TESTS_ENGINE_TENSOR_BAG_H
#define TESTS_ENGINE_TENSOR_BAG_H

#include <stddef.h>
#include <stdint.h>

#include "engine/checkpoint.h"

enum { BAG_TENSORS = 128 };

typedef struct tensor_bag {
    size_t count;
    eng_st_source tensor[BAG_TENSORS]; // name and float32 data are the bag's
} tensor_bag;

void bag_read(tensor_bag *bag, const char *path);
void bag_write(const tensor_bag *bag, const char *path);
void bag_free(tensor_bag *bag);
eng_st_source *bag_find(tensor_bag *bag, const char *name);
float *bag_data(tensor_bag *bag, const char *name);
void bag_add(tensor_bag *bag, const char *name, int ndim, const int64_t *shape, const float *data); // copies
void bag_remove(tensor_bag *bag, const char *name);
void bag_rename(tensor_bag *bag, const char *name, const char *new_name);
void bag_set_dtype(tensor_bag *bag, eng_dtype dtype);

// The CPU device; the caller closes it.
kern_device *open_cpu(void);
eng_model *model_from(const char *json);
// Random weights of the config, saved in float32 as a checkpoint folder.
void make_checkpoint(const char *dir, const char *json, uint64_t seed);
// The float32 masters as they are on the device (weights->count floats); new (free).
float *master_values(const eng_weights *weights);

#endif
