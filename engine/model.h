// SPDX-License-Identifier: Apache-2.0
// What a model is: its configuration, its layers and one table of tensors. No weights, no device memory.
//
// A model is  embed -> blocks -> norm -> head;  a block is  x += mixer(norm(x)); x += mlp(norm(x)).  The mixer of each
// layer comes from the mixer table (mixer.h), so a hybrid is a list of mixers. The tensor table drives loading, saving,
// initialisation, the optimizer and the tests: adding a parameter is one line in the mixer's declare function plus its
// use.
// An eng_model is immutable once anything is made of it and may be shared by threads.
#ifndef ENGINE_MODEL_H
#define ENGINE_MODEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/engine.h"
#include "engine/safetensors.h"
#include "engine/status.h"
#include "kernels/kernels.h"

// Names and conventions of the family of files a config belongs to.
typedef enum eng_dialect {
    ENG_DIALECT_FLA,
    ENG_DIALECT_LLAMA,
    ENG_DIALECT_MAMBA2,       // transformers' and flash-linear-attention's
    ENG_DIALECT_STATE_SPACES, // mamba_ssm's
    ENG_DIALECT_XLSTM,
    ENG_DIALECT_GEMMA,
} eng_dialect;

enum { ENG_MAX_EOS = 8, ENG_MAX_MIXER_TENSORS = 40, ENG_MAX_STATE_PARTS = 4, ENG_NAME_SIZE = 128 };

typedef enum eng_rope_scaling { ENG_ROPE_DEFAULT, ENG_ROPE_LINEAR, ENG_ROPE_LLAMA3 } eng_rope_scaling;

typedef struct eng_attention_config { // models.md 1.5, 9
    int32_t heads, kv_heads, head_width;
    int32_t window; // 0: full
    int32_t rotary; // channels of a head that are rotated, from the first on
    bool qkv_bias, output_bias, qk_norm;
    double rope_theta;
    eng_rope_scaling rope_scaling;
    double rope_factor, rope_low, rope_high, rope_original_length;
} eng_attention_config;

// Learned maps of a linear-attention head (models.md 8.3); the others are activations.
typedef enum eng_feature_map {
    ENG_FEATURE_MAP_NONE,
    ENG_FEATURE_MAP_PRODUCT, // elementwise_product
    ENG_FEATURE_MAP_HEDGEHOG,
    ENG_FEATURE_MAP_T2R,
    ENG_FEATURE_MAP_DPFP,
} eng_feature_map;

// Every mixer on the recurrence family, models.md 3-8, 10, 12. Its config reader sets what its kind has.
typedef struct eng_recurrent_config {
    int32_t decay, update;                       // kern_decay, kern_update
    int32_t heads;                               // states
    int32_t query_heads, key_heads, value_heads; // as the recurrence maps them to states
    int32_t key_width, value_width;              // of a head
    int32_t taps;                                // 0: no convolution
    bool plain_values;                           // mesa: values have none
    int32_t key_activation, value_activation;    // kern_activation, behind the convolution
    int32_t key_map;                             // kern_activation of queries and keys behind that, or the learned map
    bool qk_norm, qk_norm_sums;                  // L2, or divided by the sum
    bool weighted;                               // a write gate
    bool constant_write;                         // always write_factor
    float write_factor;                          // 2: negative eigenvalues
    bool output_norm, output_gate;
    bool unweighted_norm;                       // gla, retnet, linear_attn: elementwise_affine false
    bool plain_norm_name;                       // gla, retnet: g_norm, not g_norm_swish_gate
    eng_feature_map feature_map;                // linear_attn
    bool shared_map, norm_q, norm_k, normalise; // linear_attn
    float clamp_min;                            // gla; 0: none
    float lower_bound;                          // kda; 0: none
    bool conv_bias, linear_bias;                // mamba2
    bool skip_per_channel, norm_before_gate;    // mamba2
    int32_t norm_groups;                        // mamba2
    float step_min, step_max;                   // mamba2
    float gate_soft_cap, cell_eps;              // mlstm
} eng_recurrent_config;

// What a Mesa layer has beside its recurrent part, models.md 2.1, 2.7.
typedef struct eng_mesa_config {
    float lambda_bound;
    int32_t cg_steps_training, cg_steps_decoding; // max_cg_step_training, max_cg_step_decoding
    float gamma_cap;                              // gamma_cap_b; 1: none
} eng_mesa_config;

typedef struct eng_rglru_config { // models.md 13
    int32_t width, blocks, taps;
} eng_rglru_config;

struct eng_mixer;

typedef struct eng_layer_config {
    const struct eng_mixer *mixer;
    union {
        struct {
            eng_recurrent_config recurrent;
            eng_mesa_config mesa;
        };
        eng_attention_config attention;
        eng_rglru_config rglru;
    };
} eng_layer_config;

// Layers [first, first + layers) run `loops` times, each time with states of their own; config_loop.c.
typedef struct eng_loop_config {
    int32_t loops; // 1: a plain model
    int32_t first, layers;
    bool embedding;     // of each loop, added to its input
    bool residual_gate; // of each loop, times the first loop's input, added to its output
    bool exit_gate;
} eng_loop_config;

typedef struct eng_config {
    char model_type[32];
    eng_dialect dialect;
    const char *architecture; // class of the public code
    int32_t vocab_size, hidden_size, layers;
    int32_t intermediate_size; // 0: blocks without MLP
    int32_t mlp_activation;    // kern_activation
    float norm_eps;
    float norm_offset;     // norms multiply by weight + norm_offset
    bool tied;             // tie_word_embeddings
    bool scale_embeddings; // x = sqrt(hidden_size) embed
    bool round_scale;      // that factor is rounded to bf16
    bool mlp_bias;
    bool norm_bias;        // xlstm: norms of the blocks
    bool fused_weights;    // xlstm: files hold linear maps as rows of larger ones
    float logits_soft_cap; // 0: none
    float initializer_range;
    bool init_fla;          // "init": "fla": the public code's start; else the project's (models.md 1.8)
    int64_t max_positions;  // max_position_embeddings
    int64_t trained_length; // -1: unknown
    int32_t bos_id, pad_id; // -1: none
    int32_t eos_id[ENG_MAX_EOS];
    int32_t eos_count;
    eng_knobs knobs;         // defaults of the checkpoint ("mesa" object), else 1e-4 and max_cg_step_decoding
    eng_layer_config *layer; // (layers)
    eng_loop_config loop;
    bool quantised; // quantization_config: matrices may be in blocks (quantize.h)
    char *json;     // config.json as read, for writing it back
} eng_config;

// Reads a config.json text (bare Infinity accepted). path only names it in errors. What is not built (attention
// residuals, an unknown activation, mixture of experts, a model_type) is refused with the key's name; keys without
// meaning are ignored.
ENG_CHECKED eng_status eng_config_parse(const char *json, size_t length, const char *path, eng_config *out,
                                        eng_error *error);
void eng_config_free(eng_config *config); // frees what it holds, not the struct

typedef enum eng_role {
    ENG_ROLE_MATRIX, // kern_weight (out, in), leading dimensions as one: linear, embed, head
    ENG_ROLE_VECTOR, // float32 device memory: norms, biases, convolutions, lambda
} eng_role;

typedef enum eng_init_kind {
    ENG_INIT_NORMAL,
    ENG_INIT_CONSTANT,
    ENG_INIT_HORIZON,         // s(b)^(1 / divisor) = 1 - 1 / horizon
    ENG_INIT_HORIZON_STEP,    // e^-softplus(b) = 1 - 1 / horizon
    ENG_INIT_HORIZON_BOUNDED, // e^(-divisor s(b)) = 1 - 1 / horizon
    ENG_INIT_LINEAR,          // from low to value over the groups
    ENG_INIT_LOG_UNIFORM,     // ln U(low, value)
    ENG_INIT_STEP,            // softplus(b) = e^U(ln low, ln value)
    ENG_INIT_RGLRU,           // a^2 = U(low, value), a = e^-8 softplus(b)
} eng_init_kind;

typedef struct eng_init {
    eng_init_kind kind;
    float value; // NORMAL: standard deviation; CONSTANT: the value; HORIZON*: context, the longest of the horizons
    float low;
    int32_t groups; // equal neighbours form this many groups (heads); 0: every element is one
    float divisor;
} eng_init;

typedef struct eng_tensor {
    char name[ENG_NAME_SIZE];  // as in the file
    char alias[ENG_NAME_SIZE]; // its other spelling in files; empty: none
    char whole[ENG_NAME_SIZE]; // the tensor of files of which it may be rows [whole_row, ...); empty: none
    int64_t whole_row, whole_rows;
    int ndim;
    int64_t shape[4];
    int64_t count;
    eng_role role;
    bool decay; // weight decay applies (linear weights only, architecture.md)
    eng_init init;
    int32_t layer; // -1: outside the blocks
} eng_tensor;

// A table computed from the config (RoPE frequencies), uploaded beside the tensors:
// weights->param[model->tensors + its index].
typedef struct eng_constant {
    float *value;
    int32_t count;
} eng_constant;

// The matrix states of a layer, its first part: `heads` times (rows, columns), with symmetric a (rows, rows) before it
// of which the lower triangle is enough.
typedef struct eng_state_matrix {
    int32_t heads, rows, columns; // heads 0: none
    bool symmetric;
} eng_state_matrix;

typedef struct eng_layer {
    int32_t mixer_norm_bias, mlp_norm_bias;                      // -1: none
    int32_t mixer_norm, mlp_norm, gate_proj, up_proj, down_proj; // indices into the tensor table
    int32_t gate_bias, up_bias, down_bias;                       // -1: none
    int32_t mixer[ENG_MAX_MIXER_TENSORS];                        // its own, in its enum's order; -1: absent
    int32_t constant;                                            // its first table among the constants; -1: none
    size_t state_offset, state_bytes; // inside a state slot; 64-byte aligned; of one loop, the loops' one after another
    size_t state_part[ENG_MAX_STATE_PARTS]; // offsets inside the layer's state
    size_t part_bytes[ENG_MAX_STATE_PARTS];
    eng_state_matrix state_matrix;
    int32_t state_parts;
    size_t page_offset, page_bytes; // inside a KV page of all layers, likewise; 0 bytes: none
} eng_layer;

enum { ENG_PENDING_TOKENS = 64 }; // that wait for the loops of one session, at most

typedef struct eng_model {
    eng_config config;
    eng_tensor *tensor;
    int32_t tensors;
    eng_constant *constant;
    int32_t constants;
    eng_layer *layer;
    int32_t embed, final_norm, head;            // tensor indices; head = embed if tied
    int32_t loop_embedding, loop_residual_gate; // (loops, hidden); -1: none
    int32_t exit_gate, exit_bias;               // (1, hidden), (1); -1: none
    int32_t ones;                               // constant (loops, hidden), with loop_embedding; -1: none
    uint64_t parameters;
    kern_storage state_storage; // of state_matrix of every layer
    // What the next id is drawn from: a vector a plane, for models that end with their loop of each loop, and the
    // gates' logits, where in a slot they begin and how far apart they are; gates at 0: none.
    int32_t final_planes;
    size_t final_offset, final_stride, gates_offset, gates_stride;
    size_t state_bytes; // a slot
    // Behind the state what waits for a loop, where tokens may be read early (loop.h): kern_exit_waiting, and a list of
    // ENG_PENDING_TOKENS vectors for every loop but the first; with a loop_residual_gate a second one. 0 bytes: none.
    size_t waiting_offset, waiting_stride, waiting_bytes;
    size_t page_bytes; // 64 tokens of every full-attention layer
} eng_model;

// Builds the table. Takes the contents of *config (cleared), also on failure.
ENG_CHECKED eng_status eng_model_create(eng_config *config, eng_model **out, eng_error *error);
void eng_model_free(eng_model *model);
// Lays the states out anew; before anything is made of the model.
void eng_model_store_states(eng_model *model, kern_storage storage);
int32_t eng_model_find(const eng_model *model, const char *name); // tensor index; -1: none
// The last place of weights->param, behind tensors and constants.
static inline int32_t eng_model_lent(const eng_model *model) {
    return model->tensors + model->constants;
}
// Where in a slot the list of those that wait for the loop, from 1 on, lies: their streams, or what went into the
// first.
size_t eng_model_waiting(const eng_model *model, int32_t loop, bool start);
// Multiplications and additions a generated token costs at `position` earlier tokens with `cg_steps` a solve.
double eng_model_flops(const eng_model *model, double position, double cg_steps);
// How often a layer runs: 1, or the loops; and the blocks that a token goes through.
int32_t eng_model_levels(const eng_model *model, int32_t layer);
int32_t eng_config_depth(const eng_config *config);
// Whether the model ends with its loop, so that each loop has an output to read.
bool eng_model_reads_loops(const eng_model *model);
// Whether any layer keeps KV pages (full attention), has a Mesa core.
bool eng_model_has_pages(const eng_model *model);
bool eng_model_has_mesa(const eng_model *model);
// max_cg_step_training of the first Mesa layer; 0 without one.
int32_t eng_model_training_steps(const eng_model *model);

#endif
