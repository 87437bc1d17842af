// SPDX-License-Identifier: Apache-2.0
// sample in double precision, by sorting.
//
// The finite edited logits are sorted (descending, ties by ascending id); top_k, top_p and min_p each keep a prefix of
// what the one before left. The kernel finds the same prefixes without a sort.
#include "kernels/ref/sample.h"

#include <math.h>
#include <stdlib.h>

typedef struct entry {
    double logit, mass;
    int id;
} entry;

static int descending(const void *left, const void *right) {
    const entry *a = left, *b = right;
    if (a->logit != b->logit)
        return a->logit > b->logit ? -1 : 1;
    return a->id - b->id;
}

static void edit_logits(double *logit, const kern_logit_edit *edit, int edits) {
    for (int e = 0; e < edits; e++) {
        double l = logit[edit[e].id] + (double)edit[e].bias;
        l = l > 0 ? l / (double)edit[e].repetition : l * (double)edit[e].repetition;
        logit[edit[e].id] = l - (double)edit[e].penalty;
    }
}

// The finite ones in order; returns how many.
static int sorted(int vocabulary, const double *logit, entry *out) {
    int count = 0;
    for (int id = 0; id < vocabulary; id++)
        if (isfinite(logit[id]))
            out[count++] = (entry){logit[id], 0, id};
    qsort(out, (size_t)count, sizeof *out, descending);
    return count;
}

// How many of the sorted entries stay.
static int truncated(const kern_sampler *sampler, entry *e, int count, double *margin) {
    if (!(sampler->temperature > 0) || !(sampler->top_p > 0))
        return 1;
    if (sampler->top_k > 0 && sampler->top_k < count)
        count = sampler->top_k;
    double total = 0, sum = 0;
    for (int i = 0; i < count; i++)
        total += e[i].mass = exp((e[i].logit - e[0].logit) / (double)sampler->temperature);
    if (sampler->top_p < 1) {
        int kept = 0;
        while (kept < count && (kept == 0 || sum < (double)sampler->top_p * total)) {
            sum += e[kept++].mass;
            *margin = fmin(*margin, fabs(sum / total - (double)sampler->top_p));
        }
        count = kept;
    }
    const double least = fmin((double)sampler->min_p, 1);
    int kept = 0;
    while (kept < count && e[kept].mass >= least)
        kept++;
    for (int i = 1; least > 0 && i < count; i++)
        *margin = fmin(*margin, fabs(e[i].mass / least - 1));
    return kept > 0 ? kept : 1;
}

void kern_ref_sample_probabilities(int vocabulary, const float *logits, const kern_sampler *sampler,
                                   const kern_logit_edit *edit, double *probability, double *margin) {
    double *logit = malloc((size_t)vocabulary * sizeof *logit), unused = 1, sum = 0;
    entry *e = malloc((size_t)vocabulary * sizeof *e);
    for (int id = 0; id < vocabulary; id++) {
        logit[id] = (double)logits[id];
        probability[id] = 0;
    }
    edit_logits(logit, edit, sampler->edits);
    int count = sorted(vocabulary, logit, e);
    if (count == 0) { // all banned: the best unedited one
        for (int id = 0; id < vocabulary; id++)
            logit[id] = (double)logits[id];
        e[0].id = 0;
        (void)sorted(vocabulary, logit, e);
        probability[e[0].id] = 1;
    } else {
        e[0].mass = 1;
        count = truncated(sampler, e, count, margin ? margin : &unused);
        for (int i = 0; i < count; i++)
            sum += e[i].mass;
        for (int i = 0; i < count; i++)
            probability[e[i].id] = e[i].mass / sum;
    }
    free(logit);
    free(e);
}

static entry *sorted_floats(int vocabulary, const float *logits, int *count) {
    double *logit = malloc((size_t)vocabulary * sizeof *logit);
    entry *e = malloc((size_t)vocabulary * sizeof *e);
    for (int id = 0; id < vocabulary; id++)
        logit[id] = (double)logits[id];
    *count = sorted(vocabulary, logit, e);
    free(logit);
    return e;
}

void kern_ref_logprobs(int vocabulary, const float *logits, double *logprob) {
    int count;
    double sum = 0;
    entry *e = sorted_floats(vocabulary, logits, &count);
    for (int id = 0; id < vocabulary; id++)
        logprob[id] = -INFINITY;
    for (int i = count - 1; i >= 0; i--)
        sum += exp(e[i].logit - e[0].logit);
    for (int i = 0; i < count; i++)
        logprob[e[i].id] = e[i].logit - e[0].logit - log(sum);
    free(e);
}

void kern_ref_top(int vocabulary, const float *logits, int count, int *id) {
    int finite;
    entry *e = sorted_floats(vocabulary, logits, &finite);
    for (int i = 0; i < count; i++)
        id[i] = i < finite ? e[i].id : -1;
    free(e);
}
