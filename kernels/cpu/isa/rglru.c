// SPDX-License-Identifier: Apache-2.0
// RG-LRU (De et al. 2024), channel by channel: r = s(recurrence_gate), i = s(input_gate), L = -8 r softplus(p),
//
//     h_t = e^L h_{t-1} + mult (i x)_t,   mult = sqrt(-expm1(2 L));   at position 0: h_t = (i x)_t
// -expm1 keeps its digits where the decay is near one. Backward, tokens in reverse, G = dh_t + a_{t+1} G_{t+1} (nothing
// from a later document or from a reset):
//     d(i x) = G mult                dL = a h_{t-1} G - (i x) G 2 a^2 / sqrt(max(4 (1 - a^2), 1e-6))
//     dr = -8 softplus(p) dL r (1 - r)        dp += -8 s(p) sum_t r dL;  a reset gives dL = 0 and mult = 1
//
// Channels are free of one another and run in blocks; a block goes over all rows, so its sum over tokens has one order,
// wherever the team cuts the channels.
#include "kernels/cpu/isa/activation.h"

enum { CHANNELS = 1024, UNIT = 64 }; // of a block, of what a thread may take

static const float decay_scale = 8.0f;

// The next block of the channels [*channel, end): its width.
static int32_t next_block(int32_t channel, int64_t end, int32_t width) {
    int64_t last = end * UNIT < width ? end * UNIT : width;
    return last - channel < CHANNELS ? (int32_t)(last - channel) : CHANNELS;
}

static void softplus_all(const float *p, int32_t count, float *out) {
    for (int32_t c = 0; c < count; c += KERN_VL)
        vf_store_upto(out + c, vf_softplus(vf_load_upto(p + c, count - c)), count - c);
}

// ------------------------------------------------------------------------------------------------------------ forward

static void token_step(const kern_rglru_args *a, int64_t at, int32_t count, bool reset, const float *softplus,
                       float *h) {
    for (int32_t c = 0; c < count; c += KERN_VL) {
        const int32_t left = count - c;
        vf in = vf_sigmoid(vf_load_upto(a->input_gate.f + at + c, left)) * vf_load_upto(a->x.f + at + c, left);
        vf next = in;
        if (!reset) {
            vf r = vf_sigmoid(vf_load_upto(a->recurrence_gate.f + at + c, left));
            vf L = -decay_scale * r * vf_load_upto(softplus + c, left);
            next = vf_exp(L) * vf_load_upto(h + c, left) + vf_sqrt(-vf_expm1_negative(2.0f * L)) * in;
        }
        vf_store_upto(h + c, next, left);
        vf_store_upto(a->h.f + at + c, next, left);
    }
}

static void scan_row(const kern_rglru_args *a, const kern_rows *rows, const kern_row *row, int32_t channel,
                     int32_t count, const float *softplus) {
    float h[CHANNELS] __attribute__((aligned(64)));
    float *state = kern_slot_state(rows, a->state, row->slot);
    if (state)
        memcpy(h, state + channel, (size_t)count * sizeof(float));
    else
        memset(h, 0, (size_t)count * sizeof(float));
    for (int32_t t = row->token0; t < row->token0 + row->length; t++)
        token_step(a, (int64_t)t * a->width + channel, count, rows->token_position[t] == 0, softplus, h);
    if (state)
        memcpy(state + channel, h, (size_t)count * sizeof(float));
}

static void rglru_units(const kern_cpu *cpu, const kern_rows *rows, const void *args, int64_t first, int64_t end) {
    (void)cpu;
    const kern_rglru_args *a = args;
    float softplus[CHANNELS] __attribute__((aligned(64)));
    for (int32_t channel = (int32_t)first * UNIT, count; (count = next_block(channel, end, a->width)) > 0;
         channel += count) {
        softplus_all(a->recurrent_param.f + channel, count, softplus);
        for (int32_t r = 0; r < rows->n_rows; r++)
            scan_row(a, rows, &rows->row[r], channel, count, softplus);
    }
}

// ----------------------------------------------------------------------------------------------------------- backward

typedef struct gradient_block {
    float carried[CHANNELS]; // a_{t+1} G_{t+1}
    float softplus[CHANNELS];
    float sum[CHANNELS];    // sum of r dL over tokens done
    float recent[CHANNELS]; // the same of the last tokens, added to it at times
} gradient_block;

static void token_gradient(const kern_rglru_backward_args *a, int64_t at, int32_t count, bool first, bool reset,
                           gradient_block *block) {
    for (int32_t c = 0; c < count; c += KERN_VL) {
        const int32_t left = count - c;
        const int64_t i = at + c;
        vf x = vf_load_upto(a->x.f + i, left), gate = vf_load_upto(a->input_gate.f + i, left);
        vf input = vf_sigmoid(gate), r = vf_sigmoid(vf_load_upto(a->recurrence_gate.f + i, left));
        vf G = vf_load_upto(a->dh.f + i, left) + vf_load_upto(block->carried + c, left);
        vf d_in = G, dL = {0}, carried = {0}, softplus = vf_load_upto(block->softplus + c, left);
        if (!reset) {
            vf L = -decay_scale * r * softplus, decay = vf_exp(L), rest = -vf_expm1_negative(2.0f * L);
            vf before = first ? vf_set(0) : vf_load_upto(a->h.f + i - a->width, left);
            d_in = G * vf_sqrt(rest);
            carried = decay * G;
            vf slope = 2.0f * decay * decay / vf_sqrt(vf_max(vf_set(1e-6f), 4.0f * rest));
            dL = carried * before - input * x * G * slope;
        }
        vf_store_upto(block->carried + c, carried, left);
        vf_store_upto(block->recent + c, vf_load_upto(block->recent + c, left) + r * dL, left);
        vf_store_upto(a->dx.f + i, d_in * input, left);
        vf_store_upto(a->dinput_gate.f + i, d_in * x * (input * vf_sigmoid(-gate)), left);
        vf_store_upto(a->drecurrence_gate.f + i, -decay_scale * softplus * dL * (r * (1.0f - r)), left);
    }
}

static void settle(gradient_block *block, int32_t count) {
    for (int32_t c = 0; c < count; c++) {
        block->sum[c] += block->recent[c];
        block->recent[c] = 0;
    }
}

static void rglru_backward_units(const kern_cpu *cpu, const kern_rows *rows, const void *args, int64_t first,
                                 int64_t end) {
    (void)cpu;
    enum { TILE = 64 }; // tokens of one partial sum
    const kern_rglru_backward_args *a = args;
    for (int32_t channel = (int32_t)first * UNIT, count; (count = next_block(channel, end, a->width)) > 0;
         channel += count) {
        gradient_block block = {0};
        softplus_all(a->recurrent_param.f + channel, count, block.softplus);
        for (int32_t t = rows->n_tokens - 1; t >= 0; t--) {
            if (t + 1 < rows->n_tokens && rows->token_start[t + 1] == t + 1)
                memset(block.carried, 0, sizeof block.carried);
            token_gradient(a, (int64_t)t * a->width + channel, count, rows->token_start[t] == t,
                           rows->token_position[t] == 0, &block);
            if (t % TILE == 0)
                settle(&block, count);
        }
        for (int32_t c = 0; c < count; c += KERN_VL) {
            const int32_t left = count - c;
            float *grad = a->grad_recurrent_param.f + channel + c;
            vf slope = -decay_scale * vf_sigmoid(vf_load_upto(a->recurrent_param.f + channel + c, left));
            vf_store_upto(grad, vf_load_upto(grad, left) + slope * vf_load_upto(block.sum + c, left), left);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------- launchers

static int64_t unit_count(int32_t width) {
    return (width + UNIT - 1) / UNIT;
}

KERN_PREPARE(rglru, kern_rglru_args) {
    (void)cpu;
    *thread_bytes = 0;
    bool complete = a->x.ref && a->input_gate.ref && a->recurrence_gate.ref && a->recurrent_param.ref && a->h.ref;
    bool apart = a->h.ref != a->x.ref && a->h.ref != a->input_gate.ref && a->h.ref != a->recurrence_gate.ref;
    return complete && apart && a->width >= 1 ? KERN_OK : KERN_INVALID;
}

KERN_RUN(rglru, kern_rglru_args) {
    kern_over(rglru_units, cpu, rows, a, unit_count(a->width), 120.0 * (double)rows->n_tokens * a->width);
    return KERN_OK;
}

KERN_PREPARE(rglru_backward, kern_rglru_backward_args) {
    (void)cpu;
    *thread_bytes = 0;
    bool complete = a->x.ref && a->input_gate.ref && a->recurrence_gate.ref && a->recurrent_param.ref && a->h.ref &&
                    a->dh.ref && a->dx.ref && a->dinput_gate.ref && a->drecurrence_gate.ref &&
                    a->grad_recurrent_param.ref;
    return complete && a->width >= 1 ? KERN_OK : KERN_INVALID;
}

KERN_RUN(rglru_backward, kern_rglru_backward_args) {
    kern_over(rglru_backward_units, cpu, rows, a, unit_count(a->width), 200.0 * (double)rows->n_tokens * a->width);
    return KERN_OK;
}
