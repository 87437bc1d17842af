// SPDX-License-Identifier: Apache-2.0
// The tree of prefix.h: a hash table of nodes and one list by use.
//
// In the list every node stands before its parent: a use moves a whole way to the end, its deepest node first, and a
// new node is put right before its parent. So the first of the list has no children, and what goes is always an end of
// a way that nobody used for the longest time.
#include "engine/prefix.h"

#include <stdlib.h>
#include <string.h>

typedef struct node {
    struct node *older, *newer;
    struct node *parent; // NULL: the root, which is no node
    struct node *next;   // in its bucket
    unsigned char digest[ENG_DIGEST_BYTES];
    eng_boundary *boundary; // NULL: no state
} node;

struct eng_prefix {
    eng_prefix_options options;
    node **bucket; // (buckets), a power of two
    uint64_t buckets, nodes;
    node *oldest, *newest;
    uint64_t states, state_bytes, evictions; // of boundaries in the tree: states and blocks of logprobs
    uint64_t score_bytes;                    // of all blocks of logprobs
};

// ----------------------------------------------------------------------------------------------------------- the table

static uint64_t place_of(const eng_prefix *prefix, const unsigned char digest[ENG_DIGEST_BYTES]) {
    uint64_t head;
    memcpy(&head, digest, sizeof head);
    return head & (prefix->buckets - 1);
}

static node *look_up(const eng_prefix *prefix, const unsigned char digest[ENG_DIGEST_BYTES]) {
    node *found = prefix->buckets ? prefix->bucket[place_of(prefix, digest)] : NULL;
    while (found && memcmp(found->digest, digest, ENG_DIGEST_BYTES) != 0)
        found = found->next;
    return found;
}

// One bucket a node; without memory for that, fewer.
static bool make_buckets(eng_prefix *prefix) {
    if (prefix->nodes < prefix->buckets)
        return true;
    const uint64_t before = prefix->buckets, buckets = before ? 2 * before : 64;
    node **bucket = calloc(buckets, sizeof *bucket), **old = prefix->bucket;
    if (!bucket)
        return before > 0;
    prefix->bucket = bucket;
    prefix->buckets = buckets;
    for (uint64_t i = 0; i < before; i++)
        for (node *at = old[i], *next; at; at = next) {
            node **place = &bucket[place_of(prefix, at->digest)];
            next = at->next;
            at->next = *place;
            *place = at;
        }
    free(old);
    return true;
}

static void leave_table(eng_prefix *prefix, const node *gone) {
    node **place = &prefix->bucket[place_of(prefix, gone->digest)];
    while (*place != gone)
        place = &(*place)->next;
    *place = gone->next;
    prefix->nodes--;
}

static void leave_list(eng_prefix *prefix, node *gone) {
    *(gone->older ? &gone->older->newer : &prefix->oldest) = gone->newer;
    *(gone->newer ? &gone->newer->older : &prefix->newest) = gone->older;
}

// Before `newer`; NULL: at the end.
static void join_list(eng_prefix *prefix, node *joins, node *newer) {
    joins->newer = newer;
    joins->older = newer ? newer->older : prefix->newest;
    *(joins->older ? &joins->older->newer : &prefix->oldest) = joins;
    *(newer ? &newer->older : &prefix->newest) = joins;
}

static void use(eng_prefix *prefix, node *deepest) {
    for (node *at = deepest; at; at = at->parent) {
        leave_list(prefix, at);
        join_list(prefix, at, NULL);
    }
}

// ---------------------------------------------------------------------------------------------------------- the budget

static uint64_t bytes_of(const eng_prefix *prefix) {
    return prefix->nodes * sizeof(node) + prefix->buckets * sizeof(node *) + prefix->state_bytes;
}

static void count_scores(eng_prefix *prefix, eng_scores *scores) {
    if (scores && scores->kept++ == 0)
        prefix->state_bytes += scores->bytes;
}

static void uncount_scores(eng_prefix *prefix, eng_scores *scores) {
    if (scores && --scores->kept == 0)
        prefix->state_bytes -= scores->bytes;
}

static void drop_boundary(eng_prefix *prefix, node *at) {
    eng_boundary *boundary = at->boundary;
    if (!boundary)
        return;
    at->boundary = NULL;
    boundary->snapshot->mark = 0;
    prefix->states--;
    prefix->state_bytes -= eng_snapshot_bytes(prefix->options.snapshots, boundary->read);
    uncount_scores(prefix, boundary->scores);
    eng_boundary_release(boundary);
}

static void drop_oldest(eng_prefix *prefix) {
    node *gone = prefix->oldest;
    drop_boundary(prefix, gone);
    leave_table(prefix, gone);
    leave_list(prefix, gone);
    free(gone);
}

static void evict(eng_prefix *prefix) {
    prefix->evictions += prefix->oldest->boundary != NULL;
    drop_oldest(prefix);
}

static void free_table(eng_prefix *prefix) {
    free(prefix->bucket);
    prefix->bucket = NULL;
    prefix->buckets = 0;
}

// Room for so many bytes more; false: the budget is smaller than that.
static bool make_room(eng_prefix *prefix, uint64_t bytes) {
    while (prefix->oldest && bytes_of(prefix) + bytes > prefix->options.budget)
        evict(prefix);
    if (bytes_of(prefix) + bytes > prefix->options.budget)
        free_table(prefix);
    return bytes_of(prefix) + bytes <= prefix->options.budget;
}

// What others hold and what the tree has, in states or in logprobs, may together be the budget and the share.
static bool bounded(const eng_prefix *prefix, uint64_t bytes) {
    return bytes <= prefix->options.budget + prefix->options.shared;
}

static bool room_beside(eng_prefix *prefix, uint64_t bytes) {
    eng_snapshot_sums sums;
    eng_snapshots_sum(prefix->options.snapshots, &sums);
    while (!bounded(prefix, sums.bytes + bytes) && prefix->oldest) {
        evict(prefix);
        eng_snapshots_sum(prefix->options.snapshots, &sums);
    }
    return bounded(prefix, sums.bytes + bytes);
}

// ------------------------------------------------------------------------------------------------------- create, free

eng_status eng_prefix_create(const eng_prefix_options *options, eng_prefix **out, eng_error *error) {
    eng_prefix *prefix = calloc(1, sizeof *prefix);
    if (!prefix)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for the prefix cache");
    prefix->options = *options;
    *out = prefix;
    return ENG_OK;
}

void eng_prefix_purge(eng_prefix *prefix) {
    while (prefix->oldest)
        drop_oldest(prefix);
    free_table(prefix);
}

void eng_prefix_free(eng_prefix *prefix) {
    if (!prefix)
        return;
    eng_prefix_purge(prefix);
    free(prefix);
}

eng_snapshots *eng_prefix_snapshots(const eng_prefix *prefix) {
    return prefix->options.snapshots;
}

bool eng_prefix_keeps(const eng_prefix *prefix) {
    return prefix->options.budget > 0;
}

void eng_prefix_sum(const eng_prefix *prefix, eng_prefix_sums *out) {
    *out = (eng_prefix_sums){.states = prefix->states,
                             .bytes = bytes_of(prefix),
                             .budget = prefix->options.budget,
                             .evictions = prefix->evictions};
}

eng_scores *eng_prefix_scores(eng_prefix *prefix, size_t count, const eng_scoring *scoring) {
    return bounded(prefix, prefix->score_bytes + eng_scores_bytes(count, scoring->top))
               ? eng_scores_create(count, scoring, &prefix->score_bytes)
               : NULL;
}

// ----------------------------------------------------------------------------------------------------------- the ways

// Knobs that do not enter are as good as equal.
eng_status eng_prefix_root(const eng_prefix *prefix, uint64_t owner, const unsigned char *name, const eng_knobs *knobs,
                           eng_chain *out) {
    struct {
        eng_state_key key;
        unsigned char name[ENG_NAME_BYTES];
        uint64_t named, owner, mode, steps, tolerance;
    } root = {.key = *prefix->options.key, .named = name != NULL};
    if (name)
        memcpy(root.name, name, sizeof root.name);
    else
        root.owner = owner;
    if (prefix->options.has_solver) {
        float tolerance = knobs->cg_tolerance;
        root.mode = 1 + (uint64_t)knobs->cg_mode;
        if (knobs->cg_mode != ENG_CG_EXACT) {
            root.steps = (uint64_t)knobs->cg_max_steps;
            memcpy(&root.tolerance, &tolerance, sizeof tolerance);
        }
    }
    out->read = 0;
    return eng_digest_bytes(&root, sizeof root, out->digest);
}

bool eng_prefix_extend(const eng_prefix *prefix, eng_chain *chain, const int32_t *ids) {
    const size_t chunk = (size_t)prefix->options.chunk;
    eng_digest *digest;
    if (eng_digest_begin(&digest) != ENG_OK)
        return false;
    if (eng_digest_add(digest, chain->digest, sizeof chain->digest) != ENG_OK ||
        eng_digest_add(digest, ids + chain->read, sizeof *ids * chunk) != ENG_OK) {
        eng_digest_free(digest);
        return false;
    }
    eng_digest_end(digest, chain->digest);
    chain->read += prefix->options.chunk;
    return true;
}

eng_boundary *eng_prefix_find(eng_prefix *prefix, const eng_boundary_need *need, int64_t limit, eng_chain *chain,
                              int64_t *known) {
    eng_boundary *best = NULL;
    node *deepest = NULL;
    eng_chain at = *chain;
    *known = chain->read;
    while (prefix->nodes > 0 && at.read + prefix->options.chunk <= limit && eng_prefix_extend(prefix, &at, need->ids)) {
        node *found = look_up(prefix, at.digest);
        if (!found)
            break;
        deepest = found;
        *known = at.read;
        if (found->boundary && eng_boundary_serves(found->boundary, need)) {
            best = found->boundary;
            *chain = at;
        }
    }
    use(prefix, deepest);
    return best;
}

static node *add_node(eng_prefix *prefix, const eng_chain *chain, node *parent) {
    node *made = make_buckets(prefix) ? malloc(sizeof *made) : NULL;
    if (!made)
        return NULL;
    node **place = &prefix->bucket[place_of(prefix, chain->digest)];
    *made = (node){.parent = parent, .next = *place};
    memcpy(made->digest, chain->digest, sizeof made->digest);
    *place = made;
    prefix->nodes++;
    join_list(prefix, made, parent);
    return made;
}

void eng_prefix_pass(eng_prefix *prefix, eng_chain *chain, const int32_t *ids, int64_t read) {
    if (!eng_prefix_keeps(prefix) || chain->read >= read)
        return;
    node *parent = chain->read > 0 ? look_up(prefix, chain->digest) : NULL;
    bool known = chain->read == 0 || parent; // a way without its beginning would never be found
    while (chain->read < read && known && eng_prefix_extend(prefix, chain, ids)) {
        node *found = look_up(prefix, chain->digest);
        parent = found ? found : add_node(prefix, chain, parent);
        known = parent != NULL;
    }
    if (!known || chain->read < read)
        chain->read = INT64_MAX; // it leaves nothing any more
    (void)make_room(prefix, 0);
}

int64_t eng_prefix_spacing(const eng_prefix *prefix, int64_t count) {
    enum { PART = 4 };
    const uint64_t bytes = eng_snapshot_bytes(prefix->options.snapshots, count), most = prefix->options.budget / PART;
    int64_t spacing = prefix->options.spacing;
    while (spacing < count && (uint64_t)(count / spacing) * bytes > most)
        spacing *= 2;
    return spacing;
}

// --------------------------------------------------------------------------------------------------------- boundaries

// Whether reading so much again would cost more than a transfer.
static bool is_long(const eng_prefix *prefix, int64_t read) {
    enum { PART = 4 };
    return read >= prefix->options.spacing / PART;
}

static bool may_go(const eng_prefix *prefix, const eng_snapshot *snapshot) {
    const node *at = (const node *)(uintptr_t)snapshot->mark;
    return at && snapshot->session.pool && snapshot->references == 1 && at->boundary->references == 1 &&
           !at->boundary->used && !is_long(prefix, snapshot->read);
}

// Of the states on the device that are not worth a transfer the one used least recently. False: there is none.
static bool drop_cheap(eng_prefix *prefix) {
    eng_snapshot *snapshot = eng_snapshots_oldest(prefix->options.snapshots);
    while (snapshot && !may_go(prefix, snapshot))
        snapshot = snapshot->next;
    if (!snapshot)
        return false;
    drop_boundary(prefix, (node *)(uintptr_t)snapshot->mark);
    prefix->evictions++;
    return true;
}

bool eng_prefix_spill(eng_prefix *prefix) {
    return drop_cheap(prefix) || eng_snapshots_spill(prefix->options.snapshots);
}

// On the device if a slot is free, where pages are shared; else on the host.
static eng_snapshot *copy_state(eng_prefix *prefix, const eng_session *session, bool to_host) {
    eng_session copy = {0};
    eng_status status;
    do
        status = eng_session_fork(session, prefix->options.stream, session->read, &copy, NULL);
    while (status == ENG_FULL && eng_prefix_spill(prefix));
    if (status != ENG_OK)
        return to_host ? eng_snapshot_copy(prefix->options.snapshots, session) : NULL;
    copy.tail_count = 0;
    eng_snapshot *snapshot = eng_snapshot_keep(prefix->options.snapshots, &copy);
    eng_session_close(&copy);
    return snapshot;
}

static eng_snapshot *take_state(eng_prefix *prefix, const node *at, const eng_session *session, eng_want want) {
    const uint64_t bytes = eng_snapshot_bytes(prefix->options.snapshots, session->read);
    const bool keeps = at && bytes <= prefix->options.budget && make_room(prefix, bytes);
    if ((!keeps && want != ENG_WANT_NEEDED) || !room_beside(prefix, bytes))
        return NULL;
    return copy_state(prefix, session, want != ENG_WANT_CHEAP || is_long(prefix, session->read));
}

eng_boundary *eng_prefix_leave(eng_prefix *prefix, const eng_chain *chain, const eng_session *session, eng_want want) {
    const node *at = eng_prefix_keeps(prefix) && chain->read == session->read ? look_up(prefix, chain->digest) : NULL;
    eng_snapshot *snapshot = at && at->boundary ? at->boundary->snapshot : NULL;
    if (snapshot)
        eng_snapshot_retain(snapshot);
    else
        snapshot = take_state(prefix, at, session, want);
    return snapshot || want != ENG_WANT_NEEDED ? eng_boundary_create(session->read, snapshot) : NULL;
}

// The newest logprobs serve best, as long as they tell no less.
static void improve(eng_prefix *prefix, eng_boundary *kept, const eng_boundary *boundary) {
    eng_scores *scores = boundary->scores, *before = kept->scores;
    kept->unconverged = boundary->unconverged;
    if (!scores || scores == before || (before && before->scoring.top > scores->scoring.top) ||
        (before && before->scoring.compute && !scores->scoring.compute))
        return;
    eng_scores_retain(scores);
    count_scores(prefix, scores);
    kept->scores = scores;
    uncount_scores(prefix, before);
    eng_scores_release(before);
}

void eng_prefix_add(eng_prefix *prefix, const eng_chain *chain, eng_boundary *boundary) {
    node *at = eng_prefix_keeps(prefix) && chain->read == boundary->read ? look_up(prefix, chain->digest) : NULL;
    if (!at)
        return;
    if (at->boundary && at->boundary != boundary) {
        improve(prefix, at->boundary, boundary);
    } else if (!at->boundary && boundary->snapshot) {
        eng_boundary_retain(boundary);
        at->boundary = boundary;
        boundary->snapshot->mark = (uint64_t)(uintptr_t)at;
        prefix->states++;
        prefix->state_bytes += eng_snapshot_bytes(prefix->options.snapshots, boundary->read);
        count_scores(prefix, boundary->scores);
    }
    use(prefix, at);
    (void)make_room(prefix, 0);
}

// -------------------------------------------------------------------------------------------------------- from outside

eng_boundary *eng_prefix_at(const eng_prefix *prefix, const unsigned char digest[ENG_DIGEST_BYTES]) {
    const node *at = look_up(prefix, digest);
    return at ? at->boundary : NULL;
}

// What it takes is taken first, so that nothing of the way to it goes afterwards.
static bool has_room_for(eng_prefix *prefix, int64_t read) {
    const uint64_t bytes = eng_snapshot_bytes(prefix->options.snapshots, read),
                   way = (uint64_t)(read / prefix->options.chunk) * (sizeof(node) + 2 * sizeof(node *));
    return bytes + way <= prefix->options.budget && make_room(prefix, bytes + way) && room_beside(prefix, bytes);
}

eng_boundary *eng_prefix_bring_in(eng_prefix *prefix, const eng_chain *root, const int32_t *ids, int64_t read,
                                  const void *bytes, bool unconverged) {
    eng_chain chain = *root;
    if (!has_room_for(prefix, read))
        return NULL;
    eng_prefix_pass(prefix, &chain, ids, read);
    eng_snapshot *snapshot = chain.read == read ? eng_snapshot_read_in(prefix->options.snapshots, read, bytes) : NULL;
    eng_boundary *boundary = snapshot ? eng_boundary_create(read, snapshot) : NULL;
    if (!boundary)
        return NULL;
    boundary->unconverged = unconverged;
    eng_prefix_add(prefix, &chain, boundary);
    eng_boundary_release(boundary);
    return eng_prefix_at(prefix, chain.digest);
}
