// SPDX-License-Identifier: Apache-2.0
// Matrices in blocks: what rounding loses, what it keeps, which tensors it touches; folders that hold them, whole and
// damaged.
//
// A damaged folder is a good one of which one tensor of the file or one key of config.json was changed.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/quantize.h"
#include "engine/random.h"
#include "tests/check_main.h"
#include "tests/engine/temp_folder.h"
#include "tests/engine/tensor_bag.h"

static const char config_json[] =
    "{\"model_type\": \"mesa_net\", \"vocab_size\": 67, \"hidden_size\": 72, \"num_hidden_layers\": 2, "
    "\"intermediate_size\": 99, \"num_heads\": 2, \"head_dim\": 36, \"tie_word_embeddings\": true}";
static const char matrix_name[] = "model.layers.1.mlp.up_proj.weight";

// ---- rounding

static eng_blocks blocks_of(kern_dtype dtype, int64_t rows, int64_t cols, const float *values) {
    eng_blocks blocks;
    eng_error error = {0};
    ck_assert_int_eq(eng_blocks_create(dtype, rows, cols, false, &blocks, &error), ENG_OK);
    ck_assert_msg(eng_blocks_round(values, "matrix", &blocks, &error) == ENG_OK, "%s", error.text);
    return blocks;
}

START_TEST(rounding_loses_little) {
    enum { ROWS = 50 };
    static const int64_t widths[] = {1, 31, 32, 33, 64, 100};
    for (int i = 0; i < 12; i++) {
        const kern_dtype dtype = i % 2 ? KERN_Q4 : KERN_Q8;
        const int64_t cols = widths[i / 2];
        float values[ROWS * 100], widened[ROWS * 100];
        double lost = 0, size = 0;
        eng_normals(7, (uint64_t)i, 0, ROWS * cols, 0.02f, values);
        for (int64_t k = 0; k < cols; k++)
            values[k] = 0; // a row without a scale
        eng_blocks blocks = blocks_of(dtype, ROWS, cols, values);
        eng_blocks_widen(&blocks, widened);
        for (int64_t k = 0; k < ROWS * cols; k++) {
            const float scale = eng_f16_to_f32(blocks.scale[k / cols * eng_blocks_of_row(cols) + k % cols / 32]);
            lost += pow((double)widened[k] - (double)values[k], 2);
            size += pow((double)values[k], 2);
            if (dtype == KERN_Q8)
                ck_assert_double_le(fabs((double)(widened[k] - values[k])), 0.5001 * (double)scale);
            ck_assert(k >= cols || widened[k] == 0);
        }
        ck_assert_double_le(sqrt(lost / size), dtype == KERN_Q8 ? 0.007 : 0.09);
        eng_blocks again = blocks_of(dtype, ROWS, cols, widened);
        if (dtype == KERN_Q8 && cols % 32 == 0)
            ck_assert_mem_eq(again.code, blocks.code, (size_t)(ROWS * cols));
        eng_blocks_free(&again);
        eng_blocks_free(&blocks);
    }
}
END_TEST

// Values on a block's own grid come back as they are, for any scale that float16 has.
START_TEST(the_grid_is_kept) {
    static const float scales[] = {0x1p-6f, -0x1.8p-3f, 1.5f, 0x1p-20f};
    for (size_t s = 0; s < sizeof scales / sizeof *scales; s++) {
        float values[64], widened[64];
        for (int i = 0; i < 64; i++)
            values[i] = scales[s] * (float)(i % 16 - 8);
        eng_blocks blocks = blocks_of(KERN_Q4, 2, 32, values);
        eng_blocks_widen(&blocks, widened);
        for (int i = 0; i < 64; i++)
            ck_assert(widened[i] == values[i]);
        eng_blocks_free(&blocks);
    }
}
END_TEST

START_TEST(minima_are_added) {
    eng_blocks blocks;
    ck_assert_int_eq(eng_blocks_create(KERN_Q4, 1, 33, true, &blocks, NULL), ENG_OK);
    memset(blocks.code, 0xf3, 17); // even columns 3, odd ones 15
    blocks.scale[0] = 0x3c00, blocks.scale[1] = 0x4000;
    blocks.minimum[0] = 0xc000, blocks.minimum[1] = 0x3800;
    float widened[33];
    eng_blocks_widen(&blocks, widened);
    ck_assert(widened[0] == 1 && widened[31] == 13 && widened[32] == 6.5f);
    eng_blocks_free(&blocks);
}
END_TEST

START_TEST(what_float16_cannot_scale_is_refused) {
    float values[40] = {0};
    values[35] = 1e7f;
    eng_error error = {0};
    for (int i = 0; i < 2; i++) {
        eng_blocks blocks;
        ck_assert_int_eq(eng_blocks_create(i ? KERN_Q4 : KERN_Q8, 1, 40, false, &blocks, &error), ENG_OK);
        ck_assert_int_eq(eng_blocks_round(values, "wide", &blocks, &error), ENG_NUMERIC);
        ck_assert_ptr_nonnull(strstr(error.text, "'wide'"));
        eng_blocks_free(&blocks);
    }
}
END_TEST

START_TEST(gates_norms_and_convolutions_are_left_alone) {
    static const char *const left[] = {"attn.a_proj.weight", "attn.b_proj.weight", "attn.q_conv1d.weight",
                                       "attn_norm.weight", "attn.lambda_params"};
    static const char *const touched[] = {"attn.q_proj.weight", "attn.o_proj.weight", "mlp.down_proj.weight"};
    eng_model *model = model_from(config_json);
    char name[ENG_NAME_SIZE];
    for (size_t i = 0; i < 8; i++) {
        const bool yes = i < 3;
        snprintf(name, sizeof name, "model.layers.0.%s", yes ? touched[i] : left[i - 3]);
        ck_assert_msg(eng_model_find(model, name) >= 0, "%s", name);
        const kern_dtype dtype = eng_quantized_dtype(model, eng_model_find(model, name), KERN_Q4);
        ck_assert_msg(dtype == (yes ? KERN_Q4 : KERN_F32), "%s", name);
    }
    ck_assert_int_eq(eng_quantized_dtype(model, model->embed, KERN_Q4), KERN_Q8);
    eng_model_free(model);
}
END_TEST

// ---- folders

static void make_quantized(kern_dtype dtype, eng_rounding *rounding) {
    kern_device *device = open_cpu();
    eng_model *model = model_from(config_json);
    eng_weights *weights = NULL;
    eng_error error = {0};
    ck_assert_int_eq(eng_weights_init(model, device, 5, KERN_F32, &weights, &error), ENG_OK);
    ck_assert_msg(eng_checkpoint_quantize(temp_path("model"), weights, dtype, NULL, rounding, &error) == ENG_OK, "%s",
                  error.text);
    eng_weights_free(weights);
    eng_model_free(model);
    kern_device_close(device);
}

static eng_status open_and_load(const char *name, bool trainable, kern_device *device, eng_checkpoint **checkpoint,
                                eng_weights **weights, eng_error *error) {
    *checkpoint = NULL, *weights = NULL;
    eng_status status = eng_checkpoint_open(temp_path(name), checkpoint, error);
    return status == ENG_OK ? eng_weights_load(*checkpoint, device, trainable, weights, error) : status;
}

// Training weights are the blocks widened; written as float32 they are a folder like any other.
START_TEST(a_folder_comes_back) {
    const kern_dtype dtype = _i ? KERN_Q4 : KERN_Q8;
    kern_device *device = open_cpu();
    eng_model *model = model_from(config_json);
    eng_weights *start = NULL, *serving, *widened, *plain;
    eng_checkpoint *checkpoint, *other;
    eng_error error = {0};
    eng_rounding *rounding = calloc((size_t)model->tensors, sizeof *rounding);
    make_quantized(dtype, rounding);
    ck_assert_int_eq(open_and_load("model", false, device, &checkpoint, &serving, &error), ENG_OK);
    ck_assert_uint_lt(serving->bytes, (dtype == KERN_Q8 ? 2 : 1) * model->parameters * 5 / 4);
    ck_assert_uint_le(eng_weights_measure(checkpoint), serving->bytes);
    eng_weights_free(serving);
    eng_checkpoint_close(checkpoint);

    ck_assert_int_eq(open_and_load("model", true, device, &checkpoint, &widened, &error), ENG_OK);
    ck_assert_int_eq(eng_weights_init(model, device, 5, KERN_F32, &start, &error), ENG_OK);
    float *before = master_values(start), *after = master_values(widened);
    for (int32_t i = 0; i < model->tensors; i++) {
        const int64_t at = start->master[i] - start->masters;
        double lost = 0;
        for (int64_t k = 0; k < model->tensor[i].count; k++)
            lost += pow((double)after[at + k] - (double)before[at + k], 2);
        ck_assert_double_eq_tol(lost, rounding[i].lost, 1e-12 + 1e-9 * lost);
        ck_assert_int_eq(rounding[i].size > 0, eng_quantized_dtype(model, i, dtype) != KERN_F32);
    }
    ck_assert_int_eq(eng_checkpoint_save(temp_path("plain"), widened, ENG_F32, NULL, &error), ENG_OK);
    ck_assert_msg(open_and_load("plain", true, device, &other, &plain, &error) == ENG_OK, "%s", error.text);
    ck_assert(!eng_checkpoint_model(other)->config.quantised);
    float *again = master_values(plain);
    ck_assert_mem_eq(again, after, (size_t)widened->count * sizeof *after);
    free(again), free(after), free(before), free(rounding);
    eng_weights_free(plain);
    eng_weights_free(widened);
    eng_weights_free(start);
    eng_checkpoint_close(other);
    eng_checkpoint_close(checkpoint);
    eng_model_free(model);
    kern_device_close(device);
}
END_TEST

// ---- damage

typedef struct tensors {
    eng_st_source source[BAG_TENSORS];
    char name[BAG_TENSORS][ENG_NAME_SIZE];
    size_t count;
} tensors;

static void read_tensors(tensors *all) {
    eng_st_file *file = NULL;
    ck_assert_int_eq(eng_st_open(temp_path("model/model.safetensors"), &file, NULL), ENG_OK);
    all->count = eng_st_count(file);
    for (size_t i = 0; i < all->count; i++) {
        const eng_st_entry *entry = eng_st_at(file, i);
        void *data = malloc(entry->bytes + 64); // a changed shape may ask for more
        ck_assert_int_eq(eng_st_read(file, entry, 0, entry->count, data, NULL), ENG_OK);
        strcpy(all->name[i], entry->name);
        all->source[i] =
            (eng_st_source){.name = all->name[i], .dtype = entry->dtype, .ndim = entry->ndim, .data = data};
        memcpy(all->source[i].shape, entry->shape, sizeof entry->shape);
    }
    eng_st_close(file);
}

static void write_tensors(tensors *all) {
    eng_error error = {0};
    ck_assert_msg(eng_st_write(temp_path("model/model.safetensors"), all->source, all->count, NULL, &error) == ENG_OK,
                  "%s", error.text);
    for (size_t i = 0; i < all->count; i++)
        free((void *)(uintptr_t)all->source[i].data);
}

static eng_st_source *find_tensor(tensors *all, const char *suffix) {
    for (size_t i = 0; i < all->count; i++)
        if (strncmp(all->name[i], matrix_name, strlen(matrix_name)) == 0 &&
            strcmp(all->name[i] + strlen(matrix_name), suffix) == 0)
            return &all->source[i];
    ck_abort_msg("no %s%s", matrix_name, suffix);
    return NULL;
}

static void no_scale(tensors *all) {
    strcpy(all->name[find_tensor(all, ".scale") - all->source], "model.elsewhere");
}
static void float_scale(tensors *all) {
    eng_st_source *scale = find_tensor(all, ".scale");
    scale->dtype = ENG_I16;
}
static void short_scale(tensors *all) {
    find_tensor(all, ".scale")->shape[1]--;
}
static void flat_scale(tensors *all) {
    eng_st_source *scale = find_tensor(all, ".scale");
    scale->shape[0] *= scale->shape[1];
    scale->ndim = 1;
}
static void narrow_codes(tensors *all) {
    find_tensor(all, "")->shape[1]--;
}
static void other_codes(tensors *all) {
    eng_st_source *codes = find_tensor(all, "");
    codes->dtype = codes->dtype == ENG_I8 ? ENG_U8 : ENG_I8;
}
static void infinite_scale(tensors *all) {
    const uint16_t infinity = 0x7c00;
    memcpy((char *)(uintptr_t)find_tensor(all, ".scale")->data + 6, &infinity, sizeof infinity);
}
static void stray_minimum(tensors *all) {
    eng_st_source *scale = find_tensor(all, ".scale"), *copy = &all->source[all->count];
    *copy = *scale;
    copy->name = strcat(strcpy(all->name[all->count], matrix_name), ".minimum");
    copy->shape[0]--;
    copy->data = calloc(1, 4096); // more than its shape asks for
    all->count++;
}
static void norm_in_blocks(tensors *all) {
    for (size_t i = 0; i < all->count; i++)
        if (strcmp(all->name[i], "model.norm.weight") == 0)
            all->source[i].dtype = ENG_I8;
}

static const struct {
    void (*damage)(tensors *all);
    const char *word;
    eng_status open[2], load; // of 8 bits and of 4
} damages[] = {
    {no_scale, "its .scale is missing", {ENG_FORMAT, ENG_FORMAT}, ENG_OK},
    {float_scale, "is not F16", {ENG_FORMAT, ENG_FORMAT}, ENG_OK},
    {short_scale, "[99, 3]", {ENG_FORMAT, ENG_FORMAT}, ENG_OK},
    {flat_scale, "[99, 3]", {ENG_FORMAT, ENG_FORMAT}, ENG_OK},
    {narrow_codes, "up_proj.weight': its shape", {ENG_FORMAT, ENG_FORMAT}, ENG_OK},
    {other_codes, "up_proj.weight': its shape", {ENG_FORMAT, ENG_FORMAT}, ENG_OK},
    {infinite_scale, ".scale': 1 of 297 values are not finite", {ENG_OK, ENG_OK}, ENG_NUMERIC},
    {stray_minimum, ".minimum'", {ENG_FORMAT, ENG_FORMAT}, ENG_OK},
    {norm_in_blocks, "model.norm.weight': must be F32", {ENG_FORMAT, ENG_FORMAT}, ENG_OK},
};

START_TEST(damage_is_named) {
    kern_device *device = open_cpu();
    for (size_t i = 0; i < sizeof damages / sizeof *damages; i++) {
        tensors all;
        eng_checkpoint *checkpoint;
        eng_weights *weights;
        eng_error error = {0};
        make_quantized(_i ? KERN_Q4 : KERN_Q8, NULL);
        read_tensors(&all);
        damages[i].damage(&all);
        write_tensors(&all);
        const eng_status wanted = damages[i].open[_i] != ENG_OK ? damages[i].open[_i] : damages[i].load;
        const eng_status status = open_and_load("model", false, device, &checkpoint, &weights, &error);
        ck_assert_msg(status == wanted && strstr(error.text, damages[i].word), "case %zu: status %d: %s", i, status,
                      error.text);
        ck_assert_int_eq(checkpoint != NULL, damages[i].open[_i] == ENG_OK);
        ck_assert_ptr_null(weights);
        eng_checkpoint_close(checkpoint);
    }
    kern_device_close(device);
}
END_TEST

START_TEST(config_must_announce_it) {
    static const struct {
        const char *key, *word;
    } cases[] = {
        {"", "config.json has no quantization_config"},
        {", \"quantization_config\": {\"bits\": 8, \"block\": 32}", "quantization_config.quant_method"},
        {", \"quantization_config\": {\"quant_method\": \"gptq\", \"bits\": 4}", "'gptq' is not supported"},
        {", \"quantization_config\": {\"quant_method\": \"mesa\", \"bits\": 8, \"block\": 64}", "blocks of 64"},
        {", \"quantization_config\": {\"quant_method\": \"mesa\", \"bits\": 3, \"block\": 32}", "3 in blocks"},
        {", \"quantization_config\": {\"quant_method\": \"mesa\", \"bits\": \"8\"}", "bits"},
        {", \"quantization_config\": \"mesa\"", "quant_method"},
    };
    make_quantized(KERN_Q8, NULL);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char text[1024];
        eng_checkpoint *checkpoint = NULL;
        eng_error error = {0};
        snprintf(text, sizeof text, "%.*s%s}", (int)strlen(config_json) - 1, config_json, cases[i].key);
        temp_write("model/config.json", text, strlen(text));
        const eng_status status = eng_checkpoint_open(temp_path("model"), &checkpoint, &error);
        ck_assert_msg(status != ENG_OK && strstr(error.text, cases[i].word), "case %zu: %s", i, error.text);
        ck_assert_ptr_null(checkpoint);
    }
}
END_TEST

static Suite *quantize_suite(void) {
    Suite *suite = suite_create("engine/quantize");
    TCase *rounding = tcase_create("rounding");
    tcase_add_test(rounding, rounding_loses_little);
    tcase_add_test(rounding, the_grid_is_kept);
    tcase_add_test(rounding, minima_are_added);
    tcase_add_test(rounding, what_float16_cannot_scale_is_refused);
    tcase_add_test(rounding, gates_norms_and_convolutions_are_left_alone);
    suite_add_tcase(suite, rounding);
    TCase *folders = tcase_create("folders");
    tcase_add_checked_fixture(folders, temp_folder_make, temp_folder_remove);
    tcase_add_loop_test(folders, a_folder_comes_back, 0, 2);
    tcase_add_loop_test(folders, damage_is_named, 0, 2);
    tcase_add_test(folders, config_must_announce_it);
    suite_add_tcase(suite, folders);
    return suite;
}

MESA_TEST_MAIN(quantize_suite)
