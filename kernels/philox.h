// SPDX-License-Identifier: Apache-2.0
// Philox4x32-10, the counter-based generator of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1,
// 2, 3" (SC 2011): 128 random bits as a function of a 128-bit counter and a 64-bit key, the same on every backend.
#ifndef KERNELS_PHILOX_H
#define KERNELS_PHILOX_H

#include <stdint.h>

#ifdef __CUDACC__
#define KERN_PHILOX static __host__ __device__ inline
#else
#define KERN_PHILOX static inline
#endif

typedef struct kern_philox {
    uint32_t word[4];
} kern_philox;

KERN_PHILOX kern_philox kern_philox_4x32_10(kern_philox counter, uint32_t key0, uint32_t key1) {
    for (int round = 0; round < 10; round++) {
        const uint64_t product0 = (uint64_t)0xD2511F53u * counter.word[0];
        const uint64_t product1 = (uint64_t)0xCD9E8D57u * counter.word[2];
        const kern_philox next = {{(uint32_t)(product1 >> 32) ^ counter.word[1] ^ key0, (uint32_t)product1,
                                   (uint32_t)(product0 >> 32) ^ counter.word[3] ^ key1, (uint32_t)product0}};
        counter = next;
        key0 += 0x9E3779B9u; // golden ratio
        key1 += 0xBB67AE85u; // sqrt(3) - 1
    }
    return counter;
}

// What four neighbouring weights are rounded by at an update (ADAMW): key = seed, counter = (quad, update, a name).
KERN_PHILOX kern_philox kern_philox_rounding(uint64_t seed, uint64_t quad, uint32_t update) {
    const kern_philox counter = {{(uint32_t)quad, (uint32_t)(quad >> 32), update, 0x726F756Eu}};
    return kern_philox_4x32_10(counter, (uint32_t)seed, (uint32_t)(seed >> 32));
}

// Uniform in [0, 1) with 53 bits: key = seed, counter = (position, choice, stream).
KERN_PHILOX double kern_philox_uniform(uint64_t seed, uint64_t position, uint32_t choice, uint32_t stream) {
    const kern_philox counter = {{(uint32_t)position, (uint32_t)(position >> 32), choice, stream}};
    const kern_philox random = kern_philox_4x32_10(counter, (uint32_t)seed, (uint32_t)(seed >> 32));
    const uint64_t bits = (uint64_t)random.word[0] << 32 | random.word[1];
    return (double)(bits >> 11) * 0x1p-53;
}

#endif
