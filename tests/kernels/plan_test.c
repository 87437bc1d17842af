// SPDX-License-Identifier: Apache-2.0
// Plans: a planned sequence equals the same launches by hand, bit for bit; what a plan refuses to hold or to run.
//
// The sequence touches every class of memory: a weight, a vector, a gradient, slot state, saved and scratch buffers.
// Then steps of sessions in batches of every size, which a CUDA device replays as graphs.
#include "tests/kernels/kernel_test.h"

enum { WIDTH = 48, TAPS = 4, VOCABULARY = 11, TOKENS = 9, SLOTS = 2 };
enum { EMBEDDING, NORM, CONV, BIAS, PARAMS };
enum { ROW_BYTES = TOKENS * WIDTH * 4, SLOT_BYTES = 64 + (TAPS - 1) * WIDTH * 4 };
_Static_assert(ROW_BYTES % 64 == 0 && SLOT_BYTES % 64 == 0, "offsets are multiples of 64");

typedef struct fixture {
    kernel_test test;
    kern_weight *embedding;
    float *norm, *conv, *bias, *grad_norm;
    void *param[PARAMS];
    float *grad[PARAMS];
    char *state, *saved, *scratch;
    kern_memory memory;
} fixture;

static void *device_memory(fixture *f, size_t bytes) {
    void *memory = NULL;
    ck_assert_int_eq(kern_alloc(f->test.device, bytes, &memory), KERN_OK);
    return memory;
}

static void setup(fixture *f) {
    kernel_test *test = &f->test;
    ck_assert(kernel_test_open(test, 0, "cpu"));
    float *values = kernel_test_floats(test, VOCABULARY * WIDTH, -1, 1);
    kern_weight_desc desc = {.dtype = KERN_F32, .rows = VOCABULARY, .cols = WIDTH, .host = values};
    ck_assert_int_eq(kern_weight_create(test->device, &desc, &f->embedding), KERN_OK);
    f->norm = kernel_test_floats(test, WIDTH, 0, 2);
    f->conv = kernel_test_floats(test, WIDTH * TAPS, -1, 1);
    f->bias = kernel_test_floats(test, WIDTH, -1, 1);
    f->grad_norm = kernel_test_zero_floats(test, WIDTH);
    f->param[EMBEDDING] = f->embedding, f->param[NORM] = f->norm, f->param[CONV] = f->conv;
    f->param[BIAS] = f->bias;
    f->grad[NORM] = f->grad_norm;
    f->state = device_memory(f, SLOTS * SLOT_BYTES);
    f->saved = device_memory(f, 4 * ROW_BYTES);
    f->scratch = device_memory(f, 4 * ROW_BYTES);
    f->memory = (kern_memory){f->param, f->grad, f->state, NULL, f->saved, f->scratch, NULL};
    test->rows->slot_stride = SLOT_BYTES;
    kernel_test_row(test, KERN_ROW_GENERATED, 1, 2, 30);
    kernel_test_row(test, KERN_ROW_PROMPT, 0, TOKENS - 2, 0);
    for (int t = 0; t < TOKENS; t++)
        test->rows->id[t] = t % VOCABULARY;
    kernel_test_prepare(test);
    for (size_t i = 0; i < SLOTS * SLOT_BYTES / 4; i++)
        ((float *)f->state)[i] = (float)kernel_test_uniform(test);
}

static void teardown(fixture *f) {
    kern_free(f->test.device, f->state);
    kern_free(f->test.device, f->saved);
    kern_free(f->test.device, f->scratch);
    kern_weight_free(f->embedding);
    kernel_test_close(&f->test);
}

static kern_ptr param(uint64_t index) {
    return kern_ref(KERN_CLASS_PARAM, index);
}
static kern_ptr saved(uint64_t row) {
    return kern_ref(KERN_CLASS_SAVED, row * ROW_BYTES);
}
static kern_ptr scratch(uint64_t row) {
    return kern_ref(KERN_CLASS_SCRATCH, row * ROW_BYTES);
}

static kern_plan *build(fixture *f) {
    kern_plan *plan = NULL;
    const kern_ptr none = {.ref = 0};
    ck_assert_int_eq(kern_plan_create(f->test.device, &plan), KERN_OK);
    kern_embed_args embed = {.weight = param(EMBEDDING), .y = saved(0), .width = WIDTH, .scale = 2};
    kern_rmsnorm_args norm = {saved(0), param(NORM), none, scratch(1), 1, WIDTH, 1e-5f, 0, KERN_SILU, 0, 0, 0};
    kern_short_conv_args conv = {
        scratch(1), param(CONV), param(BIAS), kern_ref(KERN_CLASS_STATE, 64), saved(1), WIDTH, TAPS, KERN_SILU, 0};
    kern_rmsnorm_backward_args back = {
        saved(0), param(NORM), none,      saved(1), scratch(2), none, kern_ref(KERN_CLASS_GRAD, NORM), 1, WIDTH, 1e-5f,
        0,        0,           KERN_SILU, 0,        0,          0};
    ck_assert_int_eq(kern_plan_add(plan, KERN_OP_EMBED, &embed), KERN_OK);
    ck_assert_int_eq(kern_plan_add(plan, KERN_OP_RMSNORM, &norm), KERN_OK);
    ck_assert_int_eq(kern_plan_add(plan, KERN_OP_SHORT_CONV, &conv), KERN_OK);
    ck_assert_int_eq(kern_plan_add(plan, KERN_OP_RMSNORM_BACKWARD, &back), KERN_OK);
    return plan;
}

START_TEST(plan_equals_launches) {
    fixture f = {0};
    setup(&f);
    kern_plan *plan = build(&f);
    ck_assert_int_eq(kern_plan_run(plan, f.test.stream, f.test.rows, &f.memory), KERN_INVALID); // not sealed
    ck_assert_int_eq(kern_plan_seal(plan), KERN_OK);
    ck_assert_uint_eq(kern_plan_length(plan), 4);
    float *state = kernel_test_copy(&f.test, (float *)f.state, SLOTS * SLOT_BYTES / 4);
    uint64_t before = kern_allocations(f.test.device);
    ck_assert_int_eq(kern_plan_run(plan, f.test.stream, f.test.rows, &f.memory), KERN_OK);
    ck_assert_uint_eq(kern_allocations(f.test.device), before);

    enum { COUNT = TOKENS * WIDTH };
    float *x = kernel_test_zero_floats(&f.test, COUNT), *n = kernel_test_zero_floats(&f.test, COUNT);
    float *y = kernel_test_zero_floats(&f.test, COUNT), *dx = kernel_test_zero_floats(&f.test, COUNT);
    float *grad = kernel_test_zero_floats(&f.test, WIDTH);
    kern_embed_args embed = {.weight = {f.embedding}, .y = {x}, .width = WIDTH, .scale = 2};
    kern_rmsnorm_args norm = {{x}, {f.norm}, {NULL}, {n}, 1, WIDTH, 1e-5f, 0, KERN_SILU, 0, 0, 0};
    kern_short_conv_args conv = {{n}, {f.conv}, {f.bias}, {state + 16}, {y}, WIDTH, TAPS, KERN_SILU, 0};
    kern_rmsnorm_backward_args back = {{x},   {f.norm}, {NULL}, {y}, {dx},      {NULL}, {grad}, 1,
                                       WIDTH, 1e-5f,    0,      0,   KERN_SILU, 0,      0,      0};
    kernel_test_launch(&f.test, KERN_OP_EMBED, &embed);
    kernel_test_launch(&f.test, KERN_OP_RMSNORM, &norm);
    kernel_test_launch(&f.test, KERN_OP_SHORT_CONV, &conv);
    kernel_test_launch(&f.test, KERN_OP_RMSNORM_BACKWARD, &back);
    kernel_test_assert_same((float *)f.saved, x, COUNT);
    kernel_test_assert_same((float *)(f.saved + ROW_BYTES), y, COUNT);
    kernel_test_assert_same((float *)(f.scratch + 2 * ROW_BYTES), dx, COUNT);
    kernel_test_assert_same(f.grad_norm, grad, WIDTH);
    kernel_test_assert_same((float *)f.state, state, SLOTS * SLOT_BYTES / 4);
    ck_assert(grad[0] != 0 && state[16] != 0);
    kern_plan_free(plan);
    teardown(&f);
}
END_TEST

START_TEST(parts_of_a_plan_are_the_plan) {
    enum { COUNT = TOKENS * WIDTH };
    fixture whole = {0}, parts = {0};
    setup(&whole);
    setup(&parts);
    kern_plan *plan = build(&whole), *again = build(&parts);
    ck_assert_uint_eq(kern_plan_last_use(plan, kern_ref(KERN_CLASS_GRAD, NORM)), 4);
    ck_assert_uint_eq(kern_plan_last_use(plan, scratch(1)), 3);
    ck_assert_uint_eq(kern_plan_last_use(plan, kern_ref(KERN_CLASS_GRAD, CONV)), 0);
    ck_assert(kern_plan_seal(plan) == KERN_OK && kern_plan_seal(again) == KERN_OK);
    ck_assert_int_eq(kern_plan_run(plan, whole.test.stream, whole.test.rows, &whole.memory), KERN_OK);
    const size_t end[] = {0, 1, 3, 3, 4};
    for (size_t i = 1; i < sizeof end / sizeof *end; i++)
        ck_assert_int_eq(
            kern_plan_run_part(again, parts.test.stream, parts.test.rows, &parts.memory, end[i - 1], end[i]), KERN_OK);
    kernel_test_assert_same((float *)(whole.scratch + 2 * ROW_BYTES), (float *)(parts.scratch + 2 * ROW_BYTES), COUNT);
    kernel_test_assert_same(whole.grad_norm, parts.grad_norm, WIDTH);
    ck_assert(parts.grad_norm[0] != 0);
    const kern_memory *memory = &parts.memory;
    ck_assert_int_eq(kern_plan_run_part(again, parts.test.stream, parts.test.rows, memory, 3, 2), KERN_INVALID);
    ck_assert_int_eq(kern_plan_run_part(again, parts.test.stream, parts.test.rows, memory, 0, 5), KERN_INVALID);
    kern_plan_free(plan);
    kern_plan_free(again);
    teardown(&whole);
    teardown(&parts);
}
END_TEST

START_TEST(a_sealed_plan_is_closed) {
    fixture f = {0};
    setup(&f);
    kern_plan *plan = build(&f);
    ck_assert_int_eq(kern_plan_seal(plan), KERN_OK);
    kern_add_args add = {scratch(0), scratch(1), WIDTH};
    ck_assert_int_eq(kern_plan_add(plan, KERN_OP_ADD, &add), KERN_INVALID);
    ck_assert_int_eq(kern_plan_seal(plan), KERN_INVALID);
    ck_assert_uint_eq(kern_plan_length(plan), 4);
    kern_plan_free(plan);
    kern_plan_free(NULL);
    teardown(&f);
}
END_TEST

START_TEST(bad_entries_are_refused) {
    fixture f = {0};
    setup(&f);
    kern_plan *plan = NULL;
    ck_assert_int_eq(kern_plan_create(f.test.device, &plan), KERN_OK);
    kern_add_args add = {scratch(0), kern_ref(KERN_CLASS_SCRATCH, 4), WIDTH};
    ck_assert_int_eq(kern_plan_add(plan, KERN_OP_ADD, &add), KERN_INVALID); // not a multiple of 64
    add.y = kern_ref((kern_class)(KERN_CLASS_ROWS + 1), 0);
    ck_assert_int_eq(kern_plan_add(plan, KERN_OP_ADD, &add), KERN_INVALID); // no such class
    add.y = kern_ref(KERN_CLASS_NULL, 64);
    ck_assert_int_eq(kern_plan_add(plan, KERN_OP_ADD, &add), KERN_INVALID); // null with a value
    add.y = kern_ref(KERN_CLASS_NULL, 0);
    ck_assert_int_eq(kern_plan_add(plan, KERN_OP_ADD, &add), KERN_INVALID); // an operand is missing
    add.y = scratch(1), add.width = 0;
    ck_assert_int_eq(kern_plan_add(plan, KERN_OP_ADD, &add), KERN_INVALID); // the backend refuses
    ck_assert_int_eq(kern_plan_add(plan, (kern_op)KERN_OP_COUNT, &add), KERN_INVALID);
    ck_assert_uint_eq(kern_plan_length(plan), 0);
    kern_plan_free(plan);
    teardown(&f);
}
END_TEST

START_TEST(absent_memory_is_refused) {
    fixture f = {0};
    setup(&f);
    kern_plan *plan = build(&f);
    ck_assert_int_eq(kern_plan_seal(plan), KERN_OK);
    kern_memory memory = f.memory;
    memory.state = NULL; // while rows have slots
    ck_assert_int_eq(kern_plan_run(plan, f.test.stream, f.test.rows, &memory), KERN_INVALID);
    memory = f.memory, memory.grad = NULL;
    ck_assert_int_eq(kern_plan_run(plan, f.test.stream, f.test.rows, &memory), KERN_INVALID);
    memory = f.memory, memory.scratch = NULL;
    ck_assert_int_eq(kern_plan_run(plan, f.test.stream, f.test.rows, &memory), KERN_INVALID);
    f.param[NORM] = NULL;
    ck_assert_int_eq(kern_plan_run(plan, f.test.stream, f.test.rows, &f.memory), KERN_INVALID);
    f.param[NORM] = f.norm;
    f.param[BIAS] = NULL; // optional for the operation, but the plan names it: never left out silently
    ck_assert_int_eq(kern_plan_run(plan, f.test.stream, f.test.rows, &f.memory), KERN_INVALID);
    f.param[BIAS] = f.bias;
    kern_plan *stateless = NULL; // a recurrence in it has no place to keep what rows with slots need
    const kern_recurrence_args recurrence = {
        .q = saved(0),
        .k = saved(0),
        .v = saved(0),
        .o = saved(1),
        .family = {.heads = 1, .key_width = WIDTH, .value_width = WIDTH, .scale = 1}};
    ck_assert_int_eq(kern_plan_create(f.test.device, &stateless), KERN_OK);
    ck_assert_int_eq(kern_plan_add(stateless, KERN_OP_RECURRENCE, &recurrence), KERN_OK);
    ck_assert_int_eq(kern_plan_seal(stateless), KERN_OK);
    ck_assert_int_eq(kern_plan_run(stateless, f.test.stream, f.test.rows, &f.memory), KERN_INVALID);
    kern_plan_free(stateless);
    f.test.rows->row[0].slot = f.test.rows->row[1].slot = -1; // without slots no state is needed
    kernel_test_prepare(&f.test);
    memory = f.memory, memory.state = NULL;
    ck_assert_int_eq(kern_plan_run(plan, f.test.stream, f.test.rows, &memory), KERN_OK);
    kern_plan_free(plan);
    teardown(&f);
}
END_TEST

START_TEST(a_long_plan_grows) {
    fixture f = {0};
    setup(&f);
    kern_plan *plan = NULL;
    ck_assert_int_eq(kern_plan_create(f.test.device, &plan), KERN_OK);
    kern_add_args add = {scratch(0), scratch(1), WIDTH};
    for (int i = 0; i < 1000; i++)
        ck_assert_int_eq(kern_plan_add(plan, KERN_OP_ADD, &add), KERN_OK);
    ck_assert_int_eq(kern_plan_seal(plan), KERN_OK);
    ((float *)f.scratch)[0] = 1;
    ck_assert_int_eq(kern_plan_run(plan, f.test.stream, f.test.rows, &f.memory), KERN_OK);
    ck_assert(((float *)(f.scratch + ROW_BYTES))[0] == 1000);
    kern_plan_free(plan);
    teardown(&f);
}
END_TEST

// ------------------------------------------------------------------------------------------------- steps of sessions

// The same steps by a plan and launch by launch, each on a memory of its own; after some steps they change places, so
// the plan meets other memory. On a CUDA device steps of generated tokens are graphs: batches smaller than the graph's,
// tables that change between replays.
//
// The step holds what a backend may run as one: products of one vector, behind a norm and before a gated product,
// convolutions, norms of heads. Everything that they leave in memory is compared.
enum { MOST = 16, SESSIONS = 16, STEP_FLOATS = MOST * WIDTH, HEADS = 3, WINDOW = (TAPS - 1) * WIDTH, INNER = 32 };
enum { STEP_SLOT_BYTES = 64 + 3 * WINDOW * 4, SLOT_FLOATS = STEP_SLOT_BYTES / 4, BUFFERS = 18 };
enum { FREQUENCY = PARAMS, VECTORS, PRODUCT = VECTORS, PAIR, DOWN, STEP_PARAMS };
_Static_assert(STEP_SLOT_BYTES % 64 == 0 && (int)INNER < (int)WIDTH, "a buffer holds any vector");
_Static_assert(STEP_FLOATS * 4 % 64 == 0, "offsets are multiples of 64");

typedef struct session_memory {
    float *state, *saved, *scratch; // (SESSIONS, slot), (2, MOST, WIDTH), (BUFFERS, MOST, WIDTH)
} session_memory;

typedef struct session_test {
    kernel_test test;
    kern_plan *plan;
    void *param[STEP_PARAMS];
    session_memory memory[2];
} session_test;

static void *sent(kernel_test *test, const float *from, size_t count) {
    void *memory = NULL;
    ck_assert_int_eq(kern_alloc(test->device, count * sizeof *from, &memory), KERN_OK);
    ck_assert_int_eq(kern_upload(test->stream, memory, from, count * sizeof *from), KERN_OK);
    return memory;
}

static void make_weight(session_test *s, int which, kern_dtype dtype, int64_t rows, int64_t cols) {
    const size_t count = (size_t)(rows * cols);
    float *values = kernel_test_floats(&s->test, count, -1, 1);
    uint16_t *narrow = kernel_test_bytes(&s->test, count * sizeof *narrow);
    for (size_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, &values[i], sizeof bits);
        narrow[i] = (uint16_t)(bits >> 16);
    }
    const kern_weight_desc desc = {
        .dtype = dtype, .rows = rows, .cols = cols, .host = dtype == KERN_F32 ? (const void *)values : narrow};
    ck_assert_int_eq(kern_weight_create(s->test.device, &desc, (kern_weight **)&s->param[which]), KERN_OK);
}

static void make_memory(session_test *s, kern_dtype dtype) {
    kernel_test *test = &s->test;
    make_weight(s, EMBEDDING, KERN_F32, VOCABULARY, WIDTH);
    make_weight(s, PRODUCT, dtype, 3 * WIDTH, WIDTH);
    make_weight(s, PAIR, dtype, 2 * INNER, WIDTH);
    make_weight(s, DOWN, dtype, WIDTH, INNER);
    s->param[NORM] = sent(test, kernel_test_floats(test, WIDTH, 0, 2), WIDTH);
    s->param[CONV] = sent(test, kernel_test_floats(test, WIDTH * TAPS, -1, 1), WIDTH * TAPS);
    s->param[BIAS] = sent(test, kernel_test_floats(test, WIDTH, -1, 1), WIDTH);
    s->param[FREQUENCY] = sent(test, kernel_test_floats(test, WIDTH / HEADS / 2, 0, 1), WIDTH / HEADS / 2);
    const float *state = kernel_test_floats(test, SESSIONS * SLOT_FLOATS, -1, 1);
    const float *zeros = kernel_test_zero_floats(test, BUFFERS * STEP_FLOATS);
    for (int i = 0; i < 2; i++)
        s->memory[i] = (session_memory){sent(test, state, SESSIONS * SLOT_FLOATS), sent(test, zeros, 2 * STEP_FLOATS),
                                        sent(test, zeros, BUFFERS * STEP_FLOATS)};
    test->rows->slot_stride = STEP_SLOT_BYTES;
}

static void free_memory(session_test *s) {
    kern_plan_free(s->plan);
    kern_weight_free(s->param[EMBEDDING]);
    for (int i = NORM; i < VECTORS; i++)
        kern_free(s->test.device, s->param[i]);
    for (int i = PRODUCT; i < STEP_PARAMS; i++)
        kern_weight_free(s->param[i]);
    for (int i = 0; i < 2; i++) {
        kern_free(s->test.device, s->memory[i].state);
        kern_free(s->test.device, s->memory[i].saved);
        kern_free(s->test.device, s->memory[i].scratch);
    }
}

// Calls each(context, op, args) for the operations of a step: operands are references, or pointers into `m`.
typedef void (*step_call)(session_test *s, kern_op op, const void *args);

static kern_ptr place(const session_memory *m, kern_class class_, size_t floats) {
    if (!m)
        return kern_ref(class_, floats * sizeof(float));
    float *base = class_ == KERN_CLASS_STATE ? m->state : class_ == KERN_CLASS_SAVED ? m->saved : m->scratch;
    return (kern_ptr){.f = base + floats};
}

static kern_ptr buffer(const session_memory *m, size_t index) {
    return place(m, KERN_CLASS_SCRATCH, index * STEP_FLOATS);
}

// n = norm(x); q, k, v, a = products of n; convolutions; unit vectors; gates; x += products of them, once gated and
// normed.
static void mixer_calls(session_test *s, const session_memory *m, step_call call, const kern_ptr *own, kern_ptr x) {
    const kern_ptr none = {.ref = 0}, n = buffer(m, 2);
    const kern_rmsnorm_args norm = {x, own[NORM], none, n, 1, WIDTH, 1e-5f, 0, KERN_SILU, 0, 0, 0};
    call(s, KERN_OP_RMSNORM, &norm);
    for (int i = 0; i < 3; i++)
        call(s, KERN_OP_LINEAR,
             &(kern_linear_args){.x = n,
                                 .weight = own[PRODUCT],
                                 .bias = i == 1 ? own[BIAS] : none,
                                 .y = buffer(m, 3 + (size_t)i),
                                 .cols = WIDTH,
                                 .rows = i == 1 ? WIDTH : WIDTH - i,
                                 .row0 = i == 1 ? 0 : i * WIDTH});
    call(s, KERN_OP_LINEAR, &(kern_linear_args){n, own[PRODUCT], none, none, buffer(m, 15), WIDTH, HEADS, 1, 0});
    for (size_t i = 0; i < 3; i++)
        call(s, KERN_OP_SHORT_CONV,
             &(kern_short_conv_args){buffer(m, 3 + i), own[CONV], own[BIAS],
                                     place(m, KERN_CLASS_STATE, 16 + i * WINDOW), buffer(m, 6 + i), WIDTH, TAPS,
                                     KERN_SILU, 0});
    for (size_t i = 0; i < 2; i++)
        call(s, KERN_OP_L2NORM, &(kern_l2norm_args){buffer(m, 6 + i), buffer(m, 9 + i), HEADS, WIDTH / HEADS, 1e-6f});
    const kern_gates gates = {.heads = HEADS,
                              .channels = 1,
                              .decay_law = KERN_DECAY_LAW_EXPONENTIAL,
                              .write_law = KERN_WRITE_LAW_SIGMOID,
                              .write_factor = 1};
    call(s, KERN_OP_GATES,
         &(kern_gates_args){.a = buffer(m, 15),
                            .b = buffer(m, 15),
                            .A_log = own[BIAS],
                            .dt_bias = own[NORM],
                            .g = buffer(m, 16),
                            .beta = buffer(m, 17),
                            .gates = gates});
    const kern_rmsnorm_args gated = {
        buffer(m, 9), none, buffer(m, 8), buffer(m, 11), HEADS, WIDTH / HEADS, 1e-5f, 0, KERN_SILU, 0, 0, 0};
    call(s, KERN_OP_RMSNORM, &gated);
    call(s, KERN_OP_LINEAR, &(kern_linear_args){buffer(m, 11), own[PRODUCT], none, x, x, WIDTH, WIDTH, WIDTH, 0});
}

// x += down(silu(gate) up) of its norm; the gated product takes the gate's place.
static void mlp_calls(session_test *s, const session_memory *m, step_call call, const kern_ptr *own, kern_ptr x) {
    const kern_ptr none = {.ref = 0}, n = buffer(m, 12), gate = buffer(m, 13), up = buffer(m, 14);
    const kern_rmsnorm_args norm = {x, own[NORM], none, n, 1, WIDTH, 1e-5f, 0, KERN_SILU, 0, 0, 0};
    call(s, KERN_OP_RMSNORM, &norm);
    call(s, KERN_OP_LINEAR, &(kern_linear_args){n, own[PAIR], none, none, gate, WIDTH, INNER, 0, 0});
    call(s, KERN_OP_LINEAR, &(kern_linear_args){n, own[PAIR], own[BIAS], none, up, WIDTH, INNER, INNER / 2, 0});
    call(s, KERN_OP_GLU, &(kern_glu_args){gate, up, gate, INNER, KERN_SILU});
    call(s, KERN_OP_LINEAR, &(kern_linear_args){gate, own[DOWN], none, x, x, INNER, WIDTH, 0, 0});
}

static void step_calls(session_test *s, const session_memory *m, step_call call) {
    kern_ptr own[STEP_PARAMS];
    for (uint64_t i = 0; i < STEP_PARAMS; i++)
        own[i] = m ? (kern_ptr){.p = s->param[i]} : param(i);
    const kern_ptr none = {.ref = 0}, x = place(m, KERN_CLASS_SAVED, 0), y = place(m, KERN_CLASS_SAVED, STEP_FLOATS);
    const kern_ptr n = place(m, KERN_CLASS_SCRATCH, STEP_FLOATS), state = place(m, KERN_CLASS_STATE, 16);
    const kern_embed_args embed = {.weight = own[EMBEDDING], .y = x, .width = WIDTH, .scale = 2};
    const kern_rmsnorm_args norm = {x, own[NORM], none, n, 1, WIDTH, 1e-5f, 0, KERN_SILU, 0, 0, 0};
    const kern_short_conv_args conv = {n, own[CONV], own[BIAS], state, y, WIDTH, TAPS, KERN_SILU, 0};
    const kern_rope_args rope = {y, own[FREQUENCY], HEADS, WIDTH / HEADS, WIDTH / HEADS, 0};
    const kern_add_args add = {x, y, WIDTH};
    call(s, KERN_OP_EMBED, &embed);
    call(s, KERN_OP_RMSNORM, &norm);
    call(s, KERN_OP_SHORT_CONV, &conv);
    call(s, KERN_OP_ROPE, &rope);
    call(s, KERN_OP_ADD, &add);
    mixer_calls(s, m, call, own, y);
    mlp_calls(s, m, call, own, y);
}

static void add_call(session_test *s, kern_op op, const void *args) {
    ck_assert_int_eq(kern_plan_add(s->plan, op, args), KERN_OK);
}
static void launch_call(session_test *s, kern_op op, const void *args) {
    ck_assert_int_eq(kern_launch(s->test.stream, op, s->test.rows, args), KERN_OK);
}

// Generated rows of one token in slots in any order; with `prompt` a prompt row behind them.
static void session_rows(session_test *s, int rows, int step, bool prompt) {
    kernel_test *test = &s->test;
    kernel_test_clear_rows(test);
    for (int r = 0; r < rows; r++)
        kernel_test_row(test, KERN_ROW_GENERATED, (5 * r + 3 * step) % SESSIONS, 1, 100 * r + step);
    if (prompt) {
        kernel_test_row(test, KERN_ROW_PROMPT, -1, MOST - rows, 0);
        kernel_test_boundary(test, 1);
    }
    for (int t = 0; t < test->rows->n_tokens; t++)
        test->rows->id[t] = (int32_t)(kernel_test_uniform(test) * VOCABULARY);
    kernel_test_prepare(test);
}

static void assert_same_memory(session_test *s, const float *const from[2], size_t count) {
    float *host[2];
    for (int i = 0; i < 2; i++) {
        host[i] = kernel_test_zero_floats(&s->test, count);
        ck_assert_int_eq(kern_download(s->test.stream, host[i], from[i], count * sizeof(float)), KERN_OK);
        ck_assert_int_eq(kern_synchronize(s->test.stream), KERN_OK);
    }
    kernel_test_assert_same(host[0], host[1], count);
    ck_assert(host[0][16] != 0);
}

static void compare_steps(session_test *s) {
    static const struct {
        int rows;
        bool prompt;
    } steps[] = {{1, false}, {3, false}, {4, false}, {2, true}, {3, false}, {2, false}, {9, false}, {12, false},
                 {5, false}, {8, false}, {1, false}, {9, true}, {7, false}, {1, false}, {10, false}};
    for (int step = 0; step < (int)(sizeof steps / sizeof steps[0]); step++) {
        const session_memory *planned = &s->memory[step / 6 % 2], *launched = &s->memory[1 - step / 6 % 2];
        const kern_memory memory = {s->param, NULL, planned->state, NULL, planned->saved, planned->scratch, NULL};
        session_rows(s, steps[step].rows, step, steps[step].prompt);
        ck_assert_int_eq(kern_plan_run(s->plan, s->test.stream, s->test.rows, &memory), KERN_OK);
        step_calls(s, launched, launch_call);
        assert_same_memory(s, (const float *const[]){planned->saved, launched->saved}, 2 * STEP_FLOATS);
        assert_same_memory(s, (const float *const[]){planned->scratch + STEP_FLOATS, launched->scratch + STEP_FLOATS},
                           (BUFFERS - 1) * STEP_FLOATS);
        assert_same_memory(s, (const float *const[]){planned->state, launched->state}, SESSIONS * SLOT_FLOATS);
    }
}

START_TEST(steps_of_sessions_equal_launches) {
    static const kern_dtype dtype[] = {KERN_BF16, KERN_F32};
    for (int i = 0; i < 2; i++) {
        session_test s = {0};
        if (!kernel_test_open(&s.test, _i, "cpu"))
            MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
        make_memory(&s, dtype[i]);
        ck_assert_int_eq(kern_plan_create(s.test.device, &s.plan), KERN_OK);
        step_calls(&s, NULL, add_call);
        ck_assert_int_eq(kern_plan_seal(s.plan), KERN_OK);
        compare_steps(&s);
        free_memory(&s);
        kernel_test_close(&s.test);
    }
}
END_TEST

// A norm whose vectors are more than a warp's work, before two products: what is left of it and of them.
START_TEST(wide_norms_before_products) {
    static const struct { int groups, width; } shapes[] = {{1, 520}, {1, 2048}, {3, 260}, {6, 128}};
    enum { FEW = 2, ROWS = 40, OUTPUTS = 18, WIDEST = 2048, PART = ROWS * WIDEST };
    for (size_t i = 0; i < 2 * sizeof shapes / sizeof shapes[0]; i++) {
        const size_t n = i / 2;
        session_test s = {0};
        if (!kernel_test_open(&s.test, _i, "cpu"))
            MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
        const int width = shapes[n].groups * shapes[n].width;
        make_weight(&s, PRODUCT, KERN_BF16, 2 * OUTPUTS, width);
        s.param[NORM] = sent(&s.test, kernel_test_floats(&s.test, WIDEST, 0, 2), WIDEST);
        const float *x = kernel_test_floats(&s.test, PART, -1, 1), *zeros = kernel_test_zero_floats(&s.test, 4 * PART);
        float *memory[2];
        for (int i = 0; i < 2; i++) {
            memory[i] = sent(&s.test, zeros, 4 * PART);
            ck_assert_int_eq(kern_upload(s.test.stream, memory[i], x, PART * sizeof *x), KERN_OK);
        }
        ck_assert_int_eq(kern_plan_create(s.test.device, &s.plan), KERN_OK);
        for (int r = 0; r < (i % 2 ? ROWS : FEW); r++)
            kernel_test_row(&s.test, KERN_ROW_GENERATED, -1, 1, r);
        kernel_test_prepare(&s.test);
        for (int planned = 1; planned >= 0; planned--) {
            kern_ptr at[4];
            for (size_t i = 0; i < 4; i++)
                at[i] = planned ? kern_ref(KERN_CLASS_SCRATCH, i * PART * sizeof(float))
                                : (kern_ptr){.f = memory[1] + i * PART};
            const kern_ptr none = {.ref = 0}, weight = planned ? param(PRODUCT) : (kern_ptr){.p = s.param[PRODUCT]};
            const kern_ptr scale = planned ? param(NORM) : (kern_ptr){.p = s.param[NORM]};
            const step_call call = planned ? add_call : launch_call;
            call(&s, KERN_OP_RMSNORM,
                 &(kern_rmsnorm_args){.x = at[0],
                                      .weight = scale,
                                      .gate = at[0],
                                      .y = at[1],
                                      .groups = shapes[n].groups,
                                      .width = shapes[n].width,
                                      .eps = 1e-5f,
                                      .activation = KERN_SILU,
                                      .center = 1});
            for (int i = 0; i < 2; i++)
                call(&s, KERN_OP_LINEAR,
                     &(kern_linear_args){at[1], weight, none, none, at[2 + i], width, OUTPUTS, i * OUTPUTS, 0});
        }
        ck_assert_int_eq(kern_plan_seal(s.plan), KERN_OK);
        const kern_memory planned = {.param = s.param, .scratch = memory[0]};
        ck_assert_int_eq(kern_plan_run(s.plan, s.test.stream, s.test.rows, &planned), KERN_OK);
        assert_same_memory(&s, (const float *const[]){memory[0] + 2 * PART, memory[1] + 2 * PART}, 2 * PART);
        assert_same_memory(&s, (const float *const[]){memory[0] + PART, memory[1] + PART}, PART);
        kern_plan_free(s.plan);
        kern_weight_free(s.param[PRODUCT]);
        kern_free(s.test.device, s.param[NORM]);
        for (int i = 0; i < 2; i++)
            kern_free(s.test.device, memory[i]);
        kernel_test_close(&s.test);
    }
}
END_TEST

// x += down(silu(gate(norm(x))) up(norm(x))) of a prompt, and outputs of the same norm in slices that no tile begins
// with, then logits of the last token; places of x, its norm, gate, up, slices in one memory.
enum { LONG = 1100, THIN = 192, THICK = 1200, LONG_PLACES = 5, LONG_PLACE = LONG * THICK };

static void long_calls(session_test *s, float *memory, step_call call) {
    kern_ptr at[LONG_PLACES], weight[STEP_PARAMS];
    const kern_ptr none = {.ref = 0};
    for (size_t i = 0; i < LONG_PLACES; i++)
        at[i] = memory ? (kern_ptr){.f = memory + i * LONG_PLACE}
                       : kern_ref(KERN_CLASS_SCRATCH, i * LONG_PLACE * sizeof(float));
    for (int i = 0; i < STEP_PARAMS; i++)
        weight[i] = memory ? (kern_ptr){.p = s->param[i]} : param(i);
    call(
        s, KERN_OP_RMSNORM,
        &(kern_rmsnorm_args){.x = at[0], .weight = weight[NORM], .y = at[1], .groups = 1, .width = THIN, .eps = 1e-5f});
    call(s, KERN_OP_LINEAR, &(kern_linear_args){at[1], weight[PRODUCT], none, none, at[2], THIN, THICK, 0, 0});
    call(s, KERN_OP_LINEAR, &(kern_linear_args){at[1], weight[PAIR], none, none, at[3], THIN, THICK, 0, 0});
    call(s, KERN_OP_GLU, &(kern_glu_args){at[2], at[3], at[2], THICK, KERN_SILU});
    call(s, KERN_OP_LINEAR, &(kern_linear_args){at[2], weight[DOWN], none, at[0], at[0], THICK, THIN, 0, 0});
    call(s, KERN_OP_RMSNORM,
         &(kern_rmsnorm_args){.x = at[0], .y = at[1], .groups = THIN / 32, .width = 32, .eps = 1e-5f});
    call(s, KERN_OP_LINEAR, &(kern_linear_args){at[1], weight[PRODUCT], none, none, at[4], THIN, 6, 3, 0});
    call(s, KERN_OP_LINEAR, &(kern_linear_args){at[1], weight[PAIR], none, none, at[3], THIN, 500, 700, 0});
    call(
        s, KERN_OP_RMSNORM,
        &(kern_rmsnorm_args){.x = at[0], .weight = weight[NORM], .y = at[1], .groups = 1, .width = THIN, .eps = 1e-5f});
    call(s, KERN_OP_HEAD_LOGITS, &(kern_head_logits_args){at[1], weight[PRODUCT], at[2], none, THIN, THICK, 0});
}

START_TEST(long_prompts_equal_launches) {
    session_test s = {0};
    if (!kernel_test_open(&s.test, _i, "cpu"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    const int tokens[] = {4, 11, 70, s.test.cuda ? LONG : 150};
    make_weight(&s, PRODUCT, KERN_BF16, THICK, THIN);
    make_weight(&s, PAIR, KERN_BF16, THICK, THIN);
    make_weight(&s, DOWN, KERN_BF16, THIN, THICK);
    s.param[NORM] = sent(&s.test, kernel_test_floats(&s.test, THIN, 0, 2), THIN);
    const float *x = kernel_test_floats(&s.test, LONG_PLACE, -1, 1);
    const float *zeros = kernel_test_zero_floats(&s.test, LONG_PLACES * LONG_PLACE);
    float *memory[2];
    for (int i = 0; i < 2; i++)
        memory[i] = sent(&s.test, zeros, LONG_PLACES * LONG_PLACE);
    ck_assert_int_eq(kern_plan_create(s.test.device, &s.plan), KERN_OK);
    long_calls(&s, NULL, add_call);
    ck_assert_int_eq(kern_plan_seal(s.plan), KERN_OK);
    for (size_t n = 0; n < sizeof tokens / sizeof tokens[0]; n++) {
        kernel_test_clear_rows(&s.test);
        kernel_test_row(&s.test, KERN_ROW_PROMPT, -1, tokens[n], 0);
        s.test.rows->n_logits = 1;
        s.test.rows->logits_token[0] = tokens[n] - 1;
        s.test.rows->sampler[0] = (kern_sampler){.forced = -1};
        kernel_test_prepare(&s.test);
        for (int i = 0; i < 2; i++)
            ck_assert_int_eq(kern_upload(s.test.stream, memory[i], x, LONG_PLACE * sizeof *x), KERN_OK);
        const kern_memory planned = {.param = s.param, .scratch = memory[0]};
        ck_assert_int_eq(kern_plan_run(s.plan, s.test.stream, s.test.rows, &planned), KERN_OK);
        long_calls(&s, memory[1], launch_call);
        for (size_t i = 0; i < LONG_PLACES; i++)
            assert_same_memory(&s, (const float *const[]){memory[0] + i * LONG_PLACE, memory[1] + i * LONG_PLACE},
                               LONG_PLACE);
    }
    kern_plan_free(s.plan);
    for (int i = PRODUCT; i < STEP_PARAMS; i++)
        kern_weight_free(s.param[i]);
    kern_free(s.test.device, s.param[NORM]);
    for (int i = 0; i < 2; i++)
        kern_free(s.test.device, memory[i]);
    kernel_test_close(&s.test);
}
END_TEST

// ------------------------------------------------------------------------------------ a recurrence and what it reads

// Convolutions of q, k and v, norms, gates and the recurrence behind them, of so many heads that a CUDA device may run
// all of them as one stream; windows behind the states of a slot.
enum {
    CORE_ROWS = 64,
    CORE_PLACES = 13,
    CORE_X = 0,
    CORE_A = 3,
    CORE_Y = 5,
    CORE_NORMED = 8,
    CORE_G = 10,
    CORE_O = 12
};

typedef struct core_shape {
    int32_t heads, width, norms; // D = V
    kern_storage storage;
    kern_decay decay;
    kern_activation activation;
} core_shape;

static const core_shape core_shapes[] = {
    {5, 128, 2, KERN_STORE_F32, KERN_DECAY_SCALAR, KERN_SILU},
    {17, 64, 1, KERN_STORE_F32, KERN_DECAY_NONE, KERN_IDENTITY},
    {6, 128, 0, KERN_STORE_F32, KERN_DECAY_SCALAR, KERN_SIGMOID}, // which no stream prepares
    {9, 128, 2, KERN_STORE_BF16, KERN_DECAY_SCALAR, KERN_SILU},
    {34, 64, 2, KERN_STORE_BF16, KERN_DECAY_SCALAR, KERN_SILU},
};

static size_t core_state_floats(const core_shape *c) {
    return (size_t)c->heads * (size_t)c->width * (size_t)c->width / (c->storage == KERN_STORE_BF16 ? 2 : 1);
}
static size_t core_channels(const core_shape *c) {
    return (size_t)c->heads * (size_t)c->width;
}
static size_t core_slot_floats(const core_shape *c) {
    return core_state_floats(c) + 3 * (TAPS - 1) * core_channels(c);
}

static void core_calls(session_test *s, const core_shape *c, const session_memory *m, step_call call) {
    const size_t channels = core_channels(c), window = (TAPS - 1) * channels;
    const bool decays = c->decay != KERN_DECAY_NONE;
    kern_ptr at[CORE_PLACES], own[STEP_PARAMS];
    const kern_ptr none = {.ref = 0};
    for (size_t i = 0; i < CORE_PLACES; i++)
        at[i] = place(m, KERN_CLASS_SCRATCH, i * CORE_ROWS * channels);
    for (uint64_t i = 0; i < STEP_PARAMS; i++)
        own[i] = m ? (kern_ptr){.p = s->param[i]} : param(i);
    for (size_t i = 0; i < 3; i++)
        call(s, KERN_OP_SHORT_CONV,
             &(kern_short_conv_args){at[CORE_X + i], own[CONV], i == 1 ? own[BIAS] : none,
                                     place(m, KERN_CLASS_STATE, core_state_floats(c) + i * window), at[CORE_Y + i],
                                     (int32_t)channels, TAPS, c->activation, (int32_t)(i * channels)});
    for (int32_t i = 0; i < c->norms; i++)
        call(s, KERN_OP_L2NORM, &(kern_l2norm_args){at[CORE_Y + i], at[CORE_NORMED + i], c->heads, c->width, 1e-6f});
    call(s, KERN_OP_GATES,
         &(kern_gates_args){.a = decays ? at[CORE_A] : none,
                            .b = at[CORE_A + 1],
                            .A_log = decays ? own[NORM] : none,
                            .dt_bias = decays ? own[BIAS] : none,
                            .g = decays ? at[CORE_G] : none,
                            .beta = at[CORE_G + 1],
                            .gates = {.heads = c->heads,
                                      .channels = 1,
                                      .decay_law = decays ? KERN_DECAY_LAW_EXPONENTIAL : KERN_DECAY_LAW_NONE,
                                      .write_law = KERN_WRITE_LAW_SIGMOID,
                                      .write_factor = 1}});
    call(s, KERN_OP_RECURRENCE,
         &(kern_recurrence_args){.q = at[c->norms > 0 ? CORE_NORMED : CORE_Y],
                                 .k = at[c->norms > 1 ? CORE_NORMED + 1 : CORE_Y + 1],
                                 .v = at[CORE_Y + 2],
                                 .g = decays ? at[CORE_G] : none,
                                 .beta = at[CORE_G + 1],
                                 .state = place(m, KERN_CLASS_STATE, 0),
                                 .o = at[CORE_O],
                                 .family = {.decay = c->decay,
                                            .update = KERN_UPDATE_DELTA,
                                            .weighted = 1,
                                            .heads = c->heads,
                                            .key_width = c->width,
                                            .value_width = c->width,
                                            .scale = 0.125f,
                                            .storage = c->storage}});
}

// Numbers that are some in either storage: of bf16 both halves of a word are one.
static const float *core_states(session_test *s, const core_shape *c) {
    const size_t count = CORE_ROWS * core_slot_floats(c);
    float *state = kernel_test_floats(&s->test, count, -1, 1);
    for (size_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, &state[i], sizeof bits);
        bits = (bits & 0xFFFF0000u) | bits >> 16;
        memcpy(&state[i], &bits, sizeof bits);
    }
    return state;
}

static void make_core(session_test *s, const core_shape *c) {
    kernel_test *test = &s->test;
    const size_t channels = core_channels(c), slot = core_slot_floats(c), places = CORE_PLACES * CORE_ROWS * channels;
    s->param[CONV] = sent(test, kernel_test_floats(test, 3 * channels * TAPS, -1, 1), 3 * channels * TAPS);
    s->param[BIAS] = sent(test, kernel_test_floats(test, 3 * channels, -1, 1), 3 * channels);
    s->param[NORM] = sent(test, kernel_test_floats(test, (size_t)c->heads, -1, 1), (size_t)c->heads);
    const float *state = core_states(s, c), *zeros = kernel_test_zero_floats(test, places);
    for (int i = 0; i < 2; i++)
        s->memory[i] = (session_memory){sent(test, state, CORE_ROWS * slot), NULL, sent(test, zeros, places)};
    test->rows->slot_stride = sizeof(float) * slot;
}

static void core_rows(kernel_test *test, int rows, int step, bool prompt) {
    kernel_test_clear_rows(test);
    for (int r = 0; r < rows; r++)
        kernel_test_row(test, KERN_ROW_GENERATED, r == 3 ? -1 : (37 * r + 11 * step) % (CORE_ROWS - 1), 1,
                        100 * r + step);
    if (prompt) {
        kernel_test_row(test, KERN_ROW_PROMPT, CORE_ROWS - 1, CORE_ROWS - rows, 0);
        kernel_test_boundary(test, 2);
    }
    kernel_test_prepare(test);
}

static void compare_cores(session_test *s, const core_shape *c) {
    static const struct {
        int rows;
        bool prompt;
    } steps[] = {{61, false}, {1, false}, {9, false}, {59, true}, {61, false}, {37, false}, {9, true}};
    const size_t channels = core_channels(c), inputs = CORE_Y * CORE_ROWS * channels;
    for (int step = 0; step < (int)(sizeof steps / sizeof steps[0]); step++) {
        const float *x = kernel_test_floats(&s->test, inputs, -2, 2);
        core_rows(&s->test, steps[step].rows, step, steps[step].prompt);
        for (int i = 0; i < 2; i++)
            ck_assert_int_eq(kern_upload(s->test.stream, s->memory[i].scratch, x, inputs * sizeof *x), KERN_OK);
        const kern_memory memory = {.param = s->param, .state = s->memory[0].state, .scratch = s->memory[0].scratch};
        ck_assert_int_eq(kern_plan_run(s->plan, s->test.stream, s->test.rows, &memory), KERN_OK);
        core_calls(s, c, &s->memory[1], launch_call);
        for (size_t i = CORE_Y; i < CORE_PLACES; i++) {
            const size_t at = i * CORE_ROWS * channels;
            const bool used =
                (i < CORE_NORMED + (size_t)c->norms || i >= CORE_G) && (i != CORE_G || c->decay != KERN_DECAY_NONE);
            if (used)
                assert_same_memory(s, (const float *const[]){s->memory[0].scratch + at, s->memory[1].scratch + at},
                                   CORE_ROWS * channels);
        }
        assert_same_memory(s, (const float *const[]){s->memory[0].state, s->memory[1].state},
                           CORE_ROWS * core_slot_floats(c));
    }
}

START_TEST(recurrences_behind_preparations_equal_launches) {
    for (const core_shape *c = core_shapes; c < core_shapes + sizeof core_shapes / sizeof *core_shapes; c++) {
        session_test s = {0};
        if (!kernel_test_open(&s.test, _i, "cpu"))
            MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
        if (c->storage == KERN_STORE_F32 || s.test.cuda) { // the CPU stores floats alone
            make_core(&s, c);
            ck_assert_int_eq(kern_plan_create(s.test.device, &s.plan), KERN_OK);
            core_calls(&s, c, NULL, add_call);
            ck_assert_int_eq(kern_plan_seal(s.plan), KERN_OK);
            compare_cores(&s, c);
            free_memory(&s);
        }
        kernel_test_close(&s.test);
    }
}
END_TEST

static Suite *plan_suite(void) {
    Suite *suite = suite_create("plan");
    TCase *tests = tcase_create("plan");
    tcase_add_test(tests, plan_equals_launches);
    tcase_add_test(tests, parts_of_a_plan_are_the_plan);
    tcase_add_test(tests, a_sealed_plan_is_closed);
    tcase_add_test(tests, bad_entries_are_refused);
    tcase_add_test(tests, absent_memory_is_refused);
    tcase_add_test(tests, a_long_plan_grows);
    tcase_add_loop_test(tests, steps_of_sessions_equal_launches, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tests, wide_norms_before_products, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tests, long_prompts_equal_launches, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tests, recurrences_behind_preparations_equal_launches, 0, KERNEL_TEST_DEVICES);
    tcase_set_timeout(tests, 60);
    suite_add_tcase(suite, tests);
    return suite;
}

MESA_TEST_MAIN(plan_suite)
