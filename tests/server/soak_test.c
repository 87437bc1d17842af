// SPDX-License-Identifier: Apache-2.0
// Many requests of every kind, most of them ending badly, leave the server as it was: memory, descriptors, threads,
// the engine's slots, gauges. And connections that only take up room leave service to the others.
//
// The number of requests is 10,000 (SOAK_REQUESTS; sanitizers run fewer unless it is given). What each client does is
// drawn from a seed, so that a failure can be run again (SOAK_SEED).
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <malloc.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tests/check_main.h"
#include "tests/server/fake_engine.h"
#include "tests/server/harness.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { SANITIZED = 1 };
#else
enum { SANITIZED = 0 };
#endif
enum { CLIENTS = 8 };

static fixture server;

static long from_environment(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text && *text ? atol(text) : otherwise;
}

// ---- what the process holds ----------------------------------------------------------------------------------------

static size_t entries(const char *folder) {
    DIR *opened = opendir(folder);
    size_t count = 0;
    ck_assert_ptr_nonnull(opened);
    while (readdir(opened))
        count++;
    closedir(opened);
    return count;
}

static size_t most_descriptors, most_threads;

// The connection that asked for the gauges may still be going, and a thread that was joined for the kernel.
static bool holds_no_more(void) {
    return entries("/proc/self/fd") <= most_descriptors && entries("/proc/self/task") <= most_threads;
}

// What malloc has given out and not got back, in KiB.
static long allocated_kib(void) {
    const struct mallinfo2 info = mallinfo2();
    return (long)((info.uordblks + info.hblkhd) / 1024);
}

// Resident and swapped anonymous memory in KiB.
static long memory_kib(void) {
    char line[256];
    long sum = 0, value;
    malloc_trim(0);
    FILE *file = fopen("/proc/self/status", "r");
    ck_assert_ptr_nonnull(file);
    while (fgets(line, sizeof line, file))
        if (sscanf(line, "RssAnon: %ld", &value) == 1 || sscanf(line, "VmSwap: %ld", &value) == 1)
            sum += value;
    fclose(file);
    return sum;
}

static bool gauges_are_zero(void) {
    static const char *const samples[] = {
        "mesa_rows{model=\"demo\"}", "mesa_queue_requests{model=\"demo\"}", "mesa_queue_tokens{model=\"demo\"}",
        "mesa_states{model=\"demo\",residence=\"device\"}", "mesa_memory_bytes{model=\"\",what=\"bodies\"}"};
    for (size_t i = 0; i < sizeof samples / sizeof *samples; i++)
        if (metric(&server, samples[i]) != 0)
            return false;
    return metric(&server, "mesa_connections") <= 1; // the one that asks
}

static void wait_until_idle(void) {
    for (int i = 0; i < 5000 && !gauges_are_zero(); i++)
        sleep_ms(20);
    if (gauges_are_zero())
        return;
    answer answer;
    fixture_get(&server, "/metrics", &answer);
    fputs(answer.body, stderr);
    ck_abort_msg("not everything has ended");
}

// ---- clients -------------------------------------------------------------------------------------------------------

typedef struct client {
    pthread_t thread;
    uint64_t random;
    long requests;
    int socket; // -1: none is open
    long answered, refused, left;
} client;

static uint64_t draw(client *client, uint64_t below) {
    client->random ^= client->random << 13;
    client->random ^= client->random >> 7;
    client->random ^= client->random << 17;
    return client->random % below;
}

static void leave(client *client) {
    const struct linger reset = {.l_onoff = 1};
    if (client->socket < 0)
        return;
    if (draw(client, 2)) // with a reset instead of an end
        setsockopt(client->socket, SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
    close(client->socket);
    client->socket = -1;
}

static bool put(client *client, const char *data, size_t length) {
    while (length) {
        const ssize_t sent = send(client->socket, data, length, MSG_NOSIGNAL);
        if (sent <= 0)
            return false;
        data += sent;
        length -= (size_t)sent;
    }
    return true;
}

static void connect_again(client *client, int receive_buffer) {
    const struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_port = htons((uint16_t)server.port), .sin_addr.s_addr = inet_addr(server.host)};
    const struct timeval patience = {.tv_sec = 100};
    leave(client);
    client->socket = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    ck_assert_int_ge(client->socket, 0);
    const int on = 1;
    setsockopt(client->socket, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    setsockopt(client->socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    if (receive_buffer)
        setsockopt(client->socket, SOL_SOCKET, SO_RCVBUF, &receive_buffer, sizeof receive_buffer);
    ck_assert_int_eq(connect(client->socket, (const struct sockaddr *)&address, sizeof address), 0);
}

// Reads one answer; its status, 0 if the connection ended before it was whole.
static int read_answer(client *client) {
    char data[65536];
    size_t length = 0;
    int status = 0;

    for (;;) {
        data[length] = '\0';
        const char *body = strstr(data, "\r\n\r\n"), *size = strstr(data, "Content-Length: ");
        if (body) {
            sscanf(data, "HTTP/1.1 %d", &status);
            body += 4;
            if (size && size < body && (size_t)(data + length - body) >= strtoul(size + 16, NULL, 10))
                return status;
            if ((!size || size > body) && strstr(body, "\r\n0\r\n\r\n"))
                return status;
        }
        if (length + 1 >= sizeof data) { // a long stream: its end is enough
            memmove(data + length / 2, data + length - 16, 16);
            length = length / 2 + 16;
        }
        const ssize_t got = recv(client->socket, data + length, sizeof data - length - 1, 0);
        if (got <= 0)
            return 0;
        length += (size_t)got;
    }
}

static const char *pick_body(client *client, char *out, size_t size) {
    static const char *const prompts[] = {
        "\"hello\"",
        "[72,105]",
        "[\"a\",\"b\"]",
        "[[1,2,3],[4]]",
        "\"\"",
        ("\"a prompt of more than one chunk, whose choices begin where its last one does: "
         "the quick brown fox jumps over the lazy dog\"")};
    static const char *const extras[] = {"",
                                         ",\"logprobs\":0",
                                         ",\"logprobs\":5",
                                         ",\"logprobs\":5,\"echo\":true",
                                         ",\"n\":3,\"temperature\":0.5",
                                         ",\"n\":3,\"logprobs\":2,\"echo\":true",
                                         ",\"best_of\":3",
                                         ",\"stop\":[\"ab\",\"q\"]",
                                         ",\"return_token_ids\":true,\"compute_details\":true",
                                         ",\"session\":null,\"user\":\"me\",\"unknown\":[1,{\"a\":2}]"};
    snprintf(out, size, "{\"prompt\":%s,\"max_tokens\":%d%s%s}", prompts[draw(client, 6)], (int)draw(client, 30),
             extras[draw(client, 10)], draw(client, 2) ? ",\"stream\":false" : "");
    return out;
}

static const char *pick_fault(client *client, char *out, size_t size) {
    static const char *const bodies[] = {"",
                                         "{",
                                         "{\"prompt\":5}",
                                         "{\"prompt\":\"a\xff\"}",
                                         "[1,2",
                                         "{\"temperature\":1e308}",
                                         "{\"logit_bias\":{\"x\":1}}",
                                         "{\"prompt\":\"a\",\"prompt\":\"b\"}",
                                         "{\"max_tokens\":-1}",
                                         "{\"model\":\"x\"}",
                                         "{\"prompt\":[[],[1]]}",
                                         "{\"prompt\":[300]}",
                                         "{\"stream\":true,\"n\":0}",
                                         "\"\\ud800\""};
    const size_t which = draw(client, 16);

    if (which < 14) {
        snprintf(out, size, "%s", bodies[which]);
        return out;
    }
    const size_t length = draw(client, size - 1); // noise, or nesting
    for (size_t i = 0; i < length; i++)
        out[i] = which == 14 ? (char)(1 + draw(client, 255)) : "[{\"a\":"[draw(client, 6)];
    out[length] = '\0';
    return out;
}

static bool send_request(client *client, const char *path, const char *body, size_t length) {
    char head[256];
    const int head_length = snprintf(head, sizeof head,
                                     "POST %s HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n"
                                     "Content-Length: %zu\r\n\r\n",
                                     path, strlen(body));
    return put(client, head, (size_t)head_length) && put(client, body, length);
}

// Sends, and must get one of two statuses; the connection is kept.
static void exchange(client *client, const char *path, const char *body, int wanted, int or) {
    if (client->socket < 0)
        connect_again(client, 0);
    ck_assert(send_request(client, path, body, strlen(body)));
    const int status = read_answer(client);
    ck_assert_msg(status == wanted || status == or || status == 429, "%d for %s", status, body);
    client->answered += status == 200;
    client->refused += status >= 400;
    if (status == 429)
        leave(client);
}

// Begins a long request and leaves at a random moment.
static void abandon(client *client, const char *fields) {
    char body[256], some[2000];
    snprintf(body, sizeof body, "{\"prompt\":\"hello\",\"max_tokens\":%d%s}", 2000 + (int)draw(client, 20000), fields);
    connect_again(client, 0);
    const size_t length = draw(client, 4) ? strlen(body) : draw(client, strlen(body));
    send_request(client, "/v1/completions", body, length);
    struct pollfd readable = {.fd = client->socket, .events = POLLIN};
    if (poll(&readable, 1, (int)draw(client, 20)) > 0)
        (void)!recv(client->socket, some, 1 + draw(client, sizeof some - 1), MSG_DONTWAIT);
    if (draw(client, 8) == 0)
        shutdown(client->socket, SHUT_WR);
    client->left++;
    leave(client);
}

// Takes a stream much slower than it is made, and leaves in the end.
static void read_slowly(client *client) {
    char some[64];
    connect_again(client, 1024);
    static const char body[] = "{\"prompt\":\"hello\",\"max_tokens\":60000,\"stream\":true,\"logprobs\":2}";
    ck_assert(send_request(client, "/v1/completions", body, sizeof body - 1));
    for (int i = 0; i < 5; i++) {
        if (recv(client->socket, some, sizeof some, 0) <= 0)
            break;
        sleep_ms(2);
    }
    client->left++;
    leave(client);
}

static void act(client *client) {
    char body[4096];

    switch (draw(client, 10)) {
    case 0:
    case 1:
    case 2:
        exchange(client, "/v1/completions", pick_body(client, body, sizeof body), 200, 200);
        break;
    case 3:
        snprintf(body, sizeof body, "{\"prompt\":\"hi\",\"max_tokens\":%d,\"stream\":true,\"logprobs\":1}",
                 1 + (int)draw(client, 20));
        exchange(client, "/v1/completions", body, 200, 200);
        break;
    case 4:
    case 5:
        exchange(client, draw(client, 4) ? "/v1/completions" : "/tokenize", pick_fault(client, body, sizeof body), 400,
                 404);
        break;
    case 6:
        exchange(client, "/tokenize", "{\"prompt\":\"some text\"}", 200, 200);
        break;
    case 7:
        abandon(client, ",\"stream\":true");
        break;
    case 8:
        abandon(client, draw(client, 2) ? ",\"n\":3" : ",\"logprobs\":3,\"echo\":true");
        break;
    default:
        if (draw(client, 10) == 0)
            read_slowly(client);
        else
            abandon(client, ",\"stream\":true,\"n\":2,\"stop\":\"never that\"");
    }
}

static void *run_client(void *context) {
    client *client = context;
    for (long i = 0; i < client->requests; i++)
        act(client);
    leave(client);
    return NULL;
}

static void run_clients(long requests, uint64_t seed, client *sum) {
    client clients[CLIENTS];
    for (uint64_t i = 0; i < CLIENTS; i++) {
        clients[i] = (client){
            .random = (seed + i + 1) * 0x9e3779b97f4a7c15ull | 1, .socket = -1, .requests = requests / CLIENTS};
        ck_assert_int_eq(pthread_create(&clients[i].thread, NULL, run_client, &clients[i]), 0);
    }
    *sum = (client){0};
    for (size_t i = 0; i < CLIENTS; i++) {
        pthread_join(clients[i].thread, NULL);
        sum->answered += clients[i].answered;
        sum->refused += clients[i].refused;
        sum->left += clients[i].left;
    }
}

START_TEST(nothing_is_left_behind) {
    const long requests = from_environment("SOAK_REQUESTS", SANITIZED ? 2000 : 10000);
    const uint64_t seed = (uint64_t)from_environment("SOAK_SEED", 1);
    client sum;

    fixture_start(&server, NULL);
    run_clients(requests / 5 + CLIENTS, seed + 1000, &sum); // whatever is made once is there
    wait_until_idle();
    most_descriptors = entries("/proc/self/fd");
    most_threads = entries("/proc/self/task");
    const long memory = memory_kib(), allocated = allocated_kib();
    const double began = now_s();
    run_clients(requests, seed, &sum);
    wait_until_idle();
    wait_engine_empty();
    printf("%ld answered, %ld refused, %ld left in %.1f s; memory %+ld KiB, allocated %+ld KiB\n", sum.answered,
           sum.refused, sum.left, now_s() - began, memory_kib() - memory, allocated_kib() - allocated);
    ck_assert(sum.answered > requests / 5 && sum.refused > requests / 20 && sum.left > requests / 20);
    wait_for(holds_no_more, "descriptors and threads are as many as before");
    if (!SANITIZED) {                                   // which have their own allocators and find leaks by themselves
        const long grown = allocated_kib() - allocated; // threads keep some of what they freed
        ck_assert_msg(grown < 512 + requests / 20, "%ld KiB more are allocated", grown);
        ck_assert_msg(memory_kib() - memory < 16384, "memory grew by %ld KiB", memory_kib() - memory);
    }
    ck_assert_double_gt(metric(&server, "mesa_cancelled_total{model=\"demo\"}"), 0);
    ck_assert_int_eq(atomic_load(&fake_engine()->paused), 0);
    answer answer;
    fixture_post(&server, "/v1/completions", "{\"prompt\":\"hi\",\"max_tokens\":5,\"seed\":1}", &answer);
    ck_assert_int_eq(answer.status, 200); // the same as ever
    char text[8];
    fake_engine_text(1, 0, 3, 5, text);
    ck_assert_ptr_nonnull(strstr(answer.body, text));
    answer_free(&answer);
    ck_assert_int_eq(fixture_stop(&server), 0);
}
END_TEST

// ---- connections that only take up room ----------------------------------------------------------------------------

enum { IDLE = 1000, DRIPS = 200 };

// One byte to each; those that are closed by the server are counted.
static size_t drip(const int *drips, size_t round) {
    static const char header[] = "POST /tokenize HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n";
    static const char body[] = "POST /tokenize HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n"
                               "Content-Length: 5000\r\n\r\n{";
    size_t closed = 0;

    for (size_t i = 0; i < DRIPS; i++) {
        char some[512];
        if (i % 2 && round == 0)
            (void)!send(drips[i], body, sizeof body - 1, MSG_NOSIGNAL);
        else
            (void)!send(drips[i], i % 2 ? " " : &header[round % (sizeof header - 1)], 1, MSG_NOSIGNAL);
        ssize_t got;
        while ((got = recv(drips[i], some, sizeof some, MSG_DONTWAIT)) > 0)
            ;
        closed += got == 0 || errno != EAGAIN;
    }
    return closed;
}

START_TEST(others_are_served) {
    static const char *const options[] = {
        "--connections", "2048", "--header-time", "3", "--body-time", "3", "--idle-time", "3600", NULL};
    struct rlimit limit;
    int *idle = calloc(IDLE, sizeof *idle), drips[DRIPS];
    double longest = 0;
    size_t count = 0, closed = 0;

    ck_assert_int_eq(getrlimit(RLIMIT_NOFILE, &limit), 0);
    if (limit.rlim_max < 3000) {
        free(idle);
        MESA_TEST_SKIP("only %lu descriptors", (unsigned long)limit.rlim_max);
    }
    limit.rlim_cur = limit.rlim_max < 8192 ? limit.rlim_max : 8192;
    ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &limit), 0);
    fixture_start(&server, options);
    for (size_t i = 0; i < IDLE; i++) {
        answer answer;
        idle[i] = client_connect(&server);
        client_puts(idle[i], "GET /health HTTP/1.1\r\nHost: t\r\n\r\n"); // kept alive, and silent from now on
        client_read(idle[i], &answer, false);
        answer_free(&answer);
    }
    for (size_t i = 0; i < DRIPS; i++)
        drips[i] = client_connect(&server);
    for (size_t round = 0; closed < DRIPS; round++) { // their time is over at some time
        answer answer;
        ck_assert_uint_lt(round, 10000);
        closed = drip(drips, round);
        const double asked = now_s();
        if (round % 2)
            fixture_get(&server, "/health", &answer);
        else
            fixture_post(&server, "/v1/completions", "{\"prompt\":\"hi\",\"max_tokens\":5}", &answer);
        longest = now_s() - asked > longest ? now_s() - asked : longest;
        count++;
        ck_assert_int_eq(answer.status, 200);
        answer_free(&answer);
        sleep_ms(10);
    }
    printf("%zu others served, within %.1f ms, until %d slow ones were closed\n", count, longest * 1000, DRIPS);
    for (size_t i = 0; i < IDLE; i++) {
        char byte;
        ck_assert_msg(recv(idle[i], &byte, 1, MSG_DONTWAIT) < 0 && errno == EAGAIN, "%zu was closed", i);
        close(idle[i]);
    }
    for (size_t i = 0; i < DRIPS; i++)
        close(drips[i]);
    free(idle);
    ck_assert_int_eq(fixture_stop(&server), 0);
}
END_TEST

// Megabytes with all their logprobs: whole for who reads them, and nobody's fault for who leaves in the middle.
START_TEST(large_answers_are_whole) {
    enum { CHOICES = 16, TOKENS = 800, TIMES = 24 };
    char body[128], *got = malloc(1 << 16);

    fixture_start(&server, NULL);
    for (int i = 0; i < TIMES; i++) {
        const bool stream = i % 2, leave_early = i % 4 > 1;
        snprintf(body, sizeof body, "{\"prompt\":\"hi\",\"n\":%d,\"max_tokens\":%d,\"seed\":%d,\"logprobs\":20%s}",
                 CHOICES, TOKENS, i, stream ? ",\"stream\":true" : "");
        answer answer;
        if (leave_early) {
            const int client = client_connect(&server);
            client_post(client, "/v1/completions", body);
            for (int left = i * 100000; left > 0;) {
                const ssize_t length = recv(client, got, 1 << 16, 0);
                ck_assert_int_gt(length, 0);
                left -= (int)length;
            }
            close(client);
            continue;
        }
        fixture_post(&server, "/v1/completions", body, &answer);
        ck_assert_int_eq(answer.status, 200);
        ck_assert_uint_gt(answer.length, 1 << 21);
        sse sse = {0};
        json_t *json = NULL;
        if (stream)
            sse_parse(&answer, &sse);
        else
            json = answer_json(&answer);
        for (unsigned k = 0; k < CHOICES; k++) {
            char wanted[TOKENS + 1];
            char *text = stream ? sse_text(&sse, (int)k)
                                : strdup(json_string_value(
                                      json_object_get(json_array_get(json_object_get(json, "choices"), k), "text")));
            fake_engine_text((unsigned)i, k, 3, TOKENS, wanted);
            ck_assert_str_eq(text, wanted);
            free(text);
        }
        if (stream)
            sse_free(&sse);
        json_decref(json);
        answer_free(&answer);
    }
    free(got);
    wait_engine_empty();
    ck_assert_int_eq(fixture_stop(&server), 0);
}
END_TEST

static Suite *soak_suite(void) {
    Suite *suite = suite_create("soak");
    TCase *tests = tcase_create("soak");
    tcase_add_test(tests, nothing_is_left_behind);
    tcase_add_test(tests, others_are_served);
    tcase_add_test(tests, large_answers_are_whole);
    tcase_set_timeout(tests, 280);
    suite_add_tcase(suite, tests);
    return suite;
}

MESA_TEST_MAIN(soak_suite)
