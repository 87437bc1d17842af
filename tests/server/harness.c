// SPDX-License-Identifier: Apache-2.0
// The server under test in a thread, and a blocking HTTP client that decodes just enough to judge its answers.
// The test's thread is the client; nothing here is shared with the server but the fixture's constant fields.
#include "tests/server/harness.h"

#include <arpa/inet.h>
#include <check.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include "tests/server/fake_engine.h"

enum { PATIENCE_S = 100 };

void sleep_ms(int milliseconds) {
    const struct timespec time = {.tv_sec = milliseconds / 1000, .tv_nsec = milliseconds % 1000 * 1000000L};
    nanosleep(&time, NULL);
}

void wait_for(bool (*condition)(void), const char *what) {
    for (int i = 0; i < PATIENCE_S * 200; i++) {
        if (condition())
            return;
        sleep_ms(5);
    }
    ck_abort_msg("waited in vain: %s", what);
}

double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static int wanted; // of the wait that goes on

static bool enough_active(void) {
    return atomic_load(&fake_engine()->active) >= wanted;
}

void wait_engine_active(int choices) {
    wanted = choices;
    wait_for(enough_active, "the engine has the requests");
}

static bool enough_tokens(void) {
    return atomic_load(&fake_engine()->tokens) >= wanted;
}

void wait_engine_tokens(int tokens) {
    wanted = tokens;
    wait_for(enough_tokens, "the engine has drawn the tokens");
}

static bool engine_is_empty(void) {
    return atomic_load(&fake_engine()->active) == 0;
}

void wait_engine_empty(void) {
    wait_for(engine_is_empty, "the engine has no request");
}

// ---- server --------------------------------------------------------------------------------------------------------

static void *run_server(void *context) {
    fixture *fixture = context;
    fixture->exit_status = srv_server_run(fixture->server);
    return NULL;
}

void fixture_start_model(fixture *fixture, const char *model, const char *const *options) {
    const char *const first[] = {"mesa-server", "--model", model, "--listen", "127.0.0.1:0"};
    int count = 5;
    srv_config_action action;
    eng_error error = {0};

    memset(fixture, 0, sizeof *fixture);
    memcpy(fixture->arguments, first, sizeof first);
    for (; options && *options; options++)
        fixture->arguments[count++] = *options;
    ck_assert_msg(srv_config_load(&fixture->config, count, (char *const *)fixture->arguments, fixture->environment,
                                  &action, &error) == ENG_OK,
                  "%s", error.text);
    fixture_run(fixture);
}

void fixture_run(fixture *fixture) {
    eng_error error = {0};

    FILE *log_file = tmpfile();
    ck_assert_ptr_nonnull(log_file);
    fixture->log_file = dup(fileno(log_file));
    fclose(log_file);
    fixture->log = srv_log_create(fixture->log_file, ENG_LOG_DEBUG);
    ck_assert_ptr_nonnull(fixture->log);
    ck_assert_msg(srv_server_create(&fixture->config, fixture->log, &fixture->server, &error) == ENG_OK, "%s",
                  error.text);
    const char *address = srv_server_address(fixture->server, 0);
    address += strncmp(address, "https", 5) == 0;
    ck_assert_int_eq(sscanf(address + strlen("http"), "://%127[^:]:%d", fixture->host, &fixture->port), 2);
    ck_assert_int_eq(pthread_create(&fixture->thread, NULL, run_server, fixture), 0);
}

void fixture_wait(fixture *fixture) {
    for (int i = 0; i < PATIENCE_S * 200; i++) {
        answer answer;
        fixture_get(fixture, "/health/ready", &answer);
        const int status = answer.status;
        answer_free(&answer);
        if (status == 200)
            return;
        sleep_ms(5);
    }
    ck_abort_msg("the server does not become ready");
}

void fixture_start(fixture *fixture, const char *const *options) {
    fixture_start_model(fixture, "demo=/models/demo", options);
    fixture_wait(fixture);
}

int fixture_join(fixture *fixture) {
    pthread_join(fixture->thread, NULL);
    srv_server_free(fixture->server);
    srv_log_free(fixture->log);
    close(fixture->log_file);
    srv_config_free(&fixture->config);
    ck_assert_int_eq(atomic_load(&fake_engine()->active), 0);
    return fixture->exit_status;
}

int fixture_stop(fixture *fixture) {
    srv_server_stop(fixture->server);
    return fixture_join(fixture);
}

char *fixture_log(const fixture *fixture) {
    const off_t length = lseek(fixture->log_file, 0, SEEK_CUR);
    char *text = calloc(1, (size_t)length + 1);
    ck_assert_ptr_nonnull(text);
    ck_assert_int_eq(pread(fixture->log_file, text, (size_t)length, 0), length);
    return text;
}

// ---- client --------------------------------------------------------------------------------------------------------

int client_connect(const fixture *fixture) {
    return client_connect_port(fixture, fixture->port);
}

int fixture_port(const fixture *fixture, size_t index) {
    const char *address = srv_server_address(fixture->server, index);
    ck_assert_ptr_nonnull(address);
    return atoi(strrchr(address, ':') + 1);
}

int client_connect_port(const fixture *fixture, int port) {
    const struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = inet_addr(fixture->host)};
    const struct timeval patience = {.tv_sec = PATIENCE_S};
    const int client = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

    ck_assert_int_ge(client, 0);
    ck_assert_int_eq(setsockopt(client, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience), 0);
    ck_assert_int_eq(setsockopt(client, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience), 0);
    ck_assert_int_eq(connect(client, (const struct sockaddr *)&address, sizeof address), 0);
    return client;
}

void client_send(int client, const char *data, size_t length) {
    while (length) {
        const ssize_t sent = send(client, data, length, MSG_NOSIGNAL);
        ck_assert_msg(sent > 0, "send failed");
        data += sent;
        length -= (size_t)sent;
    }
}

void client_puts(int client, const char *text) {
    client_send(client, text, strlen(text));
}

void client_post(int client, const char *path, const char *body) {
    char head[512];

    snprintf(head, sizeof head,
             "POST %s HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n\r\n", path,
             strlen(body));
    client_puts(client, head);
    client_puts(client, body);
}

static bool read_byte(int client, char *byte) {
    return recv(client, byte, 1, 0) == 1;
}

static void read_exactly(int client, char *out, size_t length) {
    while (length) {
        const ssize_t got = recv(client, out, length, 0);
        ck_assert_msg(got > 0, "the connection ended in the middle of an answer");
        out += got;
        length -= (size_t)got;
    }
}

static size_t capacity_for(size_t length) {
    size_t capacity = 64;
    while (capacity <= length)
        capacity *= 2;
    return capacity;
}

// Appends to a NUL-terminated text of *length bytes whose memory grows by doubling.
static void append(char **text, size_t *length, const char *data, size_t added) {
    if (!*text || capacity_for(*length + added) != capacity_for(*length))
        *text = realloc(*text, capacity_for(*length + added));
    ck_assert_ptr_nonnull(*text);
    memcpy(*text + *length, data, added);
    *length += added;
    (*text)[*length] = '\0';
}

static void grow_body(answer *out, const char *data, size_t length) {
    append(&out->body, &out->length, data, length);
}

static void read_line(int client, char *line, size_t size) {
    size_t length = 0;

    while (length < 2 || memcmp(line + length - 2, "\r\n", 2) != 0) {
        ck_assert_uint_lt(length + 1, size);
        ck_assert_msg(read_byte(client, &line[length]), "the connection ended in the middle of a line");
        length++;
    }
    line[length - 2] = '\0';
}

static void read_chunks(int client, answer *out) {
    char line[64];

    for (;;) {
        read_line(client, line, sizeof line);
        const size_t length = strtoul(line, NULL, 16);
        char *chunk = malloc(length + 2);
        ck_assert_ptr_nonnull(chunk);
        read_exactly(client, chunk, length + 2); // and its line end
        grow_body(out, chunk, length);
        free(chunk);
        if (length == 0)
            return;
    }
}

static const char *find_header(const char *head, const char *name) {
    const size_t length = strlen(name);
    for (const char *line = strstr(head, "\r\n"); line; line = strstr(line + 2, "\r\n"))
        if (strncasecmp(line + 2, name, length) == 0)
            return line + 2 + length;
    return NULL;
}

void client_read(int client, answer *out, bool head_only) {
    size_t length = 0;

    memset(out, 0, sizeof *out);
    while (length < 4 || memcmp(out->head + length - 4, "\r\n\r\n", 4) != 0) {
        ck_assert_uint_lt(length + 1, sizeof out->head);
        ck_assert_msg(read_byte(client, &out->head[length]), "the connection ended in the head of an answer: %s",
                      out->head);
        length++;
    }
    ck_assert_int_eq(sscanf(out->head, "HTTP/1.%*d %d", &out->status), 1);
    if (out->status == 100) {
        client_read(client, out, head_only);
        return;
    }
    grow_body(out, "", 0);
    const char *content_length = find_header(out->head, "Content-Length: ");
    out->chunked = answer_has(out, "Transfer-Encoding: chunked");
    out->closed = answer_has(out, "Connection: close");
    if (head_only)
        return;
    if (out->chunked)
        read_chunks(client, out);
    else if (content_length) {
        const size_t body = strtoul(content_length, NULL, 10);
        char *data = malloc(body + 1);
        read_exactly(client, data, body);
        grow_body(out, data, body);
        free(data);
    } else {
        char byte;
        while (read_byte(client, &byte))
            grow_body(out, &byte, 1);
        out->closed = true;
    }
}

void client_read_until(int client, const char *needle, char *text, size_t size) {
    size_t length = strlen(text);

    while (!strstr(text, needle)) {
        ck_assert_uint_lt(length + 1, size);
        ck_assert_msg(read_byte(client, &text[length]), "ended before %s: %s", needle, text);
        text[++length] = '\0';
    }
}

bool client_open(int client, int milliseconds) {
    struct pollfd poll_of = {.fd = client, .events = POLLIN};
    char data[4096];

    for (;;) {
        if (poll(&poll_of, 1, milliseconds) <= 0)
            return true;
        if (recv(client, data, sizeof data, 0) <= 0)
            return false;
    }
}

bool client_closed(int client) {
    return !client_open(client, PATIENCE_S * 1000);
}

void answer_free(answer *answer) {
    free(answer->body);
    answer->body = NULL;
}

bool answer_has(const answer *answer, const char *header) {
    const size_t length = strlen(header);
    for (const char *line = strstr(answer->head, "\r\n"); line; line = strstr(line + 2, "\r\n"))
        if (strncasecmp(line + 2, header, length) == 0)
            return true;
    return false;
}

void fixture_post(const fixture *fixture, const char *path, const char *body, answer *out) {
    const int client = client_connect(fixture);
    client_post(client, path, body);
    client_read(client, out, false);
    close(client);
}

void client_ask(int client, const char *method, const char *path, const char *headers, const char *body) {
    char head[2048];
    const int length =
        snprintf(head, sizeof head, "%s %s HTTP/1.1\r\nHost: test\r\n%sContent-Type: application/json\r\n", method,
                 path, headers);
    ck_assert_int_lt(length, (int)sizeof head);
    client_puts(client, head);
    if (body) {
        snprintf(head, sizeof head, "Content-Length: %zu\r\n", strlen(body));
        client_puts(client, head);
    }
    client_puts(client, "\r\n");
    if (body)
        client_puts(client, body);
}

void fixture_ask(const fixture *fixture, const char *method, const char *path, const char *headers, const char *body,
                 answer *out) {
    const int client = client_connect(fixture);
    client_ask(client, method, path, headers, body);
    client_read(client, out, strcmp(method, "HEAD") == 0);
    close(client);
}

double metric(const fixture *fixture, const char *sample) {
    const size_t length = strlen(sample);
    double value = -1;
    answer answer;

    fixture_get(fixture, "/metrics", &answer);
    ck_assert_msg(answer.status == 200, "%d: %s", answer.status, answer.body);
    for (const char *line = answer.body; line && value < 0; line = strchr(line, '\n'), line += line != NULL)
        if (strncmp(line, sample, length) == 0 && line[length] == ' ')
            value = strtod(line + length, NULL);
    answer_free(&answer);
    return value;
}

void fixture_get(const fixture *fixture, const char *path, answer *out) {
    char head[1024];
    const int client = client_connect(fixture);

    snprintf(head, sizeof head, "GET %s HTTP/1.1\r\nHost: test\r\n\r\n", path);
    client_puts(client, head);
    client_read(client, out, false);
    close(client);
}

json_t *answer_json(const answer *answer) {
    json_error_t error;
    json_t *json = json_loadb(answer->body, answer->length, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, &error);
    ck_assert_msg(json != NULL, "not JSON: %s in %s", error.text, answer->body);
    return json;
}

void expect_error(const answer *answer, int status, const char *param, const char *code) {
    ck_assert_msg(answer->status == status, "status %d, want %d: %s", answer->status, status, answer->body);
    json_t *json = answer_json(answer), *error = json_object_get(json, "error");
    ck_assert(json_is_object(error));
    ck_assert(json_is_string(json_object_get(error, "message")));
    ck_assert(json_is_string(json_object_get(error, "type")));
    const char *found_param = json_string_value(json_object_get(error, "param"));
    const char *found_code = json_string_value(json_object_get(error, "code"));
    ck_assert_msg(strcmp(found_param ? found_param : "", param ? param : "") == 0, "param %s: %s", found_param,
                  answer->body);
    if (code)
        ck_assert_str_eq(found_code, code);
    json_decref(json);
}

// ---- server-sent events --------------------------------------------------------------------------------------------

void sse_parse(const answer *answer, sse *out) {
    const char *at = answer->body;

    ck_assert(answer_has(answer, "Content-Type: text/event-stream"));
    *out = (sse){.events = json_array()};
    while (*at) {
        const char *end = strchr(at, '\n'); // strstr would look at the whole rest each time
        while (end && end[1] != '\n')
            end = strchr(end + 1, '\n');
        ck_assert_msg(end != NULL, "an event without its blank line: %s", at);
        ck_assert_msg(!out->done, "something after [DONE]: %s", at);
        const size_t length = (size_t)(end - at);
        if (at[0] != ':') {
            ck_assert_msg(strncmp(at, "data: ", 6) == 0, "not data: %s", at);
            if (length == 12 && strncmp(at, "data: [DONE]", 12) == 0)
                out->done = true;
            else {
                json_t *event = json_loadb(at + 6, length - 6, JSON_REJECT_DUPLICATES, NULL);
                ck_assert_msg(event != NULL, "an event that is not JSON: %s", at);
                json_array_append_new(out->events, event);
            }
        }
        at = end + 2;
    }
}

void sse_free(sse *sse) {
    json_decref(sse->events);
}

char *sse_text(const sse *sse, int index) {
    char *text = NULL;
    size_t i, k, length = 0;
    json_t *event, *choice;

    append(&text, &length, "", 0);
    json_array_foreach(sse->events, i, event) {
        json_array_foreach(json_object_get(event, "choices"), k, choice) {
            if (json_integer_value(json_object_get(choice, "index")) != index)
                continue;
            const char *piece = json_string_value(json_object_get(choice, "text"));
            ck_assert_ptr_nonnull(piece);
            append(&text, &length, piece, strlen(piece));
        }
    }
    return text;
}
