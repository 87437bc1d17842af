// SPDX-License-Identifier: Apache-2.0
// Strict reader of GGUF files, versions 2 and 3, little-endian: typed keys, and tensors widened to float32.
//
// The file gives no length of its header, so every count and length is held against the bytes that are left before
// anything is allocated or read by it. Refused are: a key or a tensor twice, keys that are not UTF-8, arrays nested
// deeper than 4, a flag that is neither 0 nor 1, tensors that overlap, that do not lie on the file's alignment, or of a
// type that the table of block formats does not hold; bytes that belong to nothing. Errors name file, key or tensor,
// and offset. The header is read into memory, the data on demand and never mapped. After eng_gguf_open a file is
// immutable; any number of threads may read it.
#ifndef ENGINE_GGUF_H
#define ENGINE_GGUF_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/status.h"

enum {
    ENG_GGUF_MAX_DIMS = 4,
    ENG_GGUF_MAX_HEADER = 512 * 1000 * 1000, // bytes; the largest public vocabularies need below 20 MB
    ENG_GGUF_MAX_ENTRIES = 65536,            // keys, and tensors
    ENG_GGUF_MAX_NAME = 1024,                // bytes of a key or of a tensor's name
};

// ---- block formats

// How a run of elements is stored. The quantised formats are those of ggml: a scale (and an offset) for each block.
typedef struct eng_block_format {
    const char *name; // "Q4_1"
    uint32_t number;  // in the file
    int32_t elements; // of a block; a row holds whole blocks
    int32_t bytes;    // of a block
    void (*widen)(const uint8_t *block, float *values);
    int32_t bits; // 8 or 4: a block of quantize.h has exactly these numbers; 0: none has
    bool minimum; // that block has a minimum
} eng_block_format;

const eng_block_format *eng_block_format_find(uint32_t number); // NULL: not supported

// What can be taken from a stored block; all but the values only where the format has bits.
typedef enum eng_block_part {
    ENG_BLOCK_VALUES,  // float32, one an element
    ENG_BLOCK_CODES,   // bytes in the order of quantize.h: 32 of 8 bits, 16 of 4
    ENG_BLOCK_SCALE,   // one float16
    ENG_BLOCK_MINIMUM, // one float16
} eng_block_part;

size_t eng_block_part_bytes(const eng_block_format *format, eng_block_part part); // of one block's
void eng_block_take(const eng_block_format *format, eng_block_part part, const uint8_t *block, void *out);

// ---- keys

typedef enum eng_gguf_type { // as numbered in the file
    ENG_GGUF_U8,
    ENG_GGUF_I8,
    ENG_GGUF_U16,
    ENG_GGUF_I16,
    ENG_GGUF_U32,
    ENG_GGUF_I32,
    ENG_GGUF_F32,
    ENG_GGUF_BOOL,
    ENG_GGUF_STRING,
    ENG_GGUF_ARRAY,
    ENG_GGUF_U64,
    ENG_GGUF_I64,
    ENG_GGUF_F64,
    ENG_GGUF_TYPES
} eng_gguf_type;

typedef struct eng_gguf_value {
    const char *key; // of an array's element: the array's
    eng_gguf_type type;
    eng_gguf_type element;     // arrays
    uint64_t count;            // elements of an array, bytes of a string
    const unsigned char *data; // of the value, or of the first element
} eng_gguf_value;

// What a value is, if it has the kind; false: it has another. Integers are any width that int64_t holds.
bool eng_gguf_integer(const eng_gguf_value *value, int64_t *out);
bool eng_gguf_real(const eng_gguf_value *value, double *out); // F32, F64
bool eng_gguf_flag(const eng_gguf_value *value, bool *out);
// Bytes as stored, without a NUL behind: (const char *)value->data, value->count. Any bytes at all.
bool eng_gguf_is_string(const eng_gguf_value *value);

// The elements of an array, in order.
typedef struct eng_gguf_items {
    eng_gguf_value next;
    uint64_t left;
} eng_gguf_items;
eng_gguf_items eng_gguf_begin(const eng_gguf_value *array);         // of another type of value: none
bool eng_gguf_next(eng_gguf_items *items, eng_gguf_value *element); // false: no more

// ---- files

typedef struct eng_gguf_tensor {
    const char *name;
    const eng_block_format *format;
    int ndim;
    int64_t shape[ENG_GGUF_MAX_DIMS]; // outermost first, the reverse of the file's order
    int64_t count;                    // elements
    uint64_t offset;                  // of the data from the start of the file
    uint64_t bytes;
} eng_gguf_tensor;

typedef struct eng_gguf eng_gguf;

ENG_CHECKED eng_status eng_gguf_open(const char *path, eng_gguf **out, eng_error *error);
void eng_gguf_close(eng_gguf *file);
const char *eng_gguf_path(const eng_gguf *file);

size_t eng_gguf_key_count(const eng_gguf *file);
const eng_gguf_value *eng_gguf_key_at(const eng_gguf *file, size_t index); // in the order of strcmp
const eng_gguf_value *eng_gguf_key(const eng_gguf *file, const char *key); // NULL: none
size_t eng_gguf_tensor_count(const eng_gguf *file);
const eng_gguf_tensor *eng_gguf_tensor_at(const eng_gguf *file, size_t index); // in the order of strcmp
const eng_gguf_tensor *eng_gguf_find(const eng_gguf *file, const char *name);  // NULL: none

// Elements first .. first + count - 1 as float32. Both must be multiples of the format's block.
ENG_CHECKED eng_status eng_gguf_read_f32(const eng_gguf *file, const eng_gguf_tensor *tensor, int64_t first,
                                         int64_t count, float *destination, eng_error *error);
// A part of blocks first .. first + count - 1.
ENG_CHECKED eng_status eng_gguf_read_blocks(const eng_gguf *file, const eng_gguf_tensor *tensor, eng_block_part part,
                                            int64_t first, int64_t count, void *destination, eng_error *error);

#endif
