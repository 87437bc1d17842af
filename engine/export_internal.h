// SPDX-License-Identifier: Apache-2.0
// The parts of export: the keys of each form, and whether two configs are one model.
//
// For export*.c alone. Configs are read only; what is made here is the caller's.
#ifndef ENGINE_EXPORT_INTERNAL_H
#define ENGINE_EXPORT_INTERNAL_H

#include "engine/config_json.h"
#include "engine/export.h"

// config.json of the model in the keys of the form. *root is new (json_decref).
ENG_CHECKED eng_status eng_export_keys(const eng_config *config, eng_form form, json_t **root, eng_error *error);
// The first key in which the models differ, or NULL: they compute the same.
const char *eng_export_difference(const eng_config *left, const eng_config *right);

#endif
