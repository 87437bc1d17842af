// SPDX-License-Identifier: Apache-2.0
// Atomic writer of .safetensors files.
//
// Refuses what the reader would refuse: names, shapes and header pass the same limits, so a file that was written can
// be read back. The widest elements come first, which keeps each tensor aligned for programs that map the file; the
// header is padded with spaces to a multiple of 8. No thread of its own; blocks on the disk.
#include "engine/safetensors.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "engine/files.h"
#include "engine/safetensors_header.h"

typedef struct placed {
    const eng_st_source *source;
    size_t index; // in the caller's order
    int64_t count;
    uint64_t bytes;
} placed;

static int widest_first(const void *left, const void *right) {
    const placed *a = left, *b = right;
    size_t wide_a = eng_dtype_size(a->source->dtype), wide_b = eng_dtype_size(b->source->dtype);
    if (wide_a != wide_b)
        return wide_a > wide_b ? -1 : 1;
    return a->index < b->index ? -1 : a->index > b->index;
}

static eng_status refuse(const char *path, const eng_st_source *source, const char *fault, eng_error *error) {
    return eng_fail(error, ENG_INVALID, "%s: tensor '%.64s': %s", eng_path_tail(path), source->name, fault);
}

static eng_status check_source(const char *path, placed *tensor, eng_error *error) {
    const eng_st_source *source = tensor->source;
    if (!source->name)
        return eng_fail(error, ENG_INVALID, "%s: tensor %zu has no name", eng_path_tail(path), tensor->index);
    if (strlen(source->name) > ENG_ST_MAX_NAME)
        return refuse(path, source, "its name is too long", error);
    if (strcmp(source->name, ENG_ST_METADATA_KEY) == 0)
        return refuse(path, source, "this name is reserved", error);
    if (!eng_shape_size(source->dtype, source->ndim, source->shape, &tensor->count, &tensor->bytes))
        return refuse(path, source, "unknown dtype or impossible shape", error);
    if (tensor->count > 0 && !source->data && !source->read)
        return refuse(path, source, "no data", error);
    return ENG_OK;
}

static eng_status place(const char *path, const eng_st_source *tensors, size_t count, placed *order, eng_error *error) {
    for (size_t i = 0; i < count; i++) {
        order[i] = (placed){.source = &tensors[i], .index = i};
        eng_status status = check_source(path, &order[i], error);
        if (status != ENG_OK)
            return status;
    }
    qsort(order, count, sizeof *order, widest_first);
    return ENG_OK;
}

static eng_status add_metadata(json_t *header, const char *path, const char *const *metadata, eng_error *error) {
    if (!metadata || !metadata[0])
        return ENG_OK;
    json_t *pairs = json_object();
    if (json_object_set_new(header, ENG_ST_METADATA_KEY, pairs) != 0)
        return eng_fail(error, ENG_NO_MEMORY, "%s: no memory for its header", eng_path_tail(path));
    for (size_t i = 0; metadata[i]; i += 2) {
        const char *key = metadata[i], *value = metadata[i + 1];
        if (!value || json_object_get(pairs, key) || i / 2 >= ENG_ST_MAX_METADATA ||
            json_object_set_new(pairs, key, json_string(value)) != 0) {
            return eng_fail(error, ENG_INVALID, "%s: metadata '%.64s' has no value, is there twice or is not UTF-8",
                            eng_path_tail(path), key);
        }
    }
    return ENG_OK;
}

static json_t *describe(const placed *tensor, uint64_t begin) {
    json_t *shape = json_array();
    for (int i = 0; i < tensor->source->ndim; i++) {
        if (json_array_append_new(shape, json_integer(tensor->source->shape[i])) != 0) {
            json_decref(shape);
            return NULL;
        }
    }
    return json_pack("{s:s, s:o, s:[I, I]}", "dtype", eng_dtype_name(tensor->source->dtype), "shape", shape,
                     "data_offsets", (json_int_t)begin, (json_int_t)(begin + tensor->bytes));
}

static eng_status add_tensors(json_t *header, const char *path, const placed *order, size_t count, eng_error *error) {
    uint64_t begin = 0;
    for (size_t i = 0; i < count; i++) {
        const eng_st_source *source = order[i].source;
        if (order[i].bytes > (uint64_t)INT64_MAX - begin)
            return refuse(path, source, "the file would be larger than 2^63 bytes", error);
        if (json_object_get(header, source->name))
            return refuse(path, source, "this name is there twice", error);
        if (json_object_set_new(header, source->name, describe(&order[i], begin)) != 0)
            return refuse(path, source, "its name is not UTF-8, or no memory for the header", error);
        begin += order[i].bytes;
    }
    return ENG_OK;
}

// *text is new: the length field, the JSON and its padding.
static eng_status render_header(const json_t *header, const char *path, char **text, size_t *length, eng_error *error) {
    size_t json_length = json_dumpb(header, NULL, 0, JSON_COMPACT);
    size_t padded = (json_length + 7) / 8 * 8;
    if (padded > ENG_ST_MAX_HEADER)
        return eng_fail(error, ENG_TOO_LONG, "%s: a header of %zu bytes", eng_path_tail(path), padded);
    char *bytes = malloc(ENG_ST_LENGTH_FIELD + padded);
    if (!bytes || json_length == 0 ||
        json_dumpb(header, bytes + ENG_ST_LENGTH_FIELD, json_length, JSON_COMPACT) != json_length) {
        free(bytes);
        return eng_fail(error, ENG_NO_MEMORY, "%s: no memory for its header", eng_path_tail(path));
    }
    memset(bytes + ENG_ST_LENGTH_FIELD + json_length, ' ', padded - json_length);
    uint64_t field = padded;
    memcpy(bytes, &field, sizeof field);
    *text = bytes;
    *length = ENG_ST_LENGTH_FIELD + padded;
    return ENG_OK;
}

static eng_status make_header(const char *path, const placed *order, size_t count, const char *const *metadata,
                              char **text, size_t *length, eng_error *error) {
    json_t *header = json_object();
    if (!header)
        return eng_fail(error, ENG_NO_MEMORY, "%s: no memory for its header", eng_path_tail(path));
    eng_status status = add_metadata(header, path, metadata, error);
    if (status == ENG_OK)
        status = add_tensors(header, path, order, count, error);
    if (status == ENG_OK)
        status = render_header(header, path, text, length, error);
    json_decref(header);
    return status;
}

static eng_status write_narrow(eng_output *output, const float *values, int64_t count, eng_error *error) {
    uint16_t stored[ENG_ST_PIECE];
    for (int64_t i = 0; i < count; i++)
        stored[i] = eng_bf16_from_f32(values[i]);
    return eng_output_write(output, stored, (size_t)count * sizeof *stored, error);
}

static eng_status write_pieces(eng_output *output, const placed *tensor, eng_error *error) {
    const eng_st_source *source = tensor->source;
    const bool narrow = source->dtype == ENG_BF16;
    const size_t size = narrow ? sizeof(float) : eng_dtype_size(source->dtype); // of an element of data
    double read[ENG_ST_PIECE];                                                  // of the widest type
    eng_status status = ENG_OK;
    for (int64_t done = 0; done < tensor->count && status == ENG_OK; done += ENG_ST_PIECE) {
        int64_t piece = tensor->count - done < ENG_ST_PIECE ? tensor->count - done : ENG_ST_PIECE;
        const void *values = source->read ? (const void *)read : (const char *)source->data + (size_t)done * size;
        if (source->read)
            status = source->read(source->context, done, piece, read, error);
        if (status == ENG_OK)
            status = narrow ? write_narrow(output, values, piece, error)
                            : eng_output_write(output, values, (size_t)piece * size, error);
    }
    return status;
}

static eng_status write_tensors(eng_output *output, const placed *order, size_t count, eng_error *error) {
    eng_status status = ENG_OK;
    for (size_t i = 0; i < count && status == ENG_OK; i++) {
        const eng_st_source *source = order[i].source;
        if (source->dtype == ENG_BF16 || source->read)
            status = write_pieces(output, &order[i], error);
        else
            status = eng_output_write(output, source->data, (size_t)order[i].bytes, error);
    }
    return status;
}

eng_status eng_st_write(const char *path, const eng_st_source *tensors, size_t count, const char *const *metadata,
                        eng_error *error) {
    if (count > ENG_ST_MAX_TENSORS)
        return eng_fail(error, ENG_TOO_LONG, "%s: %zu tensors", eng_path_tail(path), count);
    char *header = NULL;
    size_t header_length = 0;
    eng_output *output = NULL;
    eng_status status;
    placed *order = calloc(count + 1, sizeof *order);
    if (!order)
        return eng_fail(error, ENG_NO_MEMORY, "%s: no memory", eng_path_tail(path));
    status = place(path, tensors, count, order, error);
    if (status == ENG_OK)
        status = make_header(path, order, count, metadata, &header, &header_length, error);
    if (status == ENG_OK)
        status = eng_output_open(path, &output, error);
    if (status == ENG_OK)
        status = eng_output_write(output, header, header_length, error);
    if (status == ENG_OK)
        status = write_tensors(output, order, count, error);
    if (status == ENG_OK) {
        status = eng_output_commit(output, error);
        output = NULL;
    }
    eng_output_discard(output);
    free(header);
    free(order);
    return status;
}
