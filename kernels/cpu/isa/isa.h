// SPDX-License-Identifier: Apache-2.0
// What each file in this folder sees: names with the instruction set's suffix, float vectors of its width, the team.
//
// The files here are compiled once per instruction set with KERN_ISA defined (portable, avx2, avx512). Vectors are GCC
// vector extensions, so the source is one; the width is the set's own. Sums over a vector are made in a fixed order.
// Multiply and add may be contracted (-ffp-contract=fast), the same way in every call: a function's bits depend on its
// arguments alone.
#ifndef KERNELS_CPU_ISA_ISA_H
#define KERNELS_CPU_ISA_ISA_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(KERN_ISA_AVX512) || defined(KERN_ISA_AVX2)
#include <immintrin.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#endif

#include "kernels/cpu/cpu.h"

// Before a loop of constant length: only unrolled whole does an array of vectors live in registers.
#if defined(__clang__)
#define KERN_UNROLL _Pragma("clang loop unroll(full)")
#else
#define KERN_UNROLL _Pragma("GCC unroll 16")
#endif

#define KERN_PASTE2(a, b) a##_##b
#define KERN_PASTE(a, b) KERN_PASTE2(a, b)
// kern_cpu_NAME_ISA: an external name of this instruction set's build.
#define KERN_NAME(name) KERN_PASTE(KERN_PASTE(kern_cpu, name), KERN_ISA)

// The two functions that every operation defines: KERN_RUN(rmsnorm, kern_rmsnorm_args) { ... a, rows, cpu ... }
#define KERN_RUN(name, args_type) kern_status KERN_NAME(name)(kern_cpu * cpu, const kern_rows *rows, const args_type *a)
#define KERN_PREPARE(name, args_type) \
    kern_status KERN_PASTE(KERN_NAME(name), prepare)(const kern_cpu *cpu, const args_type *a, size_t *thread_bytes)
// Prototypes for the table, from KERN_OPS.
#define KERN_DECLARE(code, name, args_type, first) \
    KERN_RUN(name, args_type);                     \
    KERN_PREPARE(name, args_type);
KERN_OPS(KERN_DECLARE)
#undef KERN_DECLARE
// The table's linear_parts.
kern_status KERN_NAME(linear_parts)(kern_cpu *cpu, const kern_rows *rows, const kern_linear_args *const *a, int parts);

#if defined(KERN_ISA_AVX512)
enum { KERN_VL = 16 };
#elif defined(KERN_ISA_AVX2)
enum { KERN_VL = 8 };
#else
enum { KERN_VL = 4 };
#endif

typedef float vf __attribute__((vector_size(KERN_VL * 4)));
typedef int32_t vi __attribute__((vector_size(KERN_VL * 4)));
typedef uint32_t vu __attribute__((vector_size(KERN_VL * 4)));
typedef float vf_unaligned __attribute__((vector_size(KERN_VL * 4), aligned(4), may_alias));

static inline vf vf_load(const float *p) {
    return *(const vf_unaligned *)p;
}
static inline void vf_store(float *p, vf x) {
    *(vf_unaligned *)p = x;
}
static inline vf vf_set(float x) {
    return x - (vf){0};
}
// The first n lanes of p, the rest 0; n < KERN_VL.
#if defined(KERN_ISA_AVX512)
static inline vf vf_load_part(const float *p, int n) {
    return (vf)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
}
static inline void vf_store_part(float *p, vf x, int n) {
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), (__m512)x);
}
#elif defined(KERN_ISA_AVX2)
static inline vi vf_part_mask(int n) {
    const vi lane = {0, 1, 2, 3, 4, 5, 6, 7};
    return lane < n;
}
static inline vf vf_load_part(const float *p, int n) {
    return (vf)_mm256_maskload_ps(p, (__m256i)vf_part_mask(n));
}
static inline void vf_store_part(float *p, vf x, int n) {
    _mm256_maskstore_ps(p, (__m256i)vf_part_mask(n), (__m256)x);
}
#else
static inline vf vf_load_part(const float *p, int n) {
    vf x = {0};
    for (int i = 0; i < n; i++)
        x[i] = p[i];
    return x;
}
static inline void vf_store_part(float *p, vf x, int n) {
    for (int i = 0; i < n; i++)
        p[i] = x[i];
}
#endif
static inline vf vf_select(vi mask, vf yes, vf no) {
    return (vf)((mask & (vi)yes) | (~mask & (vi)no));
}
#if defined(KERN_ISA_AVX512)
static inline vf vf_max(vf a, vf b) {
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
}
static inline vf vf_min(vf a, vf b) {
    return (vf)_mm512_min_ps((__m512)a, (__m512)b);
}
#else
static inline vf vf_max(vf a, vf b) {
    return vf_select(a > b, a, b);
}
static inline vf vf_min(vf a, vf b) {
    return vf_select(a < b, a, b);
}
#endif
// Steps of transposes: for s a power of two, lane l of vf_mix_low is x_l where bit s of l is clear and y_{l-s} where it
// is set; lane l of vf_mix_high is x_{l+s} and y_l.
#define VF_LOW(lane, s) ((lane) & (s) ? KERN_VL + (lane) - (s) : (lane))
#define VF_HIGH(lane, s) ((lane) & (s) ? KERN_VL + (lane) : (lane) + (s))
#define VF_LANES4(f, l, s) f(l, s), f(l + 1, s), f(l + 2, s), f(l + 3, s)
#if defined(KERN_ISA_AVX512)
#define VF_LANES(f, s) VF_LANES4(f, 0, s), VF_LANES4(f, 4, s), VF_LANES4(f, 8, s), VF_LANES4(f, 12, s)
#elif defined(KERN_ISA_AVX2)
#define VF_LANES(f, s) VF_LANES4(f, 0, s), VF_LANES4(f, 4, s)
#else
#define VF_LANES(f, s) VF_LANES4(f, 0, s)
#endif
#define vf_mix_low(x, y, s) __builtin_shufflevector(x, y, VF_LANES(VF_LOW, s))
#define vf_mix_high(x, y, s) __builtin_shufflevector(x, y, VF_LANES(VF_HIGH, s))
// Sum of the lanes by halving: lane i + lane i + VL/2, and so on.
typedef float vf_quarter __attribute__((vector_size(16)));
typedef float vf_half __attribute__((vector_size(32)));
static inline float vf_sum(vf x) {
#if defined(KERN_ISA_AVX512)
    vf_half y = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
                __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
    vf_quarter z = __builtin_shufflevector(y, y, 0, 1, 2, 3) + __builtin_shufflevector(y, y, 4, 5, 6, 7);
#elif defined(KERN_ISA_AVX2)
    vf_quarter z = __builtin_shufflevector(x, x, 0, 1, 2, 3) + __builtin_shufflevector(x, x, 4, 5, 6, 7);
#else
    vf_quarter z = x;
#endif
    z += __builtin_shufflevector(z, z, 2, 3, 2, 3);
    return z[0] + z[1];
}
// The largest lane, NaN lanes skipped where others are not.
static inline float vf_largest(vf x) {
#if defined(KERN_ISA_AVX512)
    vf y = vf_max(x, __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    y = vf_max(y, __builtin_shufflevector(y, y, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
    y = vf_max(y, __builtin_shufflevector(y, y, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
#elif defined(KERN_ISA_AVX2)
    vf y = vf_max(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3));
    y = vf_max(y, __builtin_shufflevector(y, y, 2, 3, 0, 1, 6, 7, 4, 5));
#else
    vf y = vf_max(x, __builtin_shufflevector(x, x, 2, 3, 0, 1));
#endif
    return y[0] > y[1] ? y[0] : y[1];
}
// e^x within 2 ulp; 0 below -87.3, e^88.7 above it (never infinite).
static inline vf vf_exp(vf x) {
    const vf top = vf_set(88.72f), bottom = vf_set(-87.33f);
    vi tiny = x < bottom;
    x = vf_max(bottom, vf_min(top, x));         // this order of operands lets NaN through
    vf shifted = x * 1.44269504f + 12582912.0f; // rounds to an integer in the low mantissa bits
    vf n = shifted - 12582912.0f;
    vf r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vf p = vf_set(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    vi half = __builtin_convertvector(n, vi) >> 1, rest = __builtin_convertvector(n, vi) - half;
    vf scale1 = (vf)((half + 127) << 23), scale2 = (vf)((rest + 127) << 23);
    return (vf)((vi)(p * scale1 * scale2) & ~tiny);
}
static inline vf vf_sigmoid(vf x) {
    return 1.0f / (1.0f + vf_exp(-x));
}

static inline int kern_team_thread(void) {
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}

// Whether this many float operations are worth waking an OpenMP team (a wake costs some microseconds).
static inline bool kern_worth_team(double operations) {
    return operations > 40000.0;
}

// Runs the pieces on the device's team, where this many float operations are worth it; in a session a phase costs some
// hundred nanoseconds. What is too small is a plain call.
static inline void kern_share(const kern_cpu *cpu, kern_piece run, const void *context, int64_t pieces,
                              double operations) {
    if (operations > (kern_team_in_session(cpu->team) ? 8000.0 : 40000.0))
        kern_team_run(cpu->team, run, context, pieces);
    else
        for (int64_t piece = 0; piece < pieces; piece++)
            run(context, piece);
}

// Rounds a workspace piece up so that the next one is aligned.
static inline size_t kern_align64(size_t bytes) {
    return (bytes + 63) & ~(size_t)63;
}

#endif
