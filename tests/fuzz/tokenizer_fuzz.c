// SPDX-License-Identifier: Apache-2.0
// Fuzz target of the tokenizer: any bytes are refused with words or give a tokenizer whose every id is sound.
//
// The input is a tokenizer.json; tests/engine/data holds larger seeds than the corpus. With clang:
// -fsanitize=fuzzer,address,undefined. With any compiler and tests/fuzz/corpus_main.c: a program that runs the files
// named on its command line.
#include <stdlib.h>
#include <string.h>

#include "engine/text.h"
#include "engine/tokenizer.h"
#include "tests/fuzz/fuzz.h"

static const char *const texts[] = {
    "",
    "a",
    "The ferry isn't only for water, 1234567.\n\n  x",
    "<s> e\xcc\x81\xcc\xa3 \xf0\x9f\xa6\xab</s>\xc2\xa0\t<sep>",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
};

static void use(const eng_tokenizer *tokenizer, const char *text) {
    int32_t *ids = NULL;
    size_t count = 0, length = 0;
    char *back = NULL;
    eng_error error = {0};
    eng_status status = eng_tokenizer_encode(tokenizer, text, strlen(text), true, true, &ids, &count, &error);
    if (status != ENG_OK) { // a byte without a token, or a pattern beyond its limits
        require((status == ENG_UNSUPPORTED || status == ENG_TOO_LONG) && error.text[0]);
        return;
    }
    for (size_t i = 0; i < count; i++)
        require(ids[i] >= 0 && ids[i] < eng_tokenizer_size(tokenizer));
    require(eng_tokenizer_decode(tokenizer, ids, count, true, &back, &length, NULL) == ENG_OK);
    require(eng_utf8_valid(back, length, NULL));
    free(back);
    free(ids);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    eng_tokenizer *tokenizer = NULL;
    eng_error error = {0};
    eng_status status = eng_tokenizer_parse((const char *)data, size, NULL, 0, 0, &tokenizer, &error);
    if (status != ENG_OK) {
        require(status == error.code && error.text[0] && !tokenizer);
        return 0;
    }
    require(eng_tokenizer_bos(tokenizer) < eng_tokenizer_size(tokenizer));
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        use(tokenizer, texts[i]);
    eng_tokenizer_close(tokenizer);
    return 0;
}
