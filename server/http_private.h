// SPDX-License-Identifier: Apache-2.0
// Private to the HTTP files: listeners, connections, and the rules of libmicrohttpd's life inside the loop.
//
// One daemon of the library a listener, no thread of its own: MHD_run is called by run_listener alone, never from
// inside one of its callbacks. Whoever resumes a connection or shuts a socket down marks the listener due and leaves
// the run to srv_http_flush. A connection is resumed only if its exchange says that it is suspended. All of it: loop
// thread.
#ifndef SERVER_HTTP_PRIVATE_H
#define SERVER_HTTP_PRIVATE_H

#include <microhttpd.h>

#include "server/server.h"

// http_tls.c
bool srv_tls_expired(const srv_tls *tls);
// Starting with this option, each handshake gets the pair that is there at its time.
struct MHD_OptionItem srv_tls_option(void);
// Straight into the connection, past the library.
bool srv_tls_send(struct MHD_Connection *mhd, const char *data, size_t length);

typedef struct srv_listener {
    srv_http *http;
    bool admin, tls;
    struct MHD_Daemon *daemon;
    int descriptor; // -1 once the library has given it back
    srv_watch *watch;
    srv_timer *timer;
    int64_t idle_time_ms; // that the library was told
    bool due, quiet;
    unsigned closed; // connections that ended in the present run
    struct srv_connection *first;
    char address[160];
} srv_listener;

typedef struct srv_connection {
    struct srv_connection *previous, *next;
    srv_listener *listener;
    struct MHD_Connection *mhd;
    int descriptor;
    srv_watch *hangup; // made at the first suspend
    srv_exchange *exchange;
    uint64_t deadline_ms; // 0: none. For a header, a body, or the next request
    int64_t idle_time_ms; // that the library was told
    bool cut_path;        // of the request that is read: what stands behind a %00 is not seen
} srv_connection;

struct srv_http {
    srv_server *server;
    srv_listener listeners[SRV_MAX_LISTENERS + 1]; // and the one for administration
    srv_tls *tls;                                  // NULL: none
    size_t count;
    size_t connections;
    size_t body_bytes; // reserved by all exchanges
    srv_timer *sweep;
    uint64_t sweeps;
};

// http.c: answers in the middle of a body, where the library cannot, but sends nothing else either. Close after it.
void srv_http_tell(srv_exchange *exchange, const srv_problem *problem);

// http_exchange.c: callbacks of the library; closure: the srv_listener.
enum MHD_Result srv_http_on_request(void *closure, struct MHD_Connection *mhd, const char *url, const char *method,
                                    const char *version, const char *data, size_t *size, void **slot);
void srv_http_on_completed(void *closure, struct MHD_Connection *mhd, void **slot,
                           enum MHD_RequestTerminationCode code);
// The peer of this connection has left.
void srv_http_on_hangup(void *connection);
// Ends the work behind an exchange and lets the library close its connection.
void srv_http_cancel(srv_exchange *exchange);

// http_check.c: what must be refused by the header alone. Fills exchange->problem.
typedef struct srv_header_facts {
    bool chunked, expects_continue;
    uint64_t content_length;
    size_t bytes;   // of names and values, with what stands between them
    bool dangerous; // the connection must be closed: its framing cannot be trusted
    unsigned authorizations;
    const char *authorization; // NULL: none
} srv_header_facts;
void srv_http_check_headers(struct MHD_Connection *mhd, const char *version, bool takes_body, srv_header_facts *facts,
                            srv_problem *problem);
// Whose request it is; NULL: nobody's, and *problem is a 401.
srv_key *srv_http_authorize(srv_keys *keys, const srv_header_facts *facts, srv_problem *problem);

#endif
