// SPDX-License-Identifier: Apache-2.0
// What a backend provides to kernels.c, and what it gets from it. Private to kernels/.
//
// The CPU backend is linked in (kern_cpu_backend). A CUDA module is opened RTLD_NOW | RTLD_LOCAL from the library
// directory and exports kern_module_v1(const kern_host *) alone; it links no project library. ABI number and struct
// sizes are compared before anything else is used; a mismatch or a failed open is a reported reason, never a silent
// fallback.
#ifndef KERNELS_BACKEND_H
#define KERNELS_BACKEND_H

#include "kernels/kernels.h"

enum { KERN_ABI = 16 };

// The head of every backend's device; a backend's own struct begins with it.
struct kern_device {
    const struct kern_backend *backend;
    kern_device_info info;
    uint64_t allocations;
    void *module; // dlopen handle, NULL for the CPU
};

// The heads of every backend's stream and event.
struct kern_stream {
    kern_device *device;
};
struct kern_event {
    kern_device *device;
};
struct kern_group {
    kern_device *device;
};

typedef struct kern_host { // given to a module, which keeps nothing of it
    uint32_t abi;
} kern_host;

// The one symbol of a module; NULL when the host's ABI is not its own.
typedef const struct kern_backend *kern_module_function(const kern_host *host);

// A plan whose operands are device pointers, or a part of one (with the plan's `made`). The calls stay as they are
// until calls_forget, the struct around them does not.
typedef struct kern_call {
    kern_op op;
    const void *args;
} kern_call;
typedef struct kern_calls {
    kern_device *device;
    const kern_call *call;
    size_t count;
    void *made; // the backend's
    kern_event *const
        *mark; // NULL, or (count + 1): the calls run one by one, with these recorded before, between, after
} kern_calls;

struct kern_backend {
    uint32_t abi;
    uint32_t size_rows, size_backend; // sizeof(kern_rows), sizeof(struct kern_backend)
    kern_status (*open)(const kern_device_options *options, kern_device **out, char *reason, size_t reason_size);
    void (*close)(kern_device *device);
    kern_status (*alloc)(kern_device *device, size_t bytes, void **out);
    void (*free)(kern_device *device, void *memory);
    kern_status (*alloc_host)(kern_device *device, size_t bytes, void **out);
    void (*free_host)(kern_device *device, void *memory);
    kern_status (*stream_open)(kern_device *device, kern_stream **out);
    void (*stream_close)(kern_stream *stream);
    kern_status (*synchronize)(kern_stream *stream);
    kern_status (*event_create)(kern_device *device, bool timed, kern_event **out);
    void (*event_free)(kern_event *event);
    kern_status (*event_record)(kern_stream *stream, kern_event *event);
    kern_status (*event_wait)(kern_event *event);
    kern_status (*event_elapsed)(const kern_event *from, const kern_event *to, double *seconds);
    kern_status (*upload)(kern_stream *stream, void *device_memory, const void *host, size_t bytes);
    kern_status (*download)(kern_stream *stream, void *host, const void *device_memory, size_t bytes);
    kern_status (*copy)(kern_stream *stream, void *to, const void *from, size_t bytes);
    kern_status (*zero)(kern_stream *stream, void *memory, size_t bytes);
    kern_status (*weight_create)(kern_device *device, const kern_weight_desc *desc, kern_weight **out);
    void (*weight_free)(kern_weight *weight);
    size_t (*weight_bytes)(const kern_weight *weight);
    // The device's own copy of a row table, of the capacities in rows, and how it is brought up to date. NULL, all
    // three: the backend reads the host's table.
    kern_status (*mirror_create)(kern_device *device, const kern_rows *rows, void **mirror);
    void (*mirror_free)(void *mirror);
    kern_status (*mirror_send)(kern_stream *stream, const kern_rows *rows, void *mirror);
    // Checks shapes and constants (operands may still be references: only null or not may be looked at) and makes the
    // workspace large enough.
    kern_status (*reserve)(kern_device *device, kern_op op, const void *args);
    kern_status (*launch)(kern_stream *stream, kern_op op, const kern_rows *rows, const void *args);
    // Runs the calls of a plan in order; what the backend makes of them (graphs) it keeps in calls->made until
    // calls_forget (NULL: it makes nothing). NULL, both: kern_plan_run launches one by one.
    kern_status (*calls_run)(kern_stream *stream, const kern_rows *rows, kern_calls *calls);
    void (*calls_forget)(kern_calls *calls);
    // Groups of devices. NULL, all: the backend has none.
    kern_status (*group_name)(kern_device *device, unsigned char id[KERN_GROUP_ID], char *reason, size_t reason_size);
    kern_status (*group_open)(kern_device *device, const unsigned char id[KERN_GROUP_ID], int32_t member,
                              int32_t members, kern_group **out, char *reason, size_t reason_size);
    void (*group_close)(kern_group *group);
    kern_status (*group_sum)(kern_group *group, kern_stream *stream, float *data, size_t part, size_t rest);
    kern_status (*group_gather)(kern_group *group, kern_stream *stream, float *data, size_t part, size_t rest);
    kern_status (*group_join)(kern_group *group, kern_stream *stream);
    kern_status (*group_poll)(kern_group *group, kern_stream *stream, bool *done);
};

extern const struct kern_backend kern_cpu_backend;

// Sizes by operation, from KERN_OPS.
size_t kern_op_args_size(kern_op op);
size_t kern_op_operands(kern_op op); // leading kern_ptr members

// The optimizer's operations do not look at the row table.
static inline bool kern_op_is_rowless(kern_op op) {
    return op == KERN_OP_ADAMW || op == KERN_OP_SQUARE_SUM || op == KERN_OP_CLIP_SCALE;
}

// What kern_plan_cost tells, of resolved arguments; part: of the weight's bytes that are this operation's. cost.c.
kern_cost kern_op_cost(kern_op op, const kern_rows *rows, const void *args, double part, double solver_steps);

// Whether it is a recurrence without the memory in which rows with a slot keep their state; no backend runs one with
// such rows. args: with operands resolved or not.
bool kern_op_lacks_state(kern_op op, const void *args);
bool kern_rows_have_slots(const kern_rows *rows); // NULL is accepted

// Writes a sentence to a caller's reason; does nothing when there is none.
__attribute__((format(printf, 3, 4))) void kern_set_reason(char *reason, size_t size, const char *format, ...);

// Opens the CUDA module and compares its ABI; module.c. *module is closed by dlclose when no device of it is open.
KERN_CHECKED kern_status kern_module_open(void **module, const struct kern_backend **backend, char *reason,
                                          size_t reason_size);

// A backend's weight begins with its device.
static inline kern_device *kern_weight_device(const kern_weight *weight) {
    return *(kern_device *const *)weight;
}

// What stands around the row table that callers see.
typedef struct kern_rows_owner {
    kern_device *device;
    void *mirror;  // the backend's own copy on the device, NULL where it reads the host's
    kern_rows now; // of a followed table what stands in it, where there is no mirror
    kern_rows rows;
} kern_rows_owner;

static inline kern_rows_owner *kern_rows_owner_of(const kern_rows *rows) {
    return (kern_rows_owner *)((char *)(uintptr_t)rows - offsetof(kern_rows_owner, rows));
}

// What a backend without mirrors reads and EXIT_FOLLOW writes of a followed table.
static inline kern_rows *kern_rows_now(const kern_rows *rows) {
    return &kern_rows_owner_of(rows)->now;
}

#endif
