// SPDX-License-Identifier: Apache-2.0
// The optimizer's moments and rests in a file; see optimizer.h. Host memory: a copy of them while they are written, of
// a tensor while they are read. A piece is read from whichever files hold its elements, so that any number of ranks
// reads what any number has written.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/files.h"
#include "engine/forward.h"
#include "engine/safetensors.h"
#include "trainer/optimizer.h"
#include "trainer/options.h"

enum { PREFIXED_NAME = ENG_NAME_SIZE + 4, NUMBER = 24 };

static bool is_whole(const eng_tensor *tensor, const trn_piece *piece) {
    return piece->count == tensor->count;
}

static eng_st_source describe(const trn_optimizer *optimizer, const trn_piece *piece, const char *name,
                              const float *host) {
    const eng_tensor *tensor = &optimizer->weights->model->tensor[piece->tensor];
    eng_st_source source = {
        .name = name, .dtype = ENG_F32, .ndim = 1, .shape = {piece->count}, .data = host + piece->moment};
    if (is_whole(tensor, piece)) {
        source.ndim = tensor->ndim;
        memcpy(source.shape, tensor->shape, sizeof tensor->shape);
    }
    return source;
}

enum { MOST_KINDS = 3 };

// What a weight has beside itself, by the letter of its name in files.
typedef struct kinds {
    size_t count;
    char letter[MOST_KINDS];
    float *vector[MOST_KINDS]; // (moments) device
} kinds;

static kinds kinds_of(const trn_optimizer *optimizer) {
    return (kinds){optimizer->rest ? 3 : 2, {'m', 'v', 'r'}, {optimizer->m, optimizer->v, optimizer->rest}};
}

// What a file of moments is written from.
typedef struct moment_file {
    float *host;                 // (kinds, moments)
    eng_st_source *source;       // (kinds, pieces)
    char (*name)[PREFIXED_NAME]; // (kinds, pieces)
    char (*first)[NUMBER];       // (pieces)
    const char **metadata;       // name, first, ... NULL
} moment_file;

static void file_free(moment_file *file) {
    free(file->host);
    free(file->source);
    free(file->name);
    free(file->first);
    free(file->metadata);
}

static eng_status file_create(const trn_optimizer *optimizer, moment_file *file, eng_error *error) {
    const size_t pieces = (size_t)optimizer->pieces + 1; // none is no reason for an empty allocation
    const size_t count = kinds_of(optimizer).count;
    *file = (moment_file){.host = malloc(count * ((size_t)optimizer->moments + 1) * sizeof *file->host),
                          .source = calloc(count * pieces, sizeof *file->source),
                          .name = calloc(count * pieces, sizeof *file->name),
                          .first = calloc(pieces, sizeof *file->first),
                          .metadata = calloc(2 * pieces + 1, sizeof *file->metadata)};
    if (file->host && file->source && file->name && file->first && file->metadata)
        return ENG_OK;
    file_free(file);
    return eng_fail(error, ENG_NO_MEMORY, "out of memory for the optimizer's moments");
}

static void fill_file(const trn_optimizer *optimizer, const kinds *kinds, moment_file *file) {
    const size_t pieces = (size_t)optimizer->pieces;
    size_t told = 0;
    for (size_t i = 0; i < kinds->count * pieces; i++) {
        const size_t kind = i / pieces;
        const trn_piece *piece = &optimizer->piece[i % pieces];
        const eng_tensor *tensor = &optimizer->weights->model->tensor[piece->tensor];
        const float *host = file->host + kind * (size_t)optimizer->moments;
        snprintf(file->name[i], sizeof file->name[i], "%c.%s", kinds->letter[kind], tensor->name);
        file->source[i] = describe(optimizer, piece, file->name[i], host);
        if (i >= pieces || is_whole(tensor, piece))
            continue;
        snprintf(file->first[i], sizeof file->first[i], "%lld", (long long)piece->first);
        file->metadata[told++] = tensor->name;
        file->metadata[told++] = file->first[i];
    }
}

eng_status trn_optimizer_save(trn_optimizer *optimizer, const char *path, eng_error *error) {
    const size_t floats = (size_t)optimizer->moments;
    const kinds kinds = kinds_of(optimizer);
    moment_file file;
    eng_status status = file_create(optimizer, &file, error);
    if (status != ENG_OK)
        return status;
    kern_status copied = KERN_OK;
    for (size_t k = 0; copied == KERN_OK && k < kinds.count; k++)
        copied = kern_download(optimizer->stream, file.host + k * floats, kinds.vector[k], floats * sizeof *file.host);
    if (copied == KERN_OK)
        copied = kern_synchronize(optimizer->stream);
    status = eng_fail_kernel(error, copied, "reading the moments");
    fill_file(optimizer, &kinds, &file);
    if (status == ENG_OK)
        status = eng_st_write(path, file.source, kinds.count * (size_t)optimizer->pieces,
                              file.metadata[0] ? file.metadata : NULL, error);
    file_free(&file);
    return status;
}

// ------------------------------------------------------------------------------------------------------------- loading

static bool same_shape(const eng_tensor *tensor, const eng_st_entry *entry) {
    return entry->ndim == tensor->ndim &&
           memcmp(entry->shape, tensor->shape, sizeof *entry->shape * (size_t)tensor->ndim) == 0;
}

// Where an entry begins in its tensor.
static eng_status first_of(const eng_st_file *file, const eng_st_entry *entry, const eng_tensor *tensor, int64_t *first,
                           eng_error *error) {
    const char *told = eng_st_metadata(file, tensor->name), *path = eng_path_tail(eng_st_path(file));
    *first = 0;
    if (entry->dtype == ENG_F32 && !told && same_shape(tensor, entry))
        return ENG_OK;
    if (entry->dtype != ENG_F32 || !told || entry->ndim != 1)
        return eng_fail(error, ENG_FORMAT, "%s: %s: not the model's shape in F32", path, entry->name);
    eng_status status = trn_parse_integer(tensor->name, told, first, NULL);
    if (status != ENG_OK || *first < 0 || *first > tensor->count || entry->count > tensor->count - *first)
        return eng_fail(error, ENG_FORMAT, "%s: %s: not a piece of the model's tensor", path, entry->name);
    return ENG_OK;
}

typedef struct moment_files {
    eng_st_file **file;
    int32_t count;
} moment_files;

// Reads on from element `at` of a tensor: *taken elements, at least one.
static eng_status read_on(const moment_files *files, const eng_tensor *tensor, const char *name, int64_t at,
                          int64_t count, float *host, int64_t *taken, eng_error *error) {
    for (int32_t i = 0; i < files->count; i++) {
        const eng_st_entry *entry = eng_st_find(files->file[i], name);
        int64_t first = 0;
        eng_status status = entry ? first_of(files->file[i], entry, tensor, &first, error) : ENG_OK;
        if (status != ENG_OK)
            return status;
        if (!entry || at < first || at >= first + entry->count)
            continue;
        *taken = first + entry->count - at < count ? first + entry->count - at : count;
        return eng_st_read_f32(files->file[i], entry, at - first, *taken, host, error);
    }
    return eng_fail(error, ENG_FORMAT, "%s: %s: missing", eng_path_tail(eng_st_path(files->file[0])), name);
}

static eng_status load_piece(trn_optimizer *optimizer, const moment_files *files, const trn_piece *piece, char letter,
                             float *device, float *host, eng_error *error) {
    const eng_tensor *tensor = &optimizer->weights->model->tensor[piece->tensor];
    char name[PREFIXED_NAME];
    snprintf(name, sizeof name, "%c.%s", letter, tensor->name);
    eng_status status = ENG_OK;
    for (int64_t at = 0, taken = 0; status == ENG_OK && at < piece->count; at += taken)
        status = read_on(files, tensor, name, piece->first + at, piece->count - at, host + at, &taken, error);
    if (status == ENG_OK && eng_count_nonfinite(host, piece->count) > 0)
        status = eng_fail(error, ENG_NUMERIC, "%s: %s: values that are not finite",
                          eng_path_tail(eng_st_path(files->file[0])), name);
    if (status != ENG_OK)
        return status;
    kern_status copied =
        kern_upload(optimizer->stream, device + piece->moment, host, sizeof *host * (size_t)piece->count);
    if (copied == KERN_OK)
        copied = kern_synchronize(optimizer->stream);
    return eng_fail_kernel(error, copied, "loading the moments");
}

// Going on without the rests, or without what they were, would be a step back that nobody sees.
static eng_status check_rests(const trn_optimizer *optimizer, const moment_files *files, eng_error *error) {
    for (int32_t i = 0; i < files->count; i++)
        for (int32_t t = 0; t < optimizer->weights->model->tensors; t++) {
            const char *tensor = optimizer->weights->model->tensor[t].name;
            char moment[PREFIXED_NAME], rest[PREFIXED_NAME];
            snprintf(moment, sizeof moment, "m.%s", tensor);
            snprintf(rest, sizeof rest, "r.%s", tensor);
            const bool has = eng_st_find(files->file[i], rest) != NULL;
            if (eng_st_find(files->file[i], moment) && has != (optimizer->rest != NULL))
                return eng_fail(error, ENG_INVALID, "%s: optim.rounding was %scompensated, and is %s",
                                eng_path_tail(eng_st_path(files->file[i])), has ? "" : "not ",
                                has ? "not any more" : "so now");
        }
    return ENG_OK;
}

static eng_status load_pieces(trn_optimizer *optimizer, const moment_files *files, eng_error *error) {
    const kinds kinds = kinds_of(optimizer);
    int64_t most = 1;
    for (int32_t i = 0; i < optimizer->pieces; i++)
        most = optimizer->piece[i].count > most ? optimizer->piece[i].count : most;
    float *host = malloc(sizeof *host * (size_t)most);
    eng_status status = host ? ENG_OK : eng_fail(error, ENG_NO_MEMORY, "out of memory for the optimizer's moments");
    for (int32_t i = 0; status == ENG_OK && i < optimizer->pieces; i++) {
        for (size_t k = 0; status == ENG_OK && k < kinds.count; k++)
            status = load_piece(optimizer, files, &optimizer->piece[i], kinds.letter[k], kinds.vector[k], host, error);
    }
    free(host);
    return status;
}

eng_status trn_optimizer_load(trn_optimizer *optimizer, const char *const *path, int32_t files, eng_error *error) {
    moment_files open = {.file = calloc((size_t)files, sizeof *open.file)};
    eng_status status = open.file ? ENG_OK : eng_fail(error, ENG_NO_MEMORY, "out of memory for %d files", files);
    while (status == ENG_OK && open.count < files) {
        status = eng_st_open(path[open.count], &open.file[open.count], error);
        open.count += status == ENG_OK;
    }
    if (status == ENG_OK)
        status = check_rests(optimizer, &open, error);
    if (status == ENG_OK)
        status = load_pieces(optimizer, &open, error);
    for (int32_t i = 0; i < open.count; i++)
        eng_st_close(open.file[i]);
    free(open.file);
    return status;
}
