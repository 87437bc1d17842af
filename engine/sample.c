// SPDX-License-Identifier: Apache-2.0
// From a request's knobs to what the kernels take: the solver of its rows and the sampler of its logits.
//
// The draw itself is the kernels' (KERN_OP_SAMPLE): Philox4x32-10 keyed by the seed, counted by the absolute position
// of the id and the choice, so that neither the place in a batch nor the cut of a prompt enters.
#include "engine/batch.h"

kern_exit eng_exit(const eng_knobs *knobs) {
    return (kern_exit){.threshold = knobs->exit_threshold, .max_loops = knobs->max_loops};
}

kern_solver eng_solver(const eng_knobs *knobs) {
    kern_solver solver = {
        .mode = KERN_SOLVE_TOLERANCE, .max_steps = knobs->cg_max_steps, .tolerance = knobs->cg_tolerance};
    switch (knobs->cg_mode) {
    case ENG_CG_TOLERANCE:
        if (knobs->cg_tolerance == 0) // no number of steps reaches zero; the caller means the exact solution
            solver.mode = KERN_SOLVE_EXACT;
        break;
    case ENG_CG_STEPS:
        solver.mode = KERN_SOLVE_STEPS;
        break;
    case ENG_CG_EXACT:
        solver.mode = KERN_SOLVE_EXACT;
        break;
    case ENG_CG_FIXED:
        solver.mode = KERN_SOLVE_FIXED;
        break;
    }
    return solver;
}

kern_sampler eng_sampler(const eng_sampling *sampling, int64_t position) {
    return (kern_sampler){.temperature = sampling->temperature,
                          .top_p = sampling->top_p,
                          .min_p = sampling->min_p,
                          .top_k = sampling->top_k,
                          .seed = sampling->seed,
                          .position = (uint64_t)position,
                          .choice = sampling->choice,
                          .forced = -1};
}
