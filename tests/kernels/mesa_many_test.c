// SPDX-License-Identifier: Apache-2.0
// Mesa where a device may go another way: steps of many sessions, states in bf16. Elsewhere the first are few and the
// second refused, which is tested too.
#include "tests/kernels/mesa_problem.h"

static const kern_solver solvers[] = {{KERN_SOLVE_TOLERANCE, 30, 1e-4f}, {KERN_SOLVE_EXACT, 0, 0},
                                      {KERN_SOLVE_STEPS, 10, 0},         {KERN_SOLVE_FIXED, 9, 0},
                                      {KERN_SOLVE_STEPS, 0, 0},          {KERN_SOLVE_TOLERANCE, 2, 1e-6f}};
enum { SOLVERS = sizeof solvers / sizeof solvers[0], MANY = 64 };

// A row's solver is its own: those of neighbours differ.
static kern_solver solver_of(int row) {
    return solvers[row % SOLVERS];
}
static int slot_of(int row) {
    return row % 8 == 1 ? -1 : (row * 27 + 5) % MANY;
}

// One token of MANY rows at once, then of some of them alone.
static void run_many(kernel_test *test, int heads, int width, kern_storage storage) {
    static const int looked_at[] = {0, 1, 2, 3, 17, 40, 63};
    kernel_test_clear_rows(test);
    for (int r = 0; r < MANY; r++)
        kernel_test_row(test, KERN_ROW_GENERATED, slot_of(r), 1, 100 + 7 * r);
    kernel_test_prepare(test);
    problem p;
    make_problem(&p, test, heads, width, width, 0.8);
    p.mesa.storage = storage;
    make_slots(&p, MANY);
    fill_slots(&p);
    for (int r = 0; r < MANY; r++)
        test->rows->row[r].solver = solver_of(r);
    launch(&p, arguments(&p, false));
    const size_t row_size = (size_t)(heads * width);
    const float *o = kernel_test_copy(test, p.o, p.value_size), *x = kernel_test_copy(test, p.x, p.key_size);
    const float *slots = kernel_test_copy(test, p.slots, MANY * p.slot_size);
    kern_solve_report *report = kernel_test_bytes(test, (size_t)(MANY * heads) * sizeof *report);
    memcpy(report, p.report, (size_t)(MANY * heads) * sizeof *report);
    for (size_t i = 0; i < sizeof looked_at / sizeof looked_at[0]; i++) {
        const int r = looked_at[i], slot = slot_of(r);
        const size_t at = (size_t)r * row_size;
        memcpy(p.slots, p.slots_before, MANY * p.slot_size * sizeof *p.slots);
        run_part(&p, KERN_ROW_GENERATED, slot, 100 + 6 * r, r, r + 1, solver_of(r), false);
        kernel_test_assert_same(p.o + at, o + at, row_size);
        kernel_test_assert_same(p.x + at, x + at, row_size);
        ck_assert_mem_eq(p.report + r * heads, report + r * heads, (size_t)heads * sizeof *report);
        if (slot >= 0)
            kernel_test_assert_same(p.slots + (size_t)slot * p.slot_size, slots + (size_t)slot * p.slot_size,
                                    p.slot_size);
    }
}

// On a GPU more heads than it has at once; elsewhere a few.
static int many_heads(const kernel_test *test, int width) {
    return !test->cuda ? 1 : width == 64 ? 18 : 5;
}

START_TEST(row_of_many_equals_row_alone) {
    for (int width = 64; width <= 128; width += 64) {
        kernel_test test;
        if (!kernel_test_open(&test, _i, "cpu"))
            return;
        run_many(&test, many_heads(&test, width), width, KERN_STORE_F32);
        kernel_test_close(&test);
    }
}
END_TEST

START_TEST(many_rows_match_reference) {
    const kern_solver solver = {KERN_SOLVE_TOLERANCE, 200, 1e-6f};
    for (int width = 64; width <= 128; width += 64) {
        kernel_test test;
        if (!kernel_test_open(&test, _i, "cpu"))
            return;
        kernel_test_clear_rows(&test);
        for (int r = 0; r < MANY; r++)
            kernel_test_row(&test, KERN_ROW_GENERATED, slot_of(r), 1, 100 + 7 * r);
        kernel_test_prepare(&test);
        problem p;
        make_problem(&p, &test, many_heads(&test, width), width, width, 0.8);
        make_slots(&p, MANY);
        fill_slots(&p);
        run_forward(&p, solver, false);
        check_forward(&p, solver, (tolerances){1e-5, 1e-5, 1e-6, 1e-6});
        kernel_test_close(&test);
    }
}
END_TEST

// ------------------------------------------------------------------------------------------------- states in bf16

// A CUDA device, which has them; the others refuse them.
static bool open_for_bf16(kernel_test *test, int device) {
    if (!kernel_test_open(test, device, "cpu"))
        return false;
    if (test->cuda)
        return true;
    sequence_mixed_rows(test);
    problem p;
    make_problem(&p, test, 1, 8, 8, 0.9);
    p.mesa.storage = KERN_STORE_BF16;
    const kern_mesa_args args = arguments(&p, false);
    kernel_test_assert_refused(test, KERN_OP_MESA, &args, KERN_UNSUPPORTED);
    kernel_test_close(test);
    return false;
}

static const struct { int heads, depth, width; } shapes[] = {{2, 64, 64}, {3, 5, 7}, {3, 24, 40}, {2, 128, 128}};
enum { SHAPES = sizeof shapes / sizeof shapes[0] };

START_TEST(bf16_states_match_reference) {
    static const kern_solver exact[] = {{KERN_SOLVE_TOLERANCE, 200, 1e-6f}, {KERN_SOLVE_EXACT, 0, 0}};
    for (int i = 0; i < 2 * SHAPES; i++) {
        kernel_test test;
        if (!open_for_bf16(&test, _i))
            return;
        kernel_test_clear_rows(&test);
        kernel_test_row(&test, KERN_ROW_GENERATED, 0, 1, 7);
        kernel_test_row(&test, KERN_ROW_GENERATED, 3, 5, 100);
        kernel_test_row(&test, KERN_ROW_PROMPT, 1, 9, 64);
        kernel_test_boundary(&test, 4);
        kernel_test_row(&test, KERN_ROW_PROMPT, -1, 6, 0);
        kernel_test_prepare(&test);
        problem p;
        make_problem(&p, &test, shapes[i / 2].heads, shapes[i / 2].depth, shapes[i / 2].width, 0.8);
        p.mesa.storage = KERN_STORE_BF16;
        fill_slots(&p);
        run_forward(&p, exact[i % 2], false);
        check_forward(&p, exact[i % 2], (tolerances){1e-2, 1e-5, 1e-2, 1e-6});
        kernel_test_close(&test);
    }
}
END_TEST

START_TEST(bf16_row_of_many_equals_row_alone) {
    for (int width = 64; width <= 128; width += 64) {
        kernel_test test;
        if (!open_for_bf16(&test, _i))
            return;
        run_many(&test, many_heads(&test, width), width, KERN_STORE_BF16);
        kernel_test_close(&test);
    }
}
END_TEST

START_TEST(bf16_cut_anywhere_leaves_the_same_bits) {
    enum { LENGTH = 20, CUT = 7 };
    const kern_solver solver = {KERN_SOLVE_TOLERANCE, 30, 1e-4f};
    for (int shape = 0; shape < SHAPES; shape++) {
        kernel_test test;
        if (!open_for_bf16(&test, _i))
            return;
        kernel_test_clear_rows(&test);
        kernel_test_row(&test, KERN_ROW_PROMPT, 0, LENGTH, 5);
        kernel_test_prepare(&test);
        problem p;
        make_problem(&p, &test, shapes[shape].heads, shapes[shape].depth, shapes[shape].width, 0.9);
        p.mesa.storage = KERN_STORE_BF16;
        fill_slots(&p);
        memcpy(p.slots + 3 * p.slot_size, p.slots, p.slot_size * sizeof *p.slots);
        run_part(&p, KERN_ROW_PROMPT, 0, 5, 0, LENGTH, solver, false);
        const float *o = kernel_test_copy(&test, p.o, p.value_size);
        run_part(&p, KERN_ROW_PROMPT, 3, 5, 0, CUT, solver, false);
        for (int t = CUT; t < LENGTH; t++)
            run_part(&p, KERN_ROW_GENERATED, 3, 5, t, t + 1, solver, false);
        kernel_test_assert_same(p.o, o, p.value_size);
        kernel_test_assert_same(p.slots, p.slots + 3 * p.slot_size, p.slot_size);
        kernel_test_close(&test);
    }
}
END_TEST

static Suite *mesa_many_suite(void) {
    Suite *suite = suite_create("mesa, many");
    TCase *tcase = tcase_create("every device");
    tcase_set_timeout(tcase, 120);
    tcase_add_loop_test(tcase, row_of_many_equals_row_alone, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tcase, many_rows_match_reference, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tcase, bf16_states_match_reference, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tcase, bf16_row_of_many_equals_row_alone, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tcase, bf16_cut_anywhere_leaves_the_same_bits, 0, KERNEL_TEST_DEVICES);
    suite_add_tcase(suite, tcase);
    return suite;
}

MESA_TEST_MAIN(mesa_many_suite)
