// SPDX-License-Identifier: Apache-2.0
// linear in double precision, one sum at a time.
//
// y[t, o] = bias[o] + sum_k W[o, k] x[t, k] + residual[t, o];  dx = dy W;  dW += dy^T x;  dbias += sum_t dy.
// Sums run over ascending k, o or t. The block-diagonal product has the matrix behind the vector: y_b = x_b W_b.
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

void kern_ref_block_linear(int tokens, int blocks, int width, const double *x, const double *weight, const double *bias,
                           double *y) {
    for (int t = 0; t < tokens; t++) {
        for (int b = 0; b < blocks; b++) {
            for (int o = 0; o < width; o++) {
                size_t vector = ((size_t)t * blocks + b) * width, block = (size_t)b * width;
                double sum = bias ? bias[block + o] : 0;
                for (int k = 0; k < width; k++)
                    sum += x[vector + k] * weight[(block + k) * width + o];
                y[vector + o] = sum;
            }
        }
    }
}

void kern_ref_block_linear_backward(int tokens, int blocks, int width, const double *x, const double *weight,
                                    const double *dy, double *dx, double *grad_weight, double *grad_bias) {
    for (int t = 0; t < tokens; t++) {
        for (int b = 0; b < blocks; b++) {
            size_t vector = ((size_t)t * blocks + b) * width, block = (size_t)b * width;
            for (int k = 0; k < width; k++) {
                dx[vector + k] = 0;
                for (int o = 0; o < width; o++) {
                    dx[vector + k] += dy[vector + o] * weight[(block + k) * width + o];
                    grad_weight[(block + k) * width + o] += dy[vector + o] * x[vector + k];
                }
            }
            for (int o = 0; o < width; o++)
                grad_bias[block + o] += dy[vector + o];
        }
    }
}
