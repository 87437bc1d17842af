// SPDX-License-Identifier: Apache-2.0
// The tables of request fields, and bodies checked against them.
//
// A body is bounded three times before the JSON library sees it or allocates for it: bytes (by the HTTP files), values
// (counted here), and depth (the library's own 2048). The library's error texts quote the body, so only its code and
// position are used. Runs on the pool's threads; shares nothing.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "server/request_fields.h"

// ---- the tables ----------------------------------------------------------------------------------------------------

#define IN(member) offsetof(srv_request, member)
// A list of token ids, with more members of its schema. token_id is a component of the document (openapi.c).
#define IDS(more) "'type':'array','items':{'$ref':'#/components/schemas/token_id'}" more
// An object may hold more than its properties.
#define OPEN_OBJECT                                                                                             \
    "'propertyNames':{'$ref':'#/components/schemas/key'},'additionalProperties':{'$ref':'#/components/schemas/" \
    "anything'}"
#define FIELD(name_, type_, set_, offset_, low_, high_, fallback_, about_, ...)                   \
    {                                                                                             \
        .name = name_, .type = type_, .set = set_, .offset = offset_, .low = low_, .high = high_, \
        .fallback = fallback_, .about = about_, __VA_ARGS__                                       \
    }
#define MODEL(offset) \
    FIELD("model", "string", srv_set_model, offset, 0, 0, "null", "which model; absent: the server's first", )
#define ADD_SPECIAL_TOKENS                                                                     \
    FIELD("add_special_tokens", "boolean", srv_set_bool, IN(add_special_tokens), 0, 0, "true", \
          "put the tokenizer's BOS before texts", )
#define UNBUILT(name, set, fallback, schema_) \
    FIELD(name, NULL, set, 0, 0, 0, fallback, "not built: only its neutral value", .schema = schema_)

// How accurately it is computed.
static const srv_field knob_fields[] = {
    FIELD("cg_tolerance", "number", srv_set_float, IN(knobs.cg_tolerance), 0, 1, "null",
          "relative residual at which each Mesa head stops; 0: exact", .bound = SRV_BOUND_CG_TOLERANCE,
          .given = SRV_GIVEN_CG_TOLERANCE),
    FIELD("cg_max_steps", "integer", srv_set_int32, IN(knobs.cg_max_steps), 0, SRV_MAX_CG_STEPS, "null",
          "upper bound of solver steps", .bound = SRV_BOUND_CG_STEPS, .given = SRV_GIVEN_CG_MAX_STEPS),
    FIELD("cg_mode", NULL, srv_set_cg_mode, IN(knobs.cg_mode), 0, 0, "\"tolerance\"", "what ends a solve",
          .schema = "'enum':['tolerance','steps','exact']", .given = SRV_GIVEN_CG_MODE),
    FIELD("exit_threshold", "number", srv_set_float, IN(knobs.exit_threshold), 0, 1, "null",
          "looped models: cumulative exit probability at which a token's output is read",
          .given = SRV_GIVEN_EXIT_THRESHOLD),
    FIELD("max_loops", "integer", srv_set_int32, IN(knobs.max_loops), 1, SRV_MAX_LOOPS, "null",
          "looped models: upper bound of loops", .bound = SRV_BOUND_LOOPS, .given = SRV_GIVEN_MAX_LOOPS),
    FIELD("on_unconverged", NULL, srv_set_on_unconverged, IN(knobs.fail_unconverged), 0, 0, "\"accept\"",
          "what follows when a solve hits its bound", .schema = "'enum':['accept','error']",
          .given = SRV_GIVEN_ON_UNCONVERGED),
    FIELD("degrade", NULL, srv_set_degrade, IN(knobs.degrade), 0, 0, "{}",
          "how far the solver may be loosened when much waits: up to this cg_tolerance, down to this cg_max_steps and "
          "exit_threshold; usage.compute.degraded says whether it was",
          .schema = "'type':'object','properties':{'cg_tolerance':{'type':['number','null'],'minimum':0,'maximum':1},"
                    "'cg_max_steps':{'type':['integer','null'],'minimum':0,'maximum':256},"
                    "'exit_threshold':{'type':['number','null'],'minimum':0,'maximum':1}}",
          .given = SRV_GIVEN_DEGRADE),
};
static const srv_field_table knobs = {knob_fields, sizeof knob_fields / sizeof *knob_fields, NULL, NULL};

// What a prompt and a chat are completed by alike.
static const srv_field shared_fields[] = {
    MODEL(IN(model)),
    FIELD("min_tokens", "integer", srv_set_int64, IN(min_tokens), 0, 0, "0",
          "no end before this many tokens; at most max_tokens", .bound = SRV_BOUND_MAX_TOKENS),
    FIELD("n", "integer", srv_set_int32, IN(n), 1, SRV_MAX_N, "1", "choices a prompt"),
    FIELD("temperature", "number", srv_set_float, IN(temperature), 0, 100, "1", "0: greedy"),
    FIELD("top_p", "number", srv_set_float, IN(top_p), 0, 1, "1", "0: greedy, 1: off"),
    FIELD("top_k", "integer", srv_set_int32, IN(top_k), -1, INT32_MAX, "0", "-1 or 0: off"),
    FIELD("min_p", "number", srv_set_float, IN(min_p), 0, 1, "0", "0: off"),
    FIELD("seed", "integer", srv_set_seed, IN(seed), -0x1p63, 0x1p63, "null",
          "64 bits; absent: the server draws one and returns it"),
    FIELD("logit_bias", NULL, srv_set_logit_bias, IN(biases), 0, 0, "{}",
          "token ids, with what is added to their logits",
          .schema = "'type':'object','propertyNames':{'pattern':'^(0|[1-9][0-9]{0,8})$'},"
                    "'additionalProperties':{'type':'number','minimum':-100,'maximum':100}"),
    FIELD("presence_penalty", "number", srv_set_float, IN(presence_penalty), -2, 2, "0", "over the completion"),
    FIELD("frequency_penalty", "number", srv_set_float, IN(frequency_penalty), -2, 2, "0", "over the completion"),
    FIELD("repetition_penalty", "number", srv_set_float, IN(repetition_penalty), 0.01, 10, "1",
          "over prompt and completion; 1: off"),
    FIELD("stop", NULL, srv_set_stop, IN(stops), 0, 0, "[]", "up to 16 strings of 1 to 1024 bytes",
          .schema = "'anyOf':[{'type':'string','minLength':1,'maxLength':1024},{'type':'array','maxItems':16,"
                    "'items':{'type':'string','minLength':1,'maxLength':1024}}]"),
    FIELD("stop_token_ids", NULL, srv_set_stop_ids, IN(stop_ids), 0, 0, "[]", "ids that end the text, up to 64",
          .schema = IDS(",'maxItems':64")),
    FIELD("include_stop_str_in_output", "boolean", srv_set_bool, IN(include_stop), 0, 0, "false",
          "what ended the text is part of it"),
    FIELD("ignore_eos", "boolean", srv_set_bool, IN(ignore_eos), 0, 0, "false", "end-of-text ids are never drawn"),
    FIELD("stream", "boolean", srv_set_bool, IN(stream), 0, 0, "false", "answer in server-sent events"),
    FIELD("stream_options", NULL, srv_set_stream_options, IN(include_usage), 0, 0, "null", "only with stream",
          .schema = "'type':'object','properties':{'include_usage':{'type':['boolean','null']},"
                    "'continuous_usage_stats':{'type':['boolean','null']}}"),
    FIELD("return_token_ids", "boolean", srv_set_bool, IN(return_token_ids), 0, 0, "false",
          "choices carry token_ids and prompt_token_ids"),
    FIELD("priority", "integer", srv_set_int32, IN(priority), INT32_MIN, INT32_MAX, "0",
          "lower first among those that wait"),
    FIELD("user", "string", srv_check_string, 0, 0, 0, "null", "accepted and not used"),
    FIELD("compute_details", "boolean", srv_set_bool, IN(compute_details), 0, 0, "false",
          "choices carry solver figures of each token"),
    UNBUILT("response_format", srv_neutral_format, "{\"type\":\"text\"}",
            "'type':'object','required':['type'],'properties':{'type':{'enum':['text']}}"),
    UNBUILT("tools", srv_neutral_empty, "[]", "'enum':['',[],{}]"),
    UNBUILT("tool_choice", srv_neutral_choice, "\"none\"", "'enum':['none','auto']"),
    UNBUILT("grammar", srv_neutral_empty, "\"\"", "'enum':['',[],{}]"),
    UNBUILT("guided_json", srv_neutral_null, "null", "'type':'null'"),
    UNBUILT("guided_regex", srv_neutral_null, "null", "'type':'null'"),
    UNBUILT("guided_choice", srv_neutral_null, "null", "'type':'null'"),
    UNBUILT("guided_grammar", srv_neutral_null, "null", "'type':'null'"),
};
static const srv_field_table shared = {shared_fields, sizeof shared_fields / sizeof *shared_fields, &knobs, NULL};

static const srv_field completion_fields[] = {
    FIELD("prompt", NULL, srv_set_prompt, IN(prompts), 0, 0, "\"\"",
          "text, list of texts, token ids, or list of lists of token ids; empty text: the BOS token alone",
          .schema = "'anyOf':[{'$ref':'#/components/schemas/prompt_text'},"
                    "{'allOf':[{'$ref':'#/components/schemas/prompt_list'}],"
                    "'items':{'$ref':'#/components/schemas/prompt_text'}},"
                    "{" IDS(",'minItems':1") "},"
                                             "{'allOf':[{'$ref':'#/components/schemas/prompt_list'}],"
                                             "'items':{" IDS(",'minItems':1") "}}]"),
    ADD_SPECIAL_TOKENS,
    FIELD("max_tokens", "integer", srv_set_int64, IN(max_tokens), 0, 0, "16",
          "tokens to generate; 0: read the prompt only", .bound = SRV_BOUND_MAX_TOKENS),
    FIELD("best_of", "integer", srv_set_int32, IN(best_of), 1, SRV_MAX_N, "null",
          "choices to make, of which the n with the best mean logprob are returned; at least n, n itself in streams"),
    FIELD("echo", "boolean", srv_set_bool, IN(echo), 0, 0, "false", "the prompt is part of the text, and of logprobs"),
    FIELD("logprobs", "integer", srv_set_int32, IN(logprobs), 0, ENG_MAX_TOP, "null",
          "logprobs of the model itself, with this many of the likeliest tokens"),
    FIELD("session", "string", srv_set_session, IN(session), 0, 0, "null",
          "the session that this goes on with: one prompt, which may be empty, and one choice", ),
    FIELD("session_position", "integer", srv_set_int64, IN(session_position), 0, 0x1p53, "null",
          "refused with 409 unless the session stands there", ),
    FIELD("session_rollback", "boolean", srv_set_bool, IN(session_rollback), 0, 0, "false",
          "the session stays where it was"),
    UNBUILT("suffix", srv_neutral_empty, "\"\"", "'enum':['',[],{}]"),
    UNBUILT("prompt_embeds", srv_neutral_null, "null", "'type':'null'"),
};

static const srv_field chat_fields[] = {
    FIELD("messages", NULL, srv_set_messages, IN(messages), 0, 0, NULL, "the conversation so far, the oldest first",
          .schema = "'type':'array','minItems':1,'maxItems':4096,'items':{'type':'object','required':['role',"
                    "'content']," OPEN_OBJECT
                    ",'properties':{'role':{'enum':['system','developer','user','assistant']},'content':{"
                    "'anyOf':[{'type':'string'},{'type':'array','items':{'type':'object','required':['type','text']"
                    "," OPEN_OBJECT ",'properties':{'type':{'enum':['text']},'text':{'type':'string'}}}}]}}}"),
    FIELD("add_generation_prompt", "boolean", srv_set_bool, IN(add_generation_prompt), 0, 0, "true",
          "the template opens the assistant's turn"),
    FIELD("max_tokens", "integer", srv_set_int64, IN(max_tokens), 0, 0, "null",
          "tokens to generate; absent: what the context leaves, at most 4096", .bound = SRV_BOUND_MAX_TOKENS),
    FIELD("max_completion_tokens", "integer", srv_set_int64, IN(max_tokens), 0, 0, "null", "the same by its newer name",
          .bound = SRV_BOUND_MAX_TOKENS),
    FIELD("logprobs", "boolean", srv_set_bool, IN(with_logprobs), 0, 0, "false",
          "logprobs of the model itself for each token"),
    FIELD("top_logprobs", "integer", srv_set_int32, IN(top_logprobs), 0, ENG_MAX_TOP, "null",
          "with this many of the likeliest tokens; only with logprobs"),
    UNBUILT("session", srv_neutral_null, "null", "'type':'null'"),
    UNBUILT("session_position", srv_neutral_null, "null", "'type':'null'"),
    UNBUILT("session_rollback", srv_neutral_false, "false", "'enum':[false]"),
    UNBUILT("functions", srv_neutral_empty, "[]", "'enum':['',[],{}]"),
    UNBUILT("chat_template", srv_neutral_null, "null", "'type':'null'"),
    UNBUILT("chat_template_kwargs", srv_neutral_empty, "{}", "'enum':['',[],{}]"),
};

#define OF(member) offsetof(srv_token_request, member)
static const srv_field tokenize_fields[] = {
    MODEL(OF(model)),
    FIELD("prompt", "string", srv_set_text, OF(prompt), 0, 0, NULL, "the text"),
    FIELD("add_special_tokens", "boolean", srv_set_bool, OF(add_special_tokens), 0, 0, "true",
          "put the tokenizer's BOS in front"),
    UNBUILT("return_token_strs", srv_neutral_false, "false", "'enum':[false]"),
};
static const srv_field detokenize_fields[] = {
    MODEL(OF(model)),
    FIELD("tokens", NULL, srv_set_ids, OF(prompt), 0, 0, NULL, "token ids", .schema = IDS("")),
};

#define TTL                                                                                       \
    FIELD("ttl_s", "integer", srv_set_int64, IN(session_ttl_s), 1, SRV_MAX_SESSION_TTL_S, "null", \
          "seconds without use after which it is dropped; absent: 3600, or as the original", )
static const srv_field session_fields[] = {
    MODEL(IN(model)),
    FIELD("prompt", NULL, srv_set_prompt, IN(prompts), 0, 0, "\"\"",
          "text or token ids that it begins with, which are read first; empty text: none",
          .schema = "'anyOf':[{'type':'string'},{" IDS(",'minItems':1") "},{'type':'array','minItems':1,'maxItems':1,"
                                                                        "'items':{'anyOf':[{'type':'string'},{" IDS(
                                                                            ",'minItems':1") "}]}}]"),
    ADD_SPECIAL_TOKENS,
    TTL,
};
static const srv_field fork_fields[] = {
    FIELD("position", "integer", srv_set_int64, IN(session_position), 0, 0x1p53, "null",
          "the position that the copy stands at; absent: the present one", ),
    TTL,
};
static const srv_field rollback_fields[] = {
    FIELD("position", "integer", srv_set_int64, IN(session_position), 0, 0x1p53, NULL,
          "the position that it then stands at", ),
};

// Options of a stream need one.
#define STREAM_CONDITION                                                                      \
    "'if':{'required':['stream_options'],'properties':{'stream_options':{'type':'object'}}}," \
    "'then':{'required':['stream'],'properties':{'stream':{'enum':[true]}}}"

// What is said of a session needs one.
#define NEEDS_SESSION(member, type)                                                                            \
    "{'if':{'required':['" member "'],'properties':{'" member "':{" type "}}},'then':{'required':['session']," \
    "'properties':{'session':{'type':'string'}}}}"
#define SESSION_CONDITIONS                                                                          \
    "'allOf':[" NEEDS_SESSION("session_position", "'type':['integer','number']") "," NEEDS_SESSION( \
        "session_rollback", "'enum':[true]") "]"

const srv_field_table *srv_fields(srv_request_kind kind) {
    static const srv_field_table tables[] = {
        [SRV_REQUEST_COMPLETION] = {completion_fields, sizeof completion_fields / sizeof *completion_fields, &shared,
                                    STREAM_CONDITION "," SESSION_CONDITIONS},
        [SRV_REQUEST_CHAT] = {chat_fields, sizeof chat_fields / sizeof *chat_fields, &shared, STREAM_CONDITION},
        [SRV_REQUEST_TOKENIZE] = {tokenize_fields, sizeof tokenize_fields / sizeof *tokenize_fields, NULL, NULL},
        [SRV_REQUEST_DETOKENIZE] = {detokenize_fields, sizeof detokenize_fields / sizeof *detokenize_fields, NULL,
                                    NULL},
        [SRV_REQUEST_SESSION] = {session_fields, sizeof session_fields / sizeof *session_fields, &knobs, NULL},
        [SRV_REQUEST_FORK] = {fork_fields, sizeof fork_fields / sizeof *fork_fields, NULL, NULL},
        [SRV_REQUEST_ROLLBACK] = {rollback_fields, sizeof rollback_fields / sizeof *rollback_fields, NULL, NULL},
    };
    return &tables[kind];
}

// ---- bodies --------------------------------------------------------------------------------------------------------

// Commas and opening brackets outside strings: an upper bound of the values, less one.
static bool too_many_values(const char *body, size_t length, int64_t limit) {
    int64_t values = 0;
    bool in_string = false;

    for (size_t i = 0; i < length; i++) {
        const char byte = body[i];
        if (in_string && byte == '\\')
            i++;
        else if (byte == '"')
            in_string = !in_string;
        else if (!in_string && (byte == ',' || byte == '[' || byte == '{'))
            values++;
    }
    return values > limit;
}

static const char *explain_json(enum json_error_code code) {
    switch (code) {
    case json_error_stack_overflow:
        return "is nested too deeply";
    case json_error_invalid_utf8:
        return "holds bytes that are not UTF-8";
    case json_error_duplicate_key:
        return "holds a key twice";
    case json_error_numeric_overflow:
        return "holds a number out of range";
    case json_error_null_byte_in_key:
    case json_error_null_character:
        return "holds a NUL where none may be";
    case json_error_out_of_memory:
    case json_error_unknown:
    case json_error_cannot_open_file:
    case json_error_invalid_argument:
    case json_error_premature_end_of_input:
    case json_error_end_of_input_expected:
    case json_error_invalid_syntax:
    case json_error_invalid_format:
    case json_error_wrong_type:
    case json_error_null_value:
    case json_error_item_not_found:
    case json_error_index_out_of_range:
        break;
    }
    return "is not valid JSON";
}

// The body as one JSON object, or NULL with a refusal.
static json_t *load_object(const char *body, size_t length, const srv_bounds *bounds, srv_problem *problem) {
    json_error_t error;

    if (length == 0) {
        srv_refuse(problem, 400, "invalid_json", NULL, "the body is empty; it must be a JSON object");
        return NULL;
    }
    if (too_many_values(body, length, bounds->max_values)) {
        srv_refuse(problem, 400, "invalid_json", NULL, "the body holds more than %lld JSON values",
                   (long long)bounds->max_values);
        return NULL;
    }
    json_t *root = json_loadb(body, length, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL | JSON_DECODE_ANY, &error);
    if (!root && json_error_code(&error) == json_error_out_of_memory) {
        srv_refuse_engine(problem, ENG_NO_MEMORY, NULL);
        return NULL;
    }
    if (!root) {
        srv_refuse(problem, 400, "invalid_json", NULL, "the body %s (near byte %d)",
                   explain_json(json_error_code(&error)), error.position > 0 ? error.position : 0);
        return NULL;
    }
    if (!json_is_object(root)) {
        json_decref(root);
        srv_refuse(problem, 400, "invalid_json", NULL, "the body must be a JSON object");
        return NULL;
    }
    return root;
}

// Applies every row whose field is there and not null, and misses those that must be there; the returned bits are the
// rows' given marks.
static unsigned apply_fields(const json_t *root, const srv_field_table *table, const srv_bounds *bounds, void *target,
                             srv_problem *problem) {
    unsigned given = 0;

    for (; table; table = table->more) {
        for (size_t i = 0; i < table->count && !problem->status; i++) {
            const srv_field *field = &table->rows[i];
            json_t *value = json_object_get(root, field->name);
            if (!value || json_is_null(value)) {
                if (!field->fallback)
                    srv_refuse(problem, 400, "missing_field", field->name, "%s is missing", field->name);
                continue;
            }
            given |= field->given;
            field->set(&(srv_reading){.field = field, .bounds = bounds, .problem = problem}, value,
                       (char *)target + field->offset);
        }
    }
    return given;
}

static eng_status status_of(const srv_problem *problem) {
    if (!problem->status)
        return ENG_OK;
    return problem->status == 429 ? ENG_NO_MEMORY : ENG_INVALID;
}

// cg_tolerance 0 is short for exact, unless a mode that does not look at it is named.
static void settle_solver(srv_knobs *knobs, const srv_bounds *bounds, srv_problem *problem) {
    const bool tolerance_given = knobs->given & SRV_GIVEN_CG_TOLERANCE;

    if (tolerance_given && knobs->cg_tolerance == 0 && knobs->cg_mode == ENG_CG_TOLERANCE) {
        knobs->cg_mode = ENG_CG_EXACT;
        knobs->given |= SRV_GIVEN_CG_MODE;
        if (!bounds->allow_exact)
            srv_refuse(problem, 400, "out_of_range", "cg_tolerance", "this server does not allow exact solves");
    } else if (tolerance_given && !(knobs->cg_tolerance >= (float)bounds->min_cg_tolerance))
        srv_refuse(problem, 400, "out_of_range", "cg_tolerance", "cg_tolerance must be at least %.9g on this server",
                   bounds->min_cg_tolerance);
    if (knobs->cg_mode == ENG_CG_EXACT && !bounds->allow_exact)
        srv_refuse(problem, 400, "out_of_range", "cg_mode", "this server does not allow cg_mode exact");
}

static void settle_best_of(srv_request *request, srv_problem *problem) {
    if (request->best_of == 0)
        request->best_of = request->n;
    if (request->best_of < request->n)
        srv_refuse(problem, 400, "out_of_range", "best_of", "best_of must not be less than n");
    else if (request->stream && request->best_of > request->n)
        srv_refuse(problem, 400, "invalid_value", "best_of", "best_of above n cannot be streamed");
    if (request->prompt_count * (size_t)request->best_of > SRV_MAX_CHOICES)
        srv_refuse(problem, 400, "out_of_range", request->best_of > request->n ? "best_of" : "n",
                   "prompts times choices must be at most %d", SRV_MAX_CHOICES);
}

static void check_session(const srv_request *request, srv_problem *problem) {
    if (!request->session && request->session_position >= 0)
        srv_refuse(problem, 400, "invalid_value", "session_position", "session_position needs a session");
    if (!request->session && request->session_rollback)
        srv_refuse(problem, 400, "invalid_value", "session_rollback", "session_rollback needs a session");
    if (request->session && (request->prompt_count > 1 || request->best_of > 1))
        srv_refuse(problem, 400, "invalid_value", "session",
                   "a session takes one prompt and one choice; fork it for more");
}

// What concerns more than one field.
static void check_whole(const json_t *root, srv_request *request, const srv_bounds *bounds, srv_problem *problem) {
    const json_t *options = json_object_get(root, "stream_options");

    if (options && !json_is_null(options) && !request->stream)
        srv_refuse(problem, 400, "invalid_value", "stream_options", "stream_options needs stream");
    if (request->max_tokens >= 0 && request->min_tokens > request->max_tokens)
        srv_refuse(problem, 400, "out_of_range", "min_tokens", "min_tokens must not be above max_tokens, which is %lld",
                   (long long)request->max_tokens);
    settle_best_of(request, problem);
    check_session(request, problem);
    settle_solver(&request->knobs, bounds, problem);
}

// An absent prompt is one empty text.
static void add_empty_prompt(srv_request *request, srv_problem *problem) {
    if (request->prompts)
        return;
    request->prompts = calloc(1, sizeof *request->prompts);
    char *text = calloc(1, 1);
    if (!request->prompts || !text) {
        free(text);
        srv_refuse_engine(problem, ENG_NO_MEMORY, NULL);
        return;
    }
    request->prompts->text = text;
    request->prompt_count = 1;
}

// A chat says in two fields what a completion says in one, and may name max_tokens twice.
static void settle_chat(const json_t *root, srv_request *request, srv_problem *problem) {
    const json_t *names[] = {json_object_get(root, "max_tokens"), json_object_get(root, "max_completion_tokens")};

    if (names[0] && names[1] && !json_is_null(names[0]) && !json_is_null(names[1]) &&
        json_number_value(names[0]) != json_number_value(names[1]))
        srv_refuse(problem, 400, "invalid_value", "max_completion_tokens",
                   "max_tokens and max_completion_tokens say different things");
    if (!request->with_logprobs && request->top_logprobs > 0)
        srv_refuse(problem, 400, "invalid_value", "top_logprobs", "top_logprobs needs logprobs");
    if (request->with_logprobs)
        request->logprobs = request->top_logprobs > 0 ? request->top_logprobs : 0;
}

// The values of what a body does not say. What is only read generates nothing.
static void begin(srv_request_kind kind, const srv_bounds *bounds, srv_request *request) {
    const int64_t short_text = bounds->max_tokens < 16 ? bounds->max_tokens : 16;

    *request = (srv_request){
        .add_special_tokens = true,
        .add_generation_prompt = true,
        .max_tokens = kind == SRV_REQUEST_CHAT         ? -1
                      : kind == SRV_REQUEST_COMPLETION ? short_text
                                                       : 0,
        .n = 1,
        .temperature = 1,
        .top_p = 1,
        .repetition_penalty = 1,
        .logprobs = -1,
        .top_logprobs = -1,
        .session_position = -1,
        .knobs.cg_mode = ENG_CG_TOLERANCE,
    };
}

static eng_status parse(srv_request_kind kind, const char *body, size_t length, const srv_bounds *bounds,
                        srv_request *request, srv_problem *problem) {
    begin(kind, bounds, request);
    json_t *root = load_object(body, length, bounds, problem);
    if (!root)
        return status_of(problem);
    request->knobs.given = apply_fields(root, srv_fields(kind), bounds, request, problem);
    if (!problem->status)
        add_empty_prompt(request, problem);
    if (!problem->status && kind == SRV_REQUEST_CHAT)
        settle_chat(root, request, problem);
    if (!problem->status)
        check_whole(root, request, bounds, problem);
    json_decref(root);
    return status_of(problem);
}

eng_status srv_request_parse(const char *body, size_t length, const srv_bounds *bounds, srv_request *request,
                             srv_problem *problem) {
    return parse(SRV_REQUEST_COMPLETION, body, length, bounds, request, problem);
}

eng_status srv_chat_parse(const char *body, size_t length, const srv_bounds *bounds, srv_request *request,
                          srv_problem *problem) {
    return parse(SRV_REQUEST_CHAT, body, length, bounds, request, problem);
}

// A session begins with one prompt or with none.
static void settle_start(srv_request *request, srv_problem *problem) {
    srv_prompt *prompt = request->prompts;

    if (request->prompt_count > 1)
        srv_refuse(problem, 400, "invalid_value", "prompt", "a session begins with one prompt");
    else if (request->prompt_count == 1 && prompt->text && prompt->length == 0) {
        free(prompt->text);
        prompt->text = NULL;
        request->prompt_count = 0;
    }
}

eng_status srv_session_parse(srv_request_kind kind, const char *body, size_t length, const srv_bounds *bounds,
                             srv_request *request, srv_problem *problem) {
    begin(kind, bounds, request);
    request->best_of = 1;
    if (length == 0) {
        body = "{}";
        length = 2;
    }
    json_t *root = load_object(body, length, bounds, problem);
    if (!root)
        return status_of(problem);
    request->knobs.given = apply_fields(root, srv_fields(kind), bounds, request, problem);
    json_decref(root);
    settle_start(request, problem);
    settle_solver(&request->knobs, bounds, problem);
    return status_of(problem);
}

void srv_request_free(srv_request *request) {
    for (size_t i = 0; i < request->message_count; i++)
        free(request->messages[i].content);
    free(request->messages);
    for (size_t i = 0; i < request->prompt_count; i++) {
        free(request->prompts[i].text);
        free(request->prompts[i].ids);
    }
    for (size_t i = 0; i < request->stop_count; i++)
        free((char *)request->stops[i].bytes);
    free(request->prompts);
    free(request->stops);
    free(request->biases);
    free(request->model);
    free(request->session);
    *request = (srv_request){0};
}

// A body whose fields say all: `request` holds their defaults.
static eng_status parse_fields(srv_request_kind kind, const char *body, size_t length, const srv_bounds *bounds,
                               void *request, srv_problem *problem) {
    json_t *root = load_object(body, length, bounds, problem);
    if (!root)
        return status_of(problem);
    apply_fields(root, srv_fields(kind), bounds, request, problem);
    json_decref(root);
    return status_of(problem);
}

eng_status srv_token_request_parse(srv_request_kind kind, const char *body, size_t length, const srv_bounds *bounds,
                                   srv_token_request *request, srv_problem *problem) {
    *request = (srv_token_request){.add_special_tokens = true};
    return parse_fields(kind, body, length, bounds, request, problem);
}

void srv_token_request_free(srv_token_request *request) {
    free(request->prompt.text);
    free(request->prompt.ids);
    free(request->model);
    *request = (srv_token_request){0};
}

// The mode and the tolerance are one choice, of which a body may give either part.
static void inherit_solver(srv_knobs *knobs, const srv_knobs *of_session) {
    const unsigned solver = SRV_GIVEN_CG_MODE | SRV_GIVEN_CG_TOLERANCE;

    if (!(knobs->given & solver)) {
        knobs->cg_mode = of_session->cg_mode;
        knobs->cg_tolerance = of_session->cg_tolerance;
        knobs->given |= of_session->given & solver;
    } else if (!(knobs->given & SRV_GIVEN_CG_TOLERANCE) && of_session->cg_tolerance > 0) {
        knobs->cg_tolerance = of_session->cg_tolerance;
        knobs->given |= of_session->given & SRV_GIVEN_CG_TOLERANCE;
    }
}

void srv_knobs_inherit(srv_knobs *knobs, const srv_knobs *of_session) {
    const unsigned missing = of_session->given & ~knobs->given;

    inherit_solver(knobs, of_session);
    if (missing & SRV_GIVEN_CG_MAX_STEPS)
        knobs->cg_max_steps = of_session->cg_max_steps;
    if (missing & SRV_GIVEN_EXIT_THRESHOLD)
        knobs->exit_threshold = of_session->exit_threshold;
    if (missing & SRV_GIVEN_MAX_LOOPS)
        knobs->max_loops = of_session->max_loops;
    if (missing & SRV_GIVEN_ON_UNCONVERGED)
        knobs->fail_unconverged = of_session->fail_unconverged;
    if (missing & SRV_GIVEN_DEGRADE)
        knobs->degrade = of_session->degrade;
    knobs->given |= missing & ~(SRV_GIVEN_CG_MODE | SRV_GIVEN_CG_TOLERANCE);
}
