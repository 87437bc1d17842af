// SPDX-License-Identifier: Apache-2.0
// The Mesa layer's core, backward, by implicit differentiation (models.md 2.8). Prompt rows only.
//
// 1. For each token and head u = (Hk + Lambda)^-1 (Hv dO), a second solve with the forward's rule, the right-hand side
//    divided by its norm. dQ = u. A norm below 1e-30 gives u = 0 without a solve.
// 2. With G and F the gradients of Hv and Hk, Hv is a recurrence read by x with the gradient dO, and Hk one with the
//    values k, read by -u with the gradient x: two backward passes of the recurrence family (recurrence_backward.cuh),
//    of which the second adds to dK, also what is its dV, and to dbeta and dg. Both take x and u as they are, so that
//    the gradient of a decay stays the right one for the x and u of an inexact solve.
// 3. dLambda = - the sum over all tokens of u * x.
#include "kernels/cuda/chunk.cuh"
#include "kernels/cuda/mesa_any.cuh"
#include "kernels/cuda/mesa_backward.cuh"
#include "kernels/cuda/recurrence_backward.cuh"
#include "kernels/cuda/sums.cuh"

// -------------------------------------------------------------------------------------- the second solve of any shape

// The states of a token. Begins and ends with a barrier.
static __device__ __forceinline__ void advance_states(const cuda_table *table, const mesa &a, const kern_chunk &chunk,
                                                      int32_t t, int32_t head, const any_workspace &own,
                                                      any_shared &shared) {
    const int64_t at = (int64_t)t * a.heads + head;
    const int32_t depth = a.depth, width = a.width;
    const float gamma_m1 = expm1f(a.g[at]), beta = a.beta[at];
    const bool anew = mesa_begins_anew(table, table->row[chunk.row], t);
    __syncthreads();
    if (threadIdx.x < depth) {
        shared.key[threadIdx.x] = a.k[at * depth + threadIdx.x];
        shared.root_key[threadIdx.x] = sqrtf(beta) * a.k[at * depth + threadIdx.x];
    }
    __syncthreads();
    for (int32_t i = threadIdx.x; i < depth * depth; i += ANY_THREADS)
        own.hk[i] =
            fmaf(shared.root_key[i / depth], shared.root_key[i % depth], mesa_decayed(own.hk[i], gamma_m1, anew));
    for (int32_t i = threadIdx.x; i < depth * width; i += ANY_THREADS)
        own.hv[i] =
            fmaf(shared.key[i / width], beta * a.v[at * width + i % width], mesa_decayed(own.hv[i], gamma_m1, anew));
    __syncthreads();
}

// Hv dO divided by its norm, which is returned, into shared.q; 0: below 1e-30. Ends with a barrier.
static __device__ __forceinline__ float put_right_side(const mesa &a, const float *d_o, const float *hv,
                                                       any_shared &shared) {
    const int32_t lane = threadIdx.x % CUDA_WARP, depth = a.depth;
    for (int32_t d = threadIdx.x / CUDA_WARP; d < depth; d += ANY_THREADS / CUDA_WARP) {
        const float sum = any_dot(hv + (int64_t)d * a.width, d_o, a.width);
        if (lane == 0)
            shared.q[d] = sum;
    }
    __syncthreads();
    float largest = 0, poison = 0;
    for (int32_t d = lane; d < depth; d += CUDA_WARP) {
        largest = fmaxf(largest, fabsf(shared.q[d]));
        poison = fmaf(shared.q[d], 0.0f, poison); // NaN where anything is not finite
    }
    largest = cuda_warp_max(largest) + cuda_warp_sum(poison);
    __syncthreads();
    const bool nothing = largest < 1e-30f;
    if (threadIdx.x < depth)
        shared.q[threadIdx.x] = nothing ? 0 : shared.q[threadIdx.x] / largest;
    __syncthreads();
    if (nothing)
        return 0;
    const float rest = sqrtf(any_dot(shared.q, shared.q, depth));
    __syncthreads();
    if (threadIdx.x < depth)
        shared.q[threadIdx.x] /= rest;
    __syncthreads();
    return largest * rest;
}

// A block has a chunk of a head at a time.
static __global__ void __launch_bounds__(ANY_THREADS)
    any_solve_kernel(const cuda_table *table, const mesa a, const float *d_o, float *dq, float tolerance,
                     float *workspace) {
    cuda_begin();
    cuda_await();
    __shared__ any_shared shared;
    const any_workspace own = any_workspace_of(a, workspace);
    const int32_t depth = a.depth, width = a.width, row = depth + width;
    for (int64_t item = blockIdx.x; item < (int64_t)table->n_chunks * a.heads; item += gridDim.x) {
        const int32_t head = (int32_t)(item % a.heads);
        const kern_chunk chunk = table->chunk[item / a.heads];
        kern_solver solver = table->row[chunk.row].solver;
        solver.tolerance = fminf(solver.tolerance, tolerance);
        const float *snapshot = a.snapshots + item * depth * row;
        __syncthreads();
        for (int32_t at = threadIdx.x; at < depth * row; at += ANY_THREADS) {
            const int32_t i = at / row, j = at % row;
            *(j < depth ? &own.hk[(int64_t)i * depth + j] : &own.hv[(int64_t)i * width + j - depth]) = snapshot[at];
        }
        if (threadIdx.x < depth)
            shared.lambda[threadIdx.x] = mesa_lambda_of(a, a.lambda_params[(int64_t)head * depth + threadIdx.x]);
        for (int32_t t = chunk.token0; t < chunk.token0 + chunk.length; t++) {
            const int64_t at = (int64_t)t * a.heads + head;
            advance_states(table, a, chunk, t, head, own, shared);
            const float norm = put_right_side(a, d_o + at * width, own.hv, shared);
            const kern_solve_report report = any_solve(shared, own.hk, depth, solver, own.factor);
            __syncthreads();
            if (threadIdx.x < depth)
                dq[at * depth + threadIdx.x] = shared.x[threadIdx.x] * norm;
            if (threadIdx.x == 0)
                mesa_tell(a, at, report);
        }
    }
}

// -------------------------------------------------------------------------------------------------------------- lambda

constexpr int LAMBDA_LEAST_TOKENS = 256;

static __global__ void __launch_bounds__(CUDA_SUM_THREADS)
    lambda_kernel(const cuda_table *table, const mesa a, const float *u, int32_t each, float *partial) {
    cuda_begin();
    cuda_await();
    const int32_t width = a.heads * a.depth;
    cuda_sum_columns<1>(table->n_tokens, each, width, partial, [&](int32_t t, int32_t c, float(&sum)[1]) {
        const int64_t at = (int64_t)t * width + c;
        sum[0] = fmaf(u[at] * cuda_sigmoid(a.lambda_params[c]), a.x[at], sum[0]);
    });
}

static kern_status launch_lambda(const cuda_step *step, const mesa &a, const float *u, float *grad) {
    const int32_t width = a.heads * a.depth;
    const cuda_sum_cut cut = cuda_sum_cut_of(step->tokens, LAMBDA_LEAST_TOKENS, CUDA_SUM_FEW_BLOCKS);
    const dim3 block = cuda_sum_shape(width);
    const dim3 grid((unsigned)cut.blocks, (unsigned)cuda_blocks(width, (int)block.x));
    float *partial = (float *)step->cuda->workspace;
    const kern_status status = cuda_start(step, lambda_kernel, grid, block, 0, step->table, a, u, cut.each, partial);
    return status ? status : cuda_add_partials(step, {partial, grad, width, cut.blocks, width, 1, -1});
}

// ----------------------------------------------------------------------------------------------------------- launching

// Hv or Hk as a recurrence.
static recurrence state_family(const kern_mesa *mesa, bool keys) {
    kern_recurrence f = {};
    f.decay = KERN_DECAY_SCALAR;
    f.update = KERN_UPDATE_ADD;
    f.weighted = 1;
    f.heads = mesa->heads;
    f.key_width = mesa->key_width;
    f.value_width = keys ? mesa->key_width : mesa->value_width;
    f.scale = keys ? -1.0f : 1.0f; // -u
    return cuda_recurrence_of(&f);
}

kern_status cuda_mesa_backward_prepare(const kern_cuda *cuda, const void *args, size_t *workspace_bytes) {
    const kern_mesa_backward_args *a = (const kern_mesa_backward_args *)args;
    const kern_status status = kern_mesa_check(&a->mesa, KEY_MAX, VALUE_MAX);
    if (status)
        return status;
    if (a->mesa.storage != KERN_STORE_F32)
        return KERN_UNSUPPORTED;
    if (!a->q.ref || !a->k.ref || !a->v.ref || !a->g.ref || !a->beta.ref || !a->lambda_params.ref || !a->x.ref ||
        !a->snapshots.ref || !a->d_o.ref || !a->dq.ref || !a->dk.ref || !a->dv.ref || !a->dg.ref || !a->dbeta.ref ||
        !a->grad_lambda_params.ref || !(a->backward_tolerance >= 0))
        return KERN_INVALID;
    const size_t wants[] = {any_workspace_bytes(cuda, &a->mesa),
                            cuda_gradients_workspace(cuda, state_family(&a->mesa, false)),
                            cuda_gradients_workspace(cuda, state_family(&a->mesa, true)),
                            cuda_sum_bytes((int64_t)a->mesa.heads * a->mesa.key_width, CUDA_SUM_FEW_BLOCKS)};
    for (size_t want : wants)
        if (*workspace_bytes < want)
            *workspace_bytes = want;
    return KERN_OK;
}

// keys: of Hk, which adds to what Hv's gradients left.
static kern_status state_gradients(const cuda_step *step, const kern_mesa_backward_args *from, bool keys) {
    const int64_t heads = from->mesa.heads, depth = from->mesa.key_width, width = from->mesa.value_width;
    recurrence_gradients b = {};
    b.a = state_family(&from->mesa, keys);
    b.a.q = keys ? from->dq.f : from->x.f;
    b.a.k = from->k.f;
    b.a.v = keys ? from->k.f : from->v.f;
    b.a.g = from->g.f;
    b.a.beta = from->beta.f;
    b.d_o = keys ? from->x.f : from->d_o.f;
    b.snapshots = from->snapshots.f + (keys ? 0 : depth);
    b.snapshot_row = (int32_t)(depth + width);
    b.snapshot_state = depth * (depth + width);
    b.snapshot_chunk = heads * b.snapshot_state;
    b.dk = from->dk.f;
    b.dv = keys ? from->dk.f : from->dv.f;
    b.dg = from->dg.f;
    b.dbeta = from->dbeta.f;
    b.dstate = from->dstate.p ? from->dstate.f + (keys ? 0 : heads * depth * depth) : NULL;
    b.dstate_state = depth * (keys ? depth : width);
    b.dstate_row = heads * depth * (depth + width);
    b.add = keys;
    return cuda_gradients(step, b, step->cuda->workspace);
}

static kern_status second_solve(const cuda_step *step, const kern_mesa_backward_args *from, const mesa &a) {
    if (cuda_mesa_has_chunks(step->cuda, &from->mesa) && !step->exact_prompts)
        return cuda_mesa_second_solve(step, a, from->d_o.f, from->dq.f, from->backward_tolerance);
    const int64_t items = (int64_t)step->chunks * a.heads;
    const int most = any_blocks(step->cuda), blocks = items < most ? (int)items : most;
    return cuda_start(step, any_solve_kernel, blocks, ANY_THREADS, 0, step->table, a, from->d_o.f, from->dq.f,
                      from->backward_tolerance, (float *)step->cuda->workspace);
}

kern_status cuda_mesa_backward_run(const cuda_step *step, const void *args) {
    const kern_mesa_backward_args *from = (const kern_mesa_backward_args *)args;
    if (step->generated_rows > 0)
        return KERN_INVALID;
    if (step->chunks == 0)
        return KERN_OK;
    mesa a = cuda_mesa_of(&from->mesa);
    a.q = from->q.f;
    a.k = from->k.f;
    a.v = from->v.f;
    a.g = from->g.f;
    a.beta = from->beta.f;
    a.lambda_params = from->lambda_params.f;
    a.x = from->x.f;
    a.snapshots = from->snapshots.f;
    a.report = (kern_solve_report *)from->report.p;
    a.sum = (kern_solve_sum *)from->sum.p;
    kern_status status = second_solve(step, from, a);
    if (!status)
        status = state_gradients(step, from, false);
    if (!status)
        status = state_gradients(step, from, true);
    return status ? status : launch_lambda(step, a, from->dq.f, from->grad_lambda_params.f);
}
