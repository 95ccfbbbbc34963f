/* What a call may return beside its output, without ever holding the scores of all keys: statistics of rows, which the
 * walk over the keys carries along, and sums over rows, for which a second pass computes the probabilities once more.
 *
 *     row_max    max_j s_j
 *     entropy    -sum_j p_j log p_j = log l - (sum_j e_j (s_j - m)) / l    e_j = exp(s_j - m), l their sum
 *     top        the largest p_j and their keys, kept as scores until l is known
 *     key_sums   sum_i p_ij, and mean_weights, sum_h p_hij / heads_q: in the second pass
 *
 * A sink is part of l and of nothing else. A row whose l is NaN has NaN statistics. A row that attends nothing has
 * row_max -inf, keys -1, and 0 for the rest.
 *
 * Exports   top_list, top_insert_row, top_insert_tile, top_merge; row_sums, write_statistics; load_row_norm,
 *           add_lanes_to_key_sums, add_rows_to_key_sums, add_rows_to_mean (of the second pass). */
#pragma once
#include "ranges.inc.h"
#include "softmax.inc.h"

/* A row's best scores, best first, and their keys. Of equal scores the first key comes first; -inf: no further key. */
typedef struct {
    lane *score;
    int64_t *key;
} top_list;

INLINE void top_insert(int64_t n_top, top_list top, lane score, int64_t key)
{
    int64_t i = n_top - 1;
    if (!(score > top.score[i])) return;
    for (; i > 0 && score > top.score[i - 1]; i--) {
        top.score[i] = top.score[i - 1];
        top.key[i] = top.key[i - 1];
    }
    top.score[i] = score;
    top.key[i] = key;
}

/* Adds a list of later keys. */
static void top_merge(int64_t n_top, top_list into, top_list from)
{
    for (int64_t i = 0; i < n_top && from.score[i] > into.score[n_top - 1]; i++)
        top_insert(n_top, into, from.score[i], from.key[i]);
}

/* Adds scores s (n) of one row, of keys from `first` on. Whole vectors hold s. */
static void top_insert_row(int64_t n_top, const lane *s, int64_t n, int64_t first, top_list top)
{
    for (int64_t j = 0; j < n; j += LANES) {
        if (!v_any(v_load(s + j) > v_splat(top.score[n_top - 1]))) continue;
        for (int64_t i = j; i < n && i < j + LANES; i++) top_insert(n_top, top, s[i], first + i);
    }
}

/* Adds scores s (n, nv), queries on the lanes, of keys from `first` on, to score and key (n_top, BLOCK_Q). A new score
 * goes to its place in the list of its lane, and what is below that place moves down by one. */
static void top_insert_tile(int nv, int64_t n_top, const lane *s, int64_t n, ilane first, lane *score, ilane *key)
{
    for (int64_t lanes = 0; lanes < nv * LANES; lanes += LANES)
        for (int64_t j = 0; j < n; j++) {
            const v_t x = v_load(s + j * BLOCK_Q + lanes);
            if (!v_any(x > v_load(score + (n_top - 1) * BLOCK_Q + lanes))) continue;
            v_t above = x, above_key = (v_t)((vi_t){0} + (first + (ilane)j)); /* what comes where the list is below x */
            for (int64_t i = 0; i < n_top; i++) {
                lane *at_score = score + i * BLOCK_Q + lanes;
                ilane *at_key = key + i * BLOCK_Q + lanes;
                const v_t old = v_load(at_score), old_key = v_load(at_key);
                const vi_t below = x > old; /* once so, to the end: the list is sorted */
                v_store(at_score, v_select(below, above, old));
                v_store(at_key, v_select(below, above_key, old_key));
                above = v_select(below, old, above);
                above_key = v_select(below, old_key, above_key);
            }
        }
}

/* What is known of a row in the end: the maximum, the sum and row_log of its keys; `base`, the maximum with the sink;
 * by how much the sum is scaled down for it; and `sum`, the denominator. */
typedef struct {
    lane keys_max, keys_sum, keys_log, scale, base, sum;
} row_sums;

INLINE void store_lane(const fa_array *x, int64_t b, row_id id, int64_t j, lane value)
{
    memcpy(at(x, b, id.head, id.query, j), &value, sizeof value);
}

/* -sum_j p_j log p_j, from two terms of one sign: no digits cancel. */
static lane row_entropy(const row_sums *row)
{
    const lane sum = row->scale * row->keys_sum;
    if (sum == 0) return 0;
    const lane logs = row->scale * (row->keys_log + row->keys_sum * (row->keys_max - row->base));
    return (sum * (lane)log((double)row->sum) - logs) / row->sum;
}

static void write_statistics(const fa_attention_args *a, int64_t b, row_id id, const row_sums *row, top_list top)
{
    const int defined = row->sum == row->sum, some = row->keys_sum != 0;
    const lane base = some ? row->base : 0, factor = row->sum == 0 ? 0 : 1 / row->sum;
    const lane max = some ? row->keys_max : -(lane)INFINITY, undefined = (lane)NAN;
    if (a->stats.norm.data) {
        store_lane(&a->stats.norm, b, id, 0, base);
        store_lane(&a->stats.norm, b, id, 1, factor);
    }
    if (a->stats.row_max.data) store_lane(&a->stats.row_max, b, id, 0, defined ? max : undefined);
    if (a->stats.entropy.data) store_lane(&a->stats.entropy, b, id, 0, defined ? row_entropy(row) : undefined);
    for (int64_t i = 0; i < a->stats.n_top; i++) {
        const int listed = defined && top.score[i] != -(lane)INFINITY;
        const int64_t key = listed ? top.key[i] : -1;
        const lane weight = listed ? lane_exp(top.score[i] - base) * factor : 0;
        store_lane(&a->stats.top_weights, b, id, i, defined ? weight : undefined);
        memcpy(at(&a->stats.top_keys, b, id.head, id.query, i), &key, sizeof key);
    }
}

/* The second pass reads what the first has written to norm: base and factor of each row. */
static void load_row_norm(const fa_attention_args *a, const row_block *rows, lane *base, lane *factor)
{
    EACH_ROW(rows, r, id) {
        memcpy(base + r, at_row(&a->stats.norm, rows, id), sizeof(lane));
        memcpy(factor + r, at(&a->stats.norm, rows->b, id.head, id.query, 1), sizeof(lane));
    }
}

/* Adds probs (n keys, nv vectors of rows of one head) to key_sums, from key j0 on. */
static void add_lanes_to_key_sums(const fa_attention_args *a, const row_block *rows, int nv, const lane *probs,
                                  int64_t j0, int64_t n)
{
    lane *sums = (lane *)at(&a->stats.key_sums, rows->b, first_row(rows).head, j0, 0);
    for (int64_t j = 0; j < n; j += LANES) {
        const int64_t width = smaller(n - j, LANES);
        v_t of_key[LANES];
        for (int64_t i = 0; i < LANES; i++) {
            of_key[i] = v_splat(0);
            for (int u = 0; i < width && u < nv; u++) of_key[i] += v_load(probs + (j + i) * BLOCK_Q + u * LANES);
        }
        v_store_n(sums + j, v_load_n(sums + j, width) + v_sum_each(of_key), width);
    }
}

/* Adds probs (rows, n keys), rows BLOCK_K apart, to key_sums. */
static void add_rows_to_key_sums(const fa_attention_args *a, const row_block *rows, const lane *probs, int64_t j0,
                                 int64_t n)
{
    row_id id = first_row(rows);
    for (int64_t first = 0; first < smaller(rows->group, rows->n); first++, id = next_row(rows, id)) {
        lane *sums = (lane *)at(&a->stats.key_sums, rows->b, id.head, j0, 0);
        for (int64_t j = 0; j < n; j += LANES) {
            const int64_t width = smaller(n - j, LANES);
            v_t sum = v_splat(0);
            for (int64_t r = first; r < rows->n; r += rows->group) sum += v_load(probs + r * BLOCK_K + j);
            v_store_n(sums + j, v_load_n(sums + j, width) + sum, width);
        }
    }
}

static void add_rows_to_mean(const fa_attention_args *a, const row_block *rows, const lane *probs, int64_t j0,
                             int64_t n)
{
    const v_t share = v_splat(1 / (lane)a->heads_q);
    EACH_ROW(rows, r, id) {
        lane *mean = (lane *)at(&a->stats.mean_weights, rows->b, 0, id.query, j0);
        for (int64_t j = 0; j < n; j += LANES) {
            const int64_t width = smaller(n - j, LANES);
            v_store_n(mean + j, v_fma(v_load(probs + r * BLOCK_K + j), share, v_load_n(mean + j, width)), width);
        }
    }
}
