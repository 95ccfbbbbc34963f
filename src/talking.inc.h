/* Talking heads (Shazeer et al. 2020): heads are mixed before the softmax and after it. One task is a block of query
 * rows, of all heads, against all their keys, in two passes. The second knows the denominators of the softmax.
 *
 *     for each block of keys:                          for each block of keys:
 *         S_h = K_h Q_h^T          every head h            S_h, M_g as before
 *         M_g = sum_h pre_hg S_h                           P_g = exp(M_g - max_g) / sum_g
 *         max_g, sum_g = online softmax of M_g             W_f = sum_g post_gf P_g
 *                                                          O_f = O_f + V_f^T W_f
 *
 * Modifiers and masks are applied to the mixed scores M_g. The scratch is heads x block, whatever the number of keys.
 *
 * Exports   talking_scratch, cut_talking_scratch, talking_run; HEAD_PITCH, mix_heads, talking_begin, talking_scores,
 *           talking_probs, talking_denominators. */
#pragma once
#include "normalisers.inc.h"

#define HEAD_PITCH ((BLOCK_K + 1) * BLOCK_Q) /* lanes from head to head: powers of 2 meet in the same cache sets */

typedef struct {
    tile_scratch tile;
    tile_state *heads;    /* (heads_q): rows, queries, results, maxima and sums */
    lane *scores, *mixed; /* (heads_q, BLOCK_K, BLOCK_Q), HEAD_PITCH from head to head */
    lane *pre, *post;     /* (heads_q, heads_q), transposed: row g holds what goes into g */
} talking_scratch;

static int64_t cut_talking_scratch(arena *from, const fa_rowwise_args *call, talking_scratch *scratch)
{
    const fa_attention_args *a = &call->attention;
    const int64_t heads = a->heads_q;
    cut_tile_scratch(from, a, 0, &scratch->tile);
    CUT(from, scratch->heads, heads);
    CUT_LANES(from, heads * HEAD_PITCH, &scratch->scores, &scratch->mixed);
    CUT_LANES(from, heads * heads, &scratch->pre, &scratch->post);
    for (int64_t h = 0; h < heads; h++) cut_tile(from, a, scratch->heads ? scratch->heads + h : &(tile_state){0});
    return from->used;
}

/* to_g (n, nv) = sum over h of mix_gh from_h (n, nv) */
INLINE void mix_heads_as(int nv, int64_t heads, const lane *mix, const lane *from, int64_t n, lane *to)
{
    outer_product p = {.y = from, .pitch = HEAD_PITCH, .depth = heads, .out = to};
    p.x = (const char *)mix, p.x_row = heads * (int64_t)sizeof(lane);
    for (int64_t j = 0; j < n; j++, p.y += BLOCK_Q, p.out += BLOCK_Q) {
        int64_t g = 0;
        for (; g + MR <= heads; g += MR) tile_outer(MR, nv, 0, 0, &p, g);
        for (; g + 2 <= heads; g += 2) tile_outer(2, nv, 0, 0, &p, g);
        for (; g < heads; g++) tile_outer(1, nv, 0, 0, &p, g);
    }
}

NOINLINE void mix_heads(int nv, int64_t heads, const lane *mix, const lane *from, int64_t n, lane *to)
{
    WITH_NV(nv, literal, mix_heads_as(literal, heads, mix, from, n, to));
}

/* Mixed scores (heads, n, nv) of the keys from j0 on, in scratch->mixed, with modifiers and masks. Returns whether some
 * row of some head does not attend some of them. `first`: in the first pass, adds them to maxima and sums. */
NOINLINE int talking_scores(const fa_rowwise_args *call, int nv, const modifiers *mods, int64_t j0, int64_t n,
                            talking_scratch *scratch, int first)
{
    const fa_attention_args *a = &call->attention;
    const int64_t heads = a->heads_q, group = heads / a->heads_kv;
    int some_hidden = 0;
    for (int64_t h = 0; h < heads; h++) {
        const row_block kv = {.b = scratch->heads[h].rows.b, .h_kv = h / group};
        outer_product product = {.y = scratch->heads[h].qt, .pitch = BLOCK_Q, .depth = a->head_dim};
        product.x = rows_as_lanes(&a->k, &a->k_scale, &kv, j0, n, a->head_dim, 0, scratch->tile.k, &product.x_row);
        product.out = (call->pre ? scratch->scores : scratch->mixed) + h * HEAD_PITCH;
        any_outer(nv, n, &product);
    }
    if (call->pre) mix_heads(nv, heads, scratch->pre, scratch->scores, n, scratch->mixed);
    for (int64_t g = 0; g < heads; g++) {
        tile_state *tile = scratch->heads + g;
        /* Where a tile attends nothing of the block, its ranges may be those of another block. */
        const int touched = tile->rows.first < j0 + n && j0 < tile->rows.last;
        const key_run run = {j0, n, !touched ? BLOCK_EMPTY : a->masks.mask.data ? BLOCK_MASKED : BLOCK_FULL};
        const block_kind kind = any_additive(a, tile, nv, run, &scratch->tile);
        lane *s = scratch->mixed + g * HEAD_PITCH;
        const score_tile scores = {&tile->rows, &tile->lanes, j0, n, kind, s, scratch->tile.add};
        some_hidden |= kind & BLOCK_EMPTY || hides(kind);
        if (kind & BLOCK_EMPTY) {
            for (int64_t i = 0; i < n * BLOCK_Q; i++) scores.s[i] = -(lane)INFINITY;
            continue;
        }
        any_modify(a, nv, mods, &scores);
        if (!first) continue;
        any_softmax(nv, scores.s, n, tile->row_max, tile->row_sum, scratch->tile.alpha);
        mark_rows(nv, &scores, 0, tile->row_max);
    }
    return some_hidden;
}

/* Probabilities (n, nv) in place of scores; row_sum is the reciprocal of the denominator. */
static void talking_probs(int nv, const tile_state *tile, int64_t n, lane *s)
{
    for (int u = 0; u < nv; u++) {
        const v_t base = v_base(v_load(tile->row_max + u * LANES)), factor = v_load(tile->row_sum + u * LANES);
        for (int64_t j = 0; j < n; j++) {
            lane *x = s + j * BLOCK_Q + u * LANES;
            const v_t score = v_load(x);
            /* A hidden key has no probability, also where the factor is NaN. */
            v_store(x, v_select(score == v_splat(-INFINITY), v_splat(0), v_exp_prob(score - base) * factor));
        }
    }
}

/* ot of every head += the values from j0 on, weighted; in scratch->mixed, the mixed scores, -inf hides a key. */
static void talking_values(const fa_rowwise_args *call, int nv, int hidden, int64_t j0, int64_t n,
                           talking_scratch *scratch)
{
    const fa_attention_args *a = &call->attention;
    const int64_t heads = a->heads_q, group = heads / a->heads_kv, width = a->head_dim_v;
    lane *probs = call->post ? scratch->scores : scratch->mixed;
    int64_t key[BLOCK_K];
    bad_rows bad;
    for (int64_t j = 0; j < n; j++) key[j] = j0 + j;
    /* Which lanes attend a key: of each head, `scores` being free, or where heads mix, of some head. */
    for (int64_t j = 0; hidden && j < n * BLOCK_Q; j += LANES) {
        vi_t some = {0};
        for (int64_t g = 0; g < heads; g++) {
            const vi_t attends = v_load(scratch->mixed + g * HEAD_PITCH + j) != v_splat(-INFINITY);
            if (!call->post) v_store(scratch->scores + g * HEAD_PITCH + j, (v_t)attends);
            some |= attends;
        }
        v_store(scratch->tile.add + j, (v_t)some);
    }
    for (int64_t g = 0; g < heads; g++) talking_probs(nv, scratch->heads + g, n, scratch->mixed + g * HEAD_PITCH);
    if (call->post) mix_heads(nv, heads, scratch->post, scratch->mixed, n, scratch->scores);
    for (int64_t f = 0; f < heads; f++) {
        tile_state *tile = scratch->heads + f;
        const row_block kv = {.b = tile->rows.b, .h_kv = f / group};
        const char *v = at_key(&a->v, &kv, j0);
        int64_t v_row = a->v.row;
        bad.n = 0;
        if (hidden || dtype_size(a->v.dtype) != sizeof(lane) || !is_dense(&a->v, width)) {
            gather_values(a, &kv, key, n, scratch->tile.v, &bad);
            v = (const char *)scratch->tile.v, v_row = width * (int64_t)sizeof(lane);
        }
        add_values(a, nv, tile, v, v_row, n, probs + f * HEAD_PITCH);
        const lane *attends = call->post ? scratch->tile.add : scratch->scores + f * HEAD_PITCH;
        for (int64_t i = 0; i < bad.n; i++) {
            const int64_t row = bad.row[i] * BLOCK_Q;
            add_bad_value(a, nv, 0, &kv, j0 + bad.row[i], probs + f * HEAD_PITCH + row, hidden ? attends + row : NULL,
                          tile->ot);
        }
    }
}

/* All keys were met once: row_sum becomes the reciprocal of the denominator. */
static void talking_denominators(int64_t heads, talking_scratch *scratch)
{
    for (int64_t g = 0; g < heads; g++)
        for (int64_t i = 0; i < BLOCK_Q; i++) {
            lane *sum = scratch->heads[g].row_sum + i;
            const int attends = scratch->heads[g].row_max[i] != -(lane)INFINITY;
            *sum = *sum != 0 ? 1 / *sum : attends ? NAN : 0; /* as in finish_sums */
        }
}

static void talking_block(const fa_rowwise_args *call, int nv, const modifiers *mods, talking_scratch *scratch)
{
    const fa_attention_args *a = &call->attention;
    const int64_t heads = a->heads_q;
    for (int pass = 0; pass < 2; pass++) {
        for (int64_t h = 0; h < heads; h++) ranges_begin(a, &scratch->heads[h].rows, 0, a->len_k);
        key_walk walk = walk_begin(&scratch->heads->rows, heads, sizeof(tile_state), a->masks.ranges != NULL, 1,
                                   a->len_k);
        while (walk_next(&walk)) {
            const int64_t j0 = walk.begin, n = walk.end - walk.begin;
            if (n <= 0) continue;
            if (walk.grid && walk.grid % ROWWISE_ASKS == 0 && given_up(a->watch)) return;
            const int hidden = talking_scores(call, nv, mods, j0, n, scratch, pass == 0);
            if (pass) talking_values(call, nv, hidden, j0, n, scratch);
        }
        if (pass == 0) talking_denominators(heads, scratch);
    }
}

/* The matrices, and the tiles of all heads: rows from row0 on. */
static modifiers talking_begin(const fa_rowwise_args *call, int64_t b, int64_t row0, talking_scratch *scratch)
{
    const fa_attention_args *a = &call->attention;
    const int64_t heads = a->heads_q;
    const modifiers mods = modifiers_of(a, 0);
    for (int64_t g = 0; g < heads; g++)
        for (int64_t h = 0; h < heads; h++) {
            if (call->pre) scratch->pre[g * heads + h] = ((const lane *)call->pre)[h * heads + g];
            if (call->post) scratch->post[g * heads + h] = ((const lane *)call->post)[h * heads + g];
        }
    for (int64_t h = 0; h < heads; h++) {
        row_block *rows = &scratch->heads[h].rows;
        rows->b = b, rows->h_kv = h, rows->group = 1, rows->row0 = row0;
        rows->n = smaller(BLOCK_Q, a->len_q - row0);
        tile_begin(a, &mods, 0, 0, a->len_k, scratch->heads + h);
    }
    return mods;
}

static void talking_run(const fa_rowwise_args *call, const fa_rowwise_plan *plan, int64_t task, void *memory)
{
    const fa_attention_args *a = &call->attention;
    const int64_t heads = a->heads_q, blocks = plan->n_tasks / a->batch, row0 = (blocks - 1 - task % blocks) * BLOCK_Q;
    talking_scratch scratch;
    cut_talking_scratch(&(arena){.memory = memory}, call, &scratch);
    const modifiers mods = talking_begin(call, task / blocks, row0, &scratch);
    talking_block(call, scratch.heads->rows.n <= LANES ? 1 : NV, &mods, &scratch);
    for (int64_t i = 0; i < BLOCK_Q; i++) { /* normalised already; NaN where all that is attended is -inf */
        lane one = 1;
        for (int64_t g = 0; call->post && g < heads; g++) one += 0 * scratch.heads[g].row_sum[i];
        for (int64_t h = 0; h < heads; h++) scratch.heads[h].row_sum[i] = one + 0 * scratch.heads[h].row_sum[i];
    }
    for (int64_t h = 0; h < heads; h++) tile_finish(a, &scratch.tile, scratch.heads + h);
}
