// SPDX-License-Identifier: Apache-2.0
// sample: Philox's known answers, exact truncation sets, the distribution of draws, greedy, bans, values that are not
// finite, logprobs and the likeliest ids.
#include "kernels/philox.h"
#include "kernels/ref/sample.h"
#include "tests/kernels/kernel_test.h"

enum { VOCABULARY = 1003, DRAWS = 256 };

// The vectors published with Random123 (kat_vectors, philox 4x32 10).
START_TEST(philox_known_answers) {
    static const struct {
        uint32_t counter[4], key[2], answer[4];
    } vector[] = {
        {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
         {0xffffffff, 0xffffffff},
         {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (size_t i = 0; i < sizeof vector / sizeof vector[0]; i++) {
        kern_philox counter;
        memcpy(&counter, vector[i].counter, sizeof counter);
        const kern_philox got = kern_philox_4x32_10(counter, vector[i].key[0], vector[i].key[1]);
        ck_assert_mem_eq(got.word, vector[i].answer, sizeof got.word);
    }
    const double uniform = kern_philox_uniform(0x299f31d0a4093822u, 0x85a308d3243f6a88u, 0x13198a2e, 0x03707344);
    ck_assert_double_eq(uniform, (double)(0xd16cfe0994fdccebu >> 11) * 0x1p-53);
}
END_TEST

typedef struct batch {
    float *logits, *logprob, *top_logprob; // (DRAWS, VOCABULARY), (DRAWS), (DRAWS, KERN_MAX_TOP)
    int32_t *id, *top_id;                  // (DRAWS), (DRAWS, KERN_MAX_TOP)
} batch;

// Every row gets the same logits and the sampler with its own position.
static batch make_batch(kernel_test *test, const float *logits, int vocabulary) {
    batch b = {.logits = kernel_test_zero_floats(test, (size_t)DRAWS * vocabulary),
               .logprob = kernel_test_zero_floats(test, DRAWS),
               .top_logprob = kernel_test_zero_floats(test, DRAWS * KERN_MAX_TOP),
               .id = kernel_test_bytes(test, DRAWS * sizeof(int32_t)),
               .top_id = kernel_test_bytes(test, DRAWS * KERN_MAX_TOP * sizeof(int32_t))};
    for (int i = 0; i < DRAWS; i++)
        memcpy(b.logits + (size_t)i * vocabulary, logits, (size_t)vocabulary * sizeof *logits);
    kernel_test_clear_rows(test);
    kernel_test_row(test, KERN_ROW_PROMPT, 0, 1, 0);
    test->rows->n_logits = DRAWS;
    memset(test->rows->logits_token, 0, DRAWS * sizeof *test->rows->logits_token);
    return b;
}

static void draw(kernel_test *test, batch *b, int vocabulary, kern_sampler sampler, int rows) {
    for (int i = 0; i < rows; i++) {
        test->rows->sampler[i] = sampler;
        test->rows->sampler[i].position += (uint64_t)i;
    }
    test->rows->n_logits = rows;
    kernel_test_prepare(test);
    const kern_sample_args args = {.logits.f = b->logits,
                                   .id.i = b->id,
                                   .logprob.f = b->logprob,
                                   .top_id.i = b->top_id,
                                   .top_logprob.f = b->top_logprob,
                                   .vocabulary = vocabulary};
    kernel_test_launch(test, KERN_OP_SAMPLE, &args);
}

static int32_t draw_one(kernel_test *test, const float *logits, int vocabulary, kern_sampler sampler) {
    batch b = make_batch(test, logits, vocabulary);
    draw(test, &b, vocabulary, sampler, 1);
    return b.id[0];
}

// A few likely ids, the rest a long tail.
static float *peaked_logits(kernel_test *test, int vocabulary) {
    float *logits = kernel_test_floats(test, (size_t)vocabulary, -6, 1);
    for (int i = 0; i < 12; i++)
        logits[(i * 37 + 5) % vocabulary] = (float)(3 + 4 * kernel_test_uniform(test));
    return logits;
}

// Pearson's statistic over ids whose expectation is at least 5, the others as one class. Its mean is the number of
// classes - 1, its variance twice that; mean + 5 standard deviations is a bound that the fixed seeds are known to keep.
static void assert_distribution(const double *probability, const int *count, int vocabulary, int draws) {
    double statistic = 0, rest_expected = 0, rest_count = 0;
    int classes = 0;
    for (int id = 0; id < vocabulary; id++) {
        const double expected = probability[id] * draws;
        if (expected == 0) {
            ck_assert_msg(count[id] == 0, "id %d is cut off and was drawn %d times", id, count[id]);
        } else if (expected < 5) {
            rest_expected += expected;
            rest_count += count[id];
        } else {
            statistic += (count[id] - expected) * (count[id] - expected) / expected;
            classes++;
        }
    }
    if (rest_expected > 1) {
        statistic += (rest_count - rest_expected) * (rest_count - rest_expected) / rest_expected;
        classes++;
    }
    const double mean = classes - 1;
    ck_assert_msg(statistic <= mean + 5 * sqrt(2 * mean) + 1e-9, "chi-square %.1f with %d classes", statistic, classes);
}

static const kern_sampler samplers[] = {
    {.forced = -1, .temperature = 1, .top_p = 1},
    {.forced = -1, .temperature = 0.7f, .top_p = 1, .top_k = 5},
    {.forced = -1, .temperature = 1.5f, .top_p = 0.8f},
    {.forced = -1, .temperature = 1, .top_p = 1, .min_p = 0.05f},
    {.forced = -1, .temperature = 2, .top_p = 0.9f, .top_k = 40, .min_p = 0.02f},
    {.forced = -1, .temperature = 1, .top_p = 0.3f, .top_k = 1},
    {.forced = -1, .temperature = 100, .top_p = 0.5f},
};
enum { SAMPLERS = sizeof samplers / sizeof samplers[0] };

START_TEST(draws_follow_the_exact_distribution) {
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    const float *logits = peaked_logits(&test, VOCABULARY);
    batch b = make_batch(&test, logits, VOCABULARY);
    for (int s = 0; s < SAMPLERS; s++) {
        static int count[VOCABULARY];
        double probability[VOCABULARY];
        memset(count, 0, sizeof count);
        kern_sampler sampler = samplers[s];
        sampler.seed = 20260101 + (uint64_t)s;
        enum { LAUNCHES = 40 };
        for (int launch = 0; launch < LAUNCHES; launch++) {
            sampler.position = (uint64_t)launch * DRAWS;
            draw(&test, &b, VOCABULARY, sampler, DRAWS);
            for (int i = 0; i < DRAWS; i++)
                count[b.id[i]]++;
        }
        kern_ref_sample_probabilities(VOCABULARY, logits, &sampler, NULL, probability, NULL);
        assert_distribution(probability, count, VOCABULARY, LAUNCHES * DRAWS);
    }
    kernel_test_close(&test);
}
END_TEST

// At high temperature every kept id is soon drawn: the set drawn is the set kept, no more and no less.
START_TEST(truncation_sets_are_exact) {
    enum { FEW = 60, LAUNCHES = 30 };
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    float *logits = kernel_test_floats(&test, FEW, -1, 1);
    logits[17] = logits[3] = logits[41] = logits[55]; // ties, cut at the lowest ids
    int exact = 0;
    for (int variant = 0; variant < 30; variant++) {
        kern_sampler sampler = {.forced = -1, .temperature = 4, .top_p = 1, .seed = 7 + (uint64_t)variant};
        if (variant % 3 == 0)
            sampler.top_k = 1 + variant * 2;
        else if (variant % 3 == 1)
            sampler.top_p = (float)(0.03 * (variant + 1));
        else
            sampler.min_p = (float)(0.97 - 0.02 * variant);
        batch b = make_batch(&test, logits, FEW);
        bool drawn[FEW] = {false};
        for (int launch = 0; launch < LAUNCHES; launch++) {
            sampler.position = (uint64_t)launch * DRAWS;
            draw(&test, &b, FEW, sampler, DRAWS);
            for (int i = 0; i < DRAWS; i++)
                drawn[b.id[i]] = true;
        }
        double probability[FEW], margin = 1;
        kern_ref_sample_probabilities(FEW, logits, &sampler, NULL, probability, &margin);
        ck_assert_msg(margin > 1e-6, "variant %d lies on the edge (%g)", variant, margin);
        for (int id = 0; id < FEW; id++, exact++)
            ck_assert_msg(drawn[id] == (probability[id] > 0), "variant %d: id %d", variant, id);
    }
    ck_assert_int_eq(exact, 30 * FEW);
    kernel_test_close(&test);
}
END_TEST

// Ties at the edge of top_k: the lowest ids stay.
START_TEST(ties_go_to_the_lowest_ids) {
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    float logits[VOCABULARY];
    for (int id = 0; id < VOCABULARY; id++)
        logits[id] = id % 2 ? 0.0f : -0.0f; // equal
    logits[900] = 1;
    kern_sampler sampler = {.forced = -1, .temperature = 1, .top_p = 1, .top_k = 4, .seed = 1};
    batch b = make_batch(&test, logits, VOCABULARY);
    bool drawn[VOCABULARY] = {false};
    draw(&test, &b, VOCABULARY, sampler, DRAWS);
    for (int i = 0; i < DRAWS; i++)
        drawn[b.id[i]] = true;
    for (int id = 0; id < VOCABULARY; id++)
        ck_assert_int_eq(drawn[id], id < 3 || id == 900);
    logits[2] = logits[700] = 5;
    ck_assert_int_eq(draw_one(&test, logits, VOCABULARY, (kern_sampler){.forced = -1, .temperature = 0, .top_p = 1}),
                     2);
    ck_assert_int_eq(draw_one(&test, logits, VOCABULARY, (kern_sampler){.forced = -1, .temperature = 1, .top_p = 0}),
                     2);
    kernel_test_close(&test);
}
END_TEST

START_TEST(edits_come_first) {
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    float *logits = peaked_logits(&test, VOCABULARY);
    const kern_logit_edit edit[] = {
        {5, -INFINITY, 1, 0}, {42, 2, 1.5f, 0.25f}, {79, -9, 1.5f, 0.25f}, {116, 0, 0.5f, -1}, {700, 12, 1, 0}};
    enum { EDITS = sizeof edit / sizeof edit[0] };
    kern_sampler sampler = {.forced = -1, .temperature = 1, .top_p = 0.95f, .edit0 = 1, .edits = EDITS, .seed = 99};
    batch b = make_batch(&test, logits, VOCABULARY);
    memcpy(test.rows->edit + 1, edit, sizeof edit);
    test.rows->n_edits = EDITS + 1;
    static int count[VOCABULARY];
    for (int launch = 0; launch < 20; launch++) {
        sampler.position = (uint64_t)launch * DRAWS;
        draw(&test, &b, VOCABULARY, sampler, DRAWS);
        for (int i = 0; i < DRAWS; i++)
            count[b.id[i]]++;
    }
    double probability[VOCABULARY];
    kern_ref_sample_probabilities(VOCABULARY, logits, &sampler, edit, probability, NULL);
    ck_assert_double_eq(probability[5], 0);
    assert_distribution(probability, count, VOCABULARY, 20 * DRAWS);
    double logprob[VOCABULARY]; // of the unedited logits
    kern_ref_logprobs(VOCABULARY, logits, logprob);
    for (int i = 0; i < DRAWS; i++)
        ck_assert_double_eq_tol((double)b.logprob[i], logprob[b.id[i]], 1e-5);
    kernel_test_close(&test);
}
END_TEST

START_TEST(everything_banned_still_gives_an_id) {
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    enum { FEW = 40 };
    float *logits = kernel_test_floats(&test, FEW, -1, 1);
    logits[23] = 2;
    for (int id = 0; id < FEW; id++)
        test.rows->edit[id] = (kern_logit_edit){id, -INFINITY, 1, 0};
    for (int greedy = 0; greedy < 2; greedy++) {
        batch b = make_batch(&test, logits, FEW);
        test.rows->n_edits = FEW;
        draw(&test, &b, FEW, (kern_sampler){.forced = -1, .temperature = (float)!greedy, .top_p = 1, .edits = FEW}, 1);
        ck_assert_int_eq(b.id[0], 23);
    }
    kernel_test_close(&test);
}
END_TEST

START_TEST(not_finite_never_wins) {
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    enum { FEW = 40 };
    float logits[FEW];
    const kern_sampler greedy = {.forced = -1, .temperature = 0, .top_p = 1};
    for (int id = 0; id < FEW; id++)
        logits[id] = id % 3 == 0 ? NAN : id % 3 == 1 ? INFINITY : -INFINITY;
    const int32_t none = draw_one(&test, logits, FEW, greedy);
    ck_assert(none >= 0 && none < FEW);
    logits[31] = -3;
    logits[12] = -4;
    for (int s = 0; s < SAMPLERS; s++) {
        batch b = make_batch(&test, logits, FEW);
        draw(&test, &b, FEW, samplers[s], DRAWS);
        for (int i = 0; i < DRAWS; i++)
            ck_assert(b.id[i] == 31 || b.id[i] == 12);
    }
    ck_assert_int_eq(draw_one(&test, logits, FEW, greedy), 31);
    kernel_test_close(&test);
}
END_TEST

// An id is a function of seed, position and choice: not of the row's place or its neighbours.
START_TEST(place_does_not_matter) {
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    const float *logits = peaked_logits(&test, VOCABULARY);
    kern_sampler sampler = {
        .forced = -1, .temperature = 1.2f, .top_p = 0.95f, .seed = 0xfedcba9876543210u, .position = 1u << 31};
    batch b = make_batch(&test, logits, VOCABULARY);
    draw(&test, &b, VOCABULARY, sampler, DRAWS);
    int other_choice = 0, distinct = 0;
    for (int i = 0; i < 30; i++) {
        kern_sampler alone = sampler;
        alone.position += (uint64_t)i;
        ck_assert_int_eq(draw_one(&test, logits, VOCABULARY, alone), b.id[i]);
        alone.choice = 1;
        other_choice += draw_one(&test, logits, VOCABULARY, alone) != b.id[i];
        distinct += b.id[i] != b.id[0];
    }
    ck_assert_int_gt(other_choice, 10);
    ck_assert_int_gt(distinct, 10);
    kernel_test_close(&test);
}
END_TEST

static void assert_top(const batch *b, const float *logits, int vocabulary, int top) {
    double logprob[VOCABULARY];
    int want[KERN_MAX_TOP];
    kern_ref_logprobs(vocabulary, logits, logprob);
    kern_ref_top(vocabulary, logits, top, want);
    for (int i = 0; i < top; i++) {
        ck_assert_int_eq(b->top_id[i], want[i]);
        if (want[i] < 0)
            ck_assert(b->top_logprob[i] == -INFINITY);
        else
            ck_assert_double_eq_tol((double)b->top_logprob[i], logprob[want[i]], 1e-5);
        if (b->id[0] == want[i])
            ck_assert_mem_eq(&b->logprob[0], &b->top_logprob[i], sizeof(float));
    }
    for (int i = top; i < KERN_MAX_TOP; i++)
        ck_assert_int_eq(b->top_id[i], 0); // not wanted, not written
}

// Whatever is drawn, and whatever else the sampler does, the likeliest ids are those of the model.
// Vocabularies as they are, every row with logits of its own: a device may go about it otherwise for a few rows.
START_TEST(number_of_rows_does_not_matter) {
    enum { ROWS = 140 };
    static const int vocabularies[] = {32000, 50257, 70001};
    static const int numbers[] = {1, 12, 30, 60};
    static const kern_sampler plain[] = {{.forced = -1, .temperature = 1, .top_p = 1},
                                         {.forced = -1, .temperature = 0.8f, .top_p = 1},
                                         {.forced = -1},
                                         {.forced = 1234},
                                         {.forced = -1, .temperature = 1, .top_p = 0.9f}};
    for (int v = 0; v < 3; v++) {
        kernel_test test;
        if (!kernel_test_open(&test, _i, "cpu"))
            MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
        const int vocabulary = vocabularies[v];
        const float *zeros = kernel_test_zero_floats(&test, (size_t)vocabulary);
        batch b = make_batch(&test, zeros, vocabulary);
        for (size_t i = 0; i < ROWS * (size_t)vocabulary; i++)
            b.logits[i] = (float)(12 * kernel_test_uniform(&test) - 6);
        b.logits[5] = b.logits[vocabulary] = NAN;
        int32_t id[ROWS];
        float logprob[ROWS];
        for (int number = 0; number < 5; number++) {
            const int rows = number == 0 ? ROWS : numbers[number - 1];
            for (int i = 0; i < rows; i++) {
                test.rows->sampler[i] = plain[i % 5];
                test.rows->sampler[i].seed = 99;
                test.rows->sampler[i].position = (uint64_t)i;
            }
            test.rows->n_logits = rows;
            kernel_test_prepare(&test);
            const kern_sample_args args = {
                .logits.f = b.logits, .id.i = b.id, .logprob.f = b.logprob, .vocabulary = vocabulary};
            kernel_test_launch(&test, KERN_OP_SAMPLE, &args);
            if (number == 0) {
                memcpy(id, b.id, sizeof id);
                memcpy(logprob, b.logprob, sizeof logprob);
            }
            kernel_test_assert_same(b.id, id, rows);
            kernel_test_assert_same(b.logprob, logprob, rows);
        }
        kernel_test_close(&test);
    }
}
END_TEST

START_TEST(likeliest_ids_are_the_models) {
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    const float *logits = peaked_logits(&test, VOCABULARY);
    float tied[VOCABULARY], rising[VOCABULARY];
    for (int id = 0; id < VOCABULARY; id++) {
        tied[id] = (float)(id * 7 % 5 == 3 || id > 990) + (float)(id % 2 ? 0.0f : -0.0f);
        rising[id] = (float)id / 64;
    }
    tied[30] = NAN;
    tied[600] = -INFINITY;
    for (int top = 0; top <= KERN_MAX_TOP; top++) {
        kern_sampler sampler = samplers[top % SAMPLERS];
        sampler.top = top;
        sampler.edits = 2;
        test.rows->edit[0] = (kern_logit_edit){5, -INFINITY, 1, 0};
        test.rows->edit[1] = (kern_logit_edit){6, 30, 1, 0};
        const float *cases[] = {logits, tied, rising};
        for (int c = 0; c < 3; c++) {
            batch b = make_batch(&test, cases[c], VOCABULARY);
            test.rows->n_edits = 2;
            draw(&test, &b, VOCABULARY, sampler, 1);
            assert_top(&b, cases[c], VOCABULARY, top);
        }
    }
    for (int few = 1; few < 40; few++) { // fewer ids than wanted
        batch b = make_batch(&test, logits, few);
        draw(&test, &b, few, (kern_sampler){.forced = few - 1, .top = KERN_MAX_TOP}, 1);
        assert_top(&b, logits, few, KERN_MAX_TOP);
    }
    kernel_test_close(&test);
}
END_TEST

START_TEST(a_forced_id_is_scored) {
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    float *logits = peaked_logits(&test, VOCABULARY);
    double logprob[VOCABULARY], sum = 0;
    logits[77] = -INFINITY;
    kern_ref_logprobs(VOCABULARY, logits, logprob);
    batch b = make_batch(&test, logits, VOCABULARY);
    for (int32_t id = 0; id < VOCABULARY; id++) {
        draw(&test, &b, VOCABULARY, (kern_sampler){.temperature = 2, .top_p = 0.1f, .top_k = 1, .forced = id}, 1);
        ck_assert_int_eq(b.id[0], id);
        if (id == 77)
            ck_assert(b.logprob[0] == -INFINITY);
        else
            ck_assert_double_eq_tol((double)b.logprob[0], logprob[id], 1e-5);
        sum += exp((double)b.logprob[0]);
    }
    ck_assert_double_eq_tol(sum, 1, 1e-5);
    kernel_test_close(&test);
}
END_TEST

START_TEST(refuses_what_it_cannot_do) {
    kernel_test test;
    ck_assert(kernel_test_open(&test, 0, "cpu"));
    float logits[4] = {0};
    batch b = make_batch(&test, logits, 4);
    kern_sample_args args = {.logits.f = b.logits, .id.i = b.id, .vocabulary = 0};
    kernel_test_assert_refused(&test, KERN_OP_SAMPLE, &args, KERN_INVALID);
    args.vocabulary = 4;
    test.rows->n_logits = 1;
    test.rows->edit[0] = (kern_logit_edit){4, 1, 1, 0}; // no such id
    test.rows->n_edits = 1;
    const kern_sampler refused[] = {
        {.forced = -1, .temperature = 1, .top_p = 1, .edits = 1}, {.forced = 4}, {.forced = -1, .top = 1}};
    for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++) {
        test.rows->sampler[0] = refused[i];
        kernel_test_prepare(&test);
        kernel_test_assert_refused(&test, KERN_OP_SAMPLE, &args, KERN_OK);
        ck_assert_int_eq(kern_launch(test.stream, KERN_OP_SAMPLE, test.rows, &args), KERN_INVALID);
    }
    args.top_id.i = b.top_id; // one of two
    kernel_test_assert_refused(&test, KERN_OP_SAMPLE, &args, KERN_INVALID);
    kernel_test_close(&test);
}
END_TEST

static Suite *sample_suite(void) {
    Suite *suite = suite_create("kernels/sample");
    TCase *tcase = tcase_create("sample");
    tcase_set_timeout(tcase, 60);
    tcase_add_test(tcase, philox_known_answers);
    tcase_add_loop_test(tcase, draws_follow_the_exact_distribution, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tcase, truncation_sets_are_exact, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tcase, ties_go_to_the_lowest_ids, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tcase, edits_come_first, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tcase, everything_banned_still_gives_an_id, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tcase, not_finite_never_wins, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tcase, place_does_not_matter, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tcase, number_of_rows_does_not_matter, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tcase, likeliest_ids_are_the_models, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tcase, a_forced_id_is_scored, 0, KERNEL_TEST_DEVICES);
    tcase_add_test(tcase, refuses_what_it_cannot_do);
    suite_add_tcase(suite, tcase);
    return suite;
}

MESA_TEST_MAIN(sample_suite)
