// SPDX-License-Identifier: Apache-2.0
// Deferred catch-up: a generated token that is read at an early loop of a looped model runs no loop behind it until a
// later token needs that loop's states.
//
// What the loops that it ran left behind waits in its session's slot (eng_pending). A later token that goes on to a
// loop takes all that wait for it along: they go through the loop together, as generated tokens of one row, in their
// order, so that weights and states move once. Every loop's states see every token in the end, one after the other, by
// the kernels of generated tokens, whose bits depend neither on the cut nor on the company: ids, logprobs and states
// equal those of running all loops at once, bit for bit. Pending tokens are bounded, and a session's are taken through
// everything before its state is copied, before it reads anything but single generated tokens, and while it stands
// still and the engine has nothing else to do.
//
// Who goes on to a loop is decided on the device, by what the gate said, and stands in a row table that the device
// writes (EXIT_FOLLOW). The host looks at nothing between loops and starts a step before it knows how the last one
// went: it counts with the most tokens that may go along. The engine's thread.
#ifndef ENGINE_LOOP_H
#define ENGINE_LOOP_H

#include "engine/batch_internal.h"

// Of a batch that has its plan, memory and rows. Freed with eng_loops_free.
ENG_CHECKED eng_status eng_loops_create(eng_batch *batch, eng_loops **out, eng_error *error);
void eng_loops_free(eng_loops *loops); // NULL is accepted
// Device bytes of its activations, beside a batch with a plan of these options.
ENG_CHECKED eng_status eng_loops_measure(const eng_model *model, kern_device *device, const eng_plan_options *whole,
                                         uint64_t *bytes, eng_error *error);
// What a loop moves for so many sessions, an operation of it: leaving it out is worth its launches from the device's
// launch_bytes on.
double eng_loops_bytes_a_launch(const eng_loops *loops, int32_t sessions);
// Marks the pieces of the step that is being filled that run loop by loop: single generated tokens, if any of them may
// leave loops for later or has tokens that wait, and if leaving a loop out is worth its launches. Those that read an id
// that the step before drew find it later, as this step's other pieces have not drawn yet.
ENG_CHECKED eng_status eng_loops_choose(eng_loops *loops, eng_error *error);
// Runs the deferred pieces of the step that is being filled, whose places among tokens and logits are set, and leaves
// the results where the batch's own plan leaves those of the others. Uses the batch's rows. Advances no session.
ENG_CHECKED eng_status eng_loops_run(eng_loops *loops, eng_error *error);
// A step's results are on the host: at which loops its deferred pieces were read.
void eng_loops_note(eng_loops *loops, const eng_flight *flight);
// What eng_batch_warm_up does, behind steps in which all sessions left at the first loop; takes what waits with
// `session` through.
ENG_CHECKED eng_status eng_loops_warm_up(eng_loops *loops, const eng_session *session, eng_error *error);

#endif
