// SPDX-License-Identifier: Apache-2.0
// Depthwise causal convolution inside a document: y[t,c] = act(bias[c] + sum_j weight[c,j] x[t-W+1+j,c]).
//
// A step of generated tokens is one launch: a thread owns a channel of a row, reads its W-1 earlier inputs from the
// slot, and moves them up by one. Any other batch is two: tokens are free of one another, as they read inputs alone (of
// the batch or of the slot), so a thread takes one channel of some neighbouring tokens; the slots are written by a
// launch of its own when all of them are done. Both ways add the taps in the same order. Convolutions of equal taps
// that follow one another share a launch, the grid's third side.
#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/fuse.cuh"

enum { MAX_TAPS = 32, THREADS = 128, TILE = 16 };

struct conv_group {
    kern_short_conv_args part[CUDA_CONVS];
};

// TAPS 0: as many as the arguments say.
template <int TAPS> static __device__ __forceinline__ int32_t taps_of(const kern_short_conv_args &a) {
    return TAPS ? TAPS : a.taps;
}

template <int TAPS>
static __device__ __forceinline__ void load_weights(const kern_short_conv_args &a, int32_t c, float *weight) {
    const float *from = a.weight.f + ((int64_t)a.channel0 + c) * taps_of<TAPS>(a);
#pragma unroll
    for (int j = 0; j < (TAPS ? TAPS : MAX_TAPS); j++)
        if (TAPS || j < a.taps)
            weight[j] = from[j];
}

static __device__ __forceinline__ float bias_of(const kern_short_conv_args &a, int32_t c) {
    return a.bias.f ? a.bias.f[a.channel0 + c] : 0.0f;
}

// Generated tokens alone: row r is token r.
template <int TAPS>
static __global__ void __launch_bounds__(THREADS)
    conv_step_kernel(const cuda_table *table, const __grid_constant__ conv_group group) {
    cuda_begin();
    const kern_short_conv_args a = group.part[blockIdx.z];
    const int32_t t = blockIdx.x, c = blockIdx.y * THREADS + threadIdx.x, taps = taps_of<TAPS>(a);
    const bool there = t < table->n_tokens && c < a.channels;
    float *state = there ? cuda_slot(table, a.state, table->row[t].slot) : NULL;
    float weight[TAPS ? TAPS : MAX_TAPS], input[TAPS ? TAPS : MAX_TAPS];
    if (there)
        load_weights<TAPS>(a, c, weight);
    cuda_await();
    if (!there)
        return;
#pragma unroll
    for (int j = 0; j < (TAPS ? TAPS : MAX_TAPS); j++)
        if (TAPS || j < taps) {
            if (j == taps - 1)
                input[j] = a.x.f[(int64_t)t * a.channels + c];
            else
                input[j] = state ? state[(int64_t)j * a.channels + c] : 0.0f;
        }
    float z = bias_of(a, c);
#pragma unroll
    for (int j = 0; j < (TAPS ? TAPS : MAX_TAPS); j++)
        if (TAPS || j < taps) {
            z = fmaf(weight[j], input[j], z);
            if (j > 0 && state)
                state[(int64_t)(j - 1) * a.channels + c] = input[j];
        }
    a.y.f[(int64_t)t * a.channels + c] = cuda_activate(a.activation, z);
}

// Where the document of token t sees inputs from before its row; NULL: nowhere.
static __device__ __forceinline__ const float *earlier_inputs(const cuda_table *table, const kern_short_conv_args &a,
                                                              int32_t t, int32_t start, int32_t *first) {
    const kern_row *row = &table->row[table->token_row[t]];
    *first = row->token0;
    return start == row->token0 ? cuda_slot(table, a.state, row->slot) : NULL;
}

// With taps known, all inputs of the tokens are asked for at once.
template <int TAPS>
static __global__ void __launch_bounds__(THREADS)
    conv_tokens_kernel(const cuda_table *table, const __grid_constant__ conv_group group) {
    cuda_begin();
    cuda_await();
    const kern_short_conv_args a = group.part[blockIdx.z];
    const int32_t c = blockIdx.y * THREADS + threadIdx.x, taps = taps_of<TAPS>(a);
    const int32_t token0 = blockIdx.x * TILE, tokens = table->n_tokens;
    if (c >= a.channels)
        return;
    float weight[TAPS ? TAPS : MAX_TAPS], near[TAPS ? TAPS - 1 + TILE : 1];
    int32_t starts[TILE];
    load_weights<TAPS>(a, c, weight);
    const float bias = bias_of(a, c);
#pragma unroll
    for (int i = 0; i < (TAPS ? TAPS - 1 + TILE : 0); i++) {
        const int32_t t = token0 - (TAPS - 1) + i;
        near[i] = t >= 0 && t < tokens ? a.x.f[(int64_t)t * a.channels + c] : 0.0f;
    }
#pragma unroll
    for (int u = 0; u < TILE; u++)
        starts[u] = token0 + u < tokens ? table->token_start[token0 + u] : 0;
#pragma unroll
    for (int u = 0; u < TILE; u++) {
        const int32_t t = token0 + u, start = starts[u];
        if (t >= tokens)
            return;
        int32_t first = 0;
        const float *state = t - start < taps - 1 ? earlier_inputs(table, a, t, start, &first) : NULL;
        float z = bias;
#pragma unroll
        for (int j = 0; j < (TAPS ? TAPS : MAX_TAPS); j++)
            if (TAPS || j < taps) {
                const int32_t source = t - taps + 1 + j;
                float input = 0;
                if (source >= start)
                    input = TAPS ? near[u + j] : a.x.f[(int64_t)source * a.channels + c];
                else if (state)
                    input = state[(int64_t)(taps - 1 + source - first) * a.channels + c];
                z = fmaf(weight[j], input, z);
            }
        a.y.f[(int64_t)t * a.channels + c] = cuda_activate(a.activation, z);
    }
}

// The last W-1 inputs of a row's last document; what a short first document leaves of the old state moves up.
static __global__ void __launch_bounds__(THREADS)
    conv_state_kernel(const cuda_table *table, const __grid_constant__ conv_group group) {
    cuda_begin();
    cuda_await();
    const kern_short_conv_args a = group.part[blockIdx.z];
    const int32_t c = blockIdx.y * THREADS + threadIdx.x;
    if ((int32_t)blockIdx.x >= table->n_rows || c >= a.channels)
        return;
    const kern_row *row = &table->row[blockIdx.x];
    float *state = cuda_slot(table, a.state, row->slot);
    if (!state)
        return;
    const int32_t last = row->token0 + row->length - 1, start = table->token_start[last];
    for (int32_t j = 0; j < a.taps - 1; j++) {
        const int32_t source = last - (a.taps - 2) + j;
        float kept = 0;
        if (source >= start)
            kept = a.x.f[(int64_t)source * a.channels + c];
        else if (start == row->token0)
            kept = state[(int64_t)(j + row->length) * a.channels + c];
        state[(int64_t)j * a.channels + c] = kept;
    }
}

// --------------------------------------------------------------------------------------------------------- launchers

kern_status cuda_short_conv_prepare(const kern_cuda *cuda, const void *args, size_t *workspace_bytes) {
    (void)cuda;
    (void)workspace_bytes;
    const kern_short_conv_args *a = (const kern_short_conv_args *)args;
    if (!a->x.ref || !a->weight.ref || !a->y.ref || a->x.ref == a->y.ref)
        return KERN_INVALID;
    if (a->channels < 1 || a->channel0 < 0 || a->taps < 1 || !kern_activation_is_valid(a->activation))
        return KERN_INVALID;
    return a->taps > MAX_TAPS ? KERN_UNSUPPORTED : KERN_OK;
}

static kern_status launch_convs(const cuda_step *step, const conv_group &group, int parts) {
    const kern_short_conv_args &a = group.part[0];
    int32_t channels = 0;
    bool states = false;
    for (int i = 0; i < parts; i++) {
        channels = group.part[i].channels > channels ? group.part[i].channels : channels;
        states = states || group.part[i].state.p;
    }
    const unsigned pieces = (unsigned)cuda_blocks(channels, THREADS);
    const dim3 tiles((unsigned)cuda_blocks(step->tokens, step->generated ? 1 : (int)TILE), pieces, (unsigned)parts);
    if (step->generated)
        return cuda_start(step, a.taps == 4 ? conv_step_kernel<4> : conv_step_kernel<0>, tiles, THREADS, 0, step->table,
                          group);
    const kern_status status = cuda_start(step, a.taps == 4 ? conv_tokens_kernel<4> : conv_tokens_kernel<0>, tiles,
                                          THREADS, 0, step->table, group);
    if (status || !states || a.taps == 1)
        return status;
    const dim3 rows((unsigned)cuda_blocks(step->rows, 1), pieces, (unsigned)parts);
    return cuda_start(step, conv_state_kernel, rows, THREADS, 0, step->table, group);
}

kern_status cuda_short_conv_run(const cuda_step *step, const void *args) {
    return launch_convs(step, {{*(const kern_short_conv_args *)args}}, 1);
}

kern_status cuda_short_convs_run(const cuda_step *step, const kern_call *call, int count) {
    conv_group group = {};
    for (int i = 0; i < count; i++)
        group.part[i] = *(const kern_short_conv_args *)call[i].args;
    return launch_convs(step, group, count);
}
