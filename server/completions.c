// SPDX-License-Identifier: Apache-2.0
// POST /v1/completions and /v1/chat/completions, and what makes sessions: from a body to jobs of a worker, and from
// their events to the answer.
//
// Journey: the handler hands the body to the pool (completion_prepare.c); back on the loop thread the jobs are made and
// submitted all or none; their events come through srv_completions_event, and become a stream (stream.c) or one answer
// (completion_answer.c).
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

#include "server/completion.h"

// ---- events --------------------------------------------------------------------------------------------------------

void srv_completion_note(srv_completion *completion) {
    srv_usage usage;

    srv_completion_usage(completion, &usage);
    completion->exchange->log_prompt_tokens = usage.prompt_tokens;
    completion->exchange->log_completion_tokens = usage.completion_tokens;
}

void srv_completion_cancel_jobs(srv_completion *completion) {
    for (size_t i = 0; completion->jobs && i < completion->request.prompt_count; i++)
        if (completion->jobs[i])
            srv_worker_cancel(completion->model->worker, completion->jobs[i]);
}

void srv_completion_fail(srv_completion *completion, const srv_problem *problem) {
    if (completion->ended)
        return;
    completion->ended = true;
    if (completion->exchange->streaming)
        srv_stream_fail(completion, problem);
    else
        srv_exchange_refuse(completion->exchange, problem);
}

static void seek_again(srv_completion *completion);

static void fail_job(srv_completion *completion, const srv_event *event) {
    const bool stored = completion->session && completion->session->stored;
    srv_problem problem = {0};

    // It has left the engine for want of room, or another server had it: it is in the store.
    if (stored && event->status == ENG_NOT_FOUND && completion->sought < SRV_SESSION_SEEKS) {
        seek_again(completion);
        return;
    }
    if (stored && event->status == ENG_NOT_FOUND)
        srv_session_refuse(&problem, ENG_FULL, NULL, 0);
    else if ((stored && event->status == ENG_IO) || (completion->session && event->status == ENG_FULL))
        srv_session_refuse(&problem, event->status, event->message, 0);
    else
        srv_refuse_engine(&problem, event->status, event->message);
    srv_completion_fail(completion, &problem);
    srv_completion_cancel_jobs(completion);
}

void srv_completions_event(srv_worker *worker, srv_event *event) {
    srv_choice *first = srv_job_owner(event->job), *choice = first ? first + event->choice : NULL;
    srv_completion *completion = choice ? choice->completion : NULL;

    if (!completion || completion->ended) {
        srv_event_free(worker, event);
        return;
    }
    if (event->finish == ENG_FINISH_ERROR) {
        fail_job(completion, event);
        srv_event_free(worker, event);
        return;
    }
    if (event->finish != ENG_FINISH_NONE) {
        choice->finished = true;
        completion->finished++;
    }
    event->receiver = choice;
    if (event->finish != ENG_FINISH_NONE && completion->session) {
        completion->session->position = event->position;
        completion->durable = event->durable;
    }
    if (completion->request.stream) {
        srv_stream_add(completion, event);
        completion->ended = completion->finished == completion->choice_count;
        return;
    }
    choice->usage = event->usage;
    choice->last = event;
    if (completion->finished == completion->choice_count)
        srv_completion_answer(completion);
}

void srv_completion_use(srv_completion *completion, const srv_model *model) {
    completion->model = model;
    srv_exchange_use(completion->exchange, model);
}

// What is prepared holds no more models than the one that works for it.
static void drop_setup(srv_completion *completion) {
    srv_setup_release(completion->setup);
    completion->setup = NULL;
}

// ---- admission: loop thread ----------------------------------------------------------------------------------------

static eng_request engine_request(const srv_completion *completion, const int32_t *ids, size_t count) {
    const srv_request *request = &completion->request;
    const srv_exchange *exchange = completion->exchange;

    return (eng_request){
        .ids = ids,
        .count = count,
        .max_tokens = request->max_tokens,
        .sampling = {.temperature = request->temperature,
                     .top_p = request->top_p,
                     .min_p = request->min_p,
                     .top_k = request->top_k,
                     .seed = (uint64_t)completion->head.seed},
        .knobs = completion->knobs,
        .stops = request->stops,
        .stop_count = request->stop_count,
        .include_stop = request->include_stop,
        .stop_ids = request->stop_ids,
        .stop_id_count = request->stop_id_count,
        .ignore_eos = request->ignore_eos,
        .min_tokens = request->min_tokens,
        .biases = request->biases,
        .bias_count = request->bias_count,
        .presence_penalty = request->presence_penalty,
        .frequency_penalty = request->frequency_penalty,
        .repetition_penalty = request->repetition_penalty,
        .logprobs = completion->logprobs,
        .prompt_logprobs = srv_completion_tells_prompts(completion),
        .token_compute = request->compute_details,
        .fail_unconverged = completion->fail_unconverged,
        .priority = request->priority,
        .choices = request->best_of,
        .timeline = completion->session ? completion->session->timeline : 0,
        .timeline_position = request->session_position,
        .timeline_returns = request->session_rollback,
        .owner = srv_session_owner(exchange),
        .owner_name = srv_session_owner_name(exchange),
    };
}

// Bytes of unread events of one prompt's choices; 0: no stream.
static size_t window_of(const srv_request *request) {
    const size_t share = SRV_STREAM_WINDOW_BYTES / request->prompt_count;
    const size_t least = SRV_STREAM_WINDOW_MIN_BYTES * (size_t)request->best_of;

    if (!request->stream)
        return 0;
    return share < least ? least : share;
}

static bool make_jobs(srv_completion *completion) {
    const srv_request *request = &completion->request;

    for (size_t i = 0; i < completion->choice_count; i++)
        completion->choices[i] = (srv_choice){.completion = completion, .index = i};
    for (size_t i = 0; i < request->prompt_count; i++) {
        const srv_prompt_ids *prompt = &completion->prompts[i];
        int32_t *ids = malloc((prompt->count + 1) * sizeof *ids);

        if (!ids)
            return false;
        if (prompt->count)
            memcpy(ids, prompt->ids, prompt->count * sizeof *ids);
        completion->jobs[i] = srv_job_create(&(srv_job_options){
            .request = engine_request(completion, ids, prompt->count),
            .keep_tokens = completion->logprobs >= 0 || request->return_token_ids || request->compute_details,
            .window = window_of(request),
            .owner = &completion->choices[i * (size_t)request->best_of],
        });
        if (!completion->jobs[i])
            return false;
    }
    return true;
}

// The ids are needed no more, unless they are part of the answer.
static void drop_ids(srv_completion *completion) {
    for (size_t i = 0; completion->prompts && i < completion->request.prompt_count; i++) {
        free(completion->prompts[i].ids);
        completion->prompts[i].ids = NULL;
    }
}

static void free_prompts(srv_completion *completion) {
    drop_ids(completion);
    for (size_t i = 0; completion->prompts && i < completion->request.prompt_count; i++)
        free(completion->prompts[i].echo);
    free(completion->prompts);
    completion->prompts = NULL;
}

static void make_head(srv_completion *completion) {
    uint64_t random[3] = {0};
    srv_head *head = &completion->head;
    const bool chat = completion->kind == SRV_REQUEST_CHAT;

    // Never short for so few bytes once the system is up.
    if (getrandom(random, sizeof random, 0) != (ssize_t)sizeof random)
        random[0] = (uint64_t)(uintptr_t)completion ^ (uint64_t)time(NULL);
    snprintf(head->id, sizeof head->id, "%scmpl-%016llx%08x", chat ? "chat" : "", (unsigned long long)random[0],
             (unsigned)random[1]);
    head->object = !chat ? "text_completion" : completion->request.stream ? "chat.completion.chunk" : "chat.completion";
    head->created = (int64_t)time(NULL);
    head->model = completion->model->slot->name;
    // 53 bits: every client's JSON reader gives the same number back.
    head->seed = completion->request.seed_given ? completion->request.seed : (int64_t)(random[2] >> 11);
    srv_head_settle(head);
}

// Of a queue that keys share, so much is each one's at most.
static double share_of(const srv_server *server) {
    return server->keys && srv_keys_count(server->keys) > 1 ? server->config->key_queue : 1;
}

static void refuse_room(srv_problem *problem, const srv_no_room *why) {
    if (why->of_share)
        srv_refuse(problem, 429, "key_queue_full", NULL, "too many requests of this key are waiting");
    else
        srv_refuse_engine(problem, ENG_FULL, NULL);
    problem->retry_after = why->retry_after;
}

// More waits than the configuration finds right: who permits it gets a looser solve, all of it.
static void relieve(srv_completion *completion) {
    const srv_server *server = completion->exchange->server;

    if (completion->request.knobs.degrade.given &&
        srv_worker_load(completion->model->worker) > server->config->degrade_queue)
        srv_completion_degrade(completion);
}

static eng_status submit(srv_completion *completion, srv_no_room *why) {
    const size_t prompts = completion->request.prompt_count, count = prompts * (size_t)completion->request.best_of;

    completion->jobs = calloc(prompts, sizeof(srv_job *));
    completion->choices = calloc(count, sizeof *completion->choices);
    completion->choice_count = completion->choices ? count : 0;
    if (!srv_buf_ok(&completion->head.json) || !completion->jobs || !completion->choices || !make_jobs(completion))
        return ENG_NO_MEMORY;
    return srv_worker_submit(completion->model->worker, completion->jobs, prompts,
                             share_of(completion->exchange->server), why);
}

// A session's first prompt begins with the BOS that the later ones must not have.
static void begin_session(srv_completion *completion) {
    srv_prompt_ids *prompt = completion->prompts;

    if (completion->session->position > 0 || !completion->wants_bos)
        return;
    memmove(prompt->ids + 1, prompt->ids, prompt->count * sizeof *prompt->ids);
    prompt->ids[0] = eng_info(srv_worker_engine(completion->model->worker))->bos_id;
    prompt->count++;
    prompt->added_bos = true;
    completion->prompt_tokens++;
}

static bool is_elsewhere(const srv_completion *completion, const srv_session *session) {
    const int64_t wanted = completion->request.session_position;

    return wanted >= 0 && wanted != session->position;
}

// The session is here, and taken.
static void join_session(srv_completion *completion, srv_session *session) {
    const srv_request *request = &completion->request;
    srv_problem *problem = &completion->problem;

    completion->session = session;
    completion->reached = session->position;
    srv_completion_use(completion, session->model);
    srv_knobs_inherit(&completion->request.knobs, &session->knobs);
    srv_completion_settle(completion);
    if (is_elsewhere(completion, session)) {
        srv_refuse(problem, 409, "position_mismatch", "session_position",
                   "the session stands at position %lld, not %lld", (long long)session->position,
                   (long long)request->session_position);
        problem->never_retry = true;
    } else
        begin_session(completion);
}

// The prompt's ids are those of the model that it was prepared for. A session is its checkpoint's, under whatever name
// that is served, and goes on where it is.
static void check_model(srv_completion *completion, const srv_session *session) {
    const srv_model *prepared = completion->model, *its = session->model;
    const bool same_name = strcmp(its->slot->name, prepared->slot->name) == 0;

    if (strcmp(srv_model_fingerprint(its), srv_model_fingerprint(prepared)) == 0) {
        if (!srv_key_may_use(completion->exchange->key, its->slot->name))
            srv_refuse(&completion->problem, 403, "model_not_allowed", "session",
                       "this key may not use the session's model");
    } else if (same_name)
        srv_refuse_engine(&completion->problem, ENG_BUSY, "the model has just been replaced; ask again");
    else
        srv_refuse(&completion->problem, 400, "invalid_value", "model", "the session is of another model; name it");
}

// A session that was looked for in the store is here, or not.
static void reached(void *context, srv_session *session, const srv_problem *problem) {
    srv_completion *completion = context;
    srv_server *server = completion->exchange->server;

    completion->reach = NULL;
    if (problem->status)
        completion->problem = *problem;
    else
        check_model(completion, session);
    if (session && (completion->ended || completion->problem.status))
        srv_session_let_go(server, session);
    else if (session)
        join_session(completion, session);
    if (!completion->ended)
        srv_completion_start(completion);
}

static void seek(srv_completion *completion, srv_session *session) {
    srv_server *server = completion->exchange->server;

    completion->sought++;
    completion->reach = srv_session_reach(server, session, reached, completion);
    if (completion->reach)
        return;
    srv_session_remove(server, session);
    srv_refuse_engine(&completion->problem, ENG_NO_MEMORY, NULL);
    srv_completion_start(completion);
}

// False: it will be known later.
static bool take_session(srv_completion *completion) {
    const char *id = completion->request.session;
    srv_problem *problem = &completion->problem;
    srv_session *session = srv_session_find(completion->exchange, id, strlen(id),
                                            srv_setup_least_used(completion->setup, completion->model), problem);

    if (session && srv_session_is_here(session, completion->model))
        check_model(completion, session);
    if (session && !problem->status && srv_session_take(session, problem)) {
        // What is known of its position may be old: another server may have had it since.
        if (session->stored && is_elsewhere(completion, session))
            session->timeline = 0;
        if (!srv_session_is_here(session, completion->model)) {
            seek(completion, session);
            return false;
        }
        join_session(completion, session);
    }
    return true;
}

// The job was refused before anything was told.
static void forget_jobs(srv_completion *completion) {
    for (size_t i = 0; i < completion->request.prompt_count; i++)
        srv_job_release(completion->jobs[i]);
    free(completion->jobs);
    free(completion->choices);
    completion->jobs = NULL;
    completion->choices = NULL;
    completion->choice_count = completion->finished = 0;
}

static void seek_again(srv_completion *completion) {
    srv_session *session = completion->session;
    srv_prompt_ids *prompt = completion->prompts;

    forget_jobs(completion);
    if (prompt->added_bos) { // whether it needs one is seen anew
        memmove(prompt->ids, prompt->ids + 1, --prompt->count * sizeof *prompt->ids);
        prompt->added_bos = false;
        completion->prompt_tokens--;
    }
    srv_buf_free(&completion->head.json);
    completion->exchange->log_id = NULL;
    completion->session = NULL;
    session->timeline = 0;
    seek(completion, session);
}

// Once it is known what the client has got: all of the answer, or less.
static void leave_session(srv_completion *completion, bool whole) {
    srv_session *session = completion->session;

    completion->session = NULL;
    if (session && whole) {
        if (completion->request.session_rollback)
            srv_session_touch(completion->exchange->server, session);
        srv_session_let_go(completion->exchange->server, session);
    } else if (session && srv_completion_makes(completion))
        srv_session_drop(completion->exchange->server, session); // nobody knows of it
    else if (session)
        srv_session_settle(completion->exchange->server, session, completion->reached);
}

static void submit_or_refuse(srv_completion *completion) {
    srv_exchange *exchange = completion->exchange;
    srv_no_room why = {0};

    completion->form.engine = srv_worker_engine(completion->model->worker);
    make_head(completion);
    exchange->log_id = completion->head.id;
    relieve(completion);
    const eng_status status = submit(completion, &why);
    if (status == ENG_FULL)
        refuse_room(&completion->problem, &why);
    else
        srv_refuse_engine(&completion->problem, status, NULL);
    if (!status && completion->degraded)
        exchange->model->slot->degraded++;
}

void srv_completion_start(srv_completion *completion) {
    if (!completion->problem.status)
        submit_or_refuse(completion);
    if (!completion->request.return_token_ids && !completion->session)
        drop_ids(completion);
    if (completion->problem.status)
        srv_completion_fail(completion, &completion->problem);
    else if (completion->request.stream && !completion->ping)
        srv_stream_start_ping(completion);
}

static void admit(srv_completion *completion) {
    if (!completion->problem.status && srv_completion_makes(completion)) {
        srv_session_make(completion);
        return;
    }
    if (!completion->problem.status && completion->request.session && !take_session(completion))
        return;
    if (!completion->problem.status && !completion->session)
        srv_completion_use(completion, srv_setup_least_used(completion->setup, completion->model));
    srv_completion_start(completion);
}

static void prepared(void *context) {
    srv_completion *completion = context;
    srv_exchange *exchange = completion->exchange;
    srv_http *http = exchange->server->http;

    srv_exchange_drop_body(exchange);
    srv_exchange_use(exchange, completion->model);
    if (srv_exchange_open(exchange) && !completion->ended)
        admit(completion);
    drop_setup(completion);
    srv_exchange_release(exchange);
    srv_http_flush(http);
}

// ---- the task ------------------------------------------------------------------------------------------------------

// Whether the client has got the answer to its end.
static bool is_whole(const srv_completion *completion) {
    const bool sent = completion->request.stream ? completion->closed && completion->sent == completion->scratch.length
                                                 : completion->exchange->queued;

    return sent && !completion->problem.status && !completion->failure.status &&
           completion->finished == completion->choice_count;
}

// May come while the body is still read in the pool: what the pool writes is looked at only where a session was taken,
// which happens after.
static void cancel_completion(void *context) {
    srv_completion *completion = context;

    if (completion->choice_count)
        srv_completion_note(completion);
    const bool whole = completion->session && is_whole(completion);
    completion->ended = true;
    srv_completion_cancel_jobs(completion);
    srv_session_unmake(completion);
    srv_session_unreach(completion->reach);
    completion->reach = NULL;
    leave_session(completion, whole);
    srv_stream_clear(completion);
}

static void abandon_completion(void *context) {
    srv_completion *completion = context;
    srv_problem problem = {0};

    srv_refuse(&problem, 503, "draining", NULL, "the server is shutting down");
    srv_completion_fail(completion, &problem);
    srv_completion_cancel_jobs(completion);
}

static void free_completion(void *context) {
    srv_completion *completion = context;

    drop_setup(completion);
    leave_session(completion, false);
    srv_stream_clear(completion);
    for (size_t i = 0; i < completion->choice_count; i++)
        if (completion->choices[i].last)
            srv_event_free(completion->model->worker, completion->choices[i].last);
    for (size_t i = 0; completion->jobs && i < completion->request.prompt_count; i++)
        srv_job_release(completion->jobs[i]);
    srv_buf_free(&completion->answer);
    srv_buf_free(&completion->head.json);
    free(completion->jobs);
    free(completion->choices);
    free_prompts(completion);
    srv_request_free(&completion->request);
    free(completion);
}

// With no place for any more requests the body need not be looked at: a refusal comes at once, however long it is.
static bool refuse_full(srv_exchange *exchange, srv_problem *problem) {
    const srv_server *server = exchange->server;
    const srv_setup *setup = server->setup;

    const srv_room room = {.owner = exchange->key ? exchange->key->id : 0, .share = share_of(server), .places = 1};
    srv_no_room why = {0};

    for (size_t i = 0; i < setup->model_count; i++)
        if (srv_worker_has_room(setup->models[i]->worker, &room, &why))
            return false;
    refuse_room(problem, &why);
    return true;
}

static void handle(srv_exchange *exchange, srv_request_kind kind) {
    static const srv_task_ops ops = {
        .cancel = cancel_completion, .abandon = abandon_completion, .read = srv_stream_read, .free = free_completion};
    srv_problem problem = {0};

    if (srv_server_refuses(exchange->server, &problem)) {
        srv_exchange_refuse(exchange, &problem);
        return;
    }
    if (exchange->server->phase == SRV_SERVING && refuse_full(exchange, &problem)) {
        srv_exchange_refuse(exchange, &problem);
        return;
    }
    srv_completion *completion = calloc(1, sizeof *completion);
    if (completion) {
        completion->exchange = exchange;
        completion->kind = kind;
        completion->setup = srv_setup_hold(exchange->server->setup);
        completion->bounds = completion->setup->bounds;
        srv_buf_init(&completion->scratch, SRV_MAX_ANSWER_BYTES);
        srv_buf_init(&completion->answer, SRV_MAX_ANSWER_BYTES);
        srv_exchange_attach(exchange, &ops, completion);
        srv_exchange_hold(exchange);
        if (srv_loop_offload(exchange->server->loop, srv_completion_prepare, prepared, completion) == ENG_OK)
            return;
        completion->ended = true;
        srv_exchange_release(exchange); // the library still holds it
    }
    srv_refuse_engine(&problem, ENG_NO_MEMORY, NULL);
    srv_exchange_refuse(exchange, &problem);
}

void srv_handle_completions(srv_exchange *exchange) {
    handle(exchange, SRV_REQUEST_COMPLETION);
}

void srv_handle_chat(srv_exchange *exchange) {
    handle(exchange, SRV_REQUEST_CHAT);
}

void srv_handle_session_create(srv_exchange *exchange) {
    handle(exchange, SRV_REQUEST_SESSION);
}

void srv_handle_session_fork(srv_exchange *exchange) {
    handle(exchange, SRV_REQUEST_FORK);
}
