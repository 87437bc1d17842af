// SPDX-License-Identifier: Apache-2.0
// Setters of single values. Range checks are written !(x >= low && x <= high) after the cast to the type that is kept,
// so that neither a NaN nor a double that overflows a float passes. Pool threads.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "server/request_fields.h"

void srv_refuse_type(const srv_reading *in, const char *wanted) {
    srv_refuse(in->problem, 400, "invalid_type", in->field->name, "%s must be %s", in->field->name, wanted);
}

void srv_refuse_range(const srv_reading *in, double low, double high) {
    srv_refuse(in->problem, 400, "out_of_range", in->field->name, "%s must be between %.15g and %.15g", in->field->name,
               low, high);
}

void srv_field_range(const srv_field *field, const srv_bounds *bounds, double *low, double *high) {
    *low = field->low;
    *high = field->high;
    switch (field->bound) {
    case SRV_BOUND_NONE:
        return;
    case SRV_BOUND_MAX_TOKENS:
        *high = (double)bounds->max_tokens;
        return;
    case SRV_BOUND_CG_TOLERANCE: // 0 asks for an exact solve, which has a permission of its own
        *low = bounds->allow_exact ? 0 : bounds->min_cg_tolerance;
        return;
    case SRV_BOUND_CG_STEPS:
        *high = fmin(*high, (double)bounds->max_cg_steps);
        return;
    case SRV_BOUND_LOOPS:
        *high = fmin(*high, (double)bounds->max_loops);
        return;
    }
}

// ---- numbers -------------------------------------------------------------------------------------------------------

bool srv_read_integer(const json_t *value, int64_t *out) {
    if (json_is_integer(value)) {
        *out = json_integer_value(value);
        return true;
    }
    if (!json_is_real(value))
        return false;
    const double real = json_real_value(value);
    if (!(fabs(real) <= 9007199254740992.0) || real != trunc(real))
        return false;
    *out = (int64_t)real;
    return true;
}

bool srv_read_ranged(const srv_reading *in, const json_t *value, double low, double high, int64_t *out) {
    if (!json_is_number(value)) {
        srv_refuse_type(in, "an integer");
        return false;
    }
    // A real outside of int64 is out of range rather than no integer.
    if (json_is_real(value) && !(json_real_value(value) >= low && json_real_value(value) <= high)) {
        srv_refuse_range(in, low, high);
        return false;
    }
    if (!srv_read_integer(value, out)) {
        srv_refuse_type(in, "an integer");
        return false;
    }
    if (!((double)*out >= low && (double)*out <= high)) {
        srv_refuse_range(in, low, high);
        return false;
    }
    return true;
}

void srv_set_int64(const srv_reading *in, json_t *value, void *target) {
    double low, high;
    srv_field_range(in->field, in->bounds, &low, &high);
    srv_read_ranged(in, value, low, high, target);
}

void srv_set_int32(const srv_reading *in, json_t *value, void *target) {
    int64_t integer;
    double low, high;
    srv_field_range(in->field, in->bounds, &low, &high);
    if (srv_read_ranged(in, value, low, high, &integer))
        *(int32_t *)target = (int32_t)integer;
}

void srv_set_float(const srv_reading *in, json_t *value, void *target) {
    double low, high;
    if (!json_is_number(value)) {
        srv_refuse_type(in, "a number");
        return;
    }
    srv_field_range(in->field, in->bounds, &low, &high);
    const float number = (float)json_number_value(value);
    if (!(number >= (float)low && number <= (float)high)) {
        srv_refuse_range(in, low, high);
        return;
    }
    *(float *)target = number;
}

void srv_set_seed(const srv_reading *in, json_t *value, void *target) {
    srv_request *request = (srv_request *)((char *)target - in->field->offset);
    if (!srv_read_integer(value, &request->seed))
        srv_refuse_type(in, "an integer of 64 bits");
    else
        request->seed_given = true;
}

void srv_set_bool(const srv_reading *in, json_t *value, void *target) {
    if (json_is_boolean(value))
        *(bool *)target = json_is_true(value);
    else
        srv_refuse_type(in, "true or false");
}

// ---- strings -------------------------------------------------------------------------------------------------------

char *srv_copy_bytes(const srv_reading *in, const char *bytes, size_t length) {
    char *copy = malloc(length + 1);
    if (!copy) {
        srv_refuse_engine(in->problem, ENG_NO_MEMORY, NULL);
        return NULL;
    }
    memcpy(copy, bytes, length);
    copy[length] = '\0';
    return copy;
}

void srv_set_model(const srv_reading *in, json_t *value, void *target) {
    if (!json_is_string(value)) {
        srv_refuse_type(in, "a string");
        return;
    }
    const size_t length = json_string_length(value);
    // A NUL ends no name: such a name is nobody's.
    if (memchr(json_string_value(value), '\0', length))
        srv_refuse(in->problem, 404, "model_not_found", "model", "there is no such model; GET /v1/models lists them");
    else
        *(char **)target = srv_copy_bytes(in, json_string_value(value), length);
}

void srv_set_session(const srv_reading *in, json_t *value, void *target) {
    if (!json_is_string(value))
        srv_refuse_type(in, "a string");
    else if (memchr(json_string_value(value), '\0', json_string_length(value)))
        srv_refuse(in->problem, 404, "session_not_found", "session", "there is no such session");
    else
        *(char **)target = srv_copy_bytes(in, json_string_value(value), json_string_length(value));
}

// Accepted and not used.
void srv_check_string(const srv_reading *in, json_t *value, void *target) {
    (void)target;
    if (!json_is_string(value))
        srv_refuse_type(in, "a string");
}

static bool is_text(const json_t *value, const char *text) {
    return json_is_string(value) && json_string_length(value) == strlen(text) &&
           memcmp(json_string_value(value), text, strlen(text)) == 0;
}

void srv_set_cg_mode(const srv_reading *in, json_t *value, void *target) {
    static const struct {
        const char *name;
        eng_cg_mode mode;
    } modes[] = {{"tolerance", ENG_CG_TOLERANCE}, {"steps", ENG_CG_STEPS}, {"exact", ENG_CG_EXACT}};

    for (size_t i = 0; i < sizeof modes / sizeof *modes; i++)
        if (is_text(value, modes[i].name)) {
            *(eng_cg_mode *)target = modes[i].mode;
            return;
        }
    srv_refuse(in->problem, 400, "invalid_value", "cg_mode", "cg_mode must be tolerance, steps or exact");
}

void srv_set_on_unconverged(const srv_reading *in, json_t *value, void *target) {
    if (is_text(value, "accept") || is_text(value, "error"))
        *(bool *)target = is_text(value, "error");
    else
        srv_refuse(in->problem, 400, "invalid_value", "on_unconverged", "on_unconverged must be accept or error");
}

void srv_set_degrade(const srv_reading *in, json_t *value, void *target) {
    static const srv_field floors[] = {
        {.name = "degrade.cg_tolerance",
         .set = srv_set_float,
         .offset = offsetof(srv_degrade, cg_tolerance),
         .high = 1,
         .given = SRV_GIVEN_CG_TOLERANCE},
        {.name = "degrade.cg_max_steps",
         .set = srv_set_int32,
         .offset = offsetof(srv_degrade, cg_max_steps),
         .high = SRV_MAX_CG_STEPS,
         .given = SRV_GIVEN_CG_MAX_STEPS},
        {.name = "degrade.exit_threshold",
         .set = srv_set_float,
         .offset = offsetof(srv_degrade, exit_threshold),
         .high = 1,
         .given = SRV_GIVEN_EXIT_THRESHOLD},
    };
    srv_degrade *degrade = target;

    if (!json_is_object(value)) {
        srv_refuse_type(in, "an object");
        return;
    }
    for (size_t i = 0; i < sizeof floors / sizeof *floors; i++) {
        json_t *floor = json_object_get(value, strchr(floors[i].name, '.') + 1);
        if (!floor || json_is_null(floor))
            continue;
        degrade->given |= floors[i].given;
        floors[i].set(&(srv_reading){.field = &floors[i], .bounds = in->bounds, .problem = in->problem}, floor,
                      (char *)degrade + floors[i].offset);
    }
}

void srv_set_stream_options(const srv_reading *in, json_t *value, void *target) {
    srv_request *request = (srv_request *)((char *)target - in->field->offset);
    static const struct {
        const char *key, *name;
        size_t offset;
    } options[] = {
        {"include_usage", "stream_options.include_usage", offsetof(srv_request, include_usage)},
        {"continuous_usage_stats", "stream_options.continuous_usage_stats", offsetof(srv_request, continuous_usage)},
    };

    if (!json_is_object(value)) {
        srv_refuse_type(in, "an object");
        return;
    }
    for (size_t i = 0; i < sizeof options / sizeof *options; i++) {
        json_t *option = json_object_get(value, options[i].key);
        if (json_is_boolean(option))
            *(bool *)((char *)request + options[i].offset) = json_is_true(option);
        else if (option && !json_is_null(option))
            srv_refuse(in->problem, 400, "invalid_type", options[i].name, "%s must be true or false", options[i].name);
    }
}

// ---- what is known but not built -----------------------------------------------------------------------------------

static void refuse_unbuilt(const srv_reading *in) {
    srv_refuse(in->problem, 400, "not_supported", in->field->name,
               "%s is not supported by this server; only its neutral value %s", in->field->name, in->field->fallback);
}

void srv_neutral_false(const srv_reading *in, json_t *value, void *target) {
    (void)target;
    if (!json_is_boolean(value))
        srv_refuse_type(in, "true or false");
    else if (json_is_true(value))
        refuse_unbuilt(in);
}

// An empty list, object or string.
void srv_neutral_empty(const srv_reading *in, json_t *value, void *target) {
    const bool empty = (json_is_array(value) && json_array_size(value) == 0) ||
                       (json_is_object(value) && json_object_size(value) == 0) ||
                       (json_is_string(value) && json_string_length(value) == 0);
    (void)target;
    if (!empty)
        refuse_unbuilt(in);
}

void srv_neutral_null(const srv_reading *in, json_t *value, void *target) {
    (void)value;
    (void)target;
    refuse_unbuilt(in);
}

void srv_neutral_format(const srv_reading *in, json_t *value, void *target) {
    (void)target;
    if (!is_text(json_object_get(value, "type"), "text"))
        refuse_unbuilt(in);
}

void srv_neutral_choice(const srv_reading *in, json_t *value, void *target) {
    (void)target;
    if (!is_text(value, "none") && !is_text(value, "auto"))
        refuse_unbuilt(in);
}
