// SPDX-License-Identifier: Apache-2.0
// Prompt rows of Mesa layers in the widths that devices have chunk kernels of their own for: every solver mode at odd
// lengths and places of the grid, tokens that are all the same, gates at their limits, cuts on the grid, symmetry.
//
// The reference works in double, token by token. The chunk of the device decides where a cut leaves the bits alone.
#include "tests/kernels/mesa_problem.h"

static const int widths[] = {64, 128};

static bool open_prompts(kernel_test *test, int device) {
    kernel_test_threads(1);
    return kernel_test_open(test, device, "cpu:64");
}

static void odd_rows(kernel_test *test) {
    kernel_test_clear_rows(test);
    kernel_test_row(test, KERN_ROW_PROMPT, -1, 1, 0);
    kernel_test_row(test, KERN_ROW_PROMPT, 0, 2, 63);
    kernel_test_row(test, KERN_ROW_PROMPT, -1, 17, 50);
    kernel_test_row(test, KERN_ROW_PROMPT, 1, 64, 64);
    kernel_test_row(test, KERN_ROW_PROMPT, 2, 65, 0);
    kernel_test_row(test, KERN_ROW_PROMPT, 3, 70, 31);
    kernel_test_boundary(test, 5);
    kernel_test_boundary(test, 33);
    kernel_test_prepare(test);
}

START_TEST(odd_lengths_match_reference) {
    static const struct {
        kern_solver solver;
        double tolerance;
    } modes[] = {{{KERN_SOLVE_TOLERANCE, 200, 1e-6f}, 1e-5},
                 {{KERN_SOLVE_STEPS, 6, 0}, 1e-5},
                 {{KERN_SOLVE_STEPS, 0, 0}, 2e-6},
                 {{KERN_SOLVE_FIXED, 10, 0}, 1e-5},
                 {{KERN_SOLVE_EXACT, 0, 0}, 2e-6}};
    for (int i = 0; i < 2; i++) {
        kernel_test test;
        if (!open_prompts(&test, _i))
            return;
        odd_rows(&test);
        problem p;
        make_problem(&p, &test, 2, widths[i], widths[i], 0.9);
        fill_slots(&p);
        for (size_t m = 0; m < sizeof modes / sizeof modes[0]; m++) {
            memcpy(p.slots, p.slots_before, SLOTS * p.slot_size * sizeof(float));
            run_forward(&p, modes[m].solver, false);
            check_forward(&p, modes[m].solver, (tolerances){modes[m].tolerance, modes[m].tolerance, 1e-6, 1e-6});
        }
        kernel_test_close(&test);
    }
}
END_TEST

// What a tolerance promises: x within a few times it of the exact solution, whatever the precision of the steps.
START_TEST(loose_tolerances_hold) {
    static const float tolerance[] = {1e-1f, 1e-2f, 4e-3f, 3e-3f, 1e-3f, 1e-4f};
    kernel_test test;
    if (!open_prompts(&test, _i))
        return;
    odd_rows(&test);
    problem p;
    make_problem(&p, &test, 1, 128, 128, 0.99);
    fill_slots(&p);
    for (size_t i = 0; i < sizeof tolerance / sizeof tolerance[0]; i++) {
        memcpy(p.slots, p.slots_before, SLOTS * p.slot_size * sizeof(float));
        run_forward(&p, (kern_solver){KERN_SOLVE_TOLERANCE, 60, tolerance[i]}, false);
        const double allowed = 5 * (double)tolerance[i];
        check_forward(&p, (kern_solver){KERN_SOLVE_EXACT, 0, 0}, (tolerances){allowed, allowed, 1e-6, 1e-6});
        for (size_t t = 0; t < p.tokens; t++)
            ck_assert_int_eq(p.report[t].flags, 0);
    }
    kernel_test_close(&test);
}
END_TEST

// Rows of one token over and over: nothing decays and everything is written; nothing is written; all decays at once.
START_TEST(equal_tokens_and_gates_at_their_limits) {
    static const float betas[] = {1, 0, 1}, decays[] = {0, 0, -200};
    enum { LENGTH = 66 };
    for (int i = 0; i < 2; i++) {
        kernel_test test;
        if (!open_prompts(&test, _i))
            return;
        kernel_test_clear_rows(&test);
        for (int slot = 0; slot < 3; slot++)
            kernel_test_row(&test, KERN_ROW_PROMPT, slot, LENGTH, 0);
        kernel_test_prepare(&test);
        problem p;
        make_problem(&p, &test, 1, widths[i], widths[i], 0.9);
        fill_slots(&p);
        const size_t width = (size_t)widths[i];
        for (size_t t = 0; t < p.tokens; t++) {
            memcpy(p.q + t * width, p.q, width * sizeof(float));
            memcpy(p.k + t * width, p.k, width * sizeof(float));
            memcpy(p.v + t * width, p.v, width * sizeof(float));
            p.beta[t] = betas[t / LENGTH];
            p.g[t] = decays[t / LENGTH];
        }
        const kern_solver solver = {KERN_SOLVE_TOLERANCE, 200, 1e-6f};
        run_forward(&p, solver, false);
        check_forward(&p, (kern_solver){KERN_SOLVE_EXACT, 0, 0}, (tolerances){3e-5, 3e-5, 1e-6, 1e-6});
        kernel_test_close(&test);
    }
}
END_TEST

START_TEST(cut_on_the_grid_leaves_the_bits) {
    enum { LENGTH = 150, WIDTH = 64 };
    kernel_test test;
    if (!open_prompts(&test, _i))
        return;
    const int chunk = kern_device_describe(test.device)->chunk;
    const kern_solver solver = {KERN_SOLVE_TOLERANCE, 30, 1e-4f};
    problem p;
    kernel_test_clear_rows(&test);
    kernel_test_row(&test, KERN_ROW_PROMPT, 0, LENGTH, 0);
    kernel_test_prepare(&test);
    make_problem(&p, &test, 2, WIDTH, WIDTH, 0.9);
    run_part(&p, KERN_ROW_PROMPT, 0, 0, 0, LENGTH, solver, false);
    const float *o = kernel_test_copy(&test, p.o, p.value_size), *x = kernel_test_copy(&test, p.x, p.key_size);
    for (int from = 0; from < LENGTH; from += chunk)
        run_part(&p, KERN_ROW_PROMPT, 3, 0, from, from + chunk < LENGTH ? from + chunk : LENGTH, solver, false);
    kernel_test_assert_same(p.o, o, p.value_size);
    kernel_test_assert_same(p.x, x, p.key_size);
    kernel_test_assert_same(p.slots, p.slots + 3 * p.slot_size, p.slot_size);
    for (int i = 0; i < WIDTH; i++)
        for (int j = 0; j < i; j++)
            ck_assert_float_eq(p.slots[i * WIDTH + j], p.slots[j * WIDTH + i]);
    kernel_test_close(&test);
}
END_TEST

// Numbers of 11 bits, as training in bf16 has them: what they allow, and Hk as symmetric as ever.
START_TEST(fast_rows_match_reference) {
    static const kern_solver solvers[] = {
        {KERN_SOLVE_TOLERANCE, 60, 1e-3f}, {KERN_SOLVE_STEPS, 6, 0}, {KERN_SOLVE_FIXED, 10, 0}};
    for (int i = 0; i < 2; i++) {
        kernel_test test;
        if (!kernel_test_open_fast(&test))
            return;
        odd_rows(&test);
        problem p;
        make_problem(&p, &test, 2, widths[i], widths[i], 0.9);
        fill_slots(&p);
        for (size_t m = 0; m < sizeof solvers / sizeof solvers[0]; m++) {
            memcpy(p.slots, p.slots_before, SLOTS * p.slot_size * sizeof(float));
            run_forward(&p, solvers[m], false);
            check_forward(&p, solvers[m], (tolerances){2e-3, 2e-3, 5e-4, 5e-4});
        }
        const int width = widths[i];
        for (int row = 0; row < width; row++)
            for (int column = 0; column < row; column++)
                ck_assert_float_eq(p.slots[row * width + column], p.slots[column * width + row]);
        kernel_test_close(&test);
    }
}
END_TEST

static Suite *mesa_prompt_suite(void) {
    Suite *suite = suite_create("mesa prompt");
    TCase *tcase = tcase_create("every device");
    tcase_set_timeout(tcase, 120);
    tcase_add_loop_test(tcase, odd_lengths_match_reference, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tcase, loose_tolerances_hold, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tcase, equal_tokens_and_gates_at_their_limits, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tcase, cut_on_the_grid_leaves_the_bits, 0, KERNEL_TEST_DEVICES);
    tcase_add_test(tcase, fast_rows_match_reference);
    suite_add_tcase(suite, tcase);
    return suite;
}

MESA_TEST_MAIN(mesa_prompt_suite)
