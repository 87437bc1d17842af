// SPDX-License-Identifier: Apache-2.0
// The solver of a Mesa layer: (Hk_t + Lambda) x_t = q_t for one token, or for all tokens of a chunk at once.
//
// Conjugate gradients (Hestenes and Stiefel 1952) with the rule of models.md 2.6b. Every token is a *lane* with its own
// scalars and its own stop; a chunk keeps up to GEMM_ROWS lanes going as one matrix and gives the place of a finished
// one to the next token, so the products always run on full tiles. With P the lanes' directions
//   A(P) = (from_start * P) Hk_0 + ((P K^T) * pair) (beta * K) + P Lambda
// and each row of these products depends on its own row of P alone: a token's bits do not depend on its chunk mates.
// A single token multiplies by its Hk instead. Exact solves are Cholesky factorisations in double.
//
// Modes (kern_solve_mode): tolerance and steps start at q / diag(A), which costs one product for the first residual;
// fixed starts at 0 and adds 1e-5 to both divisors, and nothing but a number that is not finite stops it early.
// Wherever p.Ap <= 0 or a step is not finite, the lane stops with the x that it has and says so in its report.
#ifndef KERNELS_CPU_ISA_MESA_SOLVE_H
#define KERNELS_CPU_ISA_MESA_SOLVE_H

#include "kernels/cpu/isa/recurrence_chunk.h"
#include "kernels/cpu/isa/recurrence_step.h"

typedef struct cg_lane {
    const float *q;
    float *x;            // the result
    float *p, *r;        // padded like q and x
    float rhs, residual; // q.q, r.r
    float stop;          // stops when residual <= stop
    int steps;
    bool started; // false: p holds x0, whose product is asked for
    uint16_t flags;
} cg_lane;

// q, x (in: the start, ignored in mode fixed), p, r set. False: finished already.
static inline bool cg_begin(cg_lane *lane, const kern_solver *solver, int width) {
    lane->rhs = chunk_dot(lane->q, lane->q, width);
    lane->residual = lane->rhs;
    lane->stop = -1;
    lane->steps = 0;
    lane->flags = 0;
    lane->started = solver->mode == KERN_SOLVE_FIXED;
    if (lane->rhs == 0) {
        memset(lane->x, 0, (size_t)width * sizeof(float));
        return false;
    }
    if (!lane->started) {
        memcpy(lane->p, lane->x, (size_t)width * sizeof(float));
        return true;
    }
    memset(lane->x, 0, (size_t)width * sizeof(float));
    memcpy(lane->p, lane->q, (size_t)width * sizeof(float));
    memcpy(lane->r, lane->q, (size_t)width * sizeof(float));
    return solver->max_steps > 0;
}

static inline float cg_threshold(const kern_solver *solver, float rhs, float first_residual) {
    if (solver->mode == KERN_SOLVE_STEPS)
        return 1e-14f * rhs;
    float relative = solver->tolerance * solver->tolerance * first_residual, floor = 1e-12f * rhs;
    return relative > floor ? relative : floor;
}

// Takes the product of p: one step further. False: finished.
static inline __attribute__((always_inline)) bool cg_advance(cg_lane *lane, const kern_solver *solver, const float *ap,
                                                             const int width) {
    const float epsilon = solver->mode == KERN_SOLVE_FIXED ? 1e-5f : 0.0f;
    float *const x = lane->x, *const p = lane->p, *const r = lane->r;
    vf square = {0};
    if (!lane->started) {
        for (int j = 0; j < width; j += KERN_VL) {
            vf left = vf_load(lane->q + j) - vf_load(ap + j);
            vf_store(r + j, left);
            vf_store(p + j, left);
            square += left * left;
        }
        lane->started = true;
        lane->residual = vf_sum(square);
        lane->stop = cg_threshold(solver, lane->rhs, lane->residual);
    } else {
        const float curvature = chunk_dot(p, ap, width), length = lane->residual / (curvature + epsilon);
        if ((!(curvature > 0) && epsilon == 0) || !isfinite(curvature) || !isfinite(length)) {
            lane->flags |= KERN_REPORT_BREAKDOWN;
            return false;
        }
        for (int j = 0; j < width; j += KERN_VL) {
            vf_store(x + j, vf_load(x + j) + vf_load(p + j) * length);
            vf left = vf_load(r + j) - vf_load(ap + j) * length;
            vf_store(r + j, left);
            square += left * left;
        }
        const float residual = vf_sum(square), keep = residual / (lane->residual + epsilon);
        for (int j = 0; j < width; j += KERN_VL)
            vf_store(p + j, vf_load(r + j) + vf_load(p + j) * keep);
        lane->residual = residual;
        lane->steps++;
    }
    if (lane->residual <= lane->stop)
        return false;
    if (lane->steps < solver->max_steps)
        return true;
    if (solver->mode == KERN_SOLVE_TOLERANCE)
        lane->flags |= KERN_REPORT_UNCONVERGED;
    return false;
}

static inline kern_solve_report cg_report(const cg_lane *lane) {
    float residual = lane->rhs == 0 ? 0 : sqrtf(lane->residual / lane->rhs);
    return (kern_solve_report){.steps = (uint16_t)lane->steps, .flags = lane->flags, .residual = residual};
}

// ------------------------------------------------------------------------------------------------------ one token

// y = (H + Lambda) p, H (depth, width) at row distance ld. Four sums for each column hide the latency.
static inline void mesa_multiply(const float *h, int64_t ld, const float *lambda, int depth, int width, const float *p,
                                 float *y) {
    enum { COLUMNS = 4, SUMS = 4 };
    for (int j = 0; j < width; j += COLUMNS * KERN_VL) {
        vf sum[SUMS][COLUMNS] = {0};
        const int columns = (width - j) / KERN_VL < COLUMNS ? (width - j) / KERN_VL : COLUMNS;
        if (columns == COLUMNS) {
            int i = 0;
            for (; i + SUMS <= depth; i += SUMS)
                for (int s = 0; s < SUMS; s++)
                    for (int c = 0; c < COLUMNS; c++)
                        sum[s][c] += p[i + s] * vf_load(h + (i + s) * ld + j + c * KERN_VL);
            for (; i < depth; i++)
                for (int c = 0; c < COLUMNS; c++)
                    sum[0][c] += p[i] * vf_load(h + i * ld + j + c * KERN_VL);
        } else
            for (int i = 0; i < depth; i++)
                for (int c = 0; c < columns; c++)
                    sum[0][c] += p[i] * vf_load(h + i * ld + j + c * KERN_VL);
        for (int c = 0; c < columns; c++) {
            const int at = j + c * KERN_VL;
            vf all = (sum[0][c] + sum[1][c]) + (sum[2][c] + sum[3][c]);
            vf_store(y + at, all + vf_load(lambda + at) * vf_load(p + at));
        }
    }
}

typedef double vd __attribute__((vector_size(KERN_VL * 4)));
typedef double vd_unaligned __attribute__((vector_size(KERN_VL * 4), aligned(8), may_alias));
enum { VD_LANES = KERN_VL / 2, FACTOR_ROWS = 4 };

static inline int mesa_factor_width(int depth) {
    return (depth + VD_LANES - 1) / VD_LANES * VD_LANES;
}
// Doubles of workspace that mesa_exact needs.
static inline size_t mesa_factor_size(int depth) {
    return ((size_t)depth + 2) * (size_t)mesa_factor_width(depth);
}

// row_to -= sum of factor_f * row_f over `count` rows, from the vector that holds `column` on.
static inline __attribute__((always_inline)) void factor_subtract(double *to, const double *from, int width, int column,
                                                                  const double *factor, const int count) {
    for (int j = column / VD_LANES * VD_LANES; j < width; j += VD_LANES) {
        vd sum = *(vd_unaligned *)(to + j);
        for (int f = 0; f < count; f++)
            sum -= *(const vd_unaligned *)(from + f * width + j) * factor[f];
        *(vd_unaligned *)(to + j) = sum;
    }
}

// A = U^T U in place (upper half), row panels of FACTOR_ROWS; inverse gets 1 / U_kk. False: not positive definite.
static inline bool factorise(double *a, int depth, int width, double *inverse) {
    for (int k0 = 0; k0 < depth; k0 += FACTOR_ROWS) {
        const int k1 = k0 + FACTOR_ROWS < depth ? k0 + FACTOR_ROWS : depth;
        for (int k = k0; k < k1; k++) {
            double *row = a + k * width;
            for (int f = k0; f < k; f++)
                factor_subtract(row, a + f * width, width, k, a + f * width + k, 1);
            if (!(row[k] > 0))
                return false;
            inverse[k] = 1 / sqrt(row[k]);
            for (int j = k; j < width; j++)
                row[j] *= inverse[k];
        }
        for (int i = k1; i < depth; i++) {
            double factor[FACTOR_ROWS];
            for (int f = 0; f < FACTOR_ROWS; f++)
                factor[f] = a[(k0 + f) * width + i];
            factor_subtract(a + i * width, a + k0 * width, width, i, factor, FACTOR_ROWS);
        }
    }
    return true;
}

// x = (H + Lambda)^-1 q. Not positive definite: x is NaN and the report says so. rest: `width` floats.
static inline kern_solve_report mesa_exact(const float *h, int64_t ld, const float *lambda, int depth, int width,
                                           const float *q, float *x, double *work, float *rest) {
    const int row = mesa_factor_width(depth);
    double *inverse = work + depth * row, *y = inverse + row;
    for (int i = 0; i < depth; i++) {
        for (int j = 0; j < depth; j++)
            work[i * row + j] = h[i * ld + j];
        memset(work + i * row + depth, 0, (size_t)(row - depth) * sizeof(double));
        work[i * row + i] += lambda[i];
    }
    memset(x, 0, (size_t)width * sizeof(float));
    if (!factorise(work, depth, row, inverse)) {
        for (int i = 0; i < depth; i++)
            x[i] = NAN;
        return (kern_solve_report){.flags = KERN_REPORT_BREAKDOWN, .residual = NAN};
    }
    for (int i = 0; i < row; i++)
        y[i] = i < depth ? q[i] : 0;
    for (int k = 0; k < depth; k++) {
        y[k] *= inverse[k];
        for (int j = k + 1; j < depth; j++)
            y[j] -= y[k] * work[k * row + j];
    }
    for (int k = depth - 1; k >= 0; k--) {
        double sum = y[k];
        for (int j = k + 1; j < depth; j++)
            sum -= work[k * row + j] * y[j];
        y[k] = sum * inverse[k];
    }
    for (int i = 0; i < depth; i++)
        x[i] = (float)y[i];
    mesa_multiply(h, ld, lambda, depth, width, x, rest);
    for (int j = 0; j < width; j += KERN_VL)
        vf_store(rest + j, vf_load(q + j) - vf_load(rest + j));
    const float rhs = chunk_dot(q, q, width);
    return (kern_solve_report){.residual = rhs == 0 ? 0 : sqrtf(chunk_dot(rest, rest, width) / rhs)};
}

// One token by its own Hk (depth, width). work: mesa_token_size floats, 64-byte aligned.
static inline size_t mesa_token_size(int depth, int width) {
    return 3 * (size_t)width + 2 * mesa_factor_size(depth);
}
static inline kern_solve_report mesa_solve_token(const float *h, int64_t ld, const float *lambda, int depth, int width,
                                                 const kern_solver *solver, const float *q, float *x, float *work) {
    float *ap = work + 2 * width;
    if (solver->mode == KERN_SOLVE_EXACT)
        return mesa_exact(h, ld, lambda, depth, width, q, x, (double *)(work + 3 * width), work);
    memset(x, 0, (size_t)width * sizeof(float));
    for (int i = 0; i < depth; i++)
        x[i] = q[i] / (h[i * ld + i] + lambda[i]);
    cg_lane lane = {.q = q, .x = x, .p = work, .r = work + width};
    bool going = cg_begin(&lane, solver, width);
    while (going) {
        mesa_multiply(h, ld, lambda, depth, width, lane.p, ap);
        going = cg_advance(&lane, solver, ap, width);
    }
    return cg_report(&lane);
}

// ------------------------------------------------------------------------------------------------- all of a chunk

// The operators Hk_t + Lambda of the tokens of one chunk and head.
typedef struct mesa_system {
    const chunk_decay *decay;
    const float *hk; // Hk before the chunk (depth, width) at row distance ld
    int64_t ld;
    const float *kt;     // K^T (depth, C), C = decay->ld
    const float *k, *bk; // K and beta * K (length, width)
    const float *beta;   // (length)
    const float *lambda; // (width), zeros behind depth
    int depth, width;
} mesa_system;

// Floats of workspace that a chunk's solve needs.
static inline size_t mesa_chunk_size(int depth, int width, int chunk) {
    return GEMM_ROWS * (3 * (size_t)width + (size_t)chunk) + (size_t)(depth + 1) * width +
           mesa_token_size(depth, width);
}

// x0_t = q_t / diag(Hk_t + Lambda), the diagonal by its own recurrence.
static inline void mesa_start(const mesa_system *system, const float *q, float *x, float *diagonal) {
    const chunk_decay *decay = system->decay;
    const int width = system->width;
    memset(diagonal, 0, (size_t)width * sizeof(float));
    if (chunk_carries(decay))
        for (int i = 0; i < system->depth; i++)
            diagonal[i] = system->hk[i * system->ld + i];
    for (int t = 0; t < decay->length; t++) {
        const float gamma = t == 0 ? decay->from_start[0] : decay->pair[t * decay->ld + t - 1];
        for (int j = 0; j < width; j += KERN_VL) {
            vf h = vf_load(diagonal + j) * gamma +
                   vf_load(system->k + t * width + j) * vf_load(system->bk + t * width + j);
            vf_store(diagonal + j, h);
            vf all = h + vf_load(system->lambda + j);
            vf x0 = vf_load(q + t * width + j) / all;
            vf_store(x + t * width + j, vf_select(all == (vf){0}, (vf){0}, x0)); // padding is 0 / 0
        }
    }
}

// ap = A(p) for `count` lanes, the tokens index[] of the chunk. product: (count, C) floats.
static inline void mesa_multiply_lanes(const mesa_system *system, const int *index, int count, const float *p,
                                       float *ap, float *product) {
    const chunk_decay *decay = system->decay;
    const int width = system->width, ld = decay->ld;
    int reach = 0;
    bool carries = false;
    for (int l = 0; l < count; l++) {
        reach = index[l] + 1 > reach ? index[l] + 1 : reach;
        carries |= chunk_carries(decay) && decay->first[index[l]] < 0;
    }
    const int columns = gemm_pad(reach);
    if (carries)
        gemm_nn(count, width, system->depth, p, width, system->hk, system->ld, ap, width, 0);
    for (int l = 0; l < count; l++) {
        const float factor = decay->from_start[index[l]];
        for (int j = 0; j < width; j += KERN_VL) {
            vf diagonal = vf_load(system->lambda + j) * vf_load(p + l * width + j);
            vf_store(ap + l * width + j, carries ? vf_load(ap + l * width + j) * factor + diagonal : diagonal);
        }
    }
    gemm_nn(count, columns, system->depth, p, width, system->kt, ld, product, ld, 0);
    for (int l = 0; l < count; l++)
        for (int j = 0; j < columns; j += KERN_VL)
            vf_store(product + l * ld + j, vf_load(product + l * ld + j) * vf_load(decay->pair + index[l] * ld + j));
    gemm_nn(count, width, reach, product, ld, system->bk, width, ap, width, 1);
}

// Where the figures of solves go; both may be NULL.
typedef struct mesa_reports {
    kern_solve_report *report; // of token t at t * stride
    int64_t stride;
    kern_solve_sum *sum; // of token t at t; the heads of a token are threads' of their own
} mesa_reports;

// From token `token` on, head `head` of `heads`.
static inline mesa_reports mesa_reports_of(kern_ptr report, kern_ptr sum, int64_t token, int head, int heads) {
    return (mesa_reports){.report = report.p ? (kern_solve_report *)report.p + token * heads + head : NULL,
                          .stride = heads,
                          .sum = sum.p ? (kern_solve_sum *)sum.p + token : NULL};
}

static inline void mesa_report(const mesa_reports *to, int t, kern_solve_report value) {
    if (to->report)
        to->report[t * to->stride] = value;
    if (!to->sum)
        return;
    kern_solve_sum *sum = to->sum + t;
    __atomic_fetch_add(&sum->solves, 1, __ATOMIC_RELAXED);
    __atomic_fetch_add(&sum->steps, value.steps, __ATOMIC_RELAXED);
    if (value.flags)
        __atomic_fetch_add(&sum->unconverged, 1, __ATOMIC_RELAXED);
    uint32_t most = __atomic_load_n(&sum->steps_max, __ATOMIC_RELAXED);
    while (most < value.steps &&
           !__atomic_compare_exchange_n(&sum->steps_max, &most, value.steps, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        ;
}

static inline void mesa_solve_chunk_exact(const mesa_system *system, const float *q, float *x,
                                          const mesa_reports *reports, float *work) {
    const chunk_decay *decay = system->decay;
    const int depth = system->depth, width = system->width;
    float *h = work, *scaled = h + depth * width, *rest = scaled + width;
    double *factor = (double *)(rest + width);
    chunk_load(h, width, system->hk, system->ld, depth, width);
    for (int t = 0; t < decay->length; t++) {
        const float gamma = t == 0 ? decay->from_start[0] : decay->pair[t * decay->ld + t - 1];
        const float root = sqrtf(system->beta[t]);
        if (decay->first[t] == t)
            memset(h, 0, (size_t)depth * width * sizeof(float));
        chunk_scale_rows(scaled, system->k + t * width, width, &root, 1);
        const float gamma_m1 = gamma - 1;
        const step_token token = {.decay_m1 = &gamma_m1, .k = scaled, .v = scaled, .weight = 1};
        step_state(&token, h, width, depth, width, NULL);
        mesa_report(reports, t,
                    mesa_exact(h, width, system->lambda, depth, width, q + t * width, x + t * width, factor, rest));
    }
}

// x (length, width) for the right-hand sides q.
// work: mesa_chunk_size floats, 64-byte aligned.
static inline void mesa_solve_chunk(const mesa_system *system, const kern_solver *solver, const float *q, float *x,
                                    const mesa_reports *reports, float *work) {
    const int width = system->width, length = system->decay->length;
    float *p = work, *ap = p + GEMM_ROWS * width, *r = ap + GEMM_ROWS * width, *product = r + GEMM_ROWS * width;
    cg_lane lane[GEMM_ROWS];
    int index[GEMM_ROWS], count = 0, next = 0;
    if (solver->mode == KERN_SOLVE_EXACT) {
        mesa_solve_chunk_exact(system, q, x, reports, work);
        return;
    }
    mesa_start(system, q, x, ap);
    for (;;) {
        for (; count < GEMM_ROWS && next < length; next++) {
            lane[count] =
                (cg_lane){.q = q + next * width, .x = x + next * width, .p = p + count * width, .r = r + count * width};
            index[count] = next;
            if (cg_begin(&lane[count], solver, width))
                count++;
            else
                mesa_report(reports, next, cg_report(&lane[count]));
        }
        if (count == 0)
            return;
        mesa_multiply_lanes(system, index, count, p, ap, product);
        int kept = 0;
        for (int l = 0; l < count; l++) {
            bool going = cg_advance(&lane[l], solver, ap + l * width, width);
            if (!going) {
                mesa_report(reports, index[l], cg_report(&lane[l]));
                continue;
            }
            if (kept < l) {
                memcpy(p + kept * width, lane[l].p, (size_t)width * sizeof(float));
                memcpy(r + kept * width, lane[l].r, (size_t)width * sizeof(float));
                lane[kept] = lane[l];
                lane[kept].p = p + kept * width;
                lane[kept].r = r + kept * width;
                index[kept] = index[l];
            }
            kept++;
        }
        count = kept;
    }
}

#endif
