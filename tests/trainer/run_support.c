// SPDX-License-Identifier: Apache-2.0
// Tiny shards and runs for the trainer's tests; see run_support.h.
// Ids are a fixed function of document and place, so that tests can compute what a row must hold.
#include "tests/trainer/run_support.h"

#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char mesa_model[] =
    "model_type = mesa_net\nhidden_size = 32\nnum_hidden_layers = 2\nnum_heads = 2\nhead_dim = 16\n"
    "intermediate_size = 64\ntie_word_embeddings = true\ninitializer_range = 0.1\n";
const char hybrid_model[] =
    "model_type = mesa_net\nhidden_size = 32\nnum_hidden_layers = 3\nnum_heads = 2\nhead_dim = 16\n"
    "intermediate_size = 64\ntie_word_embeddings = false\ninitializer_range = 0.1\n"
    "attn = {\"layers\": [1], \"num_heads\": 2, \"num_kv_heads\": 1}\n";

int32_t document_id(int document, int place) {
    uint32_t mixed = (uint32_t)document * 2654435761U + (uint32_t)place * 40503U + (uint32_t)(place * place) * 17U;
    return 3 + (int32_t)((mixed >> 5) % (TEST_VOCABULARY - 3));
}

void write_documents(const char *name, const int *lengths, int documents) {
    static const uint8_t tokenizer[TRN_TOKENIZER_DIGEST] = {1, 2, 3};
    trn_shard_writer *writer = NULL;
    eng_error error = {0};
    ck_assert_int_eq(trn_shard_writer_create(temp_path(name), tokenizer, TEST_VOCABULARY, 1 << 20, &writer, &error),
                     ENG_OK);
    for (int d = 0; d < documents; d++) {
        int32_t *ids = malloc(sizeof *ids * ((size_t)lengths[d] + 1));
        for (int i = 0; i < lengths[d]; i++)
            ids[i] = document_id(d, i);
        ck_assert_int_eq(
            trn_shard_writer_add(writer, ids, (uint32_t)lengths[d], 3 * (uint32_t)lengths[d], (uint64_t)d, &error),
            ENG_OK);
        free(ids);
    }
    ck_assert_int_eq(trn_shard_writer_finish(writer, NULL, NULL, NULL, &error), ENG_OK);
    trn_shard_writer_free(writer);
}

const char *write_run(const char *model, const char *data, int context, const char *more) {
    char text[4096];
    int length = snprintf(text, sizeof text,
                          "[model]\n%svocab_size = %d\nbos_token_id = %d\neos_token_id = %d\n"
                          "[data]\ntrain = %s\nvalid = %s\ncontext = %d\n%s",
                          model, TEST_VOCABULARY, TEST_BOS, TEST_EOS, temp_path(data), temp_path(data), context, more);
    ck_assert_int_lt(length, (int)sizeof text);
    temp_write("run.ini", text, (size_t)length);
    return temp_path("run.ini");
}

void open_run(const char *path, trn_run *run) {
    trn_run_config config;
    eng_error error = {0};
    eng_status status = trn_run_config_read(path, NULL, 0, &config, &error);
    if (status == ENG_OK)
        status = trn_run_open(&config, NULL, run, &error);
    if (status == ENG_OK)
        status = trn_run_start(run, &error);
    ck_assert_msg(status == ENG_OK, "%s", error.text);
}

kern_device *open_device(void) {
    kern_device *device = NULL;
    char reason[160] = "";
    ck_assert_msg(kern_device_open(&(kern_device_options){.name = "cpu"}, &device, reason, sizeof reason) == KERN_OK,
                  "%s", reason);
    return device;
}
