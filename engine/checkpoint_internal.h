// SPDX-License-Identifier: Apache-2.0
// An open checkpoint, shared by its opener, its loader and its writer; nobody else includes it.
//
// The model, the files and the places live as long as the checkpoint and never change once it is open.
#ifndef ENGINE_CHECKPOINT_INTERNAL_H
#define ENGINE_CHECKPOINT_INTERNAL_H

#include "engine/checkpoint.h"
#include "engine/quantize.h"

enum { ENG_MAX_CONFIG_BYTES = 1 << 20 };

typedef struct eng_stored {
    const eng_st_file *file;
    const eng_st_entry *entry; // NULL: none
} eng_stored;

typedef struct eng_place { // where a tensor of the model's table lies
    const eng_st_file *file;
    const eng_st_entry *entry;
    int64_t first;             // element of the entry where it begins
    eng_stored scale, minimum; // of a quantised matrix
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

// Quantised matrices, checkpoint_blocks.c. What place->entry needs beside it is found and checked; part: the tensor is
// rows of the entry. Reading: *out is freed with eng_blocks_free.
bool eng_place_is_blocks(const eng_place *place);
ENG_CHECKED eng_status eng_place_find_blocks(const eng_checkpoint *checkpoint, eng_place *place,
                                             const eng_tensor *tensor, bool part, eng_error *error);
ENG_CHECKED eng_status eng_place_read_blocks(const eng_place *place, const eng_tensor *tensor, eng_blocks *out,
                                             eng_error *error);

#endif
