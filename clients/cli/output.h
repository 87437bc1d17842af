// SPDX-License-Identifier: Apache-2.0
// The text of an answer on its way to standard output, and what is said about it afterwards.
//
// A stream's pieces go out as they come. What a conversation needs later is kept as well.
#ifndef CLIENTS_CLI_OUTPUT_H
#define CLIENTS_CLI_OUTPUT_H

#include "clients/cli/answer.h"
#include "clients/cli/exchange.h"

typedef struct cli_output {
    bool terminal, ended; // ended: the stream's end mark came
    json_t *usage;        // NULL: none was told
    char finish[32];
    char problem[CLI_PROBLEM_SIZE];
    bool has_problem, write_failed;
    int64_t begin, first; // of the request, of the first text
    cli_buf *text;        // gets all text too; NULL: nobody wants it
} cli_output;

// Takes a stream's event; a cli_event_fn.
bool cli_output_event(void *output, const char *data, size_t length);
// The parts of an answer that came whole.
void cli_output_take(cli_output *output, const cli_answer *answer, const cli_choice *choice);
// After a stream: whether it is whole; else the reason is on standard error. An exit status.
int cli_output_judge(const cli_output *output);
void cli_output_print_usage(const cli_output *output); // on standard error
void cli_output_free(cli_output *output);

#endif
