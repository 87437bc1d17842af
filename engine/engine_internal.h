// SPDX-License-Identifier: Apache-2.0
// What engine.c and open.c share: the parts of an open engine.
//
// They stand in the order in which they are made; each borrows from those before it, so they are freed in the reverse
// order. Everything up to the weights is immutable once the engine is open.
#ifndef ENGINE_ENGINE_INTERNAL_H
#define ENGINE_ENGINE_INTERNAL_H

#include "engine/batch.h"
#include "engine/checkpoint.h"
#include "engine/engine.h"
#include "engine/prefix_store.h"
#include "engine/scheduler.h"
#include "engine/state.h"
#include "engine/tokenizer.h"
#include "engine/tokenizer_chat.h"

struct eng_engine {
    kern_device *device;
    kern_stream *stream;
    eng_checkpoint *checkpoint;
    eng_tokenizer *tokenizer; // NULL: the folder has none
    eng_chat_format *chat;    // NULL: it has no chat template
    eng_weights *weights;
    eng_pool *pool;
    eng_snapshots *snapshots;
    eng_timelines *timelines;
    eng_durable *durable; // NULL: there is no store
    eng_snapshots *prefix_snapshots;
    eng_prefix *prefix;
    eng_prefix_store *prefix_store; // NULL: there is no store, or none for prefixes
    eng_state_key key;
    eng_batch *batch;
    eng_scheduler *scheduler;
    eng_model_info info;
    char mixers[128], numeric_profile[160]; // what info points to
};

#endif
