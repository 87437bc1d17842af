// SPDX-License-Identifier: Apache-2.0
// Parked sessions and prefix snapshots outside the process: LMDB in a folder, or a Redis server that several share.
//
// A store holds *records*. A record is named by its kind and 32 bytes, belongs to an owner, and has metadata, a
// *payload* (a state as bytes, state.h) and a *journal*: entries that lead from the payload's position to the
// timeline's. A session is stored by appending what each request added, and now and then by putting its state, which
// drops the entries that the state has read. Everything is bytes to the store: what a payload or an entry means is the
// caller's. Opening, running and stopping a store is engine.h's; here is what an engine asks of it.
//
// Threads: the program starts one thread a store, which lives in eng_store_run. An engine's thread is a *client*: it
// submits requests and takes replies, by messages, and never waits. At most `requests` are under way for a client;
// their memory, and the staging buffers that carry payloads, are made when the client is. Requests of a client that
// name one record take effect in the order in which they were submitted; the replies of different records may overtake
// one another.
//
// What a reply with ENG_OK promises: a write is durable, and it is whole or not there. Durable with LMDB: on the disk
// and synced. Durable with Redis: acknowledged by the server, which has it on its disk and synced if it runs with
// appendonly yes and appendfsync always; with weaker settings (the log says so) it is what they make of it: a power cut
// takes the last second, or a restart everything. A reply with ENG_IO of a write says that the outcome is not known:
// submitting the same again does no harm, also if it had happened.
//
// One writer at a time: writing a session takes the epoch of a lease. Leases end by the monotonic clock of the one
// process that has an LMDB store to itself, or by the clock of the Redis server. An epoch is never given twice: within
// the life of an LMDB store's process, which ends all leases; by a Redis server also across its restarts, and even if
// it has kept nothing, unless its clock was set back as well. A lease that has run out fences nothing until another
// takes it (or a day has passed): whether a write is accepted is a matter of the epoch alone, compared in the same step
// that writes.
//
// What is read is believed only if its digests fit: a record that is foreign, cut short or altered anywhere is
// ENG_FORMAT, stays as it is, and can be deleted by its owner.
#ifndef ENGINE_STORE_H
#define ENGINE_STORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/digest.h"
#include "engine/engine.h"

typedef struct eng_store_client eng_store_client;

// ----------------------------------------------------------------------------------------------------------- a client

typedef struct eng_store_client_options {
    int32_t requests;      // under way at once, replies that were not given back included; 0: 64
    uint64_t entry_bytes;  // of journal entries among them; 0: twice ENG_STORE_JOURNAL_BYTES
    int32_t buffers;       // staging buffers; 0: none
    uint64_t buffer_bytes; // of each: the largest payload and a journal; memory that is never used costs only addresses
    void *memory; // borrowed for the client's life: buffers * buffer_bytes (pinned, say); NULL: the client's own
    void (*notify)(void *context); // a reply has come; called on the store's thread, must not wait; may be NULL
    void *notify_context;
} eng_store_client_options;

ENG_CHECKED eng_status eng_store_client_open(eng_store *store, const eng_store_client_options *options,
                                             eng_store_client **out, eng_error *error);
// Once the store's thread has returned, or every request has been answered. Waits for a notify that is under way.
void eng_store_client_close(eng_store_client *client); // NULL is accepted

// The functions below belong to the client's thread.

typedef struct eng_store_buffer {
    unsigned char *bytes;
    size_t length, capacity;
} eng_store_buffer;

eng_store_buffer *eng_store_take_buffer(eng_store_client *client); // NULL: all are in use
void eng_store_return_buffer(eng_store_client *client, eng_store_buffer *buffer);

// ----------------------------------------------------------------------------------------------------------- requests

enum {
    ENG_STORE_ID_BYTES = 32,
    ENG_STORE_OWNER_BYTES = 32,
    ENG_STORE_HOLDER_BYTES = 32,
    ENG_STORE_NOTE_BYTES = 64,
    ENG_STORE_WISH_MS = 30000,
    ENG_STORE_PAGE = 64, // records that one ENG_STORE_LIST tells at most
    ENG_STORE_FIND_IDS = 4096,
    ENG_STORE_JOURNAL_BYTES = 8 << 20 // of a record's journal
};

typedef enum eng_store_kind {
    ENG_STORE_SESSION = 1, // written under a lease, kept until its time
    ENG_STORE_PREFIX = 2,  // a snapshot: written by anybody, dropped when room is needed; has no journal
} eng_store_kind;

typedef struct eng_store_meta {
    eng_store_kind kind;
    unsigned char id[ENG_STORE_ID_BYTES];
    unsigned char owner[ENG_STORE_OWNER_BYTES];     // a digest of the API key, say
    unsigned char fingerprint[ENG_DIGEST_BYTES];    // model, tokenizer, layout
    unsigned char profile[ENG_DIGEST_BYTES];        // numeric profile, of the last write
    unsigned char note[ENG_STORE_NOTE_BYTES];       // the caller's, of the last write
    int64_t position;                               // of the last write; they ascend: ids, or a count of writes
    int32_t tail_count, tail;                       // as eng_session's, at `position`
    int64_t state_position;                         // of the payload; 0 where there is none
    uint64_t payload_bytes;                         // 0: no payload yet
    unsigned char payload_digest[ENG_DIGEST_BYTES]; // SHA-256; zero without a payload
    int64_t created_ms, expires_ms;                 // since 1970; expires_ms 0: never
} eng_store_meta;

typedef enum eng_store_op {
    // Writes a record whole, or a session's payload: meta's kind, id, owner, fingerprint, profile, note, position and
    // tail, time to live, and `buffer`, whose bytes 0 .. length - 1 are the payload. Entries up to meta.position go;
    // where later ones stand, the timeline's position and tail stay what they were.
    ENG_STORE_PUT,
    // Adds an entry to a session's journal: meta as for PUT with the position after it, and `entry`. The position must
    // be beyond the timeline's (ENG_CONFLICT; the very same entry as the last is OK), and the session may be new.
    // ENG_FULL: the journal would exceed ENG_STORE_JOURNAL_BYTES; put the state first.
    ENG_STORE_APPEND,
    // Reads kind, id, owner. With `buffer`: payload, then the journal's entries after its position
    // (eng_store_next_entry). ENG_TOO_LONG: the buffer is too small. Where meta.fingerprint is not zero and the
    // record's is another: ENG_UNSUPPORTED, nothing read. Without a buffer: the metadata alone.
    ENG_STORE_GET,
    // Which of many ids, `entry`, one after the other and ENG_STORE_FIND_IDS at most, is the first that a record of the
    // kind has: reply.meta.id. Nothing of it is read: whose it is, and whether it can be believed, a GET tells.
    ENG_STORE_FIND,
    ENG_STORE_DELETE, // kind, id, owner; ends a lease too, so that its holder's writes are refused. epoch may be 0
    ENG_STORE_EXPIRE, // kind, id, owner: a new time to live from now
    // The metadata of an owner's records of a kind, by id, from the first behind meta.id on (zero: from the start);
    // states are not read. Records that cannot be believed are left out and counted in `damaged`.
    ENG_STORE_LIST,
    // A session's lease for ttl_ms, by id, owner and `holder`. Epoch 0 takes it: ENG_BUSY while another holder has it
    // (reply.lease_ms says for how long). Otherwise renews it: ENG_CONFLICT when another has taken it since. The
    // session
    // need not be stored yet. Being refused is a wish, which the holder is told within ENG_STORE_WISH_MS or never.
    ENG_STORE_LEASE,
    ENG_STORE_RELEASE, // id, owner, epoch. A lease of another epoch stays, which is no fault
    ENG_STORE_USAGE,   // what the whole store holds
    // Sessions of `holder`s leases that others wished for since it was asked last, ENG_STORE_PAGE at most: kind, id and
    // owner of each in reply.list. One whose reply is lost is not told again.
    ENG_STORE_WISHES,
} eng_store_op;

typedef struct eng_store_request {
    eng_store_op op;
    eng_store_meta meta; // what the operation above names; the rest is not looked at
    uint64_t epoch;      // of the session's lease, for PUT and APPEND: ENG_CONFLICT when it is not that of the lease
    int64_t ttl_ms;      // PUT, APPEND, EXPIRE: 0 never ends; LEASE: more than 0
    unsigned char holder[ENG_STORE_HOLDER_BYTES];
    eng_store_buffer *buffer; // the store's until the reply
    const void *entry;        // copied; FIND: ids
    size_t entry_bytes;
    void *user; // handed back
} eng_store_request;

typedef struct eng_store_reply {
    eng_store_op op;
    eng_status status; // ENG_NOT_FOUND: no such record, its time is over, or it is another owner's, all alike
    eng_error error;
    void *user;
    eng_store_buffer *buffer; // the caller's again
    eng_store_meta meta;      // PUT, APPEND, GET, EXPIRE: the record as it stands; otherwise the request's
    size_t journal_bytes;     // GET: behind the payload in the buffer
    uint64_t epoch;           // LEASE
    int64_t lease_ms;         // LEASE: what is left of it now
    eng_store_meta *list;     // LIST, WISHES: (count), lives until eng_store_done
    size_t count, damaged;
    bool more; // behind the last of the list
    eng_store_usage usage;
} eng_store_reply;

// ENG_FULL: as many requests, or bytes of entries, as may be are under way; nothing is taken. ENG_INVALID: the request
// makes no sense. ENG_CANCELLED: the store has been stopped. The reply tells everything else.
ENG_CHECKED eng_status eng_store_submit(eng_store_client *client, const eng_store_request *request, eng_error *error);
// The next reply, in the order in which they came, or NULL. It makes room for another request when it is given back.
eng_store_reply *eng_store_poll(eng_store_client *client);
void eng_store_done(eng_store_client *client, eng_store_reply *reply);

typedef struct eng_store_entry {
    int64_t position; // after it
    const void *bytes;
    size_t length;
} eng_store_entry;

// Walks the journal of a GET: *at begins as 0. False: no further entry. Borrows from the reply's buffer.
bool eng_store_next_entry(const eng_store_reply *reply, size_t *at, eng_store_entry *out);

#endif
