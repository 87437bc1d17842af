// SPDX-License-Identifier: Apache-2.0
// Private to config.c and config_print.c: what a row of the table of options is.
//
// The rows are constant; config.c owns them, config_print.c writes them out as help and as a file.
#ifndef SERVER_CONFIG_PRIVATE_H
#define SERVER_CONFIG_PRIVATE_H

#include "server/config.h"

typedef enum srv_option_kind {
    SRV_OPTION_MODELS,
    SRV_OPTION_LISTENERS,
    SRV_OPTION_LISTENER,
    SRV_OPTION_TEXT,
    SRV_OPTION_PATH,
    SRV_OPTION_INTEGER,
    SRV_OPTION_AUTO,
    SRV_OPTION_BYTES,
    SRV_OPTION_AUTO_BYTES,
    SRV_OPTION_SECONDS,
    SRV_OPTION_NUMBER,
    SRV_OPTION_YES_NO,
    SRV_OPTION_MODE,
    SRV_OPTION_LEVEL,
    SRV_OPTION_STORAGE,
    SRV_OPTION_KINDS
} srv_option_kind;
typedef struct srv_option {
    const char *name;
    srv_option_kind kind;
    size_t offset; // of the member of srv_config
    double low, high;
    const char *fallback; // NULL: none
    const char *argument, *about;
} srv_option;

extern const srv_option srv_config_options[];
extern const size_t srv_config_option_count;
extern const char *const *const srv_config_choices[SRV_OPTION_KINDS]; // by value, NULL behind the last; NULL: any text

#endif
