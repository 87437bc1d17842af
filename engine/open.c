// SPDX-License-Identifier: Apache-2.0
// From options to an engine that serves: device, files, weights, pool, batch, scheduler, in this order.
//
// Every byte that serving needs on the device is allocated here, so what does not fit is refused now, with the bytes
// that were asked for, and nothing is refused later. eng_close takes an engine apart at any stage of its making, which
// is all the unwinding that a failed eng_open needs.
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/engine_internal.h"
#include "engine/fingerprint.h"
#include "engine/log.h"
#include "engine/mixer.h"

enum {
    DEFAULT_QUEUE_REQUESTS = 256,
    DEFAULT_QUEUE_TOKENS = 1 << 20,
    DEFAULT_SESSION_BUDGET = 1 << 30,
    DEFAULT_SESSION_HISTORY = 1 << 20,
    DEFAULT_SNAPSHOT_TOKENS = 1024,
    DEFAULT_KV_TOKENS = 1 << 16,
    MINIMUM_DEFAULT_ROWS = 32,
    MAXIMUM_ROWS = 4096,
    MAXIMUM_PROMPT_TOKENS = 1 << 16,
};

static eng_logger logger_of(const eng_options *options) {
    return (eng_logger){options->log, options->log_context};
}

static eng_status check_options(const eng_options *options, eng_error *error) {
    if (!options->model_dir || !options->model_dir[0])
        return eng_fail(error, ENG_INVALID, "model_dir is empty");
    if (options->max_rows < 0 || options->max_rows > MAXIMUM_ROWS)
        return eng_fail(error, ENG_INVALID, "max_rows is %" PRId32 "; its range is 1 to %d, or 0 for the default",
                        options->max_rows, MAXIMUM_ROWS);
    if (options->prompt_tokens < 0 || options->prompt_tokens > MAXIMUM_PROMPT_TOKENS)
        return eng_fail(error, ENG_INVALID, "prompt_tokens is %" PRId32 "; its range is 1 to %d, or 0 for the default",
                        options->prompt_tokens, MAXIMUM_PROMPT_TOKENS);
    if (options->snapshot_tokens < 0)
        return eng_fail(error, ENG_INVALID, "snapshot_tokens is %" PRId32 ", below 0", options->snapshot_tokens);
    if (options->store_prefixes < 0)
        return eng_fail(error, ENG_INVALID, "store_prefixes is %" PRId64 ", below 0", options->store_prefixes);
    return ENG_OK;
}

eng_status eng_check_device(const char *name, eng_error *error) {
    char reason[256] = "";
    return kern_device_check_name(name, reason, sizeof reason) == KERN_OK ? ENG_OK
                                                                          : eng_fail(error, ENG_INVALID, "%s", reason);
}

static eng_status open_device(const eng_options *options, eng_engine *engine, eng_error *error) {
    const char *name = options->device && options->device[0] ? options->device : "auto";
    const bool chooses = strcmp(name, "auto") == 0;
    const bool cpu_alone = chooses && eng_checkpoint_model(engine->checkpoint)->config.quantised;
    char reason[256] = "";
    kern_device_options device = {.name = cpu_alone ? "cpu" : name, .fast = options->fast};
    eng_status opened = eng_open_device(&device, reason, sizeof reason, &engine->device, error);
    if (opened != ENG_OK)
        return opened;
    const char *why = cpu_alone ? "the weights are quantised" : reason;
    if (chooses)
        eng_log(logger_of(options), ENG_LOG_INFO, "device auto is %s%s%s",
                kern_device_describe(engine->device)->description, why[0] ? ", not CUDA: " : "", why);
    if (options->state_storage == ENG_STATE_BF16 && !kern_device_describe(engine->device)->stores_bf16)
        return eng_fail(error, ENG_INVALID, "state_storage bf16 needs a CUDA device, this is %s",
                        kern_device_describe(engine->device)->description);
    kern_status status = kern_stream_open(engine->device, &engine->stream);
    return status ? eng_fail_kernel(error, status, "opening a stream") : ENG_OK;
}

// A template that cannot be run is no reason not to serve; who asks for a chat is told why there is none.
static eng_status open_chat(const eng_options *options, eng_engine *engine, eng_error *error) {
    eng_status status = eng_chat_format_open(options->model_dir, &engine->chat, error);
    const char *fault = engine->chat ? eng_chat_format_fault(engine->chat) : NULL;
    if (status == ENG_OK && fault)
        eng_log(logger_of(options), ENG_LOG_WARNING, "%s: no chat: %s", options->model_dir, fault);
    return status;
}

static eng_status open_files(const eng_options *options, eng_engine *engine, eng_error *error) {
    eng_error why = {0};
    eng_status status = eng_checkpoint_open(options->model_dir, &engine->checkpoint, error);
    if (status != ENG_OK)
        return status;
    if (options->state_storage == ENG_STATE_BF16)
        eng_checkpoint_store_states(engine->checkpoint, KERN_STORE_BF16);
    const eng_model *model = eng_checkpoint_model(engine->checkpoint);
    status = eng_tokenizer_open(options->model_dir, model->config.vocab_size, &engine->tokenizer, &why);
    if (status == ENG_NOT_FOUND && !options->need_tokenizer)
        eng_log(logger_of(options), ENG_LOG_WARNING, "%s: no tokenizer.json; token ids only", options->model_dir);
    else if (status != ENG_OK)
        return eng_fail(error, status, "%s", why.text);
    return engine->tokenizer ? open_chat(options, engine, error) : ENG_OK;
}

typedef struct pool_size {
    int32_t slots, pages;
    uint64_t bytes;        // with what waits in sessions of looped models
    int32_t prompt_chunks; // a step
} pool_size;

static int32_t prompt_chunks(const eng_options *options, const kern_device_info *device) {
    return options->prompt_tokens > 0 ? (options->prompt_tokens + device->chunk - 1) / device->chunk
                                      : device->prompt_chunks;
}

// Of one prompt in a step; where states are bf16 its tokens follow one another on every device.
static int32_t row_chunks(const eng_engine *engine, pool_size size) {
    const bool whole = eng_checkpoint_model(engine->checkpoint)->state_storage == KERN_STORE_F32;
    const int32_t most = whole ? kern_device_describe(engine->device)->row_chunks : 1;
    return most < size.prompt_chunks ? most : size.prompt_chunks;
}

static uint64_t align64(uint64_t bytes) {
    return (bytes + 63) & ~UINT64_C(63);
}

// Of a session's slot: its state, and the tokens that wait for their loops.
static uint64_t session_bytes(const eng_engine *engine) {
    const eng_model *model = eng_checkpoint_model(engine->checkpoint);
    return align64(model->state_bytes) + model->waiting_bytes;
}

// A budget is spent on as many states, up to max_rows, as leave each one page; the rest becomes pages.
static eng_status size_pool(const eng_options *options, const eng_engine *engine, pool_size *out, eng_error *error) {
    const eng_model *model = eng_checkpoint_model(engine->checkpoint);
    const kern_device_info *device = kern_device_describe(engine->device);
    uint64_t slot = session_bytes(engine), page = align64(model->page_bytes);
    uint64_t rows = (uint64_t)options->max_rows, budget = options->state_budget;
    if (rows == 0)
        rows = (uint64_t)(device->default_rows > MINIMUM_DEFAULT_ROWS ? device->default_rows : MINIMUM_DEFAULT_ROWS);
    if (budget == 0)
        budget = rows * slot + page * (DEFAULT_KV_TOKENS / KERN_PAGE_TOKENS);
    if (budget < slot + page)
        return eng_fail(error, ENG_INVALID, "state_budget is %" PRIu64 " bytes; one state%s needs %" PRIu64, budget,
                        page ? " and one KV page" : "", slot + page);
    uint64_t slots = slot + page == 0 || budget / (slot + page) > rows ? rows : budget / (slot + page);
    uint64_t pages = page ? (budget - slots * slot) / page : 0;
    if (pages > INT32_MAX / 2)
        pages = INT32_MAX / 2;
    *out = (pool_size){(int32_t)slots, (int32_t)pages, slots * slot + pages * page, prompt_chunks(options, device)};
    if (slots < rows)
        eng_log(logger_of(options), ENG_LOG_WARNING, "state_budget holds %" PRIu64 " of %" PRIu64 " states", slots,
                rows);
    return ENG_OK;
}

static int32_t step_tokens(const eng_engine *engine, pool_size size) {
    return size.slots + ENG_IDLE_FACTOR * size.prompt_chunks * kern_device_describe(engine->device)->chunk;
}

static eng_status check_pool(const kern_device_info *device, pool_size size, eng_error *error) {
    if (device->memory_total == 0 || size.bytes <= device->memory_total)
        return ENG_OK;
    return eng_fail(error, ENG_NO_MEMORY,
                    "states and KV pages need %" PRIu64 " bytes; the device has %" PRIu64
                    " in all; lower max_rows or state_budget",
                    size.bytes, device->memory_total);
}

// Bytes that may be taken, as far as anybody counts them; 0: nobody does.
static uint64_t memory_left(const eng_options *options, const kern_device_info *device) {
    return device->memory_free ? device->memory_free : options->memory_limit;
}

// What is too large is refused before anything is loaded; all of it where it is counted what is free.
static eng_status check_memory(const eng_options *options, const eng_engine *engine, pool_size size, eng_error *error) {
    const kern_device_info *device = kern_device_describe(engine->device);
    const eng_model *model = eng_checkpoint_model(engine->checkpoint);
    const uint64_t left = memory_left(options, device);
    const double mib = 0x1p20;
    uint64_t activations = 0;
    if (left == 0)
        return check_pool(device, size, error);
    eng_status status =
        eng_batch_measure(model, engine->device, size.slots, step_tokens(engine, size), &activations, error);
    if (status != ENG_OK)
        return status;
    uint64_t weights = eng_weights_measure(engine->checkpoint),
             pages = (uint64_t)size.pages * align64(model->page_bytes);
    if (weights + size.bytes + activations <= left)
        return ENG_OK;
    return eng_fail(error, ENG_NO_MEMORY,
                    "%s has %.1f of %.1f MiB free; %.1f are needed: weights %.1f, %" PRId32 " states %.1f, %" PRId32
                    " KV pages %.1f, activations %.1f; lower max_rows or state_budget",
                    device->name, (double)left / mib, (double)device->memory_total / mib,
                    (double)(weights + size.bytes + activations) / mib, (double)weights / mib, size.slots,
                    (double)(size.bytes - pages) / mib, size.pages, (double)pages / mib, (double)activations / mib);
}

// What a state must have come from: the files of model and tokenizer. And the numbers' profile, which may differ.
static eng_status make_key(const eng_options *options, eng_engine *engine, eng_error *error) {
    const char *profile = engine->info.numeric_profile;
    const eng_status status = eng_fingerprint_of(engine->checkpoint, options->model_dir, engine->key.fingerprint,
                                                 &engine->info.fingerprint, error);
    return status == ENG_OK ? eng_digest_bytes(profile, strlen(profile), engine->key.profile) : status;
}

static eng_status make_timelines(const eng_options *options, eng_engine *engine, eng_error *error) {
    eng_status status = make_key(options, engine, error);
    if (status == ENG_OK)
        status = eng_snapshots_create(engine->pool, engine->device, engine->stream, &engine->snapshots, error);
    if (status != ENG_OK)
        return status;
    const eng_timelines_options timelines = {
        .snapshots = engine->snapshots,
        .budget = options->session_budget ? options->session_budget : DEFAULT_SESSION_BUDGET,
        .history = options->session_history > 0 ? options->session_history : DEFAULT_SESSION_HISTORY,
        .context_length = engine->info.context_length};
    return eng_timelines_create(&timelines, &engine->timelines, error);
}

static eng_status make_durable(const eng_options *options, eng_engine *engine, eng_error *error) {
    const eng_durable_options durable = {.store = options->store,
                                         .timelines = engine->timelines,
                                         .pool = engine->pool,
                                         .device = engine->device,
                                         .key = &engine->key,
                                         .vocab = engine->info.vocab_size,
                                         .lease_ms = options->lease_ms,
                                         .wake = options->wake,
                                         .wake_context = options->wake_context};
    return options->store ? eng_durable_create(&durable, &engine->durable, error) : ENG_OK;
}

static eng_status make_prefix(const eng_options *options, pool_size size, eng_engine *engine, eng_error *error) {
    const uint64_t least = eng_pool_slot_stride(engine->pool);
    eng_status status =
        eng_snapshots_create(engine->pool, engine->device, engine->stream, &engine->prefix_snapshots, error);
    if (status != ENG_OK)
        return status;
    const eng_prefix_options prefix = {.snapshots = engine->prefix_snapshots,
                                       .stream = engine->stream,
                                       .key = &engine->key,
                                       .budget = options->prefix_budget,
                                       .shared = size.bytes,
                                       .chunk = engine->info.chunk,
                                       .spacing = options->snapshot_tokens > 0 ? options->snapshot_tokens
                                                                               : DEFAULT_SNAPSHOT_TOKENS,
                                       .has_solver = engine->info.has_mesa};
    if (options->prefix_budget > 0 && options->prefix_budget < least)
        eng_log(logger_of(options), ENG_LOG_WARNING,
                "prefix_budget is %" PRIu64 " bytes; one state has %" PRIu64 ": no prefix is kept",
                options->prefix_budget, least);
    return eng_prefix_create(&prefix, &engine->prefix, error);
}

static eng_status make_prefix_store(const eng_options *options, eng_engine *engine, eng_error *error) {
    const eng_prefix_store_options stored = {.store = options->store,
                                             .prefix = engine->prefix,
                                             .pool = engine->pool,
                                             .key = &engine->key,
                                             .vocab = engine->info.vocab_size,
                                             .chunk = engine->info.chunk,
                                             .context = engine->info.context_length,
                                             .least = options->store_prefixes,
                                             .wake = options->wake,
                                             .wake_context = options->wake_context,
                                             .log = logger_of(options)};
    return options->store && options->store_prefixes > 0 && eng_prefix_keeps(engine->prefix)
               ? eng_prefix_store_create(&stored, &engine->prefix_store, error)
               : ENG_OK;
}

static eng_status start_serving(const eng_options *options, pool_size size, eng_engine *engine, eng_error *error) {
    const eng_model *model = engine->weights->model;
    eng_status status = eng_pool_create(model, engine->device, size.slots, size.pages, &engine->pool, error);
    if (status == ENG_OK)
        status = eng_batch_create(engine->weights, engine->pool, engine->stream, size.slots, step_tokens(engine, size),
                                  &engine->batch, error);
    if (status == ENG_OK)
        status = eng_batch_warm_up(engine->batch, error);
    if (status == ENG_OK)
        status = make_timelines(options, engine, error);
    if (status == ENG_OK)
        status = make_durable(options, engine, error);
    if (status == ENG_OK)
        status = make_prefix(options, size, engine, error);
    if (status == ENG_OK)
        status = make_prefix_store(options, engine, error);
    if (status != ENG_OK)
        return status;
    engine->info.max_rows = size.slots;
    engine->info.prompt_tokens = size.prompt_chunks * engine->info.chunk;
    engine->info.prompt_row_tokens = row_chunks(engine, size) * engine->info.chunk;
    engine->info.pool_bytes = size.bytes;
    engine->info.fast = options->fast;
    engine->info.prefix_audit = options->fast ? 0 : options->prefix_audit;
    eng_scheduler_options scheduler = {
        .rules = {.model = model, .tokenizer = engine->tokenizer, .context_length = engine->info.context_length},
        .pool = engine->pool,
        .timelines = engine->timelines,
        .durable = engine->durable,
        .prefix = engine->prefix,
        .prefix_store = engine->prefix_store,
        .audit = engine->info.prefix_audit,
        .batch = engine->batch,
        .stream = engine->stream,
        .chunk = engine->info.chunk,
        .prompt_chunks = size.prompt_chunks,
        .row_chunks = engine->info.prompt_row_tokens / engine->info.chunk,
        .ahead = kern_device_describe(engine->device)->asynchronous,
        .queue_requests = options->queue_requests ? options->queue_requests : DEFAULT_QUEUE_REQUESTS,
        .queue_tokens = options->queue_tokens ? options->queue_tokens : DEFAULT_QUEUE_TOKENS,
        .log = logger_of(options)};
    return eng_scheduler_create(&scheduler, &engine->scheduler, error);
}

// The distinct mixers in layer order.
static void list_mixers(const eng_model *model, char *out, size_t size) {
    size_t length = 0;
    out[0] = '\0';
    for (int32_t layer = 0; layer < model->config.layers; layer++) {
        const eng_mixer *mixer = model->config.layer[layer].mixer;
        bool listed = false;
        for (int32_t earlier = 0; earlier < layer && !listed; earlier++)
            listed = model->config.layer[earlier].mixer == mixer;
        if (!listed && length < size)
            length += (size_t)snprintf(out + length, size - length, "%s%s", length ? "," : "", mixer->name);
    }
}

static void describe(eng_engine *engine) {
    const eng_model *model = engine->weights->model;
    const eng_config *config = &model->config;
    const kern_device_info *device = kern_device_describe(engine->device);
    list_mixers(model, engine->mixers, sizeof engine->mixers);
    snprintf(engine->numeric_profile, sizeof engine->numeric_profile, "%s%s", device->numeric_profile,
             model->state_storage == KERN_STORE_BF16 ? " states=bf16" : "");
    engine->info = (eng_model_info){
        .model_type = config->model_type,
        .mixers = engine->mixers,
        .device = device->description,
        .numeric_profile = engine->numeric_profile,
        .parameters = model->parameters,
        .layers = config->layers,
        .loops = config->loop.loops,
        .vocab_size = config->vocab_size,
        .hidden_size = config->hidden_size,
        .state_bytes = model->state_bytes,
        .kv_bytes_per_token = model->page_bytes / KERN_PAGE_TOKENS,
        .context_length = eng_model_has_pages(model) ? config->max_positions : -1,
        .trained_length = config->trained_length,
        .bos_id = engine->tokenizer ? eng_tokenizer_bos(engine->tokenizer) : -1,
        .eos_id = config->eos_count > 0 ? config->eos_id[0] : -1,
        .chat_template = engine->chat ? eng_chat_format_text(engine->chat) : NULL,
        .has_tokenizer = engine->tokenizer != NULL,
        .has_mesa = eng_model_has_mesa(model),
        .has_loops = eng_model_reads_loops(model),
        .has_exit_gate = eng_model_reads_loops(model) && config->loop.exit_gate,
        .chunk = device->chunk,
        .default_knobs = config->knobs,
        .weight_bytes = engine->weights->bytes,
    };
}

eng_status eng_open(const eng_options *options, eng_engine **out, eng_error *error) {
    eng_status status = check_options(options, error);
    if (status != ENG_OK)
        return status;
    eng_engine *engine = calloc(1, sizeof *engine);
    if (!engine)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for the engine");
    pool_size size = {0};
    status = open_files(options, engine, error);
    if (status == ENG_OK)
        status = open_device(options, engine, error);
    if (status == ENG_OK)
        status = size_pool(options, engine, &size, error);
    if (status == ENG_OK)
        status = check_memory(options, engine, size, error);
    if (status == ENG_OK)
        status = eng_weights_load(engine->checkpoint, engine->device, false, &engine->weights, error);
    if (status == ENG_OK) {
        describe(engine);
        status = start_serving(options, size, engine, error);
    }
    if (status != ENG_OK) {
        eng_close(engine);
        return status;
    }
    const eng_model_info *info = &engine->info;
    eng_log(logger_of(options), ENG_LOG_INFO,
            "%s: %s (%s), %" PRIu64 " parameters on %s; %" PRId32 " rows, %" PRIu64 " bytes of states and KV pages; "
            "between two tokens of a request lie at most one step and %" PRId32 " prompt tokens",
            options->model_dir, info->model_type, info->mixers, info->parameters, info->device, info->max_rows,
            info->pool_bytes, info->prompt_tokens);
    *out = engine;
    return ENG_OK;
}

void eng_close(eng_engine *engine) {
    if (!engine)
        return;
    eng_scheduler_free(engine->scheduler);
    eng_prefix_store_free(engine->prefix_store);
    eng_prefix_free(engine->prefix);
    eng_snapshots_free(engine->prefix_snapshots);
    eng_durable_free(engine->durable);
    eng_timelines_free(engine->timelines);
    eng_snapshots_free(engine->snapshots);
    eng_batch_free(engine->batch);
    eng_pool_free(engine->pool);
    eng_weights_free(engine->weights);
    eng_chat_format_close(engine->chat);
    eng_tokenizer_close(engine->tokenizer);
    eng_checkpoint_close(engine->checkpoint);
    kern_stream_close(engine->stream);
    kern_device_close(engine->device);
    free(engine);
}
