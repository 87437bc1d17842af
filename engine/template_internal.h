// SPDX-License-Identifier: Apache-2.0
// The parts of the template interpreter; nobody else includes it.
//
// template_lex.c cuts text into tokens, template_parse.c makes statements of them and template_expression.c
// expressions, template_value.c owns memory and values, template_evaluate.c evaluates, template_call.c knows filters,
// tests, functions and methods, template.c runs statements. Values are immutable but for namespaces and live as long as
// their arena. Faults stick to the run: after one, evaluation yields undefined values until somebody looks.
#ifndef ENGINE_TEMPLATE_INTERNAL_H
#define ENGINE_TEMPLATE_INTERNAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/template.h"

enum {
    ENG_TEMPLATE_MAX_TEXT = 1 << 18, // bytes of a template
    ENG_TEMPLATE_MAX_DEPTH = 200,    // of nested statements and expressions
    ENG_TEMPLATE_MAX_ARGS = 8,
};

// ---- memory

typedef struct eng_tarena_block eng_tarena_block;
typedef struct eng_tarena {
    eng_tarena_block *blocks;
    size_t used, limit; // bytes
} eng_tarena;
// Zeroed memory; NULL: beyond the limit, or the system has none.
void *eng_tarena_take(eng_tarena *arena, size_t size);
void eng_tarena_free(eng_tarena *arena);

// ---- values

typedef enum eng_tkind {
    ENG_T_UNDEFINED,
    ENG_T_NONE,
    ENG_T_BOOL, // in integer
    ENG_T_INTEGER,
    ENG_T_STRING,
    ENG_T_LIST,
    ENG_T_DICT,
    ENG_T_FUNCTION, // in integer: its place in the table
    ENG_T_MACRO,
} eng_tkind;

typedef struct eng_tstring {
    const char *bytes;
    size_t length;
    const uint8_t *marks; // for each byte whether it came from a message; NULL: given says it for all
    bool given;
} eng_tstring;

typedef struct eng_tlist eng_tlist;
typedef struct eng_tdict eng_tdict;

typedef struct eng_tnode eng_tnode;

typedef struct eng_tvalue {
    eng_tkind kind;
    union {
        int64_t integer;
        eng_tstring string;
        eng_tlist *list;
        eng_tdict *dict;
        const eng_tnode *macro;
        const char *missing; // undefined: what was looked for
    };
} eng_tvalue;

struct eng_tlist {
    eng_tvalue *items;
    size_t count;
};

typedef struct eng_tentry {
    eng_tstring key;
    eng_tvalue value;
} eng_tentry;

struct eng_tdict {
    eng_tentry *entries;
    size_t count, capacity;
    bool is_namespace;
};

// ---- the program

typedef enum eng_tnode_kind {
    ENG_N_CONSTANT,
    ENG_N_NAME,
    ENG_N_ATTRIBUTE, // a.name
    ENG_N_SUBSCRIPT, // a[b]
    ENG_N_SLICE,     // a[b:c:d]
    ENG_N_CALL,      // a(first...)
    ENG_N_FILTER,    // a|name(first...)
    ENG_N_TEST,      // a is name(first...)
    ENG_N_NOT,
    ENG_N_NEGATE,
    ENG_N_AND,
    ENG_N_OR,
    ENG_N_COMPARE,     // a, then first: links of op and a
    ENG_N_BINARY,      // a op b
    ENG_N_CONDITIONAL, // b if a else c
    ENG_N_LIST,
    ENG_N_DICT,     // first: key, value, key ...
    ENG_N_ARGUMENT, // a, with a name or without
    ENG_N_TEXT,     // value
    ENG_N_OUTPUT,   // a
    ENG_N_IF,       // a; first; other
    ENG_N_FOR,      // names in a if b; first; other
    ENG_N_SET,      // name or name.attribute = a; without a: name = the text of first
    ENG_N_MACRO,    // name(names...): first; other: a default each, or a spare constant
    ENG_N_BREAK,
    ENG_N_CONTINUE,
} eng_tnode_kind;

typedef enum eng_top {
    ENG_OP_ADD,
    ENG_OP_SUBTRACT,
    ENG_OP_MULTIPLY,
    ENG_OP_DIVIDE, // //
    ENG_OP_MODULO,
    ENG_OP_JOIN, // ~
    ENG_OP_EQUAL,
    ENG_OP_UNEQUAL,
    ENG_OP_LESS,
    ENG_OP_AT_MOST,
    ENG_OP_GREATER,
    ENG_OP_AT_LEAST,
    ENG_OP_IN,
    ENG_OP_NOT_IN,
} eng_top;

struct eng_tnode {
    eng_tnode_kind kind;
    uint32_t line;
    eng_top op;
    int32_t index; // of a filter or test in its table
    const char *name, *attribute;
    const char **names; // targets of a for, parameters of a macro
    size_t count;       // of them
    eng_tvalue value;
    eng_tnode *a, *b, *c, *d;
    eng_tnode *first, *other, *next;
};

struct eng_template {
    eng_tarena arena;
    eng_tnode *body;
};

// ---- reading: template_lex.c, template_parse.c, template_expression.c

typedef enum eng_ttoken {
    ENG_TT_NAME,
    ENG_TT_INTEGER,
    ENG_TT_STRING,
    ENG_TT_OPERATOR, // one or two characters
    ENG_TT_END,      // of the tag
} eng_ttoken;

typedef enum eng_ttag { ENG_TAG_NONE, ENG_TAG_BLOCK, ENG_TAG_OUTPUT, ENG_TAG_COMMENT } eng_ttag; // the last: read over

typedef struct eng_tlexer {
    const char *text;
    size_t length, at;
    uint32_t line;
    bool line_starts;
    eng_ttag tag; // at hand
    int braces;   // open in this tag
    // the token at hand
    eng_ttoken token;
    const char *start;
    size_t size;
    int64_t integer;
} eng_tlexer;

typedef struct eng_tparser {
    eng_tlexer lexer;
    eng_tarena *arena;
    int depth, loops;
    eng_status status;
    eng_error *error;
} eng_tparser;

// Reports "chat template, line N: text" unless there was a fault before.
void eng_tparse_fail(eng_tparser *parser, eng_status code, const char *format, ...) ENG_PRINTF(3, 4);
// The text up to the next tag, and that tag's begin (ENG_TAG_NONE: the end). *data is borrowed from the source.
eng_ttag eng_tlex_data(eng_tparser *parser, const char **data, size_t *length);
void eng_tlex_next(eng_tparser *parser);                         // the next token of the tag at hand
bool eng_tlex_is(const eng_tparser *parser, const char *word);   // a name or an operator
bool eng_tlex_take(eng_tparser *parser, const char *word);       // and over it
void eng_tlex_expect(eng_tparser *parser, const char *operator); // over it, or an error

eng_tnode *eng_tparse_node(eng_tparser *parser, eng_tnode_kind kind); // never NULL: a spare one after a fault
const char *eng_tparse_name(eng_tparser *parser);                     // the name at hand, and over it
eng_tnode *eng_tparse_expression(eng_tparser *parser);
eng_tnode *eng_tparse_disjunction(eng_tparser *parser); // without "if ... else"
eng_tnode *eng_tparse_body(eng_tparser *parser);        // a whole template

// Places in the tables; -1: unknown.
int32_t eng_tfilter_find(const char *name);
int32_t eng_ttest_find(const char *name);
int32_t eng_tfunction_find(const char *name);

// ---- running

typedef struct eng_tbinding {
    const char *name;
    eng_tvalue value;
} eng_tbinding;

typedef struct eng_trun {
    eng_tarena arena;
    eng_tbinding *bindings;
    size_t binding_count, binding_capacity, frame; // the innermost scope begins at frame
    size_t globals, base;                          // a macro sees the bindings below globals and from base on
    int64_t steps;                                 // left
    int depth;
    uint32_t line;
    int64_t time; // of strftime_now
    eng_buffer *text, *given;
    eng_status status;
    eng_error *error;
} eng_trun;

void eng_trun_fail(eng_trun *run, eng_status code, const char *format, ...) ENG_PRINTF(3, 4);
bool eng_trun_spend(eng_trun *run, size_t bytes); // work on so many bytes; false: a fault
void *eng_trun_take(eng_trun *run, size_t size);  // NULL: a fault

typedef struct eng_targs {
    eng_tvalue value[ENG_TEMPLATE_MAX_ARGS];
    const char *name[ENG_TEMPLATE_MAX_ARGS]; // NULL: by its place
    int count;
} eng_targs;
// The argument at a place or of that name; NULL: not given.
const eng_tvalue *eng_targ(const eng_targs *args, int place, const char *name);

eng_tvalue eng_tundefined(const char *missing);
eng_tvalue eng_tnone(void);
eng_tvalue eng_tbool(bool flag);
eng_tvalue eng_tinteger(int64_t integer);
eng_tvalue eng_ttext(const char *text); // the template's own, borrowed
eng_tvalue eng_tstring_value(eng_tstring string);
eng_tvalue eng_tlist_new(eng_trun *run, size_t count);
eng_tvalue eng_tdict_new(eng_trun *run, size_t capacity);
void eng_tdict_put(eng_trun *run, eng_tdict *dict, eng_tstring key, eng_tvalue value);
const eng_tvalue *eng_tdict_get(const eng_tdict *dict, const char *key, size_t length); // NULL: none
bool eng_ttrue(const eng_tvalue *value);
bool eng_tequal(eng_trun *run, const eng_tvalue *a, const eng_tvalue *b);
const char *eng_tkind_name(eng_tkind kind);
bool eng_tis(const eng_tstring *string, const char *text);
uint8_t eng_tmark(const eng_tstring *string, size_t index);
eng_tstring eng_tpart(const eng_tstring *string, size_t begin, size_t end);
// As Python's str(); lists and dictionaries are refused.
eng_tstring eng_tstring_of(eng_trun *run, const eng_tvalue *value);

// Text under construction.
typedef struct eng_tbuild {
    char *bytes;
    uint8_t *marks;
    size_t length, capacity;
} eng_tbuild;
void eng_tbuild_add(eng_trun *run, eng_tbuild *build, const eng_tstring *piece);
void eng_tbuild_put(eng_trun *run, eng_tbuild *build, const char *text, bool given);
eng_tvalue eng_tbuild_end(const eng_tbuild *build);

eng_tvalue eng_tevaluate(eng_trun *run, const eng_tnode *node);
const eng_tvalue *eng_tbound(const eng_trun *run, const char *name);                      // NULL: nothing has the name
eng_tvalue eng_tmacro_call(eng_trun *run, const eng_tnode *macro, const eng_targs *args); // its text
// The elements that a loop would see: of a list, the characters of a text, the keys of a dictionary; undefined: none.
eng_tlist eng_telements(eng_trun *run, const eng_tvalue *value);
eng_tvalue eng_tattribute(eng_trun *run, const eng_tvalue *object, const char *name);
bool eng_tless(eng_trun *run, const eng_tvalue *a, const eng_tvalue *b);
bool eng_tcontains(eng_trun *run, const eng_tvalue *whole, const eng_tvalue *part);
eng_tvalue eng_tfilter_apply(eng_trun *run, int32_t filter, const eng_tvalue *value, const eng_targs *args);
bool eng_ttest_apply(eng_trun *run, int32_t test, const eng_tvalue *value, const eng_targs *args);
eng_tvalue eng_tfunction_call(eng_trun *run, int32_t function, const eng_targs *args);
eng_tvalue eng_tmethod_call(eng_trun *run, const eng_tvalue *object, const char *name, const eng_targs *args);
void eng_tjson(eng_trun *run, const eng_tvalue *value, int64_t indent, int depth, eng_tbuild *out);

#endif
