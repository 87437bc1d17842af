// SPDX-License-Identifier: Apache-2.0
// The table of mixers at equal width: what a session costs follows from the formulas of the literature, layer by layer.
// Sizes are written out here once more, so that a key that a model's configuration ignores is noticed.
#include "trainer/bench.h"

#include "engine/mixer.h"
#include "tests/check_main.h"

enum { LAYERS = 4, H = 4, K = 128, V = 128, TAPS = 3, FLOAT = 4 };

// Bytes of a layer: recurrent part, then the earlier inputs of the convolutions. KV bytes of a token for attention.
static const struct {
    const char *name;
    size_t state, token;
} wanted[TRN_MIXER_MODELS] = {
    {"attention", 0, 2 * H *K *FLOAT},
    {"attention, window 512", (size_t)2 * H *K * 512 * FLOAT, 0},
    {"mesa_net", 2 * H *K *K *FLOAT + 2 * H *K *TAPS *FLOAT, 0}, // of queries and keys
    {"delta_net", H *K *V *FLOAT + 3 * H *K *TAPS *FLOAT, 0},
    {"gated_deltanet", H *K *V *FLOAT + 3 * H *K *TAPS *FLOAT, 0},
    {"kda", H *K *V *FLOAT + 3 * H *K *TAPS *FLOAT, 0},
    {"mamba2", 512 * 128 * FLOAT + (512 + 2 * 128) * TAPS *FLOAT, 0},
    {"gla", H *K *V *FLOAT, 0},
    {"mlstm", H *(K *V + K + 1) * FLOAT, 0},
    {"linear_attn", H *K *V *FLOAT, 0},
    {"retnet", H *K *V *FLOAT, 0},
    {"hawk", 640 * FLOAT + 640 * TAPS *FLOAT, 0},
    {"recurrence, scalar decay", H *K *V *FLOAT + 3 * H *K *TAPS *FLOAT, 0},
};

START_TEST(states_cost_what_they_should) {
    for (int i = 0; i < TRN_MIXER_MODELS; i++) {
        eng_model *model = NULL;
        eng_error error = {0};
        ck_assert_msg(trn_mixer_model_create(&trn_mixer_models[i], &model, &error) == ENG_OK, "%s", error.text);
        ck_assert_str_eq(trn_mixer_models[i].name, wanted[i].name);
        ck_assert_int_eq(model->config.layers, LAYERS);
        for (int32_t layer = 0; layer < LAYERS; layer++)
            ck_assert_str_eq(model->config.layer[layer].mixer->name, trn_mixer_models[i].mixer);
        size_t state = LAYERS * wanted[i].state, padding = LAYERS * 2 * 64; // parts begin at multiples of 64
        ck_assert_msg(model->final_offset >= state && model->final_offset < state + padding, "%s: %zu bytes, not %zu",
                      wanted[i].name, model->final_offset, state);
        ck_assert_uint_eq(model->page_bytes, LAYERS * wanted[i].token * KERN_PAGE_TOKENS);
        eng_model_free(model);
    }
}
END_TEST

START_TEST(medians_are_in_the_middle) {
    double odd[] = {5, 1, 9}, even[] = {4, 1, 3, 100};
    ck_assert(trn_median(odd, 3) == 5);
    ck_assert(trn_median(even, 4) == 3.5 && even[0] == 1 && even[3] == 100);
}
END_TEST

static Suite *bench_suite(void) {
    Suite *suite = suite_create("bench");
    TCase *cases = tcase_create("bench");
    tcase_add_test(cases, states_cost_what_they_should);
    tcase_add_test(cases, medians_are_in_the_middle);
    suite_add_tcase(suite, cases);
    return suite;
}

MESA_TEST_MAIN(bench_suite)
