// SPDX-License-Identifier: Apache-2.0
// Threads of a block that work together, for device functions that run as a whole block and as a part of one alike. A
// team is a type, or a value where its size is not known before: thread() is a thread's number in it, size() how many
// there are, sync() a barrier for its shared memory. Warps are never shared between teams.
#ifndef KERNELS_CUDA_TEAM_CUH
#define KERNELS_CUDA_TEAM_CUH

#include "kernels/cuda/cuda.cuh"

struct cuda_whole_block {
    static __device__ __forceinline__ int32_t thread(void) { return (int32_t)threadIdx.x; }
    static __device__ __forceinline__ int32_t size(void) { return (int32_t)blockDim.x; }
    static __device__ __forceinline__ void sync(void) { __syncthreads(); }
};

// One of the teams of THREADS that a block consists of from its first thread on; up to 15, each with a barrier of its
// own. Barrier 0 stays the block's. NUMBER: which one, where code is only run by that team; its addresses in shared
// memory are constants then, which a function short of registers needs.
template <int THREADS, int NUMBER = -1> struct cuda_team {
    static_assert(THREADS % 32 == 0, "whole warps");

    static __device__ __forceinline__ int32_t number(void) {
        return NUMBER >= 0 ? NUMBER : (int32_t)threadIdx.x / THREADS;
    }
    static __device__ __forceinline__ int32_t thread(void) {
        return NUMBER >= 0 ? (int32_t)threadIdx.x - NUMBER * THREADS : (int32_t)threadIdx.x % THREADS;
    }
    static __device__ __forceinline__ int32_t size(void) { return THREADS; }
    static __device__ __forceinline__ void sync(void) {
        asm volatile("bar.sync %0, %1;" ::"r"(1 + number()), "n"(THREADS) : "memory");
    }
};

// Such teams of a size that is not known before: 32, or a power of two from 64 on.
struct cuda_team_of {
    int32_t index, threads;

    explicit __device__ __forceinline__ cuda_team_of(int32_t size)
        : index((int32_t)threadIdx.x / size), threads(size) {}
    __device__ __forceinline__ cuda_team_of(int32_t number, int32_t size) : index(number), threads(size) {}
    __device__ __forceinline__ int32_t number(void) const { return index; }
    __device__ __forceinline__ int32_t thread(void) const { return (int32_t)threadIdx.x & (threads - 1); }
    __device__ __forceinline__ int32_t size(void) const { return threads; }
    __device__ __forceinline__ void sync(void) const {
        if (threads == 32)
            __syncwarp();
        else
            asm volatile("bar.sync %0, %1;" ::"r"(1 + index), "r"(threads) : "memory");
    }
};

#endif
