// SPDX-License-Identifier: Apache-2.0
// Runs a fuzz target over files instead of a fuzzer: each file whole, and each with single bytes changed.
//
// The changes are the same in every run, so a fault is found again by the same command. Exit status 0: every input was
// taken; a target that finds a fault ends the program by a signal.
//
//   TARGET [-n CHANGES] FILE...       CHANGES a file, default 1000
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/fuzz/fuzz.h"

static uint8_t *read_input(const char *path, size_t *size) {
    FILE *file = fopen(path, "rb");
    uint8_t *data = NULL;
    long length;
    *size = 0;
    if (!file)
        return NULL;
    if (fseek(file, 0, SEEK_END) == 0 && (length = ftell(file)) >= 0) {
        data = malloc((size_t)length + 1);
        rewind(file);
        if (data)
            *size = fread(data, 1, (size_t)length, file);
    }
    fclose(file);
    return data;
}

static uint64_t next_random(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return *state >> 33;
}

// One to four bytes changed to a random one or to one that means something in JSON, and sometimes a cut end.
static void run_changed(const uint8_t *data, size_t size, uint64_t *state) {
    static const char telling[] = "{}[]\",:\\0129-.e u\n";
    uint8_t *copy = malloc(size + 1);
    if (!copy)
        return;
    memcpy(copy, data, size);
    for (uint64_t count = 1 + next_random(state) % 4; count > 0 && size > 0; count--) {
        uint64_t value = next_random(state);
        copy[next_random(state) % size] =
            value & 1 ? (uint8_t)(value >> 8) : (uint8_t)telling[(value >> 8) % sizeof telling];
    }
    if (next_random(state) % 8 == 0 && size > 0)
        size = next_random(state) % size;
    LLVMFuzzerTestOneInput(copy, size);
    free(copy);
}

int main(int count, char **arguments) {
    long changes = 1000;
    int first = 1;
    if (count > 2 && strcmp(arguments[1], "-n") == 0) {
        changes = strtol(arguments[2], NULL, 10);
        first = 3;
    }
    uint64_t state = 1;
    for (int i = first; i < count; i++) {
        size_t size;
        uint8_t *data = read_input(arguments[i], &size);
        if (!data) {
            fprintf(stderr, "%s: cannot read\n", arguments[i]);
            return EXIT_FAILURE;
        }
        LLVMFuzzerTestOneInput(data, size);
        for (long change = 0; change < changes; change++)
            run_changed(data, size, &state);
        free(data);
    }
    if (first >= count) {
        fprintf(stderr, "no input file named\n");
        return EXIT_FAILURE;
    }
    printf("%d files, %ld changes each\n", count - first, changes);
    return EXIT_SUCCESS;
}
