// SPDX-License-Identifier: Apache-2.0
// The other tasks of the mechanistic design suite (Poli et al. 2024, arXiv 2403.17844): selective copying, compression,
// memorization. Answers stand where they are asked for and are never read: the input there is a mark.
#include "trainer/task.h"

static void put(trn_task_example *example, int32_t id, int32_t target) {
    example->id[example->length] = id;
    example->target[example->length++] = target;
}

// -------------------------------------------------------------------------------------------------- selective copying

eng_status trn_copy_check(trn_task_settings *s, eng_error *error) {
    if (s->length <= 2 * s->copies + 1)
        return eng_fail(error, ENG_INVALID, "--length: must be above %lld for --copies %lld",
                        2 * (long long)s->copies + 1, (long long)s->copies);
    if (s->vocab < 3)
        return eng_fail(error, ENG_INVALID, "--vocab: must be at least 3");
    return ENG_OK;
}

// Tokens with blanks before them, each blank before a random token; the mark to copy; then a blank for each token, to
// be answered by it.
void trn_copy_generate(const trn_task_settings *s, int64_t level, bool training, trn_draw *draw,
                       trn_task_example *example) {
    (void)level;
    (void)training;
    int32_t copies = (int32_t)s->copies, mark = (int32_t)s->vocab - 1, blank = mark - 1;
    int32_t *token = example->scratch, *blanks = token + copies;
    for (int32_t i = 0; i < copies; i++) {
        token[i] = (int32_t)trn_draw_below(draw, (uint32_t)blank);
        blanks[i] = 0;
    }
    for (int64_t i = 2 * s->copies + 1; i < s->length; i++)
        blanks[trn_draw_below(draw, (uint32_t)copies)]++;
    example->length = 0;
    for (int32_t i = 0; i < copies; i++) {
        for (int32_t j = 0; j < blanks[i]; j++)
            put(example, blank, -1);
        put(example, token[i], -1);
    }
    put(example, mark, -1);
    for (int32_t i = 0; i < copies; i++)
        put(example, blank, token[i]);
}

// -------------------------------------------------------------------------------------------------------- compression

eng_status trn_compression_check(trn_task_settings *s, eng_error *error) {
    if (s->vocab - s->noise_vocab < 2)
        return eng_fail(error, ENG_INVALID, "--vocab: %lld ids leave no token beside noise and mark",
                        (long long)s->vocab);
    if (s->noise_fraction > 0 && s->noise_vocab < 1)
        return eng_fail(error, ENG_INVALID, "--noise-vocab: noise needs at least one id");
    return ENG_OK;
}

// Random tokens and the mark; then the mark again for each of them, to be answered by it (noise is not asked for).
void trn_compression_generate(const trn_task_settings *s, int64_t level, bool training, trn_draw *draw,
                              trn_task_example *example) {
    (void)level;
    (void)training;
    int32_t tokens = (int32_t)s->length - 1, mark = (int32_t)s->vocab - 1, plain = mark - (int32_t)s->noise_vocab;
    example->length = 0;
    for (int32_t i = 0; i < tokens; i++) {
        bool noise = s->noise_fraction > 0 && trn_draw_unit(draw) < s->noise_fraction;
        uint32_t token = noise ? (uint32_t)plain + trn_draw_below(draw, (uint32_t)s->noise_vocab)
                               : trn_draw_below(draw, (uint32_t)plain);
        put(example, (int32_t)token, -1);
    }
    put(example, mark, -1);
    for (int32_t i = 0; i < tokens; i++)
        put(example, mark, example->id[i] < plain ? example->id[i] : -1);
}

// ------------------------------------------------------------------------------------------------------- memorization

enum { MAPPING_STREAM = -1 };

eng_status trn_memorization_check(trn_task_settings *s, eng_error *error) {
    if (s->length % 2 != 0)
        return eng_fail(error, ENG_INVALID, "--length: %lld is odd", (long long)s->length);
    if (s->vocab - s->noise_vocab < 3)
        return eng_fail(error, ENG_INVALID, "--vocab: %lld ids leave no key and value beside noise and mark",
                        (long long)s->vocab);
    return trn_compression_check(s, error);
}

// Keys are the first half of the plain ids. mapping (plain ids): key i of the first half has the value
// mapping[plain / 2 + i] by a permutation that is the same in every example.
static void fill_mapping(const trn_task_settings *s, int32_t plain, int32_t *mapping) {
    trn_draw draw = trn_draw_begin((uint64_t)s->seed, (uint64_t)MAPPING_STREAM);
    int32_t keys = plain / 2;
    for (int32_t i = 0; i < plain; i++)
        mapping[i] = i;
    for (int32_t i = plain - 1; i > keys; i--) {
        int32_t other = keys + (int32_t)trn_draw_below(&draw, (uint32_t)(i - keys + 1)), value = mapping[i];
        mapping[i] = mapping[other];
        mapping[other] = value;
    }
}

// Random keys, a mark behind each, to be answered by the key's value.
void trn_memorization_generate(const trn_task_settings *s, int64_t level, bool training, trn_draw *draw,
                               trn_task_example *example) {
    (void)level;
    (void)training;
    int32_t pairs = (int32_t)s->length / 2, mark = (int32_t)s->vocab - 1, plain = mark - (int32_t)s->noise_vocab;
    int32_t keys = plain / 2, certain = (int32_t)trn_draw_below(draw, (uint32_t)pairs);
    fill_mapping(s, plain, example->scratch);
    example->length = 0;
    for (int32_t i = 0; i < pairs; i++) {
        if (i != certain && s->noise_fraction > 0 && trn_draw_unit(draw) < s->noise_fraction) {
            put(example, plain + (int32_t)trn_draw_below(draw, (uint32_t)s->noise_vocab), -1);
            put(example, plain + (int32_t)trn_draw_below(draw, (uint32_t)s->noise_vocab), -1);
            continue;
        }
        int32_t key = (int32_t)trn_draw_below(draw, (uint32_t)keys);
        put(example, key, -1);
        put(example, mark, example->scratch[keys + key]);
    }
}
