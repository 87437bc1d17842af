// SPDX-License-Identifier: Apache-2.0
// Starts requests, collects their figures; see load.h.
//
// Prompts and lengths are a function of the seed and the request's number, so that two runs ask the same. Random ids
// differ from request to request: no stored prefix can help.
#include "clients/cli/load.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "clients/cli/flight.h"
#include "clients/cli/loop.h"

enum { FAILURES_IN_A_ROW = 64 };

typedef struct load {
    const cli_load_plan *plan;
    cli_load_result *result;
    cli_loop *loop;
    cli_flight *idle, *waiting, **all; // waiting: to be sent again, the next first
    size_t flights, capacity;
    uint64_t arrivals; // state of the random numbers of the arrival process
    int64_t begin, stop_at, next_arrival, last_answer;
    int64_t started, running, failures_in_a_row;
    bool broken; // no memory
} load;

// SplitMix64: a stream of 64 random bits a call.
static uint64_t next_random(uint64_t *state) {
    uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

static int64_t draw(uint64_t *state, cli_range range) {
    return range.low + (int64_t)(next_random(state) % (uint64_t)(range.high - range.low + 1));
}

// Exponential, in nanoseconds.
static int64_t draw_gap(uint64_t *state, double rate) {
    const double uniform = (double)(next_random(state) >> 11) * 0x1p-53;
    return (int64_t)(-log1p(-uniform) / rate * 1e9);
}

// ---- requests
// --------------------------------------------------------------------------------------------------------

static json_t *make_prompt(const cli_load_plan *plan, uint64_t *state) {
    if (plan->text)
        return json_string(plan->text);
    json_t *ids = json_array();
    const int64_t count = draw(state, plan->prompt_tokens);
    for (int64_t i = 0; i < count; i++)
        json_array_append_new(ids, json_integer(draw(state, (cli_range){1, plan->vocabulary - 1})));
    return ids;
}

static char *make_request(const cli_load_plan *plan, int64_t number) {
    uint64_t state = plan->seed ^ ((uint64_t)number * UINT64_C(0xd1342543de82ef95));
    json_t *body = json_copy((json_t *)plan->fields);

    if (!body)
        return NULL;
    json_object_set_new(body, "prompt", make_prompt(plan, &state));
    json_object_set_new(body, "max_tokens", json_integer(draw(&state, plan->max_tokens)));
    json_object_set_new(body, "stream", json_boolean(plan->stream));
    if (plan->ignore_eos)
        json_object_set_new(body, "ignore_eos", json_true());
    if (plan->stream)
        json_object_set_new(body, "stream_options",
                            json_pack("{s:b,s:b}", "include_usage", 1, "continuous_usage_stats", !plan->final_usage));
    char *text = json_dumps(body, JSON_COMPACT);
    json_decref(body);
    return text;
}

static cli_flight *take_flight(load *load) {
    cli_flight *flight = load->idle;

    if (flight) {
        load->idle = flight->next;
        return flight;
    }
    if (load->flights == load->capacity) {
        const size_t capacity = load->capacity ? 2 * load->capacity : 64;
        cli_flight **grown = realloc(load->all, capacity * sizeof(*grown));
        if (!grown)
            return NULL;
        load->all = grown;
        load->capacity = capacity;
    }
    flight = calloc(1, sizeof *flight);
    if (!flight)
        return NULL;
    const cli_request request = {.path = "/v1/completions", .body = "", .seconds = load->plan->timeout};
    flight->easy = cli_endpoint_request(load->plan->endpoint, &request, cli_flight_bytes, flight);
    if (!flight->easy || curl_easy_setopt(flight->easy, CURLOPT_PRIVATE, flight) != CURLE_OK) {
        cli_flight_free(flight);
        return NULL;
    }
    load->all[load->flights++] = flight;
    return flight;
}

static void send_request(load *load, cli_flight *flight, char *request, int64_t arrival) {
    cli_flight_begin(flight, request, arrival);
    curl_easy_setopt(flight->easy, CURLOPT_POSTFIELDS, request);
    curl_easy_setopt(flight->easy, CURLOPT_POSTFIELDSIZE_LARGE, (curl_off_t)strlen(request));
    if (!cli_loop_add(load->loop, flight->easy)) {
        load->broken = true;
        cli_loop_stop(load->loop);
    }
}

static void start_request(load *load, int64_t arrival) {
    char *request = make_request(load->plan, load->started);
    cli_flight *flight = request ? take_flight(load) : NULL;

    if (!flight) {
        free(request);
        load->broken = true;
        cli_loop_stop(load->loop);
        return;
    }
    flight->tries = 0;
    load->started++;
    load->running++;
    send_request(load, flight, request, arrival ? arrival : cli_now());
}

// ---- when
// ------------------------------------------------------------------------------------------------------------

static bool may_start(const load *load, int64_t at) {
    return !load->result->gave_up && (!load->plan->requests || load->started < load->plan->requests) &&
           (!load->stop_at || at < load->stop_at);
}

static void stop_if_over(load *load) {
    const int64_t next = load->plan->rate > 0 ? load->next_arrival : cli_now();
    if (load->running == 0 && !may_start(load, next))
        cli_loop_stop(load->loop);
}

static void fill(load *load) {
    while (!load->broken && load->running < load->plan->concurrency && may_start(load, cli_now()))
        start_request(load, 0);
}

static void set_alarm(load *load) {
    const bool arrives = load->plan->rate > 0 && may_start(load, load->next_arrival);
    int64_t at = arrives ? load->next_arrival : 0;

    if (load->waiting && (!at || load->waiting->arrival < at))
        at = load->waiting->arrival;
    cli_loop_alarm(load->loop, at);
}

// Starts every request whose arrival, or whose time to come again, has passed.
static void on_alarm(void *context) {
    load *load = context;

    while (!load->broken && load->plan->rate > 0 && may_start(load, load->next_arrival) &&
           load->next_arrival <= cli_now()) {
        start_request(load, load->next_arrival);
        load->next_arrival += draw_gap(&load->arrivals, load->plan->rate);
    }
    while (!load->broken && load->waiting && load->waiting->arrival <= cli_now()) {
        cli_flight *flight = load->waiting;
        load->waiting = flight->next;
        load->result->tried_again++;
        send_request(load, flight, flight->request, flight->arrival);
    }
    set_alarm(load);
    stop_if_over(load);
}

// Puts a refused request among those that wait, by its time; false: it is not to be sent again.
static bool wait_to_retry(load *load, cli_flight *flight) {
    cli_flight **place = &load->waiting;

    if (!flight->retry_after || flight->tries >= load->plan->retries)
        return false;
    flight->tries++;
    flight->arrival = cli_now() + flight->retry_after * INT64_C(1000000000);
    while (*place && (*place)->arrival <= flight->arrival)
        place = &(*place)->next;
    flight->next = *place;
    *place = flight;
    set_alarm(load);
    return true;
}

// ---- figures
// ---------------------------------------------------------------------------------------------------------

static void count_fault(cli_load_result *result, const char *text) {
    for (size_t i = 0; i < result->fault_count; i++)
        if (strcmp(result->faults[i].text, text) == 0) {
            result->faults[i].count++;
            return;
        }
    // The last place is for all others.
    const bool last = result->fault_count + 1 >= CLI_MAX_FAULTS;
    if (result->fault_count == CLI_MAX_FAULTS) {
        result->faults[CLI_MAX_FAULTS - 1].count++;
        return;
    }
    cli_load_fault *fault = &result->faults[result->fault_count++];
    snprintf(fault->text, sizeof fault->text, "%s", last ? "(others)" : text);
    fault->count = 1;
}

static bool is_good(const cli_load_plan *plan, cli_flight *flight) {
    if (plan->slo_first_ms > 0 && (double)(flight->first - flight->arrival) > plan->slo_first_ms * 1e6)
        return false;
    return plan->slo_gap_ms <= 0 || (double)cli_samples_quantile(&flight->between, 0.99) <= plan->slo_gap_ms * 1e6;
}

static void count_success(load *load, cli_flight *flight) {
    cli_load_result *result = load->result;

    result->succeeded++;
    result->prompt_tokens += flight->prompt_tokens;
    result->completion_tokens += flight->completion_tokens;
    result->untold_tokens = result->untold_tokens || flight->untold;
    cli_samples_add_all(&result->between, &flight->between);
    cli_samples_add_all(&result->events, &flight->event_gaps);
    cli_samples_add(&result->late, flight->sent - flight->arrival);
    if (flight->streamed && flight->first)
        cli_samples_add(&result->first, flight->first - flight->arrival);
    if (flight->last)
        cli_samples_add(&result->whole, flight->last - flight->arrival);
    if (flight->streamed && is_good(load->plan, flight))
        result->good_tokens += flight->completion_tokens;
}

static void on_done(void *context, CURL *easy, CURLcode code) {
    load *load = context;
    cli_flight *flight = NULL;

    curl_easy_getinfo(easy, CURLINFO_PRIVATE, (char **)&flight);
    if (!flight)
        return;
    load->last_answer = cli_now();
    const bool succeeded = cli_flight_end(flight, code);
    load->result->accepted_again += succeeded && flight->tries > 0;
    if (flight->retry_after)
        cli_samples_add(&load->result->refused, load->last_answer - flight->sent);
    if (wait_to_retry(load, flight))
        return;
    load->running--;
    if (succeeded) {
        load->failures_in_a_row = 0;
        count_success(load, flight);
    } else {
        load->result->failed++;
        count_fault(load->result, flight->problem);
        // Who is offered more than it can do should refuse for the time being.
        load->failures_in_a_row += !(load->plan->rate > 0 && flight->retry_after);
        load->result->gave_up = load->failures_in_a_row >= FAILURES_IN_A_ROW + load->plan->concurrency;
    }
    flight->next = load->idle;
    load->idle = flight;
    if (load->plan->rate <= 0)
        fill(load);
    stop_if_over(load);
}

static void on_interrupted(void *context) {
    load *load = context;
    load->result->interrupted = true;
    load->last_answer = cli_now();
    cli_loop_stop(load->loop);
}

static double cpu_seconds(void) {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
           1e-6 * (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
}

// ---- the run
// ---------------------------------------------------------------------------------------------------------

static void run(load *load) {
    const cli_load_plan *plan = load->plan;
    const double cpu = cpu_seconds();

    load->begin = cli_now();
    load->stop_at = plan->seconds > 0 ? load->begin + (int64_t)(plan->seconds * 1e9) : 0;
    if (plan->rate > 0) {
        load->arrivals = plan->seed;
        load->next_arrival = load->begin + draw_gap(&load->arrivals, plan->rate);
        cli_loop_alarm(load->loop, load->next_arrival);
        stop_if_over(load);
    } else
        fill(load);
    cli_loop_run(load->loop);
    load->result->seconds = (double)((load->last_answer ? load->last_answer : cli_now()) - load->begin) * 1e-9;
    load->result->cpu_seconds = cpu_seconds() - cpu;
}

bool cli_load_run(const cli_load_plan *plan, cli_load_result *result) {
    static const cli_loop_calls calls = {.done = on_done, .alarm = on_alarm, .interrupted = on_interrupted};
    load load = {.plan = plan, .result = result};

    *result = (cli_load_result){0};
    load.loop = cli_loop_create(&calls, &load);
    if (!load.loop)
        return false;
    run(&load);
    for (size_t i = 0; i < load.flights; i++) {
        cli_loop_remove(load.loop, load.all[i]->easy);
        cli_flight_free(load.all[i]);
    }
    free(load.all);
    cli_loop_free(load.loop);
    const bool whole = !load.broken && !result->between.failed && !result->events.failed && !result->whole.failed &&
                       !result->first.failed && !result->late.failed && !result->refused.failed;
    if (!whole)
        cli_complain("out of memory");
    return whole;
}

void cli_load_result_free(cli_load_result *result) {
    cli_samples_free(&result->first);
    cli_samples_free(&result->between);
    cli_samples_free(&result->events);
    cli_samples_free(&result->whole);
    cli_samples_free(&result->late);
    cli_samples_free(&result->refused);
}
