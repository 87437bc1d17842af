// SPDX-License-Identifier: Apache-2.0
// What a backend provides to kernels.c, and what it gets from it. Private to kernels/.
//
// The CPU backend is linked in (kern_cpu_backend). A CUDA module is opened RTLD_NOW | RTLD_LOCAL from the library directory and
// exports kern_module_v1(const kern_host *) alone; it links no project library. ABI number and struct sizes are compared
// before anything else is used; a mismatch or a failed open is a reported reason, never a silent fallback.
#ifndef KERNELS_BACKEND_H
#define KERNELS_BACKEND_H

#include "kernels/kernels.h"

enum { KERN_ABI = 1 };

// The head of every backend's device; a backend's own struct begins with it.
struct kern_device {
    const struct kern_backend *backend;
    kern_device_info info;
    uint64_t allocations;
    void *module; // dlopen handle, NULL for the CPU
};

// The head of every backend's stream.
struct kern_stream {
    kern_device *device;
};

typedef struct kern_host { // given to a module
    uint32_t abi;
    void (*set_reason)(char *reason, size_t size, const char *format, ...);
} kern_host;

struct kern_backend {
    uint32_t abi;
    uint32_t size_rows, size_backend; // sizeof(kern_rows), sizeof(struct kern_backend)
    kern_status (*open)(const char *name, kern_device **out, char *reason, size_t reason_size);
    void (*close)(kern_device *device);
    kern_status (*alloc)(kern_device *device, size_t bytes, void **out);
    void (*free)(kern_device *device, void *memory);
    kern_status (*stream_open)(kern_device *device, kern_stream **out);
    void (*stream_close)(kern_stream *stream);
    kern_status (*synchronize)(kern_stream *stream);
    kern_status (*upload)(kern_stream *stream, void *device_memory, const void *host, size_t bytes);
    kern_status (*download)(kern_stream *stream, void *host, const void *device_memory, size_t bytes);
    kern_status (*copy)(kern_stream *stream, void *to, const void *from, size_t bytes);
    kern_status (*zero)(kern_stream *stream, void *memory, size_t bytes);
    kern_status (*weight_create)(kern_device *device, const kern_weight_desc *desc, kern_weight **out);
    void (*weight_free)(kern_weight *weight);
    size_t (*weight_bytes)(const kern_weight *weight);
    kern_status (*rows_create)(kern_device *device, kern_rows *rows); // arrays for the capacities in rows
    void (*rows_free)(kern_rows *rows);
    kern_status (*rows_send)(kern_stream *stream, kern_rows *rows);
    // Checks shapes and constants (operands may still be references: only null or not may be looked at) and makes the
    // workspace large enough.
    kern_status (*reserve)(kern_device *device, kern_op op, const void *args);
    kern_status (*launch)(kern_stream *stream, kern_op op, const kern_rows *rows, const void *args);
    // Runs a sealed plan's operations, whose operands are references. NULL: kern_plan_run launches one by one.
    kern_status (*plan_run)(const kern_plan *plan, kern_stream *stream, const kern_rows *rows, const kern_memory *memory);
};

extern const struct kern_backend kern_cpu_backend;

// Sizes by operation, from KERN_OPS.
size_t kern_op_args_size(kern_op op);
size_t kern_op_operands(kern_op op); // leading kern_ptr members

#endif
