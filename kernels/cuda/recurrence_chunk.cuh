// SPDX-License-Identifier: Apache-2.0
// What the two kernels of the recurrence's chunk form hand to each other (recurrence_chunk.cu): a *record* for each
// chunk and state, in memory as in shared memory.
#ifndef KERNELS_CUDA_RECURRENCE_CHUNK_CUH
#define KERNELS_CUDA_RECURRENCE_CHUNK_CUH

#include "kernels/cuda/chunk.cuh"
#include "kernels/cuda/recurrence.cuh"

// Rows of tiles are tokens; a token that does not exist is zeros. D: the key width, rounded up.
template <int D> struct alignas(128) recurrence_record {
    split_tile k[CHUNK_TILES][D / SPLIT_TILE], q[CHUNK_TILES][D / SPLIT_TILE];
    split_tile pairs[CHUNK_LOWER];      // P = Q K^T times the decays
    split_tile system[CHUNK_LOWER];     // delta: (I + A)^-1 diag(w), A = strict_tril(w K K^T times the decays)
    float key_start[CHUNK];             // what a product of the state with row i of k, q is multiplied with
    float query_start[CHUNK];           //   (without `scale`)
    float key_end[CHUNK];               // row i of k: to the state's end
    float weight[CHUNK];                // add: w
    float pairs_inverse[CHUNK_TILES], system_inverse[CHUNK_TILES]; // of rows of tiles
    float whole_m1;
};

#endif
