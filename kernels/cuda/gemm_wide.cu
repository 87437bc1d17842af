// SPDX-License-Identifier: Apache-2.0
// Products of operands of one bf16 number by Hopper's warpgroups (sm_90a); gemm.cu launches it.
//
// A block of threads owns 128 x 256 of c after another, two warpgroups 64 rows each; two blocks of a cluster own rows
// below one another, and each fetches half of the b that they share, for both. A warp fills a ring of slots by the copy
// engine, 64 k of both operands a slot, and runs ahead while sums are written. The packed tiles (gemm_packs.cuh) are
// read where they lie, turned or not; where b is not turned two tiles are put into one another on their way, so that
// its 128 vectors lie at equal distances. A slot is free when the products of the one behind it are under way.
//
// Where tiles are few, k is split: parts are summed apart and added up in order. How many is a function of the shape.
#include "kernels/cuda/gemm_packs.cuh"
#include "kernels/cuda/gemm_tile.cuh"
#include "kernels/cuda/wgmma.cuh"

enum {
    CLUSTER = 2,
    ROWS = 2 * CUDA_PACK_SIDE,
    COLUMNS = 4 * CUDA_PACK_SIDE,
    OWN = 4 / CLUSTER,            // tiles of b that a block fetches
    CORE = CUDA_PACK_CORE,        // from a core matrix to the one below
    NEXT = 8 * CUDA_PACK_CORE,    // to the one on the right
    A_BYTES = 2 * CUDA_PACK_TILE, // of a slot; twice that are b's, in halves of 128 vectors
    SLOT_BYTES = 3 * A_BYTES,
    SLOTS = 4,
    GROUP = 128,         // threads of a warpgroup
    THREADS = 3 * GROUP, // of which the last warpgroup fills, by a warp, and gives registers to the others
    FEW_REGISTERS = 40,
    MANY_REGISTERS = 232,
    HALF = 64,    // sums of a thread and half the columns
    BLOCKS = 132, // that a launch should fill
    MOST_PARTS = 32,
    LEAST_STAGES = 4, // of a part
};
static const size_t shared_bytes = (size_t)SLOTS * SLOT_BYTES + 2 * SLOTS * sizeof(uint64_t);

// A packed operand as the product goes through it: from a tile to that of the next 64 i, of the next 64 k.
struct wide_side {
    const char *tiles;
    int64_t next_i, next_k;
    int32_t last_i;
};

struct wide_job {
    wide_side a, b;
    cuda_gemm_output out;
    int32_t stages;               // of k
    int32_t parts, across, items; // across: tiles of n; items: what clusters do one after another
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

struct wide_ring {
    char *slot;
    cuda_mbarrier *full, *empty;
    int turn; // stages so far
};

// One tile of c, or a part of it.
struct wide_item {
    int32_t row, column, part, first, stages; // row, column: in tiles of 128 and 256
};

static __device__ __forceinline__ wide_item item_of(const wide_job &job, int item) {
    const int pairs = job.items / job.parts / job.across;
    wide_item w;
    w.column = item % job.across;
    w.row = item / job.across % pairs * CLUSTER + (int)blockIdx.x % CLUSTER;
    w.part = item / job.across / pairs;
    w.first = (int)((int64_t)job.stages * w.part / job.parts);
    w.stages = (int)((int64_t)job.stages * (w.part + 1) / job.parts) - w.first;
    return w;
}

static __device__ __forceinline__ const char *tile_at(const wide_side &side, int32_t i, int64_t k) {
    return side.tiles + min(i, side.last_i) * side.next_i + k * side.next_k;
}

// By a warp: a stage's tiles of a, and the block's share of b.
template <bool B_TURNED>
static __device__ __forceinline__ void fill_slot(const wide_job &job, const wide_item &w, int64_t k, char *slot,
                                                 cuda_mbarrier *full) {
    const int lane = threadIdx.x % 32;
    if (lane >= 30)
        cuda_bulk_load(slot + (lane - 30) * CUDA_PACK_TILE, tile_at(job.a, w.row * 2 + lane - 30, k), CUDA_PACK_TILE,
                       full);
    const int own = B_TURNED ? lane : lane / 8, tile = (int)blockIdx.x % CLUSTER * OWN + own;
    if (own >= OWN)
        return;
    const char *from = tile_at(job.b, w.column * 4 + tile, k);
    char *to = slot + A_BYTES + tile / 2 * A_BYTES;
    if (B_TURNED)
        cuda_bulk_load_for((1 << CLUSTER) - 1, to + tile % 2 * CUDA_PACK_TILE, from, CUDA_PACK_TILE, full);
    else
        cuda_bulk_load_for((1 << CLUSTER) - 1, to + lane % 8 * (2 * NEXT) + tile % 2 * NEXT, from + lane % 8 * NEXT,
                           NEXT, full);
}

template <bool B_TURNED>
static __device__ __forceinline__ void fill(const wide_job &job, const wide_item &w, wide_ring &ring) {
    for (int stage = 0; stage < w.stages; stage++, ring.turn++) {
        const int at = ring.turn % SLOTS;
        cuda_mbarrier_wait(&ring.empty[at], (uint32_t)(ring.turn / SLOTS % 2) ^ 1);
        if (threadIdx.x % 32 == 0) {
            cuda_mbarrier_expect(&ring.full[at], SLOT_BYTES);
            cuda_mbarrier_arrive(&ring.full[at]);
        }
        __syncwarp();
        fill_slot<B_TURNED>(job, w, w.first + stage, ring.slot + at * SLOT_BYTES, &ring.full[at]);
    }
}

template <bool A_TURNED, bool B_TURNED>
static __device__ __forceinline__ void multiply_slot(const char *slot, float (&low)[HALF], float (&high)[HALF]) {
    const cuda_wgmma_operand a(slot + (int)threadIdx.x / GROUP * CUDA_PACK_TILE, A_TURNED ? NEXT : CORE,
                               A_TURNED ? CORE : NEXT);
    const cuda_wgmma_operand b(slot + A_BYTES, B_TURNED ? NEXT : CORE, B_TURNED ? CORE : 2 * NEXT);
    cuda_wgmma_begin();
#pragma unroll
    for (int k16 = 0; k16 < CUDA_PACK_SIDE / 16; k16++) {
        const int at_a = k16 * 2 * (A_TURNED ? CORE : NEXT), at_b = k16 * 2 * (B_TURNED ? CORE : 2 * NEXT);
        cuda_wgmma_shared<A_TURNED, B_TURNED>(low, a.at(at_a), b.at(at_b));
        cuda_wgmma_shared<A_TURNED, B_TURNED>(high, a.at(at_a), b.at(A_BYTES + at_b));
    }
    cuda_wgmma_commit();
}

// A warpgroup is done with a slot: all blocks may fill it.
static __device__ __forceinline__ void release(const wide_ring &ring, int turn) {
    if (threadIdx.x % GROUP < CLUSTER)
        cuda_mbarrier_arrive_in_cluster(cuda_cluster_address(&ring.empty[turn % SLOTS], threadIdx.x % GROUP));
}

// Two lanes that have neighbouring pairs of two groups of 8 columns have four neighbours of one group each: calls
// each(row, column, quad) for the quads of a half, whose first row and column are the lane's.
template <typename Each> static __device__ __forceinline__ void each_quad(const float (&sum)[HALF], const Each &each) {
    const bool second = threadIdx.x % 2 != 0;
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int j = 0; j < HALF / 4; j += 2) {
            const float2 left = make_float2(sum[4 * j + 2 * half], sum[4 * j + 2 * half + 1]);
            const float2 right = make_float2(sum[4 * j + 4 + 2 * half], sum[4 * j + 5 + 2 * half]);
            const float x = __shfl_xor_sync(0xffffffffu, second ? left.x : right.x, 1);
            const float y = __shfl_xor_sync(0xffffffffu, second ? left.y : right.y, 1);
            each(8 * half, 8 * j, second ? make_float4(x, y, right.x, right.y) : make_float4(left.x, left.y, x, y));
        }
}

// A half that lies in c as a whole, and what is added to it lies alike: addresses are sums.
template <bool ADDS>
static __device__ __forceinline__ void write_whole(float *c, const float *added, int64_t ldc,
                                                   const float (&sum)[HALF]) {
    float *const next = c + 8 * ldc;
    const float *const next_added = added + 8 * ldc;
    each_quad(sum, [&](int row, int column, float4 value) {
        if (ADDS)
            value = cuda_gemm_add(*(const float4 *)((row ? next_added : added) + column), value);
        *(float4 *)((row ? next : c) + column) = value;
    });
}

static __device__ __forceinline__ void write_half(const cuda_gemm_output &out, int32_t row0, int32_t column0,
                                                  const float (&sum)[HALF]) {
    const int lane = threadIdx.x % 32;
    const bool whole = out.quads && row0 + 16 <= out.m && column0 + COLUMNS / 2 <= out.n;
    const int32_t row = row0 + lane / 4, column = column0 + 8 * (lane % 2) + lane % 4 / 2 * 4;
    const int64_t at = row * out.ldc + column;
    if (whole && !out.bias && !(out.accumulate && out.residual)) {
        if (out.accumulate || out.residual)
            write_whole<true>(out.c + at, (out.accumulate ? out.c : out.residual) + at, out.ldc, sum);
        else
            write_whole<false>(out.c + at, out.c, out.ldc, sum);
        return;
    }
    each_quad(sum, [&](int down, int right, const float4 &value) {
        cuda_gemm_write(out, row + down, column + right, value.x);
        cuda_gemm_write(out, row + down, column + right + 1, value.y);
        cuda_gemm_write(out, row + down, column + right + 2, value.z);
        cuda_gemm_write(out, row + down, column + right + 3, value.w);
    });
}

template <bool A_TURNED, bool B_TURNED>
static __device__ __forceinline__ void multiply(const wide_job &job, const wide_item &w, wide_ring &ring) {
    float low[HALF] = {}, high[HALF] = {};
    for (int stage = 0; stage < w.stages; stage++, ring.turn++) {
        const int at = ring.turn % SLOTS;
        cuda_mbarrier_wait(&ring.full[at], (uint32_t)(ring.turn / SLOTS % 2));
        multiply_slot<A_TURNED, B_TURNED>(ring.slot + at * SLOT_BYTES, low, high);
        cuda_wgmma_wait<1>();
        if (stage > 0)
            release(ring, ring.turn - 1);
    }
    cuda_wgmma_wait<0>();
    if (w.stages > 0)
        release(ring, ring.turn - 1);
#pragma unroll
    for (int i = 0; i < HALF; i++) {
        cuda_wgmma_hold(low[i]);
        cuda_wgmma_hold(high[i]);
    }
    const cuda_gemm_output out = cuda_gemm_part(job.out, w.part);
    const int32_t row0 = w.row * ROWS + (int32_t)threadIdx.x / 32 * 16;
    write_half(out, row0, w.column * COLUMNS, low);
    write_half(out, row0, w.column * COLUMNS + COLUMNS / 2, high);
}

#endif

// Grid: clusters, which share the items.
template <bool A_TURNED, bool B_TURNED>
static __global__ void __launch_bounds__(THREADS, 1) wide_kernel(const __grid_constant__ wide_job job) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) char memory[];
    cuda_begin();
    wide_ring ring = {memory, (cuda_mbarrier *)(memory + SLOTS * SLOT_BYTES),
                      (cuda_mbarrier *)(memory + SLOTS * SLOT_BYTES) + SLOTS, 0};
    if (threadIdx.x == 0) {
        for (int i = 0; i < SLOTS; i++) {
            cuda_mbarrier_make(&ring.full[i], 1);
            cuda_mbarrier_make(&ring.empty[i], 2 * CLUSTER);
        }
        cuda_mbarrier_made_for_cluster();
        cuda_mbarrier_made();
    }
    cuda_cluster_start();
    cuda_await();
    const int first = (int)blockIdx.x / CLUSTER, clusters = (int)gridDim.x / CLUSTER;
    if (threadIdx.x < 2 * GROUP) {
        cuda_wgmma_take_registers<MANY_REGISTERS>();
        for (int item = first; item < job.items; item += clusters)
            multiply<A_TURNED, B_TURNED>(job, item_of(job, item), ring);
    } else {
        cuda_wgmma_give_registers<FEW_REGISTERS>();
        if (threadIdx.x < 2 * GROUP + 32)
            for (int item = first; item < job.items; item += clusters)
                fill<B_TURNED>(job, item_of(job, item), ring);
    }
    cuda_cluster_barrier(); // nobody reaches into the memory of a block that has ended
#endif
}

// ---------------------------------------------------------------------------------------------------------- launches

template <bool A_TURNED, bool B_TURNED> static kern_status start(const cuda_step *step, const wide_job &job) {
    auto *kernel = wide_kernel<A_TURNED, B_TURNED>;
    const int most = step->cuda->processors / CLUSTER, clusters = job.items < most || most < 1 ? job.items : most;
    const kern_status status = cuda_allow_shared(kernel, shared_bytes);
    return status
               ? status
               : cuda_start_clusters(step, kernel, CLUSTER, (unsigned)(clusters * CLUSTER), THREADS, shared_bytes, job);
}

// The number of parts that costs least: rounds of stages, and what is written and read to add parts up, in the time of
// a stage (about 3 MB).
static int parts_of(int64_t tiles, int64_t stages, int64_t elements) {
    int64_t least = INT64_MAX;
    int best = 1;
    for (int parts = 1; parts <= MOST_PARTS; parts++) {
        if (parts > 1 && (stages / parts < LEAST_STAGES || parts * elements > CUDA_GEMM_PARTIALS))
            break;
        const int64_t rounds = (tiles * parts + BLOCKS - 1) / BLOCKS, each = (stages + parts - 1) / parts + 4;
        const int64_t cost = rounds * each + (parts > 1 ? parts * elements * 8 / (3 << 20) + 4 : 0);
        if (cost < least) {
            least = cost;
            best = parts;
        }
    }
    return best;
}

static kern_status multiply_packed(const cuda_step *step, char *workspace, const cuda_gemm &g, wide_job job) {
    const int64_t rows = cuda_blocks(job.out.m, ROWS), pairs = (rows + CLUSTER - 1) / CLUSTER;
    job.across = cuda_blocks(job.out.n, COLUMNS);
    job.parts = parts_of(pairs * CLUSTER * job.across, job.stages, (int64_t)job.out.m * job.out.n);
    if (pairs * job.across * job.parts > INT32_MAX)
        return KERN_UNSUPPORTED;
    job.items = (int32_t)(pairs * job.across * job.parts);
    job.out.partial = job.parts > 1 ? (float *)workspace : NULL;
    const kern_status status = g.a.turned ? (g.b.turned ? start<true, true>(step, job) : start<true, false>(step, job))
                               : g.b.turned ? start<false, true>(step, job)
                                            : start<false, false>(step, job);
    return status || job.parts == 1 ? status : cuda_gemm_add_parts(step, job.out, job.parts);
}

size_t cuda_gemm_wide_bytes(void) {
    return sizeof(float) * CUDA_GEMM_PARTIALS + cuda_packs_bytes();
}

// What a product reads of an operand: i [i0, i0 + i) and k [k0, k0 + k); one of the two is sliced, as rows of memory.
struct wide_slice {
    int64_t i0, i, all_i, k0, k, all_k;
};

static kern_status side_of(const cuda_step *step, cuda_packs *packs, char *room, const cuda_operand &o,
                           const wide_slice &s, const cuda_pack *keep, cuda_pack *pack, wide_side *side) {
    *pack = {o.p,
             o.turned ? s.k0 : s.i0,
             o.ld,
             (int32_t)(o.turned ? s.k : s.i),
             (int32_t)(o.turned ? s.all_i : s.all_k),
             o.bf16,
             NULL,
             0};
    const kern_status status = cuda_pack_operand(step, packs, room, pack, keep);
    const int64_t down = cuda_pack_tiles(pack->columns) * CUDA_PACK_TILE, right = CUDA_PACK_TILE;
    side->tiles = pack->tiles + (o.turned ? 0 : s.k0 / CUDA_PACK_SIDE * right);
    side->next_i = o.turned ? right : down;
    side->next_k = o.turned ? down : right;
    side->last_i = (int32_t)cuda_pack_tiles(s.i) - 1;
    return status;
}

static int64_t least_of(int64_t a, int64_t b) {
    return a < b ? a : b;
}

kern_status cuda_gemm_wide(const cuda_step *step, char *workspace, const cuda_gemm &g) {
    cuda_packs own = {}, *packs = step->packs ? step->packs : &own;
    char *room = workspace + sizeof(float) * CUDA_GEMM_PARTIALS;
    const int64_t m_each = g.a.turned ? g.m : cuda_pack_rows(g.k), n_each = g.b.turned ? g.n : cuda_pack_rows(g.k);
    const int64_t k_each = least_of(g.a.turned ? cuda_pack_rows(g.m) : g.k, g.b.turned ? cuda_pack_rows(g.n) : g.k);
    if (g.m < 1 || g.n < 1 || g.k < 1)
        return KERN_OK;
    if (m_each < 1 || n_each < 1 || k_each < 1 || g.n > INT32_MAX || g.k > INT32_MAX)
        return KERN_UNSUPPORTED;
    kern_status status = KERN_OK;
    for (int64_t k0 = 0; k0 < g.k; k0 += k_each)
        for (int64_t m0 = 0; m0 < g.m; m0 += m_each)
            for (int64_t n0 = 0; !status && n0 < g.n; n0 += n_each) {
                const int64_t k = least_of(k_each, g.k - k0), m = least_of(m_each, g.m - m0);
                const int64_t n = least_of(n_each, g.n - n0);
                cuda_pack a = {}, b = {};
                wide_job job = {};
                job.out = cuda_gemm_output_of(g, m0, m, n0, n, k0 == 0);
                job.stages = (int32_t)cuda_pack_tiles(k);
                status = side_of(step, packs, room, g.a, {m0, m, g.m, k0, k, g.k}, NULL, &a, &job.a);
                if (!status)
                    status = side_of(step, packs, room, g.b, {n0, n, g.n, k0, k, g.k}, &a, &b, &job.b);
                if (!status)
                    status = multiply_packed(step, workspace, g, job);
            }
    return status;
}
