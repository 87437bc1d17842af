// SPDX-License-Identifier: Apache-2.0
// GGUF files byte by byte: which are accepted, which refused and with what words; values of every block format.
//
// Refusals start from one good file of keys and tensors, in which single numbers are changed at their place. The values
// of the block formats were recorded from the public `gguf` package over the same bytes.
#include "engine/gguf.h"

#include <string.h>
#include <sys/resource.h>

#include "engine/digest.h"
#include "engine/quantize.h"
#include "tests/check_main.h"
#include "tests/engine/gguf_bag.h"
#include "tests/engine/temp_folder.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#else
#define SANITIZED 0
#endif

static const char *const file_name = "model.gguf";

static eng_status open_file(eng_gguf **file, eng_error *error) {
    return eng_gguf_open(temp_path(file_name), file, error);
}

static eng_gguf *open_good(void) {
    eng_gguf *file;
    eng_error error = {0};
    ck_assert_msg(open_file(&file, &error) == ENG_OK, "%s", error.text);
    return file;
}

static void expect_refusal(const char *label, eng_status wanted, const char *words) {
    eng_gguf *file;
    eng_error error = {0};
    eng_status status = open_file(&file, &error);
    ck_assert_msg(status == wanted, "%s: status %d, wanted %d (%s)", label, status, wanted, error.text);
    ck_assert_ptr_null(file);
    ck_assert_int_eq(error.code, status);
    ck_assert_msg(strstr(error.text, file_name) != NULL, "%s: '%s' lacks the file", label, error.text);
    ck_assert_msg(strstr(error.text, words) != NULL, "%s: '%s' lacks '%s'", label, error.text, words);
}

static const float eight[8] = {1, 2, 3, 4, 5, 6, 7, 8};

// Every type of value, an array of arrays, three tensors of which one is empty.
static void fill_good(gguf_bag *bag) {
    static const char *const texts[] = {"a", "", "\xff\x00"};
    int8_t i8 = -3;
    int64_t i64 = INT64_MIN;
    uint64_t u64 = UINT64_MAX;
    double f64 = 0.1;
    uint16_t i16[] = {1, 0xffff};
    gguf_put_text(bag, "general.architecture", "llama");
    gguf_put(bag, "i8", 1, &i8, sizeof i8);
    gguf_put(bag, "i64", 11, &i64, sizeof i64);
    gguf_put(bag, "u64", 10, &u64, sizeof u64);
    gguf_put(bag, "f64", 12, &f64, sizeof f64);
    gguf_put_u32(bag, "u32", 7);
    gguf_put_f32(bag, "f32", 0.5f);
    gguf_put_flag(bag, "flag", true);
    gguf_put_texts(bag, "texts", texts, 3);
    gguf_put_list(bag, "i16", 3, i16, 2, sizeof i16);
    // [[1, 2], [], [-1]] of i16
    unsigned char nested[] = {3, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 1, 0, 2, 0, 3, 0, 0, 0,    0,
                              0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
    gguf_put_list(bag, "nested", 9, nested, 3, sizeof nested);
    gguf_put_tensor(bag, "b", 0, 2, (const uint64_t[]){4, 2}, eight, sizeof eight);
    gguf_put_tensor(bag, "empty", 0, 1, (const uint64_t[]){0}, eight, 0);
    gguf_put_tensor(bag, "a", 0, 0, NULL, eight, 4);
}

static const eng_gguf_value *key(const eng_gguf *file, const char *name) {
    const eng_gguf_value *value = eng_gguf_key(file, name);
    ck_assert_ptr_nonnull(value);
    return value;
}

static void check_nested(const eng_gguf_value *value) {
    static const struct { int count, values[2]; } wanted[] = {{2, {1, 2}}, {0, {0}}, {1, {-1}}};
    eng_gguf_items outer = eng_gguf_begin(value);
    eng_gguf_value inner, element;
    int lists = 0;
    for (; eng_gguf_next(&outer, &inner); lists++) {
        eng_gguf_items items = eng_gguf_begin(&inner);
        int64_t number;
        int count = 0;
        for (; eng_gguf_next(&items, &element); count++) {
            ck_assert(eng_gguf_integer(&element, &number));
            ck_assert_int_eq(number, wanted[lists].values[count]);
        }
        ck_assert_int_eq(count, wanted[lists].count);
    }
    ck_assert_int_eq(lists, 3);
}

static void check_keys(const eng_gguf *file) {
    int64_t integer;
    double real;
    bool flag = false;
    ck_assert(eng_gguf_integer(key(file, "i8"), &integer) && integer == -3);
    ck_assert(eng_gguf_integer(key(file, "i64"), &integer) && integer == INT64_MIN);
    ck_assert(eng_gguf_integer(key(file, "u32"), &integer) && integer == 7);
    ck_assert(!eng_gguf_integer(key(file, "u64"), &integer));
    ck_assert(!eng_gguf_integer(key(file, "f32"), &integer));
    ck_assert(eng_gguf_real(key(file, "f32"), &real) && real == 0.5);
    ck_assert(eng_gguf_real(key(file, "f64"), &real) && real == 0.1);
    ck_assert(!eng_gguf_real(key(file, "u32"), &real));
    ck_assert(eng_gguf_flag(key(file, "flag"), &flag) && flag);
    ck_assert(!eng_gguf_flag(key(file, "u32"), &flag));
    ck_assert_ptr_null(eng_gguf_key(file, "none"));
    eng_gguf_items items = eng_gguf_begin(key(file, "texts"));
    eng_gguf_value text;
    ck_assert(eng_gguf_next(&items, &text) && text.count == 1 && *text.data == 'a');
    ck_assert(eng_gguf_next(&items, &text) && text.count == 0);
    ck_assert(eng_gguf_next(&items, &text) && text.count == 1 && *text.data == 0xff);
    ck_assert(!eng_gguf_next(&items, &text));
    check_nested(key(file, "nested"));
}

START_TEST(reads_what_stands_there) {
    gguf_bag bag = {.version = _i ? 2 : 3};
    fill_good(&bag);
    gguf_write(&bag, file_name);
    eng_gguf *file = open_good();
    check_keys(file);
    ck_assert_uint_eq(eng_gguf_key_count(file), 11);
    ck_assert_uint_eq(eng_gguf_tensor_count(file), 3);
    const eng_gguf_tensor *b = eng_gguf_find(file, "b"), *a = eng_gguf_find(file, "a");
    ck_assert_int_eq(b->shape[0], 2);
    ck_assert_int_eq(b->shape[1], 4);
    float values[8];
    ck_assert_int_eq(eng_gguf_read_f32(file, b, 0, 8, values, NULL), ENG_OK);
    ck_assert_mem_eq(values, eight, sizeof eight);
    ck_assert_int_eq(eng_gguf_read_f32(file, b, 5, 2, values, NULL), ENG_OK);
    ck_assert_float_eq(values[1], 7);
    ck_assert_int_eq(eng_gguf_read_f32(file, a, 0, 1, values, NULL), ENG_OK);
    ck_assert_float_eq(values[0], 1);
    ck_assert_int_eq(eng_gguf_find(file, "empty")->count, 0);
    ck_assert_ptr_null(eng_gguf_find(file, "c"));
    ck_assert_int_eq(eng_gguf_read_f32(file, b, 1, 8, values, NULL), ENG_INVALID);
    ck_assert_int_eq(eng_gguf_read_f32(file, b, -1, 1, values, NULL), ENG_INVALID);
    eng_gguf_close(file);
    gguf_bag_free(&bag);
}
END_TEST

START_TEST(keeps_another_alignment) {
    uint32_t alignment = 256;
    gguf_bag bag = {.alignment = alignment};
    gguf_put_u32(&bag, "general.alignment", alignment);
    gguf_put_tensor(&bag, "a", 0, 1, (const uint64_t[]){1}, eight, 4);
    gguf_put_tensor(&bag, "b", 0, 1, (const uint64_t[]){8}, eight, sizeof eight);
    gguf_write(&bag, file_name);
    eng_gguf *file = open_good();
    float value;
    ck_assert_uint_eq(eng_gguf_find(file, "b")->offset % alignment, 0);
    ck_assert_int_eq(eng_gguf_read_f32(file, eng_gguf_find(file, "b"), 7, 1, &value, NULL), ENG_OK);
    ck_assert_float_eq(value, 8);
    eng_gguf_close(file);
    gguf_bag_free(&bag);
}
END_TEST

// ---- block formats

static const struct {
    const char *name;
    uint32_t number;
    int elements, bytes;
    int scales[2]; // offsets of the half-precision scales, -1: none
    float at_1, at_40, at_511;
    const char *digest; // of 512 values
} formats[] = {
    {"F16",
     1,
     1,
     2,
     {0, -1},
     0.0892333984f,
     0.0773925781f,
     0.236572266f,
     "9397ab98e951675cdd3c9f258342dd402b323206b6481214bb74fbad32ca29a3"},
    {"Q4_0",
     2,
     32,
     18,
     {0, -1},
     0.265869141f,
     0.420837402f,
     -1.58508301f,
     "c8b1825f93b1db7fbadfc93d2550835a0a2a4feef53b4f17eba10d8c6236fcc3"},
    {"Q4_1",
     3,
     32,
     20,
     {0, 2},
     0.827758789f,
     1.19726562f,
     1.47045898f,
     "132969ad5c79f6faf8b0754356bd14b484476a7f0a7dd642e0bfdc0eabc2b9bc"},
    {"Q5_0",
     6,
     32,
     22,
     {0, -1},
     0.294189453f,
     -0.65411377f,
     -0.976074219f,
     "986cbd24115059ce281490ac2aca0b3aeddd49a265869eae5cb04935a563dec4"},
    {"Q5_1",
     7,
     32,
     24,
     {0, 2},
     1.49963379f,
     2.3828125f,
     0.220214844f,
     "3da92ea03c4ca1716e838a7f89532abdde95c996144cec5da6e3a0ca70aa80d5"},
    {"Q8_0",
     8,
     32,
     34,
     {0, -1},
     -4.16271973f,
     10.8180542f,
     -13.3459473f,
     "340277dd46b56a99f4381be8e74b294d51291545d8be6ad694c604ada96b8521"},
    {"Q4_K",
     12,
     256,
     144,
     {0, 2},
     2.42706299f,
     -0.737548828f,
     3.26873779f,
     "e017f62b469530458d27a21a80c4f6bec083b9f96942788dcbf826c359856ee0"},
    {"Q5_K",
     13,
     256,
     176,
     {0, 2},
     62.7724609f,
     21.0672607f,
     26.0167236f,
     "956b48798bdf80cadd0500239dec3eaf5b8e723a38887c6f558d4ea80b605fe0"},
    {"Q6_K",
     14,
     256,
     210,
     {208, -1},
     42.9466553f,
     14.3925171f,
     -298.96106f,
     "506129736492b56abb1db1070aa34b7b31829d51b1c605ade2e7d459e07b3d67"},
    {"BF16",
     30,
     1,
     2,
     {0, -1},
     2.89901436e-11f,
     2.68585154e-12f,
     1.01979822e-07f,
     "c5a74c8fcc3fdd4cd0a3832820e0d51e11d16c43928370b09fbdd41efb688ac2"},
};

START_TEST(widens_blocks) {
    enum { VALUES = 512 };
    unsigned char stored[2 * VALUES], digest[ENG_DIGEST_BYTES];
    char hex[ENG_DIGEST_HEX];
    float values[VALUES];
    const int blocks = VALUES / formats[_i].elements, size = formats[_i].bytes;
    for (int i = 0; i < blocks * size; i++)
        stored[i] = (unsigned char)(i * 73 + (int)formats[_i].number * 29 + 7);
    for (int block = 0; block < blocks; block++) {
        for (int k = 0; k < 2 && formats[_i].scales[k] >= 0; k++)
            stored[block * size + formats[_i].scales[k] + 1] = (unsigned char)(0x2c + block % 8); // finite
    }
    gguf_bag bag = {0};
    gguf_put_tensor(&bag, "w", formats[_i].number, 1, (const uint64_t[]){VALUES}, stored, (size_t)(blocks * size));
    gguf_write(&bag, file_name);
    eng_gguf *file = open_good();
    const eng_gguf_tensor *tensor = eng_gguf_find(file, "w");
    ck_assert_str_eq(tensor->format->name, formats[_i].name);
    ck_assert_int_eq(eng_gguf_read_f32(file, tensor, 0, VALUES, values, NULL), ENG_OK);
    ck_assert_float_eq(values[1], formats[_i].at_1);
    ck_assert_float_eq(values[40], formats[_i].at_40);
    ck_assert_float_eq(values[511], formats[_i].at_511);
    ck_assert_int_eq(eng_digest_bytes(values, sizeof values, digest), ENG_OK);
    eng_digest_hex(digest, hex);
    ck_assert_str_eq(hex, formats[_i].digest);
    float part[256];
    ck_assert_int_eq(eng_gguf_read_f32(file, tensor, 256, 256, part, NULL), ENG_OK);
    ck_assert_mem_eq(part, values + 256, sizeof part);
    if (formats[_i].elements > 1) {
        ck_assert_int_eq(eng_gguf_read_f32(file, tensor, 1, 256, part, NULL), ENG_INVALID);
    }
    eng_gguf_close(file);
    gguf_bag_free(&bag);
}
END_TEST

// What the engine's own blocks say must be what the format's values are.
START_TEST(takes_blocks) {
    enum { ROWS = 3, COLS = 96, BLOCKS = ROWS * COLS / 32 };
    static const uint32_t numbers[] = {2, 3, 8};
    const eng_block_format *format = eng_block_format_find(numbers[_i]);
    unsigned char stored[BLOCKS * 34];
    for (int i = 0; i < BLOCKS * format->bytes; i++)
        stored[i] = (unsigned char)(i * 151 + 5);
    for (int b = 0; b < BLOCKS; b++) {
        stored[b * format->bytes + 1] = (unsigned char)(0x2c + b % 8);
        if (format->minimum)
            stored[b * format->bytes + 3] = (unsigned char)(0xac + b % 8);
    }
    gguf_bag bag = {0};
    gguf_put_tensor(&bag, "w", format->number, 2, (const uint64_t[]){COLS, ROWS}, stored,
                    (size_t)(BLOCKS * format->bytes));
    gguf_write(&bag, file_name);
    eng_gguf *file = open_good();
    const eng_gguf_tensor *tensor = eng_gguf_find(file, "w");
    float values[ROWS * COLS], widened[ROWS * COLS];
    uint16_t scale;
    eng_blocks blocks;
    ck_assert_int_eq(eng_gguf_read_f32(file, tensor, 0, ROWS * COLS, values, NULL), ENG_OK);
    const kern_dtype dtype = format->bits == 8 ? KERN_Q8 : KERN_Q4;
    ck_assert_int_eq(eng_blocks_create(dtype, ROWS, COLS, format->minimum, &blocks, NULL), ENG_OK);
    ck_assert_int_eq(eng_gguf_read_blocks(file, tensor, ENG_BLOCK_CODES, 0, BLOCKS, blocks.code, NULL), ENG_OK);
    ck_assert_int_eq(eng_gguf_read_blocks(file, tensor, ENG_BLOCK_SCALE, 0, BLOCKS, blocks.scale, NULL), ENG_OK);
    if (format->minimum)
        ck_assert_int_eq(eng_gguf_read_blocks(file, tensor, ENG_BLOCK_MINIMUM, 0, BLOCKS, blocks.minimum, NULL),
                         ENG_OK);
    eng_blocks_widen(&blocks, widened);
    ck_assert_mem_eq(widened, values, sizeof values);
    ck_assert_int_eq(eng_gguf_read_blocks(file, tensor, ENG_BLOCK_SCALE, BLOCKS - 1, 1, &scale, NULL), ENG_OK);
    ck_assert_uint_eq(scale, blocks.scale[BLOCKS - 1]);
    ck_assert_int_eq(eng_gguf_read_blocks(file, tensor, ENG_BLOCK_SCALE, BLOCKS, 1, &scale, NULL), ENG_INVALID);
    ck_assert_int_eq(eng_gguf_read_blocks(file, tensor, ENG_BLOCK_SCALE, -1, 1, &scale, NULL), ENG_INVALID);
    eng_blocks_free(&blocks);
    eng_gguf_close(file);
    gguf_bag_free(&bag);
}
END_TEST

START_TEST(reads_long_tensors_in_pieces) {
    enum { BLOCKS = 5000 };
    unsigned char *stored = calloc(BLOCKS, 34);
    float *values = malloc(BLOCKS * 32 * sizeof *values);
    ck_assert(stored && values);
    for (int i = 0; i < BLOCKS; i++) {
        stored[i * 34 + 1] = 0x3c; // a scale of 1
        stored[i * 34 + 2 + i % 32] = (unsigned char)(i % 100);
    }
    gguf_bag bag = {0};
    gguf_put_tensor(&bag, "w", 8, 1, (const uint64_t[]){BLOCKS * 32}, stored, BLOCKS * 34);
    gguf_write(&bag, file_name);
    eng_gguf *file = open_good();
    ck_assert_int_eq(eng_gguf_read_f32(file, eng_gguf_find(file, "w"), 0, BLOCKS * 32, values, NULL), ENG_OK);
    for (int i = 0; i < BLOCKS * 32; i++)
        ck_assert_float_eq(values[i], i / 32 % 32 == i % 32 ? (float)(i / 32 % 100) : 0);
    eng_gguf_close(file);
    gguf_bag_free(&bag);
    free(values);
    free(stored);
}
END_TEST

// ---- refusals

typedef void change_fn(gguf_bag *bag);

static void twice_key(gguf_bag *bag) {
    gguf_put_u32(bag, "u32", 8);
}
static void twice_tensor(gguf_bag *bag) {
    gguf_put_tensor(bag, "b", 0, 1, (const uint64_t[]){8}, eight, sizeof eight);
}
static void type_13(gguf_bag *bag) {
    gguf_put(bag, "odd", 13, eight, 4);
}
static void flag_2(gguf_bag *bag) {
    gguf_put(bag, "odd", 7, "\x02", 1);
}
static void flags_2(gguf_bag *bag) {
    gguf_put_list(bag, "odd", 7, "\x01\x02", 2, 2);
}
static void endless_text(gguf_bag *bag) {
    uint64_t length = UINT64_MAX - 7;
    gguf_put(bag, "odd", 8, &length, sizeof length);
}
static void endless_list(gguf_bag *bag) {
    gguf_put_list(bag, "odd", 10, eight, (size_t)1 << 61, sizeof eight); // 2^61 * 8 wraps
}
static void endless_texts(gguf_bag *bag) {
    gguf_put_list(bag, "odd", 8, eight, (size_t)1 << 40, sizeof eight);
}
static void element_99(gguf_bag *bag) {
    gguf_put_list(bag, "odd", 99, eight, 1, sizeof eight);
}
static void deep_list(gguf_bag *bag) {
    unsigned char heads[12 * 6] = {0};
    for (int i = 0; i < 6; i++) {
        heads[12 * i] = 9;
        heads[12 * i + 4] = 1;
    }
    gguf_put(bag, "odd", 9, heads, sizeof heads);
}
static void empty_name(gguf_bag *bag) {
    gguf_put_u32(bag, "", 1);
}
static void odd_name(gguf_bag *bag) {
    gguf_put_u32(bag, "\xff", 1);
}
static void long_name(gguf_bag *bag) {
    char name[1100];
    memset(name, 'n', sizeof name - 1);
    name[sizeof name - 1] = 0;
    gguf_put_u32(bag, name, 1);
}
static void alignment_0(gguf_bag *bag) {
    gguf_put_u32(bag, "general.alignment", 0);
}
static void alignment_24(gguf_bag *bag) {
    gguf_put_u32(bag, "general.alignment", 24);
}
static void alignment_text(gguf_bag *bag) {
    gguf_put_text(bag, "general.alignment", "32");
}
static void alignment_64(gguf_bag *bag) { // the data lie on 32
    gguf_put_u32(bag, "general.alignment", 64);
}
static void format_99(gguf_bag *bag) {
    gguf_put_tensor(bag, "odd", 99, 1, (const uint64_t[]){8}, eight, sizeof eight);
}
static void half_block(gguf_bag *bag) {
    gguf_put_tensor(bag, "odd", 8, 2, (const uint64_t[]){16, 2}, eight, sizeof eight);
}
static void five_dims(gguf_bag *bag) {
    gguf_put_tensor(bag, "odd", 0, 5, (const uint64_t[]){1, 1, 1, 1, 1}, eight, 4);
}
static void wrapping_shape(gguf_bag *bag) {
    gguf_put_tensor(bag, "odd", 0, 2, (const uint64_t[]){(uint64_t)1 << 33, (uint64_t)1 << 33}, eight, 4);
}
static void negative_shape(gguf_bag *bag) {
    gguf_put_tensor(bag, "odd", 0, 1, (const uint64_t[]){UINT64_MAX}, eight, 4);
}
static void wrapping_bytes(gguf_bag *bag) {
    gguf_put_tensor(bag, "odd", 0, 1, (const uint64_t[]){(uint64_t)1 << 62}, eight, 4);
}
static void past_the_end(gguf_bag *bag) {
    gguf_put_tensor(bag, "odd", 0, 1, (const uint64_t[]){9}, eight, sizeof eight);
}
static void overlap(gguf_bag *bag) {
    gguf_put_tensor(bag, "odd", 0, 1, (const uint64_t[]){16}, eight, 32);
    gguf_put_tensor(bag, "odder", 0, 1, (const uint64_t[]){8}, eight, 32);
}
static void gap(gguf_bag *bag) {
    gguf_append(&bag->data, eight, sizeof eight);
    gguf_put_tensor(bag, "odd", 0, 1, (const uint64_t[]){8}, eight, sizeof eight);
}
static void tail(gguf_bag *bag) {
    gguf_append(&bag->data, "x", 1);
}
static void far_tensor(gguf_bag *bag) { // its offset is the last thing of the infos
    uint64_t offset = UINT64_MAX - 31;
    gguf_put_tensor(bag, "odd", 0, 1, (const uint64_t[]){8}, eight, sizeof eight);
    memcpy(bag->infos.bytes + bag->infos.length - 8, &offset, 8);
}
static void crooked_tensor(gguf_bag *bag) {
    uint64_t offset = 68;
    gguf_put_tensor(bag, "odd", 0, 1, (const uint64_t[]){8}, eight, sizeof eight);
    memcpy(bag->infos.bytes + bag->infos.length - 8, &offset, 8);
}
static void version_1(gguf_bag *bag) {
    bag->version = 1;
}
static void version_4(gguf_bag *bag) {
    bag->version = 4;
}
static void big_endian(gguf_bag *bag) {
    bag->version = 3u << 24;
}
static void many_keys(gguf_bag *bag) {
    bag->key_count = UINT64_MAX / 14;
}
static void more_keys(gguf_bag *bag) {
    bag->key_count++;
}
static void many_tensors(gguf_bag *bag) {
    bag->tensor_count = 65536;
}

static const struct {
    const char *label;
    change_fn *change;
    eng_status status;
    const char *words;
} refused[] = {
    {"key twice", twice_key, ENG_FORMAT, "key 'u32' is there twice"},
    {"tensor twice", twice_tensor, ENG_FORMAT, "tensor 'b' is there twice"},
    {"value type", type_13, ENG_FORMAT, "key 'odd': offset"},
    {"flag", flag_2, ENG_FORMAT, "neither 0 nor 1"},
    {"flags", flags_2, ENG_FORMAT, "neither 0 nor 1"},
    {"endless text", endless_text, ENG_FORMAT, "18446744073709551608 bytes are wanted"},
    {"endless list", endless_list, ENG_FORMAT, "2305843009213693952 values"},
    {"endless texts", endless_texts, ENG_FORMAT, "1099511627776 values"},
    {"element type", element_99, ENG_FORMAT, "value type 99"},
    {"deep list", deep_list, ENG_FORMAT, "nested deeper than 4"},
    {"empty name", empty_name, ENG_FORMAT, "name of a key has 0 bytes"},
    {"name no UTF-8", odd_name, ENG_FORMAT, "not UTF-8"},
    {"long name", long_name, ENG_FORMAT, "name of a key has 1099 bytes"},
    {"alignment 0", alignment_0, ENG_FORMAT, "general.alignment"},
    {"alignment 24", alignment_24, ENG_FORMAT, "general.alignment"},
    {"alignment text", alignment_text, ENG_FORMAT, "general.alignment"},
    {"alignment 64", alignment_64, ENG_FORMAT, "no multiple of the alignment 64"},
    {"format", format_99, ENG_UNSUPPORTED, "tensor 'odd': offset"},
    {"half block", half_block, ENG_FORMAT, "blocks of 32"},
    {"five dimensions", five_dims, ENG_FORMAT, "5 dimensions"},
    {"wrapping shape", wrapping_shape, ENG_FORMAT, "beyond 2^63"},
    {"negative shape", negative_shape, ENG_FORMAT, "beyond 2^63"},
    {"wrapping bytes", wrapping_bytes, ENG_FORMAT, "beyond 2^63"},
    {"past the end", past_the_end, ENG_FORMAT, "reach past the end"},
    {"overlap", overlap, ENG_FORMAT, "overlaps"},
    {"gap", gap, ENG_FORMAT, "leaves a gap"},
    {"tail", tail, ENG_FORMAT, "belong to no tensor"},
    {"far tensor", far_tensor, ENG_FORMAT, "reach past the end"},
    {"crooked tensor", crooked_tensor, ENG_FORMAT, "no multiple of the alignment 32"},
    {"version 1", version_1, ENG_UNSUPPORTED, "version (0x00000001)"},
    {"version 4", version_4, ENG_UNSUPPORTED, "version (0x00000004)"},
    {"big-endian", big_endian, ENG_UNSUPPORTED, "big-endian"},
    {"many keys", many_keys, ENG_FORMAT, "do not fit"},
    {"one key too many", more_keys, ENG_FORMAT, "offset"},
    {"many tensors", many_tensors, ENG_FORMAT, "do not fit"},
};

START_TEST(refuses) {
    gguf_bag bag = {0};
    fill_good(&bag);
    refused[_i].change(&bag);
    gguf_write(&bag, file_name);
    expect_refusal(refused[_i].label, refused[_i].status, refused[_i].words);
    gguf_bag_free(&bag);
}
END_TEST

START_TEST(refuses_every_truncation) {
    gguf_bag bag = {0};
    fill_good(&bag);
    eng_buffer whole = gguf_file(&bag);
    for (size_t length = 0; length + 28 < whole.length; length++) { // the last 28 bytes are padding
        temp_write(file_name, whole.bytes, length);
        expect_refusal("cut", ENG_FORMAT, file_name);
    }
    eng_buffer_free(&whole);
    gguf_bag_free(&bag);
}
END_TEST

START_TEST(refuses_another_file) {
    temp_write(file_name, "{\"a\":1}.................", 24);
    expect_refusal("no GGUF", ENG_FORMAT, "no GGUF file");
    eng_gguf *file;
    eng_error error = {0};
    ck_assert_int_eq(eng_gguf_open(temp_folder(), &file, &error), ENG_INVALID);
    ck_assert_int_eq(eng_gguf_open(temp_path("none"), &file, NULL), ENG_NOT_FOUND);
}
END_TEST

// A file that claims gigabytes needs none.
START_TEST(memory_stays_flat) {
    if (SANITIZED)
        MESA_TEST_SKIP("a sanitizer reserves more");
    struct rlimit limit = {256 << 20, 256 << 20};
    ck_assert_int_eq(setrlimit(RLIMIT_AS, &limit), 0);
    static change_fn *const claims[] = {endless_text, endless_list, endless_texts, many_keys, wrapping_bytes};
    for (size_t i = 0; i < sizeof claims / sizeof *claims; i++) {
        gguf_bag bag = {0};
        fill_good(&bag);
        claims[i](&bag);
        gguf_write(&bag, file_name);
        expect_refusal("claim", ENG_FORMAT, file_name);
        gguf_bag_free(&bag);
    }
}
END_TEST

START_TEST(shrinking_file_is_an_error) {
    gguf_bag bag = {0};
    fill_good(&bag);
    gguf_write(&bag, file_name);
    eng_gguf *file = open_good();
    float values[8];
    eng_error error = {0};
    ck_assert_int_eq(truncate(temp_path(file_name), 64), 0);
    ck_assert_int_eq(eng_gguf_read_f32(file, eng_gguf_find(file, "b"), 0, 8, values, &error), ENG_IO);
    ck_assert_ptr_nonnull(strstr(error.text, "tensor 'b'"));
    eng_gguf_close(file);
    gguf_bag_free(&bag);
}
END_TEST

#define COUNT(table) (int)(sizeof(table) / sizeof(table)[0])

static Suite *gguf_suite(void) {
    Suite *suite = suite_create("gguf");
    TCase *reading = tcase_create("reading");
    tcase_add_checked_fixture(reading, temp_folder_make, temp_folder_remove);
    tcase_add_loop_test(reading, reads_what_stands_there, 0, 2);
    tcase_add_test(reading, keeps_another_alignment);
    tcase_add_loop_test(reading, widens_blocks, 0, COUNT(formats));
    tcase_add_loop_test(reading, takes_blocks, 0, 3);
    tcase_add_test(reading, reads_long_tensors_in_pieces);
    tcase_add_loop_test(reading, refuses, 0, COUNT(refused));
    tcase_add_test(reading, refuses_every_truncation);
    tcase_add_test(reading, refuses_another_file);
    tcase_add_test(reading, memory_stays_flat);
    tcase_add_test(reading, shrinking_file_is_an_error);
    suite_add_tcase(suite, reading);
    return suite;
}

MESA_TEST_MAIN(gguf_suite)
