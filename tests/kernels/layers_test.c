// SPDX-License-Identifier: Apache-2.0
// Whole layers in steps of few sessions: a plan leaves in memory what the same launches one by one do, bit for bit.
//
// A model of two layers between embedding and logits, by the operations that the engine emits: products, convolutions,
// unit vectors, gates, a core (recurrence or Mesa), a gated norm, an MLP. A CUDA device runs such a step as one kernel
// that walks the operations; the batches grow and shrink, so that its graphs are met again with other tables and with
// fewer rows than they were made for. Widths of one warp's, four warps' and more shares of a product, and of more than
// what a warp holds at a time.
#include "tests/kernels/kernel_test.h"

enum { MOST = 8, SLOTS = 12, PARAMS = 128, LAYERS = 2, TAPS = 4, VOCABULARY = 77, REGION = 1 << 19 };

typedef enum core_kind { CORE_DELTA, CORE_ADD, CORE_CHANNEL, CORE_SHARED, CORE_MESA } core_kind;

typedef struct shape {
    core_kind core;
    int32_t width, heads, depth, inner;
} shape;

typedef struct memory {
    float *state, *saved, *scratch; // (SLOTS, slot), REGION, REGION floats
} memory;

typedef struct fixture {
    kernel_test test;
    const shape *shape;
    kern_plan *plan;
    void *param[PARAMS];
    bool is_weight[PARAMS];
    memory memory[2];
    size_t slot_floats, scratch_floats, saved_floats;
} fixture;

// One pass over the operations: into a plan, with references, or launched on a memory. What it names is numbered in the
// order of the pass; parameters come to be in the first.
typedef struct pass {
    fixture *f;
    const memory *memory; // NULL: a plan
    size_t state, saved, scratch;
    int params;
} pass;

static void *sent(kernel_test *test, const void *from, size_t bytes) {
    void *memory = NULL;
    ck_assert_int_eq(kern_alloc(test->device, bytes, &memory), KERN_OK);
    ck_assert_int_eq(kern_upload(test->stream, memory, from, bytes), KERN_OK);
    return memory;
}

static kern_ptr param_of(pass *p) {
    const int index = p->params++;
    return p->memory ? (kern_ptr){.p = p->f->param[index]} : kern_ref(KERN_CLASS_PARAM, (uint64_t)index);
}

static kern_ptr vector(pass *p, size_t count, double low, double high) {
    kernel_test *test = &p->f->test;
    ck_assert_int_lt(p->params, PARAMS);
    if (!p->f->param[p->params])
        p->f->param[p->params] = sent(test, kernel_test_floats(test, count, low, high), count * sizeof(float));
    return param_of(p);
}

static kern_ptr weight(pass *p, int64_t rows, int64_t cols) {
    kernel_test *test = &p->f->test;
    ck_assert_int_lt(p->params, PARAMS);
    if (!p->f->param[p->params]) {
        const size_t count = (size_t)(rows * cols);
        const float *values = kernel_test_floats(test, count, -0.2, 0.2);
        uint16_t *narrow = kernel_test_bytes(test, count * sizeof *narrow);
        for (size_t i = 0; i < count; i++) {
            uint32_t bits;
            memcpy(&bits, &values[i], sizeof bits);
            narrow[i] = (uint16_t)(bits >> 16);
        }
        const kern_weight_desc desc = {.dtype = KERN_BF16, .rows = rows, .cols = cols, .host = narrow};
        ck_assert_int_eq(kern_weight_create(test->device, &desc, (kern_weight **)&p->f->param[p->params]), KERN_OK);
        p->f->is_weight[p->params] = true;
    }
    return param_of(p);
}

static kern_ptr take(const pass *p, kern_class class_, float *base, size_t *used, size_t floats) {
    const size_t at = *used;
    *used += (floats + 15) / 16 * 16;
    ck_assert_uint_le(*used, REGION);
    return p->memory ? (kern_ptr){.f = base + at} : kern_ref(class_, at * sizeof(float));
}
static kern_ptr buffer(pass *p, int32_t width) {
    return take(p, KERN_CLASS_SCRATCH, p->memory ? p->memory->scratch : NULL, &p->scratch, (size_t)(MOST * width));
}
static kern_ptr saved(pass *p, int32_t width) {
    return take(p, KERN_CLASS_SAVED, p->memory ? p->memory->saved : NULL, &p->saved, (size_t)(MOST * width));
}
static kern_ptr slots(pass *p, int32_t floats) {
    return take(p, KERN_CLASS_STATE, p->memory ? p->memory->state : NULL, &p->state, (size_t)floats);
}

static void call(pass *p, kern_op op, const void *args) {
    ck_assert_msg((p->memory ? kern_launch(p->f->test.stream, op, p->f->test.rows, args)
                             : kern_plan_add(p->f->plan, op, args)) == KERN_OK,
                  "%s is refused", kern_op_name(op));
}

static const kern_ptr none = {.ref = 0};

static kern_ptr normed(pass *p, kern_ptr x, kern_ptr gate, int32_t groups, int32_t width) {
    const kern_ptr y = buffer(p, groups * width);
    call(p, KERN_OP_RMSNORM,
         &(kern_rmsnorm_args){.x = x,
                              .weight = vector(p, (size_t)width, 0.5, 1.5),
                              .gate = gate,
                              .y = y,
                              .groups = groups,
                              .width = width,
                              .eps = 1e-5f,
                              .activation = KERN_SILU});
    return y;
}

static kern_ptr product(pass *p, kern_ptr x, int32_t cols, int32_t rows, bool biased) {
    const kern_ptr y = buffer(p, rows), w = weight(p, rows, cols);
    const kern_ptr bias = biased ? vector(p, (size_t)rows, -1, 1) : none;
    call(p, KERN_OP_LINEAR, &(kern_linear_args){.x = x, .weight = w, .bias = bias, .y = y, .cols = cols, .rows = rows});
    return y;
}

static void add_product(pass *p, kern_ptr x, int32_t cols, kern_ptr stream, int32_t rows) {
    const kern_ptr w = weight(p, rows, cols);
    call(p, KERN_OP_LINEAR,
         &(kern_linear_args){.x = x, .weight = w, .residual = stream, .y = stream, .cols = cols, .rows = rows});
}

static kern_ptr convolved(pass *p, kern_ptr x, int32_t channels, bool biased) {
    const kern_ptr y = buffer(p, channels), w = vector(p, (size_t)(TAPS * channels), -1, 1);
    const kern_ptr bias = biased ? vector(p, (size_t)channels, -1, 1) : none;
    call(p, KERN_OP_SHORT_CONV,
         &(kern_short_conv_args){x, w, bias, slots(p, (TAPS - 1) * channels), y, channels, TAPS, KERN_SILU, 0});
    return y;
}

static kern_ptr unit(pass *p, kern_ptr x, int32_t groups, int32_t width) {
    const kern_ptr y = buffer(p, groups * width);
    call(p, KERN_OP_L2NORM, &(kern_l2norm_args){x, y, groups, width, 1e-6f});
    return y;
}

typedef struct operands {
    kern_ptr q, k, v, g, beta;
    int32_t heads, keys, depth; // states, heads of q and k
} operands;

static kern_ptr recurrence(pass *p, const operands *in, core_kind core) {
    const kern_ptr o = buffer(p, in->heads * in->depth);
    const kern_recurrence family = {.decay = core == CORE_CHANNEL ? KERN_DECAY_CHANNEL : KERN_DECAY_SCALAR,
                                    .update = core == CORE_ADD ? KERN_UPDATE_ADD : KERN_UPDATE_DELTA,
                                    .weighted = 1,
                                    .heads = in->heads,
                                    .query_heads = in->keys,
                                    .key_heads = in->keys,
                                    .key_width = in->depth,
                                    .value_width = in->depth,
                                    .scale = 0.125f};
    call(p, KERN_OP_RECURRENCE,
         &(kern_recurrence_args){.q = in->q,
                                 .k = in->k,
                                 .v = in->v,
                                 .g = in->g,
                                 .beta = in->beta,
                                 .state = slots(p, in->heads * in->depth * in->depth),
                                 .o = o,
                                 .family = family});
    return o;
}

static kern_ptr solved(pass *p, const operands *in, kern_ptr sum) {
    const kern_ptr o = buffer(p, in->heads * in->depth);
    call(p, KERN_OP_MESA,
         &(kern_mesa_args){
             .q = in->q,
             .k = in->k,
             .v = in->v,
             .g = in->g,
             .beta = in->beta,
             .lambda_params = vector(p, (size_t)(in->heads * in->depth), -1, 1),
             .state = slots(p, 2 * in->heads * in->depth * in->depth),
             .o = o,
             .sum = sum,
             .mesa = {.heads = in->heads, .key_width = in->depth, .value_width = in->depth, .lambda_bound = 0.25f}});
    return o;
}

static void mixer(pass *p, kern_ptr stream, kern_ptr sum) {
    const shape *s = p->f->shape;
    operands in = {.heads = s->heads, .keys = s->core == CORE_SHARED ? s->heads / 2 : s->heads, .depth = s->depth};
    const int32_t width = s->width, channels = s->core == CORE_CHANNEL ? s->depth : 1;
    const int32_t values = in.heads * in.depth, keys = in.keys * in.depth;
    const kern_ptr x = normed(p, stream, none, 1, width);
    in.q = product(p, x, width, keys, false), in.k = product(p, x, width, keys, false);
    in.v = product(p, x, width, values, true);
    const kern_ptr a = product(p, x, width, in.heads * channels, true), b = product(p, x, width, in.heads, false);
    const kern_ptr gate = product(p, x, width, values, false);
    in.q = convolved(p, in.q, keys, true), in.k = convolved(p, in.k, keys, false);
    if (s->core != CORE_MESA)
        in.v = convolved(p, in.v, values, false);
    in.q = unit(p, in.q, in.keys, in.depth), in.k = unit(p, in.k, in.keys, in.depth);
    in.g = buffer(p, in.heads * channels), in.beta = buffer(p, in.heads);
    call(p, KERN_OP_GATES,
         &(kern_gates_args){.a = a,
                            .b = b,
                            .A_log = vector(p, (size_t)in.heads, -1, 0),
                            .dt_bias = vector(p, (size_t)(in.heads * channels), -1, 1),
                            .g = in.g,
                            .beta = in.beta,
                            .gates = {.heads = in.heads,
                                      .channels = channels,
                                      .decay_law = KERN_DECAY_LAW_EXPONENTIAL,
                                      .write_law = KERN_WRITE_LAW_SIGMOID,
                                      .write_factor = 1}});
    const kern_ptr o = s->core == CORE_MESA ? solved(p, &in, sum) : recurrence(p, &in, s->core);
    add_product(p, normed(p, o, gate, in.heads, in.depth), values, stream, width);
}

static void mlp(pass *p, kern_ptr stream) {
    const int32_t width = p->f->shape->width, inner = p->f->shape->inner;
    const kern_ptr x = normed(p, stream, none, 1, width);
    const kern_ptr gate = product(p, x, width, inner, false), up = product(p, x, width, inner, false);
    call(p, KERN_OP_GLU, &(kern_glu_args){gate, up, gate, inner, KERN_SILU});
    add_product(p, gate, inner, stream, width);
}

static void model(pass *p) {
    const int32_t width = p->f->shape->width;
    const kern_ptr stream = saved(p, width), logits = saved(p, VOCABULARY), finite = saved(p, 1);
    const kern_ptr sum = saved(p, (int32_t)sizeof(kern_solve_sum) / 4);
    call(p, KERN_OP_CLEAR, &(kern_clear_args){.y = sum, .width = (int32_t)sizeof(kern_solve_sum) / 4});
    call(p, KERN_OP_EMBED,
         &(kern_embed_args){.weight = weight(p, VOCABULARY, width), .y = stream, .width = width, .scale = 3});
    for (int layer = 0; layer < LAYERS; layer++) {
        mixer(p, stream, sum);
        mlp(p, stream);
    }
    const kern_ptr last = normed(p, stream, none, 1, width);
    call(p, KERN_OP_HEAD_LOGITS,
         &(kern_head_logits_args){last, weight(p, VOCABULARY, width), logits, finite, width, VOCABULARY, 20});
    p->f->slot_floats = p->state;
    p->f->scratch_floats = p->scratch;
    p->f->saved_floats = p->saved;
}

// ------------------------------------------------------------------------------------------------------------- steps

static void make(fixture *f) {
    kernel_test *test = &f->test;
    ck_assert_int_eq(kern_plan_create(test->device, &f->plan), KERN_OK);
    model(&(pass){.f = f});
    ck_assert_int_eq(kern_plan_seal(f->plan), KERN_OK);
    const size_t states = SLOTS * f->slot_floats;
    const float *zeros = kernel_test_zero_floats(test, states > REGION ? states : REGION);
    for (int i = 0; i < 2; i++) {
        f->memory[i].state = sent(test, zeros, states * sizeof(float));
        f->memory[i].saved = sent(test, zeros, REGION * sizeof(float));
        f->memory[i].scratch = sent(test, zeros, REGION * sizeof(float));
    }
    test->rows->slot_stride = f->slot_floats * sizeof(float);
}

static void drop(fixture *f) {
    kern_plan_free(f->plan);
    for (int i = 0; i < PARAMS; i++)
        if (f->is_weight[i])
            kern_weight_free(f->param[i]);
        else
            kern_free(f->test.device, f->param[i]);
    for (int i = 0; i < 2; i++) {
        kern_free(f->test.device, f->memory[i].state);
        kern_free(f->test.device, f->memory[i].saved);
        kern_free(f->test.device, f->memory[i].scratch);
    }
    kernel_test_close(&f->test);
}

// The last row has no slot in every third step; the logits of all tokens but the first are wanted, backwards.
static void make_rows(fixture *f, int rows, int step) {
    static const kern_solver solver[] = {{KERN_SOLVE_TOLERANCE, 30, 1e-2f},
                                         {KERN_SOLVE_EXACT, 0, 0},
                                         {KERN_SOLVE_FIXED, 5, 0},
                                         {KERN_SOLVE_STEPS, 7, 0}};
    kern_rows *table = f->test.rows;
    kernel_test_clear_rows(&f->test);
    for (int r = 0; r < rows; r++) {
        const int slot = r > 0 && r == rows - 1 && step % 3 == 1 ? -1 : (5 * r + step / 4) % SLOTS;
        kernel_test_row(&f->test, KERN_ROW_GENERATED, slot, 1, 100 * r + step)->solver = solver[(r + step) % 4];
        table->id[r] = (int32_t)(kernel_test_uniform(&f->test) * VOCABULARY);
    }
    table->n_logits = rows > 1 ? rows - 1 : 1;
    for (int i = 0; i < table->n_logits; i++) {
        table->logits_token[i] = rows - 1 - i;
        table->sampler[i] = (kern_sampler){.top_p = 1, .forced = -1};
    }
    kernel_test_prepare(&f->test);
}

static void compare(fixture *f, const float *planned, const float *launched, size_t count, const char *what, int rows) {
    float *host[2] = {malloc(count * sizeof(float)), malloc(count * sizeof(float))};
    ck_assert(host[0] && host[1]);
    ck_assert_int_eq(kern_download(f->test.stream, host[0], planned, count * sizeof(float)), KERN_OK);
    ck_assert_int_eq(kern_download(f->test.stream, host[1], launched, count * sizeof(float)), KERN_OK);
    ck_assert_int_eq(kern_synchronize(f->test.stream), KERN_OK);
    size_t same = 0, numbers = 0;
    while (same < count && memcmp(&host[0][same], &host[1][same], sizeof(float)) == 0)
        same++;
    ck_assert_msg(same == count, "core %d, %d rows: float %zu of %s is %g by the plan, %g by launches",
                  (int)f->shape->core, rows, same, what, (double)host[0][same < count ? same : 0],
                  (double)host[1][same < count ? same : 0]);
    for (size_t i = 0; i < count; i++)
        numbers += host[0][i] != 0 && isfinite(host[0][i]);
    ck_assert_msg(numbers > count / 100, "%s holds %zu numbers", what, numbers);
    free(host[0]);
    free(host[1]);
}

static void step(fixture *f, int rows, int number) {
    make_rows(f, rows, number);
    const memory *planned = &f->memory[0], *launched = &f->memory[1];
    const kern_memory memory = {
        .param = f->param, .state = planned->state, .saved = planned->saved, .scratch = planned->scratch};
    ck_assert_int_eq(kern_plan_run(f->plan, f->test.stream, f->test.rows, &memory), KERN_OK);
    model(&(pass){.f = f, .memory = launched});
    compare(f, planned->scratch, launched->scratch, f->scratch_floats, "scratch", rows);
    compare(f, planned->saved, launched->saved, f->saved_floats, "saved", rows);
    compare(f, planned->state, launched->state, SLOTS * f->slot_floats, "states", rows);
}

START_TEST(steps_equal_launches) {
    static const shape shapes[] = {
        {CORE_DELTA, 48, 1, 64, 40},     {CORE_DELTA, 160, 2, 64, 304},   {CORE_DELTA, 272, 3, 128, 1552},
        {CORE_ADD, 96, 3, 32, 112},      {CORE_CHANNEL, 128, 2, 128, 64}, {CORE_CHANNEL, 64, 2, 64, 64},
        {CORE_SHARED, 1040, 4, 32, 272}, {CORE_ADD, 1552, 1, 64, 48},     {CORE_DELTA, 64, 1, 64, 2320},
        {CORE_MESA, 160, 2, 64, 304},    {CORE_MESA, 264, 2, 128, 80},    {CORE_DELTA, 768, 6, 128, 2048},
        {CORE_ADD, 1024, 8, 128, 64}};
    static const int rows[] = {1, 3, 8, 2, 1, 5, 8, 1};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        fixture *f = calloc(1, sizeof *f);
        ck_assert(f != NULL);
        if (!kernel_test_open(&f->test, _i, "cpu")) {
            free(f);
            MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
        }
        f->shape = &shapes[i];
        make(f);
        for (int n = 0; n < (int)(sizeof rows / sizeof rows[0]); n++)
            step(f, rows[n], n);
        drop(f);
        free(f);
    }
}
END_TEST

static Suite *layers_suite(void) {
    Suite *suite = suite_create("layers");
    TCase *tests = tcase_create("layers");
    tcase_add_loop_test(tests, steps_equal_launches, 0, KERNEL_TEST_DEVICES);
    tcase_set_timeout(tests, 60);
    suite_add_tcase(suite, tests);
    return suite;
}

MESA_TEST_MAIN(layers_suite)
