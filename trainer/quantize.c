// SPDX-License-Identifier: Apache-2.0
// mesa-trainer quantize DIR --out DIR: a checkpoint with its matrices in int8 or 4-bit blocks, and what that costs.
//
// The cost is told for every kind of matrix as the norm of what was lost over the norm of what was there, and with
// --data as the loss of both checkpoints on the same windows, each as the server runs it.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/files.h"
#include "trainer/commands.h"
#include "trainer/evaluation.h"
#include "trainer/probe.h"

typedef struct quantize_options {
    const char *dir, *out;
    int64_t bits;
    trn_evaluation_options evaluation;
} quantize_options;

// -------------------------------------------------------------------------------------------------------------- errors

// A tensor's name without the layer's number: "model.layers.3.mlp.up_proj.weight" is "mlp.up_proj.weight".
static const char *kind_of(const char *name) {
    const char *digits = strpbrk(name, "0123456789");
    if (!digits || digits == name || digits[-1] != '.')
        return name;
    const char *rest = digits + strspn(digits, "0123456789");
    return *rest == '.' ? rest + 1 : name;
}

static void print_row(const char *kind, int64_t tensors, int64_t values, const eng_rounding *sum) {
    printf("%-32s %7lld %12lld   %.5f\n", kind, (long long)tensors, (long long)values,
           sum->size > 0 ? sqrt(sum->lost / sum->size) : 0);
}

// Kinds in the order in which they first come.
static void print_errors(const eng_model *model, const eng_rounding *rounding) {
    int64_t all_tensors = 0, all_values = 0;
    eng_rounding all = {0};
    printf("%-32s %7s %12s   relative error\n", "matrix", "tensors", "values");
    for (int32_t i = 0; i < model->tensors; i++) {
        const char *kind = kind_of(model->tensor[i].name);
        int64_t tensors = 0, values = 0;
        eng_rounding sum = {0};
        bool first = rounding[i].size > 0;
        for (int32_t j = 0; j < model->tensors && first; j++) {
            if (rounding[j].size == 0 || strcmp(kind_of(model->tensor[j].name), kind) != 0)
                continue;
            first = j >= i;
            tensors++;
            values += model->tensor[j].count;
            sum.lost += rounding[j].lost;
            sum.size += rounding[j].size;
        }
        if (!first)
            continue;
        print_row(kind, tensors, values, &sum);
        all_tensors += tensors;
        all_values += values;
        all.lost += sum.lost;
        all.size += sum.size;
    }
    print_row("all", all_tensors, all_values, &all);
}

// ---------------------------------------------------------------------------------------------------------------- loss

static eng_status loss_of(const char *dir, const trn_evaluation_options *options, double *loss, eng_error *error) {
    trn_evaluation e = {0};
    trn_scores scores;
    eng_status status = trn_evaluation_open(dir, options, &e, error);
    if (status == ENG_OK)
        status = trn_evaluation_score(&e, trn_model_solver(e.model), &scores, error);
    if (status == ENG_OK)
        *loss = trn_mean_loss(&scores);
    trn_evaluation_close(&e);
    return status;
}

// ------------------------------------------------------------------------------------------------------------- command

static eng_status write_quantized(const quantize_options *o, const trn_probe *probe, eng_error *error) {
    eng_rounding *rounding = calloc((size_t)probe->model->tensors, sizeof *rounding);
    char *tokenizer = eng_join_path(o->dir, "tokenizer.json");
    eng_status status = rounding && tokenizer ? ENG_OK : eng_fail(error, ENG_NO_MEMORY, "out of memory");
    if (status == ENG_OK)
        status = eng_checkpoint_quantize(o->out, probe->weights, o->bits == 8 ? KERN_Q8 : KERN_Q4,
                                         access(tokenizer, R_OK) == 0 ? o->dir : NULL, rounding, error);
    if (status == ENG_OK)
        print_errors(probe->model, rounding);
    free(tokenizer);
    free(rounding);
    return status;
}

static eng_status quantize(const quantize_options *o, eng_error *error) {
    const bool scores = o->evaluation.data.count > 0;
    double before = 0, after = 0;
    trn_probe probe = {0};
    if (o->bits != 8 && o->bits != 4)
        return eng_fail(error, ENG_INVALID, "--bits: 8 or 4");
    if (o->evaluation.windows < 0)
        return eng_fail(error, ENG_INVALID, "--windows: negative");
    eng_status status = trn_check_target(o->dir, o->out, error);
    if (status == ENG_OK && scores)
        status = loss_of(o->dir, &o->evaluation, &before, error);
    if (status == ENG_OK)
        status = trn_probe_open(o->dir, "cpu", true, KERN_STORE_F32, &probe, error);
    if (status == ENG_OK)
        status = write_quantized(o, &probe, error);
    trn_probe_close(&probe);
    if (status == ENG_OK && scores)
        status = loss_of(o->out, &o->evaluation, &after, error);
    if (status == ENG_OK && scores)
        printf("loss %.5f before, %.5f after: %+.5f nats a token\n", before, after, after - before);
    return status;
}

int trn_command_quantize(int argc, char **argv) {
    quantize_options o = {.bits = 8, .evaluation = {.device = "cpu", .context = -1, .batch_tokens = 4096}};
    const trn_option options[] = {
        {"out", "DIR", TRN_STRING, &o.out, "folder to write; a checkpoint that stands there is replaced"},
        {"bits", "N", TRN_INTEGER, &o.bits, "8 or 4 (default 8); embeddings and head are int8 in either case"},
        {"data", "NAME", TRN_STRINGS, &o.evaluation.data,
         "token shards on which both checkpoints are scored; may be repeated"},
        {"windows", "N", TRN_INTEGER, &o.evaluation.windows,
         "only the first window of N documents (default 0: everything)"},
    };
    const trn_command_line line = {
        "quantize DIR --out DIR [--bits 8|4] [--data NAME]",
        "Writes a checkpoint whose linear maps, embeddings and head are int8 or 4 bits in blocks of 32, for CPUs, and\n"
        "tells the error by kind of matrix. Norms, gates and convolutions stay as they are.",
        options,
        sizeof options / sizeof *options,
        1,
        1};
    bool helped = false;
    int positional = 0;
    eng_error error = {0};
    eng_status status = trn_options_parse(&line, argc, argv, &o.dir, &positional, &helped, &error);
    if (helped)
        return TRN_EXIT_OK;
    if (status == ENG_OK)
        status = quantize(&o, &error);
    return trn_command_end("quantize", status, &error);
}
