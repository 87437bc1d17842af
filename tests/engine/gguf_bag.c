// SPDX-License-Identifier: Apache-2.0
// The GGUF files of the tests: three growing parts that are joined at the end.
//
// Written from the format's description, not with the reader's code. See gguf_bag.h.
#include "tests/engine/gguf_bag.h"

#include <check.h>
#include <string.h>

#include "tests/engine/temp_folder.h"

void gguf_append(eng_buffer *buffer, const void *bytes, size_t length) {
    ck_assert_int_eq(eng_buffer_append(buffer, bytes, length), ENG_OK);
}

void gguf_append_text(eng_buffer *buffer, const char *text) {
    uint64_t length = strlen(text);
    gguf_append(buffer, &length, sizeof length);
    gguf_append(buffer, text, strlen(text));
}

void gguf_put(gguf_bag *bag, const char *key, uint32_t type, const void *value, size_t length) {
    gguf_append_text(&bag->keys, key);
    gguf_append(&bag->keys, &type, sizeof type);
    gguf_append(&bag->keys, value, length);
    bag->key_count++;
}

void gguf_put_u32(gguf_bag *bag, const char *key, uint32_t value) {
    gguf_put(bag, key, 4, &value, sizeof value);
}

void gguf_put_f32(gguf_bag *bag, const char *key, float value) {
    gguf_put(bag, key, 6, &value, sizeof value);
}

void gguf_put_flag(gguf_bag *bag, const char *key, bool value) {
    uint8_t byte = value;
    gguf_put(bag, key, 7, &byte, 1);
}

void gguf_put_text(gguf_bag *bag, const char *key, const char *text) {
    eng_buffer value = {0};
    gguf_append_text(&value, text);
    gguf_put(bag, key, 8, value.bytes, value.length);
    eng_buffer_free(&value);
}

void gguf_put_list(gguf_bag *bag, const char *key, uint32_t element, const void *values, size_t count, size_t length) {
    eng_buffer value = {0};
    uint64_t wide = count;
    gguf_append(&value, &element, sizeof element);
    gguf_append(&value, &wide, sizeof wide);
    gguf_append(&value, values, length);
    gguf_put(bag, key, 9, value.bytes, value.length);
    eng_buffer_free(&value);
}

void gguf_put_texts(gguf_bag *bag, const char *key, const char *const *texts, size_t count) {
    eng_buffer values = {0};
    for (size_t i = 0; i < count; i++)
        gguf_append_text(&values, texts[i]);
    gguf_put_list(bag, key, 8, values.bytes, count, values.length);
    eng_buffer_free(&values);
}

static void pad(eng_buffer *buffer, size_t before, uint64_t alignment) {
    while ((before + buffer->length) % alignment != 0)
        gguf_append(buffer, "", 1);
}

static uint64_t alignment_of(const gguf_bag *bag) {
    return bag->alignment ? bag->alignment : 32;
}

void gguf_put_tensor(gguf_bag *bag, const char *name, uint32_t format, int ndim, const uint64_t *shape,
                     const void *data, size_t length) {
    uint32_t dims = (uint32_t)ndim;
    uint64_t offset = bag->data.length;
    gguf_append_text(&bag->infos, name);
    gguf_append(&bag->infos, &dims, sizeof dims);
    gguf_append(&bag->infos, shape, dims * sizeof *shape);
    gguf_append(&bag->infos, &format, sizeof format);
    gguf_append(&bag->infos, &offset, sizeof offset);
    gguf_append(&bag->data, data, length);
    pad(&bag->data, 0, alignment_of(bag));
    bag->tensor_count++;
}

eng_buffer gguf_file(const gguf_bag *bag) {
    eng_buffer file = {0};
    uint32_t version = bag->version ? bag->version : 3;
    gguf_append(&file, "GGUF", 4);
    gguf_append(&file, &version, sizeof version);
    gguf_append(&file, &bag->tensor_count, sizeof bag->tensor_count);
    gguf_append(&file, &bag->key_count, sizeof bag->key_count);
    gguf_append(&file, bag->keys.bytes, bag->keys.length);
    gguf_append(&file, bag->infos.bytes, bag->infos.length);
    if (bag->tensor_count > 0)
        pad(&file, 0, alignment_of(bag));
    gguf_append(&file, bag->data.bytes, bag->data.length);
    return file;
}

void gguf_write(const gguf_bag *bag, const char *name) {
    eng_buffer file = gguf_file(bag);
    temp_write(name, file.bytes, file.length);
    eng_buffer_free(&file);
}

void gguf_bag_free(gguf_bag *bag) {
    eng_buffer_free(&bag->keys);
    eng_buffer_free(&bag->infos);
    eng_buffer_free(&bag->data);
}
