// SPDX-License-Identifier: Apache-2.0
// mesa chat [options] [MESSAGE]: a conversation on the terminal, each answer streamed as it comes.
//
// A turn that failed or was interrupted is not part of the conversation: the next one goes on from before it. Standard
// output holds the answers alone; the prompt is shown only where a person types. A line that ends in a backslash goes
// on in the next.
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "clients/cli/exchange.h"
#include "clients/cli/options.h"
#include "clients/cli/output.h"
#include "clients/cli/terminal.h"

enum { MAX_LINE = 16 << 20 };

typedef struct chat_options {
    const char *url, *key_file, *system, *message;
    bool usage;
    double timeout;
} chat_options;

typedef struct chat {
    const chat_options *options;
    cli_endpoint endpoint;
    json_t *body, *messages; // the latter is a member of the former
    bool person;             // types, and reads
} chat;

// ---- turns ---------------------------------------------------------------------------------------------------------

static bool add_message(chat *chat, const char *role, const char *text, size_t length) {
    json_t *content = json_stringn(text, length);

    if (!content) {
        cli_complain("the message is not UTF-8");
        return false;
    }
    json_array_append_new(chat->messages, json_pack("{s:s, s:o}", "role", role, "content", content));
    return true;
}

static void reset(chat *chat) {
    const char *system = chat->options->system;

    json_array_clear(chat->messages);
    if (system)
        add_message(chat, "system", system, strlen(system));
}

static int judge(const cli_exchange *exchange, const cli_output *output) {
    if (!cli_exchange_accepted(exchange))
        return CLI_EXIT_REFUSED;
    if (exchange->streamed)
        return cli_output_judge(output);
    cli_complain("the answer is no stream");
    return CLI_EXIT_REFUSED;
}

static int ask(chat *chat, cli_output *output) {
    cli_exchange exchange;
    char *body = json_dumps(chat->body, JSON_COMPACT);

    if (!body) {
        cli_complain("out of memory");
        return CLI_EXIT_REFUSED;
    }
    const cli_request request = {
        .path = "/v1/chat/completions", .body = body, .length = strlen(body), .seconds = chat->options->timeout};
    int result = cli_exchange_run(&chat->endpoint, &request, cli_output_event, output, &exchange);
    if (exchange.streamed)
        putchar('\n');
    if (!cli_finish_output())
        result = CLI_EXIT_REFUSED;
    else if (result == CLI_EXIT_OK)
        result = judge(&exchange, output);
    cli_exchange_free(&exchange);
    free(body);
    return result;
}

// Says the message and prints the answer; both become part of the conversation if all went well.
static int take_turn(chat *chat, const char *text, size_t length) {
    cli_buf answer = {.limit = CLI_MAX_ANSWER};
    cli_output output = {.terminal = isatty(STDOUT_FILENO), .begin = cli_now(), .text = &answer};
    const size_t before = json_array_size(chat->messages);
    int result = add_message(chat, "user", text, length) ? ask(chat, &output) : CLI_EXIT_USAGE;

    cli_buf_append(&answer, "", 0);
    if (result == CLI_EXIT_OK && answer.failed) {
        cli_complain("out of memory");
        result = CLI_EXIT_REFUSED;
    }
    if (result == CLI_EXIT_OK && !add_message(chat, "assistant", answer.data, answer.length))
        result = CLI_EXIT_REFUSED;
    if (result != CLI_EXIT_OK)
        while (json_array_size(chat->messages) > before)
            json_array_remove(chat->messages, json_array_size(chat->messages) - 1);
    else if (chat->options->usage)
        cli_output_print_usage(&output);
    cli_output_free(&output);
    cli_buf_free(&answer);
    return result;
}

// ---- lines ---------------------------------------------------------------------------------------------------------

// One message: a line, or several of which all but the last end in a backslash. false: there is none any more.
static bool read_message(const chat *chat, char **line, size_t *room, cli_buf *message) {
    ssize_t length;
    bool goes_on = true;

    message->length = 0;
    for (bool first = true; goes_on; first = false) {
        if (chat->person)
            fputs(first ? "> " : ". ", stderr);
        length = getline(line, room, stdin);
        if (length < 0)
            return !first;
        if (length > 0 && (*line)[length - 1] == '\n')
            length--;
        goes_on = length > 0 && (*line)[length - 1] == '\\';
        if (goes_on)
            (*line)[length - 1] = '\n';
        cli_buf_append(message, *line, (size_t)length);
        if (message->failed) {
            cli_complain("a message of more than %d MiB", MAX_LINE >> 20);
            return false;
        }
    }
    return true;
}

typedef enum command { NO_COMMAND, COMMAND_DONE, COMMAND_QUIT } command;

static command obey(chat *chat, const char *line) {
    if (line[0] != '/')
        return NO_COMMAND;
    if (strcmp(line, "/quit") == 0)
        return COMMAND_QUIT;
    if (strcmp(line, "/reset") == 0)
        reset(chat);
    else
        fputs("/reset begins anew, /quit ends; a line that ends in \\ goes on in the next\n", stderr);
    return COMMAND_DONE;
}

// An interrupted answer ends a person's turn only; whatever else fails ends a conversation that nobody watches.
static int converse(chat *chat) {
    cli_buf message = {.limit = MAX_LINE};
    char *line = NULL;
    size_t room = 0;
    int result = CLI_EXIT_OK;

    while (read_message(chat, &line, &room, &message)) {
        const command command = message.length ? obey(chat, message.data) : COMMAND_DONE;
        if (command == COMMAND_QUIT)
            break;
        if (command == NO_COMMAND)
            result = take_turn(chat, message.data, message.length);
        if (result != CLI_EXIT_OK && !chat->person)
            break;
        result = CLI_EXIT_OK;
    }
    if (message.failed)
        result = CLI_EXIT_USAGE;
    if (chat->person)
        fputc('\n', stderr);
    free(line);
    cli_buf_free(&message);
    return result;
}

// ---- the command ---------------------------------------------------------------------------------------------------

// Not what only a text's continuation has, what would make several answers, or what is not shown.
static bool has_meaning(const char *name) {
    static const char *const foreign[] = {"n",
                                          "best_of",
                                          "echo",
                                          "logprobs",
                                          "session",
                                          "session_position",
                                          "session_rollback",
                                          "add_special_tokens",
                                          "prompt",
                                          "messages",
                                          "stream",
                                          "return_token_ids",
                                          "top_logprobs",
                                          "compute_details"};

    for (size_t i = 0; i < sizeof foreign / sizeof *foreign; i++)
        if (strcmp(name, foreign[i]) == 0)
            return false;
    return true;
}

static bool check_fields(const json_t *body) {
    const char *name;
    json_t *value;

    json_object_foreach((json_t *)body, name, value) {
        if (!has_meaning(name)) {
            cli_complain("%s has no meaning in a chat", name);
            return false;
        }
    }
    return true;
}

static int run(const chat_options *options, json_t *body) {
    chat chat = {.options = options, .body = body, .person = isatty(STDIN_FILENO) && isatty(STDERR_FILENO)};
    int result;

    if (!check_fields(body) || !cli_endpoint_open(options->url, options->key_file, &chat.endpoint))
        return CLI_EXIT_USAGE;
    chat.messages = json_array();
    json_object_set_new(body, "messages", chat.messages);
    json_object_set_new(body, "stream", json_true());
    if (options->usage)
        json_object_set_new(body, "stream_options", json_pack("{s:b}", "include_usage", 1));
    reset(&chat);
    if (options->message)
        result = take_turn(&chat, options->message, strlen(options->message));
    else
        result = converse(&chat);
    cli_endpoint_close(&chat.endpoint);
    return result;
}

int cli_command_chat(int argc, char **argv) {
    chat_options o = {0};
    const cli_option options[] = {
        CLI_ENDPOINT_OPTIONS(o.url, o.key_file),
        {"system", "TEXT", CLI_TEXT, &o.system, "what the model is told before the conversation"},
        {"usage", NULL, CLI_FLAG, &o.usage, "tokens, time and solver steps on standard error"},
        {"timeout", "SECONDS", CLI_SECONDS, &o.timeout, "give an answer up after this time (default: never)"},
    };
    const cli_command_line line = {.usage = "chat [options] [MESSAGE]",
                                   .summary = "Says the message and prints the answer; without one, each line of "
                                              "standard input is a message.\n"
                                              "/reset begins anew, /quit ends; a line that ends in \\ goes on.",
                                   .options = options,
                                   .option_count = sizeof options / sizeof *options,
                                   .takes_fields = true,
                                   .lists = has_meaning,
                                   .max_positional = 1};
    json_t *body = json_object();
    int positional = 0;

    const cli_parsed parsed = cli_options_parse(&line, argc, argv, body, &o.message, &positional);
    const int result = parsed == CLI_PARSED ? run(&o, body) : cli_parsed_exit(parsed);
    json_decref(body);
    return result;
}
