// SPDX-License-Identifier: Apache-2.0
// The table of tasks; see task.h. The MAD tasks have the defaults of the public code's baselines (configs/tasks of
// MAD-lab); mqar has a size that trains on a CPU in minutes (Zoology's own are 8192 ids and 100,000 examples).
#include <stdlib.h>
#include <string.h>

#include "trainer/task.h"

static int32_t longest_as_said(const trn_task_settings *settings) {
    return (int32_t)settings->length + 1; // one more until the targets are shifted
}

static int32_t longest_expression(const trn_task_settings *settings) {
    return 2 * (int32_t)settings->operations + 5;
}

static int32_t longest_twice(const trn_task_settings *settings) {
    return 2 * (int32_t)settings->length - 1;
}

// The public code of MAD averages over the classes of answers; here every answer weighs the same.
static const char answers[] = "share of the answers that are right (not a mean over their ids)";
static const char copied[] = "share of the tokens that are right (not a mean over their ids)";

static const trn_task tasks[] = {
    {"mqar",
     "Multi-query associative recall: K pairs of key and value, then each key once more, to be\n"
     "answered by its value; --length ids. Validation parts valid-K, one a number of pairs.",
     answers,
     {{"examples", "100000"},
      {"valid-examples", "3000"},
      {"vocab", "512"},
      {"length", "128"},
      {"pairs", "4,8,16"},
      {"power-a", "0.01"},
      {"blank-non-queries", NULL}},
     trn_mqar_check,
     longest_as_said,
     trn_mqar_generate,
     NULL},
    {"in-context-recall",
     "MAD: pairs of keys and values; where a key comes again its value is asked for.\n"
     "One pair less an example than --length / 2 says, as in the public code.",
     answers,
     {{"examples", "12800"},
      {"valid-examples", "1280"},
      {"vocab", "16"},
      {"length", "128"},
      {"single-query", NULL},
      {"train-answers-only", NULL}},
     trn_recall_check,
     longest_as_said,
     trn_recall_generate,
     NULL},
    {"noisy-recall",
     "MAD: in-context-recall with pairs of noise ids (the last of the vocabulary) in between.",
     answers,
     {{"examples", "12800"},
      {"valid-examples", "1280"},
      {"vocab", "32"},
      {"length", "128"},
      {"noise-vocab", "16"},
      {"noise-fraction", "0.2"},
      {"single-query", NULL},
      {"train-answers-only", NULL}},
     trn_recall_check,
     longest_as_said,
     trn_recall_generate,
     NULL},
    {"fuzzy-recall",
     "MAD: in-context-recall with keys and values of one to several ids; validation asks with keys\n"
     "of the largest size. Unlike in the public code the last question can always be answered:\n"
     "examples in which its pair found no place are drawn anew.",
     answers,
     {{"examples", "12800"},
      {"valid-examples", "1280"},
      {"vocab", "16"},
      {"length", "128"},
      {"key-motif", "3"},
      {"value-motif", "3"},
      {"noise-vocab", "0"},
      {"noise-fraction", "0"},
      {"single-query", NULL},
      {"train-answers-only", NULL}},
     trn_fuzzy_check,
     longest_as_said,
     trn_fuzzy_generate,
     NULL},
    {"selective-copy",
     "MAD: tokens among blanks, to be copied in their order behind a mark.",
     copied,
     {{"examples", "12800"}, {"valid-examples", "1280"}, {"vocab", "16"}, {"length", "256"}, {"copies", "16"}},
     trn_copy_check,
     longest_as_said,
     trn_copy_generate,
     NULL},
    {"compression",
     "MAD, as a language model can take it: --length - 1 random tokens and a mark, then the mark\n"
     "again for each token, to be answered by it. In the public code a perceptron decodes the\n"
     "tokens from the one vector at the mark; here the model reads on, and a layer that looks\n"
     "back is not held to that vector. Not comparable with published figures.",
     copied,
     {{"examples", "12800"},
      {"valid-examples", "1280"},
      {"vocab", "16"},
      {"length", "32"},
      {"noise-vocab", "0"},
      {"noise-fraction", "0"}},
     trn_compression_check,
     longest_twice,
     trn_compression_generate,
     NULL},
    {"memorization",
     "MAD: keys whose values are the same in every example, each asked for behind its key.",
     answers,
     {{"examples", "256"},
      {"valid-examples", "1280"},
      {"vocab", "256"},
      {"length", "32"},
      {"noise-vocab", "0"},
      {"noise-fraction", "0"}},
     trn_memorization_check,
     longest_as_said,
     trn_memorization_generate,
     NULL},
    {"p-hop",
     "p-hop induction: --length letters behind a mark that says how many hops; a hop goes to the\n"
     "letter behind the last earlier place of the same letter. The letter after so many hops from\n"
     "the end is asked for there. The last ids of the vocabulary are the marks. Validation parts\n"
     "valid-P, one a number of hops.",
     "share of the letters that are right",
     {{"examples", "100000"},
      {"valid-examples", "2000"},
      {"vocab", "5"},
      {"length", "64"},
      {"hops", "4"},
      {"train-every-letter", NULL}},
     trn_hop_check,
     longest_as_said,
     trn_hop_generate,
     trn_hop_floors},
    {"mano",
     "Arithmetic modulo a prime in prefix order: + - or * of two expressions, values in between.\n"
     "A training example has 1 to --operations of them, one that is scored has all.",
     "share of the results that are right",
     {{"examples", "100000"},
      {"valid-examples", "2000"},
      {"modulus", "23"},
      {"operations", "10"},
      {"train-answers-only", NULL}},
     trn_mano_check,
     longest_expression,
     trn_mano_generate,
     NULL},
};

const trn_task *trn_task_at(int index) {
    return index >= 0 && (size_t)index < sizeof tasks / sizeof *tasks ? &tasks[index] : NULL;
}

const trn_task *trn_task_find(const char *name) {
    for (size_t i = 0; i < sizeof tasks / sizeof *tasks; i++)
        if (strcmp(tasks[i].name, name) == 0)
            return &tasks[i];
    return NULL;
}

eng_status trn_task_read_levels(trn_task_settings *s, const char *option, const char *text, eng_error *error) {
    const char *at = text;
    for (s->levels = 0; s->levels < TRN_TASK_MAX_LEVELS;) {
        char *end = NULL;
        long long value = strtoll(at, &end, 10);
        if (end == at || value < 1 || (*end != ',' && *end != '\0'))
            break;
        s->level[s->levels++] = value;
        if (*end == '\0')
            return ENG_OK;
        at = end + 1;
    }
    return eng_fail(error, ENG_INVALID, "--%s: \"%.40s\" is no list of up to %d numbers such as 4,8,16", option, text,
                    TRN_TASK_MAX_LEVELS);
}

eng_status trn_task_example_create(const trn_task *task, const trn_task_settings *settings, trn_task_example *out,
                                   eng_error *error) {
    size_t capacity = (size_t)task->longest(settings);
    trn_task_example example = {.capacity = (int32_t)capacity,
                                .id = calloc(capacity, sizeof *example.id),
                                .target = calloc(capacity, sizeof *example.target),
                                .scratch = calloc(4 * capacity + (size_t)settings->vocab, sizeof *example.scratch),
                                .weight = calloc(capacity, sizeof *example.weight)};
    if (!example.id || !example.target || !example.scratch || !example.weight) {
        trn_task_example_free(&example);
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for an example of %zu ids", capacity);
    }
    *out = example;
    return ENG_OK;
}

void trn_task_example_free(trn_task_example *example) {
    free(example->id);
    free(example->target);
    free(example->scratch);
    free(example->weight);
    *example = (trn_task_example){0};
}
