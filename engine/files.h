// SPDX-License-Identifier: Apache-2.0
// Whole-file reading with a limit, and files and folders that appear at once or not at all.
//
// Everything durable that this program writes goes through here: write aside, fsync, rename, fsync the parent folder. A
// reader, and a machine that loses power, sees the old content or the new, never a part. One writer a path.
// All functions block on the disk, so none belongs on an event loop's thread; they share no state.
// Errors name the path: ENG_NOT_FOUND when there is none, ENG_IO with the system's words otherwise.
#ifndef ENGINE_FILES_H
#define ENGINE_FILES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/status.h"

// The end of a path, short enough to leave room for the fault in an error text. Borrows.
const char *eng_path_tail(const char *path);

// "FOLDER/NAME"; an empty folder gives NAME. Returns new (free); NULL: out of memory.
char *eng_join_path(const char *folder, const char *name);

// Opens a regular file (a link to one counts) for reading. A pipe, device or folder is refused with ENG_INVALID and
// never blocks. *fd is the caller's to close.
ENG_CHECKED eng_status eng_open_regular(const char *path, int *fd, uint64_t *size, eng_error *error);

// Reads exactly length bytes from offset; a file that ends earlier is ENG_IO.
ENG_CHECKED eng_status eng_read_at(int fd, const char *path, uint64_t offset, void *destination, size_t length,
                                   eng_error *error);

// Reads a whole regular file of at most limit bytes (else ENG_TOO_LONG, nothing allocated). *data is new (free), with a
// NUL behind the *length bytes.
ENG_CHECKED eng_status eng_read_file(const char *path, size_t limit, char **data, size_t *length, eng_error *error);

// A file on its way: PATH.tmp until commit. A PATH.tmp that an earlier crash left behind is removed. A folder, device
// or pipe at PATH is ENG_INVALID.
typedef struct eng_output eng_output;
ENG_CHECKED eng_status eng_output_open(const char *path, eng_output **out, eng_error *error);
ENG_CHECKED eng_status eng_output_write(eng_output *output, const void *data, size_t length, eng_error *error);
// Takes output, also on failure; PATH is then as it was and PATH.tmp is gone. One exception: when only the last step,
// the fsync of the folder, fails, the new file stands but may not survive a power cut.
ENG_CHECKED eng_status eng_output_commit(eng_output *output, eng_error *error);
void eng_output_discard(eng_output *output); // NULL: nothing

// The three steps above in one.
ENG_CHECKED eng_status eng_write_file_atomic(const char *path, const void *data, size_t length, eng_error *error);

ENG_CHECKED eng_status eng_fsync_dir(const char *path, eng_error *error);

// Makes a folder where there is none; *made (NULL: not asked) says whether. A file that stands there is ENG_INVALID.
ENG_CHECKED eng_status eng_make_folder(const char *path, bool *made, eng_error *error);

// Makes the empty folder ".NAME.tmp" beside PATH (so that no rename crosses file systems), after removing one that an
// earlier crash left behind. *temp is new (free). The caller fills it, then commits or removes it.
ENG_CHECKED eng_status eng_make_temp_dir(const char *path, char **temp, eng_error *error);

// Fsyncs every file and folder under temp, renames it to PATH, fsyncs the parent. A folder that stands at PATH is
// exchanged in one step and removed only then, so the name points to a whole folder at each moment; a file system that
// cannot exchange gives ENG_UNSUPPORTED and changes nothing. On failure temp is left for the caller to remove.
ENG_CHECKED eng_status eng_commit_temp_dir(const char *temp, const char *path, eng_error *error);

// Removes a folder with all it holds, or a file; follows no link. Nothing there is no failure.
ENG_CHECKED eng_status eng_remove_tree(const char *path, eng_error *error);

#endif
