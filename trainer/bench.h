// SPDX-License-Identifier: Apache-2.0
// Measurements of mesa-trainer bench: what the machine can do, and what the model gets out of it, in the same minutes.
//
// Limits: the rate at which all threads together read memory, and the rate of a large float32 product through the same
// kernels (KERN_OP_LINEAR over a merged prompt). Model: one stream generating, a prompt being read, a training step.
#ifndef TRAINER_BENCH_H
#define TRAINER_BENCH_H

#include "trainer/batch.h"
#include "trainer/optimizer.h"

// Reads of a block by all threads, each its own part. Two sizes matter: a block far above every cache gives the rate of
// memory; one as large as what a token needs, read again and again, gives what a model of that size can reach at most,
// which is more where a cache keeps a part of it from token to token.
typedef struct trn_read_probe {
    uint64_t *block;
    size_t words;
} trn_read_probe;
ENG_CHECKED eng_status trn_read_probe_create(trn_read_probe *out, eng_error *error);
void trn_read_probe_free(trn_read_probe *probe);
// Bytes a second of reading the first `bytes` (0, or more than there are: all), repeated until 768 MB are read.
double trn_read_probe_run(const trn_read_probe *probe, double bytes);

// A product (tokens, width) x (width, width)^T. *rate: operations a second.
typedef struct trn_matrix_probe {
    kern_device *device;
    kern_stream *stream;
    kern_rows *rows;
    kern_weight *weight;
    void *x, *y;
} trn_matrix_probe;
ENG_CHECKED eng_status trn_matrix_probe_create(kern_device *device, trn_matrix_probe *out, eng_error *error);
void trn_matrix_probe_free(trn_matrix_probe *probe);
ENG_CHECKED eng_status trn_matrix_probe_run(trn_matrix_probe *probe, double *rate, eng_error *error);

// The device copying a block far above its caches, in bytes read and written a second.
typedef struct trn_copy_probe {
    kern_device *device;
    kern_stream *stream;
    void *from, *to;
} trn_copy_probe;
ENG_CHECKED eng_status trn_copy_probe_create(kern_device *device, trn_copy_probe *out, eng_error *error);
void trn_copy_probe_free(trn_copy_probe *probe);
ENG_CHECKED eng_status trn_copy_probe_run(const trn_copy_probe *probe, double *rate, eng_error *error);

// A model of a name that measurements are known by: 30m, s135, mesa-a, gdn-a, tiny; bench_random.c.
ENG_CHECKED eng_status trn_random_model_create(const char *name, eng_model **out, eng_error *error);

typedef struct trn_speed {
    double seconds;
    int64_t tokens;
    double operations; // of the model, solver steps that were taken included
    double bytes;      // that must be read and written at least: weights, states
    double solver_steps;
} trn_speed;

// Serving: one session reads a prompt and goes on generating, greedily.
typedef struct trn_serve_bench {
    const eng_weights *weights;
    trn_runner prefill, decode; // decode runs in prefill's states
    kern_solver solver;
    int32_t *ids; // (prompt)
    int32_t prompt, generated;
} trn_serve_bench;
ENG_CHECKED eng_status trn_serve_bench_create(const eng_weights *weights, int32_t prompt, int32_t generated,
                                              trn_serve_bench *out, eng_error *error);
void trn_serve_bench_free(trn_serve_bench *bench);
ENG_CHECKED eng_status trn_serve_bench_run(trn_serve_bench *bench, trn_speed *prefill, trn_speed *decode,
                                           eng_error *error);

// The mean steps of a solve in the batch that a runner ran last.
ENG_CHECKED eng_status trn_bench_solver_steps(trn_runner *runner, double *steps, eng_error *error);

double trn_median(double *value, int count); // sorts them

// Sessions that generate together, one token each a step; what they have read is what they generated before.
typedef struct trn_decode_bench {
    kern_device *device; // borrowed
    trn_runner runner;
    kern_solver solver;
    int32_t *id; // (batch), memory that transfers reach
    int32_t batch;
    int64_t position;
} trn_decode_bench;
// Warms up; most_steps: of all runs that follow.
ENG_CHECKED eng_status trn_decode_bench_create(const eng_weights *weights, int32_t batch, int32_t most_steps,
                                               kern_solver solver, trn_decode_bench *out, eng_error *error);
ENG_CHECKED eng_status trn_decode_bench_run(trn_decode_bench *bench, int32_t steps, eng_error *error);
void trn_decode_bench_free(trn_decode_bench *bench);

// Generating by several sessions at once on the weights' device, a table on stdout; bench_decode.c.
enum { TRN_MOST_BATCHES = 16 };
typedef struct trn_decode_options {
    int32_t batch[TRN_MOST_BATCHES], batches;
    int32_t steps, rounds; // steps a round
    kern_solver solver;
} trn_decode_options;
ENG_CHECKED eng_status trn_bench_decode(const eng_weights *weights, const trn_decode_options *options,
                                        eng_error *error);

// Every mixer in the same blocks: parameters, state, prefill and generating; bench_mixers.c.
typedef struct trn_mixer_model {
    const char *name, *mixer;
    const char *keys; // of config.json, beside those that all have
} trn_mixer_model;
enum { TRN_MIXER_MODELS = 13 };
extern const trn_mixer_model trn_mixer_models[TRN_MIXER_MODELS];
ENG_CHECKED eng_status trn_mixer_model_create(const trn_mixer_model *mixer, eng_model **out, eng_error *error);
ENG_CHECKED eng_status trn_bench_mixers(kern_device *device, int32_t prompt, int32_t steps, int32_t rounds,
                                        eng_error *error);

// Training steps (forward, backward, AdamW) over rows of random ids.
typedef struct trn_train_bench {
    const eng_weights *weights;
    trn_runner runner;
    trn_batch batch;
    trn_optimizer optimizer;
    kern_solver solver;
    trn_row row;
    int32_t context, rows;
} trn_train_bench;
ENG_CHECKED eng_status trn_train_bench_create(const eng_weights *weights, int32_t context, int32_t rows,
                                              trn_train_bench *out, eng_error *error);
void trn_train_bench_free(trn_train_bench *bench);
ENG_CHECKED eng_status trn_train_bench_run(trn_train_bench *bench, trn_speed *speed, eng_error *error);

#endif
