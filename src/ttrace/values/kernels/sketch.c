/* Signed sums of a region's elements in k buckets, keyed by the index in the logical tensor (values/sketch.py).

   Element i goes to bucket (i + turn of block i / k) mod k. The sums are kept in 2 k places, i mod k + turn, so that the
   elements of a block lie side by side, and folded at the end. */
#include <stdlib.h>

#include "numbers.h"
#include "walk.h"

#define WORD 64 /* elements whose signs are the bits of one random word */
#define AHEAD 2048

typedef struct {
    const char *data;
    int64_t dtype;
    uint64_t key, step;
    int64_t k;
    double *places;
} sketch;

/* Moves each sign bit to the top. */
#if DOUBLES == 8
static const words64 UP = {63, 62, 61, 60, 59, 58, 57, 56};
#elif DOUBLES == 4
static const words64 UP = {63, 62, 61, 60};
#else
static const words64 UP = {63, 62};
#endif

INLINE doubles load(const char *data, int64_t i, int64_t dtype)
{
    doubles wide;
    if (dtype == F32)
        return DOUBLES_OF_F32((const any_float *)data + i);
    if (dtype == BF16)
        return DOUBLES_OF_BF16((const any_word16 *)data + i);
    memcpy(&wide, (const any_double *)data + i, sizeof wide);
    return wide;
}

INLINE void add_word(const char *data, int64_t dtype, uint64_t signs, double *to)
{
    for (int64_t j = 0; j < WORD; j += DOUBLES) {
        doubles sum, x = load(data, j, dtype);
        words64 minus = ((words64){0} + (signs >> j)) << UP & 0x8000000000000000u;
        memcpy(&sum, to + j, sizeof sum);
        sum += (doubles)((words64)x ^ minus);
        memcpy(to + j, &sum, sizeof sum);
    }
}

INLINE void add_part_of_word(const double *numbers, int64_t n, uint64_t signs, double *to)
{
    for (int64_t j = 0; j < n; j++)
        to[j] += signs >> j & 1 ? -numbers[j] : numbers[j];
}

INLINE void add_block(const sketch *s, const char *data, int64_t dtype, int64_t index, int64_t n, double *to)
{
    const int64_t size = SIZE[dtype];
    while (n > 0) {
        const int64_t bit = index % WORD, count = smaller(n, WORD - bit);
        const uint64_t signs = mixed(s->key + (uint64_t)(index / WORD) * s->step) >> bit;
        if (count == WORD) {
            for (int64_t line = 0; line < WORD * size; line += 64)
                __builtin_prefetch(data + AHEAD + line);
            add_word(data, dtype, signs, to);
        } else {
            double numbers[WORD];
            doubles_of(data, dtype, count, numbers);
            add_part_of_word(numbers, count, signs, to);
        }
        index += count;
        data += count * size;
        to += count;
        n -= count;
    }
}

/* The elements of one block of k, or a part of it. */
static void add_run_in_block(const sketch *s, const char *data, int64_t index, int64_t n)
{
    const uint64_t word = mixed(s->key + (((uint64_t)1 << 62) + (uint64_t)(index / s->k)) * s->step);
    double *to = s->places + index % s->k + (int64_t)((word >> 32) * (uint64_t)s->k >> 32);
    if (s->dtype == BF16)
        add_block(s, data, BF16, index, n, to);
    else if (s->dtype == F32)
        add_block(s, data, F32, index, n, to);
    else if (s->dtype == F64)
        add_block(s, data, F64, index, n, to);
    else
        for (int64_t at = 0, count; at < n; at += count) {
            float numbers[BLOCK];
            count = smaller(BLOCK, n - at);
            floats_of(data + at * SIZE[s->dtype], s->dtype, count, numbers);
            add_block(s, (const char *)numbers, F32, index + at, count, to + at);
        }
}

static void add_run(void *state, int64_t index, int64_t offset, int64_t n)
{
    const sketch *s = state;
    const char *data = s->data + offset * SIZE[s->dtype];
    while (n > 0) {
        const int64_t count = smaller(n, s->k - index % s->k);
        add_run_in_block(s, data, index, count);
        index += count;
        data += count * SIZE[s->dtype];
        n -= count;
    }
}

/* Adds to k sums, a multiple of WORD; if no memory can be allocated, all of them are NaN. */
void EXPORT(sketch)(const char *data, int64_t dtype, const dim *dims, int64_t num_dims, uint64_t key, uint64_t step,
                    int64_t k, double *out)
{
    sketch state = {data, dtype, key, step, k, calloc((size_t)(2 * k), sizeof(double))};
    if (state.places)
        walk(dims, num_dims, 0, 0, add_run, &state);
    for (int64_t i = 0; i < k; i++)
        out[i] += state.places ? state.places[i] + state.places[i + k] : __builtin_nan("");
    free(state.places);
}
