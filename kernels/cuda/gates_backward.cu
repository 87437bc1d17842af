// SPDX-License-Identifier: Apache-2.0
// Backward of gates, of mLSTM's stabilised gates and of the normaliser; the formulas, with s the logistic function,
// z = a + dt_bias, e = e^A_log:
//     SIGMOID      da = dg s(-a) / divisor, 0 where clamped; with a cap also
//                  dbeta -= dg 2 (1 - cap) beta / (1 - (1 - cap) beta^2)
//     EXPONENTIAL  dz = -dg e s(z)                                     dA_log = sum dg g
//     BOUNDED      u = e z: dz = dg lower s(u) s(-u) e                 dA_log = sum dg lower s(u) s(-u) u
//     STEP         ddt = dbeta - dg e: dz = ddt s(z), 0 where clamped  dA_log = sum dg g
//     da = dz, ddt_bias = sum dz;  db = dbeta factor s(b) s(-b)
//     maxplus      di = dbeta beta, df = dg s(-f), both times the slope of the cap
//     normalise    do = dh / d, dn = -(dh . o) / d^2 [sign(n), 0 where e^-m is the larger]
// da and db may be dg and dbeta: the write gates, which read dg, are a launch before the decays.
#include "kernels/cuda/gates.cuh"
#include "kernels/cuda/sums.cuh"

enum { WARPS = 4, THREADS = WARPS * CUDA_WARP, LEAST_TOKENS = 32 };

// ------------------------------------------------------------------------------------------------------ write gates

static __global__ void write_backward_kernel(const cuda_table *table, const kern_gates_backward_args a) {
    cuda_begin();
    const int32_t t = cuda_plane_item(), h = cuda_plane_column();
    const bool there = t < table->n_tokens && h < a.gates.heads;
    cuda_await();
    if (!there)
        return;
    const int64_t at = (int64_t)t * a.gates.heads + h;
    const float rest = 1.0f - a.gates.gamma_cap, b = a.b.f[at], beta = cuda_sigmoid(b);
    float dbeta = a.dbeta.f[at] * a.gates.write_factor;
    if (a.gates.decay_law == KERN_DECAY_LAW_SIGMOID && rest > 0)
        dbeta -= a.dg.f[at] * (2.0f * rest * beta) / (1.0f - rest * (beta * beta));
    a.db.f[at] = dbeta * beta * cuda_sigmoid(-b);
}

// ----------------------------------------------------------------------------------------------------------- decays

static __global__ void sigmoid_backward_kernel(const cuda_table *table, const kern_gates_backward_args a) {
    cuda_begin();
    const kern_gates &f = a.gates;
    const int32_t t = cuda_plane_item(), c = cuda_plane_column(), width = f.heads * f.channels;
    const bool there = t < table->n_tokens && c < width;
    cuda_await();
    if (!there)
        return;
    const int64_t at = (int64_t)t * width + c;
    const float z = a.a.f[at], da = a.dg.f[at] * cuda_sigmoid(-z) / f.divisor;
    const bool clamped = f.clamp_min < 0 && __fdiv_rn(cuda_log_sigmoid(z), f.divisor) < f.clamp_min;
    a.da.f[at] = clamped ? 0.0f : da;
}

// dz of one decay; *dlog: what it gives to A_log's gradient.
static __device__ __forceinline__ float decay_gradient(const kern_gates &f, float z, float rate, float dg, float dbeta,
                                                       float *dlog) {
    if (f.decay_law == KERN_DECAY_LAW_BOUNDED) {
        const float u = rate * z, du = dg * (f.lower_bound * cuda_sigmoid(u) * cuda_sigmoid(-u));
        *dlog = du * u;
        return du * rate;
    }
    float dt = cuda_softplus(z), dz = (dbeta - dg * rate) * cuda_sigmoid(z);
    if (f.decay_law == KERN_DECAY_LAW_STEP) {
        dz = dt < f.step_min || dt > f.step_max ? 0.0f : dz;
        dt = cuda_min(f.step_max, cuda_max(f.step_min, dt));
    }
    *dlog = -dg * rate * dt;
    return dz;
}

// partial: (blocks, 2, heads * channels): of dlog, of dz.
static __global__ void __launch_bounds__(CUDA_SUM_THREADS)
    parameter_backward_kernel(const cuda_table *table, const kern_gates_backward_args a, int32_t each, float *partial) {
    cuda_begin();
    cuda_await();
    const kern_gates &f = a.gates;
    const int32_t width = f.heads * f.channels;
    cuda_sum_columns<2>(table->n_tokens, each, width, partial, [&](int32_t t, int32_t c, float(&sum)[2]) {
        const int64_t at = (int64_t)t * width + c;
        const float dbeta = f.write_law == KERN_WRITE_LAW_STEP ? a.dbeta.f[at] : 0.0f;
        float dlog;
        const float z = __fadd_rn(a.a.f[at], a.dt_bias.f[c]), rate = expf(a.A_log.f[c / f.channels]);
        const float dz = decay_gradient(f, z, rate, a.dg.f[at], dbeta, &dlog);
        a.da.f[at] = dz;
        sum[0] = __fadd_rn(sum[0], dlog);
        sum[1] = __fadd_rn(sum[1], dz);
    });
}

static kern_status run_parameter_decays(const cuda_step *step, const kern_gates_backward_args *a) {
    const kern_gates &f = a->gates;
    const int32_t width = f.heads * f.channels;
    const cuda_sum_cut cut = cuda_sum_cut_of(step->tokens, LEAST_TOKENS, CUDA_SUM_FEW_BLOCKS);
    const dim3 shape = cuda_sum_shape(width), grid((unsigned)cut.blocks, (unsigned)cuda_blocks(width, (int)shape.x));
    float *partial = (float *)step->cuda->workspace;
    kern_status status =
        cuda_start(step, parameter_backward_kernel, grid, shape, 0, step->table, *a, cut.each, partial);
    const int64_t stride = 2 * (int64_t)width;
    if (!status)
        status = cuda_add_partials(step, {partial, a->grad_A_log.f, stride, cut.blocks, f.heads, f.channels, 1});
    if (!status)
        status = cuda_add_partials(step, {partial + width, a->grad_dt_bias.f, stride, cut.blocks, width, 1, 1});
    return status;
}

kern_status cuda_gates_backward_prepare(const kern_cuda *cuda, const void *args, size_t *workspace_bytes) {
    (void)cuda;
    const kern_gates_backward_args *a = (const kern_gates_backward_args *)args;
    const kern_status status = kern_gates_backward_args_check(a);
    if (!status && kern_gates_operands_of(&a->gates).parameters)
        *workspace_bytes = cuda_sum_bytes(2 * (int64_t)a->gates.heads * a->gates.channels, CUDA_SUM_FEW_BLOCKS);
    return status;
}

kern_status cuda_gates_backward_run(const cuda_step *step, const void *args) {
    const kern_gates_backward_args *a = (const kern_gates_backward_args *)args;
    const kern_gates &f = a->gates;
    kern_status status = KERN_OK;
    if (f.write_law == KERN_WRITE_LAW_SIGMOID) {
        const cuda_plane plane = cuda_plane_of(step->tokens, f.heads);
        status = cuda_start(step, write_backward_kernel, plane.grid, plane.block, 0, step->table, *a);
    }
    if (status || f.decay_law == KERN_DECAY_LAW_NONE)
        return status;
    if (f.decay_law != KERN_DECAY_LAW_SIGMOID)
        return run_parameter_decays(step, a);
    const cuda_plane plane = cuda_plane_of(step->tokens, f.heads * f.channels);
    return cuda_start(step, sigmoid_backward_kernel, plane.grid, plane.block, 0, step->table, *a);
}

// -------------------------------------------------------------------------------------------------- stabilised gates

static __device__ __forceinline__ float cap_slope(float z, float cap) {
    if (!(cap > 0))
        return 1.0f;
    const float t = tanhf(__fdiv_rn(z, cap));
    return (1.0f - t) * (1.0f + t);
}

static __global__ void maxplus_backward_kernel(const cuda_table *table, const kern_maxplus_gates_backward_args a) {
    cuda_begin();
    const int32_t t = cuda_plane_item(), h = cuda_plane_column();
    const bool there = t < table->n_tokens && h < a.heads;
    cuda_await();
    if (!there)
        return;
    const int64_t at = (int64_t)t * a.heads + h;
    const float input = a.input.f[at], forget = a.forget.f[at];
    const float di = a.dbeta.f[at] * a.beta.f[at];
    const float df = a.dg.f[at] * cuda_sigmoid(-cuda_soft_cap(forget, a.soft_cap));
    a.dinput.f[at] = di * cap_slope(input, a.soft_cap);
    a.dforget.f[at] = df * cap_slope(forget, a.soft_cap);
}

kern_status cuda_maxplus_gates_backward_prepare(const kern_cuda *cuda, const void *args, size_t *workspace_bytes) {
    (void)cuda;
    (void)workspace_bytes;
    const kern_maxplus_gates_backward_args *a = (const kern_maxplus_gates_backward_args *)args;
    const bool complete = a->input.ref && a->forget.ref && a->beta.ref && a->dg.ref && a->dbeta.ref && a->dinput.ref &&
                          a->dforget.ref && a->dinput.ref != a->dforget.ref && a->dinput.ref != a->dg.ref;
    return complete && a->heads >= 1 && a->soft_cap >= 0 && isfinite(a->soft_cap) ? KERN_OK : KERN_INVALID;
}

kern_status cuda_maxplus_gates_backward_run(const cuda_step *step, const void *args) {
    const kern_maxplus_gates_backward_args *a = (const kern_maxplus_gates_backward_args *)args;
    const cuda_plane plane = cuda_plane_of(step->tokens, a->heads);
    return cuda_start(step, maxplus_backward_kernel, plane.grid, plane.block, 0, step->table, *a);
}

// -------------------------------------------------------------------------------------------------------- normaliser

// A warp owns one head of one token.
static __global__ void __launch_bounds__(THREADS)
    normalise_backward_kernel(const cuda_table *table, const kern_normalise_backward_args a) {
    cuda_begin();
    cuda_await();
    const int32_t lane = threadIdx.x % CUDA_WARP, width = a.value_width;
    const int64_t vector = (int64_t)blockIdx.x * WARPS + threadIdx.x / CUDA_WARP;
    if (vector >= (int64_t)table->n_tokens * a.heads)
        return;
    const float *o = a.o.f + vector * (width + 1), *dh = a.dh.f + vector * width, n = o[width];
    float *d_o = a.d_o.f + vector * (width + 1), divisor = n, slope = 1;
    if (a.m.f) {
        const float size = fabsf(n), floor = expf(-a.m.f[vector]);
        slope = size >= floor ? copysignf(1.0f, n) : 0.0f;
        divisor = size < floor ? floor : size;
    }
    const float scale = 1.0f / __fadd_rn(divisor, a.eps);
    float along = 0;
    for (int32_t i = lane; i < width; i += CUDA_WARP) {
        along = fmaf(dh[i], o[i], along);
        d_o[i] = dh[i] * scale;
    }
    along = cuda_warp_sum(along) * scale;
    if (lane == 0)
        d_o[width] = -along * scale * slope;
}

kern_status cuda_normalise_backward_prepare(const kern_cuda *cuda, const void *args, size_t *workspace_bytes) {
    (void)cuda;
    (void)workspace_bytes;
    const kern_normalise_backward_args *a = (const kern_normalise_backward_args *)args;
    const bool complete = a->o.ref && a->dh.ref && a->d_o.ref && a->d_o.ref != a->dh.ref && a->d_o.ref != a->o.ref;
    const bool valid = a->heads >= 1 && a->value_width >= 1 && a->eps >= 0 && isfinite(a->eps);
    return complete && valid ? KERN_OK : KERN_INVALID;
}

kern_status cuda_normalise_backward_run(const cuda_step *step, const void *args) {
    const kern_normalise_backward_args *a = (const kern_normalise_backward_args *)args;
    const int blocks = cuda_blocks((int64_t)step->tokens * a->heads, WARPS);
    return cuda_start(step, normalise_backward_kernel, blocks, THREADS, 0, step->table, *a);
}
