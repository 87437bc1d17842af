// SPDX-License-Identifier: Apache-2.0
// Operations of one kind that follow one another and share a launch (fuse.cu): as many as `count` calls, at most what
// a group holds, none of which writes what another reads or writes.
#ifndef KERNELS_CUDA_FUSE_CUH
#define KERNELS_CUDA_FUSE_CUH

#include "kernels/cuda/cuda.cuh"

enum { CUDA_CONVS = 4, CUDA_NORMS = 4 };

// Memory that an operation reads or writes at a step's bounds.
struct cuda_range {
    const char *begin;
    size_t bytes;
};
static inline cuda_range cuda_floats_at(const cuda_step *step, const void *p, int64_t width) {
    return {(const char *)p, p ? sizeof(float) * (size_t)width * (size_t)step->tokens : 0};
}
static inline bool cuda_overlap(cuda_range a, cuda_range b) {
    return a.bytes > 0 && b.bytes > 0 && a.begin < b.begin + b.bytes && b.begin < a.begin + a.bytes;
}

// Of equal taps; of equal width.
kern_status cuda_short_convs_run(const cuda_step *step, const kern_call *call, int count);
kern_status cuda_l2norms_run(const cuda_step *step, const kern_call *call, int count);

#endif
