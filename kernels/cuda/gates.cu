// SPDX-License-Identifier: Apache-2.0
// Gates: log decay g (T, heads * channels) and write weight beta (T, heads); the laws stand in kernels.h.
//
// A thread makes one decay, and where its channel is the head's first also the head's write weight. The laws' precise
// functions keep their relative accuracy where a decay is near one.
#include "kernels/cuda/elements.cuh"

static __device__ __forceinline__ float sigmoid_decay(const kern_gates &f, float a, float beta) {
    float g = __fdiv_rn(cuda_log_sigmoid(a), f.divisor);
    if (f.clamp_min < 0)
        g = cuda_max(f.clamp_min, g);
    return f.gamma_cap < 1 ? __fadd_rn(g, log1pf(-__fmul_rn(1.0f - f.gamma_cap, __fmul_rn(beta, beta)))) : g;
}

// z = a + dt_bias, rate = e^A_log; *dt is the step of the law STEP.
static __device__ __forceinline__ float parameter_decay(const kern_gates &f, float z, float rate, float *dt) {
    if (f.decay_law == KERN_DECAY_LAW_BOUNDED)
        return __fmul_rn(f.lower_bound, cuda_sigmoid(__fmul_rn(rate, z)));
    *dt = cuda_softplus(z);
    if (f.decay_law == KERN_DECAY_LAW_STEP)
        *dt = cuda_min(f.step_max, cuda_max(f.step_min, *dt));
    return __fmul_rn(-rate, *dt);
}

static __global__ void gates_kernel(const cuda_table *table, kern_gates_args a, int32_t channels) {
    const kern_gates f = a.gates;
    const int32_t width = f.heads * channels, t = cuda_plane_item(), c = cuda_plane_column();
    if (t >= table->n_tokens || c >= width)
        return;
    const int32_t head = c / channels;
    const int64_t at = (int64_t)t * width + c, write = (int64_t)t * f.heads + head;
    const float sigmoid = f.write_law == KERN_WRITE_LAW_SIGMOID ? cuda_sigmoid(a.b.f[write]) : 0.0f;
    float dt = 0;
    if (f.decay_law == KERN_DECAY_LAW_SIGMOID)
        a.g.f[at] = sigmoid_decay(f, a.a.f[at], sigmoid);
    else if (f.decay_law != KERN_DECAY_LAW_NONE)
        a.g.f[at] = parameter_decay(f, __fadd_rn(a.a.f[at], a.dt_bias.f[c]), expf(a.A_log.f[head]), &dt);
    if (f.write_law == KERN_WRITE_LAW_NONE || c != head * channels)
        return;
    if (f.write_law == KERN_WRITE_LAW_STEP)
        a.beta.f[write] = dt;
    else
        a.beta.f[write] = f.write_law == KERN_WRITE_LAW_SIGMOID ? f.write_factor * sigmoid : f.write_factor;
}

// ---------------------------------------------------------------------------------------------------------- launcher

static bool decay_has_parameters(const kern_gates *f) {
    return f->decay_law == KERN_DECAY_LAW_EXPONENTIAL || f->decay_law == KERN_DECAY_LAW_BOUNDED ||
           f->decay_law == KERN_DECAY_LAW_STEP;
}

static bool is_finite(float x) {
    return x - x == 0;
}

static kern_status check_decay(const kern_gates *f) {
    switch (f->decay_law) {
    case KERN_DECAY_LAW_NONE:
    case KERN_DECAY_LAW_EXPONENTIAL:
        return KERN_OK;
    case KERN_DECAY_LAW_SIGMOID:
        if (!(f->divisor > 0) || !(f->clamp_min <= 0) || !(f->gamma_cap > 0 && f->gamma_cap <= 1))
            return KERN_INVALID;
        if (f->gamma_cap < 1 && (f->channels != 1 || f->write_law != KERN_WRITE_LAW_SIGMOID || f->write_factor != 1))
            return KERN_INVALID;
        return f->gamma_cap < 0.5f ? KERN_UNSUPPORTED : KERN_OK;
    case KERN_DECAY_LAW_BOUNDED:
        return f->lower_bound < 0 && is_finite(f->lower_bound) ? KERN_OK : KERN_INVALID;
    case KERN_DECAY_LAW_STEP:
        return f->channels == 1 && f->step_min >= 0 && f->step_max >= f->step_min ? KERN_OK : KERN_INVALID;
    default:
        return KERN_INVALID;
    }
}

static kern_status check_gates(const kern_gates *f) {
    if (f->heads < 1 || f->channels < 1 || f->write_law < KERN_WRITE_LAW_NONE || f->write_law > KERN_WRITE_LAW_STEP)
        return KERN_INVALID;
    if (f->decay_law == KERN_DECAY_LAW_NONE && f->write_law == KERN_WRITE_LAW_NONE)
        return KERN_INVALID;
    if (f->write_law == KERN_WRITE_LAW_STEP && f->decay_law != KERN_DECAY_LAW_STEP)
        return KERN_INVALID;
    const bool factor = f->write_law == KERN_WRITE_LAW_SIGMOID || f->write_law == KERN_WRITE_LAW_CONSTANT;
    return factor && !is_finite(f->write_factor) ? KERN_INVALID : check_decay(f);
}

static bool there(kern_ptr operand, bool wanted) {
    return (operand.ref != 0) == wanted;
}

kern_status cuda_gates_prepare(const kern_cuda *cuda, const void *args, size_t *workspace_bytes) {
    (void)cuda;
    (void)workspace_bytes;
    const kern_gates_args *a = (const kern_gates_args *)args;
    const kern_gates *f = &a->gates;
    const kern_status status = check_gates(f);
    if (status)
        return status;
    const bool decay = f->decay_law != KERN_DECAY_LAW_NONE, parameters = decay_has_parameters(f);
    const bool complete = there(a->a, decay) && there(a->g, decay) &&
                          there(a->b, f->write_law == KERN_WRITE_LAW_SIGMOID) &&
                          there(a->beta, f->write_law != KERN_WRITE_LAW_NONE) && there(a->A_log, parameters) &&
                          there(a->dt_bias, parameters);
    return complete ? KERN_OK : KERN_INVALID;
}

kern_status cuda_gates_run(const cuda_step *step, const void *args) {
    const kern_gates_args *a = (const kern_gates_args *)args;
    const int32_t channels = a->gates.decay_law == KERN_DECAY_LAW_NONE ? 1 : a->gates.channels;
    const cuda_plane plane = cuda_plane_of(step->tokens, a->gates.heads * channels);
    gates_kernel<<<plane.grid, plane.block, 0, step->stream>>>(step->table, *a, channels);
    return cuda_launched();
}
