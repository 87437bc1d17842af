// SPDX-License-Identifier: Apache-2.0
// The output head's operations: logits, losses of many tokens, the draw of ids. Part of kernels.h, which includes it
// behind what it needs and is what other folders include.
#ifndef KERNELS_HEAD_H
#define KERNELS_HEAD_H

#include "kernels/kernels.h"

// logits[i] = cap(W x[logits_token[i]]), cap(l) = soft_cap tanh(l / soft_cap); row kernel for every row. finite[i] = 0
// when any logit is not finite.
typedef struct kern_head_logits_args {
    kern_ptr x, weight, logits; // (T, width), kern_weight (vocabulary, width), (n_logits, vocabulary)
    kern_ptr finite;            // optional int32 (n_logits)
    int32_t width, vocabulary;
    float soft_cap; // 0: none
} kern_head_logits_args;
// Cross entropy by tiles of tokens; logits are never stored whole. loss[t] = -log softmax(l_t)[target_t] (0 without
// target); best[t] = the id of the largest logit, ties to the lowest id (-1 without target or where no logit is a
// number). With dx: dx = w (softmax - onehot) W and grad_weight += its outer product, in the same pass, with w =
// target_weight times `factor` of the token times `scale`.
//
// With a teacher (Hinton, Vinyals and Dean 2015, arXiv 1503.02531), whose logits are those of its own x, weight and
// soft cap: divergence[t] = temperature^2 KL(q' || q), 0 without target, q = softmax(l_t / temperature) and q' that of
// the teacher's. What dx and grad_weight are the gradient of is then loss_share loss + divergence_share divergence.
typedef struct kern_head_loss_args {
    kern_ptr x, weight;
    kern_ptr loss;                      // (T)
    kern_ptr best;                      // optional int32 (T)
    kern_ptr dx;                        // optional (T, width)
    kern_ptr grad_weight;               // optional (vocabulary, width), with dx
    kern_ptr factor;                    // optional (T)
    kern_ptr tile;                      // scratch (tile_tokens, vocabulary)
    kern_ptr teacher_x, teacher_weight; // optional: (T, teacher_width), kern_weight (vocabulary, teacher_width)
    kern_ptr divergence, teacher_tile;  // with a teacher: (T), scratch like tile
    int32_t width, vocabulary, tile_tokens;
    float soft_cap;
    float scale; // 0 counts as 1
    int32_t teacher_width;
    float teacher_soft_cap, temperature;
    float loss_share, divergence_share; // with a teacher
} kern_head_loss_args;

// Draws id[i] by rows->sampler[i]; logprob[i] = log softmax of the model's logits (before edits) at that id. Of the top
// arrays a row writes its first `top` entries: finite logits, best first, ties to the lowest id; where there are fewer,
// id -1 and -INFINITY. An id has the same bits of logprob in both.
typedef struct kern_sample_args {
    kern_ptr logits;              // (n_logits, vocabulary), not changed
    kern_ptr id;                  // int32 (n_logits)
    kern_ptr logprob;             // optional (n_logits)
    kern_ptr top_id, top_logprob; // optional, both or none: int32 and float (n_logits, KERN_MAX_TOP)
    int32_t vocabulary;
} kern_sample_args;

#endif
