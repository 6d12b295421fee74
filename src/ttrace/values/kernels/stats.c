/* Sums over a pair of strided tensors in one pass. Each of the two may be a sum of several tensors, which is never stored.

   A block of both tensors is summed in vectors and added to float64 totals. Sums are float64 within the block too, where
   the memory is slower than that. It is not for two bf16 tensors: their products are exact in float32, so their blocks are
   summed in float32, right to 1e-6 at the worst, and a block whose sums may have overflowed or underflowed is summed again in float64.
   Blocks with NaN or Inf are walked element by element. Rows that are too short for a block of their own, elements with gaps
   between them, dtypes that have no loop of their own, and sums are first copied into a buffer that stays in cache. */
#include "gather.h"

#define SHORT_ROW 1024 /* several rows that are shorter make a block */
#define AHEAD 2048     /* bytes that are prefetched ahead */
#define ROWS_AHEAD 16  /* short rows that are prefetched ahead */
#define TINY 1e-25     /* float32 sums below this may have lost products to underflow */
#define DEPTH 16       /* numbers that one lane may add up in float32 */
#define STEP 32        /* elements of the widest two vectors: the rest is padded with zeros */

typedef struct {
    double aa, bb, dd, ab, max_diff;
} sums;

/* As PairSums in pair.py reads it. */
typedef struct {
    double aa, bb, dd, ab, max_diff;
    int64_t max_at, nan_a, inf_a, nan_b, inf_b;
} stats;

/* Sums and maxima of the lanes, by halves. */
#define FOLD(NAME, VECTOR, NUMBER, LANES, WITH)                                                                           \
    INLINE double NAME(VECTOR x)                                                                                          \
    {                                                                                                                     \
        NUMBER lane[LANES];                                                                                               \
        memcpy(lane, &x, sizeof x);                                                                                       \
        for (int half = LANES / 2; half; half /= 2)                                                                       \
            for (int i = 0; i < half; i++)                                                                                \
                lane[i] = WITH(lane[i], lane[i + half]);                                                                  \
        return lane[0];                                                                                                   \
    }
#define PLUS(x, y) ((x) + (y))
#define LARGER(x, y) ((x) > (y) ? (x) : (y))
FOLD(sum_doubles, doubles, double, DOUBLES, PLUS)
FOLD(max_doubles, doubles, double, DOUBLES, LARGER)
FOLD(max_floats, floats, float, FLOATS, LARGER)

/* How both tensors of a pair are read; a constant wherever vectors are loaded. */
typedef enum { AS_F64, AS_F32, AS_BF16 } form;

static const int64_t FORM_DTYPE[] = {F64, F32, BF16};

/* One of the two that are compared. */
typedef struct {
    const tensor *terms;
    int64_t num_terms;
} side;

static int is_plain(side s) { return s.num_terms == 1 && s.terms->dtype != F64 && s.terms->factor == 1.0; }

static form form_of(side a, side b)
{
    if (!is_plain(a) || !is_plain(b))
        return AS_F64;
    return a.terms->dtype == BF16 && b.terms->dtype == BF16 ? AS_BF16 : AS_F32;
}

INLINE void load_doubles(doubles x[2], const void *data, int64_t i, form how)
{
    if (how == AS_F32) {
        x[0] = DOUBLES_OF_F32((const any_float *)data + i);
        x[1] = DOUBLES_OF_F32((const any_float *)data + i + DOUBLES);
    } else {
        memcpy(&x[0], (const any_double *)data + i, WIDTH);
        memcpy(&x[1], (const any_double *)data + i + DOUBLES, WIDTH);
    }
}

/* For bf16: the even elements, then the odd ones, which is one instruction each. Both tensors have the same order. */
INLINE void load_floats(floats x[2], const void *data, int64_t i, form how)
{
    words32 both;
    (void)how;
    memcpy(&both, (const any_word16 *)data + i, WIDTH);
    x[0] = (floats)(both << 16);
    x[1] = (floats)(both & 0xffff0000u);
}

/* Declares two vectors of each sum, which hides the latency of adding, and fills them. */
#define SUMS(VECTOR, LANES, BITS, MAGNITUDE, KIND, MOST)                                                                  \
    VECTOR aa[2] = {{0}}, bb[2] = {{0}}, dd[2] = {{0}}, ab[2] = {{0}}, most[2] = {{0}};                                   \
    for (int64_t i = 0; i < n; i += 2 * LANES) {                                                                          \
        VECTOR x[2], y[2];                                                                                                \
        __builtin_prefetch((const char *)a + i * SIZE[FORM_DTYPE[how]] + AHEAD);                                          \
        __builtin_prefetch((const char *)b + i * SIZE[FORM_DTYPE[how]] + AHEAD);                                          \
        load_##KIND(x, a, i, how);                                                                                        \
        load_##KIND(y, b, i, how);                                                                                        \
        for (int j = 0; j < 2; j++) {                                                                                     \
            VECTOR d = x[j] - y[j];                                                                                       \
            aa[j] += x[j] * x[j];                                                                                         \
            bb[j] += y[j] * y[j];                                                                                         \
            dd[j] += d * d;                                                                                               \
            ab[j] += x[j] * y[j];                                                                                         \
            most[j] = MOST((VECTOR)((BITS)d & MAGNITUDE), most[j]);                                                       \
        }                                                                                                                 \
    }

/* n is a multiple of STEP. */
INLINE sums double_sums(const void *a, const void *b, int64_t n, form how)
{
    SUMS(doubles, DOUBLES, words64, 0x7fffffffffffffffu, doubles, LARGER_DOUBLES)
    return (sums){sum_doubles(aa[0] + aa[1]), sum_doubles(bb[0] + bb[1]), sum_doubles(dd[0] + dd[1]),
                  sum_doubles(ab[0] + ab[1]), max_doubles(LARGER_DOUBLES(most[0], most[1]))};
}

INLINE doubles widened(floats x)
{
    float lane[FLOATS];
    memcpy(lane, &x, sizeof x);
    return DOUBLES_OF_F32(lane) + DOUBLES_OF_F32(lane + DOUBLES);
}

INLINE floats add_floats(const any_word16 *a, const any_word16 *b, int64_t n, doubles total[4])
{
    const form how = AS_BF16;
    SUMS(floats, FLOATS, words32, 0x7fffffffu, floats, LARGER_FLOATS)
    total[0] += widened(aa[0] + aa[1]);
    total[1] += widened(bb[0] + bb[1]);
    total[2] += widened(dd[0] + dd[1]);
    total[3] += widened(ab[0] + ab[1]);
    return LARGER_FLOATS(most[0], most[1]);
}

/* For bf16. A lane adds up at most DEPTH products before it is widened, so norms are accurate to 1e-6 for all numbers. */
INLINE sums float_sums(const any_word16 *a, const any_word16 *b, int64_t n)
{
    doubles total[4] = {{0}};
    floats most = {0};
    for (int64_t at = 0; at < n; at += 2 * FLOATS * DEPTH) {
        floats found = add_floats(a + at, b + at, smaller(2 * FLOATS * DEPTH, n - at), total);
        most = LARGER_FLOATS(found, most);
    }
    return (sums){sum_doubles(total[0]), sum_doubles(total[1]), sum_doubles(total[2]), sum_doubles(total[3]),
                  max_floats(most)};
}

INLINE int is_finite(double x) { return x - x == 0.0; }
INLINE int are_finite(sums s) { return is_finite(s.aa) && is_finite(s.bb) && is_finite(s.dd) && is_finite(s.ab); }
INLINE int are_sound(sums s)
{
    return are_finite(s) && s.aa > TINY && s.bb > TINY && (s.dd > TINY || s.max_diff == 0.0);
}

INLINE double element(const void *data, int64_t i, form how)
{
    if (how == AS_BF16)
        return float_of_bf16(((const any_word16 *)data)[i]);
    return how == AS_F64 ? ((const any_double *)data)[i] : ((const any_float *)data)[i];
}

static void count_other(double x, int64_t *nan, int64_t *inf)
{
    if (x != x)
        ++*nan;
    else if (!is_finite(x))
        ++*inf;
}

/* A block with numbers or sums that are not finite. */
static void add_one_by_one(const void *a, const void *b, int64_t n, form how, int64_t at, stats *out)
{
    for (int64_t i = 0; i < n; i++) {
        double x = element(a, i, how), y = element(b, i, how), d = x - y;
        count_other(x, &out->nan_a, &out->inf_a);
        count_other(y, &out->nan_b, &out->inf_b);
        if (!is_finite(x) || !is_finite(y))
            continue;
        out->aa += x * x;
        out->bb += y * y;
        out->dd += d * d;
        out->ab += x * y;
        d = d < 0 ? -d : d;
        if (d > out->max_diff) {
            out->max_diff = d;
            out->max_at = at + i;
        }
    }
}

static void locate(const void *a, const void *b, int64_t n, form how, int64_t at, stats *out)
{
    for (int64_t i = 0; i < n; i++) {
        double d = element(a, i, how) - element(b, i, how);
        d = d < 0 ? -d : d;
        if (d > out->max_diff) {
            out->max_diff = d;
            out->max_at = at + i;
        }
    }
}

static sums bf16_sums(const void *a, const void *b, int64_t n)
{
    float x[BLOCK], y[BLOCK];
    sums found = float_sums(a, b, n);
    if (are_sound(found))
        return found;
    floats_of(a, BF16, n, x);
    floats_of(b, BF16, n, y);
    return double_sums(x, y, n, AS_F32);
}

static void add_whole_steps(const void *a, const void *b, int64_t n, form how, int64_t at, stats *out)
{
    sums found = how == AS_F64   ? double_sums(a, b, n, AS_F64)
                 : how == AS_F32 ? double_sums(a, b, n, AS_F32)
                                 : bf16_sums(a, b, n);
    if (!are_finite(found)) {
        add_one_by_one(a, b, n, how, at, out);
        return;
    }
    out->aa += found.aa;
    out->bb += found.bb;
    out->dd += found.dd;
    out->ab += found.ab;
    /* In float32 the largest difference may have been rounded up to a tie; the first of them stays. */
    if (found.max_diff > out->max_diff)
        locate(a, b, n, how, at, out);
}

static void add_block(const void *a, const void *b, int64_t n, form how, int64_t at, stats *out)
{
    const int64_t size = SIZE[FORM_DTYPE[how]], whole = n - n % STEP, rest = n - whole;
    if (whole)
        add_whole_steps(a, b, whole, how, at, out);
    if (rest) {
        double x[STEP] = {0}, y[STEP] = {0};
        memcpy(x, (const char *)a + whole * size, (size_t)(rest * size));
        memcpy(y, (const char *)b + whole * size, (size_t)(rest * size));
        add_whole_steps(x, y, STEP, how, at + whole, out);
    }
}

/* Some rows of a tensor, or a part of one row. */
typedef struct {
    int64_t row, num_rows, column, num_columns;
} rows;

INLINE void prefetch_row(const char *row, int64_t num_bytes)
{
    for (int64_t line = 0; line < smaller(num_bytes, 512); line += 64)
        __builtin_prefetch(row + line);
}

/* The address of a part that is contiguous; NULL if it is not. */
INLINE const char *in_place(const tensor *t, const int64_t *shape, int64_t num_dims, rows part)
{
    if (t->strides[num_dims - 1] != 1 || (part.num_rows > 1 && !is_contiguous(shape, t->strides, num_dims)))
        return NULL;
    return t->data + (row_offset(part.row, shape, t->strides, num_dims) + part.column) * SIZE[t->dtype];
}

static const void *fetched(const tensor *t, const int64_t *shape, int64_t num_dims, rows part, form how, room *space)
{
    const int64_t size = SIZE[t->dtype], n = part.num_rows * part.num_columns, stride = t->strides[num_dims - 1];
    const char *data = in_place(t, shape, num_dims, part);
    if (!data) {
        char *to = (char *)space->raw;
        for (int64_t i = 0; i < part.num_rows; i++, to += part.num_columns * size) {
            int64_t offset = row_offset(part.row + i, shape, t->strides, num_dims) + part.column * stride;
            /* No processor predicts the next row if rows are far apart. Prefetching past the end is harmless. */
            prefetch_row(t->data + (offset + ROWS_AHEAD * t->strides[num_dims > 1 ? num_dims - 2 : 0]) * size,
                         part.num_columns * size);
            copy_run(to, t->data + offset * size, part.num_columns, stride, size);
        }
        data = (const char *)space->raw;
    }
    if (how == AS_F32 && t->dtype != F32) {
        floats_of(data, t->dtype, n, (float *)space->wide);
        return space->wide;
    }
    if (how == AS_F64 && (t->dtype != F64 || t->factor != 1.0)) {
        doubles_of(data, t->dtype, n, space->wide);
        for (int64_t i = 0; t->factor != 1.0 && i < n; i++)
            space->wide[i] *= t->factor;
        return space->wide;
    }
    return data;
}

/* The update of a parameter, after minus before: the most frequent sum, so it needs no buffers. */
static int added_two(side s, const int64_t *shape, int64_t num_dims, rows part, double *to)
{
    const int64_t n = part.num_rows * part.num_columns;
    const char *x, *y;
    if (s.num_terms != 2 || s.terms[0].dtype != F32 || s.terms[1].dtype != F32)
        return 0;
    x = in_place(&s.terms[0], shape, num_dims, part);
    y = in_place(&s.terms[1], shape, num_dims, part);
    if (!x || !y)
        return 0;
    for (int64_t i = 0; i < n; i++)
        to[i] = s.terms[0].factor * ((const any_float *)x)[i] + s.terms[1].factor * ((const any_float *)y)[i];
    return 1;
}

static const void *summed(side s, const int64_t *shape, int64_t num_dims, rows part, form how, room *space)
{
    if (s.num_terms == 1)
        return fetched(s.terms, shape, num_dims, part, how, space);
    if (added_two(s, shape, num_dims, part, space->total))
        return space->total;
    for (int64_t term = 0; term < s.num_terms; term++) {
        const any_double *x = fetched(&s.terms[term], shape, num_dims, part, AS_F64, space);
        for (int64_t i = 0; i < part.num_rows * part.num_columns; i++)
            space->total[i] = term ? space->total[i] + x[i] : x[i];
    }
    return space->total;
}

/* Compares the sum of b's terms with that of a's. All have this shape, of at least one dim and one element; max_at counts in
   row-major order. */
void EXPORT(stats)(const tensor *a, int64_t num_a, const tensor *b, int64_t num_b, const int64_t *shape, int64_t num_dims,
                   stats *out)
{
    const side left = {a, num_a}, right = {b, num_b};
    const form how = form_of(left, right);
    const int64_t columns = shape[num_dims - 1], together = columns < SHORT_ROW ? BLOCK / columns : 1;
    int64_t num_rows = 1;
    room space_a, space_b;
    for (int64_t dim = 0; dim < num_dims - 1; dim++)
        num_rows *= shape[dim];
    *out = (stats){.max_at = -1};
    for (int64_t row = 0; row < num_rows; row += together)
        for (int64_t column = 0; column < columns; column += BLOCK) {
            rows part = {row, smaller(together, num_rows - row), column, smaller(BLOCK, columns - column)};
            const void *x = summed(left, shape, num_dims, part, how, &space_a);
            const void *y = summed(right, shape, num_dims, part, how, &space_b);
            add_block(x, y, part.num_rows * part.num_columns, how, row * columns + column, out);
        }
}

/* The fastest possible pass over both: it only reads them. The benchmarks compare with it. */
uint64_t EXPORT(read)(const char *a, const char *b, int64_t num_bytes)
{
    words64 found[4] = {{0}};
    for (int64_t i = 0; i + 4 * WIDTH <= num_bytes; i += 4 * WIDTH)
        for (int j = 0; j < 4; j++) {
            words64 x, y;
            memcpy(&x, a + i + j * WIDTH, WIDTH);
            memcpy(&y, b + i + j * WIDTH, WIDTH);
            found[j] ^= x + y;
        }
    found[0] ^= found[1] ^ found[2] ^ found[3];
    uint64_t total = 0;
    for (int i = 0; i < DOUBLES; i++)
        total ^= found[0][i];
    return total;
}
