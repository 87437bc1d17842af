// SPDX-License-Identifier: Apache-2.0
// Import from GGUF: the folder, and each tensor of the Llama model found in the file under its name there.
//
// The model's own table of tensors is what is looked for, so a tensor that is missing, of another shape or left over is
// named. Weights go from file to file in pieces of a few thousand elements; of a matrix that stays in blocks the codes,
// the scales and the minima are tensors of their own, each read for itself.
#include "engine/import.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/checkpoint.h"
#include "engine/checkpoint_internal.h"
#include "engine/files.h"
#include "engine/import_internal.h"
#include "engine/tokenizer.h"

typedef enum rows { ROWS_PLAIN, ROWS_QUERY, ROWS_KEY } rows;

static const struct {
    const char *ours, *theirs;
    rows rows;
} names[] = {
    {"model.embed_tokens", "token_embd", ROWS_PLAIN},
    {"model.norm", "output_norm", ROWS_PLAIN},
    {"lm_head", "output", ROWS_PLAIN},
    {"input_layernorm", "attn_norm", ROWS_PLAIN},
    {"self_attn.q_proj", "attn_q", ROWS_QUERY},
    {"self_attn.k_proj", "attn_k", ROWS_KEY},
    {"self_attn.v_proj", "attn_v", ROWS_PLAIN},
    {"self_attn.o_proj", "attn_output", ROWS_PLAIN},
    {"post_attention_layernorm", "ffn_norm", ROWS_PLAIN},
    {"mlp.gate_proj", "ffn_gate", ROWS_PLAIN},
    {"mlp.up_proj", "ffn_up", ROWS_PLAIN},
    {"mlp.down_proj", "ffn_down", ROWS_PLAIN},
};

enum { PARTS = ENG_BLOCK_MINIMUM + 1 };

// A tensor of the folder on its way: the values of one of the file, or a part of its blocks.
typedef struct passage {
    char name[ENG_NAME_SIZE + 8];
    const eng_gguf *file;
    const eng_gguf_tensor *tensor;
    eng_block_part part;
    eng_dtype dtype;
    int64_t columns; // of the folder's tensor
    int64_t unit;    // elements of it that come from one block
    int64_t half;    // of a head whose rows are taken apart; 0: rows stay where they are
} passage;

typedef struct importing {
    eng_gguf *file;
    eng_model *model;
    char *config, *tokenizer, *tokenizer_config;
    eng_imported told;
    int bits;                      // of the narrowest blocks that are kept; 0: none are
    const eng_gguf_tensor **found; // (model->tensors)
    passage *passages;             // up to 3 a tensor
    eng_st_source *sources;
    size_t count; // of both
    eng_error *error;
} importing;

static eng_status no_memory(eng_error *error) {
    return eng_fail(error, ENG_NO_MEMORY, "no memory to import a model");
}

// ---- values

static int64_t count_nonfinite_f16(const uint16_t *values, int64_t count) {
    int64_t found = 0;
    for (int64_t i = 0; i < count; i++)
        found += (values[i] & 0x7c00) == 0x7c00;
    return found;
}

static int64_t count_nonfinite(eng_dtype dtype, const void *values, int64_t count) {
    if (dtype == ENG_F16)
        return count_nonfinite_f16(values, count);
    if (dtype != ENG_F32 && dtype != ENG_BF16)
        return 0; // codes
    const float *floats = values;
    int64_t found = eng_count_nonfinite(floats, count);
    for (int64_t i = 0; found == 0 && dtype == ENG_BF16 && i < count; i++) {
        float rounded = eng_bf16_to_f32(eng_bf16_from_f32(floats[i]));
        found += eng_count_nonfinite(&rounded, 1);
    }
    return found;
}

// The file has a head's rows as pairs of the two halves (models.md 9.3): row i of half s is row 2 i + s there.
static int64_t row_there(const passage *p, int64_t row) {
    int64_t width = 2 * p->half, within = row % width;
    return row - within + 2 * (within % p->half) + within / p->half;
}

// Rows and pieces hold whole units.
static eng_status read_piece(void *context, int64_t first, int64_t count, void *values, eng_error *error) {
    const passage *p = context;
    const int64_t bytes = (int64_t)eng_block_part_bytes(p->tensor->format, p->part) / p->unit; // of an element
    eng_status status = ENG_OK;
    for (int64_t done = 0; done < count && status == ENG_OK;) {
        int64_t at = first + done, piece = count - done;
        if (p->half > 0) {
            int64_t column = at % p->columns;
            if (piece > p->columns - column)
                piece = p->columns - column;
            at = row_there(p, at / p->columns) * p->columns + column;
        }
        status = eng_gguf_read_blocks(p->file, p->tensor, p->part, at / p->unit, piece / p->unit,
                                      (char *)values + done * bytes, error);
        done += piece;
    }
    if (status != ENG_OK || count_nonfinite(p->dtype, values, count) == 0)
        return status;
    return eng_fail(error, ENG_NUMERIC, "%s: tensor '%.64s': values that are not finite as %s",
                    eng_path_tail(eng_gguf_path(p->file)), p->tensor->name, eng_dtype_name(p->dtype));
}

// ---- tensors

// "blk.3.attn_q.weight" of "model.layers.3.self_attn.q_proj.weight".
static bool name_there(const eng_tensor *tensor, char *out, size_t size, rows *kind) {
    static const char layers[] = "model.layers.";
    const char *part = tensor->name;
    char block[32] = "";
    if (tensor->layer >= 0) {
        snprintf(block, sizeof block, "blk.%d.", tensor->layer);
        part = strchr(tensor->name + strlen(layers), '.') + 1;
    }
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        size_t length = strlen(names[i].ours);
        if (strncmp(part, names[i].ours, length) == 0 && part[length] == '.') {
            snprintf(out, size, "%s%s%s", block, names[i].theirs, part + length);
            *kind = names[i].rows;
            return true;
        }
    }
    return false;
}

static eng_status check_shape(const importing *im, const eng_tensor *wanted, const eng_gguf_tensor *found) {
    bool same = wanted->ndim == found->ndim;
    for (int i = 0; same && i < wanted->ndim; i++)
        same = wanted->shape[i] == found->shape[i];
    if (same)
        return ENG_OK;
    return eng_fail(im->error, ENG_FORMAT,
                    "%s: tensor '%.64s': %d dimensions, %lld x %lld, where [%lld%s%.0lld] is due",
                    eng_path_tail(eng_gguf_path(im->file)), found->name, found->ndim, (long long)found->shape[0],
                    (long long)(found->ndim > 1 ? found->shape[1] : 1), (long long)wanted->shape[0],
                    wanted->ndim > 1 ? " x " : "", (long long)(wanted->ndim > 1 ? wanted->shape[1] : 0));
}

// What the folder calls a part of a tensor, its type there and its elements a block.
static void add_part(importing *im, const eng_tensor *tensor, const eng_gguf_tensor *found, eng_block_part part,
                     int64_t half) {
    static const char *const suffix[PARTS] = {"", "", ".scale", ".minimum"};
    const eng_block_format *format = found->format;
    const bool codes = part == ENG_BLOCK_CODES, values = part == ENG_BLOCK_VALUES;
    passage *p = &im->passages[im->count];
    *p = (passage){.file = im->file, .tensor = found, .part = part, .half = half};
    snprintf(p->name, sizeof p->name, "%s%s", tensor->name, suffix[part]);
    p->dtype = values ? im->told.dtype : codes ? format->bits == 8 ? ENG_I8 : ENG_U8 : ENG_F16;
    p->unit = values ? format->elements : codes ? format->elements * format->bits / 8 : 1;
    p->columns = tensor->ndim > 1 ? tensor->shape[1] / format->elements * p->unit : 1;
    eng_st_source *source = &im->sources[im->count++];
    *source =
        (eng_st_source){.name = p->name, .dtype = p->dtype, .ndim = tensor->ndim, .read = read_piece, .context = p};
    memcpy(source->shape, tensor->shape, (size_t)tensor->ndim * sizeof *source->shape);
    if (tensor->ndim > 1)
        source->shape[1] = p->columns;
}

static bool stays_in_blocks(const importing *im, const eng_gguf_tensor *tensor) {
    return im->bits > 0 && tensor->ndim == 2 && tensor->format->bits > 0;
}

static void add_parts(importing *im, const eng_tensor *tensor, const eng_gguf_tensor *found, rows kind) {
    const int64_t half = kind == ROWS_PLAIN ? 0 : im->model->config.layer[0].attention.head_width / 2;
    const eng_block_format *format = found->format;
    if (stays_in_blocks(im, found)) {
        im->told.blocks++;
        add_part(im, tensor, found, ENG_BLOCK_CODES, half);
        add_part(im, tensor, found, ENG_BLOCK_SCALE, half);
        if (format->minimum)
            add_part(im, tensor, found, ENG_BLOCK_MINIMUM, half);
        return;
    }
    if (format->elements > 1 && im->told.widened++ == 0)
        im->told.widened_format = format->name;
    add_part(im, tensor, found, ENG_BLOCK_VALUES, half);
}

static eng_status place_tensor(importing *im, int32_t index) {
    const eng_tensor *tensor = &im->model->tensor[index];
    char name[ENG_NAME_SIZE];
    rows kind = ROWS_PLAIN;
    if (!name_there(tensor, name, sizeof name, &kind))
        return eng_fail(im->error, ENG_INTERNAL, "tensor '%.64s' has no name in such files", tensor->name);
    const eng_gguf_tensor *found = eng_gguf_find(im->file, name);
    if (!found)
        return eng_fail(im->error, ENG_FORMAT, "%s: tensor '%.64s' is missing", eng_path_tail(eng_gguf_path(im->file)),
                        name);
    im->found[index] = found;
    eng_status status = check_shape(im, tensor, found);
    if (status == ENG_OK)
        add_parts(im, tensor, found, kind);
    return status;
}

static int by_address(const void *left, const void *right) {
    const eng_gguf_tensor *a = *(const eng_gguf_tensor *const *)left, *b = *(const eng_gguf_tensor *const *)right;
    return a < b ? -1 : a > b;
}

// The rotation's divisors became keys of the config; anything else that the model does not have is another model.
static eng_status refuse_left_over(const importing *im) {
    const size_t count = (size_t)im->model->tensors;
    qsort(im->found, count, sizeof *im->found, by_address);
    eng_status status = ENG_OK;
    for (size_t i = 0, k = 0; i < eng_gguf_tensor_count(im->file) && status == ENG_OK; i++) {
        const eng_gguf_tensor *tensor = eng_gguf_tensor_at(im->file, i);
        if (k < count && im->found[k] == tensor)
            k++;
        else if (strcmp(tensor->name, "rope_freqs.weight") != 0)
            status = eng_fail(im->error, ENG_UNSUPPORTED, "%s: tensor '%.64s' is not supported",
                              eng_path_tail(eng_gguf_path(im->file)), tensor->name);
    }
    return status;
}

static eng_status place_tensors(importing *im) {
    const size_t count = (size_t)im->model->tensors;
    im->found = calloc(count, sizeof *im->found);
    im->passages = calloc(3 * count, sizeof *im->passages);
    im->sources = calloc(3 * count, sizeof *im->sources);
    eng_status status = im->found && im->passages && im->sources ? ENG_OK : no_memory(im->error);
    for (int32_t i = 0; i < im->model->tensors && status == ENG_OK; i++)
        status = place_tensor(im, i);
    return status == ENG_OK ? refuse_left_over(im) : status;
}

// Without a wish nothing is lost: blocks stay blocks, and beside them vectors stay float32.
static void choose_form(importing *im, const eng_dtype *dtype) {
    im->told.dtype = ENG_BF16;
    for (size_t i = 0; i < eng_gguf_tensor_count(im->file); i++) {
        const eng_gguf_tensor *tensor = eng_gguf_tensor_at(im->file, i);
        const int bits = tensor->format->bits;
        if (tensor->ndim > 1 && strcmp(tensor->format->name, "BF16") != 0)
            im->told.dtype = ENG_F32;
        if (!dtype && tensor->ndim == 2 && bits > 0 && (im->bits == 0 || bits < im->bits))
            im->bits = bits;
    }
    if (dtype)
        im->told.dtype = *dtype;
}

// ---- the folder

static eng_status make_model(importing *im) {
    eng_config config;
    const char *name = eng_path_tail(eng_gguf_path(im->file));
    eng_status status = eng_config_parse(im->config, strlen(im->config), name, &config, im->error);
    return status == ENG_OK ? eng_model_create(&config, &im->model, im->error) : status;
}

static eng_status write_text(const char *dir, const char *name, const char *text, eng_error *error) {
    char *path = eng_join_path(dir, name);
    eng_status status = path ? eng_write_file_atomic(path, text, strlen(text), error) : no_memory(error);
    free(path);
    return status;
}

static eng_status fill(const importing *im, const char *dir) {
    static const char *const metadata[] = {"format", "pt", NULL}; // the public Python loaders insist on it
    eng_status status = write_text(dir, "config.json", im->config, im->error);
    if (status == ENG_OK && im->tokenizer)
        status = write_text(dir, "tokenizer.json", im->tokenizer, im->error);
    if (status == ENG_OK && im->tokenizer)
        status = write_text(dir, "tokenizer_config.json", im->tokenizer_config, im->error);
    char *path = eng_join_path(dir, "model.safetensors");
    if (status == ENG_OK)
        status = path ? eng_st_write(path, im->sources, im->count, metadata, im->error) : no_memory(im->error);
    free(path);
    return status;
}

// What was written must open like any other checkpoint.
static eng_status check_folder(const importing *im, const char *dir) {
    eng_checkpoint *checkpoint = NULL;
    eng_tokenizer *tokenizer = NULL;
    eng_status status = eng_checkpoint_open(dir, &checkpoint, im->error);
    if (status == ENG_OK && im->tokenizer)
        status = eng_tokenizer_open(dir, im->model->config.vocab_size, &tokenizer, im->error);
    eng_tokenizer_close(tokenizer);
    eng_checkpoint_close(checkpoint);
    return status;
}

static eng_status write_folder(const importing *im, const char *dir) {
    char *temp;
    eng_status status = eng_make_temp_dir(dir, &temp, im->error);
    if (status != ENG_OK)
        return status;
    status = fill(im, temp);
    if (status == ENG_OK)
        status = check_folder(im, temp);
    if (status == ENG_OK)
        status = eng_commit_temp_dir(temp, dir, im->error);
    if (status != ENG_OK) {
        eng_error ignored = {0};
        eng_status removed = eng_remove_tree(temp, &ignored); // the first fault is the one to report
        (void)removed;
    }
    free(temp);
    return status;
}

static eng_status import(importing *im, const char *path, const char *dir, const eng_dtype *dtype) {
    eng_status status = eng_checkpoint_check_target(dir, im->error);
    if (status == ENG_OK)
        status = eng_gguf_open(path, &im->file, im->error);
    if (status != ENG_OK)
        return status;
    choose_form(im, dtype);
    status = eng_import_config(im->file, im->told.dtype, im->bits, &im->config, im->error);
    if (status == ENG_OK)
        status = make_model(im);
    if (status == ENG_OK)
        status =
            eng_import_tokenizer(im->file, &im->tokenizer, &im->tokenizer_config, &im->told.chat_template, im->error);
    if (status == ENG_OK)
        status = place_tensors(im);
    return status == ENG_OK ? write_folder(im, dir) : status;
}

eng_status eng_import_gguf(const char *path, const char *dir, const eng_dtype *dtype, eng_imported *imported,
                           eng_error *error) {
    importing im = {.error = error};
    eng_status status = import(&im, path, dir, dtype);
    if (status == ENG_OK && imported) {
        *imported = im.told;
        imported->parameters = im.model->parameters;
        imported->tokenizer = im.tokenizer != NULL;
    }
    free(im.sources);
    free(im.passages);
    free(im.found);
    free(im.tokenizer_config);
    free(im.tokenizer);
    free(im.config);
    eng_model_free(im.model);
    eng_gguf_close(im.file);
    return status;
}
