// SPDX-License-Identifier: Apache-2.0
// Safetensors files byte by byte: which are accepted, which refused and with what words, and that memory stays flat.
//
// Every file is generated here: an 8-byte length, JSON padded with spaces to a multiple of 8, data bytes. The unmarked
// case is one tensor "a", F32 [2,2] at [0,16] with 16 zero bytes behind a header of 64.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "engine/safetensors.h"

#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include "engine/files.h"
#include "tests/check_main.h"
#include "tests/engine/temp_folder.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#else
#define SANITIZED 0
#endif

static const char one[] = "{\"a\":{\"dtype\":\"F32\",\"shape\":[2,2],\"data_offsets\":[0,16]}}";
static const char *const file_name = "model.safetensors";

static void put_length(unsigned char *file, uint64_t length) {
    memcpy(file, &length, sizeof length);
}

// Writes LENGTH, header (padded with spaces to a multiple of 8) and data; returns the size of the padded header.
static size_t write_file(const char *header, size_t header_length, const void *data, size_t data_length) {
    size_t padded = (header_length + 7) / 8 * 8;
    unsigned char *file = malloc(8 + padded + data_length);
    ck_assert_ptr_nonnull(file);
    put_length(file, padded);
    memset(file + 8, ' ', padded);
    memcpy(file + 8, header, header_length);
    if (data)
        memcpy(file + 8 + padded, data, data_length);
    else
        memset(file + 8 + padded, 0, data_length);
    temp_write(file_name, file, 8 + padded + data_length);
    free(file);
    return padded;
}

static eng_status open_status(eng_error *error) {
    eng_st_file *file;
    eng_status status = eng_st_open(temp_path(file_name), &file, error);
    if (status == ENG_OK)
        eng_st_close(file);
    else
        ck_assert_ptr_null(file);
    return status;
}

static void expect_refusal(const char *label, eng_status wanted, const char *words, const char *more_words) {
    eng_error error = {0};
    eng_status status = open_status(&error);
    ck_assert_msg(status == wanted, "%s: status %d, wanted %d (%s)", label, status, wanted, error.text);
    ck_assert_int_eq(error.code, status);
    ck_assert_msg(strstr(error.text, file_name) != NULL, "%s: '%s' lacks the file", label, error.text);
    ck_assert_msg(strstr(error.text, words) != NULL, "%s: '%s' lacks '%s'", label, error.text, words);
    ck_assert_msg(!more_words || strstr(error.text, more_words), "%s: '%s' lacks '%s'", label, error.text, more_words);
}

static eng_st_file *open_good(void) {
    eng_error error = {0};
    eng_st_file *file;
    eng_status status = eng_st_open(temp_path(file_name), &file, &error);
    ck_assert_msg(status == ENG_OK, "%s", error.text);
    return file;
}

#define ENTRY(name, shape, offsets) "\"" name "\":{\"dtype\":\"F32\",\"shape\":" shape ",\"data_offsets\":" offsets "}"

static const struct {
    const char *name, *header;
    size_t header_size, data_size;
} accepted[] = {
    {"ok", one, 64, 16},
    {"scalar", "{" ENTRY("a", "[]", "[0,4]") "}", 56, 4},
    {"zero", "{" ENTRY("a", "[0,7]", "[0,0]") "}", 56, 0},
    {"nothing", "{}", 8, 0},
    {"zero between", "{" ENTRY("a", "[1]", "[0,4]") "," ENTRY("z", "[0]", "[4,4]") "," ENTRY("b", "[1]", "[4,8]") "}",
     0, 8},
    {"out of order", "{" ENTRY("b", "[1]", "[4,8]") "," ENTRY("a", "[1]", "[0,4]") "}", 0, 8},
    {"metadata", "{\"__metadata__\":{\"format\":\"pt\"}," ENTRY("a", "[1]", "[0,4]") "}", 0, 4},
    {"names", "{" ENTRY("", "[1]", "[0,4]") "," ENTRY("\\u00e9\\\"\\\\", "[1]", "[4,8]") "}", 0, 8},
};

START_TEST(accepts) {
    size_t size = write_file(accepted[_i].header, strlen(accepted[_i].header), NULL, accepted[_i].data_size);
    if (accepted[_i].header_size)
        ck_assert_uint_eq(size, accepted[_i].header_size);
    eng_st_file *file = open_good();
    uint64_t at = 8 + size;
    for (size_t i = 0; i < eng_st_count(file); i++) {
        const eng_st_entry *entry = eng_st_at(file, i);
        ck_assert_uint_eq(entry->offset, at);
        at += entry->bytes;
        ck_assert_ptr_eq(eng_st_find(file, entry->name), entry);
        float values[4];
        ck_assert_int_eq(eng_st_read_f32(file, entry, 0, entry->count, values, NULL), ENG_OK);
    }
    ck_assert_uint_eq(at, 8 + size + accepted[_i].data_size);
    ck_assert_ptr_null(eng_st_at(file, eng_st_count(file)));
    ck_assert_ptr_null(eng_st_find(file, "no such tensor"));
    eng_st_close(file);
}
END_TEST

START_TEST(describes_entries) {
    const char header[] = "{\"__metadata__\":{\"format\":\"pt\"},\"w\":{\"dtype\":\"BF16\",\"shape\":[3,2],"
                          "\"data_offsets\":[4,16]}," ENTRY("a", "[1,1]", "[0,4]") "}";
    size_t size = write_file(header, sizeof header - 1, NULL, 16);
    eng_st_file *file = open_good();
    ck_assert_str_eq(eng_st_path(file), temp_path(file_name));
    ck_assert_uint_eq(eng_st_count(file), 2);
    ck_assert_str_eq(eng_st_at(file, 0)->name, "a");
    const eng_st_entry *w = eng_st_find(file, "w");
    ck_assert_ptr_eq(w, eng_st_at(file, 1));
    ck_assert_int_eq(w->dtype, ENG_BF16);
    ck_assert_int_eq(w->ndim, 2);
    ck_assert_int_eq(w->shape[0], 3);
    ck_assert_int_eq(w->shape[1], 2);
    ck_assert_int_eq(w->count, 6);
    ck_assert_uint_eq(w->bytes, 12);
    ck_assert_uint_eq(w->offset, 8 + size + 4);
    ck_assert_str_eq(eng_st_metadata(file, "format"), "pt");
    ck_assert_ptr_null(eng_st_metadata(file, "other"));
    eng_st_close(file);
}
END_TEST

#define F32_A(shape, offsets) "{" ENTRY("a", shape, offsets) "}"
static const struct {
    const char *name, *header;
    size_t header_size, data_size;
    eng_status status;
    const char *words, *more_words;
} refused[] = {
    {"rev", F32_A("[2,2]", "[16,0]"), 64, 16, ENG_FORMAT, "'a'", "[16, 0]: end before begin"},
    {"neg", F32_A("[2,2]", "[-16,0]"), 64, 16, ENG_FORMAT, "'a'", "data_offsets[0] is not a non-negative"},
    {"past", F32_A("[2,2]", "[1099511627776,1099511627792]"), 80, 16, ENG_FORMAT, "'a'",
     "[1099511627776, 1099511627792]: the data ends at 16"},
    {"one_off", F32_A("[2,2]", "[0]"), 56, 16, ENG_FORMAT, "'a'", "not an array of two"},
    {"three offsets", F32_A("[2,2]", "[0,16,16]"), 0, 16, ENG_FORMAT, "'a'", "not an array of two"},
    {"shape_lie", F32_A("[1000,1000]", "[0,4]"), 0, 4, ENG_FORMAT, "'a'", "needs 4000000 bytes"},
    {"dtype", "{\"a\":{\"dtype\":\"F8_E9M9\",\"shape\":[2,2],\"data_offsets\":[0,16]}}", 0, 16, ENG_UNSUPPORTED, "'a'",
     "F8_E9M9"},
    {"dup", "{" ENTRY("a", "[2,2]", "[0,16]") "," ENTRY("a", "[4]", "[0,16]") "}", 112, 16, ENG_FORMAT, "'a'",
     "offset 67: key given twice"},
    {"overlap", "{" ENTRY("a", "[2,2]", "[0,16]") "," ENTRY("b", "[2,2]", "[8,24]") "}", 120, 24, ENG_FORMAT, "'b'",
     "offset 136: overlaps the tensor before it, which ends at 144"},
    {"same range", "{" ENTRY("a", "[2,2]", "[0,16]") "," ENTRY("b", "[2,2]", "[0,16]") "}", 0, 16, ENG_FORMAT, "'b'",
     "overlaps"},
    {"gap", "{" ENTRY("a", "[2,2]", "[0,16]") "," ENTRY("b", "[2,2]", "[32,48]") "}", 120, 48, ENG_FORMAT, "'b'",
     "offset 160: leaves a gap after the tensor before it, which ends at 144"},
    {"late start", F32_A("[1]", "[4,8]"), 0, 8, ENG_FORMAT, "'a'", "leaves a gap"},
    {"tail", one, 64, 32, ENG_FORMAT, "offset 88: the last 16 bytes belong to no tensor", NULL},
    {"prod_wrap", F32_A("[4294967296,4294967296]", "[0,0]"), 80, 0, ENG_FORMAT, "'a'", "product"},
    {"bytes_wrap", F32_A("[4611686018427387904]", "[0,0]"), 0, 0, ENG_FORMAT, "'a'", "product"},
    {"nothdr", "[\"a\"]", 8, 0, ENG_FORMAT, "offset 8: ", "does not begin with '{'"},
    {"blank first", " {}", 8, 0, ENG_FORMAT, "offset 8: ", "does not begin with '{'"},
    {"utf8", "{\"\xff\":1}", 8, 0, ENG_FORMAT, "not UTF-8", NULL},
    {"meta", "{\"__metadata__\":{\"format\":7}," ENTRY("a", "[2,2]", "[0,16]") "}", 88, 16, ENG_FORMAT,
     "__metadata__: 'format' is not a string", NULL},
    {"meta list", "{\"__metadata__\":[]}", 0, 0, ENG_FORMAT, "__metadata__ is not an object", NULL},
    {"begin 1.0", F32_A("[2,2]", "[1.0,16]"), 0, 16, ENG_FORMAT, "'a'", "data_offsets[0]"},
    {"begin 0.0", F32_A("[2,2]", "[0.0,16]"), 0, 16, ENG_FORMAT, "'a'", "data_offsets[0]"},
    {"end 16.0", F32_A("[2,2]", "[0,16.0]"), 0, 16, ENG_FORMAT, "'a'", "data_offsets[1]"},
    {"begin text", F32_A("[2,2]", "[\"0\",16]"), 0, 16, ENG_FORMAT, "'a'", "data_offsets[0]"},
    {"begin null", F32_A("[2,2]", "[null,16]"), 0, 16, ENG_FORMAT, "'a'", "data_offsets[0]"},
    {"begin true", F32_A("[2,2]", "[false,true]"), 0, 16, ENG_FORMAT, "'a'", "data_offsets[0]"},
    {"end 2^63", F32_A("[2,2]", "[0,9223372036854775808]"), 0, 16, ENG_FORMAT, "'a'", "number too big"},
    {"end 2^63-1", F32_A("[2,2]", "[0,9223372036854775807]"), 0, 16, ENG_FORMAT, "'a'", "the data ends at 16"},
    {"second 2^63", "{" ENTRY("a", "[1]", "[0,4]") "," ENTRY("b", "[1]", "[4,9223372036854775808]") "}", 0, 8,
     ENG_FORMAT, "'b'", "number too big"},
    {"offsets object", F32_A("[2,2]", "{}"), 0, 16, ENG_FORMAT, "'a'", "not an array of two"},
    {"shape text", F32_A("\"2\"", "[0,16]"), 0, 16, ENG_FORMAT, "'a'", "shape is not an array"},
    {"dimension -1", F32_A("[-1,-4]", "[0,16]"), 0, 16, ENG_FORMAT, "'a'", "shape[0]"},
    {"dimension 2.0", F32_A("[2,2.0]", "[0,16]"), 0, 16, ENG_FORMAT, "'a'", "shape[1]"},
    {"nine dimensions", F32_A("[1,1,1,1,1,1,1,1,1]", "[0,4]"), 0, 4, ENG_UNSUPPORTED, "'a'", "9 dimensions"},
    {"no dtype", "{\"a\":{\"shape\":[1],\"data_offsets\":[0,4]}}", 0, 4, ENG_FORMAT, "'a'", "dtype is missing"},
    {"dtype number", "{\"a\":{\"dtype\":1,\"shape\":[1],\"data_offsets\":[0,4]}}", 0, 4, ENG_FORMAT, "'a'", "dtype"},
    {"no shape", "{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}", 0, 4, ENG_FORMAT, "'a'", "needs dtype, shape"},
    {"extra field", "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4],\"x\":1}}", 0, 4, ENG_FORMAT, "'a'",
     "nothing else"},
    {"entry number", "{\"a\":1}", 8, 0, ENG_FORMAT, "'a'", "not an object"},
    {"two objects", "{}{}", 8, 0, ENG_FORMAT, "offset ", "behind the header's object"},
    {"trailing comma", "{\"a\":1,}", 8, 0, ENG_FORMAT, "not JSON", NULL},
    {"infinity", F32_A("[2,2]", "[0,Infinity]"), 0, 16, ENG_FORMAT, "'a'", "not JSON"},
    {"NUL in a key", "{" ENTRY("a\\u0000b", "[1]", "[0,4]") "}", 0, 4, ENG_FORMAT, "offset ", "NUL"},
    {"open string", "{\"a", 8, 0, ENG_FORMAT, "'a", "offset "},
    {"open escape", "{\"aaaaa\\", 8, 0, ENG_FORMAT, "'aaaaa", "offset "},
    {"control name", "{\"a\\nb\":1}", 0, 0, ENG_FORMAT, "'a?b'", NULL},
};

START_TEST(refuses) {
    size_t size = write_file(refused[_i].header, strlen(refused[_i].header), NULL, refused[_i].data_size);
    if (refused[_i].header_size)
        ck_assert_msg(size == refused[_i].header_size, "%s: header of %zu bytes", refused[_i].name, size);
    expect_refusal(refused[_i].name, refused[_i].status, refused[_i].words, refused[_i].more_words);
    ck_assert_int_eq(open_status(NULL), refused[_i].status);
}
END_TEST

// The good file with another length field.
static void write_with_length(uint64_t length) {
    unsigned char file[88];
    memset(file, 0, sizeof file);
    put_length(file, length);
    memset(file + 8, ' ', 64);
    memcpy(file + 8, one, sizeof one - 1);
    temp_write(file_name, file, sizeof file);
}

START_TEST(refuses_lengths) {
    ck_assert_uint_eq(sizeof one - 1, 57);
    write_with_length(64);
    ck_assert_int_eq(open_status(NULL), ENG_OK);
    const uint64_t beyond[] = {UINT64_MAX, UINT64_MAX - 4, (uint64_t)1 << 63, (uint64_t)1 << 40, 81,
                               100000001,  1u << 31,       UINT64_MAX - 7u,   (uint64_t)1 << 32};
    for (size_t i = 0; i < sizeof beyond / sizeof beyond[0]; i++) {
        write_with_length(beyond[i]);
        expect_refusal("beyond", ENG_FORMAT, "offset 0: header length", "the file has 88 bytes");
    }
    write_with_length(65);
    expect_refusal("len_plus1", ENG_FORMAT, "offset 72", NULL);
    write_with_length(57);
    expect_refusal("len_nopad", ENG_FORMAT, "offset 81: the last 7 bytes belong to no tensor", NULL);
    write_with_length(0);
    expect_refusal("len 0 of 88", ENG_FORMAT, "offset 8", NULL);
}
END_TEST

START_TEST(refuses_short_files) {
    unsigned char bytes[8] = {8};
    temp_write(file_name, bytes, 7);
    expect_refusal("short7", ENG_FORMAT, "7 bytes are too few", NULL);
    memset(bytes, 0, sizeof bytes);
    temp_write(file_name, bytes, 8);
    expect_refusal("len0", ENG_FORMAT, "8 bytes are too few", NULL);
    temp_write(file_name, bytes, 0);
    expect_refusal("empty", ENG_FORMAT, "0 bytes are too few", NULL);
}
END_TEST

START_TEST(refuses_every_truncation) {
    write_with_length(64);
    for (int size = 87; size >= 0; size--) {
        ck_assert_int_eq(truncate(temp_path(file_name), size), 0);
        ck_assert_msg(open_status(NULL) == ENG_FORMAT, "%d bytes were accepted", size);
    }
}
END_TEST

START_TEST(refuses_what_is_no_file) {
    eng_st_file *file;
    eng_error error = {0};
    ck_assert_int_eq(eng_st_open(temp_path("absent"), &file, &error), ENG_NOT_FOUND);
    ck_assert_ptr_nonnull(strstr(error.text, "absent"));
    ck_assert_int_eq(eng_st_open(temp_folder(), &file, NULL), ENG_INVALID);
    ck_assert_int_eq(eng_st_open("/dev/zero", &file, NULL), ENG_INVALID);
}
END_TEST

START_TEST(shrinking_file_is_an_error) {
    write_with_length(64);
    eng_st_file *file = open_good();
    ck_assert_int_eq(truncate(temp_path(file_name), 80), 0);
    float values[4];
    eng_error error = {0};
    const eng_st_entry *entry = eng_st_at(file, 0);
    ck_assert_int_eq(eng_st_read_f32(file, entry, 0, 2, values, NULL), ENG_OK);
    ck_assert_int_eq(eng_st_read_f32(file, entry, 0, 4, values, &error), ENG_IO);
    ck_assert_ptr_nonnull(strstr(error.text, "'a'"));
    ck_assert_ptr_nonnull(strstr(error.text, "byte 80"));
    eng_st_close(file);
}
END_TEST

START_TEST(refuses_ranges_and_types) {
    const char header[] = "{\"a\":{\"dtype\":\"I64\",\"shape\":[2],\"data_offsets\":[0,16]}}";
    write_file(header, sizeof header - 1, NULL, 16);
    eng_st_file *file = open_good();
    const eng_st_entry *entry = eng_st_at(file, 0);
    int64_t values[2];
    float floats[2];
    ck_assert_int_eq(eng_st_read(file, entry, 0, 2, values, NULL), ENG_OK);
    ck_assert_int_eq(eng_st_read(file, entry, 2, 0, values, NULL), ENG_OK);
    ck_assert_int_eq(eng_st_read(file, entry, 1, 2, values, NULL), ENG_INVALID);
    ck_assert_int_eq(eng_st_read(file, entry, -1, 1, values, NULL), ENG_INVALID);
    ck_assert_int_eq(eng_st_read(file, entry, 0, -1, values, NULL), ENG_INVALID);
    ck_assert_int_eq(eng_st_read(file, entry, 1, INT64_MAX, values, NULL), ENG_INVALID);
    ck_assert_int_eq(eng_st_read_f32(file, entry, 0, 2, floats, NULL), ENG_UNSUPPORTED);
    eng_st_close(file);
}
END_TEST

START_TEST(reads_nan_and_infinity) {
    const char header[] = "{\"a\":{\"dtype\":\"BF16\",\"shape\":[2,2],\"data_offsets\":[0,8]}}";
    const uint16_t words[] = {0x7fc0, 0x7f80, 0xff80, 0x7f81};
    ck_assert_uint_eq(write_file(header, sizeof header - 1, words, sizeof words), 64);
    eng_st_file *file = open_good();
    uint32_t bits[4];
    float values[4];
    ck_assert_int_eq(eng_st_read_f32(file, eng_st_at(file, 0), 0, 4, values, NULL), ENG_OK);
    memcpy(bits, values, sizeof bits);
    for (int i = 0; i < 4; i++)
        ck_assert_uint_eq(bits[i], (uint32_t)words[i] << 16);
    ck_assert_int_eq(eng_count_nonfinite(values, 4), 4);
    const float finite[] = {0, -1, 3.4e38f, 1e-45f};
    ck_assert_int_eq(eng_count_nonfinite(finite, 4), 0);
    eng_st_close(file);
}
END_TEST

// Growth of the process's largest resident size over one refused open, in bytes.
static long growth_of_open(const char *words) {
    struct rusage before, after;
    getrusage(RUSAGE_SELF, &before);
    expect_refusal("memory", ENG_FORMAT, words, NULL);
    getrusage(RUSAGE_SELF, &after);
    return (after.ru_maxrss - before.ru_maxrss) * 1024;
}

START_TEST(memory_stays_flat) {
    if (SANITIZED)
        MESA_TEST_SKIP("a sanitizer's own memory hides the figure");
    write_with_length((uint64_t)1 << 40);
    ck_assert_int_lt(growth_of_open("header length"), 1 << 20);
    const char lie[] = F32_A("[1000000,1000000]", "[0,4]");
    write_file(lie, sizeof lie - 1, NULL, 4);
    ck_assert_int_lt(growth_of_open("'a'"), 1 << 20);
    // A sparse file as long as it claims, but with no JSON in it: decided by its ninth byte.
    unsigned char start[9] = {0};
    put_length(start, 100000000);
    temp_write(file_name, start, sizeof start);
    ck_assert_int_eq(truncate(temp_path(file_name), 100000008), 0);
    ck_assert_int_lt(growth_of_open("offset 8"), 1 << 20);
    put_length(start, 100000001);
    temp_write(file_name, start, sizeof start);
    ck_assert_int_eq(truncate(temp_path(file_name), 200000000), 0);
    ck_assert_int_lt(growth_of_open("header length"), 1 << 20);
}
END_TEST

// A header of many empty tensors, or of many other values: in new memory.
static char *repeat(const char *format, int count, const char *end, size_t *length) {
    char *text = malloc((size_t)count * 80 + 16), *at = text;
    ck_assert_ptr_nonnull(text);
    *at++ = '{';
    for (int i = 0; i < count; i++) {
        if (i)
            *at++ = ',';
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
        at += sprintf(at, format, i);
#pragma GCC diagnostic pop
    }
    at += sprintf(at, "%s", end);
    *length = (size_t)(at - text);
    return text;
}

static const char empty_tensor[] = "\"%07d\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]}";

START_TEST(bounds_the_number_of_names) {
    size_t length;
    char *header = repeat(empty_tensor, ENG_ST_MAX_TENSORS, "}", &length);
    write_file(header, length, NULL, 0);
    free(header);
    eng_st_file *file = open_good();
    ck_assert_uint_eq(eng_st_count(file), ENG_ST_MAX_TENSORS);
    ck_assert_ptr_nonnull(eng_st_find(file, "0065535"));
    eng_st_close(file);
    header = repeat(empty_tensor, ENG_ST_MAX_TENSORS + 1, "}", &length);
    write_file(header, length, NULL, 0);
    free(header);
    expect_refusal("65537 names", ENG_FORMAT, "too many tensors", "'0065536'");
    header = repeat("\"%07d\":1", 100000, "}", &length);
    write_file(header, length, NULL, 0);
    free(header);
    expect_refusal("100000 numbers", ENG_FORMAT, "100000 tensors", NULL);
}
END_TEST

START_TEST(bounds_memory_of_a_million_names) {
    const char *const values[] = {empty_tensor, "\"%07d\":{}", "\"%07d\":[]", "\"%07d\":1"};
    for (int i = 0; i < 4; i++) {
        size_t length;
        char *header = repeat(values[i], 1000000, "}", &length);
        write_file(header, length, NULL, 0);
        free(header);
        struct rusage before, after;
        getrusage(RUSAGE_SELF, &before);
        expect_refusal("1M names", ENG_FORMAT, "too many tensors", "offset ");
        getrusage(RUSAGE_SELF, &after);
        if (!SANITIZED)
            ck_assert_int_lt((after.ru_maxrss - before.ru_maxrss) * 1024, (long)length + (4 << 20));
    }
}
END_TEST

START_TEST(bounds_names) {
    for (int size = ENG_ST_MAX_NAME; size <= ENG_ST_MAX_NAME + 1; size++) {
        char header[2048];
        char name[ENG_ST_MAX_NAME + 2];
        memset(name, 'n', sizeof name);
        name[size] = '\0';
        int length =
            snprintf(header, sizeof header, "{\"%s\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]}}", name);
        write_file(header, (size_t)length, NULL, 0);
        ck_assert_int_eq(open_status(NULL), size == ENG_ST_MAX_NAME ? ENG_OK : ENG_FORMAT);
    }
    size_t length = 1000000;
    char *header = malloc(length + 8);
    memset(header, 'n', length);
    memcpy(header, "{\"", 2);
    memcpy(header + length - 4, "\":1}", 4);
    write_file(header, length, NULL, 0);
    free(header);
    expect_refusal("1 MB name", ENG_FORMAT, "999994 bytes", "'nnn");
}
END_TEST

START_TEST(bounds_nesting) {
    const int depths[] = {4, 2048, 2049, 1000000};
    for (int i = 0; i < 4; i++) {
        size_t length = 5 + (size_t)depths[i] * 2;
        char *header = malloc(length + 1);
        strcpy(header, "{\"a\":");
        memset(header + 5, '[', (size_t)depths[i]);
        memset(header + 5 + depths[i], ']', (size_t)depths[i] - 1);
        header[length - 1] = '}';
        write_file(header, length, NULL, 0);
        free(header);
        expect_refusal("nesting", ENG_FORMAT, "nested too deep", "'a'");
    }
}
END_TEST

START_TEST(converts_16_bits) {
    for (uint32_t bits = 0; bits < 65536; bits++) {
        float wide = eng_bf16_to_f32((uint16_t)bits);
        uint32_t seen;
        memcpy(&seen, &wide, sizeof seen);
        ck_assert_uint_eq(seen, bits << 16);
        bool nan = (bits & 0x7fff) > 0x7f80;
        ck_assert_uint_eq(eng_bf16_from_f32(wide), nan ? bits | 0x40 : bits);

        int exponent = bits >> 10 & 31, fraction = bits & 1023;
        float half = eng_f16_to_f32((uint16_t)bits);
        float want = exponent == 0 ? ldexpf((float)fraction, -24) : ldexpf((float)(1024 + fraction), exponent - 25);
        if (exponent == 31)
            want = fraction ? NAN : INFINITY;
        if (bits & 0x8000)
            want = -want;
        ck_assert_msg(isnan(want) ? isnan(half) : half == want && signbit(half) == signbit(want), "f16 %04x", bits);
    }
}
END_TEST

START_TEST(rounds_to_nearest_even) {
    const struct {
        uint32_t from;
        uint16_t to;
    } cases[] = {
        {0x3f800000, 0x3f80}, {0x3f807fff, 0x3f80}, {0x3f808000, 0x3f80}, {0x3f808001, 0x3f81},
        {0x3f818000, 0x3f82}, {0x7f7fffff, 0x7f80}, {0xff7f7fff, 0xff7f}, {0x7f800001, 0x7fc0},
        {0xffffffff, 0xffff}, {0x00008001, 0x0001}, {0x80000000, 0x8000}, {0x7f800000, 0x7f80},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        float value;
        memcpy(&value, &cases[i].from, sizeof value);
        ck_assert_msg(eng_bf16_from_f32(value) == cases[i].to, "%08x gave %04x", cases[i].from,
                      eng_bf16_from_f32(value));
    }
}
END_TEST

START_TEST(shapes_are_checked) {
    int64_t count;
    uint64_t bytes;
    ck_assert(eng_shape_size(ENG_F64, 2, (int64_t[]){3, 5}, &count, &bytes));
    ck_assert_int_eq(count, 15);
    ck_assert_uint_eq(bytes, 120);
    ck_assert(eng_shape_size(ENG_U8, 0, NULL, &count, &bytes));
    ck_assert_int_eq(count, 1);
    ck_assert(eng_shape_size(ENG_U8, 1, (int64_t[]){INT64_MAX}, &count, &bytes));
    ck_assert(!eng_shape_size(ENG_I16, 1, (int64_t[]){INT64_MAX}, &count, &bytes));
    ck_assert(!eng_shape_size(ENG_U8, 1, (int64_t[]){-1}, &count, &bytes));
    ck_assert(!eng_shape_size(ENG_U8, 9, (int64_t[]){1, 1, 1, 1, 1, 1, 1, 1, 1}, &count, &bytes));
    ck_assert(!eng_shape_size((eng_dtype)99, 0, NULL, &count, &bytes));
    eng_dtype dtype;
    for (int i = ENG_F32; i <= ENG_BOOL; i++) {
        ck_assert(eng_dtype_parse(eng_dtype_name((eng_dtype)i), &dtype));
        ck_assert_int_eq((int)dtype, i);
    }
    ck_assert(!eng_dtype_parse("f32", &dtype));
    ck_assert_uint_eq(eng_dtype_size((eng_dtype)99), 0);
}
END_TEST

enum { MANY = 40000 }; // more than one piece of the 16-bit conversions

static float *many_values(void) {
    float *values = malloc(MANY * sizeof *values);
    ck_assert_ptr_nonnull(values);
    for (int i = 0; i < MANY; i++)
        values[i] = ldexpf((float)(i % 509 - 254) / 3, i % 61 - 30);
    const float special[] = {NAN, INFINITY, -INFINITY, -0.0f, 1e-45f, 3.4028235e38f};
    memcpy(values + 17000, special, sizeof special);
    return values;
}

static void check_round_trip(const eng_st_file *file, const char *name, const float *values) {
    const eng_st_entry *entry = eng_st_find(file, name);
    ck_assert_ptr_nonnull(entry);
    float *found = malloc(MANY * sizeof *found);
    ck_assert_int_eq(eng_st_read_f32(file, entry, 0, MANY, found, NULL), ENG_OK);
    for (int i = 0; i < MANY; i++) {
        float want = entry->dtype == ENG_BF16 ? eng_bf16_to_f32(eng_bf16_from_f32(values[i])) : values[i];
        ck_assert_msg(memcmp(&found[i], &want, sizeof want) == 0, "%s[%d]: %g, want %g", name, i, (double)found[i],
                      (double)want);
    }
    float part[3];
    ck_assert_int_eq(eng_st_read_f32(file, entry, 16999, 3, part, NULL), ENG_OK);
    ck_assert_int_eq(memcmp(part, found + 16999, sizeof part), 0);
    free(found);
}

START_TEST(writes_and_reads_back) {
    float *values = many_values();
    const int64_t ids[] = {-1, INT64_MAX};
    const uint8_t byte = 7;
    const eng_st_source sources[] = {
        {"byte", ENG_U8, 0, {0}, &byte, NULL, NULL},
        {"narrow \"\xc3\xa9\"/", ENG_BF16, 2, {MANY / 2, 2}, values, NULL, NULL},
        {"wide", ENG_F32, 1, {MANY}, values, NULL, NULL},
        {"empty", ENG_F32, 2, {0, 3}, NULL, NULL, NULL},
        {"ids", ENG_I64, 1, {2}, ids, NULL, NULL},
    };
    const char *const metadata[] = {"format", "pt", "note", "\xc3\xa9 \"quoted\"\n", NULL};
    eng_error error = {0};
    ck_assert_msg(eng_st_write(temp_path(file_name), sources, 5, metadata, &error) == ENG_OK, "%s", error.text);
    ck_assert(!temp_exists("model.safetensors.tmp"));
    eng_st_file *file = open_good();
    ck_assert_uint_eq(eng_st_count(file), 5);
    for (size_t i = 0; i < 5; i++) {
        const eng_st_entry *entry = eng_st_at(file, i);
        ck_assert_uint_eq(entry->offset % eng_dtype_size(entry->dtype), 0);
    }
    ck_assert_str_eq(eng_st_metadata(file, "note"), metadata[3]);
    check_round_trip(file, "wide", values);
    check_round_trip(file, sources[1].name, values);
    int64_t found[2];
    ck_assert_int_eq(eng_st_read(file, eng_st_find(file, "ids"), 0, 2, found, NULL), ENG_OK);
    ck_assert_int_eq(memcmp(found, ids, sizeof ids), 0);
    eng_st_close(file);
    free(values);
}
END_TEST

static eng_status count_up(void *context, int64_t first, int64_t count, void *values, eng_error *error) {
    int64_t *expected = context;
    float *floats = values;
    ck_assert_int_eq(first, *expected);
    ck_assert_int_le(count, ENG_ST_PIECE);
    *expected += count;
    for (int64_t i = 0; i < count; i++)
        floats[i] = (float)((first + i) % 256); // exact in either type
    return first + count == 2 * ENG_ST_PIECE + 2 ? eng_fail(error, ENG_NUMERIC, "enough") : ENG_OK;
}

START_TEST(writes_what_is_read_piece_by_piece) {
    int64_t expected = 0;
    eng_st_source source = {.name = "a",
                            .dtype = _i ? ENG_BF16 : ENG_F32,
                            .ndim = 1,
                            .shape = {2 * ENG_ST_PIECE + 1},
                            .read = count_up,
                            .context = &expected};
    ck_assert_int_eq(eng_st_write(temp_path(file_name), &source, 1, NULL, NULL), ENG_OK);
    eng_st_file *file = open_good();
    float *values = malloc((size_t)expected * sizeof *values);
    ck_assert_int_eq(eng_st_read_f32(file, eng_st_at(file, 0), 0, expected, values, NULL), ENG_OK);
    for (int64_t i = 0; i < expected; i++)
        ck_assert_float_eq(values[i], (float)(i % 256));
    free(values);
    eng_st_close(file);
    eng_error error = {0};
    source.shape[0]++;
    expected = 0;
    ck_assert_int_eq(eng_st_write(temp_path(file_name), &source, 1, NULL, &error), ENG_NUMERIC);
    ck_assert_str_eq(error.text, "enough");
}
END_TEST

static eng_status count_bytes(void *context, int64_t first, int64_t count, void *values, eng_error *error) {
    (void)context;
    (void)error;
    for (int64_t i = 0; i < count; i++)
        ((uint8_t *)values)[i] = (uint8_t)((first + i) % 251);
    return ENG_OK;
}

START_TEST(writes_pieces_as_they_are) {
    enum { BYTES = 2 * ENG_ST_PIECE + 1 };
    const eng_st_source source = {.name = "a", .dtype = ENG_U8, .ndim = 1, .shape = {BYTES}, .read = count_bytes};
    ck_assert_int_eq(eng_st_write(temp_path(file_name), &source, 1, NULL, NULL), ENG_OK);
    eng_st_file *file = open_good();
    uint8_t *values = malloc(BYTES);
    ck_assert_int_eq(eng_st_read(file, eng_st_at(file, 0), 0, BYTES, values, NULL), ENG_OK);
    for (int64_t i = 0; i < BYTES; i++)
        ck_assert_uint_eq(values[i], i % 251);
    free(values);
    eng_st_close(file);
}
END_TEST

START_TEST(writer_refuses_what_reader_would) {
    const float x[4] = {0};
    char long_name[ENG_ST_MAX_NAME + 2];
    memset(long_name, 'n', sizeof long_name);
    long_name[sizeof long_name - 1] = '\0';
    const eng_st_source bad[] = {
        {NULL, ENG_F32, 0, {0}, x, NULL, NULL},      {"__metadata__", ENG_F32, 0, {0}, x, NULL, NULL},
        {long_name, ENG_F32, 0, {0}, x, NULL, NULL}, {"\xff", ENG_F32, 0, {0}, x, NULL, NULL},
        {"a", ENG_F32, 1, {-1}, x, NULL, NULL},      {"a", ENG_F32, 9, {1}, x, NULL, NULL},
        {"a", (eng_dtype)99, 0, {0}, x, NULL, NULL}, {"a", ENG_F32, 1, {4}, NULL, NULL, NULL},
        {"a", ENG_F32, -1, {0}, x, NULL, NULL},      {"a", ENG_F32, 1, {INT64_MAX}, x, NULL, NULL},
    };
    temp_write(file_name, "old", 3);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        eng_error error = {0};
        ck_assert_msg(eng_st_write(temp_path(file_name), &bad[i], 1, NULL, &error) == ENG_INVALID, "source %zu", i);
        ck_assert_ptr_nonnull(strstr(error.text, file_name));
    }
    const eng_st_source twice[] = {{"a", ENG_F32, 1, {4}, x, NULL, NULL}, {"a", ENG_BF16, 1, {4}, x, NULL, NULL}};
    ck_assert_int_eq(eng_st_write(temp_path(file_name), twice, 2, NULL, NULL), ENG_INVALID);
    const char *const no_value[] = {"key", NULL};
    ck_assert_int_eq(eng_st_write(temp_path(file_name), twice, 1, no_value, NULL), ENG_INVALID);
    const char *const key_twice[] = {"key", "1", "key", "2", NULL};
    ck_assert_int_eq(eng_st_write(temp_path(file_name), twice, 1, key_twice, NULL), ENG_INVALID);
    ck_assert_int_eq(eng_st_write(temp_path("no/such/folder"), twice, 1, NULL, NULL), ENG_NOT_FOUND);
    ck_assert(temp_holds(file_name, "old"));
    ck_assert(!temp_exists("model.safetensors.tmp"));
}
END_TEST

START_TEST(full_disk_leaves_the_old_file) {
    float *values = many_values();
    const eng_st_source before = {"a", ENG_F32, 1, {100}, values, NULL, NULL};
    const eng_st_source after = {"a", _i ? ENG_BF16 : ENG_F32, 1, {MANY}, values, NULL, NULL};
    ck_assert_int_eq(eng_st_write(temp_path(file_name), &before, 1, NULL, NULL), ENG_OK);
    limit_file_size(20000);
    eng_error error = {0};
    ck_assert_int_eq(eng_st_write(temp_path(file_name), &after, 1, NULL, &error), ENG_IO);
    ck_assert_ptr_nonnull(strstr(error.text, "cannot write"));
    ck_assert(!temp_exists("model.safetensors.tmp"));
    eng_st_file *file = open_good();
    ck_assert_int_eq(eng_st_at(file, 0)->count, 100);
    eng_st_close(file);
    free(values);
}
END_TEST

static const char *const golden[] = {"mesa_net", "delta_net", "kda", "mamba2_hf", "xlstm_hf"};

START_TEST(opens_public_checkpoints) {
    char relative[128], path[512];
    snprintf(relative, sizeof relative, "golden/%s/model.safetensors", golden[_i]);
    if (!mesa_test_shared(relative, path, sizeof path))
        MESA_TEST_SKIP("no %s", relative);
    eng_st_file *file;
    eng_error error = {0};
    ck_assert_msg(eng_st_open(path, &file, &error) == ENG_OK, "%s", error.text);
    ck_assert_uint_gt(eng_st_count(file), 0);
    for (size_t i = 0; i < eng_st_count(file); i++) {
        const eng_st_entry *entry = eng_st_at(file, i);
        float *values = malloc((size_t)entry->count * sizeof *values + 1);
        ck_assert_int_eq(eng_st_read_f32(file, entry, 0, entry->count, values, &error), ENG_OK);
        ck_assert_int_eq(eng_count_nonfinite(values, entry->count), 0);
        free(values);
    }
    eng_st_close(file);
}
END_TEST

#define COUNT(table) (int)(sizeof(table) / sizeof(table)[0])

static Suite *safetensors_suite(void) {
    Suite *suite = suite_create("safetensors");
    TCase *reading = tcase_create("reading");
    tcase_add_checked_fixture(reading, temp_folder_make, temp_folder_remove);
    tcase_set_timeout(reading, 60);
    tcase_add_loop_test(reading, accepts, 0, COUNT(accepted));
    tcase_add_test(reading, describes_entries);
    tcase_add_loop_test(reading, refuses, 0, COUNT(refused));
    tcase_add_test(reading, refuses_lengths);
    tcase_add_test(reading, refuses_short_files);
    tcase_add_test(reading, refuses_every_truncation);
    tcase_add_test(reading, refuses_what_is_no_file);
    tcase_add_test(reading, shrinking_file_is_an_error);
    tcase_add_test(reading, refuses_ranges_and_types);
    tcase_add_test(reading, reads_nan_and_infinity);
    tcase_add_test(reading, memory_stays_flat);
    tcase_add_test(reading, bounds_the_number_of_names);
    tcase_add_test(reading, bounds_memory_of_a_million_names);
    tcase_add_test(reading, bounds_names);
    tcase_add_test(reading, bounds_nesting);
    tcase_add_loop_test(reading, opens_public_checkpoints, 0, COUNT(golden));
    suite_add_tcase(suite, reading);

    TCase *numbers = tcase_create("numbers");
    tcase_add_test(numbers, converts_16_bits);
    tcase_add_test(numbers, rounds_to_nearest_even);
    tcase_add_test(numbers, shapes_are_checked);
    suite_add_tcase(suite, numbers);

    TCase *writing = tcase_create("writing");
    tcase_add_checked_fixture(writing, temp_folder_make, temp_folder_remove);
    tcase_add_test(writing, writes_and_reads_back);
    tcase_add_loop_test(writing, writes_what_is_read_piece_by_piece, 0, 2);
    tcase_add_test(writing, writes_pieces_as_they_are);
    tcase_add_test(writing, writer_refuses_what_reader_would);
    tcase_add_loop_test(writing, full_disk_leaves_the_old_file, 0, 2);
    suite_add_tcase(suite, writing);
    return suite;
}

MESA_TEST_MAIN(safetensors_suite)
