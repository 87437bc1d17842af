// SPDX-License-Identifier: Apache-2.0
// Chat templates: the part of Jinja that checkpoints' templates are written in, read strictly and run within bounds.
//
// What transformers renders is rendered here, byte for byte: the same rules for white space around tags, the same
// precedences, the same filters, tests and methods. What is not known (macros, includes, an unknown filter) is an error
// with its line and its name, at compilation where the text alone tells. A run is bounded in steps, in nesting and in
// memory, whatever the template does.
// Each byte of the result is either the template's own or came in through a message: only the former may become control
// tokens. A compiled template is immutable; any number of threads may run it.
#ifndef ENGINE_TEMPLATE_H
#define ENGINE_TEMPLATE_H

#include "engine/buffer.h"
#include "engine/engine.h"

typedef struct eng_template eng_template;

ENG_CHECKED eng_status eng_template_compile(const char *text, size_t length, eng_template **out, eng_error *error);
void eng_template_free(eng_template *compiled); // NULL: nothing

// A variable of the template that is its author's, such as bos_token.
typedef struct eng_template_name {
    const char *name, *text;
} eng_template_name;

typedef struct eng_template_input {
    const eng_chat *chat;
    const eng_template_name *names;
    size_t name_count;
} eng_template_input;

// Appends the text, and for each of its bytes 1 where it came from a message, else 0. ENG_INVALID: the template itself
// refuses the messages, in its own words; ENG_UNSUPPORTED: it does what is not built; ENG_TOO_LONG: a bound was hit.
ENG_CHECKED eng_status eng_template_run(const eng_template *compiled, const eng_template_input *input, eng_buffer *text,
                                        eng_buffer *given, eng_error *error);

#endif
