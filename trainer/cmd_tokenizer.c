// SPDX-License-Identifier: Apache-2.0
// mesa-trainer tokenizer --vocab N --out DIR FILE...: trains a byte-level BPE tokenizer (tokenizer.h).
// Checks the command line and shows progress; the training itself knows nothing of either.
#include <stdio.h>

#include "trainer/commands.h"
#include "trainer/options.h"
#include "trainer/progress.h"
#include "trainer/tokenizer.h"

enum { MAX_FILES = 4096 };

typedef struct tokenizer_options {
    const char *out;
    int64_t vocab, digits;
    trn_strings special;
} tokenizer_options;

static eng_status check_options(const tokenizer_options *o, eng_error *error) {
    if (!o->out)
        return eng_fail(error, ENG_INVALID, "--out is needed");
    if (o->vocab == 0)
        return eng_fail(error, ENG_INVALID, "--vocab is needed");
    if (o->vocab < 257 || o->vocab > 1 << 20)
        return eng_fail(error, ENG_INVALID, "--vocab: not in 257..1048576");
    if (o->digits != 1 && o->digits != 3)
        return eng_fail(error, ENG_INVALID, "--digits: not 1 or 3");
    return ENG_OK;
}

int trn_command_tokenizer(int argc, char **argv) {
    tokenizer_options o = {.digits = 3};
    const trn_option options[] = {
        {"vocab", "N", TRN_INTEGER, &o.vocab, "ids in all, special tokens and the 256 bytes included"},
        {"out", "DIR", TRN_STRING, &o.out, "folder for tokenizer.json and tokenizer_config.json"},
        {"digits", "N", TRN_INTEGER, &o.digits, "digits that a token may hold: 1 or 3 (default 3)"},
        {"special", "TEXT", TRN_STRINGS, &o.special, "a special token besides <|endoftext|>; may be repeated"},
    };
    const trn_command_line line = {
        "tokenizer --vocab N --out DIR FILE... [options]",
        "Trains a byte-level BPE tokenizer on UTF-8 text files whose documents are separated by a\n"
        "line that holds only <|endoftext|>.",
        options,
        sizeof options / sizeof *options,
        1,
        MAX_FILES};
    const char *file[MAX_FILES];
    bool helped = false;
    int files = 0;
    eng_error error = {0};
    eng_status status = trn_options_parse(&line, argc, argv, file, &files, &helped, &error);
    if (helped)
        return TRN_EXIT_OK;
    if (status == ENG_OK)
        status = check_options(&o, &error);
    if (status == ENG_OK) {
        trn_progress progress;
        trn_progress_begin(&progress);
        trn_tokenizer_options how = {.digits = (int32_t)o.digits,
                                     .special = o.special.item,
                                     .special_count = (size_t)o.special.count,
                                     .progress = trn_progress_part,
                                     .context = &progress};
        status = trn_tokenizer_train(file, (size_t)files, (int32_t)o.vocab, &how, o.out, &error);
        trn_progress_end(&progress);
    }
    if (status == ENG_OK)
        printf("%s: %lld ids from %d files\n", o.out, (long long)o.vocab, files);
    return trn_command_end("tokenizer", status, &error);
}
