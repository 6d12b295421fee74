/* Elements of a strided tensor brought together in a buffer that stays in cache, as another dtype if need be. */
#ifndef TTRACE_GATHER_H
#define TTRACE_GATHER_H

#include "lanes.h"

#define BLOCK 4096

/* A tensor as Python describes it; strides are in elements. */
typedef struct {
    const char *data;
    int64_t dtype;
    const int64_t *strides;
} tensor;

/* Room for one block of one tensor; a multiple of every vector longer, so that the end can be read as zeros. */
typedef struct {
    double raw[BLOCK + 64], wide[BLOCK + 64];
} room;

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
            to[i] = float_of_bf16(((const uint16_t *)from)[i]);
        break;
    case F16:
        for (int64_t i = 0; i < n; i++)
            to[i] = float_of_f16(((const uint16_t *)from)[i]);
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
    for (int64_t at = 0; at < n; at += 256) {
        int64_t count = smaller(256, n - at);
        floats_of((const char *)from + at * SIZE[dtype], dtype, count, narrow);
        for (int64_t i = 0; i < count; i++)
            to[at + i] = narrow[i];
    }
}

#define COPY_APART(TYPE)                                                                                                  \
    for (int64_t i = 0; i < n; i++)                                                                                       \
        ((TYPE *)to)[i] = ((const TYPE *)from)[i * stride];

static void copy_run(char *to, const char *from, int64_t n, int64_t stride, int64_t size)
{
    if (stride == 1)
        memcpy(to, from, (size_t)(n * size));
    else if (size == 8)
        COPY_APART(uint64_t)
    else if (size == 4)
        COPY_APART(uint32_t)
    else if (size == 2)
        COPY_APART(uint16_t)
    else
        COPY_APART(uint8_t)
}

/* Where a row begins: rows are all dims but the last, in row-major order. */
INLINE int64_t row_offset(int64_t row, const int64_t *shape, const int64_t *strides, int64_t num_dims)
{
    int64_t offset = 0;
    for (int64_t dim = num_dims - 2; dim > 0; dim--) {
        offset += row % shape[dim] * strides[dim];
        row /= shape[dim];
    }
    return num_dims > 1 ? offset + row * strides[0] : offset;
}

static int is_contiguous(const int64_t *shape, const int64_t *strides, int64_t num_dims)
{
    int64_t expected = 1;
    for (int64_t dim = num_dims - 1; dim >= 0; dim--) {
        if (strides[dim] != expected)
            return 0;
        expected *= shape[dim];
    }
    return 1;
}

#endif
