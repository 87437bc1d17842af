// SPDX-License-Identifier: Apache-2.0
// The chat template of a checkpoint folder: messages to ids.
//
// It stands in chat_template.jinja, or in tokenizer_config.json as chat_template (of several by name, "default").
// Immutable once open; any number of threads may use it.
#ifndef ENGINE_TOKENIZER_CHAT_H
#define ENGINE_TOKENIZER_CHAT_H

#include "engine/engine.h"
#include "engine/tokenizer.h"

typedef struct eng_chat_format eng_chat_format;

// *out NULL with ENG_OK: the folder has no template. A template that cannot be run here opens all the same: using it is
// what fails, with eng_chat_format_fault.
ENG_CHECKED eng_status eng_chat_format_open(const char *dir, eng_chat_format **out, eng_error *error);
void eng_chat_format_close(eng_chat_format *format);              // NULL: nothing
const char *eng_chat_format_text(const eng_chat_format *format);  // of the template
const char *eng_chat_format_fault(const eng_chat_format *format); // why it cannot be run; NULL: it can

// Messages as the text of a prompt (new memory, NUL behind *length bytes), for those who want to see it.
ENG_CHECKED eng_status eng_chat_render(const eng_chat_format *format, const eng_chat *chat, char **text, size_t *length,
                                       eng_error *error);
// As ids (new memory). Only what the template itself writes becomes special tokens.
ENG_CHECKED eng_status eng_chat_encode(const eng_chat_format *format, const eng_tokenizer *tokenizer,
                                       const eng_chat *chat, int32_t **ids, size_t *count, eng_error *error);

#endif
