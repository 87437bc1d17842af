// SPDX-License-Identifier: Apache-2.0
// sample: edits, temperature, top_k, top_p, min_p, draw, logprobs. A block owns one row of logits at a time, edited
// where it lies: in shared memory where a row fits, else in the block's part of the workspace.
//
// With l the edited logits and m their maximum, an id has the mass w = e^((l - m) / temperature), a float32 rounded to
// an integer in units of 2^-unit_bits, which is fine enough for 2^-33 of the total and coarse enough for the sum of a
// vocabulary to fit 62 bits. So sums are exact in any order, and atomics keep every bit.
//
// Ids are ordered by a key: l descending, id ascending. A truncation keeps a prefix of that order, which is all keys
// from `edge` on. It is found by counting masses (or ones) in buckets of equal width below m, and then among the ids
// of the bucket where the sum crosses its target: each compares itself with all others of a short list, or, where the
// list would be long, as with many equal logits, the key is found bit by bit. The draw inverts the cumulated mass, ids
// ascending, at a Philox uniform of (seed; position, choice): neither the row's place nor its neighbours enter.
//
// Logits that are not finite count as banned. If nothing is left, the highest finite unedited logit is taken, if none,
// 0. An edit or a forced id outside of the vocabulary is the caller's fault; nothing is read or written for it.
#include "kernels/cuda/cuda.cuh"
#include "kernels/philox.h"

enum {
    THREADS = 1024,
    WARPS = THREADS / 32,
    BUCKETS = 2 * THREADS,
    LISTED = 512, // of the short list
    WIDEST = 64,  // distance from the maximum that buckets of their own cover
};

static const unsigned ALL = 0xffffffffu;

typedef unsigned long long units; // mass, and keys: what 64-bit atomics and shuffles take

struct __align__(16) block_memory {
    units bucket[BUCKETS];
    units key[LISTED], mass[LISTED];
    units sum[WARPS];
    float largest[WARPS], smallest[WARPS];
    units edge, above; // of the prefix; what lies above the bucket where it ends
    double log_sum;
    int32_t crossing, listed, id;
};

// A row, the same in every thread.
struct row {
    float *logit; // (vocabulary)
    int32_t vocabulary;
    int32_t unit_bits;
    float unit; // 2^unit_bits
    float temperature;
    float top, buckets_a_unit; // the largest finite logit; -INFINITY: none
    units edge;                // keys below it are cut off
};

// ------------------------------------------------------------------------------------------- sums over warp and block

static __device__ __forceinline__ units warp_sum(units x) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
        x += __shfl_xor_sync(ALL, x, distance);
    return x;
}

// Of this lane and those below.
static __device__ __forceinline__ units warp_scan(units x) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const units below = __shfl_up_sync(ALL, x, distance);
        x += lane >= distance ? below : 0;
    }
    return x;
}

// The sums of the warps, cumulated: lane w has that of warps 0 .. w. x: the same in all lanes of a warp.
static __device__ units scan_warps(block_memory &m, units x) {
    __syncthreads(); // sum[] has been read
    if (threadIdx.x % 32 == 0)
        m.sum[threadIdx.x / 32] = x;
    __syncthreads();
    return warp_scan(m.sum[threadIdx.x % 32]);
}

static __device__ units block_sum(block_memory &m, units x) {
    return __shfl_sync(ALL, scan_warps(m, warp_sum(x)), WARPS - 1);
}

static __device__ void block_extremes(block_memory &m, float &largest, float &smallest) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int turn = 0; turn < 2; turn++) {
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) {
            largest = fmaxf(largest, __shfl_xor_sync(ALL, largest, distance));
            smallest = fminf(smallest, __shfl_xor_sync(ALL, smallest, distance));
        }
        if (turn == 1)
            break;
        __syncthreads();
        if (lane == 0) {
            m.largest[threadIdx.x / 32] = largest;
            m.smallest[threadIdx.x / 32] = smallest;
        }
        __syncthreads();
        largest = m.largest[lane];
        smallest = m.smallest[lane];
    }
}

// --------------------------------------------------------------------------------------------------------- the logits

static __device__ __forceinline__ bool is_finite(float x) {
    return x - x == 0.0f;
}

// Larger for a larger logit, among equal ones for a lower id; the two zeros are equal.
static __device__ __forceinline__ units key_of(float l, int32_t id) {
    const uint32_t bits = __float_as_uint(l + 0.0f);
    const uint32_t order = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return (units)order << 32 | (0xffffffffu - (uint32_t)id);
}

static __device__ __forceinline__ bool is_kept(const row &r, float l, int32_t id) {
    return is_finite(l) && key_of(l, id) >= r.edge;
}

static __device__ __forceinline__ float relative_mass(const row &r, float l) {
    return expf(r.temperature == 1.0f ? l - r.top : (l - r.top) / r.temperature);
}

// MASS: in units; else 1.
template <bool MASS> static __device__ __forceinline__ units weight_of(const row &r, float l) {
    return MASS ? __float2ull_rn(relative_mass(r, l) * r.unit) : 1;
}

// Falls as l does.
static __device__ __forceinline__ int32_t bucket_of(const row &r, float l) {
    return min(__float2int_rz((r.top - l) * r.buckets_a_unit), (int)BUCKETS - 1);
}

// Sets what follows from a thread's extremes of the logits: their largest, the width of a bucket; nothing is cut off.
static __device__ void set_top(block_memory &m, row &r, float largest, float smallest) {
    block_extremes(m, largest, smallest);
    r.top = largest;
    r.buckets_a_unit = largest > smallest ? (BUCKETS - 1) / fminf(largest - smallest, WIDEST) : 0.0f;
    r.edge = 0;
}

static __device__ __forceinline__ void widen(float &largest, float &smallest, float l) {
    largest = is_finite(l) ? fmaxf(largest, l) : largest;
    smallest = is_finite(l) ? fminf(smallest, l) : smallest;
}

static __device__ void begin_row(block_memory &m, row &r) {
    float largest = -INFINITY, smallest = INFINITY;
    for (int32_t id = (int32_t)threadIdx.x; id < r.vocabulary; id += THREADS)
        widen(largest, smallest, r.logit[id]);
    set_top(m, r, largest, smallest);
}

// Begins with the model's logits, AHEAD of them on their way to a thread at a time; four in one access where they lie
// so.
template <typename Four> static __device__ void take_logits(block_memory &m, row &r, const float *logits) {
    constexpr int AHEAD = 4, EACH = sizeof(Four) / sizeof(float);
    float largest = -INFINITY, smallest = INFINITY;
    for (int32_t first = (int32_t)threadIdx.x * EACH; first < r.vocabulary; first += AHEAD * THREADS * EACH) {
        Four got[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            if (first + i * THREADS * EACH < r.vocabulary)
                got[i] = *(const Four *)(logits + first + i * THREADS * EACH);
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            if (first + i * THREADS * EACH < r.vocabulary) {
                *(Four *)(r.logit + first + i * THREADS * EACH) = got[i];
                const float *each = (const float *)&got[i];
#pragma unroll
                for (int j = 0; j < EACH; j++)
                    widen(largest, smallest, each[j]);
            }
    }
    set_top(m, r, largest, smallest);
    __syncthreads(); // a thread reads what others wrote
}

// The lowest id whose logit is `value`; 0: none.
static __device__ int32_t first_equal(block_memory &m, const float *logit, int32_t vocabulary, float value) {
    if (threadIdx.x == 0)
        m.id = INT32_MAX;
    __syncthreads();
    int32_t first = INT32_MAX;
    for (int32_t id = (int32_t)threadIdx.x; id < vocabulary; id += THREADS)
        if (logit[id] == value)
            first = min(first, id);
    if (first < INT32_MAX)
        atomicMin(&m.id, first);
    __syncthreads();
    return m.id < INT32_MAX ? m.id : 0;
}

// The edits of an id belong to one warp, which takes them in their order.
static __device__ void edit_logits(const cuda_table *table, const kern_sampler &sampler, const row &r) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int32_t first = 0; first < sampler.edits; first += 32) {
        kern_logit_edit edit = {-1, 0.0f, 1.0f, 0.0f};
        if (first + lane < sampler.edits)
            edit = table->edit[sampler.edit0 + first + lane];
        const bool mine = edit.id >= 0 && edit.id < r.vocabulary && edit.id % WARPS == warp;
        for (unsigned left = __ballot_sync(ALL, mine); left; left &= left - 1) {
            if (lane == __ffs((int)left) - 1) {
                const float l = r.logit[edit.id] + edit.bias;
                r.logit[edit.id] = (l > 0 ? l / edit.repetition : l * edit.repetition) - edit.penalty;
            }
            __syncwarp();
        }
    }
    __syncthreads();
}

// --------------------------------------------------------------------------------------------------------- truncation

// The bucket where the sum from the first one on reaches target, and what lies above it. Target: of ones, at most all;
// of masses, the part p of the total. A sum is never 0 here.
template <bool MASS> static __device__ units find_bucket(block_memory &m, const row &r, units target, float p) {
    for (int32_t b = (int32_t)threadIdx.x; b < BUCKETS; b += THREADS)
        m.bucket[b] = 0;
    if (threadIdx.x == 0)
        m.listed = 0;
    __syncthreads();
    for (int32_t id = (int32_t)threadIdx.x; id < r.vocabulary; id += THREADS) {
        const float l = r.logit[id];
        const units weight = is_kept(r, l, id) ? weight_of<MASS>(r, l) : 0;
        if (weight)
            atomicAdd(&m.bucket[bucket_of(r, l)], weight);
    }
    __syncthreads();
    const int warp = threadIdx.x / 32;
    const units first = m.bucket[2 * threadIdx.x], both = first + m.bucket[2 * threadIdx.x + 1];
    const units scan = warp_scan(both), warps = scan_warps(m, __shfl_sync(ALL, scan, 31));
    const units total = __shfl_sync(ALL, warps, WARPS - 1), below = __shfl_sync(ALL, warps, max(warp - 1, 0));
    const units before = (warp > 0 ? below : 0) + scan - both;
    const units part = MASS ? (units)ceil((double)p * (double)total) : target;
    target = max(min(part, total), (units)1);
    if (before < target && before + both >= target) {
        const bool second = before + first < target;
        m.crossing = (int32_t)(2 * threadIdx.x) + second;
        m.above = before + (second ? first : 0);
    }
    __syncthreads();
    return target;
}

// Lists the ids of the bucket, as far as they fit; m.listed counts them all.
template <bool MASS> static __device__ void list_bucket(block_memory &m, const row &r) {
    for (int32_t id = (int32_t)threadIdx.x; id < r.vocabulary; id += THREADS) {
        const float l = r.logit[id];
        const bool inside = is_kept(r, l, id) && bucket_of(r, l) == m.crossing;
        const units weight = inside ? weight_of<MASS>(r, l) : 0;
        if (!weight)
            continue;
        const int32_t place = atomicAdd(&m.listed, 1);
        if (place < LISTED) {
            m.key[place] = key_of(l, id);
            m.mass[place] = weight;
        }
    }
    __syncthreads();
}

// The key of the list at which the sum reaches target.
static __device__ void search_list(block_memory &m, units target) {
    const int32_t place = (int32_t)threadIdx.x;
    if (place < m.listed) {
        units before = m.above;
        for (int32_t other = 0; other < m.listed; other++)
            before += m.key[other] > m.key[place] ? m.mass[other] : 0;
        if (before < target && before + m.mass[place] >= target)
            m.edge = m.key[place];
    }
    __syncthreads();
}

// The same without a list: the largest key such that it and those above it in the bucket reach target.
template <bool MASS> static __device__ void search_bits(block_memory &m, const row &r, units target) {
    units edge = 0;
    for (int bit = 63; bit >= 0; bit--) {
        const units tried = edge | 1ull << bit;
        units sum = 0;
        for (int32_t id = (int32_t)threadIdx.x; id < r.vocabulary; id += THREADS) {
            const float l = r.logit[id];
            if (is_kept(r, l, id) && key_of(l, id) >= tried && bucket_of(r, l) == m.crossing)
                sum += weight_of<MASS>(r, l);
        }
        edge = m.above + block_sum(m, sum) >= target ? tried : edge;
    }
    if (threadIdx.x == 0)
        m.edge = edge;
    __syncthreads();
}

// Keeps the shortest prefix whose ones reach target, or whose masses reach the part p of all that is kept.
template <bool MASS> static __device__ void keep_prefix(block_memory &m, row &r, units target, float p) {
    target = find_bucket<MASS>(m, r, target, p);
    list_bucket<MASS>(m, r);
    if (m.listed <= LISTED)
        search_list(m, target);
    else
        search_bits<MASS>(m, r, target);
    r.edge = m.edge;
    __syncthreads();
}

// --------------------------------------------------------------------------------------------------------------- draw

// least: ids of a smaller mass, in parts of the largest, are cut off.
static __device__ __forceinline__ units drawn_weight(const row &r, int32_t id, float least) {
    if (id >= r.vocabulary)
        return 0;
    const float l = r.logit[id];
    return is_kept(r, l, id) && relative_mass(r, l) >= least ? weight_of<true>(r, l) : 0;
}

// Each warp sums a range of ids; the range that holds the target is cumulated by the whole block.
static __device__ int32_t draw(block_memory &m, const row &r, float least, double uniform) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int32_t range = (r.vocabulary + THREADS - 1) / THREADS * 32;
    units sum = 0;
    for (int32_t id = warp * range + lane; id < (warp + 1) * range; id += 32)
        sum += drawn_weight(r, id, least);
    const units warps = scan_warps(m, warp_sum(sum)), total = __shfl_sync(ALL, warps, WARPS - 1);
    const units target = __umul64hi((units)(uniform * 0x1p53) << 11, total); // floor(uniform * total)
    const int chosen = max(__ffs((int)__ballot_sync(ALL, warps > target)) - 1, 0);
    units before = __shfl_sync(ALL, warps, max(chosen - 1, 0));
    before = chosen > 0 ? before : 0;
    const int32_t end = (chosen + 1) * range;
    for (int32_t id0 = chosen * range; id0 < end && before <= target; id0 += THREADS) {
        const int32_t id = id0 + (int32_t)threadIdx.x;
        const units scan = warp_scan(id < end ? drawn_weight(r, id, least) : 0);
        const units blocks = scan_warps(m, __shfl_sync(ALL, scan, 31));
        const units others = __shfl_sync(ALL, blocks, max(warp - 1, 0)), below = before + (warp > 0 ? others : 0);
        const unsigned beyond = __ballot_sync(ALL, below + scan > target);
        if (beyond && below <= target && lane == 0)
            m.id = id + __ffs((int)beyond) - 1;
        before += __shfl_sync(ALL, blocks, WARPS - 1);
    }
    __syncthreads();
    return m.id;
}

// The next id; the row's logits are edited on the way. logits: the model's.
static __device__ int32_t sample_row(const cuda_table *table, const kern_sampler &sampler, const float *logits,
                                     block_memory &m, row &r) {
    const float best = r.top;
    if (sampler.edits > 0) {
        edit_logits(table, sampler, r);
        begin_row(m, r);
    }
    if (!(r.top > -INFINITY))
        return best > -INFINITY ? first_equal(m, logits, r.vocabulary, best) : 0;
    if (!(sampler.temperature > 0) || !(sampler.top_p > 0))
        return first_equal(m, r.logit, r.vocabulary, r.top);
    r.temperature = sampler.temperature;
    if (sampler.top_k > 0 && sampler.top_k < r.vocabulary)
        keep_prefix<false>(m, r, (units)sampler.top_k, 0.0f);
    if (sampler.top_p < 1)
        keep_prefix<true>(m, r, 0, sampler.top_p);
    const float least = sampler.min_p > 0 ? fminf(sampler.min_p, 1.0f) : 0.0f;
    return draw(m, r, least, kern_philox_uniform(sampler.seed, sampler.position, sampler.choice, 0));
}

// ----------------------------------------------------------------------------------------------------------- logprobs

// log of the sum of e^(l - top) over all finite logits.
static __device__ void normalize(block_memory &m, row &r) {
    r.temperature = 1.0f;
    units sum = 0;
#pragma unroll 4
    for (int32_t id = (int32_t)threadIdx.x; id < r.vocabulary; id += THREADS) {
        const float l = r.logit[id];
        sum += is_finite(l) ? weight_of<true>(r, l) : 0;
    }
    sum = block_sum(m, sum);
    if (threadIdx.x == 0)
        m.log_sum = log(ldexp((double)sum, -r.unit_bits));
    __syncthreads();
}

static __device__ float log_probability(const block_memory &m, const row &r, float l) {
    return is_finite(l) ? (float)((double)l - (double)r.top - m.log_sum) : -INFINITY;
}

// The `top` likeliest ids: cut out like a prefix, then each counts those before it.
static __device__ void write_top(block_memory &m, row &r, int32_t top, int32_t *id, float *logprob) {
    if (threadIdx.x < top) {
        id[threadIdx.x] = -1;
        logprob[threadIdx.x] = -INFINITY;
    }
    if (!(r.top > -INFINITY))
        return;
    keep_prefix<false>(m, r, (units)top, 0.0f);
    if (threadIdx.x == 0)
        m.listed = 0;
    __syncthreads();
    for (int32_t i = (int32_t)threadIdx.x; i < r.vocabulary; i += THREADS)
        if (is_kept(r, r.logit[i], i))
            m.key[atomicAdd(&m.listed, 1)] = key_of(r.logit[i], i);
    __syncthreads();
    if (threadIdx.x < m.listed) {
        const units own = m.key[threadIdx.x];
        int32_t place = 0;
        for (int32_t other = 0; other < m.listed; other++)
            place += m.key[other] > own;
        id[place] = (int32_t)(0xffffffffu - (uint32_t)own);
        logprob[place] = log_probability(m, r, r.logit[id[place]]);
    }
    r.edge = 0;
    __syncthreads();
}

// --------------------------------------------------------------------------------------------------------------- rows

static __device__ void run_row(const cuda_table *table, const kern_sample_args &a, int32_t i, block_memory &m, row &r) {
    const kern_sampler sampler = table->sampler[i];
    const float *logits = a.logits.f + (int64_t)i * r.vocabulary;
    if (r.vocabulary % 4 == 0 && (uintptr_t)logits % 16 == 0 && (uintptr_t)r.logit % 16 == 0)
        take_logits<float4>(m, r, logits);
    else
        take_logits<float>(m, r, logits);
    const float top = r.top;
    const int32_t likeliest = a.top_id.i ? min(max(sampler.top, 0), (int32_t)KERN_MAX_TOP) : 0;
    if ((a.logprob.f || likeliest > 0) && top > -INFINITY)
        normalize(m, r);
    if (likeliest > 0)
        write_top(m, r, likeliest, a.top_id.i + (int64_t)i * KERN_MAX_TOP, a.top_logprob.f + (int64_t)i * KERN_MAX_TOP);
    const int32_t id = sampler.forced >= 0 ? sampler.forced : sample_row(table, sampler, logits, m, r);
    if (threadIdx.x != 0)
        return;
    a.id.i[i] = id;
    r.top = top;
    if (a.logprob.f)
        a.logprob.f[i] = id < r.vocabulary ? log_probability(m, r, logits[id]) : -INFINITY;
}

static __global__ void __launch_bounds__(THREADS)
    sample_kernel(const cuda_table *table, const kern_sample_args a, float *workspace) {
    cuda_begin();
    cuda_await();
    extern __shared__ units shared[];
    block_memory &m = *(block_memory *)shared;
    row r;
    r.vocabulary = a.vocabulary;
    r.unit_bits = 30 + __clz(a.vocabulary);
    r.unit = ldexpf(1.0f, r.unit_bits);
    r.logit = workspace ? workspace + (int64_t)blockIdx.x * a.vocabulary : (float *)(&m + 1);
    for (int32_t i = (int32_t)blockIdx.x; i < table->n_logits; i += (int32_t)gridDim.x) {
        run_row(table, a, i, m, r);
        __syncthreads();
    }
}

// ----------------------------------------------------------------------------------------------------------- launcher

static size_t row_bytes(const kern_sample_args *a) {
    return sizeof(float) * (size_t)a->vocabulary;
}

static bool row_fits(const kern_cuda *cuda, const kern_sample_args *a) {
    return sizeof(block_memory) + row_bytes(a) <= cuda->shared_limit;
}

kern_status cuda_sample_prepare(const kern_cuda *cuda, const void *args, size_t *workspace_bytes) {
    const kern_sample_args *a = (const kern_sample_args *)args;
    if (a->vocabulary < 1 || a->vocabulary > INT32_MAX - THREADS || !a->logits.ref || !a->id.ref ||
        !a->top_id.ref != !a->top_logprob.ref)
        return KERN_INVALID;
    *workspace_bytes = row_fits(cuda, a) ? 0 : row_bytes(a) * cuda->processors;
    return KERN_OK;
}

// A block a multiprocessor; more rows than that follow in turn.
kern_status cuda_sample_run(const cuda_step *step, const void *args) {
    const kern_sample_args *a = (const kern_sample_args *)args;
    const kern_cuda *cuda = step->cuda;
    const int blocks = step->logits < cuda->processors ? step->logits : cuda->processors;
    if (blocks == 0)
        return KERN_OK;
    const bool fits = row_fits(cuda, a);
    const size_t shared = sizeof(block_memory) + (fits ? row_bytes(a) : 0);
    kern_status status = cuda_allow_shared(sample_kernel, shared);
    if (status)
        return status;
    return cuda_start(step, sample_kernel, blocks, THREADS, shared, step->table, *a,
                      fits ? NULL : (float *)cuda->workspace);
}
