/* The numbers of the rows of k with the largest scores, for each query of a key head. A score is the sum over the heads of
 * the group of weight * f(q k), f the identity or ReLU. A task is some queries of a key head:
 *
 *     for each block of keys that some query has to choose from:
 *         for each tile:  S^T = K Q^T                  attention.inc.h
 *                         scores += weight * f(S^T)    heads in order
 *     for each query: the top_k largest of its scores, in ascending order of their numbers
 *
 * A tile has queries of one head: the heads of a query then meet lane by lane, and only their sums are transposed into
 * rows. Few queries would leave lanes empty. Their tiles have the (query, head) pairs, and are transposed each.
 *
 * Scores of different keys have nothing to do with one another. So keys are cut anywhere: where tasks are few, score()
 * fills the rows of all first, a run of keys a task, and run() chooses from these.
 *
 * Literals  nv, bf16, relu, weighs.
 * Exports   selection_plan, selection_score, selection_run. */
#pragma once
#include "interface/selection.h"
#include "largest.inc.h"

#define SELECTION_RUN (8 * BLOCK_K) /* fewest keys of a task of score(): tens of microseconds */
#define SELECTION_ASKS 16           /* products, of at most a block of keys each, between two calls of given_up() */

/* Some rows of q, and what their products are times. */
typedef struct {
    row_block rows;
    lane *qt;     /* Q^T (head_dim, BLOCK_Q) */
    lane *weight; /* (BLOCK_Q), or NULL */
} query_tile;

typedef struct {
    query_tile *tiles;
    lane *k;             /* (BLOCK_K, head_dim): copied keys */
    lane *s[2], *by_row; /* (BLOCK_K, BLOCK_Q): products; (BLOCK_Q, BLOCK_K): those of pairs */
    lane *sums;          /* (BLOCK_K, BLOCK_Q): over the heads so far */
    largest_scratch choice;
    lane *scores; /* (queries, pitch) */
} selection_scratch;

/* Queries [query, query + n) of a key head. */
typedef struct {
    int64_t b, h_kv, query, n;
} query_block;

INLINE int64_t score_pitch(const fa_selection_args *call) { return round_up(call->attention.len_k, LANES); }

static int64_t cut_selection(arena *from, const fa_selection_args *call, const fa_selection_plan *plan,
                             selection_scratch *scratch)
{
    const fa_attention_args *a = &call->attention;
    cut_largest(from, a->len_k, &scratch->choice);
    if (call->scores.data && !plan->runs) return from->used;
    CUT_LANES(from, BLOCK_K * round_up(a->head_dim, LANES), &scratch->k);
    CUT_LANES(from, BLOCK_K * BLOCK_Q, scratch->s, scratch->s + 1, &scratch->by_row, &scratch->sums);
    CUT(from, scratch->tiles, plan->tiles);
    for (int64_t i = 0; i < plan->tiles; i++) {
        query_tile tile = {0}; /* while bytes are counted, there are no tiles */
        CUT_LANES(from, padded_k(a->head_dim) * BLOCK_Q, &tile.qt);
        if (call->weights.data) CUT_LANES(from, BLOCK_Q, &tile.weight);
        if (from->memory) scratch->tiles[i] = tile;
    }
    if (!plan->runs) CUT_LANES(from, plan->queries * score_pitch(call), &scratch->scores);
    return from->used;
}

static void selection_plan(const fa_selection_args *call, int threads, fa_selection_plan *plan)
{
    const fa_attention_args *a = &call->attention;
    const int64_t group = a->heads_q / a->heads_kv;
    plan->by_pairs = group > 1 && a->len_q < LANES;
    plan->queries = plan->by_pairs ? larger(1, a->len_q) : BLOCK_Q;
    plan->tiles = plan->by_pairs ? ceil_div(group * a->len_q, BLOCK_Q) : group;
    plan->n_tasks = a->batch * a->heads_kv * ceil_div(a->len_q, plan->queries);
    const int64_t wanted = ceil_div(8 * threads, larger(1, plan->n_tasks));
    plan->run_k = larger(SELECTION_RUN, round_up(ceil_div(a->len_k, wanted), BLOCK_K));
    plan->runs = call->scores.data || threads == 1 || wanted <= 2 ? 0 : ceil_div(a->len_k, plan->run_k);
    if (plan->runs == 1) plan->runs = 0;
    plan->pitch = score_pitch(call);
    plan->flops = 2.0 * a->batch * a->heads_q * a->len_q * a->len_k * a->head_dim;
    plan->scratch_bytes = cut_selection(&(arena){0}, call, plan, &(selection_scratch){0});
}

/* Of a head's queries the last ones come first: under a causal mask they have the most keys. */
static query_block queries_of_task(const fa_selection_args *call, const fa_selection_plan *plan, int64_t task)
{
    const fa_attention_args *a = &call->attention;
    const int64_t blocks = ceil_div(a->len_q, plan->queries), head = task / blocks;
    query_block queries = {.b = head / a->heads_kv, .h_kv = head % a->heads_kv};
    queries.query = (blocks - 1 - task % blocks) * plan->queries;
    queries.n = smaller(plan->queries, a->len_q - queries.query);
    return queries;
}

/* How many keys a query may select: the first of all. */
INLINE int64_t allowed_keys(const fa_attention_args *a, int64_t b, int64_t query)
{
    return a->masks.row_end.data ? load_int(at(&a->masks.row_end, b, 0, query, 0)) : a->len_k;
}

/* Where the keys end that some of the queries has to choose from. */
static int64_t last_candidate(const fa_selection_args *call, const query_block *queries)
{
    int64_t last = 0;
    for (int64_t i = 0; i < queries->n; i++) {
        const int64_t allowed = allowed_keys(&call->attention, queries->b, queries->query + i);
        if (allowed > call->top_k) last = larger(last, allowed - call->last);
    }
    return call->top_k > call->first + call->last ? last : 0;
}

static void load_query_tile(const fa_selection_args *call, const fa_selection_plan *plan, const query_block *queries,
                            int64_t i, int bf16, query_tile *tile)
{
    const fa_attention_args *a = &call->attention;
    const int64_t group = a->heads_q / a->heads_kv;
    row_block *rows = &tile->rows;
    rows->b = queries->b;
    if (plan->by_pairs) {
        rows->h_kv = queries->h_kv, rows->group = group, rows->row0 = i * BLOCK_Q;
        rows->n = smaller(BLOCK_Q, queries->n * group - rows->row0);
    } else {
        rows->h_kv = queries->h_kv * group + i, rows->group = 1, rows->row0 = queries->query;
        rows->n = queries->n;
    }
    load_queries(a, rows, bf16, 1, tile->qt);
    if (!call->weights.data) return;
    memset(tile->weight, 0, BLOCK_Q * sizeof(lane));
    EACH_ROW(rows, r, id) tile->weight[r] = *(const lane_u *)at_row(&call->weights, rows, id);
}

INLINE v_t v_add_score(int relu, int weighs, v_t s, v_t weight, v_t sum)
{
    const v_t score = relu ? v_max(v_splat(0), s) : s;
    return weighs ? v_fma(weight, score, sum) : sum + score;
}

/* sums (n, nv) += the scores of one head; `fresh`: sums hold nothing yet. */
INLINE void add_head_as(int nv, int relu, int weighs, int fresh, const query_tile *tile, const lane *s, int64_t n,
                        lane *sums)
{
    v_t weight[NV];
    UNROLL_FOR(int u = 0; u < nv; u++) weight[u] = weighs ? v_load(tile->weight + u * LANES) : v_splat(1);
    for (int64_t i = 0; i < n * BLOCK_Q; i += BLOCK_Q)
        UNROLL_FOR(int u = 0; u < nv; u++) {
            const v_t before = fresh ? v_splat(0) : v_load(sums + i + u * LANES);
            v_store(sums + i + u * LANES, v_add_score(relu, weighs, v_load(s + i + u * LANES), weight[u], before));
        }
}

/* rows of `to` += the scores s (n, BLOCK_Q) of (query, head) pairs; the first head of a group begins a row. */
INLINE void add_pairs_as(int relu, int weighs, const query_tile *tile, const lane *s, int64_t n, lane *by_row, lane *to,
                         int64_t pitch)
{
    const row_block *rows = &tile->rows;
    transpose(s, BLOCK_Q, n, rows->n, by_row, BLOCK_K);
    EACH_ROW(rows, r, id) {
        const int fresh = id.head == rows->h_kv * rows->group;
        const v_t weight = weighs ? v_splat(tile->weight[r]) : v_splat(1);
        lane *row = to + id.query * pitch;
        for (int64_t j = 0; j < n; j += LANES) {
            const v_t before = fresh ? v_splat(0) : v_load(row + j);
            v_store(row + j, v_add_score(relu, weighs, v_load(by_row + r * BLOCK_K + j), weight, before));
        }
    }
}

#define WITH_SCORE(call, ...)                                                                                          \
    WITH_FLAG((call)->relu, relu, WITH_FLAG((call)->weights.data != NULL, weighs, __VA_ARGS__))

NOINLINE void add_head(const fa_selection_args *call, int fresh, const query_tile *tile, const lane *s, int64_t n,
                       lane *sums)
{
    WITH_SCORE(call, WITH_NV(tile->rows.n <= LANES ? 1 : NV, literal,
                             add_head_as(literal, relu, weighs, fresh, tile, s, n, sums)));
}

NOINLINE void add_pairs(const fa_selection_args *call, const query_tile *tile, const lane *s, int64_t n, lane *by_row,
                        lane *to, int64_t pitch)
{
    WITH_SCORE(call, add_pairs_as(relu, weighs, tile, s, n, by_row, to, pitch));
}

/* Asks for part `i` of `parts` of the block of keys from `first` on: all at once would wait for one another. */
INLINE void prefetch_part(const fa_attention_args *a, const row_block *keys, int64_t first, int64_t last, int64_t i,
                          int64_t parts)
{
    const int64_t j0 = first + i * BLOCK_K / parts, n = smaller(first + (i + 1) * BLOCK_K / parts, last) - j0;
    if (n > 0) prefetch_keys(&a->k, keys, j0, n, a->head_dim);
}

/* Rows of scores `to`, `pitch` lanes apart, of keys [begin, end); begin is a multiple of BLOCK_K. 0: given up. */
INLINE int score_keys_as(const fa_selection_args *call, const fa_selection_plan *plan, int bf16,
                         const query_block *queries, int64_t begin, int64_t end, lane *to, int64_t pitch,
                         selection_scratch *scratch)
{
    const fa_attention_args *a = &call->attention;
    const row_block keys = {.b = queries->b, .h_kv = queries->h_kv};
    const int64_t step = V_AMX && bf16 ? AMX_KEYS : BLOCK_K;
    int64_t asked = 0;
    for (int64_t i = 0; i < plan->tiles; i++) load_query_tile(call, plan, queries, i, bf16, scratch->tiles + i);
    for (int64_t j0 = begin; j0 < end; j0 += BLOCK_K) {
        const int64_t n = smaller(BLOCK_K, end - j0);
        outer_product product = {.pitch = BLOCK_Q, .factor = 1};
        product.x = bf16 ? rows_as_pairs(&a->k, NULL, &keys, j0, n, a->head_dim, 0, scratch->k, &product.x_row)
                         : rows_as_lanes(&a->k, &a->k_scale, &keys, j0, n, a->head_dim, 0, scratch->k, &product.x_row);
        product.depth = bf16 ? padded_k(a->head_dim) / 2 : a->head_dim;
        const int64_t pieces = ceil_div(n, step), all = plan->tiles * pieces;
        for (int64_t p = 0; p <= all; p++) { /* scores wait for the next piece: by then those of AMX are in the cache */
            if (p < all) {
                const query_tile *tile = scratch->tiles + p / pieces;
                const int64_t c = p % pieces * step, some = smaller(step, n - c);
                outer_product part = product;
                prefetch_part(a, &keys, j0 + BLOCK_K, end, p, all);
                part.x += c * product.x_row, part.y = tile->qt, part.out = scratch->s[p % 2];
                if (tile->rows.n <= LANES) product_scores(1, bf16, some, &part, NULL);
                else product_scores(NV, bf16, some, &part, NULL);
            }
            if (!p) continue;
            const query_tile *before = scratch->tiles + (p - 1) / pieces;
            const int64_t c = (p - 1) % pieces * step, some = smaller(step, n - c);
            const lane *s = scratch->s[(p - 1) % 2];
            if (plan->by_pairs) add_pairs(call, before, s, some, scratch->by_row, to + j0 + c, pitch);
            else add_head(call, before == scratch->tiles, before, s, some, scratch->sums + c * BLOCK_Q);
            if (++asked % SELECTION_ASKS) continue;
            if (given_up(a->watch)) return 0;
            if (bf16) amx_begin(); /* whoever was asked may have used them */
        }
        if (!plan->by_pairs) transpose(scratch->sums, BLOCK_Q, n, queries->n, to + j0, pitch);
    }
    return 1;
}

static int score_keys(const fa_selection_args *call, const fa_selection_plan *plan, const query_block *queries,
                      int64_t begin, int64_t end, lane *to, int64_t pitch, selection_scratch *scratch)
{
    if (!takes_pairs(&call->attention)) return score_keys_as(call, plan, 0, queries, begin, end, to, pitch, scratch);
    amx_begin();
    const int done = score_keys_as(call, plan, 1, queries, begin, end, to, pitch, scratch);
    amx_end();
    return done;
}

/* The numbers that a query selects; `s` are its scores, of all keys from 0 on that it has to choose from. */
static void select_of_query(const fa_selection_args *call, const query_block *queries, int64_t i, const lane *s,
                            selection_scratch *scratch)
{
    const int64_t query = queries->query + i, allowed = allowed_keys(&call->attention, queries->b, query);
    const int64_t all = smaller(allowed, call->top_k), last = allowed - call->last;
    const int64_t k = call->top_k - call->first - call->last;
    int64_u *to = (int64_u *)at(&call->selected, queries->b, queries->h_kv, query, 0);
    if (allowed <= call->top_k) {
        for (int64_t j = 0; j < call->top_k; j++) to[j] = j < all ? j : -1;
        return;
    }
    for (int64_t j = 0; j < call->first; j++) to[j] = j;
    to += call->first;
    if (k)
        list_largest(call->attention.watch, s + call->first, last - call->first, k, call->first, &scratch->choice, to);
    for (int64_t j = 0; j < call->last; j++) to[k + j] = last + j;
}

/* With `runs`: a run of keys of the scores of a task's queries. */
static void selection_score(const fa_selection_args *call, const fa_selection_plan *plan, int64_t task, void *memory)
{
    selection_scratch scratch;
    cut_selection(&(arena){.memory = memory}, call, plan, &scratch);
    const query_block queries = queries_of_task(call, plan, task / plan->runs);
    const int64_t begin = task % plan->runs * plan->run_k;
    const int64_t end = smaller(begin + plan->run_k, last_candidate(call, &queries));
    lane *to = (lane *)at(&call->scores, queries.b, queries.h_kv, queries.query, 0);
    score_keys(call, plan, &queries, begin, end, to, call->scores.row / (int64_t)sizeof(lane), &scratch);
}

static void selection_run(const fa_selection_args *call, const fa_selection_plan *plan, int64_t task, void *memory)
{
    const fa_attention_args *a = &call->attention;
    selection_scratch scratch;
    cut_selection(&(arena){.memory = memory}, call, plan, &scratch);
    const query_block queries = queries_of_task(call, plan, task);
    const int64_t begin = call->first / BLOCK_K * BLOCK_K, end = last_candidate(call, &queries);
    if (!call->scores.data && !score_keys(call, plan, &queries, begin, end, scratch.scores, plan->pitch, &scratch))
        return;
    for (int64_t i = 0; i < queries.n; i++) {
        const lane *s = scratch.scores + i * plan->pitch;
        if (call->scores.data) s = (const lane *)at(&call->scores, queries.b, queries.h_kv, queries.query + i, 0);
        select_of_query(call, &queries, i, s, &scratch);
        if (given_up(a->watch)) return;
    }
}
