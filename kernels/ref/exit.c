// SPDX-License-Identifier: Apache-2.0
// Exits of looped models, as the formulas are written: sums of probabilities, nothing rearranged.
// See exit.h; no state, no memory.
#include "kernels/ref/exit.h"

#include <math.h>
#include <stdlib.h>

void kern_ref_exit_probability(int loops, const double *z, double *p) {
    double left = 1;
    for (int r = 0; r < loops; r++) {
        double leaves = 1 / (1 + exp(-z[r]));
        p[r] = r + 1 < loops ? leaves * left : left;
        left *= 1 - leaves;
    }
}

int kern_ref_exit_loop(int loops, const double *z, double threshold, int max_loops) {
    double sum = 0, left = 1;
    for (int r = 1; r < max_loops && r < loops; r++) {
        double leaves = 1 / (1 + exp(-z[r - 1]));
        sum += leaves * left;
        left *= 1 - leaves;
        if (sum >= threshold)
            return r;
    }
    return max_loops < loops ? max_loops : loops;
}

double kern_ref_exit_expected(int loops, const double *z, const double *losses, double entropy,
                              const double *log_prior) {
    double *p = malloc(sizeof *p * (size_t)loops), loss = 0;
    kern_ref_exit_probability(loops, z, p);
    for (int r = 0; r < loops; r++)
        loss += p[r] * losses[r] + (p[r] > 0 ? entropy * p[r] * (log(p[r]) - log_prior[r]) : 0);
    free(p);
    return loss;
}

double kern_ref_exit_improvement(int loops, const double *z, const double *losses, double sharpness, double margin,
                                 int previous) {
    double loss = 0;
    for (int r = previous ? 1 : 0; r < (previous ? loops : loops - 1); r++) {
        double gain = previous ? losses[r - 1] - losses[r] : losses[r] - losses[r + 1];
        double label = 1 / (1 + exp(-sharpness * ((gain > 0 ? gain : 0) - margin)));
        double leaves = 1 / (1 + exp(-z[r]));
        loss -= label * log(1 - leaves) + (1 - label) * log(leaves);
    }
    return loss / loops;
}
