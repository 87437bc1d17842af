// SPDX-License-Identifier: Apache-2.0
// Timelines as bytes; see state.h.
//
// Nothing in the bytes is believed: sizes are compared with the pool's before anything is read by them, then the
// digest, then what the runs and ids say.
#include "engine/state.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "engine/forward.h"

enum { VERSION = 6, PROFILE_CHANGED = 1 };

static const int64_t max_position = (int64_t)1 << 36; // keeps all sizes below 2^63

static const char magic[8] = "MESASTAT";

typedef struct header {
    char magic[8];
    uint32_t version, header_bytes;
    unsigned char fingerprint[ENG_DIGEST_BYTES], profile[ENG_DIGEST_BYTES];
    uint64_t storage; // kern_storage
    uint64_t slot_bytes, page_bytes;
    int64_t begin, read, position;
    int64_t runs;
    int64_t at[ENG_STATE_PARTS];
    uint32_t states, flags;
    unsigned char digest[ENG_DIGEST_BYTES]; // of the header before it, and of what follows the header
} header;

typedef struct stored_run {
    int64_t end;
    uint32_t kind, cg_mode;
    float cg_tolerance;
    int32_t cg_max_steps;
    float exit_threshold;
    int32_t max_loops;
} stored_run;

_Static_assert(sizeof(header) == 192 && offsetof(header, digest) == 160, "no padding");
_Static_assert(sizeof(stored_run) == 32 && sizeof(float) == 4, "no padding");
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "states are little-endian"
#endif

// Of slot and pages that a session of `read` tokens fills.
static size_t content_bytes(const eng_pool *pool, int64_t read) {
    return eng_pool_slot_stride(pool) + (size_t)eng_pool_pages_for(pool, read) * eng_pool_page_stride(pool);
}

// Of the content of a part; behind the last the bytes end.
static size_t content_offset(const eng_pool *pool, const eng_state *state, int32_t part) {
    const size_t ids = (size_t)(state->position - state->begin);
    size_t offset = sizeof(header) + sizeof(stored_run) * (size_t)state->runs + (sizeof(int32_t) * ids + 7) / 8 * 8;
    for (int32_t i = 0; i < part; i++)
        offset += content_bytes(pool, state->at[i]);
    return offset;
}

size_t eng_state_measure(const eng_pool *pool, const eng_state *state) {
    return content_offset(pool, state, state->states);
}

void *eng_state_content(const eng_pool *pool, const eng_state *state, int32_t part, void *out) {
    return (char *)out + content_offset(pool, state, part);
}

static eng_status digest(const void *bytes, size_t count, unsigned char out[ENG_DIGEST_BYTES]) {
    eng_digest *sum = NULL;
    eng_status status = eng_digest_begin(&sum);
    if (status == ENG_OK)
        status = eng_digest_add(sum, bytes, offsetof(header, digest));
    if (status == ENG_OK)
        status = eng_digest_add(sum, (const char *)bytes + sizeof(header), count - sizeof(header));
    if (status == ENG_OK)
        eng_digest_end(sum, out);
    else
        eng_digest_free(sum);
    return status;
}

static void write_runs(const eng_state *state, char *to) {
    for (int32_t i = 0; i < state->runs; i++) {
        const eng_run *run = &state->run[i];
        const stored_run stored = {.end = run->end,
                                   .kind = (uint32_t)run->kind,
                                   .cg_mode = (uint32_t)run->knobs.cg_mode,
                                   .cg_tolerance = run->knobs.cg_tolerance,
                                   .cg_max_steps = run->knobs.cg_max_steps,
                                   .exit_threshold = run->knobs.exit_threshold,
                                   .max_loops = run->knobs.max_loops};
        memcpy(to + sizeof stored * (size_t)i, &stored, sizeof stored);
    }
}

void eng_state_write(const eng_pool *pool, const eng_state_key *key, const eng_state *state, void *out) {
    header head = {.version = VERSION,
                   .header_bytes = sizeof(header),
                   .storage = (uint64_t)eng_pool_storage(pool),
                   .slot_bytes = eng_pool_slot_stride(pool),
                   .page_bytes = eng_pool_page_stride(pool),
                   .begin = state->begin,
                   .read = state->read,
                   .position = state->position,
                   .runs = state->runs,
                   .states = (uint32_t)state->states,
                   .flags = state->profile_changed ? PROFILE_CHANGED : 0};
    char *ids = (char *)out + sizeof head + sizeof(stored_run) * (size_t)state->runs;
    const size_t id_bytes = sizeof *state->ids * (size_t)(state->position - state->begin);
    memcpy(head.magic, magic, sizeof magic);
    memcpy(head.fingerprint, key->fingerprint, sizeof head.fingerprint);
    memcpy(head.profile, key->profile, sizeof head.profile);
    for (int32_t i = 0; i < state->states; i++)
        head.at[i] = state->at[i];
    memcpy(out, &head, sizeof head);
    write_runs(state, (char *)out + sizeof head);
    memset(ids, 0, (size_t)((char *)eng_state_content(pool, state, 0, out) - ids));
    if (id_bytes > 0)
        memcpy(ids, state->ids, id_bytes);
}

eng_status eng_state_seal(const eng_pool *pool, const eng_state *state, void *out, eng_error *error) {
    eng_status status = digest(out, eng_state_measure(pool, state), (unsigned char *)out + offsetof(header, digest));
    return status == ENG_OK ? ENG_OK : eng_fail(error, status, "out of memory for a digest");
}

void eng_state_read_digest(const void *bytes, unsigned char digest[ENG_DIGEST_BYTES]) {
    memcpy(digest, (const char *)bytes + offsetof(header, digest), ENG_DIGEST_BYTES);
}

// -------------------------------------------------------------------------------------------------------------- in

static const char *storage_name(uint64_t storage) {
    return storage == KERN_STORE_F32 ? "float32" : storage == KERN_STORE_BF16 ? "bf16" : "something unknown";
}

static eng_status check_kind(const eng_pool *pool, const eng_state_key *key, const header *head, eng_error *error) {
    const size_t slot = eng_pool_slot_stride(pool), page = eng_pool_page_stride(pool);
    if (memcmp(head->magic, magic, sizeof magic) != 0)
        return eng_fail(error, ENG_FORMAT, "these bytes are no state");
    if (head->version != VERSION || head->header_bytes != sizeof *head)
        return eng_fail(error, ENG_UNSUPPORTED, "a state of version %" PRIu32 ", this is version %d", head->version,
                        VERSION);
    if (memcmp(head->fingerprint, key->fingerprint, sizeof head->fingerprint) != 0)
        return eng_fail(error, ENG_UNSUPPORTED, "a state of another model or tokenizer");
    if (head->storage != (uint64_t)eng_pool_storage(pool))
        return eng_fail(error, ENG_UNSUPPORTED, "a state stored as %s, this model stores %s",
                        storage_name(head->storage), storage_name((uint64_t)eng_pool_storage(pool)));
    if (head->slot_bytes != slot || head->page_bytes != page)
        return eng_fail(error, ENG_UNSUPPORTED,
                        "a state of %" PRIu64 " bytes and pages of %" PRIu64 ", this model has %zu and %zu",
                        head->slot_bytes, head->page_bytes, slot, page);
    return ENG_OK;
}

static bool are_ordered(const header *head) {
    int64_t after = head->begin > 0 ? head->begin - 1 : 0;
    if (head->states > ENG_STATE_PARTS)
        return false;
    for (uint32_t i = 0; i < ENG_STATE_PARTS; i++) {
        if (i < head->states ? head->at[i] <= after || head->at[i] > head->read : head->at[i] != 0)
            return false;
        after = head->at[i];
    }
    return true;
}

// Sizes that the bytes can have, before anything is found by them.
static bool is_sane(const header *head, size_t count) {
    const bool ordered = head->begin >= 0 && head->read >= head->begin && head->position >= head->read &&
                         head->position <= max_position && head->position - head->read <= 1;
    return ordered && are_ordered(head) && head->flags <= PROFILE_CHANGED && head->runs >= 0 &&
           head->runs <= head->position - head->begin && (uint64_t)head->runs <= count / sizeof(stored_run) &&
           (head->runs > 0 || head->position == head->begin);
}

static eng_state lengths_of(const header *head) {
    eng_state state = {.begin = head->begin,
                       .read = head->read,
                       .position = head->position,
                       .runs = (int32_t)head->runs,
                       .states = (int32_t)head->states};
    memcpy(state.at, head->at, sizeof state.at);
    return state;
}

static bool is_run(const stored_run *stored, int64_t begin) {
    return stored->end > begin && (stored->kind == KERN_ROW_PROMPT || stored->kind == KERN_ROW_GENERATED) &&
           stored->cg_mode <= ENG_CG_EXACT && stored->cg_tolerance >= 0 && stored->cg_tolerance <= 1 &&
           stored->cg_max_steps >= 0 && stored->cg_max_steps <= 256 && stored->exit_threshold >= 0 &&
           stored->exit_threshold <= 1 && stored->max_loops >= 1;
}

static bool read_runs(const header *head, const char *from, eng_run *run) {
    int64_t begin = head->begin;
    for (int64_t i = 0; i < head->runs; i++) {
        stored_run stored;
        memcpy(&stored, from + sizeof stored * (size_t)i, sizeof stored);
        if (!is_run(&stored, begin))
            return false;
        begin = stored.end;
        run[i] = (eng_run){.end = stored.end,
                           .kind = (kern_row_kind)stored.kind,
                           .knobs = {.cg_mode = (eng_cg_mode)stored.cg_mode,
                                     .cg_tolerance = stored.cg_tolerance,
                                     .cg_max_steps = stored.cg_max_steps,
                                     .exit_threshold = stored.exit_threshold,
                                     .max_loops = stored.max_loops}};
    }
    // Only what was generated may wait.
    return begin == head->position && (head->read == begin || run[head->runs - 1].kind == KERN_ROW_GENERATED);
}

static bool are_ids(const int32_t *ids, int64_t count, int32_t vocab) {
    for (int64_t i = 0; i < count; i++)
        if (ids[i] < 0 || ids[i] >= vocab)
            return false;
    return true;
}

static eng_status check(const eng_pool *pool, const eng_state_key *key, bool sealed, const void *bytes, size_t count,
                        header *head, eng_error *error) {
    if (count < sizeof *head)
        return eng_fail(error, ENG_FORMAT, "a state of %zu bytes is shorter than its header", count);
    memcpy(head, bytes, sizeof *head);
    eng_status status = check_kind(pool, key, head, error);
    if (status != ENG_OK)
        return status;
    if (!is_sane(head, count))
        return eng_fail(error, ENG_FORMAT, "a state's header contradicts itself");
    const eng_state lengths = lengths_of(head);
    if (count != eng_state_measure(pool, &lengths))
        return eng_fail(error, ENG_FORMAT, "a state of %zu bytes does not hold what its header says", count);
    unsigned char found[ENG_DIGEST_BYTES];
    if (!sealed)
        return ENG_OK;
    status = digest(bytes, count, found);
    if (status != ENG_OK)
        return eng_fail(error, status, "out of memory for a digest");
    return memcmp(found, head->digest, sizeof found) == 0 ? ENG_OK
                                                          : eng_fail(error, ENG_FORMAT, "a state's digest is wrong");
}

eng_status eng_state_open(const eng_pool *pool, const eng_state_key *key, int32_t vocab, bool sealed, const void *bytes,
                          size_t count, eng_state *out, eng_run **run, eng_error *error) {
    header head;
    eng_status status = check(pool, key, sealed, bytes, count, &head, error);
    if (status != ENG_OK)
        return status;
    const char *runs = (const char *)bytes + sizeof head;
    const int32_t *ids = (const int32_t *)(const void *)(runs + sizeof(stored_run) * (size_t)head.runs);
    eng_run *read = malloc(sizeof *read * ((size_t)head.runs + 1));
    if (!read)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for a state's runs");
    if (!read_runs(&head, runs, read) || !are_ids(ids, head.position - head.begin, vocab)) {
        free(read);
        return eng_fail(error, ENG_FORMAT, "a state's runs or ids are none of this model");
    }
    *out = lengths_of(&head);
    out->run = read;
    out->ids = ids;
    out->profile_changed =
        (head.flags & PROFILE_CHANGED) != 0 || memcmp(head.profile, key->profile, sizeof head.profile) != 0;
    for (int32_t i = 0; i < out->states; i++)
        out->content[i] = (const char *)bytes + content_offset(pool, out, i);
    *run = read;
    return ENG_OK;
}
