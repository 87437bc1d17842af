// SPDX-License-Identifier: Apache-2.0
// Row tables in device memory. A step's table goes over as one copy: a header and the used part of each array, packed
// behind it in pinned memory. The header stands at a fixed address, so captured graphs find every step's table there.
//
// Two staging buffers: the host may write the next table while the last one's copy is still waiting its turn.
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/gemm.cuh"

enum { STAGINGS = 2, ALIGNMENT = 16 };

struct cuda_mirror {
    int ordinal;
    char *device;
    size_t bytes;
    char *staging[STAGINGS];
    cudaEvent_t sent[STAGINGS];
    int next;
};

static size_t aligned(size_t bytes) {
    return (bytes + ALIGNMENT - 1) & ~(size_t)(ALIGNMENT - 1);
}

// Packs arrays behind the header; with no host buffer it only measures.
struct packer {
    char *host, *device;
    size_t used;
};

template <typename T> static const T *pack(packer *p, const T *from, int32_t count) {
    const size_t offset = p->used, bytes = sizeof(T) * (size_t)count;
    if (p->host && bytes)
        memcpy(p->host + offset, from, bytes);
    p->used += aligned(bytes);
    return (const T *)(p->device + offset);
}

static size_t pack_table(const kern_rows *rows, const kern_rows *counts, char *host, char *device) {
    packer p = {host, device, aligned(sizeof(cuda_table))};
    cuda_table table = {};
    table.n_rows = counts->n_rows;
    table.n_tokens = counts->n_tokens;
    table.n_generated = counts->n_generated;
    table.n_logits = counts->n_logits;
    table.n_chunks = counts->n_chunks;
    table.slot_stride = (int64_t)rows->slot_stride;
    table.page_stride = (int64_t)rows->page_stride;
    table.row = pack(&p, rows->row, counts->n_rows);
    table.boundary = pack(&p, rows->boundary, counts->n_boundaries);
    table.page = pack(&p, rows->page, counts->n_pages);
    table.id = pack(&p, rows->id, counts->n_tokens);
    table.target = pack(&p, rows->target, counts->n_tokens);
    table.target_weight = pack(&p, rows->target_weight, counts->n_tokens);
    table.logits_token = pack(&p, rows->logits_token, counts->n_logits);
    table.sampler = pack(&p, rows->sampler, counts->n_logits);
    table.edit = pack(&p, rows->edit, counts->n_edits);
    table.chunk = pack(&p, rows->chunk, counts->n_chunks);
    table.token_row = pack(&p, rows->token_row, counts->n_tokens);
    table.token_start = pack(&p, rows->token_start, counts->n_tokens);
    table.token_position = pack(&p, rows->token_position, counts->n_tokens);
    if (rows->followed) // nobody has been followed
        table.n_rows = table.n_tokens = table.n_generated = 0;
    if (host)
        memcpy(host, &table, sizeof table);
    return p.used;
}

static size_t capacity(const kern_rows *rows) {
    kern_rows full = *rows;
    full.n_rows = rows->max_rows;
    full.n_tokens = rows->max_tokens;
    full.n_logits = rows->max_logits;
    full.n_boundaries = rows->max_boundaries;
    full.n_pages = rows->max_pages;
    full.n_edits = rows->max_edits;
    full.n_chunks = rows->max_chunks;
    return pack_table(rows, &full, NULL, NULL);
}

kern_status cuda_mirror_create(kern_device *device, const kern_rows *rows, void **out) {
    cuda_mirror *mirror = (cuda_mirror *)calloc(1, sizeof *mirror);
    if (!mirror)
        return KERN_NO_MEMORY;
    mirror->ordinal = cuda_of(device)->ordinal;
    mirror->bytes = capacity(rows);
    cudaError_t error = cudaSetDevice(mirror->ordinal);
    if (error == cudaSuccess)
        error = cudaMalloc((void **)&mirror->device, mirror->bytes);
    for (int i = 0; i < STAGINGS && error == cudaSuccess; i++) {
        error = cudaHostAlloc((void **)&mirror->staging[i], mirror->bytes, cudaHostAllocDefault);
        if (error == cudaSuccess)
            error = cudaEventCreateWithFlags(&mirror->sent[i], cudaEventDisableTiming);
    }
    if (error != cudaSuccess) {
        cuda_mirror_free(mirror);
        (void)cudaGetLastError();
        return cuda_status(error);
    }
    device->allocations++;
    *out = mirror;
    return KERN_OK;
}

void cuda_mirror_free(void *memory) {
    cuda_mirror *mirror = (cuda_mirror *)memory;
    cudaSetDevice(mirror->ordinal);
    for (int i = 0; i < STAGINGS; i++) {
        if (mirror->sent[i])
            cudaEventDestroy(mirror->sent[i]);
        cudaFreeHost(mirror->staging[i]);
    }
    cudaFree(mirror->device);
    free(mirror);
}

kern_status cuda_mirror_send(kern_stream *stream, const kern_rows *rows, void *memory) {
    cuda_mirror *mirror = (cuda_mirror *)memory;
    const int turn = mirror->next;
    kern_cuda *cuda = cuda_of(stream->device);
    cudaError_t error = cudaSetDevice(mirror->ordinal);
    if (error == cudaSuccess)
        error = cudaEventSynchronize(mirror->sent[turn]);
    kern_status status = cuda_status(error);
    if (!status && rows->merge)
        status = cuda_make_workspace(cuda, cuda_gemm_bytes(cuda));
    if (status)
        return status;
    const size_t bytes = pack_table(rows, rows, mirror->staging[turn], mirror->device);
    error = cudaMemcpyAsync(mirror->device, mirror->staging[turn], bytes, cudaMemcpyHostToDevice, cuda_handle(stream));
    if (error == cudaSuccess)
        error = cudaEventRecord(mirror->sent[turn], cuda_handle(stream));
    mirror->next = (turn + 1) % STAGINGS;
    return cuda_status(error);
}

const cuda_table *cuda_mirror_table(const void *mirror) {
    return (const cuda_table *)((const cuda_mirror *)mirror)->device;
}
