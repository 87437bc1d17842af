// SPDX-License-Identifier: Apache-2.0
// An open checkpoint, shared by its opener, its loader and its writer; nobody else includes it.
//
// The model, the files and the places live as long as the checkpoint and never change once it is open.
#ifndef ENGINE_CHECKPOINT_INTERNAL_H
#define ENGINE_CHECKPOINT_INTERNAL_H

#include "engine/checkpoint.h"

enum { ENG_MAX_CONFIG_BYTES = 1 << 20 };

typedef struct eng_place { // where a tensor of the model's table lies
    const eng_st_file *file;
    const eng_st_entry *entry;
    int64_t first; // element of the entry where it begins
} eng_place;

struct eng_checkpoint {
    char *dir;
    eng_model *model;
    eng_st_file **file; // (files) in the order of their names
    size_t files;
    eng_place *place; // (model->tensors)
};

// As eng_checkpoint_save, with the config and the tensors' names of a model that has the same tensors.
ENG_CHECKED eng_status eng_checkpoint_save_as(const char *dir, const eng_weights *weights, const eng_model *model,
                                              eng_dtype dtype, const char *tokenizer_dir, eng_error *error);

#endif
