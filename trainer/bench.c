// SPDX-License-Identifier: Apache-2.0
// mesa-trainer bench [DIR | --random 30m]: decode, prefill and training speed as shares of the machine's own limits;
// with --weights and of quantised folders, serving alone; with --sessions, generating alone at several batch sizes
// (bench_decode.c); with --mixers, every mixer at equal width (bench_mixers.c).
//
// Everything is measured in turns, round after round, so that a machine that slows down slows both sides of a share;
// medians are printed. The limit of generating is reading: weights once, the state in and out. It is measured over a
// block far above the caches (memory), and over a block of the size that a token needs (working set). The second is the
// higher one where a cache keeps part of the model; a share of the first alone can pass 1 and then says nothing. The
// limit of prefill and training is the matrix rate.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "trainer/bench.h"
#include "trainer/commands.h"
#include "trainer/options.h"
#include "trainer/profile.h"
#include "trainer/progress.h"

enum { MAX_ROUNDS = 99 };

typedef struct bench_options {
    const char *random, *device, *sessions, *weights, *cg_mode, *state_storage;
    int64_t context, rows, prompt, generated, rounds, cg_steps;
    double cg_tolerance;
    bool mixers, fast, profile;
} bench_options;

typedef enum quantity {
    MEMORY_RATE,
    WORKING_RATE,
    MATRIX_RATE,
    DECODE,
    DECODE_OF_MEMORY,
    DECODE_OF_WORKING,
    PREFILL,
    PREFILL_RATE,
    TRAIN,
    TRAIN_RATE,
    QUANTITIES
} quantity;

typedef struct bench {
    kern_device *device;
    eng_checkpoint *checkpoint; // NULL: a random model
    eng_model *random;
    eng_weights *serving, *training; // training NULL: not measured
    trn_read_probe read;
    trn_matrix_probe matrix;
    trn_serve_bench serve;
    trn_train_bench train;
    double value[QUANTITIES][MAX_ROUNDS], share[QUANTITIES][MAX_ROUNDS];
    double steps[3]; // of decode, prefill, training, in the last round
    int rounds;
} bench;

// ------------------------------------------------------------------------------------------------------------- opening

static eng_status parse_weights(const char *text, kern_dtype *dtype, eng_error *error) {
    *dtype = KERN_BF16;
    if (text && strcmp(text, "q8") == 0)
        *dtype = KERN_Q8;
    else if (text && strcmp(text, "q4") == 0)
        *dtype = KERN_Q4;
    else if (text && strcmp(text, "bf16") != 0)
        return eng_fail(error, ENG_INVALID, "--weights: \"%.20s\" is not bf16, q8 or q4", text);
    return ENG_OK;
}

static eng_status make_random(bench *b, const bench_options *o, kern_storage storage, bool trains, eng_error *error) {
    kern_dtype dtype;
    eng_status status = parse_weights(o->weights, &dtype, error);
    if (status == ENG_OK)
        status = trn_random_model_create(o->random, &b->random, error);
    if (status == ENG_OK)
        eng_model_store_states(b->random, storage);
    if (status == ENG_OK)
        status = eng_weights_init(b->random, b->device, 1, dtype, &b->serving, error);
    if (status == ENG_OK && trains)
        status = eng_weights_init(b->random, b->device, 1, KERN_F32, &b->training, error);
    return status;
}

static eng_status open_model(bench *b, const char *dir, const bench_options *o, eng_error *error) {
    const kern_device_options device = {.name = o->device, .fast = o->fast, .trains = !o->sessions};
    eng_status status = eng_open_device(&device, NULL, 0, &b->device, error);
    if (status != ENG_OK || o->mixers)
        return status;
    kern_storage storage;
    status = trn_parse_storage(o->state_storage, &storage, error);
    if (status == ENG_OK)
        status = trn_check_storage(b->device, storage, error);
    if (status != ENG_OK)
        return status;
    const bool trains = !o->sessions && !o->weights;
    if (!dir)
        return make_random(b, o, storage, trains, error);
    status = eng_checkpoint_open(dir, &b->checkpoint, error);
    if (status == ENG_OK)
        eng_checkpoint_store_states(b->checkpoint, storage);
    if (status == ENG_OK)
        status = eng_weights_load(b->checkpoint, b->device, false, &b->serving, error);
    const bool quantised = b->checkpoint && eng_checkpoint_model(b->checkpoint)->config.quantised;
    if (status == ENG_OK && trains && !quantised)
        status = eng_weights_load(b->checkpoint, b->device, true, &b->training, error);
    return status;
}

static eng_status create_parts(bench *b, const bench_options *o, eng_error *error) {
    eng_status status = trn_read_probe_create(&b->read, error);
    if (status == ENG_OK)
        status = trn_matrix_probe_create(b->device, &b->matrix, error);
    if (status == ENG_OK)
        status = trn_serve_bench_create(b->serving, (int32_t)o->prompt, (int32_t)o->generated, &b->serve, error);
    if (status == ENG_OK && b->training)
        status = trn_train_bench_create(b->training, (int32_t)o->context, (int32_t)o->rows, &b->train, error);
    return status;
}

static void close_bench(bench *b) {
    trn_train_bench_free(&b->train);
    trn_serve_bench_free(&b->serve);
    trn_matrix_probe_free(&b->matrix);
    trn_read_probe_free(&b->read);
    eng_weights_free(b->serving);
    eng_weights_free(b->training);
    eng_model_free(b->random);
    eng_checkpoint_close(b->checkpoint);
    kern_device_close(b->device);
}

// -------------------------------------------------------------------------------------------------------------- rounds

static void set(bench *b, quantity what, int round, double value, double limit) {
    b->value[what][round] = value;
    b->share[what][round] = limit > 0 ? value / limit : 0;
}

// What a generated token touches: weights and state.
static double token_bytes(const bench *b) {
    return (double)b->serving->bytes + (double)b->serving->model->state_bytes;
}

// Limits are measured before and after the model in each round, and the mean of the two is the round's limit.
static eng_status one_round(bench *b, int round, eng_error *error) {
    trn_speed prefill, decode, train = {.seconds = 1};
    double matrix[2], memory[2], working[2], bytes = token_bytes(b);
    memory[0] = trn_read_probe_run(&b->read, 0);
    working[0] = trn_read_probe_run(&b->read, bytes);
    eng_status status = trn_serve_bench_run(&b->serve, &prefill, &decode, error);
    working[1] = trn_read_probe_run(&b->read, bytes);
    memory[1] = trn_read_probe_run(&b->read, 0);
    if (status == ENG_OK)
        status = trn_matrix_probe_run(&b->matrix, &matrix[0], error);
    if (status == ENG_OK && b->training)
        status = trn_train_bench_run(&b->train, &train, error);
    if (status == ENG_OK)
        status = trn_matrix_probe_run(&b->matrix, &matrix[1], error);
    if (status != ENG_OK)
        return status;
    double memory_rate = (memory[0] + memory[1]) / 2, working_rate = (working[0] + working[1]) / 2;
    double matrix_rate = (matrix[0] + matrix[1]) / 2;
    set(b, MEMORY_RATE, round, memory_rate, 0);
    set(b, WORKING_RATE, round, working_rate, 0);
    set(b, MATRIX_RATE, round, matrix_rate, 0);
    set(b, DECODE, round, (double)decode.tokens / decode.seconds, 0);
    set(b, DECODE_OF_MEMORY, round, decode.bytes / decode.seconds, memory_rate);
    set(b, DECODE_OF_WORKING, round, decode.bytes / decode.seconds, working_rate);
    set(b, PREFILL, round, (double)prefill.tokens / prefill.seconds, 0);
    set(b, PREFILL_RATE, round, prefill.operations / prefill.seconds, matrix_rate);
    set(b, TRAIN, round, (double)train.tokens / train.seconds, 0);
    set(b, TRAIN_RATE, round, train.operations / train.seconds, matrix_rate);
    b->steps[0] = decode.solver_steps;
    b->steps[1] = prefill.solver_steps;
    b->steps[2] = train.solver_steps;
    return ENG_OK;
}

static eng_status run_rounds(bench *b, int rounds, eng_error *error) {
    trn_progress progress;
    trn_progress_begin(&progress);
    eng_status status = one_round(b, 0, error); // pages are touched and code is made; not counted
    for (int round = 0; status == ENG_OK && round < rounds; round++) {
        trn_progress_part(&progress, (uint64_t)round, (uint64_t)rounds, "measuring");
        status = one_round(b, round, error);
    }
    trn_progress_end(&progress);
    b->rounds = rounds;
    return status;
}

// ------------------------------------------------------------------------------------------------------------- results

// "0.61 (0.55-0.64)": the median of a share and its range over the rounds.
static const char *share_text(bench *b, quantity what, char text[48]) {
    double least = b->share[what][0], most = least;
    for (int i = 1; i < b->rounds; i++) {
        least = b->share[what][i] < least ? b->share[what][i] : least;
        most = b->share[what][i] > most ? b->share[what][i] : most;
    }
    snprintf(text, 48, "%.2f (%.2f-%.2f)", trn_median(b->share[what], b->rounds), least, most);
    return text;
}

static void print_limits(bench *b) {
    printf("| limit: reading memory, 768 MB | | %.1f GB/s | | |\n",
           1e-9 * trn_median(b->value[MEMORY_RATE], b->rounds));
    printf("| limit: reading %.1f MB again and again, what a token needs | | %.1f GB/s | | |\n", 1e-6 * token_bytes(b),
           1e-9 * trn_median(b->value[WORKING_RATE], b->rounds));
    printf("| limit: float32 product 1024 x 2048 x 2048 by the model's own linear kernel | | %.0f GFLOP/s | | |\n",
           1e-9 * trn_median(b->value[MATRIX_RATE], b->rounds));
}

static void print_results(bench *b, const bench_options *o) {
    const eng_model *model = b->serving->model;
    double mid[QUANTITIES];
    char share[48], other[48];
    for (int i = 0; i < QUANTITIES; i++)
        mid[i] = trn_median(b->value[i], b->rounds);
    printf("%s, %llu parameters, weights %.1f MB, state %.2f MB; %s; medians and ranges of %d rounds\n\n",
           b->random ? "random model" : "checkpoint", (unsigned long long)model->parameters,
           1e-6 * (double)b->serving->bytes, 1e-6 * (double)model->state_bytes,
           kern_device_describe(b->device)->description, b->rounds);
    printf("| what | speed | rate | share of the limit | solver steps |\n|---|---|---|---|---|\n");
    print_limits(b);
    printf("| generating, one stream | %.1f tokens/s | %.1f GB/s of weights and state | %s of the working set, %s of "
           "memory | %.1f |\n",
           mid[DECODE], 1e-9 * mid[DECODE_OF_WORKING], share_text(b, DECODE_OF_WORKING, share),
           share_text(b, DECODE_OF_MEMORY, other), b->steps[0]);
    printf("| prefill, %lld tokens | %.0f tokens/s | %.0f GFLOP/s | %s | %.1f |\n", (long long)o->prompt, mid[PREFILL],
           1e-9 * mid[PREFILL_RATE], share_text(b, PREFILL_RATE, share), b->steps[1]);
    if (!b->training)
        return;
    printf("| training, %lld x %lld tokens | %.0f tokens/s | %.0f GFLOP/s | %s | %.1f |\n", (long long)o->rows,
           (long long)o->context, mid[TRAIN], 1e-9 * mid[TRAIN_RATE], share_text(b, TRAIN_RATE, share), b->steps[2]);
}

// One more round, operation by operation.
static eng_status profile_all(bench *b, eng_error *error) {
    const struct {
        const char *what, *unit;
        trn_runner *runner;
    } parts[] = {{"Prefill", "prompt", &b->serve.prefill},
                 {"Generating", "token", &b->serve.decode},
                 {"Training", "step", &b->train.runner}};
    enum { PARTS = sizeof parts / sizeof *parts };
    const int count = b->training ? PARTS : PARTS - 1;
    trn_speed speed[2];
    trn_limits limits = {0};
    trn_profile *profile[PARTS] = {0};
    eng_status status = trn_limits_measure(b->device, &limits, error);
    for (int i = 0; status == ENG_OK && i < count; i++) {
        status = trn_profile_create(b->device, &profile[i], error);
        parts[i].runner->profile = profile[i];
    }
    if (status == ENG_OK)
        status = trn_serve_bench_run(&b->serve, &speed[0], &speed[1], error);
    if (status == ENG_OK && b->training)
        status = trn_train_bench_run(&b->train, &speed[0], error);
    for (int i = 0; i < count; i++) {
        if (status == ENG_OK) {
            printf("\n%s: ", parts[i].what);
            trn_profile_print(profile[i], &limits, parts[i].unit, stdout);
        }
        parts[i].runner->profile = NULL;
        trn_profile_free(profile[i]);
    }
    return status;
}

static eng_status bench_all(bench *b, const bench_options *o, eng_error *error) {
    eng_status status = create_parts(b, o, error);
    if (status == ENG_OK)
        status = run_rounds(b, (int)o->rounds, error);
    if (status == ENG_OK)
        print_results(b, o);
    return status == ENG_OK && o->profile ? profile_all(b, error) : status;
}

// -------------------------------------------------------------------------------------------------------- sessions

static eng_status parse_sessions(const char *text, trn_decode_options *options, eng_error *error) {
    for (const char *at = text; *at;) {
        char *end = NULL;
        long value = strtol(at, &end, 10);
        if (end == at || (*end && *end != ',') || value < 1 || value > 1 << 16 || options->batches == TRN_MOST_BATCHES)
            return eng_fail(error, ENG_INVALID, "--sessions: \"%.40s\" is no list of at most %d numbers in 1..65536",
                            text, (int)TRN_MOST_BATCHES);
        options->batch[options->batches++] = (int32_t)value;
        at = *end ? end + 1 : end;
    }
    return options->batches > 0 ? ENG_OK : eng_fail(error, ENG_INVALID, "--sessions: the list is empty");
}

static eng_status bench_sessions(const bench *b, const bench_options *o, eng_error *error) {
    trn_decode_options options = {.steps = (int32_t)o->generated, .rounds = (int32_t)o->rounds};
    eng_status status = parse_sessions(o->sessions, &options, error);
    options.solver = trn_model_solver(b->serving->model);
    if (status == ENG_OK && o->cg_mode) {
        kern_solve_mode mode = KERN_SOLVE_TOLERANCE;
        status = trn_parse_cg_mode(o->cg_mode, &mode, error);
        options.solver.mode = (int32_t)mode;
    }
    if (o->cg_steps >= 0)
        options.solver.max_steps = (int32_t)o->cg_steps;
    if (o->cg_tolerance >= 0)
        options.solver.tolerance = (float)o->cg_tolerance;
    return status == ENG_OK ? trn_bench_decode(b->serving, &options, error) : status;
}

// ------------------------------------------------------------------------------------------------------------- command

static eng_status check_options(const bench_options *o, const char *dir, eng_error *error) {
    const struct {
        const char *name;
        int64_t value, most;
    } numbers[] = {{"context", o->context, 1 << 20},  {"rows", o->rows, 4096},
                   {"prompt", o->prompt, 1 << 20},    {"tokens", o->generated, 1 << 20},
                   {"rounds", o->rounds, MAX_ROUNDS}, {"cg-steps", o->cg_steps + 2, 258}};
    if (!dir + !o->random + !o->mixers != 2) // exactly one is there
        return eng_fail(error, ENG_INVALID, "a folder, --random or --mixers is needed, one of them");
    if (o->profile && (o->sessions || o->mixers))
        return eng_fail(error, ENG_INVALID, "--profile: does not go with --sessions or --mixers");
    if (o->state_storage && !o->sessions)
        return eng_fail(error, ENG_INVALID, "--state-storage: goes with --sessions");
    if (o->weights && !o->random)
        return eng_fail(error, ENG_INVALID, "--weights: goes with --random; a folder's weights are as they are stored");
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (numbers[i].value < 1 || numbers[i].value > numbers[i].most)
            return eng_fail(error, ENG_INVALID, "--%s: not in 1..%lld", numbers[i].name, (long long)numbers[i].most);
    if (o->context * o->rows > 1 << 24)
        return eng_fail(error, ENG_INVALID, "--rows: more than 16777216 tokens at once");
    return ENG_OK;
}

// A table of many models takes a minute or two with less of each.
static void set_defaults(bench_options *o) {
    if (o->prompt == -1)
        o->prompt = o->mixers ? 512 : 1024;
    if (o->generated == -1)
        o->generated = o->mixers ? 16 : 64;
    if (o->rounds == -1)
        o->rounds = o->mixers ? 5 : 7;
}

int trn_command_bench(int argc, char **argv) {
    bench_options o = {.device = "cpu",
                       .context = 1024,
                       .rows = 4,
                       .prompt = -1,
                       .generated = -1,
                       .rounds = -1,
                       .cg_steps = -1,
                       .cg_tolerance = -1};
    const trn_option options[] = {
        {"random", "SIZE", TRN_STRING, &o.random, "a random model instead of a folder: 30m, s135, mesa-a, gdn-a, tiny"},
        {"weights", "TYPE", TRN_STRING, &o.weights, "of a random model, serving alone: bf16, q8 or q4"},
        {"context", "N", TRN_INTEGER, &o.context, "tokens a training row (default 1024)"},
        {"rows", "N", TRN_INTEGER, &o.rows, "rows of a training step (default 4)"},
        {"prompt", "N", TRN_INTEGER, &o.prompt, "tokens of the prompt (default 1024; --mixers: 512)"},
        {"tokens", "N", TRN_INTEGER, &o.generated, "tokens generated a round (default 64; --mixers: 16)"},
        {"rounds", "N", TRN_INTEGER, &o.rounds, "rounds of all measurements (default 7; --mixers: 5)"},
        {"device", "NAME", TRN_STRING, &o.device, "cpu, cpu:16, cuda:0 (default cpu)"},
        {"fast", NULL, TRN_FLAG, &o.fast, "a GPU may round activations to bfloat16 in products"},
        {"profile", NULL, TRN_FLAG, &o.profile, "of one model: where the time goes, by operation"},
        {"state-storage", "TYPE", TRN_STRING, &o.state_storage, "with --sessions: float32 (default) or bf16"},
        {"sessions", "N,N..", TRN_STRING, &o.sessions, "only generating, by that many sessions at once"},
        {"mixers", NULL, TRN_FLAG, &o.mixers, "a table of random models of every mixer, instead of one model"},
        {"cg-mode", "MODE", TRN_STRING, &o.cg_mode, "with --sessions: tolerance, steps or exact (default the model's)"},
        {"cg-steps", "N", TRN_INTEGER, &o.cg_steps, "with --sessions: cg_max_steps (default the model's)"},
        {"cg-tolerance", "X", TRN_REAL, &o.cg_tolerance, "with --sessions: cg_tolerance (default the model's)"},
    };
    const trn_command_line line = {"bench [DIR | --random 30m | --mixers] [options]",
                                   "Generating, prefill and training speed beside the machine's own limits.",
                                   options,
                                   sizeof options / sizeof *options,
                                   0,
                                   1};
    const char *dir = NULL;
    bool helped = false;
    int positional = 0;
    eng_error error = {0};
    eng_status status = trn_options_parse(&line, argc, argv, &dir, &positional, &helped, &error);
    if (helped)
        return TRN_EXIT_OK;
    bench *b = calloc(1, sizeof *b);
    if (!b)
        return trn_command_end("bench", eng_fail(&error, ENG_NO_MEMORY, "out of memory"), &error);
    set_defaults(&o);
    if (status == ENG_OK)
        status = check_options(&o, dir, &error);
    if (status == ENG_OK)
        status = open_model(b, dir, &o, &error);
    if (status == ENG_OK && o.mixers)
        status = trn_bench_mixers(b->device, (int32_t)o.prompt, (int32_t)o.generated, (int32_t)o.rounds, &error);
    else if (status == ENG_OK)
        status = o.sessions ? bench_sessions(b, &o, &error) : bench_all(b, &o, &error);
    close_bench(b);
    free(b);
    return trn_command_end("bench", status, &error);
}
