// SPDX-License-Identifier: Apache-2.0
// Statements of templates run over messages.
//
// A name that is set lives to the end of the scope that it was set in: a loop's body is a scope anew each time, an if
// is none. Bindings stand on a stack; the innermost of a name is found first.
#include "engine/template.h"

#include <stdlib.h>
#include <string.h>

#include "engine/template_internal.h"

enum {
    BASE_STEPS = 1 << 21,
    BASE_BYTES = 32 << 20,
    BYTES_A_BYTE = 64, // of messages
    MAX_BINDINGS = 4096,
};

typedef enum flow { FLOW_ON, FLOW_BREAK, FLOW_CONTINUE } flow;

static flow run_block(eng_trun *run, const eng_tnode *node);

// ---- names

static void bind(eng_trun *run, const char *name, eng_tvalue value) {
    for (size_t i = run->frame; i < run->binding_count; i++) {
        if (strcmp(run->bindings[i].name, name) == 0) {
            run->bindings[i].value = value;
            return;
        }
    }
    if (run->binding_count == run->binding_capacity) {
        eng_trun_fail(run, ENG_TOO_LONG, "more than %d names", MAX_BINDINGS);
        return;
    }
    run->bindings[run->binding_count++] = (eng_tbinding){name, value};
}

// What the statements write, as a value instead of into the result.
static eng_tvalue captured(eng_trun *run, const eng_tnode *body) {
    eng_buffer text = {0}, given = {0}, *outer_text = run->text, *outer_given = run->given;
    eng_tbuild build = {0};
    run->text = &text;
    run->given = &given;
    run_block(run, body);
    run->text = outer_text;
    run->given = outer_given;
    const eng_tstring written = {.bytes = text.bytes, .length = text.length, .marks = (const uint8_t *)given.bytes};
    eng_tbuild_add(run, &build, &written);
    eng_buffer_free(&given);
    eng_buffer_free(&text);
    return eng_tbuild_end(&build);
}

static void run_set(eng_trun *run, const eng_tnode *node) {
    eng_tvalue value = node->a ? eng_tevaluate(run, node->a) : captured(run, node->first);
    if (run->status != ENG_OK)
        return;
    if (!node->attribute) {
        bind(run, node->name, value);
        return;
    }
    const eng_tvalue *object = eng_tbound(run, node->name);
    if (!object || object->kind != ENG_T_DICT || !object->dict->is_namespace)
        eng_trun_fail(run, ENG_UNSUPPORTED, "'%.60s' is no namespace", node->name);
    else
        eng_tdict_put(run, object->dict, eng_ttext(node->attribute).string, value);
}

// ---- loops

static void put(eng_trun *run, eng_tdict *dict, const char *name, eng_tvalue value) {
    if (dict)
        eng_tdict_put(run, dict, eng_ttext(name).string, value);
}

static void tell_place(eng_trun *run, eng_tdict *loop, const eng_tlist *list, size_t i) {
    put(run, loop, "index", eng_tinteger((int64_t)i + 1));
    put(run, loop, "index0", eng_tinteger((int64_t)i));
    put(run, loop, "revindex", eng_tinteger((int64_t)(list->count - i)));
    put(run, loop, "revindex0", eng_tinteger((int64_t)(list->count - i - 1)));
    put(run, loop, "first", eng_tbool(i == 0));
    put(run, loop, "last", eng_tbool(i + 1 == list->count));
    put(run, loop, "length", eng_tinteger((int64_t)list->count));
    put(run, loop, "previtem", i > 0 ? list->items[i - 1] : eng_tundefined("previtem"));
    put(run, loop, "nextitem", i + 1 < list->count ? list->items[i + 1] : eng_tundefined("nextitem"));
}

static void bind_targets(eng_trun *run, const eng_tnode *node, const eng_tvalue *item) {
    if (node->count == 1) {
        bind(run, node->names[0], *item);
        return;
    }
    eng_tlist parts = eng_telements(run, item);
    if (parts.count != node->count)
        eng_trun_fail(run, ENG_UNSUPPORTED, "%zu names for %zu values", node->count, parts.count);
    for (size_t i = 0; i < node->count && run->status == ENG_OK; i++)
        bind(run, node->names[i], parts.items[i]);
}

// Opens the scope of one pass; what it returns closes it.
static size_t open_scope(eng_trun *run) {
    size_t outer = run->frame;
    if (outer == 0)
        run->globals = run->binding_count;
    run->frame = run->binding_count;
    return outer;
}

static void close_scope(eng_trun *run, size_t outer) {
    run->binding_count = run->frame;
    run->frame = outer;
}

// The elements that pass the loop's own condition.
static eng_tlist wanted(eng_trun *run, const eng_tnode *node) {
    eng_tvalue over = eng_tevaluate(run, node->a);
    eng_tlist all = run->status == ENG_OK ? eng_telements(run, &over) : (eng_tlist){NULL, 0};
    if (!node->b)
        return all;
    eng_tvalue kept = eng_tlist_new(run, all.count);
    if (kept.kind != ENG_T_LIST)
        return (eng_tlist){NULL, 0};
    kept.list->count = 0;
    for (size_t i = 0; i < all.count && run->status == ENG_OK; i++) {
        size_t outer = open_scope(run);
        bind_targets(run, node, &all.items[i]);
        eng_tvalue holds = eng_tevaluate(run, node->b);
        if (eng_ttrue(&holds))
            kept.list->items[kept.list->count++] = all.items[i];
        close_scope(run, outer);
    }
    return *kept.list;
}

static flow run_for(eng_trun *run, const eng_tnode *node) {
    eng_tlist list = wanted(run, node);
    if (list.count == 0)
        return run_block(run, node->other);
    eng_tvalue loop = eng_tdict_new(run, 9);
    flow next = FLOW_ON;
    for (size_t i = 0; i < list.count && run->status == ENG_OK && next != FLOW_BREAK; i++) {
        size_t outer = open_scope(run);
        tell_place(run, loop.dict, &list, i);
        bind(run, "loop", loop);
        bind_targets(run, node, &list.items[i]);
        next = run_block(run, node->first);
        close_scope(run, outer);
    }
    return FLOW_ON;
}

// ---- macros

// Names that args give and the macro does not have are an error, as are too many values.
static void check_arguments(eng_trun *run, const eng_tnode *macro, const eng_targs *args) {
    size_t unnamed = 0;
    for (int i = 0; i < args->count; i++) {
        bool known = false;
        for (size_t k = 0; args->name[i] && k < macro->count; k++)
            known = known || strcmp(macro->names[k], args->name[i]) == 0;
        unnamed += !args->name[i];
        if (args->name[i] ? !known : unnamed > macro->count)
            eng_trun_fail(run, ENG_UNSUPPORTED, "the macro '%.40s' does not take these values", macro->name);
    }
}

eng_tvalue eng_tmacro_call(eng_trun *run, const eng_tnode *macro, const eng_targs *args) {
    size_t base = run->base, outer = open_scope(run);
    run->base = run->frame;
    check_arguments(run, macro, args);
    const eng_tnode *spare = macro->other;
    for (size_t i = 0; i < macro->count && run->status == ENG_OK; i++, spare = spare->next) {
        const eng_tvalue *given = eng_targ(args, (int)i, macro->names[i]);
        eng_tvalue value = given ? *given : eng_tevaluate(run, spare);
        bind(run, macro->names[i], value);
    }
    eng_tvalue text = captured(run, macro->first);
    close_scope(run, outer);
    run->base = base;
    return text;
}

// ---- blocks

static void write(eng_trun *run, const eng_tstring *text) {
    if (text->length == 0 || !eng_trun_spend(run, text->length))
        return;
    size_t before = run->given->length;
    if (run->text->length + text->length > run->arena.limit ||
        eng_buffer_append(run->text, text->bytes, text->length) != ENG_OK ||
        eng_buffer_reserve(run->given, text->length) != ENG_OK) {
        eng_trun_fail(run, ENG_TOO_LONG, "more text than a chat template may make");
        return;
    }
    for (size_t i = 0; i < text->length; i++)
        run->given->bytes[before + i] = (char)eng_tmark(text, i);
    run->given->length += text->length;
}

static flow run_if(eng_trun *run, const eng_tnode *node) {
    for (;;) {
        eng_tvalue holds = eng_tevaluate(run, node->a);
        if (run->status != ENG_OK)
            return FLOW_ON;
        if (eng_ttrue(&holds))
            return run_block(run, node->first);
        // An "elif" stands alone as the other branch; so does an if in an else, which means the same.
        if (!node->other || node->other->kind != ENG_N_IF || node->other->next)
            return run_block(run, node->other);
        node = node->other;
    }
}

static flow run_node(eng_trun *run, const eng_tnode *node) {
    eng_tvalue value;
    eng_tstring text;
    switch (node->kind) {
    case ENG_N_TEXT:
        write(run, &node->value.string);
        break;
    case ENG_N_OUTPUT:
        value = eng_tevaluate(run, node->a);
        text = eng_tstring_of(run, &value);
        write(run, &text);
        break;
    case ENG_N_IF:
        return run_if(run, node);
    case ENG_N_FOR:
        return run_for(run, node);
    case ENG_N_SET:
        run_set(run, node);
        break;
    case ENG_N_MACRO:
        bind(run, node->name, (eng_tvalue){.kind = ENG_T_MACRO, .macro = node});
        break;
    case ENG_N_BREAK:
        return FLOW_BREAK;
    case ENG_N_CONTINUE:
        return FLOW_CONTINUE;
    default:
        eng_trun_fail(run, ENG_INTERNAL, "a value where a statement should be");
    }
    return FLOW_ON;
}

static flow run_block(eng_trun *run, const eng_tnode *node) {
    flow next = FLOW_ON;
    if (run->depth >= ENG_TEMPLATE_MAX_DEPTH) {
        eng_trun_fail(run, ENG_UNSUPPORTED, "nested deeper than %d", ENG_TEMPLATE_MAX_DEPTH);
        return next;
    }
    run->depth++;
    for (; node && next == FLOW_ON && eng_trun_spend(run, 0); node = node->next) {
        run->line = node->line;
        next = run_node(run, node);
    }
    run->depth--;
    return next;
}

// ---- the door

static eng_tvalue given_text(eng_text text) {
    return eng_tstring_value((eng_tstring){.bytes = text.bytes, .length = text.length, .given = true});
}

static eng_tvalue make_messages(eng_trun *run, const eng_chat *chat) {
    eng_tvalue messages = eng_tlist_new(run, chat->count);
    for (size_t i = 0; messages.kind == ENG_T_LIST && i < chat->count; i++) {
        eng_tvalue message = eng_tdict_new(run, 2);
        if (message.kind != ENG_T_DICT)
            break;
        put(run, message.dict, "role",
            eng_tstring_value(
                (eng_tstring){.bytes = chat->messages[i].role.bytes, .length = chat->messages[i].role.length}));
        put(run, message.dict, "content", given_text(chat->messages[i].content));
        messages.list->items[i] = message;
    }
    return messages;
}

static void bind_all(eng_trun *run, const eng_template_input *input) {
    for (size_t i = 0; i < input->name_count; i++)
        bind(run, input->names[i].name, eng_ttext(input->names[i].text));
    bind(run, "messages", make_messages(run, input->chat));
    bind(run, "tools", eng_tnone());
    bind(run, "documents", eng_tnone());
    bind(run, "add_generation_prompt", eng_tbool(input->chat->add_generation_prompt));
}

eng_status eng_template_run(const eng_template *compiled, const eng_template_input *input, eng_buffer *text,
                            eng_buffer *given, eng_error *error) {
    size_t bytes = 0;
    for (size_t i = 0; i < input->chat->count; i++)
        bytes += input->chat->messages[i].content.length + input->chat->messages[i].role.length;
    eng_trun run = {.arena = {.limit = BASE_BYTES + BYTES_A_BYTE * bytes + 1024 * input->chat->count},
                    .steps = BASE_STEPS + (int64_t)bytes + 1024 * (int64_t)input->chat->count,
                    .binding_capacity = MAX_BINDINGS,
                    .time = input->chat->time,
                    .text = text,
                    .given = given,
                    .error = error};
    run.bindings = eng_trun_take(&run, MAX_BINDINGS * sizeof *run.bindings);
    if (run.bindings)
        bind_all(&run, input);
    if (run.status == ENG_OK)
        run_block(&run, compiled->body);
    eng_tarena_free(&run.arena);
    return run.status;
}
