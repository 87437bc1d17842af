// SPDX-License-Identifier: Apache-2.0
// Errors of gradients over batches; see gradient_error.h.
// All sums are in double, in the order of the values, so that they repeat.
#include "trainer/gradient_error.h"

#include <math.h>

typedef struct sums {
    double difference, mine, reference, product;
} sums;

static sums add_up(const float *mine, const float *reference, int64_t count) {
    sums s = {0};
    for (int64_t i = 0; i < count; i++) {
        const double a = (double)mine[i], b = (double)reference[i];
        s.difference += (a - b) * (a - b);
        s.mine += a * a;
        s.reference += b * b;
        s.product += a * b;
    }
    return s;
}

static double relative(double difference, double reference) {
    return reference > 0 ? sqrt(difference / reference) : sqrt(difference);
}

static double cosine_of(const sums *s) {
    if (s->mine == 0 && s->reference == 0)
        return 1;
    return s->mine == 0 || s->reference == 0 ? 0 : s->product / sqrt(s->mine) / sqrt(s->reference);
}

double trn_relative_error(const float *mine, const float *reference, int64_t count) {
    const sums s = add_up(mine, reference, count);
    return relative(s.difference, s.reference);
}

void trn_gradient_error_begin(trn_gradient_error *out) {
    *out = (trn_gradient_error){.cosine = 1};
}

void trn_gradient_error_add(trn_gradient_error *sum, const float *mine, const float *reference, int64_t count) {
    const sums s = add_up(mine, reference, count);
    const double error = relative(s.difference, s.reference), cosine = cosine_of(&s);
    sum->batches++;
    sum->error += s.difference;
    sum->norm += s.reference;
    if (!(error <= sum->worst) && !isnan(sum->worst))
        sum->worst = error;
    if (!(cosine >= sum->cosine) && !isnan(sum->cosine))
        sum->cosine = cosine;
}

double trn_gradient_error_relative(const trn_gradient_error *sum) {
    return relative(sum->error, sum->norm);
}

double trn_gradient_error_left(const trn_gradient_error *sum, const double *shared, int64_t count) {
    double square = 0;
    for (int64_t i = 0; i < count; i++)
        square += shared[i] * shared[i];
    return sum->error == 0 ? 0 : sqrt(square / sum->error / sum->batches);
}
