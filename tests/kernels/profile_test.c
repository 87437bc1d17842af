// SPDX-License-Identifier: Apache-2.0
// Marked runs: results of a plain run, a time for every operation, and what operations need at least.
//
// The plan looks ids up, sends them through the two halves of one matrix and adds; once for prompts, once for generated
// tokens alone, which devices run in another way.
#include "tests/kernels/kernel_test.h"

enum { WIDTH = 48, VOCABULARY = 16, TOKENS = 6, OPERATIONS = 4, ROW_BYTES = TOKENS * WIDTH * 4 };
_Static_assert(ROW_BYTES % 64 == 0, "offsets are multiples of 64");

typedef struct world {
    kernel_test test;
    kern_weight *weight[2]; // the embedding, the matrix
    void *param[2], *memory_block;
    kern_memory memory;
    kern_plan *plan;
    kern_event *mark[OPERATIONS + 1];
} world;

static kern_weight *make_weight(kernel_test *test, int rows) {
    kern_weight *weight = NULL;
    kern_weight_desc desc = {.dtype = KERN_F32, .rows = rows, .cols = WIDTH};
    desc.host = kernel_test_floats(test, rows * WIDTH, -1, 1);
    ck_assert_int_eq(kern_weight_create(test->device, &desc, &weight), KERN_OK);
    return weight;
}

static kern_ptr row(uint64_t index) {
    return kern_ref(KERN_CLASS_SAVED, index * ROW_BYTES);
}

static void add_operations(kern_plan *plan) {
    const kern_embed_args embed = {.weight = kern_ref(KERN_CLASS_PARAM, 0), .y = row(0), .width = WIDTH, .scale = 2};
    kern_linear_args half = {
        .x = row(0), .weight = kern_ref(KERN_CLASS_PARAM, 1), .y = row(1), .cols = WIDTH, .rows = WIDTH};
    const kern_add_args add = {.x = row(1), .y = row(2), .width = WIDTH};
    ck_assert_int_eq(kern_plan_add(plan, KERN_OP_EMBED, &embed), KERN_OK);
    ck_assert_int_eq(kern_plan_add(plan, KERN_OP_LINEAR, &half), KERN_OK);
    half.row0 = WIDTH;
    half.y = row(2);
    ck_assert_int_eq(kern_plan_add(plan, KERN_OP_LINEAR, &half), KERN_OK);
    ck_assert_int_eq(kern_plan_add(plan, KERN_OP_ADD, &add), KERN_OK);
}

static bool open_world(world *w, int device, kern_row_kind kind) {
    *w = (world){0};
    if (!kernel_test_open(&w->test, device, "cpu"))
        return false;
    w->param[0] = w->weight[0] = make_weight(&w->test, VOCABULARY);
    w->param[1] = w->weight[1] = make_weight(&w->test, 2 * WIDTH);
    ck_assert_int_eq(kern_alloc(w->test.device, (size_t)3 * ROW_BYTES, &w->memory_block), KERN_OK);
    w->memory = (kern_memory){.param = w->param, .saved = w->memory_block};
    ck_assert_int_eq(kern_plan_create(w->test.device, &w->plan), KERN_OK);
    add_operations(w->plan);
    ck_assert_int_eq(kern_plan_seal(w->plan), KERN_OK);
    for (int t = 0; t < TOKENS; t += kind == KERN_ROW_PROMPT ? TOKENS : 1)
        kernel_test_row(&w->test, kind, -1, kind == KERN_ROW_PROMPT ? TOKENS : 1, 0);
    for (int t = 0; t < TOKENS; t++)
        w->test.rows->id[t] = (3 * t) % VOCABULARY;
    kernel_test_prepare(&w->test);
    for (int i = 0; i <= OPERATIONS; i++)
        ck_assert_int_eq(kern_event_create_timed(w->test.device, &w->mark[i]), KERN_OK);
    return true;
}

static void close_world(world *w) {
    for (int i = 0; i <= OPERATIONS; i++)
        kern_event_free(w->mark[i]);
    kern_plan_free(w->plan);
    kern_free(w->test.device, w->memory_block);
    for (int i = 0; i < 2; i++)
        kern_weight_free(w->weight[i]);
    kernel_test_close(&w->test);
}

static void read_result(const world *w, float *result) {
    const char *from = (const char *)w->memory_block + (size_t)2 * ROW_BYTES;
    ck_assert_int_eq(kern_download(w->test.stream, result, from, ROW_BYTES), KERN_OK);
    ck_assert_int_eq(kern_synchronize(w->test.stream), KERN_OK);
}

static double elapsed(const kern_event *from, const kern_event *to) {
    double seconds = -1;
    ck_assert_int_eq(kern_event_elapsed(from, to, &seconds), KERN_OK);
    return seconds;
}

// _i: a device, then the same with generated tokens.
START_TEST(a_marked_run_is_the_run) {
    world w;
    float plain[TOKENS * WIDTH], marked[TOKENS * WIDTH];
    if (!open_world(&w, _i % KERNEL_TEST_DEVICES, _i < KERNEL_TEST_DEVICES ? KERN_ROW_PROMPT : KERN_ROW_GENERATED))
        return;
    ck_assert_int_eq(kern_plan_run(w.plan, w.test.stream, w.test.rows, &w.memory), KERN_OK);
    read_result(&w, plain);
    ck_assert_int_eq(kern_zero(w.test.stream, w.memory_block, (size_t)3 * ROW_BYTES), KERN_OK);
    ck_assert_int_eq(kern_plan_run_marked(w.plan, w.test.stream, w.test.rows, &w.memory, w.mark), KERN_OK);
    read_result(&w, marked);
    ck_assert_mem_eq(plain, marked, sizeof plain);
    ck_assert(plain[0] != 0);
    double sum = 0;
    for (int i = 0; i < OPERATIONS; i++) {
        double seconds = elapsed(w.mark[i], w.mark[i + 1]);
        ck_assert_double_ge(seconds, 0);
        sum += seconds;
    }
    double all = elapsed(w.mark[0], w.mark[OPERATIONS]);
    ck_assert(all > 0);
    ck_assert_double_eq_tol(sum, all, 1e-5 * all + 1e-5 * OPERATIONS); // what a clock's ticks may lose
    close_world(&w);
}
END_TEST

START_TEST(operations_need_what_their_shapes_say) {
    world w;
    ck_assert(open_world(&w, 0, KERN_ROW_PROMPT));
    const double vectors = 4.0 * TOKENS * WIDTH;
    kern_cost embed = kern_plan_cost(w.plan, 0, w.test.rows, &w.memory, 0);
    kern_cost half = kern_plan_cost(w.plan, 2, w.test.rows, &w.memory, 0);
    kern_cost add = kern_plan_cost(w.plan, 3, w.test.rows, &w.memory, 0);
    ck_assert_int_eq(kern_plan_op(w.plan, 2), KERN_OP_LINEAR);
    ck_assert_int_eq(((const kern_linear_args *)kern_plan_args(w.plan, 2))->row0, WIDTH);
    ck_assert_double_eq(embed.bytes, 2 * vectors);
    ck_assert_double_eq(half.operations, 2.0 * TOKENS * WIDTH * WIDTH);
    ck_assert_double_eq(half.bytes, 2 * vectors + (double)kern_weight_bytes(w.weight[1]) / 2);
    ck_assert_double_eq(add.bytes, 3 * vectors);
    ck_assert_double_eq(add.operations, TOKENS * WIDTH);
    kern_memory absent = {0};
    ck_assert_double_eq(kern_plan_cost(w.plan, 3, w.test.rows, &absent, 0).bytes, 0);
    close_world(&w);
}
END_TEST

// What a solve needs grows with its steps, a state's bytes with the rows that have one.
START_TEST(solves_and_states_are_counted) {
    world w;
    ck_assert(open_world(&w, 0, KERN_ROW_PROMPT));
    kern_mesa_args a = {.mesa = {.heads = 2, .key_width = 16, .value_width = 16, .lambda_bound = 0.25F}};
    kern_cost none = kern_op_cost(KERN_OP_MESA, w.test.rows, &a, 1, 0);
    kern_cost ten = kern_op_cost(KERN_OP_MESA, w.test.rows, &a, 1, 10);
    ck_assert_double_eq(ten.operations - none.operations, TOKENS * 2.0 * 10 * 2 * 16 * 16);
    w.test.rows->row[0].slot = 0;
    kern_cost kept = kern_op_cost(KERN_OP_MESA, w.test.rows, &a, 1, 10);
    ck_assert_double_eq(kept.bytes - ten.bytes, 2 * 4.0 * 2 * (2 * 16 * 16));
    close_world(&w);
}
END_TEST

static Suite *profile_suite(void) {
    Suite *suite = suite_create("profile");
    TCase *cases = tcase_create("profile");
    tcase_add_loop_test(cases, a_marked_run_is_the_run, 0, 2 * KERNEL_TEST_DEVICES);
    tcase_add_test(cases, operations_need_what_their_shapes_say);
    tcase_add_test(cases, solves_and_states_are_counted);
    suite_add_tcase(suite, cases);
    return suite;
}

MESA_TEST_MAIN(profile_suite)
