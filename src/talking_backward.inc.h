/* Gradients of talking heads. One task is a block of query rows, of all heads, against all their keys, in three passes:
 *
 *     max_g, sum_g of M_g = sum_h pre_hg S_h           as in the forward pass
 *     for each block of keys:
 *         P_g, and D_g = sum_f post_gf dO_f V_f^T
 *         delta_g = delta_g + sum of P_g D_g
 *     for each block of keys, in turn, block of rows after block of rows:
 *         dM_g = P_g (D_g - delta_g)                   before what has slopes, times these
 *         dS_h = sum_g pre_hg dM_g;  W_f = sum_g post_gf P_g
 *         dQ_h = dQ_h + scale dS_h K_h
 *         dK_h = dK_h + scale dS_h^T Q_h;  dV_f = dV_f + W_f^T dO_f
 *     dpre_hg = sum of S_h dM_g, dpost_gf = sum of P_g dO_f V_f^T: in a last turn
 *
 * Each block of keys has a turn of its own, so that tasks follow one another through the keys.
 *
 * Exports   talking_backward_plan, talking_backward_run. */
#pragma once
#include "talking.inc.h"
#include "row_gradients.inc.h"

/* Of one head. */
typedef struct {
    lane *dout_t, *dq_t;  /* dO^T (head_dim_v, BLOCK_Q), dQ^T (head_dim, BLOCK_Q) */
    lane *delta, *of_own; /* (BLOCK_Q) */
    row_copy q, dout;
} head_gradients;

typedef struct {
    talking_scratch forward;
    head_gradients *heads;   /* (heads_q) */
    lane *dweights, *dprobs; /* as forward.scores: dO V^T, then others; D, then dM */
    lane *product;           /* (BLOCK_K, the larger pitch) */
    double *dpre, *dpost;    /* (heads_q, heads_q), of these rows */
    double *sums;            /* (heads_q, N_HEAD_SUMS) */
    vi_t live[NV_MAX];       /* lanes that hold a row */
} talking_gradients;

static int64_t cut_talking_gradients(arena *from, const fa_rowwise_backward_args *call, talking_gradients *scratch)
{
    const fa_attention_args *a = &call->forward.attention;
    const int64_t heads = a->heads_q;
    const int64_t pitch = round_up(a->head_dim, LANES), pitch_v = round_up(a->head_dim_v, LANES);
    cut_talking_scratch(from, &call->forward, &scratch->forward);
    CUT(from, scratch->heads, heads);
    CUT_LANES(from, heads * HEAD_PITCH, &scratch->dweights, &scratch->dprobs);
    CUT(from, scratch->product, BLOCK_K * larger(pitch, pitch_v));
    CUT(from, scratch->dpre, heads * heads);
    CUT(from, scratch->dpost, heads * heads);
    CUT(from, scratch->sums, heads * N_HEAD_SUMS);
    for (int64_t h = 0; h < heads; h++) {
        head_gradients *head = scratch->heads ? scratch->heads + h : &(head_gradients){0};
        head->q.pitch = pitch, head->dout.pitch = pitch_v;
        CUT(from, head->dout_t, a->head_dim_v * BLOCK_Q);
        CUT(from, head->dq_t, a->head_dim * BLOCK_Q);
        CUT_LANES(from, BLOCK_Q, &head->delta, &head->of_own);
        CUT(from, head->q.row, BLOCK_Q * pitch);
        CUT(from, head->dout.row, BLOCK_Q * pitch_v);
    }
    return from->used;
}

/* Where no head of a row attends a key, or no row is, x (heads, n, nv) becomes 0: tile.add says where. */
static void hide_for_all(int nv, int64_t heads, int64_t n, const lane *some, lane *x)
{
    for (int64_t h = 0; h < heads; h++, x += HEAD_PITCH)
        for (int64_t j = 0; j < n; j++)
            for (int u = 0; u < nv; u++) {
                const int64_t i = j * BLOCK_Q + u * LANES;
                v_store(x + i, v_select((vi_t)v_load(some + i), v_load(x + i), v_splat(0)));
            }
}

/* Products S in forward.scores, if heads mix; P in forward.mixed, dO V^T in dweights, and D, which this returns: all are
 * 0 where no head attends. */
NOINLINE lane *talking_gradient_scores(const fa_rowwise_backward_args *call, int nv, const modifiers *mods, int64_t j0,
                                       int64_t n, talking_gradients *scratch)
{
    const fa_rowwise_args *forward = &call->forward;
    const fa_attention_args *a = &forward->attention;
    const int64_t heads = a->heads_q, group = heads / a->heads_kv;
    talking_scratch *talking = &scratch->forward;
    lane *some = talking->tile.add;
    talking_scores(forward, nv, mods, j0, n, talking, 0);
    for (int64_t j = 0; j < n; j++)
        for (int u = 0; u < nv; u++) {
            const int64_t i = j * BLOCK_Q + u * LANES;
            vi_t attends = {0};
            for (int64_t g = 0; g < heads; g++)
                attends |= v_load(talking->mixed + g * HEAD_PITCH + i) != v_splat(-INFINITY);
            v_store(some + i, (v_t)(attends & scratch->live[u]));
        }
    for (int64_t g = 0; g < heads; g++) talking_probs(nv, talking->heads + g, n, talking->mixed + g * HEAD_PITCH);
    for (int64_t f = 0; f < heads; f++) {
        const row_block kv = {.b = talking->heads[f].rows.b, .h_kv = f / group};
        outer_product product = {.y = scratch->heads[f].dout_t, .depth = a->head_dim_v, .pitch = BLOCK_Q};
        product.x = rows_as_lanes(&a->v, &a->v_scale, &kv, j0, n, a->head_dim_v, 0, talking->tile.v, &product.x_row);
        product.out = scratch->dweights + f * HEAD_PITCH;
        any_outer(nv, n, &product);
    }
    hide_for_all(nv, heads, n, some, talking->mixed);
    hide_for_all(nv, heads, n, some, scratch->dweights);
    if (forward->pre) hide_for_all(nv, heads, n, some, talking->scores);
    if (!forward->post) return scratch->dweights;
    mix_heads(nv, heads, forward->post, scratch->dweights, n, scratch->dprobs);
    return scratch->dprobs;
}

/* delta += sums over n keys of P D; a probability of 0 hides D. */
static void add_to_delta(int nv, int64_t n, const lane *probs, const lane *d, lane *delta)
{
    for (int u = 0; u < nv; u++) {
        v_t sum = v_splat(0);
        for (int64_t j = 0; j < n; j++) {
            const v_t p = v_load(probs + j * BLOCK_Q + u * LANES);
            sum += v_select(p == v_splat(0), v_splat(0), p * v_load(d + j * BLOCK_Q + u * LANES));
        }
        v_store(delta + u * LANES, v_load(delta + u * LANES) + sum);
    }
}

/* to (heads, heads) += factor times the sums over n keys and all rows of w x, at w's head times w_step and x's times
 * x_step. A weight w of 0 hides x. */
static void add_head_products(int nv, int64_t heads, int64_t n, double factor, const lane *w, int64_t w_step,
                              const lane *x, int64_t x_step, double *to)
{
    for (int64_t g = 0; g < heads; g++)
        for (int64_t f = 0; f < heads; f++) {
            const lane *of_w = w + g * HEAD_PITCH, *of_x = x + f * HEAD_PITCH;
            v_t sum[2] = {v_splat(0), v_splat(0)}; /* one would wait for each product */
            for (int64_t u = 0; u < nv * LANES; u += LANES)
                for (int64_t j = 0; j < n; j += 2)
                    UNROLL_FOR(int k = 0; k < 2; k++) {
                        const int64_t i = smaller(j + k, n - 1) * BLOCK_Q + u;
                        const v_t weight = j + k < n ? v_load(of_w + i) : v_splat(0);
                        sum[k] = v_fma(weight, v_select(weight == 0, weight, v_load(of_x + i)), sum[k]);
                    }
            to[g * w_step + f * x_step] += factor * v_sum(sum[0] + sum[1]);
        }
}

/* dM of all heads, in dprobs: before what has slopes. */
static void mixed_gradients(int nv, int64_t heads, int64_t n, const lane *d, talking_gradients *scratch)
{
    for (int64_t g = 0; g < heads; g++)
        for (int u = 0; u < nv; u++) {
            const v_t delta = v_load(scratch->heads[g].delta + u * LANES);
            for (int64_t j = 0; j < n; j++) {
                const int64_t i = g * HEAD_PITCH + j * BLOCK_Q + u * LANES;
                const v_t p = v_load(scratch->forward.mixed + i), x = p * (v_load(d + i) - delta);
                v_store(scratch->dprobs + i, v_select(p == v_splat(0), v_splat(0), x));
            }
        }
}

/* dM times the slopes, of which dweights gets the scores before. */
static void talking_slopes(const fa_rowwise_args *forward, int nv, const modifiers *mods, int64_t j0, int64_t n,
                           talking_gradients *scratch)
{
    const fa_attention_args *a = &forward->attention;
    const int64_t heads = a->heads_q, group = heads / a->heads_kv;
    talking_scratch *talking = &scratch->forward;
    lane *before = scratch->dweights;
    if (forward->pre) mix_heads(nv, heads, talking->pre, talking->scores, n, before);
    for (int64_t h = 0; !forward->pre && h < heads; h++) {
        const row_block kv = {.b = talking->heads[h].rows.b, .h_kv = h / group};
        outer_product product = {
            .y = talking->heads[h].qt, .depth = a->head_dim, .pitch = BLOCK_Q, .out = before + h * HEAD_PITCH};
        product.x = rows_as_lanes(&a->k, &a->k_scale, &kv, j0, n, a->head_dim, 0, talking->tile.k, &product.x_row);
        any_outer(nv, n, &product);
    }
    for (int64_t g = 0; g < heads; g++)
        through_slopes(nv, mods, n, before + g * HEAD_PITCH, scratch->dprobs + g * HEAD_PITCH, scratch->heads[g].of_own,
                       scratch->dprobs + g * HEAD_PITCH);
}

/* The last pass over n keys from j0 on. */
static void talking_differentiate(const fa_rowwise_backward_args *call, int nv, const modifiers *mods, int64_t j0,
                                  int64_t n, talking_gradients *scratch)
{
    const fa_rowwise_args *forward = &call->forward;
    const fa_attention_args *a = &forward->attention;
    const int64_t heads = a->heads_q, group = heads / a->heads_kv;
    const lane scale = (lane)a->mods.scale;
    talking_scratch *talking = &scratch->forward;
    fa_attention_args by_key = *a; /* what gathers values gathers keys */
    by_key.v = a->k, by_key.head_dim_v = a->head_dim;
    int64_t key[BLOCK_K];
    bad_rows bad;
    for (int64_t j = 0; j < n; j++) key[j] = j0 + j;
    const lane *d = talking_gradient_scores(call, nv, mods, j0, n, scratch);
    lane *probs = talking->mixed, *dmixed = scratch->dprobs, *ds = scratch->dprobs, *weights = talking->mixed;
    if (call->dpost) add_head_products(nv, heads, n, 1, probs, heads, scratch->dweights, 1, scratch->dpost);
    mixed_gradients(nv, heads, n, d, scratch);
    for (int64_t g = 0; g < heads; g++)
        add_score_gradients(call, &talking->heads[g].rows, key, n, dmixed + g * HEAD_PITCH, scratch->sums);
    if (HAS_SLOPES(a->mods)) talking_slopes(forward, nv, mods, j0, n, scratch);
    if (call->dpre) {
        const double factor = mods->q_factor != 0 ? a->mods.scale / mods->q_factor : 0; /* S is times it already */
        add_head_products(nv, heads, n, factor, dmixed, 1, talking->scores, heads, scratch->dpre);
    }
    if (forward->pre) mix_heads(nv, heads, forward->pre, dmixed, n, ds = scratch->dweights);
    if (forward->post) mix_heads(nv, heads, talking->post, probs, n, weights = talking->scores);
    for (int64_t h = 0; h < heads; h++) {
        head_gradients *head = scratch->heads + h;
        const row_block *rows = &talking->heads[h].rows;
        const row_block kv = {.b = rows->b, .h_kv = h / group};
        const lane *of_head = ds + h * HEAD_PITCH;
        gather_values(&by_key, &kv, key, n, talking->tile.k, &bad);
        add_product_gradients(&by_key, nv, &kv, key, n, &bad, of_head, &talking->tile, head->dq_t);
        if (call->dk.data)
            add_weighted_rows(&a->q, rows, &head->q, a->head_dim, n, key, of_head, scale, &call->dk, &kv,
                              scratch->product);
        if (call->dv.data)
            add_weighted_rows(&call->dout, rows, &head->dout, a->head_dim_v, n, key, weights + h * HEAD_PITCH, 1,
                              &call->dv, &kv, scratch->product);
    }
}

/* Where elements of the bias's gradient are those of several blocks of keys, there is one turn for all blocks. */
INLINE int one_turn(const fa_rowwise_backward_args *call)
{
    return call->dbias_diagonals.data || (call->dbias.data && call->dbias.col == 0);
}

/* Passes the turns from `*next` up to `stop`, of blocks that the task has nothing to do with. */
static int pass_blocks(const fa_rowwise_backward_args *call, int64_t first, int64_t before, int64_t *next, int64_t stop)
{
    for (; *next < stop; ++*next) {
        if (!take_turn(call, first + *next, before)) return 0;
        pass_turn(call, first + *next, before);
    }
    return 1;
}

/* One pass over all keys; the last, pass 2, waits for its turns. Returns 0 if it is given up. */
static int talking_pass(const fa_rowwise_backward_args *call, int nv, const modifiers *mods, int pass,
                        int64_t first_turn, int64_t before, talking_gradients *scratch)
{
    const fa_rowwise_args *forward = &call->forward;
    const fa_attention_args *a = &forward->attention;
    talking_scratch *talking = &scratch->forward;
    const int64_t heads = a->heads_q;
    const int by_block = pass == 2 && !one_turn(call);
    int64_t next = 0;
    for (int64_t h = 0; h < heads; h++) ranges_begin(a, &talking->heads[h].rows, 0, a->len_k);
    key_walk walk = walk_begin(&talking->heads->rows, heads, sizeof(tile_state), a->masks.ranges != NULL, 1, a->len_k);
    if (pass == 2 && !by_block && !take_turn(call, first_turn, before)) return 0;
    while (walk_next(&walk)) {
        const int64_t j0 = walk.begin, n = walk.end - walk.begin;
        if (n <= 0) continue;
        if (walk.grid && walk.grid % ROWWISE_ASKS == 0 && given_up(a->watch)) return 0;
        if (pass == 0) talking_scores(forward, nv, mods, j0, n, talking, 1);
        if (pass == 1) {
            const lane *d = talking_gradient_scores(call, nv, mods, j0, n, scratch);
            for (int64_t g = 0; g < heads; g++)
                add_to_delta(nv, n, talking->mixed + g * HEAD_PITCH, d + g * HEAD_PITCH, scratch->heads[g].delta);
        }
        if (pass != 2) continue;
        if (by_block && !pass_blocks(call, first_turn, before, &next, walk.grid / BLOCK_K)) return 0;
        if (by_block && !take_turn(call, first_turn + next, before)) return 0;
        talking_differentiate(call, nv, mods, j0, n, scratch);
        if (by_block) pass_turn(call, first_turn + next++, before);
    }
    if (pass == 2 && !by_block) pass_turn(call, first_turn, before);
    return !by_block || pass_blocks(call, first_turn, before, &next, ceil_div(a->len_k, BLOCK_K));
}

/* Sums over the rows of the tile, of all heads. */
static void add_talking_sums(const fa_rowwise_backward_args *call, int64_t b, const talking_gradients *scratch)
{
    const int64_t heads = call->forward.attention.heads_q;
    for (int64_t i = 0; call->dpre && i < heads * heads; i++) call->dpre[b * heads * heads + i] += scratch->dpre[i];
    for (int64_t i = 0; call->dpost && i < heads * heads; i++) call->dpost[b * heads * heads + i] += scratch->dpost[i];
    for (int64_t h = 0; h < heads; h++) {
        add_head_sums(&call->dmods, b, h, scratch->sums + h * N_HEAD_SUMS);
        for (int64_t r = 0; r < scratch->forward.heads->rows.n; r++)
            add_slope_sum(&call->dmods, b, h, scratch->heads[h].of_own[r]);
    }
}

INLINE int64_t turns_of_keys(const fa_rowwise_backward_args *call)
{
    return one_turn(call) ? 1 : ceil_div(call->forward.attention.len_k, BLOCK_K);
}

static void talking_backward_run(const fa_rowwise_backward_args *call, const fa_rowwise_backward_plan *plan,
                                 int64_t task, void *memory)
{
    const fa_attention_args *a = &call->forward.attention;
    const int64_t heads = a->heads_q, b = task % plan->units, blocks = plan->n_tasks / plan->units;
    const int64_t row0 = (blocks - 1 - task / plan->units) * BLOCK_Q, steps = turns_of_keys(call);
    int64_t before;
    const int64_t first_turn = turn_of(call, plan, task, &before) * (steps + 1);
    talking_gradients scratch;
    cut_talking_gradients(&(arena){.memory = memory}, call, &scratch);
    const modifiers mods = talking_begin(&call->forward, b, row0, &scratch.forward);
    const int64_t n_rows = scratch.forward.heads->rows.n;
    const int nv = n_rows <= LANES ? 1 : NV;
    fa_attention_args douts = *a;
    douts.q = call->dout, douts.head_dim = a->head_dim_v;
    for (int64_t h = 0; h < heads; h++) {
        head_gradients *head = scratch.heads + h;
        const row_block *rows = &scratch.forward.heads[h].rows;
        load_queries(&douts, rows, 0, 1, head->dout_t);
        copy_rows(&a->q, rows, a->head_dim, &head->q);
        copy_rows(&call->dout, rows, a->head_dim_v, &head->dout);
        memset(head->dq_t, 0, a->head_dim * BLOCK_Q * sizeof(lane));
        memset(head->delta, 0, BLOCK_Q * sizeof(lane));
        memset(head->of_own, 0, BLOCK_Q * sizeof(lane));
    }
    memset(scratch.dpre, 0, heads * heads * sizeof(double));
    memset(scratch.dpost, 0, heads * heads * sizeof(double));
    memset(scratch.sums, 0, heads * N_HEAD_SUMS * sizeof(double));
    lane no_row[BLOCK_Q];
    for (int64_t i = 0; i < BLOCK_Q; i++) no_row[i] = i >= n_rows;
    for (int u = 0; u < NV; u++) scratch.live[u] = v_load(no_row + u * LANES) == v_splat(0);
    for (int pass = 0; pass < 3; pass++) {
        if (!talking_pass(call, nv, &mods, pass, first_turn, before, &scratch)) return;
        if (pass == 0) talking_denominators(heads, &scratch.forward);
    }
    if (!take_turn(call, first_turn + steps, before)) return;
    add_talking_sums(call, b, &scratch);
    pass_turn(call, first_turn + steps, before);
    for (int64_t h = 0; call->dq.data && h < heads; h++)
        store_query_gradients(call, &scratch.forward.heads[h].rows, scratch.heads[h].dq_t, NULL,
                              scratch.forward.heads[h].row_sum);
}

static void talking_backward_plan(const fa_rowwise_backward_args *call, fa_rowwise_backward_plan *plan)
{
    const fa_attention_args *a = &call->forward.attention;
    plan->units = a->batch;
    plan->owners = call->batch_shares ? 1 : a->batch;
    plan->n_turns = plan->owners * (turns_of_keys(call) + 1);
    plan->n_tasks = plan->units * ceil_div(a->len_q, BLOCK_Q);
    plan->scratch_bytes = cut_talking_gradients(&(arena){0}, call, &(talking_gradients){0});
}
