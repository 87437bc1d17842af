// SPDX-License-Identifier: Apache-2.0
// The key file's reader, the lookup, and each key's budget.
//
// The rate is a bucket that holds a minute's worth: an idle key may send that much at once, and afterwards one request
// whenever its share of the minute has passed. Main thread until the loop runs, then the loop thread.
#include "server/keys.h"

#include <ctype.h>
#include <gnutls/crypto.h>
#include <gnutls/gnutls.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/file.h"

enum { HEX_DIGITS = 2 * SRV_DIGEST_BYTES, MS_A_MINUTE = 60000 };

struct srv_keys {
    srv_key *rows;
    size_t count;
    srv_keys *older; // NULL: none
};

static bool hash(const char *text, size_t length, uint8_t *digest) {
    return gnutls_hash_fast(GNUTLS_DIG_SHA256, text, length, digest) == 0;
}

// ---- the file ------------------------------------------------------------------------------------------------------

static bool read_name(const char *text, char *name) {
    const size_t length = strlen(text);

    if (length > SRV_MAX_KEY_NAME)
        return false;
    for (size_t i = 0; i < length; i++)
        if (!isalnum((unsigned char)text[i]) && !strchr("._-@", text[i]))
            return false;
    memcpy(name, text, length + 1);
    return true;
}

static int hex_value(char digit) {
    if (digit >= '0' && digit <= '9')
        return digit - '0';
    if (digit >= 'a' && digit <= 'f')
        return digit - 'a' + 10;
    return digit >= 'A' && digit <= 'F' ? digit - 'A' + 10 : -1;
}

static bool read_digest(const char *text, uint8_t *digest) {
    if (strlen(text) != HEX_DIGITS)
        return false;
    for (size_t i = 0; i < SRV_DIGEST_BYTES; i++) {
        const int high = hex_value(text[2 * i]), low = hex_value(text[2 * i + 1]);
        if (high < 0 || low < 0)
            return false;
        digest[i] = (uint8_t)(high << 4 | low);
    }
    return true;
}

static bool read_count(const char *text, int64_t *out) {
    char *end;

    if (!isdigit((unsigned char)text[0]))
        return false;
    *out = strtoll(text, &end, 10);
    return *end == '\0' && *out >= 1 && *out <= SRV_MAX_KEY_LIMIT;
}

static const char *read_models(const char *text, srv_key *key) {
    const size_t length = strlen(text);

    if (length == 0)
        return "models= names no model";
    key->models = malloc(length + 3);
    if (!key->models)
        return "out of memory";
    snprintf(key->models, length + 3, ",%s,", text);
    return NULL;
}

// NULL, or what is wrong with "NAME=VALUE".
static const char *read_limit(const char *text, srv_key *key) {
    const char *equals = strchr(text, '=');
    const size_t length = equals ? (size_t)(equals - text) : 0;

    if (length == 4 && strncmp(text, "rate", length) == 0)
        return read_count(equals + 1, &key->rate) ? NULL : "rate= takes 1 to 1000000 requests a minute";
    if (length == 12 && strncmp(text, "max_requests", length) == 0)
        return read_count(equals + 1, &key->max_requests) ? NULL : "max_requests= takes 1 to 1000000";
    if (length == 6 && strncmp(text, "models", length) == 0 && !key->models)
        return read_models(equals + 1, key);
    return "the limits are rate=, max_requests= and models=";
}

// NULL, or what is wrong with the line. The line is cut into words.
static const char *read_line(char *line, srv_key *key) {
    char *rest = NULL;
    const char *name = strtok_r(line, " \t\r", &rest), *digest = strtok_r(NULL, " \t\r", &rest);

    if (!read_name(name, key->name))
        return "a name has up to 64 letters, digits and ._-@";
    if (!digest || !read_digest(digest, key->digest))
        return "the name must be followed by the 64 hexadecimal digits of the key's SHA-256";
    for (const char *word = strtok_r(NULL, " \t\r", &rest); word; word = strtok_r(NULL, " \t\r", &rest)) {
        const char *fault = read_limit(word, key);
        if (fault)
            return fault;
    }
    return NULL;
}

static const char *find_twin(const srv_keys *keys, const srv_key *key) {
    for (size_t i = 0; i < keys->count; i++) {
        if (strcmp(keys->rows[i].name, key->name) == 0)
            return "the name is there already";
        if (memcmp(keys->rows[i].digest, key->digest, SRV_DIGEST_BYTES) == 0)
            return "the key is there already under another name";
    }
    return NULL;
}

// Adds the line's key; an empty line and a comment have none.
static const char *add_line(srv_keys *keys, char *line) {
    line += strspn(line, " \t\r");
    if (*line == '\0' || *line == '#')
        return NULL;
    if (keys->count == SRV_MAX_KEYS)
        return "too many keys";
    srv_key *key = &keys->rows[keys->count];
    *key = (srv_key){0};
    const char *fault = read_line(line, key);
    if (!fault)
        fault = find_twin(keys, key);
    if (fault) {
        free(key->models);
        return fault;
    }
    key->credit = (double)key->rate;
    keys->count++;
    return NULL;
}

static eng_status parse(srv_keys *keys, const char *path, srv_buf *text, eng_error *error) {
    int number = 1;

    if (strlen(text->data) != text->length)
        return eng_fail(error, ENG_INVALID, "%s: the file holds a NUL", path);
    for (char *line = text->data, *next; line; line = next, number++) {
        next = strchr(line, '\n');
        if (next)
            *next++ = '\0';
        const char *fault = add_line(keys, line);
        if (fault)
            return eng_fail(error, ENG_INVALID, "%s:%d: %s", path, number, fault);
    }
    return keys->count ? ENG_OK : eng_fail(error, ENG_INVALID, "%s: no key in the file", path);
}

// What a key owns stays its own when its line moves, and is nobody's when it goes.
static void keep_ids(srv_keys *keys, const srv_keys *older) {
    uint64_t last = 0;

    for (const srv_keys *file = older; file; file = file->older)
        for (size_t i = 0; i < file->count; i++)
            last = file->rows[i].id > last ? file->rows[i].id : last;
    for (size_t k = 0; k < keys->count; k++) {
        uint64_t id = 0;
        for (const srv_keys *file = older; file && !id; file = file->older)
            for (size_t i = 0; i < file->count; i++)
                if (gnutls_memcmp(file->rows[i].digest, keys->rows[k].digest, SRV_DIGEST_BYTES) == 0)
                    id = file->rows[i].id;
        keys->rows[k].id = id ? id : ++last;
    }
}

static void shrink(srv_keys *keys) {
    srv_key *rows = reallocarray(keys->rows, keys->count, sizeof *rows);

    keys->rows = rows ? rows : keys->rows;
}

eng_status srv_keys_load(const char *path, srv_keys **out, eng_error *error) {
    srv_buf text;
    srv_keys *keys = calloc(1, sizeof *keys);
    srv_key *rows = calloc(SRV_MAX_KEYS, sizeof *rows);

    if (!keys || !rows) {
        free(keys);
        free(rows);
        return eng_fail(error, ENG_NO_MEMORY, "%s: out of memory for the keys", path);
    }
    keys->rows = rows;
    srv_buf_init(&text, SRV_MAX_KEY_FILE_BYTES);
    eng_status status = srv_file_read(path, &text, error);
    if (!status)
        status = parse(keys, path, &text, error);
    srv_buf_free(&text);
    if (status) {
        srv_keys_free(keys);
        return status;
    }
    shrink(keys); // they may stay to the end
    keep_ids(keys, NULL);
    *out = keys;
    return ENG_OK;
}

void srv_keys_replace(srv_keys *keys, srv_keys *older) {
    keep_ids(keys, older);
    keys->older = older;
}

void srv_keys_free(srv_keys *keys) {
    while (keys) {
        srv_keys *older = keys->older;
        for (size_t i = 0; i < keys->count; i++)
            free(keys->rows[i].models);
        free(keys->rows);
        free(keys);
        keys = older;
    }
}

size_t srv_keys_count(const srv_keys *keys) {
    return keys->count;
}

eng_status srv_keys_print_hash(eng_error *error) {
    char key[1024];
    uint8_t digest[SRV_DIGEST_BYTES];

    if (!fgets(key, sizeof key, stdin))
        return eng_fail(error, ENG_INVALID, "--hash-key: no key on standard input");
    const size_t length = strcspn(key, "\r\n");
    if (length < SRV_MIN_KEY_BYTES || length + 1 >= sizeof key)
        return eng_fail(error, ENG_INVALID, "--hash-key: a key has %d to 1000 bytes; openssl rand -hex 32 makes one",
                        SRV_MIN_KEY_BYTES);
    if (!hash(key, length, digest))
        return eng_fail(error, ENG_INTERNAL, "--hash-key: SHA-256 is not available");
    for (size_t i = 0; i < sizeof digest; i++)
        printf("%02x", digest[i]);
    puts("");
    return ENG_OK;
}

// ---- requests ------------------------------------------------------------------------------------------------------

srv_key *srv_keys_find(srv_keys *keys, const char *presented, size_t length) {
    uint8_t digest[SRV_DIGEST_BYTES];
    srv_key *found = NULL;

    if (!hash(presented, length, digest))
        return NULL;
    for (size_t i = 0; i < keys->count; i++)
        if (gnutls_memcmp(keys->rows[i].digest, digest, sizeof digest) == 0)
            found = &keys->rows[i];
    return found;
}

bool srv_key_admit(srv_key *key, uint64_t now_ms, srv_problem *problem) {
    if (key->max_requests && key->running >= key->max_requests) {
        srv_refuse(problem, 429, "too_many_requests", NULL, "this key may have %lld requests at the same time",
                   (long long)key->max_requests);
        return false;
    }
    if (key->rate) {
        const double rate = (double)key->rate / MS_A_MINUTE;
        if (key->credited_ms)
            key->credit = fmin((double)key->rate, key->credit + rate * (double)(now_ms - key->credited_ms));
        key->credited_ms = now_ms;
        if (key->credit < 1) {
            srv_refuse(problem, 429, "rate_limit_exceeded", NULL, "this key may send %lld requests a minute",
                       (long long)key->rate);
            problem->retry_after = (int)ceil((1 - key->credit) / rate / 1000);
            return false;
        }
        key->credit -= 1;
    }
    key->running++;
    return true;
}

void srv_key_done(srv_key *key) {
    key->running--;
}

bool srv_key_may_use(const srv_key *key, const char *model) {
    const size_t length = strlen(model);

    if (!key || !key->models)
        return true;
    for (const char *at = key->models; (at = strchr(at, ',')) != NULL && at[1]; at++)
        if (strncmp(at + 1, model, length) == 0 && at[1 + length] == ',')
            return true;
    return false;
}
