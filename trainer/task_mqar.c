// SPDX-License-Identifier: Apache-2.0
// Multi-query associative recall (Arora et al. 2023, "Zoology", arXiv 2312.04927).
//
// K pairs of a key (1 .. V/2 - 1) and a value (V/2 .. V - 1), no key and no value twice; then every key once more, at
// even distances 2 (g - 1) behind the pairs, g without repetition from p(g) ~ g^(a - 1): a small a asks soon. At a
// query the answer is its value; what stands between the queries, also just behind one, is random (or 0).
#include <math.h>

#include "trainer/task.h"

eng_status trn_mqar_check(trn_task_settings *s, eng_error *error) {
    eng_status status = trn_task_read_levels(s, "pairs", s->pairs, error);
    if (status == ENG_OK && s->length % 2 != 0)
        return eng_fail(error, ENG_INVALID, "--length: %lld is odd", (long long)s->length);
    for (int i = 0; status == ENG_OK && i < s->levels; i++) {
        if (4 * s->level[i] > s->length)
            return eng_fail(error, ENG_INVALID, "--pairs: %lld pairs and their queries need a length of %lld",
                            (long long)s->level[i], 4 * (long long)s->level[i]);
        if (s->level[i] > s->vocab / 2 - 1)
            return eng_fail(error, ENG_INVALID, "--pairs: %lld of them, and %lld keys", (long long)s->level[i],
                            (long long)s->vocab / 2 - 1);
    }
    return status;
}

// Draws a slot by its weight and takes it away.
static int32_t take_slot(trn_draw *draw, double *weight, int32_t slots) {
    double total = 0;
    int32_t last = 0;
    for (int32_t i = 0; i < slots; i++)
        total += weight[i];
    double place = trn_draw_unit(draw) * total;
    for (int32_t i = 0; i < slots; i++) {
        if (weight[i] == 0)
            continue;
        last = i;
        if (place < weight[i])
            break;
        place -= weight[i];
    }
    weight[last] = 0;
    return last;
}

void trn_mqar_generate(const trn_task_settings *s, int64_t level, bool training, trn_draw *draw,
                       trn_task_example *example) {
    (void)training;
    int32_t pairs = (int32_t)level, length = (int32_t)s->length, half = (int32_t)s->vocab / 2;
    int32_t slots = length / 2 - pairs, *key = example->scratch, *value = key + pairs;
    trn_draw_distinct(draw, 1, half - 1, pairs, key);
    trn_draw_distinct(draw, half, (int32_t)s->vocab - half, pairs, value);
    for (int32_t i = 0; i < length; i++) {
        example->id[i] = s->blank_non_queries ? 0 : (int32_t)trn_draw_below(draw, (uint32_t)s->vocab);
        example->target[i] = -1;
    }
    for (int32_t g = 0; g < slots; g++)
        example->weight[g] = pow(g + 1, s->power_a - 1);
    for (int32_t k = 0; k < pairs; k++) {
        int32_t query = 2 * pairs + 2 * take_slot(draw, example->weight, slots);
        example->id[2 * k] = example->id[query] = key[k];
        example->id[2 * k + 1] = example->target[query] = value[k];
    }
    example->length = length;
}
