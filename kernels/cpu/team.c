// SPDX-License-Identifier: Apache-2.0
// The team; see team.h.
//
// A thread's seat holds one word: the phase, and the range of pieces that nobody has taken yet. Taking some is a
// compare and exchange of that word, at the front by its owner and at the back by others. The first thread describes a
// phase before it deals the ranges out, and describes the next one only when all pieces are done: who has taken a piece
// reads the description that belongs to it.
#include "kernels/cpu/team.h"

#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#ifdef _OPENMP
#include <omp.h>
#endif

enum {
    LINE = 64,
    MOST_PIECES = UINT16_MAX, // of one phase: more are taken several at a time
    SPINS = 4000,             // some tens of microseconds
};

typedef struct seat {
    _Alignas(LINE) _Atomic uint64_t range; // phase << 32 | end << 16 | begin
    _Alignas(LINE) _Atomic uint64_t done;  // pieces that its thread has run, of all phases
} seat;

struct kern_team {
    _Alignas(LINE) _Atomic uint32_t phase;
    _Atomic uint32_t unit; // pieces that are taken at a time
    _Atomic int64_t pieces;
    _Atomic kern_piece run;
    const void *_Atomic context;
    _Alignas(LINE) atomic_bool ends; // the session
    int threads;
    bool in_session;
    uint64_t dealt; // units of all phases
    seat *seat;
};

kern_team *kern_team_create(int threads) {
    kern_team *team = aligned_alloc(LINE, sizeof *team);
    seat *seats = aligned_alloc(LINE, sizeof *seats * (size_t)threads);
    if (!team || !seats) {
        free(team);
        free(seats);
        return NULL;
    }
    *team = (kern_team){.threads = threads, .seat = seats};
    for (int i = 0; i < threads; i++)
        seats[i] = (seat){0};
    return team;
}

void kern_team_free(kern_team *team) {
    if (!team)
        return;
    free(team->seat);
    free(team);
}

// Threads that a region of the caller's may have.
static int threads_now(const kern_team *team) {
#ifdef _OPENMP
    const int most = omp_get_max_threads();
    return most < team->threads ? most : team->threads;
#else
    (void)team;
    return 1;
#endif
}

bool kern_team_in_session(const kern_team *team) {
    return team->in_session;
}

static inline void wait_a_little(int *spins) {
    if (++*spins > SPINS) {
        sched_yield();
        return;
    }
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

// ------------------------------------------------------------------------------------------------------------- pieces

static inline uint64_t range_of(uint32_t phase, uint64_t begin, uint64_t end) {
    return (uint64_t)phase << 32 | end << 16 | begin;
}

static void run_units(const kern_team *team, int64_t first, int64_t units) {
    const kern_piece run = atomic_load_explicit(&team->run, memory_order_relaxed);
    const void *context = atomic_load_explicit(&team->context, memory_order_relaxed);
    const int64_t unit = atomic_load_explicit(&team->unit, memory_order_relaxed);
    const int64_t pieces = atomic_load_explicit(&team->pieces, memory_order_relaxed), end = (first + units) * unit;
    for (int64_t piece = first * unit; piece < end && piece < pieces; piece++)
        run(context, piece);
}

// Takes units of one seat, half of what is left at a time or less, and runs them until none is left; returns how many.
static uint64_t take_from(kern_team *team, seat *from, bool owner) {
    uint64_t taken = 0, range = atomic_load_explicit(&from->range, memory_order_acquire);
    for (;;) {
        const uint64_t begin = range & UINT16_MAX, end = range >> 16 & UINT16_MAX;
        if (begin >= end)
            return taken;
        const uint64_t half = (end - begin + 1) / 2, units = half < KERN_PIECES_AT_ONCE ? half : KERN_PIECES_AT_ONCE;
        const uint64_t rest = owner ? range + units : range - (units << 16);
        if (!atomic_compare_exchange_weak_explicit(&from->range, &range, rest, memory_order_acq_rel,
                                                   memory_order_acquire))
            continue;
        run_units(team, (int64_t)(owner ? begin : end - units), (int64_t)units);
        taken += units;
        range = rest;
    }
}

// One thread's share of a phase: its own range, then what others have left.
static void take_all(kern_team *team, int thread) {
    uint64_t taken = 0;
    for (int i = 0; i < team->threads; i++)
        taken += take_from(team, &team->seat[(thread + i) % team->threads], i == 0);
    seat *own = &team->seat[thread];
    const uint64_t done = atomic_load_explicit(&own->done, memory_order_relaxed);
    atomic_store_explicit(&own->done, done + taken, memory_order_release);
}

static void begin_phase(kern_team *team, kern_piece run, const void *context, int64_t pieces) {
    const int64_t unit = (pieces + MOST_PIECES - 1) / MOST_PIECES, units = (pieces + unit - 1) / unit;
    atomic_store_explicit(&team->run, run, memory_order_relaxed);
    atomic_store_explicit(&team->context, context, memory_order_relaxed);
    atomic_store_explicit(&team->unit, (uint32_t)unit, memory_order_relaxed);
    atomic_store_explicit(&team->pieces, pieces, memory_order_relaxed);
    const uint32_t phase = atomic_load_explicit(&team->phase, memory_order_relaxed) + 1;
    for (int t = 0; t < team->threads; t++) {
        const uint64_t begin = (uint64_t)(units * t / team->threads);
        const uint64_t end = (uint64_t)(units * (t + 1) / team->threads);
        atomic_store_explicit(&team->seat[t].range, range_of(phase, begin, end), memory_order_release);
    }
    team->dealt += (uint64_t)units;
    atomic_store_explicit(&team->phase, phase, memory_order_release);
}

static void end_phase(const kern_team *team) {
    for (int spins = 0;; wait_a_little(&spins)) {
        uint64_t done = 0;
        for (int t = 0; t < team->threads; t++)
            done += atomic_load_explicit(&team->seat[t].done, memory_order_acquire);
        if (done == team->dealt)
            return;
    }
}

void kern_team_run(kern_team *team, kern_piece run, const void *context, int64_t pieces) {
    const int threads = team->in_session ? team->threads : threads_now(team);
    if (pieces < 2 || threads < 2) {
        for (int64_t piece = 0; piece < pieces; piece++)
            run(context, piece);
        return;
    }
    begin_phase(team, run, context, pieces);
    if (team->in_session) {
        take_all(team, 0);
    } else {
#ifdef _OPENMP
#pragma omp parallel num_threads(threads)
        take_all(team, omp_get_thread_num());
#else
        take_all(team, 0);
#endif
    }
    end_phase(team);
}

// ------------------------------------------------------------------------------------------------------------ session

#ifdef _OPENMP
static void help(kern_team *team, int thread, uint32_t phase) {
    for (int spins = 0; !atomic_load_explicit(&team->ends, memory_order_acquire); wait_a_little(&spins)) {
        const uint32_t now = atomic_load_explicit(&team->phase, memory_order_acquire);
        if (now == phase)
            continue;
        phase = now;
        take_all(team, thread);
        spins = 0;
    }
}

static void lead(kern_team *team, void (*run)(void *context), void *context) {
    team->in_session = true;
    run(context);
    team->in_session = false;
    atomic_store_explicit(&team->ends, true, memory_order_release);
}
#endif

void kern_team_session(kern_team *team, void (*run)(void *context), void *context) {
    (void)team;
#ifdef _OPENMP
    const int threads = threads_now(team);
    if (threads > 1) {
        const uint32_t phase = atomic_load_explicit(&team->phase, memory_order_relaxed);
        atomic_store_explicit(&team->ends, false, memory_order_relaxed);
#pragma omp parallel num_threads(threads)
        {
            if (omp_get_thread_num() == 0)
                lead(team, run, context);
            else
                help(team, omp_get_thread_num(), phase);
        }
        return;
    }
#endif
    run(context);
}
