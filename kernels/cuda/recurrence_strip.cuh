// SPDX-License-Identifier: Apache-2.0
// A strip of a state in the recurrence's chunk form: 16 columns, transposed, so that a lane has two of them and its
// elements are those of split_block: rows are columns of the state, columns are channels or tokens. What becomes of the
// sums of each product, tile by tile; whoever makes the sums, a warpgroup of four strips (recurrence_chunk.cu) or four
// warps of one strip (recurrence_team.cuh), the bits are the same.
#ifndef KERNELS_CUDA_RECURRENCE_STRIP_CUH
#define KERNELS_CUDA_RECURRENCE_STRIP_CUH

#include "kernels/cuda/recurrence_chunk.cuh"

struct recurrence_strip {
    int32_t lane, state, column[2]; // columns of the lane's two rows
    bool exists[2], reads[2];       // reads: from v
    bool whole;                     // all 16 columns exist
    float constant[2];              // else: 1 of the unit column
    float skip[2];
};
static __device__ __forceinline__ recurrence_strip recurrence_strip_of(const recurrence &a, int32_t state,
                                                                       int32_t number) {
    recurrence_strip strip;
    strip.lane = threadIdx.x % CUDA_WARP;
    strip.state = state;
    strip.whole = (number + 1) * SPLIT_TILE <= a.columns;
    for (int r = 0; r < 2; r++) {
        strip.column[r] = number * SPLIT_TILE + split_row(strip.lane, 2 * r);
        strip.exists[r] = strip.column[r] < a.columns;
        strip.reads[r] = strip.column[r] < a.width;
        strip.constant[r] = strip.exists[r] ? 1.0f : 0.0f;
        strip.skip[r] = recurrence_skip(a, state, 0, strip.column[r]);
    }
    return strip;
}

// Calls use(half, element, number of its column in a tile) for a lane's elements.
template <typename Use> static __device__ __forceinline__ void strip_each(const recurrence_strip &strip, Use use) {
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            use(half, i, split_column(strip.lane, half, i));
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// ------------------------------------------------------------------------------------------------------------- memory

// Elements of channels of tile n of S^T, from or to the state (D, V') of the row.
template <typename Use>
static __device__ __forceinline__ void strip_places(const recurrence &a, const recurrence_strip &strip, int n,
                                                    Use use) {
    strip_each(strip, [&](int half, int i, int32_t column) {
        const int32_t d = n * SPLIT_TILE + column;
        if (d < a.depth && strip.exists[i / 2])
            use(half, i, (int64_t)d * a.columns + strip.column[i / 2]);
    });
}

// Calls use(half, column of two, whether that token exists, where its row begins) for a lane's tokens of tile n; rows
// lie `stride` floats apart. What does not exist begins at 0.
template <typename Use>
static __device__ __forceinline__ void strip_tokens(const recurrence_strip &strip, const kern_chunk &chunk,
                                                    int32_t stride, int n, Use use) {
    const int32_t token = n * SPLIT_TILE + split_column(strip.lane, 0, 0);
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const bool exists = token + 8 * half + c < chunk.length;
            use(half, c, exists, exists ? (token + 8 * half + c) * stride : 0);
        }
}
// A tile of tokens from rows (token, columns), zeros where there is none; columns that are not to be read are
// `constant`. What does not exist is read from where something does: no branch parts the loads.
static __device__ __forceinline__ void strip_load(const recurrence_strip &strip, const kern_chunk &chunk,
                                                  const float *rows, int32_t stride, const bool (&reads)[2],
                                                  const float (&constant)[2], int n, split_block &x) {
    const float *first = rows + (reads[0] ? strip.column[0] : 0), *second = first + (reads[1] ? 8 : 0);
    strip_tokens(strip, chunk, stride, n, [&](int half, int c, bool exists, int32_t at) {
        float one = first[at], other = second[at];
        cuda_wgmma_hold(one), cuda_wgmma_hold(other); // else every load gets a branch of its own
        x.v[half][c] = exists ? reads[0] ? one : constant[0] : 0;
        x.v[half][2 + c] = exists ? reads[1] ? other : constant[1] : 0;
    });
}
// Asks for what strip_load reads, of `columns` floats a row.
static __device__ __forceinline__ void strip_ask(const recurrence_strip &strip, const kern_chunk &chunk,
                                                 const float *rows, int32_t stride, int32_t columns) {
    const int32_t column = strip.column[0] - strip.lane / 4 + strip.lane % 2 * (SPLIT_TILE / 2);
    for (int32_t token = strip.lane / 2; token < chunk.length && column < columns; token += CUDA_WARP / 2)
        cuda_prefetch(rows + token * stride + column);
}
// The other way, tiles from tile `first` on.
template <int N>
static __device__ __forceinline__ void strip_put(const recurrence_strip &strip, const kern_chunk &chunk, float *rows,
                                                 int32_t stride, int first, const split_block (&x)[N]) {
    float *to = rows + strip.column[0];
    const auto put = [&](auto some) {
#pragma unroll
        for (int n = 0; n < N; n++)
            strip_tokens(strip, chunk, stride, first + n, [&](int half, int c, bool exists, int32_t at) {
#pragma unroll
                for (int r = 0; r < 2; r++)
                    if (!some.value || (exists && strip.exists[r]))
                        to[at + 8 * r] = x[n].v[half][2 * r + c];
            });
    };
    if (strip.whole && chunk.length == CHUNK)
        put(std::false_type());
    else
        put(std::true_type());
}

// V^T.
static __device__ __forceinline__ void strip_values(const recurrence &a, const recurrence_strip &strip,
                                                    const kern_chunk &chunk, int n, split_block &v) {
    strip_load(strip, chunk, recurrence_value(a, chunk.token0, strip.state), (int32_t)(a.values * a.width), strip.reads,
               strip.constant, n, v);
}

// O^T with what skips the state, tiles from tile `first` on.
template <int N>
static __device__ __forceinline__ void strip_store(const recurrence &a, const recurrence_strip &strip,
                                                   const kern_chunk &chunk, int first, split_block (&o)[N]) {
    if (a.skip_width)
#pragma unroll
        for (int n = 0; n < N; n++) {
            split_block v;
            strip_values(a, strip, chunk, first + n, v);
            strip_each(strip, [&](int half, int i, int32_t) {
                o[n].v[half][i] = fmaf(strip.skip[i / 2], v.v[half][i], o[n].v[half][i]);
            });
        }
    strip_put(strip, chunk, recurrence_output(a, chunk.token0, strip.state, 0), (int32_t)(a.outputs * a.columns), first,
              o);
}

// --------------------------------------------------------------------------------------------------------- the algebra

// The errors of the delta rule, V^T - e^c S^T K^T, in place of V^T.
template <int D, bool CHANNEL, int LIMBS>
static __device__ __forceinline__ void strip_errors(const recurrence_record<D, CHANNEL, LIMBS> &record,
                                                    const recurrence_strip &strip, int n, const split_block &sum,
                                                    const split_powers &powers, split_block &u) {
    strip_each(strip, [&](int half, int i, int32_t column) {
        const float start = record.key_start[n * SPLIT_TILE + column];
        u.v[half][i] = fmaf(-(sum.v[half][i] * powers.row[i / 2].inverse), start, u.v[half][i]);
    });
}
// U^T by the delta rule, from the errors times T.
template <int D, bool CHANNEL, int LIMBS>
static __device__ __forceinline__ void strip_solved(const recurrence_record<D, CHANNEL, LIMBS> &record,
                                                    const recurrence_strip &strip, int n, const split_block &sum,
                                                    const split_powers &powers, split_block &u) {
    strip_each(strip, [&](int half, int i, int32_t) {
        u.v[half][i] = sum.v[half][i] * powers.row[i / 2].inverse * record.system_inverse[n];
    });
}
// U^T times factors of its tokens.
static __device__ __forceinline__ void strip_weigh(const recurrence_strip &strip, int n, const float *factor,
                                                   split_block &u) {
    strip_each(strip, [&](int half, int i, int32_t column) { u.v[half][i] *= factor[n * SPLIT_TILE + column]; });
}
// O^T without what skips the state: from S^T Q^T, then from U^T P^T.
template <int D, bool CHANNEL, int LIMBS>
static __device__ __forceinline__ void strip_read_state(const recurrence_record<D, CHANNEL, LIMBS> &record, float scale,
                                                        const recurrence_strip &strip, int n, const split_block &sum,
                                                        const split_powers &powers, split_block &o) {
    strip_each(strip, [&](int half, int i, int32_t column) {
        const float start = record.query_start[n * SPLIT_TILE + column] * scale;
        o.v[half][i] = sum.v[half][i] * powers.row[i / 2].inverse * start;
    });
}
template <int D, bool CHANNEL, int LIMBS>
static __device__ __forceinline__ void strip_read_chunk(const recurrence_record<D, CHANNEL, LIMBS> &record, float scale,
                                                        const recurrence_strip &strip, int n, const split_block &sum,
                                                        const split_powers &powers, split_block &o) {
    strip_each(strip, [&](int half, int i, int32_t) {
        const float own = powers.row[i / 2].inverse * scale * record.pairs_inverse[n];
        o.v[half][i] = fmaf(sum.v[half][i], own, o.v[half][i]);
    });
}
// S^T over the chunk, from what is written.
template <int D, bool CHANNEL, int LIMBS>
static __device__ __forceinline__ void strip_advance(const recurrence_record<D, CHANNEL, LIMBS> &record,
                                                     const recurrence_strip &strip, int n, const split_block &sum,
                                                     const split_powers &powers, split_block &s) {
    strip_each(strip, [&](int half, int i, int32_t column) {
        const float m1 = record.whole_m1[CHANNEL ? n * SPLIT_TILE + column : 0], x = s.v[half][i];
        s.v[half][i] = fmaf(sum.v[half][i], powers.row[i / 2].inverse, m1 > -1 ? fmaf(m1, x, x) : 0);
    });
}

// ------------------------------------------------------------------------------------------------------ a warpgroup's

// What is written to the state, x (a tile of tokens each) times rows of `keys`: write(n, sum, powers) has the channels
// of tile n.
template <int D, int LIMBS, typename Write>
static __device__ __forceinline__ void strip_write(const split_block (&x)[CHUNK_TILES],
                                                   const split_matrix<LIMBS, CHUNK, D> &keys, Write write) {
    constexpr int AT_ONCE = LIMBS == 1 ? D / SPLIT_TILE : CHUNK_TILES; // tiles, as registers allow
    split_left<LIMBS> left[CHUNK_TILES];
    split_powers powers;
    split_strip(x, powers, left);
#pragma unroll
    for (int first = 0; first < D / SPLIT_TILE; first += AT_ONCE) {
        split_group<LIMBS, AT_ONCE> sum;
        split_group_turned(sum, left, keys, first);
        split_group_wait<0>(sum, left);
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++)
            write(first + n, split_totals(sum, n), powers);
    }
}

#endif

constexpr int GROUP_STRIPS = 4, GROUP_THREADS = GROUP_STRIPS * CUDA_WARP, STATES_GROUPS = 2; // of a block, at most

// Warpgroups of a block, and with them the slices of a state: one where the processors are not all busy then, else
// those of a state share the records.
static inline int recurrence_groups(const cuda_step *step, int32_t rows, recurrence &a) {
    const int32_t slices = (a.columns + CHUNK - 1) / CHUNK;
    const bool few = (int64_t)rows * a.states * slices <= step->cuda->processors;
    const int groups = few || slices == 1 ? 1 : STATES_GROUPS;
    a.slices = (slices + groups - 1) / groups;
    return groups;
}

#endif
