// SPDX-License-Identifier: Apache-2.0
// Opening a Hugging Face folder: config, weight files, and the proof that they fit each other.
//
// model.safetensors wins over an index; other .safetensors files are never read, so a stray one changes nothing. With
// an index, the map and the shards must agree in both directions. Every tensor of the model's table must be there with
// its shape, and nothing else may be, apart from what the public formats left behind:
//   * model.layers.N.attn.D of old FLA files and rotary_emb.inv_freq of old Llama files: never read by those models;
//   * a second copy of a tied head or of another tensor under its other name, if it equals the first, and a tied model
//     saved under the head's name alone;
//   * tensors that are rows of a larger one: gate and up projections of old FLA files, fused weights of xLSTM.
// Errors name file, tensor, wanted and found shape. Everything is checked before the first weight is read.
#include "engine/checkpoint_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "engine/config_internal.h"
#include "engine/digest.h"
#include "engine/files.h"
#include "engine/files_private.h"

enum { MAX_INDEX_BYTES = 32 << 20, MAX_SHARDS = 1024, COMPARE_PIECE = 16384, SHAPE_TEXT = 96 };

static const char single_file[] = "model.safetensors";
static const char index_file[] = "model.safetensors.index.json";
static const char head_name[] = "lm_head.weight";

static char *shape_text(int ndim, const int64_t *shape, char text[SHAPE_TEXT]) {
    int length = snprintf(text, SHAPE_TEXT, "[");
    for (int i = 0; i < ndim && length < SHAPE_TEXT; i++)
        length += snprintf(text + length, SHAPE_TEXT - (size_t)length, "%s%lld", i ? ", " : "", (long long)shape[i]);
    if (length < SHAPE_TEXT)
        snprintf(text + length, SHAPE_TEXT - (size_t)length, "]");
    return text;
}

static bool holds(const char *dir, const char *name) {
    struct stat facts;
    char *path = eng_join_path(dir, name);
    const bool there = path && stat(path, &facts) == 0;
    free(path);
    return there;
}

// The file itself where its folder is wanted, and the run where one of its checkpoints is, are worth words of their
// own.
static eng_status check_folder(const char *dir, eng_error *error) {
    struct stat facts;
    if (stat(dir, &facts) != 0)
        return eng_fail_errno(error, dir, "open");
    if (S_ISDIR(facts.st_mode) && !holds(dir, "config.json") && holds(dir, "log.jsonl"))
        return eng_fail(error, ENG_NOT_FOUND, "%s: a run; its checkpoints are the folders %s/step-N",
                        eng_path_tail(dir), eng_path_tail(dir));
    if (S_ISDIR(facts.st_mode))
        return ENG_OK;
    return eng_fail(error, ENG_FORMAT, "%s: not a folder%s", eng_path_tail(dir),
                    strstr(dir, ".gguf") ? "; mesa-trainer import makes one of a GGUF file" : "");
}

// ---- config.json and generation_config.json

static eng_status read_generation_config(const char *dir, eng_config *config, eng_error *error) {
    char *path = eng_join_path(dir, "generation_config.json");
    if (!path)
        return eng_fail(error, ENG_NO_MEMORY, "no memory for a path");
    json_t *root = NULL;
    eng_error missing = {0};
    eng_status status = eng_json_read(path, ENG_MAX_CONFIG_BYTES, &root, NULL, &missing);
    if (status == ENG_OK) {
        eng_keys keys = {.object = root, .path = path, .scope = "", .error = error};
        if (eng_keys_value(&keys, "eos_token_id"))
            eng_config_set_eos(&keys, config);
        status = keys.status;
        json_decref(root);
    } else if (status == ENG_NOT_FOUND) {
        status = ENG_OK;
    } else {
        eng_fail(error, status, "%s", missing.text);
    }
    free(path);
    return status;
}

static eng_status read_model(eng_checkpoint *checkpoint, eng_error *error) {
    char *path = eng_join_path(checkpoint->dir, "config.json"), *text = NULL;
    if (!path)
        return eng_fail(error, ENG_NO_MEMORY, "no memory for a path");
    size_t length;
    eng_config config;
    eng_status status = eng_read_file(path, ENG_MAX_CONFIG_BYTES, &text, &length, error);
    if (status == ENG_OK)
        status = eng_config_parse(text, length, path, &config, error);
    free(text);
    free(path);
    if (status != ENG_OK)
        return status;
    status = read_generation_config(checkpoint->dir, &config, error);
    if (status != ENG_OK) {
        eng_config_free(&config);
        return status;
    }
    return eng_model_create(&config, &checkpoint->model, error);
}

// ---- weight files

static eng_status open_file(eng_checkpoint *checkpoint, const char *name, eng_error *error) {
    char *path = eng_join_path(checkpoint->dir, name);
    eng_st_file **files = realloc(checkpoint->file, (checkpoint->files + 1) * sizeof *files);
    if (files)
        checkpoint->file = files;
    eng_status status = !path || !files ? eng_fail(error, ENG_NO_MEMORY, "no memory for a path")
                                        : eng_st_open(path, &files[checkpoint->files], error);
    if (status == ENG_OK)
        checkpoint->files++;
    free(path);
    return status;
}

static bool is_shard_name(const char *name) {
    static const char suffix[] = ".safetensors";
    size_t length = strlen(name);
    return length >= sizeof suffix && length < 256 && strcmp(name + length - (sizeof suffix - 1), suffix) == 0 &&
           !strchr(name, '/') && !strchr(name, '\\') && name[0] != '.';
}

static int compare_names(const void *left, const void *right) {
    return strcmp(*(const char *const *)left, *(const char *const *)right);
}

// The distinct shard names of the map in order. *names is new (free) and borrows the map's strings.
static eng_status shard_names(const char *path, json_t *map, const char ***names, size_t *count, eng_error *error) {
    const char **all = malloc((json_object_size(map) + 1) * sizeof *all);
    if (!all)
        return eng_fail(error, ENG_NO_MEMORY, "%s: no memory for its map", eng_path_tail(path));
    size_t entries = 0, distinct = 0;
    const char *tensor;
    json_t *shard;
    json_object_foreach(map, tensor, shard) {
        const char *name = json_string_value(shard);
        if (!name || !is_shard_name(name)) {
            free(all);
            return eng_fail(error, ENG_FORMAT,
                            "%s: tensor '%.64s': '%.48s' is no name of a .safetensors file in the same folder",
                            eng_path_tail(path), tensor, name ? name : "no string");
        }
        all[entries++] = name;
    }
    qsort(all, entries, sizeof *all, compare_names);
    for (size_t i = 0; i < entries; i++) {
        if (distinct == 0 || strcmp(all[distinct - 1], all[i]) != 0)
            all[distinct++] = all[i];
    }
    if (distinct > MAX_SHARDS) {
        free(all);
        return eng_fail(error, ENG_FORMAT, "%s: more than %d shards", eng_path_tail(path), MAX_SHARDS);
    }
    *names = all;
    *count = distinct;
    return ENG_OK;
}

static const eng_st_file *shard_called(const eng_checkpoint *checkpoint, const char *name) {
    for (size_t i = 0; i < checkpoint->files; i++) {
        const char *slash = strrchr(eng_st_path(checkpoint->file[i]), '/');
        if (strcmp(slash ? slash + 1 : eng_st_path(checkpoint->file[i]), name) == 0)
            return checkpoint->file[i];
    }
    return NULL;
}

static eng_status check_map(const eng_checkpoint *checkpoint, const char *path, json_t *map, eng_error *error) {
    const char *tensor;
    json_t *shard;
    json_object_foreach(map, tensor, shard) {
        const char *name = json_string_value(shard);
        if (!eng_st_find(shard_called(checkpoint, name), tensor))
            return eng_fail(error, ENG_FORMAT, "%s: tensor '%.64s' is not in %.64s", eng_path_tail(path), tensor, name);
    }
    for (size_t i = 0; i < checkpoint->files; i++) {
        const eng_st_file *file = checkpoint->file[i];
        for (size_t j = 0; j < eng_st_count(file); j++) {
            const char *name = eng_st_at(file, j)->name;
            const char *mapped = json_string_value(json_object_get(map, name));
            if (!mapped || shard_called(checkpoint, mapped) != file)
                return eng_fail(error, ENG_FORMAT, "%s: tensor '%.64s' is not mapped to this file by the index",
                                eng_path_tail(eng_st_path(file)), name);
        }
    }
    return ENG_OK;
}

static eng_status open_shards(eng_checkpoint *checkpoint, const char *path, json_t *root, eng_error *error) {
    json_t *map = json_object_get(root, "weight_map");
    if (!json_is_object(map))
        return eng_fail(error, ENG_FORMAT, "%s: weight_map: is missing or no object", eng_path_tail(path));
    const char **names = NULL;
    size_t count = 0;
    eng_status status = shard_names(path, map, &names, &count, error);
    if (status != ENG_OK)
        return status;
    for (size_t i = 0; status == ENG_OK && i < count; i++)
        status = open_file(checkpoint, names[i], error);
    free(names);
    return status == ENG_OK ? check_map(checkpoint, path, map, error) : status;
}

static eng_status open_index(eng_checkpoint *checkpoint, eng_error *error) {
    char *path = eng_join_path(checkpoint->dir, index_file);
    if (!path)
        return eng_fail(error, ENG_NO_MEMORY, "no memory for a path");
    json_t *root = NULL;
    eng_error local = {0};
    eng_status status = eng_json_read(path, MAX_INDEX_BYTES, &root, NULL, &local);
    if (status == ENG_OK)
        status = open_shards(checkpoint, path, root, error);
    else if (status == ENG_NOT_FOUND)
        eng_fail(error, status, "%s: neither %s nor %s is there", eng_path_tail(checkpoint->dir), single_file,
                 index_file);
    else
        eng_fail(error, status, "%s", local.text);
    json_decref(root);
    free(path);
    return status;
}

static eng_status open_files(eng_checkpoint *checkpoint, eng_error *error) {
    eng_error local = {0};
    eng_status status = open_file(checkpoint, single_file, &local);
    if (status == ENG_NOT_FOUND)
        return open_index(checkpoint, error);
    return status == ENG_OK ? ENG_OK : eng_fail(error, status, "%s", local.text);
}

// ---- tensors

static eng_place find_place(const eng_checkpoint *checkpoint, const char *name) {
    for (size_t i = 0; i < checkpoint->files; i++) {
        const eng_st_entry *entry = eng_st_find(checkpoint->file[i], name);
        if (entry)
            return (eng_place){.file = checkpoint->file[i], .entry = entry};
    }
    return (eng_place){0};
}

// The shape that the entry must have: the tensor's, or that of the whole that it is rows of.
static void wanted_shape(const eng_tensor *tensor, bool part, int64_t shape[4]) {
    memcpy(shape, tensor->shape, sizeof tensor->shape);
    if (part)
        shape[0] = tensor->whole_rows;
}

static bool has_shape(const eng_st_entry *entry, int ndim, const int64_t *shape) {
    bool same = entry->ndim == ndim;
    for (int i = 0; same && i < ndim; i++)
        same = entry->shape[i] == shape[i];
    return same;
}

static eng_status check_entry(const eng_checkpoint *checkpoint, eng_place *place, const eng_tensor *tensor, bool part,
                              eng_error *error) {
    const eng_st_entry *entry = place->entry;
    if (eng_place_is_blocks(place))
        return eng_place_find_blocks(checkpoint, place, tensor, part, error);
    const char *path = eng_path_tail(eng_st_path(place->file));
    char wanted[SHAPE_TEXT], found[SHAPE_TEXT];
    int64_t shape[4];
    wanted_shape(tensor, part, shape);
    if (!has_shape(entry, tensor->ndim, shape))
        return eng_fail(error, ENG_FORMAT, "%s: tensor '%.64s': shape is %s, config.json asks for %s", path,
                        entry->name, shape_text(entry->ndim, entry->shape, found),
                        shape_text(tensor->ndim, shape, wanted));
    if (entry->dtype != ENG_F32 && entry->dtype != ENG_F16 && entry->dtype != ENG_BF16)
        return eng_fail(error, ENG_UNSUPPORTED, "%s: tensor '%.64s': type is %s, must be F32, F16 or BF16", path,
                        entry->name, eng_dtype_name(entry->dtype));
    return ENG_OK;
}

// By its name, else its other one, else as a part of a larger tensor, which may have its name.
static eng_place place_tensor(const eng_checkpoint *checkpoint, int32_t index, bool *part) {
    const eng_model *model = checkpoint->model;
    const eng_tensor *tensor = &model->tensor[index];
    eng_place place = find_place(checkpoint, tensor->name), whole = {0};
    if (!place.entry && tensor->alias[0])
        place = find_place(checkpoint, tensor->alias);
    if (!place.entry && index == model->embed && model->config.tied)
        place = find_place(checkpoint, head_name);
    if (tensor->whole[0])
        whole = find_place(checkpoint, tensor->whole);
    int64_t shape[4];
    wanted_shape(tensor, true, shape);
    *part = whole.entry && (!place.entry || place.entry == whole.entry) &&
            (model->config.fused_weights || has_shape(whole.entry, tensor->ndim, shape));
    if (!*part)
        return place;
    whole.first = tensor->whole_row * (tensor->count / tensor->shape[0]);
    return whole;
}

static eng_status place_tensors(eng_checkpoint *checkpoint, eng_error *error) {
    const eng_model *model = checkpoint->model;
    checkpoint->place = calloc((size_t)model->tensors, sizeof *checkpoint->place);
    if (!checkpoint->place)
        return eng_fail(error, ENG_NO_MEMORY, "no memory for the tensor table");
    for (int32_t i = 0; i < model->tensors; i++) {
        const eng_tensor *tensor = &model->tensor[i];
        eng_place *place = &checkpoint->place[i];
        bool part;
        *place = place_tensor(checkpoint, i, &part);
        char wanted[SHAPE_TEXT];
        if (!place->entry)
            return eng_fail(error, ENG_FORMAT, "%s: tensor '%.96s' is missing, config.json asks for it as %s",
                            eng_path_tail(checkpoint->dir), tensor->name,
                            shape_text(tensor->ndim, tensor->shape, wanted));
        eng_status status = check_entry(checkpoint, place, tensor, part, error);
        if (status != ENG_OK)
            return status;
    }
    return ENG_OK;
}

// A tensor that others are parts of must be theirs to the last row.
static eng_status check_parts(const eng_checkpoint *checkpoint, eng_error *error) {
    const eng_model *model = checkpoint->model;
    for (int32_t i = 0; i < model->tensors; i++) {
        const eng_st_entry *entry = checkpoint->place[i].entry;
        if (entry->count == model->tensor[i].count || eng_place_is_blocks(&checkpoint->place[i]))
            continue;
        int64_t used = 0;
        for (int32_t j = 0; j < model->tensors; j++)
            used += checkpoint->place[j].entry == entry ? model->tensor[j].count : 0;
        if (used != entry->count)
            return eng_fail(error, ENG_FORMAT, "%s: tensor '%.96s': some of its rows are there a second time",
                            eng_path_tail(eng_st_path(checkpoint->place[i].file)), entry->name);
    }
    return ENG_OK;
}

static eng_status compare_values(const eng_place *left, const eng_place *right, float *buffer, bool *equal,
                                 eng_error *error) {
    *equal = true;
    for (int64_t first = 0; *equal && first < right->entry->count; first += COMPARE_PIECE) {
        int64_t rest = right->entry->count - first, count = rest < COMPARE_PIECE ? rest : COMPARE_PIECE;
        eng_status status = eng_st_read_f32(left->file, left->entry, left->first + first, count, buffer, error);
        if (status == ENG_OK)
            status = eng_st_read_f32(right->file, right->entry, first, count, buffer + COMPARE_PIECE, error);
        if (status != ENG_OK)
            return status;
        *equal = memcmp(buffer, buffer + COMPARE_PIECE, (size_t)count * sizeof *buffer) == 0;
    }
    return ENG_OK;
}

// The tensor of the table that the entry would be a second copy of: a tied head, or a tensor by its other name. -1:
// none
static int32_t copied_tensor(const eng_model *model, const char *name) {
    if (model->config.tied && strcmp(name, head_name) == 0)
        return model->embed;
    for (int32_t i = 0; i < model->tensors; i++) {
        if (strcmp(name, model->tensor[i].alias) == 0)
            return i;
    }
    return -1;
}

static eng_status check_copy(const eng_checkpoint *checkpoint, eng_place *copy, int32_t index, eng_error *error) {
    const eng_model *model = checkpoint->model;
    eng_status status = check_entry(checkpoint, copy, &model->tensor[index], false, error);
    if (status != ENG_OK)
        return status;
    float *buffer = malloc(2 * COMPARE_PIECE * sizeof *buffer);
    if (!buffer)
        return eng_fail(error, ENG_NO_MEMORY, "no memory to compare two copies of a tensor");
    bool equal;
    status = compare_values(&checkpoint->place[index], copy, buffer, &equal, error);
    free(buffer);
    if (status == ENG_OK && !equal)
        status = eng_fail(error, ENG_FORMAT, "%s: tensor '%.64s' differs from '%.64s', but %s",
                          eng_path_tail(eng_st_path(copy->file)), copy->entry->name, model->tensor[index].name,
                          index == model->embed ? "tie_word_embeddings is true" : "both are names of one tensor");
    return status;
}

static bool is_left_behind(const char *name) {
    int layer, end = 0;
    if (sscanf(name, "model.layers.%d.%n", &layer, &end) != 1 || end == 0)
        return false;
    return strcmp(name + end, "attn.D") == 0 || strcmp(name + end, "self_attn.rotary_emb.inv_freq") == 0;
}

static int compare_pointers(const void *left, const void *right) {
    const eng_st_entry *a = *(const eng_st_entry *const *)left, *b = *(const eng_st_entry *const *)right;
    return (a > b) - (a < b);
}

static eng_status check_unexpected(const eng_checkpoint *checkpoint, const eng_st_entry **used, size_t count,
                                   eng_error *error) {
    for (size_t i = 0; i < checkpoint->files; i++) {
        const eng_st_file *file = checkpoint->file[i];
        for (size_t j = 0; j < eng_st_count(file); j++) {
            const eng_st_entry *entry = eng_st_at(file, j);
            if (bsearch(&entry, used, count, sizeof *used, compare_pointers) || is_left_behind(entry->name))
                continue;
            eng_place place = {.file = file, .entry = entry};
            int32_t copied = copied_tensor(checkpoint->model, entry->name);
            eng_status status = copied >= 0 ? check_copy(checkpoint, &place, copied, error)
                                            : eng_fail(error, ENG_FORMAT, "%s: tensor '%.96s' is not one of this model",
                                                       eng_path_tail(eng_st_path(file)), entry->name);
            if (status != ENG_OK)
                return status;
        }
    }
    return ENG_OK;
}

static eng_status refuse_unexpected(const eng_checkpoint *checkpoint, eng_error *error) {
    size_t tensors = (size_t)checkpoint->model->tensors, count = 0;
    const eng_st_entry **used = malloc(3 * tensors * sizeof *used);
    if (!used)
        return eng_fail(error, ENG_NO_MEMORY, "no memory for the tensor table");
    for (size_t i = 0; i < tensors; i++) {
        const eng_place *place = &checkpoint->place[i];
        const eng_st_entry *entry[] = {place->entry, place->scale.entry, place->minimum.entry};
        for (size_t j = 0; j < sizeof entry / sizeof *entry; j++)
            if (entry[j])
                used[count++] = entry[j];
    }
    qsort(used, count, sizeof *used, compare_pointers);
    eng_status status = check_unexpected(checkpoint, used, count, error);
    free(used);
    return status;
}

// ---- the door

eng_status eng_checkpoint_open(const char *dir, eng_checkpoint **out, eng_error *error) {
    eng_checkpoint *checkpoint = calloc(1, sizeof *checkpoint);
    if (checkpoint)
        checkpoint->dir = strdup(dir);
    eng_status status = checkpoint && checkpoint->dir ? ENG_OK : eng_fail(error, ENG_NO_MEMORY, "no memory for a path");
    if (status == ENG_OK)
        status = check_folder(dir, error);
    if (status == ENG_OK)
        status = read_model(checkpoint, error);
    if (status == ENG_OK)
        status = open_files(checkpoint, error);
    if (status == ENG_OK)
        status = place_tensors(checkpoint, error);
    if (status == ENG_OK)
        status = check_parts(checkpoint, error);
    if (status == ENG_OK)
        status = refuse_unexpected(checkpoint, error);
    if (status == ENG_OK)
        *out = checkpoint;
    else
        eng_checkpoint_close(checkpoint);
    return status;
}

void eng_checkpoint_close(eng_checkpoint *checkpoint) {
    if (!checkpoint)
        return;
    for (size_t i = 0; i < checkpoint->files; i++)
        eng_st_close(checkpoint->file[i]);
    free(checkpoint->file);
    free(checkpoint->place);
    eng_model_free(checkpoint->model);
    free(checkpoint->dir);
    free(checkpoint);
}

void eng_checkpoint_store_states(eng_checkpoint *checkpoint, kern_storage storage) {
    eng_model_store_states(checkpoint->model, storage);
}

const eng_model *eng_checkpoint_model(const eng_checkpoint *checkpoint) {
    return checkpoint->model;
}

eng_dtype eng_checkpoint_dtype(const eng_checkpoint *checkpoint, int32_t tensor) {
    return checkpoint->place[tensor].entry->dtype;
}

eng_status eng_checkpoint_digest(const eng_checkpoint *checkpoint, uint8_t digest[32], eng_error *error) {
    const char *json = checkpoint->model->config.json;
    unsigned char part[ENG_DIGEST_BYTES];
    eng_digest *whole = NULL;
    eng_status status = eng_digest_begin(&whole);
    if (status == ENG_OK)
        status = eng_digest_bytes(json, strlen(json), part);
    if (status == ENG_OK)
        status = eng_digest_add(whole, part, sizeof part);
    if (status != ENG_OK)
        eng_fail(error, status, "%s: cannot compute its digest", eng_path_tail(checkpoint->dir));
    for (size_t i = 0; status == ENG_OK && i < checkpoint->files; i++) {
        status = eng_digest_file(eng_st_path(checkpoint->file[i]), part, error);
        if (status == ENG_OK)
            status = eng_digest_add(whole, part, sizeof part);
    }
    if (status == ENG_OK)
        eng_digest_end(whole, digest);
    else
        eng_digest_free(whole);
    return status;
}
