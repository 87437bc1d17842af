// SPDX-License-Identifier: Apache-2.0
// Items to readings and readings to values; see eval_work.h.
//
// The border is found by counting bytes from the end: what a tokenizer puts in front or changes there does not move it.
// A choice's score is the sum of its log-probabilities; `acc` takes the best sum, `acc_norm` the best sum a byte.
#include "trainer/eval_work.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { LABEL_BYTES = 5 }; // "A", "yes", "maybe"

static eng_status no_memory(eng_error *error) {
    return eng_fail(error, ENG_NO_MEMORY, "out of memory for an item's ids");
}

void trn_work_free(trn_work *work) {
    if (!work)
        return;
    for (int32_t i = 0; i < work->passage.readings; i++) {
        free(work->passage.reading[i].logprob);
        free(work->passage.reading[i].drawn);
    }
    for (int32_t i = 0; i < work->owned_count; i++)
        free(work->owned[i]);
    free(work->owned);
    free(work->passage.reading);
    trn_item_free(&work->item);
    free(work);
}

// ------------------------------------------------------------------------------------------------------------ encoding

static int32_t beginning(const eng_config *config) {
    return config->bos_id >= 0 ? config->bos_id : config->eos_count > 0 ? config->eos_id[0] : -1;
}

// The work owns the ids from now on.
static eng_status own(trn_work *work, int32_t *ids, eng_error *error) {
    int32_t **grown = realloc(work->owned, sizeof *grown * ((size_t)work->owned_count + 1));
    if (!grown || !ids) {
        free(ids);
        return no_memory(error);
    }
    work->owned = grown;
    work->owned[work->owned_count++] = ids;
    return ENG_OK;
}

static eng_status add_reading(trn_work *work, trn_reading reading, eng_error *error) {
    trn_reading *grown = realloc(work->passage.reading, sizeof *grown * ((size_t)work->passage.readings + 1));
    if (!grown)
        return no_memory(error);
    reading.logprob = malloc(sizeof *reading.logprob * ((size_t)(reading.count - reading.first) + 1));
    reading.drawn = malloc(sizeof *reading.drawn * ((size_t)reading.generate + 1));
    work->passage.reading = grown;
    work->passage.reading[work->passage.readings++] = reading;
    return reading.logprob && reading.drawn ? ENG_OK : no_memory(error);
}

// What does not fit into the model's context goes, from the front.
static trn_reading cut(const trn_encoder *encoder, trn_work *work, trn_reading reading) {
    int64_t over = encoder->most < 0 ? 0 : (int64_t)reading.count + reading.generate - encoder->most;
    if (over <= 0)
        return reading;
    if (over > reading.first - 1)
        over = reading.first - 1; // what is scored stays, and is refused when read
    reading.ids += over;
    reading.count -= (int32_t)over;
    reading.first -= (int32_t)over;
    work->truncated++;
    return reading;
}

// Ids of a text with one in front where there would be none, or where `first` would be 0.
static eng_status encode(const trn_encoder *encoder, trn_work *work, const char *text, size_t length, size_t scored,
                         trn_reading *out, eng_error *error) {
    int32_t *ids = NULL;
    size_t count = 0, bytes = 0;
    eng_status status = eng_tokenizer_encode(encoder->tokenizer, text, length, false, true, &ids, &count, error);
    if (status != ENG_OK)
        return status;
    size_t first = count, least = count > 0 && ids[0] == eng_tokenizer_bos(encoder->tokenizer);
    while (first > least && bytes < scored) {
        size_t part = 0;
        eng_tokenizer_bytes(encoder->tokenizer, ids[--first], &part);
        bytes += part;
    }
    if (first == 0) {
        int32_t begin = beginning(encoder->config), *longer = malloc(sizeof *longer * (count + 1));
        if (longer && begin >= 0) {
            longer[0] = begin;
            memcpy(longer + 1, ids, sizeof *ids * count);
        }
        free(ids);
        ids = longer;
        if (!longer || begin < 0) {
            free(longer);
            return longer ? eng_fail(error, ENG_UNSUPPORTED, "the model has no id that begins a text")
                          : no_memory(error);
        }
        first++;
        count++;
    }
    *out = (trn_reading){.ids = ids, .count = (int32_t)count, .first = (int32_t)first};
    return own(work, ids, error);
}

static eng_status add_variant(const trn_encoder *encoder, trn_work *work, const char *context, const char *continuation,
                              int32_t generate, eng_error *error) {
    trn_reading reading;
    char *text = trn_format("%s%s%s", encoder->examples, context, continuation);
    eng_status status =
        text ? encode(encoder, work, text, strlen(text), strlen(continuation), &reading, error) : no_memory(error);
    free(text);
    reading.generate = generate;
    return status == ENG_OK ? add_reading(work, cut(encoder, work, reading), error) : status;
}

static eng_status add_windows(const trn_encoder *encoder, trn_work *work, eng_error *error) {
    const char *text = work->item.continuation[0];
    const eng_config *config = encoder->config;
    int32_t *ids = NULL, begin = beginning(config);
    size_t count = 0, length = 0;
    if (begin < 0)
        return eng_fail(error, ENG_UNSUPPORTED, "the model has no id that begins a text");
    eng_status status = eng_tokenizer_encode(encoder->tokenizer, text, strlen(text), false, false, &ids, &count, error);
    int32_t *all = malloc(sizeof *all * (count + 2));
    if (status == ENG_OK && all) {
        all[length++] = begin;
        memcpy(all + length, ids, sizeof *ids * count);
        length += count;
        if (config->eos_count > 0)
            all[length++] = config->eos_id[0];
    }
    free(ids);
    if (status == ENG_OK)
        status = own(work, all, error);
    else
        free(all);
    for (size_t at = 0; status == ENG_OK && at + 1 < length; at += (size_t)encoder->context) {
        size_t pairs = length - 1 - at < (size_t)encoder->context ? length - 1 - at : (size_t)encoder->context;
        status = add_reading(work, (trn_reading){.ids = all + at, .count = (int32_t)pairs + 1, .first = 1}, error);
    }
    return status;
}

eng_status trn_work_create(const trn_encoder *encoder, trn_item *item, int64_t place, trn_work **out,
                           eng_error *error) {
    trn_work *work = calloc(1, sizeof *work);
    if (!work) {
        trn_item_free(item);
        return no_memory(error);
    }
    work->item = *item;
    work->place = place;
    *item = (trn_item){0};
    eng_status status = work->item.is_text ? add_windows(encoder, work, error) : ENG_OK;
    for (int32_t i = 0; i < work->item.variants && !work->item.is_text && status == ENG_OK; i++)
        status = add_variant(encoder, work, work->item.context[i], work->item.continuation[i], 0, error);
    work->scored = work->passage.readings;
    if (status == ENG_OK && work->item.generate > 0)
        status = add_variant(encoder, work, work->item.context[work->item.gold], "", work->item.generate, error);
    if (status == ENG_OK)
        *out = work;
    else
        trn_work_free(work);
    return status;
}

// ------------------------------------------------------------------------------------------------------------- answers

static char lower(char c) {
    return c >= 'A' && c <= 'Z' ? (char)(c + 32) : c;
}

static bool contains(const char *text, const char *part) {
    for (; *text; text++) {
        size_t i = 0;
        while (part[i] && lower(text[i]) == lower(part[i]))
            i++;
        if (!part[i])
            return true;
    }
    return false;
}

// The first line with text in it. *ended: a line end follows it. New memory; NULL: none.
static char *answer_of(const trn_encoder *encoder, const trn_reading *reading, bool *ended) {
    char *text = NULL;
    size_t length = 0;
    eng_error ignored = {0};
    *ended = false;
    if (eng_tokenizer_decode(encoder->tokenizer, reading->drawn, (size_t)reading->drawn_count, false, &text, &length,
                             &ignored) != ENG_OK)
        return NULL;
    size_t blank = strspn(text, " \t\r\n"), line = strcspn(text + blank, "\n");
    *ended = text[blank + line] == '\n';
    text[blank + line] = '\0';
    return text;
}

static bool is_accepted(const trn_item *item, const char *text) {
    for (int32_t i = 0; i < item->accepted_count; i++)
        if (contains(text, item->accepted[i]))
            return true;
    return false;
}

bool trn_work_stops(const trn_encoder *encoder, const trn_work *work, const trn_reading *reading) {
    bool ended = false;
    char *text = answer_of(encoder, reading, &ended);
    bool stops = ended || (text && is_accepted(&work->item, text));
    free(text);
    return stops;
}

// -------------------------------------------------------------------------------------------------------------- values

static double sum_of(const trn_reading *reading) {
    double sum = 0;
    for (int32_t i = 0; i < reading->count - reading->first; i++)
        sum += (double)reading->logprob[i];
    return sum;
}

static eng_status put(trn_result_row *row, const char *name, int64_t place, double value, double weight, double chance,
                      eng_error *error) {
    trn_metric *metric = trn_result_metric(row, name, weight >= 0);
    if (!metric)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for results");
    metric->value[place] = value;
    if (weight >= 0)
        metric->weight[place] = weight;
    if (!isnan(chance))
        metric->chance = (isnan(metric->chance) ? 0 : metric->chance) + chance; // a mean after trn_work_finish
    return ENG_OK;
}

static eng_status record_text(const trn_work *work, trn_result_row *row, eng_error *error) {
    double loss = 0, targets = 0;
    for (int32_t r = 0; r < work->scored; r++) {
        const trn_reading *reading = &work->passage.reading[r];
        loss -= sum_of(reading);
        targets += reading->count - reading->first;
        for (int32_t i = 0; i < reading->count - 1; i++) {
            trn_metric *position = trn_result_position(row, trn_bucket_of(i));
            if (!position)
                return eng_fail(error, ENG_NO_MEMORY, "out of memory for results");
            double before = isnan(position->value[work->place]) ? 0 : position->value[work->place];
            position->value[work->place] = before - (double)reading->logprob[i];
            position->weight[work->place]++;
        }
    }
    eng_status status = put(row, "bits_per_byte", work->place, loss / log(2), work->item.bytes[0], NAN, error);
    return status == ENG_OK ? put(row, "loss", work->place, loss, targets, NAN, error) : status;
}

static bool normalises(const trn_item *item) {
    bool labels = true;
    for (int32_t i = 0; i < item->variants; i++)
        labels = labels && item->bytes[i] <= LABEL_BYTES;
    return !labels && item->context[0][0] && strcmp(item->context[0], item->context[1]) == 0 && item->generate == 0;
}

static eng_status record_choices(const trn_work *work, trn_result_row *row, eng_error *error) {
    int32_t best = 0, best_norm = 0;
    double most = -INFINITY, most_norm = -INFINITY, chance = 1.0 / work->item.variants;
    for (int32_t i = 0; i < work->item.variants; i++) {
        double sum = sum_of(&work->passage.reading[i]), norm = sum / work->item.bytes[i];
        best = sum > most ? i : best;
        most = sum > most ? sum : most;
        best_norm = norm > most_norm ? i : best_norm;
        most_norm = norm > most_norm ? norm : most_norm;
    }
    if (best < TRN_PLACES)
        row->taken[best]++;
    row->normalises = row->normalises || normalises(&work->item);
    eng_status status = put(row, "acc", work->place, best == work->item.gold, -1, chance, error);
    return status == ENG_OK ? put(row, "acc_norm", work->place, best_norm == work->item.gold, -1, chance, error)
                            : status;
}

static eng_status record_answer(const trn_encoder *encoder, const trn_work *work, trn_result_row *row,
                                eng_error *error) {
    bool ended = false;
    char *text = answer_of(encoder, &work->passage.reading[work->scored], &ended);
    bool right = text && is_accepted(&work->item, text);
    free(text);
    return put(row, "contains", work->place, right, -1, NAN, error);
}

eng_status trn_work_record(const trn_encoder *encoder, const trn_work *work, trn_result_row *row, eng_error *error) {
    const trn_item *item = &work->item;
    row->truncated += work->truncated;
    if (item->is_text)
        return record_text(work, row, error);
    const trn_reading *gold = &work->passage.reading[item->gold];
    double sum = sum_of(gold);
    eng_status status = ENG_OK;
    if (item->variants > 1)
        status = record_choices(work, row, error);
    else
        status = put(row, "exact", work->place, gold->likeliest == gold->count - gold->first, -1, NAN, error);
    if (status == ENG_OK && item->generate > 0)
        status = record_answer(encoder, work, row, error);
    if (status == ENG_OK)
        status = put(row, "logprob", work->place, sum, -1, NAN, error);
    double bytes = (double)strlen(item->continuation[item->gold]);
    return status == ENG_OK ? put(row, "bits_per_byte", work->place, -sum / log(2), bytes, NAN, error) : status;
}

void trn_work_finish(trn_result_row *row) {
    const char *primary = "bits_per_byte";
    for (int i = 0; i < row->metrics; i++) {
        trn_metric *metric = &row->metric[i];
        int64_t counted = trn_metric_estimate(metric, NULL, NULL, 0).count;
        if (!isnan(metric->chance))
            metric->chance /= (double)counted;
    }
    if (trn_result_find(row, "acc"))
        primary = row->normalises ? "acc_norm" : "acc";
    else if (trn_result_find(row, "contains"))
        primary = "contains";
    memcpy(row->primary, primary, strlen(primary) + 1);
}
