/* Generated values of a region (values/generate.py): the bits that torch makes, in one pass.

   hatch_build.py has it compiled without fusing multiplications and additions, which would round once where torch rounds
   twice. */
#include "walk.h"

enum { NORMAL, SIGNED };

typedef struct {
    char *out;
    int64_t dtype, kind;
    uint64_t key, step;
    float factor, mean;
} values;

/* The sum of four 16-bit lanes, less its mean. */
INLINE int32_t normal(uint64_t word)
{
    uint64_t pairs = (word & 0x0000ffff0000ffffu) + (word >> 16 & 0x0000ffff0000ffffu);
    return (int32_t)(uint32_t)pairs + (int32_t)(uint32_t)(pairs >> 32) - 2 * 65535;
}

/* A sign and 24 bits on top of 2^23. */
INLINE int32_t of_either_sign(uint64_t word)
{
    int32_t size = (int32_t)(word >> 16 & 0xffffff) + (1 << 23);
    return word >> 60 & 1 ? size : -size;
}

INLINE uint16_t rounded_to_bf16(float number)
{
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

INLINE void fill(const values *v, uint64_t counter, int64_t n, char *out, int64_t kind, int64_t dtype)
{
    const uint64_t step = v->step;
    const float factor = v->factor, mean = v->mean;
    for (int64_t i = 0; i < n; i++) {
        uint64_t word = mixed(counter + (uint64_t)i * step);
        float number = (float)(kind == NORMAL ? normal(word) : of_either_sign(word)) * factor;
        number = kind == NORMAL ? number + mean : number;
        if (dtype == BF16)
            ((any_word16 *)out)[i] = rounded_to_bf16(number);
        else
            ((any_float *)out)[i] = number;
    }
}

static void fill_run(void *state, int64_t index, int64_t offset, int64_t n)
{
    const values *v = state;
    const uint64_t counter = v->key + (uint64_t)index * v->step;
    char *out = v->out + offset * SIZE[v->dtype];
    if (v->kind == NORMAL && v->dtype == F32)
        fill(v, counter, n, out, NORMAL, F32);
    else if (v->kind == NORMAL)
        fill(v, counter, n, out, NORMAL, BF16);
    else if (v->dtype == F32)
        fill(v, counter, n, out, SIGNED, F32);
    else
        fill(v, counter, n, out, SIGNED, BF16);
}

/* Fills a local tensor of float32 or bf16. */
void EXPORT(generate)(char *out, int64_t dtype, const dim *dims, int64_t num_dims, uint64_t key, uint64_t step,
                      int64_t kind, float factor, float mean)
{
    values state = {out, dtype, kind, key, step, factor, mean};
    walk(dims, num_dims, 0, 0, fill_run, &state);
}
