// SPDX-License-Identifier: Apache-2.0
// Launches of products with many vectors (many.cuh, many_spread.cuh). The form of a launch, vectors an item and one
// block, two or a cluster for it, is the cheapest by an estimate of cycles; it never changes a bit.
#include "kernels/cuda/products_many.cuh"

#include "kernels/cuda/many_spread.cuh"

size_t cuda_product_workspace(const kern_cuda *cuda, int32_t cols) {
    const int limbs = cuda->fast ? 1 : 2;
    return cuda_has_many(cuda) ? (size_t)SLICE_ROOM * product_tiles(cols) * PRODUCT_TILE * sizeof(uint16_t) * limbs : 0;
}

bool cuda_many_takes_norm(const cuda_product *p) {
    return p->norm.wide && p->cols % PRODUCT_TILE == 0 && !p->wanted;
}

template <int LANES, int CACHE, int LIMBS>
static kern_status start_norm(const cuda_step *step, const cuda_product *p, const many_shape &shape, int64_t vectors) {
    const int each = LANES == CUDA_WARP ? NORMS : 1;
    return cuda_start(step, normalise_kernel<LANES, CACHE, LIMBS>, cuda_blocks(vectors * p->norm.groups, each),
                      LANES * each, 0, step->table, *p, shape);
}

template <int LIMBS>
static kern_status start_split(const cuda_step *step, const cuda_product *p, const many_shape &shape, int64_t vectors) {
    if (p->norm.y && p->norm.width <= CUDA_NORM_NARROW)
        return start_norm<CUDA_WARP, 2, LIMBS>(step, p, shape, vectors);
    if (p->norm.y && p->norm.width <= CUDA_NORM_MIDDLE)
        return start_norm<128, 2, LIMBS>(step, p, shape, vectors);
    if (p->norm.y)
        return start_norm<256, 4, LIMBS>(step, p, shape, vectors);
    return cuda_start(step, split_kernel<LIMBS>,
                      dim3(cuda_blocks(vectors, PRODUCT_VECTORS), cuda_blocks(product_tiles(p->cols), 16)), 256, 0,
                      step->table, *p, shape);
}

// How a launch is cut.
struct many_cut {
    int n, cluster, shared;
};
struct many_plan {
    many_cut cut;
    int slots, slot_bytes;
    size_t bytes;
    int64_t cost; // cycles, about
};

// Items of all clusters of a launch.
static int64_t items_of(const many_shape &shape, int64_t vectors, const many_cut &cut) {
    const int64_t rows = cuda_blocks(shape.row_tiles, ROW_TILES), tiles = cuda_blocks(vectors, cut.n);
    if (cut.shared)
        return cut.shared == SHARE_VECTORS ? (rows + 1) / 2 * tiles : rows * ((tiles + 1) / 2);
    return rows * tiles;
}
static int blocks_of(const many_cut &cut) {
    return cut.cluster * (cut.shared ? 2 : 1);
}

static int slots_in(size_t room, size_t taken, int slot_bytes) {
    return taken < room ? (int)((room - taken) / (size_t)slot_bytes) : 0;
}
// Shared memory that each of `resident` blocks of a multiprocessor may have.
static size_t room_of(const kern_cuda *cuda, int resident) {
    enum { RESERVED = 1024 }; // of a block, by the system
    return (cuda->shared_limit + RESERVED) / (size_t)resident - RESERVED;
}

// Cycles: the second-level cache gives 28 bytes a cycle for every multiprocessor, 40 to one of few that ask; tensor
// cores do four fifths of 2048 multiplications; what a warpgroup does around a part is 900, while which the
// other one multiplies if it is ordered; an item's outputs are 40 for each vector and side (by their instructions), a
// launch more is 5000, two blocks' start 500.
template <int N, int SIDES, int LIMBS>
static int64_t cost_of(const kern_cuda *cuda, const cuda_product *p, const many_cut &cut, int64_t items) {
    const int64_t processors = cuda->processors, places = processors / (cut.shared ? 2 : 1);
    const int64_t blocks = items * blocks_of(cut), turns = (items + places - 1) / places;
    const int64_t rate = blocks >= processors ? 28 : blocks * 10 <= processors * 7 ? 40 : 28 * processors / blocks;
    const int64_t weights = SIDES * 256 / (cut.shared == SHARE_WEIGHTS ? 2 : 1);
    const int64_t vectors = 4 * N / (cut.shared == SHARE_VECTORS ? 2 : 1);
    const int64_t loads = (weights + vectors) * p->cols / rate, waits = 900 * product_warps(p->cols);
    const int64_t both = (int64_t)SIDES * N * LIMBS * p->cols / 13, least = both / 2 + waits; // of one warpgroup
    const int64_t products = many_layout<N, SIDES, LIMBS>::ORDERED ? (both > least ? both : least)
                             : blocks > processors                 ? both
                                                                   : both + waits;
    const int64_t turn = (loads > products ? loads : products) + SIDES * N * 40;
    return turns * turn + (cut.shared ? 500 : 0) + 5000;
}

// slots 0: it does not fit into shared memory.
template <int N, int SIDES, int LIMBS>
static many_plan plan_many(const kern_cuda *cuda, const cuda_product *p, int64_t items, const many_cut &cut) {
    typedef many_layout<N, SIDES, LIMBS> layout;
    const size_t taken = HEAD_BYTES;
    const int resident = items * blocks_of(cut) > cuda->processors ? layout::RESIDENT : 1;
    many_plan plan = {cut, 0, layout::SLOT, 0, 0};
    for (int blocks = resident; blocks > 0 && plan.slots < 2; blocks--)
        plan.slots = slots_in(room_of(cuda, blocks), taken, plan.slot_bytes);
    plan.slots = plan.slots < 2 ? 0 : plan.slots < MAX_SLOTS ? plan.slots : (int)MAX_SLOTS;
    plan.bytes = taken + (size_t)plan.slots * (size_t)plan.slot_bytes;
    plan.cost = cost_of<N, SIDES, LIMBS>(cuda, p, cut, items);
    return plan;
}

template <int N, int SIDES, int LIMBS>
static kern_status start_many(const cuda_step *step, const cuda_product *p, const many_shape &shape,
                              const many_plan &plan, int64_t vectors) {
    auto *kernel = many_kernel<N, SIDES, LIMBS>;
    const kern_status status = cuda_allow_shared(kernel, plan.bytes);
    if (status)
        return status;
    const int64_t items = items_of(shape, vectors, plan.cut), each = blocks_of(plan.cut);
    const int64_t most = (int64_t)step->cuda->processors * many_layout<N, SIDES, LIMBS>::RESIDENT / each;
    return cuda_start_clusters(step, kernel, (int)each, dim3((unsigned)((items < most ? items : most) * each)),
                               many_layout<N, SIDES, LIMBS>::THREADS, plan.bytes, step->table, *p, shape);
}

static bool spread_takes(const cuda_norm &n) {
    return n.groups == 1 && cuda_norm_lanes(n.width) == SPREAD_LANES;
}

// The same for items of which a cluster's blocks have EACH parts of K each. Cycles: all blocks of a multiprocessor
// fetch by turns and give their sums away at 16 bytes a cycle; what there is only once is 5000; all of it took 1.6
// times as long as these say, for many shapes alike.
template <int N, int SIDES, int EACH, int LIMBS>
static many_plan plan_spread(const kern_cuda *cuda, const cuda_product *p, int64_t items, const many_cut &asked) {
    typedef many_layout<N, SIDES, LIMBS> layout;
    constexpr size_t HEAD = HEAD_BYTES + N * sizeof(float2);
    const int split = product_warps(p->cols), cluster = split / EACH;
    many_plan plan = {{N, cluster, SHARE_NOTHING}, 0, layout::WEIGHT_BYTES, 0, 0};
    if (asked.shared || (p->norm.y && !spread_takes(p->norm)) || cluster < 2 || cluster > MAX_CLUSTER ||
        N % (8 * cluster) != 0)
        return plan;
    const int longest = cuda_blocks(product_tiles(p->cols), split), least = cuda_blocks(longest, PIECE);
    const size_t sums = sizeof(float) * EACH * layout::PART_FLOATS;
    const size_t vector_bytes = (size_t)(EACH * longest * layout::VECTOR_TILE);
    for (int blocks = 2; blocks > 0 && plan.slots < least; blocks--)
        plan.slots = slots_in(room_of(cuda, blocks), HEAD + vector_bytes, plan.slot_bytes);
    const int most = EACH * least < MAX_SLOTS ? EACH * least : (int)MAX_SLOTS;
    plan.slots = plan.slots < least ? 0 : plan.slots < most ? plan.slots : most;
    const size_t operands = (size_t)plan.slots * (size_t)plan.slot_bytes + vector_bytes;
    plan.bytes = HEAD + (operands > sums ? operands : sums);
    if (plan.bytes > cuda->shared_limit)
        plan.slots = 0;
    const int64_t turns = (items * cluster + cuda->processors - 1) / cuda->processors;
    const int64_t turn =
        (SIDES * 256 + 4 * N) * (int64_t)p->cols / cluster / 28 + (int64_t)sums / 16 + (p->norm.y ? 2000 : 0);
    plan.cost = (turns * turn + 5000) * 8 / 5;
    return plan;
}

template <int N, int SIDES, int EACH, int LIMBS>
static kern_status start_spread(const cuda_step *step, const cuda_product *p, const many_shape &shape,
                                const many_plan &plan, int64_t vectors) {
    auto *kernel = p->norm.y ? spread_kernel<N, SIDES, EACH, LIMBS, true> : spread_kernel<N, SIDES, EACH, LIMBS, false>;
    const kern_status status = cuda_allow_shared(kernel, plan.bytes);
    const int64_t blocks = items_of(shape, vectors, plan.cut) * plan.cut.cluster;
    return status ? status
                  : cuda_start_clusters(step, kernel, plan.cut.cluster, dim3((unsigned)blocks), CONSUMERS, plan.bytes,
                                        step->table, *p, shape);
}

// A kernel's part in the choice.
struct many_form {
    int n;
    many_plan (*plan)(const kern_cuda *cuda, const cuda_product *p, int64_t items, const many_cut &cut);
    kern_status (*start)(const cuda_step *step, const cuda_product *p, const many_shape &shape, const many_plan &plan,
                         int64_t vectors);
};
template <int N, int SIDES, int LIMBS> static constexpr many_form form_of(void) {
    return {N, plan_many<N, SIDES, LIMBS>, start_many<N, SIDES, LIMBS>};
}
template <int N, int SIDES, int EACH, int LIMBS> static constexpr many_form spread_of(void) {
    return {N, plan_spread<N, SIDES, EACH, LIMBS>, start_spread<N, SIDES, EACH, LIMBS>};
}

// The cheapest form for a slice, and its launches.
template <int LIMBS, size_t FORMS>
static kern_status launch_slice(const cuda_step *step, const cuda_product *p, const many_form (&forms)[FORMS],
                                many_shape shape, int64_t vectors) {
    const int64_t rows = cuda_blocks(shape.row_tiles, ROW_TILES);
    many_plan best = {};
    size_t chosen = 0;
    for (size_t i = 0; i < FORMS; i++)
        for (int shared = SHARE_NOTHING; shared < SHARES; shared++) {
            const many_cut cut = {forms[i].n, 1, shared};
            if ((shared == SHARE_VECTORS && rows < 2) || (shared == SHARE_WEIGHTS && vectors <= cut.n))
                continue; // there is no second
            const many_plan plan = forms[i].plan(step->cuda, p, items_of(shape, vectors, cut), cut);
            if (plan.slots > 0 && (best.slots == 0 || plan.cost < best.cost)) {
                best = plan;
                chosen = i;
            }
        }
    if (best.slots == 0)
        return KERN_UNSUPPORTED;
    shape.groups = best.cut.n / PRODUCT_VECTORS;
    shape.cluster = best.cut.cluster;
    shape.shared = best.cut.shared;
    shape.slots = best.slots;
    shape.slot_bytes = best.slot_bytes;
    const kern_status status = best.cut.cluster > 1 ? KERN_OK : start_split<LIMBS>(step, p, shape, vectors);
    return status ? status : forms[chosen].start(step, p, shape, best, vectors);
}

template <int LIMBS> static kern_status launch_slices(const cuda_step *step, const cuda_product *p, int64_t vectors) {
    static constexpr many_form plain[] = {
        form_of<16, 1, LIMBS>(),  form_of<32, 1, LIMBS>(),      form_of<64, 1, LIMBS>(),     form_of<96, 1, LIMBS>(),
        form_of<128, 1, LIMBS>(), spread_of<64, 1, 1, LIMBS>(), spread_of<64, 1, 2, LIMBS>()};
    static constexpr many_form gated[] = {form_of<16, 2, LIMBS>(), form_of<32, 2, LIMBS>(), form_of<64, 2, LIMBS>()};
    many_shape shape = {};
    shape.scratch = step->cuda->workspace;
    shape.wide = p->cols % CUDA_QUAD == 0 && cuda_is_wide(p->x);
    for (int i = 0; i < (p->gated ? 1 : p->parts); i++)
        shape.row_tiles += product_row_tiles(p->part[i]);
    for (int64_t done = 0; done < vectors; done += SLICE) {
        const int64_t left = vectors - done < SLICE ? vectors - done : (int64_t)SLICE;
        shape.vector0 = (int32_t)done;
        const kern_status status = p->gated ? launch_slice<LIMBS>(step, p, gated, shape, left)
                                            : launch_slice<LIMBS>(step, p, plain, shape, left);
        if (status)
            return status;
    }
    return KERN_OK;
}

kern_status cuda_many_launch(const cuda_step *step, const cuda_product *p, int64_t vectors) {
    if (cuda_product_workspace(step->cuda, p->cols) > step->cuda->workspace_bytes)
        return KERN_INVALID;
    return step->cuda->fast ? launch_slices<1>(step, p, vectors) : launch_slices<2>(step, p, vectors);
}
