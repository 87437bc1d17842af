// SPDX-License-Identifier: Apache-2.0
// mesa complete [options] PROMPT|-: a completion on the terminal, streamed as it comes.
//
// Standard output holds the text and one newline, the same whether streamed or not; everything else goes to standard
// error.
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "clients/cli/answer.h"
#include "clients/cli/exchange.h"
#include "clients/cli/options.h"
#include "clients/cli/output.h"
#include "clients/cli/terminal.h"

enum { MAX_PROMPT = 256 << 20 };

typedef struct complete_options {
    const char *url, *key_file, *prompt;
    bool no_stream, json, usage, ids;
    double timeout;
} complete_options;

// ---- the request ----------------------------------------------------------------------------------------------------

// "1,2,3" or with white space.
static json_t *parse_ids(const char *text) {
    json_t *ids = json_array();

    while (*text) {
        const size_t skip = strspn(text, ", \t\r\n");
        text += skip;
        if (!*text)
            break;
        char *end;
        errno = 0;
        const long long id = strtoll(text, &end, 10);
        if (end == text || errno || (*end && !strchr(", \t\r\n", *end))) {
            cli_complain("--ids: \"%.20s\" is not a token id", text);
            json_decref(ids);
            return NULL;
        }
        json_array_append_new(ids, json_integer(id));
        text = end;
    }
    return ids;
}

static bool set_prompt(const complete_options *options, json_t *body) {
    cli_buf text = {.limit = MAX_PROMPT};
    json_t *prompt = NULL;

    cli_buf_append(&text, "", 0);
    if (strcmp(options->prompt, "-") == 0) {
        if (!cli_read_all(stdin, "standard input", &text)) {
            cli_buf_free(&text);
            return false;
        }
    } else
        cli_buf_append(&text, options->prompt, strlen(options->prompt));
    if (text.failed)
        cli_complain("the prompt is larger than %d MiB", MAX_PROMPT >> 20);
    else if (options->ids)
        prompt = parse_ids(text.data);
    else {
        prompt = json_stringn(text.data, text.length);
        if (!prompt)
            cli_complain("the prompt is not UTF-8");
    }
    cli_buf_free(&text);
    return prompt && json_object_set_new(body, "prompt", prompt) == 0;
}

static bool has_several_choices(const json_t *body) {
    return json_integer_value(json_object_get(body, "n")) > 1;
}

static void set_stream(const complete_options *options, json_t *body) {
    const bool stream = !options->no_stream && !options->json && !has_several_choices(body);

    json_object_set_new(body, "stream", json_boolean(stream));
    if (stream && options->usage)
        json_object_set_new(body, "stream_options", json_pack("{s:b}", "include_usage", 1));
}

// ---- the answer -----------------------------------------------------------------------------------------------------

static int print_whole(const cli_exchange *exchange, cli_output *output) {
    cli_answer answer;

    if (!cli_answer_read(exchange->body.data ? exchange->body.data : "", exchange->body.length, &answer)) {
        cli_complain("the answer is not a JSON object");
        return CLI_EXIT_REFUSED;
    }
    const size_t count = answer.choices ? json_array_size(answer.choices) : 0;
    if (answer.error || count == 0) {
        char text[CLI_PROBLEM_SIZE];
        cli_problem_text(0, exchange->body.data, exchange->body.length, text);
        cli_complain("the server answered %s", answer.error ? text : "without a choice");
        cli_answer_free(&answer);
        return CLI_EXIT_REFUSED;
    }
    for (size_t i = 0; i < count; i++) {
        const cli_choice choice = cli_answer_choice(&answer, i);
        if (count > 1)
            printf("%s==> choice %lld <==\n", i ? "\n" : "", (long long)choice.index);
        cli_output_take(output, &answer, &choice);
        putchar('\n');
    }
    cli_answer_free(&answer);
    return CLI_EXIT_OK;
}

// ---- the command ----------------------------------------------------------------------------------------------------

static int report(const complete_options *options, const cli_exchange *exchange, cli_output *output) {
    int result = CLI_EXIT_OK;

    if (!cli_exchange_accepted(exchange))
        return CLI_EXIT_REFUSED;
    if (options->json) {
        if (exchange->body.length)
            fwrite(exchange->body.data, 1, exchange->body.length, stdout);
        putchar('\n');
        return cli_finish_output() ? CLI_EXIT_OK : CLI_EXIT_REFUSED;
    }
    if (!exchange->streamed)
        result = print_whole(exchange, output);
    else {
        putchar('\n');
        result = cli_output_judge(output);
    }
    if (!cli_finish_output())
        return CLI_EXIT_REFUSED;
    if (options->usage && result == CLI_EXIT_OK)
        cli_output_print_usage(output);
    return result;
}

static int complete(const complete_options *options, json_t *body) {
    cli_output output = {.terminal = isatty(STDOUT_FILENO), .begin = cli_now()};
    cli_exchange exchange;
    cli_endpoint endpoint;
    char *text = json_dumps(body, JSON_COMPACT);

    if (!text || !cli_endpoint_open(options->url, options->key_file, &endpoint)) {
        free(text);
        return CLI_EXIT_USAGE;
    }
    const cli_request request = {
        .path = "/v1/completions", .body = text, .length = strlen(text), .seconds = options->timeout};
    int result = cli_exchange_run(&endpoint, &request, cli_output_event, &output, &exchange);
    if (output.write_failed)
        cli_finish_output();
    else if (result == CLI_EXIT_OK)
        result = report(options, &exchange, &output);
    else if (exchange.streamed) { // whatever else is said begins on a line of its own
        putchar('\n');
        cli_finish_output();
    }
    cli_exchange_free(&exchange);
    cli_endpoint_close(&endpoint);
    cli_output_free(&output);
    free(text);
    return result;
}

static int run(const complete_options *options, json_t *body, const char *usage) {
    if (!options->prompt)
        cli_complain("a prompt is needed (usage: mesa %s)", usage);
    else if (set_prompt(options, body)) {
        set_stream(options, body);
        return complete(options, body);
    }
    return CLI_EXIT_USAGE;
}

int cli_command_complete(int argc, char **argv) {
    complete_options o = {0};
    const cli_option options[] = {
        CLI_ENDPOINT_OPTIONS(o.url, o.key_file),
        {"ids", NULL, CLI_FLAG, &o.ids, "the prompt is token ids: 1,2,3"},
        {"no-stream", NULL, CLI_FLAG, &o.no_stream, "print the text when it is whole"},
        {"json", NULL, CLI_FLAG, &o.json, "print the answer as it came (not streamed)"},
        {"usage", NULL, CLI_FLAG, &o.usage, "tokens, time and solver steps on standard error"},
        {"timeout", "SECONDS", CLI_SECONDS, &o.timeout, "give up after this time (default: never)"},
    };
    const cli_command_line line = {.usage = "complete [options] PROMPT|-",
                                   .summary =
                                       "Prints what a model writes after the prompt; \"-\" reads the prompt from "
                                       "standard input.",
                                   .options = options,
                                   .option_count = sizeof options / sizeof *options,
                                   .takes_fields = true,
                                   .max_positional = 1};
    json_t *body = json_object();
    int positional = 0;

    const cli_parsed parsed = cli_options_parse(&line, argc, argv, body, &o.prompt, &positional);
    const int result = parsed == CLI_PARSED ? run(&o, body, line.usage) : cli_parsed_exit(parsed);
    json_decref(body);
    return result;
}
