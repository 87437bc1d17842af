// SPDX-License-Identifier: Apache-2.0
// The table of timelines, their ids, runs and states, and the budget; see timeline.h.
//
// Ids of timelines ascend and are never used again, so the table is sorted as it grows and a look-up is a search in
// halves. What may go is found by walking the states from the least recently used on; those that a timeline cannot do
// without are marked before.
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "engine/timeline_internal.h"

struct eng_timelines {
    eng_timelines_options options;
    eng_timeline **timeline; // (count) by ascending ids
    int32_t count, capacity;
    uint64_t last_id, marks;
    uint64_t id_bytes, reserved;
    uint64_t changes;
};

// --------------------------------------------------------------------------------------------------------- the table

eng_status eng_timelines_create(const eng_timelines_options *options, eng_timelines **out, eng_error *error) {
    eng_timelines *all = calloc(1, sizeof *all);
    if (!all)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for sessions");
    all->options = *options;
    *out = all;
    return ENG_OK;
}

static void free_timeline(eng_timeline *timeline) {
    for (int32_t i = 0; i < timeline->snapshots; i++)
        eng_snapshot_release(timeline->snapshot[i]);
    timeline->all->id_bytes -= sizeof *timeline + sizeof *timeline->ids * (uint64_t)timeline->capacity;
    free(timeline->ids);
    free(timeline->run);
    free(timeline->snapshot);
    free(timeline);
}

void eng_timelines_free(eng_timelines *all) {
    if (!all)
        return;
    for (int32_t i = 0; i < all->count; i++)
        free_timeline(all->timeline[i]);
    free(all->timeline);
    free(all);
}

eng_snapshots *eng_timelines_snapshots(const eng_timelines *all) {
    return all->options.snapshots;
}

uint64_t eng_timelines_bytes(const eng_timelines *all, uint64_t *budget) {
    eng_snapshot_sums sums;
    eng_snapshots_sum(all->options.snapshots, &sums);
    if (budget)
        *budget = all->options.budget;
    return sums.bytes + all->id_bytes;
}

int32_t eng_timelines_count(const eng_timelines *all) {
    return all->count;
}

uint64_t eng_timelines_changes(const eng_timelines *all) {
    return all->changes;
}

void eng_timeline_changed(eng_timeline *timeline) {
    timeline->changes++;
    timeline->all->changes++;
}

// The index of the first whose id is above.
static int32_t place_after(const eng_timelines *all, uint64_t id) {
    int32_t low = 0, high = all->count;
    while (low < high) {
        const int32_t middle = low + (high - low) / 2;
        if (all->timeline[middle]->id <= id)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

eng_timeline *eng_timelines_find(const eng_timelines *all, uint64_t owner, uint64_t id, eng_error *error) {
    const int32_t place = place_after(all, id) - 1;
    if (place >= 0 && all->timeline[place]->id == id && all->timeline[place]->owner == owner)
        return all->timeline[place];
    (void)eng_fail(error, ENG_NOT_FOUND, "there is no such session");
    return NULL;
}

eng_timeline *eng_timelines_after(const eng_timelines *all, uint64_t owner, uint64_t id) {
    for (int32_t place = place_after(all, id); place < all->count; place++)
        if (all->timeline[place]->owner == owner)
            return all->timeline[place];
    return NULL;
}

static bool room_for_one(eng_timelines *all) {
    if (all->count < all->capacity)
        return true;
    const int32_t capacity = all->capacity ? 2 * all->capacity : 64;
    eng_timeline **grown = reallocarray(all->timeline, (size_t)capacity, sizeof *grown);
    if (!grown)
        return false;
    all->timeline = grown;
    all->capacity = capacity;
    return true;
}

eng_status eng_timelines_add(eng_timelines *all, uint64_t owner, eng_timeline **out, eng_error *error) {
    if (all->count == ENG_MAX_TIMELINES)
        return eng_fail(error, ENG_FULL, "there are %d sessions, as many as there may be", ENG_MAX_TIMELINES);
    eng_status status = eng_timelines_reserve(all, sizeof **out, error);
    if (status != ENG_OK)
        return status;
    eng_timelines_unreserve(all, sizeof **out);
    eng_timeline *timeline = room_for_one(all) ? calloc(1, sizeof *timeline) : NULL;
    if (!timeline)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for a session");
    *timeline = (eng_timeline){.all = all, .id = ++all->last_id, .owner = owner};
    all->timeline[all->count++] = timeline;
    all->id_bytes += sizeof *timeline;
    *out = timeline;
    return ENG_OK;
}

eng_status eng_timelines_remove(eng_timeline *timeline, eng_error *error) {
    eng_timelines *all = timeline->all;
    if (timeline->busy)
        return eng_fail(error, ENG_BUSY, "the session is in use by a request");
    const int32_t place = place_after(all, timeline->id) - 1;
    all->count--;
    memmove(all->timeline + place, all->timeline + place + 1, sizeof *all->timeline * (size_t)(all->count - place));
    free_timeline(timeline);
    return ENG_OK;
}

// -------------------------------------------------------------------------------------------------------- the budget

static void mark_needed(eng_timelines *all) {
    all->marks++;
    for (int32_t i = 0; i < all->count; i++) {
        const eng_timeline *timeline = all->timeline[i];
        if (timeline->snapshots > 0)
            timeline->snapshot[timeline->snapshots - 1]->mark = all->marks;
        if (timeline->snapshots > 0 && timeline->first > 0)
            timeline->snapshot[0]->mark = all->marks;
    }
}

static void drop_snapshot(eng_timeline *timeline, int32_t index) {
    eng_snapshot_release(timeline->snapshot[index]);
    timeline->snapshots--;
    memmove(timeline->snapshot + index, timeline->snapshot + index + 1,
            sizeof *timeline->snapshot * (size_t)(timeline->snapshots - index));
}

// Out of every timeline. The last to let go may be a turn.
static void drop_everywhere(const eng_timelines *all, const eng_snapshot *snapshot) {
    for (int32_t i = 0; i < all->count; i++)
        for (int32_t k = all->timeline[i]->snapshots; k-- > 0;)
            if (all->timeline[i]->snapshot[k] == snapshot)
                drop_snapshot(all->timeline[i], k);
}

eng_status eng_timelines_reserve(eng_timelines *all, uint64_t bytes, eng_error *error) {
    const uint64_t budget = all->options.budget;
    if (eng_timelines_bytes(all, NULL) + all->reserved + bytes > budget)
        mark_needed(all);
    eng_snapshot *snapshot = eng_snapshots_oldest(all->options.snapshots);
    while (snapshot && eng_timelines_bytes(all, NULL) + all->reserved + bytes > budget) {
        eng_snapshot *next = snapshot->next;
        if (snapshot->mark != all->marks)
            drop_everywhere(all, snapshot);
        snapshot = next;
    }
    const uint64_t taken = eng_timelines_bytes(all, NULL) + all->reserved;
    if (taken + bytes > budget)
        return eng_fail(error, ENG_FULL,
                        "sessions hold %" PRIu64 " of their %" PRIu64 " bytes, %" PRIu64 " more are needed", taken,
                        budget, bytes);
    all->reserved += bytes;
    return ENG_OK;
}

void eng_timelines_unreserve(eng_timelines *all, uint64_t bytes) {
    all->reserved -= bytes;
}

// ------------------------------------------------------------------------------------------------- ids, runs, states

// More than is wanted, for what comes, where the budget has it: reserved is what is wanted alone.
static bool room_for_ids(eng_timeline *timeline, int64_t count) {
    const eng_timelines *all = timeline->all;
    const int64_t wanted = timeline->end - timeline->first + count;
    if (wanted <= timeline->capacity)
        return true;
    int64_t capacity = timeline->capacity + timeline->capacity / 2;
    const uint64_t more = sizeof *timeline->ids * (uint64_t)(capacity - timeline->capacity);
    if (capacity < wanted || eng_timelines_bytes(all, NULL) + all->reserved + more > all->options.budget)
        capacity = wanted;
    int32_t *grown = reallocarray(timeline->ids, (size_t)capacity, sizeof *grown);
    if (!grown)
        return false;
    timeline->all->id_bytes += sizeof *grown * (uint64_t)(capacity - timeline->capacity);
    timeline->ids = grown;
    timeline->capacity = capacity;
    return true;
}

eng_status eng_timeline_add_ids(eng_timeline *timeline, const int32_t *ids, int64_t count) {
    if (count == 0)
        return ENG_OK;
    if (!room_for_ids(timeline, count))
        return ENG_NO_MEMORY;
    memcpy(timeline->ids + (timeline->end - timeline->first), ids, sizeof *ids * (size_t)count);
    timeline->end += count;
    return ENG_OK;
}

bool eng_timeline_make_room(eng_timeline *timeline) {
    enum { RUNS = 3, SNAPSHOTS = 2 };
    if (timeline->runs + RUNS > timeline->run_capacity) {
        const int32_t capacity = 2 * timeline->run_capacity + RUNS;
        eng_run *grown = reallocarray(timeline->run, (size_t)capacity, sizeof *grown);
        if (!grown)
            return false;
        timeline->run = grown;
        timeline->run_capacity = capacity;
    }
    if (timeline->snapshots + SNAPSHOTS > timeline->snapshot_capacity) {
        const int32_t capacity = 2 * timeline->snapshot_capacity + SNAPSHOTS;
        eng_snapshot **grown = reallocarray(timeline->snapshot, (size_t)capacity, sizeof *grown);
        if (!grown)
            return false;
        timeline->snapshot = grown;
        timeline->snapshot_capacity = capacity;
    }
    return true;
}

static bool same_knobs(const eng_knobs *a, const eng_knobs *b) {
    return a->cg_mode == b->cg_mode && a->cg_tolerance == b->cg_tolerance && a->cg_max_steps == b->cg_max_steps &&
           a->exit_threshold == b->exit_threshold && a->max_loops == b->max_loops;
}

// A prompt's run never goes on in the next: where it ended inside the grid, a chunk was cut.
eng_status eng_timeline_add_run(eng_timeline *timeline, int64_t end, kern_row_kind kind, const eng_knobs *knobs) {
    eng_run *last = timeline->runs > 0 ? &timeline->run[timeline->runs - 1] : NULL;
    if (end <= (last ? last->end : timeline->first))
        return ENG_OK;
    if (last && kind == KERN_ROW_GENERATED && last->kind == kind && same_knobs(&last->knobs, knobs)) {
        last->end = end;
        return ENG_OK;
    }
    if (!eng_timeline_make_room(timeline))
        return ENG_NO_MEMORY;
    timeline->run[timeline->runs++] = (eng_run){.end = end, .kind = kind, .knobs = *knobs};
    return ENG_OK;
}

bool eng_timeline_has(const eng_timeline *timeline, int64_t read) {
    for (int32_t i = 0; i < timeline->snapshots; i++)
        if (timeline->snapshot[i]->read == read)
            return true;
    return false;
}

eng_status eng_timeline_add_snapshot(eng_timeline *timeline, eng_snapshot *snapshot) {
    if (!eng_timeline_make_room(timeline))
        return ENG_NO_MEMORY;
    int32_t place = timeline->snapshots++;
    for (; place > 0 && timeline->snapshot[place - 1]->read > snapshot->read; place--)
        timeline->snapshot[place] = timeline->snapshot[place - 1];
    timeline->snapshot[place] = snapshot;
    return ENG_OK;
}

eng_snapshot *eng_timeline_nearest(const eng_timeline *timeline) {
    for (int32_t i = timeline->snapshots; i-- > 0;)
        if (timeline->snapshot[i]->read <= timeline->read)
            return timeline->snapshot[i];
    return NULL;
}

uint64_t eng_timeline_own_bytes(const eng_timeline *timeline) {
    uint64_t bytes = sizeof *timeline + sizeof *timeline->ids * (uint64_t)timeline->capacity;
    for (int32_t i = 0; i < timeline->snapshots; i++)
        bytes += eng_snapshot_bytes(timeline->all->options.snapshots, timeline->snapshot[i]->read);
    return bytes;
}

void eng_timeline_drop_after(eng_timeline *timeline, int64_t read) {
    while (timeline->snapshots > 0 && timeline->snapshot[timeline->snapshots - 1]->read > read)
        drop_snapshot(timeline, timeline->snapshots - 1);
}

// ------------------------------------------------------------------------------------------------------ cut and copy

static eng_status check_cut(const eng_timeline *timeline, int64_t position, eng_error *error) {
    if (position >= timeline->first && position <= timeline->position)
        return ENG_OK;
    return eng_fail(error, ENG_CONFLICT,
                    "the session goes from position %" PRId64 " to %" PRId64 "; %" PRId64 " is not there",
                    timeline->first, timeline->position, position);
}

static int64_t begin_of_last(const eng_timeline *timeline) {
    return timeline->runs > 1 ? timeline->run[timeline->runs - 2].end : timeline->first;
}

static void cut_runs(eng_timeline *timeline, int64_t position) {
    while (timeline->runs > 0 && begin_of_last(timeline) >= position)
        timeline->runs--;
    if (timeline->runs > 0 && timeline->run[timeline->runs - 1].end > position)
        timeline->run[timeline->runs - 1].end = position;
}

// What is left ends inside a run. If that was generated, its last id becomes the tail, unless a state has read it.
static void cut(eng_timeline *timeline, int64_t position) {
    if (position == timeline->position)
        return;
    timeline->position = timeline->end = position;
    timeline->read = timeline->read < position ? timeline->read : position;
    eng_timeline_changed(timeline);
    cut_runs(timeline, position);
    if (timeline->runs > 0 && timeline->run[timeline->runs - 1].kind == KERN_ROW_GENERATED &&
        timeline->read == position && !eng_timeline_has(timeline, position))
        timeline->read--;
    eng_timeline_drop_after(timeline, timeline->read);
    if (timeline->read < timeline->low)
        timeline->low = timeline->read;
}

void eng_timeline_rewind(eng_timeline *timeline, int64_t read) {
    timeline->position = timeline->end = timeline->read = read;
    cut_runs(timeline, read);
    eng_timeline_drop_after(timeline, read);
    if (read < timeline->low)
        timeline->low = read;
    eng_timeline_changed(timeline);
}

eng_status eng_timeline_cut(eng_timeline *timeline, int64_t position, eng_error *error) {
    if (timeline->busy)
        return eng_fail(error, ENG_BUSY, "the session is in use by a request");
    eng_status status = check_cut(timeline, position, error);
    if (status == ENG_OK)
        cut(timeline, position);
    return status;
}

static eng_status copy_parts(const eng_timeline *from, eng_timeline *to) {
    to->first = to->end = from->first;
    eng_status status = eng_timeline_add_ids(to, from->ids, from->position - from->first);
    for (int32_t i = 0; i < from->runs && status == ENG_OK; i++)
        status = eng_timeline_add_run(to, from->run[i].end, from->run[i].kind, &from->run[i].knobs);
    for (int32_t i = 0; i < from->snapshots && from->snapshot[i]->read <= from->read && status == ENG_OK; i++) {
        status = eng_timeline_add_snapshot(to, from->snapshot[i]);
        if (status == ENG_OK)
            eng_snapshot_retain(from->snapshot[i]);
    }
    to->position = from->position;
    to->read = from->read;
    to->profile_changed = from->profile_changed;
    return status;
}

eng_status eng_timeline_copy(const eng_timeline *from, int64_t position, eng_timeline **out, eng_error *error) {
    const uint64_t bytes = sizeof *from->ids * (uint64_t)(from->position - from->first);
    eng_timeline *to = NULL;
    eng_status status = position < 0 ? ENG_OK : check_cut(from, position, error);
    if (status == ENG_OK)
        status = eng_timelines_reserve(from->all, bytes, error);
    if (status != ENG_OK)
        return status;
    eng_timelines_unreserve(from->all, bytes);
    status = eng_timelines_add(from->all, from->owner, &to, error);
    if (status != ENG_OK)
        return status;
    if (copy_parts(from, to) != ENG_OK) {
        const eng_status removed = eng_timelines_remove(to, NULL);
        (void)removed; // nobody uses it
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for a session of %" PRId64 " ids", from->position);
    }
    if (position >= 0)
        cut(to, position);
    *out = to;
    return ENG_OK;
}

static void stay(eng_timeline *timeline, const eng_timeline *was) {
    timeline->id = was->id;
    timeline->owner = was->owner;
    timeline->named = was->named;
    timeline->changes = was->changes;
    eng_timeline_changed(timeline);
    timeline->low = -1; // nothing is as it was
}

void eng_timeline_swap(eng_timeline *a, eng_timeline *b) {
    const eng_timeline was_a = *a, was_b = *b;
    *a = was_b;
    *b = was_a;
    stay(a, &was_a);
    stay(b, &was_b);
}

// -------------------------------------------------------------------------------------------------- for the turns

const eng_timelines_options *eng_timelines_read_options(const eng_timelines *all) {
    return &all->options;
}

// Ids beyond the history's length go as far as a state takes their place.
void eng_timeline_trim(eng_timeline *timeline) {
    const int64_t wanted = timeline->position - timeline->all->options.history;
    int32_t base = 0;
    while (base < timeline->snapshots && timeline->snapshot[base]->read < wanted)
        base++;
    if (wanted <= timeline->first || base == timeline->snapshots)
        return;
    const int64_t first = timeline->snapshot[base]->read;
    memmove(timeline->ids, timeline->ids + (first - timeline->first),
            sizeof *timeline->ids * (size_t)(timeline->end - first));
    int32_t gone = 0;
    while (gone < timeline->runs && timeline->run[gone].end <= first)
        gone++;
    timeline->runs -= gone;
    memmove(timeline->run, timeline->run + gone, sizeof *timeline->run * (size_t)timeline->runs);
    while (base-- > 0)
        drop_snapshot(timeline, 0);
    timeline->first = first;
}
