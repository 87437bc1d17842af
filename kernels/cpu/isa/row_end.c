// SPDX-License-Identifier: Apache-2.0
// What the next id is drawn from lies in the slot with the state: the vectors of each row's last token, copied.
//
// A row's slot is its own, so rows are shared among the team as they come; a copy has no bits of its own.
#include "kernels/arguments.h"
#include "kernels/cpu/isa/elementwise.h"

static void copy_range(const kern_cpu *cpu, const kern_rows *rows, const void *args, int64_t first, int64_t end) {
    (void)cpu;
    const kern_row_end_args *a = args;
    for (int64_t r = first; r < end; r++) {
        const kern_row *row = &rows->row[r];
        float *kept = kern_slot_state(rows, a->state, row->slot);
        for (int32_t plane = 0; kept && plane < a->planes; plane++, kept += a->state_stride) {
            float *x = a->x.f + ((int64_t)plane * a->stride + row->token0 + row->length - 1) * a->width;
            memcpy(a->back ? x : kept, a->back ? kept : x, (size_t)a->width * sizeof *x);
        }
    }
}

KERN_PREPARE(row_end, kern_row_end_args) {
    (void)cpu;
    *thread_bytes = 0;
    return kern_row_end_check(a);
}

KERN_RUN(row_end, kern_row_end_args) {
    if (rows->n_tokens > a->stride)
        return KERN_INVALID;
    kern_over(copy_range, cpu, rows, a, rows->n_rows, 2.0 * rows->n_rows * a->planes * a->width);
    return KERN_OK;
}
