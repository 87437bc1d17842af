// SPDX-License-Identifier: Apache-2.0
// sample in double precision: the exact distribution of the next id.
//
// What a histogram of draws is compared with, and which ids may be drawn at all. Tests only; memory is taken with
// malloc and never checked.
#ifndef KERNELS_REF_SAMPLE_H
#define KERNELS_REF_SAMPLE_H

#include "kernels/kernels.h"

// probability (vocabulary): 0 for ids that are banned or cut off, 1 for the only one when greedy. edit: the sampler's
// edits, sampler->edits of them. margin (may be NULL): the smallest relative distance of a cumulated or single mass
// from its threshold, so that a test can tell a wrong cut from a rounded one.
void kern_ref_sample_probabilities(int vocabulary, const float *logits, const kern_sampler *sampler,
                                   const kern_logit_edit *edit, double *probability, double *margin);

// Log softmax of the logits at every id, -INFINITY where a logit is not finite.
void kern_ref_logprobs(int vocabulary, const float *logits, double *logprob);
// The ids of the `count` largest finite logits, best first, ties to the lowest id; -1 where there are fewer.
void kern_ref_top(int vocabulary, const float *logits, int count, int *id);

#endif
