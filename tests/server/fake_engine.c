// SPDX-License-Identifier: Apache-2.0
// An engine.h that computes nothing: letters drawn from seed, choice and position, with delays and faults on request.
//
// It keeps the real engine's promises that the server builds on: rows run together, up to one chunk of a prompt a step,
// text before a stop string only, one last event a choice, none after a cancellation. Of several choices the first
// reads the prompt up to its last chunk; the others begin there and get ahead of it.
#include "tests/server/fake_engine.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { ROWS = 4, CHUNK = 64 };

struct eng_engine {
    eng_model_info info;
    uint64_t queue_requests, next_id, count;
    int number;           // the first that was opened is 1
    char bytes[FAKE_BOS]; // of eng_token_bytes
    fake_request *first;  // oldest first
    bool stepping;
};

static fake_engine_controls controls;

fake_engine_controls *fake_engine(void) {
    return &controls;
}

static void sleep_us(long microseconds) {
    const struct timespec time = {.tv_sec = microseconds / 1000000, .tv_nsec = microseconds % 1000000 * 1000};
    if (microseconds > 0)
        nanosleep(&time, NULL);
}

static eng_status check_folder(const char *dir, eng_error *error) {
    return strstr(dir, "missing") ? eng_fail(error, ENG_NOT_FOUND, "%s/config.json: no such file", dir) : ENG_OK;
}

// As many digits as a real one has: the revision, then the name's.
static void describe_folder(const char *dir, eng_fingerprint *out) {
    const char *name = strrchr(dir, '/');
    unsigned sum = 0;

    for (const char *at = name ? name : dir; *at; at++)
        sum = sum * 31 + (unsigned char)*at;
    snprintf(out->states, sizeof out->states, "%08x%056x", strstr(dir, "demo") ? atomic_load(&controls.revision) : 0,
             sum);
    memcpy(out->whole, out->states, sizeof out->whole);
}

eng_status eng_read_fingerprint(const char *model_dir, eng_fingerprint *out, eng_error *error) {
    const eng_status status = check_folder(model_dir, error);

    if (!status)
        describe_folder(model_dir, out);
    return status;
}

eng_status eng_check_device(const char *name, eng_error *error) {
    return strcmp(name, "none") == 0 ? eng_fail(error, ENG_INVALID, "no device \"%s\"", name) : ENG_OK;
}

eng_status eng_open(const eng_options *options, eng_engine **out, eng_error *error) {
    const char *dir = options->model_dir;
    atomic_fetch_add(&controls.opening, 1);
    while (atomic_load(&controls.hold_open))
        sleep_us(1000);
    if (atomic_load(&controls.refuse_open))
        return eng_fail(error, ENG_NO_MEMORY, "fake has 1.0 of 2.0 MiB free; 1.5 are needed");
    if (check_folder(dir, error))
        return ENG_NOT_FOUND;
    eng_engine *engine = calloc(1, sizeof *engine);
    if (!engine)
        return eng_fail(error, ENG_NO_MEMORY, "no memory");
    engine->queue_requests = options->queue_requests;
    engine->info = (eng_model_info){
        .model_type = "fake",
        .mixers = "mesa_net",
        .device = "cpu (fake, 1 threads)",
        .numeric_profile = "fake",
        .prefix_audit = 256,
        .parameters = 5123456,
        .layers = 2,
        .loops = strstr(dir, "loops") ? 4 : 1,
        .vocab_size = FAKE_VOCABULARY,
        .hidden_size = 8,
        .state_bytes = 1024,
        .context_length = strstr(dir, "short") ? 64 : -1,
        .trained_length = 128,
        .bos_id = strstr(dir, "nobos") ? -1 : FAKE_BOS,
        .eos_id = FAKE_EOS,
        .chat_template = strstr(dir, "chat") ? "role: content" : NULL,
        .has_tokenizer = true,
        .has_mesa = !strstr(dir, "plain"),
        .has_loops = strstr(dir, "loops") != NULL,
        .has_exit_gate = strstr(dir, "loops") != NULL && !strstr(dir, "ungated"),
        .max_rows = options->max_rows ? options->max_rows : ROWS,
        .chunk = CHUNK,
        .default_knobs = {.cg_tolerance = 1e-4f, .cg_max_steps = 30, .exit_threshold = 1, .max_loops = 4},
    };
    for (int i = 0; i < FAKE_BOS; i++)
        engine->bytes[i] = (char)i;
    describe_folder(dir, &engine->info.fingerprint);
    engine->number = atomic_fetch_add(&controls.opened, 1) + 1;
    *out = engine;
    return ENG_OK;
}

void eng_close(eng_engine *engine) {
    if (!engine)
        return;
    for (fake_request *at = engine->first, *next; at; at = next) {
        next = at->next;
        atomic_fetch_sub(&controls.active, 1);
        fake_request_free(at);
    }
    free(engine);
    atomic_fetch_add(&controls.closed, 1);
}

const eng_model_info *eng_info(const eng_engine *engine) {
    return &engine->info;
}

eng_status eng_encode(const eng_engine *engine, const char *text, size_t length, bool add_special, int32_t **ids,
                      size_t *count, eng_error *error) {
    int32_t *out = malloc((length + 1) * sizeof *out);
    size_t written = 0;
    if (!out)
        return eng_fail(error, ENG_NO_MEMORY, "no memory");
    if (add_special && engine->info.bos_id >= 0)
        out[written++] = FAKE_BOS;
    for (size_t i = 0; i < length; i++)
        out[written++] = (unsigned char)text[i];
    *ids = out;
    *count = written;
    return ENG_OK;
}

// BOS, and then each message as "role: content", a line end, and EOS, which no content can write.
eng_status eng_encode_chat(const eng_engine *engine, const eng_chat *chat, int32_t **ids, size_t *count,
                           eng_error *error) {
    size_t room = 2, written = 0;
    if (!engine->info.chat_template)
        return eng_fail(error, ENG_UNSUPPORTED, "the model has no chat template");
    for (size_t i = 0; i < chat->count; i++)
        room += chat->messages[i].role.length + chat->messages[i].content.length + 4;
    int32_t *out = malloc((room + 16) * sizeof *out);
    if (!out)
        return eng_fail(error, ENG_NO_MEMORY, "no memory");
    out[written++] = FAKE_BOS;
    for (size_t i = 0; i < chat->count; i++) {
        const eng_text parts[] = {chat->messages[i].role, {": ", 2}, chat->messages[i].content, {"\n", 1}};
        for (size_t part = 0; part < 4; part++)
            for (size_t k = 0; k < parts[part].length; k++)
                out[written++] = (unsigned char)parts[part].bytes[k];
        out[written++] = FAKE_EOS;
    }
    for (const char *open = chat->add_generation_prompt ? "assistant: " : ""; *open; open++)
        out[written++] = (unsigned char)*open;
    *ids = out;
    *count = written;
    return ENG_OK;
}

eng_status eng_decode(const eng_engine *engine, const int32_t *ids, size_t count, bool keep_special, char **text,
                      size_t *length, eng_error *error) {
    char *out = malloc(count * 3 + 1);
    (void)engine;
    if (!out)
        return eng_fail(error, ENG_NO_MEMORY, "no memory");
    size_t written = 0;
    for (size_t i = 0; i < count; i++) {
        if (ids[i] < 128)
            out[written++] = (char)ids[i];
        else if (ids[i] != FAKE_BOS || keep_special) {
            memcpy(out + written, ids[i] == FAKE_BOS ? "<s>" : "\xef\xbf\xbd", 3);
            written += 3;
        }
    }
    out[written] = '\0';
    *text = out;
    *length = written;
    return ENG_OK;
}

const char *eng_token_bytes(const eng_engine *engine, int32_t id, size_t *length) {
    static const char *const others[] = {"<s>", "</s>", "a"};

    if (id >= FAKE_BOS && id < FAKE_VOCABULARY) {
        *length = strlen(others[id - FAKE_BOS]);
        return others[id - FAKE_BOS];
    }
    *length = id >= 0 && id < FAKE_BOS;
    return *length ? engine->bytes + id : "";
}

bool eng_token_is_special(const eng_engine *engine, int32_t id) {
    (void)engine;
    return id == FAKE_BOS || id == FAKE_EOS;
}

void eng_free(void *memory) {
    free(memory);
}

static void record(const eng_request *request) {
    atomic_store(&controls.last_cg_mode, (int)request->knobs.cg_mode);
    atomic_store(&controls.last_cg_tolerance, (int)(request->knobs.cg_tolerance * 1e6f + 0.5f));
    atomic_store(&controls.last_exit_threshold, (int)(request->knobs.exit_threshold * 1e6f + 0.5f));
    atomic_store(&controls.last_cg_max_steps, request->knobs.cg_max_steps);
    atomic_store(&controls.last_fail_unconverged, request->fail_unconverged);
    atomic_store(&controls.last_priority, request->priority);
    atomic_store(&controls.last_owner, (int)request->owner);
    atomic_store(&controls.last_min_tokens, (int)request->min_tokens);
    atomic_store(&controls.last_bias_count, (int)request->bias_count);
    atomic_store(&controls.last_presence, (int)(request->presence_penalty * 100));
    atomic_store(&controls.last_frequency, (int)(request->frequency_penalty * 100));
    atomic_store(&controls.last_repetition, (int)(request->repetition_penalty * 100));
    atomic_store(&controls.last_logprobs, request->logprobs);
    atomic_store(&controls.last_prompt_logprobs, request->prompt_logprobs);
    atomic_store(&controls.last_choices, request->choices);
}

static void add_choice(eng_engine *engine, fake_request *made) {
    fake_request **end = &engine->first;

    while (*end)
        end = &(*end)->next;
    *end = made;
    engine->count++;
    atomic_fetch_add(&controls.active, 1);
    atomic_fetch_add(&controls.submitted, 1);
}

eng_status eng_submit(eng_engine *engine, const eng_request *request, uint64_t *id, eng_error *error) {
    const int32_t choices = request->choices > 1 ? request->choices : 1;

    if (engine->count >= engine->queue_requests)
        return eng_fail(error, ENG_FULL, "full");
    record(request); // before it is counted: who waits for the count reads it
    *id = ++engine->next_id;
    for (int32_t choice = 0; choice < choices; choice++) {
        fake_request *made = fake_request_create(request, *id, choice);
        if (!made)
            return eng_fail(error, ENG_NO_MEMORY, "no memory");
        add_choice(engine, made);
    }
    return ENG_OK;
}

static void drop(eng_engine *engine, fake_request *found) {
    fake_request **at = &engine->first;

    while (*at != found)
        at = &(*at)->next;
    *at = found->next;
    engine->count--;
    if (found->paused)
        atomic_fetch_sub(&controls.paused, 1);
    atomic_fetch_sub(&controls.active, 1);
    fake_request_free(found);
}

// Also from inside a step, whose requests are dropped after it.
void eng_cancel(eng_engine *engine, uint64_t id) {
    for (fake_request *at = engine->first, *next; at; at = next) {
        next = at->next;
        if (at->id != id || at->dropped)
            continue;
        at->dropped = true;
        if (engine->stepping)
            continue;
        atomic_fetch_add(&controls.cancelled, 1); // before it is gone: who waits for that reads it
        drop(engine, at);
    }
}

void eng_pause(eng_engine *engine, uint64_t id, bool paused) {
    for (fake_request *at = engine->first; at; at = at->next)
        if (at->id == id && at->paused != paused) {
            at->paused = paused;
            atomic_fetch_add(&controls.paused, paused ? 1 : -1);
        }
}

static int64_t fork_place(const fake_request *request) {
    return (int64_t)(request->asked.count - 1) / CHUNK * CHUNK;
}

// The first choice waits where the others begin for so long that they are ahead of it.
static bool must_wait(fake_request *request) {
    enum { STEPS = 3 };

    return request->choice == 0 && request->asked.choices > 1 && fork_place(request) > 0 &&
           request->prompt_read == fork_place(request) && request->waited++ < STEPS;
}

// The others begin once the first has read as much as they need not read themselves.
static bool may_begin(const eng_engine *engine, fake_request *request) {
    const fake_request *first = engine->first;

    if (request->choice == 0 || request->prompt_read > 0 || fork_place(request) == 0)
        return true;
    while (first && (first->id != request->id || first->choice != 0))
        first = first->next;
    if (first && first->prompt_read < fork_place(request))
        return false;
    request->prompt_read = request->usage.cached_tokens = fork_place(request);
    return true;
}

static void advance(eng_engine *engine, fake_request *request, eng_event_fn on_event, void *context) {
    engine->stepping = true;
    const eng_finish finish = fake_request_advance(request, CHUNK, on_event, context);
    engine->stepping = false;
    if (finish == ENG_FINISH_NONE)
        return;
    request->dropped = true;
    atomic_fetch_add(&controls.finished, 1);
}

static void drop_ended(eng_engine *engine) {
    for (fake_request *at = engine->first, *next; at; at = next) {
        next = at->next;
        if (at->dropped)
            drop(engine, at);
    }
}

static bool is_held(const eng_engine *engine) {
    return atomic_load(&controls.held) == engine->number;
}

static void begin_step(const eng_engine *engine) {
    const int step_us = atomic_load(&controls.step_us);

    while (atomic_load(&controls.stuck))
        sleep_us(1000);
    sleep_us(step_us == 0 && is_held(engine) ? 1000 : step_us);
}

eng_status eng_step(eng_engine *engine, eng_event_fn on_event, void *context, bool *worked, eng_error *error) {
    int rows = 0;

    *worked = false;
    if (atomic_exchange(&controls.fail_step, 0))
        return eng_fail(error, ENG_DEVICE, "the device is gone");
    for (fake_request *at = engine->first; at && rows < engine->info.max_rows; at = at->next) {
        if (at->dropped || !may_begin(engine, at))
            continue;
        rows++; // a paused request keeps its row
        if (at->paused)
            continue;
        if (!*worked)
            begin_step(engine);
        *worked = true;
        if (is_held(engine) || must_wait(at))
            continue;
        advance(engine, at, on_event, context);
    }
    if (*worked)
        atomic_fetch_add(&controls.steps, 1);
    drop_ended(engine);
    return ENG_OK;
}

void eng_read_gauges(const eng_engine *engine, eng_gauges *out) {
    const uint64_t rows = (uint64_t)engine->info.max_rows;
    *out = (eng_gauges){.states_total = rows};
    for (const fake_request *at = engine->first; at; at = at->next)
        if (out->running < rows)
            out->running++;
        else {
            out->queued_requests++;
            out->queued_tokens += at->asked.count;
        }
    out->states_used = out->running;
}

// ---- timelines: only that they are there. What they do is tested with the engine itself, sessions_test.sh.
// -----------

eng_status eng_timeline_create(eng_engine *engine, uint64_t owner, uint64_t *id, eng_error *error) {
    static atomic_uint_least64_t last;
    (void)engine;
    (void)owner;
    (void)error;
    *id = ++last;
    return ENG_OK;
}

eng_status eng_timeline_read(const eng_engine *engine, uint64_t owner, uint64_t id, eng_timeline_info *out,
                             eng_error *error) {
    (void)engine;
    (void)owner;
    (void)id;
    (void)error;
    *out = (eng_timeline_info){.position = 0};
    return ENG_OK;
}

eng_status eng_timeline_drop(eng_engine *engine, uint64_t owner, uint64_t id, eng_error *error) {
    (void)engine;
    (void)owner;
    (void)id;
    (void)error;
    return ENG_OK;
}

static eng_status refuse_timeline(eng_error *error) {
    return eng_fail(error, ENG_NOT_FOUND, "the timelines of this engine do nothing");
}

eng_status eng_timeline_fork(eng_engine *engine, uint64_t owner, uint64_t id, int64_t position, uint64_t *fork,
                             eng_error *error) {
    (void)engine;
    (void)owner;
    (void)id;
    (void)position;
    (void)fork;
    return refuse_timeline(error);
}

eng_status eng_timeline_rollback(eng_engine *engine, uint64_t owner, uint64_t id, int64_t position, eng_error *error) {
    (void)engine;
    (void)owner;
    (void)id;
    (void)position;
    return refuse_timeline(error);
}

eng_status eng_timeline_export(eng_engine *engine, uint64_t owner, uint64_t id, void **bytes, size_t *count,
                               eng_error *error) {
    (void)engine;
    (void)owner;
    (void)id;
    (void)bytes;
    (void)count;
    return refuse_timeline(error);
}

eng_status eng_timeline_import(eng_engine *engine, uint64_t owner, uint64_t id, const void *bytes, size_t count,
                               eng_error *error) {
    (void)engine;
    (void)owner;
    (void)id;
    (void)bytes;
    (void)count;
    return refuse_timeline(error);
}

eng_status eng_timeline_digest(eng_engine *engine, uint64_t owner, uint64_t id,
                               unsigned char digest[ENG_TIMELINE_DIGEST_BYTES], eng_error *error) {
    (void)engine;
    (void)owner;
    (void)id;
    (void)digest;
    return refuse_timeline(error);
}

// ---- there is no store ----------------------------------------------------------------------------------------------

eng_status eng_send(eng_engine *engine, const eng_errand *errand, eng_error *error) {
    (void)engine;
    (void)errand;
    return eng_fail(error, ENG_UNSUPPORTED, "this engine has no store");
}

int64_t eng_idle_ms(const eng_engine *engine) {
    (void)engine;
    return -1;
}

eng_status eng_store_open(const eng_store_options *options, eng_store **out, eng_error *error) {
    (void)options;
    (void)out;
    return eng_fail(error, ENG_UNSUPPORTED, "there is no store");
}

void eng_store_close(eng_store *store) {
    (void)store;
}

void eng_store_run(eng_store *store) {
    (void)store;
}

void eng_store_stop(eng_store *store) {
    (void)store;
}

void eng_store_read_gauges(eng_store *store, eng_store_gauges *out) {
    (void)store;
    *out = (eng_store_gauges){.queued = 0};
}
