// SPDX-License-Identifier: Apache-2.0
// The threads of the CPU device, and how work is shared among them.
//
// A *phase* is a number of pieces; the bits of a piece depend on neither its thread nor its neighbours. Every thread
// begins with a range of pieces of its own, in order, and then takes what others have not begun, from the end of their
// ranges; a few at a time. So nobody waits for a thread that the system has taken off its processor, except for what it
// is at.
//
// In a *session* (a step of generated tokens) one OpenMP region lasts for all operations: the first thread runs them,
// the others wait for its phases, spinning first and then giving their processor to whoever wants it. A phase begins
// and ends with a few cache lines. Outside a session each phase is a region of its own.
#ifndef KERNELS_CPU_TEAM_H
#define KERNELS_CPU_TEAM_H

#include <stdbool.h>
#include <stdint.h>

typedef struct kern_team kern_team;
typedef void (*kern_piece)(const void *context, int64_t piece);
enum { KERN_PIECES_AT_ONCE = 8 }; // at most

// NULL: no memory.
kern_team *kern_team_create(int threads);
void kern_team_free(kern_team *team);

// Runs all pieces and returns when they are done.
void kern_team_run(kern_team *team, kern_piece run, const void *context, int64_t pieces);

// Calls run(context) on the calling thread, in a session.
void kern_team_session(kern_team *team, void (*run)(void *context), void *context);
bool kern_team_in_session(const kern_team *team);

#endif
