// SPDX-License-Identifier: Apache-2.0
// The life of a request inside the engine, and the checks at its door.
//
// End-of-text ids are looked for before an id becomes the tail, so the state never reads one. They count as completion
// tokens and stand among those told, as in vLLM; their text, like that of every special token, is not part of the
// output. A job that ends closes its session at once: by the time its last event is told the slot is free.
#include "engine/request.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

// ------------------------------------------------------------------------------------------------------------ checks

static eng_status check_prompt(const eng_job_rules *rules, const eng_request *request, eng_error *error) {
    int32_t vocab = rules->model->config.vocab_size;
    if (request->count == 0 || !request->ids)
        return eng_fail(error, ENG_INVALID, "the prompt is empty; it needs at least one id");
    if (request->count > INT32_MAX)
        return eng_fail(error, ENG_TOO_LONG, "a prompt of %zu ids; the limit is %" PRId32, request->count, INT32_MAX);
    for (size_t i = 0; i < request->count; i++)
        if (request->ids[i] < 0 || request->ids[i] >= vocab)
            return eng_fail(error, ENG_INVALID,
                            "prompt id %" PRId32 " at index %zu is outside the vocabulary of %" PRId32, request->ids[i],
                            i, vocab);
    if (request->max_tokens < 0)
        return eng_fail(error, ENG_INVALID, "max_tokens is %" PRId64 "; it must not be negative", request->max_tokens);
    int64_t context = rules->context_length, count = (int64_t)request->count;
    if (context >= 0 && (count > context || request->max_tokens > context - count))
        return eng_fail(error, ENG_TOO_LONG,
                        "prompt (%" PRId64 ") and max_tokens (%" PRId64 ") exceed the context of %" PRId64 " tokens",
                        count, request->max_tokens, context);
    return ENG_OK;
}

static bool within(float value, float low, float high) {
    return value >= low && value <= high; // false for NaN
}

static eng_status check_sampling(const eng_sampling *sampling, eng_error *error) {
    if (!isfinite(sampling->temperature) || sampling->temperature < 0)
        return eng_fail(error, ENG_INVALID, "temperature is %g; it must be finite and not negative",
                        (double)sampling->temperature);
    if (!within(sampling->top_p, 0, 1))
        return eng_fail(error, ENG_INVALID, "top_p is %g; its range is 0 to 1", (double)sampling->top_p);
    if (!within(sampling->min_p, 0, 1))
        return eng_fail(error, ENG_INVALID, "min_p is %g; its range is 0 to 1", (double)sampling->min_p);
    if (sampling->top_k < -1)
        return eng_fail(error, ENG_INVALID, "top_k is %" PRId32 "; it is -1 or 0 (off) or positive", sampling->top_k);
    return ENG_OK;
}

static eng_status check_knobs(const eng_knobs *knobs, eng_error *error) {
    if (knobs->cg_mode != ENG_CG_TOLERANCE && knobs->cg_mode != ENG_CG_STEPS && knobs->cg_mode != ENG_CG_EXACT)
        return eng_fail(error, ENG_INVALID, "cg_mode %d is not one that a request may ask for", (int)knobs->cg_mode);
    if (!within(knobs->cg_tolerance, 0, 1))
        return eng_fail(error, ENG_INVALID, "cg_tolerance is %g; its range is 0 to 1", (double)knobs->cg_tolerance);
    if (knobs->cg_max_steps < 0 || knobs->cg_max_steps > 256)
        return eng_fail(error, ENG_INVALID, "cg_max_steps is %" PRId32 "; its range is 0 to 256", knobs->cg_max_steps);
    if (!within(knobs->exit_threshold, 0, 1))
        return eng_fail(error, ENG_INVALID, "exit_threshold is %g; its range is 0 to 1", (double)knobs->exit_threshold);
    if (knobs->max_loops < 1)
        return eng_fail(error, ENG_INVALID, "max_loops is %" PRId32 "; it must be at least 1", knobs->max_loops);
    return ENG_OK;
}

static eng_status check_stops(const eng_job_rules *rules, const eng_request *request, eng_error *error) {
    if (request->stop_count == 0)
        return ENG_OK;
    if (!rules->tokenizer)
        return eng_fail(error, ENG_UNSUPPORTED, "stop strings need a tokenizer; the model has none");
    for (size_t i = 0; i < request->stop_count; i++) {
        size_t offset;
        if (request->stops[i].length == 0)
            return eng_fail(error, ENG_INVALID, "stop string %zu is empty", i);
        if (!eng_utf8_valid(request->stops[i].bytes, request->stops[i].length, &offset))
            return eng_fail(error, ENG_INVALID, "stop string %zu is not UTF-8 at byte %zu", i, offset);
    }
    return ENG_OK;
}

static eng_status unsupported(const char *field, eng_error *error) {
    return eng_fail(error, ENG_UNSUPPORTED, "%s is not supported by this version", field);
}

static eng_status check_unbuilt(const eng_request *request, eng_error *error) {
    if (request->bias_count > 0)
        return unsupported("biases", error);
    if (request->stop_id_count > 0)
        return unsupported("stop_ids", error);
    if (request->include_stop)
        return unsupported("include_stop", error);
    if (request->ignore_eos)
        return unsupported("ignore_eos", error);
    if (request->min_tokens != 0)
        return unsupported("min_tokens", error);
    if (request->presence_penalty != 0)
        return unsupported("presence_penalty", error);
    if (request->frequency_penalty != 0)
        return unsupported("frequency_penalty", error);
    if (request->repetition_penalty != 0 && request->repetition_penalty != 1)
        return unsupported("repetition_penalty", error);
    if (request->logprobs > 0)
        return unsupported("logprobs above 0", error);
    if (request->prompt_logprobs)
        return unsupported("prompt_logprobs", error);
    if (request->token_compute)
        return unsupported("token_compute", error);
    if (request->priority != 0)
        return unsupported("priority", error);
    return request->owner != 0 ? unsupported("owner", error) : ENG_OK;
}

static eng_status check_request(const eng_job_rules *rules, const eng_request *request, eng_error *error) {
    eng_status status = check_prompt(rules, request, error);
    if (status == ENG_OK)
        status = check_sampling(&request->sampling, error);
    if (status == ENG_OK)
        status = check_knobs(&request->knobs, error);
    if (status == ENG_OK)
        status = check_stops(rules, request, error);
    return status == ENG_OK ? check_unbuilt(request, error) : status;
}

// ----------------------------------------------------------------------------------------------------- create, free

eng_status eng_job_create(const eng_job_rules *rules, const eng_request *request, uint64_t id, eng_job **out,
                          eng_error *error) {
    eng_status status = check_request(rules, request, error);
    if (status != ENG_OK)
        return status;
    eng_job *job = calloc(1, sizeof *job);
    if (!job)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for a request");
    job->id = id;
    job->user = request->user;
    job->prompt_count = (int64_t)request->count;
    job->max_tokens = request->max_tokens;
    job->sampling = request->sampling;
    job->knobs = request->knobs;
    job->logprobs = request->logprobs;
    job->fail_unconverged = request->fail_unconverged;
    job->usage.prompt_tokens = job->prompt_count;
    job->prompt = malloc(sizeof *job->prompt * request->count);
    if (!job->prompt)
        status = eng_fail(error, ENG_NO_MEMORY, "out of memory for a prompt of %zu ids", request->count);
    else
        memcpy(job->prompt, request->ids, sizeof *job->prompt * request->count);
    if (status == ENG_OK && rules->tokenizer)
        status = eng_text_create(request->stops, request->stop_count, &job->text, error);
    if (status != ENG_OK) {
        eng_job_free(job);
        return status;
    }
    *out = job;
    return ENG_OK;
}

void eng_job_free(eng_job *job) {
    if (!job)
        return;
    eng_session_close(&job->session);
    eng_text_free(job->text);
    free(job->prompt);
    eng_token_list_free(&job->drawn);
    free(job);
}

int64_t eng_job_length(const eng_job *job) {
    int64_t read_again = job->max_tokens > 0 ? job->max_tokens - 1 : 0; // the last id drawn is never read
    return read_again > INT64_MAX - job->prompt_count ? INT64_MAX : job->prompt_count + read_again;
}

// -------------------------------------------------------------------------------------------------------------- steps

static void end(eng_job *job, eng_finish finish) {
    job->phase = ENG_PHASE_ENDED;
    job->finish = finish;
    eng_session_close(&job->session);
}

// What was held back of the text comes out also before an error, as far as memory allows.
static void end_with_error(eng_job *job, eng_status code, const char *text) {
    (void)eng_fail(&job->error, code, "%s", text);
    if (job->text && code != ENG_NO_MEMORY) {
        eng_status flushed = eng_text_finish(job->text);
        (void)flushed; // the first failure is the one to tell
    }
    end(job, ENG_FINISH_ERROR);
}

void eng_job_cancel(eng_job *job) {
    end(job, ENG_FINISH_NONE);
}

static void add_compute(eng_compute *sum, const eng_compute *part) {
    sum->solves += part->solves;
    sum->steps += part->steps;
    sum->unconverged += part->unconverged;
    if (part->steps_max > sum->steps_max)
        sum->steps_max = part->steps_max;
}

static bool keep_drawn(eng_job *job, const eng_piece_result *result) {
    eng_token *token = eng_token_list_add(&job->drawn);
    if (!token)
        return false;
    *token = (eng_token){.id = result->id, .logprob = job->logprobs < 0 ? NAN : result->logprob};
    return true;
}

static bool ends_text(const eng_config *config, int32_t id) {
    for (int32_t i = 0; i < config->eos_count; i++)
        if (config->eos_id[i] == id)
            return true;
    return false;
}

// A special token, every end-of-text id included, has no bytes in the output; it is pushed all the same, to be counted.
static eng_status push_text(const eng_job_rules *rules, eng_job *job, int32_t id, bool silent, bool *stopped) {
    size_t length = 0;
    const char *bytes = "";
    if (!job->text)
        return ENG_OK;
    if (!silent && !eng_tokenizer_is_special(rules->tokenizer, id))
        bytes = eng_tokenizer_bytes(rules->tokenizer, id, &length);
    return eng_text_push(job->text, bytes, length, stopped);
}

static void accept_id(const eng_job_rules *rules, eng_job *job, const eng_piece_result *result) {
    int32_t id = result->id;
    bool stopped = false, last = ends_text(&rules->model->config, id);
    job->usage.completion_tokens++;
    eng_status status = keep_drawn(job, result) ? push_text(rules, job, id, last, &stopped) : ENG_NO_MEMORY;
    eng_finish finish = ENG_FINISH_NONE;
    if (last || stopped)
        finish = ENG_FINISH_STOP;
    else if (job->usage.completion_tokens == job->max_tokens)
        finish = ENG_FINISH_LENGTH;
    if (status == ENG_OK && finish != ENG_FINISH_NONE && job->text && !stopped)
        status = eng_text_finish(job->text);
    if (status != ENG_OK) {
        end_with_error(job, status, "out of memory for the text of a request");
    } else if (finish != ENG_FINISH_NONE) {
        end(job, finish);
    } else {
        job->session.tail[0] = id;
        job->session.tail_count = 1;
    }
}

void eng_job_accept(const eng_job_rules *rules, eng_job *job, const eng_piece_result *result) {
    bool reading = job->phase == ENG_PHASE_READING;
    add_compute(reading ? &job->usage.prompt : &job->usage.completion, &result->compute);
    if (!result->finite) {
        end_with_error(job, ENG_NUMERIC, "the logits are not finite");
        return;
    }
    if (job->fail_unconverged && result->compute.unconverged > 0) {
        end_with_error(job, ENG_UNCONVERGED, "a solve hit its bound of steps before its tolerance");
        return;
    }
    if (reading && job->session.read < job->prompt_count)
        return;
    job->phase = ENG_PHASE_GENERATING;
    free(job->prompt);
    job->prompt = NULL;
    if (job->max_tokens == 0)
        end(job, ENG_FINISH_LENGTH);
    else
        accept_id(rules, job, result);
}

// ------------------------------------------------------------------------------------------------------------- events

bool eng_job_event(eng_job *job, eng_event *out) {
    bool final = job->finish != ENG_FINISH_NONE;
    *out = (eng_event){.id = job->id,
                       .user = job->user,
                       .tokens = eng_token_list_view(&job->drawn),
                       .token_count = job->drawn.count,
                       .text = "",
                       .finish = job->finish,
                       .usage = &job->usage};
    if (job->text) {
        if (!final)
            out->token_count = eng_text_settled(job->text) - job->told;
        eng_text_take(job->text, &out->text, &out->text_length);
    }
    if (job->finish == ENG_FINISH_ERROR) {
        out->status = job->error.code;
        out->message = job->error.text;
    }
    return final || out->token_count > 0 || out->text_length > 0;
}

void eng_job_told(eng_job *job, const eng_event *event) {
    job->told += event->token_count;
    eng_token_list_drop(&job->drawn, event->token_count);
}
