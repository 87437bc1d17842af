// SPDX-License-Identifier: Apache-2.0
// Private to the completion's files: one completion behind an exchange.
//
// What makes a session is one too: it reads a prompt and generates nothing.
//
// Life: parsed and tokenised on the pool (then only the pool's thread touches it), after that the loop thread's alone.
// Each prompt is one job of the worker. Until the first event arrives nothing was sent, so a fault is still a status;
// after that it is an event of the stream. `ended` is set by whatever gives the one answer.
#ifndef SERVER_COMPLETION_H
#define SERVER_COMPLETION_H

#include "server/session.h"

typedef struct srv_completion srv_completion;

// Of each prompt there are best_of, of which the best n are answered.
typedef struct srv_choice {
    srv_completion *completion;
    size_t index;
    srv_event *last; // not streamed: the one event, with everything
    eng_usage usage; // as of the last event that was handled
    srv_place place; // of what was written
    bool finished;
} srv_choice;

typedef struct srv_prompt_ids {
    int32_t *ids; // malloc
    size_t count;
    bool added_bos; // the first is the tokenizer's BOS, of which the text knows nothing
    char *echo;     // malloc; NULL: none
    size_t echo_length;
} srv_prompt_ids;

struct srv_completion {
    srv_exchange *exchange;
    srv_request_kind kind; // COMPLETION, CHAT; of what makes a session: SESSION, FORK
    srv_request request;
    srv_problem problem;    // of the preparation
    srv_setup *setup;       // under which it began; held until it is admitted, then NULL
    srv_bounds bounds;      // its
    const srv_model *model; // the setup's, and from then on the exchange's
    eng_knobs knobs;
    unsigned ignored; // SRV_GIVEN_*
    bool fail_unconverged, degraded;
    srv_prompt_ids *prompts; // request.prompt_count
    int32_t logprobs;        // that the engine is asked for; -1: none
    srv_choice_form form;
    int64_t prompt_tokens; // of all of them, each once
    bool wants_bos;        // where a session has nothing before the prompt

    srv_session *session;      // taken; NULL: none, or let go
    int64_t reached;           // its position, by what the client has got
    bool durable;              // that is in the store
    unsigned sought;           // so often it was looked for in the store
    struct srv_making *making; // the call that makes it; NULL: none is under way
    srv_reach *reach;          // that brings it here; NULL: none is under way

    srv_head head;
    srv_job **jobs;      // (request.prompt_count)
    srv_choice *choices; // best_of of each prompt
    size_t choice_count, finished;
    bool ended;
    // Not streamed; the pool's while the answer is being written.
    srv_usage usage;
    srv_buf answer;

    // Streams.
    srv_event *first, *tail; // arrived, not yet written
    srv_problem failure;     // closes the stream
    srv_buf scratch;         // formatted, sent up to sent
    size_t sent;
    bool seed_told, closed, ping_due, active;
    srv_timer *ping;
};

// completion_prepare.c: pool thread.
void srv_completion_prepare(void *completion);
// The checkpoint's defaults, kept inside the server's bounds, then what the request gives; or a problem.
void srv_completion_settle(srv_completion *completion);
// Loosens the knobs as far as the request permits; loop thread, before its jobs are made.
void srv_completion_degrade(srv_completion *completion);

// completion_answer.c
srv_session_usage srv_completion_session(const srv_completion *completion);
void srv_completion_usage(const srv_completion *completion, srv_usage *usage);
void srv_completion_answer(srv_completion *completion); // every choice has finished, and nothing was sent
// What a piece has in common with the others of its choice.
srv_choice_piece srv_completion_piece(srv_choice *choice, const srv_event *event);
// Whether the answer tells the prompts' logprobs, which the first choice of each has.
bool srv_completion_tells_prompts(const srv_completion *completion);
// The first choice of the same prompt.
srv_choice *srv_completion_first(const srv_choice *choice);

// completions.c
void srv_completion_fail(srv_completion *completion, const srv_problem *problem); // its answer, unless it has one
void srv_completion_start(srv_completion *completion); // submits what is prepared; or its problem is the answer
void srv_completion_use(srv_completion *completion, const srv_model *model);
void srv_completion_note(srv_completion *completion); // figures for the log
void srv_completion_cancel_jobs(srv_completion *completion);

// session_make.c
bool srv_completion_makes(const srv_completion *completion);
void srv_session_make(srv_completion *completion);    // begins once its body is prepared
void srv_session_unmake(srv_completion *completion);  // its client has left meanwhile
void srv_session_present(srv_completion *completion); // the answer: it is made

// stream.c
void srv_stream_start_ping(srv_completion *completion);
void srv_stream_add(srv_completion *completion, srv_event *event); // takes event
void srv_stream_fail(srv_completion *completion, const srv_problem *problem);
ssize_t srv_stream_read(void *completion, char *out, size_t room, bool *end);
void srv_stream_clear(srv_completion *completion);

#endif
