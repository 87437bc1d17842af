// SPDX-License-Identifier: Apache-2.0
// A completion's preparation: parse the body, find the model, settle the knobs, turn prompts into ids.
// Everything that can be refused without the engine is refused here, with the field's name. A thread of the pool; the
// loop thread does not touch the completion meanwhile.
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "server/completion.h"

static void refuse_memory(srv_completion *completion) {
    srv_refuse_engine(&completion->problem, ENG_NO_MEMORY, NULL);
}

// ---- knobs ---------------------------------------------------------------------------------------------------------

void srv_completion_settle(srv_completion *completion) {
    const eng_model_info *info = eng_info(srv_worker_engine(completion->model->worker));
    const srv_knobs *asked = &completion->request.knobs;
    const srv_bounds *bounds = &completion->bounds;
    eng_knobs knobs = info->default_knobs;
    const unsigned solver =
        SRV_GIVEN_CG_TOLERANCE | SRV_GIVEN_CG_MAX_STEPS | SRV_GIVEN_CG_MODE | SRV_GIVEN_ON_UNCONVERGED;
    unsigned given = asked->given;

    completion->ignored = given & ((info->has_mesa ? 0 : solver) | (info->has_loops ? 0 : SRV_GIVEN_MAX_LOOPS) |
                                   (info->has_exit_gate ? 0 : SRV_GIVEN_EXIT_THRESHOLD));
    given &= ~completion->ignored;
    if (knobs.cg_max_steps > bounds->max_cg_steps)
        knobs.cg_max_steps = (int32_t)bounds->max_cg_steps;
    if (knobs.cg_tolerance < (float)bounds->min_cg_tolerance)
        knobs.cg_tolerance = (float)bounds->min_cg_tolerance;
    if (knobs.max_loops > bounds->max_loops)
        knobs.max_loops = (int32_t)bounds->max_loops;
    if (given & SRV_GIVEN_CG_TOLERANCE)
        knobs.cg_tolerance = asked->cg_tolerance;
    if (given & SRV_GIVEN_CG_MAX_STEPS)
        knobs.cg_max_steps = asked->cg_max_steps;
    if (given & (SRV_GIVEN_CG_MODE | SRV_GIVEN_CG_TOLERANCE))
        knobs.cg_mode = asked->cg_mode;
    if (given & SRV_GIVEN_EXIT_THRESHOLD)
        knobs.exit_threshold = asked->exit_threshold;
    if (given & SRV_GIVEN_MAX_LOOPS) {
        knobs.max_loops = asked->max_loops;
        if (asked->max_loops > info->loops)
            srv_refuse(&completion->problem, 400, "out_of_range", "max_loops",
                       "max_loops must be at most %d for this model", info->loops);
    }
    completion->knobs = knobs;
    completion->degraded = false;
    completion->fail_unconverged = (given & SRV_GIVEN_ON_UNCONVERGED) && asked->fail_unconverged;
}

// An exact solve is one of tolerance 0. What the request does not permit, or asks for already, stays.
void srv_completion_degrade(srv_completion *completion) {
    const srv_degrade *floor = &completion->request.knobs.degrade;
    const eng_model_info *info = eng_info(srv_worker_engine(completion->model->worker));
    const bool may_solve = info->has_mesa;
    eng_knobs *knobs = &completion->knobs;
    const bool exact = knobs->cg_mode == ENG_CG_EXACT;

    if (may_solve && (floor->given & SRV_GIVEN_CG_TOLERANCE) && knobs->cg_mode != ENG_CG_STEPS &&
        floor->cg_tolerance > (exact ? 0 : knobs->cg_tolerance)) {
        knobs->cg_mode = ENG_CG_TOLERANCE;
        knobs->cg_tolerance = floor->cg_tolerance;
        completion->degraded = true;
    }
    if (may_solve && (floor->given & SRV_GIVEN_CG_MAX_STEPS) && knobs->cg_mode != ENG_CG_EXACT &&
        floor->cg_max_steps < knobs->cg_max_steps) {
        knobs->cg_max_steps = floor->cg_max_steps;
        completion->degraded = true;
    }
    if (info->has_exit_gate && (floor->given & SRV_GIVEN_EXIT_THRESHOLD) &&
        floor->exit_threshold < knobs->exit_threshold) {
        knobs->exit_threshold = floor->exit_threshold;
        completion->degraded = true;
    }
}

// ---- prompts -------------------------------------------------------------------------------------------------------

static void encode_text(srv_completion *completion, const eng_engine *engine, srv_prompt *prompt, srv_prompt_ids *out) {
    const srv_request *request = &completion->request;
    const int32_t bos = eng_info(engine)->bos_id;
    const bool alone = !request->session; // a session has its BOS already, or gets it when it is known that it has not
    eng_error error = {0};
    int32_t *ids = NULL;
    size_t count = 0;

    const eng_status status =
        eng_encode(engine, prompt->text, prompt->length, request->add_special_tokens && alone, &ids, &count, &error);
    if (status) {
        srv_refuse_engine(&completion->problem, status, error.text);
        completion->problem.param = "prompt";
        return;
    }
    completion->wants_bos = !alone && request->add_special_tokens && bos >= 0;
    if (count == 0 && alone)
        srv_refuse(&completion->problem, 400, "invalid_value", "prompt",
                   "an empty prompt needs a tokenizer with a BOS token and add_special_tokens");
    else if ((out->ids = malloc((count + 1) * sizeof *ids)) == NULL) // and one for a BOS
        refuse_memory(completion);
    else {
        if (count)
            memcpy(out->ids, ids, count * sizeof *ids);
        out->count = count;
        out->added_bos = alone && request->add_special_tokens && bos >= 0 && ids[0] == bos;
    }
    eng_free(ids);
    if (request->echo) {
        out->echo = prompt->text;
        out->echo_length = prompt->length;
        prompt->text = NULL;
    }
}

static void check_vocabulary(srv_completion *completion, const eng_model_info *info, const char *field,
                             const int32_t *ids, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (ids[i] >= info->vocab_size) {
            srv_refuse(&completion->problem, 400, "out_of_range", field,
                       "token id %d (at index %zu) is outside the vocabulary of %d", ids[i], i, info->vocab_size);
            return;
        }
}

static void take_ids(srv_completion *completion, const eng_engine *engine, srv_prompt *prompt, srv_prompt_ids *out) {
    eng_error error = {0};
    char *text = NULL;
    size_t length = 0;

    check_vocabulary(completion, eng_info(engine), "prompt", prompt->ids, prompt->count);
    if (completion->problem.status)
        return;
    out->ids = prompt->ids;
    out->count = prompt->count;
    prompt->ids = NULL;
    if (!completion->request.echo)
        return;
    const eng_status status = eng_decode(engine, out->ids, out->count, true, &text, &length, &error);
    if (status) {
        srv_refuse_engine(&completion->problem, status, error.text);
        completion->problem.param = "prompt";
        return;
    }
    out->echo = malloc(length + 1);
    if (out->echo) {
        memcpy(out->echo, text, length + 1);
        out->echo_length = length;
    } else
        refuse_memory(completion);
    eng_free(text);
}

static void check_length(srv_completion *completion, const eng_model_info *info, size_t count) {
    const srv_bounds *bounds = &completion->bounds;

    if (count > (size_t)bounds->max_prompt_tokens)
        srv_refuse(&completion->problem, 400, "prompt_too_long", "prompt",
                   "the prompt has %zu tokens; this server takes %lld", count, (long long)bounds->max_prompt_tokens);
    if (info->context_length >= 0 && (int64_t)count + completion->request.max_tokens > info->context_length)
        srv_refuse(&completion->problem, 400, "context_length_exceeded", "prompt",
                   "the prompt's %zu tokens and max_tokens %lld exceed the context of %lld", count,
                   (long long)completion->request.max_tokens, (long long)info->context_length);
}

static void tokenise(srv_completion *completion, const eng_engine *engine) {
    srv_request *request = &completion->request;

    completion->prompts = calloc(request->prompt_count, sizeof *completion->prompts);
    if (!completion->prompts) {
        refuse_memory(completion);
        return;
    }
    for (size_t i = 0; i < request->prompt_count && !completion->problem.status; i++) {
        srv_prompt *prompt = &request->prompts[i];
        srv_prompt_ids *out = &completion->prompts[i];
        if (prompt->text)
            encode_text(completion, engine, prompt, out);
        else
            take_ids(completion, engine, prompt, out);
        completion->prompt_tokens += (int64_t)out->count;
        if (!completion->problem.status)
            check_length(completion, eng_info(engine), out->count);
        free(prompt->text);
        prompt->text = NULL;
    }
}

// ---- messages ------------------------------------------------------------------------------------------------------

static void encode_messages(srv_completion *completion, const eng_engine *engine, eng_chat_message *messages,
                            srv_prompt_ids *out) {
    const srv_request *request = &completion->request;
    const eng_chat chat = {.messages = messages,
                           .count = request->message_count,
                           .add_generation_prompt = request->add_generation_prompt,
                           .time = (int64_t)time(NULL)};
    eng_error error = {0};
    int32_t *ids = NULL;
    size_t count = 0;

    const eng_status status = eng_encode_chat(engine, &chat, &ids, &count, &error);
    if (status == ENG_UNSUPPORTED)
        srv_refuse(&completion->problem, 400, "invalid_request", "messages", "%s; POST /v1/completions needs none",
                   error.text);
    else if (status)
        srv_refuse_engine(&completion->problem, status, error.text);
    if (status) {
        completion->problem.param = "messages";
        return;
    }
    if (count == 0)
        srv_refuse(&completion->problem, 400, "invalid_value", "messages", "the chat template makes no prompt of them");
    else if ((out->ids = malloc(count * sizeof *ids)) == NULL)
        refuse_memory(completion);
    else {
        memcpy(out->ids, ids, count * sizeof *ids);
        out->count = count;
    }
    eng_free(ids);
}

// What the context leaves for an answer whose length nobody gave.
static void settle_length(srv_completion *completion, const eng_model_info *info) {
    srv_request *request = &completion->request;
    const int64_t most = completion->bounds.max_tokens,
                  left = info->context_length < 0 ? INT64_MAX : info->context_length - completion->prompt_tokens;

    if (request->max_tokens >= 0)
        return;
    request->max_tokens = most < SRV_CHAT_MAX_TOKENS ? most : SRV_CHAT_MAX_TOKENS;
    if (request->max_tokens > left)
        request->max_tokens = left > 0 ? left : 1; // with no room at all the length is refused
    if (request->min_tokens > request->max_tokens)
        srv_refuse(&completion->problem, 400, "out_of_range", "min_tokens", "min_tokens is more than may be generated");
}

static void converse(srv_completion *completion, const eng_engine *engine) {
    const srv_request *request = &completion->request;
    eng_chat_message *messages = calloc(request->message_count, sizeof *messages);

    completion->prompts = calloc(request->prompt_count, sizeof *completion->prompts);
    if (!messages || !completion->prompts)
        refuse_memory(completion);
    else {
        for (size_t i = 0; i < request->message_count; i++) {
            const srv_message *message = &request->messages[i];
            messages[i] = (eng_chat_message){.role = {message->role, strlen(message->role)},
                                             .content = {message->content, message->length}};
        }
        encode_messages(completion, engine, messages, completion->prompts);
    }
    free(messages);
    if (completion->problem.status)
        return;
    completion->prompt_tokens = (int64_t)completion->prompts->count;
    settle_length(completion, eng_info(engine));
    check_length(completion, eng_info(engine), completion->prompts->count);
    if (completion->problem.param && strcmp(completion->problem.param, "prompt") == 0)
        completion->problem.param = "messages";
}

// ---- the whole -----------------------------------------------------------------------------------------------------

// What a plain answer would cost: more than may be is refused before it is computed.
static void check_answer(srv_completion *completion) {
    enum { TOKEN_BYTES = 100, ALTERNATIVE_BYTES = 40 };
    const srv_request *request = &completion->request;
    const double choices = request->best_of;
    const double read = request->echo ? (double)completion->prompt_tokens * choices : 0;
    const double drawn = (double)request->max_tokens * (double)request->prompt_count * choices;

    if (request->stream || completion->request.logprobs < 0)
        return;
    if ((read + drawn) * (TOKEN_BYTES + ALTERNATIVE_BYTES * (double)request->logprobs) > SRV_MAX_ANSWER_BYTES)
        srv_refuse(&completion->problem, 400, "answer_too_large", "logprobs",
                   "logprobs of %.0f tokens would make an answer of more than %d MiB", read + drawn,
                   SRV_MAX_ANSWER_BYTES >> 20);
}

static void check_whole(srv_completion *completion, const eng_model_info *info) {
    const srv_config *config = &completion->setup->config;
    const srv_request *request = &completion->request;

    check_vocabulary(completion, info, "stop_token_ids", request->stop_ids, request->stop_id_count);
    for (size_t i = 0; i < request->bias_count; i++)
        if (request->biases[i].id >= info->vocab_size)
            srv_refuse(&completion->problem, 400, "out_of_range", "logit_bias",
                       "a key of logit_bias is outside the vocabulary of %d", info->vocab_size);
    if (completion->prompt_tokens > config->queue_tokens) // what may never wait would be refused for ever
        srv_refuse(&completion->problem, 400, "prompt_too_long", "prompt",
                   "the prompts have %lld tokens in all; this server takes %lld", (long long)completion->prompt_tokens,
                   (long long)config->queue_tokens);
    check_answer(completion);
}

static eng_status parse(srv_completion *completion) {
    const srv_buf *body = &completion->exchange->body;
    const srv_bounds *bounds = &completion->bounds;
    srv_request *request = &completion->request;
    srv_problem *problem = &completion->problem;

    if (completion->kind == SRV_REQUEST_CHAT)
        return srv_chat_parse(body->data, body->length, bounds, request, problem);
    if (completion->kind == SRV_REQUEST_COMPLETION)
        return srv_request_parse(body->data, body->length, bounds, request, problem);
    return srv_session_parse(completion->kind, body->data, body->length, bounds, request, problem);
}

void srv_completion_prepare(void *context) {
    srv_completion *completion = context;
    const srv_exchange *exchange = completion->exchange;
    const srv_request *request = &completion->request;

    if (parse(completion) || completion->kind == SRV_REQUEST_FORK)
        return;
    completion->model = srv_setup_model(completion->setup, exchange->key, request->model, &completion->problem);
    if (!completion->model)
        return;
    const eng_engine *engine = srv_worker_engine(completion->model->worker);
    srv_completion_settle(completion);
    if (!completion->problem.status && request->prompt_count)
        (completion->kind == SRV_REQUEST_CHAT ? converse : tokenise)(completion, engine);
    if (!completion->problem.status)
        check_whole(completion, eng_info(engine));
    completion->logprobs = request->logprobs;
    if (request->logprobs < 0 && request->best_of > request->n)
        completion->logprobs = 0; // choices are compared by them
    completion->form = (srv_choice_form){
        .engine = engine,
        .shape = completion->kind != SRV_REQUEST_CHAT ? SRV_SHAPE_TEXT
                 : request->stream                    ? SRV_SHAPE_DELTA
                                                      : SRV_SHAPE_MESSAGE,
        .logprobs = request->logprobs,
        .token_ids = request->return_token_ids,
        .compute = request->compute_details,
        .has_mesa = eng_info(engine)->has_mesa,
        .has_loops = eng_info(engine)->has_loops,
    };
}
