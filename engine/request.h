// SPDX-License-Identifier: Apache-2.0
// A request inside the engine, a *job*: its prompt, its session, the ids it drew, its text and its usage.
//
// A job knows how to take the result of a piece and to say what may be told about it; when it runs is the scheduler's
// affair. Ids that were drawn wait here until their text is settled, so that an event's ids and text belong together.
// Everything belongs to the engine's thread.
#ifndef ENGINE_REQUEST_H
#define ENGINE_REQUEST_H

#include "engine/batch.h"
#include "engine/edits.h"
#include "engine/engine.h"
#include "engine/prefix.h"
#include "engine/session.h"
#include "engine/text.h"
#include "engine/timeline.h"
#include "engine/token_list.h"
#include "engine/tokenizer.h"

typedef struct eng_owner eng_owner;
typedef struct eng_lookup eng_lookup; // prefix_store.h

typedef enum eng_phase {
    ENG_PHASE_WAITING,    // in the queue, no session
    ENG_PHASE_READING,    // part of the prompt is not read yet, as far as results have come
    ENG_PHASE_GENERATING, // it has drawn
    ENG_PHASE_ENDED,      // no session; finish and error say why
} eng_phase;

// Ids that several jobs read.
struct eng_prompt {
    int64_t references, count;
    int32_t ids[];
};

// What a job begins from, and what it leaves for others (sharing.h).
typedef struct eng_share {
    eng_chain root, chain;  // of what it reads canonically: where that begins, how far it has been followed
    struct eng_job *leader; // the one that it follows while it waits; NULL: nobody
    int64_t place;          // the boundary where it meets its leader
    int32_t followers;      // jobs whose leader it is
    eng_boundary *start;    // while it waits, the best that is known to begin from. A reference; NULL: nothing
    int64_t known;          // so far others went the same way
    int64_t kept, spacing;  // the last state on its way, and how far behind that the next may be
    int64_t passed;         // the last position looked after
    eng_boundary *left;     // a reference, until the results of what was read up to there have come; NULL: none
    eng_chain left_chain;   // there
    eng_scores *scores;     // a reference; NULL: not wanted, or no room
    bool unconverged;       // a solve of the prompt hit its bound
    eng_lookup *lookup;     // while it waits, a question to a store. A reference; NULL: none
} eng_share;

// The turn of a job that has ended.
typedef struct eng_turn_past {
    eng_timeline *timeline; // NULL: none
    int64_t began;          // the timeline's position before
    int64_t prompt_end;
    bool returns;
} eng_turn_past;

typedef struct eng_job {
    struct eng_job *previous, *next; // the list it is in
    uint64_t id;
    void *user;
    eng_phase phase;
    bool paused;
    int32_t choice;
    eng_share share;
    eng_prompt *prompt;   // until it is read
    int64_t prompt_count; // position behind its last id
    int64_t max_tokens;
    eng_turn turn;         // on a timeline, until it ends
    eng_turn_past past;    // then
    bool durable;          // event.durable
    int64_t prompt_begin;  // position of its first id in prompt
    int32_t run;           // of the turn, in which it reads
    int64_t position;      // event.position
    int64_t queued_tokens; // what it counts in the queue
    eng_sampling sampling;
    eng_knobs knobs;
    int32_t *ending; // (ending_count) ids that end the text: end-of-text and stop ids
    int32_t ending_count;
    int64_t min_tokens; // before this many, they are banned
    bool include_stop, prompt_logprobs, token_compute, fail_unconverged;
    int32_t priority;
    eng_owner *owner; // the scheduler's
    bool has_owner_name;
    unsigned char owner_name[ENG_NAME_BYTES];
    uint64_t examined; // the last step in which the scheduler asked whether it reads
    int underway;      // steps whose results it waits for
    int32_t index;     // of its piece in the step started last, while it waits for it
    eng_edits edits;
    eng_session session;
    eng_text_out *text;   // NULL: the model has no tokenizer
    int32_t logprobs;     // -1: none
    eng_token_list read;  // the prompt's tokens that no event has told yet
    eng_token_list drawn; // and those of the completion
    size_t told;          // of the drawn tokens, by events
    eng_usage usage;
    eng_finish finish;
    eng_error error; // with ENG_FINISH_ERROR
} eng_job;

// What a request is checked against and a result is read with.
typedef struct eng_job_rules {
    const eng_model *model;
    const eng_tokenizer *tokenizer; // NULL: none
    int64_t context_length;         // -1: unbounded
} eng_job_rules;

// What engine.h says of the request, as far as it depends on the model alone.
ENG_CHECKED eng_status eng_request_check(const eng_job_rules *rules, const eng_request *request, eng_error *error);
// Copies what the request, which has been checked, borrows. prompt: a reference is taken. *out: eng_job_free.
ENG_CHECKED eng_status eng_job_create(const eng_job_rules *rules, const eng_request *request, eng_prompt *prompt,
                                      uint64_t id, int32_t choice, eng_job **out, eng_error *error);
// It is a turn on a timeline, whose prompt it was created with. Takes the turn.
void eng_job_take_turn(eng_job *job, eng_turn *turn);
// A copy with one reference; NULL: no memory.
eng_prompt *eng_prompt_create(const int32_t *ids, size_t count);
void eng_prompt_release(eng_prompt *prompt); // NULL is accepted
void eng_job_free(eng_job *job);             // NULL is accepted; closes its session
// The most ids that a session for such a request can come to read.
int64_t eng_request_length(int64_t prompt_count, int64_t max_tokens);
int64_t eng_job_length(const eng_job *job);

// How many ids from position 0 on it reads canonically, one chunk after the other with the same knobs.
int64_t eng_job_canonical(const eng_job *job);
// Where the request's own ids begin, behind those of its timeline.
int64_t eng_job_own_begin(const eng_job *job);
// Its session begins at the boundary, which serves it: takes over what would have been told before. False: no memory.
bool eng_job_resume(eng_job *job, const eng_boundary *boundary);

// Whether its next piece is a generated token: the prompt is read, or is being read.
bool eng_job_generates(const eng_job *job);
// The run of ids that it reads now, NULL: all of its prompt is one.
const eng_run *eng_job_run(const eng_job *job);
// Whether every next piece waits for the result of the one before.
bool eng_job_follows(const eng_job *job);
// Whether the next piece is known although a result is awaited: it may not depend on an id that nobody has seen but by
// reading it, as penalties do, nor on what ends for certain. What ends by surprise has read on for nothing.
bool eng_job_runs_ahead(const eng_job *job);
// What the job reads next as a piece of `count` ids, borrowed from the job until the step is started.
eng_piece eng_job_piece(eng_job *job, int32_t count);
// The piece is in a step that was started, as number `index`.
void eng_job_started(eng_job *job, int32_t index);
// Takes the result of its piece in the step that was finished, number `index`: adds to the usage, takes the drawn id
// over, ends the job where it must. An ended job's session is closed, and what is still under way for it is dropped.
void eng_job_accept(const eng_job_rules *rules, eng_job *job, const eng_batch *batch, int32_t index);
// What may be told now; false: nothing. Borrowed until eng_job_told, which drops the tokens (the text is dropped by
// taking it).
bool eng_job_event(eng_job *job, eng_event *out);
void eng_job_told(eng_job *job, const eng_event *event);
// Ends it with an error, also when it had ended well and nobody was told.
void eng_job_fail(eng_job *job, eng_status status, const char *text);
// Ends it without a word.
void eng_job_cancel(eng_job *job);

#endif
