// SPDX-License-Identifier: Apache-2.0
// Timelines of the door: each call of engine.h finds its timeline and changes the table; out to bytes and in again.
//
// What goes out is the nearest state and the ids behind it, so that a timeline whose state must be read again can be
// taken out without a step. What comes in is made aside
// and takes the old one's place whole.
#include <stdlib.h>
#include <string.h>

#include "engine/engine_internal.h"
#include "engine/timeline_bytes.h"

// Whether to try again what found no room: a timeline that the store has went, `except` not.
static bool made_room(const eng_engine *engine, eng_status status, const eng_timeline *except, eng_error *reason) {
    if (status != ENG_FULL || !eng_durable_evict(engine->durable, except))
        return false;
    *reason = (eng_error){0};
    return true;
}

static eng_status tell(eng_status status, const eng_error *reason, eng_error *error) {
    return status == ENG_OK ? ENG_OK : eng_fail(error, status, "%s", reason->text);
}

eng_status eng_timeline_create(eng_engine *engine, uint64_t owner, uint64_t *id, eng_error *error) {
    eng_timeline *timeline;
    eng_error reason = {0};
    eng_status status;
    do
        status = eng_timelines_add(engine->timelines, owner, &timeline, &reason);
    while (made_room(engine, status, NULL, &reason));
    if (status == ENG_OK)
        *id = timeline->id;
    return tell(status, &reason, error);
}

eng_status eng_timeline_fork(eng_engine *engine, uint64_t owner, uint64_t id, int64_t position, uint64_t *fork,
                             eng_error *error) {
    const eng_timeline *from = eng_timelines_find(engine->timelines, owner, id, error);
    eng_timeline *to;
    eng_error reason = {0};
    eng_status status;
    if (!from)
        return ENG_NOT_FOUND;
    do
        status = eng_timeline_copy(from, position, &to, &reason);
    while (made_room(engine, status, from, &reason));
    if (status == ENG_OK)
        *fork = to->id;
    return tell(status, &reason, error);
}

eng_status eng_timeline_rollback(eng_engine *engine, uint64_t owner, uint64_t id, int64_t position, eng_error *error) {
    eng_timeline *timeline = eng_timelines_find(engine->timelines, owner, id, error);
    return timeline ? eng_timeline_cut(timeline, position, error) : ENG_NOT_FOUND;
}

eng_status eng_timeline_drop(eng_engine *engine, uint64_t owner, uint64_t id, eng_error *error) {
    eng_timeline *timeline = eng_timelines_find(engine->timelines, owner, id, error);
    if (timeline && timeline->named)
        return eng_fail(error, ENG_CONFLICT, "the session is in the store too");
    return timeline ? eng_timelines_remove(timeline, error) : ENG_NOT_FOUND;
}

uint64_t eng_timeline_next(const eng_engine *engine, uint64_t owner, uint64_t id) {
    const eng_timeline *timeline = eng_timelines_after(engine->timelines, owner, id);
    return timeline ? timeline->id : 0;
}

// --------------------------------------------------------------------------------------------------------- inspection

static void loosen(eng_knobs *loosest, const eng_knobs *knobs) {
    if (loosest->cg_mode == ENG_CG_EXACT || knobs->cg_mode == ENG_CG_STEPS)
        loosest->cg_mode = knobs->cg_mode;
    if (knobs->cg_tolerance > loosest->cg_tolerance)
        loosest->cg_tolerance = knobs->cg_tolerance;
    if (knobs->cg_max_steps < loosest->cg_max_steps)
        loosest->cg_max_steps = knobs->cg_max_steps;
    if (knobs->exit_threshold < loosest->exit_threshold)
        loosest->exit_threshold = knobs->exit_threshold;
    if (knobs->max_loops < loosest->max_loops)
        loosest->max_loops = knobs->max_loops;
}

eng_status eng_timeline_read(const eng_engine *engine, uint64_t owner, uint64_t id, eng_timeline_info *out,
                             eng_error *error) {
    const eng_timeline *timeline = eng_timelines_find(engine->timelines, owner, id, error);
    if (!timeline)
        return ENG_NOT_FOUND;
    const eng_snapshot *present = eng_timeline_nearest(timeline);
    if (present && present->read != timeline->read)
        present = NULL;
    *out = (eng_timeline_info){.position = timeline->position,
                               .earliest = timeline->first,
                               .residence = !present                ? ENG_RESIDENCE_NONE
                                            : present->session.pool ? ENG_RESIDENCE_DEVICE
                                                                    : ENG_RESIDENCE_HOST,
                               .bytes = eng_timeline_own_bytes(timeline),
                               .busy = timeline->busy,
                               .named = timeline->named != NULL,
                               .durable = eng_durable_has_all(timeline),
                               .profile_changed = timeline->profile_changed,
                               .has_knobs = timeline->runs > 0};
    for (int32_t i = 0; i < timeline->runs; i++)
        if (i == 0)
            out->loosest = timeline->run[i].knobs;
        else
            loosen(&out->loosest, &timeline->run[i].knobs);
    return ENG_OK;
}

// ---------------------------------------------------------------------------------------------------------------- out

eng_status eng_timeline_export(eng_engine *engine, uint64_t owner, uint64_t id, void **bytes, size_t *count,
                               eng_error *error) {
    const eng_timeline *timeline = eng_timelines_find(engine->timelines, owner, id, error);
    if (!timeline)
        return ENG_NOT_FOUND;
    eng_timeline_piece piece;
    eng_timeline_piece_near(timeline, &piece);
    const size_t size = eng_state_measure(engine->pool, &piece.state);
    char *out = calloc(1, size);
    if (!out)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for a state of %zu bytes", size);
    eng_status status = eng_timeline_piece_write(engine->pool, &engine->key, &piece, out, error);
    if (status == ENG_OK)
        status = eng_state_seal(engine->pool, &piece.state, out, error);
    if (status != ENG_OK) {
        free(out);
        return status;
    }
    *bytes = out;
    *count = size;
    return ENG_OK;
}

eng_status eng_timeline_digest(eng_engine *engine, uint64_t owner, uint64_t id,
                               unsigned char digest[ENG_TIMELINE_DIGEST_BYTES], eng_error *error) {
    void *bytes = NULL;
    size_t count;
    eng_status status = eng_timeline_export(engine, owner, id, &bytes, &count, error);
    if (status != ENG_OK)
        return status;
    eng_state_read_digest(bytes, digest);
    free(bytes);
    return ENG_OK;
}

// ----------------------------------------------------------------------------------------------------------------- in

static eng_status replace(eng_engine *engine, eng_timeline *timeline, const eng_state *state, eng_error *error) {
    eng_timeline *made;
    eng_error reason = {0};
    eng_status status;
    do
        status = eng_timeline_bring_in(engine->timelines, timeline->owner, state, &made, &reason);
    while (made_room(engine, status, timeline, &reason));
    if (status != ENG_OK)
        return tell(status, &reason, error);
    eng_timeline_swap(timeline, made);
    const eng_status removed = eng_timelines_remove(made, NULL);
    (void)removed; // nobody uses it
    return ENG_OK;
}

eng_status eng_timeline_import(eng_engine *engine, uint64_t owner, uint64_t id, const void *bytes, size_t count,
                               eng_error *error) {
    eng_timeline *timeline = eng_timelines_find(engine->timelines, owner, id, error);
    eng_state state;
    eng_run *run = NULL;
    if (!timeline)
        return ENG_NOT_FOUND;
    if (timeline->busy)
        return eng_fail(error, ENG_BUSY, "the session is in use by a request");
    eng_status status =
        eng_state_open(engine->pool, &engine->key, engine->info.vocab_size, true, bytes, count, &state, &run, error);
    if (status == ENG_OK)
        status = replace(engine, timeline, &state, error);
    free(run);
    return status;
}
