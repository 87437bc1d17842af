// SPDX-License-Identifier: Apache-2.0
// The table of mixers, by the names that layer_types uses.
// Immutable, so any thread may look a mixer up; a new mixer is one file and one row here.
#include "engine/mixer.h"

#include <string.h>

static const eng_mixer *const mixers[] = {
    &eng_mixer_mesa,   &eng_mixer_attention, &eng_mixer_linear_attn,    &eng_mixer_retnet,
    &eng_mixer_gla,    &eng_mixer_delta_net, &eng_mixer_gated_deltanet, &eng_mixer_kda,
    &eng_mixer_mamba2, &eng_mixer_mlstm,     &eng_mixer_rglru,          &eng_mixer_recurrence,
};

const eng_mixer *eng_mixer_find(const char *name) {
    for (size_t i = 0; i < sizeof mixers / sizeof *mixers; i++)
        if (strcmp(mixers[i]->name, name) == 0)
            return mixers[i];
    return NULL;
}

const eng_mixer *eng_mixer_at(size_t index) {
    return index < sizeof mixers / sizeof *mixers ? mixers[index] : NULL;
}
