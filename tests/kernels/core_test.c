// SPDX-License-Identifier: Apache-2.0
// The door itself: tables of operations, opening devices and modules, memory, the row table's checks and derived part.
//
// The last case reads the sources of the kernel tests and fails for an operation that none of them launches.
#include <dirent.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kernels/backend.h"
#include "tests/kernels/kernel_test.h"

// ------------------------------------------------------------------------------------------------------------- tables

START_TEST(operations_have_names_and_sizes) {
    ck_assert_str_eq(kern_op_name(KERN_OP_EMBED), "embed");
    ck_assert_str_eq(kern_op_name(KERN_OP_CLIP_SCALE), "clip_scale");
    ck_assert_str_eq(kern_op_name((kern_op)KERN_OP_COUNT), "unknown");
    ck_assert_uint_eq(kern_op_operands(KERN_OP_EMBED), 3);
    ck_assert_uint_eq(kern_op_operands(KERN_OP_RMSNORM_BACKWARD), 7);
    ck_assert_uint_eq(kern_op_operands(KERN_OP_ADAMW), 2);
    ck_assert_uint_eq(kern_op_args_size(KERN_OP_ADD), sizeof(kern_add_args));
    ck_assert_uint_eq(kern_op_args_size((kern_op)KERN_OP_COUNT), 0);
    for (int op = 0; op < KERN_OP_COUNT; op++) {
        ck_assert_uint_ge(kern_op_operands((kern_op)op), 1);
        ck_assert_uint_gt(kern_op_args_size((kern_op)op), kern_op_operands((kern_op)op) * sizeof(kern_ptr));
    }
}
END_TEST

START_TEST(statuses_have_texts) {
#define HAS_TEXT(name, value, text) ck_assert_str_eq(kern_status_text(KERN_##name), text);
    KERN_STATUS_MAP(HAS_TEXT)
    ck_assert_str_eq(kern_status_text((kern_status)-99), "unknown status");
}
END_TEST

// ------------------------------------------------------------------------------------------------------------ devices

static void refuse_device(const char *name, kern_status status, const char *word) {
    kern_device *device = NULL;
    char reason[512] = "";
    ck_assert_int_eq(kern_device_open(&(kern_device_options){.name = name}, &device, reason, sizeof reason), status);
    ck_assert_ptr_null(device);
    ck_assert_msg(strstr(reason, word), "%s: \"%s\" does not say \"%s\"", name, reason, word);
    ck_assert_int_eq(kern_device_open(&(kern_device_options){.name = name}, &device, NULL, 0),
                     status); // the reason is optional
}

START_TEST(names_that_are_refused) {
    unsetenv("MESA_CPU_ISA");
    setenv("MESA_LIBRARY_DIR", "/nonexistent", 1);
    refuse_device("gpu", KERN_INVALID, "not known");
    refuse_device("", KERN_INVALID, "not known");
    refuse_device("cpu:8", KERN_INVALID, "16, 32 or 64");
    refuse_device("cpu:64x", KERN_INVALID, "16, 32 or 64");
    refuse_device("cpu:", KERN_INVALID, "16, 32 or 64");
    refuse_device("cuda", KERN_INVALID, "not known");
    refuse_device("cuda:", KERN_INVALID, "a number follows the colon");
    refuse_device("cuda:x", KERN_INVALID, "a number follows the colon");
    refuse_device("cuda:1x", KERN_INVALID, "a number follows the colon");
    refuse_device("cuda:1024", KERN_INVALID, "a number follows the colon");
    refuse_device("cuda:1023", KERN_NO_DEVICE, "/nonexistent/libmesa_kern_cuda.so");
    ck_assert_int_eq(kern_device_check_name("cuda:1023", NULL, 0), KERN_OK); // whatever is there
    ck_assert_int_eq(kern_device_check_name("auto", NULL, 0), KERN_OK);
    refuse_device("cuda:0", KERN_NO_DEVICE, "/nonexistent/libmesa_kern_cuda.so");
    setenv("MESA_CPU_ISA", "sse9", 1);
    refuse_device("cpu", KERN_INVALID, "sse9");
    refuse_device("auto", KERN_INVALID, "sse9");
    kern_device_close(NULL);
}
END_TEST

START_TEST(a_device_without_groups_says_so) {
    kern_device *device = NULL;
    kern_group *group = NULL;
    unsigned char id[KERN_GROUP_ID] = {0};
    char reason[160] = "";
    ck_assert_int_eq(kern_device_open(&(kern_device_options){.name = "cpu"}, &device, NULL, 0), KERN_OK);
    ck_assert_int_eq(kern_group_name(device, id, reason, sizeof reason), KERN_UNSUPPORTED);
    ck_assert_str_eq(reason, "this device has no groups");
    ck_assert_int_eq(kern_group_open(device, id, 0, 2, &group, NULL, 0), KERN_UNSUPPORTED);
    ck_assert_int_eq(kern_group_open(device, id, 2, 2, &group, NULL, 0), KERN_INVALID);
    ck_assert_ptr_null(group);
    kern_group_close(NULL);
    kern_device_close(device);
}
END_TEST

START_TEST(cpu_describes_itself) {
    static const struct {
        const char *name;
        int32_t chunk;
    } names[] = {{"cpu", 32}, {"cpu:16", 16}, {"cpu:32", 32}, {"cpu:64", 64}, {"auto", 32}};
    unsetenv("MESA_CPU_ISA");
    setenv("MESA_LIBRARY_DIR", "/nonexistent", 1);
    char profile[2][128] = {"", ""};
    for (int i = 0; i < 5; i++) {
        kern_device *device = NULL;
        char reason[512] = "x";
        ck_assert_int_eq(
            kern_device_open(&(kern_device_options){.name = names[i].name}, &device, reason, sizeof reason), KERN_OK);
        ck_assert((i == 4) == (reason[0] != '\0')); // auto says why there is no CUDA
        const kern_device_info *info = kern_device_describe(device);
        ck_assert_str_eq(info->name, "cpu");
        ck_assert_int_eq(info->chunk, names[i].chunk);
        ck_assert_int_ge(info->threads, 1);
        ck_assert_int_ge(info->default_rows, 1);
        ck_assert_uint_gt(info->memory_total, 1 << 20);
        ck_assert(strstr(info->description, "thread") && strstr(info->numeric_profile, "dnnl="));
        if (i < 2)
            strcpy(profile[i], info->numeric_profile);
        kern_device_close(device);
    }
    ck_assert_str_ne(profile[0], profile[1]);
}
END_TEST

START_TEST(instruction_set_is_chosen) {
    static const char *const names[] = {"portable", "avx2", "avx512"};
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        MESA_TEST_SKIP("%s is not here", names[_i]);
    const kern_device_info *info = kern_device_describe(test.device);
    ck_assert(strstr(info->description, names[_i]) && strstr(info->numeric_profile, names[_i]));
    kernel_test_close(&test);
}
END_TEST

START_TEST(memory) {
    kernel_test test;
    ck_assert(kernel_test_open(&test, 0, "cpu"));
    uint64_t before = kern_allocations(test.device);
    char *a = NULL, *b = NULL, host[100];
    ck_assert_int_eq(kern_alloc(test.device, 100, (void **)&a), KERN_OK);
    ck_assert_int_eq(kern_alloc(test.device, 0, (void **)&b), KERN_OK);
    ck_assert_uint_eq(kern_allocations(test.device), before + 2);
    ck_assert((uintptr_t)a % 64 == 0 && (uintptr_t)b % 64 == 0 && a[0] == 0 && a[99] == 0);
    kern_free(test.device, b);
    kern_free(test.device, NULL);
    ck_assert_int_eq(kern_alloc(test.device, SIZE_MAX - 8, (void **)&b), KERN_NO_MEMORY);
    ck_assert_ptr_null(b);
    memset(host, 7, sizeof host);
    ck_assert_int_eq(kern_upload(test.stream, a, host, 50), KERN_OK);
    ck_assert_int_eq(kern_copy(test.stream, a + 50, a, 25), KERN_OK);
    ck_assert_int_eq(kern_download(test.stream, host, a, 100), KERN_OK);
    ck_assert_int_eq(kern_synchronize(test.stream), KERN_OK);
    ck_assert(host[49] == 7 && host[74] == 7 && host[75] == 0);
    ck_assert_int_eq(kern_zero(test.stream, a, 60), KERN_OK);
    ck_assert(a[59] == 0 && a[60] == 7);
    kern_free(test.device, a);
    kernel_test_close(&test);
}
END_TEST

static size_t resident_pages(char *memory, size_t pages, size_t page) {
    unsigned char *in = malloc(pages);
    size_t found = 0;
    ck_assert_int_eq(mincore(memory + (page - (uintptr_t)memory % page), pages * page, in), 0);
    for (size_t i = 0; i < pages; i++)
        found += in[i] & 1;
    free(in);
    return found;
}

// A pool costs what of it is used; huge pages come by two MiB.
START_TEST(memory_is_taken_when_it_is_touched) {
    enum { PIECES = 32, PIECE = 8 << 20 };
    kernel_test test;
    char *all = NULL;
    ck_assert(kernel_test_open(&test, 0, "cpu"));
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), bytes = (size_t)PIECES * PIECE, pages = bytes / page - 1;
    ck_assert_int_eq(kern_alloc(test.device, bytes, (void **)&all), KERN_OK);
    ck_assert_uint_lt(resident_pages(all, pages, page), pages / 16);
    for (size_t i = 0; i < PIECES; i += 4)
        ck_assert_int_eq(kern_zero(test.stream, all + i * PIECE, page), KERN_OK);
    ck_assert_uint_lt(resident_pages(all, pages, page), pages / 4);
    for (size_t i = 0; i < bytes; i += PIECE - 1)
        ck_assert(all[i] == 0);
    kern_free(test.device, all);
    kernel_test_close(&test);
}
END_TEST

// Serving must not allocate: a launch that lacks workspace is refused, and works after the reservation.
START_TEST(launch_never_allocates) {
    kernel_test test;
    float x[64] = {1}, y[64] = {0};
    ck_assert(kernel_test_open(&test, 0, "cpu"));
    kernel_test_row(&test, KERN_ROW_PROMPT, -1, 1, 0);
    kernel_test_prepare(&test);
    kern_rmsnorm_backward_args args = {{x}, {x},   {NULL}, {x}, {y},       {NULL}, {y + 32}, 1,
                                       32,  1e-5f, 0,      0,   KERN_SILU, 0,      0,        0};
    ck_assert_int_eq(kern_launch(test.stream, KERN_OP_RMSNORM_BACKWARD, test.rows, &args), KERN_INVALID);
    uint64_t before = kern_allocations(test.device);
    ck_assert_int_eq(kern_reserve(test.device, KERN_OP_RMSNORM_BACKWARD, &args), KERN_OK);
    ck_assert_uint_eq(kern_allocations(test.device), before + 1);
    ck_assert_int_eq(kern_launch(test.stream, KERN_OP_RMSNORM_BACKWARD, test.rows, &args), KERN_OK);
    ck_assert_int_eq(kern_reserve(test.device, KERN_OP_RMSNORM_BACKWARD, &args), KERN_OK);
    ck_assert_uint_eq(kern_allocations(test.device), before + 1);
    ck_assert_int_eq(kern_launch(test.stream, KERN_OP_ADD, NULL, &args), KERN_INVALID);
    ck_assert_int_eq(kern_launch(test.stream, (kern_op)KERN_OP_COUNT, test.rows, &args), KERN_INVALID);
    ck_assert_int_eq(kern_reserve(test.device, (kern_op)-1, &args), KERN_INVALID);
    kernel_test_close(&test);
}
END_TEST

// ------------------------------------------------------------------------------------------------------------ modules

// Compiles a module with this text to a folder of its own and makes it the library directory.
static bool build_module(const char *text, char *folder) {
    char command[1024], path[256];
    snprintf(folder, 64, "/tmp/mesa-module-%ld", (long)getpid());
    ck_assert_int_eq(mkdir(folder, 0700), 0);
    snprintf(path, sizeof path, "%s/module.c", folder);
    FILE *file = fopen(path, "w");
    ck_assert_ptr_nonnull(file);
    fputs(text, file);
    fclose(file);
    snprintf(command, sizeof command, "cc -std=gnu17 -shared -fPIC -I%s -o %s/libmesa_kern_cuda.so %s 2>/dev/null",
             MESA_SOURCE_DIR, folder, path);
    setenv("MESA_LIBRARY_DIR", folder, 1);
    return system(command) == 0;
}

static void remove_folder(const char *folder) {
    char command[256];
    snprintf(command, sizeof command, "rm -rf %s", folder);
    ck_assert_int_eq(system(command), 0);
}

static const char a_module[] =
    "#include \"kernels/backend.h\"\n"
    "#include <stdlib.h>\n"
    "static kern_status open_it(const char *n, kern_device **out, char *r, size_t s) {\n"
    "    (void)n; (void)r; (void)s;\n"
    "    *out = calloc(1, sizeof **out); (*out)->info.chunk = 64; return KERN_OK; }\n"
    "static void close_it(kern_device *d) { free(d); }\n"
    "static const struct kern_backend backend = {KERN_ABI + CHANGE, sizeof(kern_rows), sizeof(struct kern_backend),\n"
    "                                            .open = open_it, .close = close_it};\n"
    "const struct kern_backend *kern_module_v1(const kern_host *h) { return h->abi == KERN_ABI ? &backend : NULL; }\n";

START_TEST(a_team_is_as_small_as_asked) {
    kern_device *device = NULL;
    const kern_device_options one = {.name = "cpu", .threads = 1}, many = {.name = "cpu", .threads = 4096};
    kernel_test_threads(2);
    ck_assert_int_eq(kern_device_open(&one, &device, NULL, 0), KERN_OK);
    ck_assert_int_eq(kern_device_describe(device)->threads, 1);
    kern_device_close(device);
    kernel_test_threads(2);
    ck_assert_int_eq(kern_device_open(&many, &device, NULL, 0), KERN_OK);
    ck_assert_int_le(kern_device_describe(device)->threads, 2);
    kern_device_close(device);
}
END_TEST

START_TEST(modules) {
    char folder[64], text[2048];
    snprintf(text, sizeof text, "#define CHANGE 0\n%s", a_module);
    if (!build_module(text, folder)) {
        remove_folder(folder);
        MESA_TEST_SKIP("no C compiler named cc");
    }
    kern_device *device = NULL;
    char reason[512];
    ck_assert_int_eq(kern_device_open(&(kern_device_options){.name = "auto"}, &device, reason, sizeof reason), KERN_OK);
    ck_assert_int_eq(kern_device_describe(device)->chunk, 64);
    ck_assert_str_eq(reason, "");
    kern_device_close(device);
    remove_folder(folder);

    snprintf(text, sizeof text, "#define CHANGE 1\n%s", a_module);
    ck_assert(build_module(text, folder));
    refuse_device("cuda:0", KERN_NO_DEVICE, "another version");
    remove_folder(folder);

    ck_assert(build_module("int nothing;\n", folder));
    refuse_device("cuda:0", KERN_NO_DEVICE, "kern_module_v1");
    remove_folder(folder);

    ck_assert(build_module("const void *kern_module_v1(const void *h) { (void)h; return 0; }\n", folder));
    refuse_device("cuda:0", KERN_NO_DEVICE, "ABI");
    remove_folder(folder);
}
END_TEST

// --------------------------------------------------------------------------------------------------------------- rows

START_TEST(rows_are_cut_at_the_grid) {
    kernel_test test;
    ck_assert(kernel_test_open(&test, 0, "cpu:16"));
    kernel_test_row(&test, KERN_ROW_GENERATED, 5, 2, 1000);
    kernel_test_row(&test, KERN_ROW_PROMPT, 1, 40, 13);
    kernel_test_boundary(&test, 4);
    kernel_test_boundary(&test, 30);
    kernel_test_row(&test, KERN_ROW_PROMPT, -1, 1, 16);
    kernel_test_row(&test, KERN_ROW_PROMPT, -1, 16, 32);
    kernel_test_prepare(&test);
    const kern_rows *rows = test.rows;
    static const kern_chunk want[] = {{1, 2, 3, 13},  {1, 5, 16, 16}, {1, 21, 16, 32},
                                      {1, 37, 5, 48}, {2, 42, 1, 16}, {3, 43, 16, 32}};
    ck_assert_int_eq(rows->n_chunks, 6);
    for (int i = 0; i < 6; i++) {
        ck_assert_int_eq(rows->chunk[i].row, want[i].row);
        ck_assert_int_eq(rows->chunk[i].token0, want[i].token0);
        ck_assert_int_eq(rows->chunk[i].length, want[i].length);
        ck_assert_int_eq(rows->chunk[i].position, want[i].position);
    }
    static const struct {
        int32_t token, row, start;
        int64_t position;
    } tokens[] = {{0, 0, 0, 1000}, {1, 0, 0, 1001}, {2, 1, 2, 13},  {5, 1, 2, 16},   {6, 1, 6, 0},
                  {31, 1, 6, 25},  {32, 1, 32, 0},  {41, 1, 32, 9}, {42, 2, 42, 16}, {58, 3, 43, 47}};
    for (int i = 0; i < 10; i++) {
        ck_assert_int_eq(rows->token_row[tokens[i].token], tokens[i].row);
        ck_assert_int_eq(rows->token_start[tokens[i].token], tokens[i].start);
        ck_assert_int_eq(rows->token_position[tokens[i].token], tokens[i].position);
    }
    kernel_test_close(&test);
}
END_TEST

// Whatever fits the capacities of rows and tokens fits those of the chunks.
START_TEST(chunk_capacity_suffices) {
    kernel_test test;
    ck_assert(kernel_test_open(&test, 0, "cpu:16"));
    for (int32_t n = 1; n <= 5; n++)
        for (int32_t length = 1; length <= 40; length++)
            for (int64_t position = 0; position < 16; position++) {
                kern_rows *rows = NULL, *borrowed = test.rows;
                ck_assert_int_eq(kern_rows_create(test.device, n, n * length, 0, 0, 0, 0, &rows), KERN_OK);
                test.rows = rows;
                for (int32_t r = 0; r < n; r++)
                    kernel_test_row(&test, KERN_ROW_PROMPT, -1, length, position);
                kernel_test_prepare(&test);
                test.rows = borrowed;
                kern_rows_free(rows);
            }
    kern_rows_free(NULL);
    kernel_test_close(&test);
}
END_TEST

typedef void (*spoil)(kern_rows *rows);
#define SPOIL(name, statement)                  \
    static void spoil_##name(kern_rows *rows) { \
        statement;                              \
    }
SPOIL(gap, rows->row[2].token0++)
SPOIL(length, rows->row[1].length = 0)
SPOIL(overrun, rows->row[2].length++)
SPOIL(rest, rows->n_tokens++)
SPOIL(kind, rows->row[0].kind = 2)
SPOIL(order, rows->row[2].kind = KERN_ROW_GENERATED)
SPOIL(generated, rows->n_generated--)
SPOIL(slot, rows->row[0].slot = -2)
SPOIL(position, rows->row[0].position = -1)
SPOIL(far_position, rows->row[0].position = INT64_MAX - 5)
SPOIL(mode, rows->row[0].solver.mode = 4)
SPOIL(steps, rows->row[0].solver.max_steps = -1)
SPOIL(tolerance, rows->row[0].solver.tolerance = NAN)
SPOIL(boundary_at_start, rows->boundary[0] = rows->row[1].token0)
SPOIL(boundary_behind, rows->boundary[1] = rows->row[1].token0 + rows->row[1].length)
SPOIL(boundary_order, rows->boundary[1] = rows->boundary[0])
SPOIL(boundary_range, rows->row[1].boundary0 = rows->n_boundaries - 1)
SPOIL(boundary_before, rows->row[1].boundary0 = -1)
SPOIL(page_range, rows->row[2].page0 = 1)
SPOIL(page_before, rows->row[2].page0 = -2)
SPOIL(page_value, rows->page[1] = -1)
SPOIL(id, rows->id[3] = -1 - rows->max_logits)
SPOIL(target, rows->target[3] = -2)
SPOIL(logits_before, rows->logits_token[0] = -1)
SPOIL(logits_behind, rows->logits_token[0] = rows->n_tokens)
SPOIL(temperature, rows->sampler[0].temperature = -1)
SPOIL(temperature_nan, rows->sampler[0].temperature = NAN)
SPOIL(top_p, rows->sampler[0].top_p = NAN)
SPOIL(forced, rows->sampler[0].forced = -2)
SPOIL(top, rows->sampler[0].top = KERN_MAX_TOP + 1)
SPOIL(top_negative, rows->sampler[0].top = -1)
SPOIL(edit_range, rows->sampler[0].edit0 = 1)
SPOIL(edit_id, rows->edit[1].id = -1)
SPOIL(many_rows, rows->n_rows = rows->max_rows + 1)
SPOIL(negative_rows, rows->n_rows = -1)
SPOIL(many_tokens, rows->n_tokens = rows->max_tokens + 1)
SPOIL(many_logits, rows->n_logits = rows->max_logits + 1)
SPOIL(many_edits, rows->n_edits = rows->max_edits + 1)

static void sound_rows(kernel_test *test) {
    kern_rows *rows = test->rows;
    kernel_test_clear_rows(test);
    kernel_test_row(test, KERN_ROW_GENERATED, 3, 4, 70);
    kernel_test_row(test, KERN_ROW_PROMPT, -1, 20, 5);
    kernel_test_boundary(test, 1);
    kernel_test_boundary(test, 19);
    kernel_test_row(test, KERN_ROW_PROMPT, 0, 65, 64)->page0 = 0; // positions 64..128: three pages
    rows->n_pages = 3;
    for (int i = 0; i < 3; i++)
        rows->page[i] = i;
    for (int t = 0; t < rows->n_tokens; t++)
        rows->id[t] = 1, rows->target[t] = -1;
    rows->n_logits = 1;
    rows->logits_token[0] = 3;
    rows->n_edits = 2;
    rows->edit[0] = rows->edit[1] = (kern_logit_edit){.id = 2, .repetition = 1};
    rows->sampler[0] = (kern_sampler){.temperature = 1, .top_p = 1, .forced = -1, .edits = 2};
}

START_TEST(bad_rows_are_refused) {
    static const spoil spoils[] = {spoil_gap,
                                   spoil_length,
                                   spoil_overrun,
                                   spoil_rest,
                                   spoil_kind,
                                   spoil_order,
                                   spoil_generated,
                                   spoil_slot,
                                   spoil_position,
                                   spoil_far_position,
                                   spoil_mode,
                                   spoil_steps,
                                   spoil_tolerance,
                                   spoil_boundary_at_start,
                                   spoil_boundary_behind,
                                   spoil_boundary_order,
                                   spoil_boundary_range,
                                   spoil_boundary_before,
                                   spoil_page_range,
                                   spoil_page_before,
                                   spoil_page_value,
                                   spoil_id,
                                   spoil_target,
                                   spoil_logits_before,
                                   spoil_logits_behind,
                                   spoil_temperature,
                                   spoil_temperature_nan,
                                   spoil_top_p,
                                   spoil_forced,
                                   spoil_top,
                                   spoil_top_negative,
                                   spoil_edit_range,
                                   spoil_edit_id,
                                   spoil_many_rows,
                                   spoil_negative_rows,
                                   spoil_many_tokens,
                                   spoil_many_logits,
                                   spoil_many_edits};
    kernel_test test;
    ck_assert(kernel_test_open(&test, 0, "cpu"));
    sound_rows(&test);
    kernel_test_prepare(&test);
    for (size_t i = 0; i < sizeof spoils / sizeof spoils[0]; i++) {
        sound_rows(&test);
        spoils[i](test.rows);
        ck_assert_msg(kern_rows_prepare(test.stream, test.rows) == KERN_INVALID, "spoil %zu was accepted", i);
    }
    sound_rows(&test);
    kernel_test_prepare(&test);
    kern_rows *rows = NULL;
    ck_assert_int_eq(kern_rows_create(test.device, 0, 1, 0, 0, 0, 0, &rows), KERN_INVALID);
    ck_assert_int_eq(kern_rows_create(test.device, 2, 1, 0, 0, 0, 0, &rows), KERN_INVALID);
    ck_assert_int_eq(kern_rows_create(test.device, 1, 1, -1, 0, 0, 0, &rows), KERN_INVALID);
    ck_assert_ptr_null(rows);
    kernel_test_close(&test);
}
END_TEST

START_TEST(an_empty_batch_is_a_batch) {
    kernel_test test;
    float place[8] = {0};
    ck_assert(kernel_test_open(&test, 0, "cpu"));
    kernel_test_clear_rows(&test);
    kernel_test_prepare(&test);
    kern_rmsnorm_backward_args norm = {{place}, {place}, {NULL}, {place}, {place},   {NULL}, {place}, 1,
                                       8,       1e-5f,   0,      0,       KERN_SILU, 0,      0,       0};
    kern_short_conv_args conv = {{place}, {place}, {NULL}, {place}, {place + 4}, 2, 2, KERN_SILU, 0};
    kernel_test_launch(&test, KERN_OP_RMSNORM_BACKWARD, &norm);
    kernel_test_launch(&test, KERN_OP_SHORT_CONV, &conv);
    kernel_test_close(&test);
}
END_TEST

// ----------------------------------------------------------------------------------------------------------- coverage

// Appends the text of every kernel test but this one.
static char *read_tests(void) {
    char folder[1024];
    snprintf(folder, sizeof folder, "%s/tests/kernels", MESA_SOURCE_DIR);
    DIR *directory = opendir(folder);
    ck_assert_ptr_nonnull(directory);
    char *text = calloc(1, 1 << 22);
    size_t length = 0;
    for (struct dirent *entry; (entry = readdir(directory));) {
        size_t name = strlen(entry->d_name);
        if (name < 7 || strcmp(entry->d_name + name - 7, "_test.c") != 0 || strcmp(entry->d_name, "core_test.c") == 0)
            continue;
        char path[2048];
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        FILE *file = fopen(path, "r");
        ck_assert_ptr_nonnull(file);
        length += fread(text + length, 1, (1 << 22) - 1 - length, file);
        fclose(file);
    }
    closedir(directory);
    return text;
}

static bool names_whole_word(const char *text, const char *word) {
    size_t length = strlen(word);
    for (const char *at = text; (at = strstr(at, word)); at += length) {
        char next = at[length];
        if (next != '_' && !(next >= 'A' && next <= 'Z'))
            return true;
    }
    return false;
}

START_TEST(every_operation_has_a_test) {
    char *text = read_tests();
#define IS_TESTED(code, name, args, first) \
    ck_assert_msg(names_whole_word(text, "KERN_OP_" #code), "no test of " #name " in tests/kernels");
    KERN_OPS(IS_TESTED)
    free(text);
}
END_TEST

static Suite *core_suite(void) {
    Suite *suite = suite_create("core");
    TCase *tests = tcase_create("core");
    tcase_add_test(tests, operations_have_names_and_sizes);
    tcase_add_test(tests, statuses_have_texts);
    tcase_add_test(tests, names_that_are_refused);
    tcase_add_test(tests, a_device_without_groups_says_so);
    tcase_add_test(tests, cpu_describes_itself);
    tcase_add_loop_test(tests, instruction_set_is_chosen, 0, KERNEL_TEST_ISAS);
    tcase_add_test(tests, memory);
    tcase_add_test(tests, memory_is_taken_when_it_is_touched);
    tcase_add_test(tests, launch_never_allocates);
    tcase_add_test(tests, a_team_is_as_small_as_asked);
    tcase_add_test(tests, modules);
    tcase_add_test(tests, rows_are_cut_at_the_grid);
    tcase_add_test(tests, chunk_capacity_suffices);
    tcase_add_test(tests, bad_rows_are_refused);
    tcase_add_test(tests, an_empty_batch_is_a_batch);
    tcase_add_test(tests, every_operation_has_a_test);
    tcase_set_timeout(tests, 60);
    suite_add_tcase(suite, tests);
    return suite;
}

MESA_TEST_MAIN(core_suite)
