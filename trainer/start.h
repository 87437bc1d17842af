// SPDX-License-Identifier: Apache-2.0
// Start weights from a model of another family: what plays the same part in both, where the shapes agree.
//
// Parts are the embedding, the head, norms, MLPs and, layer by layer, the mixers: between mixers of one kind every
// tensor by its name, between two kinds the projections q, k, v and o alone, since gates, convolutions and norms of
// heads mean something else in each. Keys and values that several query heads of attention share are repeated for each
// of them where the other mixer has as many as queries ("What matters in linearizing language models", arXiv
// 2504.14366). One thread.
#ifndef TRAINER_START_H
#define TRAINER_START_H

#include "engine/checkpoint.h"

// Copies what fits from `from` into the masters of `to`, both trainable on one device; the rest stays as it is. *table
// (free) tells of every tensor, alike ones of all layers together, whether it was taken. ENG_INVALID: nothing fits.
ENG_CHECKED eng_status trn_start_weights(const eng_weights *from, const eng_weights *to, kern_stream *stream,
                                         char **table, eng_error *error);

#endif
