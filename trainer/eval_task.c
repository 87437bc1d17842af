// SPDX-License-Identifier: Apache-2.0
// Tasks from files; see eval_task.h. The file stays in memory as it is and an item is parsed when it is asked for,
// which costs little beside a model and keeps a task of a hundred thousand items small.
#include "trainer/eval_task.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/digest.h"
#include "engine/files.h"
#include "trainer/documents.h"

enum { TASK_FILE_LIMIT = 1 << 30, NAME_LIMIT = 200 };

typedef struct record {
    size_t begin, length;
    int64_t line;
} record;

typedef struct file {
    char *path, *text;
    record *record;
    int64_t records, capacity;
    bool lines; // records are JSON, otherwise documents
} file;

static eng_status make_from_file(const trn_task *task, int64_t index, trn_item *out, eng_error *error) {
    const file *f = task->data;
    const record *r = &f->record[index];
    char origin[512];
    trn_json *json = NULL;
    *out = (trn_item){0};
    if (!f->lines)
        return trn_item_add_text(out, f->text + r->begin, r->length, error);
    snprintf(origin, sizeof origin, "%.440s:%lld", eng_path_tail(f->path), (long long)r->line);
    eng_status status = trn_json_parse(f->text + r->begin, r->length, origin, &json, error);
    if (status == ENG_OK)
        status = trn_item_read(json, out, error);
    trn_json_free(json);
    return status;
}

static void release_file(trn_task *task) {
    file *f = task->data;
    if (!f)
        return;
    free(f->path);
    free(f->text);
    free(f->record);
    free(f);
}

static eng_status add_record(file *f, record r, eng_error *error) {
    if (f->records == f->capacity) {
        int64_t capacity = f->capacity ? 2 * f->capacity : 256;
        record *grown = realloc(f->record, sizeof *grown * (size_t)capacity);
        if (!grown)
            return eng_fail(error, ENG_NO_MEMORY, "%s: out of memory", f->path);
        f->record = grown;
        f->capacity = capacity;
    }
    f->record[f->records++] = r;
    return ENG_OK;
}

static eng_status split_lines(file *f, size_t size, eng_error *error) {
    eng_status status = ENG_OK;
    int64_t line = 1;
    size_t mark = size >= 3 && memcmp(f->text, "\xef\xbb\xbf", 3) == 0 ? 3 : 0; // some editors put it in front
    for (size_t begin = mark, end; begin < size && status == ENG_OK; begin = end + 1, line++) {
        const char *stop = memchr(f->text + begin, '\n', size - begin);
        end = stop ? (size_t)(stop - f->text) : size;
        size_t blank = strspn(f->text + begin, " \t\r");
        if (begin + blank < end)
            status = add_record(f, (record){begin, end - begin, line}, error);
    }
    return status;
}

static eng_status read_lines(file *f, eng_error *error) {
    size_t size = 0;
    eng_status status = eng_read_file(f->path, TASK_FILE_LIMIT, &f->text, &size, error);
    if (status == ENG_OK && size > 0 && memchr(f->text, 0, size))
        status = eng_fail(error, ENG_FORMAT, "%s: byte %zu is NUL", eng_path_tail(f->path), strlen(f->text));
    return status == ENG_OK ? split_lines(f, size, error) : status;
}

static eng_status add_document(file *f, const char *text, size_t length, size_t *used, eng_error *error) {
    if (memchr(text, 0, length))
        return eng_fail(error, ENG_FORMAT, "%s: document %lld has a NUL", eng_path_tail(f->path),
                        (long long)f->records + 1);
    char *grown = realloc(f->text, *used + length + 1);
    if (!grown)
        return eng_fail(error, ENG_NO_MEMORY, "%s: out of memory", f->path);
    f->text = grown;
    memcpy(f->text + *used, text, length);
    eng_status status = add_record(f, (record){.begin = *used, .length = length}, error);
    *used += length;
    return status;
}

static eng_status read_documents(file *f, eng_error *error) {
    trn_documents *documents = NULL;
    size_t used = 0;
    eng_status status = trn_documents_open(f->path, &documents, error);
    for (const char *text = ""; status == ENG_OK && text;) {
        size_t length = 0;
        status = trn_documents_next(documents, &text, &length, error);
        if (status == ENG_OK && text && length > 0)
            status = add_document(f, text, length, &used, error);
    }
    trn_documents_close(documents);
    return status;
}

static eng_status check_records(trn_task *task, eng_error *error) {
    eng_status status = ENG_OK;
    for (int64_t i = 0; i < task->items && status == ENG_OK; i++) {
        trn_item item;
        status = make_from_file(task, i, &item, error);
        const file *f = task->data;
        if (status == ENG_OK && i == 0)
            task->is_text = item.is_text;
        if (status == ENG_OK && item.is_text != task->is_text)
            status = eng_fail(error, ENG_FORMAT, "%s:%lld: a text among other records", eng_path_tail(f->path),
                              (long long)f->record[i].line);
        trn_item_free(&item);
    }
    return status;
}

static char *task_name(const char *path) {
    const char *slash = strrchr(path, '/'), *base = slash ? slash + 1 : path, *dot = strrchr(base, '.');
    size_t length = dot && dot > base ? (size_t)(dot - base) : strlen(base);
    return strndup(base, length < NAME_LIMIT ? length : NAME_LIMIT);
}

static bool ends_with(const char *text, const char *end) {
    size_t length = strlen(text), more = strlen(end);
    return length >= more && strcmp(text + length - more, end) == 0;
}

eng_status trn_task_open_file(const char *path, trn_task *out, eng_error *error) {
    uint8_t digest[ENG_DIGEST_BYTES];
    file *f = calloc(1, sizeof *f);
    *out = (trn_task){.make = make_from_file, .release = release_file, .data = f, .name = task_name(path)};
    if (f)
        f->path = strdup(path);
    eng_status status = f && f->path && out->name ? ENG_OK : eng_fail(error, ENG_NO_MEMORY, "out of memory for a task");
    if (status == ENG_OK)
        status = eng_digest_file(path, digest, error);
    if (status == ENG_OK) {
        eng_digest_hex(digest, out->digest);
        f->lines = !ends_with(path, ".txt");
        status = f->lines ? read_lines(f, error) : read_documents(f, error);
    }
    if (status == ENG_OK && f->records == 0)
        status = eng_fail(error, ENG_FORMAT, "%s: no record", eng_path_tail(path));
    if (status == ENG_OK) {
        out->items = f->records;
        status = check_records(out, error);
    }
    if (status != ENG_OK)
        trn_task_close(out);
    return status;
}

void trn_task_close(trn_task *task) {
    if (task->release)
        task->release(task);
    free(task->name);
    *task = (trn_task){0};
}

eng_status trn_task_item(const trn_task *task, int64_t index, trn_item *out, eng_error *error) {
    return task->make(task, index, out, error);
}
