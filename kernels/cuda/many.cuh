// SPDX-License-Identifier: Apache-2.0
// y = x W^T with bf16 weights for many vectors by Hopper's warpgroups (sm_90a); products_many.cu launches it. Bits are
// those of few.cuh: its parts of K, its order.
//
// Two launches. The first writes the vectors into the workspace as the tensor cores read them (many_split.cuh).
//
// The second launch: an item is 8 row tiles (of all parts one after another, or as many of parts 0 and 1 each for a
// gated product) and N vectors; items of the same rows follow each other. Producer warps fill a ring of slots in shared
// memory with the copy engine, up to PIECE tiles of K a slot, never across two parts of K; they ask for the first
// slots' weights before the vectors exist. Two warpgroups, 4 row tiles each, a warp one of them: weights go from
// shared memory into registers, vectors are read where they lie. The products of up to two slots, at common widths a
// whole part, are under way together. Where a block is alone on its multiprocessor its warpgroups take turns, a part
// each: one adds its sums while the other multiplies; else another block does.
// A block has all parts of K of an item, adds each part's sums to the total in registers, and goes on to its next item.
// Where many blocks would ask the second-level cache for more than it gives, two of them share what they have in
// common, the vectors of two row blocks or the weights of two vector tiles: each fetches one half for both.
//
// Where rows are few: many_spread.cuh, which has rings, items and their products from here.
#ifndef KERNELS_CUDA_MANY_CUH
#define KERNELS_CUDA_MANY_CUH

#include "kernels/cuda/many_split.cuh"
#include "kernels/cuda/wgmma.cuh"

enum {
    CONSUMERS = 256,                // threads that multiply
    ROW_TILES = CONSUMERS / 32,     // of an item and a side
    PIECE = 4,                      // tiles of K in a slot
    TILE_BYTES = 512,               // of weights
    MAX_SLOTS = 16,                 // of the ring
    HEAD_BYTES = 2 * MAX_SLOTS * 8, // barriers in front of it
    MAX_CLUSTER = 8,
    OUTPUTS = 16, // sums of a thread that go out together
};

// What two blocks of a cluster fetch for each other.
enum { SHARE_NOTHING, SHARE_VECTORS, SHARE_WEIGHTS, SHARES };

// ------------------------------------------------------------------------------------------------------------- layout

template <int N, int SIDES, int LIMBS> struct many_layout {
    static constexpr int GROUP_BYTES = LIMBS * 2 * CORE, VECTOR_TILE = N / PRODUCT_VECTORS * GROUP_BYTES;
    static constexpr int WEIGHT_BYTES = SIDES * ROW_TILES * PIECE * TILE_BYTES;
    static constexpr int SLOT = WEIGHT_BYTES + PIECE * VECTOR_TILE;
    static constexpr int HALF = N / 2;                              // sums of a thread and a side
    static constexpr int PART_FLOATS = SIDES * HALF * CONSUMERS;    // of one part of K
    static constexpr int RESIDENT = SIDES * (N + 16) <= 48 ? 2 : 1; // blocks of a multiprocessor
    static constexpr bool ORDERED = RESIDENT == 1;                  // one of the two warpgroups multiplies at a time
    // One block alone: the warpgroup of the producers leaves its registers to the two that multiply.
    static constexpr int PRODUCERS = RESIDENT == 1 ? 4 : 2, THREADS = CONSUMERS + PRODUCERS * 32;
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// A stage: a slot's tiles of K.
struct many_stage {
    int item, row_block, vector_tile; // where they are
    int tile, count;
};

// The stages of a block, in their order: all slots that it fills, of item after item. visit returns whether there shall
// be more.
struct many_work {
    int items, item0, step;         // this block's: item0, item0 + step ..
    int tiles, part0, part1, shift; // its parts of K, of all 1 << shift
    int vector_tiles;               // of an item's rows; pairs of them where weights are shared
    int shared, rank;               // rank: the block's in its pair

    __device__ __forceinline__ int row_block(int item) const {
        const int index = item / vector_tiles;
        return shared == SHARE_VECTORS ? 2 * index + rank : index;
    }
    __device__ __forceinline__ int vector_tile(int item) const {
        const int index = item % vector_tiles;
        return shared == SHARE_WEIGHTS ? 2 * index + rank : index;
    }
    __device__ __forceinline__ int first_tile(int part) const { return tiles * part >> shift; }
    __device__ __forceinline__ void take_parts(int32_t cols, int first, int count) {
        const int split = product_warps(cols);
        tiles = product_tiles(cols);
        shift = split == 16 ? 4 : split == 8 ? 3 : split == 4 ? 2 : 0;
        part0 = first;
        part1 = first + count;
    }
};

template <typename Visit> static __device__ __forceinline__ void each_stage(const many_work &w, const Visit &visit) {
    for (int item = w.item0; item < w.items; item += w.step) {
        many_stage stage = {item, w.row_block(item), w.vector_tile(item), w.first_tile(w.part0), 0};
        for (int part = w.part0; part < w.part1; part++)
            for (const int end = w.first_tile(part + 1); stage.tile < end; stage.tile += stage.count) {
                stage.count = min(end - stage.tile, (int)PIECE);
                if (!visit(stage))
                    return;
            }
    }
}

struct many_ring {
    cuda_mbarrier *full, *empty;
    char *slot;
    int slots, slot_bytes;
    char *vectors; // of the block's parts of K, where they do not come through the ring
};

// By one thread; a barrier of all who use it follows.
static __device__ __forceinline__ void make_ring(const many_ring &ring, int readers) {
    if (threadIdx.x != 0)
        return;
    for (int i = 0; i < ring.slots; i++) {
        cuda_mbarrier_make(&ring.full[i], 1);
        cuda_mbarrier_make(&ring.empty[i], readers);
    }
    cuda_mbarrier_made();
    cuda_mbarrier_made_for_cluster();
}

// A place in the ring.
struct many_turn {
    int slot;
    uint32_t phase;

    __device__ __forceinline__ void next(int slots) {
        if (++slot == slots) {
            slot = 0;
            phase ^= 1;
        }
    }
};

// ----------------------------------------------------------------------------------------------------------- producer

// One of several warps. A copy needs its operands in registers of the whole warp, and the lanes that ask for one take
// turns, some 80 cycles each: so copies are few and large, and spread over warps. Lane l of warp w fetches row tile
// c % 8 of side c / 8, c = l PRODUCERS + w; the last warp fetches the vectors.
template <int N, int SIDES, int LIMBS, int PRODUCERS> struct many_producer {
    typedef many_layout<N, SIDES, LIMBS> layout;
    const cuda_product &p;
    const many_shape &shape;
    const many_ring &ring;
    const many_work &work;
    int warp, lane;
    int item;           // that `weight` is of
    const char *weight; // this lane's row tile, NULL: none
    int row_tiles;      // of the item

    __device__ __forceinline__ int copy(void) const { return lane * PRODUCERS + warp; }
    __device__ __forceinline__ void turn_to(const many_stage &stage) {
        if (stage.item == item)
            return;
        item = stage.item;
        const int first = stage.row_block * ROW_TILES, side = copy() / ROW_TILES;
        row_tiles = max(min(shape.row_tiles - first, (int)ROW_TILES), 0);
        weight = NULL;
        if (side >= SIDES || copy() % ROW_TILES >= row_tiles)
            return;
        int index = first + copy() % ROW_TILES;
        const int own = SIDES == 2 ? side : product_find_part(p, index, product_row_tiles);
        const cuda_product_part &part = p.part[own];
        weight = (const char *)part.weight + (int64_t)(part.row0 / PRODUCT_TILE + index) * work.tiles * TILE_BYTES;
    }
    // Of weights that are shared, even lanes' are fetched by the first block, odd ones' by the second.
    __device__ __forceinline__ void load_weights(int slot, const many_stage &stage) {
        turn_to(stage);
        if (warp == 0 && lane == 0) {
            cuda_mbarrier_expect(
                &ring.full[slot],
                (uint32_t)(stage.count * (SIDES * row_tiles * TILE_BYTES + (ring.vectors ? 0 : layout::VECTOR_TILE))));
            cuda_mbarrier_arrive(&ring.full[slot]);
        }
        if (!weight)
            return;
        char *to = ring.slot + slot * ring.slot_bytes + copy() * PIECE * TILE_BYTES;
        const char *from = weight + (int64_t)stage.tile * TILE_BYTES;
        const uint32_t bytes = (uint32_t)(stage.count * TILE_BYTES);
        if (work.shared != SHARE_WEIGHTS)
            cuda_bulk_load(to, from, bytes, &ring.full[slot]);
        else if (lane % 2 == work.rank)
            cuda_bulk_load_for(3, to, from, bytes, &ring.full[slot]);
    }
    // Of vectors that are shared each block fetches one half.
    __device__ __forceinline__ void load_vectors(int slot, const many_stage &stage) {
        if (warp != PRODUCERS - 1 || lane != 0)
            return;
        const int64_t run = (int64_t)stage.vector_tile * work.tiles + stage.tile;
        char *to = ring.slot + slot * ring.slot_bytes + layout::WEIGHT_BYTES;
        const char *from = shape.scratch + run * layout::VECTOR_TILE;
        const uint32_t bytes = (uint32_t)(stage.count * layout::VECTOR_TILE);
        if (work.shared != SHARE_VECTORS)
            cuda_bulk_load(to, from, bytes, &ring.full[slot]);
        else
            cuda_bulk_load_for(3, to + work.rank * (bytes / 2), from + work.rank * (bytes / 2), bytes / 2,
                               &ring.full[slot]);
    }
    __device__ __forceinline__ void run(void) {
        many_turn turn = {0, 0};
        int done = 0;
        each_stage(work, [&](const many_stage &stage) {
            load_weights(done, stage);
            return ++done < ring.slots;
        });
        cuda_await();
        asm volatile("fence.proxy.async.global;" ::: "memory"); // the vectors were written by ordinary stores
        done = 0;
        each_stage(work, [&](const many_stage &stage) {
            if (done < ring.slots)
                done++;
            else {
                cuda_mbarrier_wait(&ring.empty[turn.slot], turn.phase ^ 1);
                load_weights(turn.slot, stage);
            }
            load_vectors(turn.slot, stage);
            turn.next(ring.slots);
            return true;
        });
        if (!work.shared)
            return;
        for (int i = 0; i < ring.slots; i++) { // the block stays until the other one has had all, and arrived here
            cuda_mbarrier_wait(&ring.empty[turn.slot], turn.phase ^ 1);
            turn.next(ring.slots);
        }
    }
};

// ---------------------------------------------------------------------------------------------------------- consumers

// A thread's share of COUNT tiles of a slot.
template <int SIDES, int COUNT>
static __device__ __forceinline__ void load_tiles(uint4 (&a)[SIDES][COUNT], const char *weights) {
#pragma unroll
    for (int side = 0; side < SIDES; side++)
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            a[side][i] = *(const uint4 *)(weights + (side * ROW_TILES * PIECE + i) * TILE_BYTES);
            cuda_wgmma_hold(a[side][i]);
        }
}

// Their products are under way when this returns: a and the sums are the tensor cores'.
template <int N, int SIDES, int LIMBS, int COUNT>
static __device__ __forceinline__ void start_tiles(float (&sum)[SIDES][N / 2], const uint4 (&a)[SIDES][COUNT],
                                                   const char *vectors) {
    typedef many_layout<N, SIDES, LIMBS> layout;
    const cuda_wgmma_operand b(vectors, layout::GROUP_BYTES);
    cuda_wgmma_begin();
#pragma unroll
    for (int i = 0; i < COUNT; i++)
#pragma unroll
        for (int limb = 0; limb < LIMBS; limb++)
#pragma unroll
            for (int side = 0; side < SIDES; side++)
                cuda_wgmma(sum[side], a[side][i], b.at(i * layout::VECTOR_TILE + limb * 2 * CORE));
    cuda_wgmma_commit();
}

template <int SIDES, int COUNT> static __device__ __forceinline__ void hold_all(uint4 (&a)[SIDES][COUNT]) {
#pragma unroll
    for (int i = 0; i < SIDES * COUNT; i++)
        cuda_wgmma_hold(a[i / COUNT][i % COUNT]);
}
template <int SIDES, int COUNT> static __device__ __forceinline__ void hold_all(float (&sum)[SIDES][COUNT]) {
#pragma unroll
    for (int i = 0; i < SIDES * COUNT; i++)
        cuda_wgmma_hold(sum[i / COUNT][i % COUNT]);
}

// The two warpgroups ask for products by turns, so that one adds its sums while the other multiplies. The second passes
// the first turn, and the first takes the last.
constexpr int TURN_BARRIER = 2; // of the first warpgroup; the second's follows
constexpr int TURN_THREADS = CONSUMERS;
static __device__ __forceinline__ void await_turn(void) {
    asm volatile("bar.sync %0, %1;" ::"r"(TURN_BARRIER + (int)threadIdx.x / 128), "n"(TURN_THREADS) : "memory");
}
static __device__ __forceinline__ void pass_turn(void) {
    asm volatile("bar.arrive %0, %1;" ::"r"(TURN_BARRIER + 1 - (int)threadIdx.x / 128), "n"(TURN_THREADS) : "memory");
}

// A consumer's place in the ring.
struct many_reader {
    const many_ring &ring;
    many_turn turn;   // the slot that it waits for next
    uint32_t release; // the barrier of the first slot at which a lane below `releases` lets the slot go
    int releases;     // blocks that write into the slots
    int weights;      // where the thread's lie in a slot
    int vectors;      // those of the tiles to come, behind ring.slot; negative: they lie in the slots

    __device__ __forceinline__ many_reader(const many_ring &in, bool shared)
        : ring(in), turn{0, 0}, releases(shared ? 2 : 1), vectors(in.vectors ? (int)(in.vectors - in.slot) : -1) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        release = shared ? cuda_cluster_address(ring.empty, lane % 2) : cuda_shared_address(ring.empty);
        weights = warp * PIECE * TILE_BYTES + lane * 16;
    }
    // Where the next slot lies behind ring.slot, once it has come.
    __device__ __forceinline__ int take(void) const {
        cuda_mbarrier_wait(&ring.full[turn.slot], turn.phase);
        __syncwarp(); // who waited in a loop comes back together
        return turn.slot * ring.slot_bytes;
    }
    template <typename Layout> __device__ __forceinline__ int vectors_of(int slot, int count) {
        if (vectors < 0)
            return slot + Layout::WEIGHT_BYTES;
        vectors += count * Layout::VECTOR_TILE;
        return vectors - count * Layout::VECTOR_TILE;
    }
    // What was read of the slot was read by tensor cores that have been waited for: there is nothing to publish.
    __device__ __forceinline__ void leave(int slot) const {
        if ((int)threadIdx.x % 32 < releases)
            cuda_mbarrier_arrive_in_cluster(release + slot * (uint32_t)sizeof(cuda_mbarrier));
    }
};

// COUNT tiles of K of one slot or of two that follow each other; the second's products are asked for before the first's
// are waited for.
template <int N, int SIDES, int LIMBS, bool ORDERED, int COUNT>
static __device__ __forceinline__ void multiply_tiles(float (&sum)[SIDES][N / 2], many_reader &reader) {
    typedef many_layout<N, SIDES, LIMBS> layout;
    constexpr int FIRST = COUNT < PIECE ? COUNT : PIECE, SECOND = COUNT - FIRST;
    uint4 a[SIDES][FIRST], a2[SIDES][SECOND > 0 ? SECOND : 1];
    int slot = reader.take();
    int held = reader.turn.slot;
    load_tiles(a, reader.ring.slot + slot + reader.weights);
    hold_all(sum);
    if (ORDERED)
        await_turn();
    start_tiles<N, SIDES, LIMBS>(sum, a, reader.ring.slot + reader.vectors_of<layout>(slot, FIRST));
    reader.turn.next(reader.ring.slots);
    if constexpr (SECOND > 0) {
        slot = reader.take();
        load_tiles(a2, reader.ring.slot + slot + reader.weights);
        start_tiles<N, SIDES, LIMBS>(sum, a2, reader.ring.slot + reader.vectors_of<layout>(slot, SECOND));
    }
    if (ORDERED)
        pass_turn();
    if constexpr (SECOND > 0) {
        cuda_wgmma_wait<1>();
        hold_all(a);
        reader.leave(held);
        held = reader.turn.slot;
        reader.turn.next(reader.ring.slots);
    }
    cuda_wgmma_wait<0>();
    if constexpr (SECOND > 0)
        hold_all(a2);
    else
        hold_all(a);
    hold_all(sum);
    reader.leave(held);
}

// `count` tiles, MOST if there are more.
template <int N, int SIDES, int LIMBS, bool ORDERED, int MOST>
static __device__ __forceinline__ void multiply_up_to(float (&sum)[SIDES][N / 2], many_reader &reader, int count) {
    if constexpr (MOST > 1)
        if (count < MOST) {
            multiply_up_to<N, SIDES, LIMBS, ORDERED, MOST - 1>(sum, reader, count);
            return;
        }
    multiply_tiles<N, SIDES, LIMBS, ORDERED, MOST>(sum, reader);
}

// The sums of one part of K, `count` tiles, up to MOST under way together.
template <int N, int SIDES, int LIMBS, bool ORDERED, int MOST>
static __device__ __forceinline__ void multiply_part(float (&sum)[SIDES][N / 2], many_reader &reader, int count) {
    for (; count > 0; count -= MOST)
        multiply_up_to<N, SIDES, LIMBS, ORDERED, MOST>(sum, reader, count);
}

// ------------------------------------------------------------------------------------------------------------ outputs

// Where a thread's sums belong: of each four, rows `row` and `row` + 8 of the part (or parts 0 and 1), whose first may
// lie behind them, of vectors v and v + 1, those of the next four 8 vectors further.
struct many_place {
    int own, row;
    int32_t v, vectors; // of the slice; none where there is no row tile

    __device__ __forceinline__ int32_t vector(int sum) const { return v + sum / 4 * PRODUCT_VECTORS + sum % 2; }
    __device__ __forceinline__ int row_of(int sum) const { return row + sum % 4 / 2 * 8; }
    __device__ __forceinline__ bool has(const cuda_product &p, int sum) const {
        return vector(sum) < vectors && row_of(sum) >= 0 && row_of(sum) < p.part[own].rows;
    }
};

template <int N, int SIDES>
static __device__ __forceinline__ many_place place_of(const cuda_product &p, const many_shape &shape,
                                                      const many_work &work, int item, int32_t vectors) {
    const int lane = (int)threadIdx.x % 32;
    int index = work.row_block(item) * ROW_TILES + (int)threadIdx.x / 32;
    many_place place;
    place.vectors = index < shape.row_tiles ? vectors : 0;
    place.own = SIDES == 2 ? 0 : product_find_part(p, index, product_row_tiles);
    const cuda_product_part &part = p.part[place.own];
    place.row = (part.row0 / PRODUCT_TILE + index) * PRODUCT_TILE - part.row0 + lane / 4;
    place.v = work.vector_tile(item) * N + lane % 4 * 2;
    return place;
}

// What is added to an output of each side, loaded before anything is written so that several loads are under way.
template <int SIDES> struct many_addends {
    float bias[SIDES], residual[SIDES];

    __device__ __forceinline__ void load(const cuda_product &p, int own, int32_t v, int32_t row) {
#pragma unroll
        for (int side = 0; side < SIDES; side++) {
            const cuda_product_part &part = p.part[own + side];
            bias[side] = part.bias ? part.bias[part.row0 + row] : 0;
            residual[side] = part.residual ? part.residual[(int64_t)v * part.rows + row] : 0;
        }
    }
};

// The sums of an output become it, on each side.
template <int SIDES>
static __device__ __forceinline__ void finish(const cuda_product &p, int own, int32_t v, int32_t row,
                                              const float (&total)[SIDES], const many_addends<SIDES> &addends) {
    float y[SIDES];
#pragma unroll
    for (int side = 0; side < SIDES; side++) {
        const cuda_product_part &part = p.part[own + side];
        y[side] = product_value(p, part, v, total[side], addends.bias[side], addends.residual[side]);
        if (SIDES == 1 || part.y != p.gated)
            part.y[(int64_t)v * part.rows + row] = y[side];
    }
    if (SIDES == 2)
        p.gated[(int64_t)v * p.part[0].rows + row] = cuda_activate(p.activation, y[0]) * y[SIDES - 1];
}

// What is added to four sums of a thread and a side.
template <int SIDES> struct many_four {
    many_addends<SIDES> addends[4];

    __device__ __forceinline__ void load(const cuda_product &p, const many_shape &shape, const many_place &place,
                                         int four) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (place.has(p, 4 * four + i))
                addends[i].load(p, place.own, shape.vector0 + place.vector(4 * four + i), place.row_of(i));
    }
    __device__ __forceinline__ void finish(const cuda_product &p, const many_shape &shape, const many_place &place,
                                           int four, const float (&total)[SIDES][4]) const {
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (place.has(p, 4 * four + i)) {
                float sums[SIDES];
#pragma unroll
                for (int side = 0; side < SIDES; side++)
                    sums[side] = total[side][i];
                ::finish<SIDES>(p, place.own, shape.vector0 + place.vector(4 * four + i), place.row_of(i), sums,
                                addends[i]);
            }
    }
};

// A thread's sums of an item, whatever becomes of them.
template <int N, int SIDES>
static __device__ __forceinline__ void finish_fours(const cuda_product &p, const many_shape &shape,
                                                    const many_place &place, float (&total)[SIDES][N / 2]) {
#pragma unroll 1
    for (int four = 0; four < N / 8 && place.vector(4 * four) < place.vectors; four++) {
        many_four<SIDES> added = {};
        float sums[SIDES][4];
        added.load(p, shape, place, four);
#pragma unroll
        for (int side = 0; side < SIDES; side++) {
#pragma unroll
            for (int i = 0; i < 4; i++)
                sums[side][i] = total[side][i];
#pragma unroll
            for (int i = 0; i + 4 < N / 2; i++) // one body of code: the sums move down
                total[side][i] = total[side][i + 4];
        }
        added.finish(p, shape, place, four, sums);
    }
}

// The same where only bias and residual are added. Eight rows of a vector are a sector of memory: sums go there from
// the registers they are in. Residuals are asked for one batch ahead.
template <int SUMS>
static __device__ __forceinline__ void finish_plain(const cuda_product &p, const many_shape &shape,
                                                    const many_place &place, const float (&total)[SUMS]) {
    constexpr int BATCH = SUMS < OUTPUTS ? SUMS : (int)OUTPUTS;
    const cuda_product_part part = p.part[place.own];
    const int64_t rows = part.rows, first = (int64_t)(shape.vector0 + place.v) * rows + place.row;
    const auto at = [=](int i) { return first + (i / 4 * PRODUCT_VECTORS + i % 2) * rows + i % 4 / 2 * 8; };
    const bool has_row[2] = {place.row >= 0 && place.row < rows, place.row + 8 >= 0 && place.row + 8 < rows};
    const auto has = [=](int i) { return place.vector(i) < place.vectors && has_row[i % 4 / 2]; };
    float bias[2] = {}, next[BATCH] = {};
    if (part.bias)
#pragma unroll
        for (int i = 0; i < 2; i++)
            bias[i] = has_row[i] ? part.bias[part.row0 + place.row + 8 * i] : 0;
    if (part.residual)
#pragma unroll
        for (int i = 0; i < BATCH; i++)
            next[i] = has(i) ? part.residual[at(i)] : 0;
#pragma unroll
    for (int begin = 0; begin < SUMS; begin += BATCH) {
        float added[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++)
            added[i] = next[i];
        if (part.residual && begin + BATCH < SUMS)
#pragma unroll
            for (int i = 0; i < BATCH; i++)
                next[i] = has(begin + BATCH + i) ? part.residual[at(begin + BATCH + i)] : 0;
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            float y = total[begin + i];
            if (part.bias)
                y += bias[i % 4 / 2];
            if (part.residual)
                y += added[i];
            if (has(begin + i))
                part.y[at(begin + i)] = y;
        }
    }
}

template <int N, int SIDES, int LIMBS>
static __device__ __forceinline__ void consume(const cuda_product &p, const many_shape &shape, const many_work &work,
                                               const many_ring &ring, int32_t vectors) {
    typedef many_layout<N, SIDES, LIMBS> layout;
    constexpr int HALF = layout::HALF;
    many_reader reader(ring, work.shared != SHARE_NOTHING);
    for (int item = work.item0; item < work.items; item += work.step) {
        const many_place place = place_of<N, SIDES>(p, shape, work, item, vectors);
        float total[SIDES][HALF];
#pragma unroll
        for (int i = 0; i < SIDES * HALF; i++)
            total[i / HALF][i % HALF] = -0.0f; // leaves the first part's sum as it is
        for (int part = work.part0; part < work.part1; part++) {
            float sum[SIDES][HALF] = {};
            multiply_part<N, SIDES, LIMBS, layout::ORDERED, 2 * PIECE>(
                sum, reader, work.first_tile(part + 1) - work.first_tile(part));
#pragma unroll
            for (int i = 0; i < SIDES * HALF; i++)
                total[i / HALF][i % HALF] += sum[i / HALF][i % HALF];
        }
        if constexpr (SIDES == 1)
            if (p.soft_cap <= 0 && !p.finite) {
                finish_plain(p, shape, place, total[0]);
                continue;
            }
        finish_fours<N, SIDES>(p, shape, place, total);
    }
}

#endif

template <int N, int SIDES, int LIMBS>
static __global__ void __launch_bounds__(many_layout<N, SIDES, LIMBS>::THREADS, many_layout<N, SIDES, LIMBS>::RESIDENT)
    many_kernel(const cuda_table *table, const __grid_constant__ cuda_product p, const many_shape shape) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    typedef many_layout<N, SIDES, LIMBS> layout;
    extern __shared__ __align__(128) char memory[]; // barriers, ring
    cuda_begin();
    const many_ring ring = {(cuda_mbarrier *)memory, (cuda_mbarrier *)memory + MAX_SLOTS,
                            memory + HEAD_BYTES,     shape.slots,
                            shape.slot_bytes,        NULL};
    const int32_t vectors = slice_vectors(table, p, shape);
    const int pair = shape.shared ? 2 : 1, rank = (int)blockIdx.x % pair;
    const int row_blocks = (shape.row_tiles + ROW_TILES - 1) / ROW_TILES, vector_tiles = (vectors + N - 1) / N;
    many_work work;
    work.vector_tiles = shape.shared == SHARE_WEIGHTS ? (vector_tiles + 1) / 2 : vector_tiles;
    work.items = (shape.shared == SHARE_VECTORS ? (row_blocks + 1) / 2 : row_blocks) * work.vector_tiles;
    work.item0 = (int)blockIdx.x / pair;
    work.step = (int)gridDim.x / pair;
    work.take_parts(p.cols, 0, product_warps(p.cols));
    work.shared = shape.shared;
    work.rank = rank;
    if (vectors <= 0 || work.item0 >= work.items) { // both of a pair
        cuda_await();
        return;
    }
    make_ring(ring, pair * CONSUMERS / 32);
    if (pair == 2)
        cuda_cluster_start();
    else
        __syncthreads();
    if (threadIdx.x >= CONSUMERS) {
        if (layout::RESIDENT == 1)
            asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        const int warp = (int)(threadIdx.x - CONSUMERS) / 32, lane = (int)threadIdx.x % 32;
        many_producer<N, SIDES, LIMBS, layout::PRODUCERS> producer = {p, shape, ring, work, warp, lane, -1, NULL, 0};
        producer.run();
    } else {
        if (layout::RESIDENT == 1)
            asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        cuda_await();
        if (layout::ORDERED && threadIdx.x / 128 == 1)
            pass_turn();
        consume<N, SIDES, LIMBS>(p, shape, work, ring, vectors);
        if (layout::ORDERED && threadIdx.x / 128 == 0)
            await_turn();
    }
#else
    (void)table, (void)shape;
#endif
}

#endif
