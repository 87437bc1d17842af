// SPDX-License-Identifier: Apache-2.0
// Products of operands of one bf16 number, summed in float32, by cuBLASLt, NVIDIA's library of them: those of training
// on a `fast` device. The library is opened with a device that trains, so a host that only serves does not need it.
//
// One algorithm a shape: the library's first choice for the GPU, which depends on nothing else, so that repeats have
// the same bits. Reductions by atomic additions are excluded. Launches allocate nothing.
#ifndef KERNELS_CUDA_CUBLAS_CUH
#define KERNELS_CUDA_CUBLAS_CUH

#include "kernels/cuda/gemm.cuh"

// Of the current device, which stays the one that it is used on. KERN_UNSUPPORTED and a sentence where the library or
// one of its functions is missing.
kern_status cuda_cublas_open(cuda_cublas **out, char *reason, size_t reason_size);
void cuda_cublas_close(cuda_cublas *cublas); // NULL is accepted
// 130100 is 13.1.0.
size_t cuda_cublas_version(const cuda_cublas *cublas);

// Of the workspace, which begins with the room for sums in parts.
size_t cuda_cublas_bytes(void);
// KERN_UNSUPPORTED where the device was not opened to train or the library has no algorithm.
kern_status cuda_cublas_run(const cuda_step *step, char *workspace, const cuda_gemm &gemm);

#endif
