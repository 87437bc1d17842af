// SPDX-License-Identifier: Apache-2.0
// z[t,c] = bias[c] + sum_j weight[c,j] x[t-W+1+j,c], y = act(z), one channel at a time.
//
// Backward: with dz = dy act'(z), every product weight[c,j] x[s,c] of a token's sum gives dz x[s,c] to the weight and
// dz weight[c,j] to the input.
#include "kernels/ref/short_conv.h"

#include "kernels/ref/activation.h"

// The input of channel c that tap j of token t reads.
static double input_at(kern_ref_conv conv, const double *x, const double *state, size_t t, size_t c, size_t j) {
    size_t back = conv.taps - 1 - j; // tokens before t
    if (back <= t)
        return x[(t - back) * conv.channels + c];
    return state ? state[(conv.taps - 1 + t - back) * conv.channels + c] : 0;
}

static double sum_at(kern_ref_conv conv, const double *x, const double *weight, const double *bias, const double *state,
                     size_t t, size_t c) {
    double z = bias ? bias[c] : 0;
    for (size_t j = 0; j < conv.taps; j++)
        z += weight[c * conv.taps + j] * input_at(conv, x, state, t, c, j);
    return z;
}

void kern_ref_short_conv(kern_ref_conv conv, const double *x, const double *weight, const double *bias, double *state,
                         double *y, size_t length) {
    for (size_t t = 0; t < length; t++)
        for (size_t c = 0; c < conv.channels; c++) {
            double z = sum_at(conv, x, weight, bias, state, t, c);
            y[t * conv.channels + c] = kern_ref_activation(conv.activation, z);
        }
    // Entry j of the new state is what tap j + 1 of the last token read; ascending j never reads an entry already
    // written.
    for (size_t j = 0; state && length > 0 && j + 1 < conv.taps; j++)
        for (size_t c = 0; c < conv.channels; c++)
            state[j * conv.channels + c] = input_at(conv, x, state, length - 1, c, j + 1);
}

void kern_ref_short_conv_backward(kern_ref_conv conv, const double *x, const double *weight, const double *bias,
                                  const double *dy, double *dx, double *dweight, double *dbias, size_t length) {
    for (size_t i = 0; i < length * conv.channels; i++)
        dx[i] = 0;
    for (size_t t = 0; t < length; t++)
        for (size_t c = 0; c < conv.channels; c++) {
            double z = sum_at(conv, x, weight, bias, NULL, t, c);
            double dz = dy[t * conv.channels + c] * kern_ref_activation_slope(conv.activation, z);
            if (dbias)
                dbias[c] += dz;
            for (size_t j = 0; j < conv.taps; j++) {
                size_t back = conv.taps - 1 - j;
                if (back > t)
                    continue;
                dweight[c * conv.taps + j] += dz * x[(t - back) * conv.channels + c];
                dx[(t - back) * conv.channels + c] += dz * weight[c * conv.taps + j];
            }
        }
}
