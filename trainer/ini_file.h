// SPDX-License-Identifier: Apache-2.0
// Reads an INI file value by value: what run.ini and a sweep's file have in common.
// Lines are told with what is wrong; keys and values are the caller's matter. Any thread.
#ifndef TRAINER_INI_FILE_H
#define TRAINER_INI_FILE_H

#include "engine/status.h"

typedef struct trn_ini_value {
    int line;
    const char *section;
    const char *name, *value; // NULL: the section begins
} trn_ini_value;

typedef eng_status (*trn_ini_visit)(void *context, const trn_ini_value *at, eng_error *fault);

// Calls visit where a section begins and with every value, until it fails; errors name file and line. A value that
// continues on indented lines is visited again for each.
ENG_CHECKED eng_status trn_ini_read(const char *path, trn_ini_visit visit, void *context, eng_error *error);

#endif
