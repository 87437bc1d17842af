// SPDX-License-Identifier: Apache-2.0
// Timelines to bytes (state.h) and back: what of one goes out, and how it becomes one again.
//
// A *piece* is what goes out: the nearest state with the ids behind it (an export), everything that is known of the
// timeline (a store), or how it went on from a position (a journal). All on the engine's thread.
#ifndef ENGINE_TIMELINE_BYTES_H
#define ENGINE_TIMELINE_BYTES_H

#include "engine/state.h"
#include "engine/timeline.h"

// Borrowed from the timeline, until that changes.
typedef struct eng_timeline_piece {
    eng_state state;
    const eng_snapshot *snapshot[ENG_STATE_PARTS];
} eng_timeline_piece;

// The newest state and the ids from there on.
void eng_timeline_piece_near(const eng_timeline *timeline, eng_timeline_piece *out);
// All ids that are here, the state before them where there is one, and with_state the one of eng_timeline_piece_near.
void eng_timeline_piece_whole(const eng_timeline *timeline, bool with_state, eng_timeline_piece *out);
// What follows the first `begin` ids that were read; no state.
void eng_timeline_piece_since(const eng_timeline *timeline, int64_t begin, eng_timeline_piece *out);
// eng_state_measure(&piece->state) bytes, without a seal.
ENG_CHECKED eng_status eng_timeline_piece_write(const eng_pool *pool, const eng_state_key *key,
                                                const eng_timeline_piece *piece, void *out, eng_error *error);

// A new timeline that is what the bytes held. ENG_FORMAT: there is no state to go on from; ENG_UNSUPPORTED: beyond the
// context; ENG_FULL.
ENG_CHECKED eng_status eng_timeline_bring_in(eng_timelines *all, uint64_t owner, const eng_state *state,
                                             eng_timeline **out, eng_error *error);
// It goes on from state->begin as the bytes say; what it was beyond that is gone. Not while it is busy. ENG_FORMAT: it
// was never there; ENG_UNSUPPORTED, ENG_FULL. On failure it is neither the one nor the other.
ENG_CHECKED eng_status eng_timeline_go_on(eng_timeline *timeline, const eng_state *state, eng_error *error);

#endif
