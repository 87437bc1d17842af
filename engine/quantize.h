// SPDX-License-Identifier: Apache-2.0
// Matrices in blocks of 32 columns: int8 or 4 bits a value, a float16 scale a block (kern_dtype in kernels.h).
//
// In a safetensors file a matrix NAME (rows, cols) is I8 of that shape, or U8 (rows, (cols + 1) / 2) with the even
// column in the low four bits; beside it stand NAME.scale, F16 (rows, blocks), and for 4 bits with a minimum
// NAME.minimum likewise. config.json says so in quantization_config. ggml's Q8_0, Q4_0 and Q4_1 are these numbers in
// another order. Host memory only.
#ifndef ENGINE_QUANTIZE_H
#define ENGINE_QUANTIZE_H

#include "engine/model.h"

typedef struct eng_blocks {
    kern_dtype dtype; // KERN_Q8 or KERN_Q4
    int64_t rows, cols;
    uint8_t *code;     // as kern_weight_desc.host
    uint16_t *scale;   // (rows, eng_blocks_of_row)
    uint16_t *minimum; // likewise; NULL: none
} eng_blocks;

int64_t eng_blocks_of_row(int64_t cols);
int64_t eng_blocks_row_bytes(kern_dtype dtype, int64_t cols); // of codes
// Zeroed; freed with eng_blocks_free.
ENG_CHECKED eng_status eng_blocks_create(kern_dtype dtype, int64_t rows, int64_t cols, bool minimum, eng_blocks *out,
                                         eng_error *error);
void eng_blocks_free(eng_blocks *blocks);

// Rounds finite values (rows, cols) to blocks without a minimum. Q8: the largest magnitude is 127; Q4: the scale of the
// least squared error among some. ENG_NUMERIC: a scale is beyond float16. name only names the matrix in that error.
ENG_CHECKED eng_status eng_blocks_round(const float *value, const char *name, eng_blocks *blocks, eng_error *error);
// The values (rows, cols) that they stand for.
void eng_blocks_widen(const eng_blocks *blocks, float *value);

// What quantising a model to `wanted` makes of a tensor; KERN_F32: it is left alone. Touched are matrices of two
// dimensions (linear maps, embeddings, the head) whose sides are at least 32 and a sixteenth of the hidden size; what
// is smaller are gates, which decide more than they cost. Embeddings and head are KERN_Q8 where the rest is KERN_Q4: at
// 4 bits they alone cost more loss than everything else.
kern_dtype eng_quantized_dtype(const eng_model *model, int32_t tensor, kern_dtype wanted);

#endif
