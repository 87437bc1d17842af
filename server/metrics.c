// SPDX-License-Identifier: Apache-2.0
// The exposition's wording. One function a kind of metric, one call a name; labels are written where they are known.
// Loop thread.
#include "server/metrics.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "server/memory.h"
#include "server/server.h"
#include "server/stats.h"

const srv_bucket_bounds srv_time_bounds = {
    17, {0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120}};
const srv_bucket_bounds srv_step_bounds = {16, {0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64, 128, 256}};

// ---- counting ------------------------------------------------------------------------------------------------------

// The last one stands for all others.
static const int statuses[] = {200, 400, 401, 403, 404, 405, 408, 409, 413, 415, 422, 429, 431, 499, 500, 503, 0};
enum { STATUS_COUNT = sizeof statuses / sizeof *statuses };
_Static_assert((int)STATUS_COUNT <= (int)SRV_STATUS_SLOTS, "a slot for each status");

void srv_metrics_count(uint64_t requests[SRV_STATUS_SLOTS], int status) {
    enum { CLIENT_LEFT = 499 };
    size_t slot = 0;

    if (status == 0)
        status = CLIENT_LEFT;
    while (slot < STATUS_COUNT - 1 && statuses[slot] != status)
        slot++;
    requests[slot]++;
}

// ---- wording -------------------------------------------------------------------------------------------------------

static void describe(srv_buf *out, const char *name, const char *type, const char *help) {
    srv_buf_printf(out, "# HELP %s %s\n", name, help);
    srv_buf_printf(out, "# TYPE %s %s\n", name, type);
}

// A label's value: backslash, quote and line feed are escaped.
static void write_label_value(srv_buf *out, const char *value) {
    for (; *value; value++) {
        if (*value == '\\' || *value == '"')
            srv_buf_append(out, (const char[]){'\\', *value}, 2);
        else if (*value == '\n')
            srv_buf_puts(out, "\\n");
        else
            srv_buf_append(out, value, 1);
    }
}

static const srv_slot no_slot = {.name = (char[]){""}, .replicas = 1};
static const srv_model no_model = {.slot = (srv_slot *)&no_slot};

// One sample. model NULL: none of its own, of several devices each with its label; label NULL: no other label.
static void begin_sample(srv_buf *out, const char *name, const srv_model *model, const char *label, const char *value) {
    srv_buf_puts(out, name);
    if (!model && !label) {
        srv_buf_puts(out, " ");
        return;
    }
    srv_buf_puts(out, "{");
    if (model) {
        srv_buf_puts(out, "model=\"");
        write_label_value(out, model->slot->name);
        if (model->slot->replicas > 1)
            srv_buf_printf(out, "\",device=\"%s", model->slot->device);
        srv_buf_puts(out, label ? "\"," : "\"");
    }
    if (label)
        srv_buf_printf(out, "%s=\"%s\"", label, value);
    srv_buf_puts(out, "} ");
}

static void write_count(srv_buf *out, const char *name, const srv_model *model, const char *label, const char *value,
                        uint64_t count) {
    begin_sample(out, name, model, label, value);
    srv_buf_printf(out, "%llu\n", (unsigned long long)count);
}

static void write_statuses(srv_buf *out, const srv_model *model, const uint64_t requests[SRV_STATUS_SLOTS]) {
    for (size_t slot = 0; slot < STATUS_COUNT; slot++) {
        char status[16] = "other";
        if (requests[slot] == 0)
            continue;
        if (statuses[slot])
            snprintf(status, sizeof status, "%d", statuses[slot]);
        write_count(out, "mesa_requests_total", model, "status", status, requests[slot]);
    }
}

static void write_requests(const srv_server *server, srv_buf *out) {
    describe(out, "mesa_requests_total", "counter",
             "Requests that ended, by HTTP status; 499: the client left before an answer.");
    for (size_t k = 0; k < server->setup->model_count; k++)
        write_statuses(out, server->setup->models[k], server->setup->models[k]->slot->requests);
    write_statuses(out, &no_model, server->metrics.requests);
}

// What is served, since when, and what became of the signals to look again.
static void write_reloads(const srv_server *server, srv_buf *out) {
    const srv_setup *setup = server->setup;
    uint64_t retired = 0;

    describe(out, "mesa_model_info", "gauge", "The fingerprint of the checkpoint that is served.");
    for (size_t k = 0; k < setup->model_count; k++) {
        const eng_engine *engine = srv_worker_engine(setup->models[k]->worker);
        if (engine)
            write_count(out, "mesa_model_info", setup->models[k], "fingerprint", eng_info(engine)->fingerprint.states,
                        1);
    }
    describe(out, "mesa_model_loaded_timestamp_seconds", "gauge", "When it was loaded, since the epoch in seconds.");
    for (size_t k = 0; k < setup->model_count; k++)
        write_count(out, "mesa_model_loaded_timestamp_seconds", setup->models[k], NULL, NULL,
                    (uint64_t)setup->models[k]->loaded);
    for (const srv_model *model = server->alive; model; model = model->next)
        retired += model->retired;
    describe(out, "mesa_models_retired", "gauge", "Engines that were replaced and finish what they run.");
    write_count(out, "mesa_models_retired", NULL, NULL, NULL, retired);
    describe(out, "mesa_reloads_total", "counter", "Times that configuration and checkpoints were read again.");
    write_count(out, "mesa_reloads_total", NULL, "result", "done", server->metrics.reloads);
    write_count(out, "mesa_reloads_total", NULL, "result", "failed", server->metrics.failed_reloads);
    describe(out, "mesa_reload_timestamp_seconds", "gauge",
             "Since when the present configuration holds, since the epoch in seconds.");
    write_count(out, "mesa_reload_timestamp_seconds", NULL, NULL, NULL, (uint64_t)server->metrics.configured);
}

// A metric with one sample a model, read at an offset of srv_stats.
typedef struct row {
    const char *name, *type, *help;
    size_t offset;
} row;
#define STAT(member) offsetof(srv_stats, member)

static const srv_counter *counter_at(const srv_model *model, size_t offset) {
    return (const srv_counter *)((const char *)srv_worker_stats(model->worker) + offset);
}

static void write_rows(const srv_server *server, srv_buf *out) {
    static const row rows[] = {
        {"mesa_queue_requests", "gauge", "Requests that wait in the engine.", STAT(queued_requests)},
        {"mesa_queue_tokens", "gauge", "Prompt tokens of the requests that wait.", STAT(queued_tokens)},
        {"mesa_rows", "gauge", "Requests that run.", STAT(running)},
        {"mesa_cg_unconverged_total", "counter", "Solves that hit their bound before their tolerance.",
         STAT(unconverged)},
        {"mesa_cancelled_total", "counter", "Requests of the engine that were ended because nobody waits for them.",
         STAT(cancelled)},
        {"mesa_numeric_total", "counter", "Requests that ended in numbers that are not finite.", STAT(numeric)},
        {"mesa_states_capacity", "gauge", "States that the device has room for.", STAT(states_total)},
        {"mesa_kv_pages", "gauge", "Pages of full attention in use.", STAT(kv_pages_used)},
        {"mesa_kv_pages_capacity", "gauge", "Pages of full attention that there are.", STAT(kv_pages_total)},
        {"mesa_sessions", "gauge", "Sessions in memory.", STAT(timelines)},
        {"mesa_sessions_behind", "gauge", "Sessions that the store has not wholly.", STAT(behind)},
        {"mesa_sessions_parked_total", "counter", "Sessions that left memory for the store for want of room.",
         STAT(parked)},
        {"mesa_states_stored_total", "counter", "States that were written to the store.", STAT(states_stored)},
        {"mesa_session_budget_bytes", "gauge", "Memory that sessions may take.", STAT(kept_bytes_total)},
        {"mesa_prefix_states", "gauge", "States that are kept for prompts that begin alike.", STAT(prefix_states)},
        {"mesa_prefix_budget_bytes", "gauge", "Memory that they may take.", STAT(prefix_bytes_total)},
        {"mesa_prefix_hits_total", "counter", "Prompts that began from a state that had read a part of them.",
         STAT(prefix_hits)},
        {"mesa_prefix_misses_total", "counter", "Prompts that began from nothing.", STAT(prefix_misses)},
        {"mesa_prefix_evictions_total", "counter", "States that went for want of room.", STAT(prefix_evictions)},
        {"mesa_prefix_stored_total", "counter", "States that the store took, for other servers and other days.",
         STAT(prefix_stored)},
        {"mesa_prefix_fetched_total", "counter", "States that came from the store.", STAT(prefix_fetched)},
        {"mesa_prefix_damaged_total", "counter", "States in the store that could not be believed and were deleted.",
         STAT(prefix_damaged)},
        {"mesa_prefix_audits_total", "counter", "States that were read again and compared.", STAT(prefix_audits)},
        {"mesa_state_audit_mismatch_total", "counter", "Of these, the ones that were wrong.", STAT(prefix_mismatches)},
        {"mesa_device_allocations_total", "counter", "Allocations on the device since it was opened.",
         STAT(device_allocations)},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        describe(out, rows[i].name, rows[i].type, rows[i].help);
        for (size_t k = 0; k < server->setup->model_count; k++)
            write_count(out, rows[i].name, server->setup->models[k], NULL, NULL,
                        srv_counter_read(counter_at(server->setup->models[k], rows[i].offset)));
    }
}

// Metrics whose samples differ in one more label.
static void write_labelled(const srv_server *server, srv_buf *out) {
    static const struct {
        const char *value;
        size_t offset;
    } kinds[] = {
        {"prompt", STAT(prompt_tokens)}, {"cached", STAT(cached_tokens)}, {"completion", STAT(completion_tokens)}};

    describe(out, "mesa_tokens_total", "counter",
             "Tokens: of prompts (what choices share counts once), of these read from a cache, and generated.");
    for (size_t k = 0; k < server->setup->model_count; k++)
        for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
            write_count(out, "mesa_tokens_total", server->setup->models[k], "kind", kinds[i].value,
                        srv_counter_read(counter_at(server->setup->models[k], kinds[i].offset)));
    describe(out, "mesa_degraded_total", "counter",
             "Requests that ran with a looser solve, as they permit, because much waited.");
    for (size_t k = 0; k < server->setup->model_count; k++)
        write_count(out, "mesa_degraded_total", server->setup->models[k], NULL, NULL,
                    server->setup->models[k]->slot->degraded);
    describe(out, "mesa_states", "gauge", "States of requests and of sessions, by where they are.");
    for (size_t k = 0; k < server->setup->model_count; k++) {
        const srv_stats *stats = srv_worker_stats(server->setup->models[k]->worker);
        write_count(out, "mesa_states", server->setup->models[k], "residence", "device",
                    srv_counter_read(&stats->states_used) + srv_counter_read(&stats->kept_on_device));
        write_count(out, "mesa_states", server->setup->models[k], "residence", "host",
                    srv_counter_read(&stats->kept_on_host));
    }
    if (server->store)
        write_count(out, "mesa_states", &no_model, "residence", "store", srv_store_usage(server->store)->sessions);
    describe(out, "mesa_memory_bytes", "gauge", "Memory, by what it is for.");
    for (size_t k = 0; k < server->setup->model_count; k++) {
        const eng_engine *engine = srv_worker_engine(server->setup->models[k]->worker);
        if (!engine)
            continue;
        write_count(out, "mesa_memory_bytes", server->setup->models[k], "what", "weights",
                    eng_info(engine)->weight_bytes);
        write_count(out, "mesa_memory_bytes", server->setup->models[k], "what", "states", eng_info(engine)->pool_bytes);
        write_count(out, "mesa_memory_bytes", server->setup->models[k], "what", "prefixes",
                    srv_counter_read(&srv_worker_stats(server->setup->models[k]->worker)->prefix_bytes));
        write_count(out, "mesa_memory_bytes", server->setup->models[k], "what", "sessions",
                    srv_counter_read(&srv_worker_stats(server->setup->models[k]->worker)->kept_bytes));
    }
    write_count(out, "mesa_memory_bytes", &no_model, "what", "bodies", srv_http_body_bytes(server->http));
}

static void write_store(const srv_server *server, srv_buf *out) {
    if (!server->store)
        return;
    const eng_store_gauges *gauges = srv_store_gauges(server->store);
    const eng_store_usage *usage = srv_store_usage(server->store);
    describe(out, "mesa_store_failing", "gauge", "Whether what was asked of the store of late failed.");
    write_count(out, "mesa_store_failing", NULL, NULL, NULL, srv_store_failing(server->store));
    describe(out, "mesa_store_requests_total", "counter", "Requests to the store, by what became of them.");
    write_count(out, "mesa_store_requests_total", NULL, "result", "done", gauges->done);
    write_count(out, "mesa_store_requests_total", NULL, "result", "failed", gauges->failed);
    write_count(out, "mesa_store_requests_total", NULL, "result", "retried", gauges->retries);
    describe(out, "mesa_store_queue", "gauge", "Requests that wait for the store.");
    write_count(out, "mesa_store_queue", NULL, NULL, NULL, gauges->queued);
    describe(out, "mesa_store_dropped_total", "counter", "What this server dropped from the store, by why.");
    write_count(out, "mesa_store_dropped_total", NULL, "why", "evicted", gauges->evicted);
    write_count(out, "mesa_store_dropped_total", NULL, "why", "expired", gauges->expired);
    describe(out, "mesa_store_prefixes", "gauge", "States in the store for prompts that begin alike.");
    write_count(out, "mesa_store_prefixes", NULL, NULL, NULL, usage->prefixes);
    describe(out, "mesa_store_bytes", "gauge", "What the store holds.");
    write_count(out, "mesa_store_bytes", NULL, NULL, NULL, usage->bytes);
    describe(out, "mesa_store_budget_bytes", "gauge", "What it may hold.");
    write_count(out, "mesa_store_budget_bytes", NULL, NULL, NULL, usage->budget);
}

static void write_histogram(const srv_server *server, srv_buf *out, const char *name, const char *help, size_t offset,
                            const srv_bucket_bounds *bounds) {
    char sample[64], bound[32];

    describe(out, name, "histogram", help);
    for (size_t k = 0; k < server->setup->model_count; k++) {
        const srv_model *model = server->setup->models[k];
        const srv_histogram *histogram =
            (const srv_histogram *)((const char *)srv_worker_stats(server->setup->models[k]->worker) + offset);
        uint64_t count = 0;
        snprintf(sample, sizeof sample, "%s_bucket", name);
        for (size_t i = 0; i <= bounds->count; i++) {
            count += srv_counter_read(&histogram->buckets[i]);
            if (i < bounds->count)
                snprintf(bound, sizeof bound, "%.9g", bounds->upper[i]);
            write_count(out, sample, model, "le", i < bounds->count ? bound : "+Inf", count);
        }
        snprintf(sample, sizeof sample, "%s_sum", name);
        begin_sample(out, sample, model, NULL, NULL);
        srv_buf_printf(out, "%.9g\n", (double)srv_counter_read(&histogram->millionths) / 1e6);
        snprintf(sample, sizeof sample, "%s_count", name);
        write_count(out, sample, model, NULL, NULL, count);
    }
}

static void write_histograms(const srv_server *server, srv_buf *out) {
    write_histogram(server, out, "mesa_step_seconds", "Time of one step of the batch.", STAT(step_seconds),
                    &srv_time_bounds);
    write_histogram(server, out, "mesa_ttft_seconds", "From a request's admission to its first token.",
                    STAT(ttft_seconds), &srv_time_bounds);
    write_histogram(server, out, "mesa_itl_seconds", "Between two tokens of one request.", STAT(itl_seconds),
                    &srv_time_bounds);
    write_histogram(server, out, "mesa_cg_steps", "Solver steps a solve, mean over what one step did for one request.",
                    STAT(cg_steps), &srv_step_bounds);
}

// ---- the process ---------------------------------------------------------------------------------------------------

static uint64_t count_descriptors(void) {
    DIR *folder = opendir("/proc/self/fd");
    uint64_t count = 0;

    if (!folder)
        return 0;
    while (readdir(folder))
        count++;
    closedir(folder);
    return count - 3; // ".", "..", and the folder itself
}

static double seconds_of(struct timeval time) {
    return (double)time.tv_sec + (double)time.tv_usec / 1e6;
}

static void write_process(const srv_server *server, srv_buf *out) {
    struct rusage usage = {0};
    struct rlimit limit = {0};

    getrusage(RUSAGE_SELF, &usage);
    getrlimit(RLIMIT_NOFILE, &limit);
    describe(out, "mesa_connections", "gauge", "Open connections.");
    write_count(out, "mesa_connections", NULL, NULL, NULL, srv_http_connections(server->http));
    describe(out, "process_resident_memory_bytes", "gauge", "Resident memory size in bytes.");
    write_count(out, "process_resident_memory_bytes", NULL, NULL, NULL, srv_memory_resident());
    describe(out, "process_cpu_seconds_total", "counter", "Total user and system CPU time spent in seconds.");
    srv_buf_printf(out, "process_cpu_seconds_total %.6f\n", seconds_of(usage.ru_utime) + seconds_of(usage.ru_stime));
    describe(out, "process_open_fds", "gauge", "Number of open file descriptors.");
    write_count(out, "process_open_fds", NULL, NULL, NULL, count_descriptors());
    describe(out, "process_max_fds", "gauge", "Maximum number of open file descriptors.");
    write_count(out, "process_max_fds", NULL, NULL, NULL, (uint64_t)limit.rlim_cur);
    describe(out, "process_start_time_seconds", "gauge", "Start time of the process since the epoch in seconds.");
    write_count(out, "process_start_time_seconds", NULL, NULL, NULL, (uint64_t)server->started);
    describe(out, "mesa_build_info", "gauge", "The version that runs.");
    srv_buf_puts(out, "mesa_build_info{version=\"" MESA_VERSION "\"} 1\n");
}

void srv_handle_metrics(srv_exchange *exchange) {
    const srv_server *server = exchange->server;
    srv_buf out;

    srv_buf_init(&out, SRV_MAX_ANSWER_BYTES);
    write_requests(server, &out);
    write_reloads(server, &out);
    write_labelled(server, &out);
    write_rows(server, &out);
    write_store(server, &out);
    write_histograms(server, &out);
    write_process(server, &out);
    srv_exchange_reply_as(exchange, "text/plain; version=0.0.4; charset=utf-8", &out);
}
