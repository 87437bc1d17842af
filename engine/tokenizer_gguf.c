// SPDX-License-Identifier: Apache-2.0
// The tokenizer of a GGUF file as tokenizer.json and tokenizer_config.json.
//
// Two models are known. "gpt2" is byte-level BPE: its merges stand in the file, its pre-tokenizer by name. "llama" is
// SentencePiece's BPE with byte fallback: merges do not stand there; a pair may be joined where the joined text is a
// token, the higher its score the earlier. Tokens that the file marks as control become special: plain text never gives
// them. What is not known is refused by the key's name. Work is linear in the bytes of the vocabulary: a token's length
// is bounded.
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "engine/config_json.h"
#include "engine/import_internal.h"
#include "engine/pretokenize.h"

enum { MAX_TOKENS = 1 << 24, MAX_TOKEN_BYTES = 1024 };

// As numbered in the file.
enum { TYPE_NORMAL = 1, TYPE_UNKNOWN = 2, TYPE_CONTROL = 3, TYPE_USER = 4, TYPE_BYTE = 6, MAX_TYPE = TYPE_BYTE };

#define GGML(name) "tokenizer.ggml." name
#define LOWER "\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}"
#define UPPER "\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}"
#define BEHIND_WORDS " ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define CASED(more)                                           \
    "[^\\r\\n\\p{L}\\p{N}]?[" UPPER "]*[" LOWER "]+" more "|" \
    "[^\\r\\n\\p{L}\\p{N}]?[" UPPER "]+[" LOWER "]*" more "|"

static const char pattern_tekken[] = CASED("") "\\p{N}|" BEHIND_WORDS;
static const char pattern_gpt4o[] = CASED("(?i:'s|'t|'re|'ve|'m|'ll|'d)?") "\\p{N}{1,3}|" BEHIND_WORDS;

typedef struct pretokenizer {
    const char *name;
    const char *pattern; // NULL: ByteLevel's own
    bool digits;         // each digit is a piece, before anything else
    bool ignore_merges;  // a piece that is a token as a whole is not merged
    bool add_bos;        // where the file does not say
    bool compose;        // text is brought to NFC
} pretokenizer;

static const pretokenizer pretokenizers[] = {
    {"gpt-2", NULL, false, false, false, false},
    {"smollm", NULL, true, false, false, false},
    {"starcoder", NULL, true, false, false, false},
    {"refact", NULL, true, false, false, false},
    {"codeshell", NULL, true, false, false, false},
    {"llama-bpe", eng_pattern_llama3, false, true, true, false},
    {"llama3", eng_pattern_llama3, false, true, true, false},
    {"llama-v3", eng_pattern_llama3, false, true, true, false},
    {"dbrx", eng_pattern_llama3, false, false, false, false},
    {"smaug-bpe", eng_pattern_llama3, false, false, false, false},
    {"qwen2", eng_pattern_llama3_digit, false, false, false, true},
    {"deepseek-r1-qwen", eng_pattern_llama3_digit, false, false, false, true},
    {"tekken", pattern_tekken, false, true, true, false},
    {"gpt-4o", pattern_gpt4o, false, false, false, false},
};

typedef struct token {
    const char *text; // borrowed from the file
    size_t length;
    int type;
    float score;
} token;

typedef struct reading {
    const eng_gguf *file;
    eng_error *error;
    token *tokens;
    size_t count;
    bool sentencepiece;
    const pretokenizer *before; // of gpt2
    bool add_bos, add_space;
    int64_t bos;
    json_t *root, *vocab, *merges, *added;
} reading;

static eng_status fail(const reading *r, eng_status code, const char *key, const char *what) {
    return eng_gguf_fail(r->file, code, key, r->error, "%s", what);
}

static eng_status no_memory(const reading *r) {
    return eng_fail(r->error, ENG_NO_MEMORY, "no memory for tokenizer.json");
}

// ---- tokens

static eng_status read_texts(reading *r) {
    static const char key[] = GGML("tokens");
    const eng_gguf_value *list = eng_gguf_key(r->file, key);
    if (!list || list->type != ENG_GGUF_ARRAY || list->element != ENG_GGUF_STRING || list->count == 0 ||
        list->count > MAX_TOKENS)
        return fail(r, ENG_FORMAT, key, "must be a list of texts");
    r->tokens = calloc((size_t)list->count, sizeof *r->tokens);
    if (!r->tokens)
        return no_memory(r);
    eng_gguf_items items = eng_gguf_begin(list);
    eng_gguf_value text;
    for (; eng_gguf_next(&items, &text); r->count++) {
        token *made = &r->tokens[r->count];
        *made = (token){(const char *)text.data, (size_t)text.count, TYPE_NORMAL, 0};
        if (made->length == 0 || made->length > MAX_TOKEN_BYTES || memchr(made->text, 0, made->length))
            return eng_gguf_fail(r->file, ENG_FORMAT, key, r->error,
                                 "entry %zu is empty, longer than %d bytes or holds a NUL", r->count, MAX_TOKEN_BYTES);
    }
    return ENG_OK;
}

static eng_status read_types(reading *r) {
    static const char key[] = GGML("token_type");
    const eng_gguf_value *list = eng_gguf_key(r->file, key);
    if (!list)
        return ENG_OK;
    if (list->type != ENG_GGUF_ARRAY || list->count != r->count)
        return fail(r, ENG_FORMAT, key, "must be a list with a number for each token");
    eng_gguf_items items = eng_gguf_begin(list);
    eng_gguf_value value;
    for (size_t i = 0; eng_gguf_next(&items, &value); i++) {
        int64_t type;
        if (!eng_gguf_integer(&value, &type) || type < 0 || type > MAX_TYPE)
            return eng_gguf_fail(r->file, ENG_FORMAT, key, r->error, "entry %zu is no integer from 0 to %d", i,
                                 MAX_TYPE);
        r->tokens[i].type = type == 0 ? TYPE_NORMAL : (int)type;
    }
    return ENG_OK;
}

static eng_status read_scores(reading *r) {
    static const char key[] = GGML("scores");
    const eng_gguf_value *list = eng_gguf_key(r->file, key);
    if (!list || list->type != ENG_GGUF_ARRAY || list->count != r->count)
        return fail(r, ENG_FORMAT, key, "must be a list with a number for each token");
    eng_gguf_items items = eng_gguf_begin(list);
    eng_gguf_value value;
    for (size_t i = 0; eng_gguf_next(&items, &value); i++) {
        double score;
        if (!eng_gguf_real(&value, &score) || score != score)
            return eng_gguf_fail(r->file, ENG_FORMAT, key, r->error, "entry %zu is no number", i);
        r->tokens[i].score = (float)score;
    }
    return ENG_OK;
}

static eng_status add_special(reading *r, size_t id) {
    const token *t = &r->tokens[id];
    bool special = t->type != TYPE_USER;
    json_t *added =
        json_pack("{s:I, s:s%, s:b, s:b, s:b, s:b, s:b}", "id", (json_int_t)id, "content", t->text, t->length,
                  "single_word", 0, "lstrip", 0, "rstrip", 0, "normalized", 0, "special", special);
    return json_array_append_new(r->added, added) == 0 ? ENG_OK : no_memory(r);
}

static eng_status add_tokens(reading *r) {
    static const char key[] = GGML("tokens");
    for (size_t i = 0; i < r->count; i++) {
        const token *t = &r->tokens[i];
        if (json_object_getn(r->vocab, t->text, t->length))
            return eng_gguf_fail(r->file, ENG_FORMAT, key, r->error, "entry %zu is there twice: '%.*s'", i,
                                 (int)(t->length < 60 ? t->length : 60), t->text);
        if (json_object_setn_new(r->vocab, t->text, t->length, json_integer((json_int_t)i)) != 0)
            return eng_gguf_fail(r->file, ENG_FORMAT, key, r->error, "entry %zu is not UTF-8, or no memory", i);
        bool added = t->type == TYPE_UNKNOWN || t->type == TYPE_CONTROL || t->type == TYPE_USER;
        eng_status status = added ? add_special(r, i) : ENG_OK;
        if (status != ENG_OK)
            return status;
    }
    return ENG_OK;
}

// ---- merges

static eng_status copy_merges(reading *r) {
    static const char key[] = GGML("merges");
    const eng_gguf_value *list = eng_gguf_key(r->file, key);
    if (!list || list->type != ENG_GGUF_ARRAY || list->element != ENG_GGUF_STRING)
        return fail(r, ENG_FORMAT, key, "must be a list of texts");
    eng_gguf_items items = eng_gguf_begin(list);
    eng_gguf_value text;
    for (size_t i = 0; eng_gguf_next(&items, &text); i++) {
        json_t *merge = json_stringn((const char *)text.data, (size_t)text.count);
        if (!merge || json_array_append_new(r->merges, merge) != 0)
            return eng_gguf_fail(r->file, ENG_FORMAT, key, r->error, "entry %zu is not UTF-8, or no memory", i);
    }
    return ENG_OK;
}

typedef struct merge {
    const token *whole;
    size_t left; // bytes of its first part
    size_t order;
} merge;

static size_t characters(const char *text, size_t length) {
    size_t count = 0;
    for (size_t i = 0; i < length; i++)
        count += ((unsigned char)text[i] & 0xc0) != 0x80;
    return count;
}

// The best score first; of equal ones the longer left part, as the public converter has them.
static int by_score(const void *a, const void *b) {
    const merge *left = a, *right = b;
    if (left->whole->score != right->whole->score)
        return left->whole->score > right->whole->score ? -1 : 1;
    size_t mine = characters(left->whole->text, left->left), other = characters(right->whole->text, right->left);
    if (mine != other)
        return mine > other ? -1 : 1;
    mine = characters(left->whole->text + left->left, left->whole->length - left->left);
    other = characters(right->whole->text + right->left, right->whole->length - right->left);
    if (mine != other)
        return mine > other ? -1 : 1;
    return left->order < right->order ? -1 : left->order > right->order;
}

// Calls for each way of making a token from two: merges NULL only counts.
static size_t find_merges(const reading *r, merge *merges) {
    size_t count = 0;
    for (size_t i = 0; i < r->count; i++) {
        const token *t = &r->tokens[i];
        for (size_t cut = 1; t->type == TYPE_NORMAL && cut < t->length; cut++) {
            if (((unsigned char)t->text[cut] & 0xc0) == 0x80 || !json_object_getn(r->vocab, t->text, cut) ||
                !json_object_getn(r->vocab, t->text + cut, t->length - cut))
                continue;
            if (merges)
                merges[count] = (merge){t, cut, count};
            count++;
        }
    }
    return count;
}

static eng_status make_merges(reading *r) {
    size_t count = find_merges(r, NULL);
    merge *merges = calloc(count + 1, sizeof *merges);
    if (!merges)
        return no_memory(r);
    find_merges(r, merges);
    qsort(merges, count, sizeof *merges, by_score);
    eng_status status = ENG_OK;
    for (size_t i = 0; i < count && status == ENG_OK; i++) {
        const token *t = merges[i].whole;
        json_t *pair =
            json_pack("[s%, s%]", t->text, merges[i].left, t->text + merges[i].left, t->length - merges[i].left);
        if (json_array_append_new(r->merges, pair) != 0)
            status = no_memory(r);
    }
    free(merges);
    return status;
}

// ---- what stands around the model

static json_t *pretokenizer_json(const pretokenizer *before) {
    json_t *bytes = json_pack("{s:s, s:b, s:b, s:b}", "type", "ByteLevel", "add_prefix_space", 0, "trim_offsets", 1,
                              "use_regex", before->pattern == NULL);
    json_t *first = NULL;
    if (before->digits)
        first = json_pack("{s:s, s:b}", "type", "Digits", "individual_digits", 1);
    else if (before->pattern)
        first = json_pack("{s:s, s:{s:s}, s:s, s:b}", "type", "Split", "pattern", "Regex", before->pattern, "behavior",
                          "Isolated", "invert", 0);
    if (!first)
        return bytes;
    return json_pack("{s:s, s:[o, o]}", "type", "Sequence", "pretokenizers", first, bytes);
}

// Spaces are written as this character.
#define SPACE_MARK "\xe2\x96\x81"

static json_t *sentencepiece_normalizer(bool add_space) {
    json_t *replace =
        json_pack("{s:s, s:{s:s}, s:s}", "type", "Replace", "pattern", "String", " ", "content", SPACE_MARK);
    if (!add_space)
        return replace;
    return json_pack("{s:s, s:[{s:s, s:s}, o]}", "type", "Sequence", "normalizers", "type", "Prepend", "prepend",
                     SPACE_MARK, replace);
}

static json_t *sentencepiece_decoder(bool add_space) {
    json_t *list = json_pack("[{s:s, s:{s:s}, s:s}, {s:s}, {s:s}]", "type", "Replace", "pattern", "String", SPACE_MARK,
                             "content", " ", "type", "ByteFallback", "type", "Fuse");
    if (add_space)
        json_array_append_new(
            list, json_pack("{s:s, s:s, s:i, s:i}", "type", "Strip", "content", " ", "start", 1, "stop", 0));
    return json_pack("{s:s, s:o}", "type", "Sequence", "decoders", list);
}

static json_t *bos_template(const reading *r) {
    const token *t = &r->tokens[r->bos];
    json_t *name = json_stringn(t->text, t->length);
    json_t *token_part = json_pack("{s:{s:O, s:i}}", "SpecialToken", "id", name, "type_id", 0);
    json_t *result =
        json_pack("{s:s, s:[O, {s:{s:s, s:i}}], s:[O, {s:{s:s, s:i}}, {s:{s:s, s:i}}], s:{s%:{s:O, s:[I], s:[O]}}}",
                  "type", "TemplateProcessing", "single", token_part, "Sequence", "id", "A", "type_id", 0, "pair",
                  token_part, "Sequence", "id", "A", "type_id", 0, "Sequence", "id", "B", "type_id", 1,
                  "special_tokens", t->text, t->length, "id", name, "ids", (json_int_t)r->bos, "tokens", name);
    json_decref(token_part);
    json_decref(name);
    return result;
}

static const char *unknown_token(const reading *r, size_t *length) {
    for (size_t i = 0; i < r->count; i++) {
        if (r->tokens[i].type == TYPE_UNKNOWN) {
            *length = r->tokens[i].length;
            return r->tokens[i].text;
        }
    }
    return NULL;
}

static json_t *model_json(const reading *r) {
    size_t length = 0;
    const char *unknown = r->sentencepiece ? unknown_token(r, &length) : NULL;
    bool ignore_merges = !r->sentencepiece && r->before->ignore_merges;
    return json_pack("{s:s, s:n, s:o, s:n, s:n, s:b, s:b, s:b, s:O, s:O}", "type", "BPE", "dropout", "unk_token",
                     unknown ? json_stringn(unknown, length) : json_null(), "continuing_subword_prefix",
                     "end_of_word_suffix", "fuse_unk", r->sentencepiece, "byte_fallback", r->sentencepiece,
                     "ignore_merges", ignore_merges, "vocab", r->vocab, "merges", r->merges);
}

static eng_status put(const reading *r, json_t *object, const char *name, json_t *value) {
    return json_object_set_new(object, name, value) == 0 ? ENG_OK : no_memory(r);
}

static eng_status build(reading *r) {
    json_t *normalizer = json_null(), *before = json_null(), *decoder;
    if (r->sentencepiece) {
        normalizer = sentencepiece_normalizer(r->add_space);
        decoder = sentencepiece_decoder(r->add_space);
    } else {
        normalizer = r->before->compose ? json_pack("{s:s}", "type", "NFC") : json_null();
        before = pretokenizer_json(r->before);
        decoder = json_pack("{s:s, s:b, s:b, s:b}", "type", "ByteLevel", "add_prefix_space", 1, "trim_offsets", 1,
                            "use_regex", 1);
    }
    r->root = json_pack("{s:s, s:n, s:n, s:O, s:o, s:o, s:o, s:o, s:o}", "version", "1.0", "truncation", "padding",
                        "added_tokens", r->added, "normalizer", normalizer, "pre_tokenizer", before, "post_processor",
                        r->add_bos ? bos_template(r) : json_null(), "decoder", decoder, "model", model_json(r));
    return r->root ? ENG_OK : no_memory(r);
}

// ---- keys

static eng_status read_model(reading *r, const char *model) {
    static const char key[] = GGML("pre");
    r->sentencepiece = strcmp(model, "llama") == 0;
    r->add_bos = r->sentencepiece;
    if (r->sentencepiece)
        return ENG_OK;
    if (strcmp(model, "gpt2") != 0)
        return eng_gguf_fail(r->file, ENG_UNSUPPORTED, GGML("model"), r->error,
                             "'%.32s' is not supported (gpt2, llama)", model);
    char *name = NULL;
    eng_status status = eng_gguf_read_text(r->file, key, &name, r->error);
    if (status == ENG_OK && !name)
        return fail(r, ENG_FORMAT, key, "is missing");
    for (size_t i = 0; status == ENG_OK && i < sizeof pretokenizers / sizeof *pretokenizers; i++) {
        if (strcmp(pretokenizers[i].name, name) == 0)
            r->before = &pretokenizers[i];
    }
    if (status == ENG_OK && !r->before)
        status = eng_gguf_fail(r->file, ENG_UNSUPPORTED, key, r->error, "'%.32s' is not supported", name);
    free(name);
    r->add_bos = r->before && r->before->add_bos;
    return status;
}

// What would change the ids and is not built.
static eng_status refuse_unknown(reading *r) {
    static const char *const known[] = {GGML("model"),         GGML("pre"),           GGML("tokens"),
                                        GGML("token_type"),    GGML("scores"),        GGML("merges"),
                                        GGML("add_bos_token"), GGML("add_eos_token"), GGML("add_space_prefix")};
    for (size_t i = 0; i < eng_gguf_key_count(r->file); i++) {
        const eng_gguf_value *value = eng_gguf_key_at(r->file, i);
        size_t length = strlen(value->key);
        bool id = length > 3 && strcmp(value->key + length - 3, "_id") == 0, off = false, flag = true;
        bool found = strncmp(value->key, GGML(""), strlen(GGML(""))) != 0 || id;
        for (size_t k = 0; k < sizeof known / sizeof *known && !found; k++)
            found = strcmp(known[k], value->key) == 0;
        off = eng_gguf_flag(value, &flag) && !flag;
        if (!found && !off)
            return fail(r, ENG_UNSUPPORTED, value->key, "is not supported");
    }
    return ENG_OK;
}

static eng_status read_options(reading *r) {
    bool add_eos = false;
    r->bos = -1;
    r->add_space = true;
    eng_status status = refuse_unknown(r);
    if (status == ENG_OK)
        status = eng_gguf_read_flag(r->file, GGML("add_eos_token"), &add_eos, r->error);
    if (status == ENG_OK && add_eos)
        status = fail(r, ENG_UNSUPPORTED, GGML("add_eos_token"), "a token behind the text is not supported");
    if (status == ENG_OK) // byte-level BPE never looks at it
        status = eng_gguf_read_flag(r->file, GGML("add_space_prefix"), &r->add_space, r->error);
    if (status == ENG_OK)
        status = eng_gguf_read_flag(r->file, GGML("add_bos_token"), &r->add_bos, r->error);
    if (status == ENG_OK)
        status = eng_gguf_read_integer(r->file, GGML("bos_token_id"), -1, (int64_t)r->count - 1, &r->bos, r->error);
    if (status == ENG_OK && r->add_bos && r->bos < 0)
        status = fail(r, ENG_FORMAT, GGML("bos_token_id"), "is missing, though texts begin with it");
    return status;
}

static eng_status read_all(reading *r, const char *model) {
    eng_status status = read_model(r, model);
    if (status == ENG_OK)
        status = read_texts(r);
    if (status == ENG_OK)
        status = read_options(r);
    if (status == ENG_OK)
        status = read_types(r);
    if (status == ENG_OK && r->sentencepiece)
        status = read_scores(r);
    if (status == ENG_OK)
        status = add_tokens(r);
    if (status == ENG_OK)
        status = r->sentencepiece ? make_merges(r) : copy_merges(r);
    return status == ENG_OK ? build(r) : status;
}

// ---- tokenizer_config.json

// The text of the token that a key names by its id.
static eng_status put_named(const reading *r, json_t *config, const char *name, const char *key) {
    int64_t id = -1;
    eng_status status = eng_gguf_read_integer(r->file, key, -1, (int64_t)r->count - 1, &id, r->error);
    if (status != ENG_OK || id < 0)
        return status;
    return put(r, config, name, json_stringn(r->tokens[id].text, r->tokens[id].length));
}

static eng_status fill_config(const reading *r, json_t *config, bool *chat_template) {
    static const char *const named[][2] = {{"bos_token", GGML("bos_token_id")},
                                           {"eos_token", GGML("eos_token_id")},
                                           {"unk_token", GGML("unknown_token_id")},
                                           {"pad_token", GGML("padding_token_id")}};
    char *template = NULL;
    eng_status status = put(r, config, "tokenizer_class", json_string("PreTrainedTokenizerFast"));
    if (status == ENG_OK)
        status = put(r, config, "add_bos_token", json_boolean(r->add_bos));
    if (status == ENG_OK)
        status = put(r, config, "clean_up_tokenization_spaces", json_false());
    for (size_t i = 0; i < sizeof named / sizeof *named && status == ENG_OK; i++)
        status = put_named(r, config, named[i][0], named[i][1]);
    if (status == ENG_OK)
        status = eng_gguf_read_text(r->file, "tokenizer.chat_template", &template, r->error);
    *chat_template = template != NULL;
    if (template && json_object_set_new(config, "chat_template", json_string(template)) != 0)
        status = fail(r, ENG_FORMAT, "tokenizer.chat_template", "is not UTF-8, or no memory");
    free(template);
    return status;
}

static eng_status write_texts(const reading *r, const json_t *config, char **tokenizer, char **tokenizer_config) {
    *tokenizer = eng_json_write(r->root);
    *tokenizer_config = *tokenizer ? eng_json_write(config) : NULL;
    if (*tokenizer_config)
        return ENG_OK;
    free(*tokenizer);
    *tokenizer = NULL;
    return no_memory(r);
}

eng_status eng_import_tokenizer(const eng_gguf *file, char **tokenizer, char **tokenizer_config, bool *chat_template,
                                eng_error *error) {
    char *model = NULL;
    *tokenizer = *tokenizer_config = NULL;
    *chat_template = false;
    eng_status status = eng_gguf_read_text(file, GGML("model"), &model, error);
    if (status != ENG_OK || !model || strcmp(model, "no_vocab") == 0) {
        free(model);
        return status;
    }
    reading r = {.file = file, .error = error, .vocab = json_object(), .merges = json_array(), .added = json_array()};
    json_t *config = json_object();
    status = r.vocab && r.merges && r.added && config ? read_all(&r, model) : no_memory(&r);
    if (status == ENG_OK)
        status = fill_config(&r, config, chat_template);
    if (status == ENG_OK)
        status = write_texts(&r, config, tokenizer, tokenizer_config);
    json_decref(config);
    json_decref(r.root);
    json_decref(r.added);
    json_decref(r.merges);
    json_decref(r.vocab);
    free(r.tokens);
    free(model);
    return status;
}
