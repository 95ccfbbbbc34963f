/* The two products of attention by the tiles of AMX, in bfloat16, and the softmax between them; only if V_AMX. As in
 * tile.inc.h lanes are queries: so masks, modifiers and results are as they are without tiles. Products of gradients are
 * the same two, of other operands.
 *
 *     tile            A                                  B                                  C
 *     S^T = K Q^T     16 keys x 32 dimensions of K       16 pairs of dimensions x queries   16 keys x 16 queries
 *     O^T += V^T P^T  16 dimensions x 32 keys of V^T     16 pairs of keys x queries         16 dimensions x 16 queries
 *
 * Four accumulators are 32 keys, or dimensions, x BLOCK_Q queries. K is read in place if its rows are whole tiles and
 * begin at cache lines; V^T is made of a block once (transpose_values). Keys are taken in steps of AMX_KEYS of the
 * sequence, so that a row's bits do not depend on where others begin: ranges.inc.h.
 *
 * Literals  nv: 1, NV. hi, keep, logs: 0, 1. count: nv, 2 * nv.
 * Exports   amx_load_sums, amx_store_sums, amx_outer; amx_softmax_args, amx_softmax; amx_values, transpose_values. */
#pragma once
#include "softmax.inc.h"

#define AMX_AWAKE_AT 24 /* key of a block; on an Emerald Rapids 16 to 40 are level (docs/dev/intel.md) */

_Static_assert(BLOCK_Q == 2 * AMX_ROWS && BLOCK_K % AMX_KEYS == 0, "tiles fill a block");

/* out (32 or, without `hi`, 16 rows; 32 or 16 columns): accumulators as they begin, 0 or out, and as they end. */
INLINE void amx_load_sums(int nv, int hi, acc_mode mode, const lane *out, int64_t pitch)
{
    const lane *high = out + AMX_ROWS * pitch;
    const int64_t row = pitch * (int64_t)sizeof(lane);
    if (mode == ACC_ZERO) {
        AMX_ZERO(0);
        if (nv > 1) AMX_ZERO(1);
        if (hi) AMX_ZERO(2);
        if (hi && nv > 1) AMX_ZERO(3);
        return;
    }
    AMX_LOAD(0, out, row);
    if (nv > 1) AMX_LOAD(1, out + LANES, row);
    if (hi) AMX_LOAD(2, high, row);
    if (hi && nv > 1) AMX_LOAD(3, high + LANES, row);
}

INLINE void amx_store_sums(int nv, int hi, lane *out, int64_t pitch)
{
    lane *high = out + AMX_ROWS * pitch;
    const int64_t row = pitch * (int64_t)sizeof(lane);
    AMX_STORE(0, out, row);
    if (hi) AMX_STORE(2, high, row);
    if (nv > 1) AMX_STORE(1, out + LANES, row);
    if (hi && nv > 1) AMX_STORE(3, high + LANES, row);
}

/* block_outer, for n and depth rounded up to whole steps: of x and of out there are as many rows. With `more`, the factor
 * is 1. */
INLINE void amx_outer(int nv, int64_t n, const outer_product *p)
{
    const int64_t pitch = p->pitch * sizeof(lane), k_row = p->x_row, high = AMX_ROWS * k_row;
    const char *k = p->x;
    lane *s = p->out;
    for (int64_t j = 0; j < n; j += AMX_KEYS, k += AMX_KEYS * k_row, s += AMX_KEYS * p->pitch) {
        amx_load_sums(nv, 1, p->more ? ACC_KEEP : ACC_ZERO, s, p->pitch);
        for (int64_t d = 0; d < p->depth; d += AMX_KEYS / 2) {
            const char *x = k + d * (int64_t)sizeof(lane);
            const lane *y = p->y + d * p->pitch;
            AMX_LOAD(4, x, k_row);
            AMX_LOAD(6, y, pitch);
            AMX_DOT_BF16(0, 4, 6);
            AMX_LOAD(5, x + high, k_row);
            AMX_DOT_BF16(2, 5, 6);
            if (nv == 1) continue;
            AMX_LOAD(7, y + LANES, pitch);
            AMX_DOT_BF16(1, 4, 7);
            AMX_DOT_BF16(3, 5, 7);
        }
        amx_store_sums(nv, 1, s, p->pitch);
    }
    for (int64_t j = 0; p->factor != 1 && j < n; j++)
        UNROLL_FOR(int u = 0; u < nv; u++) {
            lane *to = p->out + j * p->pitch + u * LANES;
            v_store(to, v_load(to) * v_splat(p->factor));
        }
}

/* power = 2^y of `count` vectors up to a little above 0: 1 at 0, exactly 0 at -inf, NaN at NaN. y = whole + f with
 * 0 <= f < 1. The relative error is 1.1e-7 (tools/polynomials.py): lse and statistics, sums of these numbers, keep the
 * digits of float32. A result that is not normal takes 125 ns unless it is flushed to 0. */
static const lane exp2_tiles_poly[] = {1,
                                       0.69315229038802043011f,
                                       0.24015456857058018393f,
                                       0.055830604118836362919f,
                                       0.0089797184347966757739f,
                                       0.0018826946939539721723f};
INLINE void v_exp2_amx(int count, const v_t *y, v_t *power)
{
    v_t f[2 * NV];
    UNROLL_FOR(int i = 0; i < count; i++) f[i] = v_above_whole(y[i]);
    UNROLL_FOR(int i = 0; i < count; i++) power[i] = v_horner(exp2_tiles_poly, COUNT(exp2_tiles_poly), f[i]);
    UNROLL_FOR(int i = 0; i < count; i++) power[i] = v_times_power(power[i], y[i]);
}

/* Pairs of bfloat16, rounded to nearest, ties away from 0: integers add beside tiles at full speed, multipliers do not. */
INLINE v_t v_pair_up(v_t low, v_t high)
{
    const vw_t half = (vw_t){0} + 0x8000, upper = (vw_t){0} + 0xffff0000u;
    return (v_t)((((vw_t)low + half) >> 16) | (((vw_t)high + half) & upper));
}

/* What softmax_update takes, pairs (BLOCK_K / 2, BLOCK_Q), and out (width, BLOCK_Q) as it is, or NULL. */
typedef struct {
    lane *s;
    int64_t n;
    lane factor;
    lane *row_max, *row_sum, *row_log, *alpha, *pairs, *out;
    int64_t width;
} amx_softmax_args;

/* softmax_update of scores times `factor`: row_max is as they are. Probabilities become pairs, up to a whole step
 * 0; with `keep` they take the place of the scores, too. out *= alpha where that is not 1: before the probabilities are
 * computed, since a tile that is loaded waits for all that was just stored. */
INLINE void amx_softmax(int nv, int keep, int logs, const amx_softmax_args *p)
{
    lane *const s = p->s, *const pairs = p->pairs;
    const int64_t n = p->n;
    const v_t per_score = v_splat(p->factor * (lane)LOG2_E), none = v_splat(-INFINITY);
    v_t base[NV], sum[NV][2], log[NV];
    vi_t moved = {0};
    UNROLL_FOR(int u = 0; u < nv; u++) {
        const lane *from = s + u * LANES;
        v_t max[4] = {none, none, none, none}; /* one chain would wait for each */
        int64_t j = 0;
        for (; j + 4 <= n; j += 4, from += 4 * BLOCK_Q)
            UNROLL_FOR(int i = 0; i < 4; i++) max[i] = v_max(max[i], v_load(from + i * BLOCK_Q));
        for (; j < n; j++, from += BLOCK_Q) max[0] = v_max(max[0], v_load(from));
        const v_t before = v_load(p->row_max + u * LANES), all = v_max(v_max(max[0], max[1]), v_max(max[2], max[3]));
        const v_t now = v_max(before, all), change = (before - v_base(now)) * v_splat(p->factor);
        const v_t scale = v_exp_prob(change);
        base[u] = v_base(now);
        if (logs) {
            const v_t old = v_load(p->row_log + u * LANES), step = v_log_weight(change);
            v_store(p->row_log + u * LANES, scale * v_fma(v_load(p->row_sum + u * LANES), step, old));
        }
        moved |= scale != v_splat(1);
        v_store(p->alpha + u * LANES, scale);
        v_store(p->row_max + u * LANES, now);
        log[u] = sum[u][0] = sum[u][1] = v_splat(0);
    }
    if (p->out && v_any(moved)) {
        for (int64_t d = 0; d < p->width; d++)
            UNROLL_FOR(int u = 0; u < nv; u++) {
                lane *to = p->out + d * BLOCK_Q + u * LANES;
                v_store(to, v_load(to) * v_load(p->alpha + u * LANES));
            }
        AMX_AWAKE();
    }
    int64_t j = 0;
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | _MM_FLUSH_ZERO_ON); /* results that are not normal become 0 */
    for (; j + 2 <= n; j += 2) {
        v_t y[2 * NV], prob[2 * NV];
        if (j == AMX_AWAKE_AT) AMX_AWAKE();
        UNROLL_FOR(int i = 0; i < 2 * nv; i++)
            y[i] = (v_load(s + (j + i % 2) * BLOCK_Q + i / 2 * LANES) - base[i / 2]) * per_score;
        v_exp2_amx(2 * nv, y, prob);
        UNROLL_FOR(int i = 0; i < 2 * nv; i++) {
            sum[i / 2][i % 2] += prob[i];
            if (logs) log[i / 2] = v_fma(prob[i], v_log_weight(y[i] * v_splat((lane)LN_2)), log[i / 2]);
            if (keep) v_store(s + (j + i % 2) * BLOCK_Q + i / 2 * LANES, prob[i]);
        }
        UNROLL_FOR(int u = 0; u < nv; u++)
            v_store(pairs + j / 2 * BLOCK_Q + u * LANES, v_pair_up(prob[2 * u], prob[2 * u + 1]));
    }
    if (j < n) {
        v_t y[NV], prob[NV];
        UNROLL_FOR(int u = 0; u < nv; u++) y[u] = (v_load(s + j * BLOCK_Q + u * LANES) - base[u]) * per_score;
        v_exp2_amx(nv, y, prob);
        UNROLL_FOR(int u = 0; u < nv; u++) {
            sum[u][0] += prob[u];
            if (logs) log[u] = v_fma(prob[u], v_log_weight(y[u] * v_splat((lane)LN_2)), log[u]);
            if (keep) v_store(s + j * BLOCK_Q + u * LANES, prob[u]);
            v_store(pairs + j / 2 * BLOCK_Q + u * LANES, v_pair_up(prob[u], v_splat(0)));
        }
        j += 2;
    }
    _mm_setcsr(before);
    for (; j < round_up(n, AMX_KEYS); j += 2)
        UNROLL_FOR(int u = 0; u < nv; u++) v_store(pairs + j / 2 * BLOCK_Q + u * LANES, v_splat(0));
    UNROLL_FOR(int u = 0; u < nv; u++) {
        const v_t all = sum[u][0] + sum[u][1];
        v_store(p->row_sum + u * LANES, v_fma(v_load(p->row_sum + u * LANES), v_load(p->alpha + u * LANES), all));
        if (logs) v_store(p->row_log + u * LANES, v_load(p->row_log + u * LANES) + log[u]);
    }
}

/* Rows [d, d + 16 or, with `hi`, 32) of out. */
INLINE void amx_value_tiles(int nv, int hi, int64_t d, const value_product *p)
{
    const int64_t pitch = p->pitch * sizeof(lane), square = AMX_ROWS * AMX_BYTES;
    lane *out = p->out + d * p->pitch;
    const char *v = p->v + d * AMX_BYTES;
    amx_load_sums(nv, hi, p->mode, out, p->pitch);
    for (int64_t j = 0; j < p->n; j += AMX_KEYS / 2, v += AMX_KEYS / 2 * p->v_row) {
        const lane *probs = p->probs + j * p->pitch;
        AMX_LOAD(4, v, AMX_BYTES);
        AMX_LOAD(6, probs, pitch);
        AMX_DOT_BF16(0, 4, 6);
        if (hi) AMX_LOAD(5, v + square, AMX_BYTES);
        if (hi) AMX_DOT_BF16(2, 5, 6);
        if (nv == 1) continue;
        AMX_LOAD(7, probs + LANES, pitch);
        AMX_DOT_BF16(1, 4, 7);
        if (hi) AMX_DOT_BF16(3, 5, 7);
    }
    amx_store_sums(nv, hi, out, p->pitch);
}

/* block_values: v is V^T as transpose_values makes it, v_row the bytes of a pair of keys. */
INLINE void amx_values(int nv, const value_product *p)
{
    const int64_t width = padded_v(p->head_dim_v);
    for (int64_t d = 0; d < width; d += 2 * AMX_ROWS) {
        if (d + AMX_ROWS < width) amx_value_tiles(nv, 1, d, p);
        else amx_value_tiles(nv, 0, d, p);
    }
}

/* to = V^T of n keys: of each AMX_KEYS, tiles of 16 dimensions x keys, 0 where there are none. */
static void transpose_values(const char *v, int64_t v_row, int64_t n, int64_t width, lane *to)
{
    static const uint16_t zeros[LANES];
    for (int64_t j = 0; j < n; j += AMX_KEYS, v += AMX_KEYS * v_row)
        for (int64_t d = 0; d < width; d += LANES, to += AMX_ROWS * LANES) {
            v_t pairs[LANES];
            UNROLL_FOR(int i = 0; i < LANES; i++) {
                const char *row0 = v + 2 * i * v_row + d * 2, *row1 = row0 + v_row;
                const int64_t left = n - j - 2 * i, some = smaller(width - d, LANES) * 2;
                uint16_t part[2][LANES] = {{0}};
                if (some < 2 * LANES && left > 0) row0 = memcpy(part[0], row0, some);
                if (some < 2 * LANES && left > 1) row1 = memcpy(part[1], row1, some);
                pairs[i] = v_pair_bf16(left > 0 ? row0 : (const char *)zeros, left > 1 ? row1 : (const char *)zeros);
            }
            v_transpose(pairs);
            UNROLL_FOR(int i = 0; i < LANES; i++) v_store(to + i * LANES, pairs[i]);
        }
}
