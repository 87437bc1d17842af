// SPDX-License-Identifier: Apache-2.0
// Memory and values of templates.
//
// An arena hands out zeroed memory up to its limit and gives all of it back at once; nothing is freed before. A string
// knows of each byte whether it came from a message: as one flag while that is the same for all of it, as a mark a byte
// otherwise.
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/template_internal.h"

// ---- memory

enum { BLOCK_BYTES = 1 << 14, ALIGNMENT = 16 };

struct eng_tarena_block {
    eng_tarena_block *next;
    size_t used, size;
    _Alignas(ALIGNMENT) unsigned char bytes[];
};

void *eng_tarena_take(eng_tarena *arena, size_t size) {
    if (size > arena->limit - arena->used)
        return NULL;
    size = (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    eng_tarena_block *block = arena->blocks;
    if (!block || size > block->size - block->used) {
        size_t room = size > BLOCK_BYTES ? size : BLOCK_BYTES;
        block = calloc(1, sizeof *block + room);
        if (!block)
            return NULL;
        block->size = room;
        block->next = arena->blocks;
        arena->blocks = block;
    }
    void *taken = block->bytes + block->used;
    block->used += size;
    arena->used += size < arena->limit - arena->used ? size : arena->limit - arena->used;
    return taken;
}

void eng_tarena_free(eng_tarena *arena) {
    while (arena->blocks) {
        eng_tarena_block *next = arena->blocks->next;
        free(arena->blocks);
        arena->blocks = next;
    }
    arena->used = 0;
}

// ---- a run

void eng_trun_fail(eng_trun *run, eng_status code, const char *format, ...) {
    char fault[160];
    va_list arguments;
    if (run->status != ENG_OK)
        return;
    va_start(arguments, format);
    vsnprintf(fault, sizeof fault, format, arguments);
    va_end(arguments);
    run->status = eng_fail(run->error, code, "chat template, line %u: %s", (unsigned)run->line, fault);
}

enum { BYTES_A_STEP = 64 };

bool eng_trun_spend(eng_trun *run, size_t bytes) {
    run->steps -= 1 + (int64_t)(bytes / BYTES_A_STEP);
    if (run->steps < 0)
        eng_trun_fail(run, ENG_TOO_LONG, "more steps than a chat template may take");
    return run->status == ENG_OK;
}

void *eng_trun_take(eng_trun *run, size_t size) {
    void *taken = run->status == ENG_OK && eng_trun_spend(run, size) ? eng_tarena_take(&run->arena, size) : NULL;
    if (!taken)
        eng_trun_fail(run, ENG_TOO_LONG, "more memory than a chat template may use");
    return taken;
}

const eng_tvalue *eng_targ(const eng_targs *args, int place, const char *name) {
    int unnamed = 0;
    for (int i = 0; i < args->count; i++) {
        if (args->name[i] ? strcmp(args->name[i], name) == 0 : unnamed++ == place)
            return &args->value[i];
    }
    return NULL;
}

// ---- making values

eng_tvalue eng_tundefined(const char *missing) {
    return (eng_tvalue){.kind = ENG_T_UNDEFINED, .missing = missing};
}

eng_tvalue eng_tnone(void) {
    return (eng_tvalue){.kind = ENG_T_NONE};
}

eng_tvalue eng_tbool(bool flag) {
    return (eng_tvalue){.kind = ENG_T_BOOL, .integer = flag};
}

eng_tvalue eng_tinteger(int64_t integer) {
    return (eng_tvalue){.kind = ENG_T_INTEGER, .integer = integer};
}

eng_tvalue eng_tstring_value(eng_tstring string) {
    return (eng_tvalue){.kind = ENG_T_STRING, .string = string};
}

eng_tvalue eng_ttext(const char *text) {
    return eng_tstring_value((eng_tstring){.bytes = text, .length = strlen(text)});
}

eng_tvalue eng_tlist_new(eng_trun *run, size_t count) {
    eng_tlist *list = eng_trun_take(run, sizeof *list);
    eng_tvalue *items = count <= SIZE_MAX / sizeof *items ? eng_trun_take(run, count * sizeof *items) : NULL;
    if (!list || !items)
        return eng_tundefined("");
    *list = (eng_tlist){items, count};
    return (eng_tvalue){.kind = ENG_T_LIST, .list = list};
}

eng_tvalue eng_tdict_new(eng_trun *run, size_t capacity) {
    eng_tdict *dict = eng_trun_take(run, sizeof *dict);
    eng_tentry *entries = eng_trun_take(run, (capacity + 1) * sizeof *entries);
    if (!dict || !entries)
        return eng_tundefined("");
    *dict = (eng_tdict){.entries = entries, .capacity = capacity + 1};
    return (eng_tvalue){.kind = ENG_T_DICT, .dict = dict};
}

static eng_tvalue *find(const eng_tdict *dict, const char *key, size_t length) {
    for (size_t i = 0; i < dict->count; i++) {
        eng_tentry *entry = &dict->entries[i];
        if (entry->key.length == length && memcmp(entry->key.bytes, key, length) == 0)
            return &entry->value;
    }
    return NULL;
}

const eng_tvalue *eng_tdict_get(const eng_tdict *dict, const char *key, size_t length) {
    return find(dict, key, length);
}

void eng_tdict_put(eng_trun *run, eng_tdict *dict, eng_tstring key, eng_tvalue value) {
    eng_tvalue *found = find(dict, key.bytes, key.length);
    if (found) {
        *found = value;
        return;
    }
    if (dict->count == dict->capacity) {
        eng_tentry *longer = eng_trun_take(run, 2 * dict->capacity * sizeof *longer);
        if (!longer)
            return;
        memcpy(longer, dict->entries, dict->count * sizeof *longer);
        dict->entries = longer;
        dict->capacity *= 2;
    }
    dict->entries[dict->count++] = (eng_tentry){key, value};
}

// ---- looking at values

const char *eng_tkind_name(eng_tkind kind) {
    static const char *const names[] = {
        [ENG_T_UNDEFINED] = "an undefined value",
        [ENG_T_NONE] = "none",
        [ENG_T_BOOL] = "a boolean",
        [ENG_T_INTEGER] = "an integer",
        [ENG_T_STRING] = "a text",
        [ENG_T_LIST] = "a list",
        [ENG_T_DICT] = "a dictionary",
        [ENG_T_FUNCTION] = "a function",
        [ENG_T_MACRO] = "a macro",
    };
    return names[kind];
}

bool eng_ttrue(const eng_tvalue *value) {
    switch (value->kind) {
    case ENG_T_UNDEFINED:
    case ENG_T_NONE:
        return false;
    case ENG_T_BOOL:
    case ENG_T_INTEGER:
        return value->integer != 0;
    case ENG_T_STRING:
        return value->string.length > 0;
    case ENG_T_LIST:
        return value->list->count > 0;
    case ENG_T_DICT:
        return value->dict->is_namespace || value->dict->count > 0;
    case ENG_T_FUNCTION:
    case ENG_T_MACRO:
        break;
    }
    return true;
}

static bool is_number(const eng_tvalue *value) {
    return value->kind == ENG_T_BOOL || value->kind == ENG_T_INTEGER;
}

static bool equal_lists(eng_trun *run, const eng_tlist *a, const eng_tlist *b) {
    bool same = a->count == b->count;
    for (size_t i = 0; i < a->count && same; i++)
        same = eng_tequal(run, &a->items[i], &b->items[i]);
    return same;
}

static bool equal_dicts(eng_trun *run, const eng_tdict *a, const eng_tdict *b) {
    bool same = a->count == b->count;
    for (size_t i = 0; i < a->count && same; i++) {
        const eng_tentry *entry = &a->entries[i];
        const eng_tvalue *other = eng_tdict_get(b, entry->key.bytes, entry->key.length);
        same = other && eng_tequal(run, &entry->value, other);
    }
    return same;
}

bool eng_tequal(eng_trun *run, const eng_tvalue *a, const eng_tvalue *b) {
    if (!eng_trun_spend(run, 0))
        return false;
    if (is_number(a) && is_number(b)) // True equals 1
        return a->integer == b->integer;
    if (a->kind != b->kind)
        return false;
    switch (a->kind) {
    case ENG_T_STRING:
        return a->string.length == b->string.length && eng_trun_spend(run, a->string.length) &&
               memcmp(a->string.bytes, b->string.bytes, a->string.length) == 0;
    case ENG_T_LIST:
        return a->list == b->list || equal_lists(run, a->list, b->list);
    case ENG_T_DICT:
        return a->dict == b->dict || (!a->dict->is_namespace && equal_dicts(run, a->dict, b->dict));
    case ENG_T_FUNCTION:
        return a->integer == b->integer;
    case ENG_T_MACRO:
        return a->macro == b->macro;
    default:
        return true;
    }
}

bool eng_tis(const eng_tstring *string, const char *text) {
    return string->length == strlen(text) && memcmp(string->bytes, text, string->length) == 0;
}

// ---- texts

uint8_t eng_tmark(const eng_tstring *string, size_t index) {
    return string->marks ? string->marks[index] : string->given;
}

eng_tstring eng_tpart(const eng_tstring *string, size_t begin, size_t end) {
    eng_tstring part = *string;
    part.bytes += begin;
    part.length = end - begin;
    if (part.marks)
        part.marks += begin;
    return part;
}

eng_tstring eng_tstring_of(eng_trun *run, const eng_tvalue *value) {
    char *digits;
    switch (value->kind) {
    case ENG_T_STRING:
        return value->string;
    case ENG_T_UNDEFINED:
        return (eng_tstring){.bytes = ""};
    case ENG_T_NONE:
        return eng_ttext("None").string;
    case ENG_T_BOOL:
        return eng_ttext(value->integer ? "True" : "False").string;
    case ENG_T_INTEGER:
        digits = eng_trun_take(run, 24);
        if (!digits)
            break;
        snprintf(digits, 24, "%lld", (long long)value->integer);
        return eng_ttext(digits).string;
    default:
        eng_trun_fail(run, ENG_UNSUPPORTED, "%s as text is not supported", eng_tkind_name(value->kind));
    }
    return (eng_tstring){.bytes = ""};
}

static bool grow(eng_trun *run, eng_tbuild *build, size_t more) {
    if (run->status != ENG_OK || more <= build->capacity - build->length)
        return run->status == ENG_OK;
    size_t capacity = 2 * build->capacity + more + 64;
    char *bytes = eng_trun_take(run, capacity);
    uint8_t *marks = bytes ? eng_trun_take(run, capacity) : NULL;
    if (!marks)
        return false;
    if (build->length > 0) {
        memcpy(bytes, build->bytes, build->length);
        memcpy(marks, build->marks, build->length);
    }
    *build = (eng_tbuild){bytes, marks, build->length, capacity};
    return true;
}

void eng_tbuild_add(eng_trun *run, eng_tbuild *build, const eng_tstring *piece) {
    if (piece->length == 0 || !eng_trun_spend(run, piece->length) || !grow(run, build, piece->length))
        return;
    memcpy(build->bytes + build->length, piece->bytes, piece->length);
    if (piece->marks)
        memcpy(build->marks + build->length, piece->marks, piece->length);
    else
        memset(build->marks + build->length, piece->given, piece->length);
    build->length += piece->length;
}

void eng_tbuild_put(eng_trun *run, eng_tbuild *build, const char *text, bool given) {
    eng_tbuild_add(run, build, &(eng_tstring){.bytes = text, .length = strlen(text), .given = given});
}

eng_tvalue eng_tbuild_end(const eng_tbuild *build) {
    if (build->length == 0)
        return eng_ttext("");
    return eng_tstring_value((eng_tstring){.bytes = build->bytes, .length = build->length, .marks = build->marks});
}
