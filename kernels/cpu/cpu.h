// SPDX-License-Identifier: Apache-2.0
// The CPU backend's device, weights and the table that each instruction set fills.
//
// Every operation is compiled once per instruction set (kernels/cpu/isa/*.c, see isa.h) and reached through
// kern_cpu_table; device.c chooses the table when the device is opened. Operations run on the calling thread and the
// device's team (team.h), backward and prompts' products on an OpenMP team of their own; work is cut into pieces that
// do not depend on the number of threads, so neither do the bits.
#ifndef KERNELS_CPU_CPU_H
#define KERNELS_CPU_CPU_H

#include "kernels/arguments.h"
#include "kernels/backend.h"
#include "kernels/cpu/team.h"

typedef struct kern_cpu kern_cpu;

typedef kern_status (*kern_cpu_run)(kern_cpu *cpu, const kern_rows *rows, const void *args);
// Refuses shapes that the operation cannot run and says how many bytes of workspace one thread needs.
typedef kern_status (*kern_cpu_prepare)(const kern_cpu *cpu, const void *args, size_t *thread_bytes);

enum { KERN_LINEAR_PARTS = 6 };

typedef struct kern_cpu_table {
    const char *isa; // "portable", "avx2", "avx512"
    kern_cpu_run run[KERN_OP_COUNT];
    kern_cpu_prepare prepare[KERN_OP_COUNT];
    // LINEAR up to KERN_LINEAR_PARTS times, as one product: the same x, cols and groups, weights of one dtype, all with
    // minima or all without. None writes what another one reads. The bits are those of the parts alone.
    kern_status (*linear_parts)(kern_cpu *cpu, const kern_rows *rows, const kern_linear_args *const *a, int parts);
} kern_cpu_table;

extern const kern_cpu_table kern_cpu_table_portable;
#ifdef KERN_HAVE_AVX2
extern const kern_cpu_table kern_cpu_table_avx2;
extern const kern_cpu_table kern_cpu_table_avx512;
#endif

// Raised by a change that alters the bits of any operation; part of the numeric profile.
enum { KERN_CPU_REVISION = 2 };

struct kern_cpu {
    kern_device device;
    const kern_cpu_table *table;
    kern_team *team;
    int threads;
    int chunk;           // C
    size_t thread_bytes; // workspace of one thread, 64-byte aligned
    char *workspace;     // threads * thread_bytes
};

// Processors that multiply and add four bytes at once, by the set whose tables make use of it.
enum { KERN_DOTS_AVX512 = 1, KERN_DOTS_AVX2 = 2 };

struct kern_weight {
    kern_device *device;
    kern_dtype dtype;
    int64_t rows, cols;
    const void *data; // row-major; KERN_F32: float, KERN_BF16: uint16_t; KERN_Q8, KERN_Q4: panels (packed.h)
    void *owned;      // NULL with a master
    bool minimum;     // KERN_Q4
    int dots;         // KERN_DOTS_*, of quantised weights
};

// This thread's workspace: 64-byte aligned, thread_bytes long, contents undefined.
static inline void *kern_cpu_workspace(const kern_cpu *cpu, int thread) {
    return cpu->workspace + (size_t)thread * cpu->thread_bytes;
}

// weight.c
kern_status kern_cpu_weight_create(kern_device *device, const kern_weight_desc *desc, kern_weight **out);
void kern_cpu_weight_free(kern_weight *weight);
size_t kern_cpu_weight_bytes(const kern_weight *weight);

// device.c: another thread than the opener's may have a larger OpenMP team, for which there is no workspace.
void kern_cpu_limit_threads(const kern_cpu *cpu);

// calls.c: a plan's calls in order, neighbouring products of one input as one.
kern_status kern_cpu_calls_run(kern_stream *stream, const kern_rows *rows, kern_calls *calls);

// self_test.c: the matrix library against a plain loop, a row alone against the same row at every place of a batch.
kern_status kern_cpu_self_test(kern_cpu *cpu, char *reason, size_t size);

#endif
