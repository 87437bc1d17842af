// SPDX-License-Identifier: Apache-2.0
// What operations need at least; see profile.h.
//
// One function an operation's family, from its shapes and the row table alone, so that the same numbers hold for every
// device. Counts follow the mathematics in kernels.h; where a backward pass must make products again that it could have
// kept, they are not counted. Private to kernels/; looks at no operand but the weights' sizes.
#include "kernels/backend.h"

enum { WORD = 4 };

typedef struct needs {
    const kern_rows *rows;
    const void *args;
    double tokens;
    double part, steps; // of the weight; of a solve
} needs;

typedef kern_cost (*rule)(const needs *n);

// For each of `count` elements so many words and operations.
static kern_cost each(double count, double words, double operations) {
    return (kern_cost){.operations = operations * count, .bytes = WORD * words * count};
}

static double groups_of(int32_t groups) {
    return groups > 0 ? groups : 1;
}

static double is_there(kern_ptr operand) {
    return operand.p ? 1 : 0;
}

// ------------------------------------------------------------------------------------------------------------ products

static kern_cost cost_embed(const needs *n) {
    const kern_embed_args *a = n->args;
    return each(n->tokens * a->width, 2, 1);
}

static kern_cost cost_embed_backward(const needs *n) {
    const kern_embed_backward_args *a = n->args;
    return each(n->tokens * a->width, 3, 2);
}

static kern_cost cost_linear(const needs *n) {
    const kern_linear_args *a = n->args;
    const double vectors = n->tokens * groups_of(a->groups);
    const double words = vectors * (a->cols + a->rows * (1 + is_there(a->residual)));
    return (kern_cost){.operations = 2 * vectors * a->cols * a->rows,
                       .bytes = WORD * words + n->part * (double)kern_weight_bytes(a->weight.w)};
}

static kern_cost cost_linear_backward_input(const needs *n) {
    const kern_linear_backward_input_args *a = n->args;
    const double vectors = n->tokens * groups_of(a->groups), weights = (double)a->cols * a->rows;
    const double words = vectors * (a->rows + a->cols * (1 + (a->accumulate != 0))) + weights;
    return (kern_cost){.operations = 2 * vectors * weights, .bytes = WORD * words};
}

static kern_cost cost_linear_backward_weight(const needs *n) {
    const kern_linear_backward_weight_args *a = n->args;
    const double vectors = n->tokens * groups_of(a->groups), weights = (double)a->cols * a->rows;
    return (kern_cost){.operations = 2 * vectors * weights,
                       .bytes = WORD * (vectors * (a->rows + a->cols) + 2 * weights)};
}

static kern_cost cost_block_linear(const needs *n) {
    const kern_block_linear_args *a = n->args;
    const double width = (double)a->blocks * a->width;
    return (kern_cost){.operations = 2 * n->tokens * width * a->width,
                       .bytes = WORD * 2 * n->tokens * width + (double)kern_weight_bytes(a->weight.w)};
}

static kern_cost cost_block_linear_backward(const needs *n) {
    const kern_block_linear_backward_args *a = n->args;
    const double width = (double)a->blocks * a->width;
    return (kern_cost){.operations = 4 * n->tokens * width * a->width,
                       .bytes = WORD * (n->tokens * width * (3 + (a->accumulate != 0)) + 3 * width * a->width)};
}

static kern_cost cost_head_logits(const needs *n) {
    const kern_head_logits_args *a = n->args;
    const double rows = n->rows->n_logits;
    return (kern_cost){.operations = 2 * rows * a->width * a->vocabulary,
                       .bytes =
                           WORD * rows * ((double)a->width + a->vocabulary) + (double)kern_weight_bytes(a->weight.w)};
}

// Tokens without a target need nothing.
static kern_cost cost_head_loss(const needs *n) {
    const kern_head_loss_args *a = n->args;
    const double passes = a->dx.p ? 3 : 1, weights = (double)a->width * a->vocabulary;
    double targets = 0;
    for (int32_t t = 0; t < n->rows->n_tokens; t++)
        targets += n->rows->target[t] >= 0;
    const double teacher = a->teacher_x.p ? a->teacher_width : 0, teacher_weights = teacher * a->vocabulary;
    return (kern_cost){
        .operations = 2 * targets * (passes * weights + teacher_weights),
        .bytes = WORD * (targets * (a->width * (a->dx.p ? 2 : 1) + teacher) + passes * weights + teacher_weights)};
}

static kern_cost cost_sample(const needs *n) {
    const kern_sample_args *a = n->args;
    return each((double)n->rows->n_logits * a->vocabulary, 1, 2);
}

// -------------------------------------------------------------------------------------------------- element by element

static kern_cost cost_rmsnorm(const needs *n) {
    const kern_rmsnorm_args *a = n->args;
    return each(n->tokens * a->groups * a->width, 2 + is_there(a->gate), 4 + 3 * is_there(a->gate));
}

static kern_cost cost_rmsnorm_backward(const needs *n) {
    const kern_rmsnorm_backward_args *a = n->args;
    const double words = 3 + is_there(a->gate) + is_there(a->dgate) + (a->accumulate != 0);
    return each(n->tokens * a->groups * a->width, words, 9 + 6 * is_there(a->gate));
}

static kern_cost cost_l2norm(const needs *n) {
    const kern_l2norm_args *a = n->args;
    return each(n->tokens * a->groups * a->width, 2, 3);
}

static kern_cost cost_l2norm_backward(const needs *n) {
    const kern_l2norm_backward_args *a = n->args;
    return each(n->tokens * a->groups * a->width, 3, 7);
}

static kern_cost cost_short_conv(const needs *n) {
    const kern_short_conv_args *a = n->args;
    return each(n->tokens * a->channels, 2, 2.0 * a->taps + 2);
}

static kern_cost cost_short_conv_backward(const needs *n) {
    const kern_short_conv_backward_args *a = n->args;
    return each(n->tokens * a->channels, 3, 4.0 * a->taps + 4);
}

static kern_cost cost_gates(const needs *n) {
    const kern_gates *g = &((const kern_gates_args *)n->args)->gates;
    return each(n->tokens * g->heads, 2.0 * (g->channels + 1), 6.0 * (g->channels + 1));
}

static kern_cost cost_gates_backward(const needs *n) {
    const kern_gates *g = &((const kern_gates_backward_args *)n->args)->gates;
    return each(n->tokens * g->heads, 3.0 * (g->channels + 1), 8.0 * (g->channels + 1));
}

static kern_cost cost_maxplus_gates(const needs *n) {
    return each(n->tokens * ((const kern_maxplus_gates_args *)n->args)->heads, 5, 8);
}

static kern_cost cost_maxplus_gates_backward(const needs *n) {
    return each(n->tokens * ((const kern_maxplus_gates_backward_args *)n->args)->heads, 7, 8);
}

static kern_cost cost_normalise(const needs *n) {
    const kern_normalise_args *a = n->args;
    return each(n->tokens * a->heads, 2.0 * a->value_width + 1 + is_there(a->m), a->value_width + 3);
}

static kern_cost cost_normalise_backward(const needs *n) {
    const kern_normalise_backward_args *a = n->args;
    return each(n->tokens * a->heads, 3.0 * a->value_width + 2 + is_there(a->m), 4.0 * a->value_width + 6);
}

static kern_cost cost_rope(const needs *n) {
    const kern_rope_args *a = n->args;
    return each(n->tokens * a->heads * a->rotary, 2, 3);
}

static kern_cost cost_activation(const needs *n) {
    return each(n->tokens * ((const kern_activation_args *)n->args)->width, 2, 4);
}

static kern_cost cost_activation_backward(const needs *n) {
    return each(n->tokens * ((const kern_activation_backward_args *)n->args)->width, 3, 6);
}

static kern_cost cost_glu(const needs *n) {
    return each(n->tokens * ((const kern_glu_args *)n->args)->width, 3, 5);
}

static kern_cost cost_glu_backward(const needs *n) {
    return each(n->tokens * ((const kern_glu_backward_args *)n->args)->width, 5, 9);
}

static kern_cost cost_feature_map(const needs *n) {
    const kern_feature_map_args *a = n->args;
    const double out = kern_feature_width(a->feature, a->width);
    return each(n->tokens * a->groups, a->width + out, 4 * out);
}

static kern_cost cost_feature_map_backward(const needs *n) {
    const kern_feature_map_backward_args *a = n->args;
    const double out = kern_feature_width(a->feature, a->width);
    return each(n->tokens * a->groups, 2.0 * a->width + out, 6 * out);
}

static kern_cost cost_clear(const needs *n) {
    return each(n->tokens * ((const kern_clear_args *)n->args)->width, 1, 0);
}

static kern_cost cost_add(const needs *n) {
    return each(n->tokens * ((const kern_add_args *)n->args)->width, 3, 1);
}

// --------------------------------------------------------------------------------------------------------- recurrences

// Rows that go on in a slot read their state and write it back.
static double states_moved(const kern_rows *rows) {
    double states = 0;
    for (int32_t r = 0; r < rows->n_rows; r++)
        states += rows->row[r].slot >= 0 ? 2 : 0;
    return states;
}

static double heads_or(int32_t heads, int32_t own) {
    return heads > 0 ? heads : own;
}

// Words of q, k, v, gates and o of a token.
static double recurrence_words(const kern_recurrence *f, double readers) {
    const double decay = f->decay == KERN_DECAY_SCALAR ? 1 : f->decay == KERN_DECAY_CHANNEL ? f->key_width : 0;
    return (heads_or(f->query_heads, f->heads) + heads_or(f->key_heads, f->heads)) * f->key_width +
           heads_or(f->value_heads, f->heads) * f->value_width + f->heads * (decay + (f->weighted != 0)) +
           readers * (f->value_width + f->unit_column);
}

static double readers_of(const kern_recurrence *f) {
    return heads_or(f->query_heads > f->heads ? f->query_heads : 0, f->heads);
}

// Decay, rank-one update, the delta rule's product and the reads, of a token.
static double recurrence_operations(const kern_recurrence *f) {
    const double state = (double)f->key_width * (f->value_width + f->unit_column);
    const double a_state = 2 + (f->decay != KERN_DECAY_NONE) + (f->update == KERN_UPDATE_DELTA ? 2 : 0);
    return state * (f->heads * a_state + 2 * readers_of(f));
}

static kern_cost cost_recurrence(const needs *n) {
    const kern_recurrence_args *a = n->args;
    const kern_recurrence *f = &a->family;
    const double state = (double)f->heads * f->key_width * (f->value_width + f->unit_column);
    const double word = f->storage == KERN_STORE_BF16 ? 2 : WORD;
    return (kern_cost){.operations = n->tokens * recurrence_operations(f),
                       .bytes = WORD * n->tokens * recurrence_words(f, readers_of(f)) +
                                word * state * states_moved(n->rows) +
                                WORD * is_there(a->snapshots) * n->rows->n_chunks * state};
}

static kern_cost cost_recurrence_backward(const needs *n) {
    const kern_recurrence *f = &((const kern_recurrence_backward_args *)n->args)->family;
    const double state = (double)f->heads * f->key_width * (f->value_width + f->unit_column);
    return (kern_cost){.operations = 2 * n->tokens * recurrence_operations(f),
                       .bytes =
                           WORD * (2 * n->tokens * recurrence_words(f, readers_of(f)) + n->rows->n_chunks * state)};
}

static double mesa_words(const kern_mesa *m) {
    return m->heads * (2.0 * m->key_width + 2.0 * m->value_width + 2);
}

// Two updates with their decay and the read-out; a product with Hk for the start of a solve and one a step.
static kern_cost cost_mesa(const needs *n) {
    const kern_mesa_args *a = n->args;
    const kern_mesa *m = &a->mesa;
    const double keys = (double)m->key_width * m->key_width, values = (double)m->key_width * m->value_width;
    const double state = m->heads * (keys + values);
    const double operations = m->heads * (3 * (keys + values) + 2 * values + 2 * keys * (n->steps + 1));
    const double stored = m->storage == KERN_STORE_BF16 ? m->heads * (2 * keys + 2 * values) : WORD * state;
    const double kept = is_there(a->x) * n->tokens * m->heads * m->key_width;
    return (kern_cost){.operations = n->tokens * operations,
                       .bytes = WORD * (n->tokens * mesa_words(m) + kept) + stored * states_moved(n->rows) +
                                WORD * is_there(a->snapshots) * n->rows->n_chunks * state};
}

static kern_cost cost_mesa_backward(const needs *n) {
    const kern_mesa *m = &((const kern_mesa_backward_args *)n->args)->mesa;
    const double keys = (double)m->key_width * m->key_width, values = (double)m->key_width * m->value_width;
    const double operations = m->heads * (2 * (3 * (keys + values) + 2 * values) + 2 * keys * (n->steps + 1));
    const double words = 2 * mesa_words(m) + m->heads * m->key_width;
    return (kern_cost){.operations = n->tokens * operations,
                       .bytes = WORD * (n->tokens * words + n->rows->n_chunks * m->heads * (keys + values))};
}

static kern_cost cost_rglru(const needs *n) {
    return each(n->tokens * ((const kern_rglru_args *)n->args)->width, 4, 12);
}

static kern_cost cost_rglru_backward(const needs *n) {
    return each(n->tokens * ((const kern_rglru_backward_args *)n->args)->width, 8, 30);
}

// Keys that the tokens look at, all together.
static double keys_seen(const kern_rows *rows, int32_t window) {
    double keys = 0;
    for (int32_t t = 0; t < rows->n_tokens; t++) {
        const double all = (double)rows->token_position[t] + 1;
        keys += window > 0 && all > window ? window : all;
    }
    return keys;
}

// Keys and values before the batch, which a row reads once.
static double keys_before(const kern_rows *rows, int32_t window) {
    double keys = 0;
    for (int32_t r = 0; r < rows->n_rows; r++) {
        const double before = rows->row[r].slot >= 0 ? (double)rows->row[r].position : 0;
        keys += window > 0 && before > window ? window : before;
    }
    return keys;
}

static kern_cost cost_attention(const needs *n) {
    const kern_attention *f = &((const kern_attention_args *)n->args)->attention;
    const double words =
        n->tokens * 2 * ((double)f->heads + f->kv_heads) + 2 * keys_before(n->rows, f->window) * f->kv_heads;
    return (kern_cost){.operations = 4.0 * f->heads * f->head_width * keys_seen(n->rows, f->window),
                       .bytes = WORD * words * f->head_width};
}

// Scores again, and four products of gradients.
static kern_cost cost_attention_backward(const needs *n) {
    const kern_attention *f = &((const kern_attention_backward_args *)n->args)->attention;
    return (kern_cost){.operations = 10.0 * f->heads * f->head_width * keys_seen(n->rows, f->window),
                       .bytes = WORD * n->tokens * 4 * ((double)f->heads + f->kv_heads) * f->head_width};
}

// ---------------------------------------------------------------------------------------------------- loops, optimizer

static kern_cost cost_row_end(const needs *n) {
    const kern_row_end_args *a = n->args;
    return each((double)n->rows->n_rows * a->width * a->planes, 2, 0);
}

static kern_cost cost_exit_read(const needs *n) {
    const kern_exit_read_args *a = n->args;
    return each(n->tokens, 2.0 * a->width + is_there(a->z) * a->loops, 4.0 * a->loops);
}

static kern_cost cost_exit_wait(const needs *n) {
    return each(n->tokens * ((const kern_exit_wait_args *)n->args)->width, 2, 0);
}

// What stands in the tables.
static kern_cost cost_exit_follow(const needs *n) {
    const double words = 2.0 * sizeof(kern_row) / sizeof(float) + 2;
    return each(n->rows->n_rows, words, 4.0 * ((const kern_exit_follow_args *)n->args)->loops);
}

static kern_cost cost_exit_probability(const needs *n) {
    return each(n->tokens * ((const kern_exit_probability_args *)n->args)->loops, 2, 4);
}

static kern_cost cost_exit_loss(const needs *n) {
    return each(n->tokens * ((const kern_exit_loss_args *)n->args)->loops, 3, 10);
}

static kern_cost cost_adamw(const needs *n) {
    const kern_adamw_args *a = n->args;
    return each((double)a->count, a->rounding == KERN_ROUND_COMPENSATED ? 9 : 7, 15);
}

static kern_cost cost_square_sum(const needs *n) {
    return each((double)((const kern_square_sum_args *)n->args)->count, 1, 2);
}

static kern_cost cost_clip_scale(const needs *n) {
    (void)n;
    return (kern_cost){0};
}

// --------------------------------------------------------------------------------------------------------------- table

static const rule rules[KERN_OP_COUNT] = {
#define RULE(code, name, args, first) [KERN_OP_##code] = cost_##name,
    KERN_OPS(RULE)
#undef RULE
};

kern_cost kern_op_cost(kern_op op, const kern_rows *rows, const void *args, double part, double solver_steps) {
    const needs n = {
        .rows = rows, .args = args, .tokens = rows ? rows->n_tokens : 0, .part = part, .steps = solver_steps};
    return rules[op](&n);
}
