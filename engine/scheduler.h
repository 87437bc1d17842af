// SPDX-License-Identifier: Apache-2.0
// Which jobs run in a step: the queue, admission, and the share of a step that prompts may take.
//
// On a device that works beside the host a step is composed and started while the one before it runs, so that the
// device never waits for the host: jobs then read on from ids that nobody has seen yet. Those that cannot
// (eng_job_runs_ahead) are in every other step, and where they are the greater part no step runs ahead. No bit of an
// answer depends on it.
//
// Every other generating job gets its token in every step. Prompts are read beside them by at most prompt_chunks chunks
// a step, each by at most row_chunks, or one where Mesa layers solve exactly, in turns, so the gap between two tokens
// of a client is bounded by those chunks plus one step however many and however long the prompts that arrive; when
// nothing generates, a step reads up to ENG_IDLE_FACTOR times as much, of each and of all, of prompts whose logprobs
// are wanted one chunk.
//
// Those that wait are admitted by priority, then in turns over their owners, then in the order of submission; prompts
// are read in turns over their owners as well. An owner's turn is when it was last served, or came: each that is ahead
// goes at most once before it. Prompts that begin alike, those of the
// choices of one request among them, are read once as far as they do (sharing.h); what is left each reads itself, so
// that an answer has the bits it has alone. A job whose turn it is and that must wait for a slot or pages holds up the
// others, so at equal priority nothing starves.
#ifndef ENGINE_SCHEDULER_H
#define ENGINE_SCHEDULER_H

#include "engine/durable.h"
#include "engine/log.h"
#include "engine/prefix_store.h"
#include "engine/request.h"

enum { ENG_IDLE_FACTOR = 4, ENG_CHUNK_ADMISSIONS = 4 };

typedef struct eng_scheduler eng_scheduler;

typedef struct eng_scheduler_options {
    eng_job_rules rules;
    eng_pool *pool;                 // borrowed, as are batch and stream
    eng_timelines *timelines;       // borrowed
    eng_durable *durable;           // borrowed; NULL: there is no store
    eng_prefix *prefix;             // borrowed
    eng_prefix_store *prefix_store; // borrowed; NULL: what is kept is kept here alone
    uint64_t audit;                 // every so many hits one is read again; 0: none
    eng_batch *batch; // rows for every slot of the pool, and ENG_IDLE_FACTOR * prompt_chunks chunks beside them
    kern_stream *stream;
    int32_t chunk;         // C
    int32_t prompt_chunks; // a step beside those that generate
    int32_t row_chunks;    // of one prompt
    bool ahead;            // a step is started before the one under way is finished
    uint64_t queue_requests, queue_tokens;
    eng_logger log;
} eng_scheduler_options;

ENG_CHECKED eng_status eng_scheduler_create(const eng_scheduler_options *options, eng_scheduler **out,
                                            eng_error *error);
void eng_scheduler_free(eng_scheduler *scheduler);

// Before it is freed its timelines must be there.
// The functions below are those of engine.h.
ENG_CHECKED eng_status eng_scheduler_submit(eng_scheduler *scheduler, const eng_request *request, uint64_t *id,
                                            eng_error *error);
void eng_scheduler_cancel(eng_scheduler *scheduler, uint64_t id);
void eng_scheduler_pause(eng_scheduler *scheduler, uint64_t id, bool paused);
ENG_CHECKED eng_status eng_scheduler_step(eng_scheduler *scheduler, eng_event_fn on_event, void *context, bool *worked,
                                          eng_error *error);
void eng_scheduler_gauges(const eng_scheduler *scheduler, eng_gauges *out);

#endif
