// SPDX-License-Identifier: Apache-2.0
// y = x W^T for many vectors where rows are few (products_many.cu launches it): an item of many.cuh for a cluster of
// blocks, each of which has EACH parts of its K. One launch, two blocks of it on a multiprocessor, so that the next
// product's blocks are there and have asked for their weights while this one's end.
//
// A block: the first warp asks for the weights, as many as fit, before the vectors exist. All split the block's columns
// of the item's vectors into shared memory, then multiply; the sums of its parts stay in registers. When all blocks of
// the cluster have multiplied, each thread writes its sums into the shared memory of the blocks that own the outputs,
// where vectors and weights were: a block owns an equal share of the item's vectors. Behind one more barrier a block
// adds what it was given, part by part, in the order of the parts.
#ifndef KERNELS_CUDA_MANY_SPREAD_CUH
#define KERNELS_CUDA_MANY_SPREAD_CUH

#include "kernels/cuda/many.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// The block's vectors of its parts of K. A warp: 8 vectors, 32 columns; several loads under way.
template <int N, int LIMBS, int BATCH>
static __device__ __forceinline__ void spread_vectors(const cuda_table *table, const cuda_product &p,
                                                      const many_shape &shape, char *to, int begin, int end,
                                                      int32_t vector0, int32_t vectors) {
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
                eight[i].load(table, p, shape, v, tile * PRODUCT_TILE + k % 2 * 8);
        }
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const int unit = first + i * WARPS, tile = unit / GROUPS * 2 + k / 2;
            if (begin + tile < end)
                eight[i].template store<LIMBS>(to + tile * layout::VECTOR_TILE + unit % GROUPS * layout::GROUP_BYTES +
                                               k % 2 * CORE + lane % 8 * 16);
        }
    }
    cuda_bulk_fence(); // the tensor cores read them
    __syncthreads();
}

// The first warp asks for the block's stages [first, first + count), as far as there are so many; those past the
// ring's slots as soon as all have read what lies there.
template <int N, int LIMBS>
static __device__ __forceinline__ void spread_ask(many_producer<N, 1, LIMBS> &producer, int first, int count) {
    const many_ring &ring = producer.ring;
    int at = 0;
    each_stage(producer.work, [&](const many_stage &stage) {
        if (at >= first) {
            if (at >= ring.slots)
                cuda_mbarrier_wait(&ring.empty[at % ring.slots], (uint32_t)(at / ring.slots - 1) & 1);
            producer.load_weights(at % ring.slots, stage);
        }
        return ++at < first + count;
    });
}

// The same place in the shared memory of another block of the cluster, and four sums there.
static __device__ __forceinline__ uint32_t spread_place(uint32_t own, int block) {
    uint32_t theirs;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(theirs) : "r"(own), "r"(block));
    return theirs;
}
static __device__ __forceinline__ void spread_put(uint32_t place, const float *sum) {
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(place), "f"(sum[0]), "f"(sum[1]),
                 "f"(sum[2]), "f"(sum[3])
                 : "memory");
}
static __device__ __forceinline__ void cluster_barrier(void) {
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// What is added to four sums of a thread: two rows of two vectors.
struct spread_four {
    many_addends<1> addends[4];

    static __device__ __forceinline__ int32_t vector_of(const many_place &place, int four, int i) {
        return place.v + four * PRODUCT_VECTORS + (int32_t)threadIdx.x % 4 * 2 + (i & 1);
    }
    static __device__ __forceinline__ int row_of(const many_place &place, int i) {
        return place.row + (int)(threadIdx.x % 32) / 4 + (i >> 1) * 8;
    }
    __device__ __forceinline__ void load(const cuda_product &p, const many_shape &shape, const many_place &place,
                                         int four) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (place.has(p, vector_of(place, four, i), row_of(place, i)))
                addends[i].load(p, place.own, shape.vector0 + vector_of(place, four, i), row_of(place, i));
    }
    __device__ __forceinline__ void finish(const cuda_product &p, const many_shape &shape, const many_place &place,
                                           int four, const float4 &total) const {
        const float sums[4] = {total.x, total.y, total.z, total.w};
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (place.has(p, vector_of(place, four, i), row_of(place, i))) {
                const float one[1] = {sums[i]};
                ::finish<1>(p, place.own, shape.vector0 + vector_of(place, four, i), row_of(place, i), one, addends[i]);
            }
    }
};

// Sums of the block's parts to their owners, and this block's own outputs. given: (parts of K, fours of a block,
// CONSUMERS) float4.
template <int N, int EACH>
static __device__ __forceinline__ void spread_outputs(const cuda_product &p, const many_shape &shape,
                                                      const many_place &place, const float (&sum)[EACH][1][N / 2],
                                                      char *given, int block) {
    constexpr int FOURS = N / 8; // of a thread and a part
    const int fours = FOURS / shape.cluster, first = fours * block;
    spread_four next = {};
    next.load(p, shape, place, first);
    cluster_barrier(); // all have multiplied
    const uint32_t own = cuda_shared_address(given) + threadIdx.x * (uint32_t)sizeof(float4);
    int owner = 0, four = 0;
#pragma unroll
    for (int i = 0; i < FOURS; i++) {
        const uint32_t theirs = spread_place(own, owner);
#pragma unroll
        for (int part = 0; part < EACH; part++)
            spread_put(theirs + ((block * EACH + part) * fours + four) * CONSUMERS * (int)sizeof(float4),
                       sum[part][0] + 4 * i);
        if (++four == fours) {
            four = 0;
            owner++;
        }
    }
    cluster_barrier(); // all has been given
    for (int i = 0; i < fours; i++) {
        const spread_four addends = next;
        if (i + 1 < fours)
            next.load(p, shape, place, first + i + 1);
        const float4 *from = (const float4 *)given + i * CONSUMERS + threadIdx.x;
        float4 total = *from;
#pragma unroll 4
        for (int part = 1; part < EACH * shape.cluster; part++) {
            const float4 more = from[part * fours * CONSUMERS];
            total.x += more.x;
            total.y += more.y;
            total.z += more.z;
            total.w += more.w;
        }
        addends.finish(p, shape, place, first + i, total);
    }
}

#endif

template <int N, int EACH, int LIMBS>
static __global__ void __launch_bounds__(CONSUMERS, 2)
    spread_kernel(const cuda_table *table, const __grid_constant__ cuda_product p, const many_shape shape) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) char memory[]; // barriers, ring of weights, vectors; the sums over the latter two
    cuda_begin();
    const many_ring ring = {(cuda_mbarrier *)memory, (cuda_mbarrier *)memory + MAX_SLOTS,
                            memory + HEAD_BYTES,     shape.slots,
                            shape.slot_bytes,        memory + HEAD_BYTES + shape.slots * shape.slot_bytes};
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
    __syncthreads();
    const bool asks = threadIdx.x < 32;
    many_producer<N, 1, LIMBS> producer = {p, shape, ring, work, (int)threadIdx.x, -1, NULL, 0};
    if (asks)
        spread_ask(producer, 0, ring.slots);
    cuda_await();
    spread_vectors<N, LIMBS, EACH == 1 ? 4 : 8>(table, p, shape, ring.vectors, work.first_tile(work.part0),
                                                work.first_tile(work.part1), work.vector_tile(work.item0) * N, vectors);
    many_reader reader(ring, false);
    float sum[EACH][1][N / 2] = {};
    int asked = ring.slots;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int tiles = work.first_tile(work.part0 + i + 1) - work.first_tile(work.part0 + i);
        multiply_part<N, 1, LIMBS, false>(sum[i], reader, tiles);
        if (i + 1 < EACH && asks) {
            spread_ask(producer, asked, (tiles + PIECE - 1) / PIECE);
            asked += (tiles + PIECE - 1) / PIECE;
        }
    }
    spread_outputs<N, EACH>(p, shape, place_of<N, 1>(p, shape, work, work.item0, vectors), sum, ring.slot, block);
#else
    (void)table, (void)shape;
#endif
}

#endif
