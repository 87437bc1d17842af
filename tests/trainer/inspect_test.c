// SPDX-License-Identifier: Apache-2.0
// inspect: the bytes that a layer of each mixer keeps for a session, against the formulas by hand.
//
// One model has a layer of every kind, with its keys in its entry of layer_types.
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/files.h"
#include "tests/check_main.h"
#include "tests/engine/small_models.h"
#include "tests/engine/temp_folder.h"
#include "trainer/commands.h"

// d = 64. S: states, then the windows of W - 1 = 3 columns; every part here is a multiple of 64 bytes.
static const struct {
    const char *entry, *line;
} layers[] = {
    // 8 H D^2 + 2 H D (W - 1) s
    {"{\"mixer\": \"mesa_net\", \"num_heads\": 2, \"head_dim\": 32}", "mesa_net 1 x 17,920 bytes"},
    // 4 HV K V + (W - 1) s (2 H K + HV V)
    {"{\"mixer\": \"gated_deltanet\", \"num_heads\": 1, \"num_v_heads\": 2, \"head_dim\": 32, \"expand_v\": 1}",
     "gated_deltanet 1 x 9,728 bytes"},
    {"{\"mixer\": \"kda\", \"num_heads\": 2, \"head_dim\": 32}", "kda 1 x 10,496 bytes"},
    // 4 H K V + (W - 1) s (2 key_dim + value_dim)
    {"{\"mixer\": \"delta_net\", \"num_heads\": 2, \"expand_v\": 2}", "delta_net 1 x 19,456 bytes"},
    // 4 Hkv K V, windows only with a convolution
    {"{\"mixer\": \"gla\", \"num_heads\": 2}", "gla 1 x 4,096 bytes"},
    {"{\"mixer\": \"gla\", \"num_heads\": 2, \"num_kv_heads\": 1, \"use_short_conv\": true}", "gla 1 x 3,008 bytes"},
    // 4 H K V
    {"{\"mixer\": \"retnet\", \"num_heads\": 2, \"num_kv_heads\": 1}", "retnet 1 x 16,384 bytes"},
    // 4 Hkv K' V + 4 Hkv K', K' = 2 K of hedgehog
    {"{\"mixer\": \"linear_attn\", \"num_heads\": 2, \"feature_map\": \"hedgehog\", \"norm_feature_map\": true}",
     "linear_attn 1 x 16,896 bytes"},
    // 4 DI N + (DI + 2 G N) (W - 1) s
    {"{\"mixer\": \"mamba2\", \"head_dim\": 32, \"state_size\": 16}", "mamba2 1 x 10,112 bytes"},
    // 4 H (dqk dv + dqk + 1)
    {"{\"mixer\": \"mlstm\", \"num_heads\": 16}", "mlstm 1 x 704 bytes"},
    // 4 R + R (cw - 1) s
    {"{\"mixer\": \"rglru\", \"num_attention_heads\": 2}", "rglru 1 x 1,024 bytes"},
    // 2 Hkv hd T s
    {"{\"mixer\": \"attention\", \"num_heads\": 4, \"num_kv_heads\": 2, \"window_size\": 24}",
     "attention 1 x 6,144 bytes"},
    {"{\"mixer\": \"attention\", \"num_heads\": 4, \"num_kv_heads\": 2}", "attention 2 x 0 bytes, 256 a token"},
    {"{\"mixer\": \"attention\", \"num_heads\": 4, \"num_kv_heads\": 2}", "attention 2 x 0 bytes, 256 a token"},
    {"{\"mixer\": \"recurrence\", \"num_heads\": 2, \"head_dim\": 32}", "recurrence 1 x 10,496 bytes"},
};
static const char *const halves[] = {", matrices in bf16", "recurrence 1 x 6,400 bytes", "attention 1 x 6,144 bytes"};
// With the last output, 64 floats.
static const char *const sums[] = {"(126,720 bytes)", "KV 512 bytes a token"};

// What the command prints with --summary, runs of spaces as one.
static char *summary_of(const char *dir, const char *storage) {
    const char *path = temp_path("printed");
    fflush(stdout);
    int file = open(path, O_CREAT | O_TRUNC | O_WRONLY, 0600), kept = dup(STDOUT_FILENO);
    ck_assert(file >= 0 && kept >= 0 && dup2(file, STDOUT_FILENO) >= 0);
    const char *arguments[] = {"inspect", dir, "--summary", "--state-storage", storage, NULL};
    int status = trn_command_inspect(5, (char **)arguments);
    fflush(stdout);
    ck_assert(dup2(kept, STDOUT_FILENO) >= 0);
    close(file);
    close(kept);
    ck_assert_int_eq(status, TRN_EXIT_OK);
    char *text;
    size_t length, at = 0;
    ck_assert_int_eq(eng_read_file(path, 1 << 20, &text, &length, NULL), ENG_OK);
    for (size_t i = 0; i < length; i++) {
        if (text[i] != ' ' || at == 0 || text[at - 1] != ' ')
            text[at++] = text[i];
    }
    text[at] = '\0';
    return text;
}

START_TEST(bytes_of_every_mixer) {
    char config[4096];
    size_t count = sizeof layers / sizeof *layers;
    int length = snprintf(config, sizeof config,
                          "{\"model_type\": \"mesa_net\", \"vocab_size\": 40, \"hidden_size\": 64,"
                          "\"intermediate_size\": 32, \"num_hidden_layers\": %zu, \"layer_types\": [",
                          count);
    for (size_t i = 0; i < count; i++)
        length += snprintf(config + length, sizeof config - (size_t)length, "%s%s", i ? ", " : "", layers[i].entry);
    ck_assert_int_lt(length, (int)sizeof config - 3);
    strcat(config, "]}");
    small_model small = {"every mixer", config, true, true};
    small_checkpoint(temp_path("model"), &small, NULL, false);
    char *text = summary_of(temp_path("model"), "float32");
    for (size_t i = 0; i < count; i++)
        ck_assert_msg(strstr(text, layers[i].line), "no '%s' in\n%s", layers[i].line, text);
    for (size_t i = 0; i < sizeof sums / sizeof *sums; i++)
        ck_assert_msg(strstr(text, sums[i]), "no '%s' in\n%s", sums[i], text);
    free(text);
    text = summary_of(temp_path("model"), "bf16"); // matrices alone
    for (size_t i = 0; i < sizeof halves / sizeof *halves; i++)
        ck_assert_msg(strstr(text, halves[i]), "no '%s' in\n%s", halves[i], text);
    free(text);
}
END_TEST

START_TEST(bytes_of_what_waits) {
    static const struct {
        const char *more, *line; // line NULL: nothing can wait; 192 bytes beside the vectors
    } cases[] = {
        {", \"num_loops\": 4", "waiting tokens 49,344 bytes a session more"}, // 3 loops, 64 vectors of 64 floats
        {", \"num_loops\": 4, \"loop_residual_gate\": true", "waiting tokens 98,496 bytes a session more"},
        {"", NULL},
        {", \"num_loops\": 4, \"loop_blocks\": [0]", NULL}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char config[512], folder[16];
        snprintf(config, sizeof config,
                 "{\"model_type\": \"mesa_net\", \"vocab_size\": 40, \"hidden_size\": 64, \"num_heads\": 2,"
                 "\"head_dim\": 32, \"intermediate_size\": 32, \"num_hidden_layers\": 2%s}",
                 cases[i].more);
        snprintf(folder, sizeof folder, "model-%zu", i);
        small_checkpoint(temp_path(folder), &(small_model){"looped", config, true, true}, NULL, false);
        char *text = summary_of(temp_path(folder), "float32");
        ck_assert_msg(cases[i].line ? strstr(text, cases[i].line) != NULL : !strstr(text, "waiting"), "%s", text);
        free(text);
    }
}
END_TEST

static Suite *inspect_suite(void) {
    Suite *suite = suite_create("inspect");
    TCase *cases = tcase_create("inspect");
    tcase_add_checked_fixture(cases, temp_folder_make, temp_folder_remove);
    tcase_add_test(cases, bytes_of_every_mixer);
    tcase_add_test(cases, bytes_of_what_waits);
    suite_add_tcase(suite, cases);
    return suite;
}

MESA_TEST_MAIN(inspect_suite)
