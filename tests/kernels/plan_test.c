// SPDX-License-Identifier: Apache-2.0
// Plans: a planned sequence equals the same launches by hand, bit for bit; what a plan refuses to hold or to run.
//
// The sequence touches every class of memory: a weight, a vector, a gradient, slot state, saved and scratch buffers.
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
    kern_weight_desc desc = {KERN_F32, VOCABULARY, WIDTH, values, NULL};
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
    f->memory = (kern_memory){f->param, f->grad, f->state, NULL, f->saved, f->scratch};
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
    kern_embed_args embed = {param(EMBEDDING), saved(0), WIDTH, 2};
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
    kern_embed_args embed = {{f.embedding}, {x}, WIDTH, 2};
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
    add.y = kern_ref((kern_class)(KERN_CLASS_SCRATCH + 1), 0);
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

static Suite *plan_suite(void) {
    Suite *suite = suite_create("plan");
    TCase *tests = tcase_create("plan");
    tcase_add_test(tests, plan_equals_launches);
    tcase_add_test(tests, a_sealed_plan_is_closed);
    tcase_add_test(tests, bad_entries_are_refused);
    tcase_add_test(tests, absent_memory_is_refused);
    tcase_add_test(tests, a_long_plan_grows);
    suite_add_tcase(suite, tests);
    return suite;
}

MESA_TEST_MAIN(plan_suite)
