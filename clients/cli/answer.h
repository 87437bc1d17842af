// SPDX-License-Identifier: Apache-2.0
// Reads the JSON of answers: pieces of a completion, usage, refusals.
// What an answer lacks reads as absent; what has the wrong type too. Nothing in it can end the program.
#ifndef CLIENTS_CLI_ANSWER_H
#define CLIENTS_CLI_ANSWER_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { CLI_PROBLEM_SIZE = 1024 };

// One event of a stream or one whole answer. Pointers belong to root.
typedef struct cli_answer {
    json_t *root;
    const json_t *choices; // array or NULL
    const json_t *usage;   // object or NULL
    const json_t *error;   // NULL: none
} cli_answer;

// false: data is not a JSON object. Free what was read.
bool cli_answer_read(const char *data, size_t length, cli_answer *out);
void cli_answer_free(cli_answer *answer);

// text is "" and finish NULL when absent.
typedef struct cli_choice {
    int64_t index;
    const char *text, *finish;
    size_t length;
} cli_choice;
cli_choice cli_answer_choice(const cli_answer *answer, size_t at);

// An integer member of usage, -1: absent.
int64_t cli_usage_count(const json_t *usage, const char *name);

// "400 invalid_value: n must be ... (n)" from a refused request's status and body, or an error event (status 0).
void cli_problem_text(long status, const char *body, size_t length, char text[CLI_PROBLEM_SIZE]);

#endif
