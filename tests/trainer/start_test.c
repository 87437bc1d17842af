// SPDX-License-Identifier: Apache-2.0
// Start weights from another model: what is taken, repeated or left, a student that computes what its teacher does, and
// what the table says of it.
#include "trainer/start.h"

#include <stdlib.h>
#include <string.h>

#include "tests/check_main.h"
#include "tests/trainer/run_support.h"

enum { CONTEXT = 24 };

#define LLAMA                                                                                               \
    "model_type = llama\nhidden_size = 48\nnum_hidden_layers = 3\nnum_attention_heads = 6\nhead_dim = 8\n"  \
    "intermediate_size = 80\ntie_word_embeddings = false\ninitializer_range = 0.2\nattention_bias = true\n" \
    "num_key_value_heads = "
static const char llama_model[] = LLAMA "2\n", unrolled_model[] = LLAMA "6\n";
// As wide, of fewer layers and other mixers.
static const char delta_model[] =
    "model_type = gated_deltanet\nhidden_size = 48\nnum_hidden_layers = 2\nnum_heads = 6\nhead_dim = 8\nexpand_v = 1\n"
    "intermediate_size = 80\ntie_word_embeddings = false\ninitializer_range = 0.2\n";
static const char gemma_model[] =
    "model_type = recurrent_gemma\nhidden_size = 48\nnum_hidden_layers = 4\nnum_attention_heads = 6\nhead_dim = 8\n"
    "intermediate_size = 160\nlru_width = 48\nblock_types = [\"recurrent\"]\n";

static const char plan[] = "[optim]\nlr = 0\n[solver]\nmode = exact\n[train]\nsteps = 5\nbatch_tokens = 48\nseed = ";

static void write_data(void) {
    const int lengths[] = {40, 9, 21};
    write_documents("d", lengths, 3);
}

static void open_seeded(const char *model, int seed, const char *more, trn_run *run) {
    char text[2048];
    snprintf(text, sizeof text, "%s%d\n%s", plan, seed, more);
    open_run(write_run(model, "d", CONTEXT, text), run);
}

// A folder NAME with the model's start values of another seed, norms and biases made uneven; *run stays open.
static const char *write_source(const char *name, const char *model, trn_run *run) {
    open_seeded(model, 9, "", run);
    for (int32_t t = 0; t < run->model->tensors; t++)
        for (int64_t i = 0; run->model->tensor[t].ndim == 1 && i < run->model->tensor[t].count; i++)
            run->weights->master[t][i] += 0.01F * (float)(i % 7) - 0.02F;
    ck_assert_int_eq(eng_checkpoint_save(temp_path(name), run->weights, ENG_F32, NULL, NULL), ENG_OK);
    return temp_path(name);
}

static void open_started(const char *model, const char *source, trn_run *run) {
    char more[512];
    snprintf(more, sizeof more, "start_from = %s\n", source);
    open_seeded(model, 1, more, run);
}

static const float *values(const trn_run *run, const char *name, int64_t *count) {
    const int32_t t = eng_model_find(run->model, name);
    ck_assert_msg(t >= 0, "no %s", name);
    *count = run->model->tensor[t].count;
    return run->weights->master[t];
}

static void same_values(const trn_run *a, const char *name, const trn_run *b, const char *other) {
    int64_t count = 0, wanted = 0;
    const float *x = values(a, name, &count), *y = values(b, other, &wanted);
    ck_assert_int_eq(count, wanted);
    ck_assert_msg(memcmp(x, y, sizeof *x * (size_t)count) == 0, "%s", name);
}

static void says(const trn_run *run, const char *line) {
    ck_assert_msg(strstr(run->start, line) != NULL, "no \"%s\" in:\n%s", line, run->start);
}

START_TEST(the_same_model_is_taken_whole) {
    trn_run source, run;
    write_data();
    write_source("source", _i ? hybrid_model : llama_model, &source);
    open_started(_i ? hybrid_model : llama_model, temp_path("source"), &run);
    ck_assert_mem_eq(run.weights->masters, source.weights->masters, sizeof(float) * (size_t)run.weights->count);
    says(&run, "\n100.0 % of ");
    ck_assert_ptr_null(strstr(run.start, "its own"));
    trn_run_close(&run);
    trn_run_close(&source);
}
END_TEST

// Key head g of 2 becomes heads 3 g, 3 g + 1, 3 g + 2 of 6, and the model computes the same: it diverges from itself by
// nothing.
START_TEST(a_student_with_heads_of_its_own_computes_the_same) {
    trn_run source, run;
    trn_step_report report;
    char more[1024];
    int64_t count = 0;
    write_data();
    write_source("source", llama_model, &source);
    snprintf(more, sizeof more, "start_from = %s\n[teacher]\nmodel = %s\nloss_share = 0\n", temp_path("source"),
             temp_path("source"));
    open_seeded(unrolled_model, 1, more, &run);
    says(&run, "| model.layers.*.self_attn.k_proj.weight | 3 | taken, every head 3 times |");
    says(&run, "| model.layers.*.self_attn.v_proj.bias | 3 | taken, every head 3 times |");
    says(&run, "\n100.0 % of ");
    const float *few = values(&source, "model.layers.1.self_attn.k_proj.weight", &count);
    const float *many = values(&run, "model.layers.1.self_attn.k_proj.weight", &count);
    for (int head = 0; head < 6; head++)
        ck_assert_mem_eq(many + head * 8 * 48, few + head / 3 * 8 * 48, sizeof *few * 8 * 48);
    ck_assert_int_eq(trn_run_step(&run, &report, NULL), ENG_OK);
    ck_assert_double_lt(fabs(report.divergence), 1e-6);
    ck_assert_double_lt(report.gradient_norm, 1e-5);
    trn_run_close(&run);
    trn_run_close(&source);
}
END_TEST

START_TEST(another_mixer_takes_the_projections) {
    trn_run source, run, fresh;
    write_data();
    write_source("source", llama_model, &source);
    open_started(delta_model, temp_path("source"), &run);
    open_seeded(delta_model, 1, "", &fresh);
    const char *const pairs[][2] = {
        {"model.embeddings.weight", "model.embed_tokens.weight"},
        {"lm_head.weight", "lm_head.weight"},
        {"model.norm.weight", "model.norm.weight"},
        {"model.layers.1.attn_norm.weight", "model.layers.1.input_layernorm.weight"},
        {"model.layers.1.mlp_norm.weight", "model.layers.1.post_attention_layernorm.weight"},
        {"model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp.down_proj.weight"},
        {"model.layers.1.attn.q_proj.weight", "model.layers.1.self_attn.q_proj.weight"},
        {"model.layers.1.attn.o_proj.weight", "model.layers.1.self_attn.o_proj.weight"},
    };
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
        same_values(&run, pairs[i][0], &source, pairs[i][1]);
    const char *const own[] = {"model.layers.0.attn.a_proj.weight", "model.layers.1.attn.A_log",
                               "model.layers.1.attn.o_norm.weight", "model.layers.0.attn.k_conv1d.weight"};
    for (size_t i = 0; i < sizeof own / sizeof *own; i++)
        same_values(&run, own[i], &fresh, own[i]);
    says(&run, "| model.layers.*.attn.v_proj.weight | 2 | taken, every head 3 times |");
    says(&run, "| model.layers.*.attn.A_log | 2 | its own: another mixer there |");
    trn_run_close(&run);
    trn_run_close(&fresh);
    trn_run_close(&source);
}
END_TEST

// Other widths, more layers, another scale of embeddings, norms that count from 1.
START_TEST(what_does_not_fit_is_told) {
    trn_run source, run, gemma;
    int64_t count = 0;
    write_data();
    write_source("source", delta_model, &source);
    write_source("gemma", gemma_model, &gemma);
    open_started(llama_model, temp_path("source"), &run);
    says(&run, "| model.layers.*.self_attn.k_proj.weight | 2 | its own: 48 x 48 there |");
    says(&run, "| model.layers.*.self_attn.k_proj.weight | 1 | its own: fewer layers there |");
    says(&run, "| model.layers.*.self_attn.q_proj.bias | 2 | its own: another mixer there |");
    trn_run_close(&run);
    open_started(llama_model, temp_path("gemma"), &run);
    says(&run, "| model.embed_tokens.weight | 0 | its own: scale_embeddings differs |");
    const float *norm = values(&run, "model.norm.weight", &count),
                *other = gemma.weights->master[gemma.model->final_norm];
    for (int64_t i = 0; i < count; i++)
        ck_assert_float_eq(norm[i], other[i] + 1);
    trn_run_close(&run);
    trn_run_close(&gemma);
    trn_run_close(&source);
}
END_TEST

static void refused(const char *model, const char *more, const char *words) {
    trn_run_config config;
    trn_run run = {0};
    char text[2048];
    eng_error error = {0};
    snprintf(text, sizeof text, "%s1\n%s", plan, more);
    eng_status status = trn_run_config_read(write_run(model, "d", CONTEXT, text), NULL, 0, &config, &error);
    if (status == ENG_OK)
        status = trn_run_open(&config, NULL, &run, &error);
    if (status == ENG_OK) {
        status = trn_run_start(&run, &error);
        trn_run_close(&run);
    }
    ck_assert_int_eq(status, ENG_INVALID);
    ck_assert_msg(strstr(error.text, words) != NULL, "%s", error.text);
}

START_TEST(what_cannot_start_is_refused) {
    trn_run source;
    char more[1024];
    write_data();
    write_source("source", mesa_model, &source);
    trn_run_close(&source);
    snprintf(more, sizeof more, "start_from = %s\nwarm_start = %s\n", temp_path("source"), temp_path("source"));
    refused(mesa_model, more, "a run starts from one of them");
    snprintf(more, sizeof more, "start_from = %s\n", temp_path("source"));
    refused(delta_model, more, "source: no tensor has the part and the shape of one of this model");
}
END_TEST

static Suite *start_suite(void) {
    Suite *suite = suite_create("start");
    TCase *cases = tcase_create("weights");
    tcase_add_checked_fixture(cases, temp_folder_make, temp_folder_remove);
    tcase_set_timeout(cases, 60);
    tcase_add_loop_test(cases, the_same_model_is_taken_whole, 0, 2);
    tcase_add_test(cases, a_student_with_heads_of_its_own_computes_the_same);
    tcase_add_test(cases, another_mixer_takes_the_projections);
    tcase_add_test(cases, what_does_not_fit_is_told);
    tcase_add_test(cases, what_cannot_start_is_refused);
    suite_add_tcase(suite, cases);
    return suite;
}

MESA_TEST_MAIN(start_suite)
