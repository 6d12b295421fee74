/* Which variants this processor can run.

   This asks the processor directly: __builtin_cpu_supports needs a library that not every compiler ships with (zig's does
   not). An instruction set is usable if the processor has it and the system saves its registers. */

#if defined(__x86_64__)
#include <cpuid.h>

#define FMA (1u << 12) /* leaf 1, ecx */
#define OSXSAVE (1u << 27)
#define AVX (1u << 28)
#define AVX2 (1u << 5) /* leaf 7, ebx */
#define AVX512 (1u << 16 | 1u << 17 | 1u << 30 | 1u << 31) /* F, DQ, BW, VL */
#define YMM 0x06u /* the registers that the system saves */
#define ZMM 0xe6u

static int has(unsigned wanted, unsigned registers)
{
    unsigned eax, ebx, ecx, edx, saved, high;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || (ecx & (FMA | OSXSAVE | AVX)) != (FMA | OSXSAVE | AVX))
        return 0;
    __asm__ volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
    if ((saved & registers) != registers || !__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx))
        return 0;
    return (ebx & wanted) == wanted;
}
#endif

int ttrace_can_run_sse2(void)
{
#if defined(__x86_64__)
    return 1;
#else
    return 0;
#endif
}

int ttrace_can_run_avx2(void)
{
#if defined(__x86_64__)
    return has(AVX2, YMM);
#else
    return 0;
#endif
}

int ttrace_can_run_avx512(void)
{
#if defined(__x86_64__)
    return has(AVX512, ZMM);
#else
    return 0;
#endif
}

int ttrace_can_run_neon(void)
{
#if defined(__aarch64__)
    return 1;
#else
    return 0;
#endif
}
