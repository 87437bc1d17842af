// SPDX-License-Identifier: Apache-2.0
// The table of a sweep on a page: what `train --sweep` has written to OUT/sweep.json.
// Borrows nothing; the groups are sweep_internal.h's.
#ifndef TRAINER_REPORT_SWEEP_H
#define TRAINER_REPORT_SWEEP_H

#include "trainer/report_page.h"

// Whether a path is a sweep: its folder, or its sweep.json.
bool trn_report_is_sweep(const char *path);
ENG_CHECKED eng_status trn_report_sweep(trn_page *page, const char *path, eng_error *error);

#endif
