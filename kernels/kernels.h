// SPDX-License-Identifier: Apache-2.0
// The one door of the kernels: mathematics on a device. No model, no file format, no HTTP.
//
// A *device* is opened by name ("cpu", "cuda:0"). Both backends implement the same table of launchers (kern_backend);
// the CUDA one is a module opened at run time, so that one package serves hosts with and without a driver.
//
// An *operation* is a code and a struct of arguments: first its operands (kern_ptr), then its shapes and constants.
// kern_launch runs one; a *plan* is a list of them, built once and run every step. In a plan the operands are
// references into memory classes (parameters, gradients, state, saved, scratch), resolved when it runs. What changes
// from step to step stands in the row table (kern_rows), so the same plan runs every batch up to its size.
//
// *Ragged rows, flattened.* A batch is n_tokens tokens; row r owns tokens [token0, token0 + length). Letters used for
// shapes:
//   T tokens of the batch   H heads   D key width of a head   V value width of a head   C chunk   W taps   N outputs
// Activations are float32, row-major (T, width). A row is a *prompt* row (chunk form, on the grid of absolute positions
// [0,C), [C,2C) ...) or a *generated* row (step form, token by token). The kind, never the length or the batch, chooses
// the kernel; all generated rows stand before all prompt rows. A row's results do not depend on its neighbours, bit for
// bit, unless rows->merge is set (training and evaluation: products run over the whole batch at once).
//
// Launchers allocate nothing, never synchronise, and refuse unsupported shapes with a status. Gradients of parameters
// are added (+=); gradients of activations are written (=) unless the argument `accumulate` says otherwise.
#ifndef KERNELS_KERNELS_H
#define KERNELS_KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/device.h"

// ------------------------------------------------------------------------------------------------------------- rows

typedef enum kern_row_kind { KERN_ROW_GENERATED, KERN_ROW_PROMPT } kern_row_kind;

typedef enum kern_solve_mode {
    KERN_SOLVE_TOLERANCE, // x0 = q / diag(Hk + Lambda); stop at max(tolerance |r0|, 1e-6 |q|) or max_steps
    KERN_SOLVE_STEPS,     // exactly max_steps from the same start; a row with |r| < 1e-7 |q| freezes
    KERN_SOLVE_EXACT,     // Cholesky
    KERN_SOLVE_FIXED,     // zero start, max_steps, absolute 1e-5 in both divisions (FLA's public code); tests
} kern_solve_mode;

typedef struct kern_solver {
    int32_t mode; // kern_solve_mode
    int32_t max_steps;
    float tolerance;
} kern_solver;

// At which loop of a looped model the outputs of a row's tokens are read (EXIT_READ). All 0: at the last.
typedef struct kern_exit {
    float threshold;   // 0 .. 1; from 1 on nothing but max_loops counts
    int32_t max_loops; // 0: all, whatever the threshold
} kern_exit;

typedef struct kern_row {
    int32_t kind;       // kern_row_kind
    int32_t slot;       // state slot; -1: starts from zero and its end state is dropped
    int32_t token0;     // first token in the batch
    int32_t length;     // >= 1
    int64_t position;   // absolute position of the first token
    int32_t boundary0;  // rows->boundary[boundary0 .. boundary0 + boundaries): tokens (batch index, ascending, inside
    int32_t boundaries; // the row, > token0) at which a new document starts: its state, taps and positions start anew
    int32_t page0;      // rows->page[page0 + p]: KV page of positions [64 p, 64 p + 64); -1: none (windowed or slot -1)
    kern_solver solver;
    kern_exit exit;
    int32_t through; // 1: goes through all loops, wherever it is read (EXIT_FOLLOW)
} kern_row;

// A piece of a prompt row on the absolute grid. Filled by kern_rows_prepare.
typedef struct kern_chunk {
    int32_t row;
    int32_t token0, length; // length <= C
    int64_t position;
} kern_chunk;

// A change to one logit before temperature: bias first, then repetition (l > 0 ? l / repetition : l * repetition), then
// penalty subtracted. bias = -INFINITY bans the id.
typedef struct kern_logit_edit {
    int32_t id;
    float bias, repetition, penalty;
} kern_logit_edit;

enum { KERN_MAX_TOP = 20 };

// How the next id of one logits row is drawn: edits, temperature, top_k, top_p, min_p, draw by Philox4x32-10 with
// key = seed and counter = (position, choice). temperature 0 or top_p 0: greedy, ties to the lowest id. With a forced
// id nothing is drawn: that id is the result, and its logprob that of a token of a given text.
typedef struct kern_sampler {
    float temperature, top_p, min_p;
    int32_t top_k; // <= 0: off
    uint64_t seed;
    uint64_t position; // absolute position of the id drawn
    uint32_t choice;
    int32_t forced;       // -1: draw
    int32_t top;          // likeliest ids wanted beside the result, 0 .. KERN_MAX_TOP
    int32_t edit0, edits; // rows->edit[edit0 .. edit0 + edits)
} kern_sampler;

enum { KERN_PAGE_TOKENS = 64 };

typedef struct kern_rows {
    // filled by the caller
    int32_t n_rows, n_tokens, n_generated; // n_generated: tokens of the generated rows, which come first
    int32_t n_logits;
    int32_t n_boundaries, n_pages, n_edits;
    bool merge;            // see above; before kern_rows_prepare
    bool followed;         // filled on the device by EXIT_FOLLOW: n_rows and n_tokens are bounds of what stands there
    kern_row *row;         // (n_rows)
    int32_t *boundary;     // (n_boundaries)
    int32_t *page;         // (n_pages)
    int32_t *id;           // (n_tokens) input ids; -1 - i: the id at place i of what EMBED calls drawn
    int32_t *target;       // (n_tokens) -1: no loss; used by HEAD_LOSS
    float *target_weight;  // (n_tokens) weight of the token's loss, normally 1 / counted targets of the step
    int32_t *logits_token; // (n_logits) tokens whose logits are wanted
    kern_sampler *sampler; // (n_logits)
    kern_logit_edit *edit; // (n_edits)
    // filled by kern_rows_prepare
    int32_t n_chunks;
    kern_chunk *chunk;       // prompt rows in order, each cut at the grid
    int32_t *token_row;      // (n_tokens)
    int32_t *token_start;    // (n_tokens) first token (batch index) of the token's document inside its row
    int64_t *token_position; // (n_tokens) position inside its document: RoPE, KV
    // filled by the owner of the pools
    size_t slot_stride; // bytes of one state slot
    size_t page_stride; // bytes of one KV page of all layers together
    // capacities of the arrays above
    int32_t max_rows, max_tokens, max_logits, max_boundaries, max_pages, max_edits, max_chunks;
} kern_rows;

// Host tables of these capacities, zeroed; *out is freed with kern_rows_free.
KERN_CHECKED kern_status kern_rows_create(kern_device *device, int32_t max_rows, int32_t max_tokens, int32_t max_logits,
                                          int32_t max_boundaries, int32_t max_pages, int32_t max_edits,
                                          kern_rows **out);
void kern_rows_free(kern_rows *rows);
// A table that EXIT_FOLLOW fills with generated rows. n_rows, n_tokens, n_generated: the caller's, before a plan runs.
KERN_CHECKED kern_status kern_rows_create_followed(kern_stream *stream, int32_t max_rows, int32_t max_tokens,
                                                   int32_t max_pages, kern_rows **out);
// Checks the caller's part (order, ranges, kinds, boundaries), fills the derived part, sends it to the device.
KERN_CHECKED kern_status kern_rows_prepare(kern_stream *stream, kern_rows *rows);

// ------------------------------------------------------------------------------------------------------- operations

// In kern_launch an operand is a device pointer; in a plan it is a reference. An optional operand may be null.
typedef union kern_ptr {
    void *p;
    float *f;
    int32_t *i;
    kern_weight *w;
    uint64_t ref;
} kern_ptr;

typedef struct kern_solve_report { // one a (token, head)
    uint16_t steps;
    uint16_t flags; // bit 0: bound hit before the tolerance; bit 1: stopped at p.Ap <= 0 or not finite
    float residual; // |r| / |q| at the end
} kern_solve_report;

enum { KERN_REPORT_UNCONVERGED = 1, KERN_REPORT_BREAKDOWN = 2 };

typedef struct kern_solve_sum { // of a token's solves; they are added to what stands there (CLEAR)
    uint32_t solves, steps;
    uint32_t unconverged; // with any flag
    uint32_t steps_max;
} kern_solve_sum;

// silu(z) = z s(z), s the logistic function; elu1(z) = z + 1 above 0 and e^z below; gelu_tanh(z) = z s(2 u) with
// u = sqrt(2 / pi) (z + 0.044715 z^3).
typedef enum kern_activation {
    KERN_IDENTITY,
    KERN_SILU,
    KERN_SIGMOID,
    KERN_RELU,
    KERN_ELU1,
    KERN_GELU_TANH,
    KERN_ACTIVATIONS
} kern_activation;

// y = scale * weight[id]. Ids come from rows->id, or by its word from drawn: ids that the step before left on the
// device (SAMPLE), so that the host need not have seen them.
typedef struct kern_embed_args {
    kern_ptr weight; // kern_weight (vocabulary, width)
    kern_ptr drawn;  // optional int32 (max_logits)
    kern_ptr y;      // (T, width)
    int32_t width;
    float scale;
} kern_embed_args;
// grad[id] += scale * dy, tokens in ascending order.
typedef struct kern_embed_backward_args {
    kern_ptr dy, grad; // (T, width), (vocabulary, width)
    int32_t width;
    float scale;
} kern_embed_backward_args;

// Each of the T * groups vectors of `width`: y = n (weight + weight_offset) [act(gate)], n = (x - mean) rstd,
// rstd = 1/sqrt(mean (x - mean)^2 + eps); mean is 0 unless `center` (LayerNorm). With gate_first (Mamba-2) x act(gate)
// is what is normalised, and nothing is multiplied after.
typedef struct kern_rmsnorm_args {
    kern_ptr x;      // (T, groups * width)
    kern_ptr weight; // optional (width), with group_weights (groups, width); absent: weight + weight_offset is 1
    kern_ptr gate;   // optional, like x
    kern_ptr y;      // like x; may be x
    int32_t groups, width;
    float eps, weight_offset;
    int32_t activation; // of the gate, kern_activation
    int32_t gate_first, center, group_weights;
} kern_rmsnorm_args;
typedef struct kern_rmsnorm_backward_args {
    kern_ptr x, weight, gate; // as in forward
    kern_ptr dy, dx;          // dx may be dy
    kern_ptr dgate;           // optional, with gate
    kern_ptr grad_weight;     // like weight; absent with it
    int32_t groups, width;
    float eps, weight_offset;
    int32_t accumulate; // dx += instead of =
    int32_t activation;
    int32_t gate_first, center, group_weights;
} kern_rmsnorm_backward_args;

// Each of the T * groups vectors of `width`: y = x / sqrt(sum x^2 + eps). y may be x.
typedef struct kern_l2norm_args {
    kern_ptr x, y; // (T, groups * width)
    int32_t groups, width;
    float eps;
} kern_l2norm_args;
typedef struct kern_l2norm_backward_args {
    kern_ptr x, dy, dx; // dx may be dy
    int32_t groups, width;
    float eps;
} kern_l2norm_backward_args;

// y = x W^T [+ bias] [+ residual], W rows [row0, row0 + rows) of the weight. Every one of the T * groups vectors of
// `cols` meets the same W. Generated tokens go through row kernels (bits independent of the batch), prompt tokens chunk
// by chunk (or all at once with rows->merge) through the matrix library on fixed slices of outputs.
typedef struct kern_linear_args {
    kern_ptr x, weight; // (T, groups * cols), kern_weight (row0 + rows or more, cols)
    kern_ptr bias;      // optional, of the whole weight: row0 applies
    kern_ptr residual;  // optional (T, groups * rows); may be y
    kern_ptr y;         // (T, groups * rows)
    int32_t cols, rows;
    int32_t row0;
    int32_t groups; // 0 counts as 1
} kern_linear_args;
// dx = dy W.
typedef struct kern_linear_backward_input_args {
    kern_ptr dy, weight, dx; // (T, groups * rows), kern_weight KERN_F32, (T, groups * cols)
    int32_t cols, rows;
    int32_t accumulate; // dx += instead of =
    int32_t row0, groups;
} kern_linear_backward_input_args;
// grad_weight += dy^T x, grad_bias += column sums of dy, both from row row0 on.
typedef struct kern_linear_backward_weight_args {
    kern_ptr x, dy;       // (T, groups * cols), (T, groups * rows)
    kern_ptr grad_weight; // of the whole weight
    kern_ptr grad_bias;   // optional, of the whole weight
    int32_t cols, rows;
    int32_t row0, groups;
} kern_linear_backward_weight_args;

// Block-diagonal product with row vectors (not transposed like LINEAR): y_b = x_b W_b [+ bias_b], the RG-LRU's gates.
// Every token in the one order, whatever its row's kind.
typedef struct kern_block_linear_args {
    kern_ptr x;      // (T, blocks * width)
    kern_ptr weight; // kern_weight (blocks * width, width): row b * width + i holds W_b[i]
    kern_ptr bias;   // optional (blocks * width)
    kern_ptr y;      // (T, blocks * width); not x
    int32_t blocks, width;
} kern_block_linear_args;
typedef struct kern_block_linear_backward_args {
    kern_ptr x, weight;   // as in forward; KERN_F32
    kern_ptr dy, dx;      // (T, blocks * width); dx not dy
    kern_ptr grad_weight; // (blocks * width, width)
    kern_ptr grad_bias;   // optional (blocks * width)
    int32_t blocks, width;
    int32_t accumulate; // dx += instead of =
} kern_block_linear_backward_args;

// Depthwise causal convolution inside a document: y[t,c] = act(bias[c] + sum_j weight[c,j] x[t-W+1+j,c]). The state
// keeps the last W-1 inputs, oldest first, (W-1, channels) float32. Weight and bias may be wider: channel c reads row
// channel0 + c, so that the parts of one convolution run as calls of their own, each with its own state.
typedef struct kern_short_conv_args {
    kern_ptr x, weight; // (T, channels), (channel0 + channels or more, taps)
    kern_ptr bias;      // optional (channel0 + channels or more)
    kern_ptr state;     // optional, slot memory
    kern_ptr y;         // (T, channels); not x
    int32_t channels, taps;
    int32_t activation; // kern_activation
    int32_t channel0;
} kern_short_conv_args;
typedef struct kern_short_conv_backward_args {
    kern_ptr x, weight, bias;
    kern_ptr dy, dx, grad_weight; // grad_weight and grad_bias are as wide as weight: channel0 applies
    kern_ptr grad_bias;           // optional
    int32_t channels, taps;
    int32_t activation;
    int32_t channel0;
} kern_short_conv_backward_args;

// Log decay g <= 0 from a, per head (channels 1) or key channel; s = logistic function, z = a + dt_bias.
typedef enum kern_decay_law {
    KERN_DECAY_LAW_NONE,        // no a, no g
    KERN_DECAY_LAW_SIGMOID,     // g = max(log s(a) / divisor, clamp_min) [+ ln(1 - (1 - gamma_cap) beta^2)]
    KERN_DECAY_LAW_EXPONENTIAL, // g = -e^A_log softplus(z)
    KERN_DECAY_LAW_BOUNDED,     // g = lower_bound s(e^A_log z)
    KERN_DECAY_LAW_STEP,        // g = -e^A_log dt, dt = clamp(softplus(z), step_min, step_max); channels 1
} kern_decay_law;
// Write weight beta (T, heads) from b.
typedef enum kern_write_law {
    KERN_WRITE_LAW_NONE,     // no b, no beta
    KERN_WRITE_LAW_SIGMOID,  // beta = write_factor s(b)
    KERN_WRITE_LAW_CONSTANT, // beta = write_factor; no b
    KERN_WRITE_LAW_STEP,     // beta = dt of the decay law STEP; no b
} kern_write_law;
typedef struct kern_gates {
    int32_t heads, channels;      // channels of a a head
    int32_t decay_law, write_law; // kern_decay_law, kern_write_law
    float divisor;                // SIGMOID
    float clamp_min;              // SIGMOID, < 0; 0: none
    float gamma_cap;              // SIGMOID with write law SIGMOID of factor 1 and channels 1 (models.md 2.7); 1: none
    float lower_bound;            // BOUNDED, < 0
    float step_min, step_max;     // STEP; step_max may be infinite
    float write_factor;
} kern_gates;
typedef struct kern_gates_args {
    kern_ptr a, b;           // (T, heads * channels), (T, heads) before the activations
    kern_ptr A_log, dt_bias; // (heads), (heads * channels): laws EXPONENTIAL, BOUNDED, STEP
    kern_ptr g, beta;        // (T, heads * channels), (T, heads)
    kern_gates gates;
} kern_gates_args;
typedef struct kern_gates_backward_args {
    kern_ptr a, b, A_log, dt_bias;
    kern_ptr dg, dbeta;                // as g and beta
    kern_ptr da, db;                   // as a and b; may be dg and dbeta
    kern_ptr grad_A_log, grad_dt_bias; // with A_log and dt_bias
    kern_gates gates;
} kern_gates_backward_args;

// mLSTM's stabilised gates (Beck et al. 2024; models.md 12.3): i = cap(input), f = cap(forget), lf = log s(f),
// m_t = max(lf_t + m_{t-1}, i_t), g_t = lf_t + m_{t-1} - m_t, beta_t = e^(i_t - m_t); m is 0 before a document.
typedef struct kern_maxplus_gates_args {
    kern_ptr input, forget; // (T, heads) before the cap
    kern_ptr state;         // optional slot memory (heads) float32: m
    kern_ptr g, beta, m;    // (T, heads): log decay, write weight, stabiliser
    int32_t heads;
    float soft_cap; // cap(z) = soft_cap tanh(z / soft_cap); 0: none
} kern_maxplus_gates_args;
// m counts as a constant, which is exact as long as what follows does not depend on it.
typedef struct kern_maxplus_gates_backward_args {
    kern_ptr input, forget, beta; // beta from forward
    kern_ptr dg, dbeta;
    kern_ptr dinput, dforget; // (T, heads); may be dbeta and dg
    int32_t heads;
    float soft_cap;
} kern_maxplus_gates_backward_args;

// Divides each head's read-out by its normaliser n, the last of its value_width + 1 columns:
// h = o / (max(|n|, e^-m) + eps) with m (mLSTM), h = o / (n + eps) without (linear attention).
typedef struct kern_normalise_args {
    kern_ptr o; // (T, heads * (value_width + 1))
    kern_ptr m; // optional (T, heads)
    kern_ptr h; // (T, heads * value_width); not o
    int32_t heads, value_width;
    float eps;
} kern_normalise_args;
typedef struct kern_normalise_backward_args {
    kern_ptr o, m;
    kern_ptr dh, d_o; // as h and o; d_o not dh
    int32_t heads, value_width;
    float eps;
} kern_normalise_backward_args;

// How a matrix state lies in its slot. BF16 is for CUDA devices alone (KERN_UNSUPPORTED on the CPU): arithmetic stays
// float32, and what is stored is rounded up or down at random, in the mean exactly, by bits that depend on the token's
// position and the element's place alone. A row rounds after each of its tokens, so that a row cut anywhere leaves the
// same bits.
typedef enum kern_storage { KERN_STORE_F32, KERN_STORE_BF16 } kern_storage;

// The recurrence family, models.md 11:  S~ = decay S;  u = w v | beta (v - S~^T k);  S = S~ + k u^T;
// o = scale S^T q [+ skip * v].  H states; V' = V + (1 with unit_column) columns of a state; O = max(H, query heads)
// heads of o. State s uses key head s / (H / key heads) and value head s / (H / value heads). With fewer query heads
// than states, state s is read by query head s / (H / query heads); with more, query head j reads state
// j / (query heads / H). Head j of o adds the value head of its state to skip.
typedef enum kern_decay { KERN_DECAY_NONE, KERN_DECAY_HEAD, KERN_DECAY_SCALAR, KERN_DECAY_CHANNEL } kern_decay;
typedef enum kern_update { KERN_UPDATE_ADD, KERN_UPDATE_DELTA } kern_update;
typedef struct kern_recurrence {
    int32_t decay, update;                       // kern_decay, kern_update
    int32_t weighted;                            // the write weight w (or beta) is an operand; otherwise 1
    int32_t heads;                               // H
    int32_t query_heads, key_heads, value_heads; // 0: H
    int32_t key_width, value_width;              // D, V
    int32_t unit_column;                         // a constant 1 stands behind the V values of v (normalisers)
    int32_t skip_width;                          // 0: no skip; 1 or V: its floats a head
    float scale;
    int32_t storage; // of the state, kern_storage
} kern_recurrence;
typedef struct kern_recurrence_args {
    kern_ptr q, k, v;   // (T, query heads * D), (T, key heads * D), (T, value heads * V)
    kern_ptr g;         // log decay <= 0: HEAD (H), SCALAR (T, H), CHANNEL (T, H * D)
    kern_ptr beta;      // with weighted (T, H)
    kern_ptr skip;      // with skip_width (O * skip_width)
    kern_ptr state;     // optional slot memory (H, D, V') of `storage`
    kern_ptr o;         // (T, O * V')
    kern_ptr snapshots; // optional: the state before each chunk (n_chunks, H, D, V'), for backward
    kern_recurrence family;
} kern_recurrence_args;
// Prompt rows only. Gradients of shared heads are sums in the order of the heads.
typedef struct kern_recurrence_backward_args {
    kern_ptr q, k, v, g, beta, skip, snapshots;
    kern_ptr d_o; // (T, O * V')
    kern_ptr dq, dk, dv;
    kern_ptr dg;        // SCALAR and CHANNEL, like g
    kern_ptr dbeta;     // with weighted
    kern_ptr grad_skip; // with skip_width, added
    kern_ptr dstate;    // optional (n_rows, H, D, V'): in dL/dS at the row's end, out dL/dS at its start
    kern_recurrence family;
} kern_recurrence_backward_args;

// Mesa layer core, models.md 2: Hk = gamma Hk + beta k k^T, Hv = gamma Hv + beta k v^T, (Hk + diag(lambda)) x = q,
// o = Hv^T x. lambda = softplus(lambda_params) + lambda_bound. Solver per row (rows->row[r].solver); each (token, head)
// stops by itself. Snapshots hold [Hk | Hv] before each chunk as (n_chunks, heads, D, D + V).
typedef struct kern_mesa {
    int32_t heads, key_width, value_width; // H, D, V
    float lambda_bound;
    int32_t storage; // of the state, kern_storage
} kern_mesa;
typedef struct kern_mesa_args {
    kern_ptr q, k, v;       // (T, H * D), (T, H * D), (T, H * V); q and k already L2-normalised
    kern_ptr g, beta;       // (T, H)
    kern_ptr lambda_params; // (H * D)
    kern_ptr state;         // optional slot memory: Hk (H, D, D) then Hv (H, D, V), float32; BF16: of each Hk its lower
                            // triangle in float32, padded to 4 floats (by groups of eight rows: first what is left of
                            // the group's diagonal block, then the block's triangle, each by rows), and Hv in bfloat16
    kern_ptr o;             // (T, H * V)
    kern_ptr x;             // optional (T, H * D): the solutions, for backward
    kern_ptr snapshots;     // optional, for backward
    kern_ptr report;        // optional kern_solve_report (T, H)
    kern_ptr sum;           // optional kern_solve_sum (T)
    kern_mesa mesa;
} kern_mesa_args;
// Implicit differentiation, models.md 2.8: u = (Hk + Lambda)^-1 (Hv do) by a second solve with the same rule
// (right-hand sides divided by their norm), mode and steps of the row; tolerance = min(row tolerance,
// backward_tolerance).
typedef struct kern_mesa_backward_args {
    kern_ptr q, k, v, g, beta, lambda_params, o, x, snapshots;
    kern_ptr d_o; // (T, H * V)
    kern_ptr dq, dk, dv, dg, dbeta;
    kern_ptr grad_lambda_params; // (H * D), added
    kern_ptr report, sum;        // optional, as in forward, of the second solve
    kern_ptr dstate;             // optional (n_rows, [Hk (H, D, D), Hv (H, D, V)]) in: at the end, out: at the start
    kern_mesa mesa;
    float backward_tolerance;
} kern_mesa_backward_args;

// RoPE in place, NeoX halves (i, i + rotary/2) of each head's first `rotary` channels, positions rows->token_position.
typedef struct kern_rope_args {
    kern_ptr x;         // (T, heads * head_width)
    kern_ptr frequency; // (rotary / 2) angular frequencies
    int32_t heads, head_width, rotary;
    int32_t inverse; // rotates back (backward)
} kern_rope_args;

// Causal softmax attention inside a document, grouped keys, optional window (self and window - 1 before). Keys arrive
// rotated. Full attention keeps K and V in pages (rows->page): within a page, at page_offset bytes: K (kv_heads, 64,
// head_width) then V. Windowed attention keeps a ring in the slot: K (kv_heads, window, head_width) then V, entry =
// position mod window.
typedef struct kern_attention {
    int32_t heads, kv_heads, head_width;
    int32_t window; // 0: full
    float scale;
} kern_attention;
typedef struct kern_attention_args {
    kern_ptr q, k, v; // (T, heads * w), (T, kv_heads * w) twice
    kern_ptr ring;    // optional slot memory (window > 0)
    kern_ptr pages;   // optional KV pool base (window 0)
    kern_ptr o;       // (T, heads * w)
    kern_ptr lse;     // optional (T, heads): log sum exp of the scores, for backward
    kern_attention attention;
    int64_t page_offset;
} kern_attention_args;
// Rows without earlier positions (slot -1) only.
typedef struct kern_attention_backward_args {
    kern_ptr q, k, v, o, lse, d_o;
    kern_ptr dq, dk, dv;
    kern_attention attention;
} kern_attention_backward_args;

// y = act(x); y may be x.
typedef struct kern_activation_args {
    kern_ptr x, y; // (T, width)
    int32_t width;
    int32_t activation;
} kern_activation_args;
typedef struct kern_activation_backward_args {
    kern_ptr x, dy, dx; // dx may be dy
    int32_t width;
    int32_t activation;
} kern_activation_backward_args;

// Gated product (GLU and its variants): y = act(gate) * up; y may be gate. IDENTITY: the plain product.
typedef struct kern_glu_args {
    kern_ptr gate, up, y; // (T, width)
    int32_t width;
    int32_t activation;
} kern_glu_args;
typedef struct kern_glu_backward_args {
    kern_ptr gate, up, dy, dgate, dup; // dgate or dup may be dy
    int32_t width;
    int32_t activation;
} kern_glu_backward_args;

// Each of the T * groups vectors z of `width` becomes one of kern_feature_width(feature, width).
typedef enum kern_feature {
    KERN_FEATURE_HEDGEHOG, // softmax of [2 z, -2 z]: 2 width
    KERN_FEATURE_DPFP,     // p = [relu(z), -relu(z)]; p * roll(p, j) for j = 1 .. 4, roll to the right: 8 width
    KERN_FEATURE_SUM,      // z / (sum z + eps): width
    KERN_FEATURES
} kern_feature;
static inline int32_t kern_feature_width(int32_t feature, int32_t width) {
    return feature == KERN_FEATURE_HEDGEHOG ? 2 * width : feature == KERN_FEATURE_DPFP ? 8 * width : width;
}
typedef struct kern_feature_map_args {
    kern_ptr x, y; // (T, groups * width), (T, groups * feature width); y may be x for SUM
    int32_t groups, width;
    int32_t feature; // kern_feature
    float eps;       // SUM
} kern_feature_map_args;
typedef struct kern_feature_map_backward_args {
    kern_ptr x;      // as in forward
    kern_ptr dy, dx; // dx may be dy for SUM
    int32_t groups, width;
    int32_t feature;
    float eps;
} kern_feature_map_backward_args;

// RG-LRU (De et al. 2024, models.md 13.3): log a = -8 s(recurrence_gate) softplus(recurrent_param),
// h_t = a h_{t-1} + sqrt(1 - a^2) s(input_gate) x_t; where rows->token_position is 0: h_t = s(input_gate) x_t.
typedef struct kern_rglru_args {
    kern_ptr x;                           // (T, width)
    kern_ptr input_gate, recurrence_gate; // (T, width) before the activation
    kern_ptr recurrent_param;             // (width)
    kern_ptr state;                       // optional slot memory (width) float32: h
    kern_ptr h;                           // (T, width); not x or a gate
    int32_t width;
} kern_rglru_args;
// Rows without earlier state (slot -1) only. The slope of the root is bounded by 1000, as HF does.
typedef struct kern_rglru_backward_args {
    kern_ptr x, input_gate, recurrence_gate, recurrent_param, h; // h from forward
    kern_ptr dh;
    kern_ptr dx, dinput_gate, drecurrence_gate; // (T, width); dx may be dh
    kern_ptr grad_recurrent_param;              // (width)
    int32_t width;
} kern_rglru_backward_args;

// y = 0, `width` words of 4 bytes a token.
typedef struct kern_clear_args {
    kern_ptr y; // (T, width)
    int32_t width;
} kern_clear_args;

// y += x.
typedef struct kern_add_args {
    kern_ptr x, y; // (T, width)
    int32_t width;
} kern_add_args;

// Reads each token of a looped model at one of its loops (Zhu et al. 2025, arXiv 2510.25741, section 3): with the
// gate's logits z_r, p_r = s(z_r) S_{r-1} and S_r = prod_{j<=r} (1 - s(z_j)), the first r with p_1 + ... + p_r >=
// threshold, or the row's max_loops. Planes of the loops lie `stride` tokens apart.
typedef struct kern_exit_read_args {
    kern_ptr x;    // (loops, stride, width)
    kern_ptr z;    // optional (loops, stride): absent, the last of max_loops is read
    kern_ptr y;    // (T, width)
    kern_ptr loop; // int32 (T): from 1
    int32_t width, loops, stride;
} kern_exit_read_args;

enum { KERN_MAX_LOOPS = 32 };

// The vectors of each row's last token go to its slot, one a plane; with `back` they come from there. Rows without a
// slot are left alone. Planes lie `stride` tokens apart in x, `state_stride` floats in a slot.
typedef struct kern_row_end_args {
    kern_ptr x, state; // (planes, stride, width), state
    int32_t width, planes, stride, state_stride;
    bool back;
} kern_row_end_args;

// Beside the lists in a slot of what waits for a loop, as the loop before made it, in order; zeroed for a new text.
typedef struct kern_exit_waiting {
    int32_t count[KERN_MAX_LOOPS]; // by the loop that they wait for, from 0
    int32_t moved, token0;         // the row that left its list for the loop under way: tokens, and where they stand
} kern_exit_waiting;
// The vectors of each row's tokens go behind those that wait in its slot for `loop`; with `back` the list's first ones
// come to the row. Only EXIT_FOLLOW counts. Rows without a slot are left alone.
typedef struct kern_exit_wait_args {
    kern_ptr x;             // (T, width)
    kern_ptr list, waiting; // state: (places, width), kern_exit_waiting
    int32_t width, loop, back;
} kern_exit_wait_args;
// Who goes through `loop`: of the generated rows with a slot those whose last token is not read before it by the rule
// of EXIT_READ, from the logits that their slots keep (ROW_END), or that go through all. Each takes all that wait for
// the loop along, and so becomes a row of `next` that ends where it ends, if anything waits. What has just gone through
// the loop before waits for this one first: what was taken along, or the row's own tokens that `begin` with loop 1.
// Its solves are added to the row's sum. Behind the last loop that is all there is to do.
typedef struct kern_exit_follow_args {
    kern_ptr next;                 // kern_rows that is followed
    kern_ptr waiting;              // state: kern_exit_waiting
    kern_ptr z;                    // optional state: the logits, z_stride floats a loop apart
    kern_ptr solves;               // optional kern_solve_sum, a token of the table that the loop before ran with
    kern_ptr sum;                  // with solves: kern_solve_sum (n_rows), from loop 1 on
    int32_t loop, loops, z_stride; // loop: 1 .. loops
    bool begin;                    // with loop 1
} kern_exit_follow_args;

// p of EXIT_READ, (loops, stride) each: p_r = s(z_r) S_{r-1}, the last S_{loops-1}.
typedef struct kern_exit_probability_args {
    kern_ptr z, p;
    int32_t loops, stride;
} kern_exit_probability_args;

// What a token's losses of all loops, L_r, cost together (Zhu et al. 2025, sections 3.3 and 3.4).
typedef enum kern_exit_objective {
    KERN_EXIT_WEIGHTED, // sum_r constant_r L_r
    KERN_EXIT_EXPECTED, // sum_r p_r L_r + entropy sum_r p_r (ln p_r - constant_r): constant_r is a prior's logarithm
    // The gate alone: sum_r BCE(1 - s(z_r), y_r) / loops, y = s(sharpness (max(0, gain) - margin)). By gain of the next
    // loop, L_r - L_{r+1} for r < loops; by that of the loop itself, L_{r-1} - L_r for r > 1.
    KERN_EXIT_NEXT,
    KERN_EXIT_PREVIOUS,
} kern_exit_objective;
typedef struct kern_exit_loss_args {
    kern_ptr losses;  // (loops, stride): L
    kern_ptr z;       // (loops, stride), not WEIGHTED
    kern_ptr entropy; // float[1], EXPECTED
    kern_ptr loss;    // (T): 0 without target
    kern_ptr dz;      // optional (loops, stride), with z: target_weight times the derivative at constant L
    int32_t loops, stride;
    int32_t objective; // kern_exit_objective
    float sharpness, margin;
    float constant[KERN_MAX_LOOPS];
} kern_exit_loss_args;

#include "kernels/head.h"
#include "kernels/optim.h"

// code, launcher name, argument struct, first member after the operands
#define KERN_OPS(X)                                                                            \
    X(EMBED, embed, kern_embed_args, width)                                                    \
    X(EMBED_BACKWARD, embed_backward, kern_embed_backward_args, width)                         \
    X(RMSNORM, rmsnorm, kern_rmsnorm_args, groups)                                             \
    X(RMSNORM_BACKWARD, rmsnorm_backward, kern_rmsnorm_backward_args, groups)                  \
    X(L2NORM, l2norm, kern_l2norm_args, groups)                                                \
    X(L2NORM_BACKWARD, l2norm_backward, kern_l2norm_backward_args, groups)                     \
    X(LINEAR, linear, kern_linear_args, cols)                                                  \
    X(LINEAR_BACKWARD_INPUT, linear_backward_input, kern_linear_backward_input_args, cols)     \
    X(LINEAR_BACKWARD_WEIGHT, linear_backward_weight, kern_linear_backward_weight_args, cols)  \
    X(BLOCK_LINEAR, block_linear, kern_block_linear_args, blocks)                              \
    X(BLOCK_LINEAR_BACKWARD, block_linear_backward, kern_block_linear_backward_args, blocks)   \
    X(SHORT_CONV, short_conv, kern_short_conv_args, channels)                                  \
    X(SHORT_CONV_BACKWARD, short_conv_backward, kern_short_conv_backward_args, channels)       \
    X(GATES, gates, kern_gates_args, gates)                                                    \
    X(GATES_BACKWARD, gates_backward, kern_gates_backward_args, gates)                         \
    X(MAXPLUS_GATES, maxplus_gates, kern_maxplus_gates_args, heads)                            \
    X(MAXPLUS_GATES_BACKWARD, maxplus_gates_backward, kern_maxplus_gates_backward_args, heads) \
    X(NORMALISE, normalise, kern_normalise_args, heads)                                        \
    X(NORMALISE_BACKWARD, normalise_backward, kern_normalise_backward_args, heads)             \
    X(RECURRENCE, recurrence, kern_recurrence_args, family)                                    \
    X(RECURRENCE_BACKWARD, recurrence_backward, kern_recurrence_backward_args, family)         \
    X(MESA, mesa, kern_mesa_args, mesa)                                                        \
    X(MESA_BACKWARD, mesa_backward, kern_mesa_backward_args, mesa)                             \
    X(ROPE, rope, kern_rope_args, heads)                                                       \
    X(ATTENTION, attention, kern_attention_args, attention)                                    \
    X(ATTENTION_BACKWARD, attention_backward, kern_attention_backward_args, attention)         \
    X(ACTIVATION, activation, kern_activation_args, width)                                     \
    X(ACTIVATION_BACKWARD, activation_backward, kern_activation_backward_args, width)          \
    X(GLU, glu, kern_glu_args, width)                                                          \
    X(GLU_BACKWARD, glu_backward, kern_glu_backward_args, width)                               \
    X(FEATURE_MAP, feature_map, kern_feature_map_args, groups)                                 \
    X(FEATURE_MAP_BACKWARD, feature_map_backward, kern_feature_map_backward_args, groups)      \
    X(RGLRU, rglru, kern_rglru_args, width)                                                    \
    X(RGLRU_BACKWARD, rglru_backward, kern_rglru_backward_args, width)                         \
    X(CLEAR, clear, kern_clear_args, width)                                                    \
    X(ADD, add, kern_add_args, width)                                                          \
    X(ROW_END, row_end, kern_row_end_args, width)                                              \
    X(EXIT_READ, exit_read, kern_exit_read_args, width)                                        \
    X(EXIT_WAIT, exit_wait, kern_exit_wait_args, width)                                        \
    X(EXIT_FOLLOW, exit_follow, kern_exit_follow_args, loop)                                   \
    X(EXIT_PROBABILITY, exit_probability, kern_exit_probability_args, loops)                   \
    X(EXIT_LOSS, exit_loss, kern_exit_loss_args, loops)                                        \
    X(HEAD_LOGITS, head_logits, kern_head_logits_args, width)                                  \
    X(HEAD_LOSS, head_loss, kern_head_loss_args, width)                                        \
    X(SAMPLE, sample, kern_sample_args, vocabulary)                                            \
    X(ADAMW, adamw, kern_adamw_args, count)                                                    \
    X(SQUARE_SUM, square_sum, kern_square_sum_args, count)                                     \
    X(CLIP_SCALE, clip_scale, kern_clip_scale_args, clip)

typedef enum kern_op {
#define KERN_OP_ENUM(code, name, args, first) KERN_OP_##code,
    KERN_OPS(KERN_OP_ENUM)
#undef KERN_OP_ENUM
        KERN_OP_COUNT
} kern_op;

const char *kern_op_name(kern_op op);

// Makes sure that the device's workspace suffices for this operation at these arguments (allocates; call before
// serving). Rows that merge may need more, which kern_rows_prepare sees to.
KERN_CHECKED kern_status kern_reserve(kern_device *device, kern_op op, const void *args);
// Runs one operation. args is the op's struct with device pointers as operands.
KERN_CHECKED kern_status kern_launch(kern_stream *stream, kern_op op, const kern_rows *rows, const void *args);

// ------------------------------------------------------------------------------------------------------------ plans

typedef enum kern_class {
    KERN_CLASS_NULL,    // an absent optional operand
    KERN_CLASS_PARAM,   // memory->param[index]: float * or kern_weight *
    KERN_CLASS_GRAD,    // memory->grad[index]
    KERN_CLASS_STATE,   // memory->state + offset: slot 0; a launcher adds slot * rows->slot_stride
    KERN_CLASS_PAGES,   // memory->pages
    KERN_CLASS_SAVED,   // memory->saved + offset: lives from forward to backward, and outputs
    KERN_CLASS_SCRATCH, // memory->scratch + offset
    KERN_CLASS_ROWS,    // memory->next
} kern_class;

// An operand of a planned operation. value: index for PARAM and GRAD, byte offset otherwise (multiples of 64).
static inline kern_ptr kern_ref(kern_class class_, uint64_t value) {
    kern_ptr p;
    p.ref = (uint64_t)class_ << 56 | value;
    return p;
}

typedef struct kern_memory {
    void *const *param;
    float *const *grad;
    void *state, *pages, *saved, *scratch;
    kern_rows *next; // the table that EXIT_FOLLOW fills
} kern_memory;

typedef struct kern_plan kern_plan;

KERN_CHECKED kern_status kern_plan_create(kern_device *device, kern_plan **out);
void kern_plan_free(kern_plan *plan);
// Appends an operation whose operands are references; the struct is copied. Refuses what the backend cannot run.
KERN_CHECKED kern_status kern_plan_add(kern_plan *plan, kern_op op, const void *args);
// Ends the building: reserves workspace; a backend may replace sub-sequences by fused entries here.
KERN_CHECKED kern_status kern_plan_seal(kern_plan *plan);
size_t kern_plan_length(const kern_plan *plan);
// Whether the device makes something (a graph) of a sealed plan when it first runs with a number of generated tokens, a
// power of two at a time. Who serves runs each once before.
bool kern_plan_is_captured(const kern_plan *plan);
// What memory->param and memory->grad point to must not change while a plan runs with the same memory.
KERN_CHECKED kern_status kern_plan_run(const kern_plan *plan, kern_stream *stream, const kern_rows *rows,
                                       const kern_memory *memory);
// Operations [first, end) of the plan alone, of a batch that has prompt rows: whoever runs the parts one after the
// other has run the plan, and may give the stream something else between two of them.
KERN_CHECKED kern_status kern_plan_run_part(const kern_plan *plan, kern_stream *stream, const kern_rows *rows,
                                            const kern_memory *memory, size_t first, size_t end);
// How many of the plan's operations there are up to the last that has this operand; 0: none has it. A gradient is final
// when so many have run.
size_t kern_plan_last_use(const kern_plan *plan, kern_ptr operand);

#include "kernels/profile.h"

// ---------------------------------------------------------------------------------------------------------- backend

// What a backend provides. The CPU's table is linked in; a CUDA module exports kern_module_v1 and nothing else.
typedef struct kern_backend kern_backend; // kernels/backend.h

#endif
