// SPDX-License-Identifier: Apache-2.0
// Whole-file reads, files and folders that appear at once or not at all, digests, and the error texts of all of them.
//
// What matters is what stands on the disk after a failure: the old content, whole, and nothing temporary.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "engine/files.h"

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "engine/digest.h"
#include "tests/check_main.h"
#include "tests/engine/temp_folder.h"

START_TEST(status_texts) {
    ck_assert_str_eq(eng_status_text(ENG_OK), "ok");
    ck_assert_str_eq(eng_status_text(ENG_INTERNAL), "internal fault");
    ck_assert_str_eq(eng_status_text((eng_status)77), "unknown status");
}
END_TEST

START_TEST(first_error_wins) {
    eng_error error = {0};
    ck_assert_int_eq(eng_fail(&error, ENG_IO, "first %d", 1), ENG_IO);
    ck_assert_int_eq(eng_fail(&error, ENG_FORMAT, "second"), ENG_FORMAT);
    ck_assert_int_eq(error.code, ENG_IO);
    ck_assert_str_eq(error.text, "first 1");
    ck_assert_int_eq(eng_fail(NULL, ENG_FULL, "nobody listens"), ENG_FULL);
}
END_TEST

START_TEST(error_text_is_printable) {
    const struct {
        const char *from, *to;
    } cases[] = {
        {"plain \xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80", "plain \xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80"},
        {"a\nb\rc\x1b[0m\x7f", "a?b?c?[0m?"},
        {"\xff\xc0\xaf", "???"},
        {"\xed\xa0\x80", "???"},
        {"\xf4\x90\x80\x80", "????"},
        {"\xe2\x82", "??"},
        {"\xc2\x85", "??"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        eng_error error = {0};
        eng_fail(&error, ENG_IO, "%s", cases[i].from);
        ck_assert_str_eq(error.text, cases[i].to);
    }
    char text[400] = "x";
    for (size_t i = 1; i + 2 < sizeof text; i += 2)
        memcpy(text + i, "\xc3\xa9", 3);
    eng_error error = {0};
    eng_fail(&error, ENG_IO, "%s", text);
    ck_assert_uint_eq(strlen(error.text), sizeof error.text - 1);
    ck_assert_int_eq(strncmp(error.text, text, sizeof error.text - 1), 0);
    eng_error cut = {0};
    eng_fail(&cut, ENG_IO, "%s", text + 1);
    ck_assert_int_eq(cut.text[sizeof cut.text - 2], '?');
}
END_TEST

START_TEST(joins_paths) {
    const char *const cases[][3] = {{"a", "b", "a/b"}, {"a/", "b", "a/b"}, {"/", "b", "/b"}, {"", "b", "b"}};
    for (int i = 0; i < 4; i++) {
        char *path = eng_join_path(cases[i][0], cases[i][1]);
        ck_assert_str_eq(path, cases[i][2]);
        free(path);
    }
}
END_TEST

START_TEST(reads_whole_files) {
    char *data;
    size_t length;
    temp_write("file", "one\0two", 7);
    ck_assert_int_eq(eng_read_file(temp_path("file"), 7, &data, &length, NULL), ENG_OK);
    ck_assert_uint_eq(length, 7);
    ck_assert_int_eq(memcmp(data, "one\0two", 8), 0);
    free(data);
    eng_error error = {0};
    ck_assert_int_eq(eng_read_file(temp_path("file"), 6, &data, &length, &error), ENG_TOO_LONG);
    ck_assert_ptr_null(data);
    ck_assert_ptr_nonnull(strstr(error.text, "file: 7 bytes, the limit is 6"));
    temp_write("empty", "", 0);
    ck_assert_int_eq(eng_read_file(temp_path("empty"), 0, &data, &length, NULL), ENG_OK);
    ck_assert_uint_eq(length, 0);
    ck_assert_str_eq(data, "");
    free(data);
    ck_assert_int_eq(symlink("file", temp_path("link")), 0);
    ck_assert_int_eq(eng_read_file(temp_path("link"), 7, &data, &length, NULL), ENG_OK);
    free(data);
}
END_TEST

START_TEST(refuses_all_but_regular_files) {
    char *data;
    size_t length;
    ck_assert_int_eq(eng_read_file(temp_path("absent"), 9, &data, &length, NULL), ENG_NOT_FOUND);
    ck_assert_int_eq(eng_read_file(temp_folder(), 9, &data, &length, NULL), ENG_INVALID);
    ck_assert_int_eq(eng_read_file("/dev/zero", 9, &data, &length, NULL), ENG_INVALID);
    ck_assert_int_eq(mkfifo(temp_path("pipe"), 0600), 0);
    ck_assert_int_eq(eng_read_file(temp_path("pipe"), 9, &data, &length, NULL), ENG_INVALID); // and does not wait
    // A sparse file of 1 TiB is refused by its size, not by a failed allocation.
    temp_write("huge", "", 0);
    ck_assert_int_eq(truncate(temp_path("huge"), (off_t)1 << 40), 0);
    ck_assert_int_eq(eng_read_file(temp_path("huge"), 1 << 20, &data, &length, NULL), ENG_TOO_LONG);
}
END_TEST

START_TEST(writes_files) {
    ck_assert_int_eq(eng_write_file_atomic(temp_path("new"), "first", 5, NULL), ENG_OK);
    ck_assert(temp_holds("new", "first"));
    ck_assert_int_eq(eng_write_file_atomic(temp_path("new"), "", 0, NULL), ENG_OK);
    ck_assert(temp_holds("new", ""));
    ck_assert(!temp_exists("new.tmp"));
    ck_assert_int_eq(eng_write_file_atomic(temp_path("no/folder"), "x", 1, NULL), ENG_NOT_FOUND);
}
END_TEST

START_TEST(stale_temporary_is_replaced_not_followed) {
    temp_write("precious", "precious", 8);
    ck_assert_int_eq(symlink("precious", temp_path("new.tmp")), 0);
    ck_assert_int_eq(eng_write_file_atomic(temp_path("new"), "x", 1, NULL), ENG_OK);
    ck_assert(temp_holds("precious", "precious"));
    ck_assert(temp_holds("new", "x"));
    ck_assert(!temp_exists("new.tmp"));
}
END_TEST

// As root, whoever writes to /dev/null would leave a file there.
START_TEST(only_files_are_replaced) {
    struct stat facts;
    ck_assert_int_eq(mkfifo(temp_path("pipe"), 0600), 0);
    ck_assert_int_eq(mkdir(temp_path("folder"), 0700), 0);
    ck_assert_int_eq(symlink("pipe", temp_path("link")), 0);
    static const char *const names[] = {"pipe", "folder", "link"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        eng_error error = {0};
        ck_assert_int_eq(eng_write_file_atomic(temp_path(names[i]), "x", 1, &error), ENG_INVALID);
        ck_assert_ptr_nonnull(strstr(error.text, names[i]));
        ck_assert_int_eq(lstat(temp_path(names[i]), &facts), 0);
        ck_assert(!S_ISREG(facts.st_mode));
    }
    ck_assert(!temp_exists("pipe.tmp"));
}
END_TEST

START_TEST(failed_writes_leave_the_old_file) {
    ck_assert_int_eq(eng_write_file_atomic(temp_path("file"), "old", 3, NULL), ENG_OK);
    eng_output *output;
    ck_assert_int_eq(eng_output_open(temp_path("file"), &output, NULL), ENG_OK);
    ck_assert_int_eq(eng_output_write(output, "half", 4, NULL), ENG_OK);
    ck_assert(temp_holds("file", "old"));
    eng_output_discard(output);
    eng_output_discard(NULL);
    ck_assert(!temp_exists("file.tmp"));
    // Meanwhile the name came to belong to a folder: the last step fails.
    ck_assert_int_eq(eng_output_open(temp_path("folder"), &output, NULL), ENG_OK);
    ck_assert_int_eq(mkdir(temp_path("folder"), 0700), 0);
    ck_assert_int_eq(eng_output_commit(output, NULL), ENG_IO);
    ck_assert(!temp_exists("folder.tmp"));
    limit_file_size(1000);
    static const char big[5000];
    eng_error error = {0};
    ck_assert_int_eq(eng_write_file_atomic(temp_path("file"), big, sizeof big, &error), ENG_IO);
    ck_assert_ptr_nonnull(strstr(error.text, "file.tmp: cannot write"));
    ck_assert(temp_holds("file", "old"));
    ck_assert(!temp_exists("file.tmp"));
}
END_TEST

START_TEST(read_at_names_the_end) {
    temp_write("file", "0123456789", 10);
    int fd;
    uint64_t size;
    ck_assert_int_eq(eng_open_regular(temp_path("file"), &fd, &size, NULL), ENG_OK);
    ck_assert_uint_eq(size, 10);
    char bytes[10];
    ck_assert_int_eq(eng_read_at(fd, "file", 3, bytes, 7, NULL), ENG_OK);
    ck_assert_int_eq(memcmp(bytes, "3456789", 7), 0);
    eng_error error = {0};
    ck_assert_int_eq(eng_read_at(fd, "file", 8, bytes, 7, &error), ENG_IO);
    ck_assert_str_eq(error.text, "file: ends at byte 10, 5 more were expected");
    close(fd);
}
END_TEST

// Makes, fills and commits a folder with one file of this text and one deeper one.
static eng_status commit_folder(const char *name, const char *text, eng_error *error) {
    char *temp, path[600];
    eng_status status = eng_make_temp_dir(temp_path(name), &temp, error);
    if (status != ENG_OK)
        return status;
    snprintf(path, sizeof path, "%s/deeper", temp);
    ck_assert_int_eq(mkdir(path, 0755), 0);
    snprintf(path, sizeof path, "%s/deeper/file", temp);
    ck_assert_int_eq(eng_write_file_atomic(path, text, strlen(text), NULL), ENG_OK);
    status = eng_commit_temp_dir(temp, temp_path(name), error);
    if (status != ENG_OK)
        ck_assert_int_eq(eng_remove_tree(temp, NULL), ENG_OK);
    free(temp);
    return status;
}

static int entries_in(const char *path) {
    DIR *folder = opendir(path);
    int count = 0;
    while (folder && readdir(folder))
        count++;
    if (folder)
        closedir(folder);
    return count - 2;
}

START_TEST(commits_folders) {
    ck_assert_int_eq(commit_folder("step", "one", NULL), ENG_OK);
    ck_assert(temp_holds("step/deeper/file", "one"));
    ck_assert_int_eq(commit_folder("step///", "two", NULL), ENG_OK);
    ck_assert(temp_holds("step/deeper/file", "two"));
    ck_assert_int_eq(entries_in(temp_folder()), 1);
}
END_TEST

START_TEST(temp_folder_is_hidden_beside_its_place) {
    char *temp;
    ck_assert_int_eq(eng_make_temp_dir(temp_path("step"), &temp, NULL), ENG_OK);
    ck_assert_str_eq(temp, temp_path(".step.tmp"));
    temp_write(".step.tmp/left-over", "x", 1);
    free(temp);
    ck_assert_int_eq(eng_make_temp_dir(temp_path("step"), &temp, NULL), ENG_OK);
    ck_assert_int_eq(entries_in(temp), 0);
    free(temp);
    const char *const nameless[] = {"/", ".", "..", "a/..", "a/.", ""};
    for (int i = 0; i < 6; i++) {
        ck_assert_int_eq(eng_make_temp_dir(nameless[i], &temp, NULL), ENG_INVALID);
        ck_assert_ptr_null(temp);
    }
    ck_assert_int_eq(eng_make_temp_dir(temp_path("no/such/step"), &temp, NULL), ENG_NOT_FOUND);
}
END_TEST

START_TEST(relative_places_work) {
    ck_assert_int_eq(chdir(temp_folder()), 0);
    char *temp;
    ck_assert_int_eq(eng_make_temp_dir("step", &temp, NULL), ENG_OK);
    ck_assert_int_eq(eng_commit_temp_dir(temp, "step", NULL), ENG_OK);
    free(temp);
    ck_assert_int_eq(eng_write_file_atomic("file", "x", 1, NULL), ENG_OK);
    ck_assert(temp_holds("file", "x"));
    ck_assert_int_eq(entries_in("."), 2);
}
END_TEST

START_TEST(failed_commits_leave_the_old) {
    temp_write("step", "a file", 6);
    ck_assert_int_eq(commit_folder("step", "new", NULL), ENG_INVALID);
    ck_assert(temp_holds("step", "a file"));
    ck_assert_int_eq(commit_folder("other", "old", NULL), ENG_OK);
    ck_assert_int_eq(eng_commit_temp_dir(temp_path("absent"), temp_path("other"), NULL), ENG_NOT_FOUND);
    ck_assert(temp_holds("other/deeper/file", "old"));
    ck_assert_int_eq(entries_in(temp_folder()), 2);
}
END_TEST

START_TEST(removal_follows_no_link) {
    ck_assert_int_eq(mkdir(temp_path("outside"), 0700), 0);
    temp_write("outside/kept", "kept", 4);
    ck_assert_int_eq(mkdir(temp_path("tree"), 0700), 0);
    ck_assert_int_eq(symlink("../outside", temp_path("tree/link")), 0);
    ck_assert_int_eq(eng_remove_tree(temp_path("tree"), NULL), ENG_OK);
    ck_assert(!temp_exists("tree"));
    ck_assert(temp_holds("outside/kept", "kept"));
    ck_assert_int_eq(eng_remove_tree(temp_path("tree"), NULL), ENG_OK);
}
END_TEST

typedef struct watch {
    char folder[512];
    atomic_bool stop;
    atomic_long looks;
    long faults;
} watch;

// Whether the folder is there with its file. A folder that lost its file only after it lost its name is no fault.
static bool stands_whole(const char *path) {
    int folder = open(path, O_RDONLY | O_DIRECTORY);
    if (folder < 0)
        return false;
    bool whole = faccessat(folder, "deeper/file", R_OK, 0) == 0;
    struct stat opened, named;
    if (!whole)
        whole = fstat(folder, &opened) == 0 && stat(path, &named) == 0 && opened.st_ino != named.st_ino;
    close(folder);
    return whole;
}

static void *keep_looking(void *context) {
    watch *seen = context;
    while (!atomic_load(&seen->stop)) {
        seen->faults += !stands_whole(seen->folder);
        atomic_fetch_add(&seen->looks, 1);
    }
    return NULL;
}

START_TEST(name_points_to_a_whole_folder_at_each_moment) {
    ck_assert_int_eq(commit_folder("step", "old", NULL), ENG_OK);
    watch seen = {0};
    strcpy(seen.folder, temp_path("step"));
    pthread_t thread;
    ck_assert_int_eq(pthread_create(&thread, NULL, keep_looking, &seen), 0);
    for (int i = 0; i < 200 || atomic_load(&seen.looks) == 0; i++)
        ck_assert_int_eq(commit_folder("step", "new", NULL), ENG_OK);
    atomic_store(&seen.stop, true);
    pthread_join(thread, NULL);
    ck_assert_int_eq(seen.faults, 0);
}
END_TEST

START_TEST(killed_writer_leaves_a_whole_folder) {
    ck_assert_int_eq(commit_folder("step", "old", NULL), ENG_OK);
    for (int i = 0; i < 30; i++) {
        pid_t child = fork();
        ck_assert_int_ge(child, 0);
        while (child == 0) {
            if (commit_folder("step", "new", NULL) != ENG_OK)
                _exit(1);
        }
        usleep(500 + 331 * (unsigned)i);
        ck_assert_int_eq(kill(child, SIGKILL), 0);
        int state;
        ck_assert_int_eq(waitpid(child, &state, 0), child);
        ck_assert(WIFSIGNALED(state));
        ck_assert(temp_holds("step/deeper/file", "old") || temp_holds("step/deeper/file", "new"));
    }
    ck_assert_int_eq(commit_folder("step", "end", NULL), ENG_OK);
    ck_assert(temp_holds("step/deeper/file", "end"));
    ck_assert_int_eq(entries_in(temp_folder()), 1);
}
END_TEST

static void expect_digest(const unsigned char *digest, const char *hex) {
    char text[ENG_DIGEST_HEX];
    eng_digest_hex(digest, text);
    ck_assert_str_eq(text, hex);
}

static const char digest_empty[] = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
static const char digest_abc[] = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
static const char digest_million_a[] = "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0";

START_TEST(digests_match_fips_180) {
    unsigned char out[ENG_DIGEST_BYTES];
    ck_assert_int_eq(eng_digest_bytes("abc", 3, out), ENG_OK);
    expect_digest(out, digest_abc);
    eng_digest *digest;
    ck_assert_int_eq(eng_digest_begin(&digest), ENG_OK);
    ck_assert_int_eq(eng_digest_add(digest, "a", 1), ENG_OK);
    ck_assert_int_eq(eng_digest_add(digest, NULL, 0), ENG_OK);
    ck_assert_int_eq(eng_digest_add(digest, "bc", 2), ENG_OK);
    eng_digest_end(digest, out);
    expect_digest(out, digest_abc);
    ck_assert_int_eq(eng_digest_begin(&digest), ENG_OK);
    eng_digest_free(digest);
    eng_digest_free(NULL);
}
END_TEST

START_TEST(digests_files) {
    unsigned char out[ENG_DIGEST_BYTES];
    temp_write("empty", "", 0);
    ck_assert_int_eq(eng_digest_file(temp_path("empty"), out, NULL), ENG_OK);
    expect_digest(out, digest_empty);
    char *letters = malloc(1000000);
    memset(letters, 'a', 1000000);
    temp_write("million", letters, 1000000);
    ck_assert_int_eq(eng_digest_file(temp_path("million"), out, NULL), ENG_OK);
    expect_digest(out, digest_million_a);
    free(letters);
    // More than one piece: the same as in one go.
    size_t size = (3 << 20) + 5;
    unsigned char *bytes = malloc(size), whole[ENG_DIGEST_BYTES];
    for (size_t i = 0; i < size; i++)
        bytes[i] = (unsigned char)(i * 2654435761u >> 13);
    temp_write("large", bytes, size);
    ck_assert_int_eq(eng_digest_bytes(bytes, size, whole), ENG_OK);
    ck_assert_int_eq(eng_digest_file(temp_path("large"), out, NULL), ENG_OK);
    ck_assert_int_eq(memcmp(out, whole, sizeof out), 0);
    free(bytes);
    eng_error error = {0};
    ck_assert_int_eq(eng_digest_file(temp_path("absent"), out, &error), ENG_NOT_FOUND);
    ck_assert_ptr_nonnull(strstr(error.text, "absent"));
    ck_assert_int_eq(eng_digest_file("/dev/zero", out, NULL), ENG_INVALID);
}
END_TEST

static Suite *files_suite(void) {
    Suite *suite = suite_create("files");
    TCase *errors = tcase_create("errors");
    tcase_add_test(errors, status_texts);
    tcase_add_test(errors, first_error_wins);
    tcase_add_test(errors, error_text_is_printable);
    tcase_add_test(errors, joins_paths);
    tcase_add_test(errors, digests_match_fips_180);
    suite_add_tcase(suite, errors);

    TCase *disk = tcase_create("disk");
    tcase_add_checked_fixture(disk, temp_folder_make, temp_folder_remove);
    tcase_set_timeout(disk, 60);
    tcase_add_test(disk, reads_whole_files);
    tcase_add_test(disk, refuses_all_but_regular_files);
    tcase_add_test(disk, writes_files);
    tcase_add_test(disk, stale_temporary_is_replaced_not_followed);
    tcase_add_test(disk, only_files_are_replaced);
    tcase_add_test(disk, failed_writes_leave_the_old_file);
    tcase_add_test(disk, read_at_names_the_end);
    tcase_add_test(disk, commits_folders);
    tcase_add_test(disk, temp_folder_is_hidden_beside_its_place);
    tcase_add_test(disk, relative_places_work);
    tcase_add_test(disk, failed_commits_leave_the_old);
    tcase_add_test(disk, removal_follows_no_link);
    tcase_add_test(disk, name_points_to_a_whole_folder_at_each_moment);
    tcase_add_test(disk, killed_writer_leaves_a_whole_folder);
    tcase_add_test(disk, digests_files);
    suite_add_tcase(suite, disk);
    return suite;
}

MESA_TEST_MAIN(files_suite)
