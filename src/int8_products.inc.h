/* The operands and the softmax of products in int8, four elements a lane: keys and values as they are stored, queries
 * rounded by rows, probabilities rounded by rows and blocks of keys (as in SageAttention, Zhang et al. 2024).
 *
 *     q_i = q_scale_i a_i    k_j = k_scale_j b_j    v_j = v_scale_j c_j      a, b, c: integers of 8 bits
 *     s_ij = (a_i b_j) q_scale_i k_scale_j
 *     p_ij = exp(s_ij - m_i)                                                 m_i: the row's largest score of the block
 *     w_ij = p_ij v_scale_j MOST_PROB / u_i, rounded                         u_i: its largest v_scale of the block
 *     o_i  = alpha_i o_i + exp(m_i - m'_i) u_i / MOST_PROB sum_j w_ij c_j    m'_i: the largest score so far
 *
 * m_i and u_i are of the keys that row i attends alone, and so no key that is hidden from it changes its result.
 *
 * Literals  nv: 1, NV. hides, keeps: 0, 1.
 * Exports   MOST_PROB; round_row_i8; rows_as_bytes, values_as_bytes, load_key_scales, load_value_scales;
 *           byte_softmax, softmax_of_bytes. */
#pragma once
#include "scales.inc.h"
#include "nonfinite.inc.h"
#include "softmax.inc.h"

#define MOST_PROB (V_I8_OFFSET ? 255 : 127) /* the largest that v_dot_u8 takes */

/* to (n) = x / scale, rounded to nearest even, scale = max |x| / 127. Returns the scale: at least a
 * normal number, below which x / scale might exceed 127; or 0 for zeros; or NaN where some x is not finite. */
static lane round_row_i8(const lane *x, int64_t n, int8_t *to)
{
    const v_t magic = v_splat((lane)(LANE_BITS == 64 ? 0x1.8p52 : 0x1.8p23)); /* adding it rounds to integers */
    v_t most = v_splat(0), zero = v_splat(0);                                 /* zero becomes NaN, as in row_finite */
    for (int64_t d = 0; d < n; d += LANES) {
        const v_t part = v_load_part(x + d, n - d);
        most = v_max(v_abs(part), most);
        zero += part * v_splat(0);
    }
    const lane max = v_max_lanes(most), least = max / 127 < LANE_MIN ? LANE_MIN : max / 127;
    const lane scale = v_any(zero != zero) ? NAN : max == 0 ? 0 : least;
    if (!(scale > 0)) {
        memset(to, 0, n);
        return scale;
    }
    for (int64_t d = 0; d < n; d += LANES)
        v_store_i8_part(to + d, (vi_t)(v_load_part(x + d, n - d) / v_splat(scale) + magic), n - d);
    return scale;
}

/* Keys [first, first + n) as v_dot_u8 takes them, with 0 up to whole lanes; unless they are `there`. */
INLINE void rows_as_bytes(const fa_array *x, const row_block *rows, int64_t first, int64_t n, int64_t width, char *to)
{
    const int64_t row_bytes = round_up(width, 4);
    const vw_t offset = (vw_t){0} + 0x01010101u * V_I8_OFFSET;
    EACH_KEY(x, rows, first, n, j, from)
    {
        int64_t d = 0;
        for (; d + V_BYTES <= width; d += V_BYTES) v_store(to + d, (v_t)((vw_t)v_load(from + d) ^ offset));
        char part[V_BYTES] = {0};
        memcpy(part, from + d, width - d);
        v_store(part, (v_t)((vw_t)v_load(part) ^ offset));
        memcpy(to + d, part, row_bytes - d);
        to += row_bytes;
    }
}

/* Values 4j .. 4j + 3, one byte of each in a lane: to (n / 4, width), past n with 0. */
INLINE void values_as_bytes(const fa_array *x, const row_block *rows, int64_t first, int64_t n, int64_t width, lane *to)
{
    const char *row[BLOCK_K];
    EACH_KEY(x, rows, first, n, j, from) row[j] = from;
    for (int64_t j = 0; j < n; j += 4, to += width) {
        int64_t d = 0;
        for (; j + 4 <= n && d + LANES <= width; d += LANES) {
            const char *const four[] = {row[j] + d, row[j + 1] + d, row[j + 2] + d, row[j + 3] + d};
            v_store(to + d, (v_t)v_four_i8(four));
        }
        memset(to + d, 0, (width - d) * sizeof(lane));
        for (int64_t i = 0; i < smaller(4, n - j); i++)
            for (int64_t c = d; c < width; c++) ((char *)(to + c))[i] = row[j + i][c];
    }
}

/* to (n) = the scales of keys; NaN for those that are not finite, or a score of -Inf would hide the key. */
INLINE void load_key_scales(const fa_array *scale, const row_block *rows, int64_t first, int64_t n, lane *to)
{
    load_scales(scale, rows, first, n, 1, 0, to);
    for (int64_t j = 0; j < n; j++) to[j] += to[j] * 0;
}

/* to (n) = the scales of values. Of those by which probabilities cannot be rounded, negative ones too, it is 0: they are
 * `odd`, and added one by one. */
INLINE void load_value_scales(const fa_array *scale, const row_block *rows, int64_t first, int64_t n, lane *to,
                              bad_rows *odd)
{
    load_scales(scale, rows, first, n, 1, 0, to);
    odd->n = 0;
    for (int64_t j = 0; j < n; j++)
        if (to[j] < 0 || !is_plain(to[j], LEAST_SCALE)) odd->row[odd->n++] = j, to[j] = 0;
}

typedef struct {
    lane *s; /* (n, BLOCK_Q): scores, then probabilities relative to the block's largest score */
    int64_t n;
    const lane *v_scale;                       /* (n) */
    lane *row_max, *row_sum, *row_log, *alpha; /* (BLOCK_Q), as of softmax_update */
    lane *share, *weight; /* (BLOCK_Q): what makes s relative to row_max; what integers of values are multiplied by */
    lane *fours;          /* (n / 4, BLOCK_Q) */
} byte_softmax;

/* tools/polynomials.py derives it. */
static const lane exp2_bytes_poly[] = {(lane)0.69314718055994530942, (lane)0.24203533019054098332,
                                       (lane)0.055754649780458436764};

/* v_exp for probabilities that will be rounded to bytes: its relative error, 2e-4, is a tenth of what that adds. */
INLINE v_t v_exp_of_bytes(v_t x)
{
    const v_t magic = v_splat(EXP_ROUND + EXP_BIAS), log2_e = v_splat((lane)LOG2_E);
    x = v_max(v_splat((lane)(-EXP_BIAS * LN_2)), x);
    const v_t rounded = v_fma(x, log2_e, magic), rest = v_fma(x, log2_e, magic - rounded);
    const v_t power = v_fma(v_horner(exp2_bytes_poly, COUNT(exp2_bytes_poly), rest), rest, v_splat(1));
    return power * (v_t)((vw_t)rounded << MANTISSA_BITS);
}

/* softmax_update, and the probabilities as bytes. `hides`: some row may not attend some key. Only with `keeps` is s left
 * as probabilities, and row_log updated. */
INLINE int softmax_of_bytes(int nv, int hides, int keeps, const byte_softmax *p)
{
    v_t base[NV], sum[NV], log[NV], inverse[NV];
    vi_t moved = {0};
    lane factor[BLOCK_K], most = 0; /* v_scale_j MOST_PROB / u_i: of keys alone if no row hides any */
    for (int64_t j = 0; j < p->n; j++) most = p->v_scale[j] > most ? p->v_scale[j] : most;
    const lane all = most > 0 ? MOST_PROB / most : 0;
    for (int64_t j = 0; j < p->n; j++) factor[j] = p->v_scale[j] * all;
    UNROLL_FOR(int u = 0; u < nv; u++) {
        const lane *s = p->s + u * LANES;
        v_t max = v_splat(-INFINITY), odd = max, largest = v_splat(hides ? 0 : most);
        for (int64_t j = 0; j + 2 <= p->n; j += 2) {
            max = v_max(max, v_load(s + j * BLOCK_Q));
            odd = v_max(odd, v_load(s + (j + 1) * BLOCK_Q));
        }
        if (p->n % 2) max = v_max(max, v_load(s + (p->n - 1) * BLOCK_Q));
        max = v_max(odd, max);
        for (int64_t j = 0; hides && j < p->n; j++) {
            const vi_t attends = v_load(s + j * BLOCK_Q) > v_splat(-INFINITY);
            largest = v_max(largest, v_select(attends, v_splat(p->v_scale[j]), v_splat(0)));
        }
        const v_t old = v_load(p->row_max + u * LANES), new = v_max(old, max), to = v_base(new);
        const v_t alpha = v_exp_prob(old - to);
        const v_t share = v_select(max == v_splat(-INFINITY), v_splat(0), v_exp_prob(max - to));
        if (keeps && p->row_log) {
            const v_t old_log = v_load(p->row_log + u * LANES), step = v_log_weight(old - to);
            v_store(p->row_log + u * LANES, alpha * v_fma(v_load(p->row_sum + u * LANES), step, old_log));
        }
        moved |= alpha != v_splat(1);
        inverse[u] = v_select(largest > v_splat(0), v_splat(MOST_PROB) / largest, v_splat(0));
        base[u] = v_base(max);
        log[u] = sum[u] = v_splat(0);
        v_store(p->alpha + u * LANES, alpha);
        v_store(p->row_max + u * LANES, new);
        v_store(p->share + u * LANES, share);
        v_store(p->weight + u * LANES, share * largest * v_splat((lane)1 / MOST_PROB));
    }
    const v_t magic = v_splat(EXP_ROUND); /* adding it leaves an integer in the low bits */
    const wlane bits = 0x4b400000;        /* its own */
    for (int64_t j = 0; j < p->n; j += 4) {
        vi_t four[NV];
        UNROLL_FOR(int u = 0; u < nv; u++) four[u] = (vi_t){0} - (ilane)(bits + (bits << 8));
        UNROLL_FOR(int i = 0; i < 4; i++)
            UNROLL_FOR(int u = 0; u < nv; u++) {
                if (j + i >= p->n) { /* behind the last key of all */
                    four[u] += (vi_t)magic << (8 * i);
                    continue;
                }
                lane *s = p->s + (j + i) * BLOCK_Q + u * LANES;
                const v_t x = v_load(s) - base[u], prob = v_exp_of_bytes(x);
                sum[u] += prob;
                if (keeps && p->row_log) log[u] = v_fma(prob, v_log_weight(x), log[u]);
                if (keeps) v_store(s, prob);
                v_t by = v_splat(factor[j + i]);
                if (hides) /* a hidden key's scale may be any; times 0, it must not be Inf */
                    by = v_min(v_splat(MOST_PROB + 1), v_splat(p->v_scale[j + i]) * inverse[u]);
                const v_t weighed = v_fma(prob, by, magic);
                four[u] += (vi_t)weighed << (8 * i);
            }
        UNROLL_FOR(int u = 0; u < nv; u++) v_store(p->fours + j / 4 * BLOCK_Q + u * LANES, (v_t)four[u]);
    }
    UNROLL_FOR(int u = 0; u < nv; u++) {
        const v_t share = v_load(p->share + u * LANES), old = v_load(p->row_sum + u * LANES);
        v_store(p->row_sum + u * LANES, v_fma(old, v_load(p->alpha + u * LANES), share * sum[u]));
        if (!(keeps && p->row_log)) continue;
        const v_t step = v_log_weight(base[u] - v_base(v_load(p->row_max + u * LANES)));
        const v_t since = v_fma(sum[u], step, log[u]);
        v_store(p->row_log + u * LANES, v_fma(share, since, v_load(p->row_log + u * LANES)));
    }
    return v_any(moved);
}
