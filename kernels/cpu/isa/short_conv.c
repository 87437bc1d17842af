// SPDX-License-Identifier: Apache-2.0
// Depthwise causal convolution inside a document (W taps, weight (channels, W), the last tap for the current token):
//
//     z[t,c] = bias[c] + sum_j weight[c,j] x[t-W+1+j,c]      y = act(z)
// Inputs before the document are zero, or come from the slot's state: the last W-1 inputs, oldest first, (W-1,
// channels). Backward, without earlier state: dz = dy act'(z);  dx[t,c] = sum_j weight[c,j] dz[t+W-1-j,c]; dweight[c,j]
// += sum_t dz[t,c] x[t-W+1+j,c];  dbias[c] += sum_t dz[t,c].
//
// A token's result reads inputs alone, so tokens are free of one another and rows of both kinds go one way; states are
// written when all tokens are done. Channels run in blocks, so that a block's weights (turned to tap-major) and inputs
// stay in the first cache. The backward is shared by channels; its sums over tokens go tile by tile, in order.
#include "kernels/cpu/isa/activation.h"

enum { MAX_TAPS = 32, CHANNELS = 256, BACKWARD_CHANNELS = 128, TILE = 64, AHEAD = 8 };

static const float no_input[CHANNELS] __attribute__((aligned(64)));

// --------------------------------------------------------------------------------------------------------- weights

#if defined(KERN_ISA_AVX512) || defined(KERN_ISA_AVX2)
// Four taps of KERN_VL channels from channel-major to four vectors, one a tap.
static inline void turn_four_taps(const float *weight, float *turned, int32_t stride) {
#if defined(KERN_ISA_AVX512)
    const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i odd = _mm512_set_epi32(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    __m512 a = _mm512_loadu_ps(weight), b = _mm512_loadu_ps(weight + 16);
    __m512 c = _mm512_loadu_ps(weight + 32), d = _mm512_loadu_ps(weight + 48);
    __m512 even_low = _mm512_permutex2var_ps(a, even, b), even_high = _mm512_permutex2var_ps(c, even, d);
    __m512 odd_low = _mm512_permutex2var_ps(a, odd, b), odd_high = _mm512_permutex2var_ps(c, odd, d);
    _mm512_storeu_ps(turned, _mm512_permutex2var_ps(even_low, even, even_high));
    _mm512_storeu_ps(turned + stride, _mm512_permutex2var_ps(odd_low, even, odd_high));
    _mm512_storeu_ps(turned + 2 * stride, _mm512_permutex2var_ps(even_low, odd, even_high));
    _mm512_storeu_ps(turned + 3 * stride, _mm512_permutex2var_ps(odd_low, odd, odd_high));
#else
    const __m256i index = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    for (int tap = 0; tap < 4; tap++)
        _mm256_storeu_ps(turned + tap * stride, _mm256_i32gather_ps(weight + tap, index, 4));
#endif
}
#endif

// turned[j * stride + c] = weight[c * taps + j].
static void turn_weights(const float *weight, int32_t taps, int32_t channels, float *turned, int32_t stride) {
    int32_t c = 0;
#if defined(KERN_ISA_AVX512) || defined(KERN_ISA_AVX2)
    for (; taps == 4 && c + KERN_VL <= channels; c += KERN_VL)
        turn_four_taps(weight + 4 * c, turned + c, stride);
#endif
    for (; c < channels; c++)
        for (int32_t j = 0; j < taps; j++)
            turned[j * stride + c] = weight[c * taps + j];
}

// ------------------------------------------------------------------------------------------------------------- taps

// The W inputs of token t at channel `channel`: from the batch, the state (NULL: none), or zero.
static void find_inputs(const kern_rows *rows, const float *x, const float *state, int32_t t, int32_t taps,
                        int32_t channels, int32_t channel, const float **input) {
    const int32_t start = rows->token_start[t], first = rows->row[rows->token_row[t]].token0;
    for (int32_t j = 0; j < taps; j++) {
        int32_t source = t - taps + 1 + j;
        if (source >= start)
            input[j] = x + (int64_t)source * channels + channel;
        else if (start == first && state)
            input[j] = state + (int64_t)(taps - 1 + source - first) * channels + channel;
        else
            input[j] = no_input;
    }
}

// y = act(bias + sum_j turned[j] input[j]) over `count` channels. Inlined with a constant number of taps where it is
// common.
static inline __attribute__((always_inline)) void convolve(const float *const *input, const float *turned,
                                                           int32_t stride, const float *bias, float *y, int32_t count,
                                                           int32_t taps, int activation) {
    for (int32_t c = 0; c < count; c += KERN_VL) {
        int32_t left = count - c;
        vf z = bias ? vf_load_upto(bias + c, left) : vf_set(0);
        for (int32_t j = 0; j < taps; j++)
            z += vf_load_upto(turned + j * stride + c, left) * vf_load_upto(input[j] + c, left);
        vf_store_upto(y + c, vf_activation(activation, z), left);
    }
}

static void convolve_token(const float *const *input, const float *turned, int32_t stride, const float *bias, float *y,
                           int32_t count, int32_t taps, int activation) {
    if (taps == 4 && activation == KERN_SILU)
        convolve(input, turned, stride, bias, y, count, 4, KERN_SILU);
    else if (taps == 4 && activation == KERN_IDENTITY)
        convolve(input, turned, stride, bias, y, count, 4, KERN_IDENTITY);
    else
        convolve(input, turned, stride, bias, y, count, taps, activation);
}

// ---------------------------------------------------------------------------------------------------------- forward

static void short_conv_range(const kern_cpu *cpu, const kern_rows *rows, const void *args, int64_t first, int64_t end) {
    const kern_short_conv_args *a = args;
    float *turned = kern_cpu_workspace(cpu, kern_team_thread());
    const float *input[MAX_TAPS];
    for (int32_t channel = 0; channel < a->channels; channel += CHANNELS) {
        int32_t count = a->channels - channel < CHANNELS ? a->channels - channel : CHANNELS;
        const float *weight = a->weight.f + ((int64_t)a->channel0 + channel) * a->taps;
        const float *bias = a->bias.f ? a->bias.f + a->channel0 + channel : NULL;
        turn_weights(weight, a->taps, count, turned, CHANNELS);
        for (int32_t t = (int32_t)first; t < end; t++) {
            const float *state = kern_slot_state(rows, a->state, rows->row[rows->token_row[t]].slot);
            find_inputs(rows, a->x.f, state, t, a->taps, a->channels, channel, input);
            convolve_token(input, turned, CHANNELS, bias, a->y.f + (int64_t)t * a->channels + channel, count, a->taps,
                           a->activation);
        }
    }
}

// The last W-1 inputs of a row's last document; what a short first document leaves of the old state moves up.
static void store_states(const kern_cpu *cpu, const kern_rows *rows, const void *args, int64_t first, int64_t end) {
    (void)cpu;
    const kern_short_conv_args *a = args;
    const size_t bytes = (size_t)a->channels * sizeof(float);
    for (int64_t r = first; r < end; r++) {
        const kern_row *row = &rows->row[r];
        float *state = kern_slot_state(rows, a->state, row->slot);
        if (!state)
            continue;
        const int32_t last = row->token0 + row->length - 1, start = rows->token_start[last];
        for (int32_t j = 0; j < a->taps - 1; j++) {
            int32_t source = last - (a->taps - 2) + j;
            float *entry = state + (int64_t)j * a->channels;
            if (source >= start)
                memcpy(entry, a->x.f + (int64_t)source * a->channels, bytes);
            else if (start == row->token0)
                memcpy(entry, entry + (int64_t)row->length * a->channels, bytes);
            else
                memset(entry, 0, bytes);
        }
    }
}

// --------------------------------------------------------------------------------------------------------- backward

// Workspace of one thread for one block of channels.
typedef struct conv_tile {
    float turned[MAX_TAPS * BACKWARD_CHANNELS];      // tap-major weights
    float dz[(TILE + MAX_TAPS) * BACKWARD_CHANNELS]; // of the tile's tokens and the W-1 after it
    float dweight[MAX_TAPS * BACKWARD_CHANNELS];     // sums of the tile, then of the sequence
    float dbias[BACKWARD_CHANNELS];
    float dweight_sum[MAX_TAPS * BACKWARD_CHANNELS];
    float dbias_sum[BACKWARD_CHANNELS];
} conv_tile;

// A block's piece of a token is a few lines, each token's on another page: the hardware does not foresee them.
static void fetch_ahead(const float *x, int32_t count) {
    for (int32_t c = 0; c < count; c += 64 / (int32_t)sizeof(float))
        __builtin_prefetch(x + c);
}

// dz of token t over the block's channels.
static void output_gradient(const kern_short_conv_backward_args *a, const kern_rows *rows, const conv_tile *tile,
                            int32_t t, int32_t channel, int32_t count, float *dz) {
    const float *input[MAX_TAPS], *dy = a->dy.f + (int64_t)t * a->channels + channel;
    if (t + AHEAD < rows->n_tokens) {
        fetch_ahead(dy + (int64_t)AHEAD * a->channels, count);
        fetch_ahead(a->x.f + (int64_t)(t + AHEAD) * a->channels + channel, count);
    }
    if (a->activation == KERN_IDENTITY) {
        memcpy(dz, dy, (size_t)count * sizeof(float));
        return;
    }
    find_inputs(rows, a->x.f, NULL, t, a->taps, a->channels, channel, input);
    convolve_token(input, tile->turned, BACKWARD_CHANNELS, a->bias.f ? a->bias.f + a->channel0 + channel : NULL, dz,
                   count, a->taps, KERN_IDENTITY);
    for (int32_t c = 0; c < count; c += KERN_VL) {
        vf value, slope = vf_activation_slope(a->activation, vf_load_upto(dz + c, count - c), &value);
        vf_store_upto(dz + c, vf_load_upto(dy + c, count - c) * slope, count - c);
    }
}

// dx of token t; dz points to the gradient of token t itself, those of later tokens follow.
static void input_gradient(const kern_short_conv_backward_args *a, const kern_rows *rows, const conv_tile *tile,
                           int32_t t, int32_t channel, int32_t count, const float *dz) {
    int32_t reach = 1; // tokens from t on in t's document, at most W
    while (reach < a->taps && t + reach < rows->n_tokens && rows->token_start[t + reach] <= t)
        reach++;
    float *dx = a->dx.f + (int64_t)t * a->channels + channel;
    for (int32_t c = 0; c < count; c += KERN_VL) {
        vf sum = {0};
        for (int32_t later = 0; later < reach; later++)
            sum += vf_load_upto(tile->turned + (a->taps - 1 - later) * BACKWARD_CHANNELS + c, count - c) *
                   vf_load_upto(dz + later * BACKWARD_CHANNELS + c, count - c);
        vf_store_upto(dx + c, sum, count - c);
    }
}

static void weight_gradient(const kern_short_conv_backward_args *a, const kern_rows *rows, conv_tile *tile, int32_t t,
                            int32_t channel, int32_t count, const float *dz) {
    for (int32_t j = 0; j < a->taps; j++) {
        int32_t source = t - a->taps + 1 + j;
        if (source < rows->token_start[t])
            continue;
        const float *x = a->x.f + (int64_t)source * a->channels + channel;
        float *dweight = tile->dweight + j * BACKWARD_CHANNELS;
        for (int32_t c = 0; c < count; c += KERN_VL)
            vf_store_upto(dweight + c,
                          vf_load_upto(dweight + c, count - c) +
                              vf_load_upto(dz + c, count - c) * vf_load_upto(x + c, count - c),
                          count - c);
    }
    for (int32_t c = 0; c < count; c++)
        tile->dbias[c] += dz[c];
}

static void add_and_clear(float *sum, float *part, int32_t count) {
    for (int32_t i = 0; i < count; i++)
        sum[i] += part[i];
    memset(part, 0, (size_t)count * sizeof(float));
}

static void clear_sums(conv_tile *tile, int32_t taps) {
    memset(tile->dweight, 0, (size_t)taps * BACKWARD_CHANNELS * sizeof(float));
    memset(tile->dweight_sum, 0, (size_t)taps * BACKWARD_CHANNELS * sizeof(float));
    memset(tile->dbias, 0, sizeof tile->dbias);
    memset(tile->dbias_sum, 0, sizeof tile->dbias_sum);
}

static void add_gradients(const kern_short_conv_backward_args *a, const conv_tile *tile, int32_t channel,
                          int32_t count) {
    for (int32_t c = 0; c < count; c++) {
        const int64_t row = (int64_t)a->channel0 + channel + c;
        float *grad = a->grad_weight.f + row * a->taps;
        for (int32_t j = 0; j < a->taps; j++)
            grad[j] += tile->dweight_sum[j * BACKWARD_CHANNELS + c];
        if (a->grad_bias.f)
            a->grad_bias.f[row] += tile->dbias_sum[c];
    }
}

static void backward_block(const kern_short_conv_backward_args *a, const kern_rows *rows, conv_tile *tile,
                           int32_t channel) {
    const int32_t count = a->channels - channel < BACKWARD_CHANNELS ? a->channels - channel : BACKWARD_CHANNELS;
    const int32_t ahead = a->taps - 1;
    turn_weights(a->weight.f + ((int64_t)a->channel0 + channel) * a->taps, a->taps, count, tile->turned,
                 BACKWARD_CHANNELS);
    clear_sums(tile, a->taps);
    int32_t known = 0; // tokens whose dz has been computed
    for (int32_t first = 0; first < rows->n_tokens; first += TILE) {
        const int32_t end = first + TILE < rows->n_tokens ? first + TILE : rows->n_tokens;
        const int32_t need = end + ahead < rows->n_tokens ? end + ahead : rows->n_tokens;
        if (known > first)
            memmove(tile->dz, tile->dz + TILE * BACKWARD_CHANNELS,
                    (size_t)(known - first) * BACKWARD_CHANNELS * sizeof(float));
        for (; known < need; known++)
            output_gradient(a, rows, tile, known, channel, count, tile->dz + (known - first) * BACKWARD_CHANNELS);
        for (int32_t t = first; t < end; t++) {
            const float *dz = tile->dz + (t - first) * BACKWARD_CHANNELS;
            input_gradient(a, rows, tile, t, channel, count, dz);
            weight_gradient(a, rows, tile, t, channel, count, dz);
        }
        add_and_clear(tile->dweight_sum, tile->dweight, a->taps * BACKWARD_CHANNELS);
        add_and_clear(tile->dbias_sum, tile->dbias, BACKWARD_CHANNELS);
    }
    add_gradients(a, tile, channel, count);
}

static void backward_blocks(const kern_cpu *cpu, const kern_rows *rows, const void *args, int64_t first, int64_t end) {
    conv_tile *tile = kern_cpu_workspace(cpu, kern_team_thread());
    for (int64_t block = first; block < end; block++)
        backward_block(args, rows, tile, (int32_t)block * BACKWARD_CHANNELS);
}

// --------------------------------------------------------------------------------------------------------- launchers

static kern_status check_shape(int32_t channels, int32_t channel0, int32_t taps, int32_t activation) {
    if (channels < 1 || channel0 < 0 || taps < 1 || !kern_activation_is_valid(activation))
        return KERN_INVALID;
    return taps > MAX_TAPS ? KERN_UNSUPPORTED : KERN_OK;
}

KERN_PREPARE(short_conv, kern_short_conv_args) {
    (void)cpu;
    *thread_bytes = 0;
    if (!a->x.ref || !a->weight.ref || !a->y.ref || a->x.ref == a->y.ref)
        return KERN_INVALID;
    kern_status status = check_shape(a->channels, a->channel0, a->taps, a->activation);
    if (!status)
        *thread_bytes = kern_align64((size_t)a->taps * CHANNELS * sizeof(float));
    return status;
}

KERN_RUN(short_conv, kern_short_conv_args) {
    double operations =
        (double)rows->n_tokens * a->channels * (2.0 * a->taps + (a->activation == KERN_IDENTITY ? 0 : 20));
    kern_over(short_conv_range, cpu, rows, a, rows->n_tokens, operations);
    if (a->state.p && a->taps > 1)
        kern_over(store_states, cpu, rows, a, rows->n_rows, (double)rows->n_rows * a->channels * (a->taps - 1));
    return KERN_OK;
}

KERN_PREPARE(short_conv_backward, kern_short_conv_backward_args) {
    (void)cpu;
    *thread_bytes = 0;
    if (!a->x.ref || !a->weight.ref || !a->dy.ref || !a->dx.ref || !a->grad_weight.ref || a->dx.ref == a->x.ref)
        return KERN_INVALID;
    kern_status status = check_shape(a->channels, a->channel0, a->taps, a->activation);
    if (!status)
        *thread_bytes = kern_align64(sizeof(conv_tile));
    return status;
}

KERN_RUN(short_conv_backward, kern_short_conv_backward_args) {
    int64_t blocks = ((int64_t)a->channels + BACKWARD_CHANNELS - 1) / BACKWARD_CHANNELS;
    double operations = (double)rows->n_tokens * a->channels * (6.0 * a->taps + 40.0);
    kern_over(backward_blocks, cpu, rows, a, blocks, operations);
    return KERN_OK;
}
