// SPDX-License-Identifier: Apache-2.0
// Fuzz target of the GGUF reader and of what the importer makes of its keys: any bytes are refused with words or give a
// file whose every key and tensor reads.
//
// The input is a whole file, held in memory.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stdlib.h>
#include <string.h>

#include "engine/gguf.h"
#include "engine/import_internal.h"
#include "tests/fuzz/memory_file.h"

static uint64_t sum_value(const eng_gguf_value *value) {
    int64_t integer = 0;
    double real = 0;
    bool flag = false;
    uint64_t sum = 0;
    require(eng_gguf_integer(value, &integer) + eng_gguf_real(value, &real) + eng_gguf_flag(value, &flag) <= 1);
    for (uint64_t i = 0; eng_gguf_is_string(value) && i < value->count; i++)
        sum += value->data[i];
    eng_gguf_items items = eng_gguf_begin(value);
    eng_gguf_value element;
    uint64_t count = 0;
    for (; eng_gguf_next(&items, &element); count++)
        sum += sum_value(&element);
    require(value->type != ENG_GGUF_ARRAY || count == value->count);
    return sum + (uint64_t)integer;
}

static void check_tensors(const eng_gguf *file, size_t size) {
    for (size_t i = 0; i < eng_gguf_tensor_count(file); i++) {
        const eng_gguf_tensor *tensor = eng_gguf_tensor_at(file, i);
        require(tensor->offset + tensor->bytes <= size);
        require(eng_gguf_find(file, tensor->name) == tensor);
        float *values = malloc((size_t)tensor->count * sizeof *values + 1);
        require(values != NULL);
        require(eng_gguf_read_f32(file, tensor, 0, tensor->count, values, NULL) == ENG_OK);
        for (eng_block_part part = ENG_BLOCK_CODES; tensor->format->bits > 0 && part <= ENG_BLOCK_MINIMUM; part++)
            require(eng_gguf_read_blocks(file, tensor, part, 0, tensor->count / 32, values, NULL) == ENG_OK);
        free(values);
    }
}

// Text or an error with words, never both.
static void check_import(const eng_gguf *file) {
    char *config = NULL, *tokenizer, *tokenizer_config;
    bool chat_template;
    eng_error error = {0};
    eng_status status = eng_import_config(file, ENG_F32, 4, &config, &error);
    require((status == ENG_OK) == (config != NULL) && (status == ENG_OK || *error.text));
    free(config);
    error = (eng_error){0};
    status = eng_import_tokenizer(file, &tokenizer, &tokenizer_config, &chat_template, &error);
    require(status == ENG_OK || (!tokenizer && *error.text));
    free(tokenizer);
    free(tokenizer_config);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    char path[64];
    const int fd = memory_file(data, size, path);
    eng_gguf *file;
    eng_error error = {0};
    eng_status status = eng_gguf_open(path, &file, &error);
    if (status == ENG_OK) {
        for (size_t i = 0; i < eng_gguf_key_count(file); i++)
            (void)sum_value(eng_gguf_key_at(file, i));
        check_tensors(file, size);
        check_import(file);
        eng_gguf_close(file);
    } else {
        require(status == error.code && strstr(error.text, path) != NULL);
    }
    close(fd);
    return 0;
}
