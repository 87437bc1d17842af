// SPDX-License-Identifier: Apache-2.0
// y = x W^T for many vectors where rows are few (products_many.cu launches it): an item of many.cuh for a cluster of
// blocks, each of which has EACH parts of its K. One launch, two blocks of it on a multiprocessor, so that the next
// product's blocks are there and have asked for their weights while this one's end.
//
// A block: each warp asks for its rows' weights, as many as fit, before the vectors exist. All split the block's
// columns of the item's vectors into shared memory, then multiply; the sums of its parts stay in registers. Of a norm
// before the product each block makes the moments of some of the vectors, a warp one, and gives them to all blocks of
// the cluster. When all blocks of the cluster have multiplied, each thread writes its sums into the shared memory of
// the blocks that own the outputs, where vectors and weights were: a block owns an equal share of the item's vectors.
// Behind one more barrier a block adds what it was given, part by part, in the order of the parts.
#ifndef KERNELS_CUDA_MANY_SPREAD_CUH
#define KERNELS_CUDA_MANY_SPREAD_CUH

#include "kernels/cuda/many.cuh"

enum { SPREAD_LANES = 128, SPREAD_QUADS = 2 }; // of a norm, as norm.cuh has it for the widths that are taken

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// The same place in the shared memory of another block of the cluster.
static __device__ __forceinline__ uint32_t spread_place(uint32_t own, int block) {
    uint32_t theirs;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(theirs) : "r"(own), "r"(block));
    return theirs;
}
static __device__ __forceinline__ void spread_put(uint32_t place, float2 pair) {
    asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(place), "f"(pair.x), "f"(pair.y) : "memory");
}
static __device__ __forceinline__ void spread_put(uint32_t place, const float *sum) {
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(place), "f"(sum[0]), "f"(sum[1]),
                 "f"(sum[2]), "f"(sum[3])
                 : "memory");
}

// --------------------------------------------------------------------------------------------------------- the vectors

// Mean and 1 / deviation of a vector, by a warp that has the lanes of the four that norm.cuh gives to such a width.
static __device__ __forceinline__ float2 spread_norm(const cuda_norm &n, int64_t vector) {
    constexpr int WARPS = SPREAD_LANES / CUDA_WARP, STRIDE = SPREAD_LANES * CUDA_QUAD;
    const int64_t at = vector * n.width;
    const int32_t first = (int32_t)threadIdx.x % CUDA_WARP * CUDA_QUAD;
    cuda_quad kept[WARPS][SPREAD_QUADS] = {};
    const auto sum_of = [&](const auto &add) {
        float total = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            float sum = 0;
#pragma unroll
            for (int k = 0; k < SPREAD_QUADS; k++) {
                const int32_t i = first + w * CUDA_WARP * CUDA_QUAD + k * STRIDE;
                if (i < n.width)
                    sum = add(sum, kept[w][k], n.width - i);
            }
            sum = cuda_warp_sum(sum);
            total = w == 0 ? sum : __fadd_rn(total, sum);
        }
        return total;
    };
#pragma unroll
    for (int w = 0; w < WARPS; w++)
#pragma unroll
        for (int k = 0; k < SPREAD_QUADS; k++) {
            const int32_t i = first + w * CUDA_WARP * CUDA_QUAD + k * STRIDE;
            if (i < n.width)
                kept[w][k] = cuda_norm_input(n, at, i);
        }
    float mean = 0;
    if (n.center)
        mean = __fdiv_rn(sum_of([](float sum, const cuda_quad &u, int32_t) { return cuda_quad_sum(sum, u); }),
                         (float)n.width);
    const float squares =
        sum_of([&](float sum, const cuda_quad &u, int32_t left) { return cuda_quad_squares(sum, u, mean, left); });
    return make_float2(mean, 1.0f / sqrtf(__fadd_rn(__fdiv_rn(squares, n.divisor), n.eps)));
}

// Those of the item's vectors: a block makes its share for all. moments: of all N.
template <int N>
static __device__ __forceinline__ void spread_norms(const cuda_product &p, const many_shape &shape, float2 *moments,
                                                    int block, int32_t vector0, int32_t vectors) {
    const int share = N / shape.cluster, lane = threadIdx.x % 32;
    for (int i = threadIdx.x / 32; i < share; i += CONSUMERS / 32) {
        const int at = block * share + i;
        if (vector0 + at >= vectors)
            break;
        const float2 own = spread_norm(p.norm, shape.vector0 + vector0 + at);
        if (lane < shape.cluster)
            spread_put(spread_place(cuda_shared_address(moments + at), lane), own);
    }
    cuda_cluster_barrier();
}

// Eight columns of a vector behind the norm, whose y goes to memory once.
static __device__ __forceinline__ void spread_normalise(const cuda_norm &n, many_eight &eight, int64_t vector,
                                                        int32_t column, float2 moments, bool writes) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int64_t at = vector * n.width;
        const int32_t i = column + half * CUDA_QUAD;
        cuda_quad &u = eight.half[half];
        u = cuda_norm_output(u, cuda_norm_factor(n, n.weight, at, i), moments.x, moments.y);
        if (writes)
            cuda_store(n.y + at + i, u, CUDA_QUAD, true);
    }
}

// The block's vectors of its parts of K, tiles [begin, end). A warp: 8 vectors, 32 columns; several loads under way.
template <int N, int LIMBS, int BATCH, bool NORM>
static __device__ __forceinline__ void
spread_vectors(const cuda_table *table, const cuda_product &p, const many_shape &shape, char *to, const float2 *moments,
               int begin, int end, int32_t vector0, int32_t vectors, bool writes) {
    enum { GROUPS = N / PRODUCT_VECTORS, WARPS = CONSUMERS / 32 };
    typedef many_layout<N, 1, LIMBS> layout;
    const int lane = threadIdx.x % 32, k = lane / 8, units = (end - begin + 1) / 2 * GROUPS;
    for (int first = threadIdx.x / 32; first < units; first += BATCH * WARPS) {
        many_eight eight[BATCH] = {};
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const int unit = first + i * WARPS, tile = begin + unit / GROUPS * 2 + k / 2;
            const int32_t v = vector0 + unit % GROUPS * PRODUCT_VECTORS + lane % 8;
            if (tile < end && v < vectors)
                eight[i].template load<NORM>(table, p, shape, v, tile * PRODUCT_TILE + k % 2 * 8);
        }
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const int unit = first + i * WARPS, tile = unit / GROUPS * 2 + k / 2;
            const int at = unit % GROUPS * PRODUCT_VECTORS + lane % 8;
            if (begin + tile >= end)
                continue;
            if (NORM && vector0 + at < vectors)
                spread_normalise(p.norm, eight[i], shape.vector0 + vector0 + at,
                                 (begin + tile) * PRODUCT_TILE + k % 2 * 8, moments[at], writes);
            eight[i].template store<LIMBS>(to + tile * layout::VECTOR_TILE + unit % GROUPS * layout::GROUP_BYTES +
                                           k % 2 * CORE + lane % 8 * 16);
        }
    }
    cuda_bulk_fence(); // the tensor cores read them
    __syncthreads();
}

// -------------------------------------------------------------------------------------------------------- the products

// A warp asks for its row tiles' weights in the block's stages [first, first + count), as far as there are so many. Who
// has read what lay there before has read its own row tiles: nobody else is waited for.
template <int N, int SIDES, int LIMBS>
static __device__ __forceinline__ void spread_ask(many_producer<N, SIDES, LIMBS, CONSUMERS / 32> &producer, int first,
                                                  int count) {
    int at = 0;
    each_stage(producer.work, [&](const many_stage &stage) {
        if (at >= first)
            producer.load_weights(at % producer.ring.slots, stage);
        return ++at < first + count;
    });
}

// Sums of the block's parts to their owners, and this block's own outputs. given: (parts of K, fours of a block, sides,
// CONSUMERS) float4.
template <int N, int SIDES, int EACH>
static __device__ __forceinline__ void spread_outputs(const cuda_product &p, const many_shape &shape,
                                                      const many_place &place, const float (&sum)[EACH][SIDES][N / 2],
                                                      char *given, int block) {
    constexpr int FOURS = N / 8, PLACE = SIDES * CONSUMERS; // of a thread, a side and a part; float4 of one of them
    const int fours = FOURS / shape.cluster, first = fours * block;
    many_four<SIDES> next = {};
    next.load(p, shape, place, first);
    cuda_cluster_barrier(); // all have multiplied
    const uint32_t own = cuda_shared_address(given) + threadIdx.x * (uint32_t)sizeof(float4);
    int owner = 0, four = 0;
#pragma unroll
    for (int i = 0; i < FOURS; i++) {
        const uint32_t theirs = spread_place(own, owner);
#pragma unroll
        for (int part = 0; part < EACH; part++)
#pragma unroll
            for (int side = 0; side < SIDES; side++)
                spread_put(theirs + (((block * EACH + part) * fours + four) * PLACE + side * CONSUMERS) *
                                        (int)sizeof(float4),
                           sum[part][side] + 4 * i);
        if (++four == fours) {
            four = 0;
            owner++;
        }
    }
    cuda_cluster_barrier(); // all has been given
    for (int i = 0; i < fours; i++) {
        const many_four<SIDES> addends = next;
        if (i + 1 < fours)
            next.load(p, shape, place, first + i + 1);
        const float4 *from = (const float4 *)given + i * PLACE + threadIdx.x;
        float total[SIDES][4];
#pragma unroll
        for (int j = 0; j < SIDES * 4; j++)
            total[j / 4][j % 4] = -0.0f; // leaves the first part's sum as it is
#pragma unroll 4
        for (int part = 0; part < EACH * shape.cluster; part++)
#pragma unroll
            for (int side = 0; side < SIDES; side++) {
                const float4 more = from[part * fours * PLACE + side * CONSUMERS];
                total[side][0] += more.x;
                total[side][1] += more.y;
                total[side][2] += more.z;
                total[side][3] += more.w;
            }
        addends.finish(p, shape, place, first + i, total);
    }
}

#endif

template <int N, int SIDES, int EACH, int LIMBS, bool NORM>
static __global__ void __launch_bounds__(CONSUMERS, 2)
    spread_kernel(const cuda_table *table, const __grid_constant__ cuda_product p, const many_shape shape) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    // Barriers and the norm's moments; ring of weights, vectors; the sums lie over the latter two.
    extern __shared__ __align__(128) char memory[];
    cuda_begin();
    char *slots = memory + HEAD_BYTES + N * sizeof(float2);
    const many_ring ring = {(cuda_mbarrier *)memory, (cuda_mbarrier *)memory + MAX_SLOTS,   slots, shape.slots,
                            shape.slot_bytes,        slots + shape.slots * shape.slot_bytes};
    float2 *moments = (float2 *)(memory + HEAD_BYTES);
    const int32_t vectors = slice_vectors(table, p, shape);
    const int block = (int)blockIdx.x % shape.cluster;
    many_work work;
    work.vector_tiles = (vectors + N - 1) / N;
    work.items = (shape.row_tiles + ROW_TILES - 1) / ROW_TILES * work.vector_tiles;
    work.item0 = (int)blockIdx.x / shape.cluster;
    work.step = work.items; // one item
    work.take_parts(p.cols, block * EACH, EACH);
    work.shared = SHARE_NOTHING;
    work.rank = 0;
    if (vectors <= 0 || work.item0 >= work.items) { // the whole cluster
        cuda_await();
        return;
    }
    make_ring(ring, CONSUMERS / 32);
    if (NORM)
        cuda_cluster_start(); // moments may be given to the others
    else
        __syncthreads();
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    many_producer<N, SIDES, LIMBS, CONSUMERS / 32> producer = {p, shape, ring, work, warp, lane, -1, NULL, 0};
    spread_ask(producer, 0, ring.slots);
    cuda_await();
    const int32_t vector0 = work.vector_tile(work.item0) * N;
    if (NORM)
        spread_norms<N>(p, shape, moments, block, vector0, vectors);
    spread_vectors<N, LIMBS, EACH == 1 ? 4 : 8, NORM>(table, p, shape, ring.vectors, moments,
                                                      work.first_tile(work.part0), work.first_tile(work.part1), vector0,
                                                      vectors, work.row_block(work.item0) == 0);
    many_reader reader(ring, false);
    float sum[EACH][SIDES][N / 2] = {};
    int asked = ring.slots;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int tiles = work.first_tile(work.part0 + i + 1) - work.first_tile(work.part0 + i);
        multiply_part<N, SIDES, LIMBS, false, (SIDES == 2 ? 1 : 2) * PIECE>(sum[i], reader, tiles);
        if (i + 1 < EACH) {
            spread_ask(producer, asked, (tiles + PIECE - 1) / PIECE);
            asked += (tiles + PIECE - 1) / PIECE;
        }
    }
    spread_outputs<N, SIDES, EACH>(p, shape, place_of<N, SIDES>(p, shape, work, work.item0, vectors), sum, ring.slot,
                                   block);
#else
    (void)table, (void)shape;
#endif
}

#endif
