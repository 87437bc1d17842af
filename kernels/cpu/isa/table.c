// SPDX-License-Identifier: Apache-2.0
// The table of this instruction set: every operation of KERN_OPS by its code. A missing operation is a link error.
// Compiled once per instruction set like its neighbours; device.c chooses one of the tables when it opens the CPU.
#include "kernels/cpu/isa/isa.h"

#define KERN_STRING2(x) #x
#define KERN_STRING(x) KERN_STRING2(x)
#define KERN_ENTRY_RUN(code, name, args_type, first) [KERN_OP_##code] = (kern_cpu_run)(void (*)(void))KERN_NAME(name),
#define KERN_ENTRY_PREPARE(code, name, args_type, first) \
    [KERN_OP_##code] = (kern_cpu_prepare)(void (*)(void))KERN_PASTE(KERN_NAME(name), prepare),

const kern_cpu_table KERN_PASTE(kern_cpu_table, KERN_ISA) = {
    .isa = KERN_STRING(KERN_ISA),
    .run = {KERN_OPS(KERN_ENTRY_RUN)},
    .prepare = {KERN_OPS(KERN_ENTRY_PREPARE)},
    .linear_parts = KERN_NAME(linear_parts),
};
