/* The scores of additive attention (Bahdanau et al. 2015), s = sum over d of w_d tanh(q_d + k_d), queries on the lanes.
 *
 * With Q = e^2q and K = e^2k, tanh(q + k) = (QK - 1) / (QK + 1). So each query and each key needs exponentials once,
 * and not each pair; and the quotients of two dimensions are added over a common denominator, with one division. That
 * is five times as fast, and exact to a rounding of 1, if queries and keys are so small that nothing overflows. If all
 * of them are very small, QK - 1 would have few digits: then a polynomial is used, which costs no more.
 *
 * Literals  small: 0, or 1 if no |q + k| is beyond TANH_SMALL.
 * Exports   additive_scratch, additive_begin, block_additive. */
#pragma once
#include "interface/rowwise.h"
#include "any_nv.inc.h"

#define ADDITIVE_DEPTH 8 /* dimensions that are summed before they are added: less is rounded away; an even number */
#define ADDITIVE_MOST 8  /* of |q| and |k|: Q K <= e^32, and the product of two denominators is below 1e28 */

typedef struct {
    lane *weight; /* (head_dim, BLOCK_Q): w of every lane's head */
    lane *exp_q;  /* (head_dim, BLOCK_Q) */
    lane *exp_k;  /* (head_dim), of one key */
    lane largest; /* |q|; Inf if one is NaN */
} additive_scratch;

/* dst (n), whole vectors, = e^(2 src); returns the largest |src|, Inf if one is NaN. */
INLINE lane exp_twice(const char *src, int64_t n, lane *dst)
{
    v_t largest = v_splat(0);
    for (int64_t i = 0; i < n; i += LANES) {
        const char *from = src + i * (int64_t)sizeof(lane);
        const v_t x = v_load_part(from, n - i);
        largest = v_max(v_select(x == x, v_abs(x), v_splat(INFINITY)), largest);
        v_store(dst + i, v_exp(2 * x));
    }
    return v_max_lanes(largest);
}

/* s (nv) += the score of one key: weight and qt are (depth, nv), k is (depth). */
INLINE void additive_by_tanh(int nv, int small, const char *k, const lane *qt, const lane *weight, int64_t depth,
                             lane *s)
{
    v_t acc[NV_MAX];
    UNROLL_FOR(int u = 0; u < nv; u++) acc[u] = v_splat(0);
    for (int64_t d = 0; d < depth; d++) {
        const v_t key = v_splat(*(const lane_u *)(k + d * (int64_t)sizeof(lane)));
        UNROLL_FOR(int u = 0; u < nv; u++) {
            const int64_t i = d * BLOCK_Q + u * LANES;
            const v_t x = v_load(qt + i) + key;
            acc[u] = v_fma(v_load(weight + i), small ? v_tanh_small(x) : v_tanh(x), acc[u]);
        }
    }
    UNROLL_FOR(int u = 0; u < nv; u++) v_store(s + u * LANES, v_load(s + u * LANES) + acc[u]);
}

/* The same by exponentials: q (depth, nv) and k (depth) hold Q and K. */
INLINE void additive_by_exp(int nv, const lane *k, const lane *q, const lane *weight, int64_t depth, lane *s)
{
    const v_t one = v_splat(1);
    int64_t d = 0;
    v_t acc[NV_MAX];
    UNROLL_FOR(int u = 0; u < nv; u++) acc[u] = v_splat(0);
    for (; d + 2 <= depth; d += 2)
        UNROLL_FOR(int u = 0; u < nv; u++) {
            const int64_t i = d * BLOCK_Q + u * LANES;
            const v_t x = v_load(q + i) * v_splat(k[d]), y = v_load(q + i + BLOCK_Q) * v_splat(k[d + 1]);
            const v_t wx = (x - one) * v_load(weight + i), wy = (y - one) * v_load(weight + i + BLOCK_Q);
            acc[u] += v_fma(wx, y + one, wy * (x + one)) / ((x + one) * (y + one));
        }
    if (d < depth)
        UNROLL_FOR(int u = 0; u < nv; u++) {
            const v_t x = v_load(q + d * BLOCK_Q + u * LANES) * v_splat(k[d]);
            acc[u] += (x - one) * v_load(weight + d * BLOCK_Q + u * LANES) / (x + one);
        }
    UNROLL_FOR(int u = 0; u < nv; u++) v_store(s + u * LANES, v_load(s + u * LANES) + acc[u]);
}

/* Prepares the weights and exponentials of the task's rows, whose queries are qt. */
INLINE void additive_begin(const fa_rowwise_args *call, const row_block *rows, const lane *qt,
                           additive_scratch *scratch)
{
    const int64_t depth = call->attention.head_dim;
    memset(scratch->weight, 0, depth * BLOCK_Q * sizeof(lane));
    EACH_ROW(rows, i, id) {
        const lane *weight = (const lane *)call->weight + id.head * depth;
        for (int64_t d = 0; d < depth; d++) scratch->weight[d * BLOCK_Q + i] = weight[d];
    }
    scratch->largest = exp_twice((const char *)qt, depth * BLOCK_Q, scratch->exp_q);
}

/* p->out (n, nv) = scores of n keys p->x and the queries p->y. What is in a hidden key changes no bit of another. */
INLINE void block_additive_as(int nv, int64_t n, const outer_product *p, const additive_scratch *scratch)
{
    for (int64_t j = 0; j < n; j++) {
        const char *k = p->x + j * p->x_row;
        lane *s = p->out + j * BLOCK_Q;
        const lane q_largest = scratch->largest, k_largest = exp_twice(k, p->depth, scratch->exp_k);
        for (int u = 0; u < nv; u++) v_store(s + u * LANES, v_splat(0));
        for (int64_t d = 0; d < p->depth; d += ADDITIVE_DEPTH) {
            const int64_t depth = smaller(p->depth - d, ADDITIVE_DEPTH), row = d * BLOCK_Q;
            const char *key = k + d * (int64_t)sizeof(lane);
            const lane *weight = scratch->weight + row;
            if (q_largest + k_largest <= TANH_SMALL) additive_by_tanh(nv, 1, key, p->y + row, weight, depth, s);
            else if (q_largest <= ADDITIVE_MOST && k_largest <= ADDITIVE_MOST)
                additive_by_exp(nv, scratch->exp_k + d, scratch->exp_q + row, weight, depth, s);
            else additive_by_tanh(nv, 0, key, p->y + row, weight, depth, s);
        }
    }
}

NOINLINE void block_additive(int nv, int64_t n, const outer_product *p, const additive_scratch *scratch)
{
    WITH_NV(nv, literal, block_additive_as(literal, n, p, scratch));
}
