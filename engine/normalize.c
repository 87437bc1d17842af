// SPDX-License-Identifier: Apache-2.0
// The steps of normalization. A Unicode form works run by run: ASCII is its own form in all four, and nothing composes
// across the character before an ASCII one, so only runs of other characters, each with the ASCII character before it
// (a base letter, perhaps), are decomposed, put in canonical order and composed. Everything else is copied.
#include "engine/normalize.h"

#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

#include "engine/utf8.h"

enum { MAX_DECOMPOSITION = 32, SHORT_RUN = 16, CLASSES = 256 };

typedef enum step_kind { STEP_FORM, STEP_PREPEND, STEP_REPLACE } step_kind;

typedef struct step {
    step_kind kind;
    eng_form form;
    eng_pattern *pattern;
    char *text; // what is put in front or in place
} step;

struct eng_normalizer {
    step steps[ENG_MAX_NORMALIZERS];
    size_t count;
};

eng_status eng_normalizer_create(eng_normalizer **out) {
    *out = calloc(1, sizeof **out);
    return *out ? ENG_OK : ENG_NO_MEMORY;
}

void eng_normalizer_free(eng_normalizer *normalizer) {
    if (!normalizer)
        return;
    for (size_t i = 0; i < normalizer->count; i++) {
        eng_pattern_free(normalizer->steps[i].pattern);
        free(normalizer->steps[i].text);
    }
    free(normalizer);
}

static eng_status add_step(eng_normalizer *normalizer, step added, eng_error *error) {
    eng_status status = ENG_OK;
    if (added.kind != STEP_FORM && !added.text)
        status = eng_fail(error, ENG_NO_MEMORY, "no memory for the normalizer");
    else if (normalizer->count == ENG_MAX_NORMALIZERS)
        status = eng_fail(error, ENG_UNSUPPORTED, "normalizer: more than %d steps", ENG_MAX_NORMALIZERS);
    if (status == ENG_OK) {
        normalizer->steps[normalizer->count++] = added;
        return ENG_OK;
    }
    eng_pattern_free(added.pattern);
    free(added.text);
    return status;
}

eng_status eng_normalizer_add_form(eng_normalizer *normalizer, eng_form form, eng_error *error) {
    return add_step(normalizer, (step){.kind = STEP_FORM, .form = form}, error);
}

eng_status eng_normalizer_add_prepend(eng_normalizer *normalizer, const char *text, eng_error *error) {
    return add_step(normalizer, (step){.kind = STEP_PREPEND, .text = strdup(text)}, error);
}

eng_status eng_normalizer_add_replace(eng_normalizer *normalizer, const char *pattern, size_t length, bool literal,
                                      const char *content, eng_error *error) {
    step added = {.kind = STEP_REPLACE};
    eng_status status = eng_pattern_compile(pattern, length, literal, &added.pattern, error);
    if (status != ENG_OK)
        return status;
    added.text = strdup(content);
    return add_step(normalizer, added, error);
}

void eng_normalize_memory_free(eng_normalize_memory *memory) {
    eng_buffer_free(&memory->texts[0]);
    eng_buffer_free(&memory->texts[1]);
    free(memory->codes);
    free(memory->sorted);
    *memory = (eng_normalize_memory){0};
}

// ---- Unicode forms --------------------------------------------------------------------------------------------------

static eng_status reserve_codes(int32_t **codes, size_t *capacity, size_t wanted) {
    if (*capacity >= wanted)
        return ENG_OK;
    if (wanted < *capacity * 2)
        wanted = *capacity * 2;
    int32_t *larger = reallocarray(*codes, wanted, sizeof *larger);
    if (!larger)
        return ENG_NO_MEMORY;
    *codes = larger;
    *capacity = wanted;
    return ENG_OK;
}

static int combining_class(int32_t code) {
    return utf8proc_get_property(code)->combining_class;
}

static void sort_short(int32_t *codes, size_t count) {
    for (size_t i = 1; i < count; i++) {
        int32_t code = codes[i];
        int class = combining_class(code);
        size_t at = i;
        for (; at > 0 && combining_class(codes[at - 1]) > class; at--)
            codes[at] = codes[at - 1];
        codes[at] = code;
    }
}

// Stable counting sort by combining class, linear in a row of marks of any length.
static void sort_long(int32_t *codes, size_t count, int32_t *sorted) {
    size_t starts[CLASSES + 1] = {0};
    for (size_t i = 0; i < count; i++)
        starts[combining_class(codes[i]) + 1]++;
    for (size_t i = 1; i <= CLASSES; i++)
        starts[i] += starts[i - 1];
    for (size_t i = 0; i < count; i++)
        sorted[starts[combining_class(codes[i])]++] = codes[i];
    memcpy(codes, sorted, count * sizeof *codes);
}

static eng_status order_marks(eng_normalize_memory *memory, size_t count) {
    for (size_t start = 0; start < count; start++) {
        size_t end = start;
        while (end < count && combining_class(memory->codes[end]) != 0)
            end++;
        if (end - start > SHORT_RUN) {
            eng_status status = reserve_codes(&memory->sorted, &memory->sorted_capacity, end - start);
            if (status != ENG_OK)
                return status;
            sort_long(memory->codes + start, end - start, memory->sorted);
        } else {
            sort_short(memory->codes + start, end - start);
        }
        start = end;
    }
    return ENG_OK;
}

static eng_status decompose(eng_normalize_memory *memory, eng_form form, const char *text, size_t length,
                            size_t *count) {
    bool compatible = form == ENG_NFKC || form == ENG_NFKD;
    int options = UTF8PROC_STABLE | UTF8PROC_DECOMPOSE | (compatible ? UTF8PROC_COMPAT : 0);
    size_t written = 0;
    for (size_t at = 0; at < length;) {
        uint32_t code;
        size_t size = eng_utf8_decode(text + at, length - at, &code);
        eng_status status = reserve_codes(&memory->codes, &memory->code_capacity, written + MAX_DECOMPOSITION);
        if (status != ENG_OK)
            return status;
        int boundary = 0;
        utf8proc_ssize_t parts = utf8proc_decompose_char((utf8proc_int32_t)code, memory->codes + written,
                                                         MAX_DECOMPOSITION, (utf8proc_option_t)options, &boundary);
        if (size == 0 || parts < 0 || parts > MAX_DECOMPOSITION)
            return ENG_INTERNAL; // the text was checked, and no decomposition is longer than 18
        written += (size_t)parts;
        at += size;
    }
    *count = written;
    return ENG_OK;
}

static eng_status normalize_run(eng_normalize_memory *memory, eng_form form, const char *text, size_t length,
                                eng_buffer *out) {
    size_t count;
    eng_status status = decompose(memory, form, text, length, &count);
    if (status == ENG_OK)
        status = order_marks(memory, count);
    if (status != ENG_OK)
        return status;
    if (form == ENG_NFC || form == ENG_NFKC) {
        int options = UTF8PROC_STABLE | UTF8PROC_COMPOSE;
        utf8proc_ssize_t composed =
            utf8proc_normalize_utf32(memory->codes, (utf8proc_ssize_t)count, (utf8proc_option_t)options);
        if (composed < 0)
            return ENG_INTERNAL;
        count = (size_t)composed;
    }
    status = eng_buffer_reserve(out, count * 4);
    if (status != ENG_OK)
        return status;
    for (size_t i = 0; i < count; i++)
        out->length += eng_utf8_encode((uint32_t)memory->codes[i], out->bytes + out->length);
    return ENG_OK;
}

static eng_status apply_form(eng_normalize_memory *memory, eng_form form, const char *text, size_t length,
                             eng_buffer *out) {
    eng_status status = ENG_OK;
    for (size_t at = 0; at < length && status == ENG_OK;) {
        size_t other = at;
        while (other < length && (unsigned char)text[other] < 0x80)
            other++;
        size_t end = other;
        while (end < length && (unsigned char)text[end] >= 0x80)
            end++;
        if (end > other && other > at)
            other--; // the base of a first combining mark
        status = eng_buffer_append(out, text + at, other - at);
        if (status == ENG_OK && end > other)
            status = normalize_run(memory, form, text + other, end - other, out);
        at = end;
    }
    return status;
}

// ---- the other steps ------------------------------------------------------------------------------------------------

static eng_status apply_replace(const step *s, eng_match *match, const char *text, size_t length, eng_buffer *out,
                                eng_error *error) {
    size_t content = strlen(s->text);
    for (size_t at = 0;;) {
        bool found;
        size_t start = length, end = length;
        eng_status status = eng_pattern_find(s->pattern, match, text, length, at, &found, &start, &end, error);
        if (status == ENG_OK && found && end == start)
            return eng_fail(error, ENG_UNSUPPORTED, "normalizer: Replace with a pattern that matches nothing at all");
        if (status == ENG_OK)
            status = eng_buffer_append(out, text + at, start - at);
        if (status == ENG_OK && found)
            status = eng_buffer_append(out, s->text, content);
        if (status != ENG_OK || !found)
            return status;
        at = end;
    }
}

static eng_status apply_step(const step *s, eng_normalize_memory *memory, eng_match *match, const char *text,
                             size_t length, eng_buffer *out, eng_error *error) {
    switch (s->kind) {
    case STEP_FORM:
        return apply_form(memory, s->form, text, length, out);
    case STEP_PREPEND: {
        eng_status status = eng_buffer_append(out, s->text, strlen(s->text));
        return status == ENG_OK ? eng_buffer_append(out, text, length) : status;
    }
    case STEP_REPLACE:
        break;
    }
    return apply_replace(s, match, text, length, out, error);
}

eng_status eng_normalize(const eng_normalizer *normalizer, eng_normalize_memory *memory, eng_match *match,
                         const char *text, size_t length, const char **out, size_t *out_length, eng_error *error) {
    for (size_t i = 0; i < normalizer->count && length > 0; i++) {
        eng_buffer *target = &memory->texts[i % 2];
        target->length = 0;
        eng_status status = apply_step(&normalizer->steps[i], memory, match, text, length, target, error);
        if (status != ENG_OK)
            return eng_fail(error, status, "normalizing the text: %s", eng_status_text(status));
        text = target->bytes;
        length = target->length;
    }
    *out = text;
    *out_length = length;
    return ENG_OK;
}
