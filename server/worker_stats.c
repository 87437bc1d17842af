// SPDX-License-Identifier: Apache-2.0
// What the engine thread tells of itself: histograms and counters as events pass, the engine's gauges after each step,
// and from them the time after which a full queue should have room.
#include <time.h>

#include "server/worker_private.h"

uint64_t srv_clock_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
}

// ---- engine thread -------------------------------------------------------------------------------------------------

static void note_tokens(srv_worker *worker, const srv_job *job, srv_job_choice *choice, uint64_t count) {
    srv_stats *stats = &worker->stats;

    if (count == 0)
        return;
    if (!worker->event_us)
        worker->event_us = srv_clock_us();
    const uint64_t now = worker->event_us;
    srv_counter_add(&stats->completion_tokens, count);
    if (!choice->last_token_us)
        srv_histogram_add(&stats->ttft_seconds, &srv_time_bounds, (double)(now - job->created_us) / 1e6, 1);
    else // tokens whose text was held back come together
        srv_histogram_add(&stats->itl_seconds, &srv_time_bounds,
                          (double)(now - choice->last_token_us) / 1e6 / (double)count, count);
    choice->last_token_us = now;
}

static void note_compute(srv_stats *stats, const eng_compute *before, const eng_compute *now) {
    const uint64_t solves = now->solves - before->solves, steps = now->steps - before->steps;

    srv_counter_add(&stats->unconverged, now->unconverged - before->unconverged);
    if (solves)
        srv_histogram_add(&stats->cg_steps, &srv_step_bounds, (double)steps / (double)solves, 1);
}

// A prompt counts once: of what a further choice did not read itself, the first tells.
static void note_prompt(srv_stats *stats, int32_t choice, const eng_usage *seen, const eng_usage *usage) {
    const uint64_t all = (uint64_t)(usage->prompt_tokens - seen->prompt_tokens);
    const uint64_t cached = (uint64_t)(usage->cached_tokens - seen->cached_tokens);

    srv_counter_add(&stats->prompt_tokens, choice == 0 ? all : all - cached);
    srv_counter_add(&stats->cached_tokens, choice == 0 ? cached : 0);
}

void srv_worker_note_event(srv_worker *worker, const srv_job *job, srv_job_choice *choice, const eng_event *event) {
    srv_stats *stats = &worker->stats;
    const eng_usage *usage = event->usage, *seen = &choice->seen;

    if (event->finish == ENG_FINISH_ERROR && event->status == ENG_NUMERIC)
        srv_counter_add(&stats->numeric, 1);
    if (!usage)
        return;
    note_prompt(stats, event->choice, seen, usage);
    note_tokens(worker, job, choice, (uint64_t)(usage->completion_tokens - seen->completion_tokens));
    note_compute(stats, &seen->prompt, &usage->prompt);
    note_compute(stats, &seen->completion, &usage->completion);
    choice->seen = *usage;
}

void srv_worker_note_gauges(srv_worker *worker) {
    srv_stats *stats = &worker->stats;
    eng_gauges gauges = {0};

    eng_read_gauges(worker->engine, &gauges);
    srv_counter_set(&stats->queued_requests, gauges.queued_requests);
    srv_counter_set(&stats->queued_tokens, gauges.queued_tokens);
    srv_counter_set(&stats->running, gauges.running);
    srv_counter_set(&stats->states_used, gauges.states_used);
    srv_counter_set(&stats->states_total, gauges.states_total);
    srv_counter_set(&stats->kv_pages_used, gauges.kv_pages_used);
    srv_counter_set(&stats->kv_pages_total, gauges.kv_pages_total);
    srv_counter_set(&stats->device_allocations, gauges.device_allocations);
    srv_counter_set(&stats->prefix_states, gauges.prefix_states);
    srv_counter_set(&stats->prefix_bytes, gauges.prefix_bytes);
    srv_counter_set(&stats->prefix_bytes_total, gauges.prefix_bytes_total);
    srv_counter_set(&stats->prefix_hits, gauges.prefix_hits);
    srv_counter_set(&stats->prefix_misses, gauges.prefix_misses);
    srv_counter_set(&stats->prefix_evictions, gauges.prefix_evictions);
    srv_counter_set(&stats->prefix_audits, gauges.prefix_audits);
    srv_counter_set(&stats->prefix_mismatches, gauges.prefix_mismatches);
    srv_counter_set(&stats->prefix_stored, gauges.prefix_stored);
    srv_counter_set(&stats->prefix_fetched, gauges.prefix_fetched);
    srv_counter_set(&stats->prefix_damaged, gauges.prefix_damaged);
    srv_counter_set(&stats->timelines, gauges.timelines);
    srv_counter_set(&stats->behind, gauges.behind);
    srv_counter_set(&stats->parked, gauges.parked);
    srv_counter_set(&stats->states_stored, gauges.states_stored);
    srv_counter_set(&stats->kept_on_device, gauges.kept_on_device);
    srv_counter_set(&stats->kept_on_host, gauges.kept_on_host);
    srv_counter_set(&stats->kept_bytes, gauges.kept_bytes);
    srv_counter_set(&stats->kept_bytes_total, gauges.kept_bytes_total);
}

// The fewest tokens that one of the running choices may still make; 0: none runs.
static uint64_t find_soonest(const srv_worker *worker) {
    uint64_t soonest = 0;

    for (const srv_job *job = worker->active; job; job = job->active_next)
        for (size_t i = 0; i < job->choice_count && !job->ended; i++) {
            const srv_job_choice *choice = &job->choices[i];
            if (!choice->started || choice->ended)
                continue;
            const uint64_t left = (uint64_t)(job->request.max_tokens - choice->seen.completion_tokens);
            if (soonest == 0 || left < soonest)
                soonest = left ? left : 1;
        }
    return soonest;
}

double srv_worker_note_step(srv_worker *worker, uint64_t began_us, bool worked) {
    enum { SMOOTHING = 8 };
    const uint64_t now = srv_clock_us(), taken = now - began_us, before = srv_counter_read(&worker->step_us);
    const uint64_t since = worker->worked_until_us ? worker->worked_until_us : began_us;

    srv_worker_note_gauges(worker);
    worker->event_us = 0;
    srv_counter_set(&worker->soonest_tokens, find_soonest(worker));
    worker->worked_until_us = worked ? now : 0;
    if (!worked)
        return 0;
    srv_histogram_add(&worker->stats.step_seconds, &srv_time_bounds, (double)taken / 1e6, 1);
    srv_counter_set(&worker->step_us, before ? (before * (SMOOTHING - 1) + taken) / SMOOTHING : taken);
    return (double)(now - since) / 1e6;
}

// ---- any thread ----------------------------------------------------------------------------------------------------

const srv_stats *srv_worker_stats(const srv_worker *worker) {
    return &worker->stats;
}
