/* One task of the tile kernel: up to TASK_TILES tiles of query rows against the keys of their ranges; lanes are queries.
 *
 *     Q^T = transpose(scale * Q)                       rows of one KV head: (query, head in group) pairs
 *     for each block of keys, and each tile of rows that attends some of it:
 *         S^T = K Q^T                                  K read in place, one scalar broadcast at a time
 *         S^T = modifiers and masks of S^T             modifiers.inc.h; nothing where the block is full
 *         P^T, m, l, alpha = online softmax of S^T     softmax.inc.h
 *         O^T = alpha O^T + V^T P^T                    V read in place
 *     O = transpose(O^T) / l
 *
 * FlashAttention-2 (Dao 2023) turned on its side: lanes are queries, so softmax needs no horizontal reduction.
 *
 * The tiles of a task share copies of keys and values, made once a block where a copy pays: narrow elements are widened
 * and scaled (or values interleaved in pairs, for the bfloat16 dot product). Rows whose
 * strides fall on few sets of the first-level cache are gathered (lies_well; docs/dev/attention-kernel.md). The copies may serve
 * several tasks of a KV head: keeps_copy in tasks.inc.h says when.
 *
 * Literals  form: what products multiply.
 *
 * Exports   product_scores, product_values; tile_begin, tile_attend, tile_end, tile_finish. */
#pragma once
#include "key_blocks.inc.h"
#include "sigmoid.inc.h"

/* Finds the block's values that are not finite, and makes a copy without them, if there are any. */
INLINE void take_out_bad_values(const fa_attention_args *a, const row_block *rows, int form, tile_scratch *scratch)
{
    key_block *block = &scratch->block;
    bad_rows *bad = &block->bad;
    const int64_t width = a->head_dim_v, bytes = (form ? padded_v(width) : width) * (int64_t)sizeof(lane);
    if (block->checked || form == OF_BYTES) return; /* integers are finite, and load_block looks at their scales */
    block->checked = 1;
    int64_t v_row = block->v_row;
    const char *v = form ? values_in_bf16(a, rows, block->first, block->n, scratch->listed, &v_row) : block->v;
    if (form) find_bad_rows(FA_BF16, v, v_row, block->n, width, bad);
    else find_bad_rows(LANE_DTYPE, v, v_row, block->n, width, bad);
    if (!bad->n) return;
    if (form == OF_LANES) {
        copy_good_rows(bad, block->v, block->v_row, block->n, bytes, (char *)scratch->clean);
        return;
    }
    memcpy(scratch->clean, block->v, round_up(block->n, key_step(1)) / 2 * bytes);
    for (int64_t i = 0; i < bad->n; i++) clear_paired_row(bad->row[i], width, scratch->clean);
}

/* Second pass: scores become probabilities, which are added up. Where a row's factor is NaN, so are the probabilities
 * of the keys that it attends, and of no others. Inlined, it breaks gcc 12 on the doubles of `generic`. */
NOINLINE void weigh_tile(const fa_attention_args *a, int nv, const tile_state *tile, const score_tile *scores,
                         lane *by_row)
{
    const int64_t n = scores->n, j0 = scores->j0;
    vi_t undefined = {0};
    for (int u = 0; u < nv; u++) {
        const v_t base = v_load(tile->row_max + u * LANES), factor = v_load(tile->row_sum + u * LANES);
        const vi_t weighs = factor != 0; /* else there is no row, or no key: q = 0 times NaN in K is NaN */
        undefined |= factor != factor;
        for (int64_t j = 0; j < n; j++) {
            lane *s = scores->s + j * BLOCK_Q + u * LANES;
            v_store(s, (v_t)((vi_t)(v_exp_prob(v_load(s) - base) * factor) & weighs));
        }
    }
    if (hides(scores->kind) && v_any(undefined)) {
        mark_attending(nv, scores);
        for (int64_t j = 0; j < n; j++)
            for (int64_t i = j * BLOCK_Q; i < j * BLOCK_Q + nv * LANES; i += LANES)
                v_store(scores->s + i, v_select((vi_t)v_load(scores->add + i), v_load(scores->s + i), v_splat(0)));
    }
    const int one_head = tile->rows.group == 1;
    if (a->stats.key_sums.data && one_head) add_lanes_to_key_sums(a, &tile->rows, nv, scores->s, j0, n);
    if (a->stats.mean_weights.data || !one_head) transpose(scores->s, BLOCK_Q, n, tile->rows.n, by_row, BLOCK_K);
    if (a->stats.key_sums.data && !one_head) add_rows_to_key_sums(a, &tile->rows, by_row, j0, n);
    if (a->stats.mean_weights.data) add_rows_to_mean(a, &tile->rows, by_row, j0, n);
}

/* Probabilities (n, nv) as pairs of bfloat16, those of keys 2j and 2j + 1; up to a whole step 0. */
INLINE void pair_probs(int nv, const lane *probs, int64_t n, lane *pairs)
{
    const int64_t whole = round_up(n, key_step(1));
    for (int64_t j = round_up(n, 2); j < whole; j += 2)
        UNROLL_FOR(int u = 0; u < nv; u++) v_store(pairs + j / 2 * BLOCK_Q + u * LANES, v_splat(0));
    for (int64_t j = 0; j < n; j += 2)
        UNROLL_FOR(int u = 0; u < nv; u++) {
            const v_t p0 = v_load(probs + j * BLOCK_Q + u * LANES);
            const v_t p1 = j + 1 < n ? v_load(probs + (j + 1) * BLOCK_Q + u * LANES) : v_splat(0);
            v_store(pairs + j / 2 * BLOCK_Q + u * LANES, v_pack_bf16(p0, p1));
        }
}

/* How many of n keys from j0 on some row of the first NV_LOW vectors may attend: under a causal mask the diagonal cuts
 * through a tile. Whole lanes of them. */
static int64_t keys_of_low(const row_block *rows, int64_t j0, int64_t n, int form)
{
    int64_t end = j0;
    for (int64_t r = 0; r < smaller(rows->n, NV_LOW * LANES); r++) end = larger(end, rows->end[r]);
    return smaller(n, round_up(end - j0, form == OF_BYTES ? MR : per_lane(form)));
}

/* Whether scores wait for their factor until softmax, which then costs nothing. */
INLINE int scaled_later(const fa_attention_args *a, int form)
{
    const int normal = LANE_MIN <= a->mods.scale && a->mods.scale <= LANE_MAX / 2; /* times log2(e), too */
    return in_tiles(form) && only_scales(&a->mods) && normal && !a->sigmoid && !a->stats.second_pass;
}

/* softmax_update; with AMX amx_softmax, which writes pairs, writes s only with `keep`, and scales older sums itself. */
INLINE int tile_softmax(int nv, int form, int keep, int64_t n, int64_t width, const tile_state *tile,
                        const tile_scratch *scratch)
{
    lane *s = scratch->s, *log = tile->row_log;
#if V_AMX
    if (form == OF_PAIRS) {
        lane *sums = tile->fresh ? NULL : tile->ot;
        const amx_softmax_args p = {
            s, n, tile->factor, tile->row_max, tile->row_sum, log, scratch->alpha, scratch->pairs, sums, width};
        if (log) amx_softmax(nv, keep, 1, &p);
        else amx_softmax(nv, keep, 0, &p);
        return 0;
    }
#endif
    (void)keep, (void)width;
    if (log) return softmax_update(nv, form == OF_PAIRS, s, n, tile->row_max, tile->row_sum, log, scratch->alpha);
    return softmax_update(nv, form == OF_PAIRS, s, n, tile->row_max, tile->row_sum, NULL, scratch->alpha);
}

/* The same, and bytes of them. */
INLINE int tile_softmax_of_bytes(int nv, int hides, int keep, int64_t n, const lane *v_scale, const tile_state *tile,
                                 const tile_scratch *scratch)
{
    const byte_softmax p = {
        scratch->s,      n,
        v_scale,         tile->row_max,
        tile->row_sum,   tile->row_log,
        scratch->alpha,  scratch->share,
        scratch->weight, scratch->pairs,
    };
    if (keep || tile->row_log) return softmax_of_bytes(nv, 1, 1, &p);
    return hides ? softmax_of_bytes(nv, 1, 0, &p) : softmax_of_bytes(nv, 0, 0, &p);
}

/* S^T, by AMX if in_tiles; then `ahead` is not fetched. */
INLINE void product_scores(int nv, int form, int64_t n, const outer_product *p, const fetched_rows *ahead)
{
#if V_AMX
    if (form == OF_PAIRS) {
        amx_outer(nv, n, p);
        return;
    }
#endif
    block_outer(nv, form, n, p, ahead);
}

/* O^T of the tile whose product waits (product_values_later), if one does. */
INLINE void product_values_waiting(tile_scratch *scratch)
{
#if V_AMX
    if (scratch->waiting_nv == 1) amx_values(1, &scratch->waiting);
    else if (scratch->waiting_nv) amx_values(NV, &scratch->waiting);
#endif
    scratch->waiting_nv = 0;
}

/* O^T. With AMX the product waits until the next tile of queries has its scores: what was just stored cannot be loaded
 * into AMX's registers before the store has reached the cache. */
INLINE void product_values_later(int nv, int form, const value_product *p, tile_scratch *scratch)
{
#if V_AMX
    if (form == OF_PAIRS) {
        scratch->waiting = *p, scratch->waiting_nv = nv;
        return;
    }
#endif
    (void)scratch;
    block_values(nv, form, p);
}

/* The same at once. Not for ACC_SCALE, which AMX's registers cannot do. */
INLINE void product_values(int nv, int form, const value_product *p)
{
#if V_AMX
    if (form == OF_PAIRS) {
        amx_values(nv, p);
        return;
    }
#endif
    block_values(nv, form, p);
}

/* scratch->s = the tile's scores, modified and masked. Returns after how many of the n keys the first NV_LOW vectors
 * attend none: n where that was not asked. Meanwhile the product that waits is computed. */
INLINE int64_t finish_scores(const fa_attention_args *a, const modifiers *mods, int nv, int form,
                             const tile_state *tile, const score_tile *scores, tile_scratch *scratch)
{
    const key_block *block = &scratch->block;
    const int64_t n = scores->n;
    outer_product product = {.y = tile->qt, .pitch = BLOCK_Q, .factor = mods->q_factor, .out = scratch->s};
    if (scaled_later(a, form)) product.factor = 1;
    product.x = block->k + (scores->j0 - block->first) * block->k_row, product.x_row = block->k_row;
    product.depth = form == OF_PAIRS ? padded_k(a->head_dim) / 2 : ceil_div(a->head_dim, per_lane(form));
    product.of_x = scratch->k_scale + (scores->j0 - block->first);
    product.of_y = tile->q_scale, product.start = tile->q_start;
    const int cut = nv == NV && NV_LOW > 0 && scores->kind & BLOCK_EDGE && !in_tiles(form);
    const int64_t n_low = cut ? keys_of_low(scores->rows, scores->j0, n, form) : n;
    product_scores(nv, form, n_low, &product, scratch->ahead.rows ? &scratch->ahead : NULL);
    if (nv == NV && n_low < n) { /* modify_tile hides the other scores */
        product.x += n_low * product.x_row, product.y += NV_LOW * LANES;
        product.of_x += n_low, product.of_y += NV_LOW * LANES, product.start += NV_LOW * LANES;
        product.out += n_low * BLOCK_Q + NV_LOW * LANES;
        block_outer(NV - NV_LOW, form, n - n_low, &product, NULL);
    }
    for (int64_t j = 0; form == OF_PAIRS && a->k.dtype == FA_I8 && j < n; j++)
        UNROLL_FOR(int u = 0; u < nv; u++) {
            lane *s = scratch->s + j * BLOCK_Q + u * LANES;
            v_store(s, v_load(s) * v_splat(scratch->k_scale[scores->j0 - block->first + j]));
        }
    product_values_waiting(scratch);
    modify_tile(a, nv, mods, scores);
    return n_low;
}

/* Scores become probabilities, and pairs or bytes of these, too, where products take them; the rows' maxima and sums
 * follow. Returns whether older sums have to be scaled by alpha. `bad`: some values are not finite, and add_bad_value will
 * read scratch->s. */
INLINE int finish_probs(const fa_attention_args *a, int nv, int form, int bad, tile_state *tile,
                        const score_tile *scores, tile_scratch *scratch)
{
    const int64_t j0 = scores->j0, n = scores->n;
    const int drops = form != OF_BYTES && a->dropout > 0;
    int moved = 0;
    if (a->stats.n_top) {
        tile->top_first = j0 / PART_K * PART_K;
        top_insert_tile(nv, a->stats.n_top, scratch->s, n, (ilane)(j0 - tile->top_first), tile->top_score,
                        tile->top_key);
    }
    if (form == OF_BYTES)
        moved = tile_softmax_of_bytes(nv, hides(scores->kind), bad, n, scratch->v_scale + (j0 - scratch->block.first),
                                      tile, scratch);
    else if (a->sigmoid) sigmoid_update(nv, scratch->s, n, (lane)a->sigmoid_bias);
    else if (bad || drops) moved = tile_softmax(nv, form, 1, n, a->head_dim_v, tile, scratch);
    else moved = tile_softmax(nv, form, 0, n, a->head_dim_v, tile, scratch);
    mark_rows(nv, scores, bad, tile->row_max);
    if (drops) drop_tile(nv, &scratch->drop, tile->counters, j0, n, scratch->s);
    if (form == OF_PAIRS && (!V_AMX || a->sigmoid || drops)) pair_probs(nv, scratch->s, n, scratch->pairs);
    return moved;
}

/* tile->ot = alpha ot, if `moved`, + V^T P. */
INLINE void accumulate(const fa_attention_args *a, int nv, int form, int bad, int moved, tile_state *tile,
                       const score_tile *scores, int64_t n_low, tile_scratch *scratch)
{
    const key_block *block = &scratch->block;
    const int64_t j0 = scores->j0, n = scores->n, skip = j0 - block->first;
    value_product values = {.alpha = scratch->alpha, .out = tile->ot, .head_dim_v = a->head_dim_v, .pitch = BLOCK_Q};
    const int cleaned = bad && form != OF_BYTES;
    values.v_row = cleaned ? (form ? padded_v(a->head_dim_v) : a->head_dim_v) * (int64_t)sizeof(lane) : block->v_row;
    values.v = (cleaned ? (const char *)scratch->clean : block->v) + skip / per_lane(form) * values.v_row;
    values.n = ceil_div(n, per_lane(form)), values.n_low = ceil_div(n_low, per_lane(form));
    values.weight = scratch->weight;
    values.probs = form ? scratch->pairs : scratch->s;
    values.mode = tile->fresh ? ACC_ZERO : moved ? ACC_SCALE : ACC_KEEP;
    product_values_later(nv, form, &values, scratch);
    tile->fresh = 0;
    if (bad) product_values_waiting(scratch);
    for (int64_t i = 0; bad && i < block->bad.n; i++) {
        const int64_t key = block->first + block->bad.row[i], row = (key - j0) * BLOCK_Q;
        if (key < j0 || key >= j0 + n) continue;
        for (int64_t r = 0; form == OF_BYTES && r < nv * LANES; r++) scratch->s[row + r] *= scratch->share[r];
        const lane *attends = hides(scores->kind) ? scratch->add + row : NULL; /* of mark_attending */
        add_bad_value(a, nv, 1, scores->rows, key, scratch->s + row, attends, tile->ot);
    }
}

/* One tile against a run of keys of the block. */
INLINE void tile_block(const fa_attention_args *a, const modifiers *mods, int nv, int form, tile_state *tile,
                       key_run run, tile_scratch *scratch)
{
    const block_kind kind = load_additive(a, tile, nv, run, scratch);
    const score_tile scores = {&tile->rows, &tile->lanes, run.j0, run.n, kind, scratch->s, scratch->add};
    if (kind & BLOCK_EMPTY) return;
    if (!scratch->block.k) load_block(a, &tile->rows, form, scratch);
    const int64_t n_low = finish_scores(a, mods, nv, form, tile, &scores, scratch);
    if (a->stats.second_pass) {
        weigh_tile(a, nv, tile, &scores, scratch->by_row);
        return;
    }
    if (hides(kind)) take_out_bad_values(a, &tile->rows, form, scratch);
    const int bad = (hides(kind) || form == OF_BYTES) && scratch->block.bad.n;
    if (bad && hides(kind)) mark_attending(nv, &scores);
    const int moved = finish_probs(a, nv, form, bad, tile, &scores, scratch);
    accumulate(a, nv, form, bad, moved, tile, &scores, n_low, scratch);
}

INLINE void tile_reset(const fa_attention_args *a, tile_state *tile)
{
    for (int64_t r = 0; r < BLOCK_Q; r++) {
        tile->row_max[r] = a->sigmoid ? 0 : -INFINITY; /* nothing to rescale: all partials have one maximum */
        tile->row_sum[r] = 0;
        if (tile->row_log) tile->row_log[r] = 0;
    }
    for (int64_t i = 0; i < a->stats.n_top * BLOCK_Q; i++) tile->top_score[i] = -INFINITY;
    tile->fresh = 1;
}

/* Row maxima times the factor that scores wait for. A product that overflows is marked: -inf says that a row has no
 * key. */
INLINE void scale_maxima(tile_state *tile)
{
    for (int64_t r = 0; tile->factor != 1 && r < BLOCK_Q; r += LANES) {
        const v_t max = v_load(tile->row_max + r), mark = v_splat(-LANE_MAX); /* of mark_rows */
        const v_t scaled = max * v_splat(tile->factor);
        const vi_t lost = (scaled < mark) & (max > v_splat(-INFINITY));
        v_store(tile->row_max + r, v_select((max == mark) | lost, mark, scaled));
    }
}

/* Makes a part of what the tile has met since the last one, and merges it into `total`. A part of no keys is left out,
 * unless it is the first: `total` must hold something. */
static void tile_end_part(const fa_attention_args *a, const tile_scratch *scratch, tile_state *tile)
{
    const partial *part = tile->parts ? &scratch->part : &tile->total;
    const int64_t n_rows = tile->rows.n;
    if (tile->fresh && tile->parts) return;
    scale_maxima(tile);
    if (tile->fresh) memset(part->acc, 0, n_rows * part->acc_row * sizeof(lane));
    else transpose(tile->ot, BLOCK_Q, a->head_dim_v, n_rows, part->acc, part->acc_row);
    memcpy(part->row_max, tile->row_max, n_rows * sizeof(lane));
    memcpy(part->row_sum, tile->row_sum, n_rows * sizeof(lane));
    if (tile->row_log) memcpy(part->row_log, tile->row_log, n_rows * sizeof(lane));
    for (int64_t i = 0; i < a->stats.n_top; i++)
        for (int64_t r = 0; r < n_rows; r++) {
            const top_list top = row_top(a, part, r);
            top.score[i] = tile->top_score[i * BLOCK_Q + r] * tile->factor;
            top.key[i] = tile->top_first + tile->top_key[i * BLOCK_Q + r];
        }
    if (tile->parts == 1) partial_begin_merging(&tile->total);
    if (tile->parts) partial_merge(a, &tile->total, part, n_rows);
    tile->parts++;
    tile_reset(a, tile);
}

/* All keys were met: leaves the tile's state in `total`. */
static void tile_end(const fa_attention_args *a, const tile_scratch *scratch, tile_state *tile)
{
    tile_end_part(a, scratch, tile);
    if (tile->parts > 1) partial_end_merging(&tile->total, tile->rows.n);
}

/* All keys were met, and no other task has any of these rows: writes out, lse and statistics. Of one part, out is
 * written from where the accumulators are. */
static void tile_finish(const fa_attention_args *a, const tile_scratch *scratch, tile_state *tile)
{
    if (tile->parts || a->stats.n_top || a->v.dtype == FA_I4) { /* which partial_finish turns back */
        tile_end(a, scratch, tile);
        partial_finish(a, &tile->rows, &tile->total);
        return;
    }
    scale_maxima(tile);
    const partial sums = {.row_max = tile->row_max, .row_sum = tile->row_sum, .row_log = tile->row_log};
    if (tile->fresh) memset(tile->ot, 0, a->head_dim_v * BLOCK_Q * sizeof(lane));
    transposed_finish(a, &tile->rows, &sums, tile->ot);
}

/* Ranges, queries and the empty state of a tile, of which tile->rows names the rows. */
INLINE void tile_begin(const fa_attention_args *a, const modifiers *mods, int form, int64_t key_begin, int64_t key_end,
                       tile_state *tile)
{
    row_block *rows = &tile->rows;
    ranges_begin(a, rows, key_begin, key_end);
    if (form == OF_BYTES) load_byte_queries(a, mods->q_factor, tile);
    else load_queries(a, rows, form, mods->q_factor, tile->qt);
    begin_row_lanes(a, rows, &tile->lanes);
    EACH_ROW(rows, r, id) {
        if (!a->mods.bias.data) break;
        tile->bias[r] = at_row(&a->mods.bias, rows, id);
    }
    for (int64_t r = rows->n; a->mods.bias.data && r < BLOCK_Q; r++)
        tile->bias[r] = tile->bias[rows->n - 1]; /* a lane without a row hides what the last row hides */
    tile->parts = 0;
    tile->factor = scaled_later(a, form) ? mods->q_factor : 1;
    tile_reset(a, tile);
    if (!a->stats.second_pass) return;
    memset(tile->row_sum, 0, BLOCK_Q * sizeof(lane));
    load_row_norm(a, rows, tile->row_max, tile->row_sum);
}

/* The rows that load_bias reads after tile i, if the bias is read in place: of this block, or of the next one. */
INLINE fetched_rows bias_after(const tile_scratch *scratch, int i, const key_walk *walk)
{
    const int64_t tiles = walk->n_blocks, first = i + 1 < tiles ? walk->grid : walk->next, lanes = sizeof(lane);
    const tile_state *tile = scratch->tiles + (i + 1) % tiles;
    return (fetched_rows){tile->bias, tile->rows.n, first * lanes, smaller(first + BLOCK_K, walk->last) * lanes};
}

/* Part `i` of `parts` of the keys and values from `first` on, which blocks name: no hardware finds these rows. */
INLINE fetched_rows keys_after(const fa_attention_args *a, const row_block *rows, int64_t first, int64_t last, int i,
                               int parts, const char **row)
{
    const int64_t j0 = first + i * BLOCK_K / parts, stop = smaller(first + (i + 1) * BLOCK_K / parts, last);
    int64_t n = 0;
    for (int64_t j = j0; j < stop; j++) row[n++] = at_key(&a->k, rows, j), row[n++] = at_key(&a->v, rows, j);
    return (fetched_rows){row, n, 0, row_size(a->k.dtype, larger(a->head_dim, a->head_dim_v))};
}

/* The states of the tiles of rows `all` over keys [key_begin, key_end), left in scratch->tiles: for tile_end. */
INLINE void tile_attend_as(const fa_attention_args *a, int form, const row_block *all, int64_t key_begin,
                           int64_t key_end, tile_scratch *scratch)
{
    const modifiers mods = modifiers_of(a, form == OF_PAIRS);
    const int tiles = (int)ceil_div(all->n, BLOCK_Q);
    begin_head(a, all, &scratch->copy);
    if (form != OF_BYTES && a->dropout > 0) scratch->drop = philox_key_of(a);
    for (int i = 0; i < tiles; i++) {
        row_block *rows = &scratch->tiles[i].rows;
        rows->b = all->b, rows->h_kv = all->h_kv, rows->group = all->group;
        rows->row0 = all->row0 + i * BLOCK_Q;
        rows->n = smaller(all->n - i * BLOCK_Q, BLOCK_Q);
        tile_begin(a, &mods, form, key_begin, key_end, scratch->tiles + i);
        if (form != OF_BYTES && a->dropout > 0) count_rows(a, rows, &scratch->drop, scratch->tiles[i].counters);
    }
    scratch->waiting_nv = 0;
    key_walk walk = walk_begin(&scratch->tiles->rows, tiles, sizeof(tile_state), a->masks.ranges != NULL,
                               key_step(form), key_end);
    for (int64_t part = walk.first / PART_K; walk_next(&walk); part = walk.grid / PART_K) {
        if (walk.grid / PART_K != part) {
            if (given_up(a->watch)) return;
            if (in_tiles(form)) amx_begin(); /* whoever was asked may have used them */
            product_values_waiting(scratch);
            for (int i = 0; i < tiles; i++)
                if (!scratch->tiles[i].fresh) tile_end_part(a, scratch, scratch->tiles + i);
        }
        key_block *block = &scratch->block;
        block->first = walk.begin, block->n = walk.end - walk.begin;
        block->k = NULL, block->checked = 0;
        for (int i = 0; i < tiles; i++) {
            tile_state *tile = scratch->tiles + i;
            const int64_t j0 = larger(tile->rows.first, walk.begin), end = smaller(tile->rows.last, walk.end);
            const key_run run = masked_run(a, &tile->rows, key_step(form), j0, end - j0);
            if (run.mask == BLOCK_EMPTY) continue;
            const int listed = keys_are_listed(a) && !in_tiles(form);
            if (listed) scratch->ahead = keys_after(a, all, walk.next, walk.last, i, tiles, scratch->next);
            else if (walk.next < walk.last) prefetch_block(a, all, &scratch->copy, walk.next, walk.last, i, tiles);
            else if (scratch->later.n) prefetch_task(a, &scratch->later, i, tiles);
            const int in_place = bias_in_place(a, &tile->rows, run.mask);
            if (!listed) scratch->ahead = in_place ? bias_after(scratch, i, &walk) : (fetched_rows){NULL, 0, 0, 0};
            if (tile->rows.n <= LANES) tile_block(a, &mods, 1, form, tile, run, scratch);
            else tile_block(a, &mods, NV, form, tile, run, scratch);
        }
    }
    product_values_waiting(scratch);
}

static void tile_attend(const fa_attention_args *a, const row_block *rows, int64_t key_begin, int64_t key_end,
                        tile_scratch *scratch)
{
    if (FORM_OF(a) == OF_BYTES) {
        tile_attend_as(a, OF_BYTES, rows, key_begin, key_end, scratch);
    } else if (FORM_OF(a) == OF_LANES) {
        tile_attend_as(a, OF_LANES, rows, key_begin, key_end, scratch);
    } else {
        amx_begin();
        tile_attend_as(a, OF_PAIRS, rows, key_begin, key_end, scratch);
        amx_end();
    }
}
