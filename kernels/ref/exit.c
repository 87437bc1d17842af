// SPDX-License-Identifier: Apache-2.0
// Exits of looped models, as the formulas are written: sums of probabilities, nothing rearranged.
// See exit.h; no state, no memory.
#include "kernels/ref/exit.h"

#include <math.h>

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
