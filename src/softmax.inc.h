/* exp and tanh on vectors, and the online softmax down the keys of a tile.
 *
 * Literals  row_log: NULL or not. bf16.
 * Exports   LOG2_E, LN_2, EXP_BIAS; v_exp, v_exp_prob, v_exp_short, lane_exp; v_flush, v_tanh, v_tanh_small, TANH_SMALL,
 *           v_tanh_slope, v_softcap; v_horner, v_horner_each, COUNT; v_base, v_log_weight, softmax_update. */
#pragma once
#include "tile.inc.h"

#define LOG2_E 1.44269504088896340736
#define LN_2 0.69314718055994530942

/* tools/polynomials.py derives the coefficients. Their relative errors, with float and double lanes, are 5.1e-9 and
 * 8.4e-18 for exp2, 1.7e-8 and 5.5e-20 for tanh, and 2.6e-8 for the tanh of a soft cap, which only float lanes have.
 * All are under half a unit in the last place, so that rounding dominates. */
#ifdef FA_LANE_F64
#define EXP_BIAS 1023
#define EXP_ROUND 0x1.8p52 /* adding it rounds to an integer */
#define MANTISSA_BITS 52
static const lane exp2_poly[] = {0.69314718055994530942,     0.2402265069591009822,    0.055504108664821594339,
                                 0.0096181291076068885273,   0.001333355814641693531,  0.00015403530441736050155,
                                 0.000015252733829836118394, 1.3215442587921689653e-6, 1.0178062445845773521e-7,
                                 7.0725859492692236999e-9,   4.4549605981865183938e-10};
static const lane tanh_poly[] = {-0.33333333333333333319,    0.13333333333333320761,      -0.053968253968235901344,
                                 0.021869488535133222007,    -0.0088632354998019925691,   0.0035921275075992522291,
                                 -0.0014558283998303245859,  0.0005899818158388232071,    -0.00023888944636751173895,
                                 0.000096041091570262659879, -0.000037081069215442333853, 0.000012209921790162781662,
                                 -2.4388316314720878041e-6};
#else
#define EXP_BIAS 127
#define EXP_ROUND 0x1.8p23f
#define MANTISSA_BITS 23
static const lane exp2_poly[] = {0.69314718802622878106f,   0.24022650760568126945f,   0.055503571142190778186f,
                                 0.0096180825572778514913f, 0.0013390863364671234381f, 0.00015453162945120690177f};
/* Of 2^(f / 16), 1 left out; and the fractions of 2^(i / 16), as a float's lower bits hold them. */
static const lane exp2_short_poly[] = {0.043323392655837679922f, 0.00093840313807784796365f};
static const uint32_t exp2_sixteenths[16] = {0x000000, 0x05aac3, 0x0b95c2, 0x11c3d3, 0x1837f0, 0x1ef532,
                                             0x25fed7, 0x2d583f, 0x3504f3, 0x3d08a4, 0x45672a, 0x4e248c,
                                             0x5744fd, 0x60ccdf, 0x6ac0c7, 0x75257d};
static const lane tanh_poly[] = {-0.33333328944134254565f, 0.13332769736976327858f, -0.053850909578513580828f,
                                 0.020997178999074750572f, -0.0060967141659081975745f};
#define TANH_MAX 8.5f /* 1 - tanh(8.5) is 8e-8 */
static const lane tanh_p[] = {1.f, 0.13421937510691618522f, 0.0035439393123561404191f, 0.000021396457862728850503f,
                              1.4436403995541111294e-8f};
static const lane tanh_q[] = {1.f, 0.46755269890399695626f, 0.026061545675858619876f, 0.00033643221436770489772f,
                              8.2208357128214825074e-7f};
#endif
#define COUNT(array) (int)(sizeof(array) / sizeof(array)[0])

/* sum[u] = poly[0] + poly[1] x[u] + ..., of n vectors in step: one by one, each would wait for its own multiply-adds. */
INLINE void v_horner_each(const lane *poly, int count, int n, const v_t *x, v_t *sum)
{
    UNROLL_FOR(int u = 0; u < n; u++) sum[u] = v_splat(poly[count - 1]);
    UNROLL_FOR(int i = count - 2; i >= 0; i--)
        UNROLL_FOR(int u = 0; u < n; u++) sum[u] = v_fma(sum[u], x[u], v_splat(poly[i]));
}

INLINE v_t v_horner(const lane *poly, int count, v_t x)
{
    v_t sum;
    v_horner_each(poly, count, 1, &x, &sum);
    return sum;
}

/* e^x for x from where e^x is a normal number up to a little above 0: exactly 1 at 0, NaN at NaN.
 *
 * x log2(e) = whole + rest, with an integer `whole` and |rest| <= 1/2. `rounded`, the sum of x log2(e), EXP_ROUND and
 * EXP_BIAS, has whole + EXP_BIAS in its low bits; shifted to the exponent's place, they are 2^whole. This multiplies
 * 2^rest: adding to its exponent could turn a NaN into a number, and would not give 0 where `whole` is -EXP_BIAS.
 *
 * Scores stay in natural units: log2(e) enters by the two multiply-adds, at no cost, after the row's maximum is
 * subtracted. In the scale it would cost digits of large scores, and a bias near the largest number would overflow. */
INLINE v_t v_exp_normal(v_t x)
{
    const v_t magic = v_splat(EXP_ROUND + EXP_BIAS), log2_e = v_splat((lane)LOG2_E);
    v_t rounded = v_fma(x, log2_e, magic), rest = v_fma(x, log2_e, magic - rounded);
    v_t power = v_fma(v_horner(exp2_poly, COUNT(exp2_poly), rest), rest, v_splat(1));
    return power * (v_t)((vw_t)rounded << MANTISSA_BITS);
}

/* e^x, and exactly 0 below the normal range, at -inf too. */
INLINE v_t v_exp(v_t x) { return v_exp_normal(v_max(v_splat((lane)(-EXP_BIAS * LN_2)), x)); }

/* e^x as a probability relative to the largest: exactly 0 below 2^(27 - EXP_BIAS), which is 2^-100 in float32. The
 * products of smaller ones with values would be denormal. For these x86 traps into microcode: nine times slower where
 * scores are large. v_max is there for the same reason: else v_exp_normal itself would make denormal numbers. */
INLINE v_t v_exp_prob(v_t x)
{
    const v_t least = v_splat((lane)((27 - EXP_BIAS) * LN_2));
    return v_select(x < least, v_splat(0), v_exp_normal(v_max(least, x)));
}

/* The same for probabilities that will be rounded to bfloat16, in half the multiplications. x log2(e) is (n + f) / 16
 * with an integer n and |f| <= 1/2; a table gives 2^(n / 16), and a polynomial of degree 2 gives 2^(f / 16). The
 * relative error is at most 1e-6 near 0, where it matters, and 4.4e-6 anywhere: lse and statistics, sums of these
 * numbers, keep the digits of float32. (A polynomial of degree 3 without a table is no faster, and leaves 2e-4.)
 *
 * Below 2^-127 it is exactly 0. There is no bound of 2^-100 here: the dot product takes denormal numbers for 0. */
INLINE v_t v_exp_short(v_t x)
{
#ifdef FA_LANE_F64
    return v_exp_prob(x); /* doubles are never rounded to bfloat16 */
#else
    const v_t magic = v_splat(EXP_ROUND + 16 * EXP_BIAS);
    const v_t y = v_max(v_splat((lane)(-EXP_BIAS * LN_2)), x) * v_splat((lane)(16 * LOG2_E));
    const v_t n = y + magic, f = y - (n - magic);
    const v_t p = v_fma(v_horner(exp2_short_poly, 2, f), f, v_splat(1));
    const vi_t power = (vi_t)((vw_t)n << (MANTISSA_BITS - 4) & 0x7f800000);
    return p * (v_t)(power + (vi_t)v_lookup((const lane *)exp2_sixteenths, (vi_t)n));
#endif
}

INLINE lane lane_exp(lane x) { return v_exp(v_splat(x))[0]; }

/* 0 for numbers below the normal range. Arithmetic on them takes a hundred times as long, and a state that decays would
 * stay among them for ever. NaN stays NaN. */
INLINE v_t v_flush(v_t x) { return v_select(v_abs(x) < v_splat(LANE_MIN), v_splat(0), x); }

#define TANH_SMALL ((lane)0.625) /* up to here tanh is an odd polynomial */
INLINE v_t v_tanh_small(v_t x)
{
    const v_t z = x * x;
    return v_fma(v_horner(tanh_poly, COUNT(tanh_poly), z) * z, x, x);
}

/* tanh(x): beyond TANH_SMALL it is (1 - e) / (1 + e) with e = exp(-2 |x|). */
INLINE v_t v_tanh(v_t x)
{
    v_t e = v_exp(v_abs(x) * -2), large = (1 - e) / (1 + e);
    return v_select(v_abs(x) > TANH_SMALL, v_select(x < 0, -large, large), v_tanh_small(x));
}

/* tanh(x) and its slope, 1 - tanh(x)^2: as 4 e / (1 + e)^2 with e = exp(-2 |x|) it keeps its digits where it is small. */
INLINE v_t v_tanh_slope(v_t x, v_t *slope)
{
    const v_t e = v_exp(v_abs(x) * -2), inverse = 1 / (1 + e), large = (1 - e) * inverse;
    *slope = 4 * e * inverse * inverse;
    return v_select(v_abs(x) > TANH_SMALL, v_select(x < 0, -large, large), v_tanh_small(x));
}

/* cap tanh(x). With float lanes, tanh is x tanh_p(x^2) / tanh_q(x^2) here, in half the instructions of v_tanh. Its
 * relative error is up to 3.1e-7 (root mean square: 6e-8), that of v_tanh up to 1.6e-7 (4e-8). */
INLINE v_t v_softcap(v_t x, v_t cap)
{
#ifdef FA_LANE_F64
    return v_tanh(x) * cap;
#else
    x = v_min(v_splat(TANH_MAX), v_max(v_splat(-TANH_MAX), x));
    const v_t z = x * x;
    return v_horner(tanh_p, COUNT(tanh_p), z) * x * (v_recip(v_horner(tanh_q, COUNT(tanh_q), z)) * cap);
#endif
}

/* x, but a finite number where exp(x) is 0: there exp(x) times x must be 0, and not 0 times -inf. */
INLINE v_t v_log_weight(v_t x) { return v_max(v_splat((lane)(-EXP_BIAS * LN_2)), x); }

/* What scores are compared with: the largest of a row, or 0 if the row has met no key. */
INLINE v_t v_base(v_t max) { return v_select(max == v_splat(-INFINITY), v_splat(0), max); }

/* Online softmax (Milakov & Gimelshein 2018): s (n, nv vectors) becomes probabilities relative to the running maxima,
 *
 *     m' = max(m, max_j s_j);  p_j = exp(s_j - m');  l' = l exp(m - m') + sum_j p_j
 *
 * row_max (m) and row_sum (l) are updated; alpha receives exp(m - m'), by which the accumulators must be scaled.
 * Returns whether some alpha differs from 1. Where m' is -inf (no key yet) 0 stands for it, and every p_j is 0.
 *
 * row_log, if not NULL, is sum_j p_j (s_j - m), from which the entropy is made: it is updated, too. With `bf16`, the
 * p_j will be rounded to bfloat16. */
INLINE int softmax_update(int nv, int bf16, lane *s, int64_t n, lane *row_max, lane *row_sum, lane *row_log,
                          lane *alpha)
{
    v_t max[NV], odd[NV], base[NV], sum[NV], log[NV];
    vi_t moved = {0};
    UNROLL_FOR(int u = 0; u < nv; u++) max[u] = odd[u] = v_load(row_max + u * LANES);
    int64_t done = 0;
    for (; done + 2 <= n; done += 2) /* two chains of maxima: one would wait for each */
        UNROLL_FOR(int u = 0; u < nv; u++) {
            max[u] = v_max(max[u], v_load(s + done * BLOCK_Q + u * LANES));
            odd[u] = v_max(odd[u], v_load(s + (done + 1) * BLOCK_Q + u * LANES));
        }
    UNROLL_FOR(int u = 0; u < nv; u++) {
        if (done < n) max[u] = v_max(max[u], v_load(s + done * BLOCK_Q + u * LANES));
        max[u] = v_max(odd[u], max[u]);
        base[u] = v_base(max[u]);
        v_t scale = v_exp_prob(v_load(row_max + u * LANES) - base[u]);
        if (row_log) {
            const v_t old = v_load(row_log + u * LANES), step = v_log_weight(v_load(row_max + u * LANES) - base[u]);
            v_store(row_log + u * LANES, scale * v_fma(v_load(row_sum + u * LANES), step, old));
        }
        moved |= scale != v_splat(1);
        v_store(alpha + u * LANES, scale);
        v_store(row_max + u * LANES, max[u]);
        log[u] = sum[u] = v_splat(0); /* added at the end, as in tile_values */
    }
    for (int64_t j = 0; j < n; j++)
        UNROLL_FOR(int u = 0; u < nv; u++) {
            const v_t x = v_load(s + j * BLOCK_Q + u * LANES) - base[u];
            const v_t prob = bf16 ? v_exp_short(x) : v_exp_prob(x);
            sum[u] += prob;
            if (row_log) log[u] = v_fma(prob, v_log_weight(x), log[u]);
            v_store(s + j * BLOCK_Q + u * LANES, prob);
        }
    UNROLL_FOR(int u = 0; u < nv; u++) {
        v_store(row_sum + u * LANES, v_fma(v_load(row_sum + u * LANES), v_load(alpha + u * LANES), sum[u]));
        if (row_log) v_store(row_log + u * LANES, v_load(row_log + u * LANES) + log[u]);
    }
    return v_any(moved);
}
