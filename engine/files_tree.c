// SPDX-License-Identifier: Apache-2.0
// Folders that appear at once or not at all, and the walks over trees that this needs.
//
// A checkpoint is a folder. It is filled under ".NAME.tmp" beside its place, made durable file by file, and renamed. A
// folder that it replaces is exchanged in one system call and deleted afterwards: deleting first would leave a moment
// in which a crash loses both. Walks follow no link, so a link inside a folder costs at most itself.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "engine/files.h"

#include <errno.h>
#include <fcntl.h>
#include <fts.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/files_private.h"

static size_t length_without_slashes(const char *path) {
    size_t length = strlen(path);
    while (length > 1 && path[length - 1] == '/')
        length--;
    return length;
}

// Splits "A/B/NAME///" into new "A/B" (or "." or "/") and new "NAME".
static eng_status split_path(const char *path, char **parent, char **name, eng_error *error) {
    size_t length = length_without_slashes(path);
    const char *slash = memrchr(path, '/', length);
    const char *base = slash ? slash + 1 : path;
    size_t base_length = (size_t)(path + length - base);
    *parent = NULL;
    *name = NULL;
    if (base_length == 0 || (base_length <= 2 && memcmp(base, "..", base_length) == 0))
        return eng_fail(error, ENG_INVALID, "'%s': names no file or folder of its own", eng_path_tail(path));
    *name = strndup(base, base_length);
    if (!slash)
        *parent = strdup(".");
    else
        *parent = slash == path ? strdup("/") : strndup(path, (size_t)(slash - path));
    if (*name && *parent)
        return ENG_OK;
    free(*name);
    free(*parent);
    return eng_fail(error, ENG_NO_MEMORY, "%s: no memory", eng_path_tail(path));
}

static eng_status fsync_path(const char *path, int flags, eng_error *error) {
    int fd = open(path, O_RDONLY | O_CLOEXEC | flags);
    if (fd < 0)
        return eng_fail_errno(error, path, "open");
    eng_status status = ENG_OK;
    // EINVAL: this kind of file system has no fsync for folders; there is nothing more to do for it.
    if (fsync(fd) != 0 && !(errno == EINVAL && (flags & O_DIRECTORY)))
        status = eng_fail_errno(error, path, "fsync");
    close(fd);
    return status;
}

eng_status eng_fsync_dir(const char *path, eng_error *error) {
    return fsync_path(path, O_DIRECTORY, error);
}

eng_status eng_fsync_parent(const char *path, eng_error *error) {
    char *parent, *name;
    eng_status status = split_path(path, &parent, &name, error);
    if (status != ENG_OK)
        return status;
    status = eng_fsync_dir(parent, error);
    free(parent);
    free(name);
    return status;
}

eng_status eng_make_folder(const char *path, bool *made, eng_error *error) {
    struct stat facts;
    const bool fresh = mkdir(path, 0777) == 0;
    if (made)
        *made = fresh;
    if (fresh)
        return ENG_OK;
    if (errno != EEXIST)
        return eng_fail_errno(error, path, "make");
    if (stat(path, &facts) != 0 || !S_ISDIR(facts.st_mode))
        return eng_fail(error, ENG_INVALID, "%s: not a folder", eng_path_tail(path));
    return ENG_OK;
}

typedef eng_status (*visit_fn)(const FTSENT *entry, eng_error *error);

static eng_status walk(const char *path, visit_fn visit, eng_error *error) {
    char *roots[] = {(char *)path, NULL};
    FTS *tree = fts_open(roots, FTS_PHYSICAL | FTS_NOCHDIR, NULL);
    if (!tree)
        return eng_fail_errno(error, path, "walk");
    eng_status status = ENG_OK;
    while (status == ENG_OK) {
        errno = 0;
        FTSENT *entry = fts_read(tree);
        if (!entry) {
            if (errno != 0)
                status = eng_fail_errno(error, path, "walk");
            break;
        }
        status = visit(entry, error);
    }
    fts_close(tree);
    return status;
}

static eng_status visit_fault(const FTSENT *entry, eng_error *error) {
    errno = entry->fts_errno;
    return eng_fail_errno(error, entry->fts_path, "walk");
}

static eng_status fsync_visited(const FTSENT *entry, eng_error *error) {
    switch (entry->fts_info) {
    case FTS_F:
        return fsync_path(entry->fts_path, O_NOFOLLOW, error);
    case FTS_DP: // after all that it holds
        return fsync_path(entry->fts_path, O_DIRECTORY | O_NOFOLLOW, error);
    case FTS_DNR:
    case FTS_ERR:
    case FTS_NS:
        return visit_fault(entry, error);
    default:
        return ENG_OK;
    }
}

static eng_status remove_visited(const FTSENT *entry, eng_error *error) {
    switch (entry->fts_info) {
    case FTS_D:
        return ENG_OK;
    case FTS_NS:
        if (entry->fts_level == FTS_ROOTLEVEL && entry->fts_errno == ENOENT)
            return ENG_OK;
        return visit_fault(entry, error);
    case FTS_DNR:
    case FTS_ERR:
        return visit_fault(entry, error);
    default:
        if (remove(entry->fts_accpath) != 0 && errno != ENOENT)
            return eng_fail_errno(error, entry->fts_path, "remove");
        return ENG_OK;
    }
}

eng_status eng_remove_tree(const char *path, eng_error *error) {
    return walk(path, remove_visited, error);
}

eng_status eng_make_temp_dir(const char *path, char **temp, eng_error *error) {
    *temp = NULL;
    char *parent, *name, *made = NULL;
    eng_status status = split_path(path, &parent, &name, error);
    if (status != ENG_OK)
        return status;
    if (asprintf(&made, "%s/.%s.tmp", parent, name) < 0) {
        made = NULL;
        status = eng_fail(error, ENG_NO_MEMORY, "%s: no memory", eng_path_tail(path));
        goto out;
    }
    status = eng_remove_tree(made, error);
    if (status == ENG_OK && mkdir(made, 0777) != 0)
        status = eng_fail_errno(error, made, "create");
    if (status == ENG_OK) {
        *temp = made;
        made = NULL;
    }
out:
    free(made);
    free(name);
    free(parent);
    return status;
}

// Puts temp in the place of the folder at path; the old one is then found under temp's name.
static eng_status exchange(const char *temp, const char *path, eng_error *error) {
    if (renameat2(AT_FDCWD, temp, AT_FDCWD, path, RENAME_EXCHANGE) == 0)
        return ENG_OK;
    if (errno == EINVAL || errno == ENOSYS) {
        return eng_fail(error, ENG_UNSUPPORTED, "%s: exists, and this file system cannot exchange folders",
                        eng_path_tail(path));
    }
    return eng_fail_errno(error, path, "exchange");
}

eng_status eng_commit_temp_dir(const char *temp, const char *path, eng_error *error) {
    eng_status status = walk(temp, fsync_visited, error);
    if (status != ENG_OK)
        return status;
    struct stat facts;
    bool replaces = lstat(path, &facts) == 0;
    if (replaces && !S_ISDIR(facts.st_mode))
        return eng_fail(error, ENG_INVALID, "%s: exists and is not a folder", eng_path_tail(path));
    if (replaces)
        status = exchange(temp, path, error);
    else if (rename(temp, path) != 0)
        status = eng_fail_errno(error, path, "rename the new folder");
    if (status == ENG_OK)
        status = eng_fsync_parent(path, error);
    if (status == ENG_OK && replaces)
        status = eng_remove_tree(temp, error);
    return status;
}
