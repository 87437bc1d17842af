// SPDX-License-Identifier: Apache-2.0
// A GGUF file of the Llama family as a checkpoint folder of this engine: config, weights, tokenizer, chat template.
//
// Nothing is guessed: every key of the architecture and every tensor has a meaning here or is refused by its name. The
// rows of the query and key projections, which such files hold in another order for their rotation, go back to the
// order of the public Llama classes. Quantised weights are widened. What is written is opened and checked as any
// checkpoint is before its folder appears; on failure DIR is as it was. Memory stays at the size of the vocabulary,
// whatever the size of the weights. Not for an event loop's thread.
#ifndef ENGINE_IMPORT_H
#define ENGINE_IMPORT_H

#include "engine/safetensors.h"

typedef struct eng_imported {
    uint64_t parameters;
    eng_dtype dtype; // of the written weights
    bool tokenizer, chat_template;
} eng_imported;

// dtype: ENG_F32 or ENG_BF16; NULL: BF16 where every matrix of the file is, else F32, so that nothing is lost. DIR must
// not exist, or be a checkpoint to replace. *imported may be NULL.
ENG_CHECKED eng_status eng_import_gguf(const char *path, const char *dir, const eng_dtype *dtype,
                                       eng_imported *imported, eng_error *error);

#endif
