// SPDX-License-Identifier: Apache-2.0
// Filters, tests and functions of templates, each a row of a table.
//
// A filter is a function of the value in front of it. What transformers adds to Jinja is here as well: raise_exception,
// strftime_now, and a tojson that leaves characters as they are.
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "engine/template_internal.h"

static eng_tvalue refuse(eng_trun *run, const char *what, const eng_tvalue *value) {
    eng_trun_fail(run, ENG_UNSUPPORTED, "%s of %s", what, eng_tkind_name(value->kind));
    return eng_tundefined("");
}

static eng_tvalue method(eng_trun *run, const eng_tvalue *value, const char *name, const eng_targs *args) {
    eng_tvalue text = eng_tstring_value(eng_tstring_of(run, value));
    return run->status == ENG_OK ? eng_tmethod_call(run, &text, name, args) : text;
}

// ---- filters

static eng_tvalue filter_trim(eng_trun *run, const eng_tvalue *value, const eng_targs *args) {
    return method(run, value, "strip", args);
}

static eng_tvalue filter_upper(eng_trun *run, const eng_tvalue *value, const eng_targs *args) {
    return method(run, value, "upper", args);
}

static eng_tvalue filter_lower(eng_trun *run, const eng_tvalue *value, const eng_targs *args) {
    return method(run, value, "lower", args);
}

static eng_tvalue filter_capitalize(eng_trun *run, const eng_tvalue *value, const eng_targs *args) {
    return method(run, value, "capitalize", args);
}

static eng_tvalue filter_replace(eng_trun *run, const eng_tvalue *value, const eng_targs *args) {
    return method(run, value, "replace", args);
}

static eng_tvalue filter_string(eng_trun *run, const eng_tvalue *value, const eng_targs *args) {
    (void)args;
    return eng_tstring_value(eng_tstring_of(run, value));
}

static eng_tvalue filter_length(eng_trun *run, const eng_tvalue *value, const eng_targs *args) {
    (void)args;
    if (value->kind == ENG_T_DICT)
        return eng_tinteger((int64_t)value->dict->count);
    return eng_tinteger((int64_t)eng_telements(run, value).count);
}

static eng_tvalue filter_list(eng_trun *run, const eng_tvalue *value, const eng_targs *args) {
    (void)args;
    eng_tlist elements = eng_telements(run, value);
    eng_tvalue made = eng_tlist_new(run, elements.count);
    if (made.kind == ENG_T_LIST && elements.count > 0)
        memcpy(made.list->items, elements.items, elements.count * sizeof *elements.items);
    return made;
}

static eng_tvalue filter_first(eng_trun *run, const eng_tvalue *value, const eng_targs *args) {
    (void)args;
    eng_tlist elements = eng_telements(run, value);
    return elements.count > 0 ? elements.items[0] : eng_tundefined("of an empty list");
}

static eng_tvalue filter_last(eng_trun *run, const eng_tvalue *value, const eng_targs *args) {
    (void)args;
    eng_tlist elements = eng_telements(run, value);
    return elements.count > 0 ? elements.items[elements.count - 1] : eng_tundefined("of an empty list");
}

static eng_tvalue filter_reverse(eng_trun *run, const eng_tvalue *value, const eng_targs *args) {
    if (value->kind == ENG_T_STRING)
        return refuse(run, "the reverse", value);
    eng_tvalue made = filter_list(run, value, args);
    for (size_t i = 0; made.kind == ENG_T_LIST && i < made.list->count / 2; i++) {
        eng_tvalue kept = made.list->items[i];
        made.list->items[i] = made.list->items[made.list->count - 1 - i];
        made.list->items[made.list->count - 1 - i] = kept;
    }
    return made;
}

static eng_tvalue filter_default(eng_trun *run, const eng_tvalue *value, const eng_targs *args) {
    (void)run;
    const eng_tvalue *other = eng_targ(args, 0, "default_value"), *falsy = eng_targ(args, 1, "boolean");
    bool replace = value->kind == ENG_T_UNDEFINED || (falsy && eng_ttrue(falsy) && !eng_ttrue(value));
    return !replace ? *value : other ? *other : eng_ttext("");
}

static eng_tvalue filter_join(eng_trun *run, const eng_tvalue *value, const eng_targs *args) {
    const eng_tvalue *between = eng_targ(args, 0, "d"), *attribute = eng_targ(args, 1, "attribute");
    eng_tlist elements = eng_telements(run, value);
    eng_tbuild build = {0};
    eng_tstring separator = between ? eng_tstring_of(run, between) : (eng_tstring){.bytes = ""};
    if (attribute)
        return refuse(run, "join by an attribute", value);
    for (size_t i = 0; i < elements.count && run->status == ENG_OK; i++) {
        eng_tstring text = eng_tstring_of(run, &elements.items[i]);
        if (i > 0)
            eng_tbuild_add(run, &build, &separator);
        eng_tbuild_add(run, &build, &text);
    }
    return eng_tbuild_end(&build);
}

static eng_tvalue filter_items(eng_trun *run, const eng_tvalue *value, const eng_targs *args) {
    if (value->kind == ENG_T_UNDEFINED)
        return eng_tlist_new(run, 0);
    return eng_tmethod_call(run, value, "items", args);
}

static eng_tvalue filter_integer(eng_trun *run, const eng_tvalue *value, const eng_targs *args) {
    (void)args;
    if (value->kind == ENG_T_INTEGER || value->kind == ENG_T_BOOL)
        return eng_tinteger(value->integer);
    return refuse(run, "the integer", value);
}

static eng_tvalue filter_json(eng_trun *run, const eng_tvalue *value, const eng_targs *args) {
    const eng_tvalue *indent = eng_targ(args, 0, "indent");
    for (int i = 0; i < args->count; i++) {
        if (args->name[i] && strcmp(args->name[i], "indent") != 0 && strcmp(args->name[i], "ensure_ascii") != 0)
            eng_trun_fail(run, ENG_UNSUPPORTED, "tojson with '%.40s' is not supported", args->name[i]);
    }
    eng_tbuild build = {0};
    eng_tjson(run, value, indent && indent->kind == ENG_T_INTEGER ? indent->integer : -1, 0, &build);
    return eng_tbuild_end(&build);
}

// Those elements whose attribute (or which themselves) pass the test, or fail it.
static eng_tvalue pick(eng_trun *run, const eng_tvalue *value, const eng_targs *args, bool by_attribute, bool wanted) {
    const eng_tvalue *attribute = by_attribute ? eng_targ(args, 0, "") : NULL;
    const eng_tvalue *test = eng_targ(args, by_attribute, "");
    eng_targs rest = {.count = 0};
    for (int i = by_attribute + 1; i < args->count; i++)
        rest.value[rest.count++] = args->value[i];
    // of nothing nothing is chosen
    eng_tlist elements = eng_ttrue(value) ? eng_telements(run, value) : (eng_tlist){NULL, 0};
    eng_tvalue made = eng_tlist_new(run, elements.count);
    int32_t index = -1;
    char name[32] = "";
    if (by_attribute && (!attribute || attribute->kind != ENG_T_STRING || attribute->string.length >= sizeof name))
        return refuse(run, "a choice by an attribute", value);
    if (test && test->kind == ENG_T_STRING && test->string.length < sizeof name) {
        memcpy(name, test->string.bytes, test->string.length);
        index = eng_ttest_find(name);
    }
    if (made.kind != ENG_T_LIST || (test && index < 0))
        return refuse(run, "a choice by an unknown test", value);
    memset(name, 0, sizeof name);
    if (attribute)
        memcpy(name, attribute->string.bytes, attribute->string.length);
    made.list->count = 0;
    for (size_t i = 0; i < elements.count && run->status == ENG_OK; i++) {
        eng_tvalue item = attribute ? eng_tattribute(run, &elements.items[i], name) : elements.items[i];
        bool passes = test ? eng_ttest_apply(run, index, &item, &rest) : eng_ttrue(&item);
        if (passes == wanted)
            made.list->items[made.list->count++] = elements.items[i];
    }
    return made;
}

static eng_tvalue filter_selectattr(eng_trun *run, const eng_tvalue *value, const eng_targs *args) {
    return pick(run, value, args, true, true);
}

static eng_tvalue filter_rejectattr(eng_trun *run, const eng_tvalue *value, const eng_targs *args) {
    return pick(run, value, args, true, false);
}

static eng_tvalue filter_select(eng_trun *run, const eng_tvalue *value, const eng_targs *args) {
    return pick(run, value, args, false, true);
}

static eng_tvalue filter_reject(eng_trun *run, const eng_tvalue *value, const eng_targs *args) {
    return pick(run, value, args, false, false);
}

// By an attribute, or by a filter's name.
static eng_tvalue filter_map(eng_trun *run, const eng_tvalue *value, const eng_targs *args) {
    const eng_tvalue *attribute = eng_targ(args, ENG_TEMPLATE_MAX_ARGS, "attribute"), *filter = eng_targ(args, 0, "");
    const eng_tvalue *given = attribute ? attribute : filter;
    char name[32] = "";
    if (!given || given->kind != ENG_T_STRING || given->string.length >= sizeof name)
        return refuse(run, "a map", value);
    memcpy(name, given->string.bytes, given->string.length);
    int32_t index = attribute ? 0 : eng_tfilter_find(name);
    eng_tlist elements = eng_ttrue(value) ? eng_telements(run, value) : (eng_tlist){NULL, 0};
    eng_tvalue made = eng_tlist_new(run, elements.count);
    if (made.kind != ENG_T_LIST || index < 0)
        return refuse(run, "a map by an unknown filter", value);
    const eng_targs none = {.count = 0};
    for (size_t i = 0; i < elements.count && run->status == ENG_OK; i++) {
        const eng_tvalue *item = &elements.items[i];
        if (run->depth >= ENG_TEMPLATE_MAX_DEPTH)
            return refuse(run, "a map nested too deep", value);
        made.list->items[i] = attribute ? eng_tattribute(run, item, name) : eng_tfilter_apply(run, index, item, &none);
    }
    return made;
}

// Sorts pairs of a key and a value by the key, upper and lower case alike; equal keys keep their order.
static void sort_pairs(eng_trun *run, eng_tvalue *keys, eng_tvalue *values, size_t count) {
    for (size_t i = 1; i < count && run->status == ENG_OK; i++) {
        const eng_tvalue key = keys[i], value = values[i];
        size_t k = i;
        for (; k > 0 && eng_trun_spend(run, 0); k--) {
            if (!eng_tless(run, &key, &keys[k - 1]))
                break;
            keys[k] = keys[k - 1];
            values[k] = values[k - 1];
        }
        keys[k] = key;
        values[k] = value;
    }
}

static eng_tvalue sorted(eng_trun *run, eng_tlist list, const char *attribute) {
    eng_tvalue keys = eng_tlist_new(run, list.count), values = eng_tlist_new(run, list.count);
    const eng_targs none = {.count = 0};
    if (keys.kind != ENG_T_LIST || values.kind != ENG_T_LIST)
        return eng_tundefined("");
    for (size_t i = 0; i < list.count && run->status == ENG_OK; i++) {
        eng_tvalue key = attribute ? eng_tattribute(run, &list.items[i], attribute) : list.items[i];
        keys.list->items[i] = key.kind == ENG_T_STRING ? eng_tmethod_call(run, &key, "lower", &none) : key;
        values.list->items[i] = list.items[i];
    }
    sort_pairs(run, keys.list->items, values.list->items, list.count);
    return values;
}

static eng_tvalue filter_sort(eng_trun *run, const eng_tvalue *value, const eng_targs *args) {
    const eng_tvalue *attribute = eng_targ(args, ENG_TEMPLATE_MAX_ARGS, "attribute");
    char name[32] = "";
    if (args->count > (attribute != NULL) ||
        (attribute && (attribute->kind != ENG_T_STRING || attribute->string.length >= sizeof name)))
        return refuse(run, "this order", value);
    if (attribute)
        memcpy(name, attribute->string.bytes, attribute->string.length);
    return sorted(run, eng_telements(run, value), attribute ? name : NULL);
}

// Pairs of a dictionary by their keys.
static eng_tvalue filter_dictsort(eng_trun *run, const eng_tvalue *value, const eng_targs *args) {
    if (value->kind != ENG_T_DICT || args->count > 0)
        return refuse(run, "this order", value);
    eng_tvalue keys = sorted(run, eng_telements(run, value), NULL);
    for (size_t i = 0; keys.kind == ENG_T_LIST && i < keys.list->count && run->status == ENG_OK; i++) {
        const eng_tstring *key = &keys.list->items[i].string;
        eng_tvalue pair = eng_tlist_new(run, 2);
        if (pair.kind != ENG_T_LIST)
            break;
        pair.list->items[0] = keys.list->items[i];
        pair.list->items[1] = *eng_tdict_get(value->dict, key->bytes, key->length);
        keys.list->items[i] = pair;
    }
    return keys;
}

static eng_tvalue filter_safe(eng_trun *run, const eng_tvalue *value, const eng_targs *args) {
    (void)run;
    (void)args;
    return *value; // nothing is escaped
}

static const struct {
    const char *name;
    eng_tvalue (*apply)(eng_trun *run, const eng_tvalue *value, const eng_targs *args);
} filters[] = {
    {"trim", filter_trim},
    {"upper", filter_upper},
    {"lower", filter_lower},
    {"capitalize", filter_capitalize},
    {"replace", filter_replace},
    {"string", filter_string},
    {"length", filter_length},
    {"count", filter_length},
    {"list", filter_list},
    {"first", filter_first},
    {"last", filter_last},
    {"reverse", filter_reverse},
    {"default", filter_default},
    {"d", filter_default},
    {"join", filter_join},
    {"items", filter_items},
    {"int", filter_integer},
    {"tojson", filter_json},
    {"selectattr", filter_selectattr},
    {"rejectattr", filter_rejectattr},
    {"select", filter_select},
    {"reject", filter_reject},
    {"map", filter_map},
    {"safe", filter_safe},
    {"sort", filter_sort},
    {"dictsort", filter_dictsort},
};

int32_t eng_tfilter_find(const char *name) {
    for (size_t i = 0; i < sizeof filters / sizeof *filters; i++) {
        if (strcmp(filters[i].name, name) == 0)
            return (int32_t)i;
    }
    return -1;
}

eng_tvalue eng_tfilter_apply(eng_trun *run, int32_t filter, const eng_tvalue *value, const eng_targs *args) {
    eng_tvalue result = filters[filter].apply(run, value, args);
    return run->status == ENG_OK ? result : eng_tundefined("");
}

// ---- tests

typedef enum test {
    TEST_DEFINED,
    TEST_UNDEFINED,
    TEST_NONE,
    TEST_BOOLEAN,
    TEST_TRUE,
    TEST_FALSE,
    TEST_NUMBER,
    TEST_STRING,
    TEST_MAPPING,
    TEST_ITERABLE,
    TEST_SEQUENCE,
    TEST_EVEN,
    TEST_ODD,
    TEST_EQUAL,
    TEST_UNEQUAL,
    TEST_IN,
} test;

static const struct {
    const char *name;
    test test;
} tests[] = {
    {"defined", TEST_DEFINED},
    {"undefined", TEST_UNDEFINED},
    {"none", TEST_NONE},
    {"boolean", TEST_BOOLEAN},
    {"true", TEST_TRUE},
    {"false", TEST_FALSE},
    {"number", TEST_NUMBER},
    {"integer", TEST_NUMBER},
    {"string", TEST_STRING},
    {"mapping", TEST_MAPPING},
    {"iterable", TEST_ITERABLE},
    {"sequence", TEST_SEQUENCE},
    {"even", TEST_EVEN},
    {"odd", TEST_ODD},
    {"equalto", TEST_EQUAL},
    {"eq", TEST_EQUAL},
    {"sameas", TEST_EQUAL},
    {"ne", TEST_UNEQUAL},
    {"in", TEST_IN},
};

int32_t eng_ttest_find(const char *name) {
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++) {
        if (strcmp(tests[i].name, name) == 0)
            return (int32_t)i;
    }
    return -1;
}

static bool has_elements(eng_tkind kind) {
    return kind == ENG_T_STRING || kind == ENG_T_LIST || kind == ENG_T_DICT;
}

static bool test_pair(eng_trun *run, test kind, const eng_tvalue *value, const eng_targs *args) {
    if (args->count != 1) {
        eng_trun_fail(run, ENG_UNSUPPORTED, "a test without the one value that it compares with");
        return false;
    }
    if (kind == TEST_IN)
        return eng_tcontains(run, &args->value[0], value);
    return eng_tequal(run, value, &args->value[0]) == (kind == TEST_EQUAL);
}

static bool test_parity(eng_trun *run, test kind, const eng_tvalue *value) {
    if (value->kind != ENG_T_INTEGER) {
        refuse(run, "the parity", value);
        return false;
    }
    return (value->integer % 2 != 0) == (kind == TEST_ODD);
}

bool eng_ttest_apply(eng_trun *run, int32_t index, const eng_tvalue *value, const eng_targs *args) {
    const test kind = tests[index].test;
    switch (kind) {
    case TEST_DEFINED:
        return value->kind != ENG_T_UNDEFINED;
    case TEST_UNDEFINED:
        return value->kind == ENG_T_UNDEFINED;
    case TEST_NONE:
        return value->kind == ENG_T_NONE;
    case TEST_BOOLEAN:
        return value->kind == ENG_T_BOOL;
    case TEST_TRUE:
        return value->kind == ENG_T_BOOL && value->integer;
    case TEST_FALSE:
        return value->kind == ENG_T_BOOL && !value->integer;
    case TEST_NUMBER:
        return value->kind == ENG_T_INTEGER || (value->kind == ENG_T_BOOL && strcmp(tests[index].name, "number") == 0);
    case TEST_STRING:
        return value->kind == ENG_T_STRING;
    case TEST_MAPPING:
        return value->kind == ENG_T_DICT && !value->dict->is_namespace;
    case TEST_ITERABLE:
        return has_elements(value->kind) || value->kind == ENG_T_UNDEFINED;
    case TEST_SEQUENCE:
        return has_elements(value->kind);
    case TEST_EVEN:
    case TEST_ODD:
        return test_parity(run, kind, value);
    default:
        return test_pair(run, kind, value, args);
    }
}

// ---- functions

static eng_tvalue call_raise(eng_trun *run, const eng_targs *args) {
    eng_tstring text = args->count > 0 ? eng_tstring_of(run, &args->value[0]) : (eng_tstring){.bytes = ""};
    if (run->status == ENG_OK)
        run->status = eng_fail(run->error, ENG_INVALID, "the chat template refuses the messages: %.*s",
                               (int)(text.length < 160 ? text.length : 160), text.bytes);
    return eng_tundefined("");
}

static eng_tvalue call_namespace(eng_trun *run, const eng_targs *args) {
    eng_tvalue made = eng_tdict_new(run, 4);
    if (made.kind != ENG_T_DICT)
        return made;
    made.dict->is_namespace = true;
    for (int i = 0; i < args->count; i++) {
        if (args->name[i])
            eng_tdict_put(run, made.dict, eng_ttext(args->name[i]).string, args->value[i]);
        else
            eng_trun_fail(run, ENG_UNSUPPORTED, "a namespace of a value without a name");
    }
    return made;
}

static eng_tvalue call_range(eng_trun *run, const eng_targs *args) {
    int64_t bounds[3] = {0, 0, 1};
    for (int i = 0; i < args->count && i < 3; i++) {
        if (args->value[i].kind != ENG_T_INTEGER)
            return refuse(run, "a range", &args->value[i]);
        bounds[args->count == 1 ? 1 : i] = args->value[i].integer;
    }
    int64_t begin = bounds[0], end = bounds[1], step = bounds[2], span;
    if (args->count < 1 || args->count > 3 || step == 0 || step == INT64_MIN ||
        __builtin_sub_overflow(end, begin, &span)) {
        eng_trun_fail(run, ENG_UNSUPPORTED, "a range without bounds");
        return eng_tundefined("");
    }
    int64_t count = step > 0 ? (span > 0 ? (span - 1) / step + 1 : 0) : (span < 0 ? (-(span + 1)) / -step + 1 : 0);
    eng_tvalue made = eng_tlist_new(run, (size_t)count);
    for (int64_t i = 0; made.kind == ENG_T_LIST && i < count; i++)
        made.list->items[i] = eng_tinteger(begin + i * step);
    return made;
}

static eng_tvalue call_time(eng_trun *run, const eng_targs *args) {
    enum { SIZE = 128 };
    char format[SIZE] = "", *text = eng_trun_take(run, SIZE);
    time_t now = (time_t)run->time;
    struct tm parts;
    if (args->count != 1 || args->value[0].kind != ENG_T_STRING || args->value[0].string.length >= SIZE)
        eng_trun_fail(run, ENG_UNSUPPORTED, "strftime_now takes a short text");
    if (run->status != ENG_OK || !localtime_r(&now, &parts))
        return eng_tundefined("");
    memcpy(format, args->value[0].string.bytes, args->value[0].string.length);
    text[strftime(text, SIZE, format, &parts)] = 0;
    return eng_ttext(text);
}

static const struct {
    const char *name;
    eng_tvalue (*call)(eng_trun *run, const eng_targs *args);
} functions[] = {
    {"raise_exception", call_raise},
    {"namespace", call_namespace},
    {"range", call_range},
    {"strftime_now", call_time},
};

int32_t eng_tfunction_find(const char *name) {
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        if (strcmp(functions[i].name, name) == 0)
            return (int32_t)i;
    }
    return -1;
}

eng_tvalue eng_tfunction_call(eng_trun *run, int32_t function, const eng_targs *args) {
    eng_tvalue result = functions[function].call(run, args);
    return run->status == ENG_OK ? result : eng_tundefined("");
}
