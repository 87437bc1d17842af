// SPDX-License-Identifier: Apache-2.0
// Who finds room in a worker's queue, and what a request is told that finds none.
//
// A choice takes a place until it ends, a prompt its tokens until its first choice starts. One owner may take all rows,
// but of what may wait beyond them only its share, so that the others find room however much it sends.
//
// A refused request is told when its turn would come: after the places (or tokens) that must become free at the rate at
// which they have of late, and after those who were refused before it, who come back too. That spreads them over the
// time in which they can be served. Once nobody waits, nothing is owed to anyone. Everything here is under the lock.
#include <math.h>
#include <stdlib.h>

#include "server/worker_private.h"

// ---- counts --------------------------------------------------------------------------------------------------------

void srv_queue_start(srv_worker *worker, srv_job *job, size_t waiting) {
    const size_t started = job->waiting - waiting;

    worker->waiting -= started;
    worker->waiting_tokens -= job->waiting_tokens;
    worker->pace.new_tokens += (double)job->waiting_tokens;
    if (job->holder)
        job->holder->waiting_tokens -= job->waiting_tokens;
    job->waiting = waiting;
    job->waiting_tokens = 0;
}

static void forget_holder(srv_worker *worker, srv_holder *holder) {
    srv_holder **place = &worker->holders;

    while (*place != holder)
        place = &(*place)->next;
    *place = holder->next;
    free(holder);
}

void srv_queue_free(srv_worker *worker, srv_job *job, size_t places) {
    if (places == 0)
        return;
    worker->places -= places;
    worker->pace.new_places += (double)places;
    job->places -= places;
    job->holder->places -= places;
    if (job->holder->places == 0)
        forget_holder(worker, job->holder);
    if (job->places == 0)
        job->holder = NULL;
}

static srv_holder *find_holder(const srv_worker *worker, uint64_t owner) {
    srv_holder *holder = worker->holders;

    while (holder && holder->owner != owner)
        holder = holder->next;
    return holder;
}

// ---- pace ----------------------------------------------------------------------------------------------------------

void srv_queue_pace(srv_worker *worker, double seconds) {
    enum { MEMORY_S = 30 };
    srv_pace *pace = &worker->pace;
    const double kept = exp(-seconds / MEMORY_S);

    pace->seconds = pace->seconds * kept + seconds;
    pace->places = pace->places * kept + pace->new_places;
    pace->tokens = pace->tokens * kept + pace->new_tokens;
    pace->new_places = pace->new_tokens = 0;
}

// Seconds until this many places are free. Before any has become free the running choices tell: the first of them may
// end when it has made all its tokens, and as many as there are rows may end in that time.
static double seconds_of_places(const srv_worker *worker, double places) {
    const srv_pace *pace = &worker->pace;
    const double soonest =
        (double)srv_counter_read(&worker->soonest_tokens) * (double)srv_counter_read(&worker->step_us) / 1e6;

    if (pace->places >= 1)
        return places * pace->seconds / pace->places;
    return soonest * (1 + (places - 1) / (double)(worker->rows ? worker->rows : 1));
}

static double seconds_of_tokens(const srv_worker *worker, double tokens) {
    const srv_pace *pace = &worker->pace;

    if (pace->tokens >= 1)
        return tokens * pace->seconds / pace->tokens;
    return tokens > 0 && worker->waiting ? seconds_of_places(worker, 1) : 0;
}

// ---- room ----------------------------------------------------------------------------------------------------------

// How far a request is beyond a limit: places and tokens that must become free first. 0: it has room.
typedef struct want {
    double places, tokens;
} want;

static want want_of(uint64_t places, uint64_t max_places, uint64_t waiting, uint64_t tokens, uint64_t max_tokens) {
    // One request with many choices, or a long prompt where nothing waits, may pass the limit: it would never find
    // room.
    return (want){.places = places >= max_places ? (double)(places - max_places + 1) : 0,
                  .tokens = waiting && waiting + tokens > max_tokens ? (double)(waiting + tokens - max_tokens) : 0};
}

static want whole_want(const srv_worker *worker, uint64_t tokens) {
    return want_of(worker->places, worker->rows + worker->options.queue_requests, worker->waiting_tokens, tokens,
                   worker->options.queue_tokens);
}

static want share_want(const srv_worker *worker, const srv_holder *holder, double share, uint64_t tokens) {
    const double places = floor(share * (double)worker->options.queue_requests);

    if (!holder || share >= 1)
        return (want){0};
    return want_of(holder->places, worker->rows + (places < 1 ? 1 : (uint64_t)places), holder->waiting_tokens, tokens,
                   (uint64_t)(share * (double)worker->options.queue_tokens));
}

// An owner's own places become free at its part of the pace.
static double seconds_of(const srv_worker *worker, want want, double part) {
    return fmax(seconds_of_places(worker, want.places), seconds_of_tokens(worker, want.tokens)) / part;
}

static int whole_seconds(double seconds) {
    if (!(seconds < SRV_RETRY_MOST_S))
        return SRV_RETRY_MOST_S;
    return seconds <= 1 ? 1 : (int)ceil(seconds);
}

// When the turn of one who is refused now would come. Promises take nine tenths of the pace: others come as well.
static int promise(srv_worker *worker, want want, uint64_t places, uint64_t tokens) {
    const double now = (double)srv_clock_us() / 1e6;
    const double own =
        want.places > 0 ? seconds_of_places(worker, (double)places) : seconds_of_tokens(worker, (double)tokens);
    const double turn = fmax(now + seconds_of(worker, want, 1), worker->promised + own / 0.9);

    worker->promised = fmin(turn, now + SRV_RETRY_MOST_S);
    return whole_seconds(turn - now);
}

bool srv_queue_has_room(srv_worker *worker, const srv_room *room, srv_no_room *why) {
    const srv_holder *holder = find_holder(worker, room->owner);
    const want whole = whole_want(worker, room->tokens), share = share_want(worker, holder, room->share, room->tokens);

    if (whole.places > 0 || whole.tokens > 0)
        *why = (srv_no_room){.retry_after = promise(worker, whole, room->places, room->tokens)};
    else if (share.places > 0 || share.tokens > 0)
        *why = (srv_no_room){
            .of_share = true,
            .retry_after = whole_seconds(seconds_of(worker, share, (double)holder->places / (double)worker->places))};
    else
        return true;
    return false;
}

eng_status srv_queue_enter(srv_worker *worker, srv_job *job) {
    srv_holder *holder = find_holder(worker, job->request.owner);

    if (!holder) {
        holder = calloc(1, sizeof *holder);
        if (!holder)
            return ENG_NO_MEMORY;
        *holder = (srv_holder){.next = worker->holders, .owner = job->request.owner};
        worker->holders = holder;
    }
    if (worker->waiting == 0)
        worker->promised = 0;
    job->holder = holder;
    job->places = job->waiting = job->choice_count;
    job->waiting_tokens = job->request.count;
    holder->places += job->places;
    holder->waiting_tokens += job->waiting_tokens;
    worker->places += job->places;
    worker->waiting += job->waiting;
    worker->waiting_tokens += job->waiting_tokens;
    return ENG_OK;
}

double srv_queue_load(const srv_worker *worker) {
    const double beyond = worker->places > worker->rows ? (double)(worker->places - worker->rows) : 0;

    return fmax(beyond / (double)worker->options.queue_requests,
                (double)worker->waiting_tokens / (double)worker->options.queue_tokens);
}
