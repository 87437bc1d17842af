// SPDX-License-Identifier: Apache-2.0
// The only place of the trainer that reads or writes JSON.
#ifndef TRAINER_JSONL_H
#define TRAINER_JSONL_H

#include <stddef.h>
#include <stdint.h>

#include "engine/status.h"

typedef struct trn_json trn_json; // one object read from a file

// Reads a file that holds one JSON object. Errors name the file and the place.
ENG_CHECKED eng_status trn_json_read(const char *path, trn_json **out, eng_error *error);
void trn_json_free(trn_json *json);
// Members; a missing one or one of another type is ENG_FORMAT and names file and key.
ENG_CHECKED eng_status trn_json_real(const trn_json *json, const char *key, double *out, eng_error *error);
ENG_CHECKED eng_status trn_json_integer(const trn_json *json, const char *key, int64_t *out, eng_error *error);
ENG_CHECKED eng_status trn_json_string(const trn_json *json, const char *key, const char **out, eng_error *error);
// An array of ids 0..limit-1. *ids is new memory (free).
ENG_CHECKED eng_status trn_json_ids(const trn_json *json, const char *key, int32_t limit, int32_t **ids, int32_t *count,
                                    eng_error *error);

#endif
