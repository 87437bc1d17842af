// SPDX-License-Identifier: Apache-2.0
// Questions to the store, and what comes from there; see prefix_store.h.
//
// A question lives as long as a job waits for it or the store has something of it. Its steps: which candidate is there,
// then that record. Of questions that come to the same record one fetches it, and the others find it in the tree.
#include "engine/prefix_store.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "engine/forward.h"
#include "engine/prefix_store_internal.h"

enum { REQUESTS = 64, BUFFERS = 2, PAGE_BYTES = 256 << 20, HEAD_BYTES = 4096, IDS = 1 << 20 };

// ------------------------------------------------------------------------------------------------------- create, free

// A state, the pages of a long context, and the ids; what is longer stays here.
static uint64_t buffer_bytes(const eng_prefix_store_options *options) {
    const uint64_t slot = eng_pool_slot_stride(options->pool), page = eng_pool_page_stride(options->pool);
    uint64_t pages = options->context > 0 ? (uint64_t)eng_pool_pages_for(options->pool, options->context) * page : 0;
    pages = pages < PAGE_BYTES ? pages : PAGE_BYTES;
    return slot + pages + sizeof(int32_t) * (uint64_t)IDS + HEAD_BYTES;
}

eng_status eng_prefix_store_create(const eng_prefix_store_options *options, eng_prefix_store **out, eng_error *error) {
    const eng_store_client_options client = {.requests = REQUESTS,
                                             .entry_bytes =
                                                 (uint64_t)REQUESTS * ENG_STORE_FIND_IDS * ENG_STORE_ID_BYTES,
                                             .buffers = BUFFERS,
                                             .buffer_bytes = buffer_bytes(options),
                                             .notify = options->wake,
                                             .notify_context = options->wake_context};
    eng_prefix_store *all = calloc(1, sizeof *all);
    if (!all)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for prefixes in the store");
    all->options = *options;
    all->wait_ms = ENG_PREFIX_STORE_WAIT_MS;
    eng_status status = eng_store_client_open(options->store, &client, &all->client, error);
    if (status == ENG_OK)
        *out = all;
    else
        free(all);
    return status;
}

static bool take_replies(eng_prefix_store *all);

void eng_prefix_store_free(eng_prefix_store *all) {
    const struct timespec moment = {.tv_nsec = 200000};
    if (!all)
        return;
    all->distrusted = true; // nothing is brought in any more
    while (all->underway > 0)
        if (!take_replies(all))
            nanosleep(&moment, NULL);
    for (eng_lookup *lookup = all->lookups, *next; lookup; lookup = next) {
        next = lookup->next;
        eng_lookup_release(lookup);
    }
    eng_prefix_store_drop_writes(all);
    eng_store_client_close(all->client);
    free(all);
}

// ----------------------------------------------------------------------------------------------------------- requests

eng_store_request eng_prefix_store_about(eng_store_op op, const unsigned char owner[ENG_NAME_BYTES],
                                         const unsigned char digest[ENG_DIGEST_BYTES]) {
    eng_store_request request = {.op = op, .meta = {.kind = ENG_STORE_PREFIX}};
    memcpy(request.meta.id, digest, sizeof request.meta.id);
    memcpy(request.meta.owner, owner, sizeof request.meta.owner);
    return request;
}

eng_status eng_prefix_store_ask(eng_prefix_store *all, eng_store_request *request) {
    eng_status status = eng_store_submit(all->client, request, NULL);
    all->underway += status == ENG_OK;
    return status;
}

void eng_prefix_store_delete(eng_prefix_store *all, const unsigned char owner[ENG_NAME_BYTES],
                             const unsigned char digest[ENG_DIGEST_BYTES]) {
    eng_store_request request = eng_prefix_store_about(ENG_STORE_DELETE, owner, digest);
    const eng_status asked = eng_prefix_store_ask(all, &request);
    (void)asked; // who comes upon it again tries again
}

// ---------------------------------------------------------------------------------------------------------- questions

bool eng_prefix_store_helps(const eng_prefix_store *all, int64_t present, int64_t limit) {
    return all && !all->distrusted && limit - present >= all->options.least;
}

bool eng_lookup_waits(const eng_lookup *lookup) {
    return lookup && !lookup->over;
}

void eng_lookup_release(eng_lookup *lookup) {
    if (!lookup || --lookup->references > 0)
        return;
    eng_prompt_release(lookup->prompt);
    free(lookup->id);
    free(lookup);
}

// The digests of the boundaries from `first` to the deepest.
static bool list_candidates(const eng_prefix_store *all, const eng_chain *from, int64_t first, eng_lookup *lookup) {
    eng_chain chain = *from;
    lookup->id = malloc(sizeof *lookup->id * (size_t)lookup->ids);
    while (lookup->id && chain.read < lookup->deepest) {
        if (!eng_prefix_extend(all->options.prefix, &chain, lookup->prompt->ids))
            return false;
        if (chain.read >= first)
            memcpy(lookup->id[(lookup->deepest - chain.read) / all->options.chunk], chain.digest, sizeof chain.digest);
    }
    return lookup->id != NULL;
}

static eng_lookup *make_lookup(const eng_prefix_store *all, const eng_prefix_user *user, const eng_chain *root,
                               const eng_chain *chain, int64_t present, int64_t limit) {
    const int64_t step = all->options.chunk;
    int64_t first = (present + all->options.least + step - 1) / step * step;
    const int64_t deepest = limit / step * step, most = (int64_t)ENG_STORE_FIND_IDS;
    if (first < deepest - (most - 1) * step)
        first = deepest - (most - 1) * step;
    eng_lookup *lookup = first <= deepest ? calloc(1, sizeof *lookup) : NULL;
    if (!lookup)
        return NULL;
    *lookup = (eng_lookup){.references = 1,
                           .deadline = eng_store_clock() + all->wait_ms,
                           .root = *root,
                           .prompt = user->prompt,
                           .ids = (deepest - first) / step + 1,
                           .deepest = deepest};
    memcpy(lookup->owner, user->owner, sizeof lookup->owner);
    user->prompt->references++;
    if (list_candidates(all, chain, first, lookup))
        return lookup;
    eng_lookup_release(lookup);
    return NULL;
}

static eng_lookup *same_question(const eng_prefix_store *all, const eng_lookup *asked) {
    eng_lookup *other = all->lookups;
    while (other && (other->over || memcmp(other->id[0], asked->id[0], sizeof *asked->id) != 0))
        other = other->next;
    return other;
}

static void go_on(eng_prefix_store *all, eng_lookup *lookup);

// In silence one question is asked at a time, and nobody waits for it.
eng_lookup *eng_prefix_store_look(eng_prefix_store *all, const eng_prefix_user *user, const eng_chain *root,
                                  const eng_chain *chain, int64_t present, int64_t limit) {
    if (!eng_prefix_store_helps(all, present, limit) || (all->silent && all->lookups))
        return NULL;
    eng_lookup *lookup = make_lookup(all, user, root, chain, present, limit),
               *other = lookup ? same_question(all, lookup) : NULL;
    if (!lookup)
        return NULL;
    if (other) {
        eng_lookup_release(lookup);
        other->references++;
        return other;
    }
    lookup->next = all->lookups;
    all->lookups = lookup;
    lookup->over = all->silent;
    go_on(all, lookup);
    if (lookup->over)
        return NULL;
    lookup->references++;
    return lookup;
}

static void end(eng_lookup *lookup) {
    lookup->step = ENG_LOOKUP_DONE;
    lookup->over = true;
}

static void submit(eng_prefix_store *all, eng_lookup *lookup, eng_store_request *request) {
    request->user = lookup;
    const eng_status status = eng_prefix_store_ask(all, request);
    lookup->asked = status == ENG_OK;
    if (lookup->asked)
        return;
    if (request->buffer)
        eng_store_return_buffer(all->client, request->buffer);
    if (status != ENG_FULL)
        end(lookup);
}

static void find(eng_prefix_store *all, eng_lookup *lookup) {
    eng_store_request request = eng_prefix_store_about(ENG_STORE_FIND, lookup->owner, lookup->id[0]);
    request.entry = lookup->id;
    request.entry_bytes = sizeof *lookup->id * (size_t)lookup->ids;
    submit(all, lookup, &request);
}

static bool is_fetched_already(const eng_prefix_store *all, const eng_lookup *lookup) {
    for (const eng_lookup *other = all->lookups; other; other = other->next)
        if (other != lookup && other->asked && other->step == ENG_LOOKUP_GET &&
            memcmp(other->id[other->chosen], lookup->id[lookup->chosen], sizeof *lookup->id) == 0)
            return true;
    return false;
}

static void fetch(eng_prefix_store *all, eng_lookup *lookup) {
    eng_store_request request = eng_prefix_store_about(ENG_STORE_GET, lookup->owner, lookup->id[lookup->chosen]);
    if (eng_prefix_at(all->options.prefix, request.meta.id)) {
        end(lookup);
        return;
    }
    if (!is_fetched_already(all, lookup) && (request.buffer = eng_store_take_buffer(all->client)) != NULL)
        submit(all, lookup, &request);
}

static void go_on(eng_prefix_store *all, eng_lookup *lookup) {
    if (lookup->asked)
        return;
    if (all->distrusted)
        end(lookup);
    if (lookup->step == ENG_LOOKUP_FIND)
        find(all, lookup);
    else if (lookup->step == ENG_LOOKUP_GET)
        fetch(all, lookup);
}

// ------------------------------------------------------------------------------------------------------------- answers

static void take_find(eng_lookup *lookup, const eng_store_reply *reply) {
    int64_t which = 0;
    while (reply->status == ENG_OK && which < lookup->ids &&
           memcmp(lookup->id[which], reply->meta.id, sizeof *lookup->id) != 0)
        which++;
    if (reply->status != ENG_OK || which == lookup->ids) {
        end(lookup);
        return;
    }
    lookup->chosen = which;
    lookup->step = ENG_LOOKUP_GET;
}

static bool is_of(const eng_state *state, const eng_lookup *lookup, int64_t read) {
    return state->begin == 0 && state->read == read && state->position == read && state->states == 1 &&
           state->at[0] == read && !state->profile_changed &&
           memcmp(state->ids, lookup->prompt->ids, sizeof *state->ids * (size_t)read) == 0;
}

static eng_status bring_in(eng_prefix_store *all, const eng_lookup *lookup, const eng_store_reply *reply,
                           eng_error *error) {
    const eng_prefix_store_options *options = &all->options;
    const int64_t read = lookup->deepest - lookup->chosen * options->chunk;
    eng_state state;
    eng_run *run;
    eng_status status = eng_state_open(options->pool, options->key, options->vocab, false, reply->buffer->bytes,
                                       (size_t)reply->meta.payload_bytes, &state, &run, error);
    if (status != ENG_OK)
        return status;
    free(run);
    if (!is_of(&state, lookup, read))
        return eng_fail(error, ENG_FORMAT, "it is of other ids");
    eng_boundary *boundary = eng_prefix_bring_in(options->prefix, &lookup->root, lookup->prompt->ids, read,
                                                 state.content[0], eng_prefix_store_was_unconverged(&reply->meta));
    if (!boundary)
        return eng_fail(error, ENG_NO_MEMORY, "no room for it");
    boundary->stored_ms = eng_store_clock();
    all->fetched++;
    return ENG_OK;
}

static void refuse(eng_prefix_store *all, const eng_lookup *lookup, const char *why) {
    all->damaged++;
    eng_log(all->options.log, ENG_LOG_WARNING,
            "a stored state of a prompt's beginning cannot be used and is deleted: %s", why);
    eng_prefix_store_delete(all, lookup->owner, lookup->id[lookup->chosen]);
}

static void take_get(eng_prefix_store *all, eng_lookup *lookup, const eng_store_reply *reply) {
    eng_error error = reply->error;
    eng_status status = reply->status;
    if (status == ENG_OK && !all->distrusted)
        status = bring_in(all, lookup, reply, &error);
    if (status == ENG_FORMAT || status == ENG_UNSUPPORTED)
        refuse(all, lookup, error.text);
    end(lookup);
}

static bool take_replies(eng_prefix_store *all) {
    bool any = false;
    for (eng_store_reply *reply; (reply = eng_store_poll(all->client)) != NULL; any = true) {
        eng_lookup *lookup = reply->user;
        all->underway--;
        if (lookup) {
            lookup->asked = false;
            all->silent = reply->status == ENG_IO;
        }
        if (reply->op == ENG_STORE_FIND)
            take_find(lookup, reply);
        else if (reply->op == ENG_STORE_GET)
            take_get(all, lookup, reply);
        else if (reply->op == ENG_STORE_PUT)
            eng_prefix_store_take_write(all, reply);
        if (reply->buffer)
            eng_store_return_buffer(all->client, reply->buffer);
        eng_store_done(all->client, reply);
    }
    return any;
}

// ---------------------------------------------------------------------------------------------------------------- poll

// Nobody waits too long.
static void look_at_clock(eng_prefix_store *all) {
    const int64_t now = all->lookups ? eng_store_clock() : 0;
    for (eng_lookup *lookup = all->lookups; lookup; lookup = lookup->next)
        if (!lookup->over && now >= lookup->deadline)
            lookup->over = all->silent = true;
}

static void forget_done(eng_prefix_store *all) {
    for (eng_lookup **place = &all->lookups, *lookup; (lookup = *place) != NULL;) {
        if (lookup->step != ENG_LOOKUP_DONE) {
            place = &lookup->next;
            continue;
        }
        *place = lookup->next;
        eng_lookup_release(lookup);
    }
}

void eng_prefix_store_poll(eng_prefix_store *all, bool quiet, bool *worked) {
    if (!all)
        return;
    const bool replied = take_replies(all);
    *worked |= replied;
    for (eng_lookup *lookup = all->lookups; lookup; lookup = lookup->next)
        go_on(all, lookup);
    look_at_clock(all);
    forget_done(all);
    eng_prefix_store_write(all, quiet);
}

int64_t eng_prefix_store_idle_ms(const eng_prefix_store *all) {
    if (!all)
        return -1;
    int64_t at = eng_prefix_store_write_at(all);
    for (const eng_lookup *lookup = all->lookups; lookup; lookup = lookup->next)
        if (!lookup->over && lookup->deadline < at)
            at = lookup->deadline;
    if (at == INT64_MAX)
        return -1;
    const int64_t now = eng_store_clock();
    return at > now ? at - now : 0;
}

void eng_prefix_store_distrust(eng_prefix_store *all, const unsigned char owner[ENG_NAME_BYTES],
                               const unsigned char digest[ENG_DIGEST_BYTES]) {
    if (!all)
        return;
    all->distrusted = true;
    eng_prefix_store_delete(all, owner, digest);
}

void eng_prefix_store_gauges(const eng_prefix_store *all, eng_gauges *out) {
    if (!all)
        return;
    out->prefix_stored = all->stored;
    out->prefix_fetched = all->fetched;
    out->prefix_damaged = all->damaged;
}
