/* What this CPU runs: one fa_cpu_has_<isa>() for every line of isa.inc; and its second-level cache. */
#include "fastattn.h"

#if defined __APPLE__
#include <sys/sysctl.h>

static int64_t number(const char *name)
{
    int64_t n = 0; /* some are of 32 bits */
    size_t size = sizeof n;
    return sysctlbyname(name, &n, &size, NULL, 0) == 0 && n > 0 ? n : 0;
}

int64_t fa_level2_cache(void)
{
    const int64_t shared = number("hw.perflevel0.l2cachesize"), cores = number("hw.perflevel0.cpusperl2");
    return shared ? shared / (cores ? cores : 1) : number("hw.l2cachesize"); /* the latter of an Intel */
}
#else
#include <unistd.h>

int64_t fa_level2_cache(void)
{
#ifdef _SC_LEVEL2_CACHE_SIZE
    const long bytes = sysconf(_SC_LEVEL2_CACHE_SIZE);
    return bytes > 0 ? bytes : 0;
#else
    return 0;
#endif
}
#endif

#if defined __x86_64__
#include <cpuid.h>

/* libgcc and compiler-rt ask CPUID, and XGETBV for what the system saves at a context switch. */
int fa_cpu_has_avx2(void)
{
    unsigned a, b, c, d; /* older clangs do not know F16C by name */
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __get_cpuid(1, &a, &b, &c, &d) &&
           (c & bit_F16C);
}

int fa_cpu_has_avx512(void)
{
    return fa_cpu_has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

int fa_cpu_has_avx512vnni(void) { return fa_cpu_has_avx512() && __builtin_cpu_supports("avx512vnni"); }

int fa_cpu_has_avx512bf16(void) { return fa_cpu_has_avx512vnni() && __builtin_cpu_supports("avx512bf16"); }

int fa_cpu_has_avxvnni(void)
{
    unsigned a, b, c, d;
    return fa_cpu_has_avx2() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1 << 4);
}
#endif

#if defined __aarch64__
#if defined __linux__
#include <sys/auxv.h>
int fa_cpu_has_neondot(void) { return (getauxval(AT_HWCAP) & 1 << 20) != 0; } /* HWCAP_ASIMDDP */

/* HWCAP2_I8MM */
int fa_cpu_has_neoni8mm(void) { return fa_cpu_has_neondot() && (getauxval(AT_HWCAP2) & 1 << 13) != 0; }
#elif defined __APPLE__
int fa_cpu_has_neondot(void) { return 1; } /* since the first of Apple's own */

int fa_cpu_has_neoni8mm(void) { return number("hw.optional.arm.FEAT_I8MM") != 0; } /* since the M2 */
#else
int fa_cpu_has_neondot(void) { return 0; }
int fa_cpu_has_neoni8mm(void) { return 0; }
#endif

int fa_cpu_has_neon(void) { return 1; /* part of the base architecture */ }
#endif

int fa_cpu_has_generic(void) { return 1; }
