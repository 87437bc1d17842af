// SPDX-License-Identifier: Apache-2.0
// Mano (Allen-Zhu 2025, PhysicsLM4; as a test of loops in Zhu et al. 2025, arXiv 2510.25741): nested arithmetic modulo
// a prime, in the head.
//
// An expression of l operations is one of + - * over two expressions with l - 1 operations between them, shared out at
// random; of none, a value. Written in prefix order behind a beginning and its length, then a mark to answer at. Ids:
// values, three operators, beginning, mark, lengths. One id a meaning, where the public code draws between two.
#include "trainer/task.h"

enum { OPERATORS = 3, MARKS = 2 };

typedef struct expression {
    int64_t modulus;
    trn_draw *draw;
    trn_task_example *example;
} expression;

eng_status trn_mano_check(trn_task_settings *s, eng_error *error) {
    (void)error;
    s->vocab = s->modulus + OPERATORS + MARKS + s->operations;
    return ENG_OK;
}

static void put(trn_task_example *example, int64_t id) {
    example->target[example->length] = -1;
    example->id[example->length++] = (int32_t)id;
}

// Its value. As deep as it has operations, at most.
static int64_t write_expression(const expression *e, int64_t operations) {
    if (operations == 0) {
        const int64_t value = trn_draw_below(e->draw, (uint32_t)e->modulus);
        put(e->example, value);
        return value;
    }
    const uint32_t kind = trn_draw_below(e->draw, OPERATORS);
    const int64_t left = trn_draw_below(e->draw, (uint32_t)operations);
    put(e->example, e->modulus + kind);
    const int64_t a = write_expression(e, left), b = write_expression(e, operations - 1 - left);
    return (kind == 0 ? a + b : kind == 1 ? a - b + e->modulus : a * b) % e->modulus;
}

void trn_mano_generate(const trn_task_settings *s, int64_t level, bool training, trn_draw *draw,
                       trn_task_example *example) {
    (void)level;
    const int64_t most = s->operations, beginning = s->modulus + OPERATORS;
    const int64_t operations = training ? 1 + trn_draw_below(draw, (uint32_t)most) : most;
    example->length = 0;
    put(example, beginning);
    put(example, beginning + MARKS + operations - 1);
    const int64_t value = write_expression(&(expression){s->modulus, draw, example}, operations);
    put(example, beginning + 1);
    if (training && !s->train_answers_only)
        for (int32_t i = 0; i + 1 < example->length; i++)
            example->target[i] = example->id[i + 1];
    example->target[example->length - 1] = (int32_t)value;
}
