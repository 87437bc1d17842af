// SPDX-License-Identifier: Apache-2.0
// Where the server is and who asks: URL or unix socket, and the key.
//
// The key comes from a file or from MESA_API_KEY, never from the command line, which other users can read.
#ifndef CLIENTS_CLI_ENDPOINT_H
#define CLIENTS_CLI_ENDPOINT_H

#include <curl/curl.h>
#include <stdbool.h>

typedef struct cli_endpoint {
    char *base;   // "http://host:port" without a slash at the end
    char *socket; // path of a unix socket, NULL: none
    struct curl_slist *headers;
} cli_endpoint;

// url NULL: MESA_URL, then the default. "http://host:port", "https://host", either with "/v1", or "unix:PATH".
// key_file NULL: MESA_API_KEY, then no key. false: the reason is on standard error. Initialises libcurl.
bool cli_endpoint_open(const char *url, const char *key_file, cli_endpoint *out);
void cli_endpoint_close(cli_endpoint *endpoint);

// A new handle for GET path, or with body for POST (a JSON text, borrowed until the transfer ends). NULL: no memory.
// Body bytes go to write with context. seconds: the whole transfer's time, 0: any.
CURL *cli_endpoint_request(const cli_endpoint *endpoint, const char *path, const char *body, size_t length,
                           double seconds, curl_write_callback write, void *context);

#endif
