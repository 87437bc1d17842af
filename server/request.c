// SPDX-License-Identifier: Apache-2.0
// The table of request fields and the setters behind it.
//
// A body is bounded three times before the JSON library sees it or allocates for it: bytes (by the HTTP files), values
// (counted here), and depth (the library's own 2048). The library's error texts quote the body, so only its code and
// position are used. Range checks are written !(x >= low && x <= high) after the cast to the type that is kept, so that
// neither a NaN nor a double that overflows a float passes. Runs on the pool's threads; shares nothing.
#include "server/request.h"

#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct field field;
// Sets the member at target from a value that is not null. Refuses through *problem.
typedef void setter(const field *field, json_t *value, const srv_bounds *bounds, void *target, srv_problem *problem);

struct field {
    const char *name;
    const char *type; // as JSON Schema says it
    setter *set;
    size_t offset; // of the member in srv_request or srv_token_request
    double low, high;
    unsigned given;       // SRV_GIVEN_* mark of a completion's knob
    const char *fallback; // JSON text of the default
    const char *about;
};

// ---- values --------------------------------------------------------------------------------------------------------

static void refuse_type(const field *field, srv_problem *problem, const char *wanted) {
    srv_refuse(problem, 400, "invalid_type", field->name, "%s must be %s", field->name, wanted);
}

static void refuse_range(const field *field, srv_problem *problem, double low, double high) {
    srv_refuse(problem, 400, "out_of_range", field->name, "%s must be between %.15g and %.15g", field->name, low, high);
}

// An integer, or a real without a fraction below 2^53.
static bool read_integer(const json_t *value, int64_t *out) {
    if (json_is_integer(value)) {
        *out = json_integer_value(value);
        return true;
    }
    if (!json_is_real(value))
        return false;
    const double real = json_real_value(value);
    if (!(fabs(real) <= 9007199254740992.0) || real != trunc(real))
        return false;
    *out = (int64_t)real;
    return true;
}

static bool read_ranged(const field *field, const json_t *value, double low, double high, int64_t *out,
                        srv_problem *problem) {
    if (!json_is_number(value)) {
        refuse_type(field, problem, "an integer");
        return false;
    }
    // A real outside of int64 is out of range rather than no integer.
    if (json_is_real(value) && !(json_real_value(value) >= low && json_real_value(value) <= high)) {
        refuse_range(field, problem, low, high);
        return false;
    }
    if (!read_integer(value, out)) {
        refuse_type(field, problem, "an integer");
        return false;
    }
    if (!((double)*out >= low && (double)*out <= high)) {
        refuse_range(field, problem, low, high);
        return false;
    }
    return true;
}

static void set_int32(const field *field, json_t *value, const srv_bounds *bounds, void *target, srv_problem *problem) {
    int64_t integer;
    (void)bounds;
    if (read_ranged(field, value, field->low, field->high, &integer, problem))
        *(int32_t *)target = (int32_t)integer;
}

static void set_float(const field *field, json_t *value, const srv_bounds *bounds, void *target, srv_problem *problem) {
    (void)bounds;
    if (!json_is_number(value)) {
        refuse_type(field, problem, "a number");
        return;
    }
    const float number = (float)json_number_value(value);
    if (!((double)number >= field->low && (double)number <= field->high)) {
        refuse_range(field, problem, field->low, field->high);
        return;
    }
    *(float *)target = number;
}

static void set_bool(const field *field, json_t *value, const srv_bounds *bounds, void *target, srv_problem *problem) {
    (void)bounds;
    if (json_is_boolean(value))
        *(bool *)target = json_is_true(value);
    else
        refuse_type(field, problem, "true or false");
}

static char *copy_bytes(const char *bytes, size_t length) {
    char *copy = malloc(length + 1);
    if (copy) {
        memcpy(copy, bytes, length);
        copy[length] = '\0';
    }
    return copy;
}

static void refuse_memory(srv_problem *problem) {
    srv_refuse_engine(problem, ENG_NO_MEMORY, NULL);
}

static void set_model(const field *field, json_t *value, const srv_bounds *bounds, void *target, srv_problem *problem) {
    (void)bounds;
    if (!json_is_string(value)) {
        refuse_type(field, problem, "a string");
        return;
    }
    const size_t length = json_string_length(value);
    // A NUL ends no name: such a name is nobody's.
    if (memchr(json_string_value(value), '\0', length)) {
        srv_refuse(problem, 404, "model_not_found", "model", "there is no such model");
        return;
    }
    char *copy = copy_bytes(json_string_value(value), length);
    if (!copy) {
        refuse_memory(problem);
        return;
    }
    *(char **)target = copy;
}

static void set_seed(const field *field, json_t *value, const srv_bounds *bounds, void *target, srv_problem *problem) {
    srv_request *request = (srv_request *)((char *)target - field->offset);
    (void)bounds;
    if (!read_integer(value, &request->seed))
        refuse_type(field, problem, "an integer of 64 bits");
    else
        request->seed_given = true;
}

static void set_max_tokens(const field *field, json_t *value, const srv_bounds *bounds, void *target,
                           srv_problem *problem) {
    read_ranged(field, value, 0, (double)bounds->max_tokens, target, problem);
}

// ---- prompts -------------------------------------------------------------------------------------------------------

static void set_text_prompt(const field *field, const json_t *value, srv_prompt *prompt, srv_problem *problem) {
    (void)field;
    prompt->length = json_string_length(value);
    prompt->text = copy_bytes(json_string_value(value), prompt->length);
    if (!prompt->text)
        refuse_memory(problem);
}

static void set_id_prompt(const field *field, const json_t *array, const srv_bounds *bounds, srv_prompt *prompt,
                          srv_problem *problem) {
    const size_t count = json_array_size(array);

    if (count == 0) {
        srv_refuse(problem, 400, "invalid_value", field->name, "%s holds an empty list of token ids", field->name);
        return;
    }
    if (count > (size_t)bounds->max_prompt_tokens) {
        srv_refuse(problem, 400, "prompt_too_long", field->name, "%s has %zu token ids; this server takes %lld",
                   field->name, count, (long long)bounds->max_prompt_tokens);
        return;
    }
    prompt->ids = malloc(count * sizeof *prompt->ids);
    if (!prompt->ids) {
        refuse_memory(problem);
        return;
    }
    prompt->count = count;
    for (size_t i = 0; i < count; i++) {
        int64_t id;
        if (!read_integer(json_array_get(array, i), &id)) {
            refuse_type(field, problem, "a string, a list of strings, a list of token ids or a list of such lists");
            return;
        }
        if (!(id >= 0 && id <= INT32_MAX)) {
            srv_refuse(problem, 400, "out_of_range", field->name, "token id %zu is outside the vocabulary", i);
            return;
        }
        prompt->ids[i] = (int32_t)id;
    }
}

static void set_prompt_list(const field *field, json_t *array, const srv_bounds *bounds, srv_request *request,
                            srv_problem *problem) {
    const size_t count = json_array_size(array);
    const bool texts = json_is_string(json_array_get(array, 0));

    if (count > (size_t)bounds->max_prompts) {
        srv_refuse(problem, 400, "out_of_range", field->name, "%zu prompts; a request may have %lld", count,
                   (long long)bounds->max_prompts);
        return;
    }
    request->prompts = calloc(count, sizeof *request->prompts);
    if (!request->prompts) {
        refuse_memory(problem);
        return;
    }
    request->prompt_count = count;
    for (size_t i = 0; i < count && !problem->status; i++) {
        const json_t *item = json_array_get(array, i);
        if (texts ? !json_is_string(item) : !json_is_array(item))
            refuse_type(field, problem, "a string, a list of strings, a list of token ids or a list of such lists");
        else if (texts)
            set_text_prompt(field, item, &request->prompts[i], problem);
        else
            set_id_prompt(field, item, bounds, &request->prompts[i], problem);
    }
}

static void set_prompt(const field *field, json_t *value, const srv_bounds *bounds, void *target,
                       srv_problem *problem) {
    srv_request *request = (srv_request *)((char *)target - field->offset);

    if (json_is_array(value) && json_array_size(value) == 0) {
        srv_refuse(problem, 400, "invalid_value", field->name, "%s is an empty list", field->name);
        return;
    }
    if (json_is_array(value) && !json_is_number(json_array_get(value, 0))) {
        set_prompt_list(field, value, bounds, request, problem);
        return;
    }
    if (!json_is_string(value) && !json_is_array(value)) {
        refuse_type(field, problem, "a string, a list of strings, a list of token ids or a list of such lists");
        return;
    }
    request->prompts = calloc(1, sizeof *request->prompts);
    if (!request->prompts) {
        refuse_memory(problem);
        return;
    }
    request->prompt_count = 1;
    if (json_is_string(value))
        set_text_prompt(field, value, request->prompts, problem);
    else
        set_id_prompt(field, value, bounds, request->prompts, problem);
}

static void set_text(const field *field, json_t *value, const srv_bounds *bounds, void *target, srv_problem *problem) {
    (void)bounds;
    if (json_is_string(value))
        set_text_prompt(field, value, target, problem);
    else
        refuse_type(field, problem, "a string");
}

static void set_ids(const field *field, json_t *value, const srv_bounds *bounds, void *target, srv_problem *problem) {
    srv_prompt *prompt = target;
    if (!json_is_array(value))
        refuse_type(field, problem, "a list of token ids");
    else if (json_array_size(value) > 0)
        set_id_prompt(field, value, bounds, prompt, problem);
}

// ---- stop strings, stream options, knobs ---------------------------------------------------------------------------

static void add_stop(const field *field, const json_t *value, srv_request *request, srv_problem *problem) {
    if (!json_is_string(value)) {
        refuse_type(field, problem, "a string or a list of strings");
        return;
    }
    const size_t length = json_string_length(value);
    if (!(length >= 1 && length <= SRV_MAX_STOP_BYTES)) {
        srv_refuse(problem, 400, "out_of_range", field->name, "a stop string must have 1 to %d bytes",
                   SRV_MAX_STOP_BYTES);
        return;
    }
    char *copy = copy_bytes(json_string_value(value), length);
    if (!copy) {
        refuse_memory(problem);
        return;
    }
    request->stops[request->stop_count++] = (eng_text){.bytes = copy, .length = length};
}

static void set_stop(const field *field, json_t *value, const srv_bounds *bounds, void *target, srv_problem *problem) {
    srv_request *request = (srv_request *)((char *)target - field->offset);
    const size_t count = json_is_array(value) ? json_array_size(value) : 1;

    (void)bounds;
    if (count > SRV_MAX_STOPS) {
        srv_refuse(problem, 400, "out_of_range", field->name, "at most %d stop strings", SRV_MAX_STOPS);
        return;
    }
    if (count == 0)
        return;
    request->stops = calloc(count, sizeof *request->stops);
    if (!request->stops) {
        refuse_memory(problem);
        return;
    }
    for (size_t i = 0; i < count && !problem->status; i++)
        add_stop(field, json_is_array(value) ? json_array_get(value, i) : value, request, problem);
}

static void set_stream_options(const field *field, json_t *value, const srv_bounds *bounds, void *target,
                               srv_problem *problem) {
    srv_request *request = (srv_request *)((char *)target - field->offset);
    static const struct {
        const char *key, *name;
        size_t offset;
    } options[] = {
        {"include_usage", "stream_options.include_usage", offsetof(srv_request, include_usage)},
        {"continuous_usage_stats", "stream_options.continuous_usage_stats", offsetof(srv_request, continuous_usage)},
    };

    (void)bounds;
    if (!json_is_object(value)) {
        refuse_type(field, problem, "an object");
        return;
    }
    for (size_t i = 0; i < sizeof options / sizeof *options; i++) {
        json_t *option = json_object_get(value, options[i].key);
        if (json_is_boolean(option))
            *(bool *)((char *)request + options[i].offset) = json_is_true(option);
        else if (option && !json_is_null(option))
            srv_refuse(problem, 400, "invalid_type", options[i].name, "%s must be true or false", options[i].name);
    }
}

// The position of a string among the choices (NULL-terminated), -1 with a refusal if it is none.
static int read_choice(const field *field, const json_t *value, const char *const *choices, const char *wanted,
                       srv_problem *problem) {
    if (json_is_string(value))
        for (int i = 0; choices[i]; i++)
            if (json_string_length(value) == strlen(choices[i]) && strcmp(json_string_value(value), choices[i]) == 0)
                return i;
    srv_refuse(problem, 400, "invalid_value", field->name, "%s must be %s", field->name, wanted);
    return -1;
}

static void set_cg_mode(const field *field, json_t *value, const srv_bounds *bounds, void *target,
                        srv_problem *problem) {
    static const char *const names[] = {"tolerance", "steps", "exact", NULL};
    static const eng_cg_mode modes[] = {ENG_CG_TOLERANCE, ENG_CG_STEPS, ENG_CG_EXACT};
    const int choice = read_choice(field, value, names, "tolerance, steps or exact", problem);

    (void)bounds;
    if (choice >= 0)
        *(eng_cg_mode *)target = modes[choice];
}

static void set_on_unconverged(const field *field, json_t *value, const srv_bounds *bounds, void *target,
                               srv_problem *problem) {
    static const char *const names[] = {"accept", "error", NULL};
    const int choice = read_choice(field, value, names, "accept or error", problem);

    (void)bounds;
    if (choice >= 0)
        *(bool *)target = choice == 1;
}

// ---- what is known but not built: only its neutral value passes ----------------------------------------------------

static void refuse_unbuilt(const field *field, srv_problem *problem) {
    srv_refuse(problem, 400, "not_supported", field->name,
               "%s is not supported by this server; only its neutral value %s", field->name, field->fallback);
}

static void neutral_number(const field *field, json_t *value, const srv_bounds *bounds, void *target,
                           srv_problem *problem) {
    (void)bounds;
    (void)target;
    if (!json_is_number(value))
        refuse_type(field, problem, "a number");
    else if (json_number_value(value) != field->low)
        refuse_unbuilt(field, problem);
}

static void neutral_false(const field *field, json_t *value, const srv_bounds *bounds, void *target,
                          srv_problem *problem) {
    (void)bounds;
    (void)target;
    if (!json_is_boolean(value))
        refuse_type(field, problem, "true or false");
    else if (json_is_true(value))
        refuse_unbuilt(field, problem);
}

// An empty list, object or string.
static void neutral_empty(const field *field, json_t *value, const srv_bounds *bounds, void *target,
                          srv_problem *problem) {
    const bool empty = (json_is_array(value) && json_array_size(value) == 0) ||
                       (json_is_object(value) && json_object_size(value) == 0) ||
                       (json_is_string(value) && json_string_length(value) == 0);
    (void)bounds;
    (void)target;
    if (!empty)
        refuse_unbuilt(field, problem);
}

static void neutral_null(const field *field, json_t *value, const srv_bounds *bounds, void *target,
                         srv_problem *problem) {
    (void)value;
    (void)bounds;
    (void)target;
    refuse_unbuilt(field, problem);
}

static void neutral_format(const field *field, json_t *value, const srv_bounds *bounds, void *target,
                           srv_problem *problem) {
    const char *type = json_string_value(json_object_get(value, "type"));
    (void)bounds;
    (void)target;
    if (!type || strcmp(type, "text") != 0)
        refuse_unbuilt(field, problem);
}

static void neutral_choice(const field *field, json_t *value, const srv_bounds *bounds, void *target,
                           srv_problem *problem) {
    const char *text = json_string_value(value);
    (void)bounds;
    (void)target;
    if (!text || (strcmp(text, "none") != 0 && strcmp(text, "auto") != 0))
        refuse_unbuilt(field, problem);
}

// best_of is checked against n after the table.
static void set_best_of(const field *field, json_t *value, const srv_bounds *bounds, void *target,
                        srv_problem *problem) {
    int64_t best_of;
    (void)bounds;
    (void)target;
    read_ranged(field, value, 1, SRV_MAX_N, &best_of, problem);
}

// ---- the tables ----------------------------------------------------------------------------------------------------

#define IN(member) offsetof(srv_request, member)
static const field completion_fields[] = {
    {"model", "string", set_model, IN(model), 0, 0, 0, "null", "which model; absent: the server's first"},
    {"prompt", "string or array", set_prompt, IN(prompts), 0, 0, 0, "\"\"",
     "text, list of texts, token ids, or list of lists of token ids; empty text: the BOS token alone"},
    {"add_special_tokens", "boolean", set_bool, IN(add_special_tokens), 0, 0, 0, "true",
     "put the tokenizer's BOS before texts"},
    {"max_tokens", "integer", set_max_tokens, IN(max_tokens), 0, 0, 0, "16",
     "tokens to generate; 0: read the prompt only"},
    {"n", "integer", set_int32, IN(n), 1, SRV_MAX_N, 0, "1", "choices a prompt"},
    {"temperature", "number", set_float, IN(temperature), 0, 100, 0, "1", "0: greedy"},
    {"top_p", "number", set_float, IN(top_p), 0, 1, 0, "1", "0: greedy, 1: off"},
    {"top_k", "integer", set_int32, IN(top_k), -1, INT32_MAX, 0, "0", "-1 or 0: off"},
    {"min_p", "number", set_float, IN(min_p), 0, 1, 0, "0", "0: off"},
    {"seed", "integer", set_seed, IN(seed), 0, 0, 0, "null", "64 bits; absent: the server draws one and returns it"},
    {"stop", "string or array", set_stop, IN(stops), 0, 0, 0, "[]", "up to 16 strings of 1 to 1024 bytes"},
    {"stream", "boolean", set_bool, IN(stream), 0, 0, 0, "false", "answer in server-sent events"},
    {"stream_options", "object", set_stream_options, IN(include_usage), 0, 0, 0, "null",
     "include_usage, continuous_usage_stats"},
    {"cg_tolerance", "number", set_float, IN(cg_tolerance), 0, 1, SRV_GIVEN_CG_TOLERANCE, "null",
     "relative residual at which each Mesa head stops; 0: exact"},
    {"cg_max_steps", "integer", set_int32, IN(cg_max_steps), 0, SRV_MAX_CG_STEPS, SRV_GIVEN_CG_MAX_STEPS, "null",
     "upper bound of solver steps"},
    {"cg_mode", "string", set_cg_mode, IN(cg_mode), 0, 0, SRV_GIVEN_CG_MODE, "\"tolerance\"",
     "tolerance, steps or exact"},
    {"exit_threshold", "number", set_float, IN(exit_threshold), 0, 1, SRV_GIVEN_EXIT_THRESHOLD, "null",
     "looped models: cumulative exit probability at which a token's output is read"},
    {"max_loops", "integer", set_int32, IN(max_loops), 1, SRV_MAX_LOOPS, SRV_GIVEN_MAX_LOOPS, "null",
     "looped models: upper bound of loops"},
    {"on_unconverged", "string", set_on_unconverged, IN(fail_unconverged), 0, 0, SRV_GIVEN_ON_UNCONVERGED, "\"accept\"",
     "accept or error, when a solve hits its bound"},
    {"best_of", "integer", set_best_of, 0, 1, SRV_MAX_N, 0, "n", "only n itself"},
    {"echo", "boolean", neutral_false, 0, 0, 0, 0, "false", "not built"},
    {"logprobs", "integer", neutral_null, 0, 0, 0, 0, "null", "not built"},
    {"logit_bias", "object", neutral_empty, 0, 0, 0, 0, "{}", "not built"},
    {"presence_penalty", "number", neutral_number, 0, 0, 0, 0, "0", "not built"},
    {"frequency_penalty", "number", neutral_number, 0, 0, 0, 0, "0", "not built"},
    {"repetition_penalty", "number", neutral_number, 0, 1, 1, 0, "1", "not built"},
    {"min_tokens", "integer", neutral_number, 0, 0, 0, 0, "0", "not built"},
    {"ignore_eos", "boolean", neutral_false, 0, 0, 0, 0, "false", "not built"},
    {"stop_token_ids", "array", neutral_empty, 0, 0, 0, 0, "[]", "not built"},
    {"include_stop_str_in_output", "boolean", neutral_false, 0, 0, 0, 0, "false", "not built"},
    {"suffix", "string", neutral_empty, 0, 0, 0, 0, "\"\"", "not built"},
    {"return_token_ids", "boolean", neutral_false, 0, 0, 0, 0, "false", "not built"},
    {"compute_details", "boolean", neutral_false, 0, 0, 0, 0, "false", "not built"},
    {"session", "string", neutral_null, 0, 0, 0, 0, "null", "not built"},
    {"session_position", "integer", neutral_null, 0, 0, 0, 0, "null", "not built"},
    {"session_rollback", "boolean", neutral_false, 0, 0, 0, 0, "false", "not built"},
    {"response_format", "object", neutral_format, 0, 0, 0, 0, "{\"type\":\"text\"}", "not built"},
    {"tools", "array", neutral_empty, 0, 0, 0, 0, "[]", "not built"},
    {"tool_choice", "string", neutral_choice, 0, 0, 0, 0, "\"none\"", "not built"},
    {"grammar", "string", neutral_empty, 0, 0, 0, 0, "\"\"", "not built"},
    {"guided_json", "object", neutral_null, 0, 0, 0, 0, "null", "not built"},
    {"guided_regex", "string", neutral_null, 0, 0, 0, 0, "null", "not built"},
    {"guided_choice", "array", neutral_null, 0, 0, 0, 0, "null", "not built"},
    {"guided_grammar", "string", neutral_null, 0, 0, 0, 0, "null", "not built"},
    {"prompt_embeds", "string", neutral_null, 0, 0, 0, 0, "null", "not built"},
};

#define OF(member) offsetof(srv_token_request, member)
static const field tokenize_fields[] = {
    {"model", "string", set_model, OF(model), 0, 0, 0, "null", "which model; absent: the server's first"},
    {"prompt", "string", set_text, OF(prompt), 0, 0, 0, "\"\"", "the text"},
    {"add_special_tokens", "boolean", set_bool, OF(add_special_tokens), 0, 0, 0, "true",
     "put the tokenizer's BOS in front"},
    {"return_token_strs", "boolean", neutral_false, 0, 0, 0, 0, "false", "not built"},
};
static const field detokenize_fields[] = {
    {"model", "string", set_model, OF(model), 0, 0, 0, "null", "which model; absent: the server's first"},
    {"tokens", "array", set_ids, OF(prompt), 0, 0, 0, "[]", "token ids"},
};

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

    if (too_many_values(body, length, bounds->max_values)) {
        srv_refuse(problem, 400, "invalid_json", NULL, "the body holds more than %lld JSON values",
                   (long long)bounds->max_values);
        return NULL;
    }
    json_t *root = json_loadb(body, length, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, &error);
    if (!root && json_error_code(&error) == json_error_out_of_memory) {
        refuse_memory(problem);
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

// Applies every row whose field is there and not null; the returned bits are the rows' given marks.
static unsigned apply_fields(const json_t *root, const field *fields, size_t count, const srv_bounds *bounds,
                             void *target, srv_problem *problem) {
    unsigned given = 0;

    for (size_t i = 0; i < count && !problem->status; i++) {
        json_t *value = json_object_get(root, fields[i].name);
        if (!value || json_is_null(value))
            continue;
        given |= fields[i].given;
        fields[i].set(&fields[i], value, bounds, (char *)target + fields[i].offset, problem);
    }
    return given;
}

static eng_status status_of(const srv_problem *problem) {
    if (!problem->status)
        return ENG_OK;
    return problem->status == 429 ? ENG_NO_MEMORY : ENG_INVALID;
}

static void check_best_of(const json_t *root, const srv_request *request, srv_problem *problem) {
    const json_t *value = json_object_get(root, "best_of");
    int64_t best_of;

    if (!value || !read_integer(value, &best_of) || best_of == request->n)
        return;
    if (best_of < request->n)
        srv_refuse(problem, 400, "out_of_range", "best_of", "best_of must not be less than n");
    else
        srv_refuse(problem, 400, "not_supported", "best_of", "best_of above n is not supported by this server");
}

// cg_tolerance 0 is short for exact, unless a mode that does not look at it is named.
static void settle_solver(srv_request *request, const srv_bounds *bounds, srv_problem *problem) {
    const bool tolerance_given = request->given & SRV_GIVEN_CG_TOLERANCE;

    if (tolerance_given && request->cg_tolerance == 0 && request->cg_mode == ENG_CG_TOLERANCE) {
        request->cg_mode = ENG_CG_EXACT;
        request->given |= SRV_GIVEN_CG_MODE;
        if (!bounds->allow_exact)
            srv_refuse(problem, 400, "out_of_range", "cg_tolerance", "this server does not allow exact solves");
    } else if (tolerance_given && !((double)request->cg_tolerance >= bounds->min_cg_tolerance))
        srv_refuse(problem, 400, "out_of_range", "cg_tolerance", "cg_tolerance must be at least %.9g on this server",
                   bounds->min_cg_tolerance);
    if (request->cg_mode == ENG_CG_EXACT && !bounds->allow_exact)
        srv_refuse(problem, 400, "out_of_range", "cg_mode", "this server does not allow cg_mode exact");
    if (request->cg_mode == ENG_CG_STEPS && !(request->given & SRV_GIVEN_CG_MAX_STEPS))
        srv_refuse(problem, 400, "missing_field", "cg_max_steps", "cg_mode steps needs cg_max_steps");
    if ((request->given & SRV_GIVEN_CG_MAX_STEPS) && request->cg_max_steps > bounds->max_cg_steps)
        srv_refuse(problem, 400, "out_of_range", "cg_max_steps", "cg_max_steps must be at most %lld on this server",
                   (long long)bounds->max_cg_steps);
    if ((request->given & SRV_GIVEN_MAX_LOOPS) && request->max_loops > bounds->max_loops)
        srv_refuse(problem, 400, "out_of_range", "max_loops", "max_loops must be at most %lld on this server",
                   (long long)bounds->max_loops);
}

static void check_whole(const json_t *root, srv_request *request, const srv_bounds *bounds, srv_problem *problem) {
    const json_t *options = json_object_get(root, "stream_options");

    check_best_of(root, request, problem);
    if (options && !json_is_null(options) && !request->stream)
        srv_refuse(problem, 400, "invalid_value", "stream_options", "stream_options needs stream");
    if (request->prompt_count * (size_t)request->n > SRV_MAX_CHOICES)
        srv_refuse(problem, 400, "out_of_range", "n", "prompts times n must be at most %d", SRV_MAX_CHOICES);
    settle_solver(request, bounds, problem);
}

// An absent prompt is one empty text.
static void add_empty_prompt(srv_request *request, srv_problem *problem) {
    if (request->prompts)
        return;
    request->prompts = calloc(1, sizeof *request->prompts);
    char *text = copy_bytes("", 0);
    if (!request->prompts || !text) {
        free(text);
        refuse_memory(problem);
        return;
    }
    request->prompts->text = text;
    request->prompt_count = 1;
}

eng_status srv_request_parse(const char *body, size_t length, const srv_bounds *bounds, srv_request *request,
                             srv_problem *problem) {
    *request = (srv_request){
        .add_special_tokens = true,
        .max_tokens = bounds->max_tokens < 16 ? bounds->max_tokens : 16,
        .n = 1,
        .temperature = 1,
        .top_p = 1,
        .cg_mode = ENG_CG_TOLERANCE,
    };
    json_t *root = load_object(body, length, bounds, problem);
    if (!root)
        return status_of(problem);
    request->given = apply_fields(root, completion_fields, sizeof completion_fields / sizeof *completion_fields, bounds,
                                  request, problem);
    if (!problem->status)
        check_whole(root, request, bounds, problem);
    if (!problem->status)
        add_empty_prompt(request, problem);
    json_decref(root);
    return status_of(problem);
}

void srv_request_free(srv_request *request) {
    for (size_t i = 0; i < request->prompt_count; i++) {
        free(request->prompts[i].text);
        free(request->prompts[i].ids);
    }
    for (size_t i = 0; i < request->stop_count; i++)
        free((char *)request->stops[i].bytes);
    free(request->prompts);
    free(request->stops);
    free(request->model);
    *request = (srv_request){0};
}

// required: the field that the call is about.
static eng_status parse_token_request(const char *body, size_t length, const srv_bounds *bounds, const field *fields,
                                      size_t count, const char *required, srv_token_request *request,
                                      srv_problem *problem) {
    *request = (srv_token_request){.add_special_tokens = true};
    json_t *root = load_object(body, length, bounds, problem);
    if (!root)
        return status_of(problem);
    const json_t *value = json_object_get(root, required);
    if (!value || json_is_null(value))
        srv_refuse(problem, 400, "missing_field", required, "%s is missing", required);
    apply_fields(root, fields, count, bounds, request, problem);
    json_decref(root);
    return status_of(problem);
}

eng_status srv_tokenize_parse(const char *body, size_t length, const srv_bounds *bounds, srv_token_request *request,
                              srv_problem *problem) {
    return parse_token_request(body, length, bounds, tokenize_fields, sizeof tokenize_fields / sizeof *tokenize_fields,
                               "prompt", request, problem);
}

eng_status srv_detokenize_parse(const char *body, size_t length, const srv_bounds *bounds, srv_token_request *request,
                                srv_problem *problem) {
    return parse_token_request(body, length, bounds, detokenize_fields,
                               sizeof detokenize_fields / sizeof *detokenize_fields, "tokens", request, problem);
}

void srv_token_request_free(srv_token_request *request) {
    free(request->prompt.text);
    free(request->prompt.ids);
    free(request->model);
    *request = (srv_token_request){0};
}
