// SPDX-License-Identifier: Apache-2.0
// Reads URL and key and makes transfer handles; see endpoint.h.
// A key that could break out of its header is refused.
#include "clients/cli/endpoint.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "clients/cli/cli.h"

static const char default_url[] = "http://127.0.0.1:8080";
enum { MAX_KEY = 4096, CONNECT_SECONDS = 30 };

static bool set_url(cli_endpoint *endpoint, const char *url) {
    if (strncmp(url, "unix:", 5) == 0) {
        endpoint->socket = strdup(url + 5);
        endpoint->base = strdup("http://localhost");
        if (url[5])
            return endpoint->socket && endpoint->base;
    } else if (strncmp(url, "http://", 7) == 0 || strncmp(url, "https://", 8) == 0) {
        size_t length = strlen(url);
        while (length > 8 && url[length - 1] == '/')
            length--;
        if (length > 11 && strncmp(url + length - 3, "/v1", 3) == 0)
            length -= 3;
        endpoint->base = strndup(url, length);
        if (length > 8)
            return endpoint->base;
    }
    cli_complain("\"%.200s\" is neither http://HOST:PORT nor https://HOST nor unix:PATH", url);
    return false;
}

static bool add_to(struct curl_slist **list, const char *header) {
    struct curl_slist *longer = curl_slist_append(*list, header);
    if (longer)
        *list = longer;
    else
        cli_complain("out of memory");
    return longer;
}

static bool add_header(cli_endpoint *endpoint, const char *header) {
    return add_to(&endpoint->headers, header) && add_to(&endpoint->byte_headers, header);
}

static bool set_key(cli_endpoint *endpoint, const char *key, const char *origin) {
    char header[MAX_KEY + 32];
    const size_t length = strlen(key);

    for (size_t i = 0; i < length; i++)
        if (key[i] <= ' ' || key[i] > '~') {
            cli_complain("%s: a key is printable and has no spaces", origin);
            return false;
        }
    if (length == 0 || length > MAX_KEY) {
        cli_complain("%s: a key has 1 to %d characters", origin, MAX_KEY);
        return false;
    }
    snprintf(header, sizeof header, "Authorization: Bearer %s", key);
    return add_header(endpoint, header);
}

static bool set_key_from_file(cli_endpoint *endpoint, const char *path) {
    char line[MAX_KEY + 3] = "";
    FILE *file = fopen(path, "re");

    if (!file) {
        cli_complain("%s: %s", path, strerror(errno));
        return false;
    }
    const bool read = fgets(line, sizeof line, file) || !ferror(file);
    const int fault = errno;
    fclose(file);
    if (!read) {
        cli_complain("%s: %s", path, strerror(fault));
        return false;
    }
    line[strcspn(line, "\r\n")] = '\0';
    return set_key(endpoint, line, path);
}

bool cli_endpoint_open(const char *url, const char *key_file, cli_endpoint *out) {
    const char *given = url ? url : getenv("MESA_URL"), *key = getenv("MESA_API_KEY");
    cli_endpoint endpoint = {0};

    if (curl_global_init(CURL_GLOBAL_DEFAULT)) {
        cli_complain("libcurl cannot be initialised");
        return false;
    }
    // No "Expect": it costs a round trip before each large body.
    bool ok = set_url(&endpoint, given && *given ? given : default_url) &&
              add_to(&endpoint.headers, "Content-Type: application/json") &&
              add_to(&endpoint.byte_headers, "Content-Type: application/octet-stream") &&
              add_header(&endpoint, "Expect:");
    if (ok && key_file)
        ok = set_key_from_file(&endpoint, key_file);
    else if (ok && key && *key)
        ok = set_key(&endpoint, key, "MESA_API_KEY");
    if (ok)
        *out = endpoint;
    else
        cli_endpoint_close(&endpoint);
    return ok;
}

void cli_endpoint_close(cli_endpoint *endpoint) {
    free(endpoint->base);
    free(endpoint->socket);
    curl_slist_free_all(endpoint->headers);
    curl_slist_free_all(endpoint->byte_headers);
    *endpoint = (cli_endpoint){0};
    curl_global_cleanup();
}

CURL *cli_endpoint_request(const cli_endpoint *endpoint, const cli_request *request, curl_write_callback write,
                           void *context) {
    const size_t size = strlen(endpoint->base) + strlen(request->path) + 1;
    char *url = malloc(size);
    CURL *easy = url ? curl_easy_init() : NULL;

    if (!easy) {
        free(url);
        return NULL;
    }
    snprintf(url, size, "%s%s", endpoint->base, request->path);
    CURLcode fault = curl_easy_setopt(easy, CURLOPT_URL, url);
    free(url);
    if (endpoint->socket)
        fault |= curl_easy_setopt(easy, CURLOPT_UNIX_SOCKET_PATH, endpoint->socket);
    fault |= curl_easy_setopt(easy, CURLOPT_PROTOCOLS_STR, "http,https");
    fault |= curl_easy_setopt(easy, CURLOPT_HTTP_VERSION, (long)CURL_HTTP_VERSION_1_1);
    fault |= curl_easy_setopt(easy, CURLOPT_HTTPHEADER, request->bytes ? endpoint->byte_headers : endpoint->headers);
    fault |= curl_easy_setopt(easy, CURLOPT_USERAGENT, "mesa/" MESA_VERSION);
    fault |= curl_easy_setopt(easy, CURLOPT_NOSIGNAL, 1L);
    fault |= curl_easy_setopt(easy, CURLOPT_CONNECTTIMEOUT, (long)CONNECT_SECONDS);
    fault |= curl_easy_setopt(easy, CURLOPT_TIMEOUT_MS, (long)(request->seconds * 1000));
    fault |= curl_easy_setopt(easy, CURLOPT_WRITEFUNCTION, write);
    fault |= curl_easy_setopt(easy, CURLOPT_WRITEDATA, context);
    if (request->body) {
        fault |= curl_easy_setopt(easy, CURLOPT_POSTFIELDS, request->body);
        fault |= curl_easy_setopt(easy, CURLOPT_POSTFIELDSIZE_LARGE, (curl_off_t)request->length);
    }
    if (request->method)
        fault |= curl_easy_setopt(easy, CURLOPT_CUSTOMREQUEST, request->method);
    if (fault) {
        curl_easy_cleanup(easy);
        return NULL;
    }
    return easy;
}
