// SPDX-License-Identifier: Apache-2.0
// Packing of operands and what of it is kept; gemm_packs.cuh. A block of threads owns a tile: a warp 8 rows of it, read
// as whole lines, a lane two pieces of 8 columns; 8 lanes write a core matrix.
#include "kernels/cuda/gemm_packs.cuh"
#include "kernels/cuda/gemm_tile.cuh"

enum { THREADS = 256, HALF = CUDA_PACK_SIDE / 2 };

struct pack_job {
    cuda_operand from;
    int64_t row0;
    int32_t rows, columns, tiles; // tiles of a row of them
    bool wide;
    char *to;
};

static __global__ void __launch_bounds__(THREADS) pack_tiles_kernel(const pack_job job) {
    cuda_begin();
    cuda_await();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int32_t row = (int32_t)blockIdx.x / job.tiles * CUDA_PACK_SIDE + warp * 8 + lane % 8;
    const int32_t column = (int32_t)blockIdx.x % job.tiles * CUDA_PACK_SIDE + lane / 8 * 8;
    float x[2][8];
#pragma unroll
    for (int half = 0; half < 2; half++)
        cuda_operand_eight(job.from, job.row0 + row, column + half * HALF,
                           row < job.rows ? job.columns - column - half * HALF : 0, job.wide, x[half]);
    char *to = job.to + (int64_t)blockIdx.x * CUDA_PACK_TILE + (lane / 8 * 8 + warp) * CUDA_PACK_CORE + lane % 8 * 16;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint32_t pair[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const __nv_bfloat162 rounded = __floats2bfloat162_rn(x[half][2 * j], x[half][2 * j + 1]);
            pair[j] = *(const uint32_t *)&rounded;
        }
        *(uint4 *)(to + half * (HALF * CUDA_PACK_CORE)) = make_uint4(pair[0], pair[1], pair[2], pair[3]);
    }
}

static bool overlap(const void *a, size_t a_bytes, const void *b, size_t b_bytes) {
    return a_bytes > 0 && b_bytes > 0 && (const char *)a < (const char *)b + b_bytes &&
           (const char *)b < (const char *)a + a_bytes;
}

static void drop(cuda_packs *packs, const void *p, size_t bytes) {
    int kept = 0;
    for (int i = 0; i < packs->count; i++) {
        const cuda_pack &pack = packs->pack[i];
        const float *from = (const float *)pack.p + pack.row0 * pack.ld;
        const size_t span = pack.bf16 ? 0 : sizeof(float) * ((size_t)(pack.rows - 1) * (size_t)pack.ld + pack.columns);
        if (!overlap(from, span, p, bytes) && !overlap(pack.tiles, pack.bytes, p, bytes))
            packs->pack[kept++] = pack;
    }
    packs->count = kept;
}

void cuda_packs_written(const cuda_step *step, const void *p, size_t bytes) {
    if (step->packs)
        drop(step->packs, p, bytes);
}

void cuda_packs_forget(const cuda_step *step) {
    if (step->packs)
        step->packs->count = 0;
}

static bool is_same(const cuda_pack &a, const cuda_pack &b) {
    return a.p == b.p && a.row0 == b.row0 && a.ld == b.ld && a.rows == b.rows && a.columns == b.columns &&
           a.bf16 == b.bf16;
}

// Behind the last one or at the beginning, but not where `keep` is: there is room for three.
static char *place_for(const cuda_packs *packs, char *room, size_t bytes, const cuda_pack *keep) {
    char *const end = room + cuda_packs_bytes();
    char *place = room + packs->next;
    if (bytes > (size_t)(end - place))
        place = room;
    if (keep && overlap(place, bytes, keep->tiles, keep->bytes)) {
        place = keep->tiles + keep->bytes;
        if (bytes > (size_t)(end - place))
            place = room;
    }
    return place;
}

kern_status cuda_pack_operand(const cuda_step *step, cuda_packs *packs, char *room, cuda_pack *wanted,
                              const cuda_pack *keep) {
    for (int i = 0; i < packs->count; i++)
        if (is_same(packs->pack[i], *wanted)) {
            *wanted = packs->pack[i];
            return KERN_OK;
        }
    const int64_t across = cuda_pack_tiles(wanted->columns), tiles = cuda_pack_tiles(wanted->rows) * across;
    if (tiles * CUDA_PACK_TILE > CUDA_PACK_MOST)
        return KERN_UNSUPPORTED;
    wanted->bytes = (size_t)tiles * CUDA_PACK_TILE;
    wanted->tiles = place_for(packs, room, wanted->bytes, keep);
    drop(packs, wanted->tiles, wanted->bytes);
    if (packs->count == CUDA_PACKS) {
        for (int i = 1; i < CUDA_PACKS; i++)
            packs->pack[i - 1] = packs->pack[i];
        packs->count--;
    }
    packs->pack[packs->count++] = *wanted;
    packs->next = (size_t)(wanted->tiles - room) + wanted->bytes;
    const cuda_operand from = {wanted->p, wanted->ld, false, wanted->bf16};
    const pack_job job = {
        from, wanted->row0, wanted->rows, wanted->columns, (int32_t)across, cuda_operand_is_wide(from), wanted->tiles};
    return cuda_start(step, pack_tiles_kernel, (unsigned)tiles, THREADS, 0, job);
}
