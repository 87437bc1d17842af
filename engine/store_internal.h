// SPDX-License-Identifier: Apache-2.0
// What the parts of a store share: a request on its way, records as bytes, and what a backend has to do.
//
// store.c owns queue, clients and buffers; store_record.c knows what a record is and which write may follow which;
// store_lmdb.c and store_redis.c keep the bytes. All but eng_store_submit's side runs on the store's thread.
#ifndef ENGINE_STORE_INTERNAL_H
#define ENGINE_STORE_INTERNAL_H

#include "engine/log.h"
#include "engine/store.h"

typedef struct eng_store_job {
    eng_store_request request;
    eng_store_reply reply;
    eng_store_client *client;
    void *entry;                                    // its own copy, with room for the frame in front
    unsigned char payload_digest[ENG_DIGEST_BYTES]; // of a PUT's payload
    int64_t deadline;                               // eng_store_clock
    uint64_t generation;                            // of a PUT's pieces; 0: none yet
    struct eng_store_job *next;
} eng_store_job;

typedef struct eng_store_backend {
    void *self;
    // Finishes every job; those of one record in their order.
    void (*work)(void *self, eng_store_job **jobs, int count);
    void (*idle)(void *self); // about once a second, and before the thread leaves
    // Instead of both: a loop of its own over eng_store_take, and what ends its waiting (any thread).
    void (*run)(void *self);
    void (*wake)(void *self);
    void (*close)(void *self);
} eng_store_backend;

ENG_CHECKED eng_status eng_store_lmdb_open(const eng_store_options *options, eng_store *store, eng_store_backend *out,
                                           eng_error *error);
ENG_CHECKED eng_status eng_store_redis_open(const eng_store_options *options, eng_store *store, eng_store_backend *out,
                                            eng_error *error);

// For a backend's loop: up to `most` jobs that wait, each of which it has to finish. *stopping: none will follow.
int eng_store_take(eng_store *store, eng_store_job **jobs, int most, bool *stopping);
// Milliseconds of the monotonic clock, and since 1970.
int64_t eng_store_clock(void);
int64_t eng_store_wall_clock(void);
// Hands the job's reply to its client; the job is not the caller's any more.
void eng_store_finish(eng_store *store, eng_store_job *job, eng_status status);
// For the gauges.
void eng_store_tell_fault(eng_store *store, const char *text);
void eng_store_tell_retry(eng_store *store);
void eng_store_tell_dropped(eng_store *store, uint64_t evicted, uint64_t expired);
eng_logger eng_store_logger(const eng_store *store);

// ------------------------------------------------------------------------------------------------------------ records

// What is stored of a record beside its payload's pieces and its journal's entries; little-endian, no padding.
typedef struct eng_store_head {
    char magic[8];
    uint32_t bytes, kind; // bytes: of this struct
    unsigned char id[ENG_STORE_ID_BYTES], owner[ENG_STORE_OWNER_BYTES];
    unsigned char fingerprint[ENG_DIGEST_BYTES], profile[ENG_DIGEST_BYTES];
    unsigned char note[ENG_STORE_NOTE_BYTES];
    unsigned char payload_digest[ENG_DIGEST_BYTES];
    int64_t position;
    int32_t tail_count, tail;
    int64_t state_position;
    uint64_t payload_bytes, generation;
    int64_t created_ms, expires_ms;
    unsigned char digest[ENG_DIGEST_BYTES]; // of what stands before it
} eng_store_head;

// Stands before an entry's bytes. `previous` is the timeline's position before it: entries form a chain that cannot
// lose one unnoticed.
typedef struct eng_store_frame {
    char magic[8];
    unsigned char id[ENG_STORE_ID_BYTES];
    int64_t previous, position;
    uint64_t bytes;
    unsigned char digest[ENG_DIGEST_BYTES]; // of what stands before it, and of the bytes
} eng_store_frame;

_Static_assert(sizeof(eng_store_head) == 328 && offsetof(eng_store_head, digest) == 296, "no padding");
_Static_assert(sizeof(eng_store_frame) == 96 && offsetof(eng_store_frame, digest) == 64, "no padding");

// Bytes of a piece of a payload: with LMDB's page header 64 pages of 4096.
enum { ENG_STORE_PIECE_BYTES = 64 * 4096 - 16 };
uint32_t eng_store_pieces(uint64_t payload_bytes);
size_t eng_store_piece_bytes(uint64_t payload_bytes, uint32_t piece);

// ENG_FORMAT unless the bytes are a whole head of this record; *out is written on success alone.
ENG_CHECKED eng_status eng_store_read_head(const void *bytes, size_t count, const eng_store_meta *of,
                                           eng_store_head *out, eng_error *error);
void eng_store_head_meta(const eng_store_head *head, eng_store_meta *out);
bool eng_store_over(const eng_store_head *head, int64_t now_ms); // its time
ENG_CHECKED eng_status eng_store_not_found(eng_error *error);

// The head that a PUT, APPEND or EXPIRE makes of the old one (NULL: none) at now_ms, or why it may not. *same: the
// write needs no step of its own if the journal's last entry is the job's (eng_store_same_entry), otherwise it is
// refused.
ENG_CHECKED eng_status eng_store_plan(const eng_store_job *job, const eng_store_head *old, int64_t now_ms,
                                      eng_store_head *next, bool *same, eng_error *error);
ENG_CHECKED eng_status eng_store_already(const eng_store_job *job, bool same, eng_error *error);
bool eng_store_same_entry(const eng_store_job *job, const void *stored, size_t count);
// The job's entry as it is stored: frame and bytes, in the job's own memory.
ENG_CHECKED eng_status eng_store_frame_entry(eng_store_job *job, int64_t previous, const void **bytes, size_t *count,
                                             eng_error *error);

// Whether the caller of a GET may have the record: owner, time, fingerprint.
ENG_CHECKED eng_status eng_store_may_read(const eng_store_job *job, const eng_store_head *head, int64_t now_ms,
                                          eng_error *error);
// Room for payload and journal in the job's buffer.
ENG_CHECKED eng_status eng_store_room(const eng_store_job *job, const eng_store_head *head, uint64_t journal_bytes,
                                      eng_error *error);
// The payload in the job's buffer against its digest.
ENG_CHECKED eng_status eng_store_check_payload(const eng_store_job *job, const eng_store_head *head, eng_error *error);
// Copies the next entry, by position, behind what the buffer holds. *at: the chain's end so far, begins as -1.
ENG_CHECKED eng_status eng_store_take_entry(eng_store_job *job, const eng_store_head *head, int64_t *at,
                                            const void *stored, size_t count, eng_error *error);
// After the last entry: whether the chain reaches the timeline's position.
ENG_CHECKED eng_status eng_store_check_chain(const eng_store_head *head, int64_t at, eng_error *error);
// Adds to the list of a LIST, or of WISHES.
ENG_CHECKED eng_status eng_store_list_add(eng_store_job *job, const eng_store_head *head, eng_error *error);
ENG_CHECKED eng_status eng_store_list_wish(eng_store_reply *reply, const unsigned char id[ENG_STORE_ID_BYTES],
                                           const unsigned char owner[ENG_STORE_OWNER_BYTES], eng_error *error);

#endif
