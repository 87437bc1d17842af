// SPDX-License-Identifier: Apache-2.0
// mesa-trainer export and import: a checkpoint as one safetensors file in the keys and names of another project, or of
// this one, in either element type. A file instead of a folder is read as GGUF.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/export.h"
#include "engine/files.h"
#include "engine/import.h"
#include "trainer/commands.h"
#include "trainer/options.h"
#include "trainer/probe.h"

typedef struct arguments {
    const char *dir, *out, *form, *type;
} arguments;

static eng_status parse_form(const char *text, eng_form *form, eng_error *error) {
    *form = ENG_FORM_MESA;
    if (text && !eng_form_find(text, form))
        return eng_fail(error, ENG_INVALID,
                        "--as: \"%.40s\" is not transformers, fla, state-spaces (of mamba_ssm) or mesa", text);
    return ENG_OK;
}

static eng_status parse_dtype(const char *text, eng_dtype *dtype, eng_error *error) {
    *dtype = strcmp(text, "f32") == 0 ? ENG_F32 : ENG_BF16;
    if (*dtype == ENG_BF16 && strcmp(text, "bf16") != 0)
        return eng_fail(error, ENG_INVALID, "--dtype: bf16 or f32");
    return ENG_OK;
}

// Without an option nothing is lost.
static eng_dtype lossless(const trn_probe *probe) {
    for (int32_t i = 0; i < probe->model->tensors; i++) {
        if (eng_checkpoint_dtype(probe->checkpoint, i) != ENG_BF16)
            return ENG_F32;
    }
    return ENG_BF16;
}

// The tokenizer's files go along where there are any.
static eng_status save(const trn_probe *probe, const arguments *given, eng_form form, eng_dtype dtype,
                       eng_error *error) {
    char *tokenizer = eng_join_path(given->dir, "tokenizer.json");
    if (!tokenizer)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for a path");
    bool has = access(tokenizer, R_OK) == 0;
    free(tokenizer);
    return eng_checkpoint_export(given->out, probe->weights, form, dtype, has ? given->dir : NULL, error);
}

static eng_status convert_folder(const arguments *given, const eng_dtype *dtype, eng_error *error) {
    eng_form form = ENG_FORM_MESA;
    trn_probe probe = {0};
    eng_status status = parse_form(given->form, &form, error);
    if (status == ENG_OK)
        status = trn_probe_open(given->dir, "cpu", true, KERN_STORE_F32, &probe, error);
    eng_dtype type = dtype ? *dtype : status == ENG_OK ? lossless(&probe) : ENG_F32;
    if (status == ENG_OK)
        status = save(&probe, given, form, type, error);
    if (status == ENG_OK)
        printf("%s: %llu parameters in %s\n", given->out, (unsigned long long)probe.model->parameters,
               eng_dtype_name(type));
    trn_probe_close(&probe);
    return status;
}

static eng_status convert_gguf(const arguments *given, const eng_dtype *dtype, eng_error *error) {
    eng_imported imported;
    eng_status status = eng_import_gguf(given->dir, given->out, dtype, &imported, error);
    if (status != ENG_OK)
        return status;
    printf("%s: %llu parameters", given->out, (unsigned long long)imported.parameters);
    if (imported.blocks > 0)
        printf(", %d matrices in blocks as the file has them, the rest", (int)imported.blocks);
    printf(" in %s, ", eng_dtype_name(imported.dtype));
    if (imported.widened > 0)
        printf("%d matrices widened from %s%s, ", (int)imported.widened, imported.widened_format,
               imported.widened > 1 ? " and the like" : "");
    printf("%s, %s\n", imported.tokenizer ? "a tokenizer" : "no tokenizer",
           imported.chat_template ? "a chat template" : "no chat template");
    return ENG_OK;
}

static eng_status convert(const arguments *given, bool forms, eng_error *error) {
    eng_dtype dtype = ENG_F32;
    struct stat facts;
    eng_status status = trn_check_target(given->dir, given->out, error);
    if (status == ENG_OK && given->type)
        status = parse_dtype(given->type, &dtype, error);
    if (status != ENG_OK)
        return status;
    const eng_dtype *chosen = given->type ? &dtype : NULL;
    if (!forms && stat(given->dir, &facts) == 0 && S_ISREG(facts.st_mode))
        return convert_gguf(given, chosen, error);
    return convert_folder(given, chosen, error);
}

static int run(const char *command, const char *usage, const char *about, bool forms, int argc, char **argv) {
    arguments given = {0};
    const trn_option options[] = {
        {"out", "DIR", TRN_STRING, &given.out, "folder to write; a checkpoint that stands there is replaced"},
        {"dtype", "TYPE", TRN_STRING, &given.type,
         "bf16 (rounded to nearest, ties to even) or f32 (default: bf16 where every tensor or matrix is, else f32)"},
        {"as", "FORM", TRN_STRING, &given.form,
         "transformers, fla, state-spaces (of mamba_ssm) or mesa (default mesa)"},
    };
    size_t count = sizeof options / sizeof *options - (forms ? 0 : 1);
    const trn_command_line line = {usage, about, options, count, 1, 1};
    bool helped = false;
    int positional = 0;
    eng_error error = {0};
    eng_status status = trn_options_parse(&line, argc, argv, &given.dir, &positional, &helped, &error);
    if (helped)
        return TRN_EXIT_OK;
    if (status == ENG_OK)
        status = convert(&given, forms, &error);
    return trn_command_end(command, status, &error);
}

int trn_command_export(int argc, char **argv) {
    return run("export", "export DIR --out DIR [--as FORM] [--dtype bf16|f32]",
               "Writes a checkpoint, its configuration and its tokenizer as another project reads them. What that\n"
               "project's model does not have is refused by the key's name.",
               true, argc, argv);
}

int trn_command_import(int argc, char **argv) {
    return run("import", "import DIR|FILE.gguf --out DIR [--dtype bf16|f32]",
               "Reads a checkpoint in any spelling that is known here and writes it in this project's own: one file,\n"
               "one name a tensor, fused weights taken apart. A GGUF file of the Llama family becomes a folder, with\n"
               "its tokenizer and its chat template; Q8_0, Q4_0 and Q4_1 stay in blocks unless --dtype is given.",
               false, argc, argv);
}
