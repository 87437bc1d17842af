// SPDX-License-Identifier: Apache-2.0
// Bearer keys: who may use the server, and how much.
//
// The file holds no key, only the SHA-256 of each, so that reading it gives nobody access. One key a line:
//
//     NAME SHA256HEX [rate=N] [max_requests=N] [models=NAME,NAME...]
//
// rate: requests a minute, a minute's worth at once; max_requests: at the same time; models: the only ones it may use.
// An empty line and one that begins with # say nothing. A presented key is hashed and compared with every row in
// constant time. Loaded on the main thread, constant afterwards, but for what srv_key_admit counts: loop thread.
#ifndef SERVER_KEYS_H
#define SERVER_KEYS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/status.h"
#include "server/limits.h"
#include "server/problem.h"

enum { SRV_DIGEST_BYTES = 32 };

typedef struct srv_key {
    char name[SRV_MAX_KEY_NAME + 1];
    uint8_t digest[SRV_DIGEST_BYTES];
    uint64_t id;          // 1 and up; from file to file the same key has the same
    int64_t rate;         // requests a minute; 0: unbounded
    int64_t max_requests; // at the same time; 0: unbounded
    char *models;         // ",NAME,NAME,"; NULL: all
    // Loop thread.
    double credit; // requests that may come now
    uint64_t credited_ms;
    int64_t running;
} srv_key;

typedef struct srv_keys srv_keys;

// *error names file and line. The caller owns *out.
ENG_CHECKED eng_status srv_keys_load(const char *path, srv_keys **out, eng_error *error);
// keys take the place of older, which they own from then on and keep to the end: requests may still be counted on them.
void srv_keys_replace(srv_keys *keys, srv_keys *older);
void srv_keys_free(srv_keys *keys); // NULL is accepted
size_t srv_keys_count(const srv_keys *keys);

// The row of a presented key; NULL: nobody's. The time it takes does not depend on how much of it is right.
srv_key *srv_keys_find(srv_keys *keys, const char *presented, size_t length);
// Counts a request that begins, or refuses it with 429 and the time after which it would pass.
bool srv_key_admit(srv_key *key, uint64_t now_ms, srv_problem *problem);
void srv_key_done(srv_key *key); // a request that was admitted has ended
// key NULL: there are no keys, everybody may. Any thread.
bool srv_key_may_use(const srv_key *key, const char *model);

// For people who make key files: reads a key (one line) from standard input and prints its hash. ENG_INVALID: too
// short.
ENG_CHECKED eng_status srv_keys_print_hash(eng_error *error);

#endif
