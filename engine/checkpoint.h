// SPDX-License-Identifier: Apache-2.0
// Hugging Face folders and loaded weights.
//
// A folder holds config.json and model.safetensors, or model.safetensors.index.json and its shards (the single file
// wins when both are there; other .safetensors files are never read). Every tensor of the model's table must be there
// with its shape in F32, F16 or BF16, or as a quantised matrix in blocks (quantize.h), and nothing else may be
// (documented legacy tensors apart). Non-finite weights are refused with tensor and count. The end-of-text ids of
// generation_config.json replace those of config.json. Saving writes beside, fsyncs, renames: at each moment the name
// points to a whole checkpoint.
#ifndef ENGINE_CHECKPOINT_H
#define ENGINE_CHECKPOINT_H

#include "engine/model.h"
#include "kernels/kernels.h"

typedef struct eng_checkpoint eng_checkpoint;

// Opens the folder, parses the config, builds the model, checks every file and tensor. No weight is read yet.
ENG_CHECKED eng_status eng_checkpoint_open(const char *dir, eng_checkpoint **out, eng_error *error);
// eng_model_store_states of its model.
void eng_checkpoint_store_states(eng_checkpoint *checkpoint, kern_storage storage);
void eng_checkpoint_close(eng_checkpoint *checkpoint);
const eng_model *eng_checkpoint_model(const eng_checkpoint *checkpoint);          // lives as long as the checkpoint
eng_dtype eng_checkpoint_dtype(const eng_checkpoint *checkpoint, int32_t tensor); // of that tensor in its file
// SHA-256 over config.json and the weight files, 32 bytes.
ENG_CHECKED eng_status eng_checkpoint_digest(const eng_checkpoint *checkpoint, uint8_t digest[32], eng_error *error);

// Weights on a device: param[i] is a kern_weight * (matrix) or float * (vector) for tensor i of the table. The model's
// constants are behind them, and last, at eng_model_lent, the head of a teacher, where there is one.
typedef struct eng_weights {
    kern_device *device;
    const eng_model *model;
    void **param;
    // trainable only: float32 masters and gradients, one allocation a class; master[i] and grad[i] point into them
    bool trainable;
    float *masters, *grads;
    float **master, **grad;
    int64_t count; // floats in masters and grads, each tensor padded to 16
    size_t bytes;
} eng_weights;

// Device bytes of the weights for serving, before any is loaded.
uint64_t eng_weights_measure(const eng_checkpoint *checkpoint);
// Serving: matrices keep the file's dtype (F16 becomes F32), vectors float32. trainable: float32 throughout, blocks
// widened, with gradients. The weights borrow the device and the model: free them before the checkpoint is closed.
ENG_CHECKED eng_status eng_weights_load(const eng_checkpoint *checkpoint, kern_device *device, bool trainable,
                                        eng_weights **out, eng_error *error);
// Random start from the table's init rules: Philox(seed; tensor, element), the same on every machine. KERN_F32: to be
// trained; else matrices are rounded to dtype (serving benchmarks), those that are not quantised staying float32.
ENG_CHECKED eng_status eng_weights_init(const eng_model *model, kern_device *device, uint64_t seed, kern_dtype dtype,
                                        eng_weights **out, eng_error *error);
void eng_weights_free(eng_weights *weights);
// Lets the plans that run with `student` read the teacher's head (eng_plan_options). Before the first of them runs; the
// teacher's weights, on the same device, live as long as they do.
void eng_weights_lend(const eng_weights *teacher, eng_weights *student);

// Whether DIR may be written: nothing stands there, or a checkpoint to replace.
ENG_CHECKED eng_status eng_checkpoint_check_target(const char *dir, eng_error *error);

// Writes DIR (which must not exist, or be a checkpoint to replace) with config.json, model.safetensors in dtype
// (ENG_F32 or ENG_BF16), generation_config.json and the tokenizer files of tokenizer_dir (NULL: none). weights must be
// trainable; a value that is not finite in dtype is ENG_NUMERIC. On failure (a full disk) DIR is as it was.
ENG_CHECKED eng_status eng_checkpoint_save(const char *dir, const eng_weights *weights, eng_dtype dtype,
                                           const char *tokenizer_dir, eng_error *error);
// Of a tensor that was rounded to blocks: sums of squares of what was lost, and of the values. 0, 0: it was not.
typedef struct eng_rounding {
    double lost, size;
} eng_rounding;
// The same folder with matrices in blocks (quantize.h says which; blocks: KERN_Q8 or KERN_Q4), the rest F32. rounding:
// (model->tensors), may be NULL.
ENG_CHECKED eng_status eng_checkpoint_quantize(const char *dir, const eng_weights *weights, kern_dtype blocks,
                                               const char *tokenizer_dir, eng_rounding *rounding, eng_error *error);

#endif
