// SPDX-License-Identifier: Apache-2.0
// Writing, finding and verifying the checkpoints of a run; see run_folder.h.
// A checkpoint counts only if every file has the digest that state.json, written last, tells of it. Ranks that save
// together meet twice: when the folder is there, and when the moments are; rank 0 alone does the rest, so that whoever
// fails before leaves nothing but a hidden folder, which rank 0 removes.
#include "trainer/run_folder.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "engine/digest.h"
#include "engine/files.h"
#include "trainer/jsonl.h"

enum { FORMAT = 1, LOG_LIMIT = 1 << 30, STEP_NAME = 32, MOMENTS_NAME = 48 };

static const char state_name[] = "trainer/state.json";
static const char *const needed_files[] = {"config.json", "model.safetensors"};

static void name_moments(int64_t rank, char name[MOMENTS_NAME]) {
    snprintf(name, MOMENTS_NAME, "trainer/optim-%lld.safetensors", (long long)rank);
}

// The rank of such a name; -1: another name.
static int64_t moments_rank(const char *name) {
    char again[MOMENTS_NAME];
    long long rank = -1;
    if (sscanf(name, "trainer/optim-%lld.", &rank) != 1)
        return -1;
    name_moments(rank, again);
    return strcmp(again, name) == 0 ? rank : -1;
}

static eng_status no_memory(eng_error *error) {
    return eng_fail(error, ENG_NO_MEMORY, "out of memory for a checkpoint");
}

// ------------------------------------------------------------------------------------------------------------- names

// The step of "step-N"; -1: another name.
static int64_t step_of(const char *name) {
    static const char prefix[] = "step-";
    const char *digits = name + sizeof prefix - 1;
    if (strncmp(name, prefix, sizeof prefix - 1) != 0 || strlen(digits) < 1 || strlen(digits) > 18 ||
        strspn(digits, "0123456789") != strlen(digits))
        return -1;
    return strtoll(digits, NULL, 10);
}

static bool is_left_over(const char *name) {
    size_t length = strlen(name);
    return name[0] == '.' && strstr(name, "step-") && length > 4 && strcmp(name + length - 4, ".tmp") == 0;
}

// Calls visit for every name in the folder until it fails. No such folder: nothing.
static eng_status each_name(const char *dir, eng_status (*visit)(void *context, const char *name, eng_error *error),
                            void *context, eng_error *error) {
    DIR *list = opendir(dir);
    if (!list)
        return errno == ENOENT ? ENG_OK
                               : eng_fail(error, ENG_IO, "%s: cannot be read: %s", eng_path_tail(dir), strerror(errno));
    eng_status status = ENG_OK;
    for (struct dirent *entry; status == ENG_OK && (entry = readdir(list));)
        status = visit(context, entry->d_name, error);
    closedir(list);
    return status;
}

typedef struct checkpoint_name {
    char text[STEP_NAME];
    int64_t step;
} checkpoint_name;

typedef struct names {
    checkpoint_name *item;
    size_t count;
} names;

static eng_status add_name(void *context, const char *name, eng_error *error) {
    names *names = context;
    int64_t step = step_of(name);
    if (step < 0)
        return ENG_OK;
    checkpoint_name *grown = realloc(names->item, sizeof *grown * (names->count + 1));
    if (!grown)
        return no_memory(error);
    names->item = grown;
    checkpoint_name *item = &grown[names->count++];
    snprintf(item->text, sizeof item->text, "%s", name);
    item->step = step;
    return ENG_OK;
}

static int newest_first(const void *left, const void *right) {
    int64_t a = ((const checkpoint_name *)left)->step, b = ((const checkpoint_name *)right)->step;
    return (a < b) - (a > b);
}

static eng_status list_checkpoints(const char *run, names *names, eng_error *error) {
    eng_status status = each_name(run, add_name, names, error);
    if (names->count > 0)
        qsort(names->item, names->count, sizeof *names->item, newest_first);
    return status;
}

eng_status trn_run_has_checkpoints(const char *run, bool *has, eng_error *error) {
    names names = {0};
    eng_status status = list_checkpoints(run, &names, error);
    *has = names.count > 0;
    free(names.item);
    return status;
}

static eng_status remove_if_left_over(void *context, const char *name, eng_error *error) {
    if (!is_left_over(name))
        return ENG_OK;
    char *path = eng_join_path(context, name);
    eng_status status = path ? eng_remove_tree(path, error) : no_memory(error);
    free(path);
    return status;
}

eng_status trn_run_clean(const char *run, eng_error *error) {
    return each_name(run, remove_if_left_over, (void *)run, error);
}

// ------------------------------------------------------------------------------------------------------------ writing

typedef struct digests {
    const char *dir;
    trn_json *files;
} digests;

static eng_status add_digest(void *context, const char *name, eng_error *error) {
    digests *digests = context;
    unsigned char digest[ENG_DIGEST_BYTES];
    char hex[ENG_DIGEST_HEX], *path = eng_join_path(digests->dir, name);
    struct stat facts;
    eng_status status = path ? ENG_OK : no_memory(error);
    if (status == ENG_OK && lstat(path, &facts) == 0 && S_ISREG(facts.st_mode)) {
        status = eng_digest_file(path, digest, error);
        if (status == ENG_OK) {
            eng_digest_hex(digest, hex);
            trn_json_set_string(digests->files, name, hex);
        }
    }
    free(path);
    return status;
}

// moments: a digest a rank.
static void add_moments(const digests *digests, const unsigned char *moments, int32_t ranks) {
    for (int32_t r = 0; r < ranks; r++) {
        char name[MOMENTS_NAME], hex[ENG_DIGEST_HEX];
        name_moments(r, name);
        eng_digest_hex(moments + (size_t)r * ENG_DIGEST_BYTES, hex);
        trn_json_set_string(digests->files, name, hex);
    }
}

static eng_status write_state(const char *dir, const trn_run_state *state, const unsigned char *moments, int32_t ranks,
                              eng_error *error) {
    digests digests = {dir, trn_json_create()};
    trn_json *json = trn_json_create();
    char *path = eng_join_path(dir, state_name), *text = NULL;
    if (!digests.files || !json || !path) {
        trn_json_free(digests.files);
        trn_json_free(json);
        free(path);
        return no_memory(error);
    }
    eng_status status = each_name(dir, add_digest, &digests, error);
    add_moments(&digests, moments, ranks);
    trn_json_set_integer(json, "format", FORMAT);
    trn_json_set_integer(json, "step", state->step);
    trn_json_set_integer(json, "updates", state->updates);
    trn_json_set_integer(json, "epoch", state->epoch);
    trn_json_set_integer(json, "row", state->row);
    trn_json_set_integer(json, "seed", state->seed);
    trn_json_set_integer(json, "ranks", ranks);
    trn_json_set_integer(json, "context", state->context);
    trn_json_set_integer(json, "batch_rows", state->batch_rows);
    trn_json_set_integer(json, "data_rows", state->data_rows);
    trn_json_set_integer(json, "tokens", state->tokens);
    trn_json_set_integer(json, "bad_steps", state->bad_steps);
    trn_json_set_integer(json, "bad_in_row", state->bad_in_row);
    trn_json_set_real(json, "seconds", state->seconds);
    if (state->teacher[0])
        trn_json_set_string(json, "teacher", state->teacher);
    trn_json_set_object(json, "files", digests.files);
    text = trn_json_text(json, true);
    if (status == ENG_OK)
        status = text ? eng_write_file_atomic(path, text, strlen(text), error) : no_memory(error);
    trn_json_free(json);
    free(text);
    free(path);
    return status;
}

static eng_status save_weights(const char *temp, const eng_weights *weights, const char *tokenizer_dir,
                               eng_error *error) {
    eng_status status = eng_checkpoint_save(temp, weights, ENG_F32, tokenizer_dir, error);
    char *folder = eng_join_path(temp, "trainer");
    if (status == ENG_OK && !folder)
        status = no_memory(error);
    if (status == ENG_OK && mkdir(folder, 0777) != 0)
        status = eng_fail(error, ENG_IO, "%s: cannot be made: %s", eng_path_tail(folder), strerror(errno));
    free(folder);
    return status;
}

static eng_status save_moments(const char *temp, trn_optimizer *optimizer, unsigned char digest[ENG_DIGEST_BYTES],
                               eng_error *error) {
    char name[MOMENTS_NAME];
    name_moments(trn_ranks_own(optimizer->blocks.ranks), name);
    char *path = eng_join_path(temp, name);
    eng_status status = path ? trn_optimizer_save(optimizer, path, error) : no_memory(error);
    if (status == ENG_OK)
        status = eng_digest_file(path, digest, error);
    free(path);
    return status;
}

static eng_status fill(const char *temp, const trn_run_state *state, const eng_weights *weights,
                       trn_optimizer *optimizer, const char *tokenizer_dir, eng_error *error) {
    trn_ranks *ranks = optimizer->blocks.ranks;
    const int32_t count = trn_ranks_count(ranks), own = trn_ranks_own(ranks);
    unsigned char digest[ENG_DIGEST_BYTES];
    unsigned char *moments = malloc(sizeof digest * (size_t)count);
    eng_status status = moments ? ENG_OK : no_memory(error);
    if (status == ENG_OK && own == 0)
        status = save_weights(temp, weights, tokenizer_dir, error);
    char there = 1;
    if (status == ENG_OK)
        status = trn_ranks_share(ranks, &there, sizeof there, error);
    if (status == ENG_OK)
        status = save_moments(temp, optimizer, digest, error);
    if (status == ENG_OK)
        status = trn_ranks_exchange(ranks, digest, sizeof digest, moments, error);
    if (status == ENG_OK && own == 0)
        status = write_state(temp, state, moments, count, error);
    free(moments);
    return status;
}

static eng_status remove_old(const char *run, int64_t keep, eng_error *error) {
    names names = {0};
    eng_status status = list_checkpoints(run, &names, error);
    for (size_t i = (size_t)keep; status == ENG_OK && i < names.count; i++) {
        char *path = eng_join_path(run, names.item[i].text);
        status = path ? eng_remove_tree(path, error) : no_memory(error);
        free(path);
    }
    free(names.item);
    return status;
}

eng_status trn_run_save(const char *run, const trn_run_state *state, const eng_weights *weights,
                        trn_optimizer *optimizer, const char *tokenizer_dir, int64_t keep, eng_error *error) {
    const bool first = trn_ranks_own(optimizer->blocks.ranks) == 0;
    char name[STEP_NAME], hidden[STEP_NAME + 8];
    snprintf(name, sizeof name, "step-%08lld", (long long)state->step);
    snprintf(hidden, sizeof hidden, ".%s.tmp", name);
    char *path = eng_join_path(run, name), *temp = eng_join_path(run, hidden);
    eng_status status = path && temp ? ENG_OK : no_memory(error);
    if (status == ENG_OK && first)
        status = eng_remove_tree(temp, error);
    if (status == ENG_OK)
        status = fill(temp, state, weights, optimizer, tokenizer_dir, error);
    if (status == ENG_OK && first)
        status = eng_commit_temp_dir(temp, path, error);
    if (status != ENG_OK && first && temp && eng_remove_tree(temp, NULL) != ENG_OK)
        eng_fail(error, status, "%s: cannot be removed", eng_path_tail(temp));
    if (status == ENG_OK && first && keep > 0)
        status = remove_old(run, keep, error);
    free(path);
    free(temp);
    return status;
}

// ----------------------------------------------------------------------------------------------------------- verifying

typedef struct verification {
    const char *dir;
    unsigned needed;        // bit i: needed_files[i] was seen
    int64_t ranks, moments; // how many saved; of how many the moments were seen
    eng_error *error;
} verification;

static eng_status verify_file(void *context, const char *name, const char *wanted) {
    verification *v = context;
    unsigned char digest[ENG_DIGEST_BYTES];
    char hex[ENG_DIGEST_HEX];
    if (name[0] == '/' || strstr(name, ".."))
        return eng_fail(v->error, ENG_FORMAT, "%s: \"%.60s\" is not a file of the checkpoint", state_name, name);
    char *path = eng_join_path(v->dir, name);
    eng_status status = path ? eng_digest_file(path, digest, v->error) : no_memory(v->error);
    free(path);
    if (status != ENG_OK)
        return status;
    eng_digest_hex(digest, hex);
    if (strcmp(hex, wanted) != 0)
        return eng_fail(v->error, ENG_FORMAT, "%s: not the file that was saved (its SHA-256 differs)", name);
    for (size_t i = 0; i < sizeof needed_files / sizeof *needed_files; i++)
        if (strcmp(name, needed_files[i]) == 0)
            v->needed |= 1U << i;
    const int64_t rank = moments_rank(name);
    v->moments += rank >= 0 && rank < v->ranks;
    return ENG_OK;
}

static eng_status read_numbers(const trn_json *json, trn_run_state *state, eng_error *error) {
    const struct {
        const char *key;
        int64_t *value;
    } integers[] = {
        {"step", &state->step},           {"updates", &state->updates},
        {"epoch", &state->epoch},         {"row", &state->row},
        {"seed", &state->seed},           {"context", &state->context},
        {"tokens", &state->tokens},       {"batch_rows", &state->batch_rows},
        {"data_rows", &state->data_rows}, {"ranks", &state->ranks},
        {"bad_steps", &state->bad_steps}, {"bad_in_row", &state->bad_in_row},
    };
    const size_t needed = sizeof integers / sizeof *integers - 2; // older checkpoints do not count bad steps
    int64_t format = 0;
    eng_status status = trn_json_integer(json, "format", &format, error);
    if (status == ENG_OK && format != FORMAT)
        return eng_fail(error, ENG_UNSUPPORTED, "%s: format %lld is not supported", state_name, (long long)format);
    for (size_t i = 0; status == ENG_OK && i < sizeof integers / sizeof *integers; i++) {
        if (i >= needed && !trn_json_has(json, integers[i].key))
            continue;
        status = trn_json_integer(json, integers[i].key, integers[i].value, error);
        if (status == ENG_OK && *integers[i].value < 0)
            status = eng_fail(error, ENG_FORMAT, "%s: %s: negative", state_name, integers[i].key);
    }
    return status == ENG_OK ? trn_json_real(json, "seconds", &state->seconds, error) : status;
}

static eng_status read_teacher(const trn_json *json, trn_run_state *state, eng_error *error) {
    const char *digest = "";
    if (!trn_json_has(json, "teacher"))
        return ENG_OK;
    eng_status status = trn_json_string(json, "teacher", &digest, error);
    if (status == ENG_OK && strlen(digest) != sizeof state->teacher - 1)
        return eng_fail(error, ENG_FORMAT, "%s: teacher: not a SHA-256", state_name);
    if (status == ENG_OK)
        memcpy(state->teacher, digest, sizeof state->teacher);
    return status;
}

static eng_status verify(const char *dir, int64_t step, trn_run_state *state, eng_error *error) {
    char *path = eng_join_path(dir, state_name);
    trn_json *json = NULL;
    verification v = {.dir = dir, .error = error};
    eng_status status = path ? trn_json_read(path, &json, error) : no_memory(error);
    if (status == ENG_OK)
        status = read_numbers(json, state, error);
    if (status == ENG_OK)
        status = read_teacher(json, state, error);
    if (status == ENG_OK && state->step != step)
        status = eng_fail(error, ENG_FORMAT, "%s: holds step %lld", state_name, (long long)state->step);
    v.ranks = state->ranks;
    if (status == ENG_OK)
        status = trn_json_each_string(json, "files", verify_file, &v, error);
    if (status == ENG_OK && (v.ranks < 1 || v.moments != v.ranks))
        status = eng_fail(error, ENG_FORMAT, "%s: tells of the moments of %lld ranks, not of %lld", state_name,
                          (long long)v.moments, (long long)v.ranks);
    for (size_t i = 0; status == ENG_OK && i < sizeof needed_files / sizeof *needed_files; i++)
        if (!(v.needed & 1U << i))
            status = eng_fail(error, ENG_FORMAT, "%s: tells nothing of %s", state_name, needed_files[i]);
    trn_json_free(json);
    free(path);
    return status;
}

eng_status trn_run_newest(const char *run, void (*damaged)(const char *dir, const char *why), char **dir,
                          trn_run_state *state, eng_error *error) {
    names names = {0};
    eng_status status = list_checkpoints(run, &names, error), found = ENG_NOT_FOUND;
    for (size_t i = 0; status == ENG_OK && found != ENG_OK && i < names.count; i++) {
        eng_error why = {0};
        trn_run_state read = {0};
        char *path = eng_join_path(run, names.item[i].text);
        if (!path) {
            status = no_memory(error);
            break;
        }
        found = verify(path, names.item[i].step, &read, &why);
        if (found == ENG_OK) {
            *dir = path;
            *state = read;
            break;
        }
        damaged(path, why.text);
        free(path);
    }
    free(names.item);
    if (status == ENG_OK && found != ENG_OK)
        return eng_fail(error, ENG_NOT_FOUND, "%s: no checkpoint that is whole", eng_path_tail(run));
    return status;
}

eng_status trn_run_load_moments(const char *dir, const trn_run_state *state, trn_optimizer *optimizer,
                                eng_error *error) {
    if (state->ranks < 1 || state->ranks > TRN_MAX_RANKS)
        return eng_fail(error, ENG_FORMAT, "%s: ranks: %lld", state_name, (long long)state->ranks);
    const int32_t ranks = (int32_t)state->ranks;
    char **path = calloc((size_t)ranks, sizeof *path);
    eng_status status = path ? ENG_OK : no_memory(error);
    for (int32_t r = 0; status == ENG_OK && r < ranks; r++) {
        char name[MOMENTS_NAME];
        name_moments(r, name);
        path[r] = eng_join_path(dir, name);
        status = path[r] ? ENG_OK : no_memory(error);
    }
    if (status == ENG_OK)
        status = trn_optimizer_load(optimizer, (const char *const *)path, ranks, error);
    for (int32_t r = 0; path && r < ranks; r++)
        free(path[r]);
    free(path);
    return status;
}

// ---------------------------------------------------------------------------------------------------------------- log

static bool belongs(const char *line, size_t length, int64_t step) {
    trn_json *json = NULL;
    int64_t at = 0;
    bool kept = trn_json_parse(line, length, "log.jsonl", &json, NULL) == ENG_OK &&
                trn_json_integer(json, "step", &at, NULL) == ENG_OK && at <= step;
    trn_json_free(json);
    return kept;
}

eng_status trn_run_trim_log(const char *run, int64_t step, eng_error *error) {
    char *path = eng_join_path(run, "log.jsonl"), *text = NULL;
    size_t length = 0, kept = 0;
    struct stat facts;
    eng_status status = path ? ENG_OK : no_memory(error);
    if (status == ENG_OK && stat(path, &facts) == 0)
        status = eng_read_file(path, LOG_LIMIT, &text, &length, error);
    for (const char *end; status == ENG_OK && text && (end = memchr(text + kept, '\n', length - kept));) {
        size_t line = (size_t)(end - (text + kept));
        if (!belongs(text + kept, line, step))
            break;
        kept += line + 1;
    }
    if (status == ENG_OK && kept < length)
        status = eng_write_file_atomic(path, text, kept, error);
    free(text);
    free(path);
    return status;
}
