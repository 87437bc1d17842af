// SPDX-License-Identifier: Apache-2.0
// An engine.h that computes nothing: letters drawn from seed, choice and position, with delays and faults on request.
//
// It keeps the real engine's promises that the server builds on: rows run together, up to one chunk of a prompt a step,
// text before a stop string only, one last event a request, none after a cancellation.
#include "tests/server/fake_engine.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "engine/engine.h"

enum { BOS = 256, EOS = 257, VOCABULARY = 258, ROWS = 4, CHUNK = 64, MAX_TEXT = 4096 };

typedef struct fake_request {
    struct fake_request *next;
    uint64_t id;
    int64_t prompt_count, prompt_read, made, max_tokens;
    eng_sampling sampling;
    eng_knobs knobs;
    bool fail_unconverged, paused;
    char stops[16][1025];
    size_t stop_lengths[16], stop_count;
    char *text; // held back
    size_t held;
    void *user;
    eng_usage usage;
} fake_request;

struct eng_engine {
    eng_model_info info;
    uint64_t queue_requests, next_id, count;
    char bytes[BOS];     // of eng_token_bytes
    fake_request *first; // oldest first
};

static fake_engine_controls controls;

fake_engine_controls *fake_engine(void) {
    return &controls;
}

static char letter(unsigned long long seed, unsigned choice, long position) {
    unsigned long long x = seed * 0x9e3779b97f4a7c15ull + choice * 0xbf58476d1ce4e5b9ull + (unsigned long long)position;
    x ^= x >> 31;
    x *= 0x94d049bb133111ebull;
    x ^= x >> 29;
    return (char)('a' + x % 26);
}

void fake_engine_text(unsigned long long seed, unsigned choice, long first, long count, char *out) {
    for (long i = 0; i < count; i++)
        out[i] = letter(seed, choice, first + i);
    out[count] = '\0';
}

static void sleep_us(long microseconds) {
    const struct timespec time = {.tv_sec = microseconds / 1000000, .tv_nsec = microseconds % 1000000 * 1000};
    if (microseconds > 0)
        nanosleep(&time, NULL);
}

eng_status eng_open(const eng_options *options, eng_engine **out, eng_error *error) {
    const char *dir = options->model_dir;
    sleep_us(atomic_load(&controls.load_ms) * 1000L);
    if (strstr(dir, "missing"))
        return eng_fail(error, ENG_NOT_FOUND, "%s/config.json: no such file", dir);
    eng_engine *engine = calloc(1, sizeof *engine);
    if (!engine)
        return eng_fail(error, ENG_NO_MEMORY, "no memory");
    engine->queue_requests = options->queue_requests;
    engine->info = (eng_model_info){
        .model_type = "fake",
        .mixers = "mesa_net",
        .device = "cpu (fake, 1 threads)",
        .numeric_profile = "fake",
        .parameters = 5123456,
        .layers = 2,
        .loops = strstr(dir, "loops") ? 4 : 1,
        .vocab_size = VOCABULARY,
        .hidden_size = 8,
        .state_bytes = 1024,
        .context_length = strstr(dir, "short") ? 64 : -1,
        .trained_length = 128,
        .bos_id = strstr(dir, "nobos") ? -1 : BOS,
        .eos_id = EOS,
        .has_tokenizer = true,
        .has_mesa = !strstr(dir, "plain"),
        .has_loops = strstr(dir, "loops") != NULL,
        .max_rows = options->max_rows ? options->max_rows : ROWS,
        .chunk = CHUNK,
        .default_knobs = {.cg_tolerance = 1e-4f, .cg_max_steps = 30, .exit_threshold = 1, .max_loops = 4},
    };
    for (int i = 0; i < BOS; i++)
        engine->bytes[i] = (char)i;
    *out = engine;
    return ENG_OK;
}

static void free_request(fake_request *request) {
    free(request->text);
    free(request);
}

void eng_close(eng_engine *engine) {
    if (!engine)
        return;
    for (fake_request *at = engine->first, *next; at; at = next) {
        next = at->next;
        atomic_fetch_sub(&controls.active, 1);
        free_request(at);
    }
    free(engine);
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
        out[written++] = BOS;
    for (size_t i = 0; i < length; i++)
        out[written++] = (unsigned char)text[i];
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
        else if (ids[i] != BOS || keep_special) {
            memcpy(out + written, ids[i] == BOS ? "<s>" : "\xef\xbf\xbd", 3);
            written += 3;
        }
    }
    out[written] = '\0';
    *text = out;
    *length = written;
    return ENG_OK;
}

const char *eng_token_bytes(const eng_engine *engine, int32_t id, size_t *length) {
    if (id == BOS || id == EOS) {
        *length = id == BOS ? 3 : 4;
        return id == BOS ? "<s>" : "</s>";
    }
    *length = id >= 0 && id < BOS;
    return *length ? engine->bytes + id : "";
}

bool eng_token_is_special(const eng_engine *engine, int32_t id) {
    (void)engine;
    return id == BOS || id == EOS;
}

void eng_free(void *memory) {
    free(memory);
}

eng_status eng_submit(eng_engine *engine, const eng_request *request, uint64_t *id, eng_error *error) {
    if (engine->count >= engine->queue_requests)
        return eng_fail(error, ENG_FULL, "full");
    fake_request *made = calloc(1, sizeof *made);
    if (!made)
        return eng_fail(error, ENG_NO_MEMORY, "no memory");
    made->id = ++engine->next_id;
    made->prompt_count = (int64_t)request->count;
    made->max_tokens = request->max_tokens;
    made->sampling = request->sampling;
    made->knobs = request->knobs;
    made->fail_unconverged = request->fail_unconverged;
    made->user = request->user;
    made->stop_count = request->stop_count;
    for (size_t i = 0; i < request->stop_count; i++) {
        memcpy(made->stops[i], request->stops[i].bytes, request->stops[i].length);
        made->stop_lengths[i] = request->stops[i].length;
    }
    made->text = calloc(1, MAX_TEXT * 4);
    made->usage.prompt_tokens = made->prompt_count;
    fake_request **end = &engine->first;
    while (*end)
        end = &(*end)->next;
    *end = made;
    engine->count++;
    *id = made->id;
    atomic_store(&controls.last_cg_mode, (int)request->knobs.cg_mode);
    atomic_store(&controls.last_cg_max_steps, request->knobs.cg_max_steps);
    atomic_store(&controls.last_fail_unconverged, request->fail_unconverged);
    atomic_fetch_add(&controls.submitted, 1);
    atomic_fetch_add(&controls.active, 1);
    return ENG_OK;
}

static void drop(eng_engine *engine, uint64_t id) {
    for (fake_request **at = &engine->first; *at; at = &(*at)->next)
        if ((*at)->id == id) {
            fake_request *found = *at;
            *at = found->next;
            engine->count--;
            if (found->paused)
                atomic_fetch_sub(&controls.paused, 1);
            atomic_fetch_sub(&controls.active, 1);
            free_request(found);
            return;
        }
}

void eng_cancel(eng_engine *engine, uint64_t id) {
    const uint64_t before = engine->count;
    drop(engine, id);
    if (engine->count < before)
        atomic_fetch_add(&controls.cancelled, 1);
}

void eng_pause(eng_engine *engine, uint64_t id, bool paused) {
    for (fake_request *at = engine->first; at; at = at->next)
        if (at->id == id && at->paused != paused) {
            at->paused = paused;
            atomic_fetch_add(&controls.paused, paused ? 1 : -1);
        }
}

// Bytes of the held text that may go out: before a stop string (*stopped), else without what may become one.
static size_t settled(const fake_request *request, bool *stopped) {
    size_t safe = request->held;

    *stopped = false;
    for (size_t from = 0; from < request->held; from++)
        for (size_t k = 0; k < request->stop_count; k++) {
            const size_t left = request->held - from, length = request->stop_lengths[k];
            const size_t compared = left < length ? left : length;
            if (memcmp(request->text + from, request->stops[k], compared) != 0)
                continue;
            if (left >= length) {
                *stopped = true;
                return from;
            }
            if (from < safe)
                safe = from;
        }
    return safe;
}

static void report(fake_request *request, eng_event_fn on_event, void *context, size_t length, eng_finish finish,
                   eng_status status, const char *message) {
    const eng_token token = {.id = 'a'};
    const eng_event event = {
        .id = request->id,
        .user = request->user,
        .tokens = &token,
        .token_count = request->made > 0,
        .text = request->text,
        .text_length = length,
        .finish = finish,
        .status = status,
        .message = message,
        .usage = &request->usage,
    };
    on_event(context, &event);
    memmove(request->text, request->text + length, request->held - length);
    request->held -= length;
}

static eng_finish make_token(fake_request *request, eng_event_fn on_event, void *context) {
    const long position = (long)(request->prompt_count + request->made);
    const int bytes = atomic_load(&controls.text_bytes);
    const char c = letter(request->sampling.seed, request->sampling.choice, position);
    bool stopped;

    request->made++;
    atomic_fetch_add(&controls.tokens, 1);
    if (atomic_load(&controls.numeric_at) == request->made) {
        report(request, on_event, context, 0, ENG_FINISH_ERROR, ENG_NUMERIC, "non-finite logits");
        return ENG_FINISH_ERROR;
    }
    if (request->fail_unconverged && atomic_load(&controls.unconverged_at) == request->made) {
        report(request, on_event, context, 0, ENG_FINISH_ERROR, ENG_UNCONVERGED, "a solve hit its bound");
        return ENG_FINISH_ERROR;
    }
    request->usage.completion_tokens = request->made;
    request->usage.completion.solves += 2;
    request->usage.completion.steps += 5;
    request->usage.completion.steps_max = 3;
    for (int i = 0; i < (bytes ? bytes : 1) && request->held < MAX_TEXT * 3; i++)
        request->text[request->held++] = c;
    size_t length = settled(request, &stopped);
    const bool last = request->made >= request->max_tokens;
    const eng_finish finish = stopped ? ENG_FINISH_STOP : last ? ENG_FINISH_LENGTH : ENG_FINISH_NONE;
    if (!stopped && last)
        length = request->held;
    report(request, on_event, context, length, finish, ENG_OK, NULL);
    return finish;
}

static eng_finish advance(fake_request *request, eng_event_fn on_event, void *context) {
    if (request->prompt_read < request->prompt_count) {
        request->prompt_read += CHUNK;
        request->usage.prompt.solves = 2 * (uint64_t)request->prompt_count;
        request->usage.prompt.steps = 4 * (uint64_t)request->prompt_count;
        request->usage.prompt.steps_max = 2;
        if (request->prompt_read < request->prompt_count)
            return ENG_FINISH_NONE;
        if (request->max_tokens == 0) {
            report(request, on_event, context, 0, ENG_FINISH_LENGTH, ENG_OK, NULL);
            return ENG_FINISH_LENGTH;
        }
        return ENG_FINISH_NONE;
    }
    return make_token(request, on_event, context);
}

eng_status eng_step(eng_engine *engine, eng_event_fn on_event, void *context, bool *worked, eng_error *error) {
    int rows = 0;

    *worked = false;
    if (atomic_exchange(&controls.fail_step, 0))
        return eng_fail(error, ENG_DEVICE, "the device is gone");
    for (fake_request *at = engine->first, *next; at && rows < engine->info.max_rows; at = next) {
        next = at->next;
        rows++; // a paused request keeps its row
        if (at->paused)
            continue;
        if (!*worked)
            sleep_us(atomic_load(&controls.step_us));
        *worked = true;
        if (advance(at, on_event, context) != ENG_FINISH_NONE) {
            atomic_fetch_add(&controls.finished, 1);
            drop(engine, at->id);
        }
    }
    if (*worked)
        atomic_fetch_add(&controls.steps, 1);
    return ENG_OK;
}

void eng_read_gauges(const eng_engine *engine, eng_gauges *out) {
    *out = (eng_gauges){.running = engine->count};
}
