// SPDX-License-Identifier: Apache-2.0
// Answers as JSON and as server-sent events: everything the server says is written here.
//
// Each function appends to a bounded buffer and reports through its failed mark (buf.h). Streams use exactly
// "data: " JSON, blank line; no id, no retry lines, because clients stumble over them.
#ifndef SERVER_RESPONSE_H
#define SERVER_RESPONSE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/engine.h"
#include "server/buf.h"
#include "server/problem.h"
#include "server/token_list.h"

// What is the same in every part of one answer.
typedef struct srv_head {
    char id[40];
    const char *object; // "text_completion"
    int64_t created;    // Unix seconds
    const char *model;
    int64_t seed;
    srv_buf json; // all but the seed, written once
} srv_head;
// After its other members are set; head->json fails for want of memory. srv_buf_free.
void srv_head_settle(srv_head *head);

// What a choice's text is a member of: itself, a chat's message, or a piece of that in a stream.
typedef enum srv_shape { SRV_SHAPE_TEXT, SRV_SHAPE_MESSAGE, SRV_SHAPE_DELTA } srv_shape;

// How the choices of one answer are written.
typedef struct srv_choice_form {
    const eng_engine *engine;
    srv_shape shape;
    int32_t logprobs; // -1: null
    bool token_ids, compute, has_mesa, has_loops;
} srv_choice_form;

// How much of a choice was written, so that its next piece goes on from there. All zero at first.
typedef struct srv_place {
    uint64_t delivered;  // characters of the text
    uint64_t echoed;     // of these, the prompt's
    uint64_t characters; // that the bytes of its tokens have begun
    unsigned missing;    // bytes of the last one still to come
    unsigned char low, high;
    size_t prompt_told; // tokens
    bool begun, drawing;
} srv_place;

// A choice, or a stream's next piece of one.
typedef struct srv_choice_piece {
    size_t index;
    srv_place *place;
    // Written with the first piece only.
    const char *echo;
    size_t echo_length;
    const int32_t *prompt_ids;
    size_t prompt_id_count;
    bool added_bos; // the prompt's first token stands for no text
    // Of this piece.
    const char *text;
    size_t length;
    eng_finish finish; // NONE: null
    const srv_token_list *prompt, *drawn;
} srv_choice_piece;
void srv_write_choice(srv_buf *out, const srv_choice_form *form, const srv_choice_piece *piece); // response_choice.c

// A session as its client sees it. info: NULL: not asked for.
typedef struct srv_session_view {
    const char *id, *model;
    int64_t position, expires_at;
    uint64_t state_bytes;
    const eng_timeline_info *info;
    bool in_store;               // without info: that is where it is
    const unsigned char *digest; // ENG_TIMELINE_DIGEST_BYTES; NULL: none
} srv_session_view;
void srv_write_session(srv_buf *out, const srv_session_view *session);

// What a request did to its session.
typedef struct srv_session_usage {
    const char *id; // NULL: there is none
    int64_t position;
    bool durable; // it is in the store up to there
    bool profile_changed;
} srv_session_usage;

typedef struct srv_usage {
    int64_t prompt_tokens, completion_tokens, cached_tokens;
    eng_compute prompt, completion;
    bool has_mesa;
    int32_t loops;                 // 0: outputs of loops are not read
    uint64_t exits[ENG_MAX_LOOPS]; // completion tokens by the loop at which they were read
    unsigned ignored;              // SRV_GIVEN_* knobs that this model has no mechanism for
    bool degraded;                 // as the request permits
    srv_session_usage session;
} srv_usage;

void srv_write_error(srv_buf *out, const srv_problem *problem);
// A whole answer: the opening, the choices with commas between them, the closing.
void srv_write_opening(srv_buf *out, const srv_head *head);
void srv_write_closing(srv_buf *out, const srv_usage *usage);

// One event with one choice. with_seed: the stream's first. usage_null: the client asked for usage, which comes later.
typedef struct srv_chunk {
    const srv_choice_form *form;
    srv_choice_piece piece;
    bool with_seed, usage_null;
    const srv_usage *usage; // NULL: none; wins over usage_null
    srv_session_usage session;
} srv_chunk;
void srv_write_chunk(srv_buf *out, const srv_head *head, const srv_chunk *chunk);
void srv_write_usage_chunk(srv_buf *out, const srv_head *head, const srv_usage *usage);
void srv_write_error_event(srv_buf *out, const srv_problem *problem);
void srv_write_done(srv_buf *out);
void srv_write_ping(srv_buf *out);

// state: "loading", "ready" or "failed". info: NULL until it is ready.
typedef struct srv_model_view {
    const char *name, *state;
    int64_t created;
    const eng_model_info *info;
    int64_t max_cg_steps, max_loops; // the configuration's bounds
    double min_cg_tolerance;
    bool allow_exact;
} srv_model_view;
void srv_write_model(srv_buf *out, const srv_model_view *model);
void srv_write_models(srv_buf *out, const srv_model_view *models, size_t count);
// state: "ok", "loading" or "draining". store: "ok", "failing"; NULL: there is none.
void srv_write_health(srv_buf *out, const char *state, const char *store, const srv_model_view *models, size_t count);

void srv_write_tokens(srv_buf *out, const int32_t *ids, size_t count, int64_t context_length);
void srv_write_tokenizer(srv_buf *out, const eng_engine *engine);
void srv_write_text(srv_buf *out, const char *text, size_t length);

#endif
