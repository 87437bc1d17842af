// SPDX-License-Identifier: Apache-2.0
// mesa-trainer logits DIR --tokens IDS --out FILE: logits of given ids, and with --grads the loss and every gradient.
//
// IDS is 1,2,3 or @FILE with decimal ids separated by commas or white space. No tokenizer is needed. The output is one
// safetensors file: `logits` (ids, vocab), and with --grads `loss` [1] and `grad.NAME`. With --lines each line of FILE
// is a sequence of its own: `logits.0`, `logits.1` and so on, which spares loading the model for each. With --at N,N
// the logits after so many ids alone, and `state.N`, the session's slot as it lies in memory (float32).
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/files.h"
#include "trainer/commands.h"
#include "trainer/options.h"
#include "trainer/probe.h"
#include "trainer/runner.h"

enum { ID_FILE_LIMIT = 64 << 20 };

typedef struct logits_options {
    const char *tokens, *out, *device, *cg_mode, *at, *state_storage;
    int64_t split, cg_steps;
    double cg_tolerance;
    bool gradients, lines;
} logits_options;

// Decimal ids separated by commas or white space. *ids is new memory.
static eng_status parse_ids(const char *text, const char *origin, int32_t limit, int32_t **ids, int32_t *count,
                            eng_error *error) {
    size_t length = strlen(text), used = 0;
    int32_t *list = malloc(sizeof *list * (length / 2 + 1));
    if (!list)
        return eng_fail(error, ENG_NO_MEMORY, "%s: out of memory", origin);
    for (const char *p = text; *p;) {
        if (isspace((unsigned char)*p) || *p == ',') {
            p++;
            continue;
        }
        char *end = NULL;
        long value = isdigit((unsigned char)*p) ? strtol(p, &end, 10) : -1;
        if (value < 0 || value >= limit || (*end && !isspace((unsigned char)*end) && *end != ',')) {
            free(list);
            return eng_fail(error, ENG_INVALID, "%s: byte %zu: not an id below %d", origin, (size_t)(p - text), limit);
        }
        list[used++] = (int32_t)value;
        p = end;
    }
    if (used == 0 || used > INT32_MAX) {
        free(list);
        return eng_fail(error, ENG_INVALID, "%s: no ids", origin);
    }
    *ids = list;
    *count = (int32_t)used;
    return ENG_OK;
}

static eng_status read_ids(const char *tokens, int32_t limit, int32_t **ids, int32_t *count, eng_error *error) {
    if (tokens[0] != '@')
        return parse_ids(tokens, "--tokens", limit, ids, count, error);
    char *text = NULL;
    size_t length = 0;
    eng_status status = eng_read_file(tokens + 1, ID_FILE_LIMIT, &text, &length, error);
    if (status != ENG_OK)
        return status;
    status = strlen(text) == length ? parse_ids(text, tokens + 1, limit, ids, count, error)
                                    : eng_fail(error, ENG_FORMAT, "%s: a NUL byte at %zu", tokens + 1, strlen(text));
    free(text);
    return status;
}

static eng_status write_output(const char *path, const trn_probe *probe, const float *logits, int32_t count,
                               const float *loss, eng_error *error) {
    const eng_model *model = probe->model;
    size_t sources = loss ? 2 + (size_t)model->tensors : 1;
    eng_st_source *source = calloc(sources, sizeof *source);
    char(*name)[ENG_NAME_SIZE + 8] = calloc(sources, sizeof *name);
    eng_status status = source && name ? ENG_OK : eng_fail(error, ENG_NO_MEMORY, "out of memory for %s", path);
    if (status == ENG_OK) {
        source[0] = (eng_st_source){
            .name = "logits", .dtype = ENG_F32, .ndim = 2, .shape = {count, model->config.vocab_size}, .data = logits};
        if (loss)
            source[1] = (eng_st_source){.name = "loss", .dtype = ENG_F32, .ndim = 1, .shape = {1}, .data = loss};
        for (size_t i = 2; i < sources; i++) {
            const eng_tensor *tensor = &model->tensor[i - 2];
            snprintf(name[i], sizeof name[i], "grad.%s", tensor->name);
            source[i] = (eng_st_source){.name = name[i],
                                        .dtype = ENG_F32,
                                        .ndim = tensor->ndim,
                                        .data = trn_probe_gradient(probe, (int32_t)i - 2)};
            memcpy(source[i].shape, tensor->shape, sizeof tensor->shape);
        }
        status = eng_st_write(path, source, sources, NULL, error);
    }
    free(source);
    free(name);
    return status;
}

static eng_status compute(trn_probe *probe, const logits_options *o, eng_error *error) {
    int32_t *ids = NULL, count = 0;
    float *logits = NULL;
    kern_solve_mode mode = KERN_SOLVE_TOLERANCE;
    eng_status status = trn_parse_cg_mode(o->cg_mode, &mode, error);
    if (status == ENG_OK)
        status = read_ids(o->tokens, probe->model->config.vocab_size, &ids, &count, error);
    if (status != ENG_OK)
        return status;
    kern_solver solver = {.mode = mode, .max_steps = (int32_t)o->cg_steps, .tolerance = (float)o->cg_tolerance};
    int32_t split = o->split < 0 ? count : (int32_t)o->split;
    double loss = 0;
    float stored_loss = 0;
    if (o->split > count)
        status = eng_fail(error, ENG_INVALID, "--split: more than the %d ids given", count);
    logits = malloc(sizeof *logits * (size_t)count * (size_t)probe->model->config.vocab_size);
    if (status == ENG_OK && !logits)
        status = eng_fail(error, ENG_NO_MEMORY, "out of memory for the logits of %d ids", count);
    if (status == ENG_OK)
        status = trn_probe_logits(probe, ids, count, split, solver, logits, error);
    if (status == ENG_OK && o->gradients) {
        status = trn_probe_gradients(probe, ids, count, solver, &loss, error);
        stored_loss = (float)loss;
    }
    if (status == ENG_OK)
        status = write_output(o->out, probe, logits, count, o->gradients ? &stored_loss : NULL, error);
    if (status == ENG_OK && o->gradients)
        printf("%s: %d ids, loss %.9g\n", o->out, count, loss);
    else if (status == ENG_OK)
        printf("%s: %d ids\n", o->out, count);
    free(logits);
    free(ids);
    return status;
}

typedef struct places {
    trn_probe_look *look;
    eng_st_source *source; // logits (n, vocab), then the states
    char (*name)[32];
    float *logits;
    int32_t n;
} places;

static void free_places(places *all) {
    for (int32_t i = 0; all->look && i < all->n; i++)
        free(all->look[i].state);
    free(all->look);
    free(all->source);
    free(all->name);
    free(all->logits);
}

// From ascending numbers of ids, each within `count`; inside the prompt only where chunks end.
static eng_status make_places(const trn_probe *probe, const int32_t *after, int32_t n, int32_t split, int32_t count,
                              places *all, eng_error *error) {
    const eng_model *model = probe->model;
    const size_t vocabulary = (size_t)model->config.vocab_size;
    const int32_t chunk = kern_device_describe(probe->device)->chunk;
    all->n = n;
    all->look = calloc((size_t)n, sizeof *all->look);
    all->source = calloc((size_t)n + 1, sizeof *all->source);
    all->name = calloc((size_t)n, sizeof *all->name);
    all->logits = calloc((size_t)n * vocabulary, sizeof *all->logits);
    if (!all->look || !all->source || !all->name || !all->logits)
        return eng_fail(error, ENG_NO_MEMORY, "--at: out of memory");
    all->source[0] = (eng_st_source){
        .name = "logits", .dtype = ENG_F32, .ndim = 2, .shape = {n, model->config.vocab_size}, .data = all->logits};
    for (int32_t i = 0; i < n; i++) {
        if (after[i] > count || after[i] <= (i ? after[i - 1] : 0))
            return eng_fail(error, ENG_INVALID, "--at: %d: not an ascending number of ids up to the %d given", after[i],
                            count);
        if (after[i] < split && after[i] % chunk != 0)
            return eng_fail(error, ENG_INVALID, "--at: %d: inside the prompt a state is seen every %d ids", after[i],
                            chunk);
        all->look[i] = (trn_probe_look){after[i], all->logits + (size_t)i * vocabulary, malloc(model->state_bytes)};
        if (!all->look[i].state)
            return eng_fail(error, ENG_NO_MEMORY, "--at: out of memory for a state");
        snprintf(all->name[i], sizeof all->name[i], "state.%d", after[i]);
        all->source[i + 1] = (eng_st_source){.name = all->name[i],
                                             .dtype = ENG_F32,
                                             .ndim = 1,
                                             .shape = {(int64_t)(model->state_bytes / sizeof(float))},
                                             .data = all->look[i].state};
    }
    return ENG_OK;
}

static eng_status compute_places(trn_probe *probe, const logits_options *o, eng_error *error) {
    int32_t *ids = NULL, *after = NULL, count = 0, n = 0;
    places all = {0};
    kern_solve_mode mode = KERN_SOLVE_TOLERANCE;
    eng_status status = trn_parse_cg_mode(o->cg_mode, &mode, error);
    if (status == ENG_OK)
        status = parse_ids(o->at, "--at", INT32_MAX, &after, &n, error);
    if (status == ENG_OK)
        status = read_ids(o->tokens, probe->model->config.vocab_size, &ids, &count, error);
    const int32_t split = o->split < 0 ? count : (int32_t)o->split;
    if (status == ENG_OK)
        status = make_places(probe, after, n, split, count, &all, error);
    const kern_solver solver = {.mode = mode, .max_steps = (int32_t)o->cg_steps, .tolerance = (float)o->cg_tolerance};
    if (status == ENG_OK)
        status = trn_probe_looks(probe, ids, split, solver, all.look, n, error);
    if (status == ENG_OK)
        status = eng_st_write(o->out, all.source, (size_t)n + 1, NULL, error);
    if (status == ENG_OK)
        printf("%s: after %d ids at %d places\n", o->out, after[n - 1], n);
    free_places(&all);
    free(after);
    free(ids);
    return status;
}

typedef struct sequences {
    float **logits; // (ids, vocab) each
    eng_st_source *source;
    char (*name)[32];
    size_t count;
} sequences;

static void free_sequences(sequences *all) {
    for (size_t i = 0; i < all->count; i++)
        free(all->logits[i]);
    free(all->logits);
    free(all->source);
    free(all->name);
}

// The logits of one line of ids. text ends in NUL; where: "FILE: line 7".
static eng_status add_sequence(trn_probe *probe, const char *text, const char *where, kern_solver solver,
                               sequences *all, eng_error *error) {
    const int32_t vocabulary = probe->model->config.vocab_size;
    int32_t *ids = NULL, count = 0;
    eng_status status = parse_ids(text, where, vocabulary, &ids, &count, error);
    float *logits = status == ENG_OK ? malloc(sizeof *logits * (size_t)count * (size_t)vocabulary) : NULL;

    if (status == ENG_OK && !logits)
        status = eng_fail(error, ENG_NO_MEMORY, "%s: out of memory for the logits of %d ids", where, count);
    if (status == ENG_OK)
        status = trn_probe_logits(probe, ids, count, count, solver, logits, error);
    free(ids);
    if (status != ENG_OK) {
        free(logits);
        return status;
    }
    const size_t i = all->count++;
    all->logits[i] = logits;
    snprintf(all->name[i], sizeof all->name[i], "logits.%zu", i);
    all->source[i] = (eng_st_source){
        .name = all->name[i], .dtype = ENG_F32, .ndim = 2, .shape = {count, vocabulary}, .data = logits};
    return ENG_OK;
}

static eng_status compute_lines(trn_probe *probe, const logits_options *o, eng_error *error) {
    char *text = NULL, *rest = NULL, where[300];
    size_t length = 0, lines = 0;
    sequences all = {0};
    kern_solve_mode mode = KERN_SOLVE_TOLERANCE;
    eng_status status = trn_parse_cg_mode(o->cg_mode, &mode, error);
    if (status == ENG_OK)
        status = eng_read_file(o->tokens + 1, ID_FILE_LIMIT, &text, &length, error);
    if (status != ENG_OK)
        return status;
    const kern_solver solver = {.mode = mode, .max_steps = (int32_t)o->cg_steps, .tolerance = (float)o->cg_tolerance};
    for (size_t i = 0; i < length; i++)
        lines += text[i] == '\n';
    all.logits = calloc(lines + 1, sizeof *all.logits);
    all.source = calloc(lines + 1, sizeof *all.source);
    all.name = calloc(lines + 1, sizeof *all.name);
    if (strlen(text) != length)
        status = eng_fail(error, ENG_FORMAT, "%s: a NUL byte at %zu", o->tokens + 1, strlen(text));
    else if (!all.logits || !all.source || !all.name)
        status = eng_fail(error, ENG_NO_MEMORY, "%s: out of memory for %zu lines", o->tokens + 1, lines);
    for (char *line = strtok_r(text, "\n", &rest); line && status == ENG_OK; line = strtok_r(NULL, "\n", &rest)) {
        snprintf(where, sizeof where, "%.200s: sequence %zu", o->tokens + 1, all.count);
        status = add_sequence(probe, line, where, solver, &all, error);
    }
    if (status == ENG_OK && all.count == 0)
        status = eng_fail(error, ENG_INVALID, "%s: no ids", o->tokens + 1);
    if (status == ENG_OK)
        status = eng_st_write(o->out, all.source, all.count, NULL, error);
    if (status == ENG_OK)
        printf("%s: %zu sequences\n", o->out, all.count);
    free_sequences(&all);
    free(text);
    return status;
}

static eng_status check_options(const logits_options *o, eng_error *error) {
    if (!o->tokens || !o->out)
        return eng_fail(error, ENG_INVALID, "--tokens and --out are needed");
    if (o->lines && (o->tokens[0] != '@' || o->gradients || o->split >= 0))
        return eng_fail(error, ENG_INVALID, "--lines: only with --tokens @FILE, and without --grads and --split");
    if (o->at && (o->lines || o->gradients))
        return eng_fail(error, ENG_INVALID, "--at: without --grads and --lines");
    if (!(o->cg_tolerance >= 0 && o->cg_tolerance <= 1))
        return eng_fail(error, ENG_INVALID, "--cg-tolerance: not in 0..1");
    if (!(o->cg_steps >= 0 && o->cg_steps <= 256))
        return eng_fail(error, ENG_INVALID, "--cg-steps: not in 0..256");
    return ENG_OK;
}

int trn_command_logits(int argc, char **argv) {
    logits_options o = {.device = "cpu", .cg_mode = "tolerance", .split = -1, .cg_steps = 30, .cg_tolerance = 1e-4};
    const trn_option options[] = {
        {"tokens", "IDS", TRN_STRING, &o.tokens, "1,2,3 or @FILE of decimal ids"},
        {"out", "FILE", TRN_STRING, &o.out, "the .safetensors file to write"},
        {"grads", NULL, TRN_FLAG, &o.gradients, "also loss [1] and grad.NAME: mean cross entropy over all ids given"},
        {"split", "N", TRN_INTEGER, &o.split, "the first N ids as prompt, the rest one by one as generated"},
        {"lines", NULL, TRN_FLAG, &o.lines, "each line of @FILE is a sequence of its own: logits.0, logits.1 ..."},
        {"at", "N,N..", TRN_STRING, &o.at, "only the logits after so many ids, and the states there: state.N"},
        {"device", "NAME", TRN_STRING, &o.device, "cpu, cpu:16, cuda:0 (default cpu)"},
        {"state-storage", "TYPE", TRN_STRING, &o.state_storage, "of states: float32 (default) or bf16, on a GPU"},
        {"cg-mode", "MODE", TRN_STRING, &o.cg_mode, "tolerance (default), steps, exact or fixed"},
        {"cg-steps", "N", TRN_INTEGER, &o.cg_steps, "bound of steps, or their number (default 30)"},
        {"cg-tolerance", "X", TRN_REAL, &o.cg_tolerance, "relative residual (default 1e-4)"},
    };
    const trn_command_line line = {"logits DIR --tokens IDS --out FILE [options]",
                                   "Writes the logits of given ids; needs no tokenizer.",
                                   options,
                                   sizeof options / sizeof *options,
                                   1,
                                   1};
    const char *dir = NULL;
    bool helped = false;
    int positional = 0;
    eng_error error = {0};
    trn_probe probe = {0};
    kern_storage storage = KERN_STORE_F32;
    eng_status status = trn_options_parse(&line, argc, argv, &dir, &positional, &helped, &error);
    if (helped)
        return TRN_EXIT_OK;
    if (status == ENG_OK)
        status = check_options(&o, &error);
    if (status == ENG_OK)
        status = trn_parse_storage(o.state_storage, &storage, &error);
    if (status == ENG_OK)
        status = trn_probe_open(dir, o.device, true, storage, &probe, &error);
    if (status == ENG_OK)
        status = o.lines ? compute_lines(&probe, &o, &error)
                 : o.at  ? compute_places(&probe, &o, &error)
                         : compute(&probe, &o, &error);
    trn_probe_close(&probe);
    return trn_command_end("logits", status, &error);
}
