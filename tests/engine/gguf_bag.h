// SPDX-License-Identifier: Apache-2.0
// A GGUF file in memory, put together key by key and tensor by tensor, for tests of the reader and of the importer.
//
// Shapes are given innermost first, as the format has them. Every helper ends the test case on a failure of its own.
#ifndef TESTS_ENGINE_GGUF_BAG_H
#define TESTS_ENGINE_GGUF_BAG_H

#include "engine/buffer.h"
#include "engine/gguf.h"

typedef struct gguf_bag {
    eng_buffer keys, infos, data;
    uint64_t key_count, tensor_count;
    uint32_t version;   // 0: 3
    uint64_t alignment; // of data; 0: 32
} gguf_bag;

void gguf_append(eng_buffer *buffer, const void *bytes, size_t length);
void gguf_append_text(eng_buffer *buffer, const char *text); // its length in front
// A key with a value's bytes as they stand in a file.
void gguf_put(gguf_bag *bag, const char *key, uint32_t type, const void *value, size_t length);
void gguf_put_u32(gguf_bag *bag, const char *key, uint32_t value);
void gguf_put_f32(gguf_bag *bag, const char *key, float value);
void gguf_put_flag(gguf_bag *bag, const char *key, bool value);
void gguf_put_text(gguf_bag *bag, const char *key, const char *text);
void gguf_put_texts(gguf_bag *bag, const char *key, const char *const *texts, size_t count);
void gguf_put_list(gguf_bag *bag, const char *key, uint32_t element, const void *values, size_t count, size_t length);
void gguf_put_tensor(gguf_bag *bag, const char *name, uint32_t format, int ndim, const uint64_t *shape,
                     const void *data, size_t length);
eng_buffer gguf_file(const gguf_bag *bag);              // the caller frees it
void gguf_write(const gguf_bag *bag, const char *name); // into the test's folder
void gguf_bag_free(gguf_bag *bag);

#endif
