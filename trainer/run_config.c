// SPDX-License-Identifier: Apache-2.0
// The table of run.ini's keys; reading and checking; see run_config.h.
// The table drives reading, checking, writing and freeing: a new key is one row and one member.
#include "trainer/run_config.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "engine/files.h"
#include "engine/model.h"
#include "trainer/ini_file.h"
#include "trainer/options.h"
#include "trainer/run_config_keys.h"
#include "trainer/runner.h"
#include "trainer/schedule.h"

enum { FILE_LIMIT = 1 << 20 };

static const double largest = 9007199254740992.0; // 2^53: every integer below is a double

// Names of choices, by their values.
static const char *const schedules[] = {[TRN_COSINE] = "cosine", [TRN_WSD] = "wsd", NULL};
static const char *const precisions[] = {"float32", "bf16", NULL};     // of products; weights stay float32
static const char *const roundings[] = {[KERN_ROUND_NONE] = "nearest", // to bf16
                                        [KERN_ROUND_STOCHASTIC] = "stochastic",
                                        [KERN_ROUND_COMPENSATED] = "compensated",
                                        NULL};
static const char *const recomputes[] = {
    [ENG_RECOMPUTE_NONE] = "none", [ENG_RECOMPUTE_MIXER] = "mixer", [ENG_RECOMPUTE_BLOCK] = "block", NULL};
static const char *const loop_losses[] = {
    [ENG_LOOP_LOSS_FINAL] = "final", [ENG_LOOP_LOSS_WEIGHTED] = "weighted", [ENG_LOOP_LOSS_EXPECTED] = "expected",
    [ENG_LOOP_LOSS_NEXT] = "next",   [ENG_LOOP_LOSS_PREVIOUS] = "previous", NULL};

#define AT(member) offsetof(trn_run_config, member)
const trn_run_key trn_run_keys[] = {
    {"data", "train", TRN_KEY_TEXT, AT(train), "", 0, 0, NULL},
    {"data", "valid", TRN_KEY_TEXT, AT(valid), "", 0, 0, NULL},
    {"data", "tokenizer", TRN_KEY_TEXT, AT(tokenizer), "", 0, 0, NULL},
    {"data", "context", TRN_KEY_INTEGER, AT(context), "1024", 1, 1 << 24, NULL},
    {"optim", "lr", TRN_KEY_REAL, AT(lr), "0.001", 0, 10, NULL},
    {"optim", "min_lr_ratio", TRN_KEY_REAL, AT(min_lr_ratio), "0.1", 0, 1, NULL},
    {"optim", "warmup_steps", TRN_KEY_INTEGER, AT(warmup_steps), "100", 0, largest, NULL},
    {"optim", "schedule", TRN_KEY_CHOICE, AT(schedule), "cosine", 0, 0, schedules},
    {"optim", "decay_fraction", TRN_KEY_REAL, AT(decay_fraction), "0.2", 0, 1, NULL},
    {"optim", "beta1", TRN_KEY_REAL, AT(beta1), "0.9", 0, 0.9999999, NULL},
    {"optim", "beta2", TRN_KEY_REAL, AT(beta2), "0.98", 0, 0.9999999, NULL},
    {"optim", "eps", TRN_KEY_REAL, AT(eps), "1e-8", 0, 1, NULL},
    {"optim", "weight_decay", TRN_KEY_REAL, AT(weight_decay), "0.1", 0, 10, NULL},
    {"optim", "rounding", TRN_KEY_CHOICE, AT(rounding), "nearest", 0, 0, roundings},
    {"optim", "clip", TRN_KEY_REAL, AT(clip), "1", 0, 1e6, NULL},
    {"train", "steps", TRN_KEY_INTEGER, AT(steps), "0", 0, largest, NULL},
    {"train", "batch_tokens", TRN_KEY_INTEGER, AT(batch_tokens), "32768", 1, 1 << 30, NULL},
    {"train", "micro_rows", TRN_KEY_INTEGER, AT(micro_rows), "4", 1, 1 << 16, NULL},
    {"train", "seed", TRN_KEY_INTEGER, AT(seed), "1", 0, largest, NULL},
    {"train", "eval_every", TRN_KEY_INTEGER, AT(eval_every), "250", 0, largest, NULL},
    {"train", "eval_rows", TRN_KEY_INTEGER, AT(eval_rows), "64", 0, largest, NULL},
    {"train", "stop_accuracy", TRN_KEY_REAL, AT(stop_accuracy), "0", 0, 1, NULL},
    {"train", "save_every", TRN_KEY_INTEGER, AT(save_every), "500", 0, largest, NULL},
    {"train", "keep", TRN_KEY_INTEGER, AT(keep), "0", 0, largest, NULL},
    {"train", "threads", TRN_KEY_INTEGER, AT(threads), "0", 0, 4096, NULL},
    {"train", "max_bad_steps", TRN_KEY_INTEGER, AT(max_bad_steps), "8", 0, largest, NULL},
    {"train", "recompute", TRN_KEY_CHOICE, AT(recompute), "none", 0, 0, recomputes},
    {"train", "precision", TRN_KEY_CHOICE, AT(precision), "float32", 0, 0, precisions},
    {"train", "device", TRN_KEY_TEXT, AT(device), "cpu", 0, 0, NULL},
    {"train", "warm_start", TRN_KEY_TEXT, AT(warm_start), "", 0, 0, NULL},
    {"train", "start_from", TRN_KEY_TEXT, AT(start_from), "", 0, 0, NULL},
    {"solver", "mode", TRN_KEY_CHOICE, AT(solver_mode), "tolerance", 0, 0, trn_cg_modes},
    {"solver", "tolerance", TRN_KEY_REAL, AT(solver_tolerance), "0.0001", 0, 1, NULL},
    {"solver", "max_steps", TRN_KEY_INTEGER, AT(solver_steps), "0", 0, 256, NULL},
    {"solver", "backward_tolerance", TRN_KEY_REAL, AT(backward_tolerance), "1e-5", 1e-7, 1, NULL},
    {"loop", "loss", TRN_KEY_CHOICE, AT(loop_loss), "final", 0, 0, loop_losses},
    {"loop", "weights", TRN_KEY_TEXT, AT(loop_weights), "", 0, 0, NULL},
    {"loop", "prior", TRN_KEY_TEXT, AT(loop_prior), "", 0, 0, NULL},
    {"loop", "entropy", TRN_KEY_REAL, AT(loop_entropy), "0.1", 0, 100, NULL},
    {"loop", "entropy_decay", TRN_KEY_REAL, AT(entropy_decay), "0", 0, 1, NULL},
    {"loop", "sharpness", TRN_KEY_REAL, AT(gate_sharpness), "50", 0, 1e6, NULL},
    {"loop", "margin", TRN_KEY_REAL, AT(gate_margin), "0.005", 0, 100, NULL},
    {"loop", "backward_loops", TRN_KEY_INTEGER, AT(backward_loops), "0", 0, ENG_MAX_LOOPS, NULL},
    {"teacher", "model", TRN_KEY_TEXT, AT(teacher), "", 0, 0, NULL},
    {"teacher", "loss_share", TRN_KEY_REAL, AT(loss_share), "1", 0, 1e6, NULL},
    {"teacher", "divergence_share", TRN_KEY_REAL, AT(divergence_share), "1", 0, 1e6, NULL},
    {"teacher", "temperature", TRN_KEY_REAL, AT(temperature), "1", 0.01, 100, NULL},
};
#undef AT
const int trn_run_key_count = sizeof trn_run_keys / sizeof *trn_run_keys;

// The keys of config.json that mean something to a model made here.
static const char *const model_keys[] = {
    "D_has_hdim",
    "allow_neg_eigval",
    "architectures",
    "attention_bias",
    "attention_window_size",
    "attn",
    "block_types",
    "bos_token_id",
    "clamp_min",
    "conv1d_width",
    "conv_kernel",
    "conv_size",
    "dt_limit",
    "elementwise_affine",
    "embedding_dim",
    "eos_token_id",
    "eps",
    "exit_gate",
    "expand",
    "expand_k",
    "expand_v",
    "feature_map",
    "ffn_proj_factor",
    "ffn_round_up_to_multiple_of",
    "gamma_cap_b",
    "gate_soft_cap",
    "head_dim",
    "hidden_act",
    "hidden_activation",
    "hidden_ratio",
    "hidden_size",
    "init",
    "initializer_range",
    "intermediate_size",
    "lambda_lower_bound",
    "layer_norm_epsilon",
    "layer_types",
    "logits_soft_cap",
    "loop_blocks",
    "loop_embedding",
    "loop_residual_gate",
    "lower_bound",
    "lru_width",
    "max_cg_step_decoding",
    "max_cg_step_training",
    "max_position_embeddings",
    "mesa",
    "mlp_bias",
    "model_type",
    "n_groups",
    "norm_before_gate",
    "norm_eps",
    "norm_feature_map",
    "norm_k",
    "norm_q",
    "num_attention_heads",
    "num_blocks",
    "num_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "num_kv_heads",
    "num_loops",
    "num_v_heads",
    "output_logit_soft_cap",
    "pad_token_id",
    "partial_rotary_factor",
    "qk_activation",
    "qk_dim_factor",
    "qk_norm",
    "qkv_bias",
    "recurrence",
    "rms_norm_eps",
    "rmsnorm",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "safe_gate",
    "scale_embeddings",
    "state_size",
    "tie_feature_map_qk",
    "tie_word_embeddings",
    "time_step_limit",
    "trained_length",
    "use_beta",
    "use_bias",
    "use_conv_bias",
    "use_gate",
    "use_output_gate",
    "use_short_conv",
    "v_dim_factor",
    "vocab_size",
    "weight_mode",
    "window_size",
};

typedef struct reader {
    trn_run_config *config;
    bool given[64];   // keys of the table, in this file
    char *model_text; // the value of model_key, which may go on
    char model_key[64];
    bool replaces; // --set: a value given before may change
} reader;

// ------------------------------------------------------------------------------------------------------------- values

static void *target_of(trn_run_config *config, const trn_run_key *key) {
    return (char *)config + key->offset;
}

static eng_status set_text(char **target, const char *value, eng_error *error) {
    char *copy = strdup(value);
    if (!copy)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for a value");
    free(*target);
    *target = copy;
    return ENG_OK;
}

static eng_status set_choice(const trn_run_key *key, const char *value, int64_t *target, eng_error *error) {
    for (int i = 0; key->choice[i]; i++)
        if (strcmp(key->choice[i], value) == 0) {
            *target = i;
            return ENG_OK;
        }
    char names[96] = "";
    for (int i = 0; key->choice[i]; i++)
        snprintf(names + strlen(names), sizeof names - strlen(names), "%s%s", i ? ", " : "", key->choice[i]);
    return eng_fail(error, ENG_INVALID, "%s.%s: \"%.40s\" is none of %s", key->section, key->name, value, names);
}

static eng_status set_value(trn_run_config *config, const trn_run_key *key, const char *value, eng_error *error) {
    char name[64];
    double number = 0;
    void *target = target_of(config, key);
    snprintf(name, sizeof name, "%s.%s", key->section, key->name);
    eng_status status = ENG_OK;
    switch (key->kind) {
    case TRN_KEY_TEXT:
        return set_text(target, value, error);
    case TRN_KEY_CHOICE:
        return set_choice(key, value, target, error);
    case TRN_KEY_INTEGER:
        status = trn_parse_integer(name, value, target, error);
        number = (double)*(int64_t *)target;
        break;
    case TRN_KEY_REAL:
        status = trn_parse_real(name, value, target, error);
        number = *(double *)target;
        break;
    }
    if (status == ENG_OK && !(number >= key->least && number <= key->most))
        return eng_fail(error, ENG_INVALID, "%s: %.40s is not in %.16g..%.16g", name, value, key->least, key->most);
    return status;
}

static int find_key(const char *section, const char *name) {
    for (int i = 0; i < trn_run_key_count; i++)
        if (strcmp(trn_run_keys[i].section, section) == 0 && strcmp(trn_run_keys[i].name, name) == 0)
            return i;
    return -1;
}

static bool is_model_key(const char *name) {
    for (size_t i = 0; i < sizeof model_keys / sizeof *model_keys; i++)
        if (strcmp(model_keys[i], name) == 0)
            return true;
    return false;
}

// A value of [model]; the same key again continues an array or object.
static eng_status set_model(reader *r, const char *name, const char *value, eng_error *error) {
    if (strcmp(name, "base") == 0)
        return set_text(&r->config->base, value, error);
    if (!is_model_key(name))
        return eng_fail(error, ENG_INVALID, "model.%.40s: unknown key", name);
    bool again = strcmp(r->model_key, name) == 0;
    if (!r->replaces && trn_json_has(r->config->model, name) &&
        !(again && (r->model_text[0] == '[' || r->model_text[0] == '{')))
        return eng_fail(error, ENG_INVALID, "model.%s: given twice", name);
    size_t before = again && !r->replaces ? strlen(r->model_text) : 0, size = before + strlen(value) + 2;
    char *whole = malloc(size);
    if (!whole)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for a value");
    snprintf(whole, size, "%.*s%s%s", (int)before, r->model_text ? r->model_text : "", before ? " " : "", value);
    free(r->model_text);
    r->model_text = whole;
    snprintf(r->model_key, sizeof r->model_key, "%s", name);
    trn_json_set_text(r->config->model, name, whole);
    return ENG_OK;
}

static eng_status set_key(reader *r, const char *section, const char *name, const char *value, eng_error *error) {
    if (strcmp(section, "model") == 0)
        return set_model(r, name, value, error);
    int index = find_key(section, name);
    if (index < 0)
        return eng_fail(error, ENG_INVALID, "%.40s%s%.40s: unknown key", section, section[0] ? "." : "", name);
    if (r->given[index] && !r->replaces)
        return eng_fail(error, ENG_INVALID, "%s.%s: given twice", section, name);
    r->given[index] = true;
    return set_value(r->config, &trn_run_keys[index], value, error);
}

// ------------------------------------------------------------------------------------------------------------ sources

static eng_status visit_key(void *context, const trn_ini_value *at, eng_error *fault) {
    return at->name ? set_key(context, at->section, at->name, at->value, fault) : ENG_OK;
}

static eng_status read_file(trn_run_config *config, const char *path, eng_error *error) {
    reader reader = {.config = config};
    eng_status status = trn_ini_read(path, visit_key, &reader, error);
    free(reader.model_text);
    return status;
}

eng_status trn_run_config_set(trn_run_config *config, const char *assignment, eng_error *error) {
    char section[32], name[64];
    const char *dot = strchr(assignment, '.'), *equals = strchr(assignment, '=');
    if (!dot || !equals || dot > equals || dot == assignment || dot + 1 == equals ||
        (size_t)(dot - assignment) >= sizeof section || (size_t)(equals - dot) > sizeof name)
        return eng_fail(error, ENG_INVALID, "--set %.60s: not section.key=value", assignment);
    snprintf(section, sizeof section, "%.*s", (int)(dot - assignment), assignment);
    snprintf(name, sizeof name, "%.*s", (int)(equals - dot - 1), dot + 1);
    reader reader = {.config = config, .replaces = true};
    eng_error fault = {0};
    eng_status status = set_key(&reader, section, name, equals + 1, &fault);
    free(reader.model_text);
    return status == ENG_OK ? status : eng_fail(error, status, "--set %s", fault.text);
}

// -------------------------------------------------------------------------------------------------------------- whole

static eng_status set_defaults(trn_run_config *config, eng_error *error) {
    *config = (trn_run_config){.model = trn_json_create()};
    eng_status status = config->model ? set_text(&config->base, "", error)
                                      : eng_fail(error, ENG_NO_MEMORY, "out of memory for a configuration");
    for (int i = 0; status == ENG_OK && i < trn_run_key_count; i++)
        status = set_value(config, &trn_run_keys[i], trn_run_keys[i].fallback, error);
    return status;
}

static eng_status check(const trn_run_config *config, eng_error *error) {
    if (!config->train[0])
        return eng_fail(error, ENG_INVALID, "data.train: missing");
    if (config->steps == 0)
        return eng_fail(error, ENG_INVALID, "train.steps: missing or 0");
    if (config->batch_tokens % config->context != 0)
        return eng_fail(error, ENG_INVALID, "train.batch_tokens: %lld is no multiple of data.context %lld",
                        (long long)config->batch_tokens, (long long)config->context);
    if (config->batch_tokens / config->context > 1 << 20)
        return eng_fail(error, ENG_INVALID, "train.batch_tokens: more than 1048576 rows a step");
    if (config->stop_accuracy > 0 && (!config->valid[0] || config->eval_every == 0))
        return eng_fail(error, ENG_INVALID, "train.stop_accuracy: needs data.valid and train.eval_every");
    if (config->start_from[0] && config->warm_start[0])
        return eng_fail(error, ENG_INVALID, "train.start_from, train.warm_start: a run starts from one of them");
    if (config->eps <= 0)
        return eng_fail(error, ENG_INVALID, "optim.eps: must be above 0");
    if (config->teacher[0] && config->loss_share == 0 && config->divergence_share == 0)
        return eng_fail(error, ENG_INVALID, "teacher.loss_share, teacher.divergence_share: both are 0");
    if (config->teacher[0] && config->loop_loss != ENG_LOOP_LOSS_FINAL)
        return eng_fail(error, ENG_INVALID, "teacher.model: goes with loop.loss = final alone");
    return ENG_OK;
}

eng_status trn_run_config_read(const char *path, const char *const *set, int sets, trn_run_config *out,
                               eng_error *error) {
    trn_run_config config;
    eng_status status = set_defaults(&config, error);
    if (status == ENG_OK && path)
        status = read_file(&config, path, error);
    for (int i = 0; status == ENG_OK && i < sets; i++)
        status = trn_run_config_set(&config, set[i], error);
    if (status == ENG_OK)
        status = check(&config, error);
    if (status == ENG_OK)
        *out = config;
    else
        trn_run_config_free(&config);
    return status;
}

eng_status trn_run_config_set_base(trn_run_config *config, const char *base, eng_error *error) {
    return set_text(&config->base, base, error);
}

typedef struct based {
    trn_json *model;
    bool typed; // by a model_type of its own: the public class of the base is perhaps another family's
} based;

static eng_status add_base_key(void *context, const char *key, const char *text) {
    const based *based = context;
    const bool foreign = based->typed && strcmp(key, "architectures") == 0;
    if (is_model_key(key) && !foreign && !trn_json_has(based->model, key))
        trn_json_set_text(based->model, key, text);
    return ENG_OK;
}

static eng_status check_base(const char *path, eng_error *error) {
    char *text = NULL;
    size_t length = 0;
    eng_config parsed = {0};
    eng_status status = eng_read_file(path, FILE_LIMIT, &text, &length, error);
    if (status == ENG_OK)
        status = eng_config_parse(text, length, path, &parsed, error);
    eng_config_free(&parsed);
    free(text);
    return status;
}

eng_status trn_run_config_merge_base(trn_run_config *config, eng_error *error) {
    if (!config->base[0])
        return ENG_OK;
    struct stat facts;
    bool folder = stat(config->base, &facts) == 0 && S_ISDIR(facts.st_mode);
    char *path = folder ? eng_join_path(config->base, "config.json") : strdup(config->base);
    trn_json *base = NULL;
    eng_status status = path ? check_base(path, error) : eng_fail(error, ENG_NO_MEMORY, "out of memory for a path");
    if (status == ENG_OK)
        status = trn_json_read_config(path, &base, error);
    based based = {config->model, trn_json_has(config->model, "model_type")};
    if (status == ENG_OK)
        status = trn_json_each_text(base, add_base_key, &based, error);
    if (status == ENG_OK)
        status = set_text(&config->base, "", error);
    trn_json_free(base);
    free(path);
    return status;
}

void trn_run_config_free(trn_run_config *config) {
    trn_json_free(config->model);
    free(config->base);
    for (int i = 0; i < trn_run_key_count; i++)
        if (trn_run_keys[i].kind == TRN_KEY_TEXT)
            free(*(char **)target_of(config, &trn_run_keys[i]));
    memset(config, 0, sizeof *config);
}
