// SPDX-License-Identifier: Apache-2.0
// mesa session ACTION: make, list, look at, fork, take back, drop sessions, and bring their states to files and back.
//
// What makes a session prints its name alone on standard output, so that it can be kept in a variable. A state goes to
// a file whole or not at all: it is written beside it and renamed.
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "clients/cli/answer.h"
#include "clients/cli/exchange.h"
#include "clients/cli/options.h"
#include "clients/cli/terminal.h"

enum { MAX_ARGUMENTS = 3, MAX_PATH = 512, MAX_FILE_NAME = 4096 };

// No number that someone may give by mistake: those are the server's to refuse.
static const int64_t not_given = INT64_MIN;

typedef struct session_options {
    const char *url, *key_file;
    int64_t ttl, position; // not_given, or what the server judges
    bool json;
    double timeout;
} session_options;

typedef struct session {
    session_options options;
    cli_endpoint endpoint;
    json_t *body;
    const char *arguments[MAX_ARGUMENTS]; // NULL behind the last
    cli_exchange exchange;                // of the last request
} session;

// ---- requests ------------------------------------------------------------------------------------------------------

// "/v1/sessions/NAME" and what follows; false: no session is called that, and the path would be another.
static bool make_path(const char *name, const char *rest, char path[MAX_PATH]) {
    const size_t length = strlen(name);

    if (length == 0 || length > 128 || strspn(name, "abcdefghijklmnopqrstuvwxyz0123456789-") != length) {
        cli_complain("\"%.60s\" is no session's name", name);
        return false;
    }
    snprintf(path, MAX_PATH, "/v1/sessions/%s%s", name, rest);
    return true;
}

// Sends it; CLI_EXIT_OK: done, and the exchange holds the answer.
static int ask(session *session, cli_request request) {
    cli_exchange_free(&session->exchange);
    request.seconds = session->options.timeout;
    const int result = cli_exchange_run(&session->endpoint, &request, NULL, NULL, &session->exchange);
    if (result == CLI_EXIT_OK && !cli_exchange_accepted(&session->exchange))
        return CLI_EXIT_REFUSED;
    return result;
}

static int send_fields(session *session, const char *path) {
    char *text = json_dumps(session->body, JSON_COMPACT);

    if (!text) {
        cli_complain("out of memory");
        return CLI_EXIT_REFUSED;
    }
    const int result = ask(session, (cli_request){.path = path, .body = text, .length = strlen(text)});
    free(text);
    return result;
}

static int finish(void) {
    return cli_finish_output() ? CLI_EXIT_OK : CLI_EXIT_REFUSED;
}

// The answer as an object, which the caller frees; NULL after a complaint.
static json_t *read_answer(const session *session) {
    const cli_buf *body = &session->exchange.body;
    cli_answer answer;

    if (cli_answer_read(body->data ? body->data : "", body->length, &answer))
        return answer.root;
    cli_complain("the answer is not a JSON object");
    return NULL;
}

static int print_json(const session *session) {
    fwrite(session->exchange.body.data ? session->exchange.body.data : "", 1, session->exchange.body.length, stdout);
    putchar('\n');
    return finish();
}

// Of what was made.
static int print_name(const session *session) {
    if (session->options.json)
        return print_json(session);
    json_t *made = read_answer(session);
    const char *name = json_string_value(json_object_get(made, "id"));
    int result = CLI_EXIT_REFUSED;

    if (name) {
        cli_put_text(name, strlen(name), isatty(STDOUT_FILENO));
        putchar('\n');
        result = finish();
    } else if (made)
        cli_complain("the answer names no session");
    json_decref(made);
    return result;
}

// ---- create, fork, rollback, drop ----------------------------------------------------------------------------------

static bool set_integer(session *session, const char *name, int64_t value) {
    return value == not_given || json_object_set_new(session->body, name, json_integer(value)) == 0;
}

static bool set_prompt(session *session, const char *prompt) {
    cli_buf text = {.limit = CLI_MAX_ANSWER};
    bool ok = true;

    cli_buf_append(&text, "", 0);
    if (strcmp(prompt, "-") == 0)
        ok = cli_read_all(stdin, "standard input", &text);
    else
        cli_buf_append(&text, prompt, strlen(prompt));
    json_t *value = ok && !text.failed ? json_stringn(text.data, text.length) : NULL;
    if (ok && !value)
        cli_complain("the prompt is not UTF-8");
    cli_buf_free(&text);
    return value && json_object_set_new(session->body, "prompt", value) == 0;
}

static int create(session *session) {
    if ((session->arguments[0] && !set_prompt(session, session->arguments[0])) ||
        !set_integer(session, "ttl_s", session->options.ttl))
        return CLI_EXIT_USAGE;
    const int result = send_fields(session, "/v1/sessions");
    return result ? result : print_name(session);
}

static int fork_session(session *session) {
    char path[MAX_PATH];

    if (!make_path(session->arguments[0], "/fork", path) || !set_integer(session, "ttl_s", session->options.ttl) ||
        !set_integer(session, "position", session->options.position))
        return CLI_EXIT_USAGE;
    const int result = send_fields(session, path);
    return result ? result : print_name(session);
}

static int rollback(session *session) {
    char path[MAX_PATH];
    int64_t position;

    if (!make_path(session->arguments[0], "/rollback", path) ||
        !cli_read_integer("rollback", session->arguments[1], &position))
        return CLI_EXIT_USAGE;
    json_object_set_new(session->body, "position", json_integer(position));
    const int result = send_fields(session, path);
    return result || !session->options.json ? result : print_json(session);
}

static int drop(session *session) {
    char path[MAX_PATH];

    if (!make_path(session->arguments[0], "", path))
        return CLI_EXIT_USAGE;
    return ask(session, (cli_request){.method = "DELETE", .path = path});
}

// ---- list, show ----------------------------------------------------------------------------------------------------

static void print_text(const char *text, int width, bool terminal) {
    const int length = text ? (int)strlen(text) : 1;

    cli_put_text(text ? text : "-", (size_t)length, terminal);
    printf("%*s", length < width ? width - length : 1, "");
}

static int list(session *session) {
    const bool terminal = isatty(STDOUT_FILENO);
    const int64_t now = (int64_t)time(NULL);
    json_t *item;
    size_t at;

    int result = ask(session, (cli_request){.path = "/v1/sessions"});
    if (result || session->options.json)
        return result ? result : print_json(session);
    json_t *answer = read_answer(session), *data = json_object_get(answer, "data");
    if (!json_is_array(data)) {
        if (answer)
            cli_complain("the answer is no list of sessions");
        json_decref(answer);
        return CLI_EXIT_REFUSED;
    }
    printf("%-38s%-24s%-12s%s\n", "SESSION", "MODEL", "POSITION", "SECONDS LEFT");
    json_array_foreach(data, at, item) {
        print_text(json_string_value(json_object_get(item, "id")), 38, terminal);
        print_text(json_string_value(json_object_get(item, "model")), 24, terminal);
        printf("%-12lld%lld\n", (long long)json_integer_value(json_object_get(item, "position")),
               (long long)(json_integer_value(json_object_get(item, "expires_at")) - now));
    }
    json_decref(answer);
    return finish();
}

// "name value" a line, an object's members behind its name.
static void print_members(json_t *object, const char *before, bool terminal) {
    const char *name;
    json_t *value;

    json_object_foreach(object, name, value) {
        char whole[96];
        snprintf(whole, sizeof whole, "%s%s", before, name);
        if (json_is_object(value)) {
            snprintf(whole, sizeof whole, "%.80s.", name);
            print_members(value, whole, terminal);
            continue;
        }
        char *text = json_is_string(value) ? strdup(json_string_value(value))
                                           : json_dumps(value, JSON_ENCODE_ANY | JSON_REAL_PRECISION(9));
        print_text(whole, 24, terminal);
        if (text)
            cli_put_text(text, strlen(text), terminal);
        putchar('\n');
        free(text);
    }
}

static int show(session *session) {
    char path[MAX_PATH];

    if (!make_path(session->arguments[0], "", path))
        return CLI_EXIT_USAGE;
    const int result = ask(session, (cli_request){.path = path});
    if (result || session->options.json)
        return result ? result : print_json(session);
    json_t *answer = read_answer(session);
    if (!answer)
        return CLI_EXIT_REFUSED;
    print_members(answer, "", isatty(STDOUT_FILENO));
    json_decref(answer);
    return finish();
}

// ---- states --------------------------------------------------------------------------------------------------------

static bool write_all(FILE *file, const cli_buf *bytes) {
    bool ok = fwrite(bytes->data ? bytes->data : "", 1, bytes->length, file) == bytes->length;
    ok = fflush(file) == 0 && ok;
    ok = fsync(fileno(file)) == 0 && ok;
    const int fault = errno;
    ok = fclose(file) == 0 && ok;
    if (!ok && fault)
        errno = fault;
    return ok;
}

static int write_file(const char *name, const cli_buf *bytes) {
    char beside[MAX_FILE_NAME];

    if (snprintf(beside, sizeof beside, "%s.part", name) >= (int)sizeof beside) {
        cli_complain("%.60s...: the name is too long", name);
        return CLI_EXIT_USAGE;
    }
    errno = 0;
    FILE *file = fopen(beside, "wbe");
    if (file && write_all(file, bytes) && rename(beside, name) == 0)
        return CLI_EXIT_OK;
    cli_complain("%s: %s", file ? name : beside, strerror(errno));
    if (file)
        unlink(beside);
    return CLI_EXIT_USAGE;
}

static int export_state(session *session) {
    char path[MAX_PATH];

    if (!make_path(session->arguments[0], "/state", path))
        return CLI_EXIT_USAGE;
    const int result = ask(session, (cli_request){.path = path});
    if (result)
        return result;
    if (strcmp(session->arguments[1], "-") != 0)
        return write_file(session->arguments[1], &session->exchange.body);
    fwrite(session->exchange.body.data ? session->exchange.body.data : "", 1, session->exchange.body.length, stdout);
    return finish();
}

static bool read_state(const char *name, cli_buf *state) {
    const bool standard = strcmp(name, "-") == 0;
    FILE *file = standard ? stdin : fopen(name, "rbe");

    if (!file) {
        cli_complain("%s: %s", name, strerror(errno));
        return false;
    }
    cli_buf_append(state, "", 0);
    const bool read = cli_read_all(file, standard ? "standard input" : name, state);
    if (!standard)
        fclose(file);
    return read;
}

// The name of the session that takes the state: the one given, or a new one.
static int find_taker(session *session, char name[160]) {
    if (session->arguments[1]) {
        snprintf(name, 160, "%.150s", session->arguments[1]);
        return CLI_EXIT_OK;
    }
    int result =
        set_integer(session, "ttl_s", session->options.ttl) ? send_fields(session, "/v1/sessions") : CLI_EXIT_REFUSED;
    json_t *made = result ? NULL : read_answer(session);
    const char *id = json_string_value(json_object_get(made, "id"));
    if (id)
        snprintf(name, 160, "%.150s", id);
    else if (!result)
        result = CLI_EXIT_REFUSED;
    json_decref(made);
    return result;
}

// A session that was made for a state that is refused does not stay.
static int import_state(session *session) {
    cli_buf state = {.limit = CLI_MAX_ANSWER};
    char name[160] = "", path[MAX_PATH];
    int result = read_state(session->arguments[0], &state) ? find_taker(session, name) : CLI_EXIT_USAGE;

    if (!result && !make_path(name, "/state", path))
        result = CLI_EXIT_USAGE;
    if (!result) {
        result = ask(
            session,
            (cli_request){.method = "PUT", .path = path, .body = state.data, .length = state.length, .bytes = true});
        if (result && !session->arguments[1] && make_path(name, "", path))
            (void)ask(session, (cli_request){.method = "DELETE", .path = path});
        else if (!result)
            result = print_name(session);
    }
    cli_buf_free(&state);
    return result;
}

// ---- the command ---------------------------------------------------------------------------------------------------

typedef struct action {
    const char *name;
    int (*run)(session *session);
    int least, most;    // arguments
    const char *fields; // of the request that it takes, with spaces around each; NULL: none
    bool ttl, position;
} action;

static const char create_fields[] =
    " model add_special_tokens cg_tolerance cg_max_steps cg_mode exit_threshold max_loops on_unconverged degrade ";
static const action actions[] = {
    {"create", create, 0, 1, create_fields, true, false},
    {"list", list, 0, 0, NULL, false, false},
    {"show", show, 1, 1, NULL, false, false},
    {"fork", fork_session, 1, 1, NULL, true, true},
    {"rollback", rollback, 2, 2, NULL, false, false},
    {"export", export_state, 2, 2, NULL, false, false},
    {"import", import_state, 1, 2, create_fields, true, false},
    {"drop", drop, 1, 1, NULL, false, false},
};

static bool takes(const action *action, const char *name) {
    char word[96];

    snprintf(word, sizeof word, " %.80s ", name);
    return action->fields && strstr(action->fields, word);
}

static bool is_taken(const char *name) {
    bool taken = false;

    for (size_t i = 0; i < sizeof actions / sizeof *actions; i++)
        taken = taken || takes(&actions[i], name);
    return taken;
}

static bool check_line(const session *session, const action *action, int arguments) {
    const char *name;
    json_t *value;

    if (arguments < action->least || arguments > action->most) {
        cli_complain("%s: %d %s needed, not %d (see mesa session --help)", action->name,
                     arguments < action->least ? action->least : action->most,
                     action->most == 1 ? "argument is" : "arguments are", arguments);
        return false;
    }
    json_object_foreach(session->body, name, value) {
        if (!takes(action, name)) {
            cli_complain("%s has no meaning for %s", name, action->name);
            return false;
        }
    }
    if ((session->options.ttl != not_given && !action->ttl) ||
        (session->options.position != not_given && !action->position)) {
        cli_complain("--%s has no meaning for %s",
                     session->options.ttl != not_given && !action->ttl ? "ttl" : "position", action->name);
        return false;
    }
    return true;
}

static int run(session *session, int arguments, const char *name) {
    const action *action = NULL;

    for (size_t i = 0; name && i < sizeof actions / sizeof *actions; i++)
        if (strcmp(actions[i].name, name) == 0)
            action = &actions[i];
    if (!name)
        cli_complain("an action is needed (see mesa session --help)");
    else if (!action)
        cli_complain("unknown action \"%.40s\" (see mesa session --help)", name);
    else if (check_line(session, action, arguments) &&
             cli_endpoint_open(session->options.url, session->options.key_file, &session->endpoint)) {
        const int result = action->run(session);
        cli_exchange_free(&session->exchange);
        cli_endpoint_close(&session->endpoint);
        return result;
    }
    return CLI_EXIT_USAGE;
}

int cli_command_session(int argc, char **argv) {
    session session = {.options = {.ttl = not_given, .position = not_given}, .body = json_object()};
    session_options *o = &session.options;
    const cli_option options[] = {
        CLI_ENDPOINT_OPTIONS(o->url, o->key_file),
        {"ttl", "SECONDS", CLI_INTEGER, &o->ttl, "of create, fork and import: time without use after which it is gone"},
        {"position", "N", CLI_INTEGER, &o->position,
         "of fork: where the copy stands (default: where the session does)"},
        {"json", NULL, CLI_FLAG, &o->json, "print the answer as it came"},
        {"timeout", "SECONDS", CLI_SECONDS, &o->timeout, "give up after this time (default: never)"},
    };
    const cli_command_line line = {
        .usage = "session [options] ACTION [ARGUMENT]...",
        .summary = "create [PROMPT|-]        makes a session, prints its name; model and knobs are its completions'\n"
                   "list                     the key's sessions\n"
                   "show SESSION             all that the server tells of it\n"
                   "fork SESSION             makes a copy, prints its name\n"
                   "rollback SESSION N       back to position N\n"
                   "export SESSION FILE|-    its state as bytes\n"
                   "import FILE|- [SESSION]  makes it, or a new one, what was exported; prints its name\n"
                   "drop SESSION             it is gone\n\n"
                   "mesa complete --session SESSION PROMPT goes on with one.",
        .options = options,
        .option_count = sizeof options / sizeof *options,
        .takes_fields = true,
        .lists = is_taken,
        .max_positional = MAX_ARGUMENTS};
    const char *positional[MAX_ARGUMENTS] = {NULL};
    int count = 0;

    const cli_parsed parsed = cli_options_parse(&line, argc, argv, session.body, positional, &count);
    for (int i = 1; i < count; i++)
        session.arguments[i - 1] = positional[i];
    const int result = parsed == CLI_PARSED ? run(&session, count - 1, positional[0]) : cli_parsed_exit(parsed);
    json_decref(session.body);
    return result;
}
