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
 * strides of (batch, length, heads, head_dim) arrays fall on the same cache sets (docs/performance.md). */

#define TILES 8 /* most tiles of a task */

/* Keys after which a tile's state becomes a partial, to be merged, at multiples of it, into that of the keys before: one
 * accumulator adds up so many blocks and no more. 64 keys a block, 64 blocks: the fewest additions in a row. */
#define PART_K (64 * BLOCK_K)

/* One tile: its rows and their state. */
typedef struct {
    row_block t;
    lane *qt, *ot;                   /* (head_dim), (head_dim_v) rows of pitch BLOCK_Q */
    lane *row_max, *row_sum, *slope; /* (BLOCK_Q) */
    int fresh;                       /* no block yet: ot holds nothing */
    partial total;                   /* of the parts that are done */
    int64_t parts;                   /* how many: PART_K */
} tile_state;

/* A thread's scratch. s, add, pairs have the row pitch BLOCK_Q. */
typedef struct {
    tile_state tiles[TILES];
    lane *s, *add;                         /* (BLOCK_K) rows: scores, then probabilities; additive tile */
    lane *pairs;                           /* (BLOCK_K / 2): probabilities as pairs of bfloat16 */
    lane *rows;                            /* (BLOCK_Q, BLOCK_K): rows of the additive tile, to be transposed */
    lane *k, *v, *clean;                   /* (BLOCK_K, head_dim), two (BLOCK_K, head_dim_v): copied keys and values */
    lane *alpha, *position, *begin, *end;  /* (BLOCK_Q) */
    partial part;                          /* where `total` must not yet be written */
} tile_scratch;

/* Cuts up `memory` for so many tiles; returns the bytes it takes, also for memory == NULL. */
static int64_t tile_scratch_at(const fa_attention_args *a, int tiles, void *memory, tile_scratch *w)
{
    lane *next = memory;
    int64_t used = 0;
#define TAKE(field, n) ((field) = memory ? (void *)(next + used) : NULL, used += round_up(n, 64 / sizeof(lane)))
    TAKE(w->s, BLOCK_K * BLOCK_Q);
    TAKE(w->add, BLOCK_K * BLOCK_Q);
    TAKE(w->pairs, BLOCK_K / 2 * BLOCK_Q);
    TAKE(w->rows, BLOCK_Q * BLOCK_K);
    TAKE(w->k, BLOCK_K * round_up(a->head_dim, LANES));
    TAKE(w->v, BLOCK_K * round_up(a->head_dim_v, LANES));
    TAKE(w->clean, BLOCK_K * round_up(a->head_dim_v, LANES));
    TAKE(w->alpha, BLOCK_Q);
    TAKE(w->position, BLOCK_Q);
    TAKE(w->begin, BLOCK_Q);
    TAKE(w->end, BLOCK_Q);
    for (int i = 0; i < tiles; i++) {
        tile_state *tile = w->tiles + i;
        TAKE(tile->qt, a->head_dim * BLOCK_Q);
        TAKE(tile->ot, a->head_dim_v * BLOCK_Q);
        TAKE(tile->row_max, BLOCK_Q);
        TAKE(tile->row_sum, BLOCK_Q);
        TAKE(tile->slope, BLOCK_Q);
        TAKE(tile->t.begin, BLOCK_Q * sizeof(int64_t) / sizeof(lane));
        TAKE(tile->t.end, BLOCK_Q * sizeof(int64_t) / sizeof(lane));
    }
#undef TAKE
    return used * (int64_t)sizeof(lane);
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
                            lane *qt)
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
            for (int i = 0; i < (n < LANES ? n : LANES); i++) v_store(qt + (d + i) * BLOCK_Q + r, x[i]);
        }
}

static void load_queries(const fa_attention_args *a, const row_block *t, int dot, lane factor, lane *qt)
{
    if (dot) load_queries_as(FA_BF16, a, t, 1, factor, qt);
    else if (a->q.dtype == FA_F16) load_queries_as(FA_F16, a, t, 0, factor, qt);
    else if (a->q.dtype == FA_BF16) load_queries_as(FA_BF16, a, t, 0, factor, qt);
    else load_queries_as(LANE_BITS == 64 ? FA_F64 : FA_F32, a, t, 0, factor, qt);
}

/* The additive tile, add (n keys, rows): one row for all where mask and bias do not depend on the query. An empty one is
 * not written. */
static block_kind load_additive(const fa_attention_args *a, const row_block *t, int64_t j0, int64_t n,
                                const tile_scratch *w)
{
    const int shared = rows_share(t, &a->mask) && rows_share(t, &a->bias);
    const block_kind kind =
        shared ? additive_row(a, t, first_row(t), j0, n, w->rows) : additive_rows(a, t, j0, n, w->rows);
    if (kind == BLOCK_EMPTY) return kind;
    if (shared)
        for (int64_t j = 0; j < n; j++)
            for (int u = 0; u < NV; u++) v_store(w->add + j * BLOCK_Q + u * LANES, v_splat(w->rows[j]));
    else {
        transpose(w->rows, BLOCK_K, t->rows, n, w->add, BLOCK_Q);
        for (int64_t r = round_up(t->rows, LANES); r < BLOCK_Q; r += LANES)
            for (int64_t j = 0; j < n; j++) v_store(w->add + j * BLOCK_Q + r, v_splat(0));
    }
    return kind;
}

/* Modifiers and masks of s (n keys, nv vectors of queries); j0 is the first key. */
INLINE void modify_tile(int nv, const modifiers *m, int edge, const tile_state *tile, int64_t j0, int64_t n,
                        int64_t position, const tile_scratch *w)
{
    const row_block *t = &tile->t;
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
            const v_t slope = m->alibi ? v_load(tile->slope + lanes) : key;
            const v_t distance = m->alibi ? v_abs(v_load(w->position + lanes) - key) : key;
            const v_t add = m->additive ? v_load(w->add + at) : key;
            v_store(w->s + at, v_modify(m, edge, v_load(w->s + at), add, slope, distance, inside));
        }
    }
}

/* Turns the additive tile, free by now, into masks: which lanes attend which of n keys. Not to be had from the scores:
 * one of -inf may have been computed. */
INLINE void note_attending(int nv, const modifiers *m, int64_t n, const tile_scratch *w)
{
    for (int64_t j = 0; j < n; j++)
        for (int u = 0; u < nv; u++) {
            const v_t key = v_splat((lane)j), add = v_load(w->add + j * BLOCK_Q + u * LANES);
            const vi_t inside = (v_load(w->begin + u * LANES) <= key) & (key < v_load(w->end + u * LANES));
            const vi_t hidden = m->additive ? add == v_splat(-INFINITY) : inside ^ inside;
            v_store(w->add + j * BLOCK_Q + u * LANES, (v_t)(inside & ~hidden));
        }
}

/* Raises to -LANE_MAX the maxima of rows that attend some of n keys, and have met no score but -inf; `bad`: the masks
 * are noted. */
INLINE void note_rows(int nv, const modifiers *m, int hides, int bad, int64_t n, const tile_scratch *w, lane *row_max)
{
    vi_t some = {0};
    for (int u = 0; u < nv; u++) some |= v_load(row_max + u * LANES) == v_splat(-INFINITY);
    if (!v_any(some)) return;
    if (hides && !bad) note_attending(nv, m, n, w);
    for (int u = 0; u < nv; u++) {
        lane *max = row_max + u * LANES;
        vi_t attends = {0};
        for (int64_t j = 0; hides && j < n; j++) attends |= (vi_t)v_load(w->add + j * BLOCK_Q + u * LANES);
        for (int i = 0; i < LANES; i++)
            if (max[i] == -(lane)INFINITY && (!hides || attends[i])) max[i] = -LANE_MAX;
    }
}

/* A block of keys and values, [first, first + n) of the sequence, as the tiles read it. */
typedef struct {
    int64_t first, n;
    const char *k, *v; /* row `first`; NULL until a tile asks */
    int64_t k_row, v_row;
    int checked;                 /* the values were looked at: */
    int64_t bad[BLOCK_K], n_bad; /* rows of v that are not finite, and are 0 in w->clean: see take_out_bad_values */
} key_block;

INLINE int is_dense(const fa_array *x, int64_t width)
{
    return x->row == width * dtype_size(x->dtype);
}

/* Keys and values in place, or copied to scratch. */
INLINE void load_block(const fa_attention_args *a, const row_block *t, int dot, const tile_scratch *w, key_block *block)
{
    const char *k = at(&a->k, t->b, t->h_kv, block->first, 0), *v = at(&a->v, t->b, t->h_kv, block->first, 0);
    const int64_t n = block->n, wide = sizeof(lane), width = a->head_dim, width_v = a->head_dim_v;
    block->k = k, block->k_row = a->k.row;
    block->v = v, block->v_row = a->v.row;
    if (dot && (width % 2 || !is_dense(&a->k, width))) { /* an odd head_dim: the last pair must not be read past */
        block->k = (const char *)w->k, block->k_row = round_up(width, 2) * 2;
        for (int64_t j = 0; j < n; j++) {
            char *row = (char *)w->k + j * block->k_row;
            memset(row + block->k_row - 2, 0, 2);
            memcpy(row, k + j * a->k.row, width * 2);
        }
    } else if (!dot && (dtype_size(a->k.dtype) != wide || !is_dense(&a->k, width))) {
        block->k = (const char *)w->k, block->k_row = width * wide;
        for (int64_t j = 0; j < n; j++) load_row(a->k.dtype, k + j * a->k.row, width, 1, w->k + j * width);
    }
    if (dot) { /* rows 2j and 2j + 1 become one row of pairs; an odd last one is paired with 0 */
        static const uint16_t zeros[LANES];
        block->v = (const char *)w->v, block->v_row = width_v * wide;
        for (int64_t j = 0; j < n; j += 2) {
            const char *row0 = v + j * a->v.row, *row1 = row0 + a->v.row;
            lane *out = w->v + j / 2 * width_v;
            int64_t d = 0;
            for (; d + LANES <= width_v; d += LANES)
                v_store(out + d, v_pair_bf16(row0 + d * 2, j + 1 < n ? row1 + d * 2 : (const char *)zeros));
            if (d < width_v) {
                uint16_t part[2][LANES] = {{0}};
                memcpy(part[0], row0 + d * 2, (width_v - d) * 2);
                if (j + 1 < n) memcpy(part[1], row1 + d * 2, (width_v - d) * 2);
                v_store_n(out + d, v_pair_bf16(part[0], part[1]), width_v - d);
            }
        }
    } else if (dtype_size(a->v.dtype) != wide || !is_dense(&a->v, width_v)) {
        block->v = (const char *)w->v, block->v_row = width_v * wide;
        for (int64_t j = 0; j < n; j++) load_row(a->v.dtype, v + j * a->v.row, width_v, 1, w->v + j * width_v);
    }
}

/* Part `i` of `parts` of the keys and values from `first` on, where their rows do not lie side by side: there the
 * hardware's prefetching finds nothing to follow. */
INLINE void prefetch_block(const fa_attention_args *a, const row_block *t, int64_t first, int64_t last, int i, int parts)
{
    const int64_t j0 = first + i * BLOCK_K / parts, j1 = first + (i + 1) * BLOCK_K / parts, n = (j1 < last ? j1 : last) - j0;
    if (n <= 0) return;
    if (!is_dense(&a->k, a->head_dim))
        prefetch_rows(at(&a->k, t->b, t->h_kv, j0, 0), a->k.row, n, a->head_dim * dtype_size(a->k.dtype));
    if (!is_dense(&a->v, a->head_dim_v))
        prefetch_rows(at(&a->v, t->b, t->h_kv, j0, 0), a->v.row, n, a->head_dim_v * dtype_size(a->v.dtype));
}

/* A probability of 0 does not shield a NaN or Inf in V. So a tile in which some row does not attend some key takes the
 * values without the rows that are not finite, and adds those afterwards where they are attended: add_bad_values. */
INLINE void take_out_bad_values(const fa_attention_args *a, const row_block *t, int dot, const tile_scratch *w,
                                key_block *block)
{
    const char *v = at(&a->v, t->b, t->h_kv, block->first, 0);
    const int64_t width = a->head_dim_v;
    if (block->checked) return;
    block->checked = 1;
    for (int64_t j = 0; j < block->n; j++) {
        const char *row = v + j * a->v.row;
        const int finite = a->v.dtype == FA_BF16  ? row_finite(FA_BF16, row, width)
                           : a->v.dtype == FA_F16 ? row_finite(FA_F16, row, width)
                                                  : row_finite(LANE_BITS == 64 ? FA_F64 : FA_F32, row, width);
        if (!finite) block->bad[block->n_bad++] = j;
    }
    if (!block->n_bad) return;
    for (int64_t j = 0; j < (dot ? (block->n + 1) / 2 : block->n); j++)
        memcpy(w->clean + j * width, block->v + j * block->v_row, width * sizeof(lane));
    for (int64_t i = 0; i < block->n_bad; i++) {
        const int64_t j = block->bad[i];
        if (!dot) memset(w->clean + j * width, 0, width * sizeof(lane));
        else /* one half of every pair */
            for (int64_t d = 0; d < width; d++) memset((char *)(w->clean + j / 2 * width + d) + j % 2 * 2, 0, 2);
    }
}

/* ot += p v for the rows of V that were taken out, in the lanes that attend them: masks in w->add, in order. `skip`
 * rows of the block come before the tile's first key. */
INLINE void add_bad_values(const fa_attention_args *a, int nv, const tile_state *tile, int64_t skip, int64_t n,
                           const tile_scratch *w, const key_block *block)
{
    for (int64_t i = 0; i < block->n_bad; i++) {
        const int64_t j = block->bad[i] - skip;
        if (j < 0 || j >= n) continue;
        for (int64_t d = 0; d < a->head_dim_v; d++) {
            const char *element = at(&a->v, tile->t.b, tile->t.h_kv, block->first + block->bad[i], d);
            const v_t value = v_splat(load_element(a->v.dtype, element));
            for (int u = 0; u < nv; u++) {
                lane *out = tile->ot + d * BLOCK_Q + u * LANES;
                const v_t p = v_load(w->s + j * BLOCK_Q + u * LANES);
                const vi_t attends = (vi_t)v_load(w->add + j * BLOCK_Q + u * LANES);
                v_store(out, v_select(attends, v_fma(p, value, v_load(out)), v_load(out)));
            }
        }
    }
}

/* One tile against keys [skip, skip + n) of the block. */
INLINE void tile_block(const fa_attention_args *a, const modifiers *m, int nv, int dot, tile_state *tile, int64_t skip,
                       int64_t n, const tile_scratch *w, key_block *block)
{
    row_block *t = &tile->t;
    const int64_t j0 = block->first + skip, depth = dot ? (a->head_dim + 1) / 2 : a->head_dim;
    const int out_of_range = t->full_first > j0 || t->full_last < j0 + n;
    const block_kind kind = m->additive ? load_additive(a, t, j0, n, w) : BLOCK_FULL;
    const int hides = out_of_range || kind == BLOCK_EDGE;

    if (kind == BLOCK_EMPTY) return;
    if (!block->k) load_block(a, t, dot, w, block);
    block_qk(nv, dot, block->k + skip * block->k_row, block->k_row, n, tile->qt, depth, m->q_factor, w->s);

    if (out_of_range || m->additive || m->alibi || m->softcap != 0 || m->s_factor != 1) {
        const int64_t position = m->alibi ? load_int(at(&a->q_position, t->b, 0, 0, 0)) : 0;
        modify_tile(nv, m, out_of_range, tile, j0, n, position, w);
    }
    if (hides) take_out_bad_values(a, t, dot, w, block);
    const int bad = hides && block->n_bad;
    if (bad) note_attending(nv, m, n, w);

    const int moved = softmax_update(nv, w->s, n, tile->row_max, tile->row_sum, w->alpha);
    note_rows(nv, m, hides, bad, n, w, tile->row_max);
    const acc_mode mode = tile->fresh ? ACC_ZERO : moved ? ACC_SCALE : ACC_KEEP;
    const lane *probs = w->s;
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
    const char *v = bad ? (const char *)w->clean : block->v;
    const int64_t v_row = bad ? a->head_dim_v * (int64_t)sizeof(lane) : block->v_row;
    block_pv(nv, dot, v + (dot ? skip / 2 : skip) * v_row, v_row, probs, dot ? (n + 1) / 2 : n, mode, w->alpha,
             tile->ot, a->head_dim_v);
    if (bad) add_bad_values(a, nv, tile, skip, n, w, block);
    tile->fresh = 0;
}

/* The empty state of a tile. */
INLINE void tile_reset(tile_state *tile)
{
    for (int64_t r = 0; r < BLOCK_Q; r++) {
        tile->row_max[r] = -INFINITY;
        tile->row_sum[r] = 0;
    }
    tile->fresh = 1;
}

/* Ends a part, if the tile has met keys since the last one, or none at all. */
static void tile_end_part(const fa_attention_args *a, const tile_scratch *w, tile_state *tile)
{
    const partial *p = tile->parts ? &w->part : &tile->total;
    const int64_t rows = tile->t.rows;
    if (tile->fresh && tile->parts) return;
    if (tile->fresh) memset(p->acc, 0, rows * p->acc_row * sizeof(lane));
    else transpose(tile->ot, BLOCK_Q, a->head_dim_v, rows, p->acc, p->acc_row);
    memcpy(p->row_max, tile->row_max, rows * sizeof(lane));
    memcpy(p->row_sum, tile->row_sum, rows * sizeof(lane));
    if (tile->parts == 1) partial_begin_merging(&tile->total);
    if (tile->parts) partial_merge(&tile->total, p, rows);
    tile->parts++;
    tile_reset(tile);
}

/* All keys were met: leaves the tile's state in `total`. */
static void tile_end(const fa_attention_args *a, const tile_scratch *w, tile_state *tile)
{
    tile_end_part(a, w, tile);
    if (tile->parts > 1) partial_end_merging(&tile->total, tile->t.rows);
}

/* Ranges, queries and the empty state of a tile. */
INLINE void tile_begin(const fa_attention_args *a, const modifiers *m, int dot, int64_t key_begin, int64_t key_end,
                       tile_state *tile)
{
    row_block *t = &tile->t;
    row_block_ranges(a, t, key_begin, key_end);
    if (dot) { /* pairs of keys begin and, but for the last key of all, end at even places; the one too many is masked */
        t->first -= t->first % 2;
        t->last += t->last % 2 && t->last < key_end;
    }
    load_queries(a, t, dot, m->q_factor, tile->qt);
    for (int64_t r = 0; r < BLOCK_Q; r++) tile->slope[r] = 0;
    if (m->alibi) {
        EACH_ROW(t, r, id) tile->slope[r] = *(const lane_u *)at(&a->alibi_slopes, t->b, id.head, 0, 0);
    }
    tile->parts = 0;
    tile_reset(tile);
}

/* The states of the tiles of `rows` over keys [key_begin, key_end), left in w->tiles: for tile_end. */
INLINE void tile_attend_as(const fa_attention_args *a, int dot, const row_block *rows, int64_t key_begin,
                           int64_t key_end, tile_scratch *w)
{
    modifiers m = modifiers_of(a, dot);
    const int tiles = (int)((rows->rows + BLOCK_Q - 1) / BLOCK_Q);
    int64_t first = key_end, last = key_begin;
    for (int i = 0; i < tiles; i++) {
        row_block *t = &w->tiles[i].t;
        int64_t *begin = t->begin, *end = t->end;
        *t = *rows;
        t->begin = begin, t->end = end;
        t->row0 += i * BLOCK_Q;
        t->rows = rows->rows - i * BLOCK_Q < BLOCK_Q ? rows->rows - i * BLOCK_Q : BLOCK_Q;
        tile_begin(a, &m, dot, key_begin, key_end, w->tiles + i);
        first = t->first < first ? t->first : first;
        last = t->last > last ? t->last : last;
    }
    for (int64_t grid = first / BLOCK_K * BLOCK_K; grid < last; grid += BLOCK_K) {
        key_block block = {.first = grid > first ? grid : first};
        if (grid % PART_K == 0)
            for (int i = 0; i < tiles; i++)
                if (!w->tiles[i].fresh) tile_end_part(a, w, w->tiles + i);
        const int64_t block_end = grid + BLOCK_K < last ? grid + BLOCK_K : last;
        block.n = block_end - block.first;
        for (int i = 0; i < tiles; i++) {
            tile_state *tile = w->tiles + i;
            int64_t j0 = tile->t.first > block.first ? tile->t.first : block.first;
            int64_t n = (tile->t.last < block_end ? tile->t.last : block_end) - j0;
            if (n <= 0) continue;
            const block_kind kind = mask_kind(a, &tile->t, dot ? 2 : 1, &j0, &n);
            if (kind == BLOCK_EMPTY) continue;
            m.additive = a->bias.data || kind == BLOCK_EDGE;
            prefetch_block(a, rows, grid + BLOCK_K, last, i, tiles);
            if (tile->t.rows <= LANES) tile_block(a, &m, 1, dot, tile, j0 - block.first, n, w, &block);
            else tile_block(a, &m, NV, dot, tile, j0 - block.first, n, w, &block);
        }
    }
}

static void tile_attend(const fa_attention_args *a, const fa_plan *plan, const row_block *rows, int64_t key_begin,
                        int64_t key_end, tile_scratch *w)
{
    if (V_BF16_DOT && plan->bf16_dot) tile_attend_as(a, 1, rows, key_begin, key_end, w);
    else tile_attend_as(a, 0, rows, key_begin, key_end, w);
}
