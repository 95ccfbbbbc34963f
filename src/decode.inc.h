/* One task of the dot kernel: the few rows of one KV head against a run of keys, head_dim (scores) and head_dim_v
 * (accumulators) on the lanes. It reads K and V once, at the speed of the memory, and computes next to nothing.
 *
 *     for each block of keys that some row attends:
 *         s (rows, keys) = dot products of whole vectors, summed LANES at a time     16-bit keys are widened on the way
 *         s = modifiers and masks of s                                              scores.inc.h, keys on the lanes
 *         p, m, l = online softmax of s, row by row
 *         acc (rows, head_dim_v) = alpha acc + p V
 */

/* Rows per KV head up to which this kernel is used; above, the tile kernel. */
#define DOT_ROWS 8
#define DOT_CHUNK 4 /* vectors of head_dim_v at a time: 4 rows x 4 vectors of accumulators fit 32 registers */

/* A thread's scratch. */
typedef struct {
    lane *q;             /* (DOT_ROWS, depth), depth = head_dim rounded up to whole vectors, filled with 0 */
    lane *s, *add;       /* (DOT_ROWS, BLOCK_K) */
    lane *v;             /* (BLOCK_K, head_dim_v): values with rows taken out, in V's dtype */
    lane *base, *factor; /* (DOT_ROWS): the rows' norm, in the second pass */
    int64_t *range;      /* (4, DOT_ROWS) */
    range_list *lists;   /* (DOT_ROWS) */
    int64_t depth;
} dot_scratch;

/* Returns the bytes used. */
static int64_t take_dot_scratch(arena *from, const fa_attention_args *a, dot_scratch *scratch)
{
    scratch->depth = round_up(a->head_dim, LANES);
    CUT(from, scratch->q, DOT_ROWS * scratch->depth);
    CUT(from, scratch->s, DOT_ROWS * BLOCK_K);
    CUT(from, scratch->add, DOT_ROWS * BLOCK_K);
    CUT(from, scratch->v, BLOCK_K * a->head_dim_v);
    CUT(from, scratch->base, DOT_ROWS);
    CUT(from, scratch->factor, DOT_ROWS);
    CUT(from, scratch->range, 4 * DOT_ROWS);
    CUT(from, scratch->lists, DOT_ROWS);
    return from->used;
}

/* s (rows, keys) = q (rows, depth) k (keys, head_dim)^T, with rows * keys == LANES: one vector of sums. */
INLINE void dot_tile(fa_dtype dtype, int nr, const char *k, int64_t k_row, int64_t head_dim, const lane *q,
                     int64_t depth, lane *s)
{
    const int keys = LANES / nr;
    const int64_t size = dtype_size(dtype), whole = head_dim / LANES * LANES;
    v_t acc[LANES];
    UNROLL_FOR(int i = 0; i < LANES; i++) acc[i] = v_splat(0);
    for (int64_t d = 0; d < whole; d += LANES)
        UNROLL_FOR(int j = 0; j < keys; j++) {
            const v_t key = v_load_as(dtype, k + j * k_row + d * size);
            UNROLL_FOR(int r = 0; r < nr; r++)
                acc[r * keys + j] = v_fma(key, v_load(q + r * depth + d), acc[r * keys + j]);
        }
    if (whole < head_dim)
        for (int j = 0; j < keys; j++) {
            const v_t key = v_load_as_n(dtype, k + j * k_row + whole * size, head_dim - whole);
            for (int r = 0; r < nr; r++)
                acc[r * keys + j] = v_fma(key, v_load(q + r * depth + whole), acc[r * keys + j]);
        }
    const v_t sums = v_sum_each(acc);
    lane each[LANES];
    v_store(each, sums);
    UNROLL_FOR(int r = 0; r < nr; r++) memcpy(s + r * BLOCK_K, each + r * keys, keys * sizeof(lane));
}

/* What to fetch meanwhile: rows of `size` bytes, as many as are being read. Scores and values take turns, so that the
 * hardware's own prefetching starts anew at every turn: while one is computed, the other is fetched. */
typedef struct {
    const char *data; /* NULL: nothing */
    int64_t row, size;
} fetch_ahead;

/* s (rows, n) for 1, 2 or 4 rows; keys past the last whole tile one by one. */
INLINE void dot_scores(fa_dtype dtype, int nr, const char *k, int64_t k_row, int64_t n, int64_t head_dim, const lane *q,
                       int64_t depth, fetch_ahead next, lane *s)
{
    const int keys = LANES / nr;
    int64_t j = 0;
    for (; j + keys <= n; j += keys) {
        if (next.data) prefetch_rows(next.data + j * next.row, next.row, keys, next.size);
        dot_tile(dtype, nr, k + j * k_row, k_row, head_dim, q, depth, s + j);
    }
    for (; j < n; j++)
        for (int r = 0; r < nr; r++) {
            v_t acc = v_splat(0);
            int64_t d = 0;
            for (; d + LANES <= head_dim; d += LANES)
                acc = v_fma(v_load_as(dtype, k + j * k_row + d * dtype_size(dtype)), v_load(q + r * depth + d), acc);
            if (d < head_dim)
                acc = v_fma(v_load_as_n(dtype, k + j * k_row + d * dtype_size(dtype), head_dim - d),
                            v_load(q + r * depth + d), acc);
            s[r * BLOCK_K + j] = v_sum(acc);
        }
}

/* acc (rows, nd vectors) = alpha acc + p (rows, n) v (n, nd vectors); `last`: lanes of the last vector, 0 = all */
INLINE void dot_values(fa_dtype dtype, int nr, int nd, int64_t last, const char *v, int64_t v_row, int64_t n,
                       const lane *probs, const lane *alpha, fetch_ahead next, lane *acc, int64_t acc_row)
{
    v_t sum[4][DOT_CHUNK];
    UNROLL_FOR(int r = 0; r < nr; r++)
        UNROLL_FOR(int c = 0; c < nd; c++) sum[r][c] = v_splat(0); /* added at the end, as tile_pv adds */
    for (int64_t j = 0; j < n; j++, v += v_row) {
        if (next.data) prefetch_rows(next.data + j * next.row, next.row, 1, next.size);
        UNROLL_FOR(int c = 0; c < nd; c++) {
            const char *from = v + c * LANES * dtype_size(dtype);
            const v_t value = last && c == nd - 1 ? v_load_as_n(dtype, from, last) : v_load_as(dtype, from);
            UNROLL_FOR(int r = 0; r < nr; r++) sum[r][c] = v_fma(v_splat(probs[r * BLOCK_K + j]), value, sum[r][c]);
        }
    }
    UNROLL_FOR(int r = 0; r < nr; r++)
        UNROLL_FOR(int c = 0; c < nd; c++) {
            lane *to = acc + r * acc_row + c * LANES;
            v_store(to, v_fma(v_load(to), v_splat(alpha[r]), sum[r][c]));
        }
}

/* acc (rows, head_dim_v) = alpha acc + p (rows, n) v (n, head_dim_v) */
INLINE void dot_accumulate(fa_dtype dtype, int nr, const char *v, int64_t v_row, int64_t n, int64_t head_dim_v,
                           const lane *probs, const lane *alpha, fetch_ahead next, lane *acc, int64_t acc_row)
{
    const int64_t size = dtype_size(dtype);
    int64_t d = 0;
    for (; d + DOT_CHUNK * LANES <= head_dim_v; d += DOT_CHUNK * LANES, next.data = NULL)
        dot_values(dtype, nr, DOT_CHUNK, 0, v + d * size, v_row, n, probs, alpha, next, acc + d, acc_row);
    for (; d + LANES <= head_dim_v; d += LANES, next.data = NULL)
        dot_values(dtype, nr, 1, 0, v + d * size, v_row, n, probs, alpha, next, acc + d, acc_row);
    if (d < head_dim_v)
        dot_values(dtype, nr, 1, head_dim_v - d, v + d * size, v_row, n, probs, alpha, next, acc + d, acc_row);
}

/* One row's online softmax over s (n): probabilities in place; returns alpha = exp(m - m'). The vectors that hold s are
 * whole: what lies past n becomes 0. row_log, if not NULL, as in softmax_update. */
INLINE lane dot_softmax(lane *s, int64_t n, lane *row_max, lane *row_sum, lane *row_log)
{
    v_t max = v_splat(*row_max), sum = v_splat(0), log = v_splat(0);
    for (int64_t j = n; j < round_up(n, LANES); j++) s[j] = -INFINITY;
    for (int64_t j = 0; j < n; j += LANES) max = v_max(max, v_load(s + j));
    const lane new_max = v_max_lanes(max), base = new_max == -(lane)INFINITY ? 0 : new_max;
    for (int64_t j = 0; j < n; j += LANES) {
        const v_t x = v_load(s + j) - v_splat(base), p = v_exp_prob(x);
        sum += p;
        if (row_log) log = v_fma(p, v_log_weight(x), log);
        v_store(s + j, p);
    }
    const lane alpha = lane_exp(*row_max - base);
    if (row_log) {
        const lane step = v_log_weight(v_splat(*row_max - base))[0];
        *row_log = alpha * (*row_log + *row_sum * step) + v_sum(log);
    }
    *row_max = new_max;
    *row_sum = *row_sum * alpha + v_sum(sum);
    return alpha;
}

/* Modifiers and masks of s (rows, n), keys [j0, j0 + n); w->add is there. */
INLINE void modify_rows(const fa_attention_args *a, const modifiers *mods, int out_of_range, const row_block *rows,
                        int64_t j0, int64_t n, const dot_scratch *scratch)
{
    if (!modifies(mods, out_of_range)) return;
    v_t lane_index;
    for (int i = 0; i < LANES; i++) lane_index[i] = i;
    EACH_ROW(rows, r, id) {
        lane slope = 0, distance = 0;
        if (mods->alibi) {
            slope = *(const lane_u *)at(&a->alibi_slopes, rows->b, id.head, 0, 0);
            distance = (lane)(load_int(at(&a->q_position, rows->b, 0, 0, 0)) + id.query - j0);
        }
        const v_t begin = v_splat((lane)(rows->begin[r] - j0)), end = v_splat((lane)(rows->end[r] - j0));
        for (int64_t j = 0; j < n; j += LANES) {
            const v_t key = lane_index + v_splat((lane)j);
            lane *s = scratch->s + r * BLOCK_K + j;
            v_store(s, v_modify(mods, out_of_range, 1, v_load(s), v_load(scratch->add + r * BLOCK_K + j),
                                v_splat(slope), v_abs(v_splat(distance) - key), (begin <= key) & (key < end)));
        }
    }
}

/* Whether row r attends key j0 + j, of a block whose additive tile is there. */
INLINE int row_attends(const modifiers *mods, const row_block *rows, int64_t r, int64_t j0, int64_t j,
                       const dot_scratch *scratch)
{
    const int hidden = mods->additive && scratch->add[r * BLOCK_K + j] == -(lane)INFINITY;
    return rows->begin[r] <= j0 + j && j0 + j < rows->end[r] && !hidden;
}

/* Second pass, as in weigh_tile. */
static void weigh_rows(const fa_attention_args *a, const modifiers *mods, int hides, const row_block *rows, int64_t j0,
                       int64_t n, const dot_scratch *scratch)
{
    for (int64_t r = 0; r < rows->n; r++) {
        lane *s = scratch->s + r * BLOCK_K;
        const lane base = scratch->base[r], factor = scratch->factor[r];
        for (int64_t j = 0; j < n; j += LANES)
            v_store(s + j, v_exp_prob(v_load(s + j) - v_splat(base)) * v_splat(factor));
        for (int64_t j = 0; hides && factor != factor && j < n; j++)
            if (!row_attends(mods, rows, r, j0, j, scratch)) s[j] = 0;
    }
    if (a->key_sums.data) add_rows_to_key_sums(a, rows, scratch->s, j0, n);
    if (a->mean_weights.data) add_rows_to_mean(a, rows, scratch->s, j0, n);
}

/* One block: keys [j0, j0 + n). */
INLINE void dot_block(const fa_attention_args *a, fa_dtype dtype, const modifiers *mods, const row_block *rows,
                      int64_t j0, int64_t n, const dot_scratch *scratch, const partial *part)
{
    const char *next = j0 + 2 * n <= a->len_k ? at(&a->k, rows->b, rows->h_kv, j0 + n, 0) : NULL;
    const char *k = at(&a->k, rows->b, rows->h_kv, j0, 0), *v = at(&a->v, rows->b, rows->h_kv, j0, 0), *values = v;
    const int64_t depth = scratch->depth, width = a->head_dim_v, size = dtype_size(dtype);
    int64_t v_row = a->v.row, bad[BLOCK_K], n_bad = 0, r = 0;
    uint8_t attends[BLOCK_K][DOT_ROWS];
    lane alpha[DOT_ROWS];
    const int out_of_range = rows->full_first > j0 || rows->full_last < j0 + n;
    const block_kind kind = mods->additive ? additive_rows(a, rows, j0, n, scratch->add) : BLOCK_FULL;
    if (kind == BLOCK_EMPTY) return;

#define EACH_ROWS(call) /* four rows at a time, then two, then one */                                                  \
    for (r = 0; LANES >= 4 && r + 4 <= rows->n; r += 4) call(4);                                                       \
    for (; r + 2 <= rows->n; r += 2) call(2);                                                                          \
    for (; r < rows->n; r++) call(1);
#define SCORES(nr)                                                                                                     \
    dot_scores(dtype, nr, k, a->k.row, n, a->head_dim, scratch->q + r * depth, depth,                                  \
               (fetch_ahead){r || a->second_pass ? NULL : v, v_row, width * size}, scratch->s + r * BLOCK_K)
    EACH_ROWS(SCORES)
#undef SCORES

        /* A probability of 0 does not shield a NaN or Inf in V: take such rows out, add them where attended. */
        modify_rows(a, mods, out_of_range, rows, j0, n, scratch);
    if (a->second_pass) {
        weigh_rows(a, mods, out_of_range || kind == BLOCK_EDGE, rows, j0, n, scratch);
        return;
    }
    if (out_of_range || kind == BLOCK_EDGE) {
        for (int64_t j = 0; j < n; j++)
            if (!row_finite(dtype, v + j * v_row, width)) {
                for (r = 0; r < rows->n; r++) attends[n_bad][r] = row_attends(mods, rows, r, j0, j, scratch);
                bad[n_bad++] = j;
            }
        if (n_bad) {
            values = (const char *)scratch->v;
            v_row = width * size;
            for (int64_t j = 0; j < n; j++) memcpy((char *)scratch->v + j * v_row, v + j * a->v.row, v_row);
            for (int64_t i = 0; i < n_bad; i++) memset((char *)scratch->v + bad[i] * v_row, 0, v_row);
        }
    }
    for (r = 0; r < rows->n; r++) {
        lane *s = scratch->s + r * BLOCK_K, *row_log = part->row_log ? part->row_log + r : NULL;
        if (a->n_top) top_insert_row(a->n_top, s, n, j0, row_top(a, part, r));
        alpha[r] = 1;
        if (a->sigmoid) dot_sigmoid(s, n, (lane)a->sigmoid_bias);
        else alpha[r] = dot_softmax(s, n, part->row_max + r, part->row_sum + r, row_log);
        for (int64_t j = 0; j < n && part->row_max[r] == -(lane)INFINITY; j++)
            if (row_attends(mods, rows, r, j0, j, scratch)) part->row_max[r] = -LANE_MAX;
    }
#define VALUES(nr)                                                                                                     \
    dot_accumulate(dtype, nr, values, v_row, n, width, scratch->s + r * BLOCK_K, alpha + r,                            \
                   (fetch_ahead){r ? NULL : next, a->k.row, a->head_dim * size}, part->acc + r * part->acc_row,        \
                   part->acc_row)
    EACH_ROWS(VALUES)
#undef VALUES
#undef EACH_ROWS
        for (int64_t i = 0; i < n_bad; i++)
            for (r = 0; r < rows->n; r++)
                for (int64_t d = 0; d < width && attends[i][r]; d++)
                    part->acc[r * part->acc_row + d] += scratch->s[r * BLOCK_K + bad[i]] *
                                                        load_element(dtype, v + bad[i] * a->v.row + d * size);
}

/* The state of the KV head's rows over keys [key_begin, key_end), as a partial. */
INLINE void dot_attend_as(const fa_attention_args *a, fa_dtype dtype, row_block *rows, int64_t key_begin,
                          int64_t key_end, const dot_scratch *scratch, const partial *part)
{
    modifiers mods = modifiers_of(a, 0);
    rows->begin = scratch->range;
    rows->end = scratch->range + DOT_ROWS;
    rows->lists = scratch->lists;
    rows->pair_begin = scratch->range + 2 * DOT_ROWS;
    rows->pair_end = scratch->range + 3 * DOT_ROWS;
    row_block_ranges(a, rows, key_begin, key_end);
    if (a->ranges) row_block_open_lists(a, rows);
    if (a->second_pass) load_row_norm(a, rows, scratch->base, scratch->factor);
    EACH_ROW(rows, r, id) {
        lane *q = scratch->q + r * scratch->depth;
        for (int64_t d = a->head_dim; d < scratch->depth; d++) q[d] = 0;
        load_row(a->q.dtype, at(&a->q, rows->b, id.head, id.query, 0), a->head_dim, mods.q_factor, q);
        if (a->second_pass) continue;
        part->row_max[r] = a->sigmoid ? 0 : -INFINITY;
        part->row_sum[r] = 0;
        if (part->row_log) part->row_log[r] = 0;
        for (int64_t i = 0; i < a->n_top; i++) row_top(a, part, r).score[i] = -INFINITY;
        for (int64_t d = 0; d < part->acc_row; d++) part->acc[r * part->acc_row + d] = 0;
    }
    const int64_t last = rows->last;
    for (int64_t block = rows->first / BLOCK_K * BLOCK_K, next; block < last; block = next) {
        const int64_t block_end = block + BLOCK_K < last ? block + BLOCK_K : last;
        if (a->ranges) row_block_enter(rows, block, block_end);
        next = a->ranges ? rows->next / BLOCK_K * BLOCK_K : block + BLOCK_K;
        int64_t j0 = block > rows->first ? block : rows->first;
        int64_t n = (block_end < rows->last ? block_end : rows->last) - j0;
        if (n <= 0) continue;
        const block_kind kind = mask_kind(a, rows, 1, &j0, &n);
        if (kind == BLOCK_EMPTY) continue;
        mods.additive = additive_parts(a, rows, kind);
        dot_block(a, dtype, &mods, rows, j0, n, scratch, part);
    }
}

static void dot_attend(const fa_attention_args *a, row_block *rows, int64_t key_begin, int64_t key_end,
                       const dot_scratch *scratch, const partial *part)
{
    switch (a->k.dtype) {
#if LANE_BITS == 64
    default: dot_attend_as(a, FA_F64, rows, key_begin, key_end, scratch, part);
#else
    case FA_F16: dot_attend_as(a, FA_F16, rows, key_begin, key_end, scratch, part); break;
    case FA_BF16: dot_attend_as(a, FA_BF16, rows, key_begin, key_end, scratch, part); break;
    default: dot_attend_as(a, FA_F32, rows, key_begin, key_end, scratch, part);
#endif
    }
}
