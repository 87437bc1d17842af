// SPDX-License-Identifier: Apache-2.0
// Reading of small files. A pipe would be read to its end as well as a file, but could make the server wait for ever,
// so only regular files pass.
#include "server/file.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static eng_status read_all(int descriptor, const char *path, srv_buf *out, eng_error *error) {
    char block[4096];
    ssize_t got;

    while ((got = read(descriptor, block, sizeof block)) != 0) {
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return eng_fail(error, ENG_INVALID, "%s: %s", path, strerror(errno));
        srv_buf_append(out, block, (size_t)got);
        if (!srv_buf_ok(out))
            return eng_fail(error, ENG_INVALID, "%s: the file is larger than %zu bytes", path, out->limit);
    }
    return out->length ? ENG_OK : eng_fail(error, ENG_INVALID, "%s: the file is empty", path);
}

eng_status srv_file_read(const char *path, srv_buf *out, eng_error *error) {
    struct stat info;
    const int descriptor = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);

    if (descriptor < 0)
        return eng_fail(error, ENG_INVALID, "%s: %s", path, strerror(errno));
    eng_status status = ENG_OK;
    if (fstat(descriptor, &info) != 0)
        status = eng_fail(error, ENG_INVALID, "%s: %s", path, strerror(errno));
    else if (!S_ISREG(info.st_mode))
        status = eng_fail(error, ENG_INVALID, "%s: not a regular file", path);
    else
        status = read_all(descriptor, path, out, error);
    close(descriptor);
    return status;
}
