// SPDX-License-Identifier: Apache-2.0
// Where a Redis server is: redis://... and redis+unix://... taken apart.
//
// The one who reads the place is the one who knows its password: no error text repeats any part of what stands before
// the '@'.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/store_redis.h"

static int hex_digit(char c) {
    if (c >= '0' && c <= '9')
        return c - '0';
    if (c >= 'a' && c <= 'f')
        return c - 'a' + 10;
    return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

static bool decode(const char *text, size_t length, char *out, size_t size) {
    size_t at = 0;
    for (size_t i = 0; i < length; i++) {
        char c = text[i];
        if (c == '%') {
            if (i + 2 >= length || hex_digit(text[i + 1]) < 0 || hex_digit(text[i + 2]) < 0)
                return false;
            c = (char)(hex_digit(text[i + 1]) << 4 | hex_digit(text[i + 2]));
            i += 2;
        }
        if (c == 0 || at + 1 >= size)
            return false;
        out[at++] = c;
    }
    out[at] = 0;
    return true;
}

// Digits alone, 0 .. most.
static bool read_number(const char *text, size_t length, int most, int *out) {
    int value = 0;
    if (length == 0 || length > 9)
        return false;
    for (size_t i = 0; i < length; i++) {
        if (text[i] < '0' || text[i] > '9')
            return false;
        value = value * 10 + (text[i] - '0');
    }
    *out = value;
    return value <= most;
}

static eng_status read_user(const char *text, size_t length, eng_redis_place *out, eng_error *error) {
    const char *colon = memchr(text, ':', length);
    if (!colon)
        return eng_fail(error, ENG_INVALID, "a Redis store's place: USER:PASSWORD@ lacks the ':'");
    size_t user = (size_t)(colon - text);
    if (!decode(text, user, out->user, sizeof out->user) ||
        !decode(colon + 1, length - user - 1, out->password, sizeof out->password) || !out->password[0])
        return eng_fail(error, ENG_INVALID,
                        "a Redis store's place: user or password is empty, too long or has a bad %%XX");
    return ENG_OK;
}

// [HOST]:PORT/DB, HOST:PORT/DB; what lacks keeps its default.
static eng_status read_address(const char *text, eng_redis_place *out, eng_error *error) {
    const char *host = text, *end = text + strcspn(text, ":/?#"), *at = end;
    if (*text == '[') {
        host = text + 1;
        end = strchr(host, ']');
        if (!end)
            return eng_fail(error, ENG_INVALID, "a Redis store's place: '[' without ']'");
        at = end + 1;
    }
    size_t length = (size_t)(end - host);
    if (length == 0 || length >= sizeof out->host)
        return eng_fail(error, ENG_INVALID,
                        "a Redis store's place needs a host: redis://[USER:PASSWORD@]HOST[:PORT][/DB]");
    memcpy(out->host, host, length);
    if (*at == ':') {
        size_t digits = strcspn(++at, "/?#");
        if (!read_number(at, digits, 65535, &out->port) || out->port == 0)
            return eng_fail(error, ENG_INVALID, "a Redis store's place: the port is no number from 1 to 65535");
        at += digits;
    }
    if (*at == '/' && at[1]) {
        if (!read_number(at + 1, strlen(at + 1), 1 << 20, &out->database))
            return eng_fail(error, ENG_INVALID, "a Redis store's place: the database behind '/' is no number");
    } else if (*at && *at != '/') {
        return eng_fail(error, ENG_INVALID, "a Redis store's place ends with something unknown");
    }
    snprintf(out->name, sizeof out->name, strchr(out->host, ':') ? "[%s]:%d" : "%s:%d", out->host, out->port);
    return ENG_OK;
}

static eng_status read_path(const char *text, eng_redis_place *out, eng_error *error) {
    static const char option[] = "db=";
    size_t length = strcspn(text, "?");
    if (text[0] != '/' || length >= sizeof out->path)
        return eng_fail(error, ENG_INVALID, "a Redis store's socket needs a whole path of at most %zu bytes",
                        sizeof out->path - 1);
    memcpy(out->path, text, length);
    const char *rest = text + length;
    if (*rest && (strncmp(rest + 1, option, sizeof option - 1) != 0 ||
                  !read_number(rest + sizeof option, strlen(rest + sizeof option), 1 << 20, &out->database)))
        return eng_fail(error, ENG_INVALID, "a Redis store's socket may be followed by ?db=NUMBER alone");
    snprintf(out->name, sizeof out->name, "%s", out->path);
    return ENG_OK;
}

eng_status eng_redis_read_place(const char *text, eng_redis_place *out, eng_error *error) {
    static const char tcp[] = "redis://", local[] = "redis+unix://";
    memset(out, 0, sizeof *out);
    out->port = 6379;
    bool path = strncmp(text, local, sizeof local - 1) == 0;
    if (!path && strncmp(text, tcp, sizeof tcp - 1) != 0)
        return eng_fail(error, ENG_UNSUPPORTED,
                        "a store is a folder, redis://HOST or redis+unix:///PATH (TLS: by a tunnel); this is neither");
    text += path ? sizeof local - 1 : sizeof tcp - 1;
    const char *at = strrchr(text, '@');
    if (at && text[0] != '/') { // a path may hold one
        eng_status status = read_user(text, (size_t)(at - text), out, error);
        if (status != ENG_OK)
            return status;
        text = at + 1;
    }
    return path ? read_path(text, out, error) : read_address(text, out, error);
}
