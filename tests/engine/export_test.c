// SPDX-License-Identifier: Apache-2.0
// One model in the spellings of several projects: written, read again, refused where it cannot be said; and files that
// spell their tensors in other ways.
#include <stdlib.h>
#include <string.h>

#include "engine/export.h"
#include "engine/files.h"
#include "tests/check_main.h"
#include "tests/engine/temp_folder.h"
#include "tests/engine/tensor_bag.h"

#define SIZES "\"vocab_size\": 40, \"hidden_size\": 32, \"num_hidden_layers\": 2, "
#define MAMBA2 "{\"model_type\": \"mamba2\", " SIZES "\"head_dim\": 16, \"num_heads\": 4, \"state_size\": 8, "
#define BLOCKS SIZES "\"intermediate_size\": 48, \"num_heads\": 2, \"head_dim\": 16, "
#define ATTN "\"attn\": {\"num_heads\": 4, \"window_size\": 24}, "

typedef struct loaded {
    kern_device *device;
    eng_checkpoint *checkpoint;
    eng_weights *weights;
} loaded;

static void load(const char *dir, loaded *out) {
    eng_error error = {0};
    *out = (loaded){.device = open_cpu()};
    ck_assert_msg(eng_checkpoint_open(dir, &out->checkpoint, &error) == ENG_OK, "%s", error.text);
    ck_assert_msg(eng_weights_load(out->checkpoint, out->device, true, &out->weights, &error) == ENG_OK, "%s",
                  error.text);
}

static void unload(loaded *from) {
    eng_weights_free(from->weights);
    eng_checkpoint_close(from->checkpoint);
    kern_device_close(from->device);
}

static void expect_same_weights(const loaded *left, const loaded *right, const char *what) {
    ck_assert_int_eq(left->weights->count, right->weights->count);
    float *a = master_values(left->weights), *b = master_values(right->weights);
    ck_assert_msg(memcmp(a, b, (size_t)left->weights->count * sizeof *a) == 0, "%s", what);
    free(a);
    free(b);
}

static void export_to(const char *dir, const loaded *from, eng_form form) {
    eng_error error = {0};
    eng_status status = eng_checkpoint_export(dir, from->weights, form, ENG_F32, NULL, &error);
    ck_assert_msg(status == ENG_OK, "%s", error.text);
}

static void expect_text(const char *name, const char *words, const char *json) {
    char *text;
    size_t length;
    ck_assert_int_eq(eng_read_file(temp_path(name), 1 << 20, &text, &length, NULL), ENG_OK);
    ck_assert_msg(strstr(text, words), "%s: %s does not hold %s", json, text, words);
    free(text);
}

// ---- forms

static const struct {
    const char *json;
    eng_form form;
    const char *words;  // in the config.json that is written
    const char *tensor; // in the file that is written
} forms[] = {
    {MAMBA2 "\"layer_norm_epsilon\": 1e-5, \"n_groups\": 1}", ENG_FORM_FLA, "\"norm_eps\"",
     "backbone.embeddings.weight"},
    {MAMBA2 "\"layer_norm_epsilon\": 1e-5, \"n_groups\": 1, \"use_bias\": true}", ENG_FORM_STATE_SPACES,
     "\"d_model\": 32", "backbone.embedding.weight"},
    {MAMBA2 "\"norm_eps\": 1e-5, \"dt_limit\": [0.01, 0.5]}", ENG_FORM_TRANSFORMERS, "\"time_step_limit\"",
     "backbone.embeddings.weight"},
    {MAMBA2 "\"norm_eps\": 1e-5, \"n_groups\": 2, \"norm_before_gate\": true, \"D_has_hdim\": true,"
            "\"tie_word_embeddings\": true}",
     ENG_FORM_STATE_SPACES, "\"tie_embeddings\": true", "lm_head.weight"},
    {"{\"d_model\": 32, \"n_layer\": 2, \"vocab_size\": 37, \"ssm_cfg\": {\"layer\": \"Mamba2\", \"headdim\": 16,"
     "\"d_state\": 8, \"rmsnorm\": false}}",
     ENG_FORM_MESA, "\"rmsnorm\": false", "backbone.embeddings.weight"},
    {"{\"d_model\": 32, \"n_layer\": 2, \"vocab_size\": 37, \"ssm_cfg\": {\"layer\": \"Mamba2\", \"headdim\": 16}}",
     ENG_FORM_TRANSFORMERS, "\"Mamba2ForCausalLM\"", "backbone.embeddings.weight"},
    {"{\"model_type\": \"llama\", " SIZES "\"num_attention_heads\": 4, \"num_key_value_heads\": 2,"
     "\"intermediate_size\": 48, \"rope_theta\": 5000.0, \"eos_token_id\": [3, 4]}",
     ENG_FORM_FLA, "\"TransformerForCausalLM\"", "model.layers.1.attn.k_proj.weight"},
    {"{\"model_type\": \"transformer\", " SIZES "\"num_heads\": 4, \"num_kv_heads\": 2, \"intermediate_size\": 48}",
     ENG_FORM_TRANSFORMERS, "\"LlamaForCausalLM\"", "model.layers.1.self_attn.k_proj.weight"},
    {"{\"model_type\": \"recurrence\", " BLOCKS ATTN "\"layer_types\": [\"gated_deltanet\", \"attention\"]}",
     ENG_FORM_FLA, "\"GatedDeltaNetForCausalLM\"", "model.layers.1.attn.q_proj.weight"},
    {"{\"model_type\": \"mesa_net\", " BLOCKS ATTN
     "\"gla\": {\"num_heads\": 4}, \"layer_types\": [\"attention\", {\"mixer\": \"gla\", \"expand_k\": 1}]}",
     ENG_FORM_FLA, "\"expand_k\": 1", "model.layers.1.attn.gk_proj.0.weight"},
    {"{\"model_type\": \"xlstm\", " SIZES "\"num_heads\": 2}", ENG_FORM_TRANSFORMERS, "\"xLSTMForCausalLM\"",
     "backbone.blocks.0.mlstm_layer.q.weight"},
};

START_TEST(one_model_in_another_form) {
    const char *json = forms[_i].json;
    loaded first, second, third;
    make_checkpoint(temp_path("model"), json, 3);
    load(temp_path("model"), &first);
    export_to(temp_path("theirs"), &first, forms[_i].form);
    expect_text("theirs/config.json", forms[_i].words, json);
    tensor_bag bag;
    bag_read(&bag, temp_path("theirs/model.safetensors"));
    ck_assert_msg(bag_find(&bag, forms[_i].tensor) != NULL, "%s: no %s", json, forms[_i].tensor);
    bag_free(&bag);
    load(temp_path("theirs"), &second);
    expect_same_weights(&first, &second, json);
    export_to(temp_path("ours"), &second, ENG_FORM_MESA);
    load(temp_path("ours"), &third);
    expect_same_weights(&first, &third, json);
    ck_assert_int_eq(third.weights->model->config.eos_count, first.weights->model->config.eos_count);
    unload(&first);
    unload(&second);
    unload(&third);
}
END_TEST

static const struct {
    const char *json;
    eng_form form;
    const char *words;
} refusals[] = {
    {MAMBA2 "\"layer_norm_epsilon\": 1e-5, \"n_groups\": 2}", ENG_FORM_FLA, "n_groups: fla has nothing equal"},
    {MAMBA2 "\"norm_eps\": 1e-5, \"norm_before_gate\": true}", ENG_FORM_TRANSFORMERS, "norm_before_gate: "},
    {MAMBA2 "\"norm_eps\": 1e-5, \"rmsnorm\": false}", ENG_FORM_TRANSFORMERS, "rmsnorm: "},
    {MAMBA2 "\"norm_eps\": 1e-6}", ENG_FORM_STATE_SPACES, "norm_eps: state-spaces"},
    {"{\"model_type\": \"mesa_net\", " BLOCKS "\"gamma_cap_b\": 0.9975}", ENG_FORM_FLA, "gamma_cap_b: fla"},
    {"{\"model_type\": \"mesa_net\", " BLOCKS "\"scale_embeddings\": true}", ENG_FORM_FLA, "scale_embeddings: fla"},
    {"{\"model_type\": \"mesa_net\", " BLOCKS "\"logits_soft_cap\": 30}", ENG_FORM_FLA, "logits_soft_cap: fla"},
    {"{\"model_type\": \"mesa_net\", " BLOCKS "\"use_output_gate\": true}", ENG_FORM_TRANSFORMERS, "model_type: "},
    {"{\"model_type\": \"mesa_net\", " BLOCKS "\"layer_types\": [\"gla\", \"kda\"]}", ENG_FORM_FLA, "layer_types: fla"},
    {"{\"model_type\": \"mesa_net\", " BLOCKS
     "\"mamba2\": {\"expand\": 1}, \"layer_types\": [\"mesa_net\", \"mamba2\"]}",
     ENG_FORM_FLA, "model_type: fla has no model like this"},
    {"{\"model_type\": \"mesa_net\", " BLOCKS
     "\"layer_types\": [\"gla\", {\"mixer\": \"gla\", \"use_short_conv\": true}]}",
     ENG_FORM_FLA, "conv_size: fla"},
    {"{\"model_type\": \"mesa_net\", " BLOCKS
     "\"attn\": {\"num_heads\": 4, \"qk_norm\": true}, \"layer_types\": [\"gla\", \"attention\"]}",
     ENG_FORM_FLA, "qk_norm: fla"},
    {"{\"model_type\": \"llama\", " SIZES "\"num_attention_heads\": 4, \"head_dim\": 16, \"intermediate_size\": 48}",
     ENG_FORM_FLA, "head_dim: fla"},
    {"{\"model_type\": \"llama\", " SIZES "\"num_attention_heads\": 4, \"intermediate_size\": 48, \"mlp_bias\": true}",
     ENG_FORM_FLA, "mlp_bias: fla"},
    {"{\"model_type\": \"transformer\", " SIZES "\"num_heads\": 4, \"intermediate_size\": 48, \"window_size\": 8}",
     ENG_FORM_TRANSFORMERS, "window_size: transformers"},
    {"{\"model_type\": \"recurrence\", " BLOCKS "\"conv_size\": 2}", ENG_FORM_FLA, "model_type: fla has no model"},
};

START_TEST(what_a_form_cannot_say) {
    loaded from;
    eng_error error = {0};
    make_checkpoint(temp_path("model"), refusals[_i].json, 3);
    load(temp_path("model"), &from);
    eng_status status =
        eng_checkpoint_export(temp_path("theirs"), from.weights, refusals[_i].form, ENG_F32, NULL, &error);
    ck_assert_int_eq(status, ENG_UNSUPPORTED);
    ck_assert_msg(strstr(error.text, refusals[_i].words), "%s: %s", refusals[_i].json, error.text);
    ck_assert(!temp_exists("theirs"));
    unload(&from);
}
END_TEST

START_TEST(names_of_forms) {
    eng_form form;
    for (int i = ENG_FORM_MESA; i <= ENG_FORM_STATE_SPACES; i++)
        ck_assert(eng_form_find(eng_form_name((eng_form)i), &form) && form == (eng_form)i);
    ck_assert(!eng_form_find("gguf", &form));
}
END_TEST

// ---- other spellings of tensors

#define XLSTM "{\"model_type\": \"xlstm\", " SIZES "\"num_heads\": 2, \"ffn_round_up_to_multiple_of\": 8, "
#define LAYER0 "backbone.blocks.0.mlstm_layer."

// The tensors of a layer become one, in their order.
static void fuse(tensor_bag *bag, const char *prefix, const char *whole, const char *const *part) {
    char name[128];
    int64_t rows = 0, columns = 1, done = 0;
    float *data = NULL;
    int ndim = 0;
    for (; *part; part++) {
        snprintf(name, sizeof name, "%s%s", prefix, *part);
        const eng_st_source *tensor = bag_find(bag, name);
        ck_assert_msg(tensor != NULL, "no %s", name);
        ndim = tensor->ndim;
        columns = ndim > 1 ? tensor->shape[1] : 1;
        rows += tensor->shape[0];
        data = realloc(data, sizeof *data * (size_t)(rows * columns));
        memcpy(data + done, bag_data(bag, name), sizeof *data * (size_t)(tensor->shape[0] * columns));
        done = rows * columns;
        bag_remove(bag, name);
    }
    snprintf(name, sizeof name, "%s%s", prefix, whole);
    bag_add(bag, name, ndim, (int64_t[]){rows, columns}, data);
    free(data);
}
#define FUSE(bag, prefix, whole, ...) fuse(bag, prefix, whole, (const char *const[]){__VA_ARGS__, NULL})

static void fuse_xlstm(tensor_bag *bag) {
    static const char *const blocks[] = {"backbone.blocks.0.", "backbone.blocks.1."};
    for (int i = 0; i < 2; i++) {
        FUSE(bag, blocks[i], "mlstm_layer.qkv_opreact.weight", "mlstm_layer.q.weight", "mlstm_layer.k.weight",
             "mlstm_layer.v.weight", "mlstm_layer.ogate_preact.weight");
        FUSE(bag, blocks[i], "mlstm_layer.ifgate_preact.weight", "mlstm_layer.igate_preact.weight",
             "mlstm_layer.fgate_preact.weight");
        FUSE(bag, blocks[i], "mlstm_layer.ifgate_preact.bias", "mlstm_layer.igate_preact.bias",
             "mlstm_layer.fgate_preact.bias");
        FUSE(bag, blocks[i], "ffn.proj_up_gate_z.weight", "ffn.proj_up_gate.weight", "ffn.proj_up.weight");
    }
}
static void fuse_biases(tensor_bag *bag) {
    static const char *const blocks[] = {"backbone.blocks.0.", "backbone.blocks.1."};
    fuse_xlstm(bag);
    for (int i = 0; i < 2; i++) {
        FUSE(bag, blocks[i], "mlstm_layer.qkv_opreact.bias", "mlstm_layer.q.bias", "mlstm_layer.k.bias",
             "mlstm_layer.v.bias", "mlstm_layer.ogate_preact.bias");
        FUSE(bag, blocks[i], "ffn.proj_up_gate_z.bias", "ffn.proj_up_gate.bias", "ffn.proj_up.bias");
    }
}
static void rename_xlstm(tensor_bag *bag) {
    bag_rename(bag, "backbone.embeddings.weight", "embedding.weight");
    bag_rename(bag, LAYER0 "q.weight", LAYER0 "query.weight");
    bag_rename(bag, LAYER0 "k.weight", LAYER0 "key.weight");
    bag_rename(bag, LAYER0 "v.weight", LAYER0 "value.weight");
}
static void rename_norm(tensor_bag *bag) {
    bag_rename(bag, "model.layers.1.attn.g_norm_swish_gate.weight", "model.layers.1.attn.g_norm.weight");
}
static void rename_embedding(tensor_bag *bag) {
    bag_rename(bag, "backbone.embeddings.weight", "backbone.embedding.weight");
}
static void fuse_mlp(tensor_bag *bag) {
    FUSE(bag, "model.layers.0.", "mlp.gate_proj.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight");
    FUSE(bag, "model.layers.1.", "mlp.gate_proj.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight");
}
static void rename_map(tensor_bag *bag) {
    bag_rename(bag, "model.layers.0.attn.feature_map_q.layer.weight", "model.layers.0.attn.feature_map_k.layer.weight");
}
static void copy_map(tensor_bag *bag) {
    eng_st_source *map = bag_find(bag, "model.layers.0.attn.feature_map_q.layer.weight");
    bag_add(bag, "model.layers.0.attn.feature_map_k.layer.weight", 2, map->shape, map->data);
}

#define TIED_MAP "{\"model_type\": \"linear_attn\", " BLOCKS "\"feature_map\": \"t2r\", \"tie_feature_map_qk\": true}"
#define BIASED XLSTM "\"weight_mode\": \"fused\", \"use_bias\": true}"
#define FUSED XLSTM "\"weight_mode\": \"fused\"}"
#define SINGLE XLSTM "\"weight_mode\": \"single\"}"

START_TEST(tensors_spelled_otherwise) {
    static const struct {
        const char *json;
        void (*change)(tensor_bag *bag);
    } cases[] = {
        {FUSED, fuse_xlstm},
        {BIASED, fuse_biases},
        {SINGLE, rename_xlstm},
        {"{\"model_type\": \"gla\", " BLOCKS "\"fuse_norm\": true}", rename_norm},
        {MAMBA2 "\"norm_eps\": 1e-5}", rename_embedding},
        {"{\"model_type\": \"gated_deltanet\", " BLOCKS "\"use_gate\": true}", fuse_mlp},
        {TIED_MAP, rename_map},
        {TIED_MAP, copy_map},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        loaded first, second;
        tensor_bag bag;
        make_checkpoint(temp_path("model"), cases[i].json, 3);
        load(temp_path("model"), &first);
        bag_read(&bag, temp_path("model/model.safetensors"));
        cases[i].change(&bag);
        bag_write(&bag, temp_path("model/model.safetensors"));
        bag_free(&bag);
        temp_write("model/config.json", cases[i].json, strlen(cases[i].json));
        load(temp_path("model"), &second);
        expect_same_weights(&first, &second, cases[i].json);
        export_to(temp_path("ours"), &second, ENG_FORM_MESA);
        if (second.weights->model->config.fused_weights)
            expect_text("ours/config.json", "\"weight_mode\": \"single\"", cases[i].json);
        unload(&second);
        load(temp_path("ours"), &second);
        expect_same_weights(&first, &second, "saved again");
        unload(&first);
        unload(&second);
    }
}
END_TEST

static void keep_a_part(tensor_bag *bag) {
    float *values = bag_data(bag, LAYER0 "igate_preact.bias"), kept[2] = {values[0], values[1]};
    fuse_xlstm(bag);
    bag_add(bag, LAYER0 "igate_preact.bias", 1, (int64_t[]){2}, kept);
}
static void shorten_whole(tensor_bag *bag) {
    fuse_xlstm(bag);
    bag_find(bag, LAYER0 "qkv_opreact.weight")->shape[0]--;
}
static void lose_whole(tensor_bag *bag) {
    fuse_xlstm(bag);
    bag_remove(bag, LAYER0 "ifgate_preact.bias");
}
static void change_copy(tensor_bag *bag) {
    copy_map(bag);
    bag_data(bag, "model.layers.0.attn.feature_map_k.layer.weight")[5] += 1;
}
static void lose_up(tensor_bag *bag) {
    bag_remove(bag, "model.layers.1.mlp.up_proj.weight");
}

START_TEST(spellings_that_do_not_fit) {
    static const struct {
        const char *json;
        void (*change)(tensor_bag *bag);
        const char *words;
    } cases[] = {
        {FUSED, keep_a_part, "'" LAYER0 "ifgate_preact.bias': some of its rows are there a second time"},
        {FUSED, shorten_whole, "'" LAYER0 "qkv_opreact.weight': shape is [95, 32], config.json asks for [96, 32]"},
        {FUSED, lose_whole, "gate_preact.bias' is missing"},
        {SINGLE, fuse_xlstm, "q.weight' is missing"},
        {TIED_MAP, change_copy, "both are names of one tensor"},
        {"{\"model_type\": \"gla\", " BLOCKS "\"fuse_norm\": true}", lose_up, "'model.layers.1.mlp.up_proj.weight'"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        tensor_bag bag;
        eng_checkpoint *checkpoint = NULL;
        eng_error error = {0};
        make_checkpoint(temp_path("model"), cases[i].json, 3);
        bag_read(&bag, temp_path("model/model.safetensors"));
        cases[i].change(&bag);
        bag_write(&bag, temp_path("model/model.safetensors"));
        bag_free(&bag);
        temp_write("model/config.json", cases[i].json, strlen(cases[i].json));
        ck_assert_int_eq(eng_checkpoint_open(temp_path("model"), &checkpoint, &error), ENG_FORMAT);
        ck_assert_msg(strstr(error.text, cases[i].words), "case %zu: %s", i, error.text);
    }
}
END_TEST

static Suite *export_suite(void) {
    Suite *suite = suite_create("export");
    TCase *cases = tcase_create("forms");
    tcase_add_checked_fixture(cases, temp_folder_make, temp_folder_remove);
    tcase_add_loop_test(cases, one_model_in_another_form, 0, (int)(sizeof forms / sizeof *forms));
    tcase_add_loop_test(cases, what_a_form_cannot_say, 0, (int)(sizeof refusals / sizeof *refusals));
    tcase_add_test(cases, names_of_forms);
    tcase_add_test(cases, tensors_spelled_otherwise);
    tcase_add_test(cases, spellings_that_do_not_fit);
    suite_add_tcase(suite, cases);
    return suite;
}

MESA_TEST_MAIN(export_suite)
