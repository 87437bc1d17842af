// SPDX-License-Identifier: Apache-2.0
// A Mesa layer's core as a problem: operands, states as a prefix would leave them, the launch, the double reference.
//
// Slots are floats here whatever the storage; run_forward puts them into the layout that the operation wants and takes
// them back, which changes nothing that was stored before. Memory is kept by the kernel_test and freed with it.
#ifndef TESTS_KERNELS_MESA_PROBLEM_H
#define TESTS_KERNELS_MESA_PROBLEM_H

#include "kernels/ref/mesa.h"
#include "tests/kernels/sequence_test.h"

enum { SLOTS = 4 };

typedef struct problem {
    kernel_test *test;
    kern_mesa mesa;
    size_t tokens, key_size, value_size, slot_size; // of q, of v, floats of a slot
    int slot_count;
    float *q, *k, *v, *g, *beta, *params, *o, *x, *snapshots, *slots, *slots_before;
    kern_solve_report *report;
} problem;

static inline void make_slots(problem *p, int count) {
    p->slot_count = count;
    p->slots = kernel_test_zero_floats(p->test, (size_t)count * p->slot_size);
    p->test->rows->slot_stride = p->slot_size * sizeof(float);
}

static inline void make_problem(problem *p, kernel_test *test, int heads, int depth, int width, double gamma_low) {
    const size_t h = (size_t)heads, tokens = (size_t)test->rows->n_tokens;
    *p = (problem){.test = test, .tokens = tokens};
    p->mesa = (kern_mesa){.heads = heads, .key_width = depth, .value_width = width, .lambda_bound = 0.25f};
    p->key_size = tokens * h * (size_t)depth;
    p->value_size = tokens * h * (size_t)width;
    p->slot_size = h * (size_t)(depth * (depth + width));
    p->q = sequence_keys(test, tokens * h, depth);
    p->k = sequence_keys(test, tokens * h, depth);
    p->v = kernel_test_floats(test, p->value_size, -1, 1);
    p->g = sequence_decays(test, tokens * h, gamma_low, 1);
    p->beta = kernel_test_floats(test, tokens * h, 0.1, 0.95);
    p->params = kernel_test_floats(test, h * (size_t)depth, -2, 2);
    p->o = kernel_test_zero_floats(test, p->value_size);
    p->x = kernel_test_zero_floats(test, p->key_size);
    p->report = kernel_test_bytes(test, tokens * h * sizeof *p->report);
    p->snapshots = kernel_test_zero_floats(test, (size_t)test->rows->n_chunks * p->slot_size);
    make_slots(p, SLOTS);
}

// ------------------------------------------------------------------------------------------------------------- states

// The bfloat16 towards zero.
static inline float cut_to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits &= 0xFFFF0000u;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline void fill_slot(problem *p, float *slot) {
    const int depth = p->mesa.key_width, heads = p->mesa.heads;
    for (int h = 0; h < heads; h++) {
        float *hk = slot + (size_t)(h * depth * depth), *keys = sequence_keys(p->test, 12, depth);
        for (int i = 0; i < depth; i++)
            for (int j = 0; j < depth; j++)
                for (int n = 0; n < 12; n++)
                    hk[i * depth + j] += 0.5f * (keys[n * depth + i] * keys[n * depth + j]);
    }
    for (size_t i = (size_t)(heads * depth * depth); i < p->slot_size; i++)
        slot[i] = (float)(kernel_test_uniform(p->test) - 0.5);
}

// States as a real prefix would leave them: Hk = sum of w k k^T, Hv random. From SLOTS on multiples of these.
static inline void fill_slots(problem *p) {
    for (int s = 0; s < p->slot_count; s++) {
        float *slot = p->slots + (size_t)s * p->slot_size;
        if (s < SLOTS)
            fill_slot(p, slot);
        for (size_t i = 0; i < p->slot_size && s >= SLOTS; i++)
            slot[i] = p->slots[(size_t)(s % SLOTS) * p->slot_size + i] * (1 + (float)s / 64);
    }
    const size_t keys = (size_t)(p->mesa.heads * p->mesa.key_width * p->mesa.key_width);
    for (size_t i = 0; i < (size_t)p->slot_count * p->slot_size && p->mesa.storage == KERN_STORE_BF16; i++)
        if (i % p->slot_size >= keys)
            p->slots[i] = cut_to_bf16(p->slots[i]);
    p->slots_before = kernel_test_copy(p->test, p->slots, (size_t)p->slot_count * p->slot_size);
}

// kern_mesa_args, state: floats of a triangle, bytes of a slot in bf16 (on a boundary that suits every backend).
static inline size_t triangle_floats(const kern_mesa *mesa) {
    return (size_t)((mesa->key_width * (mesa->key_width + 1) / 2 + 3) / 4 * 4);
}
static inline size_t stored_slot_bytes(const kern_mesa *mesa) {
    const size_t values = (size_t)(mesa->key_width * mesa->value_width) * sizeof(uint16_t);
    return ((size_t)mesa->heads * (triangle_floats(mesa) * sizeof(float) + values) + 255) / 256 * 256;
}

// A slot between floats and KERN_STORE_BF16; store: towards `stored`.
static inline void convert_slot(const kern_mesa *mesa, float *slot, char *stored, bool store) {
    const int depth = mesa->key_width;
    for (int h = 0; h < mesa->heads; h++) {
        float *hk = slot + (size_t)(h * depth * depth), *next = (float *)stored + (size_t)h * triangle_floats(mesa);
        for (int first = 0; first < depth; first += 8)
            for (int block = 0; block < 2; block++)
                for (int i = first; i < depth && i < first + 8; i++)
                    for (int j = block ? first : 0; j < (block ? i + 1 : first); j++, next++)
                        if (store)
                            *next = hk[i * depth + j];
                        else
                            hk[i * depth + j] = hk[j * depth + i] = *next;
    }
    float *hv = slot + (size_t)(mesa->heads * depth * depth);
    char *value = stored + (size_t)mesa->heads * triangle_floats(mesa) * sizeof(float);
    for (size_t i = 0; i < (size_t)(mesa->heads * depth * mesa->value_width); i++) {
        uint32_t bits;
        memcpy(&bits, hv + i, sizeof bits);
        uint16_t high = (uint16_t)(bits >> 16);
        if (store)
            memcpy(value + i * sizeof high, &high, sizeof high);
        else
            memcpy(&high, value + i * sizeof high, sizeof high);
        bits = (uint32_t)high << 16;
        memcpy(hv + i, &bits, sizeof bits);
    }
}

// ------------------------------------------------------------------------------------------------------------- launch

static inline kern_mesa_args arguments(const problem *p, bool snapshots) {
    return (kern_mesa_args){.q.f = p->q,
                            .k.f = p->k,
                            .v.f = p->v,
                            .g.f = p->g,
                            .beta.f = p->beta,
                            .lambda_params.f = p->params,
                            .state.f = p->slots,
                            .o.f = p->o,
                            .x.f = p->x,
                            .snapshots.f = snapshots ? p->snapshots : NULL,
                            .report.p = p->report,
                            .mesa = p->mesa};
}

static inline void launch(problem *p, kern_mesa_args args) {
    if (p->mesa.storage == KERN_STORE_F32) {
        kernel_test_launch(p->test, KERN_OP_MESA, &args);
        return;
    }
    const size_t bytes = stored_slot_bytes(&p->mesa);
    char *stored = kernel_test_bytes(p->test, (size_t)p->slot_count * bytes);
    for (int s = 0; s < p->slot_count; s++)
        convert_slot(&p->mesa, p->slots + (size_t)s * p->slot_size, stored + (size_t)s * bytes, true);
    args.state.p = stored;
    p->test->rows->slot_stride = bytes;
    kernel_test_launch(p->test, KERN_OP_MESA, &args);
    for (int s = 0; s < p->slot_count; s++)
        convert_slot(&p->mesa, p->slots + (size_t)s * p->slot_size, stored + (size_t)s * bytes, false);
}

static inline void set_solver(kernel_test *test, kern_solver solver) {
    for (int r = 0; r < test->rows->n_rows; r++)
        test->rows->row[r].solver = solver;
}

static inline void run_forward(problem *p, kern_solver solver, bool snapshots) {
    set_solver(p->test, solver);
    launch(p, arguments(p, snapshots));
}

// Tokens [from, to) of the problem as one row in `slot`, token 0 being at `position`.
static inline void run_part(problem *p, kern_row_kind kind, int slot, int64_t position, int from, int to,
                            kern_solver solver, bool snapshots) {
    const size_t h = (size_t)p->mesa.heads, d = h * (size_t)p->mesa.key_width, w = h * (size_t)p->mesa.value_width;
    const size_t first = (size_t)from;
    kernel_test_clear_rows(p->test);
    kernel_test_row(p->test, kind, slot, to - from, position + from);
    kernel_test_prepare(p->test);
    set_solver(p->test, solver);
    kern_mesa_args args = arguments(p, snapshots);
    args.q.f += first * d;
    args.k.f += first * d;
    args.v.f += first * w;
    args.g.f += first * h;
    args.beta.f += first * h;
    args.o.f += first * w;
    args.x.f += first * d;
    args.report.p = p->report + first * h;
    launch(p, args);
}

// ---------------------------------------------------------------------------------------------------------- reference

static inline kern_ref_mesa_inputs reference_inputs(const problem *p, const kern_row *row) {
    kernel_test *test = p->test;
    const size_t h = (size_t)p->mesa.heads, d = h * (size_t)p->mesa.key_width, w = h * (size_t)p->mesa.value_width;
    const size_t first = (size_t)row->token0, n = (size_t)row->length;
    return (kern_ref_mesa_inputs){.q = kernel_test_widened(test, p->q + first * d, n * d),
                                  .k = kernel_test_widened(test, p->k + first * d, n * d),
                                  .v = kernel_test_widened(test, p->v + first * w, n * w),
                                  .g = kernel_test_widened(test, p->g + first * h, n * h),
                                  .beta = kernel_test_widened(test, p->beta + first * h, n * h),
                                  .lambda_params = kernel_test_widened(test, p->params, d),
                                  .begins = sequence_begins(test, row)};
}

// How far from the reference o, x, Hv and Hk may be, as relative norms.
typedef struct tolerances {
    double o, x, values, keys;
} tolerances;

// The whole batch against the reference, row by row: o, x and the slots after.
static inline void check_forward(problem *p, kern_solver solver, tolerances allowed) {
    kernel_test *test = p->test;
    const size_t h = (size_t)p->mesa.heads, depth = (size_t)p->mesa.key_width, keys = h * depth * depth;
    const size_t d = h * depth, w = h * (size_t)p->mesa.value_width;
    for (int r = 0; r < test->rows->n_rows; r++) {
        const kern_row *row = &test->rows->row[r];
        const size_t n = (size_t)row->length, first = (size_t)row->token0;
        kern_ref_mesa_inputs in = reference_inputs(p, row);
        double *state = kernel_test_zero_doubles(test, p->slot_size);
        if (row->slot >= 0)
            state = kernel_test_widened(test, p->slots_before + (size_t)row->slot * p->slot_size, p->slot_size);
        double *o = kernel_test_zero_doubles(test, n * w), *x = kernel_test_zero_doubles(test, n * d);
        kern_ref_mesa(&p->mesa, row->length, &in, &solver, state, state + keys, x, o);
        kernel_test_assert_norm(p->o + first * w, o, n * w, allowed.o);
        kernel_test_assert_norm(p->x + first * d, x, n * d, allowed.x);
        if (row->slot < 0)
            continue;
        const float *slot = p->slots + (size_t)row->slot * p->slot_size;
        kernel_test_assert_norm(slot, state, keys, allowed.keys);
        kernel_test_assert_norm(slot + keys, state + keys, p->slot_size - keys, allowed.values);
    }
}

#endif
