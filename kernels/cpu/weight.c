// SPDX-License-Identifier: Apache-2.0
// Weights of the CPU backend, 64-byte aligned.
//
// Float32 is copied from the host or read in place from the optimizer's master; bfloat16 is copied and widened by the
// operations a tile at a time; both lie row-major as they come. Quantised weights are packed into panels (packed.h).
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/packed.h"

static bool is_quantised(kern_dtype dtype) {
    return dtype == KERN_Q8 || dtype == KERN_Q4;
}

// Of valid dtypes and positive sizes below 2^31: no overflow.
static size_t weight_bytes(kern_dtype dtype, int64_t rows, int64_t cols, bool minimum) {
    if (is_quantised(dtype))
        return (size_t)((rows + KERN_PANEL - 1) / KERN_PANEL) * kern_packed_of(dtype, cols, minimum).panel;
    return (size_t)rows * (size_t)cols * (dtype == KERN_F32 ? sizeof(float) : sizeof(uint16_t));
}

static int dots_of_processor(void) {
    int dots = 0;
#if defined(__x86_64__)
    unsigned a, b, c, d;
    if (__builtin_cpu_supports("avx512vnni"))
        dots |= KERN_DOTS_AVX512;
    if (__get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 4)) // AVX-VNNI
        dots |= KERN_DOTS_AVX2;
#endif
    return dots;
}

// ------------------------------------------------------------------------------------------------------------ packing

static uint8_t code_at(const kern_weight_desc *desc, int64_t row, int64_t col) {
    const uint8_t *codes = desc->host;
    if (desc->dtype == KERN_Q8)
        return (uint8_t)(codes[row * desc->cols + col] + 128); // the sign bit turned: signed to offset
    const uint8_t both = codes[row * ((desc->cols + 1) / 2) + col / 2];
    return col % 2 ? both >> 4 : both & 15;
}

// Row `row` into its place of the zeroed panel.
static void pack_row(const kern_weight_desc *desc, const kern_packed *packed, int64_t row, char *panel) {
    const int64_t r = row % KERN_PANEL;
    uint16_t *scale = (uint16_t *)panel, *minimum = (uint16_t *)(panel + packed->minimum);
    for (int64_t b = 0; b < packed->blocks; b++) {
        scale[b * KERN_PANEL + r] = desc->scale[row * packed->blocks + b];
        if (desc->minimum)
            minimum[b * KERN_PANEL + r] = desc->minimum[row * packed->blocks + b];
    }
    for (int64_t col = 0; col < desc->cols; col++) {
        uint8_t *codes = (uint8_t *)panel + packed->codes + (size_t)(col / KERN_QUANT_BLOCK) * packed->block;
        const int64_t k = col % KERN_QUANT_BLOCK;
        codes[kern_packed_byte(desc->dtype, k, r)] |=
            (uint8_t)(code_at(desc, row, col) << kern_packed_shift(desc->dtype, k));
    }
}

static void pack(const kern_weight_desc *desc, char *panels) {
    const kern_packed packed = kern_packed_of(desc->dtype, desc->cols, desc->minimum != NULL);
    for (int64_t row = 0; row < desc->rows; row++)
        pack_row(desc, &packed, row, panels + (size_t)(row / KERN_PANEL) * packed.panel);
}

// ------------------------------------------------------------------------------------------------------------ the door

kern_status kern_cpu_weight_create(kern_device *device, const kern_weight_desc *desc, kern_weight **out) {
    if (desc->dtype != KERN_F32 && desc->dtype != KERN_BF16 && !is_quantised(desc->dtype))
        return KERN_UNSUPPORTED;
    kern_weight *weight = calloc(1, sizeof *weight);
    if (!weight)
        return KERN_NO_MEMORY;
    *weight = (kern_weight){.device = device,
                            .dtype = desc->dtype,
                            .rows = desc->rows,
                            .cols = desc->cols,
                            .data = desc->master,
                            .minimum = desc->minimum != NULL};
    if (!desc->master) {
        const size_t bytes = kern_cpu_weight_bytes(weight), rounded = (bytes + 63) & ~(size_t)63;
        weight->owned = bytes <= SIZE_MAX / 2 ? aligned_alloc(64, rounded) : NULL;
        if (!weight->owned) {
            free(weight);
            return KERN_NO_MEMORY;
        }
        if (is_quantised(desc->dtype)) {
            weight->dots = dots_of_processor();
            memset(weight->owned, 0, rounded);
            pack(desc, weight->owned);
        } else {
            memcpy(weight->owned, desc->host, bytes);
        }
        weight->data = weight->owned;
    }
    *out = weight;
    return KERN_OK;
}

void kern_cpu_weight_free(kern_weight *weight) {
    free(weight->owned);
    free(weight);
}

size_t kern_cpu_weight_bytes(const kern_weight *weight) {
    return weight_bytes(weight->dtype, weight->rows, weight->cols, weight->minimum);
}
