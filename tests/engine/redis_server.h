// SPDX-License-Identifier: Apache-2.0
// A redis-server of a test case's own, on a unix socket in its temporary folder.
//
// It dies with the process that started it. Where no redis-server is installed nothing starts and the caller skips.
#ifndef TESTS_ENGINE_REDIS_SERVER_H
#define TESTS_ENGINE_REDIS_SERVER_H

#include <hiredis/hiredis.h>
#include <stdbool.h>
#include <sys/types.h>

// Options as "--name value ...", may be empty; the folder is kept from one start to the next. Waits until the server
// answers. False: there is none to start.
bool redis_server_start(const char *options);
void redis_server_kill(void); // -9, if it runs
void redis_server_signal(int number);
// As a fixture's end, in place of temp_folder_remove.
void redis_server_end(void);
const char *redis_server_place(void); // as a store's place
// A connection to look behind the store, the test's to free.
redisContext *redis_server_connect(void);
// One command, %s and %b as hiredis has them; fails the case on an error. The caller frees.
redisReply *redis_server_ask(redisContext *link, const char *format, ...);

// What a case on a server of its own begins with (check_main.h, store_calls.h).
#define ON_REDIS(options)             \
    place = redis_server_place();     \
    if (!redis_server_start(options)) \
    MESA_TEST_SKIP("no redis-server is installed")

#endif
