// SPDX-License-Identifier: Apache-2.0
// The keys of a GGUF file of architecture "llama" as a config.json of the Llama family (models.md 9.3).
//
// Every key under "llama." is read, known to change nothing, or refused by its name. Rotations of Llama 3.1 stand in
// such files as a tensor of divisors, one a frequency: the four numbers of the public rule are found from it and the
// divisors that they give are held against the tensor.
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/config_internal.h"
#include "engine/import_internal.h"

#define ARCHITECTURE "llama"
#define KEY(name) ARCHITECTURE "." name

typedef struct reading {
    const eng_gguf *file;
    json_t *config;
    eng_error *error;
    eng_status status; // the first fault sticks
} reading;

static void set(reading *r, const char *name, json_t *value) {
    if (json_object_set_new(r->config, name, value) != 0 && r->status == ENG_OK)
        r->status = eng_fail(r->error, ENG_NO_MEMORY, "no memory for config.json");
}

// fallback -1: the key must be there.
static int64_t integer(reading *r, const char *key, int64_t fallback, int64_t least) {
    int64_t value = fallback;
    if (r->status == ENG_OK)
        r->status = eng_gguf_read_integer(r->file, key, least, INT32_MAX, &value, r->error);
    if (r->status == ENG_OK && value < 0)
        r->status = eng_gguf_fail(r->file, ENG_FORMAT, key, r->error, "is missing");
    return r->status == ENG_OK ? value : 1;
}

// fallback NAN: the key must be there. The file's float32 as the shortest decimal number that rounds to it, as its
// author wrote it.
static double real(reading *r, const char *key, double fallback) {
    double value = fallback;
    char text[32];
    if (r->status == ENG_OK)
        r->status = eng_gguf_read_real(r->file, key, &value, r->error);
    if (r->status == ENG_OK && !isfinite(value))
        r->status = eng_gguf_fail(r->file, ENG_FORMAT, key, r->error,
                                  eng_gguf_key(r->file, key) ? "is not finite" : "is missing");
    if (r->status != ENG_OK)
        return 1;
    for (int digits = 1; digits <= 17; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, value);
        if ((float)strtod(text, NULL) == (float)value)
            break;
    }
    return strtod(text, NULL);
}

static void refuse(reading *r, const char *key, const char *what) {
    if (r->status == ENG_OK)
        r->status = eng_gguf_fail(r->file, ENG_UNSUPPORTED, key, r->error, "%s", what);
}

// ---- what may stand in a file

// Keys that are read below, and those that change nothing here.
static const char *const known[] = {
    KEY("block_count"),
    KEY("context_length"),
    KEY("embedding_length"),
    KEY("feed_forward_length"),
    KEY("attention.head_count"),
    KEY("attention.head_count_kv"),
    KEY("attention.key_length"),
    KEY("attention.value_length"),
    KEY("attention.layer_norm_rms_epsilon"),
    KEY("rope.freq_base"),
    KEY("rope.dimension_count"),
    KEY("rope.scaling.type"),
    KEY("rope.scaling.factor"),
    KEY("rope.scaling.original_context_length"),
    KEY("rope.scaling.finetuned"),
    KEY("vocab_size"),
    KEY("tensor_data_layout"),
};

static void refuse_unknown(reading *r) {
    for (size_t i = 0; i < eng_gguf_key_count(r->file) && r->status == ENG_OK; i++) {
        const eng_gguf_value *value = eng_gguf_key_at(r->file, i);
        bool found = strncmp(value->key, KEY(""), strlen(KEY(""))) != 0 && strncmp(value->key, "split.", 6) != 0 &&
                     strncmp(value->key, "adapter.", 8) != 0;
        int64_t number = 1;
        bool flag = true;
        if ((eng_gguf_integer(value, &number) && number == 0) || (eng_gguf_flag(value, &flag) && !flag))
            continue; // what it would ask for is off
        for (size_t k = 0; k < sizeof known / sizeof *known && !found; k++)
            found = strcmp(value->key, known[k]) == 0;
        if (!found)
            refuse(r, value->key, "is not supported");
    }
}

static void check_architecture(reading *r) {
    static const char key[] = "general.architecture";
    char *name = NULL;
    r->status = eng_gguf_read_text(r->file, key, &name, r->error);
    if (r->status == ENG_OK && !name)
        r->status = eng_gguf_fail(r->file, ENG_FORMAT, key, r->error, "is missing");
    if (r->status == ENG_OK && strcmp(name, ARCHITECTURE) != 0)
        r->status = eng_gguf_fail(r->file, ENG_UNSUPPORTED, key, r->error, "'%.32s' is not supported (llama)", name);
    free(name);
}

// ---- sizes

static bool has_tensor(const reading *r, const char *name) {
    return eng_gguf_find(r->file, name) != NULL;
}

static void read_vocabulary(reading *r) {
    const eng_gguf_tensor *embedding = eng_gguf_find(r->file, "token_embd.weight");
    int64_t rows = embedding && embedding->ndim == 2 ? embedding->shape[0] : 0;
    int64_t given = integer(r, KEY("vocab_size"), rows, 1);
    if (r->status == ENG_OK && rows < 1)
        r->status = eng_fail(r->error, ENG_FORMAT, "%s: tensor 'token_embd.weight' is missing or no matrix",
                             eng_gguf_path(r->file));
    if (r->status == ENG_OK && given != rows)
        r->status = eng_gguf_fail(r->file, ENG_FORMAT, KEY("vocab_size"), r->error,
                                  "is %lld; token_embd.weight has %lld rows", (long long)given, (long long)rows);
    set(r, "vocab_size", json_integer(given));
}

// Returns the width of a head.
static int64_t read_heads(reading *r, int64_t hidden) {
    int64_t heads = integer(r, KEY("attention.head_count"), -1, 1);
    int64_t width = integer(r, KEY("attention.key_length"), hidden / heads, 1);
    if (r->status == ENG_OK && !eng_gguf_key(r->file, KEY("attention.key_length")) && hidden % heads != 0)
        r->status = eng_gguf_fail(r->file, ENG_FORMAT, KEY("attention.head_count"), r->error,
                                  "%lld does not divide the width %lld", (long long)heads, (long long)hidden);
    if (integer(r, KEY("attention.value_length"), width, 1) != width)
        refuse(r, KEY("attention.value_length"), "differs from attention.key_length");
    if (integer(r, KEY("rope.dimension_count"), width, 1) != width)
        refuse(r, KEY("rope.dimension_count"), "differs from the width of a head: rotation of a part of it");
    set(r, "num_attention_heads", json_integer(heads));
    set(r, "num_key_value_heads", json_integer(integer(r, KEY("attention.head_count_kv"), heads, 1)));
    set(r, "head_dim", json_integer(width));
    return width;
}

// ---- rotation

// The public rule: divisors of the frequencies theta^(-2i/width).
static double llama3_divisor(double theta, int64_t width, int64_t i, double factor, double original) {
    const double low = 1, high = 4; // of every public checkpoint
    double wavelength = 2 * M_PI * pow(theta, 2.0 * (double)i / (double)width);
    if (wavelength > original / low)
        return factor;
    if (wavelength < original / high)
        return 1;
    double share = (original / wavelength - low) / (high - low);
    return 1 / ((1 - share) / factor + share);
}

static void read_divisors(reading *r, double theta, int64_t width) {
    const double original = 8192;
    const eng_gguf_tensor *tensor = eng_gguf_find(r->file, "rope_freqs.weight");
    float divisor[512];
    if (!tensor || r->status != ENG_OK)
        return;
    bool fits = tensor->count == width / 2 && tensor->count <= (int64_t)(sizeof divisor / sizeof *divisor) &&
                tensor->format->elements == 1;
    if (fits)
        r->status = eng_gguf_read_f32(r->file, tensor, 0, tensor->count, divisor, r->error);
    if (r->status != ENG_OK)
        return;
    for (int64_t i = 0; fits && i < width / 2; i++) {
        double wanted = llama3_divisor(theta, width, i, (double)divisor[width / 2 - 1], original);
        fits = fabs((double)divisor[i] - wanted) <= 1e-5 * wanted;
    }
    if (!fits) {
        r->status = eng_fail(r->error, ENG_UNSUPPORTED, "%s: tensor 'rope_freqs.weight' is not Llama 3.1's rotation",
                             eng_gguf_path(r->file));
        return;
    }
    json_t *scaling = json_pack("{s:s, s:f, s:f, s:f, s:I}", "rope_type", "llama3", "factor",
                                (double)divisor[width / 2 - 1], "low_freq_factor", 1.0, "high_freq_factor", 4.0,
                                "original_max_position_embeddings", (json_int_t)original);
    set(r, "rope_scaling", scaling);
}

static void read_rotation(reading *r, int64_t width) {
    static const char key[] = KEY("rope.scaling.type");
    char *type = NULL;
    double theta = real(r, KEY("rope.freq_base"), 10000);
    set(r, "rope_theta", json_real(theta));
    if (r->status == ENG_OK)
        r->status = eng_gguf_read_text(r->file, key, &type, r->error);
    if (type && strcmp(type, "linear") == 0)
        set(r, "rope_scaling",
            json_pack("{s:s, s:f}", "rope_type", "linear", "factor", real(r, KEY("rope.scaling.factor"), NAN)));
    else if (type && strcmp(type, "none") != 0)
        refuse(r, key, "only none and linear are supported");
    if (type && has_tensor(r, "rope_freqs.weight"))
        refuse(r, key, "stands beside the tensor rope_freqs.weight");
    free(type);
    read_divisors(r, theta, width);
}

// ---- ids

static int64_t token(reading *r, const char *key) {
    int64_t id = -1;
    if (r->status == ENG_OK)
        r->status = eng_gguf_read_integer(r->file, key, -1, INT32_MAX, &id, r->error);
    return id;
}

// The ids that end a text: of the text, of a turn, of a message.
static void read_ends(reading *r) {
    static const char *const keys[] = {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id",
                                       "tokenizer.ggml.eom_token_id"};
    json_t *ends = json_array();
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        int64_t id = token(r, keys[i]);
        bool told = id < 0;
        for (size_t k = 0; k < json_array_size(ends); k++)
            told = told || json_integer_value(json_array_get(ends, k)) == id;
        if (!told)
            json_array_append_new(ends, json_integer(id));
    }
    if (json_array_size(ends) > 0) {
        set(r, "eos_token_id", json_array_size(ends) == 1 ? json_incref(json_array_get(ends, 0)) : json_incref(ends));
    } else {
        set(r, "eos_token_id", json_null());
    }
    json_decref(ends);
}

static void read_ids(reading *r) {
    int64_t bos = token(r, "tokenizer.ggml.bos_token_id"), pad = token(r, "tokenizer.ggml.padding_token_id");
    set(r, "bos_token_id", bos >= 0 ? json_integer(bos) : json_null());
    set(r, "pad_token_id", pad >= 0 ? json_integer(pad) : json_null());
    read_ends(r);
}

static void read_all(reading *r) {
    check_architecture(r);
    refuse_unknown(r);
    set(r, "architectures", json_pack("[s]", "LlamaForCausalLM"));
    set(r, "model_type", json_string("llama"));
    set(r, "hidden_act", json_string("silu"));
    int64_t hidden = integer(r, KEY("embedding_length"), -1, 1);
    set(r, "hidden_size", json_integer(hidden));
    set(r, "intermediate_size", json_integer(integer(r, KEY("feed_forward_length"), -1, 1)));
    set(r, "num_hidden_layers", json_integer(integer(r, KEY("block_count"), -1, 1)));
    set(r, "max_position_embeddings", json_integer(integer(r, KEY("context_length"), -1, 1)));
    set(r, "rms_norm_eps", json_real(real(r, KEY("attention.layer_norm_rms_epsilon"), NAN)));
    read_vocabulary(r);
    read_rotation(r, read_heads(r, hidden));
    set(r, "attention_bias", json_boolean(has_tensor(r, "blk.0.attn_q.bias")));
    set(r, "mlp_bias", json_boolean(has_tensor(r, "blk.0.ffn_gate.bias")));
    set(r, "tie_word_embeddings", json_boolean(!has_tensor(r, "output.weight")));
    read_ids(r);
}

eng_status eng_import_config(const eng_gguf *file, eng_dtype dtype, int bits, char **config, eng_error *error) {
    reading r = {.file = file, .config = json_object(), .error = error};
    read_all(&r);
    set(&r, "torch_dtype", json_string(dtype == ENG_BF16 ? "bfloat16" : "float32"));
    if (bits > 0)
        set(&r, "quantization_config", eng_config_quantization(bits));
    if (r.status == ENG_OK)
        *config = eng_json_write(r.config);
    if (r.status == ENG_OK && !*config)
        r.status = eng_fail(error, ENG_NO_MEMORY, "no memory for config.json");
    json_decref(r.config);
    return r.status;
}
