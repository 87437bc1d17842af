// SPDX-License-Identifier: Apache-2.0
// The identity of a model's folder: SHA-256 over the files that states depend on, and over all that serving reads.
//
// A state may go on where the first is the same; a server that is told to look again opens the folder anew where the
// second is another. Nothing is kept, any thread.
#ifndef ENGINE_FINGERPRINT_H
#define ENGINE_FINGERPRINT_H

#include "engine/checkpoint.h"
#include "engine/digest.h"
#include "engine/engine.h"

// Of an open checkpoint and the other files in dir, its folder. states: out->states as bytes. *error names the file.
ENG_CHECKED eng_status eng_fingerprint_of(const eng_checkpoint *checkpoint, const char *dir,
                                          unsigned char states[ENG_DIGEST_BYTES], eng_fingerprint *out,
                                          eng_error *error);

#endif
