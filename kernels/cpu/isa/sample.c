// SPDX-License-Identifier: Apache-2.0
// sample: edits, temperature, top_k, top_p, min_p, draw, logprobs; one task a row of logits.
//
// With l the edited logits and m their maximum, every id has the mass w = e^((l - m) / temperature) (float32; sums in
// double). Each truncation sets masses to 0: top_k and top_p keep a prefix of the order (l descending, id ascending),
// min_p keeps w >= min_p. The prefix is found without a sort, by three rounds of counting in buckets of the bits of l,
// each round inside the bucket where the sum (of ones or of masses) crosses its target. The draw inverts the cumulated
// mass, ids ascending, at a Philox uniform of (seed; position, choice): neither the row's place nor its neighbours
// enter.
//
// Logits that are not finite count as banned. If nothing is left, the highest finite unedited logit is taken, if none,
// 0. The likeliest ids are found in one pass that looks closer only at blocks with a logit above the worst one kept.
#include <float.h>

#include "kernels/cpu/isa/isa.h"
#include "kernels/philox.h"

enum {
    BUCKETS = 2048,
    DRAW_BLOCK = 256,
    TOP_BLOCK = 64,
};

// One thread's workspace, for one row at a time.
typedef struct scratch {
    float *logit;       // (vocabulary) edited; -INFINITY: banned
    float *mass;        // (vocabulary)
    int32_t *candidate; // (vocabulary)
    double *block;      // (blocks of DRAW_BLOCK)
    double *bucket;     // (BUCKETS)
} scratch;

static size_t array_bytes(int32_t count, size_t size) {
    return kern_align64((size_t)count * size);
}

static int32_t block_count(int32_t vocabulary) {
    return (vocabulary + DRAW_BLOCK - 1) / DRAW_BLOCK;
}

static size_t scratch_bytes(int32_t vocabulary) {
    return 3 * array_bytes(vocabulary, sizeof(float)) + array_bytes(block_count(vocabulary), sizeof(double)) +
           array_bytes(BUCKETS, sizeof(double));
}

static scratch scratch_of(const kern_cpu *cpu, int32_t vocabulary) {
    const size_t floats = array_bytes(vocabulary, sizeof(float));
    char *memory = kern_cpu_workspace(cpu, kern_team_thread());
    scratch s = {.logit = (float *)memory,
                 .mass = (float *)(memory + floats),
                 .candidate = (int32_t *)(memory + 2 * floats),
                 .bucket = (double *)(memory + 3 * floats)};
    s.block = s.bucket + BUCKETS;
    return s;
}

// ------------------------------------------------------------------------------------------------ passes over logits

static inline vf finite_or_banned(vf x) {
    return vf_select(x - x == 0.0f, x, vf_set(-INFINITY)); // x - x is NaN for infinities and NaN
}

static inline float finite_or_banned_1(float x) {
    return x - x == 0.0f ? x : -INFINITY;
}

// The largest finite logit, -INFINITY if there is none.
static float largest_finite(const float *x, int32_t count) {
    vf top = vf_set(-INFINITY);
    int32_t i = 0;
    for (; i + KERN_VL <= count; i += KERN_VL)
        top = vf_max(top, finite_or_banned(vf_load(x + i)));
    float best = vf_largest(top);
    for (; i < count; i++)
        best = finite_or_banned_1(x[i]) > best ? x[i] : best;
    return best;
}

static int32_t first_equal(const float *x, int32_t count, float value) {
    for (int32_t i = 0; i < count; i++)
        if (x[i] == value)
            return i;
    return 0;
}

// mass = e^((logit - top) / temperature), 0 where banned.
static void masses(const float *logit, float *mass, int32_t count, float top, float temperature) {
    int32_t i = 0;
    for (; i + KERN_VL <= count; i += KERN_VL)
        vf_store(mass + i, vf_exp((finite_or_banned(vf_load(logit + i)) - top) / temperature));
    int rest = (int)(count - i);
    if (rest > 0)
        vf_store_part(mass + i, vf_exp((finite_or_banned(vf_load_part(logit + i, rest)) - top) / temperature), rest);
}

static double sum_of(const float *x, int32_t count) {
    double sum[8] = {0};
    int32_t i = 0;
    for (; i + 8 <= count; i += 8)
        for (int j = 0; j < 8; j++)
            sum[j] += (double)x[i + j];
    for (int j = 0; i < count; i++, j++)
        sum[j] += (double)x[i];
    return ((sum[0] + sum[4]) + (sum[2] + sum[6])) + ((sum[1] + sum[5]) + (sum[3] + sum[7]));
}

// Of all logits: the largest and the logarithm of the sum of e^(l - largest).
typedef struct normalizer {
    double largest, log_sum;
} normalizer;

static normalizer normalize(const float *logits, float *mass, int32_t vocabulary) {
    const float top = largest_finite(logits, vocabulary);
    masses(logits, mass, vocabulary, top, 1.0f);
    return (normalizer){(double)top, log(sum_of(mass, vocabulary))};
}

static float log_probability(normalizer n, float logit) {
    return finite_or_banned_1(logit) > -INFINITY ? (float)((double)logit - n.largest - n.log_sum) : -INFINITY;
}

// --------------------------------------------------------------------------------------------------------- likeliest

// Finite logits in order of (value descending, id ascending).
typedef struct ranking {
    float value[KERN_MAX_TOP];
    int32_t id[KERN_MAX_TOP];
    int32_t count, capacity;
    float worst; // a value must be above it to enter
} ranking;

static void enter(ranking *r, float value, int32_t id) {
    int32_t place = r->count < r->capacity ? r->count++ : r->count - 1;
    for (; place > 0 && value > r->value[place - 1]; place--) {
        r->value[place] = r->value[place - 1];
        r->id[place] = r->id[place - 1];
    }
    r->value[place] = value;
    r->id[place] = id;
    if (r->count == r->capacity)
        r->worst = r->value[r->count - 1];
}

static ranking rank(const float *logits, int32_t vocabulary, int32_t capacity) {
    ranking r = {.capacity = capacity, .worst = -INFINITY};
    for (int32_t begin = 0; begin < vocabulary; begin += TOP_BLOCK) {
        const int32_t count = vocabulary - begin < TOP_BLOCK ? vocabulary - begin : TOP_BLOCK;
        if (!(largest_finite(logits + begin, count) > r.worst))
            continue;
        for (int32_t id = begin; id < begin + count; id++)
            if (finite_or_banned_1(logits[id]) > r.worst)
                enter(&r, logits[id], id);
    }
    return r;
}

static void write_top(const float *logits, int32_t vocabulary, int32_t top, normalizer n, int32_t *id, float *logprob) {
    const ranking r = rank(logits, vocabulary, top);
    for (int32_t i = 0; i < top; i++) {
        id[i] = i < r.count ? r.id[i] : -1;
        logprob[i] = i < r.count ? log_probability(n, r.value[i]) : -INFINITY;
    }
}

// ---------------------------------------------------------------------------------------------------------- truncation

// Bits that order as floats do; the two zeros are one.
static inline uint32_t order_of(float x) {
    const float no_negative_zero = x + 0.0f;
    uint32_t bits;
    memcpy(&bits, &no_negative_zero, sizeof bits);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

static inline float value_of(uint32_t order) {
    const uint32_t bits = order & 0x80000000u ? order ^ 0x80000000u : ~order;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// Number of candidates among which the prefix is sought, in ascending order: ids whose mass is at least `least`.
static int32_t gather_candidates(const scratch *s, int32_t vocabulary, float least) {
    int32_t count = 0;
    for (int32_t id = 0; id < vocabulary; id++) {
        s->candidate[count] = id;
        count += s->mass[id] >= least;
    }
    return count;
}

// Keeps the shortest prefix of (logit descending, id ascending) whose sum of masses reaches target, for which the ids
// with a mass of at least `least` > 0 suffice. The mass of all others becomes 0.
static void keep_prefix(const scratch *s, int32_t vocabulary, double target, float least) {
    static const struct { int shift, bits; } round[3] = {{21, 11}, {10, 11}, {0, 10}};
    int32_t candidates = gather_candidates(s, vocabulary, least);
    double above = 0; // of what lies above the buckets of this round
    uint32_t edge = 0;
    for (int r = 0; r < 3; r++) {
        const uint32_t mask = (1u << round[r].bits) - 1;
        memset(s->bucket, 0, BUCKETS * sizeof *s->bucket);
        for (int32_t c = 0; c < candidates; c++) {
            const int32_t id = s->candidate[c];
            s->bucket[order_of(s->logit[id]) >> round[r].shift & mask] += (double)s->mass[id];
        }
        uint32_t last = 0, crossing = mask;
        while (last < mask && s->bucket[last] == 0)
            last++;
        while (crossing > last && above + s->bucket[crossing] < target)
            above += s->bucket[crossing--];
        edge |= crossing << round[r].shift;
        int32_t kept = 0;
        for (int32_t c = 0; c < candidates; c++) {
            const int32_t id = s->candidate[c];
            s->candidate[kept] = id;
            kept += (order_of(s->logit[id]) >> round[r].shift & mask) == crossing;
        }
        candidates = kept;
    }
    int32_t last_id = -1; // of those that equal the edge
    for (int32_t c = 0; c < candidates && (c == 0 || above < target); c++) {
        last_id = s->candidate[c];
        above += (double)s->mass[last_id];
    }
    const float edge_value = value_of(edge);
    for (int32_t id = 0; id < vocabulary; id++) {
        const float l = s->logit[id];
        s->mass[id] = (l > edge_value) | ((l == edge_value) & (id <= last_id)) ? s->mass[id] : 0.0f;
    }
}

// Bans all but the k best. Most logits lie far below them: the bound is lowered until k or more lie above it.
static void keep_top_k(const scratch *s, int32_t vocabulary, int32_t k, float top) {
    int32_t above = 0;
    for (float margin = 4; above < k && above < vocabulary; margin *= 2) {
        const float bound = margin < 1e6f ? top - margin : -FLT_MAX; // in the end everything finite
        above = 0;
        for (int32_t id = 0; id < vocabulary; id++) {
            const int32_t candidate = (s->logit[id] >= bound) & (s->logit[id] <= top);
            s->mass[id] = (float)candidate;
            above += candidate;
        }
        if (bound == -FLT_MAX)
            break;
    }
    keep_prefix(s, vocabulary, k, 1);
    for (int32_t id = 0; id < vocabulary; id++)
        s->logit[id] = s->mass[id] > 0.0f ? s->logit[id] : -INFINITY;
}

// The ids below (1 - p) / vocabulary of the total hold less than 1 - p together, so that the prefix needs none of them;
// half of that allows for rounding.
static void keep_top_p(const scratch *s, int32_t vocabulary, float p) {
    const double total = sum_of(s->mass, vocabulary), spare = (1 - (double)p) * total / vocabulary;
    const float least = (float)(spare / 2);
    keep_prefix(s, vocabulary, (double)p * total, least > FLT_MIN ? least : FLT_MIN);
}

static void keep_at_least(float *mass, int32_t count, float least) {
    for (int32_t i = 0; i < count; i++)
        mass[i] = mass[i] >= least ? mass[i] : 0.0f;
}

// ---------------------------------------------------------------------------------------------------------------- draw

static int32_t draw(const scratch *s, int32_t vocabulary, double uniform) {
    const int32_t blocks = block_count(vocabulary);
    double total = 0;
    for (int32_t b = 0; b < blocks; b++) {
        const int32_t left = vocabulary - b * DRAW_BLOCK;
        s->block[b] = sum_of(s->mass + b * DRAW_BLOCK, left < DRAW_BLOCK ? left : DRAW_BLOCK);
        total += s->block[b];
    }
    const double target = uniform * total;
    double sum = 0;
    int32_t b = 0, chosen = 0;
    while (b < blocks - 1 && sum + s->block[b] <= target)
        sum += s->block[b++];
    // Rounding may leave the target a hair beyond the block: then its last id of positive mass, or the last before it.
    for (int32_t id = b * DRAW_BLOCK; id < vocabulary && id < (b + 1) * DRAW_BLOCK; id++) {
        if (!(s->mass[id] > 0.0f))
            continue;
        chosen = id;
        sum += (double)s->mass[id];
        if (sum > target)
            return id;
    }
    for (int32_t id = (b + 1) * DRAW_BLOCK - 1; id >= 0; id--)
        if (id < vocabulary && s->mass[id] > 0.0f)
            return id;
    return chosen;
}

static void edit_logits(const kern_rows *rows, const kern_sampler *sampler, float *logit) {
    for (int32_t e = sampler->edit0; e < sampler->edit0 + sampler->edits; e++) {
        const kern_logit_edit *edit = &rows->edit[e];
        const float l = logit[edit->id] + edit->bias;
        logit[edit->id] = (l > 0 ? l / edit->repetition : l * edit->repetition) - edit->penalty;
    }
}

static int32_t sample_row(const kern_rows *rows, const kern_sampler *sampler, const float *logits, int32_t vocabulary,
                          const scratch *s) {
    memcpy(s->logit, logits, (size_t)vocabulary * sizeof(float));
    edit_logits(rows, sampler, s->logit);
    const float top = largest_finite(s->logit, vocabulary);
    if (!(top > -INFINITY)) {
        const float best = largest_finite(logits, vocabulary);
        return best > -INFINITY ? first_equal(logits, vocabulary, best) : 0;
    }
    if (!(sampler->temperature > 0) || !(sampler->top_p > 0))
        return first_equal(s->logit, vocabulary, top);
    if (sampler->top_k > 0 && sampler->top_k < vocabulary)
        keep_top_k(s, vocabulary, sampler->top_k, top);
    masses(s->logit, s->mass, vocabulary, top, sampler->temperature);
    if (sampler->top_p < 1)
        keep_top_p(s, vocabulary, sampler->top_p);
    if (sampler->min_p > 0)
        keep_at_least(s->mass, vocabulary, sampler->min_p < 1 ? sampler->min_p : 1.0f);
    return draw(s, vocabulary, kern_philox_uniform(sampler->seed, sampler->position, sampler->choice, 0));
}

static void run_row(const kern_sample_args *a, const kern_rows *rows, int32_t i, const scratch *s) {
    const kern_sampler *sampler = &rows->sampler[i];
    const float *logits = a->logits.f + (int64_t)i * a->vocabulary;
    const int32_t id = sampler->forced >= 0 ? sampler->forced : sample_row(rows, sampler, logits, a->vocabulary, s);
    a->id.i[i] = id;
    if (!a->logprob.f && sampler->top == 0)
        return;
    const normalizer n = normalize(logits, s->mass, a->vocabulary);
    if (a->logprob.f)
        a->logprob.f[i] = log_probability(n, logits[id]);
    if (sampler->top > 0)
        write_top(logits, a->vocabulary, sampler->top, n, a->top_id.i + (int64_t)i * KERN_MAX_TOP,
                  a->top_logprob.f + (int64_t)i * KERN_MAX_TOP);
}

static bool sampler_fits(const kern_sample_args *a, const kern_rows *rows, const kern_sampler *sampler) {
    if (sampler->forced >= a->vocabulary || (sampler->top > 0 && !a->top_id.i))
        return false;
    for (int32_t e = 0; e < sampler->edits; e++)
        if (rows->edit[sampler->edit0 + e].id >= a->vocabulary)
            return false;
    return true;
}

KERN_PREPARE(sample, kern_sample_args) {
    (void)cpu;
    if (a->vocabulary < 1 || a->vocabulary > INT32_MAX - DRAW_BLOCK || !a->logits.ref || !a->id.ref ||
        !a->top_id.ref != !a->top_logprob.ref)
        return KERN_INVALID;
    *thread_bytes = scratch_bytes(a->vocabulary);
    return KERN_OK;
}

typedef struct launch {
    const kern_cpu *cpu;
    const kern_rows *rows;
    const kern_sample_args *a;
} launch;

static void run_item(const void *context, int64_t i) {
    const launch *l = context;
    const scratch s = scratch_of(l->cpu, l->a->vocabulary);
    run_row(l->a, l->rows, (int32_t)i, &s);
}

KERN_RUN(sample, kern_sample_args) {
    for (int32_t i = 0; i < rows->n_logits; i++)
        if (!sampler_fits(a, rows, &rows->sampler[i]))
            return KERN_INVALID;
    const launch l = {cpu, rows, a};
    kern_share(cpu, run_item, &l, rows->n_logits, 8.0 * rows->n_logits * a->vocabulary);
    return KERN_OK;
}
