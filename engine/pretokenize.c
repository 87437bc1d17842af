// SPDX-License-Identifier: Apache-2.0
// The stages of pre-tokenization, and the behaviours of Split as folds over spans.
//
// A stage hands each of its pieces straight to the next one, so no list of pieces is ever kept: memory is constant but
// for the stages that change text, which own one buffer each. A split sees its piece as the whole subject, so that a
// lookahead ends where the piece ends. Any thread with its own memory.
#include "engine/pretokenize.h"

#include <stdlib.h>
#include <string.h>

#define CONTRACTIONS "'s|'t|'re|'ve|'m|'ll|'d"
#define LLAMA3(digits)                                            \
    "(?i:" CONTRACTIONS ")|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|" digits \
    "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"

const char eng_pattern_gpt2[] = CONTRACTIONS "| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";
const char eng_pattern_llama3[] = LLAMA3("\\p{N}{1,3}");
const char eng_pattern_llama3_digit[] = LLAMA3("\\p{N}");

typedef enum stage_kind { STAGE_SPLIT, STAGE_PREFIX_SPACE, STAGE_METASPACE } stage_kind;

typedef struct stage {
    stage_kind kind;
    eng_pattern *pattern;
    eng_split behavior;
    bool invert;
    char *mark;
    eng_prepend prepend;
} stage;

struct eng_pretokenizer {
    stage stages[ENG_MAX_STAGES];
    size_t count;
};

typedef struct run {
    const eng_pretokenizer *pretokenizer;
    eng_pretokenize_memory *memory;
    eng_piece_fn emit;
    void *context;
    eng_error *error;
} run;

eng_status eng_pretokenizer_create(eng_pretokenizer **out) {
    *out = calloc(1, sizeof **out);
    return *out ? ENG_OK : ENG_NO_MEMORY;
}

void eng_pretokenizer_free(eng_pretokenizer *pretokenizer) {
    if (!pretokenizer)
        return;
    for (size_t i = 0; i < pretokenizer->count; i++) {
        eng_pattern_free(pretokenizer->stages[i].pattern);
        free(pretokenizer->stages[i].mark);
    }
    free(pretokenizer);
}

static eng_status add_stage(eng_pretokenizer *pretokenizer, stage added, eng_error *error) {
    if (pretokenizer->count == ENG_MAX_STAGES) {
        eng_pattern_free(added.pattern);
        free(added.mark);
        return eng_fail(error, ENG_UNSUPPORTED, "pre_tokenizer: more than %d stages", ENG_MAX_STAGES);
    }
    pretokenizer->stages[pretokenizer->count++] = added;
    return ENG_OK;
}

eng_status eng_pretokenizer_add_split(eng_pretokenizer *pretokenizer, const char *pattern, size_t length, bool literal,
                                      eng_split behavior, bool invert, eng_error *error) {
    stage added = {.kind = STAGE_SPLIT, .behavior = behavior, .invert = invert};
    eng_status status = eng_pattern_compile(pattern, length, literal, &added.pattern, error);
    return status == ENG_OK ? add_stage(pretokenizer, added, error) : status;
}

eng_status eng_pretokenizer_add_prefix_space(eng_pretokenizer *pretokenizer, eng_error *error) {
    return add_stage(pretokenizer, (stage){.kind = STAGE_PREFIX_SPACE}, error);
}

eng_status eng_pretokenizer_add_metaspace(eng_pretokenizer *pretokenizer, const char *mark, eng_prepend prepend,
                                          eng_error *error) {
    stage added = {.kind = STAGE_METASPACE, .mark = strdup(mark), .prepend = prepend};
    if (!added.mark)
        return eng_fail(error, ENG_NO_MEMORY, "no memory for the pre_tokenizer");
    return add_stage(pretokenizer, added, error);
}

eng_status eng_pretokenize_memory_init(eng_pretokenize_memory *memory) {
    *memory = (eng_pretokenize_memory){0};
    return eng_match_create(&memory->match);
}

void eng_pretokenize_memory_free(eng_pretokenize_memory *memory) {
    eng_match_free(memory->match);
    memory->match = NULL;
    for (size_t i = 0; i < ENG_MAX_STAGES; i++)
        eng_buffer_free(&memory->texts[i]);
}

static eng_status run_stage(const run *r, size_t index, const char *text, size_t length, bool first);

// The fold of a Split: the span in hand may still grow.
typedef struct fold {
    const run *run;
    size_t next_stage;
    const char *text;
    bool first;
    eng_split behavior;
    size_t start, end; // span in hand, empty: none
    bool is_match;     // of the last span added
} fold;

static eng_status flush(fold *f) {
    if (f->start == f->end)
        return ENG_OK;
    size_t start = f->start;
    f->start = f->end;
    return run_stage(f->run, f->next_stage, f->text + start, f->end - start, f->first && start == 0);
}

static eng_status add_span(fold *f, size_t start, size_t end, bool is_match) {
    if (start == end)
        return ENG_OK;
    bool in_hand = f->start != f->end, previous = f->is_match, grows = false;
    f->is_match = is_match;
    switch (f->behavior) {
    case ENG_SPLIT_ISOLATED:
        break;
    case ENG_SPLIT_REMOVED:
        if (is_match)
            return flush(f);
        break;
    case ENG_SPLIT_MERGED_WITH_PREVIOUS:
        grows = in_hand && is_match && !previous;
        break;
    case ENG_SPLIT_MERGED_WITH_NEXT:
        grows = in_hand && !is_match && previous;
        break;
    case ENG_SPLIT_CONTIGUOUS:
        grows = in_hand && is_match == previous;
        break;
    }
    if (grows) {
        f->end = end;
        return ENG_OK;
    }
    eng_status status = flush(f);
    f->start = start;
    f->end = end;
    return status;
}

static size_t character_length(const char *text, size_t length) {
    size_t size = 1;
    while (size < length && ((unsigned char)text[size] & 0xc0) == 0x80)
        size++;
    return size;
}

static eng_status run_split(const run *r, size_t index, const char *text, size_t length, bool first) {
    const stage *at = &r->pretokenizer->stages[index];
    fold f = {.run = r, .next_stage = index + 1, .text = text, .first = first, .behavior = at->behavior};
    size_t from = 0, done = 0;
    while (from <= length) {
        bool found;
        size_t start = 0, end = 0;
        eng_status status =
            eng_pattern_find(at->pattern, r->memory->match, text, length, from, &found, &start, &end, r->error);
        if (status != ENG_OK)
            return status;
        if (!found)
            break;
        status = add_span(&f, done, start, at->invert);
        if (status == ENG_OK)
            status = add_span(&f, start, end, !at->invert);
        if (status != ENG_OK)
            return status;
        done = end;
        from = end > start ? end : end < length ? end + character_length(text + end, length - end) : length + 1;
    }
    eng_status status = add_span(&f, done, length, at->invert);
    return status == ENG_OK ? flush(&f) : status;
}

static eng_status run_prefix_space(const run *r, size_t index, const char *text, size_t length, bool first) {
    if (text[0] == ' ')
        return run_stage(r, index + 1, text, length, first);
    eng_buffer *changed = &r->memory->texts[index];
    changed->length = 0;
    eng_status status = eng_buffer_append(changed, " ", 1);
    if (status == ENG_OK)
        status = eng_buffer_append(changed, text, length);
    if (status != ENG_OK)
        return eng_fail(r->error, status, "no memory for the text");
    return run_stage(r, index + 1, changed->bytes, changed->length, first);
}

static eng_status run_metaspace(const run *r, size_t index, const char *text, size_t length, bool first) {
    const stage *at = &r->pretokenizer->stages[index];
    eng_buffer *changed = &r->memory->texts[index];
    size_t mark = strlen(at->mark);
    bool marked = text[0] == ' ' || (length >= mark && memcmp(text, at->mark, mark) == 0);
    bool wanted = at->prepend == ENG_PREPEND_ALWAYS || (at->prepend == ENG_PREPEND_FIRST && first);
    changed->length = 0;
    eng_status status = wanted && !marked ? eng_buffer_append(changed, at->mark, mark) : ENG_OK;
    for (size_t done = 0; done < length && status == ENG_OK;) {
        const char *space = memchr(text + done, ' ', length - done);
        size_t plain = space ? (size_t)(space - text) - done : length - done;
        status = eng_buffer_append(changed, text + done, plain);
        if (status == ENG_OK && space)
            status = eng_buffer_append(changed, at->mark, mark);
        done += plain + (space != NULL);
    }
    if (status != ENG_OK)
        return eng_fail(r->error, status, "no memory for the text");
    return run_stage(r, index + 1, changed->bytes, changed->length, first);
}

static eng_status run_stage(const run *r, size_t index, const char *text, size_t length, bool first) {
    if (length == 0)
        return ENG_OK;
    if (index == r->pretokenizer->count)
        return r->emit(r->context, text, length);
    switch (r->pretokenizer->stages[index].kind) {
    case STAGE_PREFIX_SPACE:
        return run_prefix_space(r, index, text, length, first);
    case STAGE_METASPACE:
        return run_metaspace(r, index, text, length, first);
    case STAGE_SPLIT:
        break;
    }
    return run_split(r, index, text, length, first);
}

eng_status eng_pretokenize(const eng_pretokenizer *pretokenizer, eng_pretokenize_memory *memory, const char *text,
                           size_t length, bool first, eng_piece_fn emit, void *context, eng_error *error) {
    run r = {.pretokenizer = pretokenizer, .memory = memory, .emit = emit, .context = context, .error = error};
    return run_stage(&r, 0, text, length, first);
}
