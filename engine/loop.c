// SPDX-License-Identifier: Apache-2.0
// Steps that leave loops for later; see loop.h.
//
// A step runs its deferred pieces through the first loop together; then, loop after loop, those whose gate does not let
// them go, each with all that waits in its session for that loop; then the head over what was read. A token's own
// vector is put behind the waiting ones before it is known whether it goes on, so going on and catching up are one.
// Plans of the parts take turns in one memory; what one leaves for the next is copied.
#include "engine/loop.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { CATCH_UP_TOKENS = 512 }; // beside a token a row

// A deferred piece on its way, or a session that is settled (entry NULL).
typedef struct walk {
    eng_batch_piece *entry;
    const eng_session *session;
    kern_solver solver;
    int64_t read; // tokens that its first loop has read
    float left;   // probability of not having left
    bool done;
    int32_t token0, count; // of its row
    kern_solve_sum sum;
} walk;

struct eng_loops {
    eng_batch *batch;
    int32_t loops, width, max_tokens, most_pending;
    eng_plan *first, *head, *part[ENG_MAX_LOOPS]; // part[loop], from loop 1 on
    kern_memory memory, head_memory;
    walk *walk;             // (max_rows)
    float *gate;            // (max_tokens)
    kern_solve_sum *solves; // (max_tokens)
};

bool eng_loops_can_wait(const eng_model *model, const kern_device *device) {
    return eng_model_reads_loops(model) && !kern_device_describe(device)->asynchronous;
}

uint64_t eng_loops_session_bytes(const eng_model *model, const kern_device *device) {
    return eng_loops_can_wait(model, device) ? eng_pending_bytes(model) : 0;
}

static int32_t part_tokens(int32_t max_rows, int32_t max_tokens) {
    const int64_t most = (int64_t)max_rows + CATCH_UP_TOKENS;
    return most > max_tokens ? max_tokens : (int32_t)most;
}

static eng_status create_plan(const eng_model *model, kern_device *device, eng_plan_part part, int32_t level,
                              int32_t rows, int32_t tokens, eng_plan **out, eng_error *error) {
    const eng_plan_options options = {.kind = ENG_PLAN_SERVE,
                                      .max_tokens = tokens,
                                      .max_rows = rows,
                                      .max_logits = rows,
                                      .part = part,
                                      .level = level};
    return eng_plan_create(model, device, &options, out, error);
}

// The plans, which hold no memory; what they need is in *saved and *scratch.
static eng_status create_plans(const eng_model *model, kern_device *device, int32_t rows, int32_t tokens,
                               eng_loops *loops, size_t *saved, size_t *scratch, eng_error *error) {
    eng_status status = create_plan(model, device, ENG_PART_HEAD, 0, rows, rows, &loops->head, error);
    if (status == ENG_OK)
        status = create_plan(model, device, ENG_PART_FIRST, 0, rows, tokens, &loops->first, error);
    if (status == ENG_OK) {
        *saved = loops->first->saved_bytes;
        *scratch = loops->first->scratch_bytes;
    }
    for (int32_t loop = 1; status == ENG_OK && loop < model->config.loop.loops; loop++) {
        status = create_plan(model, device, ENG_PART_LOOP, loop, rows, tokens, &loops->part[loop], error);
        if (status != ENG_OK)
            break;
        *saved = loops->part[loop]->saved_bytes > *saved ? loops->part[loop]->saved_bytes : *saved;
        *scratch = loops->part[loop]->scratch_bytes > *scratch ? loops->part[loop]->scratch_bytes : *scratch;
    }
    return status;
}

static void free_plans(eng_loops *loops) {
    eng_plan_free(loops->first);
    eng_plan_free(loops->head);
    for (int32_t loop = 1; loop < ENG_MAX_LOOPS; loop++)
        eng_plan_free(loops->part[loop]);
}

eng_status eng_loops_measure(const eng_model *model, kern_device *device, int32_t max_rows, int32_t max_tokens,
                             uint64_t *bytes, eng_error *error) {
    eng_loops loops = {0};
    size_t saved = 0, scratch = 0;
    eng_status status =
        create_plans(model, device, max_rows, part_tokens(max_rows, max_tokens), &loops, &saved, &scratch, error);
    if (status == ENG_OK)
        *bytes = (uint64_t)saved + scratch + loops.head->saved_bytes + loops.head->scratch_bytes;
    free_plans(&loops);
    return status;
}

// ----------------------------------------------------------------------------------------------------------- one loop

static kern_status run_plan(eng_loops *loops, const eng_plan *plan, const kern_memory *memory) {
    eng_batch *batch = loops->batch;
    kern_status status = kern_rows_prepare(batch->stream, batch->rows);
    return status ? status : kern_plan_run(plan->plan, batch->stream, batch->rows, memory);
}

static void clear_rows(kern_rows *rows) {
    rows->n_rows = rows->n_tokens = rows->n_generated = rows->n_logits = 0;
    rows->n_boundaries = rows->n_pages = rows->n_edits = 0;
}

// A row of the walk's `count` tokens from `position` on. The ids count in the first loop alone.
static void add_row(eng_loops *loops, walk *w, int64_t position, int32_t count, int32_t id) {
    kern_rows *rows = loops->batch->rows;
    w->token0 = rows->n_tokens;
    w->count = count;
    rows->row[rows->n_rows++] = (kern_row){.kind = KERN_ROW_GENERATED,
                                           .slot = w->session->slot,
                                           .token0 = rows->n_tokens,
                                           .length = count,
                                           .position = position,
                                           .page0 = eng_batch_add_pages(rows, w->session),
                                           .solver = w->solver};
    for (int32_t i = 0; i < count; i++) {
        rows->id[rows->n_tokens] = id;
        rows->target[rows->n_tokens++] = -1;
    }
    rows->n_generated = rows->n_tokens;
}

static eng_pending *pending_of(const eng_loops *loops, const eng_session *session) {
    return eng_pool_pending(loops->batch->pool, session->slot);
}

// Where place `token` of the loop's waiting ones lies.
static float *vector_of(const eng_loops *loops, const eng_session *session, int32_t loop, int32_t token) {
    float *vectors = eng_pool_pending_vectors(loops->batch->pool, session->slot, loop);
    return vectors + (size_t)token * (size_t)loops->width;
}

static size_t vectors_bytes(const eng_loops *loops, int32_t count) {
    return sizeof(float) * (size_t)loops->width * (size_t)count;
}

static float *address(const eng_loops *loops, kern_ptr reference, int32_t token) {
    return (float *)eng_plan_address(&loops->memory, reference) + (size_t)token * (size_t)loops->width;
}

// The walk's row between its plan's memory and the places from `place` on of those that wait for the loop; out: to
// them.
static kern_status move_waiting(eng_loops *loops, const walk *w, int32_t loop, int32_t place, bool out,
                                const eng_plan *plan) {
    float *streams = vector_of(loops, w->session, loop, place),
          *starts = vector_of(loops, w->session, loop, ENG_PENDING_TOKENS + place),
          *stream = address(loops, out ? plan->output : plan->input, w->token0);
    const size_t bytes = vectors_bytes(loops, w->count);
    kern_stream *queue = loops->batch->stream;
    kern_status status = kern_copy(queue, out ? streams : stream, out ? stream : streams, bytes);
    if (status != KERN_OK || !plan->start.ref)
        return status;
    float *start = address(loops, plan->start, w->token0);
    return kern_copy(queue, out ? starts : start, out ? start : starts, bytes);
}

// What the row's tokens leave behind `loop`, behind those that wait for the next one already.
static kern_status leave(eng_loops *loops, const eng_plan *plan, walk *w, int32_t loop) {
    eng_pending *pending = pending_of(loops, w->session);
    if (loop + 1 == loops->loops) {
        pending->total -= w->count;
        return KERN_OK;
    }
    const int32_t place = pending->count[loop + 1];
    pending->count[loop + 1] += w->count;
    return move_waiting(loops, w, loop + 1, place, true, plan);
}

static void add_solves(kern_solve_sum *sum, const kern_solve_sum *more, int32_t tokens) {
    for (int32_t t = 0; t < tokens; t++) {
        sum->solves += more[t].solves;
        sum->steps += more[t].steps;
        sum->unconverged += more[t].unconverged;
        sum->steps_max = more[t].steps_max > sum->steps_max ? more[t].steps_max : sum->steps_max;
    }
}

// The loop from whose output the token is read, if it is this one: the rule of EXIT_READ, in its order.
static bool is_read(const eng_loops *loops, walk *w, int32_t loop) {
    const kern_exit wanted = eng_exit(&w->entry->piece.knobs);
    const bool all = wanted.max_loops <= 0 || wanted.max_loops > loops->loops;
    if (loop + 1 >= (all ? loops->loops : wanted.max_loops))
        return true;
    if (wanted.max_loops <= 0 || !loops->first->gate.ref || wanted.threshold >= 1)
        return false;
    w->left /= 1 + expf(loops->gate[w->token0 + w->count - 1]);
    return 1 - w->left >= wanted.threshold;
}

// A piece whose last token is read here has its output at its place among the head's inputs.
static kern_status look(eng_loops *loops, const eng_plan *plan, walk *w, int32_t loop, int32_t place) {
    if (!w->entry)
        return KERN_OK;
    if (plan->solves.ref)
        add_solves(&w->sum, loops->solves + w->token0, w->count);
    if (!is_read(loops, w, loop))
        return KERN_OK;
    w->done = true;
    w->entry->loop = loop + 1;
    float *to =
        (float *)eng_plan_address(&loops->head_memory, loops->head->hidden) + (size_t)place * (size_t)loops->width;
    return kern_copy(loops->batch->stream, to, address(loops, plan->hidden, w->token0 + w->count - 1),
                     vectors_bytes(loops, 1));
}

// Runs the rows that were added, of walks [first, end), through the loop.
static kern_status run_rows(eng_loops *loops, const eng_plan *plan, int32_t loop, int32_t first, int32_t end) {
    eng_batch *batch = loops->batch;
    const size_t tokens = (size_t)batch->rows->n_tokens;
    kern_status status = run_plan(loops, plan, &loops->memory);
    if (status == KERN_OK && plan->gate.ref)
        status = kern_download(batch->stream, loops->gate, eng_plan_address(&loops->memory, plan->gate),
                               sizeof *loops->gate * tokens);
    if (status == KERN_OK && plan->solves.ref)
        status = kern_download(batch->stream, loops->solves, eng_plan_address(&loops->memory, plan->solves),
                               sizeof *loops->solves * tokens);
    if (status == KERN_OK)
        status = kern_synchronize(batch->stream);
    for (int32_t i = first; status == KERN_OK && i < end; i++) {
        walk *w = &loops->walk[i];
        if (w->count == 0)
            continue;
        status = leave(loops, plan, w, loop);
        if (status == KERN_OK)
            status = look(loops, plan, w, loop, i);
        w->count = 0;
    }
    return status;
}

// Adds the row of all that waits for the loop in the walk's session, if there is room.
static bool add_waiting(eng_loops *loops, walk *w, int32_t loop, kern_status *status) {
    eng_pending *pending = pending_of(loops, w->session);
    const int32_t count = pending->count[loop];
    int64_t position = w->read;
    if (count > loops->max_tokens - loops->batch->rows->n_tokens)
        return false;
    for (int32_t earlier = 1; earlier <= loop; earlier++)
        position -= pending->count[earlier];
    add_row(loops, w, position, count, 0);
    pending->count[loop] = 0;
    *status = move_waiting(loops, w, loop, 0, false, loops->part[loop]);
    return true;
}

// All walks that are not done and have something waiting for the loop, as many at once as there is room for.
static kern_status run_loop(eng_loops *loops, int32_t loop, int32_t walks) {
    kern_status status = KERN_OK;
    for (int32_t first = 0; status == KERN_OK && first < walks;) {
        int32_t end = first;
        clear_rows(loops->batch->rows);
        for (bool fits = true; status == KERN_OK && end < walks; end += fits) {
            walk *w = &loops->walk[end];
            if (w->done || pending_of(loops, w->session)->count[loop] == 0)
                continue;
            fits = add_waiting(loops, w, loop, &status);
            if (!fits)
                break;
        }
        if (status == KERN_OK && loops->batch->rows->n_rows > 0)
            status = run_rows(loops, loops->part[loop], loop, first, end);
        first = end;
    }
    return status;
}

// -------------------------------------------------------------------------------------------------------------
// settling

static eng_status settle(void *context, const eng_session *session, eng_error *error) {
    eng_loops *loops = context;
    eng_pending *pending = pending_of(loops, session);
    kern_status status = KERN_OK;
    loops->walk[0] = (walk){.session = session, .solver = pending->solver, .read = session->read};
    for (int32_t loop = 1; status == KERN_OK && loop < loops->loops; loop++)
        status = run_loop(loops, loop, 1);
    return eng_fail_kernel(error, status, "taking tokens through the loops that they wait for");
}

static bool same_solver(const kern_solver *a, const kern_solver *b) {
    return a->mode == b->mode && a->max_steps == b->max_steps && a->tolerance == b->tolerance;
}

// ----------------------------------------------------------------------------------------------------------------
// steps

// Whether the token may be read before the last loop.
static bool may_leave(const eng_loops *loops, const eng_knobs *knobs) {
    const kern_exit wanted = eng_exit(knobs);
    return wanted.max_loops >= 1 &&
           (wanted.max_loops < loops->loops || (loops->first->gate.ref && wanted.threshold < 1));
}

// One by which nothing is left for later is deferred only beside others, since weights are read once for all that are.
static bool can_wait(const eng_piece *piece) {
    return !piece->whole && piece->kind == KERN_ROW_GENERATED && piece->count == 1 && piece->ids && piece->logits &&
           !piece->scored;
}

void eng_loops_choose(const eng_loops *loops) {
    eng_flight *flight = eng_batch_filling(loops->batch);
    bool any = false;
    for (int32_t i = 0; i < flight->pieces && !any; i++) {
        const eng_piece *piece = &flight->piece[i].piece;
        any = can_wait(piece) && (may_leave(loops, &piece->knobs) ||
                                  eng_pool_pending(loops->batch->pool, piece->session->slot)->total > 0);
    }
    for (int32_t i = 0; i < flight->pieces; i++)
        flight->piece[i].deferred = any && can_wait(&flight->piece[i].piece);
}

// Room for one token more, and nothing that waits by another solver.
static eng_status make_room(eng_loops *loops, const eng_piece *piece, eng_error *error) {
    const kern_solver solver = eng_solver(&piece->knobs);
    eng_pending *pending = pending_of(loops, piece->session);
    eng_status status = ENG_OK;
    if (pending->total == loops->most_pending || !same_solver(&pending->solver, &solver))
        status = eng_session_settle(piece->session, error);
    pending->solver = solver;
    return status;
}

// Takes the step's deferred pieces up, as many as *walks, and gives their first loop's rows.
static eng_status begin(eng_loops *loops, int32_t *walks, eng_error *error) {
    eng_flight *flight = eng_batch_filling(loops->batch);
    eng_status status = ENG_OK;
    *walks = 0;
    for (int32_t i = 0; status == ENG_OK && i < flight->pieces; i++)
        if (flight->piece[i].deferred)
            status = make_room(loops, &flight->piece[i].piece, error);
    clear_rows(loops->batch->rows);
    for (int32_t i = 0; status == ENG_OK && i < flight->pieces; i++) {
        eng_batch_piece *entry = &flight->piece[i];
        if (!entry->deferred)
            continue;
        walk *w = &loops->walk[(*walks)++];
        *w = (walk){.entry = entry,
                    .session = entry->piece.session,
                    .solver = eng_solver(&entry->piece.knobs),
                    .read = entry->piece.session->read + 1,
                    .left = 1};
        add_row(loops, w, entry->piece.session->read, 1, entry->piece.ids[0]);
        pending_of(loops, w->session)->total++;
    }
    return status;
}

static kern_status run_head(eng_loops *loops, int32_t walks) {
    kern_rows *rows = loops->batch->rows;
    clear_rows(rows);
    for (int32_t i = 0; i < walks; i++) {
        rows->row[rows->n_rows++] =
            (kern_row){.kind = KERN_ROW_GENERATED, .slot = -1, .token0 = i, .length = 1, .page0 = -1};
        rows->id[i] = 0;
        rows->n_generated = ++rows->n_tokens;
        eng_batch_add_logits(rows, &loops->walk[i].entry->piece, i);
    }
    return run_plan(loops, loops->head, &loops->head_memory);
}

static kern_status hand_over_token(const eng_loops *loops, const walk *w) {
    eng_batch *batch = loops->batch;
    const eng_plan *plan = batch->plan;
    const size_t token = (size_t)w->entry->token0;
    int32_t *loop = (int32_t *)eng_plan_address(&batch->memory, plan->loops) + token;
    kern_status status = kern_upload(batch->stream, loop, &w->entry->loop, sizeof *loop);
    if (status != KERN_OK || !plan->solves.ref)
        return status;
    kern_solve_sum *sum = (kern_solve_sum *)eng_plan_address(&batch->memory, plan->solves) + token;
    return kern_upload(batch->stream, sum, &w->sum, sizeof *sum);
}

// To where the batch's own plan leaves what it says: neighbours in the order of the walks.
static kern_status hand_over_all(const eng_loops *loops, int32_t walks) {
    kern_status status =
        eng_batch_hand_over(loops->batch, loops->head, &loops->head_memory, loops->walk[0].entry->logits_row, walks);
    for (int32_t i = 0; status == KERN_OK && i < walks; i++)
        status = hand_over_token(loops, &loops->walk[i]);
    return status;
}

eng_status eng_loops_run(eng_loops *loops, eng_error *error) {
    int32_t walks = 0;
    eng_status begun = begin(loops, &walks, error);
    if (begun != ENG_OK || walks == 0)
        return begun;
    kern_status status = run_rows(loops, loops->first, 0, 0, walks);
    for (int32_t loop = 1; status == KERN_OK && loop < loops->loops; loop++)
        status = run_loop(loops, loop, walks);
    if (status == KERN_OK)
        status = run_head(loops, walks);
    if (status == KERN_OK)
        status = hand_over_all(loops, walks);
    return eng_fail_kernel(error, status, "running a step loop by loop");
}

// -----------------------------------------------------------------------------------------------------------------
// life

eng_status eng_loops_create(eng_batch *batch, eng_loops **out, eng_error *error) {
    const eng_weights *weights = batch->weights;
    const eng_config *config = &weights->model->config;
    size_t saved = 0, scratch = 0;
    eng_loops *loops = calloc(1, sizeof *loops);
    if (!loops)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for the loops of a batch");
    *loops = (eng_loops){.batch = batch,
                         .loops = config->loop.loops,
                         .width = config->hidden_size,
                         .max_tokens = part_tokens(batch->max_rows, batch->max_tokens)};
    loops->most_pending = loops->max_tokens < ENG_PENDING_TOKENS ? loops->max_tokens : ENG_PENDING_TOKENS;
    loops->walk = calloc((size_t)batch->max_rows, sizeof *loops->walk);
    loops->gate = calloc((size_t)loops->max_tokens, sizeof *loops->gate);
    loops->solves = calloc((size_t)loops->max_tokens, sizeof *loops->solves);
    eng_status status = loops->walk && loops->gate && loops->solves
                            ? eng_pool_allow_pending(batch->pool, weights->model, error)
                            : eng_fail(error, ENG_NO_MEMORY, "out of memory for the loops of a batch");
    if (status == ENG_OK)
        status = create_plans(weights->model, weights->device, batch->max_rows, loops->max_tokens, loops, &saved,
                              &scratch, error);
    if (status == ENG_OK)
        status = eng_memory_create(weights->device, weights, saved, scratch, eng_pool_states(batch->pool),
                                   eng_pool_pages(batch->pool), &loops->memory, error);
    if (status == ENG_OK)
        status = eng_memory_create(weights->device, weights, loops->head->saved_bytes, loops->head->scratch_bytes, NULL,
                                   NULL, &loops->head_memory, error);
    if (status != ENG_OK) {
        eng_loops_free(loops);
        return status;
    }
    eng_pool_set_settler(batch->pool, settle, loops);
    *out = loops;
    return ENG_OK;
}

void eng_loops_free(eng_loops *loops) {
    if (!loops)
        return;
    eng_batch *batch = loops->batch;
    eng_pool_set_settler(batch->pool, NULL, NULL);
    eng_memory_free(batch->weights->device, &loops->memory);
    eng_memory_free(batch->weights->device, &loops->head_memory);
    free_plans(loops);
    free(loops->walk);
    free(loops->gate);
    free(loops->solves);
    free(loops);
}
