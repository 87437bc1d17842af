// SPDX-License-Identifier: Apache-2.0
// Convolutions, norms of their heads and gates of generated tokens in one launch (prepare.cu). What fuse.cu has found
// side by side is offered here; shapes that the launch is not made for are left to the operations' own.
#ifndef KERNELS_CUDA_PREPARE_CUH
#define KERNELS_CUDA_PREPARE_CUH

#include "kernels/cuda/fuse.cuh"

// call: `convs` short convolutions, then `norms` L2 norms; gates: a call or NULL. The caller has seen that none of them
// writes what another reads or writes, but for the norms' x. *fits: false, and nothing ran, where shapes are others.
kern_status cuda_prepare_run(const cuda_step *step, const kern_call *call, int convs, int norms, const kern_call *gates,
                             bool *fits);

#endif
