// SPDX-License-Identifier: Apache-2.0
// The CUDA backend's device, streams, weights and row tables, and how an operation is reached.
//
// The module links no project library and exports kern_module_v1 alone (module.cu). Every file *.cu holds operations:
// a function prepare that refuses shapes and says how much workspace it needs, and a function run that launches. run
// allocates nothing and never waits; it may be captured into a graph and replayed with other row tables, so a grid is
// made from the step's bounds, never from the table's counts, and a block past the counts returns at once.
//
// Bits: one order of every sum, whatever the batch; no atomics on floats; no fast-math. Float32 unless a weight is
// narrower.
#ifndef KERNELS_CUDA_CUDA_CUH
#define KERNELS_CUDA_CUDA_CUH

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "kernels/arguments.h"
#include "kernels/backend.h"

// Raised by a change that alters the bits of any operation; part of the numeric profile.
enum { CUDA_REVISION = 7 };

struct cuda_cublas; // cublas.cuh

struct kern_cuda {
    kern_device device;
    int ordinal;
    int processors;      // streaming multiprocessors
    size_t shared_limit; // bytes of shared memory that one block may have
    bool overlaps;       // sm_90: launches begin before the one before has ended; clusters, bulk copies
    bool fast;           // kern_device_options.fast
    cuda_cublas *cublas; // of a fast device that trains (cublas.cuh)
    char *workspace;     // workspace_bytes, of the operation that runs
    size_t workspace_bytes;
};

struct cuda_stream {
    kern_stream stream;
    cudaStream_t handle;
};

struct cuda_event {
    kern_event event;
    cudaEvent_t handle;
};

// What a runtime error means to the caller.
kern_status cuda_status(cudaError_t error);
// Of the launches since the last call.
static inline kern_status cuda_launched(void) {
    return cuda_status(cudaGetLastError());
}

// ------------------------------------------------------------------------------------------------------------- rows

// The row table in device memory: kern_rows with device pointers. One that is followed is written there
// (exit_follow.cu).
struct cuda_table {
    int32_t n_rows, n_tokens, n_generated, n_logits, n_chunks;
    const kern_row *row;
    const int32_t *boundary, *page, *id, *target, *logits_token, *token_row, *token_start;
    const int64_t *token_position;
    const float *target_weight;
    const kern_sampler *sampler;
    const kern_logit_edit *edit;
    const kern_chunk *chunk;
    int64_t slot_stride, page_stride;
};

// Whether a row's solves stop at so large a residual that one float16 a number does while they iterate.
static __host__ __device__ __forceinline__ bool cuda_solve_coarse(const kern_solver &solver) {
    constexpr float LEAST = 4e-3f;
    return solver.mode == KERN_SOLVE_TOLERANCE && solver.tolerance >= LEAST;
}

struct cuda_chain;  // chain.cuh
struct cuda_copies; // gemm_copies.cuh

// What a launcher is given. The bounds are at least the table's counts.
struct cuda_step {
    const kern_cuda *cuda;
    cudaStream_t stream;
    const cuda_table *table; // device memory
    int32_t rows, tokens, logits;
    int32_t generated_rows, generated_tokens; // before the prompt rows
    int32_t chunks;                           // pieces of prompt rows (never a bound)
    bool exact_prompts;                       // a prompt row is solved exactly
    bool coarse_prompts, fine_prompts;        // one is not, but coarsely (cuda_solve_coarse); not so
    bool generated;                           // every row is a generated one of a single token: row r is token r
    bool followed;                            // kern_rows.followed: there may be none
    bool merge;          // kern_rows.merge: training and evaluation, whose bits may depend on the batch
    cuda_chain *chain;   // that phases are gathered in; NULL: every operation is launched
    cuda_copies *copies; // operands that products leave rounded for the next ones; NULL: none are left
};

// What was written, and: an operation comes that is no product of gemm.cu.
void cuda_copies_written(const cuda_step *step, const void *p, size_t bytes);
void cuda_copies_forget(const cuda_step *step);
// Where an operation that is about to write p (rows, columns) writes it once more, rounded to bf16, for the products
// that read it next: an array like p, aligned to 16 bytes, of a number of columns that is a multiple of 8. NULL: they
// would not look there.
__nv_bfloat16 *cuda_copies_offer(const cuda_step *step, const float *p, int32_t rows, int64_t columns);
// The same for the outputs (T, columns) alone that fuse.cu sees products read, of an operation that uses so much of the
// workspace, where copies are behind what products use.
__nv_bfloat16 *cuda_copies_offer_expected(const cuda_step *step, const float *p, int64_t columns, size_t workspace);

// Launches what has been gathered; *launched: whether that was anything.
kern_status cuda_chain_flush(const cuda_step *step, bool *launched);

// The state of this row's slot inside `base`, which is slot 0's; NULL: no slot or no state.
static __device__ __forceinline__ float *cuda_slot(const cuda_table *table, kern_ptr base, int32_t slot) {
    return slot < 0 || !base.p ? NULL : (float *)((char *)base.p + (int64_t)slot * table->slot_stride);
}

// What the compiler cannot know of a pointer that it finds in memory; not NULL.
template <typename T> static __device__ __forceinline__ T *cuda_in_global(T *p) {
    __builtin_assume(__isGlobal(p));
    return p;
}

// --------------------------------------------------------------------------------------------------------- launches

// Launches overlap (programmatic dependent launch, sm_90): a kernel may be set up, and may fetch weights and the row
// table, which went over before any of them, while the one before still runs. So every kernel begins with cuda_begin,
// which lets the next one come, and every thread calls cuda_await before it returns, writes anything or reads what a
// kernel wrote. The wait is for the end of the kernel before, which has waited itself: so all before are over.
static __device__ __forceinline__ void cuda_begin(void) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
static __device__ __forceinline__ void cuda_await(void) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Asks for a line of 128 bytes before cuda_await: it comes as far as the second-level cache, where every write is seen.
// Of use while a launch is small enough for its blocks to wait.
enum { CUDA_FEW_BLOCKS = 1024 };
static __device__ __forceinline__ void cuda_prefetch(const void *p) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

// cluster: blocks that run side by side and reach each other's shared memory (sm_90); the grid is a multiple of it.
template <typename... Wanted, typename... Given>
static inline kern_status cuda_start_clusters(const cuda_step *step, void (*kernel)(Wanted...), int cluster, dim3 grid,
                                              dim3 block, size_t shared, const Given &...args) {
    bool behind_chain = false; // which is no launch that another may overlap
    const kern_status status = cuda_chain_flush(step, &behind_chain);
    if (status)
        return status;
    cudaLaunchAttribute attribute[2] = {};
    unsigned attributes = 0;
    if (step->cuda->overlaps && !behind_chain) {
        attribute[attributes].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attribute[attributes++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (cluster > 1) {
        attribute[attributes].id = cudaLaunchAttributeClusterDimension;
        attribute[attributes].val.clusterDim.x = (unsigned)cluster;
        attribute[attributes].val.clusterDim.y = attribute[attributes].val.clusterDim.z = 1;
        attributes++;
    }
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared;
    config.stream = step->stream;
    config.attrs = attribute;
    config.numAttrs = attributes;
    (void)cudaLaunchKernelEx(&config, kernel, (Wanted)args...);
    return cuda_launched();
}
template <typename... Wanted, typename... Given>
static inline kern_status cuda_start(const cuda_step *step, void (*kernel)(Wanted...), dim3 grid, dim3 block,
                                     size_t shared, const Given &...args) {
    return cuda_start_clusters(step, kernel, 1, grid, block, shared, args...);
}

// ---------------------------------------------------------------------------------------------------------- weights

// KERN_F32: row-major. KERN_BF16: tiles of 16 rows x 16 columns, padded with zeros, a tile's 256 elements in the order
// of the A operand of mma.m16n8k16, so that a warp takes a tile with one 16-byte load a lane; tiles of a row block lie
// one after another.
struct kern_weight {
    kern_device *device;
    kern_dtype dtype;
    int64_t rows, cols;
    void *data;
    size_t bytes;
    bool owned;
};

// A weight as kernels take it.
struct cuda_weight {
    const void *data;
    int32_t rows, cols;
    bool bf16;
};

static inline cuda_weight cuda_weight_of(const kern_weight *weight) {
    return {weight->data, (int32_t)weight->rows, (int32_t)weight->cols, weight->dtype == KERN_BF16};
}

static __host__ __device__ __forceinline__ int64_t cuda_bf16_index(int32_t cols, int32_t row, int32_t col) {
    const int64_t tile = (int64_t)(row / 16) * ((cols + 15) / 16) + col / 16;
    const int32_t lane = row % 8 * 4 + col % 8 / 2, piece = (row / 8 & 1) + 2 * (col / 8 & 1);
    return tile * 256 + lane * 8 + piece * 2 + (col & 1);
}

static __device__ __forceinline__ float cuda_weight_at(const cuda_weight &weight, int32_t row, int32_t col) {
    if (weight.bf16)
        return __bfloat162float(((const __nv_bfloat16 *)weight.data)[cuda_bf16_index(weight.cols, row, col)]);
    return ((const float *)weight.data)[(int64_t)row * weight.cols + col];
}

// ------------------------------------------------------------------------------------------------------- operations

typedef kern_status (*cuda_run)(const cuda_step *step, const void *args);
typedef kern_status (*cuda_prepare)(const kern_cuda *cuda, const void *args, size_t *workspace_bytes);

// At least so many bytes of workspace; what stood there is lost.
kern_status cuda_make_workspace(kern_cuda *cuda, size_t bytes);

// The operations that this backend has, in the order of KERN_OPS; any other is KERN_UNSUPPORTED.
#define CUDA_OPS(X)                                   \
    X(EMBED, embed)                                   \
    X(EMBED_BACKWARD, embed_backward)                 \
    X(RMSNORM, rmsnorm)                               \
    X(RMSNORM_BACKWARD, rmsnorm_backward)             \
    X(L2NORM, l2norm)                                 \
    X(L2NORM_BACKWARD, l2norm_backward)               \
    X(LINEAR, linear)                                 \
    X(LINEAR_BACKWARD_INPUT, linear_backward_input)   \
    X(LINEAR_BACKWARD_WEIGHT, linear_backward_weight) \
    X(BLOCK_LINEAR, block_linear)                     \
    X(BLOCK_LINEAR_BACKWARD, block_linear_backward)   \
    X(SHORT_CONV, short_conv)                         \
    X(SHORT_CONV_BACKWARD, short_conv_backward)       \
    X(GATES, gates)                                   \
    X(GATES_BACKWARD, gates_backward)                 \
    X(MAXPLUS_GATES, maxplus_gates)                   \
    X(MAXPLUS_GATES_BACKWARD, maxplus_gates_backward) \
    X(NORMALISE, normalise)                           \
    X(NORMALISE_BACKWARD, normalise_backward)         \
    X(RECURRENCE, recurrence)                         \
    X(RECURRENCE_BACKWARD, recurrence_backward)       \
    X(MESA, mesa)                                     \
    X(MESA_BACKWARD, mesa_backward)                   \
    X(ROPE, rope)                                     \
    X(ATTENTION, attention)                           \
    X(ATTENTION_BACKWARD, attention_backward)         \
    X(ACTIVATION, activation)                         \
    X(ACTIVATION_BACKWARD, activation_backward)       \
    X(GLU, glu)                                       \
    X(GLU_BACKWARD, glu_backward)                     \
    X(FEATURE_MAP, feature_map)                       \
    X(FEATURE_MAP_BACKWARD, feature_map_backward)     \
    X(RGLRU, rglru)                                   \
    X(RGLRU_BACKWARD, rglru_backward)                 \
    X(CLEAR, clear)                                   \
    X(ADD, add)                                       \
    X(ROW_END, row_end)                               \
    X(EXIT_READ, exit_read)                           \
    X(EXIT_WAIT, exit_wait)                           \
    X(EXIT_FOLLOW, exit_follow)                       \
    X(EXIT_PROBABILITY, exit_probability)             \
    X(EXIT_LOSS, exit_loss)                           \
    X(HEAD_LOGITS, head_logits)                       \
    X(HEAD_LOSS, head_loss)                           \
    X(SAMPLE, sample)                                 \
    X(ADAMW, adamw)                                   \
    X(SQUARE_SUM, square_sum)                         \
    X(CLIP_SCALE, clip_scale)

#define CUDA_DECLARE(code, name)                                                                         \
    kern_status cuda_##name##_prepare(const kern_cuda *cuda, const void *args, size_t *workspace_bytes); \
    kern_status cuda_##name##_run(const cuda_step *step, const void *args);
CUDA_OPS(CUDA_DECLARE)
#undef CUDA_DECLARE

// The operations of a plan in their order, neighbours as one launch where that leaves the same bits (fuse.cu). behind:
// how many more of the plan follow these in memory; they are looked at.
kern_status cuda_run_calls(const cuda_step *step, const kern_call *call, size_t count, size_t behind);
// The entry of an operation; NULL where there is none.
cuda_run cuda_run_of(kern_op op);
cuda_prepare cuda_prepare_of(kern_op op);

// ------------------------------------------------------------------------------------------------------ the backend

// More than 48 KiB of shared memory needs asking; returns the status of that.
template <typename Kernel> static inline kern_status cuda_allow_shared(Kernel *kernel, size_t bytes) {
    if (bytes <= 48 * 1024)
        return KERN_OK;
    return cuda_status(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
}
// At least one: a grid is never empty, its blocks find the counts.
static inline int cuda_blocks(int64_t items, int per_block) {
    return items > 0 ? (int)((items + per_block - 1) / per_block) : 1;
}

// weight.cu
kern_status cuda_weight_create(kern_device *device, const kern_weight_desc *desc, kern_weight **out);
void cuda_weight_free(kern_weight *weight);
size_t cuda_weight_bytes(const kern_weight *weight);
// rows.cu
kern_status cuda_mirror_create(kern_device *device, const kern_rows *rows, void **mirror);
void cuda_mirror_free(void *mirror);
kern_status cuda_mirror_send(kern_stream *stream, const kern_rows *rows, void *mirror);
const cuda_table *cuda_mirror_table(const void *mirror);
// plan.cu
kern_status cuda_launch(kern_stream *stream, kern_op op, const kern_rows *rows, const void *args);
kern_status cuda_calls_run(kern_stream *stream, const kern_rows *rows, kern_calls *calls);
void cuda_calls_forget(kern_calls *calls);
// group.cu
kern_status cuda_group_name(kern_device *device, unsigned char id[KERN_GROUP_ID], char *reason, size_t reason_size);
kern_status cuda_group_open(kern_device *device, const unsigned char id[KERN_GROUP_ID], int32_t member, int32_t members,
                            kern_group **out, char *reason, size_t reason_size);
void cuda_group_close(kern_group *handle);
kern_status cuda_group_sum(kern_group *handle, kern_stream *stream, float *data, size_t part, size_t rest);
kern_status cuda_group_gather(kern_group *handle, kern_stream *stream, float *data, size_t part, size_t rest);
kern_status cuda_group_join(kern_group *handle, kern_stream *stream);
kern_status cuda_group_poll(kern_group *handle, kern_stream *stream, bool *done);

static inline kern_cuda *cuda_of(const kern_device *device) {
    return (kern_cuda *)(uintptr_t)device;
}
static inline cudaStream_t cuda_handle(const kern_stream *stream) {
    return ((const cuda_stream *)stream)->handle;
}

#endif
