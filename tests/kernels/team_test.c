// SPDX-License-Identifier: Apache-2.0
// The CPU device's team: every piece of every phase runs once, in a session and outside, however many pieces there are;
// a thread that is held up keeps nobody from the rest of its share.
#include <sched.h>
#include <stdatomic.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "kernels/cpu/team.h"
#include "tests/check_main.h"

enum { THREADS = 3, MOST = 200000, PHASES = 5000 };

typedef struct counts {
    kern_team *team;
    atomic_uchar *ran; // (pieces)
    int64_t pieces;
    atomic_llong total;
} counts;

static void count_piece(const void *context, int64_t piece) {
    const counts *c = context;
    atomic_fetch_add(&c->ran[piece], 1);
}

static kern_team *create_team(int threads) {
#ifdef _OPENMP
    omp_set_num_threads(threads); // more than there are processors, if need be
#endif
    kern_team *team = kern_team_create(threads);
    ck_assert_ptr_nonnull(team);
    return team;
}

static const int64_t sizes[] = {0, 1, 2, 3, 4, 7, 100, 65535, 65536, MOST};
enum { SIZES = sizeof sizes / sizeof sizes[0] };

static void run_sizes(void *context) {
    counts *c = context;
    for (int i = 0; i < SIZES; i++) {
        for (int64_t piece = 0; piece < MOST; piece++)
            atomic_store(&c->ran[piece], 0);
        kern_team_run(c->team, count_piece, c, sizes[i]);
        int wrong = 0;
        for (int64_t piece = 0; piece < MOST; piece++)
            wrong += atomic_load(&c->ran[piece]) != (piece < sizes[i]);
        ck_assert_int_eq(wrong, 0);
    }
}

START_TEST(every_piece_runs_once) {
    counts c = {.team = create_team(_i), .ran = calloc(MOST, sizeof *c.ran)};
    ck_assert_ptr_nonnull(c.ran);
    ck_assert(!kern_team_in_session(c.team));
    run_sizes(&c);
    kern_team_session(c.team, run_sizes, &c);
    ck_assert(!kern_team_in_session(c.team));
    kern_team_free(c.team);
    free(c.ran);
}
END_TEST

// Phases as short as they may be: who is late for one must not take a piece of the next by the wrong description.
typedef struct short_phase {
    atomic_llong *total;
    long long value;
} short_phase;

static void add_value(const void *context, int64_t piece) {
    const short_phase *phase = context;
    atomic_fetch_add(phase->total, phase->value + piece);
}

static void run_short_phases(void *context) {
    counts *c = context;
    for (int i = 0; i < PHASES; i++) {
        const short_phase phase = {&c->total, i};
        const long long before = atomic_load(&c->total);
        const int64_t pieces = 2 + i % 5;
        kern_team_run(c->team, add_value, &phase, pieces);
        ck_assert_int_eq(atomic_load(&c->total) - before, pieces * i + pieces * (pieces - 1) / 2);
    }
}

START_TEST(short_phases_do_not_mix) {
    counts c = {.team = create_team(THREADS)};
    kern_team_session(c.team, run_short_phases, &c);
    kern_team_free(c.team);
}
END_TEST

#ifdef _OPENMP
// The first piece of each thread but the first waits for all that its thread has not taken with it, which others
// therefore have to run.
enum { HELD_PIECES = 90 };

static void hold_piece(const void *context, int64_t piece) {
    counts *c = (counts *)(uintptr_t)context;
    const int64_t share = HELD_PIECES / THREADS, held = THREADS - 1;
    if (piece > 0 && piece % share == 0)
        while (atomic_load(&c->total) < HELD_PIECES - held * KERN_PIECES_AT_ONCE)
            sched_yield();
    else
        atomic_fetch_add(&c->total, 1);
}

static void run_held(void *context) {
    counts *c = context;
    kern_team_run(c->team, hold_piece, c, HELD_PIECES);
    ck_assert_int_eq(atomic_load(&c->total), HELD_PIECES - THREADS + 1);
}

START_TEST(a_thread_is_not_waited_for) {
    counts c = {.team = create_team(THREADS)};
    kern_team_session(c.team, run_held, &c);
    atomic_store(&c.total, 0);
    run_held(&c);
    kern_team_free(c.team);
}
END_TEST
#endif

static Suite *team_suite(void) {
    Suite *suite = suite_create("team");
    TCase *tcase = tcase_create("pieces");
    tcase_set_timeout(tcase, 60);
    tcase_add_loop_test(tcase, every_piece_runs_once, 1, THREADS + 1);
    tcase_add_test(tcase, short_phases_do_not_mix);
#ifdef _OPENMP
    tcase_add_test(tcase, a_thread_is_not_waited_for);
#endif
    suite_add_tcase(suite, tcase);
    return suite;
}

MESA_TEST_MAIN(team_suite)
