// SPDX-License-Identifier: Apache-2.0
// Saving: bit for bit there and back, what stands in the folder, replacing, and a full disk that costs nothing.
//
// A limit on the size of files stands for the full disk: writes beyond it fail in the same way.
#include <dirent.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "engine/files.h"
#include "tests/check_main.h"
#include "tests/engine/temp_folder.h"
#include "tests/engine/tensor_bag.h"

static const char config_json[] =
    "{\"model_type\": \"mesa_net\", \"vocab_size\": 40, \"hidden_size\": 32, \"num_hidden_layers\": 2,"
    "\"intermediate_size\": 48, \"num_heads\": 4, \"head_dim\": 16, \"use_output_gate\": true, \"trained_length\": 512,"
    "\"attn\": {\"layers\": [1], \"num_heads\": 4, \"num_kv_heads\": 2}, \"dtype\": null, \"note\": \"k\\u00fcpt\","
    "\"limit\": [0.0, Infinity], \"tie_word_embeddings\": true, \"eos_token_id\": [4, 6], \"pad_token_id\": 9,"
    "\"gamma_cap_b\": 0.9975}";

static kern_device *device;

static eng_weights *start(eng_model *model, uint64_t seed) {
    eng_weights *weights = NULL;
    eng_error error = {0};
    ck_assert_msg(eng_weights_init(model, device, seed, false, &weights, &error) == ENG_OK, "%s", error.text);
    return weights;
}

static void save(const char *name, const eng_weights *weights, eng_dtype dtype) {
    eng_error error = {0};
    ck_assert_msg(eng_checkpoint_save(temp_path(name), weights, dtype, NULL, &error) == ENG_OK, "%s", error.text);
}

static eng_checkpoint *open_folder(const char *name) {
    eng_checkpoint *checkpoint = NULL;
    eng_error error = {0};
    ck_assert_msg(eng_checkpoint_open(temp_path(name), &checkpoint, &error) == ENG_OK, "%s", error.text);
    return checkpoint;
}

static eng_weights *load(const eng_checkpoint *checkpoint) {
    eng_weights *weights = NULL;
    eng_error error = {0};
    ck_assert_msg(eng_weights_load(checkpoint, device, true, &weights, &error) == ENG_OK, "%s", error.text);
    return weights;
}

static char *read_text(const char *name) {
    char *text;
    size_t length;
    ck_assert_int_eq(eng_read_file(temp_path(name), 1 << 24, &text, &length, NULL), ENG_OK);
    return text;
}

static int entries(const char *path) {
    DIR *folder = opendir(path);
    ck_assert_ptr_nonnull(folder);
    int count = 0;
    for (struct dirent *entry; (entry = readdir(folder));)
        count += strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0;
    closedir(folder);
    return count;
}

START_TEST(there_and_back_bit_for_bit) {
    eng_model *model = model_from(config_json);
    eng_weights *weights = start(model, 3);
    save("first", weights, ENG_F32);
    eng_checkpoint *first = open_folder("first");
    eng_weights *loaded = load(first);
    ck_assert_int_eq(loaded->count, weights->count);
    float *before = master_values(weights), *after = master_values(loaded);
    ck_assert_mem_eq(before, after, (size_t)weights->count * sizeof *before);
    save("second", loaded, ENG_F32);
    eng_checkpoint *second = open_folder("second");
    uint8_t digest[2][32];
    ck_assert_int_eq(eng_checkpoint_digest(first, digest[0], NULL), ENG_OK);
    ck_assert_int_eq(eng_checkpoint_digest(second, digest[1], NULL), ENG_OK);
    ck_assert_mem_eq(digest[0], digest[1], 32);
    free(before);
    free(after);
    eng_weights_free(loaded);
    eng_checkpoint_close(second);
    eng_checkpoint_close(first);
    eng_weights_free(weights);
    eng_model_free(model);
}
END_TEST

START_TEST(bf16_rounds_once) {
    eng_model *model = model_from(config_json);
    eng_weights *weights = start(model, 3);
    save("model", weights, ENG_BF16);
    eng_checkpoint *checkpoint = open_folder("model");
    eng_weights *loaded = load(checkpoint);
    float *before = master_values(weights), *after = master_values(loaded);
    for (int64_t i = 0; i < weights->count; i++)
        ck_assert(after[i] == eng_bf16_to_f32(eng_bf16_from_f32(before[i])));
    free(before);
    free(after);
    eng_weights_free(loaded);
    eng_checkpoint_close(checkpoint);
    eng_weights_free(weights);
    eng_model_free(model);
}
END_TEST

START_TEST(start_is_the_seeds) {
    eng_model *model = model_from(config_json);
    eng_weights *weights[3] = {start(model, 5), start(model, 5), start(model, 6)};
    float *values[3];
    for (int i = 0; i < 3; i++)
        values[i] = master_values(weights[i]);
    size_t bytes = (size_t)weights[0]->count * sizeof(float);
    ck_assert_mem_eq(values[0], values[1], bytes);
    ck_assert_mem_ne(values[0], values[2], bytes);
    double square = 0;
    const eng_tensor *embed = &model->tensor[model->embed];
    const float *first = values[0] + (weights[0]->master[model->embed] - weights[0]->masters);
    for (int64_t i = 0; i < embed->count; i++)
        square += (double)first[i] * first[i] / (double)embed->count;
    ck_assert_double_eq_tol(sqrt(square), 0.02, 0.002);
    int32_t bias = eng_model_find(model, "model.layers.0.attn.a_proj.bias");
    const float *horizon = values[0] + (weights[0]->master[bias] - weights[0]->masters);
    for (int i = 0; i < 4; i++) { // 4 heads: 4, 4 * 128^(1/3) ... 512 tokens
        double decay = 1 / (1 + exp(-(double)horizon[i]));
        ck_assert_double_eq_tol(1 / (1 - decay) / (4 * pow(128, i / 3.0)), 1, 1e-4);
    }
    for (int i = 0; i < 3; i++) {
        for (int32_t j = 0; j < model->tensors; j++) {
            ck_assert_int_eq((weights[i]->master[j] - weights[i]->masters) % 16, 0);
            ck_assert_int_eq(weights[i]->grad[j] - weights[i]->grads, weights[i]->master[j] - weights[i]->masters);
        }
        free(values[i]);
        eng_weights_free(weights[i]);
    }
    eng_model_free(model);
}
END_TEST

START_TEST(what_stands_in_the_folder) {
    temp_write("tokenizer.json", "{\"t\": 1}", 8);
    temp_write("tokenizer_config.json", "{}", 2);
    temp_write("unrelated.json", "{}", 2);
    eng_model *model = model_from(config_json);
    eng_weights *weights = start(model, 1);
    eng_error error = {0};
    ck_assert_msg(eng_checkpoint_save(temp_path("model"), weights, ENG_BF16, temp_folder(), &error) == ENG_OK, "%s",
                  error.text);
    ck_assert_int_eq(entries(temp_path("model")), 5);
    ck_assert(temp_holds("model/tokenizer.json", "{\"t\": 1}") && temp_holds("model/tokenizer_config.json", "{}"));
    char *config = read_text("model/config.json"), *generation = read_text("model/generation_config.json");
    static const char *const kept[] = {"\"torch_dtype\": \"bfloat16\"",
                                       "\"dtype\": \"bfloat16\"",
                                       "MesaNetForCausalLM",
                                       "Infinity\n",
                                       "\"gamma_cap_b\": 0.997",
                                       "küpt"};
    for (size_t i = 0; i < sizeof kept / sizeof kept[0]; i++)
        ck_assert_msg(strstr(config, kept[i]), "config.json lacks %s:\n%s", kept[i], config);
    ck_assert_ptr_null(strstr(config, "\"Infinity"));
    ck_assert_ptr_nonnull(strstr(generation, "\"eos_token_id\": [\n    4,\n    6\n  ]"));
    ck_assert_ptr_nonnull(strstr(generation, "\"pad_token_id\": 9"));
    free(config);
    free(generation);
    eng_st_file *file;
    ck_assert_int_eq(eng_st_open(temp_path("model/model.safetensors"), &file, NULL), ENG_OK);
    ck_assert_str_eq(eng_st_metadata(file, "format"), "pt");
    ck_assert_int_eq((int)eng_st_count(file), model->tensors);
    ck_assert_ptr_null(eng_st_find(file, "lm_head.weight")); // tied: one copy and the flag
    eng_st_close(file);
    eng_weights_free(weights);
    eng_model_free(model);
}
END_TEST

START_TEST(replaces_a_checkpoint_only) {
    eng_model *model = model_from(config_json);
    eng_weights *weights = start(model, 1), *other = start(model, 2);
    save("model", weights, ENG_F32);
    save("model", other, ENG_F32);
    eng_checkpoint *checkpoint = open_folder("model");
    eng_weights *loaded = load(checkpoint);
    float *wanted = master_values(other), *found = master_values(loaded);
    ck_assert_mem_eq(wanted, found, (size_t)other->count * sizeof *wanted);
    free(wanted);
    free(found);
    eng_weights_free(loaded);
    eng_checkpoint_close(checkpoint);
    ck_assert_int_eq(entries(temp_folder()), 1);
    ck_assert_int_eq(mkdir(temp_path("mine"), 0700), 0);
    temp_write("mine/thesis.txt", "words", 5);
    temp_write("file", "words", 5);
    eng_error error = {0};
    ck_assert_int_eq(eng_checkpoint_save(temp_path("mine"), weights, ENG_F32, NULL, &error), ENG_INVALID);
    ck_assert_ptr_nonnull(strstr(error.text, "mine: exists and is no checkpoint"));
    ck_assert_int_eq(eng_checkpoint_save(temp_path("file"), weights, ENG_F32, NULL, NULL), ENG_INVALID);
    ck_assert(temp_holds("mine/thesis.txt", "words") && temp_holds("file", "words"));
    eng_weights_free(other);
    eng_weights_free(weights);
    eng_model_free(model);
}
END_TEST

START_TEST(refusals_leave_nothing) {
    eng_model *model = model_from(config_json);
    eng_weights *weights = start(model, 1), *serving = NULL;
    ck_assert_int_eq(eng_weights_init(model, device, 1, true, &serving, NULL), ENG_OK);
    ck_assert_int_eq(eng_checkpoint_save(temp_path("a"), serving, ENG_F32, NULL, NULL), ENG_INVALID);
    ck_assert_int_eq(eng_checkpoint_save(temp_path("a"), weights, ENG_F16, NULL, NULL), ENG_INVALID);
    ck_assert_int_eq(eng_checkpoint_save(temp_path("a"), weights, ENG_F32, temp_folder(), NULL), ENG_NOT_FOUND);
    ck_assert_int_eq(eng_checkpoint_save(temp_path("no/a"), weights, ENG_F32, NULL, NULL), ENG_NOT_FOUND);
    const float poison[2] = {NAN, 3.4e38F}; // the second rounds to infinity as bf16 only
    kern_stream *stream;
    ck_assert_int_eq(kern_stream_open(device, &stream), KERN_OK);
    for (int i = 0; i < 2; i++) {
        ck_assert_int_eq(kern_upload(stream, weights->master[model->layer[1].up_proj], &poison[i], 4), KERN_OK);
        ck_assert_int_eq(kern_synchronize(stream), KERN_OK);
        eng_error error = {0};
        ck_assert_int_eq(eng_checkpoint_save(temp_path("a"), weights, i ? ENG_BF16 : ENG_F32, NULL, &error),
                         ENG_NUMERIC);
        ck_assert_ptr_nonnull(strstr(error.text, "model.layers.1.mlp.up_proj.weight': 1 of"));
    }
    kern_stream_close(stream);
    ck_assert_int_eq(entries(temp_folder()), 0);
    eng_weights_free(serving);
    eng_weights_free(weights);
    eng_model_free(model);
}
END_TEST

START_TEST(full_disk_keeps_the_old_one) {
    eng_model *model = model_from(config_json);
    eng_weights *weights = start(model, 1), *other = start(model, 2);
    save("model", weights, ENG_F32);
    limit_file_size(20000);
    eng_error error = {0};
    ck_assert_int_eq(eng_checkpoint_save(temp_path("model"), other, ENG_F32, NULL, &error), ENG_IO);
    ck_assert_ptr_nonnull(strstr(error.text, "model.safetensors"));
    ck_assert_int_eq(eng_checkpoint_save(temp_path("new"), other, ENG_F32, NULL, NULL), ENG_IO);
    ck_assert_int_eq(entries(temp_folder()), 1);
    eng_checkpoint *checkpoint = open_folder("model");
    eng_weights *loaded = load(checkpoint);
    float *wanted = master_values(weights), *found = master_values(loaded);
    ck_assert_mem_eq(wanted, found, (size_t)weights->count * sizeof *wanted);
    free(wanted);
    free(found);
    eng_weights_free(loaded);
    eng_checkpoint_close(checkpoint);
    eng_weights_free(other);
    eng_weights_free(weights);
    eng_model_free(model);
}
END_TEST

static void set_up(void) {
    temp_folder_make();
    device = open_cpu();
}

static void tear_down(void) {
    kern_device_close(device);
    temp_folder_remove();
}

static Suite *checkpoint_save_suite(void) {
    Suite *suite = suite_create("checkpoint_save");
    TCase *all = tcase_create("checkpoint_save");
    tcase_add_checked_fixture(all, set_up, tear_down);
    tcase_set_timeout(all, 60);
    tcase_add_test(all, there_and_back_bit_for_bit);
    tcase_add_test(all, bf16_rounds_once);
    tcase_add_test(all, start_is_the_seeds);
    tcase_add_test(all, what_stands_in_the_folder);
    tcase_add_test(all, replaces_a_checkpoint_only);
    tcase_add_test(all, refusals_leave_nothing);
    tcase_add_test(all, full_disk_keeps_the_old_one);
    suite_add_tcase(suite, all);
    return suite;
}

MESA_TEST_MAIN(checkpoint_save_suite)
