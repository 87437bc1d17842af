// SPDX-License-Identifier: Apache-2.0
// Checkpoints in the words of other projects: keys of config.json, names of classes and of tensors.
//
// The same model has up to three public spellings. A form is written only if reading it back gives the model that was
// written: what its public class does not have (a cap of the logits, a norm over all groups) is refused by the key's
// name. Not for an event loop's thread.
#ifndef ENGINE_EXPORT_H
#define ENGINE_EXPORT_H

#include "engine/checkpoint.h"

typedef enum eng_form {
    ENG_FORM_MESA,         // as it is read here; what no family here has as its own becomes FLA's
    ENG_FORM_TRANSFORMERS, // Hugging Face: llama, mamba2, xlstm, recurrent_gemma
    ENG_FORM_FLA,          // flash-linear-attention
    ENG_FORM_STATE_SPACES, // mamba_ssm: mamba2
} eng_form;

const char *eng_form_name(eng_form form); // "mesa", "transformers", "fla", "state-spaces"
ENG_CHECKED bool eng_form_find(const char *name, eng_form *form);

// As eng_checkpoint_save, in the form.
ENG_CHECKED eng_status eng_checkpoint_export(const char *dir, const eng_weights *weights, eng_form form,
                                             eng_dtype dtype, const char *tokenizer_dir, eng_error *error);

#endif
