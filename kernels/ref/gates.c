// SPDX-License-Identifier: Apache-2.0
// beta = s(b), gamma = s(a) (1 - (1 - cap) beta^2), g = ln gamma; s the logistic function (MesaNet, von Oswald et al.
// 2025).
//
// ln s(a) = -log1p(e^-a) = a - log1p(e^a): the one of the two whose exponential does not overflow.
// Backward: d ln s(a) / da = s(-a);  d ln(1 - c beta^2) / d beta = -2 c beta / (1 - c beta^2) with c = 1 - cap.
#include "kernels/ref/gates.h"

#include <math.h>

static double sigmoid(double x) {
    return 1 / (1 + exp(-x));
}

void kern_ref_gates(double a, double b, double cap, double *g, double *beta) {
    *beta = sigmoid(b);
    *g = (a > 0 ? -log1p(exp(-a)) : a - log1p(exp(a))) + log1p(-(1 - cap) * *beta * *beta);
}

void kern_ref_gates_backward(double a, double b, double cap, double dg, double dbeta, double *da, double *db) {
    double beta = sigmoid(b), c = 1 - cap;
    *da = dg * sigmoid(-a);
    *db = (dbeta - dg * 2 * c * beta / (1 - c * beta * beta)) * beta * sigmoid(-b);
}
