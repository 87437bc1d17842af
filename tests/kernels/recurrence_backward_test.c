// SPDX-License-Identifier: Apache-2.0
// The recurrence family, backward: every decay, update and weight with every map of heads against the double reference,
// and that one against finite differences; packed documents, long rows, strong decays, threads.
#ifdef _OPENMP
#include <omp.h>
#endif

#include "tests/kernels/recurrence_problem.h"

typedef struct gradients {
    float *d_o, *dq, *dk, *dv, *dg, *dbeta, *grad_skip, *dstate;
} gradients;

static gradients make_gradients(problem *p) {
    kernel_test *test = p->test;
    return (gradients){.d_o = kernel_test_floats(test, p->tokens * p->output_row, -1, 1),
                       .dq = kernel_test_floats(test, p->tokens * p->query_row, -1, 1), // shall be overwritten
                       .dk = kernel_test_floats(test, p->tokens * p->key_row, -1, 1),
                       .dv = kernel_test_floats(test, p->tokens * p->value_row, -1, 1),
                       .dg = kernel_test_floats(test, p->tokens * p->decay_row, -1, 1),
                       .dbeta = kernel_test_floats(test, p->tokens * p->gate_row, -1, 1),
                       .grad_skip = kernel_test_zero_floats(test, p->skip_size)};
}

static bool trains_decay(const problem *p) {
    return p->family.decay == KERN_DECAY_SCALAR || p->family.decay == KERN_DECAY_CHANNEL;
}

static kern_recurrence_backward_args backward_arguments(const problem *p, const gradients *d) {
    return (kern_recurrence_backward_args){.q.f = p->q,
                                           .k.f = p->k,
                                           .v.f = p->v,
                                           .g.f = p->family.decay == KERN_DECAY_NONE ? NULL : p->g,
                                           .beta.f = p->family.weighted ? p->beta : NULL,
                                           .skip.f = p->family.skip_width ? p->skip : NULL,
                                           .snapshots.f = p->snapshots,
                                           .d_o.f = d->d_o,
                                           .dq.f = d->dq,
                                           .dk.f = d->dk,
                                           .dv.f = d->dv,
                                           .dg.f = trains_decay(p) ? d->dg : NULL,
                                           .dbeta.f = p->family.weighted ? d->dbeta : NULL,
                                           .grad_skip.f = p->family.skip_width ? d->grad_skip : NULL,
                                           .dstate.f = d->dstate,
                                           .family = p->family};
}

static void run_backward(problem *p, const gradients *d) {
    kern_recurrence_backward_args args = backward_arguments(p, d);
    kernel_test_launch(p->test, KERN_OP_RECURRENCE_BACKWARD, &args);
}

static kern_ref_recurrence_gradients reference_gradients(const problem *p, const kern_row *row, const gradients *d,
                                                         const float *dstate) {
    kernel_test *test = p->test;
    const size_t n = (size_t)row->length, first = (size_t)row->token0;
    kern_ref_recurrence_inputs in = reference_inputs(p, row);
    kern_ref_recurrence_gradients want = {.dq = kernel_test_zero_doubles(test, n * p->query_row),
                                          .dk = kernel_test_zero_doubles(test, n * p->key_row),
                                          .dv = kernel_test_zero_doubles(test, n * p->value_row),
                                          .dg = kernel_test_zero_doubles(test, n * p->decay_row),
                                          .dbeta = kernel_test_zero_doubles(test, n * p->gate_row),
                                          .dskip = kernel_test_zero_doubles(test, p->skip_size)};
    const double *state = NULL;
    if (row->slot >= 0)
        state = kernel_test_widened(test, p->slots_before + (size_t)row->slot * p->state_size, p->state_size);
    if (dstate)
        want.dstate = kernel_test_widened(test, dstate, p->state_size);
    kern_ref_recurrence_backward(&p->family, row->length, &in, state,
                                 kernel_test_widened(test, d->d_o + first * p->output_row, n * p->output_row), &want);
    return want;
}

static void check_backward(problem *p, const gradients *d, const float *dstate_before, double tolerance,
                           double decay_tolerance) {
    double *skip = kernel_test_zero_doubles(p->test, p->skip_size);
    for (int r = 0; r < p->test->rows->n_rows; r++) {
        const kern_row *row = &p->test->rows->row[r];
        const size_t n = (size_t)row->length, first = (size_t)row->token0;
        const float *dstate = dstate_before ? dstate_before + (size_t)r * p->state_size : NULL;
        const kern_ref_recurrence_gradients want = reference_gradients(p, row, d, dstate);
        kernel_test_assert_norm(d->dq + first * p->query_row, want.dq, n * p->query_row, tolerance);
        kernel_test_assert_norm(d->dk + first * p->key_row, want.dk, n * p->key_row, tolerance);
        kernel_test_assert_norm(d->dv + first * p->value_row, want.dv, n * p->value_row, tolerance);
        if (trains_decay(p))
            kernel_test_assert_norm(d->dg + first * p->decay_row, want.dg, n * p->decay_row, decay_tolerance);
        if (p->family.weighted)
            kernel_test_assert_norm(d->dbeta + first * p->gate_row, want.dbeta, n * p->gate_row, tolerance);
        if (dstate_before)
            kernel_test_assert_norm(d->dstate + (size_t)r * p->state_size, want.dstate, p->state_size, tolerance);
        for (size_t i = 0; i < p->skip_size; i++)
            skip[i] += want.dskip[i];
    }
    kernel_test_assert_norm(d->grad_skip, skip, p->skip_size, tolerance);
}
static void forward_and_backward(problem *p, gradients *d, bool dstate, double tolerance, double decay_tolerance) {
    const size_t states = (size_t)p->test->rows->n_rows * p->state_size;
    float *before = NULL;
    run_forward(p, true);
    *d = make_gradients(p);
    if (dstate) {
        d->dstate = kernel_test_floats(p->test, states, -1, 1);
        before = kernel_test_copy(p->test, d->dstate, states);
    }
    run_backward(p, d);
    check_backward(p, d, before, tolerance, decay_tolerance);
}

START_TEST(backward_matches_reference) {
    for (int shape = 0; shape < SHAPES; shape++)
        for (int law = 0; law < LAWS; law++) {
            kernel_test test;
            if (!meet(law, shape))
                continue;
            if (!open_device(&test, _i, device_of(law, shape)))
                return;
            sequence_training_rows(&test);
            problem p;
            gradients d;
            make_problem(&p, &test, with_law(shapes[shape], law), 0.8);
            forward_and_backward(&p, &d, (law + shape) % 3 > 0, 2e-6, 1e-5);
            kernel_test_close(&test);
        }
}
END_TEST

START_TEST(wide_backward_matches_reference) {
    static const kern_recurrence wide = {.heads = 2,
                                         .key_heads = 1,
                                         .key_width = 30,
                                         .value_width = 300,
                                         .unit_column = 1,
                                         .skip_width = 300,
                                         .scale = 0.1f};
    for (int law = 0; law < LAWS; law++) {
        kernel_test test;
        if (!open_device(&test, _i, device_of(law, 0)))
            return;
        kernel_test_clear_rows(&test);
        kernel_test_row(&test, KERN_ROW_PROMPT, 1, 70, 13);
        kernel_test_boundary(&test, 41);
        kernel_test_prepare(&test);
        problem p;
        gradients d;
        make_problem(&p, &test, with_law(wide, law), 0.8);
        forward_and_backward(&p, &d, true, 2e-6, 1e-5);
        kernel_test_close(&test);
    }
}
END_TEST

// A log decay of -5 a token over whole chunks: what is far is gone, and nothing overflows on the way.
START_TEST(strong_decays_stay_finite) {
    for (int law = 0; law < LAWS; law++) {
        kernel_test test;
        if (!open_device(&test, _i, device_of(law, 2)))
            return;
        sequence_training_rows(&test);
        problem p;
        gradients d;
        make_problem(&p, &test, with_law(shapes[law / 4 % 2 * 2], law), 0.8);
        for (size_t i = 0; i < p.tokens * p.decay_row; i++)
            p.g[i] = -5;
        forward_and_backward(&p, &d, true, 2e-6, 1e-5);
        check_forward(&p, 1e-6);
        kernel_test_close(&test);
    }
}
END_TEST

// Rows around the length of a chunk, with and without a state before them, of the widths that chunks are made for;
// gates that forget nothing or all, write nothing, hardly anything or twice.
static void odd_rows(kernel_test *test) {
    static const int lengths[] = {1, 63, 64, 65, 130};
    kernel_test_clear_rows(test);
    for (int i = 0; i < 5; i++)
        kernel_test_row(test, KERN_ROW_PROMPT, i % 2 ? -1 : i / 2, lengths[i], i % 2 ? 0 : 32 * i);
    kernel_test_boundary(test, 65);
    kernel_test_prepare(test);
}

START_TEST(odd_lengths_and_gates_at_their_limits) {
    static const float decays[] = {0, -1e-7f, -0.1f, 0, -5, -0.01f, -90}, weights[] = {1, 0, 0.5f, 1e-20f, 0.9f};
    for (int width = 64; width <= 128; width *= 2)
        for (int law = 0; law < LAWS; law += width == 64 ? 1 : 4) {
            kernel_test test;
            if (!open_device(&test, _i, "cpu:64"))
                return;
            odd_rows(&test);
            const kern_recurrence wide = {.heads = 1, .key_width = width, .value_width = width, .scale = 0.1f};
            problem p;
            gradients d;
            make_problem(&p, &test, with_law(wide, width == 64 ? law : law + 2 + law / 4 % 2), 0.8);
            const bool delta = p.family.update == KERN_UPDATE_DELTA;
            for (size_t i = 0; i < p.tokens * p.decay_row; i++)
                p.g[i] = decays[i * 3 % 7];
            for (size_t i = 0; i < p.tokens; i++)
                p.beta[i] = weights[i % 5] * (delta && i % 3 == 0 ? 2 : 1);
            forward_and_backward(&p, &d, false, 2e-6, 1e-5); // what reaches a row's start is too small to compare
            kernel_test_close(&test);
        }
}
END_TEST

// One document of a packed row against the same document alone.
static void check_document(const problem *packed, const gradients *all, kern_recurrence family, size_t at, size_t n) {
    kernel_test *test = packed->test;
    problem alone;
    kernel_test_clear_rows(test);
    kernel_test_row(test, KERN_ROW_PROMPT, -1, (int32_t)n, 0);
    kernel_test_prepare(test);
    make_problem(&alone, test, family, 0.9);
    const size_t queries = alone.query_row, keys = alone.key_row, values = alone.value_row, outputs = alone.output_row;
    const size_t gates = alone.gate_row, decays = alone.decay_row;
    memcpy(alone.q, packed->q + at * queries, n * queries * sizeof(float));
    memcpy(alone.k, packed->k + at * keys, n * keys * sizeof(float));
    memcpy(alone.v, packed->v + at * values, n * values * sizeof(float));
    memcpy(alone.beta, packed->beta + at * gates, n * gates * sizeof(float));
    memcpy(alone.skip, packed->skip, alone.skip_size * sizeof(float));
    if (family.decay == KERN_DECAY_HEAD)
        memcpy(alone.g, packed->g, gates * sizeof(float));
    else
        memcpy(alone.g, packed->g + at * decays, n * decays * sizeof(float));
    run_forward(&alone, true);
    gradients one = make_gradients(&alone);
    memcpy(one.d_o, all->d_o + at * outputs, n * outputs * sizeof(float));
    run_backward(&alone, &one);
    kernel_test_assert_norm(packed->o + at * outputs, kernel_test_widened(test, alone.o, n * outputs), n * outputs,
                            1e-6);
    kernel_test_assert_norm(all->dq + at * queries, kernel_test_widened(test, one.dq, n * queries), n * queries, 1e-6);
    kernel_test_assert_norm(all->dk + at * keys, kernel_test_widened(test, one.dk, n * keys), n * keys, 2e-6);
    kernel_test_assert_norm(all->dv + at * values, kernel_test_widened(test, one.dv, n * values), n * values, 1e-6);
    if (family.weighted)
        kernel_test_assert_norm(all->dbeta + at * gates, kernel_test_widened(test, one.dbeta, n * gates), n * gates,
                                3e-6);
    if (!trains_decay(packed))
        return;
    kernel_test_assert_norm(all->dg + at * decays, kernel_test_widened(test, one.dg, n * decays), n * decays, 5e-6);
    for (size_t l = 0; l < decays; l++)
        ck_assert_float_eq(all->dg[at * decays + l], 0);
}

START_TEST(packed_documents_equal_documents_alone) {
    static const int lengths[] = {1, 2, 3, 63, 64, 65, 130};
    enum { DOCUMENTS = 7 };
    for (int law = 0; law < LAWS; law++) {
        kernel_test test;
        if (!open_device(&test, _i, device_of(law, 0)))
            return;
        problem packed;
        kernel_test_clear_rows(&test);
        kernel_test_row(&test, KERN_ROW_PROMPT, -1, 328, 0);
        for (int i = 0, at = 0; i + 1 < DOCUMENTS; i++)
            kernel_test_boundary(&test, at += lengths[i]);
        kernel_test_prepare(&test);
        const kern_recurrence family = with_law(shapes[(law * 3 + 4) % SHAPES], law);
        make_problem(&packed, &test, family, 0.9);
        run_forward(&packed, true);
        gradients all = make_gradients(&packed);
        run_backward(&packed, &all);
        size_t at = 0;
        for (int i = 0; i < DOCUMENTS; at += (size_t)lengths[i++])
            check_document(&packed, &all, family, at, (size_t)lengths[i]);
        kernel_test_close(&test);
    }
}
END_TEST

START_TEST(decay_gradient_of_a_long_row) {
    enum { LENGTH = 8192 };
    for (int law = 0; law < 4; law++) {
        kernel_test test;
        if (!open_device(&test, _i, sequence_devices[law % SEQUENCE_DEVICES]))
            return;
        kernel_test_clear_rows(&test);
        kernel_test_row(&test, KERN_ROW_PROMPT, -1, LENGTH, 0);
        kernel_test_prepare(&test);
        problem p;
        gradients d;
        const kern_recurrence family = {.decay = law % 2 ? KERN_DECAY_CHANNEL : KERN_DECAY_SCALAR,
                                        .update = law / 2 ? KERN_UPDATE_DELTA : KERN_UPDATE_ADD,
                                        .weighted = 1,
                                        .heads = 1,
                                        .key_width = 8,
                                        .value_width = 8,
                                        .scale = 1};
        make_problem(&p, &test, family, 0.9);
        for (size_t i = 0; i < LENGTH * p.decay_row; i++)
            p.g[i] = logf(0.9999f);
        forward_and_backward(&p, &d, false, 5e-6, 5e-6);
        check_forward(&p, 3e-6);
        kernel_test_close(&test);
    }
}
END_TEST

#ifdef _OPENMP
START_TEST(threads_change_no_bit) {
    for (int law = 0; law < LAWS; law += 5) {
        float *o = NULL, *dk = NULL, *dg = NULL;
        for (int threads = 1; threads <= 3; threads++) {
            omp_set_num_threads(threads);
            kernel_test test;
            if (!kernel_test_open(&test, _i, "cpu:16"))
                return;
            sequence_training_rows(&test);
            problem p;
            make_problem(&p, &test, with_law(shapes[1 + law % (SHAPES - 1)], law), 0.95);
            run_forward(&p, true);
            gradients d = make_gradients(&p);
            run_backward(&p, &d);
            const size_t outputs = p.tokens * p.output_row, keys = p.tokens * p.key_row,
                         decays = p.tokens * p.decay_row;
            if (threads == 1) {
                o = memcpy(malloc(outputs * sizeof(float)), p.o, outputs * sizeof(float));
                dk = memcpy(malloc(keys * sizeof(float)), d.dk, keys * sizeof(float));
                dg = memcpy(malloc(decays * sizeof(float)), d.dg, decays * sizeof(float));
            }
            kernel_test_assert_same(p.o, o, outputs);
            kernel_test_assert_same(d.dk, dk, keys);
            kernel_test_assert_same(d.dg, dg, decays);
            kernel_test_close(&test);
        }
        free(o);
        free(dk);
        free(dg);
    }
}
END_TEST
#endif

START_TEST(missing_gradients_are_refused) {
    kernel_test test;
    if (!open_device(&test, _i, "cpu"))
        return;
    sequence_training_rows(&test);
    problem p;
    make_problem(&p, &test, with_law(shapes[4], 2 + 8), 0.9); // scalar decay, weighted, skip
    const gradients d = make_gradients(&p);
    for (int missing = 0; missing <= 4; missing++) {
        kern_recurrence_backward_args args = backward_arguments(&p, &d);
        kern_ptr *const operand[] = {&args.dg, &args.dbeta, &args.grad_skip, &args.snapshots};
        if (missing < 4)
            operand[missing]->p = NULL;
        kernel_test_assert_refused(&test, KERN_OP_RECURRENCE_BACKWARD, &args, missing < 4 ? KERN_INVALID : KERN_OK);
    }
    kernel_test_close(&test);
}
END_TEST

// ---------------------------------------------------------------------------------- the reference itself, in double

enum { REF_TOKENS = 7, REF_MAX = 1024 };

typedef struct reference_case {
    problem sizes;
    kern_ref_recurrence_inputs in;
    double *state, *d_o, *dstate;
} reference_case;

static double reference_loss(void *context) {
    const reference_case *c = context;
    double state[REF_MAX], o[REF_MAX];
    memcpy(state, c->state, c->sizes.state_size * sizeof(double));
    kern_ref_recurrence(&c->sizes.family, REF_TOKENS, &c->in, state, o);
    return kernel_test_dot(o, c->d_o, REF_TOKENS * c->sizes.output_row) +
           kernel_test_dot(state, c->dstate, c->sizes.state_size);
}

static double *random_doubles(kernel_test *test, size_t count, double low, double high) {
    return kernel_test_widened(test, kernel_test_floats(test, count, low, high), count);
}

static void check_reference(kernel_test *test, kern_recurrence family, const unsigned char *begins) {
    reference_case c = {.sizes.family = family};
    problem *p = &c.sizes;
    measure(p);
    const size_t n = REF_TOKENS, decays = family.decay == KERN_DECAY_HEAD ? p->gate_row : n * p->decay_row;
    double *q = random_doubles(test, n * p->query_row, -1, 1), *k = random_doubles(test, n * p->key_row, -1, 1);
    double *v = random_doubles(test, n * p->value_row, -1, 1), *g = random_doubles(test, decays, -0.5, 0);
    double *beta = random_doubles(test, n * p->gate_row, 0.1, 0.9), *skip = random_doubles(test, p->skip_size, -1, 1);
    c.in = (kern_ref_recurrence_inputs){q, k, v, g, beta, skip, begins};
    c.state = random_doubles(test, p->state_size, -1, 1);
    c.d_o = random_doubles(test, n * p->output_row, -1, 1);
    c.dstate = random_doubles(test, p->state_size, -1, 1);
    double dq[REF_MAX], dk[REF_MAX], dv[REF_MAX], dg[REF_MAX], dbeta[REF_MAX], dskip[REF_MAX], dstate[REF_MAX];
    const kern_ref_recurrence_gradients out = {dq, dk, dv, dg, dbeta, dskip, dstate};
    memcpy(dstate, c.dstate, p->state_size * sizeof(double));
    kern_ref_recurrence_backward(&p->family, REF_TOKENS, &c.in, c.state, c.d_o, &out);
    kernel_test_gradient("q", reference_loss, &c, q, dq, n * p->query_row, 1e-8);
    kernel_test_gradient("k", reference_loss, &c, k, dk, n * p->key_row, 1e-8);
    kernel_test_gradient("v", reference_loss, &c, v, dv, n * p->value_row, 1e-8);
    if (trains_decay(p))
        kernel_test_gradient("g", reference_loss, &c, g, dg, decays, 1e-8);
    if (family.weighted)
        kernel_test_gradient("beta", reference_loss, &c, beta, dbeta, n * p->gate_row, 1e-8);
    kernel_test_gradient("skip", reference_loss, &c, skip, dskip, p->skip_size, 1e-8);
    kernel_test_gradient("state", reference_loss, &c, c.state, dstate, p->state_size, 1e-8);
}

START_TEST(reference_gradients_match_finite_differences) {
    static const unsigned char begins[REF_TOKENS] = {0, 0, 0, 1, 0, 0, 0};
    static const kern_recurrence maps[] = {
        {.heads = 4, .query_heads = 2, .key_heads = 2, .key_width = 4, .value_width = 3, .scale = 0.5f},
        {.heads = 2,
         .query_heads = 4,
         .value_heads = 1,
         .key_width = 4,
         .value_width = 3,
         .unit_column = 1,
         .skip_width = 1,
         .scale = 0.5f},
        {.heads = 4, .key_heads = 1, .key_width = 4, .value_width = 3, .skip_width = 3, .scale = 0.5f},
    };
    for (size_t map = 0; map < sizeof maps / sizeof maps[0]; map++)
        for (int law = 0; law < LAWS; law++) {
            kernel_test test = {.seed = 5};
            check_reference(&test, with_law(maps[map], law), law % 3 ? begins : NULL);
            for (int i = 0; i < test.memories; i++)
                free(test.memory[i].host);
        }
}
END_TEST

static Suite *recurrence_backward_suite(void) {
    Suite *suite = suite_create("recurrence backward");
    TCase *tcase = tcase_create("every instruction set");
    tcase_set_timeout(tcase, 120);
    tcase_add_loop_test(tcase, backward_matches_reference, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tcase, wide_backward_matches_reference, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tcase, strong_decays_stay_finite, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tcase, odd_lengths_and_gates_at_their_limits, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tcase, packed_documents_equal_documents_alone, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tcase, decay_gradient_of_a_long_row, 0, KERNEL_TEST_DEVICES);
#ifdef _OPENMP
    tcase_add_loop_test(tcase, threads_change_no_bit, 0, KERNEL_TEST_ISAS);
#endif
    tcase_add_loop_test(tcase, missing_gradients_are_refused, 0, KERNEL_TEST_DEVICES);
    suite_add_tcase(suite, tcase);
    tcase = tcase_create("reference");
    tcase_add_test(tcase, reference_gradients_match_finite_differences);
    suite_add_tcase(suite, tcase);
    return suite;
}

MESA_TEST_MAIN(recurrence_backward_suite)
