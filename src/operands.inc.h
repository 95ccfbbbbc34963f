/* What the tile kernel works on: a thread's scratch, the state of its tiles, and its operands as it reads them: queries
 * transposed, the additive tile, blocks of keys and values in place or copied. */

#define TILES 8 /* most tiles of a task */

/* Keys after which a tile's state becomes a partial, to be merged, at multiples of it, into that of the keys before: one
 * accumulator adds up so many blocks and no more. 64 keys a block, 64 blocks: the fewest additions in a row. */
#define PART_K (64 * BLOCK_K)

/* One tile: its rows and their state. */
typedef struct {
    row_block rows;
    lane *qt, *ot;                   /* (head_dim), (head_dim_v) rows of pitch BLOCK_Q */
    lane *row_max, *row_sum, *slope; /* (BLOCK_Q); in the second pass the rows' norm stands in the first two */
    lane *row_log;                   /* (BLOCK_Q), or NULL */
    const char **bias;               /* (BLOCK_Q): where the bias of each row begins */
    lane *top_score;                 /* (n_top) rows of pitch BLOCK_Q, as top_key: */
    ilane *top_key;                  /* counted from top_first, the first key of the part */
    int64_t top_first;
    int fresh;     /* no block yet: ot holds nothing */
    partial total; /* of the parts that are done */
    int64_t parts; /* how many: PART_K */
} tile_state;

/* A thread's scratch. s, add, pairs have the row pitch BLOCK_Q. */
typedef struct {
    tile_state tiles[TILES];
    lane *s, *add;                        /* (BLOCK_K) rows: scores, then probabilities; additive tile */
    lane *pairs;                          /* (BLOCK_K / 2): probabilities as pairs of bfloat16 */
    lane *by_row;                         /* (BLOCK_Q, BLOCK_K): rows of the additive tile, to be transposed */
    lane *k, *v, *clean;                  /* (BLOCK_K, head_dim), two (BLOCK_K, head_dim_v): copied keys and values */
    lane *alpha, *position, *begin, *end; /* (BLOCK_Q) */
    partial part;                         /* where `total` must not yet be written */
} tile_scratch;

static void take_tile(arena *from, const fa_attention_args *a, tile_state *tile)
{
    CUT(from, tile->qt, a->head_dim * BLOCK_Q);
    CUT(from, tile->ot, a->head_dim_v * BLOCK_Q);
    CUT(from, tile->row_max, BLOCK_Q);
    CUT(from, tile->row_sum, BLOCK_Q);
    CUT(from, tile->slope, BLOCK_Q);
    CUT(from, tile->row_log, a->entropy.data ? BLOCK_Q : 0);
    CUT(from, tile->bias, BLOCK_Q);
    CUT(from, tile->top_score, a->n_top * BLOCK_Q);
    CUT(from, tile->top_key, a->n_top * BLOCK_Q);
    CUT(from, tile->rows.begin, BLOCK_Q);
    CUT(from, tile->rows.end, BLOCK_Q);
    CUT(from, tile->rows.lists, BLOCK_Q);
    CUT(from, tile->rows.pair_begin, BLOCK_Q);
    CUT(from, tile->rows.pair_end, BLOCK_Q);
    if (!a->entropy.data) tile->row_log = NULL;
}

/* Returns the bytes used. */
static int64_t take_tile_scratch(arena *from, const fa_attention_args *a, int tiles, tile_scratch *scratch)
{
    CUT(from, scratch->s, BLOCK_K * BLOCK_Q);
    CUT(from, scratch->add, BLOCK_K * BLOCK_Q);
    CUT(from, scratch->pairs, BLOCK_K / 2 * BLOCK_Q);
    CUT(from, scratch->by_row, BLOCK_Q * BLOCK_K);
    CUT(from, scratch->k, BLOCK_K * round_up(a->head_dim, LANES));
    CUT(from, scratch->v, BLOCK_K * round_up(a->head_dim_v, LANES));
    CUT(from, scratch->clean, BLOCK_K * round_up(a->head_dim_v, LANES));
    CUT(from, scratch->alpha, BLOCK_Q);
    CUT(from, scratch->position, BLOCK_Q);
    CUT(from, scratch->begin, BLOCK_Q);
    CUT(from, scratch->end, BLOCK_Q);
    for (int i = 0; i < tiles; i++) take_tile(from, a, scratch->tiles + i);
    return from->used;
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
INLINE void load_queries_as(fa_dtype dtype, const fa_attention_args *a, const row_block *rows, int dot, lane factor,
                            lane *qt)
{
    const int64_t depth = dot ? (a->head_dim + 1) / 2 : a->head_dim;
    const char *q_row[BLOCK_Q] = {NULL};
    EACH_ROW(rows, r, id) q_row[r] = at(&a->q, rows->b, id.head, id.query, 0);
    for (int64_t r = 0; r < BLOCK_Q; r += LANES)
        for (int64_t d = 0; d < depth; d += LANES) {
            const int64_t n = depth - d;
            v_t x[LANES];
            for (int i = 0; i < LANES; i++) {
                const v_t q = q_row[r + i] ? load_query(dtype, dot, q_row[r + i], d, n, a->head_dim) : v_splat(0);
                x[i] = dot ? q : q * v_splat(factor);
            }
            v_transpose(x);
            for (int i = 0; i < (n < LANES ? n : LANES); i++) v_store(qt + (d + i) * BLOCK_Q + r, x[i]);
        }
}

static void load_queries(const fa_attention_args *a, const row_block *rows, int dot, lane factor, lane *qt)
{
    if (dot) load_queries_as(FA_BF16, a, rows, 1, factor, qt);
    else if (a->q.dtype == FA_F16) load_queries_as(FA_F16, a, rows, 0, factor, qt);
    else if (a->q.dtype == FA_BF16) load_queries_as(FA_BF16, a, rows, 0, factor, qt);
    else load_queries_as(LANE_DTYPE, a, rows, 0, factor, qt);
}

/* Whether the rows of the bias lie as lanes do, for load_bias. */
INLINE int bias_of_lanes(const fa_attention_args *a)
{
    return a->bias.dtype == LANE_DTYPE && a->bias.col == sizeof(lane);
}

/* Notes where the bias of each row begins. */
INLINE void note_bias_rows(const fa_attention_args *a, tile_state *tile)
{
    const row_block *rows = &tile->rows;
    EACH_ROW(rows, r, id) tile->bias[r] = at(&a->bias, rows->b, id.head, id.query, 0);
    for (int64_t r = rows->n; r < BLOCK_Q; r++) tile->bias[r] = tile->bias[rows->n - 1]; /* hides what a row hides */
}

/* Part of load_bias: `width` keys of LANES rows. */
INLINE void load_bias_square(const char *const *bias, int64_t first, int64_t width, v_t *low, vi_t *some, lane *add)
{
    const vi_t hidden = (vi_t)v_splat(-INFINITY);
    v_t x[LANES];
    UNROLL_FOR(int i = 0; i < LANES; i++) {
        const char *row = bias[i] + first * (int64_t)sizeof(lane);
        x[i] = width == LANES ? v_load(row) : v_load_n(row, width);
    }
    v_transpose(x);
    UNROLL_FOR(int i = 0; i < LANES; i++) {
        if (i >= width) break;
        *low = v_min(x[i], *low); /* this way round a NaN is passed over */
        *some |= (vi_t)x[i] ^ hidden;
        v_store(add + i * BLOCK_Q, x[i]);
    }
}

/* add (n keys, nv) = the bias alone, transposed from where it is. */
INLINE block_kind load_bias(const tile_state *tile, int nv, int64_t j0, int64_t n, lane *add)
{
    v_t low = v_splat(INFINITY);
    vi_t some = {0};
    for (int64_t r = 0; r < nv * LANES; r += LANES) {
        int64_t j = 0;
        for (; j + LANES <= n; j += LANES)
            load_bias_square(tile->bias + r, j0 + j, LANES, &low, &some, add + j * BLOCK_Q + r);
        if (j < n) load_bias_square(tile->bias + r, j0 + j, n - j, &low, &some, add + j * BLOCK_Q + r);
    }
    return !v_any(some != 0) ? BLOCK_EMPTY : v_any(low == v_splat(-INFINITY)) ? BLOCK_EDGE : BLOCK_FULL;
}

/* The additive tile, add (n keys, rows): one row for all where mask and bias do not depend on the query. An empty one is
 * not written. */
INLINE block_kind load_additive(const fa_attention_args *a, const modifiers *mods, const tile_state *tile, int nv,
                                int64_t j0, int64_t n, const tile_scratch *scratch)
{
    const row_block *rows = &tile->rows;
    const int shared = rows_share(rows, &a->mask) && rows_share(rows, &a->bias) && (!rows->several || rows->one_list);
    if (mods->additive == ADD_BIAS && !shared && bias_of_lanes(a)) return load_bias(tile, nv, j0, n, scratch->add);
    const block_kind kind = shared ? additive_row(a, rows, first_row(rows), rows->several ? rows->lists : NULL, j0, n,
                                                  scratch->by_row)
                                   : additive_rows(a, rows, j0, n, scratch->by_row);
    if (kind == BLOCK_EMPTY) return kind;
    if (shared)
        for (int64_t j = 0; j < n; j++)
            for (int u = 0; u < NV; u++) v_store(scratch->add + j * BLOCK_Q + u * LANES, v_splat(scratch->by_row[j]));
    else {
        transpose(scratch->by_row, BLOCK_K, rows->n, n, scratch->add, BLOCK_Q);
        for (int64_t r = round_up(rows->n, LANES); r < BLOCK_Q; r += LANES)
            for (int64_t j = 0; j < n; j++) v_store(scratch->add + j * BLOCK_Q + r, v_splat(0));
    }
    return kind;
}

/* A block of keys and values, [first, first + n) of the sequence, as the tiles read it. */
typedef struct {
    int64_t first, n;
    const char *k, *v; /* row `first`; NULL until a tile asks */
    int64_t k_row, v_row;
    int checked;                 /* the values were looked at: */
    int64_t bad[BLOCK_K], n_bad; /* rows of v that are not finite, and are 0 in w->clean: see take_out_bad_values */
} key_block;

INLINE int is_dense(const fa_array *x, int64_t width) { return x->row == width * dtype_size(x->dtype); }

/* Keys and values in place, or copied to scratch. */
INLINE void load_block(const fa_attention_args *a, const row_block *rows, int dot, const tile_scratch *scratch,
                       key_block *block)
{
    const char *k = at(&a->k, rows->b, rows->h_kv, block->first, 0),
               *v = at(&a->v, rows->b, rows->h_kv, block->first, 0);
    const int64_t n = block->n, wide = sizeof(lane), width = a->head_dim, width_v = a->head_dim_v;
    block->k = k, block->k_row = a->k.row;
    block->v = v, block->v_row = a->v.row;
    if (dot && (width % 2 || !is_dense(&a->k, width))) { /* an odd head_dim: the last pair must not be read past */
        block->k = (const char *)scratch->k, block->k_row = round_up(width, 2) * 2;
        for (int64_t j = 0; j < n; j++) {
            char *row = (char *)scratch->k + j * block->k_row;
            memset(row + block->k_row - 2, 0, 2);
            memcpy(row, k + j * a->k.row, width * 2);
        }
    } else if (!dot && (dtype_size(a->k.dtype) != wide || !is_dense(&a->k, width))) {
        block->k = (const char *)scratch->k, block->k_row = width * wide;
        for (int64_t j = 0; j < n; j++) load_row(a->k.dtype, k + j * a->k.row, width, 1, scratch->k + j * width);
    }
    if (a->second_pass) return;
    if (dot) { /* rows 2j and 2j + 1 become one row of pairs; an odd last one is paired with 0 */
        static const uint16_t zeros[LANES];
        block->v = (const char *)scratch->v, block->v_row = width_v * wide;
        for (int64_t j = 0; j < n; j += 2) {
            const char *row0 = v + j * a->v.row, *row1 = row0 + a->v.row;
            lane *out = scratch->v + j / 2 * width_v;
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
        block->v = (const char *)scratch->v, block->v_row = width_v * wide;
        for (int64_t j = 0; j < n; j++) load_row(a->v.dtype, v + j * a->v.row, width_v, 1, scratch->v + j * width_v);
    }
}

/* Part `i` of `parts` of the keys and values from `first` on, where their rows do not lie side by side: there the
 * hardware's prefetching finds nothing to follow. */
INLINE void prefetch_block(const fa_attention_args *a, const row_block *rows, int64_t first, int64_t last, int i,
                           int parts)
{
    const int64_t j0 = first + i * BLOCK_K / parts, j1 = first + (i + 1) * BLOCK_K / parts,
                  n = (j1 < last ? j1 : last) - j0;
    if (n <= 0) return;
    if (!is_dense(&a->k, a->head_dim))
        prefetch_rows(at(&a->k, rows->b, rows->h_kv, j0, 0), a->k.row, n, a->head_dim * dtype_size(a->k.dtype));
    if (!is_dense(&a->v, a->head_dim_v) && !a->second_pass)
        prefetch_rows(at(&a->v, rows->b, rows->h_kv, j0, 0), a->v.row, n, a->head_dim_v * dtype_size(a->v.dtype));
}
