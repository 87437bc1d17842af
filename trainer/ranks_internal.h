// SPDX-License-Identifier: Apache-2.0
// What the files of ranks.h share: the connections of a rank and how it fails.
// Every rank but 0 has one connection for control, to rank 0, which has one to each. The ring's two are for parts.
#ifndef TRAINER_RANKS_INTERNAL_H
#define TRAINER_RANKS_INTERNAL_H

#include <poll.h>

#include "trainer/rank_link.h"
#include "trainer/ranks.h"

struct trn_ranks {
    int32_t rank, ranks, local;
    double wait;
    int *control; // (ranks) rank 0: by rank, its own -1; else [0] alone
    int next, previous;
    struct pollfd *poll; // (ranks + 2) room for whoever waits
    bool ended;          // the fault below has been told to whom it concerns
    eng_status fault;    // ENG_OK: none
    char why[200];
    kern_group *group; // of the device; NULL: the ring
    float *received;   // the ring's, of received_floats
    int64_t received_floats;
};

typedef enum trn_frame_kind {
    TRN_FRAME_PIECE = 1, // to rank 0: what a rank gives to an exchange
    TRN_FRAME_ALL,       // from rank 0: what all gave
    TRN_FRAME_FAULT,     // trn_frame_fault: to rank 0, and from rank 0 as everybody's end
} trn_frame_kind;

typedef struct trn_frame {
    uint32_t kind, bytes;
} trn_frame;

typedef struct trn_frame_fault {
    int32_t rank; // whose fault it is
    int32_t code; // its status; ENG_OK: it was lost
    char text[200];
} trn_frame_fault;

// The connection for control of a rank, from here.
static inline int trn_ranks_control(const trn_ranks *ranks, int32_t rank) {
    return ranks->rank == 0 ? ranks->control[rank] : ranks->control[0];
}

// The run is over because `rank` was lost, or (`silent`) has not answered: learns of rank 0, or tells all as rank 0,
// what everybody ends with.
eng_status trn_ranks_lost(trn_ranks *ranks, int32_t rank, bool silent, eng_error *error);
// Something can be read from the connection for control of `rank`: *piece says whether it is of an exchange and may
// wait. A fault ends the run.
ENG_CHECKED eng_status trn_ranks_hear(trn_ranks *ranks, int32_t rank, bool *piece, eng_error *error);
// Tells whoever is at the other end of fd that this rank ends with *error.
void trn_ranks_send_own_fault(const trn_ranks *ranks, int fd, eng_status status, const eng_error *error);
// The fault that has ended the run.
eng_status trn_ranks_fail(const trn_ranks *ranks, eng_error *error);

// Makes the connections of ranks (rank, ranks, wait are set).
ENG_CHECKED eng_status trn_ranks_meet(trn_ranks *ranks, const trn_rank_place *place, eng_error *error);

#endif
