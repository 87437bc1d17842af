// SPDX-License-Identifier: Apache-2.0
// Strict reader and atomic writer of .safetensors files.
//
// Reading: the file is opened and its header checked before anything is allocated by the file's word: size >= 8; header
// length <= 100 MB and within the file; one UTF-8 JSON object, no duplicate key, string-only metadata; known dtype;
// two non-negative integer offsets, begin <= end; checked product of the shape times the dtype's size = end - begin;
// the sorted ranges start at 0, touch, and end exactly at the end of the file. Errors name file, tensor and offset. The
// data is read into memory, not mapped live: a file truncated in place while the program runs cannot kill it.
#ifndef ENGINE_SAFETENSORS_H
#define ENGINE_SAFETENSORS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/status.h"

// Limits of the reader and the writer alike. The count keeps the parsed header below about 100 MB; the largest public
// checkpoints stay under 10,000 tensors a file and 200 bytes a name.
enum {
    ENG_MAX_DIMS = 8,
    ENG_ST_MAX_HEADER = 100 * 1000 * 1000, // bytes
    ENG_ST_MAX_TENSORS = 65536,
    ENG_ST_MAX_METADATA = 65536, // pairs
    ENG_ST_MAX_NAME = 1024,      // bytes
    ENG_ST_PIECE = 16384,        // elements that the writer asks for at a time
};

typedef enum eng_dtype {
    ENG_F32,
    ENG_F16,
    ENG_BF16,
    ENG_F64,
    ENG_I64,
    ENG_I32,
    ENG_I16,
    ENG_I8,
    ENG_U8,
    ENG_BOOL
} eng_dtype;
size_t eng_dtype_size(eng_dtype dtype);
const char *eng_dtype_name(eng_dtype dtype); // as in the files: "BF16"
bool eng_dtype_parse(const char *name, eng_dtype *dtype);
// Elements and bytes of a shape (0 dimensions: one element). False: a negative dimension, more than ENG_MAX_DIMS, or
// a product beyond 2^63 - 1 bytes.
bool eng_shape_size(eng_dtype dtype, int ndim, const int64_t *shape, int64_t *count, uint64_t *bytes);

typedef struct eng_st_entry {
    const char *name;
    eng_dtype dtype;
    int ndim;
    int64_t shape[ENG_MAX_DIMS];
    int64_t count;   // elements
    uint64_t offset; // of the data from the start of the file
    uint64_t bytes;
} eng_st_entry;

typedef struct eng_st_file eng_st_file;

// Opens and checks one file. Entries come in the order of their offsets.
ENG_CHECKED eng_status eng_st_open(const char *path, eng_st_file **out, eng_error *error);
void eng_st_close(eng_st_file *file);
const char *eng_st_path(const eng_st_file *file);
size_t eng_st_count(const eng_st_file *file);
const eng_st_entry *eng_st_at(const eng_st_file *file, size_t index);
const eng_st_entry *eng_st_find(const eng_st_file *file, const char *name); // NULL: none
const char *eng_st_metadata(const eng_st_file *file, const char *key);      // NULL: none
// Reads count elements from element first of an entry as stored (little-endian) into destination.
ENG_CHECKED eng_status eng_st_read(const eng_st_file *file, const eng_st_entry *entry, int64_t first, int64_t count,
                                   void *destination, eng_error *error);
// The same, widened to float32 (F32, F16, BF16 only; otherwise ENG_UNSUPPORTED).
ENG_CHECKED eng_status eng_st_read_f32(const eng_st_file *file, const eng_st_entry *entry, int64_t first, int64_t count,
                                       float *destination, eng_error *error);

uint16_t eng_bf16_from_f32(float value); // round to nearest even, NaN stays NaN
float eng_bf16_to_f32(uint16_t value);
float eng_f16_to_f32(uint16_t value);
int64_t eng_count_nonfinite(const float *values, int64_t count); // NaNs and infinities

typedef struct eng_st_source {
    const char *name;
    eng_dtype dtype; // F32 or BF16 (rounded from float32 by the writer), or any other stored as it is
    int ndim;
    int64_t shape[ENG_MAX_DIMS];
    const void *data; // float32 elements for F32 and BF16
    // Instead of data: writes count elements from element first, as data has them, pieces in order. A piece begins at a
    // multiple of ENG_ST_PIECE.
    eng_status (*read)(void *context, int64_t first, int64_t count, void *values, eng_error *error);
    void *context;
} eng_st_source;
// Writes PATH.tmp, fsyncs, renames to PATH, fsyncs the folder. On failure (a full disk) PATH is as it was and the
// temporary file is gone. metadata: key, value, key, value ... NULL; may be NULL. The tensors lie in the file by
// element size, widest first, and otherwise in the order given, so that each is aligned for its type. One writer a
// path.
ENG_CHECKED eng_status eng_st_write(const char *path, const eng_st_source *tensors, size_t count,
                                    const char *const *metadata, eng_error *error);

#endif
