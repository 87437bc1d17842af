// SPDX-License-Identifier: Apache-2.0
// Timelines that outlive the process: names, journal, stored states, leases; the engine's side of a store.
//
// A timeline with a name is followed: whenever it has changed, what is new goes to the store as one *write*, of which
// at most one is under way for each timeline. A write is an *entry* of the journal (how the timeline went on from some
// position: ids and runs, no state) or the whole timeline, with a state or without. The store orders a timeline's
// writes by a number, its "position" there: writes are counted, ids are not, so that going back is a write like
// another.
//
// Why recovery is exact. An entry says: keep the first `begin` ids that were read, then go on so. `begin` is the
// smallest number of read ids that the timeline has come down to since the write before; what stands before it is as
// that write left it, so whole + entries in their order give the timeline as it was when the last entry was made. What
// a client never got (a stop string, a cancellation, a request that returns) is cut from the timeline before an entry
// is made of it, or goes by the next one, which then begins earlier. The last event of a request is told when an entry
// made after its end is in the store: what was acknowledged is there, and what came later follows it or is not there at
// all.
//
// When the outcome of a write is not known, the next one is the whole timeline under the same number, which is right
// whether or not the lost one arrived. So nothing needs to be kept for writes but the timeline itself, however long the
// store is away.
//
// States are put when more ids have been journalled than may be read again in reasonable time, when a timeline has been
// idle for a while, and when it is parked. A timeline that does not fit into a staging buffer is put without a state,
// to be read from nothing.
//
// Everything belongs to the engine's thread. Nothing waits, but eng_durable_free.
#ifndef ENGINE_DURABLE_H
#define ENGINE_DURABLE_H

#include "engine/store.h"
#include "engine/timeline_bytes.h"

typedef struct eng_durable eng_durable;

typedef struct eng_durable_options {
    eng_store *store; // borrowed, as all that is pointed to
    eng_timelines *timelines;
    const eng_pool *pool;
    kern_device *device;
    const eng_state_key *key;
    int32_t vocab;
    int64_t lease_ms;
    void (*wake)(void *context); // eng_options.wake
    void *wake_context;
} eng_durable_options;

extern const char eng_durable_lost_text[]; // what a request is told whose timeline another has

ENG_CHECKED eng_status eng_durable_create(const eng_durable_options *options, eng_durable **out, eng_error *error);
// Gives the leases back and waits for what is under way; after all turns have ended, before the timelines go.
void eng_durable_free(eng_durable *durable); // NULL is accepted

// A durable of NULL is an engine without a store: it has no named timelines, and nothing to do.

ENG_CHECKED eng_status eng_durable_send(eng_durable *durable, const eng_errand *errand, eng_error *error);
// Takes replies, submits what is due, answers errands. ENG_INVALID: called from an answer. *worked is left alone unless
// something was done.
ENG_CHECKED eng_status eng_durable_poll(eng_durable *durable, bool *worked, eng_error *error);
int64_t eng_durable_idle_ms(const eng_durable *durable); // eng_idle_ms

// Whether a request may begin: ENG_CONFLICT: the name was lost to another engine; ENG_IO: the lease is over.
ENG_CHECKED eng_status eng_durable_admit(const eng_durable *durable, const eng_timeline *timeline, eng_error *error);
// A request on it has ended. True: the timeline is busy until eng_durable_settled says more than PENDING.
bool eng_durable_hold(eng_durable *durable, eng_timeline *timeline);

typedef enum eng_settled { ENG_SETTLED_PENDING, ENG_SETTLED_DURABLE, ENG_SETTLED_BEHIND, ENG_SETTLED_LOST } eng_settled;
// What became of a timeline that was held; it is not busy any more unless PENDING.
eng_settled eng_durable_settled(eng_durable *durable, eng_timeline *timeline);
// Not to be waited for any more: the request was cancelled.
void eng_durable_release(eng_timeline *timeline);
bool eng_durable_is_lost(const eng_timeline *timeline); // a request on it has to end
bool eng_durable_has_lost(const eng_durable *durable);  // any that is not gone yet
bool eng_durable_has_all(const eng_timeline *timeline); // named, and in the store as it is
// One idle timeline that the store has leaves the engine to make room, `except` not. False: there is none.
bool eng_durable_evict(eng_durable *durable, const eng_timeline *except);
void eng_durable_gauges(const eng_durable *durable, eng_gauges *out); // its own

#endif
