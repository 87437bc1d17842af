// SPDX-License-Identifier: Apache-2.0
// What leaving loops for later saves: steps of sessions whose tokens are read at loops drawn from a distribution,
// deferred and with all loops at once, in turns on one model of random weights.
//
//   bench_loops [WIDTH [LAYERS [STEPS [ROUNDS [DEVICE]]]]]      4 loops of gated_deltanet
// Weights are float32 on the CPU, bf16 on another DEVICE. Prints a Markdown table of medians over the rounds. `bound`
// is loops / mean loop: what a single session could gain; `by bytes` is the gain if the memory's time were all, weights
// of a loop being read where a session needs it and states where they change. Loops are left for later wherever they
// can be, also where a server would see that their launches cost as much: `MB a launch` is what it would hold against
// the device's launch_bytes. One thread drives; failures end the program.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "engine/loop.h"
#include "engine/random.h"

enum { LOOPS = 4, MOST_BATCH = 256, MOST_ROUNDS = 15, HEAD = 64, LENGTH = 1 << 20 };

typedef struct bench {
    kern_device *device;
    kern_stream *stream;
    eng_model *model;
    eng_weights *weights;
    eng_pool *pool;
    eng_batch *batch;
    eng_session session[MOST_BATCH];
    int32_t id[MOST_BATCH];
    uint64_t drawn;
    double word; // bytes of a weight
} bench;

static const eng_sampling likeliest = {.top_p = 1};

static void need(bool done, const char *what) {
    if (done)
        return;
    fprintf(stderr, "bench_loops: %s\n", what);
    exit(1);
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void open_bench(int width, int layers, const char *device, int sessions, bench *b) {
    char json[512];
    const kern_dtype dtype = strncmp(device, "cpu", 3) == 0 ? KERN_F32 : KERN_BF16;
    eng_config config;
    b->word = dtype == KERN_F32 ? 4 : 2;
    snprintf(json, sizeof json,
             "{\"model_type\": \"gated_deltanet\", \"hidden_size\": %d, \"num_hidden_layers\": %d, \"num_heads\": %d,"
             "\"head_dim\": %d, \"expand_v\": 1, \"vocab_size\": 4096, \"tie_word_embeddings\": true,"
             "\"num_loops\": %d}",
             width, layers, width / HEAD, HEAD, LOOPS);
    need(kern_device_open(&(kern_device_options){.name = device}, &b->device, NULL, 0) == KERN_OK, "no device");
    need(kern_stream_open(b->device, &b->stream) == KERN_OK, "no stream");
    need(eng_config_parse(json, strlen(json), "bench", &config, NULL) == ENG_OK &&
             eng_model_create(&config, &b->model, NULL) == ENG_OK &&
             eng_weights_init(b->model, b->device, 1, dtype, &b->weights, NULL) == ENG_OK,
         "no model");
    need(eng_pool_create(b->model, b->device, sessions, 0, &b->pool, NULL) == ENG_OK &&
             eng_batch_create(b->weights, b->pool, b->stream, sessions, 16 * sessions, &b->batch, NULL) == ENG_OK,
         "no memory for states");
}

static int32_t draw_loop(bench *b, const double *share) {
    uint32_t word[4];
    eng_philox(1, 2, b->drawn++, word);
    double place = word[0] * 0x1p-32;
    int32_t loop = 0;
    while (loop + 1 < LOOPS && place >= share[loop])
        place -= share[loop++];
    return loop + 1;
}

static void step(bench *b, int sessions, const double *share, bool whole) {
    int32_t index[MOST_BATCH];
    eng_piece_result result;
    eng_batch_clear(b->batch);
    for (int i = 0; i < sessions; i++) {
        const eng_piece piece = {.session = &b->session[i],
                                 .kind = KERN_ROW_GENERATED,
                                 .ids = &b->id[i],
                                 .count = 1,
                                 .knobs = {.exit_threshold = 1, .max_loops = draw_loop(b, share)},
                                 .logits = true,
                                 .sampling = &likeliest,
                                 .whole = whole};
        need(eng_batch_add(b->batch, &piece, &index[i], NULL) == ENG_OK, "a piece does not fit");
    }
    need(eng_batch_run(b->batch, NULL) == ENG_OK, "a step failed");
    for (int i = 0; i < sessions; i++) {
        eng_batch_result(b->batch, index[i], &result);
        b->id[i] = result.id;
    }
}

// Seconds a step, of so many.
static double run(bench *b, int sessions, const double *share, bool whole, int steps) {
    for (int i = 0; i < sessions; i++)
        need(eng_session_open(b->pool, b->stream, LENGTH, &b->session[i], NULL) == ENG_OK, "no state");
    b->drawn = 0;
    step(b, sessions, share, whole);
    const double begin = seconds();
    for (int i = 0; i < steps; i++)
        step(b, sessions, share, whole);
    const double taken = (seconds() - begin) / steps;
    for (int i = 0; i < sessions; i++)
        eng_session_close(&b->session[i]);
    return taken;
}

// Of a step: the head's weights, and of each loop its weights and the states of the sessions that go through it.
static double bytes_of_step(const bench *b, int sessions, const double *share, bool whole) {
    const double head = b->word * b->model->config.vocab_size * b->model->config.hidden_size;
    const double block = (double)b->weights->bytes - head, state = 2.0 * (double)b->model->state_bytes / LOOPS;
    double bytes = head, reaches = 1;
    for (int r = 0; r < LOOPS; r++) {
        const double part = whole ? 1 : reaches;
        bytes += (1 - pow(1 - part, sessions)) * block + part * sessions * state;
        reaches -= share[r];
    }
    return bytes;
}

static int ascending(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void measure(bench *b, int sessions, const double *share, int steps, int rounds) {
    double whole[MOST_ROUNDS], deferred[MOST_ROUNDS], ratio[MOST_ROUNDS], mean = 0;
    for (int r = 0; r < LOOPS; r++)
        mean += share[r] * (r + 1);
    for (int i = 0; i < rounds; i++) {
        whole[i] = run(b, sessions, share, true, steps);
        deferred[i] = run(b, sessions, share, false, steps);
        ratio[i] = whole[i] / deferred[i];
    }
    qsort(whole, (size_t)rounds, sizeof *whole, ascending);
    qsort(deferred, (size_t)rounds, sizeof *deferred, ascending);
    qsort(ratio, (size_t)rounds, sizeof *ratio, ascending);
    printf("| %.2f | %d | %.2f | %.0f | %.0f | %.2f (%.2f-%.2f) | %.2f | %.2f |\n", mean, sessions,
           1e-6 * eng_loops_bytes_a_launch(b->batch->loops, sessions), 1e6 * whole[rounds / 2],
           1e6 * deferred[rounds / 2], ratio[rounds / 2], ratio[0], ratio[rounds - 1], LOOPS / mean,
           bytes_of_step(b, sessions, share, true) / bytes_of_step(b, sessions, share, false));
    fflush(stdout);
}

int main(int argc, char **argv) {
    static const double shares[][LOOPS] = {
        {1, 0, 0, 0}, {0.7, 0.15, 0.1, 0.05}, {0.5, 0.25, 0.15, 0.1}, {0.25, 0.25, 0.25, 0.25}, {0, 0, 0, 1}};
    static const int batches[] = {1, 8, 64, MOST_BATCH};
    const int width = argc > 1 ? atoi(argv[1]) : 512, layers = argc > 2 ? atoi(argv[2]) : 4;
    const int steps = argc > 3 ? atoi(argv[3]) : 64, rounds = argc > 4 ? atoi(argv[4]) : 5;
    const char *device = argc > 5 ? argv[5] : "cpu";
    const size_t count = strncmp(device, "cpu", 3) == 0 ? 3 : 4;
    static bench b;
    need(width >= HEAD && width % HEAD == 0 && layers > 0 && steps > 0 && rounds > 0 && rounds <= MOST_ROUNDS,
         "width (a multiple of 64), layers, steps and up to 15 rounds");
    open_bench(width, layers, device, batches[count - 1], &b);
    printf("%s; width %d, %d layers, %d loops, weights %.0f MB, a state %.2f MB\n\n",
           kern_device_describe(b.device)->description, width, layers, LOOPS, 1e-6 * (double)b.weights->bytes,
           1e-6 * (double)b.model->state_bytes);
    puts("| mean loop | sessions | MB a launch | all loops us | deferred us | gain (range) | bound | by bytes |\n"
         "|---|---|---|---|---|---|---|---|");
    for (size_t s = 0; s < sizeof shares / sizeof *shares; s++)
        for (size_t i = 0; i < count; i++)
            measure(&b, batches[i], shares[s], batches[i] > 8 ? (steps + 3) / 4 : steps, rounds);
    eng_batch_free(b.batch);
    eng_pool_free(b.pool);
    eng_weights_free(b.weights);
    eng_model_free(b.model);
    kern_stream_close(b.stream);
    kern_device_close(b.device);
    return 0;
}
