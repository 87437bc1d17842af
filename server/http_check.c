// SPDX-License-Identifier: Apache-2.0
// Checks on a request's header, before its body is read.
//
// The library takes the first of several Content-Length lines, takes Content-Length together with Transfer-Encoding,
// takes HTTP/1.1 without Host, keeps control characters in values, and some of its versions glue a value that stands on
// the next line (folding, which the standard forbids) to the header's name. Behind a proxy that decides otherwise each
// of them hides a second request in the first one's body, so all are refused here, and the connection is closed.
#include <string.h>
#include <strings.h>

#include "server/http_private.h"

typedef struct header_scan {
    unsigned lengths, encodings, hosts, types, authorizations;
    const char *length, *encoding, *type, *content_encoding, *authorization;
    size_t bytes;
    bool bad_name, bad_value, expects_continue, from_browser;
} header_scan;

static bool is_token(const char *name, size_t length) {
    static const char others[] = "!#$%&'*+-.^_`|~";

    for (size_t i = 0; i < length; i++) {
        const char c = name[i];
        const bool alphanumeric = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
        if (!alphanumeric && (c == '\0' || !strchr(others, c)))
            return false;
    }
    return length > 0;
}

// A name of the framing with something behind it: what is left of a folded header.
static bool is_folded(const char *name) {
    static const char length[] = "Content-Length", encoding[] = "Transfer-Encoding";
    return (strncasecmp(name, length, sizeof length - 1) == 0 && name[sizeof length - 1]) ||
           (strncasecmp(name, encoding, sizeof encoding - 1) == 0 && name[sizeof encoding - 1]);
}

static bool has_control(const char *value) {
    for (; *value; value++)
        if (((unsigned char)*value < ' ' && *value != '\t') || *value == 0x7f)
            return true;
    return false;
}

static enum MHD_Result scan_header(void *closure, enum MHD_ValueKind kind, const char *name, const char *value) {
    header_scan *scan = closure;
    (void)kind;

    if (!value)
        value = "";
    scan->bytes += strlen(name) + strlen(": ") + strlen(value) + strlen("\r\n");
    if (!is_token(name, strlen(name)) || is_folded(name))
        scan->bad_name = true;
    if (has_control(value))
        scan->bad_value = true;
    if (strcasecmp(name, "Content-Length") == 0) {
        scan->lengths++;
        scan->length = value;
    } else if (strcasecmp(name, "Transfer-Encoding") == 0) {
        scan->encodings++;
        scan->encoding = value;
    } else if (strcasecmp(name, "Host") == 0)
        scan->hosts++;
    else if (strcasecmp(name, "Content-Type") == 0) {
        scan->types++;
        scan->type = value;
    } else if (strcasecmp(name, "Content-Encoding") == 0)
        scan->content_encoding = value;
    else if (strcasecmp(name, "Authorization") == 0) {
        scan->authorizations++;
        scan->authorization = value;
    } else if (strcasecmp(name, "Expect") == 0)
        scan->expects_continue = true;
    else if (strcasecmp(name, "Origin") == 0)
        scan->from_browser = true;
    return MHD_YES;
}

// Digits only, below 2^63.
static bool read_length(const char *text, uint64_t *length) {
    *length = 0;
    if (!*text)
        return false;
    for (; *text; text++) {
        if (*text < '0' || *text > '9' || *length > (uint64_t)(INT64_MAX - (*text - '0')) / 10)
            return false;
        *length = *length * 10 + (uint64_t)(*text - '0');
    }
    return true;
}

static const char *find_framing_fault(const header_scan *scan, const char *version, srv_header_facts *facts) {
    if (scan->bad_name)
        return "a header's name is malformed";
    if (scan->bad_value)
        return "a header's value holds a control character";
    if (scan->lengths > 1)
        return "more than one Content-Length";
    if (scan->encodings > 1 || (scan->encoding && strcasecmp(scan->encoding, "chunked") != 0))
        return "the only Transfer-Encoding is chunked";
    if (scan->encoding && scan->length)
        return "Content-Length and Transfer-Encoding exclude each other";
    if (scan->encoding && strcmp(version, "HTTP/1.1") != 0)
        return "Transfer-Encoding needs HTTP/1.1";
    if (scan->length && !read_length(scan->length, &facts->content_length))
        return "Content-Length must be a decimal number below 2^63";
    if (scan->hosts > 1 || (scan->hosts == 0 && strcmp(version, "HTTP/1.1") == 0))
        return "exactly one Host is needed";
    return NULL;
}

// What follows "charset=" in a media type's parameters; NULL: not there.
static const char *find_charset(const char *parameters) {
    static const char name[] = "charset=";

    for (; *parameters; parameters++)
        if (strncasecmp(parameters, name, sizeof name - 1) == 0)
            return parameters + sizeof name - 1;
    return NULL;
}

// The media type is JSON in UTF-8. What curl sends for -d, and no type at all, pass too unless a browser sends them:
// browsers ask no permission for those, so any page could post them to a server on its visitor's machine.
static bool is_json(const header_scan *scan) {
    static const char json[] = "application/json", form[] = "application/x-www-form-urlencoded";
    const char *type = scan->type;

    if (scan->types > 1)
        return false;
    if (!type || strcasecmp(type, form) == 0)
        return !scan->from_browser;
    if (strncasecmp(type, json, sizeof json - 1) != 0)
        return false;
    const char *rest = type + sizeof json - 1;
    if (*rest != '\0' && *rest != ';' && *rest != ' ')
        return false;
    const char *charset = find_charset(rest);
    if (!charset)
        return true;
    return strncasecmp(charset, "utf-8", 5) == 0 || strncasecmp(charset, "\"utf-8\"", 7) == 0;
}

void srv_http_check_headers(struct MHD_Connection *mhd, const char *version, bool takes_body, srv_header_facts *facts,
                            srv_problem *problem) {
    header_scan scan = {0};

    *facts = (srv_header_facts){0};
    MHD_get_connection_values(mhd, MHD_HEADER_KIND, scan_header, &scan);
    facts->bytes = scan.bytes;
    const char *fault = find_framing_fault(&scan, version, facts);
    if (fault) {
        facts->dangerous = true;
        srv_refuse(problem, 400, "bad_request", NULL, "malformed request: %s", fault);
        return;
    }
    facts->chunked = scan.encoding != NULL;
    facts->expects_continue = scan.expects_continue;
    facts->authorizations = scan.authorizations;
    facts->authorization = scan.authorization;
    if (!takes_body)
        return;
    if (scan.content_encoding && strcasecmp(scan.content_encoding, "identity") != 0)
        srv_refuse(problem, 415, "unsupported_media_type", "Content-Encoding", "bodies must come without encoding");
    if (!is_json(&scan))
        srv_refuse(problem, 415, "unsupported_media_type", "Content-Type",
                   "the body must be application/json in UTF-8");
}

srv_key *srv_http_authorize(srv_keys *keys, const srv_header_facts *facts, srv_problem *problem) {
    static const char scheme[] = "Bearer ";
    const char *value = facts->authorization;

    if (facts->authorizations == 0) {
        srv_refuse(problem, 401, "missing_api_key", NULL, "a key is needed: Authorization: Bearer KEY");
        return NULL;
    }
    if (facts->authorizations > 1 || strncasecmp(value, scheme, sizeof scheme - 1) != 0) {
        srv_refuse(problem, 401, "invalid_api_key", NULL, "exactly one Authorization: Bearer KEY is needed");
        return NULL;
    }
    value += strspn(value + sizeof scheme - 1, " ") + sizeof scheme - 1;
    size_t length = strlen(value);
    while (length > 0 && (value[length - 1] == ' ' || value[length - 1] == '\t')) // the library leaves it there
        length--;
    srv_key *key = srv_keys_find(keys, value, length);
    if (!key)
        srv_refuse(problem, 401, "invalid_api_key", NULL, "the key is not known");
    return key;
}
