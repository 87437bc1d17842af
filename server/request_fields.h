// SPDX-License-Identifier: Apache-2.0
// Private to the request's files: what a row of a table of fields is, and the setters that rows name.
//
// One row validates a field and documents it: its range, default and text stand in both. request.c owns the tables,
// request_values.c and request_lists.c the setters, request_schema.c writes the rows out as JSON Schema. Pool threads.
#ifndef SERVER_REQUEST_FIELDS_H
#define SERVER_REQUEST_FIELDS_H

#include <jansson.h>

#include "server/request.h"

typedef struct srv_field srv_field;

// What a setter works with, beside the value.
typedef struct srv_reading {
    const srv_field *field;
    const srv_bounds *bounds;
    srv_problem *problem; // refuses through it
} srv_reading;
// Sets the member at target from a value that is not null.
typedef void srv_setter(const srv_reading *in, json_t *value, void *target);

// Which of the configuration's bounds narrows the row's range.
typedef enum srv_bound {
    SRV_BOUND_NONE,
    SRV_BOUND_MAX_TOKENS,
    SRV_BOUND_CG_TOLERANCE,
    SRV_BOUND_CG_STEPS,
    SRV_BOUND_LOOPS
} srv_bound;

struct srv_field {
    const char *name;
    const char *type; // integer, number (with the range), boolean or string; NULL: schema says all
    srv_setter *set;
    size_t offset;        // of the member
    double low, high;     // of integers and numbers
    const char *fallback; // JSON text of the default; NULL: the field must be there
    const char *about;
    const char *schema; // members of a JSON Schema with ' for ", for what type and range do not say; NULL: none
    srv_bound bound;
    unsigned given; // SRV_GIVEN_* mark of a completion's knob
};

typedef struct srv_field_table {
    const srv_field *rows;
    size_t count;
    const struct srv_field_table *more; // rows that other bodies have as well; NULL: none
    const char *conditions; // members of the body's JSON Schema with ' for ", on more than one field; NULL: none
} srv_field_table;
const srv_field_table *srv_fields(srv_request_kind kind);

// The row's range within the configuration's bounds.
void srv_field_range(const srv_field *field, const srv_bounds *bounds, double *low, double *high);

// request_values.c
void srv_refuse_type(const srv_reading *in, const char *wanted);
void srv_refuse_range(const srv_reading *in, double low, double high);
// An integer, or a real without a fraction below 2^53.
bool srv_read_integer(const json_t *value, int64_t *out);
bool srv_read_ranged(const srv_reading *in, const json_t *value, double low, double high, int64_t *out);
// New memory with a NUL after the bytes; NULL with a refusal.
char *srv_copy_bytes(const srv_reading *in, const char *bytes, size_t length);
srv_setter srv_set_int32, srv_set_int64, srv_set_float, srv_set_bool, srv_set_seed, srv_set_model, srv_set_session,
    srv_set_cg_mode, srv_set_on_unconverged, srv_set_degrade, srv_set_stream_options, srv_check_string;
// What is known but not built: only its neutral value passes.
srv_setter srv_neutral_false, srv_neutral_empty, srv_neutral_null, srv_neutral_format, srv_neutral_choice;

// request_lists.c
srv_setter srv_set_prompt, srv_set_messages, srv_set_text, srv_set_ids, srv_set_stop, srv_set_stop_ids,
    srv_set_logit_bias;

#endif
