// SPDX-License-Identifier: Apache-2.0
// POST /v1/completions: from a body to jobs of a worker, and from their events to the answer.
//
// Journey: the handler hands the body to the pool, which parses it, picks the model, settles knobs and tokenises; back
// on the loop thread the jobs are made and submitted all or none; their events come through srv_completions_event.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

#include "server/completion.h"

// ---- preparation: pool thread --------------------------------------------------------------------------------------

// The checkpoint's defaults, kept inside the server's bounds, then what the request gives.
static void settle_knobs(srv_completion *completion, const eng_model_info *info) {
    const srv_request *request = &completion->request;
    const srv_bounds *bounds = &completion->exchange->server->bounds;
    eng_knobs knobs = info->default_knobs;
    const unsigned solver =
        SRV_GIVEN_CG_TOLERANCE | SRV_GIVEN_CG_MAX_STEPS | SRV_GIVEN_CG_MODE | SRV_GIVEN_ON_UNCONVERGED;
    const unsigned loops = SRV_GIVEN_EXIT_THRESHOLD | SRV_GIVEN_MAX_LOOPS;
    unsigned given = request->given;

    completion->ignored = given & ((info->has_mesa ? 0 : solver) | (info->has_loops ? 0 : loops));
    given &= ~completion->ignored;
    if (knobs.cg_max_steps > bounds->max_cg_steps)
        knobs.cg_max_steps = (int32_t)bounds->max_cg_steps;
    if ((double)knobs.cg_tolerance < bounds->min_cg_tolerance)
        knobs.cg_tolerance = (float)bounds->min_cg_tolerance;
    if (knobs.max_loops > bounds->max_loops)
        knobs.max_loops = (int32_t)bounds->max_loops;
    if (given & SRV_GIVEN_CG_TOLERANCE)
        knobs.cg_tolerance = request->cg_tolerance;
    if (given & SRV_GIVEN_CG_MAX_STEPS)
        knobs.cg_max_steps = request->cg_max_steps;
    if (given & (SRV_GIVEN_CG_MODE | SRV_GIVEN_CG_TOLERANCE))
        knobs.cg_mode = request->cg_mode;
    if (given & SRV_GIVEN_EXIT_THRESHOLD)
        knobs.exit_threshold = request->exit_threshold;
    if (given & SRV_GIVEN_MAX_LOOPS) {
        knobs.max_loops = request->max_loops;
        if (request->max_loops > info->loops)
            srv_refuse(&completion->problem, 400, "out_of_range", "max_loops",
                       "max_loops must be at most %d for this model", info->loops);
    }
    completion->knobs = knobs;
    completion->fail_unconverged = (given & SRV_GIVEN_ON_UNCONVERGED) && request->fail_unconverged;
}

static void encode_text(srv_completion *completion, const eng_engine *engine, srv_prompt *prompt, srv_prompt_ids *out) {
    eng_error error = {0};
    int32_t *ids = NULL;
    size_t count = 0;

    const eng_status status =
        eng_encode(engine, prompt->text, prompt->length, completion->request.add_special_tokens, &ids, &count, &error);
    if (status) {
        srv_refuse_engine(&completion->problem, status, error.text);
        completion->problem.param = "prompt";
        return;
    }
    if (count == 0)
        srv_refuse(&completion->problem, 400, "invalid_value", "prompt",
                   "an empty prompt needs a tokenizer with a BOS token and add_special_tokens");
    else if ((out->ids = malloc(count * sizeof *ids)) == NULL)
        srv_refuse_engine(&completion->problem, ENG_NO_MEMORY, NULL);
    else {
        memcpy(out->ids, ids, count * sizeof *ids);
        out->count = count;
    }
    eng_free(ids);
}

static void take_ids(srv_completion *completion, const eng_model_info *info, srv_prompt *prompt, srv_prompt_ids *out) {
    for (size_t i = 0; i < prompt->count; i++)
        if (prompt->ids[i] >= info->vocab_size) {
            srv_refuse(&completion->problem, 400, "out_of_range", "prompt",
                       "token id %zu is outside the vocabulary of %d", i, info->vocab_size);
            return;
        }
    *out = (srv_prompt_ids){.ids = prompt->ids, .count = prompt->count};
    prompt->ids = NULL;
}

static void check_length(srv_completion *completion, const eng_model_info *info, size_t count) {
    const srv_bounds *bounds = &completion->exchange->server->bounds;

    if (count > (size_t)bounds->max_prompt_tokens)
        srv_refuse(&completion->problem, 400, "prompt_too_long", "prompt",
                   "the prompt has %zu tokens; this server takes %lld", count, (long long)bounds->max_prompt_tokens);
    if (info->context_length >= 0 && (int64_t)count + completion->request.max_tokens > info->context_length)
        srv_refuse(&completion->problem, 400, "context_length_exceeded", "prompt",
                   "the prompt's %zu tokens and max_tokens %lld exceed the context of %lld", count,
                   (long long)completion->request.max_tokens, (long long)info->context_length);
}

static void tokenise(srv_completion *completion) {
    const srv_server *server = completion->exchange->server;
    const eng_engine *engine = srv_worker_engine(completion->model->worker);
    const eng_model_info *info = eng_info(engine);
    srv_request *request = &completion->request;

    completion->prompts = calloc(request->prompt_count, sizeof *completion->prompts);
    if (!completion->prompts) {
        srv_refuse_engine(&completion->problem, ENG_NO_MEMORY, NULL);
        return;
    }
    for (size_t i = 0; i < request->prompt_count && !completion->problem.status; i++) {
        srv_prompt *prompt = &request->prompts[i];
        srv_prompt_ids *out = &completion->prompts[i];
        if (prompt->text)
            encode_text(completion, engine, prompt, out);
        else
            take_ids(completion, info, prompt, out);
        completion->prompt_tokens += (int64_t)out->count;
        if (!completion->problem.status)
            check_length(completion, info, out->count);
        free(prompt->text);
        prompt->text = NULL;
    }
    // More than may wait in all would be refused for ever.
    if (!completion->problem.status && completion->prompt_tokens * request->n > server->config->queue_tokens)
        srv_refuse(&completion->problem, 400, "prompt_too_long", "prompt",
                   "the prompts have %lld tokens in all choices; this server takes %lld",
                   (long long)(completion->prompt_tokens * request->n), (long long)server->config->queue_tokens);
}

static void prepare(void *context) {
    srv_completion *completion = context;
    const srv_server *server = completion->exchange->server;
    const srv_buf *body = &completion->exchange->body;

    if (srv_request_parse(body->data, body->length, &server->bounds, &completion->request, &completion->problem))
        return;
    completion->model =
        srv_server_model(server, completion->exchange->key, completion->request.model, &completion->problem);
    if (!completion->model)
        return;
    settle_knobs(completion, eng_info(srv_worker_engine(completion->model->worker)));
    if (!completion->problem.status)
        tokenise(completion);
}

// ---- answers -------------------------------------------------------------------------------------------------------

static void add_compute(eng_compute *sum, const eng_compute *part) {
    sum->solves += part->solves;
    sum->steps += part->steps;
    sum->unconverged += part->unconverged;
    if (part->steps_max > sum->steps_max)
        sum->steps_max = part->steps_max;
}

void srv_completion_usage(const srv_completion *completion, srv_usage *usage) {
    *usage = (srv_usage){
        .prompt_tokens = completion->prompt_tokens,
        .has_mesa = eng_info(srv_worker_engine(completion->model->worker))->has_mesa,
        .ignored = completion->ignored,
    };
    for (size_t i = 0; i < completion->choice_count; i++) {
        const eng_usage *part = &completion->choices[i].usage;
        usage->completion_tokens += part->completion_tokens;
        if (i % (size_t)completion->request.n == 0) // a prompt counts once, however many choices it has
            usage->cached_tokens += part->cached_tokens;
        add_compute(&usage->prompt, &part->prompt);
        add_compute(&usage->completion, &part->completion);
    }
}

static void note_for_log(srv_completion *completion) {
    srv_usage usage;

    srv_completion_usage(completion, &usage);
    completion->exchange->log_prompt_tokens = usage.prompt_tokens;
    completion->exchange->log_completion_tokens = usage.completion_tokens;
}

void srv_completion_cancel_jobs(srv_completion *completion) {
    for (size_t i = 0; i < completion->choice_count; i++)
        if (completion->choices[i].job)
            srv_worker_cancel(completion->model->worker, completion->choices[i].job);
}

static void fail(srv_completion *completion, const srv_problem *problem) {
    if (completion->ended)
        return;
    completion->ended = true;
    if (completion->exchange->streaming)
        srv_stream_fail(completion, problem);
    else
        srv_exchange_refuse(completion->exchange, problem);
}

static void answer(srv_completion *completion) {
    srv_choice_text *texts = calloc(completion->choice_count, sizeof *texts);
    srv_usage usage;
    srv_buf json;

    completion->ended = true;
    srv_buf_init(&json, SRV_MAX_ANSWER_BYTES);
    srv_completion_usage(completion, &usage);
    json.failed = texts == NULL;
    for (size_t i = 0; texts && i < completion->choice_count; i++) {
        const srv_event *last = completion->choices[i].last;
        texts[i] = (srv_choice_text){.text = last->text, .length = last->text_length, .finish = last->finish};
    }
    if (texts)
        srv_write_completion(&json, &completion->head, texts, completion->choice_count, &usage);
    free(texts);
    note_for_log(completion);
    srv_exchange_reply(completion->exchange, 200, &json);
}

void srv_completions_event(srv_worker *worker, srv_event *event) {
    srv_choice *choice = srv_job_owner(event->job);
    srv_completion *completion = choice ? choice->completion : NULL;

    if (!completion || completion->ended) {
        srv_event_free(worker, event);
        return;
    }
    if (event->finish == ENG_FINISH_ERROR) {
        srv_problem problem = {0};
        srv_refuse_engine(&problem, event->status, event->message);
        fail(completion, &problem);
        srv_completion_cancel_jobs(completion);
        srv_event_free(worker, event);
        return;
    }
    if (event->finish != ENG_FINISH_NONE) {
        choice->finished = true;
        completion->finished++;
    }
    event->receiver = choice;
    if (completion->request.stream) {
        srv_stream_add(completion, event);
        completion->ended = completion->finished == completion->choice_count;
        return;
    }
    choice->usage = event->usage;
    choice->last = event;
    if (completion->finished == completion->choice_count)
        answer(completion);
}

// ---- admission: loop thread ----------------------------------------------------------------------------------------

static bool make_jobs(srv_completion *completion, srv_job **jobs) {
    const srv_request *request = &completion->request;
    size_t window = 0;

    if (request->stream) {
        window = SRV_STREAM_WINDOW_BYTES / completion->choice_count;
        window = window < SRV_STREAM_WINDOW_MIN_BYTES ? SRV_STREAM_WINDOW_MIN_BYTES : window;
    }
    for (size_t i = 0; i < completion->choice_count; i++) {
        const srv_prompt_ids *prompt = &completion->prompts[i / (size_t)request->n];
        srv_choice *choice = &completion->choices[i];
        int32_t *ids = malloc(prompt->count * sizeof *ids);

        if (!ids)
            return false;
        memcpy(ids, prompt->ids, prompt->count * sizeof *ids);
        *choice = (srv_choice){.completion = completion, .index = i};
        choice->job = srv_job_create(&(srv_job_options){
            .request = {.ids = ids,
                        .count = prompt->count,
                        .max_tokens = request->max_tokens,
                        .sampling = {.temperature = request->temperature,
                                     .top_p = request->top_p,
                                     .min_p = request->min_p,
                                     .top_k = request->top_k,
                                     .seed = (uint64_t)completion->head.seed,
                                     .choice = (uint32_t)(i % (size_t)request->n)},
                        .knobs = completion->knobs,
                        .stops = request->stops,
                        .stop_count = request->stop_count,
                        .logprobs = -1,
                        .fail_unconverged = completion->fail_unconverged},
            .window = window,
            .owner = choice,
        });
        if (!choice->job)
            return false;
        jobs[i] = choice->job;
    }
    return true;
}

static void free_prompts(srv_completion *completion) {
    for (size_t i = 0; completion->prompts && i < completion->request.prompt_count; i++)
        free(completion->prompts[i].ids);
    free(completion->prompts);
    completion->prompts = NULL;
}

static void make_head(srv_completion *completion) {
    uint64_t random[3] = {0};
    srv_head *head = &completion->head;

    // Never short for so few bytes once the system is up.
    if (getrandom(random, sizeof random, 0) != (ssize_t)sizeof random)
        random[0] = (uint64_t)(uintptr_t)completion ^ (uint64_t)time(NULL);
    snprintf(head->id, sizeof head->id, "cmpl-%016llx%08x", (unsigned long long)random[0], (unsigned)random[1]);
    head->created = (int64_t)time(NULL);
    head->model = completion->model->path->name;
    // 53 bits: every client's JSON reader gives the same number back.
    head->seed = completion->request.seed_given ? completion->request.seed : (int64_t)(random[2] >> 11);
}

static void admit(srv_completion *completion) {
    srv_exchange *exchange = completion->exchange;
    eng_status status = ENG_NO_MEMORY;

    if (!completion->problem.status) {
        make_head(completion);
        exchange->log_id = completion->head.id;
        const size_t count = completion->request.prompt_count * (size_t)completion->request.n;
        completion->choices = calloc(count, sizeof *completion->choices);
        srv_job **jobs = calloc(count, sizeof(srv_job *));
        completion->choice_count = completion->choices ? count : 0;
        if (completion->choices && jobs && make_jobs(completion, jobs))
            status = srv_worker_submit(completion->model->worker, jobs, count);
        free(jobs);
        srv_refuse_engine(&completion->problem, status, NULL);
        if (status == ENG_FULL)
            completion->problem.retry_after = srv_worker_retry_after(
                completion->model->worker, (uint64_t)completion->prompt_tokens * (uint64_t)completion->request.n);
    }
    free_prompts(completion);
    if (completion->problem.status)
        fail(completion, &completion->problem);
    else if (completion->request.stream)
        srv_stream_start_ping(completion);
}

static void prepared(void *context) {
    srv_completion *completion = context;
    srv_exchange *exchange = completion->exchange;
    srv_http *http = exchange->server->http;

    srv_exchange_drop_body(exchange);
    exchange->model = completion->model;
    if (srv_exchange_open(exchange) && !completion->ended)
        admit(completion);
    srv_exchange_release(exchange);
    srv_http_flush(http);
}

// ---- the task ------------------------------------------------------------------------------------------------------

static void cancel_completion(void *context) {
    srv_completion *completion = context;

    if (completion->choice_count)
        note_for_log(completion);
    completion->ended = true;
    srv_completion_cancel_jobs(completion);
    srv_stream_clear(completion);
}

static void abandon_completion(void *context) {
    srv_completion *completion = context;
    srv_problem problem = {0};

    srv_refuse(&problem, 503, "draining", NULL, "the server is shutting down");
    fail(completion, &problem);
    srv_completion_cancel_jobs(completion);
}

static void free_completion(void *context) {
    srv_completion *completion = context;

    srv_stream_clear(completion);
    for (size_t i = 0; i < completion->choice_count; i++) {
        if (completion->choices[i].last)
            srv_event_free(completion->model->worker, completion->choices[i].last);
        srv_job_release(completion->choices[i].job);
    }
    free(completion->choices);
    free_prompts(completion);
    srv_request_free(&completion->request);
    free(completion);
}

void srv_handle_completions(srv_exchange *exchange) {
    static const srv_task_ops ops = {
        .cancel = cancel_completion, .abandon = abandon_completion, .read = srv_stream_read, .free = free_completion};
    srv_problem problem = {0};

    if (exchange->server->phase >= SRV_DRAINING) {
        srv_refuse(&problem, 503, "draining", NULL, "the server is shutting down");
        srv_exchange_refuse(exchange, &problem);
        return;
    }
    srv_completion *completion = calloc(1, sizeof *completion);
    if (completion) {
        completion->exchange = exchange;
        srv_buf_init(&completion->scratch, SRV_MAX_ANSWER_BYTES);
        srv_exchange_attach(exchange, &ops, completion);
        srv_exchange_hold(exchange);
        if (srv_loop_offload(exchange->server->loop, prepare, prepared, completion) == ENG_OK)
            return;
        completion->ended = true;
        srv_exchange_release(exchange); // the library still holds it
    }
    srv_refuse_engine(&problem, ENG_NO_MEMORY, NULL);
    srv_exchange_refuse(exchange, &problem);
}
