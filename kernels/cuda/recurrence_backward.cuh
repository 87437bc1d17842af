// SPDX-License-Identifier: Apache-2.0
// Gradients of the recurrence family (models.md 11.3, 11.4) for prompt rows, as its own operation and Mesa's backward
// pass want them. Two forms: token by token, every family on every chip (recurrence_backward.cu), and chunk by chunk on
// the tensor cores (recurrence_backward_chunk.cu).
//
// With S~ = decay S the state that token t finds, u = w e what it writes (e = v, or v - S~^T k by the delta rule) and G
// the gradient of the state behind it, its own readings included:
//   dq = scale S^T dO      M = G^T k      dv = w M [+ skip dO]      dw = M.e
//   dk = G u [- S~ (w M)]  G = decay (G [- k (w M)^T]) + scale q dO^T of the token before
//
// A decay scales all that flows from before its token to the token and after it: within a chunk dg_t is the sum of what
// arrives at the tokens from t on less what leaves them, closed by what the state carries out; sums never leave the
// chunk (models.md 11.7). dg of a document's first token is 0, and so it is behind a zero state.
#ifndef KERNELS_CUDA_RECURRENCE_BACKWARD_CUH
#define KERNELS_CUDA_RECURRENCE_BACKWARD_CUH

#include "kernels/cuda/chunk.cuh"
#include "kernels/cuda/recurrence.cuh"

struct recurrence_gradients {
    recurrence a; // with the operands of the forward pass
    const float *d_o;
    const float *snapshots; // the state before each chunk: (chunks, states, D) rows of V' floats, so far apart:
    int64_t snapshot_chunk, snapshot_state;
    int32_t snapshot_row;
    float *dq; // NULL: not wanted
    float *dk, *dv, *dg, *dbeta;
    float *dstate; // (rows, states, D, V'), rows and states so far apart; NULL: zeros, not wanted
    int64_t dstate_row, dstate_state;
    bool add; // to dk, dv, dg and dbeta; dv may be dk
};

static __device__ __forceinline__ const float *gradients_snapshot(const recurrence_gradients &b, int64_t chunk,
                                                                  int32_t state) {
    return b.snapshots + chunk * b.snapshot_chunk + state * b.snapshot_state;
}
static __device__ __forceinline__ float *gradients_dstate(const recurrence_gradients &b, int64_t row, int32_t state) {
    return b.dstate ? b.dstate + row * b.dstate_row + state * b.dstate_state : NULL;
}

// Where the gradient of an operand lies: it is laid out as the operand.
static __device__ __forceinline__ float *gradients_query(const recurrence_gradients &b, int64_t t, int32_t state,
                                                         int32_t reader) {
    return b.dq ? b.dq + (recurrence_query(b.a, t, state, reader) - b.a.q) : NULL;
}
static __device__ __forceinline__ float *gradients_key(const recurrence_gradients &b, int64_t t, int32_t state) {
    return b.dk + (recurrence_key(b.a, t, state) - b.a.k);
}
static __device__ __forceinline__ float *gradients_value(const recurrence_gradients &b, int64_t t, int32_t state) {
    return b.dv + (recurrence_value(b.a, t, state) - b.a.v);
}
static __device__ __forceinline__ const float *gradients_output(const recurrence_gradients &b, int64_t t, int32_t state,
                                                                int32_t reader) {
    return b.d_o + (t * b.a.outputs + state * b.a.readers + reader) * b.a.columns;
}

// States that share a head of q, k or v follow one another: what a state adds to such a gradient comes behind what the
// one before it left.
struct gradients_adds {
    bool query, key, value;
};
static __device__ __forceinline__ gradients_adds gradients_adds_of(const recurrence_gradients &b, int32_t state) {
    const recurrence &a = b.a;
    return {a.queries < a.states && state % (a.states / a.queries) > 0, b.add || state % (a.states / a.keys) > 0,
            b.add || state % (a.states / a.values) > 0};
}
static __device__ __forceinline__ void gradients_put(float *to, bool add, float x) {
    *to = add ? *to + x : x;
}
// The smallest number of states, one after another, that shares no head with any other.
int32_t cuda_gradients_group(const recurrence &a);

// Token by token.
size_t cuda_gradients_token_workspace(const kern_cuda *cuda, const recurrence &a);
kern_status cuda_gradients_tokens(const cuda_step *step, const recurrence_gradients &b, char *workspace);
// Chunk by chunk, where the chip and the family allow.
bool cuda_gradients_have_chunks(const kern_cuda *cuda, const recurrence &a);
size_t cuda_gradients_chunk_workspace(const recurrence &a);
kern_status cuda_gradients_chunks(const cuda_step *step, const recurrence_gradients &b, char *workspace);
// One or the other.
size_t cuda_gradients_workspace(const kern_cuda *cuda, const recurrence &a);
kern_status cuda_gradients(const cuda_step *step, const recurrence_gradients &b, char *workspace);

#endif
