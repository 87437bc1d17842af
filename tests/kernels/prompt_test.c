// SPDX-License-Identifier: Apache-2.0
// Prompt rows of the recurrence family, in the shapes that devices have chunk kernels of their own
// for: odd lengths at odd places of the grid, tokens that are all the same, gates at their limits, cuts on the grid.
//
// The references work in double, token by token. The chunk of the device decides where a cut leaves the bits alone.
#include "tests/kernels/recurrence_problem.h"

static const kern_recurrence wide_shapes[] = {
    {.heads = 2, .key_heads = 1, .query_heads = 1, .key_width = 128, .value_width = 128, .scale = 0.0884f},
    {.heads = 2, .value_heads = 1, .key_width = 96, .value_width = 100, .unit_column = 1, .scale = 0.1f},
    {.heads = 1, .key_width = 64, .value_width = 72, .skip_width = 1, .scale = 1},
};
enum { WIDE_SHAPES = sizeof wide_shapes / sizeof wide_shapes[0] };

// Rows of these lengths at these positions, in slots by turns; the last is cut into documents.
static void odd_rows(kernel_test *test) {
    static const struct {
        int length, position;
    } rows[] = {{1, 0}, {1, 63}, {2, 63}, {15, 0}, {17, 48}, {63, 0}, {64, 64}, {65, 0}, {66, 63}, {131, 1}};
    enum { ROWS = sizeof rows / sizeof rows[0] };
    kernel_test_clear_rows(test);
    for (int r = 0; r < ROWS; r++)
        kernel_test_row(test, KERN_ROW_PROMPT, r % 2 ? r / 2 - 1 : -1, rows[r].length, rows[r].position);
    kernel_test_boundary(test, 5);
    kernel_test_boundary(test, 63);
    kernel_test_boundary(test, 64);
    kernel_test_prepare(test);
}

// A law for each shape and turn, so that every law meets every width of keys.
START_TEST(odd_lengths_match_reference) {
    for (int turn = 0; turn < 2 * LAWS; turn++) {
        kernel_test test;
        if (!open_device(&test, _i, "cpu:64"))
            return;
        odd_rows(&test);
        problem p;
        make_problem(&p, &test, with_law(wide_shapes[turn % WIDE_SHAPES], (turn + turn / LAWS) % LAWS), 0.8);
        run_forward(&p, false);
        check_forward(&p, 1e-6);
        kernel_test_close(&test);
    }
}
END_TEST

// The triangular systems of the delta rule are at their worst where all keys are one, written with a weight of 2.
START_TEST(equal_tokens_match_reference) {
    static const float weights[] = {2, 1, 0}, decays[] = {0, -1e-7f, -60}; // e^-80 is subnormal, scaled
    for (int law = 0; law < LAWS; law++) {
        kernel_test test;
        if (!open_device(&test, _i, "cpu:64"))
            return;
        kernel_test_clear_rows(&test);
        for (int slot = 0; slot < 3; slot++)
            kernel_test_row(&test, KERN_ROW_PROMPT, slot, 65, 0);
        kernel_test_prepare(&test);
        problem p;
        make_problem(&p, &test, with_law(wide_shapes[0], law), 0.9);
        for (size_t t = 0; t < p.tokens; t++) {
            memcpy(p.q + t * p.query_row, p.q, p.query_row * sizeof *p.q);
            memcpy(p.k + t * p.key_row, p.k, p.key_row * sizeof *p.k);
            memcpy(p.v + t * p.value_row, p.v, p.value_row * sizeof *p.v);
            for (size_t i = 0; i < p.gate_row; i++)
                p.beta[t * p.gate_row + i] = weights[t / 65];
            for (size_t i = 0; i < p.decay_row; i++)
                p.g[t * p.decay_row + i] = decays[t / 65];
        }
        run_forward(&p, false);
        check_forward(&p, test.cuda ? 1e-5 : 2e-6); // tensor cores cut sums off at 24 bits, which these systems magnify
        kernel_test_close(&test);
    }
}
END_TEST

// Numbers far from 1, in either direction: what is near the largest of its kind keeps its digits.
START_TEST(magnitudes_do_not_matter) {
    static const float powers[] = {1e-12f, 1e-3f, 1e4f, 1e12f};
    for (int i = 0; i < 4 * 4; i++) {
        kernel_test test;
        if (!open_device(&test, _i, "cpu:64"))
            return;
        kernel_test_clear_rows(&test);
        kernel_test_row(&test, KERN_ROW_PROMPT, 0, 130, 0);
        kernel_test_prepare(&test);
        problem p;
        make_problem(&p, &test, with_law(wide_shapes[0], i % 4 + 8 * (i / 4 % 2)), 0.9); // additive
        for (size_t t = 0; t < p.tokens * p.value_row; t++)
            p.v[t] *= powers[i / 4];
        for (size_t t = 0; t < p.tokens * p.key_row; t++)
            p.k[t] *= powers[3 - i / 4] * 7;
        run_forward(&p, false);
        check_forward(&p, 1e-6);
        kernel_test_close(&test);
    }
}
END_TEST

START_TEST(cut_on_the_grid_leaves_the_bits) {
    enum { LENGTH = 200 };
    for (int law = 0; law < LAWS; law += 3) {
        kernel_test test;
        if (!open_device(&test, _i, "cpu:64"))
            return;
        const size_t chunk = (size_t)kern_device_describe(test.device)->chunk;
        problem p;
        kernel_test_clear_rows(&test);
        kernel_test_row(&test, KERN_ROW_PROMPT, 0, LENGTH, 0);
        kernel_test_prepare(&test);
        make_problem(&p, &test, with_law(wide_shapes[law % WIDE_SHAPES], law), 0.9);
        memcpy(p.slots + 3 * p.state_size, p.slots, p.state_size * sizeof *p.slots);
        run_part(&p, KERN_ROW_PROMPT, 0, 0, 0, LENGTH);
        const float *o = kernel_test_copy(&test, p.o, p.tokens * p.output_row);
        for (size_t from = 0; from < LENGTH; from += chunk)
            run_part(&p, KERN_ROW_PROMPT, 3, (int64_t)from, from, from + chunk < LENGTH ? from + chunk : LENGTH);
        kernel_test_assert_same(p.o, o, p.tokens * p.output_row);
        kernel_test_assert_same(p.slots, p.slots + 3 * p.state_size, p.state_size);
        kernel_test_close(&test);
    }
}
END_TEST

// Nobody else's row changes the bits of a row, nor does how many there are.
START_TEST(row_among_prompts_keeps_its_bits) {
    enum { LENGTH = 70, OTHERS = 40 };
    for (int law = 2; law < LAWS; law += 3) {
        kernel_test test;
        if (!open_device(&test, _i, "cpu:64"))
            return;
        kernel_test_clear_rows(&test);
        for (int r = 0; r < OTHERS; r++)
            kernel_test_row(&test, KERN_ROW_PROMPT, r == 17 ? 1 : -1, r == 17 ? LENGTH : 1 + r % 5, 3);
        kernel_test_prepare(&test);
        const size_t first = (size_t)test.rows->row[17].token0;
        problem p;
        make_problem(&p, &test, with_law(wide_shapes[0], law), 0.9);
        memcpy(p.slots + 2 * p.state_size, p.slots + p.state_size, p.state_size * sizeof *p.slots);
        run_forward(&p, false);
        const float *o = kernel_test_copy(&test, p.o + first * p.output_row, LENGTH * p.output_row);
        run_part(&p, KERN_ROW_PROMPT, 2, 3, first, first + LENGTH);
        kernel_test_assert_same(p.o + first * p.output_row, o, LENGTH * p.output_row);
        kernel_test_assert_same(p.slots + p.state_size, p.slots + 2 * p.state_size, p.state_size);
        kernel_test_close(&test);
    }
}
END_TEST

static Suite *prompt_suite(void) {
    Suite *suite = suite_create("prompt");
    TCase *tcase = tcase_create("every device");
    tcase_set_timeout(tcase, 120);
    tcase_add_loop_test(tcase, odd_lengths_match_reference, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tcase, equal_tokens_match_reference, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tcase, magnitudes_do_not_matter, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tcase, cut_on_the_grid_leaves_the_bits, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tcase, row_among_prompts_keeps_its_bits, 0, KERNEL_TEST_DEVICES);
    suite_add_tcase(suite, tcase);
    return suite;
}

MESA_TEST_MAIN(prompt_suite)
