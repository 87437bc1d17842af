// SPDX-License-Identifier: Apache-2.0
// A checkpoint opened to be looked at: its logits for given ids, its loss and gradients. Shared by logits, check and
// inspect.
#ifndef TRAINER_PROBE_H
#define TRAINER_PROBE_H

#include "engine/checkpoint.h"
#include "kernels/kernels.h"

typedef struct trn_probe {
    kern_device *device;
    eng_checkpoint *checkpoint;
    const eng_model *model;
    eng_weights *weights;
    float *gradients; // (weights->count) in host memory, by trn_probe_gradients
} trn_probe;

// trainable: float32 with gradients; otherwise as the server holds them, in the file's element type. storage: of the
// states; bf16 needs a CUDA device.
ENG_CHECKED eng_status trn_probe_open(const char *dir, const char *device, bool trainable, kern_storage storage,
                                      trn_probe *out, eng_error *error);
void trn_probe_close(trn_probe *probe);

// Whether a checkpoint may be written to `out` from what is read at `from`: nothing stands there or another checkpoint.
ENG_CHECKED eng_status trn_check_target(const char *from, const char *out, eng_error *error);

// logits (count, vocab): the first `split` ids are read as one prompt, chunk by chunk, the rest as generated ids one by
// one.
ENG_CHECKED eng_status trn_probe_logits(trn_probe *probe, const int32_t *ids, int32_t count, int32_t split,
                                        kern_solver solver, float *logits, eng_error *error);
// What a timeline looks like after so many ids.
typedef struct trn_probe_look {
    int32_t after; // ids; 1 or more
    float *logits; // (vocab), of the last of them; the caller's memory
    float *state;  // (model->state_bytes / 4), the slot as it lies in memory; the caller's
} trn_probe_look;
// As trn_probe_logits, keeping only what is seen at looks[0 .. n), whose `after` ascend; ids after the last are not
// read.
ENG_CHECKED eng_status trn_probe_looks(trn_probe *probe, const int32_t *ids, int32_t split, kern_solver solver,
                                       const trn_probe_look *looks, int32_t n, eng_error *error);
// Mean cross entropy of ids[1..count) and its gradients, which trn_probe_gradient has then. The derivative is the
// implicit one in the solver's mode. Trainable weights only.
ENG_CHECKED eng_status trn_probe_gradients(trn_probe *probe, const int32_t *ids, int32_t count, kern_solver solver,
                                           double *loss, eng_error *error);
const float *trn_probe_gradient(const trn_probe *probe, int32_t tensor);
// -sum log softmax(logits[t])[ids[t + 1]] / (count - 1), in double.
double trn_mean_cross_entropy(const float *logits, const int32_t *ids, int32_t count, int32_t vocabulary);

#endif
