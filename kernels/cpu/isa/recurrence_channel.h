// SPDX-License-Identifier: Apache-2.0
// A decay for each key channel, inside a block of at most 16 tokens.
//
// alpha_i is the decay vector of token i: e^g, or 0 at a token that starts a document inside the block. Everything else
// is a product of alphas in one direction, so nothing is ever divided by a decay and no exponent is positive:
//   start_i = alpha_1 .. alpha_i                 from before the block to token i
//   end_j   = alpha_{j+1} .. alpha_n             from token j to the block's end
//   E_ij    = alpha_{j+1} .. alpha_i  (j <= i)   from token j to token i, kept running while i goes down the block
// A document's boundary needs no mask: the product is 0 across it. Over a whole block the decay of the state is taken
// as e^c - 1 from the sum c, because its rounding would add up over the blocks; inside a block it cannot.
//
// Arrays are (16, d) with d whole vectors; rows behind the block's length are finite where it is said.
#ifndef KERNELS_CPU_ISA_RECURRENCE_CHANNEL_H
#define KERNELS_CPU_ISA_RECURRENCE_CHANNEL_H

#include "kernels/cpu/isa/recurrence_chunk.h"

enum { CHANNEL_BLOCK = 16 };

// e^x - 1 for x <= 0, to a few ulp of the result.
static inline vf channel_expm1(vf x) {
    vf p = vf_set(1.0f / 362880);
    p = p * x + 1.0f / 40320;
    p = p * x + 1.0f / 5040;
    p = p * x + 1.0f / 720;
    p = p * x + 1.0f / 120;
    p = p * x + 1.0f / 24;
    p = p * x + 1.0f / 6;
    p = p * x + 0.5f;
    return vf_select(x > -0.6f, x + x * x * p, vf_exp(x) - 1.0f);
}

// gamma - 1 of one token's log decays g (depth), padding 0.
static inline void channel_decay_m1(const float *g, int depth, float *decay_m1) {
    for (int c = 0; c < depth; c += KERN_VL)
        vf_store(decay_m1 + c, channel_expm1(depth - c < KERN_VL ? vf_load_part(g + c, depth - c) : vf_load(g + c)));
}

// alpha, start, end (16, d; alpha behind the length 0), whole_m1 (d) from the log decays g + i * stride of token i.
static inline void channel_fill(const chunk_decay *documents, const float *g, int64_t stride, int depth, int d,
                                float *alpha, float *start, float *end, float *whole_m1) {
    const int n = documents->length;
    for (int c = 0; c < d; c += KERN_VL) {
        vf product = vf_set(1), sum = {0};
        for (int i = 0; i < n; i++) {
            const float *at = g + i * stride + c;
            vf log_decay = depth - c < KERN_VL ? vf_load_part(at, depth - c) : vf_load(at);
            vf decay = documents->first[i] == i ? (vf){0} : vf_exp(log_decay);
            sum += log_decay;
            product *= decay;
            vf_store(alpha + i * d + c, decay);
            vf_store(start + i * d + c, product);
        }
        for (int i = n; i < CHANNEL_BLOCK; i++)
            vf_store(alpha + i * d + c, (vf){0});
        product = vf_set(1);
        for (int i = n - 1; i >= 0; i--) {
            vf_store(end + i * d + c, product);
            product *= vf_load(alpha + i * d + c);
        }
        vf_store(whole_m1 + c, documents->first[n - 1] < 0 ? channel_expm1(sum) : vf_set(-1));
    }
}

#define CHANNEL_SUM_STAGE(row, s) \
    KERN_UNROLL                   \
    for (int i = 0; i < (s); i++) \
        row[i] = vf_mix_low(row[i], row[i + (s)], s) + vf_mix_high(row[i], row[i + (s)], s);

// Lane l of the result: the sum of the lanes of row[l]. KERN_VL rows, which are lost.
static inline __attribute__((always_inline)) vf channel_sums(vf *row) {
#if defined(KERN_ISA_AVX512)
    CHANNEL_SUM_STAGE(row, 8)
#endif
#if defined(KERN_ISA_AVX512) || defined(KERN_ISA_AVX2)
    CHANNEL_SUM_STAGE(row, 4)
#endif
    CHANNEL_SUM_STAGE(row, 2)
    CHANNEL_SUM_STAGE(row, 1)
    return row[0];
}

// Column j of x k^T * E, as a row of 16.
static inline __attribute__((always_inline)) void channel_column(const float *x, const float *k, const float *alpha,
                                                                 int d, const int j, float *column) {
    vf sum[CHANNEL_BLOCK];
    KERN_UNROLL
    for (int i = 0; i < CHANNEL_BLOCK; i++)
        sum[i] = (vf){0};
    for (int c = 0; c < d; c += KERN_VL) {
        vf decayed = vf_load(k + j * d + c);
        KERN_UNROLL
        for (int i = 0; i < CHANNEL_BLOCK; i++)
            if (i >= j) {
                if (i > j)
                    decayed *= vf_load(alpha + i * d + c);
                sum[i] += vf_load(x + i * d + c) * decayed;
            }
    }
    KERN_UNROLL
    for (int i = 0; i < CHANNEL_BLOCK; i += KERN_VL)
        vf_store(column + i, channel_sums(sum + i));
}

#define CHANNEL_4(f, j) f(j) f((j) + 1) f((j) + 2) f((j) + 3)
#define CHANNEL_16(f) CHANNEL_4(f, 0) CHANNEL_4(f, 4) CHANNEL_4(f, 8) CHANNEL_4(f, 12)

// out (16, ld) = scale x k^T * E, 0 above the diagonal. x, k (16, d).
static inline void channel_pairs(const float *x, const float *k, const float *alpha, int d, float scale, float *out,
                                 int ld) {
    float columns[CHANNEL_BLOCK * CHANNEL_BLOCK] __attribute__((aligned(64)));
#define COLUMN(j) channel_column(x, k, alpha, d, j, columns + (j)*CHANNEL_BLOCK);
    CHANNEL_16(COLUMN)
#undef COLUMN
    for (int i = 0; i < CHANNEL_BLOCK * CHANNEL_BLOCK; i += KERN_VL)
        vf_store(columns + i, vf_load(columns + i) * scale);
    gemm_transpose(CHANNEL_BLOCK, CHANNEL_BLOCK, columns, CHANNEL_BLOCK, out, ld);
}

// What flows between token j and the tokens after it, one vector of channels; dx: the readers' gradients.
static inline __attribute__((always_inline)) void channel_flow(const float *z, int ld, const float *x, const float *k,
                                                               const float *alpha, int d, const int j, vf *dx,
                                                               float *dk) {
    vf decay = vf_set(1), key = vf_load(k + j * d), sum = {0};
    KERN_UNROLL
    for (int i = 0; i < CHANNEL_BLOCK; i++)
        if (i > j) {
            decay *= vf_load(alpha + i * d);
            dx[i] += z[i * ld + j] * (decay * key);
            sum += decay * (z[i * ld + j] * vf_load(x + i * d));
        }
    vf_store(dk + j * d, vf_load(dk + j * d) + sum);
}

// Of the products out_ij = x_i k_j E_ij with gradients z_ij, j < i: dx_i += sum_j z_ij E_ij k_j, dk_j += sum_i z_ij
// E_ij x_i. All (16, d) and z (16, ld) hold zeros, or finite rows under zeros of z, behind the block's length.
static inline void channel_pair_gradients(const float *z, int ld, const float *x, const float *k, const float *alpha,
                                          int d, float *dx, float *dk) {
    for (int c = 0; c < d; c += KERN_VL) {
        vf sum[CHANNEL_BLOCK];
        KERN_UNROLL
        for (int i = 0; i < CHANNEL_BLOCK; i++)
            sum[i] = vf_load(dx + i * d + c);
#define FLOW(j) channel_flow(z, ld, x + c, k + c, alpha + c, d, j, sum, dk + c);
        CHANNEL_16(FLOW)
#undef FLOW
        KERN_UNROLL
        for (int i = 0; i < CHANNEL_BLOCK; i++)
            vf_store(dx + i * d + c, sum[i]);
    }
}

// Gradient of the log decays of a block. A decay scales all that flows from before its token to the token and after it:
// dg_i = through + what leaves the tokens before i for the state after the block + what arrives at the tokens from i
// on, less what departs from them. arrives (n, d): what token i takes from earlier tokens of the block and the state
// before it; dk_departs, dk_leave (n, d): the gradients of k by which token i gives to later tokens of the block, and
// to the state after it; through (d): from state to state. The sums close within the block (models.md 11.7). dg of a
// document's first token is 0. dg may be arrives.
static inline void channel_decay_gradient(const chunk_decay *documents, int d, const float *k, const float *arrives,
                                          const float *dk_departs, const float *dk_leave, const float *through,
                                          float *dg) {
    const int n = documents->length;
    for (int c = 0; c < d; c += KERN_VL) {
        vf sum = {0};
        for (int i = n - 1; i >= 0; i--) {
            const int at = i * d + c;
            sum += vf_load(arrives + at) - vf_load(k + at) * vf_load(dk_departs + at);
            if (documents->first[i] == i)
                sum = (vf){0};
            vf_store(dg + at, sum);
        }
        sum = vf_load(through + c);
        for (int i = 0; i < n; i++) {
            const int at = i * d + c;
            vf_store(dg + at, documents->first[i] == i ? (vf){0} : vf_load(dg + at) + sum);
            sum += vf_load(k + at) * vf_load(dk_leave + at);
        }
    }
}

#endif
