// SPDX-License-Identifier: Apache-2.0
// The only place of the trainer that reads or writes JSON.
// Readers name file and key in every error; builders remember a failure and report it once, when the text is taken.
#ifndef TRAINER_JSONL_H
#define TRAINER_JSONL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/status.h"

typedef struct trn_json trn_json; // one object, read or being built

// Reads a file that holds one JSON object. Errors name the file and the place.
ENG_CHECKED eng_status trn_json_read(const char *path, trn_json **out, eng_error *error);
// The same from memory; origin names the text in errors.
ENG_CHECKED eng_status trn_json_parse(const char *text, size_t length, const char *origin, trn_json **out,
                                      eng_error *error);
// A config.json, which may hold a bare Infinity as public writers leave it.
ENG_CHECKED eng_status trn_json_read_config(const char *path, trn_json **out, eng_error *error);
void trn_json_free(trn_json *json);
const char *trn_json_origin(const trn_json *json); // what errors name
bool trn_json_has(const trn_json *json, const char *key);
bool trn_json_is_number(const trn_json *json, const char *key);
// Members; a missing one or one of another type is ENG_FORMAT and names file and key.
ENG_CHECKED eng_status trn_json_real(const trn_json *json, const char *key, double *out, eng_error *error);
ENG_CHECKED eng_status trn_json_integer(const trn_json *json, const char *key, int64_t *out, eng_error *error);
ENG_CHECKED eng_status trn_json_string(const trn_json *json, const char *key, const char **out, eng_error *error);
// An array of ids 0..limit-1. *ids is new memory (free).
ENG_CHECKED eng_status trn_json_ids(const trn_json *json, const char *key, int32_t limit, int32_t **ids, int32_t *count,
                                    eng_error *error);
// An array of strings. *list is new memory (free), the strings are the object's.
ENG_CHECKED eng_status trn_json_strings(const trn_json *json, const char *key, const char ***list, int32_t *count,
                                        eng_error *error);
// An array of numbers; null is NAN. *list is new memory (free).
ENG_CHECKED eng_status trn_json_reals(const trn_json *json, const char *key, double **list, int64_t *count,
                                      eng_error *error);
// Calls visit for every entry of the array `key`, all of which must be objects, until it fails. entry is borrowed; its
// errors name the file, the array and the place.
ENG_CHECKED eng_status trn_json_each_object(const trn_json *json, const char *key,
                                            eng_status (*visit)(void *context, const trn_json *entry, eng_error *error),
                                            void *context, eng_error *error);
// Calls visit for every member of the object `key`, all of which must be strings, until it fails.
ENG_CHECKED eng_status trn_json_each_string(const trn_json *json, const char *key,
                                            eng_status (*visit)(void *context, const char *name, const char *value),
                                            void *context, eng_error *error);

// Building. An empty object; NULL: out of memory. A set that fails for lack of memory is reported by trn_json_text.
// Members are written in the order in which they were set; reals in full precision, those not finite as null.
trn_json *trn_json_create(void);
void trn_json_set_integer(trn_json *json, const char *key, int64_t value);
void trn_json_set_real(trn_json *json, const char *key, double value);
void trn_json_set_string(trn_json *json, const char *key, const char *value);
void trn_json_set_object(trn_json *json, const char *key, trn_json *value); // takes value
void trn_json_add_object(trn_json *json, const char *key, trn_json *value); // takes value: the next of an array
void trn_json_set_reals(trn_json *json, const char *key, const double *values, int64_t count);
void trn_json_set_strings(trn_json *json, const char *key, char *const *values, int32_t count);
// A JSON value where text is one, otherwise the text as a string.
void trn_json_set_text(trn_json *json, const char *key, const char *text);
// Calls visit with every member's value as JSON on one line.
ENG_CHECKED eng_status trn_json_each_text(const trn_json *json,
                                          eng_status (*visit)(void *context, const char *key, const char *text),
                                          void *context, eng_error *error);
// The object on one line, or indented with a final line end. Returns new (free); NULL: out of memory, also in a set
// before.
char *trn_json_text(const trn_json *json, bool indented);

#endif
