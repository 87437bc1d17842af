// SPDX-License-Identifier: Apache-2.0
// Templates as text and tags, tags as tokens.
//
// White space is Jinja's with trim_blocks and lstrip_blocks, as transformers sets them: a minus sign at a tag takes all
// white space on that side; a block or a comment takes the blanks before it on its line and the line end behind it,
// unless a plus sign stands there.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE // memmem
#endif
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "engine/template_internal.h"

void eng_tparse_fail(eng_tparser *parser, eng_status code, const char *format, ...) {
    char fault[160];
    va_list arguments;
    if (parser->status != ENG_OK)
        return;
    va_start(arguments, format);
    vsnprintf(fault, sizeof fault, format, arguments);
    va_end(arguments);
    parser->status = eng_fail(parser->error, code, "chat template, line %u: %s", (unsigned)parser->lexer.line, fault);
}

static bool is_white(char letter) {
    return letter == ' ' || (letter >= '\t' && letter <= '\r');
}

static void advance(eng_tlexer *lexer, size_t to) {
    for (; lexer->at < to; lexer->at++)
        lexer->line += lexer->text[lexer->at] == '\n';
}

static bool at(const eng_tlexer *lexer, size_t place, const char *word) {
    size_t length = strlen(word);
    return lexer->length - place >= length && memcmp(lexer->text + place, word, length) == 0;
}

// Over the end of a tag: closing is its last part. Blocks and comments take the line end behind them.
static void close_tag(eng_tlexer *lexer, const char *closing, bool takes_line_end) {
    size_t to = lexer->at;
    bool strip = lexer->text[to] == '-', keep = lexer->text[to] == '+';
    to += (strip || keep) + strlen(closing);
    while (strip && to < lexer->length && is_white(lexer->text[to]))
        to++;
    if (!strip && !keep && takes_line_end && to < lexer->length && lexer->text[to] == '\n')
        to++;
    advance(lexer, to);
    lexer->line_starts = lexer->text[to - 1] == '\n';
}

// What of the data before a tag stays.
static size_t trimmed(const eng_tlexer *lexer, const char *data, size_t length, char sign, bool blanks) {
    if (sign == '-') {
        while (length > 0 && is_white(data[length - 1]))
            length--;
        return length;
    }
    size_t line = length;
    while (line > 0 && (data[line - 1] == ' ' || data[line - 1] == '\t'))
        line--;
    bool whole_line = line > 0 ? data[line - 1] == '\n' : lexer->line_starts;
    return blanks && sign != '+' && whole_line ? line : length;
}

static void skip_comment(eng_tparser *parser) {
    eng_tlexer *lexer = &parser->lexer;
    const char *end = memmem(lexer->text + lexer->at, lexer->length - lexer->at, "#}", 2);
    if (!end) {
        eng_tparse_fail(parser, ENG_FORMAT, "a comment without end");
        return;
    }
    size_t place = (size_t)(end - lexer->text);
    bool sign = place > lexer->at && (end[-1] == '-' || end[-1] == '+');
    advance(lexer, place - sign);
    close_tag(lexer, "#}", true);
}

static size_t find_tag(const eng_tlexer *lexer) {
    for (size_t place = lexer->at; place + 1 < lexer->length; place++) {
        char next = lexer->text[place + 1];
        if (lexer->text[place] == '{' && (next == '%' || next == '{' || next == '#'))
            return place;
    }
    return lexer->length;
}

eng_ttag eng_tlex_data(eng_tparser *parser, const char **data, size_t *length) {
    eng_tlexer *lexer = &parser->lexer;
    size_t place = find_tag(lexer);
    *data = lexer->text + lexer->at;
    *length = place - lexer->at;
    if (place == lexer->length) {
        advance(lexer, place);
        return lexer->tag = ENG_TAG_NONE;
    }
    char kind = lexer->text[place + 1], sign = place + 2 < lexer->length ? lexer->text[place + 2] : 0;
    bool has_sign = sign == '-' || sign == '+';
    *length = trimmed(lexer, *data, *length, has_sign ? sign : 0, kind != '{');
    advance(lexer, place + 2 + has_sign);
    lexer->line_starts = false;
    lexer->braces = 0;
    if (kind == '#') {
        skip_comment(parser);
        return lexer->tag = ENG_TAG_COMMENT;
    }
    lexer->tag = kind == '%' ? ENG_TAG_BLOCK : ENG_TAG_OUTPUT;
    eng_tlex_next(parser);
    return lexer->tag;
}

// ---- tokens

static bool is_letter(char letter) {
    return (letter >= 'a' && letter <= 'z') || (letter >= 'A' && letter <= 'Z') || letter == '_';
}

static bool is_digit(char letter) {
    return letter >= '0' && letter <= '9';
}

static bool at_end(eng_tlexer *lexer) {
    const char *closing = lexer->tag == ENG_TAG_BLOCK ? "%}" : "}}";
    size_t sign = lexer->text[lexer->at] == '-' || (lexer->text[lexer->at] == '+' && lexer->tag == ENG_TAG_BLOCK);
    if (lexer->braces > 0 || !at(lexer, lexer->at + sign, closing))
        return false;
    lexer->token = ENG_TT_END;
    lexer->size = 0;
    close_tag(lexer, closing, lexer->tag == ENG_TAG_BLOCK);
    return true;
}

static void take_number(eng_tparser *parser) {
    eng_tlexer *lexer = &parser->lexer;
    size_t to = lexer->at;
    lexer->integer = 0;
    for (; to < lexer->length && (is_digit(lexer->text[to]) || lexer->text[to] == '_'); to++) {
        if (lexer->text[to] != '_' && (__builtin_mul_overflow(lexer->integer, 10, &lexer->integer) ||
                                       __builtin_add_overflow(lexer->integer, lexer->text[to] - '0', &lexer->integer)))
            eng_tparse_fail(parser, ENG_UNSUPPORTED, "an integer beyond 2^63");
    }
    bool fraction = to + 1 < lexer->length && lexer->text[to] == '.' && is_digit(lexer->text[to + 1]);
    if (fraction || (to < lexer->length && is_letter(lexer->text[to])))
        eng_tparse_fail(parser, ENG_UNSUPPORTED, "only whole decimal numbers are supported");
    lexer->token = ENG_TT_INTEGER;
    lexer->size = to - lexer->at;
    advance(lexer, to);
}

// start and size: what stands between the quotes, escapes as written.
static void take_quoted(eng_tparser *parser) {
    eng_tlexer *lexer = &parser->lexer;
    char quote = lexer->text[lexer->at];
    size_t to = lexer->at + 1;
    while (to < lexer->length && lexer->text[to] != quote)
        to += lexer->text[to] == '\\' ? 2 : 1;
    if (to >= lexer->length) {
        eng_tparse_fail(parser, ENG_FORMAT, "a text without its closing quote");
        return;
    }
    lexer->token = ENG_TT_STRING;
    lexer->start++;
    lexer->size = to - lexer->at - 1;
    advance(lexer, to + 1);
}

static void take_operator(eng_tparser *parser) {
    static const char *const operators[] = {"==", "!=", "<=", ">=", "//", "**", "+", "-", "*", "/", "%", "~", "(",
                                            ")",  "[",  "]",  "{",  "}",  ".",  ",", ":", "|", "=", "<", ">"};
    eng_tlexer *lexer = &parser->lexer;
    for (size_t i = 0; i < sizeof operators / sizeof *operators; i++) {
        if (!at(lexer, lexer->at, operators[i]))
            continue;
        lexer->token = ENG_TT_OPERATOR;
        lexer->size = strlen(operators[i]);
        lexer->braces += strchr("([{", *operators[i]) ? 1 : strchr(")]}", *operators[i]) ? -1 : 0;
        advance(lexer, lexer->at + lexer->size);
        return;
    }
    eng_tparse_fail(parser, ENG_FORMAT, "the character '%c' in a tag", lexer->text[lexer->at]);
}

void eng_tlex_next(eng_tparser *parser) {
    eng_tlexer *lexer = &parser->lexer;
    size_t to = lexer->at;
    while (to < lexer->length && is_white(lexer->text[to]))
        to++;
    advance(lexer, to);
    if (lexer->at >= lexer->length)
        eng_tparse_fail(parser, ENG_FORMAT, "a tag without end");
    if (parser->status != ENG_OK || at_end(lexer)) {
        lexer->token = ENG_TT_END;
        return;
    }
    lexer->start = lexer->text + lexer->at;
    char letter = *lexer->start;
    if (is_digit(letter)) {
        take_number(parser);
    } else if (letter == '"' || letter == '\'') {
        take_quoted(parser);
    } else if (is_letter(letter)) {
        while (to < lexer->length && (is_letter(lexer->text[to]) || is_digit(lexer->text[to])))
            to++;
        lexer->token = ENG_TT_NAME;
        lexer->size = to - lexer->at;
        advance(lexer, to);
    } else {
        take_operator(parser);
    }
}

bool eng_tlex_is(const eng_tparser *parser, const char *word) {
    const eng_tlexer *lexer = &parser->lexer;
    return parser->status == ENG_OK && (lexer->token == ENG_TT_NAME || lexer->token == ENG_TT_OPERATOR) &&
           strlen(word) == lexer->size && memcmp(word, lexer->start, lexer->size) == 0;
}

bool eng_tlex_take(eng_tparser *parser, const char *word) {
    if (!eng_tlex_is(parser, word))
        return false;
    eng_tlex_next(parser);
    return true;
}

void eng_tlex_expect(eng_tparser *parser, const char *operator) {
    if (!eng_tlex_take(parser, operator))
        eng_tparse_fail(
            parser, ENG_FORMAT,
            "'%s' is missing before '%.*s'", operator, (int)(parser->lexer.size < 20 ? parser->lexer.size : 20),
            parser->lexer.token == ENG_TT_END ? "" : parser->lexer.start);
}
