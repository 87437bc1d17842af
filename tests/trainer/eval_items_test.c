// SPDX-License-Identifier: Apache-2.0
// Items, estimates, overlaps, made tasks, result files and the page: everything of an evaluation but the model.
// Expected numbers are worked out by hand; records and files are damaged one key at a time.
#include <string.h>

#include "engine/files.h"
#include "tests/check_main.h"
#include "tests/engine/temp_folder.h"
#include "trainer/commands.h"
#include "trainer/eval_overlap.h"
#include "trainer/eval_result.h"
#include "trainer/eval_task.h"

static const char demo[] = MESA_SOURCE_DIR "/deploy/models/demo";

// ----------------------------------------------------------------------------------------------------------- estimates

START_TEST(estimates_are_those_of_the_textbook) {
    double hits[] = {0, 1, 1, 0, 1, NAN}, loss[] = {2, 4, 9}, bytes[] = {1, 2, 3};
    trn_metric shares = {.value = hits, .items = 6}, ratio = {.value = loss, .weight = bytes, .items = 3};
    trn_estimate e = trn_metric_estimate(&shares, NULL, NULL, 0);
    ck_assert_int_eq(e.count, 5);
    ck_assert_double_eq_tol(e.mean, 0.6, 1e-12);
    ck_assert_double_eq_tol(e.error, sqrt(0.6 * 0.4 / 4), 1e-12); // binomial, n - 1
    e = trn_metric_estimate(&ratio, NULL, NULL, 0);               // 15 / 6; rests -0.5, -1, 1.5
    ck_assert_double_eq_tol(e.mean, 2.5, 1e-12);
    ck_assert_double_eq_tol(e.error, sqrt(1.5 * (0.25 + 1 + 2.25)) / 6, 1e-12);
    const bool left_out[] = {false, true, false, false, false, false};
    const int32_t group[] = {0, 1, 1, 0, 1, 1};
    ck_assert_double_eq_tol(trn_metric_estimate(&shares, left_out, NULL, 0).mean, 0.5, 1e-12);
    ck_assert_double_eq_tol(trn_metric_estimate(&shares, left_out, group, 1).mean, 1, 1e-12);
    ck_assert_int_eq(trn_metric_estimate(&shares, NULL, group, 7).count, 0);
    ck_assert(isnan(trn_metric_estimate(&shares, NULL, group, 7).mean));
}
END_TEST

START_TEST(differences_are_paired) {
    double a[] = {1, 1, 0, 1}, b[] = {0, 1, 0, 1}, weights[] = {1, 1, 1, 2};
    trn_metric x = {.value = a, .items = 4}, y = {.value = b, .items = 4};
    trn_estimate d;
    ck_assert(trn_metric_difference(&x, &y, NULL, &d));
    ck_assert_double_eq_tol(d.mean, 0.25, 1e-12); // differences 1, 0, 0, 0
    ck_assert_double_eq_tol(d.error, sqrt((0.75 * 0.75 + 3 * 0.0625) / 3 / 4), 1e-12);
    y.weight = weights;
    ck_assert(!trn_metric_difference(&x, &y, NULL, &d));
    x.items = 3;
    y.weight = NULL;
    ck_assert(!trn_metric_difference(&x, &y, NULL, &d));
}
END_TEST

// --------------------------------------------------------------------------------------------------------------- items

static trn_item read_item(const char *text) {
    trn_json *json = NULL;
    trn_item item;
    eng_error error = {0};
    ck_assert_int_eq(trn_json_parse(text, strlen(text), "t:1", &json, &error), ENG_OK);
    ck_assert_msg(trn_item_read(json, &item, &error) == ENG_OK, "%s", error.text);
    trn_json_free(json);
    return item;
}

START_TEST(spaces_go_with_the_choice) {
    static const struct {
        const char *context, *continuation, *left, *right;
    } wanted[] = {
        {"Answer:", "yes", "Answer:", " yes"},
        {"Answer: ", "yes", "Answer:", " yes"},
        {"Answer:\n", "yes", "Answer:\n", "yes"},
        {"Answer:", "\nyes", "Answer:", "\nyes"},
        {"", "yes", "", "yes"},
        {"a  ", "b", "a", "  b"},
    };
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        trn_item item = {0};
        ck_assert_int_eq(trn_item_add(&item, wanted[i].context, wanted[i].continuation, NULL), ENG_OK);
        ck_assert_str_eq(item.context[0], wanted[i].left);
        ck_assert_str_eq(item.continuation[0], wanted[i].right);
        ck_assert_int_eq(item.bytes[0], (int)strlen(wanted[i].continuation));
        trn_item_free(&item);
    }
}
END_TEST

START_TEST(records_of_every_kind) {
    trn_item item = read_item("{\"ctx\":\"Q:\",\"choices\":[\"a\",\"bc\"],\"gold\":1,\"uid\":\"u\"}");
    ck_assert(item.variants == 2 && item.gold == 1 && item.bytes[1] == 2 && item.generate == 0);
    ck_assert_str_eq(item.group, "u");
    trn_item_free(&item);
    item = read_item("{\"ctx\":\"\",\"choices\":[\"Ann ran\",\"Bob ran\"],\"gold\":0,\"ctxs\":[\"Ann\",\"Bob\"],"
                     "\"cont\":\"ran\"}");
    ck_assert_str_eq(item.context[1], "Bob");
    ck_assert_str_eq(item.continuation[1], " ran");
    trn_item_free(&item);
    item = read_item("{\"ctx\":\"The sky is\",\"target\":\"blue\"}");
    ck_assert(item.variants == 1 && !item.is_text);
    trn_item_free(&item);
    item = read_item("{\"ctx\":\"Ann ran.\",\"question\":\"Who?\",\"answer\":\"Ann\",\"aliases\":[\"Anna\"]}");
    ck_assert_str_eq(item.context[0], "Ann ran.\nQuestion: Who?\nAnswer:");
    ck_assert(item.generate > 0 && item.accepted_count == 2);
    trn_item_free(&item);
    item = read_item("{\"src_lang\":\"eng_Latn\",\"tgt_lang\":\"deu_Latn\",\"src\":\"Yes\",\"tgt\":\"Ja\"}");
    ck_assert_str_eq(item.context[0], "English: Yes\nGerman:");
    ck_assert_str_eq(item.group, "to German");
    trn_item_free(&item);
    item = read_item("{\"text\":\"a b\"}");
    ck_assert(item.is_text && item.bytes[0] == 3);
    trn_item_free(&item);
}
END_TEST

START_TEST(damaged_records_name_file_and_line) {
    static const char *const bad[][2] = {{"{\"ctx\":\"a\",\"choices\":[\"b\"],\"gold\":0}", "choices"},
                                         {"{\"ctx\":\"a\",\"choices\":[\"b\",\"c\"],\"gold\":2}", "gold"},
                                         {"{\"ctx\":\"a\",\"choices\":[\"b\",3],\"gold\":0}", "choices[1]"},
                                         {"{\"ctx\":\"a\",\"choices\":[\"b\",\"\"],\"gold\":0}", "empty"},
                                         {"{\"choices\":[\"b\",\"c\"],\"gold\":0}", "ctx"},
                                         {"{\"ctx\":\"a\",\"choices\":[\"b\",\"c\"],\"gold\":0,\"ctxs\":[\"a\"],"
                                          "\"cont\":\"c\"}",
                                          "ctxs"},
                                         {"{\"ctx\":1,\"target\":\"b\"}", "ctx"},
                                         {"{\"ctx\":\"a\",\"target\":\"\"}", "target"},
                                         {"{\"ctx\":\"a\",\"question\":\"b\"}", "answer"},
                                         {"{\"prompt\":\"a\"}", "none of the keys"},
                                         {"{\"text\":\"a\"}", "among other records"},
                                         {"{\"ctx\":\"a\",\"target\":\"b\"", "not a JSON object"},
                                         {"[1]", "not a JSON object"}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        char text[512];
        trn_task task;
        eng_error error = {0};
        snprintf(text, sizeof text, "{\"ctx\":\"a\",\"target\":\"b\"}\n\n%s\n", bad[i][0]);
        temp_write("bad.jsonl", text, strlen(text));
        ck_assert_int_eq(trn_task_open_file(temp_path("bad.jsonl"), &task, &error), ENG_FORMAT);
        ck_assert_msg(strstr(error.text, "bad.jsonl:3") && strstr(error.text, bad[i][1]), "%s", error.text);
    }
    trn_task task;
    temp_write("none.jsonl", "\n \n", 3);
    ck_assert_int_eq(trn_task_open_file(temp_path("none.jsonl"), &task, NULL), ENG_FORMAT);
    ck_assert_int_eq(trn_task_open_file(temp_path("missing.jsonl"), &task, NULL), ENG_NOT_FOUND);
}
END_TEST

// ------------------------------------------------------------------------------------------------------------- overlap

START_TEST(thirteen_words_in_a_row_overlap) {
    static const char *const items[] = {
        "One two, three four five six seven eight nine ten eleven twelve THIRTEEN fourteen",
        "one two three four five six seven eight nine ten eleven twelve", // too short to tell
        "zero two three four five six seven eight nine ten eleven twelve thirteen",
        "three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen"};
    static const char text[] =
        "So: one two three four five six seven eight nine ten eleven twelve thirteen and fourteen fifteen";
    trn_overlap *overlap = NULL;
    ck_assert_int_eq(trn_overlap_create(&overlap, NULL), ENG_OK);
    for (int i = 0; i < 4; i++)
        ck_assert_int_eq(trn_overlap_add(overlap, items[i], strlen(items[i]), NULL), ENG_OK);
    ck_assert_int_eq(trn_overlap_scan(overlap, text, strlen(text), NULL), ENG_OK);
    ck_assert(trn_overlap_marked(overlap, 0));
    for (int i = 1; i < 4; i++)
        ck_assert(!trn_overlap_marked(overlap, i));
    trn_overlap_free(overlap);
}
END_TEST

// ---------------------------------------------------------------------------------------------------------- made tasks

static int32_t tokens_of(const eng_tokenizer *tokenizer, const char *text) {
    int32_t *ids = NULL;
    size_t count = 0;
    ck_assert_int_eq(eng_tokenizer_encode(tokenizer, text, strlen(text), false, true, &ids, &count, NULL), ENG_OK);
    free(ids);
    return (int32_t)count;
}

static void check_made(const trn_task *task, const eng_tokenizer *tokenizer, int64_t length) {
    for (int64_t i = 0; i < 10; i++) {
        trn_item item, again;
        char group[48];
        eng_error error = {0};
        ck_assert_msg(trn_task_item(task, i, &item, &error) == ENG_OK, "%s", error.text);
        ck_assert_int_eq(trn_task_item(task, i, &again, &error), ENG_OK);
        ck_assert_int_eq(item.variants, 10);
        ck_assert_str_eq(item.context[0], again.context[0]);
        ck_assert_int_eq(item.gold, again.gold);
        snprintf(group, sizeof group, "depth %d-%d %%", (int)(i % 5) * 20, (int)(i % 5) * 20 + 20);
        ck_assert_str_eq(item.group, group);
        const char *value = item.accepted[0], *at = strstr(item.context[0], value);
        ck_assert(at && !strstr(at + 1, value) && strstr(item.continuation[item.gold], value));
        double depth = (double)(at - item.context[0]) / (double)strlen(item.context[0]);
        ck_assert(fabs(depth - 0.2 * (double)(i % 5) - 0.1) < 0.35);
        int32_t tokens = tokens_of(tokenizer, item.context[0]);
        ck_assert_msg(tokens <= length - 64 && tokens > length - 64 - 120, "%d of %d", tokens, (int)length);
        for (int v = 0; v < 10; v++)
            ck_assert(v == item.gold || strcmp(item.continuation[v], item.continuation[item.gold]) != 0);
        trn_item_free(&item);
        trn_item_free(&again);
    }
}

START_TEST(made_items_keep_their_length) {
    eng_tokenizer *tokenizer = NULL;
    trn_task task, other;
    ck_assert_int_eq(eng_tokenizer_open(demo, 0, &tokenizer, NULL), ENG_OK);
    for (int value = TRN_VALUE_NUMBER; value <= TRN_VALUE_UUID; value++) {
        trn_made_options options = {
            .tokenizer = tokenizer, .value = (trn_value_kind)value, .length = 700, .items = 10, .seed = 5};
        ck_assert_int_eq(trn_task_make_needles(&options, &task, NULL), ENG_OK);
        check_made(&task, tokenizer, 700);
        options.seed = 6;
        ck_assert_int_eq(trn_task_make_needles(&options, &other, NULL), ENG_OK);
        ck_assert_str_ne(task.digest, other.digest);
        trn_task_close(&task);
        trn_task_close(&other);
    }
    trn_made_options options = {.tokenizer = tokenizer, .length = 1500, .items = 10, .seed = 5};
    ck_assert_int_eq(trn_task_make_pairs(&options, &task, NULL), ENG_OK);
    check_made(&task, tokenizer, 1500);
    trn_task_close(&task);
    options.length = 128;
    ck_assert_int_eq(trn_task_make_pairs(&options, &task, NULL), ENG_TOO_LONG);
    options.length = 100000;
    temp_write("hay.txt", "One. Two.\n<|endoftext|>\nThree.\n", 31);
    options.haystack = temp_path("hay.txt");
    ck_assert_int_eq(trn_task_make_needles(&options, &task, NULL), ENG_TOO_LONG);
    eng_tokenizer_close(tokenizer);
}
END_TEST

// -------------------------------------------------------------------------------------------------------- result, page

static trn_result small_result(const char *name, double shift) {
    trn_result result = {.name = strdup(name),
                         .model = strdup("m"),
                         .digest = strdup("0123"),
                         .model_type = strdup("mesa_net"),
                         .device = strdup("cpu"),
                         .parameters = 5,
                         .weight_bytes = 7000000,
                         .state_bytes = 6,
                         .trained_length = -1};
    for (int steps = 1; steps <= 2; steps++) {
        trn_result_row row;
        ck_assert_int_eq(trn_result_row_create("task", 3, &row, NULL), ENG_OK);
        trn_metric *metric = trn_result_metric(&row, "bits_per_byte", true);
        for (int i = 0; i < 3; i++) {
            metric->value[i] = 1.5 * i + shift / steps;
            metric->weight[i] = i + 1;
        }
        trn_metric *position = trn_result_position(&row, 2);
        position->value[1] = 7.25;
        position->weight[1] = 2;
        row.group = malloc(sizeof *row.group * 3);
        row.overlap = calloc(3, sizeof *row.overlap);
        row.group[0] = row.group[2] = trn_result_group(&row, "g<1>");
        row.group[1] = -1;
        row.overlap[2] = true;
        snprintf(row.primary, sizeof row.primary, "bits_per_byte");
        snprintf(row.setting.name, sizeof row.setting.name, "steps %d", steps);
        row.setting.knobs = (eng_knobs){.cg_mode = ENG_CG_STEPS, .cg_max_steps = steps};
        row.figures = (trn_reading_figures){100, 200, {10, (uint64_t)(10 * steps), 1, steps}, 0.5};
        ck_assert_int_eq(trn_result_add(&result, &row, NULL), ENG_OK);
    }
    return result;
}

static void read_text(const char *name, char **text) {
    size_t length = 0;
    ck_assert_int_eq(eng_read_file(temp_path(name), 1 << 24, text, &length, NULL), ENG_OK);
}

START_TEST(results_are_read_as_written) {
    trn_result written = small_result("a", 0.1), read;
    eng_error error = {0};
    ck_assert_int_eq(trn_result_write(&written, temp_path("r.json"), &error), ENG_OK);
    ck_assert_msg(trn_result_read(temp_path("r.json"), &read, &error) == ENG_OK, "%s", error.text);
    ck_assert_int_eq(read.rows, 2);
    const trn_result_row *row = &read.row[1];
    ck_assert_str_eq(row->setting.name, "steps 2");
    ck_assert(row->setting.knobs.cg_mode == ENG_CG_STEPS && row->setting.knobs.cg_max_steps == 2);
    for (int i = 0; i < 3; i++) {
        ck_assert_double_eq(row->metric[0].value[i], written.row[1].metric[0].value[i]);
        ck_assert_double_eq(row->metric[0].weight[i], i + 1);
    }
    ck_assert(isnan(row->position[2].value[0]) && row->position[2].value[1] == 7.25 && row->position[1].items == 0);
    ck_assert(row->group[1] == -1 && row->group[2] == 0 && row->overlap[2] && !row->overlap[0]);
    ck_assert(isnan(row->metric[0].chance) && row->figures.solves.steps == 20 && read.trained_length == -1);
    ck_assert(read.weight_bytes == 7000000 && read.state_bytes == 6);
    trn_result_free(&read);
    trn_result_free(&written);
}
END_TEST

START_TEST(damaged_results_are_refused) {
    static const char *const damage[][3] = {
        {"\"format\":\"mesa-trainer eval\"", "\"format\":\"other\"", "format"},
        {"\"version\":1", "\"version\":2", "version"},
        {"\"items\":3", "\"items\":4", "values"},
        {"\"items\":3", "\"items\":0", "items"},
        {"\"overlap\":[2]", "\"overlap\":[3]", "overlap"},
        {"\"group\":[0,-1,0]", "\"group\":[0,-1,1]", "group"},
        {"\"primary\":\"bits_per_byte\"", "\"primary\":\"acc\"", "primary"},
        {"\"bucket\":2", "\"bucket\":24", "bucket"},
        {"\"cg_mode\":\"steps\"", "\"cg_mode\":\"step\"", "cg_mode"},
        {"\"weights\":[1,2,3]", "\"weights\":[1,2,\"3\"]", "weights[2]"},
        {"\"rows\":[", "\"rows\":[7,", "rows[0]"},
        {"\"weight_bytes\":7000000", "\"weight_bytes\":-2", "weight_bytes"},
    };
    trn_result written = small_result("a", 0.1), read;
    ck_assert_int_eq(trn_result_write(&written, temp_path("r.json"), NULL), ENG_OK);
    char *text = NULL;
    read_text("r.json", &text);
    for (size_t i = 0; i < sizeof damage / sizeof *damage; i++) {
        eng_error error = {0};
        const char *at = strstr(text, damage[i][0]);
        ck_assert_msg(at != NULL, "%s", damage[i][0]);
        char *bad = trn_format("%.*s%s%s", (int)(at - text), text, damage[i][1], at + strlen(damage[i][0]));
        temp_write("bad.json", bad, strlen(bad));
        ck_assert_int_eq(trn_result_read(temp_path("bad.json"), &read, &error), ENG_FORMAT);
        ck_assert_msg(strstr(error.text, "bad.json") && strstr(error.text, damage[i][2]), "%s", error.text);
        free(bad);
    }
    free(text);
    trn_result_free(&written);
}
END_TEST

// Two tasks of 400 items with a chance of a half; the teacher is right at three of four, in the second at every other.
static void write_scores(const char *path, const char *name, int right) {
    trn_result result = small_result(name, 0);
    for (int r = 0; r < 2; r++) {
        trn_result_row_free(&result.row[r]);
        ck_assert_int_eq(trn_result_row_create(r ? "noise" : "task", 400, &result.row[r], NULL), ENG_OK);
        trn_metric *metric = trn_result_metric(&result.row[r], "acc", false);
        for (int i = 0; i < 400; i++)
            metric->value[i] = r == 0 ? i % 8 < right : i % 2;
        metric->chance = 0.5;
        snprintf(result.row[r].primary, sizeof result.row[r].primary, "acc");
        snprintf(result.row[r].setting.name, sizeof result.row[r].setting.name, "default");
    }
    ck_assert_int_eq(trn_result_write(&result, path, NULL), ENG_OK);
    trn_result_free(&result);
}

START_TEST(recovery_is_measured_above_chance) {
    char teacher[512], student[512], page[512];
    double low = 0, high = 0;
    snprintf(teacher, sizeof teacher, "%s", temp_path("teacher.json"));
    snprintf(student, sizeof student, "%s", temp_path("student.json"));
    snprintf(page, sizeof page, "%s", temp_path("page.html"));
    write_scores(teacher, "teacher", 6); // 0.75
    write_scores(student, "student", 5); // 0.625
    const char *report[] = {"report", teacher, student, "--out", page, "--teacher", NULL};
    ck_assert_int_eq(trn_command_report(6, (char **)report), TRN_EXIT_OK);
    char *text = NULL;
    read_text("page.html", &text);
    const char *row = strstr(text, "<th>student</th><td>50.0 %</td>"); // "noise" does not count
    ck_assert(row != NULL);
    ck_assert_int_eq(sscanf(row, "<th>student</th><td>50.0 %%</td><td>%lf to %lf %%", &low, &high), 2);
    // the two differ in one item of eight: the error of the difference is 0.0166, that of the ratio about 0.08
    ck_assert(low > 25 && low < 42 && high > 56 && high < 72);
    ck_assert(strstr(row, "<td>83.3 %</td><td>1</td>") != NULL);
    free(text);
}
END_TEST

static int occurrences(const char *text, const char *part) {
    int count = 0;
    while ((text = strstr(text, part)) != NULL) {
        count++;
        text++;
    }
    return count;
}

START_TEST(the_page_needs_nothing_but_itself) {
    char a[512], b[512], page[512];
    trn_result first = small_result("a <b> & \"c\"", 0.1), second = small_result("second", 0.2);
    snprintf(a, sizeof a, "%s", temp_path("a.json"));
    snprintf(b, sizeof b, "%s", temp_path("b.json"));
    snprintf(page, sizeof page, "%s", temp_path("page.html"));
    ck_assert_int_eq(trn_result_write(&first, a, NULL), ENG_OK);
    ck_assert_int_eq(trn_result_write(&second, b, NULL), ENG_OK);
    const char *report[] = {"report", a, b, "--out", page, "--title", "T & t", NULL};
    ck_assert_int_eq(trn_command_report(7, (char **)report), TRN_EXIT_OK);
    char *text = NULL;
    read_text("page.html", &text);
    static const char *const there[] = {"<title>T &amp; t</title>",
                                        "a &lt;b&gt; &amp; &quot;c&quot;",
                                        "g&lt;1&gt;",
                                        "By solver steps: task",
                                        "Loss by position: task",
                                        "</html>",
                                        "prefers-color-scheme:dark",
                                        "7.00 MB",
                                        "1 in training data"};
    for (size_t i = 0; i < sizeof there / sizeof *there; i++)
        ck_assert_msg(strstr(text, there[i]) != NULL, "%s", there[i]);
    static const char *const absent[] = {"http:", "https:", "<script", "src=", "@import", "url(", "nan", "a <b>"};
    for (size_t i = 0; i < sizeof absent / sizeof *absent; i++)
        ck_assert_msg(strstr(text, absent[i]) == NULL, "%s", absent[i]);
    ck_assert(strstr(text, "0.8000 <span class=\"error\">")); // 4.8 / 6
    ck_assert_int_eq(occurrences(text, "<td>mesa_net</td>"), 2);
    free(text);
    const char *twice[] = {"report", a, a, "--out", page, NULL}; // one checkpoint, whatever the number of its files
    ck_assert_int_eq(trn_command_report(5, (char **)twice), TRN_EXIT_OK);
    read_text("page.html", &text);
    ck_assert_int_eq(occurrences(text, "<td>mesa_net</td>"), 1);
    free(text);
    ck_assert_int_eq(trn_command_report(3, (char **)report), TRN_EXIT_USAGE); // no --out
    report[2] = temp_path("missing.json");
    ck_assert_int_eq(trn_command_report(5, (char **)report), TRN_EXIT_USAGE);
    trn_result_free(&first);
    trn_result_free(&second);
}
END_TEST

static Suite *eval_items_suite(void) {
    Suite *suite = suite_create("eval_items");
    TCase *cases = tcase_create("items");
    tcase_add_checked_fixture(cases, temp_folder_make, temp_folder_remove);
    tcase_set_timeout(cases, 60);
    tcase_add_test(cases, estimates_are_those_of_the_textbook);
    tcase_add_test(cases, differences_are_paired);
    tcase_add_test(cases, spaces_go_with_the_choice);
    tcase_add_test(cases, records_of_every_kind);
    tcase_add_test(cases, damaged_records_name_file_and_line);
    tcase_add_test(cases, thirteen_words_in_a_row_overlap);
    tcase_add_test(cases, made_items_keep_their_length);
    tcase_add_test(cases, results_are_read_as_written);
    tcase_add_test(cases, damaged_results_are_refused);
    tcase_add_test(cases, the_page_needs_nothing_but_itself);
    tcase_add_test(cases, recovery_is_measured_above_chance);
    suite_add_tcase(suite, cases);
    return suite;
}

MESA_TEST_MAIN(eval_items_suite)
