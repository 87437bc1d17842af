// SPDX-License-Identifier: Apache-2.0
// What came out of a sweep: the runs' own files, means over seeds, the best of each variant; see sweep_internal.h.
// A variant's best has the least mean validation loss (without validation, the least training loss) of those settings
// of which no seed has failed and none is missing.
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "engine/files.h"
#include "trainer/jsonl.h"
#include "trainer/progress.h"
#include "trainer/sweep_internal.h"

static const char run_format[] = "mesa-sweep-run 1", sweep_format[] = "mesa-sweep 1";
static const char *const ends[] = {"open", "done", "failed"};

static eng_status write_json(const char *folder, const char *name, trn_json *json, eng_error *error) {
    char *path = eng_join_path(folder, name), *text = json ? trn_json_text(json, true) : NULL;
    eng_status status = path && text ? eng_write_file_atomic(path, text, strlen(text), error)
                                     : eng_fail(error, ENG_NO_MEMORY, "out of memory for %s", name);
    trn_json_free(json);
    free(path);
    free(text);
    return status;
}

static double real_or_nan(const trn_json *json, const char *key) {
    double value = NAN;
    if (!trn_json_is_number(json, key) || trn_json_real(json, key, &value, NULL) != ENG_OK)
        return NAN;
    return value;
}

static eng_status read_text(const trn_json *json, const char *key, char *text, size_t size, eng_error *error) {
    const char *value = "";
    eng_status status = trn_json_string(json, key, &value, error);
    snprintf(text, size, "%s", value);
    return status;
}

static eng_status check_format(const trn_json *json, const char *wanted, eng_error *error) {
    char format[40];
    eng_status status = read_text(json, "format", format, sizeof format, error);
    if (status == ENG_OK && strcmp(format, wanted) != 0)
        return eng_fail(error, ENG_FORMAT, "%s: format \"%s\" is not \"%s\"", trn_json_origin(json), format, wanted);
    return status;
}

// --------------------------------------------------------------------------------------------------------- a run's end

eng_status trn_sweep_write_result(const char *folder, const trn_sweep_run *run, const char *config_digest,
                                  eng_error *error) {
    const trn_sweep_result *result = &run->result;
    trn_json *json = trn_json_create();
    if (json) {
        trn_json_set_string(json, "format", run_format);
        trn_json_set_string(json, "config", config_digest);
        trn_json_set_strings(json, "set", run->set.item, run->set.count);
        trn_json_set_string(json, "end", ends[result->end]);
        trn_json_set_string(json, "reason", result->reason);
        trn_json_set_real(json, "valid_loss", result->valid_loss);
        trn_json_set_real(json, "valid_accuracy", result->valid_accuracy);
        trn_json_set_real(json, "valid_divergence", result->valid_divergence);
        trn_json_set_real(json, "loss", result->loss);
        trn_json_set_integer(json, "step", result->step);
        trn_json_set_integer(json, "tokens", result->tokens);
        trn_json_set_integer(json, "bad_steps", result->bad_steps);
        trn_json_set_real(json, "seconds", result->seconds);
    }
    return write_json(folder, "run.json", json, error);
}

static eng_status check_same(const trn_json *json, const trn_sweep_run *run, const char *config_digest,
                             eng_error *error) {
    const char *config = "", **set = NULL;
    int32_t sets = 0;
    eng_status status = trn_json_string(json, "config", &config, error);
    if (status == ENG_OK)
        status = trn_json_strings(json, "set", &set, &sets, error);
    if (status != ENG_OK)
        return status;
    bool same = sets == run->set.count;
    for (int32_t i = 0; same && i < sets; i++)
        same = strcmp(set[i], run->set.item[i]) == 0;
    free(set);
    if (same && strcmp(config, config_digest) == 0)
        return ENG_OK;
    return eng_fail(error, ENG_INVALID, "%s: was made with %s; another --out, or that folder removed",
                    trn_json_origin(json), same ? "another configuration file" : "other settings");
}

static eng_status read_end(const trn_json *json, trn_sweep_result *result, eng_error *error) {
    char end[16];
    eng_status status = read_text(json, "end", end, sizeof end, error);
    if (status == ENG_OK)
        status = read_text(json, "reason", result->reason, sizeof result->reason, error);
    if (status == ENG_OK)
        status = trn_json_integer(json, "step", &result->step, error);
    if (status == ENG_OK)
        status = trn_json_integer(json, "tokens", &result->tokens, error);
    if (status == ENG_OK)
        status = trn_json_integer(json, "bad_steps", &result->bad_steps, error);
    result->valid_loss = real_or_nan(json, "valid_loss");
    result->valid_accuracy = real_or_nan(json, "valid_accuracy");
    result->valid_divergence = real_or_nan(json, "valid_divergence");
    result->loss = real_or_nan(json, "loss");
    result->seconds = real_or_nan(json, "seconds");
    for (int i = 0; i < 3; i++)
        if (strcmp(end, ends[i]) == 0)
            result->end = (trn_sweep_end)i;
    return status;
}

eng_status trn_sweep_read_result(const char *folder, trn_sweep_run *run, const char *config_digest, eng_error *error) {
    struct stat facts;
    trn_json *json = NULL;
    char *path = eng_join_path(folder, "run.json");
    run->result = (trn_sweep_result){.valid_loss = NAN, .valid_accuracy = NAN, .valid_divergence = NAN, .loss = NAN};
    eng_status status = path ? ENG_OK : eng_fail(error, ENG_NO_MEMORY, "out of memory for a path");
    if (status == ENG_OK && stat(path, &facts) == 0) {
        status = trn_json_read(path, &json, error);
        if (status == ENG_OK)
            status = check_format(json, run_format, error);
        if (status == ENG_OK)
            status = check_same(json, run, config_digest, error);
        if (status == ENG_OK)
            status = read_end(json, &run->result, error);
    }
    trn_json_free(json);
    free(path);
    return status;
}

// -------------------------------------------------------------------------------------------------------------- groups

static void name_setting(const trn_sweep *sweep, const trn_sweep_run *run, trn_sweep_group *group) {
    size_t at = 0;
    for (int i = 0; i < sweep->axes && at < sizeof group->setting; i++) {
        const char *key = sweep->axis[i].key, *dot = strchr(key, '.');
        at += (size_t)snprintf(group->setting + at, sizeof group->setting - at, "%s%s=%s", i ? ", " : "",
                               dot ? dot + 1 : key, sweep->axis[i].value.item[run->place[i]]);
    }
}

static double mean_of(const trn_sweep_run *run, int seeds, double (*value)(const trn_sweep_result *result),
                      double *deviation) {
    double sum = 0, squares = 0;
    int count = 0;
    for (int s = 0; s < seeds; s++)
        if (run[s].result.end == TRN_SWEEP_DONE) {
            sum += value(&run[s].result);
            count++;
        }
    const double mean = count > 0 ? sum / count : NAN;
    for (int s = 0; s < seeds; s++)
        if (run[s].result.end == TRN_SWEEP_DONE)
            squares += (value(&run[s].result) - mean) * (value(&run[s].result) - mean);
    *deviation = count > 1 ? sqrt(squares / (count - 1)) : NAN;
    return mean;
}

static double valid_of(const trn_sweep_result *result) {
    return result->valid_loss;
}
static double accuracy_of(const trn_sweep_result *result) {
    return result->valid_accuracy;
}
static double divergence_of(const trn_sweep_result *result) {
    return result->valid_divergence;
}
static double loss_of(const trn_sweep_result *result) {
    return result->loss;
}
static double seconds_of(const trn_sweep_result *result) {
    return result->seconds;
}

static void make_group(const trn_sweep *sweep, const trn_sweep_run *run, int seeds, trn_sweep_group *group) {
    double ignored;
    *group = (trn_sweep_group){.done = 0};
    snprintf(group->variant, sizeof group->variant, "%.60s", sweep->variant[run->variant].name);
    name_setting(sweep, run, group);
    for (int s = 0; s < seeds; s++) {
        group->done += run[s].result.end == TRN_SWEEP_DONE;
        group->open += run[s].result.end == TRN_SWEEP_OPEN;
        group->failed += run[s].result.end == TRN_SWEEP_FAILED;
        if (run[s].result.end == TRN_SWEEP_FAILED && group->failed == 1)
            snprintf(group->reason, sizeof group->reason, "%s", run[s].result.reason);
    }
    group->valid = mean_of(run, seeds, valid_of, &group->deviation);
    group->accuracy = mean_of(run, seeds, accuracy_of, &ignored);
    group->divergence = mean_of(run, seeds, divergence_of, &ignored);
    group->seconds = mean_of(run, seeds, seconds_of, &ignored);
    group->loss = mean_of(run, seeds, loss_of, isfinite(group->valid) ? &ignored : &group->deviation);
}

static double score_of(const trn_sweep_group *group) {
    return isfinite(group->valid) ? group->valid : group->loss;
}

static bool read_number(const char *text, double *value) {
    char *end = NULL;
    *value = strtod(text, &end);
    return end != text && *end == '\0' && isfinite(*value);
}

// Of a key with numbers alone: "least" or "largest" of its values; NULL: between, or no such key.
static const char *edge_of(const trn_axis *axis, int place) {
    double own, other;
    bool least = true, largest = true;
    if (axis->value.count < 2 || !read_number(axis->value.item[place], &own))
        return NULL;
    for (int i = 0; i < axis->value.count; i++) {
        if (!read_number(axis->value.item[i], &other))
            return NULL;
        least = least && own <= other;
        largest = largest && own >= other;
    }
    return least ? "least" : largest ? "largest" : NULL;
}

static void mark_edges(const trn_sweep *sweep, const trn_sweep_run *run, trn_sweep_group *group) {
    size_t at = 0;
    for (int i = 0; i < sweep->axes && at < sizeof group->edge; i++) {
        const char *edge = edge_of(&sweep->axis[i], run->place[i]), *dot = strchr(sweep->axis[i].key, '.');
        if (edge)
            at += (size_t)snprintf(group->edge + at, sizeof group->edge - at, "%s%.40s is the %s tried", at ? ", " : "",
                                   dot ? dot + 1 : sweep->axis[i].key, edge);
    }
}

trn_sweep_group *trn_sweep_groups(const trn_sweep *sweep, int *count) {
    const int seeds = sweep->seed.count > 0 ? sweep->seed.count : 1, groups = sweep->runs / seeds;
    trn_sweep_group *group = calloc((size_t)groups + 1, sizeof *group);
    if (!group)
        return NULL;
    *count = groups;
    for (int g = 0; g < groups; g++)
        make_group(sweep, &sweep->run[g * seeds], seeds, &group[g]);
    for (int first = 0, end; first < groups; first = end) {
        int best = -1;
        for (end = first; end < groups && sweep->run[end * seeds].variant == sweep->run[first * seeds].variant; end++)
            if (group[end].done == seeds && isfinite(score_of(&group[end])) &&
                (best < 0 || score_of(&group[end]) < score_of(&group[best])))
                best = end;
        if (best < 0 || end - first < 2)
            continue;
        group[best].best = true;
        mark_edges(sweep, &sweep->run[best * seeds], &group[best]);
    }
    return group;
}

// --------------------------------------------------------------------------------------------------------------- table

static void print_real(FILE *out, double value, int digits) {
    if (isfinite(value))
        fprintf(out, " %.*f |", digits, value);
    else
        fprintf(out, " - |");
}

static void print_state(FILE *out, const trn_sweep_group *group) {
    if (group->failed > 0)
        fprintf(out, " %d failed: %s |\n", group->failed, group->reason);
    else if (group->open > 0)
        fprintf(out, " %d not finished |\n", group->open);
    else
        fprintf(out, " %s |\n", group->best ? "best" : "");
}

static void print_best(FILE *out, const trn_sweep_group *group, int groups) {
    bool any = false;
    for (int g = 0; g < groups; g++) {
        if (!group[g].best)
            continue;
        if (!any)
            fprintf(out, "\n| variant | best | validation | sd | at an edge |\n|---|---|---|---|---|\n");
        any = true;
        fprintf(out, "| %s | %s |", group[g].variant, group[g].setting);
        print_real(out, score_of(&group[g]), 4);
        print_real(out, group[g].deviation, 4);
        fprintf(out, " %s |\n", group[g].edge[0] ? group[g].edge : "no");
    }
}

bool trn_sweep_is_taught(const trn_sweep_group *group, int groups) {
    bool taught = false;
    for (int g = 0; g < groups; g++)
        taught = taught || isfinite(group[g].divergence);
    return taught;
}

void trn_sweep_print(const trn_sweep_group *group, int groups, FILE *out) {
    char time[24];
    const bool taught = trn_sweep_is_taught(group, groups);
    fprintf(out,
            "| variant | setting | runs | validation | sd | right |%s loss, last steps | time a run | |\n"
            "|---|---|---|---|---|---|%s---|---|---|\n",
            taught ? " divergence |" : "", taught ? "---|" : "");
    for (int g = 0; g < groups; g++) {
        fprintf(out, "| %s | %s | %d |", group[g].variant, group[g].setting, group[g].done);
        print_real(out, group[g].valid, 4);
        print_real(out, group[g].deviation, 4);
        if (isfinite(group[g].accuracy))
            fprintf(out, " %.2f %% |", 100 * group[g].accuracy);
        else
            fprintf(out, " - |");
        if (taught)
            print_real(out, group[g].divergence, 4);
        print_real(out, group[g].loss, 4);
        fprintf(out, " %s |", isfinite(group[g].seconds) ? trn_duration(group[g].seconds, time) : "-");
        print_state(out, &group[g]);
    }
    print_best(out, group, groups);
}

// ---------------------------------------------------------------------------------------------------------------- file

static trn_json *group_json(const trn_sweep_group *group) {
    trn_json *json = trn_json_create();
    if (!json)
        return NULL;
    trn_json_set_string(json, "variant", group->variant);
    trn_json_set_string(json, "setting", group->setting);
    trn_json_set_integer(json, "done", group->done);
    trn_json_set_integer(json, "failed", group->failed);
    trn_json_set_integer(json, "open", group->open);
    trn_json_set_string(json, "reason", group->reason);
    trn_json_set_real(json, "valid_loss", group->valid);
    trn_json_set_real(json, "deviation", group->deviation);
    trn_json_set_real(json, "valid_accuracy", group->accuracy);
    trn_json_set_real(json, "valid_divergence", group->divergence);
    trn_json_set_real(json, "loss", group->loss);
    trn_json_set_real(json, "seconds", group->seconds);
    trn_json_set_integer(json, "best", group->best);
    trn_json_set_string(json, "edge", group->edge);
    return json;
}

static eng_status write_table(const char *folder, const trn_sweep_group *group, int groups, eng_error *error) {
    char *path = eng_join_path(folder, "sweep.md"), *text = NULL;
    size_t length = 0;
    FILE *out = open_memstream(&text, &length);
    if (out)
        trn_sweep_print(group, groups, out);
    const bool failed = !out || fclose(out) != 0 || !path;
    eng_status status = failed ? eng_fail(error, ENG_NO_MEMORY, "out of memory for sweep.md")
                               : eng_write_file_atomic(path, text, length, error);
    free(path);
    free(text);
    return status;
}

eng_status trn_sweep_write(const char *out, const trn_sweep_group *group, int groups, eng_error *error) {
    trn_json *json = trn_json_create();
    bool failed = !json;
    if (json)
        trn_json_set_string(json, "format", sweep_format);
    for (int g = 0; g < groups && !failed; g++) {
        trn_json *one = group_json(&group[g]);
        failed = !one;
        if (one)
            trn_json_add_object(json, "groups", one);
    }
    if (failed) {
        trn_json_free(json);
        json = NULL;
    }
    eng_status status = write_json(out, "sweep.json", json, error);
    return status == ENG_OK ? write_table(out, group, groups, error) : status;
}

typedef struct group_list {
    trn_sweep_group *group;
    int groups;
} group_list;

static eng_status read_group(void *context, const trn_json *entry, eng_error *error) {
    group_list *list = context;
    trn_sweep_group *grown = realloc(list->group, sizeof *grown * (size_t)(list->groups + 1));
    if (!grown)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for the table");
    list->group = grown;
    trn_sweep_group *group = &grown[list->groups];
    *group = (trn_sweep_group){.valid = real_or_nan(entry, "valid_loss"),
                               .deviation = real_or_nan(entry, "deviation"),
                               .accuracy = real_or_nan(entry, "valid_accuracy"),
                               .divergence = real_or_nan(entry, "valid_divergence"),
                               .loss = real_or_nan(entry, "loss"),
                               .seconds = real_or_nan(entry, "seconds")};
    const struct {
        const char *key;
        char *text;
        size_t size;
    } texts[] = {{"variant", group->variant, sizeof group->variant},
                 {"setting", group->setting, sizeof group->setting},
                 {"reason", group->reason, sizeof group->reason},
                 {"edge", group->edge, sizeof group->edge}};
    int *const counts[] = {&group->done, &group->failed, &group->open};
    static const char *const names[] = {"done", "failed", "open", "best"};
    eng_status status = ENG_OK;
    for (size_t i = 0; i < sizeof texts / sizeof *texts && status == ENG_OK; i++)
        status = read_text(entry, texts[i].key, texts[i].text, texts[i].size, error);
    for (int i = 0; i < 4 && status == ENG_OK; i++) {
        int64_t value = 0;
        status = trn_json_integer(entry, names[i], &value, error);
        if (i < 3)
            *counts[i] = (int)value;
        else
            group->best = value != 0;
    }
    list->groups += status == ENG_OK;
    return status;
}

eng_status trn_sweep_read_groups(const char *path, trn_sweep_group **group, int *groups, eng_error *error) {
    trn_json *json = NULL;
    group_list list = {0};
    eng_status status = trn_json_read(path, &json, error);
    if (status == ENG_OK)
        status = check_format(json, sweep_format, error);
    if (status == ENG_OK)
        status = trn_json_each_object(json, "groups", read_group, &list, error);
    trn_json_free(json);
    if (status != ENG_OK) {
        free(list.group);
        return status;
    }
    *group = list.group;
    *groups = list.groups;
    return ENG_OK;
}
