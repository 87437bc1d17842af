// SPDX-License-Identifier: Apache-2.0
// The CPU device: choice of the instruction set, memory, workspace, the way to an operation.
//
// Host and device memory are one, so transfers are copies and a stream has nothing to wait for. The workspace of the
// threads grows in reserve only; a launch that would need more is refused, so that serving never allocates. The team
// (team.h) has the calling thread and those of its OpenMP team, of at most the threads that the device was opened with.
// oneDNN is held to the same instruction set; it takes that once a process, so the numeric profile names the set that
// it really uses. One thread at a time uses a device.
#include <dnnl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef KERN_HAVE_AVX2
#include <cpuid.h>
#endif

#include "kernels/cpu/cpu.h"

static kern_cpu *cpu_of(kern_device *device) {
    return (kern_cpu *)device;
}

static int max_threads(void) {
#ifdef _OPENMP
    return omp_get_max_threads();
#else
    return 1;
#endif
}

// --------------------------------------------------------------------------------------------------- instruction set

typedef struct isa_choice {
    const kern_cpu_table *table;
    dnnl_cpu_isa_t dnnl;
    bool (*present)(void);
} isa_choice;

static bool always(void) {
    return true;
}

#ifdef KERN_HAVE_AVX2
static bool has_avx2(void) {
    unsigned a, b, c, d;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2") &&
           __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

static bool has_avx512(void) {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512cd");
}
#endif

// Best first.
static const isa_choice choices[] = {
#ifdef KERN_HAVE_AVX2
    {&kern_cpu_table_avx512, dnnl_cpu_isa_avx512_core, has_avx512},
    {&kern_cpu_table_avx2, dnnl_cpu_isa_avx2, has_avx2},
#endif
    {&kern_cpu_table_portable, dnnl_cpu_isa_sse41, always},
};
enum { CHOICES = sizeof choices / sizeof choices[0] };

static kern_status choose_isa(const isa_choice **out, char *reason, size_t reason_size) {
    const char *wanted = getenv("MESA_CPU_ISA");
    bool any = !wanted || !wanted[0];
    for (int i = 0; i < CHOICES; i++) {
        if (!any && strcmp(wanted, choices[i].table->isa) != 0)
            continue;
        if (choices[i].present()) {
            *out = &choices[i];
            return KERN_OK;
        }
        if (!any) {
            kern_set_reason(reason, reason_size, "MESA_CPU_ISA=%s: this processor lacks it", wanted);
            return KERN_NO_DEVICE;
        }
    }
    kern_set_reason(reason, reason_size, "MESA_CPU_ISA=%.32s is not known; it is portable, avx2 or avx512", wanted);
    return KERN_INVALID;
}

static const char *dnnl_isa_text(dnnl_cpu_isa_t isa) {
    switch (isa) {
    case dnnl_cpu_isa_sse41:
        return "sse41";
    case dnnl_cpu_isa_avx:
        return "avx";
    case dnnl_cpu_isa_avx2:
        return "avx2";
    case dnnl_cpu_isa_avx512_core:
        return "avx512_core";
    default:
        return NULL;
    }
}

// ------------------------------------------------------------------------------------------------------- open, close

#if defined(__clang__)
#define COMPILER "clang" KERN_TEXT(__clang_major__)
#else
#define COMPILER "gcc" KERN_TEXT(__GNUC__)
#endif
#define KERN_TEXT2(x) #x
#define KERN_TEXT(x) KERN_TEXT2(x)

static uint64_t memory_total(void) {
    long pages = sysconf(_SC_PHYS_PAGES), size = sysconf(_SC_PAGESIZE);
    return pages > 0 && size > 0 ? (uint64_t)pages * (uint64_t)size : 0;
}

static void describe(kern_cpu *cpu, const isa_choice *isa) {
    kern_device_info *info = &cpu->device.info;
    // oneDNN keeps the first set of the process; a later wish is refused there and told by the profile.
    (void)dnnl_set_max_cpu_isa(isa->dnnl);
    dnnl_cpu_isa_t effective = dnnl_get_effective_cpu_isa();
    const dnnl_version_t *version = dnnl_version();
    char number[16];
    snprintf(number, sizeof number, "%#x", (unsigned)effective);
    const char *effective_text = dnnl_isa_text(effective);
    snprintf(info->name, sizeof info->name, "cpu");
    snprintf(info->description, sizeof info->description, "cpu (%s, %d thread%s)", cpu->table->isa, cpu->threads,
             cpu->threads == 1 ? "" : "s");
    snprintf(info->numeric_profile, sizeof info->numeric_profile, "cpu %s C=%d kernels=%d %s dnnl=%d.%d.%d/%s",
             cpu->table->isa, cpu->chunk, (int)KERN_CPU_REVISION, COMPILER, version->major, version->minor,
             version->patch, effective_text ? effective_text : number);
    info->chunk = cpu->chunk;
    info->threads = cpu->threads;
    info->default_rows = cpu->threads < 2 ? 8 : cpu->threads > 16 ? 64 : 4 * cpu->threads;
    info->prompt_chunks = 1;
    info->row_chunks = 1;
    info->memory_total = memory_total();
}

// Of a name that kern_device_check_name has passed.
static int chunk_of(const char *name) {
    return strcmp(name, "cpu") == 0 ? 32 : atoi(name + strlen("cpu:"));
}

static void cpu_close(kern_device *device) {
    free(cpu_of(device)->workspace);
    kern_team_free(cpu_of(device)->team);
    free(device);
}

static kern_status cpu_open(const kern_device_options *options, kern_device **out, char *reason, size_t reason_size) {
    const isa_choice *isa = NULL;
    kern_status status = choose_isa(&isa, reason, reason_size);
    if (status)
        return status;
    kern_cpu *cpu = calloc(1, sizeof *cpu);
    if (!cpu) {
        kern_set_reason(reason, reason_size, "no memory for the device");
        return KERN_NO_MEMORY;
    }
    cpu->device.backend = &kern_cpu_backend;
    cpu->table = isa->table;
    cpu->threads = max_threads();
    if (options->threads > 0 && options->threads < cpu->threads)
        cpu->threads = options->threads;
    cpu->chunk = chunk_of(options->name);
    describe(cpu, isa);
    cpu->team = kern_team_create(cpu->threads);
    if (!cpu->team)
        kern_set_reason(reason, reason_size, "no memory for the device");
    kern_cpu_limit_threads(cpu);
    status = cpu->team ? kern_cpu_self_test(cpu, reason, reason_size) : KERN_NO_MEMORY;
    if (status) {
        cpu_close(&cpu->device);
        return status;
    }
    *out = &cpu->device;
    return KERN_OK;
}

// ------------------------------------------------------------------------------------------------------------ memory

enum { ALIGNMENT = 64 };

// Zeroes that nobody has written: the kernel gives a page of a large piece when something is first put there, near the
// core that does, so that pools cost what is used of them. Where the piece begins is noted before it.
static kern_status cpu_alloc(kern_device *device, size_t bytes, void **out) {
    (void)device;
    if (bytes > SIZE_MAX / 2)
        return KERN_NO_MEMORY;
    const size_t rounded = bytes ? (bytes + ALIGNMENT - 1) & ~(size_t)(ALIGNMENT - 1) : ALIGNMENT;
    char *base = calloc(1, rounded + ALIGNMENT);
    if (!base)
        return KERN_NO_MEMORY;
    void **aligned = (void **)(base + ALIGNMENT - (uintptr_t)base % ALIGNMENT);
    aligned[-1] = base;
    *out = aligned;
    return KERN_OK;
}

static void cpu_free(kern_device *device, void *memory) {
    (void)device;
    if (memory)
        free(((void **)memory)[-1]);
}

static kern_status cpu_stream_open(kern_device *device, kern_stream **out) {
    *out = malloc(sizeof **out);
    if (!*out)
        return KERN_NO_MEMORY;
    (*out)->device = device;
    return KERN_OK;
}

static void cpu_stream_close(kern_stream *stream) {
    free(stream);
}

static kern_status cpu_synchronize(kern_stream *stream) {
    (void)stream;
    return KERN_OK;
}

typedef struct cpu_event {
    kern_event event;
    struct timespec time;
} cpu_event;

static kern_status cpu_event_create(kern_device *device, bool timed, kern_event **out) {
    (void)timed; // a look at the clock is cheap
    cpu_event *event = calloc(1, sizeof *event);
    if (!event)
        return KERN_NO_MEMORY;
    event->event.device = device;
    *out = &event->event;
    return KERN_OK;
}

static void cpu_event_free(kern_event *event) {
    free(event);
}

static kern_status cpu_event_record(kern_stream *stream, kern_event *event) {
    (void)stream;
    clock_gettime(CLOCK_MONOTONIC, &((cpu_event *)event)->time);
    return KERN_OK;
}

static kern_status cpu_event_elapsed(const kern_event *from, const kern_event *to, double *seconds) {
    const struct timespec *a = &((const cpu_event *)from)->time, *b = &((const cpu_event *)to)->time;
    *seconds = (double)(b->tv_sec - a->tv_sec) + 1e-9 * (double)(b->tv_nsec - a->tv_nsec);
    return KERN_OK;
}

static kern_status cpu_event_wait(kern_event *event) {
    (void)event;
    return KERN_OK;
}

static kern_status cpu_transfer(kern_stream *stream, void *to, const void *from, size_t bytes) {
    (void)stream;
    memmove(to, from, bytes);
    return KERN_OK;
}

static kern_status cpu_zero(kern_stream *stream, void *memory, size_t bytes) {
    (void)stream;
    memset(memory, 0, bytes);
    return KERN_OK;
}

// ------------------------------------------------------------------------------------------------------------ launch

static kern_status cpu_reserve(kern_device *device, kern_op op, const void *args) {
    kern_cpu *cpu = cpu_of(device);
    size_t bytes = 0;
    kern_status status = cpu->table->prepare[op](cpu, args, &bytes);
    if (status || bytes <= cpu->thread_bytes)
        return status;
    if (bytes > SIZE_MAX / 2 / (size_t)cpu->threads)
        return KERN_NO_MEMORY;
    // Pages, so that two threads share neither a line nor a page of it.
    bytes = (bytes + 4095) & ~(size_t)4095;
    char *larger = aligned_alloc(4096, bytes * (size_t)cpu->threads);
    if (!larger)
        return KERN_NO_MEMORY;
    free(cpu->workspace);
    cpu->workspace = larger;
    cpu->thread_bytes = bytes;
    device->allocations++;
    return KERN_OK;
}

void kern_cpu_limit_threads(const kern_cpu *cpu) {
#ifdef _OPENMP
    if (omp_get_max_threads() > cpu->threads)
        omp_set_num_threads(cpu->threads);
#else
    (void)cpu;
#endif
}

static kern_status cpu_launch(kern_stream *stream, kern_op op, const kern_rows *rows, const void *args) {
    kern_cpu *cpu = cpu_of(stream->device);
    size_t bytes = 0;
    kern_status status = cpu->table->prepare[op](cpu, args, &bytes);
    if (status)
        return status;
    if (bytes > cpu->thread_bytes)
        return KERN_INVALID;
    kern_cpu_limit_threads(cpu);
    return cpu->table->run[op](cpu, rows && rows->followed ? kern_rows_now(rows) : rows, args);
}

const struct kern_backend kern_cpu_backend = {
    .abi = KERN_ABI,
    .size_rows = sizeof(kern_rows),
    .size_backend = sizeof(struct kern_backend),
    .open = cpu_open,
    .close = cpu_close,
    .alloc = cpu_alloc,
    .free = cpu_free,
    .alloc_host = cpu_alloc,
    .free_host = cpu_free,
    .stream_open = cpu_stream_open,
    .stream_close = cpu_stream_close,
    .synchronize = cpu_synchronize,
    .event_create = cpu_event_create,
    .event_free = cpu_event_free,
    .event_record = cpu_event_record,
    .event_wait = cpu_event_wait,
    .event_elapsed = cpu_event_elapsed,
    .upload = cpu_transfer,
    .download = cpu_transfer,
    .copy = cpu_transfer,
    .zero = cpu_zero,
    .weight_create = kern_cpu_weight_create,
    .weight_free = kern_cpu_weight_free,
    .weight_bytes = kern_cpu_weight_bytes,
    .reserve = cpu_reserve,
    .launch = cpu_launch,
    .calls_run = kern_cpu_calls_run,
};
