/* The vector type and its operations: the only file with intrinsics.
 *
 * One lane type a compilation: FA_LANE_F64 makes it double, else float. v_t is a native register of LANES lanes, vi_t
 * the signed integers of the same width; + - * / < & work on both (GNU vector extensions). A comparison gives a vi_t
 * of all-ones or zero lanes, as v_select and v_any take it. Names and meanings are the same on every ISA.
 *
 *   v_load v_store          any alignment            v_load_n v_store_n    the first n lanes; the others read as 0
 *   v_splat                 every lane               v_fma(a, b, c)       a * b + c; fused but on `generic`
 *   v_max(bound, x)         x where x is NaN, as v_min            v_select(mask, a, b)  a where mask, else b
 *   v_any(mask)             some lane set            v_transpose(r)       LANES registers, in place
 *   v_recip(x)              1 / x within a unit in the last place, x neither tiny nor huge
 *   v_sum v_max_lanes       over the lanes           v_sum_each(r)        of LANES registers, one a lane
 *   v_load_f16 v_load_bf16  LANES 16-bit values, widened           v_store_f16 v_store_bf16   rounded to nearest even
 *   v_dot_bf16(a, b, c)     c + a.lo * b.lo + a.hi * b.hi, lanes of a, b being pairs of bfloat16
 *   v_pack_bf16(lo, hi)     such pairs, rounded      v_pair_bf16(p, q)    such pairs, of two rows in memory
 *   v_store_paired_bf16     2 LANES such pairs of two rows in memory, stored
 *   v_store_pairs_bf16      2 LANES numbers, rounded, in order; a denormal number may become 0
 *   v_dot_i8(a, b, c)       c + the products of four signed bytes in each lane of a and b + V_I8_OFFSET times those of
 *                           b: some instructions take a as unsigned
 *   v_lookup(table, i)      table[i % 16], lanes     v_lookup_i8          the same of bytes, i < 16
 *   v_store_i8_part         the lowest bytes of the first n lanes */
#ifndef FASTATTN_SIMD_H
#define FASTATTN_SIMD_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline, unused))

#include "isa_constants.h"

#if V_BYTES >= 32
#include <immintrin.h>
#define V_X86 1
#elif defined __aarch64__ && !defined FA_GENERIC
#include <arm_neon.h>
#define V_NEON 1
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

#if LANE_BITS == 32 && (defined __AVX512BF16__ || defined FA_EMULATE_BF16_DOT)
#define V_BF16_DOT 1
#else
#define V_BF16_DOT 0
#endif

#define LANES (V_BYTES * 8 / LANE_BITS)
typedef lane v_t __attribute__((vector_size(V_BYTES)));
typedef ilane vi_t __attribute__((vector_size(V_BYTES)));
typedef wlane vw_t __attribute__((vector_size(V_BYTES)));
typedef v_t vu_t __attribute__((aligned(1), may_alias));
typedef lane lane_u __attribute__((aligned(1), may_alias)); /* a lane anywhere in memory */

/* The intrinsic of this width and lane type: MM(fmadd) is _mm512_fmadd_ps with AVX-512 and float lanes. */
#if V_BYTES == 64 && LANE_BITS == 64
#define MM(op) _mm512_##op##_pd
#elif V_BYTES == 64
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

INLINE v_t v_load(const void *p) { return *(const vu_t *)p; }
INLINE void v_store(void *p, v_t a) { *(vu_t *)p = a; }

INLINE v_t v_load_n(const void *p, int64_t n)
{
#if V_BYTES == 64
    return MM(maskz_loadu)(MM_MASK(n), p);
#else
    v_t a = {0};
    memcpy(&a, p, n * sizeof(lane));
    return a;
#endif
}

INLINE void v_store_n(void *p, v_t a, int64_t n)
{
#if V_BYTES == 64
    MM(mask_storeu)(p, MM_MASK(n), a);
#else
    memcpy(p, &a, n * sizeof(lane));
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
#else
    return a * b + c;
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
#if V_BYTES == 64 && LANE_BITS == 32
    const v_t r = _mm512_rcp14_ps(x);
    return v_fma(v_fma(-x, r, v_splat(1)), r, r);
#else
    return 1 / x;
#endif
}

INLINE int v_any(vi_t mask)
{
#if V_BYTES == 64 && LANE_BITS == 64
    return _mm512_movepi64_mask((__m512i)mask) != 0;
#elif V_BYTES == 64
    return _mm512_movepi32_mask((__m512i)mask) != 0;
#elif defined V_X86
    return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#else
    uint64_t half[2];
    memcpy(half, &mask, sizeof half);
    return (half[0] | half[1]) != 0;
#endif
}

/* log2(LANES) rounds of zipping register i with register i + LANES / 2. With 16 lanes, shuffles within 128 bits, and
 * then of these, take less than half the time: 5 ns for 12. */
INLINE void v_transpose(v_t r[LANES])
{
    v_t zipped[LANES];
#if LANES == 16
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
INLINE v_t v_sum_each(v_t r[LANES])
{
    UNROLL_FOR(int n = LANES / 2; n; n /= 2) {
        UNROLL_FOR(int i = 0; i < LANES / 2; i++)
            if (i < n) r[i] = V_ZIP_LOW(r[i], r[i + n]) + V_ZIP_HIGH(r[i], r[i + n]);
    }
    return r[0];
}

INLINE lane v_sum(v_t a)
{
    lane sum = 0;
    UNROLL_FOR(int i = 0; i < LANES; i++) sum += a[i];
    return sum;
}

/* NaN in any lane gives NaN or the maximum of the others: the probabilities carry it. */
INLINE lane v_max_lanes(v_t a)
{
    lane max = a[0];
    UNROLL_FOR(int i = 1; i < LANES; i++) max = max > a[i] ? max : a[i];
    return max;
}

#if LANE_BITS == 32
typedef int8_t vb_t __attribute__((vector_size(LANES)));
typedef vb_t vbu_t __attribute__((aligned(1), may_alias));
typedef uint16_t vh_t __attribute__((vector_size(V_BYTES / 2)));
typedef vh_t vhu_t __attribute__((aligned(1), may_alias));

INLINE void v_store_i8_part(void *to, vi_t a, int64_t n)
{
#if V_BYTES == 64
    vb_t bytes = (vb_t)_mm512_cvtepi32_epi8((__m512i)a);
#elif defined V_X86 /* the lowest bytes of each half, then both halves' */
    const __m256i lowest = _mm256_shuffle_epi8((__m256i)a, _mm256_set1_epi32(0x0c080400));
    vb_t bytes = (vb_t)_mm256_extract_epi64(
        _mm256_permutevar8x32_epi32(lowest, _mm256_setr_epi32(0, 4, 0, 0, 0, 0, 0, 0)), 0);
#else
    vb_t bytes = __builtin_convertvector(a, vb_t);
#endif
    if (n < LANES) memcpy(to, &bytes, n);
    else *(vbu_t *)to = bytes;
}

INLINE v_t v_lookup(const lane table[16], vi_t index)
{
#if V_BYTES == 64
    return _mm512_permutexvar_ps((__m512i)index, _mm512_loadu_ps(table));
#elif defined V_X86
    const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), (__m256i)index);
    const __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), (__m256i)index);
    return _mm256_blendv_ps(low, high, (__m256)(index << 28)); /* by the sign bit, where bit 3 is now */
#else
    v_t x;
    UNROLL_FOR(int i = 0; i < LANES; i++) x[i] = table[index[i] & 15];
    return x;
#endif
}

INLINE vi_t v_lookup_i8(const int8_t table[16], vi_t index)
{
#if V_BYTES == 64
    return (vi_t)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const void *)table)), (__m512i)index);
#elif defined V_X86
    return (vi_t)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)table)), (__m256i)index);
#elif defined V_NEON
    return vreinterpretq_s32_s8(vqtbl1q_s8(vld1q_s8(table), vreinterpretq_u8_s32(index)));
#else
    int8_t bytes[V_BYTES];
    memcpy(bytes, &index, sizeof bytes);
    for (int i = 0; i < V_BYTES; i++) bytes[i] = table[bytes[i]];
    memcpy(&index, bytes, sizeof bytes);
    return index;
#endif
}

INLINE vi_t v_dot_i8(vi_t a, vi_t b, vi_t c)
{
#if defined __AVX512VNNI__
    return (vi_t)_mm512_dpbusd_epi32((__m512i)c, (__m512i)(a ^ (ilane)0x80808080), (__m512i)b);
#elif V_BYTES == 64 /* |a| b with a's signs: two such products fit 16 bits, as long as no b is -128 */
    const __m512i signed_b = _mm512_mask_sub_epi8((__m512i)b, _mm512_movepi8_mask((__m512i)a), _mm512_setzero_si512(),
                                                  (__m512i)b);
    const __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8((__m512i)a), signed_b);
    return c + (vi_t)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif defined __AVXVNNI__
    return (vi_t)_mm256_dpbusd_avx_epi32((__m256i)c, (__m256i)(a ^ (ilane)0x80808080), (__m256i)b);
#elif defined V_X86
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)a), _mm256_sign_epi8((__m256i)b, (__m256i)a));
    return c + (vi_t)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#elif defined __ARM_FEATURE_DOTPROD
    return vdotq_s32(c, vreinterpretq_s8_s32(a), vreinterpretq_s8_s32(b));
#elif defined V_NEON
    const int8x16_t x = vreinterpretq_s8_s32(a), y = vreinterpretq_s8_s32(b);
    const int16x8_t low = vmull_s8(vget_low_s8(x), vget_low_s8(y)), high = vmull_high_s8(x, y);
    return vaddq_s32(c, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
#else
    UNROLL_FOR(int f = 0; f < 4; f++) c += (a << (24 - 8 * f) >> 24) * (b << (24 - 8 * f) >> 24);
    return c;
#endif
}

INLINE v_t v_load_bf16(const void *p) { return (v_t)(__builtin_convertvector(*(const vhu_t *)p, vw_t) << 16); }

/* The upper 16 bits after rounding to nearest even; NaN stays NaN, made quiet. */
INLINE vw_t v_round_bf16(v_t a)
{
    vw_t u = (vw_t)a, rounded = (u + 0x7fff + (u >> 16 & 1)) >> 16;
    return (vw_t)v_select(a != a, (v_t)(u >> 16 | 0x40), (v_t)rounded);
}

INLINE void v_store_bf16(void *p, v_t a) { *(vhu_t *)p = __builtin_convertvector(v_round_bf16(a), vh_t); }

INLINE v_t v_load_f16(const void *p)
{
#if V_BYTES == 64
    return _mm512_cvtph_ps(_mm256_loadu_si256(p));
#elif defined V_X86
    return _mm256_cvtph_ps(_mm_loadu_si128(p));
#elif defined V_NEON
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
#else
    /* Shift exponent and mantissa into place and mend the bias, 127 - 15, by a multiplication, which normalises
     * subnormals too; what then is 2^16 or more was Inf or NaN. */
    vw_t h = __builtin_convertvector(*(const vhu_t *)p, vw_t), sign = (h & 0x8000) << 16;
    v_t magnitude = (v_t)((h & 0x7fff) << 13) * 0x1p112f;
    vw_t special = (vw_t)(magnitude >= 65536.0f) & 0x7f800000;
    return (v_t)((vw_t)magnitude | special | sign);
#endif
}

INLINE void v_store_f16(void *p, v_t a)
{
#if V_BYTES == 64
    _mm256_storeu_si256(p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined V_X86
    _mm_storeu_si128(p, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined V_NEON
    vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(a)));
#else
    vw_t u = (vw_t)a, sign = u >> 16 & 0x8000, magnitude = u & 0x7fffffff;
    /* Normal: subtract the bias difference, 112 << 23, and round 13 bits away. Subnormal, below 2^-14: adding 0.5
     * leaves the result's bits, rounded, at the bottom of the mantissa. Inf and overflow from 65520 up; NaN. */
    vw_t normal = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
    vw_t subnormal = (vw_t)((v_t)magnitude + 0.5f) - 0x3f000000;
    v_t r = v_select((v_t)magnitude < 0x1p-14f, (v_t)subnormal, (v_t)normal);
    r = v_select((v_t)magnitude >= 65520.0f, (v_t)((vw_t){0} + 0x7c00), r);
    r = v_select(a != a, (v_t)((vw_t){0} + 0x7e00), r);
    *(vhu_t *)p = __builtin_convertvector((vw_t)r | sign, vh_t);
#endif
}

/* The bfloat16 dot product: an instruction, or its meaning spelled out, for tests of the code around it. */
INLINE v_t v_dot_bf16(v_t a, v_t b, v_t c)
{
#if defined __AVX512BF16__
    return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b);
#else
    const vw_t high = (vw_t){0} + 0xffff0000u;
    c = v_fma((v_t)((vw_t)a << 16), (v_t)((vw_t)b << 16), c);
    return v_fma((v_t)((vw_t)a & high), (v_t)((vw_t)b & high), c);
#endif
}

INLINE v_t v_pack_bf16(v_t low, v_t high)
{
#if defined __AVX512BF16__
    const __m512i interleave = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22,
                                                6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return (v_t)_mm512_permutexvar_epi16(interleave, (__m512i)_mm512_cvtne2ps_pbh(high, low));
#else
    return (v_t)(v_round_bf16(low) | v_round_bf16(high) << 16);
#endif
}

INLINE void v_store_pairs_bf16(void *to, v_t a, v_t b)
{
#if defined __AVX512BF16__
    _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(b, a));
#else
    v_store_bf16(to, a);
    v_store_bf16((char *)to + V_BYTES / 2, b);
#endif
}

/* Pairs (p[i], q[i]) of two rows of bfloat16. */
INLINE v_t v_pair_bf16(const void *p, const void *q)
{
    vw_t low = __builtin_convertvector(*(const vhu_t *)p, vw_t);
    return (v_t)(low | __builtin_convertvector(*(const vhu_t *)q, vw_t) << 16);
}
/* The same of 2 LANES elements of each row, stored one after the other. */
INLINE void v_store_paired_bf16(void *to, const void *p, const void *q)
{
#if V_BYTES == 64
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                         5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i x = _mm512_loadu_si512(p), y = _mm512_loadu_si512(q);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    _mm512_storeu_si512(to, _mm512_permutex2var_epi16(x, low, y));
    _mm512_storeu_si512((char *)to + V_BYTES, _mm512_permutex2var_epi16(x, high, y));
#else
    v_store(to, v_pair_bf16(p, q));
    v_store((char *)to + V_BYTES, v_pair_bf16((const char *)p + V_BYTES / 2, (const char *)q + V_BYTES / 2));
#endif
}
#else  /* double lanes: there are no 16-bit elements; that one text may name them, and V_BF16_DOT is 0 */
INLINE v_t v_dot_bf16(v_t a, v_t b, v_t c) { return v_fma(a, b, c); }
INLINE v_t v_pack_bf16(v_t low, v_t high) { return low + high; }
INLINE v_t v_pair_bf16(const void *p, const void *q) { return v_load(p) + v_load(q); }
INLINE v_t v_load_f16(const void *p) { return v_load(p); }
INLINE void v_store_pairs_bf16(void *to, v_t a, v_t b) { v_store(to, a + b); }
INLINE void v_store_paired_bf16(void *to, const void *p, const void *q) { v_store(to, v_load(p) + v_load(q)); }
#endif /* LANE_BITS == 32 */

#endif
