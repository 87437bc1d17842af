// SPDX-License-Identifier: Apache-2.0
// Strict reader of .safetensors files.
//
// Owns the descriptor and the table of entries; tensor data is read on demand with pread and never mapped, so a file
// that shrinks under a running program gives an error instead of SIGBUS. A file is refused whole or accepted whole:
// every byte belongs to the header or to exactly one tensor. What the format's description does not name (further keys
// in an entry, other element types) is refused rather than guessed at.
// After eng_st_open a file is immutable; any number of threads may read it.
#include "engine/safetensors.h"

#include <jansson.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/files.h"
#include "engine/safetensors_header.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "stored values are used without swapping");

enum { WIDEN_PIECE = 16384 };

struct eng_st_file {
    int fd;
    char *path;
    char *names;            // all of them, each with its NUL
    eng_st_entry *entries;  // in the order of their offsets
    eng_st_entry **by_name; // the same, in the order of strcmp
    size_t count;
    json_t *metadata; // object of strings; NULL: none
};

typedef struct reader {
    eng_st_file *file;
    eng_error *error;
    char *header; // header_length bytes
    size_t header_length;
    uint64_t data_begin;
    uint64_t data_bytes;
} reader;

__attribute__((format(printf, 4, 5))) static eng_status refuse(const reader *from, eng_status code, const char *tensor,
                                                               const char *format, ...) {
    char fault[160];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(fault, sizeof fault, format, arguments);
    va_end(arguments);
    const char *path = eng_path_tail(from->file->path);
    if (!tensor)
        return eng_fail(from->error, code, "%s: %s", path, fault);
    return eng_fail(from->error, code, "%s: tensor '%.64s': %s", path, tensor, fault);
}

static eng_status read_header(reader *from, uint64_t file_size) {
    unsigned char start[ENG_ST_LENGTH_FIELD + 1];
    if (file_size < sizeof start)
        return refuse(from, ENG_FORMAT, NULL, "%llu bytes are too few for a header", (unsigned long long)file_size);
    eng_status status = eng_read_at(from->file->fd, from->file->path, 0, start, sizeof start, from->error);
    if (status != ENG_OK)
        return status;
    uint64_t length;
    memcpy(&length, start, sizeof length);
    if (length > ENG_ST_MAX_HEADER || length > file_size - ENG_ST_LENGTH_FIELD) {
        return refuse(from, ENG_FORMAT, NULL, "offset 0: header length %llu, the file has %llu bytes, the limit is %d",
                      (unsigned long long)length, (unsigned long long)file_size, ENG_ST_MAX_HEADER);
    }
    if (length == 0 || start[ENG_ST_LENGTH_FIELD] != '{')
        return refuse(from, ENG_FORMAT, NULL, "offset 8: the header does not begin with '{'");
    from->header = malloc((size_t)length);
    if (!from->header)
        return refuse(from, ENG_NO_MEMORY, NULL, "no memory for a header of %llu bytes", (unsigned long long)length);
    from->header_length = (size_t)length;
    from->data_begin = ENG_ST_LENGTH_FIELD + length;
    from->data_bytes = file_size - from->data_begin;
    return eng_read_at(from->file->fd, from->file->path, ENG_ST_LENGTH_FIELD, from->header, (size_t)length,
                       from->error);
}

static const char *json_fault(const json_error_t *found) {
    switch (json_error_code(found)) {
    case json_error_invalid_utf8:
        return "not UTF-8";
    case json_error_duplicate_key:
        return "key given twice";
    case json_error_numeric_overflow:
        return "number too big";
    case json_error_null_byte_in_key:
    case json_error_null_character:
        return "NUL character in a string";
    case json_error_end_of_input_expected:
        return "text behind the header's object";
    case json_error_premature_end_of_input:
        return "header ends early";
    default:
        return "not JSON";
    }
}

// Reports a fault at a byte of the header with the entry that the byte belongs to.
static eng_status refuse_at(const reader *from, size_t position, const char *fault) {
    if (position > from->header_length)
        position = from->header_length;
    eng_st_measure place = eng_st_measure_header(from->header, position);
    char tensor[65];
    int length = place.key_length < sizeof tensor ? (int)place.key_length : (int)sizeof tensor - 1;
    if (place.key)
        snprintf(tensor, sizeof tensor, "%.*s", length, place.key);
    return refuse(from, ENG_FORMAT, place.key ? tensor : NULL, "offset %zu: %s", ENG_ST_LENGTH_FIELD + position, fault);
}

static eng_status parse_header(const reader *from, json_t **root) {
    eng_st_measure measured = eng_st_measure_header(from->header, from->header_length);
    if (measured.fault)
        return refuse_at(from, measured.end, measured.fault);
    json_error_t found;
    *root = json_loadb(from->header, from->header_length, JSON_REJECT_DUPLICATES, &found);
    if (*root)
        return ENG_OK;
    if (json_error_code(&found) == json_error_out_of_memory)
        return refuse(from, ENG_NO_MEMORY, NULL, "no memory for its header");
    // The library's position lies behind the last byte that it took.
    return refuse_at(from, found.position > 0 ? (size_t)found.position - 1 : 0, json_fault(&found));
}

static eng_status check_metadata(const reader *from, json_t *metadata) {
    if (!json_is_object(metadata))
        return refuse(from, ENG_FORMAT, NULL, "%s is not an object", ENG_ST_METADATA_KEY);
    if (json_object_size(metadata) > ENG_ST_MAX_METADATA)
        return refuse(from, ENG_FORMAT, NULL, "%s: more than %d pairs", ENG_ST_METADATA_KEY, ENG_ST_MAX_METADATA);
    const char *key;
    json_t *value;
    json_object_foreach(metadata, key, value) {
        if (!json_is_string(value))
            return refuse(from, ENG_FORMAT, NULL, "%s: '%.64s' is not a string", ENG_ST_METADATA_KEY, key);
    }
    return ENG_OK;
}

static eng_status parse_shape(const reader *from, const json_t *shape, eng_st_entry *entry) {
    if (!json_is_array(shape))
        return refuse(from, ENG_FORMAT, entry->name, "shape is not an array");
    size_t ndim = json_array_size(shape);
    if (ndim > ENG_MAX_DIMS)
        return refuse(from, ENG_UNSUPPORTED, entry->name, "%zu dimensions, the limit is %d", ndim, ENG_MAX_DIMS);
    entry->ndim = (int)ndim;
    for (size_t i = 0; i < ndim; i++) {
        const json_t *size = json_array_get(shape, i);
        if (!json_is_integer(size) || json_integer_value(size) < 0)
            return refuse(from, ENG_FORMAT, entry->name, "shape[%zu] is not a non-negative integer", i);
        entry->shape[i] = json_integer_value(size);
    }
    if (!eng_shape_size(entry->dtype, entry->ndim, entry->shape, &entry->count, &entry->bytes))
        return refuse(from, ENG_FORMAT, entry->name, "the product of its shape is beyond 2^63");
    return ENG_OK;
}

static eng_status parse_offsets(const reader *from, const json_t *offsets, eng_st_entry *entry) {
    if (!json_is_array(offsets) || json_array_size(offsets) != 2)
        return refuse(from, ENG_FORMAT, entry->name, "data_offsets is not an array of two");
    uint64_t range[2];
    for (size_t i = 0; i < 2; i++) {
        const json_t *offset = json_array_get(offsets, i);
        if (!json_is_integer(offset) || json_integer_value(offset) < 0)
            return refuse(from, ENG_FORMAT, entry->name, "data_offsets[%zu] is not a non-negative integer", i);
        range[i] = (uint64_t)json_integer_value(offset);
    }
    unsigned long long begin = range[0], end = range[1];
    if (begin > end)
        return refuse(from, ENG_FORMAT, entry->name, "data_offsets [%llu, %llu]: end before begin", begin, end);
    if (end > from->data_bytes) {
        return refuse(from, ENG_FORMAT, entry->name, "data_offsets [%llu, %llu]: the data ends at %llu", begin, end,
                      (unsigned long long)from->data_bytes);
    }
    if (end - begin != entry->bytes) {
        return refuse(from, ENG_FORMAT, entry->name, "data_offsets [%llu, %llu]: its shape needs %llu bytes", begin,
                      end, (unsigned long long)entry->bytes);
    }
    entry->offset = from->data_begin + begin;
    return ENG_OK;
}

static eng_status parse_entry(const reader *from, const json_t *value, eng_st_entry *entry) {
    if (!json_is_object(value))
        return refuse(from, ENG_FORMAT, entry->name, "its description is not an object");
    const json_t *shape = json_object_get(value, "shape");
    const json_t *offsets = json_object_get(value, "data_offsets");
    const char *dtype = json_string_value(json_object_get(value, "dtype"));
    if (!dtype)
        return refuse(from, ENG_FORMAT, entry->name, "dtype is missing or not a string");
    if (!shape || !offsets || json_object_size(value) != 3)
        return refuse(from, ENG_FORMAT, entry->name, "needs dtype, shape and data_offsets and nothing else");
    if (!eng_dtype_parse(dtype, &entry->dtype))
        return refuse(from, ENG_UNSUPPORTED, entry->name, "dtype '%.32s' is not supported", dtype);
    eng_status status = parse_shape(from, shape, entry);
    return status == ENG_OK ? parse_offsets(from, offsets, entry) : status;
}

static eng_status allocate_entries(const reader *from, json_t *root) {
    size_t count = json_object_size(root) - (json_object_get(root, ENG_ST_METADATA_KEY) != NULL);
    if (count > ENG_ST_MAX_TENSORS)
        return refuse(from, ENG_FORMAT, NULL, "%zu tensors, the limit is %d", count, ENG_ST_MAX_TENSORS);
    size_t name_bytes = 1;
    const char *name;
    json_t *value;
    json_object_foreach(root, name, value) {
        size_t length = strlen(name);
        if (length > ENG_ST_MAX_NAME)
            return refuse(from, ENG_FORMAT, name, "its name has %zu bytes, the limit is %d", length, ENG_ST_MAX_NAME);
        name_bytes += length + 1;
    }
    eng_st_file *file = from->file;
    file->names = malloc(name_bytes);
    file->entries = calloc(count + 1, sizeof *file->entries);
    file->by_name = calloc(count + 1, sizeof *file->by_name);
    if (!file->names || !file->entries || !file->by_name)
        return refuse(from, ENG_NO_MEMORY, NULL, "no memory for %zu tensors", count);
    return ENG_OK;
}

static eng_status parse_entries(const reader *from, json_t *root) {
    eng_status status = allocate_entries(from, root);
    eng_st_file *file = from->file;
    char *name = file->names;
    const char *key;
    json_t *value;
    if (status != ENG_OK)
        return status;
    json_object_foreach(root, key, value) {
        if (strcmp(key, ENG_ST_METADATA_KEY) == 0) {
            status = check_metadata(from, value);
            file->metadata = json_incref(value);
        } else {
            eng_st_entry *entry = &file->entries[file->count++];
            size_t size = strlen(key) + 1;
            entry->name = memcpy(name, key, size);
            name += size;
            status = parse_entry(from, value, entry);
        }
        if (status != ENG_OK)
            return status;
    }
    return ENG_OK;
}

static int by_offset(const void *left, const void *right) {
    const eng_st_entry *a = left, *b = right;
    if (a->offset != b->offset)
        return a->offset < b->offset ? -1 : 1;
    if (a->bytes != b->bytes) // an empty tensor lies before the one that begins at the same byte
        return a->bytes < b->bytes ? -1 : 1;
    return strcmp(a->name, b->name);
}

static int by_name(const void *left, const void *right) {
    const eng_st_entry *const *a = left, *const *b = right;
    return strcmp((*a)->name, (*b)->name);
}

static eng_status check_cover(const reader *from) {
    eng_st_file *file = from->file;
    qsort(file->entries, file->count, sizeof *file->entries, by_offset);
    uint64_t covered = from->data_begin;
    for (size_t i = 0; i < file->count; i++) {
        const eng_st_entry *entry = &file->entries[i];
        if (entry->offset != covered) {
            return refuse(from, ENG_FORMAT, entry->name, "offset %llu: %s the tensor before it, which ends at %llu",
                          (unsigned long long)entry->offset,
                          entry->offset < covered ? "overlaps" : "leaves a gap after", (unsigned long long)covered);
        }
        covered += entry->bytes;
        file->by_name[i] = &file->entries[i];
    }
    uint64_t end = from->data_begin + from->data_bytes;
    if (covered != end) {
        return refuse(from, ENG_FORMAT, NULL, "offset %llu: the last %llu bytes belong to no tensor",
                      (unsigned long long)covered, (unsigned long long)(end - covered));
    }
    qsort(file->by_name, file->count, sizeof *file->by_name, by_name);
    return ENG_OK;
}

static eng_status load_header(eng_st_file *file, uint64_t file_size, eng_error *error) {
    reader from = {.file = file, .error = error};
    json_t *root = NULL;
    eng_status status = read_header(&from, file_size);
    if (status == ENG_OK)
        status = parse_header(&from, &root);
    if (status == ENG_OK)
        status = parse_entries(&from, root);
    if (status == ENG_OK)
        status = check_cover(&from);
    json_decref(root);
    free(from.header);
    return status;
}

eng_status eng_st_open(const char *path, eng_st_file **out, eng_error *error) {
    *out = NULL;
    eng_st_file *file = calloc(1, sizeof *file);
    if (!file)
        return eng_fail(error, ENG_NO_MEMORY, "%s: no memory", eng_path_tail(path));
    file->fd = -1;
    size_t path_size = strlen(path) + 1;
    file->path = malloc(path_size);
    uint64_t size = 0;
    eng_status status = ENG_OK;
    if (file->path)
        memcpy(file->path, path, path_size);
    else
        status = eng_fail(error, ENG_NO_MEMORY, "%s: no memory", eng_path_tail(path));
    if (status == ENG_OK)
        status = eng_open_regular(path, &file->fd, &size, error);
    if (status == ENG_OK)
        status = load_header(file, size, error);
    if (status != ENG_OK) {
        eng_st_close(file);
        return status;
    }
    *out = file;
    return ENG_OK;
}

void eng_st_close(eng_st_file *file) {
    if (!file)
        return;
    json_decref(file->metadata);
    free(file->by_name);
    free(file->entries);
    free(file->names);
    if (file->fd >= 0)
        close(file->fd);
    free(file->path);
    free(file);
}

const char *eng_st_path(const eng_st_file *file) {
    return file->path;
}

size_t eng_st_count(const eng_st_file *file) {
    return file->count;
}

const eng_st_entry *eng_st_at(const eng_st_file *file, size_t index) {
    return index < file->count ? &file->entries[index] : NULL;
}

const eng_st_entry *eng_st_find(const eng_st_file *file, const char *name) {
    eng_st_entry wanted = {.name = name};
    eng_st_entry *key = &wanted;
    eng_st_entry **found = bsearch(&key, file->by_name, file->count, sizeof *file->by_name, by_name);
    return found ? *found : NULL;
}

const char *eng_st_metadata(const eng_st_file *file, const char *key) {
    return json_string_value(json_object_get(file->metadata, key));
}

static eng_status read_bytes(const eng_st_file *file, const eng_st_entry *entry, int64_t first, int64_t count,
                             void *destination, eng_error *error) {
    size_t size = eng_dtype_size(entry->dtype);
    uint64_t begin = entry->offset + (uint64_t)first * size;
    eng_error found = {0};
    eng_status status = eng_read_at(file->fd, file->path, begin, destination, (size_t)count * size, &found);
    if (status == ENG_OK)
        return ENG_OK;
    return eng_fail(error, status, "%s (tensor '%.64s')", found.text, entry->name);
}

static eng_status check_range(const eng_st_file *file, const eng_st_entry *entry, int64_t first, int64_t count,
                              eng_error *error) {
    if (first >= 0 && count >= 0 && first <= entry->count && count <= entry->count - first)
        return ENG_OK;
    return eng_fail(error, ENG_INVALID, "%s: tensor '%.64s': %lld elements from %lld, it has %lld",
                    eng_path_tail(file->path), entry->name, (long long)count, (long long)first,
                    (long long)entry->count);
}

eng_status eng_st_read(const eng_st_file *file, const eng_st_entry *entry, int64_t first, int64_t count,
                       void *destination, eng_error *error) {
    eng_status status = check_range(file, entry, first, count, error);
    return status == ENG_OK ? read_bytes(file, entry, first, count, destination, error) : status;
}

static void widen(eng_dtype dtype, const uint16_t *from, int64_t count, float *to) {
    if (dtype == ENG_BF16) {
        for (int64_t i = 0; i < count; i++)
            to[i] = eng_bf16_to_f32(from[i]);
    } else {
        for (int64_t i = 0; i < count; i++)
            to[i] = eng_f16_to_f32(from[i]);
    }
}

eng_status eng_st_read_f32(const eng_st_file *file, const eng_st_entry *entry, int64_t first, int64_t count,
                           float *destination, eng_error *error) {
    eng_status status = check_range(file, entry, first, count, error);
    if (status != ENG_OK)
        return status;
    if (entry->dtype == ENG_F32)
        return read_bytes(file, entry, first, count, destination, error);
    if (entry->dtype != ENG_F16 && entry->dtype != ENG_BF16) {
        return eng_fail(error, ENG_UNSUPPORTED, "%s: tensor '%.64s': dtype %s where F32, F16 or BF16 is needed",
                        eng_path_tail(file->path), entry->name, eng_dtype_name(entry->dtype));
    }
    uint16_t stored[WIDEN_PIECE];
    for (int64_t done = 0; done < count; done += WIDEN_PIECE) {
        int64_t piece = count - done < WIDEN_PIECE ? count - done : WIDEN_PIECE;
        status = read_bytes(file, entry, first + done, piece, stored, error);
        if (status != ENG_OK)
            return status;
        widen(entry->dtype, stored, piece, destination + done);
    }
    return ENG_OK;
}
