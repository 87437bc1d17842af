// SPDX-License-Identifier: Apache-2.0
// The barrier between a chain's phases (chain.cu): one counter of arrivals, never put back while the chain runs, and
// one of the blocks that have left, the last of which puts both back to 0.
#ifndef KERNELS_CUDA_GRID_BARRIER_CUH
#define KERNELS_CUDA_GRID_BARRIER_CUH

#include "kernels/cuda/cuda.cuh"

struct alignas(128) counter {
    uint32_t value;
};
struct counters {
    counter arrived, left;
};

// For as many arrivals as are wanted, by all threads of a block; behind it they see what was written before those. The
// poll empties no cache, only the fence behind it does.
struct phase_await {
    const uint32_t *arrived;
    uint32_t wanted;

    __device__ __forceinline__ void operator()(void) const {
        if (threadIdx.x == 0) {
            uint32_t seen;
            do
                asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(arrived) : "memory");
            while (seen < wanted);
            asm volatile("fence.acq_rel.gpu;" ::: "memory");
        }
        __syncthreads();
    }
};

// Behind a barrier of the block, by one thread.
static __device__ __forceinline__ void arrive(uint32_t *arrived) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(arrived) : "memory");
}

static __device__ __forceinline__ void leave(counters *count) {
    __threadfence();
    if (atomicAdd(&count->left.value, 1u) == gridDim.x - 1) {
        __threadfence();
        count->arrived.value = count->left.value = 0;
    }
}

#endif
