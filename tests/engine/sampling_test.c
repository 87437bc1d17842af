// SPDX-License-Identifier: Apache-2.0
// What a request may ask of its sampling, at the engine's door: logprobs, bias, penalties, bans, ids and strings that
// end it; all of it against logits of a batch of one and a plain reimplementation of the rules.
//
// The small models speak letters: every other id has a logit of exactly zero, so ties are many.
#include <stdlib.h>
#include <string.h>

#include "engine/batch.h"
#include "engine/engine.h"
#include "kernels/ref/sample.h"
#include "tests/check_main.h"
#include "tests/engine/door.h"
#include "tests/engine/reply.h"
#include "tests/engine/temp_folder.h"
#include "tests/engine/test_device.h"

static eng_engine *open_rows(int model, int32_t rows) {
    return open_with(model, (eng_options){.max_rows = rows});
}

// -------------------------------------------------------------------------------------------------------------- oracle

// The engine's model, from its folder, in a batch of one on the same device, whose logits are read.
typedef struct oracle {
    kern_device *device;
    kern_stream *stream;
    eng_checkpoint *checkpoint;
    eng_weights *weights;
    eng_pool *pool;
    eng_batch *batch;
    eng_session session;
    eng_knobs knobs;
    float logits[SMALL_VOCAB]; // after the last id that was read
} oracle;

// After the engine, which makes the folder.
static void oracle_open(oracle *o, int model) {
    const kern_device_options options = {.name = test_device("cpu")};
    *o = (oracle){.device = NULL};
    ck_assert_int_eq(kern_device_open(&options, &o->device, NULL, 0), KERN_OK);
    ck_assert_int_eq(kern_stream_open(o->device, &o->stream), KERN_OK);
    ck_assert_int_eq(eng_checkpoint_open(temp_path(small_models[model].name), &o->checkpoint, NULL), ENG_OK);
    ck_assert_int_eq(eng_weights_load(o->checkpoint, o->device, false, &o->weights, NULL), ENG_OK);
    const eng_model *read = eng_checkpoint_model(o->checkpoint);
    o->knobs = read->config.knobs;
    ck_assert_int_eq(eng_pool_create(read, o->device, 1, 40, &o->pool, NULL), ENG_OK);
    ck_assert_int_eq(eng_batch_create(o->weights, o->pool, o->stream, 1, 256, &o->batch, NULL), ENG_OK);
}

static void oracle_close(oracle *o) {
    eng_session_close(&o->session);
    eng_batch_free(o->batch);
    eng_pool_free(o->pool);
    eng_weights_free(o->weights);
    eng_checkpoint_close(o->checkpoint);
    kern_stream_close(o->stream);
    kern_device_close(o->device);
}

static void oracle_read(oracle *o, kern_row_kind kind, const int32_t *ids, int32_t count) {
    int32_t index;
    eng_piece_result result;
    eng_piece piece = {
        .session = &o->session, .kind = kind, .ids = ids, .count = count, .knobs = o->knobs, .logits = true};
    eng_batch_clear(o->batch);
    ck_assert_int_eq(eng_batch_add(o->batch, &piece, &index, NULL), ENG_OK);
    ck_assert_int_eq(eng_batch_run(o->batch, NULL), ENG_OK);
    eng_batch_result(o->batch, index, &result);
    memcpy(o->logits, result.logits, sizeof o->logits);
}

static void oracle_start(oracle *o, const int32_t *prompt, int32_t count) {
    eng_session_close(&o->session);
    ck_assert_int_eq(eng_session_open(o->pool, o->stream, 2000, &o->session, NULL), ENG_OK);
    oracle_read(o, KERN_ROW_PROMPT, prompt, count);
}

static void assert_told(const oracle *o, const told *got, int32_t top, double tolerance) {
    double logprob[SMALL_VOCAB], sum = 0;
    int best[ENG_MAX_TOP];
    kern_ref_logprobs(SMALL_VOCAB, o->logits, logprob);
    kern_ref_top(SMALL_VOCAB, o->logits, top, best);
    ck_assert_double_eq_tol((double)got->token.logprob, logprob[got->token.id], tolerance);
    ck_assert_int_eq(got->token.top_count, top);
    for (int32_t i = 0; i < top; i++) {
        ck_assert_int_eq(got->top[i].id, best[i]);
        ck_assert_double_eq_tol((double)got->top[i].logprob, logprob[best[i]], tolerance);
        ck_assert(i == 0 || got->top[i].logprob <= got->top[i - 1].logprob);
        sum += exp((double)got->top[i].logprob);
        if (got->top[i].id == got->token.id)
            ck_assert_mem_eq(&got->top[i].logprob, &got->token.logprob, sizeof(float));
    }
    ck_assert_double_le(sum, 1 + 1e-5);
}

// ------------------------------------------------------------------------------------------------------------ logprobs

START_TEST(logprobs_are_the_models) {
    int32_t prompt[70];
    oracle o;
    small_prompt(31, prompt, 70);
    eng_engine *engine = open_rows(_i, 4);
    oracle_open(&o, _i);
    for (int32_t top = 0; top <= ENG_MAX_TOP; top += 10) {
        eng_request request = greedy(engine, prompt, 70, 25);
        request.sampling = (eng_sampling){.temperature = 1.5F, .top_p = 1, .top_k = 9, .seed = 5};
        eng_logit_bias biases[] = {{'q', 3}, {'e', -INFINITY}};
        request.biases = biases;
        request.bias_count = 2;
        request.repetition_penalty = 1.3F;
        request.logprobs = top;
        const reply *got = reply_to(engine, request);
        ck_assert_uint_eq(got->drawn_count, 25);
        ck_assert_uint_eq(got->prompt_count, 0);
        oracle_start(&o, prompt, 70);
        for (size_t i = 0; i < 25; i++) {
            assert_told(&o, &got->drawn[i], top, 1e-5);
            ck_assert_int_ne(got->drawn[i].token.id, 'e');
            oracle_read(&o, KERN_ROW_GENERATED, &got->drawn[i].token.id, 1);
        }
    }
    eng_close(engine);
    oracle_close(&o);
}
END_TEST

START_TEST(a_prompt_is_scored) {
    static reply whole;
    int32_t prompt[200];
    oracle o;
    small_prompt(32, prompt, 200);
    eng_engine *engine = open_rows(_i, 4);
    oracle_open(&o, _i);
    int32_t chunk = eng_info(engine)->chunk;
    const int32_t counts[] = {1, 2, chunk - 1, chunk, chunk + 1, 2 * chunk + 30};
    for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
        eng_request request = greedy(engine, prompt, (size_t)counts[c], 0);
        request.logprobs = 3;
        request.prompt_logprobs = true;
        memcpy(&whole, reply_to(engine, request), sizeof whole);
        ck_assert_int_eq(whole.finish, ENG_FINISH_LENGTH);
        ck_assert_uint_eq(whole.prompt_count, (size_t)counts[c]);
        ck_assert_uint_eq(whole.drawn_count, 0);
        ck_assert(isnan(whole.prompt[0].token.logprob) && whole.prompt[0].token.top_count == 0);
        for (int32_t i = 0; i < counts[c]; i++)
            ck_assert_int_eq(whole.prompt[i].token.id, prompt[i]);
        for (int32_t i = 1; i < counts[c]; i += 1 + i / 4) {
            oracle_start(&o, prompt, i);
            assert_told(&o, &whole.prompt[i], 3, 1e-4); // cut off the grid: other bits, the same solver's bound
        }
        request.max_tokens = 1; // the same, and what follows
        const reply *more = reply_to(engine, request);
        ck_assert_uint_eq(more->drawn_count, 1);
        ck_assert_mem_eq(more->prompt + 1, whole.prompt + 1, sizeof(told) * (size_t)(counts[c] - 1));
        oracle_start(&o, prompt, counts[c]);
        assert_told(&o, &more->drawn[0], 3, 1e-5);
    }
    eng_close(engine);
    oracle_close(&o);
}
END_TEST

static void add_compute(eng_compute *sum, const told *part, size_t count) {
    for (size_t i = 0; i < count; i++) {
        const eng_compute *one = &part[i].token.compute;
        sum->solves += one->solves;
        sum->steps += one->steps;
        sum->unconverged += one->unconverged;
        sum->steps_max = one->steps_max > sum->steps_max ? one->steps_max : sum->steps_max;
    }
}

START_TEST(each_token_has_its_compute) {
    int32_t prompt[100];
    small_prompt(33, prompt, 100);
    eng_engine *engine = open_rows(SMALL_MESA, 4);
    eng_request request = greedy(engine, prompt, 100, 12);
    request.token_compute = true;
    const reply *got = reply_to(engine, request);
    ck_assert_uint_eq(got->drawn[3].token.compute.solves, 4);
    ck_assert(isnan(got->drawn[3].token.logprob)); // not asked for
    request.logprobs = 0;
    request.prompt_logprobs = true;
    got = reply_to(engine, request);
    eng_compute sum = {0};
    add_compute(&sum, got->prompt, got->prompt_count);
    add_compute(&sum, got->drawn, got->drawn_count);
    ck_assert_uint_eq(got->prompt[0].token.compute.solves, 0); // nothing was read before it
    ck_assert_uint_eq(sum.solves, got->usage.prompt.solves + got->usage.completion.solves);
    ck_assert_uint_eq(sum.steps, got->usage.prompt.steps + got->usage.completion.steps);
    ck_assert_uint_gt(sum.steps, 0);
    request.token_compute = false;
    got = reply_to(engine, request);
    ck_assert_uint_eq(got->drawn[3].token.compute.solves, 0);
    eng_close(engine);
}
END_TEST

// ----------------------------------------------------------------------------------------------------- bias, penalties

typedef struct rules {
    float bias[SMALL_VOCAB];
    float presence, frequency, repetition;
    int in_prompt[SMALL_VOCAB], in_completion[SMALL_VOCAB];
} rules;

static float edited(const rules *r, int32_t id, float logit) {
    float l = logit + r->bias[id];
    if (r->in_prompt[id] || r->in_completion[id])
        l = l > 0 ? l / r->repetition : l * r->repetition;
    if (r->in_completion[id] > 0)
        l -= r->presence + r->frequency * (float)r->in_completion[id];
    return l;
}

static int32_t best_by_rules(const rules *r, const float *logits) {
    int32_t best = 0;
    for (int32_t id = 1; id < SMALL_VOCAB; id++)
        if (edited(r, id, logits[id]) > edited(r, best, logits[best]))
            best = id;
    return best;
}

START_TEST(bias_and_penalties_follow_the_rules) {
    static const struct {
        float presence, frequency, repetition;
        bool biased;
    } cases[] = {{0, 0, 0, true},        {1.5F, 0, 0, false},      {0, 0.3F, 1, false}, {0, 0, 1.4F, false},
                 {-0.5F, 0.7F, 1, true}, {0.2F, 0.1F, 0.7F, true}, {2, 2, 10, true}};
    int32_t prompt[40];
    oracle o;
    for (int i = 0; i < 40; i++)
        prompt[i] = 'a' + (i * i + 3) % 26; // ids that can come again
    eng_engine *engine = open_rows(SMALL_MESA, 4);
    oracle_open(&o, SMALL_MESA);
    int differ = 0;
    const reply *got = reply_to(engine, greedy(engine, prompt, 40, 60));
    int32_t plain[60];
    for (int i = 0; i < 60; i++)
        plain[i] = got->drawn[i].token.id;
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        rules r = {.presence = cases[c].presence,
                   .frequency = cases[c].frequency,
                   .repetition = cases[c].repetition == 0 ? 1 : cases[c].repetition};
        eng_logit_bias biases[] = {{'x', 0.4F}, {'b', -100}, {7, 1.25F}, {'e', -INFINITY}, {'a', 0}};
        eng_request request = greedy(engine, prompt, 40, 60);
        request.presence_penalty = cases[c].presence;
        request.frequency_penalty = cases[c].frequency;
        request.repetition_penalty = cases[c].repetition;
        request.biases = biases;
        request.bias_count = cases[c].biased ? 5 : 0;
        for (size_t i = 0; i < request.bias_count; i++)
            r.bias[biases[i].id] = biases[i].bias;
        for (int i = 0; i < 40; i++)
            r.in_prompt[prompt[i]]++;
        got = reply_to(engine, request);
        ck_assert_uint_eq(got->drawn_count, 60);
        oracle_start(&o, prompt, 40);
        for (int i = 0; i < 60; i++) {
            int32_t id = got->drawn[i].token.id;
            ck_assert_msg(id == best_by_rules(&r, o.logits), "case %zu, token %d: %d", c, i, (int)id);
            r.in_completion[id]++;
            differ += id != plain[i];
            oracle_read(&o, KERN_ROW_GENERATED, &id, 1);
        }
    }
    ck_assert_int_gt(differ, 60);
    eng_close(engine);
    oracle_close(&o);
}
END_TEST

START_TEST(everything_banned_gives_an_answer) {
    static eng_logit_bias biases[SMALL_VOCAB];
    int32_t prompt[20];
    small_prompt(34, prompt, 20);
    eng_engine *engine = open_rows(SMALL_MESA, 4);
    eng_request request = greedy(engine, prompt, 20, 10);
    const reply *got = reply_to(engine, request);
    int32_t plain[10];
    for (int i = 0; i < 10; i++)
        plain[i] = got->drawn[i].token.id;
    for (int32_t id = 0; id < SMALL_VOCAB; id++)
        biases[id] = (eng_logit_bias){SMALL_VOCAB - 1 - id, -INFINITY};
    request.biases = biases;
    request.bias_count = SMALL_VOCAB;
    request.logprobs = 2;
    request.min_tokens = 10;
    request.presence_penalty = 1;
    request.sampling.temperature = 1;
    got = reply_to(engine, request);
    ck_assert_int_eq(got->finish, ENG_FINISH_LENGTH);
    for (int i = 0; i < 10; i++) { // the model's likeliest
        ck_assert_int_eq(got->drawn[i].token.id, plain[i]);
        ck_assert(isfinite(got->drawn[i].token.logprob));
    }
    eng_close(engine);
}
END_TEST

// A list of edits as long as a large vocabulary: two such requests do not fit in one step of two rows.
START_TEST(long_lists_of_edits_take_turns) {
    enum { VOCABULARY = 5000, WANTED = 12 };
    static eng_logit_bias biases[VOCABULARY];
    static reply together[2];
    small_model large = small_models[SMALL_MESA];
    char config[1024];
    const char *key = strstr(large.config, "\"vocab_size\": 272");
    ck_assert_ptr_nonnull(key);
    snprintf(config, sizeof config, "%.*s\"vocab_size\": %d%s", (int)(key - large.config), large.config, VOCABULARY,
             key + strlen("\"vocab_size\": 272"));
    large.config = config;
    small_checkpoint(temp_path("large"), &large, NULL, false);
    eng_options options = {.model_dir = temp_path("large"), .device = "cpu", .max_rows = 2};
    eng_engine *engine = NULL;
    ck_assert_int_eq(eng_open(&options, &engine, NULL), ENG_OK);
    for (int32_t id = 0; id < VOCABULARY; id++)
        biases[id] = (eng_logit_bias){id, (float)(id % 7)};
    eng_request request = greedy(engine, (int32_t[]){1, 2, 3}, 3, WANTED);
    request.biases = biases;
    request.bias_count = VOCABULARY;
    request.frequency_penalty = 0.5F;
    for (int i = 0; i < 2; i++)
        reply_ask(engine, request, &together[i]);
    int steps = 0;
    for (bool worked = true; worked; steps += worked) {
        ck_assert_int_eq(eng_step(engine, reply_hear, NULL, &worked, NULL), ENG_OK);
        ck_assert_int_le(abs((int)together[0].drawn_count - (int)together[1].drawn_count), 1);
    }
    ck_assert_int_eq(steps, 2 * WANTED); // one of them in each
    const reply *alone = reply_to(engine, request);
    ck_assert_uint_eq(alone->drawn_count, WANTED);
    for (int i = 0; i < 2; i++)
        ck_assert_mem_eq(&together[i], alone, offsetof(reply, id));
    eng_close(engine);
}
END_TEST

// ------------------------------------------------------------------------------------------------------------- endings

static const eng_logit_bias to_the_end = {SMALL_EOS, 1000};

START_TEST(end_of_text_may_be_banned) {
    int32_t prompt[20];
    small_prompt(35, prompt, 20);
    eng_engine *engine = open_rows(SMALL_HYBRID, 4);
    eng_request request = greedy(engine, prompt, 20, 30);
    request.biases = &to_the_end;
    request.bias_count = 1;
    request.logprobs = 1;
    request.include_stop = true; // a special token has no text all the same
    const reply *got = reply_to(engine, request);
    ck_assert_int_eq(got->finish, ENG_FINISH_STOP);
    ck_assert_uint_eq(got->drawn_count, 1); // the first token ends it and is told
    ck_assert_int_eq(got->drawn[0].token.id, SMALL_EOS);
    ck_assert(got->drawn[0].token.logprob < 0 && got->drawn[0].token.top_count == 1);
    ck_assert_uint_eq(got->text_length, 0);
    for (int64_t least = 1; least <= 30; least += 7) {
        request.min_tokens = least;
        got = reply_to(engine, request);
        ck_assert_int_eq(got->finish, least < 30 ? ENG_FINISH_STOP : ENG_FINISH_LENGTH);
        ck_assert_int_eq(got->usage.completion_tokens, least < 30 ? least + 1 : 30);
        ck_assert_uint_eq(got->text_length, (size_t)least);
    }
    request.min_tokens = 0;
    request.ignore_eos = true;
    got = reply_to(engine, request);
    ck_assert_int_eq(got->finish, ENG_FINISH_LENGTH);
    ck_assert_uint_eq(got->text_length, 30);
    request.min_tokens = 10; // the ban stays when that of stop ids is lifted
    got = reply_to(engine, request);
    ck_assert_int_eq(got->finish, ENG_FINISH_LENGTH);
    eng_close(engine);
}
END_TEST

START_TEST(stop_ids_end_it) {
    int32_t prompt[20];
    char plain[64] = "";
    small_prompt(36, prompt, 20);
    eng_engine *engine = open_rows(SMALL_MESA, 4);
    eng_request request = greedy(engine, prompt, 20, 40);
    memcpy(plain, reply_to(engine, request)->text, 40);
    int32_t stop_ids[] = {3, plain[8]};
    size_t place = (size_t)(strchr(plain, plain[8]) - plain);
    request.stop_ids = stop_ids;
    request.stop_id_count = 2;
    const reply *got = reply_to(engine, request);
    ck_assert_int_eq(got->finish, ENG_FINISH_STOP);
    ck_assert_uint_eq(got->drawn_count, place + 1);
    ck_assert_int_eq(got->drawn[place].token.id, plain[8]);
    ck_assert_uint_eq(got->text_length, place);
    ck_assert_mem_eq(got->text, plain, place);
    request.include_stop = true;
    got = reply_to(engine, request);
    ck_assert_int_eq(got->finish, ENG_FINISH_STOP);
    ck_assert_uint_eq(got->text_length, place + 1);
    ck_assert_mem_eq(got->text, plain, place + 1);
    request.min_tokens = (int64_t)place + 5;
    got = reply_to(engine, request);
    for (size_t i = 0; i < place + 5; i++)
        ck_assert_int_ne(got->drawn[i].token.id, plain[8]);
    request.min_tokens = 0;
    request.ignore_eos = true; // says nothing about stop ids
    ck_assert_uint_eq(reply_to(engine, request)->drawn_count, place + 1);
    eng_close(engine);
}
END_TEST

START_TEST(a_stop_string_may_be_kept) {
    int32_t prompt[20];
    char plain[64] = "";
    small_prompt(37, prompt, 20);
    eng_engine *engine = open_rows(SMALL_MESA, 4);
    eng_request request = greedy(engine, prompt, 20, 40);
    memcpy(plain, reply_to(engine, request)->text, 40);
    eng_text stop = {plain + 12, 4};
    size_t place = (size_t)(strstr(plain, (char[]){plain[12], plain[13], plain[14], plain[15], 0}) - plain);
    request.stops = &stop;
    request.stop_count = 1;
    request.logprobs = 0;
    const reply *got = reply_to(engine, request);
    ck_assert_uint_eq(got->text_length, place);
    ck_assert_uint_eq(got->drawn_count, place + 4);
    request.include_stop = true;
    got = reply_to(engine, request);
    ck_assert_int_eq(got->finish, ENG_FINISH_STOP);
    ck_assert_uint_eq(got->text_length, place + 4);
    ck_assert_mem_eq(got->text, plain, place + 4);
    ck_assert_uint_eq(got->drawn_count, place + 4);
    eng_close(engine);
}
END_TEST

// --------------------------------------------------------------------------------------------------------- determinism

enum { MIXED = 32 };

// A request with knobs of its own; number i is always the same one.
static eng_request mixed(const eng_engine *engine, int i, const int32_t *prompt) {
    static eng_logit_bias biases[MIXED][4];
    static int32_t stop_ids[MIXED][2];
    eng_request request = greedy(engine, prompt, 1 + (size_t)(i * 53) % 150, 2 + (i * 7) % 30);
    request.sampling = (eng_sampling){.temperature = (float)(i % 4) * 0.5F,
                                      .top_p = i % 3 ? 0.9F : 1,
                                      .top_k = i % 5 ? 0 : 12,
                                      .min_p = i % 7 ? 0 : 0.02F,
                                      .seed = (uint64_t)i / 4,
                                      .choice = (uint32_t)i % 4};
    request.logprobs = i % 6 - 1 < 0 ? -1 : (i % 6 - 1) * 5;
    request.prompt_logprobs = request.logprobs >= 0 && i % 2;
    request.token_compute = i % 3 == 0;
    request.presence_penalty = i % 4 == 1 ? 0.6F : 0;
    request.frequency_penalty = i % 5 == 1 ? 0.4F : 0;
    request.repetition_penalty = i % 3 == 1 ? 1.2F : 0;
    for (int b = 0; b < 4; b++)
        biases[i][b] = (eng_logit_bias){'a' + (i + 5 * b) % 26, (float)(b - 1)};
    request.biases = biases[i];
    request.bias_count = i % 2 ? 4 : 0;
    stop_ids[i][0] = 'a' + i % 26;
    stop_ids[i][1] = SMALL_EOS;
    request.stop_ids = stop_ids[i];
    request.stop_id_count = i % 4 == 3 ? 2 : 0;
    request.min_tokens = i % 8 == 3 ? 2 : 0;
    request.ignore_eos = i % 3 == 2;
    request.priority = i % 3;
    request.owner = (uint64_t)i % 5;
    return request;
}

START_TEST(alone_equals_among_others) {
    static reply among[MIXED];
    static int32_t prompt[MIXED][200];
    eng_engine *engine = open_rows(_i, MIXED);
    for (int i = 0; i < MIXED; i++) {
        small_prompt(100 + (uint64_t)i, prompt[i], 200);
        for (int k = 0; k < 200; k += 2)
            prompt[i][k] = 'a' + prompt[i][k] % 26;
    }
    for (int i = 0; i < MIXED; i++)
        reply_ask(engine, mixed(engine, i, prompt[i]), &among[i]);
    reply_listen(engine);
    for (int i = 0; i < MIXED; i++) {
        const reply *alone = reply_to(engine, mixed(engine, i, prompt[i]));
        ck_assert_msg(memcmp(alone, &among[i], offsetof(reply, id)) == 0, "request %d", i);
    }
    eng_close(engine);
}
END_TEST

// ------------------------------------------------------------------------------------------------------------- choices

enum { CHOICES = 5 };

static eng_request choosing(const eng_engine *engine, const int32_t *prompt, size_t count) {
    eng_request request = greedy(engine, prompt, count, 8);
    request.sampling = (eng_sampling){.temperature = 1, .top_p = 1, .seed = 9, .choice = 3};
    request.logprobs = 2;
    request.prompt_logprobs = true;
    request.presence_penalty = 0.5F;
    request.ignore_eos = true;
    return request;
}

// The same answers, and the prompt read once, whether there are slots for all, for some or for one only.
START_TEST(choices_are_requests_that_share_a_prompt) {
    const uint64_t solves = _i == SMALL_LOOPED ? 8 : 4;
    static reply choice[CHOICES];
    int32_t prompt[200];
    static const int32_t rows[] = {8, 3, 1};
    static const size_t counts[] = {200, 128, 20}; // behind the place of parting, at a grid boundary, too short
    small_prompt(61, prompt, 200);
    for (int r = 0; r < 3; r++) {
        eng_engine *engine = open_rows(_i, rows[r]);
        int64_t chunk = eng_info(engine)->chunk;
        for (int c = 0; c < 3; c++) {
            eng_request request = choosing(engine, prompt, counts[c]);
            request.prompt_logprobs = c == 1; // otherwise several chunks a step
            request.choices = CHOICES;
            reply_ask(engine, request, choice);
            reply_listen(engine);
            request.choices = 0;
            for (int i = 0; i < CHOICES; i++) {
                int64_t shared = i > 0 ? ((int64_t)counts[c] - 1) / chunk * chunk : 0;
                const reply *alone = reply_to(engine, request);
                ck_assert_int_eq(choice[i].finish, ENG_FINISH_LENGTH);
                ck_assert_uint_eq(choice[i].prompt_count, i == 0 && c == 1 ? counts[c] : 0);
                ck_assert_mem_eq(choice[i].drawn, alone->drawn, sizeof alone->drawn);
                ck_assert_str_eq(choice[i].text, alone->text);
                ck_assert_mem_eq(&choice[i].usage.completion, &alone->usage.completion, sizeof(eng_compute));
                ck_assert_int_eq(choice[i].usage.prompt_tokens, (int64_t)counts[c]);
                ck_assert_int_eq(choice[i].usage.cached_tokens, shared);
                if (small_models[_i].mesa)
                    ck_assert_uint_eq(choice[i].usage.prompt.solves,
                                      solves * (uint64_t)((int64_t)counts[c] - choice[i].usage.cached_tokens));
                request.sampling.choice++;
            }
            ck_assert_int_ne(memcmp(choice[0].drawn, choice[1].drawn, sizeof choice[0].drawn), 0);
        }
        eng_close(engine);
    }
}
END_TEST

// The first choice fails before the others could copy its state: each comes to the same end by itself.
START_TEST(choices_fail_one_by_one) {
    static reply choice[CHOICES];
    int32_t prompt[200];
    small_prompt(63, prompt, 200);
    eng_engine *engine = open_rows(SMALL_MESA, 8);
    eng_request request = choosing(engine, prompt, 200);
    request.knobs = (eng_knobs){ENG_CG_TOLERANCE, 1e-7F, 1, 1, 1};
    request.fail_unconverged = true;
    request.choices = CHOICES;
    reply_ask(engine, request, choice);
    reply_listen(engine);
    for (int i = 0; i < CHOICES; i++)
        ck_assert_int_eq(choice[i].status, ENG_UNCONVERGED);
    eng_close(engine);
}
END_TEST

// Requests that are admitted while paused may be all there is to a step: it is no step without work, after which nobody
// would step again.
START_TEST(letting_in_is_work) {
    static reply choice[CHOICES], others[4];
    uint64_t ids[4];
    int32_t prompt[200];
    bool worked;
    small_prompt(64, prompt, 200);
    eng_engine *engine = open_rows(SMALL_MESA, 16);
    int64_t chunk = eng_info(engine)->chunk;
    eng_request request = choosing(engine, prompt, 200), urgent = greedy(engine, prompt, 3, 2);
    request.choices = CHOICES;
    urgent.priority = -1;
    reply_ask(engine, request, choice);
    while (choice[0].prompt_count <= 199 / (size_t)chunk * (size_t)chunk) // scored up to the place of parting
        ck_assert_int_eq(eng_step(engine, reply_hear, NULL, &worked, NULL), ENG_OK);
    for (int i = 0; i < 4; i++) {
        ids[i] = reply_ask(engine, urgent, &others[i]);
        eng_pause(engine, ids[i], true);
    }
    while (gauges_of(engine).running == 1) { // a device that runs ahead lets in one step later
        ck_assert_int_eq(eng_step(engine, reply_hear, NULL, &worked, NULL), ENG_OK);
        ck_assert(worked);
    }
    ck_assert_uint_eq(gauges_of(engine).running, 5);
    while (worked)
        ck_assert_int_eq(eng_step(engine, reply_hear, NULL, &worked, NULL), ENG_OK);
    for (int i = 0; i < CHOICES; i++)
        ck_assert_int_eq(choice[i].usage.cached_tokens, i > 0 ? 199 / chunk * chunk : 0);
    for (int i = 0; i < 4; i++)
        eng_pause(engine, ids[i], false);
    reply_listen(engine);
    for (int i = 0; i < 4; i++)
        ck_assert_int_eq(others[i].finish, ENG_FINISH_LENGTH);
    eng_close(engine);
}
END_TEST

START_TEST(choices_end_together_when_cancelled) {
    static reply choice[CHOICES];
    int32_t prompt[160];
    small_prompt(62, prompt, 160);
    for (int rows = 1; rows < 8; rows += 3) {
        eng_engine *engine = open_rows(SMALL_LLAMA, rows);
        for (int steps = 0; steps < 8; steps++) {
            bool worked;
            eng_request request = choosing(engine, prompt, 160);
            request.choices = CHOICES;
            uint64_t id = reply_ask(engine, request, choice);
            ck_assert_uint_eq(gauges_of(engine).queued_tokens, 160); // the prompt is there once
            for (int i = 0; i < steps; i++)
                ck_assert_int_eq(eng_step(engine, reply_hear, NULL, &worked, NULL), ENG_OK);
            eng_pause(engine, id, true);
            for (worked = true; worked;) // those admitted meanwhile stand still as well
                ck_assert_int_eq(eng_step(engine, reply_hear, NULL, &worked, NULL), ENG_OK);
            if (steps % 2) {
                eng_pause(engine, id, false);
                reply_listen(engine);
                for (int i = 0; i < CHOICES; i++)
                    ck_assert_int_eq(choice[i].finish, ENG_FINISH_LENGTH);
            } else {
                eng_cancel(engine, id);
            }
            eng_gauges gauges = gauges_of(engine);
            ck_assert_uint_eq(gauges.running + gauges.queued_requests + gauges.queued_tokens, 0);
            ck_assert_uint_eq(gauges.states_used + gauges.kv_pages_used, 0);
        }
        eng_close(engine);
    }
}
END_TEST

// ------------------------------------------------------------------------------------------------------------ refusals

START_TEST(bad_sampling_is_refused_by_name) {
    static int32_t many[ENG_MAX_STOP_IDS + 1];
    eng_engine *engine = open_rows(SMALL_MESA, 1);
    eng_request good = greedy(engine, (int32_t[]){1, 2}, 2, 5), bad;
    eng_logit_bias twice[] = {{5, 1}, {6, 1}, {5, 2}}, outside = {SMALL_VOCAB, 1}, wild = {5, NAN},
                   high = {5, INFINITY};
    int32_t no_id = -1;
#define REFUSE(naming, ...)                       \
    do {                                          \
        bad = good;                               \
        __VA_ARGS__;                              \
        refuse(engine, bad, ENG_INVALID, naming); \
    } while (0)
    REFUSE("logprobs", bad.logprobs = 21);
    REFUSE("logprobs", bad.logprobs = -2);
    REFUSE("prompt_logprobs", bad.prompt_logprobs = true);
    REFUSE("choices", bad.choices = -1);
    REFUSE("choices", bad.choices = ENG_MAX_CHOICES + 1);
    REFUSE("min_tokens", bad.min_tokens = 6);
    REFUSE("min_tokens", bad.min_tokens = -1);
    REFUSE("presence_penalty", bad.presence_penalty = 2.1F);
    REFUSE("frequency_penalty", bad.frequency_penalty = NAN);
    REFUSE("repetition_penalty", bad.repetition_penalty = 0.001F);
    REFUSE("repetition_penalty", bad.repetition_penalty = -1);
    REFUSE("repetition_penalty", bad.repetition_penalty = 11);
    REFUSE("stop_ids", bad.stop_ids = many, bad.stop_id_count = ENG_MAX_STOP_IDS + 1);
    REFUSE("stop_ids", bad.stop_ids = &no_id, bad.stop_id_count = 1);
    REFUSE("id 5 stands there twice", bad.biases = twice, bad.bias_count = 3);
    REFUSE("biases", bad.biases = &outside, bad.bias_count = 1);
    REFUSE("biases", bad.biases = &wild, bad.bias_count = 1);
    REFUSE("biases", bad.biases = &high, bad.bias_count = 1);
#undef REFUSE
    eng_close(engine);
}
END_TEST

static Suite *sampling_suite(void) {
    Suite *suite = suite_create("sampling");
    TCase *cases = tcase_create("door");
    tcase_set_timeout(cases, 60);
    tcase_add_checked_fixture(cases, temp_folder_make, temp_folder_remove);
    tcase_add_loop_test(cases, logprobs_are_the_models, 0, SMALL_MODELS);
    tcase_add_loop_test(cases, a_prompt_is_scored, 0, SMALL_MODELS);
    tcase_add_test(cases, each_token_has_its_compute);
    tcase_add_test(cases, bias_and_penalties_follow_the_rules);
    tcase_add_test(cases, everything_banned_gives_an_answer);
    tcase_add_test(cases, long_lists_of_edits_take_turns);
    tcase_add_test(cases, end_of_text_may_be_banned);
    tcase_add_test(cases, stop_ids_end_it);
    tcase_add_test(cases, a_stop_string_may_be_kept);
    tcase_add_loop_test(cases, alone_equals_among_others, 0, SMALL_MODELS);
    tcase_add_loop_test(cases, choices_are_requests_that_share_a_prompt, 0, SMALL_MODELS);
    tcase_add_test(cases, choices_fail_one_by_one);
    tcase_add_test(cases, letting_in_is_work);
    tcase_add_test(cases, choices_end_together_when_cancelled);
    tcase_add_test(cases, bad_sampling_is_refused_by_name);
    suite_add_tcase(suite, cases);
    return suite;
}

DEVICE_TEST_MAIN(sampling_suite)
