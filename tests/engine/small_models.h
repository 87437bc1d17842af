// SPDX-License-Identifier: Apache-2.0
// Small random models of each kind that serving must carry, as weights or as a folder to open.
//
// A Mesa model, a hybrid with a sliding window, a Transformer with full attention, and a looped model of both that is
// read where its gate says. Their weights are larger than a
// start for training would be, so that logits differ clearly between contexts. The tokenizer of a folder is plain: ids
// 0 to 255 are the bytes, SMALL_BOS and SMALL_EOS are special, the ids above have no token.
#ifndef TESTS_ENGINE_SMALL_MODELS_H
#define TESTS_ENGINE_SMALL_MODELS_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/checkpoint.h"
#include "kernels/kernels.h"

enum { SMALL_BOS = 256, SMALL_EOS = 257, SMALL_VOCAB = 272, SMALL_CONTEXT = 2048 };

typedef struct small_model {
    const char *name, *config;
    bool paged, mesa;
} small_model;

enum { SMALL_MESA, SMALL_HYBRID, SMALL_LLAMA, SMALL_LOOPED, SMALL_MODELS };
extern const small_model small_models[SMALL_MODELS];

typedef struct small_world {
    kern_device *device;
    kern_stream *stream;
    eng_model *model;
    eng_weights *weights; // trainable, float32
} small_world;

void small_world_open(const small_model *model, const char *device, small_world *out);
void small_world_close(small_world *world);
// The master values of a tensor by name; fails the test when there is none.
float *small_tensor(const small_world *world, const char *name);

// Writes the folder: config, weights after edit (may be NULL), and the tokenizer if wanted.
void small_checkpoint(const char *dir, const small_model *model, void (*edit)(small_world *), bool tokenizer);

// Ids that depend on the seed alone, below 256.
void small_prompt(uint64_t seed, int32_t *ids, int32_t count);

#endif
