/* Which variants this processor can run. */

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
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
    return 0;
#endif
}

int ttrace_can_run_avx512(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma");
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
