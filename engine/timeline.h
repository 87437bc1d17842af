// SPDX-License-Identifier: Apache-2.0
// Timelines that are kept after a request ends: their ids, how each was read, and states at rest along the way.
//
// A timeline is `position` ids, of which a state has read the first `read`; at most one more, the last, waits (the
// tail). How ids are read is a list of runs: as a prompt, in chunks on the absolute grid, or as generated ids, one by
// one, and with which knobs: those of the request that they came with, also for the tail, which another will read.
// Reading them again by the same runs from any state along the way gives the same bits, so a state that is missing
// costs time and nothing else: a timeline that was cut before where its state stood (a stop string, a cancellation, a
// fork at an earlier position) is restored when it goes on, from the nearest state before.
// With a state lies what the next id is drawn from, so a timeline without a tail goes on without reading an id again.
// Kept are the states in which requests began and ended; the newest of each timeline stays, the others go, least
// recently used first, when the budget needs their bytes.
//
// A *turn* is a request's time on a timeline: what it reads, from which state on, and what becomes of it. One turn at a
// time; a fork may be made meanwhile and has what was there before it. All on the engine's thread.
#ifndef ENGINE_TIMELINE_H
#define ENGINE_TIMELINE_H

#include "engine/engine.h"
#include "engine/snapshot.h"

enum { ENG_MAX_TIMELINES = 1 << 16 };

typedef struct eng_timelines eng_timelines;
typedef struct eng_prompt eng_prompt; // request.h

// How ids are read, from the end of the run before on.
typedef struct eng_run {
    int64_t end; // position behind the last
    kern_row_kind kind;
    eng_knobs knobs;
} eng_run;

typedef struct eng_timeline {
    eng_timelines *all;
    uint64_t id, owner;
    int32_t *ids;            // (end - first)
    int64_t first, capacity; // position of ids[0]; 0 unless what came before is forgotten or was never here
    int64_t position, read;
    int64_t end;  // with the ids of the turn under way
    eng_run *run; // (runs) up to position
    int32_t runs, run_capacity;
    eng_snapshot **snapshot; // (snapshots) by ascending read. With first > 0 the first has read first
    int32_t snapshots, snapshot_capacity;
    int64_t low;             // the least `read` since whoever follows the changes set it
    uint64_t changes;        // of ids and runs
    struct eng_named *named; // durable.h; NULL: it has no name
    bool busy;               // a turn is under way, or what it brought is on its way to the store
    bool profile_changed;    // it came from where numbers may come out otherwise
} eng_timeline;

typedef struct eng_timelines_options {
    eng_snapshots *snapshots; // borrowed
    uint64_t budget;          // bytes of ids and states
    int64_t history;          // ids that are kept of a timeline, at least; more only while no state lies among them
    int64_t context_length;   // -1: unbounded
} eng_timelines_options;

ENG_CHECKED eng_status eng_timelines_create(const eng_timelines_options *options, eng_timelines **out,
                                            eng_error *error);
void eng_timelines_free(eng_timelines *all); // after all turns have ended
eng_snapshots *eng_timelines_snapshots(const eng_timelines *all);
uint64_t eng_timelines_bytes(const eng_timelines *all, uint64_t *budget);
int32_t eng_timelines_count(const eng_timelines *all);
uint64_t eng_timelines_changes(const eng_timelines *all); // of all timelines together

// A new one without ids. ENG_FULL: too many, or no room in the budget.
ENG_CHECKED eng_status eng_timelines_add(eng_timelines *all, uint64_t owner, eng_timeline **out, eng_error *error);
// NULL with ENG_NOT_FOUND for an unknown id and for another owner's alike.
eng_timeline *eng_timelines_find(const eng_timelines *all, uint64_t owner, uint64_t id, eng_error *error);
eng_timeline *eng_timelines_after(const eng_timelines *all, uint64_t owner, uint64_t id); // the owner's next; NULL
ENG_CHECKED eng_status eng_timelines_remove(eng_timeline *timeline, eng_error *error);    // ENG_BUSY
// Room for bytes beside what is there: states that may go do so. ENG_FULL.
ENG_CHECKED eng_status eng_timelines_reserve(eng_timelines *all, uint64_t bytes, eng_error *error);
void eng_timelines_unreserve(eng_timelines *all, uint64_t bytes);

// A new timeline that is what this one was at the position; -1: what it is. ENG_CONFLICT: forgotten, or not there yet.
ENG_CHECKED eng_status eng_timeline_copy(const eng_timeline *from, int64_t position, eng_timeline **out,
                                         eng_error *error);
// Back to an earlier position; what came after it is gone. ENG_BUSY; ENG_CONFLICT as above.
ENG_CHECKED eng_status eng_timeline_cut(eng_timeline *timeline, int64_t position, eng_error *error);
void eng_timeline_changed(eng_timeline *timeline); // counts it
// What goes out again and comes back: a timeline of which the first `read` ids are right. Not while it is busy.
void eng_timeline_rewind(eng_timeline *timeline, int64_t read);
// Their ids, owners and names stay, all else changes places. Neither is busy.
void eng_timeline_swap(eng_timeline *a, eng_timeline *b);
// The newest state from which reading on gives the state. NULL: from nothing.
eng_snapshot *eng_timeline_nearest(const eng_timeline *timeline);
uint64_t eng_timeline_own_bytes(const eng_timeline *timeline); // of its states, shared ones included, and its ids
ENG_CHECKED eng_status eng_timeline_add_ids(eng_timeline *timeline, const int32_t *ids, int64_t count);
ENG_CHECKED eng_status eng_timeline_add_run(eng_timeline *timeline, int64_t end, kern_row_kind kind,
                                            const eng_knobs *knobs);
ENG_CHECKED eng_status eng_timeline_add_snapshot(eng_timeline *timeline, eng_snapshot *snapshot); // takes it if ENG_OK

typedef struct eng_turn {
    eng_timeline *timeline; // NULL: none
    eng_snapshot *from;     // a reference; NULL: from nothing
    eng_prompt *prompt;     // ids from the position `start` on: read again, the tail, the request's own. A reference
    int64_t start;
    int64_t fresh;      // where what is read for the first time begins
    int64_t prompt_end; // where the request's own ids end
    eng_run *run;       // (runs) how the prompt is read
    int32_t runs;
    uint64_t reserved;
    eng_knobs knobs;
    bool returns; // the timeline stays where it was
} eng_turn;

// ENG_NOT_FOUND, ENG_BUSY, ENG_CONFLICT (another position), ENG_FULL, ENG_TOO_LONG. A request without ids and tokens
// restores the state. Ends with eng_turn_end.
ENG_CHECKED eng_status eng_turn_begin(eng_timelines *all, const eng_request *request, eng_turn *out, eng_error *error);
ENG_CHECKED eng_status eng_turn_say(eng_turn *turn, int32_t id); // an id was drawn
// The timeline ends at the position: that of its start, or one of what was read and said since. The session's state
// is kept if it stands there; the session is taken. A turn without a timeline is accepted.
void eng_turn_end(eng_turn *turn, int64_t position, eng_session *session);

#endif
