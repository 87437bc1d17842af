// SPDX-License-Identifier: Apache-2.0
// The recurrence family, forward: every decay, update and weight with every map of heads, chunk and step forms against
// the double reference; documents, slots, independence of neighbours, cuts, refused shapes.
#include "tests/kernels/recurrence_problem.h"

START_TEST(forward_matches_reference) {
    for (int shape = 0; shape < SHAPES; shape++)
        for (int law = 0; law < LAWS; law++) {
            kernel_test test;
            if (!meet(law, shape))
                continue;
            if (!open_device(&test, _i, device_of(law, shape)))
                return;
            sequence_mixed_rows(&test);
            problem p;
            make_problem(&p, &test, with_law(shapes[shape], law), 0.8);
            run_forward(&p, law % 3 == 0);
            check_forward(&p, 1e-6);
            kernel_test_close(&test);
        }
}
END_TEST

// The widest shapes: a state in several strips.
START_TEST(wide_states_match_reference) {
    static const kern_recurrence wide[] = {
        {.decay = KERN_DECAY_CHANNEL,
         .update = KERN_UPDATE_DELTA,
         .weighted = 1,
         .heads = 1,
         .key_width = 256,
         .value_width = 513,
         .scale = 0.06f},
        {.decay = KERN_DECAY_SCALAR,
         .update = KERN_UPDATE_ADD,
         .weighted = 1,
         .heads = 2,
         .query_heads = 4,
         .key_heads = 1,
         .key_width = 48,
         .value_width = 512,
         .unit_column = 1,
         .skip_width = 512,
         .scale = 0.06f},
        {.decay = KERN_DECAY_NONE,
         .update = KERN_UPDATE_DELTA,
         .heads = 1,
         .key_width = 520,
         .value_width = 1024,
         .scale = 0.06f},
    };
    for (size_t i = 0; i < sizeof wide / sizeof wide[0]; i++) {
        kernel_test test;
        if (!open_device(&test, _i, sequence_devices[i]))
            return;
        kernel_test_clear_rows(&test);
        kernel_test_row(&test, KERN_ROW_GENERATED, 0, 2, 7);
        kernel_test_row(&test, KERN_ROW_PROMPT, 1, 40, 60);
        kernel_test_boundary(&test, 23);
        kernel_test_prepare(&test);
        problem p;
        make_problem(&p, &test, wide[i], 0.8);
        run_forward(&p, !test.cuda);
        check_forward(&p, 1e-6);
        kernel_test_close(&test);
    }
}
END_TEST

START_TEST(chunk_form_equals_step_form) {
    enum { LENGTH = 150 };
    for (int law = 0; law < LAWS; law++) {
        kernel_test test;
        if (!open_device(&test, _i, device_of(law, 0)))
            return;
        problem p;
        float *o = NULL, *state = NULL;
        for (int kind = KERN_ROW_GENERATED; kind <= KERN_ROW_PROMPT; kind++) {
            kernel_test_clear_rows(&test);
            kernel_test_row(&test, kind, law % 3 ? 1 : -1, LENGTH, 11);
            kernel_test_boundary(&test, 100);
            kernel_test_prepare(&test);
            test.seed = 3;
            make_problem(&p, &test, with_law(shapes[0], law), 0.5);
            run_forward(&p, false);
            if (kind == KERN_ROW_GENERATED) {
                o = p.o;
                state = p.slots + p.state_size;
            }
        }
        kernel_test_assert_norm(p.o, kernel_test_widened(&test, o, LENGTH * p.output_row), LENGTH * p.output_row, 1e-6);
        kernel_test_assert_norm(p.slots + p.state_size, kernel_test_widened(&test, state, p.state_size), p.state_size,
                                1e-6);
        kernel_test_close(&test);
    }
}
END_TEST

// Decays from almost 1 to far below the smallest float, next to each other.
START_TEST(extreme_decays_are_exact) {
    static const float decays[] = {-1e-7f, -200, -0.01f, -3000, -1e-5f, -60, -0.5f};
    for (int law = 0; law < LAWS; law++) {
        kernel_test test;
        if (!open_device(&test, _i, device_of(law, 1)))
            return;
        sequence_mixed_rows(&test);
        problem p;
        make_problem(&p, &test, with_law(shapes[0], law), 0.8);
        for (size_t t = 0; t < p.tokens * p.decay_row; t++)
            p.g[t] = decays[t * 31 % 7];
        run_forward(&p, !test.cuda);
        check_forward(&p, 1e-6);
        kernel_test_close(&test);
    }
}
END_TEST

// The same row alone and among 2 x 15 others.
enum { AMONG_LENGTH = 75 };
static void run_among(problem *p, kernel_test *test, kern_recurrence family, kern_row_kind kind, int before) {
    kernel_test_clear_rows(test);
    for (int r = 0; r < before; r++)
        kernel_test_row(test, KERN_ROW_GENERATED, 2, 1 + r % 3, 5);
    kern_row *row = kernel_test_row(test, kind, 1, AMONG_LENGTH, 3);
    for (int r = 0; r < before; r++)
        kernel_test_row(test, KERN_ROW_PROMPT, -1, 7 + 5 * r, r);
    kernel_test_prepare(test);
    const size_t first = (size_t)row->token0, tokens = (size_t)test->rows->n_tokens;
    problem own = {.test = test, .family = family}; // the row's own data
    test->seed = 99;
    test->rows->n_tokens = AMONG_LENGTH;
    make_problem(&own, test, family, 0.9);
    test->rows->n_tokens = (int32_t)tokens;
    test->seed = (uint64_t)before + 7;
    make_problem(p, test, family, 0.9);
    memcpy(p->q + first * p->query_row, own.q, AMONG_LENGTH * p->query_row * sizeof(float));
    memcpy(p->k + first * p->key_row, own.k, AMONG_LENGTH * p->key_row * sizeof(float));
    memcpy(p->v + first * p->value_row, own.v, AMONG_LENGTH * p->value_row * sizeof(float));
    memcpy(p->beta + first * p->gate_row, own.beta, AMONG_LENGTH * p->gate_row * sizeof(float));
    memcpy(p->skip, own.skip, p->skip_size * sizeof(float));
    if (family.decay == KERN_DECAY_HEAD)
        memcpy(p->g, own.g, p->gate_row * sizeof(float));
    else
        memcpy(p->g + first * p->decay_row, own.g, AMONG_LENGTH * p->decay_row * sizeof(float));
    memcpy(p->slots + p->state_size, own.slots, p->state_size * sizeof(float));
    run_forward(p, false);
    memmove(p->o, p->o + first * p->output_row, AMONG_LENGTH * p->output_row * sizeof(float));
}

START_TEST(row_alone_equals_row_among_others) {
    for (int law = 0; law < LAWS; law++)
        for (int kind = KERN_ROW_GENERATED; kind <= KERN_ROW_PROMPT; kind++) {
            kernel_test test;
            if (!open_device(&test, _i, "cpu:32"))
                return;
            problem alone, among;
            const kern_recurrence family = with_law(shapes[law % SHAPES], law);
            run_among(&alone, &test, family, kind, 0);
            run_among(&among, &test, family, kind, 15);
            kernel_test_assert_same(among.o, alone.o, AMONG_LENGTH * alone.output_row);
            kernel_test_assert_same(among.slots + among.state_size, alone.slots + alone.state_size, alone.state_size);
            kernel_test_close(&test);
        }
}
END_TEST

START_TEST(cut_prefill_equals_prefill_at_once) {
    enum { LENGTH = 180 };
    for (int law = 0; law < LAWS; law++) {
        kernel_test test;
        if (!open_device(&test, _i, "cpu:32"))
            return;
        const size_t chunk = (size_t)kern_device_describe(test.device)->chunk;
        problem p;
        kernel_test_clear_rows(&test);
        kernel_test_row(&test, KERN_ROW_PROMPT, 0, LENGTH, 0);
        kernel_test_prepare(&test);
        make_problem(&p, &test, with_law(shapes[law % SHAPES], law), 0.9);
        run_part(&p, KERN_ROW_PROMPT, 0, 0, 0, LENGTH);
        float *o = kernel_test_copy(&test, p.o, p.tokens * p.output_row);
        for (size_t cut = chunk; cut < LENGTH; cut += chunk) {
            memset(p.o, 0, p.tokens * p.output_row * sizeof(float));
            memcpy(p.slots + 3 * p.state_size, p.slots_before, p.state_size * sizeof(float));
            run_part(&p, KERN_ROW_PROMPT, 3, 0, 0, cut);
            run_part(&p, KERN_ROW_PROMPT, 3, (int64_t)cut, cut, LENGTH);
            kernel_test_assert_same(p.o, o, p.tokens * p.output_row);
            kernel_test_assert_same(p.slots, p.slots + 3 * p.state_size, p.state_size);
        }
        kernel_test_close(&test);
    }
}
END_TEST

// Steps of so many states that a device may go another way, each row the same as alone.
enum { MANY = 64 };
static void run_many(kernel_test *test, kern_recurrence family, double tolerance) {
    static const int looked_at[] = {0, 1, 17, 40, 63};
    kernel_test_clear_rows(test);
    for (int r = 0; r < MANY; r++)
        kernel_test_row(test, KERN_ROW_GENERATED, r % 8 == 1 ? -1 : (r * 27 + 5) % MANY, 1, 100 + 7 * r);
    kernel_test_prepare(test);
    problem p;
    make_problem(&p, test, family, 0.8);
    make_slots(&p, MANY);
    run_forward(&p, false);
    check_forward(&p, tolerance);
    const float *o = kernel_test_copy(test, p.o, MANY * p.output_row);
    const float *slots = kernel_test_copy(test, p.slots, p.slots_size);
    for (size_t i = 0; i < sizeof looked_at / sizeof looked_at[0]; i++) {
        const size_t r = (size_t)looked_at[i];
        const int slot = r % 8 == 1 ? -1 : (int)((r * 27 + 5) % MANY);
        memcpy(p.slots, p.slots_before, p.slots_size * sizeof *p.slots);
        run_part(&p, KERN_ROW_GENERATED, slot, (int64_t)(100 + 7 * r), r, r + 1);
        kernel_test_assert_same(p.o + r * p.output_row, o + r * p.output_row, p.output_row);
        if (slot >= 0)
            kernel_test_assert_same(p.slots + (size_t)slot * p.state_size, slots + (size_t)slot * p.state_size,
                                    p.state_size);
    }
}

static const kern_recurrence large[] = {
    {.heads = 6, .key_width = 128, .value_width = 128, .scale = 0.1f},
    {.heads = 20, .key_heads = 4, .value_heads = 5, .key_width = 64, .value_width = 64, .scale = 0.125f},
    {.heads = 6, .query_heads = 12, .key_width = 100, .value_width = 144, .skip_width = 1, .scale = 0.1f},
    {.heads = 2, .key_width = 256, .value_width = 200, .skip_width = 200, .scale = 0.06f},
    {.heads = 80, .query_heads = 1, .key_heads = 1, .key_width = 28, .value_width = 36, .scale = 0.2f},
};
enum { LARGE = sizeof large / sizeof large[0] };

START_TEST(row_of_many_equals_row_alone) {
    for (int i = 0; i < 2 * LARGE; i++) {
        kernel_test test;
        if (!open_device(&test, _i, "cpu"))
            return;
        run_many(&test, with_law(large[i % LARGE], 7 * i % LAWS), 1e-6);
        kernel_test_close(&test);
    }
}
END_TEST

// ------------------------------------------------------------------------------------------------- states in bf16

static kern_recurrence in_bf16(kern_recurrence family, int law) {
    family = with_law(family, law);
    family.storage = KERN_STORE_BF16;
    return family;
}

// A CUDA device, which has them; the others refuse them.
static bool open_for_bf16(kernel_test *test, int device) {
    if (!open_device(test, device, "cpu"))
        return false;
    if (test->cuda)
        return true;
    sequence_training_rows(test);
    problem p;
    make_problem(&p, test, in_bf16(shapes[0], 0), 0.8);
    const kern_recurrence_args args = arguments(&p, false);
    kernel_test_assert_refused(test, KERN_OP_RECURRENCE, &args, KERN_UNSUPPORTED);
    kernel_test_close(test);
    return false;
}

START_TEST(bf16_states_match_reference) {
    for (int shape = 0; shape < SHAPES; shape++)
        for (int law = 0; law < LAWS; law++) {
            kernel_test test;
            if (!open_for_bf16(&test, _i))
                return;
            kernel_test_clear_rows(&test);
            kernel_test_row(&test, KERN_ROW_GENERATED, 0, 1, 7);
            kernel_test_row(&test, KERN_ROW_GENERATED, 3, 5, 100);
            kernel_test_row(&test, KERN_ROW_PROMPT, 1, 9, 64);
            kernel_test_boundary(&test, 4);
            kernel_test_prepare(&test);
            problem p;
            make_problem(&p, &test, in_bf16(shapes[shape], law), 0.8);
            run_forward(&p, false);
            check_forward(&p, 1e-2);
            kernel_test_close(&test);
        }
}
END_TEST

START_TEST(bf16_row_of_many_equals_row_alone) {
    for (int i = 0; i < 2 * LARGE; i++) {
        kernel_test test;
        if (!open_for_bf16(&test, _i))
            return;
        kern_recurrence family = in_bf16(large[i % LARGE], 7 * i % LAWS);
        family.heads *= 2;
        family.query_heads *= family.query_heads > 1 ? 2 : 1;
        run_many(&test, family, 1e-2);
        kernel_test_close(&test);
    }
}
END_TEST

START_TEST(bf16_cut_anywhere_leaves_the_same_bits) {
    enum { LENGTH = 40, CUT = 13 };
    for (int law = 0; law < LAWS; law++) {
        kernel_test test;
        if (!open_for_bf16(&test, _i))
            return;
        problem p;
        kernel_test_clear_rows(&test);
        kernel_test_row(&test, KERN_ROW_PROMPT, 0, LENGTH, 5);
        kernel_test_prepare(&test);
        make_problem(&p, &test, in_bf16(shapes[law % SHAPES], law), 0.9);
        memcpy(p.slots + 3 * p.state_size, p.slots, p.state_size * sizeof *p.slots);
        run_part(&p, KERN_ROW_PROMPT, 0, 5, 0, LENGTH);
        const float *o = kernel_test_copy(&test, p.o, p.tokens * p.output_row);
        run_part(&p, KERN_ROW_PROMPT, 3, 5, 0, CUT);
        for (size_t t = CUT; t < LENGTH; t++)
            run_part(&p, KERN_ROW_GENERATED, 3, (int64_t)(5 + t), t, t + 1);
        kernel_test_assert_same(p.o, o, p.tokens * p.output_row);
        kernel_test_assert_same(p.slots, p.slots + 3 * p.state_size, p.state_size);
        kernel_test_close(&test);
    }
}
END_TEST

// What is added lies below half a unit of what is there: rounded to the nearest nothing would ever change.
START_TEST(bf16_states_take_in_what_is_small) {
    enum { LENGTH = 512, WIDTH = 64 };
    kernel_test test;
    if (!open_for_bf16(&test, _i))
        return;
    kernel_test_clear_rows(&test);
    kernel_test_row(&test, KERN_ROW_PROMPT, 0, LENGTH, 0);
    kernel_test_prepare(&test);
    problem p;
    make_problem(&p, &test, in_bf16(shapes[0], 0), 0.9);
    for (size_t i = 0; i < LENGTH * WIDTH; i++) {
        p.k[i] = 1;
        p.v[i] = 1.0f / 1024;
    }
    for (size_t i = 0; i < WIDTH * WIDTH; i++)
        p.slots[i] = 1;
    run_forward(&p, false);
    double mean = 0, different = 0;
    for (size_t i = 0; i < WIDTH * WIDTH; i++) {
        mean += (double)p.slots[i] / (WIDTH * WIDTH);
        different += p.slots[i] != p.slots[0];
    }
    ck_assert_msg(fabs(mean - 1.5) < 0.005, "mean %.4f", mean);
    ck_assert_msg(different > WIDTH, "only %.0f elements differ from the first", different);
    kernel_test_close(&test);
}
END_TEST

static void refused(kernel_test *test, const problem *p, kern_recurrence family, kern_status status) {
    kern_recurrence_args args = arguments(p, false);
    args.family = family;
    kernel_test_assert_refused(test, KERN_OP_RECURRENCE, &args, status);
}

START_TEST(impossible_shapes_are_refused) {
    kernel_test test;
    if (!open_device(&test, _i, "cpu"))
        return;
    sequence_training_rows(&test);
    problem p;
    kern_recurrence good = with_law(shapes[0], 2 + 8); // scalar decay, weighted
    good.heads = 2;
    make_problem(&p, &test, good, 0.9);
    kern_recurrence bad = good;
    refused(&test, &p, good, KERN_OK);
    for (int field = 0; field < 11; field++) {
        bad = good;
        int32_t *const value[] = {&bad.heads,      &bad.query_heads, &bad.key_heads, &bad.value_heads,
                                  &bad.key_heads,  &bad.value_heads, &bad.decay,     &bad.update,
                                  &bad.skip_width, &bad.key_width,   &bad.storage};
        static const int32_t wrong[] = {0, 3, -1, -1, 4, 3, 7, 2, 1, 0, 2};
        *value[field] = wrong[field];
        refused(&test, &p, bad, KERN_INVALID);
    }
    bad = good;
    bad.key_width = 4097;
    refused(&test, &p, bad, KERN_UNSUPPORTED);
    bad = good;
    bad.value_width = 4097;
    refused(&test, &p, bad, KERN_UNSUPPORTED);
    kern_recurrence_args args = arguments(&p, false);
    args.beta.f = NULL;
    kernel_test_assert_refused(&test, KERN_OP_RECURRENCE, &args, KERN_INVALID);
    run_forward(&p, !test.cuda);
    p.v[3] = NAN;
    run_forward(&p, false);
    ck_assert(isnan(p.o[3]) && !isnan(p.o[64 + 3]));
    kernel_test_close(&test);
}
END_TEST

static Suite *recurrence_suite(void) {
    Suite *suite = suite_create("recurrence");
    TCase *tcase = tcase_create("every instruction set");
    tcase_set_timeout(tcase, 120);
    tcase_add_loop_test(tcase, forward_matches_reference, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tcase, wide_states_match_reference, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tcase, chunk_form_equals_step_form, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tcase, extreme_decays_are_exact, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tcase, row_alone_equals_row_among_others, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tcase, cut_prefill_equals_prefill_at_once, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tcase, impossible_shapes_are_refused, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tcase, row_of_many_equals_row_alone, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tcase, bf16_states_match_reference, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tcase, bf16_row_of_many_equals_row_alone, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tcase, bf16_cut_anywhere_leaves_the_same_bits, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tcase, bf16_states_take_in_what_is_small, 0, KERNEL_TEST_DEVICES);
    suite_add_tcase(suite, tcase);
    return suite;
}

MESA_TEST_MAIN(recurrence_suite)
