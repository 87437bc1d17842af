// SPDX-License-Identifier: Apache-2.0
// A folder of its own for each test case that writes files.
//
// The fixture of temp_folder.h; failures in here end the case.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "tests/engine/temp_folder.h"

#include <check.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "engine/files.h"

static char folder[64];

void temp_folder_make(void) {
    static const char prefix[] = "/tmp/mesa-test-";
    memset(folder, 0, sizeof folder);
    memcpy(folder, prefix, sizeof prefix - 1);
    memset(folder + sizeof prefix - 1, 'X', 6); // what mkdtemp replaces
    ck_assert_ptr_nonnull(mkdtemp(folder));
}

void temp_folder_remove(void) {
    ck_assert_int_eq(eng_remove_tree(folder, NULL), ENG_OK);
}

const char *temp_folder(void) {
    return folder;
}

const char *temp_path(const char *name) {
    static char paths[8][512];
    static unsigned next;
    char *path = paths[next++ % 8];
    snprintf(path, sizeof paths[0], "%s/%s", folder, name);
    return path;
}

void temp_write(const char *name, const void *data, size_t length) {
    FILE *file = fopen(temp_path(name), "wb");
    ck_assert_ptr_nonnull(file);
    ck_assert_uint_eq(fwrite(data, 1, length, file), length);
    ck_assert_int_eq(fclose(file), 0);
}

bool temp_holds(const char *name, const char *text) {
    FILE *file = fopen(temp_path(name), "rb");
    if (!file)
        return false;
    char found[4096];
    size_t length = fread(found, 1, sizeof found, file);
    fclose(file);
    return length == strlen(text) && memcmp(found, text, length) == 0;
}

bool temp_exists(const char *name) {
    return access(temp_path(name), F_OK) == 0;
}

void limit_file_size(size_t bytes) {
    signal(SIGXFSZ, SIG_IGN);
    struct rlimit limit = {bytes, bytes};
    ck_assert_int_eq(setrlimit(RLIMIT_FSIZE, &limit), 0);
}
