// SPDX-License-Identifier: Apache-2.0
// The parts of tokenizer.json around the model: normalizer, pre_tokenizer, post_processor, decoder.
//
// Each is an object with a type, or null, or a Sequence of such. A type or an option that is not built is refused by
// name when the file is loaded: guessing would give other ids than the model was trained with. Runs while loading only.
#include "engine/tokenizer_internal.h"

#include <string.h>

#include "engine/config_json.h"

enum { MAX_DEPTH = 8 };

typedef struct reading {
    eng_tokenizer *tokenizer;
    eng_decoder *decoder;
    eng_error *error;
    bool ended; // nothing may follow in the pre_tokenizer
} reading;

typedef eng_status (*part_fn)(reading *r, const char *part, const char *type, eng_keys *keys);

static eng_status refuse(reading *r, const char *part, const char *type) {
    return eng_fail(r->error, ENG_UNSUPPORTED, "tokenizer.json: %s %s is not supported", part, type);
}

static eng_status malformed(reading *r, const char *part, const char *what) {
    return eng_fail(r->error, ENG_FORMAT, "tokenizer.json: %s: %s", part, what);
}

// Calls read for the part, or for each member of a Sequence in order; null is nothing.
static eng_status read_part(reading *r, const char *part, const json_t *value, const char *members, part_fn read,
                            int depth) {
    if (!value || json_is_null(value))
        return ENG_OK;
    const char *type = json_string_value(json_object_get(value, "type"));
    if (!type)
        return malformed(r, part, "no type");
    if (strcmp(type, "Sequence") != 0) {
        eng_keys keys = {.object = value, .path = "tokenizer.json", .scope = "", .error = r->error};
        eng_status status = read(r, part, type, &keys);
        return status != ENG_OK ? status : keys.status;
    }
    const json_t *list = json_object_get(value, members), *member;
    if (!json_is_array(list))
        return malformed(r, part, "a Sequence without its list");
    if (depth == MAX_DEPTH)
        return malformed(r, part, "Sequences nested too deep");
    size_t i;
    json_array_foreach(list, i, member) {
        eng_status status = read_part(r, part, member, members, read, depth + 1);
        if (status != ENG_OK)
            return status;
    }
    return ENG_OK;
}

// {"String": text} or {"Regex": pattern}.
static eng_status read_pattern(reading *r, const char *part, const eng_keys *keys, const char **text, bool *literal) {
    const json_t *pattern = json_object_get(keys->object, "pattern");
    const char *string = json_string_value(json_object_get(pattern, "String"));
    const char *regex = json_string_value(json_object_get(pattern, "Regex"));
    if (!string == !regex)
        return malformed(r, part, "pattern is neither a String nor a Regex");
    *text = string ? string : regex;
    *literal = string != NULL;
    return ENG_OK;
}

// ---- normalizer -----------------------------------------------------------------------------------------------------

static eng_status read_normalizer(reading *r, const char *part, const char *type, eng_keys *keys) {
    static const char *const forms[] = {[ENG_NFC] = "NFC", [ENG_NFD] = "NFD", [ENG_NFKC] = "NFKC", [ENG_NFKD] = "NFKD"};
    eng_normalizer *normalizer = r->tokenizer->normalizer;
    for (size_t form = 0; form < sizeof forms / sizeof *forms; form++) {
        if (strcmp(type, forms[form]) == 0)
            return eng_normalizer_add_form(normalizer, (eng_form)form, r->error);
    }
    if (strcmp(type, "Prepend") == 0) {
        const char *text = eng_keys_text(keys, "prepend", NULL);
        return text ? eng_normalizer_add_prepend(normalizer, text, r->error) : malformed(r, part, "Prepend of nothing");
    }
    if (strcmp(type, "Replace") != 0)
        return refuse(r, part, type);
    const char *pattern = "", *content = eng_keys_text(keys, "content", NULL);
    bool literal = false;
    eng_status status = read_pattern(r, part, keys, &pattern, &literal);
    if (status != ENG_OK)
        return status;
    if (!content || !*pattern)
        return malformed(r, part, "Replace without pattern or content");
    return eng_normalizer_add_replace(normalizer, pattern, strlen(pattern), literal, content, r->error);
}

// ---- pre_tokenizer --------------------------------------------------------------------------------------------------

static eng_status read_behavior(reading *r, const char *part, eng_keys *keys, eng_split *behavior) {
    static const char *const names[] = {[ENG_SPLIT_ISOLATED] = "Isolated",
                                        [ENG_SPLIT_REMOVED] = "Removed",
                                        [ENG_SPLIT_MERGED_WITH_PREVIOUS] = "MergedWithPrevious",
                                        [ENG_SPLIT_MERGED_WITH_NEXT] = "MergedWithNext",
                                        [ENG_SPLIT_CONTIGUOUS] = "Contiguous"};
    const char *name = eng_keys_text(keys, "behavior", "Isolated");
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (strcmp(name, names[i]) == 0) {
            *behavior = (eng_split)i;
            return ENG_OK;
        }
    }
    return eng_fail(r->error, ENG_UNSUPPORTED, "tokenizer.json: %s: behavior %s is not supported", part, name);
}

static eng_status add_split(reading *r, const char *pattern, bool literal, eng_split behavior, bool invert) {
    return eng_pretokenizer_add_split(r->tokenizer->pretokenizer, pattern, strlen(pattern), literal, behavior, invert,
                                      r->error);
}

static eng_status read_byte_level(reading *r, eng_keys *keys) {
    r->tokenizer->byte_level = true;
    r->ended = true; // a later stage would see the byte-level alphabet instead of the text
    eng_status status = ENG_OK;
    if (eng_keys_flag(keys, "add_prefix_space", true))
        status = eng_pretokenizer_add_prefix_space(r->tokenizer->pretokenizer, r->error);
    if (status == ENG_OK && eng_keys_flag(keys, "use_regex", true))
        status = add_split(r, eng_pattern_gpt2, false, ENG_SPLIT_ISOLATED, false);
    return status;
}

static eng_status read_split(reading *r, const char *part, eng_keys *keys) {
    const char *pattern = "";
    bool literal = false;
    eng_split behavior = ENG_SPLIT_ISOLATED;
    eng_status status = read_pattern(r, part, keys, &pattern, &literal);
    if (status == ENG_OK)
        status = read_behavior(r, part, keys, &behavior);
    if (status != ENG_OK)
        return status;
    if (!*pattern)
        return malformed(r, part, "Split by an empty pattern");
    return add_split(r, pattern, literal, behavior, eng_keys_flag(keys, "invert", false));
}

static eng_status read_metaspace(reading *r, const char *part, eng_keys *keys) {
    const char *mark = eng_keys_text(keys, "replacement", "\xe2\x96\x81");
    const char *scheme = eng_keys_text(keys, "prepend_scheme", NULL);
    if (!scheme) // files from before prepend_scheme
        scheme = eng_keys_flag(keys, "add_prefix_space", true) ? "always" : "never";
    eng_prepend prepend;
    if (strcmp(scheme, "never") == 0)
        prepend = ENG_PREPEND_NEVER;
    else if (strcmp(scheme, "first") == 0)
        prepend = ENG_PREPEND_FIRST;
    else if (strcmp(scheme, "always") == 0)
        prepend = ENG_PREPEND_ALWAYS;
    else
        return eng_fail(r->error, ENG_UNSUPPORTED, "tokenizer.json: %s: prepend_scheme %s is not supported", part,
                        scheme);
    if (!*mark)
        return malformed(r, part, "Metaspace with an empty replacement");
    eng_status status = eng_pretokenizer_add_metaspace(r->tokenizer->pretokenizer, mark, prepend, r->error);
    if (status == ENG_OK && eng_keys_flag(keys, "split", true))
        status = add_split(r, mark, true, ENG_SPLIT_MERGED_WITH_NEXT, false);
    return status;
}

static eng_status read_pretokenizer(reading *r, const char *part, const char *type, eng_keys *keys) {
    if (r->ended)
        return eng_fail(r->error, ENG_UNSUPPORTED, "tokenizer.json: %s: %s behind ByteLevel is not supported", part,
                        type);
    if (strcmp(type, "ByteLevel") == 0)
        return read_byte_level(r, keys);
    if (strcmp(type, "Split") == 0)
        return read_split(r, part, keys);
    if (strcmp(type, "Metaspace") == 0)
        return read_metaspace(r, part, keys);
    if (strcmp(type, "Digits") == 0) {
        bool single = eng_keys_flag(keys, "individual_digits", false);
        return add_split(r, "\\p{N}", false, single ? ENG_SPLIT_ISOLATED : ENG_SPLIT_CONTIGUOUS, false);
    }
    if (strcmp(type, "Punctuation") == 0) {
        eng_split behavior = ENG_SPLIT_ISOLATED;
        eng_status status = read_behavior(r, part, keys, &behavior);
        return status == ENG_OK ? add_split(r, "[!-/:-@\\[-`{-~\\p{P}]", false, behavior, false) : status;
    }
    return refuse(r, part, type);
}

// ---- post_processor -------------------------------------------------------------------------------------------------

// The one id that a template's special token stands for.
static eng_status read_template_token(reading *r, const char *part, const eng_keys *keys, const json_t *token) {
    const char *name = json_string_value(json_object_get(token, "id"));
    const json_t *tokens = json_object_get(keys->object, "special_tokens");
    const json_t *ids = name ? json_object_get(json_object_get(tokens, name), "ids") : NULL;
    const json_t *id = json_array_get(ids, 0);
    if (!json_is_integer(id) || json_array_size(ids) != 1)
        return malformed(r, part, "a special token of the template does not stand for one id");
    json_int_t value = json_integer_value(id);
    if (value < 0 || value >= r->tokenizer->size || !r->tokenizer->tokens[value].known)
        return malformed(r, part, "the template names an id that is not in the vocabulary");
    if (r->tokenizer->template_bos >= 0)
        return eng_fail(r->error, ENG_UNSUPPORTED, "tokenizer.json: %s: two tokens in front of the text", part);
    r->tokenizer->template_bos = (int32_t)value;
    return ENG_OK;
}

static eng_status read_template(reading *r, const char *part, const eng_keys *keys) {
    const json_t *single = json_object_get(keys->object, "single"), *member;
    if (!json_is_array(single))
        return malformed(r, part, "TemplateProcessing without single");
    bool text = false;
    size_t i;
    json_array_foreach(single, i, member) {
        const json_t *token = json_object_get(member, "SpecialToken");
        if (token && text)
            return eng_fail(r->error, ENG_UNSUPPORTED, "tokenizer.json: %s: a token behind the text", part);
        eng_status status = ENG_OK;
        if (token)
            status = read_template_token(r, part, keys, token);
        else if (text || !json_object_get(member, "Sequence"))
            status = malformed(r, part, "single is not tokens and one Sequence");
        if (status != ENG_OK)
            return status;
        text = !token;
    }
    return text ? ENG_OK : malformed(r, part, "single has no Sequence");
}

static eng_status read_post_processor(reading *r, const char *part, const char *type, eng_keys *keys) {
    if (strcmp(type, "ByteLevel") == 0) // changes offsets, no ids
        return ENG_OK;
    if (strcmp(type, "TemplateProcessing") == 0)
        return read_template(r, part, keys);
    return refuse(r, part, type);
}

// ---- decoder --------------------------------------------------------------------------------------------------------

static eng_status add_replacement(reading *r, const char *part, const char *from, const char *to) {
    eng_decoder *decoder = r->decoder;
    if (!from || !*from || !to)
        return malformed(r, part, "Replace without pattern or content");
    if (decoder->byte_fallback || decoder->byte_level)
        return eng_fail(r->error, ENG_UNSUPPORTED, "tokenizer.json: %s: Replace behind the bytes", part);
    if (decoder->replacements == ENG_MAX_REPLACEMENTS)
        return eng_fail(r->error, ENG_UNSUPPORTED, "tokenizer.json: %s: more than %d replacements", part,
                        ENG_MAX_REPLACEMENTS);
    decoder->replaced[decoder->replacements] = from;
    decoder->replacement[decoder->replacements++] = to;
    return ENG_OK;
}

static eng_status read_strip(reading *r, const char *part, eng_keys *keys) {
    const char *content = eng_keys_text(keys, "content", "");
    int64_t start = eng_keys_integer(keys, "start", 0, 0, 1024), stop = eng_keys_integer(keys, "stop", 0, 0, 1024);
    if (strcmp(content, " ") != 0 || stop != 0)
        return eng_fail(r->error, ENG_UNSUPPORTED,
                        "tokenizer.json: %s: Strip of anything but spaces at the start is not supported", part);
    r->tokenizer->strip = (uint32_t)start;
    return ENG_OK;
}

static eng_status read_decoder(reading *r, const char *part, const char *type, eng_keys *keys) {
    if (strcmp(type, "Fuse") == 0) // decoding always joins
        return ENG_OK;
    if (strcmp(type, "ByteLevel") == 0) {
        r->decoder->byte_level = true;
        return ENG_OK;
    }
    if (strcmp(type, "ByteFallback") == 0) {
        r->decoder->byte_fallback = true;
        return ENG_OK;
    }
    if (strcmp(type, "Strip") == 0)
        return read_strip(r, part, keys);
    if (strcmp(type, "Metaspace") == 0) {
        const char *scheme = eng_keys_text(keys, "prepend_scheme", NULL);
        bool prepends = scheme ? strcmp(scheme, "never") != 0 : eng_keys_flag(keys, "add_prefix_space", true);
        r->tokenizer->strip = prepends ? 1 : 0;
        return add_replacement(r, part, eng_keys_text(keys, "replacement", "\xe2\x96\x81"), " ");
    }
    if (strcmp(type, "Replace") != 0)
        return refuse(r, part, type);
    const char *pattern = "";
    bool literal = false;
    eng_status status = read_pattern(r, part, keys, &pattern, &literal);
    if (status == ENG_OK && !literal)
        return refuse(r, part, "Replace by a Regex");
    return status == ENG_OK ? add_replacement(r, part, pattern, eng_keys_text(keys, "content", NULL)) : status;
}

// The decoder must undo what was done to the text.
static eng_status check_decoder(reading *r) {
    if (r->tokenizer->byte_level) {
        if (r->decoder->byte_fallback || r->decoder->replacements || r->tokenizer->strip)
            return eng_fail(r->error, ENG_UNSUPPORTED,
                            "tokenizer.json: decoder: byte-level tokens need the ByteLevel decoder alone");
        return ENG_OK;
    }
    if (r->decoder->byte_level)
        return eng_fail(r->error, ENG_UNSUPPORTED,
                        "tokenizer.json: decoder ByteLevel without the ByteLevel pre_tokenizer is not supported");
    if (r->decoder->byte_fallback != r->tokenizer->byte_fallback)
        return eng_fail(r->error, ENG_UNSUPPORTED,
                        "tokenizer.json: byte_fallback of the model and the ByteFallback decoder must go together");
    return ENG_OK;
}

eng_status eng_tokenizer_read_pipeline(eng_tokenizer *tokenizer, const json_t *root, eng_decoder *decoder,
                                       eng_error *error) {
    reading r = {.tokenizer = tokenizer, .decoder = decoder, .error = error};
    tokenizer->template_bos = -1;
    eng_status status = eng_normalizer_create(&tokenizer->normalizer);
    if (status == ENG_OK)
        status = eng_pretokenizer_create(&tokenizer->pretokenizer);
    if (status != ENG_OK)
        return eng_fail(error, status, "no memory for the tokenizer");
    status = read_part(&r, "normalizer", json_object_get(root, "normalizer"), "normalizers", read_normalizer, 0);
    if (status == ENG_OK)
        status = read_part(&r, "pre_tokenizer", json_object_get(root, "pre_tokenizer"), "pretokenizers",
                           read_pretokenizer, 0);
    if (status == ENG_OK)
        status = read_part(&r, "post_processor", json_object_get(root, "post_processor"), "processors",
                           read_post_processor, 0);
    if (status == ENG_OK)
        status = read_part(&r, "decoder", json_object_get(root, "decoder"), "decoders", read_decoder, 0);
    return status == ENG_OK ? check_decoder(&r) : status;
}
