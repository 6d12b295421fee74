/* Vectors as wide as the instruction set this file is compiled for, in the notation that GCC and clang share.

   Every .c file here is compiled once per variant with -DVARIANT=avx512 (or avx2, sse2, neon) and the flags that go with
   it; EXPORT(stats) is then ttrace_stats_avx512. hatch_build.py has the list. */
#ifndef TTRACE_LANES_H
#define TTRACE_LANES_H

#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define WIDTH 64
#elif defined(__AVX2__)
#define WIDTH 32
#else
#define WIDTH 16
#endif

#define FLOATS (WIDTH / 4)
#define DOUBLES (WIDTH / 8)

typedef float floats __attribute__((vector_size(WIDTH)));
typedef double doubles __attribute__((vector_size(WIDTH)));
typedef uint32_t words32 __attribute__((vector_size(WIDTH)));
typedef uint64_t words64 __attribute__((vector_size(WIDTH)));

/* Numbers at any address: tensors in a mapped file may not be aligned. */
typedef uint16_t any_word16 __attribute__((aligned(1), may_alias));
typedef uint32_t any_word32 __attribute__((aligned(1), may_alias));
typedef uint64_t any_word64 __attribute__((aligned(1), may_alias));
typedef float any_float __attribute__((aligned(1), may_alias));
typedef double any_double __attribute__((aligned(1), may_alias));

/* What the shared notation lacks in C, or what compilers translate into slow code: the larger of two, lane by lane, and float32
   and bf16 numbers read as float64. */
#if defined(__AVX512F__)
#include <immintrin.h>
#define LARGER_FLOATS(x, y) (floats)_mm512_max_ps((__m512)(x), (__m512)(y))
#define LARGER_DOUBLES(x, y) (doubles)_mm512_max_pd((__m512d)(x), (__m512d)(y))
#define DOUBLES_OF_F32(at) (doubles)_mm512_cvtps_pd(_mm256_loadu_ps(at))
#define DOUBLES_OF_BF16(at)                                                                                               \
    (doubles)_mm512_cvtps_pd(                                                                                             \
        _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(at))), 16)))
#elif defined(__AVX2__)
#include <immintrin.h>
#define LARGER_FLOATS(x, y) (floats)_mm256_max_ps((__m256)(x), (__m256)(y))
#define LARGER_DOUBLES(x, y) (doubles)_mm256_max_pd((__m256d)(x), (__m256d)(y))
#define DOUBLES_OF_F32(at) (doubles)_mm256_cvtps_pd(_mm_loadu_ps(at))
#define DOUBLES_OF_BF16(at)                                                                                               \
    (doubles)_mm256_cvtps_pd(                                                                                             \
        _mm_castsi128_ps(_mm_slli_epi32(_mm_cvtepu16_epi32(_mm_loadl_epi64((const __m128i *)(at))), 16)))
#elif defined(__SSE2__)
#include <immintrin.h>
#define LARGER_FLOATS(x, y) (floats)_mm_max_ps((__m128)(x), (__m128)(y))
#define LARGER_DOUBLES(x, y) (doubles)_mm_max_pd((__m128d)(x), (__m128d)(y))
#define DOUBLES_OF_F32(at) (doubles)_mm_cvtps_pd(_mm_castsi128_ps(_mm_loadl_epi64((const __m128i *)(at))))
#define DOUBLES_OF_BF16(at)                                                                                               \
    (doubles)_mm_cvtps_pd(_mm_castsi128_ps(_mm_unpacklo_epi16(_mm_setzero_si128(), _mm_loadu_si32(at))))
#elif defined(__aarch64__)
#include <arm_neon.h>
#define LARGER_FLOATS(x, y) (floats)vmaxnmq_f32((float32x4_t)(x), (float32x4_t)(y))
#define LARGER_DOUBLES(x, y) (doubles)vmaxnmq_f64((float64x2_t)(x), (float64x2_t)(y))
#define DOUBLES_OF_F32(at) (doubles)vcvt_f64_f32(vld1_f32(at))
#define DOUBLES_OF_BF16(at)                                                                                               \
    (doubles)vcvt_f64_f32((float32x2_t){float_of_bf16((at)[0]), float_of_bf16((at)[1])})
#else
#error "no vectors are known for this processor; the package works without this library"
#endif

#define JOIN_(name, variant) ttrace_##name##_##variant
#define JOIN(name, variant) JOIN_(name, variant)
#define EXPORT(name) JOIN(name, VARIANT)
#define INLINE static inline __attribute__((always_inline))

/* Dtypes, in the order of DTYPES in library.py. */
enum { F64, F32, BF16, F16, E4M3, E5M2 };

static const int64_t SIZE[] = {8, 4, 2, 2, 1, 1};

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE float float_of_bits(uint32_t bits)
{
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

INLINE float float_of_bf16(uint16_t bits) { return float_of_bits((uint32_t)bits << 16); }

#endif
