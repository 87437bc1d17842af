// SPDX-License-Identifier: Apache-2.0
// Philox against the published known answers, normal variates against the C library and their moments.
//
// The C library's functions may differ in the last bit between machines, hence a tolerance there and none elsewhere.
#include "engine/random.h"

#include "tests/check_main.h"

START_TEST(known_answers) { // of the authors' Random123 distribution, philox4x32 with 10 rounds
    static const struct {
        uint64_t seed, stream, counter;
        uint32_t want[4];
    } answers[] = {
        {0, 0, 0, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {UINT64_MAX, UINT64_MAX, UINT64_MAX, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {0x299f31d0a4093822, 0x0370734413198a2e, 0x85a308d3243f6a88, {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (size_t i = 0; i < sizeof answers / sizeof answers[0]; i++) {
        uint32_t got[4];
        eng_philox(answers[i].seed, answers[i].stream, answers[i].counter, got);
        for (int j = 0; j < 4; j++)
            ck_assert_uint_eq(got[j], answers[i].want[j]);
    }
}
END_TEST

START_TEST(normals_are_box_muller) {
    enum { COUNT = 4000 };
    static float got[COUNT];
    eng_normals(77, 5, 0, COUNT, 2, got);
    for (int block = 0; block < COUNT / 4; block++) {
        uint32_t word[4];
        eng_philox(77, 5, (uint64_t)block, word);
        for (int pair = 0; pair < 4; pair += 2) {
            double radius = sqrt(-2 * log((word[pair] + 1.0) / 4294967296.0));
            double angle = 2 * 3.14159265358979323846 * (word[pair + 1] / 4294967296.0);
            ck_assert_double_eq_tol(got[4 * block + pair], 2 * radius * cos(angle), 1e-6);
            ck_assert_double_eq_tol(got[4 * block + pair + 1], 2 * radius * sin(angle), 1e-6);
        }
    }
}
END_TEST

START_TEST(normals_have_their_moments) {
    enum { COUNT = 1 << 18 };
    static float values[COUNT];
    eng_normals(1, 2, 0, COUNT, 1, values);
    double mean = 0, square = 0, fourth = 0;
    for (int i = 0; i < COUNT; i++) {
        double x = values[i];
        mean += x / COUNT;
        square += x * x / COUNT;
        fourth += x * x * x * x / COUNT;
    }
    ck_assert_double_eq_tol(mean, 0, 0.01);
    ck_assert_double_eq_tol(square, 1, 0.015);
    ck_assert_double_eq_tol(fourth, 3, 0.1);
}
END_TEST

START_TEST(an_element_depends_on_its_place_alone) {
    float whole[40], part[13], other[40];
    eng_normals(9, 1, 0, 40, 1, whole);
    eng_normals(9, 1, 8, 13, 1, part);
    mesa_assert_close(part, whole + 8, 13, 0, 0);
    eng_normals(9, 2, 0, 40, 1, other);
    int same = 0;
    for (int i = 0; i < 40; i++)
        same += whole[i] == other[i];
    ck_assert_int_le(same, 1);
}
END_TEST

static Suite *random_suite(void) {
    Suite *suite = suite_create("random");
    TCase *all = tcase_create("random");
    tcase_add_test(all, known_answers);
    tcase_add_test(all, normals_are_box_muller);
    tcase_add_test(all, normals_have_their_moments);
    tcase_add_test(all, an_element_depends_on_its_place_alone);
    suite_add_tcase(suite, all);
    return suite;
}

MESA_TEST_MAIN(random_suite)
