// SPDX-License-Identifier: Apache-2.0
// Pools and sessions: slots are lent zeroed and come back, pages are promised at opening and taken by growth.
//
// The tests look into the pool's device memory, which on the CPU is host memory.
#include <stdlib.h>
#include <string.h>

#include "engine/session.h"
#include "tests/check_main.h"
#include "tests/engine/small_models.h"

static small_world world;
static eng_pool *pool;

static void open_pool(int model, int32_t slots, int32_t pages) {
    small_world_open(&small_models[model], "cpu", &world);
    ck_assert_int_eq(eng_pool_create(world.model, world.device, slots, pages, &pool, NULL), ENG_OK);
}

static void close_pool(void) {
    eng_pool_free(pool);
    pool = NULL;
    small_world_close(&world);
}

static int32_t used_slots(void) {
    int32_t used;
    (void)eng_pool_slots(pool, &used);
    return used;
}

static int32_t used_pages(void) {
    int32_t used;
    (void)eng_pool_page_count(pool, &used);
    return used;
}

START_TEST(slots_run_out_and_come_back) {
    eng_session session[3] = {0}, none = {0};
    open_pool(SMALL_MESA, 3, 0);
    ck_assert_uint_eq(eng_pool_slot_stride(pool) % 64, 0);
    ck_assert_uint_ge(eng_pool_slot_stride(pool), world.model->state_bytes);
    for (int i = 0; i < 3; i++) {
        ck_assert_int_eq(eng_session_open(pool, world.stream, 1000000000000, &session[i], NULL), ENG_OK);
        for (int j = 0; j < i; j++)
            ck_assert_int_ne(session[i].slot, session[j].slot);
    }
    ck_assert_int_eq(used_slots(), 3);
    ck_assert_int_eq(eng_session_open(pool, world.stream, 1, &none, NULL), ENG_FULL);
    ck_assert_ptr_null(none.pool);
    int32_t freed = session[1].slot;
    eng_session_close(&session[1]);
    eng_session_close(&session[1]); // closed already
    eng_session_close(&none);       // never opened
    ck_assert_int_eq(used_slots(), 2);
    ck_assert_int_eq(eng_session_open(pool, world.stream, 1, &session[1], NULL), ENG_OK);
    ck_assert_int_eq(session[1].slot, freed);
    for (int i = 0; i < 3; i++)
        eng_session_close(&session[i]);
    ck_assert_int_eq(used_slots(), 0);
    close_pool();
}
END_TEST

START_TEST(a_slot_is_lent_zeroed) {
    eng_session session;
    open_pool(SMALL_MESA, 2, 0);
    size_t stride = eng_pool_slot_stride(pool);
    memset(eng_pool_states(pool), 0xFF, 2 * stride); // NaN all over; on the CPU device memory is host memory
    ck_assert_int_eq(eng_session_open(pool, world.stream, 1, &session, NULL), ENG_OK);
    const unsigned char *own = (unsigned char *)eng_pool_states(pool) + (size_t)session.slot * stride;
    const unsigned char *other = (unsigned char *)eng_pool_states(pool) + (size_t)(1 - session.slot) * stride;
    for (size_t i = 0; i < stride; i++) {
        ck_assert_uint_eq(own[i], 0);
        ck_assert_uint_eq(other[i], 0xFF);
    }
    eng_session_close(&session);
    close_pool();
}
END_TEST

START_TEST(pages_are_promised_then_taken) {
    eng_session a, b = {0};
    eng_error error = {0};
    open_pool(SMALL_LLAMA, 4, 5);
    ck_assert_int_eq(eng_session_open(pool, world.stream, 3 * 64 + 1, &a, NULL), ENG_OK); // 4 pages
    ck_assert_int_eq(used_pages(), 4);
    ck_assert_int_eq(a.pages, 0);
    ck_assert_int_eq(eng_session_open(pool, world.stream, 65, &b, NULL), ENG_FULL); // 2 pages, 1 is free
    ck_assert_int_eq(used_slots(), 1);
    ck_assert_int_eq(eng_session_open(pool, world.stream, 64, &b, NULL), ENG_OK);
    memset(eng_pool_pages(pool), 0xFF, 5 * eng_pool_page_stride(pool));
    ck_assert_int_eq(eng_session_grow(&a, world.stream, 64, NULL), ENG_OK);
    ck_assert_int_eq(a.pages, 1);
    ck_assert_int_eq(eng_session_grow(&a, world.stream, 65, NULL), ENG_OK);
    ck_assert_int_eq(a.pages, 2);
    ck_assert_int_eq(eng_session_grow(&b, world.stream, 64, NULL), ENG_OK);
    ck_assert_int_eq(eng_session_grow(&a, world.stream, 193, NULL), ENG_OK);
    ck_assert_int_eq(a.pages, 4);
    const unsigned char *pages = eng_pool_pages(pool);
    for (size_t i = 0; i < 5 * eng_pool_page_stride(pool); i++)
        ck_assert_uint_eq(pages[i], 0); // all five are taken, and each was cleared
    for (int i = 0; i < 4; i++)
        ck_assert_int_ne(a.page[i], b.page[0]);
    ck_assert_int_eq(used_pages(), 5);
    ck_assert_int_eq(eng_session_grow(&a, world.stream, 257, &error), ENG_TOO_LONG);
    eng_session_close(&a);
    ck_assert_int_eq(used_pages(), 1);
    ck_assert_int_eq(eng_session_open(pool, world.stream, 256, &a, NULL), ENG_OK);
    eng_session_close(&a); // promised pages that were never taken go back too
    eng_session_close(&b);
    ck_assert_int_eq(used_pages(), 0);
    close_pool();
}
END_TEST

START_TEST(a_fork_shares_full_pages) {
    eng_session a, b = {0}, c = {0};
    open_pool(SMALL_LLAMA, 3, 6);
    size_t stride = eng_pool_page_stride(pool);
    char *pages = eng_pool_pages(pool);
    ck_assert_int_eq(eng_session_open(pool, world.stream, 200, &a, NULL), ENG_OK); // 4 pages
    ck_assert_int_eq(eng_session_grow(&a, world.stream, 100, NULL), ENG_OK);
    a.read = 100;
    for (int i = 0; i < a.pages; i++)
        memset(pages + (size_t)a.page[i] * stride, 'a' + i, stride);
    ck_assert_int_eq(eng_session_fork(&a, world.stream, 99, &b, NULL), ENG_INVALID);
    ck_assert_int_eq(eng_session_fork(&a, world.stream, 257, &b, NULL), ENG_FULL); // 4 pages more, 2 are free
    ck_assert_ptr_null(b.pool);
    ck_assert_int_eq(eng_session_fork(&a, world.stream, 150, &b, NULL), ENG_OK); // 2 pages more
    ck_assert_int_eq(used_pages(), 6);
    ck_assert_int_eq(b.read, 100);
    ck_assert_int_ne(b.slot, a.slot);
    ck_assert_int_eq(b.page[0], a.page[0]);
    ck_assert_int_ne(b.page[1], a.page[1]); // what is under way is copied
    ck_assert_mem_eq(pages + (size_t)b.page[1] * stride, pages + (size_t)a.page[1] * stride, stride);
    int32_t shared = a.page[0];
    eng_session_close(&a);
    ck_assert_int_eq(used_pages(), 3);
    ck_assert_int_eq(pages[(size_t)shared * stride], 'a'); // still b's
    ck_assert_int_eq(eng_session_grow(&b, world.stream, 150, NULL), ENG_OK);
    b.read = 128;
    ck_assert_int_eq(eng_session_fork(&b, world.stream, 128, &c, NULL), ENG_OK); // on a page's end nothing is copied
    ck_assert_int_eq(c.pages, 2);
    ck_assert_int_eq(used_pages(), 3);
    eng_session_close(&b);
    ck_assert_int_eq(used_pages(), 2);
    eng_session_close(&c);
    ck_assert_int_eq(used_pages() + used_slots(), 0);
    close_pool();
}
END_TEST

START_TEST(what_never_fits_is_told_in_bytes) {
    eng_session session = {0};
    eng_error error = {0};
    char bytes[32];
    open_pool(SMALL_LLAMA, 4, 5);
    ck_assert_int_eq(eng_session_open(pool, world.stream, 5 * 64 + 1, &session, &error), ENG_TOO_LONG);
    snprintf(bytes, sizeof bytes, "%zu bytes", 6 * eng_pool_page_stride(pool));
    ck_assert_msg(strstr(error.text, bytes) != NULL, "%s", error.text);
    ck_assert_int_eq(eng_pool_check_length(pool, 5 * 64, NULL), ENG_OK);
    ck_assert_int_eq(eng_pool_check_length(pool, INT64_MAX, NULL), ENG_TOO_LONG);
    ck_assert_int_eq(eng_session_open(pool, world.stream, 0, &session, NULL), ENG_INVALID);
    close_pool();
    open_pool(SMALL_MESA, 1, 0); // a state of constant size takes any length
    ck_assert_int_eq(eng_pool_check_length(pool, INT64_MAX, NULL), ENG_OK);
    close_pool();
}
END_TEST

START_TEST(impossible_pools_are_refused) {
    eng_error error = {0};
    pool = NULL;
    small_world_open(&small_models[SMALL_MESA], "cpu", &world);
    ck_assert_int_eq(eng_pool_create(world.model, world.device, 0, 0, &pool, &error), ENG_INVALID);
    ck_assert_int_eq(eng_pool_create(world.model, world.device, 1, -1, &pool, &error), ENG_INVALID);
    ck_assert_ptr_null(pool);
    close_pool();
}
END_TEST

static Suite *session_suite(void) {
    Suite *suite = suite_create("session");
    TCase *cases = tcase_create("pool");
    tcase_set_timeout(cases, 60);
    tcase_add_test(cases, slots_run_out_and_come_back);
    tcase_add_test(cases, a_slot_is_lent_zeroed);
    tcase_add_test(cases, pages_are_promised_then_taken);
    tcase_add_test(cases, a_fork_shares_full_pages);
    tcase_add_test(cases, what_never_fits_is_told_in_bytes);
    tcase_add_test(cases, impossible_pools_are_refused);
    suite_add_tcase(suite, cases);
    return suite;
}

MESA_TEST_MAIN(session_suite)
