// SPDX-License-Identifier: Apache-2.0
// Leases of a store that one process has to itself: who may write a session, by epochs that only grow.
//
// In memory, a sorted array; times are milliseconds of the monotonic clock. A lease that has run out is kept for a day,
// so that its holder's epoch goes on being good until another takes it.
#ifndef ENGINE_STORE_LEASE_H
#define ENGINE_STORE_LEASE_H

#include "engine/store_internal.h"

typedef struct eng_store_leases eng_store_leases;

eng_store_leases *eng_store_leases_create(void); // NULL: out of memory
void eng_store_leases_free(eng_store_leases *leases);
// ENG_STORE_LEASE of the request; writes epoch and lease_ms.
ENG_CHECKED eng_status eng_store_lease_take(eng_store_leases *leases, const eng_store_request *request, int64_t now,
                                            eng_store_reply *reply);
// ENG_STORE_WISHES of the request's holder.
ENG_CHECKED eng_status eng_store_lease_wishes(eng_store_leases *leases, const eng_store_request *request, int64_t now,
                                              eng_store_reply *reply);
void eng_store_lease_release(eng_store_leases *leases, const unsigned char id[ENG_STORE_ID_BYTES], uint64_t epoch);
void eng_store_lease_end(eng_store_leases *leases, const unsigned char id[ENG_STORE_ID_BYTES]); // whoever has it
bool eng_store_lease_holds(const eng_store_leases *leases, const unsigned char id[ENG_STORE_ID_BYTES], uint64_t epoch);
bool eng_store_lease_lives(const eng_store_leases *leases, const unsigned char id[ENG_STORE_ID_BYTES], int64_t now);
void eng_store_lease_sweep(eng_store_leases *leases, int64_t now);

#endif
