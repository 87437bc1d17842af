// SPDX-License-Identifier: Apache-2.0
// The ranks of a run: processes that train one model together, each on its own part of every step's rows.
//
// Two ways between them. Small things (counts, losses, digests) go over TCP by rank 0: an exchange gives every rank
// what all ranks gave, so that all compute the same from it. Gradients and weights go in parts: on a device that reads
// host memory around a ring of TCP connections, each sum in the order of the ring; on CUDA by the device's own group
// (kernels/device.h). Either way the owner of a part alone sums it, so that all ranks hold the same bits and a run
// repeats bit for bit.
//
// Whoever fails tells the others why, and whoever is lost is named: every call below then fails with that sentence, in
// all ranks. NULL ranks are a process alone: nothing is sent, nothing fails. One thread.
#ifndef TRAINER_RANKS_H
#define TRAINER_RANKS_H

#include "kernels/kernels.h"
#include "trainer/rank_place.h"

typedef struct trn_ranks trn_ranks;

// Meets the other ranks. wait: seconds that a rank is waited for, now and later. *out is NULL where place->ranks is 1.
ENG_CHECKED eng_status trn_ranks_open(const trn_rank_place *place, double wait, trn_ranks **out, eng_error *error);
// Parts. status and *error: how this rank ends, which the others are told of when it is a failure of its own; after
// ENG_OK it first waits for all of them. Returns what the run ends with here: a failure that came of another rank's end
// gives way to that, in *error too.
ENG_CHECKED eng_status trn_ranks_close(trn_ranks *ranks, eng_status status, eng_error *error);

int32_t trn_ranks_own(const trn_ranks *ranks);
int32_t trn_ranks_count(const trn_ranks *ranks);
int32_t trn_ranks_local(const trn_ranks *ranks); // its number on its host

// all: (count, bytes) what each rank gave as mine. Every rank gives as many bytes.
ENG_CHECKED eng_status trn_ranks_exchange(trn_ranks *ranks, const void *mine, size_t bytes, void *all,
                                          eng_error *error);
// Everybody gets rank 0's.
ENG_CHECKED eng_status trn_ranks_share(trn_ranks *ranks, void *data, size_t bytes, eng_error *error);
// Whether all have the same text; else ENG_INVALID with the first rank that has not, what it is, and the first line
// that differs.
ENG_CHECKED eng_status trn_ranks_agree(trn_ranks *ranks, const char *what, const char *text, eng_error *error);
// Looks, without waiting, whether somebody has failed.
ENG_CHECKED eng_status trn_ranks_check(trn_ranks *ranks, eng_error *error);

// How a block of floats is divided: every rank has a part of as many floats (a multiple of 16), the last one the rest
// of the block besides.
typedef struct trn_part {
    int64_t first, count;
} trn_part;
trn_part trn_rank_part(int64_t floats, int32_t rank, int32_t ranks);

// Chooses the way for the memory of this device.
ENG_CHECKED eng_status trn_ranks_use(trn_ranks *ranks, kern_device *device, eng_error *error);
// Gives the way up, and what of it is not done, which would keep the device from freeing memory when a rank was lost.
// Before the device is closed.
void trn_ranks_leave(trn_ranks *ranks);
// data: device memory, `floats` of them, the same block in every rank. Sum: this rank's part becomes the sum of all
// ranks'; what the other parts hold then is of no use. Gather: the other parts become what their ranks hold. Both
// follow what the stream was given, and may go on beside what it is given afterwards until it is joined.
ENG_CHECKED eng_status trn_ranks_sum(trn_ranks *ranks, kern_stream *stream, float *data, int64_t floats,
                                     eng_error *error);
ENG_CHECKED eng_status trn_ranks_gather(trn_ranks *ranks, kern_stream *stream, float *data, int64_t floats,
                                        eng_error *error);
ENG_CHECKED eng_status trn_ranks_join(trn_ranks *ranks, kern_stream *stream, eng_error *error);
// kern_synchronize for a stream that has been joined: a lost rank ends it too.
ENG_CHECKED eng_status trn_ranks_wait(trn_ranks *ranks, kern_stream *stream, eng_error *error);

#endif
