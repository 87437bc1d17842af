// SPDX-License-Identifier: Apache-2.0
// mesa-trainer convert DIR --out DIR --dtype bf16|f32: the same checkpoint in another element type, as one safetensors
// file.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/files.h"
#include "trainer/commands.h"
#include "trainer/options.h"
#include "trainer/probe.h"

static eng_status parse_dtype(const char *text, eng_dtype *dtype, eng_error *error) {
    bool bf16 = text && strcmp(text, "bf16") == 0;
    if (!bf16 && (!text || strcmp(text, "f32") != 0))
        return eng_fail(error, ENG_INVALID, "--dtype: bf16 or f32");
    *dtype = bf16 ? ENG_BF16 : ENG_F32;
    return ENG_OK;
}

// The tokenizer's files go along where there are any.
static eng_status save(const trn_probe *probe, const char *from, const char *to, eng_dtype dtype, eng_error *error) {
    char *tokenizer = eng_join_path(from, "tokenizer.json");
    if (!tokenizer)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for a path");
    bool has = access(tokenizer, R_OK) == 0;
    free(tokenizer);
    return eng_checkpoint_save(to, probe->weights, dtype, has ? from : NULL, error);
}

int trn_command_convert(int argc, char **argv) {
    const char *out = NULL, *type = NULL, *dir = NULL;
    const trn_option options[] = {
        {"out", "DIR", TRN_STRING, &out, "folder to write; a checkpoint that stands there is replaced"},
        {"dtype", "TYPE", TRN_STRING, &type, "bf16 (rounded to nearest, ties to even) or f32"},
    };
    const trn_command_line line = {
        "convert DIR --out DIR --dtype bf16|f32",
        "Rewrites a checkpoint, its configuration and its tokenizer in another element type.",
        options,
        sizeof options / sizeof *options,
        1,
        1};
    bool helped = false;
    int positional = 0;
    eng_error error = {0};
    eng_dtype dtype = ENG_F32;
    trn_probe probe = {0};
    eng_status status = trn_options_parse(&line, argc, argv, &dir, &positional, &helped, &error);
    if (helped)
        return TRN_EXIT_OK;
    if (status == ENG_OK && !out)
        status = eng_fail(&error, ENG_INVALID, "--out is needed");
    if (status == ENG_OK)
        status = parse_dtype(type, &dtype, &error);
    if (status == ENG_OK)
        status = trn_probe_open(dir, "cpu", true, &probe, &error);
    if (status == ENG_OK)
        status = save(&probe, dir, out, dtype, &error);
    if (status == ENG_OK)
        printf("%s: %llu parameters in %s\n", out, (unsigned long long)probe.model->parameters, eng_dtype_name(dtype));
    trn_probe_close(&probe);
    if (status == ENG_OK)
        return TRN_EXIT_OK;
    fprintf(stderr, "mesa-trainer convert: %s\n", error.text);
    return status == ENG_IO || status == ENG_NO_MEMORY || status == ENG_DEVICE ? TRN_EXIT_FAILED : TRN_EXIT_USAGE;
}
