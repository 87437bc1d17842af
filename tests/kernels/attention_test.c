// SPDX-License-Identifier: Apache-2.0
// attention: forward over documents, over pages and rings in several launches, backward; bits that do not depend on
// cuts, neighbours and threads.
#ifdef _OPENMP
#include <omp.h>
#endif

#include "kernels/ref/attention.h"
#include "tests/kernels/kernel_test.h"

static const kern_attention shapes[] = {
    {.heads = 4, .kv_heads = 2, .head_width = 16, .scale = 0.25f},
    {.heads = 3, .kv_heads = 3, .head_width = 20, .scale = 0.3f, .window = 48},
    {.heads = 6, .kv_heads = 1, .head_width = 33, .scale = 0.2f, .window = 1},
    {.heads = 2, .kv_heads = 2, .head_width = 64, .scale = 0.5f, .window = 100},
    {.heads = 8, .kv_heads = 1, .head_width = 7, .scale = 1.0f},
    {.heads = 2, .kv_heads = 1, .head_width = 128, .scale = 0.1f},
    {.heads = 1, .kv_heads = 1, .head_width = 130, .scale = 0.1f, .window = 70},
};
enum { SHAPES = sizeof shapes / sizeof shapes[0] };

// q, k, v and o of some tokens; as floats and as doubles.
typedef struct tensors {
    size_t q_width, kv_width;
    float *q, *k, *v, *o, *lse;
} tensors;

static tensors make_tensors(kernel_test *test, const kern_attention *s, size_t tokens) {
    tensors x = {.q_width = (size_t)s->heads * s->head_width, .kv_width = (size_t)s->kv_heads * s->head_width};
    x.q = kernel_test_floats(test, tokens * x.q_width, -2, 2);
    x.k = kernel_test_floats(test, tokens * x.kv_width, -2, 2);
    x.v = kernel_test_floats(test, tokens * x.kv_width, -1, 1);
    x.o = kernel_test_zero_floats(test, tokens * x.q_width);
    x.lse = kernel_test_zero_floats(test, tokens * s->heads);
    return x;
}

static kern_ref_attention ref_shape(const kern_attention *s) {
    return (kern_ref_attention){s->heads, s->kv_heads, s->head_width, s->window, (double)s->scale};
}

// o and lse of `tokens` tokens from `first` on, which are one document.
static void check_document(kernel_test *test, const kern_attention *s, const tensors *x, size_t first, size_t tokens,
                           double bound) {
    const kern_ref_attention r = ref_shape(s);
    double *o = kernel_test_zero_doubles(test, tokens * x->q_width),
           *lse = kernel_test_zero_doubles(test, tokens * s->heads);
    kern_ref_attention_forward(&r, (int)tokens,
                               kernel_test_widened(test, x->q + first * x->q_width, tokens * x->q_width),
                               kernel_test_widened(test, x->k + first * x->kv_width, tokens * x->kv_width),
                               kernel_test_widened(test, x->v + first * x->kv_width, tokens * x->kv_width), o, lse);
    kernel_test_assert_norm(x->o + first * x->q_width, o, tokens * x->q_width, bound);
    kernel_test_assert_norm(x->lse + first * s->heads, lse, tokens * s->heads, bound);
}

// ------------------------------------------------------------------------------------ rows that stand for themselves

// Documents of 1, 2, 61, 3, 64 and 69 tokens, on and off the grid; a row that starts in the middle of nothing.
enum { OWN_TOKENS = 5 + 200 + 45 };
static const size_t own_start[] = {0, 3, 5, 6, 8, 69, 72, 136, 205, OWN_TOKENS};
enum { OWN_DOCUMENTS = sizeof own_start / sizeof own_start[0] - 1 };
static void own_rows(kernel_test *test) {
    kernel_test_clear_rows(test);
    kernel_test_row(test, KERN_ROW_GENERATED, -1, 5, 0);
    kernel_test_boundary(test, 3);
    kernel_test_documents(test);
    kernel_test_row(test, KERN_ROW_PROMPT, -1, 45, 37);
    kernel_test_prepare(test);
}

static kern_attention_args own_args(const kern_attention *s, const tensors *x) {
    return (kern_attention_args){.q.f = x->q, .k.f = x->k, .v.f = x->v, .o.f = x->o, .lse.f = x->lse, .attention = *s};
}

// Once as requests, once as a batch of training.
START_TEST(documents_equal_reference) {
    for (int i = 0; i < 2 * SHAPES; i++) {
        kernel_test test;
        if (!kernel_test_open(&test, _i, "cpu"))
            MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
        const tensors x = make_tensors(&test, &shapes[i / 2], OWN_TOKENS);
        own_rows(&test);
        test.rows->merge = i % 2 == 1;
        kernel_test_prepare(&test);
        const kern_attention_args args = own_args(&shapes[i / 2], &x);
        kernel_test_launch(&test, KERN_OP_ATTENTION, &args);
        for (size_t d = 0; d < OWN_DOCUMENTS; d++)
            check_document(&test, &shapes[i / 2], &x, own_start[d], own_start[d + 1] - own_start[d], 1e-6);
        kernel_test_close(&test);
    }
}
END_TEST

// ------------------------------------------------------------------------------------------------------------ sessions

enum { SLOTS = 3, LENGTH = 333, PROMPT = 300, SESSION_PAGES = 6, LAYERS = 2 };

// What SLOTS sessions keep between launches. Everything is NaN until it is written: a read of it would show.
typedef struct cache {
    int session_pages;
    float *pages, *slots;
    size_t page_floats, slot_floats;
} cache;

static cache make_cache(kernel_test *test, const kern_attention *s, int session_pages) {
    cache c = {.session_pages = session_pages,
               .page_floats = (size_t)LAYERS * 2 * s->kv_heads * KERN_PAGE_TOKENS * s->head_width,
               .slot_floats = (size_t)2 * s->kv_heads * s->window * s->head_width + 16};
    c.pages = kernel_test_zero_floats(test, c.page_floats * SLOTS * (size_t)session_pages);
    c.slots = kernel_test_zero_floats(test, c.slot_floats * SLOTS);
    for (size_t i = 0; i < c.page_floats * SLOTS * (size_t)session_pages; i++)
        c.pages[i] = NAN;
    for (size_t i = 0; i < c.slot_floats * SLOTS; i++)
        c.slots[i] = NAN;
    test->rows->page_stride = c.page_floats * sizeof(float);
    test->rows->slot_stride = c.slot_floats * sizeof(float);
    return c;
}

// A row of session `slot`, whose pages lie scattered in the pool.
static void session_row(kernel_test *test, const kern_attention *s, const cache *c, kern_row_kind kind, int slot,
                        int length, int position) {
    kern_row *row = kernel_test_row(test, kind, slot, length, position);
    if (s->window > 0)
        return;
    row->page0 = test->rows->n_pages;
    for (int p = 0; p < c->session_pages; p++)
        test->rows->page[test->rows->n_pages++] = (p * SLOTS + (slot + p) % SLOTS);
}

static kern_attention_args cached_args(const kern_attention *s, const cache *c, const tensors *x) {
    kern_attention_args args = own_args(s, x);
    args.page_offset = (int64_t)(c->page_floats / LAYERS * sizeof(float)); // the second layer's
    if (s->window > 0)
        args.ring.f = c->slots;
    else
        args.pages.f = c->pages;
    return args;
}

// Runs tokens [position, position + length) of the sessions 0 .. sessions - 1, whose tensors are x[slot], as one
// launch.
static void run_rows(kernel_test *test, const kern_attention *s, const cache *c, const tensors *x, int sessions,
                     kern_row_kind kind, int position, int length) {
    tensors batch = make_tensors(test, s, (size_t)sessions * length);
    kernel_test_clear_rows(test);
    for (int slot = 0; slot < sessions; slot++) {
        const size_t at = (size_t)slot * length, count = (size_t)length, from = (size_t)position;
        session_row(test, s, c, kind, slot, length, position);
        memcpy(batch.q + at * batch.q_width, x[slot].q + from * batch.q_width, count * batch.q_width * sizeof(float));
        memcpy(batch.k + at * batch.kv_width, x[slot].k + from * batch.kv_width,
               count * batch.kv_width * sizeof(float));
        memcpy(batch.v + at * batch.kv_width, x[slot].v + from * batch.kv_width,
               count * batch.kv_width * sizeof(float));
    }
    kernel_test_prepare(test);
    const kern_attention_args args = cached_args(s, c, &batch);
    kernel_test_launch(test, KERN_OP_ATTENTION, &args);
    for (int slot = 0; slot < sessions; slot++) {
        memcpy(x[slot].o + (size_t)position * batch.q_width, batch.o + (size_t)slot * length * batch.q_width,
               (size_t)length * batch.q_width * sizeof(float));
        memcpy(x[slot].lse + (size_t)position * s->heads, batch.lse + (size_t)slot * length * s->heads,
               (size_t)length * s->heads * sizeof(float));
    }
}

// The whole of the sessions: the prompt cut at these positions, then generated tokens, one launch with three a row.
static void run_sessions(kernel_test *test, const kern_attention *s, const tensors *x, int sessions, const int *cut) {
    const cache c = make_cache(test, s, SESSION_PAGES);
    int position = 0;
    for (int i = 0; position < PROMPT; i++) {
        run_rows(test, s, &c, x, sessions, KERN_ROW_PROMPT, position, cut[i] - position);
        position = cut[i];
    }
    run_rows(test, s, &c, x, sessions, KERN_ROW_GENERATED, position, 3);
    for (position += 3; position < LENGTH; position++)
        run_rows(test, s, &c, x, sessions, KERN_ROW_GENERATED, position, 1);
}

START_TEST(sessions_equal_reference_however_cut) {
    static const int whole[] = {PROMPT}, cut[] = {32, 64, 160, 192, 288, PROMPT};
    for (int i = 0; i < SHAPES; i++) {
        const kern_attention *s = &shapes[i];
        kernel_test test;
        if (!kernel_test_open(&test, _i, "cpu"))
            MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
        tensors x[SLOTS], alone;
        for (int slot = 0; slot < SLOTS; slot++)
            x[slot] = make_tensors(&test, s, LENGTH);
        run_sessions(&test, s, x, SLOTS, whole);
        for (int slot = 0; slot < SLOTS; slot++)
            check_document(&test, s, &x[slot], 0, LENGTH, 1e-6);
        alone = x[0]; // once more alone and in pieces
        alone.o = kernel_test_zero_floats(&test, LENGTH * alone.q_width);
        alone.lse = kernel_test_zero_floats(&test, (size_t)LENGTH * s->heads);
        run_sessions(&test, s, &alone, 1, cut);
        kernel_test_assert_same(alone.o, x[0].o, LENGTH * alone.q_width);
        kernel_test_assert_same(alone.lse, x[0].lse, LENGTH * s->heads);
        kernel_test_close(&test);
    }
}
END_TEST

// A row whose second half is a new document: it sees nothing kept before, and it alone is kept.
START_TEST(a_new_document_starts_the_cache_anew) {
    for (int i = 0; i < SHAPES; i++) {
        const kern_attention *s = &shapes[i];
        kernel_test test;
        if (!kernel_test_open(&test, _i, "cpu"))
            MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
        const cache c = make_cache(&test, s, SESSION_PAGES);
        tensors old = make_tensors(&test, s, 90), young = make_tensors(&test, s, 71),
                both = make_tensors(&test, s, 100);
        run_rows(&test, s, &c, &old, 1, KERN_ROW_PROMPT, 0, 60);
        kernel_test_clear_rows(&test);
        session_row(&test, s, &c, KERN_ROW_PROMPT, 0, 100, 60);
        kernel_test_boundary(&test, 30);
        kernel_test_prepare(&test);
        memcpy(both.q, old.q + 60 * both.q_width, 30 * both.q_width * sizeof(float));
        memcpy(both.k, old.k + 60 * both.kv_width, 30 * both.kv_width * sizeof(float));
        memcpy(both.v, old.v + 60 * both.kv_width, 30 * both.kv_width * sizeof(float));
        memcpy(both.q + 30 * both.q_width, young.q, 70 * both.q_width * sizeof(float));
        memcpy(both.k + 30 * both.kv_width, young.k, 70 * both.kv_width * sizeof(float));
        memcpy(both.v + 30 * both.kv_width, young.v, 70 * both.kv_width * sizeof(float));
        const kern_attention_args args = cached_args(s, &c, &both);
        kernel_test_launch(&test, KERN_OP_ATTENTION, &args);
        memcpy(old.o + 60 * both.q_width, both.o, 30 * both.q_width * sizeof(float));
        memcpy(old.lse + 60 * s->heads, both.lse, (size_t)30 * s->heads * sizeof(float));
        memcpy(young.o, both.o + 30 * both.q_width, 70 * both.q_width * sizeof(float));
        memcpy(young.lse, both.lse + 30 * s->heads, (size_t)70 * s->heads * sizeof(float));
        run_rows(&test, s, &c, &young, 1, KERN_ROW_GENERATED, 70, 1);
        check_document(&test, s, &old, 0, 90, 1e-6);
        check_document(&test, s, &young, 0, 71, 1e-6);
        kernel_test_close(&test);
    }
}
END_TEST

// ---------------------------------------------------------------------------------------------------- long contexts

// The output of the last of `tokens` tokens of one document, each head.
static double *last_output(kernel_test *test, const kern_attention *s, const tensors *x, size_t tokens) {
    double *o = kernel_test_zero_doubles(test, x->q_width), *p = kernel_test_zero_doubles(test, tokens);
    const size_t width = (size_t)s->head_width, group = (size_t)(s->heads / s->kv_heads);
    const size_t first = s->window > 0 && tokens > (size_t)s->window ? tokens - (size_t)s->window : 0;
    for (size_t head = 0; head < (size_t)s->heads; head++) {
        const float *q = x->q + (tokens - 1) * x->q_width + head * width;
        double largest = -INFINITY, sum = 0;
        for (size_t j = first; j < tokens; j++) {
            const float *k = x->k + j * x->kv_width + head / group * width;
            p[j] = 0;
            for (size_t c = 0; c < width; c++)
                p[j] += (double)s->scale * (double)q[c] * (double)k[c];
            largest = fmax(largest, p[j]);
        }
        for (size_t j = first; j < tokens; j++) {
            p[j] = exp(p[j] - largest);
            sum += p[j];
        }
        for (size_t j = first; j < tokens; j++)
            for (size_t c = 0; c < width; c++)
                o[head * width + c] += p[j] / sum * (double)x->v[j * x->kv_width + head / group * width + c];
    }
    return o;
}

// Keys and values of the tokens [0, count) of session `slot`, as launches would have kept them.
static void fill_cache(const kern_attention *s, const cache *c, const tensors *x, int slot, int count) {
    const size_t width = (size_t)s->head_width, heads = (size_t)s->kv_heads;
    for (int t = s->window > 0 && count > s->window ? count - s->window : 0; t < count; t++) {
        const int page = t / KERN_PAGE_TOKENS;
        const size_t capacity = s->window > 0 ? (size_t)s->window : KERN_PAGE_TOKENS, entry = (size_t)t % capacity;
        float *memory = s->window > 0 ? c->slots + (size_t)slot * c->slot_floats
                                      : c->pages + (size_t)(page * SLOTS + (slot + page) % SLOTS) * c->page_floats +
                                            c->page_floats / LAYERS;
        for (size_t head = 0; head < heads; head++) {
            float *k = memory + (head * capacity + entry) * width, *v = k + heads * capacity * width;
            memcpy(k, x->k + (size_t)t * x->kv_width + head * width, width * sizeof *k);
            memcpy(v, x->v + (size_t)t * x->kv_width + head * width, width * sizeof *v);
        }
    }
}

// Token `position` of session 0 and a prompt of somebody else.
static void run_beside_a_prompt(kernel_test *test, const kern_attention *s, const cache *c, const tensors *x,
                                int position) {
    enum { PROMPT_TOKENS = 20 };
    const tensors batch = make_tensors(test, s, 1 + PROMPT_TOKENS);
    const size_t from = (size_t)position;
    kernel_test_clear_rows(test);
    session_row(test, s, c, KERN_ROW_GENERATED, 0, 1, position);
    kernel_test_row(test, KERN_ROW_PROMPT, -1, PROMPT_TOKENS, 0);
    kernel_test_prepare(test);
    memcpy(batch.q, x->q + from * batch.q_width, batch.q_width * sizeof(float));
    memcpy(batch.k, x->k + from * batch.kv_width, batch.kv_width * sizeof(float));
    memcpy(batch.v, x->v + from * batch.kv_width, batch.kv_width * sizeof(float));
    const kern_attention_args args = cached_args(s, c, &batch);
    kernel_test_launch(test, KERN_OP_ATTENTION, &args);
    memcpy(x->o + from * batch.q_width, batch.o, batch.q_width * sizeof(float));
}

// One token behind a long context: alone, beside two others, and beside a prompt, which leaves no room to share it.
START_TEST(far_tokens_do_not_depend_on_who_computes_them) {
    enum { CONTEXT = 2600 };
    static const kern_attention far[] = {{.heads = 4, .kv_heads = 2, .head_width = 16, .scale = 0.25f},
                                         {.heads = 2, .kv_heads = 1, .head_width = 70, .scale = 0.2f, .window = 1500}};
    for (size_t i = 0; i < sizeof far / sizeof *far; i++) {
        const kern_attention *s = &far[i];
        kernel_test test;
        if (!kernel_test_open(&test, _i, "cpu"))
            MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
        const cache c = make_cache(&test, s, (CONTEXT + KERN_PAGE_TOKENS) / KERN_PAGE_TOKENS);
        tensors x[SLOTS];
        for (int slot = 0; slot < SLOTS; slot++) {
            x[slot] = make_tensors(&test, s, CONTEXT + 1);
            fill_cache(s, &c, &x[slot], slot, CONTEXT);
        }
        run_rows(&test, s, &c, x, SLOTS, KERN_ROW_GENERATED, CONTEXT, 1);
        float *together = kernel_test_copy(&test, x[0].o + CONTEXT * x[0].q_width, x[0].q_width);
        kernel_test_assert_norm(together, last_output(&test, s, &x[0], CONTEXT + 1), x[0].q_width, 1e-6);
        run_rows(&test, s, &c, x, 1, KERN_ROW_GENERATED, CONTEXT, 1);
        kernel_test_assert_same(together, x[0].o + CONTEXT * x[0].q_width, x[0].q_width);
        run_beside_a_prompt(&test, s, &c, &x[0], CONTEXT);
        kernel_test_assert_same(together, x[0].o + CONTEXT * x[0].q_width, x[0].q_width);
        kernel_test_close(&test);
    }
}
END_TEST

// ------------------------------------------------------------------------------------------------------------ backward

typedef struct gradients {
    float *d_o, *dq, *dk, *dv;
} gradients;

static gradients run_backward(kernel_test *test, const kern_attention *s, const tensors *x) {
    const gradients g = {.d_o = kernel_test_floats(test, OWN_TOKENS * x->q_width, -1, 1),
                         .dq = kernel_test_floats(test, OWN_TOKENS * x->q_width, -1, 1),
                         .dk = kernel_test_floats(test, OWN_TOKENS * x->kv_width, -1, 1),
                         .dv = kernel_test_floats(test, OWN_TOKENS * x->kv_width, -1, 1)};
    const kern_attention_args forward = own_args(s, x);
    const kern_attention_backward_args backward = {.q.f = x->q,
                                                   .k.f = x->k,
                                                   .v.f = x->v,
                                                   .o.f = x->o,
                                                   .lse.f = x->lse,
                                                   .d_o.f = g.d_o,
                                                   .dq.f = g.dq,
                                                   .dk.f = g.dk,
                                                   .dv.f = g.dv,
                                                   .attention = *s};
    kernel_test_launch(test, KERN_OP_ATTENTION, &forward);
    kernel_test_launch(test, KERN_OP_ATTENTION_BACKWARD, &backward);
    return g;
}

static void check_gradients(kernel_test *test, const kern_attention *s, const tensors *x, const gradients *g,
                            double bound) {
    const kern_ref_attention r = ref_shape(s);
    const size_t q_count = OWN_TOKENS * x->q_width, kv_count = OWN_TOKENS * x->kv_width;
    double *dq = kernel_test_zero_doubles(test, q_count), *dk = kernel_test_zero_doubles(test, kv_count);
    double *dv = kernel_test_zero_doubles(test, kv_count), *q = kernel_test_widened(test, x->q, q_count);
    double *k = kernel_test_widened(test, x->k, kv_count), *v = kernel_test_widened(test, x->v, kv_count);
    double *d_o = kernel_test_widened(test, g->d_o, q_count);
    for (size_t d = 0; d < OWN_DOCUMENTS; d++) {
        const size_t a = own_start[d] * x->q_width, b = own_start[d] * x->kv_width;
        kern_ref_attention_backward(&r, (int)(own_start[d + 1] - own_start[d]), q + a, k + b, v + b, d_o + a, dq + a,
                                    dk + b, dv + b);
    }
    if (s->window != 1) { // a softmax over one key has no gradient in q and k
        kernel_test_assert_norm(g->dq, dq, q_count, bound);
        kernel_test_assert_norm(g->dk, dk, kv_count, bound);
    }
    kernel_test_assert_norm(g->dv, dv, kv_count, bound);
}

START_TEST(backward_equals_reference) {
    for (int i = 0; i < SHAPES; i++) {
        kernel_test test;
        if (!kernel_test_open(&test, _i, "cpu"))
            MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
        const tensors x = make_tensors(&test, &shapes[i], OWN_TOKENS);
        own_rows(&test);
        const gradients g = run_backward(&test, &shapes[i], &x);
        check_gradients(&test, &shapes[i], &x, &g, 5e-6);
        kernel_test_close(&test);
    }
}
END_TEST

// Training where operands may be rounded to bf16: forward and backward are as exact as that.
START_TEST(fast_training) {
    static const kern_attention fast_shapes[] = {
        {.heads = 2, .kv_heads = 1, .head_width = 64, .scale = 0.1f},
        {.heads = 2, .kv_heads = 2, .head_width = 128, .scale = 0.08f, .window = 70},
        {.heads = 2, .kv_heads = 1, .head_width = 128, .scale = 0.08f},
        {.heads = 3, .kv_heads = 3, .head_width = 48, .scale = 0.1f}};
    for (size_t i = 0; i < sizeof fast_shapes / sizeof fast_shapes[0]; i++) {
        kernel_test test;
        if (!kernel_test_open_fast(&test))
            MESA_TEST_SKIP("no device %s", "cuda:0");
        const kern_attention *s = &fast_shapes[i];
        const tensors x = make_tensors(&test, s, OWN_TOKENS);
        own_rows(&test);
        test.rows->merge = true;
        kernel_test_prepare(&test);
        const gradients g = run_backward(&test, s, &x);
        for (size_t d = 0; d < OWN_DOCUMENTS; d++)
            check_document(&test, s, &x, own_start[d], own_start[d + 1] - own_start[d], 1e-2);
        check_gradients(&test, s, &x, &g, 2e-2);
        kernel_test_close(&test);
    }
}
END_TEST

START_TEST(fast_training_of_nobody) {
    const kern_attention s = {.heads = 2, .kv_heads = 1, .head_width = 64, .scale = 0.1f};
    kernel_test test;
    if (!kernel_test_open_fast(&test))
        MESA_TEST_SKIP("no device %s", "cuda:0");
    const tensors x = make_tensors(&test, &s, OWN_TOKENS);
    kernel_test_clear_rows(&test);
    test.rows->merge = true;
    kernel_test_prepare(&test);
    (void)run_backward(&test, &s, &x);
    kernel_test_close(&test);
}
END_TEST

#ifdef _OPENMP
START_TEST(threads_do_not_matter) {
    const kern_attention *s = &shapes[0];
    tensors x[2];
    gradients g[2];
    kernel_test test[2];
    for (int i = 0; i < 2; i++) {
        omp_set_num_threads(i + 1);
        if (!kernel_test_open(&test[i], _i, "cpu"))
            MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
        x[i] = make_tensors(&test[i], s, OWN_TOKENS);
        own_rows(&test[i]);
        g[i] = run_backward(&test[i], s, &x[i]);
    }
    kernel_test_assert_same(x[0].o, x[1].o, OWN_TOKENS * x[0].q_width);
    kernel_test_assert_same(g[0].dq, g[1].dq, OWN_TOKENS * x[0].q_width);
    kernel_test_assert_same(g[0].dk, g[1].dk, OWN_TOKENS * x[0].kv_width);
    kernel_test_assert_same(g[0].dv, g[1].dv, OWN_TOKENS * x[0].kv_width);
    kernel_test_close(&test[0]);
    kernel_test_close(&test[1]);
}
END_TEST
#endif

// The reference's own backward against central differences of its forward.
enum { REF_TOKENS = 6, REF_Q = REF_TOKENS * 4 * 3, REF_KV = REF_TOKENS * 2 * 3 };
typedef struct ref_problem {
    double q[REF_Q], k[REF_KV], v[REF_KV], d_o[REF_Q];
    kern_ref_attention s;
} ref_problem;

static double ref_loss(void *context) {
    const ref_problem *p = context;
    double o[REF_Q];
    kern_ref_attention_forward(&p->s, REF_TOKENS, p->q, p->k, p->v, o, NULL);
    return kernel_test_dot(o, p->d_o, REF_Q);
}

START_TEST(reference_backward_equals_differences) {
    kernel_test test = {.seed = 5};
    for (int window = 0; window < 5; window += 4) {
        ref_problem p = {.s = {.heads = 4, .kv_heads = 2, .width = 3, .window = window, .scale = 0.7}};
        double *values = (double *)&p, dq[REF_Q], dk[REF_KV], dv[REF_KV];
        for (int i = 0; i < 2 * REF_Q + 2 * REF_KV; i++)
            values[i] = 2 * kernel_test_uniform(&test) - 1;
        kern_ref_attention_backward(&p.s, REF_TOKENS, p.q, p.k, p.v, p.d_o, dq, dk, dv);
        kernel_test_gradient("dq", ref_loss, &p, p.q, dq, REF_Q, 1e-8);
        kernel_test_gradient("dk", ref_loss, &p, p.k, dk, REF_KV, 1e-8);
        kernel_test_gradient("dv", ref_loss, &p, p.v, dv, REF_KV, 1e-8);
    }
}
END_TEST

START_TEST(refuses_what_it_cannot_do) {
    kernel_test test;
    ck_assert(kernel_test_open(&test, 0, "cpu"));
    const tensors x = make_tensors(&test, &shapes[0], OWN_TOKENS);
    kern_attention_args args = own_args(&shapes[0], &x);
    kernel_test_assert_refused(&test, KERN_OP_ATTENTION, &args, KERN_OK);
    args.attention.kv_heads = 3; // does not divide 4
    kernel_test_assert_refused(&test, KERN_OP_ATTENTION, &args, KERN_INVALID);
    args.attention.kv_heads = 2;
    args.ring.f = x.o; // full attention keeps pages
    kernel_test_assert_refused(&test, KERN_OP_ATTENTION, &args, KERN_INVALID);
    const kern_attention_backward_args backward = {.q.f = x.q,
                                                   .k.f = x.k,
                                                   .v.f = x.v,
                                                   .o.f = x.o,
                                                   .lse.f = x.lse,
                                                   .d_o.f = x.o,
                                                   .dq.f = x.q,
                                                   .dk.f = x.k,
                                                   .dv.f = x.v,
                                                   .attention = shapes[0]};
    kernel_test_row(&test, KERN_ROW_PROMPT, 0, 4, 0); // a row with a slot may have a past
    kernel_test_prepare(&test);
    kernel_test_assert_refused(&test, KERN_OP_ATTENTION_BACKWARD, &backward, KERN_OK);
    ck_assert_int_eq(kern_launch(test.stream, KERN_OP_ATTENTION_BACKWARD, test.rows, &backward), KERN_UNSUPPORTED);
    kernel_test_close(&test);
}
END_TEST

static Suite *attention_suite(void) {
    Suite *suite = suite_create("kernels/attention");
    TCase *tcase = tcase_create("attention");
    tcase_set_timeout(tcase, 60);
    tcase_add_loop_test(tcase, documents_equal_reference, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tcase, sessions_equal_reference_however_cut, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tcase, a_new_document_starts_the_cache_anew, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tcase, far_tokens_do_not_depend_on_who_computes_them, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tcase, backward_equals_reference, 0, KERNEL_TEST_DEVICES);
#ifdef _OPENMP
    tcase_add_loop_test(tcase, threads_do_not_matter, 0, KERNEL_TEST_ISAS);
#endif
    tcase_add_test(tcase, fast_training);
    tcase_add_test(tcase, fast_training_of_nobody);
    tcase_add_test(tcase, reference_backward_equals_differences);
    tcase_add_test(tcase, refuses_what_it_cannot_do);
    suite_add_tcase(suite, tcase);
    return suite;
}

MESA_TEST_MAIN(attention_suite)
