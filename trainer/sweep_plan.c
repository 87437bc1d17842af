// SPDX-License-Identifier: Apache-2.0
// What a sweep's file asks for; see sweep.h. Keys and values are checked by the runs' own configuration, all of them
// before the first run begins.
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "trainer/ini_file.h"
#include "trainer/sweep.h"

static eng_status no_memory(eng_error *error) {
    return eng_fail(error, ENG_NO_MEMORY, "out of memory for a sweep");
}

static eng_status add_item(trn_list *list, const char *text, eng_error *error) {
    char **grown = realloc(list->item, sizeof *grown * (size_t)(list->count + 1));
    if (!grown)
        return no_memory(error);
    list->item = grown;
    list->item[list->count] = strdup(text);
    return list->item[list->count] && ++list->count ? ENG_OK : no_memory(error);
}

static eng_status add_set(trn_list *list, const char *key, const char *value, eng_error *error) {
    const size_t size = strlen(key) + strlen(value) + 2;
    char *text = malloc(size);
    if (!text)
        return no_memory(error);
    snprintf(text, size, "%s=%s", key, value);
    eng_status status = add_item(list, text, error);
    free(text);
    return status;
}

static void free_list(trn_list *list) {
    for (int i = 0; i < list->count; i++)
        free(list->item[i]);
    free(list->item);
    *list = (trn_list){0};
}

void trn_sweep_free(trn_sweep *sweep) {
    for (int i = 0; i < sweep->variants; i++) {
        free(sweep->variant[i].name);
        free_list(&sweep->variant[i].set);
    }
    for (int i = 0; i < sweep->axes; i++) {
        free(sweep->axis[i].key);
        free_list(&sweep->axis[i].value);
    }
    for (int i = 0; i < sweep->runs; i++)
        free_list(&sweep->run[i].set);
    free_list(&sweep->seed);
    free(sweep->variant);
    free(sweep->run);
    *sweep = (trn_sweep){0};
}

// ---------------------------------------------------------------------------------------------------------------- file

// Values stand between white space; one given twice would be one run twice.
static eng_status add_values(trn_list *list, const char *key, const trn_ini_value *at, eng_error *error) {
    char *copy = strdup(at->value), *rest = NULL;
    list->line = list->line > 0 ? list->line : at->line;
    eng_status status = copy ? ENG_OK : no_memory(error);
    for (char *word = copy ? strtok_r(copy, " \t", &rest) : NULL; word && status == ENG_OK;
         word = strtok_r(NULL, " \t", &rest)) {
        for (int i = 0; i < list->count; i++)
            if (strcmp(list->item[i], word) == 0)
                status = eng_fail(error, ENG_INVALID, "%.60s: %.60s: given twice", key, word);
        if (status == ENG_OK)
            status = add_item(list, word, error);
    }
    free(copy);
    return status;
}

static eng_status add_axis(trn_sweep *sweep, const trn_ini_value *at, eng_error *error) {
    const char *key = at->name;
    if (strcmp(key, "train.seed") == 0)
        return eng_fail(error, ENG_INVALID, "grid.train.seed: seeds stand in [sweep]");
    int i = 0;
    while (i < sweep->axes && strcmp(sweep->axis[i].key, key) != 0)
        i++;
    if (i == TRN_SWEEP_AXES)
        return eng_fail(error, ENG_INVALID, "grid.%.60s: more than %d keys", key, (int)TRN_SWEEP_AXES);
    if (i == sweep->axes) {
        sweep->axis[i].key = strdup(key);
        if (!sweep->axis[i].key)
            return no_memory(error);
        sweep->axes++;
    }
    return add_values(&sweep->axis[i].value, key, at, error);
}

static eng_status find_variant(trn_sweep *sweep, const char *name, trn_variant **out, eng_error *error) {
    for (int i = 0; i < sweep->variants; i++)
        if (strcmp(sweep->variant[i].name, name) == 0) {
            *out = &sweep->variant[i];
            return ENG_OK;
        }
    trn_variant *grown = realloc(sweep->variant, sizeof *grown * (size_t)(sweep->variants + 1));
    if (!grown)
        return no_memory(error);
    sweep->variant = grown;
    grown[sweep->variants] = (trn_variant){.name = strdup(name)};
    *out = &grown[sweep->variants];
    return (*out)->name && ++sweep->variants ? ENG_OK : no_memory(error);
}

static bool has_key(const trn_list *set, const char *key) {
    const size_t length = strlen(key);
    for (int i = 0; i < set->count; i++)
        if (strncmp(set->item[i], key, length) == 0 && set->item[i][length] == '=')
            return true;
    return false;
}

static eng_status refuse_unknown(const trn_ini_value *at, eng_error *fault) {
    return eng_fail(fault, ENG_INVALID, "%.40s%s%.60s: unknown; a sweep has [sweep] seeds, [grid], [variant NAME]",
                    at->section, at->name ? "." : "", at->name ? at->name : "");
}

// A variant without a key is one as well: what the configuration says already.
static eng_status visit(void *context, const trn_ini_value *at, eng_error *fault) {
    static const char prefix[] = "variant ";
    trn_sweep *sweep = context;
    trn_variant *variant = NULL;
    if (strcmp(at->section, "grid") == 0)
        return at->name ? add_axis(sweep, at, fault) : ENG_OK;
    if (strcmp(at->section, "sweep") == 0 && (!at->name || strcmp(at->name, "seeds") == 0))
        return at->name ? add_values(&sweep->seed, "seeds", at, fault) : ENG_OK;
    if (strncmp(at->section, prefix, sizeof prefix - 1) != 0 || at->section[sizeof prefix - 1] == '\0')
        return refuse_unknown(at, fault);
    eng_status status = find_variant(sweep, at->section + sizeof prefix - 1, &variant, fault);
    if (status != ENG_OK || !at->name)
        return status;
    if (has_key(&variant->set, at->name))
        return eng_fail(fault, ENG_INVALID, "%.40s.%.60s: given twice", at->section, at->name);
    return add_set(&variant->set, at->name, at->value, fault);
}

static eng_status check_values(const trn_sweep *sweep, const char *path, eng_error *error) {
    if (sweep->seed.line > 0 && sweep->seed.count == 0)
        return eng_fail(error, ENG_INVALID, "%s:%d: sweep.seeds: no value", path, sweep->seed.line);
    for (int i = 0; i < sweep->axes; i++)
        if (sweep->axis[i].value.count == 0)
            return eng_fail(error, ENG_INVALID, "%s:%d: grid.%.60s: no value", path, sweep->axis[i].value.line,
                            sweep->axis[i].key);
    if (sweep->axes + sweep->seed.count + sweep->variants == 0)
        return eng_fail(error, ENG_INVALID, "%s:1: nothing to try; a sweep has [sweep] seeds, [grid], [variant NAME]",
                        path);
    return ENG_OK;
}

// Of a variant's value and the grid's one would be lost.
static eng_status check_variants(const trn_sweep *sweep, eng_error *error) {
    for (int v = 0; v < sweep->variants; v++) {
        const trn_variant *variant = &sweep->variant[v];
        for (int i = 0; i < sweep->axes; i++)
            if (has_key(&variant->set, sweep->axis[i].key))
                return eng_fail(error, ENG_INVALID, "variant %.40s.%.60s: stands in [grid] too", variant->name,
                                sweep->axis[i].key);
        if (sweep->seed.count > 0 && has_key(&variant->set, "train.seed"))
            return eng_fail(error, ENG_INVALID, "variant %.40s.train.seed: seeds stand in [sweep] too", variant->name);
    }
    return ENG_OK;
}

// ---------------------------------------------------------------------------------------------------------------- runs

// A folder's name takes letters, digits and a few signs of it.
static void append_name(trn_sweep_run *run, const char *separator, const char *text) {
    size_t length = strlen(run->name);
    if (length > 0)
        length += (size_t)snprintf(run->name + length, sizeof run->name - length, "%s", separator);
    for (; *text && length + 1 < sizeof run->name; text++)
        run->name[length++] = strchr("/\\ \t\"'", *text) ? '_' : *text;
    run->name[length < sizeof run->name ? length : sizeof run->name - 1] = '\0';
}

// The key's last word, where no other axis has the same.
static const char *short_key(const trn_sweep *sweep, int axis) {
    const char *dot = strchr(sweep->axis[axis].key, '.'), *word = dot ? dot + 1 : sweep->axis[axis].key;
    for (int i = 0; i < sweep->axes; i++) {
        const char *other = strchr(sweep->axis[i].key, '.');
        if (i != axis && other && strcmp(other + 1, word) == 0)
            return sweep->axis[axis].key;
    }
    return word;
}

static eng_status make_run(const trn_sweep *sweep, const trn_list *common, trn_sweep_run *run, eng_error *error) {
    const trn_variant *variant = &sweep->variant[run->variant];
    eng_status status = ENG_OK;
    append_name(run, "", variant->name);
    for (int i = 0; i < common->count && status == ENG_OK; i++)
        status = add_item(&run->set, common->item[i], error);
    for (int i = 0; i < variant->set.count && status == ENG_OK; i++)
        status = add_item(&run->set, variant->set.item[i], error);
    for (int i = 0; i < sweep->axes && status == ENG_OK; i++) {
        const char *value = sweep->axis[i].value.item[run->place[i]];
        status = add_set(&run->set, sweep->axis[i].key, value, error);
        append_name(run, ",", short_key(sweep, i));
        append_name(run, "=", value);
    }
    if (sweep->seed.count > 0 && status == ENG_OK) {
        status = add_set(&run->set, "train.seed", sweep->seed.item[run->seed], error);
        append_name(run, ",", "seed");
        append_name(run, "=", sweep->seed.item[run->seed]);
    }
    if (status == ENG_OK && (run->name[0] == '\0' || run->name[0] == '.'))
        status = eng_fail(error, ENG_INVALID, "a run named \"%.40s\" cannot have a folder", run->name);
    return status;
}

static int64_t combinations(const trn_sweep *sweep) {
    int64_t count = sweep->variants * (int64_t)(sweep->seed.count > 0 ? sweep->seed.count : 1);
    for (int i = 0; i < sweep->axes && count <= TRN_SWEEP_RUNS; i++)
        count *= sweep->axis[i].value.count;
    return count;
}

// Number `index` counts seeds fastest, then the last axis.
static void place_run(const trn_sweep *sweep, int index, trn_sweep_run *run) {
    const int seeds = sweep->seed.count > 0 ? sweep->seed.count : 1;
    run->seed = index % seeds;
    index /= seeds;
    for (int i = sweep->axes - 1; i >= 0; i--) {
        run->place[i] = index % sweep->axis[i].value.count;
        index /= sweep->axis[i].value.count;
    }
    run->variant = index;
}

static eng_status make_runs(trn_sweep *sweep, const trn_list *common, eng_error *error) {
    const int64_t count = combinations(sweep);
    if (count > TRN_SWEEP_RUNS)
        return eng_fail(error, ENG_INVALID, "more than %d runs", (int)TRN_SWEEP_RUNS);
    sweep->run = calloc((size_t)count, sizeof *sweep->run);
    eng_status status = sweep->run ? ENG_OK : no_memory(error);
    for (; status == ENG_OK && sweep->runs < count; sweep->runs++) {
        trn_sweep_run *run = &sweep->run[sweep->runs];
        place_run(sweep, sweep->runs, run);
        status = make_run(sweep, common, run, error);
        for (int i = 0; i < sweep->runs && status == ENG_OK; i++)
            if (strcmp(sweep->run[i].name, run->name) == 0)
                status = eng_fail(error, ENG_INVALID, "two runs have the name %.120s", run->name);
    }
    return status;
}

eng_status trn_sweep_read(const char *path, const char *const *set, int sets, trn_sweep *sweep, eng_error *error) {
    trn_variant *only = NULL;
    trn_list common = {0};
    eng_error fault = {0};
    *sweep = (trn_sweep){0};
    eng_status status = trn_ini_read(path, visit, sweep, error);
    if (status == ENG_OK)
        status = check_values(sweep, path, error);
    if (status != ENG_OK)
        return status;
    for (int i = 0; i < sets && status == ENG_OK; i++)
        status = add_item(&common, set[i], &fault);
    if (status == ENG_OK && sweep->variants == 0)
        status = find_variant(sweep, "", &only, &fault);
    if (status == ENG_OK)
        status = check_variants(sweep, &fault);
    if (status == ENG_OK)
        status = make_runs(sweep, &common, &fault);
    free_list(&common);
    return status == ENG_OK ? status : eng_fail(error, status, "%s: %s", path, fault.text);
}
