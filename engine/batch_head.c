// SPDX-License-Identifier: Apache-2.0
// Heads beside the step's own plan: pieces without ids, which draw from what their slots keep of the last token; and
// results on their way to where the step's own plan leaves those of the others.
//
// The vectors in a slot are those that the head read then, and a row of logits depends on nothing else: the bits are
// the same. Such pieces are rare, so a step has few of them, in a plan of few rows.
#include "engine/batch_internal.h"

enum { RESUMED_ROWS = 8 };

static int32_t resumed_rows(int32_t max_rows) {
    return max_rows < RESUMED_ROWS ? max_rows : RESUMED_ROWS;
}

static eng_status create_plan(const eng_model *model, kern_device *device, int32_t max_rows, eng_plan **out,
                              eng_error *error) {
    const int32_t rows = resumed_rows(max_rows);
    const eng_plan_options options = {
        .kind = ENG_PLAN_SERVE, .max_tokens = rows, .max_rows = rows, .max_logits = rows, .part = ENG_PART_RESUME};
    return eng_plan_create(model, device, &options, out, error);
}

eng_status eng_resume_measure(const eng_model *model, kern_device *device, int32_t max_rows, uint64_t *bytes,
                              eng_error *error) {
    eng_plan *plan = NULL;
    eng_status status = create_plan(model, device, max_rows, &plan, error);
    if (status == ENG_OK)
        *bytes = (uint64_t)plan->saved_bytes + plan->scratch_bytes;
    eng_plan_free(plan);
    return status;
}

// A piece with edits of the whole vocabulary always finds room.
static int32_t most_edits(const eng_batch *batch, int32_t rows) {
    const int32_t vocab = batch->weights->model->config.vocab_size;
    const int32_t edits = rows * ENG_ROW_EDITS;
    return edits < vocab ? vocab : edits;
}

eng_status eng_resume_create(eng_batch *batch, eng_error *error) {
    const eng_weights *weights = batch->weights;
    const int32_t rows = resumed_rows(batch->max_rows);
    eng_resume *resume = &batch->resume;
    eng_status status = create_plan(weights->model, weights->device, batch->max_rows, &resume->plan, error);
    if (status == ENG_OK)
        status = eng_memory_create(weights->device, weights, resume->plan->saved_bytes, resume->plan->scratch_bytes,
                                   eng_pool_states(batch->pool), NULL, &resume->memory, error);
    if (status != ENG_OK)
        return status;
    const kern_status made =
        kern_rows_create(weights->device, rows, rows, rows, 0, 0, most_edits(batch, rows), &resume->rows);
    if (made)
        return eng_fail_kernel(error, made, "allocating the rows of sessions that go on");
    resume->rows->slot_stride = eng_pool_slot_pitch(batch->pool);
    return ENG_OK;
}

void eng_resume_free(eng_batch *batch) {
    kern_rows_free(batch->resume.rows);
    eng_memory_free(batch->weights->device, &batch->resume.memory);
    eng_plan_free(batch->resume.plan);
}

static void add_row(kern_rows *rows, const eng_piece *piece) {
    const int32_t token = rows->n_tokens;
    rows->row[rows->n_rows++] = (kern_row){.kind = KERN_ROW_GENERATED,
                                           .slot = piece->session->slot,
                                           .token0 = token,
                                           .length = 1,
                                           .position = piece->session->read - 1,
                                           .page0 = -1,
                                           .exit = eng_exit(&piece->knobs)};
    rows->id[token] = 0;
    rows->target[token] = -1;
    rows->n_generated = ++rows->n_tokens;
    eng_batch_add_logits(rows, piece, token + 1);
}

kern_status eng_batch_copy_rows(const eng_batch *batch, const kern_memory *memory, kern_ptr from, kern_ptr to,
                                int32_t row, int32_t count, size_t each) {
    char *target = (char *)eng_plan_address(&batch->memory, to) + (size_t)row * each * 4;
    return kern_copy(batch->stream, target, eng_plan_address(memory, from), (size_t)count * each * 4);
}

kern_status eng_batch_hand_over(const eng_batch *batch, const eng_plan *plan, const kern_memory *memory, int32_t row,
                                int32_t count) {
    const eng_plan *own = batch->plan;
    kern_status status = eng_batch_copy_rows(batch, memory, plan->finite, own->finite, row, count, 1);
    if (status == KERN_OK)
        status = eng_batch_copy_rows(batch, memory, plan->sampled, own->sampled, row, count, 1);
    if (status == KERN_OK)
        status = eng_batch_copy_rows(batch, memory, plan->logprob, own->logprob, row, count, 1);
    if (status == KERN_OK && batch->most_top > 0)
        status = eng_batch_copy_rows(batch, memory, plan->top_id, own->top_id, row, count, KERN_MAX_TOP);
    if (status == KERN_OK && batch->most_top > 0)
        status = eng_batch_copy_rows(batch, memory, plan->top_logprob, own->top_logprob, row, count, KERN_MAX_TOP);
    if (status == KERN_OK && batch->unsampled)
        status = eng_batch_copy_rows(batch, memory, plan->logits, own->logits, row, count,
                                     (size_t)plan->model->config.vocab_size);
    return status;
}

// Of the tokens: at which loop each is read, and that nothing was solved for it.
static kern_status hand_over_tokens(const eng_batch *batch, int32_t token) {
    const eng_resume *resume = &batch->resume;
    const int32_t count = resume->rows->n_tokens;
    kern_status status = KERN_OK;
    if (resume->plan->loops.ref)
        status = eng_batch_copy_rows(batch, &resume->memory, resume->plan->loops, batch->plan->loops, token, count, 1);
    if (status == KERN_OK && resume->plan->solves.ref)
        status = eng_batch_copy_rows(batch, &resume->memory, resume->plan->solves, batch->plan->solves, token, count,
                                     sizeof(kern_solve_sum) / 4);
    return status;
}

kern_status eng_resume_run(eng_batch *batch) {
    const eng_flight *flight = eng_batch_filling(batch);
    const eng_resume *resume = &batch->resume;
    const eng_batch_piece *first = NULL;
    kern_rows *rows = resume->rows;
    rows->n_rows = rows->n_tokens = rows->n_generated = rows->n_logits = rows->n_edits = 0;
    for (int32_t i = 0; i < flight->pieces; i++) {
        if (!eng_piece_resumes(&flight->piece[i].piece))
            continue;
        first = first ? first : &flight->piece[i];
        add_row(rows, &flight->piece[i].piece);
    }
    if (!first)
        return KERN_OK;
    kern_status status = kern_rows_prepare(batch->stream, rows);
    if (status == KERN_OK)
        status = kern_plan_run(resume->plan->plan, batch->stream, rows, &resume->memory);
    if (status == KERN_OK)
        status = eng_batch_hand_over(batch, resume->plan, &resume->memory, first->logits_row, rows->n_logits);
    return status == KERN_OK ? hand_over_tokens(batch, first->token0 - 1) : status;
}
