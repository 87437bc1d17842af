// SPDX-License-Identifier: Apache-2.0
// The checks at a request's door: every field against its range and the model, before anything is taken in.
//
// Each message names the field and says what would be right. What depends on the engine's load (a full queue) is the
// scheduler's affair. Nothing is kept, so a refused request leaves no trace.
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

#include "engine/request.h"

static eng_status check_prompt(const eng_job_rules *rules, const eng_request *request, eng_error *error) {
    int32_t vocab = rules->model->config.vocab_size;
    if (request->timeline == 0 && (request->count == 0 || !request->ids))
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

static eng_status check_knobs(const eng_knobs *knobs, int32_t loops, eng_error *error) {
    if (knobs->cg_mode != ENG_CG_TOLERANCE && knobs->cg_mode != ENG_CG_STEPS && knobs->cg_mode != ENG_CG_EXACT)
        return eng_fail(error, ENG_INVALID, "cg_mode %d is not one that a request may ask for", (int)knobs->cg_mode);
    if (!within(knobs->cg_tolerance, 0, 1))
        return eng_fail(error, ENG_INVALID, "cg_tolerance is %g; its range is 0 to 1", (double)knobs->cg_tolerance);
    if (knobs->cg_max_steps < 0 || knobs->cg_max_steps > 256)
        return eng_fail(error, ENG_INVALID, "cg_max_steps is %" PRId32 "; its range is 0 to 256", knobs->cg_max_steps);
    if (!within(knobs->exit_threshold, 0, 1))
        return eng_fail(error, ENG_INVALID, "exit_threshold is %g; its range is 0 to 1", (double)knobs->exit_threshold);
    if (knobs->max_loops < 1 || knobs->max_loops > loops)
        return eng_fail(error, ENG_INVALID, "max_loops is %" PRId32 "; its range is 1 to %" PRId32, knobs->max_loops,
                        loops);
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

static eng_status check_id(const eng_job_rules *rules, int32_t id, const char *field, size_t index, eng_error *error) {
    int32_t vocab = rules->model->config.vocab_size;
    if (id >= 0 && id < vocab)
        return ENG_OK;
    return eng_fail(error, ENG_INVALID, "%s: id %" PRId32 " at index %zu is outside the vocabulary of %" PRId32, field,
                    id, index, vocab);
}

static eng_status check_ending(const eng_job_rules *rules, const eng_request *request, eng_error *error) {
    if (request->stop_id_count > ENG_MAX_STOP_IDS)
        return eng_fail(error, ENG_INVALID, "stop_ids holds %zu ids; the limit is %d", request->stop_id_count,
                        ENG_MAX_STOP_IDS);
    for (size_t i = 0; i < request->stop_id_count; i++) {
        eng_status status = check_id(rules, request->stop_ids[i], "stop_ids", i, error);
        if (status != ENG_OK)
            return status;
    }
    if (request->min_tokens < 0 || request->min_tokens > request->max_tokens)
        return eng_fail(error, ENG_INVALID, "min_tokens is %" PRId64 "; its range is 0 to max_tokens, %" PRId64,
                        request->min_tokens, request->max_tokens);
    return ENG_OK;
}

static eng_status check_biases(const eng_job_rules *rules, const eng_request *request, eng_error *error) {
    int32_t vocab = rules->model->config.vocab_size;
    if (request->bias_count == 0)
        return ENG_OK;
    bool *marked = calloc((size_t)vocab, sizeof *marked);
    if (!marked)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for biases");
    eng_status status = ENG_OK;
    for (size_t i = 0; i < request->bias_count && status == ENG_OK; i++) {
        const eng_logit_bias *bias = &request->biases[i];
        status = check_id(rules, bias->id, "biases", i, error);
        if (status != ENG_OK)
            break;
        if (marked[bias->id])
            status = eng_fail(error, ENG_INVALID, "biases: id %" PRId32 " stands there twice", bias->id);
        else if (isnan(bias->bias) || bias->bias == INFINITY)
            status = eng_fail(error, ENG_INVALID, "biases: the bias of id %" PRId32 " is %g; it is finite or -inf",
                              bias->id, (double)bias->bias);
        marked[bias->id] = true;
    }
    free(marked);
    return status;
}

static eng_status check_penalties(const eng_request *request, eng_error *error) {
    if (!within(request->presence_penalty, -2, 2))
        return eng_fail(error, ENG_INVALID, "presence_penalty is %g; its range is -2 to 2",
                        (double)request->presence_penalty);
    if (!within(request->frequency_penalty, -2, 2))
        return eng_fail(error, ENG_INVALID, "frequency_penalty is %g; its range is -2 to 2",
                        (double)request->frequency_penalty);
    if (request->repetition_penalty != 0 && !within(request->repetition_penalty, 0.01F, 10))
        return eng_fail(error, ENG_INVALID, "repetition_penalty is %g; its range is 0.01 to 10, or 0 (off)",
                        (double)request->repetition_penalty);
    return ENG_OK;
}

static eng_status check_logprobs(const eng_request *request, eng_error *error) {
    if (request->logprobs < -1 || request->logprobs > ENG_MAX_TOP)
        return eng_fail(error, ENG_INVALID, "logprobs is %" PRId32 "; its range is -1 (none) to %d", request->logprobs,
                        ENG_MAX_TOP);
    if (request->prompt_logprobs && request->logprobs < 0)
        return eng_fail(error, ENG_INVALID, "prompt_logprobs needs logprobs of at least 0");
    return ENG_OK;
}

eng_status eng_request_check(const eng_job_rules *rules, const eng_request *request, eng_error *error) {
    eng_status status = check_prompt(rules, request, error);
    if (status == ENG_OK)
        status = check_sampling(&request->sampling, error);
    if (status == ENG_OK)
        status = check_knobs(&request->knobs, rules->model->config.loop.loops, error);
    if (status == ENG_OK)
        status = check_stops(rules, request, error);
    if (status == ENG_OK)
        status = check_ending(rules, request, error);
    if (status == ENG_OK)
        status = check_biases(rules, request, error);
    if (status == ENG_OK)
        status = check_penalties(request, error);
    if (status == ENG_OK)
        status = check_logprobs(request, error);
    if (status == ENG_OK && request->timeline != 0 && request->choices > 1)
        return eng_fail(error, ENG_INVALID, "choices is %" PRId32 "; on a timeline there is one", request->choices);
    if (status == ENG_OK && (request->choices < 0 || request->choices > ENG_MAX_CHOICES))
        return eng_fail(error, ENG_INVALID, "choices is %" PRId32 "; its range is 1 (or 0) to %d", request->choices,
                        ENG_MAX_CHOICES);
    return status;
}
