// SPDX-License-Identifier: Apache-2.0
// A store's way to Redis: places, what is no server, who may come in, settings that are told, a server that changes.
//
// Each case has a redis-server of its own, or something that pretends to be one.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "engine/store_redis.h"

#include <netinet/in.h>
#include <sys/socket.h>

#include "tests/engine/between.h"
#include "tests/engine/redis_server.h"
#include "tests/engine/store_calls.h"
#include "tests/engine/temp_folder.h"

enum { MIB = 1 << 20 };

// -------------------------------------------------------------------------------------------------------------- places

START_TEST(places) {
    eng_redis_place at;
    ck_assert_int_eq(eng_redis_read_place("redis://example.org", &at, NULL), ENG_OK);
    ck_assert(strcmp(at.host, "example.org") == 0 && at.port == 6379 && at.database == 0 && !at.password[0]);
    ck_assert_int_eq(eng_redis_read_place("redis://me:a%40b:c@[::1]:7000/12", &at, NULL), ENG_OK);
    ck_assert(strcmp(at.host, "::1") == 0 && at.port == 7000 && at.database == 12);
    ck_assert(strcmp(at.user, "me") == 0 && strcmp(at.password, "a@b:c") == 0);
    ck_assert_str_eq(at.name, "[::1]:7000");
    ck_assert_int_eq(eng_redis_read_place("redis://:p@ss@h/", &at, NULL), ENG_OK);
    ck_assert(strcmp(at.password, "p@ss") == 0 && !at.user[0] && strcmp(at.host, "h") == 0);
    ck_assert_int_eq(eng_redis_read_place("redis+unix:///run/r@dis.sock?db=3", &at, NULL), ENG_OK);
    ck_assert(strcmp(at.path, "/run/r@dis.sock") == 0 && at.database == 3 && !at.user[0]);
    ck_assert_int_eq(eng_redis_read_place("redis+unix://u:secret@/run/redis.sock", &at, NULL), ENG_OK);
    ck_assert(strcmp(at.path, "/run/redis.sock") == 0 && strcmp(at.password, "secret") == 0);
    ck_assert_ptr_null(strstr(at.name, "secret"));
    static const char *const wrong[] = {"redis://",
                                        "redis://:secret@",
                                        "redis://secret@h",
                                        "redis://u:@h",
                                        "redis://u:secret%0@h",
                                        "redis://u:secret%00@h",
                                        "redis://h:0",
                                        "redis://h:65536",
                                        "redis://h:1x",
                                        "redis://h/x",
                                        "redis://h/1/2",
                                        "redis://h?x",
                                        "redis://[::1",
                                        "redis+unix://run",
                                        "redis+unix:///a?x=1",
                                        "redis+unix:///a?db=",
                                        "redis://u:secret@h:99999999999"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        eng_error error = {0};
        ck_assert_msg(eng_redis_read_place(wrong[i], &at, &error) == ENG_INVALID, "%s", wrong[i]);
        ck_assert_msg(!strstr(error.text, "secret"), "%s", error.text);
    }
    ck_assert_int_eq(eng_redis_read_place("rediss://h", &at, NULL), ENG_UNSUPPORTED);
}
END_TEST

static void check_unusable(const char *text) {
    time_limit_ms = 200;
    start(64 * MIB);
    eng_status status = fetch(meta_of(ENG_STORE_PREFIX, 1, 1));
    for (int i = 0; i < 200 && status == ENG_IO && !strstr(last.error.text, text); i++) // the machine is slow
        status = fetch(meta_of(ENG_STORE_PREFIX, 1, 1));
    ck_assert_msg(status == ENG_IO && strstr(last.error.text, text), "%s: %s", text, last.error.text);
    eng_store_gauges gauges;
    eng_store_read_gauges(store, &gauges);
    ck_assert_uint_ge(gauges.failed, 1);
    stop();
}

START_TEST(what_is_no_server) {
    static const struct {
        const char *answer, *text;
    } kinds[] = {
        {NULL, "answer"},
        {"HTTP/1.1 400 Bad Request\r\n\r\n", "protocol"},
        {"-LOADING Redis is loading the dataset in memory\r\n", "loading"},
        {"-ERR max number of clients reached\r\n", "INFO"},
        {"+OK\r\n", "no Redis"},
        {"$3\r\nfoo\r\n", "older"},
        {"*100000000\r\n", "answer"},
        {"$99999999999999999999999\r\n", "protocol"},
    };
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        between b = {.answer = kinds[i].answer};
        place = between_start(&b);
        check_unusable(kinds[i].text);
        between_end(&b);
        ck_assert_int_ge(b.accepted, 1);
    }
    static char at[256];
    snprintf(at, sizeof at, "redis+unix://%s", temp_path("nothing.sock"));
    place = at;
    check_unusable("No such file");
    place = "redis://127.0.0.1:1";
    check_unusable("refused");
}
END_TEST

// What a server says of itself when it was well before.
START_TEST(errors_and_their_status) {
    static const struct {
        const char *text;
        eng_status status;
        bool waits; // for better times
    } answers[] = {
        {"-NOPERM this user has no permissions\r\n", ENG_IO, false},
        {"-WRONGTYPE Operation against a key holding the wrong kind of value\r\n", ENG_FORMAT, false},
        {"-MOVED 866 10.0.0.1:6379\r\n", ENG_UNSUPPORTED, false},
        {"-MISCONF Errors writing to the AOF file: No space left on device\r\n", ENG_FULL, false},
        {"-MISCONF Errors writing to the AOF file: Input/output error\r\n", ENG_IO, false},
        {"-OOM command not allowed when used memory > 'maxmemory'.\r\n", ENG_FULL, false},
        {"-LOADING Redis is loading the dataset in memory\r\n", ENG_IO, true},
        {"-BUSY Redis is busy running a script.\r\n", ENG_IO, true},
        {"-NOSCRIPT No matching script.\r\n", ENG_IO, false},
        {"-READONLY You can't write against a read only replica.\r\n", ENG_IO, true},
        {"+OK\r\n", ENG_IO, false},
        {":1\r\n", ENG_IO, false},
        {"$-1\r\n", ENG_IO, false},
        {"*0\r\n", ENG_IO, false},
        {"*1\r\n$2\r\nno\r\n", ENG_IO, false},
        {"*4\r\n$-1\r\n*-1\r\n:1\r\n$1\r\nx\r\n", ENG_IO, false},
    };
    ON_REDIS("");
    eng_store_meta meta = at_position(meta_of(ENG_STORE_SESSION, 1, 1), 1);
    for (size_t i = 0; i < sizeof answers / sizeof *answers; i++) {
        between b = {.forwards = true};
        place = between_start(&b);
        time_limit_ms = answers[i].waits ? 300 : 200000;
        start(64 * MIB);
        for (int n = 0; n < 500 && simple(ENG_STORE_USAGE, meta) != ENG_OK; n++) // until the machine is quick enough
            ;
        b.instead = answers[i].text;
        eng_status status = append(meta, 1, "x");
        ck_assert_msg(status == answers[i].status, "%s: %s", answers[i].text, last.error.text);
        for (eng_store_op op = ENG_STORE_GET; op <= ENG_STORE_USAGE; op++) {
            eng_store_request request = {.op = op, .meta = meta, .ttl_ms = 1000, .epoch = 1};
            if (op == ENG_STORE_FIND)
                request.entry = meta.id, request.entry_bytes = sizeof meta.id;
            if (!answers[i].waits)
                ck_assert_msg(call(request) != ENG_OK, "%s: %d", answers[i].text, (int)op);
        }
        stop();
        between_end(&b);
    }
}
END_TEST

// ----------------------------------------------------------------------------------------------------- who may come in

// A TCP socket of this machine; *port is its port. As long as it does not listen itself, another that may reuse the
// address can, and nobody is given the port by chance.
static int bind_tcp(int *port) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t length = sizeof address;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1;
    ck_assert(fd >= 0 && setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0);
    ck_assert_int_eq(bind(fd, (struct sockaddr *)&address, length), 0);
    ck_assert_int_eq(getsockname(fd, (struct sockaddr *)&address, &length), 0);
    *port = ntohs(address.sin_port);
    return fd;
}

// Whose queue is full: the system drops what would connect, as a host that is not there does.
START_TEST(an_address_where_nobody_answers) {
    static char at[64];
    int port, listener = bind_tcp(&port), waiting[8];
    ck_assert_int_eq(listen(listener, 0), 0);
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}, .sin_port = htons((uint16_t)port)};
    for (int i = 0; i < 8; i++) {
        waiting[i] = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
        (void)!connect(waiting[i], (struct sockaddr *)&address, sizeof address);
    }
    snprintf(at, sizeof at, "redis://127.0.0.1:%d", port);
    place = at;
    check_unusable("too long");
    for (int i = 0; i < 8; i++)
        close(waiting[i]);
    close(listener);
}
END_TEST

START_TEST(over_tcp) {
    static char at[64];
    char options[64];
    int port, kept = bind_tcp(&port);
    snprintf(options, sizeof options, "--port %d --bind 127.0.0.1", port);
    ON_REDIS(options);
    for (int i = 0; i < 2; i++) {
        snprintf(at, sizeof at, "redis://%s:%d/%d", i ? "localhost" : "127.0.0.1", port, i);
        place = at;
        start(64 * MIB);
        eng_store_meta meta = meta_of(ENG_STORE_SESSION, 1, 1);
        uint64_t epoch = lease_of(1, 1, 100000);
        ck_assert_int_eq(fetch(meta), ENG_NOT_FOUND); // the databases are apart
        ck_assert_int_eq(append(at_position(meta, 1), epoch, "x"), ENG_OK);
        ck_assert_int_eq(put_state(at_position(meta, 1), epoch, 3 * MIB, 0), ENG_OK);
        ck_assert_int_eq(fetch(meta), ENG_OK);
        check_state(1, 3 * MIB);
        stop();
    }
    close(kept);
}
END_TEST

static char logged[4096];

static void keep_log(void *context, eng_log_level level, const char *text) {
    (void)context;
    (void)level;
    size_t length = strlen(logged);
    snprintf(logged + length, sizeof logged - length, "%s\n", text);
}

static eng_status try_with(const char *user, const char *more, int32_t limit_ms) {
    static char at[512];
    snprintf(at, sizeof at, "redis+unix://%s%s/redis.sock%s", user, temp_folder(), more);
    eng_store_options how = {.place = at, .time_limit_ms = limit_ms, .log = keep_log};
    ck_assert_int_eq(eng_store_open(&how, &store, NULL), ENG_OK);
    ck_assert_int_eq(eng_store_client_open(store, &(eng_store_client_options){.requests = 2}, &client, NULL), ENG_OK);
    ck_assert_int_eq(pthread_create(&thread, NULL, live, store), 0);
    eng_status status = simple(ENG_STORE_USAGE, (eng_store_meta){0});
    stop();
    return status;
}

static void check_refused(const char *user, const char *more, const char *text) {
    eng_status status = try_with(user, more, 500);
    for (int i = 0; i < 200 && status == ENG_IO && !strstr(last.error.text, text); i++) // the machine is slow
        status = try_with(user, more, 500);
    ck_assert_msg(status == ENG_IO && strstr(last.error.text, text), "%s: %s", text, last.error.text);
}

START_TEST(users_and_passwords) {
    ON_REDIS("--requirepass right-one");
    ck_assert_int_eq(try_with(":right-one@", "", 200000), ENG_OK);
    ck_assert_int_eq(try_with("default:right-one@", "?db=3", 200000), ENG_OK);
    check_refused("", "", "password");
    check_refused("default:wrong-one@", "", "WRONGPASS");
    ck_assert_ptr_null(strstr(last.error.text, "wrong-one"));
    check_refused(":right-one@", "?db=99", "range");
    ck_assert_ptr_nonnull(strstr(logged, "appendonly is no"));
    ck_assert(!strstr(logged, "right-one") && !strstr(logged, "wrong-one"));
}
END_TEST

START_TEST(settings_that_are_told) {
    ON_REDIS("--appendonly yes --appendfsync always");
    ck_assert_int_eq(try_with("", "", 200000), ENG_OK);
    ck_assert_str_eq(logged, "");
    redisContext *link = redis_server_connect();
    freeReplyObject(redis_server_ask(link, "CONFIG SET appendfsync everysec maxmemory-policy allkeys-lru"));
    ck_assert_int_eq(try_with("", "", 200000), ENG_OK);
    ck_assert(strstr(logged, "appendfsync is not always") && strstr(logged, "noeviction"));
    freeReplyObject(redis_server_ask(link, "REPLICAOF 127.0.0.1 1"));
    check_refused("", "", "replica");
    redisFree(link);
}
END_TEST

// A user with no more rights than deploy/README.md tells to give.
START_TEST(a_user_with_few_rights) {
    ON_REDIS("");
    redisContext *link = redis_server_connect();
    freeReplyObject(redis_server_ask(link, "ACL SETUSER mesa on >secret ~{mesa}:* +@read +@write +@scripting "
                                           "+@connection +@transaction -@dangerous +time +info"));
    redisFree(link);
    static char at[512];
    snprintf(at, sizeof at, "redis+unix://mesa:secret@%s/redis.sock", temp_folder());
    place = at;
    start(16 * MIB);
    for (uint32_t i = 1; i < 20; i++) {
        uint64_t epoch = lease_of(i, 1, 10000);
        eng_store_meta meta = meta_of(ENG_STORE_SESSION, i, 1);
        ck_assert_msg(append(at_position(meta, 1), epoch, "x") == ENG_OK, "%s", last.error.text);
        ck_assert_int_eq(append(at_position(meta, 1), epoch, "x"), ENG_OK);
        ck_assert_int_eq(put_state(at_position(meta, 1), epoch, i % 2 ? 200 : 2 * MIB, 10000), ENG_OK);
        ck_assert_int_eq(put_state(meta_of(ENG_STORE_PREFIX, i, 1), 0, 2 * MIB, 0), ENG_OK);
        ck_assert_int_eq(fetch(meta_of(ENG_STORE_PREFIX, i, 1)), ENG_OK);
        ck_assert_int_eq(fetch(meta), ENG_OK);
        ck_assert_int_eq(call((eng_store_request){.op = ENG_STORE_RELEASE, .meta = meta, .epoch = epoch}), ENG_OK);
        ck_assert_int_eq(simple(ENG_STORE_LIST, meta), ENG_OK);
        ck_assert_int_eq(simple(i % 3 ? ENG_STORE_DELETE : ENG_STORE_EXPIRE, meta), ENG_OK);
    }
    stop();
}
END_TEST

START_TEST(a_server_that_changes) {
    ON_REDIS("");
    start(64 * MIB);
    eng_store_meta meta = meta_of(ENG_STORE_SESSION, 1, 1);
    uint64_t epoch = lease_of(1, 1, 100000);
    redisContext *link = redis_server_connect();
    for (int i = 1; i < 4; i++) {
        freeReplyObject(redis_server_ask(link, "SCRIPT FLUSH"));
        ck_assert_int_eq(append(at_position(meta, i), epoch, "x"), ENG_OK);
        freeReplyObject(redis_server_ask(link, "SCRIPT FLUSH"));
        ck_assert_int_eq(put_state(at_position(meta, i), epoch, 3 * MIB, 0), ENG_OK);
        freeReplyObject(redis_server_ask(link, "CLIENT KILL TYPE normal SKIPME yes"));
        ck_assert_int_eq(fetch(meta), ENG_OK);
        check_state(1, 3 * MIB);
    }
    freeReplyObject(redis_server_ask(link, "REPLICAOF 127.0.0.1 1")); // a failover, and back
    eng_store_request request = {.op = ENG_STORE_EXPIRE, .meta = meta, .ttl_ms = 100000};
    ck_assert_int_eq(eng_store_submit(client, &request, NULL), ENG_OK);
    nap(300000);
    ck_assert_ptr_null(eng_store_poll(client));
    eng_store_gauges gauges;
    eng_store_read_gauges(store, &gauges);
    ck_assert_uint_eq(gauges.queued, 1); // tried again and again, and not answered
    freeReplyObject(redis_server_ask(link, "REPLICAOF NO ONE"));
    eng_store_reply *reply = await();
    ck_assert_msg(reply->status == ENG_OK, "%s", reply->error.text);
    eng_store_done(client, reply);
    freeReplyObject(
        redis_server_ask(link, "DEL {mesa}:s0000000100000000000000000000000000000000000000000000000000000000"));
    freeReplyObject(
        redis_server_ask(link, "SET {mesa}:s0000000100000000000000000000000000000000000000000000000000000000 foreign"));
    ck_assert_int_eq(fetch(meta), ENG_FORMAT);
    redisFree(link);
    stop();
}
END_TEST

static Suite *store_redis_link_suite(void) {
    Suite *suite = suite_create("store_redis_link");
    TCase *cases = tcase_create("store_redis_link");
    tcase_add_checked_fixture(cases, temp_folder_make, redis_server_end);
    tcase_add_test(cases, places);
    tcase_add_test(cases, what_is_no_server);
    tcase_add_test(cases, an_address_where_nobody_answers);
    tcase_add_test(cases, over_tcp);
    tcase_add_test(cases, errors_and_their_status);
    tcase_add_test(cases, users_and_passwords);
    tcase_add_test(cases, settings_that_are_told);
    tcase_add_test(cases, a_user_with_few_rights);
    tcase_add_test(cases, a_server_that_changes);
    suite_add_tcase(suite, cases);
    return suite;
}

MESA_TEST_MAIN(store_redis_link_suite)
