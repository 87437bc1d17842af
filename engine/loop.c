// SPDX-License-Identifier: Apache-2.0
// Steps that leave loops for later; see loop.h.
//
// A step runs its deferred pieces through the first loop together; then, loop after loop, those whose gate does not let
// them go, each with all that waits in its session for that loop; then the head, from what their slots keep. A token's
// own vector is put behind the waiting ones before it is known whether it goes on, so going on and catching up are one.
// Two tables take turns: the step's, in which every piece has its row, and the one that a loop is run with.
//
// How many tokens may go through a loop is the host's guess from above. It fits, since a session never has more waiting
// than its share of the table: the token that would be the last to find room goes through all loops.
#include "engine/loop.h"

#include <stdlib.h>

enum { CATCH_UP_TOKENS = 512, CATCH_UP_SHARE = 8 }; // beside a token a row: at least, and a row

struct eng_loops {
    eng_batch *batch;
    int32_t loops, max_tokens, most_pending;
    eng_plan *first, *settle, *head, *part[ENG_MAX_LOOPS], *follow[ENG_MAX_LOOPS + 1]; // the latter two from 1 on
    kern_rows *next;                                                                   // that a loop is run with
    kern_memory memory, head_memory;  // of all parts by turns; of the head
    double weight_bytes, state_bytes; // that a loop reads: in all, and a session
    bool warms, pays;                 // the first steps; in the last one it was worth it
};

static int32_t part_tokens(int32_t max_rows, int32_t max_tokens) {
    const int64_t more = CATCH_UP_SHARE * (int64_t)max_rows;
    const int64_t most = max_rows + (more > CATCH_UP_TOKENS ? more : CATCH_UP_TOKENS);
    return most > max_tokens ? max_tokens : (int32_t)most;
}

// A plan without memory; *saved and *scratch become as large as it needs.
static eng_status create_plan(const eng_model *model, kern_device *device, eng_plan_options options, size_t *saved,
                              size_t *scratch, eng_plan **out, eng_error *error) {
    options.kind = ENG_PLAN_SERVE;
    eng_status status = eng_plan_create(model, device, &options, out, error);
    if (status != ENG_OK)
        return status;
    *saved = (*out)->saved_bytes > *saved ? (*out)->saved_bytes : *saved;
    *scratch = (*out)->scratch_bytes > *scratch ? (*out)->scratch_bytes : *scratch;
    return ENG_OK;
}

// Sizes of the parts' memory and of the head's.
typedef struct sizes {
    size_t saved, scratch, head_saved, head_scratch;
} sizes;

// As many tokens as the parts take, of what the batch's own plan takes. The first part reads the ids that plan has
// drawn.
static eng_status create_plans(const eng_model *model, kern_device *device, eng_plan_options most, eng_loops *loops,
                               sizes *size, eng_error *error) {
    const int32_t rows = most.max_rows, end = model->config.loop.loops;
    most.max_tokens = part_tokens(rows, most.max_tokens);
    const eng_plan_options head = {.max_tokens = rows, .max_rows = rows, .max_logits = rows, .part = ENG_PART_RESUME};
    eng_status status = create_plan(model, device, head, &size->head_saved, &size->head_scratch, &loops->head, error);
    most.part = ENG_PART_FIRST;
    if (status == ENG_OK)
        status = create_plan(model, device, most, &size->saved, &size->scratch, &loops->first, error);
    most.level = 1;
    most.part = ENG_PART_SETTLE;
    if (status == ENG_OK)
        status = create_plan(model, device, most, &size->saved, &size->scratch, &loops->settle, error);
    for (; status == ENG_OK && most.level <= end; most.level++) {
        most.part = ENG_PART_FOLLOW;
        status = create_plan(model, device, most, &size->saved, &size->scratch, &loops->follow[most.level], error);
        most.part = ENG_PART_LOOP;
        if (status == ENG_OK && most.level < end)
            status = create_plan(model, device, most, &size->saved, &size->scratch, &loops->part[most.level], error);
    }
    return status;
}

static void free_plans(eng_loops *loops) {
    eng_plan_free(loops->first);
    eng_plan_free(loops->settle);
    eng_plan_free(loops->head);
    for (int32_t loop = 1; loop <= ENG_MAX_LOOPS; loop++) {
        eng_plan_free(loops->follow[loop]);
        if (loop < ENG_MAX_LOOPS)
            eng_plan_free(loops->part[loop]);
    }
}

eng_status eng_loops_measure(const eng_model *model, kern_device *device, const eng_plan_options *whole,
                             uint64_t *bytes, eng_error *error) {
    eng_loops loops = {0};
    sizes size = {0};
    eng_status status = create_plans(model, device, *whole, &loops, &size, error);
    if (status == ENG_OK)
        *bytes = (uint64_t)size.saved + size.scratch + size.head_saved + size.head_scratch;
    free_plans(&loops);
    return status;
}

// ---------------------------------------------------------------------------------------------------------- the lists

static eng_pending *pending_of(const eng_loops *loops, const eng_session *session) {
    return eng_pool_pending(loops->batch->pool, session->slot);
}

static void count_all(eng_pending *pending) {
    pending->total = pending->unknown;
    for (int32_t loop = 1; loop < ENG_MAX_LOOPS; loop++)
        pending->total += pending->count[loop];
}

// All has gone through all loops.
static void none_waits(eng_pending *pending) {
    *pending = (eng_pending){.life = pending->life + 1, .solver = pending->solver};
}

// A token was read at this loop, from 1 on.
static void leave_at(eng_pending *pending, int32_t loop, int32_t loops) {
    int32_t moved = 1;
    for (int32_t earlier = 1; earlier < loop && earlier < loops; earlier++) {
        moved += pending->count[earlier];
        pending->count[earlier] = 0;
    }
    if (loop < loops)
        pending->count[loop] += moved;
}

// How many tokens of the session may go through the loop in the step that is being filled.
static int32_t most_through(const eng_pending *pending, int32_t loop) {
    int32_t most = pending->unknown;
    for (int32_t earlier = 1; earlier <= loop; earlier++)
        most += pending->count[earlier];
    return most;
}

// ------------------------------------------------------------------------------------------------------------ running

static kern_status run_plan(eng_loops *loops, const eng_plan *plan, const kern_rows *rows) {
    const kern_memory *memory = plan == loops->head ? &loops->head_memory : &loops->memory;
    return kern_plan_run(plan->plan, loops->batch->stream, rows, memory);
}

static void clear_rows(kern_rows *rows) {
    rows->n_rows = rows->n_tokens = rows->n_generated = rows->n_logits = 0;
    rows->n_boundaries = rows->n_pages = rows->n_edits = 0;
}

// A row of one token.
static void add_row(kern_rows *rows, const eng_session *session, int64_t position, int32_t id, kern_row row) {
    row.kind = KERN_ROW_GENERATED;
    row.slot = session->slot;
    row.token0 = rows->n_tokens;
    row.length = 1;
    row.position = position;
    row.page0 = eng_batch_add_pages(rows, session);
    rows->row[rows->n_rows++] = row;
    rows->id[rows->n_tokens] = id;
    rows->target[rows->n_tokens++] = -1;
    rows->n_generated = rows->n_tokens;
}

// Those who go on to the loop, of whom begin with `follow`, through it.
static kern_status run_loop(eng_loops *loops, const eng_plan *follow, int32_t loop, int32_t rows, int32_t tokens) {
    kern_status status = run_plan(loops, follow, loops->batch->rows);
    loops->next->n_rows = rows;
    loops->next->n_tokens = loops->next->n_generated = tokens;
    return status ? status : run_plan(loops, loops->part[loop], loops->next);
}

// What the slot keeps beside its state begins with its session.
static kern_status greet(const eng_loops *loops, const eng_session *session) {
    eng_pending *pending = pending_of(loops, session);
    const size_t place = loops->batch->weights->model->waiting_offset;
    if (!pending->fresh)
        return KERN_OK;
    pending->fresh = false;
    return kern_zero(loops->batch->stream, (char *)eng_pool_slot(session->pool, session->slot) + place,
                     sizeof(kern_exit_waiting));
}

static eng_status settle(void *context, const eng_session *session, eng_error *error) {
    eng_loops *loops = context;
    eng_pending *pending = pending_of(loops, session);
    kern_rows *rows = loops->batch->rows;
    clear_rows(rows);
    add_row(rows, session, session->read - 1, 0, (kern_row){.solver = pending->solver, .through = 1});
    kern_status status = kern_rows_prepare(loops->batch->stream, rows);
    for (int32_t loop = 1; status == KERN_OK && loop < loops->loops; loop++)
        status = run_loop(loops, loop == 1 ? loops->settle : loops->follow[loop], loop, 1, pending->total);
    none_waits(pending);
    return eng_fail_kernel(error, status, "taking tokens through the loops that they wait for");
}

// -------------------------------------------------------------------------------------------------------------- steps

// Whether the token may be read before the last loop.
static bool may_leave(const eng_loops *loops, const eng_knobs *knobs) {
    const kern_exit wanted = eng_exit(knobs);
    return wanted.max_loops >= 1 &&
           (wanted.max_loops < loops->loops || (loops->batch->weights->model->exit_gate >= 0 && wanted.threshold < 1));
}

// One by which nothing is left for later is deferred only beside others, since weights are read once for all that are.
static bool can_wait(const eng_piece *piece) {
    return !piece->whole && piece->kind == KERN_ROW_GENERATED && piece->count == 1 && piece->logits && !piece->scored;
}

double eng_loops_bytes_a_launch(const eng_loops *loops, int32_t sessions) {
    return (loops->weight_bytes + sessions * loops->state_bytes) / (double)kern_plan_length(loops->part[1]->plan);
}

// A loop that nobody goes through costs the launches of its operations, one that is run the bytes that it reads. Who is
// at the limit does not change sides with every session that comes and goes.
static bool is_worth(eng_loops *loops, int32_t sessions) {
    const double launch = (double)kern_device_describe(loops->batch->weights->device)->launch_bytes;
    loops->pays = eng_loops_bytes_a_launch(loops, sessions) >= (loops->pays ? launch / 2 : launch);
    return loops->warms || loops->pays;
}

eng_status eng_loops_choose(eng_loops *loops, eng_error *error) {
    eng_batch *batch = loops->batch;
    eng_flight *flight = eng_batch_filling(batch);
    bool any = false, drawn = false;
    int32_t sessions = 0;
    for (int32_t i = 0; i < flight->pieces; i++) {
        const eng_piece *piece = &flight->piece[i].piece;
        sessions += can_wait(piece);
        any = any || (can_wait(piece) && (may_leave(loops, &piece->knobs) ||
                                          eng_pool_pending(batch->pool, piece->session->slot)->total > 0));
    }
    any = any && is_worth(loops, sessions);
    for (int32_t i = 0; i < flight->pieces; i++) {
        flight->piece[i].deferred = any && can_wait(&flight->piece[i].piece);
        drawn = drawn || (flight->piece[i].deferred && !flight->piece[i].piece.ids);
    }
    if (!drawn)
        return ENG_OK;
    const kern_status status =
        kern_copy(batch->stream, eng_plan_address(&loops->memory, loops->first->sampled),
                  eng_plan_address(&batch->memory, batch->plan->sampled), sizeof(int32_t) * (size_t)batch->max_logits);
    return eng_fail_kernel(error, status, "taking the ids that a step drew");
}

// Room for one token more in the session's share of the table, and nothing that waits by another solver. The token that
// takes the last room goes through all loops.
static eng_status make_room(eng_loops *loops, eng_batch_piece *entry, int32_t share, eng_error *error) {
    const eng_session *session = entry->piece.session;
    const kern_solver solver = eng_solver(&entry->piece.knobs);
    eng_pending *pending = pending_of(loops, session);
    const bool same = pending->solver.mode == solver.mode && pending->solver.max_steps == solver.max_steps &&
                      pending->solver.tolerance == solver.tolerance;
    eng_status status = ENG_OK;
    if (pending->total >= share || !same)
        status = eng_session_settle(session, error);
    if (status == ENG_OK)
        status = eng_fail_kernel(error, greet(loops, session), "beginning a list of tokens that wait");
    pending->solver = solver;
    pending->unknown++;
    pending->total++;
    entry->slot = session->slot;
    entry->life = pending->total < share ? pending->life : 0;
    return status;
}

static int32_t id_of(const eng_batch *batch, const eng_piece *piece) {
    return piece->ids ? piece->ids[0] : -1 - eng_batch_previous(batch)->piece[piece->after].logits_row;
}

// The rows of the step's deferred pieces.
static eng_status begin(eng_loops *loops, eng_error *error) {
    eng_batch *batch = loops->batch;
    eng_flight *flight = eng_batch_filling(batch);
    kern_rows *rows = batch->rows;
    int32_t share = 0;
    eng_status status = ENG_OK;
    for (int32_t i = 0; i < flight->pieces; i++)
        share += flight->piece[i].deferred;
    share = share > 0 ? loops->max_tokens / share : 0;
    share = share < loops->most_pending ? share : loops->most_pending;
    for (int32_t i = 0; status == ENG_OK && i < flight->pieces; i++)
        if (flight->piece[i].deferred)
            status = make_room(loops, &flight->piece[i], share, error);
    clear_rows(rows);
    for (int32_t i = 0; status == ENG_OK && i < flight->pieces; i++) {
        const eng_piece *piece = &flight->piece[i].piece;
        if (!flight->piece[i].deferred)
            continue;
        add_row(rows, piece->session, piece->session->read, id_of(batch, piece),
                (kern_row){.solver = eng_solver(&piece->knobs),
                           .exit = eng_exit(&piece->knobs),
                           .through = flight->piece[i].life == 0});
        eng_batch_add_logits(rows, piece, rows->n_tokens - 1);
    }
    return status;
}

static int32_t most_tokens(const eng_loops *loops, int32_t loop) {
    const kern_rows *rows = loops->batch->rows;
    int32_t most = 0;
    for (int32_t r = 0; r < rows->n_rows; r++)
        most += most_through(eng_pool_pending(loops->batch->pool, rows->row[r].slot), loop);
    return most;
}

// Behind how many loops, by what was asked for, nobody goes on. The first steps run every plan.
static int32_t most_loops(const eng_loops *loops) {
    const kern_rows *rows = loops->batch->rows;
    int32_t most = loops->warms ? loops->loops : 1;
    for (int32_t r = 0; r < rows->n_rows; r++) {
        const int32_t bound = rows->row[r].exit.max_loops;
        const int32_t own = rows->row[r].through || bound <= 0 || bound > loops->loops ? loops->loops : bound;
        most = own > most ? own : most;
    }
    return most;
}

// What the last of these loops leaves still waits for the next one, and its solves count.
static kern_status run_all(eng_loops *loops) {
    const kern_rows *rows = loops->batch->rows;
    const int32_t end = most_loops(loops);
    kern_status status = run_plan(loops, loops->first, rows);
    for (int32_t loop = 1; status == KERN_OK && loop < end; loop++)
        status = run_loop(loops, loops->follow[loop], loop, rows->n_rows, most_tokens(loops, loop));
    if (status == KERN_OK && (end < loops->loops || loops->first->sum.ref))
        status = run_plan(loops, loops->follow[end], rows);
    return status == KERN_OK ? run_plan(loops, loops->head, rows) : status;
}

// To where the batch's own plan leaves what it says: neighbours in the order of the rows.
static kern_status hand_over(const eng_loops *loops, const eng_batch_piece *first) {
    const eng_batch *batch = loops->batch;
    const int32_t rows = batch->rows->n_rows;
    kern_status status = eng_batch_hand_over(batch, loops->head, &loops->head_memory, first->logits_row, rows);
    if (status == KERN_OK)
        status = eng_batch_copy_rows(batch, &loops->head_memory, loops->head->loops, batch->plan->loops, first->token0,
                                     rows, 1);
    if (status == KERN_OK && loops->first->sum.ref)
        status = eng_batch_copy_rows(batch, &loops->memory, loops->first->sum, batch->plan->solves, first->token0, rows,
                                     sizeof(kern_solve_sum) / 4);
    return status;
}

eng_status eng_loops_run(eng_loops *loops, eng_error *error) {
    eng_batch *batch = loops->batch;
    eng_flight *flight = eng_batch_filling(batch);
    const eng_batch_piece *first = NULL;
    for (int32_t i = flight->pieces; i-- > 0;)
        first = flight->piece[i].deferred ? &flight->piece[i] : first;
    if (!first)
        return ENG_OK;
    const eng_status begun = begin(loops, error);
    if (begun != ENG_OK)
        return begun;
    kern_status status = kern_rows_prepare(batch->stream, batch->rows);
    if (status == KERN_OK)
        status = run_all(loops);
    if (status == KERN_OK)
        status = hand_over(loops, first);
    for (int32_t i = 0; i < flight->pieces; i++)
        if (flight->piece[i].deferred && flight->piece[i].life == 0)
            none_waits(pending_of(loops, flight->piece[i].piece.session));
    return eng_fail_kernel(error, status, "running a step loop by loop");
}

void eng_loops_note(eng_loops *loops, const eng_flight *flight) {
    for (int32_t i = 0; i < flight->pieces; i++) {
        const eng_batch_piece *entry = &flight->piece[i];
        eng_pending *pending = entry->deferred ? eng_pool_pending(loops->batch->pool, entry->slot) : NULL;
        if (!pending || entry->life != pending->life)
            continue;
        pending->unknown--;
        leave_at(pending, flight->loops[entry->token0], loops->loops);
        count_all(pending);
    }
}

// --------------------------------------------------------------------------------------------------------------- life

eng_status eng_loops_warm_up(eng_loops *loops, const eng_session *session, eng_error *error) {
    kern_status status = KERN_OK;
    for (int32_t tokens = 1, run = 0; status == KERN_OK && run < loops->max_tokens; tokens *= 2) {
        run = tokens < loops->max_tokens ? tokens : loops->max_tokens;
        loops->next->n_rows = run < loops->next->max_rows ? run : loops->next->max_rows;
        loops->next->n_tokens = loops->next->n_generated = run;
        for (int32_t loop = 1; status == KERN_OK && loop < loops->loops; loop++)
            status = run_plan(loops, loops->part[loop], loops->next);
    }
    loops->warms = false;
    return status ? eng_fail_kernel(error, status, "the first steps loop by loop") : eng_session_settle(session, error);
}

static eng_status create_memory(eng_loops *loops, const sizes *size, eng_error *error) {
    eng_batch *batch = loops->batch;
    const eng_weights *weights = batch->weights;
    eng_status status =
        eng_memory_create(weights->device, weights, size->saved, size->scratch, eng_pool_states(batch->pool),
                          eng_pool_pages(batch->pool), &loops->memory, error);
    if (status == ENG_OK)
        status = eng_memory_create(weights->device, weights, size->head_saved, size->head_scratch,
                                   eng_pool_states(batch->pool), NULL, &loops->head_memory, error);
    if (status != ENG_OK)
        return status;
    const kern_status made = kern_rows_create_followed(batch->stream, batch->max_rows, loops->max_tokens,
                                                       batch->rows->max_pages, &loops->next);
    loops->memory.next = loops->next;
    return eng_fail_kernel(error, made, "allocating the rows of a loop");
}

// What a loop reads: weights, and of a session a state, which is written too.
static void weigh(eng_loops *loops) {
    const eng_model *model = loops->batch->weights->model;
    const eng_plan *part = loops->part[1];
    clear_rows(loops->batch->rows);
    for (size_t i = 0; i < kern_plan_length(part->plan); i++)
        loops->weight_bytes += kern_plan_cost(part->plan, i, loops->batch->rows, &loops->memory, 0).bytes;
    for (int32_t i = 0; i < model->config.loop.layers; i++)
        loops->state_bytes += 2 * (double)model->layer[model->config.loop.first + i].state_bytes;
}

eng_status eng_loops_create(eng_batch *batch, eng_loops **out, eng_error *error) {
    const eng_weights *weights = batch->weights;
    sizes size = {0};
    eng_loops *loops = calloc(1, sizeof *loops);
    if (!loops)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for the loops of a batch");
    *loops = (eng_loops){.batch = batch,
                         .loops = weights->model->config.loop.loops,
                         .max_tokens = part_tokens(batch->max_rows, batch->max_tokens),
                         .warms = kern_plan_is_captured(batch->plan->plan)};
    loops->most_pending = loops->max_tokens < ENG_PENDING_TOKENS ? loops->max_tokens : ENG_PENDING_TOKENS;
    eng_status status = create_plans(weights->model, weights->device, batch->plan->options, loops, &size, error);
    if (status == ENG_OK)
        status = create_memory(loops, &size, error);
    if (status != ENG_OK) {
        eng_loops_free(loops);
        return status;
    }
    weigh(loops);
    eng_pool_set_settler(batch->pool, settle, loops);
    *out = loops;
    return ENG_OK;
}

void eng_loops_free(eng_loops *loops) {
    if (!loops)
        return;
    eng_batch *batch = loops->batch;
    eng_pool_set_settler(batch->pool, NULL, NULL);
    kern_rows_free(loops->next);
    eng_memory_free(batch->weights->device, &loops->memory);
    eng_memory_free(batch->weights->device, &loops->head_memory);
    free_plans(loops);
    free(loops);
}
