// SPDX-License-Identifier: Apache-2.0
// Passages in the engine's batches; see eval_reader.h.
//
// A *lane* is a session that runs for one reading. The first lane of a passage reads what is shared, then the others
// are forked from it. Where a fork finds no slot or no pages nobody waits for it: what is left is read anew later, so
// lanes always come to their end and nothing can lock.
//
// A prompt is cut at the grid of absolute positions, and where the ids begin whose logits are wanted: there in every
// reading, shared or not, so that sharing changes no bit. Not so with Mesa layers: a solve that ends early tells the
// rounding of a cut (sums of log-probabilities move by 1e-2), and cut at the grid alone a text is what the server makes
// of it.
#include "trainer/eval_reader.h"

#include <stdlib.h>
#include <string.h>

#include "trainer/progress.h"

enum {
    MAX_SLOTS = 256,
    MIN_SLOTS = 8,
    MAX_ROWS = 512,
    SLOT_BUDGET = 512 << 20, // bytes of states
    MIN_PAGED_TOKENS = 1 << 14,
};

typedef struct entry {
    trn_passage *passage;
    bool *started; // (readings)
    int32_t unstarted, unfinished;
    int32_t shared; // ids, up to a place where all readings are cut
    int64_t longest;
    bool leading; // a lane reads what is shared
    struct entry *next;
} entry;

typedef struct lane {
    eng_session session;
    entry *entry;
    trn_reading *reading;
    bool leads, generates;
    int32_t piece, read; // of the step under way: its index (-1: none) and how many ids
    int32_t id;          // drawn last
    bool stops;
} lane;

struct trn_reader {
    eng_pool *pool;
    eng_batch *batch;
    kern_stream *stream;
    const eng_model *model;
    bool grid_alone; // a prompt is cut nowhere else
    int32_t chunk, max_rows, max_tokens, max_logits, slots;
    lane *lane; // (slots)
    int32_t lanes;
    entry *first; // entries that are not finished
    entry **end;
    eng_session stem;
    // of a run
    const trn_passage_source *source;
    eng_knobs knobs;
    const int32_t *stem_ids;
    bool exhausted;
    trn_reading_figures *figures;
    int32_t tokens_left, logits_left; // of the step being filled
};

static const eng_sampling likeliest = {.top_p = 1};

// ------------------------------------------------------------------------------------------------------------ creation

static int64_t clamp(int64_t value, int64_t least, int64_t most) {
    return value < least ? least : value > most ? most : value;
}

eng_status trn_reader_create(const eng_weights *weights, int64_t batch_tokens, int64_t longest, trn_reader **out,
                             eng_error *error) {
    trn_reader *reader = calloc(1, sizeof *reader);
    if (!reader)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for reading");
    const eng_model *model = reader->model = weights->model;
    reader->end = &reader->first;
    reader->grid_alone = eng_model_has_mesa(model);
    reader->chunk = kern_device_describe(weights->device)->chunk;
    reader->max_tokens = (int32_t)clamp(batch_tokens, 4 * reader->chunk, 1 << 20);
    reader->max_rows = (int32_t)clamp(reader->max_tokens / 4, 1, MAX_ROWS);
    reader->max_logits = reader->max_rows + reader->chunk;
    int64_t affordable = model->state_bytes > 0 ? SLOT_BUDGET / (int64_t)model->state_bytes : MAX_SLOTS;
    reader->slots = (int32_t)clamp(affordable, MIN_SLOTS, MAX_SLOTS < reader->max_rows ? MAX_SLOTS : reader->max_rows);
    int64_t paged =
        2 * longest + 2 * KERN_PAGE_TOKENS > MIN_PAGED_TOKENS ? 2 * longest + 2 * KERN_PAGE_TOKENS : MIN_PAGED_TOKENS;
    int32_t pages = eng_model_has_pages(model) ? (int32_t)(paged / KERN_PAGE_TOKENS + 1) : 0;
    reader->lane = calloc((size_t)reader->slots, sizeof *reader->lane);
    eng_status status = reader->lane ? ENG_OK : eng_fail(error, ENG_NO_MEMORY, "out of memory for reading");
    if (status == ENG_OK)
        status = eng_fail_kernel(error, kern_stream_open(weights->device, &reader->stream), "opening a stream");
    if (status == ENG_OK)
        status = eng_pool_create(model, weights->device, reader->slots, pages, &reader->pool, error);
    if (status == ENG_OK)
        status = eng_batch_create(weights, reader->pool, reader->stream, reader->max_rows, reader->max_tokens,
                                  &reader->batch, error);
    if (status != ENG_OK) {
        trn_reader_free(reader);
        return status;
    }
    *out = reader;
    return ENG_OK;
}

static void drop_run(trn_reader *reader) {
    while (reader->lanes > 0)
        eng_session_close(&reader->lane[--reader->lanes].session);
    eng_session_close(&reader->stem);
    for (entry *e = reader->first, *next; e; e = next) {
        next = e->next;
        reader->source->drop(reader->source->context, e->passage);
        free(e->started);
        free(e);
    }
    reader->first = NULL;
    reader->end = &reader->first;
}

void trn_reader_free(trn_reader *reader) {
    if (!reader)
        return;
    drop_run(reader);
    eng_batch_free(reader->batch);
    eng_pool_free(reader->pool);
    kern_stream_close(reader->stream);
    free(reader->lane);
    free(reader);
}

// ----------------------------------------------------------------------------------------------------------- passages

// Ids that the reading's session reads; those drawn are not among them.
static int32_t prompt_of(const trn_reading *reading) {
    return reading->generate > 0 ? reading->count : reading->count - 1;
}

// Ids before the first whose logits are computed.
static int32_t silent_of(const trn_reader *reader, const trn_reading *reading) {
    int32_t silent = reading->first - 1;
    return reader->grid_alone ? silent / reader->chunk * reader->chunk : silent;
}

static int32_t common(const trn_reading *a, const trn_reading *b, int32_t limit) {
    int32_t same = 0;
    while (same < limit && a->ids[same] == b->ids[same])
        same++;
    return same;
}

// Whole chunks, unless all readings are cut where what they have in common ends.
static int32_t shared_of(const trn_reader *reader, const trn_passage *passage) {
    int32_t silent = silent_of(reader, &passage->reading[0]), shared = passage->readings > 1 ? silent : 0;
    bool whole = true;
    for (int32_t i = 1; i < passage->readings && shared > 0; i++) {
        int32_t limit = silent_of(reader, &passage->reading[i]);
        whole = whole && limit == silent;
        shared = common(&passage->reading[0], &passage->reading[i], limit < shared ? limit : shared);
    }
    return whole && shared == silent ? shared : shared / reader->chunk * reader->chunk;
}

static eng_status check_reading(const trn_reader *reader, const trn_reading *reading, eng_error *error) {
    if (reading->first < 1 || reading->first > reading->count ||
        (reading->generate == 0 && reading->first == reading->count))
        return eng_fail(error, ENG_INVALID, "a text of %d ids has none to score from id %d on", reading->count,
                        reading->first);
    int64_t most = eng_model_has_pages(reader->model) ? reader->model->config.max_positions : -1;
    if (most > 0 && (int64_t)reading->count + reading->generate > most)
        return eng_fail(error, ENG_TOO_LONG, "a text of %d ids is longer than the model's context of %lld",
                        reading->count + reading->generate, (long long)most);
    return ENG_OK;
}

static eng_status take_passage(trn_reader *reader, eng_error *error) {
    trn_passage *passage = NULL;
    eng_status status = reader->source->next(reader->source->context, &passage, error);
    reader->exhausted = passage == NULL;
    if (status != ENG_OK || !passage)
        return status;
    int64_t longest = 0;
    for (int32_t i = 0; i < passage->readings && status == ENG_OK; i++) {
        trn_reading *reading = &passage->reading[i];
        int64_t length = (int64_t)reading->count + reading->generate;
        status = check_reading(reader, reading, error);
        longest = length > longest ? length : longest;
        reading->likeliest = reading->drawn_count = 0;
        reader->figures->unshared += prompt_of(reading);
    }
    entry *e = status == ENG_OK ? calloc(1, sizeof *e) : NULL;
    if (e)
        e->started = calloc((size_t)passage->readings, sizeof *e->started);
    if (status == ENG_OK && (!e || !e->started))
        status = eng_fail(error, ENG_NO_MEMORY, "out of memory for a passage");
    if (status != ENG_OK) {
        free(e);
        reader->source->drop(reader->source->context, passage);
        return status;
    }
    e->passage = passage;
    e->unstarted = e->unfinished = passage->readings;
    e->shared = shared_of(reader, passage);
    e->longest = longest;
    *reader->end = e;
    reader->end = &e->next;
    return ENG_OK;
}

static eng_status finish_entry(trn_reader *reader, entry *e, eng_error *error) {
    for (entry **at = &reader->first; *at; at = &(*at)->next)
        if (*at == e) {
            *at = e->next;
            if (!*at)
                reader->end = at;
            break;
        }
    eng_status status = reader->source->done(reader->source->context, e->passage, error);
    free(e->started);
    free(e);
    return status;
}

// -------------------------------------------------------------------------------------------------------------- lanes

static trn_reading *next_unstarted(const entry *e) {
    for (int32_t i = 0; i < e->passage->readings; i++)
        if (!e->started[i])
            return &e->passage->reading[i];
    return NULL;
}

static void add_lane(trn_reader *reader, entry *e, trn_reading *reading, eng_session session, bool leads) {
    reader->lane[reader->lanes++] =
        (lane){.session = session, .entry = e, .reading = reading, .leads = leads, .piece = -1};
    e->started[reading - e->passage->reading] = true;
    e->unstarted--;
    e->leading = e->leading || leads;
}

static bool begins_with_stem(const trn_reader *reader, const entry *e, const trn_reading *reading, bool leads) {
    int64_t read = reader->stem.pool ? reader->stem.read : 0;
    return read > 0 && read <= (leads ? e->shared : silent_of(reader, reading)) &&
           memcmp(reading->ids, reader->stem_ids, sizeof *reading->ids * (size_t)read) == 0;
}

// Opens a lane for a reading that begins anew. *full: there is no room now.
static eng_status open_lane(trn_reader *reader, entry *e, bool *full, eng_error *error) {
    eng_session session = {0};
    eng_error why = {0};
    trn_reading *reading = next_unstarted(e);
    bool leads = e->shared > 0 && e->unstarted > 1, stem = begins_with_stem(reader, e, reading, leads);
    leads = leads && !(stem && reader->stem.read == e->shared); // the stem has led
    eng_status status = stem ? eng_session_fork(&reader->stem, reader->stream, e->longest, &session, &why)
                             : eng_session_open(reader->pool, reader->stream, e->longest, &session, &why);
    *full = status == ENG_FULL;
    if (*full && reader->lanes > 0)
        return ENG_OK;
    if (status != ENG_OK)
        return eng_fail(error, status, "%s", why.text);
    add_lane(reader, e, reading, session, leads);
    return ENG_OK;
}

// The others of a passage whose shared ids this lane has read.
static eng_status fork_lanes(trn_reader *reader, lane *from, eng_error *error) {
    entry *e = from->entry;
    eng_session source = from->session;
    from->leads = e->leading = false;
    while (e->unstarted > 0 && reader->lanes < reader->slots) {
        eng_session session = {0};
        eng_error why = {0};
        eng_status status = eng_session_fork(&source, reader->stream, e->longest, &session, &why);
        if (status == ENG_FULL)
            return ENG_OK;
        if (status != ENG_OK)
            return eng_fail(error, status, "%s", why.text);
        add_lane(reader, e, next_unstarted(e), session, false);
    }
    return ENG_OK;
}

// Slots that no lane has and no lane that leads will want.
static int32_t spare_lanes(const trn_reader *reader) {
    int32_t spare = reader->slots - (reader->stem.pool ? 1 : 0) - reader->lanes;
    for (int32_t i = 0; i < reader->lanes; i++)
        if (reader->lane[i].leads)
            spare -= reader->lane[i].entry->unstarted;
    return spare;
}

// *full: something of the passage finds no room now.
static eng_status start_readings(trn_reader *reader, entry *e, bool *full, eng_error *error) {
    eng_status status = ENG_OK;
    while (status == ENG_OK && !*full && e->unstarted > 0 && !e->leading) {
        int32_t wanted = e->shared > 0 ? e->unstarted : 1;
        *full = reader->lanes > 0 && spare_lanes(reader) < wanted;
        if (!*full)
            status = open_lane(reader, e, full, error);
    }
    return status;
}

static eng_status admit(trn_reader *reader, eng_error *error) {
    bool full = false;
    eng_status status = ENG_OK;
    for (entry **at = &reader->first; status == ENG_OK && !full;) {
        if (*at) {
            status = start_readings(reader, *at, &full, error);
            at = &(*at)->next;
        } else if (reader->exhausted || spare_lanes(reader) < 1)
            break;
        else
            status = take_passage(reader, error);
    }
    return status;
}

// --------------------------------------------------------------------------------------------------------------- steps

static int32_t smaller(int32_t a, int32_t b) {
    return a < b ? a : b;
}

// The lane's next piece, as much of it as the step has room for. count 0: none.
static eng_piece next_piece(const trn_reader *reader, lane *l) {
    const trn_reading *reading = l->reading;
    int32_t read = (int32_t)l->session.read, end = l->leads ? l->entry->shared : prompt_of(reading);
    eng_piece piece = {.session = &l->session, .kind = KERN_ROW_PROMPT, .knobs = reader->knobs, .top = 1};
    if (l->generates) {
        piece.kind = KERN_ROW_GENERATED;
        piece.ids = &l->id;
        piece.count = reader->tokens_left > 0 && reader->logits_left > 0;
        piece.logits = true;
        piece.sampling = &likeliest;
        return piece;
    }
    int32_t silent = silent_of(reader, reading), room = reader->tokens_left;
    piece.scored = read >= silent && reading->first < reading->count;
    if (read < silent)
        end = smaller(end, silent);
    else
        room = smaller(room, piece.scored ? reader->logits_left : reader->logits_left > 0 ? room : 0);
    piece.ids = reading->ids + read;
    piece.count = end - read;
    if (piece.count > room) // up to the grid
        piece.count = (read + room) / reader->chunk * reader->chunk - read;
    piece.logits = reading->generate > 0 && read + piece.count == reading->count;
    piece.sampling = piece.logits ? &likeliest : NULL;
    return piece;
}

static eng_status add_pieces(trn_reader *reader, bool generated, eng_error *error) {
    eng_status status = ENG_OK;
    int32_t rows = 0;
    for (int32_t i = 0; i < reader->lanes && status == ENG_OK && rows < reader->max_rows; i++) {
        lane *l = &reader->lane[i];
        if (l->generates != generated)
            continue;
        eng_piece piece = next_piece(reader, l);
        if (piece.count < 1)
            continue;
        status = eng_batch_add(reader->batch, &piece, &l->piece, error);
        l->read = piece.count;
        reader->tokens_left -= piece.count;
        reader->logits_left -= piece.scored ? piece.count : piece.logits;
        rows++;
    }
    return status;
}

static bool ends_text(const eng_config *config, int32_t id) {
    for (int32_t i = 0; i < config->eos_count; i++)
        if (config->eos_id[i] == id)
            return true;
    return false;
}

static void take_drawn(trn_reader *reader, lane *l, int32_t id) {
    trn_reading *reading = l->reading;
    l->generates = true;
    l->id = id;
    l->stops = ends_text(&reader->model->config, id);
    if (l->stops)
        return;
    reading->drawn[reading->drawn_count++] = id;
    l->stops = reading->drawn_count == reading->generate ||
               reader->source->stops(reader->source->context, l->entry->passage, reading);
}

static void take_logprobs(trn_reader *reader, lane *l, int32_t start) {
    trn_reading *reading = l->reading;
    for (int32_t token = 0; token < l->read; token++) {
        int32_t place = start + token + 1;
        if (place < reading->first || place >= reading->count)
            continue;
        eng_prediction prediction;
        eng_batch_prediction(reader->batch, l->piece, token, &prediction);
        reading->logprob[place - reading->first] = prediction.logprob;
        reading->likeliest += prediction.top_id[0] == reading->ids[place];
    }
}

static void add_solves(eng_compute *sum, const eng_compute *more) {
    sum->solves += more->solves;
    sum->steps += more->steps;
    sum->unconverged += more->unconverged;
    sum->steps_max = more->steps_max > sum->steps_max ? more->steps_max : sum->steps_max;
}

// Takes over what the step found for the lane. *ended: its reading is done.
static eng_status accept(trn_reader *reader, lane *l, bool *ended, eng_error *error) {
    eng_piece_result result;
    int32_t start = (int32_t)l->session.read - l->read, silent = silent_of(reader, l->reading);
    eng_batch_result(reader->batch, l->piece, &result);
    if (!result.finite)
        return eng_fail(error, ENG_INVALID, "the model's logits are not finite");
    add_solves(&reader->figures->solves, &result.compute);
    reader->figures->tokens += l->read;
    if (!l->generates && start >= silent && l->reading->first < l->reading->count)
        take_logprobs(reader, l, start);
    if (l->generates || (l->reading->generate > 0 && l->session.read == l->reading->count))
        take_drawn(reader, l, result.id);
    else if (l->leads && l->session.read == l->entry->shared) {
        l->piece = -1;
        return fork_lanes(reader, l, error);
    }
    l->piece = -1;
    *ended = l->stops || (l->reading->generate == 0 && l->session.read == prompt_of(l->reading));
    return ENG_OK;
}

static eng_status accept_step(trn_reader *reader, eng_error *error) {
    eng_status status = ENG_OK;
    int32_t ran = reader->lanes, kept = 0; // forks come behind
    for (int32_t i = 0; i < ran && status == ENG_OK; i++) {
        bool ended = false;
        if (reader->lane[i].piece >= 0)
            status = accept(reader, &reader->lane[i], &ended, error);
        if (status == ENG_OK && ended) {
            entry *e = reader->lane[i].entry;
            eng_session_close(&reader->lane[i].session);
            reader->lane[i].entry = NULL;
            if (--e->unfinished == 0)
                status = finish_entry(reader, e, error);
        }
    }
    for (int32_t i = 0; i < reader->lanes; i++)
        if (reader->lane[i].entry)
            reader->lane[kept++] = reader->lane[i];
    reader->lanes = kept;
    return status;
}

static void begin_step(trn_reader *reader) {
    eng_batch_clear(reader->batch);
    reader->tokens_left = reader->max_tokens;
    reader->logits_left = reader->max_logits;
}

static eng_status step(trn_reader *reader, eng_error *error) {
    begin_step(reader);
    eng_status status = add_pieces(reader, true, error);
    if (status == ENG_OK)
        status = add_pieces(reader, false, error);
    if (status == ENG_OK)
        status = eng_batch_run(reader->batch, error);
    return status == ENG_OK ? accept_step(reader, error) : status;
}

// Whole chunks of the stem, in a session that stays.
static eng_status read_stem(trn_reader *reader, int32_t count, eng_error *error) {
    int32_t whole = count / reader->chunk * reader->chunk, index;
    if (whole == 0)
        return ENG_OK;
    eng_status status = eng_session_open(reader->pool, reader->stream, whole, &reader->stem, error);
    while (status == ENG_OK && reader->stem.read < whole) {
        int32_t left = whole - (int32_t)reader->stem.read;
        eng_piece piece = {.session = &reader->stem,
                           .kind = KERN_ROW_PROMPT,
                           .ids = reader->stem_ids + reader->stem.read,
                           .count = smaller(left, reader->max_tokens / reader->chunk * reader->chunk),
                           .knobs = reader->knobs};
        begin_step(reader);
        status = eng_batch_add(reader->batch, &piece, &index, error);
        if (status == ENG_OK)
            status = eng_batch_run(reader->batch, error);
        if (status == ENG_OK)
            reader->figures->tokens += piece.count;
    }
    return status;
}

eng_status trn_reader_run(trn_reader *reader, const trn_passage_source *source, const eng_knobs *knobs,
                          const int32_t *stem, int32_t stem_count, trn_reading_figures *figures, eng_error *error) {
    double start = trn_seconds();
    reader->source = source;
    reader->knobs = *knobs;
    reader->stem_ids = stem;
    reader->exhausted = false;
    reader->figures = figures;
    eng_status status = stem ? read_stem(reader, stem_count, error) : ENG_OK;
    if (status == ENG_OK)
        status = admit(reader, error);
    while (status == ENG_OK && reader->lanes > 0) {
        status = step(reader, error);
        if (status == ENG_OK)
            status = admit(reader, error);
    }
    drop_run(reader);
    figures->seconds += trn_seconds() - start;
    return status;
}
