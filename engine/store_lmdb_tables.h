// SPDX-License-Identifier: Apache-2.0
// The tables of an LMDB store: keys in order, records over several tables, transactions.
//
// store_lmdb_tables.c works on the transaction under way (l->txn); what it returns is LMDB's code, 0 for success. For
// the store's thread, and for the one that opens it.
#ifndef ENGINE_STORE_LMDB_TABLES_H
#define ENGINE_STORE_LMDB_TABLES_H

#include <lmdb.h>

#include "engine/store_internal.h"
#include "engine/store_lease.h"

enum {
    KEY = 1 + ENG_STORE_ID_BYTES, // kind, id
    TOUCHES = 256
};

// Big-endian numbers keep the order of keys.
typedef enum table {
    HEADS,   // key -> head
    PIECES,  // key, generation, index -> bytes
    JOURNAL, // key, position -> frame and bytes
    OWNERS,  // owner, key -> nothing
    EXPIRY,  // time, key -> nothing
    USED,    // key of a snapshot -> stamp of its last use
    ORDER,   // stamp, key -> nothing
    TABLES
} table;

typedef struct touch {
    unsigned char key[KEY];
    uint64_t stamp;
} touch;

typedef struct eng_lmdb {
    eng_store *store;
    MDB_env *env;
    MDB_txn *txn;
    MDB_dbi table[TABLES];
    int lock;
    uint64_t budget, page;
    uint64_t generation, stamp; // the last ones given
    eng_store_leases *leases;
    touch touched[TOUCHES]; // not written yet
    int touches;
    uint64_t evicted, expired; // in this transaction
} eng_lmdb;

typedef struct key {
    unsigned char bytes[ENG_STORE_OWNER_BYTES + KEY + 16];
    size_t length;
} key;

typedef enum found { ABSENT, WHOLE, DAMAGED } found;

void eng_lmdb_big_endian(unsigned char *out, uint64_t value);
uint64_t eng_lmdb_number_at(const unsigned char *bytes);
void eng_lmdb_record_key(const eng_store_meta *meta, unsigned char out[KEY]);
key eng_lmdb_key_of(const unsigned char record[KEY]);
key eng_lmdb_key_with(const unsigned char record[KEY], uint64_t number);
key eng_lmdb_piece_key(const unsigned char record[KEY], uint64_t generation, uint32_t piece);
key eng_lmdb_number_key(uint64_t number, const unsigned char record[KEY]);
key eng_lmdb_owner_key(const unsigned char owner[ENG_STORE_OWNER_BYTES], const unsigned char record[KEY]);
int eng_lmdb_get(eng_lmdb *l, table t, key k, MDB_val *value);
int eng_lmdb_put(eng_lmdb *l, table t, key k, const void *bytes, size_t count);
int eng_lmdb_del(eng_lmdb *l, table t, key k);
int eng_lmdb_seek(eng_lmdb *l, table t, key k, MDB_val *name, MDB_val *value);
bool eng_lmdb_begins(const MDB_val *name, const void *bytes, size_t length);
int eng_lmdb_delete_from(eng_lmdb *l, table t, key k, size_t length);
eng_status eng_lmdb_failed(eng_lmdb *l, int rc, eng_error *error);
int eng_lmdb_find(eng_lmdb *l, const unsigned char record[KEY], eng_store_head *head, found *what, eng_error *error);
int eng_lmdb_forget_use(eng_lmdb *l, const unsigned char record[KEY]);
int eng_lmdb_note_use(eng_lmdb *l, const unsigned char record[KEY], uint64_t stamp);
int eng_lmdb_drop(eng_lmdb *l, const unsigned char record[KEY], const unsigned char *owner);
int eng_lmdb_write_head(eng_lmdb *l, const unsigned char record[KEY], const eng_store_head *old,
                        const eng_store_head *next);
int eng_lmdb_begin(eng_lmdb *l, bool write);
int eng_lmdb_end(eng_lmdb *l, int rc, bool write);

#endif
