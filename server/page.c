// SPDX-License-Identifier: Apache-2.0
// GET /: what this is, for somebody who opens the address in a browser. Plain, constant, without scripts.
// Loop thread.
#include "server/server.h"

static const char page[] =
    "<!doctype html>\n"
    "<html lang=\"en\"><head><meta charset=\"utf-8\"><title>mesa-server</title>\n"
    "<meta name=\"viewport\" content=\"width=device-width\"></head>\n"
    "<body>\n"
    "<h1>mesa-server " MESA_VERSION "</h1>\n"
    "<p>Serves recurrent-state language models over an OpenAI-compatible HTTP interface.</p>\n"
    "<ul>\n"
    "<li><a href=\"/health\">/health</a>, <a href=\"/health/ready\">/health/ready</a>: whether it runs, and is "
    "ready</li>\n"
    "<li><a href=\"/v1/models\">/v1/models</a>: the models, with their knobs</li>\n"
    "<li>POST /v1/completions: text from a prompt</li>\n"
    "<li>POST /v1/chat/completions: the next turn of a conversation</li>\n"
    "<li>POST /tokenize, POST /detokenize, <a href=\"/tokenizer_info\">/tokenizer_info</a></li>\n"
    "<li><a href=\"/openapi.json\">/openapi.json</a>: every field, its range and its meaning</li>\n"
    "<li><a href=\"/metrics\">/metrics</a>: figures for Prometheus</li>\n"
    "</ul>\n"
    "<p>Where the server has keys, all but this page and health need <code>Authorization: Bearer KEY</code>.</p>\n"
    "</body></html>\n";

void srv_handle_page(srv_exchange *exchange) {
    srv_buf text;

    srv_buf_init(&text, sizeof page);
    srv_buf_append(&text, page, sizeof page - 1);
    srv_exchange_reply_as(exchange, "text/html; charset=utf-8", &text);
}
