// SPDX-License-Identifier: Apache-2.0
// The CUDA module's only symbol, its device, memory and streams.
//
// A device is opened by number. No driver, no such device and a chip below sm_80 are refused with a sentence. Every
// entry makes its device the current one, so that one process may drive several, each from one thread. A fault of the
// device that cannot be undone is KERN_DEVICE_LOST at the next call that sees it.
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/cublas.cuh"

static void set_reason(char *reason, size_t size, const char *format, ...) {
    va_list arguments;
    if (!reason || size == 0)
        return;
    va_start(arguments, format);
    vsnprintf(reason, size, format, arguments);
    va_end(arguments);
}

kern_status cuda_status(cudaError_t error) {
    switch (error) {
    case cudaSuccess:
        return KERN_OK;
    case cudaErrorMemoryAllocation:
        return KERN_NO_MEMORY;
    case cudaErrorNoDevice:
    case cudaErrorInvalidDevice:
    case cudaErrorInsufficientDriver:
        return KERN_NO_DEVICE;
    case cudaErrorInvalidValue:
    case cudaErrorInvalidConfiguration:
        return KERN_INVALID;
    default:
        return KERN_DEVICE_LOST;
    }
}

static cudaError_t make_current(const kern_device *device) {
    return cudaSetDevice(cuda_of(device)->ordinal);
}

// ------------------------------------------------------------------------------------------------------- open, close

enum { LOWEST_MAJOR = 8, CHUNK = 64, DEFAULT_ROWS = 256, PROMPT_CHUNKS = 8 };
enum { LAUNCH_BYTES = 5 << 20 }; // about a microsecond of an H200's memory

static __global__ void built_for(void) {}

// Kernels that wait for the ones before them are in the code for sm_90 alone, which is not what newer chips load.
static bool launches_may_overlap(void) {
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, built_for) == cudaSuccess && attributes.ptxVersion >= 90;
}

static void describe(kern_cuda *cuda, const cudaDeviceProp *properties) {
    kern_device_info *info = &cuda->device.info;
    snprintf(info->name, sizeof info->name, "cuda:%d", cuda->ordinal);
    snprintf(info->description, sizeof info->description, "cuda:%d (%.60s)", cuda->ordinal, properties->name);
    const int length =
        snprintf(info->numeric_profile, sizeof info->numeric_profile, "cuda sm_%d%d C=%d kernels=%d nvcc=%d.%d%s",
                 properties->major, properties->minor, (int)CHUNK, (int)CUDA_REVISION, __CUDACC_VER_MAJOR__,
                 __CUDACC_VER_MINOR__, cuda->fast ? " fast" : "");
    if (cuda->cublas) // its algorithms are chosen for the GPU
        snprintf(info->numeric_profile + length, sizeof info->numeric_profile - (size_t)length,
                 " cublasLt=%zu on %.40s", cuda_cublas_version(cuda->cublas), properties->name);
    info->chunk = CHUNK;
    info->default_rows = DEFAULT_ROWS;
    info->prompt_chunks = PROMPT_CHUNKS;
    info->row_chunks = launches_may_overlap() ? PROMPT_CHUNKS : 1; // else prompts are read token by token
    info->threads = 1;
    info->launch_bytes = LAUNCH_BYTES;
    info->asynchronous = true;
    info->stores_bf16 = true;
    info->memory_total = properties->totalGlobalMem;
    size_t total = 0, available = 0;
    if (cudaMemGetInfo(&available, &total) == cudaSuccess)
        info->memory_free = available;
    cuda->processors = properties->multiProcessorCount;
    cuda->shared_limit = properties->sharedMemPerBlockOptin;
    cuda->overlaps = launches_may_overlap();
}

// The runtime calls an absent driver too old.
static const char *text_of(cudaError_t error) {
    int driver = 0;
    if (error == cudaErrorInsufficientDriver && cudaDriverGetVersion(&driver) == cudaSuccess && driver == 0)
        return "this host has no NVIDIA driver";
    return cudaGetErrorString(error);
}

static kern_status read_ordinal(const char *name, int *ordinal, char *reason, size_t reason_size) {
    char *end = NULL;
    const char *digits = name + strlen("cuda:");
    long value = strtol(digits, &end, 10);
    if (*digits < '0' || *digits > '9' || *end || value > 1023) {
        set_reason(reason, reason_size, "device \"%.64s\": a number follows the colon, as in cuda:0", name);
        return KERN_INVALID;
    }
    int count = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess) {
        set_reason(reason, reason_size, "no CUDA device: %s", text_of(error));
        return KERN_NO_DEVICE;
    }
    if (value >= count) {
        set_reason(reason, reason_size, "device \"%.64s\": this host has %d CUDA device%s", name, count,
                   count == 1 ? "" : "s");
        return KERN_NO_DEVICE;
    }
    *ordinal = (int)value;
    return KERN_OK;
}

static kern_status open_device(const kern_device_options *options, kern_device **out, char *reason,
                               size_t reason_size) {
    const char *name = options->name;
    int ordinal = 0;
    kern_status status = read_ordinal(name, &ordinal, reason, reason_size);
    if (status)
        return status;
    cudaDeviceProp properties;
    cudaError_t error = cudaGetDeviceProperties(&properties, ordinal);
    if (error == cudaSuccess && properties.major < LOWEST_MAJOR) {
        set_reason(reason, reason_size, "%s (%.60s) has compute capability %d.%d; at least %d.0 is needed", name,
                   properties.name, properties.major, properties.minor, (int)LOWEST_MAJOR);
        return KERN_NO_DEVICE;
    }
    if (error == cudaSuccess)
        error = cudaSetDevice(ordinal);
    if (error == cudaSuccess)
        error = cudaFree(NULL); // makes the context now, so that its faults are told here
    if (error != cudaSuccess) {
        set_reason(reason, reason_size, "%s: %s", name, cudaGetErrorString(error));
        return KERN_NO_DEVICE;
    }
    kern_cuda *cuda = (kern_cuda *)calloc(1, sizeof *cuda);
    if (!cuda)
        return KERN_NO_MEMORY;
    cuda->ordinal = ordinal;
    cuda->fast = options->fast;
    if (options->fast && options->trains)
        status = cuda_cublas_open(&cuda->cublas, reason, reason_size);
    if (status) {
        free(cuda);
        return status;
    }
    describe(cuda, &properties);
    *out = &cuda->device;
    return KERN_OK;
}

static void close_device(kern_device *device) {
    make_current(device);
    cuda_cublas_close(cuda_of(device)->cublas);
    cudaFree(cuda_of(device)->workspace);
    free(device);
}

// ------------------------------------------------------------------------------------------------------------ memory

static kern_status allocate(kern_device *device, size_t bytes, void **out) {
    size_t rounded = bytes ? (bytes + 63) & ~(size_t)63 : 64;
    cudaError_t error = make_current(device);
    if (error == cudaSuccess)
        error = cudaMalloc(out, rounded);
    if (error != cudaSuccess)
        *out = NULL;
    else if ((error = cudaMemset(*out, 0, rounded)) == cudaSuccess)
        error = cudaStreamSynchronize(NULL); // no other stream waits for it
    if (error != cudaSuccess) {
        cudaFree(*out);
        *out = NULL;
        (void)cudaGetLastError(); // out of memory is told here once, not again by the next launch
    }
    return cuda_status(error);
}

static void release(kern_device *device, void *memory) {
    make_current(device);
    cudaFree(memory);
}

static kern_status allocate_host(kern_device *device, size_t bytes, void **out) {
    size_t rounded = bytes ? (bytes + 63) & ~(size_t)63 : 64;
    cudaError_t error = make_current(device);
    if (error == cudaSuccess)
        error = cudaHostAlloc(out, rounded, cudaHostAllocDefault);
    if (error != cudaSuccess) {
        (void)cudaGetLastError();
        return cuda_status(error);
    }
    memset(*out, 0, rounded);
    return KERN_OK;
}

static void release_host(kern_device *device, void *memory) {
    make_current(device);
    cudaFreeHost(memory);
}

static kern_status stream_open(kern_device *device, kern_stream **out) {
    cuda_stream *stream = (cuda_stream *)calloc(1, sizeof *stream);
    if (!stream)
        return KERN_NO_MEMORY;
    cudaError_t error = make_current(device);
    if (error == cudaSuccess)
        error = cudaStreamCreateWithFlags(&stream->handle, cudaStreamNonBlocking);
    if (error != cudaSuccess) {
        free(stream);
        return cuda_status(error);
    }
    stream->stream.device = device;
    *out = &stream->stream;
    return KERN_OK;
}

static void stream_close(kern_stream *stream) {
    make_current(stream->device);
    cudaStreamDestroy(cuda_handle(stream));
    free(stream);
}

static kern_status synchronize(kern_stream *stream) {
    return cuda_status(cudaStreamSynchronize(cuda_handle(stream)));
}

static kern_status event_create(kern_device *device, bool timed, kern_event **out) {
    cuda_event *event = (cuda_event *)calloc(1, sizeof *event);
    if (!event)
        return KERN_NO_MEMORY;
    cudaError_t error = make_current(device);
    if (error == cudaSuccess)
        error = cudaEventCreateWithFlags(&event->handle, timed ? cudaEventDefault : cudaEventDisableTiming);
    if (error != cudaSuccess) {
        free(event);
        return cuda_status(error);
    }
    event->event.device = device;
    *out = &event->event;
    return KERN_OK;
}

static void event_free(kern_event *event) {
    make_current(event->device);
    cudaEventDestroy(((cuda_event *)event)->handle);
    free(event);
}

static kern_status event_record(kern_stream *stream, kern_event *event) {
    return cuda_status(cudaEventRecord(((cuda_event *)event)->handle, cuda_handle(stream)));
}

static kern_status event_wait(kern_event *event) {
    return cuda_status(cudaEventSynchronize(((cuda_event *)event)->handle));
}

static kern_status event_elapsed(const kern_event *from, const kern_event *to, double *seconds) {
    float milliseconds = 0;
    const cudaError_t error =
        cudaEventElapsedTime(&milliseconds, ((const cuda_event *)from)->handle, ((const cuda_event *)to)->handle);
    *seconds = 1e-3 * (double)milliseconds;
    return cuda_status(error);
}

static kern_status upload(kern_stream *stream, void *device_memory, const void *from, size_t bytes) {
    return cuda_status(cudaMemcpyAsync(device_memory, from, bytes, cudaMemcpyHostToDevice, cuda_handle(stream)));
}

static kern_status download(kern_stream *stream, void *to, const void *device_memory, size_t bytes) {
    return cuda_status(cudaMemcpyAsync(to, device_memory, bytes, cudaMemcpyDeviceToHost, cuda_handle(stream)));
}

static kern_status copy(kern_stream *stream, void *to, const void *from, size_t bytes) {
    return cuda_status(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, cuda_handle(stream)));
}

static kern_status zero(kern_stream *stream, void *memory, size_t bytes) {
    return cuda_status(cudaMemsetAsync(memory, 0, bytes, cuda_handle(stream)));
}

// ------------------------------------------------------------------------------------------------------- operations

cuda_run cuda_run_of(kern_op op) {
    switch (op) {
#define CUDA_RUN(code, name) \
    case KERN_OP_##code:     \
        return cuda_##name##_run;
        CUDA_OPS(CUDA_RUN)
#undef CUDA_RUN
    default:
        return NULL;
    }
}

cuda_prepare cuda_prepare_of(kern_op op) {
    switch (op) {
#define CUDA_PREPARE(code, name) \
    case KERN_OP_##code:         \
        return cuda_##name##_prepare;
        CUDA_OPS(CUDA_PREPARE)
#undef CUDA_PREPARE
    default:
        return NULL;
    }
}

kern_status cuda_make_workspace(kern_cuda *cuda, size_t bytes) {
    void *larger = NULL;
    if (bytes <= cuda->workspace_bytes)
        return KERN_OK;
    const kern_status status = allocate(&cuda->device, bytes, &larger);
    if (status)
        return status;
    cudaFree(cuda->workspace); // waits for whatever still uses it
    cuda->workspace = (char *)larger;
    cuda->workspace_bytes = bytes;
    cuda->device.allocations++;
    return KERN_OK;
}

static kern_status reserve(kern_device *device, kern_op op, const void *args) {
    kern_cuda *cuda = cuda_of(device);
    cuda_prepare prepare = cuda_prepare_of(op);
    size_t bytes = 0;
    if (!prepare)
        return KERN_UNSUPPORTED;
    const kern_status status = prepare(cuda, args, &bytes);
    return status ? status : cuda_make_workspace(cuda, bytes);
}

static const kern_backend backend = {
    KERN_ABI,
    sizeof(kern_rows),
    sizeof(kern_backend),
    open_device,
    close_device,
    allocate,
    release,
    allocate_host,
    release_host,
    stream_open,
    stream_close,
    synchronize,
    event_create,
    event_free,
    event_record,
    event_wait,
    event_elapsed,
    upload,
    download,
    copy,
    zero,
    cuda_weight_create,
    cuda_weight_free,
    cuda_weight_bytes,
    cuda_mirror_create,
    cuda_mirror_free,
    cuda_mirror_send,
    reserve,
    cuda_launch,
    cuda_calls_run,
    cuda_calls_forget,
    cuda_group_name,
    cuda_group_open,
    cuda_group_close,
    cuda_group_sum,
    cuda_group_gather,
    cuda_group_join,
    cuda_group_poll,
};

extern "C" __attribute__((visibility("default"))) const kern_backend *kern_module_v1(const kern_host *caller) {
    return caller->abi == KERN_ABI ? &backend : NULL;
}
