// SPDX-License-Identifier: Apache-2.0
// A job's memory: everything that a request points to is copied in, so that it outlives whoever made it.
// Made on the loop thread; freed by whichever thread drops the last reference.
#include <stdlib.h>
#include <string.h>

#include "server/worker_private.h"

static eng_status copy_stops(srv_job *job, const eng_text *stops, size_t count) {
    if (count == 0)
        return ENG_OK;
    size_t bytes = count * sizeof *stops;
    for (size_t i = 0; i < count; i++)
        bytes += stops[i].length;
    eng_text *copy = malloc(bytes);
    if (!copy)
        return ENG_NO_MEMORY;
    char *at = (char *)(copy + count);
    for (size_t i = 0; i < count; i++) {
        memcpy(at, stops[i].bytes, stops[i].length);
        copy[i] = (eng_text){.bytes = at, .length = stops[i].length};
        at += stops[i].length;
    }
    job->stops = copy;
    return ENG_OK;
}

// NULL for none, and for no memory: then *status says so.
static void *copy_array(const void *from, size_t count, size_t size, eng_status *status) {
    void *copy = count ? malloc(count * size) : NULL;

    if (copy)
        memcpy(copy, from, count * size);
    else if (count)
        *status = ENG_NO_MEMORY;
    return copy;
}

srv_job *srv_job_create(const srv_job_options *options) {
    const eng_request *request = &options->request;
    const size_t choices = request->choices > 1 ? (size_t)request->choices : 1;
    srv_job *job = calloc(1, sizeof *job + choices * sizeof *job->choices);

    if (!job) {
        free((int32_t *)request->ids);
        return NULL;
    }
    atomic_init(&job->references, 1);
    job->ids = (int32_t *)request->ids;
    job->keep_tokens = options->keep_tokens;
    job->window = options->window;
    job->owner = options->owner;
    job->created_us = srv_clock_us();
    job->choice_count = choices;
    for (size_t i = 0; i < choices; i++)
        srv_buf_init(&job->choices[i].text, SRV_MAX_TEXT_BYTES);
    eng_status status = copy_stops(job, request->stops, request->stop_count);
    job->stop_ids = copy_array(request->stop_ids, request->stop_id_count, sizeof *job->stop_ids, &status);
    job->biases = copy_array(request->biases, request->bias_count, sizeof *job->biases, &status);
    if (status) {
        srv_job_release(job);
        return NULL;
    }
    job->request = *request;
    job->request.stops = job->stops;
    job->request.stop_ids = job->stop_ids;
    job->request.biases = job->biases;
    job->request.user = job;
    return job;
}

void srv_job_retain(srv_job *job) {
    atomic_fetch_add_explicit(&job->references, 1, memory_order_relaxed);
}

void srv_job_release(srv_job *job) {
    if (!job || atomic_fetch_sub_explicit(&job->references, 1, memory_order_acq_rel) != 1)
        return;
    for (size_t i = 0; i < job->choice_count; i++) {
        srv_token_list_free(&job->choices[i].prompt);
        srv_token_list_free(&job->choices[i].drawn);
        srv_buf_free(&job->choices[i].text);
    }
    free(job->stops);
    free(job->stop_ids);
    free(job->biases);
    free(job->ids);
    free(job);
}

void *srv_job_owner(const srv_job *job) {
    return job->owner;
}
