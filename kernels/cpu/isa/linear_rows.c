// SPDX-License-Identifier: Apache-2.0
// The row kernel of linear and head: y[t, o] = sum_k W[o, k] x[t, k] + bias[o] + residual[t, o], W float32 or bf16.
//
// At one token the weights come from memory once and nothing is used twice: eight weight rows are read side by side,
// which keeps enough loads in flight. Several tokens share each weight vector in registers; more tokens than fit go
// over the same panel of outputs again while it lies in the second-level cache. Threads own panels. Every variant
// (tokens x outputs at a time) adds in the one order that linear_rows.h states.
#include "kernels/cpu/isa/linear_rows.h"

enum { PANEL = 24 }; // outputs of one task: a multiple of every number of outputs below

#if defined(KERN_ISA_AVX512) || defined(__aarch64__) // 32 vector registers
enum { MAX_TOKENS = 8 };
#define TOKEN_VARIANTS(X) X(1, 8) X(2, 8) X(3, 8) X(4, 6) X(5, 4) X(6, 4) X(7, 3) X(8, 3)
#else
enum { MAX_TOKENS = 4 };
#define TOKEN_VARIANTS(X) X(1, 8) X(2, 6) X(3, 4) X(4, 3)
#endif

enum { PREFETCH_BYTES = 2048 }; // how far ahead of the loads a weight row is asked for

// One weight tile of `outputs` rows against `tokens` tokens; both constants after inlining. dot: (outputs, MAX_TOKENS).
__attribute__((always_inline)) static inline void tile_dots(int tokens, int outputs, bool bf16, const float *const *x,
                                                            const char *weight, int64_t cols,
                                                            float (*dot)[MAX_TOKENS]) {
    const int64_t element = bf16 ? 2 : 4, stride = cols * element;
    vf sum[8][MAX_TOKENS];
#pragma GCC unroll 8
    for (int o = 0; o < outputs; o++)
#pragma GCC unroll 8
        for (int t = 0; t < tokens; t++)
            sum[o][t] = (vf){0};
    int64_t k = 0;
    for (; k + KERN_VL <= cols; k += KERN_VL) {
#pragma GCC unroll 8
        for (int o = 0; o < outputs; o++) {
            const char *row = weight + o * stride + k * element;
            __builtin_prefetch(row + PREFETCH_BYTES);
            vf w = bf16 ? vf_load_bf16((const uint16_t *)row) : vf_load((const float *)row);
#pragma GCC unroll 8
            for (int t = 0; t < tokens; t++)
                sum[o][t] += w * vf_load(x[t] + k);
        }
    }
    int rest = (int)(cols - k);
    if (rest > 0) {
#pragma GCC unroll 8
        for (int o = 0; o < outputs; o++) {
            const char *row = weight + o * stride + k * element;
            vf w = bf16 ? vf_load_bf16_part((const uint16_t *)row, rest) : vf_load_part((const float *)row, rest);
#pragma GCC unroll 8
            for (int t = 0; t < tokens; t++)
                sum[o][t] += w * vf_load_part(x[t] + k, rest);
        }
    }
#pragma GCC unroll 8
    for (int o = 0; o < outputs; o++)
#pragma GCC unroll 8
        for (int t = 0; t < tokens; t++)
            dot[o][t] = vf_sum(sum[o][t]);
}

typedef void tile_function(const float *const *x, const char *weight, int64_t cols, float (*dot)[MAX_TOKENS]);

#define TILE_FUNCTIONS(t, o)                                                                                        \
    static void tile_f32_##t(const float *const *x, const char *weight, int64_t cols, float(*dot)[MAX_TOKENS]) {    \
        tile_dots(t, o, false, x, weight, cols, dot);                                                               \
    }                                                                                                               \
    static void tile_bf16_##t(const float *const *x, const char *weight, int64_t cols, float(*dot)[MAX_TOKENS]) {   \
        tile_dots(t, o, true, x, weight, cols, dot);                                                                \
    }                                                                                                               \
    static void single_f32_##t(const float *const *x, const char *weight, int64_t cols, float(*dot)[MAX_TOKENS]) {  \
        tile_dots(t, 1, false, x, weight, cols, dot);                                                               \
    }                                                                                                               \
    static void single_bf16_##t(const float *const *x, const char *weight, int64_t cols, float(*dot)[MAX_TOKENS]) { \
        tile_dots(t, 1, true, x, weight, cols, dot);                                                                \
    }
TOKEN_VARIANTS(TILE_FUNCTIONS)
#undef TILE_FUNCTIONS

static const struct {
    int outputs;
    tile_function *tile[2], *single[2]; // [bf16]
} variant[MAX_TOKENS + 1] = {
#define VARIANT(t, o) [t] = {o, {tile_f32_##t, tile_bf16_##t}, {single_f32_##t, single_bf16_##t}},
    TOKEN_VARIANTS(VARIANT)
#undef VARIANT
};

// Outputs [row0, row1) of the job's, of the tokens [token0, token0 + tokens), tokens <= MAX_TOKENS.
static void panel_tokens(const kern_linear_rows *job, int64_t row0, int64_t row1, int32_t token0, int tokens) {
    const int64_t cols = job->weight->cols, rows = job->rows;
    const bool bf16 = job->weight->dtype == KERN_BF16;
    const int64_t stride = cols * (bf16 ? 2 : 4);
    const char *weight = (const char *)job->weight->data + job->row0 * stride;
    const float *x[MAX_TOKENS], *bias = job->bias ? job->bias + job->row0 : NULL;
    for (int t = 0; t < tokens; t++)
        x[t] = job->x + cols * (job->token ? job->token[token0 + t] : token0 + t);
    float dot[8][MAX_TOKENS];
    for (int64_t row = row0; row < row1;) {
        bool whole = row1 - row >= variant[tokens].outputs;
        int outputs = whole ? variant[tokens].outputs : 1;
        tile_function *run = whole ? variant[tokens].tile[bf16] : variant[tokens].single[bf16];
        run(x, weight + row * stride, cols, dot);
        for (int o = 0; o < outputs; o++, row++) {
            for (int t = 0; t < tokens; t++) {
                int64_t at = (token0 + t) * rows + row;
                float y = bias ? dot[o][t] + bias[row] : dot[o][t];
                job->y[at] = job->residual ? y + job->residual[at] : y;
            }
        }
    }
}

typedef struct launch {
    const kern_linear_rows *job;
    kern_linear_pieces panels;
} launch;

static void run_panel(const void *context, int64_t panel) {
    const launch *l = context;
    const kern_linear_rows *job = l->job + kern_linear_job(&l->panels, &panel);
    const int64_t row0 = panel * PANEL, row1 = row0 + PANEL < job->rows ? row0 + PANEL : job->rows;
    for (int32_t token = 0; token < job->tokens; token += MAX_TOKENS) {
        int left = job->tokens - token;
        panel_tokens(job, row0, row1, token, left < MAX_TOKENS ? left : MAX_TOKENS);
    }
}

void KERN_NAME(linear_rows)(const kern_cpu *cpu, const kern_linear_rows *job, int jobs) {
    launch l = {.job = job};
    double rows = 0;
    for (int i = 0; i < jobs; i++) {
        l.panels.first[i + 1] = l.panels.first[i] + (job[i].rows + PANEL - 1) / PANEL;
        rows += (double)job[i].rows;
    }
    kern_share(cpu, run_panel, &l, l.panels.first[jobs], 2.0 * rows * (double)job->weight->cols * job->tokens);
}
