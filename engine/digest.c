// SPDX-License-Identifier: Apache-2.0
// SHA-256 by GnuTLS: the only file of the engine that knows that library.
//
// Owns nothing beyond the running hash. A file is read in pieces of 1 MiB through the descriptor, so a file that is
// rewritten in the meantime gives an error or a digest that does not match, never a fault. Any thread, one at a time
// a digest.
#include "engine/digest.h"

#include <gnutls/crypto.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

#include "engine/files.h"

enum { PIECE = 1 << 20 };

struct eng_digest {
    gnutls_hash_hd_t hash;
};

eng_status eng_digest_begin(eng_digest **out) {
    *out = NULL;
    eng_digest *digest = malloc(sizeof *digest);
    if (!digest)
        return ENG_NO_MEMORY;
    if (gnutls_hash_init(&digest->hash, GNUTLS_DIG_SHA256) != 0) {
        free(digest);
        return ENG_INTERNAL;
    }
    *out = digest;
    return ENG_OK;
}

eng_status eng_digest_add(eng_digest *digest, const void *data, size_t length) {
    return length == 0 || gnutls_hash(digest->hash, data, length) == 0 ? ENG_OK : ENG_INTERNAL;
}

void eng_digest_end(eng_digest *digest, unsigned char out[ENG_DIGEST_BYTES]) {
    gnutls_hash_deinit(digest->hash, out);
    free(digest);
}

void eng_digest_free(eng_digest *digest) {
    if (!digest)
        return;
    gnutls_hash_deinit(digest->hash, NULL);
    free(digest);
}

eng_status eng_digest_bytes(const void *data, size_t length, unsigned char out[ENG_DIGEST_BYTES]) {
    return gnutls_hash_fast(GNUTLS_DIG_SHA256, data, length, out) == 0 ? ENG_OK : ENG_INTERNAL;
}

static eng_status add_file(eng_digest *digest, int fd, uint64_t size, const char *path, eng_error *error) {
    unsigned char *piece = malloc(PIECE);
    if (!piece)
        return eng_fail(error, ENG_NO_MEMORY, "%s: no memory", eng_path_tail(path));
    eng_status status = ENG_OK;
    for (uint64_t at = 0; at < size && status == ENG_OK; at += PIECE) {
        size_t length = size - at < PIECE ? (size_t)(size - at) : PIECE;
        status = eng_read_at(fd, path, at, piece, length, error);
        if (status == ENG_OK && eng_digest_add(digest, piece, length) != ENG_OK)
            status = eng_fail(error, ENG_INTERNAL, "%s: SHA-256 failed", eng_path_tail(path));
    }
    free(piece);
    return status;
}

eng_status eng_digest_file(const char *path, unsigned char out[ENG_DIGEST_BYTES], eng_error *error) {
    int fd;
    uint64_t size;
    eng_status status = eng_open_regular(path, &fd, &size, error);
    if (status != ENG_OK)
        return status;
    eng_digest *digest;
    status = eng_digest_begin(&digest);
    if (status != ENG_OK) {
        close(fd);
        return eng_fail(error, status, "%s: SHA-256 failed", eng_path_tail(path));
    }
    status = add_file(digest, fd, size, path, error);
    if (status == ENG_OK)
        eng_digest_end(digest, out);
    else
        eng_digest_free(digest);
    close(fd);
    return status;
}

void eng_digest_hex(const unsigned char digest[ENG_DIGEST_BYTES], char out[ENG_DIGEST_HEX]) {
    static const char digits[] = "0123456789abcdef";
    for (int i = 0; i < ENG_DIGEST_BYTES; i++) {
        out[2 * i] = digits[digest[i] >> 4];
        out[2 * i + 1] = digits[digest[i] & 15];
    }
    out[2 * ENG_DIGEST_BYTES] = '\0';
}
