// SPDX-License-Identifier: Apache-2.0
// Expressions of templates, by recursive descent with Jinja's precedences.
//
// From loose to tight: "if else", or, and, not, comparisons and "in", + -, ~, * // %, sign, then what follows a value:
// attribute, index, call, filter, test. Names of filters and tests are looked up here, so that an unknown one is known
// before anything runs.
#include <string.h>

#include "engine/template_internal.h"
#include "engine/utf8.h"

eng_tnode *eng_tparse_node(eng_tparser *parser, eng_tnode_kind kind) {
    eng_tnode *node = eng_tarena_take(parser->arena, sizeof *node);
    if (!node) {
        eng_tparse_fail(parser, ENG_NO_MEMORY, "no memory for the template");
        return NULL;
    }
    node->kind = kind;
    node->line = parser->lexer.line;
    return node;
}

// A node over one or two others; NULL after a fault.
static eng_tnode *join(eng_tparser *parser, eng_tnode_kind kind, eng_tnode *a, eng_tnode *b) {
    eng_tnode *node = eng_tparse_node(parser, kind);
    if (node) {
        node->a = a;
        node->b = b;
    }
    return node;
}

static eng_tnode *fail(eng_tparser *parser, const char *what) {
    eng_tparse_fail(parser, ENG_FORMAT, "%s", what);
    return NULL;
}

const char *eng_tparse_name(eng_tparser *parser) {
    const eng_tlexer *lexer = &parser->lexer;
    if (parser->status == ENG_OK && lexer->token != ENG_TT_NAME)
        eng_tparse_fail(parser, ENG_FORMAT, "a name is missing");
    char *name = parser->status == ENG_OK ? eng_tarena_take(parser->arena, lexer->size + 1) : NULL;
    if (!name) {
        eng_tparse_fail(parser, ENG_NO_MEMORY, "no memory for the template");
        return "";
    }
    memcpy(name, lexer->start, lexer->size);
    eng_tlex_next(parser);
    return name;
}

// ---- texts

static int hex_digit(char letter) {
    if (letter >= '0' && letter <= '9')
        return letter - '0';
    char low = (char)(letter | 32);
    return low >= 'a' && low <= 'f' ? low - 'a' + 10 : -1;
}

// The character of \xNN or \uNNNN behind its letter; digits of them.
static size_t unescape_hex(eng_tparser *parser, const char *text, size_t left, size_t digits, char *out) {
    uint32_t code = 0;
    if (left < digits) {
        eng_tparse_fail(parser, ENG_FORMAT, "an escape that ends early");
        return 0;
    }
    for (size_t i = 0; i < digits; i++) {
        int digit = hex_digit(text[i]);
        if (digit < 0)
            eng_tparse_fail(parser, ENG_FORMAT, "an escape with a digit that is none");
        code = code * 16 + (uint32_t)(digit & 15);
    }
    if (code == 0 || code > 0x10ffff || (code >= 0xd800 && code < 0xe000)) {
        eng_tparse_fail(parser, ENG_UNSUPPORTED, "an escape that is no character");
        return 0;
    }
    return eng_utf8_encode(code, out);
}

// Python's escapes; an unknown one stays as it is written.
static size_t unescape(eng_tparser *parser, const char *from, size_t length, char *to) {
    static const char letters[] = "ntrabfv\\'\"", meant[] = "\n\t\r\a\b\f\v\\'\"";
    size_t written = 0;
    for (size_t i = 0; i < length && parser->status == ENG_OK; i++) {
        if (from[i] != '\\' || i + 1 == length) {
            to[written++] = from[i];
            continue;
        }
        char letter = from[++i];
        const char *found = letter ? strchr(letters, letter) : NULL;
        size_t digits = letter == 'x' ? 2 : letter == 'u' ? 4 : letter == 'U' ? 8 : 0;
        if (found) {
            to[written++] = meant[found - letters];
        } else if (digits > 0) {
            written += unescape_hex(parser, from + i + 1, length - i - 1, digits, to + written);
            i += digits;
        } else if (letter != '\n') { // a backslash at a line's end joins the lines
            to[written++] = '\\';
            to[written++] = letter;
        }
    }
    return written;
}

// One text or several that stand behind each other.
static eng_tnode *parse_text(eng_tparser *parser) {
    eng_tnode *node = eng_tparse_node(parser, ENG_N_CONSTANT);
    char *whole = NULL;
    size_t length = 0;
    while (node && parser->status == ENG_OK && parser->lexer.token == ENG_TT_STRING) {
        char *longer = eng_tarena_take(parser->arena, length + parser->lexer.size + 1);
        if (!longer) {
            eng_tparse_fail(parser, ENG_NO_MEMORY, "no memory for the template");
            return NULL;
        }
        if (length > 0)
            memcpy(longer, whole, length);
        whole = longer;
        length += unescape(parser, parser->lexer.start, parser->lexer.size, whole + length);
        eng_tlex_next(parser);
    }
    if (node)
        node->value = eng_tstring_value((eng_tstring){.bytes = whole, .length = length});
    return node;
}

// ---- values

static eng_tnode *constant(eng_tparser *parser, eng_tvalue value) {
    eng_tnode *node = eng_tparse_node(parser, ENG_N_CONSTANT);
    if (node)
        node->value = value;
    eng_tlex_next(parser);
    return node;
}

static eng_tnode *parse_name(eng_tparser *parser) {
    static const struct {
        const char *word;
        eng_tkind kind;
        int64_t integer;
    } words[] = {{"true", ENG_T_BOOL, 1},  {"True", ENG_T_BOOL, 1}, {"false", ENG_T_BOOL, 0},
                 {"False", ENG_T_BOOL, 0}, {"none", ENG_T_NONE, 0}, {"None", ENG_T_NONE, 0}};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        if (eng_tlex_is(parser, words[i].word))
            return constant(parser, (eng_tvalue){words[i].kind, {words[i].integer}});
    }
    eng_tnode *node = eng_tparse_node(parser, ENG_N_NAME);
    if (node)
        node->name = eng_tparse_name(parser);
    return node;
}

// Expressions with commas between them up to the closing one, which is taken; *commas: how many. pairs: "key: value".
static eng_tnode *parse_list(eng_tparser *parser, const char *closing, bool pairs, int *commas) {
    eng_tnode *first = NULL, **last = &first;
    *commas = 0;
    while (parser->status == ENG_OK && !eng_tlex_is(parser, closing)) {
        for (int part = 0; part < 1 + pairs; part++) {
            if (part == 1)
                eng_tlex_expect(parser, ":");
            *last = eng_tparse_expression(parser);
            if (!*last)
                return NULL;
            last = &(*last)->next;
        }
        if (!eng_tlex_take(parser, ","))
            break;
        ++*commas;
    }
    eng_tlex_expect(parser, closing);
    return first;
}

static eng_tnode *parse_listed(eng_tparser *parser, eng_tnode_kind kind, const char *closing) {
    int commas;
    eng_tlex_next(parser);
    eng_tnode *node = eng_tparse_node(parser, kind);
    eng_tnode *first = parse_list(parser, closing, kind == ENG_N_DICT, &commas);
    if (node)
        node->first = first;
    return node;
}

// A value in parentheses; with a comma it is a list.
static eng_tnode *parse_parentheses(eng_tparser *parser) {
    int commas;
    eng_tlex_next(parser);
    eng_tnode *first = parse_list(parser, ")", false, &commas);
    if (first && commas == 0)
        return first;
    eng_tnode *node = eng_tparse_node(parser, ENG_N_LIST);
    if (node)
        node->first = first;
    return node;
}

static eng_tnode *parse_primary(eng_tparser *parser) {
    if (parser->status != ENG_OK)
        return NULL;
    if (parser->lexer.token == ENG_TT_NAME)
        return parse_name(parser);
    if (parser->lexer.token == ENG_TT_STRING)
        return parse_text(parser);
    if (parser->lexer.token == ENG_TT_INTEGER)
        return constant(parser, eng_tinteger(parser->lexer.integer));
    if (eng_tlex_is(parser, "("))
        return parse_parentheses(parser);
    if (eng_tlex_is(parser, "["))
        return parse_listed(parser, ENG_N_LIST, "]");
    if (eng_tlex_is(parser, "{"))
        return parse_listed(parser, ENG_N_DICT, "}");
    return fail(parser, "an expression is missing");
}

// ---- what follows a value

static eng_tnode *parse_arguments(eng_tparser *parser) {
    eng_tnode *first = NULL, **last = &first;
    int count = 0;
    eng_tlex_expect(parser, "(");
    while (parser->status == ENG_OK && !eng_tlex_is(parser, ")")) {
        eng_tnode *argument = join(parser, ENG_N_ARGUMENT, eng_tparse_expression(parser), NULL);
        if (!argument || !argument->a)
            return NULL;
        if (argument->a->kind == ENG_N_NAME && eng_tlex_take(parser, "=")) {
            argument->name = argument->a->name;
            argument->a = eng_tparse_expression(parser);
        }
        if (++count > ENG_TEMPLATE_MAX_ARGS)
            eng_tparse_fail(parser, ENG_UNSUPPORTED, "more than %d arguments", ENG_TEMPLATE_MAX_ARGS);
        *last = argument;
        last = &argument->next;
        if (!eng_tlex_take(parser, ","))
            break;
    }
    eng_tlex_expect(parser, ")");
    return first;
}

// "[", and then an index or a slice.
static eng_tnode *parse_subscript(eng_tparser *parser, eng_tnode *object) {
    eng_tnode *part[3] = {NULL};
    int count = 0;
    eng_tlex_next(parser);
    for (; count < 3 && parser->status == ENG_OK; count++) {
        if (!eng_tlex_is(parser, ":") && !eng_tlex_is(parser, "]"))
            part[count] = eng_tparse_expression(parser);
        if (!eng_tlex_take(parser, ":"))
            break;
    }
    eng_tlex_expect(parser, "]");
    if (count == 0 && !part[0])
        return fail(parser, "an index is missing");
    eng_tnode *node = join(parser, count == 0 ? ENG_N_SUBSCRIPT : ENG_N_SLICE, object, part[0]);
    if (node) {
        node->c = part[1];
        node->d = part[2];
    }
    return node;
}

static eng_tnode *parse_postfix(eng_tparser *parser, eng_tnode *node) {
    while (node && parser->status == ENG_OK) {
        if (eng_tlex_take(parser, ".")) {
            node = join(parser, ENG_N_ATTRIBUTE, node, NULL);
            if (node)
                node->name = eng_tparse_name(parser);
        } else if (eng_tlex_is(parser, "[")) {
            node = parse_subscript(parser, node);
        } else if (eng_tlex_is(parser, "(")) {
            node = join(parser, ENG_N_CALL, node, NULL);
            if (node)
                node->first = parse_arguments(parser);
        } else {
            break;
        }
    }
    return node;
}

static eng_tnode *parse_filter(eng_tparser *parser, eng_tnode *value) {
    eng_tnode *node = join(parser, ENG_N_FILTER, value, NULL);
    if (!node)
        return NULL;
    node->name = eng_tparse_name(parser);
    node->index = eng_tfilter_find(node->name);
    if (node->index < 0)
        eng_tparse_fail(parser, ENG_UNSUPPORTED, "the filter '%.40s' is not supported", node->name);
    if (eng_tlex_is(parser, "("))
        node->first = parse_arguments(parser);
    return node;
}

// Whether a test's one argument may stand without parentheses here.
static bool argument_follows(const eng_tparser *parser) {
    const eng_ttoken token = parser->lexer.token;
    if (eng_tlex_is(parser, "else") || eng_tlex_is(parser, "or") || eng_tlex_is(parser, "and") ||
        eng_tlex_is(parser, "if") || eng_tlex_is(parser, "is") || eng_tlex_is(parser, "in") ||
        eng_tlex_is(parser, "not"))
        return false;
    return token == ENG_TT_NAME || token == ENG_TT_STRING || token == ENG_TT_INTEGER || eng_tlex_is(parser, "[") ||
           eng_tlex_is(parser, "{");
}

static eng_tnode *parse_test(eng_tparser *parser, eng_tnode *value) {
    bool negated = eng_tlex_take(parser, "not");
    eng_tnode *node = join(parser, ENG_N_TEST, value, NULL);
    if (!node)
        return NULL;
    node->name = eng_tparse_name(parser);
    node->index = eng_ttest_find(node->name);
    if (node->index < 0)
        eng_tparse_fail(parser, ENG_UNSUPPORTED, "the test '%.40s' is not supported", node->name);
    if (eng_tlex_is(parser, "("))
        node->first = parse_arguments(parser);
    else if (argument_follows(parser))
        node->first = join(parser, ENG_N_ARGUMENT, parse_postfix(parser, parse_primary(parser)), NULL);
    return negated ? join(parser, ENG_N_NOT, node, NULL) : node;
}

static eng_tnode *parse_filters(eng_tparser *parser, eng_tnode *node) {
    while (node && parser->status == ENG_OK) {
        if (eng_tlex_take(parser, "|"))
            node = parse_filter(parser, node);
        else if (eng_tlex_take(parser, "is"))
            node = parse_test(parser, node);
        else
            break;
        node = parse_postfix(parser, node);
    }
    return node;
}

static bool enter(eng_tparser *parser) {
    if (parser->depth >= ENG_TEMPLATE_MAX_DEPTH)
        eng_tparse_fail(parser, ENG_UNSUPPORTED, "nested deeper than %d", ENG_TEMPLATE_MAX_DEPTH);
    parser->depth++;
    return parser->status == ENG_OK;
}

static eng_tnode *parse_unary(eng_tparser *parser, bool filters) {
    eng_tnode *node = NULL;
    if (enter(parser)) {
        if (eng_tlex_take(parser, "-"))
            node = join(parser, ENG_N_NEGATE, parse_unary(parser, false), NULL);
        else
            node = parse_postfix(parser, parse_primary(parser));
        if (filters)
            node = parse_filters(parser, node);
    }
    parser->depth--;
    return node;
}

// ---- operators

typedef struct operator_word {
    const char *word;
    eng_top op;
} operator_word;

// From loose to tight; all group to the left.
static const operator_word levels[][4] = {
    {{"+", ENG_OP_ADD}, {"-", ENG_OP_SUBTRACT}},
    {{"~", ENG_OP_JOIN}},
    {{"*", ENG_OP_MULTIPLY}, {"//", ENG_OP_DIVIDE}, {"%", ENG_OP_MODULO}},
};
enum { LEVELS = sizeof levels / sizeof *levels };

static const operator_word *take_operator(eng_tparser *parser, const operator_word *words) {
    for (; words->word; words++) {
        if (eng_tlex_take(parser, words->word))
            return words;
    }
    return NULL;
}

static eng_tnode *parse_level(eng_tparser *parser, int level) {
    if (level == LEVELS)
        return parse_unary(parser, true);
    eng_tnode *node = parse_level(parser, level + 1);
    const operator_word *found;
    while (node && (found = take_operator(parser, levels[level]))) {
        node = join(parser, ENG_N_BINARY, node, parse_level(parser, level + 1));
        if (node)
            node->op = found->op;
    }
    return node;
}

static bool take_comparison(eng_tparser *parser, eng_top *op) {
    static const operator_word words[] = {{"==", ENG_OP_EQUAL},   {"!=", ENG_OP_UNEQUAL}, {"<", ENG_OP_LESS},
                                          {"<=", ENG_OP_AT_MOST}, {">", ENG_OP_GREATER},  {">=", ENG_OP_AT_LEAST},
                                          {"in", ENG_OP_IN},      {NULL, ENG_OP_ADD}};
    const operator_word *found = take_operator(parser, words);
    if (found) {
        *op = found->op;
        return true;
    }
    if (!eng_tlex_take(parser, "not")) // only "not in" can stand behind a value
        return false;
    eng_tlex_expect(parser, "in");
    *op = ENG_OP_NOT_IN;
    return true;
}

// a < b < c holds where both hold.
static eng_tnode *parse_comparison(eng_tparser *parser) {
    eng_tnode *node = parse_level(parser, 0), **last = NULL;
    eng_top op;
    while (node && take_comparison(parser, &op)) {
        if (!last) {
            node = join(parser, ENG_N_COMPARE, node, NULL);
            last = node ? &node->first : NULL;
        }
        eng_tnode *link = join(parser, ENG_N_ARGUMENT, parse_level(parser, 0), NULL);
        if (!node || !link)
            return NULL;
        link->op = op;
        *last = link;
        last = &link->next;
    }
    return node;
}

static eng_tnode *parse_not(eng_tparser *parser) {
    bool negated = false;
    while (eng_tlex_take(parser, "not"))
        negated = !negated;
    eng_tnode *node = parse_comparison(parser);
    return negated ? join(parser, ENG_N_NOT, node, NULL) : node;
}

static eng_tnode *parse_and(eng_tparser *parser) {
    eng_tnode *node = parse_not(parser);
    while (node && eng_tlex_take(parser, "and"))
        node = join(parser, ENG_N_AND, node, parse_not(parser));
    return node;
}

eng_tnode *eng_tparse_disjunction(eng_tparser *parser) {
    eng_tnode *node = parse_and(parser);
    while (node && eng_tlex_take(parser, "or"))
        node = join(parser, ENG_N_OR, node, parse_and(parser));
    return node;
}

eng_tnode *eng_tparse_expression(eng_tparser *parser) {
    eng_tnode *node = NULL;
    if (enter(parser)) {
        node = eng_tparse_disjunction(parser);
        while (node && eng_tlex_take(parser, "if")) {
            node = join(parser, ENG_N_CONDITIONAL, eng_tparse_disjunction(parser), node);
            if (node && eng_tlex_take(parser, "else"))
                node->c = eng_tparse_expression(parser);
        }
    }
    parser->depth--;
    if (!node)
        eng_tparse_fail(parser, ENG_FORMAT, "an expression is missing");
    return node;
}
