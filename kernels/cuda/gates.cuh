// SPDX-License-Identifier: Apache-2.0
// One decay of a token, and where its channel is its head's first also the head's write weight: what gates.cu launches
// and prepare.cu does among other things.
#ifndef KERNELS_CUDA_GATES_CUH
#define KERNELS_CUDA_GATES_CUH

#include "kernels/cuda/elements.cuh"

static __device__ __forceinline__ float cuda_sigmoid_decay(const kern_gates &f, float a, float beta) {
    float g = __fdiv_rn(cuda_log_sigmoid(a), f.divisor);
    if (f.clamp_min < 0)
        g = cuda_max(f.clamp_min, g);
    return f.gamma_cap < 1 ? __fadd_rn(g, log1pf(-__fmul_rn(1.0f - f.gamma_cap, __fmul_rn(beta, beta)))) : g;
}

// z = a + dt_bias, rate = e^A_log; *dt is the step of the law STEP.
static __device__ __forceinline__ float cuda_parameter_decay(const kern_gates &f, float z, float rate, float *dt) {
    if (f.decay_law == KERN_DECAY_LAW_BOUNDED)
        return __fmul_rn(f.lower_bound, cuda_sigmoid(__fmul_rn(rate, z)));
    *dt = cuda_softplus(z);
    if (f.decay_law == KERN_DECAY_LAW_STEP)
        *dt = cuda_min(f.step_max, cuda_max(f.step_min, *dt));
    return __fmul_rn(-rate, *dt);
}

// Channels a head whose decays are told apart.
static inline int32_t cuda_gate_channels(const kern_gates *f) {
    return f->decay_law == KERN_DECAY_LAW_NONE ? 1 : f->channels;
}

// A decay and the write weight of its head, the latter with the head's first channel; 0 where there is none.
struct cuda_gate_pair {
    float g, beta;
};

// What they are made of: of the token, and of the layer; what a law does not ask for may be anything.
struct cuda_gate_inputs {
    float a, b, dt_bias, A_log;
};
static __device__ __forceinline__ bool cuda_gate_has_parameters(const kern_gates &f) {
    return f.decay_law != KERN_DECAY_LAW_NONE && f.decay_law != KERN_DECAY_LAW_SIGMOID;
}

static __device__ __forceinline__ cuda_gate_pair cuda_gate_of(const kern_gates &f, const cuda_gate_inputs &in) {
    const float sigmoid = f.write_law == KERN_WRITE_LAW_SIGMOID ? cuda_sigmoid(in.b) : 0.0f;
    cuda_gate_pair made = {0, 0};
    float dt = 0;
    if (f.decay_law == KERN_DECAY_LAW_SIGMOID)
        made.g = cuda_sigmoid_decay(f, in.a, sigmoid);
    else if (f.decay_law != KERN_DECAY_LAW_NONE)
        made.g = cuda_parameter_decay(f, __fadd_rn(in.a, in.dt_bias), expf(in.A_log), &dt);
    if (f.write_law != KERN_WRITE_LAW_NONE)
        made.beta = f.write_law == KERN_WRITE_LAW_STEP      ? dt
                    : f.write_law == KERN_WRITE_LAW_SIGMOID ? f.write_factor * sigmoid
                                                            : f.write_factor;
    return made;
}

// c: of the token's heads * channels.
static __device__ __forceinline__ cuda_gate_inputs cuda_gate_fetch(const kern_gates_args &a, int32_t channels,
                                                                   int32_t t, int32_t c) {
    const kern_gates &f = a.gates;
    const int32_t head = c / channels;
    cuda_gate_inputs in = {};
    if (f.write_law == KERN_WRITE_LAW_SIGMOID)
        in.b = a.b.f[(int64_t)t * f.heads + head];
    if (f.decay_law != KERN_DECAY_LAW_NONE)
        in.a = a.a.f[(int64_t)t * f.heads * channels + c];
    if (cuda_gate_has_parameters(f)) {
        in.dt_bias = a.dt_bias.f[c];
        in.A_log = a.A_log.f[head];
    }
    return in;
}

static __device__ __forceinline__ void cuda_gate_keep(const kern_gates_args &a, int32_t channels, int32_t t, int32_t c,
                                                      const cuda_gate_pair &made) {
    const kern_gates &f = a.gates;
    const int32_t head = c / channels;
    if (f.decay_law != KERN_DECAY_LAW_NONE)
        a.g.f[(int64_t)t * f.heads * channels + c] = made.g;
    if (f.write_law != KERN_WRITE_LAW_NONE && c == head * channels)
        a.beta.f[(int64_t)t * f.heads + head] = made.beta;
}

static __device__ __forceinline__ void cuda_gate(const kern_gates_args &a, int32_t channels, int32_t t, int32_t c) {
    cuda_gate_keep(a, channels, t, c, cuda_gate_of(a.gates, cuda_gate_fetch(a, channels, t, c)));
}

#endif
