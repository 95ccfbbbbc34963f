/* One task of the tile kernel: a block of query rows against the keys of their ranges, queries on the lanes.
 *
 *     Q^T = transpose(factor * Q)                      rows of one KV head: (query, head in group) pairs
 *     for each block of keys that some row attends:
 *         S^T = K Q^T                                  K read in place, one scalar broadcast at a time
 *         S^T = modifiers and masks of S^T             scores.inc.h; nothing where the block is full
 *         P^T, m, l, alpha = online softmax of S^T     softmax.inc.h
 *         O^T = alpha O^T + V^T P^T                    V read in place
 *     O = transpose(O^T) / l
 *
 * FlashAttention-2 (Dao 2023) turned on its side: lanes are queries, so softmax needs no horizontal reduction. */

/* A thread's scratch. qt, s, add, ot, pairs have the row pitch BLOCK_Q. */
typedef struct {
    lane *qt, *s, *add, *ot;  /* (head_dim), (BLOCK_K), (BLOCK_K), (head_dim_v) rows */
    lane *pairs;              /* (BLOCK_K / 2): probabilities as pairs of bfloat16 */
    lane *rows;               /* (BLOCK_Q, BLOCK_K): rows of the additive tile, to be transposed */
    lane *k, *v;              /* (BLOCK_K, head_dim), (BLOCK_K, head_dim_v): converted keys and values */
    lane *row_max, *row_sum, *alpha, *slope, *position, *begin, *end; /* (BLOCK_Q) */
    int64_t *range;           /* (2, BLOCK_Q) */
} tile_scratch;

/* Cuts up `memory`; returns the bytes it takes, also for memory == NULL. */
static int64_t tile_scratch_at(const fa_attention_args *a, void *memory, tile_scratch *w)
{
    lane *next = memory;
    int64_t used = 0;
#define TAKE(field, n) (w->field = memory ? next + used : NULL, used += round_up(n, 64 / sizeof(lane)))
    TAKE(qt, a->head_dim * BLOCK_Q);
    TAKE(s, BLOCK_K * BLOCK_Q);
    TAKE(add, BLOCK_K * BLOCK_Q);
    TAKE(ot, a->head_dim_v * BLOCK_Q);
    TAKE(pairs, BLOCK_K / 2 * BLOCK_Q);
    TAKE(rows, BLOCK_Q * BLOCK_K);
    TAKE(k, BLOCK_K * round_up(a->head_dim, LANES));
    TAKE(v, BLOCK_K * round_up(a->head_dim_v, LANES));
    TAKE(row_max, BLOCK_Q);
    TAKE(row_sum, BLOCK_Q);
    TAKE(alpha, BLOCK_Q);
    TAKE(slope, BLOCK_Q);
    TAKE(position, BLOCK_Q);
    TAKE(begin, BLOCK_Q);
    TAKE(end, BLOCK_Q);
#undef TAKE
    w->range = memory ? (int64_t *)(next + used) : NULL;
    return used * (int64_t)sizeof(lane) + 2 * BLOCK_Q * (int64_t)sizeof(int64_t);
}

/* One vector of a query row, from lane d on, of which n lanes are left; under `dot` lanes are pairs of bfloat16. */
INLINE v_t load_query(fa_dtype dtype, int dot, const char *q, int64_t d, int64_t n, int64_t head_dim)
{
    if (dot && n <= LANES) {
        lane part[LANES] = {0};
        memcpy(part, q + d * sizeof(lane), head_dim * 2 - d * sizeof(lane)); /* an odd last one is paired with 0 */
        return v_load(part);
    }
    if (dot) return v_load(q + d * sizeof(lane));
    return n < LANES ? v_load_as_n(dtype, q + d * dtype_size(dtype), n) : v_load_as(dtype, q + d * dtype_size(dtype));
}

/* qt (head_dim, rows) = transpose(factor * q); under `dot` pairs, unscaled. Lanes without a row become 0. */
INLINE void load_queries_as(fa_dtype dtype, const fa_attention_args *a, const row_block *t, int dot, lane factor,
                            const tile_scratch *w)
{
    const int64_t depth = dot ? (a->head_dim + 1) / 2 : a->head_dim;
    const char *rows[BLOCK_Q] = {NULL};
    EACH_ROW(t, r, id) rows[r] = at(&a->q, t->b, id.head, id.query, 0);
    for (int64_t r = 0; r < BLOCK_Q; r += LANES)
        for (int64_t d = 0; d < depth; d += LANES) {
            const int64_t n = depth - d;
            v_t x[LANES];
            for (int i = 0; i < LANES; i++) {
                const v_t q = rows[r + i] ? load_query(dtype, dot, rows[r + i], d, n, a->head_dim) : v_splat(0);
                x[i] = dot ? q : q * v_splat(factor);
            }
            v_transpose(x);
            for (int i = 0; i < (n < LANES ? n : LANES); i++) v_store(w->qt + (d + i) * BLOCK_Q + r, x[i]);
        }
}

static void load_queries(const fa_attention_args *a, const row_block *t, int dot, lane factor, const tile_scratch *w)
{
    if (dot) load_queries_as(FA_BF16, a, t, 1, factor, w);
    else if (a->q.dtype == FA_F16) load_queries_as(FA_F16, a, t, 0, factor, w);
    else if (a->q.dtype == FA_BF16) load_queries_as(FA_BF16, a, t, 0, factor, w);
    else load_queries_as(LANE_BITS == 64 ? FA_F64 : FA_F32, a, t, 0, factor, w);
}

/* The additive tile, add (n keys, rows): one row for all where mask and bias do not depend on the query. Returns
 * whether some key is hidden from some row. */
static int load_additive(const fa_attention_args *a, const row_block *t, int64_t j0, int64_t n, const tile_scratch *w)
{
    if (rows_share(t, &a->mask) && rows_share(t, &a->bias)) {
        const int hides = additive_row(a, t, first_row(t), j0, n, w->rows);
        for (int64_t j = 0; j < n; j++)
            for (int u = 0; u < NV; u++) v_store(w->add + j * BLOCK_Q + u * LANES, v_splat(w->rows[j]));
        return hides;
    }
    int hides = 0;
    EACH_ROW(t, r, id) hides |= additive_row(a, t, id, j0, n, w->rows + r * BLOCK_K);
    transpose(w->rows, BLOCK_K, t->rows, n, w->add, BLOCK_Q);
    for (int64_t r = round_up(t->rows, LANES); r < BLOCK_Q; r += LANES)
        for (int64_t j = 0; j < n; j++) v_store(w->add + j * BLOCK_Q + r, v_splat(0));
    return hides;
}

/* Modifiers and masks of s (n keys, nv vectors of queries); j0 is the first key. */
INLINE void modify_tile(int nv, const modifiers *m, int edge, const row_block *t, int64_t j0, int64_t n, int64_t position,
                        const tile_scratch *w)
{
    for (int64_t r = 0; r < BLOCK_Q; r++) { /* relative to j0, where they are small and exact */
        const int64_t row = r < t->rows ? r : t->rows - 1;
        w->begin[r] = (lane)(t->begin[row] - j0);
        w->end[r] = (lane)(t->end[row] - j0);
        if (m->alibi) w->position[r] = (lane)(position + (t->row0 + row) / t->group - j0);
    }
    for (int64_t j = 0; j < n; j++) {
        const v_t key = v_splat((lane)j);
        UNROLL for (int u = 0; u < nv; u++)
        {
            const int64_t lanes = u * LANES, at = j * BLOCK_Q + lanes;
            const vi_t inside = (v_load(w->begin + lanes) <= key) & (key < v_load(w->end + lanes));
            const v_t slope = m->alibi ? v_load(w->slope + lanes) : key;
            const v_t distance = m->alibi ? v_abs(v_load(w->position + lanes) - key) : key;
            const v_t add = m->additive ? v_load(w->add + at) : key;
            v_store(w->s + at, v_modify(m, edge, v_load(w->s + at), add, slope, distance, inside));
        }
    }
}

/* Values of a block, ready for block_pv. */
typedef struct {
    const char *data;
    int64_t row;
    int64_t bad[BLOCK_K], n_bad; /* rows that are not finite, zeroed here: see add_bad_values */
} value_block;

/* A probability of 0 does not shield a NaN or Inf in V, so where some lanes do not attend (`edge`), rows that are not
 * finite are taken out, and added afterwards to the lanes that do attend them. */
INLINE void load_values(const fa_attention_args *a, int dot, int edge, const char *v, int64_t n, const tile_scratch *w,
                        value_block *values)
{
    const fa_dtype dtype = a->v.dtype;
    const int64_t size = dtype_size(dtype), width = a->head_dim_v;
    values->n_bad = 0;
    if (edge)
        for (int64_t j = 0; j < n; j++) {
            const char *row = v + j * a->v.row;
            const int finite = dtype == FA_BF16  ? row_finite(FA_BF16, row, width)
                               : dtype == FA_F16 ? row_finite(FA_F16, row, width)
                                                 : row_finite(LANE_BITS == 64 ? FA_F64 : FA_F32, row, width);
            if (!finite) values->bad[values->n_bad++] = j;
        }
    if (size == sizeof(lane) && !values->n_bad) {
        values->data = v;
        values->row = a->v.row;
        return;
    }
    values->data = (const char *)w->v;
    values->row = width * (int64_t)sizeof(lane);
    int64_t bad = 0;
#if V_BF16_DOT
    if (dot) { /* rows 2j and 2j + 1 become one row of pairs */
        static const uint16_t zeros[LANES];
        for (int64_t j = 0; j < n; j += 2) {
            const int bad0 = bad < values->n_bad && values->bad[bad] == j;
            bad += bad0;
            const int bad1 = bad < values->n_bad && values->bad[bad] == j + 1;
            bad += bad1;
            const char *row0 = bad0 ? NULL : v + j * a->v.row, *row1 = bad1 || j + 1 == n ? NULL : v + (j + 1) * a->v.row;
            lane *out = w->v + j / 2 * width;
            int64_t d = 0;
            for (; d + LANES <= width; d += LANES)
                v_store(out + d, v_pair_bf16(row0 ? row0 + d * 2 : (const char *)zeros,
                                             row1 ? row1 + d * 2 : (const char *)zeros));
            if (d < width) {
                uint16_t part[2][LANES] = {{0}};
                if (row0) memcpy(part[0], row0 + d * 2, (width - d) * 2);
                if (row1) memcpy(part[1], row1 + d * 2, (width - d) * 2);
                v_store_n(out + d, v_pair_bf16(part[0], part[1]), width - d);
            }
        }
        return;
    }
#endif
    (void)dot;
    for (int64_t j = 0; j < n; j++) {
        if (bad < values->n_bad && values->bad[bad] == j) {
            bad++;
            memset(w->v + j * width, 0, width * sizeof(lane));
        } else
            load_row(dtype, v + j * a->v.row, width, 1, w->v + j * width);
    }
}

/* ot += p v for rows of V that are not finite, in the lanes that attend them: `attends` (bad, rows) holds masks. */
INLINE void add_bad_values(const fa_attention_args *a, int nv, const char *v, const value_block *values,
                           const lane *attends, const tile_scratch *w)
{
    for (int64_t i = 0; i < values->n_bad; i++)
        for (int64_t d = 0; d < a->head_dim_v; d++) {
            const v_t value = v_splat(load_element(a->v.dtype, v + values->bad[i] * a->v.row + d * a->v.col));
            for (int u = 0; u < nv; u++) {
                lane *out = w->ot + d * BLOCK_Q + u * LANES;
                const v_t p = v_load(w->s + values->bad[i] * BLOCK_Q + u * LANES);
                const vi_t mask = (vi_t)v_load(attends + i * BLOCK_Q + u * LANES);
                v_store(out, v_select(mask, v_fma(p, value, v_load(out)), v_load(out)));
            }
        }
}

/* The keys of a block, ready for block_qk. */
INLINE const char *load_keys(const fa_attention_args *a, int dot, const char *k, int64_t n, const tile_scratch *w,
                             int64_t *k_row)
{
    const int64_t size = dtype_size(a->k.dtype), width = a->head_dim;
    *k_row = a->k.row;
    if (size == sizeof(lane) || (dot && width % 2 == 0)) return k;
    if (dot) { /* an odd head_dim: the last pair must not be read past */
        *k_row = (width + 1) * 2;
        for (int64_t j = 0; j < n; j++) {
            char *row = (char *)w->k + j * *k_row;
            memset(row + width * 2, 0, 2);
            memcpy(row, k + j * a->k.row, width * 2);
        }
    } else {
        *k_row = width * (int64_t)sizeof(lane);
        for (int64_t j = 0; j < n; j++) load_row(a->k.dtype, k + j * a->k.row, width, 1, w->k + j * width);
    }
    return (const char *)w->k;
}

/* One block: keys [j0, j0 + n). `fresh`: the accumulators hold nothing yet. */
INLINE void tile_block(const fa_attention_args *a, const modifiers *m, int nv, int dot, const row_block *t, int64_t j0,
                       int64_t n, int fresh, const tile_scratch *w)
{
    const char *k = at(&a->k, t->b, t->h_kv, j0, 0), *v = at(&a->v, t->b, t->h_kv, j0, 0);
    const int out_of_range = t->full_first > j0 || t->full_last < j0 + n;
    int hides = 0;
    int64_t k_row, position = 0;
    value_block values;

    const char *keys = load_keys(a, dot, k, n, w, &k_row);
    block_qk(nv, dot, keys, k_row, n, w->qt, dot ? (a->head_dim + 1) / 2 : a->head_dim, m->factor, w->s);

    if (m->additive) hides = load_additive(a, t, j0, n, w);
    if (m->alibi) position = load_int(at(&a->q_position, t->b, 0, 0, 0));
    if (out_of_range || m->additive || m->alibi || m->softcap != 0)
        modify_tile(nv, m, out_of_range, t, j0, n, position, w);

    load_values(a, dot, out_of_range || hides, v, n, w, &values);
    for (int64_t i = 0; i < values.n_bad; i++) /* before the scores become probabilities; the additive tile is free */
        for (int u = 0; u < nv; u++) {
            const v_t score = v_load(w->s + values.bad[i] * BLOCK_Q + u * LANES);
            v_store(w->add + i * BLOCK_Q + u * LANES, (v_t)(score != v_splat(-INFINITY)));
        }

    const int moved = softmax_update(nv, w->s, n, w->row_max, w->row_sum, w->alpha);
    const acc_mode mode = fresh ? ACC_ZERO : moved ? ACC_SCALE : ACC_KEEP;
    const lane *probs = w->s;
#if V_BF16_DOT
    if (dot) {
        for (int64_t j = 0; j < n; j += 2)
            UNROLL for (int u = 0; u < nv; u++)
            {
                const v_t p0 = v_load(w->s + j * BLOCK_Q + u * LANES);
                const v_t p1 = j + 1 < n ? v_load(w->s + (j + 1) * BLOCK_Q + u * LANES) : v_splat(0);
                v_store(w->pairs + j / 2 * BLOCK_Q + u * LANES, v_pack_bf16(p0, p1));
            }
        probs = w->pairs;
    }
#endif
    block_pv(nv, dot, values.data, values.row, probs, dot ? (n + 1) / 2 : n, mode, w->alpha, w->ot, a->head_dim_v);
    if (values.n_bad) add_bad_values(a, nv, v, &values, w->add, w);
}

/* The state of rows t over keys [key_begin, key_end), as a partial. */
INLINE void tile_attend_as(const fa_attention_args *a, int nv, int dot, row_block *t, int64_t key_begin, int64_t key_end,
                           const tile_scratch *w, const partial *p)
{
    modifiers m = modifiers_of(a);
    int fresh = 1;
    row_block_ranges(a, t, key_begin, key_end);
    load_queries(a, t, dot, m.factor, w);
    for (int64_t r = 0; r < BLOCK_Q; r++) {
        w->row_max[r] = -INFINITY;
        w->row_sum[r] = w->slope[r] = 0;
    }
    if (m.alibi) {
        EACH_ROW(t, r, id) w->slope[r] = *(const lane_u *)at(&a->alibi_slopes, t->b, id.head, 0, 0);
    }
    for (int64_t block = t->first / BLOCK_K * BLOCK_K; block < t->last; block += BLOCK_K) {
        const int64_t j0 = block > t->first ? block : t->first;
        const int64_t j1 = block + BLOCK_K < t->last ? block + BLOCK_K : t->last;
        const block_kind kind = mask_kind(a, t, j0, j1 - j0);
        if (kind == BLOCK_EMPTY) continue;
        m.additive = a->bias.data || kind == BLOCK_EDGE;
        tile_block(a, &m, nv, dot, t, j0, j1 - j0, fresh, w);
        fresh = 0;
    }
    if (fresh) memset(w->ot, 0, a->head_dim_v * BLOCK_Q * sizeof(lane));
    transpose(w->ot, BLOCK_Q, a->head_dim_v, t->rows, p->acc, p->acc_row);
    memcpy(p->row_max, w->row_max, t->rows * sizeof(lane));
    memcpy(p->row_sum, w->row_sum, t->rows * sizeof(lane));
}

static void tile_attend(const fa_attention_args *a, const fa_plan *plan, row_block *t, int64_t key_begin, int64_t key_end,
                        const tile_scratch *w, const partial *p)
{
    const int one = t->rows <= LANES;
#if V_BF16_DOT
    if (plan->bf16_dot) {
        if (one) tile_attend_as(a, 1, 1, t, key_begin, key_end, w, p);
        else tile_attend_as(a, NV, 1, t, key_begin, key_end, w, p);
        return;
    }
#endif
    (void)plan;
    if (one) tile_attend_as(a, 1, 0, t, key_begin, key_end, w, p);
    else tile_attend_as(a, NV, 0, t, key_begin, key_end, w, p);
}
