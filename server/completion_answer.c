// SPDX-License-Identifier: Apache-2.0
// The plain answer of a completion: which choices, and their JSON.
//
// With logprobs an answer may be megabytes of formatted numbers, so it is written on the pool: nothing of the
// completion changes any more by then but that its client may leave, and with it its session; what the answer says of
// that is settled before. The exchange is held until the text is back.
#include <math.h>
#include <stdlib.h>

#include "server/completion.h"

static void add_compute(eng_compute *sum, const eng_compute *part) {
    sum->solves += part->solves;
    sum->steps += part->steps;
    sum->unconverged += part->unconverged;
    if (part->steps_max > sum->steps_max)
        sum->steps_max = part->steps_max;
}

srv_session_usage srv_completion_session(const srv_completion *completion) {
    const srv_session *session = completion->session;

    if (!session)
        return (srv_session_usage){0};
    return (srv_session_usage){.id = completion->request.session,
                               .position = session->position,
                               .durable = completion->durable,
                               .profile_changed = session->profile_changed};
}

void srv_completion_usage(const srv_completion *completion, srv_usage *usage) {
    const eng_model_info *info = eng_info(srv_worker_engine(completion->model->worker));
    *usage = (srv_usage){
        .prompt_tokens = completion->prompt_tokens,
        .has_mesa = info->has_mesa,
        .loops = info->has_loops ? info->loops : 0,
        .ignored = completion->ignored,
        .degraded = completion->degraded,
        .session = srv_completion_session(completion),
    };
    for (size_t i = 0; i < completion->choice_count; i++) {
        const eng_usage *part = &completion->choices[i].usage;
        usage->completion_tokens += part->completion_tokens;
        if (i % (size_t)completion->request.best_of == 0) // a prompt counts once, however many choices it has
            usage->cached_tokens += part->cached_tokens;
        add_compute(&usage->prompt, &part->prompt);
        add_compute(&usage->completion, &part->completion);
        for (int32_t loop = 0; loop < usage->loops; loop++)
            usage->exits[loop] += part->exits[loop];
    }
}

bool srv_completion_tells_prompts(const srv_completion *completion) {
    return completion->request.echo && completion->request.logprobs >= 0;
}

srv_choice *srv_completion_first(const srv_choice *choice) {
    const size_t best_of = (size_t)choice->completion->request.best_of;
    return &choice->completion->choices[choice->index / best_of * best_of];
}

srv_choice_piece srv_completion_piece(srv_choice *choice, const srv_event *event) {
    const srv_completion *completion = choice->completion;
    const srv_prompt_ids *prompt = &completion->prompts[choice->index / (size_t)completion->request.best_of];

    return (srv_choice_piece){
        .index = choice->index,
        .place = &choice->place,
        .echo = prompt->echo,
        .echo_length = prompt->echo_length,
        .prompt_ids = prompt->ids,
        .prompt_id_count = prompt->count,
        .added_bos = prompt->added_bos,
        .text = event->text,
        .length = event->text_length,
        .finish = event->finish,
        .prompt = &event->prompt,
        .drawn = &event->drawn,
    };
}

// ---- the best ------------------------------------------------------------------------------------------------------

static double mean_logprob(const srv_choice *choice) {
    const srv_token_list *drawn = &choice->last->drawn;
    double sum = 0;

    for (size_t i = 0; i < drawn->count; i++)
        sum += isfinite(drawn->tokens[i].logprob) ? (double)drawn->tokens[i].logprob : -9999;
    return drawn->count ? sum / (double)drawn->count : 0;
}

// Marks the wanted choices of one prompt, the best first; of equals the earlier.
static void pick_best(srv_choice *choices, size_t count, size_t wanted, srv_choice **picked) {
    for (size_t k = 0; k < wanted; k++) {
        srv_choice *best = NULL;
        for (size_t i = 0; i < count; i++) {
            bool taken = false;
            for (size_t earlier = 0; earlier < k; earlier++)
                taken = taken || picked[earlier] == &choices[i];
            if (!taken && (!best || mean_logprob(&choices[i]) > mean_logprob(best)))
                best = &choices[i];
        }
        picked[k] = best;
    }
}

// ---- writing -------------------------------------------------------------------------------------------------------

static void write_choices(srv_completion *completion, srv_buf *out) {
    const size_t n = (size_t)completion->request.n, best_of = (size_t)completion->request.best_of;
    srv_choice *picked[SRV_MAX_N];

    for (size_t prompt = 0; prompt < completion->request.prompt_count; prompt++) {
        srv_choice *choices = &completion->choices[prompt * best_of];
        for (size_t k = 0; k < n; k++)
            picked[k] = &choices[k];
        if (best_of > n)
            pick_best(choices, best_of, n, picked);
        for (size_t k = 0; k < n; k++) {
            srv_choice_piece piece = srv_completion_piece(picked[k], picked[k]->last);
            piece.index = prompt * n + k;
            piece.prompt = &choices[0].last->prompt;
            if (piece.index)
                srv_buf_puts(out, ",");
            srv_write_choice(out, &completion->form, &piece);
        }
    }
}

static void write_answer(void *context) {
    srv_completion *completion = context;

    srv_write_opening(&completion->answer, &completion->head);
    write_choices(completion, &completion->answer);
    srv_write_closing(&completion->answer, &completion->usage);
}

static void answered(void *context) {
    srv_completion *completion = context;
    srv_exchange *exchange = completion->exchange;
    srv_http *http = exchange->server->http;

    if (srv_exchange_open(exchange))
        srv_exchange_reply(exchange, 200, &completion->answer);
    srv_exchange_release(exchange);
    srv_http_flush(http);
}

void srv_completion_answer(srv_completion *completion) {
    srv_exchange *exchange = completion->exchange;
    const bool tokens = completion->logprobs >= 0 || completion->form.token_ids || completion->form.compute;

    completion->ended = true;
    srv_completion_note(completion);
    if (srv_completion_makes(completion)) {
        srv_session_present(completion);
        return;
    }
    srv_completion_usage(completion, &completion->usage);
    srv_exchange_hold(exchange);
    if (tokens && srv_loop_offload(exchange->server->loop, write_answer, answered, completion) == ENG_OK)
        return;
    write_answer(completion);
    answered(completion);
}
