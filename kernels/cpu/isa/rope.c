// SPDX-License-Identifier: Apache-2.0
// Rotary position embedding (Su et al. 2021) in place, NeoX halves: channels (i, i + rotary/2) of each head turn by the
// angle position * frequency[i], position = rows->token_position. inverse turns back, which is the backward.
//
// Positions may be large (a session never ends), so the angle is formed and reduced in double and only the rest in
// [-pi/4, pi/4] is taken to float, where sine and cosine are polynomials within 1 ulp. One table of rotary/2 cosines
// and sines a token serves all its heads.
#include "kernels/cpu/isa/elementwise.h"

typedef double vd __attribute__((vector_size(KERN_VL * 8)));
typedef int64_t vl __attribute__((vector_size(KERN_VL * 8)));

// sine and cosine of r in [-pi/4, pi/4] (minimax polynomials of the Cephes library).
static inline vf sine_polynomial(vf r, vf square) {
    vf sum = square * -1.9515295891e-4f + 8.3321608736e-3f;
    sum = sum * square - 1.6666654611e-1f;
    return r + r * (square * sum);
}

static inline vf cosine_polynomial(vf square) {
    vf sum = square * 2.443315711809948e-5f - 1.388731625493765e-3f;
    sum = sum * square + 4.166664568298827e-2f;
    return (1.0f - 0.5f * square) + square * square * sum;
}

// cosine[i], sine[i] of position * frequency[i]; |angle| < 2^51.
static void fill_table(const float *frequency, int32_t half, int64_t position, float direction, float *cosine,
                       float *sine) {
    const double two_over_pi = 0.63661977236758134308, rounder = 6755399441055744.0; // 1.5 * 2^52
    const double half_pi_high = 1.5707963267948966, half_pi_low = 6.123233995736766e-17;
    for (int32_t i = 0; i < half; i += KERN_VL) {
        int32_t left = half - i;
        vd angle = __builtin_convertvector(vf_load_upto(frequency + i, left), vd) * (double)position;
        vd shifted = angle * two_over_pi + rounder;
        vd turns = shifted - rounder;
        vf r = __builtin_convertvector((angle - turns * half_pi_high) - turns * half_pi_low, vf);
        vi quadrant = __builtin_convertvector((vl)shifted & 3, vi);
        vf square = r * r, s = sine_polynomial(r, square), c = cosine_polynomial(square);
        vi swap = (quadrant & 1) != 0, negative_sine = (quadrant & 2) << 30,
           negative_cosine = ((quadrant + 1) & 2) << 30;
        vf_store_upto(sine + i, direction * (vf)((vi)vf_select(swap, c, s) ^ negative_sine), left);
        vf_store_upto(cosine + i, (vf)((vi)vf_select(swap, s, c) ^ negative_cosine), left);
    }
}

static void rotate_head(float *x, const float *cosine, const float *sine, int32_t half) {
    for (int32_t i = 0; i < half; i += KERN_VL) {
        int32_t left = half - i;
        vf low = vf_load_upto(x + i, left), high = vf_load_upto(x + half + i, left);
        vf c = vf_load_upto(cosine + i, left), s = vf_load_upto(sine + i, left);
        vf_store_upto(x + i, low * c - high * s, left);
        vf_store_upto(x + half + i, high * c + low * s, left);
    }
}

static size_t table_bytes(int32_t rotary) {
    return kern_align64((size_t)(rotary / 2) * sizeof(float));
}

static void rope_range(const kern_cpu *cpu, const kern_rows *rows, const void *args, int64_t first, int64_t end) {
    const kern_rope_args *a = args;
    char *workspace = kern_cpu_workspace(cpu, kern_team_thread());
    float *cosine = (float *)workspace, *sine = (float *)(workspace + table_bytes(a->rotary));
    const int64_t width = (int64_t)a->heads * a->head_width;
    for (int64_t t = first; t < end; t++) {
        fill_table(a->frequency.f, a->rotary / 2, rows->token_position[t], a->inverse ? -1.0f : 1.0f, cosine, sine);
        for (int32_t head = 0; head < a->heads; head++)
            rotate_head(a->x.f + t * width + (int64_t)head * a->head_width, cosine, sine, a->rotary / 2);
    }
}

KERN_PREPARE(rope, kern_rope_args) {
    (void)cpu;
    *thread_bytes = 0;
    if (!a->x.ref || !a->frequency.ref || a->heads < 1 || a->head_width < 1)
        return KERN_INVALID;
    if (a->rotary < 2 || a->rotary % 2 != 0 || a->rotary > a->head_width)
        return KERN_INVALID;
    *thread_bytes = 2 * table_bytes(a->rotary);
    return KERN_OK;
}

KERN_RUN(rope, kern_rope_args) {
    double operations = (double)rows->n_tokens * a->rotary * (3.0 * a->heads + 30.0);
    kern_over(rope_range, cpu, rows, a, rows->n_tokens, operations);
    return KERN_OK;
}
