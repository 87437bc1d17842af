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
void eng_timeline_trim(eng_timeline *timeline); // to the history's length

#endif
