// SPDX-License-Identifier: Apache-2.0
// Results of `eval` on a page: every checkpoint and every setting of the solver beside each other.
//
// Rows of several files are of the same task where name, digest, seed, shots and limit agree. Then their items are the
// same, and differences are taken item by item; the first column is what the others are compared with. A difference
// counts as one where 1.96 standard errors do not reach 0.
#ifndef TRAINER_REPORT_RESULTS_H
#define TRAINER_REPORT_RESULTS_H

#include "trainer/eval_result.h"
#include "trainer/report_page.h"

// teacher: the first column is one, and how much of it the others recover is told.
ENG_CHECKED eng_status trn_report_results(trn_page *page, const trn_result *result, int results, bool teacher,
                                          eng_error *error);

#endif
