// SPDX-License-Identifier: Apache-2.0
// Operations and plans on a stream. A step of generated tokens alone is a graph, captured once for each size of batch
// (powers of two) and replayed from then on; a step with prompts is launched as it comes.
//
// A graph is bound to its operands and to the row table's place on the device. When either changes it is made anew.
#include <stdlib.h>

#include "kernels/cuda/cuda.cuh"

enum { BUCKETS = 11 }; // 1, 2, 4 .. 1024 tokens

struct cuda_graphs {
    const cuda_table *table;
    cudaGraphExec_t exec[BUCKETS];
};

static const cuda_table *table_of(const kern_rows *rows) {
    return rows ? cuda_mirror_table(kern_rows_owner_of(rows)->mirror) : NULL;
}

static cuda_step step_of(const kern_stream *stream, const kern_rows *rows) {
    cuda_step step = {cuda_of(stream->device), cuda_handle(stream), table_of(rows), 0, 0, 0, false};
    if (rows) {
        step.rows = rows->n_rows;
        step.tokens = rows->n_tokens;
        step.logits = rows->n_logits;
        step.generated = rows->n_generated == rows->n_tokens && rows->n_rows == rows->n_tokens;
    }
    return step;
}

kern_status cuda_launch(kern_stream *stream, kern_op op, const kern_rows *rows, const void *args) {
    size_t bytes = 0;
    cuda_prepare prepare = cuda_prepare_of(op);
    kern_status status = prepare ? prepare(cuda_of(stream->device), args, &bytes) : KERN_UNSUPPORTED;
    if (status)
        return status;
    if (bytes > cuda_of(stream->device)->workspace_bytes)
        return KERN_INVALID;
    status = cuda_status(cudaSetDevice(cuda_of(stream->device)->ordinal));
    const cuda_step step = step_of(stream, rows);
    return status ? status : cuda_run_of(op)(&step, args);
}

// ------------------------------------------------------------------------------------------------------------ graphs

static int bucket_of(int32_t tokens) {
    int bucket = 0;
    while (bucket < BUCKETS && (1 << bucket) < tokens)
        bucket++;
    return bucket;
}

static kern_status capture(const cuda_step *step, const kern_calls *calls, cudaGraphExec_t *exec) {
    cudaGraph_t graph = NULL;
    cudaError_t error = cudaStreamBeginCapture(step->stream, cudaStreamCaptureModeThreadLocal);
    if (error != cudaSuccess)
        return cuda_status(error);
    kern_status status = cuda_run_calls(step, calls->call, calls->count);
    error = cudaStreamEndCapture(step->stream, &graph);
    if (!status)
        status = cuda_status(error);
    if (!status)
        status = cuda_status(cudaGraphInstantiate(exec, graph, 0));
    if (graph)
        cudaGraphDestroy(graph);
    return status;
}

static void drop_graphs(cuda_graphs *graphs) {
    for (int i = 0; i < BUCKETS; i++)
        if (graphs->exec[i])
            cudaGraphExecDestroy(graphs->exec[i]);
    *graphs = {};
}

static kern_status replay(const cuda_step *step, kern_calls *calls, int bucket) {
    cuda_graphs *graphs = (cuda_graphs *)calls->made;
    if (!graphs && !(calls->made = graphs = (cuda_graphs *)calloc(1, sizeof *graphs)))
        return KERN_NO_MEMORY;
    if (graphs->table != step->table)
        drop_graphs(graphs);
    graphs->table = step->table;
    if (!graphs->exec[bucket]) {
        cuda_step bounds = *step;
        bounds.rows = bounds.tokens = bounds.logits = 1 << bucket;
        calls->device->allocations++;
        kern_status status = capture(&bounds, calls, &graphs->exec[bucket]);
        if (status)
            return status;
    }
    return cuda_status(cudaGraphLaunch(graphs->exec[bucket], step->stream));
}

kern_status cuda_calls_run(kern_stream *stream, const kern_rows *rows, kern_calls *calls) {
    kern_status status = cuda_status(cudaSetDevice(cuda_of(stream->device)->ordinal));
    if (status)
        return status;
    const cuda_step step = step_of(stream, rows);
    const int bucket = bucket_of(step.tokens);
    const bool captured = step.generated && step.logits <= step.tokens && bucket < BUCKETS;
    return captured ? replay(&step, calls, bucket) : cuda_run_calls(&step, calls->call, calls->count);
}

void cuda_calls_forget(kern_calls *calls) {
    if (!calls->made)
        return;
    cudaSetDevice(cuda_of(calls->device)->ordinal);
    drop_graphs((cuda_graphs *)calls->made);
    free(calls->made);
    calls->made = NULL;
}
