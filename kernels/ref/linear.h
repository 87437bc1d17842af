// SPDX-License-Identifier: Apache-2.0
// linear in double precision: y = x W^T + bias + residual and its gradients.
//
// What the kernels are compared with: one kind of token, one type of weight, no chunks. Arrays are row-major. Tests
// only.
#ifndef KERNELS_REF_LINEAR_H
#define KERNELS_REF_LINEAR_H

// x (tokens, cols), weight (rows, cols), bias (rows) or NULL, residual (tokens, rows) or NULL (may be y), y (tokens,
// rows).
void kern_ref_linear(int tokens, int rows, int cols, const double *x, const double *weight, const double *bias,
                     const double *residual, double *y);

// dx (tokens, cols) = dy W;  grad_weight (rows, cols) += dy^T x;  grad_bias (rows) += column sums of dy. NULL: not
// wanted.
void kern_ref_linear_backward(int tokens, int rows, int cols, const double *x, const double *weight, const double *dy,
                              double *dx, double *grad_weight, double *grad_bias);

// Block-diagonal, row vector times matrix: x, y (tokens, blocks * width), weight (blocks, width, width), bias
// (blocks * width) or NULL.
void kern_ref_block_linear(int tokens, int blocks, int width, const double *x, const double *weight, const double *bias,
                           double *y);
// dx is written, the others added to.
void kern_ref_block_linear_backward(int tokens, int blocks, int width, const double *x, const double *weight,
                                    const double *dy, double *dx, double *grad_weight, double *grad_bias);

#endif
