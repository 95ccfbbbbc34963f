/* Attention that needs all scores of a row at a time, because its normaliser does: sparsemax, entmax-1.5, the k largest.
 * And additive attention, whose score is no product. One task is a tile of query rows against all their keys:
 *
 *     for each block of keys that some row attends:
 *         S^T = scores, modifiers and masks            scores.inc.h; queries on the lanes
 *         keep the keys that may still matter to some row
 *     the threshold of every lane                      normalisers.inc.h; fewer keys with every pass
 *     for each block of the keys that are left:
 *         P^T = normaliser of S^T
 *         O^T = O^T + V^T P^T                          V gathered: rows that nobody looks at are not read
 *     O = transpose(O^T) / sum of P
 *
 * The scores kept are the only memory that grows with the number of keys. A probability of 0 hides a key as a mask does:
 * what stands in its value reaches nothing. */

/* A thread's scratch: tile.s holds probabilities of a block, tile.v their values. */
typedef struct {
    tile_scratch tile;
    additive_scratch additive;
    kept_scores kept;
} row_scratch;

static int64_t take_row_scratch(arena *from, const fa_rowwise_args *call, row_scratch *scratch)
{
    const fa_attention_args *a = &call->attention;
    const int64_t n_keys = a->len_k + BLOCK_K; /* a block is scored whole */
    take_tile_scratch(from, a, 1, &scratch->tile);
    if (call->kind == FA_ADDITIVE) {
        CUT(from, scratch->additive.weight, a->head_dim * BLOCK_Q);
        CUT(from, scratch->additive.exp_q, a->head_dim * BLOCK_Q);
        CUT(from, scratch->additive.exp_k, round_up(a->head_dim, LANES));
    }
    CUT(from, scratch->kept.s, n_keys * BLOCK_Q);
    CUT(from, scratch->kept.key, n_keys);
    void *total = cut(from, partial_at(a, BLOCK_Q, NULL, NULL));
    if (total) partial_at(a, BLOCK_Q, total, &scratch->tile.tiles[0].total);
    return from->used;
}

/* Scores of n keys from j0 on, behind those that are kept; of which those stay that may matter. */
INLINE void score_block(const fa_rowwise_args *call, int nv, modifiers *mods, int64_t j0, int64_t n,
                        row_scratch *scratch)
{
    const fa_attention_args *a = &call->attention;
    tile_state *tile = scratch->tile.tiles;
    row_block *rows = &tile->rows;
    lane *s = scratch->kept.s + scratch->kept.n * BLOCK_Q, *probs = scratch->tile.s;
    const block_kind mask = mask_kind(a, rows, 1, &j0, &n);
    if (mask == BLOCK_EMPTY) return;
    mods->additive = additive_parts(a, rows, mask);
    const block_kind kind = mods->additive ? load_additive(a, mods, tile, nv, j0, n, &scratch->tile) : BLOCK_FULL;
    if (kind == BLOCK_EMPTY) return;
    const int out_of_range = rows->full_first > j0 || rows->full_last < j0 + n;
    const int hides = out_of_range || kind == BLOCK_EDGE;
    int64_t k_row;
    const char *k = keys_at(a, rows, j0, n, scratch->tile.k, &k_row);
    if (call->kind == FA_ADDITIVE) block_additive(nv, k, k_row, n, tile->qt, a->head_dim, &scratch->additive, s);
    else
        block_outer(nv, 0, n, &(outer_product){.x = k, .x_row = k_row, .y = tile->qt, .depth = a->head_dim, .out = s},
                    NULL);
    scratch->tile.s = s;
    modify_tile(a, mods, nv, kind, out_of_range, tile, j0, n, &scratch->tile);
    scratch->tile.s = probs;
    for (int64_t j = 0; j < n; j++) {
        scratch->kept.key[scratch->kept.n + j] = j0 + j;
        for (int u = 0; u < nv; u++) {
            lane *max = tile->row_max + u * LANES;
            v_store(max, v_max(v_load(max), v_load(s + j * BLOCK_Q + u * LANES)));
        }
    }
    note_rows(nv, mods, hides, 0, n, &scratch->tile, tile->row_max);
    keep_near(nv, &scratch->kept, scratch->kept.n, n, support_width(call->kind), tile->row_max);
}

/* ot (head_dim_v, nv) and row_sum of the kept keys. */
INLINE void weigh_values(const fa_rowwise_args *call, int nv, const v_t *tau, row_scratch *scratch)
{
    const fa_attention_args *a = &call->attention;
    const int64_t width = a->head_dim_v;
    tile_state *tile = scratch->tile.tiles;
    key_block block;
    for (int64_t first = 0; first < scratch->kept.n; first += BLOCK_K) {
        if (first && first % ROWWISE_ASKS == 0 && given_up(a->watch)) return;
        const int64_t n = smaller(BLOCK_K, scratch->kept.n - first), *key = scratch->kept.key + first;
        const lane *z = scratch->kept.s + first * BLOCK_Q;
        normalise(call->kind, nv, z, n, tau, scratch->tile.s, tile->row_sum);
        gather_values(a, &tile->rows, key, n, scratch->tile.v, &block);
        const value_product values = {.v = (const char *)scratch->tile.v,
                                      .v_row = width * (int64_t)sizeof(lane),
                                      .n = n,
                                      .head_dim_v = width,
                                      .probs = scratch->tile.s,
                                      .mode = tile->fresh ? ACC_ZERO : ACC_KEEP,
                                      .out = tile->ot};
        block_values(nv, 0, &values);
        tile->fresh = 0;
        for (int64_t i = 0; i < block.n_bad; i++) {
            const int64_t row = block.bad[i] * BLOCK_Q;
            lane *attends = scratch->tile.alpha;
            for (int u = 0; u < nv * LANES; u += LANES)
                v_store(attends + u, (v_t)selects(call->kind, v_load(z + row + u), v_load(scratch->tile.s + row + u)));
            add_value(a, &tile->rows, nv, key[block.bad[i]], scratch->tile.s + row, attends, tile->ot);
        }
    }
}

INLINE void rowwise_tile(const fa_rowwise_args *call, int nv, modifiers *mods, row_scratch *scratch)
{
    const fa_attention_args *a = &call->attention;
    tile_state *tile = scratch->tile.tiles;
    row_block *rows = &tile->rows;
    const int64_t last = rows->last;
    int64_t block_first, block_last, next;
    for (int64_t grid = rows->first / BLOCK_K * BLOCK_K; grid < last; grid = next) {
        block_first = larger(grid, rows->first), block_last = smaller(grid + BLOCK_K, last), next = grid + BLOCK_K;
        if (a->ranges)
            next = enter_block(&scratch->tile, 1, 0, grid, smaller(grid + BLOCK_K, last), last, &block_first,
                               &block_last);
        if (block_first < block_last) score_block(call, nv, mods, block_first, block_last - block_first, scratch);
        if (grid / ROWWISE_ASKS != next / ROWWISE_ASKS && given_up(a->watch)) return;
    }
    v_t tau[NV_MAX];
    find_threshold(call, nv, tile->row_max, &scratch->kept, tau);
    weigh_values(call, nv, tau, scratch);
}

static void rowwise_run(const fa_rowwise_args *call, const fa_rowwise_plan *plan, int64_t task, void *memory)
{
    if (call->kind == FA_TALKING_HEADS) {
        talking_run(call, plan, task, memory);
        return;
    }
    const fa_attention_args *a = &call->attention;
    const int64_t group = a->heads_q / a->heads_kv, n_rows = group * a->len_q, blocks = ceil_div(n_rows, BLOCK_Q);
    const int64_t head = task / blocks, row0 = (blocks - 1 - task % blocks) * BLOCK_Q; /* causal: the longest first */
    modifiers mods = modifiers_of(a, 0);
    row_scratch scratch;
    take_row_scratch(&(arena){.memory = memory}, call, &scratch);
    tile_state *tile = scratch.tile.tiles;
    row_block *rows = &tile->rows;
    rows->b = head / a->heads_kv, rows->h_kv = head % a->heads_kv, rows->group = group, rows->row0 = row0,
    rows->several = 0;
    rows->n = smaller(BLOCK_Q, n_rows - row0);
    if (call->kind == FA_ADDITIVE)
        mods.s_factor *= mods.q_factor, mods.q_factor = 1; /* the query stands within the tanh */
    tile_begin(a, &mods, 0, 0, a->len_k, tile);
    if (call->kind == FA_ADDITIVE) additive_begin(call, rows, tile->qt, &scratch.additive);
    lane no_row[BLOCK_Q];
    for (int64_t i = 0; i < BLOCK_Q; i++) no_row[i] = i >= rows->n;
    for (int u = 0; u < NV; u++) scratch.kept.live[u] = v_load(no_row + u * LANES) == v_splat(0);
    scratch.kept.n = 0;
    if (rows->n <= LANES) rowwise_tile(call, 1, &mods, &scratch);
    else rowwise_tile(call, NV, &mods, &scratch);
    tile_end_part(a, &scratch.tile, tile);
    partial_finish(a, rows, &tile->total);
}

static void rowwise_plan(const fa_rowwise_args *call, fa_rowwise_plan *plan)
{
    const fa_attention_args *a = &call->attention;
    row_scratch scratch;
    talking_scratch talking;
    const double per_score = call->kind == FA_ADDITIVE ? 32.0 * a->head_dim : 2.0 * (a->head_dim + a->head_dim_v);
    plan->flops = per_score * a->batch * a->heads_q * a->len_q * a->len_k;
    if (call->kind == FA_TALKING_HEADS) {
        plan->n_tasks = a->batch * ceil_div(a->len_q, BLOCK_Q);
        plan->scratch_bytes = take_talking_scratch(&(arena){.memory = NULL}, call, &talking);
    } else {
        plan->n_tasks = a->batch * a->heads_kv * ceil_div(a->heads_q / a->heads_kv * a->len_q, BLOCK_Q);
        plan->scratch_bytes = take_row_scratch(&(arena){.memory = NULL}, call, &scratch);
    }
}
