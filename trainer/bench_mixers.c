// SPDX-License-Identifier: Apache-2.0
// Every mixer at equal width: what its state costs, and how fast it reads and generates on this machine.
//
// The models differ in their mixer alone: random weights in 4 blocks of width 512 with the same MLP, 4 heads of 128 by
// 128 where there are heads (the RG-LRU has 1.25 channels a channel of the model, as in the MesaNet paper). One model
// at a time; medians over the rounds. Prints a Markdown table.
#include <stdio.h>
#include <string.h>

#include "trainer/bench.h"
#include "trainer/progress.h"

enum { TOGETHER = 32, MOST_ROUNDS = 99 };

const trn_mixer_model trn_mixer_models[TRN_MIXER_MODELS] = {
    {"attention", "attention", ""},
    {"attention, window 512", "attention", ", \"window_size\": 512"},
    {"mesa_net", "mesa_net", ""},
    {"delta_net", "delta_net", ""},
    {"gated_deltanet", "gated_deltanet", ", \"expand_v\": 1"},
    {"kda", "kda", ""},
    {"mamba2", "mamba2", ", \"expand\": 1, \"state_size\": 128"},
    {"gla", "gla", ", \"expand_k\": 1"},
    {"mlstm", "mlstm", ", \"qk_dim_factor\": 1"},
    {"linear_attn", "linear_attn", ""},
    {"retnet", "retnet", ", \"expand_v\": 1"},
    {"hawk", "rglru", ", \"lru_width\": 640, \"num_attention_heads\": 4"},
    {"recurrence, scalar decay", "recurrence", ", \"recurrence\": {\"decay\": \"scalar\"}"},
};

eng_status trn_mixer_model_create(const trn_mixer_model *mixer, eng_model **out, eng_error *error) {
    char json[768];
    snprintf(json, sizeof json,
             "{\"model_type\": \"mesa_net\", \"vocab_size\": 4096, \"hidden_size\": 512, \"num_hidden_layers\": 4, "
             "\"num_heads\": 4, \"head_dim\": 128, \"intermediate_size\": 1408, \"tie_word_embeddings\": true, "
             "\"layer_types\": [\"%s\", \"%s\", \"%s\", \"%s\"]%s}",
             mixer->mixer, mixer->mixer, mixer->mixer, mixer->mixer, mixer->keys);
    eng_config config;
    eng_status status = eng_config_parse(json, strlen(json), mixer->name, &config, error);
    return status == ENG_OK ? eng_model_create(&config, out, error) : status;
}

// Tokens a second, medians over the rounds.
typedef struct rates {
    double prefill, alone, together;
} rates;

static eng_status time_decode(const eng_weights *weights, int32_t sessions, int32_t steps, int32_t rounds, double *rate,
                              eng_error *error) {
    trn_decode_bench decode = {0};
    double value[MOST_ROUNDS];
    kern_solver solver = trn_model_solver(weights->model);
    eng_status status = trn_decode_bench_create(weights, sessions, steps * rounds, solver, &decode, error);
    for (int32_t round = 0; status == ENG_OK && round < rounds; round++) {
        double start = trn_seconds();
        status = trn_decode_bench_run(&decode, steps, error);
        value[round] = (double)sessions * steps / (trn_seconds() - start);
    }
    trn_decode_bench_free(&decode);
    if (status == ENG_OK)
        *rate = trn_median(value, rounds);
    return status;
}

static eng_status time_prefill(const eng_weights *weights, int32_t prompt, int32_t rounds, double *rate,
                               eng_error *error) {
    trn_serve_bench serve = {0};
    trn_speed prefill, decode;
    double value[MOST_ROUNDS];
    eng_status status = trn_serve_bench_create(weights, prompt, 1, &serve, error);
    if (status == ENG_OK)
        status = trn_serve_bench_run(&serve, &prefill, &decode, error); // pages are touched; not counted
    for (int32_t round = 0; status == ENG_OK && round < rounds; round++) {
        status = trn_serve_bench_run(&serve, &prefill, &decode, error);
        value[round] = (double)prefill.tokens / prefill.seconds;
    }
    trn_serve_bench_free(&serve);
    if (status == ENG_OK)
        *rate = trn_median(value, rounds);
    return status;
}

static eng_status time_model(const eng_weights *weights, int32_t prompt, int32_t steps, int32_t rounds, rates *out,
                             eng_error *error) {
    eng_status status = time_prefill(weights, prompt, rounds, &out->prefill, error);
    if (status == ENG_OK)
        status = time_decode(weights, 1, steps, rounds, &out->alone, error);
    return status == ENG_OK ? time_decode(weights, TOGETHER, steps, rounds, &out->together, error) : status;
}

static void print_row(const char *name, const eng_model *model, const rates *r) {
    char state[64];
    int used = snprintf(state, sizeof state, "%zu", model->state_bytes);
    if (eng_model_has_pages(model))
        snprintf(state + used, sizeof state - (size_t)used, " + %zu a token", model->page_bytes / KERN_PAGE_TOKENS);
    printf("| %s | %llu | %s | %.0f | %.0f | %.0f |\n", name, (unsigned long long)model->parameters, state, r->prefill,
           r->alone, r->together);
    fflush(stdout);
}

static eng_status bench_mixer(kern_device *device, const trn_mixer_model *mixer, int32_t prompt, int32_t steps,
                              int32_t rounds, eng_error *error) {
    eng_model *model = NULL;
    eng_weights *weights = NULL;
    rates r;
    eng_status status = trn_mixer_model_create(mixer, &model, error);
    if (status == ENG_OK)
        status = eng_weights_init(model, device, 1, KERN_BF16, &weights, error);
    if (status == ENG_OK)
        status = time_model(weights, prompt, steps, rounds, &r, error);
    if (status == ENG_OK)
        print_row(mixer->name, model, &r);
    eng_weights_free(weights);
    eng_model_free(model);
    return status;
}

eng_status trn_bench_mixers(kern_device *device, int32_t prompt, int32_t steps, int32_t rounds, eng_error *error) {
    eng_status status = ENG_OK;
    if (rounds < 1 || rounds > MOST_ROUNDS || steps < 1 || prompt < 1)
        return eng_fail(error, ENG_INVALID, "rounds: 1 to %d, with a prompt and a step at least", (int)MOST_ROUNDS);
    printf("%s; prompts of %d, %d steps a round, medians of %d rounds; rates in tokens/s\n\n"
           "| mixer | parameters | state bytes a session | prefill | 1 session | %d sessions "
           "|\n|---|---|---|---|---|---|\n",
           kern_device_describe(device)->description, prompt, steps, rounds, (int)TOGETHER);
    for (int i = 0; status == ENG_OK && i < TRN_MIXER_MODELS; i++)
        status = bench_mixer(device, &trn_mixer_models[i], prompt, steps, rounds, error);
    return status;
}
