// SPDX-License-Identifier: Apache-2.0
// Readers of answers; see answer.h.
// Texts may hold NUL characters: lengths are kept beside them.
#include "clients/cli/answer.h"

#include <stdio.h>
#include <string.h>

bool cli_answer_read(const char *data, size_t length, cli_answer *out) {
    *out = (cli_answer){.root = json_loadb(data, length, JSON_ALLOW_NUL, NULL)};
    if (!json_is_object(out->root)) {
        json_decref(out->root);
        out->root = NULL;
        return false;
    }
    const json_t *choices = json_object_get(out->root, "choices"), *usage = json_object_get(out->root, "usage"),
                 *error = json_object_get(out->root, "error");
    out->choices = json_is_array(choices) ? choices : NULL;
    out->usage = json_is_object(usage) ? usage : NULL;
    out->error = error && !json_is_null(error) ? error : NULL;
    return true;
}

void cli_answer_free(cli_answer *answer) {
    json_decref(answer->root);
    *answer = (cli_answer){0};
}

cli_choice cli_answer_choice(const cli_answer *answer, size_t at) {
    const json_t *item = answer->choices ? json_array_get(answer->choices, at) : NULL;
    const json_t *text = json_object_get(item, "text"), *index = json_object_get(item, "index");
    const char *const parts[] = {"message", "delta"}; // of a chat

    for (size_t i = 0; i < 2 && !text; i++)
        text = json_object_get(json_object_get(item, parts[i]), "content");
    cli_choice choice = {.index = json_is_integer(index) ? json_integer_value(index) : (int64_t)at, .text = ""};

    if (json_is_string(text)) {
        choice.text = json_string_value(text);
        choice.length = json_string_length(text);
    }
    choice.finish = json_string_value(json_object_get(item, "finish_reason"));
    return choice;
}

int64_t cli_usage_count(const json_t *usage, const char *name) {
    const json_t *value = json_object_get(usage, name);
    return json_is_integer(value) ? json_integer_value(value) : -1;
}

// The error's words without control characters, which a terminal would obey.
static void copy_words(const char *words, char *text, size_t size) {
    size_t length = strlen(words);
    if (length >= size)
        length = size - 1;
    for (size_t i = 0; i < length; i++)
        text[i] = (unsigned char)words[i] < ' ' || words[i] == 0x7f ? ' ' : words[i];
    text[length] = '\0';
}

void cli_problem_text(long status, const char *body, size_t length, char text[CLI_PROBLEM_SIZE]) {
    cli_answer answer = {0};
    char number[32] = "", words[CLI_PROBLEM_SIZE - 128] = "";

    if (status)
        snprintf(number, sizeof number, "%ld", status);
    const bool is_json = length && cli_answer_read(body, length, &answer);
    const json_t *error = json_is_object(answer.error) ? answer.error : answer.root;
    const char *message = json_string_value(json_object_get(error, "message"));
    const char *code = json_string_value(json_object_get(error, "code"));
    const char *param = json_string_value(json_object_get(error, "param"));
    if (!message && json_is_string(answer.error))
        message = json_string_value(answer.error);
    if (message)
        copy_words(message, words, sizeof words);
    else
        snprintf(words, sizeof words, is_json ? "(an answer without a message)" : "(an answer that is not JSON)");
    snprintf(text, CLI_PROBLEM_SIZE, "%s%s%.60s%s%s", number, code && status ? " " : "", code ? code : "",
             code || status ? ": " : "", words);
    if (param && !strstr(words, param) && strlen(text) + strlen(param) + 4 < CLI_PROBLEM_SIZE)
        snprintf(text + strlen(text), CLI_PROBLEM_SIZE - strlen(text), " (%s)", param);
    cli_answer_free(&answer);
}
