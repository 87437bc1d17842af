// SPDX-License-Identifier: Apache-2.0
// The device under the operations: opening it, its memory, streams, events and weights. Part of kernels.h, which is
// what other folders include.
//
// One thread at a time uses a device. What a stream is given happens in order; on an asynchronous device it is done
// some time after the call has returned.
#ifndef KERNELS_DEVICE_H
#define KERNELS_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define KERN_CHECKED __attribute__((warn_unused_result))
#else
#define KERN_CHECKED
#endif

#define KERN_STATUS_MAP(X)                                                 \
    X(OK, 0, "ok")                                                         \
    X(INVALID, -1, "invalid argument")                                     \
    X(UNSUPPORTED, -2, "shape or parameter not supported by this backend") \
    X(NO_MEMORY, -3, "out of device memory")                               \
    X(NO_DEVICE, -4, "no such device")                                     \
    X(DEVICE_LOST, -5, "device lost")                                      \
    X(SELF_TEST, -6, "the device's start-up self-test failed")

typedef enum kern_status {
#define KERN_STATUS_ENUM(name, value, text) KERN_##name = (value),
    KERN_STATUS_MAP(KERN_STATUS_ENUM)
#undef KERN_STATUS_ENUM
} kern_status;

const char *kern_status_text(kern_status status);

// ------------------------------------------------------------------------------------------------ device and memory

typedef struct kern_device kern_device;
typedef struct kern_stream kern_stream;
typedef struct kern_event kern_event;

typedef struct kern_device_info {
    char name[32];             // "cpu"
    char description[96];      // "cpu (avx512, 2 threads)"
    char numeric_profile[128]; // backend, instruction set, C, kernel and library revision: equal text = equal bits
    int32_t chunk;             // C
    int32_t default_rows;      // rows a step that suit the device
    int32_t prompt_chunks;     // chunks of prompts a step that cost it about as much as generating for those rows
    int32_t row_chunks;        // of these, of one prompt with states in float32; 1 where its chunks follow one another
    int32_t threads;           // CPU
    uint64_t launch_bytes;     // moved in the time of a launch that has nothing to do; 0: there are no launches
    bool asynchronous;         // launches and transfers return before they are done
    bool stores_bf16;          // KERN_STORE_BF16 is there
    uint64_t memory_total;
    uint64_t memory_free; // when the device was opened; 0: not counted
} kern_device_info;

typedef struct kern_device_options {
    const char *name; // see kern_device_open
    bool fast;   // products may round activations to bfloat16; nothing changes on a device that would not gain by it
    bool trains; // rows that merge will come (kern_rows.merge): a fast GPU opens cuBLASLt, or says what is missing; a
                 // fast one that was opened without refuses them (KERN_UNSUPPORTED)
    int32_t threads; // of a CPU's team at most; 0: as many as OpenMP gives the thread that opens it
} kern_device_options;

// Whether a name is one that kern_device_open knows, whatever is there: KERN_INVALID and a sentence (reason may be
// NULL) where it is none.
KERN_CHECKED kern_status kern_device_check_name(const char *name, char *reason, size_t reason_size);
// Opens a device: "cpu", "cpu:16" (C = 16, 32 or 64), "cuda:N", "auto" (CUDA if a module and a device are there, else
// the CPU). Runs the start-up self-test (oneDNN against a plain loop; a row alone and at every place of a batch).
// MESA_CPU_ISA=portable|avx2|avx512 chooses the CPU's instruction set. reason (may be NULL) gets a sentence on
// failure; for "auto" that gave the CPU it says why there is no CUDA, otherwise it is empty on success.
KERN_CHECKED kern_status kern_device_open(const kern_device_options *options, kern_device **out, char *reason,
                                          size_t reason_size);
void kern_device_close(kern_device *device);
const kern_device_info *kern_device_describe(const kern_device *device);

// Zeroed device memory, 64-byte aligned. Freed with kern_free (NULL is accepted). what names it in error texts.
KERN_CHECKED kern_status kern_alloc(kern_device *device, size_t bytes, void **out);
void kern_free(kern_device *device, void *memory);
// Zeroed host memory, 64-byte aligned, that transfers reach without a copy between. Freed with kern_free_host.
KERN_CHECKED kern_status kern_alloc_host(kern_device *device, size_t bytes, void **out);
void kern_free_host(kern_device *device, void *memory);
uint64_t kern_allocations(const kern_device *device); // kern_alloc, kern_weight_create, workspace, graphs

KERN_CHECKED kern_status kern_stream_open(kern_device *device, kern_stream **out);
void kern_stream_close(kern_stream *stream);
KERN_CHECKED kern_status kern_synchronize(kern_stream *stream);
// A place in a stream's order that the host waits for: kern_event_wait returns when all that was launched before the
// last kern_event_record is done. One that was never recorded is not waited for.
KERN_CHECKED kern_status kern_event_create(kern_device *device, kern_event **out);
void kern_event_free(kern_event *event); // NULL is accepted
KERN_CHECKED kern_status kern_event_record(kern_stream *stream, kern_event *event);
KERN_CHECKED kern_status kern_event_wait(kern_event *event);
// An event that also tells times, which costs a stream a little more than one that does not.
KERN_CHECKED kern_status kern_event_create_timed(kern_device *device, kern_event **out);
// Seconds from one to the other on the device's clock; both timed, recorded and waited for.
KERN_CHECKED kern_status kern_event_elapsed(const kern_event *from, const kern_event *to, double *seconds);
// Host memory of a transfer is the device's until the transfer is done.
KERN_CHECKED kern_status kern_upload(kern_stream *stream, void *device_memory, const void *host, size_t bytes);
KERN_CHECKED kern_status kern_download(kern_stream *stream, void *host, const void *device_memory, size_t bytes);
KERN_CHECKED kern_status kern_copy(kern_stream *stream, void *to, const void *from, size_t bytes);
KERN_CHECKED kern_status kern_zero(kern_stream *stream, void *memory, size_t bytes);

// ----------------------------------------------------------------------------------------------------------- groups

// The devices of several processes, one each, which sum and gather blocks of memory over the links between them: for
// training on several. On CUDA it is NCCL, whose library is opened with the first group; a device without one has no
// group (KERN_UNSUPPORTED, with a reason). All members make the same calls in the same order. A member that ends leaves
// the others' calls undone: whoever waits polls, and gives up by closing.
typedef struct kern_group kern_group;
enum { KERN_GROUP_ID = 128 };

// A group's name, which one member makes and all are given.
KERN_CHECKED kern_status kern_group_name(kern_device *device, unsigned char id[KERN_GROUP_ID], char *reason,
                                         size_t reason_size);
// Waits for all members.
KERN_CHECKED kern_status kern_group_open(kern_device *device, const unsigned char id[KERN_GROUP_ID], int32_t member,
                                         int32_t members, kern_group **out, char *reason, size_t reason_size);
void kern_group_close(kern_group *group); // NULL is accepted
// data: `members` parts of `part` floats and `rest` more, which belong to the last member's part. Sum: the member's own
// part becomes the sum over all members, and the other parts undefined. Gather: the other parts become their members'.
// Both begin when the stream has done what it was given before, and go on beside what it is given afterwards.
KERN_CHECKED kern_status kern_group_sum(kern_group *group, kern_stream *stream, float *data, size_t part, size_t rest);
KERN_CHECKED kern_status kern_group_gather(kern_group *group, kern_stream *stream, float *data, size_t part,
                                           size_t rest);
// What the stream is given afterwards waits for the group's calls so far.
KERN_CHECKED kern_status kern_group_join(kern_group *group, kern_stream *stream);
// Whether the stream has done all it was given. Never waits; KERN_DEVICE_LOST: the group has failed.
KERN_CHECKED kern_status kern_group_poll(kern_group *group, kern_stream *stream, bool *done);

// ---------------------------------------------------------------------------------------------------------- weights

// KERN_Q8 and KERN_Q4: blocks of 32 columns of a row (the last may be shorter) with a scale each, the CPU's alone.
//   Q8: weight = scale code, codes int8     Q4: weight = scale (code - 8), or scale code + minimum, codes 0 .. 15
typedef enum kern_dtype { KERN_F32, KERN_BF16, KERN_Q8, KERN_Q4 } kern_dtype;
enum { KERN_QUANT_BLOCK = 32 };

// The matrix of linear, embed and head: (rows = outputs or vocabulary, cols = inputs), opaque because a backend packs
// it.
typedef struct kern_weight kern_weight;

typedef struct kern_weight_desc {
    kern_dtype dtype;
    int64_t rows, cols;
    const void *host; // row-major host data of that dtype, copied; NULL with master. KERN_Q4: (rows, (cols + 1) / 2)
                      // bytes, the even column in the low four bits
    float *master;    // KERN_F32 only: device memory that the weight reads in place and the optimizer updates; borrowed
    const uint16_t *scale;   // KERN_Q8, KERN_Q4: (rows, blocks), finite float16
    const uint16_t *minimum; // KERN_Q4, optional: likewise
} kern_weight_desc;

KERN_CHECKED kern_status kern_weight_create(kern_device *device, const kern_weight_desc *desc, kern_weight **out);
void kern_weight_free(kern_weight *weight);
size_t kern_weight_bytes(const kern_weight *weight);

#endif
