// SPDX-License-Identifier: Apache-2.0
// Exits of looped models in double precision, one token a call (Zhu et al. 2025, arXiv 2510.25741, section 3).
//
// z (loops) are the gate's logits. Tests only.
#ifndef KERNELS_REF_EXIT_H
#define KERNELS_REF_EXIT_H

// p (loops): p_r = s(z_r) S_{r-1}, the last what is left.
void kern_ref_exit_probability(int loops, const double *z, double *p);
// The first r, from 1 on, with p_1 + ... + p_r >= threshold, at most max_loops.
int kern_ref_exit_loop(int loops, const double *z, double threshold, int max_loops);

// The gate's objectives of one token from its losses (loops); kern_exit_objective says them.
double kern_ref_exit_expected(int loops, const double *z, const double *losses, double entropy,
                              const double *log_prior);
double kern_ref_exit_improvement(int loops, const double *z, const double *losses, double sharpness, double margin,
                                 int previous);

#endif
