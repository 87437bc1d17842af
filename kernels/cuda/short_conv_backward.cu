// SPDX-License-Identifier: Apache-2.0
// Backward of the depthwise causal convolution, of rows without earlier state: with z[t,c] = bias[c] + sum_j
// weight[c,j] x[t-W+1+j,c],
//     dz = dy act'(z)    dx[t,c] = sum_l weight[c,W-1-l] dz[t+l,c]    dweight[c,j] += sum_t dz[t,c] x[t-W+1+j,c]
// A thread owns a channel of some neighbouring tokens and goes through them from the last: it holds the W inputs that a
// token sees and the dz of the W - 1 tokens behind it, which it makes again where they are another block's. Its sums
// over tokens are in that order.
#include "kernels/cuda/sums.cuh"

enum { MAX_TAPS = 32, THREADS = 128, LEAST_TOKENS = 16 };

// TAPS 0: as many as the arguments say, the windows in local memory.
template <int TAPS> struct conv_windows {
    static constexpr int ROOM = TAPS ? TAPS : MAX_TAPS;
    static constexpr int AHEAD = TAPS ? 8 : 1; // tokens whose memory is asked for at once
    float weight[ROOM], input[ROOM], dz[ROOM], dweight[ROOM], dbias;
    int32_t start[ROOM]; // where the document of dz's token begins
};

// The token before: windows move by one; input[0], dz[0] and start[0] are to be filled.
template <int TAPS> static __device__ __forceinline__ void move_windows(conv_windows<TAPS> &w, int32_t taps) {
#pragma unroll
    for (int j = conv_windows<TAPS>::ROOM - 1; j > 0; j--)
        if (TAPS || j < taps) {
            w.input[j] = w.input[j - 1];
            w.dz[j] = w.dz[j - 1];
            w.start[j] = w.start[j - 1];
        }
}

// dz of token t; its inputs are those of the window that its document has.
template <int TAPS>
static __device__ __forceinline__ float output_gradient(const kern_short_conv_backward_args &a,
                                                        const conv_windows<TAPS> &w, int32_t taps, int32_t t, float dy,
                                                        float bias) {
    if (a.activation == KERN_IDENTITY)
        return dy;
    float z = bias, value;
#pragma unroll
    for (int j = 0; j < conv_windows<TAPS>::ROOM; j++)
        if ((TAPS || j < taps) && t - taps + 1 + j >= w.start[0])
            z = fmaf(w.weight[j], w.input[j], z);
    return dy * cuda_activation_slope(a.activation, z, &value);
}

// dx of token t and what it adds to the weight's gradient.
template <int TAPS>
static __device__ __forceinline__ float token_gradients(conv_windows<TAPS> &w, int32_t taps, int32_t t) {
    float dx = 0;
#pragma unroll
    for (int l = 0; l < conv_windows<TAPS>::ROOM; l++)
        if ((TAPS || l < taps) && w.start[l] <= t)
            dx = fmaf(w.weight[taps - 1 - l], w.dz[l], dx);
#pragma unroll
    for (int j = 0; j < conv_windows<TAPS>::ROOM; j++)
        if ((TAPS || j < taps) && t - taps + 1 + j >= w.start[0])
            w.dweight[j] = fmaf(w.dz[0], w.input[j], w.dweight[j]);
    w.dbias = __fadd_rn(w.dbias, w.dz[0]);
    return dx;
}

// Tokens top, top - 1 .. of which those before `first` are not there; dx of those before `end`.
template <int TAPS>
static __device__ __forceinline__ void some_tokens(const cuda_table *table, const kern_short_conv_backward_args &a,
                                                   conv_windows<TAPS> &w, int32_t taps, int32_t top, int32_t first,
                                                   int32_t end, int32_t c, float bias, __nv_bfloat16 *rounded) {
    constexpr int AHEAD = conv_windows<TAPS>::AHEAD;
    float x[AHEAD], dy[AHEAD];
    int32_t start[AHEAD];
#pragma unroll
    for (int u = 0; u < AHEAD; u++) {
        const int32_t t = max(top - u, first), source = t - taps + 1;
        x[u] = source >= 0 ? a.x.f[(int64_t)source * a.channels + c] : 0.0f;
        dy[u] = a.dy.f[(int64_t)t * a.channels + c];
        start[u] = table->token_start[t];
    }
#pragma unroll
    for (int u = 0; u < AHEAD; u++) {
        const int32_t t = top - u;
        if (t < first)
            break;
        move_windows<TAPS>(w, taps);
        w.input[0] = x[u];
        w.start[0] = start[u];
        w.dz[0] = output_gradient<TAPS>(a, w, taps, t, dy[u], bias);
        if (t >= end)
            continue;
        const float dx = token_gradients<TAPS>(w, taps, t);
        a.dx.f[(int64_t)t * a.channels + c] = dx;
        if (rounded)
            rounded[(int64_t)t * a.channels + c] = __float2bfloat16_rn(dx);
    }
}

// partial: (blocks, channels * taps, then channels). rounded: optional, dx also goes there (cuda_copies_offer).
template <int TAPS>
static __global__ void __launch_bounds__(THREADS)
    conv_backward_kernel(const cuda_table *table, const kern_short_conv_backward_args a, int32_t each, float *partial,
                         __nv_bfloat16 *rounded) {
    cuda_begin();
    cuda_await();
    const int32_t taps = TAPS ? TAPS : a.taps, c = (int32_t)(blockIdx.y * THREADS + threadIdx.x);
    const int32_t tokens = table->n_tokens, first = (int32_t)blockIdx.x * each;
    const int32_t end = first + each < tokens ? first + each : tokens;
    const int32_t last = end + taps - 1 < tokens ? end + taps - 1 : tokens; // dz is needed up to here
    if (c >= a.channels || first >= tokens)
        return;
    conv_windows<TAPS> w = {};
    const int64_t row = (int64_t)a.channel0 + c;
    const float bias = a.bias.f ? a.bias.f[row] : 0.0f;
#pragma unroll
    for (int j = 0; j < conv_windows<TAPS>::ROOM; j++)
        if (TAPS || j < taps)
            w.weight[j] = a.weight.f[row * taps + j];
#pragma unroll
    for (int j = 1; j < conv_windows<TAPS>::ROOM; j++) // input[j] of the token behind the last is input[j - 1] here
        if ((TAPS || j < taps) && last - taps + j >= 0)
            w.input[j - 1] = a.x.f[(int64_t)(last - taps + j) * a.channels + c];
#pragma unroll
    for (int j = 0; j < conv_windows<TAPS>::ROOM; j++)
        w.start[j] = INT32_MAX;
    for (int32_t top = last - 1; top >= first; top -= conv_windows<TAPS>::AHEAD)
        some_tokens<TAPS>(table, a, w, taps, top, first, end, c, bias, rounded);
    float *own = partial + (int64_t)blockIdx.x * a.channels * (taps + 1);
#pragma unroll
    for (int j = 0; j < conv_windows<TAPS>::ROOM; j++)
        if (TAPS || j < taps)
            own[(int64_t)c * taps + j] = w.dweight[j];
    own[(int64_t)a.channels * taps + c] = w.dbias;
}

static size_t sums_of(const kern_short_conv_backward_args *a) {
    return cuda_sum_bytes((int64_t)a->channels * (a->taps + 1), CUDA_SUM_BLOCKS);
}

kern_status cuda_short_conv_backward_prepare(const kern_cuda *cuda, const void *args, size_t *workspace_bytes) {
    (void)cuda;
    const kern_short_conv_backward_args *a = (const kern_short_conv_backward_args *)args;
    if (!a->x.ref || !a->weight.ref || !a->dy.ref || !a->dx.ref || !a->grad_weight.ref || a->dx.ref == a->x.ref ||
        a->dx.ref == a->dy.ref)
        return KERN_INVALID;
    if (a->channels < 1 || a->channel0 < 0 || a->taps < 1 || !kern_activation_is_valid(a->activation))
        return KERN_INVALID;
    *workspace_bytes = sums_of(a);
    return a->taps > MAX_TAPS ? KERN_UNSUPPORTED : KERN_OK;
}

kern_status cuda_short_conv_backward_run(const cuda_step *step, const void *args) {
    const kern_short_conv_backward_args *a = (const kern_short_conv_backward_args *)args;
    const cuda_sum_cut cut = cuda_sum_cut_of(step->tokens, LEAST_TOKENS, CUDA_SUM_BLOCKS);
    const dim3 grid((unsigned)cut.blocks, (unsigned)cuda_blocks(a->channels, THREADS));
    float *partial = (float *)step->cuda->workspace;
    const int32_t weights = a->channels * a->taps;
    const int64_t stride = (int64_t)weights + a->channels;
    __nv_bfloat16 *rounded = cuda_copies_offer_expected(step, a->dx.f, a->channels, sums_of(a));
    auto *kernel = a->taps == 4 ? conv_backward_kernel<4> : conv_backward_kernel<0>;
    kern_status status = cuda_start(step, kernel, grid, THREADS, 0, step->table, *a, cut.each, partial, rounded);
    float *grad = a->grad_weight.f + (int64_t)a->channel0 * a->taps;
    if (!status)
        status = cuda_add_partials(step, {partial, grad, stride, cut.blocks, weights, 1, 1});
    if (!status && a->grad_bias.f)
        status = cuda_add_partials(
            step, {partial + weights, a->grad_bias.f + a->channel0, stride, cut.blocks, a->channels, 1, 1});
    return status;
}
