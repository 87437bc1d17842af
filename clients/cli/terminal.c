// SPDX-License-Identifier: Apache-2.0
// Writes text so that a terminal only shows it; see terminal.h.
// Newline and tab pass; C0, DEL and the two-byte C1 controls do not.
#include "clients/cli/terminal.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "clients/cli/cli.h"

// Bytes of the control character at text, 0: it is none.
static size_t control_length(const char *text, size_t length) {
    const unsigned char first = (unsigned char)text[0];
    if ((first < ' ' && first != '\n' && first != '\t') || first == 0x7f)
        return 1;
    if (first == 0xc2 && length > 1 && (unsigned char)text[1] < 0xa0)
        return 2;
    return 0;
}

void cli_put_text(const char *text, size_t length, bool terminal) {
    if (!terminal) {
        fwrite(text, 1, length, stdout);
        return;
    }
    size_t shown = 0;
    for (size_t at = 0; at < length;) {
        const size_t control = control_length(text + at, length - at);
        if (!control) {
            at++;
            continue;
        }
        fwrite(text + shown, 1, at - shown, stdout);
        fputs("\xef\xbf\xbd", stdout);
        at += control;
        shown = at;
    }
    fwrite(text + shown, 1, length - shown, stdout);
}

bool cli_finish_output(void) {
    errno = 0;
    if (fflush(stdout) == 0 && !ferror(stdout))
        return true;
    cli_complain("standard output: %s", errno ? strerror(errno) : "cannot be written");
    return false;
}
