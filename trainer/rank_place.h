// SPDX-License-Identifier: Apache-2.0
// Which of the ranks of a run this process is, as whoever started it says in the environment: mpirun, Slurm's srun, or
// the variables that torchrun sets (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT), which win.
#ifndef TRAINER_RANK_PLACE_H
#define TRAINER_RANK_PLACE_H

#include <stdint.h>

#include "engine/status.h"

enum { TRN_MAX_RANKS = 4096, TRN_RANK_PORT = 29500, TRN_ADDRESS_SIZE = 256 };

typedef struct trn_rank_place {
    int32_t rank, ranks;
    int32_t local; // its number among the ranks of its host
    char address[TRN_ADDRESS_SIZE];
    int32_t port; // where rank 0 is found by the others
} trn_rank_place;

// ranks is 1 where nothing speaks of ranks. Half a description, or one that cannot be, is ENG_INVALID.
ENG_CHECKED eng_status trn_rank_place_read(trn_rank_place *out, eng_error *error);
// The first host of a list as Slurm writes it, "node[01-04,7],gpu2" for one: "node01". out: TRN_ADDRESS_SIZE.
ENG_CHECKED eng_status trn_rank_first_host(const char *list, char *out, eng_error *error);

#endif
