// SPDX-License-Identifier: Apache-2.0
// GET /openapi.json: the interface as a document, made when it is asked for.
//
// Requests are described by the tables that they are validated by, within the configuration's bounds; how large a token
// id may be is known once the models are. Answers are described here, beside response.c that writes them. Loop thread.
#include <string.h>

#include "server/json_writer.h"
#include "server/server.h"

// ---- answers -------------------------------------------------------------------------------------------------------

// Members of objects, one word each: NAME:KIND, or NAME-:KIND where the member may be missing. A kind is text, count,
// integer, number, flag, object, map (of numbers), [KIND] for a list, @NAME for another of these, =A|B for one of such
// texts; with ? behind it, it may be null.
typedef struct answer {
    const char *name, *members;
} answer;
static const answer answers[] = {
    {"fault", "message:text type:text param:text? code:text?"},
    {"error", "error:@fault"},
    {"logprobs", "tokens:[text] token_logprobs:[number?] top_logprobs:[map?] text_offset:[count]"},
    {"figures", "cg_steps_mean-:[number?] cg_steps_max-:[count?] cg_unconverged-:[count?] loops-:[count?]"},
    {"choice", "index:count text:text logprobs:@logprobs? finish_reason:=stop|length token_ids-:[@token_id] "
               "prompt_token_ids-:[@token_id] compute_details-:@figures"},
    {"compute", "cg_steps_mean-:number cg_steps_max-:count cg_unconverged-:count loops_mean-:number "
                "exit_histogram-:[count]"},
    {"computes", "prompt:@compute completion:@compute ignored:[text] degraded:flag"},
    {"prompt_details", "cached_tokens:count"},
    {"usage", "prompt_tokens:count completion_tokens:count total_tokens:count prompt_tokens_details:@prompt_details "
              "compute:@computes session-:@session_usage"},
    {"completion", "id:text object:=text_completion created:count model:text seed:integer choices:[@choice] "
                   "usage:@usage"},
    {"alternative", "token:text logprob:number bytes:[count]"},
    {"chat_token", "token:text logprob:number bytes:[count] top_logprobs:[@alternative]"},
    {"chat_logprobs", "content:[@chat_token] refusal:text?"},
    {"message", "role:=assistant content:text refusal:text?"},
    {"chat_choice", "index:count message:@message logprobs:@chat_logprobs? finish_reason:=stop|length "
                    "token_ids-:[@token_id] prompt_token_ids-:[@token_id] compute_details-:@figures"},
    {"chat_completion", "id:text object:=chat.completion created:count model:text seed:integer "
                        "choices:[@chat_choice] usage:@usage"},
    {"model", "id:text object:=model created:count owned_by:text max_model_len:count? meta:object?"},
    {"models", "object:=list data:[@model]"},
    {"model_health", "id:text state:=ready|loading|failed device:text?"},
    {"health", "status:=ok|loading|draining models:[@model_health] store:text?"},
    {"knobs", "cg_tolerance:number cg_max_steps:count cg_mode:text"},
    {"session", "id:text object:=session model:text? position:count state_bytes:count expires_at:count "
                "earliest-:count residence-:text? bytes-:count busy-:flag durable-:flag profile_changed-:flag "
                "digest-:text loosest-:@knobs"},
    {"sessions", "object:=list data:[@session]"},
    {"session_usage", "id:text position:count durable:flag profile_changed:flag"},
    {"tokens", "count:count max_model_len:count? tokens:[@token_id]"},
    {"text", "prompt:text"},
    {"tokenizer", "vocab_size:count bos_token:text? bos_token_id:count? eos_token:text? eos_token_id:count? "
                  "pad_token:text? add_bos_token:flag chat_template:text?"},
};

static void write_choices(srv_buf *out, const char *texts, size_t length) {
    srv_json_literal(out, "'enum':[");
    for (size_t at = 0; at < length;) {
        const char *bar = memchr(texts + at, '|', length - at);
        const size_t word = bar ? (size_t)(bar - texts) - at : length - at;
        srv_buf_puts(out, at ? "," : "");
        srv_json_string(out, texts + at, word);
        at += word + 1;
    }
    srv_buf_puts(out, "]");
}

static void write_simple_kind(srv_buf *out, const char *kind, size_t length) {
    static const struct {
        const char *name, *schema; // with ' for "
    } kinds[] = {
        {"text", "'type':'string'"},
        {"count", "'type':'integer','minimum':0"},
        {"integer", "'type':'integer'"},
        {"number", "'type':'number'"},
        {"flag", "'type':'boolean'"},
        {"object", "'type':'object'"},
        {"map", "'type':'object','additionalProperties':{'type':'number'}"},
    };
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (strlen(kinds[i].name) == length && memcmp(kinds[i].name, kind, length) == 0)
            srv_json_literal(out, kinds[i].schema);
}

// The schema of a kind, in braces.
static void write_kind(srv_buf *out, const char *kind, size_t length) {
    if (kind[length - 1] == '?') {
        srv_json_literal(out, "{'anyOf':[");
        write_kind(out, kind, length - 1);
        srv_json_literal(out, ",{'type':'null'}]}");
        return;
    }
    srv_buf_puts(out, "{");
    if (kind[0] == '[') {
        srv_json_literal(out, "'type':'array','items':");
        write_kind(out, kind + 1, length - 2);
    } else if (kind[0] == '@') {
        srv_buf_printf(out, "\"$ref\":\"#/components/schemas/%.*s\"", (int)length - 1, kind + 1);
    } else if (kind[0] == '=') {
        write_choices(out, kind + 1, length - 1);
    } else
        write_simple_kind(out, kind, length);
    srv_buf_puts(out, "}");
}

static void write_members(srv_buf *out, const char *members) {
    const char *separator = "";

    srv_json_literal(out, "{'type':'object','properties':{");
    for (const char *at = members; *at; at += strspn(at, " ")) {
        const size_t word = strcspn(at, " "), name = strcspn(at, ":-"), colon = strcspn(at, ":");
        srv_buf_puts(out, at == members ? "" : ",");
        srv_json_string(out, at, name);
        srv_buf_puts(out, ":");
        write_kind(out, at + colon + 1, word - colon - 1);
        at += word;
    }
    srv_json_literal(out, "},'required':[");
    for (const char *at = members; *at; at += strspn(at, " ")) {
        const size_t name = strcspn(at, ":-");
        if (at[name] == ':') {
            srv_buf_puts(out, separator);
            srv_json_string(out, at, name);
            separator = ",";
        }
        at += strcspn(at, " ");
    }
    srv_buf_puts(out, "]}");
}

// ---- requests ------------------------------------------------------------------------------------------------------

// What the JSON library takes where anything may stand: no NUL in a key.
static void write_json_limits(srv_buf *out) {
    srv_json_literal(out, "'key':{'type':'string','pattern':'^[^\\u0000]*$'},'anything':{'anyOf':["
                          "{'type':['string','boolean','number','null']},"
                          "{'type':'array','items':{'$ref':'#/components/schemas/anything'}},"
                          "{'type':'object','propertyNames':{'$ref':'#/components/schemas/key'},"
                          "'additionalProperties':{'$ref':'#/components/schemas/anything'}}]},");
}

// What all models take: ids of the smallest vocabulary, an empty text only where each has a BOS, as many prompts as a
// request may have.
static void write_prompt_parts(const srv_server *server, srv_buf *out) {
    int64_t vocabulary = INT32_MAX;
    bool bos = true;

    for (size_t i = 0; i < server->setup->model_count; i++) {
        const eng_engine *engine = srv_worker_engine(server->setup->models[i]->worker);
        if (!engine)
            continue;
        if (eng_info(engine)->vocab_size < vocabulary)
            vocabulary = eng_info(engine)->vocab_size;
        bos = bos && eng_info(engine)->bos_id >= 0;
    }
    srv_json_literal(out, "'token_id':{'type':'integer','minimum':0,'maximum':");
    srv_json_integer(out, vocabulary - 1);
    srv_json_literal(out, "},'prompt_text':{'type':'string'");
    srv_json_literal(out, bos ? "}" : ",'minLength':1}");
    srv_json_literal(out, ",'prompt_list':{'type':'array','minItems':1,'maxItems':");
    srv_json_integer(out, server->setup->bounds.max_prompts);
    srv_json_literal(out, "}");
}

static void write_schemas(const srv_server *server, srv_buf *out) {
    static const struct {
        const char *name;
        srv_request_kind kind;
    } requests[] = {{"completion_request", SRV_REQUEST_COMPLETION}, {"chat_request", SRV_REQUEST_CHAT},
                    {"session_request", SRV_REQUEST_SESSION},       {"fork_request", SRV_REQUEST_FORK},
                    {"rollback_request", SRV_REQUEST_ROLLBACK},     {"tokenize_request", SRV_REQUEST_TOKENIZE},
                    {"detokenize_request", SRV_REQUEST_DETOKENIZE}};

    srv_json_literal(out, "'schemas':{");
    write_json_limits(out);
    write_prompt_parts(server, out);
    for (size_t i = 0; i < sizeof requests / sizeof *requests; i++) {
        srv_buf_puts(out, ",");
        srv_json_text(out, requests[i].name);
        srv_buf_puts(out, ":");
        srv_request_write_schema(out, requests[i].kind, &server->setup->bounds);
    }
    for (size_t i = 0; i < sizeof answers / sizeof *answers; i++) {
        srv_buf_puts(out, ",");
        srv_json_text(out, answers[i].name);
        srv_buf_puts(out, ":");
        write_members(out, answers[i].members);
    }
    srv_buf_puts(out, "}");
}

// ---- paths ---------------------------------------------------------------------------------------------------------

#define CHAT_PATH "/v1/chat/completions"

typedef struct operation {
    const char *path, *method, *about;
    const char *request; // a schema's name, or a media type; NULL: no body
    const char *answer;  // a schema's name, or a media type; NULL: 204
    bool is_public;
    const char *statuses; // of refusals, with spaces between them
    const char *refusal;  // a schema's name
} operation;

static const operation operations[] = {
    {"/v1/completions", "post", "Text from a prompt", "completion_request", "completion", false,
     "400 401 403 404 408 409 413 415 422 429 431 500 503", "error"},
    {CHAT_PATH, "post", "The next turn of a conversation", "chat_request", "chat_completion", false,
     "400 401 403 404 408 413 415 422 429 431 500 503", "error"},
    {"/v1/models", "get", "The models, with their knobs", NULL, "models", false, "401", "error"},
    {"/v1/models/{id}", "get", "One model", NULL, "model", false, "401 404", "error"},
    {"/v1/sessions", "get", "The key's sessions", NULL, "sessions", false, "401", "error"},
    {"/v1/sessions", "post", "A session, with what it begins with; completions go on with it", "session_request",
     "session", false, "400 401 403 404 408 413 415 422 429 431 500 503", "error"},
    {"/v1/sessions/{id}", "get", "One session", NULL, "session", false, "401 404 503", "error"},
    {"/v1/sessions/{id}", "delete", "Drops it", NULL, NULL, false, "401 404 409 503", "error"},
    {"/v1/sessions/{id}/rollback", "post", "Back to an earlier position", "rollback_request", "session", false,
     "400 401 404 408 409 413 415 429 431 503", "error"},
    {"/v1/sessions/{id}/fork", "post", "A copy at the present or an earlier position", "fork_request", "session", false,
     "400 401 404 408 409 413 415 422 429 431 500 503", "error"},
    {"/v1/sessions/{id}/state", "get", "Its state as bytes", NULL, "application/octet-stream", false, "401 404 503",
     "error"},
    {"/v1/sessions/{id}/state", "put", "Makes it what the bytes are", "application/octet-stream", "session", false,
     "400 401 404 408 409 413 415 429 431 503", "error"},
    {"/tokenize", "post", "Text to token ids", "tokenize_request", "tokens", false,
     "400 401 403 404 408 413 415 429 431 503", "error"},
    {"/detokenize", "post", "Token ids to text", "detokenize_request", "text", false,
     "400 401 403 404 408 413 415 429 431 503", "error"},
    {"/tokenizer_info", "get", "Special tokens of the first model", NULL, "tokenizer", false, "401 403 503", "error"},
    {"/health", "get", "Whether the server runs", NULL, "health", true, "", NULL},
    {"/health/ready", "get", "Whether it takes requests: not while it loads or drains, nor with a device lost", NULL,
     "health", true, "503", "health"},
    {"/metrics", "get", "Figures in Prometheus' text exposition format", NULL, "text/plain", false, "401", "error"},
    {"/openapi.json", "get", "This document", NULL, "application/json", false, "401", "error"},
    {"/", "get", "What this is, for a browser", NULL, "text/html", true, "", NULL},
};

static void write_reference(srv_buf *out, const char *media, const char *schema) {
    srv_buf_printf(out, "\"content\":{\"%s\":{\"schema\":{\"$ref\":\"#/components/schemas/%s\"}}", media, schema);
}

// What makes or copies a session has only options.
static bool may_be_empty(const char *request) {
    return request && (strcmp(request, "session_request") == 0 || strcmp(request, "fork_request") == 0);
}

static void write_answer(srv_buf *out, const operation *row) {
    if (!row->answer) {
        srv_json_literal(out, "'204':{'description':'done'}");
        return;
    }
    const bool makes = strcmp(row->answer, "session") == 0 && may_be_empty(row->request);
    srv_json_literal(out, makes ? "'201':{'description':'made'," : "'200':{'description':'as asked',");
    if (strchr(row->answer, '/')) {
        srv_buf_printf(out, "\"content\":{\"%s\":{}}}", row->answer);
        return;
    }
    write_reference(out, "application/json", row->answer);
    if (strcmp(row->path, "/v1/completions") == 0 || strcmp(row->path, CHAT_PATH) == 0)
        srv_json_literal(out,
                         ",'text/event-stream':{'schema':{'type':'object','description':'with stream: an event',"
                         "'required':['data'],'properties':{'data':{'type':'string','description':'a completion "
                         "with a piece of one choice, or with the usage alone, or an error; at the end [DONE]'}}}}");
    srv_buf_puts(out, "}}");
}

static void write_operation(srv_buf *out, const operation *row, bool has_keys) {
    srv_buf_printf(out, "\"%s\":{\"summary\":", row->method);
    srv_json_text(out, row->about);
    if (strchr(row->path, '{'))
        srv_json_literal(out, ",'parameters':[{'name':'id','in':'path','required':true,'schema':{'type':'string',"
                              "'minLength':1}}]");
    if (has_keys && row->is_public)
        srv_json_literal(out, ",'security':[]");
    if (row->request) {
        srv_json_literal(out, may_be_empty(row->request) ? ",'requestBody':{'required':false,"
                                                         : ",'requestBody':{'required':true,");
        if (strchr(row->request, '/'))
            srv_buf_printf(out, "\"content\":{\"%s\":{}", row->request);
        else
            write_reference(out, "application/json", row->request);
        srv_buf_puts(out, "}}");
    }
    srv_json_literal(out, ",'responses':{");
    write_answer(out, row);
    for (const char *at = row->statuses; *at; at += strspn(at, " ")) {
        srv_buf_printf(out, ",\"%.3s\":{\"description\":\"refused\",", at);
        write_reference(out, "application/json", row->refusal);
        srv_buf_puts(out, "}}");
        at += 3;
    }
    srv_buf_puts(out, "}}");
}

// Whether any model has a chat template; without one every chat is refused.
static bool converses(const srv_server *server) {
    for (size_t i = 0; i < server->setup->model_count; i++) {
        const eng_engine *engine = srv_worker_engine(server->setup->models[i]->worker);
        if (engine && eng_info(engine)->chat_template)
            return true;
    }
    return false;
}

void srv_handle_openapi(srv_exchange *exchange) {
    const srv_server *server = exchange->server;
    const bool has_keys = server->keys != NULL;
    srv_buf json;

    srv_buf_init(&json, SRV_MAX_ANSWER_BYTES);
    srv_json_literal(&json, "{'openapi':'3.1.0','info':{'title':'mesa-server','version':'" MESA_VERSION
                            "','description':'Serves recurrent-state language models. Unknown fields of a request are "
                            "ignored, null counts as absent, a key twice is refused.'},'paths':{");
    for (size_t i = 0; i < sizeof operations / sizeof *operations; i++) {
        if (strcmp(operations[i].path, CHAT_PATH) == 0 && !converses(server))
            continue;
        const bool more = i && strcmp(operations[i].path, operations[i - 1].path) == 0;
        if (i)
            srv_buf_puts(&json, more ? "," : "},");
        if (!more) {
            srv_json_text(&json, operations[i].path);
            srv_buf_puts(&json, ":{");
        }
        write_operation(&json, &operations[i], has_keys);
    }
    srv_json_literal(&json, "}},'components':{");
    write_schemas(server, &json);
    if (has_keys)
        srv_json_literal(&json, ",'securitySchemes':{'bearer':{'type':'http','scheme':'bearer'}}");
    srv_json_literal(&json, has_keys ? "},'security':[{'bearer':[]}]}" : "}}");
    srv_exchange_reply(exchange, 200, &json);
}
