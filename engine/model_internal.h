// SPDX-License-Identifier: Apache-2.0
// What the mixers' declare functions call while a model's table is being built.
//
// For model.c and the mixer files only. Nothing here may be called once eng_model_create has returned: the model is
// immutable from then on. A failed add_tensor leaves the table as it was.
#ifndef ENGINE_MODEL_INTERNAL_H
#define ENGINE_MODEL_INTERNAL_H

#include "engine/model.h"

// Appends "PREFIX LEAF" (joined) to the table. Returns its index, or -1 when out of memory. layer -1: outside the
// blocks.
int32_t eng_model_add_tensor(eng_model *model, int32_t layer, const char *prefix, const char *leaf, eng_role role,
                             bool decay, eng_init init, int ndim, const int64_t *shape);
// The other name under which files may hold the tensor.
void eng_model_add_alias(eng_model *model, int32_t tensor, const char *prefix, const char *leaf);
// The tensor may lie in files as the rows from `row` of `rows` of another one.
void eng_model_add_whole(eng_model *model, int32_t tensor, const char *prefix, const char *leaf, int64_t row,
                         int64_t rows);
// Bytes of recurrent state that a session keeps for the layer. Each call starts at a multiple of 64 inside the slot,
// and the calls of one layer (at most ENG_MAX_STATE_PARTS) lie one after another, their offsets in state_part.
void eng_model_add_state(eng_model *model, int32_t layer, size_t bytes);
// The layer's first part.
void eng_model_add_matrix(eng_model *model, int32_t layer, eng_state_matrix matrix);
// Bytes that a KV page of 64 tokens holds for the layer.
void eng_model_add_pages(eng_model *model, int32_t layer, size_t bytes);

// Adds a table to upload beside the tensors (takes value, which free() ends, also on failure). Returns its index or -1.
int32_t eng_model_add_constant(eng_model *model, float *value, int32_t count);

#endif
