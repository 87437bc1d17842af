// SPDX-License-Identifier: Apache-2.0
// attention, backward, for rows without earlier positions. With p_tj = e^(scale q_t . k_j - lse_t) and dp_tj = do_t .
// v_j:
//   ds_tj = scale p_tj (dp_tj - do_t . o_t);   dq_t = sum_j ds_tj k_j;   dk_j = sum_t ds_tj q_t;   dv_j = sum_t p_tj
//   do_t.
//
// A task is a row and a kv head. Inside a document it takes blocks of 64 keys and, for each, the blocks of 64 tokens
// and the heads of the group that see them, in ascending order: dk and dv of the block are summed in the workspace, dq
// in its place. Scores are made again from lse; nothing quadratic is stored.
#include "kernels/cpu/isa/gemm.h"

enum { BLOCK = 64 };

typedef struct task {
    const kern_attention_backward_args *a;
    int kv_head, width;
    int64_t q_stride, kv_stride; // floats from token to token
    float *p, *ds;               // (BLOCK tokens, BLOCK keys)
    float *key, *value;          // (width, BLOCK), transposed
    float *dk, *dv;              // (BLOCK, width)
} task;

static size_t task_bytes(const kern_attention *s) {
    return 2 * kern_align64(BLOCK * BLOCK * sizeof(float)) +
           4 * kern_align64((size_t)BLOCK * s->head_width * sizeof(float));
}

static task task_in(const kern_cpu *cpu, const kern_attention_backward_args *a) {
    const kern_attention *s = &a->attention;
    task t = {.a = a, .width = s->head_width};
    t.q_stride = (int64_t)s->heads * s->head_width;
    t.kv_stride = (int64_t)s->kv_heads * s->head_width;
    char *memory = kern_cpu_workspace(cpu, kern_team_thread());
    const size_t scores = kern_align64(BLOCK * BLOCK * sizeof(float));
    const size_t vectors = kern_align64((size_t)BLOCK * s->head_width * sizeof(float));
    t.p = (float *)memory;
    t.ds = (float *)(memory + scores);
    memory += 2 * scores;
    t.key = (float *)memory;
    t.value = (float *)(memory + vectors);
    t.dk = (float *)(memory + 2 * vectors);
    t.dv = (float *)(memory + 3 * vectors);
    return t;
}

static inline float dot(const float *x, const float *y, int width) {
    vf sum = {0};
    int c = 0;
    for (; c + KERN_VL <= width; c += KERN_VL)
        sum += vf_load(x + c) * vf_load(y + c);
    if (c < width)
        sum += vf_load_part(x + c, width - c) * vf_load_part(y + c, width - c);
    return vf_sum(sum);
}

// p and ds (BLOCK each) from scores and dp, for the keys [low, high]; 0 elsewhere.
static void score_gradient(float *p, float *ds, int low, int high, float scale, float lse, float delta) {
    vi lane;
    for (int i = 0; i < KERN_VL; i++)
        lane[i] = i;
    for (int j = 0; j < BLOCK; j += KERN_VL) {
        const vi seen = (lane + j >= low) & (lane + j <= high);
        const vf probability = vf_select(seen, vf_exp(vf_load(p + j) * scale - lse), (vf){0});
        const vf gradient = probability * (vf_load(ds + j) - delta) * scale;
        vf_store(p + j, probability);
        vf_store(ds + j, vf_select(seen, gradient, (vf){0}));
    }
}

// One head of the group: `tokens` tokens from `token` on against the block of `keys` keys from key_token on.
static void visit_block(const task *t, int head, int32_t token, int tokens, int32_t key_token, int keys) {
    const kern_attention_backward_args *a = t->a;
    const kern_attention *s = &a->attention;
    const int width = t->width;
    const int64_t at = token * t->q_stride + (int64_t)head * width;
    const float *k = a->k.f + key_token * t->kv_stride + (int64_t)t->kv_head * width;
    gemm_nn(tokens, BLOCK, width, a->q.f + at, t->q_stride, t->key, BLOCK, t->p, BLOCK, 0);
    gemm_nn(tokens, BLOCK, width, a->d_o.f + at, t->q_stride, t->value, BLOCK, t->ds, BLOCK, 0);
    for (int i = 0; i < tokens; i++) {
        const int own = token + i - key_token; // among the block's keys
        const int low = s->window > 0 && own >= s->window ? own - s->window + 1 : 0;
        const int high = own < keys - 1 ? own : keys - 1;
        const int64_t row = at + i * t->q_stride;
        score_gradient(t->p + i * BLOCK, t->ds + i * BLOCK, low, high, s->scale,
                       a->lse.f[(int64_t)(token + i) * s->heads + head], dot(a->d_o.f + row, a->o.f + row, width));
    }
    gemm_tn(keys, width, tokens, t->p, BLOCK, a->d_o.f + at, t->q_stride, t->dv, width, 1);
    gemm_tn(keys, width, tokens, t->ds, BLOCK, a->q.f + at, t->q_stride, t->dk, width, 1);
    gemm_nn(tokens, width, keys, t->ds, BLOCK, k, t->kv_stride, a->dq.f + at, t->q_stride, 1);
}

// The keys [key_token, key_token + keys) of the document that ends before token `end`.
static void run_key_block(const task *t, int32_t key_token, int keys, int32_t end) {
    const kern_attention_backward_args *a = t->a;
    const kern_attention *s = &a->attention;
    const int width = t->width, group = s->heads / s->kv_heads;
    const int64_t at = key_token * t->kv_stride + (int64_t)t->kv_head * width;
    gemm_transpose(keys, width, a->k.f + at, t->kv_stride, t->key, BLOCK);
    gemm_transpose(keys, width, a->v.f + at, t->kv_stride, t->value, BLOCK);
    memset(t->dk, 0, (size_t)keys * width * sizeof(float));
    memset(t->dv, 0, (size_t)keys * width * sizeof(float));
    if (s->window > 0 && end - key_token > keys - 1 + s->window)
        end = key_token + keys - 1 + s->window;
    for (int32_t token = key_token; token < end; token += BLOCK)
        for (int g = 0; g < group; g++)
            visit_block(t, t->kv_head * group + g, token, end - token < BLOCK ? end - token : BLOCK, key_token, keys);
    for (int j = 0; j < keys; j++) {
        memcpy(a->dk.f + at + j * t->kv_stride, t->dk + (int64_t)j * width, (size_t)width * sizeof(float));
        memcpy(a->dv.f + at + j * t->kv_stride, t->dv + (int64_t)j * width, (size_t)width * sizeof(float));
    }
}

static void run_row(const task *t, const kern_rows *rows, const kern_row *row) {
    const int group = t->a->attention.heads / t->a->attention.kv_heads;
    const int32_t row_end = row->token0 + row->length;
    for (int32_t token = row->token0; token < row_end; token++)
        memset(t->a->dq.f + token * t->q_stride + (int64_t)t->kv_head * group * t->width, 0,
               (size_t)group * t->width * sizeof(float));
    memset(t->key, 0, (size_t)t->width * BLOCK * sizeof(float));
    memset(t->value, 0, (size_t)t->width * BLOCK * sizeof(float));
    for (int32_t start = row->token0; start < row_end;) {
        int32_t end = start + 1;
        while (end < row_end && rows->token_start[end] == start)
            end++;
        for (int32_t key = start; key < end; key += BLOCK)
            run_key_block(t, key, end - key < BLOCK ? end - key : BLOCK, end);
        start = end;
    }
}

KERN_PREPARE(attention_backward, kern_attention_backward_args) {
    (void)cpu;
    const kern_attention *s = &a->attention;
    if (s->heads < 1 || s->kv_heads < 1 || s->heads % s->kv_heads != 0 || s->head_width < 1 || s->window < 0 ||
        !isfinite(s->scale))
        return KERN_INVALID;
    if (!a->q.ref || !a->k.ref || !a->v.ref || !a->o.ref || !a->lse.ref || !a->d_o.ref || !a->dq.ref || !a->dk.ref ||
        !a->dv.ref)
        return KERN_INVALID;
    *thread_bytes = task_bytes(s);
    return KERN_OK;
}

KERN_RUN(attention_backward, kern_attention_backward_args) {
    const kern_attention *s = &a->attention;
    double pairs = 0;
    for (int32_t r = 0; r < rows->n_rows; r++) {
        if (rows->row[r].slot != -1 || rows->row[r].page0 != -1)
            return KERN_UNSUPPORTED;
        pairs += (double)rows->row[r].length * rows->row[r].length;
    }
#pragma omp parallel if (kern_worth_team(5.0 * pairs * s->heads * s->head_width))
    {
        task t = task_in(cpu, a);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < (int64_t)rows->n_rows * s->kv_heads; i++) {
            t.kv_head = (int)(i % s->kv_heads);
            run_row(&t, rows, &rows->row[i / s->kv_heads]);
        }
    }
    return KERN_OK;
}
