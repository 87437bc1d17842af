// SPDX-License-Identifier: Apache-2.0
// Operands of products as cuBLASLt reads them (cublas.cu): rounded to bf16, row by row as they lie in memory, a row
// padded with zeros to a multiple of 16 bytes. A product may go through a copy either way, so dy is rounded once for dx
// and dW.
//
// A step's copies outlive the product that made them while nothing but products runs: what a product writes is told
// (cuda_copies_written), any other operation ends them all (cuda_copies_forget, fuse.cu), and a step begins with none.
// An operation whose output the next products read may write the copy along with it (cuda_copies_offer).
#ifndef KERNELS_CUDA_GEMM_COPIES_CUH
#define KERNELS_CUDA_GEMM_COPIES_CUH

#include "kernels/cuda/cublas.cuh"

enum {
    CUDA_COPY_EIGHT = 8,        // elements of 16 bytes
    CUDA_COPY_ROWS = 64,        // what rows of a slice are a multiple of
    CUDA_COPY_MOST = 128 << 20, // bytes of an operand's slice
    CUDA_COPIES = 8,
};

// Rows [row0, row0 + rows) of an operand, all of its columns.
struct cuda_copy {
    const void *p;
    int64_t row0, ld;
    int32_t rows, columns;
    bool bf16;
    char *place;
    size_t bytes;
};

struct cuda_copies {
    cuda_copy copy[CUDA_COPIES];
    int count;
    size_t next;             // place of the room where the next one goes
    const void *expected[2]; // outputs of the operation that runs which products behind it read
};

// From a row of a copy to the next, in elements.
static inline int64_t cuda_copy_ld(int64_t columns) {
    return (columns + CUDA_COPY_EIGHT - 1) / CUDA_COPY_EIGHT * CUDA_COPY_EIGHT;
}
// Of the room that all copies of a step share, and where it is in the workspace: behind what products need besides.
static inline size_t cuda_copies_bytes(void) {
    return 3 * (size_t)CUDA_COPY_MOST;
}
static inline char *cuda_copies_room(char *workspace) {
    return workspace + cuda_cublas_bytes() - cuda_copies_bytes();
}
// The most rows of so many columns that a copy may have; a multiple of CUDA_COPY_ROWS, 0 where it is none.
static inline int64_t cuda_copy_rows(int64_t columns) {
    return CUDA_COPY_MOST / ((int64_t)sizeof(__nv_bfloat16) * cuda_copy_ld(columns)) / CUDA_COPY_ROWS * CUDA_COPY_ROWS;
}

// wanted: all but place and bytes, which are filled in. keep (optional): another that stays where it is.
kern_status cuda_copy_operand(const cuda_step *step, cuda_copies *copies, char *room, cuda_copy *wanted,
                              const cuda_copy *keep);

#endif
