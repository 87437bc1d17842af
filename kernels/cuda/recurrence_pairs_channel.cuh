// SPDX-License-Identifier: Apache-2.0
// The gradients of one chunk of a state by a block (recurrence_pairs.cuh) where every key channel decays by itself:
//
//   dQ_id = scale e^(c_id) (dO S^T)_id + sum_j Z_ij E_ijd k_jd
//   R_id = e^(c_id) (M S^T)_id + sum_(j<i) (M U^T)_ij E_ijd k_jd      dw_i = V_i.M_i - k_i.R_i
//   dK_id = e^(c_Cd - c_id) (U G^T)_id + sum_j Z_ji E_jid q_jd - w_i R_id - sum_(j>i) w_j (M U^T)_ji E_jid k_jd
//
// R by the delta rule alone. Sums between blocks of 16 tokens are products on the tensor cores: E is cut where the
// earlier block ends and where the later one begins, and whole blocks between them are a factor of the channel. Inside
// a block a thread has a channel and runs through its pairs of tokens.
#ifndef KERNELS_CUDA_RECURRENCE_PAIRS_CHANNEL_CUH
#define KERNELS_CUDA_RECURRENCE_PAIRS_CHANNEL_CUH

#include "kernels/cuda/recurrence_pairs.cuh"

template <int D, int LIMBS> struct alignas(128) pairs_channel_shared {
    typedef float rows[CHUNK][D + 4]; // neighbouring rows in different banks

    struct block_operands { // to the end, and from the beginning of a token's block
        split_tile<LIMBS> k_end[CHUNK_TILES][D / SPLIT_TILE], q_begin[CHUNK_TILES][D / SPLIT_TILE];
        split_tile<LIMBS> k_begin[CHUNK_TILES][D / SPLIT_TILE];
    };
    struct block_results { // of the pairs inside a block
        rows dq, answers, dk;
    };
    union {
        pairs_slab<D, LIMBS> slab;
        block_operands operand; // behind the last slab
        block_results result;   // behind the last product
    };
    pairs_operands<LIMBS> pair;
    rows high;                                                // c inside its block, inclusive
    float z[CHUNK][SPLIT_TILE + 1], y[CHUNK][SPLIT_TILE + 1]; // blocks on the diagonal
    chunk_decay decay;                                        // `first` alone
    float weight[CHUNK], value[CHUNK], answers[PAIRS_PARTS][CHUNK];
    float k_end_inverse[CHUNK], q_begin_inverse[CHUNK], k_begin_inverse[CHUNK];
    float largest[4][PAIRS_WARPS], through[D];
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// The sum of decays over blocks [first, last).
template <int D, int LIMBS>
static __device__ __forceinline__ float pairs_blocks(const pairs_channel_shared<D, LIMBS> &shared, int32_t first,
                                                     int32_t last, int32_t d) {
    float sum = 0;
    for (int32_t n = first; n < last; n++)
        sum += shared.high[n * SPLIT_TILE + SPLIT_TILE - 1][d];
    return sum;
}
// From token i to the end of its block.
template <int D, int LIMBS>
static __device__ __forceinline__ float pairs_rest(const pairs_channel_shared<D, LIMBS> &shared, int32_t i, int32_t d) {
    return shared.high[i / SPLIT_TILE * SPLIT_TILE + SPLIT_TILE - 1][d] - shared.high[i][d];
}

// use(token, first channel of two, number of the pair in a row of the warp's channels, r).
template <int D, typename Use> static __device__ __forceinline__ void pairs_elements(const pairs_job &j, Use use) {
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
        for (int n = 0; n < 2 * pairs_sums<D>::TILES; n++)
            use(pairs_token(j, 2 * r), j.part * pairs_sums<D>::TILES * SPLIT_TILE + split_column(j.lane, 0, 0) + n * 8,
                n, r);
}
template <int D>
static __device__ __forceinline__ float2 pairs_row_two(const gradients_group &group, const pairs_job &j, bool queries,
                                                       int32_t token, int32_t d) {
    const recurrence &a = group.b.a;
    const int64_t t = j.chunk.token0 + token;
    const float *row = queries ? recurrence_query(a, t, j.state, 0) : recurrence_key(a, t, j.state);
    return pairs_two(row + d, token < j.chunk.length ? a.depth - d : 0, j.whole);
}

// ---------------------------------------------------------------------------------------------------- its beginning

template <int D, int LIMBS>
static __device__ __forceinline__ void pairs_channel_begin(const gradients_group &group, const pairs_job &j,
                                                           pairs_channel_shared<D, LIMBS> &shared) {
    const recurrence &a = group.b.a;
    __syncthreads();
    if (threadIdx.x < CUDA_WARP)
        chunk_sum_decays(j.table, j.chunk, shared.decay, [](int32_t) { return 0.0f; });
    for (int32_t i = threadIdx.x; i < CHUNK; i += PAIRS_THREADS)
        shared.weight[i] = i < j.chunk.length ? recurrence_weight(a, j.chunk.token0 + i, j.state) : 0;
    for (int32_t at = threadIdx.x; at < CHUNK_TILES * D; at += PAIRS_THREADS) {
        const int32_t i0 = at / D * SPLIT_TILE, d = at % D;
        double sum = 0;
        for (int32_t i = i0; i < i0 + SPLIT_TILE; i++) {
            if (i < j.chunk.length && d < a.depth)
                sum += (double)recurrence_channel_decay(a, j.chunk.token0 + i, j.state)[d];
            shared.high[i][d] = (float)sum;
        }
    }
    __syncthreads();
}

// Where what a token gives to the state's end, U G^T with its decays, waits: in dg.
static __device__ __forceinline__ float *pairs_waiting(const gradients_group &group, const pairs_job &j, int32_t token,
                                                       int32_t d) {
    const recurrence &a = group.b.a;
    const bool exists = token < j.chunk.length && d < a.depth;
    return exists ? group.b.dg + ((int64_t)(j.chunk.token0 + token) * a.states + j.state) * a.depth + d : NULL;
}

// The sums with the state's get their decays.
template <int D, bool DELTA, int LIMBS>
static __device__ __forceinline__ void pairs_channel_scale(const gradients_group &group, const pairs_job &j,
                                                           const pairs_channel_shared<D, LIMBS> &shared,
                                                           pairs_sums<D> &sums) {
    const int32_t length = j.chunk.length;
    pairs_elements<D>(j, [&](int32_t token, int32_t d, int n, int r) {
        const bool from_start = token < length && shared.decay.first[token] < 0;
        const bool to_end = token < length && token >= shared.decay.first[length - 1];
#pragma unroll
        for (int c = 0; c < 2; c++) {
            float &g = sums.to_g[n / 2].v[n % 2][2 * r + c];
            const float start =
                from_start ? expf(shared.high[token][d + c] + pairs_blocks(shared, 0, j.row, d + c)) : 0;
            const float end =
                to_end ? expf(pairs_rest(shared, token, d + c) + pairs_blocks(shared, j.row + 1, CHUNK_TILES, d + c))
                       : 0;
            sums.from_s[n / 2].v[n % 2][2 * r + c] *= group.b.a.scale * start;
            if (DELTA)
                sums.answers_s[n / 2].v[n % 2][2 * r + c] *= start;
            if (float *waiting = pairs_waiting(group, j, token, d + c))
                *waiting = g * end;
            g = 0;
        }
    });
}

// Keys and queries as operands of the products between blocks.
template <int D, int LIMBS>
static __device__ __forceinline__ void pairs_channel_operands(const gradients_group &group, const pairs_job &j,
                                                              bool delta, pairs_channel_shared<D, LIMBS> &shared) {
    constexpr int PARTS = PAIRS_THREADS / CHUNK;
    const recurrence &a = group.b.a;
    const int32_t token = threadIdx.x / PARTS, part = threadIdx.x % PARTS, tile = token / SPLIT_TILE;
    const int64_t t = j.chunk.token0 + token;
    const float *k = recurrence_key(a, t, j.state), *q = recurrence_query(a, t, j.state, 0);
    const auto put = [&](split_tile<LIMBS>(&tiles)[CHUNK_TILES][D / SPLIT_TILE], const float *x, bool end) {
        const bool wide = (uintptr_t)x % sizeof(float4) == 0;
        return chunk_put_row<D, PARTS>(tiles[tile], token % SPLIT_TILE, part, [&](int32_t d) {
            cuda_quad quad = cuda_load(x + d, token < j.chunk.length ? a.depth - d : 0, wide);
#pragma unroll
            for (int e = 0; e < 4; e++)
                quad.v[e] *= expf(end ? pairs_rest(shared, token, d + e) : shared.high[token][d + e]);
            return quad;
        });
    };
    const float k_end = put(shared.operand.k_end, k, true), q_begin = put(shared.operand.q_begin, q, false);
    const float k_begin = delta ? put(shared.operand.k_begin, k, false) : 0;
    if (part == 0) {
        shared.k_end_inverse[token] = k_end;
        shared.q_begin_inverse[token] = q_begin;
        shared.k_begin_inverse[token] = -shared.weight[token] * k_begin;
    }
}

// ------------------------------------------------------------------------------------------------------ between tokens

// Z and M U^T where documents allow; blocks on the diagonal go to shared memory, the largest of the others' operands.
template <int D, bool DELTA, int LIMBS>
static __device__ __forceinline__ void pairs_channel_mask(const gradients_group &group, const pairs_job &j,
                                                          pairs_channel_shared<D, LIMBS> &shared, pairs_sums<D> &sums) {
    float largest[4] = {0, 0, 0, 0};
#pragma unroll
    for (int n = 0; n < PAIRS_COLUMNS; n++) {
        const int32_t tile = n * PAIRS_PARTS + j.part;
        if (tile > j.row)
            continue;
        pairs_each([&](int half, int i) {
            const int32_t at = pairs_token(j, i), column = split_column(j.lane, half, i);
            const int32_t from = tile * SPLIT_TILE + column;
            const bool reads = at < j.chunk.length && from <= at && from >= shared.decay.first[at];
            float &z = sums.z[n].v[half][i], &y = sums.y[n].v[half][i];
            z = reads ? z * group.b.a.scale : 0;
            y = DELTA && reads && from < at ? y : 0;
            if (tile == j.row) {
                shared.z[at][column] = z;
                shared.y[at][column] = y;
                return;
            }
            largest[0] = fmaxf(largest[0], fabsf(z * shared.k_end_inverse[from]));
            largest[1] = fmaxf(largest[1], fabsf(z * shared.q_begin_inverse[at]));
            largest[2] = fmaxf(largest[2], fabsf(y * shared.k_end_inverse[from]));
            largest[3] = fmaxf(largest[3], fabsf(y * shared.k_begin_inverse[at]));
        });
    }
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const float all = cuda_warp_max(largest[n]);
        if (j.lane == 0)
            shared.largest[n][threadIdx.x / CUDA_WARP] = all;
    }
}

// sum += e^own sum over blocks of x times rows, with the decays of whole blocks between. The earlier blocks, x as it
// is, own: c; or the later ones, x turned, own: what is left of the block.
template <int D, int LIMBS>
static __device__ __forceinline__ void
pairs_between_blocks(const pairs_job &j, bool later, const split_tile<LIMBS> *x, float inverse,
                     const split_tile<LIMBS> (&rows)[CHUNK_TILES][D / SPLIT_TILE],
                     const pairs_channel_shared<D, LIMBS> &shared, split_block (&sum)[pairs_sums<D>::TILES]) {
#pragma unroll
    for (int c = 0; c < pairs_sums<D>::TILES; c++) {
        const int32_t tile = j.part * pairs_sums<D>::TILES + c;
        split_block all = {};
        for (int32_t n = later ? j.row + 1 : 0; n < (later ? CHUNK_TILES : j.row); n++) {
            split_sum<LIMBS> product = {};
            const split_left<LIMBS> left = later ? pairs_load_turned(x[chunk_lower(n, j.row)], j.lane)
                                                 : split_load_left(x[chunk_lower(j.row, n)], j.lane);
            split_multiply(product, left, split_load_turned(rows[n][tile], j.lane));
            pairs_each([&](int half, int i) {
                const int32_t d = tile * SPLIT_TILE + split_column(j.lane, half, i);
                const float between =
                    later ? pairs_blocks(shared, j.row + 1, n, d) : pairs_blocks(shared, n + 1, j.row, d);
                all.v[half][i] = fmaf(split_total(product, half, i), expf(between), all.v[half][i]);
            });
        }
        pairs_each([&](int half, int i) {
            const int32_t d = tile * SPLIT_TILE + split_column(j.lane, half, i), token = pairs_token(j, i);
            const float own = later ? pairs_rest(shared, token, d) : shared.high[token][d];
            sum[c].v[half][i] = fmaf(all.v[half][i] * inverse, expf(own), sum[c].v[half][i]);
        });
    }
}

// The pairs inside the blocks, a token with itself left out; a thread has a block and a channel at a time.
template <int D, bool DELTA, int LIMBS>
static __device__ __forceinline__ void pairs_inside_blocks(const gradients_group &group, const pairs_job &j,
                                                           pairs_channel_shared<D, LIMBS> &shared) {
    const recurrence &a = group.b.a;
    for (int32_t at = threadIdx.x; at < CHUNK_TILES * D; at += PAIRS_THREADS) {
        const int32_t i0 = at / D * SPLIT_TILE, d = at % D;
        float k[SPLIT_TILE], q[SPLIT_TILE], decay[SPLIT_TILE], dq[SPLIT_TILE] = {}, answers[SPLIT_TILE] = {};
#pragma unroll
        for (int i = 0; i < SPLIT_TILE; i++) {
            const int64_t t = j.chunk.token0 + i0 + i;
            const bool exists = i0 + i < j.chunk.length && d < a.depth;
            k[i] = exists ? recurrence_key(a, t, j.state)[d] : 0;
            q[i] = exists ? recurrence_query(a, t, j.state, 0)[d] : 0;
            decay[i] = exists ? expf(recurrence_channel_decay(a, t, j.state)[d]) : 0;
        }
#pragma unroll
        for (int from = 0; from < SPLIT_TILE; from++) {
            float e = 1, dk = 0;
#pragma unroll
            for (int i = 0; i < SPLIT_TILE; i++) {
                if (i <= from)
                    continue;
                e *= decay[i];
                const float z = e * shared.z[i0 + i][from];
                dq[i] = fmaf(z, k[from], dq[i]);
                dk = fmaf(z, q[i], dk);
                if (DELTA) {
                    const float y = e * shared.y[i0 + i][from];
                    answers[i] = fmaf(y, k[from], answers[i]);
                    dk = fmaf(-shared.weight[i0 + i] * y, k[i], dk);
                }
            }
            shared.result.dk[i0 + from][d] = dk;
        }
#pragma unroll
        for (int i = 0; i < SPLIT_TILE; i++) {
            shared.result.dq[i0 + i][d] = dq[i];
            if (DELTA)
                shared.result.answers[i0 + i][d] = answers[i];
        }
    }
}

// All together: dQ and dK go out. What flows between tokens, and what leaves them for the state's end, take dQ's and
// the answers' places in shared memory.
template <int D, bool DELTA, int LIMBS>
static __device__ __forceinline__ void pairs_channel_finish(const gradients_group &group, const pairs_job &j,
                                                            pairs_channel_shared<D, LIMBS> &shared,
                                                            pairs_sums<D> &sums) {
    float answers[2] = {0, 0};
    pairs_elements<D>(j, [&](int32_t token, int32_t d, int n, int r) {
        const float2 ks = pairs_row_two<D>(group, j, false, token, d), qs = pairs_row_two<D>(group, j, true, token, d);
        const float own = shared.z[token][token % SPLIT_TILE], weight = shared.weight[token];
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const float k = c ? ks.y : ks.x, q = c ? qs.y : qs.x;
            const float *waiting = pairs_waiting(group, j, token, d + c);
            const float to_end = waiting ? *waiting : 0;
            float &dq = sums.from_s[n / 2].v[n % 2][2 * r + c], &dk = sums.to_g[n / 2].v[n % 2][2 * r + c];
            dq += shared.result.dq[token][d + c];
            dk += shared.result.dk[token][d + c];
            float flow = fmaf(q, dq, -k * dk), answer = 0;
            if (DELTA)
                answer = sums.answers_s[n / 2].v[n % 2][2 * r + c] + shared.result.answers[token][d + c];
            flow = fmaf(-weight * k, answer, flow);
            answers[r] = fmaf(k, answer, answers[r]);
            dq = fmaf(own, k, dq);
            dk = fmaf(own, q, fmaf(-weight, answer, dk + to_end));
            shared.result.dq[token][d + c] = flow;
            shared.result.answers[token][d + c] = k * to_end;
        }
    });
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float answer = pairs_over_row(answers[r]);
        if (j.lane % 4 == 0)
            shared.answers[j.part][pairs_token(j, 2 * r)] = answer;
    }
    if (group.b.dq)
        pairs_store<D>(group, j, true, sums.from_s);
    pairs_store<D>(group, j, false, sums.to_g);
}

// dw of a token, dg of a channel by a thread each: what the tokens before it give to the state's end, what the state
// carries there, and what flows between tokens past it.
template <int D, int LIMBS>
static __device__ __forceinline__ void pairs_channel_scalars(const gradients_group &group, const pairs_job &j,
                                                             const pairs_channel_shared<D, LIMBS> &shared) {
    const recurrence_gradients &b = group.b;
    const int32_t length = j.chunk.length, at = threadIdx.x;
    const kern_row &row = j.table->row[j.chunk.row];
    if (b.dbeta && at < length) {
        float answer = shared.value[at];
        for (int part = 0; part < PAIRS_PARTS; part++)
            answer -= shared.answers[part][at];
        gradients_put(&b.dbeta[(int64_t)(j.chunk.token0 + at) * b.a.states + j.state], b.add, answer);
    }
    if (at >= b.a.depth)
        return;
    double leaves = 0, between = 0;
    if (shared.decay.first[length - 1] < 0)
        leaves = (double)(shared.through[at] * expf(pairs_blocks(shared, 0, CHUNK_TILES, at)));
    for (int32_t i = 0; i < length - 1; i++)
        leaves += (double)shared.result.answers[i][at];
    for (int32_t i = length - 1; i >= 0; i--) {
        const bool nothing = shared.decay.first[i] == i;
        const bool first = row.slot < 0 && j.chunk.token0 + i == row.token0;
        between = nothing ? 0 : between + (double)shared.result.dq[i][at];
        *pairs_waiting(group, j, i, at) = nothing || first ? 0 : (float)(leaves + between);
        if (i > 0)
            leaves -= (double)shared.result.answers[i - 1][at];
    }
}

template <int D, bool DELTA, int LIMBS>
static __device__ void pairs_channel_run(const cuda_table *table, const gradients_group &group, int64_t index,
                                         int32_t state, pairs_channel_shared<D, LIMBS> &shared) {
    constexpr int STATE_PARTS = PAIRS_THREADS / D;
    const pairs_job j = pairs_job_of(table, group, index, state, D);
    pairs_sums<D> sums = {};
    pairs_ask_all(group, j);
    pairs_channel_begin<D>(group, j, shared);
    pairs_slabs<D, DELTA>(group, j, shared.weight, shared.slab, sums);
    for (int distance = 1; distance < STATE_PARTS; distance *= 2)
        sums.through += __shfl_xor_sync(~0u, sums.through, distance);
    if (threadIdx.x % STATE_PARTS == 0)
        shared.through[threadIdx.x / STATE_PARTS] = sums.through;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float value = pairs_over_row(sums.value[r]);
        if (j.part == 0 && j.lane % 4 == 0)
            shared.value[pairs_token(j, 2 * r)] = value;
    }
    pairs_channel_scale<D, DELTA>(group, j, shared, sums);
    pairs_channel_operands<D>(group, j, DELTA, shared);
    __syncthreads();
    pairs_channel_mask<D, DELTA>(group, j, shared, sums);
    __syncthreads();
    const split_power z_columns = pairs_power(shared.largest[0]), z_rows = pairs_power(shared.largest[1]);
    const split_power y_columns = pairs_power(shared.largest[2]), y_rows = pairs_power(shared.largest[3]);
    pairs_put(j, sums.z, shared.k_end_inverse, shared.q_begin_inverse, z_columns, z_rows, shared.pair.z_columns,
              shared.pair.z_rows);
    if (DELTA)
        pairs_put(j, sums.y, shared.k_end_inverse, shared.k_begin_inverse, y_columns, y_rows, shared.pair.y_columns,
                  shared.pair.y_rows);
    __syncthreads();
    pairs_between_blocks<D>(j, false, shared.pair.z_columns, z_columns.inverse, shared.operand.k_end, shared,
                            sums.from_s);
    pairs_between_blocks<D>(j, true, shared.pair.z_rows, z_rows.inverse, shared.operand.q_begin, shared, sums.to_g);
    if (DELTA) {
        pairs_between_blocks<D>(j, false, shared.pair.y_columns, y_columns.inverse, shared.operand.k_end, shared,
                                sums.answers_s);
        pairs_between_blocks<D>(j, true, shared.pair.y_rows, y_rows.inverse, shared.operand.k_begin, shared, sums.to_g);
    }
    __syncthreads();
    pairs_inside_blocks<D, DELTA>(group, j, shared);
    __syncthreads();
    pairs_channel_finish<D, DELTA>(group, j, shared, sums);
    __syncthreads();
    pairs_channel_scalars<D>(group, j, shared);
}

#endif

#endif
