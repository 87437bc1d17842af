// SPDX-License-Identifier: Apache-2.0
// Threads of a block that work together, for device functions that run as a whole block and as a part of one alike. A
// team is a type: thread() is a thread's number in it, size() how many there are, sync() a barrier for its shared
// memory. Warps are never shared between teams.
#ifndef KERNELS_CUDA_TEAM_CUH
#define KERNELS_CUDA_TEAM_CUH

#include "kernels/cuda/cuda.cuh"

struct cuda_whole_block {
    static __device__ __forceinline__ int32_t thread(void) { return (int32_t)threadIdx.x; }
    static __device__ __forceinline__ int32_t size(void) { return (int32_t)blockDim.x; }
    static __device__ __forceinline__ void sync(void) { __syncthreads(); }
};

// One of the teams of THREADS that a block consists of from its first thread on; up to 15, each with a barrier of its
// own. Barrier 0 stays the block's.
template <int THREADS> struct cuda_team {
    static_assert(THREADS % 32 == 0, "whole warps");

    static __device__ __forceinline__ int32_t number(void) { return (int32_t)threadIdx.x / THREADS; }
    static __device__ __forceinline__ int32_t thread(void) { return (int32_t)threadIdx.x % THREADS; }
    static __device__ __forceinline__ int32_t size(void) { return THREADS; }
    static __device__ __forceinline__ void sync(void) {
        asm volatile("bar.sync %0, %1;" ::"r"(1 + number()), "n"(THREADS) : "memory");
    }
};

#endif
