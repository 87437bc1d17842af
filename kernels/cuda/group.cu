// SPDX-License-Identifier: Apache-2.0
// Groups of devices over NCCL (kernels/device.h), whose library is opened with the first group: hosts that serve, or
// train alone, need none.
//
// A group's calls run on a stream of its own, behind an event of the caller's stream and beside what that is given
// next. A block is divided into equal parts, as NCCL wants them; the few floats that are left belong to the last
// member and go in a call of their own, launched together with the first.
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/cuda.cuh"

#if __has_include(<nccl.h>)
#include <nccl.h>

static_assert(sizeof(ncclUniqueId) == KERN_GROUP_ID, "a group's name is NCCL's");

#define GROUP_FUNCTIONS(X) \
    X(GetUniqueId)         \
    X(GetErrorString)      \
    X(GetLastError)        \
    X(CommInitRank)        \
    X(CommAbort)           \
    X(CommGetAsyncError)   \
    X(GroupStart)          \
    X(GroupEnd)            \
    X(ReduceScatter)       \
    X(AllGather)           \
    X(Reduce)              \
    X(Broadcast)

struct group_library {
    void *handle;
#define GROUP_MEMBER(name) decltype(&nccl##name) name;
    GROUP_FUNCTIONS(GROUP_MEMBER)
#undef GROUP_MEMBER
};

struct cuda_group {
    kern_group group;
    group_library nccl;
    ncclComm_t comm;
    int member, members;
    cudaStream_t stream; // the group's calls
    cudaEvent_t event;   // where one stream waits for another
};

static cuda_group *group_of(kern_group *group) {
    return (cuda_group *)group;
}

static void tell(char *reason, size_t size, const char *what, const char *why) {
    if (reason && size > 0)
        snprintf(reason, size, "%s: %s", what, why ? why : "unknown");
}

static kern_status open_library(group_library *nccl, char *reason, size_t reason_size) {
    nccl->handle = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    if (!nccl->handle) {
        tell(reason, reason_size, "NCCL is missing", dlerror());
        return KERN_UNSUPPORTED;
    }
#define GROUP_FIND(name)                                               \
    {                                                                  \
        void *found = dlsym(nccl->handle, "nccl" #name);               \
        if (!found) {                                                  \
            tell(reason, reason_size, "NCCL lacks a function", #name); \
            dlclose(nccl->handle);                                     \
            return KERN_UNSUPPORTED;                                   \
        }                                                              \
        memcpy(&nccl->name, &found, sizeof found);                     \
    }
    GROUP_FUNCTIONS(GROUP_FIND)
#undef GROUP_FIND
    return KERN_OK;
}

static kern_status status_of(ncclResult_t result) {
    return result == ncclSuccess ? KERN_OK : result == ncclInvalidArgument ? KERN_INVALID : KERN_DEVICE_LOST;
}

static kern_status explain(const group_library *nccl, ncclResult_t result, char *reason, size_t reason_size) {
    const char *detail = nccl->GetLastError(NULL);
    tell(reason, reason_size, nccl->GetErrorString(result),
         detail && detail[0] ? detail : "NCCL_DEBUG=WARN tells more");
    return status_of(result);
}

kern_status cuda_group_name(kern_device *device, unsigned char id[KERN_GROUP_ID], char *reason, size_t reason_size) {
    group_library nccl;
    ncclUniqueId name;
    kern_status status = cuda_status(cudaSetDevice(cuda_of(device)->ordinal));
    if (!status)
        status = open_library(&nccl, reason, reason_size);
    if (status)
        return status;
    const ncclResult_t result = nccl.GetUniqueId(&name);
    memcpy(id, &name, sizeof name);
    // The library stays open: a thread of it answers those who come by the name.
    return result == ncclSuccess ? KERN_OK : explain(&nccl, result, reason, reason_size);
}

static kern_status make_streams(cuda_group *group) {
    cudaError_t error = cudaStreamCreateWithFlags(&group->stream, cudaStreamNonBlocking);
    if (error == cudaSuccess)
        error = cudaEventCreateWithFlags(&group->event, cudaEventDisableTiming);
    return cuda_status(error);
}

kern_status cuda_group_open(kern_device *device, const unsigned char id[KERN_GROUP_ID], int32_t member, int32_t members,
                            kern_group **out, char *reason, size_t reason_size) {
    cuda_group *group = (cuda_group *)calloc(1, sizeof *group);
    if (!group)
        return KERN_NO_MEMORY;
    group->group.device = device;
    group->member = member;
    group->members = members;
    kern_status status = cuda_status(cudaSetDevice(cuda_of(device)->ordinal));
    if (!status)
        status = open_library(&group->nccl, reason, reason_size);
    if (!status)
        status = make_streams(group);
    if (!status) {
        ncclUniqueId name;
        memcpy(&name, id, sizeof name);
        const ncclResult_t result = group->nccl.CommInitRank(&group->comm, members, name, member);
        status = result == ncclSuccess ? KERN_OK : explain(&group->nccl, result, reason, reason_size);
    }
    if (status) {
        cuda_group_close(&group->group);
        return status;
    }
    *out = &group->group;
    return KERN_OK;
}

void cuda_group_close(kern_group *handle) {
    cuda_group *group = group_of(handle);
    cudaSetDevice(cuda_of(handle->device)->ordinal);
    if (group->comm)
        group->nccl.CommAbort(group->comm); // ends also what still waits for a member that is gone
    if (group->stream)
        cudaStreamDestroy(group->stream);
    if (group->event)
        cudaEventDestroy(group->event);
    free(group); // the library stays open: threads of it may still be ending
}

// `after` begins what it is given next when `before` has done what it was given.
static kern_status order(cuda_group *group, cudaStream_t before, cudaStream_t after) {
    cudaError_t error = cudaSetDevice(cuda_of(group->group.device)->ordinal);
    if (error == cudaSuccess)
        error = cudaEventRecord(group->event, before);
    if (error == cudaSuccess)
        error = cudaStreamWaitEvent(after, group->event, 0);
    return cuda_status(error);
}

// The member's part of the block, and the few floats behind all parts.
template <typename PARTS, typename REST>
static kern_status launch(kern_group *handle, kern_stream *stream, size_t part, size_t rest, PARTS parts, REST left) {
    cuda_group *group = group_of(handle);
    const kern_status status = order(group, cuda_handle(stream), group->stream);
    if (status)
        return status;
    ncclResult_t result = group->nccl.GroupStart();
    if (result == ncclSuccess && part > 0)
        result = parts(group, part * (size_t)group->member);
    if (result == ncclSuccess && rest > 0)
        result = left(group, part * (size_t)group->members);
    const ncclResult_t ended = group->nccl.GroupEnd();
    return status_of(result == ncclSuccess ? ended : result);
}

kern_status cuda_group_sum(kern_group *handle, kern_stream *stream, float *data, size_t part, size_t rest) {
    return launch(
        handle, stream, part, rest,
        [=](cuda_group *g, size_t at) {
            return g->nccl.ReduceScatter(data, data + at, part, ncclFloat32, ncclSum, g->comm, g->stream);
        },
        [=](cuda_group *g, size_t at) {
            return g->nccl.Reduce(data + at, data + at, rest, ncclFloat32, ncclSum, g->members - 1, g->comm, g->stream);
        });
}

kern_status cuda_group_gather(kern_group *handle, kern_stream *stream, float *data, size_t part, size_t rest) {
    return launch(
        handle, stream, part, rest,
        [=](cuda_group *g, size_t at) {
            return g->nccl.AllGather(data + at, data, part, ncclFloat32, g->comm, g->stream);
        },
        [=](cuda_group *g, size_t at) {
            return g->nccl.Broadcast(data + at, data + at, rest, ncclFloat32, g->members - 1, g->comm, g->stream);
        });
}

kern_status cuda_group_join(kern_group *handle, kern_stream *stream) {
    cuda_group *group = group_of(handle);
    return order(group, group->stream, cuda_handle(stream));
}

kern_status cuda_group_poll(kern_group *handle, kern_stream *stream, bool *done) {
    cuda_group *group = group_of(handle);
    ncclResult_t state = ncclSuccess;
    const ncclResult_t asked = group->nccl.CommGetAsyncError(group->comm, &state);
    *done = false;
    if (asked != ncclSuccess || (state != ncclSuccess && state != ncclInProgress))
        return KERN_DEVICE_LOST;
    const cudaError_t error = cudaStreamQuery(cuda_handle(stream));
    if (error == cudaErrorNotReady)
        return KERN_OK;
    *done = error == cudaSuccess;
    return cuda_status(error);
}

#else // without NCCL's header

static kern_status lacks(char *reason, size_t size) {
    if (reason && size > 0)
        snprintf(reason, size, "the CUDA module was built without NCCL (nccl.h)");
    return KERN_UNSUPPORTED;
}

kern_status cuda_group_name(kern_device *, unsigned char *, char *reason, size_t reason_size) {
    return lacks(reason, reason_size);
}

kern_status cuda_group_open(kern_device *, const unsigned char *, int32_t, int32_t, kern_group **, char *reason,
                            size_t reason_size) {
    return lacks(reason, reason_size);
}

void cuda_group_close(kern_group *) {}

kern_status cuda_group_sum(kern_group *, kern_stream *, float *, size_t, size_t) {
    return KERN_UNSUPPORTED;
}

kern_status cuda_group_gather(kern_group *, kern_stream *, float *, size_t, size_t) {
    return KERN_UNSUPPORTED;
}

kern_status cuda_group_join(kern_group *, kern_stream *) {
    return KERN_UNSUPPORTED;
}

kern_status cuda_group_poll(kern_group *, kern_stream *, bool *) {
    return KERN_UNSUPPORTED;
}

#endif
