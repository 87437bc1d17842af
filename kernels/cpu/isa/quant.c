// SPDX-License-Identifier: Apache-2.0
// Products with quantised weights; what they promise stands in quant.h, how weights lie in kernels/cpu/packed.h.
//
// The inputs of some tokens are rounded to int8 first, once for all outputs. Then threads own panels: a tile is some
// tokens against some rows of a panel, sums in registers, each vector of weights read once for all tokens of the tile.
// One token is bound by memory; many go over a panel again while it lies in the cache. Four bytes are multiplied and
// added at a time: by the processor's own instruction, by pairs of 16 bits where it has none, in float32 (exact: every
// sum is below 2^24) in the portable set.
#include "kernels/cpu/isa/quant.h"

enum {
    BLOCK = KERN_QUANT_BLOCK,
    TOKENS = 128,         // rounded at once: their codes stay in the second-level cache
    PREFETCH_BYTES = 4096 // how far ahead of the loads codes are asked for
};

#if defined(KERN_ISA_AVX512)
#define MM(name) _mm512_##name
typedef __m512i mm;
enum { MAX_TOKENS = 6 };
#define TOKEN_VARIANTS(X) X(1, 2) X(2, 2) X(3, 2) X(4, 2) X(5, 2) X(6, 2)
#elif defined(KERN_ISA_AVX2)
#define MM(name) _mm256_##name
typedef __m256i mm;
enum { MAX_TOKENS = 3 };
#define TOKEN_VARIANTS(X) X(1, 4) X(2, 2) X(3, 2)
#else
enum { MAX_TOKENS = 1 };
#define TOKEN_VARIANTS(X) X(1, 4)
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

// The low bytes of 32 integers.
static inline void store_codes(int8_t *to, const vi *from) {
#if defined(KERN_ISA_AVX512)
    _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8((mm)from[0]));
    _mm_storeu_si128((__m128i *)to + 1, _mm512_cvtepi32_epi8((mm)from[1]));
#elif defined(KERN_ISA_AVX2)
    const mm low = _mm256_set1_epi32(255), order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7); // packs work by halves
    const mm x = _mm256_packus_epi32((mm)from[0] & low, (mm)from[1] & low);
    const mm y = _mm256_packus_epi32((mm)from[2] & low, (mm)from[3] & low);
    _mm256_storeu_si256((mm *)to, _mm256_permutevar8x32_epi32(_mm256_packus_epi16(x, y), order));
#else
    for (int i = 0; i < BLOCK; i++)
        to[i] = (int8_t)from[i / KERN_VL][i % KERN_VL];
#endif
}

static inline vi vi_max(vi x, vi y) {
#ifdef MM
    return (vi)MM(max_epi32)((mm)x, (mm)y);
#else
    const vi above = x > y;
    return (x & above) | (y & ~above);
#endif
}

// Codes of 32 inputs; *sum of the codes. The scale is NaN where an input is not finite, 0 where none is above 1e-30.
static inline float round_block(const float *x, int8_t *code, int32_t *sum) {
    vi top = {0};
    KERN_UNROLL
    for (int i = 0; i < BLOCK; i += KERN_VL) // as integers magnitudes order like the floats, NaN above all
        top = vi_max(top, (vi)vf_load(x + i) & 0x7fffffff);
    const float largest = vf_largest((vf)-vi_max(-top, (vi){0} - 0x7f800000));
    if (!(largest >= 1e-30f && largest < INFINITY)) {
        memset(code, 0, BLOCK);
        *sum = 0;
        return largest < INFINITY ? 0.0f : NAN;
    }
    const vf inverse = vf_set(127.0f / largest);
    vf total = {0};
    vi rounded[BLOCK / KERN_VL];
    KERN_UNROLL
    for (int i = 0; i < BLOCK; i += KERN_VL) {
        const vf shifted = vf_load(x + i) * inverse + 12582912.0f; // the nearest integer in the low mantissa bits
        rounded[i / KERN_VL] = (vi)shifted;
        total += shifted - 12582912.0f;
    }
    store_codes(code, rounded);
    *sum = (int32_t)vf_sum(total); // exact: below 2^24
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

// dots += one block's codes times the tokens' inputs, for `vectors` vectors of rows; codes: the block's, from the first
// of these rows on.
__attribute__((always_inline)) static inline void block_dots(bool native, bool four, int tokens, int vectors, int64_t b,
                                                             const char *codes, const operand *x, vd (*dots)[VECTORS]) {
    const int groups = four ? BLOCK / 8 : BLOCK / 4;
    KERN_UNROLL
    for (int q = 0; q < groups; q++) {
        KERN_UNROLL
        for (int v = 0; v < vectors; v++) {
            const char *at = codes + (q * VECTORS + v) * (int)sizeof(vu);
            if (v * KERN_VL % 16 == 0) // a line
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

// sum += the block's dots by the scales of both sides, and what its minima add; scales: as codes above.
__attribute__((always_inline)) static inline void add_block(int tokens, int vectors, int64_t b, size_t minimum,
                                                            const uint16_t *scales, const operand *x,
                                                            vd (*dots)[VECTORS], vf (*sum)[VECTORS]) {
    KERN_UNROLL
    for (int v = 0; v < vectors; v++) {
        const vf scale = vf_load_f16(scales + v * KERN_VL);
        KERN_UNROLL
        for (int t = 0; t < tokens; t++)
            sum[t][v] += __builtin_convertvector(dots[t][v], vf) * (scale * x[t].scale[b]);
        if (minimum) {
            const vf least = vf_load_f16(scales + minimum / sizeof *scales + v * KERN_VL);
            KERN_UNROLL
            for (int t = 0; t < tokens; t++)
                sum[t][v] += least * x[t].total[b];
        }
    }
}

// Rows [row, row + vectors * KERN_VL) of a panel times `tokens` operands; the first four are constants after inlining.
// out: (tokens, KERN_PANEL).
__attribute__((always_inline)) static inline void tile(bool native, bool four, int tokens, int vectors,
                                                       const kern_packed *packed, const char *panel, int row,
                                                       const operand *x, float (*out)[KERN_PANEL]) {
    const char *codes = panel + packed->codes + (size_t)row * 4;
    const uint16_t *scales = (const uint16_t *)panel + row;
    const int all = tokens * vectors;
    vf sum[MAX_TOKENS][VECTORS];
    KERN_UNROLL
    for (int i = 0; i < all; i++)
        sum[i / vectors][i % vectors] = (vf){0};
    for (int64_t b = 0; b < packed->blocks; b++) {
        vd dots[MAX_TOKENS][VECTORS];
        KERN_UNROLL
        for (int i = 0; i < all; i++)
            dots[i / vectors][i % vectors] = vd_set(x[i / vectors].start[b]);
        block_dots(native, four, tokens, vectors, b, codes + (size_t)b * packed->block, x, dots);
        add_block(tokens, vectors, b, packed->minimum, scales + b * KERN_PANEL, x, dots, sum);
    }
    KERN_UNROLL
    for (int i = 0; i < all; i++)
        vf_store(out[i / vectors] + row + i % vectors * KERN_VL, sum[i / vectors][i % vectors]);
}

typedef void tile_function(const kern_packed *packed, const char *panel, int row, const operand *x,
                           float (*out)[KERN_PANEL]);

#define TILE_FUNCTION(name, native, four, tokens, vectors)                                               \
    static void name##_##tokens(const kern_packed *packed, const char *panel, int row, const operand *x, \
                                float(*out)[KERN_PANEL]) {                                               \
        tile(native, four, tokens, vectors, packed, panel, row, x, out);                                 \
    }
#define TILE_FUNCTIONS(tokens, vectors)                    \
    TILE_FUNCTION(q8, false, false, tokens, vectors)       \
    TILE_FUNCTION(q4, false, true, tokens, vectors)        \
    TILE_FUNCTION(q8_native, true, false, tokens, vectors) \
    TILE_FUNCTION(q4_native, true, true, tokens, vectors)
TOKEN_VARIANTS(TILE_FUNCTIONS)
#undef TILE_FUNCTIONS
#undef TILE_FUNCTION

static const struct {
    int rows;                 // at once
    tile_function *run[2][2]; // [native][four]
} variant[MAX_TOKENS + 1] = {
#define VARIANT(tokens, vectors) \
    [tokens] = {(vectors)*KERN_VL, {{q8_##tokens, q4_##tokens}, {q8_native_##tokens, q4_native_##tokens}}},
    TOKEN_VARIANTS(VARIANT)
#undef VARIANT
};

// ------------------------------------------------------------------------------------------------------------ product

// Tokens that are multiplied together: their operands are ready.
typedef struct group {
    const kern_linear_rows *job;
    kern_linear_pieces panels;
    kern_packed packed;
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

// Outputs of one panel that the job wants, of `tokens` tokens from token0 on; out: (tokens, KERN_PANEL).
static void write_panel(const kern_linear_rows *job, int64_t panel, int32_t token0, int tokens,
                        const float (*out)[KERN_PANEL]) {
    const int64_t row = panel * KERN_PANEL - job->row0; // of the job's
    const int first = row < 0 ? (int)-row : 0;
    const int last = job->rows - row < KERN_PANEL ? (int)(job->rows - row) : KERN_PANEL;
    for (int t = 0; t < tokens; t++) {
        const int64_t at = (token0 + t) * job->rows + row;
        for (int r = first; r < last; r++) {
            float y = out[t][r];
            if (job->bias)
                y += job->bias[job->row0 + row + r];
            job->y[at + r] = job->residual ? y + job->residual[at + r] : y;
        }
    }
}

// One panel for all tokens of the group, about equally many a tile.
static void run_panel(const void *context, int64_t piece) {
    const group *g = context;
    const kern_linear_rows *job = g->job + kern_linear_job(&g->panels, &piece);
    const int64_t panel = job->row0 / KERN_PANEL + piece;
    const kern_weight *weight = job->weight;
    const char *codes = (const char *)weight->data + (size_t)panel * g->packed.panel;
    const bool native = has_instruction(weight), four = weight->dtype == KERN_Q4;
    const size_t bytes = operand_bytes(g->packed.blocks);
    for (int32_t done = 0; done < g->tokens;) {
        const int32_t left = g->tokens - done, tiles = (left + MAX_TOKENS - 1) / MAX_TOKENS;
        const int32_t tokens = (left + tiles - 1) / tiles;
        operand x[MAX_TOKENS];
        float out[MAX_TOKENS][KERN_PANEL];
        for (int t = 0; t < tokens; t++)
            x[t] = operand_at(g->operands + (size_t)(done + t) * bytes, g->packed.blocks);
        for (int row = 0; row < KERN_PANEL; row += variant[tokens].rows)
            variant[tokens].run[native][four](&g->packed, codes, row, x, out);
        write_panel(job, panel, g->token0 + done, tokens, (const float(*)[KERN_PANEL])out);
        done += tokens;
    }
}

static void round_inputs(const void *context, int64_t t) {
    const group *g = context;
    const kern_linear_rows *job = g->job;
    const int64_t cols = job->weight->cols, token = g->token0 + t;
    round_token(job->x + cols * (job->token ? job->token[token] : token), cols, g->packed.zero,
                g->operands + (size_t)t * operand_bytes(g->packed.blocks));
}

void KERN_NAME(quant_rows)(const kern_cpu *cpu, const kern_linear_rows *job, int jobs, void *scratch) {
    const kern_weight *weight = job->weight;
    group g = {.job = job, .packed = kern_packed_of(weight->dtype, weight->cols, weight->minimum), .operands = scratch};
    double rows = 0;
    for (int i = 0; i < jobs; i++) {
        const int64_t end = (job[i].row0 + job[i].rows + KERN_PANEL - 1) / KERN_PANEL;
        g.panels.first[i + 1] = g.panels.first[i] + end - job[i].row0 / KERN_PANEL;
        rows += (double)job[i].rows;
    }
    for (g.token0 = 0; g.token0 < job->tokens; g.token0 += TOKENS) {
        g.tokens = job->tokens - g.token0 < TOKENS ? job->tokens - g.token0 : TOKENS;
        const double inputs = (double)g.tokens * (double)weight->cols;
        kern_share(cpu, round_inputs, &g, g.tokens, 4.0 * inputs);
        kern_share(cpu, run_panel, &g, g.panels.first[jobs], 0.25 * rows * inputs);
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
