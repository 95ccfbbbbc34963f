/* The vector type and its operations. Intrinsics are here, in simd_narrow.h and in simd_amx.h, which this includes, and
 * in tile_amx.inc.h, for one instruction set.
 *
 * One lane type a compilation: FA_LANE_F64 makes it double, else float. v_t is a native register of LANES lanes, vi_t
 * the signed integers of the same width; + - * / < & work on both (GNU vector extensions). A comparison gives a vi_t
 * of all-ones or zero lanes, as v_select and v_any take it. Names and meanings are the same on every ISA.
 *
 *   v_load v_store          any alignment            v_load_n v_store_n    the first n lanes; the others read as 0
 *   v_splat                 every lane               v_fma(a, b, c)       a * b + c; fused but on `generic`
 *   v_max(bound, x)         x where x is NaN, as v_min            v_select(mask, a, b)  a where mask, else b
 *   v_any(mask)             some lane set            v_transpose(r)       LANES registers, in place
 *   v_recip(x)              1 / x within a unit in the last place, x neither tiny nor huge          v_sqrt(x)
 *   v_sum v_max_lanes       over the lanes           v_sum_each(r)        of LANES registers, one a lane; v_sum_each_i
 *   v_max_i                 of integers              v_max_each            the largest of the lanes, as v_sum_each
 *   v_pack_lanes(p, mask, x)  lanes of integers that mask has, side by side; a vector is written. Their number
 *   v_mul_wide(a, b)        products of the lower halves of 64-bit lanes: whole
 *   v_upper(a)              upper halves of 64-bit lanes, in the lower ones
 *   v_stream                a store, aligned, that leaves the caches alone; v_stream_end() orders it before later ones */
#ifndef FASTATTN_SIMD_H
#define FASTATTN_SIMD_H

#include "interface/arrays.h"
#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline, unused))
#define NOINLINE static __attribute__((noinline, unused)) /* large, and called from several places */

#include "isa_constants.h"

#if defined __AVX512F__ && !defined FA_GENERIC
#define V_AVX512 1
#endif
#if defined V_AVX512 || V_BYTES == 32
#include <immintrin.h>
#define V_X86 1
#elif defined __aarch64__ && !defined FA_GENERIC
#include <arm_neon.h>
#define V_NEON 1
#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
#define V_NEON_BF16 1
#endif
#endif

#ifdef FA_LANE_F64
typedef double lane;
typedef int64_t ilane;
typedef uint64_t wlane;
#define LANE_BITS 64
#define LANE_MIN 2.2250738585072014e-308 /* normal */
#define LANE_MAX 1.7976931348623157e308
#define LANE_SQRT sqrt
#define LANE_DTYPE FA_F64
#define LANE_NAME f64
#else
typedef float lane;
typedef int32_t ilane;
typedef uint32_t wlane;
#define LANE_BITS 32
#define LANE_MIN 1.17549435082228750797e-38f
#define LANE_MAX 3.40282346638528859812e38f
#define LANE_SQRT sqrtf
#define LANE_DTYPE FA_F32
#define LANE_NAME f32
#endif

#if LANE_BITS == 32 && (defined __AMX_TILE__ || defined FA_EMULATE_TILES)
#define V_AMX 1
#else
#define V_AMX 0
#endif
#if LANE_BITS == 32 && (V_AMX || defined __AVX512BF16__ || defined V_NEON_BF16 || defined FA_EMULATE_BF16_DOT)
#define V_BF16_DOT 1
#else
#define V_BF16_DOT 0
#endif

#define LANES (V_BYTES * 8 / LANE_BITS)
typedef lane v_t __attribute__((vector_size(V_BYTES)));
typedef ilane vi_t __attribute__((vector_size(V_BYTES)));
typedef wlane vw_t __attribute__((vector_size(V_BYTES)));
typedef uint64_t vq_t __attribute__((vector_size(V_BYTES)));
typedef v_t vu_t __attribute__((aligned(1), may_alias));
typedef lane lane_u __attribute__((aligned(1), may_alias)); /* a lane anywhere in memory */
typedef int64_t int64_u __attribute__((aligned(1), may_alias));

/* The intrinsic of this width and lane type: MM(fmadd) is _mm512_fmadd_ps with AVX-512 and float lanes. */
#if defined V_AVX512 && LANE_BITS == 64
#define MM(op) _mm512_##op##_pd
#elif defined V_AVX512
#define MM(op) _mm512_##op##_ps
#elif LANE_BITS == 64
#define MM(op) _mm256_##op##_pd
#else
#define MM(op) _mm256_##op##_ps
#endif
#define MM_MASK(n) ((1u << (n)) - 1) /* AVX-512: the first n lanes */

/* (a[0], b[0], a[1], b[1], ...) of the lower halves, and of the upper. */
#if defined __clang__ || __GNUC__ >= 12
#define V_SHUFFLE(type, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define V_SHUFFLE(type, a, b, ...) __builtin_shuffle(a, b, (type){__VA_ARGS__})
#endif
#if LANES == 16
#define V_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define V_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif LANES == 8
#define V_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define V_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#elif LANES == 4
#define V_LOW 0, 4, 1, 5
#define V_HIGH 2, 6, 3, 7
#else
#define V_LOW 0, 2
#define V_HIGH 1, 3
#endif
#define V_ZIP_LOW(a, b) V_SHUFFLE(vi_t, a, b, V_LOW)
#define V_ZIP_HIGH(a, b) V_SHUFFLE(vi_t, a, b, V_HIGH)
#define UNROLL_FOR _Pragma("GCC unroll 16") for
#define UNROLL_2_FOR _Pragma("GCC unroll 2") for /* 5% where four instructions issue a cycle: 29 a step, 16 of them FMA */
/* clang sees that addresses lie a constant apart, derives one from the other, and gathers the loads of several steps
 * before the arithmetic: more than there are registers. Of a hidden number it cannot see that. Short loops that it
 * unrolls of itself suffer likewise. gcc needs neither: docs/dev/compilers.md. */
#ifdef __clang__
#define HIDE(number) __asm__("" : "+r"(number))
#define ROLLED_FOR _Pragma("GCC unroll 1") for
#else
#define HIDE(number) ((void)0)
#define ROLLED_FOR for
#endif

INLINE v_t v_load(const void *p) { return *(const vu_t *)p; }
INLINE void v_store(void *p, v_t a) { *(vu_t *)p = a; }

INLINE v_t v_load_n(const void *p, int64_t n)
{
#if defined V_AVX512
    return MM(maskz_loadu)(MM_MASK(n), p);
#else
    v_t a = {0};
    memcpy(&a, p, n * sizeof(lane));
    return a;
#endif
}

INLINE void v_store_n(void *p, v_t a, int64_t n)
{
#if defined V_AVX512
    MM(mask_storeu)(p, MM_MASK(n), a);
#else
    memcpy(p, &a, n * sizeof(lane));
#endif
}

/* Past the caches where a vector is a whole line: a line is not read before it is written. */
INLINE void v_stream(void *p, v_t a)
{
#if defined V_AVX512
    MM(stream)(p, a);
#else
    v_store(p, a);
#endif
}

INLINE void v_stream_end(void)
{
#if defined V_AVX512
    _mm_sfence();
#endif
}

INLINE v_t v_splat(lane a) { return a - (v_t){0}; }

INLINE v_t v_fma(v_t a, v_t b, v_t c)
{
#if defined V_X86
    return MM(fmadd)(a, b, c);
#elif defined V_NEON && LANE_BITS == 64
    return vfmaq_f64(c, a, b);
#elif defined V_NEON
    return vfmaq_f32(c, a, b);
#elif V_AMX
    UNROLL_FOR(int i = 0; i < LANES; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#else
    return a * b + c;
#endif
}

INLINE v_t v_sqrt(v_t x)
{
#if defined V_X86
    return MM(sqrt)(x);
#elif defined V_NEON && LANE_BITS == 64
    return vsqrtq_f64(x);
#elif defined V_NEON
    return vsqrtq_f32(x);
#else
    UNROLL_FOR(int i = 0; i < LANES; i++) x[i] = LANE_SQRT(x[i]);
    return x;
#endif
}

INLINE v_t v_select(vi_t mask, v_t a, v_t b) { return (v_t)((mask & (vi_t)a) | (~mask & (vi_t)b)); }

INLINE v_t v_max(v_t bound, v_t x)
{
#if defined V_X86
    return MM(max)(bound, x); /* the second operand where either is NaN */
#else
    return v_select(bound > x, bound, x);
#endif
}

INLINE v_t v_abs(v_t x) { return v_max(-x, x); }

INLINE v_t v_min(v_t bound, v_t x)
{
#if defined V_X86
    return MM(min)(bound, x);
#else
    return v_select(bound < x, bound, x);
#endif
}

/* An estimate of 14 bits and a Newton step where a division takes sixteen multiplications: 512 bits on Intel. */
INLINE v_t v_recip(v_t x)
{
#if defined V_AVX512 && LANE_BITS == 32
    const v_t r = _mm512_rcp14_ps(x);
    return v_fma(v_fma(-x, r, v_splat(1)), r, r);
#else
    return 1 / x;
#endif
}

INLINE int v_any(vi_t mask)
{
#if defined V_AVX512 && LANE_BITS == 64
    return _mm512_movepi64_mask((__m512i)mask) != 0;
#elif defined V_AVX512
    return _mm512_movepi32_mask((__m512i)mask) != 0;
#elif defined V_X86
    return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#else
    uint64_t words[V_BYTES / 8], any = 0;
    memcpy(words, &mask, sizeof words);
    UNROLL_FOR(int i = 0; i < V_BYTES / 8; i++) any |= words[i];
    return any != 0;
#endif
}

/* log2(LANES) rounds of zipping register i with register i + LANES / 2. With 16 lanes, shuffles within 128 bits, and
 * then of these, take less than half the time: 5 ns for 12. */
INLINE void v_transpose(v_t r[LANES])
{
    v_t zipped[LANES];
#if defined V_AVX512 && LANE_BITS == 32
    UNROLL_FOR(int i = 0; i < LANES; i += 2) {
        zipped[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        zipped[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
    UNROLL_FOR(int i = 0; i < LANES; i += 4)
        UNROLL_FOR(int half = 0; half < 2; half++) {
            const __m512d low = (__m512d)zipped[i + half], high = (__m512d)zipped[i + half + 2];
            r[i + 2 * half] = (v_t)_mm512_unpacklo_pd(low, high);
            r[i + 2 * half + 1] = (v_t)_mm512_unpackhi_pd(low, high);
        }
    UNROLL_FOR(int i = 0; i < 4; i++) { /* each of four rows of four 128-bit pieces: transposed once more */
        const v_t even0 = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88), odd0 = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
        const v_t even1 = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
        const v_t odd1 = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
        zipped[i] = _mm512_shuffle_f32x4(even0, even1, 0x88);
        zipped[i + 4] = _mm512_shuffle_f32x4(odd0, odd1, 0x88);
        zipped[i + 8] = _mm512_shuffle_f32x4(even0, even1, 0xdd);
        zipped[i + 12] = _mm512_shuffle_f32x4(odd0, odd1, 0xdd);
    }
    UNROLL_FOR(int i = 0; i < LANES; i++) r[i] = zipped[i];
#else
    UNROLL_FOR(int width = 1; width < LANES; width *= 2) {
        UNROLL_FOR(int i = 0; i < LANES / 2; i++) {
            zipped[2 * i] = V_ZIP_LOW(r[i], r[i + LANES / 2]);
            zipped[2 * i + 1] = V_ZIP_HIGH(r[i], r[i + LANES / 2]);
        }
        UNROLL_FOR(int i = 0; i < LANES; i++) r[i] = zipped[i];
    }
#endif
}

/* Lane i of the result is the sum of the lanes of r[i]. Destroys r. */
#define V_SUM_EACH(name, type)                                                                                         \
    INLINE type name(type r[LANES])                                                                                    \
    {                                                                                                                  \
        UNROLL_FOR(int n = LANES / 2; n; n /= 2) {                                                                     \
            UNROLL_FOR(int i = 0; i < LANES / 2; i++)                                                                  \
                if (i < n) r[i] = V_ZIP_LOW(r[i], r[i + n]) + V_ZIP_HIGH(r[i], r[i + n]);                              \
        }                                                                                                              \
        return r[0];                                                                                                   \
    }
V_SUM_EACH(v_sum_each, v_t)
V_SUM_EACH(v_sum_each_i, vi_t)

/* Of halves: shorter than lane after lane, and of equal numbers exact. */
INLINE lane v_sum(v_t a)
{
    UNROLL_FOR(int n = LANES; n > 1; n /= 2) a = (v_t)V_ZIP_LOW(a, a) + (v_t)V_ZIP_HIGH(a, a);
    return a[0];
}

/* NaN in any lane gives NaN or the maximum of the others: the probabilities carry it. */
INLINE lane v_max_lanes(v_t a)
{
    UNROLL_FOR(int n = LANES; n > 1; n /= 2) a = v_max((v_t)V_ZIP_LOW(a, a), (v_t)V_ZIP_HIGH(a, a));
    return a[0];
}

INLINE vi_t v_max_i(vi_t a, vi_t b)
{
#if defined V_AVX512 && LANE_BITS == 32
    return (vi_t)_mm512_max_epi32((__m512i)a, (__m512i)b);
#elif defined V_X86 && LANE_BITS == 32
    return (vi_t)_mm256_max_epi32((__m256i)a, (__m256i)b);
#else
    return (vi_t)v_select(a > b, (v_t)a, (v_t)b);
#endif
}

INLINE int64_t v_pack_lanes(ilane *p, vi_t mask, vi_t x)
{
#if defined V_AVX512 && LANE_BITS == 64
    const __mmask8 set = _mm512_movepi64_mask((__m512i)mask);
    v_store(p, (v_t)_mm512_maskz_compress_epi64(set, (__m512i)x));
    return __builtin_popcount(set);
#elif defined V_AVX512
    const __mmask16 set = _mm512_movepi32_mask((__m512i)mask);
    v_store(p, (v_t)_mm512_maskz_compress_epi32(set, (__m512i)x));
    return __builtin_popcount(set);
#else
    int64_t n = 0;
    UNROLL_FOR(int i = 0; i < LANES; i++) p[n] = x[i], n -= mask[i];
    return n;
#endif
}

INLINE vq_t v_mul_wide(vq_t a, vq_t b)
{
#if defined V_AVX512
    return (vq_t)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#elif defined V_X86
    return (vq_t)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#elif defined V_NEON
    return vmull_u32(vmovn_u64(a), vmovn_u64(b));
#else
    return (a & UINT32_MAX) * (b & UINT32_MAX);
#endif
}

/* A shuffle takes one cycle on any port, a shift two on two ports. */
INLINE vq_t v_upper(vq_t a)
{
#if defined V_AVX512
    return (vq_t)_mm512_shuffle_epi32((__m512i)a, 0xf5);
#elif defined V_X86
    return (vq_t)_mm256_shuffle_epi32((__m256i)a, 0xf5);
#else
    return a >> 32;
#endif
}

/* Lane i of the result is the largest of the lanes of r[i]. Destroys r. */
INLINE v_t v_max_each(v_t r[LANES])
{
    UNROLL_FOR(int n = LANES / 2; n; n /= 2) {
        UNROLL_FOR(int i = 0; i < LANES / 2; i++)
            if (i < n) r[i] = v_max(V_ZIP_LOW(r[i], r[i + n]), V_ZIP_HIGH(r[i], r[i + n]));
    }
    return r[0];
}

#include "simd_narrow.h"
#if V_AMX
#include "simd_amx.h"
#endif

#endif
