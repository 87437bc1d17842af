// SPDX-License-Identifier: Apache-2.0
// Tokens that wait for a looped model's loops, against lists kept on the host: who goes on, what is taken along, in
// which order, how many solves that were; and the table that a device writes.
//
// Steps of random rows, gates, bounds and thresholds, on every device. A loop's work is nothing here: what went in
// comes out.
#include "kernels/ref/exit.h"
#include "tests/kernels/kernel_test.h"

enum { LOOPS = 4, SLOTS = 6, WIDTH = 7, PLACES = 40, STEPS = 60, TOKENS = SLOTS * PLACES, Z_STRIDE = 16 };

typedef struct slot {
    kern_exit_waiting waiting;
    float pad[64 - sizeof(kern_exit_waiting) / 4];
    float z[LOOPS * Z_STRIDE];
    float list[LOOPS][PLACES * WIDTH + 8]; // from loop 1 on
} slot;

// Numbers of the tokens that wait.
typedef struct host_list {
    int count, token[PLACES];
} host_list;

typedef struct world {
    kernel_test test;
    kern_rows *next;
    slot *slots, host[SLOTS]; // on the device, and as it was
    float *x;                 // device (TOKENS, WIDTH)
    kern_solve_sum *solves, *sum;
    host_list list[SLOTS][LOOPS];
    int read[SLOTS], expected[SLOTS]; // sums of the step's rows
    float z[SLOTS][LOOPS];
} world;

static void *device_bytes(world *w, size_t bytes) {
    void *memory;
    ck_assert_int_eq(kern_alloc(w->test.device, bytes, &memory), KERN_OK);
    return memory;
}

static void send(world *w, void *to, const void *from, size_t bytes) {
    ck_assert_int_eq(kern_upload(w->test.stream, to, from, bytes), KERN_OK);
    ck_assert_int_eq(kern_synchronize(w->test.stream), KERN_OK);
}

static void fetch(world *w, void *to, const void *from, size_t bytes) {
    ck_assert_int_eq(kern_download(w->test.stream, to, from, bytes), KERN_OK);
    ck_assert_int_eq(kern_synchronize(w->test.stream), KERN_OK);
}

static void launch(world *w, kern_op op, const kern_rows *rows, const void *args) {
    ck_assert_int_eq(kern_reserve(w->test.device, op, args), KERN_OK);
    ck_assert_int_eq(kern_launch(w->test.stream, op, rows, args), KERN_OK);
    ck_assert_int_eq(kern_synchronize(w->test.stream), KERN_OK);
}

static void vector_of(int of, int token, float *out) {
    for (int i = 0; i < WIDTH; i++)
        out[i] = (float)(1000 * of + token) + (float)i / 16;
}

static int draw(world *w, int count) {
    return (int)(kernel_test_uniform(&w->test) * count);
}

// The slot's state: all but what waits is the host's.
static void send_gates(world *w, int of) {
    float z[LOOPS * Z_STRIDE] = {0};
    for (int r = 0; r < LOOPS; r++)
        z[r * Z_STRIDE] = w->z[of][r] = (float)(4 * kernel_test_uniform(&w->test) - 3);
    send(w, (char *)(w->slots + of) + offsetof(slot, z), z, sizeof z);
}

// Some of the slots, each with one token that has gone through the first loop.
static void place_rows(world *w) {
    kernel_test_clear_rows(&w->test);
    const int first = draw(w, SLOTS), count = 1 + draw(w, SLOTS);
    float x[SLOTS * WIDTH];
    for (int i = 0; i < count; i++) {
        const int of = (first + i) % SLOTS;
        kern_row *row = kernel_test_row(&w->test, KERN_ROW_GENERATED, of, 1, w->read[of]);
        row->exit = (kern_exit){draw(w, 4) ? (float)kernel_test_uniform(&w->test) : 1, draw(w, LOOPS + 2)};
        row->through = w->read[of] % PLACES == PLACES - 1;
        vector_of(of, w->read[of], x + i * WIDTH);
        send_gates(w, of);
    }
    w->test.rows->slot_stride = sizeof(slot);
    kernel_test_prepare(&w->test);
    send(w, w->x, x, sizeof *x * WIDTH * (size_t)count);
}

static int loop_of(const world *w, const kern_row *row) {
    double z[LOOPS];
    for (int r = 0; r < LOOPS; r++)
        z[r] = (double)w->z[row->slot][r];
    const int most = row->exit.max_loops > 0 && row->exit.max_loops < LOOPS ? row->exit.max_loops : LOOPS;
    const double threshold = row->exit.max_loops == 0 || row->exit.threshold >= 1 ? INFINITY : row->exit.threshold;
    return row->through ? LOOPS : kern_ref_exit_loop(LOOPS, z, threshold, most);
}

static void wait_for(world *w, const kern_rows *rows, int loop, bool back) {
    const kern_exit_wait_args args = {{w->x}, {w->slots->list[loop]}, {&w->slots->waiting}, WIDTH, loop, back};
    launch(w, KERN_OP_EXIT_WAIT, rows, &args);
}

static void follow(world *w, int loop, bool begin) {
    const kern_exit_follow_args args = {
        {w->next}, {&w->slots->waiting}, {w->slots->z}, {w->solves}, {w->sum}, loop, LOOPS, Z_STRIDE, begin};
    launch(w, KERN_OP_EXIT_FOLLOW, w->test.rows, &args);
}

// The table that the CPU has of those who go on.
static void check_row(const world *w, int place, int token0, int count, const kern_row *from) {
    if (w->test.cuda)
        return;
    const kern_rows *now = kern_rows_now(w->next);
    const kern_row *row = &now->row[place];
    ck_assert(row->slot == from->slot && row->token0 == token0 && row->length == count && row->kind == from->kind);
    ck_assert_int_eq(row->position + count, from->position + from->length);
    for (int t = token0; t < token0 + count; t++) {
        ck_assert_int_eq(now->token_row[t], place);
        ck_assert_int_eq(now->token_start[t], token0);
        ck_assert_int_eq(now->token_position[t], row->position + t - token0);
    }
    ck_assert(now->n_rows > place && now->n_tokens >= token0 + count && now->n_generated == now->n_tokens);
}

// What goes through the loop, in the order of the rows, and from then on waits for the next one.
static void check_loop(world *w, int loop) {
    static float want[TOKENS * WIDTH], got[TOKENS * WIDTH];
    const kern_rows *rows = w->test.rows;
    int tokens = 0, places = 0;
    for (int r = 0; r < rows->n_rows; r++) {
        const kern_row *row = &rows->row[r];
        host_list *own = &w->list[row->slot][loop], *later = own + 1;
        if (own->count == 0 || loop_of(w, row) <= loop)
            continue;
        check_row(w, places++, tokens, own->count, row);
        for (int i = 0; i < own->count; i++) {
            vector_of(row->slot, own->token[i], want + WIDTH * tokens++);
            if (loop + 1 < LOOPS)
                later->token[later->count++] = own->token[i];
        }
        w->expected[r] += own->count;
        own->count = 0;
    }
    fetch(w, got, w->x, sizeof *got * WIDTH * (size_t)tokens);
    ck_assert_mem_eq(got, want, sizeof *got * WIDTH * (size_t)tokens);
}

static void run_loops(world *w, bool begin) {
    const kern_rows *rows = w->test.rows;
    kern_solve_sum sum[SLOTS];
    for (int r = 0; r < rows->n_rows; r++) {
        host_list *own = &w->list[rows->row[r].slot][1];
        w->expected[r] = begin;
        if (begin)
            own->token[own->count++] = w->read[rows->row[r].slot]++;
    }
    for (int loop = 1; loop < LOOPS; loop++) {
        follow(w, loop, begin && loop == 1);
        w->next->n_rows = SLOTS;
        w->next->n_tokens = w->next->n_generated = TOKENS;
        wait_for(w, w->next, loop, true);
        check_loop(w, loop);
        if (loop + 1 < LOOPS)
            wait_for(w, w->next, loop + 1, false);
    }
    follow(w, LOOPS, false);
    fetch(w, sum, w->sum, sizeof *sum * (size_t)rows->n_rows);
    for (int r = 0; r < rows->n_rows; r++) {
        ck_assert_uint_eq(sum[r].solves, (unsigned)(3 * w->expected[r]));
        ck_assert_uint_eq(sum[r].steps_max, w->expected[r] > 0 ? 9 : 0);
    }
}

static bool open_world(world *w, int device) {
    if (!kernel_test_open(&w->test, device, "cpu"))
        return false;
    kern_solve_sum one[TOKENS];
    for (int t = 0; t < TOKENS; t++)
        one[t] = (kern_solve_sum){.solves = 3, .steps = 20, .steps_max = 9};
    ck_assert_int_eq(kern_rows_create_followed(w->test.stream, SLOTS, TOKENS, 0, &w->next), KERN_OK);
    w->slots = device_bytes(w, SLOTS * sizeof *w->slots);
    w->x = device_bytes(w, sizeof *w->x * TOKENS * WIDTH);
    w->solves = device_bytes(w, sizeof one);
    w->sum = device_bytes(w, SLOTS * sizeof *w->sum);
    send(w, w->solves, one, sizeof one);
    return true;
}

static void close_world(world *w) {
    kern_rows_free(w->next);
    kern_free(w->test.device, w->slots);
    kern_free(w->test.device, w->x);
    kern_free(w->test.device, w->solves);
    kern_free(w->test.device, w->sum);
    kernel_test_close(&w->test);
}

START_TEST(lists_equal_the_hosts) {
    static world w;
    if (!open_world(&w, _i))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    for (int step = 0; step < STEPS; step++) {
        place_rows(&w);
        wait_for(&w, w.test.rows, 1, false);
        run_loops(&w, true);
        fetch(&w, w.host, w.slots, sizeof w.host);
        for (int of = 0; of < SLOTS; of++)
            for (int loop = 1; loop < LOOPS; loop++)
                ck_assert_int_eq(w.host[of].waiting.count[loop], w.list[of][loop].count);
    }
    place_rows(&w); // and what is left goes through by itself
    for (int r = 0; r < w.test.rows->n_rows; r++)
        w.test.rows->row[r].through = 1;
    kernel_test_prepare(&w.test);
    run_loops(&w, false);
    fetch(&w, w.host, w.slots, sizeof w.host);
    for (int r = 0; r < w.test.rows->n_rows; r++)
        for (int loop = 1; loop < LOOPS; loop++)
            ck_assert_int_eq(w.host[w.test.rows->row[r].slot].waiting.count[loop], 0);
    close_world(&w);
}
END_TEST

START_TEST(refusals) {
    static world w;
    if (!open_world(&w, _i))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    const kern_exit_wait_args wait = {{w.x}, {w.slots->list[1]}, {&w.slots->waiting}, WIDTH, 1, false};
    kern_exit_wait_args waits[4] = {wait, wait, wait, wait};
    waits[0].loop = 0;
    waits[1].loop = KERN_MAX_LOOPS;
    waits[2].waiting.p = NULL;
    waits[3].width = 0;
    for (int i = 0; i < 4; i++)
        kernel_test_assert_refused(&w.test, KERN_OP_EXIT_WAIT, &waits[i], KERN_INVALID);
    const kern_exit_follow_args right = {
        {w.next}, {&w.slots->waiting}, {w.slots->z}, {w.solves}, {w.sum}, 1, LOOPS, Z_STRIDE, true};
    kern_exit_follow_args wrong[5] = {right, right, right, right, right};
    wrong[0].loop = 2; // which nothing begins with
    wrong[1].loop = LOOPS + 1;
    wrong[2].sum.p = NULL;
    wrong[3].z_stride = 0;
    wrong[4].next.p = NULL;
    for (int i = 0; i < 5; i++)
        kernel_test_assert_refused(&w.test, KERN_OP_EXIT_FOLLOW, &wrong[i], KERN_INVALID);
    ck_assert_int_eq(kern_rows_prepare(w.test.stream, w.next), KERN_INVALID); // is the device's
    close_world(&w);
}
END_TEST

static Suite *exit_follow_suite(void) {
    Suite *suite = suite_create("exit_follow");
    TCase *cases = tcase_create("exit_follow");
    tcase_set_timeout(cases, 120);
    tcase_add_loop_test(cases, lists_equal_the_hosts, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(cases, refusals, 0, KERNEL_TEST_DEVICES);
    suite_add_tcase(suite, cases);
    return suite;
}

MESA_TEST_MAIN(exit_follow_suite)
