// SPDX-License-Identifier: Apache-2.0
// Elements of a matrix state as they lie in its slot (kern_storage): float, or bfloat16 rounded at random.
//
// A float x between two bfloat16 a < b becomes b with probability (x - a) / (b - a): 16 random bits are added to the 16
// that go. The bits are a function of a token's position, the state's number and the element's place, so they depend on
// neither the batch nor the kernel: Philox4x32-10 makes a key of position and state; three rounds of Philox2x32, on a
// Weyl sequence that begins with the key, make the bits of four elements. (Uniform, and without correlation between
// places, rows or positions as far as a million of each tell; two rounds are not.) Places are counted in quads: four
// columns of a row that begin at a multiple of four, ceil(columns / 4) of them a row.
#ifndef KERNELS_CUDA_STORAGE_CUH
#define KERNELS_CUDA_STORAGE_CUH

#include "kernels/cuda/elements.cuh"
#include "kernels/philox.h"

typedef __nv_bfloat16 cuda_bf16;

// ---------------------------------------------------------------------------------------------------------- rounding

struct cuda_rounding {
    uint32_t start, key;
};

static __device__ __forceinline__ cuda_rounding cuda_rounding_of(int64_t position, int32_t state) {
    constexpr uint32_t KEY0 = 0x243F6A88u, KEY1 = 0x85A308D3u; // pi
    const kern_philox counter = {{(uint32_t)position, (uint32_t)((uint64_t)position >> 32), (uint32_t)state, 0}};
    const kern_philox random = kern_philox_4x32_10(counter, KEY0, KEY1);
    return {random.word[0], random.word[1]};
}

// Of the elements of a quad in their order, the low halves of words before the high ones.
struct cuda_rounding_bits {
    uint32_t word[2];
};
static __device__ __forceinline__ cuda_rounding_bits cuda_rounding_bits_of(const cuda_rounding &rounding,
                                                                           uint32_t quad) {
    cuda_rounding_bits bits = {{quad * 0x9E3779B9u + rounding.start, 0}};
#pragma unroll
    for (uint32_t round = 0; round < 3; round++) {
        const uint64_t product = (uint64_t)0xD256D193u * bits.word[0];
        bits = {{(uint32_t)(product >> 32) ^ (rounding.key + round * 0x9E3779B9u) ^ bits.word[1], (uint32_t)product}};
    }
    return bits;
}

// The high half is what is stored. A NaN stays one.
static __device__ __forceinline__ float cuda_rounded(float x, uint32_t bits) {
    return x == x ? __uint_as_float(__float_as_uint(x) + bits) : x;
}

// To what a store (which cuts the low half off) shall leave. float: as it is.
template <typename Stored>
static __device__ __forceinline__ void cuda_round(cuda_quad &x, const cuda_rounding &rounding, uint32_t quad) {
    if constexpr (sizeof(Stored) < sizeof(float)) {
        const cuda_rounding_bits bits = cuda_rounding_bits_of(rounding, quad);
#pragma unroll
        for (int i = 0; i < 4; i++)
            x.v[i] = cuda_rounded(x.v[i], i & 1 ? bits.word[i / 2] >> 16 : bits.word[i / 2] & 0xFFFFu);
    }
}
// The number that a store leaves, of one that was rounded.
template <typename Stored> static __device__ __forceinline__ float cuda_stored(float x) {
    return sizeof(Stored) < sizeof(float) ? __uint_as_float(__float_as_uint(x) & 0xFFFF0000u) : x;
}
// The element at `place` of a quad, as it is stored.
template <typename Stored>
static __device__ __forceinline__ float cuda_rounded_at(float x, const cuda_rounding &rounding, uint32_t quad,
                                                        int place) {
    if constexpr (sizeof(Stored) < sizeof(float)) {
        const cuda_rounding_bits bits = cuda_rounding_bits_of(rounding, quad);
        const uint32_t word = place < 2 ? bits.word[0] : bits.word[1];
        return cuda_stored<Stored>(cuda_rounded(x, place & 1 ? word >> 16 : word & 0xFFFFu));
    }
    return x;
}

// --------------------------------------------------------------------------------------------------- four at a time

// As cuda_load and cuda_store of floats; wide: p is a multiple of 8 bytes. A store cuts the low half off.
static __device__ __forceinline__ cuda_quad cuda_load(const cuda_bf16 *p, int64_t left, bool wide) {
    cuda_quad q;
    if (wide && left >= 4) {
        const uint2 all = *(const uint2 *)p;
        q.v[0] = __uint_as_float(all.x << 16), q.v[1] = __uint_as_float(all.x & 0xFFFF0000u);
        q.v[2] = __uint_as_float(all.y << 16), q.v[3] = __uint_as_float(all.y & 0xFFFF0000u);
        return q;
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
        q.v[i] = i < left ? __bfloat162float(p[i]) : 0.0f;
    return q;
}

static __device__ __forceinline__ uint2 cuda_packed(const cuda_quad &q) {
    return make_uint2(__byte_perm(__float_as_uint(q.v[0]), __float_as_uint(q.v[1]), 0x7632),
                      __byte_perm(__float_as_uint(q.v[2]), __float_as_uint(q.v[3]), 0x7632));
}

static __device__ __forceinline__ void cuda_store(cuda_bf16 *p, const cuda_quad &q, int64_t left, bool wide) {
    if (wide && left >= 4) {
        *(uint2 *)p = cuda_packed(q);
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (i < left)
            p[i] = __ushort_as_bfloat16((unsigned short)(__float_as_uint(q.v[i]) >> 16));
}

// Four of them, of a state that nobody reads before the next step and that no cache holds so long: they leave the
// caches before anything else does.
static __device__ __forceinline__ void cuda_store_once(float *p, const cuda_quad &q) {
    __stcs((float4 *)p, make_float4(q.v[0], q.v[1], q.v[2], q.v[3]));
}
static __device__ __forceinline__ void cuda_store_once(cuda_bf16 *p, const cuda_quad &q) {
    __stcs((uint2 *)p, cuda_packed(q));
}
static __device__ __forceinline__ cuda_quad cuda_load_once(const float *p) {
    const float4 all = __ldcs((const float4 *)p);
    return {all.x, all.y, all.z, all.w};
}
template <bool ONCE, typename Stored>
static __device__ __forceinline__ void cuda_store_state(Stored *to, const cuda_quad &q) {
    if (ONCE)
        cuda_store_once(to, q);
    else
        cuda_store(to, q, 4, true);
}

#endif
