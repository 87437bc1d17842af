// SPDX-License-Identifier: Apache-2.0
// linear in double precision, one sum at a time.
//
// y[t, o] = bias[o] + sum_k W[o, k] x[t, k] + residual[t, o];  dx = dy W;  dW += dy^T x;  dbias += sum_t dy.
// Sums run over ascending k, o or t.
#include "kernels/ref/linear.h"

#include <stddef.h>

void kern_ref_linear(int tokens, int rows, int cols, const double *x, const double *weight, const double *bias,
                     const double *residual, double *y) {
    for (int t = 0; t < tokens; t++) {
        for (int o = 0; o < rows; o++) {
            double sum = bias ? bias[o] : 0;
            for (int k = 0; k < cols; k++)
                sum += weight[(size_t)o * cols + k] * x[(size_t)t * cols + k];
            y[(size_t)t * rows + o] = sum + (residual ? residual[(size_t)t * rows + o] : 0);
        }
    }
}

void kern_ref_linear_backward(int tokens, int rows, int cols, const double *x, const double *weight, const double *dy,
                              double *dx, double *grad_weight, double *grad_bias) {
    for (int t = 0; dx && t < tokens; t++) {
        for (int k = 0; k < cols; k++) {
            double sum = 0;
            for (int o = 0; o < rows; o++)
                sum += dy[(size_t)t * rows + o] * weight[(size_t)o * cols + k];
            dx[(size_t)t * cols + k] = sum;
        }
    }
    for (int t = 0; t < tokens; t++) {
        for (int o = 0; o < rows; o++) {
            double d = dy[(size_t)t * rows + o];
            if (grad_bias)
                grad_bias[o] += d;
            for (int k = 0; grad_weight && k < cols; k++)
                grad_weight[(size_t)o * cols + k] += d * x[(size_t)t * cols + k];
        }
    }
}
