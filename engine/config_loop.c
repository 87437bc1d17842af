// SPDX-License-Identifier: Apache-2.0
// Depth by repetition: which layers of a model run how often, and what tells one time from another.
//
// `num_loops` R times run the neighbouring layers of `loop_blocks` (all of them without it); those before and behind
// run once. The loops share every weight but what `loop_embedding` adds to a loop's input and `loop_residual_gate`
// multiplies what went into the first loop with, channel by channel, before it joins a loop's output. `exit_gate` is a
// linear map of the normed output of each loop (Ouro, arXiv 2510.25741): only models that end with their loop have
// outputs to choose from. No state; any thread.
#include "engine/config_internal.h"

static void read_blocks(eng_keys *keys, const json_t *list, const eng_config *config, eng_loop_config *loop) {
    size_t count = json_array_size(list);
    if (!json_is_array(list) || count == 0) {
        eng_keys_fail(keys, ENG_FORMAT, "loop_blocks", "must be a list of layer numbers");
        return;
    }
    for (size_t i = 0; i < count; i++) {
        const json_t *entry = json_array_get(list, i);
        json_int_t index = json_is_integer(entry) ? json_integer_value(entry) : -1;
        if (index < 0 || index >= config->layers) {
            eng_keys_fail(keys, ENG_FORMAT, "loop_blocks", "entry %zu must be a layer number from 0 to %d", i,
                          config->layers - 1);
            return;
        }
        if (i == 0)
            loop->first = (int32_t)index;
        if (index != loop->first + (json_int_t)i) {
            eng_keys_fail(keys, ENG_UNSUPPORTED, "loop_blocks",
                          "entry %zu is layer %d: only neighbours in ascending order can be looped", i, (int)index);
            return;
        }
    }
    loop->layers = (int32_t)count;
}

void eng_config_loop(eng_keys *keys, eng_config *config) {
    eng_loop_config *loop = &config->loop;
    *loop = (eng_loop_config){.layers = config->layers};
    loop->loops = (int32_t)eng_keys_integer(keys, "num_loops", 1, 1, ENG_MAX_LOOPS);
    const json_t *blocks = eng_keys_value(keys, "loop_blocks");
    if (blocks)
        read_blocks(keys, blocks, config, loop);
    loop->embedding = eng_keys_flag(keys, "loop_embedding", false);
    loop->residual_gate = eng_keys_flag(keys, "loop_residual_gate", false);
    loop->exit_gate = eng_keys_flag(keys, "exit_gate", false);
    if (loop->exit_gate && loop->first + loop->layers != config->layers)
        eng_keys_fail(keys, ENG_UNSUPPORTED, "exit_gate",
                      "layers %d and on follow the loop, whose outputs nothing reads", loop->first + loop->layers);
}
