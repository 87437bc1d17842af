// SPDX-License-Identifier: Apache-2.0
// The table of request fields; see fields.h.
// Stateless. A value is brought into the field's JSON type, nothing more.
#include "clients/cli/fields.h"

#include <string.h>

#include "clients/cli/cli.h"
#include "clients/cli/options.h"

typedef enum kind { TEXT, INTEGER, REAL, TRUE, FALSE, TEXTS, INTEGERS, BIAS, ANY } kind;

struct cli_field {
    const char *option, *name; // on the command line, in the request
    kind kind;
    const char *value_name, *help;
};

static const cli_field fields[] = {
    {"model", "model", TEXT, "NAME", "which model; without it the server's first"},
    {"max-tokens", "max_tokens", INTEGER, "N", "most tokens to write"},
    {"min-tokens", "min_tokens", INTEGER, "N", "tokens before the text may end"},
    {"temperature", "temperature", REAL, "X", "0: greedy"},
    {"top-p", "top_p", REAL, "X", "probability that the candidates sum up to"},
    {"top-k", "top_k", INTEGER, "N", "number of candidates; 0: all"},
    {"min-p", "min_p", REAL, "X", "least probability of a candidate, as a share of the best one's"},
    {"seed", "seed", INTEGER, "N", "the same seed draws the same text"},
    {"n", "n", INTEGER, "N", "choices a prompt"},
    {"best-of", "best_of", INTEGER, "N", "choices drawn, of which the best N are returned"},
    {"stop", "stop", TEXTS, "TEXT", "end before this text; may be repeated"},
    {"stop-token-id", "stop_token_ids", INTEGERS, "ID", "end at this token; may be repeated"},
    {"include-stop-str-in-output", "include_stop_str_in_output", TRUE, NULL, "keep the stop text"},
    {"ignore-eos", "ignore_eos", TRUE, NULL, "go on after an end of text"},
    {"logit-bias", "logit_bias", BIAS, "ID=X", "added to the logit of a token; may be repeated"},
    {"presence-penalty", "presence_penalty", REAL, "X", "taken off tokens that were written"},
    {"frequency-penalty", "frequency_penalty", REAL, "X", "taken off once for each time a token was written"},
    {"repetition-penalty", "repetition_penalty", REAL, "X", "divides the logits of tokens that were read or written"},
    {"echo", "echo", TRUE, NULL, "the prompt in front of the text"},
    {"logprobs", "logprobs", INTEGER, "N", "log-probabilities of this many candidates (shown by --json)"},
    {"return-token-ids", "return_token_ids", TRUE, NULL, "token ids (shown by --json)"},
    {"no-special-tokens", "add_special_tokens", FALSE, NULL, "put no start-of-text token before the prompt"},
    {"priority", "priority", INTEGER, "N", "lower goes first"},
    {"user", "user", TEXT, "NAME", "whom the request is for"},
    {"cg-tolerance", "cg_tolerance", REAL, "X", "relative residual at which a solve stops"},
    {"cg-max-steps", "cg_max_steps", INTEGER, "N", "most steps of a solve"},
    {"cg-mode", "cg_mode", TEXT, "MODE", "tolerance, steps or exact"},
    {"exit-threshold", "exit_threshold", REAL, "X", "looped models: exit probability at which a token is read"},
    {"max-loops", "max_loops", INTEGER, "N", "looped models: most loops"},
    {"on-unconverged", "on_unconverged", TEXT, "WHAT", "accept, or error: end when a solve hits its bound"},
    {"compute-details", "compute_details", TRUE, NULL, "solver figures of every token (shown by --json)"},
    {"session", "session", TEXT, "ID", "continue a session"},
    {"session-position", "session_position", INTEGER, "N", "only if the session stands there"},
    {"session-rollback", "session_rollback", TRUE, NULL, "return to where the request began"},
    {"field", NULL, ANY, "NAME=JSON", "any other field of the request; may be repeated"},
};

const cli_field *cli_field_find(const char *name, size_t length) {
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        if (strlen(fields[i].option) == length && memcmp(fields[i].option, name, length) == 0)
            return &fields[i];
    return NULL;
}

bool cli_field_takes_value(const cli_field *field) {
    return field->value_name != NULL;
}

// The value of a scalar kind, NULL after a complaint.
static json_t *make_scalar(const cli_field *field, kind kind, const char *value) {
    int64_t integer;
    double real;
    char word[64];
    json_t *made = NULL;

    snprintf(word, sizeof word, "--%s", field->option);
    switch (kind) {
    case TEXT:
        made = json_string(value);
        if (!made)
            cli_complain("--%s: the text is not UTF-8", field->option);
        return made;
    case INTEGER:
        return cli_read_integer(word, value, &integer) ? json_integer(integer) : NULL;
    case REAL:
        return cli_read_real(word, value, &real) ? json_real(real) : NULL;
    case TRUE:
        return json_true();
    default:
        return json_false();
    }
}

static json_t *member(json_t *body, const char *name, json_t *(*make)(void)) {
    json_t *found = json_object_get(body, name);
    if (!found) {
        found = make();
        json_object_set_new(body, name, found);
    }
    return found;
}

// NAME=VALUE apart: *rest is the value, the result the length of the name; 0 after a complaint.
static size_t split(const cli_field *field, const char *text, char name[64], const char **rest) {
    const char *equals = strchr(text, '=');
    if (!equals || equals == text || equals - text >= 64) {
        cli_complain("--%s: \"%.40s\" is not %s", field->option, text, field->value_name);
        return 0;
    }
    memcpy(name, text, (size_t)(equals - text));
    name[equals - text] = '\0';
    *rest = equals + 1;
    return (size_t)(equals - text);
}

static bool set_bias(const cli_field *field, const char *value, json_t *body) {
    const char *rest;
    char name[64], word[64];
    int64_t id;

    snprintf(word, sizeof word, "--%s", field->option);
    if (!split(field, value, name, &rest) || !cli_read_integer(word, name, &id))
        return false;
    json_t *bias = make_scalar(field, REAL, rest);
    return bias && json_object_set_new(member(body, field->name, json_object), name, bias) == 0;
}

static bool set_any(const cli_field *field, const char *value, json_t *body) {
    const char *rest;
    char name[64];

    if (!split(field, value, name, &rest))
        return false;
    json_t *any = json_loads(rest, JSON_DECODE_ANY | JSON_REJECT_DUPLICATES, NULL);
    if (!any) {
        cli_complain("--%s: what follows \"%s=\" is not JSON", field->option, name);
        return false;
    }
    return json_object_set_new(body, name, any) == 0;
}

bool cli_field_set(const cli_field *field, const char *value, json_t *body) {
    if (field->kind == ANY)
        return set_any(field, value, body);
    if (field->kind == BIAS)
        return set_bias(field, value, body);
    if (field->kind == TEXTS || field->kind == INTEGERS) {
        json_t *item = make_scalar(field, field->kind == TEXTS ? TEXT : INTEGER, value);
        return item && json_array_append_new(member(body, field->name, json_array), item) == 0;
    }
    json_t *scalar = make_scalar(field, field->kind, value);
    return scalar && json_object_set_new(body, field->name, scalar) == 0;
}

void cli_fields_print(const cli_option *own, size_t own_count, bool (*lists)(const char *name)) {
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        bool hidden = lists && fields[i].name && !lists(fields[i].name);
        for (size_t k = 0; k < own_count; k++)
            hidden = hidden || strcmp(own[k].name, fields[i].option) == 0;
        if (!hidden)
            cli_print_option(fields[i].option, fields[i].value_name, fields[i].help);
    }
}
