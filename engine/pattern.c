// SPDX-License-Identifier: Apache-2.0
// Oniguruma syntax rewritten for PCRE2, and bounded search.
//
// Rewriting walks the pattern once: escapes are looked up in a table of what is known to mean the same, classes are
// watched for Oniguruma's set operations. Unknown means refused: a pattern that silently matched something else would
// give wrong ids with status 200. Compilation uses UTF and UCP and LF as the only line end. PCRE2's JIT is used where
// the system allows executable memory; where it does not, or where a match overflows the JIT's stack, the interpreter
// gives the same result. Any thread; working memory is the caller's.
#include "engine/pattern.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <stdlib.h>
#include <string.h>

enum {
    MATCH_LIMIT = 100 * 1000 * 1000, // backtracking steps a search: a second or so
    HEAP_LIMIT = 256 * 1024,         // KiB of the interpreter
    QUOTED = 120,                    // bytes of a pattern in an error text
};

// White_Space of the Unicode character database; PCRE2's \s counts U+180E too.
#define SPACE_CLASS \
    "\\x{9}-\\x{d}\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}"
#define WORD_CLASS "\\p{L}\\p{M}\\p{Nd}\\p{Pc}"

struct eng_pattern {
    pcre2_code *code;
    pcre2_match_context *context; // limits; only read while matching
    char quoted[QUOTED + 1];
};

struct eng_match {
    pcre2_match_data *data;
};

typedef struct translation {
    const char *text;
    size_t length, at;
    bool in_class, class_begins;
    eng_buffer *out;
    eng_error *error;
} translation;

static eng_status put(translation *t, const char *text) {
    return eng_buffer_append(t->out, text, strlen(text));
}

static eng_status copy(translation *t, size_t count) {
    eng_status status = eng_buffer_append(t->out, t->text + t->at, count);
    t->at += count;
    return status;
}

static eng_status refuse(translation *t, const char *what) {
    return eng_fail(t->error, ENG_UNSUPPORTED, "regular expression: %s at offset %zu is not supported", what, t->at);
}

// \p{...} and \P{...}: general categories are the same in both; a longer name is a script, which PCRE2 by default
// widens to script extensions.
static eng_status translate_property(translation *t) {
    const char *open = t->text + t->at + 2;
    size_t rest = t->length - t->at - 2;
    if (rest == 0 || *open != '{')
        return copy(t, rest == 0 ? 2 : 3);
    const char *close = memchr(open, '}', rest);
    if (!close)
        return eng_fail(t->error, ENG_FORMAT, "regular expression: \\p{ at offset %zu is not closed", t->at);
    size_t size = (size_t)(close - open) + 3;
    size_t name = (size_t)(close - open) - 1 - (open[1] == '^');
    if (name <= 2)
        return copy(t, size);
    if (open[1] == '^')
        return refuse(t, "a negated script name");
    eng_status status = copy(t, 3);
    if (status == ENG_OK)
        status = put(t, "sc:");
    return status == ENG_OK ? copy(t, size - 3) : status;
}

static eng_status translate_unicode(translation *t) {
    char code[] = "\\x{0000}";
    if (t->length - t->at < 6)
        return refuse(t, "a short \\u escape");
    memcpy(code + 3, t->text + t->at + 2, 4);
    if (strspn(code + 3, "0123456789abcdefABCDEF") != 4)
        return refuse(t, "a short \\u escape");
    t->at += 6;
    return put(t, code);
}

// A backslash that is not the last byte.
static eng_status translate_escape(translation *t) {
    unsigned char letter = (unsigned char)t->text[t->at + 1];
    const char *text = NULL;
    switch (letter) {
    case 's':
        text = t->in_class ? SPACE_CLASS : "[" SPACE_CLASS "]";
        break;
    case 'S':
        text = t->in_class ? NULL : "[^" SPACE_CLASS "]";
        break;
    case 'w':
        text = t->in_class ? WORD_CLASS : "[" WORD_CLASS "]";
        break;
    case 'W':
        text = t->in_class ? NULL : "[^" WORD_CLASS "]";
        break;
    case 'v':
        text = "\\x{b}";
        break;
    case 'p':
    case 'P':
        return translate_property(t);
    case 'u':
        return translate_unicode(t);
    case 'd': // the same in both: decimal digits of Unicode, control characters, code points
    case 'D':
    case 'n':
    case 'r':
    case 't':
    case 'f':
    case 'x':
        return copy(t, 2);
    }
    if (text) {
        t->at += 2;
        return put(t, text);
    }
    if (letter < 0x80 && ((letter >= '0' && letter <= '9') || ((letter | 32) >= 'a' && (letter | 32) <= 'z'))) {
        char what[] = "\\? in a class";
        what[1] = (char)letter;
        what[2] = t->in_class ? ' ' : '\0';
        return refuse(t, what);
    }
    return copy(t, 2);
}

static eng_status translate_in_class(translation *t) {
    char byte = t->text[t->at];
    bool begins = t->class_begins;
    t->class_begins = false;
    if (byte == '[')
        return refuse(t, "a class inside a class");
    if (byte == '&' && t->at + 1 < t->length && t->text[t->at + 1] == '&')
        return refuse(t, "&& in a class");
    if (byte == ']' && begins)
        return refuse(t, "a class that begins with ]");
    if (byte == ']')
        t->in_class = false;
    return copy(t, 1);
}

static eng_status translate_plain(translation *t) {
    char byte = t->text[t->at];
    if (byte == '{' && t->at + 1 < t->length && t->text[t->at + 1] == ',')
        return refuse(t, "{,n}");
    if (byte == '^' || byte == '$')
        return refuse(t, "a line anchor");
    if (byte != '[')
        return copy(t, 1);
    t->in_class = t->class_begins = true;
    bool negated = t->at + 1 < t->length && t->text[t->at + 1] == '^';
    return copy(t, negated ? 2 : 1);
}

eng_status eng_pattern_translate(const char *text, size_t length, eng_buffer *out, eng_error *error) {
    translation t = {.text = text, .length = length, .out = out, .error = error};
    while (t.at < length) {
        eng_status status;
        if (text[t.at] == '\\' && t.at + 1 < length) {
            status = translate_escape(&t);
            t.class_begins = false;
        } else if (t.in_class) {
            status = translate_in_class(&t);
        } else {
            status = translate_plain(&t);
        }
        if (status != ENG_OK)
            return status;
    }
    return ENG_OK;
}

static eng_status compile(eng_pattern *pattern, const eng_buffer *text, bool literal, eng_error *error) {
    pcre2_compile_context *context = pcre2_compile_context_create(NULL);
    if (!context || pcre2_set_newline(context, PCRE2_NEWLINE_LF) != 0) {
        pcre2_compile_context_free(context);
        return ENG_NO_MEMORY;
    }
    uint32_t options = PCRE2_UTF | (literal ? PCRE2_LITERAL : PCRE2_UCP);
    int code = 0;
    PCRE2_SIZE offset = 0;
    PCRE2_SPTR bytes = (PCRE2_SPTR)(text->bytes ? text->bytes : "");
    pattern->code = pcre2_compile(bytes, text->length, options, &code, &offset, context);
    pcre2_compile_context_free(context);
    if (!pattern->code) {
        PCRE2_UCHAR words[100] = "";
        pcre2_get_error_message(code, words, sizeof words);
        return eng_fail(error, ENG_FORMAT, "regular expression '%s': %s", pattern->quoted, (const char *)words);
    }
    // Refused executable memory is no fault: the interpreter gives the same matches.
    (void)pcre2_jit_compile(pattern->code, PCRE2_JIT_COMPLETE);
    pattern->context = pcre2_match_context_create(NULL);
    if (!pattern->context)
        return ENG_NO_MEMORY;
    pcre2_set_match_limit(pattern->context, MATCH_LIMIT);
    pcre2_set_heap_limit(pattern->context, HEAP_LIMIT);
    return ENG_OK;
}

eng_status eng_pattern_compile(const char *text, size_t length, bool literal, eng_pattern **out, eng_error *error) {
    eng_pattern *pattern = calloc(1, sizeof *pattern);
    if (!pattern)
        return eng_fail(error, ENG_NO_MEMORY, "no memory for a regular expression");
    memcpy(pattern->quoted, text, length < QUOTED ? length : QUOTED);
    eng_buffer translated = {0};
    eng_status status = literal ? eng_buffer_append(&translated, text, length)
                                : eng_pattern_translate(text, length, &translated, error);
    if (status == ENG_OK)
        status = compile(pattern, &translated, literal, error);
    eng_buffer_free(&translated);
    if (status != ENG_OK) {
        eng_pattern_free(pattern);
        return eng_fail(error, status, "regular expression: %s", eng_status_text(status));
    }
    *out = pattern;
    return ENG_OK;
}

void eng_pattern_free(eng_pattern *pattern) {
    if (!pattern)
        return;
    pcre2_match_context_free(pattern->context);
    pcre2_code_free(pattern->code);
    free(pattern);
}

eng_status eng_match_create(eng_match **out) {
    eng_match *match = malloc(sizeof *match);
    if (!match)
        return ENG_NO_MEMORY;
    match->data = pcre2_match_data_create(1, NULL);
    if (!match->data) {
        free(match);
        return ENG_NO_MEMORY;
    }
    *out = match;
    return ENG_OK;
}

void eng_match_free(eng_match *match) {
    if (!match)
        return;
    pcre2_match_data_free(match->data);
    free(match);
}

eng_status eng_pattern_find(const eng_pattern *pattern, eng_match *match, const char *text, size_t length, size_t from,
                            bool *found, size_t *start, size_t *end, eng_error *error) {
    // The check of the text's UTF-8 would run from the start offset to the end at every call: quadratic.
    uint32_t options = PCRE2_NO_UTF_CHECK;
    PCRE2_SPTR subject = (PCRE2_SPTR)text;
    int code = pcre2_match(pattern->code, subject, length, from, options, match->data, pattern->context);
    if (code == PCRE2_ERROR_JIT_STACKLIMIT)
        code = pcre2_match(pattern->code, subject, length, from, options | PCRE2_NO_JIT, match->data, pattern->context);
    *found = code >= 0;
    if (code >= 0) {
        const PCRE2_SIZE *bounds = pcre2_get_ovector_pointer(match->data);
        *start = bounds[0];
        *end = bounds[1] < bounds[0] ? bounds[0] : bounds[1]; // \K in a lookahead can set the start behind the end
        return ENG_OK;
    }
    if (code == PCRE2_ERROR_NOMATCH)
        return ENG_OK;
    if (code == PCRE2_ERROR_NOMEMORY)
        return eng_fail(error, ENG_NO_MEMORY, "no memory to match a regular expression");
    PCRE2_UCHAR words[100] = "";
    pcre2_get_error_message(code, words, sizeof words);
    return eng_fail(error, ENG_TOO_LONG, "regular expression '%s' at byte %zu of the text: %s", pattern->quoted, from,
                    (const char *)words);
}
