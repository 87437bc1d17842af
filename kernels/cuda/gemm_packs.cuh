// SPDX-License-Identifier: Apache-2.0
// Operands of products as gemm_wide.cu reads them: rounded to bf16, in tiles of 64 rows x 64 columns of memory, a row
// of tiles after the other; a tile is made of core matrices of 8 x 8 (128 bytes each, rows of memory as rows), ordered
// by column, then row. A product may go through it either way, so dy is packed once for dx and dW. Past the edges are
// zeros.
//
// A step's packs outlive the product that made them while nothing but products runs: what a product writes is told
// (cuda_packs_written), any other operation ends them all (cuda_packs_forget, fuse.cu), and a step begins with none.
#ifndef KERNELS_CUDA_GEMM_PACKS_CUH
#define KERNELS_CUDA_GEMM_PACKS_CUH

#include "kernels/cuda/gemm.cuh"

enum {
    CUDA_PACK_SIDE = 64,                                  // rows and columns of a tile
    CUDA_PACK_CORE = 128,                                 // bytes of a core matrix
    CUDA_PACK_TILE = CUDA_PACK_SIDE * CUDA_PACK_SIDE * 2, // bytes
    CUDA_PACK_MOST = 128 << 20,                           // of an operand's slice
    CUDA_PACKS = 8,
};

// Rows [row0, row0 + rows) of an operand, all of its columns.
struct cuda_pack {
    const void *p;
    int64_t row0, ld;
    int32_t rows, columns;
    bool bf16;
    char *tiles;
    size_t bytes;
};

struct cuda_packs {
    cuda_pack pack[CUDA_PACKS];
    int count;
    size_t next; // place of the room where the next one goes
};

static inline int64_t cuda_pack_tiles(int64_t elements) {
    return (elements + CUDA_PACK_SIDE - 1) / CUDA_PACK_SIDE;
}

// Of the room that all packs of a step share.
static inline size_t cuda_packs_bytes(void) {
    return 3 * (size_t)CUDA_PACK_MOST;
}
// The most rows of so many columns that a pack may have; a multiple of CUDA_PACK_SIDE, 0 where it is none.
static inline int64_t cuda_pack_rows(int64_t columns) {
    return CUDA_PACK_MOST / (cuda_pack_tiles(columns) * CUDA_PACK_TILE) * CUDA_PACK_SIDE;
}

// wanted: all but tiles and bytes, which are filled in. keep (optional): another that stays where it is.
kern_status cuda_pack_operand(const cuda_step *step, cuda_packs *packs, char *room, cuda_pack *wanted,
                              const cuda_pack *keep);

#endif
