// SPDX-License-Identifier: Apache-2.0
// A request of the fake engine: which ids it draws, and which text and tokens of them are out.
//
// Text goes out in whole characters and without what may become a stop string; invalid bytes become U+FFFD, one a
// maximal subpart. Logprobs are made up of id and position, the same wherever they are asked for.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/server/fake_engine.h"

enum { MOST_BYTES = 16384 };

// ---- draws ---------------------------------------------------------------------------------------------------------

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

float fake_engine_logprob(int32_t id, long position) {
    return -0.1f - 0.37f * (float)((id * 7 + position * 3) % 16);
}

static int32_t draw(const fake_request *request) {
    const fake_engine_controls *controls = fake_engine();
    const char *script = atomic_load(&controls->script);
    const int eos_at = atomic_load(&controls->eos_at);

    if (request->forced >= 0)
        return request->forced;
    if (eos_at && request->made + 1 >= eos_at && request->made >= request->asked.min_tokens &&
        !request->asked.ignore_eos)
        return FAKE_EOS;
    if (script)
        return (unsigned char)script[(size_t)request->made % strlen(script)];
    return letter(request->asked.sampling.seed, request->asked.sampling.choice,
                  (long)request->asked.count + (long)request->made);
}

// The alternatives at a position: the first differs from the token now and then, one looks like another, one is
// impossible.
static int32_t alternatives(const eng_request *asked, int32_t id, int64_t position, eng_alternative *out) {
    int32_t count = 0;

    if (position % 3 == 1)
        out[count++] = (eng_alternative){.id = 'Z', .logprob = fake_engine_logprob(id, (long)position) / 2};
    else
        out[count++] = (eng_alternative){.id = id, .logprob = fake_engine_logprob(id, (long)position)};
    for (int32_t k = 0; count < asked->logprobs; k++)
        out[count++] = (eng_alternative){.id = k == 0   ? 'a'
                                               : k == 1 ? FAKE_TWIN
                                               : k == 2 ? 0xf0
                                                        : 'A' + k,
                                         .logprob = k == 3 ? -INFINITY : -10 - (float)k};
    return asked->logprobs < count ? asked->logprobs : count;
}

static void describe(const fake_request *request, int32_t id, int64_t position, eng_token *token,
                     eng_alternative *top) {
    *token = (eng_token){.id = id, .logprob = NAN, .loop = position > 0 ? request->asked.knobs.max_loops : 0};
    if (request->asked.logprobs >= 0 && position > 0) {
        token->logprob = fake_engine_logprob(id, (long)position);
        token->top = top;
        token->top_count = alternatives(&request->asked, id, position, top);
    }
    if (request->asked.token_compute && position > 0)
        token->compute = (eng_compute){.solves = 2, .steps = 5, .steps_max = 3};
}

// ---- life ----------------------------------------------------------------------------------------------------------

fake_request *fake_request_create(const eng_request *from, uint64_t id, int32_t choice) {
    fake_request *request = calloc(1, sizeof *request);

    if (!request)
        return NULL;
    request->id = id;
    request->choice = choice;
    request->asked = *from;
    request->asked.sampling.choice += (uint32_t)choice;
    request->asked.prompt_logprobs = from->prompt_logprobs && choice == 0;
    request->ids = malloc(from->count * sizeof *request->ids);
    memcpy(request->ids, from->ids, from->count * sizeof *request->ids);
    for (size_t i = 0; i < from->stop_count; i++) {
        memcpy(request->stops[i], from->stops[i].bytes, from->stops[i].length);
        request->stop_table[i] = (eng_text){.bytes = request->stops[i], .length = from->stops[i].length};
    }
    for (size_t i = 0; i < from->stop_id_count; i++)
        request->stop_ids[i] = from->stop_ids[i];
    request->forced = -1;
    for (size_t i = 0; i < from->bias_count; i++)
        if (from->biases[i].bias >= 50)
            request->forced = from->biases[i].id;
    request->raw = malloc(MOST_BYTES);
    request->drawn = malloc(MOST_BYTES * sizeof *request->drawn);
    request->usage.prompt_tokens = (int64_t)from->count;
    return request;
}

void fake_request_free(fake_request *request) {
    free(request->drawn);
    free(request->raw);
    free(request->ids);
    free(request);
}

// ---- text ----------------------------------------------------------------------------------------------------------

// Length of the character that begins at bytes; *whole: it is well-formed. 0: its end is not there yet.
static size_t character(const unsigned char *bytes, size_t available, bool *whole) {
    size_t length = bytes[0] < 0x80                        ? 1
                    : bytes[0] >= 0xc2 && bytes[0] <= 0xdf ? 2
                    : bytes[0] >= 0xe0 && bytes[0] <= 0xef ? 3
                    : bytes[0] >= 0xf0 && bytes[0] <= 0xf4 ? 4
                                                           : 0;
    *whole = length > 0;
    if (length == 0)
        return 1;
    for (size_t i = 1; i < length; i++) {
        if (i >= available)
            return 0;
        const unsigned char low = i > 1 ? 0x80 : bytes[0] == 0xe0 ? 0xa0 : bytes[0] == 0xf0 ? 0x90 : 0x80;
        const unsigned char high = i > 1 ? 0xbf : bytes[0] == 0xed ? 0x9f : bytes[0] == 0xf4 ? 0x8f : 0xbf;
        if (bytes[i] < low || bytes[i] > high) {
            *whole = false;
            return i;
        }
    }
    return length;
}

// Bytes that may go out: before a stop string (*stopped), else without what may become one.
static size_t before_stop(const fake_request *request, bool *stopped) {
    size_t safe = request->raw_count;

    *stopped = false;
    for (size_t from = 0; from < request->raw_count; from++)
        for (size_t k = 0; k < request->asked.stop_count; k++) {
            const size_t left = request->raw_count - from, length = request->stop_table[k].length;
            const size_t compared = left < length ? left : length;
            if (memcmp(request->raw + from, request->stop_table[k].bytes, compared) != 0)
                continue;
            if (left >= length) {
                *stopped = true;
                return request->asked.include_stop ? from + length : from;
            }
            if (from < safe)
                safe = from;
        }
    return safe;
}

// The first limit bytes as text; *used: how many of them that took. last: nothing will follow.
static size_t decode(const fake_request *request, size_t limit, bool last, char *out, size_t *used) {
    const unsigned char *raw = (const unsigned char *)request->raw;
    size_t at = 0, written = 0;

    while (at < limit) {
        bool whole;
        size_t length = character(raw + at, limit - at, &whole);
        if (length == 0 && !last)
            break;
        if (length == 0) {
            length = limit - at;
            whole = false;
        }
        memcpy(out + written, whole ? (const char *)raw + at : "\xef\xbf\xbd", whole ? length : 3);
        written += whole ? length : 3;
        at += length;
    }
    *used = at;
    return written;
}

// ---- events --------------------------------------------------------------------------------------------------------

// Tells what is out. limit: bytes that may go.
static void report(fake_request *request, size_t limit, eng_finish finish, eng_status status, const char *message,
                   eng_event_fn on_event, void *context) {
    char *text = malloc(limit * 3 + 1);
    eng_token *tokens = malloc((request->drawn_count + 1) * sizeof *tokens);
    eng_alternative *tops = malloc((request->drawn_count + 1) * ENG_MAX_TOP * sizeof *tops);
    size_t used, count = 0;
    const bool last = finish != ENG_FINISH_NONE;
    const size_t length = decode(request, limit, last, text, &used);

    request->released += used;
    for (; count < request->drawn_count && (last || request->drawn[count].end <= request->released); count++)
        describe(request, request->drawn[count].id, request->drawn[count].position, &tokens[count],
                 tops + count * ENG_MAX_TOP);
    const eng_event event = {.id = request->id,
                             .choice = request->choice,
                             .user = request->asked.user,
                             .tokens = tokens,
                             .token_count = count,
                             .text = text,
                             .text_length = length,
                             .finish = finish,
                             .status = status,
                             .message = message,
                             .usage = &request->usage};
    if (length || count || last)
        on_event(context, &event);
    memmove(request->raw, request->raw + used, request->raw_count - used);
    request->raw_count -= used;
    memmove(request->drawn, request->drawn + count, (request->drawn_count - count) * sizeof *request->drawn);
    request->drawn_count -= count;
    free(text);
    free(tokens);
    free(tops);
}

static void report_prompt(fake_request *request, int64_t from, int64_t to, eng_event_fn on_event, void *context) {
    eng_token *tokens = malloc((size_t)(to - from) * sizeof *tokens);
    eng_alternative *tops = malloc((size_t)(to - from) * ENG_MAX_TOP * sizeof *tops);

    for (int64_t i = from; i < to; i++)
        describe(request, request->ids[i], i, &tokens[i - from], tops + (i - from) * ENG_MAX_TOP);
    const eng_event event = {.id = request->id,
                             .user = request->asked.user,
                             .prompt = tokens,
                             .prompt_count = (size_t)(to - from),
                             .text = "",
                             .usage = &request->usage};
    on_event(context, &event);
    free(tokens);
    free(tops);
}

// ---- steps ---------------------------------------------------------------------------------------------------------

static bool ends_text(const fake_request *request, int32_t id) {
    for (size_t i = 0; i < request->asked.stop_id_count; i++)
        if (request->stop_ids[i] == id)
            return true;
    return id == FAKE_EOS;
}

static void push(fake_request *request, int32_t id) {
    const int repeats = atomic_load(&fake_engine()->text_bytes);
    const bool stop = ends_text(request, id);

    if (id < FAKE_BOS && (!stop || request->asked.include_stop))
        for (int i = 0; i < (repeats ? repeats : 1) && request->raw_count < MOST_BYTES; i++)
            request->raw[request->raw_count++] = (char)id;
    request->drawn[request->drawn_count++] =
        (struct fake_drawn){.id = id,
                            .position = (int64_t)request->asked.count + request->made,
                            .end = request->released + request->raw_count};
}

static eng_finish fail(fake_request *request, eng_status status, const char *message, eng_event_fn on_event,
                       void *context) {
    report(request, 0, ENG_FINISH_ERROR, status, message, on_event, context);
    return ENG_FINISH_ERROR;
}

static eng_finish make_token(fake_request *request, eng_event_fn on_event, void *context) {
    fake_engine_controls *controls = fake_engine();
    const int32_t id = draw(request);
    bool stopped;

    push(request, id);
    request->made++;
    atomic_fetch_add(&controls->tokens, 1);
    if (atomic_load(&controls->numeric_at) == request->made)
        return fail(request, ENG_NUMERIC, "non-finite logits", on_event, context);
    if (request->asked.fail_unconverged && atomic_load(&controls->unconverged_at) == request->made)
        return fail(request, ENG_UNCONVERGED, "a solve hit its bound", on_event, context);
    request->usage.completion_tokens = request->made;
    request->usage.exits[request->asked.knobs.max_loops - 1]++; // whatever the threshold
    request->usage.completion.solves += 2;
    request->usage.completion.steps += 5;
    request->usage.completion.steps_max = 3;
    size_t limit = before_stop(request, &stopped);
    const bool ended = ends_text(request, id), full = request->made >= request->asked.max_tokens;
    const eng_finish finish = stopped || ended ? ENG_FINISH_STOP : full ? ENG_FINISH_LENGTH : ENG_FINISH_NONE;
    if (!stopped && finish != ENG_FINISH_NONE)
        limit = request->raw_count;
    report(request, limit, finish, ENG_OK, NULL, on_event, context);
    return finish;
}

eng_finish fake_request_advance(fake_request *request, int chunk, eng_event_fn on_event, void *context) {
    const int64_t count = (int64_t)request->asked.count, before = request->prompt_read;

    if (before >= count)
        return make_token(request, on_event, context);
    request->prompt_read = before + chunk < count ? before + chunk : count;
    atomic_fetch_add(&fake_engine()->prompt_tokens, (int)(request->prompt_read - before));
    request->usage.prompt.solves += 2 * (uint64_t)(request->prompt_read - before);
    request->usage.prompt.steps += 4 * (uint64_t)(request->prompt_read - before);
    request->usage.prompt.steps_max = 2;
    if (request->asked.prompt_logprobs)
        report_prompt(request, before, request->prompt_read, on_event, context);
    if (request->prompt_read < count || request->asked.max_tokens > 0)
        return ENG_FINISH_NONE;
    report(request, 0, ENG_FINISH_LENGTH, ENG_OK, NULL, on_event, context);
    return ENG_FINISH_LENGTH;
}
