// SPDX-License-Identifier: Apache-2.0
// Opening checkpoint folders and loading their weights: what fits, what does not and is named, shards, legacy, NaN.
//
// Each case starts from a good folder, made by the writer, and changes one thing. The golden folders are optional.
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "engine/files.h"
#include "tests/check_main.h"
#include "tests/engine/temp_folder.h"
#include "tests/engine/tensor_bag.h"

#define CONFIG(vocabulary, hidden, layers, more)                                                           \
    "{\"model_type\": \"mesa_net\", \"vocab_size\": " vocabulary ", \"hidden_size\": " hidden              \
    ", \"num_hidden_layers\": " layers ", \"intermediate_size\": 48, \"num_heads\": 2, \"head_dim\": 16, " \
    "\"attn\": {\"layers\": [1], \"num_heads\": 4, \"num_kv_heads\": 2}" more "}"
#define PLAIN CONFIG("40", "32", "2", "")
#define TIED CONFIG("40", "32", "2", ", \"tie_word_embeddings\": true")

static const char weights_path[] = "model/model.safetensors";
static const char config_path[] = "model/config.json";

static void write_text(const char *name, const char *text) {
    temp_write(name, text, strlen(text));
}

static void expect_open(void) {
    eng_checkpoint *checkpoint = NULL;
    eng_error error = {0};
    ck_assert_msg(eng_checkpoint_open(temp_path("model"), &checkpoint, &error) == ENG_OK, "%s", error.text);
    eng_checkpoint_close(checkpoint);
}

static void expect_refused(eng_status wanted, const char *const words[]) {
    eng_checkpoint *checkpoint = NULL;
    eng_error error = {0};
    eng_status status = eng_checkpoint_open(temp_path("model"), &checkpoint, &error);
    ck_assert_msg(status == wanted, "status %d, wanted %d: %s", status, wanted, error.text);
    ck_assert_ptr_null(checkpoint);
    for (; *words; words++)
        ck_assert_msg(strstr(error.text, *words), "'%s' does not hold '%s'", error.text, *words);
    ck_assert_int_eq(eng_checkpoint_open(temp_path("model"), &checkpoint, NULL), wanted);
}
#define EXPECT_REFUSED(status, ...) expect_refused(status, (const char *const[]){__VA_ARGS__, NULL})

static eng_status load(bool trainable, eng_error *error) {
    kern_device *device = open_cpu();
    eng_checkpoint *checkpoint = NULL;
    eng_weights *weights = NULL;
    ck_assert_int_eq(eng_checkpoint_open(temp_path("model"), &checkpoint, error), ENG_OK);
    eng_status status = eng_weights_load(checkpoint, device, trainable, &weights, error);
    ck_assert(status == ENG_OK || !weights);
    eng_weights_free(weights);
    eng_checkpoint_close(checkpoint);
    kern_device_close(device);
    return status;
}

// ---- files and tensors that do not fit the config

START_TEST(config_that_does_not_fit) {
    static const struct {
        const char *json, *tensor, *wanted, *found;
    } cases[] = {
        {CONFIG("104", "32", "2", ""), "model.embeddings.weight", "[104, 32]", "[40, 32]"},
        {CONFIG("39", "32", "2", ""), "model.embeddings.weight", "[39, 32]", "[40, 32]"},
        {CONFIG("40", "64", "2", ""), "model.embeddings.weight", "[40, 64]", "[40, 32]"},
        {CONFIG("40", "32", "3", ""), "model.layers.2.attn_norm.weight", "missing", "[32]"},
        {CONFIG("40", "32", "2", ", \"lambda_lower_bound\": 0.5, \"use_output_gate\": true"),
         "model.layers.0.attn.g_proj.weight", "missing", "[32, 32]"},
        {CONFIG("40", "32", "2", ", \"conv_size\": 3"), "model.layers.0.attn.q_conv1d.weight", "[32, 1, 3]",
         "[32, 1, 4]"},
    };
    make_checkpoint(temp_path("model"), PLAIN, 1);
    expect_open();
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        write_text(config_path, cases[i].json);
        EXPECT_REFUSED(ENG_FORMAT, cases[i].tensor, cases[i].wanted, cases[i].found);
    }
    // One layer less: the second layer's tensors are not this model's.
    write_text(config_path,
               "{\"model_type\": \"mesa_net\", \"vocab_size\": 40, \"hidden_size\": 32, \"num_hidden_layers\": 1,"
               "\"intermediate_size\": 48, \"num_heads\": 2, \"head_dim\": 16}");
    EXPECT_REFUSED(ENG_FORMAT, "model.safetensors", "tensor 'model.layers.1.", "is not one of this model");
    write_text(config_path, CONFIG("40", "32", "2", ", \"num_heads_\": 3, \"head_dim\": 500"));
    EXPECT_REFUSED(ENG_FORMAT, "config.json", "duplicate");
    write_text(config_path, PLAIN);
    expect_open();
}
END_TEST

static void transpose_shape(tensor_bag *bag) {
    eng_st_source *tensor = bag_find(bag, "model.layers.1.mlp.up_proj.weight");
    tensor->shape[0] = 32;
    tensor->shape[1] = 48;
}
static void drop_norm(tensor_bag *bag) {
    bag_remove(bag, "model.norm.weight");
}
static void rename_norm(tensor_bag *bag) {
    bag_rename(bag, "model.norm.weight", "model.norm.scale");
}
static void add_unknown(tensor_bag *bag) {
    bag_add(bag, "model.layers.0.attn.k_proj.bias", 1, (int64_t[]){2}, (float[]){1, 2});
}
static void add_rank(tensor_bag *bag) {
    eng_st_source *tensor = bag_find(bag, "model.norm.weight");
    tensor->ndim = 2;
    tensor->shape[1] = 1;
}
static void make_integer(tensor_bag *bag) {
    bag_find(bag, "model.norm.weight")->dtype = ENG_I32;
}

START_TEST(tensors_that_do_not_fit) {
    static const struct {
        void (*change)(tensor_bag *bag);
        eng_status status;
        const char *words[3];
    } cases[] = {
        {transpose_shape, ENG_FORMAT, {"'model.layers.1.mlp.up_proj.weight'", "is [32, 48]", "asks for [48, 32]"}},
        {drop_norm, ENG_FORMAT, {"'model.norm.weight'", "is missing", "[32]"}},
        {rename_norm, ENG_FORMAT, {"'model.norm.weight'", "is missing", "[32]"}},
        {add_unknown,
         ENG_FORMAT,
         {"'model.layers.0.attn.k_proj.bias'", "is not one of this model", "model.safetensors"}},
        {add_rank, ENG_FORMAT, {"'model.norm.weight'", "is [32, 1]", "asks for [32]"}},
        {make_integer, ENG_UNSUPPORTED, {"'model.norm.weight'", "type is I32", "F32, F16 or BF16"}},
    };
    make_checkpoint(temp_path("model"), PLAIN, 1);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        tensor_bag bag;
        bag_read(&bag, temp_path(weights_path));
        cases[i].change(&bag);
        make_checkpoint(temp_path("model"), PLAIN, 1);
        bag_write(&bag, temp_path(weights_path));
        bag_free(&bag);
        EXPECT_REFUSED(cases[i].status, cases[i].words[0], cases[i].words[1], cases[i].words[2]);
        make_checkpoint(temp_path("model"), PLAIN, 1);
    }
    expect_open();
}
END_TEST

START_TEST(missing_files) {
    EXPECT_REFUSED(ENG_NOT_FOUND, "model: cannot open");
    temp_write("model", "", 0);
    EXPECT_REFUSED(ENG_FORMAT, "model: not a folder");
    ck_assert_int_eq(unlink(temp_path("model")), 0);
    ck_assert_int_eq(mkdir(temp_path("model"), 0700), 0);
    EXPECT_REFUSED(ENG_NOT_FOUND, "config.json");
    ck_assert_int_eq(rmdir(temp_path("model")), 0);
    make_checkpoint(temp_path("model"), PLAIN, 1);
    ck_assert_int_eq(unlink(temp_path(weights_path)), 0);
    EXPECT_REFUSED(ENG_NOT_FOUND, "model", "neither model.safetensors nor model.safetensors.index.json");
}
END_TEST

START_TEST(truncated_file) {
    make_checkpoint(temp_path("model"), PLAIN, 1);
    FILE *file = fopen(temp_path(weights_path), "rb");
    ck_assert_int_eq(fseek(file, 0, SEEK_END), 0);
    long size = ftell(file);
    fclose(file);
    const long lengths[] = {size - 1, size - 4096, size / 2, 100, 8, 0};
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        ck_assert_int_eq(truncate(temp_path(weights_path), lengths[i]), 0);
        EXPECT_REFUSED(ENG_FORMAT, "model.safetensors");
    }
}
END_TEST

START_TEST(file_cut_while_open) {
    make_checkpoint(temp_path("model"), PLAIN, 1);
    kern_device *device = open_cpu();
    eng_checkpoint *checkpoint = NULL;
    ck_assert_int_eq(eng_checkpoint_open(temp_path("model"), &checkpoint, NULL), ENG_OK);
    ck_assert_int_eq(truncate(temp_path(weights_path), 4096), 0);
    eng_weights *weights = NULL;
    eng_error error = {0};
    ck_assert_int_eq(eng_weights_load(checkpoint, device, false, &weights, &error), ENG_IO);
    ck_assert_ptr_null(weights);
    ck_assert_ptr_nonnull(strstr(error.text, "model.safetensors"));
    eng_checkpoint_close(checkpoint);
    kern_device_close(device);
}
END_TEST

// ---- strays, tied heads, legacy

START_TEST(stray_files_are_not_read) {
    make_checkpoint(temp_path("model"), PLAIN, 1);
    write_text("model/old.safetensors", "garbage");
    write_text("model/model.safetensors.index.json", "{\"weight_map\": {\"x\": \"old.safetensors\"}}");
    expect_open(); // the single file wins
    ck_assert_int_eq(unlink(temp_path(weights_path)), 0);
    EXPECT_REFUSED(ENG_FORMAT, "old.safetensors"); // now the index is read, and it fails for its own shard
}
END_TEST

START_TEST(tied_heads) {
    static const char head[] = "lm_head.weight", embed[] = "model.embeddings.weight";
    make_checkpoint(temp_path("model"), TIED, 1);
    tensor_bag bag;
    bag_read(&bag, temp_path(weights_path));
    for (size_t i = 0; i < bag.count; i++)
        ck_assert_str_ne(bag.tensor[i].name, head);
    bag_add(&bag, head, 2, (int64_t[]){40, 32}, bag_data(&bag, embed));
    bag_write(&bag, temp_path(weights_path));
    expect_open(); // both names, equal values
    bag_data(&bag, head)[40 * 32 - 1] += 1;
    bag_write(&bag, temp_path(weights_path));
    EXPECT_REFUSED(ENG_FORMAT, "'lm_head.weight' differs from 'model.embeddings.weight'", "tie_word_embeddings");
    bag_remove(&bag, embed);
    bag_write(&bag, temp_path(weights_path));
    expect_open(); // the head's name alone
    bag_remove(&bag, head);
    bag_write(&bag, temp_path(weights_path));
    EXPECT_REFUSED(ENG_FORMAT, "'model.embeddings.weight' is missing");
    bag_free(&bag);
    make_checkpoint(temp_path("model"), TIED, 1);
    write_text(config_path, PLAIN); // the flag flipped
    EXPECT_REFUSED(ENG_FORMAT, "'lm_head.weight' is missing", "[40, 32]");
    make_checkpoint(temp_path("model"), PLAIN, 1);
    write_text(config_path, TIED);
    EXPECT_REFUSED(ENG_FORMAT, "'lm_head.weight' differs");
}
END_TEST

START_TEST(legacy_tensors) {
    make_checkpoint(temp_path("model"), PLAIN, 1);
    tensor_bag bag;
    bag_read(&bag, temp_path(weights_path));
    bag_add(&bag, "model.layers.0.attn.D", 1, (int64_t[]){2}, (float[]){1, 2});
    bag_add(&bag, "model.layers.1.self_attn.rotary_emb.inv_freq", 1, (int64_t[]){2}, (float[]){1, 2});
    bag_write(&bag, temp_path(weights_path));
    expect_open();
    bag_rename(&bag, "model.layers.0.attn.D", "model.layers.0.attn.DD");
    bag_write(&bag, temp_path(weights_path));
    EXPECT_REFUSED(ENG_FORMAT, "'model.layers.0.attn.DD' is not one of this model");
    bag_free(&bag);
}
END_TEST

START_TEST(generation_config_sets_eos) {
    make_checkpoint(temp_path("model"), PLAIN, 1);
    write_text("model/generation_config.json", "{\"eos_token_id\": [3, 5]}");
    eng_checkpoint *checkpoint = NULL;
    ck_assert_int_eq(eng_checkpoint_open(temp_path("model"), &checkpoint, NULL), ENG_OK);
    const eng_config *config = &eng_checkpoint_model(checkpoint)->config;
    ck_assert(config->eos_count == 2 && config->eos_id[0] == 3 && config->eos_id[1] == 5);
    eng_checkpoint_close(checkpoint);
    write_text("model/generation_config.json", "{\"eos_token_id\": \"</s>\"}");
    EXPECT_REFUSED(ENG_FORMAT, "generation_config.json", "eos_token_id");
    write_text("model/generation_config.json", "{\"eos");
    EXPECT_REFUSED(ENG_FORMAT, "generation_config.json");
}
END_TEST

// ---- NaN and infinity

static void poison(const char *name, eng_dtype dtype) {
    static const uint32_t patterns[] = {0x7fc00000, 0x7f800000, 0xff800000, 0x7f810000}; // exact in bf16
    make_checkpoint(temp_path("model"), PLAIN, 1);
    tensor_bag bag;
    bag_read(&bag, temp_path(weights_path));
    bag_set_dtype(&bag, dtype);
    memcpy(bag_data(&bag, name) + 3, patterns, sizeof patterns);
    bag_write(&bag, temp_path(weights_path));
    bag_free(&bag);
}

START_TEST(nonfinite_weights_are_counted) {
    static const char *const names[] = {"model.layers.1.attn.q_proj.weight", "model.layers.0.attn.lambda_params"};
    for (int i = 0; i < 8; i++) {
        const char *name = names[i & 1];
        poison(name, i & 2 ? ENG_BF16 : ENG_F32);
        expect_open(); // no weight is read yet
        eng_error error = {0};
        ck_assert_int_eq(load(i & 4, &error), ENG_NUMERIC);
        ck_assert_msg(strstr(error.text, name) && strstr(error.text, "4 of ") &&
                          strstr(error.text, "model.safetensors"),
                      "%s", error.text);
    }
}
END_TEST

// ---- shards

static const char first_shard[] = "model-00001-of-00002.safetensors",
                  second_shard[] = "model-00002-of-00002.safetensors";

static char *join(const char *folder, const char *name) {
    static char path[512];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static void write_index(const tensor_bag *bag, size_t first_count, const char *replaced, const char *replacement) {
    char *text = NULL;
    size_t length;
    FILE *stream = open_memstream(&text, &length);
    fprintf(stream, "{\"metadata\": {\"total_size\": 1}, \"weight_map\": {");
    for (size_t i = 0; i < bag->count; i++) {
        const char *shard = i < first_count ? first_shard : second_shard;
        if (replaced && strcmp(replaced, bag->tensor[i].name) == 0)
            shard = replacement;
        if (shard)
            fprintf(stream, "%s\"%s\": \"%s\"", i ? ", " : "", bag->tensor[i].name, shard);
    }
    fprintf(stream, "}}");
    fclose(stream);
    write_text("model/model.safetensors.index.json", text);
    free(text);
}

// The checkpoint in two shards; the bag keeps the tensors, the first first_count of them in the first shard.
static size_t shard_checkpoint(tensor_bag *bag) {
    make_checkpoint(temp_path("model"), PLAIN, 1);
    bag_read(bag, temp_path(weights_path));
    size_t first_count = bag->count / 2;
    tensor_bag part = *bag;
    part.count = first_count;
    bag_write(&part, join(temp_path("model"), first_shard));
    part.count = bag->count - first_count;
    memmove(part.tensor, part.tensor + first_count, part.count * sizeof *part.tensor);
    bag_write(&part, join(temp_path("model"), second_shard));
    write_index(bag, first_count, NULL, NULL);
    return first_count;
}

START_TEST(shards_load_like_one_file) {
    tensor_bag bag;
    kern_device *device = open_cpu();
    shard_checkpoint(&bag);
    bag_free(&bag);
    float *values[2];
    size_t bytes = 0;
    for (int i = 0; i < 2; i++) {
        eng_checkpoint *checkpoint = NULL;
        eng_weights *weights = NULL;
        eng_error error = {0};
        ck_assert_msg(eng_checkpoint_open(temp_path("model"), &checkpoint, &error) == ENG_OK, "%s", error.text);
        ck_assert_int_eq(eng_weights_load(checkpoint, device, true, &weights, NULL), ENG_OK);
        values[i] = master_values(weights);
        bytes = (size_t)weights->count * sizeof(float);
        eng_weights_free(weights);
        eng_checkpoint_close(checkpoint);
        if (i == 0)
            ck_assert_int_eq(unlink(temp_path(weights_path)), 0);
    }
    ck_assert_mem_eq(values[0], values[1], bytes);
    free(values[0]);
    free(values[1]);
    kern_device_close(device);
}
END_TEST

START_TEST(index_must_fit_its_shards) {
    tensor_bag bag;
    size_t first = shard_checkpoint(&bag);
    ck_assert_int_eq(unlink(temp_path(weights_path)), 0);
    expect_open();
    const char *moved = bag.tensor[0].name;
    write_index(&bag, first, moved, second_shard);
    EXPECT_REFUSED(ENG_FORMAT, "index.json", moved, "is not in", second_shard);
    write_index(&bag, first, moved, "sub/../model-00001-of-00002.safetensors");
    ck_assert_int_eq(mkdir(join(temp_path("model"), "sub"), 0700), 0);
    EXPECT_REFUSED(ENG_FORMAT, moved, "is no name of a .safetensors file");
    write_index(&bag, first, moved, "../model-00001-of-00002.safetensors");
    EXPECT_REFUSED(ENG_FORMAT, moved, "is no name of a .safetensors file");
    write_index(&bag, first, moved, ".safetensors");
    EXPECT_REFUSED(ENG_FORMAT, moved, "is no name of a .safetensors file");
    write_index(&bag, first, moved, "config.json");
    EXPECT_REFUSED(ENG_FORMAT, moved, "is no name of a .safetensors file");
    write_index(&bag, first, moved, "model-3.safetensors");
    EXPECT_REFUSED(ENG_NOT_FOUND, "model-3.safetensors");
    write_index(&bag, first, bag.tensor[bag.count - 1].name, NULL);
    EXPECT_REFUSED(ENG_FORMAT, bag.tensor[bag.count - 1].name, "is not mapped");
    static const char *const texts[] = {"{}", "{\"weight_map\": []}", "{\"weight_map\": {\"a\": 3}}", "[",
                                        "{\"weight_map\": {}}"};
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        write_text("model/model.safetensors.index.json", texts[i]);
        EXPECT_REFUSED(ENG_FORMAT, "");
    }
    write_index(&bag, first, NULL, NULL);
    expect_open();
    bag_free(&bag);
}
END_TEST

// ---- what is loaded

static int64_t f32_bytes(const eng_model *model, eng_role role) {
    int64_t bytes = 0;
    for (int32_t i = 0; i < model->tensors; i++)
        bytes += model->tensor[i].role == role ? 4 * model->tensor[i].count : 0;
    return bytes;
}

START_TEST(serving_keeps_the_files_type) {
    make_checkpoint(temp_path("model"), PLAIN, 1);
    kern_device *device = open_cpu();
    size_t bytes[2];
    for (int i = 0; i < 2; i++) {
        eng_checkpoint *checkpoint = NULL;
        eng_weights *weights = NULL;
        ck_assert_int_eq(eng_checkpoint_open(temp_path("model"), &checkpoint, NULL), ENG_OK);
        ck_assert_int_eq(eng_weights_load(checkpoint, device, false, &weights, NULL), ENG_OK);
        ck_assert(!weights->trainable && !weights->masters && !weights->master && !weights->grad);
        const eng_model *model = eng_checkpoint_model(checkpoint);
        for (int32_t j = 0; j < model->tensors + model->constants; j++)
            ck_assert_ptr_nonnull(weights->param[j]);
        bytes[i] = weights->bytes;
        ck_assert_int_gt((int64_t)bytes[i], f32_bytes(model, ENG_ROLE_VECTOR) + f32_bytes(model, ENG_ROLE_MATRIX) / 2);
        eng_weights_free(weights);
        eng_checkpoint_close(checkpoint);
        tensor_bag bag;
        bag_read(&bag, temp_path(weights_path));
        bag_set_dtype(&bag, ENG_BF16);
        bag_write(&bag, temp_path(weights_path));
        bag_free(&bag);
    }
    ck_assert_uint_lt(bytes[1], bytes[0] * 3 / 4);
    kern_device_close(device);
}
END_TEST

START_TEST(digest_follows_the_bytes) {
    uint8_t digest[4][32];
    make_checkpoint(temp_path("model"), PLAIN, 1);
    for (int i = 0; i < 4; i++) {
        if (i == 2)
            write_text(config_path, CONFIG("40", "32", "2", ", \"norm_eps\": 1e-5"));
        if (i == 3)
            make_checkpoint(temp_path("model"), PLAIN, 2);
        eng_checkpoint *checkpoint = NULL;
        ck_assert_int_eq(eng_checkpoint_open(temp_path("model"), &checkpoint, NULL), ENG_OK);
        ck_assert_int_eq(eng_checkpoint_digest(checkpoint, digest[i], NULL), ENG_OK);
        eng_checkpoint_close(checkpoint);
    }
    ck_assert_mem_eq(digest[0], digest[1], 32);
    ck_assert_mem_ne(digest[1], digest[2], 32);
    ck_assert_mem_ne(digest[1], digest[3], 32);
}
END_TEST

START_TEST(golden_folders) {
    static const struct {
        const char *folder;
        uint64_t parameters;
    } goldens[] = {
        {"mesa_net", 323592},       {"mesa_hybrid_swa", 434440}, {"mesa_long", 323592}, {"mesa_hybrid_long", 434440},
        {"mesa_gamma_cap", 323592}, {"transformer", 287360},     {"llama_hf", 254592},
    };
    char path[512], name[128];
    if (!mesa_test_shared("golden", path, sizeof path))
        MESA_TEST_SKIP("no golden models (MESA_SHARED)");
    kern_device *device = open_cpu();
    for (size_t i = 0; i < sizeof goldens / sizeof goldens[0]; i++) {
        snprintf(name, sizeof name, "golden/%s", goldens[i].folder);
        ck_assert(mesa_test_shared(name, path, sizeof path));
        eng_checkpoint *checkpoint = NULL;
        eng_weights *weights = NULL;
        eng_error error = {0};
        ck_assert_msg(eng_checkpoint_open(path, &checkpoint, &error) == ENG_OK, "%s", error.text);
        ck_assert_uint_eq(eng_checkpoint_model(checkpoint)->parameters, goldens[i].parameters);
        for (int trainable = 0; trainable < 2; trainable++) {
            ck_assert_msg(eng_weights_load(checkpoint, device, trainable, &weights, &error) == ENG_OK, "%s",
                          error.text);
            eng_weights_free(weights);
        }
        eng_checkpoint_close(checkpoint);
    }
    kern_device_close(device);
}
END_TEST

static Suite *checkpoint_suite(void) {
    Suite *suite = suite_create("checkpoint");
    TCase *all = tcase_create("checkpoint");
    tcase_add_checked_fixture(all, temp_folder_make, temp_folder_remove);
    tcase_set_timeout(all, 60);
    tcase_add_test(all, config_that_does_not_fit);
    tcase_add_test(all, tensors_that_do_not_fit);
    tcase_add_test(all, missing_files);
    tcase_add_test(all, truncated_file);
    tcase_add_test(all, file_cut_while_open);
    tcase_add_test(all, stray_files_are_not_read);
    tcase_add_test(all, tied_heads);
    tcase_add_test(all, legacy_tensors);
    tcase_add_test(all, generation_config_sets_eos);
    tcase_add_test(all, nonfinite_weights_are_counted);
    tcase_add_test(all, shards_load_like_one_file);
    tcase_add_test(all, index_must_fit_its_shards);
    tcase_add_test(all, serving_keeps_the_files_type);
    tcase_add_test(all, digest_follows_the_bytes);
    tcase_add_test(all, golden_folders);
    suite_add_tcase(suite, all);
    return suite;
}

MESA_TEST_MAIN(checkpoint_suite)
