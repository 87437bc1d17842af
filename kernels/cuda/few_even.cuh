// SPDX-License-Identifier: Apache-2.0
// The products of few.cuh where the tiles of K come out even, HELD a warp, with the same bits: a phase that every step
// waits for, as short as the memory's latencies let it be. All that follows from the product alone is made on the host
// (product_facts); a thread's addresses are made before the vectors are awaited; behind the wait stand no divisions and
// no branches but uniform ones, and loads lie together.
//
// A block has PRODUCT_SPLIT warps: one, two teams. A team of a gated product has WARPS warps a side.
#ifndef KERNELS_CUDA_FEW_EVEN_CUH
#define KERNELS_CUDA_FEW_EVEN_CUH

#include "kernels/cuda/few.cuh"

constexpr int PRODUCT_THREADS = PRODUCT_SPLIT * 32; // of a block
constexpr int PRODUCT_QUADS = 2;                    // of a vector that is normed, a lane's

// Warps a side and tiles a warp. PRODUCT_ANY: few.cuh's general form.
enum product_form { PRODUCT_ANY, PRODUCT_8_6, PRODUCT_8_8, PRODUCT_16_8 };

struct alignas(16) product_facts {
    int32_t first[CUDA_PARTS]; // items before a part's own; past the last part INT32_MAX
    int32_t form, lanes_log2, groups_log2;
    bool plain; // outputs are neither capped nor looked at
};

static inline int32_t product_form_of(const cuda_product *p) {
    const int tiles = product_tiles(p->cols), warps = product_warps(p->cols);
    const cuda_norm &n = p->norm;
    if (p->cols % PRODUCT_TILE != 0 || !cuda_is_wide(p->x) || (p->gated && warps == PRODUCT_SPLIT) ||
        (p->wanted && !n.y))
        return PRODUCT_ANY;
    const int lanes = n.y ? cuda_norm_lanes(n.width) : CUDA_WARP;
    const bool gate = n.gate && (n.gate_first || (n.activation != KERN_SILU && n.activation != KERN_SIGMOID));
    if (n.y && (!n.wide || n.center || gate || n.width > PRODUCT_QUADS * CUDA_QUAD * lanes ||
                n.groups > PRODUCT_THREADS / lanes))
        return PRODUCT_ANY;
    return warps == 8 && tiles == 48     ? PRODUCT_8_6
           : warps == 8 && tiles == 64   ? PRODUCT_8_8
           : warps == 16 && tiles == 128 ? PRODUCT_16_8
                                         : PRODUCT_ANY;
}

static inline product_facts product_facts_of(const cuda_product *p) {
    product_facts facts = {};
    for (int i = 0, items = 0; i < CUDA_PARTS; i++) {
        facts.first[i] = i < p->parts ? items : INT32_MAX;
        items += i < p->parts ? product_row_tiles(p->part[i]) : 0;
    }
    facts.form = product_form_of(p);
    for (int32_t lanes = cuda_norm_lanes(p->norm.width); lanes > 1; lanes /= 2)
        facts.lanes_log2++;
    while (1 << facts.groups_log2 < p->norm.groups)
        facts.groups_log2++;
    facts.plain = !p->finite && !(p->soft_cap > 0);
    return facts;
}

// -------------------------------------------------------------------------------------------------------- the vectors

// What is worked out before the wait stays there: else the compiler moves it to where it is used.
static __device__ __forceinline__ void product_keep(uint32_t &x) {
    asm volatile("" : "+r"(x));
}

static __device__ __forceinline__ float4 product_load_quad(const float *x) {
    return *(const float4 *)cuda_in_global(x);
}

// Where columns k .. k + 3 of a vector lie, k a multiple of 4 (product_vectors_memory), and how they get there.
static __device__ __forceinline__ uint32_t product_quad_place(uint32_t k) {
    return k / PRODUCT_TILE * 16 + k / 4 % 2 * 8 + k / 8 % 2;
}
static __device__ __forceinline__ void product_put_quad(uint32_t *at, const cuda_quad &q) {
    uint32_t hi[2], lo[2];
    product_split_pair(make_float2(q.v[0], q.v[1]), hi[0], lo[0]);
    product_split_pair(make_float2(q.v[2], q.v[3]), hi[1], lo[1]);
    at[0] = hi[0];
    at[2] = lo[0];
    at[4] = hi[1];
    at[6] = lo[1];
}

// A thread has the same columns of every vector, a quad at most. Past the last vector it is loaded again.
static __device__ __forceinline__ void product_split_even(const cuda_product &p, const product_vectors_memory &to) {
    constexpr int AHEAD = 4;
    const uint32_t k = threadIdx.x * CUDA_QUAD, cols = (uint32_t)p.cols;
    uint32_t *const at = (uint32_t *)to.word + product_quad_place(k);
    const float *const x = p.x + k;
    if (k >= cols)
        return;
    if (to.vectors == 1) {
        const float4 q = product_load_quad(x);
        product_put_quad(at, {{q.x, q.y, q.z, q.w}});
        return;
    }
#pragma unroll 1
    for (int32_t v0 = 0; v0 < to.vectors; v0 += AHEAD) {
        float4 q[AHEAD];
#pragma unroll
        for (int j = 0; j < AHEAD; j++)
            q[j] = product_load_quad(x + (uint32_t)min(v0 + j, to.vectors - 1) * cols);
#pragma unroll
        for (int j = 0; j < AHEAD; j++)
            if (v0 + j < to.vectors)
                product_put_quad(at + (v0 + j) * to.stride * 16, {{q[j].x, q[j].y, q[j].z, q[j].w}});
    }
}

// A thread's share in the norms: the same columns of a group of every vector, or of every other one. Teams of lanes
// are a group's, as many as the next power of two of the groups to a vector.
struct product_norm_share {
    int32_t vector0, step;
    uint32_t at[PRODUCT_QUADS], place[PRODUCT_QUADS]; // of the first vector: among the inputs, in shared memory
    bool there[PRODUCT_QUADS];
    float4 weight[PRODUCT_QUADS];
};
static __device__ __forceinline__ product_norm_share product_norm_share_of(const cuda_norm &n, int32_t lanes_log2,
                                                                           int32_t groups_log2, int32_t stride) {
    const uint32_t team = threadIdx.x >> lanes_log2, lanes = 1u << lanes_log2;
    const uint32_t group = team & ((1u << groups_log2) - 1), width = (uint32_t)n.width;
    product_norm_share own;
    own.vector0 = group < (uint32_t)n.groups ? (int32_t)(team >> groups_log2) : INT32_MAX;
    own.step = (PRODUCT_THREADS >> lanes_log2) >> groups_log2;
    const float *weight = n.group_weights ? n.weight + group * width : n.weight;
#pragma unroll
    for (uint32_t k = 0; k < PRODUCT_QUADS; k++) {
        const uint32_t column = ((threadIdx.x & (lanes - 1)) + k * lanes) * CUDA_QUAD;
        own.at[k] = (team >> groups_log2) * (uint32_t)(n.groups * n.width) + group * width + column;
        own.place[k] = (team >> groups_log2) * (uint32_t)stride * 16 + product_quad_place(group * width + column);
        product_keep(own.at[k]);
        product_keep(own.place[k]);
        own.there[k] = group < (uint32_t)n.groups && column < width;
        own.weight[k] = make_float4(1, 1, 1, 1);
        if (n.weight && own.there[k])
            own.weight[k] = product_load_quad(weight + column);
    }
    return own;
}

// Weight, offset and gate of four columns.
static __device__ __forceinline__ cuda_quad product_norm_factor(const cuda_norm &n, const float4 &weight,
                                                                const float4 &gate) {
    cuda_quad factor = {{weight.x, weight.y, weight.z, weight.w}};
    const float z[CUDA_QUAD] = {gate.x, gate.y, gate.z, gate.w};
    if (n.weight)
#pragma unroll
        for (int j = 0; j < CUDA_QUAD; j++)
            factor.v[j] = __fadd_rn(factor.v[j], n.offset);
    if (n.gate)
#pragma unroll
        for (int j = 0; j < CUDA_QUAD; j++) {
            const float sigmoid = cuda_sigmoid(z[j]);
            factor.v[j] = __fmul_rn(factor.v[j], n.activation == KERN_SILU ? __fmul_rn(z[j], sigmoid) : sigmoid);
        }
    return factor;
}

// The sum over the lanes of a group: lanes by halving, warps in order. shared: a float a warp of the block.
static __device__ __forceinline__ float product_lanes_sum(float x, int32_t lanes_log2, float *shared) {
    const uint32_t warp = threadIdx.x / CUDA_WARP, team = threadIdx.x >> lanes_log2;
    x = cuda_warp_sum(x);
    if (lanes_log2 == 5)
        return x;
    if (threadIdx.x % CUDA_WARP == 0)
        shared[warp] = x;
    cuda_team_of((int32_t)team, 1 << lanes_log2).sync();
    const float4 *of = (const float4 *)(shared + (team << (lanes_log2 - 5)));
    const float4 sums = of[0], more = of[lanes_log2 == 8 ? 1 : 0];
    x = __fadd_rn(__fadd_rn(__fadd_rn(sums.x, sums.y), sums.z), sums.w);
    return lanes_log2 == 8 ? __fadd_rn(__fadd_rn(__fadd_rn(__fadd_rn(x, more.x), more.y), more.z), more.w) : x;
}

// y is written by one block. As cuda_normalise.
static __device__ __forceinline__ void product_normalise_even(const cuda_norm &n, int32_t lanes_log2,
                                                              const product_norm_share &own,
                                                              const product_vectors_memory &to) {
    __shared__ __align__(16) float sums[2][PRODUCT_SPLIT];
    uint32_t further = 0, behind = 0;
#pragma unroll 1
    for (int32_t v = own.vector0, turn = 0; v < to.vectors; v += own.step, turn ^= 1) { // whole teams
        float4 x[PRODUCT_QUADS] = {}, gate[PRODUCT_QUADS] = {};
#pragma unroll
        for (int k = 0; k < PRODUCT_QUADS; k++)
            if (own.there[k])
                x[k] = product_load_quad(n.x + (own.at[k] + further));
#pragma unroll
        for (int k = 0; k < PRODUCT_QUADS; k++)
            if (own.there[k] && n.gate) // no branch around both: they are to be in flight with x
                gate[k] = product_load_quad(n.gate + (own.at[k] + further));
        float squares = 0;
#pragma unroll
        for (int k = 0; k < PRODUCT_QUADS; k++)
            squares = fmaf(x[k].w, x[k].w, fmaf(x[k].z, x[k].z, fmaf(x[k].y, x[k].y, fmaf(x[k].x, x[k].x, squares))));
        squares = product_lanes_sum(squares, lanes_log2, sums[turn]);
        const float rstd = 1.0f / sqrtf(__fadd_rn(__fdiv_rn(squares, n.divisor), n.eps));
#pragma unroll
        for (int k = 0; k < PRODUCT_QUADS; k++)
            if (own.there[k]) {
                const cuda_quad u = {{x[k].x, x[k].y, x[k].z, x[k].w}};
                const cuda_quad y = cuda_norm_output(u, product_norm_factor(n, own.weight[k], gate[k]), 0, rstd);
                product_put_quad((uint32_t *)to.word + (own.place[k] + behind), y);
                if (blockIdx.x == 0)
                    cuda_store(n.y + (own.at[k] + further), y, CUDA_QUAD, true);
            }
        further += (uint32_t)(own.step * n.groups * n.width);
        behind += (uint32_t)(own.step * to.stride) * 16;
    }
}

// --------------------------------------------------------------------------------------------------------------- items

// An item: a part and which of its row tiles. A gated product's is of parts 0 and 1 alike.
static __device__ __forceinline__ product_place product_find_even(const product_facts &facts, int32_t item) {
    int own = 0;
#pragma unroll
    for (int i = 1; i < CUDA_PARTS; i++)
        own += item >= facts.first[i];
    return {own, item - facts.first[own]};
}

template <int WARPS, int HELD>
static __device__ __forceinline__ void product_load_even(const cuda_product_part &part, int32_t item, uint32_t warp,
                                                         uint4 (&a)[HELD]) {
    const uint64_t tile = (uint64_t)((uint32_t)part.row0 / PRODUCT_TILE + item) * (WARPS * HELD);
    const uint4 *from = (const uint4 *)part.weight + tile * 32 + (warp * (HELD * 32) + threadIdx.x % 32);
#pragma unroll
    for (int i = 0; i < HELD; i++)
        a[i] = product_load_tile(from + i * 32);
}

// A thread's output and what is added to it; vector: negative: none.
struct product_output {
    float *y;
    const float *residual;
    float bias;
    int32_t vector;
    bool biased;
};
static __device__ __forceinline__ product_output product_output_of(const cuda_product_part &part, int32_t item,
                                                                   uint32_t thread, int32_t vectors) {
    const int32_t n = (int32_t)(thread / PRODUCT_TILE), skipped = (int32_t)((uint32_t)part.row0 % PRODUCT_TILE);
    const int32_t row = item * PRODUCT_TILE + (int32_t)(thread % PRODUCT_TILE) - skipped;
    const bool there = n < vectors && row >= 0 && row < part.rows;
    const int32_t at = n * part.rows + row;
    product_output own = {part.y + at, NULL, 0, there ? n : -1, part.bias != NULL};
    if (there && part.residual)
        own.residual = part.residual + at;
    if (there && part.bias)
        own.bias = *cuda_in_global(part.bias + part.row0 + row);
    return own;
}
static __device__ __forceinline__ float product_load_residual(const product_output &own) {
    return own.residual ? *cuda_in_global(own.residual) : 0;
}

// As product_value.
static __device__ __forceinline__ float product_value_even(const cuda_product &p, bool plain, const product_output &own,
                                                           float y, float residual) {
    y = own.biased ? y + own.bias : y;
    y = own.residual ? y + residual : y;
    if (!plain) {
        if (p.finite && !isfinite(y))
            p.finite[own.vector] = 0; // whoever writes writes the same
        y = p.soft_cap > 0 ? p.soft_cap * tanhf(y / p.soft_cap) : y;
    }
    *cuda_in_global(own.y) = y;
    return y;
}

template <int HELD>
static __device__ __forceinline__ void product_multiply_even(const uint4 (&a)[HELD], const uint4 *vector, bool fast,
                                                             float (&sum)[4]) {
    uint4 x[HELD];
#pragma unroll
    for (int i = 0; i < HELD; i++)
        x[i] = vector[i * 4];
    if (fast) {
#pragma unroll
        for (int i = 0; i < HELD; i++)
            product_multiply(sum, a[i], x[i].x, x[i].y);
        return;
    }
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        product_multiply(sum, a[i], x[i].x, x[i].y);
        product_multiply(sum, a[i], x[i].z, x[i].w);
    }
}

// The sums of an item: of an output the warps' side by side, no bank conflicts.
template <int WARPS> struct product_sums {
    static constexpr int STRIDE = WARPS + 4, FLOATS = PRODUCT_VECTORS * PRODUCT_TILE * STRIDE;

    static __device__ __forceinline__ uint32_t place_of(uint32_t lane) {
        return (lane % 4 * 2 * PRODUCT_TILE + lane / 4) * STRIDE;
    }
    static __device__ __forceinline__ void put(const float (&sum)[4], float *to) {
        to[0] = sum[0];
        to[8 * STRIDE] = sum[2];
        to[PRODUCT_TILE * STRIDE] = sum[1];
        to[(PRODUCT_TILE + 8) * STRIDE] = sum[3];
    }
    // In the warps' order.
    static __device__ __forceinline__ float add(const float *from) {
        const float4 *at = (const float4 *)from;
        float4 some[WARPS / 4];
#pragma unroll
        for (int i = 0; i < WARPS / 4; i++)
            some[i] = at[i];
        float total = some[0].x + some[0].y + some[0].z + some[0].w;
#pragma unroll
        for (int i = 1; i < WARPS / 4; i++)
            total = total + some[i].x + some[i].y + some[i].z + some[i].w;
        return total;
    }
};
// Floats of the sums of a block's teams, two turns of them.
static constexpr __host__ __device__ __forceinline__ int product_even_floats(int sides) {
    return 2 * sides * 2 * product_sums<8>::FLOATS;
}

// The items of a block, as product_few; a team's first item is blockIdx.x + its number * gridDim.x. partial: of the
// block, product_even_floats; split: product_vectors_bytes.
template <int WARPS, int HELD, bool GATED, bool NORM, typename Await>
static __device__ __forceinline__ void product_few_even(const cuda_table *table, const cuda_product &p,
                                                        const product_facts &facts, int32_t items, float *partial,
                                                        void *split, const Await &await) {
    constexpr int SIDES = GATED ? 2 : 1;
    using Sums = product_sums<WARPS>;
    constexpr uint32_t SIZE = WARPS * 32 * SIDES; // of a team
    const uint32_t lane = threadIdx.x % 32, thread = threadIdx.x % SIZE, team = threadIdx.x / SIZE;
    const uint32_t side = GATED ? thread / (WARPS * 32) : 0, warp = thread / 32 % WARPS;
    const int32_t stride = (int32_t)(PRODUCT_THREADS / SIZE * gridDim.x);
    int32_t item = (int32_t)(blockIdx.x + team * gridDim.x);
    product_place at = {0, 0};
    uint4 a[HELD] = {};
    if (item < items) {
        at = GATED ? product_place{0, item} : product_find_even(facts, item);
        product_load_even<WARPS>(p.part[at.own + side], at.item, warp, a);
    }
    const cuda_norm n = p.norm;
    const int32_t lanes_log2 = facts.lanes_log2;
    product_norm_share norm;
    if (NORM)
        norm = product_norm_share_of(n, lanes_log2, facts.groups_log2, WARPS * HELD + 1);
    const int32_t vectors = product_vectors(table, p), own = (int32_t)(lane / 4);
    const product_vectors_memory all = {(uint4 *)split, NORM ? table->n_tokens : vectors, WARPS * HELD + 1};
    const int32_t vector = own < vectors ? own : 0; // lanes without a vector sum the first again, for nobody
    const int32_t source = NORM && vectors > 0 ? product_source(table, p, vector) : vector;
    uint32_t mine = (uint32_t)(source * all.stride) * 4 + warp * (HELD * 4) + lane % 4;
    uint32_t mine_put = side * Sums::FLOATS + warp + Sums::place_of(lane), mine_add = thread * Sums::STRIDE;
    product_output out[SIDES];
#pragma unroll
    for (int s = 0; s < SIDES; s++)
        out[s] = product_output_of(p.part[at.own + s], at.item, thread, item < items ? vectors : 0);
    partial += team * (2 * SIDES * Sums::FLOATS);
    const bool fast = p.fast, plain = facts.plain;
    const int32_t activation = p.activation;
    float *const gated = p.gated;
    const float *const gate_y = p.part[0].y;
    product_keep(mine);
    product_keep(mine_put);
    product_keep(mine_add);
    await();
    if (vectors <= 0)
        return;
    float residual[SIDES];
#pragma unroll
    for (int s = 0; s < SIDES; s++)
        residual[s] = product_load_residual(out[s]);
    if (NORM)
        product_normalise_even(n, lanes_log2, norm, all);
    else
        product_split_even(p, all);
    __syncthreads();
#pragma unroll 1
    for (int turn = 0; item < items; turn ^= 1) {
        float sum[4] = {}, *now = partial + turn * (SIDES * Sums::FLOATS);
        product_multiply_even(a, all.word + mine, fast, sum);
        item += stride;
        if (item < items) {
            at = GATED ? product_place{0, item} : product_find_even(facts, item);
            product_load_even<WARPS>(p.part[at.own + side], at.item, warp, a);
        }
        if ((int32_t)(lane % 4 * 2) < vectors)
            Sums::put(sum, now + mine_put);
        cuda_team<SIZE>::sync();
        if (out[0].vector >= 0) {
            float y[SIDES];
#pragma unroll
            for (int s = 0; s < SIDES; s++)
                y[s] = Sums::add(now + s * Sums::FLOATS + mine_add);
#pragma unroll
            for (int s = 0; s < SIDES; s++)
                y[s] = product_value_even(p, plain, out[s], y[s], residual[s]);
            if (GATED)
                gated[out[0].y - gate_y] = cuda_activate(activation, y[0]) * y[SIDES - 1];
        }
        if (item >= items)
            break;
#pragma unroll
        for (int s = 0; s < SIDES; s++) {
            out[s] = product_output_of(p.part[at.own + s], at.item, thread, vectors);
            residual[s] = product_load_residual(out[s]);
        }
    }
}

#endif
