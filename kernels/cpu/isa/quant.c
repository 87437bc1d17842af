// SPDX-License-Identifier: Apache-2.0
// Products with quantised weights; what they promise stands in quant.h, how weights lie in kernels/cpu/packed.h.
//
// The inputs of some tokens are rounded to int8 first, once for all outputs. Then threads own panels: a tile is some
// tokens against one or two panels, sums in registers, each vector of weights read once for all tokens of the tile. One
// token is bound by memory; many go over a panel again while it lies in the cache. Four bytes are multiplied and added
// at a time: by the processor's own instruction, by pairs of 16 bits where it has none, in float32 (exact: every sum is
// below 2^24) in the portable set.
#include "kernels/cpu/isa/quant.h"

enum {
    BLOCK = KERN_QUANT_BLOCK,
    TOKENS = 128,         // rounded at once: their codes stay in the second-level cache
    PREFETCH_BYTES = 4096 // how far ahead of the loads codes are asked for
};

#if defined(KERN_ISA_AVX512)
#define MM(name) _mm512_##name
typedef __m512i mm;
enum { MAX_TOKENS = 6, PANELS = 2 };
#define TOKEN_VARIANTS(X) X(1, 1) X(2, 1) X(3, 2) X(4, 2) X(5, 2) X(6, 2)
#elif defined(KERN_ISA_AVX2)
#define MM(name) _mm256_##name
typedef __m256i mm;
enum { MAX_TOKENS = 3, PANELS = 1 };
#define TOKEN_VARIANTS(X) X(1, 1) X(2, 1) X(3, 1)
#else
enum { MAX_TOKENS = 1, PANELS = 1 };
#define TOKEN_VARIANTS(X) X(1, 1)
#endif
enum { VECTORS = KERN_PANEL / KERN_VL }; // of a panel

// ------------------------------------------------------------------------------------------------------------- inputs

// A token's inputs: codes (blocks, 32), then for each block the scale, scale * sum of the codes, -zero * that sum.
typedef struct operand {
    int8_t *code;
    float *scale, *total;
    int32_t *start;
} operand;

static size_t operand_bytes(int64_t blocks) {
    return kern_align64((size_t)blocks * (BLOCK + 2 * sizeof(float) + sizeof(int32_t)));
}

static operand operand_at(char *memory, int64_t blocks) {
    char *scale = memory + blocks * BLOCK;
    const size_t array = (size_t)blocks * sizeof(float);
    return (operand){(int8_t *)memory, (float *)scale, (float *)(scale + array), (int32_t *)(scale + 2 * array)};
}

size_t KERN_NAME(quant_bytes)(int64_t cols) {
    return TOKENS * operand_bytes((cols + BLOCK - 1) / BLOCK);
}

typedef int8_t vq __attribute__((vector_size(KERN_VL)));

static inline vi vi_max(vi x, vi y) {
#ifdef MM
    return (vi)MM(max_epi32)((mm)x, (mm)y);
#else
    const vi above = x > y;
    return (x & above) | (y & ~above);
#endif
}

static inline int32_t vi_largest(vi x) {
    int32_t largest = x[0];
    for (int lane = 1; lane < KERN_VL; lane++)
        largest = x[lane] > largest ? x[lane] : largest;
    return largest;
}

static inline int32_t vi_sum(vi x) {
    int32_t sum = 0;
    for (int lane = 0; lane < KERN_VL; lane++)
        sum += x[lane];
    return sum;
}

// Codes of 32 inputs; *sum of the codes. The scale is NaN where an input is not finite, 0 where none is above 1e-30.
static inline float round_block(const float *x, int8_t *code, int32_t *sum) {
    vi top = {0};
    for (int i = 0; i < BLOCK; i += KERN_VL) {
        const vi magnitude = (vi)vf_load(x + i) & 0x7fffffff; // as integers they order like the floats, NaN above all
        top = vi_max(top, magnitude);
    }
    const int32_t bits = vi_largest(top);
    float largest;
    memcpy(&largest, &bits, sizeof largest);
    const bool finite = bits < 0x7f800000;
    if (!(largest >= 1e-30f) || !finite) {
        memset(code, 0, BLOCK);
        *sum = 0;
        return finite ? 0.0f : NAN;
    }
    const float inverse = 127.0f / largest;
    vi total = {0};
    for (int i = 0; i < BLOCK; i += KERN_VL) {
        const vf shifted = vf_load(x + i) * inverse + 12582912.0f; // the nearest integer in the low mantissa bits
        const vi rounded = (vi)shifted - 0x4b400000;
        const vq narrow = __builtin_convertvector(rounded, vq);
        memcpy(code + i, &narrow, sizeof narrow);
        total += rounded;
    }
    *sum = vi_sum(total);
    return largest / 127.0f;
}

static void round_token(const float *x, int64_t cols, int32_t zero, char *memory) {
    const int64_t blocks = (cols + BLOCK - 1) / BLOCK;
    const operand o = operand_at(memory, blocks);
    for (int64_t b = 0; b < blocks; b++) {
        float padded[BLOCK] = {0};
        const int64_t left = cols - b * BLOCK;
        const float *from = x + b * BLOCK;
        if (left < BLOCK)
            from = memcpy(padded, from, (size_t)left * sizeof *x);
        int32_t sum;
        o.scale[b] = round_block(from, o.code + b * BLOCK, &sum);
        o.total[b] = o.scale[b] * (float)sum;
        o.start[b] = -zero * sum;
    }
}

// ------------------------------------------------------------------------------------------------ dots of four bytes

// Sums of four products in each lane: integers, in the portable set as floats, which hold them exactly.
#ifdef MM
typedef vi vd;

static inline vd vd_set(int32_t x) {
    return x - (vi){0};
}

// sum + the four products of unsigned bytes w with the signed bytes x, lane by lane. four: w is below 16. native: by
// the processor's instruction, which this set does not have everywhere and is therefore called by its name.
__attribute__((always_inline)) static inline vd dot(bool native, bool four, vd sum, vi w, int32_t x) {
    const vi each = x - (vi){0};
    if (native) {
#if defined(KERN_ISA_AVX512)
        __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(each));
#else
        __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(w), "x"(each));
#endif
        return sum;
    }
    if (four)
        return sum + (vi)MM(madd_epi16)(MM(maddubs_epi16)((mm)w, (mm)each), MM(set1_epi16)(1));
    const mm even = MM(srai_epi16)(MM(slli_epi16)((mm)each, 8), 8), odd = MM(srai_epi16)((mm)each, 8);
    return sum + (vi)MM(madd_epi16)((mm)(w & 0x00ff00ff), even) + (vi)MM(madd_epi16)(MM(srli_epi16)((mm)w, 8), odd);
}
#else
typedef vf vd;

static inline vd vd_set(int32_t x) {
    return vf_set((float)x);
}

static inline vd dot(bool native, bool four, vd sum, vi w, int32_t x) {
    (void)native;
    (void)four;
    for (int i = 0; i < 4; i++)
        sum += __builtin_convertvector(w >> (8 * i) & 255, vf) * (float)(int8_t)(x >> (8 * i));
    return sum;
}
#endif

static inline vf vf_load_f16(const uint16_t *p) {
#if defined(KERN_ISA_AVX512)
    return (vf)_mm512_cvtph_ps(_mm256_load_si256((const __m256i *)p));
#elif defined(KERN_ISA_AVX2)
    return (vf)_mm256_cvtph_ps(_mm_load_si128((const __m128i *)p));
#else
    const vu bits = __builtin_convertvector(*(const vh_unaligned *)p, vu);
    const vf magnitude = (vf)((bits & 0x7fff) << 13) * 0x1p112f; // the exponents' biases differ; right for subnormals
    return (vf)((vu)magnitude | (bits & 0x8000) << 16);
#endif
}

typedef uint32_t vu_codes __attribute__((vector_size(KERN_VL * 4), may_alias));

static inline int32_t four_inputs(const int8_t *code) {
    int32_t four;
    memcpy(&four, code, sizeof four);
    return four;
}

// -------------------------------------------------------------------------------------------------------------- tiles

enum { SUMS = PANELS * VECTORS };

// dots += one block's codes times the tokens' inputs.
__attribute__((always_inline)) static inline void block_dots(bool native, bool four, int tokens, int panels, int64_t b,
                                                             const char *const *codes, const operand *x,
                                                             vd (*dots)[SUMS]) {
    const int vectors = four ? BLOCK / 8 : BLOCK / 4, sums = panels * VECTORS;
    KERN_UNROLL
    for (int q = 0; q < vectors; q++) {
        KERN_UNROLL
        for (int v = 0; v < sums; v++) {
            const char *at = codes[v / VECTORS] + (q * VECTORS + v % VECTORS) * (int)sizeof(vu);
            if (v % VECTORS == 0)
                __builtin_prefetch(at + PREFETCH_BYTES);
            const vu w = *(const vu_codes *)at;
            KERN_UNROLL
            for (int t = 0; t < tokens; t++) {
                const int8_t *code = x[t].code + b * BLOCK;
                if (four) {
                    dots[t][v] = dot(native, true, dots[t][v], (vi)(w & 0x0f0f0f0f), four_inputs(code + 8 * q));
                    dots[t][v] =
                        dot(native, true, dots[t][v], (vi)(w >> 4 & 0x0f0f0f0f), four_inputs(code + 8 * q + 4));
                } else {
                    dots[t][v] = dot(native, false, dots[t][v], (vi)w, four_inputs(code + 4 * q));
                }
            }
        }
    }
}

// sum += the block's dots by the scales of both sides, and what its minima add.
__attribute__((always_inline)) static inline void add_block(int tokens, int panels, int64_t b,
                                                            const kern_packed *packed, const char *const *panel,
                                                            const operand *x, vd (*dots)[SUMS], vf (*sum)[SUMS]) {
    const int sums = panels * VECTORS;
    KERN_UNROLL
    for (int v = 0; v < sums; v++) {
        const uint16_t *scales = (const uint16_t *)panel[v / VECTORS] + b * KERN_PANEL + v % VECTORS * KERN_VL;
        const vf scale = vf_load_f16(scales);
        KERN_UNROLL
        for (int t = 0; t < tokens; t++)
            sum[t][v] += __builtin_convertvector(dots[t][v], vf) * (scale * x[t].scale[b]);
        if (packed->minimum) {
            const vf minimum = vf_load_f16(scales + packed->minimum / sizeof *scales);
            KERN_UNROLL
            for (int t = 0; t < tokens; t++)
                sum[t][v] += minimum * x[t].total[b];
        }
    }
}

// Outputs (tokens, panels * 16) of `panels` panels for `tokens` operands; the first four are constants after inlining.
__attribute__((always_inline)) static inline void tile(bool native, bool four, int tokens, int panels,
                                                       const kern_packed *packed, const char *const *panel,
                                                       const operand *x, float (*out)[PANELS * KERN_PANEL]) {
    const int sums = panels * VECTORS, all = tokens * sums;
    vf sum[MAX_TOKENS][SUMS];
    KERN_UNROLL
    for (int i = 0; i < all; i++)
        sum[i / sums][i % sums] = (vf){0};
    for (int64_t b = 0; b < packed->blocks; b++) {
        vd dots[MAX_TOKENS][SUMS];
        const char *codes[PANELS];
        KERN_UNROLL
        for (int p = 0; p < panels; p++)
            codes[p] = panel[p] + packed->codes + (size_t)b * packed->block;
        KERN_UNROLL
        for (int i = 0; i < all; i++)
            dots[i / sums][i % sums] = vd_set(x[i / sums].start[b]);
        block_dots(native, four, tokens, panels, b, codes, x, dots);
        add_block(tokens, panels, b, packed, panel, x, dots, sum);
    }
    KERN_UNROLL
    for (int i = 0; i < all; i++)
        vf_store(out[i / sums] + i % sums * KERN_VL, sum[i / sums][i % sums]);
}

typedef void tile_function(const kern_packed *packed, const char *const *panel, const operand *x,
                           float (*out)[PANELS * KERN_PANEL]);

#define TILE_FUNCTION(name, native, four, tokens, panels)                                              \
    static void name##_##tokens(const kern_packed *packed, const char *const *panel, const operand *x, \
                                float(*out)[PANELS * KERN_PANEL]) {                                    \
        tile(native, four, tokens, panels, packed, panel, x, out);                                     \
    }
#define TILE_FUNCTIONS(tokens, panels)                    \
    TILE_FUNCTION(q8, false, false, tokens, panels)       \
    TILE_FUNCTION(q4, false, true, tokens, panels)        \
    TILE_FUNCTION(q8_native, true, false, tokens, panels) \
    TILE_FUNCTION(q4_native, true, true, tokens, panels)
TOKEN_VARIANTS(TILE_FUNCTIONS)
#undef TILE_FUNCTIONS
#undef TILE_FUNCTION

static const struct {
    int panels;
    tile_function *run[2][2]; // [native][four]
} variant[MAX_TOKENS + 1] = {
#define VARIANT(tokens, panels) \
    [tokens] = {panels, {{q8_##tokens, q4_##tokens}, {q8_native_##tokens, q4_native_##tokens}}},
    TOKEN_VARIANTS(VARIANT)
#undef VARIANT
};

// ------------------------------------------------------------------------------------------------------------ product

// Tokens that are multiplied together: their operands are ready.
typedef struct group {
    const kern_linear_rows *job;
    kern_packed packed;
    const char *panels;
    char *operands;
    int32_t token0, tokens;
} group;

static bool has_instruction(const kern_weight *weight) {
#if defined(KERN_ISA_AVX512)
    return weight->dots & KERN_DOTS_AVX512;
#elif defined(KERN_ISA_AVX2)
    return weight->dots & KERN_DOTS_AVX2;
#else
    (void)weight;
    return false;
#endif
}

// Outputs of one panel that the job wants, for the tokens of a tile; out: the panel's part of (tokens, PANELS * 16).
static void write_panel(const kern_linear_rows *job, int64_t panel, int32_t token0, int tokens, const float *out) {
    const int64_t row = panel * KERN_PANEL - job->row0; // of the job's
    const int first = row < 0 ? (int)-row : 0;
    const int last = job->rows - row < KERN_PANEL ? (int)(job->rows - row) : KERN_PANEL;
    for (int t = 0; t < tokens; t++) {
        const int64_t at = (token0 + t) * job->rows + row;
        for (int r = first; r < last; r++) {
            float y = out[t * PANELS * KERN_PANEL + r];
            if (job->bias)
                y += job->bias[job->row0 + row + r];
            job->y[at + r] = job->residual ? y + job->residual[at + r] : y;
        }
    }
}

// The panels [panel0, panel0 + PANELS) below `end` for the tokens [done, done + tokens) of the group. Where a tile
// takes more panels than are left, the last one is computed twice.
static void run_tile(const group *g, int64_t panel0, int64_t end, int32_t done, int tokens) {
    const kern_weight *weight = g->job->weight;
    operand x[MAX_TOKENS];
    for (int t = 0; t < tokens; t++)
        x[t] = operand_at(g->operands + (size_t)(done + t) * operand_bytes(g->packed.blocks), g->packed.blocks);
    const int panels = variant[tokens].panels;
    for (int64_t first = panel0; first < panel0 + PANELS && first < end; first += panels) {
        float out[MAX_TOKENS][PANELS * KERN_PANEL];
        const char *panel[PANELS];
        for (int p = 0; p < panels; p++)
            panel[p] = g->panels + (size_t)(first + p < end ? first + p : end - 1) * g->packed.panel;
        variant[tokens].run[has_instruction(weight)][weight->dtype == KERN_Q4](&g->packed, panel, x, out);
        for (int p = 0; p < panels && first + p < end; p++)
            write_panel(g->job, first + p, g->token0 + done, tokens, out[0] + p * KERN_PANEL);
    }
}

// All tokens of the group, tile by tile, about equally many in each.
static void run_panels(const group *g, int64_t panel0, int64_t end) {
    for (int32_t done = 0; done < g->tokens;) {
        const int32_t left = g->tokens - done, tiles = (left + MAX_TOKENS - 1) / MAX_TOKENS;
        const int32_t tokens = (left + tiles - 1) / tiles;
        run_tile(g, panel0, end, done, tokens);
        done += tokens;
    }
}

static void run_group(const group *g) {
    const kern_linear_rows *job = g->job;
    const int64_t cols = job->weight->cols;
    const size_t bytes = operand_bytes(g->packed.blocks);
#pragma omp parallel for schedule(static) if (kern_worth_team(8.0 * (double)g->tokens * cols))
    for (int32_t t = 0; t < g->tokens; t++) {
        const int32_t token = g->token0 + t;
        round_token(job->x + cols * (job->token ? job->token[token] : token), cols, g->packed.zero,
                    g->operands + (size_t)t * bytes);
    }
    const int64_t first = job->row0 / KERN_PANEL, end = (job->row0 + job->rows + KERN_PANEL - 1) / KERN_PANEL;
    const int64_t tasks = (end - first + PANELS - 1) / PANELS;
#pragma omp parallel for schedule(static) if (kern_worth_team(0.5 * (double)job->rows * cols * g->tokens))
    for (int64_t task = 0; task < tasks; task++)
        run_panels(g, first + task * PANELS, end);
}

void KERN_NAME(quant_rows)(const kern_linear_rows *job, void *scratch) {
    const kern_weight *weight = job->weight;
    group g = {.job = job,
               .packed = kern_packed_of(weight->dtype, weight->cols, weight->minimum),
               .panels = weight->data,
               .operands = scratch};
    for (g.token0 = 0; g.token0 < job->tokens; g.token0 += TOKENS) {
        g.tokens = job->tokens - g.token0 < TOKENS ? job->tokens - g.token0 : TOKENS;
        run_group(&g);
    }
}

void KERN_NAME(quant_row)(const kern_weight *weight, int64_t row, float scale, float *y) {
    const kern_packed packed = kern_packed_of(weight->dtype, weight->cols, weight->minimum);
    const char *panel = (const char *)weight->data + (size_t)(row / KERN_PANEL) * packed.panel;
    const int64_t r = row % KERN_PANEL;
    for (int64_t i = 0; i < weight->cols; i++) {
        const int64_t b = i / BLOCK, k = i % BLOCK;
        const uint8_t *codes = (const uint8_t *)panel + packed.codes + (size_t)b * packed.block;
        int32_t code = codes[kern_packed_byte(weight->dtype, k, r)] >> kern_packed_shift(weight->dtype, k);
        if (weight->dtype == KERN_Q4)
            code &= 15;
        const uint16_t *scales = (const uint16_t *)panel + b * KERN_PANEL + r;
        float value = kern_f16(*scales) * (float)(code - packed.zero);
        if (packed.minimum)
            value += kern_f16(scales[packed.minimum / sizeof *scales]);
        y[i] = scale * value;
    }
}
