// SPDX-License-Identifier: Apache-2.0
// Readings and tasks on models: log-probabilities are those of served logits, whatever is shared and whatever runs
// beside; what a task says of the demo model is worked out again from its logits.
#include <string.h>

#include "engine/files.h"
#include "tests/check_main.h"
#include "tests/trainer/run_support.h"
#include "trainer/commands.h"
#include "trainer/eval_reader.h"
#include "trainer/eval_result.h"
#include "trainer/eval_work.h"
#include "trainer/probe.h"
#include "trainer/runner.h"

static const char transformer_model[] =
    "model_type = transformer\nhidden_size = 32\nnum_hidden_layers = 2\nnum_heads = 2\n"
    "intermediate_size = 64\ntie_word_embeddings = true\ninitializer_range = 0.1\n";
static const char demo[] = MESA_SOURCE_DIR "/deploy/models/demo";

enum { READINGS = 5, LONGEST = 300, DRAWN = 6, VOCABULARY = 61 };

// ------------------------------------------------------------------------------------------------------------ readings

typedef struct texts {
    trn_passage passage;
    trn_reading reading[READINGS];
    int32_t ids[READINGS][LONGEST];
    float logprob[READINGS][LONGEST];
    int32_t drawn[READINGS][DRAWN];
    bool given, done;
} texts;

static eng_status give(void *context, trn_passage **out, eng_error *error) {
    (void)error;
    texts *t = context;
    *out = t->given ? NULL : &t->passage;
    t->given = true;
    return ENG_OK;
}

static eng_status take_back(void *context, trn_passage *passage, eng_error *error) {
    (void)error;
    texts *t = context;
    ck_assert(passage == &t->passage && !t->done);
    t->done = true;
    return ENG_OK;
}

static void drop(void *context, trn_passage *passage) {
    (void)context;
    (void)passage;
}

static bool never(void *context, const trn_passage *passage, const trn_reading *reading) {
    (void)context;
    (void)passage;
    (void)reading;
    return false;
}

// Readings of several lengths that begin with the same `shared` ids; the last one draws.
static texts *make_texts(int shared) {
    static const int lengths[READINGS] = {250, 200, 291, 170, 190}, firsts[READINGS] = {160, 170, 165, 169, 190};
    texts *t = calloc(1, sizeof *t);
    t->passage = (trn_passage){t->reading, READINGS};
    for (int r = 0; r < READINGS; r++) {
        for (int i = 0; i < lengths[r]; i++)
            t->ids[r][i] = document_id(i < shared ? 9 : r, i);
        t->reading[r] = (trn_reading){.ids = t->ids[r],
                                      .count = lengths[r],
                                      .first = firsts[r],
                                      .generate = r == READINGS - 1 ? DRAWN : 0,
                                      .logprob = t->logprob[r],
                                      .drawn = t->drawn[r]};
    }
    return t;
}

static void run_texts(const trn_probe *probe, int64_t batch_tokens, texts *t, int stem, trn_reading_figures *figures) {
    trn_reader *reader = NULL;
    eng_error error = {0};
    const trn_passage_source source = {t, give, take_back, drop, never};
    *figures = (trn_reading_figures){0};
    ck_assert_msg(trn_reader_create(probe->weights, batch_tokens, LONGEST, &reader, &error) == ENG_OK, "%s",
                  error.text);
    ck_assert_msg(trn_reader_run(reader, &source, &probe->model->config.knobs, stem ? t->ids[0] : NULL, stem, figures,
                                 &error) == ENG_OK,
                  "%s", error.text);
    ck_assert(t->done);
    trn_reader_free(reader);
}

static double logprob_of(const float *logits, int32_t vocabulary, int32_t id) {
    double sum = 0, most = -INFINITY;
    for (int32_t i = 0; i < vocabulary; i++)
        most = fmax(most, (double)logits[i]);
    for (int32_t i = 0; i < vocabulary; i++)
        sum += exp((double)logits[i] - most);
    return (double)logits[id] - most - log(sum);
}

static int32_t likeliest_of(const float *logits, int32_t vocabulary) {
    int32_t best = 0;
    for (int32_t i = 1; i < vocabulary; i++)
        best = logits[i] > logits[best] ? i : best;
    return best;
}

static void open_model(const char *model, trn_probe *probe) {
    static const int lengths[] = {50};
    trn_run run;
    eng_error error = {0};
    write_documents("d", lengths, 1);
    open_run(write_run(model, "d", 512, "[train]\nsteps = 5\nbatch_tokens = 512\n"), &run);
    ck_assert_msg(eng_checkpoint_save(temp_path("model"), run.weights, ENG_F32, NULL, &error) == ENG_OK, "%s",
                  error.text);
    trn_run_close(&run);
    ck_assert_int_eq(trn_probe_open(temp_path("model"), "cpu", false, KERN_STORE_F32, probe, NULL), ENG_OK);
}

// Against logits of each text on its own, in double. Returns how many ids were drawn.
static int32_t check_texts(trn_probe *probe, const texts *t) {
    float *logits = malloc(sizeof *logits * (LONGEST + DRAWN) * VOCABULARY);
    const kern_solver solver = trn_model_solver(probe->model);
    for (int r = 0; r < READINGS; r++) {
        const trn_reading *reading = &t->reading[r];
        int32_t all[LONGEST + DRAWN], count = reading->count, likeliest = 0;
        memcpy(all, reading->ids, sizeof *all * (size_t)count);
        memcpy(all + count, reading->drawn, sizeof *all * (size_t)reading->drawn_count);
        count += reading->drawn_count;
        ck_assert_int_eq(trn_probe_logits(probe, all, count, reading->count, solver, logits, NULL), ENG_OK);
        for (int32_t i = reading->first; i < reading->count; i++) {
            const float *before = logits + (size_t)(i - 1) * VOCABULARY;
            ck_assert_double_eq_tol((double)reading->logprob[i - reading->first],
                                    logprob_of(before, VOCABULARY, all[i]), 2e-5);
            likeliest += likeliest_of(before, VOCABULARY) == all[i];
        }
        ck_assert_int_eq(reading->likeliest, likeliest);
        for (int32_t i = 0; i < reading->drawn_count; i++)
            ck_assert_int_eq(reading->drawn[i],
                             likeliest_of(logits + (size_t)(reading->count + i - 1) * VOCABULARY, VOCABULARY));
    }
    const trn_reading *last = &t->reading[READINGS - 1];
    if (last->drawn_count < DRAWN) // the logits of all that it read are those of the last text
        ck_assert_int_eq(likeliest_of(logits + (size_t)(last->count + last->drawn_count - 1) * VOCABULARY, VOCABULARY),
                         TEST_EOS);
    int32_t drawn = last->drawn_count;
    free(logits);
    return drawn;
}

START_TEST(readings_are_those_of_served_logits) {
    trn_probe probe;
    trn_reading_figures shared, apart, stem;
    open_model(_i == 0 ? mesa_model : _i == 1 ? hybrid_model : transformer_model, &probe);
    texts *alike = make_texts(150), *again = make_texts(150), *different = make_texts(0), *stemmed = make_texts(150);
    run_texts(&probe, 4096, alike, 0, &shared);
    run_texts(&probe, 256, again, 0, &shared);
    run_texts(&probe, 512, different, 0, &apart);
    run_texts(&probe, 512, stemmed, 130, &stem);
    ck_assert_int_gt(check_texts(&probe, alike) + check_texts(&probe, different), 0);
    ck_assert(shared.tokens < shared.unshared && apart.tokens >= apart.unshared);
    ck_assert_int_eq(shared.unshared, apart.unshared);
    for (int r = 0; r < READINGS; r++) { // to the last bit, whatever ran beside it and was shared
        size_t bytes = sizeof(float) * (size_t)(alike->reading[r].count - alike->reading[r].first);
        ck_assert_mem_eq(alike->logprob[r], again->logprob[r], bytes);
        ck_assert_mem_eq(alike->logprob[r], stemmed->logprob[r], bytes);
    }
    free(alike);
    free(again);
    free(different);
    free(stemmed);
    trn_probe_close(&probe);
}
END_TEST

// A model that is cut where the continuations begin: what they share is read once to its end, and changes no bit.
START_TEST(continuations_share_all_of_their_context) {
    trn_probe probe;
    trn_reading_figures shared, alone;
    open_model(transformer_model, &probe);
    texts *together = make_texts(150);
    for (int r = 0; r < READINGS - 1; r++)
        together->reading[r].first = 151;
    together->reading[READINGS - 1].first = together->reading[READINGS - 1].count = 151;
    memcpy(together->ids[READINGS - 1], together->ids[0], sizeof *together->ids[0] * 151);
    texts *apart = make_texts(150);
    memcpy(apart->ids, together->ids, sizeof apart->ids);
    run_texts(&probe, 1024, together, 0, &shared);
    check_texts(&probe, together);
    int64_t behind = 0, tokens = 0;
    for (int r = 0; r < READINGS; r++) {
        trn_reading *one = &apart->reading[r];
        const trn_reading *other = &together->reading[r];
        one->first = other->first;
        one->count = other->count;
        apart->passage = (trn_passage){one, 1};
        apart->given = apart->done = false;
        run_texts(&probe, 256, apart, 0, &alone);
        ck_assert_mem_eq(one->logprob, other->logprob, sizeof(float) * (size_t)(one->count - one->first));
        ck_assert_int_eq(one->drawn_count, other->drawn_count);
        ck_assert_mem_eq(one->drawn, other->drawn, sizeof *one->drawn * (size_t)one->drawn_count);
        behind += alone.tokens - 150;
        tokens += alone.tokens;
    }
    ck_assert_int_eq(shared.tokens, 150 + behind);
    ck_assert_int_lt(shared.tokens, tokens);
    free(together);
    free(apart);
    trn_probe_close(&probe);
}
END_TEST

START_TEST(readings_without_a_wish_are_refused) {
    trn_probe probe;
    trn_reader *reader = NULL;
    trn_reading_figures figures = {0};
    eng_error error = {0};
    open_model(mesa_model, &probe);
    texts *t = make_texts(0);
    const trn_passage_source source = {t, give, take_back, drop, never};
    t->reading[1].first = 0;
    ck_assert_int_eq(trn_reader_create(probe.weights, 512, LONGEST, &reader, &error), ENG_OK);
    ck_assert_int_eq(trn_reader_run(reader, &source, &probe.model->config.knobs, NULL, 0, &figures, &error),
                     ENG_INVALID);
    trn_reader_free(reader);
    trn_probe_close(&probe);
    free(t);
}
END_TEST

// --------------------------------------------------------------------------------------------------------------- tasks

static void run_eval(const char *task, const char *out, const char *batch, const char *shots) {
    const char *eval[] = {"eval",           demo,  "--task",  task,  "--out",    out,       "--context", "64",
                          "--batch-tokens", batch, "--shots", shots, "--solver", "steps:6", NULL};
    ck_assert_int_eq(trn_command_eval(14, (char **)eval), TRN_EXIT_OK);
}

static void write_text(const char *name, const char *text) {
    temp_write(name, text, strlen(text));
}

// log p(continuation | context) and the bytes that were scored, from the logits of the whole.
static double score(trn_probe *probe, const eng_tokenizer *tokenizer, const char *context, const char *continuation) {
    char text[1024];
    int32_t *ids = NULL;
    size_t count = 0, bytes = 0, begin, vocabulary = (size_t)probe->model->config.vocab_size;
    const kern_solver solver = {.mode = KERN_SOLVE_STEPS, .max_steps = 6};
    double sum = 0;
    snprintf(text, sizeof text, "%s%s", context, continuation);
    ck_assert_int_eq(eng_tokenizer_encode(tokenizer, text, strlen(text), false, false, &ids, &count, NULL), ENG_OK);
    for (begin = count; bytes < strlen(continuation); begin--) {
        size_t length = 0;
        eng_tokenizer_bytes(tokenizer, ids[begin - 1], &length);
        bytes += length;
    }
    int32_t *all = malloc(sizeof *all * (count + 1));
    all[0] = probe->model->config.bos_id;
    memcpy(all + 1, ids, sizeof *ids * count);
    bool bos = eng_tokenizer_bos(tokenizer) >= 0 || begin == 0;
    const int32_t *read = bos ? all : all + 1;
    size_t length = bos ? count + 1 : count, first = bos ? begin + 1 : begin;
    float *logits = malloc(sizeof *logits * length * vocabulary);
    ck_assert_int_eq(trn_probe_logits(probe, read, (int32_t)length, (int32_t)length, solver, logits, NULL), ENG_OK);
    for (size_t i = first; i < length; i++)
        sum += logprob_of(logits + (i - 1) * vocabulary, (int32_t)vocabulary, read[i]);
    free(logits);
    free(all);
    free(ids);
    return sum;
}

START_TEST(choices_and_targets_are_scored_right) {
    static const char *const choice[] = {"went to the market", "sky", "was a king who had three sons"};
    trn_result result;
    trn_probe probe;
    eng_tokenizer *tokenizer = NULL;
    char out[512], cloze[512];
    snprintf(out, sizeof out, "%s", temp_path("out.json"));
    snprintf(cloze, sizeof cloze, "%s", temp_path("cloze.jsonl"));
    ck_assert_int_eq(trn_probe_open(demo, "cpu", false, KERN_STORE_F32, &probe, NULL), ENG_OK);
    ck_assert_int_eq(eng_tokenizer_open(demo, 0, &tokenizer, NULL), ENG_OK);
    write_text("mc.jsonl", "{\"ctx\":\"Once upon a time there \",\"choices\":[\"went to the market\",\"sky\","
                           "\"was a king who had three sons\"],\"gold\":2}\n"
                           "{\"ctx\":\"\",\"choices\":[\"The king was old.\",\"Old was king the.\"],\"gold\":1}\n");
    run_eval(temp_path("mc.jsonl"), out, "256", "0");
    ck_assert_int_eq(trn_result_read(out, &result, NULL), ENG_OK);
    double sum[3];
    int best = 0, norm = 0;
    for (int i = 0; i < 3; i++) {
        char right[64];
        snprintf(right, sizeof right, " %s", choice[i]);
        sum[i] = score(&probe, tokenizer, "Once upon a time there", right);
        best = sum[i] > sum[best] ? i : best;
        norm = sum[i] / (double)strlen(choice[i]) > sum[norm] / (double)strlen(choice[norm]) ? i : norm;
    }
    const trn_result_row *row = &result.row[0];
    ck_assert_double_eq_tol(trn_result_find(row, "logprob")->value[0], sum[2], 1e-4 * fabs(sum[2]));
    ck_assert_double_eq(trn_result_find(row, "acc")->value[0], best == 2);
    ck_assert_double_eq(trn_result_find(row, "acc_norm")->value[0], norm == 2);
    ck_assert_double_eq_tol(trn_result_find(row, "acc")->chance, (1.0 / 3 + 1.0 / 2) / 2, 1e-12);
    double old = score(&probe, tokenizer, "", "The king was old."),
           odd = score(&probe, tokenizer, "", "Old was king the.");
    ck_assert_double_eq_tol(trn_result_find(row, "logprob")->value[1], odd, 1e-4 * fabs(odd));
    ck_assert_double_eq(trn_result_find(row, "acc")->value[1], odd > old);
    ck_assert_str_eq(row->primary, "acc_norm");
    trn_result_free(&result);

    write_text("cloze.jsonl", "{\"ctx\":\"Once upon a\",\"target\":\"time\"}\n{\"ctx\":\"The\",\"target\":\"zqx\"}\n");
    run_eval(cloze, out, "256", "0");
    ck_assert_int_eq(trn_result_read(out, &result, NULL), ENG_OK);
    double time = score(&probe, tokenizer, "Once upon a", " time");
    const trn_metric *bits = trn_result_find(&result.row[0], "bits_per_byte");
    ck_assert_double_eq_tol(bits->value[0], -time / log(2), 1e-4);
    ck_assert_double_eq(bits->weight[0], 5);
    ck_assert_double_eq(trn_result_find(&result.row[0], "exact")->value[1], 0);
    ck_assert_int_eq(result.row[0].figures.solves.steps_max, 6);
    trn_result_free(&result);
    eng_tokenizer_close(tokenizer);
    trn_probe_close(&probe);
}
END_TEST

static void expect_equal(const trn_result *a, const trn_result *b) {
    ck_assert_int_eq(a->rows, b->rows);
    for (int r = 0; r < a->rows; r++) {
        ck_assert_int_eq(a->row[r].metrics, b->row[r].metrics);
        for (int m = 0; m < a->row[r].metrics; m++)
            for (int64_t i = 0; i < a->row[r].items; i++)
                ck_assert_double_eq(a->row[r].metric[m].value[i],
                                    trn_result_find(&b->row[r], a->row[r].metric[m].name)->value[i]);
    }
}

START_TEST(results_do_not_depend_on_the_batch) {
    trn_result small, large;
    char task[512], a[512], b[512], text[4096];
    size_t length = 0;
    snprintf(task, sizeof task, "%s", temp_path("t.jsonl"));
    snprintf(a, sizeof a, "%s", temp_path("a.json"));
    snprintf(b, sizeof b, "%s", temp_path("b.json"));
    for (int i = 0; i < 12; i++)
        length += (size_t)snprintf(text + length, sizeof text - length,
                                   "{\"ctx\":\"King %d had three sons, and the eldest of them went into the wide world "
                                   "to seek his fortune.\",\"question\":\"Who went?\",\"answer\":\"the eldest\"}\n",
                                   i);
    temp_write("t.jsonl", text, length);
    run_eval(task, a, "256", "2");
    run_eval(task, b, "2048", "2");
    ck_assert_int_eq(trn_result_read(a, &small, NULL), ENG_OK);
    ck_assert_int_eq(trn_result_read(b, &large, NULL), ENG_OK);
    ck_assert_int_eq(small.row[0].items, 10); // two are examples
    ck_assert_int_eq(small.row[0].shots, 2);
    ck_assert_str_eq(small.row[0].primary, "contains");
    expect_equal(&small, &large);
    trn_result_free(&small);
    trn_result_free(&large);
}
END_TEST

START_TEST(texts_are_scored_in_windows) {
    static const char text[] = "Once upon a time there was a king who had three sons. The eldest was proud, the second "
                               "was lazy, and the youngest was kind to everything that lived in the wide forest about "
                               "his father's house, so that the birds and the deer came to him without any fear. One "
                               "morning the king called them and said that he "
                               "was old, and that he who brought him the water of life should have the crown.";
    trn_result result;
    trn_probe probe;
    eng_tokenizer *tokenizer = NULL;
    char task[512], out[512];
    int32_t *ids = NULL;
    size_t count = 0;
    double loss = 0;
    snprintf(task, sizeof task, "%s", temp_path("t.txt"));
    snprintf(out, sizeof out, "%s", temp_path("out.json"));
    write_text("t.txt", text);
    run_eval(task, out, "256", "0");
    ck_assert_int_eq(trn_result_read(out, &result, NULL), ENG_OK);
    ck_assert_int_eq(trn_probe_open(demo, "cpu", false, KERN_STORE_F32, &probe, NULL), ENG_OK);
    ck_assert_int_eq(eng_tokenizer_open(demo, 0, &tokenizer, NULL), ENG_OK);
    ck_assert_int_eq(eng_tokenizer_encode(tokenizer, text, strlen(text), false, false, &ids, &count, NULL), ENG_OK);
    int32_t all[512] = {probe.model->config.bos_id};
    ck_assert(count > 66 && count < 500); // more than one window
    memcpy(all + 1, ids, sizeof *ids * count);
    all[count + 1] = probe.model->config.eos_id[0];
    const kern_solver solver = {.mode = KERN_SOLVE_STEPS, .max_steps = 6};
    int32_t vocabulary = probe.model->config.vocab_size, pairs = (int32_t)count + 1;
    float *logits = malloc(sizeof *logits * 64 * (size_t)vocabulary);
    for (int32_t at = 0; at < pairs; at += 64) {
        int32_t length = pairs - at < 64 ? pairs - at : 64;
        ck_assert_int_eq(trn_probe_logits(&probe, all + at, length, length, solver, logits, NULL), ENG_OK);
        for (int32_t i = 0; i < length; i++)
            loss -= logprob_of(logits + (size_t)i * (size_t)vocabulary, vocabulary, all[at + i + 1]);
    }
    const trn_result_row *row = &result.row[0];
    ck_assert_double_eq_tol(trn_result_find(row, "loss")->value[0], loss, 1e-5 * loss);
    ck_assert_double_eq(trn_result_find(row, "loss")->weight[0], pairs);
    ck_assert_double_eq_tol(trn_result_find(row, "bits_per_byte")->value[0], loss / log(2), 1e-5 * loss);
    ck_assert_double_eq(trn_result_find(row, "bits_per_byte")->weight[0], (double)strlen(text));
    ck_assert_double_eq(row->position[0].weight[0], pairs); // no window is longer than 64
    ck_assert(row->position[1].items == 0);
    free(logits);
    free(ids);
    eng_tokenizer_close(tokenizer);
    trn_probe_close(&probe);
    trn_result_free(&result);
}
END_TEST

// What does not fit into a model's context goes from the front; what is scored stays.
START_TEST(long_readings_lose_their_beginning) {
    enum { MOST = 24 };
    eng_tokenizer *tokenizer = NULL;
    trn_work *whole = NULL, *cut = NULL;
    const eng_config config = {.bos_id = 0, .eos_id = {0}, .eos_count = 1};
    trn_encoder encoder = {.tokenizer = tokenizer, .config = &config, .examples = "", .context = 64, .most = -1};
    ck_assert_int_eq(eng_tokenizer_open(demo, 0, &tokenizer, NULL), ENG_OK);
    encoder.tokenizer = tokenizer;
    for (int most = 0; most < 2; most++) {
        trn_item item = {.generate = 8};
        encoder.most = most ? MOST : -1;
        ck_assert_int_eq(trn_item_add(&item,
                                      "The eldest of the king's three sons went out into the wide world to seek his "
                                      "fortune, and so did the second, and they forgot the way",
                                      "home again", NULL),
                         ENG_OK);
        ck_assert_int_eq(trn_work_create(&encoder, &item, 0, most ? &cut : &whole, NULL), ENG_OK);
    }
    const trn_reading *a = whole->passage.reading, *b = cut->passage.reading;
    ck_assert_int_eq(whole->truncated, 0);
    ck_assert_int_eq(cut->truncated, 2);
    ck_assert_int_eq(b[0].count, MOST);
    ck_assert_int_eq(b[1].count + b[1].generate, MOST);
    ck_assert_int_eq(a[0].count - a[0].first, b[0].count - b[0].first);
    for (int i = 1; i <= b[0].count; i++)
        ck_assert_int_eq(a[0].ids[a[0].count - i], b[0].ids[b[0].count - i]);
    trn_work_free(whole);
    trn_work_free(cut);
    eng_tokenizer_close(tokenizer);
}
END_TEST

// Drawing ends with an accepted answer or at the end of the first line that has text.
START_TEST(an_answer_ends_with_its_line) {
    static const struct {
        const char *text;
        bool stops, right;
    } drawn[] = {{" the king", false, false},
                 {" the KING'S son", true, true},
                 {"\n", false, false},
                 {"\nthe king", false, false},
                 {" a queen\nthe king's son", true, false}};
    eng_tokenizer *tokenizer = NULL;
    ck_assert_int_eq(eng_tokenizer_open(demo, 0, &tokenizer, NULL), ENG_OK);
    const eng_config config = {.bos_id = 0, .eos_id = {0}, .eos_count = 1};
    const trn_encoder encoder = {.tokenizer = tokenizer, .config = &config, .examples = "", .context = 64, .most = -1};
    for (size_t i = 0; i < sizeof drawn / sizeof *drawn; i++) {
        trn_item item = {.generate = 64};
        trn_work *work = NULL;
        trn_result_row row;
        int32_t *ids = NULL;
        size_t count = 0;
        ck_assert_int_eq(trn_item_add(&item, "Who?", "the king's son", NULL), ENG_OK);
        ck_assert_int_eq(trn_item_accept(&item, "king's son", NULL), ENG_OK);
        ck_assert_int_eq(trn_work_create(&encoder, &item, 0, &work, NULL), ENG_OK);
        ck_assert_int_eq(
            eng_tokenizer_encode(tokenizer, drawn[i].text, strlen(drawn[i].text), false, false, &ids, &count, NULL),
            ENG_OK);
        trn_reading *reading = &work->passage.reading[1];
        memcpy(reading->drawn, ids, sizeof *ids * count);
        reading->drawn_count = (int32_t)count;
        const trn_reading *scored = &work->passage.reading[0];
        memset(scored->logprob, 0, sizeof(float) * (size_t)(scored->count - scored->first));
        ck_assert_int_eq(trn_work_stops(&encoder, work, reading), drawn[i].stops);
        ck_assert_int_eq(trn_result_row_create("t", 1, &row, NULL), ENG_OK);
        ck_assert_int_eq(trn_work_record(&encoder, work, &row, NULL), ENG_OK);
        ck_assert_msg((trn_result_find(&row, "contains")->value[0] == 1) == drawn[i].right, "%s", drawn[i].text);
        trn_result_row_free(&row);
        trn_work_free(work);
        free(ids);
    }
    eng_tokenizer_close(tokenizer);
}
END_TEST

START_TEST(overlap_and_domain_are_marked) {
    trn_result result;
    char task[512], out[512], data[512];
    static const char line[] = "the old king of the hills had three sons who went into the wide world alone";
    snprintf(task, sizeof task, "%s", temp_path("t.jsonl"));
    snprintf(out, sizeof out, "%s", temp_path("out.json"));
    snprintf(data, sizeof data, "%s", temp_path("packed"));
    char text[512], source[512];
    snprintf(text, sizeof text, "{\"ctx\":\"%s\",\"target\":\"end\"}\n{\"ctx\":\"a\",\"target\":\"b\"}\n", line);
    write_text("t.jsonl", text);
    snprintf(text, sizeof text, "And then %s and never came home.\n", line);
    write_text("source.txt", text);
    snprintf(source, sizeof source, "%s", temp_path("source.txt"));
    const char *pack[] = {"pack", "--tokenizer", demo, "--out", data, source, NULL};
    ck_assert_int_eq(trn_command_pack(6, (char **)pack), TRN_EXIT_OK);
    const char *eval[] = {"eval", demo, "--task", task, "--out", out, "--overlap", data, "--in-domain", "t", NULL};
    ck_assert_int_eq(trn_command_eval(10, (char **)eval), TRN_EXIT_OK);
    ck_assert_int_eq(trn_result_read(out, &result, NULL), ENG_OK);
    ck_assert(result.row[0].overlap[0] && !result.row[0].overlap[1] && result.row[0].in_domain);
    trn_result_free(&result);
}
END_TEST

START_TEST(bad_command_lines_are_refused) {
    const char *both[] = {"eval", demo, "--data", "d", "--task", "t", NULL};
    ck_assert_int_eq(trn_command_eval(6, (char **)both), TRN_EXIT_USAGE);
    const char *setting[] = {"eval", demo, "--needles", "256", "--solver", "step:3", NULL};
    ck_assert_int_eq(trn_command_eval(6, (char **)setting), TRN_EXIT_USAGE);
    const char *length[] = {"eval", demo, "--pairs", "256,x", NULL};
    ck_assert_int_eq(trn_command_eval(4, (char **)length), TRN_EXIT_USAGE);
    const char *value[] = {"eval", demo, "--needles", "256", "--value", "colour", NULL};
    ck_assert_int_eq(trn_command_eval(6, (char **)value), TRN_EXIT_USAGE);
    write_text("two.jsonl", "{\"ctx\":\"a\",\"target\":\"b\"}\n{\"ctx\":\"a\",\"target\":\"b\"}\n");
    const char *shots[] = {"eval", demo, "--task", temp_path("two.jsonl"), "--shots", "2", NULL};
    ck_assert_int_eq(trn_command_eval(6, (char **)shots), TRN_EXIT_USAGE);
}
END_TEST

static Suite *eval_tasks_suite(void) {
    Suite *suite = suite_create("eval_tasks");
    TCase *cases = tcase_create("tasks");
    tcase_add_checked_fixture(cases, temp_folder_make, temp_folder_remove);
    tcase_set_timeout(cases, 60);
    tcase_add_loop_test(cases, readings_are_those_of_served_logits, 0, 3);
    tcase_add_test(cases, continuations_share_all_of_their_context);
    tcase_add_test(cases, readings_without_a_wish_are_refused);
    tcase_add_test(cases, choices_and_targets_are_scored_right);
    tcase_add_test(cases, results_do_not_depend_on_the_batch);
    tcase_add_test(cases, texts_are_scored_in_windows);
    tcase_add_test(cases, long_readings_lose_their_beginning);
    tcase_add_test(cases, an_answer_ends_with_its_line);
    tcase_add_test(cases, overlap_and_domain_are_marked);
    tcase_add_test(cases, bad_command_lines_are_refused);
    suite_add_tcase(suite, cases);
    return suite;
}

MESA_TEST_MAIN(eval_tasks_suite)
