// SPDX-License-Identifier: Apache-2.0
// Element types of tensor files: names, sizes, checked shapes, and the 16-bit float conversions.
//
// Conversions work on bits, never through the floating-point unit, so that the rounding mode, flush-to-zero and the
// quieting of signalling NaNs by the hardware cannot change a stored value. No state; any thread.
#include "engine/safetensors.h"

#include <string.h>

static const struct {
    const char *name;
    size_t size;
} dtypes[] = {
    [ENG_F32] = {"F32", 4}, [ENG_F16] = {"F16", 2},   [ENG_BF16] = {"BF16", 2}, [ENG_F64] = {"F64", 8},
    [ENG_I64] = {"I64", 8}, [ENG_I32] = {"I32", 4},   [ENG_I16] = {"I16", 2},   [ENG_I8] = {"I8", 1},
    [ENG_U8] = {"U8", 1},   [ENG_BOOL] = {"BOOL", 1},
};

static bool is_dtype(eng_dtype dtype) {
    return (size_t)dtype < sizeof dtypes / sizeof dtypes[0];
}

size_t eng_dtype_size(eng_dtype dtype) {
    return is_dtype(dtype) ? dtypes[dtype].size : 0;
}

const char *eng_dtype_name(eng_dtype dtype) {
    return is_dtype(dtype) ? dtypes[dtype].name : "unknown";
}

bool eng_dtype_parse(const char *name, eng_dtype *dtype) {
    for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++) {
        if (strcmp(dtypes[i].name, name) == 0) {
            *dtype = (eng_dtype)i;
            return true;
        }
    }
    return false;
}

bool eng_shape_size(eng_dtype dtype, int ndim, const int64_t *shape, int64_t *count, uint64_t *bytes) {
    if (!is_dtype(dtype) || ndim < 0 || ndim > ENG_MAX_DIMS)
        return false;
    int64_t product = 1;
    for (int i = 0; i < ndim; i++) {
        if (shape[i] < 0 || __builtin_mul_overflow(product, shape[i], &product))
            return false;
    }
    int64_t total;
    if (__builtin_mul_overflow(product, (int64_t)dtypes[dtype].size, &total))
        return false;
    *count = product;
    *bytes = (uint64_t)total;
    return true;
}

static uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

uint16_t eng_bf16_from_f32(float value) {
    uint32_t bits = bits_of(value);
    // The quiet bit keeps a NaN whose payload sits in the lost half from turning into an infinity.
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

float eng_bf16_to_f32(uint16_t value) {
    return float_of((uint32_t)value << 16);
}

float eng_f16_to_f32(uint16_t value) {
    uint32_t sign = (uint32_t)(value & 0x8000u) << 16;
    uint32_t exponent = value >> 10 & 0x1fu;
    uint32_t fraction = value & 0x3ffu;
    if (exponent == 0x1f)
        return float_of(sign | 0x7f800000u | fraction << 13);
    if (exponent != 0)
        return float_of(sign | (exponent + 112) << 23 | fraction << 13);
    if (fraction == 0)
        return float_of(sign);
    // Subnormal in half precision, normal in single: shift the leading one up to the hidden bit.
    int shift = __builtin_clz(fraction) - 21;
    return float_of(sign | (uint32_t)(113 - shift) << 23 | (fraction << shift & 0x3ffu) << 13);
}

int64_t eng_count_nonfinite(const float *values, int64_t count) {
    int64_t found = 0;
    for (int64_t i = 0; i < count; i++)
        found += (bits_of(values[i]) & 0x7f800000u) == 0x7f800000u;
    return found;
}
