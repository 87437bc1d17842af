// SPDX-License-Identifier: Apache-2.0
// Measures the recurrence family and the Mesa layer for prompts on a device, one Markdown table.
//
// Rows begin with zero states and leave none, as the kernels of flash-linear-attention are measured; a launch takes the
// next operands of a pool larger than any cache. A round measures a copy of one operand of the pool, then the launches.
// Figures are medians over the rounds. The floor of a case is the larger of two times: of its operands at the rate of
// that copy, and of its products (each counted once, a solve's by its mean steps) at the rate that --tflops says. With
// --train a launch is forward, which leaves its states, and backward; --bf16 opens the device as training in bf16 does.
#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/bench/measure.h"

enum { HEADS = 6, ROUNDS_MAX = 99, TOKENS = 65536, CPU_TOKENS = 2048, VECTORS = 11, SERVED = 6, CHUNK = 64 };

typedef struct subject {
    const char *name;
    kern_op op;
    kern_decay decay;
    kern_update update;
    kern_solver solver;
} subject;

static const subject subjects[] = {
    {"linear attention", KERN_OP_RECURRENCE, KERN_DECAY_NONE, KERN_UPDATE_ADD, {0}},
    {"scalar decay (Mamba-2)", KERN_OP_RECURRENCE, KERN_DECAY_SCALAR, KERN_UPDATE_ADD, {0}},
    {"gated delta rule", KERN_OP_RECURRENCE, KERN_DECAY_SCALAR, KERN_UPDATE_DELTA, {0}},
    {"channel decay (GLA)", KERN_OP_RECURRENCE, KERN_DECAY_CHANNEL, KERN_UPDATE_ADD, {0}},
    {"delta rule, channel decay (KDA)", KERN_OP_RECURRENCE, KERN_DECAY_CHANNEL, KERN_UPDATE_DELTA, {0}},
    {"mesa, 0 steps", KERN_OP_MESA, KERN_DECAY_SCALAR, KERN_UPDATE_ADD, {KERN_SOLVE_STEPS, 0, 0}},
    {"mesa, 10 steps", KERN_OP_MESA, KERN_DECAY_SCALAR, KERN_UPDATE_ADD, {KERN_SOLVE_STEPS, 10, 0}},
    {"mesa, 30 steps", KERN_OP_MESA, KERN_DECAY_SCALAR, KERN_UPDATE_ADD, {KERN_SOLVE_STEPS, 30, 0}},
    {"mesa, tolerance 1e-4", KERN_OP_MESA, KERN_DECAY_SCALAR, KERN_UPDATE_ADD, {KERN_SOLVE_TOLERANCE, 30, 1e-4f}},
    {"mesa, tolerance 1e-3", KERN_OP_MESA, KERN_DECAY_SCALAR, KERN_UPDATE_ADD, {KERN_SOLVE_TOLERANCE, 30, 1e-3f}},
    {"mesa, tolerance 1e-2", KERN_OP_MESA, KERN_DECAY_SCALAR, KERN_UPDATE_ADD, {KERN_SOLVE_TOLERANCE, 30, 1e-2f}},
};
enum { SUBJECTS = sizeof subjects / sizeof subjects[0] };

static const struct { int32_t rows, length; } shapes[] = {{16, 2048}, {1, TOKENS}, {1, 2048}, {1, 512}, {8, 512}};
enum { SHAPES = sizeof shapes / sizeof shapes[0] };

typedef struct bench {
    kern_device *device;
    kern_stream *stream;
    kern_rows *rows;
    // (tokens, HEADS, width): q, k, v, o, log decays of channels, x; to train dO, dq, dk, dv, those of the log decays
    float *vectors[VECTORS];
    float *g, *beta, *params, *dg, *dbeta, *dparams, *snapshots;
    kern_solve_report *report;
    size_t tokens;
    double least_seconds, flops;
    int rounds;
    bool train, fast;
    const char *what;
} bench;

// ---------------------------------------------------------------------------------------------------------- operands

static float uniform(uint64_t *seed) { // [0, 1)
    *seed = *seed * 6364136223846793005u + 1442695040888963407u;
    return (float)((double)(*seed >> 11) * 0x1p-53);
}

typedef enum kind { KEYS, NUMBERS, DECAYS, WEIGHTS } kind;

// `count` floats in vectors of `width`; keys of unit length with a common direction, as a layer's are.
static float *make_operand(const bench *b, size_t count, size_t width, kind kind, uint64_t *seed) {
    float *host = malloc(count * sizeof *host), *made = NULL;
    if (!host)
        check(KERN_NO_MEMORY, "operands");
    for (size_t i = 0; i < count; i += width) {
        double square = 1e-12;
        for (size_t j = i; j < i + width; j++) {
            const float x = uniform(seed);
            host[j] = kind == KEYS ? 1.5f * x - 0.5f : kind == NUMBERS ? 2 * x - 1 : kind == DECAYS ? -0.1f * x : x;
            square += (double)host[j] * host[j];
        }
        for (size_t j = i; kind == KEYS && j < i + width; j++)
            host[j] = (float)(host[j] / sqrt(square));
    }
    check(kern_alloc(b->device, count * sizeof *host, (void **)&made), "operands");
    check(kern_upload(b->stream, made, host, count * sizeof *host), "operands");
    check(kern_synchronize(b->stream), "operands");
    free(host);
    return made;
}

static void make_operands(bench *b, size_t width) {
    static const kind kinds[VECTORS] = {KEYS,    KEYS,    NUMBERS, NUMBERS, DECAYS, NUMBERS,
                                        NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS};
    uint64_t seed = 1;
    const size_t vectors = b->tokens * HEADS;
    for (int i = 0; i < (b->train ? VECTORS : SERVED); i++)
        b->vectors[i] = make_operand(b, vectors * width, width, kinds[i], &seed);
    b->g = make_operand(b, vectors, 1, DECAYS, &seed);
    b->beta = make_operand(b, vectors, 1, WEIGHTS, &seed);
    b->params = make_operand(b, HEADS * width, 1, NUMBERS, &seed);
    check(kern_alloc(b->device, vectors * sizeof *b->report, (void **)&b->report), "reports");
    if (!b->train)
        return;
    b->dg = make_operand(b, vectors, 1, NUMBERS, &seed);
    b->dbeta = make_operand(b, vectors, 1, NUMBERS, &seed);
    b->dparams = make_operand(b, HEADS * width, 1, NUMBERS, &seed);
    const size_t chunks = b->tokens / (size_t)kern_device_describe(b->device)->chunk;
    const size_t states = chunks * HEADS * width * 2 * width;
    check(kern_alloc(b->device, states * sizeof(float), (void **)&b->snapshots), "states");
}

static void free_operands(bench *b) {
    for (int i = 0; i < VECTORS; i++)
        kern_free(b->device, b->vectors[i]);
    float *others[] = {b->g, b->beta, b->params, b->dg, b->dbeta, b->dparams, b->snapshots};
    for (int i = 0; i < 7; i++)
        kern_free(b->device, others[i]);
    kern_free(b->device, b->report);
}

// ---------------------------------------------------------------------------------------------------------- launches

typedef struct work {
    const bench *b;
    const subject *s;
    size_t width, tokens, parts, next; // of a launch; places in the pool
} work;

static void fill_rows(const work *w, int32_t rows, int32_t length) {
    kern_rows *table = w->b->rows;
    table->n_rows = rows;
    table->n_tokens = rows * length;
    table->n_generated = 0;
    for (int32_t r = 0; r < rows; r++)
        table->row[r] = (kern_row){.kind = KERN_ROW_PROMPT,
                                   .slot = -1,
                                   .token0 = r * length,
                                   .length = length,
                                   .page0 = -1,
                                   .solver = w->s->solver};
    for (int32_t t = 0; t < table->n_tokens; t++)
        table->target[t] = -1;
    check(kern_rows_prepare(w->b->stream, table), "rows");
}

typedef union arguments {
    kern_recurrence_args recurrence;
    kern_mesa_args mesa;
} arguments;

static arguments arguments_of(const work *w, size_t part) {
    const bench *b = w->b;
    const size_t gate = part * w->tokens * HEADS, at = gate * w->width;
    arguments a = {0};
    const kern_ptr q = {.f = b->vectors[0] + at}, k = {.f = b->vectors[1] + at}, v = {.f = b->vectors[2] + at};
    const kern_ptr o = {.f = b->vectors[3] + at}, g = {.f = b->g + gate}, beta = {.f = b->beta + gate};
    const kern_ptr channels = {.f = b->vectors[4] + at}, none = {0};
    const int32_t width = (int32_t)w->width;
    if (w->s->op == KERN_OP_MESA)
        a.mesa = (kern_mesa_args){.q = q,
                                  .k = k,
                                  .v = v,
                                  .g = g,
                                  .beta = beta,
                                  .lambda_params.f = b->params,
                                  .o = o,
                                  .x.f = b->train ? b->vectors[5] + at : NULL,
                                  .snapshots.f = b->snapshots,
                                  .report.p = b->report + gate,
                                  .mesa = {HEADS, width, width, 0.25f, KERN_STORE_F32}};
    else
        a.recurrence = (kern_recurrence_args){.q = q,
                                              .k = k,
                                              .v = v,
                                              .g = w->s->decay == KERN_DECAY_NONE      ? none
                                                   : w->s->decay == KERN_DECAY_CHANNEL ? channels
                                                                                       : g,
                                              .beta = beta,
                                              .o = o,
                                              .snapshots.f = b->snapshots,
                                              .family = {.decay = (int32_t)w->s->decay,
                                                         .update = (int32_t)w->s->update,
                                                         .weighted = 1,
                                                         .heads = HEADS,
                                                         .key_width = width,
                                                         .value_width = width,
                                                         .scale = 1 / sqrtf((float)width)}};
    return a;
}

typedef union gradients {
    kern_recurrence_backward_args recurrence;
    kern_mesa_backward_args mesa;
} gradients;

static kern_op backward_of(const work *w) {
    return w->s->op == KERN_OP_MESA ? KERN_OP_MESA_BACKWARD : KERN_OP_RECURRENCE_BACKWARD;
}

static gradients gradients_of(const work *w, const arguments *of, size_t part) {
    const bench *b = w->b;
    const size_t gate = part * w->tokens * HEADS, at = gate * w->width;
    gradients d = {0};
    const kern_ptr d_o = {.f = b->vectors[6] + at}, dq = {.f = b->vectors[7] + at}, dk = {.f = b->vectors[8] + at};
    const kern_ptr dv = {.f = b->vectors[9] + at}, dg = {.f = b->dg + gate}, dbeta = {.f = b->dbeta + gate};
    const kern_ptr channels = {.f = b->vectors[10] + at}, none = {0};
    if (w->s->op == KERN_OP_MESA) {
        const kern_mesa_args *a = &of->mesa;
        d.mesa = (kern_mesa_backward_args){.q = a->q,
                                           .k = a->k,
                                           .v = a->v,
                                           .g = a->g,
                                           .beta = a->beta,
                                           .lambda_params = a->lambda_params,
                                           .o = a->o,
                                           .x = a->x,
                                           .snapshots = a->snapshots,
                                           .d_o = d_o,
                                           .dq = dq,
                                           .dk = dk,
                                           .dv = dv,
                                           .dg = dg,
                                           .dbeta = dbeta,
                                           .grad_lambda_params.f = b->dparams,
                                           .mesa = a->mesa,
                                           .backward_tolerance = 1};
    } else {
        const kern_recurrence_args *a = &of->recurrence;
        d.recurrence = (kern_recurrence_backward_args){.q = a->q,
                                                       .k = a->k,
                                                       .v = a->v,
                                                       .g = a->g,
                                                       .beta = a->beta,
                                                       .snapshots = a->snapshots,
                                                       .d_o = d_o,
                                                       .dq = dq,
                                                       .dk = dk,
                                                       .dv = dv,
                                                       .dg = w->s->decay == KERN_DECAY_NONE      ? none
                                                             : w->s->decay == KERN_DECAY_CHANNEL ? channels
                                                                                                 : dg,
                                                       .dbeta = dbeta,
                                                       .family = a->family};
    }
    return d;
}

static void run(void *context) {
    work *w = context;
    const size_t part = w->next++ % w->parts;
    const arguments a = arguments_of(w, part);
    check(kern_launch(w->b->stream, w->s->op, w->b->rows, &a), w->s->name);
    if (!w->b->train)
        return;
    const gradients d = gradients_of(w, &a, part);
    check(kern_launch(w->b->stream, backward_of(w), w->b->rows, &d), w->s->name);
}

static void reserve(const work *w) {
    const arguments a = arguments_of(w, 0);
    check(kern_reserve(w->b->device, w->s->op, &a), w->s->name);
    if (!w->b->train)
        return;
    const gradients d = gradients_of(w, &a, 0);
    check(kern_reserve(w->b->device, backward_of(w), &d), w->s->name);
}

static void run_copy(void *context) {
    const work *w = context;
    check(kern_copy(w->b->stream, w->b->vectors[5], w->b->vectors[4], w->b->tokens * HEADS * w->width * sizeof(float)),
          "copy");
}

// ---------------------------------------------------------------------------------------------------------- measuring

static double bytes_of(const work *w) {
    double vectors = w->s->decay == KERN_DECAY_CHANNEL ? 5 : 4, scalars = 2;
    if (w->b->train) // and q, k, v, dO, dq, dk, dv
        vectors += w->s->decay == KERN_DECAY_CHANNEL ? 9 : 7, scalars += 4;
    return sizeof(float) * (double)w->tokens * HEADS * (vectors * (double)w->width + scalars);
}

// Floating-point operations: triangles are half of their squares.
static double flops_of(const work *w, double steps) {
    const double d = (double)w->width, half = CHUNK / 2, state = 2 * d * d, pairs = 2 * half * d;
    const double solve = (steps + 1) * (state + 2 * pairs), read = state + 2 * pairs;
    // additive: K G, dO S^T, U G^T, the update of G; P, P^T dO, dO U^T, and products of that with K and Q
    const double back = 4 * state + 5 * pairs;
    double token = 2 * state + 2 * pairs; // read and write the state, Q K^T, P U
    double trained = back;
    if (w->s->op == KERN_OP_MESA) {
        token = 3 * state + 2 * pairs + solve;
        trained = read + solve + 2 * back; // right-hand sides, both states
    } else if (w->s->update == KERN_UPDATE_DELTA) {
        token += state + 2 * pairs;
        trained += 3 * state + 7 * pairs; // the errors again, M S^T, the update; two systems, K K^T, M U^T, twice Y K
    }
    if (w->b->train)
        token += trained;
    return token * (double)w->tokens * HEADS;
}

static void measure_case(const bench *b, const subject *s, size_t width, int32_t rows, int32_t length) {
    work w = {.b = b, .s = s, .width = width, .tokens = (size_t)rows * (size_t)length};
    double seconds[ROUNDS_MAX], copy[ROUNDS_MAX];
    if (w.tokens > b->tokens)
        return;
    w.parts = b->tokens / w.tokens;
    fill_rows(&w, rows, length);
    reserve(&w);
    run(&w); // once untimed: modules are loaded
    int launches = 1, copies = 1;
    for (int round = 0; round < b->rounds; round++) {
        copy[round] = 2.0 * (double)(b->tokens * HEADS * width * sizeof(float)) /
                      time_call(b->stream, b->least_seconds, run_copy, &w, &copies);
        seconds[round] = time_call(b->stream, b->least_seconds, run, &w, &launches);
    }
    const double steps = s->op == KERN_OP_MESA ? mean_steps(b->stream, b->report, w.tokens * HEADS) : 0,
                 time = median(seconds, b->rounds);
    const double memory = bytes_of(&w) / median(copy, b->rounds), products = flops_of(&w, steps) / b->flops;
    printf("| %s | %zu | %d x %d | %.1f | %.2f | %.1f | %.1f | %.2f | %.1f | %.1f |\n", s->name, width, (int)rows,
           (int)length, 1e6 * time, 1e-6 * (double)w.tokens / time, 1e6 * memory, 1e6 * products,
           (memory > products ? memory : products) / time, 1e-12 * flops_of(&w, steps) / time, steps);
    fflush(stdout);
}

// ------------------------------------------------------------------------------------------------------------- program

static void usage(FILE *to) {
    fprintf(to, "usage: bench_prompts [--device NAME] [--rounds N] [--what PART-OF-A-NAME] [--tflops RATE] [--train]\n"
                "                     [--bf16]\n"
                "Defaults: cpu, 5 rounds, everything, 790. Prints a Markdown table.\n");
}

static bench read_options(int argc, char **argv, const char **device) {
    static const struct option known[] = {
        {"device", required_argument, NULL, 'd'}, {"rounds", required_argument, NULL, 'r'},
        {"what", required_argument, NULL, 'w'},   {"tflops", required_argument, NULL, 't'},
        {"help", no_argument, NULL, 'h'},         {"train", no_argument, NULL, 'b'},
        {"bf16", no_argument, NULL, 'f'},         {0}};
    bench b = {.rounds = 5, .what = "", .flops = 790e12};
    bool valid = true;
    for (int option; (option = getopt_long(argc, argv, "", known, NULL)) != -1;) {
        char *end = NULL;
        if (option == 'h') {
            usage(stdout);
            exit(0);
        } else if (option == 'b') {
            b.train = true;
        } else if (option == 'f') {
            b.fast = true;
        } else if (option == 'd') {
            *device = optarg;
        } else if (option == 'w') {
            b.what = optarg;
        } else if (option == 'r') {
            b.rounds = (int)strtol(optarg, &end, 10);
            valid = valid && *optarg && !*end && b.rounds >= 1 && b.rounds <= ROUNDS_MAX;
        } else if (option == 't') {
            b.flops = 1e12 * strtod(optarg, &end);
            valid = valid && *optarg && !*end && b.flops > 0;
        } else {
            valid = false;
        }
    }
    if (!valid || optind != argc) {
        usage(stderr);
        exit(2);
    }
    return b;
}

static void open_bench(bench *b, const char *device) {
    char reason[256] = "";
    const kern_status status = kern_device_open(
        &(kern_device_options){.name = device, .fast = b->fast, .trains = b->train}, &b->device, reason, sizeof reason);
    if (status != KERN_OK) {
        fprintf(stderr, "bench_prompts: %s: %s\n", kern_status_text(status), reason);
        exit(1);
    }
    const bool cpu = strncmp(kern_device_describe(b->device)->name, "cpu", 3) == 0;
    b->tokens = cpu ? CPU_TOKENS : TOKENS;
    b->least_seconds = cpu ? 0.02 : 0.05;
    check(kern_stream_open(b->device, &b->stream), "stream");
    check(kern_rows_create(b->device, 16, (int32_t)b->tokens, 0, 0, 0, 0, &b->rows), "rows");
}

int main(int argc, char **argv) {
    static const size_t widths[] = {128, 64};
    const char *device = "cpu";
    bench b = read_options(argc, argv, &device);
    open_bench(&b, device);
    printf("%s; %d heads, medians of %d rounds%s%s\n\n", kern_device_describe(b.device)->description, (int)HEADS,
           b.rounds, b.train ? ", forward and backward" : "", b.fast ? ", bf16" : "");
    printf("| operation | D = V | rows | us | Mtoken/s | memory, us | products, us | share of floor | TFLOP/s | steps "
           "|\n");
    printf("|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|\n");
    for (int i = 0; i < 2; i++) {
        make_operands(&b, widths[i]);
        for (int shape = 0; shape < SHAPES; shape++)
            for (int s = 0; s < SUBJECTS; s++)
                if (strstr(subjects[s].name, b.what))
                    measure_case(&b, &subjects[s], widths[i], shapes[shape].rows, shapes[shape].length);
        free_operands(&b);
    }
    kern_rows_free(b.rows);
    kern_stream_close(b.stream);
    kern_device_close(b.device);
    return 0;
}
