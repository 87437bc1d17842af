// SPDX-License-Identifier: Apache-2.0
// Runs that are interrupted: going on is bit for bit as never stopping, the newest whole checkpoint is found, and a
// save that fails or is killed leaves the checkpoints before it whole.
#include <dirent.h>
#include <math.h>
#include <signal.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>

#include "engine/files.h"
#include "tests/check_main.h"
#include "tests/trainer/run_support.h"
#include "trainer/train_loop.h"

enum { STEPS = 9, CASES = 4 };

static const char plan[] = "[optim]\nlr = 0.003\nwarmup_steps = 4\n"
                           "[train]\nsteps = 9\nbatch_tokens = 128\nmicro_rows = 2\neval_every = 3\nsave_every = 4\n";

static void write_data(void) {
    const int lengths[] = {90, 33, 70, 12, 5};
    write_documents("d", lengths, 5);
}

static void tell(const char *dir, const char *why) {
    printf("passed over %s: %s\n", strrchr(dir, '/') + 1, why);
}

// Runs until `stop` steps in `folder`, from its newest checkpoint if it has one, as a process that ends there would.
static void train_until(const char *model, const char *more, const char *folder, int64_t stop) {
    trn_run run;
    trn_run_state state;
    eng_error error = {0};
    char *dir = NULL;
    bool has = false;
    mkdir(folder, 0777);
    open_run(write_run(model, "d", 32, more), &run);
    ck_assert_int_eq(trn_run_has_checkpoints(folder, &has, NULL), ENG_OK);
    if (has) {
        ck_assert_msg(trn_run_newest(folder, tell, &dir, &state, &error) == ENG_OK, "%s", error.text);
        ck_assert_msg(trn_run_resume(&run, dir, &state, &error) == ENG_OK, "%s", error.text);
        ck_assert_int_eq(trn_run_trim_log(folder, state.step, NULL), ENG_OK);
        free(dir);
    }
    run.config.steps = stop; // the schedule keeps the whole run's length
    trn_loop_options options = {.folder = folder};
    ck_assert_msg(trn_train_loop(&run, &options, &error) == ENG_OK, "%s", error.text);
    trn_run_close(&run);
}

static void copy_path(char *to, size_t size, const char *name) {
    snprintf(to, size, "%s", temp_path(name));
}

static char *read_whole(const char *folder, const char *name, size_t *length) {
    char *path = eng_join_path(folder, name), *data = NULL;
    eng_error error = {0};
    ck_assert_msg(eng_read_file(path, 1 << 26, &data, length, &error) == ENG_OK, "%s", error.text);
    free(path);
    return data;
}

static void same_file(const char *left, const char *right, const char *name) {
    size_t a = 0, b = 0;
    char *first = read_whole(left, name, &a), *second = read_whole(right, name, &b);
    ck_assert_msg(a == b && memcmp(first, second, a) == 0, "%s differs", name);
    free(first);
    free(second);
}

// The log's lines without their times and without validation, which a run that ends does at its last step.
static char *timeless_log(const char *folder) {
    size_t length = 0;
    char *text = read_whole(folder, "log.jsonl", &length), *to = text;
    for (char *line = text; *line;) {
        char *end = strchr(line, '\n'), *times = strstr(line, ",\"step_seconds\"");
        ck_assert(end && times && times < end);
        char *valid = strstr(line, ",\"valid_loss\""), *cut = valid && valid < times ? valid : times;
        memmove(to, line, (size_t)(cut - line));
        to += cut - line;
        *to++ = '\n';
        line = end + 1;
    }
    *to = '\0';
    return text;
}

START_TEST(going_on_is_never_having_stopped) {
    const struct {
        const char *model, *rounding;
    } cases[CASES] = {
        {mesa_model, "nearest"}, {hybrid_model, "nearest"}, {mesa_model, "stochastic"}, {mesa_model, "compensated"}};
    char straight[512], parts[512], more[512];
    snprintf(more, sizeof more, "[optim]\nrounding = %s\n%s", cases[_i].rounding, strchr(plan, '\n') + 1);
    copy_path(straight, sizeof straight, "straight");
    copy_path(parts, sizeof parts, "parts");
    write_data();
    train_until(cases[_i].model, more, straight, STEPS);
    const int64_t stops[] = {2, 4, 5, STEPS}; // in warm-up, at its last step, after it
    for (int i = 0; i < 4; i++)
        train_until(cases[_i].model, more, parts, stops[i]);
    same_file(straight, parts, "step-00000009/model.safetensors");
    same_file(straight, parts, "step-00000009/trainer/optim-0.safetensors");
    char *a = timeless_log(straight), *b = timeless_log(parts);
    ck_assert_msg(strcmp(a, b) == 0, "the logs differ: losses, rates, rows or solver steps"); // too long to print
    int lines = 0;
    for (const char *at = a; (at = strchr(at, '\n')); at++)
        lines++;
    ck_assert_int_eq(lines, STEPS);
    free(a);
    free(b);
}
END_TEST

// Goes on from the newest checkpoint of `folder` with a weight poisoned, as a fault of memory would.
static void train_poisoned(const char *folder, int64_t max_bad_steps, eng_error *error) {
    trn_run run;
    trn_run_state state;
    char *dir = NULL;
    open_run(write_run(mesa_model, "d", 32, plan), &run);
    run.config.max_bad_steps = max_bad_steps;
    ck_assert_int_eq(trn_run_newest(folder, tell, &dir, &state, NULL), ENG_OK);
    ck_assert_int_eq(state.step, 4);
    ck_assert_int_eq(trn_run_resume(&run, dir, &state, NULL), ENG_OK);
    ck_assert_int_eq(trn_run_trim_log(folder, state.step, NULL), ENG_OK);
    run.weights->master[0][7] = NAN;
    trn_loop_options options = {.folder = folder};
    ck_assert_int_eq(trn_train_loop(&run, &options, error), ENG_NUMERIC);
    free(dir);
    trn_run_close(&run);
}

START_TEST(bad_steps_leave_the_last_good_checkpoint) {
    char straight[512], broken[512];
    eng_error error = {0};
    copy_path(straight, sizeof straight, "straight");
    copy_path(broken, sizeof broken, "broken");
    write_data();
    train_until(mesa_model, plan, straight, STEPS);
    train_until(mesa_model, plan, broken, 4);
    train_poisoned(broken, 2, &error);
    ck_assert_msg(strstr(error.text, "step 6") && strstr(error.text, "weight model.embeddings.weight"), "%s",
                  error.text);
    size_t length = 0;
    char *log = read_whole(broken, "log.jsonl", &length);
    ck_assert_ptr_nonnull(strstr(log, "\"culprit\":\"weight model.embeddings.weight\",\"bad_steps\":2"));
    free(log);
    error = (eng_error){0};
    train_poisoned(broken, 0, &error); // goes on, up to where it would be saved
    ck_assert_msg(strstr(error.text, "step 8: not saved: weight model.embeddings.weight"), "%s", error.text);
    train_until(mesa_model, plan, broken, STEPS);
    same_file(straight, broken, "step-00000009/model.safetensors");
    same_file(straight, broken, "step-00000009/trainer/optim-0.safetensors");
}
END_TEST

START_TEST(what_a_killed_run_logged_beyond_its_checkpoint_goes) {
    char folder[512];
    copy_path(folder, sizeof folder, "run");
    mkdir(folder, 0777);
    static const char log[] =
        "{\"step\":1,\"loss\":3}\n{\"step\":2,\"loss\":3}\n{\"step\":3,\"loss\":3}\n{\"step\":4,\"lo";
    temp_write("run/log.jsonl", log, sizeof log - 1);
    ck_assert_int_eq(trn_run_trim_log(folder, 2, NULL), ENG_OK);
    ck_assert(temp_holds("run/log.jsonl", "{\"step\":1,\"loss\":3}\n{\"step\":2,\"loss\":3}\n"));
    ck_assert_int_eq(trn_run_trim_log(folder, 7, NULL), ENG_OK);
    ck_assert(temp_holds("run/log.jsonl", "{\"step\":1,\"loss\":3}\n{\"step\":2,\"loss\":3}\n"));
    ck_assert_int_eq(trn_run_trim_log(temp_folder(), 7, NULL), ENG_OK); // none there
}
END_TEST

// -------------------------------------------------------------------------------------------------------------- newest

static void save_at(trn_run *run, const char *folder, int64_t step) {
    eng_error error = {0};
    run->state.step = step;
    ck_assert_msg(trn_run_checkpoint(run, folder, &error) == ENG_OK, "%s", error.text);
}

static int64_t newest(const char *folder) {
    char *dir = NULL;
    trn_run_state state = {.step = -1};
    if (trn_run_newest(folder, tell, &dir, &state, NULL) != ENG_OK)
        return -1;
    free(dir);
    return state.step;
}

static void damage(const char *name, size_t at) {
    FILE *file = fopen(temp_path(name), "r+b");
    ck_assert_ptr_nonnull(file);
    ck_assert_int_eq(fseek(file, (long)at, SEEK_SET), 0);
    int byte = fgetc(file);
    ck_assert_int_eq(fseek(file, (long)at, SEEK_SET), 0);
    fputc(byte ^ 1, file);
    ck_assert_int_eq(fclose(file), 0);
}

START_TEST(the_newest_whole_checkpoint_is_found) {
    trn_run run;
    const char *folder = temp_folder();
    write_data();
    open_run(write_run(mesa_model, "d", 32, plan), &run);
    ck_assert_int_eq(newest(folder), -1);
    save_at(&run, folder, 90);
    ck_assert_int_eq(newest(folder), 90);
    mkdir(temp_path("step-00000200"), 0777);      // empty
    mkdir(temp_path(".step-00000100.tmp"), 0777); // left behind
    mkdir(temp_path("step-latest"), 0777);
    ck_assert_int_eq(symlink("step-00009999", temp_path("step-00009998")), 0); // dangling
    temp_write("step-00000300", "x", 1);
    ck_assert_int_eq(newest(folder), 90);
    save_at(&run, folder, 999);
    save_at(&run, folder, 1000);
    ck_assert_int_eq(rename(temp_path("step-00001000"), temp_path("step-1000")), 0); // by number, not by text
    ck_assert_int_eq(rename(temp_path("step-00000999"), temp_path("step-999")), 0);
    ck_assert_int_eq(newest(folder), 1000);
    damage("step-1000/model.safetensors", 5000);
    ck_assert_int_eq(newest(folder), 999);
    ck_assert_int_eq(unlink(temp_path("step-999/trainer/optim-0.safetensors")), 0);
    ck_assert_int_eq(newest(folder), 90);
    damage("step-00000090/trainer/state.json", 0);
    ck_assert_int_eq(newest(folder), -1);
    ck_assert_int_eq(trn_run_clean(folder, NULL), ENG_OK);
    ck_assert(!temp_exists(".step-00000100.tmp"));
    trn_run_close(&run);
}
END_TEST

START_TEST(old_checkpoints_go_when_asked) {
    trn_run run;
    char folder[512];
    copy_path(folder, sizeof folder, "run");
    mkdir(folder, 0777);
    write_data();
    open_run(write_run(mesa_model, "d", 32, plan), &run);
    run.config.keep = 2;
    for (int64_t step = 8; step <= 12; step++)
        save_at(&run, folder, step);
    ck_assert(!temp_exists("run/step-00000010") && temp_exists("run/step-00000011") &&
              temp_exists("run/step-00000012"));
    trn_run_close(&run);
}
END_TEST

START_TEST(another_order_of_data_is_refused) {
    trn_run run;
    const char *folder = temp_folder();
    write_data();
    open_run(write_run(mesa_model, "d", 32, plan), &run);
    save_at(&run, folder, 3);
    trn_run_close(&run);
    const char *const changes[] = {
        "train.seed=2",         "train.batch_tokens=64",     "data.context=16",
        "model.hidden_size=64", "model.num_hidden_layers=1", "model.tie_word_embeddings=false"};
    for (int i = 0; i < 6; i++) {
        trn_run_config config;
        trn_run_state state;
        eng_error error = {0};
        char *dir = NULL;
        ck_assert_int_eq(trn_run_config_read(temp_path("run.ini"), &changes[i], 1, &config, NULL), ENG_OK);
        ck_assert_msg(trn_run_open(&config, NULL, &run, &error) == ENG_OK, "%s", error.text);
        ck_assert_int_eq(trn_run_newest(folder, tell, &dir, &state, NULL), ENG_OK);
        ck_assert_msg(trn_run_resume(&run, dir, &state, &error) == ENG_INVALID, "%s was accepted", changes[i]);
        free(dir);
        trn_run_close(&run);
    }
}
END_TEST

START_TEST(a_warm_start_takes_weights_alone) {
    char folder[512], more[1024];
    copy_path(folder, sizeof folder, "first");
    write_data();
    train_until(mesa_model, plan, folder, 5);
    snprintf(more, sizeof more, "%swarm_start = %s/step-00000005\n", plan, folder);
    trn_run warm, cold;
    open_run(write_run(mesa_model, "d", 32, more), &warm);
    ck_assert(warm.state.step == 0 && warm.optimizer.updates == 0 && warm.optimizer.v[0] == 0);
    open_run(write_run(mesa_model, "d", 32, plan), &cold);
    trn_run_state state;
    char *dir = NULL;
    ck_assert_int_eq(trn_run_newest(folder, tell, &dir, &state, NULL), ENG_OK);
    ck_assert_int_eq(trn_run_resume(&cold, dir, &state, NULL), ENG_OK);
    ck_assert_mem_eq(warm.weights->masters, cold.weights->masters, sizeof(float) * (size_t)cold.weights->count);
    free(dir);
    trn_run_close(&warm);
    trn_run_close(&cold);
}
END_TEST

// ------------------------------------------------------------------------------------------------------- failing saves

START_TEST(a_full_disk_leaves_the_checkpoint_before) {
    trn_run run;
    char folder[512];
    copy_path(folder, sizeof folder, "run");
    mkdir(folder, 0777);
    write_data();
    open_run(write_run(mesa_model, "d", 32, plan), &run);
    save_at(&run, folder, 4);
    limit_file_size(60000); // less than the moments, and less than the weights
    run.state.step = 5;
    eng_error error = {0};
    ck_assert_int_eq(trn_run_checkpoint(&run, folder, &error), ENG_IO);
    ck_assert(error.text[0] != '\0');
    ck_assert_int_eq(newest(folder), 4);
    ck_assert(!temp_exists("run/step-00000005") && !temp_exists("run/.step-00000005.tmp"));
    trn_run_close(&run);
}
END_TEST

static bool holds_hidden(const char *folder) {
    DIR *list = opendir(folder);
    bool found = false;
    ck_assert_ptr_nonnull(list);
    for (struct dirent *entry; (entry = readdir(list));)
        found = found || strstr(entry->d_name, ".tmp");
    closedir(list);
    return found;
}

static void save_forever(const char *folder) {
    trn_run run;
    open_run(temp_path("run.ini"), &run);
    for (int64_t step = 1;; step++)
        save_at(&run, folder, step);
}

START_TEST(a_kill_while_saving_leaves_whole_checkpoints) {
    char folder[512];
    int64_t before = 0;
    copy_path(folder, sizeof folder, "run");
    mkdir(folder, 0777);
    write_data();
    write_run(mesa_model, "d", 32, plan);
    int interrupted = 0;
    for (int attempt = 0; attempt < 12; attempt++) {
        pid_t child = fork();
        ck_assert_int_ge(child, 0);
        if (child == 0)
            save_forever(folder);
        while (newest(folder) <= before && waitpid(child, NULL, WNOHANG) == 0) // until it has saved once more
            nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL);
        nanosleep(&(struct timespec){.tv_nsec = 1000000L * (attempt * 7 % 12)}, NULL);
        ck_assert_int_eq(kill(child, SIGKILL), 0);
        ck_assert_int_eq(waitpid(child, NULL, 0), child);
        int64_t now = newest(folder);
        ck_assert_msg(now >= 1, "nothing whole is left");
        interrupted += holds_hidden(folder);
        ck_assert_int_eq(eng_remove_tree(folder, NULL), ENG_OK);
        mkdir(folder, 0777);
    }
    printf("%d of 12 kills left a checkpoint half written\n", interrupted);
}
END_TEST

static Suite *resume_suite(void) {
    Suite *suite = suite_create("resume");
    TCase *cases = tcase_create("runs");
    tcase_add_checked_fixture(cases, temp_folder_make, temp_folder_remove);
    tcase_set_timeout(cases, 120);
    tcase_add_loop_test(cases, going_on_is_never_having_stopped, 0, CASES);
    tcase_add_test(cases, bad_steps_leave_the_last_good_checkpoint);
    tcase_add_test(cases, what_a_killed_run_logged_beyond_its_checkpoint_goes);
    tcase_add_test(cases, the_newest_whole_checkpoint_is_found);
    tcase_add_test(cases, old_checkpoints_go_when_asked);
    tcase_add_test(cases, another_order_of_data_is_refused);
    tcase_add_test(cases, a_warm_start_takes_weights_alone);
    tcase_add_test(cases, a_full_disk_leaves_the_checkpoint_before);
    tcase_add_test(cases, a_kill_while_saving_leaves_whole_checkpoints);
    suite_add_tcase(suite, cases);
    return suite;
}

MESA_TEST_MAIN(resume_suite)
