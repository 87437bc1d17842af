// SPDX-License-Identifier: Apache-2.0
// Encoding and decoding with a loaded tokenizer.
//
// Encoding goes through the text once: added tokens that stand in it as written, then, in the text between them,
// normalization, added tokens again (those marked "normalized"), pre-tokenization and BPE. This is the order of Hugging
// Face's tokenizers, and every rule for white space around added tokens is theirs. The tokenizer is only read; all
// working memory belongs to the call, so that any number of threads may share one.
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

#include "engine/text.h"
#include "engine/tokenizer_internal.h"
#include "engine/utf8.h"

void eng_tokenizer_close(eng_tokenizer *tokenizer) {
    if (!tokenizer)
        return;
    for (size_t i = 0; i < tokenizer->added_count; i++)
        free(tokenizer->added[i].content);
    free(tokenizer->added);
    free(tokenizer->tokens);
    eng_buffer_free(&tokenizer->texts);
    eng_matcher_free(tokenizer->raw.matcher);
    free(tokenizer->raw.tokens);
    eng_matcher_free(tokenizer->normalized.matcher);
    free(tokenizer->normalized.tokens);
    eng_matcher_free(tokenizer->control.matcher);
    free(tokenizer->control.tokens);
    eng_normalizer_free(tokenizer->normalizer);
    eng_pretokenizer_free(tokenizer->pretokenizer);
    eng_bpe_free(tokenizer->bpe);
    free(tokenizer);
}

int32_t eng_tokenizer_size(const eng_tokenizer *tokenizer) {
    return tokenizer->size;
}

int32_t eng_tokenizer_bos(const eng_tokenizer *tokenizer) {
    return tokenizer->bos;
}

const uint8_t *eng_tokenizer_digest(const eng_tokenizer *tokenizer) {
    return tokenizer->digest;
}

int32_t eng_tokenizer_special(const eng_tokenizer *tokenizer, const char *content) {
    for (size_t i = 0; i < tokenizer->added_count; i++) {
        if (strcmp(tokenizer->added[i].content, content) == 0)
            return tokenizer->added[i].id;
    }
    return -1;
}

static bool is_known(const eng_tokenizer *tokenizer, int32_t id) {
    return id >= 0 && id < tokenizer->size && tokenizer->tokens[id].known;
}

const char *eng_tokenizer_bytes(const eng_tokenizer *tokenizer, int32_t id, size_t *length) {
    *length = 0;
    if (!is_known(tokenizer, id))
        return "";
    const eng_token_text *token = &tokenizer->tokens[id];
    *length = token->length;
    return token->length ? tokenizer->texts.bytes + token->offset : "";
}

bool eng_tokenizer_is_special(const eng_tokenizer *tokenizer, int32_t id) {
    return is_known(tokenizer, id) && tokenizer->tokens[id].special;
}

// ---- characters around added tokens ---------------------------------------------------------------------------------

static bool is_space(uint32_t code) { // White_Space of the Unicode character database
    return (code >= 9 && code <= 13) || code == 0x20 || code == 0x85 || code == 0xa0 || code == 0x1680 ||
           (code >= 0x2000 && code <= 0x200a) || code == 0x2028 || code == 0x2029 || code == 0x202f || code == 0x205f ||
           code == 0x3000;
}

static bool is_word(uint32_t code) { // \w of UTS 18: letters, marks, digits, connectors, joiners
    switch (utf8proc_category((utf8proc_int32_t)code)) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC:
        return true;
    default:
        return code == 0x200c || code == 0x200d;
    }
}

// The character that ends at end (> 0); *start: where it begins.
static uint32_t character_before(const char *text, size_t end, size_t *start) {
    uint32_t code = 0;
    size_t at = end - 1;
    while (at > 0 && ((unsigned char)text[at] & 0xc0) == 0x80)
        at--;
    (void)eng_utf8_decode(text + at, end - at, &code);
    *start = at;
    return code;
}

static bool stands_alone(const char *text, size_t length, size_t start, size_t end) {
    size_t before;
    uint32_t code = 0;
    if (start > 0 && is_word(character_before(text, start, &before)))
        return false;
    return end == length || (eng_utf8_decode(text + end, length - end, &code), !is_word(code));
}

static size_t strip_left(const char *text, size_t start, size_t least) {
    size_t before;
    while (start > least && is_space(character_before(text, start, &before)) && before >= least)
        start = before;
    return start;
}

static size_t strip_right(const char *text, size_t length, size_t end) {
    uint32_t code;
    while (end < length) {
        size_t size = eng_utf8_decode(text + end, length - end, &code);
        if (!is_space(code))
            break;
        end += size;
    }
    return end;
}

// ---- encoding -------------------------------------------------------------------------------------------------------

typedef struct encoder {
    const eng_tokenizer *tokenizer;
    bool special;
    eng_ids ids;
    eng_pretokenize_memory pretokenize;
    eng_normalize_memory normalize;
    eng_bpe_memory bpe;
    eng_error *error;
} encoder;

typedef eng_status (*span_fn)(encoder *e, const char *text, size_t length, bool first);

static eng_status no_memory(const encoder *e) {
    return eng_fail(e->error, ENG_NO_MEMORY, "no memory to encode the text");
}

// The text at hand and how far it is encoded.
typedef struct walk {
    const char *text;
    size_t length, done;
    bool first; // the text is at the very start
    span_fn between;
} walk;

static eng_status pass_between(encoder *e, walk *w, size_t to) {
    size_t from = w->done;
    w->done = to;
    return to > from ? w->between(e, w->text + from, to - from, w->first && from == 0) : ENG_OK;
}

// The token that stands at [start, end): the text before it, then its id, unless it does not count there.
static eng_status take_added(encoder *e, walk *w, const eng_added_token *token, size_t start, size_t end) {
    if ((token->special && !e->special) || (token->single_word && !stands_alone(w->text, w->length, start, end)))
        return ENG_OK;
    if (token->lstrip)
        start = strip_left(w->text, start, w->done);
    if (token->rstrip)
        end = strip_right(w->text, w->length, end);
    eng_status status = pass_between(e, w, start);
    w->done = end;
    if (status == ENG_OK && eng_ids_append(&e->ids, token->id) != ENG_OK)
        return no_memory(e);
    return status;
}

// Takes the tokens of the pass that lie within [from, to) of the text.
static eng_status take_range(encoder *e, walk *w, const eng_added_pass *pass, size_t from, size_t to) {
    size_t start, end, index;
    eng_status status = ENG_OK;
    while (status == ENG_OK && pass->matcher &&
           eng_matcher_find(pass->matcher, w->text, to, from, &start, &end, &index)) {
        from = end;
        status = take_added(e, w, pass->tokens[index], start, end);
    }
    return status;
}

// The text between added tokens goes to between; first: text is at the very start.
static eng_status split_added(encoder *e, const eng_added_pass *pass, const char *text, size_t length, bool first,
                              span_fn between) {
    walk w = {.text = text, .length = length, .first = first, .between = between};
    eng_status status = take_range(e, &w, pass, 0, length);
    return status == ENG_OK ? pass_between(e, &w, length) : status;
}

static eng_status encode_piece(void *context, const char *bytes, size_t length) {
    encoder *e = context;
    eng_status status = eng_bpe_encode(e->tokenizer->bpe, &e->bpe, bytes, length, &e->ids);
    if (status == ENG_OK)
        return ENG_OK;
    if (status == ENG_UNSUPPORTED)
        return eng_fail(e->error, status, "the text holds the byte 0x%02x, for which the vocabulary has no token",
                        e->bpe.missing);
    return eng_fail(e->error, status, "encoding the text: %s", eng_status_text(status));
}

static eng_status encode_plain(encoder *e, const char *text, size_t length, bool first) {
    return eng_pretokenize(e->tokenizer->pretokenizer, &e->pretokenize, text, length, first, encode_piece, e, e->error);
}

static eng_status encode_normalized(encoder *e, const char *text, size_t length, bool first) {
    eng_status status = eng_normalize(e->tokenizer->normalizer, &e->normalize, e->pretokenize.match, text, length,
                                      &text, &length, e->error);
    return status == ENG_OK ? split_added(e, &e->tokenizer->normalized, text, length, first, encode_plain) : status;
}

static eng_status encode_written(encoder *e, const char *text, size_t length, bool first) {
    return split_added(e, &e->tokenizer->raw, text, length, first, encode_normalized);
}

static eng_status encode_unspecial(encoder *e, const char *text, size_t length, bool first) {
    e->special = false;
    eng_status status = encode_written(e, text, length, first);
    e->special = true;
    return status;
}

// Special tokens lie within a run of bytes that may write them; what is between is text without any.
static eng_status encode_runs(encoder *e, const char *text, size_t length, const uint8_t *plain) {
    walk w = {.text = text, .length = length, .first = true, .between = encode_unspecial};
    eng_status status = ENG_OK;
    for (size_t from = 0, to; from < length && status == ENG_OK; from = to) {
        for (to = from + 1; to < length && !plain[to] == !plain[from]; to++)
            continue;
        if (!plain[from])
            status = take_range(e, &w, &e->tokenizer->control, from > w.done ? from : w.done, to);
    }
    return status == ENG_OK ? pass_between(e, &w, length) : status;
}

static eng_status encode(encoder *e, const char *text, size_t length, const uint8_t *plain, bool add_bos) {
    size_t offset;
    if (!eng_utf8_valid(text, length, &offset))
        return eng_fail(e->error, ENG_INVALID, "the text is not UTF-8 at byte %zu", offset);
    if (eng_pretokenize_memory_init(&e->pretokenize) != ENG_OK || eng_ids_reserve(&e->ids, length / 4 + 1) != ENG_OK)
        return no_memory(e);
    if (add_bos && e->tokenizer->bos >= 0 && eng_ids_append(&e->ids, e->tokenizer->bos) != ENG_OK)
        return no_memory(e);
    return plain ? encode_runs(e, text, length, plain) : encode_written(e, text, length, true);
}

// Takes the encoder's memory; its ids go to *ids.
static eng_status finish(encoder *e, eng_status status, int32_t **ids, size_t *count) {
    eng_pretokenize_memory_free(&e->pretokenize);
    eng_normalize_memory_free(&e->normalize);
    eng_bpe_memory_free(&e->bpe);
    if (status != ENG_OK) {
        eng_ids_free(&e->ids);
        return status;
    }
    *ids = e->ids.ids;
    *count = e->ids.count;
    return ENG_OK;
}

eng_status eng_tokenizer_encode_counted(const eng_tokenizer *tokenizer, const char *text, size_t length, bool special,
                                        bool add_bos, int32_t **ids, size_t *count, eng_bpe_work *work,
                                        eng_error *error) {
    encoder e = {.tokenizer = tokenizer, .special = special, .error = error};
    eng_status status = encode(&e, text, length, NULL, add_bos);
    *work = e.bpe.work;
    return finish(&e, status, ids, count);
}

eng_status eng_tokenizer_encode(const eng_tokenizer *tokenizer, const char *text, size_t length, bool special,
                                bool add_bos, int32_t **ids, size_t *count, eng_error *error) {
    eng_bpe_work work;
    return eng_tokenizer_encode_counted(tokenizer, text, length, special, add_bos, ids, count, &work, error);
}

eng_status eng_tokenizer_encode_marked(const eng_tokenizer *tokenizer, const char *text, size_t length,
                                       const uint8_t *plain, int32_t **ids, size_t *count, eng_error *error) {
    static const uint8_t none[1];
    encoder e = {.tokenizer = tokenizer, .special = true, .error = error};
    return finish(&e, encode(&e, text, length, length ? plain : none, false), ids, count);
}

// ---- decoding -------------------------------------------------------------------------------------------------------

// Appends a token's bytes, repaired; strip: spaces that may still be taken off the front of the whole text.
static eng_status decode_token(const eng_tokenizer *tokenizer, int32_t id, eng_utf8 *state, uint32_t *strip,
                               eng_buffer *out) {
    size_t length;
    const char *bytes = eng_tokenizer_bytes(tokenizer, id, &length);
    while (*strip > 0 && length > 0) {
        *strip = *bytes == ' ' ? *strip - 1 : 0;
        if (*bytes != ' ')
            break;
        bytes++;
        length--;
    }
    eng_status status = eng_buffer_reserve(out, length * 3 + ENG_UTF8_PUSH_MAX);
    if (status != ENG_OK)
        return status;
    for (size_t i = 0; i < length; i++)
        out->length += eng_utf8_push(state, (uint8_t)bytes[i], out->bytes + out->length);
    return ENG_OK;
}

static eng_status decode(const eng_tokenizer *tokenizer, const int32_t *ids, size_t count, bool keep_special,
                         eng_buffer *out, eng_error *error) {
    eng_utf8 state = {0};
    uint32_t strip = tokenizer->strip;
    for (size_t i = 0; i < count; i++) {
        if (!is_known(tokenizer, ids[i]))
            return eng_fail(error, ENG_INVALID, "id %d (number %zu) is not in the vocabulary", ids[i], i);
        if (tokenizer->tokens[ids[i]].special && !keep_special)
            continue;
        eng_status status = decode_token(tokenizer, ids[i], &state, &strip, out);
        if (status != ENG_OK)
            return status;
    }
    eng_status status = eng_buffer_reserve(out, ENG_UTF8_PUSH_MAX + 1);
    if (status != ENG_OK)
        return status;
    out->length += eng_utf8_finish(&state, out->bytes + out->length);
    out->bytes[out->length] = '\0';
    return ENG_OK;
}

eng_status eng_tokenizer_decode(const eng_tokenizer *tokenizer, const int32_t *ids, size_t count, bool keep_special,
                                char **text, size_t *length, eng_error *error) {
    eng_buffer out = {0};
    eng_status status = decode(tokenizer, ids, count, keep_special, &out, error);
    if (status != ENG_OK) {
        eng_buffer_free(&out);
        return eng_fail(error, status, "decoding ids: %s", eng_status_text(status));
    }
    *text = out.bytes;
    *length = out.length;
    return ENG_OK;
}
