// SPDX-License-Identifier: Apache-2.0
// What the two tests of the recurrence family share: every law with maps of heads, operands of a problem, the reference
// in double over its rows.
//
// A *law* is a combination of decay, update and weight; a *shape* a map of heads and widths. Memory is kept by the
// kernel_test and freed with it.
#ifndef TESTS_KERNELS_RECURRENCE_PROBLEM_H
#define TESTS_KERNELS_RECURRENCE_PROBLEM_H

#include "kernels/ref/recurrence.h"
#include "tests/kernels/sequence_test.h"

enum { SLOTS = 4 };

// Every combination of decay, update and weight ...
enum { LAWS = 16 };
static inline kern_recurrence with_law(kern_recurrence family, int law) {
    family.decay = law % 4;
    family.update = law / 4 % 2;
    family.weighted = law / 8;
    return family;
}

// ... with these maps of heads and widths.
static const kern_recurrence shapes[] = {
    {.heads = 1, .key_width = 64, .value_width = 64, .scale = 0.125f},
    {.heads = 4, .query_heads = 2, .key_heads = 2, .key_width = 16, .value_width = 40, .scale = 0.25f}, // value groups
    {.heads = 2, .query_heads = 6, .key_width = 24, .value_width = 17, .scale = 0.2f},                  // grouped query
    {.heads = 4, .key_heads = 2, .value_heads = 2, .key_width = 20, .value_width = 16, .scale = 0.2f},  // grouped keys
    {.heads = 3, .query_heads = 1, .key_heads = 1, .key_width = 32, .value_width = 24, .skip_width = 1, .scale = 1},
    {.heads = 6,
     .query_heads = 12,
     .key_heads = 3,
     .value_heads = 2,
     .key_width = 7,
     .value_width = 5,
     .unit_column = 1,
     .skip_width = 5,
     .scale = 0.4f},
    {.heads = 1, .key_width = 33, .value_width = 64, .unit_column = 1, .scale = 0.2f},
};
enum { SHAPES = sizeof shapes / sizeof shapes[0] };

// One thread: a team would wait for the reference more than it works.
static inline bool open_device(kernel_test *test, int isa, const char *name) {
    kernel_test_threads(1);
    return kernel_test_open(test, isa, name);
}

typedef struct problem {
    kernel_test *test;
    kern_recurrence family;
    size_t tokens, query_row, key_row, value_row, gate_row, decay_row, output_row; // floats of a token
    size_t state_size, skip_size;                                                  // floats of a slot, of skip
    float *q, *k, *v, *g, *beta, *skip, *o, *snapshots, *slots, *slots_before;
    size_t slots_size; // floats of all slots
    uint16_t *stored;  // the slots in bf16, NULL without
} problem;

static inline void measure(problem *p) {
    const kern_recurrence *f = &p->family;
    const size_t h = (size_t)f->heads, depth = (size_t)f->key_width, width = (size_t)f->value_width;
    const size_t queries = f->query_heads ? (size_t)f->query_heads : h, outputs = queries > h ? queries : h;
    p->query_row = queries * depth;
    p->key_row = (f->key_heads ? (size_t)f->key_heads : h) * depth;
    p->value_row = (f->value_heads ? (size_t)f->value_heads : h) * width;
    p->gate_row = h;
    p->decay_row = f->decay == KERN_DECAY_CHANNEL ? h * depth : h;
    p->output_row = outputs * (width + (f->unit_column ? 1 : 0));
    p->state_size = h * depth * (width + (f->unit_column ? 1 : 0));
    p->skip_size = outputs * (size_t)f->skip_width;
}

// Slots 0 .. count - 1, of numbers that the storage has.
static inline void make_slots(problem *p, int count) {
    const bool bf16 = p->family.storage == KERN_STORE_BF16;
    p->slots_size = (size_t)count * p->state_size;
    p->slots = kernel_test_floats(p->test, p->slots_size, -1, 1);
    p->stored = bf16 ? kernel_test_bytes(p->test, p->slots_size * sizeof *p->stored) : NULL;
    uint32_t *bits = (uint32_t *)(void *)p->slots;
    for (size_t i = 0; bf16 && i < p->slots_size; i++)
        bits[i] &= 0xFFFF0000u;
    p->slots_before = kernel_test_copy(p->test, p->slots, p->slots_size);
    p->test->rows->slot_stride = p->state_size * (bf16 ? sizeof *p->stored : sizeof *p->slots);
}

static inline void make_problem(problem *p, kernel_test *test, kern_recurrence family, double gamma_low) {
    const size_t tokens = (size_t)test->rows->n_tokens;
    *p = (problem){.test = test, .family = family, .tokens = tokens};
    measure(p);
    p->q = sequence_keys(test, tokens * p->query_row / (size_t)family.key_width, family.key_width);
    p->k = sequence_keys(test, tokens * p->key_row / (size_t)family.key_width, family.key_width);
    p->v = kernel_test_floats(test, tokens * p->value_row, -1, 1);
    p->g = sequence_decays(test, tokens * p->decay_row, gamma_low, 1);
    p->beta = kernel_test_floats(test, tokens * p->gate_row, 0.1, family.update == KERN_UPDATE_DELTA ? 2 : 0.95);
    p->skip = kernel_test_floats(test, p->skip_size, -1, 1);
    p->o = kernel_test_zero_floats(test, tokens * p->output_row);
    p->snapshots = kernel_test_zero_floats(test, (size_t)test->rows->n_chunks * p->state_size);
    make_slots(p, SLOTS);
}

static inline kern_recurrence_args arguments(const problem *p, bool snapshots) {
    return (kern_recurrence_args){.q.f = p->q,
                                  .k.f = p->k,
                                  .v.f = p->v,
                                  .g.f = p->family.decay == KERN_DECAY_NONE ? NULL : p->g,
                                  .beta.f = p->family.weighted ? p->beta : NULL,
                                  .skip.f = p->family.skip_width ? p->skip : NULL,
                                  .state.p = p->stored ? (void *)p->stored : (void *)p->slots,
                                  .o.f = p->o,
                                  .snapshots.f = snapshots ? p->snapshots : NULL,
                                  .family = p->family};
}

// The slots as they are stored, and back: the high half of a float is a bfloat16.
static inline void store_slots(problem *p) {
    const uint32_t *bits = (const uint32_t *)(void *)p->slots;
    for (size_t i = 0; p->stored && i < p->slots_size; i++)
        p->stored[i] = (uint16_t)(bits[i] >> 16);
}
static inline void recall_slots(problem *p) {
    uint32_t *bits = (uint32_t *)(void *)p->slots;
    for (size_t i = 0; p->stored && i < p->slots_size; i++)
        bits[i] = (uint32_t)p->stored[i] << 16;
}

static inline void run_arguments(problem *p, const kern_recurrence_args *args) {
    store_slots(p);
    kernel_test_launch(p->test, KERN_OP_RECURRENCE, args);
    recall_slots(p);
}
static inline void run_forward(problem *p, bool snapshots) {
    const kern_recurrence_args args = arguments(p, snapshots);
    run_arguments(p, &args);
}
// Of tokens [from, to) as one row.
static inline void run_part(problem *p, kern_row_kind kind, int slot, int64_t position, size_t from, size_t to) {
    kernel_test_clear_rows(p->test);
    kernel_test_row(p->test, kind, slot, (int32_t)(to - from), position);
    kernel_test_prepare(p->test);
    kern_recurrence_args args = arguments(p, false);
    args.q.f += from * p->query_row;
    args.k.f += from * p->key_row;
    args.v.f += from * p->value_row;
    if (p->family.decay > KERN_DECAY_HEAD)
        args.g.f += from * p->decay_row;
    if (p->family.weighted)
        args.beta.f += from * p->gate_row;
    args.o.f += from * p->output_row;
    run_arguments(p, &args);
}

static inline kern_ref_recurrence_inputs reference_inputs(const problem *p, const kern_row *row) {
    kernel_test *test = p->test;
    const size_t first = (size_t)row->token0, n = (size_t)row->length;
    const bool per_head = p->family.decay == KERN_DECAY_HEAD;
    return (kern_ref_recurrence_inputs){
        .q = kernel_test_widened(test, p->q + first * p->query_row, n * p->query_row),
        .k = kernel_test_widened(test, p->k + first * p->key_row, n * p->key_row),
        .v = kernel_test_widened(test, p->v + first * p->value_row, n * p->value_row),
        .g = per_head ? kernel_test_widened(test, p->g, p->gate_row)
                      : kernel_test_widened(test, p->g + first * p->decay_row, n * p->decay_row),
        .beta = kernel_test_widened(test, p->beta + first * p->gate_row, n * p->gate_row),
        .skip = kernel_test_widened(test, p->skip, p->skip_size),
        .begins = sequence_begins(test, row)};
}

static inline void check_forward(problem *p, double tolerance) {
    kernel_test *test = p->test;
    for (int r = 0; r < test->rows->n_rows; r++) {
        const kern_row *row = &test->rows->row[r];
        const size_t n = (size_t)row->length, first = (size_t)row->token0;
        kern_ref_recurrence_inputs in = reference_inputs(p, row);
        double *state = kernel_test_zero_doubles(test, p->state_size), *o = NULL;
        if (row->slot >= 0)
            state = kernel_test_widened(test, p->slots_before + (size_t)row->slot * p->state_size, p->state_size);
        o = kernel_test_zero_doubles(test, n * p->output_row);
        kern_ref_recurrence(&p->family, row->length, &in, state, o);
        kernel_test_assert_norm(p->o + first * p->output_row, o, n * p->output_row, tolerance);
        if (row->slot >= 0)
            kernel_test_assert_norm(p->slots + (size_t)row->slot * p->state_size, state, p->state_size, tolerance);
    }
}

// Every law meets the first shape, and half of them each other one; the chunk goes round with them.
static inline bool meet(int law, int shape) {
    return shape == 0 || ((law ^ law >> 2 ^ law >> 3 ^ shape) & 1);
}
static inline const char *device_of(int law, int shape) {
    return sequence_devices[(law + law / 3 + shape) % SEQUENCE_DEVICES];
}

#endif
