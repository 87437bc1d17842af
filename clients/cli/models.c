// SPDX-License-Identifier: Apache-2.0
// mesa models: a table of what the server serves; --json: its answer as it came.
// Columns that a server of another make does not tell are "-".
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "clients/cli/answer.h"
#include "clients/cli/exchange.h"
#include "clients/cli/options.h"
#include "clients/cli/terminal.h"

static void print_text(const char *text, int width, bool terminal) {
    const size_t length = text ? strlen(text) : 0;
    if (!text || !length)
        printf("%-*s", width, "-");
    else {
        cli_put_text(text, length, terminal);
        printf("%*s", (int)length < width ? width - (int)length : 1, "");
    }
}

static const char *scaled(const json_t *value, char text[32]) {
    static const char units[] = " KMGT";
    double number = json_number_value(value);
    size_t unit = 0;

    if (!json_is_number(value))
        return "-";
    while (number >= 999.5 && unit + 2 < sizeof units) {
        number /= 1000;
        unit++;
    }
    snprintf(text, 32, unit ? "%.3g%c" : "%.0f", number, units[unit]);
    return text;
}

static void print_model(const json_t *model, bool terminal) {
    const json_t *meta = json_object_get(model, "meta"), *context = json_object_get(meta, "context_length");
    char text[32];

    print_text(json_string_value(json_object_get(model, "id")), 24, terminal);
    printf(" %-10s", scaled(json_object_get(meta, "parameters"), text));
    printf(" %-7s", scaled(json_object_get(meta, "layers"), text));
    printf(" %-11s", scaled(json_object_get(meta, "state_bytes"), text));
    printf(" %-10s", json_is_null(context) ? "unbounded" : scaled(context, text));
    printf(" %-8s ", scaled(json_object_get(meta, "trained_length"), text));
    print_text(json_string_value(json_object_get(meta, "mixers")), 20, terminal);
    putchar(' ');
    print_text(json_string_value(json_object_get(meta, "device")), 1, terminal);
    putchar('\n');
}

static int print_models(const cli_exchange *exchange) {
    cli_answer answer;
    const bool terminal = isatty(STDOUT_FILENO);
    const bool read = cli_answer_read(exchange->body.data ? exchange->body.data : "", exchange->body.length, &answer);
    const json_t *data = json_object_get(answer.root, "data");
    json_t *model;
    size_t at;

    if (!json_is_array(data)) {
        cli_complain("the answer is no list of models");
        if (read)
            cli_answer_free(&answer);
        return CLI_EXIT_REFUSED;
    }
    printf("%-24s %-10s %-7s %-11s %-10s %-8s %-20s %s\n", "MODEL", "PARAMETERS", "LAYERS", "STATE BYTES", "CONTEXT",
           "TRAINED", "MIXERS", "DEVICE");
    json_array_foreach((json_t *)data, at, model) print_model(model, terminal);
    cli_answer_free(&answer);
    return cli_finish_output() ? CLI_EXIT_OK : CLI_EXIT_REFUSED;
}

int cli_command_models(int argc, char **argv) {
    const char *url = NULL, *key_file = NULL;
    bool json = false;
    const cli_option options[] = {
        CLI_ENDPOINT_OPTIONS(url, key_file),
        {"json", NULL, CLI_FLAG, &json, "print the answer as it came"},
    };
    const cli_command_line line = {.usage = "models [options]",
                                   .summary = "Lists the models of the server.",
                                   .options = options,
                                   .option_count = sizeof options / sizeof *options};
    int positional = 0;
    cli_endpoint endpoint;
    cli_exchange exchange;

    const cli_parsed parsed = cli_options_parse(&line, argc, argv, NULL, NULL, &positional);
    if (parsed != CLI_PARSED)
        return cli_parsed_exit(parsed);
    if (!cli_endpoint_open(url, key_file, &endpoint))
        return CLI_EXIT_USAGE;
    int result =
        cli_exchange_run(&endpoint, &(cli_request){.path = "/v1/models", .seconds = 60}, NULL, NULL, &exchange);
    if (result == CLI_EXIT_OK && !cli_exchange_accepted(&exchange))
        result = CLI_EXIT_REFUSED;
    else if (result == CLI_EXIT_OK && json) {
        fwrite(exchange.body.data ? exchange.body.data : "", 1, exchange.body.length, stdout);
        putchar('\n');
        result = cli_finish_output() ? CLI_EXIT_OK : CLI_EXIT_REFUSED;
    } else if (result == CLI_EXIT_OK)
        result = print_models(&exchange);
    cli_exchange_free(&exchange);
    cli_endpoint_close(&endpoint);
    return result;
}
