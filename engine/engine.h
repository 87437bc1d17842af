// SPDX-License-Identifier: Apache-2.0
// The door of the engine for servers and embedders.
//
// An *engine* is one loaded model on one device: weights, tokenizer, a pool of constant-size states, a queue of
// requests. A *request* is one timeline: prompt ids are read into a state, tokens are drawn from it. The engine runs
// every request it holds together: eng_step() advances the whole batch by one step (one token a generating request,
// and a share of the prompts) and reports what happened through a callback.
//
// A *timeline* (a session, to clients) outlives its requests: each goes on where the one before it ended. It can be
// forked, cut back, taken out as bytes and brought in again. A *store* keeps timelines beyond the engine's life.
//
// Threads: eng_submit, eng_cancel, eng_pause, eng_step, eng_send, eng_idle_ms, eng_gauges and eng_timeline_* belong to
// one thread, the caller's engine thread. eng_info, eng_encode, eng_decode and eng_token_* only read immutable data and
// may be called from any thread; eng_store_* say whose they are. The engine starts no thread but its device's compute
// team, prints nothing and never exits.
#ifndef ENGINE_ENGINE_H
#define ENGINE_ENGINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct eng_engine eng_engine;
typedef struct eng_store eng_store;

typedef enum eng_log_level { ENG_LOG_DEBUG, ENG_LOG_INFO, ENG_LOG_WARNING, ENG_LOG_ERROR } eng_log_level;
typedef void (*eng_log_fn)(void *context, eng_log_level level, const char *text);

typedef enum eng_cg_mode {
    ENG_CG_TOLERANCE, // stop each head by the relative residual
    ENG_CG_STEPS,     // exactly cg_max_steps
    ENG_CG_EXACT,     // Cholesky
    ENG_CG_FIXED,     // zero start, damped divisions: reproduces public training code; tests only, never by request
} eng_cg_mode;

enum { ENG_MAX_LOOPS = 32 };

// Compute knobs of a request (api.md, Knobs).
typedef struct eng_knobs {
    eng_cg_mode cg_mode;
    float cg_tolerance;   // 0..1
    int32_t cg_max_steps; // 0..256
    float exit_threshold; // 0..1; looped models
    int32_t max_loops;    // 1..loops; looped models
} eng_knobs;

// How matrix states lie in memory. Stored in half the bytes they are rounded after each token, at random and right in
// the mean; everything else of a state stays float32.
typedef enum eng_state_storage { ENG_STATE_FLOAT32, ENG_STATE_BF16 } eng_state_storage;

typedef struct eng_options {
    const char *model_dir;           // Hugging Face folder
    const char *device;              // "cpu", "cuda:N" or "auto"; NULL: "auto"
    bool fast;                       // a GPU may round activations to bfloat16 in products; no matter to a CPU
    int32_t max_rows;                // requests that run together; 0: the device's default (32 CPU, 256 CUDA)
    eng_state_storage state_storage; // BF16: on a GPU alone
    uint64_t state_budget;           // bytes for states and KV pages; 0: room for max_rows states and 2^16 KV tokens.
                                     // A looped model's tokens that wait for loops are part of a state here
    uint64_t memory_limit;   // of a device that does not tell what is free (a CPU): more is refused before any is taken
    uint64_t session_budget; // bytes for timelines that are kept: ids, states, KV pages; 0: 2^30
    int64_t session_history; // ids that are kept of a timeline; 0: 2^20
    uint64_t prefix_budget;  // bytes for states that prompts which begin alike start from; 0: none are kept
    int32_t snapshot_tokens; // between those along a prompt, at least; 0: 1024
    uint64_t prefix_audit;   // every so many starts one state is read again and compared; 0, or with fast: none
    int32_t prompt_tokens;   // of prompts a step beside generated tokens, in whole chunks; 0: what suits the device
    uint64_t queue_requests; // requests that may wait; 0: 256
    uint64_t queue_tokens;   // prompt ids that may wait in all; 0: 2^20
    bool need_tokenizer;     // fail without tokenizer.json; otherwise eng_encode and eng_decode are refused
    eng_store *store;        // borrowed for the engine's life; NULL: none
    int64_t store_prefixes;  // ids that a prefix state must have read to go to the store as well; 0: none goes
    int64_t lease_ms;        // of a named timeline, renewed after a third; 0: 15000
    // Called on the store's thread, once or more, when a step has something to do though nothing runs; never again once
    // eng_close has returned. It must not wait and call nothing of engine or store. NULL: the caller steps without
    // being asked.
    void (*wake)(void *context);
    void *wake_context;
    eng_log_fn log; // may be NULL
    void *log_context;
} eng_options;

// SHA-256 in hexadecimal digits. states: of config.json, the weights and tokenizer.json, which states depend on; whole:
// of these and of the other files that eng_open reads.
enum { ENG_FINGERPRINT_BYTES = 65 };
typedef struct eng_fingerprint {
    char states[ENG_FINGERPRINT_BYTES], whole[ENG_FINGERPRINT_BYTES];
} eng_fingerprint;

// What the model is; owned by the engine, constant for its life.
typedef struct eng_model_info {
    const char *model_type;      // config.json's model_type
    const char *mixers;          // comma list of the distinct mixers in layer order, "mesa_net,attention"
    const char *device;          // "cpu (avx512, 2 threads)" and the like
    const char *numeric_profile; // equal text, equal bits; the states' storage is part of it
    uint64_t parameters;
    int32_t layers, loops, vocab_size, hidden_size;
    uint64_t state_bytes;        // one session's recurrent state
    uint64_t kv_bytes_per_token; // full-attention layers; 0: purely recurrent
    int64_t context_length;      // -1: unbounded
    int64_t trained_length;      // -1: unknown
    int32_t bos_id;              // -1: the tokenizer adds none
    int32_t eos_id;              // the first of the end-of-text ids; -1: none
    const char *chat_template;   // its text; NULL: none
    bool has_tokenizer, has_mesa;
    bool fast;                     // as opened
    uint64_t prefix_audit;         // as opened; 0 with fast
    bool has_loops, has_exit_gate; // max_loops, exit_threshold choose the loop at which a token's output is read
    int32_t max_rows, chunk;       // rows a step; tokens of a chunk
    int32_t prompt_tokens;         // of prompts a step beside generated tokens
    int32_t prompt_row_tokens;     // of these, of one prompt
    eng_knobs default_knobs;
    uint64_t weight_bytes, pool_bytes;
    eng_fingerprint fingerprint; // of the folder as it was opened
} eng_model_info;

// Opens the folder, loads the weights, allocates every byte that serving needs. On failure *out stays as it was and
// *error names the file and the fault. The caller owns *out and closes it with eng_close (NULL is accepted).
// Whether a name is one that options.device may have, whatever is there; else ENG_INVALID.
ENG_EXPORT ENG_CHECKED eng_status eng_check_device(const char *name, eng_error *error);
ENG_EXPORT ENG_CHECKED eng_status eng_open(const eng_options *options, eng_engine **out, eng_error *error);
// With a store: gives the leases of named timelines back and waits for what is under way to the store, whose thread
// must be running or have returned. What was not in the store yet is lost: ENG_ERRAND_PARK before.
ENG_EXPORT void eng_close(eng_engine *engine);
ENG_EXPORT const eng_model_info *eng_info(const eng_engine *engine);
// Of the folder as it is now; reads all of it. *error names the file that is missing or wrong. Any thread.
ENG_EXPORT ENG_CHECKED eng_status eng_read_fingerprint(const char *model_dir, eng_fingerprint *out, eng_error *error);

// Text to ids, linear in the length. text need not end in NUL; bytes that are not UTF-8 are refused (ENG_INVALID).
// add_special puts the tokenizer's BOS in front where it has one. *ids is new memory of *count ids: eng_free.
// Special tokens written in the text become their ids.
ENG_EXPORT ENG_CHECKED eng_status eng_encode(const eng_engine *engine, const char *text, size_t length,
                                             bool add_special, int32_t **ids, size_t *count, eng_error *error);

typedef struct eng_text {
    const char *bytes;
    size_t length;
} eng_text;

typedef struct eng_chat_message {
    eng_text role; // "system", "user" or "assistant"; as trusted as the template
    eng_text content;
} eng_chat_message;

typedef struct eng_chat {
    const eng_chat_message *messages;
    size_t count;
    bool add_generation_prompt; // the answer begins behind the text
    int64_t time;               // seconds since 1970, for templates that tell the date
} eng_chat;

// Messages to the ids of a prompt, by the checkpoint's chat template. What is written in a message never becomes a
// special token, only what the template itself writes does; no other BOS is put in front. ENG_UNSUPPORTED: the
// checkpoint has no template, or one that cannot be run here (the text says why); ENG_INVALID: the template refuses the
// messages in its own words. *ids is new memory of *count ids: eng_free.
ENG_EXPORT ENG_CHECKED eng_status eng_encode_chat(const eng_engine *engine, const eng_chat *chat, int32_t **ids,
                                                  size_t *count, eng_error *error);
// Ids to text; invalid sequences become U+FFFD, special tokens are written out if keep_special. *text is new memory
// with a NUL after *length bytes: eng_free. An id outside the vocabulary is ENG_INVALID.
ENG_EXPORT ENG_CHECKED eng_status eng_decode(const eng_engine *engine, const int32_t *ids, size_t count,
                                             bool keep_special, char **text, size_t *length, eng_error *error);
ENG_EXPORT void eng_free(void *memory);
// The bytes of one id, borrowed for the engine's life, not NUL-terminated and perhaps a part of a character; special
// tokens give their text. An unknown id gives *length 0.
ENG_EXPORT const char *eng_token_bytes(const eng_engine *engine, int32_t id, size_t *length);
// Whether the id is a special token, which has no text in what a request generates.
ENG_EXPORT bool eng_token_is_special(const eng_engine *engine, int32_t id);

typedef struct eng_sampling {
    float temperature; // 0: greedy, ties to the lowest id
    float top_p;       // 0: greedy, 1: off
    float min_p;       // 0: off
    int32_t top_k;     // 0 or -1: off
    uint64_t seed;     // draws are Philox(seed; choice, absolute position)
    uint32_t choice;
} eng_sampling;

typedef struct eng_logit_bias {
    int32_t id;
    float bias; // added to the logit; -INFINITY bans the id
} eng_logit_bias;

enum { ENG_MAX_TOP = 20, ENG_MAX_STOP_IDS = 64, ENG_MAX_CHOICES = 128 };

typedef struct eng_request {
    const int32_t *ids; // the whole prompt, BOS included; at least one id; borrowed for the call
    size_t count;
    int64_t max_tokens; // 0: read the prompt only
    eng_sampling sampling;
    eng_knobs knobs;
    const eng_text *stops; // UTF-8 strings; the text ends right before the first that appears; borrowed for the call
    size_t stop_count;
    bool include_stop;       // the stop string (or the text of a stop id) is part of the text
    const int32_t *stop_ids; // ids that end the text like end-of-text; borrowed for the call
    size_t stop_id_count;
    bool ignore_eos;              // end-of-text ids are banned
    int64_t min_tokens;           // end-of-text and stop ids are banned before this many tokens
    const eng_logit_bias *biases; // no id twice; borrowed for the call
    size_t bias_count;
    float presence_penalty, frequency_penalty; // -2..2, over the completion; 0: off
    float repetition_penalty;                  // 0.01..10, over prompt and completion; 1 (or 0): off
    int32_t logprobs;          // -1: none; n: every token's logprob and the n most likely alternatives (0..ENG_MAX_TOP)
    bool prompt_logprobs;      // with logprobs >= 0: of the prompt's tokens too
    bool token_compute;        // solver figures of each token
    bool fail_unconverged;     // end with ENG_UNCONVERGED on the first solve that hits its bound
    int32_t priority;          // lower first among those that wait
    int32_t choices;           // answers to the one prompt, drawn as sampling.choice and those after it; 0: one
    uint64_t timeline;         // that it continues; 0: none. Then ids are its new ones and may be none; one choice
    int64_t timeline_position; // -1: wherever it stands; else ENG_CONFLICT when it stands elsewhere
    bool timeline_returns;     // the timeline stays where it was
    uint64_t owner;            // who asks (an API key): those that wait are admitted in turns over the owners
    const unsigned char *owner_name; // ENG_NAME_BYTES that name the owner whatever the process, as in eng_name: what
                                     // its prompts have in common may go to the store; borrowed for the call. NULL:
                                     // stays here
    void *user;                      // handed back in every event
} eng_request;

typedef enum eng_finish {
    ENG_FINISH_NONE,   // more will follow
    ENG_FINISH_STOP,   // end-of-text id or stop string
    ENG_FINISH_LENGTH, // max_tokens or the context's end
    ENG_FINISH_ERROR,  // status and message say why
} eng_finish;

// Solver figures over the tokens of one part; a solve = one token, layer, head.
typedef struct eng_compute {
    uint64_t solves, steps, unconverged;
    int32_t steps_max;
} eng_compute;

typedef struct eng_alternative {
    int32_t id;
    float logprob;
} eng_alternative;

// One token of an event. Logprobs are log softmax of the model's logits, before bias, penalties and temperature.
typedef struct eng_token {
    int32_t id;
    float logprob; // NAN: not asked for, or nothing precedes it (the prompt's first)
    const eng_alternative
        *top;            // the likeliest ids, best first, ties to the lowest id; the token need not be among them
    int32_t top_count;   // logprobs, or the vocabulary where that is smaller; 0 where logprob is NAN
    eng_compute compute; // with token_compute: of reading the token before it, whose output predicted this one
    int32_t loop; // looped models: at which that output was read, from 1; 0: nothing precedes it, or no such model
} eng_token;

typedef struct eng_usage {
    int64_t prompt_tokens, completion_tokens, cached_tokens;
    eng_compute prompt, completion; // without what a looped model has left for later (loop.h)
    uint32_t exits[ENG_MAX_LOOPS];  // drawn tokens by the loop, from 1, at which they were read; has_loops
} eng_usage;

// What happened to one request in one step. Pointers live until the callback returns. Over all events of a choice
// there are usage->completion_tokens drawn tokens, an end-of-text id included, which has no text (like every special
// token). The callback may call eng_submit, eng_cancel and eng_pause, for any request; eng_step refuses to be called
// from it.
//
// With several choices each has its own events, its last one and its usage; the first tells the prompt's tokens.
//
// What a request did not read itself are its usage's cached tokens: it began from a state of the same owner's that had
// read the same ids with the same solver knobs. That state was kept from a request before (prefix_budget), or another
// request that runs left it: of prompts that wait or are read at one time, what is alike is read once, at any budget.
// No bit of an answer depends on it. Solver figures are of the tokens that were read. Only whole chunks from position 0
// on are shared, of a timeline those of its first prompt. States that requests wait for take up to the pool's bytes
// beside the budget, on the device or the host.
typedef struct eng_event {
    uint64_t id;
    int32_t choice; // 0 .. choices - 1
    void *user;
    const eng_token *prompt; // with prompt_logprobs: the prompt's next tokens, in order
    size_t prompt_count;
    const eng_token *tokens; // drawn ones whose text is settled now (may be none although text comes, and the reverse)
    size_t token_count;
    const char *text; // finished UTF-8: no partial character, no part of a stop string
    size_t text_length;
    eng_finish finish; // not NONE: the last event of this choice, its slot is free
    eng_status status; // with ENG_FINISH_ERROR
    const char *message;
    const eng_usage *usage; // always current
    int64_t position;       // of the timeline, if it ended with what was told so far; -1: none
    bool durable;           // of the last event: the timeline has a name, and is in the store up to `position`
} eng_event;
typedef void (*eng_event_fn)(void *context, const eng_event *event);

// Takes a request into the queue and writes its id (never 0). ENG_INVALID: an id outside the vocabulary, an empty
// prompt or a knob out of range; ENG_TOO_LONG: prompt + max_tokens beyond the context; ENG_FULL: the queue is full, or
// the budget of timelines. On a timeline: ENG_NOT_FOUND; ENG_BUSY: a request is on it; ENG_CONFLICT: another position,
// or what the continuation needs is not there; ENG_IO: its lease could not be renewed (see stores).
ENG_EXPORT ENG_CHECKED eng_status eng_submit(eng_engine *engine, const eng_request *request, uint64_t *id,
                                             eng_error *error);
// Ends a request wherever it is, all choices, without an event. An unknown or finished id is no fault.
ENG_EXPORT void eng_cancel(eng_engine *engine, uint64_t id);
// A paused request keeps its state and is skipped by eng_step (a reader that does not keep up); what is under way for
// it is still told.
ENG_EXPORT void eng_pause(eng_engine *engine, uint64_t id, bool paused);

// Runs one step of the batch and reports through on_event. On a device that works beside the host the next step is
// started before the reports, and goes on after the return. *worked is false when there was nothing to do. A failure of
// one request is its event; only a failure of the device or of memory is returned, and then the engine must be closed.
ENG_EXPORT ENG_CHECKED eng_status eng_step(eng_engine *engine, eng_event_fn on_event, void *context, bool *worked,
                                           eng_error *error);

// ---- timelines
//
// A timeline ends behind the last token whose whole text was told: what a stop string, an end-of-text or stop id cut is
// not part of it (it is with include_stop), nor what was drawn and not told before a cancellation. With nothing told it
// stays where the request found it, as after ENG_NUMERIC. Going on gives the bits that never having gone beyond would.
// Names of an owner's timelines are nobody else's: ENG_NOT_FOUND.

typedef enum eng_residence {
    ENG_RESIDENCE_NONE, // there is nothing, or it is read again when it is needed
    ENG_RESIDENCE_DEVICE,
    ENG_RESIDENCE_HOST,
} eng_residence;

typedef struct eng_timeline_info {
    int64_t position;
    int64_t earliest; // position that a fork or cut may name
    eng_residence residence;
    uint64_t bytes; // of its ids and of all states along it, those that it shares included
    bool busy;
    bool named;           // it is kept in the store
    bool durable;         // all of it is there
    bool profile_changed; // it began under another numeric profile
    bool has_knobs;       // ids were read
    eng_knobs loosest;    // of the knobs they were read with
} eng_timeline_info;

// An empty one. ENG_FULL: the budget is spent.
ENG_EXPORT ENG_CHECKED eng_status eng_timeline_create(eng_engine *engine, uint64_t owner, uint64_t *id,
                                                      eng_error *error);
// A copy of it at an earlier position, or -1: at the present one (of a busy timeline: where its request began).
ENG_EXPORT ENG_CHECKED eng_status eng_timeline_fork(eng_engine *engine, uint64_t owner, uint64_t id, int64_t position,
                                                    uint64_t *fork, eng_error *error);
ENG_EXPORT ENG_CHECKED eng_status eng_timeline_rollback(eng_engine *engine, uint64_t owner, uint64_t id,
                                                        int64_t position, eng_error *error);
// ENG_CONFLICT: it has a name; ENG_ERRAND_DROP or ENG_ERRAND_PARK.
ENG_EXPORT ENG_CHECKED eng_status eng_timeline_drop(eng_engine *engine, uint64_t owner, uint64_t id, eng_error *error);
ENG_EXPORT ENG_CHECKED eng_status eng_timeline_read(const eng_engine *engine, uint64_t owner, uint64_t id,
                                                    eng_timeline_info *out, eng_error *error);
// SHA-256 of what eng_timeline_export gives, as that has it inside; costs as much.
enum { ENG_TIMELINE_DIGEST_BYTES = 32 };
ENG_EXPORT ENG_CHECKED eng_status eng_timeline_digest(eng_engine *engine, uint64_t owner, uint64_t id,
                                                      unsigned char digest[ENG_TIMELINE_DIGEST_BYTES],
                                                      eng_error *error);
// The owner's timelines by ascending ids: the one after id (0: the first); 0: there is none.
ENG_EXPORT uint64_t eng_timeline_next(const eng_engine *engine, uint64_t owner, uint64_t id);
// New memory of *count bytes, eng_free: the nearest state and the ids from there on, with a digest over everything.
ENG_EXPORT ENG_CHECKED eng_status eng_timeline_export(eng_engine *engine, uint64_t owner, uint64_t id, void **bytes,
                                                      size_t *count, eng_error *error);
// The timeline becomes what was exported. ENG_FORMAT: not such bytes, or damaged; ENG_UNSUPPORTED: of another version,
// model, tokenizer or layout; ENG_BUSY, ENG_FULL. On failure it stays as it was.
ENG_EXPORT ENG_CHECKED eng_status eng_timeline_import(eng_engine *engine, uint64_t owner, uint64_t id,
                                                      const void *bytes, size_t count, eng_error *error);

// ---- stores
//
// A store keeps timelines outside the process. The program opens it, starts one thread that lives in eng_store_run, and
// gives the store to its engines; it outlives them. A timeline in it has a *name* that the program chooses. While an
// engine has the timeline it holds the name's lease: nobody else may continue or write it. What a request adds to a
// named timeline is in the store, synced, before its last event is told (event.durable); states follow now and then, so
// that after a kill the timeline is what was acknowledged last, bit for bit.
//
// A store that cannot be reached: requests on a named timeline end with durable false, the first that finds out after
// two seconds, until the lease is nearly over (two fifteenths of lease_ms before its end); then eng_submit answers
// ENG_IO. What is missing in the store gets there
// when it is back. If another engine took the lease meanwhile, the timeline is gone from this one, and a request on it
// ends with ENG_CONFLICT.
//
// When the budget of timelines needs room, named ones that are idle and whole in the store leave the engine, the one
// used longest ago first, as if parked: their ids are not found any more (ENG_NOT_FOUND) and ENG_ERRAND_FETCH brings
// them back, under a new id.

typedef struct eng_store_options {
    // A folder, made where it is not there, for this process alone; or a Redis server (7 or later) that several share:
    // redis://[USER:PASSWORD@]HOST[:PORT][/DB] or redis+unix://[USER:PASSWORD@]/PATH/OF/SOCKET[?db=DB], where user and
    // password may hold %XX; no text and no log ever tells them. Another NAME:// is ENG_UNSUPPORTED.
    const char *place;
    // At least 1 MiB: bytes of LMDB's map, in whole 64 KiB; or of all that is in the Redis server, whoever wrote it,
    // which its maxmemory may bound further. Snapshots are dropped, least recently used first, to stay below 90 % of
    // it; sessions are never dropped but at their time, and what does not fit is ENG_FULL (a disk that takes a part of
    // a write and then no more may be ENG_IO).
    uint64_t budget; // 0: 1 GiB
    // Of a request that waits for its turn, or that Redis brings no further, else ENG_IO. A Redis server that is not
    // reached is tried again until then. 0: 10 s.
    int32_t time_limit_ms;
    eng_log_fn log; // may be NULL; called on the store's thread
    void *log_context;
} eng_store_options;

// Opens the folder, which no other process may have open (ENG_BUSY), and drops what a killed process left unfinished.
// A Redis server need not be there yet: eng_store_run connects, and goes on doing so. The caller owns *out:
// eng_store_close.
ENG_EXPORT ENG_CHECKED eng_status eng_store_open(const eng_store_options *options, eng_store **out, eng_error *error);
// After eng_store_run has returned and every engine with this store is closed. NULL is accepted.
ENG_EXPORT void eng_store_close(eng_store *store);
// Works until eng_store_stop, then does what was submitted before and returns.
ENG_EXPORT void eng_store_run(eng_store *store);
// Any thread. What is submitted from now on is refused (ENG_CANCELLED).
ENG_EXPORT void eng_store_stop(eng_store *store);

typedef struct eng_store_gauges {
    uint64_t queued;           // submitted, not answered yet
    uint64_t done, failed;     // replies with ENG_OK; with ENG_IO, or of sessions with ENG_FULL, ENG_FORMAT
    uint64_t retries;          // attempts that were made again
    uint64_t evicted, expired; // records dropped by this process
    char fault[256];           // of the last failed attempt; empty: none yet
} eng_store_gauges;
ENG_EXPORT void eng_store_read_gauges(eng_store *store, eng_store_gauges *out); // any thread

typedef struct eng_store_usage {
    uint64_t bytes, budget, sessions, prefixes;
} eng_store_usage;

enum { ENG_NAME_BYTES = 32, ENG_NOTE_BYTES = 40, ENG_RECORD_PAGE = 64 };

typedef struct eng_name {
    unsigned char id[ENG_NAME_BYTES];    // unguessable where clients may try ids; never used twice
    unsigned char owner[ENG_NAME_BYTES]; // a digest of the API key, say; of another's a name is not found
} eng_name;

// What the store tells of a timeline.
typedef struct eng_record {
    eng_name name;
    unsigned char note[ENG_NOTE_BYTES]; // the program's own
    int64_t position;
    int64_t ttl_ms;                 // the time to live begins anew with every write; 0: never ends
    int64_t created_ms, expires_ms; // since 1970; expires_ms 0: never
    uint64_t bytes;                 // of the stored state
    bool foreign;                   // of another model, tokenizer or layout
} eng_record;

// Asynchronous: eng_send takes it, its answer comes by its callback out of a later eng_step. None can be cancelled;
// those that an eng_close overtakes are not answered.
typedef enum eng_errand_kind {
    // The timeline gets the name, ttl_ms and note, and is in the store when ENG_OK comes. A timeline that has the name
    // already: all of it is there (after a rollback or an import, which by themselves get there a moment
    // later), with this ttl_ms and note. ENG_CONFLICT: it has another name, or there is such a record; ENG_BUSY: a
    // request is on it; ENG_FULL: no room in the store; ENG_IO: it is not known whether the store has it. On failure
    // the timeline is as before, without a name if it had none.
    ENG_ERRAND_KEEP,
    // Brings the timeline here under `owner`, or finds it here: answer.timeline. Another engine that has it is told so
    // through the store, and gives it back, its state first, when no request is on it. ENG_NOT_FOUND; ENG_BUSY: that
    // has not come about within two fifteenths of lease_ms; if the other died, its lease is over in answer.lease_ms;
    // ENG_UNSUPPORTED: of another model, tokenizer or layout, whose fingerprint the text names; ENG_FORMAT: damaged;
    // ENG_FULL: the budget; ENG_IO.
    ENG_ERRAND_FETCH,
    ENG_ERRAND_LOOK, // answer.record of the name, wherever it is; takes nothing
    ENG_ERRAND_PARK, // puts the state, gives the lease back; the timeline leaves this engine. ENG_BUSY: a request is on
                     // it
    ENG_ERRAND_DROP, // here and in the store. ENG_BUSY as above. Another engine that has it will find out
    ENG_ERRAND_TOUCH, // a new time to live, ttl_ms, from now on
    ENG_ERRAND_LIST,  // of name.owner, by id, those behind name.id (zero: from the start), a page at a time
    ENG_ERRAND_USAGE, // answer.usage of the whole store
} eng_errand_kind;

typedef struct eng_answer {
    eng_errand_kind kind;
    void *user;
    eng_status status;
    const char *message;    // why not; lives until the callback returns, as does `list`
    uint64_t timeline;      // KEEP, FETCH
    eng_record record;      // KEEP, FETCH, LOOK, TOUCH: as it stands
    int64_t lease_ms;       // with ENG_BUSY
    const eng_record *list; // LIST: (count), at most ENG_RECORD_PAGE
    size_t count, damaged;  // damaged: records that cannot be believed, left out
    bool more;              // behind the last of the list
    eng_store_usage usage;
} eng_answer;

typedef struct eng_errand {
    eng_errand_kind kind;
    eng_name name;
    uint64_t owner;                                     // KEEP, FETCH: the timeline's in this engine
    uint64_t timeline;                                  // KEEP
    int64_t ttl_ms;                                     // KEEP, TOUCH
    unsigned char note[ENG_NOTE_BYTES];                 // KEEP
    void (*done)(void *user, const eng_answer *answer); // may call all but eng_step and eng_close
    void *user;
} eng_errand;

// ENG_FULL: as many as may be are under way; ENG_UNSUPPORTED: the engine has no store; ENG_INVALID.
ENG_EXPORT ENG_CHECKED eng_status eng_send(eng_engine *engine, const eng_errand *errand, eng_error *error);
// For how long no step is needed if nothing is called before and eng_options.wake is not; -1: for good. After a step
// that did nothing.
ENG_EXPORT int64_t eng_idle_ms(const eng_engine *engine);

typedef struct eng_gauges {
    uint64_t queued_requests, queued_tokens, running; // requests: each choice is one
    uint64_t states_used, states_total;               // used: by those that run
    uint64_t kv_pages_used, kv_pages_total;
    uint64_t timelines, kept_on_device, kept_on_host;         // states that are kept, each counted once
    uint64_t kept_bytes, kept_bytes_total;                    // of the session budget
    uint64_t named, behind;                                   // timelines with a name; not wholly in the store
    uint64_t parked;                                          // left the engine for want of room, so far
    uint64_t states_stored, store_failures;                   // by this engine, so far: states put; writes that failed
    uint64_t prefix_states, prefix_bytes, prefix_bytes_total; // that are kept; of the prefix budget
    uint64_t prefix_hits, prefix_misses;       // prompts of a whole chunk at least: began from a state, or from nothing
    uint64_t prefix_evictions;                 // of states, for want of room
    uint64_t prefix_audits, prefix_mismatches; // states that were read again; that were wrong
    uint64_t prefix_stored, prefix_fetched;    // that the store took, that came from there
    uint64_t prefix_damaged;                   // that were refused and deleted there
    uint64_t device_allocations;               // since the device was opened; constant once serving
} eng_gauges;
ENG_EXPORT void eng_read_gauges(const eng_engine *engine, eng_gauges *out);

#ifdef __cplusplus
}
#endif
#endif
