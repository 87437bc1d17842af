// SPDX-License-Identifier: Apache-2.0
// Texts as they come, and their figures; see output.h.
// A stream that ends without its end mark is a broken one.
#include "clients/cli/output.h"

#include <stdio.h>
#include <string.h>

#include "clients/cli/terminal.h"

static void keep_usage(cli_output *output, const cli_answer *answer) {
    if (!answer->usage)
        return;
    json_decref(output->usage);
    output->usage = json_incref((json_t *)answer->usage);
}

static void keep_finish(cli_output *output, const char *finish) {
    if (finish)
        snprintf(output->finish, sizeof output->finish, "%s", finish);
}

static void keep_problem(cli_output *output, const char *data, size_t length) {
    cli_problem_text(0, data, length, output->problem);
    output->has_problem = true;
}

static void put_choice(cli_output *output, const cli_choice *choice) {
    cli_put_text(choice->text, choice->length, output->terminal);
    if (output->text)
        cli_buf_append(output->text, choice->text, choice->length);
    keep_finish(output, choice->finish);
}

void cli_output_take(cli_output *output, const cli_answer *answer, const cli_choice *choice) {
    put_choice(output, choice);
    keep_usage(output, answer);
}

bool cli_output_event(void *context, const char *data, size_t length) {
    cli_output *output = context;
    cli_answer answer;

    if (strcmp(data, "[DONE]") == 0) {
        output->ended = true;
        return true;
    }
    if (!cli_answer_read(data, length, &answer)) {
        snprintf(output->problem, sizeof output->problem, "an event that is not JSON");
        output->has_problem = true;
        return true;
    }
    if (answer.error)
        keep_problem(output, data, length);
    if (answer.choices && json_array_size(answer.choices) > 0) {
        const cli_choice choice = cli_answer_choice(&answer, 0);
        if (choice.length && !output->first)
            output->first = cli_now();
        put_choice(output, &choice);
        output->write_failed = fflush(stdout) != 0;
    }
    keep_usage(output, &answer);
    cli_answer_free(&answer);
    return !output->write_failed;
}

int cli_output_judge(const cli_output *output) {
    if (output->has_problem) {
        cli_complain("the server ended the text: %s", output->problem);
        return CLI_EXIT_REFUSED;
    }
    if (!output->ended) {
        cli_complain("the stream ended before its end mark");
        return CLI_EXIT_CONNECTION;
    }
    return CLI_EXIT_OK;
}

static void print_solver(const char *part, const json_t *compute) {
    const json_t *mean = json_object_get(compute, "cg_steps_mean");

    if (!json_is_number(mean))
        return;
    fprintf(stderr, "%s: %.2f solver steps on average, %lld at most, %lld solves unconverged\n", part,
            json_number_value(mean), (long long)json_integer_value(json_object_get(compute, "cg_steps_max")),
            (long long)json_integer_value(json_object_get(compute, "cg_unconverged")));
}

void cli_output_print_usage(const cli_output *output) {
    const double seconds = (double)(cli_now() - output->begin) * 1e-9;
    const int64_t prompt = cli_usage_count(output->usage, "prompt_tokens"),
                  written = cli_usage_count(output->usage, "completion_tokens");
    const json_t *compute = json_object_get(output->usage, "compute"), *name;
    size_t at;

    if (!output->usage) {
        cli_complain("the answer tells no usage");
        return;
    }
    fprintf(stderr, "%lld tokens read, %lld written in %.3f s", (long long)prompt, (long long)written, seconds);
    if (output->first && written > 1)
        fprintf(stderr, ", the first after %.3f s", (double)(output->first - output->begin) * 1e-9);
    if (output->finish[0])
        fprintf(stderr, ", ended by %s", output->finish);
    fputc('\n', stderr);
    const int64_t cached = cli_usage_count(json_object_get(output->usage, "prompt_tokens_details"), "cached_tokens");
    if (cached > 0)
        fprintf(stderr, "%lld of the tokens read came from a stored state\n", (long long)cached);
    print_solver("reading", json_object_get(compute, "prompt"));
    print_solver("writing", json_object_get(compute, "completion"));
    json_array_foreach((json_t *)json_object_get(compute, "ignored"), at, name)
        fprintf(stderr, "%s has no meaning for this model\n", json_is_string(name) ? json_string_value(name) : "?");
}

void cli_output_free(cli_output *output) {
    json_decref(output->usage);
    output->usage = NULL;
}
