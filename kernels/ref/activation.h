// SPDX-License-Identifier: Apache-2.0
// References of the activations in double, one element a call.
//
// The formulas stand at kern_activation in kernels.h. Used by tests and by the other references only.
#ifndef KERNELS_REF_ACTIVATION_H
#define KERNELS_REF_ACTIVATION_H

#include "kernels/kernels.h"

double kern_ref_sigmoid(double z);
double kern_ref_log_sigmoid(double z);
double kern_ref_softplus(double z);
// cap tanh(z / cap); cap 0: z.
double kern_ref_soft_cap(double z, double cap);
double kern_ref_soft_cap_slope(double z, double cap);

// activation: kern_activation.
double kern_ref_activation(int activation, double z);
double kern_ref_activation_slope(int activation, double z);

#endif
