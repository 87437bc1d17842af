// SPDX-License-Identifier: Apache-2.0
// attention, forward: o_t = sum_j softmax_j(scale q_t . k_j) v_j over the keys j of the token's document up to itself,
// at most `window` of them; models.md 9.
//
// Keys are visited in blocks of 64 positions of the document with a running maximum m, sum l and output o:
//   m' = max(m, max_j s_j);  p_j = e^(s_j - m');  l = l e^(m - m') + sum_j p_j;  o = o e^(m - m') + sum_j p_j v_j.
// A key that a token must not see has p = 0, which changes nothing, so that a token's bits depend on its own query and
// keys alone: neither on the tokens computed beside it nor on where a prompt was cut.
//
// Keys of this launch are read from k and v, earlier ones from the row's pages or from the ring in its slot; only when
// all outputs are made do the new keys go there (a ring's new entries overwrite old ones that this launch still reads).
// Prompt tokens: a task is a tile of tokens and a kv head; scores and outputs are small products of all its queries
// with a block. Generated tokens: a task is a token and a kv head; keys are read once, in place.
#include "kernels/cpu/isa/gemm.h"

enum {
    BLOCK = KERN_PAGE_TOKENS, // keys visited at once
    TILE_QUERIES = 128,       // query rows (tokens x heads of a group) that a tile aims at
};

static const int64_t UNLIMITED = INT64_MAX / 2; // window of full attention

// What one task needs to know.
typedef struct task {
    const kern_attention_args *a;
    const kern_rows *rows;
    int kv_head, group, width;
    int64_t window;
    float *q, *score, *o, *max, *sum; // (queries, width), (queries, BLOCK), (queries, width), (queries) twice
    float *key;                       // (width, BLOCK): keys of a block, transposed
} task;

static int group_of(const kern_attention *s) {
    return s->heads / s->kv_heads;
}

static int tile_tokens(const kern_attention *s) {
    int tokens = TILE_QUERIES / group_of(s);
    return tokens < 8 ? 8 : tokens;
}

static size_t floats_bytes(int64_t count) {
    return kern_align64((size_t)count * sizeof(float));
}

static size_t task_bytes(const kern_attention *s) {
    const int64_t queries = (int64_t)tile_tokens(s) * group_of(s);
    return 2 * floats_bytes(queries * s->head_width) + floats_bytes(queries * BLOCK) + 2 * floats_bytes(queries) +
           floats_bytes((int64_t)s->head_width * BLOCK);
}

static task task_in(const kern_cpu *cpu, const kern_rows *rows, const kern_attention_args *a) {
    const kern_attention *s = &a->attention;
    const int64_t queries = (int64_t)tile_tokens(s) * group_of(s);
    char *memory = kern_cpu_workspace(cpu, kern_team_thread());
    task t = {.a = a, .rows = rows, .group = group_of(s), .width = s->head_width};
    t.window = s->window > 0 ? s->window : UNLIMITED;
    t.q = (float *)memory;
    memory += floats_bytes(queries * s->head_width);
    t.o = (float *)memory;
    memory += floats_bytes(queries * s->head_width);
    t.score = (float *)memory;
    memory += floats_bytes(queries * BLOCK);
    t.max = (float *)memory;
    memory += floats_bytes(queries);
    t.sum = (float *)memory;
    memory += floats_bytes(queries);
    t.key = (float *)memory;
    return t;
}

// ----------------------------------------------------------------------------------------------- where keys are kept

// The keys of one document and kv head: positions [first, start) in pages or ring, from start on in k and v.
typedef struct document {
    int64_t first, start;
    int32_t start_token;
    const kern_row *row;
} document;

// Keys of consecutive positions at equal distances.
typedef struct key_run {
    float *k, *v;
    int64_t stride;
    int count;
} key_run;

static bool has_history(const kern_attention_args *a, const kern_row *row) {
    return a->attention.window > 0 ? a->ring.p && row->slot >= 0 : a->pages.p && row->page0 >= 0;
}

static document document_of(const kern_attention_args *a, const kern_rows *rows, int32_t token) {
    const int32_t start_token = rows->token_start[token];
    const kern_row *row = &rows->row[rows->token_row[token]];
    const int64_t start = rows->token_position[start_token];
    const bool continued = start_token == row->token0 && has_history(a, row);
    return (document){.first = continued ? 0 : start, .start = start, .start_token = start_token, .row = row};
}

// Where the row keeps the keys from `position` on, as far as they lie together.
static key_run kept_run(const task *t, const kern_row *row, int64_t position, int64_t end) {
    const kern_attention *s = &t->a->attention;
    const int64_t capacity = s->window > 0 ? s->window : KERN_PAGE_TOKENS, entry = position % capacity;
    const char *memory =
        s->window > 0 ? (char *)t->a->ring.p + (size_t)row->slot * t->rows->slot_stride
                      : (char *)t->a->pages.p + t->a->page_offset +
                            (size_t)t->rows->page[row->page0 + position / KERN_PAGE_TOKENS] * t->rows->page_stride;
    key_run run = {.k = (float *)memory + (t->kv_head * capacity + entry) * s->head_width, .stride = s->head_width};
    run.v = run.k + s->kv_heads * capacity * s->head_width;
    run.count = (int)(end - position < capacity - entry ? end - position : capacity - entry);
    return run;
}

// The keys from `position` on, as far as they lie together; end - position <= BLOCK.
static key_run next_run(const task *t, const document *d, int64_t position, int64_t end) {
    if (position < d->start)
        return kept_run(t, d->row, position, end < d->start ? end : d->start);
    const int64_t stride = (int64_t)t->a->attention.kv_heads * t->width;
    const int64_t at = (d->start_token + (position - d->start)) * stride + (int64_t)t->kv_head * t->width;
    return (key_run){t->a->k.f + at, t->a->v.f + at, stride, (int)(end - position)};
}

// The part of the block at `block` that lies in [first, end).
static int64_t block_begin(int64_t block, int64_t first) {
    return block > first ? block : first;
}
static int64_t block_end(int64_t block, int64_t end) {
    return block + BLOCK < end ? block + BLOCK : end;
}

// ----------------------------------------------------------------------------------------------- the running softmax

// score (BLOCK), of which [low, high] may be seen, becomes p; max and sum move on. Returns the factor of the earlier
// output.
static float running_softmax(float *score, int low, int high, float *max, float *sum) {
    vi lane;
    for (int i = 0; i < KERN_VL; i++)
        lane[i] = i;
    vf top = vf_set(-INFINITY), total = {0};
    for (int j = 0; j < BLOCK; j += KERN_VL) {
        const vi seen = (lane + j >= low) & (lane + j <= high);
        const vf s = vf_select(seen, vf_load(score + j), vf_set(-INFINITY));
        vf_store(score + j, s);
        top = vf_max(top, s);
    }
    const float block_max = vf_largest(top), new_max = block_max > *max ? block_max : *max;
    const float base = new_max > -INFINITY ? new_max : 0; // a block without a visible key may come first
    for (int j = 0; j < BLOCK; j += KERN_VL) {
        const vf p = vf_exp(vf_load(score + j) - base);
        vf_store(score + j, p);
        total += p;
    }
    const float factor = *max == new_max ? 1.0f : vf_exp(vf_set(*max - base))[0];
    *max = new_max;
    *sum = *sum * factor + vf_sum(total);
    return factor;
}

static inline void scale_row(float *o, int width, float factor) {
    if (factor != 1.0f)
        for (int c = 0; c < width; c++)
            o[c] *= factor;
}

// Queries of `tokens` tokens from `token` on, scaled; empty sums.
static void begin_queries(const task *t, int32_t token, int tokens) {
    const kern_attention *s = &t->a->attention;
    const int values = t->group * t->width;
    for (int i = 0; i < tokens; i++) {
        const float *q = t->a->q.f + ((int64_t)(token + i) * s->heads + (int64_t)t->kv_head * t->group) * t->width;
        for (int c = 0; c < values; c++)
            t->q[i * values + c] = q[c] * s->scale;
    }
    memset(t->o, 0, (size_t)tokens * values * sizeof(float));
    for (int i = 0; i < tokens * t->group; i++) {
        t->max[i] = -INFINITY;
        t->sum[i] = 0;
    }
}

static void finish_queries(const task *t, int32_t token, int tokens) {
    const int heads = t->a->attention.heads;
    for (int i = 0; i < tokens * t->group; i++) {
        const int64_t at = (int64_t)(token + i / t->group) * heads + t->kv_head * t->group + i % t->group;
        const float inverse = 1.0f / t->sum[i];
        for (int c = 0; c < t->width; c++)
            t->a->o.f[at * t->width + c] = t->o[(int64_t)i * t->width + c] * inverse;
        if (t->a->lse.f)
            t->a->lse.f[at] = t->max[i] + logf(t->sum[i]);
    }
}

// ----------------------------------------------------------------------------------------------------- prompt tokens

// The block's keys [begin, end) transposed, at the columns of their positions.
static void pack_keys(const task *t, const document *d, int64_t block, int64_t begin, int64_t end) {
    while (begin < end) {
        const key_run run = next_run(t, d, begin, end);
        gemm_transpose(run.count, t->width, run.k, run.stride, t->key + (begin - block), BLOCK);
        begin += run.count;
    }
}

// Queries [row0, row1) of a piece against the block's keys [begin, end). position: of the piece's first token.
static void visit_block(const task *t, const document *d, int64_t position, int row0, int row1, int64_t block,
                        int64_t begin, int64_t end) {
    const int width = t->width;
    pack_keys(t, d, block, begin, end);
    gemm_nn(row1 - row0, BLOCK, width, t->q + (int64_t)row0 * width, width, t->key, BLOCK,
            t->score + (int64_t)row0 * BLOCK, BLOCK, 0);
    for (int row = row0; row < row1; row++) {
        const int64_t own = position + row / t->group;
        const int64_t oldest = own >= t->window ? own - t->window + 1 : 0;
        const int64_t low = oldest > begin ? oldest : begin, high = own < end - 1 ? own : end - 1;
        const float factor = running_softmax(t->score + (int64_t)row * BLOCK, (int)(low - block), (int)(high - block),
                                             &t->max[row], &t->sum[row]);
        scale_row(t->o + (int64_t)row * width, width, factor);
    }
    while (begin < end) {
        const key_run run = next_run(t, d, begin, end);
        gemm_nn(row1 - row0, width, run.count, t->score + (int64_t)row0 * BLOCK + (begin - block), BLOCK, run.v,
                run.stride, t->o + (int64_t)row0 * width, width, 1);
        begin += run.count;
    }
}

// Tokens of one document inside a tile.
static void run_piece(const task *t, int32_t token, int tokens) {
    const document d = document_of(t->a, t->rows, token);
    const int64_t position = t->rows->token_position[token], end = position + tokens;
    const int64_t oldest = position >= t->window ? position - t->window + 1 : 0;
    const int64_t first = oldest > d.first ? oldest : d.first;
    begin_queries(t, token, tokens);
    for (int64_t block = first / BLOCK * BLOCK; block < end; block += BLOCK) {
        const int64_t key0 = block_begin(block, first), key1 = block_end(block, end);
        // tokens before the block's first key, or a window and more past its last, see nothing of it
        const int64_t late = key1 - 1 - position + t->window;
        const int token0 = key0 > position ? (int)(key0 - position) : 0;
        const int token1 = late < tokens ? (int)late : tokens;
        visit_block(t, &d, position, token0 * t->group, token1 * t->group, block, key0, key1);
    }
    finish_queries(t, token, tokens);
}

static void run_tile(const task *t, int32_t token0, int32_t token1) {
    memset(t->key, 0, (size_t)t->width * BLOCK * sizeof(float));
    while (token0 < token1) {
        int32_t end = token0 + 1;
        while (end < token1 && t->rows->token_start[end] == t->rows->token_start[token0])
            end++;
        run_piece(t, token0, end - token0);
        token0 = end;
    }
}

// -------------------------------------------------------------------------------------------------- generated tokens

static inline float dot(const float *x, const float *y, int width) {
    vf sum = {0};
    int c = 0;
    for (; c + KERN_VL <= width; c += KERN_VL)
        sum += vf_load(x + c) * vf_load(y + c);
    if (c < width)
        sum += vf_load_part(x + c, width - c) * vf_load_part(y + c, width - c);
    return vf_sum(sum);
}

// Lane l: the sum of the lanes of x[l], added as vf_sum adds them.
#define ADD_HALVES(count, step)           \
    KERN_UNROLL                           \
    for (int i = 0; i < (count) / 2; i++) \
        x[i] = vf_mix_low(x[i], x[i + (count) / 2], step) + vf_mix_high(x[i], x[i + (count) / 2], step);
static inline vf sums_of_lanes(vf x[KERN_VL]) {
#if defined(KERN_ISA_AVX512)
    ADD_HALVES(16, 8)
#endif
#if defined(KERN_ISA_AVX512) || defined(KERN_ISA_AVX2)
    ADD_HALVES(8, 4)
#endif
    ADD_HALVES(4, 2)
    ADD_HALVES(2, 1)
    return x[0];
}

// KERN_VL keys at a time: dot(q, k + j * stride, width) of each.
static inline vf dots(const float *q, const float *k, int64_t stride, int width) {
    vf sum[KERN_VL];
    KERN_UNROLL
    for (int j = 0; j < KERN_VL; j++)
        sum[j] = (vf){0};
    int c = 0;
    for (; c + KERN_VL <= width; c += KERN_VL) {
        const vf x = vf_load(q + c);
        KERN_UNROLL
        for (int j = 0; j < KERN_VL; j++)
            sum[j] += x * vf_load(k + j * stride + c);
    }
    if (c < width) {
        const vf x = vf_load_part(q + c, width - c);
        KERN_UNROLL
        for (int j = 0; j < KERN_VL; j++)
            sum[j] += x * vf_load_part(k + j * stride + c, width - c);
    }
    return sums_of_lanes(sum);
}

static inline void ask_for(const float *row, int width) {
    for (int c = 0; c < width; c += 16) // a line
        __builtin_prefetch(row + c, 0, 2);
}

// score[g * BLOCK + j] of the keys of a run. The values that they weigh, and the keys that follow, are asked for
// meanwhile: keys and values come in short pieces that the processor does not foresee.
static void score_run(const task *t, const key_run *run, const key_run *next, float *score) {
    const int width = t->width;
    for (int j = 0; j < run->count; j += KERN_VL) {
        const int keys = run->count - j < KERN_VL ? run->count - j : KERN_VL;
        for (int i = j; i < j + keys; i++) {
            ask_for(run->v + i * run->stride, width);
            if (i < next->count)
                ask_for(next->k + i * next->stride, width);
        }
        for (int g = 0; g < t->group; g++) {
            const float *q = t->q + g * width, *k = run->k + j * run->stride;
            float *to = score + g * BLOCK + j;
            if (keys == KERN_VL)
                vf_store(to, dots(q, k, run->stride, width));
            else
                for (int i = 0; i < keys; i++)
                    to[i] = dot(q, k + i * run->stride, width);
        }
    }
}

static void run_token(const task *t, int32_t token) {
    const document d = document_of(t->a, t->rows, token);
    const int64_t own = t->rows->token_position[token];
    const int64_t oldest = own >= t->window ? own - t->window + 1 : 0;
    const int64_t first = oldest > d.first ? oldest : d.first;
    const int width = t->width;
    begin_queries(t, token, 1);
    for (int64_t block = first / BLOCK * BLOCK; block <= own; block += BLOCK) {
        const int64_t begin = block_begin(block, first), end = block_end(block, own + 1);
        for (int64_t at = begin; at < end;) {
            const key_run run = next_run(t, &d, at, end);
            const int64_t then = at + run.count;
            const key_run next = then <= own ? next_run(t, &d, then, block_end(then, own + 1)) : (key_run){.count = 0};
            score_run(t, &run, &next, t->score + (at - block));
            at = then;
        }
        for (int g = 0; g < t->group; g++) {
            const float factor = running_softmax(t->score + g * BLOCK, (int)(begin - block), (int)(end - 1 - block),
                                                 &t->max[g], &t->sum[g]);
            scale_row(t->o + g * width, width, factor);
        }
        for (int64_t at = begin; at < end;) {
            const key_run run = next_run(t, &d, at, end);
            gemm_nn(t->group, width, run.count, t->score + (at - block), BLOCK, run.v, run.stride, t->o, width, 1);
            at += run.count;
        }
    }
    finish_queries(t, token, 1);
}

// --------------------------------------------------------------------------------------------------------- the cache

// Keeps the keys of the row's last document: all of them in pages, the newest in a ring.
static void keep_row(const task *t, const kern_row *row) {
    if (!has_history(t->a, row))
        return;
    const int32_t last = row->token0 + row->length - 1;
    const document d = document_of(t->a, t->rows, last);
    const int64_t end = t->rows->token_position[last] + 1;
    int64_t at = end - d.start > t->window ? end - t->window : d.start;
    while (at < end) {
        const int64_t stop = at + BLOCK < end ? at + BLOCK : end;
        const key_run to = kept_run(t, row, at, stop), from = next_run(t, &d, at, at + to.count);
        for (int j = 0; j < to.count; j++) {
            memcpy(to.k + j * to.stride, from.k + j * from.stride, (size_t)t->width * sizeof(float));
            memcpy(to.v + j * to.stride, from.v + j * from.stride, (size_t)t->width * sizeof(float));
        }
        at += to.count;
    }
}

// ------------------------------------------------------------------------------------------------------------ launcher

KERN_PREPARE(attention, kern_attention_args) {
    (void)cpu;
    const kern_status status = kern_attention_args_check(a);
    if (status != KERN_OK)
        return status;
    *thread_bytes = task_bytes(&a->attention);
    return KERN_OK;
}

// Multiply-adds of a token against one key, times the keys that a token may see on average, roughly.
static double estimated_operations(const kern_rows *rows, const kern_attention *s) {
    double keys = 0;
    for (int32_t r = 0; r < rows->n_rows; r++) {
        const double length = rows->row[r].length, context = (double)rows->row[r].position + length;
        keys += length * (s->window > 0 && context > s->window ? s->window : context);
    }
    return 4.0 * keys * s->heads * s->head_width;
}

typedef struct launch {
    const kern_cpu *cpu;
    const kern_rows *rows;
    const kern_attention_args *a;
    int32_t tiles;
} launch;

// A token or a tile, and a kv head. Tiles stand first, the last ones, which see the most keys, before the others.
static void run_item(const void *context, int64_t item) {
    const launch *l = context;
    const int32_t generated = l->rows->n_generated, tokens = l->rows->n_tokens;
    const int32_t tile = tile_tokens(&l->a->attention), at = (int32_t)(item / l->a->attention.kv_heads);
    task t = task_in(l->cpu, l->rows, l->a);
    t.kv_head = (int)(item % l->a->attention.kv_heads);
    if (at >= l->tiles) {
        run_token(&t, at - l->tiles);
        return;
    }
    const int32_t token0 = generated + (l->tiles - 1 - at) * tile;
    run_tile(&t, token0, token0 + tile < tokens ? token0 + tile : tokens);
}

static void keep_item(const void *context, int64_t item) {
    const launch *l = context;
    task t = task_in(l->cpu, l->rows, l->a);
    t.kv_head = (int)(item % l->a->attention.kv_heads);
    keep_row(&t, &l->rows->row[item / l->a->attention.kv_heads]);
}

KERN_RUN(attention, kern_attention_args) {
    const kern_attention *s = &a->attention;
    const int32_t tile = tile_tokens(s), generated = rows->n_generated;
    const launch l = {cpu, rows, a, .tiles = (rows->n_tokens - generated + tile - 1) / tile};
    kern_share(cpu, run_item, &l, (int64_t)(l.tiles + generated) * s->kv_heads, estimated_operations(rows, s));
    kern_share(cpu, keep_item, &l, (int64_t)rows->n_rows * s->kv_heads,
               2.0 * rows->n_tokens * s->kv_heads * s->head_width);
    return KERN_OK;
}
