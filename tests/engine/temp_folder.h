// SPDX-License-Identifier: Apache-2.0
// A folder of its own for each test case that writes files, and small helpers to fill and look at it.
//
// The fixture makes it before a case and removes it after; with libcheck's processes each case has its own.
#ifndef TESTS_ENGINE_TEMP_FOLDER_H
#define TESTS_ENGINE_TEMP_FOLDER_H

#include <stdbool.h>
#include <stddef.h>

void temp_folder_make(void);
void temp_folder_remove(void);
const char *temp_folder(void);

// FOLDER/NAME in one of a few rotating buffers.
const char *temp_path(const char *name);
void temp_write(const char *name, const void *data, size_t length);
// Whether the file holds exactly this text.
bool temp_holds(const char *name, const char *text);
bool temp_exists(const char *name);
// Makes every write beyond this size fail as on a full disk, for the rest of the process.
void limit_file_size(size_t bytes);

#endif
