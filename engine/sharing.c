// SPDX-License-Identifier: Apache-2.0
// Who follows whom, and where states are left; see sharing.h.
//
// A pair of a job that waits and a reader is looked at once: when the job comes to wait, or when the reader is
// admitted. A state is copied when the reader is about to read on, in the stream's order, and published once the
// results of what it has read are known, since they tell whether solves converged and hold the logprobs.
#include "engine/sharing.h"

#include <string.h>

#include "engine/scheduler_internal.h"

static int64_t minimum(int64_t a, int64_t b) {
    return a < b ? a : b;
}

static int64_t whole_chunks(const eng_scheduler *scheduler, int64_t ids) {
    return ids > 0 ? ids / scheduler->options.chunk * scheduler->options.chunk : 0;
}

// The last boundary that the job comes to by reading canonically, with an id left to read for the logits.
static int64_t last_shared(const eng_scheduler *scheduler, const eng_job *job) {
    return whole_chunks(scheduler, minimum(eng_job_canonical(job), job->prompt_count - 1));
}

static bool needs_scores(const eng_job *job) {
    return job->prompt_logprobs && eng_job_own_begin(job) == 0;
}

// The last boundary that it may begin from: what is told of its own ids must be told.
static int64_t last_start(const eng_scheduler *scheduler, const eng_job *job) {
    const int64_t last = last_shared(scheduler, job), own = eng_job_own_begin(job);
    return job->prompt_logprobs && own > 0 ? minimum(last, whole_chunks(scheduler, own)) : last;
}

static eng_scoring scoring_of(const eng_scheduler *scheduler, const eng_job *job) {
    const bool loops = eng_model_reads_loops(scheduler->options.rules.model);
    return (eng_scoring){.top = job->read.top_each,
                         .compute = job->token_compute,
                         .exit_threshold = loops ? job->knobs.exit_threshold : 0,
                         .max_loops = loops ? job->knobs.max_loops : 0};
}

static eng_boundary_need need_of(const eng_scheduler *scheduler, const eng_job *job) {
    return (eng_boundary_need){.ids = job->prompt->ids,
                               .converged = job->fail_unconverged,
                               .scored = needs_scores(job),
                               .scoring = scoring_of(scheduler, job)};
}

static int64_t start_of(const eng_job *job) {
    return job->share.start ? job->share.start->read : 0;
}

static void replace_start(eng_job *job, eng_boundary *boundary) {
    eng_boundary_retain(boundary);
    eng_boundary_release(job->share.start);
    job->share.start = boundary;
}

static bool keeps(const eng_scheduler *scheduler) {
    return eng_prefix_keeps(scheduler->options.prefix);
}

// ----------------------------------------------------------------------------------------------------------- following

// How many of the first `most` ids are equal.
static int64_t equal_ids(const int32_t *a, const int32_t *b, int64_t most) {
    enum { BLOCK = 256 };
    int64_t at = 0;
    while (at + BLOCK <= most && memcmp(a + at, b + at, sizeof *a * BLOCK) == 0)
        at += BLOCK;
    while (at < most && a[at] == b[at])
        at++;
    return at;
}

static bool same_key(const eng_job *a, const eng_job *b) {
    return memcmp(a->share.root.digest, b->share.root.digest, sizeof a->share.root.digest) == 0;
}

static bool scores_will_serve(const eng_scheduler *scheduler, const eng_job *job, const eng_job *reader) {
    const eng_scoring scoring = scoring_of(scheduler, job);
    return reader->share.scores && eng_scores_cover(reader->share.scores, &scoring);
}

// How many of both prompts' first ids are equal, `most` at most; 0 if not a chunk behind the first `least`. Prompts
// that part where a state is known already are many, so that chunk is looked at first.
static int64_t shared_ids(const eng_scheduler *scheduler, const eng_job *a, const eng_job *b, int64_t least,
                          int64_t most) {
    const int32_t *const ids = a->prompt->ids, *const others = b->prompt->ids;
    if (ids == others)
        return most;
    return equal_ids(ids + least, others + least, scheduler->options.chunk) < scheduler->options.chunk
               ? 0
               : equal_ids(ids, others, most);
}

// Where the job would begin if it followed the reader; 0: no further on than at the boundary `present`.
static int64_t meeting(const eng_scheduler *scheduler, const eng_job *job, const eng_job *reader, int64_t present) {
    const bool scored = needs_scores(job);
    if (reader->phase != ENG_PHASE_READING || reader->paused || reader == scheduler->audit.job ||
        !same_key(job, reader) || (scored && !scores_will_serve(scheduler, job, reader)))
        return 0;
    const int64_t limit = minimum(last_start(scheduler, job), last_shared(scheduler, reader));
    if (limit <= present || limit < reader->session.read)
        return 0;
    const int64_t equal = shared_ids(scheduler, job, reader, present, limit + 1); // both have as many
    const int64_t place = minimum(whole_chunks(scheduler, scored ? equal - 1 : equal), limit);
    return place > present && place >= reader->session.read ? place : 0;
}

void eng_share_unfollow(eng_job *job) {
    if (job->share.leader)
        job->share.leader->share.followers--;
    job->share.leader = NULL;
}

static void consider(const eng_scheduler *scheduler, eng_job *job, eng_job *reader) {
    const int64_t present = job->share.leader ? job->share.place : start_of(job);
    const int64_t place = meeting(scheduler, job, reader, present);
    if (place == 0)
        return;
    eng_share_unfollow(job);
    job->share.leader = reader;
    job->share.place = place;
    reader->share.followers++;
}

static void seek_leader(const eng_scheduler *scheduler, eng_job *job) {
    if (job->turn.from)
        return;
    for (eng_job *reader = scheduler->running.head; reader; reader = reader->next)
        consider(scheduler, job, reader);
}

static void lead_others(const eng_scheduler *scheduler, eng_job *reader) {
    for (eng_job *job = scheduler->waiting.head; job; job = job->next)
        if (!job->turn.from)
            consider(scheduler, job, reader);
}

static void set_free(const eng_scheduler *scheduler, eng_job *job) {
    eng_share_unfollow(job);
    seek_leader(scheduler, job);
}

static bool follows_to(const eng_job *job, const eng_job *reader, int64_t place) {
    return job->share.leader == reader && job->share.place == place;
}

static void set_free_at(const eng_scheduler *scheduler, const eng_job *reader, int64_t place) {
    for (eng_job *job = scheduler->waiting.head; job; job = job->next)
        if (follows_to(job, reader, place))
            eng_share_unfollow(job);
}

static bool has_followers_at(const eng_scheduler *scheduler, const eng_job *reader, int64_t place) {
    if (reader->share.followers > 0)
        for (const eng_job *job = scheduler->waiting.head; job; job = job->next)
            if (follows_to(job, reader, place))
                return true;
    return false;
}

// --------------------------------------------------------------------------------------------------- begin of a job

static const eng_knobs *knobs_of(const eng_job *job) {
    return job->turn.runs > 0 ? &job->turn.run[0].knobs : &job->knobs;
}

static eng_prefix_user user_of(const eng_job *job) {
    return (eng_prefix_user){.owner = job->owner_name, .knobs = knobs_of(job), .prompt = job->prompt};
}

// Whether there is a state further on than what is here, or will be.
static void ask_store(const eng_scheduler *scheduler, eng_job *job) {
    eng_share *share = &job->share;
    const int64_t limit = last_start(scheduler, job);
    int64_t present = share->leader ? share->place : 0, known;
    if (!job->has_owner_name || job->turn.from || needs_scores(job) ||
        !eng_prefix_store_helps(scheduler->options.prefix_store, present, limit))
        return;
    const eng_boundary_need need = need_of(scheduler, job);
    const eng_prefix_user user = user_of(job);
    eng_chain chain = share->root;
    const eng_boundary *found = eng_prefix_find(scheduler->options.prefix, &need, limit, &chain, &known);
    if (found && found->read > present)
        present = found->read;
    share->lookup = eng_prefix_store_look(scheduler->options.prefix_store, &user, &share->root, &chain, present, limit);
}

eng_status eng_share_enter(eng_scheduler *scheduler, eng_job *job, eng_error *error) {
    const unsigned char *name = job->has_owner_name ? job->owner_name : NULL;
    if (eng_prefix_root(scheduler->options.prefix, job->owner->name, name, knobs_of(job), &job->share.root) != ENG_OK)
        return eng_fail(error, ENG_INTERNAL, "the digest of a prompt could not be computed");
    seek_leader(scheduler, job);
    ask_store(scheduler, job);
    return ENG_OK;
}

void eng_share_choose(eng_scheduler *scheduler, eng_job *job) {
    eng_share *share = &job->share;
    const int64_t limit = last_start(scheduler, job);
    share->chain = share->root;
    share->known = 0;
    eng_lookup_release(share->lookup);
    share->lookup = NULL;
    if (job->turn.from || limit == 0 || !keeps(scheduler))
        return;
    const eng_boundary_need need = need_of(scheduler, job);
    eng_boundary *found = eng_prefix_find(scheduler->options.prefix, &need, limit, &share->chain, &share->known);
    if (found && found->read > start_of(job))
        replace_start(job, found);
}

static void make_scores(const eng_scheduler *scheduler, eng_job *job) {
    const int64_t last = last_shared(scheduler, job);
    if (!needs_scores(job) || last == 0)
        return;
    const eng_scoring scoring = scoring_of(scheduler, job);
    job->share.scores = eng_prefix_scores(scheduler->options.prefix, (size_t)last + 1, &scoring);
}

eng_status eng_share_begin(eng_scheduler *scheduler, eng_job *job, eng_error *error) {
    eng_share *share = &job->share;
    eng_boundary *start = share->start;
    make_scores(scheduler, job);
    if (start && !eng_job_resume(job, start))
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for the logprobs of a prompt");
    share->kept = start_of(job);
    share->spacing = eng_prefix_spacing(scheduler->options.prefix, job->prompt_count);
    if (start) {
        start->used = true;
        scheduler->prefix_hits++;
        if (job->has_owner_name) {
            const eng_prefix_user user = user_of(job);
            eng_prefix_store_note(scheduler->options.prefix_store, &user, &share->chain, start);
        }
        eng_audit_hit(scheduler, job);
    } else {
        scheduler->prefix_misses += !job->turn.from && last_start(scheduler, job) > 0;
    }
    eng_boundary_release(share->start);
    share->start = NULL;
    if (!job->turn.from && last_shared(scheduler, job) > 0)
        lead_others(scheduler, job);
    return ENG_OK;
}

// -------------------------------------------------------------------------------------------------------- on its way

static int64_t nearer(int64_t stop, int64_t place, int64_t read) {
    return place > read ? minimum(stop, place) : stop;
}

int64_t eng_share_stop(const eng_scheduler *scheduler, const eng_job *job) {
    const int64_t read = job->session.read, last = last_shared(scheduler, job);
    int64_t stop = INT64_MAX;
    if (job == scheduler->audit.job)
        return scheduler->audit.boundary->read;
    if (job->share.followers > 0)
        for (const eng_job *other = scheduler->waiting.head; other; other = other->next)
            if (other->share.leader == job)
                stop = nearer(stop, other->share.place, read);
    if (read >= last || !keeps(scheduler))
        return stop;
    return nearer(nearer(stop, job->share.known, read), last, read);
}

// States along a way stand where pieces ended anyway.
static bool worth_keeping(const eng_scheduler *scheduler, const eng_job *job) {
    const eng_share *share = &job->share;
    const int64_t read = job->session.read;
    return keeps(scheduler) &&
           (read == share->known || read == last_shared(scheduler, job) || read - share->kept >= share->spacing);
}

static void give_to_followers(const eng_scheduler *scheduler, const eng_job *reader, eng_boundary *boundary) {
    for (eng_job *job = scheduler->waiting.head; job && reader->share.followers > 0; job = job->next) {
        if (!follows_to(job, reader, boundary->read))
            continue;
        const eng_boundary_need need = need_of(scheduler, job);
        if (eng_boundary_serves(boundary, &need))
            replace_start(job, boundary);
        eng_share_unfollow(job);
    }
}

static void publish(const eng_scheduler *scheduler, eng_job *job) {
    eng_share *share = &job->share;
    eng_boundary *boundary = share->left;
    boundary->unconverged = share->unconverged;
    if (share->scores && !boundary->scores) {
        eng_scores_retain(share->scores);
        boundary->scores = share->scores;
    }
    give_to_followers(scheduler, job, boundary);
    eng_prefix_add(scheduler->options.prefix, &share->left_chain, boundary);
    eng_boundary_release(boundary);
    share->left = NULL;
}

void eng_share_leave(eng_scheduler *scheduler, eng_job *job) {
    eng_share *share = &job->share;
    const int64_t read = job->session.read;
    if (read == share->passed || read > last_shared(scheduler, job) || job == scheduler->audit.job)
        return;
    share->passed = read;
    eng_prefix_pass(scheduler->options.prefix, &share->chain, job->prompt->ids, read);
    const bool followed = has_followers_at(scheduler, job, read);
    if (!followed && !worth_keeping(scheduler, job))
        return;
    const eng_want want = followed ? ENG_WANT_NEEDED : read == share->known ? ENG_WANT_KEPT : ENG_WANT_CHEAP;
    share->left = eng_prefix_leave(scheduler->options.prefix, &share->chain, &job->session, want);
    share->left_chain = share->chain;
    if (!share->left) {
        set_free_at(scheduler, job, read);
        return;
    }
    if (share->left->snapshot)
        share->kept = read;
    if (job->underway == 0)
        publish(scheduler, job);
}

void eng_share_accepted(eng_scheduler *scheduler, eng_job *job) {
    if (!job->share.left)
        return;
    if (job->phase != ENG_PHASE_ENDED) {
        publish(scheduler, job);
        return;
    }
    eng_boundary_release(job->share.left);
    job->share.left = NULL;
}

// -------------------------------------------------------------------------------------------------------- end of a job

// Between two pieces of a prompt the session stands at a boundary that its followers come by. What is under way is not
// known to have converged.
static void hand_over(const eng_scheduler *scheduler, eng_job *job) {
    const int64_t read = job->session.read;
    if (read == 0 || read > last_shared(scheduler, job) || read % scheduler->options.chunk != 0)
        return;
    const eng_chain nowhere = {.read = -1};
    eng_boundary *boundary = eng_prefix_leave(scheduler->options.prefix, &nowhere, &job->session, ENG_WANT_NEEDED);
    if (!boundary)
        return;
    boundary->unconverged = job->share.unconverged || job->underway > 0;
    if (job->share.scores) {
        eng_scores_retain(job->share.scores);
        boundary->scores = job->share.scores;
    }
    for (eng_job *other = scheduler->waiting.head; other; other = other->next) {
        const eng_boundary_need need = need_of(scheduler, other);
        if (other->share.leader == job && start_of(other) < read && eng_boundary_serves(boundary, &need))
            replace_start(other, boundary);
    }
    eng_boundary_release(boundary);
}

void eng_share_let_go(eng_scheduler *scheduler, eng_job *job, bool handing) {
    if (job->share.followers == 0)
        return;
    if (handing && job->phase == ENG_PHASE_READING)
        hand_over(scheduler, job);
    for (eng_job *other = scheduler->waiting.head; other && job->share.followers > 0; other = other->next)
        if (other->share.leader == job)
            set_free(scheduler, other);
}
