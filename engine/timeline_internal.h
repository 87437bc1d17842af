// SPDX-License-Identifier: Apache-2.0
// What timeline.c gives turn.c: the parts of a timeline that a turn changes.
//
// Nothing of it is for others, who begin and end turns.
#ifndef ENGINE_TIMELINE_INTERNAL_H
#define ENGINE_TIMELINE_INTERNAL_H

#include "engine/timeline.h"

const eng_timelines_options *eng_timelines_read_options(const eng_timelines *all);
// Room for the runs and states that a turn adds, so that its end cannot fail. False: no memory.
bool eng_timeline_make_room(eng_timeline *timeline);
bool eng_timeline_has(const eng_timeline *timeline, int64_t read); // a state that has read so much
void eng_timeline_drop_after(eng_timeline *timeline, int64_t read);
// The id that was generated last is read with the knobs of the request that goes on. A state that has read it already,
// as one has behind an end of text or a cut, serves knobs that are the same; for others it waits as the tail does. So
// bits do not depend on how far a state had gone when the request before ended, nor on which states are still there.
void eng_timeline_free_tail(eng_timeline *timeline, const eng_knobs *knobs);
void eng_timeline_trim(eng_timeline *timeline); // to the history's length

#endif
