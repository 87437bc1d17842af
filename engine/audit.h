// SPDX-License-Identifier: Apache-2.0
// A sample of what jobs begin from is read again and compared, bit for bit.
//
// Every n-th hit is noted; when no client waits, a job of the engine's own reads the same ids from nothing, in room
// that no prompt of a client wants, and gives its slot up when one needs it. A state that differs means that what is
// kept cannot be trusted: all of it goes, from a store nothing is taken any more, a counter and a log line tell. One
// audit at a time; a hit that comes meanwhile is not read again. On the engine's thread.
#ifndef ENGINE_AUDIT_H
#define ENGINE_AUDIT_H

#include "engine/request.h"

typedef struct eng_scheduler eng_scheduler;

typedef struct eng_audit {
    eng_boundary *boundary; // a reference; NULL: nothing is to be read again
    eng_prompt *prompt;     // one id more than the boundary has read. A reference
    eng_knobs knobs;
    bool named; // by what follows a store may have it
    unsigned char owner_name[ENG_NAME_BYTES], digest[ENG_DIGEST_BYTES];
    eng_job *job;  // NULL: it waits for room
    uint64_t hits; // since the last that was noted
    uint64_t audits, mismatches;
} eng_audit;

// The job has begun from job->share.start.
void eng_audit_hit(eng_scheduler *scheduler, const eng_job *job);
// Lets it run if nobody waits and there is room.
ENG_CHECKED eng_status eng_audit_admit(eng_scheduler *scheduler, eng_error *error);
bool eng_audit_runs(const eng_scheduler *scheduler);
void eng_audit_stop(eng_scheduler *scheduler); // whatever it has come to
// Results of its job came.
ENG_CHECKED eng_status eng_audit_accepted(eng_scheduler *scheduler, eng_error *error);

#endif
