// SPDX-License-Identifier: Apache-2.0
// States at rest: what a session had read at one moment, immutable, shared by reference.
//
// A snapshot begins where its session ended, in the pool's slot; nothing is copied. When the pool has no slot or page
// left for those who run, the snapshot used least recently moves to the host, at a step boundary and in the stream's
// order, so that nobody waits for it. A session that continues gets a copy from wherever it lies. Host memory is taken
// in blocks of a slot or a page and used again. Every byte counts in one budget, wherever it lies, so what is on the
// device always finds room on the host. Everything belongs to the engine's thread.
#ifndef ENGINE_SNAPSHOT_H
#define ENGINE_SNAPSHOT_H

#include "engine/session.h"

typedef struct eng_snapshots eng_snapshots;

typedef struct eng_snapshot {
    eng_snapshots *all;
    struct eng_snapshot *previous, *next; // by use, the least recent first
    int32_t references;
    uint64_t sent;       // number of the transfer that brought it to the host
    uint64_t mark;       // free for whoever sorts out what may go
    int64_t read;        // ids
    eng_session session; // on the device; pool NULL: on the host
    void *slot, **page;  // (pages of read ids) on the host
} eng_snapshot;

// pool, device and stream are borrowed. *out: eng_snapshots_free, after every snapshot was released.
ENG_CHECKED eng_status eng_snapshots_create(eng_pool *pool, kern_device *device, kern_stream *stream,
                                            eng_snapshots **out, eng_error *error);
void eng_snapshots_free(eng_snapshots *all);
eng_pool *eng_snapshots_pool(const eng_snapshots *all);
eng_snapshot *eng_snapshots_oldest(const eng_snapshots *all); // by use; NULL: there are none

// Each returns one reference, or NULL for want of memory. keep takes the session over, or leaves it; copy leaves it and
// lands on the host; read_in takes eng_snapshot_bytes(all, read) bytes: the slot, then the pages.
eng_snapshot *eng_snapshot_keep(eng_snapshots *all, eng_session *session);
eng_snapshot *eng_snapshot_copy(eng_snapshots *all, const eng_session *session);
eng_snapshot *eng_snapshot_read_in(eng_snapshots *all, int64_t read, const void *bytes);
void eng_snapshot_retain(eng_snapshot *snapshot);
void eng_snapshot_release(eng_snapshot *snapshot); // NULL is accepted

// A session that goes on from there, as eng_session_open.
ENG_CHECKED eng_status eng_snapshot_open(eng_snapshot *snapshot, int64_t max_length, eng_session *out,
                                         eng_error *error);
// The bytes that read_in takes.
ENG_CHECKED eng_status eng_snapshot_write_out(const eng_snapshot *snapshot, void *out, eng_error *error);
uint64_t eng_snapshot_bytes(const eng_snapshots *all, int64_t read);
// Whether two that have read as many ids are the same, bit for bit.
ENG_CHECKED eng_status eng_snapshot_compare(const eng_snapshot *a, const eng_snapshot *b, bool *equal,
                                            eng_error *error);

// Moves the one used least recently of those on the device to the host. False: none is there, or no memory for it.
bool eng_snapshots_spill(eng_snapshots *all);

typedef struct eng_snapshot_sums {
    uint64_t device, host, bytes; // their numbers, and the bytes of all
} eng_snapshot_sums;
void eng_snapshots_sum(const eng_snapshots *all, eng_snapshot_sums *out);

#endif
