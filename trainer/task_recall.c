// SPDX-License-Identifier: Apache-2.0
// Recall tasks of the mechanistic design suite (Poli et al. 2024, arXiv 2403.17844): in context, noisy, fuzzy.
//
// The vocabulary is keys, values, noise, then the marks that a task needs. Pairs of random keys follow each other; a
// key keeps the value that it first came with, and a pair whose key stood before is a question: its value is scored.
// A last pair repeats one of the keys for certain. With single queries only that one is scored, behind a mark.
// As in the public code a training example has every next id as a target, and a scored example the answers alone.
#include <string.h>

#include "trainer/task.h"

// ids[i + 1] is the target of ids[i], where it counts. Until here target[i] tells whether ids[i] is an answer.
static void shift(trn_task_example *example, bool all) {
    int32_t last = example->length - 1;
    for (int32_t i = 0; i < last; i++)
        example->target[i] = all || example->target[i + 1] ? example->id[i + 1] : -1;
    example->length = last;
}

static void put(trn_task_example *example, int32_t id, bool answer) {
    example->id[example->length] = id;
    example->target[example->length++] = answer;
}

static bool draws_noise(const trn_task_settings *s, trn_draw *draw) {
    return s->noise_fraction > 0 && trn_draw_unit(draw) < s->noise_fraction;
}

static void put_noise(const trn_task_settings *s, int32_t first, int32_t count, trn_draw *draw,
                      trn_task_example *example) {
    for (int32_t i = 0; i < count; i++)
        put(example, first + (int32_t)trn_draw_below(draw, (uint32_t)s->noise_vocab), false);
}

static eng_status check_noise(const trn_task_settings *s, eng_error *error) {
    if (s->noise_fraction > 0 && s->noise_vocab < 1)
        return eng_fail(error, ENG_INVALID, "--noise-vocab: noise needs at least one id");
    return ENG_OK;
}

// ---------------------------------------------------------------------------------------------------- single tokens

// Ids that are keys and values.
static int32_t plain_ids(const trn_task_settings *s) {
    return (int32_t)(s->vocab - s->noise_vocab - (s->single_query ? 1 : 0));
}

eng_status trn_recall_check(trn_task_settings *s, eng_error *error) {
    if (s->length % 2 != 0 || s->length < 4)
        return eng_fail(error, ENG_INVALID, "--length: %lld is odd or below 4", (long long)s->length);
    if (plain_ids(s) < 2)
        return eng_fail(error, ENG_INVALID, "--vocab: %lld ids leave no key and value beside noise and mark",
                        (long long)s->vocab);
    return check_noise(s, error);
}

void trn_recall_generate(const trn_task_settings *s, int64_t level, bool training, trn_draw *draw,
                         trn_task_example *example) {
    (void)level;
    int32_t plain = plain_ids(s), keys = plain / 2, pairs = (int32_t)s->length / 2 - 1, shown = 0;
    int32_t *value = example->scratch, *presented = value + keys;
    int32_t certain = (int32_t)trn_draw_below(draw, (uint32_t)pairs); // one pair at least is no noise
    memset(value, 0xff, sizeof *value * (size_t)keys);
    example->length = 0;
    for (int32_t i = 0; i < pairs; i++) {
        if (i != certain && draws_noise(s, draw)) {
            put_noise(s, plain, 2, draw, example);
            continue;
        }
        int32_t key = (int32_t)trn_draw_below(draw, (uint32_t)keys);
        bool known = value[key] >= 0;
        if (!known) {
            value[key] = keys + (int32_t)trn_draw_below(draw, (uint32_t)(plain - keys));
            presented[shown++] = key;
        }
        put(example, key, false);
        put(example, value[key], known && !s->single_query);
    }
    int32_t probe = presented[trn_draw_below(draw, (uint32_t)shown)];
    if (s->single_query)
        put(example, (int32_t)s->vocab - 1, false);
    put(example, probe, false);
    put(example, value[probe], true);
    shift(example, training && !s->train_answers_only);
}

// ----------------------------------------------------------------------------------------------------------- motifs

// A pair in the sequence: where its key stands, and how many ids key and value have.
typedef struct motif_pair {
    int32_t at, key, value;
} motif_pair;

static int32_t fuzzy_plain_ids(const trn_task_settings *s) {
    return (int32_t)(s->vocab - s->noise_vocab - (s->single_query ? 2 : 1));
}

eng_status trn_fuzzy_check(trn_task_settings *s, eng_error *error) {
    int32_t plain = fuzzy_plain_ids(s);
    if (s->key_motif > plain / 2 || s->value_motif > plain - plain / 2)
        return eng_fail(error, ENG_INVALID, "--vocab: %lld ids are too few for motifs without repeated ids",
                        (long long)s->vocab);
    if (s->length < 4 * (s->key_motif + s->value_motif))
        return eng_fail(error, ENG_INVALID, "--length: %lld holds no four pairs of the longest motifs",
                        (long long)s->length);
    return check_noise(s, error);
}

static bool same_key(const trn_task_example *example, motif_pair a, const int32_t *key, int32_t count) {
    return a.key == count && memcmp(example->id + a.at, key, sizeof *key * (size_t)count) == 0;
}

// The pairs shown so far lie in the scratch behind the two motifs at hand.
typedef struct fuzzy {
    const trn_task_settings *s;
    trn_draw *draw;
    trn_task_example *example;
    int32_t keys, values;           // ids
    int32_t *probe, *key;           // motifs: key, then value
    int32_t probe_key, probe_value; // their sizes
    motif_pair *shown;
    int32_t shown_count;
    bool training;
} fuzzy;

static int32_t draw_key_size(const fuzzy *f) {
    return f->training ? 1 + (int32_t)trn_draw_below(f->draw, (uint32_t)f->s->key_motif) : (int32_t)f->s->key_motif;
}

static int32_t draw_value_size(const fuzzy *f) {
    return 1 + (int32_t)trn_draw_below(f->draw, (uint32_t)f->s->value_motif);
}

static void put_motif(fuzzy *f, const int32_t *motif, int32_t count, bool answer) {
    for (int32_t i = 0; i < count; i++)
        put(f->example, motif[i], answer);
}

// Appends the pair of f->key: with the value of its first showing, or a new one. Returns whether it is the probe.
static bool put_pair(fuzzy *f, int32_t key_size, int32_t value_size) {
    trn_task_example *example = f->example;
    int32_t *value = f->key + key_size;
    int32_t at = example->length, known = 0;
    while (known < f->shown_count && !same_key(example, f->shown[known], f->key, key_size))
        known++;
    bool is_probe = key_size == f->probe_key && memcmp(f->key, f->probe, sizeof *f->key * (size_t)key_size) == 0;
    if (known < f->shown_count) {
        value_size = f->shown[known].value;
        memcpy(value, example->id + f->shown[known].at + key_size, sizeof *value * (size_t)value_size);
    } else if (is_probe) {
        value_size = f->probe_value;
        memcpy(value, f->probe + key_size, sizeof *value * (size_t)value_size);
    } else {
        trn_draw_distinct(f->draw, f->keys, f->values, value_size, value);
    }
    put_motif(f, f->key, key_size, false);
    put_motif(f, value, value_size, known < f->shown_count && !f->s->single_query);
    if (known == f->shown_count)
        f->shown[f->shown_count++] = (motif_pair){at, key_size, value_size};
    return is_probe;
}

// Pairs up to the room that the probe needs. Returns whether the probe is among them.
static bool put_pairs(fuzzy *f) {
    int32_t longest = (int32_t)(f->s->key_motif + f->s->value_motif), probe = f->probe_key + f->probe_value;
    int32_t room = (int32_t)f->s->length - probe, probe_at = (int32_t)trn_draw_below(f->draw, (uint32_t)(room - probe));
    bool added = false;
    f->example->length = f->shown_count = 0;
    while (f->example->length < room - longest) {
        int32_t key = draw_key_size(f), value = draw_value_size(f);
        if (f->example->length >= probe_at && !added) {
            memcpy(f->key, f->probe, sizeof *f->key * (size_t)f->probe_key);
            added = put_pair(f, f->probe_key, f->probe_value);
        } else if (draws_noise(f->s, f->draw)) {
            put_noise(f->s, f->keys + f->values, key + value, f->draw, f->example);
        } else {
            trn_draw_distinct(f->draw, 0, f->keys, key, f->key);
            added = put_pair(f, key, value) || added;
        }
    }
    return added;
}

static void pad_front(trn_task_example *example, int32_t pad, int32_t length) {
    int32_t missing = length - example->length;
    memmove(example->id + missing, example->id, sizeof *example->id * (size_t)example->length);
    memmove(example->target + missing, example->target, sizeof *example->target * (size_t)example->length);
    for (int32_t i = 0; i < missing; i++) {
        example->id[i] = pad;
        example->target[i] = false;
    }
    example->length = length;
}

// An example whose probe found no place among the pairs could not be answered: it is drawn anew (the public code keeps
// it).
void trn_fuzzy_generate(const trn_task_settings *s, int64_t level, bool training, trn_draw *draw,
                        trn_task_example *example) {
    (void)level;
    int32_t plain = fuzzy_plain_ids(s), longest = (int32_t)(s->key_motif + s->value_motif);
    fuzzy f = {.s = s,
               .draw = draw,
               .example = example,
               .keys = plain / 2,
               .values = plain - plain / 2,
               .probe = example->scratch,
               .key = example->scratch + longest,
               .training = training};
    f.shown = (motif_pair *)(example->scratch + 2 * (size_t)longest);
    do {
        f.probe_key = draw_key_size(&f);
        f.probe_value = draw_value_size(&f);
        trn_draw_distinct(draw, 0, f.keys, f.probe_key, f.probe);
        trn_draw_distinct(draw, f.keys, f.values, f.probe_value, f.probe + f.probe_key);
    } while (!put_pairs(&f));
    if (s->single_query)
        put(example, (int32_t)s->vocab - 1, false);
    put_motif(&f, f.probe, f.probe_key, false);
    put_motif(&f, f.probe + f.probe_key, f.probe_value, true);
    pad_front(example, (int32_t)s->vocab - (s->single_query ? 2 : 1), (int32_t)s->length + 1);
    shift(example, training && !s->train_answers_only);
}
