// SPDX-License-Identifier: Apache-2.0
// A request's time on a timeline: what it has to read first, and what is left of it afterwards; see timeline.h.
//
// The ids of a turn stand behind the timeline's own while it is under way, so that its end only moves where the
// timeline ends. Everything that the end needs is made at the beginning: an end cannot fail, and an end without a word
// leaves the timeline as it was.
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "engine/request.h"
#include "engine/timeline_internal.h"

// What the request finds wrong with the timeline.
static eng_status check(const eng_timeline *timeline, const eng_request *request, int64_t context, eng_error *error) {
    const int64_t position = timeline->position, count = (int64_t)request->count;
    if (timeline->busy)
        return eng_fail(error, ENG_BUSY, "the session is in use by another request");
    if (request->timeline_position >= 0 && request->timeline_position != position)
        return eng_fail(error, ENG_CONFLICT, "the session is at position %" PRId64 ", not %" PRId64, position,
                        request->timeline_position);
    if (position == 0 && count == 0)
        return eng_fail(error, ENG_INVALID, "the prompt is empty, and so is the session");
    const int64_t limit = context < 0 ? INT64_MAX : context;
    if (count > limit - position || request->max_tokens > limit - position - count)
        return eng_fail(error, ENG_TOO_LONG,
                        "position (%" PRId64 "), prompt (%" PRId64 ") and max_tokens (%" PRId64
                        ") exceed the context of %" PRId64 " tokens",
                        position, count, request->max_tokens, limit);
    return ENG_OK;
}

static bool restores_only(const eng_request *request) {
    return request->count == 0 && request->max_tokens == 0;
}

static eng_status copy_runs(const eng_timeline *timeline, const eng_request *request, eng_turn *turn) {
    int32_t passed = 0;
    while (passed < timeline->runs && timeline->run[passed].end <= turn->start)
        passed++;
    turn->run = malloc(sizeof *turn->run * ((size_t)(timeline->runs - passed) + 1));
    if (!turn->run)
        return ENG_NO_MEMORY;
    turn->runs = timeline->runs - passed;
    memcpy(turn->run, timeline->run + passed, sizeof *turn->run * (size_t)turn->runs);
    if (request->count > 0)
        turn->run[turn->runs++] = (eng_run){turn->prompt_end, KERN_ROW_PROMPT, request->knobs};
    return ENG_OK;
}

static eng_status make_prompt(const eng_timeline *timeline, const eng_request *request, eng_turn *turn) {
    const int64_t end = restores_only(request) ? timeline->read : turn->prompt_end;
    turn->prompt = eng_prompt_create(timeline->ids + (turn->start - timeline->first), (size_t)(end - turn->start));
    return turn->prompt ? ENG_OK : ENG_NO_MEMORY;
}

static eng_status fill(eng_timeline *timeline, const eng_request *request, eng_turn *turn, eng_error *error) {
    eng_snapshot *from = eng_timeline_nearest(timeline);
    turn->start = from ? from->read : 0;
    turn->fresh = restores_only(request) ? timeline->position : timeline->read;
    turn->prompt_end = timeline->position + (int64_t)request->count;
    turn->knobs = request->knobs;
    turn->returns = request->timeline_returns;
    eng_status status = eng_timeline_make_room(timeline) ? ENG_OK : ENG_NO_MEMORY;
    if (status == ENG_OK)
        status = eng_timeline_add_ids(timeline, request->ids, (int64_t)request->count);
    if (status == ENG_OK)
        status = copy_runs(timeline, request, turn);
    if (status == ENG_OK)
        status = make_prompt(timeline, request, turn);
    if (status != ENG_OK)
        return eng_fail(error, status, "out of memory for a session's ids");
    if (from)
        eng_snapshot_retain(from);
    turn->from = from;
    return ENG_OK;
}

static void clear(eng_turn *turn) {
    eng_timelines_unreserve(turn->timeline->all, turn->reserved);
    turn->timeline->end = turn->timeline->position;
    turn->timeline->busy = false;
    eng_snapshot_release(turn->from);
    eng_prompt_release(turn->prompt);
    free(turn->run);
    *turn = (eng_turn){0};
}

eng_status eng_turn_begin(eng_timelines *all, const eng_request *request, eng_turn *out, eng_error *error) {
    eng_timeline *timeline = eng_timelines_find(all, request->owner, request->timeline, error);
    if (!timeline)
        return ENG_NOT_FOUND;
    eng_status status = check(timeline, request, eng_timelines_read_options(all)->context_length, error);
    if (status != ENG_OK)
        return status;
    const int64_t most = timeline->position + eng_request_length((int64_t)request->count, request->max_tokens);
    const uint64_t bytes = eng_snapshot_bytes(eng_timelines_snapshots(all), most) +
                           sizeof(int32_t) * (request->count + (uint64_t)request->max_tokens);
    status = eng_timelines_reserve(all, bytes, error);
    if (status != ENG_OK)
        return status;
    eng_turn turn = {.timeline = timeline, .reserved = bytes};
    timeline->busy = true;
    status = fill(timeline, request, &turn, error);
    if (status == ENG_OK)
        *out = turn;
    else
        clear(&turn);
    return status;
}

eng_status eng_turn_say(eng_turn *turn, int32_t id) {
    return eng_timeline_add_ids(turn->timeline, &id, 1);
}

// How far a state has read that is at the position, by the recorded way; what was generated last may wait as the tail.
static int64_t read_at(const eng_turn *turn, int64_t position, const eng_session *session) {
    if (session->pool && (session->read == position || session->read == position - 1))
        return session->read;
    return position > turn->prompt_end ? position - 1 : position;
}

// The room for it was made at the beginning.
static void add_run(eng_timeline *timeline, int64_t end, kern_row_kind kind, const eng_knobs *knobs) {
    const eng_status added = eng_timeline_add_run(timeline, end, kind, knobs);
    (void)added;
}

static void move_to(const eng_turn *turn, int64_t position, const eng_session *session) {
    eng_timeline *timeline = turn->timeline;
    const int64_t read = read_at(turn, position, session);
    add_run(timeline, turn->prompt_end, KERN_ROW_PROMPT, &turn->knobs);
    add_run(timeline, position, KERN_ROW_GENERATED, &turn->knobs);
    timeline->position = position;
    timeline->read = read;
    eng_timeline_changed(timeline);
}

static void keep_state(eng_timeline *timeline, eng_session *session) {
    if (!session->pool || session->read != timeline->read || timeline->read == 0 ||
        eng_timeline_has(timeline, timeline->read))
        return;
    eng_snapshot *snapshot = eng_snapshot_keep(eng_timelines_snapshots(timeline->all), session);
    if (snapshot && eng_timeline_add_snapshot(timeline, snapshot) != ENG_OK)
        eng_snapshot_release(snapshot);
}

void eng_turn_end(eng_turn *turn, int64_t position, eng_session *session) {
    eng_timeline *timeline = turn->timeline;
    if (timeline) {
        if (position > timeline->position && !turn->returns)
            move_to(turn, position, session);
        eng_timeline_drop_after(timeline, timeline->read);
        keep_state(timeline, session);
        clear(turn);
        eng_timeline_trim(timeline);
    }
    eng_session_close(session);
}
