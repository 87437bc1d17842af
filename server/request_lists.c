// SPDX-License-Identifier: Apache-2.0
// Setters of what holds several values: prompts, stop strings, stop ids, biases. Each list is bounded before anything
// is allocated for it; ids are compared with a vocabulary later, when the model is known. Pool threads.
#include <stdlib.h>
#include <string.h>

#include "server/request_fields.h"

static const char prompt_forms[] = "a string, a list of strings, a list of token ids or a list of such lists";
static const char id_list[] = "a list of token ids";

static void *allocate(const srv_reading *in, size_t count, size_t size) {
    void *memory = calloc(count, size);
    if (!memory)
        srv_refuse_engine(in->problem, ENG_NO_MEMORY, NULL);
    return memory;
}

// ---- prompts -------------------------------------------------------------------------------------------------------

static void set_text_prompt(const srv_reading *in, const json_t *value, srv_prompt *prompt) {
    prompt->length = json_string_length(value);
    prompt->text = srv_copy_bytes(in, json_string_value(value), prompt->length);
}

static void set_id_prompt(const srv_reading *in, const char *forms, const json_t *array, srv_prompt *prompt) {
    const size_t count = json_array_size(array);
    const char *name = in->field->name;

    if (count == 0) {
        srv_refuse(in->problem, 400, "invalid_value", name, "%s holds an empty list of token ids", name);
        return;
    }
    if (count > (size_t)in->bounds->max_prompt_tokens) {
        srv_refuse(in->problem, 400, "prompt_too_long", name, "%s has %zu token ids; this server takes %lld", name,
                   count, (long long)in->bounds->max_prompt_tokens);
        return;
    }
    prompt->ids = allocate(in, count, sizeof *prompt->ids);
    if (!prompt->ids)
        return;
    prompt->count = count;
    for (size_t i = 0; i < count; i++) {
        int64_t id;
        if (!srv_read_integer(json_array_get(array, i), &id)) {
            srv_refuse_type(in, forms);
            return;
        }
        if (!(id >= 0 && id <= INT32_MAX)) {
            srv_refuse(in->problem, 400, "out_of_range", name, "token id %lld (at index %zu) is outside the vocabulary",
                       (long long)id, i);
            return;
        }
        prompt->ids[i] = (int32_t)id;
    }
}

static void set_prompt_list(const srv_reading *in, const json_t *array, srv_request *request) {
    const size_t count = json_array_size(array);
    const bool texts = json_is_string(json_array_get(array, 0));

    if (count > (size_t)in->bounds->max_prompts) {
        srv_refuse(in->problem, 400, "out_of_range", in->field->name, "%zu prompts; a request may have %lld", count,
                   (long long)in->bounds->max_prompts);
        return;
    }
    request->prompts = allocate(in, count, sizeof *request->prompts);
    if (!request->prompts)
        return;
    request->prompt_count = count;
    for (size_t i = 0; i < count && !in->problem->status; i++) {
        const json_t *item = json_array_get(array, i);
        if (texts ? !json_is_string(item) : !json_is_array(item))
            srv_refuse_type(in, prompt_forms);
        else if (texts)
            set_text_prompt(in, item, &request->prompts[i]);
        else
            set_id_prompt(in, prompt_forms, item, &request->prompts[i]);
    }
}

void srv_set_prompt(const srv_reading *in, json_t *value, void *target) {
    srv_request *request = (srv_request *)((char *)target - in->field->offset);

    if (json_is_array(value) && json_array_size(value) == 0) {
        srv_refuse(in->problem, 400, "invalid_value", in->field->name, "%s is an empty list", in->field->name);
        return;
    }
    if (json_is_array(value) && !json_is_number(json_array_get(value, 0))) {
        set_prompt_list(in, value, request);
        return;
    }
    if (!json_is_string(value) && !json_is_array(value)) {
        srv_refuse_type(in, prompt_forms);
        return;
    }
    request->prompts = allocate(in, 1, sizeof *request->prompts);
    if (!request->prompts)
        return;
    request->prompt_count = 1;
    if (json_is_string(value))
        set_text_prompt(in, value, request->prompts);
    else
        set_id_prompt(in, prompt_forms, value, request->prompts);
}

// ---- messages ------------------------------------------------------------------------------------------------------

static const char content_forms[] = "a list of messages whose content is a string or a list of text parts";

// The role as templates know it; NULL with a refusal.
static const char *role_of(const srv_reading *in, const json_t *message, size_t index) {
    static const char *const roles[][2] = {
        {"system", "system"}, {"developer", "system"}, {"user", "user"}, {"assistant", "assistant"}};
    const char *given = json_string_value(json_object_get(message, "role"));

    for (size_t i = 0; given && i < sizeof roles / sizeof *roles; i++)
        if (strcmp(given, roles[i][0]) == 0)
            return roles[i][1];
    srv_refuse(in->problem, 400, "invalid_value", "messages",
               "messages[%zu].role must be system, developer, user or assistant", index);
    return NULL;
}

// The text of a part; NULL: it is none.
static const json_t *part_text(const json_t *part) {
    const char *type = json_string_value(json_object_get(part, "type"));
    const json_t *text = json_object_get(part, "text");

    return type && strcmp(type, "text") == 0 && json_is_string(text) ? text : NULL;
}

// Texts of the parts, a line end between two.
static void join_parts(const srv_reading *in, const json_t *parts, size_t index, srv_message *message) {
    const json_t *part;
    size_t i, length = 0;

    json_array_foreach(parts, i, part) {
        if (!part_text(part)) {
            srv_refuse(in->problem, 400, "invalid_value", "messages",
                       "messages[%zu].content[%zu] is no part of type text", index, i);
            return;
        }
        length += json_string_length(part_text(part)) + 1;
    }
    message->content = allocate(in, length + 1, 1);
    json_array_foreach(parts, i, part) {
        const json_t *text = part_text(part);
        if (!message->content)
            return;
        if (i)
            message->content[message->length++] = '\n';
        memcpy(message->content + message->length, json_string_value(text), json_string_length(text));
        message->length += json_string_length(text);
    }
}

static void set_message(const srv_reading *in, const json_t *value, size_t index, srv_message *message) {
    const json_t *content = json_object_get(value, "content");

    message->role = role_of(in, value, index);
    if (!message->role)
        return;
    if (json_is_string(content)) {
        message->length = json_string_length(content);
        message->content = srv_copy_bytes(in, json_string_value(content), message->length);
    } else if (json_is_array(content))
        join_parts(in, content, index, message);
    else
        srv_refuse(in->problem, 400, "invalid_type", "messages",
                   "messages[%zu].content must be a string or a list of text parts", index);
}

void srv_set_messages(const srv_reading *in, json_t *value, void *target) {
    srv_request *request = (srv_request *)((char *)target - in->field->offset);
    const size_t count = json_array_size(value);

    if (!json_is_array(value)) {
        srv_refuse_type(in, content_forms);
        return;
    }
    if (count < 1 || count > SRV_MAX_MESSAGES) {
        srv_refuse(in->problem, 400, "out_of_range", "messages", "%zu messages; 1 to %d are taken", count,
                   SRV_MAX_MESSAGES);
        return;
    }
    request->messages = allocate(in, count, sizeof *request->messages);
    if (!request->messages)
        return;
    request->message_count = count;
    for (size_t i = 0; i < count && !in->problem->status; i++)
        set_message(in, json_array_get(value, i), i, &request->messages[i]);
}

// ---- texts and ids -------------------------------------------------------------------------------------------------

void srv_set_text(const srv_reading *in, json_t *value, void *target) {
    if (json_is_string(value))
        set_text_prompt(in, value, target);
    else
        srv_refuse_type(in, "a string");
}

void srv_set_ids(const srv_reading *in, json_t *value, void *target) {
    if (!json_is_array(value))
        srv_refuse_type(in, id_list);
    else if (json_array_size(value) > 0)
        set_id_prompt(in, id_list, value, target);
}

// ---- ends ----------------------------------------------------------------------------------------------------------

static void add_stop(const srv_reading *in, const json_t *value, srv_request *request) {
    if (!json_is_string(value)) {
        srv_refuse_type(in, "a string or a list of strings");
        return;
    }
    const size_t length = json_string_length(value);
    if (!(length >= 1 && length <= SRV_MAX_STOP_BYTES)) {
        srv_refuse(in->problem, 400, "out_of_range", in->field->name, "a stop string must have 1 to %d bytes",
                   SRV_MAX_STOP_BYTES);
        return;
    }
    char *copy = srv_copy_bytes(in, json_string_value(value), length);
    if (copy)
        request->stops[request->stop_count++] = (eng_text){.bytes = copy, .length = length};
}

void srv_set_stop(const srv_reading *in, json_t *value, void *target) {
    srv_request *request = (srv_request *)((char *)target - in->field->offset);
    const size_t count = json_is_array(value) ? json_array_size(value) : 1;

    if (count > SRV_MAX_STOPS) {
        srv_refuse(in->problem, 400, "out_of_range", in->field->name, "at most %d stop strings", SRV_MAX_STOPS);
        return;
    }
    if (count == 0)
        return;
    request->stops = allocate(in, count, sizeof *request->stops);
    for (size_t i = 0; i < count && !in->problem->status; i++)
        add_stop(in, json_is_array(value) ? json_array_get(value, i) : value, request);
}

void srv_set_stop_ids(const srv_reading *in, json_t *value, void *target) {
    srv_request *request = (srv_request *)((char *)target - in->field->offset);
    const size_t count = json_array_size(value);

    if (!json_is_array(value)) {
        srv_refuse_type(in, id_list);
        return;
    }
    if (count > ENG_MAX_STOP_IDS) {
        srv_refuse(in->problem, 400, "out_of_range", in->field->name, "at most %d stop ids", ENG_MAX_STOP_IDS);
        return;
    }
    for (size_t i = 0; i < count; i++) {
        int64_t id;
        if (!srv_read_ranged(in, json_array_get(value, i), 0, INT32_MAX, &id))
            return;
        request->stop_ids[i] = (int32_t)id;
    }
    request->stop_id_count = count;
}

// ---- biases --------------------------------------------------------------------------------------------------------

// A token id as JSON's keys spell it: decimal digits, no sign, no space, no leading zero.
static bool read_id(const char *text, int32_t *out) {
    enum { MOST_DIGITS = 10 };
    const size_t length = strlen(text);
    int64_t id = 0;

    if (length == 0 || length > MOST_DIGITS || (text[0] == '0' && length > 1))
        return false;
    for (size_t i = 0; i < length; i++) {
        if (text[i] < '0' || text[i] > '9')
            return false;
        id = id * 10 + (text[i] - '0');
    }
    *out = (int32_t)id;
    return id <= INT32_MAX;
}

void srv_set_logit_bias(const srv_reading *in, json_t *value, void *target) {
    srv_request *request = (srv_request *)((char *)target - in->field->offset);
    const size_t count = json_object_size(value);
    const char *key;
    json_t *bias;

    if (!json_is_object(value)) {
        srv_refuse_type(in, "an object of token ids and biases");
        return;
    }
    if (count == 0)
        return;
    request->biases = allocate(in, count, sizeof *request->biases);
    if (!request->biases)
        return;
    json_object_foreach(value, key, bias) {
        eng_logit_bias *out = &request->biases[request->bias_count];
        const float number = (float)json_number_value(bias);
        if (!read_id(key, &out->id))
            srv_refuse(in->problem, 400, "invalid_value", in->field->name,
                       "a key of logit_bias must be a token id in plain decimal");
        else if (!json_is_number(bias))
            srv_refuse(in->problem, 400, "invalid_type", in->field->name, "a bias must be a number");
        else if (!(number >= -SRV_MAX_BIAS && number <= SRV_MAX_BIAS))
            srv_refuse(in->problem, 400, "out_of_range", in->field->name, "a bias must be between -%d and %d",
                       SRV_MAX_BIAS, SRV_MAX_BIAS);
        if (in->problem->status)
            return;
        out->bias = number;
        request->bias_count++;
    }
}
