// SPDX-License-Identifier: Apache-2.0
// Words for whoever opened an engine or a store, by the function that they gave. Any thread; nothing is kept.
// Longer texts are cut.
#ifndef ENGINE_LOG_H
#define ENGINE_LOG_H

#include "engine/engine.h"

typedef struct eng_logger {
    eng_log_fn write; // NULL: nobody listens
    void *context;
} eng_logger;

void eng_log(eng_logger logger, eng_log_level level, const char *format, ...) ENG_PRINTF(3, 4);

#endif
