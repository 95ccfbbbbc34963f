/* Talking heads (Shazeer et al. 2020): heads mix before the softmax and after it. One task is a block of query rows, of all
 * heads, against all their keys, twice: the second time their softmax's denominators are known.
 *
 *     for each block of keys:                          for each block of keys:
 *         S_h = K_h Q_h^T          every head h            S_h, M_g as before
 *         M_g = sum_h pre_hg S_h                           P_g = exp(M_g - max_g) / sum_g
 *         max_g, sum_g = online softmax of M_g             W_f = sum_g post_gf P_g
 *                                                          O_f = O_f + V_f^T W_f
 *
 * Modifiers and masks are those of the mixed scores. Memory is heads x block, whatever the number of keys. */

/* Lanes between the blocks of two heads: no power of 2, for those fall on the same sets of the cache. */
#define HEAD_PITCH ((BLOCK_K + 1) * BLOCK_Q)

/* A thread's scratch; what is one a head has the pitch HEAD_PITCH, qt and ot those of their sizes. */
typedef struct {
    tile_scratch tile;    /* tile.s points into `mixed` while a head's scores are modified */
    tile_state *heads;    /* (heads_q): rows, queries, results, maxima and sums */
    lane *scores, *mixed; /* (heads_q, BLOCK_K, BLOCK_Q) */
    lane *pre, *post;     /* (heads_q, heads_q), transposed: row g holds what goes into g */
} talking_scratch;

static int64_t talking_scratch_at(const fa_rowwise_args *r, void *memory, talking_scratch *w)
{
    const fa_attention_args *a = &r->attention;
    const int64_t heads = a->heads_q, lanes = sizeof(lane);
    char *next = memory;
    int64_t used = tile_scratch_at(a, 0, memory, &w->tile);
#define TAKE(field, bytes) ((field) = memory ? (void *)(next + used) : NULL, used += round_up(bytes, 64))
    TAKE(w->heads, heads * (int64_t)sizeof(tile_state));
    TAKE(w->scores, heads * HEAD_PITCH * lanes);
    TAKE(w->mixed, heads * HEAD_PITCH * lanes);
    TAKE(w->pre, heads * heads * lanes);
    TAKE(w->post, heads * heads * lanes);
    for (int64_t h = 0; h < heads; h++) {
        tile_state none;
        used += tile_state_at(a, memory ? next + used : NULL, memory ? w->heads + h : &none);
    }
    void *total; /* one for all heads, which finish in turn */
    TAKE(total, partial_at(a, BLOCK_Q, NULL, NULL));
#undef TAKE
    for (int64_t h = 0; memory && h < heads; h++) partial_at(a, BLOCK_Q, total, &w->heads[h].total);
    return used;
}

/* to_g (n, nv) = sum over h of mix_gh from_h (n, nv) */
INLINE void mix_heads(int nv, int64_t heads, const lane *mix, const lane *from, int64_t n, lane *to)
{
    outer_product p = {.x = (const char *)mix,
                       .x_row = heads * (int64_t)sizeof(lane),
                       .y = from,
                       .pitch = HEAD_PITCH,
                       .depth = heads,
                       .out = to};
    for (int64_t j = 0; j < n; j++, p.y += BLOCK_Q, p.out += BLOCK_Q) {
        int64_t g = 0;
        for (; g + TILE <= heads; g += TILE) tile_outer(TILE, nv, 0, 0, &p, g);
        for (; g + 2 <= heads; g += 2) tile_outer(2, nv, 0, 0, &p, g);
        for (; g < heads; g++) tile_outer(1, nv, 0, 0, &p, g);
    }
}

/* Mixed scores (heads, n, nv) of the keys from j0 on, in w->mixed, with modifiers and masks. Returns whether some row of
 * some head does not attend some of them. */
INLINE int talking_scores(const fa_rowwise_args *r, int nv, modifiers *m, int64_t j0, int64_t n, talking_scratch *w,
                          int note)
{
    const fa_attention_args *a = &r->attention;
    const int64_t heads = a->heads_q, group = heads / a->heads_kv;
    int some_hidden = 0;
    for (int64_t h = 0; h < heads; h++) {
        const row_block kv = {.b = w->heads[h].t.b, .h_kv = h / group};
        int64_t k_row;
        const char *k = keys_at(a, &kv, j0, n, w->tile.k, &k_row);
        lane *s = (r->pre ? w->scores : w->mixed) + h * HEAD_PITCH;
        block_outer(nv, 0, n,
                    &(outer_product){.x = k, .x_row = k_row, .y = w->heads[h].qt, .depth = a->head_dim, .out = s},
                    NULL);
    }
    if (r->pre) mix_heads(nv, heads, w->pre, w->scores, n, w->mixed);
    for (int64_t g = 0; g < heads; g++) {
        tile_state *tile = w->heads + g;
        row_block *t = &tile->t;
        const int touched = t->first < j0 + n && j0 < t->last; /* else its rows' ranges may be those of another block */
        m->additive = additive_parts(a, t, a->mask.data ? BLOCK_EDGE : BLOCK_FULL);
        block_kind kind = touched ? BLOCK_FULL : BLOCK_EMPTY;
        if (touched && m->additive) kind = load_additive(a, m, tile, nv, j0, n, &w->tile);
        const int out_of_range = t->full_first > j0 || t->full_last < j0 + n;
        const int hides = out_of_range || kind != BLOCK_FULL;
        lane *s = w->mixed + g * HEAD_PITCH;
        some_hidden |= hides;
        if (kind == BLOCK_EMPTY) {
            for (int64_t i = 0; i < n * BLOCK_Q; i++) s[i] = -(lane)INFINITY;
            continue;
        }
        w->tile.s = s;
        modify_tile(a, m, nv, kind, out_of_range, tile, j0, n, &w->tile);
        if (!note) continue;
        softmax_update(nv, s, n, tile->row_max, tile->row_sum, NULL, w->tile.alpha);
        note_rows(nv, m, hides, 0, n, &w->tile, tile->row_max);
    }
    return some_hidden;
}

/* Probabilities (n, nv) in place of scores; row_sum is the reciprocal of the denominator. */
INLINE void talking_probs(int nv, const tile_state *tile, int64_t n, lane *s)
{
    for (int u = 0; u < nv; u++) {
        const v_t base = row_base(tile->row_max + u * LANES), factor = v_load(tile->row_sum + u * LANES);
        for (int64_t j = 0; j < n; j++) {
            lane *x = s + j * BLOCK_Q + u * LANES;
            const v_t score = v_load(x);
            /* A hidden key has no probability, also where the factor is NaN. */
            v_store(x, v_select(score == v_splat(-INFINITY), v_splat(0), v_exp_prob(score - base) * factor));
        }
    }
}

/* Adds what the values from j0 on are weighted with: w->mixed are the mixed scores, of which -inf hides. */
INLINE void talking_values(const fa_rowwise_args *r, int nv, int hidden, int64_t j0, int64_t n, talking_scratch *w)
{
    const fa_attention_args *a = &r->attention;
    const int64_t heads = a->heads_q, group = heads / a->heads_kv, width = a->head_dim_v;
    lane *probs = r->post ? w->scores : w->mixed;
    int64_t key[BLOCK_K];
    key_block block;
    for (int64_t j = 0; j < n; j++) key[j] = j0 + j;
    if (hidden) { /* which lanes attend a key: of each head, `scores` being free, or where heads mix, of some head */
        for (int64_t j = 0; j < n * BLOCK_Q; j += LANES) {
            vi_t some = {0};
            for (int64_t g = 0; g < heads; g++) {
                const vi_t attends = v_load(w->mixed + g * HEAD_PITCH + j) != v_splat(-INFINITY);
                if (!r->post) v_store(w->scores + g * HEAD_PITCH + j, (v_t)attends);
                some |= attends;
            }
            v_store(w->tile.add + j, (v_t)some);
        }
    }
    for (int64_t g = 0; g < heads; g++) talking_probs(nv, w->heads + g, n, w->mixed + g * HEAD_PITCH);
    if (r->post) mix_heads(nv, heads, w->post, w->mixed, n, w->scores);
    for (int64_t f = 0; f < heads; f++) {
        tile_state *tile = w->heads + f;
        const row_block kv = {.b = tile->t.b, .h_kv = f / group};
        const char *v = at(&a->v, kv.b, kv.h_kv, j0, 0);
        int64_t v_row = a->v.row;
        block.n_bad = 0;
        if (hidden || dtype_size(a->v.dtype) != sizeof(lane) || !is_dense(&a->v, width)) {
            gather_values(a, &kv, key, n, w->tile.v, &block);
            v = (const char *)w->tile.v, v_row = width * (int64_t)sizeof(lane);
        }
        const value_product values = {.v = v,
                                      .v_row = v_row,
                                      .n = n,
                                      .head_dim_v = width,
                                      .probs = probs + f * HEAD_PITCH,
                                      .mode = tile->fresh ? ACC_ZERO : ACC_KEEP,
                                      .out = tile->ot};
        block_values(nv, 0, &values);
        tile->fresh = 0;
        const lane *attends = r->post ? w->tile.add : w->scores + f * HEAD_PITCH;
        for (int64_t i = 0; i < block.n_bad; i++)
            add_value(a, &kv, nv, j0 + block.bad[i], probs + f * HEAD_PITCH + block.bad[i] * BLOCK_Q,
                      hidden ? attends + block.bad[i] * BLOCK_Q : NULL, tile->ot);
    }
}

INLINE void talking_block(const fa_rowwise_args *r, int nv, modifiers *m, talking_scratch *w)
{
    const fa_attention_args *a = &r->attention;
    const int64_t heads = a->heads_q;
    for (int pass = 0; pass < 2; pass++) {
        int64_t first = a->len_k, last = 0;
        for (int64_t h = 0; h < heads; h++) {
            row_block *t = &w->heads[h].t;
            row_block_ranges(a, t, 0, a->len_k);
            if (a->ranges) row_block_open_lists(a, t);
            first = smaller(first, t->first), last = larger(last, t->last);
        }
        for (int64_t grid = first / BLOCK_K * BLOCK_K; grid < last; grid += BLOCK_K) {
            const int64_t block_end = smaller(grid + BLOCK_K, last);
            int64_t j0 = larger(grid, first), end = block_end;
            if (a->ranges) {
                j0 = block_end, end = grid;
                for (int64_t h = 0; h < heads; h++) {
                    row_block *t = &w->heads[h].t;
                    row_block_enter(t, grid, block_end);
                    j0 = smaller(j0, t->first), end = larger(end, t->last);
                }
            }
            if (j0 >= end) continue;
            if (grid && grid % ROWWISE_ASKS == 0 && given_up(a->watch)) return;
            const int hidden = talking_scores(r, nv, m, j0, end - j0, w, pass == 0);
            if (pass) talking_values(r, nv, hidden, j0, end - j0, w);
        }
        for (int64_t g = 0; pass == 0 && g < heads; g++)
            for (int64_t i = 0; i < BLOCK_Q; i++) {
                lane *sum = w->heads[g].row_sum + i;
                const int attends = w->heads[g].row_max[i] != -(lane)INFINITY;
                *sum = *sum != 0 ? 1 / *sum : attends ? NAN : 0; /* as in partial_finish */
            }
    }
}

static void talking_run(const fa_rowwise_args *r, const fa_rowwise_plan *p, int64_t task, void *scratch)
{
    const fa_attention_args *a = &r->attention;
    const int64_t heads = a->heads_q, blocks = p->n_tasks / a->batch, row0 = (blocks - 1 - task % blocks) * BLOCK_Q;
    modifiers m = modifiers_of(a, 0);
    talking_scratch w;
    talking_scratch_at(r, scratch, &w);
    for (int64_t g = 0; g < heads; g++)
        for (int64_t h = 0; h < heads; h++) {
            if (r->pre) w.pre[g * heads + h] = ((const lane *)r->pre)[h * heads + g];
            if (r->post) w.post[g * heads + h] = ((const lane *)r->post)[h * heads + g];
        }
    for (int64_t h = 0; h < heads; h++) {
        row_block *t = &w.heads[h].t;
        t->b = task / blocks, t->h_kv = h, t->group = 1, t->row0 = row0, t->several = 0;
        t->rows = smaller(BLOCK_Q, a->len_q - row0);
        tile_begin(a, &m, 0, 0, a->len_k, w.heads + h);
    }
    if (w.heads->t.rows <= LANES) talking_block(r, 1, &m, &w);
    else talking_block(r, NV, &m, &w);
    for (int64_t i = 0; i < BLOCK_Q; i++) { /* normalised already; NaN where all that is attended is -inf */
        lane one = 1;
        for (int64_t g = 0; r->post && g < heads; g++) one += 0 * w.heads[g].row_sum[i];
        for (int64_t h = 0; h < heads; h++) w.heads[h].row_sum[i] = one + 0 * w.heads[h].row_sum[i];
    }
    for (int64_t h = 0; h < heads; h++) {
        tile_state *tile = w.heads + h;
        tile_end_part(a, &w.tile, tile);
        partial_finish(a, &tile->t, &tile->total);
    }
}
