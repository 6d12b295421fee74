/* Numbers of every dtype read as float32 or float64. */
#ifndef TTRACE_NUMBERS_H
#define TTRACE_NUMBERS_H

#include "lanes.h"

#define BLOCK 4096 /* elements that are worked on at a time: they stay in cache */

/* Without a branch, so that compilers make vectors of it. Subnormal numbers are made from normal ones, which also holds
   where the processor flushes subnormal numbers to zero. */
INLINE float float_of_f16(uint16_t bits)
{
    uint32_t magnitude = (uint32_t)(bits & 0x7fff) << 13, exponent = magnitude & 0x0f800000u;
    uint32_t normal = magnitude + ((127u - 15u) << 23);
    uint32_t special = normal + (exponent == 0x0f800000u ? (128u - 16u) << 23 : 0u);
    float subnormal = float_of_bits(normal + (1u << 23)) - float_of_bits(113u << 23);
    uint32_t found;
    memcpy(&found, &subnormal, sizeof found);
    found = exponent ? special : found;
    return float_of_bits(found | (uint32_t)(bits & 0x8000) << 16);
}

INLINE float float_of_e5m2(uint8_t bits) { return float_of_f16((uint16_t)(bits << 8)); }

INLINE float float_of_e4m3(uint8_t bits)
{
    float number = float_of_f16((uint16_t)((bits & 0x80) << 8 | (bits & 0x7f) << 7)) * 256.0f;
    return (bits & 0x7f) == 0x7f ? float_of_bits(0x7fc00000u) : number;
}

static void floats_of(const void *from, int64_t dtype, int64_t n, float *to)
{
    switch (dtype) {
    case BF16:
        for (int64_t i = 0; i < n; i++)
            to[i] = float_of_bf16(((const any_word16 *)from)[i]);
        break;
    case F16:
        for (int64_t i = 0; i < n; i++)
            to[i] = float_of_f16(((const any_word16 *)from)[i]);
        break;
    case E4M3:
        for (int64_t i = 0; i < n; i++)
            to[i] = float_of_e4m3(((const uint8_t *)from)[i]);
        break;
    case E5M2:
        for (int64_t i = 0; i < n; i++)
            to[i] = float_of_e5m2(((const uint8_t *)from)[i]);
        break;
    default:
        memcpy(to, from, (size_t)n * sizeof *to);
    }
}

static void doubles_of(const void *from, int64_t dtype, int64_t n, double *to)
{
    float narrow[256];
    if (dtype == F64) {
        memcpy(to, from, (size_t)n * sizeof *to);
        return;
    }
    if (dtype == F32) {
        for (int64_t i = 0; i < n; i++)
            to[i] = ((const any_float *)from)[i];
        return;
    }
    for (int64_t at = 0; at < n; at += 256) {
        int64_t count = smaller(256, n - at);
        floats_of((const char *)from + at * SIZE[dtype], dtype, count, narrow);
        for (int64_t i = 0; i < count; i++)
            to[at + i] = narrow[i];
    }
}

#endif
