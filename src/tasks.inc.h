/* A call of attention: its plan, and its tasks. */

/* Keys of a split: enough work to be worth a task (tens of microseconds), few enough to occupy many cores. */
#define SPLIT_K 512
_Static_assert(SPLIT_K % BLOCK_K == 0, "splits begin at block boundaries");

/* Tasks per thread below which a task has fewer tiles: the last one to finish must not keep the other threads waiting.
 * Of 4 and 24, tried on 2 cores, 24 is 30% ahead at (1, 12, 128, 64), 4% at (1, 12, 512, 64), level from there on. */
#define TASKS_PER_THREAD 24

/* Partials at the head of a thread's scratch: the one that is made, and the states that it is merged into. One state
 * serves all tiles of a task in turn where none is needed before the tile's end. */
static int64_t n_partials(const fa_attention_args *a, const fa_plan *p)
{
    return 1 + (!p->split_k && a->len_k > PART_K ? p->tiles : 1);
}

/* Row blocks [block, block + blocks) of the KV head. */
static row_block rows_of(const fa_attention_args *a, const fa_plan *p, int64_t head, int64_t block, int64_t blocks)
{
    const int64_t group = a->heads_q / a->heads_kv, rows = group * a->len_q, row0 = block * p->block_q;
    const int64_t most = blocks * p->block_q;
    return (row_block){
        .b = head / a->heads_kv,
        .h_kv = head % a->heads_kv,
        .group = group,
        .row0 = row0,
        .rows = rows - row0 < most ? rows - row0 : most,
    };
}

/* Whether the rows, all of a KV head's, take the kernel of few rows. A sequence with no more keys than queries is one
 * that attends itself; beside longer ones it is padded to many rows. So it takes the tile kernel in any company, and has
 * the same bits. */
static int takes_dot(const fa_attention_args *a, const fa_plan *p, const row_block *t)
{
    if (p->kind != FA_DOT || !a->row_end.data) return p->kind == FA_DOT;
    EACH_ROW(t, r, id) {
        int64_t begin, end;
        row_range(a, t, id, &begin, &end);
        if (begin < end && end > a->len_q) return 1;
    }
    return 0;
}

/* Scratch of the kernels behind the partials. */
static int64_t kernel_scratch(const fa_attention_args *a, const fa_plan *p)
{
    tile_scratch tile;
    dot_scratch dot;
    const int64_t for_tile = tile_scratch_at(a, p->tiles, NULL, &tile);
    return p->kind == FA_DOT ? larger(for_tile, dot_scratch_at(a, NULL, &dot)) : for_tile;
}

/* The second pass: keys of a task. Fewer where there would be few tasks; below 128, preparing queries would show. */
static void plan_second_pass(const fa_attention_args *a, int threads, fa_plan *p)
{
    const int64_t blocks = ceil_div(a->heads_q / a->heads_kv * a->len_q, p->block_q);
    const int64_t owners = a->batch * (a->mean_weights.data ? 1 : a->heads_kv);
    p->tiles = p->kind == FA_DOT ? 1 : (int)smaller(blocks, TILES);
    p->split_k = 0;
    p->n_splits = 1;
    p->run_k = 16 * BLOCK_K;
    while (p->run_k > 2 * BLOCK_K && owners * ceil_div(a->len_k, p->run_k) < 4 * threads) p->run_k /= 2;
    p->n_tasks = owners * ceil_div(a->len_k, p->run_k);
    p->scratch_bytes = kernel_scratch(a, p);
    p->flops = 2.0 * a->batch * a->heads_q * a->len_q * a->len_k * a->head_dim;
}

static void plan(const fa_attention_args *a, int threads, fa_plan *p)
{
    const int64_t rows = a->heads_q / a->heads_kv * a->len_q, heads = a->batch * a->heads_kv;
    p->kind = rows <= DOT_ROWS && a->len_k > a->len_q ? FA_DOT : FA_TILE;
    p->block_q = p->kind == FA_DOT ? DOT_ROWS : BLOCK_Q;
    p->block_k = BLOCK_K;
    p->bf16_dot = V_BF16_DOT && p->kind == FA_TILE && a->q.dtype == FA_BF16;
    p->split_k = rows <= p->block_q ? SPLIT_K : 0;
    p->n_splits = p->split_k && a->len_k ? ceil_div(a->len_k, SPLIT_K) : 1;
    const int64_t blocks = ceil_div(rows, p->block_q), share = heads * blocks / (threads * TASKS_PER_THREAD);
    p->tiles = share < 1 || blocks <= 1 ? 1 : share < TILES ? (int)share : TILES;
    p->n_tasks = heads * ceil_div(blocks, p->tiles);
    p->run_k = 0;
    p->partial_bytes = partial_at(a, p->block_q, NULL, NULL);
    p->scratch_bytes = n_partials(a, p) * p->partial_bytes + kernel_scratch(a, p);
    p->flops = 2.0 * a->batch * a->heads_q * a->len_q * a->len_k * (a->head_dim + a->head_dim_v);
    if (a->second_pass) plan_second_pass(a, threads, p);
}

/* Splits [*first, *last) of the KV head hold all keys that its rows may attend; at least one, to write the result. */
static void splits(const fa_attention_args *a, const fa_plan *p, int64_t head, int64_t *first, int64_t *last)
{
    const row_block t = rows_of(a, p, head, 0, 1);
    int64_t begin = a->len_k, end = 0;
    EACH_ROW(&t, r, id) {
        int64_t row_begin, row_end;
        row_range(a, &t, id, &row_begin, &row_end);
        if (row_begin >= row_end) continue;
        begin = smaller(begin, row_begin);
        end = larger(end, row_end);
    }
    *first = begin < end ? begin / p->split_k : 0;
    *last = begin < end ? ceil_div(end, p->split_k) : 1;
}

/* Adds the partial of `split` to the KV head's state; they come in order: the first replaces, the last finishes. */
static void merge(const fa_attention_args *a, const fa_plan *p, int64_t head, int64_t split, void *state,
                  const void *split_partial)
{
    const row_block t = rows_of(a, p, head, 0, 1);
    int64_t first, last;
    partial into, from;
    splits(a, p, head, &first, &last);
    partial_at(a, p->block_q, state, &into);
    partial_at(a, p->block_q, (void *)split_partial, &from);
    if (split == first) partial_copy(a, &into, &from, t.rows);
    if (split == first + 1) partial_begin_merging(&into);
    if (split > first) partial_merge(a, &into, &from, t.rows);
    if (split < last - 1) return;
    if (split > first) partial_end_merging(&into, t.rows);
    partial_finish(a, &t, &into);
}

/* All rows t of a KV head against keys [begin, end), by the kernel that they take; `into` is NULL in the second pass. */
static void attend_rows(const fa_attention_args *a, const fa_plan *p, row_block *t, int64_t begin, int64_t end,
                        void *scratch, const partial *into)
{
    if (takes_dot(a, p, t)) {
        dot_scratch w;
        dot_scratch_at(a, scratch, &w);
        dot_attend(a, t, begin, end, &w, into);
        return;
    }
    tile_scratch w;
    tile_scratch_at(a, 1, scratch, &w);
    for (int64_t r = 0; r < t->rows; r += BLOCK_Q) { /* DOT_ROWS may be several tiles */
        row_block tile = *t;
        tile.row0 += r;
        tile.rows = smaller(t->rows - r, BLOCK_Q);
        if (into) w.tiles[0].total = partial_from(a, into, r);
        tile_attend(a, &tile, begin, end, &w);
        if (into) tile_end(a, &w, w.tiles);
    }
}

static void run_split(const fa_attention_args *a, const fa_plan *p, int64_t head, int64_t split, void *split_partial,
                      void *scratch)
{
    row_block t = rows_of(a, p, head, 0, 1);
    const int64_t begin = split * p->split_k;
    partial into;
    partial_at(a, p->block_q, split_partial, &into);
    attend_rows(a, p, &t, begin, smaller(begin + p->split_k, a->len_k), scratch, &into);
}

/* Whether some row of t may attend some of keys [begin, end): the walk over the keys begins with its queries. */
static int attends_some(const fa_attention_args *a, const row_block *t, int64_t begin, int64_t end)
{
    if (!a->row_begin.data && !a->row_end.data && !a->ranges) return 1;
    EACH_ROW(t, r, id) {
        int64_t first, last;
        row_range(a, t, id, &first, &last);
        first = larger(first, begin), last = smaller(last, end);
        if (first >= last) continue;
        if (!a->ranges) return 1;
        const int64_t *pairs = a->ranges + 2 * load_int(at(&a->range_first, t->b, id.head, id.query, 0));
        const int64_t *stop = a->ranges + 2 * load_int(at(&a->range_last, t->b, id.head, id.query, 0));
        pairs = first_pair(pairs, stop, first);
        if (pairs < stop && pairs[0] < last) return 1;
    }
    return 0;
}

/* The second pass: some row blocks after the other, of all heads where their mean is asked for. */
static void run_second_pass(const fa_attention_args *a, const fa_plan *p, int64_t task, void *scratch)
{
    const int64_t runs = ceil_div(a->len_k, p->run_k), rows = a->heads_q / a->heads_kv * a->len_q;
    const int64_t begin = task % runs * p->run_k, end = smaller(begin + p->run_k, a->len_k);
    const int64_t heads = a->mean_weights.data ? a->heads_kv : 1, head0 = task / runs * heads;
    for (int64_t block = 0; block * p->block_q < rows; block += p->tiles)
        for (int64_t head = head0; head < head0 + heads; head++) {
            row_block t = rows_of(a, p, head, block, p->tiles);
            if (!attends_some(a, &t, begin, end)) continue;
            if (given_up(a->watch)) return;
            if (p->kind == FA_DOT) {
                attend_rows(a, p, &t, begin, end, scratch, NULL);
                continue;
            }
            tile_scratch w;
            tile_scratch_at(a, p->tiles, scratch, &w);
            tile_attend(a, &t, begin, end, &w);
        }
}

/* The whole of a task. Within a KV head the last rows come first: under a causal mask they have the most keys. */
static void run(const fa_attention_args *a, const fa_plan *p, int64_t task, void *scratch)
{
    if (a->second_pass) {
        run_second_pass(a, p, task, scratch);
        return;
    }
    char *next = scratch, *state = next + p->partial_bytes, *rest = next + n_partials(a, p) * p->partial_bytes;
    if (p->split_k) {
        int64_t first, last;
        splits(a, p, task, &first, &last);
        for (int64_t split = first; split < last; split++) {
            if (split > first && split * SPLIT_K % PART_K == 0 && given_up(a->watch)) return;
            run_split(a, p, task, split, next, rest);
            merge(a, p, task, split, state, next);
        }
        return;
    }
    const int64_t tasks = p->n_tasks / (a->batch * a->heads_kv), block = (tasks - 1 - task % tasks) * p->tiles;
    const row_block t = rows_of(a, p, task / tasks, block, p->tiles);
    tile_scratch w;
    tile_scratch_at(a, p->tiles, rest, &w);
    partial_at(a, p->block_q, next, &w.part);
    for (int i = 0; i < p->tiles; i++) {
        char *total = state + (a->len_k > PART_K ? i : 0) * p->partial_bytes;
        partial_at(a, p->block_q, total, &w.tiles[i].total);
    }
    tile_attend(a, &t, 0, a->len_k, &w);
    for (int i = 0; i * p->block_q < t.rows; i++) {
        tile_end(a, &w, w.tiles + i);
        partial_finish(a, &w.tiles[i].t, &w.tiles[i].total);
    }
}
