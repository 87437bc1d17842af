// SPDX-License-Identifier: Apache-2.0
// Philox4x32-10 and normal variates that are the same bits on every machine.
//
// The C library's log, sin and cos differ in their last bits between versions and processors. Those here use additions,
// multiplications, divisions and square roots of doubles only (the engine is compiled without contraction), which IEEE
// 754 fixes; their relative error is below 1e-13, far below what survives the rounding to float.
#include "engine/random.h"

#include <math.h>

enum { ROUNDS = 10, WORDS = 4 };

void eng_philox(uint64_t seed, uint64_t stream, uint64_t counter, uint32_t out[4]) {
    uint32_t key0 = (uint32_t)seed, key1 = (uint32_t)(seed >> 32);
    uint32_t c0 = (uint32_t)counter, c1 = (uint32_t)(counter >> 32);
    uint32_t c2 = (uint32_t)stream, c3 = (uint32_t)(stream >> 32);
    for (int round = 0; round < ROUNDS; round++) {
        uint64_t product0 = (uint64_t)0xD2511F53U * c0, product1 = (uint64_t)0xCD9E8D57U * c2;
        c0 = (uint32_t)(product1 >> 32) ^ c1 ^ key0;
        c1 = (uint32_t)product1;
        c2 = (uint32_t)(product0 >> 32) ^ c3 ^ key1;
        c3 = (uint32_t)product0;
        key0 += 0x9E3779B9U;
        key1 += 0xBB67AE85U;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

// ln x for x > 0: x = m 2^e with m near 1, ln m = 2 artanh((m - 1) / (m + 1)).
static double natural_log(double x) {
    static const double ln2 = 0x1.62e42fefa39efp-1, sqrt_half = 0x1.6a09e667f3bcdp-1;
    int exponent;
    double m = frexp(x, &exponent);
    if (m < sqrt_half) {
        m *= 2;
        exponent--;
    }
    double s = (m - 1) / (m + 1), square = s * s, sum = 0;
    for (int n = 19; n >= 1; n -= 2)
        sum = sum * square + 1.0 / n;
    return exponent * ln2 + 2 * s * sum;
}

// Sine and cosine of 2 pi turn / 2^32: the quadrant exactly, the rest by Taylor's series in [0, pi/2).
static void turn_sine_cosine(uint32_t turn, double *sine, double *cosine) {
    static const double half_pi = 0x1.921fb54442d18p+0;
    double angle = (turn & 0x3FFFFFFFU) * 0x1p-30 * half_pi, square = angle * angle;
    double s = 1, c = 1;
    for (int n = 22; n >= 2; n -= 2) {
        s = 1 - s * square / (n * (n + 1));
        c = 1 - c * square / ((n - 1) * n);
    }
    s *= angle;
    switch (turn >> 30) {
    case 0:
        *sine = s, *cosine = c;
        break;
    case 1:
        *sine = c, *cosine = -s;
        break;
    case 2:
        *sine = -s, *cosine = -c;
        break;
    default:
        *sine = -c, *cosine = s;
    }
}

static void four_normals(const uint32_t word[WORDS], double normal[WORDS]) {
    for (int pair = 0; pair < WORDS; pair += 2) {
        double uniform = (word[pair] + 1.0) * 0x1p-32; // (0, 1]
        double radius = sqrt(-2 * natural_log(uniform)), sine, cosine;
        turn_sine_cosine(word[pair + 1], &sine, &cosine);
        normal[pair] = radius * cosine;
        normal[pair + 1] = radius * sine;
    }
}

void eng_normals(uint64_t seed, uint64_t stream, int64_t first, int64_t count, float deviation, float *out) {
    for (int64_t done = 0; done < count; done += WORDS) {
        uint32_t word[WORDS];
        double normal[WORDS];
        eng_philox(seed, stream, (uint64_t)(first + done) / WORDS, word);
        four_normals(word, normal);
        for (int64_t i = 0; i < WORDS && done + i < count; i++)
            out[done + i] = (float)(deviation * normal[i]);
    }
}
