// SPDX-License-Identifier: Apache-2.0
// Statements of templates: text, output, if, for, set, macro, break, continue.
//
// A block ends at the tag that its opener waits for; every other tag that no statement begins with is an error by its
// name. "generation" marks text for training and changes nothing here.
#include <stdlib.h>
#include <string.h>

#include "engine/template_internal.h"

static eng_tnode *parse_block(eng_tparser *parser, const char *const *ends);

static void end_tag(eng_tparser *parser) {
    if (parser->status == ENG_OK && parser->lexer.token != ENG_TT_END)
        eng_tparse_fail(parser, ENG_FORMAT, "'%.*s' where the tag should end",
                        (int)(parser->lexer.size < 20 ? parser->lexer.size : 20), parser->lexer.start);
}

// The tag at hand ends the block if it begins with one of the words.
static bool ends_block(const eng_tparser *parser, const char *const *ends) {
    for (; ends && *ends; ends++) {
        if (eng_tlex_is(parser, *ends))
            return true;
    }
    return false;
}

// ---- statements; the word that they begin with is taken

static eng_tnode *parse_if(eng_tparser *parser) {
    static const char *const ends[] = {"elif", "else", "endif", NULL}, *const last_ends[] = {"endif", NULL};
    eng_tnode *whole = eng_tparse_node(parser, ENG_N_IF), *node = whole;
    while (node && parser->status == ENG_OK) {
        node->a = eng_tparse_expression(parser);
        end_tag(parser);
        node->first = parse_block(parser, ends);
        if (!eng_tlex_take(parser, "elif"))
            break;
        node->other = eng_tparse_node(parser, ENG_N_IF);
        node = node->other;
    }
    if (node && eng_tlex_take(parser, "else")) {
        end_tag(parser);
        node->other = parse_block(parser, last_ends);
    }
    eng_tlex_expect(parser, "endif");
    return whole;
}

static void parse_targets(eng_tparser *parser, eng_tnode *node) {
    node->names = eng_tarena_take(parser->arena, ENG_TEMPLATE_MAX_ARGS * sizeof *node->names);
    if (!node->names)
        eng_tparse_fail(parser, ENG_NO_MEMORY, "no memory for the template");
    bool parentheses = eng_tlex_take(parser, "(");
    do {
        if (node->count == ENG_TEMPLATE_MAX_ARGS)
            eng_tparse_fail(parser, ENG_UNSUPPORTED, "a loop over more than %d names", ENG_TEMPLATE_MAX_ARGS);
        if (parser->status == ENG_OK)
            node->names[node->count++] = eng_tparse_name(parser);
    } while (eng_tlex_take(parser, ","));
    if (parentheses)
        eng_tlex_expect(parser, ")");
}

static eng_tnode *parse_for(eng_tparser *parser) {
    static const char *const ends[] = {"else", "endfor", NULL}, *const last_ends[] = {"endfor", NULL};
    eng_tnode *node = eng_tparse_node(parser, ENG_N_FOR);
    if (!node)
        return NULL;
    parse_targets(parser, node);
    eng_tlex_expect(parser, "in");
    node->a = eng_tparse_disjunction(parser);
    if (eng_tlex_take(parser, "if"))
        node->b = eng_tparse_expression(parser);
    end_tag(parser);
    parser->loops++;
    node->first = parse_block(parser, ends);
    parser->loops--;
    if (eng_tlex_take(parser, "else")) {
        end_tag(parser);
        node->other = parse_block(parser, last_ends);
    }
    eng_tlex_expect(parser, "endfor");
    return node;
}

static eng_tnode *parse_set(eng_tparser *parser) {
    static const char *const ends[] = {"endset", NULL};
    eng_tnode *node = eng_tparse_node(parser, ENG_N_SET);
    if (!node)
        return NULL;
    node->name = eng_tparse_name(parser);
    if (eng_tlex_take(parser, "."))
        node->attribute = eng_tparse_name(parser);
    if (parser->status == ENG_OK && parser->lexer.token == ENG_TT_END) {
        node->first = parse_block(parser, ends);
        eng_tlex_expect(parser, "endset");
        return node;
    }
    if (parser->status == ENG_OK && !eng_tlex_is(parser, "="))
        eng_tparse_fail(parser, ENG_UNSUPPORTED, "only \"set NAME = VALUE\" and \"set NAME\" are supported");
    eng_tlex_expect(parser, "=");
    node->a = eng_tparse_expression(parser);
    return node;
}

// name(a, b=default)
static eng_tnode *parse_macro(eng_tparser *parser) {
    static const char *const ends[] = {"endmacro", NULL};
    eng_tnode *node = eng_tparse_node(parser, ENG_N_MACRO), **last = node ? &node->other : NULL;
    if (!node)
        return NULL;
    node->name = eng_tparse_name(parser);
    node->names = eng_tarena_take(parser->arena, ENG_TEMPLATE_MAX_ARGS * sizeof *node->names);
    if (!node->names)
        eng_tparse_fail(parser, ENG_NO_MEMORY, "no memory for the template");
    eng_tlex_expect(parser, "(");
    while (parser->status == ENG_OK && !eng_tlex_is(parser, ")")) {
        if (node->count == ENG_TEMPLATE_MAX_ARGS) {
            eng_tparse_fail(parser, ENG_UNSUPPORTED, "a macro of more than %d values", ENG_TEMPLATE_MAX_ARGS);
            break;
        }
        node->names[node->count++] = eng_tparse_name(parser);
        *last = eng_tlex_take(parser, "=") ? eng_tparse_expression(parser) : eng_tparse_node(parser, ENG_N_CONSTANT);
        if (!*last)
            break;
        last = &(*last)->next;
        if (!eng_tlex_take(parser, ","))
            break;
    }
    eng_tlex_expect(parser, ")");
    end_tag(parser);
    int loops = parser->loops;
    parser->loops = 0;
    node->first = parse_block(parser, ends);
    parser->loops = loops;
    eng_tlex_expect(parser, "endmacro");
    return node;
}

static eng_tnode *parse_jump(eng_tparser *parser, eng_tnode_kind kind) {
    if (parser->loops == 0)
        eng_tparse_fail(parser, ENG_FORMAT, "break or continue outside a loop");
    return eng_tparse_node(parser, kind);
}

// Only its content counts: a condition that always holds.
static eng_tnode *parse_generation(eng_tparser *parser) {
    static const char *const ends[] = {"endgeneration", NULL};
    eng_tnode *node = eng_tparse_node(parser, ENG_N_IF), *always = eng_tparse_node(parser, ENG_N_CONSTANT);
    if (!node || !always)
        return NULL;
    always->value = eng_tbool(true);
    node->a = always;
    end_tag(parser);
    node->first = parse_block(parser, ends);
    eng_tlex_expect(parser, "endgeneration");
    return node;
}

static eng_tnode *parse_statement(eng_tparser *parser) {
    eng_tnode *node = NULL;
    if (eng_tlex_take(parser, "if"))
        node = parse_if(parser);
    else if (eng_tlex_take(parser, "for"))
        node = parse_for(parser);
    else if (eng_tlex_take(parser, "set"))
        node = parse_set(parser);
    else if (eng_tlex_take(parser, "macro"))
        node = parse_macro(parser);
    else if (eng_tlex_take(parser, "break"))
        node = parse_jump(parser, ENG_N_BREAK);
    else if (eng_tlex_take(parser, "continue"))
        node = parse_jump(parser, ENG_N_CONTINUE);
    else if (eng_tlex_take(parser, "generation"))
        node = parse_generation(parser);
    else
        eng_tparse_fail(parser, ENG_UNSUPPORTED, "the tag '%.*s' is not supported here",
                        (int)(parser->lexer.size < 30 ? parser->lexer.size : 30),
                        parser->lexer.token == ENG_TT_END ? "" : parser->lexer.start);
    end_tag(parser);
    return node;
}

// ---- blocks

static eng_tnode *text_node(eng_tparser *parser, const char *data, size_t length) {
    eng_tnode *node = eng_tparse_node(parser, ENG_N_TEXT);
    char *copy = eng_tarena_take(parser->arena, length);
    if (!node || !copy) {
        eng_tparse_fail(parser, ENG_NO_MEMORY, "no memory for the template");
        return NULL;
    }
    memcpy(copy, data, length);
    node->value = eng_tstring_value((eng_tstring){.bytes = copy, .length = length});
    return node;
}

static eng_tnode *parse_output(eng_tparser *parser) {
    eng_tnode *node = eng_tparse_node(parser, ENG_N_OUTPUT);
    if (node)
        node->a = eng_tparse_expression(parser);
    end_tag(parser);
    return node;
}

// Up to a tag that begins with one of the words (which stays at hand), or the end of the template where ends is NULL.
static eng_tnode *parse_block(eng_tparser *parser, const char *const *ends) {
    eng_tnode *first = NULL, **last = &first;
    const char *data;
    size_t length;
    if (parser->depth++ >= ENG_TEMPLATE_MAX_DEPTH)
        eng_tparse_fail(parser, ENG_UNSUPPORTED, "nested deeper than %d", ENG_TEMPLATE_MAX_DEPTH);
    while (parser->status == ENG_OK) {
        eng_ttag tag = eng_tlex_data(parser, &data, &length);
        if (length > 0 && parser->status == ENG_OK && (*last = text_node(parser, data, length)))
            last = &(*last)->next;
        if (parser->status != ENG_OK || tag == ENG_TAG_NONE || (tag == ENG_TAG_BLOCK && ends_block(parser, ends)))
            break;
        if (tag == ENG_TAG_COMMENT)
            continue;
        *last = tag == ENG_TAG_OUTPUT ? parse_output(parser) : parse_statement(parser);
        if (*last)
            last = &(*last)->next;
    }
    if (ends && parser->status == ENG_OK && parser->lexer.tag == ENG_TAG_NONE)
        eng_tparse_fail(parser, ENG_FORMAT, "the tag '%s' is missing", ends[0]);
    parser->depth--;
    return first;
}

eng_tnode *eng_tparse_body(eng_tparser *parser) {
    return parse_block(parser, NULL);
}

// ---- the door

// Line ends become "\n", and one at the very end goes, as Jinja has it.
static size_t normalise(const char *from, size_t length, char *to) {
    size_t written = 0;
    for (size_t i = 0; i < length; i++) {
        to[written++] = from[i] == '\r' ? '\n' : from[i];
        if (from[i] == '\r' && i + 1 < length && from[i + 1] == '\n')
            i++;
    }
    return written > 0 && to[written - 1] == '\n' ? written - 1 : written;
}

eng_status eng_template_compile(const char *text, size_t length, eng_template **out, eng_error *error) {
    *out = NULL;
    if (length > ENG_TEMPLATE_MAX_TEXT)
        return eng_fail(error, ENG_TOO_LONG, "chat template: %zu bytes, the limit is %d", length,
                        ENG_TEMPLATE_MAX_TEXT);
    eng_template *made = calloc(1, sizeof *made);
    char *copy = malloc(length + 1);
    if (!made || !copy) {
        free(copy);
        free(made);
        return eng_fail(error, ENG_NO_MEMORY, "no memory for the chat template");
    }
    made->arena.limit = (size_t)256 * ENG_TEMPLATE_MAX_TEXT;
    size_t size = normalise(text, length, copy);
    eng_tparser parser = {
        .lexer = {.text = copy, .length = size, .line = 1, .line_starts = true}, .arena = &made->arena, .error = error};
    made->body = eng_tparse_body(&parser);
    free(copy);
    if (parser.status != ENG_OK) {
        eng_template_free(made);
        return parser.status;
    }
    *out = made;
    return ENG_OK;
}

void eng_template_free(eng_template *compiled) {
    if (!compiled)
        return;
    eng_tarena_free(&compiled->arena);
    free(compiled);
}
