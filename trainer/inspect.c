// SPDX-License-Identifier: Apache-2.0
// mesa-trainer inspect DIR: what a checkpoint holds and what it costs to run: tensors, parameters, bytes, operations.
// Opens the checkpoint as a server would, so what is shown has passed the same checks; loads no weight.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/checkpoint.h"
#include "engine/mixer.h"
#include "engine/session.h"
#include "trainer/commands.h"
#include "trainer/options.h"
#include "trainer/runner.h"

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

static void print_tensors(const eng_checkpoint *checkpoint) {
    const eng_model *model = eng_checkpoint_model(checkpoint);
    printf("%-52s %-20s %-5s %12s  %s\n", "tensor", "shape", "type", "parameters", "decay");
    for (int32_t i = 0; i < model->tensors; i++) {
        const eng_tensor *tensor = &model->tensor[i];
        char shape[96] = "", count[32];
        for (int d = 0; d < tensor->ndim; d++)
            snprintf(shape + strlen(shape), sizeof shape - strlen(shape), "%s%lld", d ? " x " : "",
                     (long long)tensor->shape[d]);
        printf("%-52s %-20s %-5s %12s  %s\n", tensor->name, shape, eng_dtype_name(eng_checkpoint_dtype(checkpoint, i)),
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
    const eng_loop_config *loop = &model->config.loop;
    if (loop->loops > 1)
        printf("; layers %d to %d %d times, with states of their own each time%s", loop->first,
               loop->first + loop->layers - 1, loop->loops, loop->exit_gate ? ", an exit gate behind each" : "");
    printf("\n");
}

static uint64_t weight_bytes(const eng_checkpoint *checkpoint) {
    const eng_model *model = eng_checkpoint_model(checkpoint);
    uint64_t bytes = 0;
    for (int32_t i = 0; i < model->tensors; i++)
        bytes += (uint64_t)model->tensor[i].count * eng_dtype_size(eng_checkpoint_dtype(checkpoint, i));
    return bytes;
}

static bool same_state(const eng_model *model, int32_t left, int32_t right) {
    const eng_layer *a = &model->layer[left], *b = &model->layer[right];
    return model->config.layer[left].mixer == model->config.layer[right].mixer && a->state_bytes == b->state_bytes &&
           a->page_bytes == b->page_bytes;
}

// A session's memory, and what a layer of each kind has of it.
static void print_state(const eng_model *model) {
    char a[32], b[32];
    printf("state             %s a session (%s bytes)%s\n", sized((double)model->state_bytes, a),
           grouped(model->state_bytes, b), model->state_storage == KERN_STORE_BF16 ? ", matrices in bf16" : "");
    if (model->waiting_bytes > 0)
        printf("waiting tokens    %s bytes a session more, since loops can be left for later\n",
               grouped(model->waiting_bytes, a));
    if (eng_model_has_pages(model))
        printf("KV                %s bytes a token more\n", grouped(model->page_bytes / KERN_PAGE_TOKENS, a));
    for (int32_t i = 0; i < model->config.layers; i++) {
        int32_t count = 0;
        bool first = true;
        for (int32_t j = 0; j < model->config.layers; j++) {
            count += same_state(model, i, j) ? eng_model_levels(model, j) : 0;
            first = first && (j >= i || !same_state(model, i, j));
        }
        if (!first)
            continue;
        const eng_layer *layer = &model->layer[i];
        printf("  %-15s %d x %s bytes", model->config.layer[i].mixer->name, count, grouped(layer->state_bytes, a));
        if (layer->page_bytes > 0)
            printf(", %s a token", grouped(layer->page_bytes / KERN_PAGE_TOKENS, a));
        printf("\n");
    }
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

static void print_summary(const eng_checkpoint *checkpoint) {
    const eng_model *model = eng_checkpoint_model(checkpoint);
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
    printf("weights           %s\n", sized((double)weight_bytes(checkpoint), a));
    print_state(model);
    print_operations(model);
    if (eng_model_has_mesa(model))
        printf("solver            tolerance %g, at most %d steps\n", (double)config->knobs.cg_tolerance,
               config->knobs.cg_max_steps);
    printf("trained length    %lld\n", (long long)config->trained_length);
    uint8_t bytes[32];
    if (eng_checkpoint_digest(checkpoint, bytes, NULL) == ENG_OK)
        for (int i = 0; i < 32; i++)
            snprintf(digest + 2 * i, 3, "%02x", bytes[i]);
    printf("digest            %s\n", digest[0] ? digest : "unreadable");
}

int trn_command_inspect(int argc, char **argv) {
    bool summary = false, helped = false;
    const char *stored_as = NULL;
    kern_storage storage;
    const trn_option options[] = {
        {"summary", NULL, TRN_FLAG, &summary, "without the table of tensors"},
        {"state-storage", "TYPE", TRN_STRING, &stored_as, "of states whose bytes are told: float32 (default) or bf16"},
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
    eng_checkpoint *checkpoint = NULL;
    eng_status status = trn_options_parse(&line, argc, argv, &dir, &positional, &helped, &error);
    if (helped)
        return TRN_EXIT_OK;
    if (status == ENG_OK)
        status = trn_parse_storage(stored_as, &storage, &error);
    if (status == ENG_OK)
        status = eng_checkpoint_open(dir, &checkpoint, &error);
    if (status == ENG_OK)
        eng_checkpoint_store_states(checkpoint, storage);
    if (status == ENG_OK && !summary) {
        print_tensors(checkpoint);
        printf("\n");
    }
    if (status == ENG_OK)
        print_summary(checkpoint);
    eng_checkpoint_close(checkpoint);
    return trn_command_end("inspect", status, &error);
}
