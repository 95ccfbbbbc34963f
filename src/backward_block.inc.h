/* The operands of the backward pass, as tiles read them: a block of keys, and a tile of queries. And what all threads
 * share.
 *
 * Literals  bf16; dtype: of q, out and dout.
 * Exports   BACK_FOLD, back_subs, back_scratch, cut_back_scratch; query_state, back_shared, cut_back_shared,
 *           few_queries, query_blocks; head_rows, name_back_keys, load_back_keys, fold_keys, store_keys,
 *           load_scaled_rows, load_back_rows, row_product. */
#pragma once
#include "backward_tile.inc.h"

#define BACK_SUBS 4  /* most blocks of the grid that a task takes */
#define BACK_FOLD 64 /* queries' blocks that dK and dV are summed over, before they are added to what came before */

/* Of keys times dimensions 16K: five such arrays fit a second-level cache. */
INLINE int64_t back_subs(const fa_attention_args *a)
{
    return larger(1, smaller(BACK_SUBS, 16384 / BLOCK_K / larger(a->head_dim, a->head_dim_v)));
}
/* Few queries: the probabilities of a row are normalised again. lse in float32 is off by up to half a unit in its last
 * place, and they by as much of themselves; where many rows add to a key's gradient this evens out. */
INLINE int few_queries(const fa_attention_args *a)
{
    return a->len_q <= FEW_ROWS && a->q.dtype == LANE_DTYPE && !a->sigmoid;
}
INLINE int64_t query_blocks(const fa_attention_args *a) { return ceil_div(a->len_q, BACK_Q); }

/* Of a block of queries of a head, from begin(): between which keys lie those that its rows attend; whether q and dO are
 * finite. And in run(): the block of keys that adds to dQ next, and from which key on, with lists, some row attends. */
typedef struct {
    int64_t first, last, full_first, full_last, plain;
    int64_t turn, next;
    int64_t unused; /* a cache line each: threads write to neighbours */
} query_state;

/* What all threads share; heads are those of q of all items of the batch. */
typedef struct {
    query_state *states; /* (heads, query_blocks) */
    lane *delta, *norm;  /* (heads, len_q); norm of few queries alone: what makes the sum of P 1 */
    lane *dq;            /* (heads, len_q, head_dim), if dq is not of lanes */
    double *sums;        /* (blocks of keys, heads, N_HEAD_SUMS): back_tile.sums */
    double *row_sums;    /* (blocks of keys, heads, len_q): of P, with few queries */
    int64_t *bias_turns; /* (blocks of keys, query_blocks), if heads share a dbias: how many have added to it */
    int64_t *folded;     /* heads of tasks that have added to dbias_diagonals */
} back_shared;

static int64_t cut_back_shared(arena *from, const fa_backward_args *call, back_shared *shared)
{
    const fa_attention_args *a = &call->attention;
    const int64_t heads = a->batch * a->heads_q, blocks = ceil_div(a->len_k, back_subs(a) * BLOCK_K);
    const int apart = call->dq.data && call->dq.dtype != LANE_DTYPE;
    CUT(from, shared->states, heads * query_blocks(a));
    CUT(from, shared->delta, heads * a->len_q);
    CUT(from, shared->norm, few_queries(a) ? heads * a->len_q : 0);
    CUT(from, shared->row_sums, few_queries(a) ? blocks * heads * a->len_q : 0);
    CUT(from, shared->dq, apart ? heads * a->len_q * a->head_dim : 0);
    CUT(from, shared->sums, has_head_sums(&call->dmods) ? N_HEAD_SUMS * heads * blocks : 0);
    CUT(from, shared->bias_turns, call->bias_shared ? blocks * query_blocks(a) : 0);
    CUT(from, shared->folded, 1);
    return from->used;
}

typedef struct {
    back_tile tile;
    back_keys keys[BACK_SUBS];
    back_rows queries;
    lane *q, *dout, *q_sum, *dout_sum, *scaled; /* copies of queries: (BACK_Q, whole vectors) */
    lane *copy;                                 /* (BLOCK_K, whole vectors): keys, and their gradients row by row */
} back_scratch;

static int64_t cut_back_scratch(arena *from, const fa_backward_args *call, back_scratch *scratch)
{
    const fa_attention_args *a = &call->attention;
    const int64_t width = round_up(a->head_dim, LANES), width_v = round_up(a->head_dim_v, LANES);
    cut_back_tile(from, call, &scratch->tile);
    for (int i = 0; i < back_subs(a); i++) {
        back_keys *keys = scratch->keys + i;
        CUT_LANES(from, BLOCK_K * width, &keys->kt, &keys->k, &keys->dkt, &keys->dkt_sum);
        CUT_LANES(from, BLOCK_K * width_v, &keys->vt, &keys->dvt, &keys->dvt_sum);
    }
    CUT_LANES(from, BACK_Q * width, &scratch->q, &scratch->q_sum, &scratch->scaled);
    CUT_LANES(from, BACK_Q * width_v, &scratch->dout, &scratch->dout_sum);
    CUT_LANES(from, BLOCK_K * larger(width, width_v), &scratch->copy);
    CUT(from, scratch->queries.base, BACK_Q);
    cut_rows(from, BACK_Q, &scratch->queries.rows);
    return from->used;
}

/* Queries [first, first + n) of head h of q. */
INLINE void head_rows(int64_t b, int64_t h, int64_t first, int64_t n, row_block *rows)
{
    rows->b = b, rows->h_kv = h, rows->group = 1, rows->row0 = first, rows->n = n;
}

/* Block `keys` from key `first` on, of the KV head that `rows` names. */
static void name_back_keys(const fa_attention_args *a, const row_block *rows, int64_t first, back_keys *keys)
{
    keys->first = first, keys->n = smaller(BLOCK_K, a->len_k - first), keys->source = at_key(&a->k, rows, first);
}

/* to (width, BLOCK_K) = x^T; with bf16 in pairs, which are 0 up to a whole step. */
static void keys_to_lanes(fa_dtype dtype, int bf16, const char *const *x, int64_t width, lane *to)
{
    const int64_t rows = bf16 ? ceil_div(width, 2) : width, whole = bf16 ? padded_k(width) / 2 : width;
    transpose_rows(dtype, bf16, x, BLOCK_K, width, 1, BLOCK_K, to);
    memset(to + rows * BLOCK_K, 0, (whole - rows) * BLOCK_K * sizeof(lane));
}

/* The same, as products read it. */
static void load_back_keys(const fa_attention_args *a, int bf16, const row_block *rows, int64_t first,
                           back_scratch *scratch, back_keys *keys)
{
    name_back_keys(a, rows, first, keys);
    const int64_t n = keys->n, width = scratch->tile.width;
    const int64_t size = bf16 ? 2 : (int64_t)sizeof(lane);
    const char *k[BLOCK_K] = {NULL}, *v[BLOCK_K] = {NULL};
    keys->fresh = 1, keys->summed = 0;
    for (int64_t j = 0; j < n; j++) k[j] = at_key(&a->k, rows, first + j), v[j] = at_key(&a->v, rows, first + j);
    if (!few_queries(a)) keys_to_lanes(a->k.dtype, bf16, k, a->head_dim, keys->kt);
    keys_to_lanes(a->v.dtype, bf16, v, a->head_dim_v, keys->vt);
    char *copy = (char *)(bf16 ? scratch->copy : keys->k);
    for (int64_t j = 0; j < n; j++) {
        char *row = copy + j * width * size;
        memset(row, 0, width * size);
        if (bf16) memcpy(row, k[j], a->head_dim * 2);
        else load_row(a->k.dtype, k[j], a->head_dim, 1, (lane *)row);
    }
    bad_rows bad;
    find_bad_rows_of(a->k.dtype, k[0], a->k.row, n, a->head_dim, &bad);
    for (int64_t i = 0; i < bad.n; i++) memset(copy + bad.row[i] * width * size, 0, width * size);
    if (!bf16) return;
    pair_values(copy, width * 2, n, width, width, keys->k);
    for (int64_t j = round_up(n, 2); j < round_up(n, key_step(bf16)); j += 2)
        memset(keys->k + j / 2 * width, 0, width * sizeof(lane));
}

/* Adds what the block's gradients are so far to those of the queries before. */
static void fold_keys(const fa_attention_args *a, back_keys *keys)
{
    if (keys->fresh) return;
    for (int64_t i = 0; i < a->head_dim * BLOCK_K; i += LANES)
        v_store(keys->dkt_sum + i, v_load(keys->dkt + i) + (keys->summed ? v_load(keys->dkt_sum + i) : v_splat(0)));
    for (int64_t i = 0; i < a->head_dim_v * BLOCK_K; i += LANES)
        v_store(keys->dvt_sum + i, v_load(keys->dvt + i) + (keys->summed ? v_load(keys->dvt_sum + i) : v_splat(0)));
    keys->fresh = 1, keys->summed = 1;
}

/* A gradient of the block's keys, x (rows of n keys, width) = factor * transpose(xt), or 0 if no query attends them.
 * Where nothing was folded, xt is what is there yet. */
static void store_key_rows(const fa_array *x, const row_block *rows, const back_keys *keys, const lane *xt,
                           int64_t width, lane factor, lane *by_row)
{
    const int64_t pitch = round_up(width, LANES);
    if (!x->data) return;
    if (keys->summed || !keys->fresh) transpose(xt, BLOCK_K, width, keys->n, by_row, pitch);
    else memset(by_row, 0, keys->n * pitch * sizeof(lane));
    for (int64_t j = 0; j < keys->n; j++)
        store_row(x->dtype, by_row + j * pitch, width, factor, at_key(x, rows, keys->first + j));
}

static void store_keys(const fa_backward_args *call, const row_block *rows, back_scratch *scratch, back_keys *keys)
{
    const fa_attention_args *a = &call->attention;
    if (keys->summed) fold_keys(a, keys);
    const lane *dkt = keys->summed ? keys->dkt_sum : keys->dkt, *dvt = keys->summed ? keys->dvt_sum : keys->dvt;
    store_key_rows(&call->dk, rows, keys, dkt, a->head_dim, (lane)a->mods.scale, scratch->copy);
    store_key_rows(&call->dv, rows, keys, dvt, a->head_dim_v, 1, scratch->copy);
}

/* Rows of x, (rows, width), as the scores' products read them: in place or in `copy`. */
INLINE const char *rows_of_products(int bf16, const fa_array *x, const row_block *rows, int64_t width, lane *copy,
                                    int64_t *row_bytes)
{
    if (!bf16) return rows_as_lanes(x, &(fa_array){0}, rows, rows->row0, rows->n, width, 0, copy, row_bytes);
    return rows_as_pairs(x, NULL, rows, rows->row0, rows->n, width, 0, copy, row_bytes);
}

/* The same rows as sums over them read them: those in place, unless some are not finite or pairs are to be made. */
INLINE const char *rows_of_sums(int bf16, const fa_array *x, const row_block *rows, int64_t width, int plain,
                                const char *made, int64_t made_row, lane *copy, bad_rows *bad, int64_t *row_bytes)
{
    bad->n = 0;
    *row_bytes = made_row;
    if (!plain) find_bad_rows_of(x->dtype, at_key(x, rows, rows->row0), x->row, rows->n, width, bad);
    if (!bf16 && !bad->n) return made;
    *row_bytes = width * (int64_t)sizeof(lane);
    if (!bf16) {
        copy_good_rows(bad, made, made_row, rows->n, *row_bytes, (char *)copy);
        return (const char *)copy;
    }
    *row_bytes = padded_v(width) * (int64_t)sizeof(lane);
    pair_rows(made, made_row, rows->n, width, copy);
    for (int64_t i = 0; i < bad->n; i++) clear_paired_row(bad->row[i], width, copy);
    return (const char *)copy;
}

/* The queries that queries->rows names, with their scores' factor: so they have the bits that the forward pass
 * multiplies keys by. And their lse. Returns them without the factor. */
static const char *load_scaled_rows(const fa_attention_args *a, const modifiers *mods, int bf16, back_scratch *scratch,
                                    int64_t *row_bytes)
{
    back_rows *queries = &scratch->queries;
    const row_block *rows = &queries->rows;
    const int64_t width = scratch->tile.width;
    for (int64_t r = 0; r < rows->n; r++) {
        queries->base[r] = a->sigmoid ? 0 : *(const lane_u *)at(&a->lse, rows->b, rows->h_kv, rows->row0 + r, 0);
        if (queries->base[r] == -(lane)INFINITY) queries->base[r] = INFINITY;
    }
    const char *q = rows_of_products(bf16, &a->q, rows, a->head_dim, scratch->q, row_bytes);
    queries->q = q, queries->q_row = *row_bytes;
    if (bf16) return q; /* its products have the factor */
    for (int64_t r = 0; r < rows->n; r++)
        for (int64_t d = 0; d < width; d += LANES) {
            const lane *from = (const lane *)(q + r * *row_bytes) + d;
            v_store(scratch->scaled + r * width + d, v_load_part(from, a->head_dim - d) * v_splat(mods->q_factor));
        }
    queries->q = (const char *)scratch->scaled, queries->q_row = width * (int64_t)sizeof(lane);
    return q;
}

/* The queries that queries->rows names; delta and, of few queries, norm are their first row's. */
static void load_back_rows(const fa_backward_args *call, const modifiers *mods, int bf16, const query_state *state,
                           const lane *delta, const lane *norm, back_scratch *scratch)
{
    const fa_attention_args *a = &call->attention;
    back_rows *queries = &scratch->queries;
    const row_block *rows = &queries->rows;
    bad_rows bad;
    int64_t q_row;
    queries->delta = delta, queries->norm = norm;
    const char *q = load_scaled_rows(a, mods, bf16, scratch, &q_row);
    queries->dout = rows_of_products(bf16, &call->dout, rows, a->head_dim_v, scratch->dout, &queries->dout_row);
    queries->q_sum = rows_of_sums(bf16, &a->q, rows, a->head_dim, (int)state->plain, q, q_row, scratch->q_sum, &bad,
                                  &queries->q_sum_row);
    queries->dout_sum = rows_of_sums(bf16, &call->dout, rows, a->head_dim_v, (int)state->plain, queries->dout,
                                     queries->dout_row, scratch->dout_sum, &queries->bad, &queries->dout_sum_row);
}

/* sum(out * dout) of a row. */
INLINE lane row_product_as(fa_dtype dtype, const char *out, const char *dout, int64_t width)
{
    v_t sum = v_splat(0);
    for (int64_t d = 0; d < width; d += LANES) {
        const int64_t at = d * dtype_size(dtype);
        sum = v_fma(v_load_as_part(dtype, out + at, width - d), v_load_as_part(dtype, dout + at, width - d), sum);
    }
    return v_sum(sum);
}

static lane row_product(fa_dtype from, const char *out, const char *dout, int64_t width)
{
    lane sum;
    WITH_DTYPE(from, dtype, sum = row_product_as(dtype, out, dout, width));
    return sum;
}
