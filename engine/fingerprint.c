// SPDX-License-Identifier: Apache-2.0
// Digests of a model's folder: first config.json, the weights and tokenizer.json, then the small files beside them.
//
// A file that is not there counts as 32 zero bytes, so that one that comes or goes changes the digest too.
#include "engine/fingerprint.h"

#include <stdlib.h>
#include <string.h>

#include "engine/files.h"

_Static_assert((int)ENG_FINGERPRINT_BYTES == (int)ENG_DIGEST_HEX, "a fingerprint is a digest in hexadecimal digits");

static eng_status digest_optional(const char *dir, const char *name, unsigned char out[ENG_DIGEST_BYTES],
                                  eng_error *error) {
    eng_error why = {0};
    char *path = eng_join_path(dir, name);
    if (!path)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for a file's name");
    const eng_status status = eng_digest_file(path, out, &why);
    free(path);
    if (status == ENG_NOT_FOUND)
        memset(out, 0, ENG_DIGEST_BYTES);
    else if (status != ENG_OK)
        return eng_fail(error, status, "%s", why.text);
    return ENG_OK;
}

eng_status eng_fingerprint_of(const eng_checkpoint *checkpoint, const char *dir, unsigned char states[ENG_DIGEST_BYTES],
                              eng_fingerprint *out, eng_error *error) {
    static const char *const others[] = {"generation_config.json", "tokenizer_config.json", "chat_template.jinja"};
    enum { OTHERS = sizeof others / sizeof *others };
    unsigned char part[(1 + OTHERS) * ENG_DIGEST_BYTES] = {0}, whole[ENG_DIGEST_BYTES];

    eng_status status = eng_checkpoint_digest(checkpoint, part, error);
    if (status == ENG_OK)
        status = digest_optional(dir, "tokenizer.json", part + ENG_DIGEST_BYTES, error);
    if (status == ENG_OK)
        status = eng_digest_bytes(part, (size_t)2 * ENG_DIGEST_BYTES, states);
    if (status != ENG_OK)
        return status;
    memcpy(part, states, ENG_DIGEST_BYTES);
    for (size_t i = 0; i < OTHERS && status == ENG_OK; i++)
        status = digest_optional(dir, others[i], part + (1 + i) * ENG_DIGEST_BYTES, error);
    if (status == ENG_OK)
        status = eng_digest_bytes(part, sizeof part, whole);
    if (status != ENG_OK)
        return status;
    eng_digest_hex(states, out->states);
    eng_digest_hex(whole, out->whole);
    return ENG_OK;
}

eng_status eng_read_fingerprint(const char *model_dir, eng_fingerprint *out, eng_error *error) {
    eng_checkpoint *checkpoint = NULL;
    unsigned char states[ENG_DIGEST_BYTES];
    eng_status status = eng_checkpoint_open(model_dir, &checkpoint, error);
    if (status != ENG_OK)
        return status;
    status = eng_fingerprint_of(checkpoint, model_dir, states, out, error);
    eng_checkpoint_close(checkpoint);
    return status;
}
