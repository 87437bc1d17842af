// SPDX-License-Identifier: Apache-2.0
// INI files by inih; see ini_file.h.
// The parser is given lines one by one, so that they can be counted, and a section without a key is seen.
#include "trainer/ini_file.h"

#include <ini.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/files.h"

// The parser keeps a line in a buffer of 200 bytes and would take the rest for another line, and of a section's name it
// keeps 49.
enum { FILE_LIMIT = 1 << 20, LINE_LIMIT = 190, SECTION_SIZE = 50 };

typedef struct reading {
    const char *rest; // of the text
    int line;
    trn_ini_visit visit;
    void *context;
    eng_error fault;
} reading;

static void begin_section(reading *r, const char *line) {
    char name[SECTION_SIZE];
    const size_t length = strcspn(line + 1, "]");
    if (line[1 + length] != ']')
        return; // the parser refuses it
    if (length >= sizeof name) {
        eng_fail(&r->fault, ENG_INVALID, "a section's name is longer than %d bytes", SECTION_SIZE - 1);
        return;
    }
    snprintf(name, sizeof name, "%.*s", (int)length, line + 1);
    const trn_ini_value begin = {.line = r->line, .section = name};
    eng_status status = r->visit(r->context, &begin, &r->fault);
    if (status != ENG_OK)
        eng_fail(&r->fault, status, "%s", eng_status_text(status));
}

// What fgets does; nothing is read behind the first fault, which is the one that is told.
static char *next_line(char *line, int size, void *context) {
    reading *r = context;
    if (r->fault.code != ENG_OK || !*r->rest)
        return NULL;
    const size_t whole = strcspn(r->rest, "\n") + (strchr(r->rest, '\n') != NULL);
    const size_t taken = whole < (size_t)size ? whole : (size_t)size - 1;
    memcpy(line, r->rest, taken);
    line[taken] = '\0';
    r->rest += taken;
    r->line++;
    if (line[0] == '[')
        begin_section(r, line);
    return r->fault.code == ENG_OK ? line : NULL;
}

static int on_value(void *context, const char *section, const char *name, const char *value) {
    reading *r = context;
    const trn_ini_value at = {r->line, section, name, value ? value : ""};
    return r->visit(r->context, &at, &r->fault) == ENG_OK;
}

static eng_status check_lines(const char *path, const char *text, size_t length, eng_error *error) {
    int line = 1;
    for (size_t at = 0, start = 0; at < length; at++) {
        if (text[at] == '\0')
            return eng_fail(error, ENG_INVALID, "%s:%d: a NUL byte", path, line);
        if (text[at] == '\n') {
            start = at + 1;
            line++;
        } else if (at - start >= LINE_LIMIT) {
            return eng_fail(error, ENG_INVALID, "%s:%d: longer than %d bytes (indent to go on in the next line)", path,
                            line, LINE_LIMIT);
        }
    }
    return ENG_OK;
}

eng_status trn_ini_read(const char *path, trn_ini_visit visit, void *context, eng_error *error) {
    char *text = NULL;
    size_t length = 0;
    eng_status status = eng_read_file(path, FILE_LIMIT, &text, &length, error);
    if (status != ENG_OK)
        return status;
    status = check_lines(path, text, length, error);
    reading r = {.rest = text, .visit = visit, .context = context};
    const int line = status == ENG_OK ? ini_parse_stream(next_line, &r, on_value, &r) : 0;
    if (line > 0 && (r.fault.code == ENG_OK || line < r.line))
        status = eng_fail(error, ENG_INVALID, "%s:%d: neither [section] nor key = value", path, line);
    else if (r.fault.code != ENG_OK)
        status = eng_fail(error, r.fault.code, "%s:%d: %s", path, r.line, r.fault.text);
    free(text);
    return status;
}
