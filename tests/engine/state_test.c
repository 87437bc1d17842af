// SPDX-License-Identifier: Apache-2.0
// Timelines as bytes: what is refused, and that a refusal changes nothing. (That every mixer goes on bit for bit:
// mixer_test.c, timeline_test.c.)
#include <stdlib.h>
#include <string.h>

#include "engine/batch.h"
#include "engine/state.h"
#include "tests/check_main.h"
#include "tests/engine/small_models.h"
#include "tests/engine/test_device.h"

enum { READ = 70, ROOM = 100, HEADER = 192, RUNS = 1, RUN = 32, STORAGE = 80 };

static const eng_state_key key = {.fingerprint = "this model", .profile = "this profile"},
                           another = {.fingerprint = "another", .profile = "this profile"},
                           elsewhere = {.fingerprint = "this model", .profile = "another profile"};

static small_world world;
static eng_pool *pool;
static eng_snapshots *snapshots;
static unsigned char *bytes;
static size_t count;

// A state that has read READ ids, with one more read and one waiting, as bytes; nothing of the pool is in use.
static void export_state(int model) {
    static const int32_t behind[] = {18, 17};
    int32_t ids[READ], index;
    eng_session session;
    eng_batch *batch;
    small_world_open(&small_models[model], test_device("cpu"), &world);
    small_prompt(1, ids, READ);
    ck_assert_int_eq(eng_pool_create(world.model, world.device, 1, 2, &pool, NULL), ENG_OK);
    ck_assert_int_eq(eng_snapshots_create(pool, world.device, world.stream, &snapshots, NULL), ENG_OK);
    ck_assert_int_eq(eng_session_open(pool, world.stream, ROOM, &session, NULL), ENG_OK);
    ck_assert_int_eq(eng_batch_create(world.weights, pool, world.stream, 1, READ, &batch, NULL), ENG_OK);
    eng_piece piece = {.session = &session, .kind = KERN_ROW_PROMPT, .ids = ids, .count = READ};
    piece.knobs = (eng_knobs){ENG_CG_EXACT, 0, 0, 1, 1};
    ck_assert_int_eq(eng_batch_add(batch, &piece, &index, NULL), ENG_OK);
    ck_assert_int_eq(eng_batch_run(batch, NULL), ENG_OK);
    const eng_run run = {.end = READ + 2, .kind = KERN_ROW_GENERATED, .knobs = piece.knobs};
    const eng_state state = {.begin = READ,
                             .read = READ + 1,
                             .position = READ + 2,
                             .run = &run,
                             .runs = RUNS,
                             .ids = behind,
                             .states = 1,
                             .at = {READ}};
    eng_snapshot *rest = eng_snapshot_keep(snapshots, &session);
    count = eng_state_measure(pool, &state);
    bytes = malloc(count);
    ck_assert_int_eq(eng_snapshot_write_out(rest, eng_state_content(pool, &state, 0, bytes), NULL), ENG_OK);
    eng_state_write(pool, &key, &state, bytes);
    ck_assert_int_eq(eng_state_seal(pool, &state, bytes, NULL), ENG_OK);
    eng_snapshot_release(rest);
    eng_batch_free(batch);
}

static void close_all(void) {
    free(bytes);
    eng_snapshots_free(snapshots);
    eng_pool_free(pool);
    small_world_close(&world);
}

static eng_status import(const unsigned char *from, size_t size, const eng_state_key *of, bool *profile_changed,
                         eng_error *error) {
    eng_state state = {0};
    eng_run *run = NULL;
    eng_status status = eng_state_open(pool, of, SMALL_VOCAB, true, from, size, &state, &run, error);
    if (status != ENG_OK) {
        ck_assert(!run && !state.ids);
        return status;
    }
    ck_assert(state.begin == READ && state.read == READ + 1 && state.position == READ + 2 && state.runs == RUNS);
    ck_assert(state.ids[0] == 18 && state.ids[1] == 17);
    ck_assert(run[0].end == READ + 2 && run[0].kind == KERN_ROW_GENERATED && run[0].knobs.cg_mode == ENG_CG_EXACT);
    ck_assert(state.states == 1 && state.at[0] == READ);
    ck_assert_ptr_eq(state.content[0], eng_state_content(pool, &state, 0, (void *)from));
    if (profile_changed)
        *profile_changed = state.profile_changed;
    free(run);
    return status;
}

static eng_status plain_import(void) {
    return import(bytes, count, &key, NULL, NULL);
}

START_TEST(any_changed_byte_is_refused) {
    eng_error error = {0};
    bool changed;
    export_state(_i);
    ck_assert_msg(import(bytes, count, &key, &changed, &error) == ENG_OK, "%s", error.text);
    ck_assert(!changed);
    for (size_t i = 0; i < count; i += i < HEADER + RUNS * RUN + 8 ? 1 : count / 97) {
        bytes[i] ^= 0x10;
        eng_status status = plain_import();
        ck_assert_msg(status == ENG_FORMAT || status == ENG_UNSUPPORTED, "byte %zu: %d", i, status);
        bytes[i] ^= 0x10;
    }
    ck_assert_int_eq(plain_import(), ENG_OK);
    ck_assert_int_eq(import(bytes, count, &elsewhere, &changed, NULL), ENG_OK);
    ck_assert(changed); // it goes on all the same, and says so
    close_all();
}
END_TEST

START_TEST(other_sizes_and_models_are_refused) {
    eng_error error = {0};
    export_state(_i);
    for (size_t size = 0; size < count; size += size < HEADER ? 1 : count / 13)
        ck_assert_int_eq(import(bytes, size, &key, NULL, NULL), ENG_FORMAT);
    ck_assert_int_eq(import(bytes, count, &another, NULL, &error), ENG_UNSUPPORTED);
    ck_assert_ptr_nonnull(strstr(error.text, "another model"));
    bytes[8]--; // before it held what the next id is drawn from
    error = (eng_error){0};
    ck_assert_int_eq(import(bytes, count, &key, NULL, &error), ENG_UNSUPPORTED);
    ck_assert_ptr_nonnull(strstr(error.text, "a state of version 5, this is version 6"));
    bytes[8]++;
    bytes[STORAGE] = KERN_STORE_BF16;
    error = (eng_error){0};
    ck_assert_int_eq(import(bytes, count, &key, NULL, &error), ENG_UNSUPPORTED);
    ck_assert_ptr_nonnull(strstr(error.text, "a state stored as bf16, this model stores float32"));
    bytes[STORAGE] = KERN_STORE_F32;
    ck_assert_int_eq(plain_import(), ENG_OK);
    close_all();
}
END_TEST

// Sealed as they are, so that nothing but what they say is wrong with them.
START_TEST(what_cannot_be_is_refused_with_a_right_digest) {
    static const eng_knobs knobs = {ENG_CG_EXACT, 0, 0, 1, 1}, wild = {ENG_CG_FIXED, 0, 0, 1, 1};
    static const int32_t good[] = {1, 2}, bad[] = {1, SMALL_VOCAB};
    const eng_run one = {2, KERN_ROW_PROMPT, knobs}, late = {3, KERN_ROW_PROMPT, knobs},
                  strange = {2, (kern_row_kind)7, knobs}, fixed = {2, KERN_ROW_PROMPT, wild};
    const eng_state right = {.read = 2, .position = 2, .run = &one, .runs = 1, .ids = good};
    eng_state wrong[] = {right, right, right, right, right, right, right, right, right};
    wrong[0].ids = bad;
    wrong[1].run = &late;
    wrong[2].run = &strange;
    wrong[3].run = &fixed;
    wrong[4].runs = 0;
    wrong[5].read = 0, wrong[5].runs = 0;                        // two ids wait
    wrong[6].states = 1, wrong[6].at[0] = 3;                     // beyond what was read
    wrong[7].states = 2, wrong[7].at[0] = 2, wrong[7].at[1] = 1; // not in order
    wrong[8].states = 1;                                         // of nothing
    export_state(SMALL_MESA);
    for (size_t i = 0; i <= sizeof wrong / sizeof *wrong; i++) {
        const eng_state *state = i == 0 ? &right : &wrong[i - 1];
        eng_state found;
        eng_run *run = NULL;
        size_t size = eng_state_measure(pool, state);
        unsigned char *sealed = calloc(1, size);
        eng_state_write(pool, &key, state, sealed);
        ck_assert_int_eq(eng_state_seal(pool, state, sealed, NULL), ENG_OK);
        eng_status status = eng_state_open(pool, &key, SMALL_VOCAB, true, sealed, size, &found, &run, NULL);
        ck_assert_msg(status == (i == 0 ? ENG_OK : ENG_FORMAT), "%zu: %d", i, status);
        free(run);
        free(sealed);
    }
    close_all();
}
END_TEST

static Suite *state_suite(void) {
    Suite *suite = suite_create("state");
    TCase *cases = tcase_create("bytes");
    tcase_add_loop_test(cases, any_changed_byte_is_refused, 0, SMALL_MODELS);
    tcase_add_loop_test(cases, other_sizes_and_models_are_refused, 0, SMALL_MODELS);
    tcase_add_test(cases, what_cannot_be_is_refused_with_a_right_digest);
    suite_add_tcase(suite, cases);
    return suite;
}

DEVICE_TEST_MAIN(state_suite)
