// SPDX-License-Identifier: Apache-2.0
// Items that are made here: needles and key-value retrieval; see eval_task.h.
//
// The wording is RULER's and that of "Lost in the middle", without chat markup and with the answer's beginning. How
// much text fits is first reckoned from counted sentences, then the whole prompt is encoded and shortened until it
// fits, so a length is never exceeded. Words come from two short lists; other texts than the haystack are not read.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/buffer.h"
#include "engine/digest.h"
#include "trainer/draw.h"
#include "trainer/eval_task.h"

enum {
    FIFTHS = 5,
    CHOICES = 10,
    VALUE_LENGTH = 64,
    ANSWER_ROOM = 64, // of a length, for the answer
    BEGIN_ROOM = 1,   // for the id that begins a text
    UUID_BYTES = 36,
};

static const char *const adjectives[] = {"ancient", "bright",  "calm",  "distant", "eager",  "famous", "gentle",
                                         "hollow",  "icy",     "jolly", "keen",    "little", "merry",  "narrow",
                                         "odd",     "patient", "quiet", "rapid",   "silent", "tidy",   "unusual",
                                         "vast",    "warm",    "young", "zealous"};
static const char *const nouns[] = {"anchor",  "bridge", "candle", "desert", "engine", "forest", "garden",
                                    "harbor",  "island", "jacket", "kettle", "ladder", "market", "needle",
                                    "orchard", "pencil", "quarry", "river",  "saddle", "temple", "umbrella",
                                    "valley",  "window", "yard",   "zebra"};
static const char noise[] =
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n";

typedef struct sentence {
    const char *text;
    size_t length;
    int32_t tokens;
} sentence;

typedef struct made {
    trn_made_options options;
    char *text; // the haystack
    sentence *sentence;
    int64_t sentences;
    double pair_tokens;
} made;

// ---------------------------------------------------------------------------------------------------------------- text

typedef struct builder {
    eng_buffer text; // a NUL behind it
    bool failed;
} builder;

static void put(builder *b, const char *text, size_t length) {
    b->failed = b->failed || eng_buffer_reserve(&b->text, length + 1) != ENG_OK ||
                eng_buffer_append(&b->text, text, length) != ENG_OK;
    if (!b->failed)
        b->text.bytes[b->text.length] = '\0';
}

// The text is the caller's; NULL: out of memory, or nothing was put.
static char *built(builder *b) {
    if (b->failed)
        eng_buffer_free(&b->text);
    return b->text.bytes;
}

static eng_status count_tokens(const eng_tokenizer *tokenizer, const char *text, size_t length, int32_t *tokens,
                               eng_error *error) {
    int32_t *ids = NULL;
    size_t count = 0;
    eng_status status = eng_tokenizer_encode(tokenizer, text, length, false, false, &ids, &count, error);
    *tokens = (int32_t)count;
    free(ids);
    return status;
}

static void draw_uuid(trn_draw *draw, char out[VALUE_LENGTH]) {
    static const char form[] = "xxxxxxxx-xxxx-4xxx-yxxx-xxxxxxxxxxxx";
    for (int i = 0; i < UUID_BYTES; i++)
        out[i] = form[i] == 'x'   ? "0123456789abcdef"[trn_draw_below(draw, 16)]
                 : form[i] == 'y' ? "89ab"[trn_draw_below(draw, 4)]
                                  : form[i];
    out[UUID_BYTES] = '\0';
}

static void draw_word(trn_draw *draw, char out[VALUE_LENGTH]) {
    const char *adjective = adjectives[trn_draw_below(draw, sizeof adjectives / sizeof *adjectives)];
    snprintf(out, VALUE_LENGTH, "%s-%s", adjective, nouns[trn_draw_below(draw, sizeof nouns / sizeof *nouns)]);
}

static void draw_value(trn_draw *draw, trn_value_kind kind, char out[VALUE_LENGTH]) {
    if (kind == TRN_VALUE_NUMBER)
        snprintf(out, VALUE_LENGTH, "%u", 1000000 + trn_draw_below(draw, 9000000));
    else if (kind == TRN_VALUE_WORD)
        draw_word(draw, out);
    else
        draw_uuid(draw, out);
}

// Values that differ, and from `other`.
static void draw_values(trn_draw *draw, trn_value_kind kind, const char *other, int count, char (*out)[VALUE_LENGTH]) {
    for (int i = 0; i < count; i++) {
        bool new;
        do {
            draw_value(draw, kind, out[i]);
            new = !other || strcmp(out[i], other) != 0;
            for (int j = 0; j < i; j++)
                new = new &&strcmp(out[i], out[j]) != 0;
        } while (!new);
    }
}

// A place in fifth `index` mod 5 of 0..count.
static int64_t draw_depth(trn_draw *draw, int64_t index, int64_t count, trn_item *out) {
    int fifth = (int)(index % FIFTHS);
    snprintf(out->group, sizeof out->group, "depth %d-%d %%", 100 / FIFTHS * fifth, 100 / FIFTHS * (fifth + 1));
    return (int64_t)((fifth + trn_draw_unit(draw)) / FIFTHS * (double)(count + 1));
}

// Ten variants behind the prompt, the first of `value` the right one, in an order that the draw decides.
static eng_status add_choices(trn_draw *draw, const char *prompt, const char *quote, const char (*value)[VALUE_LENGTH],
                              trn_item *out, eng_error *error) {
    eng_status status = ENG_OK;
    out->gold = (int32_t)trn_draw_below(draw, CHOICES);
    for (int i = 0, other = 1; i < CHOICES && status == ENG_OK; i++) {
        char text[VALUE_LENGTH + 2];
        snprintf(text, sizeof text, "%s%s", quote, value[i == out->gold ? 0 : other++]);
        status = trn_item_add(out, prompt, text, error);
    }
    out->generate = ANSWER_ROOM;
    return status == ENG_OK ? trn_item_accept(out, value[0], error) : status;
}

// Fewer units of text while a prompt of `tokens` is beyond the length.
static int64_t shortened(int64_t units, int32_t tokens, int64_t most) {
    int64_t fewer = (int64_t)((double)units * (double)most / (double)tokens);
    return fewer < units ? fewer : units - 1;
}

static eng_status too_short(const made *m, eng_error *error) {
    return eng_fail(error, ENG_TOO_LONG, "a length of %lld tokens has no room for a question and its text",
                    (long long)m->options.length);
}

// ------------------------------------------------------------------------------------------------------------- needles

static char *needle_prompt(const made *m, int64_t first, int64_t count, int64_t depth, const char *key,
                           const char *value) {
    static const char *const words[] = {"number", "word", "uuid"};
    const char *word = words[m->options.value];
    char *head = trn_format("A special magic %s is hidden within the following text. Make sure to memorize it. I will "
                            "quiz you about the %s afterwards.\n",
                            word, word);
    char *needle =
        trn_format("One of the special magic %ss for %s is: %s.%s", word, key, value, m->options.haystack ? " " : "\n");
    char *tail =
        trn_format("\nWhat is the special magic %s for %s mentioned in the provided text? The special magic %s "
                   "for %s mentioned in the provided text is",
                   word, key, word, key);
    builder b = {.failed = !head || !needle || !tail};
    if (!b.failed)
        put(&b, head, strlen(head));
    for (int64_t i = 0; i <= count && !b.failed; i++) {
        const sentence *s = &m->sentence[(first + i) % m->sentences];
        if (i == depth)
            put(&b, needle, strlen(needle));
        if (i < count)
            put(&b, s->text, s->length);
    }
    if (!b.failed)
        put(&b, tail, strlen(tail));
    free(head);
    free(needle);
    free(tail);
    return built(&b);
}

// Sentences from `first` on that have about so many tokens.
static int64_t sentences_of(const made *m, int64_t first, int64_t tokens) {
    int64_t count = 0;
    for (int64_t i = first; tokens > 0 && (!m->options.haystack || count < m->sentences); i++, count++)
        tokens -= m->sentence[i % m->sentences].tokens > 0 ? m->sentence[i % m->sentences].tokens : 1;
    return count;
}

static eng_status make_needle(const trn_task *task, int64_t index, trn_item *out, eng_error *error) {
    const made *m = task->data;
    int64_t most = m->options.length - ANSWER_ROOM - BEGIN_ROOM;
    trn_draw draw = trn_draw_begin(m->options.seed, (uint64_t)index);
    char key[VALUE_LENGTH], value[CHOICES][VALUE_LENGTH];
    *out = (trn_item){0};
    draw_word(&draw, key);
    draw_values(&draw, m->options.value, m->options.value == TRN_VALUE_WORD ? key : NULL, CHOICES, value);
    int64_t first = trn_draw_below(&draw, (uint32_t)m->sentences);
    trn_draw place = draw;
    for (int64_t count = sentences_of(m, first, most);;) {
        int32_t tokens = 0;
        draw = place;
        char *prompt = needle_prompt(m, first, count, draw_depth(&draw, index, count, out), key, value[0]);
        eng_status status = prompt ? count_tokens(m->options.tokenizer, prompt, strlen(prompt), &tokens, error)
                                   : eng_fail(error, ENG_NO_MEMORY, "out of memory for a needle");
        if (status == ENG_OK && tokens <= most)
            status = add_choices(&draw, prompt, "", (const char(*)[VALUE_LENGTH])value, out, error);
        free(prompt);
        if (status != ENG_OK || tokens <= most)
            return status;
        count = shortened(count, tokens, most);
        if (count < 1)
            return too_short(m, error);
    }
}

static eng_status add_sentence(made *m, int64_t *capacity, const char *text, size_t length, eng_error *error) {
    if (m->sentences == *capacity) {
        *capacity = *capacity ? 2 * *capacity : 256;
        sentence *grown = realloc(m->sentence, sizeof *grown * (size_t)*capacity);
        if (!grown)
            return eng_fail(error, ENG_NO_MEMORY, "out of memory for a haystack");
        m->sentence = grown;
    }
    sentence *s = &m->sentence[m->sentences++];
    *s = (sentence){text, length, 0};
    return count_tokens(m->options.tokenizer, text, length, &s->tokens, error);
}

// A sentence ends behind ". ", "? ", "! " or a line end.
static eng_status split_sentences(made *m, eng_error *error) {
    int64_t capacity = 0;
    eng_status status = ENG_OK;
    for (const char *begin = m->text, *p = begin; *begin && status == ENG_OK; p++) {
        bool ends = *p == '\n' || (p > begin && *p == ' ' && strchr(".?!", p[-1])) || !*p;
        if (!ends)
            continue;
        size_t length = (size_t)(p - begin) + (*p ? 1 : 0);
        status = add_sentence(m, &capacity, begin, length, error);
        begin += length;
        p = begin - 1;
    }
    return status;
}

static eng_status read_haystack(made *m, trn_task *task, eng_error *error) {
    trn_task texts = {0};
    builder b = {0};
    eng_status status = trn_task_open_file(m->options.haystack, &texts, error);
    if (status == ENG_OK && !texts.is_text)
        status = eng_fail(error, ENG_FORMAT, "%s: holds no texts", m->options.haystack);
    for (int64_t i = 0; i < texts.items && status == ENG_OK; i++) {
        trn_item item;
        status = trn_task_item(&texts, i, &item, error);
        if (status == ENG_OK) {
            put(&b, item.continuation[0], strlen(item.continuation[0]));
            put(&b, "\n", 1);
        }
        trn_item_free(&item);
    }
    snprintf(task->digest, sizeof task->digest, "%s", texts.digest);
    trn_task_close(&texts);
    if (status == ENG_OK && b.failed)
        status = eng_fail(error, ENG_NO_MEMORY, "out of memory for a haystack");
    m->text = built(&b);
    return status;
}

// --------------------------------------------------------------------------------------------------------------- pairs

// The other choices are spread over the `count` other pairs; NULL: none stands in this one.
static const char *told_by(int64_t pair, int64_t count, const char (*value)[VALUE_LENGTH]) {
    int64_t other = pair * (CHOICES - 1) / count;
    return pair == 0 || (pair - 1) * (CHOICES - 1) / count != other ? value[other + 1] : NULL;
}

static char *pairs_object(const made *m, int64_t index, int64_t count, int64_t place, const char *key,
                          const char (*value)[VALUE_LENGTH]) {
    trn_draw draw = trn_draw_begin(m->options.seed + 1, (uint64_t)index);
    builder b = {0};
    for (int64_t i = 0; i < count; i++) {
        char text[2 * VALUE_LENGTH + 16], other_key[VALUE_LENGTH], other[VALUE_LENGTH];
        draw_uuid(&draw, other_key);
        draw_uuid(&draw, other);
        const char *told = i == place ? value[0] : told_by(i < place ? i : i - 1, count - 1, value);
        told = told ? told : other;
        int length = snprintf(text, sizeof text, "%s\"%s\": \"%s\"%s", i == 0 ? "{" : " ", i == place ? key : other_key,
                              told, i + 1 == count ? "}" : ",\n");
        put(&b, text, (size_t)length);
    }
    return built(&b);
}

static eng_status make_pairs(const trn_task *task, int64_t index, trn_item *out, eng_error *error) {
    const made *m = task->data;
    int64_t most = m->options.length - ANSWER_ROOM - BEGIN_ROOM;
    trn_draw draw = trn_draw_begin(m->options.seed, (uint64_t)index);
    char key[VALUE_LENGTH], value[CHOICES][VALUE_LENGTH];
    *out = (trn_item){0};
    draw_uuid(&draw, key);
    draw_values(&draw, TRN_VALUE_UUID, key, CHOICES, value);
    trn_draw place = draw;
    for (int64_t count = (int64_t)((double)most / m->pair_tokens);;) {
        int32_t tokens = 0;
        if (count < CHOICES)
            return too_short(m, error);
        draw = place;
        char *object = pairs_object(m, index, count, draw_depth(&draw, index, count - 1, out), key,
                                    (const char(*)[VALUE_LENGTH])value);
        char *prompt = object ? trn_item_key_prompt(object, key) : NULL;
        eng_status status = prompt ? count_tokens(m->options.tokenizer, prompt, strlen(prompt), &tokens, error)
                                   : eng_fail(error, ENG_NO_MEMORY, "out of memory for pairs");
        if (status == ENG_OK && tokens <= most)
            status = add_choices(&draw, prompt, "\"", (const char(*)[VALUE_LENGTH])value, out, error);
        free(object);
        free(prompt);
        if (status != ENG_OK || tokens <= most)
            return status;
        count = shortened(count, tokens, most);
    }
}

// -------------------------------------------------------------------------------------------------------------- making

static void release(trn_task *task) {
    made *m = task->data;
    if (!m)
        return;
    free(m->text);
    free(m->sentence);
    free(m);
}

static eng_status begin(const trn_made_options *options, char *name, trn_task *out, made **data, eng_error *error) {
    made *m = calloc(1, sizeof *m);
    *out = (trn_task){.name = name, .release = release, .data = m, .items = options->items, .length = options->length};
    *data = m;
    if (!m || !name)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for a task");
    m->options = *options;
    return ENG_OK;
}

// The first item tells whether there is room.
static eng_status finish(eng_status status, trn_task *task, eng_error *error) {
    uint8_t digest[ENG_DIGEST_BYTES];
    trn_item item = {0};
    if (status == ENG_OK)
        status = trn_task_item(task, 0, &item, error);
    trn_item_free(&item);
    const made *m = task->data;
    char *source = trn_format("%s seed %llu %s", task->name ? task->name : "",
                              (unsigned long long)(m ? m->options.seed : 0), task->digest);
    if (status == ENG_OK && !source)
        status = eng_fail(error, ENG_NO_MEMORY, "out of memory for a task");
    if (status == ENG_OK)
        status = eng_digest_bytes(source, strlen(source), digest);
    if (status == ENG_OK)
        eng_digest_hex(digest, task->digest);
    else
        trn_task_close(task);
    free(source);
    return status;
}

eng_status trn_task_make_needles(const trn_made_options *options, trn_task *out, eng_error *error) {
    static const char *const values[] = {"number", "word", "uuid"};
    made *m = NULL;
    char *name = trn_format("needle %s %s %lld", options->haystack ? "essay" : "noise", values[options->value],
                            (long long)options->length);
    eng_status status = begin(options, name, out, &m, error);
    out->make = make_needle;
    if (status == ENG_OK && options->haystack)
        status = read_haystack(m, out, error);
    else if (status == ENG_OK && !(m->text = strdup(noise)))
        status = eng_fail(error, ENG_NO_MEMORY, "out of memory for a haystack");
    if (status == ENG_OK)
        status = split_sentences(m, error);
    int64_t there = 0;
    for (int64_t i = 0; status == ENG_OK && options->haystack && i < m->sentences; i++)
        there += m->sentence[i].tokens;
    if (status == ENG_OK && options->haystack && there < options->length)
        status = eng_fail(error, ENG_TOO_LONG, "%s: %lld tokens of text, fewer than %lld", options->haystack,
                          (long long)there, (long long)options->length);
    return finish(status, out, error);
}

eng_status trn_task_make_pairs(const trn_made_options *options, trn_task *out, eng_error *error) {
    made *m = NULL;
    int32_t tokens = 0;
    char pair[4 * VALUE_LENGTH], key[VALUE_LENGTH], value[VALUE_LENGTH];
    trn_draw draw = trn_draw_begin(options->seed, UINT64_MAX);
    draw_uuid(&draw, key);
    draw_uuid(&draw, value);
    int length = snprintf(pair, sizeof pair, " \"%s\": \"%s\",\n", key, value);
    eng_status status = begin(options, trn_format("pairs %lld", (long long)options->length), out, &m, error);
    out->make = make_pairs;
    if (status == ENG_OK)
        status = count_tokens(options->tokenizer, pair, (size_t)length, &tokens, error);
    if (status == ENG_OK)
        m->pair_tokens = tokens > 0 ? tokens : 1;
    return finish(status, out, error);
}
