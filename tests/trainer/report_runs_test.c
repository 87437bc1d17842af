// SPDX-License-Identifier: Apache-2.0
// Runs on a page: what a log says is drawn, no spike is lost in long ones, every curve can be hidden, and what is no
// log is refused with its line.
#include "trainer/report_runs.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "tests/check_main.h"
#include "tests/engine/temp_folder.h"
#include "trainer/progress.h"

// Loss falls from 4 by steps / (steps + at); step `spike` is at 9, step `bad` was skipped.
static void write_log(const char *name, int steps, int spike, int bad) {
    char path[64];
    mkdir(temp_path(name), 0777);
    snprintf(path, sizeof path, "%s/log.jsonl", name);
    FILE *log = fopen(temp_path(path), "w");
    ck_assert_ptr_nonnull(log);
    for (int s = 1; s <= steps; s++) {
        double loss = s == spike ? 9 : 4.0 * steps / (steps + s);
        fprintf(log, "{\"step\":%d,\"lr\":0.001,\"tokens\":%d", s, 1000 * s);
        if (s == bad)
            fprintf(log, ",\"loss\":null,\"gradient_norm\":null,\"outcome\":\"not finite\",\"culprit\":\"weight w\"");
        else
            fprintf(log, ",\"loss\":%.17g,\"gradient_norm\":0.5", loss);
        if (s % 50 == 0)
            fprintf(log, ",\"valid_loss\":%g,\"valid_accuracy\":0.25", loss + 0.5);
        fprintf(log, ",\"seconds\":%d}\n", s);
    }
    fprintf(log, "{\"step\":%d,\"lo", steps + 1); // its writer is at it
    ck_assert_int_eq(fclose(log), 0);
}

static void read_run(const char *name, trn_report_run *run) {
    char path[512];
    eng_error error = {0};
    snprintf(path, sizeof path, "%s", temp_path(name));
    ck_assert(trn_report_is_run(path));
    ck_assert_msg(trn_report_run_read(path, run, &error) == ENG_OK, "%s", error.text);
}

static int count_of(const char *text, const char *what) {
    int count = 0;
    for (const char *at = text; (at = strstr(at, what)); at++)
        count++;
    return count;
}

START_TEST(a_log_is_read) {
    trn_report_run run;
    write_log("a", 100, 0, 60);
    read_run("a", &run);
    ck_assert_int_eq(run.log.entries, 100);
    ck_assert_int_eq(trn_log_bad_steps(&run.log), 1);
    ck_assert(run.log.entry[59].bad && isnan(run.log.entry[59].loss) && !run.log.entry[60].bad);
    ck_assert_double_eq(trn_log_last_loss(&run.log, 1), 2);
    ck_assert_int_eq(trn_log_last_valid(&run.log)->step, 100);
    trn_log_free(&run.log);
}
END_TEST

START_TEST(what_is_no_log_is_refused_with_its_line) {
    trn_log log;
    eng_error error = {0};
    static const char text[] = "{\"step\":1,\"tokens\":2}\n{\"step\":2}\n";
    temp_write("bad.jsonl", text, sizeof text - 1);
    ck_assert_int_eq(trn_log_read(temp_path("bad.jsonl"), &log, &error), ENG_FORMAT);
    ck_assert_msg(strstr(error.text, "bad.jsonl:2") && strstr(error.text, "tokens"), "%s", error.text);
    ck_assert_int_eq(trn_log_read(temp_path("none.jsonl"), &log, NULL), ENG_NOT_FOUND);
}
END_TEST

START_TEST(a_page_of_runs) {
    trn_report_run run[3];
    trn_page page;
    const trn_report_axes axes = {.log_x = _i == 1, .log_y = _i == 1};
    write_log("long", 5000, 3217, 0);
    write_log("short<b>", 120, 0, 7);
    read_run("long", &run[0]);
    read_run("short<b>", &run[1]);
    run[2] = (trn_report_run){.name = "empty"};
    trn_report_runs_shorten(run, 2);
    ck_assert_str_eq(run[0].name, "long");
    trn_page_begin(&page, "Runs");
    size_t body = page.length;
    ck_assert_int_eq(trn_report_runs(&page, run, 3, axes, NULL), ENG_OK);
    ck_assert(!page.failed);
    const char *text = page.text + body;
    ck_assert_int_eq(count_of(text, "<figure>"), 4);
    ck_assert_int_eq(count_of(text, "type=\"checkbox\""), 4 * 2);
    ck_assert_int_eq(count_of(text, "<label for="), 4 * 2);
    ck_assert_int_eq(count_of(text, "opacity=\".3\""), 4);         // raw losses and norms behind
    ck_assert_int_eq(count_of(text, "short&lt;b&gt;"), 1 + 4 * 3); // box, curve, legend
    ck_assert(!strstr(text, "<b>") && !strstr(text, "nan") && !strstr(text, "inf"));
    ck_assert(!strstr(page.text, "<script") && !strstr(page.text, "http"));
    ck_assert_ptr_nonnull(strstr(text, axes.log_y ? ">5<" : ">8<")); // the spike makes the axis that long
    ck_assert_ptr_nonnull(strstr(text, "<td class=\"bad\">1</td>"));
    ck_assert_ptr_nonnull(strstr(text, "class=\"wide runs\"")); // whose cells are narrower on a page of 1000 pixels
    ck_assert_ptr_nonnull(strstr(page.text, ".runs td{padding"));
    trn_page_free(&page);
    for (int r = 0; r < 3; r++)
        trn_log_free(&run[r].log);
}
END_TEST

// A run with a teacher beside one without: two more plots with a curve each, and a column.
START_TEST(a_teacher_is_drawn) {
    static const char log[] = "{\"step\":1,\"tokens\":9,\"loss\":3,\"divergence\":0.75,\"lr\":1,\"gradient_norm\":1}\n"
                              "{\"step\":2,\"tokens\":18,\"loss\":3,\"divergence\":0.5,\"lr\":1,\"gradient_norm\":1,"
                              "\"valid_loss\":2,\"valid_divergence\":0.625,\"valid_accuracy\":0.5,\"seconds\":1}\n";
    trn_report_run run[2];
    trn_page page;
    mkdir(temp_path("taught"), 0777);
    temp_write("taught/log.jsonl", log, sizeof log - 1);
    write_log("plain", 60, 0, 0);
    read_run("taught", &run[0]);
    read_run("plain", &run[1]);
    trn_page_begin(&page, "Runs");
    const size_t body = page.length;
    ck_assert_int_eq(trn_report_runs(&page, run, 2, (trn_report_axes){.log_x = false}, NULL), ENG_OK);
    const char *text = page.text + body;
    ck_assert_int_eq(count_of(text, "<figure>"), 6);
    ck_assert_int_eq(count_of(text, "type=\"checkbox\""), 4 * 2 + 2);
    ck_assert_ptr_nonnull(strstr(text, "<td>50.00</td><td>0.6250</td><td>0</td>"));
    ck_assert_ptr_nonnull(strstr(text, "<td>25.00</td><td>-</td><td>0</td>"));
    ck_assert_ptr_null(strstr(text, "nan"));
    trn_page_free(&page);
    for (int r = 0; r < 2; r++)
        trn_log_free(&run[r].log);
}
END_TEST

START_TEST(durations) {
    static const struct {
        double seconds;
        const char *text;
    } cases[] = {{-1, "0:00"},      {NAN, "0:00"},         {59.6, "1:00"},
                 {3599.4, "59:59"}, {360000, "100:00:00"}, {1e300, "999999:59:59"}};
    char text[24];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        ck_assert_str_eq(trn_duration(cases[i].seconds, text), cases[i].text);
}
END_TEST

static Suite *report_runs_suite(void) {
    Suite *suite = suite_create("report_runs");
    TCase *cases = tcase_create("report_runs");
    tcase_add_checked_fixture(cases, temp_folder_make, temp_folder_remove);
    tcase_add_test(cases, a_log_is_read);
    tcase_add_test(cases, what_is_no_log_is_refused_with_its_line);
    tcase_add_test(cases, a_teacher_is_drawn);
    tcase_add_test(cases, durations);
    tcase_add_loop_test(cases, a_page_of_runs, 0, 2);
    suite_add_tcase(suite, cases);
    return suite;
}

MESA_TEST_MAIN(report_runs_suite)
