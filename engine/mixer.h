// SPDX-License-Identifier: Apache-2.0
// The table of sequence mixers. A mixer is one file of projections, activations and gates on top of the kernel
// families.
//
// A new mixer is a file mixer_NAME.c with one eng_mixer, its declaration below and its row in mixer.c: layer_types of
// config.json then takes its name, and loading, saving, training and serving its layers.
//
// A mixer never launches: forward and backward emit operations into a plan, once per model and plan. Forward leaves the
// references that backward needs in eng_emit_kept(emit, layer); the emitter (forward_internal.h) hands out buffers and
// keeps the first failure, so the emitting code reads as the mathematics does.
#ifndef ENGINE_MIXER_H
#define ENGINE_MIXER_H

#include "engine/model.h"
#include "kernels/kernels.h"

typedef struct eng_emit eng_emit; // forward_internal.h

struct eng_recurrent; // mixer_recurrent.h
struct eng_keys;      // config_json.h

typedef struct eng_mixer {
    const char *name; // config name in layer_types, "mesa_net", "attention"
    // Its keys of config.json into layer, which is zeroed; hidden_size and layers of config are set.
    void (*read)(struct eng_keys *keys, const eng_config *config, eng_layer_config *layer);
    // Declares the layer's tensors (prefix such as "model.layers.3.attn.") and its state and page bytes.
    eng_status (*declare)(eng_model *model, int32_t layer, const char *prefix, eng_error *error);
    // y = residual + mixer(x); x (T, hidden) is the normed input, y may be residual.
    void (*forward)(eng_emit *emit, int32_t layer, kern_ptr x, kern_ptr residual, kern_ptr y);
    // From dy (T, hidden), the gradient of the mixer's output: dx = gradient of x (written, not added), parameters'
    // gradients added.
    void (*backward)(eng_emit *emit, int32_t layer, kern_ptr x, kern_ptr dy, kern_ptr dx);
    double (*flops)(const eng_model *model, int32_t layer, double position,
                    double cg_steps); // a token, projections apart
    // Mixers on the recurrence family only: what the shared forward and backward emit.
    void (*describe)(const eng_model *model, int32_t layer, struct eng_recurrent *out);
} eng_mixer;

extern const eng_mixer eng_mixer_mesa;
extern const eng_mixer eng_mixer_attention;
extern const eng_mixer eng_mixer_linear_attn;
extern const eng_mixer eng_mixer_retnet;
extern const eng_mixer eng_mixer_gla;
extern const eng_mixer eng_mixer_delta_net;
extern const eng_mixer eng_mixer_gated_deltanet;
extern const eng_mixer eng_mixer_kda;
extern const eng_mixer eng_mixer_mamba2;
extern const eng_mixer eng_mixer_mlstm;
extern const eng_mixer eng_mixer_rglru;
extern const eng_mixer eng_mixer_recurrence;

const eng_mixer *eng_mixer_find(const char *name); // NULL: none
const eng_mixer *eng_mixer_at(size_t index);       // in the table's order; NULL: behind the last

#endif
