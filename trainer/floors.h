// SPDX-License-Identifier: Apache-2.0
// What a task's examples score without the work that it asks for: always the same answer, and rules of the task's own
// that look less far. Told when the examples are made, kept beside the shards, shown beside a model's score.
//
// Rules belong to groups, of which the best rule counts, in hindsight: a floor is what a model has to pass before its
// score says anything. The file NAME.floors.json belongs to the shards NAME-00000.tok ...; one thread.
#ifndef TRAINER_FLOORS_H
#define TRAINER_FLOORS_H

#include <stdint.h>

#include "engine/status.h"

enum { TRN_MAX_FLOORS = 24, TRN_FLOOR_NAME = 48 };

typedef struct trn_floor {
    char name[TRN_FLOOR_NAME]; // of the group
    double right;              // answers by this rule; after trn_floors_end a share
} trn_floor;

typedef struct trn_floors {
    trn_floor row[TRN_MAX_FLOORS];
    int rows;
    int64_t targets, *count; // (vocabulary) targets by id
    int32_t vocabulary;
} trn_floors;

ENG_CHECKED eng_status trn_floors_create(int32_t vocabulary, trn_floors *out, eng_error *error);
void trn_floors_free(trn_floors *floors); // a zeroed struct is accepted
// An example's targets; below 0: none.
void trn_floors_count(trn_floors *floors, const int32_t *target, int32_t count);
// Rule `rule`, 0, 1 .. of a group in the order of the calls, was right with this probability. Every example calls for
// the same rules in the same order, from `rule` 0 on.
void trn_floors_try(trn_floors *floors, int rule, const char *group, double right);
// Shares, a row a group: the best of its rules; first of all the commonest answer alone.
void trn_floors_end(trn_floors *floors);

// NAME.floors.json. Reading: *out has no rows where there is no such file.
ENG_CHECKED eng_status trn_floors_write(const trn_floors *floors, const char *name, eng_error *error);
ENG_CHECKED eng_status trn_floors_read(const char *name, trn_floors *out, eng_error *error);

#endif
