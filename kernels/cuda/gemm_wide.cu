// SPDX-License-Identifier: Apache-2.0
// Products of packed operands of one limb by Hopper's warpgroups (sm_90a); gemm.cu launches it and packs.
//
// A block of threads owns 128 x 256 of c. One thread fills a ring of slots by the copy engine, two packed blocks of k
// of each operand a slot, every one a run of memory. Two warpgroups own 64 rows each; both operands are read where they
// lie, turned or not. A slot is free when the products of the one behind it are under way.
#include "kernels/cuda/gemm_tile.cuh"
#include "kernels/cuda/wgmma.cuh"

enum {
    ROWS = CUDA_GEMM_TILE,
    COLUMNS = 2 * CUDA_GEMM_TILE,
    PIECE = CUDA_GEMM_PIECE,                // packed blocks of k in a slot
    OPERAND_BYTES = PIECE * CUDA_GEMM_LIMB, // of a; b has two
    SLOT_BYTES = 3 * OPERAND_BYTES,
    SLOTS = 4,
    GROUP = 128,                                       // threads of a warpgroup
    THREADS = 3 * GROUP,                               // of which the last fills
    HALF = 64,                                         // sums of a thread and half the columns
    STEP_BYTES = 2 * CUDA_GEMM_CORES * CUDA_GEMM_CORE, // of 16 k
};
static const size_t shared_bytes = (size_t)SLOTS * SLOT_BYTES + 2 * SLOTS * sizeof(uint64_t);

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

struct wide_ring {
    char *slot;
    cuda_mbarrier *full, *empty;
};

// What a block multiplies, slot by slot: a block of rows of a and two of b.
struct wide_work {
    const char *a, *b[2];
    int stages;
};

static __device__ __forceinline__ wide_work work_of(const cuda_gemm_job &job) {
    const int64_t stages = job.k_blocks / PIECE, first = stages * blockIdx.z / gridDim.z;
    const int last = (job.n - 1) / CUDA_GEMM_TILE; // which is b's last again where there is no second
    wide_work w;
    w.stages = (int)(stages * (blockIdx.z + 1) / gridDim.z - first);
    w.a = job.a + ((int64_t)blockIdx.y * job.k_blocks + first * PIECE) * CUDA_GEMM_LIMB;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int block = min((int)blockIdx.x * 2 + half, last);
        w.b[half] = job.b + ((int64_t)block * job.k_blocks + first * PIECE) * CUDA_GEMM_LIMB;
    }
    return w;
}

// By one thread.
static __device__ __forceinline__ void fill(const wide_work &w, const wide_ring &ring) {
    for (int stage = 0; stage < w.stages; stage++) {
        const int slot = stage % SLOTS;
        const int64_t at = (int64_t)stage * OPERAND_BYTES;
        char *to = ring.slot + slot * SLOT_BYTES;
        cuda_mbarrier_wait(&ring.empty[slot], (uint32_t)(stage / SLOTS % 2) ^ 1);
        cuda_mbarrier_expect(&ring.full[slot], SLOT_BYTES);
        cuda_mbarrier_arrive(&ring.full[slot]);
        cuda_bulk_load(to, w.a + at, OPERAND_BYTES, &ring.full[slot]);
        cuda_bulk_load(to + OPERAND_BYTES, w.b[0] + at, OPERAND_BYTES, &ring.full[slot]);
        cuda_bulk_load(to + 2 * OPERAND_BYTES, w.b[1] + at, OPERAND_BYTES, &ring.full[slot]);
    }
}

template <bool A_TURNED, bool B_TURNED>
static __device__ __forceinline__ void multiply_slot(const char *slot, float (&low)[HALF], float (&high)[HALF]) {
    enum { NEXT_K = CUDA_GEMM_CORES * CUDA_GEMM_CORE };
    const int group = (int)threadIdx.x / GROUP;
    const cuda_wgmma_operand a(slot + group * (ROWS / 2 / 8 * CUDA_GEMM_CORE), CUDA_GEMM_CORE, NEXT_K);
    const cuda_wgmma_operand b(slot + OPERAND_BYTES, CUDA_GEMM_CORE, NEXT_K);
    cuda_wgmma_begin();
#pragma unroll
    for (int k16 = 0; k16 < PIECE * CUDA_GEMM_DEPTH / 16; k16++) {
        cuda_wgmma_shared<A_TURNED, B_TURNED>(low, a.at(k16 * STEP_BYTES), b.at(k16 * STEP_BYTES));
        cuda_wgmma_shared<A_TURNED, B_TURNED>(high, a.at(k16 * STEP_BYTES), b.at(OPERAND_BYTES + k16 * STEP_BYTES));
    }
    cuda_wgmma_commit();
}

static __device__ __forceinline__ void write_half(const cuda_gemm_job &job, int32_t row0, int32_t column0,
                                                  const float (&sum)[HALF]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < HALF / 4; j++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            cuda_gemm_write_pair(job, row0 + 8 * half + lane / 4, column0 + 8 * j + lane % 4 * 2, sum[4 * j + 2 * half],
                                 sum[4 * j + 2 * half + 1]);
}

template <bool A_TURNED, bool B_TURNED>
static __device__ __forceinline__ void multiply(const cuda_gemm_job &job, const wide_work &w, const wide_ring &ring) {
    float low[HALF] = {}, high[HALF] = {};
    for (int stage = 0; stage < w.stages; stage++) {
        const int slot = stage % SLOTS;
        cuda_mbarrier_wait(&ring.full[slot], (uint32_t)(stage / SLOTS % 2));
        multiply_slot<A_TURNED, B_TURNED>(ring.slot + slot * SLOT_BYTES, low, high);
        cuda_wgmma_wait<1>();
        if (stage > 0 && threadIdx.x % GROUP == 0)
            cuda_mbarrier_arrive(&ring.empty[(stage - 1) % SLOTS]);
    }
    cuda_wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < HALF; i++) {
        cuda_wgmma_hold(low[i]);
        cuda_wgmma_hold(high[i]);
    }
    const cuda_gemm_job out = cuda_gemm_part(job, (int)blockIdx.z);
    const int32_t row0 = (int32_t)blockIdx.y * ROWS + (int32_t)threadIdx.x / 32 * 16;
    write_half(out, row0, (int32_t)blockIdx.x * COLUMNS, low);
    write_half(out, row0, (int32_t)blockIdx.x * COLUMNS + COLUMNS / 2, high);
}

#endif

// Grid: tiles of n, tiles of m, parts of k.
template <bool A_TURNED, bool B_TURNED>
static __global__ void __launch_bounds__(THREADS, 1) wide_kernel(const __grid_constant__ cuda_gemm_job job) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) char memory[];
    cuda_begin();
    const wide_ring ring = {memory, (cuda_mbarrier *)(memory + SLOTS * SLOT_BYTES),
                            (cuda_mbarrier *)(memory + SLOTS * SLOT_BYTES) + SLOTS};
    if (threadIdx.x == 0) {
        for (int i = 0; i < SLOTS; i++) {
            cuda_mbarrier_make(&ring.full[i], 1);
            cuda_mbarrier_make(&ring.empty[i], 2);
        }
        cuda_mbarrier_made();
    }
    __syncthreads();
    cuda_await();
    const wide_work work = work_of(job);
    if (threadIdx.x < 2 * GROUP)
        multiply<A_TURNED, B_TURNED>(job, work, ring);
    else if (threadIdx.x == 2 * GROUP)
        fill(work, ring);
#endif
}

template <bool A_TURNED, bool B_TURNED>
static kern_status start(const cuda_step *step, const cuda_gemm_job &job, dim3 grid) {
    const kern_status status = cuda_allow_shared(wide_kernel<A_TURNED, B_TURNED>, shared_bytes);
    return status ? status : cuda_start(step, wide_kernel<A_TURNED, B_TURNED>, grid, THREADS, shared_bytes, job);
}

kern_status cuda_gemm_wide(const cuda_step *step, const cuda_gemm_job &job, bool a_turned, bool b_turned, int parts) {
    const dim3 grid((unsigned)cuda_blocks(job.n, COLUMNS), (unsigned)cuda_blocks(job.m, ROWS), (unsigned)parts);
    if (a_turned)
        return b_turned ? start<true, true>(step, job, grid) : start<true, false>(step, job, grid);
    return b_turned ? start<false, true>(step, job, grid) : start<false, false>(step, job, grid);
}
