// SPDX-License-Identifier: Apache-2.0
// Methods of texts and dictionaries in templates, and values as JSON.
//
// Texts are Python's: white space is Unicode's, strip takes characters, split without a separator joins runs of white
// space. Every part of a result keeps its bytes' marks.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE // memmem
#endif
#include <string.h>
#include <utf8proc.h>

#include "engine/template_internal.h"
#include "engine/utf8.h"

static bool is_space(uint32_t code) { // str.isspace
    return (code >= 9 && code <= 13) || (code >= 28 && code <= 32) || code == 0x85 || code == 0xa0 || code == 0x1680 ||
           (code >= 0x2000 && code <= 0x200a) || code == 0x2028 || code == 0x2029 || code == 0x202f || code == 0x205f ||
           code == 0x3000;
}

// The character at a place and its bytes; a byte that begins none counts as one.
static size_t decode(const eng_tstring *text, size_t at, uint32_t *code) {
    size_t size = eng_utf8_decode(text->bytes + at, text->length - at, code);
    if (size == 0)
        *code = 0xfffd;
    return size ? size : 1;
}

static size_t before(const eng_tstring *text, size_t at, uint32_t *code) {
    size_t start = at - 1;
    while (start > 0 && ((unsigned char)text->bytes[start] & 0xc0) == 0x80)
        start--;
    (void)decode(text, start, code);
    return start;
}

// ---- methods of texts; the first argument is a text where one is given, the second as well

typedef struct text_call {
    eng_trun *run;
    const eng_tstring *text;
    const eng_targs *args;
    const eng_tstring *first, *second; // NULL: not given
} text_call;

static bool in_set(const eng_tstring *set, uint32_t wanted) {
    uint32_t code;
    if (!set)
        return is_space(wanted);
    for (size_t at = 0; at < set->length;) {
        at += decode(set, at, &code);
        if (code == wanted)
            return true;
    }
    return false;
}

static eng_tvalue strip(const text_call *call, bool left, bool right) {
    const eng_tstring *text = call->text;
    size_t begin = 0, end = text->length, next;
    uint32_t code;
    if (!eng_trun_spend(call->run, text->length * (1 + (call->first ? call->first->length / 16 : 0))))
        return eng_tundefined("");
    for (; left && begin < end; begin = next) {
        next = begin + decode(text, begin, &code);
        if (!in_set(call->first, code))
            break;
    }
    for (; right && end > begin; end = next) {
        next = before(text, end, &code);
        if (!in_set(call->first, code))
            break;
    }
    return eng_tstring_value(eng_tpart(text, begin, end));
}

static eng_tvalue method_strip(const text_call *call) {
    return strip(call, true, true);
}

static eng_tvalue method_lstrip(const text_call *call) {
    return strip(call, true, false);
}

static eng_tvalue method_rstrip(const text_call *call) {
    return strip(call, false, true);
}

static bool matches(const eng_tstring *text, size_t at, const eng_tstring *part) {
    return part->length <= text->length - at && memcmp(text->bytes + at, part->bytes, part->length) == 0;
}

static eng_tvalue method_startswith(const text_call *call) {
    return eng_tbool(call->first && matches(call->text, 0, call->first));
}

static eng_tvalue method_endswith(const text_call *call) {
    const eng_tstring *text = call->text, *part = call->first;
    return eng_tbool(part && part->length <= text->length && matches(text, text->length - part->length, part));
}

// Where part begins from a place on; the end of the text: nowhere.
static size_t find(const eng_tstring *text, size_t from, const eng_tstring *part) {
    const char *found = memmem(text->bytes + from, text->length - from, part->bytes, part->length);
    return found ? (size_t)(found - text->bytes) : text->length;
}

// The next piece from *at on: of white space none stays. False: there is none.
static bool next_word(const eng_tstring *text, size_t *at, size_t *end) {
    uint32_t code;
    size_t size = 0;
    for (; *at < text->length; *at += size) {
        size = decode(text, *at, &code);
        if (!is_space(code))
            break;
    }
    *end = *at;
    while (*end < text->length) {
        size = decode(text, *end, &code);
        if (is_space(code))
            break;
        *end += size;
    }
    return *end > *at;
}

// Fills list (NULL: only counts) with the pieces, at most most + 1 of them where most is not negative.
static size_t split(const text_call *call, int64_t most, eng_tlist *list) {
    const eng_tstring *text = call->text, *by = call->first;
    size_t count = 0, at = 0, end = 0;
    bool more = true;
    while (more) {
        bool last = most >= 0 && count == (size_t)most;
        if (by) {
            end = last ? text->length : find(text, at, by);
            more = end < text->length;
        } else {
            more = next_word(text, &at, &end);
            if (!more)
                break;
            end = last ? text->length : end;
        }
        if (list)
            list->items[count] = eng_tstring_value(eng_tpart(text, at, end));
        count++;
        at = end + (by && more ? by->length : 0);
        more = more && !last;
    }
    return count;
}

static eng_tvalue method_split(const text_call *call) {
    const eng_tvalue *most = eng_targ(call->args, 1, "maxsplit");
    if ((call->first && call->first->length == 0) || (most && most->kind != ENG_T_INTEGER) || (!call->first && most)) {
        eng_trun_fail(call->run, ENG_UNSUPPORTED, "split by nothing, or with an odd bound");
        return eng_tundefined("");
    }
    int64_t bound = most ? most->integer : -1;
    if (!eng_trun_spend(call->run, 2 * call->text->length))
        return eng_tundefined("");
    // A piece may end exactly at the text's end with an empty one behind it: find says "nowhere" there, as it should.
    eng_tvalue made = eng_tlist_new(call->run, split(call, bound, NULL));
    if (made.kind == ENG_T_LIST)
        split(call, bound, made.list);
    return made;
}

static eng_tvalue method_replace(const text_call *call) {
    const eng_tvalue *most = eng_targ(call->args, 2, "count");
    eng_tbuild build = {0};
    if (!call->first || !call->second || call->first->length == 0 || most) {
        eng_trun_fail(call->run, ENG_UNSUPPORTED, "replace takes two texts, the first not empty");
        return eng_tundefined("");
    }
    if (!eng_trun_spend(call->run, call->text->length))
        return eng_tundefined("");
    for (size_t at = 0; call->run->status == ENG_OK;) {
        size_t found = find(call->text, at, call->first);
        eng_tstring piece = eng_tpart(call->text, at, found);
        eng_tbuild_add(call->run, &build, &piece);
        if (found == call->text->length)
            break;
        eng_tbuild_add(call->run, &build, call->second);
        at = found + call->first->length;
    }
    return eng_tbuild_end(&build);
}

static eng_tvalue change_case(const text_call *call, bool first_upper, bool upper) {
    eng_tbuild build = {0};
    for (size_t at = 0; at < call->text->length && call->run->status == ENG_OK;) {
        char bytes[4];
        uint32_t code;
        size_t size = decode(call->text, at, &code);
        bool up = at == 0 ? first_upper : upper;
        code = (uint32_t)(up ? utf8proc_toupper((utf8proc_int32_t)code) : utf8proc_tolower((utf8proc_int32_t)code));
        eng_tstring changed = {.bytes = bytes, .given = eng_tmark(call->text, at)};
        changed.length = eng_utf8_encode(code, bytes);
        eng_tbuild_add(call->run, &build, &changed);
        at += size;
    }
    return eng_tbuild_end(&build);
}

static eng_tvalue method_upper(const text_call *call) {
    return change_case(call, true, true);
}

static eng_tvalue method_lower(const text_call *call) {
    return change_case(call, false, false);
}

static eng_tvalue method_capitalize(const text_call *call) {
    return change_case(call, true, false);
}

static const struct {
    const char *name;
    eng_tvalue (*call)(const text_call *call);
} text_methods[] = {
    {"strip", method_strip},           {"lstrip", method_lstrip}, {"rstrip", method_rstrip},
    {"startswith", method_startswith}, {"split", method_split},   {"replace", method_replace},
    {"endswith", method_endswith},     {"upper", method_upper},   {"lower", method_lower},
    {"capitalize", method_capitalize},
};

static eng_tvalue call_text(eng_trun *run, const eng_tvalue *object, const char *name, const eng_targs *args) {
    text_call call = {.run = run, .text = &object->string, .args = args};
    const eng_tvalue *given[2] = {eng_targ(args, 0, "sep"), eng_targ(args, 1, "")};
    if (given[0] && given[0]->kind == ENG_T_STRING)
        call.first = &given[0]->string;
    else if (given[0] && given[0]->kind != ENG_T_NONE)
        eng_trun_fail(run, ENG_UNSUPPORTED, "'%.40s' with %s", name, eng_tkind_name(given[0]->kind));
    if (given[1] && given[1]->kind == ENG_T_STRING)
        call.second = &given[1]->string;
    for (size_t i = 0; i < sizeof text_methods / sizeof *text_methods && run->status == ENG_OK; i++) {
        if (strcmp(text_methods[i].name, name) == 0)
            return text_methods[i].call(&call);
    }
    eng_trun_fail(run, ENG_UNSUPPORTED, "the method '%.40s' of a text is not supported", name);
    return eng_tundefined("");
}

// ---- methods of dictionaries

static eng_tvalue pair(eng_trun *run, const eng_tentry *entry) {
    eng_tvalue made = eng_tlist_new(run, 2);
    if (made.kind == ENG_T_LIST) {
        made.list->items[0] = eng_tstring_value(entry->key);
        made.list->items[1] = entry->value;
    }
    return made;
}

static eng_tvalue call_dict(eng_trun *run, const eng_tdict *dict, const char *name, const eng_targs *args) {
    if (strcmp(name, "get") == 0 && args->count > 0 && args->value[0].kind == ENG_T_STRING) {
        const eng_tstring *key = &args->value[0].string;
        const eng_tvalue *found = eng_tdict_get(dict, key->bytes, key->length);
        return found ? *found : args->count > 1 ? args->value[1] : eng_tnone();
    }
    bool keys = strcmp(name, "keys") == 0, values = strcmp(name, "values") == 0;
    if (!keys && !values && strcmp(name, "items") != 0) {
        eng_trun_fail(run, ENG_UNSUPPORTED, "the method '%.40s' of a dictionary is not supported", name);
        return eng_tundefined("");
    }
    eng_tvalue made = eng_tlist_new(run, dict->count);
    for (size_t i = 0; made.kind == ENG_T_LIST && i < dict->count; i++) {
        const eng_tentry *entry = &dict->entries[i];
        made.list->items[i] = keys ? eng_tstring_value(entry->key) : values ? entry->value : pair(run, entry);
    }
    return made;
}

eng_tvalue eng_tmethod_call(eng_trun *run, const eng_tvalue *object, const char *name, const eng_targs *args) {
    eng_tvalue result = eng_tundefined("");
    if (object->kind == ENG_T_STRING)
        result = call_text(run, object, name, args);
    else if (object->kind == ENG_T_DICT)
        result = call_dict(run, object->dict, name, args);
    else if (object->kind == ENG_T_UNDEFINED)
        eng_trun_fail(run, ENG_UNSUPPORTED, "'%.60s' is undefined, so it has no '%.40s'", object->missing, name);
    else
        eng_trun_fail(run, ENG_UNSUPPORTED, "the method '%.40s' of %s is not supported", name,
                      eng_tkind_name(object->kind));
    return run->status == ENG_OK ? result : eng_tundefined("");
}

// ---- JSON, as Python's json.dumps without ensure_ascii

static void json_text(eng_trun *run, const eng_tstring *text, eng_tbuild *out) {
    static const char letters[] = "\"\\\n\r\t\b\f", meant[] = "\"\\nrtbf", hex[] = "0123456789abcdef";
    size_t done = 0;
    eng_tbuild_put(run, out, "\"", false);
    for (size_t i = 0; i < text->length && run->status == ENG_OK; i++) {
        unsigned char byte = (unsigned char)text->bytes[i];
        const char *found = byte ? strchr(letters, byte) : NULL;
        if (!found && byte >= 0x20)
            continue;
        char escape[] = {'\\', 'u', '0', '0', hex[byte >> 4], hex[byte & 15], 0};
        if (found) {
            escape[1] = meant[found - letters];
            escape[2] = 0;
        }
        eng_tstring plain = eng_tpart(text, done, i);
        eng_tbuild_add(run, out, &plain);
        eng_tbuild_put(run, out, escape, eng_tmark(text, i));
        done = i + 1;
    }
    eng_tstring rest = eng_tpart(text, done, text->length);
    eng_tbuild_add(run, out, &rest);
    eng_tbuild_put(run, out, "\"", false);
}

static void json_break(eng_trun *run, int64_t indent, int depth, eng_tbuild *out) {
    if (indent < 0)
        return;
    eng_tbuild_put(run, out, "\n", false);
    for (int64_t i = 0; i < indent * depth && run->status == ENG_OK; i++)
        eng_tbuild_put(run, out, " ", false);
}

static void json_members(eng_trun *run, const eng_tvalue *value, int64_t indent, int depth, eng_tbuild *out) {
    bool dict = value->kind == ENG_T_DICT;
    size_t count = dict ? value->dict->count : value->list->count;
    eng_tbuild_put(run, out, dict ? "{" : "[", false);
    for (size_t i = 0; i < count && run->status == ENG_OK; i++) {
        if (i > 0)
            eng_tbuild_put(run, out, indent < 0 ? ", " : ",", false);
        json_break(run, indent, depth + 1, out);
        if (dict) {
            json_text(run, &value->dict->entries[i].key, out);
            eng_tbuild_put(run, out, ": ", false);
        }
        eng_tjson(run, dict ? &value->dict->entries[i].value : &value->list->items[i], indent, depth + 1, out);
    }
    if (count > 0)
        json_break(run, indent, depth, out);
    eng_tbuild_put(run, out, dict ? "}" : "]", false);
}

void eng_tjson(eng_trun *run, const eng_tvalue *value, int64_t indent, int depth, eng_tbuild *out) {
    eng_tstring text;
    if (depth > ENG_TEMPLATE_MAX_DEPTH || indent > 64) {
        eng_trun_fail(run, ENG_UNSUPPORTED, "JSON nested or indented too deep");
        return;
    }
    switch (value->kind) {
    case ENG_T_NONE:
        eng_tbuild_put(run, out, "null", false);
        break;
    case ENG_T_BOOL:
        eng_tbuild_put(run, out, value->integer ? "true" : "false", false);
        break;
    case ENG_T_INTEGER:
        text = eng_tstring_of(run, value);
        eng_tbuild_add(run, out, &text);
        break;
    case ENG_T_STRING:
        json_text(run, &value->string, out);
        break;
    case ENG_T_LIST:
    case ENG_T_DICT:
        json_members(run, value, indent, depth, out);
        break;
    default:
        eng_trun_fail(run, ENG_UNSUPPORTED, "%s as JSON", eng_tkind_name(value->kind));
    }
}
