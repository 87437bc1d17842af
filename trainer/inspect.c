// SPDX-License-Identifier: Apache-2.0
// mesa-trainer inspect DIR: what a checkpoint holds and what it costs to run: tensors, parameters, bytes, operations.
// Opens the checkpoint as a server would, so what is shown has passed the same checks; loads no weight.
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/checkpoint.h"
#include "engine/files.h"
#include "engine/mixer.h"
#include "trainer/commands.h"
#include "trainer/options.h"

enum { MAX_WEIGHT_FILES = 1024 };

typedef struct inspection {
    eng_checkpoint *checkpoint;
    const eng_model *model;
    eng_st_file *file[MAX_WEIGHT_FILES];
    int files;
} inspection;

// -------------------------------------------------------------------------------------------------------------- files

static bool is_weight_file(const char *name) {
    size_t length = strlen(name);
    static const char suffix[] = ".safetensors";
    return length > sizeof suffix - 1 && strcmp(name + length - (sizeof suffix - 1), suffix) == 0;
}

static eng_status open_file(inspection *in, const char *dir, const char *name, eng_error *error) {
    char *path = eng_join_path(dir, name);
    eng_status status = !path ? eng_fail(error, ENG_NO_MEMORY, "out of memory for a path")
                        : in->files == MAX_WEIGHT_FILES
                            ? eng_fail(error, ENG_UNSUPPORTED, "%s: more than %d weight files", dir, MAX_WEIGHT_FILES)
                            : eng_st_open(path, &in->file[in->files], error);
    if (status == ENG_OK)
        in->files++;
    free(path);
    return status;
}

// The element types stand only in the weight files; a single file wins over shards, as when the checkpoint is loaded.
static eng_status open_weight_files(inspection *in, const char *dir, eng_error *error) {
    eng_error single = {0};
    eng_status status = open_file(in, dir, "model.safetensors", &single);
    if (status != ENG_NOT_FOUND)
        return status == ENG_OK ? status : eng_fail(error, status, "%s", single.text);
    DIR *list = opendir(dir);
    if (!list)
        return eng_fail(error, ENG_IO, "%s: cannot be read", dir);
    status = ENG_OK;
    for (struct dirent *entry; status == ENG_OK && (entry = readdir(list));)
        if (is_weight_file(entry->d_name))
            status = open_file(in, dir, entry->d_name, error);
    closedir(list);
    return status;
}

static const eng_st_entry *find_entry(const inspection *in, const char *name) {
    for (int i = 0; i < in->files; i++) {
        const eng_st_entry *entry = eng_st_find(in->file[i], name);
        if (entry)
            return entry;
    }
    return NULL;
}

// ------------------------------------------------------------------------------------------------------------ printing

static const char *grouped(uint64_t number, char text[32]) {
    char digits[24];
    int length = snprintf(digits, sizeof digits, "%llu", (unsigned long long)number), at = 0;
    for (int i = 0; i < length; i++) {
        if (i > 0 && (length - i) % 3 == 0)
            text[at++] = ',';
        text[at++] = digits[i];
    }
    text[at] = '\0';
    return text;
}

static const char *sized(double bytes, char text[32]) {
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    size_t unit = 0;
    for (; bytes >= 1024 && unit + 1 < sizeof units / sizeof *units; unit++)
        bytes /= 1024;
    snprintf(text, 32, unit == 0 ? "%.0f %s" : "%.2f %s", bytes, units[unit]);
    return text;
}

static void print_tensors(const inspection *in) {
    printf("%-52s %-20s %-5s %12s  %s\n", "tensor", "shape", "type", "parameters", "decay");
    for (int32_t i = 0; i < in->model->tensors; i++) {
        const eng_tensor *tensor = &in->model->tensor[i];
        const eng_st_entry *entry = find_entry(in, tensor->name);
        char shape[96] = "", count[32];
        for (int d = 0; d < tensor->ndim; d++)
            snprintf(shape + strlen(shape), sizeof shape - strlen(shape), "%s%lld", d ? " x " : "",
                     (long long)tensor->shape[d]);
        printf("%-52s %-20s %-5s %12s  %s\n", tensor->name, shape, entry ? eng_dtype_name(entry->dtype) : "-",
               grouped((uint64_t)tensor->count, count), tensor->decay ? "yes" : "no");
    }
}

static void print_layers(const eng_model *model) {
    printf("layers            ");
    for (int32_t i = 0; i < model->config.layers;) {
        int32_t same = i;
        while (same < model->config.layers && model->config.layer[same].mixer == model->config.layer[i].mixer)
            same++;
        printf("%s%d x %s", i ? ", " : "", same - i, model->config.layer[i].mixer->name);
        i = same;
    }
    printf("\n");
}

static uint64_t weight_bytes(const inspection *in) {
    uint64_t bytes = 0;
    for (int32_t i = 0; i < in->model->tensors; i++) {
        const eng_st_entry *entry = find_entry(in, in->model->tensor[i].name);
        bytes += entry ? entry->bytes : 0;
    }
    return bytes;
}

static void print_operations(const eng_model *model) {
    const eng_config *config = &model->config;
    double position = config->trained_length > 0 ? (double)config->trained_length : 1024;
    bool mesa = eng_model_has_mesa(model);
    printf("operations        %.2f million a generated token", 1e-6 * eng_model_flops(model, position, 0));
    if (eng_model_has_pages(model))
        printf(" at position %.0f", position);
    if (mesa)
        printf(" + %.3f million a solver step",
               1e-6 * (eng_model_flops(model, position, 1) - eng_model_flops(model, position, 0)));
    printf("\n");
}

static void print_summary(const inspection *in) {
    const eng_model *model = in->model;
    const eng_config *config = &model->config;
    const eng_tensor *embed = &model->tensor[model->embed];
    uint64_t embedding = (uint64_t)embed->count * (config->tied ? 1 : 2);
    char a[32], b[32], digest[72] = "";
    printf("model             %s\n", config->model_type);
    print_layers(model);
    printf("width             %d, MLP %d, vocabulary %d%s\n", config->hidden_size, config->intermediate_size,
           config->vocab_size, config->tied ? " (embedding and head are one)" : "");
    printf("parameters        %s, %s of them outside embedding and head\n", grouped(model->parameters, a),
           grouped(model->parameters - embedding, b));
    printf("weights           %s\n", sized((double)weight_bytes(in), a));
    printf("state             %s a session (%s bytes)\n", sized((double)model->state_bytes, a),
           grouped(model->state_bytes, b));
    if (eng_model_has_pages(model))
        printf("KV                %s bytes a token more\n", grouped(model->page_bytes / KERN_PAGE_TOKENS, a));
    print_operations(model);
    if (eng_model_has_mesa(model))
        printf("solver            tolerance %g, at most %d steps\n", (double)config->knobs.cg_tolerance,
               config->knobs.cg_max_steps);
    printf("trained length    %lld\n", (long long)config->trained_length);
    uint8_t bytes[32];
    if (eng_checkpoint_digest(in->checkpoint, bytes, NULL) == ENG_OK)
        for (int i = 0; i < 32; i++)
            snprintf(digest + 2 * i, 3, "%02x", bytes[i]);
    printf("digest            %s\n", digest[0] ? digest : "unreadable");
}

int trn_command_inspect(int argc, char **argv) {
    bool summary = false, helped = false;
    const trn_option options[] = {
        {"summary", NULL, TRN_FLAG, &summary, "without the table of tensors"},
    };
    const trn_command_line line = {
        "inspect DIR [options]",
        "Tensors, parameters, bytes and operations of a checkpoint. Every file is checked, but no\n"
        "weight is loaded.",
        options,
        sizeof options / sizeof *options,
        1,
        1};
    const char *dir = NULL;
    int positional = 0;
    eng_error error = {0};
    inspection in = {0};
    eng_status status = trn_options_parse(&line, argc, argv, &dir, &positional, &helped, &error);
    if (helped)
        return TRN_EXIT_OK;
    if (status == ENG_OK)
        status = eng_checkpoint_open(dir, &in.checkpoint, &error);
    if (status == ENG_OK) {
        in.model = eng_checkpoint_model(in.checkpoint);
        status = open_weight_files(&in, dir, &error);
    }
    if (status == ENG_OK) {
        if (!summary) {
            print_tensors(&in);
            printf("\n");
        }
        print_summary(&in);
    }
    for (int i = 0; i < in.files; i++)
        eng_st_close(in.file[i]);
    eng_checkpoint_close(in.checkpoint);
    if (status == ENG_OK)
        return TRN_EXIT_OK;
    fprintf(stderr, "mesa-trainer inspect: %s\n", error.text);
    return TRN_EXIT_USAGE;
}
