// SPDX-License-Identifier: Apache-2.0
// What files.c and files_tree.c share; nobody else includes it.
//
// Both turn errno into the one error convention and both make a new name durable by an fsync of the folder that
// holds it.
#ifndef ENGINE_FILES_PRIVATE_H
#define ENGINE_FILES_PRIVATE_H

#include "engine/status.h"

// Reports errno as "PATH: cannot WHAT: ...".
eng_status eng_fail_errno(eng_error *error, const char *path, const char *what);

// Fsyncs the folder that holds path.
ENG_CHECKED eng_status eng_fsync_parent(const char *path, eng_error *error);

#endif
