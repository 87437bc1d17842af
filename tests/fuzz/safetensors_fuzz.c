// SPDX-License-Identifier: Apache-2.0
// Fuzz target of the safetensors reader: any bytes are refused with words or give a file whose every tensor reads.
//
// The input is a whole file, held in memory.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stdlib.h>
#include <string.h>

#include "engine/safetensors.h"
#include "tests/fuzz/memory_file.h"

// What an accepted file promises, whatever its bytes.
static void check_accepted(const eng_st_file *file, size_t size) {
    uint64_t at = 0;
    for (size_t i = 0; i < eng_st_count(file); i++) {
        const eng_st_entry *entry = eng_st_at(file, i);
        require(i == 0 || entry->offset == at);
        at = entry->offset + entry->bytes;
        require(at <= size);
        require((uint64_t)entry->count * eng_dtype_size(entry->dtype) == entry->bytes);
        require(eng_st_find(file, entry->name) == entry);
        void *stored = malloc((size_t)entry->bytes + 1);
        float *wide = malloc((size_t)entry->count * sizeof *wide + 1);
        require(stored && wide);
        require(eng_st_read(file, entry, 0, entry->count, stored, NULL) == ENG_OK);
        eng_status status = eng_st_read_f32(file, entry, 0, entry->count, wide, NULL);
        require(status == ENG_OK || status == ENG_UNSUPPORTED);
        free(wide);
        free(stored);
    }
    require(eng_st_count(file) == 0 || at == size);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    char path[64];
    const int fd = memory_file(data, size, path);
    eng_st_file *file;
    eng_error error = {0};
    eng_status status = eng_st_open(path, &file, &error);
    if (status == ENG_OK) {
        check_accepted(file, size);
        eng_st_close(file);
    } else {
        require(status == error.code && strstr(error.text, path) != NULL);
    }
    close(fd);
    return 0;
}
