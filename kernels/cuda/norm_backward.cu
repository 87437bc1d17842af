// SPDX-License-Identifier: Apache-2.0
// Backward of RMSNorm, LayerNorm and L2 normalisation, and of the norm's weight in the same pass over memory.
//
// With v = (u - m) r and h = dy w [act(z)]:
//     du = r (h - [sum h / n] - v sum(h v) / n)    dw += dy v [act(z)]
//     dx = du, dz = dy v w act'(z);  gate_first: dx = du act(z), dz = du x act'(z)
// r is made again. A block owns some tokens' vectors (of one group where groups have weights of their own). A warp owns
// a vector of up to WARP_MOST floats, or some short ones side by side, and keeps them and its sum of dw in registers; a
// block owns a wider one, reads it twice and keeps the sum in shared memory, an element a thread. Sums are in the order
// of the vectors, warps in order. Each element is read before the thread that read it writes it, so dx may be dy.
#include "kernels/cuda/norm.cuh"
#include "kernels/cuda/sums.cuh"

enum { WARPS = 4, WARP_MOST = 1024, TEAM = 8 * CUDA_WARP, LEAST_TOKENS = 4 };

struct norm_backward {
    cuda_norm n; // y is not used; rounded: of dx
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

static __device__ __forceinline__ void put_dx(const norm_backward &b, int64_t at, int32_t i, const cuda_quad &dx) {
    cuda_store(b.dx + at + i, dx, b.n.width - i, b.wide);
    if (b.n.rounded && i < b.n.width)
        *(uint2 *)(b.n.rounded + at + i) = cuda_round_quad(dx);
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
    put_dx(b, at, i, dx);
}

// The vectors of a block: vector k of `count` is number first + k stride.
struct block_vectors {
    int64_t first, stride, count;
    const float *weight; // NULL: none
};

// Grid: blocks of tokens; groups, where they have weights of their own, else 1.
static __device__ __forceinline__ block_vectors vectors_of(const cuda_table *table, const norm_backward &b) {
    const cuda_norm &n = b.n;
    const int32_t group = n.group_weights ? (int32_t)blockIdx.y : 0, first = (int32_t)blockIdx.x * b.each;
    const int32_t end = first + b.each < table->n_tokens ? first + b.each : table->n_tokens;
    block_vectors v;
    v.first = (int64_t)first * n.groups + group;
    v.stride = n.group_weights ? n.groups : 1;
    v.count = (int64_t)(end - first) * (n.group_weights ? 1 : n.groups);
    v.weight = n.weight ? n.weight + (int64_t)group * n.width : NULL;
    return v;
}

// Wider vectors: a block each.
static __global__ void __launch_bounds__(TEAM)
    norm_backward_kernel(const cuda_table *table, const __grid_constant__ norm_backward b) {
    extern __shared__ float sum_weights[]; // (width)
    __shared__ float shared[TEAM / CUDA_WARP];
    cuda_begin();
    cuda_await();
    const cuda_team<TEAM> team;
    const int32_t lane = team.thread(), width = b.n.width;
    const block_vectors v = vectors_of(table, b);
    float *own = b.partial ? sum_weights : NULL;
    for (int32_t i = lane * CUDA_QUAD; own && i < width; i += TEAM * CUDA_QUAD)
        for (int32_t j = i; j < width && j < i + CUDA_QUAD; j++)
            own[j] = 0;
    for (int64_t k = 0; k < v.count; k++) {
        const int64_t at = (v.first + k * v.stride) * width;
        const norm_statistics s = statistics_of(b, v.weight, at, team, shared);
        for (int32_t i = lane * CUDA_QUAD; i < width; i += TEAM * CUDA_QUAD)
            write_quad(b, s, v.weight, at, i, own);
    }
    if (!b.partial)
        return;
    __syncthreads();
    float *partial = b.partial + ((int64_t)blockIdx.x * gridDim.y + blockIdx.y) * width;
    for (int32_t i = lane; i < width; i += TEAM)
        partial[i] = sum_weights[i];
}

// --------------------------------------------------------------------------------------------------- a warp a vector

// What a lane holds of a vector. gate_first: x is not yet multiplied by the gate's value, else dy is not.
template <int QUADS> struct vector_part {
    cuda_quad x[QUADS], dy[QUADS], value[QUADS], rise[QUADS]; // of the gate: act(z), act'(z)
};

static __device__ __forceinline__ int32_t element_of(int quad) {
    return (quad * CUDA_WARP + (int32_t)threadIdx.x % CUDA_WARP) * CUDA_QUAD;
}

template <int QUADS, bool GATED>
static __device__ __forceinline__ void load_part(const norm_backward &b, int64_t at, vector_part<QUADS> &p) {
#pragma unroll
    for (int q = 0; q < QUADS; q++) {
        const int32_t i = element_of(q), left = b.n.width - i;
        p.x[q] = cuda_load(b.n.x + at + i, left, b.wide);
        p.dy[q] = cuda_load(b.dy + at + i, left, b.wide);
        if (GATED)
            p.value[q] = cuda_load(b.n.gate + at + i, left, b.wide);
    }
}

// u and the gradient of the normalised vector times its factor.
template <int QUADS, bool GATED>
static __device__ __forceinline__ void open_gate(const norm_backward &b, vector_part<QUADS> &p) {
#pragma unroll
    for (int q = 0; q < QUADS; q++)
#pragma unroll
        for (int j = 0; j < CUDA_QUAD; j++) {
            const float z = p.value[q].v[j];
            if (GATED)
                p.rise[q].v[j] = cuda_logistic_slope(b.n.activation == KERN_SILU, z, &p.value[q].v[j]);
            else
                p.value[q].v[j] = 1;
        }
}

template <int QUADS>
static __device__ __forceinline__ norm_statistics part_statistics(const norm_backward &b, const vector_part<QUADS> &p,
                                                                  const cuda_quad (&factor)[QUADS]) {
    const cuda_norm &n = b.n;
    norm_statistics s = {};
    float sum = 0, squares = 0, sum_h = 0, along = 0;
    if (n.center) {
#pragma unroll
        for (int q = 0; q < QUADS; q++)
#pragma unroll
            for (int j = 0; j < CUDA_QUAD; j++)
                sum += n.gate_first ? p.x[q].v[j] * p.value[q].v[j] : p.x[q].v[j];
        s.mean = __fdiv_rn(cuda_warp_sum(sum), (float)n.width);
    }
#pragma unroll
    for (int q = 0; q < QUADS; q++)
#pragma unroll
        for (int j = 0; j < CUDA_QUAD; j++) {
            const float u = n.gate_first ? p.x[q].v[j] * p.value[q].v[j] : p.x[q].v[j];
            const float h = (n.gate_first ? p.dy[q].v[j] : p.dy[q].v[j] * p.value[q].v[j]) * factor[q].v[j];
            const float d = element_of(q) + j < n.width ? u - s.mean : 0.0f;
            squares = fmaf(d, d, squares);
            along = fmaf(h, d, along);
            sum_h += h;
        }
    squares = cuda_warp_sum(squares);
    along = cuda_warp_sum(along);
    if (n.center)
        s.mean_h = cuda_warp_sum(sum_h) / (float)n.width;
    s.rstd = 1.0f / sqrtf(__fadd_rn(__fdiv_rn(squares, n.divisor), n.eps));
    s.slope = along * s.rstd / n.divisor;
    return s;
}

template <int QUADS, bool GATED>
static __device__ __forceinline__ void write_part(const norm_backward &b, const norm_statistics &s, int64_t at,
                                                  const vector_part<QUADS> &p, const cuda_quad (&factor)[QUADS],
                                                  cuda_quad (&sum)[QUADS]) {
    const bool gate_first = GATED && b.n.gate_first;
#pragma unroll
    for (int q = 0; q < QUADS; q++) {
        const int32_t i = element_of(q), left = b.n.width - i;
        cuda_quad dx, dgate, old = {};
        if (b.accumulate)
            old = cuda_load(b.dx + at + i, left, b.wide);
#pragma unroll
        for (int j = 0; j < CUDA_QUAD; j++) {
            const float value = p.value[q].v[j], before = gate_first ? value : 1.0f;
            const float v = (p.x[q].v[j] * before - s.mean) * s.rstd;
            const float gated = gate_first ? p.dy[q].v[j] : p.dy[q].v[j] * value;
            const float gradient = s.rstd * (gated * factor[q].v[j] - s.mean_h - v * s.slope);
            if (GATED)
                dgate.v[j] = (gate_first ? gradient * p.x[q].v[j] : p.dy[q].v[j] * v * factor[q].v[j]) * p.rise[q].v[j];
            dx.v[j] = fmaf(gradient, before, old.v[j]);
            sum[q].v[j] = fmaf(gated, v, sum[q].v[j]);
        }
        if (GATED && b.dgate)
            cuda_store(b.dgate + at + i, dgate, left, b.wide);
        put_dx(b, at, i, dx);
    }
}

// Blocks that a multiprocessor should hold, by the quads that a lane has of each operand.
static constexpr int resident(int quads) {
    return quads <= 4 ? 4 : quads <= 6 ? 3 : 2;
}

// Grid as above.
template <int QUADS, int SIDE, bool GATED>
static __global__ void __launch_bounds__(WARPS *CUDA_WARP, resident(GATED ? 2 * QUADS : QUADS))
    norm_backward_warps_kernel(const cuda_table *table, const __grid_constant__ norm_backward b) {
    extern __shared__ float sum_weights[]; // (WARPS, width)
    cuda_begin();
    cuda_await();
    const int32_t width = b.n.width, warp = (int32_t)threadIdx.x / CUDA_WARP;
    const block_vectors v = vectors_of(table, b);
    cuda_quad factor[QUADS], sum[QUADS] = {};
#pragma unroll
    for (int q = 0; q < QUADS; q++) {
        factor[q] = v.weight ? cuda_load(v.weight + element_of(q), width - element_of(q), b.n.wide) : cuda_quad{};
#pragma unroll
        for (int j = 0; j < CUDA_QUAD; j++)
            factor[q].v[j] = v.weight ? factor[q].v[j] + b.n.offset : 1.0f;
    }
    for (int64_t k = warp * SIDE; k < v.count; k += WARPS * SIDE) {
        vector_part<QUADS> part[SIDE];
#pragma unroll
        for (int i = 0; i < SIDE; i++)
            load_part<QUADS, GATED>(b, (v.first + min(k + i, v.count - 1) * v.stride) * width, part[i]);
#pragma unroll
        for (int i = 0; i < SIDE; i++) {
            open_gate<QUADS, GATED>(b, part[i]);
            const norm_statistics s = part_statistics<QUADS>(b, part[i], factor);
            if (k + i < v.count)
                write_part<QUADS, GATED>(b, s, (v.first + (k + i) * v.stride) * width, part[i], factor, sum);
        }
    }
    if (!b.partial)
        return;
#pragma unroll
    for (int q = 0; q < QUADS; q++)
        cuda_store(sum_weights + warp * width + element_of(q), sum[q], width - element_of(q), false);
    __syncthreads();
    float *partial = b.partial + ((int64_t)blockIdx.x * gridDim.y + blockIdx.y) * width;
    for (int32_t i = (int32_t)threadIdx.x; i < width; i += WARPS * CUDA_WARP) {
        float total = sum_weights[i];
        for (int w = 1; w < WARPS; w++)
            total = __fadd_rn(total, sum_weights[w * width + i]);
        partial[i] = total;
    }
}

// ---------------------------------------------------------------------------------------------------------- launches

typedef void norm_backward_function(const cuda_table *, norm_backward);

static kern_status start(const cuda_step *step, norm_backward_function *kernel, int warps, const norm_backward &b,
                         dim3 grid) {
    const size_t rows = b.n.width > WARP_MOST ? 1 : WARPS, bytes = b.partial ? sizeof(float) * rows * b.n.width : 0;
    const kern_status status = cuda_allow_shared(kernel, bytes);
    return status ? status : cuda_start(step, kernel, grid, warps * CUDA_WARP, bytes, step->table, b);
}

template <bool GATED> static norm_backward_function *kernel_of(int32_t width) {
    const int quads = cuda_blocks(width, CUDA_WARP * CUDA_QUAD);
    return quads == 1   ? norm_backward_warps_kernel<1, 4, GATED>
           : quads == 2 ? norm_backward_warps_kernel<2, 2, GATED>
           : quads <= 4 ? norm_backward_warps_kernel<4, 1, GATED>
           : quads <= 6 ? norm_backward_warps_kernel<6, 1, GATED>
                        : norm_backward_warps_kernel<8, 1, GATED>;
}

static kern_status launch(const cuda_step *step, norm_backward b, float *grad_weight) {
    const int32_t parts = b.n.group_weights ? b.n.groups : 1, width = b.n.width;
    const bool logistic = b.n.activation == KERN_SILU || b.n.activation == KERN_SIGMOID;
    const bool whole = width > WARP_MOST || (b.n.gate && !logistic);
    const cuda_sum_cut cut = cuda_sum_cut_of(step->tokens, LEAST_TOKENS, CUDA_SUM_BLOCKS);
    b.partial = grad_weight ? (float *)step->cuda->workspace : NULL;
    b.each = cut.each;
    b.wide = b.n.wide && cuda_is_wide(b.dy) && cuda_is_wide(b.dx) && cuda_is_wide(b.dgate);
    const dim3 grid((unsigned)cut.blocks, (unsigned)parts);
    const kern_status status = start(step,
                                     whole      ? norm_backward_kernel
                                     : b.n.gate ? kernel_of<true>(width)
                                                : kernel_of<false>(width),
                                     whole ? TEAM / CUDA_WARP : (int)WARPS, b, grid);
    if (status || !grad_weight)
        return status;
    return cuda_add_partials(step, {b.partial, grad_weight, (int64_t)parts * width, cut.blocks, parts * width, 1, 1});
}

// --------------------------------------------------------------------------------------------------------- launchers

static bool shape_is_valid(int32_t groups, int32_t width, float eps) {
    return groups >= 1 && width >= 1 && eps >= 0 && eps < INFINITY && (int64_t)groups * width <= INT32_MAX;
}

static size_t sums_of(const kern_rmsnorm_backward_args *a) {
    return cuda_sum_bytes((int64_t)(a->group_weights ? a->groups : 1) * a->width, CUDA_SUM_BLOCKS);
}

kern_status cuda_rmsnorm_backward_prepare(const kern_cuda *cuda, const void *args, size_t *workspace_bytes) {
    const kern_rmsnorm_backward_args *a = (const kern_rmsnorm_backward_args *)args;
    const bool complete = a->x.ref && a->dy.ref && a->dx.ref && (a->weight.ref != 0) == (a->grad_weight.ref != 0);
    const bool gated = a->gate.ref || (!a->gate_first && !a->dgate.ref);
    if (!complete || !gated || !kern_activation_is_valid(a->activation) || !shape_is_valid(a->groups, a->width, a->eps))
        return KERN_INVALID;
    if (!a->weight.ref)
        return KERN_OK;
    *workspace_bytes = sums_of(a);
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
    if (a->width % CUDA_QUAD == 0)
        b.n.rounded = cuda_copies_offer_expected(step, b.dx, (int64_t)a->groups * a->width, sums_of(a));
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
