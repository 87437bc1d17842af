// SPDX-License-Identifier: Apache-2.0
// Keys, records over several tables, and transactions of an LMDB store; see store_lmdb_tables.h.
//
// Every change of a record is made here in all tables that know it, so that an index never names what is not there. A
// record whose head cannot be believed is still found by its key, and goes with all its pieces.
#include "engine/store_lmdb_tables.h"

#include <errno.h>
#include <string.h>

// ---------------------------------------------------------------------------------------------------------------- keys

void eng_lmdb_big_endian(unsigned char *out, uint64_t value) {
    for (int i = 8; i-- > 0; value >>= 8)
        out[i] = (unsigned char)value;
}

uint64_t eng_lmdb_number_at(const unsigned char *bytes) {
    uint64_t value = 0;
    for (int i = 0; i < 8; i++)
        value = value << 8 | bytes[i];
    return value;
}

void eng_lmdb_record_key(const eng_store_meta *meta, unsigned char out[KEY]) {
    out[0] = (unsigned char)meta->kind;
    memcpy(out + 1, meta->id, ENG_STORE_ID_BYTES);
}

key eng_lmdb_key_of(const unsigned char record[KEY]) {
    key out = {.length = KEY};
    memcpy(out.bytes, record, KEY);
    return out;
}

key eng_lmdb_key_with(const unsigned char record[KEY], uint64_t number) {
    key out = eng_lmdb_key_of(record);
    eng_lmdb_big_endian(out.bytes + KEY, number);
    out.length += 8;
    return out;
}

key eng_lmdb_piece_key(const unsigned char record[KEY], uint64_t generation, uint32_t piece) {
    key out = eng_lmdb_key_with(record, generation);
    eng_lmdb_big_endian(out.bytes + out.length, piece);
    out.length += 8;
    return out;
}

key eng_lmdb_number_key(uint64_t number, const unsigned char record[KEY]) {
    key out = {.length = 8 + KEY};
    eng_lmdb_big_endian(out.bytes, number);
    memcpy(out.bytes + 8, record, KEY);
    return out;
}

key eng_lmdb_owner_key(const unsigned char owner[ENG_STORE_OWNER_BYTES], const unsigned char record[KEY]) {
    key out = {.length = ENG_STORE_OWNER_BYTES + KEY};
    memcpy(out.bytes, owner, ENG_STORE_OWNER_BYTES);
    memcpy(out.bytes + ENG_STORE_OWNER_BYTES, record, KEY);
    return out;
}

int eng_lmdb_get(eng_lmdb *l, table t, key k, MDB_val *value) {
    MDB_val name = {k.length, k.bytes};
    return mdb_get(l->txn, l->table[t], &name, value);
}

int eng_lmdb_put(eng_lmdb *l, table t, key k, const void *bytes, size_t count) {
    MDB_val name = {k.length, k.bytes}, value = {count, (void *)bytes};
    return mdb_put(l->txn, l->table[t], &name, &value, 0);
}

int eng_lmdb_del(eng_lmdb *l, table t, key k) {
    MDB_val name = {k.length, k.bytes};
    int rc = mdb_del(l->txn, l->table[t], &name, NULL);
    return rc == MDB_NOTFOUND ? 0 : rc;
}

// The first entry at or behind the key. *name and *value live until the next write.
int eng_lmdb_seek(eng_lmdb *l, table t, key k, MDB_val *name, MDB_val *value) {
    MDB_cursor *cursor;
    int rc = mdb_cursor_open(l->txn, l->table[t], &cursor);
    if (rc)
        return rc;
    *name = (MDB_val){k.length, k.bytes};
    rc = mdb_cursor_get(cursor, name, value, MDB_SET_RANGE);
    mdb_cursor_close(cursor);
    return rc;
}

bool eng_lmdb_begins(const MDB_val *name, const void *bytes, size_t length) {
    return name->mv_size >= length && memcmp(name->mv_data, bytes, length) == 0;
}

// Deletes what begins with the first `length` bytes of the key, from the key on.
int eng_lmdb_delete_from(eng_lmdb *l, table t, key k, size_t length) {
    MDB_val name, value;
    int rc;
    while ((rc = eng_lmdb_seek(l, t, k, &name, &value)) == 0 && eng_lmdb_begins(&name, k.bytes, length))
        if ((rc = mdb_del(l->txn, l->table[t], &name, NULL)) != 0)
            return rc;
    return rc == MDB_NOTFOUND ? 0 : rc;
}

eng_status eng_lmdb_failed(eng_lmdb *l, int rc, eng_error *error) {
    eng_status status = ENG_IO;
    if (rc == MDB_MAP_FULL || rc == MDB_TXN_FULL || rc == ENOSPC || rc == EDQUOT || rc == EFBIG)
        status = ENG_FULL;
    else if (rc == ENOMEM)
        status = ENG_NO_MEMORY;
    else if (rc == MDB_CORRUPTED || rc == MDB_PAGE_NOTFOUND || rc == MDB_INVALID || rc == MDB_VERSION_MISMATCH)
        status = ENG_FORMAT;
    eng_fail(error, status, "the store: %s", mdb_strerror(rc));
    if (l->store && error)
        eng_store_tell_fault(l->store, error->text);
    return status;
}

// ------------------------------------------------------------------------------------------------------------- records

int eng_lmdb_find(eng_lmdb *l, const unsigned char record[KEY], eng_store_head *head, found *what, eng_error *error) {
    MDB_val value;
    int rc = eng_lmdb_get(l, HEADS, eng_lmdb_key_of(record), &value);
    *what = ABSENT;
    if (rc)
        return rc == MDB_NOTFOUND ? 0 : rc;
    eng_store_meta of = {.kind = (eng_store_kind)record[0]};
    memcpy(of.id, record + 1, sizeof of.id);
    *what = eng_store_read_head(value.mv_data, value.mv_size, &of, head, error) == ENG_OK ? WHOLE : DAMAGED;
    return 0;
}

int eng_lmdb_forget_use(eng_lmdb *l, const unsigned char record[KEY]) {
    MDB_val value;
    int rc = eng_lmdb_get(l, USED, eng_lmdb_key_of(record), &value);
    if (rc)
        return rc == MDB_NOTFOUND ? 0 : rc;
    if (value.mv_size == 8 &&
        (rc = eng_lmdb_del(l, ORDER, eng_lmdb_number_key(eng_lmdb_number_at(value.mv_data), record))) != 0)
        return rc;
    return eng_lmdb_del(l, USED, eng_lmdb_key_of(record));
}

int eng_lmdb_note_use(eng_lmdb *l, const unsigned char record[KEY], uint64_t stamp) {
    unsigned char bytes[8];
    eng_lmdb_big_endian(bytes, stamp);
    int rc = eng_lmdb_forget_use(l, record);
    if (!rc)
        rc = eng_lmdb_put(l, USED, eng_lmdb_key_of(record), bytes, sizeof bytes);
    return rc ? rc : eng_lmdb_put(l, ORDER, eng_lmdb_number_key(stamp, record), "", 0);
}

// Everything of a record, whether its head can be believed or not; `owner` is who is known to own it.
int eng_lmdb_drop(eng_lmdb *l, const unsigned char record[KEY], const unsigned char *owner) {
    eng_store_head head;
    found what;
    int rc = eng_lmdb_find(l, record, &head, &what, NULL);
    if (!rc && what == WHOLE)
        rc = eng_lmdb_del(l, OWNERS, eng_lmdb_owner_key(head.owner, record));
    if (!rc && what == WHOLE && head.expires_ms)
        rc = eng_lmdb_del(l, EXPIRY, eng_lmdb_number_key((uint64_t)head.expires_ms, record));
    if (!rc && owner)
        rc = eng_lmdb_del(l, OWNERS, eng_lmdb_owner_key(owner, record));
    if (!rc)
        rc = eng_lmdb_delete_from(l, PIECES, eng_lmdb_key_of(record), KEY);
    if (!rc)
        rc = eng_lmdb_delete_from(l, JOURNAL, eng_lmdb_key_of(record), KEY);
    if (!rc)
        rc = eng_lmdb_forget_use(l, record);
    if (!rc)
        rc = eng_lmdb_del(l, HEADS, eng_lmdb_key_of(record));
    if (record[0] == ENG_STORE_SESSION)
        eng_store_lease_end(l->leases, record + 1);
    return rc;
}

int eng_lmdb_write_head(eng_lmdb *l, const unsigned char record[KEY], const eng_store_head *old,
                        const eng_store_head *next) {
    int rc = eng_lmdb_put(l, HEADS, eng_lmdb_key_of(record), next, sizeof *next);
    if (!rc && old && old->expires_ms && old->expires_ms != next->expires_ms)
        rc = eng_lmdb_del(l, EXPIRY, eng_lmdb_number_key((uint64_t)old->expires_ms, record));
    if (!rc && next->expires_ms)
        rc = eng_lmdb_put(l, EXPIRY, eng_lmdb_number_key((uint64_t)next->expires_ms, record), "", 0);
    return rc ? rc : eng_lmdb_put(l, OWNERS, eng_lmdb_owner_key(next->owner, record), "", 0);
}

// -------------------------------------------------------------------------------------------------------- transactions

int eng_lmdb_begin(eng_lmdb *l, bool write) {
    l->evicted = l->expired = 0;
    return mdb_txn_begin(l->env, NULL, write ? 0 : MDB_RDONLY, &l->txn);
}

int eng_lmdb_end(eng_lmdb *l, int rc, bool write) {
    if (rc || !write)
        mdb_txn_abort(l->txn);
    else
        rc = mdb_txn_commit(l->txn);
    l->txn = NULL;
    if (!rc)
        eng_store_tell_dropped(l->store, l->evicted, l->expired);
    return rc;
}
