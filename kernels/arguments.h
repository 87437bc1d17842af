// SPDX-License-Identifier: Apache-2.0
// Checks of arguments that are the same on every backend; what only one of them cannot do it says itself. Operands may
// still be references, so only whether they are there is looked at. Private to kernels/.
#ifndef KERNELS_ARGUMENTS_H
#define KERNELS_ARGUMENTS_H

#include <math.h>

#include "kernels/kernels.h"

static inline bool kern_activation_is_valid(int32_t activation) {
    return activation >= 0 && activation < KERN_ACTIVATIONS;
}

// Whether an operand is there exactly when it is wanted.
static inline bool kern_operand_is(kern_ptr operand, bool wanted) {
    return (operand.ref != 0) == wanted;
}

// ------------------------------------------------------------------------------------------------------------- exits

static inline kern_status kern_exit_read_check(const kern_exit_read_args *a) {
    const bool sizes = a->width >= 1 && a->loops >= 1 && a->stride >= 1;
    return sizes && a->x.ref && a->y.ref && a->loop.ref && a->y.ref != a->x.ref ? KERN_OK : KERN_INVALID;
}

static inline kern_status kern_exit_wait_check(const kern_exit_wait_args *a) {
    const bool sizes = a->width >= 1 && a->loop >= 1 && a->loop < KERN_MAX_LOOPS;
    return sizes && a->x.ref && a->list.ref && a->waiting.ref ? KERN_OK : KERN_INVALID;
}

static inline kern_status kern_exit_follow_check(const kern_exit_follow_args *a) {
    const bool sizes = a->loop >= 1 && a->loop <= a->loops && a->loops <= KERN_MAX_LOOPS &&
                       (!a->z.ref || a->z_stride >= 1) && (a->loop == 1 || !a->begin);
    return sizes && a->next.ref && a->waiting.ref && kern_operand_is(a->sum, a->solves.ref != 0) ? KERN_OK
                                                                                                 : KERN_INVALID;
}

static inline kern_status kern_row_end_check(const kern_row_end_args *a) {
    const bool sizes = a->width >= 1 && a->planes >= 1 && a->stride >= 1 && a->state_stride >= a->width;
    return sizes && a->x.ref && a->state.ref ? KERN_OK : KERN_INVALID;
}

static inline bool kern_exit_planes_are_valid(int32_t loops, int32_t stride) {
    return loops >= 1 && loops <= KERN_MAX_LOOPS && stride >= 1;
}

static inline kern_status kern_exit_probability_check(const kern_exit_probability_args *a) {
    return kern_exit_planes_are_valid(a->loops, a->stride) && a->z.ref && a->p.ref ? KERN_OK : KERN_INVALID;
}

static inline kern_status kern_exit_loss_check(const kern_exit_loss_args *a) {
    const bool known = a->objective >= KERN_EXIT_WEIGHTED && a->objective <= KERN_EXIT_PREVIOUS;
    const bool operands = a->losses.ref && a->loss.ref && kern_operand_is(a->z, a->objective != KERN_EXIT_WEIGHTED) &&
                          kern_operand_is(a->entropy, a->objective == KERN_EXIT_EXPECTED) && (a->z.ref || !a->dz.ref);
    return kern_exit_planes_are_valid(a->loops, a->stride) && known && operands ? KERN_OK : KERN_INVALID;
}

// -------------------------------------------------------------------------------------------------------------- head

static inline kern_status kern_head_loss_check(const kern_head_loss_args *a) {
    const bool taught = a->teacher_x.ref != 0;
    const bool sizes = a->width >= 1 && a->vocabulary >= 1 && a->tile_tokens >= 1 && a->soft_cap >= 0;
    const bool operands = a->x.ref && a->weight.ref && a->loss.ref && a->tile.ref && (a->dx.ref || !a->grad_weight.ref);
    const bool teacher = kern_operand_is(a->teacher_weight, taught) && kern_operand_is(a->divergence, taught) &&
                         kern_operand_is(a->teacher_tile, taught);
    const bool numbers = !taught || (a->teacher_width >= 1 && a->teacher_soft_cap >= 0 && a->temperature > 0 &&
                                     isfinite(a->temperature) && a->loss_share >= 0 && a->divergence_share >= 0);
    return sizes && operands && teacher && numbers ? KERN_OK : KERN_INVALID;
}

// ------------------------------------------------------------------------------------------------------------- gates

static inline kern_status kern_decay_law_check(const kern_gates *f) {
    switch (f->decay_law) {
    case KERN_DECAY_LAW_NONE:
    case KERN_DECAY_LAW_EXPONENTIAL:
        return KERN_OK;
    case KERN_DECAY_LAW_SIGMOID:
        if (!(f->divisor > 0) || !(f->clamp_min <= 0) || !(f->gamma_cap > 0 && f->gamma_cap <= 1))
            return KERN_INVALID;
        if (f->gamma_cap < 1 && (f->channels != 1 || f->write_law != KERN_WRITE_LAW_SIGMOID || f->write_factor != 1))
            return KERN_INVALID;
        return f->gamma_cap < 0.5f ? KERN_UNSUPPORTED : KERN_OK;
    case KERN_DECAY_LAW_BOUNDED:
        return f->lower_bound < 0 && isfinite(f->lower_bound) ? KERN_OK : KERN_INVALID;
    case KERN_DECAY_LAW_STEP:
        return f->channels == 1 && f->step_min >= 0 && f->step_max >= f->step_min ? KERN_OK : KERN_INVALID;
    default:
        return KERN_INVALID;
    }
}

static inline kern_status kern_gates_check(const kern_gates *f) {
    if (f->heads < 1 || f->channels < 1 || f->write_law < KERN_WRITE_LAW_NONE || f->write_law > KERN_WRITE_LAW_STEP)
        return KERN_INVALID;
    if (f->decay_law == KERN_DECAY_LAW_NONE && f->write_law == KERN_WRITE_LAW_NONE)
        return KERN_INVALID;
    if (f->write_law == KERN_WRITE_LAW_STEP && f->decay_law != KERN_DECAY_LAW_STEP)
        return KERN_INVALID;
    const bool factor = f->write_law == KERN_WRITE_LAW_SIGMOID || f->write_law == KERN_WRITE_LAW_CONSTANT;
    return factor && !isfinite(f->write_factor) ? KERN_INVALID : kern_decay_law_check(f);
}

// Which operands the laws need: a with g, b, beta, A_log with dt_bias.
typedef struct kern_gates_operands {
    bool decay, b, beta, parameters;
} kern_gates_operands;

static inline kern_gates_operands kern_gates_operands_of(const kern_gates *f) {
    kern_gates_operands needs;
    needs.decay = f->decay_law != KERN_DECAY_LAW_NONE;
    needs.b = f->write_law == KERN_WRITE_LAW_SIGMOID;
    needs.beta = f->write_law != KERN_WRITE_LAW_NONE;
    needs.parameters = f->decay_law == KERN_DECAY_LAW_EXPONENTIAL || f->decay_law == KERN_DECAY_LAW_BOUNDED ||
                       f->decay_law == KERN_DECAY_LAW_STEP;
    return needs;
}

static inline kern_status kern_gates_args_check(const kern_gates_args *a) {
    const kern_status status = kern_gates_check(&a->gates);
    if (status != KERN_OK)
        return status;
    const kern_gates_operands needs = kern_gates_operands_of(&a->gates);
    const bool complete = kern_operand_is(a->a, needs.decay) && kern_operand_is(a->g, needs.decay) &&
                          kern_operand_is(a->b, needs.b) && kern_operand_is(a->beta, needs.beta) &&
                          kern_operand_is(a->A_log, needs.parameters) && kern_operand_is(a->dt_bias, needs.parameters);
    return complete ? KERN_OK : KERN_INVALID;
}

static inline kern_status kern_gates_backward_args_check(const kern_gates_backward_args *a) {
    const kern_status status = kern_gates_check(&a->gates);
    if (status != KERN_OK)
        return status;
    const kern_gates_operands has = kern_gates_operands_of(&a->gates);
    const bool trained_write = has.b || a->gates.write_law == KERN_WRITE_LAW_STEP;
    const bool complete =
        kern_operand_is(a->a, has.decay) && kern_operand_is(a->dg, has.decay) && kern_operand_is(a->da, has.decay) &&
        kern_operand_is(a->b, has.b) && kern_operand_is(a->db, has.b) && (!trained_write || a->dbeta.ref) &&
        kern_operand_is(a->A_log, has.parameters) && kern_operand_is(a->dt_bias, has.parameters) &&
        kern_operand_is(a->grad_A_log, has.parameters) && kern_operand_is(a->grad_dt_bias, has.parameters);
    return complete ? KERN_OK : KERN_INVALID;
}

// ------------------------------------------------------------------------------------------------ recurrence and Mesa

// a is divided into groups of b's, or the other way round.
static inline bool kern_heads_divide(int32_t a, int32_t b) {
    return a > b ? a % b == 0 : b % a == 0;
}

// g, beta, skip: whether these operands are there. A key or value wider than most_width is KERN_UNSUPPORTED.
static inline kern_status kern_recurrence_check(const kern_recurrence *f, int32_t most_width, bool g, bool beta,
                                                bool skip) {
    if (f->heads < 1 || f->query_heads < 0 || f->key_heads < 0 || f->value_heads < 0 || f->key_width < 1 ||
        f->value_width < 1 || f->key_heads > f->heads || f->value_heads > f->heads)
        return KERN_INVALID;
    if ((f->query_heads && !kern_heads_divide(f->query_heads, f->heads)) || (f->key_heads && f->heads % f->key_heads) ||
        (f->value_heads && f->heads % f->value_heads))
        return KERN_INVALID;
    if (f->decay < KERN_DECAY_NONE || f->decay > KERN_DECAY_CHANNEL || f->update < KERN_UPDATE_ADD ||
        f->update > KERN_UPDATE_DELTA || f->storage < KERN_STORE_F32 || f->storage > KERN_STORE_BF16 ||
        (f->skip_width != 0 && f->skip_width != 1 && f->skip_width != f->value_width))
        return KERN_INVALID;
    if (f->key_width > most_width || f->value_width > most_width)
        return KERN_UNSUPPORTED;
    if ((f->decay != KERN_DECAY_NONE) != g || (f->weighted != 0) != beta || (f->skip_width != 0) != skip)
        return KERN_INVALID;
    return KERN_OK;
}

static inline kern_status kern_mesa_check(const kern_mesa *mesa, int32_t most_key_width, int32_t most_value_width) {
    if (mesa->heads < 1 || mesa->key_width < 1 || mesa->value_width < 1 || !(mesa->lambda_bound >= 0))
        return KERN_INVALID;
    if (mesa->storage < KERN_STORE_F32 || mesa->storage > KERN_STORE_BF16)
        return KERN_INVALID;
    return mesa->key_width > most_key_width || mesa->value_width > most_value_width ? KERN_UNSUPPORTED : KERN_OK;
}

// --------------------------------------------------------------------------------------------------------- attention

static inline kern_status kern_attention_args_check(const kern_attention_args *a) {
    const kern_attention *s = &a->attention;
    if (s->heads < 1 || s->kv_heads < 1 || s->heads % s->kv_heads != 0 || s->head_width < 1 || s->window < 0 ||
        !isfinite(s->scale) || a->page_offset < 0)
        return KERN_INVALID;
    if (!a->q.ref || !a->k.ref || !a->v.ref || !a->o.ref || (s->window > 0 && a->pages.ref) ||
        (s->window == 0 && a->ring.ref))
        return KERN_INVALID;
    return KERN_OK;
}

#endif
