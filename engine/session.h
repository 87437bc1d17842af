// SPDX-License-Identifier: Apache-2.0
// One timeline and the pools its state lives in.
//
// The pool holds every state slot and KV page in two device allocations made at start; a session borrows one slot and,
// with full-attention layers, pages (64 tokens of all layers) as it grows. Pages are reference-counted; a session
// counts its worst case at admission, so that it never starves in the middle. It owns no device memory of its own.
#ifndef ENGINE_SESSION_H
#define ENGINE_SESSION_H

#include "engine/model.h"
#include "kernels/kernels.h"

typedef struct eng_pool eng_pool;
typedef struct eng_session eng_session;

// Tokens of a looped model whose outputs were read before the last loop wait in their session's slot, behind the state,
// for the next one (loop.h). What is known here of that: exactly what steps that were looked at have left, and how many
// tokens more may have been added by those that were not.
typedef struct eng_pending {
    int32_t count[ENG_MAX_LOOPS]; // by the loop that they wait for, from 0
    int32_t unknown;              // tokens of steps under way, each of which may wait for any loop
    int32_t total;                // all of them, at most ENG_PENDING_TOKENS
    bool fresh;                   // the slot does not know of its session yet
    uint64_t life;                // changes when all goes through: what a step under way leaves is not theirs
    kern_solver solver;           // of all of them
} eng_pending;

// Takes the session's pending tokens through the loops that they wait for.
typedef eng_status (*eng_settle_fn)(void *context, const eng_session *session, eng_error *error);

ENG_CHECKED eng_status eng_pool_create(const eng_model *model, kern_device *device, int32_t slots, int32_t pages,
                                       eng_pool **out, eng_error *error);
void eng_pool_free(eng_pool *pool);
void *eng_pool_states(const eng_pool *pool);
void *eng_pool_pages(const eng_pool *pool);
void *eng_pool_slot(const eng_pool *pool, int32_t slot); // their device addresses
void *eng_pool_page(const eng_pool *pool, int32_t page);
kern_storage eng_pool_storage(const eng_pool *pool); // of the matrices in a slot
size_t eng_pool_slot_stride(const eng_pool *pool);   // bytes of a state
size_t eng_pool_slot_pitch(const eng_pool *pool);    // from a slot to the next, with what waits for loops
size_t eng_pool_page_stride(const eng_pool *pool);
int32_t eng_pool_slots(const eng_pool *pool, int32_t *used);
int32_t eng_pool_page_count(const eng_pool *pool, int32_t *used); // a page is in use from the moment it is promised
int64_t eng_pool_pages_for(const eng_pool *pool, int64_t length); // that many tokens; 0 without full attention
// ENG_TOO_LONG, naming the bytes, when a session of max_length tokens could never be opened.
ENG_CHECKED eng_status eng_pool_check_length(const eng_pool *pool, int64_t max_length, eng_error *error);

// The settler is there until NULL replaces it.
void eng_pool_set_settler(eng_pool *pool, eng_settle_fn settle, void *context);
eng_pending *eng_pool_pending(const eng_pool *pool, int32_t slot); // NULL: the model reads its last loop alone

// One timeline: the state in `slot` has read `read` ids; the tail (normally the last generated id) is not read yet. The
// timeline's position is read + tail_count.
struct eng_session {
    eng_pool *pool;
    int32_t slot;
    int64_t read;
    int32_t tail[1];
    int32_t tail_count; // 0 or 1
    int32_t *page;      // (page_capacity) KV pages in use
    int32_t pages, page_capacity;
};

// Takes a zeroed slot and reserves pages for max_length tokens. ENG_FULL: not now. Writes nothing on failure.
ENG_CHECKED eng_status eng_session_open(eng_pool *pool, kern_stream *stream, int64_t max_length, eng_session *out,
                                        eng_error *error);
// A second session that has read what `from` has read, and continues on its own: a slot with a copy of the state, full
// pages shared, the page under way copied. Takes and reserves like eng_session_open.
ENG_CHECKED eng_status eng_session_fork(const eng_session *from, kern_stream *stream, int64_t max_length,
                                        eng_session *out, eng_error *error);
bool eng_session_waits(const eng_session *session); // it has pending tokens; a session never opened has none
// Nothing is pending afterwards: its state is that of all it has read. Before the state is copied; a fork does it.
ENG_CHECKED eng_status eng_session_settle(const eng_session *session, eng_error *error);
// Takes the pages of the first `length` tokens out of those reserved; ENG_TOO_LONG beyond them. eng_batch_add calls it.
ENG_CHECKED eng_status eng_session_grow(eng_session *session, kern_stream *stream, int64_t length, eng_error *error);
// It will not grow any more: pages that were reserved and not taken go back.
void eng_session_rest(eng_session *session);
void eng_session_close(eng_session *session); // slot and pages go back; a session never opened (pool NULL) is accepted

#endif
