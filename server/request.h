// SPDX-License-Identifier: Apache-2.0
// Request bodies: JSON in, a validated struct or a named refusal out.
//
// What a body may hold is a table in request.c, one row a field: name, type, range, default, description, setter; the
// same rows are the document that clients get (request_schema.c). What is not in the table is accepted and ignored;
// null counts as absent; what the table knows but this version does not build is refused by name unless it is neutral.
// Nothing of the JSON library crosses this header.
#ifndef SERVER_REQUEST_H
#define SERVER_REQUEST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/engine.h"
#include "server/buf.h"
#include "server/limits.h"
#include "server/problem.h"

typedef enum srv_request_kind {
    SRV_REQUEST_COMPLETION,
    SRV_REQUEST_CHAT,
    SRV_REQUEST_TOKENIZE,
    SRV_REQUEST_DETOKENIZE,
    SRV_REQUEST_SESSION,
    SRV_REQUEST_FORK,
    SRV_REQUEST_ROLLBACK,
} srv_request_kind;

typedef struct srv_bounds { // the configuration's part in the ranges
    int64_t max_tokens, max_prompt_tokens, max_prompts;
    int64_t max_values; // JSON values in a body
    double min_cg_tolerance;
    int64_t max_cg_steps, max_loops;
    bool allow_exact;
} srv_bounds;

typedef struct srv_prompt {
    char *text; // with a NUL after length bytes, which may hold NULs themselves; NULL: ids
    size_t length;
    int32_t *ids; // not yet compared with a vocabulary
    size_t count;
} srv_prompt;

typedef struct srv_message {
    const char *role; // "system", "user" or "assistant"
    char *content;    // malloc; the texts of its parts with a line end between them
    size_t length;
} srv_message;

// Which optional knobs the body gave.
enum {
    SRV_GIVEN_CG_TOLERANCE = 1,
    SRV_GIVEN_CG_MAX_STEPS = 2,
    SRV_GIVEN_CG_MODE = 4,
    SRV_GIVEN_EXIT_THRESHOLD = 8,
    SRV_GIVEN_MAX_LOOPS = 16,
    SRV_GIVEN_ON_UNCONVERGED = 32,
    SRV_GIVEN_DEGRADE = 64,
};

// How far a request may be loosened when much waits. given: SRV_GIVEN_* of the three.
typedef struct srv_degrade {
    unsigned given;
    float cg_tolerance, exit_threshold;
    int32_t cg_max_steps;
} srv_degrade;

// The knobs of a body, and those that a session has for every one.
typedef struct srv_knobs {
    unsigned given; // SRV_GIVEN_*: those that count
    float cg_tolerance, exit_threshold;
    int32_t cg_max_steps, max_loops;
    eng_cg_mode cg_mode;
    bool fail_unconverged;
    srv_degrade degrade;
} srv_knobs;

typedef struct srv_request {
    char *model; // NULL: the first
    srv_prompt *prompts;
    size_t prompt_count; // at least 1; an absent prompt is one empty text
    bool add_special_tokens;
    srv_message *messages; // a chat has these and one prompt, which is made of them
    size_t message_count;
    bool add_generation_prompt;
    bool with_logprobs;   // of a chat, which has them in two fields
    int32_t top_logprobs; // -1: not given
    int64_t max_tokens;   // -1, of a chat: what the context leaves, up to SRV_CHAT_MAX_TOKENS
    int64_t min_tokens;
    int32_t n, best_of; // best_of >= n
    bool echo;
    float temperature, top_p, min_p;
    int32_t top_k;
    int64_t seed;
    bool seed_given;
    eng_logit_bias *biases;
    size_t bias_count;
    float presence_penalty, frequency_penalty, repetition_penalty;
    int32_t logprobs; // -1: none
    int32_t stop_ids[ENG_MAX_STOP_IDS];
    size_t stop_id_count;
    bool include_stop, ignore_eos;
    eng_text *stops; // with the NUL-terminated bytes of each in new memory
    size_t stop_count;
    bool stream, include_usage, continuous_usage;
    bool return_token_ids, compute_details;
    int32_t priority;
    srv_knobs knobs;
    char *session;            // NULL: none
    int64_t session_position; // -1: any; of a fork: the present one
    bool session_rollback;
    int64_t session_ttl_s; // of one that is made; 0: the default, or the original's
} srv_request;

// Parses a completion's body. On refusal *problem is filled and ENG_INVALID returned (ENG_NO_MEMORY: 429). *request
// needs srv_request_free either way.
ENG_CHECKED eng_status srv_request_parse(const char *body, size_t length, const srv_bounds *bounds,
                                         srv_request *request, srv_problem *problem);
// The same of a chat's.
ENG_CHECKED eng_status srv_chat_parse(const char *body, size_t length, const srv_bounds *bounds, srv_request *request,
                                      srv_problem *problem);
// POST /v1/sessions: what the new session begins with, prompt_count 0 without a prompt, and the knobs of all its
// completions. POST /v1/sessions/{id}/fork and /rollback: session_position, session_ttl_s, and no prompt.
ENG_CHECKED eng_status srv_session_parse(srv_request_kind kind, const char *body, size_t length,
                                         const srv_bounds *bounds, srv_request *request, srv_problem *problem);
void srv_request_free(srv_request *request);
// What the body does not say of the knobs, the session's say.
void srv_knobs_inherit(srv_knobs *knobs, const srv_knobs *of_session);

// POST /tokenize and /detokenize.
typedef struct srv_token_request {
    char *model;
    srv_prompt prompt; // text for tokenize, ids for detokenize
    bool add_special_tokens;
} srv_token_request;
ENG_CHECKED eng_status srv_token_request_parse(srv_request_kind kind, const char *body, size_t length,
                                               const srv_bounds *bounds, srv_token_request *request,
                                               srv_problem *problem);
void srv_token_request_free(srv_token_request *request);

// The kind's fields as one JSON Schema object, within the bounds. request_schema.c.
void srv_request_write_schema(srv_buf *out, srv_request_kind kind, const srv_bounds *bounds);

#endif
