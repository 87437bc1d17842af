// SPDX-License-Identifier: Apache-2.0
// See log.h.
// The text is made only where somebody listens.
#include "engine/log.h"

#include <stdarg.h>
#include <stdio.h>

void eng_log(eng_logger logger, eng_log_level level, const char *format, ...) {
    char text[512];
    va_list arguments;
    if (!logger.write)
        return;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    logger.write(logger.context, level, text);
}
