// SPDX-License-Identifier: Apache-2.0
// sample: edits, temperature, top_k, top_p, min_p, draw, logprobs.
//
// Plain rows (greedy, forced, or drawn from all that the model allows) are done in one pass with each logit in a
// register, by a block or, where rows are few, by a cluster of up to eight that share the row (sm_90): maximum, masses
// and draw with two barriers between. Any other row belongs to one block and is edited where it lies: in shared memory
// where a row fits, else in the row's part of the workspace.
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

// Larger for a larger logit, never 0 of a finite one; the two zeros are equal.
static __device__ __forceinline__ uint32_t order_of(float l) {
    const uint32_t bits = __float_as_uint(l + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
static __device__ __forceinline__ float logit_of(uint32_t order) {
    return __uint_as_float(order & 0x80000000u ? order & 0x7fffffffu : ~order);
}

// Larger for a larger logit, among equal ones for a lower id.
static __device__ __forceinline__ units key_of(float l, int32_t id) {
    return (units)order_of(l) << 32 | (0xffffffffu - (uint32_t)id);
}
static __device__ __forceinline__ int32_t id_of(units key) {
    return (int32_t)(0xffffffffu - (uint32_t)key);
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

static __device__ double log_of_units(const row &r, units sum) {
    return log(ldexp((double)sum, -r.unit_bits));
}

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
        m.log_sum = log_of_units(r, sum);
    __syncthreads();
}

static __device__ float log_probability(const row &r, double log_sum, float l) {
    return is_finite(l) ? (float)((double)(l + 0.0f) - (double)r.top - log_sum) : -INFINITY; // of either zero the same
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
        id[place] = id_of(own);
        logprob[place] = log_probability(r, m.log_sum, r.logit[id[place]]);
    }
    r.edge = 0;
    __syncthreads();
}

// -------------------------------------------------------------------------------------------------------- plain rows

// The blocks that share a row: C of a cluster, or one. Each has the numbers of all warps of all of them.
template <int C> struct cluster {
    static constexpr int EACH = C * WARPS / 32; // numbers a lane

    static __device__ __forceinline__ int32_t rank(void) { return C > 1 ? (int32_t)(blockIdx.x % C) : 0; }
    // No block writes into another before that one is there.
    static __device__ __forceinline__ void meet(void) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
        if (C > 1)
            asm volatile("barrier.cluster.arrive.relaxed.aligned;\n\tbarrier.cluster.wait.aligned;" ::: "memory");
#endif
    }
    static __device__ __forceinline__ void sync(void) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
        if (C > 1) {
            asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::
                             : "memory");
            return;
        }
#endif
        __syncthreads();
    }
    // x, the same in all lanes, becomes this warp's number in every block.
    static __device__ __forceinline__ void tell(units *all, units x) {
        units *own = all + rank() * WARPS + threadIdx.x / 32;
        const int32_t lane = threadIdx.x % 32;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
        if (C > 1 && lane < C) {
            uint32_t there;
            asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                         : "=r"(there)
                         : "r"((uint32_t)__cvta_generic_to_shared(own)), "r"(lane));
            asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(there), "l"(x) : "memory");
        }
#endif
        if (C == 1 && lane == 0)
            *own = x;
    }
};

enum { CLUSTER_MOST = 8 };

struct plain_memory {
    units key[CLUSTER_MOST * WARPS], drawn[CLUSTER_MOST * WARPS], all[CLUSTER_MOST * WARPS];
};

static __device__ __forceinline__ bool is_greedy(const kern_sampler &sampler) {
    return !(sampler.temperature > 0) || !(sampler.top_p > 0);
}
static __device__ __forceinline__ bool is_plain(const kern_sampler &sampler, int32_t likeliest, int32_t vocabulary) {
    const bool whole =
        (sampler.top_k <= 0 || sampler.top_k >= vocabulary) && !(sampler.top_p < 1) && !(sampler.min_p > 0);
    return likeliest == 0 && (sampler.forced >= 0 || (sampler.edits <= 0 && (is_greedy(sampler) || whole)));
}

// A thread's Q quads of ids, one after another; NaN where there is no id.
template <int Q>
static __device__ __forceinline__ void load_quads(const float *logits, int32_t vocabulary, int32_t first,
                                                  float (&l)[4 * Q]) {
    const bool wide = vocabulary % 4 == 0 && (uintptr_t)logits % 16 == 0;
#pragma unroll
    for (int i = 0; i < Q; i++) {
        const int32_t id = first + 4 * i;
        if (wide) {
            const float4 four = id < vocabulary ? *(const float4 *)(logits + id) : make_float4(NAN, NAN, NAN, NAN);
            l[4 * i] = four.x, l[4 * i + 1] = four.y, l[4 * i + 2] = four.z, l[4 * i + 3] = four.w;
        } else
#pragma unroll
            for (int j = 0; j < 4; j++)
                l[4 * i + j] = id + j < vocabulary ? logits[id + j] : NAN;
    }
}

// The largest of a lane's keys and all others' of the warp.
static __device__ __forceinline__ units warp_largest(units key) {
    const uint32_t order = (uint32_t)(key >> 32), top = __reduce_max_sync(ALL, order);
    return (units)top << 32 | __reduce_max_sync(ALL, order == top ? (uint32_t)key : 0u);
}

// Of all blocks of the row; 0: no logit is finite.
template <int C, int Q>
static __device__ __forceinline__ units largest_key(const float (&l)[4 * Q], int32_t first, plain_memory &m) {
    uint32_t order = 0;
    int32_t id = 0;
#pragma unroll
    for (int j = 0; j < 4 * Q; j++)
        if (is_finite(l[j]) && order_of(l[j]) > order) {
            order = order_of(l[j]);
            id = first + j;
        }
    const units own = warp_largest(order ? (units)order << 32 | (0xffffffffu - (uint32_t)id) : 0);
    cluster<C>::tell(m.key, own);
    cluster<C>::sync();
    units key = 0;
#pragma unroll
    for (int i = 0; i < cluster<C>::EACH; i++)
        key = max(key, m.key[i * 32 + threadIdx.x % 32]);
    return warp_largest(key);
}

// What the warps before this one have, and all of them.
struct cumulated {
    units before, total;
};
template <int C> static __device__ __forceinline__ cumulated cumulate(const units *all) {
    constexpr int EACH = cluster<C>::EACH;
    const int32_t lane = threadIdx.x % 32, warp = cluster<C>::rank() * WARPS + threadIdx.x / 32;
    units sum = 0, part = 0; // of this lane's numbers; of those before the place that this warp's has with its lane
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        part += i < warp % EACH ? all[lane * EACH + i] : 0;
        sum += all[lane * EACH + i];
    }
    const units scan = warp_scan(sum);
    return {__shfl_sync(ALL, scan - sum + part, warp / EACH), __shfl_sync(ALL, scan, 31)};
}

// The id, of these lanes' ids, where the cumulated mass passes target; below: what lies below the lane's. -1: not here.
template <int Q>
static __device__ __forceinline__ int32_t pass_target(const row &r, const float (&l)[4 * Q], int32_t first, units below,
                                                      units target) {
    int32_t id = -1;
#pragma unroll
    for (int j = 0; j < 4 * Q; j++) {
        below += is_finite(l[j]) ? weight_of<true>(r, l[j]) : 0;
        id = id < 0 && below > target ? first + j : id;
    }
    return id;
}

// One row by C blocks, each thread with 4 Q of its logits; one thread of them all writes.
template <int C, int Q>
static __device__ __forceinline__ void run_plain(const kern_sample_args &a, const kern_sampler &sampler, int32_t i,
                                                 plain_memory &m, row r) {
    const float *logits = a.logits.f + (int64_t)i * r.vocabulary;
    const int32_t first = (cluster<C>::rank() * THREADS + (int32_t)threadIdx.x) * 4 * Q;
    const bool draws = sampler.forced < 0 && !is_greedy(sampler);
    float l[4 * Q];
    load_quads<Q>(logits, r.vocabulary, first, l);
    const units best = largest_key<C, Q>(l, first, m);
    r.top = best ? logit_of((uint32_t)(best >> 32)) : -INFINITY;
    r.temperature = 1.0f;
    units all = 0, drawn = 0;
#pragma unroll
    for (int j = 0; j < 4 * Q; j++)
        all += a.logprob.f && best && is_finite(l[j]) ? weight_of<true>(r, l[j]) : 0;
    r.temperature = sampler.temperature;
    if (draws && best)
#pragma unroll
        for (int j = 0; j < 4 * Q; j++)
            drawn += is_finite(l[j]) ? weight_of<true>(r, l[j]) : 0;
    const units scan = warp_scan(drawn);
    cluster<C>::tell(m.drawn, __shfl_sync(ALL, scan, 31));
    cluster<C>::tell(m.all, warp_sum(all));
    cluster<C>::sync();
    int32_t id = -1;
    if (draws && best) {
        const cumulated warps = cumulate<C>(m.drawn);
        const double uniform = kern_philox_uniform(sampler.seed, sampler.position, sampler.choice, 0);
        const units target = __umul64hi((units)(uniform * 0x1p53) << 11, warps.total);
        const units below = warps.before + scan - drawn;
        if (below <= target && below + drawn > target)
            id = pass_target<Q>(r, l, first, below, target);
    } else if (threadIdx.x == 0 && cluster<C>::rank() == 0)
        id = sampler.forced >= 0 ? sampler.forced : best ? id_of(best) : 0;
    const units total = a.logprob.f ? cumulate<C>(m.all).total : 0;
    if (id < 0)
        return;
    a.id.i[i] = id;
    if (a.logprob.f)
        a.logprob.f[i] = id < r.vocabulary && best ? log_probability(r, log_of_units(r, total), logits[id]) : -INFINITY;
}

// ---------------------------------------------------------------------------------------------------------- other rows

static __device__ __noinline__ void run_any(const cuda_table *table, const kern_sample_args a, int32_t i,
                                            block_memory &m, row r) {
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
        a.logprob.f[i] = id < r.vocabulary ? log_probability(r, m.log_sum, logits[id]) : -INFINITY;
}

// Cluster i has row i, or block i rows i, i + blocks, ...
template <int C, int Q>
static __global__ void __launch_bounds__(THREADS)
    sample_kernel(const cuda_table *table, const kern_sample_args a, float *workspace) {
    cuda_begin();
    cluster<C>::meet();
    extern __shared__ units shared[];
    block_memory &m = *(block_memory *)shared;
    row r = {};
    r.vocabulary = a.vocabulary;
    r.unit_bits = 30 + __clz(a.vocabulary);
    r.unit = ldexpf(1.0f, r.unit_bits);
    const int32_t number = (int32_t)blockIdx.x / C, step = (int32_t)gridDim.x / C;
    r.logit = workspace ? workspace + (int64_t)number * a.vocabulary : (float *)(&m + 1);
    cuda_await();
    for (int32_t i = number; i < table->n_logits; i += step) {
        const kern_sampler sampler = table->sampler[i];
        const int32_t likeliest = a.top_id.i ? min(max(sampler.top, 0), (int32_t)KERN_MAX_TOP) : 0;
        bool plain = false;
        if constexpr (Q > 0) {
            plain = is_plain(sampler, likeliest, a.vocabulary);
            if (plain)
                run_plain<C, Q>(a, sampler, i, *(plain_memory *)shared, r);
        }
        if (!plain && cluster<C>::rank() == 0)
            run_any(table, a, i, m, r);
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

template <int C, int Q> static kern_status launch(const cuda_step *step, const kern_sample_args *a, int rows) {
    const bool fits = row_fits(step->cuda, a);
    const size_t shared = sizeof(block_memory) + (fits ? row_bytes(a) : 0);
    const kern_status status = cuda_allow_shared(sample_kernel<C, Q>, shared);
    if (status)
        return status;
    return cuda_start_clusters(step, sample_kernel<C, Q>, C, rows * C, THREADS, shared, step->table, *a,
                               fits ? NULL : (float *)step->cuda->workspace);
}

// Rows that are few share the multiprocessors; else, and where a thread would have more than four quads of a row, a
// block takes one row after another.
kern_status cuda_sample_run(const cuda_step *step, const void *args) {
    const kern_sample_args *a = (const kern_sample_args *)args;
    const int rows = step->logits, processors = step->cuda->processors;
    if (rows == 0)
        return KERN_OK;
    const int blocks = step->cuda->overlaps ? processors / rows : 1;          // a row
    const int quads = cuda_blocks(a->vocabulary, 4 * THREADS * CLUSTER_MOST); // a thread of the largest cluster
    if (blocks >= 8 && quads <= 4)
        return quads <= 1   ? launch<8, 1>(step, a, rows)
               : quads <= 2 ? launch<8, 2>(step, a, rows)
                            : launch<8, 4>(step, a, rows);
    if (blocks >= 4 && quads <= 2)
        return quads <= 1 ? launch<4, 2>(step, a, rows) : launch<4, 4>(step, a, rows);
    if (blocks >= 2 && quads <= 1)
        return launch<2, 4>(step, a, rows);
    return launch<1, 0>(step, a, min(rows, processors));
}
