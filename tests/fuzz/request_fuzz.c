// SPDX-License-Identifier: Apache-2.0
// Fuzz target of request bodies: any bytes are refused with a whole answer or give a request within every bound.
//
// The first byte chooses the kind of body. The error answer must be JSON again, whatever the body held. Built as the
// other targets here (safetensors_fuzz.c).
#include <jansson.h>
#include <math.h>
#include <stdlib.h>

#include "server/request.h"
#include "server/response.h"
#include "tests/fuzz/fuzz.h"

static const srv_bounds bounds = {.max_tokens = 1000,
                                  .max_prompt_tokens = 1000,
                                  .max_prompts = 16,
                                  .max_values = 100000,
                                  .max_cg_steps = 256,
                                  .max_loops = 256,
                                  .allow_exact = true};

static void check_refused(const srv_problem *problem) {
    srv_buf json;

    require(problem->status == 400 || problem->status == 404);
    srv_buf_init(&json, 65536);
    srv_write_error(&json, problem);
    require(srv_buf_ok(&json));
    json_t *root = json_loadb(json.data, json.length, JSON_REJECT_DUPLICATES, NULL);
    require(root != NULL);
    json_decref(root);
    srv_buf_free(&json);
}

static void check_accepted(const srv_request *request) {
    require(request->prompt_count >= 1 && request->prompt_count <= 16);
    for (size_t i = 0; i < request->prompt_count; i++) {
        const srv_prompt *prompt = &request->prompts[i];
        require((prompt->text != NULL) != (prompt->ids != NULL));
        require(!prompt->text || prompt->text[prompt->length] == '\0');
        require(!prompt->ids || (prompt->count >= 1 && prompt->count <= 1000));
        for (size_t k = 0; k < prompt->count; k++)
            require(prompt->ids[k] >= 0);
    }
    require((request->max_tokens >= 0 && request->max_tokens <= 1000) ||
            (request->messages && request->max_tokens == -1));
    require((request->messages != NULL) == (request->message_count > 0) && request->message_count <= SRV_MAX_MESSAGES);
    for (size_t i = 0; i < request->message_count; i++)
        require(request->messages[i].role && request->messages[i].content);
    require(request->n >= 1 && request->n <= 128);
    require(request->best_of >= request->n && request->best_of <= 128);
    require(request->logprobs >= -1 && request->logprobs <= ENG_MAX_TOP);
    require(request->min_tokens >= 0 && (request->max_tokens < 0 || request->min_tokens <= request->max_tokens));
    require(request->stop_id_count <= ENG_MAX_STOP_IDS);
    for (size_t i = 0; i < request->stop_id_count; i++)
        require(request->stop_ids[i] >= 0);
    for (size_t i = 0; i < request->bias_count; i++)
        require(request->biases[i].id >= 0 && request->biases[i].bias >= -100 && request->biases[i].bias <= 100);
    require(request->presence_penalty >= -2 && request->presence_penalty <= 2);
    require(request->frequency_penalty >= -2 && request->frequency_penalty <= 2);
    require(request->repetition_penalty > 0 && request->repetition_penalty <= 10);
    require(request->temperature >= 0 && request->temperature <= 100);
    require(request->top_p >= 0 && request->top_p <= 1);
    require(request->min_p >= 0 && request->min_p <= 1);
    require(request->top_k >= -1);
    require(request->stop_count <= SRV_MAX_STOPS);
    require(!(request->knobs.given & SRV_GIVEN_CG_TOLERANCE) ||
            (request->knobs.cg_tolerance >= 0 && request->knobs.cg_tolerance <= 1));
    require(request->knobs.cg_max_steps >= 0 && request->knobs.cg_max_steps <= 256);
    require(!(request->knobs.given & SRV_GIVEN_EXIT_THRESHOLD) ||
            (request->knobs.exit_threshold >= 0 && request->knobs.exit_threshold <= 1));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    const char *body = (const char *)data + 1;
    srv_problem problem = {0};

    if (size == 0)
        return 0;
    if (data[0] % 4 >= 2) {
        srv_token_request request;
        const eng_status status = srv_token_request_parse(data[0] % 2 ? SRV_REQUEST_TOKENIZE : SRV_REQUEST_DETOKENIZE,
                                                          body, size - 1, &bounds, &request, &problem);
        if (status)
            check_refused(&problem);
        srv_token_request_free(&request);
        return 0;
    }
    srv_request request;
    if ((data[0] % 4 ? srv_chat_parse : srv_request_parse)(body, size - 1, &bounds, &request, &problem))
        check_refused(&problem);
    else
        check_accepted(&request);
    srv_request_free(&request);
    return 0;
}
