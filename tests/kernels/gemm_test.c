// SPDX-License-Identifier: Apache-2.0
// The small products of every instruction set against a plain loop: all forms, odd shapes, row distances beyond the
// width, and the promise that an element's bits do not depend on the shape around it.
#include "tests/kernels/kernel_test.h"

typedef void product(int m, int n, int k, const float *a, int64_t lda, const float *b, int64_t ldb, float *c,
                     int64_t ldc, int add);
typedef void transpose(int rows, int cols, const float *x, int64_t ldx, float *y, int64_t ldy);
typedef struct functions {
    product *nn, *tn, *nn_lower, *tn_lower, *lower_nn;
    transpose *turn;
} functions;

#define DECLARE(isa)                                                                      \
    product kern_cpu_gemm_nn_##isa, kern_cpu_gemm_tn_##isa, kern_cpu_gemm_nn_lower_##isa, \
        kern_cpu_gemm_tn_lower_##isa, kern_cpu_gemm_lower_nn_##isa;                       \
    transpose kern_cpu_gemm_transpose_##isa
#define FUNCTIONS(isa)                                                                                              \
    {                                                                                                               \
        kern_cpu_gemm_nn_##isa, kern_cpu_gemm_tn_##isa, kern_cpu_gemm_nn_lower_##isa, kern_cpu_gemm_tn_lower_##isa, \
            kern_cpu_gemm_lower_nn_##isa, kern_cpu_gemm_transpose_##isa                                             \
    }
DECLARE(portable);
#if defined(__x86_64__)
DECLARE(avx2);
DECLARE(avx512);
static const functions sets[KERNEL_TEST_ISAS] = {FUNCTIONS(portable), FUNCTIONS(avx2), FUNCTIONS(avx512)};
#else
static const functions sets[KERNEL_TEST_ISAS] = {FUNCTIONS(portable)};
#endif

enum { LDA = 71, LDB = 83, LDC = 96, SIZE = 100 * 100 };
enum { LOWER_A = 1, LOWER_C = 2, TURNED = 4 };

// C by a plain loop in double. form: LOWER_A zeroes what A holds above the diagonal, TURNED takes A as (k, m).
static void plain(int form, int m, int n, int k, const float *a, const float *b, const double *before, double *c) {
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) {
            double sum = before[i * LDC + j];
            for (int p = 0; p < k; p++)
                sum += (double)(form & TURNED ? a[p * LDA + i] : a[i * LDA + p]) * (double)b[p * LDB + j];
            c[i * LDC + j] = sum;
        }
}

static void compare(const float *got, const double *want, int m, int n, bool lower, const char *what) {
    for (int i = 0; i < m; i++)
        for (int j = 0; j < (lower && i + 1 < n ? i + 1 : n); j++)
            ck_assert_msg(fabs((double)got[i * LDC + j] - want[i * LDC + j]) < 1e-5, "%s (%d, %d) of (%d, %d)", what, i,
                          j, m, n);
}

START_TEST(every_form_matches_a_plain_loop) {
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        return;
    const functions *f = &sets[_i];
    const struct {
        product *run;
        int form;
        const char *name;
    } forms[] = {{f->nn, 0, "nn"},
                 {f->tn, TURNED, "tn"},
                 {f->nn_lower, LOWER_A, "nn_lower"},
                 {f->tn_lower, LOWER_A | TURNED, "tn_lower"},
                 {f->lower_nn, LOWER_C, "lower_nn"}};
    static const int shapes[][3] = {{1, 1, 1},    {1, 64, 64}, {6, 16, 3},  {7, 17, 5},   {13, 33, 13},
                                    {64, 64, 64}, {64, 80, 7}, {5, 95, 60}, {11, 48, 11}, {64, 60, 64}};
    for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++)
        for (int form = 0; form < 5; form++)
            for (int add = 0; add < 2; add++) {
                const int m = shapes[s][0], n = shapes[s][1];
                const int k = forms[form].form & LOWER_A ? m : shapes[s][2];
                float *a = kernel_test_floats(&test, SIZE, -1, 1), *b = kernel_test_floats(&test, SIZE, -1, 1);
                float *c = kernel_test_floats(&test, SIZE, -1, 1);
                double *want = kernel_test_zero_doubles(&test, SIZE), *before = kernel_test_zero_doubles(&test, SIZE);
                if (forms[form].form & LOWER_A) // both layouts keep (row, column) with column <= row
                    for (int i = 0; i < m; i++)
                        for (int p = i + 1; p < m; p++)
                            a[i * LDA + p] = 0;
                for (int i = 0; add && i < SIZE; i++)
                    before[i] = (double)c[i];
                plain(forms[form].form, m, n, k, a, b, before, want);
                forms[form].run(m, n, k, a, LDA, b, LDB, c, LDC, add);
                compare(c, want, m, n, forms[form].form & LOWER_C, forms[form].name);
            }
    kernel_test_close(&test);
}
END_TEST

START_TEST(bits_do_not_depend_on_the_shape) {
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        return;
    const functions *f = &sets[_i];
    float *a = kernel_test_floats(&test, SIZE, -1, 1), *b = kernel_test_floats(&test, SIZE, -1, 1);
    float *all = kernel_test_zero_floats(&test, SIZE), *part = kernel_test_zero_floats(&test, SIZE);
    f->nn(64, 95, 64, a, LDA, b, LDB, all, LDC, 0);
    for (int rows = 1; rows < 9; rows++)
        for (int i = 0; i + rows <= 64; i += 5) {
            f->nn(rows, 95 - i, 64, a + i * LDA, LDA, b, LDB, part, LDC, 0);
            for (int r = 0; r < rows; r++)
                kernel_test_assert_same(part + r * LDC, all + (i + r) * LDC, 95 - i);
        }
    kernel_test_close(&test);
}
END_TEST

START_TEST(transposes) {
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        return;
    float *x = kernel_test_floats(&test, SIZE, -1, 1), *y = kernel_test_zero_floats(&test, SIZE);
    for (int rows = 1; rows < 70; rows += 3)
        for (int cols = 1; cols < 70; cols += 5) {
            sets[_i].turn(rows, cols, x, LDA, y, LDB);
            for (int i = 0; i < rows; i++)
                for (int j = 0; j < cols; j++)
                    ck_assert_float_eq(y[j * LDB + i], x[i * LDA + j]);
        }
    kernel_test_close(&test);
}
END_TEST

static Suite *gemm_suite(void) {
    Suite *suite = suite_create("gemm");
    TCase *tcase = tcase_create("every instruction set");
    tcase_add_loop_test(tcase, every_form_matches_a_plain_loop, 0, KERNEL_TEST_ISAS);
    tcase_add_loop_test(tcase, bits_do_not_depend_on_the_shape, 0, KERNEL_TEST_ISAS);
    tcase_add_loop_test(tcase, transposes, 0, KERNEL_TEST_ISAS);
    suite_add_tcase(suite, tcase);
    return suite;
}

MESA_TEST_MAIN(gemm_suite)
