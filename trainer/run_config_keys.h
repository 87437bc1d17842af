// SPDX-License-Identifier: Apache-2.0
// The table of run.ini's keys, shared by its reader and its writer; nobody else includes it.
// The reader fills the members by these offsets, the writer prints them; nothing else knows the kinds.
#ifndef TRAINER_RUN_CONFIG_KEYS_H
#define TRAINER_RUN_CONFIG_KEYS_H

#include <stddef.h>

#include "trainer/run_config.h"

typedef enum trn_key_kind { TRN_KEY_TEXT, TRN_KEY_INTEGER, TRN_KEY_REAL, TRN_KEY_CHOICE } trn_key_kind;

typedef struct trn_run_key {
    const char *section, *name;
    trn_key_kind kind;
    size_t offset; // of char *, int64_t, double or int64_t in trn_run_config
    const char *fallback;
    double least, most;
    const char *const *choice; // CHOICE: names by value, NULL at the end
} trn_run_key;

extern const trn_run_key trn_run_keys[];
extern const int trn_run_key_count;

#endif
