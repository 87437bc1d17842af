// SPDX-License-Identifier: Apache-2.0
// Reading whole files, and single files that appear at once or not at all; folders are in files_tree.c.
//
// Order of a durable write: data, fsync of the file, rename, fsync of the folder. An fsync that fails is final: the
// kernel may have dropped the pages, so it is reported and never repeated.
// Every descriptor is close-on-exec. Reads and writes go in pieces below 2 GiB, the kernel's limit for one call.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "engine/files.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/files_private.h"

enum { MAX_PIECE = 1 << 30, MAX_PATH_SHOWN = 96 };

struct eng_output {
    int fd;
    char *path;
    char *temp;
};

const char *eng_path_tail(const char *path) {
    size_t length = strlen(path);
    return length > MAX_PATH_SHOWN ? path + length - MAX_PATH_SHOWN : path;
}

char *eng_join_path(const char *folder, const char *name) {
    size_t length = strlen(folder);
    const char *separator = length == 0 || folder[length - 1] == '/' ? "" : "/";
    char *path = NULL;
    return asprintf(&path, "%s%s%s", folder, separator, name) < 0 ? NULL : path;
}

eng_status eng_fail_errno(eng_error *error, const char *path, const char *what) {
    eng_status code = errno == ENOENT || errno == ENOTDIR ? ENG_NOT_FOUND : errno == ENOMEM ? ENG_NO_MEMORY : ENG_IO;
    return eng_fail(error, code, "%s: cannot %s: %m", eng_path_tail(path), what);
}

eng_status eng_open_regular(const char *path, int *fd, uint64_t *size, eng_error *error) {
    *fd = -1;
    // O_NONBLOCK: opening a pipe must not wait for its writer. It has no effect on regular files.
    int opened = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (opened < 0)
        return eng_fail_errno(error, path, "open");
    struct stat facts;
    eng_status status = ENG_OK;
    if (fstat(opened, &facts) != 0)
        status = eng_fail_errno(error, path, "stat");
    else if (!S_ISREG(facts.st_mode))
        status = eng_fail(error, ENG_INVALID, "%s: not a regular file", eng_path_tail(path));
    if (status != ENG_OK) {
        close(opened);
        return status;
    }
    *fd = opened;
    *size = (uint64_t)facts.st_size;
    return ENG_OK;
}

eng_status eng_read_at(int fd, const char *path, uint64_t offset, void *destination, size_t length, eng_error *error) {
    unsigned char *to = destination;
    while (length > 0) {
        ssize_t got = pread(fd, to, length < MAX_PIECE ? length : MAX_PIECE, (off_t)offset);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return eng_fail_errno(error, path, "read");
        if (got == 0) {
            return eng_fail(error, ENG_IO, "%s: ends at byte %llu, %zu more were expected", eng_path_tail(path),
                            (unsigned long long)offset, length);
        }
        to += got;
        offset += (uint64_t)got;
        length -= (size_t)got;
    }
    return ENG_OK;
}

eng_status eng_read_file(const char *path, size_t limit, char **data, size_t *length, eng_error *error) {
    *data = NULL;
    *length = 0;
    int fd = -1;
    uint64_t size = 0;
    eng_status status = eng_open_regular(path, &fd, &size, error);
    if (status != ENG_OK)
        return status;
    char *bytes = NULL;
    if (size > limit) {
        status = eng_fail(error, ENG_TOO_LONG, "%s: %llu bytes, the limit is %zu", eng_path_tail(path),
                          (unsigned long long)size, limit);
        goto out;
    }
    bytes = malloc((size_t)size + 1);
    if (!bytes) {
        status = eng_fail(error, ENG_NO_MEMORY, "%s: no memory for %llu bytes", eng_path_tail(path),
                          (unsigned long long)size);
        goto out;
    }
    status = eng_read_at(fd, path, 0, bytes, (size_t)size, error);
    if (status != ENG_OK)
        goto out;
    bytes[size] = '\0';
    *data = bytes;
    *length = (size_t)size;
    bytes = NULL;
out:
    free(bytes);
    close(fd);
    return status;
}

static void output_free(eng_output *output) {
    free(output->temp);
    free(output->path);
    free(output);
}

eng_status eng_output_open(const char *path, eng_output **out, eng_error *error) {
    struct stat facts;
    *out = NULL;
    if (stat(path, &facts) == 0 && !S_ISREG(facts.st_mode)) // a rename would replace a device by a file
        return eng_fail(error, ENG_INVALID, "%s: not a regular file, so no file can take its place",
                        eng_path_tail(path));
    eng_output *output = calloc(1, sizeof *output);
    if (!output)
        return eng_fail(error, ENG_NO_MEMORY, "%s: no memory", eng_path_tail(path));
    output->path = strdup(path);
    if (asprintf(&output->temp, "%s.tmp", path) < 0)
        output->temp = NULL;
    if (!output->path || !output->temp) {
        output_free(output);
        return eng_fail(error, ENG_NO_MEMORY, "%s: no memory", eng_path_tail(path));
    }
    // Remove and create anew rather than truncate: what a link or a second name points to stays whole.
    unlink(output->temp);
    output->fd = open(output->temp, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (output->fd < 0) {
        eng_status status = eng_fail_errno(error, output->temp, "create");
        output_free(output);
        return status;
    }
    *out = output;
    return ENG_OK;
}

eng_status eng_output_write(eng_output *output, const void *data, size_t length, eng_error *error) {
    const unsigned char *from = data;
    while (length > 0) {
        ssize_t put = write(output->fd, from, length < MAX_PIECE ? length : MAX_PIECE);
        if (put < 0 && errno == EINTR)
            continue;
        if (put < 0)
            return eng_fail_errno(error, output->temp, "write");
        from += put;
        length -= (size_t)put;
    }
    return ENG_OK;
}

void eng_output_discard(eng_output *output) {
    if (!output)
        return;
    close(output->fd);
    unlink(output->temp);
    output_free(output);
}

eng_status eng_output_commit(eng_output *output, eng_error *error) {
    eng_status status = ENG_OK;
    if (fsync(output->fd) != 0)
        status = eng_fail_errno(error, output->temp, "fsync");
    if (close(output->fd) != 0 && status == ENG_OK)
        status = eng_fail_errno(error, output->temp, "close");
    if (status == ENG_OK && rename(output->temp, output->path) != 0)
        status = eng_fail_errno(error, output->path, "rename the new file");
    if (status == ENG_OK)
        status = eng_fsync_parent(output->path, error);
    else
        unlink(output->temp);
    output_free(output);
    return status;
}

eng_status eng_write_file_atomic(const char *path, const void *data, size_t length, eng_error *error) {
    eng_output *output;
    eng_status status = eng_output_open(path, &output, error);
    if (status != ENG_OK)
        return status;
    status = eng_output_write(output, data, length, error);
    if (status != ENG_OK) {
        eng_output_discard(output);
        return status;
    }
    return eng_output_commit(output, error);
}
