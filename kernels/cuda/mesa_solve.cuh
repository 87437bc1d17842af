// SPDX-License-Identifier: Apache-2.0
// The solver of a Mesa layer on a team of threads: (H + Lambda) x = q for one token, the rules of models.md 2.6b.
//
// H (D, D) lies in registers, 8 x 8 a thread: lane = row group x one of D / 8 column groups, group c holding columns
// 4 c .. and D / 2 + 4 c .., so that a piece of a row moves as two 16-byte accesses. Vectors are replicated: every lane
// holds the eight values of its columns, every warp holds all of them. A product is 64 multiply-adds, a butterfly over
// the column groups that leaves a finished row to each lane (or pair of lanes), and one exchange through shared memory,
// two places by turns, with the only barrier of a step. Dot products need no barrier, and as all warps add the same
// numbers in the same order they agree on every decision without a vote.
//
// Modes tolerance and steps: conjugate gradients with one reduction a step (Chronopoulos and Gear 1989), A p carried
// along instead of formed. Mode fixed follows the public code's order. Exact solves: Cholesky in float32 in shared
// memory, refined twice with residuals in double (Wilkinson 1963), which costs half the memory of a factor in double.
#ifndef KERNELS_CUDA_MESA_SOLVE_CUH
#define KERNELS_CUDA_MESA_SOLVE_CUH

#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/team.cuh"

template <int D, typename Team> struct mesa_tile {
    static constexpr int COLUMN_GROUPS = D / 8, HALF = D / 2;
    static constexpr int THREADS = COLUMN_GROUPS * COLUMN_GROUPS;
    static_assert(COLUMN_GROUPS == 8 || COLUMN_GROUPS == 16, "a row is shared by 8 or 16 lanes of a warp");
    float h[8][8];

    static __device__ __forceinline__ int32_t group(void) { // of columns
        return Team::thread() % COLUMN_GROUPS;
    }
    static __device__ __forceinline__ int32_t row0(void) { // first of the thread's eight rows
        return Team::thread() / COLUMN_GROUPS * 8;
    }
    static __device__ __forceinline__ int32_t column(int j) {
        return j < 4 ? 4 * group() + j : HALF + 4 * group() + j - 4;
    }
};

// Place of (row, column <= row) of a lower triangle packed by rows.
static __host__ __device__ __forceinline__ int32_t mesa_packed(int32_t row, int32_t column) {
    return row * (row + 1) / 2 + column;
}

// Floats of a lower triangle.
template <int D> constexpr int MESA_FACTOR = D *(D + 1) / 2;

// What a team keeps in shared memory for one token's solve.
template <int D> struct alignas(16) mesa_shared {
    float exchange[2][D];
    float q[D], lambda[D], diagonal[D], first[D], x[D]; // diagonal: of H alone; first: q / (diagonal + lambda)
    double solution[D];
    float rest[D];
};

// ----------------------------------------------------------------------------------------------------------- vectors

template <int D, typename Team>
static __device__ __forceinline__ void mesa_take(const mesa_tile<D, Team> &tile, const float *from, float (&to)[8]) {
    const float4 low = *(const float4 *)(from + 4 * tile.group());
    const float4 high = *(const float4 *)(from + tile.HALF + 4 * tile.group());
    to[0] = low.x, to[1] = low.y, to[2] = low.z, to[3] = low.w;
    to[4] = high.x, to[5] = high.y, to[6] = high.z, to[7] = high.w;
}

template <int D> static __device__ __forceinline__ float mesa_dot(const float (&a)[8], const float (&b)[8]) {
    float sum = a[0] * b[0], other = a[4] * b[4];
#pragma unroll
    for (int j = 1; j < 4; j++) {
        sum = fmaf(a[j], b[j], sum);
        other = fmaf(a[j + 4], b[j + 4], other);
    }
    sum += other;
#pragma unroll
    for (int distance = D / 16; distance > 0; distance /= 2)
        sum += __shfl_xor_sync(~0u, sum, distance);
    return sum;
}

// The one of a thread's eight values that it stands for alone, among the D threads that stand for a vector.
template <int D, typename Team>
static __device__ __forceinline__ float mesa_pick(const mesa_tile<D, Team> &tile, const float (&v)[8]) {
    const int32_t own = tile.row0() / 8 % 8;
    float left[4];
#pragma unroll
    for (int j = 0; j < 4; j++)
        left[j] = own & 4 ? v[j + 4] : v[j];
    const float low = own & 2 ? left[2] : left[0], high = own & 2 ? left[3] : left[1];
    return own & 1 ? high : low;
}

// shared.x of what the threads have picked.
template <int D, typename Team>
static __device__ __forceinline__ void mesa_spread(const mesa_tile<D, Team> &tile, mesa_shared<D> &shared, float x) {
    const int32_t own = tile.row0() / 8;
    if (own < 8)
        shared.x[(own & 4 ? tile.HALF : 0) + 4 * tile.group() + own % 4] = x;
}

// x, to be computed anew here: not kept from token to token in a register that the solver wants.
static __device__ __forceinline__ int32_t mesa_anew(int32_t x) {
    asm volatile("" : "+r"(x));
    return x;
}
static __device__ __forceinline__ float mesa_anew(float x) {
    asm volatile("" : "+f"(x));
    return x;
}

// Calls use(i, j, row) for the elements of the diagonal of H that are this thread's.
template <int D, typename Team, typename Use>
static __device__ __forceinline__ void mesa_diagonal(const mesa_tile<D, Team> &tile, Use use) {
    const int32_t row0 = mesa_anew(tile.row0()), column0 = 4 * mesa_anew(tile.group());
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
        for (int j = i % 4; j < 8; j += 4)
            if ((j < 4 ? column0 + j : tile.HALF + column0 + j - 4) == row0 + i)
                use(i, j, row0 + i);
}

// 1 / x, the chip's approximation, for x neither below nor far above the normal numbers.
static __device__ __forceinline__ float mesa_reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Between two barriers, the second of which is before mesa_solve: the tile becomes H + Lambda. mesa_close makes it H
// again.
template <int D, typename Team>
static __device__ __forceinline__ void mesa_open(mesa_tile<D, Team> &tile, mesa_shared<D> &shared) {
    mesa_diagonal(tile, [&](int i, int j, int32_t row) {
        shared.diagonal[row] = tile.h[i][j];
        tile.h[i][j] += shared.lambda[row];
        shared.first[row] = shared.q[row] * mesa_reciprocal(tile.h[i][j]);
    });
}
template <int D, typename Team>
static __device__ __forceinline__ void mesa_close(mesa_tile<D, Team> &tile, const mesa_shared<D> &shared) {
    mesa_diagonal(tile, [&](int i, int j, int32_t row) { tile.h[i][j] = shared.diagonal[row]; });
}

// ---------------------------------------------------------------------------------------------------------- products

template <int D, typename Team>
static __device__ __forceinline__ void mesa_partial_rows(const mesa_tile<D, Team> &tile, const float (&p)[8],
                                                         float (&row)[8]) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
        row[i] = tile.h[i][0] * p[0];
#pragma unroll
        for (int j = 1; j < 8; j++)
            row[i] = fmaf(tile.h[i][j], p[j], row[i]);
    }
}

// The row that this lane (or pair of lanes) finishes, from partial rows. Every exchange halves the rows that a lane
// still sums.
template <int D, typename Team>
static __device__ __forceinline__ float mesa_finish_row(const mesa_tile<D, Team> &tile, float (&row)[8]) {
    constexpr int GROUPS = tile.COLUMN_GROUPS;
#pragma unroll
    for (int rows = 4; rows > 0; rows /= 2) {
        const int distance = GROUPS / 8 * rows;
        const bool upper = tile.group() & distance;
#pragma unroll
        for (int i = 0; i < rows; i++) {
            const float kept = upper ? row[i + rows] : row[i], given = upper ? row[i] : row[i + rows];
            row[i] = kept + __shfl_xor_sync(~0u, given, distance);
        }
    }
    return GROUPS == 16 ? row[0] + __shfl_xor_sync(~0u, row[0], 1) : row[0];
}

// y, the product, from finished rows. step: consecutive products of a solve take turns with the shared memory.
template <int D, typename Team>
static __device__ __forceinline__ void mesa_exchange(const mesa_tile<D, Team> &tile, mesa_shared<D> &shared,
                                                     int32_t step, float row, float (&y)[8]) {
    constexpr int LANES = tile.COLUMN_GROUPS / 8; // that have the same row
    float *exchange = shared.exchange[step & 1];
    if (LANES == 1 || (tile.group() & 1) == 0)
        exchange[Team::thread() / LANES] = row;
    Team::sync();
    mesa_take(tile, exchange, y);
}

template <int D, typename Team>
static __device__ __forceinline__ void mesa_product(const mesa_tile<D, Team> &tile, mesa_shared<D> &shared,
                                                    int32_t step, const float (&p)[8], float (&y)[8]) {
    float row[8];
    mesa_partial_rows(tile, p, row);
    mesa_exchange(tile, shared, step, mesa_finish_row(tile, row), y);
}

// ------------------------------------------------------------------------------------------------ conjugate gradients

static __device__ __forceinline__ float mesa_threshold(const kern_solver &solver, float rhs, float first) {
    if (solver.mode == KERN_SOLVE_STEPS)
        return 1e-14f * rhs;
    return fmaxf(solver.tolerance * solver.tolerance * first, 1e-12f * rhs);
}

static __device__ __forceinline__ kern_solve_report mesa_report_of(int32_t steps, int32_t flags, float residual,
                                                                   float rhs) {
    kern_solve_report report;
    report.steps = (uint16_t)steps;
    report.flags = (uint16_t)flags;
    report.residual = rhs == 0 ? 0.0f : sqrtf(residual / rhs);
    return report;
}

// Squares of a very short q would not be normal numbers. Its solve is scaled by a power of two, which rounds nothing.
static __device__ __forceinline__ float mesa_scale(float rhs) {
    return rhs < 1e-16f ? 0x1p60f : 1.0f;
}
static __device__ __forceinline__ float mesa_unscale(float rhs) {
    return rhs < 1e-16f ? 0x1p-60f : 1.0f;
}

// Modes tolerance and steps. With r stand its length and its rows of the next product, whose sums hide each other's
// latency. Of x a thread keeps one element; what a step adds to it waits for the next one, as it may prove to be no
// step.
template <int D, typename Team>
static __device__ __forceinline__ kern_solve_report mesa_solve_gradients(const mesa_tile<D, Team> &tile,
                                                                         mesa_shared<D> &shared,
                                                                         const kern_solver &solver) {
    float r[8], p[8], s[8], y[8], row[8];
    mesa_take(tile, shared.q, r);
    mesa_take(tile, shared.first, p);
    const float rhs = mesa_dot<D>(r, r);
    float x = mesa_pick(tile, p);
    mesa_product(tile, shared, -1, p, y);
    const float scale = mesa_scale(rhs);
    x *= scale;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        r[j] = (r[j] - y[j]) * scale;
        p[j] = s[j] = 0;
    }
    float residual = mesa_dot<D>(r, r);
    mesa_partial_rows(tile, r, row);
    float finished = mesa_finish_row(tile, row);
    if (rhs == 0) {
        mesa_spread(tile, shared, 0);
        return mesa_report_of(0, 0, 0, rhs);
    }
    const float stop = mesa_threshold(solver, rhs * scale * scale, residual);
    const int32_t max_steps = solver.max_steps;
    float inverse = 0, curvature = 0, length = 0; // of the step before: 1 / |r|^2, p A p, how far it went
    int32_t steps = 0;
    bool sound = true;
    while (sound && steps < max_steps && !(residual <= stop)) {
        const float keep = residual * inverse;
        inverse = mesa_reciprocal(residual);
        mesa_exchange(tile, shared, steps, finished, y);
        x = fmaf(length, mesa_pick(tile, p), x);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            p[j] = fmaf(keep, p[j], r[j]);
            s[j] = fmaf(keep, s[j], y[j]);
        }
        curvature = fmaf(-keep * keep, curvature, mesa_dot<D>(r, y));
        length = residual * mesa_reciprocal(curvature);
        sound = length > 0 && length < INFINITY;
#pragma unroll
        for (int j = 0; j < 8; j++)
            r[j] = fmaf(-length, s[j], r[j]);
        residual = mesa_dot<D>(r, r);
        mesa_partial_rows(tile, r, row);
        finished = mesa_finish_row(tile, row);
        steps++;
    }
    if (sound)
        x = fmaf(length, mesa_pick(tile, p), x);
    const float own = mesa_anew(rhs), square = own * mesa_scale(own) * mesa_scale(own);
    mesa_spread(tile, shared, x * mesa_unscale(own));
    if (!sound)
        return mesa_report_of(steps - 1, KERN_REPORT_BREAKDOWN, mesa_reciprocal(inverse), square);
    const bool unconverged = solver.mode == KERN_SOLVE_TOLERANCE && !(residual <= stop);
    return mesa_report_of(steps, unconverged ? KERN_REPORT_UNCONVERGED : 0, residual, square);
}

// Mode fixed: zero start, 1e-5 in both divisions, nothing but a number that is not finite ends it early.
template <int D, typename Team>
static __device__ __forceinline__ kern_solve_report mesa_solve_fixed(const mesa_tile<D, Team> &tile,
                                                                     mesa_shared<D> &shared, int32_t max_steps) {
    constexpr float EPSILON = 1e-5f;
    float r[8], p[8], y[8], x = 0;
    mesa_take(tile, shared.q, r);
    mesa_take(tile, shared.q, p);
    const float rhs = mesa_dot<D>(r, r);
    float residual = rhs;
    int32_t steps = 0, flags = 0;
    for (; steps < max_steps && rhs != 0; steps++) {
        mesa_product(tile, shared, steps, p, y);
        const float curvature = mesa_dot<D>(p, y), length = residual / (curvature + EPSILON);
        if (!isfinite(curvature) || !isfinite(length)) {
            flags = KERN_REPORT_BREAKDOWN;
            break;
        }
        x = fmaf(length, mesa_pick(tile, p), x);
#pragma unroll
        for (int j = 0; j < 8; j++)
            r[j] = fmaf(-length, y[j], r[j]);
        const float next = mesa_dot<D>(r, r), keep = next / (residual + EPSILON);
#pragma unroll
        for (int j = 0; j < 8; j++)
            p[j] = fmaf(keep, p[j], r[j]);
        residual = next;
    }
    mesa_spread(tile, shared, x);
    return mesa_report_of(steps, flags, residual, rhs);
}

// ---------------------------------------------------------------------------------------------------------- Cholesky

template <typename T> static __device__ __forceinline__ T mesa_warp_sum(T x) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
        x += __shfl_xor_sync(~0u, x, distance);
    return x;
}

// A = L L^T in place by the whole team, the packed lower triangle; column: n numbers in shared memory. False: not
// positive definite. Begins and ends with a barrier.
template <typename Team, typename T> static __device__ bool mesa_factorise(T *l, int32_t n, T *column) {
    const int32_t warp = Team::thread() / 32, lane = Team::thread() % 32, warps = Team::size() / 32;
    for (int32_t k = 0; k < n; k++) {
        Team::sync();
        const T pivot = l[mesa_packed(k, k)];
        if (!(pivot > 0))
            return false;
        const T inverse = 1 / sqrt(pivot);
        for (int32_t i = k + 1 + Team::thread(); i < n; i += Team::size())
            column[i] = l[mesa_packed(i, k)] *= inverse;
        Team::sync();
        if (Team::thread() == 0)
            l[mesa_packed(k, k)] = pivot * inverse;
        for (int32_t i = k + 1 + warp; i < n; i += warps)
            for (int32_t j = k + 1 + lane; j <= i; j += 32)
                l[mesa_packed(i, j)] -= column[i] * column[j];
    }
    Team::sync();
    return true;
}

// y becomes (L L^T)^-1 y; one warp.
template <typename T> static __device__ void mesa_substitute(const T *l, int32_t n, T *y) {
    const int32_t lane = threadIdx.x % 32;
    for (int32_t i = 0; i < n; i++) {
        T sum = 0;
        for (int32_t j = lane; j < i; j += 32)
            sum += l[mesa_packed(i, j)] * y[j];
        sum = mesa_warp_sum(sum);
        if (lane == 0)
            y[i] = (y[i] - sum) / l[mesa_packed(i, i)];
        __syncwarp();
    }
    for (int32_t i = n - 1; i >= 0; i--) {
        T sum = 0;
        for (int32_t j = i + 1 + lane; j < n; j += 32)
            sum += l[mesa_packed(j, i)] * y[j];
        sum = mesa_warp_sum(sum);
        if (lane == 0)
            y[i] = (y[i] - sum) / l[mesa_packed(i, i)];
        __syncwarp();
    }
}

// rest = q - (H + Lambda) solution, in double.
template <int D, typename Team>
static __device__ __forceinline__ void mesa_residual(const mesa_tile<D, Team> &tile, mesa_shared<D> &shared) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
        double sum = 0;
#pragma unroll
        for (int j = 0; j < 8; j++)
            sum += (double)tile.h[i][j] * shared.solution[tile.column(j)];
#pragma unroll
        for (int distance = tile.COLUMN_GROUPS / 2; distance > 0; distance /= 2)
            sum += __shfl_xor_sync(~0u, sum, distance);
        const int32_t row = tile.row0() + i;
        if (tile.group() == 0)
            shared.rest[row] = (float)((double)shared.q[row] - sum);
    }
}

// Not positive definite: x is NaN and the report says so. shared.first is overwritten.
template <int D, typename Team>
static __device__ __noinline__ kern_solve_report mesa_solve_exact(const mesa_tile<D, Team> &tile,
                                                                  mesa_shared<D> &shared, float *factor) {
    constexpr int REFINEMENTS = 2;
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const int32_t row = tile.row0() + i, column = tile.column(j);
            if (column <= row)
                factor[mesa_packed(row, column)] = tile.h[i][j];
        }
    for (int32_t i = Team::thread(); i < D; i += Team::size()) {
        shared.rest[i] = shared.q[i];
        shared.solution[i] = 0;
    }
    const bool definite = mesa_factorise<Team>(factor, D, shared.first);
    for (int pass = 0; pass <= REFINEMENTS && definite; pass++) {
        if (Team::thread() < 32) {
            mesa_substitute(factor, D, shared.rest);
            for (int32_t i = Team::thread(); i < D; i += 32) {
                const double better = shared.solution[i] + (double)shared.rest[i];
                shared.solution[i] = pass == REFINEMENTS ? (double)(float)better : better;
            }
        }
        Team::sync();
        mesa_residual(tile, shared);
        Team::sync();
    }
    float q[8], rest[8];
    mesa_take(tile, shared.q, q);
    mesa_take(tile, shared.rest, rest);
    for (int32_t i = Team::thread(); i < D; i += Team::size())
        shared.x[i] = definite ? (float)shared.solution[i] : NAN;
    kern_solve_report report =
        mesa_report_of(0, definite ? 0 : KERN_REPORT_BREAKDOWN, mesa_dot<D>(rest, rest), mesa_dot<D>(q, q));
    if (!definite)
        report.residual = NAN;
    return report;
}

// shared.x for what mesa_open has left, behind the next barrier; factor: MESA_FACTOR floats of shared memory for exact
// solves. Every thread of the team has the report.
template <int D, typename Team>
static __device__ __forceinline__ kern_solve_report mesa_solve(const mesa_tile<D, Team> &tile, mesa_shared<D> &shared,
                                                               float *factor, const kern_solver &solver) {
    if (solver.mode == KERN_SOLVE_EXACT) {
        const mesa_tile<D, Team> copy = tile; // in memory, so that the tile itself stays in registers
        return mesa_solve_exact(copy, shared, factor);
    }
    return solver.mode == KERN_SOLVE_FIXED ? mesa_solve_fixed(tile, shared, solver.max_steps)
                                           : mesa_solve_gradients(tile, shared, solver);
}

#endif
