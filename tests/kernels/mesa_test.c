// SPDX-License-Identifier: Apache-2.0
// Mesa: chunk and step forms against the double reference in every solver mode, the implicit backward against reference
// and finite differences, documents, slots, independence of neighbours, of cuts and of the number of threads.
#ifdef _OPENMP
#include <omp.h>
#endif

#include "tests/kernels/mesa_problem.h"

static const struct { int heads, depth, width; } shapes[] = {{2, 64, 64}, {1, 5, 7}, {3, 24, 40}, {1, 128, 128}};
enum { SHAPES = sizeof shapes / sizeof shapes[0] };

START_TEST(forward_matches_reference) {
    static const struct {
        kern_solver solver;
        double tolerance;
    } modes[] = {{{KERN_SOLVE_EXACT, 0, 0}, 2e-6},  {{KERN_SOLVE_TOLERANCE, 200, 1e-6f}, 1e-5},
                 {{KERN_SOLVE_STEPS, 6, 0}, 1e-5},  {{KERN_SOLVE_STEPS, 0, 0}, 2e-6},
                 {{KERN_SOLVE_FIXED, 10, 0}, 1e-5}, {{KERN_SOLVE_FIXED, 30, 0}, 1e-5}};
    for (int shape = 0; shape < SHAPES; shape++)
        for (int device = 0; device < SEQUENCE_DEVICES; device++) {
            kernel_test test;
            if (!kernel_test_open(&test, _i, sequence_devices[device]))
                return;
            sequence_mixed_rows(&test);
            problem p;
            make_problem(&p, &test, shapes[shape].heads, shapes[shape].depth, shapes[shape].width, 0.9);
            fill_slots(&p);
            for (size_t m = 0; m < sizeof modes / sizeof modes[0]; m++) {
                memcpy(p.slots, p.slots_before, SLOTS * p.slot_size * sizeof(float));
                run_forward(&p, modes[m].solver, m % 2 == 0 && !test.cuda);
                check_forward(&p, modes[m].solver, (tolerances){modes[m].tolerance, modes[m].tolerance, 1e-6, 1e-6});
            }
            kernel_test_close(&test);
        }
}
END_TEST

// A batch of two rows with the same tokens, once as prompt and once as generated row, from the same state.
static void same_tokens_twice(problem *p, kernel_test *test, int depth, int length, double gamma_low) {
    kernel_test_clear_rows(test);
    kernel_test_row(test, KERN_ROW_GENERATED, 0, length, 11);
    kernel_test_boundary(test, 20);
    kernel_test_row(test, KERN_ROW_PROMPT, 1, length, 11);
    kernel_test_boundary(test, 20);
    kernel_test_prepare(test);
    make_problem(p, test, 2, depth, depth, gamma_low);
    fill_slots(p);
    memcpy(p->slots + p->slot_size, p->slots, p->slot_size * sizeof(float));
    float *both[] = {p->q, p->k, p->v, p->g, p->beta};
    for (int i = 0; i < 5; i++) {
        const size_t half = (i < 3 ? p->key_size : p->tokens * 2) / 2;
        memcpy(both[i] + half, both[i], half * sizeof(float));
    }
}

START_TEST(chunk_equals_step) {
    static const struct {
        kern_solver solver;
        double tolerance;
    } modes[] = {{{KERN_SOLVE_EXACT, 0, 0}, 1e-5},
                 {{KERN_SOLVE_TOLERANCE, 200, 1e-6f}, 1e-4},
                 {{KERN_SOLVE_TOLERANCE, 200, 1e-3f}, 5e-3},
                 {{KERN_SOLVE_FIXED, 30, 0}, 1e-4}};
    for (int device = 0; device < SEQUENCE_DEVICES; device++) {
        kernel_test test;
        if (!kernel_test_open(&test, _i, sequence_devices[device]))
            return;
        problem p;
        same_tokens_twice(&p, &test, 48, 300, 0.99);
        for (size_t m = 0; m < sizeof modes / sizeof modes[0]; m++) {
            run_forward(&p, modes[m].solver, false);
            double *step = kernel_test_widened(&test, p.o, p.value_size / 2);
            kernel_test_assert_norm(p.o + p.value_size / 2, step, p.value_size / 2, modes[m].tolerance);
            double *state = kernel_test_widened(&test, p.slots, p.slot_size);
            kernel_test_assert_norm(p.slots + p.slot_size, state, p.slot_size, 1e-5);
        }
        kernel_test_close(&test);
    }
}
END_TEST

START_TEST(keys_state_stays_symmetric) {
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu:32"))
        return;
    problem p;
    same_tokens_twice(&p, &test, 40, 200, 0.95);
    for (size_t i = 0; i < p.slot_size; i++) // the filled states are symmetric up to rounding only
        p.slots[i] = p.slots[p.slot_size + i] = 0;
    run_forward(&p, (kern_solver){KERN_SOLVE_TOLERANCE, 30, 1e-4f}, false);
    for (int slot = 0; slot < 2; slot++)
        for (int i = 0; i < 40; i++)
            for (int j = 0; j < i; j++)
                ck_assert_float_eq(p.slots[slot * p.slot_size + i * 40 + j], p.slots[slot * p.slot_size + j * 40 + i]);
    kernel_test_close(&test);
}
END_TEST

// The same row alone, at slot 1, after `before` other rows and before as many: bits of o, x, reports and state.
static void run_among(problem *p, kernel_test *test, kern_row_kind kind, int before, kern_solver solver) {
    enum { LENGTH = 75, HEADS = 2, DEPTH = 32, WIDTH = 48 };
    kernel_test_clear_rows(test);
    for (int r = 0; r < before; r++)
        kernel_test_row(test, KERN_ROW_GENERATED, 2, 1 + r % 3, 5);
    kern_row *row = kernel_test_row(test, kind, 1, LENGTH, 3);
    for (int r = 0; r < before; r++)
        kernel_test_row(test, KERN_ROW_PROMPT, -1, 7 + 5 * r, r);
    kernel_test_prepare(test);
    const int first = row->token0;
    test->seed = (uint64_t)before + 7;
    make_problem(p, test, HEADS, DEPTH, WIDTH, 0.9);
    test->seed = 99; // the row's own data
    float *own_keys = sequence_keys(test, 2 * LENGTH * HEADS, DEPTH);
    float *own = kernel_test_floats(test, LENGTH * HEADS * WIDTH, 0.1, 0.9);
    memcpy(p->q + first * HEADS * DEPTH, own_keys, LENGTH * HEADS * DEPTH * sizeof(float));
    memcpy(p->k + first * HEADS * DEPTH, own_keys + LENGTH * HEADS * DEPTH, LENGTH * HEADS * DEPTH * sizeof(float));
    memcpy(p->v + first * HEADS * WIDTH, own, LENGTH * HEADS * WIDTH * sizeof(float));
    memcpy(p->beta + first * HEADS, own, LENGTH * HEADS * sizeof(float));
    for (int i = 0; i < LENGTH * HEADS; i++)
        p->g[first * HEADS + i] = -0.1f * own[i + 200];
    for (int i = 0; i < HEADS * DEPTH; i++)
        p->params[i] = own[i];
    fill_slots(p);
    run_forward(p, solver, false);
    memmove(p->o, p->o + first * HEADS * WIDTH, LENGTH * HEADS * WIDTH * sizeof(float));
    memmove(p->x, p->x + first * HEADS * DEPTH, LENGTH * HEADS * DEPTH * sizeof(float));
    memmove(p->report, p->report + first * HEADS, LENGTH * HEADS * sizeof *p->report);
}

START_TEST(row_alone_equals_row_among_others) {
    static const kern_solver modes[] = {
        {KERN_SOLVE_EXACT, 0, 0}, {KERN_SOLVE_TOLERANCE, 40, 1e-4f}, {KERN_SOLVE_FIXED, 9, 0}};
    for (int kind = KERN_ROW_GENERATED; kind <= KERN_ROW_PROMPT; kind++)
        for (int m = 0; m < 3; m++) {
            kernel_test test;
            if (!kernel_test_open(&test, _i, "cpu:32"))
                return;
            problem alone, among;
            run_among(&alone, &test, kind, 0, modes[m]);
            run_among(&among, &test, kind, 15, modes[m]);
            kernel_test_assert_same(among.o, alone.o, 75 * 2 * 48);
            kernel_test_assert_same(among.x, alone.x, 75 * 2 * 32);
            kernel_test_assert_same(among.report, alone.report, 75 * 2);
            kernel_test_assert_same(among.slots + among.slot_size, alone.slots + alone.slot_size, alone.slot_size);
            kernel_test_close(&test);
        }
}
END_TEST

// Tokens [from, to) of the problem as one prompt row in `slot`.
static void run_prompt(problem *p, int slot, int from, int to, bool snapshots) {
    run_part(p, KERN_ROW_PROMPT, slot, 0, from, to, (kern_solver){KERN_SOLVE_TOLERANCE, 30, 1e-4f}, snapshots);
}

START_TEST(cut_prefill_equals_prefill_at_once) {
    enum { LENGTH = 180, CHUNK = 16 };
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu:16"))
        return;
    problem p;
    kernel_test_clear_rows(&test);
    kernel_test_row(&test, KERN_ROW_PROMPT, 0, LENGTH, 0);
    kernel_test_prepare(&test);
    make_problem(&p, &test, 2, 32, 48, 0.9);
    run_prompt(&p, 0, 0, LENGTH, false);
    float *o = kernel_test_copy(&test, p.o, p.value_size), *x = kernel_test_copy(&test, p.x, p.key_size);
    run_prompt(&p, 1, 0, LENGTH, true); // the solves as work items of their own
    kernel_test_assert_same(p.o, o, p.value_size);
    kernel_test_assert_same(p.x, x, p.key_size);
    kernel_test_assert_same(p.slots, p.slots + p.slot_size, p.slot_size);
    for (int cut = CHUNK; cut < LENGTH; cut += CHUNK) {
        memset(p.o, 0, p.value_size * sizeof(float));
        memset(p.slots + 3 * p.slot_size, 0, p.slot_size * sizeof(float));
        run_prompt(&p, 3, 0, cut, false);
        run_prompt(&p, 3, cut, LENGTH, false);
        kernel_test_assert_same(p.o, o, p.value_size);
        kernel_test_assert_same(p.x, x, p.key_size);
        kernel_test_assert_same(p.slots, p.slots + 3 * p.slot_size, p.slot_size);
    }
    kernel_test_close(&test);
}
END_TEST

// ---------------------------------------------------------------------------------------------------------- backward

typedef struct gradients {
    float *d_o, *dq, *dk, *dv, *dg, *dbeta, *params, *dstate;
} gradients;

static gradients make_gradients(problem *p, bool dstate) {
    kernel_test *test = p->test;
    const size_t h = (size_t)p->mesa.heads, states = (size_t)test->rows->n_rows * p->slot_size;
    gradients d = {.d_o = kernel_test_floats(test, p->value_size, -1, 1),
                   .dq = kernel_test_zero_floats(test, p->key_size),
                   .dk = kernel_test_zero_floats(test, p->key_size),
                   .dv = kernel_test_zero_floats(test, p->value_size),
                   .dg = kernel_test_zero_floats(test, p->tokens * h),
                   .dbeta = kernel_test_zero_floats(test, p->tokens * h),
                   .params = kernel_test_zero_floats(test, h * (size_t)p->mesa.key_width)};
    if (dstate)
        d.dstate = kernel_test_floats(test, states, -0.3, 0.3);
    return d;
}

static void run_backward(problem *p, const gradients *d, float tolerance) {
    const kern_mesa_backward_args args = {.q.f = p->q,
                                          .k.f = p->k,
                                          .v.f = p->v,
                                          .g.f = p->g,
                                          .beta.f = p->beta,
                                          .lambda_params.f = p->params,
                                          .o.f = p->o,
                                          .x.f = p->x,
                                          .snapshots.f = p->snapshots,
                                          .d_o.f = d->d_o,
                                          .dq.f = d->dq,
                                          .dk.f = d->dk,
                                          .dv.f = d->dv,
                                          .dg.f = d->dg,
                                          .dbeta.f = d->dbeta,
                                          .grad_lambda_params.f = d->params,
                                          .report.p = p->report,
                                          .dstate.f = d->dstate,
                                          .mesa = p->mesa,
                                          .backward_tolerance = tolerance};
    kernel_test_launch(p->test, KERN_OP_MESA_BACKWARD, &args);
}

static void check_backward(problem *p, const gradients *d, const float *dstate_before, double tolerance) {
    kernel_test *test = p->test;
    const size_t h = (size_t)p->mesa.heads, depth = (size_t)p->mesa.key_width;
    const size_t keys = h * depth, values = h * (size_t)p->mesa.value_width;
    double *params = kernel_test_zero_doubles(test, keys);
    for (int r = 0; r < test->rows->n_rows; r++) {
        const kern_row *row = &test->rows->row[r];
        const size_t n = (size_t)row->length, first = (size_t)row->token0;
        kern_ref_mesa_inputs in = reference_inputs(p, row);
        double *state = NULL, *dstate = NULL, *row_params = kernel_test_zero_doubles(test, keys);
        if (row->slot >= 0)
            state = kernel_test_widened(test, p->slots_before + (size_t)row->slot * p->slot_size, p->slot_size);
        if (dstate_before)
            dstate = kernel_test_widened(test, dstate_before + (size_t)r * p->slot_size, p->slot_size);
        const kern_ref_mesa_gradients want = {.dq = kernel_test_zero_doubles(test, n * keys),
                                              .dk = kernel_test_zero_doubles(test, n * keys),
                                              .dv = kernel_test_zero_doubles(test, n * values),
                                              .dg = kernel_test_zero_doubles(test, n * h),
                                              .dbeta = kernel_test_zero_doubles(test, n * h),
                                              .grad_lambda_params = row_params,
                                              .dkeys = dstate,
                                              .dvalues = dstate ? dstate + keys * depth : NULL};
        kern_ref_mesa_backward(&p->mesa, row->length, &in, state, state ? state + keys * depth : NULL,
                               kernel_test_widened(test, d->d_o + first * values, n * values), &want);
        kernel_test_assert_norm(d->dq + first * keys, want.dq, n * keys, tolerance);
        kernel_test_assert_norm(d->dk + first * keys, want.dk, n * keys, tolerance);
        kernel_test_assert_norm(d->dv + first * values, want.dv, n * values, tolerance);
        kernel_test_assert_norm(d->dg + first * h, want.dg, n * h, tolerance);
        kernel_test_assert_norm(d->dbeta + first * h, want.dbeta, n * h, tolerance);
        if (dstate)
            kernel_test_assert_norm(d->dstate + (size_t)r * p->slot_size, dstate, p->slot_size, tolerance);
        for (size_t i = 0; i < keys; i++)
            params[i] += row_params[i];
    }
    kernel_test_assert_norm(d->params, params, keys, tolerance);
}

START_TEST(backward_matches_reference) {
    static const struct {
        kern_solver solver;
        double tolerance;
    } modes[] = {{{KERN_SOLVE_EXACT, 0, 0}, 1e-5}, {{KERN_SOLVE_TOLERANCE, 200, 1e-6f}, 2e-5}};
    for (int shape = 0; shape < SHAPES; shape++)
        for (int device = 0; device < SEQUENCE_DEVICES; device++)
            for (int m = 0; m < 2; m++) {
                kernel_test test;
                if (!kernel_test_open(&test, _i, sequence_devices[device]))
                    return;
                sequence_training_rows(&test);
                problem p;
                make_problem(&p, &test, shapes[shape].heads, shapes[shape].depth, shapes[shape].width, 0.9);
                fill_slots(&p);
                run_forward(&p, modes[m].solver, true);
                gradients d = make_gradients(&p, m == 0);
                float *dstate = d.dstate ? kernel_test_copy(&test, d.dstate, 3 * p.slot_size) : NULL;
                run_backward(&p, &d, 1e-6f);
                check_backward(&p, &d, dstate, modes[m].tolerance);
                kernel_test_close(&test);
            }
}
END_TEST

// Rows around the length of a chunk, gates that forget nothing or all and write nothing or hardly anything.
static void check_odd_backward(kernel_test *test, int depth, float tolerance, double allowed) {
    static const int lengths[] = {1, 63, 64, 65, 130};
    static const float decays[] = {0, -1e-7f, -0.1f, 0, -5, -0.01f, -90}, weights[] = {1, 0, 0.5f, 1e-20f, 0.9f};
    kernel_test_clear_rows(test);
    for (int i = 0; i < 5; i++)
        kernel_test_row(test, KERN_ROW_PROMPT, i % 2 ? -1 : i / 2, lengths[i], i % 2 ? 0 : 32 * i);
    kernel_test_boundary(test, 65);
    kernel_test_prepare(test);
    problem p;
    make_problem(&p, test, 1, depth, depth, 0.9);
    for (size_t t = 0; t < p.tokens; t++) {
        p.g[t] = decays[t * 3 % 7];
        p.beta[t] = weights[t % 5];
    }
    fill_slots(&p);
    run_forward(&p, (kern_solver){KERN_SOLVE_TOLERANCE, 200, tolerance}, true);
    gradients d = make_gradients(&p, false); // what reaches a row's start is too small to compare
    run_backward(&p, &d, tolerance);
    check_backward(&p, &d, NULL, allowed);
}

START_TEST(backward_of_odd_lengths) {
    for (int depth = 64; depth <= 128; depth *= 2) {
        kernel_test test;
        if (!kernel_test_open(&test, _i, "cpu:64"))
            return;
        check_odd_backward(&test, depth, 1e-6f, 2e-5);
        kernel_test_close(&test);
    }
}
END_TEST

START_TEST(fast_backward_of_odd_lengths) {
    for (int depth = 64; depth <= 128; depth *= 2) {
        kernel_test test;
        if (!kernel_test_open_fast(&test))
            return;
        check_odd_backward(&test, depth, 1e-3f, 5e-3);
        kernel_test_close(&test);
    }
}
END_TEST

// Copies token range [from, from + n) of `source` (heads and widths equal) to the front of `target`'s inputs.
static void take_tokens(problem *target, const problem *source, size_t from, size_t n) {
    const size_t h = (size_t)source->mesa.heads, d = h * (size_t)source->mesa.key_width;
    const size_t w = h * (size_t)source->mesa.value_width;
    memcpy(target->q, source->q + from * d, n * d * sizeof(float));
    memcpy(target->k, source->k + from * d, n * d * sizeof(float));
    memcpy(target->v, source->v + from * w, n * w * sizeof(float));
    memcpy(target->g, source->g + from * h, n * h * sizeof(float));
    memcpy(target->beta, source->beta + from * h, n * h * sizeof(float));
    memcpy(target->params, source->params, d * sizeof(float));
}

// Documents packed in one row against each document in a row of its own: outputs, gradients, end state.
START_TEST(packed_documents_equal_documents_alone) {
    static const int lengths[] = {1, 2, 3, 63, 64, 65, 130};
    enum { DOCUMENTS = 7, HEADS = 2, DEPTH = 32, WIDTH = 24 };
    const size_t d = HEADS * DEPTH, w = HEADS * WIDTH;
    const kern_solver exact = {KERN_SOLVE_EXACT, 0, 0};
    for (int device = 0; device < SEQUENCE_DEVICES; device++) {
        kernel_test test;
        if (!kernel_test_open(&test, _i, sequence_devices[device]))
            return;
        problem packed, alone;
        int total = 0;
        for (int i = 0; i < DOCUMENTS; i++)
            total += lengths[i];
        kernel_test_clear_rows(&test);
        kernel_test_row(&test, KERN_ROW_PROMPT, 2, total, 0);
        for (int i = 0, at = 0; i + 1 < DOCUMENTS; i++)
            kernel_test_boundary(&test, at += lengths[i]);
        kernel_test_prepare(&test);
        make_problem(&packed, &test, HEADS, DEPTH, WIDTH, 0.9);
        run_forward(&packed, exact, true);
        gradients all = make_gradients(&packed, false);
        run_backward(&packed, &all, 1e-6f);
        double *params = kernel_test_zero_doubles(&test, d);
        size_t at = 0;
        for (int i = 0; i < DOCUMENTS; i++) {
            const size_t n = (size_t)lengths[i];
            kernel_test_clear_rows(&test);
            kernel_test_row(&test, KERN_ROW_PROMPT, 1, lengths[i], 0);
            kernel_test_prepare(&test);
            make_problem(&alone, &test, HEADS, DEPTH, WIDTH, 0.9);
            take_tokens(&alone, &packed, at, n);
            run_forward(&alone, exact, true);
            gradients one = make_gradients(&alone, false);
            memcpy(one.d_o, all.d_o + at * w, n * w * sizeof(float));
            run_backward(&alone, &one, 1e-6f);
            kernel_test_assert_norm(packed.o + at * w, kernel_test_widened(&test, alone.o, n * w), n * w, 1e-6);
            kernel_test_assert_norm(all.dq + at * d, kernel_test_widened(&test, one.dq, n * d), n * d, 2e-6);
            kernel_test_assert_norm(all.dk + at * d, kernel_test_widened(&test, one.dk, n * d), n * d, 2e-6);
            kernel_test_assert_norm(all.dv + at * w, kernel_test_widened(&test, one.dv, n * w), n * w, 2e-6);
            kernel_test_assert_norm(all.dbeta + at * HEADS, kernel_test_widened(&test, one.dbeta, n * HEADS), n * HEADS,
                                    5e-6);
            kernel_test_assert_norm(all.dg + at * HEADS, kernel_test_widened(&test, one.dg, n * HEADS), n * HEADS,
                                    5e-6);
            for (int h = 0; h < HEADS; h++)
                ck_assert_float_eq(all.dg[at * HEADS + (size_t)h], 0);
            for (size_t l = 0; l < d; l++)
                params[l] += (double)one.params[l];
            if (i == DOCUMENTS - 1) {
                double *state = kernel_test_widened(&test, alone.slots + alone.slot_size, alone.slot_size);
                kernel_test_assert_norm(packed.slots + 2 * packed.slot_size, state, packed.slot_size, 1e-6);
            }
            at += n;
        }
        kernel_test_assert_norm(all.params, params, d, 2e-6);
        kernel_test_close(&test);
    }
}
END_TEST

START_TEST(scaled_loss_scales_gradients) {
    for (int m = 0; m < 2; m++) {
        kernel_test test;
        if (!kernel_test_open(&test, _i, "cpu:32"))
            return;
        sequence_training_rows(&test);
        problem p;
        make_problem(&p, &test, 2, 32, 32, 0.95);
        run_forward(&p, (kern_solver){m ? KERN_SOLVE_TOLERANCE : KERN_SOLVE_FIXED, 20, 1e-4f}, true);
        gradients big = make_gradients(&p, false), small = make_gradients(&p, false);
        for (size_t i = 0; i < p.value_size; i++) { // a power of two: no rounding but where numbers get too small
            big.d_o[i] = i / 64 % 5 == 0 ? 0.0f : big.d_o[i]; // tokens without a loss
            small.d_o[i] = big.d_o[i] * 0x1p-40f;
        }
        run_backward(&p, &big, 1e-5f);
        run_backward(&p, &small, 1e-5f);
        float *const got[] = {small.dq, small.dk, small.dv, small.dg, small.dbeta, small.params};
        float *const want[] = {big.dq, big.dk, big.dv, big.dg, big.dbeta, big.params};
        const size_t count[] = {p.key_size, p.key_size, p.value_size, p.tokens * 2, p.tokens * 2, 64};
        for (int i = 0; i < 6; i++) {
            double *scaled = kernel_test_widened(&test, want[i], count[i]);
            for (size_t l = 0; l < count[i]; l++)
                scaled[l] *= 0x1p-40;
            kernel_test_assert_norm(got[i], scaled, count[i], 1e-6);
        }
        for (size_t t = 0; t < p.tokens; t += 5)
            for (size_t l = 0; l < 64; l++)
                ck_assert_float_eq(big.dq[t * 64 + l] * 0x1p-40f, small.dq[t * 64 + l]);
        kernel_test_close(&test);
    }
}
END_TEST

START_TEST(decay_gradient_of_a_long_row) {
    enum { LENGTH = 8192, DEPTH = 8 };
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu:64"))
        return;
    kernel_test_clear_rows(&test);
    kernel_test_row(&test, KERN_ROW_PROMPT, -1, LENGTH, 0);
    kernel_test_prepare(&test);
    problem p;
    make_problem(&p, &test, 1, DEPTH, DEPTH, 0.9);
    for (int t = 0; t < LENGTH; t++)
        p.g[t] = logf(0.9999f);
    run_forward(&p, (kern_solver){KERN_SOLVE_EXACT, 0, 0}, true);
    gradients d = make_gradients(&p, false);
    run_backward(&p, &d, 1e-5f);
    check_backward(&p, &d, NULL, 1e-3);
    kernel_test_close(&test);
}
END_TEST

// One token repeated with hardly any forgetting: Hk is near to rank one and large.
START_TEST(repeated_token_stays_finite) {
    enum { LENGTH = 3000, DEPTH = 64 };
    static const kern_solver modes[] = {{KERN_SOLVE_TOLERANCE, 30, 1e-4f},
                                        {KERN_SOLVE_STEPS, 30, 0},
                                        {KERN_SOLVE_FIXED, 30, 0},
                                        {KERN_SOLVE_EXACT, 0, 0}};
    for (int m = 0; m < 4; m++) {
        kernel_test test;
        if (!kernel_test_open(&test, _i, "cpu:32"))
            return;
        kernel_test_clear_rows(&test);
        kernel_test_row(&test, KERN_ROW_PROMPT, -1, LENGTH, 0);
        kernel_test_prepare(&test);
        problem p;
        make_problem(&p, &test, 1, DEPTH, DEPTH, 0.9);
        for (int t = 1; t < LENGTH; t++) {
            memcpy(p.q + t * DEPTH, p.q, DEPTH * sizeof(float));
            memcpy(p.k + t * DEPTH, p.k, DEPTH * sizeof(float));
        }
        for (int t = 0; t < LENGTH; t++)
            p.g[t] = -1e-6f;
        run_forward(&p, modes[m], true);
        gradients d = make_gradients(&p, false);
        run_backward(&p, &d, 1e-5f);
        for (size_t i = 0; i < p.value_size; i++)
            ck_assert(isfinite(p.o[i]) && isfinite(d.dq[i]) && isfinite(d.dk[i]) && isfinite(d.dv[i]));
        for (int t = 0; t < LENGTH; t++)
            ck_assert(isfinite(d.dg[t]) && isfinite(d.dbeta[t]) && !(p.report[t].flags & KERN_REPORT_BREAKDOWN));
        kernel_test_close(&test);
    }
}
END_TEST

START_TEST(reports_tell_steps_and_residuals) {
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu:32"))
        return;
    sequence_mixed_rows(&test);
    problem p;
    make_problem(&p, &test, 2, 64, 64, 0.99);
    fill_slots(&p);
    const size_t solves = p.tokens * 2;
    run_forward(&p, (kern_solver){KERN_SOLVE_TOLERANCE, 200, 1e-3f}, false);
    for (size_t i = 0; i < solves; i++)
        ck_assert(p.report[i].flags == 0 && p.report[i].steps < 200 && p.report[i].residual <= 1e-2f);
    run_forward(&p, (kern_solver){KERN_SOLVE_TOLERANCE, 1, 1e-6f}, false);
    size_t unconverged = 0;
    for (size_t i = 0; i < solves; i++)
        unconverged += p.report[i].flags == KERN_REPORT_UNCONVERGED && p.report[i].steps == 1;
    ck_assert_uint_gt(unconverged, solves / 2);
    run_forward(&p, (kern_solver){KERN_SOLVE_FIXED, 7, 0}, false);
    for (size_t i = 0; i < solves; i++)
        ck_assert(p.report[i].steps == 7 && p.report[i].flags == 0);
    for (size_t l = 0; l < 64; l++) // q of token 0, head 1 is zero: solved without a step
        p.q[64 + l] = 0;
    run_forward(&p, (kern_solver){KERN_SOLVE_STEPS, 7, 0}, false);
    ck_assert(p.report[1].steps == 0 && p.report[1].flags == 0 && p.report[1].residual == 0);
    ck_assert_int_eq(p.report[0].steps, 7);
    p.q[0] = NAN;
    run_forward(&p, (kern_solver){KERN_SOLVE_TOLERANCE, 30, 1e-3f}, false);
    ck_assert_int_eq(p.report[0].flags, KERN_REPORT_BREAKDOWN);
    ck_assert(isnan(p.o[0]) && !isnan(p.o[64]));
    run_forward(&p, (kern_solver){KERN_SOLVE_EXACT, 0, 0}, false);
    ck_assert(isnan(p.o[0]));
    kernel_test_close(&test);
}
END_TEST

#ifdef _OPENMP
START_TEST(threads_change_no_bit) {
    float *first[6] = {0};
    size_t count[6] = {0};
    for (int threads = 1; threads <= 3; threads++) {
        omp_set_num_threads(threads);
        kernel_test test;
        if (!kernel_test_open(&test, _i, "cpu:16"))
            return;
        sequence_training_rows(&test);
        problem p;
        make_problem(&p, &test, 3, 40, 40, 0.95);
        run_forward(&p, (kern_solver){KERN_SOLVE_TOLERANCE, 30, 1e-4f}, true);
        gradients d = make_gradients(&p, false);
        run_backward(&p, &d, 1e-5f);
        float *const made[] = {p.o, d.dq, d.dk, d.dv, d.dg, d.params};
        const size_t size[] = {p.value_size, p.key_size, p.key_size, p.value_size, p.tokens * 3, 120};
        for (int i = 0; i < 6; i++) {
            if (threads == 1) {
                count[i] = size[i];
                first[i] = memcpy(malloc(size[i] * sizeof(float)), made[i], size[i] * sizeof(float));
            }
            kernel_test_assert_same(made[i], first[i], count[i]);
        }
        kernel_test_close(&test);
    }
    for (int i = 0; i < 6; i++)
        free(first[i]);
}
END_TEST
#endif

START_TEST(impossible_shapes_are_refused) {
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        return;
    sequence_training_rows(&test);
    problem p;
    make_problem(&p, &test, 1, 8, 8, 0.9);
    kern_mesa_args args = arguments(&p, false);
    args.mesa.key_width = 257;
    kernel_test_assert_refused(&test, KERN_OP_MESA, &args, KERN_UNSUPPORTED);
    args.mesa.key_width = 0;
    kernel_test_assert_refused(&test, KERN_OP_MESA, &args, KERN_INVALID);
    args = arguments(&p, false);
    args.beta.f = NULL;
    kernel_test_assert_refused(&test, KERN_OP_MESA, &args, KERN_INVALID);
    args = arguments(&p, false);
    args.mesa.lambda_bound = NAN;
    kernel_test_assert_refused(&test, KERN_OP_MESA, &args, KERN_INVALID);
    kern_mesa_backward_args backward = {.mesa = p.mesa}; // no operands
    kernel_test_assert_refused(&test, KERN_OP_MESA_BACKWARD, &backward, KERN_INVALID);
    args = arguments(&p, false);
    args.state.f = NULL; // but a row has a slot
    ck_assert_int_eq(kern_reserve(test.device, KERN_OP_MESA, &args), KERN_OK);
    ck_assert_int_eq(kern_launch(test.stream, KERN_OP_MESA, test.rows, &args), KERN_INVALID);
    kernel_test_close(&test);
}
END_TEST

// --------------------------------------------------------------------------------- the reference itself, in double

enum { REF_TOKENS = 9, REF_HEADS = 2, REF_DEPTH = 4, REF_WIDTH = 3 };
enum { REF_KK = REF_HEADS * REF_DEPTH * REF_DEPTH, REF_KV = REF_HEADS * REF_DEPTH * REF_WIDTH };

typedef struct reference_case {
    kern_mesa mesa;
    kern_ref_mesa_inputs in;
    double *half_keys, *values, *d_o, *dkeys, *dvalues; // Hk at the start = half_keys + its transpose
} reference_case;

static void start_keys(const reference_case *c, double *keys) {
    for (int h = 0; h < REF_HEADS; h++)
        for (int i = 0; i < REF_DEPTH; i++)
            for (int j = 0; j < REF_DEPTH; j++)
                keys[(h * REF_DEPTH + i) * REF_DEPTH + j] = c->half_keys[(h * REF_DEPTH + i) * REF_DEPTH + j] +
                                                            c->half_keys[(h * REF_DEPTH + j) * REF_DEPTH + i];
}

static double reference_loss(void *context) {
    const reference_case *c = context;
    double keys[REF_KK], values[REF_KV], o[REF_TOKENS * REF_HEADS * REF_WIDTH];
    const kern_solver exact = {KERN_SOLVE_EXACT, 0, 0};
    start_keys(c, keys);
    memcpy(values, c->values, sizeof values);
    kern_ref_mesa(&c->mesa, REF_TOKENS, &c->in, &exact, keys, values, NULL, o);
    return kernel_test_dot(o, c->d_o, REF_TOKENS * REF_HEADS * REF_WIDTH) + kernel_test_dot(keys, c->dkeys, REF_KK) +
           kernel_test_dot(values, c->dvalues, REF_KV);
}

static double *random_doubles(kernel_test *test, size_t count, double low, double high) {
    return kernel_test_widened(test, kernel_test_floats(test, count, low, high), count);
}

START_TEST(reference_gradients_match_finite_differences) {
    enum { KEYS = REF_TOKENS * REF_HEADS * REF_DEPTH, VALUES = REF_TOKENS * REF_HEADS * REF_WIDTH };
    enum { GATES = REF_TOKENS * REF_HEADS, PARAMS = REF_HEADS * REF_DEPTH };
    kernel_test test = {.seed = 5};
    static const unsigned char begins[REF_TOKENS] = {0, 0, 0, 0, 1, 0, 0, 0, 0};
    double *q = random_doubles(&test, KEYS, -1, 1), *k = random_doubles(&test, KEYS, -1, 1);
    double *v = random_doubles(&test, VALUES, -1, 1), *g = random_doubles(&test, GATES, -0.5, 0);
    double *beta = random_doubles(&test, GATES, 0.1, 0.9), *params = random_doubles(&test, PARAMS, -1, 1);
    for (int documents = 0; documents < 2; documents++) {
        reference_case c = {
            .mesa = {.heads = REF_HEADS, .key_width = REF_DEPTH, .value_width = REF_WIDTH, .lambda_bound = 0.25f},
            .in = {q, k, v, g, beta, params, documents ? begins : NULL},
            .half_keys = random_doubles(&test, REF_KK, -0.1, 0.1),
            .values = random_doubles(&test, REF_KV, -1, 1),
            .d_o = random_doubles(&test, VALUES, -1, 1),
            .dkeys = random_doubles(&test, REF_KK, -1, 1),
            .dvalues = random_doubles(&test, REF_KV, -1, 1)};
        for (int i = 0; i < PARAMS; i++)
            c.half_keys[i * REF_DEPTH + i % REF_DEPTH] += 1;
        double keys[REF_KK], dkeys[REF_KK], dvalues[REF_KV], symmetric[REF_KK];
        double dq[KEYS], dk[KEYS], dv[VALUES], dg[GATES], dbeta[GATES], dparams[PARAMS];
        const kern_ref_mesa_gradients out = {dq, dk, dv, dg, dbeta, dparams, dkeys, dvalues};
        start_keys(&c, keys);
        memcpy(dkeys, c.dkeys, sizeof dkeys);
        memcpy(dvalues, c.dvalues, sizeof dvalues);
        kern_ref_mesa_backward(&c.mesa, REF_TOKENS, &c.in, keys, c.values, c.d_o, &out);
        for (int i = 0; i < PARAMS; i++)
            for (int j = 0; j < REF_DEPTH; j++)
                symmetric[i * REF_DEPTH + j] =
                    dkeys[i * REF_DEPTH + j] + dkeys[(i / REF_DEPTH * REF_DEPTH + j) * REF_DEPTH + i % REF_DEPTH];
        kernel_test_gradient("q", reference_loss, &c, q, dq, KEYS, 1e-8);
        kernel_test_gradient("k", reference_loss, &c, k, dk, KEYS, 1e-8);
        kernel_test_gradient("v", reference_loss, &c, v, dv, VALUES, 1e-8);
        kernel_test_gradient("g", reference_loss, &c, g, dg, GATES, 1e-8);
        kernel_test_gradient("beta", reference_loss, &c, beta, dbeta, GATES, 1e-8);
        kernel_test_gradient("lambda_params", reference_loss, &c, params, dparams, PARAMS, 1e-8);
        kernel_test_gradient("keys", reference_loss, &c, c.half_keys, symmetric, REF_KK, 1e-8);
        kernel_test_gradient("values", reference_loss, &c, c.values, dvalues, REF_KV, 1e-8);
    }
    for (int i = 0; i < test.memories; i++)
        free(test.memory[i].host);
}
END_TEST

static Suite *mesa_suite(void) {
    Suite *suite = suite_create("mesa");
    TCase *tcase = tcase_create("every instruction set");
    tcase_set_timeout(tcase, 120);
    tcase_add_loop_test(tcase, forward_matches_reference, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tcase, chunk_equals_step, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tcase, keys_state_stays_symmetric, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tcase, row_alone_equals_row_among_others, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tcase, cut_prefill_equals_prefill_at_once, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tcase, backward_matches_reference, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tcase, backward_of_odd_lengths, 0, KERNEL_TEST_DEVICES);
    tcase_add_test(tcase, fast_backward_of_odd_lengths);
    tcase_add_loop_test(tcase, packed_documents_equal_documents_alone, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tcase, scaled_loss_scales_gradients, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tcase, decay_gradient_of_a_long_row, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tcase, repeated_token_stays_finite, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tcase, reports_tell_steps_and_residuals, 0, KERNEL_TEST_DEVICES);
#ifdef _OPENMP
    tcase_add_loop_test(tcase, threads_change_no_bit, 0, KERNEL_TEST_ISAS);
#endif
    tcase_add_loop_test(tcase, impossible_shapes_are_refused, 0, KERNEL_TEST_ISAS);
    suite_add_tcase(suite, tcase);
    tcase = tcase_create("reference");
    tcase_add_test(tcase, reference_gradients_match_finite_differences);
    suite_add_tcase(suite, tcase);
    return suite;
}

MESA_TEST_MAIN(mesa_suite)
