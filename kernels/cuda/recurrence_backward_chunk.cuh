// SPDX-License-Identifier: Apache-2.0
// What the kernels of the gradients' chunk form hand to each other (recurrence_backward_chunk.cu): records, U, M and G
// of a group of chunks in the workspace.
#ifndef KERNELS_CUDA_RECURRENCE_BACKWARD_CHUNK_CUH
#define KERNELS_CUDA_RECURRENCE_BACKWARD_CHUNK_CUH

#include "kernels/cuda/recurrence_backward.cuh"
#include "kernels/cuda/recurrence_strip.cuh"

// A group of chunks. An *item* is a chunk of it and a state; rows of V' floats lie `pitch` apart.
struct gradients_group {
    recurrence_gradients b;
    int32_t first, count; // chunks
    int32_t pitch;
    char *records;   // (count, states)
    float *carry[2]; // (states, D, V') each: dL/dS of the row that is cut between two groups; chunk_run_of
    float *grads;    // (items, D): G at the chunk's end
    float *answers;  // (items, CHUNK): M
    float *written;  // (items, CHUNK): U by the delta rule
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// A strip of (tokens, V'), transposed.
static __device__ __forceinline__ void store_tokens(const gradients_group &group, const recurrence_strip &strip,
                                                    const kern_chunk &chunk, float *to, int64_t item,
                                                    const split_block (&x)[CHUNK_TILES]) {
    strip_put(strip, chunk, to + item * CHUNK * group.pitch, group.pitch, 0, x);
}

#endif

#endif
