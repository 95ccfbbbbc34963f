/* The gradients of one tile: queries of a head against a block of keys, keys on the lanes.
 *
 *     S  = modifiers of Q K^T                 Q broadcast, or by tiles; modifiers.inc.h, as the few-row kernel has it
 *     P  = exp(S - lse)                       of few queries, P / sum(P)
 *     dS = P (dO V^T - delta)                 dO broadcast in place, or by tiles
 *     dV^T += dO^T P,  dK^T += Q^T dS         the forward pass's product of values, roles exchanged
 *     dQ   += dS K
 *
 * Columns are taken a few vectors at a time, and of these only the rows that attend some key of them.
 *
 * Literals  bf16.
 * Exports   tile_sums, tile_gradients. */
#pragma once
#include "backward_weights.inc.h"
#include "few_rows.inc.h"

/* out (rows, vectors) = x y, or += with `more`. Not inlined: three of the five products are it. */
INLINE void outer_columns_as(int bf16, int64_t n_rows, int64_t vectors, const outer_product *whole)
{
    outer_product p = *whole;
    int64_t u = 0;
    for (; u + BACK_NV <= vectors; u += BACK_NV, p.y += BACK_KEYS, p.out += BACK_KEYS)
        product_scores(BACK_NV, bf16, n_rows, &p, NULL);
    for (; u < vectors; u++, p.y += LANES, p.out += LANES) product_scores(1, bf16, n_rows, &p, NULL);
}

NOINLINE void outer_columns(int bf16, int64_t n_rows, int64_t vectors, const outer_product *whole)
{
    if (bf16) outer_columns_as(V_BF16_DOT, n_rows, vectors, whole);
    else outer_columns_as(0, n_rows, vectors, whole);
}

/* out (width, vectors) += x (n, width)^T weights (n, vectors), pitch BLOCK_K; or = where there is nothing yet. */
INLINE void sum_columns_as(int bf16, int64_t vectors, const value_product *whole)
{
    value_product p = *whole;
    int64_t u = 0;
    p.pitch = BLOCK_K;
    for (; u + BACK_NV <= vectors; u += BACK_NV, p.probs += BACK_KEYS, p.out += BACK_KEYS)
        product_values(BACK_NV, bf16, &p);
    for (; u < vectors; u++, p.probs += LANES, p.out += LANES) product_values(1, bf16, &p);
}

NOINLINE void sum_columns(int bf16, int64_t vectors, const value_product *whole)
{
    if (bf16) sum_columns_as(V_BF16_DOT, vectors, whole);
    else sum_columns_as(0, vectors, whole);
}

/* Pairs of bfloat16: of rows 2r and 2r + 1 from row0 on. Rows that are not there, up to a whole step, are 0. */
INLINE void pair_tile_rows(const lane *from, const column_group *group, lane *pairs)
{
    for (int64_t r = group->row0; r < round_up(group->row1, key_step(1)); r += 2)
        for (int64_t j = group->first; j < group->first + group->vectors * LANES; j += LANES) {
            const v_t row0 = r < group->row1 ? v_load(from + r * BLOCK_K + j) : v_splat(0);
            const v_t row1 = r + 1 < group->row1 ? v_load(from + (r + 1) * BLOCK_K + j) : v_splat(0);
            v_store(pairs + r / 2 * BLOCK_K + j, v_pack_bf16(row0, row1));
        }
}

/* The values of dO that sums leave out, added to dV^T of the keys that these rows attend: there dS is not finite. */
static void add_bad_douts(const fa_backward_args *call, const back_rows *queries, const column_group *group,
                          const back_keys *keys, int64_t skip, const back_tile *tile)
{
    const fa_attention_args *a = &call->attention;
    const row_block *rows = &queries->rows;
    for (int64_t i = 0; i < queries->bad.n; i++) {
        const int64_t r = queries->bad.row[i];
        const char *dout = at(&call->dout, rows->b, rows->h_kv, rows->row0 + r, 0);
        if (r < group->row0 || r >= group->row1) continue;
        for (int64_t d = 0; d < a->head_dim_v; d++) {
            const v_t value = v_splat(load_element(call->dout.dtype, dout + d * dtype_size(call->dout.dtype)));
            for (int64_t j = group->first; j < group->first + group->vectors * LANES; j += LANES) {
                lane *to = keys->dvt + d * BLOCK_K + skip + j;
                const v_t ds = v_load(tile->ds + r * BLOCK_K + j) * v_splat(0);
                const v_t more = v_load(tile->s + r * BLOCK_K + j) * value;
                v_store(to, v_load(to) + v_select(ds != ds, more, v_splat(0)));
            }
        }
    }
}

/* dV^T and dK^T += sums over the group's rows of P and of dS. */
INLINE void add_key_gradients(const fa_backward_args *call, int bf16, const back_rows *queries,
                              const column_group *group, const back_keys *keys, int64_t skip, const back_tile *tile)
{
    const fa_attention_args *a = &call->attention;
    const int64_t row0 = bf16 ? group->row0 / 2 : group->row0, at = row0 * BLOCK_K + group->first;
    const int64_t n = bf16 ? ceil_div(group->row1, 2) - row0 : group->row1 - row0;
    value_product p = {.n = n, .n_low = n, .mode = ACC_KEEP};
    if (call->dv.data) {
        if (bf16) pair_tile_rows(tile->s, group, tile->pairs);
        p.v = queries->dout_sum + row0 * queries->dout_sum_row, p.v_row = queries->dout_sum_row;
        p.head_dim_v = a->head_dim_v;
        p.probs = (bf16 ? tile->pairs : tile->s) + at, p.out = keys->dvt + skip + group->first;
        sum_columns(bf16, group->vectors, &p);
        if (queries->bad.n) add_bad_douts(call, queries, group, keys, skip, tile);
    }
    if (call->dk.data) {
        if (bf16) pair_tile_rows(tile->ds, group, tile->pairs);
        p.v = queries->q_sum + row0 * queries->q_sum_row, p.v_row = queries->q_sum_row;
        p.head_dim_v = a->head_dim;
        p.probs = (bf16 ? tile->pairs : tile->ds) + at, p.out = keys->dkt + skip + group->first;
        sum_columns(bf16, group->vectors, &p);
    }
}

/* dQ += dS K, of n keys from skip + group->first on. */
INLINE void add_query_gradients(int bf16, const column_group *group, const back_keys *keys, int64_t skip, int64_t n,
                                const back_tile *tile)
{
    const int64_t row0 = group->row0, n_rows = group->row1 - row0;
    outer_product p = {.pitch = tile->width, .more = 1, .factor = 1, .x_row = BLOCK_K * (int64_t)sizeof(lane)};
    p.x = (const char *)(tile->ds + row0 * BLOCK_K + group->first), p.depth = n;
    p.y = keys->k + (skip + group->first) * tile->width, p.out = tile->dq + row0 * tile->width;
    if (bf16) {
        char *pairs = (char *)tile->pairs;
        p.x = pairs, p.x_row = BLOCK_K * 2, p.depth = ceil_div(n, 2);
        p.y = keys->k + (skip + group->first) / 2 * tile->width;
        for (int64_t r = 0; r < n_rows; r++) {
            char *row = pairs + r * p.x_row;
            memset(row + n * 2, 0, (round_up(n, key_step(bf16)) - n) * 2);
            round_row_as(LANE_DTYPE, (const char *)(tile->ds + (row0 + r) * BLOCK_K + group->first), n, row);
        }
    }
    outer_columns(bf16, n_rows, tile->width / LANES, &p);
}

/* Scores of a few queries as the few-row kernel has them: with the bits that made the lse, if that kernel did, and with
 * less rounding than a sum over head_dim in one lane has. And no K^T is needed. */
INLINE void back_few_scores_as(fa_dtype dtype, const fa_attention_args *a, const back_rows *queries,
                               const back_keys *keys, key_run run, const back_tile *tile)
{
    const few_score_product p = {.k = keys->source + (run.j0 - keys->first) * a->k.row,
                                 .k_row = a->k.row,
                                 .n = run.n,
                                 .head_dim = a->head_dim,
                                 .depth = tile->width,
                                 .q = (const lane *)queries->q,
                                 .s = tile->s};
#define SCORES(nr) few_scores(dtype, nr, &p, r)
    IN_FOURS_TWOS_ONES(&queries->rows, r, SCORES);
#undef SCORES
    for (int64_t r = 0; r < queries->rows.n; r++)
        for (int64_t j = run.n; j < round_up(run.n, LANES); j++) tile->s[r * BLOCK_K + j] = 0;
}

static void back_few_scores(const fa_attention_args *a, const back_rows *queries, const back_keys *keys, key_run run,
                            const back_tile *tile)
{
    WITH_DTYPE(a->k.dtype, dtype, back_few_scores_as(dtype, a, queries, keys, run, tile));
}

/* Keys of the block that some query attends, what they are to the tile, and what is added to its scores. */
INLINE block_kind load_run(const fa_attention_args *a, int bf16, const back_rows *queries, const back_keys *keys,
                           const back_tile *tile, key_run *found)
{
    const row_block *rows = &queries->rows;
    const int64_t first = larger(keys->first, rows->first), stop = smaller(keys->first + keys->n, rows->last);
    const int64_t step = larger(LANES, key_step(bf16)), aligned = first - (first - keys->first) % step;
    const key_run run = masked_run(a, rows, (int)step, aligned, first < stop ? stop - aligned : 0);
    *found = run;
    if (run.mask == BLOCK_EMPTY) return BLOCK_EMPTY;
    const fa_array *bias = &a->mods.bias;
    if (bias->data && bias->row) /* rows far apart: it finds nothing to follow by itself */
        prefetch_rows(at(bias, rows->b, rows->h_kv, rows->row0, keys->first), bias->row, rows->n,
                      keys->n * dtype_size(bias->dtype));
    block_kind kind = run.mask | range_kind(rows, run.j0, run.n);
    if (adds(a, rows, run.mask)) {
        kind = additive_rows(a, rows, run.j0, run.n, tile->add);
        if (kind == BLOCK_EMPTY) return kind;
        kind |= range_kind(rows, run.j0, run.n) | BLOCK_ADDS;
    }
    return kind;
}

/* Modifiers and masks of tile->s, but for what ranges hide. */
INLINE void modify_scores(const fa_attention_args *a, const modifiers *mods, const row_block *rows, key_run run,
                          block_kind kind, const back_tile *tile)
{
    const modifiers later = behind_slopes(mods);
    const score_tile scores = {rows, NULL, run.j0, run.n, kind & ~BLOCK_EDGE, tile->s, tile->add};
    if (HAS_SLOPES(*mods)) slope_rows(mods, rows->n, run.n, tile);
    modify_rows(a, &later, &scores);
}

/* sums (rows) += those of P over a block of keys, where queries are few. */
static void tile_sums(const fa_attention_args *a, const modifiers *mods, const back_rows *queries,
                      const back_keys *keys, const back_tile *tile, double *sums)
{
    key_run run;
    const block_kind kind = load_run(a, 0, queries, keys, tile, &run);
    if (kind == BLOCK_EMPTY) return;
    back_few_scores(a, queries, keys, run, tile);
    modify_scores(a, mods, &queries->rows, run, kind, tile);
    add_sums(kind, queries, run.j0, run.n, tile, sums);
}

/* Adds to the gradients what comes of the queries and a block of keys of the grid; whether there was anything. */
INLINE int tile_gradients(const fa_backward_args *call, const modifiers *mods, int bf16, back_rows *queries,
                          back_keys *keys, back_tile *tile)
{
    const fa_attention_args *a = &call->attention;
    const row_block *rows = &queries->rows;
    key_run run;
    const block_kind kind = load_run(a, bf16, queries, keys, tile, &run);
    if (kind == BLOCK_EMPTY) return 0;
    const int64_t skip = run.j0 - keys->first;
    column_group groups[BACK_GROUPS];
    const int64_t n_groups = column_groups(rows, run, kind, bf16, groups);
    outer_product p = {.pitch = BLOCK_K, .factor = mods->q_factor};
    if (keys->fresh) { /* not all columns may be touched */
        memset(keys->dkt, 0, padded_v(a->head_dim) * BLOCK_K * sizeof(lane));
        memset(keys->dvt, 0, padded_v(a->head_dim_v) * BLOCK_K * sizeof(lane));
        keys->fresh = 0;
    }
    if (queries->norm) back_few_scores(a, queries, keys, run, tile);
    for (int64_t g = 0; g < n_groups; g++) {
        const int64_t row0 = groups[g].row0, at = skip + groups[g].first;
        p.x = queries->q + row0 * queries->q_row, p.x_row = queries->q_row;
        p.depth = bf16 ? ceil_div(a->head_dim, 2) : a->head_dim;
        p.y = keys->kt + at, p.out = tile->s + row0 * BLOCK_K + groups[g].first, p.factor = mods->q_factor;
        if (!queries->norm) outer_columns(bf16, groups[g].row1 - row0, groups[g].vectors, &p);
        p.x = queries->dout + row0 * queries->dout_row, p.x_row = queries->dout_row;
        p.depth = bf16 ? ceil_div(a->head_dim_v, 2) : a->head_dim_v;
        p.y = keys->vt + at, p.out = tile->ds + row0 * BLOCK_K + groups[g].first, p.factor = 1;
        outer_columns(bf16, groups[g].row1 - row0, groups[g].vectors, &p);
    }
    modify_scores(a, mods, rows, run, kind, tile);
    if (a->dropout > 0) load_keep(a, rows, keys->first, skip, run.n, tile);
    for (int64_t g = 0; g < n_groups; g++) {
        const column_group *group = groups + g;
        const int64_t n = smaller(run.n - group->first, group->vectors * LANES);
        if (a->dropout > 0) drop_group(group, tile, tile->ds);
        weigh_group(kind, bf16, a, queries, group, run.j0 + group->first, tile);
        if (queries->norm) normalise_group(queries, group, tile);
        clear_tail(group, n, tile);
        if (a->dropout > 0) drop_group(group, tile, tile->s);
        if (call->dbias.data || call->dbias_diagonals.data || has_head_sums(&call->dmods))
            add_modifiers(call, queries, group, run.j0 + group->first, n, tile);
        if (HAS_SLOPES(*mods)) scale_by_slope(group, n, tile);
        add_key_gradients(call, bf16, queries, group, keys, skip, tile);
        if (call->dq.data) add_query_gradients(bf16, group, keys, skip, n, tile);
    }
    return 1;
}
