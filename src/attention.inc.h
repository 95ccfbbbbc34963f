/* One task of the tile kernel: up to TILES blocks of query rows against the keys of their ranges, queries on the lanes.
 *
 *     Q^T = transpose(scale * Q)                       rows of one KV head: (query, head in group) pairs
 *     for each block of keys, and each tile of rows that attends some of it:
 *         S^T = K Q^T                                  K read in place, one scalar broadcast at a time
 *         S^T = modifiers and masks of S^T             scores.inc.h; nothing where the block is full
 *         P^T, m, l, alpha = online softmax of S^T     softmax.inc.h
 *         O^T = alpha O^T + V^T P^T                    V read in place
 *     O = transpose(O^T) / l
 *
 * FlashAttention-2 (Dao 2023) turned on its side: lanes are queries, so softmax needs no horizontal reduction.
 *
 * Keys and values are copied once per block, and shared by the tiles, where that pays: 16-bit ones are widened (or the
 * values interleaved in pairs, for the bfloat16 dot product), and rows that do not lie side by side are gathered:
 * strides of (batch, length, heads, head_dim) arrays fall on the same cache sets (docs/notes/attention-kernel.md). */

/* A probability of 0 does not shield a NaN or Inf in V. So a tile in which some row does not attend some key takes the
 * values without the rows that are not finite, and adds those afterwards where they are attended: add_bad_values. */
INLINE void take_out_bad_values(const fa_attention_args *a, const row_block *rows, int dot, const tile_scratch *scratch,
                                key_block *block)
{
    const char *v = at(&a->v, rows->b, rows->h_kv, block->first, 0);
    const int64_t width = a->head_dim_v;
    if (block->checked) return;
    block->checked = 1;
    for (int64_t j = 0; j < block->n; j++) {
        const char *row = v + j * a->v.row;
        const int finite = a->v.dtype == FA_BF16  ? row_finite(FA_BF16, row, width)
                           : a->v.dtype == FA_F16 ? row_finite(FA_F16, row, width)
                                                  : row_finite(LANE_DTYPE, row, width);
        if (!finite) block->bad[block->n_bad++] = j;
    }
    if (!block->n_bad) return;
    for (int64_t j = 0; j < (dot ? (block->n + 1) / 2 : block->n); j++)
        memcpy(scratch->clean + j * width, block->v + j * block->v_row, width * sizeof(lane));
    for (int64_t i = 0; i < block->n_bad; i++) {
        const int64_t j = block->bad[i];
        if (!dot) memset(scratch->clean + j * width, 0, width * sizeof(lane));
        else /* one half of every pair */
            for (int64_t d = 0; d < width; d++) memset((char *)(scratch->clean + j / 2 * width + d) + j % 2 * 2, 0, 2);
    }
}

/* ot += p v for the rows of V that were taken out, in the lanes that attend them: masks in w->add, in order. `skip`
 * rows of the block come before the tile's first key. */
INLINE void add_bad_values(const fa_attention_args *a, int nv, const tile_state *tile, int64_t skip, int64_t n,
                           const tile_scratch *scratch, const key_block *block)
{
    for (int64_t i = 0; i < block->n_bad; i++) {
        const int64_t j = block->bad[i] - skip;
        if (j < 0 || j >= n) continue;
        for (int64_t d = 0; d < a->head_dim_v; d++) {
            const char *element = at(&a->v, tile->rows.b, tile->rows.h_kv, block->first + block->bad[i], d);
            const v_t value = v_splat(load_element(a->v.dtype, element));
            for (int u = 0; u < nv; u++) {
                lane *out = tile->ot + d * BLOCK_Q + u * LANES;
                const v_t p = v_load(scratch->s + j * BLOCK_Q + u * LANES);
                const vi_t attends = (vi_t)v_load(scratch->add + j * BLOCK_Q + u * LANES);
                v_store(out, v_select(attends, v_fma(p, value, v_load(out)), v_load(out)));
            }
        }
    }
}

/* Second pass: s (n keys, nv vectors of queries) becomes probabilities, and those are added up. A factor of NaN is of
 * the keys that the row attends; `hides`: those may not be all. */
static void weigh_tile(const fa_attention_args *a, const modifiers *mods, int nv, int hides, const tile_state *tile,
                       int64_t j0, int64_t n, const tile_scratch *scratch)
{
    vi_t undefined = {0};
    for (int u = 0; u < nv; u++) {
        const v_t base = v_load(tile->row_max + u * LANES), factor = v_load(tile->row_sum + u * LANES);
        const vi_t weighs = factor != 0; /* no row, or one without keys: q = 0 times a NaN that nobody attends is NaN */
        undefined |= factor != factor;
        for (int64_t j = 0; j < n; j++) {
            lane *at = scratch->s + j * BLOCK_Q + u * LANES;
            v_store(at, (v_t)((vi_t)(v_exp_prob(v_load(at) - base) * factor) & weighs));
        }
    }
    if (hides && v_any(undefined)) {
        note_attending(nv, mods, n, scratch);
        for (int64_t j = 0; j < n; j++)
            for (int64_t at = j * BLOCK_Q; at < j * BLOCK_Q + nv * LANES; at += LANES)
                v_store(scratch->s + at, (v_t)((vi_t)v_load(scratch->s + at) & (vi_t)v_load(scratch->add + at)));
    }
    const int one_head = tile->rows.group == 1;
    if (a->key_sums.data && one_head) add_lanes_to_key_sums(a, &tile->rows, nv, scratch->s, j0, n);
    if (a->mean_weights.data || !one_head) transpose(scratch->s, BLOCK_Q, n, tile->rows.n, scratch->by_row, BLOCK_K);
    if (a->key_sums.data && !one_head) add_rows_to_key_sums(a, &tile->rows, scratch->by_row, j0, n);
    if (a->mean_weights.data) add_rows_to_mean(a, &tile->rows, scratch->by_row, j0, n);
}

/* One tile against keys [skip, skip + n) of the block. */
INLINE void tile_block(const fa_attention_args *a, const modifiers *mods, int nv, int dot, tile_state *tile,
                       int64_t skip, int64_t n, const tile_scratch *scratch, key_block *block, const bias_ahead *ahead)
{
    row_block *rows = &tile->rows;
    const int64_t j0 = block->first + skip, depth = dot ? (a->head_dim + 1) / 2 : a->head_dim;
    const int out_of_range = rows->full_first > j0 || rows->full_last < j0 + n;
    const block_kind kind = mods->additive ? load_additive(a, mods, tile, nv, j0, n, scratch) : BLOCK_FULL;
    const int hides = out_of_range || kind == BLOCK_EDGE;

    if (kind == BLOCK_EMPTY) return;
    if (!block->k) load_block(a, rows, dot, scratch, block);
    const outer_product scores = {.x = block->k + skip * block->k_row,
                                  .x_row = block->k_row,
                                  .y = tile->qt,
                                  .depth = depth,
                                  .factor = mods->q_factor,
                                  .out = scratch->s};
    block_outer(nv, dot, n, &scores, ahead);

    modify_tile(a, mods, nv, kind, out_of_range, tile, j0, n, scratch);
    if (a->second_pass) {
        weigh_tile(a, mods, nv, hides, tile, j0, n, scratch);
        return;
    }
    if (hides) take_out_bad_values(a, rows, dot, scratch, block);
    const int bad = hides && block->n_bad;
    if (bad) note_attending(nv, mods, n, scratch);

    if (a->n_top) {
        tile->top_first = j0 / PART_K * PART_K;
        top_insert_tile(nv, a->n_top, scratch->s, n, (ilane)(j0 - tile->top_first), tile->top_score, tile->top_key);
    }
    int moved = 0;
    if (a->sigmoid) sigmoid_update(nv, scratch->s, n, (lane)a->sigmoid_bias);
    else if (tile->row_log)
        moved = softmax_update(nv, scratch->s, n, tile->row_max, tile->row_sum, tile->row_log, scratch->alpha);
    else moved = softmax_update(nv, scratch->s, n, tile->row_max, tile->row_sum, NULL, scratch->alpha);
    note_rows(nv, mods, hides, bad, n, scratch, tile->row_max);
    const lane *probs = scratch->s;
    if (dot) {
        for (int64_t j = 0; j < n; j += 2)
            UNROLL_FOR(int u = 0; u < nv; u++) {
                const v_t p0 = v_load(scratch->s + j * BLOCK_Q + u * LANES);
                const v_t p1 = j + 1 < n ? v_load(scratch->s + (j + 1) * BLOCK_Q + u * LANES) : v_splat(0);
                v_store(scratch->pairs + j / 2 * BLOCK_Q + u * LANES, v_pack_bf16(p0, p1));
            }
        probs = scratch->pairs;
    }
    const int64_t v_row = bad ? a->head_dim_v * (int64_t)sizeof(lane) : block->v_row;
    const value_product values = {.v = (bad ? (const char *)scratch->clean : block->v) +
                                       (dot ? skip / 2 : skip) * v_row,
                                  .v_row = v_row,
                                  .n = dot ? (n + 1) / 2 : n,
                                  .head_dim_v = a->head_dim_v,
                                  .probs = probs,
                                  .alpha = scratch->alpha,
                                  .mode = tile->fresh ? ACC_ZERO
                                          : moved     ? ACC_SCALE
                                                      : ACC_KEEP,
                                  .out = tile->ot};
    block_values(nv, dot, &values);
    if (bad) add_bad_values(a, nv, tile, skip, n, scratch, block);
    tile->fresh = 0;
}

/* The empty state of a tile. */
INLINE void tile_reset(const fa_attention_args *a, tile_state *tile)
{
    for (int64_t r = 0; r < BLOCK_Q; r++) {
        tile->row_max[r] = a->sigmoid ? 0 : -INFINITY; /* nothing to rescale: partials have one maximum */
        tile->row_sum[r] = 0;
        if (tile->row_log) tile->row_log[r] = 0;
    }
    for (int64_t i = 0; i < a->n_top * BLOCK_Q; i++) tile->top_score[i] = -INFINITY;
    tile->fresh = 1;
}

/* Ends a part, if the tile has met keys since the last one, or none at all. */
static void tile_end_part(const fa_attention_args *a, const tile_scratch *scratch, tile_state *tile)
{
    const partial *part = tile->parts ? &scratch->part : &tile->total;
    const int64_t n_rows = tile->rows.n;
    if (tile->fresh && tile->parts) return;
    if (tile->fresh) memset(part->acc, 0, n_rows * part->acc_row * sizeof(lane));
    else transpose(tile->ot, BLOCK_Q, a->head_dim_v, n_rows, part->acc, part->acc_row);
    memcpy(part->row_max, tile->row_max, n_rows * sizeof(lane));
    memcpy(part->row_sum, tile->row_sum, n_rows * sizeof(lane));
    if (tile->row_log) memcpy(part->row_log, tile->row_log, n_rows * sizeof(lane));
    for (int64_t i = 0; i < a->n_top; i++)
        for (int64_t r = 0; r < n_rows; r++) {
            const top_list top = row_top(a, part, r);
            top.score[i] = tile->top_score[i * BLOCK_Q + r];
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

/* Pairs of keys begin and, but for the last key of all, end at even places; the one too many is masked. */
INLINE void whole_pairs(row_block *rows, int64_t key_end)
{
    rows->first -= rows->first % 2;
    rows->last += rows->last % 2 && rows->last < key_end;
}

/* Ranges, queries and the empty state of a tile. */
INLINE void tile_begin(const fa_attention_args *a, const modifiers *mods, int dot, int64_t key_begin, int64_t key_end,
                       tile_state *tile)
{
    row_block *rows = &tile->rows;
    row_block_ranges(a, rows, key_begin, key_end);
    if (a->ranges) row_block_open_lists(a, rows);
    if (dot) whole_pairs(rows, key_end);
    load_queries(a, rows, dot, mods->q_factor, tile->qt);
    if (a->bias.data) note_bias_rows(a, tile);
    for (int64_t r = 0; r < BLOCK_Q; r++) tile->slope[r] = 0;
    if (mods->alibi) {
        EACH_ROW(rows, r, id) tile->slope[r] = *(const lane_u *)at(&a->alibi_slopes, rows->b, id.head, 0, 0);
    }
    tile->parts = 0;
    tile_reset(a, tile);
    if (!a->second_pass) return;
    memset(tile->row_sum, 0, BLOCK_Q * sizeof(lane));
    load_row_norm(a, rows, tile->row_max, tile->row_sum);
}

/* With lists: what the tiles attend of the block [grid, *last), and in *first, *last what all of them together do.
 * Returns the next block that one of them attends. */
INLINE int64_t enter_block(tile_scratch *scratch, int tiles, int dot, int64_t grid, int64_t block_end, int64_t key_end,
                           int64_t *first, int64_t *last)
{
    int64_t next = INT64_MAX;
    *first = block_end;
    *last = grid;
    for (int i = 0; i < tiles; i++) {
        row_block *rows = &scratch->tiles[i].rows;
        row_block_enter(rows, grid, block_end);
        if (dot) whole_pairs(rows, key_end);
        *first = rows->first < *first ? rows->first : *first;
        *last = rows->last > *last ? rows->last : *last;
        next = rows->next < next ? rows->next : next;
    }
    return next < key_end ? next / BLOCK_K * BLOCK_K : key_end;
}

/* What load_bias reads after tile i of the block `grid`: of that block, or of the next. */
INLINE bias_ahead bias_after(const tile_scratch *scratch, int tiles, int i, int64_t grid, int64_t next, int64_t last)
{
    const tile_state *tile = scratch->tiles + (i + 1) % tiles;
    const int64_t first = i + 1 < tiles ? grid : next, lanes = sizeof(lane);
    return (bias_ahead){tile->bias, tile->rows.n, first * lanes, smaller(first + BLOCK_K, last) * lanes};
}

/* The states of the tiles of `rows` over keys [key_begin, key_end), left in w->tiles: for tile_end. */
INLINE void tile_attend_as(const fa_attention_args *a, int dot, const row_block *all, int64_t key_begin,
                           int64_t key_end, tile_scratch *scratch)
{
    modifiers mods = modifiers_of(a, dot);
    const int tiles = (int)((all->n + BLOCK_Q - 1) / BLOCK_Q);
    int64_t first = key_end, last = key_begin;
    for (int i = 0; i < tiles; i++) {
        row_block *rows = &scratch->tiles[i].rows;
        rows->b = all->b, rows->h_kv = all->h_kv, rows->group = all->group, rows->row0 = all->row0, rows->several = 0;
        rows->row0 += i * BLOCK_Q;
        rows->n = all->n - i * BLOCK_Q < BLOCK_Q ? all->n - i * BLOCK_Q : BLOCK_Q;
        tile_begin(a, &mods, dot, key_begin, key_end, scratch->tiles + i);
        first = rows->first < first ? rows->first : first;
        last = rows->last > last ? rows->last : last;
    }
    int64_t part = first / PART_K;
    for (int64_t grid = first / BLOCK_K * BLOCK_K, next; grid < last; grid = next) {
        int64_t block_end = grid + BLOCK_K < last ? grid + BLOCK_K : last;
        key_block block = {.first = grid > first ? grid : first};
        next = a->ranges ? enter_block(scratch, tiles, dot, grid, block_end, key_end, &block.first, &block_end)
                         : grid + BLOCK_K;
        if (grid / PART_K != part) {
            if (given_up(a->watch)) return;
            for (int i = 0; i < tiles; i++)
                if (!scratch->tiles[i].fresh) tile_end_part(a, scratch, scratch->tiles + i);
        }
        part = grid / PART_K;
        block.n = block_end - block.first;
        for (int i = 0; i < tiles; i++) {
            tile_state *tile = scratch->tiles + i;
            int64_t j0 = tile->rows.first > block.first ? tile->rows.first : block.first;
            int64_t n = (tile->rows.last < block_end ? tile->rows.last : block_end) - j0;
            if (n <= 0) continue;
            const block_kind kind = mask_kind(a, &tile->rows, dot ? 2 : 1, &j0, &n);
            if (kind == BLOCK_EMPTY) continue;
            mods.additive = additive_parts(a, &tile->rows, kind);
            prefetch_block(a, all, next, last, i, tiles);
            const bias_ahead bias = bias_after(scratch, tiles, i, grid, next, last);
            const bias_ahead *ahead = mods.additive == ADD_BIAS && bias_of_lanes(a) ? &bias : NULL;
            if (tile->rows.n <= LANES) tile_block(a, &mods, 1, dot, tile, j0 - block.first, n, scratch, &block, ahead);
            else tile_block(a, &mods, NV, dot, tile, j0 - block.first, n, scratch, &block, ahead);
        }
    }
}

static void tile_attend(const fa_attention_args *a, const row_block *all, int64_t key_begin, int64_t key_end,
                        tile_scratch *scratch)
{
    if (V_BF16_DOT && a->q.dtype == FA_BF16) tile_attend_as(a, 1, all, key_begin, key_end, scratch);
    else tile_attend_as(a, 0, all, key_begin, key_end, scratch);
}
