// SPDX-License-Identifier: Apache-2.0
// Deferred catch-up: a generated token that is read at an early loop of a looped model runs no loop behind it until a
// later token needs that loop's states.
//
// What the loops that it ran left behind waits with its session (eng_pending). A later token that goes on to a loop
// takes all that wait for it along: they go through the loop together, as generated tokens of one row, in their order,
// so that weights and states move once. Every loop's states see every token in the end, one after the other, by the
// kernels of generated tokens, whose bits depend neither on the cut nor on the company: ids, logprobs and states equal
// those of running all loops at once, bit for bit. Pending tokens are bounded, and a session's are taken through
// everything before its state is copied, before it reads anything but single generated tokens, and while it stands
// still and the engine has nothing else to do.
//
// Which loop is next depends on what the gate said, so the host looks between loops: for devices that do not work
// beside it. The engine's thread.
#ifndef ENGINE_LOOP_H
#define ENGINE_LOOP_H

#include "engine/batch_internal.h"

// Whether steps of this model on this device can leave loops for later.
bool eng_loops_can_wait(const eng_model *model, const kern_device *device);
// Device bytes beside each session's state for the tokens that wait; 0 where none can.
uint64_t eng_loops_session_bytes(const eng_model *model, const kern_device *device);
// Of a batch that has its plan, memory and rows; the pool is prepared for pending tokens. Freed with eng_loops_free.
ENG_CHECKED eng_status eng_loops_create(eng_batch *batch, eng_loops **out, eng_error *error);
void eng_loops_free(eng_loops *loops); // NULL is accepted
// Device bytes of its activations.
ENG_CHECKED eng_status eng_loops_measure(const eng_model *model, kern_device *device, int32_t max_rows,
                                         int32_t max_tokens, uint64_t *bytes, eng_error *error);
// Marks the pieces of the step that is being filled that run loop by loop: single generated tokens, if any of them may
// leave loops for later or has tokens that wait.
void eng_loops_choose(const eng_loops *loops);
// Runs the deferred pieces of the step that is being filled, whose places among tokens and logits are set, and leaves
// the results where the batch's own plan leaves those of the others. Uses the batch's rows. Advances no session.
ENG_CHECKED eng_status eng_loops_run(eng_loops *loops, eng_error *error);

#endif
