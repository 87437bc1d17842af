// SPDX-License-Identifier: Apache-2.0
// What a checkpoint scores on shards, document by document, as a row of results: two checkpoints are then compared on
// the documents that both have read, as on the items of a task.
#ifndef TRAINER_EVAL_DOCUMENTS_H
#define TRAINER_EVAL_DOCUMENTS_H

#include "trainer/eval_result.h"
#include "trainer/evaluation.h"

// The row of a scoring that kept the documents' sums. It is called like the first of `data`, with the windows' length
// behind it, and has the loss and, where whole documents were read, bits per byte. Freed by trn_result_row_free, also
// on failure.
ENG_CHECKED eng_status trn_documents_row(const trn_evaluation *evaluation, const trn_strings *data,
                                         const trn_setting *setting, const trn_scores *scores, trn_result_row *out,
                                         eng_error *error);

#endif
