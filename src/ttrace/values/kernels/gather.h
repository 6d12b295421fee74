/* Copies elements of a strided tensor into a buffer that stays in cache. */
#ifndef TTRACE_GATHER_H
#define TTRACE_GATHER_H

#include "numbers.h"

/* A tensor as Python describes it, and the factor of a sum; strides are in elements. */
typedef struct {
    const char *data;
    int64_t dtype;
    const int64_t *strides;
    double factor;
} tensor;

/* Room for one block of one tensor, and of a sum of tensors. */
typedef struct {
    double raw[BLOCK], wide[BLOCK], total[BLOCK];
} room;

#define COPY_APART(TYPE)                                                                                                  \
    for (int64_t i = 0; i < n; i++)                                                                                       \
        ((TYPE *)to)[i] = ((const TYPE *)from)[i * stride];

static void copy_run(char *to, const char *from, int64_t n, int64_t stride, int64_t size)
{
    if (stride == 1)
        memcpy(to, from, (size_t)(n * size));
    else if (size == 8)
        COPY_APART(any_word64)
    else if (size == 4)
        COPY_APART(any_word32)
    else if (size == 2)
        COPY_APART(any_word16)
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
