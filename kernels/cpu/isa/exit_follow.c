// SPDX-License-Identifier: Apache-2.0
// Tokens that wait for a looped model's later loops: into their slots' lists and back, and who goes on to a loop.
//
// The table that is followed is written by one thread, row after row; rows are few, and of each a few words change.
#include "kernels/arguments.h"
#include "kernels/backend.h"
#include "kernels/cpu/isa/elementwise.h"
#include "kernels/cpu/isa/exit.h"

static kern_exit_waiting *waiting_of(const kern_rows *rows, kern_ptr waiting, int32_t slot) {
    return (kern_exit_waiting *)(void *)kern_slot_state(rows, waiting, slot);
}

static void move_range(const kern_cpu *cpu, const kern_rows *rows, const void *args, int64_t first, int64_t end) {
    (void)cpu;
    const kern_exit_wait_args *a = args;
    const size_t width = (size_t)a->width;
    for (int64_t r = first; r < end; r++) {
        const kern_row *row = &rows->row[r];
        float *list = kern_slot_state(rows, a->list, row->slot), *x = a->x.f + (size_t)row->token0 * width;
        if (!list)
            continue;
        if (!a->back)
            list += (size_t)waiting_of(rows, a->waiting, row->slot)->count[a->loop] * width;
        memcpy(a->back ? x : list, a->back ? list : x, (size_t)row->length * width * sizeof *x);
    }
}

KERN_PREPARE(exit_wait, kern_exit_wait_args) {
    (void)cpu;
    *thread_bytes = 0;
    return kern_exit_wait_check(a);
}

KERN_RUN(exit_wait, kern_exit_wait_args) {
    kern_over(move_range, cpu, rows, a, rows->n_rows, 2.0 * rows->n_tokens * a->width);
    return KERN_OK;
}

// ------------------------------------------------------------------------------------------------------- who goes on

static void add_solves(kern_solve_sum *sum, const kern_solve_sum *more, int32_t tokens) {
    for (int32_t t = 0; t < tokens; t++) {
        sum->solves += more[t].solves;
        sum->steps += more[t].steps;
        sum->unconverged += more[t].unconverged;
        sum->steps_max = more[t].steps_max > sum->steps_max ? more[t].steps_max : sum->steps_max;
    }
}

// What came through the loop before waits for this one.
static void arrive(const kern_exit_follow_args *a, const kern_row *row, int32_t r, kern_exit_waiting *waiting) {
    kern_solve_sum *sum = a->sum.p ? (kern_solve_sum *)a->sum.p + r : NULL;
    if (a->loop == 1) {
        waiting->moved = a->begin ? row->length : 0;
        waiting->token0 = row->token0;
        if (sum)
            *sum = (kern_solve_sum){0};
    }
    if (sum)
        add_solves(sum, (const kern_solve_sum *)a->solves.p + waiting->token0, waiting->moved);
    if (a->loop < a->loops)
        waiting->count[a->loop] += waiting->moved;
    waiting->moved = 0;
}

static bool goes_on(const kern_exit_follow_args *a, const kern_rows *rows, const kern_row *row) {
    return row->through ||
           kern_exit_loop(kern_slot_state(rows, a->z, row->slot), a->z_stride, &row->exit, a->loops) > a->loop;
}

// A row of all that wait, which end where the row ends.
static void take_along(const kern_exit_follow_args *a, const kern_row *row, kern_exit_waiting *waiting,
                       kern_rows *next) {
    const int32_t count = waiting->count[a->loop], r = next->n_rows++;
    waiting->count[a->loop] = 0;
    waiting->moved = count;
    waiting->token0 = next->n_tokens;
    next->row[r] = *row;
    next->row[r].token0 = next->n_tokens;
    next->row[r].length = count;
    next->row[r].position = row->position + row->length - count;
    for (int32_t i = 0; i < count; i++) {
        const int32_t t = next->n_tokens++;
        next->token_row[t] = r;
        next->token_start[t] = next->row[r].token0;
        next->token_position[t] = next->row[r].position + i;
    }
}

KERN_PREPARE(exit_follow, kern_exit_follow_args) {
    (void)cpu;
    *thread_bytes = 0;
    return kern_exit_follow_check(a);
}

KERN_RUN(exit_follow, kern_exit_follow_args) {
    (void)cpu;
    kern_rows *next = kern_rows_now(a->next.p);
    next->n_rows = next->n_tokens = 0;
    next->slot_stride = rows->slot_stride;
    next->page_stride = rows->page_stride;
    next->n_pages = rows->n_pages;
    if (rows->n_pages > 0)
        memcpy(next->page, rows->page, sizeof *next->page * (size_t)rows->n_pages);
    for (int32_t r = 0; r < rows->n_rows; r++) {
        const kern_row *row = &rows->row[r];
        kern_exit_waiting *waiting = waiting_of(rows, a->waiting, row->slot);
        if (!waiting)
            continue;
        arrive(a, row, r, waiting);
        if (a->loop < a->loops && waiting->count[a->loop] > 0 && goes_on(a, rows, row))
            take_along(a, row, waiting, next);
    }
    next->n_generated = next->n_tokens;
    return KERN_OK;
}
