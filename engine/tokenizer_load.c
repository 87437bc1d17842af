// SPDX-License-Identifier: Apache-2.0
// Reads tokenizer.json and tokenizer_config.json into an eng_tokenizer.
//
// Everything is checked here, so that encoding cannot meet a surprise: ids are within bounds and stand for one token
// each, both sides and the result of every merge are tokens, what is not built is refused by name. Holes between ids
// are allowed. A token flagged special is never the outcome of plain text, even where its text is a whole piece.
#include <stdlib.h>
#include <string.h>

#include "engine/config_json.h"
#include "engine/digest.h"
#include "engine/files.h"
#include "engine/text.h"
#include "engine/tokenizer_internal.h"
#include "engine/utf8.h"

enum { MAX_FILE = 128 << 20, MAX_CONFIG_FILE = 16 << 20, MAX_ADDED = 1 << 20 };

typedef struct loading {
    eng_tokenizer *tokenizer;
    json_t *root, *config;  // config may be NULL
    json_t *vocab, *merges; // borrowed from root
    int32_t vocab_size;     // of the model, 0: any
    bool ignore_merges;
    const char **names; // by id: text in the vocabulary, NULL: none
    eng_decoder decoder;
    eng_error *error;
} loading;

static eng_status no_memory(const loading *l) {
    return eng_fail(l->error, ENG_NO_MEMORY, "no memory for the tokenizer");
}

static eng_status parse_object(const char *text, size_t length, const char *name, json_t **out, eng_error *error) {
    json_error_t fault;
    json_t *root = json_loadb(text, length, JSON_REJECT_DUPLICATES, &fault);
    if (!root)
        return eng_fail(error, ENG_FORMAT, "%s: line %d, column %d: %s", name, fault.line, fault.column, fault.text);
    if (!json_is_object(root)) {
        json_decref(root);
        return eng_fail(error, ENG_FORMAT, "%s: not an object", name);
    }
    *out = root;
    return ENG_OK;
}

// ---- model options --------------------------------------------------------------------------------------------------

static bool is_empty(const json_t *value) {
    return !value || json_is_null(value) || (json_is_string(value) && json_string_length(value) == 0);
}

static eng_status read_model(loading *l) {
    const json_t *model = json_object_get(l->root, "model");
    if (!json_is_object(model))
        return eng_fail(l->error, ENG_FORMAT, "tokenizer.json: no model");
    eng_keys keys = {.object = model, .path = "tokenizer.json", .scope = "model.", .error = l->error};
    const char *type = eng_keys_text(&keys, "type", "BPE"); // files before 2020 name none
    double dropout = eng_keys_number(&keys, "dropout", 0, 0, 1);
    l->tokenizer->byte_fallback = eng_keys_flag(&keys, "byte_fallback", false);
    l->ignore_merges = eng_keys_flag(&keys, "ignore_merges", false);
    if (keys.status != ENG_OK)
        return keys.status;
    if (strcmp(type, "BPE") != 0)
        return eng_fail(l->error, ENG_UNSUPPORTED, "tokenizer.json: model %s is not supported", type);
    if (dropout > 0)
        return eng_fail(l->error, ENG_UNSUPPORTED, "tokenizer.json: model.dropout is not supported");
    static const char *const affixes[] = {"continuing_subword_prefix", "end_of_word_suffix"};
    for (int i = 0; i < 2; i++) {
        if (!is_empty(json_object_get(model, affixes[i])))
            return eng_fail(l->error, ENG_UNSUPPORTED, "tokenizer.json: model.%s is not supported", affixes[i]);
    }
    l->vocab = json_object_get(model, "vocab");
    l->merges = json_object_get(model, "merges");
    if (!json_is_object(l->vocab))
        return eng_fail(l->error, ENG_FORMAT, "tokenizer.json: model.vocab is missing or no object");
    if (!json_is_array(l->merges))
        return eng_fail(l->error, ENG_FORMAT, "tokenizer.json: model.merges is missing or no list");
    return ENG_OK;
}

// ---- ids ------------------------------------------------------------------------------------------------------------

static eng_status check_id(loading *l, const char *name, const json_t *value) {
    if (!json_is_integer(value))
        return eng_fail(l->error, ENG_FORMAT, "tokenizer.json: the id of token '%.80s' is no integer", name);
    json_int_t id = json_integer_value(value);
    if (id < 0 || id >= ENG_MAX_TOKENS)
        return eng_fail(l->error, ENG_FORMAT, "tokenizer.json: token '%.80s' has id %lld; ids are 0 to %d", name,
                        (long long)id, ENG_MAX_TOKENS - 1);
    if (l->vocab_size > 0 && id >= l->vocab_size)
        return eng_fail(l->error, ENG_FORMAT,
                        "tokenizer.json: token '%.80s' has id %lld; the model's vocabulary has %d", name, (long long)id,
                        l->vocab_size);
    if (id >= l->tokenizer->size)
        l->tokenizer->size = (int32_t)id + 1;
    return ENG_OK;
}

static eng_status read_added_token(loading *l, const json_t *value, eng_added_token *added) {
    eng_keys keys = {.object = value, .path = "tokenizer.json", .scope = "added_tokens: ", .error = l->error};
    const char *content = eng_keys_text(&keys, "content", "");
    added->single_word = eng_keys_flag(&keys, "single_word", false);
    added->lstrip = eng_keys_flag(&keys, "lstrip", false);
    added->rstrip = eng_keys_flag(&keys, "rstrip", false);
    added->special = eng_keys_flag(&keys, "special", false);
    added->normalized = eng_keys_flag(&keys, "normalized", !added->special);
    if (keys.status != ENG_OK)
        return keys.status;
    if (!*content)
        return eng_fail(l->error, ENG_FORMAT, "tokenizer.json: an added token without content");
    eng_status status = check_id(l, content, json_object_get(value, "id"));
    if (status != ENG_OK)
        return status;
    added->id = (int32_t)json_integer_value(json_object_get(value, "id"));
    added->content = strdup(content);
    return added->content ? ENG_OK : no_memory(l);
}

static eng_status read_added_tokens(loading *l) {
    const json_t *list = json_object_get(l->root, "added_tokens");
    if (!list || json_is_null(list))
        return ENG_OK;
    if (!json_is_array(list) || json_array_size(list) > MAX_ADDED)
        return eng_fail(l->error, ENG_FORMAT, "tokenizer.json: added_tokens is no list of at most %d", MAX_ADDED);
    size_t count = json_array_size(list);
    l->tokenizer->added = calloc(count + 1, sizeof *l->tokenizer->added);
    if (!l->tokenizer->added)
        return no_memory(l);
    for (size_t i = 0; i < count; i++) {
        const json_t *value = json_array_get(list, i);
        if (!json_is_object(value))
            return eng_fail(l->error, ENG_FORMAT, "tokenizer.json: added_tokens: entry %zu is no object", i);
        eng_status status = read_added_token(l, value, &l->tokenizer->added[i]);
        l->tokenizer->added_count = i + 1;
        if (status != ENG_OK)
            return status;
    }
    return ENG_OK;
}

static eng_status claim_id(loading *l, int32_t id, const char *name) {
    if (l->names[id] && strcmp(l->names[id], name) != 0)
        return eng_fail(l->error, ENG_FORMAT, "tokenizer.json: tokens '%.60s' and '%.60s' both have id %d",
                        l->names[id], name, id);
    l->names[id] = name;
    return ENG_OK;
}

// Who owns each id; the texts are not there yet, but which ids are known is.
static eng_status read_ids(loading *l) {
    eng_tokenizer *t = l->tokenizer;
    const char *name;
    json_t *value;
    json_object_foreach(l->vocab, name, value) {
        eng_status status = check_id(l, name, value);
        if (status != ENG_OK)
            return status;
    }
    eng_status status = read_added_tokens(l);
    if (status != ENG_OK)
        return status;
    if (t->size == 0)
        return eng_fail(l->error, ENG_FORMAT, "tokenizer.json: the vocabulary is empty");
    l->names = calloc((size_t)t->size, sizeof *l->names);
    t->tokens = calloc((size_t)t->size, sizeof *t->tokens);
    if (!l->names || !t->tokens)
        return no_memory(l);
    json_object_foreach(l->vocab, name, value) {
        status = claim_id(l, (int32_t)json_integer_value(value), name);
        if (status != ENG_OK)
            return status;
    }
    for (size_t i = 0; i < t->added_count && status == ENG_OK; i++) {
        const eng_added_token *added = &t->added[i];
        const json_t *other = json_object_get(l->vocab, added->content);
        if (other && json_integer_value(other) != added->id)
            return eng_fail(l->error, ENG_FORMAT,
                            "tokenizer.json: added token '%.80s' has id %d, in the vocabulary %lld", added->content,
                            added->id, (long long)json_integer_value(other));
        status = claim_id(l, added->id, added->content);
        t->tokens[added->id].special |= added->special;
    }
    for (int32_t id = 0; id < t->size; id++)
        t->tokens[id].known = l->names[id] != NULL;
    return status;
}

// ---- texts of tokens ------------------------------------------------------------------------------------------------

// Appends the bytes that a byte-level name stands for; false (and nothing appended): it holds another character.
static eng_status append_byte_level(eng_buffer *out, const char *name, bool *fits) {
    size_t before = out->length, length = strlen(name);
    *fits = true;
    for (size_t at = 0; at < length;) {
        uint32_t code = 0;
        size_t size = eng_utf8_decode(name + at, length - at, &code);
        int byte = size ? eng_byte_level_byte(code) : -1;
        if (byte < 0) {
            out->length = before;
            *fits = false;
            return ENG_OK;
        }
        char value = (char)byte;
        eng_status status = eng_buffer_append(out, &value, 1);
        if (status != ENG_OK)
            return status;
        at += size;
    }
    return ENG_OK;
}

// The byte of a name like "<0x0A>", -1: none.
static int fallback_byte(const char *name) {
    static const char digits[] = "0123456789abcdef";
    if (strlen(name) != 6 || strncmp(name, "<0x", 3) != 0 || name[5] != '>')
        return -1;
    int byte = 0;
    for (int i = 3; i < 5; i++) {
        char letter = name[i] >= 'A' && name[i] <= 'F' ? (char)(name[i] + 32) : name[i];
        const char *digit = letter ? strchr(digits, letter) : NULL;
        if (!digit)
            return -1;
        byte = byte * 16 + (int)(digit - digits);
    }
    return byte;
}

// Appends text with every occurrence of from turned into to, and so on for the further replacements.
static eng_status append_replaced(eng_buffer *out, const eng_decoder *decoder, size_t index, const char *text,
                                  size_t length) {
    if (index == decoder->replacements)
        return eng_buffer_append(out, text, length);
    const char *from = decoder->replaced[index], *to = decoder->replacement[index];
    size_t size = strlen(from);
    eng_buffer changed = {0};
    eng_status status = ENG_OK;
    for (size_t at = 0; at < length && status == ENG_OK;) {
        bool here = length - at >= size && memcmp(text + at, from, size) == 0;
        status = here ? eng_buffer_append(&changed, to, strlen(to)) : eng_buffer_append(&changed, text + at, 1);
        at += here ? size : 1;
    }
    if (status == ENG_OK)
        status = append_replaced(out, decoder, index + 1, changed.bytes, changed.length);
    eng_buffer_free(&changed);
    return status;
}

// What decoding writes for a token.
static eng_status append_text(loading *l, const char *name, bool added) {
    eng_buffer *out = &l->tokenizer->texts;
    if (added) // its own text, not bytes in disguise
        return eng_buffer_append(out, name, strlen(name));
    if (l->tokenizer->byte_level) {
        bool fits;
        eng_status status = append_byte_level(out, name, &fits);
        return status != ENG_OK || fits ? status : eng_buffer_append(out, name, strlen(name));
    }
    int byte = l->decoder.byte_fallback ? fallback_byte(name) : -1;
    char value = (char)byte;
    return byte >= 0 ? eng_buffer_append(out, &value, 1) : append_replaced(out, &l->decoder, 0, name, strlen(name));
}

static eng_status set_text(loading *l, int32_t id, const char *name, bool added) {
    eng_token_text *token = &l->tokenizer->tokens[id];
    token->offset = l->tokenizer->texts.length;
    eng_status status = append_text(l, name, added);
    token->length = (uint32_t)(l->tokenizer->texts.length - token->offset);
    return status == ENG_OK ? ENG_OK : no_memory(l);
}

static eng_status set_texts(loading *l) {
    const eng_tokenizer *t = l->tokenizer;
    eng_status status = ENG_OK;
    for (int32_t id = 0; id < t->size && status == ENG_OK; id++) {
        if (l->names[id])
            status = set_text(l, id, l->names[id], false);
    }
    for (size_t i = 0; i < t->added_count && status == ENG_OK; i++)
        status = set_text(l, t->added[i].id, t->added[i].content, true);
    return status;
}

// ---- BPE ------------------------------------------------------------------------------------------------------------

static eng_status add_token(loading *l, const char *name, int32_t id, eng_buffer *bytes) {
    eng_tokenizer *t = l->tokenizer;
    bool fits = true;
    bytes->length = 0;
    eng_status status =
        t->byte_level ? append_byte_level(bytes, name, &fits) : eng_buffer_append(bytes, name, strlen(name));
    if (status != ENG_OK)
        return status;
    if (t->byte_level && fits && bytes->length == 1)
        eng_bpe_set_byte(t->bpe, (uint8_t)bytes->bytes[0], id);
    int byte = t->byte_fallback ? fallback_byte(name) : -1;
    if (!t->byte_level && byte >= 0)
        eng_bpe_set_byte(t->bpe, (uint8_t)byte, id);
    if (!fits || bytes->length == 0 || t->tokens[id].special)
        return ENG_OK;
    return eng_bpe_add_token(t->bpe, bytes->bytes, bytes->length, id);
}

static eng_status add_tokens(loading *l) {
    eng_buffer bytes = {0};
    eng_status status = ENG_OK;
    const char *name;
    json_t *value;
    json_object_foreach(l->vocab, name, value) {
        status = add_token(l, name, (int32_t)json_integer_value(value), &bytes);
        if (status != ENG_OK)
            break;
    }
    eng_buffer_free(&bytes);
    return status == ENG_OK ? ENG_OK : no_memory(l);
}

// The two sides of a merge, "a b" or ["a", "b"]. copy holds the text of the first form.
static eng_status merge_sides(loading *l, size_t index, const json_t *merge, eng_buffer *copy, const char **left,
                              const char **right) {
    if (json_is_array(merge) && json_array_size(merge) == 2) {
        *left = json_string_value(json_array_get(merge, 0));
        *right = json_string_value(json_array_get(merge, 1));
        if (*left && *right)
            return ENG_OK;
    }
    const char *text = json_string_value(merge), *space = text ? strchr(text, ' ') : NULL;
    if (!space || strchr(space + 1, ' '))
        return eng_fail(l->error, ENG_FORMAT, "tokenizer.json: merge %zu is neither \"a b\" nor [\"a\", \"b\"]", index);
    copy->length = 0;
    if (eng_buffer_append(copy, text, strlen(text) + 1) != ENG_OK)
        return no_memory(l);
    copy->bytes[space - text] = '\0';
    *left = copy->bytes;
    *right = copy->bytes + (space - text) + 1;
    return ENG_OK;
}

static eng_status token_id(loading *l, size_t index, const char *name, int32_t *id) {
    const json_t *value = json_object_get(l->vocab, name);
    if (!value)
        return eng_fail(l->error, ENG_FORMAT, "tokenizer.json: merge %zu: '%.80s' is not in the vocabulary", index,
                        name);
    *id = (int32_t)json_integer_value(value);
    return ENG_OK;
}

static eng_status add_merge(loading *l, size_t index, const json_t *merge, eng_buffer *copy, eng_buffer *joined) {
    const char *left = "", *right = "";
    int32_t left_id = 0, right_id = 0, result = 0;
    eng_status status = merge_sides(l, index, merge, copy, &left, &right);
    if (status == ENG_OK)
        status = token_id(l, index, left, &left_id);
    if (status == ENG_OK)
        status = token_id(l, index, right, &right_id);
    if (status != ENG_OK)
        return status;
    joined->length = 0;
    if (eng_buffer_append(joined, left, strlen(left)) != ENG_OK ||
        eng_buffer_append(joined, right, strlen(right) + 1) != ENG_OK)
        return no_memory(l);
    status = token_id(l, index, joined->bytes, &result);
    if (status == ENG_OK)
        eng_bpe_add_merge(l->tokenizer->bpe, left_id, right_id, (uint32_t)index, result);
    return status;
}

static eng_status add_merges(loading *l) {
    eng_buffer copy = {0}, joined = {0};
    eng_status status = ENG_OK;
    for (size_t i = 0; i < json_array_size(l->merges) && status == ENG_OK; i++) {
        const json_t *merge = json_array_get(l->merges, i);
        const char *text = json_string_value(merge);
        if (text && strncmp(text, "#version", 8) == 0)
            continue; // the first line of a merges.txt that was taken over
        status = add_merge(l, i, merge, &copy, &joined);
    }
    eng_buffer_free(&copy);
    eng_buffer_free(&joined);
    return status;
}

static eng_status build_bpe(loading *l) {
    eng_bpe_options options = {.byte_level = l->tokenizer->byte_level,
                               .ignore_merges = l->ignore_merges,
                               .tokens = json_object_size(l->vocab),
                               .merges = json_array_size(l->merges)};
    if (options.merges > INT32_MAX)
        return eng_fail(l->error, ENG_FORMAT, "tokenizer.json: too many merges");
    if (eng_bpe_create(&options, &l->tokenizer->bpe) != ENG_OK)
        return no_memory(l);
    eng_status status = add_tokens(l);
    if (status == ENG_OK)
        status = add_merges(l);
    if (status != ENG_OK)
        return status;
    status = eng_bpe_finish(l->tokenizer->bpe);
    return status == ENG_OK ? ENG_OK : eng_fail(l->error, status, "tokenizer.json: %s", eng_status_text(status));
}

// ---- added tokens ---------------------------------------------------------------------------------------------------

typedef enum pass_kind { PASS_RAW, PASS_NORMALIZED, PASS_CONTROL } pass_kind;

static eng_status build_pass(loading *l, pass_kind kind, eng_added_pass *pass) {
    const eng_tokenizer *t = l->tokenizer;
    eng_buffer texts = {0}; // normalized contents
    eng_normalize_memory memory = {0};
    eng_match *match = NULL;
    eng_text *patterns = calloc(t->added_count + 1, sizeof *patterns);
    size_t *offsets = calloc(t->added_count + 1, sizeof *offsets);
    pass->tokens = calloc(t->added_count + 1, sizeof *pass->tokens);
    eng_status status = patterns && offsets && pass->tokens ? eng_match_create(&match) : ENG_NO_MEMORY;
    size_t count = 0;
    for (size_t i = 0; i < t->added_count && status == ENG_OK; i++) {
        const eng_added_token *added = &t->added[i];
        if (kind == PASS_CONTROL ? !added->special : added->normalized != (kind == PASS_NORMALIZED))
            continue;
        const char *content = added->content;
        size_t length = strlen(content);
        if (kind == PASS_NORMALIZED)
            status = eng_normalize(t->normalizer, &memory, match, content, length, &content, &length, l->error);
        if (status != ENG_OK || length == 0)
            continue;
        offsets[count] = texts.length;
        patterns[count].length = length;
        pass->tokens[count++] = added;
        status = eng_buffer_append(&texts, content, length);
    }
    for (size_t i = 0; i < count; i++)
        patterns[i].bytes = texts.bytes + offsets[i];
    if (status == ENG_OK && count > 0)
        status = eng_matcher_create(patterns, count, &pass->matcher);
    eng_match_free(match);
    eng_normalize_memory_free(&memory);
    eng_buffer_free(&texts);
    free(offsets);
    free(patterns);
    return status == ENG_OK ? ENG_OK
                            : eng_fail(l->error, status, "tokenizer.json: added_tokens: %s", eng_status_text(status));
}

// ---- BOS ------------------------------------------------------------------------------------------------------------

// tokenizer_config.json decides with add_bos_token; where it says nothing, the template of tokenizer.json does.
static eng_status read_bos(loading *l) {
    eng_tokenizer *t = l->tokenizer;
    t->bos = t->template_bos;
    const json_t *wanted = json_object_get(l->config, "add_bos_token");
    if (!wanted || json_is_null(wanted))
        return ENG_OK;
    if (!json_is_boolean(wanted))
        return eng_fail(l->error, ENG_FORMAT, "tokenizer_config.json: add_bos_token is neither true nor false");
    if (json_is_false(wanted)) {
        t->bos = -1;
        return ENG_OK;
    }
    const json_t *token = json_object_get(l->config, "bos_token");
    const char *name = json_string_value(json_is_object(token) ? json_object_get(token, "content") : token);
    if (!name && t->bos >= 0)
        return ENG_OK;
    if (!name)
        return eng_fail(l->error, ENG_FORMAT, "tokenizer_config.json: add_bos_token without a bos_token");
    t->bos = eng_tokenizer_special(t, name);
    const json_t *id = json_object_get(l->vocab, name);
    if (t->bos < 0 && id)
        t->bos = (int32_t)json_integer_value(id);
    return t->bos >= 0 ? ENG_OK
                       : eng_fail(l->error, ENG_FORMAT,
                                  "tokenizer_config.json: bos_token '%.80s' is no token of "
                                  "tokenizer.json",
                                  name);
}

// ---- the whole ------------------------------------------------------------------------------------------------------

static eng_status load(loading *l) {
    eng_status status = read_model(l);
    if (status == ENG_OK)
        status = read_ids(l);
    if (status == ENG_OK)
        status = eng_tokenizer_read_pipeline(l->tokenizer, l->root, &l->decoder, l->error);
    if (status == ENG_OK)
        status = set_texts(l);
    if (status == ENG_OK)
        status = build_bpe(l);
    if (status == ENG_OK)
        status = build_pass(l, PASS_RAW, &l->tokenizer->raw);
    if (status == ENG_OK)
        status = build_pass(l, PASS_NORMALIZED, &l->tokenizer->normalized);
    if (status == ENG_OK)
        status = build_pass(l, PASS_CONTROL, &l->tokenizer->control);
    return status == ENG_OK ? read_bos(l) : status;
}

eng_status eng_tokenizer_parse(const char *json, size_t length, const char *config_json, size_t config_length,
                               int32_t vocab_size, eng_tokenizer **out, eng_error *error) {
    loading l = {.vocab_size = vocab_size, .error = error};
    l.tokenizer = calloc(1, sizeof *l.tokenizer);
    if (!l.tokenizer)
        return no_memory(&l);
    eng_status status = eng_digest_bytes(json, length, l.tokenizer->digest);
    if (status == ENG_OK)
        status = parse_object(json, length, "tokenizer.json", &l.root, error);
    if (status == ENG_OK && config_json)
        status = parse_object(config_json, config_length, "tokenizer_config.json", &l.config, error);
    if (status == ENG_OK)
        status = load(&l);
    free(l.names);
    json_decref(l.root);
    json_decref(l.config);
    if (status != ENG_OK) {
        eng_tokenizer_close(l.tokenizer);
        return eng_fail(error, status, "tokenizer.json: %s", eng_status_text(status));
    }
    *out = l.tokenizer;
    return ENG_OK;
}

static eng_status read_config(const char *dir, char **config, size_t *length, eng_error *error) {
    char *path = eng_join_path(dir, "tokenizer_config.json");
    if (!path)
        return eng_fail(error, ENG_NO_MEMORY, "no memory for the tokenizer");
    eng_error fault = {0};
    eng_status status = eng_read_file(path, MAX_CONFIG_FILE, config, length, &fault);
    free(path);
    if (status == ENG_NOT_FOUND)
        return ENG_OK;
    return status == ENG_OK ? status : eng_fail(error, status, "%s", fault.text);
}

eng_status eng_tokenizer_open(const char *dir, int32_t vocab_size, eng_tokenizer **out, eng_error *error) {
    char *path = eng_join_path(dir, "tokenizer.json"), *json = NULL, *config = NULL;
    size_t length = 0, config_length = 0;
    if (!path)
        return eng_fail(error, ENG_NO_MEMORY, "no memory for the tokenizer");
    eng_status status = eng_read_file(path, MAX_FILE, &json, &length, error);
    if (status == ENG_OK)
        status = read_config(dir, &config, &config_length, error);
    if (status == ENG_OK)
        status = eng_tokenizer_parse(json, length, config, config_length, vocab_size, out, error);
    free(path);
    free(json);
    free(config);
    return status;
}
