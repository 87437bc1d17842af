// SPDX-License-Identifier: Apache-2.0
// At which loop a looped model's token is read: the one rule of those who read it and those who go on to the next loop,
// in one order of operations, so that they never disagree.
#ifndef KERNELS_CUDA_EXIT_CUH
#define KERNELS_CUDA_EXIT_CUH

#include "kernels/cuda/cuda.cuh"

// From 1 on. z: the gate's logits, `stride` apart (NULL: no gate); those behind the loop are not looked at.
static __device__ __forceinline__ int32_t cuda_exit_loop(const float *z, int64_t stride, const kern_exit &wanted,
                                                         int32_t loops) {
    const int32_t most = wanted.max_loops > 0 && wanted.max_loops < loops ? wanted.max_loops : loops;
    if (!z || wanted.max_loops <= 0 || wanted.threshold >= 1)
        return most;
    float left = 1;
    for (int32_t r = 0; r + 1 < most; r++) {
        left = __fdiv_rn(left, __fadd_rn(1.0f, expf(z[r * stride])));
        if (__fsub_rn(1.0f, left) >= wanted.threshold)
            return r + 1;
    }
    return most;
}

#endif
