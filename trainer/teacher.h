// SPDX-License-Identifier: Apache-2.0
// A teacher: a checkpoint, of any family, from whose logits a run learns (Hinton, Vinyals and Dean 2015, arXiv
// 1503.02531).
//
// It reads the rows that its student reads, forward only, in the student's memory and before it: what it costs beside
// the time is its weights and a vector a token. It is solved and left as its own checkpoint says, in the numbers that
// are served. One thread.
#ifndef TRAINER_TEACHER_H
#define TRAINER_TEACHER_H

#include "engine/digest.h"
#include "engine/tokenizer.h"
#include "trainer/runner.h"

typedef struct trn_teacher {
    eng_checkpoint *checkpoint; // NULL: there is none
    const eng_model *model;
    eng_tokenizer *tokenizer; // NULL: its folder has none
    eng_weights *weights;
    eng_plan *plan;
    char digest[ENG_DIGEST_HEX]; // of its configuration and weights; "": there is none
} trn_teacher;

// Opens the folder; its weights are not read yet.
ENG_CHECKED eng_status trn_teacher_open(const char *dir, trn_teacher *out, eng_error *error);
// Whether it has the student's vocabulary and its ids mean what those of the student's tokenizer do; the first that
// differs is named. A NULL tokenizer: whether data packed with the tokenizer of this digest are its own.
ENG_CHECKED eng_status trn_teacher_check(const trn_teacher *teacher, const eng_model *student,
                                         const eng_tokenizer *tokenizer, const uint8_t *digest, eng_error *error);
// Its weights, lent to the student's, and its plan for batches of this size.
ENG_CHECKED eng_status trn_teacher_load(trn_teacher *teacher, eng_weights *student, int32_t max_tokens,
                                        int32_t max_rows, eng_error *error);
// Reads the rows of the runner, whose plan is the student's and has room for the teacher's in its memory, and waits.
ENG_CHECKED eng_status trn_teacher_run(const trn_teacher *teacher, trn_runner *runner, eng_error *error);
void trn_teacher_close(trn_teacher *teacher); // after the student's weights have run for the last time

#endif
