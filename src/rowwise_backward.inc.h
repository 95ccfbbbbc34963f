/* Gradients of attention that needs all scores of a row at a time. One task is a tile of query rows; with weights w,
 * which are the probabilities P, for entmax-1.5 their square roots, and for sparsemax 1 where they are above 0:
 *
 *     the keys that are left, their scores and tau, as in the forward pass
 *     for each block of them:
 *         D^T = V dO^T                                 V gathered, like K below
 *         sums over the keys of P, w, w D
 *     for each block of them:
 *         dS^T = w (D - sum of w D / sum of w)         in place of D
 *         dQ^T = dQ^T + scale K^T dS^T
 *     in turn, tile after tile of a KV head:
 *         dV = dV + P dO;  dK = dK + scale dS Q;  dbias = dbias + dS
 *
 * Slopes of scores, as of a cap, multiply dS, but for dbias. A weight of exactly 0 hides what it would multiply.
 *
 * Exports   rowwise_backward_plan, rowwise_backward_run. */
#pragma once
#include "rowwise.inc.h"
#include "talking_backward.inc.h"

typedef struct {
    row_scratch row;
    lane *ds, *scaled; /* (len_k, BLOCK_Q), of the kept keys: dS, and with slopes dS times these */
    lane *dout_t;      /* dO^T (head_dim_v, BLOCK_Q) */
    lane *dq_t;        /* dQ^T (head_dim, BLOCK_Q) */
    row_copy q, dout;
    lane *product;                                 /* (BLOCK_K, the larger pitch): what is added to dK or dV */
    lane *sum_p, *sum_w, *sum_wd, *of_own;         /* (BLOCK_Q) */
    lane *dweight_t, *block_q, *block_weight, *dk; /* additive: (head_dim, BLOCK_Q); dk (len_k, head_dim) */
} backward_scratch;

static int64_t cut_backward_scratch(arena *from, const fa_rowwise_backward_args *call, backward_scratch *scratch)
{
    const fa_attention_args *a = &call->forward.attention;
    const int64_t n_keys = a->len_k + BLOCK_K, pitch = round_up(larger(a->head_dim, a->head_dim_v), LANES);
    cut_row_scratch(from, &call->forward, &scratch->row);
    CUT(from, scratch->ds, n_keys * BLOCK_Q);
    scratch->scaled = scratch->ds;
    if (HAS_SLOPES(a->mods)) CUT(from, scratch->scaled, n_keys * BLOCK_Q);
    CUT(from, scratch->dout_t, a->head_dim_v * BLOCK_Q);
    CUT(from, scratch->dq_t, a->head_dim * BLOCK_Q);
    scratch->q.pitch = round_up(a->head_dim, LANES), scratch->dout.pitch = round_up(a->head_dim_v, LANES);
    CUT(from, scratch->q.row, BLOCK_Q * scratch->q.pitch);
    CUT(from, scratch->dout.row, BLOCK_Q * scratch->dout.pitch);
    CUT(from, scratch->product, BLOCK_K * pitch);
    CUT_LANES(from, BLOCK_Q, &scratch->sum_p, &scratch->sum_w, &scratch->sum_wd, &scratch->of_own);
    if (call->forward.kind == FA_ADDITIVE) {
        CUT_LANES(from, a->head_dim * BLOCK_Q, &scratch->dweight_t, &scratch->block_q, &scratch->block_weight);
        CUT(from, scratch->dk, n_keys * round_up(a->head_dim, LANES));
    }
    return from->used;
}

/* One vector: the probability, not yet divided by the row's sum, and the weight w of a relative score z. */
INLINE v_t v_weight(fa_rowwise_kind kind, v_t z, v_t tau, v_t *prob)
{
    const int sparse = kind == FA_SPARSEMAX || kind == FA_ENTMAX15;
    v_t w = sparse ? v_max(v_splat(0), z - tau) : v_exp_prob(z);
    w = v_select(z == v_splat(-INFINITY), v_splat(0), w); /* also in a row of NaN */
    *prob = kind == FA_ENTMAX15 ? w * w : w;
    if (kind != FA_SPARSEMAX) return w;
    return v_select(w == v_splat(0), v_splat(0), v_fma(w, v_splat(0), v_splat(1))); /* NaN stays */
}

/* ds = D of all kept keys, and the rows' sums. */
static void weigh_gradients(const fa_rowwise_args *call, int nv, const v_t *tau, backward_scratch *scratch)
{
    const fa_attention_args *a = &call->attention;
    const row_block *rows = &scratch->row.tile.tiles->rows;
    const kept_scores *kept = &scratch->row.kept;
    lane *v = scratch->row.tile.v;
    for (int64_t first = 0; first < kept->n; first += BLOCK_K) {
        if (first && first % ROWWISE_ASKS == 0 && given_up(a->watch)) return;
        const int64_t n = smaller(BLOCK_K, kept->n - first), *key = kept->key + first;
        const lane *z = kept->s + first * BLOCK_Q;
        lane *d = scratch->ds + first * BLOCK_Q;
        for (int64_t j = 0; j < n; j++)
            load_row(a->v.dtype, at_key(&a->v, rows, key[j]), a->head_dim_v, 1, v + j * a->head_dim_v);
        outer_product product = {
            .x = (const char *)v, .x_row = a->head_dim_v * (int64_t)sizeof(lane), .pitch = BLOCK_Q};
        product.y = scratch->dout_t, product.depth = a->head_dim_v, product.out = d;
        any_outer(nv, n, &product);
        for (int u = 0; u < nv; u++) {
            v_t sum_p = v_splat(0), sum_w = v_splat(0), sum_wd = v_splat(0);
            for (int64_t j = 0; j < n; j++) {
                v_t prob;
                lane *to = d + j * BLOCK_Q + u * LANES;
                const v_t w = v_weight(call->kind, v_load(z + j * BLOCK_Q + u * LANES), tau[u], &prob);
                const v_t x = v_select(w == v_splat(0), v_splat(0), v_load(to));
                v_store(to, x);
                sum_p += prob, sum_w += w, sum_wd = v_fma(w, x, sum_wd);
            }
            v_store(scratch->sum_p + u * LANES, v_load(scratch->sum_p + u * LANES) + sum_p);
            v_store(scratch->sum_w + u * LANES, v_load(scratch->sum_w + u * LANES) + sum_w);
            v_store(scratch->sum_wd + u * LANES, v_load(scratch->sum_wd + u * LANES) + sum_wd);
        }
    }
}

/* dS of n keys, in place of D. */
static void score_gradients(fa_rowwise_kind kind, int nv, const lane *z, int64_t n, const v_t *tau,
                            const backward_scratch *scratch, lane *ds)
{
    const int sparse = kind == FA_SPARSEMAX || kind == FA_ENTMAX15;
    for (int u = 0; u < nv; u++) {
        const v_t sum_w = v_load(scratch->sum_w + u * LANES), sum_p = v_load(scratch->sum_p + u * LANES);
        const vi_t live = scratch->row.kept.live[u];
        const v_t mean = v_load(scratch->sum_wd + u * LANES) / sum_w; /* w is 0 wherever its sum is */
        const v_t norm = sparse ? v_splat(1) : 1 / sum_p;
        for (int64_t j = 0; j < n; j++) {
            v_t prob;
            lane *to = ds + j * BLOCK_Q + u * LANES;
            const v_t w = v_weight(kind, v_load(z + j * BLOCK_Q + u * LANES), tau[u], &prob);
            v_store(to, v_select(live & (w != v_splat(0)), w * norm * (v_load(to) - mean), v_splat(0)));
        }
    }
}

/* dQ^T += what dS makes of n additive scores, w . tanh(q + k); the weights' gradients; dK (n, head_dim) of these rows. */
static void add_additive_gradients(int nv, int64_t depth, int64_t n, const lane *k, const lane *qt, const lane *ds,
                                   backward_scratch *scratch, lane *dk)
{
    const int64_t pitch = round_up(depth, LANES);
    memset(scratch->block_q, 0, depth * BLOCK_Q * sizeof(lane));
    memset(scratch->block_weight, 0, depth * BLOCK_Q * sizeof(lane));
    for (int64_t j = 0; j < n; j++)
        for (int64_t d0 = 0; d0 < depth; d0 += LANES) {
            v_t sums[LANES];
            for (int64_t i = 0; i < LANES; i++) {
                const int64_t d = d0 + i;
                sums[i] = v_splat(0);
                if (d >= depth) continue;
                const v_t key = v_splat(k[j * depth + d]);
                for (int u = 0; u < nv; u++) {
                    const int64_t at = d * BLOCK_Q + u * LANES;
                    v_t slope;
                    const v_t g = v_load(ds + j * BLOCK_Q + u * LANES);
                    const v_t t = v_tanh_slope(v_load(qt + at) + key, &slope);
                    const vi_t none = g == v_splat(0);
                    const v_t of_sum = v_select(none, v_splat(0), g * slope);
                    v_store(scratch->block_q + at, v_load(scratch->block_q + at) + of_sum);
                    v_store(scratch->block_weight + at,
                            v_load(scratch->block_weight + at) + v_select(none, v_splat(0), g * t));
                    sums[i] = v_fma(of_sum, v_load(scratch->row.additive.weight + at), sums[i]);
                }
            }
            v_store(dk + j * pitch + d0, v_sum_each(sums));
        }
    for (int64_t i = 0; i < depth * BLOCK_Q; i += LANES) {
        v_store(scratch->dq_t + i, v_load(scratch->dq_t + i) + v_load(scratch->block_q + i));
        v_store(scratch->dweight_t + i, v_load(scratch->dweight_t + i) + v_load(scratch->block_weight + i));
    }
}

/* All that concerns the tile's rows alone: dS of the kept keys, and dQ^T. */
static void differentiate_rows(const fa_rowwise_backward_args *call, int nv, const modifiers *mods, const v_t *tau,
                               backward_scratch *scratch)
{
    const fa_rowwise_args *forward = &call->forward;
    const fa_attention_args *a = &forward->attention;
    const row_block *rows = &scratch->row.tile.tiles->rows;
    const kept_scores *kept = &scratch->row.kept;
    const lane *qt = scratch->row.tile.tiles->qt;
    const int additive = forward->kind == FA_ADDITIVE;
    fa_attention_args by_key = *a; /* what gathers values gathers keys */
    by_key.v = a->k, by_key.head_dim_v = a->head_dim;
    lane *k = scratch->row.tile.k, *s = scratch->row.tile.s;
    bad_rows bad = {.n = 0};
    weigh_gradients(forward, nv, tau, scratch);
    for (int64_t first = 0; first < kept->n; first += BLOCK_K) {
        if (first && first % ROWWISE_ASKS == 0 && given_up(a->watch)) return;
        const int64_t n = smaller(BLOCK_K, kept->n - first), *key = kept->key + first;
        lane *ds = scratch->ds + first * BLOCK_Q, *scaled = scratch->scaled + first * BLOCK_Q;
        score_gradients(forward->kind, nv, kept->s + first * BLOCK_Q, n, tau, scratch, ds);
        if (additive) {
            for (int64_t j = 0; j < n; j++)
                load_row(a->k.dtype, at_key(&a->k, rows, key[j]), a->head_dim, 1, k + j * a->head_dim);
        } else gather_values(&by_key, rows, key, n, k, &bad);
        if (HAS_SLOPES(a->mods)) {
            outer_product product = {
                .x = (const char *)k, .x_row = a->head_dim * (int64_t)sizeof(lane), .pitch = BLOCK_Q};
            product.y = qt, product.depth = a->head_dim, product.out = s;
            if (additive) block_additive(nv, n, &product, &scratch->row.additive);
            else any_outer(nv, n, &product);
            through_slopes(nv, mods, n, s, ds, scratch->of_own, scaled);
        }
        if (additive)
            add_additive_gradients(nv, a->head_dim, n, k, qt, scaled, scratch,
                                   scratch->dk + first * round_up(a->head_dim, LANES));
        else add_product_gradients(&by_key, nv, rows, key, n, &bad, scaled, &scratch->row.tile, scratch->dq_t);
    }
}

/* What several tiles add to. */
static void add_to_shared(const fa_rowwise_backward_args *call, int nv, const v_t *tau, backward_scratch *scratch)
{
    const fa_rowwise_args *forward = &call->forward;
    const fa_attention_args *a = &forward->attention;
    const row_block *rows = &scratch->row.tile.tiles->rows;
    const kept_scores *kept = &scratch->row.kept;
    const lane scale = (lane)a->mods.scale;
    const int64_t pitch = round_up(a->head_dim, LANES);
    lane *probs = scratch->row.tile.s;
    for (int64_t first = 0; first < kept->n; first += BLOCK_K) {
        if (first && first % ROWWISE_ASKS == 0 && given_up(a->watch)) return;
        const int64_t n = smaller(BLOCK_K, kept->n - first), *key = kept->key + first;
        const lane *z = kept->s + first * BLOCK_Q;
        if (call->dv.data) {
            for (int u = 0; u < nv; u++) {
                const v_t factor = 1 / v_load(scratch->sum_p + u * LANES);
                for (int64_t j = 0; j < n; j++) {
                    v_t prob;
                    (void)v_weight(forward->kind, v_load(z + j * BLOCK_Q + u * LANES), tau[u], &prob);
                    v_store(probs + j * BLOCK_Q + u * LANES, v_select(prob == v_splat(0), v_splat(0), prob * factor));
                }
            }
            add_weighted_rows(&call->dout, rows, &scratch->dout, a->head_dim_v, n, key, probs, 1, &call->dv, rows,
                              scratch->product);
        }
        if (call->dk.data && forward->kind == FA_ADDITIVE)
            for (int64_t j = 0; j < n; j++) {
                lane *sum = (lane *)at_key(&call->dk, rows, key[j]);
                const lane *dk = scratch->dk + (first + j) * pitch;
                for (int64_t d = 0; d < a->head_dim; d++) sum[d] += scale * dk[d];
            }
        else if (call->dk.data)
            add_weighted_rows(&a->q, rows, &scratch->q, a->head_dim, n, key, scratch->scaled + first * BLOCK_Q, scale,
                              &call->dk, rows, scratch->product);
        add_score_gradients(call, rows, key, n, scratch->ds + first * BLOCK_Q, NULL);
    }
    EACH_ROW(rows, r, id) {
        const int64_t head = rows->b * a->heads_q + id.head;
        add_slope_sum(&call->dmods, rows->b, id.head, scratch->of_own[r]);
        for (int64_t d = 0; call->dweight && d < a->head_dim; d++)
            call->dweight[head * a->head_dim + d] += a->mods.scale * scratch->dweight_t[d * BLOCK_Q + r];
    }
}

static int rowwise_gradients(const fa_rowwise_backward_args *call, const fa_rowwise_backward_plan *plan, int64_t task,
                             int nv, const modifiers *mods, backward_scratch *scratch)
{
    v_t tau[NV_MAX];
    int64_t before;
    const int64_t turn = turn_of(call, plan, task, &before);
    if (!find_support(&call->forward, nv, mods, &scratch->row, tau)) return 0;
    differentiate_rows(call, nv, mods, tau, scratch);
    if (!take_turn(call, turn, before)) return 0;
    add_to_shared(call, nv, tau, scratch);
    pass_turn(call, turn, before);
    return 1;
}

static void rowwise_backward_run(const fa_rowwise_backward_args *call, const fa_rowwise_backward_plan *plan,
                                 int64_t task, void *memory)
{
    if (call->forward.kind == FA_TALKING_HEADS) {
        talking_backward_run(call, plan, task, memory);
        return;
    }
    const fa_attention_args *a = &call->forward.attention;
    const int64_t unit = task % plan->units, blocks = plan->n_tasks / plan->units;
    const int64_t row0 = (blocks - 1 - task / plan->units) * BLOCK_Q; /* causal: the longest first */
    const int additive = call->forward.kind == FA_ADDITIVE;
    backward_scratch scratch;
    cut_backward_scratch(&(arena){.memory = memory}, call, &scratch);
    const modifiers mods = rowwise_begin(&call->forward, unit / a->heads_kv, unit % a->heads_kv, row0, &scratch.row);
    tile_state *tile = scratch.row.tile.tiles;
    fa_attention_args douts = *a;
    douts.q = call->dout, douts.head_dim = a->head_dim_v;
    load_queries(&douts, &tile->rows, 0, 1, scratch.dout_t);
    copy_rows(&a->q, &tile->rows, a->head_dim, &scratch.q);
    copy_rows(&call->dout, &tile->rows, a->head_dim_v, &scratch.dout);
    memset(scratch.dq_t, 0, a->head_dim * BLOCK_Q * sizeof(lane));
    if (additive) memset(scratch.dweight_t, 0, a->head_dim * BLOCK_Q * sizeof(lane));
    lane *const sums[] = {scratch.sum_p, scratch.sum_w, scratch.sum_wd, scratch.of_own};
    for (int i = 0; i < 4; i++) memset(sums[i], 0, BLOCK_Q * sizeof(lane));
    const int nv = tile->rows.n <= LANES ? 1 : NV;
    if (!rowwise_gradients(call, plan, task, nv, &mods, &scratch) || !call->dq.data) return;
    store_query_gradients(call, &tile->rows, scratch.dq_t, additive ? scratch.row.additive.weight : NULL,
                          tile->row_sum);
}

static void rowwise_backward_plan(const fa_rowwise_backward_args *call, fa_rowwise_backward_plan *plan)
{
    const fa_attention_args *a = &call->forward.attention;
    fa_rowwise_plan forward;
    rowwise_plan(&call->forward, &forward);
    plan->flops = 3.5 * forward.flops;
    if (call->forward.kind == FA_TALKING_HEADS) {
        talking_backward_plan(call, plan);
        return;
    }
    plan->units = a->batch * a->heads_kv;
    plan->owners = (call->batch_shares ? 1 : a->batch) * (call->heads_share ? 1 : a->heads_kv);
    plan->n_turns = plan->owners;
    plan->n_tasks = plan->units * ceil_div(a->heads_q / a->heads_kv * a->len_q, BLOCK_Q);
    plan->scratch_bytes = cut_backward_scratch(&(arena){0}, call, &(backward_scratch){0});
}
