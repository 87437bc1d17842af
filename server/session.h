// SPDX-License-Identifier: Apache-2.0
// The server's sessions: the names that clients know, and the timelines of an engine behind them.
//
// A session is its key's alone: to another's it is not there. Its name is drawn at random, so that it cannot be guessed
// either. It belongs to one engine, is busy from a request's beginning until what the client got of it is known, and is
// dropped when nobody has used it for its time.
//
// With a store the table holds what this server has used of late; any other session may be in the store. A session
// without a timeline is one that is looked for there (session_store.c) before it is used; one whose engine a reload has
// replaced goes over to the new one first (session_move.c). Loop thread, but for what says otherwise.
#ifndef SERVER_SESSION_H
#define SERVER_SESSION_H

#include "server/server.h"

enum { SRV_SESSION_ID_BYTES = 40 };

// What is known of a session whose state went with its engine.
typedef struct srv_foreign {
    char fingerprint[ENG_FINGERPRINT_BYTES];
    char model[]; // the name
} srv_foreign;

typedef struct srv_session {
    struct srv_session *next, *previous; // of all
    struct srv_session *chain;           // of those whose names fall together
    char id[SRV_SESSION_ID_BYTES];
    uint64_t owner;         // the key's id; 0: there are no keys
    eng_name name;          // in the store
    const srv_model *model; // held; NULL: foreign
    srv_foreign *foreign;   // NULL: it is not
    uint64_t timeline;      // of the model's engine; 0: not here, or not yet
    int64_t position;       // as of the last request
    int64_t ttl_s;
    uint64_t expires_ms; // by the loop's clock
    unsigned calls;      // that point to it
    srv_knobs knobs;     // of its completions, unless they say otherwise
    bool stored;         // there is a store, which has it
    bool busy, profile_changed;
    bool known; // its client has been told of it
    bool gone;  // out of the table; freed with the last call
} srv_session;

uint64_t srv_session_owner(const srv_exchange *exchange);
// ENG_NAME_BYTES, the same in every server that knows the key; they stay as long as the server.
const unsigned char *srv_session_owner_name(const srv_exchange *exchange);
// Whether the text can be a session's name; then the one in the store.
bool srv_session_name(const srv_exchange *exchange, const char *id, size_t length, eng_name *out);
void srv_session_print_name(const eng_name *name, char id[SRV_SESSION_ID_BYTES]);
// In the table; NULL: it is not, or its time is over.
srv_session *srv_session_known(const srv_exchange *exchange, const char *id, size_t length);
// In the table, or, where it may be in the store, a new row without a timeline for the model (NULL: the first that the
// key may use). NULL with a refusal.
srv_session *srv_session_find(srv_exchange *exchange, const char *id, size_t length, const srv_model *model,
                              srv_problem *problem);
// Whether a request can begin on it at once: also on a retired model, if it is one that it was prepared for (else
// NULL).
bool srv_session_is_here(const srv_session *session, const srv_model *prepared);
void srv_session_use(srv_session *session, const srv_model *model); // from now on; NULL: none
// Takes it for one request: no other may use it until it is let go. False with a 409.
bool srv_session_take(srv_session *session, srv_problem *problem);
void srv_session_let_go(srv_server *server, srv_session *session); // its time begins anew
// A new one, taken; NULL with a refusal. ttl_s 0: the default.
srv_session *srv_session_add(srv_exchange *exchange, const srv_model *model, int64_t ttl_s, srv_problem *problem);
void srv_session_remove(srv_server *server, srv_session *session); // of the table; its timeline is gone already
void srv_session_release(srv_session *session);                    // a call points to it no more
srv_session *srv_session_first(const srv_server *server);
int64_t srv_session_expires_at(const srv_server *server, const srv_session *session); // Unix seconds
// One that was taken goes, its timeline too.
void srv_session_drop(srv_server *server, srv_session *session);
// info and digest NULL: without
void srv_session_write(const srv_server *server, const srv_session *session, const eng_timeline_info *info,
                       const unsigned char *digest, srv_buf *out);
void srv_session_write_stored(const srv_server *server, const eng_record *stored, srv_buf *out);

// The session stays behind this position, of which the client knows: what came after is cut. Then it is let go.
void srv_session_settle(srv_server *server, srv_session *session, int64_t position);
// One that was taken leaves this server for the store; then calls back. False: no memory, and nothing is called.
bool srv_session_park(srv_server *server, srv_session *session, srv_loop_fn parked, void *context);
// A request that wrote nothing has used it.
void srv_session_touch(srv_server *server, const srv_session *session);

// ---- session_store.c

// An errand for the session as it stands; done and user are the caller's.
void srv_session_errand(const srv_session *session, eng_errand_kind kind, eng_errand *out);
// The session as the store tells of it.
void srv_session_restore(srv_session *session, const eng_record *stored);
// The model of this server that wrote the note; NULL: none.
const srv_model *srv_session_model(const srv_server *server, const eng_record *stored);
// A fault of the engine or the store on a session as a refusal. lease_ms: with ENG_BUSY of another server; else 0.
void srv_session_refuse(srv_problem *problem, eng_status status, const char *text, int64_t lease_ms);

// One that came from the store may have to leave again before it is used, if memory is short: so often it is fetched.
enum { SRV_SESSION_SEEKS = 4 };

// Brings one that was taken here, from the store or a retired model; then calls back, once. On failure it is NULL, the
// caller's no more, and the problem says why. What is returned is for srv_session_unreach; NULL: no memory, and nothing
// will be called.
typedef struct srv_reach srv_reach;
typedef void srv_reached(void *context, srv_session *session, const srv_problem *problem);
srv_reach *srv_session_reach(srv_server *server, srv_session *session, srv_reached *reached, void *context);
// Nobody waits any more: it is let go once it is here. NULL is accepted.
void srv_session_unreach(srv_reach *reach);

// ---- session_move.c

// 409 that names both fingerprints; false: they are the same.
bool srv_session_refuse_foreign(const srv_server *server, const srv_foreign *foreign, srv_problem *problem);

// From a retired model to the present one of its name, where it is (timeline 0: in the store, to be fetched); calls
// back likewise. False: no memory, and nothing will be called.
bool srv_session_move(srv_server *server, srv_session *session, srv_reached *moved, void *context);

#endif
