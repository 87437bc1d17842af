// SPDX-License-Identifier: Apache-2.0
// The replies of reply.h.
//
// Alternatives are copied out of events, whose pointers live only so long.
#include "tests/engine/reply.h"

#include <check.h>
#include <string.h>

#include "tests/engine/door.h"

static void keep(told *to, const eng_token *token) {
    to->token.id = token->id;
    to->token.logprob = token->logprob;
    to->token.loop = token->loop;
    to->token.top_count = token->top_count;
    to->token.compute = token->compute;
    for (int32_t i = 0; i < token->top_count; i++)
        to->top[i] = token->top[i];
}

void reply_hear(void *context, const eng_event *event) {
    reply *to = (reply *)event->user + event->choice;
    (void)context;
    ck_assert_int_eq(to->finish, ENG_FINISH_NONE);
    ck_assert(to->drawn_count == 0 || event->prompt_count == 0); // the prompt comes first
    ck_assert(to->prompt_count + event->prompt_count <= REPLY_PROMPT);
    ck_assert(to->drawn_count + event->token_count <= REPLY_DRAWN);
    for (size_t i = 0; i < event->prompt_count; i++)
        keep(&to->prompt[to->prompt_count++], &event->prompt[i]);
    for (size_t i = 0; i < event->token_count; i++)
        keep(&to->drawn[to->drawn_count++], &event->tokens[i]);
    memcpy(to->text + to->text_length, event->text, event->text_length);
    to->text_length += event->text_length;
    to->finish = event->finish;
    to->status = event->status;
    to->usage = *event->usage;
}

uint64_t reply_ask(eng_engine *engine, eng_request request, reply *to) {
    uint64_t id;
    eng_error error = {0};
    memset(to, 0, sizeof *to * (size_t)(request.choices > 1 ? request.choices : 1));
    request.user = to;
    ck_assert_msg(eng_submit(engine, &request, &id, &error) == ENG_OK, "%s", error.text);
    to->id = id;
    return id;
}

bool reply_step(eng_engine *engine) {
    bool worked;
    eng_error error = {0};
    ck_assert_msg(eng_step(engine, reply_hear, NULL, &worked, &error) == ENG_OK, "%s", error.text);
    return worked;
}

void reply_listen(eng_engine *engine) {
    while (reply_step(engine)) {
    }
    ck_assert_uint_eq(gauges_of(engine).running + gauges_of(engine).queued_requests, 0);
}

const reply *reply_to(eng_engine *engine, eng_request request) {
    static reply one;
    reply_ask(engine, request, &one);
    reply_listen(engine);
    ck_assert_int_ne(one.finish, ENG_FINISH_NONE);
    ck_assert_uint_eq(one.drawn_count, (uint64_t)one.usage.completion_tokens);
    return &one;
}

static void same_tokens(const told *got, size_t got_count, const told *want, size_t want_count, const char *what,
                        const char *which) {
    ck_assert_msg(got_count == want_count, "%s: %zu %s tokens, not %zu", what, got_count, which, want_count);
    for (size_t i = 0; i < got_count; i++)
        ck_assert_msg(memcmp(&got[i], &want[i], sizeof *got) == 0, "%s: %s token %zu is %d at %.9g, not %d at %.9g",
                      what, which, i, got[i].token.id, (double)got[i].token.logprob, want[i].token.id,
                      (double)want[i].token.logprob);
}

void reply_same(const reply *got, const reply *want, const char *what) {
    ck_assert_msg(got->finish == want->finish && got->status == want->status, "%s: finish %d, status %d", what,
                  got->finish, got->status);
    same_tokens(got->prompt, got->prompt_count, want->prompt, want->prompt_count, what, "prompt");
    same_tokens(got->drawn, got->drawn_count, want->drawn, want->drawn_count, what, "drawn");
    ck_assert_int_eq(got->usage.prompt_tokens, want->usage.prompt_tokens);
}
