/* Parts of the gradients of attention by rows: rows of queries and of dO, their sums into dK and dV, those of dS into
 * the gradients of modifiers, and the order in which tasks may add.
 *
 * Exports   row_copy, copy_rows, add_weighted_rows, add_score_gradients, through_slopes, add_product_gradients,
 *           store_query_gradients, turn_of, take_turn, pass_turn. */
#pragma once
#include "interface/rowwise.h"
#include "any_nv.inc.h"
#include "backward.inc.h"

/* Rows of q or dout as lanes, `pitch` apart; those that are not finite are 0 there, and listed. */
typedef struct {
    lane *row;
    int64_t pitch;
    bad_rows bad;
} row_copy;

static void copy_rows(const fa_array *x, const row_block *rows, int64_t width, row_copy *to)
{
    const int64_t bytes = to->pitch * (int64_t)sizeof(lane);
    memset(to->row, 0, BLOCK_Q * bytes);
    EACH_ROW(rows, r, id) load_row(x->dtype, at_row(x, rows, id), width, 1, to->row + r * to->pitch);
    find_bad_rows(LANE_DTYPE, (const char *)to->row, bytes, rows->n, width, &to->bad);
    for (int64_t i = 0; i < to->bad.n; i++) memset(to->row + to->bad.row[i] * to->pitch, 0, bytes);
}

/* Rows key[0 .. n - 1] of `to`, of the KV head of `kv`, += factor times weights (n, BLOCK_Q) times the rows of `from`, which x copies. */
static void add_weighted_rows(const fa_array *from, const row_block *rows, const row_copy *x, int64_t width, int64_t n,
                              const int64_t *key, const lane *weights, lane factor, const fa_array *to,
                              const row_block *kv, lane *product)
{
    for (int64_t c = 0, nv; c < x->pitch; c += nv * LANES) {
        outer_product p = {.y = x->row + c, .pitch = x->pitch, .depth = rows->n, .out = product + c};
        p.x = (const char *)weights, p.x_row = BLOCK_Q * (int64_t)sizeof(lane);
        nv = c + NV * LANES <= x->pitch ? NV : 1;
        any_outer((int)nv, n, &p);
    }
    for (int64_t j = 0; j < n; j++) {
        lane *sum = (lane *)at_key(to, kv, key[j]);
        for (int64_t d = 0; d < width; d += LANES) {
            const v_t add = v_load(product + j * x->pitch + d), old = v_load_part(sum + d, width - d);
            v_store_part(sum + d, v_fma(add, v_splat(factor), old), width - d);
        }
    }
    EACH_ROW(rows, r, id) {
        for (int64_t i = 0; i < x->bad.n; i++) {
            if (x->bad.row[i] != r) continue;
            const char *row = at_row(from, rows, id);
            for (int64_t j = 0; j < n; j++) {
                lane *sum = (lane *)at_key(to, kv, key[j]);
                const lane weight = weights[j * BLOCK_Q + r];
                if (weight == 0) continue;
                for (int64_t d = 0; d < width; d++)
                    sum[d] += factor * (weight * load_element(from->dtype, row + d * dtype_size(from->dtype)));
            }
        }
    }
}

/* What dS (n, BLOCK_Q) adds to the gradients of the bias and of distances; the latter to `later`, (heads_q, N_HEAD_SUMS),
 * if that is not NULL. */
static void add_score_gradients(const fa_rowwise_backward_args *call, const row_block *rows, const int64_t *key,
                                int64_t n, const lane *ds, double *later)
{
    const fa_attention_args *a = &call->forward.attention;
    if (!call->dbias.data && !call->dbias_diagonals.data && !has_row_sums(&call->dmods)) return;
    const int64_t position = wants_distances(&call->dmods) ? load_int(at(&a->mods.q_position, rows->b, 0, 0, 0)) : 0;
    EACH_ROW(rows, r, id) {
        double sums[N_HEAD_SUMS] = {0};
        for (int64_t j = 0; j < n; j++) {
            const lane g = ds[j * BLOCK_Q + r];
            if (g == 0) continue;
            if (call->dbias.data) *(lane *)at(&call->dbias, rows->b, id.head, id.query, key[j]) += g;
            if (call->dbias_diagonals.data)
                *(lane *)at(&call->dbias_diagonals, rows->b, id.head, key[j] - id.query + a->len_q - 1, 0) += g;
            row_head_sums((double)g, position + id.query, key[j], sums);
        }
        for (int i = 0; later && i < N_HEAD_SUMS; i++) later[id.head * N_HEAD_SUMS + i] += sums[i];
        if (!later) add_head_sums(&call->dmods, rows->b, id.head, sums);
    }
}

/* scaled = ds times v_slopes, of which s (n, nv) holds the products before; of_own (nv) += sums of ds times by_own. */
static void through_slopes(int nv, const modifiers *mods, int64_t n, const lane *s, const lane *ds, lane *of_own,
                           lane *scaled)
{
    for (int u = 0; u < nv; u++) {
        v_t sum = v_load(of_own + u * LANES);
        for (int64_t j = 0; j < n; j++) {
            const int64_t i = j * BLOCK_Q + u * LANES;
            const sloped_score sloped = v_slopes(mods, v_load(s + i));
            const v_t g = v_load(ds + i);
            sum += v_select(g == 0, v_splat(0), g * sloped.by_own);
            v_store(scaled + i, v_select(g == 0, v_splat(0), g * sloped.by_score));
        }
        v_store(of_own + u * LANES, sum);
    }
}

/* dQ^T += what dS makes of products with n keys, gathered in scratch->k as the values of `by_key`. */
static void add_product_gradients(const fa_attention_args *by_key, int nv, const row_block *rows, const int64_t *key,
                                  int64_t n, const bad_rows *bad, const lane *ds, const tile_scratch *scratch,
                                  lane *dq_t)
{
    value_product p = {
        .v = (const char *)scratch->k, .n = n, .n_low = n, .head_dim_v = by_key->head_dim_v, .pitch = BLOCK_Q};
    p.v_row = by_key->head_dim_v * (int64_t)sizeof(lane), p.probs = ds, p.mode = ACC_KEEP, p.out = dq_t;
    any_values(nv, &p);
    for (int64_t i = 0; i < bad->n; i++) {
        const lane *row = ds + bad->row[i] * BLOCK_Q;
        lane *takes = scratch->alpha;
        for (int u = 0; u < nv * LANES; u += LANES) v_store(takes + u, (v_t)(v_load(row + u) != v_splat(0)));
        add_bad_value(by_key, nv, 0, rows, key[bad->row[i]], row, takes, dq_t);
    }
}

/* dQ, from dQ^T. */
static void store_query_gradients(const fa_rowwise_backward_args *call, const row_block *rows, lane *dq_t,
                                  const lane *weight_t, lane *row_sum)
{
    fa_attention_args to = call->forward.attention;
    const v_t factor = v_splat((lane)call->dq_factor);
    for (int64_t i = 0; i < to.head_dim * BLOCK_Q; i += LANES) {
        const v_t x = v_load(dq_t + i) * factor;
        v_store(dq_t + i, weight_t ? x * v_load(weight_t + i) : x);
    }
    to.out = call->dq, to.head_dim_v = to.head_dim;
    for (int64_t i = 0; i < BLOCK_Q; i++) row_sum[i] = 1;
    transposed_finish(&to, rows, &(partial){.row_max = row_sum, .row_sum = row_sum}, dq_t);
}

/* Which turn the units' tasks take, and how many of them come before this one. */
INLINE int64_t turn_of(const fa_rowwise_backward_args *call, const fa_rowwise_backward_plan *plan, int64_t task,
                       int64_t *before)
{
    const int64_t unit = task % plan->units, members = plan->units / plan->owners;
    const int64_t heads = plan->units / call->forward.attention.batch, b = unit / heads, h = unit % heads;
    const int64_t rank = call->batch_shares ? (call->heads_share ? unit : b) : call->heads_share ? h : 0;
    *before = task / plan->units * members + rank;
    return call->batch_shares ? (call->heads_share ? 0 : h) : call->heads_share ? b : unit;
}

/* Waits until `before` tasks have passed the turn; 0: somebody gave up. And lets the next one pass. */
INLINE int take_turn(const fa_rowwise_backward_args *call, int64_t turn, int64_t before)
{
    return await_turn(call->forward.attention.watch, call->turns + turn, before);
}
INLINE void pass_turn(const fa_rowwise_backward_args *call, int64_t turn, int64_t before)
{
    __atomic_store_n(call->turns + turn, before + 1, __ATOMIC_RELEASE);
}
