// SPDX-License-Identifier: Apache-2.0
// Every mixer in serving: a timeline's logits do not depend, not in a bit, on who runs beside it, on where its prompt
// was cut, on its state having been bytes in between, or on forks.
//
// Chunks are short (cpu:16), so that few tokens cross several of them. A state goes on on another device as well, with
// its rounding.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/batch.h"
#include "engine/state.h"
#include "tests/check_main.h"
#include "tests/engine/mixer_variants.h"
#include "tests/engine/test_device.h"

enum { ROWS = 6, GENERATED = 4, LONGEST = 71, VOCABULARY = MIXER_VOCABULARY };

static const int32_t lengths[ROWS] = {1, 5, 16, 17, 33, LONGEST};
static const eng_knobs standard = {ENG_CG_TOLERANCE, 1e-4F, 30, 1, 1}, exact = {ENG_CG_EXACT, 0, 0, 1, 1};
static const eng_state_key key = {.fingerprint = "of a model", .profile = "of a device"};

typedef struct bench {
    small_world world;
    eng_pool *pool;
    eng_snapshots *snapshots;
    eng_batch *batch;
} bench;

static void open_bench(const char *device, int variant, bench *out) {
    small_world_open(&mixer_variants[variant], device, &out->world);
    ck_assert_int_eq(eng_pool_create(out->world.model, out->world.device, ROWS, 2 * ROWS, &out->pool, NULL), ENG_OK);
    ck_assert_int_eq(eng_snapshots_create(out->pool, out->world.device, out->world.stream, &out->snapshots, NULL),
                     ENG_OK);
    ck_assert_int_eq(
        eng_batch_create(out->world.weights, out->pool, out->world.stream, ROWS, ROWS * 128, &out->batch, NULL),
        ENG_OK);
}

static void close_bench(bench *all) {
    eng_batch_free(all->batch);
    eng_snapshots_free(all->snapshots);
    eng_pool_free(all->pool);
    small_world_close(&all->world);
}

static int32_t chunk_of(const bench *at) {
    return kern_device_describe(at->world.device)->chunk;
}

typedef struct timeline {
    eng_session session;
    int32_t ids[LONGEST + GENERATED], prompt, index;
    float logits[(1 + GENERATED) * VOCABULARY]; // after the prompt and after each id read as generated
    int kept;
    bool whole; // the prompt in one piece, and generated ids as well
    eng_knobs knobs;
} timeline;

static void open_timeline(bench *at, timeline *t, int which) {
    *t = (timeline){.prompt = lengths[which], .knobs = standard};
    mixer_prompt((uint64_t)which + 1, t->ids, LONGEST + GENERATED);
    ck_assert_int_eq(eng_session_open(at->pool, at->world.stream, LONGEST + GENERATED, &t->session, NULL), ENG_OK);
}

static void add_timeline(bench *at, timeline *t) {
    eng_error error = {0};
    int32_t read = (int32_t)t->session.read, left = t->prompt - read;
    eng_piece piece = {.session = &t->session, .kind = KERN_ROW_GENERATED, .ids = t->ids + read, .count = 1};
    piece.knobs = t->knobs;
    piece.logits = left <= 0;
    if (left <= 0 && t->whole && t->kept == 1) { // all but the last at once
        piece.count = GENERATED - 1;
        t->kept += GENERATED - 2;
    }
    if (left > 0) {
        piece.kind = KERN_ROW_PROMPT;
        piece.count = t->whole ? left : eng_batch_piece_length(at->batch, &t->session, left);
        piece.logits = piece.count == left;
    }
    ck_assert_msg(eng_batch_add(at->batch, &piece, &t->index, &error) == ENG_OK, "%s", error.text);
}

// One step of those that are not done; false: nobody was left.
static bool step(bench *at, timeline *all, int count) {
    eng_error error = {0};
    bool added = false;
    eng_batch_clear(at->batch);
    for (int i = 0; i < count; i++)
        if (all[i].kept <= GENERATED) {
            add_timeline(at, &all[i]);
            added = true;
        }
    if (!added)
        return false;
    ck_assert_msg(eng_batch_run(at->batch, &error) == ENG_OK, "%s", error.text);
    for (int i = 0; i < count; i++) {
        timeline *t = &all[i];
        if (t->kept > GENERATED || t->session.read < t->prompt)
            continue;
        eng_piece_result result;
        eng_batch_result(at->batch, t->index, &result);
        ck_assert(result.finite);
        memcpy(t->logits + t->kept++ * VOCABULARY, result.logits, sizeof(float) * VOCABULARY);
    }
    return true;
}

static void run(bench *at, timeline *all, int count) {
    while (step(at, all, count)) {
    }
    for (int i = 0; i < count; i++)
        eng_session_close(&all[i].session);
}

static void same_logits(const timeline *got, const timeline *want, int variant, const char *what) {
    for (int row = 0; row <= GENERATED; row++) {
        bool skipped = want->whole && row > 0 && row < GENERATED - 1;
        ck_assert_msg(skipped || memcmp(got->logits + row * VOCABULARY, want->logits + row * VOCABULARY,
                                        sizeof(float) * VOCABULARY) == 0,
                      "%s: a prompt of %d ids %s, row %d", mixer_variants[variant].name, got->prompt, what, row);
    }
}

START_TEST(neighbours_and_cuts_change_no_bit) {
    static timeline among[ROWS], alone;
    bench at;
    open_bench(test_device("cpu:16"), _i, &at);
    for (int i = 0; i < ROWS; i++)
        open_timeline(&at, &among[i], i);
    run(&at, among, ROWS);
    for (int i = 0; i < ROWS; i++) {
        open_timeline(&at, &alone, i);
        alone.whole = true;
        run(&at, &alone, 1);
        same_logits(&among[i], &alone, _i, "in pieces among others");
    }
    close_bench(&at);
}
END_TEST

// Out of one pool and into another, which may be of another device.
static void move(const bench *from, const bench *to, timeline *t) {
    eng_error error = {0};
    const int64_t read = t->session.read;
    const eng_state out = {.begin = read, .read = read, .position = read, .states = 1, .at = {read}};
    eng_state in;
    eng_run *run;
    size_t bytes = eng_state_measure(from->pool, &out);
    void *state = malloc(bytes);
    eng_snapshot *rest = eng_snapshot_keep(from->snapshots, &t->session);
    ck_assert(rest && !t->session.pool);
    ck_assert_int_eq(eng_snapshot_write_out(rest, eng_state_content(from->pool, &out, 0, state), NULL), ENG_OK);
    eng_state_write(from->pool, &key, &out, state);
    ck_assert_int_eq(eng_state_seal(from->pool, &out, state, NULL), ENG_OK);
    eng_snapshot_release(rest);
    ck_assert_msg(eng_state_open(to->pool, &key, VOCABULARY, true, state, bytes, &in, &run, &error) == ENG_OK, "%s",
                  error.text);
    rest = eng_snapshot_read_in(to->snapshots, in.at[0], in.content[0]);
    ck_assert_ptr_nonnull(rest);
    ck_assert_int_eq(eng_snapshot_open(rest, LONGEST + GENERATED, &t->session, NULL), ENG_OK);
    eng_snapshot_release(rest);
    free(state);
    free(run);
}

// Exported between two steps and imported into a pool that never saw it, in the middle of the prompt and later.
START_TEST(a_state_survives_being_bytes) {
    static timeline straight, moved;
    bench at, other;
    open_bench(test_device("cpu:16"), _i, &at);
    open_bench(test_device("cpu:16"), _i, &other);
    open_timeline(&at, &straight, ROWS - 1);
    run(&at, &straight, 1);
    for (int steps = 1; steps < LONGEST / chunk_of(&at) + GENERATED; steps += 3) {
        open_timeline(&at, &moved, ROWS - 1);
        for (int i = 0; i < steps; i++)
            ck_assert(step(&at, &moved, 1));
        move(&at, &other, &moved);
        run(&other, &moved, 1);
        same_logits(&moved, &straight, _i, "moved");
    }
    close_bench(&at);
    close_bench(&other);
}
END_TEST

static void near_logits(const timeline *got, const timeline *want, int variant, int first) {
    for (int row = 0; row <= GENERATED; row++) {
        double difference = 0, size = 0;
        for (int i = row * VOCABULARY; i < (row + 1) * VOCABULARY; i++) {
            difference += ((double)got->logits[i] - want->logits[i]) * ((double)got->logits[i] - want->logits[i]);
            size += (double)want->logits[i] * want->logits[i];
        }
        ck_assert_msg(sqrt(difference) <= 1e-4 * sqrt(size), "%s: moved after %d steps, row %d: relative distance %g",
                      mixer_variants[variant].name, first, row, sqrt(difference / size));
    }
}

// Read by a CPU, by the device under test, and by the CPU to its end. (Where that is a CPU, its chunks are longer.)
START_TEST(a_state_goes_on_on_another_device_and_back) {
    static timeline straight, moved;
    bench at, other;
    open_bench("cpu:16", _i, &at);
    open_bench(test_device("cpu:64"), _i, &other);
    open_timeline(&at, &straight, ROWS - 1);
    straight.knobs = exact;
    run(&at, &straight, 1);
    for (int first = 1; first < LONGEST / 16 + GENERATED - 1; first += 2) {
        open_timeline(&at, &moved, ROWS - 1);
        moved.knobs = exact;
        for (int i = 0; i < first; i++)
            ck_assert(step(&at, &moved, 1));
        move(&at, &other, &moved);
        ck_assert(step(&other, &moved, 1));
        move(&other, &at, &moved);
        run(&at, &moved, 1);
        near_logits(&moved, &straight, _i, first);
    }
    close_bench(&at);
    close_bench(&other);
}
END_TEST

// Both go on beside each other in the same steps.
START_TEST(a_fork_goes_on_as_the_first) {
    static timeline straight, both[2];
    bench at;
    open_bench(test_device("cpu:16"), _i, &at);
    open_timeline(&at, &straight, ROWS - 1);
    run(&at, &straight, 1);
    open_timeline(&at, &both[0], ROWS - 1);
    for (int i = 0; i < 2; i++)
        ck_assert(step(&at, both, 1));
    both[1] = both[0];
    ck_assert_int_eq(eng_session_fork(&both[0].session, at.world.stream, LONGEST + GENERATED, &both[1].session, NULL),
                     ENG_OK);
    run(&at, both, 2);
    same_logits(&both[0], &straight, _i, "beside its fork");
    same_logits(&both[1], &straight, _i, "forked");
    close_bench(&at);
}
END_TEST

static Suite *mixer_suite(void) {
    Suite *suite = suite_create("mixer");
    TCase *cases = tcase_create("variants");
    tcase_set_timeout(cases, 60);
    tcase_add_loop_test(cases, neighbours_and_cuts_change_no_bit, 0, MIXER_VARIANTS);
    tcase_add_loop_test(cases, a_state_survives_being_bytes, 0, MIXER_VARIANTS);
    tcase_add_loop_test(cases, a_state_goes_on_on_another_device_and_back, 0, MIXER_VARIANTS);
    tcase_add_loop_test(cases, a_fork_goes_on_as_the_first, 0, MIXER_VARIANTS);
    suite_add_tcase(suite, cases);
    return suite;
}

DEVICE_TEST_MAIN(mixer_suite)
