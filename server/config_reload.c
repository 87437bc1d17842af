// SPDX-License-Identifier: Apache-2.0
// The configuration read again: from the same sources, and what of it cannot change in a running server.
//
// Addresses are bound, the library that holds connections is set up, and the store is opened once; whether there are
// keys and TLS decides who may come in at all. Such an option keeps its value, and is named. Loop thread.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/config_private.h"

static bool is_list(const srv_option *row) {
    return row->kind == SRV_OPTION_MODELS || row->kind == SRV_OPTION_LISTENERS;
}

static bool is_text(const srv_option *row) {
    return row->kind == SRV_OPTION_LISTENER || row->kind == SRV_OPTION_TEXT || row->kind == SRV_OPTION_PATH;
}

static size_t value_size(const srv_option *row) {
    return row->kind == SRV_OPTION_YES_NO ? sizeof(bool) : sizeof(int64_t);
}
_Static_assert(sizeof(double) == sizeof(int64_t), "numbers of either kind are copied alike");

static bool same_listeners(const srv_config *a, const srv_config *b) {
    if (a->listen_count != b->listen_count)
        return false;
    for (size_t i = 0; i < a->listen_count; i++)
        if (strcmp(a->listen[i], b->listen[i]) != 0)
            return false;
    return true;
}

// Whether the option is there in both or in neither, or has the same value.
static bool is_kept(const srv_option *row, const srv_config *a, const srv_config *b) {
    const void *at_a = (const char *)a + row->offset, *at_b = (const char *)b + row->offset;

    if (is_list(row))
        return same_listeners(a, b);
    if (!is_text(row))
        return memcmp(at_a, at_b, value_size(row)) == 0;
    const char *text_a = *(char *const *)at_a, *text_b = *(char *const *)at_b;
    if (!text_a || !text_b)
        return !text_a && !text_b;
    return row->kind == SRV_OPTION_PATH || strcmp(text_a, text_b) == 0;
}

static eng_status keep_listeners(srv_config *fresh, const srv_config *old) {
    while (fresh->listen_count)
        free(fresh->listen[--fresh->listen_count]);
    for (size_t i = 0; i < old->listen_count; i++) {
        char *copy = strdup(old->listen[i]);
        if (!copy)
            return ENG_NO_MEMORY;
        fresh->listen[fresh->listen_count++] = copy;
    }
    return ENG_OK;
}

static eng_status keep_value(const srv_option *row, srv_config *fresh, const srv_config *old) {
    void *to = (char *)fresh + row->offset;
    const void *from = (const char *)old + row->offset;

    if (is_list(row))
        return keep_listeners(fresh, old);
    if (!is_text(row)) {
        memcpy(to, from, value_size(row));
        return ENG_OK;
    }
    const char *text = *(char *const *)from;
    char *copy = text ? strdup(text) : NULL;
    if (text && !copy)
        return ENG_NO_MEMORY;
    free(*(char **)to);
    *(char **)to = copy;
    return ENG_OK;
}

bool srv_config_is_fixed(const char *name) {
    // Of the paths only whether there is one.
    static const char *const fixed[] = {"listen",      "admin_listen", "allow_anonymous", "keys",  "tls_cert",
                                        "tls_key",     "device",       "socket_mode",     "store", "store_budget",
                                        "store_lease", "connections",  "max_headers"};

    for (size_t i = 0; i < sizeof fixed / sizeof *fixed; i++)
        if (strcmp(name, fixed[i]) == 0)
            return true;
    return false;
}

eng_status srv_config_load_again(const srv_config *old, srv_config *fresh, eng_error *error) {
    srv_config_action action;

    return srv_config_load(fresh, old->argument_count, old->arguments, old->environment, &action, error);
}

eng_status srv_config_keep(const srv_config *old, srv_config *fresh, char *kept, size_t size, eng_error *error) {
    size_t length = 0;
    eng_status status = ENG_OK;

    if (size)
        kept[0] = '\0';
    for (size_t i = 0; i < srv_config_option_count && !status; i++) {
        const srv_option *row = &srv_config_options[i];
        if (!srv_config_is_fixed(row->name) || is_kept(row, fresh, old))
            continue;
        if (length < size)
            length += (size_t)snprintf(kept + length, size - length, "%s%s", length ? ", " : "", row->name);
        if (keep_value(row, fresh, old))
            status = eng_fail(error, ENG_NO_MEMORY, "out of memory for the configuration");
    }
    return status;
}
