/* From scores to probabilities where a row needs all of its scores: sparsemax, entmax-1.5, the k largest, softmax.
 * Queries are on the lanes, so every step is taken for all rows of a tile at once, and nothing is sorted.
 *
 * Literals  nv, within this file; squared: 1 for entmax-1.5. above: 0, 1.
 * Exports   kept_scores, keep_near, find_threshold, support_width, normalise, selects, ordered, ROWWISE_ASKS. */
#pragma once
#include "interface/rowwise.h"
#include "any_nv.inc.h"

/* The keys that may matter to some row of a tile, in order, and their scores s (n, BLOCK_Q). */
typedef struct {
    lane *s;
    int64_t *key, n;
    vi_t live[NV_MAX]; /* lanes that hold a row */
} kept_scores;

/* A score this far below the row's largest has probability 0. entmax-1.5 halves scores first. */
INLINE lane support_width(fa_rowwise_kind kind)
{
    return kind == FA_SPARSEMAX ? 1 : kind == FA_ENTMAX15 ? 2 : (lane)INFINITY;
}

/* Looks at n kept keys from `first` on. Those stay whose score is NaN or within `width` of some row's largest; the
 * others, and all keys behind the n, are dropped. */
INLINE void keep_near_as(int nv, kept_scores *kept, int64_t first, int64_t n, lane width, const lane *row_max)
{
    int64_t to = first;
    v_t base[NV_MAX];
    UNROLL_FOR(int u = 0; u < nv; u++) base[u] = v_base(v_load(row_max + u * LANES));
    for (int64_t j = first; j < first + n; j++) {
        vi_t some = {0};
        UNROLL_FOR(int u = 0; u < nv; u++) {
            const v_t s = v_load(kept->s + j * BLOCK_Q + u * LANES);
            some |= kept->live[u] & ~(s - base[u] <= v_splat(-width));
            v_store(kept->s + to * BLOCK_Q + u * LANES, s);
        }
        kept->key[to] = kept->key[j];
        to += v_any(some);
    }
    kept->n = to;
}

NOINLINE void keep_near(int nv, kept_scores *kept, int64_t first, int64_t n, lane width, const lane *row_max)
{
    WITH_NV(nv, literal, keep_near_as(literal, kept, first, n, width, row_max));
}

/* Scores become factor * (score - row_max). */
INLINE void relate_to_max(int nv, kept_scores *kept, lane factor, const lane *row_max)
{
    v_t base[NV_MAX];
    UNROLL_FOR(int u = 0; u < nv; u++) base[u] = v_base(v_load(row_max + u * LANES));
    for (int64_t j = 0; j < kept->n; j++)
        UNROLL_FOR(int u = 0; u < nv; u++) {
            lane *s = kept->s + j * BLOCK_Q + u * LANES;
            v_store(s, (v_load(s) - base[u]) * v_splat(factor));
        }
}

#define ROWWISE_ASKS (8 * BLOCK_K) /* keys between two calls of given_up(); passes over up to PART_K are too short */

/* Finds tau, for which the sum of max(z - tau, 0), or of its square, is 1, by Newton's method from tau = -1, where the
 * sum is 1 or more. The sum is convex and falls with tau: tau only rises, until it rises for no row. Keys below tau are
 * dropped on the way. For sparsemax these are the steps of Michelot (1986), exact once the support is found. */
INLINE void newton(const fa_watch *watch, int nv, int squared, kept_scores *kept, v_t *tau)
{
    vi_t rises;
    do {
        v_t sum[NV_MAX], slope[NV_MAX];
        int64_t to = 0;
        UNROLL_FOR(int u = 0; u < nv; u++) sum[u] = slope[u] = v_splat(0);
        for (int64_t first = 0; first < kept->n; first += BLOCK_K) { /* sums of sums: less is rounded away */
            v_t block_sum[NV_MAX], block_slope[NV_MAX];
            UNROLL_FOR(int u = 0; u < nv; u++) block_sum[u] = block_slope[u] = v_splat(0);
            for (int64_t j = first; j < smaller(first + BLOCK_K, kept->n); j++) {
                vi_t some = {0};
                UNROLL_FOR(int u = 0; u < nv; u++) {
                    const v_t z = v_load(kept->s + j * BLOCK_Q + u * LANES), above = v_max(v_splat(0), z - tau[u]);
                    some |= kept->live[u] & ~(z <= tau[u]);
                    v_store(kept->s + to * BLOCK_Q + u * LANES, z);
                    block_sum[u] = squared ? v_fma(above, above, block_sum[u]) : block_sum[u] + above;
                    block_slope[u] += squared ? 2 * above : v_select(above > 0, v_splat(1), v_splat(0));
                }
                kept->key[to] = kept->key[j];
                to += v_any(some);
            }
            UNROLL_FOR(int u = 0; u < nv; u++) sum[u] += block_sum[u], slope[u] += block_slope[u];
        }
        kept->n = to;
        rises = (vi_t){0};
        UNROLL_FOR(int u = 0; u < nv; u++) {
            const v_t next = tau[u] + (sum[u] - 1) / slope[u];
            rises |= next > tau[u]; /* false for NaN, and for a row without keys: -1 / 0 */
            tau[u] = v_select(next > tau[u], next, tau[u]);
        }
    } while (v_any(rises) && !(kept->n > PART_K && given_up(watch)));
}

/* The bits of lanes as integers in the same order; applied once more, back. */
INLINE vi_t ordered(vi_t bits) { return bits ^ (vi_t)((vw_t)(bits >> (LANE_BITS - 1)) >> 1); }

/* How many scores of each lane are at least `limit`, or with `above` greater. */
INLINE void count_from(int nv, const kept_scores *kept, int above, const v_t *limit, vi_t *count)
{
    UNROLL_FOR(int u = 0; u < nv; u++) count[u] = (vi_t){0};
    for (int64_t j = 0; j < kept->n; j++)
        UNROLL_FOR(int u = 0; u < nv; u++) {
            const v_t s = v_load(kept->s + j * BLOCK_Q + u * LANES);
            count[u] -= above ? s > limit[u] : s >= limit[u]; /* true is -1 */
        }
}

/* Leaves each lane its k largest scores, the first of equal ones; the others become -inf. NaN stays. The k-th is found
 * by bisection of the bits, as integers: in at most as many passes as a lane has, or until exactly k are found. */
INLINE void take_largest(const fa_watch *watch, int nv, kept_scores *kept, int64_t k, const lane *row_max)
{
    const vi_t wanted = (vi_t){0} + (ilane)smaller(k, kept->n);
    vi_t low[NV_MAX], high[NV_MAX], count[NV_MAX], open = {0};
    v_t limit[NV_MAX];
    UNROLL_FOR(int u = 0; u < nv; u++) limit[u] = v_splat(-INFINITY);
    count_from(nv, kept, 1, limit, count);
    UNROLL_FOR(int u = 0; u < nv; u++) {
        const vi_t most = ordered((vi_t)v_load(row_max + u * LANES)) + 1;
        low[u] = ordered((vi_t)v_splat(-LANE_MAX));
        high[u] = (vi_t)v_select(kept->live[u] & (count[u] > wanted), (v_t)most,
                                 (v_t)low[u]); /* not more than `wanted`: all are taken */
    }
    do {
        vi_t middle[NV_MAX];
        open = (vi_t){0};
        UNROLL_FOR(int u = 0; u < nv; u++) {
            middle[u] = (low[u] & high[u]) + ((low[u] ^ high[u]) >> 1); /* rounded down, without overflow */
            limit[u] = (v_t)ordered(middle[u]);
        }
        count_from(nv, kept, 0, limit, count);
        UNROLL_FOR(int u = 0; u < nv; u++) {
            const vi_t inside = middle[u] > low[u], enough = count[u] >= wanted;
            low[u] = (vi_t)v_select(inside & enough, (v_t)middle[u], (v_t)low[u]);
            high[u] = (vi_t)v_select(inside & (count[u] <= wanted), (v_t)middle[u], (v_t)high[u]);
            open |= inside & (count[u] != wanted);
        }
    } while (v_any(open) && !(kept->n > PART_K && given_up(watch)));
    UNROLL_FOR(int u = 0; u < nv; u++) limit[u] = (v_t)ordered(low[u]);
    count_from(nv, kept, 1, limit, count);
    int64_t to = 0;
    for (int64_t j = 0; j < kept->n; j++) {
        vi_t some = {0};
        UNROLL_FOR(int u = 0; u < nv; u++) {
            const v_t s = v_load(kept->s + j * BLOCK_Q + u * LANES);
            const vi_t equal = (s == limit[u]) & (count[u] < wanted), takes = (s > limit[u]) | equal | (s != s);
            count[u] -= equal;
            some |= kept->live[u] & takes;
            v_store(kept->s + to * BLOCK_Q + u * LANES, v_select(takes, s, v_splat(-INFINITY)));
        }
        kept->key[to] = kept->key[j];
        to += v_any(some);
    }
    kept->n = to;
}

/* All scores are there. Drops those that do not matter, makes the others relative to the largest, and finds tau. */
INLINE void find_threshold_as(const fa_rowwise_args *call, int nv, const lane *row_max, kept_scores *kept, v_t *tau)
{
    const fa_rowwise_kind kind = call->kind;
    const fa_watch *watch = call->attention.watch;
    keep_near_as(nv, kept, 0, kept->n, support_width(kind), row_max);
    if (kind == FA_TOP_K) take_largest(watch, nv, kept, call->k_keys, row_max);
    relate_to_max(nv, kept, kind == FA_ENTMAX15 ? (lane)0.5 : 1, row_max);
    UNROLL_FOR(int u = 0; u < nv; u++) tau[u] = v_splat(-1);
    if (kind == FA_SPARSEMAX) newton(watch, nv, 0, kept, tau);
    if (kind == FA_ENTMAX15) newton(watch, nv, 1, kept, tau);
}

NOINLINE void find_threshold(const fa_rowwise_args *call, int nv, const lane *row_max, kept_scores *kept, v_t *tau)
{
    WITH_NV(nv, literal, find_threshold_as(call, literal, row_max, kept, tau));
}

/* probs (n, nv) of the relative scores z (n, nv); row_sum += their sums. */
INLINE void normalise_as(fa_rowwise_kind kind, int nv, const lane *z, int64_t n, const v_t *tau, lane *probs,
                         lane *row_sum)
{
    const int sparse = kind == FA_SPARSEMAX || kind == FA_ENTMAX15;
    v_t sum[NV_MAX];
    UNROLL_FOR(int u = 0; u < nv; u++) sum[u] = v_splat(0);
    for (int64_t j = 0; j < n; j++)
        UNROLL_FOR(int u = 0; u < nv; u++) {
            const v_t x = v_load(z + j * BLOCK_Q + u * LANES);
            const v_t above = sparse ? v_max(v_splat(0), x - tau[u]) : v_exp_prob(x);
            const v_t prob = kind == FA_ENTMAX15 ? above * above : above;
            sum[u] += prob;
            v_store(probs + j * BLOCK_Q + u * LANES, prob);
        }
    UNROLL_FOR(int u = 0; u < nv; u++) v_store(row_sum + u * LANES, v_load(row_sum + u * LANES) + sum[u]);
}

static void normalise(fa_rowwise_kind kind, int nv, const lane *z, int64_t n, const v_t *tau, lane *probs,
                      lane *row_sum)
{
    WITH_NV(nv, literal, normalise_as(kind, literal, z, n, tau, probs, row_sum));
}

/* The lanes that attend a key with relative score z and probability `prob`. */
INLINE vi_t selects(fa_rowwise_kind kind, v_t z, v_t prob)
{
    return kind == FA_SPARSEMAX || kind == FA_ENTMAX15 ? prob != v_splat(0) : z != v_splat(-INFINITY);
}
