// SPDX-License-Identifier: Apache-2.0
// How quantised weights lie in memory: by panels of 32 rows, made for dot products of four bytes in each lane.
//
// A panel holds, each part 64-byte aligned: the scales (blocks, 32) as float16; the minima, where the weight has them,
// likewise; the codes, block by block. A code is unsigned: what the file has plus `zero` (Q8: 128), so that a block's
// sum is  scale (sum_k code x - zero sum_k x) + minimum sum_k x  with integers up to the scale.
//   Q8: byte k of row r stands at (k / 4, r, k mod 4): 1024 bytes a block
//   Q4: the same for k / 8, the even group of four in the low nibbles, the odd one in the high: 512 bytes a block
// Rows and columns that pad are zero. A row and its neighbours are read by the same vector, so a product needs no sum
// over lanes; one token reads a panel from end to end.
#ifndef KERNELS_CPU_PACKED_H
#define KERNELS_CPU_PACKED_H

#include <string.h>

#include "kernels/kernels.h"

enum { KERN_PANEL = 32 };

typedef struct kern_packed {
    int64_t blocks;        // of a row
    size_t minimum, codes; // where they begin in a panel; minimum 0: none
    size_t block;          // bytes of a block's codes
    size_t panel;          // bytes
    int32_t zero;
} kern_packed;

static inline kern_packed kern_packed_of(kern_dtype dtype, int64_t cols, bool minimum) {
    kern_packed p = {.blocks = (cols + KERN_QUANT_BLOCK - 1) / KERN_QUANT_BLOCK};
    const size_t scales = ((size_t)p.blocks * KERN_PANEL * sizeof(uint16_t) + 63) & ~(size_t)63;
    p.minimum = minimum ? scales : 0;
    p.codes = minimum ? 2 * scales : scales;
    p.block = dtype == KERN_Q8 ? KERN_PANEL * KERN_QUANT_BLOCK : KERN_PANEL * KERN_QUANT_BLOCK / 2;
    p.panel = p.codes + (size_t)p.blocks * p.block;
    p.zero = dtype == KERN_Q8 ? 128 : minimum ? 0 : 8;
    return p;
}

// The byte of column k (in its block) of row r (in its panel), and the nibble's place in it.
static inline size_t kern_packed_byte(kern_dtype dtype, int64_t k, int64_t r) {
    return (size_t)((dtype == KERN_Q8 ? k / 4 : k / 8) * 4 * KERN_PANEL + 4 * r + k % 4);
}
static inline int kern_packed_shift(kern_dtype dtype, int64_t k) {
    return dtype == KERN_Q4 && k / 4 % 2 ? 4 : 0;
}

// A finite float16.
static inline float kern_f16(uint16_t half) {
    const uint32_t bits = (uint32_t)(half & 0x7fff) << 13;
    float magnitude;
    memcpy(&magnitude, &bits, sizeof magnitude);
    magnitude *= 0x1p112f; // the exponents' biases differ; right for subnormals
    return half & 0x8000 ? -magnitude : magnitude;
}

#endif
