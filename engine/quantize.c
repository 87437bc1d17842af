// SPDX-License-Identifier: Apache-2.0
// Rounding matrices to blocks and widening them again; quantize.h says what a block is.
//
// Codes are rounded with the scale as float16 has it, so that the error is what the file's reader sees. No state; any
// thread.
#include "engine/quantize.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCK = KERN_QUANT_BLOCK, SMALLEST_SIDE = 32, HIDDEN_SHARE = 16 };

int64_t eng_blocks_of_row(int64_t cols) {
    return (cols + BLOCK - 1) / BLOCK;
}

int64_t eng_blocks_row_bytes(kern_dtype dtype, int64_t cols) {
    return dtype == KERN_Q8 ? cols : (cols + 1) / 2;
}

eng_status eng_blocks_create(kern_dtype dtype, int64_t rows, int64_t cols, bool minimum, eng_blocks *out,
                             eng_error *error) {
    const size_t scales = (size_t)(rows * eng_blocks_of_row(cols));
    eng_blocks blocks = {.dtype = dtype, .rows = rows, .cols = cols};
    blocks.code = calloc((size_t)rows, (size_t)eng_blocks_row_bytes(dtype, cols));
    blocks.scale = calloc(scales, sizeof *blocks.scale);
    blocks.minimum = minimum ? calloc(scales, sizeof *blocks.minimum) : NULL;
    if (!blocks.code || !blocks.scale || (minimum && !blocks.minimum)) {
        eng_blocks_free(&blocks);
        return eng_fail(error, ENG_NO_MEMORY, "no memory for a quantised matrix");
    }
    *out = blocks;
    return ENG_OK;
}

void eng_blocks_free(eng_blocks *blocks) {
    free(blocks->code);
    free(blocks->scale);
    free(blocks->minimum);
    *blocks = (eng_blocks){0};
}

// ---- float16

// To nearest, ties to even, of a magnitude below 65520; infinity above.
static uint16_t f16_from_f32(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    const uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    const float magnitude = fabsf(value);
    if (!(magnitude < 65520.0f))
        return sign | 0x7c00;
    if (magnitude < 0x1p-14f) // subnormal: a multiple of 2^-24
        return sign | (uint16_t)lrintf(magnitude * 0x1p24f);
    bits &= 0x7fffffff;
    bits += 0xfff + (bits >> 13 & 1);
    return sign | (uint16_t)((bits >> 13) - (112 << 10));
}

// ---- blocks

static float largest_magnitude(const float *value, int64_t count) {
    float largest = 0;
    for (int64_t i = 0; i < count; i++)
        largest = fmaxf(largest, fabsf(value[i]));
    return largest;
}

static float value_of_largest_magnitude(const float *value, int64_t count) {
    float peak = 0;
    for (int64_t i = 0; i < count; i++)
        peak = fabsf(value[i]) > fabsf(peak) ? value[i] : peak;
    return peak;
}

// To nearest, ties to even, by the last bit of a large sum: no call, so that loops over it become vectors.
static int round_code(float x, int least, int most) {
    const float large = 12582912.0f, inside = x < (float)least ? (float)least : x > (float)most ? (float)most : x;
    return (int)((inside + large) - large);
}

// Codes are -8 .. 7. Around the scale that gives the largest value code -8, the one that leaves the least squared
// error: for given codes c that is v.c / c.c, and what it explains (v.c)^2 / c.c.
static float best_scale_q4(const float *value, int64_t count) {
    enum { TRIES = 9 };
    const float peak = value_of_largest_magnitude(value, count);
    float best = 0, explained = 0;
    for (int i = -TRIES; i <= TRIES && peak != 0; i++) {
        const float inverse = -(8.0f + 0.1f * (float)i) / peak;
        float product = 0, square = 0;
        for (int64_t k = 0; k < count; k++) {
            const float code = (float)round_code(value[k] * inverse, -8, 7);
            product += value[k] * code;
            square += code * code;
        }
        if (square > 0 && product * (product / square) > explained) {
            explained = product * (product / square);
            best = product / square;
        }
    }
    return best;
}

// The scale at which no value is beyond code 127: rounded up, which matters where float16 is coarse.
static uint16_t scale_q8(const float *value, int64_t count) {
    const float wanted = largest_magnitude(value, count) / 127.0f;
    const uint16_t nearest = f16_from_f32(wanted);
    return eng_f16_to_f32(nearest) < wanted ? (uint16_t)(nearest + 1) : nearest;
}

// One block of a row; false: its scale is not finite in float16.
static bool round_block(kern_dtype dtype, const float *value, int64_t count, uint8_t *code, uint16_t *scale) {
    *scale = dtype == KERN_Q8 ? scale_q8(value, count) : f16_from_f32(best_scale_q4(value, count));
    const float stored = eng_f16_to_f32(*scale);
    if (!isfinite(stored))
        return false;
    for (int64_t k = 0; k < count; k++) {
        const float x = stored == 0 ? 0 : value[k] / stored;
        if (dtype == KERN_Q8)
            code[k] = (uint8_t)round_code(x, -127, 127);
        else
            code[k / 2] |= (uint8_t)((round_code(x, -8, 7) + 8) << (k % 2 ? 4 : 0));
    }
    return true;
}

eng_status eng_blocks_round(const float *value, const char *name, eng_blocks *blocks, eng_error *error) {
    const int64_t cols = blocks->cols, of_row = eng_blocks_of_row(cols);
    const int64_t row_bytes = eng_blocks_row_bytes(blocks->dtype, cols);
    memset(blocks->code, 0, (size_t)(blocks->rows * row_bytes));
    for (int64_t row = 0; row < blocks->rows; row++) {
        for (int64_t b = 0; b < of_row; b++) {
            const int64_t col = b * BLOCK, count = cols - col < BLOCK ? cols - col : BLOCK;
            uint8_t *code = blocks->code + row * row_bytes + eng_blocks_row_bytes(blocks->dtype, col);
            if (!round_block(blocks->dtype, value + row * cols + col, count, code, &blocks->scale[row * of_row + b]))
                return eng_fail(error, ENG_NUMERIC, "tensor '%.96s': values of row %lld are too large for a block",
                                name, (long long)row);
        }
    }
    return ENG_OK;
}

void eng_blocks_widen(const eng_blocks *blocks, float *value) {
    const int64_t of_row = eng_blocks_of_row(blocks->cols);
    const int64_t row_bytes = eng_blocks_row_bytes(blocks->dtype, blocks->cols);
    const int zero = blocks->minimum ? 0 : 8;
    for (int64_t row = 0; row < blocks->rows; row++) {
        const uint8_t *code = blocks->code + row * row_bytes;
        for (int64_t col = 0; col < blocks->cols; col++) {
            const int64_t b = row * of_row + col / BLOCK;
            const float scale = eng_f16_to_f32(blocks->scale[b]);
            const int nibble = code[col / 2] >> (col % 2 ? 4 : 0) & 15;
            const int number = blocks->dtype == KERN_Q8 ? (int8_t)code[col] : nibble - zero;
            const float least = blocks->minimum ? eng_f16_to_f32(blocks->minimum[b]) : 0.0f;
            value[row * blocks->cols + col] = (float)number * scale + least;
        }
    }
}

kern_dtype eng_quantized_dtype(const eng_model *model, int32_t index, kern_dtype wanted) {
    const eng_tensor *tensor = &model->tensor[index];
    if (tensor->role != ENG_ROLE_MATRIX || tensor->ndim != 2)
        return KERN_F32;
    const int64_t side = tensor->shape[0] < tensor->shape[1] ? tensor->shape[0] : tensor->shape[1];
    if (side < SMALLEST_SIDE || side * HIDDEN_SHARE < model->config.hidden_size)
        return KERN_F32;
    return index == model->embed || index == model->head ? KERN_Q8 : wanted;
}
