// SPDX-License-Identifier: Apache-2.0
// The second solve of a Mesa layer's backward pass, in two forms: of any shape and exact (mesa_backward.cu), and chunk
// by chunk on the tensor cores (mesa_backward_chunk.cu).
#ifndef KERNELS_CUDA_MESA_BACKWARD_CUH
#define KERNELS_CUDA_MESA_BACKWARD_CUH

#include "kernels/cuda/mesa.cuh"

// Chunk by chunk, where cuda_mesa_has_chunks and no row is solved exactly: u = (Hk + Lambda)^-1 (Hv dO) to dq, which
// holds the right-hand sides on the way.
kern_status cuda_mesa_second_solve(const cuda_step *step, const mesa &a, const float *d_o, float *dq, float tolerance);

#endif
