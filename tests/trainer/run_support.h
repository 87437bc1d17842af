// SPDX-License-Identifier: Apache-2.0
// What the trainer's tests share: shards made from arrays of ids, and tiny runs over them. Files go to the case's
// temporary folder.
#ifndef TESTS_TRAINER_RUN_SUPPORT_H
#define TESTS_TRAINER_RUN_SUPPORT_H

#include "tests/engine/temp_folder.h"
#include "trainer/run.h"

enum { TEST_VOCABULARY = 61, TEST_BOS = 1, TEST_EOS = 2 };

// Writes a shard NAME-00000.tok in the temporary folder with documents of these numbers of ids. Ids are 3 .. vocabulary
// - 1, a fixed function of document and place; text bytes are 3 an id.
void write_documents(const char *name, const int *lengths, int documents);
int32_t document_id(int document, int place);

// Keys of [model] for a tiny Mesa network, and the same with an attention layer.
extern const char mesa_model[], hybrid_model[];

// Writes run.ini: this model, train = valid = the shards `data`, then `more` (lines of further sections). Returns its
// path.
const char *write_run(const char *model, const char *data, int context, const char *more);
// Reads it and opens the run; failures end the case.
void open_run(const char *path, trn_run *run);

// A device with the given name; failures end the case.
kern_device *open_device(void);

#endif
