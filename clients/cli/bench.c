// SPDX-License-Identifier: Apache-2.0
// mesa bench [options]: loads a server and prints how it did.
//
// Every level of --concurrency or --rate is a run of its own, after a warm-up that is not counted. It works against any
// server with the completions contract; only random prompts need the vocabulary, which /v1/models tells or
// --vocabulary.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "clients/cli/exchange.h"
#include "clients/cli/load.h"
#include "clients/cli/options.h"
#include "clients/cli/report.h"
#include "clients/cli/terminal.h"

typedef struct bench_options {
    const char *url, *key_file, *text;
    cli_list concurrency, rate;
    int64_t requests, retries, warm_up, vocabulary, seed;
    double seconds, timeout, slo_first, slo_gap;
    cli_range prompt_tokens, max_tokens;
    bool plain, csv, final_usage, stop_at_eos;
} bench_options;

static bool is_between(const char *name, double value, double low, double high) {
    if (value >= low && value <= high)
        return true;
    cli_complain("--%s: not in %g..%g", name, low, high);
    return false;
}

static bool check_options(bench_options *o) {
    if (o->rate.count && o->concurrency.count) {
        cli_complain("--rate and --concurrency exclude each other");
        return false;
    }
    if (!o->rate.count && !o->concurrency.count)
        o->concurrency = (cli_list){.value = {1}, .count = 1};
    for (size_t i = 0; i < o->concurrency.count; i++)
        if (!is_between("concurrency", o->concurrency.value[i], 1, 65536))
            return false;
    for (size_t i = 0; i < o->rate.count; i++)
        if (!is_between("rate", o->rate.value[i], 1e-3, 1e6))
            return false;
    if (!o->requests && !(o->seconds > 0))
        o->requests = 64;
    return is_between("requests", (double)o->requests, 0, 1e9) && is_between("retries", (double)o->retries, 0, 1e6) &&
           is_between("seconds", o->seconds, 0, 1e6) && is_between("warm-up", (double)o->warm_up, 0, 1e6) &&
           is_between("timeout", o->timeout, 0.001, 1e6) && is_between("slo-first", o->slo_first, 0, 1e9) &&
           is_between("slo-gap", o->slo_gap, 0, 1e9) &&
           (o->vocabulary == 0 || is_between("vocabulary", (double)o->vocabulary, 2, INT32_MAX));
}

// The entry of the list of models that requests will meet.
static const json_t *find_model(const json_t *data, const char *wanted) {
    json_t *model;
    size_t at;

    json_array_foreach((json_t *)data, at, model) {
        const char *id = json_string_value(json_object_get(model, "id"));
        if (!wanted || (id && strcmp(id, wanted) == 0))
            return model;
    }
    return NULL;
}

// Asks the server for the vocabulary's size, and that way whether it is there.
static int ask_vocabulary(const cli_endpoint *endpoint, const json_t *fields, int64_t *vocabulary) {
    cli_exchange exchange;
    cli_answer answer = {0};
    int result = cli_exchange_run(endpoint, &(cli_request){.path = "/v1/models", .seconds = 60}, NULL, NULL, &exchange);

    if (result == CLI_EXIT_OK && !cli_exchange_accepted(&exchange))
        result = CLI_EXIT_REFUSED;
    if (result == CLI_EXIT_OK && exchange.body.length)
        cli_answer_read(exchange.body.data, exchange.body.length, &answer);
    const json_t *model =
        find_model(json_object_get(answer.root, "data"), json_string_value(json_object_get(fields, "model")));
    const int64_t told = cli_usage_count(json_object_get(model, "meta"), "vocab_size");
    if (result == CLI_EXIT_OK && told >= 2)
        *vocabulary = told;
    else if (result == CLI_EXIT_OK) {
        cli_complain(model ? "the server does not tell the vocabulary's size: give --vocabulary N or --prompt TEXT"
                           : "the server has no such model");
        result = CLI_EXIT_REFUSED;
    }
    if (answer.root)
        cli_answer_free(&answer);
    cli_exchange_free(&exchange);
    return result;
}

static int run_level(const bench_options *o, cli_load_plan *plan) {
    cli_load_result result;

    if (o->warm_up) {
        cli_load_plan warm_up = *plan;
        warm_up.requests = o->warm_up;
        warm_up.seconds = 0;
        warm_up.seed = ~plan->seed;
        if (warm_up.rate > 0)
            warm_up.concurrency = 1;
        warm_up.rate = 0;
        const bool ran = cli_load_run(&warm_up, &result);
        const bool interrupted = result.interrupted;
        cli_load_result_free(&result);
        if (!ran || interrupted)
            return ran ? CLI_EXIT_INTERRUPTED : CLI_EXIT_REFUSED;
    }
    const bool ran = cli_load_run(plan, &result);
    if (ran && o->csv)
        cli_report_csv(plan, &result);
    else if (ran)
        cli_report_table(plan, &result);
    int status = !ran || result.succeeded == 0 ? CLI_EXIT_REFUSED : CLI_EXIT_OK;
    if (ran && result.interrupted)
        status = CLI_EXIT_INTERRUPTED;
    cli_load_result_free(&result);
    return status;
}

static int run_levels(const bench_options *o, cli_load_plan *plan) {
    const cli_list *levels = o->rate.count ? &o->rate : &o->concurrency;
    int status = CLI_EXIT_OK;

    if (o->csv)
        cli_report_csv_header();
    for (size_t i = 0; i < levels->count && status != CLI_EXIT_INTERRUPTED; i++) {
        plan->rate = o->rate.count ? levels->value[i] : 0;
        plan->concurrency = o->rate.count ? 0 : (int64_t)levels->value[i];
        plan->seed = (uint64_t)o->seed + (i << 32);
        if (i && !o->csv)
            putchar('\n');
        const int level = run_level(o, plan);
        if (level != CLI_EXIT_OK)
            status = level;
        fflush(stdout);
    }
    return cli_finish_output() ? status : CLI_EXIT_REFUSED;
}

static int bench(bench_options *o, json_t *fields) {
    cli_endpoint endpoint;

    if (!cli_endpoint_open(o->url, o->key_file, &endpoint))
        return CLI_EXIT_USAGE;
    int result = CLI_EXIT_OK;
    if (!o->text && !o->vocabulary)
        result = ask_vocabulary(&endpoint, fields, &o->vocabulary);
    cli_load_plan plan = {.endpoint = &endpoint,
                          .fields = fields,
                          .text = o->text,
                          .vocabulary = o->vocabulary,
                          .prompt_tokens = o->prompt_tokens,
                          .max_tokens = o->max_tokens,
                          .stream = !o->plain,
                          .final_usage = o->final_usage,
                          .ignore_eos = !o->stop_at_eos,
                          .requests = o->requests,
                          .retries = o->retries,
                          .seconds = o->seconds,
                          .timeout = o->timeout,
                          .slo_first_ms = o->slo_first,
                          .slo_gap_ms = o->slo_gap};
    if (result == CLI_EXIT_OK)
        result = run_levels(o, &plan);
    cli_endpoint_close(&endpoint);
    return result;
}

int cli_command_bench(int argc, char **argv) {
    bench_options o = {.timeout = 600, .seed = 1, .prompt_tokens = {128, 128}, .max_tokens = {64, 64}};
    const cli_option options[] = {
        CLI_ENDPOINT_OPTIONS(o.url, o.key_file),
        {"concurrency", "N,...", CLI_LIST, &o.concurrency, "closed loop: so many requests at a time (default 1)"},
        {"rate", "X,...", CLI_LIST, &o.rate, "open loop: so many arrivals a second, a Poisson process"},
        {"requests", "N", CLI_INTEGER, &o.requests, "requests of a level (default 64, or any number in --seconds)"},
        {"seconds", "S", CLI_REAL, &o.seconds, "no request begins after this time"},
        {"retries", "N", CLI_INTEGER, &o.retries,
         "send a request that is refused with 429 so often again, each time after its Retry-After (default 0)"},
        {"warm-up", "N", CLI_INTEGER, &o.warm_up, "requests before each level that are not counted (default 0)"},
        {"prompt-tokens", "N|LOW:HIGH", CLI_RANGE, &o.prompt_tokens, "random ids in a prompt (default 128)"},
        {"max-tokens", "N|LOW:HIGH", CLI_RANGE, &o.max_tokens, "tokens to write (default 64)"},
        {"prompt", "TEXT", CLI_TEXT, &o.text, "this prompt instead of random ids"},
        {"vocabulary", "N", CLI_INTEGER, &o.vocabulary, "random ids are below N (default: what the server tells)"},
        {"stop-at-eos", NULL, CLI_FLAG, &o.stop_at_eos, "let an end of text end a request (default: ignore_eos)"},
        {"plain", NULL, CLI_FLAG, &o.plain, "whole answers instead of streams"},
        {"final-usage", NULL, CLI_FLAG, &o.final_usage,
         "streams tell their tokens at the end, not with each event: lighter, but an event counts as one token"},
        {"slo-first", "MS", CLI_REAL, &o.slo_first, "count tokens of requests whose first token came in this time"},
        {"slo-gap", "MS", CLI_REAL, &o.slo_gap, "and whose gaps stayed within this time, 99 of 100"},
        {"seed", "N", CLI_INTEGER, &o.seed, "of prompts, lengths and arrivals (default 1)"},
        {"timeout", "SECONDS", CLI_REAL, &o.timeout, "a request that takes longer has failed (default 600)"},
        {"csv", NULL, CLI_FLAG, &o.csv, "a line of comma-separated values a level"},
    };
    const cli_command_line line = {.usage = "bench [options]",
                                   .summary = "Measures a server under load: tokens a second, time to the first token, "
                                              "between tokens, end to end.",
                                   .options = options,
                                   .option_count = sizeof options / sizeof *options,
                                   .takes_fields = true};
    json_t *fields = json_object();
    int positional = 0;

    const cli_parsed parsed = cli_options_parse(&line, argc, argv, fields, NULL, &positional);
    int result = cli_parsed_exit(parsed);
    if (parsed == CLI_PARSED)
        result = check_options(&o) ? bench(&o, fields) : CLI_EXIT_USAGE;
    json_decref(fields);
    return result;
}
