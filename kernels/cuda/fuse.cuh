// SPDX-License-Identifier: Apache-2.0
// Operations of one kind that follow one another and share a launch (fuse.cu): as many as `count` calls, at most what
// a group holds, none of which writes what another reads or writes.
#ifndef KERNELS_CUDA_FUSE_CUH
#define KERNELS_CUDA_FUSE_CUH

#include "kernels/cuda/cuda.cuh"

enum { CUDA_CONVS = 4, CUDA_NORMS = 4 };

// Of equal taps; of equal width.
kern_status cuda_short_convs_run(const cuda_step *step, const kern_call *call, int count);
kern_status cuda_l2norms_run(const cuda_step *step, const kern_call *call, int count);

#endif
