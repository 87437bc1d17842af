// SPDX-License-Identifier: Apache-2.0
// The whole of tokenizer training: options, counting, learning, and the two files.
//
// tokenizer.json is written by hand, in the order of ids, so that equal tokenizers are equal files. Merges are written
// as "a b" strings, which every version of Hugging Face's tokenizers reads: byte-level tokens never hold a space.
#include "trainer/tokenizer.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "engine/buffer.h"
#include "engine/files.h"
#include "engine/pretokenize.h"
#include "engine/text.h"
#include "engine/utf8.h"
#include "trainer/merge_learner.h"
#include "trainer/piece_counter.h"

enum { MAX_SPECIAL = 256, MAX_SPECIAL_BYTES = 256 };

typedef struct training {
    trn_tokenizer_options options;
    int32_t vocab_size;
    trn_learned learned;
    eng_buffer json;
    eng_status status; // of the writes to json
} training;

static const char *special_token(const training *t, size_t index) {
    return index == 0 ? TRN_END_OF_TEXT : t->options.special[index - 1];
}

static eng_status check_special(const training *t, eng_error *error) {
    if (t->options.special_count > MAX_SPECIAL)
        return eng_fail(error, ENG_INVALID, "special: more than %d special tokens", MAX_SPECIAL);
    for (size_t i = 1; i <= t->options.special_count; i++) {
        const char *token = special_token(t, i);
        size_t length = strlen(token);
        if (length == 0 || length > MAX_SPECIAL_BYTES || !eng_utf8_valid(token, length, NULL))
            return eng_fail(error, ENG_INVALID, "special: token %zu is empty, too long or not UTF-8", i);
        for (size_t k = 0; k < i; k++) {
            if (strcmp(special_token(t, k), token) == 0)
                return eng_fail(error, ENG_INVALID, "special: '%s' is there twice", token);
        }
    }
    return ENG_OK;
}

static eng_status check_options(training *t, eng_error *error) {
    trn_tokenizer_options *options = &t->options;
    if (options->digits == 0)
        options->digits = 3;
    if (options->max_token_bytes == 0)
        options->max_token_bytes = 64;
    if (options->min_count == 0)
        options->min_count = 2;
    if (options->max_pieces == 0)
        options->max_pieces = (size_t)1 << 22;
    if (options->digits != 1 && options->digits != 3)
        return eng_fail(error, ENG_INVALID, "digits is %d; it takes 1 or 3", options->digits);
    if (options->max_pieces < 1024)
        return eng_fail(error, ENG_INVALID, "max_pieces is %zu; it takes 1024 or more", options->max_pieces);
    if (options->min_count > INT64_MAX)
        return eng_fail(error, ENG_INVALID, "min_count is too large");
    eng_status status = check_special(t, error);
    if (status != ENG_OK)
        return status;
    int32_t least = 256 + 1 + (int32_t)options->special_count;
    if (t->vocab_size < least || t->vocab_size > 1 << 24)
        return eng_fail(error, ENG_INVALID, "vocab_size is %d; it takes %d (bytes and special tokens) to %d",
                        t->vocab_size, least, 1 << 24);
    return ENG_OK;
}

// ---- learning -------------------------------------------------------------------------------------------------------

static const char *pattern_of(const training *t) {
    return t->options.digits == 3 ? eng_pattern_llama3 : eng_pattern_llama3_digit;
}

static eng_status count_pieces(const training *t, const eng_pretokenizer *pretokenizer, const char *const *paths,
                               size_t count, trn_piece_map *pieces, eng_error *error) {
    trn_piece_counter counter = {.pretokenizer = pretokenizer,
                                 .separator = TRN_END_OF_TEXT,
                                 .max_pieces = t->options.max_pieces,
                                 .progress = t->options.progress,
                                 .context = t->options.context};
    for (size_t i = 0; i < count; i++) {
        struct stat file;
        if (stat(paths[i], &file) == 0)
            counter.total += (uint64_t)file.st_size;
    }
    eng_status status = ENG_OK;
    for (size_t i = 0; i < count && status == ENG_OK; i++)
        status = trn_count_file(&counter, paths[i], error);
    *pieces = counter.pieces;
    return status;
}

static eng_status learn(training *t, const char *const *paths, size_t count, eng_error *error) {
    eng_pretokenizer *pretokenizer = NULL;
    trn_piece_map pieces = {0};
    const char *pattern = pattern_of(t);
    trn_learn_options learning = {.first_byte = 1 + (int32_t)t->options.special_count,
                                  .vocab_size = t->vocab_size,
                                  .min_count = t->options.min_count,
                                  .max_token_bytes = t->options.max_token_bytes,
                                  .progress = t->options.progress,
                                  .context = t->options.context};
    eng_status status = eng_pretokenizer_create(&pretokenizer);
    if (status == ENG_OK)
        status =
            eng_pretokenizer_add_split(pretokenizer, pattern, strlen(pattern), false, ENG_SPLIT_ISOLATED, false, error);
    if (status == ENG_OK)
        status = count_pieces(t, pretokenizer, paths, count, &pieces, error);
    if (status == ENG_OK)
        status = trn_learn_merges(&pieces, &learning, &t->learned, error);
    trn_piece_map_free(&pieces);
    eng_pretokenizer_free(pretokenizer);
    return status;
}

// ---- writing --------------------------------------------------------------------------------------------------------

static void put(training *t, const char *text) {
    if (t->status == ENG_OK)
        t->status = eng_buffer_append(&t->json, text, strlen(text));
}

static void put_format(training *t, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void put_format(training *t, const char *format, ...) {
    char text[128];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    put(t, text);
}

// The inside of a JSON string.
static void put_escaped(training *t, const char *text) {
    for (; *text; text++) {
        char plain[2] = {*text, 0};
        if (*text == '"' || *text == '\\')
            put(t, "\\");
        if ((unsigned char)*text < 0x20)
            put_format(t, "\\u%04x", (unsigned)(unsigned char)*text);
        else
            put(t, plain);
    }
}

// A token in the byte-level alphabet: a printable character for each byte.
static void put_token(training *t, int32_t id) {
    const trn_piece *token = &t->learned.tokens.pieces[id - t->learned.first_byte];
    const char *bytes = t->learned.tokens.keys.bytes + token->offset;
    for (uint32_t i = 0; i < token->length; i++) {
        char character[5] = {0};
        eng_utf8_encode(eng_byte_level_character((uint8_t)bytes[i]), character);
        put_escaped(t, character);
    }
}

static void put_added_tokens(training *t) {
    put(t, "  \"added_tokens\": [\n");
    for (size_t i = 0; i <= t->options.special_count; i++) {
        put_format(t, "    {\"id\": %zu, \"content\": \"", i);
        put_escaped(t, special_token(t, i));
        put(t, "\", \"single_word\": false, \"lstrip\": false, \"rstrip\": false, \"normalized\": false, "
               "\"special\": true}");
        put(t, i < t->options.special_count ? ",\n" : "\n");
    }
    put(t, "  ],\n");
}

static void put_pipeline(training *t) {
    put(t, "  \"normalizer\": null,\n"
           "  \"pre_tokenizer\": {\"type\": \"Sequence\", \"pretokenizers\": [\n"
           "    {\"type\": \"Split\", \"pattern\": {\"Regex\": \"");
    put_escaped(t, pattern_of(t));
    put(t, "\"}, \"behavior\": \"Isolated\", \"invert\": false},\n"
           "    {\"type\": \"ByteLevel\", \"add_prefix_space\": false, \"trim_offsets\": true, \"use_regex\": false}\n"
           "  ]},\n"
           "  \"post_processor\": {\"type\": \"TemplateProcessing\",\n"
           "    \"single\": [{\"SpecialToken\": {\"id\": \"" TRN_END_OF_TEXT "\", \"type_id\": 0}}, "
           "{\"Sequence\": {\"id\": \"A\", \"type_id\": 0}}],\n"
           "    \"pair\": [{\"SpecialToken\": {\"id\": \"" TRN_END_OF_TEXT "\", \"type_id\": 0}}, "
           "{\"Sequence\": {\"id\": \"A\", \"type_id\": 0}}, "
           "{\"SpecialToken\": {\"id\": \"" TRN_END_OF_TEXT "\", \"type_id\": 1}}, "
           "{\"Sequence\": {\"id\": \"B\", \"type_id\": 1}}],\n"
           "    \"special_tokens\": {\"" TRN_END_OF_TEXT "\": {\"id\": \"" TRN_END_OF_TEXT "\", \"ids\": [0], "
           "\"tokens\": [\"" TRN_END_OF_TEXT "\"]}}},\n"
           "  \"decoder\": {\"type\": \"ByteLevel\", \"add_prefix_space\": true, \"trim_offsets\": true, "
           "\"use_regex\": true},\n");
}

static void put_model(training *t) {
    const trn_learned *learned = &t->learned;
    put(t, "  \"model\": {\n"
           "    \"type\": \"BPE\",\n    \"dropout\": null,\n    \"unk_token\": null,\n"
           "    \"continuing_subword_prefix\": null,\n    \"end_of_word_suffix\": null,\n    \"fuse_unk\": false,\n"
           "    \"byte_fallback\": false,\n    \"ignore_merges\": false,\n    \"vocab\": {\n");
    for (int32_t id = 0; id < learned->first_byte; id++) {
        put(t, "      \"");
        put_escaped(t, special_token(t, (size_t)id));
        put_format(t, "\": %d,\n", id);
    }
    for (size_t i = 0; i < learned->tokens.count; i++) {
        int32_t id = learned->first_byte + (int32_t)i;
        put(t, "      \"");
        put_token(t, id);
        put_format(t, i + 1 < learned->tokens.count ? "\": %d,\n" : "\": %d\n", id);
    }
    put(t, "    },\n    \"merges\": [\n");
    for (size_t i = 0; i < learned->merge_count; i++) {
        put(t, "      \"");
        put_token(t, learned->merges[i].left);
        put(t, " ");
        put_token(t, learned->merges[i].right);
        put(t, i + 1 < learned->merge_count ? "\",\n" : "\"\n");
    }
    put(t, "    ]\n  }\n");
}

static const char tokenizer_config[] = "{\n"
                                       "  \"tokenizer_class\": \"PreTrainedTokenizerFast\",\n"
                                       "  \"add_bos_token\": true,\n"
                                       "  \"add_eos_token\": false,\n"
                                       "  \"add_prefix_space\": false,\n"
                                       "  \"clean_up_tokenization_spaces\": false,\n"
                                       "  \"bos_token\": \"" TRN_END_OF_TEXT "\",\n"
                                       "  \"eos_token\": \"" TRN_END_OF_TEXT "\"\n"
                                       "}\n";

static eng_status write_file(const char *dir, const char *name, const void *data, size_t length, eng_error *error) {
    char *path = eng_join_path(dir, name);
    if (!path)
        return ENG_NO_MEMORY;
    eng_status status = eng_write_file_atomic(path, data, length, error);
    free(path);
    return status;
}

static eng_status write_files(training *t, const char *dir, eng_error *error) {
    put(t, "{\n  \"version\": \"1.0\",\n  \"truncation\": null,\n  \"padding\": null,\n");
    put_added_tokens(t);
    put_pipeline(t);
    put_model(t);
    put(t, "}\n");
    if (t->status != ENG_OK)
        return t->status;
    eng_status status = eng_make_folder(dir, NULL, error);
    if (status == ENG_OK)
        status = write_file(dir, "tokenizer.json", t->json.bytes, t->json.length, error);
    if (status != ENG_OK)
        return status;
    return write_file(dir, "tokenizer_config.json", tokenizer_config, sizeof tokenizer_config - 1, error);
}

eng_status trn_tokenizer_train(const char *const *paths, size_t count, int32_t vocab_size,
                               const trn_tokenizer_options *options, const char *out_dir, eng_error *error) {
    training t = {.vocab_size = vocab_size};
    if (options)
        t.options = *options;
    eng_status status = check_options(&t, error);
    if (status == ENG_OK)
        status = learn(&t, paths, count, error);
    if (status == ENG_OK)
        status = write_files(&t, out_dir, error);
    trn_learned_free(&t.learned);
    eng_buffer_free(&t.json);
    return status == ENG_OK ? status : eng_fail(error, status, "training the tokenizer: %s", eng_status_text(status));
}
