// SPDX-License-Identifier: Apache-2.0
// Import from GGUF: a checkpoint written as such a file comes back bit for bit, rows of queries and keys included;
// blocks stay blocks of the same numbers; its tokenizer gives known ids; what is not supported is refused by its name
// and leaves nothing behind.
//
// The file is made from a checkpoint of random weights by the rules that public converters follow, written down here
// once more.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "engine/import.h"

#include <stdlib.h>
#include <string.h>

#include "engine/checkpoint.h"
#include "engine/files.h"
#include "engine/text.h"
#include "engine/tokenizer.h"
#include "engine/utf8.h"
#include "tests/check_main.h"
#include "tests/engine/gguf_bag.h"
#include "tests/engine/temp_folder.h"
#include "tests/engine/tensor_bag.h"

enum { LAYERS = 2, HEADS = 4, KV_HEADS = 2, WIDTH = 8, HIDDEN = 32, BYTES = 256, VOCABULARY = BYTES + 6 };

static const char config[] =
    "{\"model_type\":\"llama\",\"hidden_size\":32,\"intermediate_size\":64,\"num_hidden_layers\":2,"
    "\"num_attention_heads\":4,\"num_key_value_heads\":2,\"vocab_size\":262,\"rms_norm_eps\":1e-5,"
    "\"rope_theta\":100000.0,\"max_position_embeddings\":512,\"tie_word_embeddings\":true,\"bos_token_id\":0,"
    "\"eos_token_id\":1%s}";

// ---- a file from a checkpoint

static const struct {
    const char *ours, *theirs;
    int heads; // whose rows are taken apart
} names[] = {
    {"model.embed_tokens.weight", "token_embd.weight", 0},
    {"model.norm.weight", "output_norm.weight", 0},
    {"input_layernorm.weight", "attn_norm.weight", 0},
    {"self_attn.q_proj.", "attn_q.", HEADS},
    {"self_attn.k_proj.", "attn_k.", KV_HEADS},
    {"self_attn.v_proj.", "attn_v.", 0},
    {"self_attn.o_proj.", "attn_output.", 0},
    {"post_attention_layernorm.weight", "ffn_norm.weight", 0},
    {"mlp.gate_proj.weight", "ffn_gate.weight", 0},
    {"mlp.up_proj.weight", "ffn_up.weight", 0},
    {"mlp.down_proj.weight", "ffn_down.weight", 0},
};

// (heads, 2, width / 2, columns) to (heads, width / 2, 2, columns).
static float *taken_apart(const float *from, int heads, int64_t columns) {
    float *to = malloc((size_t)(heads * WIDTH * columns) * sizeof *to);
    ck_assert_ptr_nonnull(to);
    for (int head = 0; head < heads; head++)
        for (int half = 0; half < 2; half++)
            for (int i = 0; i < WIDTH / 2; i++)
                memcpy(to + (head * WIDTH + 2 * i + half) * columns,
                       from + (head * WIDTH + half * WIDTH / 2 + i) * columns, (size_t)columns * sizeof *to);
    return to;
}

static void put_tensor(gguf_bag *bag, const eng_st_source *source) {
    char name[128] = "";
    const char *part = source->name;
    int layer, heads = -1;
    size_t prefix = 0;
    if (sscanf(part, "model.layers.%d.", &layer) == 1) {
        prefix = (size_t)snprintf(name, sizeof name, "blk.%d.", layer);
        part = strchr(part + strlen("model.layers."), '.') + 1;
    }
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        size_t length = strlen(names[i].ours);
        if (strncmp(part, names[i].ours, length) == 0) {
            snprintf(name + prefix, sizeof name - prefix, "%s%s", names[i].theirs, part + length);
            heads = names[i].heads;
        }
    }
    ck_assert_msg(heads >= 0, "%s", source->name);
    int64_t columns = source->ndim > 1 ? source->shape[1] : 1, count = source->shape[0] * columns;
    float *apart = heads ? taken_apart(source->data, heads, columns) : NULL;
    uint64_t shape[2] = {(uint64_t)(source->ndim > 1 ? columns : source->shape[0]), (uint64_t)source->shape[0]};
    gguf_put_tensor(bag, name, 0, source->ndim, shape, apart ? apart : source->data, (size_t)count * sizeof(float));
    free(apart);
}

static void put_keys(gguf_bag *bag) {
    gguf_put_text(bag, "general.architecture", "llama");
    gguf_put_text(bag, "general.name", "anything");
    gguf_put_u32(bag, "llama.block_count", LAYERS);
    gguf_put_u32(bag, "llama.context_length", 512);
    gguf_put_u32(bag, "llama.embedding_length", HIDDEN);
    gguf_put_u32(bag, "llama.feed_forward_length", 64);
    gguf_put_u32(bag, "llama.attention.head_count", HEADS);
    gguf_put_u32(bag, "llama.attention.head_count_kv", KV_HEADS);
    gguf_put_u32(bag, "llama.rope.dimension_count", WIDTH);
    gguf_put_u32(bag, "llama.expert_count", 0);
    gguf_put_f32(bag, "llama.rope.freq_base", 100000);
    gguf_put_f32(bag, "llama.attention.layer_norm_rms_epsilon", 1e-5f);
}

static void put_checkpoint(gguf_bag *bag, tensor_bag *tensors, const char *more) {
    char json[1024];
    snprintf(json, sizeof json, config, more);
    make_checkpoint(temp_path("from"), json, 7);
    bag_read(tensors, temp_path("from/model.safetensors"));
    for (size_t i = 0; i < tensors->count; i++)
        put_tensor(bag, &tensors->tensor[i]);
}

// Rows in a format, any codes; two bytes of each block are a scale, two more a minimum where there is one.
static void put_rows(gguf_bag *bag, const char *name, uint32_t number, int64_t rows, int64_t columns) {
    const eng_block_format *format = eng_block_format_find(number);
    const int64_t blocks = rows * columns / format->elements;
    uint8_t *stored = malloc((size_t)(blocks * format->bytes));
    ck_assert_ptr_nonnull(stored);
    for (int64_t i = 0; i < blocks * format->bytes; i++)
        stored[i] = (uint8_t)(i * 151 + i / 256 * 7 + rows);
    for (int64_t b = 0; b < blocks; b++) {
        stored[b * format->bytes + 1] = (uint8_t)(0x20 + b % 8);
        if (format->minimum)
            stored[b * format->bytes + 3] = (uint8_t)(0xa8 + b % 4);
    }
    gguf_put_tensor(bag, name, number, 2, (const uint64_t[]){(uint64_t)columns, (uint64_t)rows}, stored,
                    (size_t)(blocks * format->bytes));
    free(stored);
}

// A whole model, its matrices in Q4_1 but for the embedding and one that is widened.
static void put_quantised(gguf_bag *bag, uint32_t embedding, uint32_t output) {
    static const struct {
        const char *name;
        int64_t rows, columns;
    } matrices[] = {{"attn_q", 32, 32},   {"attn_k", 16, 32}, {"attn_v", 16, 32},  {"attn_output", 32, 32},
                    {"ffn_gate", 64, 32}, {"ffn_up", 64, 32}, {"ffn_down", 32, 64}};
    static const char *const norms[] = {"attn_norm", "ffn_norm"};
    float ones[HIDDEN];
    char name[64];
    for (int i = 0; i < HIDDEN; i++)
        ones[i] = 1 + 0x1p-12f * (float)i; // not in bfloat16
    put_keys(bag);
    put_rows(bag, "token_embd.weight", embedding, VOCABULARY, HIDDEN);
    gguf_put_tensor(bag, "output_norm.weight", 0, 1, (const uint64_t[]){HIDDEN}, ones, sizeof ones);
    for (int layer = 0; layer < LAYERS; layer++) {
        for (size_t i = 0; i < sizeof norms / sizeof *norms; i++) {
            snprintf(name, sizeof name, "blk.%d.%s.weight", layer, norms[i]);
            gguf_put_tensor(bag, name, 0, 1, (const uint64_t[]){HIDDEN}, ones, sizeof ones);
        }
        for (size_t i = 0; i < sizeof matrices / sizeof *matrices; i++) {
            snprintf(name, sizeof name, "blk.%d.%s.weight", layer, matrices[i].name);
            put_rows(bag, name, strcmp(matrices[i].name, "attn_output") == 0 ? output : 3, matrices[i].rows,
                     matrices[i].columns);
        }
    }
    gguf_write(bag, "model.gguf");
}

// Bytes as characters, two special tokens, one of the user's, "he", "hel" and " he".
static void put_tokenizer(gguf_bag *bag) {
    static const char *const more[] = {"<|end|>", "<|im_start|>", "<|mine|>", "he", "hel", "\xc4\xa0he"};
    static const char *const merges[] = {"h e", "he l", "\xc4\xa0 he"};
    static const int32_t kinds[] = {3, 3, 4, 1, 1, 1};
    char texts[BYTES][8];
    const char *tokens[VOCABULARY];
    int32_t types[VOCABULARY];
    for (int i = 0; i < BYTES; i++) {
        memset(texts[i], 0, sizeof texts[i]);
        eng_utf8_encode(eng_byte_level_character((uint8_t)i), texts[i]);
        tokens[i] = texts[i];
        types[i] = 1;
    }
    memcpy(tokens + BYTES, more, sizeof more);
    memcpy(types + BYTES, kinds, sizeof kinds);
    gguf_put_text(bag, "tokenizer.ggml.model", "gpt2");
    gguf_put_text(bag, "tokenizer.ggml.pre", "smollm");
    gguf_put_texts(bag, "tokenizer.ggml.tokens", tokens, VOCABULARY);
    gguf_put_list(bag, "tokenizer.ggml.token_type", 5, types, VOCABULARY, sizeof types);
    gguf_put_texts(bag, "tokenizer.ggml.merges", merges, 3);
    gguf_put_u32(bag, "tokenizer.ggml.bos_token_id", BYTES + 1);
    gguf_put_u32(bag, "tokenizer.ggml.eos_token_id", BYTES);
    gguf_put_flag(bag, "tokenizer.ggml.add_bos_token", false);
    gguf_put_text(bag, "tokenizer.chat_template", "{{ messages }}\n\"");
}

static eng_status import(const eng_dtype *dtype, eng_imported *imported, eng_error *error) {
    return eng_import_gguf(temp_path("model.gguf"), temp_path("to"), dtype, imported, error);
}

// ---- the way there and back

static void compare(tensor_bag *from, bool narrow) {
    tensor_bag to;
    bag_read(&to, temp_path("to/model.safetensors"));
    ck_assert_uint_eq(to.count, from->count);
    for (size_t i = 0; i < from->count; i++) {
        const eng_st_source *source = &from->tensor[i];
        const float *wanted = source->data, *got = bag_data(&to, source->name);
        int64_t count = source->shape[0] * (source->ndim > 1 ? source->shape[1] : 1);
        for (int64_t k = 0; k < count; k++) {
            float value = narrow ? eng_bf16_to_f32(eng_bf16_from_f32(wanted[k])) : wanted[k];
            ck_assert_msg(got[k] == value, "%s: element %lld", source->name, (long long)k);
        }
    }
    bag_free(&to);
}

START_TEST(weights_come_back) {
    gguf_bag bag = {0};
    tensor_bag tensors;
    const bool narrow = _i & 1, biased = _i & 2;
    const eng_dtype bf16 = ENG_BF16;
    put_keys(&bag);
    put_checkpoint(&bag, &tensors, biased ? ",\"attention_bias\":true" : "");
    gguf_write(&bag, "model.gguf");
    eng_imported imported;
    eng_error error = {0};
    ck_assert_msg(import(narrow ? &bf16 : NULL, &imported, &error) == ENG_OK, "%s", error.text);
    ck_assert_int_eq(imported.dtype, narrow ? ENG_BF16 : ENG_F32);
    ck_assert(!imported.tokenizer && !imported.chat_template);
    compare(&tensors, narrow);
    eng_checkpoint *checkpoint;
    ck_assert_int_eq(eng_checkpoint_open(temp_path("to"), &checkpoint, NULL), ENG_OK);
    const eng_config *read = &eng_checkpoint_model(checkpoint)->config;
    ck_assert(read->tied);
    ck_assert_float_eq(read->norm_eps, 1e-5f);
    ck_assert_double_eq(read->layer[0].attention.rope_theta, 1e5);
    ck_assert_int_eq(read->max_positions, 512);
    eng_checkpoint_close(checkpoint);
    bag_free(&tensors);
    gguf_bag_free(&bag);
}
END_TEST

static float *loaded_values(const char *dir, int64_t *count) {
    eng_checkpoint *checkpoint;
    eng_weights *weights;
    kern_device *device = open_cpu();
    eng_error error = {0};
    ck_assert_msg(eng_checkpoint_open(temp_path(dir), &checkpoint, &error) == ENG_OK, "%s", error.text);
    ck_assert_msg(eng_weights_load(checkpoint, device, true, &weights, &error) == ENG_OK, "%s", error.text);
    float *values = master_values(weights);
    *count = weights->count;
    eng_weights_free(weights);
    eng_checkpoint_close(checkpoint);
    kern_device_close(device);
    return values;
}

// What is kept in blocks is, weight by weight, what is widened on request; rows of queries and keys included.
START_TEST(blocks_stay) {
    static const struct {
        uint32_t embedding, output; // Q8_0, Q4_0, Q4_1; Q5_0 has no blocks here
        int32_t blocks, widened;
    } cases[] = {{8, 3, 15, 0}, {2, 3, 15, 0}, {3, 8, 15, 0}, {8, 6, 13, 2}};
    gguf_bag bag = {0};
    eng_imported kept, wide;
    eng_error error = {0};
    int64_t count, wanted_count;
    const eng_dtype f32 = ENG_F32;
    put_quantised(&bag, cases[_i].embedding, cases[_i].output);
    ck_assert_msg(import(NULL, &kept, &error) == ENG_OK, "%s", error.text);
    ck_assert_int_eq(kept.blocks, cases[_i].blocks);
    ck_assert_int_eq(kept.widened, cases[_i].widened);
    ck_assert(kept.widened == 0 || strcmp(kept.widened_format, "Q5_0") == 0);
    ck_assert_int_eq(kept.dtype, ENG_F32);
    ck_assert_int_eq(eng_import_gguf(temp_path("model.gguf"), temp_path("wide"), &f32, &wide, NULL), ENG_OK);
    ck_assert_int_eq(wide.blocks, 0);
    ck_assert_int_eq(wide.widened, 15);
    float *values = loaded_values("to", &count), *wanted = loaded_values("wide", &wanted_count);
    ck_assert_int_eq(count, wanted_count);
    ck_assert_mem_eq(values, wanted, (size_t)count * sizeof *values);
    free(wanted);
    free(values);
    gguf_bag_free(&bag);
}
END_TEST

START_TEST(refuses_a_scale_that_is_not_finite) {
    gguf_bag bag = {0};
    eng_error error = {0};
    const eng_dtype bf16 = ENG_BF16;
    put_quantised(&bag, 8, 3);
    bag.data.bytes[34 * 5 + 1] = 0x7c; // of the embedding
    gguf_write(&bag, "model.gguf");
    ck_assert_int_eq(import(NULL, NULL, &error), ENG_NUMERIC);
    ck_assert_ptr_nonnull(strstr(error.text, "token_embd.weight"));
    ck_assert_int_eq(import(&bf16, NULL, NULL), ENG_NUMERIC);
    ck_assert(!temp_exists("to"));
    gguf_bag_free(&bag);
}
END_TEST

static void expect_ids(const eng_tokenizer *tokenizer, const char *text, const int32_t *wanted, size_t count) {
    int32_t *ids;
    size_t found;
    ck_assert_int_eq(eng_tokenizer_encode(tokenizer, text, strlen(text), true, true, &ids, &found, NULL), ENG_OK);
    ck_assert_uint_eq(found, count);
    ck_assert_mem_eq(ids, wanted, count * sizeof *ids);
    free(ids);
}

START_TEST(tokenizer_comes_along) {
    gguf_bag bag = {0};
    tensor_bag tensors;
    put_keys(&bag);
    put_tokenizer(&bag);
    put_checkpoint(&bag, &tensors, "");
    gguf_write(&bag, "model.gguf");
    eng_imported imported;
    eng_error error = {0};
    eng_tokenizer *tokenizer;
    ck_assert_msg(import(NULL, &imported, &error) == ENG_OK, "%s", error.text);
    ck_assert(imported.tokenizer && imported.chat_template);
    ck_assert_int_eq(eng_tokenizer_open(temp_path("to"), VOCABULARY, &tokenizer, NULL), ENG_OK);
    ck_assert_int_eq(eng_tokenizer_bos(tokenizer), -1);
    ck_assert(eng_tokenizer_is_special(tokenizer, BYTES) && !eng_tokenizer_is_special(tokenizer, BYTES + 2));
    // digits stand alone, so "1he" merges behind the digit
    expect_ids(tokenizer, "<|im_start|>hello he12he<|mine|>",
               (const int32_t[]){BYTES + 1, BYTES + 4, 'l', 'o', BYTES + 5, '1', '2', BYTES + 3, BYTES + 2}, 9);
    char *text;
    size_t length;
    ck_assert_int_eq(eng_read_file(temp_path("to/tokenizer_config.json"), 1 << 16, &text, &length, NULL), ENG_OK);
    ck_assert_ptr_nonnull(strstr(text, "\"chat_template\": \"{{ messages }}\\n\\\"\""));
    ck_assert_ptr_nonnull(strstr(text, "\"bos_token\": \"<|im_start|>\""));
    free(text);
    eng_tokenizer_close(tokenizer);
    bag_free(&tensors);
    gguf_bag_free(&bag);
}
END_TEST

// SentencePiece: unknown, begin, end, all bytes, pieces with scores. U+2581 stands for a space.
#define MARK "\xe2\x96\x81"

START_TEST(sentencepiece_joins_by_score) {
    static const char *const pieces[] = {MARK, "h", "e", "l", "o", "he", "el", "ll", MARK "he", "hell", "ello"};
    enum { PIECES = sizeof pieces / sizeof *pieces, SPM = 3 + BYTES + PIECES };
    char texts[BYTES][8];
    const char *tokens[SPM] = {"<unk>", "<s>", "</s>"};
    int32_t types[SPM] = {2, 3, 3};
    float scores[SPM] = {0};
    for (int i = 0; i < BYTES; i++) {
        snprintf(texts[i], sizeof texts[i], "<0x%02X>", i);
        tokens[3 + i] = texts[i];
        types[3 + i] = 6;
    }
    for (int i = 0; i < PIECES; i++) {
        tokens[3 + BYTES + i] = pieces[i];
        types[3 + BYTES + i] = 1;
        scores[3 + BYTES + i] = -(float)i;
    }
    gguf_bag bag = {0};
    tensor_bag tensors;
    put_keys(&bag);
    put_checkpoint(&bag, &tensors, "");
    gguf_put_text(&bag, "tokenizer.ggml.model", "llama");
    gguf_put_texts(&bag, "tokenizer.ggml.tokens", tokens, SPM - 8); // as many as the model has rows
    gguf_put_list(&bag, "tokenizer.ggml.token_type", 5, types, SPM - 8, (SPM - 8) * 4);
    gguf_put_list(&bag, "tokenizer.ggml.scores", 6, scores, SPM - 8, (SPM - 8) * 4);
    gguf_put_u32(&bag, "tokenizer.ggml.bos_token_id", 1);
    gguf_put_u32(&bag, "tokenizer.ggml.eos_token_id", 2);
    gguf_write(&bag, "model.gguf");
    eng_error error = {0};
    eng_tokenizer *tokenizer;
    ck_assert_msg(import(NULL, NULL, &error) == ENG_OK, "%s", error.text);
    ck_assert_int_eq(eng_tokenizer_open(temp_path("to"), VOCABULARY, &tokenizer, NULL), ENG_OK);
    ck_assert_int_eq(eng_tokenizer_bos(tokenizer), 1);
    const int32_t first = 3 + BYTES;
    // only MARK, h, e fit the model's rows: "he" stays two, "l" is a byte
    expect_ids(tokenizer, "hel", (const int32_t[]){1, first, first + 1, first + 2, 3 + 'l'}, 5);
    eng_tokenizer_close(tokenizer);
    bag_free(&tensors);
    gguf_bag_free(&bag);
}
END_TEST

// ---- refusals

typedef void change_fn(gguf_bag *bag);

static void no_change(gguf_bag *bag) {
    (void)bag;
}
static void experts(gguf_bag *bag) {
    gguf_put_u32(bag, "llama.expert_used_count", 2);
}
static void window(gguf_bag *bag) {
    gguf_put_u32(bag, "llama.attention.sliding_window", 4096);
}
static void vocabulary(gguf_bag *bag) {
    gguf_put_u32(bag, "llama.vocab_size", 100);
}
static void key_length(gguf_bag *bag) {
    gguf_put_u32(bag, "llama.attention.key_length", 16);
}
static void yarn(gguf_bag *bag) {
    gguf_put_text(bag, "llama.rope.scaling.type", "yarn");
}
static void split(gguf_bag *bag) {
    gguf_put_u32(bag, "split.count", 2);
}
static void left_over(gguf_bag *bag) {
    gguf_put_tensor(bag, "blk.0.attn_q_norm.weight", 0, 1, (const uint64_t[]){8}, (const float[8]){0}, 32);
}
static void divisors(gguf_bag *bag) {
    gguf_put_tensor(bag, "rope_freqs.weight", 0, 1, (const uint64_t[]){4}, (const float[]){1, 2, 3, 4}, 16);
}
static void bias(gguf_bag *bag) {
    gguf_put_tensor(bag, "blk.0.attn_q.bias", 0, 1, (const uint64_t[]){32}, (const float[32]){0}, 128);
}
static void pre(gguf_bag *bag) {
    gguf_put_text(bag, "tokenizer.ggml.model", "gpt2");
    gguf_put_text(bag, "tokenizer.ggml.pre", "unheard-of");
}
static void no_pre(gguf_bag *bag) {
    gguf_put_text(bag, "tokenizer.ggml.model", "gpt2");
}
static void unigram(gguf_bag *bag) {
    gguf_put_text(bag, "tokenizer.ggml.model", "t5");
}
static void charsmap(gguf_bag *bag) {
    put_tokenizer(bag);
    gguf_put_text(bag, "tokenizer.ggml.precompiled_charsmap", "x");
}
static void behind(gguf_bag *bag) {
    put_tokenizer(bag);
    gguf_put_flag(bag, "tokenizer.ggml.add_eos_token", true);
}
static void few_types(gguf_bag *bag) {
    gguf_put_text(bag, "tokenizer.ggml.model", "gpt2");
    gguf_put_text(bag, "tokenizer.ggml.pre", "smollm");
    gguf_put_texts(bag, "tokenizer.ggml.tokens", (const char *const[]){"a", "b"}, 2);
    gguf_put_list(bag, "tokenizer.ggml.token_type", 5, "\1\0\0", 1, 4);
}
static void token_twice(gguf_bag *bag) {
    gguf_put_text(bag, "tokenizer.ggml.model", "gpt2");
    gguf_put_text(bag, "tokenizer.ggml.pre", "smollm");
    gguf_put_texts(bag, "tokenizer.ggml.tokens", (const char *const[]){"a", "a"}, 2);
}
static void unknown_merge(gguf_bag *bag) {
    gguf_put_text(bag, "tokenizer.ggml.model", "gpt2");
    gguf_put_text(bag, "tokenizer.ggml.pre", "smollm");
    gguf_put_texts(bag, "tokenizer.ggml.tokens", (const char *const[]){"a", "b"}, 2);
    gguf_put_texts(bag, "tokenizer.ggml.merges", (const char *const[]){"a b"}, 1);
}

static const struct {
    const char *label, *words;
    change_fn *change;
    const char *drop; // a key or tensor that is written under another name
} refused[] = {
    {"architecture", "general.architecture", no_change, "general.architecture"},
    {"block count", "'llama.block_count': is missing", no_change, "llama.block_count"},
    {"epsilon", "layer_norm_rms_epsilon': is missing", no_change, "llama.attention.layer_norm_rms_epsilon"},
    {"experts", "llama.expert_used_count", experts, NULL},
    {"window", "llama.attention.sliding_window", window, NULL},
    {"vocabulary", "llama.vocab_size", vocabulary, NULL},
    {"head width", "llama.rope.dimension_count", key_length, NULL},
    {"rotation", "llama.rope.scaling.type", yarn, NULL},
    {"shards", "split.count", split, NULL},
    {"unknown tensor", "blk.0.attn_q_norm.weight", left_over, NULL},
    {"divisors", "rope_freqs.weight", divisors, NULL},
    {"one bias", "tensor 'blk.0.attn_k.bias' is missing", bias, NULL},
    {"missing tensor", "tensor 'blk.1.ffn_up.weight' is missing", no_change, "blk.1.ffn_up.weight"},
    {"pre-tokenizer", "tokenizer.ggml.pre': 'unheard-of'", pre, NULL},
    {"no pre-tokenizer", "tokenizer.ggml.pre': is missing", no_pre, NULL},
    {"unigram", "tokenizer.ggml.model", unigram, NULL},
    {"map", "precompiled_charsmap", charsmap, NULL},
    {"token behind", "add_eos_token", behind, NULL},
    {"types", "token_type", few_types, NULL},
    {"token twice", "tokenizer.ggml.tokens': entry 1 is there twice", token_twice, NULL},
    {"merge", "merge 0", unknown_merge, NULL},
};

// Renames what stands in the part by changing its first letter.
static void drop(eng_buffer *part, const char *name) {
    char *at = memmem(part->bytes, part->length, name, strlen(name));
    if (at)
        *at = 'X';
}

START_TEST(refuses) {
    gguf_bag bag = {0};
    tensor_bag tensors;
    put_keys(&bag);
    put_checkpoint(&bag, &tensors, "");
    refused[_i].change(&bag);
    if (refused[_i].drop) {
        drop(&bag.keys, refused[_i].drop);
        drop(&bag.infos, refused[_i].drop);
    }
    gguf_write(&bag, "model.gguf");
    eng_error error = {0};
    eng_status status = import(NULL, NULL, &error);
    ck_assert_msg(status == ENG_FORMAT || status == ENG_UNSUPPORTED, "%s: %d %s", refused[_i].label, status,
                  error.text);
    ck_assert_msg(strstr(error.text, refused[_i].words) != NULL, "%s: %s", refused[_i].label, error.text);
    ck_assert(!temp_exists("to") && !temp_exists(".to.tmp"));
    bag_free(&tensors);
    gguf_bag_free(&bag);
}
END_TEST

START_TEST(refuses_what_is_not_finite) {
    gguf_bag bag = {0};
    tensor_bag tensors;
    put_keys(&bag);
    put_checkpoint(&bag, &tensors, "");
    const float infinity = INFINITY;
    memcpy(bag.data.bytes + 64, &infinity, sizeof infinity);
    gguf_write(&bag, "model.gguf");
    eng_error error = {0};
    ck_assert_int_eq(import(NULL, NULL, &error), ENG_NUMERIC);
    ck_assert_ptr_nonnull(strstr(error.text, "not finite"));
    ck_assert(!temp_exists("to"));
    bag_free(&tensors);
    gguf_bag_free(&bag);
}
END_TEST

START_TEST(replaces_only_a_checkpoint) {
    gguf_bag bag = {0};
    tensor_bag tensors;
    put_keys(&bag);
    put_checkpoint(&bag, &tensors, "");
    gguf_write(&bag, "model.gguf");
    eng_error error = {0};
    ck_assert_int_eq(import(NULL, NULL, NULL), ENG_OK);
    ck_assert_int_eq(import(NULL, NULL, NULL), ENG_OK);
    temp_write("other", "x", 1);
    ck_assert_int_eq(eng_import_gguf(temp_path("model.gguf"), temp_path("other"), NULL, NULL, &error), ENG_INVALID);
    ck_assert(temp_holds("other", "x"));
    bag_free(&tensors);
    gguf_bag_free(&bag);
}
END_TEST

#define COUNT(table) (int)(sizeof(table) / sizeof(table)[0])

static Suite *import_suite(void) {
    Suite *suite = suite_create("import");
    TCase *all = tcase_create("gguf");
    tcase_add_checked_fixture(all, temp_folder_make, temp_folder_remove);
    tcase_add_loop_test(all, weights_come_back, 0, 4);
    tcase_add_loop_test(all, blocks_stay, 0, 4);
    tcase_add_test(all, refuses_a_scale_that_is_not_finite);
    tcase_add_test(all, tokenizer_comes_along);
    tcase_add_test(all, sentencepiece_joins_by_score);
    tcase_add_loop_test(all, refuses, 0, COUNT(refused));
    tcase_add_test(all, refuses_what_is_not_finite);
    tcase_add_test(all, replaces_only_a_checkpoint);
    suite_add_tcase(suite, all);
    return suite;
}

MESA_TEST_MAIN(import_suite)
