// SPDX-License-Identifier: Apache-2.0
// Products with quantised weights: y = x W^T, W in blocks of 32 (kernels/cpu/packed.h), x rounded to int8 as it comes.
//
// A block of 32 inputs becomes round(x / s) with s = max |x| / 127. The dot product of two blocks is an exact integer;
// blocks are added in float32 in ascending order, one chain a (token, output). So such a pair has the same bits in a
// prompt or generated, whatever is computed beside it, and a slice of outputs those of the whole. A block that holds
// NaN or infinity makes every output of its token NaN.
#ifndef KERNELS_CPU_ISA_QUANT_H
#define KERNELS_CPU_ISA_QUANT_H

#include "kernels/cpu/isa/linear_rows.h"
#include "kernels/cpu/packed.h"

// Memory that products with `cols` inputs need, shared by the team.
size_t KERN_NAME(quant_bytes)(int64_t cols);
// linear_rows for weights of KERN_Q8 or KERN_Q4, all with minima or all without. scratch: quant_bytes, 64-byte aligned.
void KERN_NAME(quant_rows)(const kern_cpu *cpu, const kern_linear_rows *job, int jobs, void *scratch);
// y (cols) = scale * row of the weight.
void KERN_NAME(quant_row)(const kern_weight *weight, int64_t row, float scale, float *y);

static inline bool kern_is_quantised(const kern_weight *weight) {
    return weight->dtype == KERN_Q8 || weight->dtype == KERN_Q4;
}

#endif
