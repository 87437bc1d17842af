// SPDX-License-Identifier: Apache-2.0
// Weights in device memory: float32 as they come or in place of the optimizer's master, bfloat16 in tiles (cuda.cuh).
// Quantised ones are refused.
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/cuda.cuh"

static size_t packed_bytes(const kern_weight_desc *desc) {
    const size_t rows = (size_t)desc->rows, cols = (size_t)desc->cols;
    if (desc->dtype == KERN_F32)
        return rows * cols * sizeof(float);
    return ((rows + 15) & ~(size_t)15) * ((cols + 15) & ~(size_t)15) * sizeof(uint16_t);
}

static void pack_tiles(const uint16_t *from, int32_t rows, int32_t cols, uint16_t *to) {
    for (int32_t row = 0; row < rows; row++)
        for (int32_t col = 0; col < cols; col++)
            to[cuda_bf16_index(cols, row, col)] = from[(int64_t)row * cols + col];
}

static kern_status upload(kern_weight *weight, const kern_weight_desc *desc) {
    cudaError_t error = cudaMalloc(&weight->data, weight->bytes);
    if (error != cudaSuccess) {
        (void)cudaGetLastError();
        return cuda_status(error);
    }
    weight->owned = true;
    if (desc->dtype == KERN_F32)
        return cuda_status(cudaMemcpy(weight->data, desc->host, weight->bytes, cudaMemcpyHostToDevice));
    uint16_t *tiles = (uint16_t *)calloc(1, weight->bytes);
    if (!tiles)
        return KERN_NO_MEMORY;
    pack_tiles((const uint16_t *)desc->host, (int32_t)desc->rows, (int32_t)desc->cols, tiles);
    error = cudaMemcpy(weight->data, tiles, weight->bytes, cudaMemcpyHostToDevice);
    free(tiles);
    return cuda_status(error);
}

kern_status cuda_weight_create(kern_device *device, const kern_weight_desc *desc, kern_weight **out) {
    if (desc->dtype != KERN_F32 && desc->dtype != KERN_BF16)
        return KERN_UNSUPPORTED;
    kern_weight *weight = (kern_weight *)calloc(1, sizeof *weight);
    if (!weight)
        return KERN_NO_MEMORY;
    weight->device = device;
    weight->dtype = desc->dtype;
    weight->rows = desc->rows;
    weight->cols = desc->cols;
    weight->bytes = packed_bytes(desc);
    weight->data = desc->master;
    kern_status status = cuda_status(cudaSetDevice(cuda_of(device)->ordinal));
    if (!status && !desc->master)
        status = upload(weight, desc);
    if (status) {
        cuda_weight_free(weight);
        return status;
    }
    *out = weight;
    return KERN_OK;
}

void cuda_weight_free(kern_weight *weight) {
    cudaSetDevice(cuda_of(weight->device)->ordinal);
    if (weight->owned)
        cudaFree(weight->data);
    free(weight);
}

size_t cuda_weight_bytes(const kern_weight *weight) {
    return weight->bytes;
}
