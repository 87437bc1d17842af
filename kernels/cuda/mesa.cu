// SPDX-License-Identifier: Apache-2.0
// The Mesa layer's core. tile_kernel, D = V of 64 or 128: a block has one head of a row (mesa.cuh). any_kernel, every
// other shape: a few blocks take the heads of all rows in turn, Hk and Hv in the slot or, without one, in the block's
// piece of the workspace (mesa_any.cuh). It does too where the states before each chunk are wanted for backward and
// mesa_chunk.cu does not do it.
#include "kernels/cuda/mesa.cuh"

#include "kernels/cuda/chain.cuh"
#include "kernels/cuda/chunk.cuh"
#include "kernels/cuda/mesa_any.cuh"

// ----------------------------------------------------------------------------------------------- two shapes, any row

static __device__ __forceinline__ void prefetch(const void *p, size_t bytes) {
    for (size_t i = threadIdx.x * 128; i < bytes; i += blockDim.x * 128)
        cuda_prefetch((const char *)p + i);
}

static_assert(2 * (sizeof(mesa_row_memory<128>) + 1024) <= 228 * 1024, "two blocks a processor");

// BLOCKS: on a processor at once. Where one is enough the solver is not short of registers.
template <int D, typename Stored, int BLOCKS>
static __global__ void __launch_bounds__(mesa_work<D>::THREADS, BLOCKS)
    tile_kernel(const cuda_table *table, const mesa a) {
    cuda_begin();
    extern __shared__ __align__(16) char memory[];
    const int32_t item = (int32_t)blockIdx.x / a.heads, head = (int32_t)blockIdx.x % a.heads;
    if (item >= table->n_rows) {
        cuda_await();
        return;
    }
    const kern_row row = table->row[item];
    if (a.chunked && row.kind == KERN_ROW_PROMPT && row.solver.mode != KERN_SOLVE_EXACT) {
        cuda_await();
        return;
    }
    const mesa_state home = mesa_state_of<Stored>(table, a, row.slot, head);
    if (home.hk && gridDim.x <= CUDA_FEW_BLOCKS) {
        prefetch(home.hk, mesa_keys<Stored>(D) * sizeof(float));
        prefetch(home.hv, D * D * sizeof(Stored));
    }
    cuda_await();
    mesa_row<D, cuda_whole_block>(table, a, row, head, home, *(mesa_row_memory<D, Stored> *)memory);
}

// ------------------------------------------------------------------------------------------------------- every shape

// A state that is not stored in floats is worked on in the block's memory.
static __device__ void any_load(const mesa &a, const mesa_state &home, const any_workspace &own) {
    const int32_t depth = a.depth, width = a.width;
    for (int32_t i = threadIdx.x; i < depth * depth; i += ANY_THREADS) {
        const int32_t row = i / depth, column = i % depth;
        own.hk[i] = home.hk[mesa_triangle_place(depth, row > column ? row : column, row > column ? column : row)];
    }
    for (int32_t i = threadIdx.x; i < depth * width; i += ANY_THREADS)
        own.hv[i] = __bfloat162float(((const cuda_bf16 *)home.hv)[i]);
}
static __device__ void any_store(const mesa &a, const any_workspace &own, const mesa_state &home) {
    const int32_t depth = a.depth, width = a.width;
    for (int32_t i = threadIdx.x; i < depth * depth; i += ANY_THREADS)
        if (i % depth <= i / depth)
            home.hk[mesa_triangle_place(depth, i / depth, i % depth)] = own.hk[i];
    for (int32_t i = threadIdx.x; i < depth * width; i += ANY_THREADS)
        ((cuda_bf16 *)home.hv)[i] = __ushort_as_bfloat16((unsigned short)(__float_as_uint(own.hv[i]) >> 16));
}

// The states before a chunk. Begins with a barrier.
static __device__ void any_keep(const mesa &a, int64_t chunk, int32_t head, const float *hk, const float *hv) {
    const int32_t depth = a.depth, row = depth + a.width;
    float *to = a.snapshots + (chunk * a.heads + head) * depth * row;
    __syncthreads();
    for (int32_t at = threadIdx.x; at < depth * row; at += ANY_THREADS) {
        const int32_t i = at / row, j = at % row;
        to[at] = j < depth ? hk[(int64_t)i * depth + j] : hv[(int64_t)i * a.width + j - depth];
    }
}

// One token of a head; hk and hv in global memory, seen by this block alone. Begins with a barrier.
template <typename Stored>
static __device__ void any_token(const mesa &a, const kern_solver &solver, int64_t at, bool anew, float *hk, float *hv,
                                 double *factor, const cuda_rounding &rounding, any_shared &shared) {
    const int32_t d = threadIdx.x, depth = a.depth, width = a.width;
    const float gamma_m1 = expm1f(a.g[at]), beta = a.beta[at];
    __syncthreads();
    if (d < depth) {
        shared.q[d] = a.q[at * depth + d];
        shared.key[d] = a.k[at * depth + d];
        shared.root_key[d] = sqrtf(beta) * a.k[at * depth + d];
    }
    __syncthreads();
    for (int32_t i = threadIdx.x; i < depth * depth; i += ANY_THREADS)
        hk[i] = fmaf(shared.root_key[i / depth], shared.root_key[i % depth], mesa_decayed(hk[i], gamma_m1, anew));
    __syncthreads();
    const kern_solve_report report = any_solve(shared, hk, depth, solver, factor);
    __syncthreads();
    for (int32_t j = threadIdx.x; j < width; j += ANY_THREADS) {
        const float value = beta * a.v[at * width + j];
        float o = 0;
        for (int32_t i = 0; i < depth; i++) {
            const float h = fmaf(shared.key[i], value, mesa_decayed(hv[(int64_t)i * width + j], gamma_m1, anew));
            o = fmaf(shared.x[i], h, o);
            hv[(int64_t)i * width + j] =
                cuda_rounded_at<Stored>(h, rounding, (uint32_t)(i * ((width + 3) / 4) + j / 4), j % 4);
        }
        a.o[at * width + j] = o;
    }
    if (a.x && d < depth)
        a.x[at * depth + d] = shared.x[d];
    if (threadIdx.x == 0)
        mesa_tell(a, at, report);
}

template <typename Stored>
static __global__ void __launch_bounds__(ANY_THREADS)
    any_kernel(const cuda_table *table, const mesa a, float *workspace) {
    cuda_begin();
    cuda_await();
    __shared__ any_shared shared;
    const any_workspace own = any_workspace_of(a, workspace);
    for (int64_t item = blockIdx.x; item < (int64_t)table->n_rows * a.heads; item += gridDim.x) {
        const kern_row row = table->row[item / a.heads];
        const int32_t head = (int32_t)(item % a.heads);
        const mesa_state home = mesa_state_of<Stored>(table, a, row.slot, head);
        const bool in_slot = home.hk && !MESA_TRIANGLE<Stored>;
        float *hk = in_slot ? home.hk : own.hk, *hv = in_slot ? (float *)home.hv : own.hv;
        __syncthreads();
        if (!home.hk)
            for (int64_t i = threadIdx.x; i < (int64_t)a.depth * (a.depth + a.width); i += ANY_THREADS)
                own.hk[i] = 0;
        else if (!in_slot)
            any_load(a, home, own);
        if (threadIdx.x < a.depth)
            shared.lambda[threadIdx.x] = mesa_lambda_of(a, a.lambda_params[(int64_t)head * a.depth + threadIdx.x]);
        int64_t chunk = a.snapshots ? chunk_of_row(table, (int32_t)(item / a.heads)) : 0;
        for (int32_t t = row.token0; t < row.token0 + row.length; t++) {
            cuda_rounding rounding = {};
            if (a.snapshots && chunk_begins(row, t))
                any_keep(a, chunk++, head, hk, hv);
            if (MESA_TRIANGLE<Stored>)
                rounding = cuda_rounding_of(row.position + (t - row.token0), head);
            any_token<Stored>(a, row.solver, (int64_t)t * a.heads + head, mesa_begins_anew(table, row, t), hk, hv,
                              own.factor, rounding, shared);
        }
        __syncthreads();
        if (home.hk && !in_slot)
            any_store(a, own, home);
    }
}

// ---------------------------------------------------------------------------------------------------------- launching

static bool has_tile(const kern_cuda *cuda, const kern_mesa *mesa) {
    const int32_t width = mesa->key_width;
    const size_t bytes = width == 64 ? sizeof(mesa_row_memory<64>) : sizeof(mesa_row_memory<128>);
    return width == mesa->value_width && (width == 64 || width == 128) && bytes <= cuda->shared_limit;
}

kern_status cuda_mesa_prepare(const kern_cuda *cuda, const void *args, size_t *workspace_bytes) {
    const kern_mesa_args *a = (const kern_mesa_args *)args;
    const kern_mesa *m = &a->mesa;
    const kern_status status = kern_mesa_check(m, KEY_MAX, VALUE_MAX);
    if (status)
        return status;
    if (!a->q.ref || !a->k.ref || !a->v.ref || !a->g.ref || !a->beta.ref || !a->lambda_params.ref || !a->o.ref)
        return KERN_INVALID;
    if (a->snapshots.ref && m->storage != KERN_STORE_F32)
        return KERN_UNSUPPORTED;
    if (cuda_mesa_has_chunks(cuda, m))
        *workspace_bytes = cuda_mesa_chunk_workspace(m);
    const size_t any = any_workspace_bytes(cuda, m);
    if ((a->snapshots.ref || !has_tile(cuda, m)) && *workspace_bytes < any)
        *workspace_bytes = any;
    return KERN_OK;
}

template <int D, typename Stored, int BLOCKS> static kern_status launch_tiles(const cuda_step *step, const mesa &a) {
    constexpr size_t bytes = sizeof(mesa_row_memory<D, Stored>);
    const kern_status status = cuda_allow_shared(tile_kernel<D, Stored, BLOCKS>, bytes);
    if (status)
        return status;
    return cuda_start(step, tile_kernel<D, Stored, BLOCKS>, step->rows * a.heads, mesa_work<D>::THREADS, bytes,
                      step->table, a);
}

mesa cuda_mesa_of(const kern_mesa *from) {
    mesa a = {};
    a.heads = from->heads;
    a.depth = from->key_width;
    a.width = from->value_width;
    a.lambda_bound = from->lambda_bound;
    return a;
}

static mesa mesa_of(const kern_mesa_args *from) {
    mesa a = cuda_mesa_of(&from->mesa);
    a.q = from->q.f;
    a.k = from->k.f;
    a.v = from->v.f;
    a.g = from->g.f;
    a.beta = from->beta.f;
    a.lambda_params = from->lambda_params.f;
    a.slots = from->state;
    a.o = from->o.f;
    a.x = from->x.f;
    a.report = (kern_solve_report *)from->report.p;
    a.sum = (kern_solve_sum *)from->sum.p;
    a.snapshots = from->snapshots.f;
    return a;
}

template <typename Stored> static kern_status run_tiles(const cuda_step *step, const mesa &a) {
    constexpr kern_storage STORAGE = MESA_TRIANGLE<Stored> ? KERN_STORE_BF16 : KERN_STORE_F32;
    if (!cuda_is_wide(a.slots.p))
        return KERN_INVALID;
    bool fits = false;
    const kern_status status = STORAGE == KERN_STORE_F32 ? cuda_chain_mesa(step, &a, &fits) : KERN_OK;
    if (status || fits)
        return status;
    if (cuda_mesa_streams(step, a, STORAGE))
        return cuda_mesa_stream(step, a, STORAGE);
    if (a.depth == 64)
        return launch_tiles<64, Stored, 6>(step, a);
    return step->rows * a.heads <= step->cuda->processors ? launch_tiles<128, Stored, 1>(step, a)
                                                          : launch_tiles<128, Stored, 2>(step, a);
}

template <typename Stored> static kern_status run(const cuda_step *step, const kern_mesa_args *args) {
    mesa a = mesa_of(args);
    a.chunked = step->chunks > 0 && cuda_mesa_has_chunks(step->cuda, &args->mesa);
    const bool elsewhere = a.snapshots && (!a.chunked || step->exact_prompts);
    if (has_tile(step->cuda, &args->mesa) && !elsewhere) {
        const kern_status status =
            !a.chunked || step->generated_rows > 0 || step->exact_prompts ? run_tiles<Stored>(step, a) : KERN_OK;
        return status || !a.chunked ? status : cuda_mesa_chunks(step, a);
    }
    const int64_t items = (int64_t)step->rows * a.heads;
    const int most = any_blocks(step->cuda), blocks = items < most ? (int)items : most;
    return cuda_start(step, any_kernel<Stored>, blocks, ANY_THREADS, 0, step->table, a, (float *)step->cuda->workspace);
}

kern_status cuda_mesa_run(const cuda_step *step, const void *args) {
    const kern_mesa_args *a = (const kern_mesa_args *)args;
    return a->mesa.storage == KERN_STORE_BF16 ? run<cuda_bf16>(step, a) : run<float>(step, a);
}
