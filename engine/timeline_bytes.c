// SPDX-License-Identifier: Apache-2.0
// Which ids, runs and states go out, and a timeline made of them; see timeline_bytes.h.
//
// What comes in was checked by state.c as bytes; here it is compared with the timeline that it is to become.
#include "engine/timeline_bytes.h"

#include <inttypes.h>

#include "engine/timeline_internal.h"

// ---------------------------------------------------------------------------------------------------------------- out

void eng_timeline_piece_since(const eng_timeline *timeline, int64_t begin, eng_timeline_piece *out) {
    int32_t passed = 0;
    while (passed < timeline->runs && timeline->run[passed].end <= begin)
        passed++;
    *out = (eng_timeline_piece){.state = {.begin = begin,
                                          .read = timeline->read,
                                          .position = timeline->position,
                                          .run = timeline->run + passed,
                                          .runs = timeline->runs - passed,
                                          .ids = timeline->ids + (begin - timeline->first),
                                          .profile_changed = timeline->profile_changed}};
}

static void add_state(eng_timeline_piece *piece, const eng_snapshot *snapshot) {
    piece->state.at[piece->state.states] = snapshot->read;
    piece->snapshot[piece->state.states++] = snapshot;
}

void eng_timeline_piece_near(const eng_timeline *timeline, eng_timeline_piece *out) {
    const eng_snapshot *from = eng_timeline_nearest(timeline);
    eng_timeline_piece_since(timeline, from ? from->read : 0, out);
    if (from)
        add_state(out, from);
}

void eng_timeline_piece_whole(const eng_timeline *timeline, bool with_state, eng_timeline_piece *out) {
    const eng_snapshot *from = with_state ? eng_timeline_nearest(timeline) : NULL;
    eng_timeline_piece_since(timeline, timeline->first, out);
    if (timeline->first > 0)
        add_state(out, timeline->snapshot[0]);
    if (from && from->read > timeline->first)
        add_state(out, from);
}

eng_status eng_timeline_piece_write(const eng_pool *pool, const eng_state_key *key, const eng_timeline_piece *piece,
                                    void *out, eng_error *error) {
    eng_status status = ENG_OK;
    for (int32_t i = 0; i < piece->state.states && status == ENG_OK; i++)
        status = eng_snapshot_write_out(piece->snapshot[i], eng_state_content(pool, &piece->state, i, out), error);
    if (status == ENG_OK)
        eng_state_write(pool, key, &piece->state, out);
    return status;
}

// ----------------------------------------------------------------------------------------------------------------- in

static eng_status add_path(eng_timeline *timeline, const eng_state *state) {
    eng_status status = eng_timeline_add_ids(timeline, state->ids, state->position - state->begin);
    for (int32_t i = 0; i < state->runs && status == ENG_OK; i++)
        status = eng_timeline_add_run(timeline, state->run[i].end, state->run[i].kind, &state->run[i].knobs);
    timeline->position = state->position;
    timeline->read = state->read;
    timeline->profile_changed |= state->profile_changed;
    eng_timeline_changed(timeline);
    return status;
}

static eng_status add_states(eng_timeline *timeline, const eng_state *state) {
    eng_snapshots *snapshots = eng_timelines_snapshots(timeline->all);
    eng_status status = ENG_OK;
    for (int32_t i = 0; i < state->states && status == ENG_OK; i++) {
        eng_snapshot *snapshot = eng_snapshot_read_in(snapshots, state->at[i], state->content[i]);
        if (!snapshot)
            return ENG_NO_MEMORY;
        status = eng_timeline_add_snapshot(timeline, snapshot);
        if (status != ENG_OK)
            eng_snapshot_release(snapshot);
    }
    return status;
}

static eng_status check(const eng_timelines *all, const eng_state *state, eng_error *error) {
    const int64_t context = eng_timelines_read_options(all)->context_length;
    if (context >= 0 && state->position > context)
        return eng_fail(error, ENG_UNSUPPORTED, "a state behind %" PRId64 " tokens; the context has %" PRId64,
                        state->position, context);
    return ENG_OK;
}

// What is taken is counted where it is taken; here is asked whether there is room.
static eng_status make_room(eng_timelines *all, const eng_state *state, eng_error *error) {
    uint64_t bytes = sizeof *state->ids * (uint64_t)(state->position - state->begin);
    for (int32_t i = 0; i < state->states; i++)
        bytes += eng_snapshot_bytes(eng_timelines_snapshots(all), state->at[i]);
    eng_status status = eng_timelines_reserve(all, bytes, error);
    if (status == ENG_OK)
        eng_timelines_unreserve(all, bytes);
    return status;
}

eng_status eng_timeline_bring_in(eng_timelines *all, uint64_t owner, const eng_state *state, eng_timeline **out,
                                 eng_error *error) {
    eng_timeline *timeline;
    if (state->begin > 0 && (state->states == 0 || state->at[0] != state->begin))
        return eng_fail(error, ENG_FORMAT, "there is no state at position %" PRId64 ", where the ids begin",
                        state->begin);
    eng_status status = check(all, state, error);
    if (status == ENG_OK)
        status = make_room(all, state, error);
    if (status == ENG_OK)
        status = eng_timelines_add(all, owner, &timeline, error);
    if (status != ENG_OK)
        return status;
    timeline->first = timeline->end = state->begin;
    status = add_path(timeline, state);
    if (status == ENG_OK)
        status = add_states(timeline, state);
    if (status == ENG_OK) {
        *out = timeline;
        return ENG_OK;
    }
    const eng_status removed = eng_timelines_remove(timeline, NULL);
    (void)removed; // nobody uses it
    return eng_fail(error, status, "out of memory for a state");
}

eng_status eng_timeline_go_on(eng_timeline *timeline, const eng_state *state, eng_error *error) {
    if (state->begin < timeline->first || state->begin > timeline->read)
        return eng_fail(error, ENG_FORMAT, "it goes on from position %" PRId64 "; read are %" PRId64 " to %" PRId64,
                        state->begin, timeline->first, timeline->read);
    eng_status status = check(timeline->all, state, error);
    if (status == ENG_OK)
        status = make_room(timeline->all, state, error);
    if (status != ENG_OK)
        return status;
    eng_timeline_rewind(timeline, state->begin);
    status = add_path(timeline, state);
    return status == ENG_OK ? ENG_OK : eng_fail(error, status, "out of memory for a session's ids");
}
