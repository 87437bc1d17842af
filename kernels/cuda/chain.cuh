// SPDX-License-Identifier: Apache-2.0
// A step of few generated tokens as few launches: operations that follow one another become phases of one kernel, which
// stays on all multiprocessors and walks their list with a barrier of the whole grid between two (chain.cu).
//
// A chain belongs to a graph and is filled while that is captured. An operation that may be a phase offers itself; any
// other is launched, behind what has been gathered (cuda_start flushes). A phase leaves in memory what its launch would
// have, bit for bit.
#ifndef KERNELS_CUDA_CHAIN_CUH
#define KERNELS_CUDA_CHAIN_CUH

#include "kernels/cuda/cuda.cuh"

enum { CUDA_CHAIN_TOKENS = 8 }; // of a step that is gathered

struct cuda_elements;
struct cuda_embedding;
struct cuda_product;
struct mesa;
struct preparation;
struct recurrence;

// Room for a plan of `operations`. *out is NULL, and the status KERN_OK, where the device cannot run chains.
kern_status cuda_chain_create(const kern_cuda *cuda, size_t operations, cuda_chain **out);
void cuda_chain_free(cuda_chain *chain);
// The phases to the device, after the capture and before the graph runs.
kern_status cuda_chain_send(const cuda_step *step);

// Whether the step is being gathered and a phase may have so many bytes of shared memory.
bool cuda_chain_takes(const cuda_step *step, size_t shared);

// Phases; the step is one that cuda_chain_takes. items: row tiles of the product. pieces: of a token's preparation.
kern_status cuda_chain_product(const cuda_step *step, const cuda_product *product, int items);
kern_status cuda_chain_prepare(const cuda_step *step, const preparation *prepare, int32_t pieces);
kern_status cuda_chain_embed(const cuda_step *step, const cuda_embedding *embedding);
kern_status cuda_chain_elements(const cuda_step *step, const cuda_elements *elements);
// *fits: false, and nothing is gathered, where the shapes are others than a chain has.
kern_status cuda_chain_recurrence(const cuda_step *step, const recurrence *core, bool *fits);
kern_status cuda_chain_mesa(const cuda_step *step, const mesa *core, bool *fits);
// Puts 1 into the flags of the step's logits behind all that has been gathered; false: nothing has.
bool cuda_chain_raise(const cuda_step *step, int32_t *flags);

// Shared memory of a product's phase, the norm's vectors behind it.
size_t cuda_chain_product_bytes(const cuda_product *product, int64_t vectors);

#endif
