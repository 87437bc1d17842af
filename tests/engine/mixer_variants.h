// SPDX-License-Identifier: Apache-2.0
// Every mixer and its variants as small models, looped ones last: what holds for one must hold for all.
//
// Tests loop over the table, so that a new mixer is one line here.
#ifndef TESTS_ENGINE_MIXER_VARIANTS_H
#define TESTS_ENGINE_MIXER_VARIANTS_H

#include "tests/engine/small_models.h"

enum { MIXER_VARIANTS = 39, MIXER_VOCABULARY = 24 };
extern const small_model mixer_variants[MIXER_VARIANTS];

// Ids below MIXER_VOCABULARY that depend on the seed alone; later ones repeat earlier ones in part.
void mixer_prompt(uint64_t seed, int32_t *ids, int32_t count);

#endif
