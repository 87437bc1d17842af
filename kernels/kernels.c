// SPDX-License-Identifier: Apache-2.0
// The door's own part: texts, tables made from KERN_OPS, opening a device by name, and the way from each function of
// kernels.h to the backend that owns the device.
//
// Nothing here computes. A name that is not understood, a backend that refuses and a null pointer where none may be are
// statuses, with a sentence for the two that a person can cure. One thread at a time uses a device.
#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/backend.h"

enum { MAXIMUM_ORDINAL = 1023 };

const char *kern_status_text(kern_status status) {
    switch (status) {
#define KERN_STATUS_TEXT(name, value, text) \
    case KERN_##name:                       \
        return text;
        KERN_STATUS_MAP(KERN_STATUS_TEXT)
#undef KERN_STATUS_TEXT
    }
    return "unknown status";
}

void kern_set_reason(char *reason, size_t size, const char *format, ...) {
    if (!reason || size == 0)
        return;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(reason, size, format, arguments);
    va_end(arguments);
}

// ------------------------------------------------------------------------------------------------------- operations

static bool op_is_known(kern_op op) {
    return (unsigned)op < KERN_OP_COUNT;
}

const char *kern_op_name(kern_op op) {
    static const char *const names[] = {
#define KERN_OP_NAME(code, name, args, first) [KERN_OP_##code] = #name,
        KERN_OPS(KERN_OP_NAME)
#undef KERN_OP_NAME
    };
    return op_is_known(op) ? names[op] : "unknown";
}

size_t kern_op_args_size(kern_op op) {
    static const size_t sizes[] = {
#define KERN_OP_SIZE(code, name, args, first) [KERN_OP_##code] = sizeof(args),
        KERN_OPS(KERN_OP_SIZE)
#undef KERN_OP_SIZE
    };
    return op_is_known(op) ? sizes[op] : 0;
}

size_t kern_op_operands(kern_op op) {
    static const size_t operands[] = {
#define KERN_OP_OPERANDS(code, name, args, first) [KERN_OP_##code] = offsetof(args, first) / sizeof(kern_ptr),
        KERN_OPS(KERN_OP_OPERANDS)
#undef KERN_OP_OPERANDS
    };
    return op_is_known(op) ? operands[op] : 0;
}

bool kern_op_lacks_state(kern_op op, const void *args) {
    if (op == KERN_OP_MESA)
        return !((const kern_mesa_args *)args)->state.ref;
    return op == KERN_OP_RECURRENCE && !((const kern_recurrence_args *)args)->state.ref;
}

bool kern_rows_have_slots(const kern_rows *rows) {
    if (rows && rows->followed)
        return true;
    for (int32_t r = 0; rows && r < rows->n_rows; r++)
        if (rows->row[r].slot >= 0)
            return true;
    return false;
}

// ------------------------------------------------------------------------------------------------------------ device

static kern_status open_cuda(const kern_device_options *options, kern_device **out, char *reason, size_t reason_size) {
    void *module = NULL;
    const kern_backend *backend = NULL;
    kern_status status = kern_module_open(&module, &backend, reason, reason_size);
    if (status)
        return status;
    status = backend->open(options, out, reason, reason_size);
    if (status) {
        dlclose(module);
        return status;
    }
    (*out)->backend = backend;
    (*out)->module = module;
    return KERN_OK;
}

static kern_status open_cpu(const kern_device_options *options, kern_device **out, char *reason, size_t reason_size) {
    kern_status status = kern_cpu_backend.open(options, out, reason, reason_size);
    if (status)
        return status;
    (*out)->backend = &kern_cpu_backend;
    (*out)->module = NULL;
    return KERN_OK;
}

static kern_status open_auto(const kern_device_options *options, kern_device **out, char *reason, size_t reason_size) {
    kern_device_options choice = *options;
    choice.name = "cuda:0";
    if (open_cuda(&choice, out, reason, reason_size) == KERN_OK)
        return KERN_OK;
    char cpu_reason[256] = "";
    choice.name = "cpu";
    kern_status status = open_cpu(&choice, out, cpu_reason, sizeof cpu_reason);
    if (status)
        kern_set_reason(reason, reason_size, "%s", cpu_reason);
    return status;
}

static bool is_ordinal(const char *digits) {
    const size_t length = strspn(digits, "0123456789");
    return length > 0 && length <= 4 && digits[length] == '\0' && atoi(digits) <= MAXIMUM_ORDINAL;
}

kern_status kern_device_check_name(const char *name, char *reason, size_t reason_size) {
    static const char *const known[] = {"auto", "cpu", "cpu:16", "cpu:32", "cpu:64"};
    kern_set_reason(reason, reason_size, "%s", "");
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (strcmp(name, known[i]) == 0)
            return KERN_OK;
    if (strncmp(name, "cuda:", 5) == 0 && is_ordinal(name + 5))
        return KERN_OK;
    if (strncmp(name, "cpu:", 4) == 0)
        kern_set_reason(reason, reason_size, "device \"%.64s\": the chunk is 16, 32 or 64", name);
    else if (strncmp(name, "cuda:", 5) == 0)
        kern_set_reason(reason, reason_size, "device \"%.64s\": a number follows the colon, as in cuda:0", name);
    else
        kern_set_reason(reason, reason_size,
                        "device \"%.64s\" is not known; it is cpu, cpu:16, cpu:32, cpu:64, cuda:N or auto", name);
    return KERN_INVALID;
}

kern_status kern_device_open(const kern_device_options *options, kern_device **out, char *reason, size_t reason_size) {
    const char *name = options->name;
    kern_set_reason(reason, reason_size, "%s", "");
    if (!name || !out)
        return KERN_INVALID;
    *out = NULL;
    kern_status status = kern_device_check_name(name, reason, reason_size);
    if (status)
        return status;
    if (strcmp(name, "auto") == 0)
        return open_auto(options, out, reason, reason_size);
    return strncmp(name, "cuda:", 5) == 0 ? open_cuda(options, out, reason, reason_size)
                                          : open_cpu(options, out, reason, reason_size);
}

void kern_device_close(kern_device *device) {
    if (!device)
        return;
    void *module = device->module;
    device->backend->close(device);
    if (module)
        dlclose(module);
}

const kern_device_info *kern_device_describe(const kern_device *device) {
    return &device->info;
}

// ------------------------------------------------------------------------------------------------------------ memory

kern_status kern_alloc(kern_device *device, size_t bytes, void **out) {
    *out = NULL;
    device->allocations++;
    return device->backend->alloc(device, bytes, out);
}

void kern_free(kern_device *device, void *memory) {
    if (memory)
        device->backend->free(device, memory);
}

kern_status kern_alloc_host(kern_device *device, size_t bytes, void **out) {
    *out = NULL;
    return device->backend->alloc_host(device, bytes, out);
}

void kern_free_host(kern_device *device, void *memory) {
    if (memory)
        device->backend->free_host(device, memory);
}

uint64_t kern_allocations(const kern_device *device) {
    return device->allocations;
}

kern_status kern_stream_open(kern_device *device, kern_stream **out) {
    *out = NULL;
    return device->backend->stream_open(device, out);
}

void kern_stream_close(kern_stream *stream) {
    if (stream)
        stream->device->backend->stream_close(stream);
}

kern_status kern_synchronize(kern_stream *stream) {
    return stream->device->backend->synchronize(stream);
}

kern_status kern_event_create(kern_device *device, kern_event **out) {
    *out = NULL;
    return device->backend->event_create(device, false, out);
}

kern_status kern_event_create_timed(kern_device *device, kern_event **out) {
    *out = NULL;
    return device->backend->event_create(device, true, out);
}

kern_status kern_event_elapsed(const kern_event *from, const kern_event *to, double *seconds) {
    *seconds = 0;
    return from->device != to->device ? KERN_INVALID : from->device->backend->event_elapsed(from, to, seconds);
}

void kern_event_free(kern_event *event) {
    if (event)
        event->device->backend->event_free(event);
}

kern_status kern_event_record(kern_stream *stream, kern_event *event) {
    if (stream->device != event->device)
        return KERN_INVALID;
    return stream->device->backend->event_record(stream, event);
}

kern_status kern_event_wait(kern_event *event) {
    return event->device->backend->event_wait(event);
}

kern_status kern_upload(kern_stream *stream, void *device_memory, const void *host, size_t bytes) {
    return bytes ? stream->device->backend->upload(stream, device_memory, host, bytes) : KERN_OK;
}

kern_status kern_download(kern_stream *stream, void *host, const void *device_memory, size_t bytes) {
    return bytes ? stream->device->backend->download(stream, host, device_memory, bytes) : KERN_OK;
}

kern_status kern_copy(kern_stream *stream, void *to, const void *from, size_t bytes) {
    return bytes ? stream->device->backend->copy(stream, to, from, bytes) : KERN_OK;
}

kern_status kern_zero(kern_stream *stream, void *memory, size_t bytes) {
    return bytes ? stream->device->backend->zero(stream, memory, bytes) : KERN_OK;
}

// ------------------------------------------------------------------------------------------------------------- groups

static kern_status check_groups(const kern_device *device, char *reason, size_t reason_size) {
    if (device->backend->group_open)
        return KERN_OK;
    kern_set_reason(reason, reason_size, "this device has no groups");
    return KERN_UNSUPPORTED;
}

kern_status kern_group_name(kern_device *device, unsigned char id[KERN_GROUP_ID], char *reason, size_t reason_size) {
    kern_status status = check_groups(device, reason, reason_size);
    return status ? status : device->backend->group_name(device, id, reason, reason_size);
}

kern_status kern_group_open(kern_device *device, const unsigned char id[KERN_GROUP_ID], int32_t member, int32_t members,
                            kern_group **out, char *reason, size_t reason_size) {
    *out = NULL;
    if (members < 1 || member < 0 || member >= members)
        return KERN_INVALID;
    kern_status status = check_groups(device, reason, reason_size);
    return status ? status : device->backend->group_open(device, id, member, members, out, reason, reason_size);
}

void kern_group_close(kern_group *group) {
    if (group)
        group->device->backend->group_close(group);
}

kern_status kern_group_sum(kern_group *group, kern_stream *stream, float *data, size_t part, size_t rest) {
    return group->device->backend->group_sum(group, stream, data, part, rest);
}

kern_status kern_group_gather(kern_group *group, kern_stream *stream, float *data, size_t part, size_t rest) {
    return group->device->backend->group_gather(group, stream, data, part, rest);
}

kern_status kern_group_join(kern_group *group, kern_stream *stream) {
    return group->device->backend->group_join(group, stream);
}

kern_status kern_group_poll(kern_group *group, kern_stream *stream, bool *done) {
    return group->device->backend->group_poll(group, stream, done);
}

// ----------------------------------------------------------------------------------------------------------- weights

kern_status kern_weight_create(kern_device *device, const kern_weight_desc *desc, kern_weight **out) {
    *out = NULL;
    if (desc->rows < 1 || desc->cols < 1 || desc->rows > INT32_MAX || desc->cols > INT32_MAX)
        return KERN_INVALID;
    if ((desc->host != NULL) == (desc->master != NULL))
        return KERN_INVALID;
    if (desc->master && desc->dtype != KERN_F32)
        return KERN_INVALID;
    const bool quantised = desc->dtype == KERN_Q8 || desc->dtype == KERN_Q4;
    if ((desc->scale != NULL) != quantised || (desc->minimum && desc->dtype != KERN_Q4))
        return KERN_INVALID;
    device->allocations++;
    return device->backend->weight_create(device, desc, out);
}

void kern_weight_free(kern_weight *weight) {
    if (weight)
        kern_weight_device(weight)->backend->weight_free(weight);
}

size_t kern_weight_bytes(const kern_weight *weight) {
    return kern_weight_device(weight)->backend->weight_bytes(weight);
}

// ------------------------------------------------------------------------------------------------------------ launch

kern_status kern_reserve(kern_device *device, kern_op op, const void *args) {
    return op_is_known(op) ? device->backend->reserve(device, op, args) : KERN_INVALID;
}

kern_status kern_launch(kern_stream *stream, kern_op op, const kern_rows *rows, const void *args) {
    if (!op_is_known(op) || (!rows && !kern_op_is_rowless(op)))
        return KERN_INVALID;
    if (kern_op_lacks_state(op, args) && kern_rows_have_slots(rows))
        return KERN_INVALID;
    return stream->device->backend->launch(stream, op, rows, args);
}
