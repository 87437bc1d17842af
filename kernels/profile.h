// SPDX-License-Identifier: Apache-2.0
// What a plan's operations take, and what they need at least. Part of kernels.h, which is what other folders include.
//
// A marked run gives the stream one operation after the other, as they were added, with an event between two: times are
// the device's own. What a backend makes of a whole plan (graphs, joined or fused operations) is not used then, so
// that a marked run may take longer than a plain one; results are the same.
#ifndef KERNELS_PROFILE_H
#define KERNELS_PROFILE_H

#include "kernels/kernels.h"

// Of a device that runs plans as a whole. mark: kern_plan_length + 1 timed events, recorded before the first operation
// and after each.
KERN_CHECKED kern_status kern_plan_run_marked(const kern_plan *plan, kern_stream *stream, const kern_rows *rows,
                                              const kern_memory *memory, kern_event *const *mark);

// Operation `index` of a plan, its arguments as they were added (operands are references).
kern_op kern_plan_op(const kern_plan *plan, size_t index);
const void *kern_plan_args(const kern_plan *plan, size_t index);

// operations: in floating point, a product with its sum counts two, of the mathematics token by token, not of a form
// that works by chunks; exponentials and the like count one. bytes: every operand read or written once.
typedef struct kern_cost {
    double operations, bytes;
} kern_cost;
// What it needs at least with these prepared rows. solver_steps: of a solve in the mean (MESA, MESA_BACKWARD). An
// operation whose operands memory does not have costs nothing.
kern_cost kern_plan_cost(const kern_plan *plan, size_t index, const kern_rows *rows, const kern_memory *memory,
                         double solver_steps);

#endif
