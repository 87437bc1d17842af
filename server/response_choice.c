// SPDX-License-Identifier: Apache-2.0
// One choice as JSON: text, the four parallel arrays of logprobs, token ids, solver figures.
//
// A token's text may be a part of a character, and such bytes cannot be JSON: it is spelled "bytes:\\xNN...". The keys
// of a token's alternatives are distinct, as JSON asks: of two ids that look the same the less likely is "token_id:N".
// text_offset counts characters of the returned text. It is found by decoding the tokens' bytes as the text was: an
// invalid sequence is one character a maximal subpart; a token that goes on with a character under way stands where
// that character does; one without text of its own stands where the next will. Loop thread and pool threads.
#include <math.h>
#include <string.h>

#include "server/json_writer.h"
#include "server/response.h"

// ---- places --------------------------------------------------------------------------------------------------------

static uint64_t count_characters(const char *text, size_t length) {
    uint64_t count = 0;

    for (size_t i = 0; i < length; i++)
        count += ((unsigned char)text[i] & 0xc0) != 0x80;
    return count;
}

// Begins a character with this byte, whatever it is.
static void begin_character(srv_place *place, unsigned char byte) {
    place->characters++;
    place->missing = 0;
    place->low = 0x80;
    place->high = 0xbf;
    if (byte >= 0xc2 && byte <= 0xdf)
        place->missing = 1;
    else if (byte >= 0xe0 && byte <= 0xef)
        place->missing = 2;
    else if (byte >= 0xf0 && byte <= 0xf4)
        place->missing = 3;
    if (byte == 0xe0)
        place->low = 0xa0;
    else if (byte == 0xed)
        place->high = 0x9f;
    else if (byte == 0xf0)
        place->low = 0x90;
    else if (byte == 0xf4)
        place->high = 0x8f;
}

static bool continues(const srv_place *place, unsigned char byte) {
    return place->missing && byte >= place->low && byte <= place->high;
}

// The place of a token with these bytes; the next token's is behind them.
static uint64_t pass_token(srv_place *place, const char *bytes, size_t length) {
    const uint64_t at = place->characters - (length && continues(place, (unsigned char)bytes[0]));

    for (size_t i = 0; i < length; i++) {
        const unsigned char byte = (unsigned char)bytes[i];
        if (continues(place, byte)) {
            place->missing--;
            place->low = 0x80;
            place->high = 0xbf;
        } else
            begin_character(place, byte);
    }
    return at < place->delivered ? at : place->delivered; // beyond it: cut off by a stop string
}

// ---- tokens --------------------------------------------------------------------------------------------------------

// What stands in this piece: the prompt's tokens, then the drawn ones.
typedef struct tokens {
    const srv_token_list *prompt, *drawn;
    size_t prompt_count, count;
} tokens;

static tokens tokens_of(const srv_choice_piece *piece) {
    const size_t prompt = piece->prompt ? piece->prompt->count : 0;

    return (tokens){.prompt = piece->prompt,
                    .drawn = piece->drawn,
                    .prompt_count = prompt,
                    .count = prompt + (piece->drawn ? piece->drawn->count : 0)};
}

static const eng_token *token_at(const tokens *tokens, size_t index) {
    return index < tokens->prompt_count ? &tokens->prompt->tokens[index]
                                        : &tokens->drawn->tokens[index - tokens->prompt_count];
}

// Nothing precedes the first token of a prompt, so it has no logprob.
static bool is_first(const tokens *tokens, const srv_choice_piece *piece, size_t index) {
    return index == 0 && tokens->prompt_count > 0 && piece->place->prompt_told == 0;
}

static bool is_text(const char *bytes, size_t length) {
    srv_place place = {0};
    bool valid = true;

    for (size_t i = 0; i < length && valid; i++) {
        const unsigned char byte = (unsigned char)bytes[i];
        if (continues(&place, byte))
            (void)pass_token(&place, bytes + i, 1);
        else if (place.missing)
            valid = false;
        else {
            begin_character(&place, byte);
            valid = byte < 0x80 || place.missing;
        }
    }
    return valid && !place.missing;
}

static void write_token(srv_buf *out, const eng_engine *engine, int32_t id) {
    size_t length;
    const char *bytes = eng_token_bytes(engine, id, &length);

    if (is_text(bytes, length)) {
        srv_json_string(out, bytes, length);
        return;
    }
    srv_buf_puts(out, "\"bytes:");
    for (size_t i = 0; i < length; i++)
        srv_buf_printf(out, "\\\\x%02x", (unsigned char)bytes[i]);
    srv_buf_puts(out, "\"");
}

static void write_logprob(srv_buf *out, float logprob) {
    if (isfinite(logprob))
        srv_buf_printf(out, "%.9g", (double)logprob);
    else
        srv_buf_puts(out, "-9999.0");
}

static bool looks_like(const eng_engine *engine, int32_t first, int32_t second) {
    size_t first_length, second_length;
    const char *first_bytes = eng_token_bytes(engine, first, &first_length);
    const char *second_bytes = eng_token_bytes(engine, second, &second_length);

    return first_length == second_length && memcmp(first_bytes, second_bytes, first_length) == 0;
}

static void write_alternative(srv_buf *out, const eng_engine *engine, const eng_alternative *all, size_t index) {
    bool seen = false;

    for (size_t i = 0; i < index && !seen; i++)
        seen = looks_like(engine, all[i].id, all[index].id);
    if (index)
        srv_buf_puts(out, ",");
    if (seen)
        srv_buf_printf(out, "\"token_id:%d\"", all[index].id);
    else
        write_token(out, engine, all[index].id);
    srv_buf_puts(out, ":");
    write_logprob(out, all[index].logprob);
}

// The likeliest, and the token itself if it is not among them.
static void write_top(srv_buf *out, const srv_choice_form *form, const eng_token *token) {
    eng_alternative all[ENG_MAX_TOP + 1];
    size_t count = 0;
    bool itself = false;

    for (int32_t i = 0; i < token->top_count && i < form->logprobs; i++) {
        all[count++] = token->top[i];
        itself = itself || token->top[i].id == token->id;
    }
    if (!itself)
        all[count++] = (eng_alternative){.id = token->id, .logprob = token->logprob};
    srv_buf_puts(out, "{");
    for (size_t i = 0; i < count; i++)
        write_alternative(out, form->engine, all, i);
    srv_buf_puts(out, "}");
}

// ---- logprobs ------------------------------------------------------------------------------------------------------

static void write_offset(srv_buf *out, const srv_choice_form *form, const srv_choice_piece *piece, const tokens *tokens,
                         size_t index) {
    srv_place *place = piece->place;
    const int32_t id = token_at(tokens, index)->id;
    const bool drawn = index >= tokens->prompt_count;
    const bool silent =
        drawn ? eng_token_is_special(form->engine, id) : piece->added_bos && is_first(tokens, piece, index);
    size_t length = 0;
    const char *bytes = silent ? "" : eng_token_bytes(form->engine, id, &length);

    if (drawn && !place->drawing) {
        place->drawing = true;
        place->characters = place->echoed;
        place->missing = 0;
    }
    srv_json_integer(out, (int64_t)pass_token(place, bytes, length));
}

static void write_logprobs(srv_buf *out, const srv_choice_form *form, const srv_choice_piece *piece) {
    const tokens tokens = tokens_of(piece);

    if (form->logprobs < 0) {
        srv_buf_puts(out, "null");
        return;
    }
    srv_buf_puts(out, "{\"tokens\":[");
    for (size_t i = 0; i < tokens.count; i++) {
        srv_buf_puts(out, i ? "," : "");
        write_token(out, form->engine, token_at(&tokens, i)->id);
    }
    srv_buf_puts(out, "],\"token_logprobs\":[");
    for (size_t i = 0; i < tokens.count; i++) {
        srv_buf_puts(out, i ? "," : "");
        if (is_first(&tokens, piece, i))
            srv_buf_puts(out, "null");
        else
            write_logprob(out, token_at(&tokens, i)->logprob);
    }
    srv_buf_puts(out, "],\"top_logprobs\":[");
    for (size_t i = 0; i < tokens.count; i++) {
        srv_buf_puts(out, i ? "," : "");
        if (is_first(&tokens, piece, i))
            srv_buf_puts(out, "null");
        else
            write_top(out, form, token_at(&tokens, i));
    }
    srv_buf_puts(out, "],\"text_offset\":[");
    for (size_t i = 0; i < tokens.count; i++) {
        srv_buf_puts(out, i ? "," : "");
        write_offset(out, form, piece, &tokens, i);
    }
    srv_buf_puts(out, "]}");
}

// ---- a chat's ------------------------------------------------------------------------------------------------------

static void write_bytes(srv_buf *out, const eng_engine *engine, int32_t id) {
    size_t length;
    const char *bytes = eng_token_bytes(engine, id, &length);

    srv_buf_puts(out, "[");
    for (size_t i = 0; i < length; i++)
        srv_buf_printf(out, i ? ",%u" : "%u", (unsigned)(unsigned char)bytes[i]);
    srv_buf_puts(out, "]");
}

// Without its closing brace.
static void write_chat_token(srv_buf *out, const eng_engine *engine, int32_t id, float logprob) {
    srv_buf_puts(out, "{\"token\":");
    write_token(out, engine, id);
    srv_buf_puts(out, ",\"logprob\":");
    write_logprob(out, logprob);
    srv_buf_puts(out, ",\"bytes\":");
    write_bytes(out, engine, id);
}

static void write_chat_logprobs(srv_buf *out, const srv_choice_form *form, const srv_choice_piece *piece) {
    const size_t count = piece->drawn ? piece->drawn->count : 0;

    if (form->logprobs < 0) {
        srv_buf_puts(out, "null");
        return;
    }
    srv_buf_puts(out, "{\"content\":[");
    for (size_t i = 0; i < count; i++) {
        const eng_token *token = &piece->drawn->tokens[i];
        srv_buf_puts(out, i ? "," : "");
        write_chat_token(out, form->engine, token->id, token->logprob);
        srv_buf_puts(out, ",\"top_logprobs\":[");
        for (int32_t k = 0; k < token->top_count && k < form->logprobs; k++) {
            srv_buf_puts(out, k ? "," : "");
            write_chat_token(out, form->engine, token->top[k].id, token->top[k].logprob);
            srv_buf_puts(out, "}");
        }
        srv_buf_puts(out, "]}");
    }
    srv_buf_puts(out, "],\"refusal\":null}");
}

// The role comes with the first piece; a later one without text has no member at all.
static void write_message(srv_buf *out, const srv_choice_form *form, const srv_choice_piece *piece, bool first) {
    const bool whole = form->shape == SRV_SHAPE_MESSAGE;

    srv_buf_puts(out, whole ? "\"message\":{" : "\"delta\":{");
    if (first)
        srv_buf_puts(out, "\"role\":\"assistant\",");
    if (first || piece->length) {
        srv_buf_puts(out, "\"content\":\"");
        srv_json_characters(out, piece->text, piece->length);
        srv_buf_puts(out, "\"");
    }
    srv_buf_puts(out, whole ? ",\"refusal\":null}" : "}");
}

// ---- the rest ------------------------------------------------------------------------------------------------------

static void write_ids(srv_buf *out, const char *name, const int32_t *ids, size_t count) {
    srv_buf_printf(out, ",\"%s\":[", name);
    for (size_t i = 0; i < count; i++)
        srv_buf_printf(out, i ? ",%d" : "%d", ids[i]);
    srv_buf_puts(out, "]");
}

static void write_drawn_ids(srv_buf *out, const srv_token_list *drawn) {
    srv_buf_puts(out, ",\"token_ids\":[");
    for (size_t i = 0; drawn && i < drawn->count; i++)
        srv_buf_printf(out, i ? ",%d" : "%d", drawn->tokens[i].id);
    srv_buf_puts(out, "]");
}

typedef enum figure { STEPS_MEAN, STEPS_MAX, UNCONVERGED } figure;

static void write_figure(srv_buf *out, const eng_compute *compute, figure figure) {
    if (compute->solves == 0) // the first token of a prompt follows nothing
        srv_buf_puts(out, "null");
    else if (figure == STEPS_MEAN)
        srv_json_number(out, (double)compute->steps / (double)compute->solves);
    else
        srv_json_integer(out, figure == STEPS_MAX ? compute->steps_max : (int64_t)compute->unconverged);
}

static void write_loops(srv_buf *out, const tokens *tokens, bool follows) {
    srv_buf_puts(out, follows ? ",\"loops\":[" : "\"loops\":[");
    for (size_t i = 0; i < tokens->count; i++) {
        const int32_t loop = token_at(tokens, i)->loop;
        srv_buf_puts(out, i ? "," : "");
        if (loop == 0)
            srv_buf_puts(out, "null");
        else
            srv_json_integer(out, loop);
    }
    srv_buf_puts(out, "]");
}

// Of the same tokens as logprobs.
static void write_compute(srv_buf *out, const srv_choice_form *form, const srv_choice_piece *piece) {
    static const char *const names[] = {
        [STEPS_MEAN] = "cg_steps_mean", [STEPS_MAX] = "cg_steps_max", [UNCONVERGED] = "cg_unconverged"};
    const tokens tokens = tokens_of(piece);

    srv_buf_puts(out, ",\"compute_details\":{");
    for (int figure = STEPS_MEAN; form->has_mesa && figure <= UNCONVERGED; figure++) {
        srv_buf_printf(out, "%s\"%s\":[", figure ? "," : "", names[figure]);
        for (size_t i = 0; i < tokens.count; i++) {
            srv_buf_puts(out, i ? "," : "");
            write_figure(out, &token_at(&tokens, i)->compute, figure);
        }
        srv_buf_puts(out, "]");
    }
    if (form->has_loops)
        write_loops(out, &tokens, form->has_mesa);
    srv_buf_puts(out, "}");
}

static const char *finish_reason(eng_finish finish) {
    switch (finish) {
    case ENG_FINISH_NONE:
        return NULL;
    case ENG_FINISH_STOP:
        return "stop";
    case ENG_FINISH_LENGTH:
        return "length";
    case ENG_FINISH_ERROR:
        return "error";
    }
    return NULL;
}

static void write_text(srv_buf *out, const srv_choice_piece *piece, bool first) {
    srv_place *place = piece->place;

    srv_buf_puts(out, "\"text\":\"");
    if (first && piece->echo_length) {
        srv_json_characters(out, piece->echo, piece->echo_length);
        place->delivered = place->echoed = count_characters(piece->echo, piece->echo_length);
    }
    if (piece->length) {
        srv_json_characters(out, piece->text, piece->length);
        place->delivered += count_characters(piece->text, piece->length);
    }
    srv_buf_puts(out, "\"");
}

void srv_write_choice(srv_buf *out, const srv_choice_form *form, const srv_choice_piece *piece) {
    srv_place *place = piece->place;
    const bool first = !place->begun;

    place->begun = true;
    srv_buf_puts(out, "{\"index\":");
    srv_json_integer(out, (int64_t)piece->index);
    srv_buf_puts(out, ",");
    if (form->shape == SRV_SHAPE_TEXT)
        write_text(out, piece, first);
    else
        write_message(out, form, piece, first);
    srv_buf_puts(out, ",\"logprobs\":");
    (form->shape == SRV_SHAPE_TEXT ? write_logprobs : write_chat_logprobs)(out, form, piece);
    srv_buf_puts(out, ",\"finish_reason\":");
    srv_json_text(out, finish_reason(piece->finish));
    if (form->token_ids && first)
        write_ids(out, "prompt_token_ids", piece->prompt_ids, piece->prompt_id_count);
    if (form->token_ids)
        write_drawn_ids(out, piece->drawn);
    if (form->compute)
        write_compute(out, form, piece);
    if (piece->prompt)
        place->prompt_told += piece->prompt->count;
    srv_buf_puts(out, "}");
}
