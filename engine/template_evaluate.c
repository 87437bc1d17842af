// SPDX-License-Identifier: Apache-2.0
// Expressions of templates evaluated.
//
// Meanings are Python's where Jinja leaves them to Python: "and" gives one of its sides, a negative index counts from
// the end, what is missing is undefined until somebody needs it. Texts are indexed by character.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE // memmem
#endif
#include <string.h>

#include "engine/template_internal.h"
#include "engine/utf8.h"

// ---- names and parts of values

const eng_tvalue *eng_tbound(const eng_trun *run, const char *name) {
    for (size_t i = run->binding_count; i > 0; i--) {
        if (i == run->base && i > run->globals) // between them lies what a macro's caller has
            i = run->globals;
        if (strcmp(run->bindings[i - 1].name, name) == 0)
            return &run->bindings[i - 1].value;
    }
    return NULL;
}

static eng_tvalue find_name(const eng_trun *run, const char *name) {
    const eng_tvalue *found = eng_tbound(run, name);
    int32_t function = found ? -1 : eng_tfunction_find(name);
    if (found)
        return *found;
    return function >= 0 ? (eng_tvalue){.kind = ENG_T_FUNCTION, .integer = function} : eng_tundefined(name);
}

eng_tvalue eng_tattribute(eng_trun *run, const eng_tvalue *object, const char *name) {
    if (object->kind == ENG_T_UNDEFINED)
        eng_trun_fail(run, ENG_UNSUPPORTED, "'%.60s' is undefined, so it has no '%.40s'", object->missing, name);
    const eng_tvalue *found = object->kind == ENG_T_DICT ? eng_tdict_get(object->dict, name, strlen(name)) : NULL;
    return found ? *found : eng_tundefined(name);
}

// Bytes of the character that begins at a place of a valid text.
static size_t character_at(const eng_tstring *text, size_t place) {
    uint32_t code;
    size_t size = eng_utf8_decode(text->bytes + place, text->length - place, &code);
    return size ? size : 1;
}

static size_t count_characters(eng_trun *run, const eng_tstring *text) {
    size_t count = 0;
    if (eng_trun_spend(run, text->length)) {
        for (size_t at = 0; at < text->length; at += character_at(text, at))
            count++;
    }
    return count;
}

static size_t place_of(const eng_tstring *text, size_t index) {
    size_t at = 0;
    for (; index > 0 && at < text->length; index--)
        at += character_at(text, at);
    return at;
}

eng_tlist eng_telements(eng_trun *run, const eng_tvalue *value) {
    eng_tlist none = {NULL, 0};
    if (value->kind == ENG_T_LIST)
        return *value->list;
    if (value->kind == ENG_T_UNDEFINED)
        return none;
    if (value->kind != ENG_T_STRING && value->kind != ENG_T_DICT) {
        eng_trun_fail(run, ENG_UNSUPPORTED, "%s has no elements", eng_tkind_name(value->kind));
        return none;
    }
    size_t count = value->kind == ENG_T_DICT ? value->dict->count : count_characters(run, &value->string);
    eng_tvalue made = eng_tlist_new(run, count);
    if (made.kind != ENG_T_LIST)
        return none;
    for (size_t i = 0, at = 0; i < count; i++) {
        eng_tstring item = {0};
        if (value->kind == ENG_T_DICT) {
            item = value->dict->entries[i].key;
        } else {
            size_t size = character_at(&value->string, at);
            item = eng_tpart(&value->string, at, at + size);
            at += size;
        }
        made.list->items[i] = eng_tstring_value(item);
    }
    return *made.list;
}

static eng_tvalue subscript(eng_trun *run, const eng_tvalue *object, const eng_tvalue *index) {
    if (object->kind == ENG_T_DICT && index->kind == ENG_T_STRING) {
        const eng_tvalue *found = eng_tdict_get(object->dict, index->string.bytes, index->string.length);
        return found ? *found : eng_tundefined("of a dictionary");
    }
    if (object->kind == ENG_T_UNDEFINED)
        eng_trun_fail(run, ENG_UNSUPPORTED, "'%.60s' is undefined, so it has no parts", object->missing);
    if ((object->kind != ENG_T_LIST && object->kind != ENG_T_STRING) || index->kind != ENG_T_INTEGER)
        return eng_tundefined("of a value");
    int64_t count =
        object->kind == ENG_T_LIST ? (int64_t)object->list->count : (int64_t)count_characters(run, &object->string);
    int64_t place = index->integer < 0 ? index->integer + count : index->integer;
    if (place < 0 || place >= count)
        return eng_tundefined("of a list");
    if (object->kind == ENG_T_LIST)
        return object->list->items[place];
    size_t begin = place_of(&object->string, (size_t)place);
    return eng_tstring_value(eng_tpart(&object->string, begin, begin + character_at(&object->string, begin)));
}

// ---- slices

// A bound as Python has it, within 0 .. count, or -1 .. count - 1 backwards.
static int64_t bound(eng_trun *run, const eng_tnode *node, int64_t fallback, int64_t count, bool backwards) {
    eng_tvalue value = node ? eng_tevaluate(run, node) : eng_tnone();
    if (value.kind == ENG_T_NONE)
        return fallback;
    if (value.kind != ENG_T_INTEGER) {
        eng_trun_fail(run, ENG_UNSUPPORTED, "%s as a bound of a slice", eng_tkind_name(value.kind));
        return fallback;
    }
    int64_t least = backwards ? -1 : 0, most = backwards ? count - 1 : count, place = value.integer;
    if (place < 0)
        place += count;
    return place < least ? least : place > most ? most : place;
}

static eng_tvalue slice(eng_trun *run, const eng_tvalue *object, const eng_tnode *node) {
    if (object->kind != ENG_T_LIST && object->kind != ENG_T_STRING) {
        eng_trun_fail(run, ENG_UNSUPPORTED, "a slice of %s", eng_tkind_name(object->kind));
        return eng_tundefined("");
    }
    const bool text = object->kind == ENG_T_STRING;
    int64_t count = text ? (int64_t)count_characters(run, &object->string) : (int64_t)object->list->count;
    eng_tvalue by = node->d ? eng_tevaluate(run, node->d) : eng_tinteger(1);
    int64_t step = by.kind == ENG_T_INTEGER ? by.integer : by.kind == ENG_T_NONE ? 1 : 0;
    if (step == 0 || step < -count - 1 || (text && step != 1)) {
        eng_trun_fail(run, ENG_UNSUPPORTED, "a slice with this step");
        return eng_tundefined("");
    }
    int64_t begin = bound(run, node->b, step < 0 ? count - 1 : 0, count, step < 0);
    int64_t end = bound(run, node->c, step < 0 ? -1 : count, count, step < 0);
    if (text) {
        if (end <= begin)
            return eng_ttext("");
        size_t from = place_of(&object->string, (size_t)begin), to = place_of(&object->string, (size_t)end);
        return eng_tstring_value(eng_tpart(&object->string, from, to));
    }
    int64_t wanted =
        step > 0 ? (end > begin ? (end - begin - 1) / step + 1 : 0) : (begin > end ? (begin - end - 1) / -step + 1 : 0);
    eng_tvalue made = eng_tlist_new(run, (size_t)wanted);
    for (int64_t i = 0; made.kind == ENG_T_LIST && i < wanted; i++)
        made.list->items[i] = object->list->items[begin + i * step];
    return made;
}

// ---- operators

static bool find_text(eng_trun *run, const eng_tstring *whole, const eng_tstring *part) {
    if (part->length == 0)
        return true;
    return eng_trun_spend(run, whole->length) && memmem(whole->bytes, whole->length, part->bytes, part->length);
}

bool eng_tcontains(eng_trun *run, const eng_tvalue *whole, const eng_tvalue *part) {
    if (whole->kind == ENG_T_STRING && part->kind == ENG_T_STRING)
        return find_text(run, &whole->string, &part->string);
    if (whole->kind == ENG_T_DICT)
        return part->kind == ENG_T_STRING && eng_tdict_get(whole->dict, part->string.bytes, part->string.length);
    if (whole->kind == ENG_T_STRING) {
        eng_trun_fail(run, ENG_UNSUPPORTED, "%s in a text", eng_tkind_name(part->kind));
        return false;
    }
    eng_tlist list = eng_telements(run, whole);
    for (size_t i = 0; i < list.count; i++) {
        if (eng_tequal(run, &list.items[i], part))
            return true;
    }
    return false;
}

static int order_texts(const eng_tstring *a, const eng_tstring *b) {
    size_t common = a->length < b->length ? a->length : b->length;
    int order = common ? memcmp(a->bytes, b->bytes, common) : 0;
    return order ? order : (a->length > b->length) - (a->length < b->length);
}

static bool compare(eng_trun *run, eng_top op, const eng_tvalue *a, const eng_tvalue *b) {
    if (op == ENG_OP_EQUAL || op == ENG_OP_UNEQUAL)
        return eng_tequal(run, a, b) == (op == ENG_OP_EQUAL);
    if (op == ENG_OP_IN || op == ENG_OP_NOT_IN)
        return eng_tcontains(run, b, a) == (op == ENG_OP_IN);
    bool numbers =
        (a->kind == ENG_T_INTEGER || a->kind == ENG_T_BOOL) && (b->kind == ENG_T_INTEGER || b->kind == ENG_T_BOOL);
    int order = 0;
    if (numbers)
        order = (a->integer > b->integer) - (a->integer < b->integer);
    else if (a->kind == ENG_T_STRING && b->kind == ENG_T_STRING)
        order = order_texts(&a->string, &b->string);
    else
        eng_trun_fail(run, ENG_UNSUPPORTED, "the order of %s and %s", eng_tkind_name(a->kind), eng_tkind_name(b->kind));
    switch (op) {
    case ENG_OP_LESS:
        return order < 0;
    case ENG_OP_AT_MOST:
        return order <= 0;
    case ENG_OP_GREATER:
        return order > 0;
    default:
        return order >= 0;
    }
}

bool eng_tless(eng_trun *run, const eng_tvalue *a, const eng_tvalue *b) {
    return compare(run, ENG_OP_LESS, a, b);
}

static eng_tvalue compare_chain(eng_trun *run, const eng_tnode *node) {
    eng_tvalue left = eng_tevaluate(run, node->a);
    for (const eng_tnode *link = node->first; link; link = link->next) {
        eng_tvalue right = eng_tevaluate(run, link->a);
        if (run->status != ENG_OK || !compare(run, link->op, &left, &right))
            return eng_tbool(false);
        left = right;
    }
    return eng_tbool(true);
}

static eng_tvalue add_lists(eng_trun *run, const eng_tlist *a, const eng_tlist *b) {
    eng_tvalue sum = eng_tlist_new(run, a->count + b->count);
    if (sum.kind != ENG_T_LIST)
        return sum;
    if (a->count > 0)
        memcpy(sum.list->items, a->items, a->count * sizeof *a->items);
    if (b->count > 0)
        memcpy(sum.list->items + a->count, b->items, b->count * sizeof *b->items);
    return sum;
}

static eng_tvalue join_texts(eng_trun *run, const eng_tstring *a, const eng_tstring *b) {
    if (a->length == 0 || b->length == 0)
        return eng_tstring_value(a->length ? *a : *b);
    eng_tbuild build = {0};
    eng_tbuild_add(run, &build, a);
    eng_tbuild_add(run, &build, b);
    return eng_tbuild_end(&build);
}

// Python's: the quotient is rounded down, the remainder has the divisor's sign.
static int64_t floor_divide(int64_t a, int64_t b, bool remainder) {
    int64_t quotient = a / b, rest = a % b;
    bool down = rest != 0 && (rest < 0) != (b < 0);
    return remainder ? rest + (down ? b : 0) : quotient - down;
}

static eng_tvalue calculate(eng_trun *run, eng_top op, int64_t a, int64_t b) {
    int64_t result = 0;
    bool fits = true;
    if (op == ENG_OP_ADD)
        fits = !__builtin_add_overflow(a, b, &result);
    else if (op == ENG_OP_SUBTRACT)
        fits = !__builtin_sub_overflow(a, b, &result);
    else if (op == ENG_OP_MULTIPLY)
        fits = !__builtin_mul_overflow(a, b, &result);
    else if (b == 0 || (a == INT64_MIN && b == -1))
        fits = false;
    else
        result = floor_divide(a, b, op == ENG_OP_MODULO);
    if (!fits)
        eng_trun_fail(run, ENG_UNSUPPORTED, "a number beyond 2^63, or a division by 0");
    return eng_tinteger(result);
}

static eng_tvalue binary(eng_trun *run, const eng_tnode *node) {
    eng_tvalue a = eng_tevaluate(run, node->a), b = eng_tevaluate(run, node->b);
    if (run->status != ENG_OK)
        return eng_tundefined("");
    if (node->op == ENG_OP_JOIN) {
        eng_tstring left = eng_tstring_of(run, &a), right = eng_tstring_of(run, &b);
        return join_texts(run, &left, &right);
    }
    if (node->op == ENG_OP_ADD && a.kind == ENG_T_STRING && b.kind == ENG_T_STRING)
        return join_texts(run, &a.string, &b.string);
    if (node->op == ENG_OP_ADD && a.kind == ENG_T_LIST && b.kind == ENG_T_LIST)
        return add_lists(run, a.list, b.list);
    bool numbers =
        (a.kind == ENG_T_INTEGER || a.kind == ENG_T_BOOL) && (b.kind == ENG_T_INTEGER || b.kind == ENG_T_BOOL);
    if (numbers)
        return calculate(run, node->op, a.integer, b.integer);
    const char *missing = a.kind == ENG_T_UNDEFINED ? a.missing : b.kind == ENG_T_UNDEFINED ? b.missing : NULL;
    if (missing)
        eng_trun_fail(run, ENG_UNSUPPORTED, "'%.60s' is undefined", missing);
    eng_trun_fail(run, ENG_UNSUPPORTED, "an operation on %s and %s", eng_tkind_name(a.kind), eng_tkind_name(b.kind));
    return eng_tundefined("");
}

static eng_tvalue negate(eng_trun *run, const eng_tnode *node) {
    eng_tvalue value = eng_tevaluate(run, node->a);
    if (value.kind == ENG_T_INTEGER)
        return calculate(run, ENG_OP_SUBTRACT, 0, value.integer);
    eng_trun_fail(run, ENG_UNSUPPORTED, "the negative of %s", eng_tkind_name(value.kind));
    return value;
}

// ---- calls

static eng_targs arguments(eng_trun *run, const eng_tnode *first) {
    eng_targs args = {.count = 0};
    for (; first && args.count < ENG_TEMPLATE_MAX_ARGS; first = first->next) {
        args.name[args.count] = first->name;
        args.value[args.count++] = eng_tevaluate(run, first->a);
    }
    return args;
}

static eng_tvalue call(eng_trun *run, const eng_tnode *node) {
    const eng_tnode *callee = node->a;
    if (callee->kind == ENG_N_ATTRIBUTE) {
        eng_tvalue object = eng_tevaluate(run, callee->a);
        eng_targs args = arguments(run, node->first);
        return run->status == ENG_OK ? eng_tmethod_call(run, &object, callee->name, &args) : eng_tundefined("");
    }
    eng_tvalue function = eng_tevaluate(run, callee);
    eng_targs args = arguments(run, node->first);
    if (function.kind == ENG_T_FUNCTION && run->status == ENG_OK)
        return eng_tfunction_call(run, (int32_t)function.integer, &args);
    if (function.kind == ENG_T_MACRO && run->status == ENG_OK)
        return eng_tmacro_call(run, function.macro, &args);
    if (function.kind == ENG_T_UNDEFINED)
        eng_trun_fail(run, ENG_UNSUPPORTED, "the function '%.60s' is not supported", function.missing);
    eng_trun_fail(run, ENG_UNSUPPORTED, "%s is called", eng_tkind_name(function.kind));
    return eng_tundefined("");
}

// ---- nodes

static eng_tvalue make_list(eng_trun *run, const eng_tnode *node) {
    size_t count = 0;
    for (const eng_tnode *item = node->first; item; item = item->next)
        count++;
    eng_tvalue made = eng_tlist_new(run, count);
    size_t i = 0;
    for (const eng_tnode *item = node->first; item && made.kind == ENG_T_LIST; item = item->next)
        made.list->items[i++] = eng_tevaluate(run, item);
    return made;
}

static eng_tvalue make_dict(eng_trun *run, const eng_tnode *node) {
    eng_tvalue made = eng_tdict_new(run, 4);
    for (const eng_tnode *item = node->first; item && run->status == ENG_OK; item = item->next->next) {
        eng_tvalue key = eng_tevaluate(run, item), value = eng_tevaluate(run, item->next);
        if (key.kind != ENG_T_STRING)
            eng_trun_fail(run, ENG_UNSUPPORTED, "%s as a key", eng_tkind_name(key.kind));
        if (run->status == ENG_OK)
            eng_tdict_put(run, made.dict, key.string, value);
    }
    return made;
}

static eng_tvalue filter_or_test(eng_trun *run, const eng_tnode *node) {
    eng_tvalue value = eng_tevaluate(run, node->a);
    eng_targs args = arguments(run, node->first);
    if (run->status != ENG_OK)
        return eng_tundefined("");
    if (node->kind == ENG_N_FILTER)
        return eng_tfilter_apply(run, node->index, &value, &args);
    return eng_tbool(eng_ttest_apply(run, node->index, &value, &args));
}

static eng_tvalue part_of(eng_trun *run, const eng_tnode *node) {
    eng_tvalue object = eng_tevaluate(run, node->a);
    if (run->status != ENG_OK)
        return object;
    if (node->kind == ENG_N_ATTRIBUTE)
        return eng_tattribute(run, &object, node->name);
    if (node->kind == ENG_N_SLICE)
        return slice(run, &object, node);
    eng_tvalue index = eng_tevaluate(run, node->b);
    return run->status == ENG_OK ? subscript(run, &object, &index) : index;
}

static eng_tvalue choose(eng_trun *run, const eng_tnode *node) {
    eng_tvalue first = eng_tevaluate(run, node->a);
    bool holds = eng_ttrue(&first);
    if (node->kind == ENG_N_NOT)
        return eng_tbool(!holds);
    if (node->kind == ENG_N_AND)
        return holds ? eng_tevaluate(run, node->b) : first;
    if (node->kind == ENG_N_OR)
        return holds ? first : eng_tevaluate(run, node->b);
    if (holds)
        return eng_tevaluate(run, node->b);
    return node->c ? eng_tevaluate(run, node->c) : eng_tundefined("without else");
}

static eng_tvalue evaluate(eng_trun *run, const eng_tnode *node) {
    switch (node->kind) {
    case ENG_N_CONSTANT:
        return node->value;
    case ENG_N_NAME:
        return find_name(run, node->name);
    case ENG_N_ATTRIBUTE:
    case ENG_N_SUBSCRIPT:
    case ENG_N_SLICE:
        return part_of(run, node);
    case ENG_N_CALL:
        return call(run, node);
    case ENG_N_FILTER:
    case ENG_N_TEST:
        return filter_or_test(run, node);
    case ENG_N_NOT:
    case ENG_N_AND:
    case ENG_N_OR:
    case ENG_N_CONDITIONAL:
        return choose(run, node);
    case ENG_N_NEGATE:
        return negate(run, node);
    case ENG_N_COMPARE:
        return compare_chain(run, node);
    case ENG_N_BINARY:
        return binary(run, node);
    case ENG_N_LIST:
        return make_list(run, node);
    case ENG_N_DICT:
        return make_dict(run, node);
    default:
        eng_trun_fail(run, ENG_INTERNAL, "a statement where a value should be");
        return eng_tundefined("");
    }
}

eng_tvalue eng_tevaluate(eng_trun *run, const eng_tnode *node) {
    eng_tvalue value = eng_tundefined("");
    if (!eng_trun_spend(run, 0))
        return value;
    run->line = node->line;
    if (run->depth >= ENG_TEMPLATE_MAX_DEPTH) {
        eng_trun_fail(run, ENG_UNSUPPORTED, "nested deeper than %d", ENG_TEMPLATE_MAX_DEPTH);
        return value;
    }
    run->depth++;
    value = evaluate(run, node);
    run->depth--;
    return run->status == ENG_OK ? value : eng_tundefined("");
}
