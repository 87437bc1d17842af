// SPDX-License-Identifier: Apache-2.0
// p-hop induction (Sanford et al. 2024, arXiv 2402.09268; as a test of loops Saunshi et al. 2025, arXiv 2502.17416).
//
// Over letters v: from place i a hop finds the last m < i with v_m = v_i and goes to m + 1. Random letters rarely have
// long chains, so the chain is drawn first: its letters (no two neighbours alike), then its places, at least three
// apart, whatever room is left over spread at random before and between. A letter that would end a hop too early is not
// drawn inside that hop.
#include "trainer/task.h"

#include <string.h>

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

// A hop from `place`; -1: there is none.
static int32_t hop_from(const int32_t *letter, int32_t place) {
    int32_t at = place - 1;
    while (at >= 0 && letter[at] != letter[place])
        at--;
    return at < 0 ? -1 : at + 1;
}

// The letter `hops` hops from `place`; -1: the chain ends before.
static int32_t follow(const int32_t *letter, int32_t place, int64_t hops) {
    for (int64_t i = 0; i < hops && place >= 0; i++)
        place = hop_from(letter, place);
    return place < 0 ? -1 : letter[place];
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

// -------------------------------------------------------------------------------------------------------------- floors

// The letter that `count` (letters) has most often, but not `banned` (-1: none).
static int32_t commonest(const int32_t *count, int32_t letters, int32_t banned) {
    int32_t best = banned == 0;
    for (int32_t i = best + 1; i < letters; i++)
        if (i != banned && count[i] > count[best])
            best = i;
    return best;
}

// What one layer can say where `place` has been reached: the letter there, the commonest letter before, and which other
// letter stands most often behind that one there.
static void guess(const int32_t *letter, int32_t place, int32_t letters, int32_t *count, int32_t answer[3]) {
    const int32_t own = letter[place];
    memset(count, 0, sizeof *count * (size_t)letters);
    for (int32_t i = 0; i < place; i++)
        count[letter[i]]++;
    answer[0] = own;
    answer[1] = commonest(count, letters, -1);
    memset(count, 0, sizeof *count * (size_t)letters);
    for (int32_t i = 0; i < place; i++)
        if (letter[i] == own)
            count[letter[i + 1]]++;
    answer[2] = commonest(count, letters, own);
}

void trn_hop_floors(const trn_task_settings *s, const trn_task_example *example, trn_floors *floors) {
    static const char *const group[] = {"best rule of at most 1 hop", "best rule of at most 2 hops"};
    const int32_t letters = letters_of(s), *letter = example->id + 1, end = (int32_t)s->length - 1;
    const int32_t wanted = example->target[end + 1];
    int32_t answer[3], place = end, rule = 0;
    trn_floors_try(floors, rule++, "chance", 1.0 / letters);
    for (int hops = 0; hops <= 2; hops++) {
        if (place >= 0)
            guess(letter, place, letters, example->scratch, answer);
        for (int most = hops > 1 ? 1 : 0; most < 2; most++)
            for (int i = 0; i < 3; i++)
                trn_floors_try(floors, rule++, group[most], place >= 0 && answer[i] == wanted);
        place = place >= 0 ? hop_from(letter, place) : -1;
    }
}
