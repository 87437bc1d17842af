// SPDX-License-Identifier: Apache-2.0
// The tables of fields as JSON Schema: what a row says of ranges and defaults is what its setter checks.
// Optional fields take null as well, as if they were absent; unknown fields are allowed. Any thread.
#include <string.h>

#include "server/json_writer.h"
#include "server/request_fields.h"

static void write_range(srv_buf *out, const srv_field *field, const srv_bounds *bounds) {
    double low, high;

    srv_field_range(field, bounds, &low, &high);
    if (low == high)
        return;
    if (high >= 0x1p63) // the widest integer, which a double cannot say
        srv_buf_puts(out, ",\"minimum\":-9223372036854775808,\"maximum\":9223372036854775807");
    else
        srv_buf_printf(out, ",\"minimum\":%.15g,\"maximum\":%.15g", low, high);
}

static void write_type(srv_buf *out, const srv_field *field, const srv_bounds *bounds) {
    const bool required = !field->fallback;

    if (field->type) {
        srv_buf_printf(out, required ? "\"type\":\"%s\"" : "\"type\":[\"%s\",\"null\"]", field->type);
        if (strcmp(field->type, "integer") == 0 || strcmp(field->type, "number") == 0)
            write_range(out, field, bounds);
    } else if (required) {
        srv_json_literal(out, field->schema);
    } else {
        srv_json_literal(out, "'anyOf':[{");
        srv_json_literal(out, field->schema);
        srv_json_literal(out, "},{'type':'null'}]");
    }
}

static void write_property(srv_buf *out, const srv_field *field, const srv_bounds *bounds) {
    srv_json_text(out, field->name);
    srv_buf_puts(out, ":{");
    write_type(out, field, bounds);
    if (field->fallback) {
        srv_buf_puts(out, ",\"default\":");
        srv_buf_puts(out, field->fallback);
    }
    srv_buf_puts(out, ",\"description\":");
    srv_json_text(out, field->about);
    srv_buf_puts(out, "}");
}

void srv_request_write_schema(srv_buf *out, srv_request_kind kind, const srv_bounds *bounds) {
    const srv_field_table *whole = srv_fields(kind);
    const char *separator = "";

    srv_json_literal(out, "{'type':'object','propertyNames':{'$ref':'#/components/schemas/key'},"
                          "'additionalProperties':{'$ref':'#/components/schemas/anything'},'properties':{");
    for (const srv_field_table *table = whole; table; table = table->more)
        for (size_t i = 0; i < table->count; i++) {
            srv_buf_puts(out, separator);
            write_property(out, &table->rows[i], bounds);
            separator = ",";
        }
    srv_buf_puts(out, "},\"required\":[");
    separator = "";
    for (const srv_field_table *table = whole; table; table = table->more)
        for (size_t i = 0; i < table->count; i++)
            if (!table->rows[i].fallback) {
                srv_buf_puts(out, separator);
                srv_json_text(out, table->rows[i].name);
                separator = ",";
            }
    srv_buf_puts(out, "]");
    if (whole->conditions) {
        srv_buf_puts(out, ",");
        srv_json_literal(out, whole->conditions);
    }
    srv_buf_puts(out, "}");
}
