// SPDX-License-Identifier: Apache-2.0
// mesa-trainer task NAME --out DIR: the data of a synthetic task (task.h) as shards of examples: DIR/train and
// DIR/valid, or DIR/valid-K for tasks with levels.
//
// Example number i of a part is a function of task, options, seed, part and i. A validation example that equals a
// training example is drawn anew, so that what is scored was never trained on.
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/files.h"
#include "engine/hash.h"
#include "trainer/commands.h"
#include "trainer/options.h"
#include "trainer/progress.h"
#include "trainer/shard.h"
#include "trainer/task.h"

enum { FIRST_OPTIONS = 2, MAX_TRIES = 1000 };

static const uint64_t shard_limit = UINT64_C(256) << 20;

typedef struct task_option {
    const char *name, *value_name;
    trn_option_kind kind;
    size_t offset; // in trn_task_settings
    double least, most;
    const char *help;
} task_option;

#define AT(member) offsetof(trn_task_settings, member)
static const task_option options_of_tasks[] = {
    {"examples", "N", TRN_INTEGER, AT(examples), 1, 1e9, "training examples"},
    {"valid-examples", "N", TRN_INTEGER, AT(valid_examples), 1, 1e9, "examples of each validation part"},
    {"vocab", "N", TRN_INTEGER, AT(vocab), 3, 1 << 20, "ids, marks and noise included"},
    {"length", "N", TRN_INTEGER, AT(length), 2, 1 << 20, "ids of an example, as said above"},
    {"pairs", "K,K..", TRN_STRING, AT(pairs), 0, 0, "pairs of an example; of several numbers each example takes one"},
    {"power-a", "A", TRN_REAL, AT(power_a), 0, 1, "gaps g before a query have weights g^(A - 1); 1: uniform"},
    {"blank-non-queries", NULL, TRN_FLAG, AT(blank_non_queries), 0, 0, "0, not random ids, between the queries"},
    {"single-query", NULL, TRN_FLAG, AT(single_query), 0, 0, "ask for the value of one key only, behind a mark"},
    {"train-answers-only", NULL, TRN_FLAG, AT(train_answers_only), 0, 0,
     "train on the answers, not on every next id as the public code does"},
    {"noise-vocab", "N", TRN_INTEGER, AT(noise_vocab), 0, 1 << 20, "ids that are noise"},
    {"noise-fraction", "X", TRN_REAL, AT(noise_fraction), 0, 0.99, "share of noise"},
    {"key-motif", "N", TRN_INTEGER, AT(key_motif), 1, 64, "most ids of a key"},
    {"value-motif", "N", TRN_INTEGER, AT(value_motif), 1, 64, "most ids of a value"},
    {"hops", "P,P..", TRN_STRING, AT(hops), 0, 0, "hops of an example; of several numbers each example takes one"},
    {"train-every-letter", NULL, TRN_FLAG, AT(train_every_letter), 0, 0,
     "train on the answer at every letter from which there are so many hops"},
    {"modulus", "N", TRN_INTEGER, AT(modulus), 2, 1 << 16, "values are 0 .. N - 1"},
    {"operations", "L", TRN_INTEGER, AT(operations), 1, 1 << 10, "of the longest expression"},
    {"copies", "N", TRN_INTEGER, AT(copies), 1, 1 << 18, "tokens to copy"},
};
#undef AT

// ------------------------------------------------------------------------------------------------------------ options

static const task_option *find_option(const char *name) {
    for (size_t i = 0; i < sizeof options_of_tasks / sizeof *options_of_tasks; i++)
        if (strcmp(options_of_tasks[i].name, name) == 0)
            return &options_of_tasks[i];
    return NULL;
}

static eng_status set_default(const task_option *option, const char *value, void *target, eng_error *error) {
    switch (option->kind) {
    case TRN_INTEGER:
        return trn_parse_integer(option->name, value, target, error);
    case TRN_REAL:
        return trn_parse_real(option->name, value, target, error);
    case TRN_STRING:
        *(const char **)target = value;
        return ENG_OK;
    default:
        return ENG_OK;
    }
}

static eng_status check_range(const task_option *option, const void *target, eng_error *error) {
    double value = option->kind == TRN_INTEGER ? (double)*(const int64_t *)target : 0;
    if (option->kind == TRN_REAL)
        value = *(const double *)target;
    if (!(value >= option->least && value <= option->most))
        return eng_fail(error, ENG_INVALID, "--%s: %.16g is not in %.16g..%.16g", option->name, value, option->least,
                        option->most);
    return ENG_OK;
}

typedef struct task_command {
    const trn_task *task;
    trn_task_settings settings;
    const char *out;
    trn_option option[FIRST_OPTIONS + TRN_TASK_MAX_OPTIONS];
    char help[TRN_TASK_MAX_OPTIONS][128];
    int options;
} task_command;

static eng_status declare_options(task_command *c, eng_error *error) {
    c->settings = (trn_task_settings){.seed = 1, .levels = 1};
    c->option[0] = (trn_option){"out", "DIR", TRN_STRING, &c->out, "folder for the shards, made if it is not there"};
    c->option[1] = (trn_option){"seed", "N", TRN_INTEGER, &c->settings.seed, "of every draw (default 1)"};
    c->options = FIRST_OPTIONS;
    eng_status status = ENG_OK;
    for (int i = 0; status == ENG_OK && i < TRN_TASK_MAX_OPTIONS && c->task->option[i].option; i++) {
        const task_option *row = find_option(c->task->option[i].option);
        const char *value = c->task->option[i].value;
        void *target = (char *)&c->settings + row->offset;
        status = set_default(row, value, target, error);
        snprintf(c->help[i], sizeof c->help[i], value ? "%s (default %s)" : "%s", row->help, value);
        c->option[c->options++] = (trn_option){row->name, row->value_name, row->kind, target, c->help[i]};
    }
    return status;
}

static eng_status check_options(task_command *c, eng_error *error) {
    if (!c->out)
        return eng_fail(error, ENG_INVALID, "--out is needed");
    if (c->settings.seed < 0)
        return eng_fail(error, ENG_INVALID, "--seed: negative");
    eng_status status = ENG_OK;
    for (int i = 0; status == ENG_OK && i < TRN_TASK_MAX_OPTIONS && c->task->option[i].option; i++) {
        const task_option *row = find_option(c->task->option[i].option);
        if (row->kind == TRN_INTEGER || row->kind == TRN_REAL)
            status = check_range(row, (const char *)&c->settings + row->offset, error);
    }
    return status == ENG_OK ? c->task->check(&c->settings, error) : status;
}

// -------------------------------------------------------------------------------------------------------------- parts

typedef struct writing {
    const task_command *command;
    trn_task_example example;
    uint64_t *seen;    // hashes of the training examples, ascending once they are all there
    uint64_t drawn;    // examples of training that are drawn
    trn_floors floors; // of the part
    int32_t longest;
    trn_progress progress;
} writing;

static uint64_t hash_of(const trn_task_example *example) {
    return eng_hash_bytes((const char *)example->id, sizeof *example->id * (size_t)example->length);
}

static int ascending(const void *left, const void *right) {
    uint64_t a = *(const uint64_t *)left, b = *(const uint64_t *)right;
    return (a > b) - (a < b);
}

static bool was_seen(const writing *w, uint64_t hash) {
    return bsearch(&hash, w->seen, (size_t)w->drawn, sizeof hash, ascending) != NULL;
}

// part 0 is training, part 1 + i validation at level i.
static eng_status draw_example(writing *w, int part, int64_t number, uint64_t *hash, eng_error *error) {
    const trn_task_settings *s = &w->command->settings;
    int64_t level = s->level[part == 0 ? number % s->levels : part - 1];
    for (uint64_t attempt = 0; attempt < MAX_TRIES; attempt++) {
        trn_draw draw = trn_draw_begin((uint64_t)s->seed, (uint64_t)part << 56 | attempt << 40 | (uint64_t)number);
        w->command->task->generate(s, level, part == 0, &draw, &w->example);
        *hash = hash_of(&w->example);
        if (part == 0 || !was_seen(w, *hash))
            return ENG_OK;
    }
    return eng_fail(error, ENG_INVALID, "--examples: so many that none is left to validate with");
}

// Of examples that are scored.
static void try_floors(writing *w) {
    const trn_task *task = w->command->task;
    trn_floors_count(&w->floors, w->example.target, w->example.length);
    if (task->floors)
        task->floors(&w->command->settings, &w->example, &w->floors);
}

static eng_status write_floors(writing *w, const char *name, eng_error *error) {
    trn_floors_end(&w->floors);
    for (int i = 0; i < w->floors.rows; i++)
        printf("  right without the work: %6.2f %%  %s\n", 100 * w->floors.row[i].right, w->floors.row[i].name);
    return trn_floors_write(&w->floors, name, error);
}

static eng_status write_examples(writing *w, int part, const char *name, eng_error *error) {
    static const uint8_t no_tokenizer[TRN_TOKENIZER_DIGEST] = {0};
    const trn_task_settings *s = &w->command->settings;
    trn_shard_writer *writer = NULL;
    uint64_t ids = 0, answers = 0, hash = 0;
    int64_t count = part == 0 ? s->examples : s->valid_examples;
    eng_status status = trn_shard_writer_create(name, no_tokenizer, (int32_t)s->vocab, shard_limit, &writer, error);
    for (int64_t i = 0; status == ENG_OK && i < count; i++) {
        const trn_task_example *example = &w->example;
        status = draw_example(w, part, i, &hash, error);
        if (status != ENG_OK)
            break;
        status =
            trn_shard_writer_add_example(writer, example->id, example->target, (uint32_t)example->length, hash, error);
        if (part == 0)
            w->seen[w->drawn++] = hash;
        else
            try_floors(w);
        for (int32_t t = 0; t < example->length; t++)
            answers += example->target[t] >= 0;
        if (example->length > w->longest)
            w->longest = example->length;
        trn_progress_part(&w->progress, (uint64_t)i, (uint64_t)count, "drawing");
    }
    if (status == ENG_OK)
        status = trn_shard_writer_finish(writer, NULL, NULL, &ids, error);
    trn_shard_writer_free(writer);
    trn_progress_end(&w->progress);
    if (status == ENG_OK)
        printf("%s: %lld examples, %llu ids, %llu targets\n", name, (long long)count, (unsigned long long)ids,
               (unsigned long long)answers);
    return status == ENG_OK && part > 0 ? write_floors(w, name, error) : status;
}

static eng_status write_part(writing *w, int part, eng_error *error) {
    const trn_task_settings *s = &w->command->settings;
    char file[48] = "train";
    if (part > 0 && s->level[part - 1] > 0)
        snprintf(file, sizeof file, "valid-%lld", (long long)s->level[part - 1]);
    else if (part > 0)
        snprintf(file, sizeof file, "valid");
    char *name = eng_join_path(w->command->out, file);
    eng_status status = name ? trn_floors_create((int32_t)s->vocab, &w->floors, error)
                             : eng_fail(error, ENG_NO_MEMORY, "out of memory for a path");
    if (status == ENG_OK)
        status = write_examples(w, part, name, error);
    trn_floors_free(&w->floors);
    free(name);
    return status;
}

static eng_status write_parts(const task_command *c, eng_error *error) {
    writing w = {.command = c, .seen = malloc(sizeof *w.seen * (size_t)c->settings.examples)};
    if (!w.seen)
        return eng_fail(error, ENG_NO_MEMORY, "--examples: out of memory for so many");
    trn_progress_begin(&w.progress);
    eng_status status = trn_task_example_create(c->task, &c->settings, &w.example, error);
    if (status == ENG_OK)
        status = eng_make_folder(c->out, NULL, error);
    for (int part = 0; status == ENG_OK && part <= c->settings.levels; part++) {
        status = write_part(&w, part, error);
        if (part == 0)
            qsort(w.seen, (size_t)w.drawn, sizeof *w.seen, ascending);
    }
    if (status == ENG_OK)
        printf("model.vocab_size = %lld, data.context = %d; accuracy: %s\n", (long long)c->settings.vocab, w.longest,
               c->task->metric);
    trn_task_example_free(&w.example);
    free(w.seen);
    return status;
}

// ------------------------------------------------------------------------------------------------------------ command

static void print_tasks(FILE *stream) {
    fprintf(stream, "usage: mesa-trainer task NAME --out DIR [options]\n"
                    "Writes shards of examples: DIR/train, and DIR/valid of other examples.\n\ntasks:\n");
    for (int i = 0; trn_task_at(i); i++)
        fprintf(stream, "  %s\n", trn_task_at(i)->name);
    fprintf(stream, "\nmesa-trainer task NAME --help tells more.\n");
}

static eng_status run_task(task_command *c, int argc, char **argv, bool *helped, eng_error *error) {
    char usage[96], summary[640];
    int positional = 0;
    eng_status status = declare_options(c, error);
    snprintf(usage, sizeof usage, "task %s --out DIR [options]", c->task->name);
    snprintf(summary, sizeof summary, "%s\nAccuracy: %s.", c->task->summary, c->task->metric);
    const trn_command_line line = {usage, summary, c->option, c->options, 0, 0};
    if (status == ENG_OK)
        status = trn_options_parse(&line, argc, argv, NULL, &positional, helped, error);
    if (status != ENG_OK || *helped)
        return status;
    status = check_options(c, error);
    return status == ENG_OK ? write_parts(c, error) : status;
}

int trn_command_task(int argc, char **argv) {
    bool helped = false;
    eng_error error = {0};
    task_command command = {.task = argc > 1 ? trn_task_find(argv[1]) : NULL};
    if (argc > 1 && strcmp(argv[1], "--help") == 0) {
        print_tasks(stdout);
        return TRN_EXIT_OK;
    }
    if (!command.task) {
        fprintf(stderr, "mesa-trainer task: %s%.40s\n", argc > 1 ? "no task " : "which?", argc > 1 ? argv[1] : "");
        print_tasks(stderr);
        return TRN_EXIT_USAGE;
    }
    eng_status status = run_task(&command, argc - 1, argv + 1, &helped, &error);
    return trn_command_end(argv[0], status, &error);
}
