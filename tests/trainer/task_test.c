// SPDX-License-Identifier: Apache-2.0
// Every task's examples, read back from the shards that the command wrote: what is asked for and its answer are worked
// out again from the ids alone. Then seeds, parts that do not overlap, and what is refused.
#include "trainer/task.h"

#include <string.h>

#include "engine/files.h"
#include "tests/check_main.h"
#include "tests/engine/temp_folder.h"
#include "trainer/commands.h"
#include "trainer/dataset.h"

enum { MOST_ARGUMENTS = 24, CONTEXT = 4096 };

// Runs "task WORDS --out FOLDER"; words are separated by spaces.
static int run_task(const char *words, const char *folder) {
    char text[512], *rest = NULL;
    const char *argument[MOST_ARGUMENTS] = {"task"};
    int count = 1;
    snprintf(text, sizeof text, "%s --out %s", words, temp_path(folder));
    for (char *word = strtok_r(text, " ", &rest); word; word = strtok_r(NULL, " ", &rest))
        argument[count++] = word;
    return trn_command_task(count, (char **)argument);
}

static void make_task(const char *words, const char *folder) {
    ck_assert_int_eq(run_task(words, folder), TRN_EXIT_OK);
}

static trn_dataset *open_part(const char *part, int32_t vocabulary) {
    const char *name = temp_path(part);
    trn_dataset *dataset = NULL;
    eng_error error = {0};
    trn_dataset_options options = {
        .name = &name, .names = 1, .context = CONTEXT, .bos_id = -1, .eos_id = -1, .vocab_size = vocabulary};
    ck_assert_msg(trn_dataset_open(&options, &dataset, &error) == ENG_OK, "%s", error.text);
    ck_assert(trn_dataset_has_examples(dataset));
    return dataset;
}

// Calls check(row, context) for every example of a part.
static void each(const char *part, int32_t vocabulary, int64_t wanted, void (*check)(const trn_row *row, void *context),
                 void *context) {
    trn_dataset *dataset = open_part(part, vocabulary);
    trn_row row;
    ck_assert_int_eq(trn_dataset_rows(dataset), wanted);
    ck_assert_int_eq(trn_row_create(CONTEXT, &row, NULL), ENG_OK);
    for (int64_t i = 0; i < wanted; i++) {
        ck_assert_int_eq(trn_dataset_row(dataset, i, &row, NULL), ENG_OK);
        check(&row, context);
    }
    trn_row_free(&row);
    trn_dataset_close(dataset);
}

// --------------------------------------------------------------------------------------------------------------- mqar

typedef struct mqar {
    int vocab, length, pairs; // pairs 0: told by the number of targets
    bool blank;
    int first_slot, last_slot, examples;
} mqar;

static void check_mqar(const trn_row *row, void *context) {
    mqar *m = context;
    int pairs = row->counted, half = m->vocab / 2, value_of[512] = {0};
    bool asked[512] = {false}, used[512] = {false};
    ck_assert_int_eq(row->length, m->length);
    ck_assert(m->pairs == 0 ? pairs == 2 || pairs == 5 : pairs == m->pairs);
    for (int k = 0; k < pairs; k++) {
        int key = row->id[2 * k], value = row->id[2 * k + 1];
        ck_assert(key >= 1 && key < half && value >= half && value < m->vocab);
        ck_assert(value_of[key] == 0 && !used[value]);
        value_of[key] = value;
        used[value] = true;
    }
    for (int i = 0; i < row->length; i++) {
        bool query = row->target[i] >= 0;
        if (query) {
            ck_assert(i >= 2 * pairs && i % 2 == 0);
            ck_assert(value_of[row->id[i]] == row->target[i] && !asked[row->id[i]]);
            asked[row->id[i]] = true;
        } else if (m->blank && i >= 2 * pairs) {
            ck_assert_int_eq(row->id[i], 0);
        }
        m->first_slot += query && i == 2 * pairs;
        m->last_slot += query && i >= row->length - 2;
    }
    m->examples++;
}

START_TEST(mqar_asks_for_values_of_its_pairs) {
    make_task("mqar --examples 100 --valid-examples 50 --vocab 24 --length 22 --pairs 2,5", "t");
    each("t/train", 24, 100, check_mqar, &(mqar){24, 22, 0, false, 0, 0, 0});
    each("t/valid-2", 24, 50, check_mqar, &(mqar){24, 22, 2, false, 0, 0, 0});
    each("t/valid-5", 24, 50, check_mqar, &(mqar){24, 22, 5, false, 0, 0, 0});
    make_task("mqar --examples 9 --valid-examples 9 --vocab 24 --length 22 --pairs 5 --blank-non-queries", "b");
    each("b/train", 24, 9, check_mqar, &(mqar){24, 22, 5, true, 0, 0, 0});
}
END_TEST

// One pair, 15 gaps with weights g^-0.99: the first has 1 / sum of the chances, the last 15^-0.99 of that.
START_TEST(mqar_asks_soon) {
    mqar m = {512, 32, 1, false, 0, 0, 0};
    double sum = 0;
    for (int g = 1; g <= 15; g++)
        sum += pow(g, 0.01 - 1);
    make_task("mqar --examples 20000 --valid-examples 1 --vocab 512 --length 32 --pairs 1", "t");
    each("t/train", 512, 20000, check_mqar, &m);
    ck_assert_double_eq_tol(m.first_slot / 20000.0, 1 / sum, 0.015); // a deviation is 0.0032
    ck_assert_double_eq_tol(m.last_slot / 20000.0, pow(15, -0.99) / sum, 0.006);
    mqar uniform = {512, 32, 1, false, 0, 0, 0};
    make_task("mqar --examples 20000 --valid-examples 1 --vocab 512 --length 32 --pairs 1 --power-a 1", "u");
    each("u/train", 512, 20000, check_mqar, &uniform);
    ck_assert_double_eq_tol(uniform.first_slot / 20000.0, 1 / 15.0, 0.009);
    ck_assert_double_eq_tol(uniform.last_slot / 20000.0, 1 / 15.0, 0.009);
}
END_TEST

// ------------------------------------------------------------------------------------------------------------- recall

typedef struct recall {
    int keys, plain; // ids 0 .. keys - 1 are keys, .. plain - 1 values
    int motif;       // of a key, at most; -1: exactly 3
    int length, mark;
    bool all; // every next id is a target
    int64_t answers, noise, ids;
} recall;

// The ids with the last answer behind them, whose runs of keys and values are the pairs.
static int whole_text(const trn_row *row, int32_t *text) {
    memcpy(text, row->id, sizeof *text * (size_t)row->length);
    text[row->length] = row->target[row->length - 1];
    return row->length + 1;
}

static int run_length(const int32_t *text, int at, int end, int low, int high) {
    int count = 0;
    while (at + count < end && text[at + count] >= low && text[at + count] < high)
        count++;
    return count;
}

static void distinct(const int32_t *ids, int count) {
    for (int i = 0; i < count; i++)
        for (int j = 0; j < i; j++)
            ck_assert_int_ne(ids[i], ids[j]);
}

// Where the same key stood first; -1: nowhere before.
static int find_key(const int32_t *text, const int *start, const int *size, int pairs, int at, int count) {
    for (int p = 0; p < pairs; p++)
        if (size[p] == count && memcmp(text + start[p], text + at, sizeof *text * (size_t)count) == 0)
            return start[p];
    return -1;
}

static void check_answers(const recall *r, const trn_row *row, const int32_t *text, int at, int count, bool asked) {
    for (int i = at; i < at + count; i++)
        ck_assert_int_eq(row->target[i - 1], r->all || asked ? text[i] : -1);
}

static void check_recall(const trn_row *row, void *context) {
    recall *r = context;
    int32_t text[CONTEXT + 1];
    int start[CONTEXT], size[CONTEXT], pairs = 0, end = whole_text(row, text), asked_for = 0;
    ck_assert_int_eq(row->length, r->length);
    for (int at = 0; at < end;) {
        int key = run_length(text, at, end, 0, r->keys);
        if (key == 0) { // noise, padding, a mark
            ck_assert_int_ge(text[at], r->plain);
            if (at > 0)
                check_answers(r, row, text, at, 1, false);
            r->noise++;
            at++;
            continue;
        }
        int value = run_length(text, at + key, end, r->keys, r->plain);
        ck_assert(value >= 1 && (r->motif < 0 ? key == 3 : key <= r->motif));
        distinct(text + at, key);
        distinct(text + at + key, value);
        int first = find_key(text, start, size, pairs, at, key);
        if (first >= 0)
            ck_assert_mem_eq(text + first + key, text + at + key, sizeof *text * (size_t)value);
        bool asked = first >= 0 && (r->mark < 0 || at + key + value == end);
        if (at > 0)
            check_answers(r, row, text, at, key, false);
        check_answers(r, row, text, at + key, value, asked);
        asked_for += asked;
        start[pairs] = at;
        size[pairs++] = key;
        at += key + value;
        if (at == end)
            ck_assert(asked); // the last one for certain
    }
    ck_assert_int_ge(asked_for, 1);
    if (r->mark >= 0)
        ck_assert(asked_for == 1 && text[start[pairs - 1] - 1] == r->mark);
    r->answers += asked_for;
    r->ids += end;
}

START_TEST(recall_asks_for_what_stood_before) {
    make_task("in-context-recall --examples 200 --valid-examples 100", "t");
    each("t/train", 16, 200, check_recall, &(recall){8, 16, 1, 127, -1, true, 0, 0, 0});
    each("t/valid", 16, 100, check_recall, &(recall){8, 16, 1, 127, -1, false, 0, 0, 0});
    make_task("in-context-recall --examples 50 --valid-examples 50 --vocab 20 --length 40 --single-query "
              "--train-answers-only",
              "s");
    each("s/train", 20, 50, check_recall, &(recall){9, 19, 1, 40, 19, false, 0, 0, 0});
    each("s/valid", 20, 50, check_recall, &(recall){9, 19, 1, 40, 19, false, 0, 0, 0});
}
END_TEST

START_TEST(noise_has_its_share) {
    recall r = {8, 16, 1, 127, -1, false, 0, 0, 0};
    make_task("noisy-recall --examples 9 --valid-examples 500 --noise-fraction 0.4", "t");
    each("t/valid", 32, 500, check_recall, &r);
    ck_assert_double_eq_tol((double)r.noise / (double)r.ids, 0.4 * 62 / 64, 0.01); // one pair and the last are none
}
END_TEST

START_TEST(fuzzy_recall_has_motifs) {
    make_task("fuzzy-recall --examples 300 --valid-examples 300", "t");
    each("t/train", 16, 300, check_recall, &(recall){7, 15, 3, 128, -1, true, 0, 0, 0});
    each("t/valid", 16, 300, check_recall, &(recall){7, 15, -1, 128, -1, false, 0, 0, 0});
    make_task("fuzzy-recall --examples 50 --valid-examples 50 --vocab 30 --single-query --train-answers-only", "s");
    each("s/train", 30, 50, check_recall, &(recall){14, 28, 3, 128, 29, false, 0, 0, 0});
    each("s/valid", 30, 50, check_recall, &(recall){14, 28, -1, 128, 29, false, 0, 0, 0});
}
END_TEST

// ------------------------------------------------------------------------------------------- copying, memory

static void check_copy(const trn_row *row, void *context) {
    const int mark = 10, blank = 9, copies = *(const int *)context;
    int tokens = 0, token[16], at = 0;
    ck_assert_int_eq(row->length, 40);
    for (; row->id[at] != mark; at++) {
        ck_assert_int_eq(row->target[at], -1);
        if (row->id[at] != blank)
            token[tokens++] = row->id[at];
    }
    ck_assert_int_ne(row->id[at - 1], blank);
    ck_assert(tokens == copies && at == 40 - copies - 1 && row->target[at] == -1);
    for (int i = 0; i < copies; i++) {
        ck_assert_int_eq(row->id[at + 1 + i], blank);
        ck_assert_int_eq(row->target[at + 1 + i], token[i]);
    }
}

static void check_compression(const trn_row *row, void *context) {
    int *noise = context;
    ck_assert_int_eq(row->length, 2 * 12 - 1);
    for (int i = 0; i < 11; i++) {
        bool plain = row->id[i] < 9 - 4;
        ck_assert(row->id[i] < 8 + 1 && row->id[i] != 9);
        ck_assert_int_eq(row->id[12 + i], 9);
        ck_assert_int_eq(row->target[12 + i], plain ? row->id[i] : -1);
        *noise += !plain;
    }
    ck_assert_int_eq(row->id[11], 9);
    for (int i = 0; i < 12; i++)
        ck_assert_int_eq(row->target[i], -1);
}

static void check_memory(const trn_row *row, void *context) {
    int *value_of = context; // (32) of the keys seen so far, in both parts; 0: not seen
    ck_assert_int_eq(row->length, 20);
    for (int i = 0; i < row->length; i += 2) {
        int key = row->id[i], value = row->target[i + 1];
        ck_assert(row->target[i] == -1 && row->id[i + 1] == 63);
        ck_assert(key < 31 && value >= 31 && value < 63);
        ck_assert(value_of[key] == 0 || value_of[key] == value);
        value_of[key] = value;
    }
}

START_TEST(copies_are_in_order) {
    make_task("selective-copy --vocab 11 --length 40 --copies 12 --examples 100 --valid-examples 50", "t");
    each("t/train", 11, 100, check_copy, &(int){12});
    each("t/valid", 11, 50, check_copy, &(int){12});
}
END_TEST

START_TEST(compression_asks_for_all_but_noise) {
    int noise = 0, none = 0;
    make_task("compression --vocab 10 --length 12 --examples 400 --valid-examples 1 --noise-vocab 4 "
              "--noise-fraction 0.25",
              "t");
    each("t/train", 10, 400, check_compression, &noise);
    ck_assert_double_eq_tol(noise / (400.0 * 11), 0.25, 0.03);
    each("t/valid", 10, 1, check_compression, &none);
}
END_TEST

START_TEST(memory_is_one_for_all_examples) {
    int value_of[32] = {0}, seen = 0, moved = 0;
    make_task("memorization --vocab 64 --length 20 --examples 100 --valid-examples 50", "t");
    each("t/train", 64, 100, check_memory, value_of);
    each("t/valid", 64, 50, check_memory, value_of);
    for (int k = 0; k < 31; k++) {
        seen += value_of[k] > 0;
        moved += value_of[k] != 31 + k;
        for (int other = 0; other < k; other++)
            ck_assert(value_of[k] == 0 || value_of[k] != value_of[other]);
    }
    ck_assert(seen == 31 && moved > 20);
}
END_TEST

// -------------------------------------------------------------------------------------------------- hops, arithmetic

typedef struct hop {
    int letters, length, marks;
    const int *hops; // by mark
    bool every;
    int count[8], at_most_one_hop, examples; // answers by letter; right one hop from the end
} hop;

static int hop_from(const int32_t *letter, int place, int hops) {
    for (; hops > 0; hops--) {
        int at = place;
        do
            at--;
        while (at >= 0 && letter[at] != letter[place]);
        if (at < 0)
            return -1;
        place = at + 1;
    }
    return letter[place];
}

static void check_hop(const trn_row *row, void *context) {
    hop *h = context;
    const int32_t *letter = row->id + 1;
    const int mark = row->id[0] - h->letters, end = h->length - 1;
    ck_assert(row->length == h->length + 1 && mark >= 0 && mark < h->marks);
    for (int i = 0; i < h->length; i++) {
        ck_assert(letter[i] >= 0 && letter[i] < h->letters);
        ck_assert_int_eq(row->target[i + 1], i == end || h->every ? hop_from(letter, i, h->hops[mark]) : -1);
    }
    ck_assert_int_eq(row->target[0], -1);
    ck_assert_int_ge(row->target[row->length - 1], 0); // the chain is there
    h->count[row->target[row->length - 1]]++;
    h->at_most_one_hop += row->target[row->length - 1] == hop_from(letter, end, 1);
    h->examples++;
}

START_TEST(hops_lead_to_the_answer) {
    hop four = {4, 64, 1, (int[]){4}, false, {0}, 0, 0};
    make_task("p-hop --examples 4000 --valid-examples 50", "t");
    each("t/train", 5, 4000, check_hop, &four);
    for (int i = 0; i < 4; i++)
        ck_assert_int_lt(abs(four.count[i] - 1000), 140); // five deviations: no letter tells the answer
    ck_assert_int_lt(four.at_most_one_hop, 1600);         // nor does a single hop
    each("t/valid-4", 5, 50, check_hop, &(hop){4, 64, 1, (int[]){4}, false, {0}, 0, 0});
    make_task("p-hop --examples 60 --valid-examples 30 --vocab 9 --length 20 --hops 1,6 --train-every-letter", "m");
    each("m/train", 9, 60, check_hop, &(hop){7, 20, 2, (int[]){1, 6}, true, {0}, 0, 0});
    each("m/valid-1", 9, 30, check_hop, &(hop){7, 20, 2, (int[]){1, 6}, false, {0}, 0, 0});
    each("m/valid-6", 9, 30, check_hop, &(hop){7, 20, 2, (int[]){1, 6}, false, {0}, 0, 0});
}
END_TEST

typedef struct mano {
    int modulus, most;
    bool all, longest;
    int lengths[16], zeros, examples;
} mano;

// From right to left, so that a stack of values is enough.
static int value_of_prefix(const int32_t *id, int count, int modulus) {
    int stack[64], depth = 0;
    for (int i = count; i-- > 0;) {
        if (id[i] < modulus) {
            stack[depth++] = id[i];
            continue;
        }
        ck_assert(depth >= 2 && id[i] < modulus + 3);
        const int a = stack[--depth], b = stack[--depth], kind = id[i] - modulus;
        stack[depth++] = (kind == 0 ? a + b : kind == 1 ? a + modulus - b : a * b) % modulus;
    }
    ck_assert_int_eq(depth, 1);
    return stack[0];
}

static void check_mano(const trn_row *row, void *context) {
    mano *m = context;
    const int operations = row->id[1] - m->modulus - 5 + 1, last = row->length - 1;
    ck_assert(operations >= 1 && operations <= m->most && (!m->longest || operations == m->most));
    ck_assert_int_eq(row->length, 2 * operations + 4);
    ck_assert_int_eq(row->id[0], m->modulus + 3);
    ck_assert_int_eq(row->id[last], m->modulus + 4);
    ck_assert_int_eq(row->target[last], value_of_prefix(row->id + 2, last - 2, m->modulus));
    for (int i = 0; i < last; i++)
        ck_assert_int_eq(row->target[i], m->all ? row->id[i + 1] : -1);
    m->lengths[operations]++;
    m->zeros += row->target[last] == 0;
    m->examples++;
}

START_TEST(arithmetic_is_worked_out) {
    mano all = {23, 10, true, false, {0}, 0, 0}, longest = {23, 10, false, true, {0}, 0, 0};
    make_task("mano --examples 3000 --valid-examples 4000", "t");
    each("t/train", 38, 3000, check_mano, &all);
    for (int length = 1; length <= 10; length++)
        ck_assert_int_lt(abs(all.lengths[length] - 300), 85); // five deviations
    each("t/valid", 38, 4000, check_mano, &longest);
    ck_assert_double_eq_tol(longest.zeros / 4000.0, 0.0703, 0.016); // four deviations
    make_task("mano --examples 50 --valid-examples 20 --modulus 7 --operations 4 --train-answers-only", "s");
    each("s/train", 16, 50, check_mano, &(mano){7, 4, false, false, {0}, 0, 0});
    each("s/valid", 16, 20, check_mano, &(mano){7, 4, false, true, {0}, 0, 0});
}
END_TEST

// -------------------------------------------------------------------------------------------------------------- floors

// By hand, over the letters before `place`: which is the commonest, or stands most often behind those like `place`.
static int commonest_before(const int32_t *letter, int place, bool behind) {
    int best = -1, most = 0;
    for (int candidate = 0; candidate < 4; candidate++) {
        int count = 0;
        for (int i = 0; i < place; i++)
            count += behind ? letter[i] == letter[place] && letter[i + 1] == candidate : letter[i] == candidate;
        if (count > most && !(behind && candidate == letter[place])) {
            best = candidate;
            most = count;
        }
    }
    return best;
}

static void count_rules(const trn_row *row, void *context) {
    int(*right)[3] = context;
    const int32_t *letter = row->id + 1, wanted = row->target[row->length - 1];
    for (int hops = 0, place = row->length - 2; hops <= 2; hops++) {
        right[hops][0] += letter[place] == wanted;
        right[hops][1] += commonest_before(letter, place, false) == wanted;
        right[hops][2] += commonest_before(letter, place, true) == wanted;
        int at = place - 1; // two hops are there
        while (hops < 2 && letter[at] != letter[place])
            at--;
        place = at + 1;
    }
}

static double best_of(int (*right)[3], int hops) {
    int best = 0;
    for (int i = 0; i < 3 * hops + 3; i++)
        best = right[i / 3][i % 3] > best ? right[i / 3][i % 3] : best;
    return best;
}

static void read_floors(const char *part, trn_floors *floors) {
    eng_error error = {0};
    ck_assert_msg(trn_floors_read(temp_path(part), floors, &error) == ENG_OK, "%s", error.text);
}

START_TEST(what_rules_score_is_kept) {
    static const char *const parts[] = {"t/valid-2", "t/valid-3", "t/valid-4"};
    trn_floors floors;
    mano longest = {23, 10, false, true, {0}, 0, 0};
    make_task("p-hop --examples 10 --valid-examples 2000 --vocab 7 --hops 2,3,4", "t");
    for (int p = 0; p < 3; p++) {
        int right[3][3] = {{0}};
        hop all = {4, 64, 3, (int[]){2, 3, 4}, false, {0}, 0, 0};
        each(parts[p], 7, 2000, count_rules, right);
        each(parts[p], 7, 2000, check_hop, &all);
        read_floors(parts[p], &floors);
        ck_assert_int_eq(floors.rows, 4);
        ck_assert_int_eq(floors.targets, 2000);
        for (int i = 0; i < 4; i++)
            ck_assert_int_le(all.count[i], (int)(floors.row[0].right * 2000 + 0.5));
        ck_assert_str_eq(floors.row[1].name, "chance");
        ck_assert_double_eq_tol(floors.row[1].right, 0.25, 1e-12);
        ck_assert_double_eq_tol(floors.row[2].right, best_of(right, 1) / 2000, 1e-12);
        ck_assert_double_eq_tol(floors.row[3].right, best_of(right, 2) / 2000, 1e-12);
        ck_assert_double_gt(floors.row[2].right, 0.3); // letters are no coins
        ck_assert(p > 0 || floors.row[3].right == 1);
    }
    read_floors("t/train", &floors);
    ck_assert_int_eq(floors.rows, 0); // nobody is scored there

    make_task("mano --examples 10 --valid-examples 2000", "m");
    each("m/valid", 38, 2000, check_mano, &longest);
    read_floors("m/valid", &floors);
    ck_assert_int_eq(floors.rows, 1);
    ck_assert_str_eq(floors.row[0].name, "always 0");
    ck_assert_double_eq_tol(floors.row[0].right, longest.zeros / 2000.0, 1e-12);
}
END_TEST

START_TEST(what_no_rule_scores_is_refused) {
    static const char *const texts[] = {
        "{}",
        "{\"format\": \"mesa-floors-2\", \"targets\": 1, \"floors\": []}",
        "{\"format\": \"mesa-floors-1\", \"targets\": 1, \"floors\": [{\"name\": \"a\", \"right\": 1.5}]}",
        "{\"format\": \"mesa-floors-1\", \"targets\": 1, \"floors\": [{\"right\": 0.5}]}",
    };
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        trn_floors floors;
        eng_error error = {0};
        temp_write("x.floors.json", texts[i], strlen(texts[i]));
        ck_assert_int_eq(trn_floors_read(temp_path("x"), &floors, &error), ENG_FORMAT);
        ck_assert_ptr_nonnull(strstr(error.text, "x.floors.json"));
    }
}
END_TEST

// -------------------------------------------------------------------------------------------------------- draws, parts

static char *read_part(const char *part, size_t *length) {
    char *bytes = NULL;
    ck_assert_int_eq(eng_read_file(temp_path(part), 1 << 24, &bytes, length, NULL), ENG_OK);
    return bytes;
}

START_TEST(a_seed_gives_the_same_data) {
    static const char *const part[] = {"a/train-00000.tok", "b/train-00000.tok", "c/train-00000.tok",
                                       "a/valid-00000.tok"};
    char words[128], *bytes[4];
    size_t length[4];
    for (int i = 0; i < 3; i++) {
        const char *name = trn_task_at(_i)->name;
        if (strcmp(name, "mqar") == 0 || strcmp(name, "p-hop") == 0)
            return; // their parts have other names
        snprintf(words, sizeof words, "%s --examples 20 --valid-examples 20 --seed %d", name, i == 2 ? 8 : 7);
        make_task(words, (const char *[]){"a", "b", "c"}[i]);
    }
    for (int i = 0; i < 4; i++)
        bytes[i] = read_part(part[i], &length[i]);
    ck_assert(length[0] == length[1] && memcmp(bytes[0], bytes[1], length[0]) == 0);
    ck_assert(length[0] != length[2] || memcmp(bytes[0], bytes[2], length[0]) != 0);
    ck_assert(memcmp(bytes[0] + 64, bytes[3] + 64, 64) != 0);
    for (int i = 0; i < 4; i++)
        free(bytes[i]);
}
END_TEST

static bool same_row(const trn_row *a, const trn_row *b) {
    return a->length == b->length && memcmp(a->id, b->id, sizeof *a->id * (size_t)a->length) == 0;
}

// 5 tokens of 2 ids: 32 examples, of which 40 draws miss some; none of those drawn may come again.
START_TEST(validation_was_not_trained_on) {
    make_task("compression --vocab 3 --length 6 --examples 40 --valid-examples 30", "t");
    trn_dataset *train = open_part("t/train", 3), *valid = open_part("t/valid", 3);
    trn_row a, b;
    ck_assert_int_eq(trn_row_create(CONTEXT, &a, NULL), ENG_OK);
    ck_assert_int_eq(trn_row_create(CONTEXT, &b, NULL), ENG_OK);
    for (int64_t i = 0; i < 40; i++)
        for (int64_t j = 0; j < 30; j++) {
            ck_assert_int_eq(trn_dataset_row(train, i, &a, NULL), ENG_OK);
            ck_assert_int_eq(trn_dataset_row(valid, j, &b, NULL), ENG_OK);
            ck_assert(!same_row(&a, &b));
        }
    trn_row_free(&a);
    trn_row_free(&b);
    trn_dataset_close(train);
    trn_dataset_close(valid);
    ck_assert_int_eq(run_task("compression --vocab 3 --length 6 --examples 2000", "u"), TRN_EXIT_USAGE); // none left
    ck_assert(!temp_exists("u/valid-00000.tok"));
}
END_TEST

START_TEST(draws_are_uniform_and_distinct) {
    int count[7] = {0}, place[5] = {0};
    trn_draw draw = trn_draw_begin(3, 4);
    double sum = 0;
    for (int i = 0; i < 70000; i++) {
        count[trn_draw_below(&draw, 7)]++;
        sum += trn_draw_unit(&draw);
    }
    for (int i = 0; i < 7; i++)
        ck_assert_int_lt(abs(count[i] - 10000), 400); // four deviations
    ck_assert_double_eq_tol(sum / 70000, 0.5, 0.005);
    for (int i = 0; i < 5000; i++) {
        int32_t out[5];
        trn_draw_distinct(&draw, 10, 5, 5, out);
        distinct(out, 5);
        for (int j = 0; j < 5; j++) {
            ck_assert(out[j] >= 10 && out[j] < 15);
            place[j] += out[j] == 12;
        }
    }
    for (int j = 0; j < 5; j++)
        ck_assert_int_lt(abs(place[j] - 1000), 120);
}
END_TEST

START_TEST(what_cannot_be_made_is_refused) {
    static const char *const words[] = {
        "",
        "nothing",
        "mqar --pairs 4,,8",
        "mqar --pairs 0",
        "mqar --pairs 33",
        "mqar --length 127",
        "mqar --vocab 8 --pairs 4",
        "mqar --copies 3",
        "mqar --power-a 2",
        "mqar --seed -1",
        "mqar --examples 0",
        "in-context-recall --length 3",
        "in-context-recall --noise-vocab 4",
        "noisy-recall --noise-vocab 31",
        "noisy-recall --noise-vocab 0",
        "noisy-recall --noise-fraction 1",
        "fuzzy-recall --key-motif 8",
        "fuzzy-recall --length 20",
        "selective-copy --copies 128",
        "compression --noise-vocab 15",
        "p-hop --hops 0",
        "p-hop --hops 21",
        "p-hop --vocab 5 --hops 1,2,3",
        "mano --modulus 1",
        "mano --operations 0",
        "mano --vocab 30",
        "memorization --length 31",
        "memorization --noise-vocab 254",
    };
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        ck_assert_msg(run_task(words[i], "t") == TRN_EXIT_USAGE, "task %s", words[i]);
    ck_assert(!temp_exists("t/train-00000.tok"));
    const char *without[] = {"task", "mqar", NULL}, *help[] = {"task", "--help", NULL};
    const char *own[] = {"task", "mqar", "--help", NULL};
    ck_assert_int_eq(trn_command_task(2, (char **)without), TRN_EXIT_USAGE); // no folder
    ck_assert_int_eq(trn_command_task(2, (char **)help), TRN_EXIT_OK);
    ck_assert_int_eq(trn_command_task(3, (char **)own), TRN_EXIT_OK);
}
END_TEST

static int count_tasks(void) {
    int count = 0;
    while (trn_task_at(count))
        count++;
    return count;
}

static Suite *task_suite(void) {
    Suite *suite = suite_create("tasks");
    TCase *cases = tcase_create("tasks");
    tcase_add_checked_fixture(cases, temp_folder_make, temp_folder_remove);
    tcase_set_timeout(cases, 60);
    tcase_add_test(cases, mqar_asks_for_values_of_its_pairs);
    tcase_add_test(cases, mqar_asks_soon);
    tcase_add_test(cases, recall_asks_for_what_stood_before);
    tcase_add_test(cases, noise_has_its_share);
    tcase_add_test(cases, fuzzy_recall_has_motifs);
    tcase_add_test(cases, copies_are_in_order);
    tcase_add_test(cases, compression_asks_for_all_but_noise);
    tcase_add_test(cases, memory_is_one_for_all_examples);
    tcase_add_test(cases, hops_lead_to_the_answer);
    tcase_add_test(cases, arithmetic_is_worked_out);
    tcase_add_test(cases, what_rules_score_is_kept);
    tcase_add_test(cases, what_no_rule_scores_is_refused);
    tcase_add_loop_test(cases, a_seed_gives_the_same_data, 0, count_tasks());
    tcase_add_test(cases, validation_was_not_trained_on);
    tcase_add_test(cases, draws_are_uniform_and_distinct);
    tcase_add_test(cases, what_cannot_be_made_is_refused);
    suite_add_tcase(suite, cases);
    return suite;
}

MESA_TEST_MAIN(task_suite)
