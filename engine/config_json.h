// SPDX-License-Identifier: Apache-2.0
// JSON files of a checkpoint folder: parsing with the one liberty that public writers take, and typed keys.
//
// Public config.json files may hold a bare Infinity, -Infinity or NaN, which is no JSON; it is read as a number, and
// written back as it was. Everything else is strict: one object, no duplicate key, nothing behind it.
// An eng_keys reads one object. Its first fault sticks: later reads give the fallback, so that a caller reads all it
// needs and looks at the status once. A key that is absent or null gives the fallback. A key that the object does not
// hold is looked for in those around it. For the engine's readers only.
#ifndef ENGINE_CONFIG_JSON_H
#define ENGINE_CONFIG_JSON_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/status.h"

// Parses a text that must be one object. *out is new: json_decref. path only names the text in errors.
ENG_CHECKED eng_status eng_json_parse(const char *text, size_t length, const char *path, json_t **out,
                                      eng_error *error);
// Reads and parses a file of at most limit bytes. *text (may be NULL): its bytes with a NUL behind, new.
ENG_CHECKED eng_status eng_json_read(const char *path, size_t limit, json_t **out, char **text, eng_error *error);
// The text of an object as public tools write it, with a final newline. Returns new (free); NULL: out of memory.
char *eng_json_write(const json_t *object);

typedef struct eng_keys {
    const json_t *object;
    const char *path;  // of the file, for errors
    const char *scope; // in front of a key in errors: "" or "attn."
    eng_status status;
    eng_error *error;             // may be NULL
    const struct eng_keys *outer; // NULL: none
} eng_keys;

// Reports "PATH: SCOPE KEY: text" unless there was a fault before; returns the status.
eng_status eng_keys_fail(eng_keys *keys, eng_status code, const char *key, const char *format, ...) ENG_PRINTF(4, 5);
const json_t *eng_keys_value(const eng_keys *keys, const char *key); // NULL: absent, null, or a fault before
int64_t eng_keys_integer(eng_keys *keys, const char *key, int64_t fallback, int64_t least, int64_t most);
double eng_keys_number(eng_keys *keys, const char *key, double fallback, double least, double most);
bool eng_keys_flag(eng_keys *keys, const char *key, bool fallback);
const char *eng_keys_text(eng_keys *keys, const char *key, const char *fallback); // borrowed from the object

#endif
