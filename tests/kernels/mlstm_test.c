// SPDX-License-Identifier: Apache-2.0
// mLSTM's gates and the normaliser against their references; the whole cell against one that is not stabilised.
//
// The whole cell is gates, recurrence and normaliser with their backward: m cancels out of it, so its gradients are
// compared with differences of the plain formula in double.
#include "kernels/ref/activation.h"
#include "kernels/ref/maxplus_gates.h"
#include "tests/kernels/sequence_test.h"

enum { SLOTS = 4, STATE0 = 16 };

typedef struct gate_data {
    int32_t heads;
    size_t count, stride; // floats of an operand, of a slot
    float *input, *forget, *g, *beta, *m, *state;
} gate_data;

static gate_data make_gates(kernel_test *test, int32_t heads) {
    gate_data d = {.heads = heads, .stride = STATE0 + 16 * ((size_t)heads / 16 + 2)};
    d.count = (size_t)test->rows->n_tokens * (size_t)heads;
    d.input = kernel_test_floats(test, d.count, -30, 20);
    d.forget = kernel_test_floats(test, d.count, -8, 12);
    d.g = kernel_test_zero_floats(test, d.count);
    d.beta = kernel_test_zero_floats(test, d.count);
    d.m = kernel_test_zero_floats(test, d.count);
    d.state = kernel_test_floats(test, SLOTS * d.stride, -3, 3);
    test->rows->slot_stride = d.stride * sizeof(float);
    return d;
}

static kern_maxplus_gates_args gate_args(const gate_data *d, float cap) {
    return (kern_maxplus_gates_args){{d->input}, {d->forget}, {d->state + STATE0}, {d->g}, {d->beta}, {d->m},
                                     d->heads,   cap};
}

typedef struct gate_wanted {
    double *g, *beta, *m, *state;
} gate_wanted;

// One head of one row, document by document.
static void reference_head(kernel_test *test, const gate_data *d, const kern_row *row, int head, double cap,
                           gate_wanted want) {
    const size_t length = (size_t)row->length, heads = (size_t)d->heads;
    double *piece = kernel_test_zero_doubles(test, 5 * length), *slot = NULL, before = 0;
    unsigned char *begins = sequence_begins(test, row);
    for (size_t t = 0; t < length; t++) {
        size_t at = ((size_t)row->token0 + t) * heads + (size_t)head;
        piece[t] = (double)d->input[at];
        piece[length + t] = (double)d->forget[at];
    }
    if (row->slot >= 0)
        slot = &want.state[(size_t)row->slot * d->stride + STATE0 + (size_t)head], before = *slot;
    for (size_t first = 0, end; first < length; first = end) {
        for (end = first + 1; end < length && !begins[end];)
            end++;
        before = kern_ref_maxplus_gates(piece + first, piece + length + first, cap, first > 0 ? 0 : before,
                                        piece + 2 * length + first, piece + 3 * length + first,
                                        piece + 4 * length + first, end - first);
    }
    if (slot)
        *slot = before;
    for (size_t t = 0; t < length; t++) {
        size_t at = ((size_t)row->token0 + t) * heads + (size_t)head;
        want.g[at] = piece[2 * length + t], want.beta[at] = piece[3 * length + t], want.m[at] = piece[4 * length + t];
    }
}

static void check_gates(kernel_test *test, int32_t heads, float cap) {
    sequence_mixed_rows(test);
    gate_data d = make_gates(test, heads);
    gate_wanted want = {kernel_test_zero_doubles(test, d.count), kernel_test_zero_doubles(test, d.count),
                        kernel_test_zero_doubles(test, d.count), kernel_test_widened(test, d.state, SLOTS * d.stride)};
    for (int32_t r = 0; r < test->rows->n_rows; r++)
        for (int32_t h = 0; h < heads; h++)
            reference_head(test, &d, &test->rows->row[r], h, (double)cap, want);
    kern_maxplus_gates_args args = gate_args(&d, cap);
    kernel_test_launch(test, KERN_OP_MAXPLUS_GATES, &args);
    kernel_test_assert_norm(d.g, want.g, d.count, 1e-6);
    kernel_test_assert_norm(d.beta, want.beta, d.count, 2e-6);
    kernel_test_assert_norm(d.m, want.m, d.count, 1e-6);
    kernel_test_assert_norm(d.state, want.state, SLOTS * d.stride, 1e-6);
    for (size_t i = 0; i < d.count; i++)
        ck_assert_msg(d.g[i] == 0 || d.beta[i] == 1, "neither term of the maximum is its own: %g %g", (double)d.g[i],
                      (double)d.beta[i]);
    float *dg = kernel_test_floats(test, d.count, -1, 1), *dbeta = kernel_test_floats(test, d.count, -1, 1);
    double *dinput = kernel_test_zero_doubles(test, d.count), *dforget = kernel_test_zero_doubles(test, d.count);
    for (size_t i = 0; i < d.count; i++)
        kern_ref_maxplus_gates_backward((double)d.input[i], (double)d.forget[i], (double)cap, (double)d.beta[i],
                                        (double)dg[i], (double)dbeta[i], &dinput[i], &dforget[i]);
    kern_maxplus_gates_backward_args backward = {{d.input}, {d.forget}, {d.beta}, {dg}, {dbeta},
                                                 {dbeta},   {dg},       heads,    cap}; // in place
    kernel_test_launch(test, KERN_OP_MAXPLUS_GATES_BACKWARD, &backward);
    kernel_test_assert_norm(dbeta, dinput, d.count, 2e-6);
    kernel_test_assert_norm(dg, dforget, d.count, 2e-6);
}

START_TEST(gates_equal_reference) {
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu:16"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    check_gates(&test, 1, 15);
    check_gates(&test, 8, 15);
    check_gates(&test, 37, 0);
    kernel_test_close(&test);
}
END_TEST

// One row in one launch and cut anywhere, as prompt or generated, among other rows and alone.
START_TEST(cuts_and_neighbours_change_nothing) {
    enum { LENGTH = 50, AT = 5, H = 5 };
    static const int32_t cut[] = {1, 1, 2, 3, 16, 27};
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    kernel_test_clear_rows(&test);
    kernel_test_row(&test, KERN_ROW_GENERATED, 2, AT, 9);
    kernel_test_row(&test, KERN_ROW_PROMPT, 0, LENGTH, 3);
    kernel_test_prepare(&test);
    gate_data d = make_gates(&test, H);
    float *state = kernel_test_copy(&test, d.state, SLOTS * d.stride);
    kern_maxplus_gates_args args = gate_args(&d, 15);
    kernel_test_launch(&test, KERN_OP_MAXPLUS_GATES, &args);
    gate_data p = make_gates(&test, H);
    int32_t done = 0;
    for (size_t i = 0; i < sizeof cut / sizeof cut[0]; i++) {
        kernel_test_clear_rows(&test);
        kernel_test_row(&test, i % 2 ? KERN_ROW_PROMPT : KERN_ROW_GENERATED, 0, cut[i], 3 + done);
        kernel_test_prepare(&test);
        kern_maxplus_gates_args piece = {{d.input + (AT + done) * H},
                                         {d.forget + (AT + done) * H},
                                         {state + STATE0},
                                         {p.g + (AT + done) * H},
                                         {p.beta + (AT + done) * H},
                                         {p.m + (AT + done) * H},
                                         H,
                                         15};
        kernel_test_launch(&test, KERN_OP_MAXPLUS_GATES, &piece);
        done += cut[i];
    }
    kernel_test_assert_same(d.g + AT * H, p.g + AT * H, LENGTH * H);
    kernel_test_assert_same(d.beta + AT * H, p.beta + AT * H, LENGTH * H);
    kernel_test_assert_same(d.m + AT * H, p.m + AT * H, LENGTH * H);
    kernel_test_assert_same(d.state, state, d.stride); // slot 0
    kernel_test_close(&test);
}
END_TEST

// --------------------------------------------------------------------------------------------------------- normaliser

static void check_normalise(kernel_test *test, int32_t tokens, int32_t heads, int32_t width, bool stabilised) {
    const size_t vectors = (size_t)tokens * (size_t)heads, w = (size_t)width, count = vectors * w;
    float *o = kernel_test_floats(test, vectors * (w + 1), -2, 2), *dh = kernel_test_floats(test, count, -1, 1);
    float *m = stabilised ? kernel_test_floats(test, vectors, -1, 2) : NULL;
    float *h = kernel_test_zero_floats(test, count), *d_o = kernel_test_zero_floats(test, vectors * (w + 1));
    for (size_t i = 0; !m && i < vectors; i++)
        o[i * (w + 1) + w] = fabsf(o[i * (w + 1) + w]) + 0.1f;
    double *wide_o = kernel_test_widened(test, o, vectors * (w + 1)), *wide_dh = kernel_test_widened(test, dh, count);
    double *h_want = kernel_test_zero_doubles(test, count), eps = (double)1e-3f;
    double *d_want = kernel_test_zero_doubles(test, vectors * (w + 1));
    for (size_t i = 0; i < vectors; i++) {
        double floor = m ? (double)m[i] : 0;
        kern_ref_normalise(wide_o + i * (w + 1), m ? &floor : NULL, eps, h_want + i * w, w);
        kern_ref_normalise_backward(wide_o + i * (w + 1), m ? &floor : NULL, eps, wide_dh + i * w, d_want + i * (w + 1),
                                    w);
    }
    kernel_test_clear_rows(test);
    kernel_test_row(test, KERN_ROW_PROMPT, -1, tokens, 0);
    kernel_test_prepare(test);
    kern_normalise_args forward = {{o}, {m}, {h}, heads, width, 1e-3f};
    kern_normalise_backward_args backward = {{o}, {m}, {dh}, {d_o}, heads, width, 1e-3f};
    kernel_test_launch(test, KERN_OP_NORMALISE, &forward);
    kernel_test_assert_norm(h, h_want, count, 5e-7);
    kernel_test_launch(test, KERN_OP_NORMALISE_BACKWARD, &backward);
    kernel_test_assert_norm(d_o, d_want, vectors * (w + 1), 1e-6);
}

START_TEST(normaliser_equals_reference) {
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    for (int stabilised = 0; stabilised < 2; stabilised++) {
        check_normalise(&test, 1, 1, 1, stabilised);
        check_normalise(&test, 5, 3, 37, stabilised);
        check_normalise(&test, 130, 8, 64, stabilised);
    }
    kernel_test_close(&test);
}
END_TEST

// ----------------------------------------------------------------------------------------------------- the whole cell

enum { T = 70, H = 2, D = 5, V = 3, BOUNDARY = 33 };
typedef struct cell {
    double q[T * H * D], k[T * H * D], v[T * H * V], input[T * H], forget[T * H], dh[T * H * V];
} cell;

// The plain cell: C = f C + i k v^T, n = f n + i k, h = C^T q / max(|n . q|, 1); gates without stabiliser.
static double cell_loss(void *context) {
    const cell *c = context;
    double loss = 0;
    for (int h = 0; h < H; h++) {
        double state[D][V + 1] = {{0}};
        for (int t = 0; t < T; t++) {
            const double i = exp(kern_ref_soft_cap(c->input[t * H + h], 15));
            const double f = t == BOUNDARY ? 0 : kern_ref_sigmoid(kern_ref_soft_cap(c->forget[t * H + h], 15));
            double o[V + 1] = {0};
            for (int a = 0; a < D; a++)
                for (int b = 0; b <= V; b++) {
                    double v = b < V ? c->v[(t * H + h) * V + b] : 1;
                    state[a][b] = f * state[a][b] + i * c->k[(t * H + h) * D + a] * v;
                    o[b] += state[a][b] * c->q[(t * H + h) * D + a] / sqrt(D);
                }
            for (int b = 0; b < V; b++)
                loss += c->dh[(t * H + h) * V + b] * o[b] / fmax(fabs(o[V]), 1);
        }
    }
    return loss;
}

typedef struct cell_floats {
    float *q, *k, *v, *g, *beta, *m, *o, *h, *snapshots, *input, *forget, *dh; // v with a column of ones
    float *dq, *dk, *dv, *dg, *dbeta, *d_o;
} cell_floats;

static float *narrowed(kernel_test *test, const double *x, size_t count) {
    float *y = kernel_test_zero_floats(test, count);
    for (size_t i = 0; i < count; i++)
        y[i] = (float)x[i];
    return y;
}

static cell_floats run_cell(kernel_test *test, const cell *c) {
    cell_floats f = {.q = narrowed(test, c->q, T * H * D),
                     .k = narrowed(test, c->k, T * H * D),
                     .v = kernel_test_zero_floats(test, T * H * (V + 1)),
                     .input = narrowed(test, c->input, T * H),
                     .forget = narrowed(test, c->forget, T * H),
                     .dh = narrowed(test, c->dh, T * H * V)};
    float **made[] = {&f.g, &f.beta, &f.m, &f.o, &f.h, &f.snapshots, &f.dq, &f.dk, &f.dv, &f.dg, &f.dbeta, &f.d_o};
    for (size_t i = 0; i < sizeof made / sizeof *made; i++)
        *made[i] = kernel_test_zero_floats(test, T * H * D * (V + 1));
    for (int i = 0; i < T * H; i++)
        for (int b = 0; b <= V; b++)
            f.v[i * (V + 1) + b] = b < V ? (float)c->v[i * V + b] : 1;
    const kern_recurrence family = {.decay = KERN_DECAY_SCALAR,
                                    .update = KERN_UPDATE_ADD,
                                    .weighted = 1,
                                    .heads = H,
                                    .key_heads = H,
                                    .key_width = D,
                                    .value_width = V + 1,
                                    .scale = (float)(1 / sqrt(D))};
    kern_maxplus_gates_args gates = {{f.input}, {f.forget}, {NULL}, {f.g}, {f.beta}, {f.m}, H, 15};
    kern_recurrence_args core = {.q.f = f.q,
                                 .k.f = f.k,
                                 .v.f = f.v,
                                 .g.f = f.g,
                                 .beta.f = f.beta,
                                 .o.f = f.o,
                                 .snapshots.f = f.snapshots,
                                 .family = family};
    kern_normalise_args division = {{f.o}, {f.m}, {f.h}, H, V, 0};
    kern_normalise_backward_args d_division = {{f.o}, {f.m}, {f.dh}, {f.d_o}, H, V, 0};
    kern_recurrence_backward_args d_core = {.q.f = f.q,
                                            .k.f = f.k,
                                            .v.f = f.v,
                                            .g.f = f.g,
                                            .beta.f = f.beta,
                                            .snapshots.f = f.snapshots,
                                            .d_o.f = f.d_o,
                                            .dq.f = f.dq,
                                            .dk.f = f.dk,
                                            .dv.f = f.dv,
                                            .dg.f = f.dg,
                                            .dbeta.f = f.dbeta,
                                            .family = family};
    kern_maxplus_gates_backward_args d_gates = {{f.input}, {f.forget}, {f.beta}, {f.dg}, {f.dbeta},
                                                {f.dbeta}, {f.dg},     H,        15};
    kernel_test_launch(test, KERN_OP_MAXPLUS_GATES, &gates);
    kernel_test_launch(test, KERN_OP_RECURRENCE, &core);
    kernel_test_launch(test, KERN_OP_NORMALISE, &division);
    kernel_test_launch(test, KERN_OP_NORMALISE_BACKWARD, &d_division);
    kernel_test_launch(test, KERN_OP_RECURRENCE_BACKWARD, &d_core);
    kernel_test_launch(test, KERN_OP_MAXPLUS_GATES_BACKWARD, &d_gates);
    return f;
}

START_TEST(cell_equals_the_plain_formula) {
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu:16"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    kernel_test_clear_rows(&test);
    kernel_test_row(&test, KERN_ROW_PROMPT, -1, T, 0);
    kernel_test_boundary(&test, BOUNDARY);
    kernel_test_prepare(&test);
    cell *c = kernel_test_bytes(&test, sizeof *c);
    double *value = (double *)c;
    for (size_t i = 0; i < sizeof *c / sizeof *value; i++)
        value[i] = (double)(float)(2 * kernel_test_uniform(&test) - 1);
    for (int i = 0; i < T * H; i++)
        c->input[i] = (double)(float)(4 * c->input[i] - 1), c->forget[i] = (double)(float)(3 * c->forget[i] + 2);
    cell_floats f = run_cell(&test, c);
    double loss = 0, want = cell_loss(c);
    for (int i = 0; i < T * H * V; i++)
        loss += (double)f.h[i] * c->dh[i];
    ck_assert_msg(fabs(loss - want) <= 1e-5 * fabs(want), "loss %.9g, not %.9g", loss, want);
    kernel_test_gradient("q", cell_loss, c, c->q, kernel_test_widened(&test, f.dq, T * H * D), T * H * D, 1e-4);
    kernel_test_gradient("k", cell_loss, c, c->k, kernel_test_widened(&test, f.dk, T * H * D), T * H * D, 1e-4);
    kernel_test_gradient("input", cell_loss, c, c->input, kernel_test_widened(&test, f.dbeta, T * H), T * H, 1e-4);
    kernel_test_gradient("forget", cell_loss, c, c->forget, kernel_test_widened(&test, f.dg, T * H), T * H, 1e-4);
    double dv[T * H * V];
    for (int i = 0; i < T * H * V; i++)
        dv[i] = (double)f.dv[i / V * (V + 1) + i % V];
    kernel_test_gradient("v", cell_loss, c, c->v, dv, T * H * V, 1e-4);
    kernel_test_close(&test);
}
END_TEST

START_TEST(shapes_are_checked) {
    kernel_test test;
    float place[4] = {0}, other[4];
    ck_assert(kernel_test_open(&test, 0, "cpu"));
    kern_maxplus_gates_args gates = {{place}, {place}, {NULL}, {place}, {place}, {place}, 0, 15};
    kernel_test_assert_refused(&test, KERN_OP_MAXPLUS_GATES, &gates, KERN_INVALID);
    gates.heads = 1, gates.soft_cap = -1;
    kernel_test_assert_refused(&test, KERN_OP_MAXPLUS_GATES, &gates, KERN_INVALID);
    kern_maxplus_gates_backward_args backward = {{place}, {place}, {NULL}, {other}, {other}, {other}, {place}, 1, 0};
    kernel_test_assert_refused(&test, KERN_OP_MAXPLUS_GATES_BACKWARD, &backward, KERN_INVALID);
    kern_normalise_args division = {{place}, {NULL}, {place}, 1, 1, 0}; // h is o
    kernel_test_assert_refused(&test, KERN_OP_NORMALISE, &division, KERN_INVALID);
    division.h.f = other, division.eps = NAN;
    kernel_test_assert_refused(&test, KERN_OP_NORMALISE, &division, KERN_INVALID);
    kern_normalise_backward_args d_division = {{place}, {NULL}, {other}, {other}, 1, 1, 0}; // do is dh
    kernel_test_assert_refused(&test, KERN_OP_NORMALISE_BACKWARD, &d_division, KERN_INVALID);
    kernel_test_close(&test);
}
END_TEST

// ---------------------------------------------------------------------------------------- references, by differences

static struct {
    double o[4], dh[3], m;
    bool stabilised;
} point;

static double normalise_loss(void *context) {
    (void)context;
    double h[3];
    kern_ref_normalise(point.o, point.stabilised ? &point.m : NULL, 1e-2, h, 3);
    return kernel_test_dot(h, point.dh, 3);
}

START_TEST(reference_gradients) {
    static const double normaliser[] = {-2, -0.2, 0.3, 3};
    for (int i = 0; i < 8; i++) {
        double d_o[4];
        point.stabilised = i < 4;
        for (int j = 0; j < 3; j++)
            point.o[j] = sin(i + j + 1.0), point.dh[j] = cos(3.0 * j + i);
        point.o[3] = normaliser[i % 4], point.m = 0.1;
        kern_ref_normalise_backward(point.o, point.stabilised ? &point.m : NULL, 1e-2, point.dh, d_o, 3);
        kernel_test_gradient("normalise", normalise_loss, NULL, point.o, d_o, 4, 1e-7);
    }
}
END_TEST

static Suite *mlstm_suite(void) {
    Suite *suite = suite_create("mlstm");
    TCase *tests = tcase_create("mlstm");
    tcase_add_loop_test(tests, gates_equal_reference, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tests, cuts_and_neighbours_change_nothing, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tests, normaliser_equals_reference, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tests, cell_equals_the_plain_formula, 0, KERNEL_TEST_ISAS);
    tcase_add_test(tests, shapes_are_checked);
    tcase_add_test(tests, reference_gradients);
    tcase_set_timeout(tests, 60);
    suite_add_tcase(suite, tests);
    return suite;
}

MESA_TEST_MAIN(mlstm_suite)
