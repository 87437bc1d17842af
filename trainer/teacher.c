// SPDX-License-Identifier: Apache-2.0
// A run's teacher; see teacher.h.
// For its pass the student's runner gets the teacher's plan, weights and settings, and has its own again afterwards.
#include "trainer/teacher.h"

#include <stdio.h>
#include <string.h>

#include "engine/batch.h"

// A model of ids has none.
static eng_status open_tokenizer(const char *dir, trn_teacher *teacher, eng_error *error) {
    eng_error fault = {0};
    eng_status status = eng_tokenizer_open(dir, teacher->model->config.vocab_size, &teacher->tokenizer, &fault);
    return status == ENG_OK || status == ENG_NOT_FOUND ? ENG_OK : eng_fail(error, status, "teacher: %s", fault.text);
}

eng_status trn_teacher_open(const char *dir, trn_teacher *out, eng_error *error) {
    unsigned char digest[ENG_DIGEST_BYTES];
    *out = (trn_teacher){0};
    eng_status status = eng_checkpoint_open(dir, &out->checkpoint, error);
    if (status != ENG_OK)
        return status;
    out->model = eng_checkpoint_model(out->checkpoint);
    status = eng_checkpoint_digest(out->checkpoint, digest, error);
    if (status == ENG_OK)
        eng_digest_hex(digest, out->digest);
    if (status == ENG_OK)
        status = open_tokenizer(dir, out, error);
    if (status != ENG_OK)
        trn_teacher_close(out);
    return status;
}

// ---------------------------------------------------------------------------------------------------------- vocabulary

static bool same_id(const eng_tokenizer *a, const eng_tokenizer *b, int32_t id) {
    size_t left = 0, right = 0;
    const char *x = eng_tokenizer_bytes(a, id, &left), *y = eng_tokenizer_bytes(b, id, &right);
    return left == right && (left == 0 || memcmp(x, y, left) == 0) &&
           eng_tokenizer_is_special(a, id) == eng_tokenizer_is_special(b, id);
}

// The text of an id for an error, bytes that are not printable as \xNN.
static const char *show_id(const eng_tokenizer *tokenizer, int32_t id, char *text, size_t size) {
    size_t length = 0, at = 0;
    const char *bytes = eng_tokenizer_bytes(tokenizer, id, &length);
    text[0] = '\0';
    for (size_t i = 0; i < length && at + 5 < size; i++) {
        const unsigned char c = (unsigned char)bytes[i];
        at +=
            (size_t)snprintf(text + at, size - at, c >= ' ' && c < 127 && c != '"' && c != '\\' ? "%c" : "\\x%02x", c);
    }
    return text;
}

static eng_status compare(const eng_tokenizer *teacher, const eng_tokenizer *own, eng_error *error) {
    char theirs[48], ours[48];
    const int32_t size = eng_tokenizer_size(teacher);
    if (size != eng_tokenizer_size(own))
        return eng_fail(error, ENG_INVALID, "teacher: its tokenizer has %d ids, the student's %d", size,
                        eng_tokenizer_size(own));
    for (int32_t id = 0; id < size; id++)
        if (!same_id(teacher, own, id))
            return eng_fail(
                error, ENG_INVALID, "teacher: another tokenizer: id %d is %s\"%s\" there, %s\"%s\" in the student's",
                id, eng_tokenizer_is_special(teacher, id) ? "the special " : "",
                show_id(teacher, id, theirs, sizeof theirs), eng_tokenizer_is_special(own, id) ? "the special " : "",
                show_id(own, id, ours, sizeof ours));
    return ENG_OK;
}

eng_status trn_teacher_check(const trn_teacher *teacher, const eng_model *student, const eng_tokenizer *tokenizer,
                             const uint8_t *digest, eng_error *error) {
    if (teacher->model->config.vocab_size != student->config.vocab_size)
        return eng_fail(error, ENG_INVALID, "teacher: a vocabulary of %d ids, the student's has %d",
                        teacher->model->config.vocab_size, student->config.vocab_size);
    if (!teacher->tokenizer)
        return ENG_OK;
    if (tokenizer)
        return compare(teacher->tokenizer, tokenizer, error);
    if (memcmp(digest, eng_tokenizer_digest(teacher->tokenizer), ENG_DIGEST_BYTES) != 0)
        return eng_fail(error, ENG_INVALID, "teacher: its tokenizer is not the one that the data were packed with");
    return ENG_OK;
}

// -------------------------------------------------------------------------------------------------------------- passes

eng_status trn_teacher_load(trn_teacher *teacher, eng_weights *student, int32_t max_tokens, int32_t max_rows,
                            eng_error *error) {
    const eng_plan_options options = {.kind = ENG_PLAN_TEACH, .max_tokens = max_tokens, .max_rows = max_rows};
    eng_status status = eng_weights_load(teacher->checkpoint, student->device, false, &teacher->weights, error);
    if (status != ENG_OK)
        return status;
    eng_weights_lend(teacher->weights, student);
    return eng_plan_create(teacher->model, student->device, &options, &teacher->plan, error);
}

// All rows of a run are solved and left alike.
static void set_rows(kern_rows *rows, kern_solver solver, kern_exit exit) {
    for (int32_t r = 0; r < rows->n_rows; r++) {
        rows->row[r].solver = solver;
        rows->row[r].exit = exit;
    }
}

eng_status trn_teacher_run(const trn_teacher *teacher, trn_runner *runner, eng_error *error) {
    kern_rows *rows = runner->rows;
    const trn_runner own = *runner;
    const kern_row first = rows->row[0];
    runner->plan = teacher->plan;
    runner->memory.param = teacher->weights->param;
    runner->stops = NULL;
    set_rows(rows, trn_model_solver(teacher->model), eng_exit(&teacher->model->config.knobs));
    eng_status status = trn_runner_run(runner, error);
    set_rows(rows, first.solver, first.exit);
    *runner = own;
    return status;
}

void trn_teacher_close(trn_teacher *teacher) {
    eng_plan_free(teacher->plan);
    eng_weights_free(teacher->weights);
    eng_tokenizer_close(teacher->tokenizer);
    eng_checkpoint_close(teacher->checkpoint);
    memset(teacher, 0, sizeof *teacher);
}
