// SPDX-License-Identifier: Apache-2.0
// Weights of the CPU backend: row-major as they come, 64-byte aligned.
//
// Float32 is copied from the host or read in place from the optimizer's master; bfloat16 is copied and widened by the
// operations a tile at a time. Quantised weights are refused: no operation of this backend reads them.
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/cpu.h"

static size_t element_bytes(kern_dtype dtype) {
    switch (dtype) {
    case KERN_F32:
        return sizeof(float);
    case KERN_BF16:
        return sizeof(uint16_t);
    case KERN_Q8:
    case KERN_Q4:
        return 0;
    }
    return 0;
}

kern_status kern_cpu_weight_create(kern_device *device, const kern_weight_desc *desc, kern_weight **out) {
    size_t element = element_bytes(desc->dtype);
    if (element == 0)
        return KERN_UNSUPPORTED;
    if ((uint64_t)desc->rows > SIZE_MAX / 4 / element / (uint64_t)desc->cols)
        return KERN_NO_MEMORY;
    kern_weight *weight = calloc(1, sizeof *weight);
    if (!weight)
        return KERN_NO_MEMORY;
    *weight = (kern_weight){device, desc->dtype, desc->rows, desc->cols, desc->master, NULL};
    if (!desc->master) {
        size_t bytes = (size_t)desc->rows * (size_t)desc->cols * element;
        weight->owned = aligned_alloc(64, (bytes + 63) & ~(size_t)63);
        if (!weight->owned) {
            free(weight);
            return KERN_NO_MEMORY;
        }
        memcpy(weight->owned, desc->host, bytes);
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
    return (size_t)weight->rows * (size_t)weight->cols * element_bytes(weight->dtype);
}
