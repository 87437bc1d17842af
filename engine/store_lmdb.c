// SPDX-License-Identifier: Apache-2.0
// The embedded store: LMDB in a folder that one process has to itself.
//
// Acknowledged means synced: LMDB runs with its defaults, no writable map and no lazy sync. Small requests that wait
// together share one transaction and so one sync. A large state is written in pieces under a new generation, some
// megabytes a transaction, and becomes the record by the one transaction that writes the head; pieces without a head,
// which a killed process leaves behind, go when the folder is opened. A transaction that fails is dropped and its
// requests are done one by one, so that one which finds no room takes no other with it.
//
// How full the map is follows from LMDB's own page counts. Snapshots may fill 90 % of the budget, states 95, journals
// 98: what is left over is what deleting needs. Leases are in memory, for no other process can have any.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/files.h"
#include "engine/store_lmdb_tables.h"

enum {
    SMALL = 1 << 20, // a payload that shares a transaction
    PIECES_A_COMMIT = 32,
    SWEEP = 64, // records that one sweep drops at most
    RELIEFS = 8
};

static const uint64_t least_budget = 1 << 20;

// ---------------------------------------------------------------------------------------------------------------- room

static int bytes_in_use(eng_lmdb *l, uint64_t *bytes) {
    *bytes = 0;
    for (int t = 0; t < TABLES; t++) {
        MDB_stat stat;
        int rc = mdb_stat(l->txn, l->table[t], &stat);
        if (rc)
            return rc;
        *bytes += (stat.ms_branch_pages + stat.ms_leaf_pages + stat.ms_overflow_pages) * l->page;
    }
    return 0;
}

// The least recently used snapshot goes. *dropped is false where there is none.
static int evict(eng_lmdb *l, bool *dropped) {
    MDB_val name, value;
    int rc = eng_lmdb_seek(l, ORDER, (key){.length = 1}, &name, &value);
    *dropped = rc == 0 && name.mv_size == 8 + KEY;
    if (!*dropped)
        return rc == MDB_NOTFOUND ? 0 : rc;
    unsigned char record[KEY];
    memcpy(record, (char *)name.mv_data + 8, KEY);
    l->evicted++;
    return eng_lmdb_drop(l, record, NULL);
}

// MDB_MAP_FULL when `need` bytes do not fit below the limit of what is written, whatever is evicted.
static int make_room(eng_lmdb *l, const eng_store_job *job, uint64_t need) {
    unsigned percent = job->request.op == ENG_STORE_APPEND ? 98 : 95;
    if (job->request.meta.kind == ENG_STORE_PREFIX)
        percent = 90;
    uint64_t limit = l->budget / 100 * percent, low = l->budget / 100 * 90, used;
    if (need > limit)
        return MDB_MAP_FULL;
    for (;;) {
        bool dropped;
        int rc = bytes_in_use(l, &used);
        if (rc || used + need <= low)
            return rc;
        rc = evict(l, &dropped);
        if (rc)
            return rc;
        if (!dropped)
            return used + need <= limit ? 0 : MDB_MAP_FULL;
    }
}

static uint64_t payload_room(const eng_lmdb *l, const eng_store_job *job) {
    return job->request.buffer->length + (eng_store_pieces(job->request.buffer->length) + 8) * l->page;
}

// -------------------------------------------------------------------------------------------------------------- writes

static int write_pieces(eng_lmdb *l, const eng_store_job *job, uint32_t from, uint32_t to) {
    unsigned char record[KEY];
    const eng_store_buffer *buffer = job->request.buffer;
    eng_lmdb_record_key(&job->request.meta, record);
    int rc = 0;
    for (uint32_t i = from; i < to && !rc; i++)
        rc = eng_lmdb_put(l, PIECES, eng_lmdb_piece_key(record, job->generation, i),
                          buffer->bytes + (size_t)i * ENG_STORE_PIECE_BYTES, eng_store_piece_bytes(buffer->length, i));
    return rc;
}

static int prune_journal(eng_lmdb *l, const unsigned char record[KEY], int64_t position) {
    MDB_val name, value;
    int rc;
    while ((rc = eng_lmdb_seek(l, JOURNAL, eng_lmdb_key_of(record), &name, &value)) == 0 &&
           eng_lmdb_begins(&name, record, KEY) &&
           eng_lmdb_number_at((unsigned char *)name.mv_data + KEY) <= (uint64_t)position)
        if ((rc = mdb_del(l->txn, l->table[JOURNAL], &name, NULL)) != 0)
            return rc;
    return rc == MDB_NOTFOUND ? 0 : rc;
}

static int commit_put(eng_lmdb *l, eng_store_job *job, const unsigned char record[KEY], const eng_store_head *old) {
    uint32_t pieces = eng_store_pieces(job->request.buffer->length);
    int rc = 0;
    if (job->request.buffer->length <= SMALL) {
        rc = make_room(l, job, payload_room(l, job));
        if (!rc)
            rc = write_pieces(l, job, 0, pieces);
    }
    if (!rc && old)
        rc = eng_lmdb_delete_from(l, PIECES, eng_lmdb_key_with(record, old->generation), KEY + 8);
    if (!rc)
        rc = prune_journal(l, record, job->request.meta.position);
    if (!rc && record[0] == ENG_STORE_PREFIX)
        rc = eng_lmdb_note_use(l, record, ++l->stamp);
    return rc;
}

static int journal_bytes(eng_lmdb *l, const unsigned char record[KEY], int64_t after, uint64_t *bytes) {
    MDB_val name, value;
    MDB_cursor *cursor;
    key from = eng_lmdb_key_with(record, (uint64_t)after + 1);
    *bytes = 0;
    int rc = mdb_cursor_open(l->txn, l->table[JOURNAL], &cursor);
    if (rc)
        return rc;
    name = (MDB_val){from.length, from.bytes};
    for (rc = mdb_cursor_get(cursor, &name, &value, MDB_SET_RANGE); rc == 0 && eng_lmdb_begins(&name, record, KEY);
         rc = mdb_cursor_get(cursor, &name, &value, MDB_NEXT))
        *bytes += value.mv_size;
    mdb_cursor_close(cursor);
    return rc == MDB_NOTFOUND ? 0 : rc;
}

static int commit_append(eng_lmdb *l, eng_store_job *job, const unsigned char record[KEY], const eng_store_head *old,
                         eng_status *status) {
    const void *bytes;
    size_t count;
    uint64_t held;
    *status = eng_store_frame_entry(job, old ? old->position : 0, &bytes, &count, &job->reply.error);
    int rc = *status == ENG_OK ? journal_bytes(l, record, 0, &held) : 0;
    if (rc || *status != ENG_OK)
        return rc;
    if (held + count > ENG_STORE_JOURNAL_BYTES) {
        *status = eng_fail(&job->reply.error, ENG_FULL, "the session's journal is full; its state has to be put first");
        return 0;
    }
    rc = make_room(l, job, count + 4 * l->page);
    return rc ? rc
              : eng_lmdb_put(l, JOURNAL, eng_lmdb_key_with(record, (uint64_t)job->request.meta.position), bytes, count);
}

static int same_entry(eng_lmdb *l, const eng_store_job *job, const unsigned char record[KEY], bool *same) {
    MDB_val value;
    int rc = eng_lmdb_get(l, JOURNAL, eng_lmdb_key_with(record, (uint64_t)job->request.meta.position), &value);
    *same = rc == 0 && eng_store_same_entry(job, value.mv_data, value.mv_size);
    return rc == MDB_NOTFOUND ? 0 : rc;
}

static eng_status check_fence(eng_lmdb *l, eng_store_job *job) {
    if (job->request.op == ENG_STORE_EXPIRE || job->request.meta.kind != ENG_STORE_SESSION ||
        eng_store_lease_holds(l->leases, job->request.meta.id, job->request.epoch))
        return ENG_OK;
    return eng_fail(&job->reply.error, ENG_CONFLICT, "another has taken the session's lease since");
}

// PUT, APPEND, EXPIRE. What the disk or the map says is returned, what the record says goes into *status.
static int write_record(eng_lmdb *l, eng_store_job *job, eng_status *status) {
    unsigned char record[KEY];
    eng_store_head old, next;
    found what;
    bool same;
    eng_lmdb_record_key(&job->request.meta, record);
    *status = check_fence(l, job);
    int rc = *status == ENG_OK ? eng_lmdb_find(l, record, &old, &what, &job->reply.error) : 0;
    if (rc || *status != ENG_OK)
        return rc;
    if (what == DAMAGED) {
        *status = ENG_FORMAT;
        return 0;
    }
    const eng_store_head *before = what == WHOLE ? &old : NULL;
    *status = eng_store_plan(job, before, eng_store_wall_clock(), &next, &same, &job->reply.error);
    if (*status == ENG_OK && same) {
        rc = same_entry(l, job, record, &same);
        *status = rc ? ENG_OK : eng_store_already(job, same, &job->reply.error);
        next = old;
    } else if (*status == ENG_OK) {
        if (job->request.op == ENG_STORE_PUT)
            rc = commit_put(l, job, record, before);
        else if (job->request.op == ENG_STORE_APPEND)
            rc = commit_append(l, job, record, before, status);
        if (!rc && *status == ENG_OK)
            rc = eng_lmdb_write_head(l, record, before, &next);
    }
    if (!rc && *status == ENG_OK)
        eng_store_head_meta(&next, &job->reply.meta);
    return rc;
}

static int delete_record(eng_lmdb *l, eng_store_job *job, eng_status *status) {
    unsigned char record[KEY];
    eng_store_head head;
    found what;
    MDB_val value;
    const eng_store_meta *meta = &job->request.meta;
    eng_lmdb_record_key(meta, record);
    int rc = eng_lmdb_get(l, OWNERS, eng_lmdb_owner_key(meta->owner, record), &value);
    *status = rc == MDB_NOTFOUND ? eng_store_not_found(&job->reply.error) : ENG_OK;
    if (rc)
        return rc == MDB_NOTFOUND ? 0 : rc;
    if (job->request.epoch && !eng_store_lease_holds(l->leases, meta->id, job->request.epoch)) {
        *status = eng_fail(&job->reply.error, ENG_CONFLICT, "another has taken the session's lease since");
        return 0;
    }
    rc = eng_lmdb_find(l, record, &head, &what, NULL);
    if (!rc && what == WHOLE && eng_store_over(&head, eng_store_wall_clock()))
        *status = eng_store_not_found(&job->reply.error);
    return rc ? rc : eng_lmdb_drop(l, record, meta->owner);
}

// --------------------------------------------------------------------------------------------------------------- reads

static int read_payload(eng_lmdb *l, eng_store_job *job, const unsigned char record[KEY], const eng_store_head *head,
                        eng_status *status) {
    MDB_val value;
    for (uint32_t i = 0; i < eng_store_pieces(head->payload_bytes); i++) {
        int rc = eng_lmdb_get(l, PIECES, eng_lmdb_piece_key(record, head->generation, i), &value);
        if (rc && rc != MDB_NOTFOUND)
            return rc;
        if (rc || value.mv_size != eng_store_piece_bytes(head->payload_bytes, i)) {
            *status = eng_fail(&job->reply.error, ENG_FORMAT, "a piece of a stored state is missing or cut short");
            return 0;
        }
        memcpy(job->request.buffer->bytes + (size_t)i * ENG_STORE_PIECE_BYTES, value.mv_data, value.mv_size);
    }
    job->request.buffer->length = (size_t)head->payload_bytes;
    *status = eng_store_check_payload(job, head, &job->reply.error);
    return 0;
}

static int read_journal(eng_lmdb *l, eng_store_job *job, const unsigned char record[KEY], const eng_store_head *head,
                        eng_status *status) {
    MDB_val name, value;
    int64_t at = -1;
    int rc = 0;
    key from = eng_lmdb_key_with(record, (uint64_t)head->state_position + 1);
    while (*status == ENG_OK && (rc = eng_lmdb_seek(l, JOURNAL, from, &name, &value)) == 0 &&
           eng_lmdb_begins(&name, record, KEY)) {
        from = eng_lmdb_key_with(record, eng_lmdb_number_at((unsigned char *)name.mv_data + KEY) + 1);
        *status = eng_store_take_entry(job, head, &at, value.mv_data, value.mv_size, &job->reply.error);
    }
    if (*status == ENG_OK && (rc == 0 || rc == MDB_NOTFOUND))
        *status = eng_store_check_chain(head, at, &job->reply.error);
    return *status != ENG_OK || rc == MDB_NOTFOUND ? 0 : rc;
}

static void touch_record(eng_lmdb *l, const unsigned char record[KEY]) {
    int at = 0;
    while (at < l->touches && memcmp(l->touched[at].key, record, KEY) != 0)
        at++;
    if (at == TOUCHES)
        return;
    if (at == l->touches)
        l->touches++;
    memcpy(l->touched[at].key, record, KEY);
    l->touched[at].stamp = ++l->stamp;
}

static int read_record(eng_lmdb *l, eng_store_job *job, eng_status *status) {
    unsigned char record[KEY];
    eng_store_head head;
    found what;
    uint64_t journal;
    eng_lmdb_record_key(&job->request.meta, record);
    int rc = eng_lmdb_find(l, record, &head, &what, &job->reply.error);
    if (rc)
        return rc;
    if (what != WHOLE) {
        *status = what == ABSENT ? eng_store_not_found(&job->reply.error) : ENG_FORMAT;
        return 0;
    }
    *status = eng_store_may_read(job, &head, eng_store_wall_clock(), &job->reply.error);
    if (*status != ENG_OK)
        return 0;
    eng_store_head_meta(&head, &job->reply.meta);
    job->reply.journal_bytes = 0;
    if (!job->request.buffer)
        return 0;
    rc = journal_bytes(l, record, head.state_position, &journal);
    if (!rc)
        *status = eng_store_room(job, &head, journal, &job->reply.error);
    if (!rc && *status == ENG_OK)
        rc = read_payload(l, job, record, &head, status);
    if (!rc && *status == ENG_OK)
        rc = read_journal(l, job, record, &head, status);
    if (!rc && *status == ENG_OK && record[0] == ENG_STORE_PREFIX)
        touch_record(l, record);
    return rc;
}

static int find_record(eng_lmdb *l, eng_store_job *job, eng_status *status) {
    eng_store_meta *meta = &job->reply.meta;
    const char *id = job->request.entry, *end = id + job->request.entry_bytes;
    unsigned char record[KEY];
    int rc = MDB_NOTFOUND;
    for (; id < end && rc == MDB_NOTFOUND; id += ENG_STORE_ID_BYTES) {
        MDB_val value;
        memcpy(meta->id, id, sizeof meta->id);
        eng_lmdb_record_key(meta, record);
        rc = eng_lmdb_get(l, HEADS, eng_lmdb_key_of(record), &value);
    }
    *status = rc == MDB_NOTFOUND ? eng_store_not_found(&job->reply.error) : ENG_OK;
    return rc == MDB_NOTFOUND ? 0 : rc;
}

static int list_records(eng_lmdb *l, eng_store_job *job, eng_status *status) {
    unsigned char record[KEY];
    const eng_store_meta *meta = &job->request.meta;
    int64_t now = eng_store_wall_clock();
    eng_lmdb_record_key(meta, record);
    key from = eng_lmdb_owner_key(meta->owner, record);
    MDB_val name, value;
    size_t prefix = ENG_STORE_OWNER_BYTES + 1;
    int rc;
    from.length++; // a zero byte behind the key: the next one
    while ((rc = eng_lmdb_seek(l, OWNERS, from, &name, &value)) == 0 && eng_lmdb_begins(&name, from.bytes, prefix) &&
           name.mv_size == ENG_STORE_OWNER_BYTES + KEY) {
        eng_store_head head;
        found what;
        if ((job->reply.more = job->reply.count == ENG_STORE_PAGE))
            break;
        memcpy(record, (char *)name.mv_data + ENG_STORE_OWNER_BYTES, KEY);
        from = eng_lmdb_owner_key(meta->owner, record);
        from.length++;
        if ((rc = eng_lmdb_find(l, record, &head, &what, NULL)) != 0)
            return rc;
        job->reply.damaged += what == DAMAGED;
        if (what == WHOLE && !eng_store_over(&head, now))
            *status = eng_store_list_add(job, &head, &job->reply.error);
        if (*status != ENG_OK)
            return 0;
    }
    return rc == MDB_NOTFOUND ? 0 : rc;
}

static int count_usage(eng_lmdb *l, eng_store_job *job) {
    eng_store_usage *usage = &job->reply.usage;
    MDB_stat heads, prefixes;
    int rc = bytes_in_use(l, &usage->bytes);
    if (!rc)
        rc = mdb_stat(l->txn, l->table[HEADS], &heads);
    if (!rc)
        rc = mdb_stat(l->txn, l->table[ORDER], &prefixes);
    if (rc)
        return rc;
    usage->budget = l->budget;
    usage->prefixes = prefixes.ms_entries;
    usage->sessions = heads.ms_entries - prefixes.ms_entries;
    return 0;
}

static int lease(eng_lmdb *l, eng_store_job *job, eng_status *status) {
    unsigned char record[KEY];
    eng_store_head head;
    found what;
    eng_lmdb_record_key(&job->request.meta, record);
    int rc = eng_lmdb_find(l, record, &head, &what, NULL);
    if (rc)
        return rc;
    if (what == WHOLE && memcmp(head.owner, job->request.meta.owner, sizeof head.owner) != 0)
        *status = eng_store_not_found(&job->reply.error);
    else if (job->request.op == ENG_STORE_RELEASE)
        eng_store_lease_release(l->leases, record + 1, job->request.epoch);
    else
        *status = eng_store_lease_take(l->leases, &job->request, eng_store_clock(), &job->reply);
    return 0;
}

// -------------------------------------------------------------------------------------------------------- transactions

static bool writes(const eng_lmdb *l, const eng_store_job *job) {
    eng_store_op op = job->request.op;
    return op == ENG_STORE_PUT || op == ENG_STORE_APPEND || op == ENG_STORE_DELETE || op == ENG_STORE_EXPIRE ||
           l->touches == TOUCHES;
}

static int perform(eng_lmdb *l, eng_store_job *job, eng_status *status) {
    free(job->reply.list); // of an attempt before
    job->reply = (eng_store_reply){.op = job->request.op, .user = job->request.user, .meta = job->request.meta};
    *status = ENG_OK;
    switch (job->request.op) {
    case ENG_STORE_PUT:
    case ENG_STORE_APPEND:
    case ENG_STORE_EXPIRE:
        return write_record(l, job, status);
    case ENG_STORE_GET:
        return read_record(l, job, status);
    case ENG_STORE_FIND:
        return find_record(l, job, status);
    case ENG_STORE_DELETE:
        return delete_record(l, job, status);
    case ENG_STORE_LIST:
        return list_records(l, job, status);
    case ENG_STORE_LEASE:
    case ENG_STORE_RELEASE:
        return lease(l, job, status);
    case ENG_STORE_USAGE:
        return count_usage(l, job);
    case ENG_STORE_WISHES:
        *status = eng_store_lease_wishes(l->leases, &job->request, eng_store_clock(), &job->reply);
        return 0;
    }
    *status = eng_fail(&job->reply.error, ENG_INVALID, "a store has no such operation");
    return 0;
}

static int write_touches(eng_lmdb *l) {
    MDB_val value;
    int rc = 0;
    for (int i = 0; i < l->touches && !rc; i++) {
        rc = eng_lmdb_get(l, USED, eng_lmdb_key_of(l->touched[i].key), &value);
        rc = rc == MDB_NOTFOUND ? 0 : rc ? rc : eng_lmdb_note_use(l, l->touched[i].key, l->touched[i].stamp);
    }
    return rc;
}

// All of the jobs in one transaction, or none.
static int transact(eng_lmdb *l, eng_store_job **jobs, int count, eng_status *status) {
    bool write = false;
    for (int i = 0; i < count; i++)
        write |= writes(l, jobs[i]);
    int touches = l->touches, rc = eng_lmdb_begin(l, write);
    if (rc)
        return rc;
    if (write)
        rc = write_touches(l);
    for (int i = 0; i < count && !rc; i++)
        rc = perform(l, jobs[i], &status[i]);
    rc = eng_lmdb_end(l, rc, write);
    if (!rc && write && touches) { // new ones stand behind those that are written
        l->touches -= touches;
        memmove(l->touched, l->touched + touches, sizeof *l->touched * (size_t)l->touches);
    }
    return rc;
}

// Pages that were freed can be written again two transactions later: something has to be committed.
static int relieve(eng_lmdb *l) {
    bool dropped;
    int rc = eng_lmdb_begin(l, true);
    if (rc)
        return rc;
    rc = evict(l, &dropped);
    if (!rc && !dropped)
        rc = eng_lmdb_note_use(l, (const unsigned char[KEY]){0}, 0);
    if (!rc && !dropped)
        rc = eng_lmdb_forget_use(l, (const unsigned char[KEY]){0});
    return eng_lmdb_end(l, rc, true);
}

static void discard_pieces(eng_lmdb *l, const eng_store_job *job) {
    unsigned char record[KEY];
    eng_lmdb_record_key(&job->request.meta, record);
    if (eng_lmdb_begin(l, true) == 0)
        eng_lmdb_end(l, eng_lmdb_delete_from(l, PIECES, eng_lmdb_key_with(record, job->generation), KEY + 8), true);
}

// A large payload, before the transaction that makes it a record.
static int upload(eng_lmdb *l, eng_store_job *job) {
    uint32_t pieces = eng_store_pieces(job->request.buffer->length);
    int rc = eng_lmdb_begin(l, true);
    if (rc)
        return rc;
    rc = eng_lmdb_end(l, make_room(l, job, payload_room(l, job)), true);
    for (uint32_t i = 0; i < pieces && !rc; i += PIECES_A_COMMIT) {
        rc = eng_lmdb_begin(l, true);
        if (!rc)
            rc = eng_lmdb_end(l, write_pieces(l, job, i, i + PIECES_A_COMMIT < pieces ? i + PIECES_A_COMMIT : pieces),
                              true);
    }
    return rc;
}

static bool is_large(const eng_store_job *job) {
    return job->request.op == ENG_STORE_PUT && job->request.buffer->length > SMALL;
}

static void work_alone(eng_lmdb *l, eng_store_job *job) {
    eng_status status = ENG_OK;
    int rc = 0;
    bool large = is_large(job);
    for (int attempt = 0; attempt <= RELIEFS; attempt++) {
        if (attempt)
            eng_store_tell_retry(l->store);
        rc = large ? upload(l, job) : 0;
        if (!rc)
            rc = transact(l, &job, 1, &status);
        if (large && (rc || status != ENG_OK))
            discard_pieces(l, job);
        if (rc != MDB_MAP_FULL || relieve(l) != 0)
            break;
    }
    if (rc)
        status = eng_lmdb_failed(l, rc, &job->reply.error);
    eng_store_finish(l->store, job, status);
}

static void work_together(eng_lmdb *l, eng_store_job **jobs, int count) {
    eng_status status[64];
    int rc = transact(l, jobs, count, status);
    for (int i = 0; i < count; i++)
        if (rc)
            work_alone(l, jobs[i]);
        else
            eng_store_finish(l->store, jobs[i], status[i]);
}

static void work(void *self, eng_store_job **jobs, int count) {
    eng_lmdb *l = self;
    for (int i = 0; i < count; i++)
        if (jobs[i]->request.op == ENG_STORE_PUT)
            jobs[i]->generation = ++l->generation;
    for (int i = 0; i < count;) {
        int last = i;
        while (last < count && last - i < 64 && !is_large(jobs[last]))
            last++;
        if (last > i)
            work_together(l, jobs + i, last - i);
        else
            work_alone(l, jobs[last++]);
        i = last;
    }
}

static int sweep(eng_lmdb *l) {
    key from = {.length = 1};
    MDB_val name, value;
    int64_t now = eng_store_wall_clock();
    int rc = 0;
    while (l->expired < SWEEP && (rc = eng_lmdb_seek(l, EXPIRY, from, &name, &value)) == 0 && name.mv_size == 8 + KEY) {
        uint64_t time = eng_lmdb_number_at(name.mv_data);
        unsigned char record[KEY];
        eng_store_head head;
        found what;
        if (time > (uint64_t)now)
            return 0;
        memcpy(record, (char *)name.mv_data + 8, KEY);
        from = eng_lmdb_number_key(time, record);
        from.length++;
        if ((rc = eng_lmdb_find(l, record, &head, &what, NULL)) != 0)
            return rc;
        if (record[0] == ENG_STORE_SESSION && eng_store_lease_lives(l->leases, record + 1, eng_store_clock()))
            continue;
        bool its = what == WHOLE && (uint64_t)head.expires_ms == time;
        l->expired += its;
        rc = its ? eng_lmdb_drop(l, record, NULL) : eng_lmdb_del(l, EXPIRY, eng_lmdb_number_key(time, record));
        if (rc)
            return rc;
    }
    return rc == MDB_NOTFOUND ? 0 : rc;
}

static void idle(void *self) {
    eng_lmdb *l = self;
    eng_status none;
    eng_error error = {0};
    int rc = eng_lmdb_begin(l, true);
    if (!rc)
        rc = eng_lmdb_end(l, sweep(l), true);
    if (!rc && l->touches) {
        rc = eng_lmdb_begin(l, true);
        if (!rc)
            rc = eng_lmdb_end(l, write_touches(l), true);
        if (!rc)
            l->touches = 0;
    }
    none = rc ? eng_lmdb_failed(l, rc, &error) : ENG_OK;
    if (none != ENG_OK)
        eng_log(eng_store_logger(l->store), ENG_LOG_WARNING, "%s", error.text);
    eng_store_lease_sweep(l->leases, eng_store_clock());
}

// ------------------------------------------------------------------------------------------------------------- opening

static int reclaim(eng_lmdb *l) {
    key from = {.length = 1};
    MDB_val name, value;
    int rc;
    while ((rc = eng_lmdb_seek(l, PIECES, from, &name, &value)) == 0 && name.mv_size == KEY + 16) {
        unsigned char record[KEY];
        eng_store_head head;
        found what;
        memcpy(record, name.mv_data, KEY);
        uint64_t generation = eng_lmdb_number_at((unsigned char *)name.mv_data + KEY);
        if ((rc = eng_lmdb_find(l, record, &head, &what, NULL)) != 0)
            return rc;
        if (generation > l->generation)
            l->generation = generation;
        if (what == ABSENT || (what == WHOLE && head.generation != generation))
            rc = eng_lmdb_delete_from(l, PIECES, eng_lmdb_key_with(record, generation), KEY + 8);
        if (rc)
            return rc;
        from = eng_lmdb_piece_key(record, generation, UINT32_MAX);
    }
    return rc == MDB_NOTFOUND ? 0 : rc;
}

static int last_stamp(eng_lmdb *l) {
    MDB_cursor *cursor;
    MDB_val name, value;
    int rc = mdb_cursor_open(l->txn, l->table[ORDER], &cursor);
    if (rc)
        return rc;
    rc = mdb_cursor_get(cursor, &name, &value, MDB_LAST);
    if (!rc && name.mv_size == 8 + KEY)
        l->stamp = eng_lmdb_number_at(name.mv_data);
    mdb_cursor_close(cursor);
    return rc == MDB_NOTFOUND ? 0 : rc;
}

static int open_tables(eng_lmdb *l) {
    static const char *const names[TABLES] = {"heads", "pieces", "journal", "owners", "expiry", "used", "order"};
    int rc = eng_lmdb_begin(l, true);
    if (rc)
        return rc;
    for (int t = 0; t < TABLES && !rc; t++)
        rc = mdb_dbi_open(l->txn, names[t], MDB_CREATE, &l->table[t]);
    if (!rc)
        rc = reclaim(l);
    if (!rc)
        rc = last_stamp(l);
    return eng_lmdb_end(l, rc, true);
}

// The file is as long as the map from the start (its unwritten part takes no room), so that no read of a page that was
// never written can end behind it; and a file that is shorter than what LMDB uses of it was cut.
static eng_status check_length(eng_lmdb *l, const char *path, eng_error *error) {
    MDB_envinfo info;
    MDB_stat stat;
    int fd;
    struct stat file;
    int rc = mdb_env_info(l->env, &info);
    if (!rc)
        rc = mdb_env_stat(l->env, &stat);
    if (!rc)
        rc = mdb_env_get_fd(l->env, &fd);
    if (rc)
        return eng_lmdb_failed(l, rc, error);
    l->page = stat.ms_psize;
    uint64_t used = (info.me_last_pgno + 1) * l->page, map = l->budget;
    if (used + least_budget > map) // a smaller budget than it was: deleting needs room
        map = used + least_budget;
    if (map > info.me_mapsize && (rc = mdb_env_set_mapsize(l->env, map)) != 0)
        return eng_lmdb_failed(l, rc, error);
    if (fstat(fd, &file) != 0)
        return eng_fail(error, ENG_IO, "%s: %s", eng_path_tail(path), strerror(errno));
    if (info.me_last_pgno > 1 && (uint64_t)file.st_size < used)
        return eng_fail(error, ENG_FORMAT, "%s: data.mdb is cut short: %lld bytes of %llu", eng_path_tail(path),
                        (long long)file.st_size, (unsigned long long)used);
    if ((uint64_t)file.st_size < map && ftruncate(fd, (off_t)map) != 0)
        return eng_fail(error, errno == ENOSPC || errno == EFBIG ? ENG_FULL : ENG_IO, "%s: %s", eng_path_tail(path),
                        strerror(errno));
    return ENG_OK;
}

static eng_status take_folder(eng_lmdb *l, const char *path, eng_error *error) {
    if (mkdir(path, 0700) != 0 && errno != EEXIST)
        return eng_fail(error, errno == ENOENT ? ENG_NOT_FOUND : ENG_IO, "%s: %s", eng_path_tail(path),
                        strerror(errno));
    char *name = eng_join_path(path, "in-use");
    if (!name)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for a path");
    l->lock = open(name, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    free(name);
    if (l->lock < 0)
        return eng_fail(error, ENG_IO, "%s: %s", eng_path_tail(path), strerror(errno));
    if (flock(l->lock, LOCK_EX | LOCK_NB) != 0)
        return eng_fail(error, errno == EWOULDBLOCK ? ENG_BUSY : ENG_IO, "%s: another process has this store open",
                        eng_path_tail(path));
    return ENG_OK;
}

static eng_status open_env(eng_lmdb *l, const char *path, eng_error *error) {
    eng_status status = take_folder(l, path, error);
    if (status != ENG_OK)
        return status;
    int rc = mdb_env_create(&l->env);
    if (!rc)
        rc = mdb_env_set_maxdbs(l->env, TABLES);
    if (!rc)
        rc = mdb_env_set_mapsize(l->env, l->budget);
    if (!rc)
        rc = mdb_env_open(l->env, path, MDB_NOTLS, 0600);
    if (!rc)
        rc = mdb_reader_check(l->env, NULL);
    if (rc)
        return eng_fail(error, eng_lmdb_failed(l, rc, NULL), "%s: %s", eng_path_tail(path), mdb_strerror(rc));
    status = check_length(l, path, error);
    if (status != ENG_OK)
        return status;
    rc = open_tables(l);
    return rc ? eng_lmdb_failed(l, rc, error) : ENG_OK;
}

static void close_store(void *self) {
    eng_lmdb *l = self;
    if (!l)
        return;
    if (l->env)
        mdb_env_close(l->env);
    if (l->lock >= 0)
        close(l->lock);
    eng_store_leases_free(l->leases);
    free(l);
}

eng_status eng_store_lmdb_open(const eng_store_options *options, eng_store *store, eng_store_backend *out,
                               eng_error *error) {
    if (options->budget < least_budget || options->budget > SIZE_MAX / 2)
        return eng_fail(error, ENG_INVALID, "a store needs a budget of at least 1 MiB");
    eng_lmdb *l = calloc(1, sizeof *l);
    if (!l)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for a store");
    l->store = store;
    l->lock = -1;
    l->budget = options->budget / 65536 * 65536;
    l->leases = eng_store_leases_create();
    eng_status status =
        l->leases ? open_env(l, options->place, error) : eng_fail(error, ENG_NO_MEMORY, "out of memory for a store");
    if (status != ENG_OK) {
        close_store(l);
        return status;
    }
    *out = (eng_store_backend){.self = l, .work = work, .idle = idle, .close = close_store};
    return ENG_OK;
}
