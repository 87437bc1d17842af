// SPDX-License-Identifier: Apache-2.0
// Strict reader of GGUF files: one pass over the header, every number held against what is left of the file.
//
// The header has no length, so it is read as it is parsed: `need` loads more of it, and only as much as the file has.
// While it grows, values are offsets into it; once it is whole they become pointers. Names are moved to the front of
// the length field before them, which makes room for a NUL behind: the header is the only memory of names and values.
#include "engine/gguf.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/buffer.h"
#include "engine/files.h"
#include "engine/text.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "stored values are used without swapping");

enum {
    LOAD_BYTES = 1 << 20, // of the header at a time
    MAX_DEPTH = 4,        // of nested arrays
    LENGTH_BYTES = 8,     // in front of a string
    MIN_KEY_BYTES = LENGTH_BYTES + 1 + 4 + 1,
    MIN_TENSOR_BYTES = LENGTH_BYTES + 1 + 4 + 4 + 8,
    DEFAULT_ALIGNMENT = 32,
    MIN_ALIGNMENT = 8,
    MAX_ALIGNMENT = 1 << 20,
    READ_BYTES = 1 << 16,
};

struct eng_gguf {
    int fd;
    char *path;
    eng_buffer header;
    eng_gguf_value *keys; // in the order of strcmp
    size_t key_count;
    eng_gguf_tensor *tensors; // in the order of strcmp
    size_t tensor_count;
};

typedef struct reader {
    eng_gguf *file;
    eng_error *error;
    uint64_t size, at; // of the file; of the next byte of the header
    char what[72];     // the key or tensor at hand, in words; empty: neither
} reader;

__attribute__((format(printf, 3, 4))) static eng_status refuse(const reader *r, eng_status code, const char *format,
                                                               ...) {
    char fault[160];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(fault, sizeof fault, format, arguments);
    va_end(arguments);
    return eng_fail(r->error, code, "%s: %s%soffset %llu: %s", eng_path_tail(r->file->path), r->what,
                    *r->what ? ": " : "", (unsigned long long)r->at, fault);
}

// ---- bytes of the header

// Makes the next count bytes of the header be in memory.
static eng_status need(reader *r, uint64_t count) {
    eng_buffer *header = &r->file->header;
    if (count > r->size - r->at)
        return refuse(r, ENG_FORMAT, "%llu bytes are wanted, the file has %llu more", (unsigned long long)count,
                      (unsigned long long)(r->size - r->at));
    if (count > ENG_GGUF_MAX_HEADER - r->at)
        return refuse(r, ENG_TOO_LONG, "a header of more than %d bytes", ENG_GGUF_MAX_HEADER);
    while (header->length < r->at + count) {
        uint64_t left = r->size - header->length, wanted = r->at + count - header->length;
        if (wanted < LOAD_BYTES)
            wanted = left < LOAD_BYTES ? left : LOAD_BYTES;
        if (eng_buffer_reserve(header, (size_t)wanted) != ENG_OK)
            return refuse(r, ENG_NO_MEMORY, "no memory for the header");
        eng_status status = eng_read_at(r->file->fd, r->file->path, header->length, header->bytes + header->length,
                                        (size_t)wanted, r->error);
        if (status != ENG_OK)
            return status;
        header->length += (size_t)wanted;
    }
    return ENG_OK;
}

static eng_status take(reader *r, void *out, size_t size) {
    eng_status status = need(r, size);
    if (status != ENG_OK)
        return status;
    memcpy(out, r->file->header.bytes + r->at, size);
    r->at += size;
    return ENG_OK;
}

// A name with its length in front. *place: of its text in the header, from now on with a NUL behind.
static eng_status take_name(reader *r, const char *kind, size_t *place) {
    uint64_t length;
    eng_status status = take(r, &length, sizeof length);
    if (status != ENG_OK)
        return status;
    if (length == 0 || length > ENG_GGUF_MAX_NAME)
        return refuse(r, ENG_FORMAT, "the name of a %s has %llu bytes; 1 to %d are allowed", kind,
                      (unsigned long long)length, ENG_GGUF_MAX_NAME);
    status = need(r, length);
    if (status != ENG_OK)
        return status;
    char *text = r->file->header.bytes + r->at;
    if (memchr(text, 0, length) || !eng_utf8_valid(text, length, NULL))
        return refuse(r, ENG_FORMAT, "the name of a %s is not UTF-8 or holds a NUL", kind);
    *place = (size_t)r->at - LENGTH_BYTES;
    memmove(text - LENGTH_BYTES, text, length);
    text[length - LENGTH_BYTES] = 0;
    snprintf(r->what, sizeof r->what, "%s '%.56s'", kind, text - LENGTH_BYTES);
    r->at += length;
    return ENG_OK;
}

// ---- values

static size_t scalar_size(eng_gguf_type type) {
    static const unsigned char sizes[ENG_GGUF_TYPES] = {
        [ENG_GGUF_U8] = 1,  [ENG_GGUF_I8] = 1,  [ENG_GGUF_U16] = 2, [ENG_GGUF_I16] = 2,
        [ENG_GGUF_U32] = 4, [ENG_GGUF_I32] = 4, [ENG_GGUF_F32] = 4, [ENG_GGUF_BOOL] = 1,
        [ENG_GGUF_U64] = 8, [ENG_GGUF_I64] = 8, [ENG_GGUF_F64] = 8,
    };
    return sizes[type];
}

// Bytes that a value of the type has at least.
static size_t least_size(eng_gguf_type type) {
    if (type == ENG_GGUF_STRING)
        return LENGTH_BYTES;
    return type == ENG_GGUF_ARRAY ? 4 + 8 : scalar_size(type);
}

static eng_status take_type(reader *r, eng_gguf_type *type) {
    uint32_t number = 0;
    eng_status status = take(r, &number, sizeof number);
    if (status == ENG_OK && number >= ENG_GGUF_TYPES)
        return refuse(r, ENG_FORMAT, "value type %u", (unsigned)number);
    *type = (eng_gguf_type)number;
    return status;
}

static eng_status skip_values(reader *r, eng_gguf_type type, uint64_t count, int depth);

// A string's length or an array's element type and count, and then all that it holds. *place: where that begins.
static eng_status skip_counted(reader *r, eng_gguf_type type, int depth, eng_gguf_value *value, size_t *place) {
    eng_status status = type == ENG_GGUF_ARRAY ? take_type(r, &value->element) : ENG_OK;
    if (status == ENG_OK)
        status = take(r, &value->count, sizeof value->count);
    if (status != ENG_OK)
        return status;
    *place = (size_t)r->at;
    if (type == ENG_GGUF_STRING) {
        status = need(r, value->count);
        r->at += status == ENG_OK ? value->count : 0;
        return status;
    }
    if (depth == MAX_DEPTH)
        return refuse(r, ENG_FORMAT, "arrays nested deeper than %d", MAX_DEPTH);
    return skip_values(r, value->element, value->count, depth + 1);
}

static eng_status skip_values(reader *r, eng_gguf_type type, uint64_t count, int depth) {
    if (count > (r->size - r->at) / least_size(type))
        return refuse(r, ENG_FORMAT, "%llu values, the file has %llu more bytes", (unsigned long long)count,
                      (unsigned long long)(r->size - r->at));
    size_t size = scalar_size(type), place = 0;
    eng_gguf_value ignored = {0};
    if (size > 0) {
        eng_status status = need(r, count * size);
        for (uint64_t i = 0; status == ENG_OK && type == ENG_GGUF_BOOL && i < count; i++) {
            if ((unsigned char)r->file->header.bytes[r->at + i] > 1)
                status = refuse(r, ENG_FORMAT, "a flag that is neither 0 nor 1");
        }
        r->at += status == ENG_OK ? count * size : 0;
        return status;
    }
    for (uint64_t i = 0; i < count; i++) {
        eng_status status = skip_counted(r, type, depth, &ignored, &place);
        if (status != ENG_OK)
            return status;
    }
    return ENG_OK;
}

// key and data are offsets in the header until it is whole.
static eng_status take_key(reader *r, eng_gguf_value *value, size_t *name, size_t *place) {
    r->what[0] = 0;
    eng_status status = take_name(r, "key", name);
    if (status == ENG_OK)
        status = take_type(r, &value->type);
    if (status != ENG_OK)
        return status;
    *place = (size_t)r->at;
    if (scalar_size(value->type) > 0)
        return skip_values(r, value->type, 1, 0);
    return skip_counted(r, value->type, 0, value, place);
}

static int64_t signed_of(const eng_gguf_value *value) {
    int64_t wide = 0;
    memcpy(&wide, value->data, scalar_size(value->type));
    int unused = 64 - 8 * (int)scalar_size(value->type);
    return (int64_t)((uint64_t)wide << unused) >> unused; // sign bit up, and down again
}

bool eng_gguf_integer(const eng_gguf_value *value, int64_t *out) {
    uint64_t wide = 0;
    switch (value->type) {
    case ENG_GGUF_U8:
    case ENG_GGUF_U16:
    case ENG_GGUF_U32:
    case ENG_GGUF_U64:
        memcpy(&wide, value->data, scalar_size(value->type));
        *out = (int64_t)wide;
        return wide <= INT64_MAX;
    case ENG_GGUF_I8:
    case ENG_GGUF_I16:
    case ENG_GGUF_I32:
    case ENG_GGUF_I64:
        *out = signed_of(value);
        return true;
    default:
        return false;
    }
}

bool eng_gguf_real(const eng_gguf_value *value, double *out) {
    float narrow;
    if (value->type == ENG_GGUF_F32) {
        memcpy(&narrow, value->data, sizeof narrow);
        *out = (double)narrow;
    } else if (value->type == ENG_GGUF_F64) {
        memcpy(out, value->data, sizeof *out);
    }
    return value->type == ENG_GGUF_F32 || value->type == ENG_GGUF_F64;
}

bool eng_gguf_flag(const eng_gguf_value *value, bool *out) {
    if (value->type != ENG_GGUF_BOOL)
        return false;
    *out = *value->data != 0;
    return true;
}

bool eng_gguf_is_string(const eng_gguf_value *value) {
    return value->type == ENG_GGUF_STRING;
}

// ---- elements of arrays; what they hold was checked when the file was opened

// Reads the head of the counted value at *at and moves it to what it holds.
static void open_counted(eng_gguf_value *value) {
    if (value->type == ENG_GGUF_ARRAY) {
        uint32_t number;
        memcpy(&number, value->data, sizeof number);
        value->element = (eng_gguf_type)number;
        value->data += sizeof number;
    }
    memcpy(&value->count, value->data, sizeof value->count);
    value->data += sizeof value->count;
}

// Where the byte after a value lies.
static const unsigned char *end_of(const eng_gguf_value *value) {
    if (value->type == ENG_GGUF_STRING)
        return value->data + value->count;
    if (value->type != ENG_GGUF_ARRAY)
        return value->data + scalar_size(value->type);
    eng_gguf_items items = eng_gguf_begin(value);
    eng_gguf_value element;
    if (scalar_size(value->element) > 0)
        return value->data + value->count * scalar_size(value->element);
    while (eng_gguf_next(&items, &element))
        continue;
    return items.next.data;
}

eng_gguf_items eng_gguf_begin(const eng_gguf_value *array) {
    if (array->type != ENG_GGUF_ARRAY)
        return (eng_gguf_items){0};
    return (eng_gguf_items){{.key = array->key, .type = array->element, .data = array->data}, array->count};
}

bool eng_gguf_next(eng_gguf_items *items, eng_gguf_value *element) {
    if (items->left == 0)
        return false;
    items->left--;
    *element = items->next;
    if (scalar_size(element->type) == 0)
        open_counted(element);
    items->next.data = end_of(element);
    return true;
}

// ---- tensors

static eng_status take_shape(reader *r, eng_gguf_tensor *tensor) {
    uint32_t dims;
    eng_status status = take(r, &dims, sizeof dims);
    if (status != ENG_OK)
        return status;
    if (dims > ENG_GGUF_MAX_DIMS)
        return refuse(r, ENG_FORMAT, "%u dimensions, the limit is %d", (unsigned)dims, ENG_GGUF_MAX_DIMS);
    tensor->ndim = (int)dims;
    tensor->count = 1;
    for (int i = tensor->ndim - 1; i >= 0; i--) {
        status = take(r, &tensor->shape[i], sizeof tensor->shape[i]);
        if (status != ENG_OK)
            return status;
        if (tensor->shape[i] < 0 || __builtin_mul_overflow(tensor->count, tensor->shape[i], &tensor->count))
            return refuse(r, ENG_FORMAT, "the product of its shape is beyond 2^63");
    }
    return ENG_OK;
}

static eng_status take_format(reader *r, eng_gguf_tensor *tensor) {
    uint32_t number;
    eng_status status = take(r, &number, sizeof number);
    if (status != ENG_OK)
        return status;
    tensor->format = eng_block_format_find(number);
    if (!tensor->format)
        return refuse(r, ENG_UNSUPPORTED, "tensor type %u is not supported", (unsigned)number);
    int64_t row = tensor->ndim > 0 ? tensor->shape[tensor->ndim - 1] : 1;
    if (row % tensor->format->elements != 0)
        return refuse(r, ENG_FORMAT, "rows of %lld elements, %s has blocks of %d", (long long)row, tensor->format->name,
                      (int)tensor->format->elements);
    int64_t bytes;
    if (__builtin_mul_overflow(tensor->count / tensor->format->elements, tensor->format->bytes, &bytes))
        return refuse(r, ENG_FORMAT, "the product of its shape is beyond 2^63");
    tensor->bytes = (uint64_t)bytes;
    return ENG_OK;
}

static eng_status take_tensor(reader *r, eng_gguf_tensor *tensor, size_t *name) {
    r->what[0] = 0;
    eng_status status = take_name(r, "tensor", name);
    if (status == ENG_OK)
        status = take_shape(r, tensor);
    if (status == ENG_OK)
        status = take_format(r, tensor);
    if (status == ENG_OK)
        status = take(r, &tensor->offset, sizeof tensor->offset);
    return status;
}

static int by_offset(const void *left, const void *right) {
    const eng_gguf_tensor *a = left, *b = right;
    if (a->offset != b->offset)
        return a->offset < b->offset ? -1 : 1;
    return a->bytes < b->bytes ? -1 : a->bytes > b->bytes; // an empty one before what begins at the same byte
}

static uint64_t aligned(uint64_t at, uint64_t alignment) {
    return at + (alignment - at % alignment) % alignment;
}

static eng_status read_alignment(reader *r, uint64_t *alignment) {
    const eng_gguf_value *value = eng_gguf_key(r->file, "general.alignment");
    int64_t given = DEFAULT_ALIGNMENT;
    if (value && (!eng_gguf_integer(value, &given) || given < MIN_ALIGNMENT || given > MAX_ALIGNMENT ||
                  (given & (given - 1)) != 0))
        return eng_fail(r->error, ENG_FORMAT, "%s: key 'general.alignment': no power of two from %d to %d",
                        eng_path_tail(r->file->path), MIN_ALIGNMENT, MAX_ALIGNMENT);
    *alignment = (uint64_t)given;
    return ENG_OK;
}

// Tensors lie behind the header, one behind the other, each on the alignment, up to the end of the file.
static eng_status check_places(reader *r) {
    eng_gguf *file = r->file;
    uint64_t alignment = 0;
    eng_status status = read_alignment(r, &alignment);
    if (status != ENG_OK)
        return status;
    const uint64_t begin = aligned(r->at, alignment);
    uint64_t end = r->at;
    if (file->tensor_count > 0)
        qsort(file->tensors, file->tensor_count, sizeof *file->tensors, by_offset);
    for (size_t i = 0; i < file->tensor_count; i++) {
        eng_gguf_tensor *tensor = &file->tensors[i];
        snprintf(r->what, sizeof r->what, "tensor '%.56s'", tensor->name);
        r->at = tensor->offset;
        if (tensor->offset % alignment != 0)
            return refuse(r, ENG_FORMAT, "is no multiple of the alignment %llu", (unsigned long long)alignment);
        if (begin > r->size || tensor->offset > r->size - begin || tensor->bytes > r->size - begin - tensor->offset)
            return refuse(r, ENG_FORMAT, "%llu bytes of data reach past the end of the file at %llu",
                          (unsigned long long)tensor->bytes, (unsigned long long)r->size);
        tensor->offset += begin;
        if (tensor->offset != aligned(end, alignment))
            return refuse(r, ENG_FORMAT, "%s what lies before it, which ends at %llu",
                          tensor->offset < end ? "overlaps" : "leaves a gap after", (unsigned long long)end);
        end = tensor->offset + tensor->bytes;
    }
    r->what[0] = 0;
    r->at = end;
    if (r->size > aligned(end, alignment))
        return refuse(r, ENG_FORMAT, "the last %llu bytes belong to no tensor", (unsigned long long)(r->size - end));
    return ENG_OK;
}

// ---- opening

static eng_status take_counts(reader *r, uint64_t *tensors, uint64_t *keys) {
    char magic[4];
    uint32_t version;
    eng_status status = take(r, magic, sizeof magic);
    if (status == ENG_OK && memcmp(magic, "GGUF", sizeof magic) != 0)
        return eng_fail(r->error, ENG_FORMAT, "%s: offset 0: no GGUF file", eng_path_tail(r->file->path));
    if (status == ENG_OK)
        status = take(r, &version, sizeof version);
    if (status == ENG_OK && (version < 2 || version > 3)) // a big-endian file has its number in the high byte
        return eng_fail(r->error, ENG_UNSUPPORTED, "%s: offset 4: %s (0x%08x); 2 and 3 are read",
                        eng_path_tail(r->file->path), version & 0xffff ? "version" : "big-endian version",
                        (unsigned)version);
    if (status == ENG_OK)
        status = take(r, tensors, sizeof *tensors);
    if (status == ENG_OK)
        status = take(r, keys, sizeof *keys);
    if (status != ENG_OK)
        return status;
    if (*tensors > ENG_GGUF_MAX_ENTRIES || *keys > ENG_GGUF_MAX_ENTRIES ||
        *tensors * MIN_TENSOR_BYTES + *keys * MIN_KEY_BYTES > r->size - r->at)
        return refuse(r, ENG_FORMAT, "%llu tensors and %llu keys do not fit (at most %d each)",
                      (unsigned long long)*tensors, (unsigned long long)*keys, ENG_GGUF_MAX_ENTRIES);
    return ENG_OK;
}

static int by_key(const void *left, const void *right) {
    return strcmp(((const eng_gguf_value *)left)->key, ((const eng_gguf_value *)right)->key);
}

static int by_name(const void *left, const void *right) {
    return strcmp(((const eng_gguf_tensor *)left)->name, ((const eng_gguf_tensor *)right)->name);
}

static eng_status check_twice(const reader *r) {
    const eng_gguf *file = r->file;
    for (size_t i = 1; i < file->key_count; i++) {
        if (by_key(&file->keys[i - 1], &file->keys[i]) == 0)
            return eng_fail(r->error, ENG_FORMAT, "%s: key '%.80s' is there twice", eng_path_tail(file->path),
                            file->keys[i].key);
    }
    for (size_t i = 1; i < file->tensor_count; i++) {
        if (by_name(&file->tensors[i - 1], &file->tensors[i]) == 0)
            return eng_fail(r->error, ENG_FORMAT, "%s: tensor '%.80s' is there twice", eng_path_tail(file->path),
                            file->tensors[i].name);
    }
    return ENG_OK;
}

// places: two offsets a key, one a tensor, which become pointers.
static eng_status take_entries(reader *r, size_t *places) {
    eng_gguf *file = r->file;
    eng_status status = ENG_OK;
    for (size_t i = 0; i < file->key_count && status == ENG_OK; i++)
        status = take_key(r, &file->keys[i], &places[2 * i], &places[2 * i + 1]);
    size_t *names = places + 2 * file->key_count;
    for (size_t i = 0; i < file->tensor_count && status == ENG_OK; i++)
        status = take_tensor(r, &file->tensors[i], &names[i]);
    if (status != ENG_OK)
        return status;
    r->what[0] = 0;
    for (size_t i = 0; i < file->key_count; i++) {
        file->keys[i].key = file->header.bytes + places[2 * i];
        file->keys[i].data = (const unsigned char *)file->header.bytes + places[2 * i + 1];
    }
    for (size_t i = 0; i < file->tensor_count; i++)
        file->tensors[i].name = file->header.bytes + names[i];
    if (file->key_count > 0)
        qsort(file->keys, file->key_count, sizeof *file->keys, by_key);
    return ENG_OK;
}

static eng_status load_header(eng_gguf *file, uint64_t size, eng_error *error) {
    reader r = {.file = file, .error = error, .size = size};
    uint64_t tensors = 0, keys = 0;
    eng_status status = take_counts(&r, &tensors, &keys);
    if (status != ENG_OK)
        return status;
    file->key_count = (size_t)keys;
    file->tensor_count = (size_t)tensors;
    file->keys = calloc(file->key_count + 1, sizeof *file->keys);
    file->tensors = calloc(file->tensor_count + 1, sizeof *file->tensors);
    size_t *places = calloc(2 * file->key_count + file->tensor_count + 1, sizeof *places);
    status = file->keys && file->tensors && places ? take_entries(&r, places)
                                                   : refuse(&r, ENG_NO_MEMORY, "no memory for its entries");
    free(places);
    if (status == ENG_OK)
        status = check_places(&r);
    if (status == ENG_OK && file->tensor_count > 0)
        qsort(file->tensors, file->tensor_count, sizeof *file->tensors, by_name);
    return status == ENG_OK ? check_twice(&r) : status;
}

eng_status eng_gguf_open(const char *path, eng_gguf **out, eng_error *error) {
    *out = NULL;
    eng_gguf *file = calloc(1, sizeof *file);
    char *copy = strdup(path);
    if (!file || !copy) {
        free(copy);
        free(file);
        return eng_fail(error, ENG_NO_MEMORY, "%s: no memory", eng_path_tail(path));
    }
    file->fd = -1;
    file->path = copy;
    uint64_t size = 0;
    eng_status status = eng_open_regular(path, &file->fd, &size, error);
    if (status == ENG_OK)
        status = load_header(file, size, error);
    if (status != ENG_OK) {
        eng_gguf_close(file);
        return status;
    }
    *out = file;
    return ENG_OK;
}

void eng_gguf_close(eng_gguf *file) {
    if (!file)
        return;
    free(file->tensors);
    free(file->keys);
    eng_buffer_free(&file->header);
    if (file->fd >= 0)
        close(file->fd);
    free(file->path);
    free(file);
}

const char *eng_gguf_path(const eng_gguf *file) {
    return file->path;
}

size_t eng_gguf_key_count(const eng_gguf *file) {
    return file->key_count;
}

const eng_gguf_value *eng_gguf_key_at(const eng_gguf *file, size_t index) {
    return index < file->key_count ? &file->keys[index] : NULL;
}

const eng_gguf_value *eng_gguf_key(const eng_gguf *file, const char *key) {
    const eng_gguf_value wanted = {.key = key};
    return file->key_count ? bsearch(&wanted, file->keys, file->key_count, sizeof wanted, by_key) : NULL;
}

size_t eng_gguf_tensor_count(const eng_gguf *file) {
    return file->tensor_count;
}

const eng_gguf_tensor *eng_gguf_tensor_at(const eng_gguf *file, size_t index) {
    return index < file->tensor_count ? &file->tensors[index] : NULL;
}

const eng_gguf_tensor *eng_gguf_find(const eng_gguf *file, const char *name) {
    const eng_gguf_tensor wanted = {.name = name};
    return file->tensor_count ? bsearch(&wanted, file->tensors, file->tensor_count, sizeof wanted, by_name) : NULL;
}

// ---- data

eng_status eng_gguf_read_blocks(const eng_gguf *file, const eng_gguf_tensor *tensor, eng_block_part part, int64_t first,
                                int64_t count, void *destination, eng_error *error) {
    const eng_block_format *format = tensor->format;
    const int64_t has = tensor->count / format->elements;
    if (first < 0 || count < 0 || first > has || count > has - first)
        return eng_fail(error, ENG_INVALID, "%s: tensor '%.64s': %lld blocks from %lld, it has %lld",
                        eng_path_tail(file->path), tensor->name, (long long)count, (long long)first, (long long)has);
    unsigned char stored[READ_BYTES], *to = destination;
    const int64_t most = READ_BYTES / format->bytes;
    const size_t taken = eng_block_part_bytes(format, part);
    uint64_t at = tensor->offset + (uint64_t)first * (uint64_t)format->bytes;
    for (int64_t left = count; left > 0;) {
        const int64_t blocks = left < most ? left : most;
        const size_t bytes = (size_t)(blocks * format->bytes);
        eng_error found = {0};
        eng_status status = eng_read_at(file->fd, file->path, at, stored, bytes, &found);
        if (status != ENG_OK)
            return eng_fail(error, status, "%s (tensor '%.64s')", found.text, tensor->name);
        for (int64_t i = 0; i < blocks; i++, to += taken)
            eng_block_take(format, part, stored + i * format->bytes, to);
        at += bytes;
        left -= blocks;
    }
    return ENG_OK;
}

eng_status eng_gguf_read_f32(const eng_gguf *file, const eng_gguf_tensor *tensor, int64_t first, int64_t count,
                             float *destination, eng_error *error) {
    const int64_t elements = tensor->format->elements;
    if (first % elements != 0 || count % elements != 0)
        return eng_fail(error, ENG_INVALID, "%s: tensor '%.64s': %lld elements from %lld are no whole blocks of %lld",
                        eng_path_tail(file->path), tensor->name, (long long)count, (long long)first,
                        (long long)elements);
    return eng_gguf_read_blocks(file, tensor, ENG_BLOCK_VALUES, first / elements, count / elements, destination, error);
}
