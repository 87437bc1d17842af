// SPDX-License-Identifier: Apache-2.0
// Measures the recurrence family and the Mesa layer for generated tokens on a device, one Markdown table.
//
// A launch updates the states of `batch` rows. States lie in a pool larger than any cache, and each launch takes the
// next part of it, so what is measured is memory's speed. A round measures a copy of as many bytes (64 MiB at least)
// and then the launches; figures are medians over the rounds, the share is that of each round's own copy. Batch 1 is
// measured as a plan of many launches as well, which a CUDA device replays as a graph.
//
// `layer` measures a recurrence with what stands before it (convolutions, norms of heads, gates), and this alone, as
// plans at every batch.
//
// The states' spectrum reaches evenly from 0 to 20 and nothing decays, so conjugate gradients have work to do in every
// step they are allowed. `steps` is what the solves report.
#include <errno.h>
#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/bench/measure.h"

enum { HEADS = 6, WIDTH_MAX = 128, BATCH_MAX = 1024, PLANNED = 64, ROUNDS_MAX = 99, TAPS = 4 };
static const int32_t batches[] = {1, 8, 64, 256, 512, BATCH_MAX};
enum { BATCHES = sizeof batches / sizeof batches[0] };

typedef struct options {
    const char *device, *what;
    int rounds;
    kern_storage storage;
} options;

typedef struct bench {
    kern_device *device;
    kern_stream *stream;
    kern_rows *rows;
    char *pool, *operands;
    size_t pool_bytes;
    double least_seconds; // of one measurement
    int rounds;
    kern_storage storage;
} bench;

// Operands of all cases, in one allocation.
typedef struct layout {
    size_t q, k, v, g, beta, params, o, report, bytes;
    size_t x[3], y[3], a, b, taps; // before and behind the convolutions, before the gates
} layout;

typedef enum parts { CORE, PREPARATION, LAYER } parts;

// One line of the table.
typedef struct subject {
    kern_op op;
    const char *name;
    parts parts;
    int32_t width; // D = V
    kern_storage storage;
    kern_solver solver;
    int32_t batch;
    bool planned;
} subject;

static void *allocate(size_t bytes) {
    void *memory = calloc(1, bytes);
    if (!memory) {
        fprintf(stderr, "bench_kernels: out of memory\n");
        exit(1);
    }
    return memory;
}

// ---------------------------------------------------------------------------------------------------------- operands

static size_t take(size_t *used, size_t bytes) {
    const size_t at = *used;
    *used += (bytes + 63) & ~(size_t)63;
    return at;
}

static layout lay_out(void) {
    const size_t vectors = sizeof(float) * BATCH_MAX * HEADS * WIDTH_MAX, scalars = sizeof(float) * BATCH_MAX * HEADS;
    layout l = {0};
    l.q = take(&l.bytes, vectors);
    l.k = take(&l.bytes, vectors);
    l.v = take(&l.bytes, vectors);
    l.g = take(&l.bytes, scalars);
    l.beta = take(&l.bytes, scalars);
    l.params = take(&l.bytes, sizeof(float) * HEADS * WIDTH_MAX);
    l.o = take(&l.bytes, vectors);
    l.report = take(&l.bytes, sizeof(kern_solve_report) * BATCH_MAX * HEADS);
    for (int i = 0; i < 3; i++) {
        l.x[i] = take(&l.bytes, vectors);
        l.y[i] = take(&l.bytes, vectors);
    }
    l.a = take(&l.bytes, scalars);
    l.b = take(&l.bytes, scalars);
    l.taps = take(&l.bytes, sizeof(float) * HEADS * WIDTH_MAX * TAPS);
    return l;
}

static float uniform(uint64_t *seed) { // [-1, 1)
    *seed = *seed * 6364136223846793005u + 1442695040888963407u;
    return (float)((double)(*seed >> 11) * 0x1p-52 - 1);
}

static void unit_vectors(float *x, int count, int width, uint64_t *seed) {
    for (int i = 0; i < count; i++, x += width) {
        float square = 0;
        for (int j = 0; j < width; j++) {
            x[j] = uniform(seed);
            square += x[j] * x[j];
        }
        for (int j = 0; j < width; j++)
            x[j] /= sqrtf(square);
    }
}

static void send_operands(const bench *b, const layout *l, int32_t width) {
    uint64_t seed = 1;
    char *host = allocate(l->bytes);
    unit_vectors((float *)(host + l->q), BATCH_MAX * HEADS, width, &seed);
    unit_vectors((float *)(host + l->k), BATCH_MAX * HEADS, width, &seed);
    unit_vectors((float *)(host + l->v), BATCH_MAX * HEADS, width, &seed);
    for (int i = 0; i < 3; i++)
        unit_vectors((float *)(host + l->x[i]), BATCH_MAX * HEADS, width, &seed);
    unit_vectors((float *)(host + l->taps), HEADS * WIDTH_MAX, TAPS, &seed);
    for (int i = 0; i < BATCH_MAX * HEADS; i++)
        ((float *)(host + l->beta))[i] = 0.01f;
    check(kern_upload(b->stream, b->operands, host, l->bytes), "operands");
    check(kern_synchronize(b->stream), "operands");
    free(host);
}

// h = R diag R for the reflection R = 1 - 2 u u^T: symmetric, not diagonal, its spectrum known.
static void reflected_spectrum(float *h, int width, uint64_t *seed) {
    float u[WIDTH_MAX], d[WIDTH_MAX], energy = 0;
    unit_vectors(u, 1, width, seed);
    for (int i = 0; i < width; i++) {
        d[i] = 20 * (float)i / (float)(width - 1);
        energy += d[i] * u[i] * u[i];
    }
    for (int i = 0; i < width; i++)
        for (int j = 0; j < width; j++)
            h[i * width + j] = (i == j ? d[i] : 0) - 2 * u[i] * u[j] * (d[i] + d[j]) + 4 * energy * u[i] * u[j];
}

static size_t element_bytes(kern_storage storage) {
    return storage == KERN_STORE_BF16 ? sizeof(uint16_t) : sizeof(float);
}

// Floats of a head's Hk (kern_mesa_args, state).
static size_t mesa_keys(const subject *s) {
    const size_t width = (size_t)s->width;
    return s->storage == KERN_STORE_BF16 ? (width * (width + 1) / 2 + 3) / 4 * 4 : width * width;
}

static size_t state_bytes(const subject *s) {
    const size_t values = element_bytes(s->storage) * (size_t)s->width * (size_t)s->width;
    return HEADS * (values + (s->op == KERN_OP_MESA ? sizeof(float) * mesa_keys(s) : 0));
}

// Of one convolution, behind the states.
static size_t window_bytes(const subject *s) {
    return s->parts == CORE ? 0 : sizeof(float) * (TAPS - 1) * HEADS * (size_t)s->width;
}
static size_t slot_bytes(const subject *s) {
    return state_bytes(s) + 3 * window_bytes(s);
}

// Numbers as they are stored: the high half of a float is a bfloat16.
static void store_numbers(float *x, size_t count, kern_storage storage) {
    if (storage != KERN_STORE_BF16)
        return;
    uint16_t *stored = (uint16_t *)x;
    for (size_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, sizeof bits);
        const uint16_t high = (uint16_t)(bits >> 16);
        memcpy(stored + i, &high, sizeof high);
    }
}

// The lower triangle of h as it is stored, by groups of eight rows: left of the diagonal block, then in it.
static void store_triangle(const float *h, int width, float *stored) {
    for (int first = 0; first < width; first += 8)
        for (int block = 0; block < 2; block++)
            for (int i = first; i < width && i < first + 8; i++)
                for (int j = block ? first : 0; j < (block ? i + 1 : first); j++)
                    *stored++ = h[i * width + j];
}

// A slot of Mesa's begins with the Hk of all heads, floats in either storage.
static void fill_keys(const subject *s, float *slot, uint64_t *seed) {
    float *square = allocate(sizeof *square * (size_t)s->width * (size_t)s->width);
    for (int h = 0; h < HEADS; h++) {
        float *keys = slot + (size_t)h * mesa_keys(s);
        reflected_spectrum(square, s->width, seed);
        if (s->storage == KERN_STORE_BF16)
            store_triangle(square, s->width, keys);
        else
            memcpy(keys, square, sizeof *square * mesa_keys(s));
    }
    free(square);
}

// The first slot from the host, the others as copies of what is there.
static void fill_pool(const bench *b, const subject *s) {
    const size_t slot = slot_bytes(s), keys = s->op == KERN_OP_MESA ? HEADS * mesa_keys(s) : 0;
    const size_t numbers = HEADS * (size_t)s->width * (size_t)s->width;
    uint64_t seed = 7;
    float *host = allocate((keys + numbers) * sizeof *host + 3 * window_bytes(s)); // windows are zeros
    if (keys)
        fill_keys(s, host, &seed);
    for (size_t i = 0; i < numbers; i++)
        host[keys + i] = 0.1f * uniform(&seed);
    store_numbers(host + keys, numbers, s->storage);
    check(kern_upload(b->stream, b->pool, host, slot), "states");
    check(kern_synchronize(b->stream), "states");
    free(host);
    for (size_t done = slot; done < b->pool_bytes; done *= 2) {
        const size_t left = b->pool_bytes - done;
        check(kern_copy(b->stream, b->pool + done, b->pool, left < done ? left : done), "states");
    }
    check(kern_synchronize(b->stream), "states");
}

static void fill_rows(const bench *b, const subject *s) {
    kern_rows *rows = b->rows;
    rows->n_rows = rows->n_tokens = rows->n_generated = s->batch;
    rows->slot_stride = slot_bytes(s);
    for (int32_t r = 0; r < s->batch; r++) {
        rows->row[r] = (kern_row){.kind = KERN_ROW_GENERATED,
                                  .slot = r,
                                  .token0 = r,
                                  .length = 1,
                                  .position = 1,
                                  .page0 = -1,
                                  .solver = s->solver};
        rows->target[r] = -1;
    }
    check(kern_rows_prepare(b->stream, rows), "rows");
}

// ---------------------------------------------------------------------------------------------------------- launches

typedef union arguments {
    kern_short_conv_args conv;
    kern_l2norm_args norm;
    kern_gates_args gates;
    kern_recurrence_args recurrence;
    kern_mesa_args mesa;
} arguments;

// An operand in device memory, or as a reference for a plan.
static kern_ptr operand(const bench *b, const subject *s, size_t offset) {
    return s->planned ? kern_ref(KERN_CLASS_SAVED, offset) : (kern_ptr){.p = b->operands + offset};
}

static arguments arguments_of(const bench *b, const subject *s, const layout *l, size_t state) {
    arguments a = {0};
    const kern_ptr q = operand(b, s, l->q), k = operand(b, s, l->k), v = operand(b, s, l->v), g = operand(b, s, l->g);
    const kern_ptr beta = operand(b, s, l->beta), o = operand(b, s, l->o);
    const kern_ptr slots = s->planned ? kern_ref(KERN_CLASS_STATE, state) : (kern_ptr){.p = b->pool + state};
    if (s->op == KERN_OP_MESA)
        a.mesa = (kern_mesa_args){.q = q,
                                  .k = k,
                                  .v = v,
                                  .g = g,
                                  .beta = beta,
                                  .lambda_params = operand(b, s, l->params),
                                  .state = slots,
                                  .o = o,
                                  .report = operand(b, s, l->report),
                                  .mesa = {.heads = HEADS,
                                           .key_width = s->width,
                                           .value_width = s->width,
                                           .lambda_bound = 0.25f,
                                           .storage = s->storage}};
    else
        a.recurrence = (kern_recurrence_args){.q = q,
                                              .k = k,
                                              .v = v,
                                              .g = g,
                                              .beta = beta,
                                              .state = slots,
                                              .o = o,
                                              .family = {.decay = KERN_DECAY_SCALAR,
                                                         .update = KERN_UPDATE_DELTA,
                                                         .weighted = 1,
                                                         .heads = HEADS,
                                                         .key_width = s->width,
                                                         .value_width = s->width,
                                                         .scale = 1,
                                                         .storage = s->storage}};
    return a;
}

// What stands before the recurrence of a layer, call by call; false behind the last.
static bool preparation_of(const bench *b, const subject *s, const layout *l, size_t state, int index, kern_op *op,
                           arguments *a) {
    const size_t unit[] = {l->q, l->k};
    const int32_t channels = HEADS * s->width;
    if (index < 3) {
        const size_t window = state + state_bytes(s) + (size_t)index * window_bytes(s);
        *op = KERN_OP_SHORT_CONV;
        a->conv = (kern_short_conv_args){.x = operand(b, s, l->x[index]),
                                         .weight = operand(b, s, l->taps),
                                         .state = kern_ref(KERN_CLASS_STATE, window),
                                         .y = operand(b, s, index < 2 ? l->y[index] : l->v),
                                         .channels = channels,
                                         .taps = TAPS,
                                         .activation = KERN_SILU};
    } else if (index < 5) {
        *op = KERN_OP_L2NORM;
        a->norm =
            (kern_l2norm_args){operand(b, s, l->y[index - 3]), operand(b, s, unit[index - 3]), HEADS, s->width, 1e-6f};
    } else {
        *op = KERN_OP_GATES;
        a->gates = (kern_gates_args){.a = operand(b, s, l->a),
                                     .b = operand(b, s, l->b),
                                     .A_log = operand(b, s, l->params),
                                     .dt_bias = operand(b, s, l->params),
                                     .g = operand(b, s, l->g),
                                     .beta = operand(b, s, l->beta),
                                     .gates = {.heads = HEADS,
                                               .channels = 1,
                                               .decay_law = KERN_DECAY_LAW_EXPONENTIAL,
                                               .write_law = KERN_WRITE_LAW_SIGMOID,
                                               .write_factor = 1}};
    }
    return index < 6;
}

// What is repeated: single launches over the parts of the pool, or a plan of PLANNED of them.
typedef struct work {
    const bench *b;
    const subject *s;
    layout l;
    size_t part, parts, next;
    kern_plan *plan;
    size_t half, copy_bytes; // copies go from the first half of the pool to the second; whole slots
} work;

static size_t next_part(work *w) {
    return w->next++ % w->parts * w->part;
}

static void run_launch(void *context) {
    work *w = context;
    const arguments a = arguments_of(w->b, w->s, &w->l, next_part(w));
    check(kern_launch(w->b->stream, w->s->op, w->b->rows, &a), w->s->name);
}

static void run_plan(void *context) {
    work *w = context;
    const kern_memory memory = {.state = w->b->pool, .saved = w->b->operands};
    check(kern_plan_run(w->plan, w->b->stream, w->b->rows, &memory), w->s->name);
}

static void run_copy(void *context) {
    work *w = context;
    const size_t at = w->next++ % (w->half / w->copy_bytes) * w->copy_bytes;
    check(kern_copy(w->b->stream, w->b->pool + w->half + at, w->b->pool + at, w->copy_bytes), "copy");
}

static void build(work *w) {
    const arguments a = arguments_of(w->b, w->s, &w->l, 0);
    if (!w->s->planned) {
        check(kern_reserve(w->b->device, w->s->op, &a), w->s->name);
        return;
    }
    check(kern_plan_create(w->b->device, &w->plan), "plan");
    for (int i = 0; i < PLANNED; i++) {
        const size_t part = next_part(w);
        const arguments next = arguments_of(w->b, w->s, &w->l, part);
        arguments before;
        kern_op op;
        for (int n = 0; w->s->parts != CORE && preparation_of(w->b, w->s, &w->l, part, n, &op, &before); n++)
            check(kern_plan_add(w->plan, op, &before), w->s->name);
        if (w->s->parts != PREPARATION)
            check(kern_plan_add(w->plan, w->s->op, &next), w->s->name);
    }
    check(kern_plan_seal(w->plan), "plan");
}

// ----------------------------------------------------------------------------------------------------------- measuring

static double bytes_moved(const subject *s) {
    const double operands = sizeof(float) * HEADS * (4.0 * s->width + 2.0);
    const double state = s->parts == PREPARATION ? 0 : (double)state_bytes(s);
    return s->batch * (2.0 * (state + 3.0 * (double)window_bytes(s)) + operands);
}

static void print_line(const work *w, double *seconds, double *copy, double *share) {
    const subject *s = w->s;
    const double time = median(seconds, w->b->rounds), bytes = bytes_moved(s);
    printf("| %s | %d | %d | %s | %.2f | %.2f | %.3f | %.3f | %.2f |", s->name, (int)s->width, (int)s->batch,
           s->planned ? "plan" : "launch", 1e6 * time, 1e-6 * bytes, 1e-12 * bytes / time,
           1e-12 * median(copy, w->b->rounds), median(share, w->b->rounds));
    if (s->op == KERN_OP_MESA)
        printf(" %.1f |\n", mean_steps(w->b->stream, w->b->operands + w->l.report, (size_t)s->batch * HEADS));
    else
        printf(" - |\n");
    fflush(stdout);
}

static void measure_subject(const bench *b, const layout *l, const subject *s) {
    enum { LEAST_COPY = 64 << 20 };
    work w = {.b = b, .s = s, .l = *l, .part = (size_t)s->batch * slot_bytes(s)};
    double seconds[ROUNDS_MAX], copy[ROUNDS_MAX], share[ROUNDS_MAX];
    if (w.part > b->pool_bytes) {
        fprintf(stderr, "bench_kernels: %s, batch %d: left out, this device's pool is too small\n", s->name,
                (int)s->batch);
        return;
    }
    const size_t slot = slot_bytes(s), slots = b->pool_bytes / slot, least = (LEAST_COPY + slot - 1) / slot * slot;
    w.parts = b->pool_bytes / w.part;
    w.half = slots / 2 * slot;
    w.copy_bytes = w.part > least ? w.part : least;
    w.copy_bytes = w.copy_bytes > w.half ? w.half : w.copy_bytes;
    fill_rows(b, s);
    build(&w);
    int launches = 1, copies = 1;
    void (*run)(void *) = s->planned ? run_plan : run_launch;
    run(&w); // once untimed: modules are loaded, graphs made
    for (int round = 0; round < b->rounds; round++) {
        copy[round] = 2.0 * (double)w.copy_bytes / time_call(b->stream, b->least_seconds, run_copy, &w, &copies);
        seconds[round] = time_call(b->stream, b->least_seconds, run, &w, &launches) / (s->planned ? PLANNED : 1);
        share[round] = bytes_moved(s) / seconds[round] / copy[round];
    }
    print_line(&w, seconds, copy, share);
    kern_plan_free(w.plan);
}

// A subject at every batch size; batch 1 also as a plan.
static void measure_batches(const bench *b, const layout *l, subject s) {
    for (int i = 0; i < BATCHES; i++) {
        s.batch = batches[i];
        for (int planned = s.parts == CORE ? 0 : 1; planned < (s.batch == 1 || s.parts != CORE ? 2 : 1); planned++) {
            s.planned = planned;
            fill_pool(b, &s);
            measure_subject(b, l, &s);
        }
    }
}

static void measure_recurrence(const bench *b, const layout *l) {
    static const int32_t widths[] = {64, 128};
    for (int i = 0; i < 2; i++) {
        send_operands(b, l, widths[i]);
        measure_batches(b, l,
                        (subject){.op = KERN_OP_RECURRENCE,
                                  .name = "recurrence, gated delta",
                                  .width = widths[i],
                                  .storage = b->storage});
    }
}

static void measure_layer(const bench *b, const layout *l) {
    static const int32_t widths[] = {64, 128};
    static const char *const names[] = {[PREPARATION] = "preparation", [LAYER] = "prepared, gated delta"};
    for (int i = 0; i < 2; i++) {
        send_operands(b, l, widths[i]);
        for (parts which = PREPARATION; which <= LAYER; which++)
            measure_batches(b, l,
                            (subject){.op = KERN_OP_RECURRENCE,
                                      .name = names[which],
                                      .parts = which,
                                      .width = widths[i],
                                      .storage = b->storage});
    }
}

static void measure_mesa(const bench *b, const layout *l) {
    static const int32_t steps[] = {0, 1, 4, 8, 10, 16, 24, 30};
    subject s = {.op = KERN_OP_MESA, .width = 128, .storage = b->storage};
    send_operands(b, l, s.width);
    for (size_t i = 0; i < sizeof steps / sizeof steps[0]; i++) {
        char name[32];
        snprintf(name, sizeof name, "mesa, %d steps", (int)steps[i]);
        s.name = name;
        s.solver = (kern_solver){KERN_SOLVE_STEPS, steps[i], 0};
        measure_batches(b, l, s);
    }
    s.name = "mesa, tolerance 1e-2";
    s.solver = (kern_solver){KERN_SOLVE_TOLERANCE, 30, 1e-2f};
    measure_batches(b, l, s);
}

// ------------------------------------------------------------------------------------------------------------- program

static void usage(FILE *to) {
    fprintf(
        to,
        "usage: bench_kernels [--device NAME] [--rounds N] [--what recurrence|layer|mesa|all] [--storage f32|bf16]\n"
        "Defaults: cpu, 7 rounds, all, f32. Prints a Markdown table. States in bf16 are for CUDA devices.\n");
}

static bool asked(const options *o, const char *what) {
    return strcmp(o->what, "all") == 0 || strcmp(o->what, what) == 0;
}

static options read_options(int argc, char **argv) {
    static const struct option known[] = {
        {"device", required_argument, NULL, 'd'}, {"rounds", required_argument, NULL, 'r'},
        {"what", required_argument, NULL, 'w'},   {"storage", required_argument, NULL, 's'},
        {"help", no_argument, NULL, 'h'},         {0}};
    options o = {.device = "cpu", .what = "all", .rounds = 7};
    bool valid = true;
    for (int option; (option = getopt_long(argc, argv, "", known, NULL)) != -1;) {
        char *end = NULL;
        if (option == 'h') {
            usage(stdout);
            exit(0);
        } else if (option == 'd') {
            o.device = optarg;
        } else if (option == 'w') {
            o.what = optarg;
        } else if (option == 's') {
            o.storage = strcmp(optarg, "bf16") == 0 ? KERN_STORE_BF16 : KERN_STORE_F32;
            valid = valid && (o.storage == KERN_STORE_BF16 || strcmp(optarg, "f32") == 0);
        } else if (option == 'r') {
            o.rounds = (int)strtol(optarg, &end, 10);
            valid = valid && *optarg && !*end && o.rounds >= 1 && o.rounds <= ROUNDS_MAX;
        } else {
            valid = false;
        }
    }
    valid = valid && optind == argc && (asked(&o, "recurrence") || asked(&o, "layer") || asked(&o, "mesa"));
    if (!valid) {
        usage(stderr);
        exit(2);
    }
    return o;
}

static bench open_bench(const options *o, const layout *l) {
    bench b = {.rounds = o->rounds, .storage = o->storage};
    char reason[256] = "";
    const kern_status status =
        kern_device_open(&(kern_device_options){.name = o->device}, &b.device, reason, sizeof reason);
    if (status != KERN_OK) {
        fprintf(stderr, "bench_kernels: %s: %s\n", kern_status_text(status), reason);
        exit(1);
    }
    const bool cpu = strncmp(kern_device_describe(b.device)->name, "cpu", 3) == 0;
    b.pool_bytes = (size_t)(cpu ? 256 : 2048) << 20;
    b.least_seconds = cpu ? 0.005 : 0.02;
    check(kern_stream_open(b.device, &b.stream), "stream");
    check(kern_rows_create(b.device, BATCH_MAX, BATCH_MAX, 0, 0, 0, 0, &b.rows), "rows");
    check(kern_alloc(b.device, b.pool_bytes, (void **)&b.pool), "states");
    check(kern_alloc(b.device, l->bytes, (void **)&b.operands), "operands");
    return b;
}

int main(int argc, char **argv) {
    const options o = read_options(argc, argv);
    const layout l = lay_out();
    bench b = open_bench(&o, &l);
    printf("%s; %d heads, %s states, medians of %d rounds\n\n", kern_device_describe(b.device)->description, (int)HEADS,
           o.storage == KERN_STORE_BF16 ? "bfloat16" : "float32", b.rounds);
    printf("| operation | D = V | batch | form | us | MB | TB/s | copy TB/s | share of copy | steps |\n");
    printf("|---|---:|---:|---|---:|---:|---:|---:|---:|---:|\n");
    if (asked(&o, "recurrence"))
        measure_recurrence(&b, &l);
    if (asked(&o, "layer"))
        measure_layer(&b, &l);
    if (asked(&o, "mesa"))
        measure_mesa(&b, &l);
    kern_free(b.device, b.operands);
    kern_free(b.device, b.pool);
    kern_rows_free(b.rows);
    kern_stream_close(b.stream);
    kern_device_close(b.device);
    return 0;
}
