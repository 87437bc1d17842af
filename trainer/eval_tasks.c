// SPDX-License-Identifier: Apache-2.0
// Tasks under settings; see eval_tasks.h. Which items are read depends on the task, the seed, the limit and the number
// of shots alone: every checkpoint and every setting reads the same ones in the same order.
#include "trainer/eval_tasks.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/digest.h"
#include "engine/files.h"
#include "trainer/eval_overlap.h"
#include "trainer/eval_result.h"
#include "trainer/eval_work.h"
#include "trainer/permutation.h"

enum { MAX_LENGTHS = 32, SHOTS_EPOCH = 1, MAX_NAME = 64 };

// What is read of a task.
typedef struct selection {
    int64_t *item; // (items)
    int64_t items;
    char *examples; // never NULL
    int64_t first_overlap;
} selection;

typedef struct run {
    trn_evaluation *evaluation;
    const trn_tasks_options *options;
    const trn_task *task;
    const selection *selection;
    trn_encoder encoder;
    trn_result_row row;
    int64_t given, taken;
} run;

// --------------------------------------------------------------------------------------------------------------- tasks

static eng_status parse_lengths(const char *what, const char *text, int64_t *out, int *count, eng_error *error) {
    char copy[32];
    for (*count = 0; text && *text; (*count)++) {
        size_t length = strcspn(text, ",");
        snprintf(copy, sizeof copy, "%.*s", (int)(length < 24 ? length : 24), text);
        if (*count == MAX_LENGTHS)
            return eng_fail(error, ENG_INVALID, "%s: more than %d lengths", what, MAX_LENGTHS);
        eng_status status = trn_parse_integer(what, copy, &out[*count], error);
        if (status != ENG_OK)
            return status;
        if (out[*count] < 128 || out[*count] > 1 << 22)
            return eng_fail(error, ENG_INVALID, "%s: %s is not in 128..4194304", what, copy);
        text += length + (text[length] == ',');
    }
    return ENG_OK;
}

static eng_status parse_value(const char *text, trn_value_kind *out, eng_error *error) {
    static const char *const names[] = {"number", "word", "uuid"};
    for (int i = 0; i < 3; i++)
        if (strcmp(names[i], text) == 0) {
            *out = (trn_value_kind)i;
            return ENG_OK;
        }
    return eng_fail(error, ENG_INVALID, "--value: \"%.20s\" is none of number, word, uuid", text);
}

eng_status trn_result_check_output(const char *path, eng_error *error) {
    eng_output *output = NULL;
    eng_status status = path ? eng_output_open(path, &output, error) : ENG_OK;
    eng_output_discard(output);
    return status;
}

static eng_status check_in_domain(const trn_strings *named, const trn_tasks *tasks, eng_error *error) {
    for (int i = 0; i < named->count; i++) {
        int t = 0;
        while (t < tasks->count && strcmp(tasks->task[t].name, named->item[i]) != 0)
            t++;
        if (t == tasks->count)
            return eng_fail(error, ENG_INVALID, "--in-domain: no task \"%.60s\"", named->item[i]);
    }
    return ENG_OK;
}

eng_status trn_tasks_open(const trn_tasks_options *o, const eng_tokenizer *tokenizer, trn_tasks *out,
                          eng_error *error) {
    int64_t needles[MAX_LENGTHS], pairs[MAX_LENGTHS];
    int needle_count = 0, pair_count = 0;
    trn_made_options made = {
        .tokenizer = tokenizer, .haystack = o->haystack, .items = o->made_items, .seed = (uint64_t)o->seed};
    *out = (trn_tasks){0};
    eng_status status = trn_result_check_output(o->out, error);
    if (status == ENG_OK)
        status = parse_lengths("--needles", o->needles, needles, &needle_count, error);
    if (status == ENG_OK)
        status = parse_lengths("--pairs", o->pairs, pairs, &pair_count, error);
    if (status == ENG_OK)
        status = parse_value(o->value, &made.value, error);
    out->task = calloc((size_t)(o->files.count + needle_count + pair_count) + 1, sizeof *out->task);
    if (status == ENG_OK && !out->task)
        status = eng_fail(error, ENG_NO_MEMORY, "out of memory for tasks");
    for (int i = 0; i < o->files.count && status == ENG_OK; i++)
        status = trn_task_open_file(o->files.item[i], &out->task[out->count++], error);
    for (int i = 0; i < needle_count && status == ENG_OK; i++) {
        made.length = needles[i];
        status = trn_task_make_needles(&made, &out->task[out->count++], error);
    }
    for (int i = 0; i < pair_count && status == ENG_OK; i++) {
        made.length = pairs[i];
        status = trn_task_make_pairs(&made, &out->task[out->count++], error);
    }
    return status == ENG_OK ? check_in_domain(&o->in_domain, out, error) : status;
}

void trn_tasks_free(trn_tasks *tasks) {
    for (int i = 0; i < tasks->count; i++)
        trn_task_close(&tasks->task[i]);
    free(tasks->task);
    *tasks = (trn_tasks){0};
}

// ----------------------------------------------------------------------------------------------------------- selection

static void free_selection(selection *s) {
    free(s->item);
    free(s->examples);
    *s = (selection){0};
}

// Examples as they stand before a context: their own line ends where they have some, else an empty line between.
static eng_status add_example(const trn_task *task, int64_t index, char **examples, eng_error *error) {
    trn_item item;
    eng_status status = trn_task_item(task, index, &item, error);
    if (status == ENG_OK) {
        const char *context = item.context[item.gold];
        char *longer =
            trn_format("%s%s%s%s", *examples, context, item.continuation[item.gold], context[0] == '\n' ? "" : "\n\n");
        free(*examples);
        *examples = longer;
        if (!longer)
            status = eng_fail(error, ENG_NO_MEMORY, "out of memory for examples");
    }
    trn_item_free(&item);
    return status;
}

static eng_status select_items(const trn_task *task, const trn_tasks_options *o, selection *out, eng_error *error) {
    uint64_t items = (uint64_t)task->items, seed = (uint64_t)o->seed;
    int64_t shots = task->is_text || task->length > 0 ? 0 : o->shots;
    bool *taken = calloc((size_t)task->items, sizeof *taken);
    *out = (selection){.item = malloc(sizeof *out->item * (size_t)task->items), .examples = strdup("")};
    eng_status status = taken && out->item && out->examples
                            ? ENG_OK
                            : eng_fail(error, ENG_NO_MEMORY, "out of memory for a choice of items");
    if (status == ENG_OK && shots >= task->items)
        status = eng_fail(error, ENG_INVALID, "--shots: %s has %lld items", task->name, (long long)task->items);
    for (int64_t i = 0; i < shots && status == ENG_OK; i++) {
        int64_t example = (int64_t)trn_permute(items, seed, SHOTS_EPOCH, (uint64_t)i);
        taken[example] = true;
        status = add_example(task, example, &out->examples, error);
    }
    bool all = o->limit <= 0 || o->limit >= task->items;
    for (int64_t i = 0; status == ENG_OK && i < task->items && (all || out->items < o->limit); i++) {
        // items that were made are independent of each other, and their fifths alternate
        int64_t item = all || task->length > 0 ? i : (int64_t)trn_permute(items, seed, 0, (uint64_t)i);
        if (!taken[item])
            out->item[out->items++] = item;
    }
    free(taken);
    return status;
}

static eng_status add_overlaps(trn_overlap *overlap, const trn_task *task, const selection *s, eng_error *error) {
    eng_status status = ENG_OK;
    for (int64_t i = 0; i < s->items && status == ENG_OK; i++) {
        trn_item item = {0};
        if (task->length == 0)
            status = trn_task_item(task, s->item[i], &item, error);
        char *text =
            item.variants > 0 ? trn_format("%s%s", item.context[item.gold], item.continuation[item.gold]) : strdup("");
        if (status == ENG_OK)
            status = text ? trn_overlap_add(overlap, text, strlen(text), error)
                          : eng_fail(error, ENG_NO_MEMORY, "out of memory for overlaps");
        free(text);
        trn_item_free(&item);
    }
    return status;
}

static eng_status find_overlaps(const trn_tasks_options *o, const trn_tasks *tasks, selection *s,
                                const eng_tokenizer *tokenizer, trn_overlap **out, eng_error *error) {
    eng_status status = trn_overlap_create(out, error);
    int64_t items = 0;
    for (int i = 0; i < tasks->count && status == ENG_OK; i++) {
        s[i].first_overlap = items;
        items += s[i].items;
        status = add_overlaps(*out, &tasks->task[i], &s[i], error);
    }
    for (int i = 0; i < o->overlap.count && status == ENG_OK; i++)
        status = trn_overlap_scan_shards(*out, o->overlap.item[i], tokenizer, error);
    return status;
}

// ---------------------------------------------------------------------------------------------------------------- rows

static eng_status next_work(void *context, trn_passage **out, eng_error *error) {
    run *r = context;
    trn_item item;
    trn_work *work = NULL;
    *out = NULL;
    if (r->given == r->selection->items)
        return ENG_OK;
    int64_t place = r->given++;
    eng_status status = trn_task_item(r->task, r->selection->item[place], &item, error);
    if (status == ENG_OK && item.group[0]) {
        int32_t group = trn_result_group(&r->row, item.group);
        if (!r->row.group && group >= 0) {
            r->row.group = malloc(sizeof *r->row.group * (size_t)r->row.items);
            for (int64_t i = 0; r->row.group && i < r->row.items; i++)
                r->row.group[i] = -1;
        }
        if (group < 0 || !r->row.group)
            status = eng_fail(error, ENG_NO_MEMORY, "out of memory for groups");
        else
            r->row.group[place] = group;
    }
    if (status != ENG_OK) {
        trn_item_free(&item);
        return status;
    }
    status = trn_work_create(&r->encoder, &item, place, &work, error);
    if (status == ENG_OK)
        *out = &work->passage;
    return status;
}

static eng_status done_work(void *context, trn_passage *passage, eng_error *error) {
    run *r = context;
    trn_work *work = (trn_work *)passage;
    eng_status status = trn_work_record(&r->encoder, work, &r->row, error);
    trn_work_free(work);
    trn_progress_part(&r->evaluation->progress, (uint64_t)++r->taken, (uint64_t)r->row.items, r->task->name);
    return status;
}

static void drop_work(void *context, trn_passage *passage) {
    (void)context;
    trn_work_free((trn_work *)passage);
}

static bool work_stops(void *context, const trn_passage *passage, const trn_reading *reading) {
    const run *r = context;
    return trn_work_stops(&r->encoder, (const trn_work *)passage, reading);
}

static void describe_row(run *r, const trn_setting *setting, const trn_overlap *overlap) {
    trn_result_row *row = &r->row;
    const trn_tasks_options *o = r->options;
    snprintf(row->digest, sizeof row->digest, "%s", r->task->digest);
    row->setting = *setting;
    row->length = r->task->length;
    row->shots = r->task->is_text || r->task->length > 0 ? 0 : o->shots;
    row->seed = o->seed;
    row->limit = o->limit;
    for (int i = 0; i < o->in_domain.count; i++)
        row->in_domain = row->in_domain || strcmp(o->in_domain.item[i], row->task) == 0;
    for (int64_t i = 0; row->overlap && i < row->items; i++)
        row->overlap[i] = trn_overlap_marked(overlap, r->selection->first_overlap + i);
}

static eng_status run_row(run *r, trn_reader *reader, const trn_setting *setting, const trn_overlap *overlap,
                          eng_error *error) {
    const trn_passage_source source = {r, next_work, done_work, drop_work, work_stops};
    int32_t *stem = NULL;
    size_t stem_count = 0;
    r->given = r->taken = 0;
    eng_status status = trn_result_row_create(r->task->name, r->selection->items, &r->row, error);
    if (status == ENG_OK && overlap && r->task->length == 0 &&
        !(r->row.overlap = calloc((size_t)r->row.items, sizeof *r->row.overlap)))
        status = eng_fail(error, ENG_NO_MEMORY, "out of memory for overlaps");
    if (status == ENG_OK) {
        describe_row(r, setting, overlap);
        if (r->encoder.examples[0])
            status = eng_tokenizer_encode(r->encoder.tokenizer, r->encoder.examples, strlen(r->encoder.examples), false,
                                          true, &stem, &stem_count, error);
    }
    if (status == ENG_OK)
        status = trn_reader_run(reader, &source, &setting->knobs, stem, (int32_t)stem_count, &r->row.figures, error);
    free(stem);
    trn_progress_end(&r->evaluation->progress);
    if (status == ENG_OK)
        trn_work_finish(&r->row);
    return status;
}

// Whoever names nearly always the same letter answers the form of the questions: its score is that of the key.
static void warn_of_place(const trn_result_row *row) {
    int most = 0;
    for (int i = 1; i < TRN_PLACES; i++)
        most = row->taken[i] > row->taken[most] ? i : most;
    if (row->items >= 20 && 10 * row->taken[most] >= 9 * row->items)
        fprintf(stderr,
                "mesa-trainer eval: %s: choice %d is the likeliest in %lld of %lld items: what is measured is how "
                "often it is right\n",
                row->task, most, (long long)row->taken[most], (long long)row->items);
}

static void print_row(const trn_result_row *row) {
    const trn_reading_figures *f = &row->figures;
    for (int i = 0; i < row->metrics; i++) {
        const trn_metric *metric = &row->metric[i];
        trn_estimate all = trn_metric_estimate(metric, NULL, NULL, 0);
        printf("| %s%s | %s | %s%s | %.4f | %.4f |", row->task, row->in_domain ? " (in-domain)" : "", row->setting.name,
               metric->name, strcmp(metric->name, row->primary) == 0 ? " *" : "", all.mean, all.error);
        if (row->overlap) {
            trn_estimate clean = trn_metric_estimate(metric, row->overlap, NULL, 0);
            printf(" %.4f (%lld) |", clean.mean, (long long)clean.count);
        } else
            printf(" - |");
        printf(" %lld | %.0f |\n", (long long)all.count, f->seconds > 0 ? (double)f->unshared / f->seconds : 0);
    }
    for (int b = 0; b < TRN_BUCKETS; b++)
        if (row->position[b].items > 0) {
            trn_estimate at = trn_metric_estimate(&row->position[b], NULL, NULL, 0);
            printf("| %s | %s | loss at %s | %.4f | %.4f | - | %lld | |\n", row->task, row->setting.name,
                   row->position[b].name, at.mean, at.error, (long long)at.count);
        }
    fflush(stdout);
}

// -------------------------------------------------------------------------------------------------------------- result

// The last two parts of a path name a checkpoint of a run.
static char *short_name(const char *dir) {
    size_t end = strlen(dir);
    while (end > 1 && dir[end - 1] == '/')
        end--;
    size_t begin = end;
    for (int slashes = 0; begin > 0 && !(dir[begin - 1] == '/' && ++slashes == 2);)
        begin--;
    return strndup(dir + begin, end - begin < MAX_NAME ? end - begin : MAX_NAME);
}

eng_status trn_result_describe(const trn_evaluation *e, const char *dir, const char *name, trn_result *out,
                               eng_error *error) {
    uint8_t digest[ENG_DIGEST_BYTES];
    char hex[ENG_DIGEST_HEX];
    eng_status status = eng_checkpoint_digest(e->checkpoint, digest, error);
    if (status != ENG_OK)
        return status;
    eng_digest_hex(digest, hex);
    *out = (trn_result){.name = name ? strdup(name) : short_name(dir),
                        .model = strdup(dir),
                        .digest = strdup(hex),
                        .model_type = strdup(e->model->config.model_type),
                        .device = strdup(kern_device_describe(e->device)->description),
                        .parameters = (int64_t)e->model->parameters,
                        .weight_bytes = (int64_t)e->weights->bytes,
                        .state_bytes = (int64_t)e->model->state_bytes,
                        .trained_length = e->model->config.trained_length};
    if (out->name && out->model && out->digest && out->model_type && out->device)
        return ENG_OK;
    return eng_fail(error, ENG_NO_MEMORY, "out of memory for results");
}

// Ids of the longest reading: what the tasks can come to, and no more than the model takes.
static eng_status longest_of(const run *r, const trn_tasks *tasks, const selection *s, int64_t *out, eng_error *error) {
    int64_t longest = r->encoder.context + 1;
    eng_status status = ENG_OK;
    for (int t = 0; t < tasks->count && status == ENG_OK; t++) {
        const trn_task *task = &tasks->task[t];
        longest = task->length > longest ? task->length : longest;
        for (int64_t i = 0; i < s[t].items && status == ENG_OK && task->length == 0 && !task->is_text; i++) {
            trn_item item;
            status = trn_task_item(task, s[t].item[i], &item, error);
            for (int32_t v = 0; v < item.variants && status == ENG_OK; v++) { // a token is at least a byte
                size_t bytes = strlen(s[t].examples) + strlen(item.context[v]) + strlen(item.continuation[v]);
                int64_t length = (int64_t)bytes + item.generate + 1;
                longest = length > longest ? length : longest;
            }
            trn_item_free(&item);
        }
    }
    *out = r->encoder.most > 0 && longest > r->encoder.most ? r->encoder.most : longest;
    return status;
}

static eng_status run_all(run *r, const trn_tasks *tasks, const selection *s, const trn_overlap *overlap,
                          const trn_setting *setting, int settings, trn_result *result, eng_error *error) {
    trn_reader *reader = NULL;
    int64_t longest = 0;
    eng_status status = longest_of(r, tasks, s, &longest, error);
    if (status == ENG_OK)
        status = trn_reader_create(r->evaluation->weights, r->options->batch_tokens, longest, &reader, error);
    if (status == ENG_OK)
        printf("| task | solver | metric | estimate | error | without overlap | items | tokens/s |\n"
               "|---|---|---|---|---|---|---|---|\n");
    for (int t = 0; t < tasks->count && status == ENG_OK; t++)
        for (int i = 0; i < settings && status == ENG_OK; i++) {
            r->task = &tasks->task[t];
            r->selection = &s[t];
            r->encoder.examples = s[t].examples;
            status = run_row(r, reader, &setting[i], overlap, error);
            if (status == ENG_OK) {
                print_row(&r->row);
                warn_of_place(&r->row);
                status = trn_result_add(result, &r->row, error);
            }
            if (status == ENG_OK && r->options->out) // who ends the program early keeps the rows that are done
                status = trn_result_write(result, r->options->out, error);
            trn_result_row_free(&r->row);
        }
    trn_reader_free(reader);
    return status;
}

eng_status trn_tasks_run(trn_evaluation *e, const char *dir, const trn_tasks_options *o, const trn_tasks *tasks,
                         const trn_setting *setting, int settings, eng_error *error) {
    const eng_config *config = &e->model->config;
    int64_t trained = config->trained_length > 0 ? config->trained_length : 1024;
    run r = {.evaluation = e,
             .options = o,
             .encoder = {.tokenizer = e->tokenizer,
                         .config = config,
                         .examples = "",
                         .context = (int32_t)(o->context > 0 ? o->context : trained),
                         .most = eng_model_has_pages(e->model) ? config->max_positions : -1}};
    trn_overlap *overlap = NULL;
    trn_result result = {0};
    selection *s = calloc((size_t)tasks->count + 1, sizeof *s);
    eng_status status = s ? trn_result_describe(e, dir, o->name, &result, error)
                          : eng_fail(error, ENG_NO_MEMORY, "out of memory for tasks");
    for (int i = 0; i < tasks->count && status == ENG_OK; i++)
        status = select_items(&tasks->task[i], o, &s[i], error);
    if (status == ENG_OK && o->overlap.count > 0)
        status = find_overlaps(o, tasks, s, e->tokenizer, &overlap, error);
    if (status == ENG_OK)
        status = run_all(&r, tasks, s, overlap, setting, settings, &result, error);
    for (int i = 0; s && i < tasks->count; i++)
        free_selection(&s[i]);
    free(s);
    trn_overlap_free(overlap);
    trn_result_free(&result);
    return status;
}
