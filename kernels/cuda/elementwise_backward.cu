// SPDX-License-Identifier: Apache-2.0
// Backward of activations and gated products, four neighbours a thread, and of the embedding.
//
// Embedding: tokens in slices of SLICE. A block sorts a slice by id, tokens of an id in their order, in shared memory;
// then each run of equal ids is added up in that order and joins the gradient's row, a thread a column. Slices follow
// one another, so the order of every sum is that of the tokens.
#include "kernels/cuda/elements.cuh"

enum { THREADS = 256, QUAD = 4 };

// ------------------------------------------------------------------------------------------------ element by element

// dx = dy act'(x);  with up: dgate = dy up act'(gate), dup = dy act(gate).
struct slopes {
    const float *x, *up, *dy;
    float *dx, *dup;
    int32_t width, activation;
    bool wide;
    __nv_bfloat16 *dx_rounded, *dup_rounded; // optional: these also go there (cuda_copies_offer)
};

static __global__ void __launch_bounds__(THREADS) slopes_kernel(const cuda_table *table, const slopes s) {
    cuda_begin();
    const int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * QUAD;
    const int64_t left = (int64_t)table->n_tokens * s.width - i;
    cuda_await();
    if (left <= 0)
        return;
    const cuda_quad x = cuda_load(s.x + i, left, s.wide), dy = cuda_load(s.dy + i, left, s.wide);
    cuda_quad up = {{1, 1, 1, 1}}, dx, dup;
    if (s.up)
        up = cuda_load(s.up + i, left, s.wide);
#pragma unroll
    for (int j = 0; j < QUAD; j++) {
        float value;
        const float slope = cuda_activation_slope(s.activation, x.v[j], &value);
        dx.v[j] = dy.v[j] * up.v[j] * slope;
        dup.v[j] = dy.v[j] * value;
    }
    cuda_store(s.dx + i, dx, left, s.wide);
    if (s.dup)
        cuda_store(s.dup + i, dup, left, s.wide);
    if (s.dx_rounded)
        *(uint2 *)(s.dx_rounded + i) = cuda_round_quad(dx);
    if (s.dup_rounded)
        *(uint2 *)(s.dup_rounded + i) = cuda_round_quad(dup);
}

static kern_status launch_slopes(const cuda_step *step, slopes s) {
    s.wide = cuda_is_wide(s.x) && cuda_is_wide(s.up) && cuda_is_wide(s.dy) && cuda_is_wide(s.dx) && cuda_is_wide(s.dup);
    return cuda_start(step, slopes_kernel, cuda_blocks((int64_t)step->tokens * s.width, THREADS * QUAD), THREADS, 0,
                      step->table, s);
}

kern_status cuda_activation_backward_prepare(const kern_cuda *cuda, const void *args, size_t *workspace_bytes) {
    (void)cuda;
    (void)workspace_bytes;
    const kern_activation_backward_args *a = (const kern_activation_backward_args *)args;
    const bool valid = a->width >= 1 && kern_activation_is_valid(a->activation);
    return a->x.ref && a->dy.ref && a->dx.ref && valid ? KERN_OK : KERN_INVALID;
}

kern_status cuda_activation_backward_run(const cuda_step *step, const void *args) {
    const kern_activation_backward_args *a = (const kern_activation_backward_args *)args;
    return launch_slopes(step, {a->x.f, NULL, a->dy.f, a->dx.f, NULL, a->width, a->activation, false, NULL, NULL});
}

kern_status cuda_glu_backward_prepare(const kern_cuda *cuda, const void *args, size_t *workspace_bytes) {
    (void)cuda;
    (void)workspace_bytes;
    const kern_glu_backward_args *a = (const kern_glu_backward_args *)args;
    const bool complete = a->gate.ref && a->up.ref && a->dy.ref && a->dgate.ref && a->dup.ref;
    const bool valid = a->width >= 1 && kern_activation_is_valid(a->activation);
    return complete && a->dgate.ref != a->dup.ref && valid ? KERN_OK : KERN_INVALID;
}

kern_status cuda_glu_backward_run(const cuda_step *step, const void *args) {
    const kern_glu_backward_args *a = (const kern_glu_backward_args *)args;
    return launch_slopes(step, {a->gate.f, a->up.f, a->dy.f, a->dgate.f, a->dup.f, a->width, a->activation, false,
                                cuda_copies_offer_expected(step, a->dgate.f, a->width, 0),
                                cuda_copies_offer_expected(step, a->dup.f, a->width, 0)});
}

// ---------------------------------------------------------------------------------------------------------- embedding

enum { SLICE = 4096, SLICES = 64, SORT_THREADS = 1024, COLUMNS = 128, AHEAD = 16 };

// A token of the batch by its id: sorting leaves tokens of an id in their order. What is not there comes last.
static __device__ __forceinline__ uint64_t key_of(const cuda_table *table, int32_t t) {
    return t < table->n_tokens ? (uint64_t)(uint32_t)table->id[t] << 32 | (uint32_t)t : ~(uint64_t)0;
}

// Bitonic: runs of `size` keys, descending where that bit of the place is set, are merged at falling distances.
static __global__ void __launch_bounds__(SORT_THREADS)
    sort_kernel(const cuda_table *table, uint64_t *sorted, int32_t token0) {
    __shared__ uint64_t key[SLICE];
    cuda_begin();
    cuda_await();
    const int32_t first = token0 + (int32_t)blockIdx.x * SLICE;
    for (int i = threadIdx.x; i < SLICE; i += SORT_THREADS)
        key[i] = key_of(table, first + i);
    for (int size = 2; size <= SLICE; size *= 2)
        for (int distance = size / 2; distance > 0; distance /= 2) {
            __syncthreads();
            for (int pair = threadIdx.x; pair < SLICE / 2; pair += SORT_THREADS) {
                const int low = pair / distance * 2 * distance + pair % distance, high = low + distance;
                const uint64_t a = key[low], b = key[high];
                if ((a > b) == ((low & size) == 0)) {
                    key[low] = b;
                    key[high] = a;
                }
            }
        }
    __syncthreads();
    for (int i = threadIdx.x; i < SLICE; i += SORT_THREADS)
        sorted[(int64_t)blockIdx.x * SLICE + i] = key[i];
}

// Grid: places of a slice, pieces of the columns. A block whose place is the first of its id takes them all.
static __global__ void __launch_bounds__(COLUMNS)
    embed_backward_kernel(const uint64_t *sorted, const kern_embed_backward_args a) {
    cuda_begin();
    cuda_await();
    const int32_t place = (int32_t)blockIdx.x, column = (int32_t)(blockIdx.y * COLUMNS + threadIdx.x);
    const uint64_t id = sorted[place] >> 32;
    if (id > INT32_MAX || (place > 0 && sorted[place - 1] >> 32 == id) || column >= a.width)
        return;
    float *grad = a.grad.f + (int64_t)id * a.width + column, sum = 0;
    bool more = true; // AHEAD tokens are asked for at once
    for (int32_t first = place; more && first < SLICE; first += AHEAD) {
        float dy[AHEAD];
        bool there[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const uint64_t key = first + i < SLICE ? sorted[first + i] : ~(uint64_t)0;
            there[i] = key >> 32 == id;
            dy[i] = there[i] ? a.dy.f[(int64_t)(uint32_t)key * a.width + column] : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            if (there[i])
                sum = __fadd_rn(sum, dy[i]);
        more = there[AHEAD - 1];
    }
    *grad = fmaf(a.scale, sum, *grad);
}

kern_status cuda_embed_backward_prepare(const kern_cuda *cuda, const void *args, size_t *workspace_bytes) {
    (void)cuda;
    const kern_embed_backward_args *a = (const kern_embed_backward_args *)args;
    *workspace_bytes = sizeof(uint64_t) * SLICE * SLICES;
    return a->width < 1 || !a->dy.ref || !a->grad.ref ? KERN_INVALID : KERN_OK;
}

kern_status cuda_embed_backward_run(const cuda_step *step, const void *args) {
    const kern_embed_backward_args *a = (const kern_embed_backward_args *)args;
    uint64_t *sorted = (uint64_t *)step->cuda->workspace;
    kern_status status = KERN_OK;
    for (int32_t token0 = 0; !status && token0 < step->tokens; token0 += SLICE * SLICES) {
        const int left = cuda_blocks(step->tokens - token0, SLICE), slices = left < SLICES ? left : (int)SLICES;
        status = cuda_start(step, sort_kernel, slices, SORT_THREADS, 0, step->table, sorted, token0);
        const dim3 grid(SLICE, (unsigned)cuda_blocks(a->width, COLUMNS));
        for (int slice = 0; !status && slice < slices; slice++)
            status = cuda_start(step, embed_backward_kernel, grid, COLUMNS, 0,
                                (const uint64_t *)(sorted + (int64_t)slice * SLICE), *a);
    }
    return status;
}
