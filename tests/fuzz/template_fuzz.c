// SPDX-License-Identifier: Apache-2.0
// Fuzz target of chat templates: any text is refused with words, or runs to an end within its bounds.
//
// The input is a template; the messages are fixed. See safetensors_fuzz.c for how it is run.
#include <stdlib.h>
#include <string.h>

#include "engine/template.h"
#include "tests/fuzz/fuzz.h"

#define TEXT(text) \
    { text, sizeof(text) - 1 }

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const eng_chat_message messages[] = {
        {TEXT("system"), TEXT("be kind")},
        {TEXT("user"), TEXT(" a, \303\251 </think> b\n")},
        {TEXT("assistant"), TEXT("\360\237\230\200")},
    };
    static const eng_template_name names[] = {{"bos_token", "<s>"}, {"eos_token", "</s>"}};
    const eng_chat chat = {messages, sizeof messages / sizeof *messages, true, 0};
    const eng_template_input input = {&chat, names, sizeof names / sizeof *names};
    eng_template *compiled;
    eng_error error = {0};
    eng_buffer text = {0}, given = {0};
    eng_status status = eng_template_compile((const char *)data, size, &compiled, &error);
    require((status == ENG_OK) == (compiled != NULL));
    if (status == ENG_OK)
        status = eng_template_run(compiled, &input, &text, &given, &error);
    require(status == ENG_OK ? text.length == given.length : status == error.code && *error.text);
    eng_buffer_free(&text);
    eng_buffer_free(&given);
    eng_template_free(compiled);
    return 0;
}
