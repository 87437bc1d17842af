// SPDX-License-Identifier: Apache-2.0
// mesa-trainer check DIR: compares a checkpoint with the logits and gradients expected of it, or, with --against, one
// device's gradients with another's (check_devices.c).
//
// The folder holds config.json, model.safetensors, expected.json (prompt_tokens, decode_tokens, losses) and
// expected.safetensors (logits, grad.NAME; with Mesa layers also logits_exact_solve and grad_exact.NAME). Logits are
// computed twice, as one prompt and as prompt
// + generated ids. Mesa layers run in `fixed` against logits and in `exact` against logits_exact_solve and grad_exact;
// grad.NAME differentiates the damped iteration and is never compared for them. Only `logits` must be there. Errors are
// |mine - expected| / |expected|.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/mixer.h"
#include "trainer/check.h"
#include "trainer/commands.h"
#include "trainer/gradient_error.h"
#include "trainer/jsonl.h"
#include "trainer/options.h"
#include "trainer/probe.h"
#include "trainer/progress.h"

// Float32 noise of the expected data times a small factor; states that live long amplify it, hence the second set.
typedef struct tolerances {
    double logits, exact_logits, loss, gradient, small_gradient;
} tolerances;

static const tolerances plain = {1e-5, 1e-5, 1e-5, 1e-4, 1e-3};
static const tolerances long_memory = {3e-5, 5e-5, 1e-5, 1e-3, 1e-3};
static const tolerances narrow = {2e-2, 2e-2, 2e-2, 0, 0}; // weights as stored, products in the device's way
static const double small_norm = 1e-3;                     // a gradient whose norm is below it is mostly rounding

typedef struct check {
    const char *dir;
    trn_probe probe;
    eng_st_file *expected;
    trn_json *json;
    int32_t *ids;
    int32_t prompt, count; // ids: prompt, then generated
    tolerances tolerance;
    bool as_stored, logits_only;
    trn_verdicts verdicts;
} check;

void trn_judge(trn_verdicts *verdicts, const char *what, double error, double tolerance) {
    bool inside = error <= tolerance;
    printf("%-58s %9.2e  (%.0e)%s\n", what, trn_unsigned_nan(error), tolerance, inside ? "" : "  OUTSIDE");
    verdicts->compared++;
    verdicts->outside += !inside;
}

static eng_status read_values(check *c, const char *name, const eng_st_entry *entry, int64_t first, int64_t count,
                              float **out, eng_error *error) {
    if (!entry || first + count > entry->count)
        return eng_fail(error, ENG_FORMAT, "%s: tensor %s: %s", eng_st_path(c->expected), name,
                        entry ? "wrong shape" : "missing");
    float *values = malloc(sizeof *values * (size_t)count);
    if (!values)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for %s", name);
    eng_status status = eng_st_read_f32(c->expected, entry, first, count, values, error);
    if (status != ENG_OK) {
        free(values);
        return status;
    }
    *out = values;
    return ENG_OK;
}

static eng_status read_expected(check *c, const char *name, int64_t count, float **out, eng_error *error) {
    const eng_st_entry *entry = eng_st_find(c->expected, name);
    if (entry && entry->count != count)
        return eng_fail(error, ENG_FORMAT, "%s: tensor %s: wrong shape", eng_st_path(c->expected), name);
    return read_values(c, name, entry, 0, count, out, error);
}

// Whether the folder expects anything under this prefix; what it does not is told, so that nobody takes it for checked.
static bool expects(const check *c, const char *prefix) {
    for (size_t i = 0; i < eng_st_count(c->expected); i++)
        if (strncmp(eng_st_at(c->expected, i)->name, prefix, strlen(prefix)) == 0)
            return true;
    printf("%-58s not in expected.safetensors\n", prefix);
    return false;
}

static eng_status compare_logits(check *c, const char *name, const char *loss_key, kern_solver solver, double tolerance,
                                 eng_error *error) {
    int32_t vocabulary = c->probe.model->config.vocab_size;
    int64_t values = (int64_t)c->count * vocabulary;
    float *expected = NULL, *mine = malloc(sizeof *mine * (size_t)values);
    double expected_loss = 0;
    char label[96];
    eng_status status = mine ? ENG_OK : eng_fail(error, ENG_NO_MEMORY, "out of memory for logits");
    if (status == ENG_OK)
        status = read_expected(c, name, values, &expected, error);
    if (status == ENG_OK)
        status = trn_json_real(c->json, loss_key, &expected_loss, error);
    const int32_t splits[] = {c->count, c->prompt};
    const char *const forms[] = {"one prompt", "prompt + generated"};
    for (int i = 0; i < 2 && status == ENG_OK; i++) {
        status = trn_probe_logits(&c->probe, c->ids, c->count, splits[i], solver, mine, error);
        if (status != ENG_OK)
            break;
        snprintf(label, sizeof label, "%s, %s", name, forms[i]);
        trn_judge(&c->verdicts, label, trn_relative_error(mine, expected, values), tolerance);
        snprintf(label, sizeof label, "%s, %s", loss_key, forms[i]);
        double loss = trn_mean_cross_entropy(mine, c->ids, c->prompt, vocabulary);
        trn_judge(&c->verdicts, label, fabs(loss - expected_loss), c->tolerance.loss);
    }
    free(mine);
    free(expected);
    return status;
}

static const eng_st_entry *find_gradient(const check *c, const char *prefix, const char *tensor) {
    char name[ENG_NAME_SIZE + 16];
    snprintf(name, sizeof name, "%s%s", prefix, tensor);
    return tensor[0] ? eng_st_find(c->expected, name) : NULL;
}

// Gradients are called like the tensors in the file of weights: by a tensor's name, by its other one, or as rows of a
// larger tensor.
static eng_status read_gradient(check *c, const eng_tensor *tensor, const char *prefix, float **out, eng_error *error) {
    int64_t columns = tensor->count / tensor->shape[0];
    const eng_st_entry *entry = find_gradient(c, prefix, tensor->whole);
    if (entry && entry->count == tensor->whole_rows * columns)
        return read_values(c, tensor->whole, entry, tensor->whole_row * columns, tensor->count, out, error);
    entry = find_gradient(c, prefix, tensor->name);
    if (!entry)
        entry = find_gradient(c, prefix, tensor->alias);
    if (entry && entry->count != tensor->count)
        return eng_fail(error, ENG_FORMAT, "%s: gradient of %s: wrong shape", eng_st_path(c->expected), tensor->name);
    return read_values(c, tensor->name, entry, 0, tensor->count, out, error);
}

static eng_status compare_gradient(check *c, int32_t index, const char *prefix, eng_error *error) {
    const eng_tensor *tensor = &c->probe.model->tensor[index];
    char name[ENG_NAME_SIZE + 16];
    float *expected = NULL;
    snprintf(name, sizeof name, "%s%s", prefix, tensor->name);
    eng_status status = read_gradient(c, tensor, prefix, &expected, error);
    if (status != ENG_OK)
        return status;
    double square = 0;
    for (int64_t i = 0; i < tensor->count; i++)
        square += (double)expected[i] * (double)expected[i];
    bool small = sqrt(square) < small_norm;
    trn_judge(&c->verdicts, name, trn_relative_error(trn_probe_gradient(&c->probe, index), expected, tensor->count),
              small ? c->tolerance.small_gradient : c->tolerance.gradient);
    free(expected);
    return ENG_OK;
}

static eng_status compare_gradients(check *c, const char *prefix, const char *loss_key, kern_solver solver,
                                    eng_error *error) {
    double loss = 0, expected_loss = 0;
    eng_status status = trn_json_real(c->json, loss_key, &expected_loss, error);
    if (status == ENG_OK)
        status = trn_probe_gradients(&c->probe, c->ids, c->prompt, solver, &loss, error);
    if (status != ENG_OK)
        return status;
    char label[96];
    snprintf(label, sizeof label, "%s, training plan", loss_key);
    trn_judge(&c->verdicts, label, fabs(loss - expected_loss), c->tolerance.loss);
    for (int32_t i = 0; i < c->probe.model->tensors && status == ENG_OK; i++)
        status = compare_gradient(c, i, prefix, error);
    return status;
}

static eng_status run_comparisons(check *c, eng_error *error) {
    if (!eng_model_has_mesa(c->probe.model)) {
        kern_solver none = {.mode = KERN_SOLVE_EXACT};
        eng_status status = compare_logits(c, "logits", "loss_mean_ce_over_prompt", none, c->tolerance.logits, error);
        if (status == ENG_OK && !c->logits_only && expects(c, "grad."))
            status = compare_gradients(c, "grad.", "loss_mean_ce_over_prompt", none, error);
        return status;
    }
    kern_solver fixed = {.mode = KERN_SOLVE_FIXED, .max_steps = eng_model_training_steps(c->probe.model)};
    kern_solver exact = {.mode = KERN_SOLVE_EXACT};
    eng_status status = compare_logits(c, "logits", "loss_mean_ce_over_prompt", fixed, c->tolerance.logits, error);
    if (status == ENG_OK && expects(c, "logits_exact_solve"))
        status = compare_logits(c, "logits_exact_solve", "loss_exact_solve", exact, c->tolerance.exact_logits, error);
    if (status == ENG_OK && !c->logits_only && expects(c, "grad_exact."))
        status = compare_gradients(c, "grad_exact.", "loss_exact_solve", exact, error);
    return status;
}

static eng_status read_ids(check *c, eng_error *error) {
    int32_t vocabulary = c->probe.model->config.vocab_size, decoded = 0;
    int32_t *generated = NULL;
    eng_status status = trn_json_ids(c->json, "prompt_tokens", vocabulary, &c->ids, &c->prompt, error);
    if (status == ENG_OK)
        status = trn_json_ids(c->json, "decode_tokens", vocabulary, &generated, &decoded, error);
    if (status != ENG_OK)
        return status;
    int32_t *all = realloc(c->ids, sizeof *all * ((size_t)c->prompt + (size_t)decoded + 1));
    if (all) {
        c->ids = all;
        memcpy(all + c->prompt, generated, sizeof *all * (size_t)decoded);
        c->count = c->prompt + decoded;
    }
    free(generated);
    if (c->prompt < 2)
        return eng_fail(error, ENG_FORMAT, "%s: expected.json: prompt_tokens needs two ids", c->dir);
    return all ? ENG_OK : eng_fail(error, ENG_NO_MEMORY, "out of memory for ids");
}

static eng_status open_folder(check *c, const char *device, eng_error *error) {
    char path[4096];
    const char *name = NULL;
    snprintf(path, sizeof path, "%s/expected.json", c->dir);
    eng_status status = trn_json_read(path, &c->json, error);
    snprintf(path, sizeof path, "%s/expected.safetensors", c->dir);
    if (status == ENG_OK)
        status = eng_st_open(path, &c->expected, error);
    if (status == ENG_OK)
        status = trn_json_string(c->json, "name", &name, error);
    if (status == ENG_OK)
        status = trn_probe_open(c->dir, device, !c->as_stored, KERN_STORE_F32, &c->probe, error);
    if (status != ENG_OK)
        return status;
    bool is_long = strstr(name, "_long") != NULL;
    c->tolerance = is_long && eng_model_has_mesa(c->probe.model) ? long_memory : plain;
    if (c->as_stored)
        c->tolerance = narrow;
    return read_ids(c, error);
}

static eng_status check_expected(check *c, const char *device, eng_error *error) {
    eng_status status = open_folder(c, device, error);
    if (status == ENG_OK)
        status = run_comparisons(c, error);
    trn_json_free(c->json);
    eng_st_close(c->expected);
    trn_probe_close(&c->probe);
    free(c->ids);
    return status;
}

static eng_status check_options(const check *c, const trn_against *a, eng_error *error) {
    const bool more = a->data.count > 0 || strcmp(a->precision, "float32") != 0 || a->solver || a->reference_solver ||
                      a->batches != 1 || a->rows != 1 || a->micro_rows != 0 || a->context != 0 || a->seed != 1;
    if (!a->reference)
        return more ? eng_fail(error, ENG_INVALID, "--data and what says how it is read: go with --against") : ENG_OK;
    if (a->data.count == 0)
        return eng_fail(error, ENG_INVALID, "--against: needs --data");
    if (c->as_stored || c->logits_only)
        return eng_fail(error, ENG_INVALID, "--against: compares gradients, of weights in float32");
    if (strcmp(a->precision, "float32") != 0 && strcmp(a->precision, "bf16") != 0)
        return eng_fail(error, ENG_INVALID, "--precision: \"%.20s\" is not float32 or bf16", a->precision);
    if (a->batches < 1 || a->batches > 1 << 20)
        return eng_fail(error, ENG_INVALID, "--batches: not in 1..1048576");
    if (a->rows < 1 || a->rows > 1 << 16 || a->micro_rows < 0)
        return eng_fail(error, ENG_INVALID, "--rows or --micro-rows: out of range");
    if (a->context < 0 || a->context > 1 << 22 || a->seed < 0)
        return eng_fail(error, ENG_INVALID, "--context or --seed: out of range");
    return ENG_OK;
}

int trn_command_check(int argc, char **argv) {
    const char *dir = NULL;
    check c = {0};
    trn_against a = {.device = "cpu", .precision = "float32", .batches = 1, .rows = 1, .seed = 1};
    const trn_option options[] = {
        {"device", "NAME", TRN_STRING, &a.device, "cpu, cpu:16, cuda:0 (default cpu)"},
        {"logits-only", NULL, TRN_FLAG, &c.logits_only, "compare no gradients"},
        {"as-stored", NULL, TRN_FLAG, &c.as_stored, "logits alone, of the weights as the server holds them, to 2e-2"},
        {"against", "NAME", TRN_STRING, &a.reference, "compare gradients of --device with this one's in float32"},
        {"data", "NAME", TRN_STRINGS, &a.data, "token shards of the rows that both read; may be repeated"},
        {"precision", "P", TRN_STRING, &a.precision, "of products on --device: float32 or bf16 (default float32)"},
        {"batches", "N", TRN_INTEGER, &a.batches, "batches that are compared (default 1)"},
        {"rows", "N", TRN_INTEGER, &a.rows, "rows of a batch (default 1)"},
        {"micro-rows", "N", TRN_INTEGER, &a.micro_rows, "of them at once on --device (default all)"},
        {"context", "N", TRN_INTEGER, &a.context, "tokens of a row (default the trained length)"},
        {"seed", "N", TRN_INTEGER, &a.seed, "of the order of the rows (default 1)"},
        {"solver", "S", TRN_STRING, &a.solver, "tolerance:X, steps:N or exact (default tolerance:0.0001)"},
        {"against-solver", "S", TRN_STRING, &a.reference_solver, "of the other device (default the same)"},
    };
    const trn_command_line line = {
        "check DIR [options]",
        "Compares a checkpoint with DIR/expected.json and DIR/expected.safetensors; prints each relative error.\n"
        "With --against and --data it compares gradients of training on two devices, tensor by tensor: norm, relative\n"
        "error over all batches and of the worst one, cosine, and how much of the error is left in the mean of the\n"
        "batches (1: a bias; 1/sqrt(batches): none).\nExit status: 0 all within their tolerances, 1 not, 2 unreadable.",
        options,
        sizeof options / sizeof *options,
        1,
        1};
    bool helped = false;
    int positional = 0;
    eng_error error = {0};
    eng_status status = trn_options_parse(&line, argc, argv, &dir, &positional, &helped, &error);
    if (helped)
        return TRN_EXIT_OK;
    if (status == ENG_OK)
        status = check_options(&c, &a, &error);
    c.dir = dir;
    c.logits_only |= c.as_stored;
    if (status == ENG_OK)
        status = a.reference ? trn_check_against(dir, &a, &c.verdicts, &error) : check_expected(&c, a.device, &error);
    if (status != ENG_OK)
        return trn_command_end("check", status, &error);
    printf("%s: %d compared, %d outside their tolerance\n", dir, c.verdicts.compared, c.verdicts.outside);
    return c.verdicts.outside ? TRN_EXIT_FAILED : TRN_EXIT_OK;
}
