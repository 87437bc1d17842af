// SPDX-License-Identifier: Apache-2.0
// Operations and plans on a stream. A step of generated tokens alone is a graph, captured once for each size of batch
// (powers of two) and replayed from then on; a step with prompts is launched as it comes. While the graph of a step of
// few tokens is captured its operations are gathered in chains (chain.cuh). A table that is followed has rows of more
// tokens than one, how many nobody on the host knows; its steps are graphs of their own, without chains.
//
// A graph is bound to its operands and to the places of the row table and the workspace. When one changes it is made
// anew.
#include <stdlib.h>

#include "kernels/cuda/chain.cuh"
#include "kernels/cuda/gemm_copies.cuh"

enum { BUCKETS = 14 }; // 1, 2, 4 .. 8192 tokens

struct cuda_graphs {
    const cuda_table *table;
    const char *workspace;
    cudaGraphExec_t exec[BUCKETS];
    cuda_chain *chain[BUCKETS];
};

static const cuda_table *table_of(const kern_rows *rows) {
    return rows ? cuda_mirror_table(kern_rows_owner_of(rows)->mirror) : NULL;
}

static void note_solver(cuda_step *step, const kern_solver *solver) {
    if (solver->mode == KERN_SOLVE_EXACT)
        step->exact_prompts = true;
    else if (cuda_solve_coarse(*solver))
        step->coarse_prompts = true;
    else
        step->fine_prompts = true;
}

static cuda_step step_of(const kern_stream *stream, const kern_rows *rows) {
    cuda_step step = {};
    step.cuda = cuda_of(stream->device);
    step.stream = cuda_handle(stream);
    step.table = table_of(rows);
    if (rows) {
        step.rows = rows->n_rows;
        step.tokens = rows->n_tokens;
        step.logits = rows->n_logits;
        step.chunks = rows->n_chunks;
        step.generated_tokens = rows->n_generated;
        step.generated_rows = rows->n_chunks ? rows->chunk[0].row : rows->n_rows; // which come first
        for (int32_t r = step.generated_rows; r < rows->n_rows; r++)
            note_solver(&step, &rows->row[r].solver);
        step.followed = rows->followed;
        step.generated = !rows->followed && rows->n_generated == rows->n_tokens && rows->n_rows == rows->n_tokens;
        step.merge = rows->merge;
    }
    return step;
}

// Products of rows that merge need more than an operation's prepare says, which does not know the rows; their own
// (cuda_mirror_send) has made it.
static kern_status check_room(const kern_cuda *cuda, const kern_rows *rows) {
    return rows && rows->merge && cuda_gemm_bytes(cuda) > cuda->workspace_bytes ? KERN_INVALID : KERN_OK;
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
    if (!status)
        status = check_room(cuda_of(stream->device), rows);
    cuda_copies copies = {};
    cuda_step step = step_of(stream, rows);
    step.copies = &copies;
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
    kern_status status = cuda_run_calls(step, calls->call, calls->count, 0);
    bool launched = false;
    if (!status)
        status = cuda_chain_flush(step, &launched);
    error = cudaStreamEndCapture(step->stream, &graph);
    if (!status)
        status = cuda_status(error);
    if (!status && step->chain)
        status = cuda_chain_send(step);
    if (!status)
        status = cuda_status(cudaGraphInstantiate(exec, graph, 0));
    if (graph)
        cudaGraphDestroy(graph);
    return status;
}

static void drop_graphs(cuda_graphs *graphs) {
    for (int i = 0; i < BUCKETS; i++) {
        if (graphs->exec[i])
            cudaGraphExecDestroy(graphs->exec[i]);
        cuda_chain_free(graphs->chain[i]);
    }
    *graphs = {};
}

// A step of few tokens is worth gathering where its products can be phases, which takes bf16 weights.
static bool gathers(const kern_calls *calls, const cuda_step *step) {
    bool products = false;
    if (!step->generated || step->tokens > CUDA_CHAIN_TOKENS)
        return false;
    for (size_t i = 0; i < calls->count; i++)
        if (calls->call[i].op == KERN_OP_LINEAR) {
            if (((const kern_linear_args *)calls->call[i].args)->weight.w->dtype != KERN_BF16)
                return false;
            products = true;
        }
    return products;
}

static kern_status make_graph(const cuda_step *bounds, const kern_calls *calls, cuda_chain **chain,
                              cudaGraphExec_t *exec) {
    cuda_step step = *bounds;
    calls->device->allocations++;
    if (gathers(calls, &step)) {
        const kern_status status = cuda_chain_create(step.cuda, calls->count, chain);
        if (status)
            return status;
        calls->device->allocations += *chain ? 1 : 0;
        step.chain = *chain;
    }
    const kern_status status = capture(&step, calls, exec);
    if (status) {
        cuda_chain_free(*chain);
        *chain = NULL;
    }
    return status;
}

// most_rows: of a table that is followed, where tokens may be many more.
static kern_status replay(const cuda_step *step, kern_calls *calls, int bucket, int32_t most_rows) {
    cuda_graphs *graphs = (cuda_graphs *)calls->made;
    if (!graphs && !(calls->made = graphs = (cuda_graphs *)calloc(1, sizeof *graphs)))
        return KERN_NO_MEMORY;
    if (graphs->table != step->table || graphs->workspace != step->cuda->workspace)
        drop_graphs(graphs);
    graphs->table = step->table;
    graphs->workspace = step->cuda->workspace;
    if (!graphs->exec[bucket]) {
        cuda_step bounds = *step;
        bounds.tokens = bounds.generated_tokens = 1 << bucket;
        bounds.logits = step->generated ? bounds.tokens : 0;
        bounds.rows = bounds.generated_rows = bounds.tokens < most_rows ? bounds.tokens : most_rows;
        const kern_status status = make_graph(&bounds, calls, &graphs->chain[bucket], &graphs->exec[bucket]);
        if (status)
            return status;
    }
    return cuda_status(cudaGraphLaunch(graphs->exec[bucket], step->stream));
}

// Launches one by one wait for each other: a kernel that begins before the one before has ended would share its time.
static kern_status run_marked(const cuda_step *step, const kern_calls *calls) {
    kern_status status = cuda_status(cudaEventRecord(((const cuda_event *)calls->mark[0])->handle, step->stream));
    for (size_t i = 0; i < calls->count && !status; i++) {
        status = cuda_run_calls(step, calls->call + i, 1, calls->count - i - 1);
        if (!status)
            status = cuda_status(cudaEventRecord(((const cuda_event *)calls->mark[i + 1])->handle, step->stream));
    }
    return status;
}

kern_status cuda_calls_run(kern_stream *stream, const kern_rows *rows, kern_calls *calls) {
    kern_status status = cuda_status(cudaSetDevice(cuda_of(stream->device)->ordinal));
    if (!status)
        status = check_room(cuda_of(stream->device), rows);
    if (status)
        return status;
    cuda_copies copies = {};
    cuda_step step = step_of(stream, rows);
    step.copies = &copies;
    if (calls->mark)
        return run_marked(&step, calls);
    const int bucket = bucket_of(step.tokens);
    if (rows && rows->followed)
        return bucket < BUCKETS ? replay(&step, calls, bucket, rows->max_rows) : KERN_UNSUPPORTED;
    const bool captured = step.generated && !step.merge && step.logits <= step.tokens && bucket < BUCKETS;
    return captured ? replay(&step, calls, bucket, 1 << bucket) : cuda_run_calls(&step, calls->call, calls->count, 0);
}

void cuda_calls_forget(kern_calls *calls) {
    if (!calls->made)
        return;
    cudaSetDevice(cuda_of(calls->device)->ordinal);
    drop_graphs((cuda_graphs *)calls->made);
    free(calls->made);
    calls->made = NULL;
}
