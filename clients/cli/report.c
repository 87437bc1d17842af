// SPDX-License-Identifier: Apache-2.0
// Prints the figures of a load; see report.h.
// Rates are over the whole run, its last answers included.
#include "clients/cli/report.h"

#include <stdio.h>

static const double quantiles[] = {0.5, 0.9, 0.99, 0.999};
enum { QUANTILES = sizeof quantiles / sizeof *quantiles };

typedef struct distribution {
    const char *title, *column;
    cli_samples *samples;
} distribution;

enum { DISTRIBUTIONS = 6 };

static void list(cli_load_result *result, distribution out[DISTRIBUTIONS]) {
    const distribution all[DISTRIBUTIONS] = {
        {"first token", "first", &result->first},      {"between tokens", "between", &result->between},
        {"between events", "events", &result->events}, {"end to end", "whole", &result->whole},
        {"sent late", "late", &result->late},          {"until refused", "refused", &result->refused},
    };
    for (int i = 0; i < DISTRIBUTIONS; i++)
        out[i] = all[i];
}

static double per_second(int64_t count, const cli_load_result *result) {
    return result->seconds > 0 ? (double)count / result->seconds : 0;
}

static void print_distribution(const distribution *of) {
    cli_samples *samples = of->samples;

    printf("  %-16s%10.2f", of->title, cli_samples_mean(samples) * 1e-6);
    for (int i = 0; i < QUANTILES; i++)
        if (cli_samples_resolve(samples, quantiles[i]))
            printf("%10.2f", (double)cli_samples_quantile(samples, quantiles[i]) * 1e-6);
        else
            printf("%10s", "-");
    printf("%10.2f%10zu\n", (double)cli_samples_quantile(samples, 1) * 1e-6, samples->count);
}

static void print_load(const cli_load_plan *plan) {
    if (plan->rate > 0)
        printf("%s, %g arrivals a second", plan->stream ? "streaming" : "plain", plan->rate);
    else
        printf("%s, %lld at a time", plan->stream ? "streaming" : "plain", (long long)plan->concurrency);
}

void cli_report_table(const cli_load_plan *plan, cli_load_result *result) {
    distribution all[DISTRIBUTIONS];
    const double cpu_share = result->seconds > 0 ? 100 * result->cpu_seconds / result->seconds : 0;

    print_load(plan);
    printf(": %lld answered, %lld failed in %.2f s%s\n", (long long)result->succeeded, (long long)result->failed,
           result->seconds, result->interrupted ? " (interrupted)" : "");
    printf("  written %lld tokens, %.1f a second; read %lld, %.1f a second", (long long)result->completion_tokens,
           per_second(result->completion_tokens, result), (long long)result->prompt_tokens,
           per_second(result->prompt_tokens, result));
    if (plan->slo_first_ms > 0 || plan->slo_gap_ms > 0)
        printf("; written in time %.1f a second", per_second(result->good_tokens, result));
    printf("\n  %-16s%10s%10s%10s%10s%10s%10s%10s\n", "milliseconds", "mean", "p50", "p90", "p99", "p99.9", "max",
           "samples");
    list(result, all);
    for (int i = 0; i < DISTRIBUTIONS; i++)
        if (all[i].samples->count && (all[i].samples != &result->late || plan->rate > 0))
            print_distribution(&all[i]);
    if (result->tried_again)
        printf("  sent again after Retry-After: %lld, of these accepted %lld (%.1f %%)\n",
               (long long)result->tried_again, (long long)result->accepted_again,
               100 * (double)result->accepted_again / (double)result->tried_again);
    if (result->untold_tokens)
        puts("  (events did not tell their tokens: each is taken as one)");
    printf("  this program used %.2f s of CPU, %.1f %% of a core\n", result->cpu_seconds, cpu_share);
    for (size_t i = 0; i < result->fault_count; i++)
        printf("  failed %lld times: %s\n", (long long)result->faults[i].count, result->faults[i].text);
    if (result->gave_up)
        puts("  gave up: nothing but failures");
}

void cli_report_csv_header(void) {
    cli_load_result none = {0};
    distribution all[DISTRIBUTIONS];

    list(&none, all);
    printf("mode,concurrency,rate,succeeded,failed,seconds,prompt_tokens,completion_tokens,tokens_per_second,"
           "good_tokens_per_second,generator_cpu_seconds,tried_again,accepted_again");
    for (int i = 0; i < DISTRIBUTIONS; i++)
        for (int k = -1; k <= QUANTILES; k++) {
            static const char *const names[] = {"mean", "p50", "p90", "p99", "p999", "max"};
            printf(",%s_%s_ms", all[i].column, names[k + 1]);
        }
    putchar('\n');
}

void cli_report_csv(const cli_load_plan *plan, cli_load_result *result) {
    distribution all[DISTRIBUTIONS];

    printf("%s,%lld,%g,%lld,%lld,%.6f,%lld,%lld,%.3f,%.3f,%.3f,%lld,%lld", plan->stream ? "stream" : "plain",
           plan->rate > 0 ? 0LL : (long long)plan->concurrency, plan->rate, (long long)result->succeeded,
           (long long)result->failed, result->seconds, (long long)result->prompt_tokens,
           (long long)result->completion_tokens, per_second(result->completion_tokens, result),
           per_second(result->good_tokens, result), result->cpu_seconds, (long long)result->tried_again,
           (long long)result->accepted_again);
    list(result, all);
    for (int i = 0; i < DISTRIBUTIONS; i++) {
        cli_samples *samples = all[i].samples;
        if (!samples->count) {
            printf(",,,,,,");
            continue;
        }
        printf(",%.6f", cli_samples_mean(samples) * 1e-6);
        for (int k = 0; k < QUANTILES; k++)
            if (cli_samples_resolve(samples, quantiles[k]))
                printf(",%.6f", (double)cli_samples_quantile(samples, quantiles[k]) * 1e-6);
            else
                putchar(',');
        printf(",%.6f", (double)cli_samples_quantile(samples, 1) * 1e-6);
    }
    putchar('\n');
}
