// SPDX-License-Identifier: Apache-2.0
// Sessions as bytes: what is refused, and that a refusal takes nothing. (That every mixer goes on bit for bit:
// mixer_test.c.)
#include <stdlib.h>
#include <string.h>

#include "engine/batch.h"
#include "engine/state.h"
#include "tests/check_main.h"
#include "tests/engine/small_models.h"
#include "tests/engine/test_device.h"

enum { READ = 70, ROOM = 100, HEADER = 120, STORAGE = 48 };

static const unsigned char fingerprint[ENG_DIGEST_BYTES] = "this model", another[ENG_DIGEST_BYTES] = "another";

static small_world world;
static eng_pool *pool;
static unsigned char *bytes;
static size_t count;

// A session that has read READ ids, as bytes, and a pool of which nothing is in use.
static void export_session(int model) {
    int32_t ids[READ], index;
    eng_session session;
    eng_batch *batch;
    small_world_open(&small_models[model], test_device("cpu"), &world);
    small_prompt(1, ids, READ);
    ck_assert_int_eq(eng_pool_create(world.model, world.device, 1, 2, &pool, NULL), ENG_OK);
    ck_assert_int_eq(eng_session_open(pool, world.stream, ROOM, &session, NULL), ENG_OK);
    ck_assert_int_eq(eng_batch_create(world.weights, pool, world.stream, 1, READ, &batch, NULL), ENG_OK);
    eng_piece piece = {.session = &session, .kind = KERN_ROW_PROMPT, .ids = ids, .count = READ};
    piece.knobs = (eng_knobs){ENG_CG_EXACT, 0, 0, 1, 1};
    ck_assert_int_eq(eng_batch_add(batch, &piece, &index, NULL), ENG_OK);
    ck_assert_int_eq(eng_batch_run(batch, NULL), ENG_OK);
    session.tail[0] = 17;
    session.tail_count = 1;
    count = eng_state_bytes(&session);
    bytes = malloc(count);
    ck_assert_int_eq(eng_state_export(&session, world.stream, fingerprint, bytes, NULL), ENG_OK);
    eng_session_close(&session);
    eng_batch_free(batch);
}

static void close_all(void) {
    free(bytes);
    eng_pool_free(pool);
    small_world_close(&world);
}

static eng_status import(const unsigned char *from, size_t size, const unsigned char *of, int64_t room,
                         eng_error *error) {
    int32_t slots, pages;
    eng_session session = {0};
    eng_status status = eng_state_import(pool, world.stream, room, of, from, size, &session, error);
    if (status != ENG_OK) {
        (void)eng_pool_slots(pool, &slots);
        (void)eng_pool_page_count(pool, &pages);
        ck_assert(slots == 0 && pages == 0 && !session.pool);
        return status;
    }
    ck_assert_int_eq(session.read, READ);
    ck_assert_int_eq(session.tail_count, 1);
    ck_assert_int_eq(session.tail[0], 17);
    eng_session_close(&session);
    return status;
}

START_TEST(any_changed_byte_is_refused) {
    eng_error error = {0};
    export_session(_i);
    ck_assert_msg(import(bytes, count, fingerprint, ROOM, &error) == ENG_OK, "%s", error.text);
    for (size_t i = 0; i < count; i += i < HEADER ? 1 : count / 97) {
        bytes[i] ^= 0x10;
        eng_status status = import(bytes, count, fingerprint, ROOM, NULL);
        ck_assert_msg(status == ENG_FORMAT || status == ENG_UNSUPPORTED, "byte %zu: %d", i, status);
        bytes[i] ^= 0x10;
    }
    ck_assert_int_eq(import(bytes, count, fingerprint, ROOM, NULL), ENG_OK);
    close_all();
}
END_TEST

START_TEST(other_sizes_and_models_are_refused) {
    eng_error error = {0};
    export_session(_i);
    for (size_t size = 0; size < count; size += size < HEADER ? 1 : count / 13)
        ck_assert_int_eq(import(bytes, size, fingerprint, ROOM, NULL), ENG_FORMAT);
    ck_assert_int_eq(import(bytes, count, another, ROOM, &error), ENG_UNSUPPORTED);
    ck_assert_ptr_nonnull(strstr(error.text, "another model"));
    bytes[8]++;
    error = (eng_error){0};
    ck_assert_int_eq(import(bytes, count, fingerprint, ROOM, &error), ENG_UNSUPPORTED);
    ck_assert_ptr_nonnull(strstr(error.text, "version 3"));
    bytes[8]--;
    bytes[STORAGE] = KERN_STORE_BF16;
    error = (eng_error){0};
    ck_assert_int_eq(import(bytes, count, fingerprint, ROOM, &error), ENG_UNSUPPORTED);
    ck_assert_ptr_nonnull(strstr(error.text, "a state stored as bf16, this model stores float32"));
    bytes[STORAGE] = KERN_STORE_F32;
    ck_assert_int_eq(import(bytes, count, fingerprint, READ - 1, NULL), ENG_INVALID);
    ck_assert_int_eq(import(bytes, count, fingerprint, READ, NULL), ENG_OK);
    close_all();
}
END_TEST

START_TEST(a_full_pool_and_a_long_session_are_refused) {
    eng_session session, none = {0};
    export_session(SMALL_LLAMA);
    ck_assert_int_eq(import(bytes, count, fingerprint, 1000, NULL), ENG_TOO_LONG);
    ck_assert_int_eq(eng_session_open(pool, world.stream, 1, &session, NULL), ENG_OK);
    ck_assert_int_eq(eng_state_import(pool, world.stream, ROOM, fingerprint, bytes, count, &none, NULL), ENG_FULL);
    ck_assert_ptr_null(none.pool);
    eng_session_close(&session);
    close_all();
}
END_TEST

static Suite *state_suite(void) {
    Suite *suite = suite_create("state");
    TCase *cases = tcase_create("bytes");
    tcase_add_loop_test(cases, any_changed_byte_is_refused, 0, SMALL_MODELS);
    tcase_add_loop_test(cases, other_sizes_and_models_are_refused, 0, SMALL_MODELS);
    tcase_add_test(cases, a_full_pool_and_a_long_session_are_refused);
    suite_add_tcase(suite, cases);
    return suite;
}

DEVICE_TEST_MAIN(state_suite)
