/* What this CPU runs: one fa_cpu_has_<isa>() for every line of isa.inc; what of it is slow; its second-level cache. */
#include "fastattn.h"

#ifdef FA_EMULATE_TILES
#define FA_EMULATED_TILES 1
#else
#define FA_EMULATED_TILES 0
#endif

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
#elif defined _WIN32
#define WIN32_LEAN_AND_MEAN
#include <stdlib.h>
#include <windows.h>

int64_t fa_level2_cache(void)
{
    DWORD size = 0;
    GetLogicalProcessorInformation(NULL, &size);
    SYSTEM_LOGICAL_PROCESSOR_INFORMATION *all = malloc(size + 1);
    int64_t bytes = 0;
    if (all && GetLogicalProcessorInformation(all, &size))
        for (DWORD i = 0; i < size / sizeof *all && !bytes; i++)
            if (all[i].Relationship == RelationCache && all[i].Cache.Level == 2) bytes = all[i].Cache.Size;
    free(all);
    return bytes;
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

/* CPUID itself: what __builtin_cpu_supports() needs of the compiler's library is not linked on Windows. */
typedef struct {
    unsigned a, b, c, d;
} words;

static words cpuid(unsigned leaf, unsigned part)
{
    words w = {0, 0, 0, 0}; /* of a CPU that has no such leaf */
    __get_cpuid_count(leaf, part, &w.a, &w.b, &w.c, &w.d);
    return w;
}

static int has(unsigned word, unsigned bits) { return (word & bits) == bits; }

/* Whether the system saves these registers at a context switch. */
static int saves(unsigned states)
{
    unsigned low, high;
    if (!has(cpuid(1, 0).c, 1u << 27)) return 0; /* OSXSAVE: XGETBV may be asked */
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return has(low, states);
}

int fa_cpu_has_avx2(void)
{
    return saves(0x06) && has(cpuid(1, 0).c, 1u << 12 | 1u << 28 | 1u << 29) && /* FMA, AVX, F16C */
           has(cpuid(7, 0).b, 1u << 5);
}

int fa_cpu_has_avx512(void)
{
#ifndef __APPLE__ /* which saves them from their first use on, and does not say so before */
    if (!saves(0xe6)) return 0;
#endif
    return fa_cpu_has_avx2() && has(cpuid(7, 0).b, 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31); /* F, DQ, BW, VL */
}

int fa_cpu_has_avx512vnni(void) { return fa_cpu_has_avx512() && has(cpuid(7, 0).c, 1u << 11); }

int fa_cpu_has_avx512bf16(void) { return fa_cpu_has_avx512vnni() && has(cpuid(7, 1).a, 1u << 5); }

int fa_cpu_has_amx(void)
{
#ifdef FA_EMULATE_TILES
    return FA_EMULATE_TILES();
#else /* BF16, TILE, INT8; the system saves tiles and their configuration */
    return fa_cpu_has_avx512bf16() && has(cpuid(7, 0).d, 1u << 22 | 1u << 24 | 1u << 25) && saves(3u << 17);
#endif
}

int fa_cpu_has_avxvnni(void) { return fa_cpu_has_avx2() && has(cpuid(7, 1).a, 1u << 4); }

/* Intel's begin a vdpbf16ps every other cycle, but two multiply-adds in each: a Granite Rapids has 115 GFLOP/s of the
 * one and 230 of the other, AMD's from Zen 4 on twice as many of pairs (docs/dev/intel.md). */
int fa_cpu_slow_pairs(void)
{
    const words vendor = cpuid(0, 0);
    return vendor.b == signature_INTEL_ebx && vendor.d == signature_INTEL_edx && vendor.c == signature_INTEL_ecx;
}
#else
int fa_cpu_slow_pairs(void) { return 0; }
#endif

#if defined __x86_64__ && defined __linux__ && !defined FA_EMULATE_TILES
#include <sys/syscall.h>

enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };

/* The process has them from then on. Refused where a thread's sigaltstack has less than 12 KB, which the frame of a signal
 * takes with tiles; granted, the system refuses such a sigaltstack. */
int fa_cpu_ask_tiles(void) { return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0; }
#else
int fa_cpu_ask_tiles(void) { return FA_EMULATED_TILES; }
#endif

#if defined __aarch64__
#if defined __linux__
#include <sys/auxv.h>
int fa_cpu_has_neondot(void) { return (getauxval(AT_HWCAP) & 1 << 20) != 0; } /* HWCAP_ASIMDDP */

/* HWCAP2_I8MM, HWCAP2_BF16 */
int fa_cpu_has_neoni8mm(void) { return fa_cpu_has_neondot() && (getauxval(AT_HWCAP2) & 1 << 13) != 0; }
int fa_cpu_has_neonbf16(void) { return fa_cpu_has_neoni8mm() && (getauxval(AT_HWCAP2) & 1 << 14) != 0; }
#elif defined __APPLE__
int fa_cpu_has_neondot(void) { return 1; } /* since the first of Apple's own */

/* Both since the M2. */
int fa_cpu_has_neoni8mm(void) { return number("hw.optional.arm.FEAT_I8MM") != 0; }
int fa_cpu_has_neonbf16(void) { return fa_cpu_has_neoni8mm() && number("hw.optional.arm.FEAT_BF16") != 0; }
#else
int fa_cpu_has_neondot(void) { return 0; }
int fa_cpu_has_neoni8mm(void) { return 0; }
int fa_cpu_has_neonbf16(void) { return 0; }
#endif

int fa_cpu_has_neon(void) { return 1; /* part of the base architecture */ }
#endif

int fa_cpu_has_generic(void) { return 1; }
