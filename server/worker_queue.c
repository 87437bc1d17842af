// SPDX-License-Identifier: Apache-2.0
// Who finds room in a worker's queue, and what a request is told that finds none.
//
// A choice takes a place until it ends, a prompt its tokens until its first choice starts. One owner may take all rows,
// but of what may wait beyond them only its share, so that the others find room however much it sends.
//
// A refused request is told when its turn would come: after the places (or tokens) that must become free at the rate at
// which they have of late, at a time that is not promised to others who were refused and come back too. Since the
// answer is in whole seconds, clients come back as bunched as they came; so a calendar in tenths of a second holds the
// work that is promised for each, and the first whole number of seconds is told that leads to one with room. Once
// nobody waits, nothing is owed to anyone. Everything here is under the lock.
#include <math.h>
#include <stdlib.h>
#include <string.h>

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

// Until one of the running choices has made all its tokens.
static double seconds_to_soonest(const srv_worker *worker) {
    return (double)srv_counter_read(&worker->soonest_tokens) * (double)srv_counter_read(&worker->step_us) / 1e6;
}

// How far apart places become free. Before any has, the running choices tell: as many as there are rows may end in the
// time that the first of them takes.
static double seconds_a_place(const srv_worker *worker) {
    const srv_pace *pace = &worker->pace;

    if (pace->places >= 1)
        return pace->seconds / pace->places;
    return seconds_to_soonest(worker) / (double)(worker->rows ? worker->rows : 1);
}

// Seconds until this many places are free.
static double seconds_of_places(const srv_worker *worker, double places) {
    if (worker->pace.places >= 1)
        return places * seconds_a_place(worker);
    return seconds_to_soonest(worker) + (places - 1) * seconds_a_place(worker);
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

// Seconds of work that may be promised for a tenth of a second: nine tenths of it, for others come as well.
static const double tenth_work = 0.09;

static double *promised_for(srv_worker *worker, uint64_t tenth) {
    return &worker->calendar[tenth % SRV_CALENDAR_TENTHS];
}

// Forgets the promises for times that have passed, and all of them where the calendar is older than it is long.
static void turn_calendar(srv_worker *worker, uint64_t now) {
    const uint64_t from = worker->calendar_from;
    const uint64_t passed = now - from < SRV_CALENDAR_TENTHS ? now - from : SRV_CALENDAR_TENTHS;

    for (uint64_t i = 0; i < passed; i++)
        *promised_for(worker, from + i) = 0;
    worker->calendar_from = now;
}

// When one who is refused now may come back: its work is promised to it from then on.
static int promise(srv_worker *worker, want want, uint64_t places, uint64_t tokens) {
    const uint64_t now = srv_clock_us() / 100000;
    double work =
        want.places > 0 ? (double)places * seconds_a_place(worker) : seconds_of_tokens(worker, (double)tokens);
    int seconds = whole_seconds(seconds_of(worker, want, 1));

    turn_calendar(worker, now);
    worker->owes = true;
    while (seconds < SRV_RETRY_MOST_S && *promised_for(worker, now + 10 * (uint64_t)seconds) >= tenth_work)
        seconds++;
    for (uint64_t tenth = now + 10 * (uint64_t)seconds; work > 0 && tenth < now + SRV_CALENDAR_TENTHS; tenth++) {
        double *promised = promised_for(worker, tenth);
        const double taken = fmin(work, fmax(tenth_work - *promised, 0));
        *promised += taken;
        work -= taken;
    }
    return seconds;
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
    if (worker->waiting == 0 && worker->owes) {
        memset(worker->calendar, 0, sizeof worker->calendar);
        worker->owes = false;
    }
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
