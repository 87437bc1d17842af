// SPDX-License-Identifier: Apache-2.0
// The output head: logits of wanted tokens, and the cross entropy of many with its backward.
//
// Logits:  l = cap(W x), cap(l) = c tanh(l / c), by the row kernel for every token, so that a token's logits have the
// same bits whether it was a prompt's last or a generated one and whoever else is in the batch.
//
// Loss. With p = softmax(l): loss = log sum e^l - l[target];  dl = weight (p - onehot) (1 - (l / c)^2);  dx =
// dl W; dW += dl^T x. With a teacher's logits l', q = softmax(l / T), q' likewise and d = log q' - log q: divergence =
// T^2 sum q' (d + e^-d - 1), which is the usual sum q' d in terms that are never negative and in which an error of the
// normalisers cancels; dl = weight (loss_share (p - onehot) + divergence_share T (q - q')) (1 - (l / c)^2). The tokens
// that have a target are gathered into tiles; a tile's logits (tokens, vocabulary) are one product a slice of the
// vocabulary, turned into dl in place, and read twice more. Sums over a token's vocabulary are made in blocks of 1024
// (lanes in float32, blocks in double); dW is added tile after tile; tasks are slices of the output.
#include "kernels/arguments.h"
#include "kernels/cpu/isa/elementwise.h"
#include "kernels/cpu/isa/linear_rows.h"
#include "kernels/cpu/isa/products.h"
#include "kernels/cpu/isa/quant.h"

enum {
    SUM_BLOCK = 1024,
    DX_COLS = 96, // columns of dx of one task: its sum runs over the whole vocabulary
};

// ---------------------------------------------------------------------------------------------------- scalar functions

// Series below 0.3, where 1 - 2 / (1 + e^2z) would cancel.
static inline vf vf_tanh(vf z) {
    vf magnitude = vf_max(z, -z), square = z * z;
    vf large = 1.0f - 2.0f / (1.0f + vf_exp(magnitude + magnitude));
    vf series = square * -8.8632355e-3f + 2.1869488e-2f;
    series = series * square - 5.3968254e-2f;
    series = series * square + 1.3333333e-1f;
    series = series * square - 3.3333333e-1f;
    series = series * square * z + z;
    return vf_select(magnitude < 0.3f, series, vf_select(z < 0.0f, -large, large));
}

static void cap_logits(float *logits, int64_t count, float cap) {
    const vf scale = vf_set(1.0f / cap);
    int64_t i = 0;
    for (; i + KERN_VL <= count; i += KERN_VL)
        vf_store(logits + i, vf_tanh(vf_load(logits + i) * scale) * cap);
    int rest = (int)(count - i);
    if (rest > 0)
        vf_store_part(logits + i, vf_tanh(vf_load_part(logits + i, rest) * scale) * cap, rest);
}

// x - x is 0 for finite x and NaN otherwise.
static int all_finite(const float *x, int64_t count) {
    vf sum = {0};
    int64_t i = 0;
    for (; i + KERN_VL <= count; i += KERN_VL)
        sum += vf_load(x + i) - vf_load(x + i);
    int rest = (int)(count - i);
    if (rest > 0)
        sum += vf_load_part(x + i, rest) - vf_load_part(x + i, rest);
    return vf_sum(sum) == 0.0f;
}

static float largest(const float *x, int64_t count) {
    vf top = vf_set(-INFINITY);
    int64_t i = 0;
    for (; i + KERN_VL <= count; i += KERN_VL)
        top = vf_max(top, vf_load(x + i));
    float best = vf_largest(top);
    for (; i < count; i++)
        best = x[i] > best ? x[i] : best;
    return best;
}

// The first place that holds `value`; -1: none does.
static int32_t first_of(const float *x, int32_t count, float value) {
    for (int32_t i = 0; i < count; i++)
        if (x[i] == value)
            return i;
    return -1;
}

// sum_i e^((x_i - top) inverse), inverse that of a temperature
static double sum_of_exponentials(const float *x, int64_t count, float top, float inverse) {
    double total = 0;
    for (int64_t block = 0; block < count; block += SUM_BLOCK) {
        int64_t end = block + SUM_BLOCK < count ? block + SUM_BLOCK : count, i = block;
        vf sum = {0};
        for (; i + KERN_VL <= end; i += KERN_VL)
            sum += vf_exp((vf_load(x + i) - top) * inverse);
        double rest = 0;
        for (; i < end; i++)
            rest += (double)expf((x[i] - top) * inverse);
        total += (double)vf_sum(sum) + rest;
    }
    return total;
}

// x_i = e^(x_i - top) scale (1 - (x_i / cap)^2); inverse_cap 0: no cap.
static inline vf logit_gradient(vf x, float top, float scale, float inverse_cap) {
    vf capped = x * inverse_cap;
    return vf_exp(x - top) * scale * (1.0f - capped * capped);
}

static void logits_to_gradient(float *x, int64_t count, float top, float scale, float inverse_cap) {
    int64_t i = 0;
    for (; i + KERN_VL <= count; i += KERN_VL)
        vf_store(x + i, logit_gradient(vf_load(x + i), top, scale, inverse_cap));
    int rest = (int)(count - i);
    if (rest > 0)
        vf_store_part(x + i, logit_gradient(vf_load_part(x + i, rest), top, scale, inverse_cap), rest);
}

// ------------------------------------------------------------------------------------------------------------- teacher

// How a token's logits and its teacher's become their divergence, and the former the gradient of both losses.
typedef struct distillation {
    float top, teacher_top;     // largest logits
    float inverse;              // 1 / temperature
    float scale, teacher_scale; // of e^((l - top) / temperature), for a probability
    float shift;                // of the difference of exponents, for that of the probabilities' logarithms
    float weight, pull;         // of e^(l - top) and of q - q' in the gradient
    float inverse_cap;
    bool gradient;
} distillation;

// q' (d + e^-d - 1); near 0 by its series, elsewhere with q = q' e^-d.
static inline vf divergence_of(vf q, vf teacher, vf d) {
    vf series = d * (-1.0f / 5040) + 1.0f / 720;
    series = series * d - 1.0f / 120;
    series = series * d + 1.0f / 24;
    series = series * d - 1.0f / 6;
    series = series * d + 0.5f;
    return vf_select(vf_max(d, -d) < 0.5f, teacher * (series * d * d), teacher * (d - 1.0f) + q);
}

static double distil(const distillation *by, float *logits, const float *teacher, int64_t count) {
    double total = 0;
    for (int64_t block = 0; block < count; block += SUM_BLOCK) {
        const int64_t end = block + SUM_BLOCK < count ? block + SUM_BLOCK : count;
        vf sum = {0};
        for (int64_t i = block; i < end; i += KERN_VL) {
            const vf x = vf_load_upto(logits + i, end - i), y = vf_load_upto(teacher + i, end - i);
            const vf own = (x - by->top) * by->inverse, other = (y - by->teacher_top) * by->inverse;
            const vf q = vf_exp(own) * by->scale, wanted = vf_exp(other) * by->teacher_scale,
                     capped = x * by->inverse_cap;
            sum += vf_keep(divergence_of(q, wanted, other - own - by->shift), end - i);
            if (by->gradient)
                vf_store_upto(logits + i,
                              (vf_exp(x - by->top) * by->weight + (q - wanted) * by->pull) * (1.0f - capped * capped),
                              end - i);
        }
        total += (double)vf_sum(sum);
    }
    return total;
}

// -------------------------------------------------------------------------------------------------------------- logits

KERN_PREPARE(head_logits, kern_head_logits_args) {
    (void)cpu;
    if (a->width < 1 || a->vocabulary < 1 || !(a->soft_cap >= 0) || !a->x.ref || !a->weight.ref || !a->logits.ref)
        return KERN_INVALID;
    *thread_bytes = KERN_NAME(quant_bytes)(a->width);
    return KERN_OK;
}

// Of one row: whether its logits are finite, and their cap.
static void finish_logits(const void *context, int64_t i) {
    const kern_head_logits_args *a = context;
    float *logits = a->logits.f + i * a->vocabulary;
    if (a->finite.i)
        a->finite.i[i] = all_finite(logits, a->vocabulary);
    if (a->soft_cap > 0)
        cap_logits(logits, a->vocabulary, a->soft_cap);
}

KERN_RUN(head_logits, kern_head_logits_args) {
    const kern_weight *w = a->weight.w;
    if (w->rows != a->vocabulary || w->cols != a->width)
        return KERN_INVALID;
    const kern_linear_rows job = {.weight = w,
                                  .x = a->x.f,
                                  .token = rows->logits_token,
                                  .y = a->logits.f,
                                  .rows = w->rows,
                                  .tokens = rows->n_logits};
    if (kern_is_quantised(w))
        KERN_NAME(quant_rows)(cpu, &job, 1, kern_cpu_workspace(cpu, 0));
    else
        KERN_NAME(linear_rows)(cpu, &job, 1);
    if (a->finite.i || a->soft_cap > 0)
        kern_share(cpu, finish_logits, a, rows->n_logits, 4.0 * rows->n_logits * a->vocabulary);
    return KERN_OK;
}

// ---------------------------------------------------------------------------------------------------------------- loss

// A tile: the tokens that have a target, gathered. The arrays lie in the first thread's workspace and are shared.
typedef struct tile {
    const kern_head_loss_args *a;
    const kern_rows *rows;
    int32_t *token;   // (tile_tokens) batch index
    float *x, *dx;    // (tile_tokens, width)
    float *teacher_x; // (tile_tokens, teacher_width)
    int32_t tokens;
} tile;

static size_t tile_bytes(const kern_head_loss_args *a, int32_t width) {
    return kern_align64((size_t)a->tile_tokens * width * sizeof(float));
}

static size_t shared_bytes(const kern_head_loss_args *a) {
    return kern_align64((size_t)a->tile_tokens * sizeof(int32_t)) + tile_bytes(a, a->width) * (a->dx.ref ? 2 : 1) +
           (a->teacher_x.ref ? tile_bytes(a, a->teacher_width) : 0);
}

static tile tile_in(const kern_cpu *cpu, const kern_rows *rows, const kern_head_loss_args *a) {
    char *memory = kern_cpu_workspace(cpu, 0);
    tile t = {.a = a, .rows = rows, .token = (int32_t *)memory};
    memory += kern_align64((size_t)a->tile_tokens * sizeof(int32_t));
    t.x = (float *)memory;
    memory += tile_bytes(a, a->width);
    t.dx = (float *)memory;
    memory += a->dx.f ? tile_bytes(a, a->width) : 0;
    t.teacher_x = (float *)memory;
    return t;
}

static void gather(float *to, int32_t index, const float *from, int32_t token, int32_t width) {
    memcpy(to + (int64_t)index * width, from + (int64_t)token * width, (size_t)width * sizeof(float));
}

// Takes the next tokens with a target from *next on.
static void fill_tile(tile *t, int32_t *next) {
    const kern_head_loss_args *a = t->a;
    t->tokens = 0;
    for (; *next < t->rows->n_tokens && t->tokens < t->a->tile_tokens; ++*next) {
        if (t->rows->target[*next] < 0)
            continue;
        gather(t->x, t->tokens, a->x.f, *next, a->width);
        if (a->teacher_x.f)
            gather(t->teacher_x, t->tokens, a->teacher_x.f, *next, a->teacher_width);
        t->token[t->tokens++] = *next;
    }
}

// The products that make a tile's logits, and its teacher's.
enum { MOST_PRODUCTS = 2 };
static int tile_products(const tile *t, kern_linear_rows product[MOST_PRODUCTS]) {
    const kern_head_loss_args *a = t->a;
    product[0] = (kern_linear_rows){
        .weight = a->weight.w, .x = t->x, .y = a->tile.f, .rows = a->vocabulary, .tokens = t->tokens};
    product[1] = (kern_linear_rows){.weight = a->teacher_weight.w,
                                    .x = t->teacher_x,
                                    .y = a->teacher_tile.f,
                                    .rows = a->vocabulary,
                                    .tokens = t->tokens};
    return a->teacher_x.f ? 2 : 1;
}

// One slice of the vocabulary. widened: room for a bf16 slice as floats.
static void product_slice(const kern_linear_rows *product, int64_t id0, float *widened, int *failed) {
    const kern_weight *w = product->weight;
    const int64_t width = w->cols, vocabulary = product->rows;
    const int64_t ids = vocabulary - id0 < KERN_SLICE ? vocabulary - id0 : KERN_SLICE;
    const float *weight = (const float *)w->data + (w->dtype == KERN_F32 ? id0 * width : 0);
    if (w->dtype == KERN_BF16) {
        vf_widen((const uint16_t *)w->data + id0 * width, widened, ids * width);
        weight = widened;
    }
    kern_product('n', 't', product->tokens, ids, width, product->x, width, weight, width, 0, product->y + id0,
                 vocabulary, failed);
}

// A token whose logits, the largest of them and the sum of e^(l - top) are known: its divergence and, with `weight` the
// token's, the gradient of both losses but for the target's part of the one.
static void token_divergence(const tile *t, int32_t index, float top, double sum, float weight) {
    const kern_head_loss_args *a = t->a;
    const int64_t vocabulary = a->vocabulary;
    float *logits = a->tile.f + index * vocabulary, *teacher = a->teacher_tile.f + index * vocabulary;
    if (a->teacher_soft_cap > 0)
        cap_logits(teacher, vocabulary, a->teacher_soft_cap);
    const float inverse = 1.0f / a->temperature, teacher_top = largest(teacher, vocabulary);
    const double own = a->temperature == 1 ? sum : sum_of_exponentials(logits, vocabulary, top, inverse);
    const double other = sum_of_exponentials(teacher, vocabulary, teacher_top, inverse);
    const distillation by = {.top = top,
                             .teacher_top = teacher_top,
                             .inverse = inverse,
                             .scale = (float)(1 / own),
                             .teacher_scale = (float)(1 / other),
                             .shift = (float)(log(other) - log(own)),
                             .weight = (float)((double)weight * (double)a->loss_share / sum),
                             .pull = weight * a->divergence_share * a->temperature,
                             .inverse_cap = a->soft_cap > 0 ? 1.0f / a->soft_cap : 0.0f,
                             .gradient = a->dx.f != NULL};
    const double total = distil(&by, logits, teacher, vocabulary);
    a->divergence.f[t->token[index]] = (float)((double)a->temperature * (double)a->temperature * total);
}

static float token_weight(const tile *t, int32_t token) {
    const float factor = t->a->factor.f ? t->a->factor.f[token] : 1.0f, scale = t->a->scale == 0 ? 1.0f : t->a->scale;
    return t->rows->target_weight[token] * factor * scale;
}

// One token's losses; its logits become their gradient when that is wanted.
static void token_loss(const tile *t, int32_t index) {
    const kern_head_loss_args *a = t->a;
    const int64_t vocabulary = a->vocabulary;
    const int32_t token = t->token[index], target = t->rows->target[token];
    float *logits = a->tile.f + index * vocabulary;
    if (a->soft_cap > 0)
        cap_logits(logits, vocabulary, a->soft_cap);
    const float top = largest(logits, vocabulary), wanted = logits[target];
    const double sum = sum_of_exponentials(logits, vocabulary, top, 1.0f);
    a->loss.f[token] = (float)(log(sum) + (double)top - (double)wanted);
    if (a->best.i)
        a->best.i[token] = first_of(logits, a->vocabulary, top);
    const float weight = token_weight(t, token), inverse_cap = a->soft_cap > 0 ? 1.0f / a->soft_cap : 0.0f;
    if (a->teacher_x.f)
        token_divergence(t, index, top, sum, weight);
    else if (a->dx.f)
        logits_to_gradient(logits, vocabulary, top, (float)((double)weight / sum), inverse_cap);
    if (!a->dx.f)
        return;
    const float capped = wanted * inverse_cap, share = a->teacher_x.f ? a->loss_share : 1.0f;
    logits[target] -= weight * share * (1.0f - capped * capped);
}

static void tile_weight_gradient(const tile *t, int64_t id0, int *failed) {
    const int64_t width = t->a->width, vocabulary = t->a->vocabulary;
    const int64_t ids = vocabulary - id0 < KERN_SLICE ? vocabulary - id0 : KERN_SLICE;
    kern_product('t', 'n', ids, width, t->tokens, t->a->tile.f + id0, vocabulary, t->x, width, 1.0f,
                 t->a->grad_weight.f + id0 * width, width, failed);
}

static void tile_input_gradient(const tile *t, int64_t col0, int *failed) {
    const int64_t width = t->a->width, vocabulary = t->a->vocabulary;
    const int64_t cols = width - col0 < DX_COLS ? width - col0 : DX_COLS;
    kern_product('n', 'n', t->tokens, cols, vocabulary, t->a->tile.f, vocabulary,
                 (const float *)t->a->weight.w->data + col0, width, 0, t->dx + col0, width, failed);
    for (int32_t i = 0; i < t->tokens; i++)
        memcpy(t->a->dx.f + t->token[i] * width + col0, t->dx + i * width + col0, (size_t)cols * sizeof(float));
}

// widened0: offset of the widened slice in each thread's workspace; in the first one's, of a quantised product's
// memory.
static void run_tile(const kern_cpu *cpu, const tile *t, size_t widened0, int *failed) {
    const kern_head_loss_args *a = t->a;
    kern_linear_rows product[MOST_PRODUCTS];
    const int products = tile_products(t, product);
    const int64_t slices = (a->vocabulary + KERN_SLICE - 1) / KERN_SLICE;
    const int64_t dx_tasks = a->dx.f ? (a->width + DX_COLS - 1) / DX_COLS : 0;
    const int64_t grad_tasks = a->dx.f && a->grad_weight.f ? slices : 0;
    for (int i = 0; i < products; i++)
        if (kern_is_quantised(product[i].weight))
            KERN_NAME(quant_rows)(cpu, &product[i], 1, (char *)kern_cpu_workspace(cpu, 0) + widened0);
#pragma omp parallel if (kern_worth_team(2.0 * t->tokens * a->vocabulary * a->width))
    {
        kern_products_begin();
        float *widened = (float *)((char *)kern_cpu_workspace(cpu, kern_team_thread()) + widened0);
#pragma omp for schedule(static)
        for (int64_t slice = 0; slice < products * slices; slice++)
            if (!kern_is_quantised(product[slice / slices].weight))
                product_slice(&product[slice / slices], slice % slices * KERN_SLICE, widened, failed);
#pragma omp for schedule(static)
        for (int32_t index = 0; index < t->tokens; index++)
            token_loss(t, index);
#pragma omp for schedule(dynamic) nowait // few tasks: the other threads go on
        for (int64_t task = 0; task < dx_tasks; task++)
            tile_input_gradient(t, task * DX_COLS, failed);
#pragma omp for schedule(dynamic) nowait
        for (int64_t task = 0; task < grad_tasks; task++)
            tile_weight_gradient(t, task * KERN_SLICE, failed);
    }
}

KERN_PREPARE(head_loss, kern_head_loss_args) {
    (void)cpu;
    const kern_status status = kern_head_loss_check(a);
    if (status)
        return status;
    const int32_t width = a->teacher_x.ref && a->teacher_width > a->width ? a->teacher_width : a->width;
    const size_t floats = kern_align64((size_t)KERN_SLICE * width * sizeof(float));
    const size_t codes = KERN_NAME(quant_bytes)(width);
    *thread_bytes = shared_bytes(a) + (floats > codes ? floats : codes);
    return KERN_OK;
}

KERN_RUN(head_loss, kern_head_loss_args) {
    const kern_weight *w = a->weight.w, *teacher = a->teacher_weight.w;
    if (w->rows != a->vocabulary || w->cols != a->width)
        return KERN_INVALID;
    if (teacher && (teacher->rows != a->vocabulary || teacher->cols != a->teacher_width))
        return KERN_INVALID;
    if (w->dtype != KERN_F32 && a->dx.f)
        return KERN_UNSUPPORTED;
    for (int32_t t = 0; t < rows->n_tokens; t++) {
        if (rows->target[t] >= a->vocabulary)
            return KERN_INVALID;
        if (rows->target[t] >= 0)
            continue;
        a->loss.f[t] = 0;
        if (a->best.i)
            a->best.i[t] = -1;
        if (a->divergence.f)
            a->divergence.f[t] = 0;
        if (a->dx.f)
            memset(a->dx.f + (int64_t)t * a->width, 0, (size_t)a->width * sizeof(float));
    }
    tile t = tile_in(cpu, rows, a);
    int failed = 0;
    for (int32_t next = 0; next < rows->n_tokens && !failed;) {
        fill_tile(&t, &next);
        if (t.tokens > 0)
            run_tile(cpu, &t, shared_bytes(a), &failed);
    }
    return failed ? KERN_NO_MEMORY : KERN_OK;
}
