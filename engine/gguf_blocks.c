// SPDX-License-Identifier: Apache-2.0
// The table of block formats: how ggml stores runs of weights, and what each stored block means as float32.
//
// A block is read byte by byte, so that its place in memory need not be aligned. Products are taken in the order in
// which the format's own tools take them (scale times sub-scale, then times the quantum), so that the values are equal
// to the last bit. No state; any thread.
#include <string.h>

#include "engine/gguf.h"
#include "engine/safetensors.h"

static uint32_t u32_at(const uint8_t *bytes) {
    return (uint32_t)bytes[0] | (uint32_t)bytes[1] << 8 | (uint32_t)bytes[2] << 16 | (uint32_t)bytes[3] << 24;
}

static uint16_t u16_at(const uint8_t *bytes) {
    return (uint16_t)(bytes[0] | bytes[1] << 8);
}

static float f16_at(const uint8_t *bytes) {
    return eng_f16_to_f32(u16_at(bytes));
}

// ---- one element a block

static void widen_f32(const uint8_t *block, float *values) {
    memcpy(values, block, sizeof *values);
}

static void widen_f16(const uint8_t *block, float *values) {
    *values = f16_at(block);
}

static void widen_bf16(const uint8_t *block, float *values) {
    *values = eng_bf16_to_f32(u16_at(block));
}

// ---- 32 elements: the low halves of 16 bytes, then their high halves

static void widen_q4_0(const uint8_t *block, float *values) {
    const float scale = f16_at(block);
    const uint8_t *packed = block + 2;
    for (int i = 0; i < 16; i++) {
        values[i] = (float)((packed[i] & 15) - 8) * scale;
        values[i + 16] = (float)((packed[i] >> 4) - 8) * scale;
    }
}

static void widen_q4_1(const uint8_t *block, float *values) {
    const float scale = f16_at(block), least = f16_at(block + 2);
    const uint8_t *packed = block + 4;
    for (int i = 0; i < 16; i++) {
        values[i] = (float)(packed[i] & 15) * scale + least;
        values[i + 16] = (float)(packed[i] >> 4) * scale + least;
    }
}

// Element i of 32.
static int four_bits(const uint8_t *packed, int i) {
    return i < 16 ? packed[i] & 15 : packed[i - 16] >> 4;
}

static int five_bits(const uint8_t *packed, uint32_t fifth, int i) {
    return four_bits(packed, i) | (int)(fifth >> i & 1) << 4;
}

static void widen_q5_0(const uint8_t *block, float *values) {
    const float scale = f16_at(block);
    const uint32_t fifth = u32_at(block + 2);
    for (int i = 0; i < 32; i++)
        values[i] = (float)(five_bits(block + 6, fifth, i) - 16) * scale;
}

static void widen_q5_1(const uint8_t *block, float *values) {
    const float scale = f16_at(block), least = f16_at(block + 2);
    const uint32_t fifth = u32_at(block + 4);
    for (int i = 0; i < 32; i++)
        values[i] = (float)five_bits(block + 8, fifth, i) * scale + least;
}

static void widen_q8_0(const uint8_t *block, float *values) {
    const float scale = f16_at(block);
    for (int i = 0; i < 32; i++)
        values[i] = (float)(int8_t)block[2 + i] * scale;
}

// ---- 256 elements in groups with scales of their own

// Scale and offset of group j of 8, six bits each in twelve bytes: the low six bits of groups 0..3 stand alone, those
// of 4..7 are a nibble with the spare two bits of the first eight bytes.
static void k_scales(const uint8_t *packed, int j, int *scale, int *least) {
    if (j < 4) {
        *scale = packed[j] & 63;
        *least = packed[j + 4] & 63;
    } else {
        *scale = (packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4;
        *least = (packed[j + 4] >> 4) | (packed[j] >> 6) << 4;
    }
}

// Groups of 32; two groups share 32 bytes, low halves first. fifth: bit j of byte i belongs to element i of group j;
// NULL: there is none.
static void widen_k(const uint8_t *block, const uint8_t *fifth, const uint8_t *packed, float *values) {
    const float d = f16_at(block), dmin = f16_at(block + 2);
    for (int j = 0; j < 8; j++) {
        int scale, least;
        k_scales(block + 4, j, &scale, &least);
        const float step = d * (float)scale, shift = dmin * (float)least;
        for (int i = 0; i < 32; i++) {
            int byte = packed[j / 2 * 32 + i], quantum = j % 2 ? byte >> 4 : byte & 15;
            if (fifth)
                quantum |= (fifth[i] >> j & 1) << 4;
            values[j * 32 + i] = step * (float)quantum - shift;
        }
    }
}

static void widen_q4_k(const uint8_t *block, float *values) {
    widen_k(block, NULL, block + 16, values);
}

static void widen_q5_k(const uint8_t *block, float *values) {
    widen_k(block, block + 16, block + 48, values);
}

// Two halves of 128: 64 bytes of low nibbles, 32 bytes of four high pairs, a signed scale for each 16.
static void widen_q6_k(const uint8_t *block, float *values) {
    const float d = f16_at(block + 208);
    for (int i = 0; i < 256; i++) {
        int half = i / 128, in_half = i % 128, quarter = in_half / 32, column = in_half % 32;
        int low = block[half * 64 + in_half % 64];
        int nibble = quarter < 2 ? low & 15 : low >> 4;
        int high = block[128 + half * 32 + column] >> 2 * quarter & 3;
        values[i] = d * (float)(int8_t)block[192 + i / 16] * (float)((nibble | high << 4) - 32);
    }
}

static const eng_block_format formats[] = {
    {"F32", 0, 1, 4, widen_f32, 0, false},        {"F16", 1, 1, 2, widen_f16, 0, false},
    {"Q4_0", 2, 32, 18, widen_q4_0, 4, false},    {"Q4_1", 3, 32, 20, widen_q4_1, 4, true},
    {"Q5_0", 6, 32, 22, widen_q5_0, 0, false},    {"Q5_1", 7, 32, 24, widen_q5_1, 0, false},
    {"Q8_0", 8, 32, 34, widen_q8_0, 8, false},    {"Q4_K", 12, 256, 144, widen_q4_k, 0, false},
    {"Q5_K", 13, 256, 176, widen_q5_k, 0, false}, {"Q6_K", 14, 256, 210, widen_q6_k, 0, false},
    {"BF16", 30, 1, 2, widen_bf16, 0, false},
};

const eng_block_format *eng_block_format_find(uint32_t number) {
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++) {
        if (formats[i].number == number)
            return &formats[i];
    }
    return NULL;
}

// ---- as blocks of this engine: a scale, the minimum behind it, the codes at the end

size_t eng_block_part_bytes(const eng_block_format *format, eng_block_part part) {
    if (part == ENG_BLOCK_VALUES)
        return (size_t)format->elements * sizeof(float);
    return part == ENG_BLOCK_CODES ? (size_t)(format->elements * format->bits / 8) : sizeof(uint16_t);
}

void eng_block_take(const eng_block_format *format, eng_block_part part, const uint8_t *block, void *out) {
    const size_t bytes = eng_block_part_bytes(format, part);
    const uint8_t *codes = block + format->bytes - bytes;
    uint8_t *code = out;
    if (part == ENG_BLOCK_VALUES)
        format->widen(block, out);
    else if (part != ENG_BLOCK_CODES)
        memcpy(out, part == ENG_BLOCK_SCALE ? block : block + bytes, bytes);
    else if (format->bits == 8)
        memcpy(out, codes, bytes);
    else
        for (int i = 0; i < 16; i++)
            code[i] = (uint8_t)(four_bits(codes, 2 * i) | four_bits(codes, 2 * i + 1) << 4);
}
