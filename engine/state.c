// SPDX-License-Identifier: Apache-2.0
// Sessions as bytes; see state.h.
//
// An import believes nothing: sizes are compared with the pool's before anything is taken from it, then the digest. A
// refusal leaves the pool as it was.
#include "engine/state.h"

#include <inttypes.h>
#include <string.h>

#include "engine/forward.h"

enum { VERSION = 2 };

static const int64_t max_read = (int64_t)1 << 36; // keeps the bytes of pages below 2^63

static const char magic[8] = "MESASTAT";

typedef struct header {
    char magic[8];
    uint32_t version, header_bytes;
    unsigned char fingerprint[ENG_DIGEST_BYTES];
    uint64_t storage; // kern_storage
    uint64_t slot_bytes, page_bytes;
    int64_t read;
    int32_t tail_count, tail;
    unsigned char digest[ENG_DIGEST_BYTES]; // of the header before it, and of what follows the header
} header;

_Static_assert(sizeof(header) == 120 && offsetof(header, digest) == 88, "no padding");
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "states are little-endian"
#endif

// Of slot and pages that a session of `read` tokens fills.
static size_t content_bytes(const eng_pool *pool, int64_t read) {
    return eng_pool_slot_stride(pool) + (size_t)eng_pool_pages_for(pool, read) * eng_pool_page_stride(pool);
}

size_t eng_state_bytes(const eng_session *session) {
    return sizeof(header) + content_bytes(session->pool, session->read);
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

static kern_status download(const eng_session *session, kern_stream *stream, char *to) {
    const eng_pool *pool = session->pool;
    size_t slot = eng_pool_slot_stride(pool), page = eng_pool_page_stride(pool);
    int64_t pages = eng_pool_pages_for(pool, session->read);
    kern_status status = slot ? kern_download(stream, to, eng_pool_slot(pool, session->slot), slot) : KERN_OK;
    for (int64_t i = 0; status == KERN_OK && i < pages; i++)
        status = kern_download(stream, to + slot + (size_t)i * page, eng_pool_page(pool, session->page[i]), page);
    return status == KERN_OK ? kern_synchronize(stream) : status;
}

eng_status eng_state_export(const eng_session *session, kern_stream *stream,
                            const unsigned char fingerprint[ENG_DIGEST_BYTES], void *out, eng_error *error) {
    header head = {.version = VERSION,
                   .header_bytes = sizeof(header),
                   .storage = (uint64_t)eng_pool_storage(session->pool),
                   .slot_bytes = eng_pool_slot_stride(session->pool),
                   .page_bytes = eng_pool_page_stride(session->pool),
                   .read = session->read,
                   .tail_count = session->tail_count,
                   .tail = session->tail_count ? session->tail[0] : 0};
    memcpy(head.magic, magic, sizeof magic);
    memcpy(head.fingerprint, fingerprint, sizeof head.fingerprint);
    kern_status copied = download(session, stream, (char *)out + sizeof head);
    if (copied)
        return eng_fail_kernel(error, copied, "copying a state out");
    memcpy(out, &head, sizeof head);
    eng_status status = digest(out, eng_state_bytes(session), (unsigned char *)out + offsetof(header, digest));
    return status == ENG_OK ? ENG_OK : eng_fail(error, status, "out of memory for a digest");
}

static const char *storage_name(uint64_t storage) {
    return storage == KERN_STORE_F32 ? "float32" : storage == KERN_STORE_BF16 ? "bf16" : "something unknown";
}

static eng_status check(const eng_pool *pool, const unsigned char fingerprint[ENG_DIGEST_BYTES], const void *bytes,
                        size_t count, header *head, eng_error *error) {
    size_t slot = eng_pool_slot_stride(pool), page = eng_pool_page_stride(pool);
    if (count < sizeof *head)
        return eng_fail(error, ENG_FORMAT, "a state of %zu bytes is shorter than its header", count);
    memcpy(head, bytes, sizeof *head);
    if (memcmp(head->magic, magic, sizeof magic) != 0)
        return eng_fail(error, ENG_FORMAT, "these bytes are no state");
    if (head->version != VERSION || head->header_bytes != sizeof *head)
        return eng_fail(error, ENG_UNSUPPORTED, "a state of version %" PRIu32 ", this is version %d", head->version,
                        VERSION);
    if (memcmp(head->fingerprint, fingerprint, sizeof head->fingerprint) != 0)
        return eng_fail(error, ENG_UNSUPPORTED, "a state of another model");
    if (head->storage != (uint64_t)eng_pool_storage(pool))
        return eng_fail(error, ENG_UNSUPPORTED, "a state stored as %s, this model stores %s",
                        storage_name(head->storage), storage_name((uint64_t)eng_pool_storage(pool)));
    if (head->slot_bytes != slot || head->page_bytes != page)
        return eng_fail(error, ENG_UNSUPPORTED,
                        "a state of %" PRIu64 " bytes and pages of %" PRIu64 ", this model has %zu and %zu",
                        head->slot_bytes, head->page_bytes, slot, page);
    bool sane = head->read >= 0 && head->read <= max_read && head->tail_count >= 0 && head->tail_count <= 1;
    if (!sane || count - sizeof *head != content_bytes(pool, head->read))
        return eng_fail(error, ENG_FORMAT, "a state of %zu bytes does not hold what its header says", count);
    unsigned char found[ENG_DIGEST_BYTES];
    eng_status status = digest(bytes, count, found);
    if (status != ENG_OK)
        return eng_fail(error, status, "out of memory for a digest");
    return memcmp(found, head->digest, sizeof found) == 0 ? ENG_OK
                                                          : eng_fail(error, ENG_FORMAT, "a state's digest is wrong");
}

static kern_status upload(const eng_session *session, kern_stream *stream, const char *from) {
    const eng_pool *pool = session->pool;
    size_t slot = eng_pool_slot_stride(pool), page = eng_pool_page_stride(pool);
    kern_status status = slot ? kern_upload(stream, eng_pool_slot(pool, session->slot), from, slot) : KERN_OK;
    for (int32_t i = 0; status == KERN_OK && i < session->pages; i++)
        status = kern_upload(stream, eng_pool_page(pool, session->page[i]), from + slot + (size_t)i * page, page);
    return status == KERN_OK ? kern_synchronize(stream) : status;
}

eng_status eng_state_import(eng_pool *pool, kern_stream *stream, int64_t max_length,
                            const unsigned char fingerprint[ENG_DIGEST_BYTES], const void *bytes, size_t count,
                            eng_session *out, eng_error *error) {
    header head;
    eng_session session = {0};
    eng_status status = check(pool, fingerprint, bytes, count, &head, error);
    if (status != ENG_OK)
        return status;
    if (max_length < head.read)
        return eng_fail(error, ENG_INVALID, "a session that has read %" PRId64 " tokens needs room for them",
                        head.read);
    status = eng_session_open(pool, stream, max_length, &session, error);
    if (status != ENG_OK)
        return status;
    status = eng_session_grow(&session, stream, head.read, error);
    kern_status copied = status == ENG_OK ? upload(&session, stream, (const char *)bytes + sizeof head) : KERN_OK;
    if (copied)
        status = eng_fail_kernel(error, copied, "copying a state in");
    if (status != ENG_OK) {
        eng_session_close(&session);
        return status;
    }
    session.read = head.read;
    session.tail[0] = head.tail;
    session.tail_count = head.tail_count;
    *out = session;
    return ENG_OK;
}
