// SPDX-License-Identifier: Apache-2.0
// What the parts of durable.h share: a named timeline, an errand under way, requests to the store and their replies.
//
// durable.c owns the table of names and the clock, durable_write.c decides and makes writes, durable_errand.c runs
// errands, durable_recover.c makes a timeline of what the store has.
#ifndef ENGINE_DURABLE_INTERNAL_H
#define ENGINE_DURABLE_INTERNAL_H

#include "engine/durable.h"

enum {
    ENG_DURABLE_LEASE_MS = 15000,
    ENG_DURABLE_JOURNAL_IDS = 4096, // that are read again at most, beside those of the last request
    ENG_DURABLE_WORTH_IDS = 64,     // that make a state worth its bytes
    ENG_DURABLE_IDLE_MS = 10000,    // after which a state is put; and after which it is tried again
    ENG_DURABLE_WAIT_MS = 2000,     // that a request's last event waits for the store
    ENG_DURABLE_RETRY_MS = 500,
    ENG_DURABLE_TICK_MS = 100, // between two looks at all names
    ENG_DURABLE_SOON_MS = 5,   // where one found no room
    ENG_DURABLE_AGAIN_MS = 20, // between two tries for a lease that another was asked to give back
    ENG_DURABLE_WISH_MS = 100, // between two questions whether others wish for names that are here
    ENG_DURABLE_TASKS = 64,
    ENG_DURABLE_BUCKETS = 4096,
};

typedef struct eng_waiter eng_waiter;
typedef void (*eng_reply_fn)(eng_durable *durable, eng_waiter *waiter, eng_store_reply *reply);

// Who waits for a reply: a request's `user`. NULL: nobody does.
struct eng_waiter {
    eng_reply_fn take;
    void *of;
    bool waiting;
};

// A record's note.
typedef struct eng_stored_note {
    int64_t position, ttl_ms, spare;
    unsigned char note[ENG_NOTE_BYTES]; // the program's
} eng_stored_note;

_Static_assert(sizeof(eng_stored_note) == ENG_STORE_NOTE_BYTES, "a note is full");
_Static_assert(ENG_NAME_BYTES == (int)ENG_STORE_ID_BYTES && ENG_NAME_BYTES == (int)ENG_STORE_OWNER_BYTES, "names");

// What the store has of a timeline after a write.
typedef struct eng_written {
    uint64_t number;  // of the write
    uint64_t changes; // the timeline's
    int64_t first;    // where its ids begin
    int64_t state;    // ids that the state has read which is to be found there; without one, `first`
    uint64_t bytes;   // of the journal
} eng_written;

typedef struct eng_named {
    struct eng_named *previous, *next, *next_of_bucket;
    eng_timeline *timeline; // NULL: it has left; freed with the last reply
    eng_name name;
    unsigned char note[ENG_NOTE_BYTES];
    int64_t ttl_ms;
    eng_record record; // as the store told last
    bool kept;         // not while it gets its name
    bool lost;         // another has the lease
    bool errand;       // one is at work on it; its timeline is busy
    int64_t used;      // when it changed or was asked for last
    // The lease, by eng_store_clock.
    uint64_t epoch;
    int64_t until; // its end, at the earliest
    int64_t renew_at, asked;
    eng_waiter renewal;
    // Writes.
    eng_waiter writing;
    eng_written has, making;    // making: by the write under way
    int64_t low;                // the timeline's, before the write under way
    bool whole;                 // the next write has to be
    bool too_large;             // its states do not fit into a buffer
    int64_t retry_at, state_at; // no write, no state before
    uint64_t failures;
    eng_status failure; // of the last write that failed
    // A request that waits for its write.
    uint64_t held; // the timeline's changes that have to be there; 0: none waits
    uint64_t held_failures;
    int64_t held_until;
    // Another engine wishes for it, until then; 0: none does.
    int64_t wished_until;
    uint64_t wished_failures; // as they were when it was told
    bool wished_put;          // a state was tried for it
} eng_named;

typedef struct eng_task eng_task; // an errand under way

struct eng_durable {
    eng_durable_options options;
    eng_store_client *client;
    void *memory; // of the staging buffers; NULL: the client's own
    uint64_t buffer_bytes;
    unsigned char holder[ENG_STORE_HOLDER_BYTES];
    eng_named *first, *bucket[ENG_DURABLE_BUCKETS]; // those whose timelines are here
    uint64_t names, lost, behind;                   // behind: when they were looked at last
    uint64_t parked, states, failures;              // so far
    uint64_t underway;                              // requests to the store
    bool failing;                                   // the last write did not reach it
    char fault[256];                                // why the last one failed
    bool starved; // something found no room since the last look; there is some when replies come
    bool polling;
    eng_waiter wishes;
    int64_t wishes_at; // when they are asked for next
    int64_t wait_ms;   // that a request's last event waits
    int64_t tick_at;   // next look at all names
    int64_t due;       // by what is known, the next time at which one of them has something to do
    uint64_t seen;     // changes of timelines, at the last look
    eng_task *tasks, **last_task;
    int32_t task_count;
};

// ---- durable.c

// A request about the name, without more.
eng_store_request eng_durable_about(const eng_name *name, eng_store_op op);
void eng_durable_due(eng_durable *durable, int64_t at); // something is to be done then
// Submits; waiter NULL: nobody waits. ENG_FULL: again after the next poll.
ENG_CHECKED eng_status eng_durable_ask(eng_durable *durable, eng_store_request *request, eng_waiter *waiter,
                                       eng_error *error);
eng_named *eng_durable_find(const eng_durable *durable, const eng_name *name);                  // NULL: it is not here
eng_named *eng_durable_add(eng_durable *durable, const eng_name *name, eng_timeline *timeline); // NULL: no memory
// The timeline has no name any more, or is gone as well.
void eng_durable_detach(eng_durable *durable, eng_named *named);
void eng_durable_remove(eng_durable *durable, eng_named *named);
void eng_durable_lose(eng_durable *durable, eng_named *named);
void eng_named_free_if_done(eng_named *named);
// If another wishes for it and no request is on it: a state is put, then it leaves. It may be gone afterwards.
void eng_named_hand_over(eng_durable *durable, eng_named *named);
// So long before a lease's end nothing is begun that only its holder may do; and so long another's is waited for.
int64_t eng_durable_margin(const eng_durable *durable);

// ---- durable_write.c

bool eng_named_is_behind(const eng_named *named);
bool eng_named_wants_state(const eng_named *named);
// Makes the write that is due, if any is and none is under way; state: also one that only brings a state.
void eng_named_write(eng_durable *durable, eng_named *named, bool state);
void eng_named_renew(eng_durable *durable, eng_named *named);
void eng_named_take_lease(eng_durable *durable, eng_named *named, uint64_t epoch, int64_t asked);
void eng_named_take_write(eng_durable *durable, eng_waiter *waiter, eng_store_reply *reply);
void eng_named_take_renewal(eng_durable *durable, eng_waiter *waiter, eng_store_reply *reply);

// ---- durable_recover.c

void eng_durable_read_meta(const eng_durable *durable, const eng_store_meta *meta, eng_record *out);
// What a GET brought becomes a timeline with the name. ENG_FULL as long as nothing more can make room.
ENG_CHECKED eng_status eng_durable_recover(eng_durable *durable, const eng_name *name, uint64_t owner,
                                           const eng_store_reply *reply, eng_named **out, eng_error *error);

// ---- durable_errand.c

void eng_durable_work(eng_durable *durable, bool *worked); // errands go on where they can, and are answered
int64_t eng_durable_work_at(const eng_durable *durable);   // when an errand goes on without a reply; INT64_MAX: none
// Nobody is told any more. The memory goes when nothing is under way.
void eng_durable_abandon_tasks(eng_durable *durable);
void eng_durable_free_tasks(eng_durable *durable);

#endif
