/* Elements narrower than float lanes: 16 bits, bytes, 4 bits. A part of simd.h, which includes it.
 *
 *   v_load_i8               LANES signed bytes as lanes of either type      v_load_u8     unsigned ones as integers
 *   v_scaled_u4(u, i, x)    (c - 8) * x of the lower (0) or upper (1) four bits c of bytes i: exact if x has 12 digits
 *   v_from_f16(h)           float16 in the lower halves of lanes, the upper being 0
 *   v_load_f16 v_load_bf16  LANES 16-bit values, widened           v_store_f16 v_store_bf16   rounded to nearest even
 *   v_dot_bf16(a, b, c)     c + a.lo * b.lo + a.hi * b.hi, lanes of a, b being pairs of bfloat16
 *   v_pack_bf16(lo, hi)     such pairs, rounded      v_pair_bf16(p, q)    such pairs, of two rows in memory
 *   v_store_paired_bf16     2 LANES such pairs of two rows in memory, stored
 *   v_store_two_bf16        2 LANES numbers, rounded, in order
 *   v_store_pairs_bf16      the same; a denormal number may become 0
 *   v_dot_i8(a, b, c)       c + the products of four signed bytes in each lane of a and b + V_I8_OFFSET times those of
 *                           b: some instructions take a as unsigned
 *   v_dot_u8(a, b, c)       the same, of bytes a that already have V_I8_OFFSET added: unsigned, where there is one
 *   v_from_i(a) v_to_i(a)   integers as numbers, whole numbers as integers
 *   v_load_16s(p, step)     16 bytes from p on, then from p + step, p + 2 step ..., a vector in all
 *   v_sum_fours(r)          lane i of each 128 bits: the sum of the four of r[i]              v_store_u16      lower halves
 *   v_four_i8(p)            bytes of four rows, p[0] .. p[3], in each lane: LANES of them
 *   v_dot_u4(a, b, c)       c + the products of four integers from 0 to 15 in each lane of a and signed bytes of b; c is
 *                           0 at first, and after at most 8 such products v_sums_u4(c) is their sum
 *   v_pairs_i8(p)           2 LANES signed bytes as pairs of 16 bits
 *   v_dot_i16(a, b, c)      c + the products of two signed integers of 16 bits in each lane of a and b
 *   v_square_i8(a, b, c)    c + the products of rows a0, a1 with b0, b1, eight signed bytes each: lanes a0 b0, a0 b1,
 *                           a1 b0, a1 b1; only if V_I8_SQUARES, as the two that follow
 *   v_halves(i, a, b)       the lower (0) or upper (1) halves of a and b
 *   v_zipped(i, a, b)       the same, a's lanes and b's in turn
 *   v_lookup(table, i)      table[i % 16], lanes     v_lookup_i8          the same of bytes, i < 16,
 *                           in the table that v_table_i8 has loaded; V_LOOKUP_ONCE: v_lookup is one instruction
 *   v_store_i8              the lowest byte of each lane           v_store_i8_part      of the first n lanes */
typedef int8_t vb_t __attribute__((vector_size(LANES)));
typedef vb_t vbu_t __attribute__((aligned(1), may_alias));
typedef uint8_t vub_t __attribute__((vector_size(LANES), aligned(1), may_alias));

INLINE v_t v_load_i8(const void *p)
{
#if defined V_AVX512 && LANE_BITS == 32
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p)));
#elif defined V_X86 && LANE_BITS == 32
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p)));
#elif defined V_NEON && LANE_BITS == 32
    int32_t four;
    memcpy(&four, p, sizeof four);
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four))))));
#else
    return __builtin_convertvector(*(const vbu_t *)p, v_t);
#endif
}

INLINE vi_t v_load_u8(const void *p)
{
#if defined V_AVX512 && LANE_BITS == 32
    return (vi_t)_mm512_cvtepu8_epi32(_mm_loadu_si128(p));
#elif defined V_X86 && LANE_BITS == 32
    return (vi_t)_mm256_cvtepu8_epi32(_mm_loadl_epi64(p));
#else
    return __builtin_convertvector(*(const vub_t *)p, vi_t);
#endif
}

INLINE v_t v_from_i(vi_t a) { return __builtin_convertvector(a, v_t); }
INLINE vi_t v_to_i(v_t a) { return __builtin_convertvector(a, vi_t); }

INLINE v_t v_scaled_u4(int upper, vi_t bytes, v_t scale)
{
#if defined V_AVX512 && LANE_BITS == 32
    const v_t number = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
    return _mm512_permutexvar_ps((__m512i)(upper ? bytes >> 4 : bytes), number * scale); /* of the last four bits */
#else
    return v_fma(v_from_i(upper ? bytes >> 4 : bytes & 15), scale, v_splat(-8) * scale);
#endif
}

#if defined V_AVX512
#define V_LOOKUP_ONCE 1
#else
#define V_LOOKUP_ONCE 0
#endif

#if LANE_BITS == 32
typedef uint16_t vh_t __attribute__((vector_size(V_BYTES / 2)));
typedef vh_t vhu_t __attribute__((aligned(1), may_alias));

INLINE void v_store_i8(void *to, vi_t a)
{
#if defined V_AVX512
    _mm_storeu_si128(to, _mm512_cvtepi32_epi8((__m512i)a));
#elif defined V_X86
    const __m256i lowest = _mm256_set1_epi32(0x0c080400), four = _mm256_shuffle_epi8((__m256i)a, lowest);
    const __m128i both = _mm_unpacklo_epi32(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1));
    _mm_storel_epi64(to, both);
#else
    *(vbu_t *)to = __builtin_convertvector(a, vb_t);
#endif
}

INLINE void v_store_i8_part(void *to, vi_t a, int64_t n)
{
    int8_t part[LANES];
    v_store_i8(n < LANES ? (void *)part : to, a);
    if (n < LANES) memcpy(to, part, n);
}

INLINE v_t v_lookup(const lane table[16], vi_t index)
{
#if defined V_AVX512
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

INLINE vi_t v_table_i8(const int8_t table[16])
{
#if defined V_AVX512
    return (vi_t)_mm512_broadcast_i32x4(_mm_loadu_si128((const void *)table));
#elif defined V_X86
    return (vi_t)_mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)table));
#else
    vi_t all = {0};
    UNROLL_FOR(int i = 0; i < LANES / 4; i++) memcpy((char *)&all + 16 * i, table, 16);
    return all;
#endif
}

INLINE vi_t v_lookup_i8(vi_t table, vi_t index)
{
#if defined V_AVX512
    return (vi_t)_mm512_shuffle_epi8((__m512i)table, (__m512i)index);
#elif defined V_X86
    return (vi_t)_mm256_shuffle_epi8((__m256i)table, (__m256i)index);
#elif defined V_NEON
    return vreinterpretq_s32_s8(vqtbl1q_s8(vreinterpretq_s8_s32(table), vreinterpretq_u8_s32(index)));
#else
    int8_t bytes[V_BYTES], values[V_BYTES];
    memcpy(bytes, &index, sizeof bytes), memcpy(values, &table, sizeof values);
    for (int i = 0; i < V_BYTES; i++) bytes[i] = values[bytes[i]];
    memcpy(&index, bytes, sizeof bytes);
    return index;
#endif
}

INLINE vi_t v_dot_i8(vi_t a, vi_t b, vi_t c)
{
#if defined __AVX512VNNI__
    return (vi_t)_mm512_dpbusd_epi32((__m512i)c, (__m512i)(a ^ (ilane)0x80808080), (__m512i)b);
#elif defined V_AVX512 /* |a| b with a's signs: two such products fit 16 bits, as long as no b is -128 */
    const __m512i signed_b = _mm512_mask_sub_epi8((__m512i)b, _mm512_movepi8_mask((__m512i)a), _mm512_setzero_si512(),
                                                  (__m512i)b);
    const __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8((__m512i)a), signed_b);
    return c + (vi_t)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif defined __AVXVNNI__
    return (vi_t)_mm256_dpbusd_avx_epi32((__m256i)c, (__m256i)(a ^ (ilane)0x80808080), (__m256i)b);
#elif defined V_X86
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)a), _mm256_sign_epi8((__m256i)b, (__m256i)a));
    return c + (vi_t)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#elif defined V_NEON && defined __ARM_FEATURE_DOTPROD
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

INLINE vi_t v_dot_u8(vi_t a, vi_t b, vi_t c)
{
#if V_I8_OFFSET
    return v_dot_i8(a ^ (ilane)0x80808080, b, c); /* which takes it back: the compiler drops both */
#else
    return v_dot_i8(a, b, c);
#endif
}

INLINE vi_t v_four_i8(const char *const *p)
{
#if defined V_AVX512
#define ROW(i) _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)p[i]))
    const __m512i low = _mm512_or_si512(ROW(0), _mm512_slli_epi32(ROW(1), 8));
    return (vi_t)_mm512_or_si512(low, _mm512_slli_epi32(_mm512_or_si512(ROW(2), _mm512_slli_epi32(ROW(3), 8)), 16));
#undef ROW
#elif defined V_X86
#define ROW(i) _mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)p[i]))
    const __m256i low = _mm256_or_si256(ROW(0), _mm256_slli_epi32(ROW(1), 8));
    return (vi_t)_mm256_or_si256(low, _mm256_slli_epi32(_mm256_or_si256(ROW(2), _mm256_slli_epi32(ROW(3), 8)), 16));
#undef ROW
#else
    int8_t four[4 * LANES];
    vi_t x;
    UNROLL_FOR(int i = 0; i < 4 * LANES; i++) four[i] = p[i % 4][i / 4];
    memcpy(&x, four, sizeof x);
    return x;
#endif
}

/* Without an instruction that adds four products, two sums of 16 bits in a lane: 8 of 2 * 15 * 128 fit. */
INLINE vi_t v_dot_u4(vi_t a, vi_t b, vi_t c)
{
#if defined __AVX512VNNI__
    return (vi_t)_mm512_dpbusd_epi32((__m512i)c, (__m512i)a, (__m512i)b);
#elif defined V_AVX512
    return (vi_t)_mm512_add_epi16((__m512i)c, _mm512_maddubs_epi16((__m512i)a, (__m512i)b));
#elif defined __AVXVNNI__
    return (vi_t)_mm256_dpbusd_avx_epi32((__m256i)c, (__m256i)a, (__m256i)b);
#elif defined V_X86
    return (vi_t)_mm256_add_epi16((__m256i)c, _mm256_maddubs_epi16((__m256i)a, (__m256i)b));
#else
    return v_dot_i8(a, b, c);
#endif
}

INLINE vi_t v_sums_u4(vi_t c)
{
#if defined V_AVX512 && !defined __AVX512VNNI__
    return (vi_t)_mm512_madd_epi16((__m512i)c, _mm512_set1_epi16(1));
#elif defined V_X86 && !defined V_AVX512 && !defined __AVXVNNI__
    return (vi_t)_mm256_madd_epi16((__m256i)c, _mm256_set1_epi16(1));
#else
    return c;
#endif
}

INLINE vi_t v_sum_fours(const vi_t r[4])
{
#if defined V_AVX512
    const __m512i a = (__m512i)r[0], b = (__m512i)r[1], c = (__m512i)r[2], d = (__m512i)r[3];
    const __m512i x = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    const __m512i y = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    return (vi_t)_mm512_add_epi32(_mm512_unpacklo_epi64(x, y), _mm512_unpackhi_epi64(x, y));
#elif defined V_X86
    const __m256i a = (__m256i)r[0], b = (__m256i)r[1], c = (__m256i)r[2], d = (__m256i)r[3];
    const __m256i x = _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
    const __m256i y = _mm256_add_epi32(_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
    return (vi_t)_mm256_add_epi32(_mm256_unpacklo_epi64(x, y), _mm256_unpackhi_epi64(x, y));
#elif defined V_NEON
    return vpaddq_s32(vpaddq_s32(r[0], r[1]), vpaddq_s32(r[2], r[3]));
#else
    vi_t sum;
    UNROLL_FOR(int i = 0; i < LANES; i++) {
        const vi_t x = r[i % 4];
        sum[i] = x[i / 4 * 4] + x[i / 4 * 4 + 1] + x[i / 4 * 4 + 2] + x[i / 4 * 4 + 3];
    }
    return sum;
#endif
}

INLINE vi_t v_load_16s(const char *p, int64_t step)
{
#if defined V_X86
#define AT(i) _mm_loadu_si128((const void *)(p + i * step))
    const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(AT(0)), AT(1), 1);
#if defined V_AVX512
    const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(AT(2)), AT(3), 1);
    return (vi_t)_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
#else
    return (vi_t)low;
#endif
#undef AT
#else
    vi_t x;
    UNROLL_FOR(int i = 0; i < LANES / 4; i++) memcpy((char *)&x + 16 * i, p + i * step, 16);
    return x;
#endif
}

INLINE vi_t v_pairs_i8(const void *p)
{
#if defined V_AVX512
    return (vi_t)_mm512_cvtepi8_epi16(_mm256_loadu_si256(p));
#elif defined V_X86
    return (vi_t)_mm256_cvtepi8_epi16(_mm_loadu_si128(p));
#elif defined V_NEON
    return vreinterpretq_s32_s16(vmovl_s8(vld1_s8(p)));
#else
    int8_t bytes[2 * LANES];
    int16_t pairs[2 * LANES];
    vi_t both;
    memcpy(bytes, p, sizeof bytes);
    for (int i = 0; i < 2 * LANES; i++) pairs[i] = bytes[i];
    memcpy(&both, pairs, sizeof both);
    return both;
#endif
}

INLINE vi_t v_dot_i16(vi_t a, vi_t b, vi_t c)
{
#if defined __AVX512VNNI__
    return (vi_t)_mm512_dpwssd_epi32((__m512i)c, (__m512i)a, (__m512i)b);
#elif defined V_AVX512
    return c + (vi_t)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined __AVXVNNI__
    return (vi_t)_mm256_dpwssd_avx_epi32((__m256i)c, (__m256i)a, (__m256i)b);
#elif defined V_X86
    return c + (vi_t)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined V_NEON
    const int16x8_t x = vreinterpretq_s16_s32(a), y = vreinterpretq_s16_s32(b);
    return vaddq_s32(c, vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_high_s16(x, y)));
#else
    return c + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

#if V_I8_SQUARES
INLINE vi_t v_square_i8(vi_t a, vi_t b, vi_t c)
{
    return vmmlaq_s32(c, vreinterpretq_s8_s32(a), vreinterpretq_s8_s32(b));
}

INLINE vi_t v_halves(int upper, vi_t a, vi_t b)
{
    const int64x2_t x = vreinterpretq_s64_s32(a), y = vreinterpretq_s64_s32(b);
    return vreinterpretq_s32_s64(upper ? vzip2q_s64(x, y) : vzip1q_s64(x, y));
}

INLINE vi_t v_zipped(int upper, vi_t a, vi_t b) { return upper ? vzip2q_s32(a, b) : vzip1q_s32(a, b); }
#endif

/* LANES integers of 16 bits, widened. Of a conversion, gcc 12 makes two of half vectors, taken apart and put together. */
INLINE vw_t v_load_u16(const void *p)
{
#if defined V_AVX512
    return (vw_t)_mm512_cvtepu16_epi32(_mm256_loadu_si256(p));
#else
    return __builtin_convertvector(*(const vhu_t *)p, vw_t);
#endif
}

INLINE v_t v_load_bf16(const void *p) { return (v_t)(v_load_u16(p) << 16); }

/* Rounded to nearest even, in the upper 16 bits; NaN stays NaN, made quiet. */
INLINE vw_t v_upper_bf16(v_t a)
{
    vw_t u = (vw_t)a, rounded = u + 0x7fff + (u >> 16 & 1);
    return (vw_t)v_select(a != a, (v_t)(u | 0x400000), (v_t)rounded);
}

INLINE vw_t v_round_bf16(v_t a) { return v_upper_bf16(a) >> 16; }

INLINE void v_store_u16(void *p, vw_t a)
{
#if defined V_AVX512
    _mm256_storeu_si256(p, _mm512_cvtepi32_epi16((__m512i)a));
#else
    *(vhu_t *)p = __builtin_convertvector(a, vh_t);
#endif
}

INLINE void v_store_bf16(void *p, v_t a) { v_store_u16(p, v_round_bf16(a)); }

INLINE void v_store_two_bf16(void *p, v_t a, v_t b)
{
#if defined V_AVX512
    const __m512i upper = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27,
                                           25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    _mm512_storeu_si512(p, _mm512_permutex2var_epi16((__m512i)v_upper_bf16(a), upper, (__m512i)v_upper_bf16(b)));
#else
    v_store_bf16(p, a);
    v_store_bf16((char *)p + V_BYTES / 2, b);
#endif
}

/* Of float16 in the lower halves of lanes. */
INLINE v_t v_from_f16(vw_t h)
{
#if defined V_AVX512
    return _mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)h));
#elif defined V_X86
    const __m128i low = _mm256_castsi256_si128((__m256i)h), high = _mm256_extracti128_si256((__m256i)h, 1);
    return _mm256_cvtph_ps(_mm_packus_epi32(low, high));
#elif defined V_NEON
    return vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32(h)));
#else
    /* Shift exponent and mantissa into place and mend the bias, 127 - 15, by a multiplication, which normalises
     * subnormals too; what then is 2^16 or more was Inf or NaN. */
    const vw_t sign = (h & 0x8000) << 16;
    v_t magnitude = (v_t)((h & 0x7fff) << 13) * 0x1p112f;
    vw_t special = (vw_t)(magnitude >= 65536.0f) & 0x7f800000;
    return (v_t)((vw_t)magnitude | special | sign);
#endif
}

INLINE v_t v_load_f16(const void *p)
{
#if defined V_AVX512
    return _mm512_cvtph_ps(_mm256_loadu_si256(p));
#elif defined V_X86
    return _mm256_cvtph_ps(_mm_loadu_si128(p));
#else
    return v_from_f16(v_load_u16(p));
#endif
}

INLINE void v_store_f16(void *p, v_t a)
{
#if defined V_AVX512
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
#elif defined V_NEON_BF16
    return vbfdotq_f32(c, vreinterpretq_bf16_f32(a), vreinterpretq_bf16_f32(b));
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
    v_store_two_bf16(to, a, b);
#endif
}

/* Pairs (p[i], q[i]) of two rows of bfloat16. */
INLINE v_t v_pair_bf16(const void *p, const void *q)
{
    const vw_t low = v_load_u16(p);
    return (v_t)(low | v_load_u16(q) << 16);
}

/* The same of 2 LANES elements of each row, stored one after the other. */
INLINE void v_store_paired_bf16(void *to, const void *p, const void *q)
{
#if defined V_AVX512
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
INLINE vi_t v_pairs_i8(const void *p) { return (vi_t){0} + *(const int8_t *)p; }
INLINE vi_t v_dot_i16(vi_t a, vi_t b, vi_t c) { return c + a * b; }
INLINE vi_t v_dot_u8(vi_t a, vi_t b, vi_t c) { return c + a * b; }
INLINE vi_t v_four_i8(const char *const *p) { return (vi_t){0} + *p[0]; }
INLINE void v_store_i8_part(void *to, vi_t a, int64_t n)
{
    for (int64_t i = 0; i < LANES && i < n; i++) ((int8_t *)to)[i] = (int8_t)a[i];
}
INLINE void v_store_pairs_bf16(void *to, v_t a, v_t b) { v_store(to, a + b); }
INLINE void v_store_paired_bf16(void *to, const void *p, const void *q) { v_store(to, v_load(p) + v_load(q)); }
#endif /* LANE_BITS == 32 */
