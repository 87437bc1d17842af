// SPDX-License-Identifier: Apache-2.0
// A completion as server-sent events: events of the engine wait in a list and are written when the connection has room.
//
// What waits counts in the job's window (worker.h), so a client that does not read pauses its request in the engine and
// costs a bounded amount of memory. Each event of the engine is one event of the stream; when the loop falls behind,
// several go out in one write. Loop thread.
#include <string.h>

#include "server/completion.h"

static void on_ping(void *context) {
    srv_completion *completion = context;
    srv_exchange *exchange = completion->exchange;

    if (completion->ended && !exchange->streaming)
        return;
    if (!completion->active && !completion->closed) {
        completion->ping_due = true;
        if (!exchange->streaming)
            srv_exchange_stream(exchange); // the header keeps proxies waiting, and faults become events
        srv_exchange_wake(exchange);
        srv_http_flush(exchange->server->http);
    }
    completion->active = false;
}

void srv_stream_start_ping(srv_completion *completion) {
    const srv_server *server = completion->exchange->server;
    const uint64_t period = (uint64_t)server->config->ping_ms;

    // Without memory for the timer the stream goes on without its comments.
    if (period && srv_timer_create(server->loop, on_ping, completion, &completion->ping) == ENG_OK)
        srv_timer_start(completion->ping, period, period);
}

void srv_stream_add(srv_completion *completion, srv_event *event) {
    event->next = NULL;
    if (completion->tail)
        completion->tail->next = event;
    else
        completion->first = event;
    completion->tail = event;
    if (!completion->exchange->streaming)
        srv_exchange_stream(completion->exchange);
    srv_exchange_wake(completion->exchange);
}

void srv_stream_fail(srv_completion *completion, const srv_problem *problem) {
    completion->failure = *problem;
    srv_exchange_wake(completion->exchange);
}

static void write_event(srv_completion *completion, const srv_event *event) {
    srv_choice *choice = event->receiver;
    const srv_request *request = &completion->request;
    srv_usage usage;

    choice->usage = event->usage;
    if (request->continuous_usage)
        srv_completion_usage(completion, &usage);
    srv_chunk chunk = {
        .form = &completion->form,
        .piece = srv_completion_piece(choice, event),
        .with_seed = !completion->seed_told,
        .usage_null = request->include_usage,
        .usage = request->continuous_usage ? &usage : NULL,
    };
    if (event->finish != ENG_FINISH_NONE)
        chunk.session = srv_completion_session(completion);
    if (event->position >= 0)
        completion->reached = event->position;
    completion->seed_told = true;
    srv_write_chunk(&completion->scratch, &completion->head, &chunk);
    if (event->prompt.count == 0)
        return;
    // What the first choice tells of the prompt, the others tell too.
    static const srv_event silent = {.text_length = 0};
    chunk.with_seed = false;
    for (size_t i = 1; i < (size_t)request->best_of; i++) {
        chunk.piece = srv_completion_piece(choice + i, &silent);
        chunk.piece.prompt = &event->prompt;
        srv_write_chunk(&completion->scratch, &completion->head, &chunk);
    }
}

// Another choice than the first has nothing to say before the prompt is told.
static bool must_wait(const srv_completion *completion, const srv_event *event) {
    const srv_choice *choice = event->receiver;
    const size_t prompt = choice->index / (size_t)completion->request.best_of;

    return srv_completion_tells_prompts(completion) && choice != srv_completion_first(choice) &&
           choice->place.prompt_told < completion->prompts[prompt].count;
}

// The oldest that need not wait; NULL: none.
static srv_event *take_event(srv_completion *completion) {
    srv_event *before = NULL, *event = completion->first;

    while (event && must_wait(completion, event)) {
        before = event;
        event = event->next;
    }
    if (!event)
        return NULL;
    *(before ? &before->next : &completion->first) = event->next;
    if (completion->tail == event)
        completion->tail = before;
    return event;
}

static void write_end(srv_completion *completion) {
    if (completion->failure.status)
        srv_write_error_event(&completion->scratch, &completion->failure);
    else if (completion->request.include_usage) {
        srv_usage usage;
        srv_completion_usage(completion, &usage);
        srv_write_usage_chunk(&completion->scratch, &completion->head, &usage);
    }
    srv_write_done(&completion->scratch);
    completion->closed = true;
}

// Formats what comes next; false: nothing is there.
static bool write_next(srv_completion *completion) {
    if (completion->closed)
        return false;
    srv_event *event = take_event(completion);
    if (event) {
        write_event(completion, event);
        srv_event_free(completion->model->worker, event);
        return true;
    }
    if (completion->failure.status || (!completion->first && completion->finished == completion->choice_count)) {
        write_end(completion);
        return true;
    }
    if (completion->ping_due) {
        completion->ping_due = false;
        srv_write_ping(&completion->scratch);
        return true;
    }
    return false;
}

ssize_t srv_stream_read(void *context, char *out, size_t room, bool *end) {
    srv_completion *completion = context;
    srv_buf *scratch = &completion->scratch;

    if (completion->sent == scratch->length) {
        srv_buf_clear(scratch);
        completion->sent = 0;
        while (scratch->length < room && srv_buf_ok(scratch) && write_next(completion))
            ;
        if (!srv_buf_ok(scratch))
            return -1;
    }
    size_t length = scratch->length - completion->sent;
    if (length > room)
        length = room;
    if (length)
        memcpy(out, scratch->data + completion->sent, length);
    completion->sent += length;
    completion->active = completion->active || length;
    *end = completion->closed && completion->sent == scratch->length;
    return (ssize_t)length;
}

void srv_stream_clear(srv_completion *completion) {
    while (completion->first) {
        srv_event *event = completion->first;
        completion->first = event->next;
        srv_event_free(completion->model->worker, event);
    }
    completion->tail = NULL;
    srv_timer_close(completion->ping);
    completion->ping = NULL;
    srv_buf_free(&completion->scratch);
    completion->sent = 0;
}
