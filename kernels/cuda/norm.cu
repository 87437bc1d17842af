// SPDX-License-Identifier: Apache-2.0
// RMSNorm, LayerNorm and L2 normalisation of each of the T * groups vectors of `width` floats (norm.cuh). L2 norms of
// equal width that follow one another are one launch.
#include "kernels/cuda/fuse.cuh"
#include "kernels/cuda/norm.cuh"

enum { BLOCK_OF_WARPS = 4, MANY = 16 }; // MANY: vectors for a multiprocessor

struct norm_group {
    cuda_norm part[CUDA_NORMS];
};

// The quad at element i of the vector at y + at.
static __device__ __forceinline__ void put(const cuda_norm &n, int64_t at, int32_t i, const cuda_quad &q) {
    cuda_store(n.y + at + i, q, n.width - i, n.wide);
    if (n.rounded)
        *(uint2 *)(n.rounded + at + i) = cuda_round_quad(q);
}

template <int LANES, int CACHE>
static __global__ void __launch_bounds__(LANES == CUDA_WARP ? CUDA_WARP * BLOCK_OF_WARPS : LANES)
    norm_kernel(const cuda_table *table, const __grid_constant__ norm_group group) {
    __shared__ float shared[LANES / CUDA_WARP];
    cuda_begin();
    const cuda_norm n = group.part[blockIdx.y];
    const int64_t vector =
        LANES == CUDA_WARP ? (int64_t)blockIdx.x * BLOCK_OF_WARPS + threadIdx.x / CUDA_WARP : (int64_t)blockIdx.x;
    const int64_t vectors = (int64_t)table->n_tokens * n.groups;
    cuda_await();
    if (vector >= vectors)
        return;
    cuda_normalise<CACHE>(n, vector, cuda_team<LANES>(), shared,
                          [&](int32_t i, const cuda_quad &q) { put(n, vector * n.width, i, q); });
}

// Where vectors are many: a warp does what the four warps of norm.cuh do for vectors of up to CUDA_NORM_MIDDLE floats,
// with the same sums, and waits for nobody.
static __device__ __forceinline__ float sum_of_four(const float (&x)[4]) {
    float sum = cuda_warp_sum(x[0]);
#pragma unroll
    for (int warp = 1; warp < 4; warp++)
        sum = __fadd_rn(sum, cuda_warp_sum(x[warp]));
    return sum;
}

static __global__ void __launch_bounds__(CUDA_WARP *BLOCK_OF_WARPS)
    norm_of_many_kernel(const cuda_table *table, const __grid_constant__ norm_group group) {
    enum { WARPS = 4, CACHE = 2, STRIDE = WARPS * CUDA_WARP * CUDA_QUAD };
    cuda_begin();
    const cuda_norm n = group.part[blockIdx.y];
    const int64_t vector = (int64_t)blockIdx.x * BLOCK_OF_WARPS + threadIdx.x / CUDA_WARP, at = vector * n.width;
    const int64_t vectors = (int64_t)table->n_tokens * n.groups;
    const float *weight = n.weight && n.group_weights ? n.weight + vector % n.groups * n.width : n.weight;
    cuda_await();
    if (vector >= vectors)
        return;
    const auto element = [](int warp, int k) {
        return (warp * CUDA_WARP + (int32_t)threadIdx.x % CUDA_WARP) * CUDA_QUAD + k * STRIDE;
    };
    cuda_quad kept[WARPS][CACHE] = {}, factor[WARPS][CACHE] = {};
#pragma unroll
    for (int i = 0; i < WARPS * CACHE; i++)
        if (element(i % WARPS, i / WARPS) < n.width) {
            kept[i % WARPS][i / WARPS] = cuda_norm_input(n, at, element(i % WARPS, i / WARPS));
            factor[i % WARPS][i / WARPS] = cuda_norm_factor(n, weight, at, element(i % WARPS, i / WARPS));
        }
    float mean = 0, sum[WARPS] = {}, squares[WARPS] = {};
    if (n.center) {
#pragma unroll
        for (int i = 0; i < WARPS * CACHE; i++)
            if (element(i % WARPS, i / WARPS) < n.width)
                sum[i % WARPS] = cuda_quad_sum(sum[i % WARPS], kept[i % WARPS][i / WARPS]);
        mean = __fdiv_rn(sum_of_four(sum), (float)n.width);
    }
#pragma unroll
    for (int i = 0; i < WARPS * CACHE; i++)
        if (element(i % WARPS, i / WARPS) < n.width)
            squares[i % WARPS] = cuda_quad_squares(squares[i % WARPS], kept[i % WARPS][i / WARPS], mean,
                                                   n.width - element(i % WARPS, i / WARPS));
    const float rstd = 1.0f / sqrtf(__fadd_rn(__fdiv_rn(sum_of_four(squares), n.divisor), n.eps));
#pragma unroll
    for (int i = 0; i < WARPS * CACHE; i++) {
        const int32_t e = element(i % WARPS, i / WARPS);
        if (e < n.width)
            put(n, at, e, cuda_norm_output(kept[i % WARPS][i / WARPS], factor[i % WARPS][i / WARPS], mean, rstd));
    }
}

static kern_status launch_norms(const cuda_step *step, const norm_group &group, int parts) {
    const int32_t width = group.part[0].width;
    int64_t vectors = 0;
    for (int i = 0; i < parts; i++)
        vectors = group.part[i].groups > vectors ? group.part[i].groups : vectors;
    vectors *= step->tokens;
    if (width <= CUDA_NORM_NARROW)
        return cuda_start(step, norm_kernel<CUDA_WARP, 2>, dim3(cuda_blocks(vectors, BLOCK_OF_WARPS), parts),
                          CUDA_WARP * BLOCK_OF_WARPS, 0, step->table, group);
    if (width <= CUDA_NORM_MIDDLE && vectors >= MANY * (int64_t)step->cuda->processors)
        return cuda_start(step, norm_of_many_kernel, dim3(cuda_blocks(vectors, BLOCK_OF_WARPS), parts),
                          CUDA_WARP * BLOCK_OF_WARPS, 0, step->table, group);
    if (width <= CUDA_NORM_MIDDLE)
        return cuda_start(step, norm_kernel<128, 2>, dim3(cuda_blocks(vectors, 1), parts), 128, 0, step->table, group);
    return cuda_start(step, norm_kernel<256, 4>, dim3(cuda_blocks(vectors, 1), parts), 256, 0, step->table, group);
}

static bool is_wide(const cuda_norm &n) {
    return n.width % CUDA_QUAD == 0 && cuda_is_wide(n.x) && cuda_is_wide(n.y) && cuda_is_wide(n.weight) &&
           cuda_is_wide(n.gate);
}

// --------------------------------------------------------------------------------------------------------- launchers

static bool shape_is_valid(int32_t groups, int32_t width, float eps) {
    return groups >= 1 && width >= 1 && eps >= 0 && eps < INFINITY;
}

kern_status cuda_rmsnorm_prepare(const kern_cuda *cuda, const void *args, size_t *workspace_bytes) {
    (void)cuda;
    (void)workspace_bytes;
    const kern_rmsnorm_args *a = (const kern_rmsnorm_args *)args;
    const bool complete =
        a->x.ref && a->y.ref && kern_activation_is_valid(a->activation) && (a->gate.ref || !a->gate_first);
    return complete && shape_is_valid(a->groups, a->width, a->eps) ? KERN_OK : KERN_INVALID;
}

cuda_norm cuda_norm_of(const kern_rmsnorm_args *a) {
    cuda_norm n = {};
    n.x = a->x.f, n.weight = a->weight.f, n.gate = a->gate.f, n.y = a->y.f;
    n.groups = a->groups;
    n.width = a->width;
    n.divisor = (float)a->width;
    n.eps = a->eps;
    n.offset = a->weight_offset;
    n.activation = a->activation;
    n.gate_first = a->gate_first != 0;
    n.center = a->center != 0;
    n.group_weights = a->group_weights != 0;
    n.wide = is_wide(n);
    return n;
}

kern_status cuda_rmsnorm_run(const cuda_step *step, const void *args) {
    cuda_norm norm = cuda_norm_of((const kern_rmsnorm_args *)args);
    if (norm.width % CUDA_QUAD == 0)
        norm.rounded = cuda_copies_offer_expected(step, norm.y, (int64_t)norm.groups * norm.width, 0);
    return launch_norms(step, {{norm}}, 1);
}

kern_status cuda_l2norm_prepare(const kern_cuda *cuda, const void *args, size_t *workspace_bytes) {
    (void)cuda;
    (void)workspace_bytes;
    const kern_l2norm_args *a = (const kern_l2norm_args *)args;
    return a->x.ref && a->y.ref && shape_is_valid(a->groups, a->width, a->eps) ? KERN_OK : KERN_INVALID;
}

cuda_norm cuda_l2norm_of(const kern_l2norm_args *a) {
    cuda_norm n = {};
    n.x = a->x.f, n.y = a->y.f;
    n.groups = a->groups;
    n.width = a->width;
    n.divisor = 1;
    n.eps = a->eps;
    n.wide = is_wide(n);
    return n;
}

kern_status cuda_l2norm_run(const cuda_step *step, const void *args) {
    return launch_norms(step, {{cuda_l2norm_of((const kern_l2norm_args *)args)}}, 1);
}

kern_status cuda_l2norms_run(const cuda_step *step, const kern_call *call, int count) {
    norm_group group = {};
    for (int i = 0; i < count; i++)
        group.part[i] = cuda_l2norm_of((const kern_l2norm_args *)call[i].args);
    return launch_norms(step, group, count);
}
