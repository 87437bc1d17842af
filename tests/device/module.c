// SPDX-License-Identifier: Apache-2.0
// A CUDA module that pretends: cuda:0 and cuda:1 compute on the CPU with C = 64, count what they hand out, and fail on
// request. With it, whatever a device may do to its users is tested without one.
//
// The environment says what happens. PRETEND_REFUSAL: opening fails with this sentence. PRETEND_MEMORY: bytes of
// memory; what is given back does not return. PRETEND_LOST: the devices are lost from the moment when this file exists.
// PRETEND_LOST_AFTER ("cuda:1 100"): this device is lost once it has run so many plans. Sizes of batch that a plan
// meets for the first time count as allocations, as graphs do.
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/backend.h"

enum { ORDINALS = 2 };

static struct kern_backend backend;     // made when the module is opened, before any of its devices
static atomic_bool made;                // says so to ThreadSanitizer, which does not see the loader's lock
static atomic_uint_fast64_t handed_out; // bytes, of all devices

static atomic_uint_fast64_t plans_run[ORDINALS];

static int ordinal_of(const char *name) {
    return name[strlen("cuda:")] - '0';
}

static uint64_t memory(void) {
    const char *text = getenv("PRETEND_MEMORY");
    return text ? strtoull(text, NULL, 10) : UINT64_C(1) << 40;
}

static bool is_lost(const kern_device *device) {
    const char *path = getenv("PRETEND_LOST"), *after = getenv("PRETEND_LOST_AFTER");
    const char *name = device->info.name, *space = after ? strchr(after, ' ') : NULL;
    if (path && access(path, F_OK) == 0)
        return true;
    return space && strncmp(after, name, strlen(name)) == 0 && after + strlen(name) == space &&
           plans_run[ordinal_of(name)] >= strtoull(space, NULL, 10);
}

static kern_status open_device(const kern_device_options *options, kern_device **out, char *reason,
                               size_t reason_size) {
    const char *name = options->name;
    const char *refusal = getenv("PRETEND_REFUSAL");
    int ordinal = ordinal_of(name);
    if (refusal || ordinal < 0 || ordinal >= ORDINALS || name[strlen("cuda:0")]) {
        kern_set_reason(reason, reason_size, refusal ? "%.128s" : "device \"%.64s\": this host has 2 CUDA devices",
                        refusal ? refusal : name);
        return KERN_NO_DEVICE;
    }
    kern_status status = kern_cpu_backend.open(&(kern_device_options){.name = "cpu:64"}, out, reason, reason_size);
    if (status)
        return status;
    kern_device_info *info = &(*out)->info;
    snprintf(info->name, sizeof info->name, "cuda:%d", ordinal);
    snprintf(info->description, sizeof info->description, "cuda:%d (pretended)", ordinal);
    info->default_rows = 256;
    info->asynchronous = true;
    info->memory_total = info->memory_free = memory();
    return KERN_OK;
}

static bool hand_out(size_t bytes) {
    if (bytes > memory() - handed_out)
        return false;
    handed_out += bytes;
    return true;
}

static kern_status allocate(kern_device *device, size_t bytes, void **out) {
    return hand_out(bytes) ? kern_cpu_backend.alloc(device, bytes, out) : KERN_NO_MEMORY;
}

static kern_status weight_create(kern_device *device, const kern_weight_desc *desc, kern_weight **out) {
    size_t each = desc->master ? 0 : desc->dtype == KERN_BF16 ? 2 : 4;
    if (!hand_out((size_t)desc->rows * (size_t)desc->cols * each))
        return KERN_NO_MEMORY;
    return kern_cpu_backend.weight_create(device, desc, out);
}

static kern_status synchronize(kern_stream *stream) {
    return is_lost(stream->device) ? KERN_DEVICE_LOST : kern_cpu_backend.synchronize(stream);
}

static kern_status event_wait(kern_event *event) {
    return is_lost(event->device) ? KERN_DEVICE_LOST : kern_cpu_backend.event_wait(event);
}

// calls->made: a bit for each size, a power of two.
static kern_status meet(const kern_rows *rows, kern_calls *calls) {
    if (rows->n_generated != rows->n_tokens || rows->n_rows != rows->n_tokens)
        return KERN_OK;
    uint64_t *sizes = calls->made, size = 1;
    if (!sizes && !(calls->made = sizes = calloc(1, sizeof *sizes)))
        return KERN_NO_MEMORY;
    while (size < (uint64_t)rows->n_tokens)
        size *= 2;
    calls->device->allocations += !(*sizes & size);
    *sizes |= size;
    return KERN_OK;
}

static kern_status calls_run(kern_stream *stream, const kern_rows *rows, kern_calls *calls) {
    kern_status status = meet(rows, calls);
    plans_run[ordinal_of(calls->device->info.name)]++;
    for (size_t i = 0; i < calls->count && !status; i++)
        status = kern_cpu_backend.launch(stream, calls->call[i].op, rows, calls->call[i].args);
    return status;
}

static void calls_forget(kern_calls *calls) {
    free(calls->made);
    calls->made = NULL;
}

__attribute__((constructor)) static void make_backend(void) {
    backend = kern_cpu_backend;
    backend.open = open_device;
    backend.alloc = allocate;
    backend.weight_create = weight_create;
    backend.synchronize = synchronize;
    backend.event_wait = event_wait;
    backend.calls_run = calls_run;
    backend.calls_forget = calls_forget;
    atomic_store(&made, true);
}

__attribute__((visibility("default"))) kern_module_function kern_module_v1;

const struct kern_backend *kern_module_v1(const kern_host *caller) {
    return atomic_load(&made) && caller->abi == KERN_ABI ? &backend : NULL;
}
