// SPDX-License-Identifier: Apache-2.0
// The recurrence family: chunk and step forms against the double reference for every decay, weight and head map that is
// run; backward against reference and finite differences; documents, slots, independence of neighbours, cuts and
// threads.
#ifdef _OPENMP
#include <omp.h>
#endif

#include "kernels/ref/recurrence.h"
#include "tests/kernels/sequence_test.h"

enum { SLOTS = 4 };

typedef struct problem {
    kernel_test *test;
    kern_recurrence family;
    size_t tokens, key_row, value_row, state_size; // floats of a token's q and v, of a slot
    float *q, *k, *v, *g, *beta, *o, *snapshots, *slots, *slots_before;
} problem;

static void make_problem(problem *p, kernel_test *test, kern_recurrence family, double gamma_low) {
    const size_t tokens = (size_t)test->rows->n_tokens, h = (size_t)family.heads;
    *p = (problem){.test = test, .family = family, .tokens = tokens};
    p->key_row = (size_t)(family.key_heads * family.key_width);
    p->value_row = h * (size_t)family.value_width;
    p->state_size = p->value_row * (size_t)family.key_width;
    p->q = sequence_keys(test, tokens * (size_t)family.key_heads, family.key_width);
    p->k = sequence_keys(test, tokens * (size_t)family.key_heads, family.key_width);
    p->v = kernel_test_floats(test, tokens * p->value_row, -1, 1);
    p->g = sequence_decays(test, tokens * h, gamma_low, 1);
    p->beta = kernel_test_floats(test, tokens * h, 0.1, 0.95);
    p->o = kernel_test_zero_floats(test, tokens * p->value_row);
    p->snapshots = kernel_test_zero_floats(test, (size_t)test->rows->n_chunks * p->state_size);
    p->slots = kernel_test_floats(test, SLOTS * p->state_size, -1, 1);
    p->slots_before = kernel_test_copy(test, p->slots, SLOTS * p->state_size);
    test->rows->slot_stride = p->state_size * sizeof(float);
}

static kern_recurrence_args arguments(const problem *p, bool snapshots) {
    return (kern_recurrence_args){.q.f = p->q,
                                  .k.f = p->k,
                                  .v.f = p->v,
                                  .g.f = p->family.decay == KERN_DECAY_NONE ? NULL : p->g,
                                  .beta.f = p->family.weighted ? p->beta : NULL,
                                  .state.f = p->slots,
                                  .o.f = p->o,
                                  .snapshots.f = snapshots ? p->snapshots : NULL,
                                  .family = p->family};
}

static void run_forward(problem *p, bool snapshots) {
    kern_recurrence_args args = arguments(p, snapshots);
    kernel_test_launch(p->test, KERN_OP_RECURRENCE, &args);
}

static kern_ref_recurrence_inputs reference_inputs(const problem *p, const kern_row *row) {
    kernel_test *test = p->test;
    const size_t h = (size_t)p->family.heads, first = (size_t)row->token0, n = (size_t)row->length;
    const bool per_head = p->family.decay == KERN_DECAY_HEAD;
    return (kern_ref_recurrence_inputs){.q = kernel_test_widened(test, p->q + first * p->key_row, n * p->key_row),
                                        .k = kernel_test_widened(test, p->k + first * p->key_row, n * p->key_row),
                                        .v = kernel_test_widened(test, p->v + first * p->value_row, n * p->value_row),
                                        .g = per_head ? kernel_test_widened(test, p->g, h)
                                                      : kernel_test_widened(test, p->g + first * h, n * h),
                                        .beta = kernel_test_widened(test, p->beta + first * h, n * h),
                                        .begins = sequence_begins(test, row)};
}

static void check_forward(problem *p, double tolerance) {
    kernel_test *test = p->test;
    for (int r = 0; r < test->rows->n_rows; r++) {
        const kern_row *row = &test->rows->row[r];
        const size_t n = (size_t)row->length, first = (size_t)row->token0;
        kern_ref_recurrence_inputs in = reference_inputs(p, row);
        double *state = kernel_test_zero_doubles(test, p->state_size), *o = NULL;
        if (row->slot >= 0)
            state = kernel_test_widened(test, p->slots_before + (size_t)row->slot * p->state_size, p->state_size);
        o = kernel_test_zero_doubles(test, n * p->value_row);
        kern_ref_recurrence(&p->family, row->length, &in, state, o);
        kernel_test_assert_norm(p->o + first * p->value_row, o, n * p->value_row, tolerance);
        if (row->slot >= 0)
            kernel_test_assert_norm(p->slots + (size_t)row->slot * p->state_size, state, p->state_size, tolerance);
    }
}

// decay, update, weighted, heads, key heads, D, V, scale
static const kern_recurrence families[] = {
    {KERN_DECAY_SCALAR, KERN_UPDATE_ADD, 1, 2, 2, 64, 64, 1},
    {KERN_DECAY_SCALAR, KERN_UPDATE_ADD, 0, 4, 2, 16, 40, 0.25f},
    {KERN_DECAY_SCALAR, KERN_UPDATE_ADD, 1, 3, 1, 128, 24, 1},
    {KERN_DECAY_HEAD, KERN_UPDATE_ADD, 0, 2, 2, 32, 64, 0.18f},
    {KERN_DECAY_NONE, KERN_UPDATE_ADD, 0, 2, 1, 7, 5, 0.4f},
    {KERN_DECAY_NONE, KERN_UPDATE_ADD, 1, 1, 1, 24, 100, 1},
};
enum { FAMILIES = sizeof families / sizeof families[0] };

START_TEST(forward_matches_reference) {
    for (int family = 0; family < FAMILIES; family++)
        for (int device = 0; device < SEQUENCE_DEVICES; device++) {
            kernel_test test;
            if (!kernel_test_open(&test, _i, sequence_devices[device]))
                return;
            sequence_mixed_rows(&test);
            problem p;
            make_problem(&p, &test, families[family], 0.8);
            run_forward(&p, device == 0);
            check_forward(&p, 1e-6);
            kernel_test_close(&test);
        }
}
END_TEST

// Decays from almost 1 to far below the smallest float, next to each other.
START_TEST(extreme_decays_are_exact) {
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu:64"))
        return;
    sequence_mixed_rows(&test);
    problem p;
    make_problem(&p, &test, families[0], 0.8);
    static const float decays[] = {-1e-7f, -200, -0.01f, -3000, -1e-5f, -60, -0.5f};
    for (size_t t = 0; t < p.tokens * 2; t++)
        p.g[t] = decays[t * 31 % 7];
    run_forward(&p, true);
    check_forward(&p, 1e-6);
    kernel_test_close(&test);
}
END_TEST

// The same row alone and among 2 x 15 others.
static void run_among(problem *p, kernel_test *test, kern_row_kind kind, int before) {
    enum { LENGTH = 75 };
    kernel_test_clear_rows(test);
    for (int r = 0; r < before; r++)
        kernel_test_row(test, KERN_ROW_GENERATED, 2, 1 + r % 3, 5);
    kern_row *row = kernel_test_row(test, kind, 1, LENGTH, 3);
    for (int r = 0; r < before; r++)
        kernel_test_row(test, KERN_ROW_PROMPT, -1, 7 + 5 * r, r);
    kernel_test_prepare(test);
    const size_t first = (size_t)row->token0;
    test->seed = (uint64_t)before + 7;
    make_problem(p, test, families[1], 0.9);
    test->seed = 99; // the row's own data
    float *keys = sequence_keys(test, 2 * LENGTH * 2, 16), *values = kernel_test_floats(test, LENGTH * 160, -1, 1);
    memcpy(p->q + first * p->key_row, keys, LENGTH * p->key_row * sizeof(float));
    memcpy(p->k + first * p->key_row, keys + LENGTH * p->key_row, LENGTH * p->key_row * sizeof(float));
    memcpy(p->v + first * p->value_row, values, LENGTH * p->value_row * sizeof(float));
    for (size_t i = 0; i < LENGTH * 4; i++)
        p->g[first * 4 + i] = -fabsf(values[i]);
    for (size_t i = 0; i < p->state_size; i++)
        p->slots[p->state_size + i] = values[i];
    run_forward(p, false);
    memmove(p->o, p->o + first * p->value_row, LENGTH * p->value_row * sizeof(float));
}

START_TEST(row_alone_equals_row_among_others) {
    for (int kind = KERN_ROW_GENERATED; kind <= KERN_ROW_PROMPT; kind++) {
        kernel_test test;
        if (!kernel_test_open(&test, _i, "cpu:32"))
            return;
        problem alone, among;
        run_among(&alone, &test, kind, 0);
        run_among(&among, &test, kind, 15);
        kernel_test_assert_same(among.o, alone.o, 75 * alone.value_row);
        kernel_test_assert_same(among.slots + among.state_size, alone.slots + alone.state_size, alone.state_size);
        kernel_test_close(&test);
    }
}
END_TEST

static void run_part(problem *p, int slot, size_t from, size_t to) {
    kernel_test_clear_rows(p->test);
    kernel_test_row(p->test, KERN_ROW_PROMPT, slot, (int32_t)(to - from), (int64_t)from);
    kernel_test_prepare(p->test);
    kern_recurrence_args args = arguments(p, false);
    args.q.f += from * p->key_row;
    args.k.f += from * p->key_row;
    args.v.f += from * p->value_row;
    args.g.f += from * (size_t)p->family.heads;
    args.beta.f += from * (size_t)p->family.heads;
    args.o.f += from * p->value_row;
    kernel_test_launch(p->test, KERN_OP_RECURRENCE, &args);
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
    make_problem(&p, &test, families[0], 0.9);
    run_part(&p, 0, 0, LENGTH);
    float *o = kernel_test_copy(&test, p.o, p.tokens * p.value_row);
    for (size_t cut = CHUNK; cut < LENGTH; cut += CHUNK) {
        memset(p.o, 0, p.tokens * p.value_row * sizeof(float));
        memcpy(p.slots + 3 * p.state_size, p.slots_before, p.state_size * sizeof(float));
        run_part(&p, 3, 0, cut);
        run_part(&p, 3, cut, LENGTH);
        kernel_test_assert_same(p.o, o, p.tokens * p.value_row);
        kernel_test_assert_same(p.slots, p.slots + 3 * p.state_size, p.state_size);
    }
    kernel_test_close(&test);
}
END_TEST

// ---------------------------------------------------------------------------------------------------------- backward

typedef struct gradients {
    float *d_o, *dq, *dk, *dv, *dg, *dbeta, *dstate;
} gradients;

static gradients make_gradients(problem *p) {
    kernel_test *test = p->test;
    const size_t gates = p->tokens * (size_t)p->family.heads;
    return (gradients){.d_o = kernel_test_floats(test, p->tokens * p->value_row, -1, 1),
                       .dq = kernel_test_zero_floats(test, p->tokens * p->key_row),
                       .dk = kernel_test_zero_floats(test, p->tokens * p->key_row),
                       .dv = kernel_test_zero_floats(test, p->tokens * p->value_row),
                       .dg = kernel_test_zero_floats(test, gates),
                       .dbeta = kernel_test_zero_floats(test, gates)};
}

static kern_recurrence_backward_args backward_arguments(const problem *p, const gradients *d) {
    return (kern_recurrence_backward_args){.q.f = p->q,
                                           .k.f = p->k,
                                           .v.f = p->v,
                                           .g.f = p->family.decay == KERN_DECAY_NONE ? NULL : p->g,
                                           .beta.f = p->family.weighted ? p->beta : NULL,
                                           .snapshots.f = p->snapshots,
                                           .d_o.f = d->d_o,
                                           .dq.f = d->dq,
                                           .dk.f = d->dk,
                                           .dv.f = d->dv,
                                           .dg.f = p->family.decay == KERN_DECAY_SCALAR ? d->dg : NULL,
                                           .dbeta.f = p->family.weighted ? d->dbeta : NULL,
                                           .dstate.f = d->dstate,
                                           .family = p->family};
}

static void run_backward(problem *p, const gradients *d) {
    kern_recurrence_backward_args args = backward_arguments(p, d);
    kernel_test_launch(p->test, KERN_OP_RECURRENCE_BACKWARD, &args);
}

static void check_backward(problem *p, const gradients *d, const float *dstate_before, double tolerance,
                           double decay_tolerance) {
    kernel_test *test = p->test;
    const size_t h = (size_t)p->family.heads;
    for (int r = 0; r < test->rows->n_rows; r++) {
        const kern_row *row = &test->rows->row[r];
        const size_t n = (size_t)row->length, first = (size_t)row->token0;
        kern_ref_recurrence_inputs in = reference_inputs(p, row);
        const double *state = NULL;
        if (row->slot >= 0)
            state = kernel_test_widened(test, p->slots_before + (size_t)row->slot * p->state_size, p->state_size);
        kern_ref_recurrence_gradients want = {.dq = kernel_test_zero_doubles(test, n * p->key_row),
                                              .dk = kernel_test_zero_doubles(test, n * p->key_row),
                                              .dv = kernel_test_zero_doubles(test, n * p->value_row),
                                              .dg = kernel_test_zero_doubles(test, n * h),
                                              .dbeta = kernel_test_zero_doubles(test, n * h)};
        if (dstate_before)
            want.dstate = kernel_test_widened(test, dstate_before + (size_t)r * p->state_size, p->state_size);
        kern_ref_recurrence_backward(&p->family, row->length, &in, state,
                                     kernel_test_widened(test, d->d_o + first * p->value_row, n * p->value_row), &want);
        kernel_test_assert_norm(d->dq + first * p->key_row, want.dq, n * p->key_row, tolerance);
        kernel_test_assert_norm(d->dk + first * p->key_row, want.dk, n * p->key_row, tolerance);
        kernel_test_assert_norm(d->dv + first * p->value_row, want.dv, n * p->value_row, tolerance);
        if (p->family.decay == KERN_DECAY_SCALAR)
            kernel_test_assert_norm(d->dg + first * h, want.dg, n * h, decay_tolerance);
        if (p->family.weighted)
            kernel_test_assert_norm(d->dbeta + first * h, want.dbeta, n * h, tolerance);
        if (dstate_before)
            kernel_test_assert_norm(d->dstate + (size_t)r * p->state_size, want.dstate, p->state_size, tolerance);
    }
}

static void training_rows(kernel_test *test) {
    kernel_test_clear_rows(test);
    kernel_test_row(test, KERN_ROW_PROMPT, -1, 150, 0);
    kernel_test_row(test, KERN_ROW_PROMPT, 1, 100, 21);
    kernel_test_row(test, KERN_ROW_PROMPT, -1, 200, 0);
    kernel_test_boundary(test, 1);
    kernel_test_boundary(test, 3);
    kernel_test_boundary(test, 64);
    kernel_test_boundary(test, 67);
    kernel_test_boundary(test, 131);
    kernel_test_prepare(test);
}

START_TEST(backward_matches_reference) {
    for (int family = 0; family < FAMILIES; family++)
        for (int device = 0; device < SEQUENCE_DEVICES; device++) {
            kernel_test test;
            if (!kernel_test_open(&test, _i, sequence_devices[device]))
                return;
            training_rows(&test);
            problem p;
            make_problem(&p, &test, families[family], 0.8);
            run_forward(&p, true);
            gradients d = make_gradients(&p);
            float *before = NULL;
            if (device != 1) {
                d.dstate = kernel_test_floats(&test, 3 * p.state_size, -1, 1);
                before = kernel_test_copy(&test, d.dstate, 3 * p.state_size);
            }
            run_backward(&p, &d);
            check_backward(&p, &d, before, 2e-6, 1e-5);
            kernel_test_close(&test);
        }
}
END_TEST

START_TEST(packed_documents_equal_documents_alone) {
    static const int lengths[] = {1, 2, 3, 63, 64, 65, 130};
    enum { DOCUMENTS = 7 };
    for (int device = 0; device < SEQUENCE_DEVICES; device++) {
        kernel_test test;
        if (!kernel_test_open(&test, _i, sequence_devices[device]))
            return;
        problem packed, alone;
        kernel_test_clear_rows(&test);
        kernel_test_row(&test, KERN_ROW_PROMPT, -1, 328, 0);
        for (int i = 0, at = 0; i + 1 < DOCUMENTS; i++)
            kernel_test_boundary(&test, at += lengths[i]);
        kernel_test_prepare(&test);
        make_problem(&packed, &test, families[2], 0.9);
        run_forward(&packed, true);
        gradients all = make_gradients(&packed);
        run_backward(&packed, &all);
        const size_t keys = packed.key_row, values = packed.value_row, h = 3;
        size_t at = 0;
        for (int i = 0; i < DOCUMENTS; i++) {
            const size_t n = (size_t)lengths[i];
            kernel_test_clear_rows(&test);
            kernel_test_row(&test, KERN_ROW_PROMPT, -1, lengths[i], 0);
            kernel_test_prepare(&test);
            make_problem(&alone, &test, families[2], 0.9);
            memcpy(alone.q, packed.q + at * keys, n * keys * sizeof(float));
            memcpy(alone.k, packed.k + at * keys, n * keys * sizeof(float));
            memcpy(alone.v, packed.v + at * values, n * values * sizeof(float));
            memcpy(alone.g, packed.g + at * h, n * h * sizeof(float));
            memcpy(alone.beta, packed.beta + at * h, n * h * sizeof(float));
            run_forward(&alone, true);
            gradients one = make_gradients(&alone);
            memcpy(one.d_o, all.d_o + at * values, n * values * sizeof(float));
            run_backward(&alone, &one);
            kernel_test_assert_norm(packed.o + at * values, kernel_test_widened(&test, alone.o, n * values), n * values,
                                    1e-6);
            kernel_test_assert_norm(all.dq + at * keys, kernel_test_widened(&test, one.dq, n * keys), n * keys, 1e-6);
            kernel_test_assert_norm(all.dk + at * keys, kernel_test_widened(&test, one.dk, n * keys), n * keys, 1e-6);
            kernel_test_assert_norm(all.dv + at * values, kernel_test_widened(&test, one.dv, n * values), n * values,
                                    1e-6);
            kernel_test_assert_norm(all.dbeta + at * h, kernel_test_widened(&test, one.dbeta, n * h), n * h, 2e-6);
            kernel_test_assert_norm(all.dg + at * h, kernel_test_widened(&test, one.dg, n * h), n * h, 5e-6);
            for (size_t l = 0; l < h; l++)
                ck_assert_float_eq(all.dg[at * h + l], 0);
            at += n;
        }
        kernel_test_close(&test);
    }
}
END_TEST

START_TEST(decay_gradient_of_a_long_row) {
    enum { LENGTH = 8192 };
    for (int device = 0; device < SEQUENCE_DEVICES; device++) {
        kernel_test test;
        if (!kernel_test_open(&test, _i, sequence_devices[device]))
            return;
        kernel_test_clear_rows(&test);
        kernel_test_row(&test, KERN_ROW_PROMPT, -1, LENGTH, 0);
        kernel_test_prepare(&test);
        problem p;
        make_problem(&p, &test, (kern_recurrence){KERN_DECAY_SCALAR, KERN_UPDATE_ADD, 1, 1, 1, 8, 8, 1}, 0.9);
        for (int t = 0; t < LENGTH; t++)
            p.g[t] = logf(0.9999f);
        run_forward(&p, true);
        gradients d = make_gradients(&p);
        run_backward(&p, &d);
        check_backward(&p, &d, NULL, 1e-5, 1e-4);
        kernel_test_close(&test);
    }
}
END_TEST

#ifdef _OPENMP
START_TEST(threads_change_no_bit) {
    float *o = NULL, *dk = NULL, *dg = NULL;
    for (int threads = 1; threads <= 3; threads++) {
        omp_set_num_threads(threads);
        kernel_test test;
        if (!kernel_test_open(&test, _i, "cpu:16"))
            return;
        training_rows(&test);
        problem p;
        make_problem(&p, &test, families[1], 0.95);
        run_forward(&p, true);
        gradients d = make_gradients(&p);
        run_backward(&p, &d);
        const size_t values = p.tokens * p.value_row, keys = p.tokens * p.key_row, gates = p.tokens * 4;
        if (threads == 1) {
            o = memcpy(kernel_test_zeros(values), p.o, values * sizeof(float));
            dk = memcpy(kernel_test_zeros(keys), d.dk, keys * sizeof(float));
            dg = memcpy(kernel_test_zeros(gates), d.dg, gates * sizeof(float));
        }
        kernel_test_assert_same(p.o, o, values);
        kernel_test_assert_same(d.dk, dk, keys);
        kernel_test_assert_same(d.dg, dg, gates);
        kernel_test_close(&test);
    }
    free(o);
    free(dk);
    free(dg);
}
END_TEST
#endif

START_TEST(impossible_shapes_are_refused) {
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        return;
    training_rows(&test);
    problem p;
    make_problem(&p, &test, families[0], 0.9);
    gradients d = make_gradients(&p);
    kern_recurrence_args args = arguments(&p, false);
    args.family.decay = KERN_DECAY_CHANNEL;
    kernel_test_assert_refused(&test, KERN_OP_RECURRENCE, &args, KERN_UNSUPPORTED);
    args = arguments(&p, false);
    args.family.update = KERN_UPDATE_DELTA;
    kernel_test_assert_refused(&test, KERN_OP_RECURRENCE, &args, KERN_UNSUPPORTED);
    args = arguments(&p, false);
    args.family.heads = 3;
    kernel_test_assert_refused(&test, KERN_OP_RECURRENCE, &args, KERN_INVALID);
    args = arguments(&p, false);
    args.beta.f = NULL;
    kernel_test_assert_refused(&test, KERN_OP_RECURRENCE, &args, KERN_INVALID);
    kern_recurrence_backward_args backward = backward_arguments(&p, &d);
    backward.dg.f = NULL;
    kernel_test_assert_refused(&test, KERN_OP_RECURRENCE_BACKWARD, &backward, KERN_INVALID);
    backward = backward_arguments(&p, &d);
    backward.family.update = KERN_UPDATE_DELTA;
    kernel_test_assert_refused(&test, KERN_OP_RECURRENCE_BACKWARD, &backward, KERN_UNSUPPORTED);
    run_forward(&p, true);
    p.v[3] = NAN;
    run_forward(&p, false);
    ck_assert(isnan(p.o[3]) && !isnan(p.o[64 + 3]));
    kernel_test_close(&test);
}
END_TEST

// ---------------------------------------------------------------------------------- the reference itself, in double

enum { REF_TOKENS = 9 };

typedef struct reference_case {
    kern_recurrence family;
    kern_ref_recurrence_inputs in;
    double *state, *d_o, *dstate;
    size_t state_size, value_size;
} reference_case;

static double reference_loss(void *context) {
    const reference_case *c = context;
    double state[64], o[REF_TOKENS * 16];
    memcpy(state, c->state, c->state_size * sizeof(double));
    kern_ref_recurrence(&c->family, REF_TOKENS, &c->in, state, o);
    return kernel_test_dot(o, c->d_o, c->value_size) + kernel_test_dot(state, c->dstate, c->state_size);
}

static double *random_doubles(kernel_test *test, size_t count, double low, double high) {
    return kernel_test_widened(test, kernel_test_floats(test, count, low, high), count);
}

START_TEST(reference_gradients_match_finite_differences) {
    enum { HEADS = 4, KEY_HEADS = 2, DEPTH = 4, WIDTH = 3, KEYS = REF_TOKENS * 8, VALUES = REF_TOKENS * 12 };
    enum { GATES = REF_TOKENS * HEADS, STATE = HEADS * DEPTH * WIDTH };
    static const unsigned char begins[REF_TOKENS] = {0, 0, 0, 0, 1, 0, 0, 0, 0};
    kernel_test test = {.seed = 5};
    for (int weighted = 0; weighted < 2; weighted++)
        for (int documents = 0; documents < 2; documents++) {
            double *q = random_doubles(&test, KEYS, -1, 1), *k = random_doubles(&test, KEYS, -1, 1);
            double *v = random_doubles(&test, VALUES, -1, 1), *g = random_doubles(&test, GATES, -0.5, 0);
            double *beta = random_doubles(&test, GATES, 0.1, 0.9);
            reference_case c = {
                .family = {KERN_DECAY_SCALAR, KERN_UPDATE_ADD, weighted, HEADS, KEY_HEADS, DEPTH, WIDTH, 0.5f},
                .in = {q, k, v, g, beta, documents ? begins : NULL},
                .state = random_doubles(&test, STATE, -1, 1),
                .d_o = random_doubles(&test, VALUES, -1, 1),
                .dstate = random_doubles(&test, STATE, -1, 1),
                .state_size = STATE,
                .value_size = VALUES};
            double dq[KEYS], dk[KEYS], dv[VALUES], dg[GATES], dbeta[GATES], dstate[STATE];
            const kern_ref_recurrence_gradients out = {dq, dk, dv, dg, dbeta, dstate};
            memcpy(dstate, c.dstate, sizeof dstate);
            kern_ref_recurrence_backward(&c.family, REF_TOKENS, &c.in, c.state, c.d_o, &out);
            kernel_test_gradient("q", reference_loss, &c, q, dq, KEYS, 1e-8);
            kernel_test_gradient("k", reference_loss, &c, k, dk, KEYS, 1e-8);
            kernel_test_gradient("v", reference_loss, &c, v, dv, VALUES, 1e-8);
            kernel_test_gradient("g", reference_loss, &c, g, dg, GATES, 1e-8);
            if (weighted)
                kernel_test_gradient("beta", reference_loss, &c, beta, dbeta, GATES, 1e-8);
            kernel_test_gradient("state", reference_loss, &c, c.state, dstate, STATE, 1e-8);
        }
    for (int i = 0; i < test.memories; i++)
        free(test.memory[i]);
}
END_TEST

static Suite *recurrence_suite(void) {
    Suite *suite = suite_create("recurrence");
    TCase *tcase = tcase_create("every instruction set");
    tcase_set_timeout(tcase, 120);
    tcase_add_loop_test(tcase, forward_matches_reference, 0, KERNEL_TEST_ISAS);
    tcase_add_loop_test(tcase, extreme_decays_are_exact, 0, KERNEL_TEST_ISAS);
    tcase_add_loop_test(tcase, row_alone_equals_row_among_others, 0, KERNEL_TEST_ISAS);
    tcase_add_loop_test(tcase, cut_prefill_equals_prefill_at_once, 0, KERNEL_TEST_ISAS);
    tcase_add_loop_test(tcase, backward_matches_reference, 0, KERNEL_TEST_ISAS);
    tcase_add_loop_test(tcase, packed_documents_equal_documents_alone, 0, KERNEL_TEST_ISAS);
    tcase_add_loop_test(tcase, decay_gradient_of_a_long_row, 0, KERNEL_TEST_ISAS);
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

MESA_TEST_MAIN(recurrence_suite)
