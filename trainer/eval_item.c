// SPDX-License-Identifier: Apache-2.0
// Items from records; see eval_item.h. A record that is no item is refused in words that name its key; which file and
// line it stands in is known to the record. No state; any thread.
#include "trainer/eval_item.h"

#include <ctype.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ANSWER_TOKENS = 48 };

char *trn_format(const char *format, ...) {
    va_list arguments, again;
    va_start(arguments, format);
    va_copy(again, arguments);
    int length = vsnprintf(NULL, 0, format, arguments);
    char *text = length < 0 ? NULL : malloc((size_t)length + 1);
    if (text)
        vsnprintf(text, (size_t)length + 1, format, again);
    va_end(again);
    va_end(arguments);
    return text;
}

static eng_status no_memory(eng_error *error) {
    return eng_fail(error, ENG_NO_MEMORY, "out of memory for an item");
}

void trn_item_free(trn_item *item) {
    for (int32_t i = 0; i < item->variants; i++) {
        free(item->context[i]);
        free(item->continuation[i]);
    }
    for (int32_t i = 0; i < item->accepted_count; i++)
        free(item->accepted[i]);
    free(item->context);
    free(item->continuation);
    free(item->bytes);
    free(item->accepted);
    *item = (trn_item){0};
}

static bool grow(char ***list, int32_t count) {
    char **grown = realloc(*list, sizeof *grown * ((size_t)count + 1));
    if (grown)
        *list = grown;
    return grown != NULL;
}

// Takes the strings; bytes of the continuation as it was written.
static eng_status add_strings(trn_item *item, char *context, char *continuation, size_t bytes, eng_error *error) {
    int32_t *sizes = realloc(item->bytes, sizeof *sizes * ((size_t)item->variants + 1));
    if (sizes)
        item->bytes = sizes;
    if (!sizes || !context || !continuation || !grow(&item->context, item->variants) ||
        !grow(&item->continuation, item->variants)) {
        free(context);
        free(continuation);
        return no_memory(error);
    }
    item->context[item->variants] = context;
    item->continuation[item->variants] = continuation;
    item->bytes[item->variants++] = (int32_t)bytes;
    return ENG_OK;
}

static bool is_space(char c) {
    return isspace((unsigned char)c) != 0;
}

eng_status trn_item_add(trn_item *item, const char *context, const char *continuation, eng_error *error) {
    size_t length = strlen(context), kept = length;
    while (kept > 0 && context[kept - 1] == ' ')
        kept--;
    bool joins = kept == length && length > 0 && !is_space(context[length - 1]) && !is_space(continuation[0]);
    return add_strings(item, strndup(context, kept),
                       trn_format("%s%s%s", context + kept, joins ? " " : "", continuation), strlen(continuation),
                       error);
}

eng_status trn_item_add_text(trn_item *item, const char *text, size_t length, eng_error *error) {
    item->is_text = true;
    return add_strings(item, strdup(""), strndup(text, length), length, error);
}

eng_status trn_item_accept(trn_item *item, const char *answer, eng_error *error) {
    char *copy = strdup(answer);
    if (!copy || !grow(&item->accepted, item->accepted_count)) {
        free(copy);
        return no_memory(error);
    }
    item->accepted[item->accepted_count++] = copy;
    return ENG_OK;
}

char *trn_item_key_prompt(const char *object, const char *key) {
    return trn_format("Extract the value corresponding to the specified key in the JSON object below.\n\n"
                      "JSON data:\n%s\n\nKey: \"%s\"\nCorresponding value:",
                      object, key);
}

// ------------------------------------------------------------------------------------------------------------- records

static eng_status bad(const trn_json *record, const char *what, eng_error *error) {
    return eng_fail(error, ENG_FORMAT, "%s: %s", trn_json_origin(record), what);
}

static eng_status read_choices(const trn_json *record, trn_item *item, eng_error *error) {
    const char *context = NULL, *continuation = NULL, **choice = NULL, **contexts = NULL;
    int32_t choices = 0, count = 0;
    int64_t gold = 0;
    bool partial = trn_json_has(record, "ctxs");
    eng_status status = trn_json_string(record, "ctx", &context, error);
    if (status == ENG_OK)
        status = trn_json_integer(record, "gold", &gold, error);
    if (status == ENG_OK)
        status = trn_json_strings(record, "choices", &choice, &choices, error);
    if (status == ENG_OK && partial)
        status = trn_json_strings(record, "ctxs", &contexts, &count, error);
    if (status == ENG_OK && partial)
        status = trn_json_string(record, "cont", &continuation, error);
    if (status == ENG_OK && choices < 2)
        status = bad(record, "choices: fewer than two", error);
    if (status == ENG_OK && partial && count != choices)
        status = bad(record, "ctxs: not as many as choices", error);
    if (status == ENG_OK && (gold < 0 || gold >= choices))
        status = bad(record, "gold: not a place in choices", error);
    for (int32_t i = 0; i < choices && status == ENG_OK; i++) {
        const char *text = partial ? continuation : choice[i];
        status = text[0] ? trn_item_add(item, partial ? contexts[i] : context, text, error)
                         : bad(record, "an empty choice", error);
    }
    item->gold = (int32_t)gold;
    free(choice);
    free(contexts);
    return status;
}

static eng_status read_target(const trn_json *record, trn_item *item, eng_error *error) {
    const char *context = NULL, *target = NULL;
    eng_status status = trn_json_string(record, "ctx", &context, error);
    if (status == ENG_OK)
        status = trn_json_string(record, "target", &target, error);
    if (status == ENG_OK && !target[0])
        status = bad(record, "target: empty", error);
    return status == ENG_OK ? trn_item_add(item, context, target, error) : status;
}

static eng_status accept_all(const trn_json *record, const char *key, trn_item *item, eng_error *error) {
    const char **answer = NULL;
    int32_t count = 0;
    if (!trn_json_has(record, key))
        return ENG_OK;
    eng_status status = trn_json_strings(record, key, &answer, &count, error);
    for (int32_t i = 0; i < count && status == ENG_OK; i++)
        if (answer[i][0])
            status = trn_item_accept(item, answer[i], error);
    free(answer);
    return status;
}

static eng_status read_question(const trn_json *record, trn_item *item, eng_error *error) {
    const char *context = NULL, *question = NULL, *answer = NULL;
    eng_status status = trn_json_string(record, "ctx", &context, error);
    if (status == ENG_OK)
        status = trn_json_string(record, "question", &question, error);
    if (status == ENG_OK)
        status = trn_json_string(record, "answer", &answer, error);
    if (status == ENG_OK && !answer[0])
        status = bad(record, "answer: empty", error);
    if (status != ENG_OK)
        return status;
    char *prompt = strncmp(context, "{\"", 2) == 0
                       ? trn_item_key_prompt(context, question)
                       : trn_format("%s%sQuestion: %s\nAnswer:", context, context[0] ? "\n" : "", question);
    status = prompt ? trn_item_add(item, prompt, answer, error) : no_memory(error);
    free(prompt);
    if (status == ENG_OK)
        status = trn_item_accept(item, answer, error);
    if (status == ENG_OK)
        status = accept_all(record, "answers", item, error);
    if (status == ENG_OK)
        status = accept_all(record, "aliases", item, error);
    item->generate = ANSWER_TOKENS;
    return status;
}

// FLORES-200's codes; one that is not here stands for itself.
static const char *language(const char *code) {
    static const struct {
        const char *code, *name;
    } languages[] = {{"eng_Latn", "English"},  {"deu_Latn", "German"},   {"fra_Latn", "French"},
                     {"spa_Latn", "Spanish"},  {"ita_Latn", "Italian"},  {"por_Latn", "Portuguese"},
                     {"nld_Latn", "Dutch"},    {"ron_Latn", "Romanian"}, {"ces_Latn", "Czech"},
                     {"pol_Latn", "Polish"},   {"rus_Cyrl", "Russian"},  {"zho_Hans", "Chinese"},
                     {"jpn_Jpan", "Japanese"}, {"fin_Latn", "Finnish"},  {"est_Latn", "Estonian"},
                     {"arb_Arab", "Arabic"},   {"hin_Deva", "Hindi"}};
    for (size_t i = 0; i < sizeof languages / sizeof *languages; i++)
        if (strcmp(languages[i].code, code) == 0)
            return languages[i].name;
    return code;
}

static eng_status read_translation(const trn_json *record, trn_item *item, eng_error *error) {
    static const char *const keys[] = {"src_lang", "tgt_lang", "src", "tgt"};
    const char *value[4] = {NULL};
    eng_status status = ENG_OK;
    for (int i = 0; i < 4 && status == ENG_OK; i++)
        status = trn_json_string(record, keys[i], &value[i], error);
    if (status == ENG_OK && !value[3][0])
        status = bad(record, "tgt: empty", error);
    if (status != ENG_OK)
        return status;
    char *prompt = trn_format("%s: %s\n%s:", language(value[0]), value[2], language(value[1]));
    status = prompt ? trn_item_add(item, prompt, value[3], error) : no_memory(error);
    free(prompt);
    snprintf(item->group, sizeof item->group, "to %s", language(value[1]));
    return status;
}

static eng_status read_text(const trn_json *record, trn_item *item, eng_error *error) {
    const char *text = NULL;
    eng_status status = trn_json_string(record, "text", &text, error);
    if (status == ENG_OK && !text[0])
        status = bad(record, "text: empty", error);
    return status == ENG_OK ? trn_item_add_text(item, text, strlen(text), error) : status;
}

static eng_status read_group(const trn_json *record, trn_item *item, eng_error *error) {
    static const char *const keys[] = {"uid", "category"};
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        const char *name = NULL;
        if (!trn_json_has(record, keys[i]) || item->group[0])
            continue;
        eng_status status = trn_json_string(record, keys[i], &name, error);
        if (status != ENG_OK)
            return status;
        snprintf(item->group, sizeof item->group, "%s", name);
    }
    return ENG_OK;
}

eng_status trn_item_read(const trn_json *record, trn_item *out, eng_error *error) {
    *out = (trn_item){0};
    eng_status status;
    if (trn_json_has(record, "choices"))
        status = read_choices(record, out, error);
    else if (trn_json_has(record, "target"))
        status = read_target(record, out, error);
    else if (trn_json_has(record, "question"))
        status = read_question(record, out, error);
    else if (trn_json_has(record, "tgt"))
        status = read_translation(record, out, error);
    else if (trn_json_has(record, "text"))
        status = read_text(record, out, error);
    else
        status = bad(record, "none of the keys choices, target, question, tgt, text", error);
    return status == ENG_OK ? read_group(record, out, error) : status;
}
