// SPDX-License-Identifier: Apache-2.0
// The server's sessions: the names that clients know, and the timelines of an engine behind them.
//
// A session is its key's alone: to another's it is not there. Its name is drawn at random, so that it cannot be guessed
// either. It belongs to one engine, is busy from a request's beginning until what the client got of it is known, and is
// dropped when nobody has used it for its time. Loop thread.
#ifndef SERVER_SESSION_H
#define SERVER_SESSION_H

#include "server/server.h"

enum { SRV_SESSION_ID_BYTES = 40 };

typedef struct srv_session {
    struct srv_session *next;
    char id[SRV_SESSION_ID_BYTES];
    uint64_t owner; // the key's id; 0: there are no keys
    const srv_model *model;
    uint64_t timeline; // of the model's engine
    int64_t position;  // as of the last request
    int64_t ttl_s;
    uint64_t expires_ms; // by the loop's clock
    unsigned calls;      // that point to it
    srv_knobs knobs;     // of its completions, unless they say otherwise
    bool busy, profile_changed;
    bool known; // its client has been told of it
} srv_session;

uint64_t srv_session_owner(const srv_exchange *exchange);
// NULL with a 404.
srv_session *srv_session_find(const srv_exchange *exchange, const char *id, size_t length, srv_problem *problem);
// Takes it for one request: no other may use it until it is let go. False with a 409.
bool srv_session_take(srv_session *session, srv_problem *problem);
void srv_session_let_go(srv_server *server, srv_session *session); // its time begins anew
// A new one, taken; NULL with a refusal. ttl_s 0: the default.
srv_session *srv_session_add(srv_exchange *exchange, const srv_model *model, int64_t ttl_s, srv_problem *problem);
void srv_session_remove(srv_server *server, srv_session *session); // of the table; its timeline is gone already
srv_session *srv_session_first(const srv_server *server);
int64_t srv_session_expires_at(const srv_server *server, const srv_session *session); // Unix seconds

// One that was taken goes, its timeline too.
void srv_session_drop(srv_server *server, srv_session *session);
void srv_session_write(const srv_server *server, const srv_session *session, const eng_timeline_info *info,
                       srv_buf *out); // info NULL: without

// The session stays behind this position, of which the client knows: what came after is cut. Then it is let go.
void srv_session_settle(srv_server *server, srv_session *session, int64_t position);

#endif
