// SPDX-License-Identifier: Apache-2.0
// The life of a request inside the engine: what it reads, what becomes of the results, what may be told.
//
// End-of-text ids are looked for before an id becomes the tail, so the state never reads one. They count as completion
// tokens and stand among those told, as in vLLM; their text, like that of every special token, is not part of the
// output. Where the next step is started before an id is known the state may have read one, and one more was drawn:
// both die with the session. A job that ends closes its session at once: by the time its last event is told the slot is
// free.
#include "engine/request.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/prefix_store.h"

// ----------------------------------------------------------------------------------------------------- create, free

eng_prompt *eng_prompt_create(const int32_t *ids, size_t count) {
    eng_prompt *prompt = malloc(sizeof *prompt + sizeof *ids * count);
    if (!prompt)
        return NULL;
    prompt->references = 1;
    prompt->count = (int64_t)count;
    if (count > 0)
        memcpy(prompt->ids, ids, sizeof *ids * count);
    return prompt;
}

void eng_prompt_release(eng_prompt *prompt) {
    if (prompt && --prompt->references == 0)
        free(prompt);
}

// Ids that end the text. Those of the model are banned for good instead with ignore_eos.
static bool copy_ending(const eng_config *config, const eng_request *request, eng_job *job) {
    int32_t eos_count = request->ignore_eos ? 0 : config->eos_count;
    job->ending_count = eos_count + (int32_t)request->stop_id_count;
    if (job->ending_count == 0)
        return true;
    job->ending = malloc(sizeof *job->ending * (size_t)job->ending_count);
    if (!job->ending)
        return false;
    for (int32_t i = 0; i < eos_count; i++)
        job->ending[i] = config->eos_id[i];
    for (size_t i = 0; i < request->stop_id_count; i++)
        job->ending[eos_count + (int32_t)i] = request->stop_ids[i];
    return true;
}

static eng_status copy_lists(const eng_job_rules *rules, const eng_request *request, eng_job *job) {
    const eng_config *config = &rules->model->config;
    if (!copy_ending(config, request, job))
        return ENG_NO_MEMORY;
    const eng_edit_bans bans = {.ending = job->ending,
                                .ending_count = request->min_tokens > 0 ? job->ending_count : 0,
                                .banned = config->eos_id,
                                .banned_count = request->ignore_eos ? config->eos_count : 0};
    return eng_edits_create(request, &bans, config->vocab_size, &job->edits);
}

static void copy_values(const eng_request *request, int32_t choice, eng_job *job) {
    job->user = request->user;
    job->prompt_count = (int64_t)request->count;
    job->max_tokens = request->max_tokens;
    job->min_tokens = request->min_tokens;
    job->choice = choice;
    job->sampling = request->sampling;
    job->sampling.choice += (uint32_t)choice;
    job->knobs = request->knobs;
    job->logprobs = request->logprobs;
    job->prompt_logprobs = request->prompt_logprobs && choice == 0;
    job->token_compute = request->token_compute;
    job->include_stop = request->include_stop;
    job->fail_unconverged = request->fail_unconverged;
    job->priority = request->priority;
    job->has_owner_name = request->owner_name != NULL;
    if (job->has_owner_name)
        memcpy(job->owner_name, request->owner_name, sizeof job->owner_name);
    job->read.top_each = job->drawn.top_each = request->logprobs > 0 ? request->logprobs : 0;
    job->usage.prompt_tokens = job->prompt_count;
    job->position = -1;
}

void eng_job_take_turn(eng_job *job, eng_turn *turn) {
    job->turn = *turn;
    *turn = (eng_turn){0};
    job->prompt_begin = job->turn.start;
    job->prompt_count = job->turn.start + job->prompt->count;
    job->position = job->turn.timeline->position;
}

eng_status eng_job_create(const eng_job_rules *rules, const eng_request *request, eng_prompt *prompt, uint64_t id,
                          int32_t choice, eng_job **out, eng_error *error) {
    eng_job *job = calloc(1, sizeof *job);
    if (!job)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for a request");
    job->id = id;
    job->prompt = prompt;
    prompt->references++;
    copy_values(request, choice, job);
    eng_status status = copy_lists(rules, request, job);
    if (status != ENG_OK)
        status = eng_fail(error, status, "out of memory for a request of %zu ids", request->count);
    if (status == ENG_OK && rules->tokenizer)
        status = eng_text_create(request->stops, request->stop_count, request->include_stop, &job->text, error);
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
    eng_turn_end(&job->turn, job->position, &job->session);
    eng_boundary_release(job->share.start);
    eng_boundary_release(job->share.left);
    eng_scores_release(job->share.scores);
    eng_lookup_release(job->share.lookup);
    eng_text_free(job->text);
    eng_edits_free(&job->edits);
    eng_prompt_release(job->prompt);
    free(job->ending);
    eng_token_list_free(&job->read);
    eng_token_list_free(&job->drawn);
    free(job);
}

int64_t eng_request_length(int64_t prompt_count, int64_t max_tokens) {
    int64_t read_again = max_tokens > 0 ? max_tokens - 1 : 0; // the last id drawn is never read
    return read_again > INT64_MAX - prompt_count ? INT64_MAX : prompt_count + read_again;
}

// On a timeline the prompt's end may be only what is read, behind which the timeline's own tail still stands.
int64_t eng_job_length(const eng_job *job) {
    return eng_request_length(job->prompt_count, job->max_tokens);
}

// -------------------------------------------------------------------------------------------------------------- steps

// The timeline ends behind `kept` of the drawn ids; with none, of a request that did not do what it was asked for,
// where it was.
static void end(eng_job *job, eng_finish finish, int64_t kept) {
    job->phase = ENG_PHASE_ENDED;
    job->finish = finish;
    const bool whole = finish == ENG_FINISH_STOP || finish == ENG_FINISH_LENGTH;
    if (job->turn.timeline && !job->turn.returns && (whole || kept > 0))
        job->position = job->turn.prompt_end + kept;
    if (job->turn.timeline)
        job->past = (eng_turn_past){.timeline = job->turn.timeline,
                                    .began = job->turn.timeline->position,
                                    .prompt_end = job->turn.prompt_end,
                                    .returns = job->turn.returns};
    eng_turn_end(&job->turn, job->position, &job->session);
}

// Of the drawn ids, those whose text has come out whole.
static int64_t whole_ids(const eng_job *job, bool last) {
    const int64_t drawn = job->usage.completion_tokens - (last && !job->include_stop);
    const int64_t whole = job->text ? (int64_t)eng_text_whole(job->text) : drawn;
    return whole < drawn ? whole : drawn;
}

// What was held back of the text comes out also before an error, as far as memory allows.
static void end_with_error(eng_job *job, eng_status code, const char *text) {
    (void)eng_fail(&job->error, code, "%s", text);
    if (job->text && code != ENG_NO_MEMORY) {
        eng_status flushed = eng_text_finish(job->text);
        (void)flushed; // the first failure is the one to tell
    }
    if (code == ENG_NUMERIC || code == ENG_UNCONVERGED)
        eng_session_close(&job->session); // no state to go on from
    end(job, ENG_FINISH_ERROR, code == ENG_NUMERIC ? 0 : whole_ids(job, false));
}

void eng_job_fail(eng_job *job, eng_status status, const char *text) {
    if (job->phase != ENG_PHASE_ENDED) {
        end_with_error(job, status, text);
        return;
    }
    job->finish = ENG_FINISH_ERROR;
    job->position = -1;
    (void)eng_fail(&job->error, status, "%s", text);
}

void eng_job_cancel(eng_job *job) {
    end(job, ENG_FINISH_NONE, (int64_t)job->told);
}

static void add_compute(eng_compute *sum, const eng_compute *part) {
    sum->solves += part->solves;
    sum->steps += part->steps;
    sum->unconverged += part->unconverged;
    if (part->steps_max > sum->steps_max)
        sum->steps_max = part->steps_max;
}

// The token after number `token` of the piece, with what was predicted of it.
static bool keep(const eng_job *job, eng_token_list *list, const eng_batch *batch, int32_t index, int32_t token) {
    eng_prediction prediction;
    eng_token *kept = eng_token_list_add(list);
    if (!kept)
        return false;
    eng_batch_prediction(batch, index, token, &prediction);
    *kept = (eng_token){.id = prediction.id, .logprob = NAN, .loop = prediction.loop};
    if (job->token_compute)
        eng_batch_compute(batch, index, token, &kept->compute);
    if (job->logprobs < 0)
        return true;
    kept->logprob = prediction.logprob;
    kept->top_count = prediction.top;
    eng_alternative *top = eng_token_list_top(list);
    for (int32_t i = 0; i < prediction.top; i++)
        top[i] = (eng_alternative){prediction.top_id[i], prediction.top_logprob[i]};
    return true;
}

int64_t eng_job_own_begin(const eng_job *job) {
    return job->prompt_count - job->usage.prompt_tokens;
}

int64_t eng_job_canonical(const eng_job *job) {
    const eng_turn *turn = &job->turn;
    if (!turn->timeline)
        return job->prompt_count;
    return turn->start == 0 && turn->runs > 0 && turn->run[0].kind == KERN_ROW_PROMPT ? turn->run[0].end : 0;
}

// The token that was read last, for those who begin behind it.
static void note_score(eng_job *job) {
    if (job->share.scores)
        eng_scores_add(job->share.scores, &job->read);
}

static bool tell_again(eng_job *job, const eng_scores *scores, size_t count) {
    for (size_t i = 0; i < count; i++) {
        if (!eng_token_list_copy(&job->read, &scores->list, i))
            return false;
        if (!job->token_compute)
            job->read.token[job->read.count - 1].compute = (eng_compute){0};
        note_score(job);
    }
    return true;
}

bool eng_job_resume(eng_job *job, const eng_boundary *boundary) {
    const int64_t own = eng_job_own_begin(job), cached = boundary->read - own;
    job->usage.cached_tokens = cached > 0 ? cached : 0;
    job->share.unconverged = boundary->unconverged;
    return !job->prompt_logprobs || own > 0 || tell_again(job, boundary->scores, (size_t)boundary->read + 1);
}

// The prompt's tokens whose predictions came with the piece of `count` ids from `first` on: those behind its first. The
// prompt's own first has none.
static bool keep_read(eng_job *job, const eng_batch *batch, int32_t index, int64_t first, int32_t count) {
    if (first == eng_job_own_begin(job)) {
        eng_token *kept = eng_token_list_add(&job->read);
        if (!kept)
            return false;
        *kept = (eng_token){.id = job->prompt->ids[first - job->prompt_begin], .logprob = NAN};
        note_score(job);
    }
    for (int32_t token = 0; token < count && first + token + 1 < job->prompt_count; token++) {
        if (!keep(job, &job->read, batch, index, token))
            return false;
        note_score(job);
    }
    return true;
}

static bool ends_text(const eng_job *job, int32_t id) {
    for (int32_t i = 0; i < job->ending_count; i++)
        if (job->ending[i] == id)
            return true;
    return false;
}

// A special token has no bytes in the output, nor has an id that ends the text unless they were asked for; it is pushed
// all the same, to be counted.
static eng_status push_text(const eng_job_rules *rules, eng_job *job, int32_t id, bool silent, bool *stopped) {
    size_t length = 0;
    const char *bytes = "";
    if (!job->text)
        return ENG_OK;
    if (!silent && !eng_tokenizer_is_special(rules->tokenizer, id))
        bytes = eng_tokenizer_bytes(rules->tokenizer, id, &length);
    return eng_text_push(job->text, bytes, length, stopped);
}

// Everything that a drawn id changes but the session.
static eng_status take_id(const eng_job_rules *rules, eng_job *job, int32_t id, bool last, bool *stopped) {
    job->usage.completion_tokens++;
    if (job->turn.timeline && eng_turn_say(&job->turn, id) != ENG_OK)
        return ENG_NO_MEMORY;
    eng_status status = push_text(rules, job, id, last && !job->include_stop, stopped);
    if (status == ENG_OK)
        status = eng_edits_drawn(&job->edits, id);
    if (job->usage.completion_tokens == job->min_tokens)
        eng_edits_allow(&job->edits, job->ending, job->ending_count);
    return status;
}

static void accept_id(const eng_job_rules *rules, eng_job *job, int32_t id) {
    bool stopped = false, last = ends_text(job, id);
    eng_status status = take_id(rules, job, id, last, &stopped);
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
        end(job, finish, whole_ids(job, last));
    } else {
        job->session.tail[0] = id;
        job->session.tail_count = job->underway == 0; // otherwise it is being read
    }
}

bool eng_job_generates(const eng_job *job) {
    return job->phase == ENG_PHASE_GENERATING ||
           (job->phase == ENG_PHASE_READING && job->session.read == job->prompt_count);
}

// What runs ahead may leave a state that has read too much, which a timeline would pay for with reading it again.
bool eng_job_follows(const eng_job *job) {
    return job->turn.timeline || eng_edits_follow(&job->edits);
}

bool eng_job_runs_ahead(const eng_job *job) {
    int64_t drawn = job->usage.completion_tokens + 1; // with the one under way
    if (job->underway == 0 || !eng_job_generates(job))
        return true;
    return drawn < job->max_tokens && drawn != job->min_tokens && !eng_job_follows(job);
}

void eng_job_started(eng_job *job, int32_t index) {
    job->underway++;
    job->index = index;
}

static const int32_t *next_ids(const eng_job *job) {
    if (!eng_job_generates(job))
        return job->prompt->ids + (job->session.read - job->prompt_begin);
    return job->underway ? NULL : job->session.tail;
}

// A timeline's state has read all that there is.
static bool resumes(const eng_job *job) {
    return job->phase == ENG_PHASE_READING && job->prompt->count == 0;
}

const eng_run *eng_job_run(const eng_job *job) {
    for (int32_t i = 0; i < job->turn.runs; i++)
        if (job->turn.run[i].end > job->session.read)
            return &job->turn.run[i];
    return NULL;
}

// Each id is read with the knobs that it came with; at which loop the output is read is for who draws from it.
static eng_knobs knobs_of(const eng_job *job, const eng_run *run, bool draws) {
    eng_knobs knobs = run ? run->knobs : job->knobs;
    if (draws) {
        knobs.exit_threshold = job->knobs.exit_threshold;
        knobs.max_loops = job->knobs.max_loops;
    }
    return knobs;
}

eng_piece eng_job_piece(eng_job *job, int32_t count) {
    bool reading = !eng_job_generates(job);
    const eng_run *run = reading ? eng_job_run(job) : NULL;
    bool draws = !reading || job->session.read + count == job->prompt_count;
    return (eng_piece){.session = &job->session,
                       .kind = run       ? run->kind
                               : reading ? KERN_ROW_PROMPT
                                         : KERN_ROW_GENERATED,
                       .ids = resumes(job) ? NULL : next_ids(job),
                       .after = job->index,
                       .count = resumes(job) ? 0 : count,
                       .knobs = knobs_of(job, run, draws),
                       .logits = draws,
                       .sampling = &job->sampling,
                       .edit = job->edits.edit,
                       .edits = draws ? job->edits.count : 0,
                       .top = job->drawn.top_each,
                       .whole = job->token_compute || job->fail_unconverged,
                       .scored = reading && job->prompt_logprobs && job->session.read >= eng_job_own_begin(job)};
}

void eng_job_accept(const eng_job_rules *rules, eng_job *job, const eng_batch *batch, int32_t index) {
    bool reading = job->phase == ENG_PHASE_READING;
    eng_piece_result result;
    job->underway--;
    if (job->phase == ENG_PHASE_ENDED)
        return;
    eng_batch_result(batch, index, &result);
    job->share.unconverged = job->share.unconverged || (reading && result.compute.unconverged > 0);
    bool again = job->turn.timeline && result.position < job->turn.fresh; // read before, with the same results
    if (!again)
        add_compute(reading ? &job->usage.prompt : &job->usage.completion, &result.compute);
    if (!result.finite) {
        end_with_error(job, ENG_NUMERIC, "the logits are not finite");
        return;
    }
    if (!again && job->fail_unconverged && result.compute.unconverged > 0) {
        end_with_error(job, ENG_UNCONVERGED, "a solve hit its bound of steps before its tolerance");
        return;
    }
    bool whole = !reading || result.position + result.count == job->prompt_count, draws = whole && job->max_tokens > 0;
    bool scored = reading && job->prompt_logprobs && result.count > 0 && result.position >= eng_job_own_begin(job);
    if ((scored && !keep_read(job, batch, index, result.position, result.count)) ||
        (draws && !keep(job, &job->drawn, batch, index, result.count - 1))) {
        end_with_error(job, ENG_NO_MEMORY, "out of memory for the tokens of a request");
        return;
    }
    if (!whole)
        return;
    job->phase = ENG_PHASE_GENERATING;
    eng_prompt_release(job->prompt);
    job->prompt = NULL;
    if (draws && result.loop > 0)
        job->usage.exits[result.loop - 1]++;
    if (draws)
        accept_id(rules, job, result.id);
    else
        end(job, ENG_FINISH_LENGTH, 0);
}

// ------------------------------------------------------------------------------------------------------------- events

bool eng_job_event(eng_job *job, eng_event *out) {
    bool final = job->finish != ENG_FINISH_NONE;
    *out = (eng_event){.id = job->id,
                       .choice = job->choice,
                       .user = job->user,
                       .prompt = eng_token_list_view(&job->read),
                       .prompt_count = job->read.count,
                       .tokens = eng_token_list_view(&job->drawn),
                       .token_count = job->drawn.count,
                       .text = "",
                       .finish = job->finish,
                       .usage = &job->usage,
                       .position = job->position,
                       .durable = job->durable};
    if (job->text) {
        if (!final)
            out->token_count = eng_text_settled(job->text) - job->told;
        eng_text_take(job->text, &out->text, &out->text_length);
    }
    if (!final && job->turn.timeline && !job->turn.returns && job->told + out->token_count > 0)
        out->position = job->turn.prompt_end + (int64_t)(job->told + out->token_count);
    if (job->finish == ENG_FINISH_ERROR) {
        out->status = job->error.code;
        out->message = job->error.text;
    }
    return final || out->prompt_count > 0 || out->token_count > 0 || out->text_length > 0;
}

void eng_job_told(eng_job *job, const eng_event *event) {
    job->told += event->token_count;
    eng_token_list_drop(&job->read, event->prompt_count);
    eng_token_list_drop(&job->drawn, event->token_count);
}
