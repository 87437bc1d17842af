// SPDX-License-Identifier: Apache-2.0
// A GGUF file of the Llama family as a checkpoint folder of this engine: config, weights, tokenizer, chat template.
//
// Nothing is guessed: every key of the architecture and every tensor has a meaning here or is refused by its name. The
// rows of the query and key projections, which such files hold in another order for their rotation, go back to the
// order of the public Llama classes. Matrices in Q8_0, Q4_0 and Q4_1 stay in blocks (quantize.h) of the very same
// numbers; other quantised formats, and all of them where an element type is asked for, are widened. What is written is
// opened and checked as any checkpoint is before its folder appears; on failure DIR is as it was. Memory stays at the
// size of the vocabulary, whatever the size of the weights. Not for an event loop's thread.
#ifndef ENGINE_IMPORT_H
#define ENGINE_IMPORT_H

#include "engine/safetensors.h"

typedef struct eng_imported {
    uint64_t parameters;
    eng_dtype dtype;            // of the written weights that are not in blocks
    int32_t blocks;             // matrices in blocks
    int32_t widened;            // matrices that were quantised in the file and are not here
    const char *widened_format; // of the first of these, "Q6_K"
    bool tokenizer, chat_template;
} eng_imported;

// dtype: ENG_F32 or ENG_BF16 for all weights; NULL: blocks stay, the rest is BF16 where every matrix of the file is,
// else F32, so that nothing is lost. DIR must not exist, or be a checkpoint to replace. *imported may be NULL.
ENG_CHECKED eng_status eng_import_gguf(const char *path, const char *dir, const eng_dtype *dtype,
                                       eng_imported *imported, eng_error *error);

#endif
