// SPDX-License-Identifier: Apache-2.0
// The door's functions over an open engine: requests go to the scheduler, text to the tokenizer.
//
// What is here adds nothing of its own. Functions that take a const engine touch only what is immutable once it is open
// and may be called from any thread; eng_read_gauges is the exception and belongs to the engine's thread like the rest.
#include "engine/engine.h"

#include <stdlib.h>

#include "engine/engine_internal.h"

const eng_model_info *eng_info(const eng_engine *engine) {
    return &engine->info;
}

eng_status eng_encode(const eng_engine *engine, const char *text, size_t length, bool add_special, int32_t **ids,
                      size_t *count, eng_error *error) {
    if (!engine->tokenizer)
        return eng_fail(error, ENG_UNSUPPORTED, "the model has no tokenizer.json");
    return eng_tokenizer_encode(engine->tokenizer, text, length, true, add_special, ids, count, error);
}

eng_status eng_encode_chat(const eng_engine *engine, const eng_chat *chat, int32_t **ids, size_t *count,
                           eng_error *error) {
    if (!engine->tokenizer || !engine->chat)
        return eng_fail(error, ENG_UNSUPPORTED, "the model has no %s",
                        engine->tokenizer ? "chat template" : "tokenizer.json");
    return eng_chat_encode(engine->chat, engine->tokenizer, chat, ids, count, error);
}

eng_status eng_decode(const eng_engine *engine, const int32_t *ids, size_t count, bool keep_special, char **text,
                      size_t *length, eng_error *error) {
    if (!engine->tokenizer)
        return eng_fail(error, ENG_UNSUPPORTED, "the model has no tokenizer.json");
    return eng_tokenizer_decode(engine->tokenizer, ids, count, keep_special, text, length, error);
}

const char *eng_token_bytes(const eng_engine *engine, int32_t id, size_t *length) {
    *length = 0;
    return engine->tokenizer ? eng_tokenizer_bytes(engine->tokenizer, id, length) : "";
}

bool eng_token_is_special(const eng_engine *engine, int32_t id) {
    return engine->tokenizer && eng_tokenizer_is_special(engine->tokenizer, id);
}

void eng_free(void *memory) {
    free(memory);
}

eng_status eng_submit(eng_engine *engine, const eng_request *request, uint64_t *id, eng_error *error) {
    return eng_scheduler_submit(engine->scheduler, request, id, error);
}

void eng_cancel(eng_engine *engine, uint64_t id) {
    eng_scheduler_cancel(engine->scheduler, id);
}

void eng_pause(eng_engine *engine, uint64_t id, bool paused) {
    eng_scheduler_pause(engine->scheduler, id, paused);
}

eng_status eng_step(eng_engine *engine, eng_event_fn on_event, void *context, bool *worked, eng_error *error) {
    return eng_scheduler_step(engine->scheduler, on_event, context, worked, error);
}

eng_status eng_send(eng_engine *engine, const eng_errand *errand, eng_error *error) {
    return eng_durable_send(engine->durable, errand, error);
}

int64_t eng_idle_ms(const eng_engine *engine) {
    const int64_t durable = eng_durable_idle_ms(engine->durable),
                  prefix = eng_prefix_store_idle_ms(engine->prefix_store);
    return prefix < 0 || (durable >= 0 && durable < prefix) ? durable : prefix;
}

void eng_read_gauges(const eng_engine *engine, eng_gauges *out) {
    *out = (eng_gauges){0};
    eng_scheduler_gauges(engine->scheduler, out);
    eng_durable_gauges(engine->durable, out);
    eng_prefix_store_gauges(engine->prefix_store, out);
    out->device_allocations = kern_allocations(engine->device);
}
