// SPDX-License-Identifier: Apache-2.0
// Small files that the server reads once, at its start: keys and certificates.
//
// A file is read whole into a bounded buffer. What is not a regular file, is empty or exceeds the bound is refused, and
// the error names the path. Main thread.
#ifndef SERVER_FILE_H
#define SERVER_FILE_H

#include "server/buf.h"

// Appends to *out, whose limit is the bound. ENG_INVALID: missing, unreadable, empty or too large.
ENG_CHECKED eng_status srv_file_read(const char *path, srv_buf *out, eng_error *error);

#endif
