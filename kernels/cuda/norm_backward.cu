// SPDX-License-Identifier: Apache-2.0
// Backward of RMSNorm, LayerNorm and L2 normalisation, and of the norm's weight in the same pass over memory.
//
// With v = (u - m) r and h = dy w [act(z)]:
//     du = r (h - [sum h / n] - v sum(h v) / n)    dw += dy v [act(z)]
//     dx = du, dz = dy v w act'(z);  gate_first: dx = du act(z), dz = du x act'(z)
// r is made again. A team of lanes, as wide as in norm.cuh, owns a vector; a block owns some tokens' vectors (of one
// group where groups have weights of their own) and keeps its sum of dw in shared memory, an element a lane, so that
// the sums of a block are in the order of its vectors. Each element is read before the thread that read it writes it,
// so dx may be dy.
#include "kernels/cuda/norm.cuh"
#include "kernels/cuda/sums.cuh"

enum { NARROW_TEAMS = 4, LEAST_TOKENS = 4 };

struct norm_backward {
    cuda_norm n; // y is not used
    const float *dy;
    float *dx, *dgate, *partial; // partial: (blocks, groups or 1, width)
    int32_t each;                // tokens of a block
    bool accumulate, wide;
};

struct norm_statistics {
    float mean, rstd, mean_h, slope;
};

// h of the quad at element i.
static __device__ __forceinline__ cuda_quad output_gradient(const norm_backward &b, const float *weight, int64_t at,
                                                            int32_t i) {
    cuda_quad h = cuda_load(b.dy + at + i, b.n.width - i, b.wide);
    const cuda_quad factor = cuda_norm_factor(b.n, weight, at, i);
#pragma unroll
    for (int j = 0; j < CUDA_QUAD; j++)
        h.v[j] *= factor.v[j];
    return h;
}

template <typename Team>
static __device__ __forceinline__ norm_statistics statistics_of(const norm_backward &b, const float *weight, int64_t at,
                                                                const Team &team, float *shared) {
    const cuda_norm &n = b.n;
    const int32_t first = team.thread() * CUDA_QUAD, stride = team.size() * CUDA_QUAD;
    norm_statistics s = {};
    if (n.center) {
        float sum = 0;
        for (int32_t i = first; i < n.width; i += stride)
            sum = cuda_quad_sum(sum, cuda_norm_input(n, at, i));
        s.mean = __fdiv_rn(cuda_lanes_sum(sum, team, shared), (float)n.width);
    }
    float squares = 0, sum_h = 0, along = 0;
    for (int32_t i = first; i < n.width; i += stride) {
        const cuda_quad u = cuda_norm_input(n, at, i), h = output_gradient(b, weight, at, i);
        squares = cuda_quad_squares(squares, u, s.mean, n.width - i);
        sum_h = cuda_quad_sum(sum_h, h);
#pragma unroll
        for (int j = 0; j < CUDA_QUAD; j++)
            along = fmaf(h.v[j], u.v[j] - s.mean, along);
    }
    squares = cuda_lanes_sum(squares, team, shared);
    along = cuda_lanes_sum(along, team, shared);
    if (n.center)
        s.mean_h = cuda_lanes_sum(sum_h, team, shared) / (float)n.width;
    s.rstd = 1.0f / sqrtf(__fadd_rn(__fdiv_rn(squares, n.divisor), n.eps));
    s.slope = along * s.rstd / n.divisor;
    return s;
}

// The gradients of one quad; sum_weight: of dw, or NULL.
static __device__ __forceinline__ void write_quad(const norm_backward &b, const norm_statistics &s, const float *weight,
                                                  int64_t at, int32_t i, float *sum_weight) {
    const cuda_norm &n = b.n;
    const int32_t left = n.width - i;
    const cuda_quad x = cuda_load(n.x + at + i, left, b.wide), dy = cuda_load(b.dy + at + i, left, b.wide);
    cuda_quad z = {}, w = {{1, 1, 1, 1}}, dx, dgate, old = {};
    if (n.gate)
        z = cuda_load(n.gate + at + i, left, b.wide);
    if (weight)
        w = cuda_load(weight + i, left, n.wide);
    if (b.accumulate)
        old = cuda_load(b.dx + at + i, left, b.wide);
#pragma unroll
    for (int j = 0; j < CUDA_QUAD; j++) {
        float value = 1, rise = 0;
        if (n.gate)
            rise = cuda_activation_slope(n.activation, z.v[j], &value);
        const float behind = n.gate_first ? 1.0f : value, before = n.gate_first ? value : 1.0f;
        const float v = (x.v[j] * before - s.mean) * s.rstd, factor = weight ? w.v[j] + n.offset : 1.0f;
        const float gated = dy.v[j] * behind;
        const float gradient = s.rstd * (gated * factor - s.mean_h - v * s.slope);
        dgate.v[j] = n.gate_first ? gradient * x.v[j] * rise : dy.v[j] * v * factor * rise;
        dx.v[j] = fmaf(gradient, before, old.v[j]);
        if (sum_weight && j < left)
            sum_weight[i + j] = fmaf(gated, v, sum_weight[i + j]);
    }
    if (b.dgate)
        cuda_store(b.dgate + at + i, dgate, left, b.wide);
    cuda_store(b.dx + at + i, dx, left, b.wide);
}

// Grid: blocks of tokens; groups, where they have weights of their own, else 1.
template <int LANES, int TEAMS>
static __global__ void __launch_bounds__(LANES *TEAMS)
    norm_backward_kernel(const cuda_table *table, const __grid_constant__ norm_backward b) {
    extern __shared__ float sum_weights[]; // (TEAMS, width)
    __shared__ float shared[LANES / CUDA_WARP];
    cuda_begin();
    cuda_await();
    const cuda_norm &n = b.n;
    const cuda_team<LANES> team;
    const int32_t lane = team.thread(), index = (int32_t)threadIdx.x / LANES, width = n.width;
    const int32_t group0 = n.group_weights ? (int32_t)blockIdx.y : 0, groups = n.group_weights ? 1 : n.groups;
    const int32_t first = (int32_t)blockIdx.x * b.each;
    const int32_t end = first + b.each < table->n_tokens ? first + b.each : table->n_tokens;
    const float *weight = n.weight && n.group_weights ? n.weight + (int64_t)group0 * width : n.weight;
    float *own = b.partial ? sum_weights + index * width : NULL;
    for (int32_t i = lane * CUDA_QUAD; own && i < width; i += LANES * CUDA_QUAD)
        for (int32_t j = i; j < width && j < i + CUDA_QUAD; j++)
            own[j] = 0;
    for (int64_t k = index; k < (int64_t)(end - first) * groups; k += TEAMS) {
        const int64_t vector = (first + k / groups) * n.groups + group0 + k % groups, at = vector * width;
        const norm_statistics s = statistics_of(b, weight, at, team, shared);
        for (int32_t i = lane * CUDA_QUAD; i < width; i += LANES * CUDA_QUAD)
            write_quad(b, s, weight, at, i, own);
    }
    if (!b.partial)
        return;
    __syncthreads();
    float *partial = b.partial + ((int64_t)blockIdx.x * gridDim.y + blockIdx.y) * width;
    for (int32_t i = (int32_t)threadIdx.x; i < width; i += LANES * TEAMS) {
        float sum = sum_weights[i];
        for (int t = 1; t < TEAMS; t++)
            sum = __fadd_rn(sum, sum_weights[t * width + i]);
        partial[i] = sum;
    }
}

template <int LANES, int TEAMS> static kern_status start(const cuda_step *step, const norm_backward &b, dim3 grid) {
    auto *kernel = norm_backward_kernel<LANES, TEAMS>;
    const size_t bytes = b.partial ? sizeof(float) * TEAMS * (size_t)b.n.width : 0;
    const kern_status status = cuda_allow_shared(kernel, bytes);
    return status ? status : cuda_start(step, kernel, grid, LANES * TEAMS, bytes, step->table, b);
}

static kern_status launch(const cuda_step *step, norm_backward b, float *grad_weight) {
    const int32_t parts = b.n.group_weights ? b.n.groups : 1, width = b.n.width;
    const cuda_sum_cut cut = cuda_sum_cut_of(step->tokens, LEAST_TOKENS, CUDA_SUM_BLOCKS);
    b.partial = grad_weight ? (float *)step->cuda->workspace : NULL;
    b.each = cut.each;
    b.wide = b.n.wide && cuda_is_wide(b.dy) && cuda_is_wide(b.dx) && cuda_is_wide(b.dgate);
    const dim3 grid((unsigned)cut.blocks, (unsigned)parts);
    const kern_status status = width <= CUDA_NORM_NARROW   ? start<CUDA_WARP, NARROW_TEAMS>(step, b, grid)
                               : width <= CUDA_NORM_MIDDLE ? start<4 * CUDA_WARP, 1>(step, b, grid)
                                                           : start<8 * CUDA_WARP, 1>(step, b, grid);
    if (status || !grad_weight)
        return status;
    return cuda_add_partials(step, {b.partial, grad_weight, (int64_t)parts * width, cut.blocks, parts * width, 1, 1});
}

// --------------------------------------------------------------------------------------------------------- launchers

static bool shape_is_valid(int32_t groups, int32_t width, float eps) {
    return groups >= 1 && width >= 1 && eps >= 0 && eps < INFINITY && (int64_t)groups * width <= INT32_MAX;
}

kern_status cuda_rmsnorm_backward_prepare(const kern_cuda *cuda, const void *args, size_t *workspace_bytes) {
    const kern_rmsnorm_backward_args *a = (const kern_rmsnorm_backward_args *)args;
    const bool complete = a->x.ref && a->dy.ref && a->dx.ref && (a->weight.ref != 0) == (a->grad_weight.ref != 0);
    const bool gated = a->gate.ref || (!a->gate_first && !a->dgate.ref);
    if (!complete || !gated || !kern_activation_is_valid(a->activation) || !shape_is_valid(a->groups, a->width, a->eps))
        return KERN_INVALID;
    if (!a->weight.ref)
        return KERN_OK;
    *workspace_bytes = cuda_sum_bytes((int64_t)(a->group_weights ? a->groups : 1) * a->width, CUDA_SUM_BLOCKS);
    return sizeof(float) * (size_t)a->width > cuda->shared_limit / 2 ? KERN_UNSUPPORTED : KERN_OK;
}

kern_status cuda_rmsnorm_backward_run(const cuda_step *step, const void *args) {
    const kern_rmsnorm_backward_args *a = (const kern_rmsnorm_backward_args *)args;
    const kern_rmsnorm_args forward = {a->x,          a->weight,     a->gate,   a->dx,
                                       a->groups,     a->width,      a->eps,    a->weight_offset,
                                       a->activation, a->gate_first, a->center, a->group_weights};
    norm_backward b = {};
    b.n = cuda_norm_of(&forward);
    b.dy = a->dy.f;
    b.dx = a->dx.f;
    b.dgate = a->dgate.f;
    b.accumulate = a->accumulate != 0;
    return launch(step, b, a->grad_weight.f);
}

kern_status cuda_l2norm_backward_prepare(const kern_cuda *cuda, const void *args, size_t *workspace_bytes) {
    (void)cuda;
    (void)workspace_bytes;
    const kern_l2norm_backward_args *a = (const kern_l2norm_backward_args *)args;
    const bool complete = a->x.ref && a->dy.ref && a->dx.ref;
    return complete && shape_is_valid(a->groups, a->width, a->eps) ? KERN_OK : KERN_INVALID;
}

kern_status cuda_l2norm_backward_run(const cuda_step *step, const void *args) {
    const kern_l2norm_backward_args *a = (const kern_l2norm_backward_args *)args;
    const kern_l2norm_args forward = {a->x, a->dx, a->groups, a->width, a->eps};
    norm_backward b = {};
    b.n = cuda_l2norm_of(&forward);
    b.dy = a->dy.f;
    b.dx = a->dx.f;
    return launch(step, b, NULL);
}
