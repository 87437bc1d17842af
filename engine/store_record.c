// SPDX-License-Identifier: Apache-2.0
// Records as bytes, their digests, and the rules of what may follow what; see store_internal.h.
//
// Nothing here knows where a record lies. What is read is compared with what was asked for before it is used: a head
// names its record, a payload has the digest that the head tells, an entry names its session and the entry before it.
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "engine/store_internal.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "records are little-endian"
#endif

static const char head_magic[8] = {'M', 'E', 'S', 'A', 'R', 'E', 'C', '1'};
static const char frame_magic[8] = {'M', 'E', 'S', 'A', 'E', 'N', 'T', '1'};

uint32_t eng_store_pieces(uint64_t payload_bytes) {
    return (uint32_t)((payload_bytes + ENG_STORE_PIECE_BYTES - 1) / ENG_STORE_PIECE_BYTES);
}

size_t eng_store_piece_bytes(uint64_t payload_bytes, uint32_t piece) {
    uint64_t rest = payload_bytes - (uint64_t)piece * ENG_STORE_PIECE_BYTES;
    return rest < ENG_STORE_PIECE_BYTES ? (size_t)rest : ENG_STORE_PIECE_BYTES;
}

// --------------------------------------------------------------------------------------------------------------- heads

eng_status eng_store_not_found(eng_error *error) {
    return eng_fail(error, ENG_NOT_FOUND, "no such record");
}

static eng_status damaged(eng_error *error, const char *what) {
    return eng_fail(error, ENG_FORMAT, "a stored record is damaged or foreign: %s", what);
}

static eng_status seal(eng_store_head *head, eng_error *error) {
    eng_status status = eng_digest_bytes(head, offsetof(eng_store_head, digest), head->digest);
    return status == ENG_OK ? ENG_OK : eng_fail(error, status, "SHA-256 failed");
}

eng_status eng_store_read_head(const void *bytes, size_t count, const eng_store_meta *of, eng_store_head *out,
                               eng_error *error) {
    eng_store_head head;
    if (count != sizeof head)
        return damaged(error, "its head has another length");
    memcpy(&head, bytes, sizeof head);
    if (memcmp(head.magic, head_magic, sizeof head_magic) != 0 || head.bytes != sizeof head)
        return damaged(error, "its head is of another form");
    unsigned char digest[ENG_DIGEST_BYTES];
    eng_status status = eng_digest_bytes(&head, offsetof(eng_store_head, digest), digest);
    if (status != ENG_OK)
        return eng_fail(error, status, "SHA-256 failed");
    if (memcmp(digest, head.digest, sizeof digest) != 0)
        return damaged(error, "its head has another digest");
    if (head.kind != (uint32_t)of->kind || memcmp(head.id, of->id, sizeof head.id) != 0)
        return damaged(error, "it is another record's");
    if (head.position < head.state_position || head.state_position < 0 || head.tail_count < 0 || head.tail_count > 1 ||
        eng_store_pieces(head.payload_bytes) > UINT32_MAX / 2)
        return damaged(error, "its head contradicts itself");
    *out = head;
    return ENG_OK;
}

void eng_store_head_meta(const eng_store_head *head, eng_store_meta *out) {
    *out = (eng_store_meta){.kind = (eng_store_kind)head->kind,
                            .position = head->position,
                            .tail_count = head->tail_count,
                            .tail = head->tail,
                            .state_position = head->state_position,
                            .payload_bytes = head->payload_bytes,
                            .created_ms = head->created_ms,
                            .expires_ms = head->expires_ms};
    memcpy(out->id, head->id, sizeof out->id);
    memcpy(out->owner, head->owner, sizeof out->owner);
    memcpy(out->fingerprint, head->fingerprint, sizeof out->fingerprint);
    memcpy(out->profile, head->profile, sizeof out->profile);
    memcpy(out->note, head->note, sizeof out->note);
    memcpy(out->payload_digest, head->payload_digest, sizeof out->payload_digest);
}

bool eng_store_over(const eng_store_head *head, int64_t now_ms) {
    return head->expires_ms != 0 && head->expires_ms <= now_ms;
}

// -------------------------------------------------------------------------------------------------------------- writes

// What every write of a PUT or APPEND tells anew.
static void describe(eng_store_head *head, const eng_store_meta *meta) {
    memcpy(head->magic, head_magic, sizeof head_magic);
    head->bytes = sizeof *head;
    head->kind = (uint32_t)meta->kind;
    memcpy(head->id, meta->id, sizeof head->id);
    memcpy(head->owner, meta->owner, sizeof head->owner);
    memcpy(head->fingerprint, meta->fingerprint, sizeof head->fingerprint);
    memcpy(head->profile, meta->profile, sizeof head->profile);
    memcpy(head->note, meta->note, sizeof head->note);
}

static void move_to(eng_store_head *head, const eng_store_meta *meta) {
    head->position = meta->position;
    head->tail_count = meta->tail_count;
    head->tail = meta->tail_count ? meta->tail : 0;
}

static eng_status plan_put(const eng_store_job *job, const eng_store_head *old, eng_store_head *next,
                           eng_error *error) {
    const eng_store_meta *meta = &job->request.meta;
    bool snapshot = meta->kind == ENG_STORE_PREFIX;
    if (old && !snapshot && meta->position < old->state_position)
        return eng_fail(error, ENG_CONFLICT,
                        "the state stands at position %" PRId64 "; one at %" PRId64 " is stored already",
                        meta->position, old->state_position);
    describe(next, meta);
    if (!old || snapshot || meta->position >= old->position)
        move_to(next, meta);
    next->state_position = meta->position;
    next->payload_bytes = job->request.buffer->length;
    memcpy(next->payload_digest, job->payload_digest, sizeof next->payload_digest);
    next->generation = job->generation;
    return ENG_OK;
}

static eng_status plan_append(const eng_store_job *job, const eng_store_head *old, eng_store_head *next, bool *same,
                              eng_error *error) {
    const eng_store_meta *meta = &job->request.meta;
    *same = old && meta->position == old->position;
    if (*same)
        return ENG_OK;
    if (old && meta->position < old->position)
        return eng_fail(error, ENG_CONFLICT,
                        "the entry ends at position %" PRId64 "; the session is at %" PRId64 " already", meta->position,
                        old->position);
    describe(next, meta);
    move_to(next, meta);
    return ENG_OK;
}

eng_status eng_store_plan(const eng_store_job *job, const eng_store_head *old, int64_t now_ms, eng_store_head *next,
                          bool *same, eng_error *error) {
    const eng_store_request *request = &job->request;
    *same = false;
    if (old && memcmp(old->owner, request->meta.owner, sizeof old->owner) != 0)
        return eng_store_not_found(error);
    if (request->op == ENG_STORE_EXPIRE && (!old || eng_store_over(old, now_ms)))
        return eng_store_not_found(error);
    if (old && request->op != ENG_STORE_EXPIRE && old->kind == ENG_STORE_SESSION &&
        memcmp(old->fingerprint, request->meta.fingerprint, sizeof old->fingerprint) != 0)
        return eng_fail(error, ENG_CONFLICT, "the session is of another model");
    memset(next, 0, sizeof *next);
    if (old)
        *next = *old;
    else
        next->created_ms = now_ms;
    next->expires_ms = request->ttl_ms ? now_ms + request->ttl_ms : 0;
    eng_status status = ENG_OK;
    if (request->op == ENG_STORE_PUT)
        status = plan_put(job, old, next, error);
    else if (request->op == ENG_STORE_APPEND)
        status = plan_append(job, old, next, same, error);
    return status == ENG_OK ? seal(next, error) : status;
}

eng_status eng_store_already(const eng_store_job *job, bool same, eng_error *error) {
    if (same)
        return ENG_OK;
    return eng_fail(error, ENG_CONFLICT, "another entry ends at position %" PRId64, job->request.meta.position);
}

bool eng_store_same_entry(const eng_store_job *job, const void *stored, size_t count) {
    size_t bytes = job->request.entry_bytes;
    return count == sizeof(eng_store_frame) + bytes &&
           memcmp((const char *)stored + sizeof(eng_store_frame), job->request.entry, bytes) == 0;
}

// Of a frame before its digest, and of the bytes behind the frame.
static eng_status frame_digest(const void *stored, size_t bytes, unsigned char out[ENG_DIGEST_BYTES]) {
    eng_digest *sum = NULL;
    eng_status status = eng_digest_begin(&sum);
    if (status == ENG_OK)
        status = eng_digest_add(sum, stored, offsetof(eng_store_frame, digest));
    if (status == ENG_OK)
        status = eng_digest_add(sum, (const char *)stored + sizeof(eng_store_frame), bytes);
    if (status == ENG_OK)
        eng_digest_end(sum, out);
    else
        eng_digest_free(sum);
    return status;
}

eng_status eng_store_frame_entry(eng_store_job *job, int64_t previous, const void **bytes, size_t *count,
                                 eng_error *error) {
    const eng_store_meta *meta = &job->request.meta;
    eng_store_frame frame = {.previous = previous, .position = meta->position, .bytes = job->request.entry_bytes};
    memcpy(frame.magic, frame_magic, sizeof frame_magic);
    memcpy(frame.id, meta->id, sizeof frame.id);
    memcpy(job->entry, &frame, sizeof frame);
    eng_status status = frame_digest(job->entry, job->request.entry_bytes,
                                     (unsigned char *)job->entry + offsetof(eng_store_frame, digest));
    *bytes = job->entry;
    *count = sizeof frame + job->request.entry_bytes;
    return status == ENG_OK ? ENG_OK : eng_fail(error, status, "SHA-256 failed");
}

// --------------------------------------------------------------------------------------------------------------- reads

eng_status eng_store_may_read(const eng_store_job *job, const eng_store_head *head, int64_t now_ms, eng_error *error) {
    static const unsigned char any[ENG_DIGEST_BYTES];
    const eng_store_meta *asked = &job->request.meta;
    if (memcmp(head->owner, asked->owner, sizeof head->owner) != 0 || eng_store_over(head, now_ms))
        return eng_store_not_found(error);
    if (memcmp(asked->fingerprint, any, sizeof any) != 0 &&
        memcmp(asked->fingerprint, head->fingerprint, sizeof head->fingerprint) != 0) {
        char found[ENG_DIGEST_HEX], wanted[ENG_DIGEST_HEX];
        eng_digest_hex(head->fingerprint, found);
        eng_digest_hex(asked->fingerprint, wanted);
        return eng_fail(error, ENG_UNSUPPORTED,
                        "the record's model, tokenizer or layout is another: fingerprint %.12s, wanted %.12s", found,
                        wanted);
    }
    return ENG_OK;
}

eng_status eng_store_room(const eng_store_job *job, const eng_store_head *head, uint64_t journal_bytes,
                          eng_error *error) {
    size_t capacity = job->request.buffer->capacity;
    if (head->payload_bytes > capacity || journal_bytes > capacity - head->payload_bytes)
        return eng_fail(error, ENG_TOO_LONG,
                        "a state of %" PRIu64 " bytes and a journal of %" PRIu64 " exceed a buffer of %zu",
                        head->payload_bytes, journal_bytes, capacity);
    return ENG_OK;
}

eng_status eng_store_check_payload(const eng_store_job *job, const eng_store_head *head, eng_error *error) {
    unsigned char digest[ENG_DIGEST_BYTES];
    if (head->payload_bytes == 0)
        return ENG_OK;
    eng_status status = eng_digest_bytes(job->request.buffer->bytes, (size_t)head->payload_bytes, digest);
    if (status != ENG_OK)
        return eng_fail(error, status, "SHA-256 failed");
    if (memcmp(digest, head->payload_digest, sizeof digest) != 0)
        return damaged(error, "its state has another digest");
    return ENG_OK;
}

eng_status eng_store_take_entry(eng_store_job *job, const eng_store_head *head, int64_t *at, const void *stored,
                                size_t count, eng_error *error) {
    eng_store_buffer *buffer = job->request.buffer;
    eng_store_frame frame;
    if (count < sizeof frame)
        return damaged(error, "an entry of its journal is cut short");
    memcpy(&frame, stored, sizeof frame);
    if (memcmp(frame.magic, frame_magic, sizeof frame_magic) != 0 || frame.bytes != count - sizeof frame)
        return damaged(error, "an entry of its journal has another length or form");
    unsigned char digest[ENG_DIGEST_BYTES];
    eng_status status = frame_digest(stored, count - sizeof frame, digest);
    if (status != ENG_OK)
        return eng_fail(error, status, "SHA-256 failed");
    if (memcmp(digest, frame.digest, sizeof digest) != 0 || memcmp(frame.id, head->id, sizeof frame.id) != 0)
        return damaged(error, "an entry of its journal has another digest");
    bool follows = *at < 0 ? frame.previous <= head->state_position && frame.position > head->state_position
                           : frame.previous == *at;
    if (!follows || frame.position <= frame.previous)
        return damaged(error, "an entry of its journal is missing");
    if (count > buffer->capacity - buffer->length)
        return damaged(error, "its journal is longer than it was");
    memcpy(buffer->bytes + buffer->length, stored, count);
    buffer->length += count;
    job->reply.journal_bytes += count;
    *at = frame.position;
    return ENG_OK;
}

eng_status eng_store_check_chain(const eng_store_head *head, int64_t at, eng_error *error) {
    return (at < 0 ? head->state_position : at) == head->position
               ? ENG_OK
               : damaged(error, "its journal does not reach its position");
}

// The next place of its list; NULL: no memory.
static eng_store_meta *next_of_list(eng_store_reply *reply, eng_error *error) {
    if (!reply->list)
        reply->list = malloc(sizeof *reply->list * ENG_STORE_PAGE);
    if (!reply->list)
        (void)eng_fail(error, ENG_NO_MEMORY, "out of memory for a list");
    return reply->list ? &reply->list[reply->count++] : NULL;
}

eng_status eng_store_list_add(eng_store_job *job, const eng_store_head *head, eng_error *error) {
    eng_store_meta *meta = next_of_list(&job->reply, error);
    if (!meta)
        return ENG_NO_MEMORY;
    eng_store_head_meta(head, meta);
    return ENG_OK;
}

eng_status eng_store_list_wish(eng_store_reply *reply, const unsigned char id[ENG_STORE_ID_BYTES],
                               const unsigned char owner[ENG_STORE_OWNER_BYTES], eng_error *error) {
    eng_store_meta *meta = next_of_list(reply, error);
    if (!meta)
        return ENG_NO_MEMORY;
    *meta = (eng_store_meta){.kind = ENG_STORE_SESSION};
    memcpy(meta->id, id, sizeof meta->id);
    memcpy(meta->owner, owner, sizeof meta->owner);
    return ENG_OK;
}

bool eng_store_next_entry(const eng_store_reply *reply, size_t *at, eng_store_entry *out) {
    eng_store_frame frame;
    if (!reply->buffer || reply->journal_bytes - *at < sizeof frame)
        return false;
    const unsigned char *bytes = reply->buffer->bytes + (reply->buffer->length - reply->journal_bytes) + *at;
    memcpy(&frame, bytes, sizeof frame);
    *out = (eng_store_entry){.position = frame.position, .bytes = bytes + sizeof frame, .length = (size_t)frame.bytes};
    *at += sizeof frame + (size_t)frame.bytes;
    return true;
}
