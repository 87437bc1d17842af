// SPDX-License-Identifier: Apache-2.0
// p-hop induction (Sanford et al. 2024, arXiv 2402.09268; as a test of loops Saunshi et al. 2025, arXiv 2502.17416).
//
// Over letters v: from place i a hop finds the last m < i with v_m = v_i and goes to m + 1. Random letters rarely have
// long chains, so the chain is drawn first: its letters (no two neighbours alike), then its places, at least three
// apart, whatever room is left over spread at random before and between. A letter that would end a hop too early is not
// drawn inside that hop.
#include "trainer/task.h"

enum { LEAST_HOP = 3 };

static int32_t letters_of(const trn_task_settings *s) {
    return (int32_t)s->vocab - s->levels;
}

eng_status trn_hop_check(trn_task_settings *s, eng_error *error) {
    eng_status status = trn_task_read_levels(s, "hops", s->hops, error);
    for (int i = 0; status == ENG_OK && i < s->levels; i++)
        if (LEAST_HOP * s->level[i] + 2 > s->length)
            return eng_fail(error, ENG_INVALID, "--length: %lld hops need %lld letters", (long long)s->level[i],
                            LEAST_HOP * (long long)s->level[i] + 2);
    if (status == ENG_OK && letters_of(s) < 3)
        return eng_fail(error, ENG_INVALID, "--vocab: %lld ids less %d marks leave fewer than 3 letters",
                        (long long)s->vocab, s->levels);
    return status;
}

static int32_t draw_but(trn_draw *draw, int32_t letters, int32_t banned) {
    int32_t letter = (int32_t)trn_draw_below(draw, (uint32_t)letters - 1);
    return letter + (letter >= banned);
}

// The letter `hops` hops from `place`; -1: the chain ends before.
static int32_t follow(const int32_t *letter, int32_t place, int64_t hops) {
    for (int64_t i = 0; i < hops; i++) {
        int32_t at = place - 1;
        while (at >= 0 && letter[at] != letter[place])
            at--;
        if (at < 0)
            return -1;
        place = at + 1;
    }
    return letter[place];
}

// jump[k]: from the k-th place of the chain to the next one before it.
static void draw_jumps(int32_t length, int32_t hops, trn_draw *draw, int32_t *jump) {
    const int32_t room = length - 2 - LEAST_HOP * hops, before = (int32_t)trn_draw_below(draw, (uint32_t)room + 1);
    for (int32_t k = 0; k < hops; k++)
        jump[k] = LEAST_HOP;
    for (int32_t i = before; i < room; i++)
        jump[trn_draw_below(draw, (uint32_t)hops)]++;
}

static void draw_letters(int32_t letters, int32_t length, int32_t hops, const int32_t *jump, trn_draw *draw,
                         int32_t *letter) {
    int32_t place = length - 1, own = (int32_t)trn_draw_below(draw, (uint32_t)letters);
    letter[place] = own;
    for (int32_t k = 0; k < hops; k++) {
        const int32_t next = place - jump[k], last = k > 0 ? place - 2 : place - 1; // the pair before ends at place - 1
        for (int32_t i = next + 1; i <= last; i++)
            letter[i] = draw_but(draw, letters, own);
        letter[next - 1] = own;
        own = draw_but(draw, letters, own);
        letter[next] = own;
        place = next;
    }
    for (int32_t i = 0; i < place - 1; i++)
        letter[i] = (int32_t)trn_draw_below(draw, (uint32_t)letters);
}

void trn_hop_generate(const trn_task_settings *s, int64_t level, bool training, trn_draw *draw,
                      trn_task_example *example) {
    const int32_t length = (int32_t)s->length, hops = (int32_t)level, letters = letters_of(s);
    int32_t *letter = example->id + 1, *jump = example->scratch, mark = 0;
    while (s->level[mark] != level)
        mark++;
    draw_jumps(length, hops, draw, jump);
    draw_letters(letters, length, hops, jump, draw, letter);
    example->length = length + 1;
    example->id[0] = letters + mark;
    example->target[0] = -1;
    for (int32_t i = 0; i < length; i++) {
        const bool asked = i == length - 1 || (training && s->train_every_letter);
        example->target[i + 1] = asked ? follow(letter, i, level) : -1;
    }
}
