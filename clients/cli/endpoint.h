// SPDX-License-Identifier: Apache-2.0
// Where the server is and who asks: URL or unix socket, and the key.
//
// The key comes from a file or from MESA_API_KEY, never from the command line, which other users can read.
#ifndef CLIENTS_CLI_ENDPOINT_H
#define CLIENTS_CLI_ENDPOINT_H

#include <curl/curl.h>
#include <stdbool.h>

typedef struct cli_endpoint {
    char *base;                      // "http://host:port" without a slash at the end
    char *socket;                    // path of a unix socket, NULL: none
    struct curl_slist *headers;      // of JSON
    struct curl_slist *byte_headers; // of bytes as they are
} cli_endpoint;

typedef struct cli_request {
    const char *method; // NULL: GET, or POST where there is a body
    const char *path;
    const char *body; // borrowed until the transfer ends; NULL: none
    size_t length;
    bool bytes;     // the body is not JSON
    double seconds; // the whole transfer's time; 0: any
} cli_request;

// url NULL: MESA_URL, then the default. "http://host:port", "https://host", either with "/v1", or "unix:PATH".
// key_file NULL: MESA_API_KEY, then no key. false: the reason is on standard error. Initialises libcurl.
bool cli_endpoint_open(const char *url, const char *key_file, cli_endpoint *out);
void cli_endpoint_close(cli_endpoint *endpoint);

// A new handle for the request. NULL: no memory. What is answered goes to write with context.
CURL *cli_endpoint_request(const cli_endpoint *endpoint, const cli_request *request, curl_write_callback write,
                           void *context);

#endif
