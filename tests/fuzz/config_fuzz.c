// SPDX-License-Identifier: Apache-2.0
// Fuzz target of config.json: any bytes are refused with words or give a model whose table is sound.
//
// With clang: -fsanitize=fuzzer,address,undefined. With any compiler and tests/fuzz/corpus_main.c: a program that runs
// the files named on its command line.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/model.h"
#include "tests/fuzz/fuzz.h"

static void use(const eng_model *model) {
    uint64_t parameters = 0;
    for (int32_t i = 0; i < model->tensors; i++) {
        const eng_tensor *tensor = &model->tensor[i];
        int64_t count = 1;
        for (int d = 0; d < tensor->ndim; d++)
            count *= tensor->shape[d];
        require(count > 0 && count == tensor->count && tensor->name[0]);
        require(i == 0 || strcmp(tensor->name, model->tensor[i - 1].name) != 0);
        parameters += (uint64_t)count;
    }
    require(parameters == model->parameters);
    for (int32_t i = 0; i < model->config.layers; i++) {
        const eng_layer *layer = &model->layer[i];
        const size_t levels = (size_t)eng_model_levels(model, i);
        require(layer->state_offset % 64 == 0);
        require(layer->state_offset + layer->state_bytes * levels <= model->state_bytes);
        require(layer->page_offset + layer->page_bytes * levels <= model->page_bytes);
    }
    double flops = eng_model_flops(model, 100, 10);
    require(isfinite(flops) && flops > 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    eng_config config = {0};
    eng_model *model = NULL;
    eng_error error = {0};
    eng_status status = eng_config_parse((const char *)data, size, "config.json", &config, &error);
    if (status != ENG_OK) {
        require(status == error.code && error.text[0] && !config.layer && !config.json);
        return 0;
    }
    require(eng_model_create(&config, &model, &error) == ENG_OK);
    use(model);
    eng_model_free(model);
    return 0;
}
