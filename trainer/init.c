// SPDX-License-Identifier: Apache-2.0
// mesa-trainer init --random SIZE --out DIR: a folder that can be served, of one of bench's random models.
//
// Its matrices are those that bench measures, bit for bit (bfloat16, the same seed). The tokenizer is learned from made
// up words, as many as the vocabulary needs, so that every id that such a model draws is text and is sent.
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "engine/buffer.h"
#include "engine/files.h"
#include "engine/forward.h"
#include "engine/random.h"
#include "trainer/bench.h"
#include "trainer/commands.h"
#include "trainer/options.h"
#include "trainer/tokenizer.h"

enum { SEED = 1, LETTERS = 6 };

static eng_status append_word(eng_buffer *text, uint64_t number) {
    char word[LETTERS + 1];
    uint32_t random[4];
    eng_philox(SEED, 3, number, random);
    for (int i = 0; i < LETTERS; i++)
        word[i] = (char)('a' + (random[i % 4] >> 8 * (i / 4)) % 26);
    word[LETTERS] = number % 16 == 15 ? '\n' : ' ';
    return eng_buffer_append(text, word, sizeof word);
}

static eng_status write_tokenizer(const char *dir, int32_t vocabulary, eng_error *error) {
    eng_buffer text = {0};
    const trn_tokenizer_options options = {.min_count = 1};
    char *path = eng_join_path(dir, "words.txt");
    eng_status status = path ? ENG_OK : ENG_NO_MEMORY;
    for (int32_t i = 0; status == ENG_OK && i < vocabulary * 2; i++)
        status = append_word(&text, (uint64_t)i);
    if (status != ENG_OK)
        (void)eng_fail(error, status, "out of memory for words");
    else
        status = eng_write_file_atomic(path, text.bytes, text.length, error);
    if (status == ENG_OK) {
        const char *const files[] = {path};
        status = trn_tokenizer_train(files, 1, vocabulary, &options, dir, error);
        unlink(path);
    }
    eng_buffer_free(&text);
    free(path);
    return status;
}

static eng_status write_model(const char *name, const char *dir, eng_error *error) {
    kern_device *device = NULL;
    eng_model *model = NULL;
    eng_weights *weights = NULL;
    eng_status status = trn_random_model_create(name, &model, error);
    if (status == ENG_OK)
        status = eng_open_device(&(kern_device_options){.name = "cpu"}, NULL, 0, &device, error);
    if (status == ENG_OK)
        status = eng_weights_init(model, device, SEED, false, &weights, error);
    if (status == ENG_OK)
        status = eng_checkpoint_save(dir, weights, ENG_BF16, NULL, error);
    if (status == ENG_OK)
        status = write_tokenizer(dir, model->config.vocab_size, error);
    if (status == ENG_OK)
        printf("%s: %llu parameters, %d ids\n", dir, (unsigned long long)model->parameters, model->config.vocab_size);
    eng_weights_free(weights);
    eng_model_free(model);
    kern_device_close(device);
    return status;
}

int trn_command_init(int argc, char **argv) {
    const char *random = NULL, *out = NULL;
    const trn_option options[] = {
        {"random", "SIZE", TRN_STRING, &random, "which of bench's random models: 30m, s135, mesa-a, gdn-a, tiny"},
        {"out", "DIR", TRN_STRING, &out, "folder to write, in bfloat16, with a tokenizer"},
    };
    const trn_command_line line = {"init --random SIZE --out DIR",
                                   "Writes an untrained model that can be served, to measure serving.",
                                   options,
                                   sizeof options / sizeof *options,
                                   0,
                                   0};
    bool helped = false;
    int positional = 0;
    eng_error error = {0};
    eng_status status = trn_options_parse(&line, argc, argv, NULL, &positional, &helped, &error);
    if (helped)
        return TRN_EXIT_OK;
    if (status == ENG_OK && (!random || !out))
        status = eng_fail(&error, ENG_INVALID, "--random and --out are needed");
    if (status == ENG_OK)
        status = write_model(random, out, &error);
    return trn_command_end("init", status, &error);
}
