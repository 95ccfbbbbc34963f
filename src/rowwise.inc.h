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

static int64_t row_scratch_at(const fa_rowwise_args *r, void *memory, row_scratch *w)
{
    const fa_attention_args *a = &r->attention;
    const int64_t rows = a->len_k + BLOCK_K; /* a block is scored whole */
    char *next = memory;
    int64_t used = tile_scratch_at(a, 1, memory, &w->tile);
#define TAKE(field, bytes) ((field) = memory ? (void *)(next + used) : NULL, used += round_up(bytes, 64))
    if (r->kind == FA_ADDITIVE) {
        TAKE(w->additive.weight, a->head_dim * BLOCK_Q * (int64_t)sizeof(lane));
        TAKE(w->additive.exp_q, a->head_dim * BLOCK_Q * (int64_t)sizeof(lane));
        TAKE(w->additive.exp_k, round_up(a->head_dim, LANES) * (int64_t)sizeof(lane));
    }
    TAKE(w->kept.s, rows * BLOCK_Q * (int64_t)sizeof(lane));
    TAKE(w->kept.key, rows * (int64_t)sizeof(int64_t));
    void *total;
    TAKE(total, partial_at(a, BLOCK_Q, NULL, NULL));
#undef TAKE
    if (memory) partial_at(a, BLOCK_Q, total, &w->tile.tiles[0].total);
    return used;
}

/* Scores of n keys from j0 on, behind those that are kept; of which those stay that may matter. */
INLINE void score_block(const fa_rowwise_args *r, int nv, modifiers *m, int64_t j0, int64_t n, row_scratch *w)
{
    const fa_attention_args *a = &r->attention;
    tile_state *tile = w->tile.tiles;
    row_block *t = &tile->t;
    lane *s = w->kept.s + w->kept.n * BLOCK_Q, *probs = w->tile.s;
    const block_kind mask = mask_kind(a, t, 1, &j0, &n);
    if (mask == BLOCK_EMPTY) return;
    m->additive = additive_parts(a, t, mask);
    const block_kind kind = m->additive ? load_additive(a, m, tile, nv, j0, n, &w->tile) : BLOCK_FULL;
    if (kind == BLOCK_EMPTY) return;
    const int out_of_range = t->full_first > j0 || t->full_last < j0 + n;
    const int hides = out_of_range || kind == BLOCK_EDGE;
    int64_t k_row;
    const char *k = keys_at(a, t, j0, n, w->tile.k, &k_row);
    if (r->kind == FA_ADDITIVE) block_additive(nv, k, k_row, n, tile->qt, a->head_dim, &w->additive, s);
    else
        block_outer(nv, 0, n, &(outer_product){.x = k, .x_row = k_row, .y = tile->qt, .depth = a->head_dim, .out = s},
                    NULL);
    w->tile.s = s;
    modify_tile(a, m, nv, kind, out_of_range, tile, j0, n, &w->tile);
    w->tile.s = probs;
    for (int64_t j = 0; j < n; j++) {
        w->kept.key[w->kept.n + j] = j0 + j;
        for (int u = 0; u < nv; u++) {
            lane *max = tile->row_max + u * LANES;
            v_store(max, v_max(v_load(max), v_load(s + j * BLOCK_Q + u * LANES)));
        }
    }
    note_rows(nv, m, hides, 0, n, &w->tile, tile->row_max);
    keep_near(nv, &w->kept, w->kept.n, n, support_width(r->kind), tile->row_max);
}

/* ot (head_dim_v, nv) and row_sum of the kept keys. */
INLINE void weigh_values(const fa_rowwise_args *r, int nv, const v_t *tau, row_scratch *w)
{
    const fa_attention_args *a = &r->attention;
    const int64_t width = a->head_dim_v;
    tile_state *tile = w->tile.tiles;
    key_block block;
    for (int64_t first = 0; first < w->kept.n; first += BLOCK_K) {
        if (first && first % ROWWISE_ASKS == 0 && given_up(a->watch)) return;
        const int64_t n = smaller(BLOCK_K, w->kept.n - first), *key = w->kept.key + first;
        const lane *z = w->kept.s + first * BLOCK_Q;
        normalise(r->kind, nv, z, n, tau, w->tile.s, tile->row_sum);
        gather_values(a, &tile->t, key, n, w->tile.v, &block);
        const value_product values = {.v = (const char *)w->tile.v,
                                      .v_row = width * (int64_t)sizeof(lane),
                                      .n = n,
                                      .head_dim_v = width,
                                      .probs = w->tile.s,
                                      .mode = tile->fresh ? ACC_ZERO : ACC_KEEP,
                                      .out = tile->ot};
        block_values(nv, 0, &values);
        tile->fresh = 0;
        for (int64_t i = 0; i < block.n_bad; i++) {
            const int64_t row = block.bad[i] * BLOCK_Q;
            lane *attends = w->tile.alpha;
            for (int u = 0; u < nv * LANES; u += LANES)
                v_store(attends + u, (v_t)selects(r->kind, v_load(z + row + u), v_load(w->tile.s + row + u)));
            add_value(a, &tile->t, nv, key[block.bad[i]], w->tile.s + row, attends, tile->ot);
        }
    }
}

INLINE void rowwise_tile(const fa_rowwise_args *r, int nv, modifiers *m, row_scratch *w)
{
    const fa_attention_args *a = &r->attention;
    tile_state *tile = w->tile.tiles;
    row_block *t = &tile->t;
    const int64_t last = t->last;
    int64_t block_first, block_last, next;
    for (int64_t grid = t->first / BLOCK_K * BLOCK_K; grid < last; grid = next) {
        block_first = larger(grid, t->first), block_last = smaller(grid + BLOCK_K, last), next = grid + BLOCK_K;
        if (a->ranges)
            next = enter_block(&w->tile, 1, 0, grid, smaller(grid + BLOCK_K, last), last, &block_first, &block_last);
        if (block_first < block_last) score_block(r, nv, m, block_first, block_last - block_first, w);
        if (grid / ROWWISE_ASKS != next / ROWWISE_ASKS && given_up(a->watch)) return;
    }
    v_t tau[NV_MAX];
    find_threshold(r, nv, tile->row_max, &w->kept, tau);
    weigh_values(r, nv, tau, w);
}

static void rowwise_run(const fa_rowwise_args *r, const fa_rowwise_plan *p, int64_t task, void *scratch)
{
    if (r->kind == FA_TALKING_HEADS) {
        talking_run(r, p, task, scratch);
        return;
    }
    const fa_attention_args *a = &r->attention;
    const int64_t group = a->heads_q / a->heads_kv, rows = group * a->len_q, blocks = ceil_div(rows, BLOCK_Q);
    const int64_t head = task / blocks, row0 = (blocks - 1 - task % blocks) * BLOCK_Q; /* causal: the longest first */
    modifiers m = modifiers_of(a, 0);
    row_scratch w;
    row_scratch_at(r, scratch, &w);
    tile_state *tile = w.tile.tiles;
    row_block *t = &tile->t;
    t->b = head / a->heads_kv, t->h_kv = head % a->heads_kv, t->group = group, t->row0 = row0, t->several = 0;
    t->rows = smaller(BLOCK_Q, rows - row0);
    if (r->kind == FA_ADDITIVE) m.s_factor *= m.q_factor, m.q_factor = 1; /* the query stands within the tanh */
    tile_begin(a, &m, 0, 0, a->len_k, tile);
    if (r->kind == FA_ADDITIVE) additive_begin(r, t, tile->qt, &w.additive);
    lane no_row[BLOCK_Q];
    for (int64_t i = 0; i < BLOCK_Q; i++) no_row[i] = i >= t->rows;
    for (int u = 0; u < NV; u++) w.kept.live[u] = v_load(no_row + u * LANES) == v_splat(0);
    w.kept.n = 0;
    if (t->rows <= LANES) rowwise_tile(r, 1, &m, &w);
    else rowwise_tile(r, NV, &m, &w);
    tile_end_part(a, &w.tile, tile);
    partial_finish(a, t, &tile->total);
}

static void rowwise_plan(const fa_rowwise_args *r, fa_rowwise_plan *p)
{
    const fa_attention_args *a = &r->attention;
    row_scratch w;
    talking_scratch talking;
    const double per_score = r->kind == FA_ADDITIVE ? 32.0 * a->head_dim : 2.0 * (a->head_dim + a->head_dim_v);
    p->flops = per_score * a->batch * a->heads_q * a->len_q * a->len_k;
    if (r->kind == FA_TALKING_HEADS) {
        p->n_tasks = a->batch * ceil_div(a->len_q, BLOCK_Q);
        p->scratch_bytes = talking_scratch_at(r, NULL, &talking);
    } else {
        p->n_tasks = a->batch * a->heads_kv * ceil_div(a->heads_q / a->heads_kv * a->len_q, BLOCK_Q);
        p->scratch_bytes = row_scratch_at(r, NULL, &w);
    }
    p->scratch_bytes = round_up(p->scratch_bytes, 64);
}
