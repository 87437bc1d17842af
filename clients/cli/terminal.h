// SPDX-License-Identifier: Apache-2.0
// Text of a model or a server on standard output.
// A model may write anything; a terminal obeys control characters. To a terminal they go as U+FFFD, to files unchanged.
#ifndef CLIENTS_CLI_TERMINAL_H
#define CLIENTS_CLI_TERMINAL_H

#include <stdbool.h>
#include <stddef.h>

// text: whole UTF-8 characters. Not flushed.
void cli_put_text(const char *text, size_t length, bool terminal);

// Flushes standard output; false after a complaint if something could not be written.
bool cli_finish_output(void);

#endif
