/* One task of the few-row kernel: the few rows of one KV head against a run of keys, head_dim (scores) and head_dim_v
 * (accumulators) on the lanes. It reads K and V once, at the speed of the memory, and computes next to nothing.
 *
 *     for each block of keys that some row attends:
 *         s (rows, keys) = dot products of whole vectors, summed LANES at a time     narrow keys are widened on the way;
 *                                                                                    FA_I4: few_int4.inc.h, and below
 *         int8: s = s times the scales of the keys, and below, p V = (p times the scales of the values) V
 *         s = modifiers and masks of s                                              modifiers.inc.h, keys on the lanes
 *         p, m, l = online softmax of s, row by row
 *         acc (rows, head_dim_v) = alpha acc + p V
 *
 * Literals  dtype: of K and V. nr, rows at a time: 1, 2 or 4. nd, vectors of head_dim_v at a time: 1 or FEW_NV.
 * Exports   FEW_ROWS, few_scratch, cut_few_scratch; few_score_product, few_scores; few_attend. */
#pragma once
#include "modifiers.inc.h"
#include "partial.inc.h"
#include "nonfinite.inc.h"
#include "sigmoid.inc.h"
#include "philox.inc.h"
#include "few_int4.inc.h"

#define FEW_ROWS 8 /* most rows per KV head of this kernel, which also wants len_k > len_q (attention_plan) */
#define FEW_NV 4   /* 4 rows x 4 vectors of accumulators fit 32 registers */
#define FEW_RUN 16 /* least rows of blocks that are read where they are; of fewer, keys would be scored one by one */

typedef struct {
    lane *q;                   /* (FEW_ROWS, depth), depth = head_dim rounded up to whole vectors, filled with 0 */
    lane *s, *add;             /* (FEW_ROWS, BLOCK_K) */
    lane *v;                   /* (BLOCK_K, head_dim_v): values without those that are not finite, in V's dtype */
    lane *base, *factor;       /* (FEW_ROWS): the rows' norm, in the second pass */
    lane *scale;               /* (BLOCK_K): of int8 keys, then of their values */
    char *listed_k, *listed_v; /* (BLOCK_K, head_dim), (BLOCK_K, head_dim_v), in their dtype: rows that blocks name */
    int64_t depth;
    few_int4 int4;
    philox_key drop;
} few_scratch;

static int64_t cut_few_scratch(arena *from, const fa_attention_args *a, few_scratch *scratch, row_block *rows)
{
    scratch->depth = round_up(a->head_dim, LANES);
    CUT_LANES(from, FEW_ROWS * scratch->depth, &scratch->q);
    CUT_LANES(from, FEW_ROWS * BLOCK_K, &scratch->s, &scratch->add);
    CUT_LANES(from, BLOCK_K * a->head_dim_v, &scratch->v);
    CUT_LANES(from, FEW_ROWS, &scratch->base, &scratch->factor);
    CUT_LANES(from, BLOCK_K, &scratch->scale);
    CUT(from, scratch->listed_k, a->k.blocks ? BLOCK_K * row_size(a->k.dtype, a->head_dim) : 0);
    CUT(from, scratch->listed_v, a->v.blocks ? BLOCK_K * row_size(a->v.dtype, a->head_dim_v) : 0);
    cut_few_int4(from, a, FEW_ROWS, &scratch->int4);
    cut_rows(from, FEW_ROWS, rows);
    return from->used;
}

/* Rows of `bytes` that are fetched meanwhile: one for each row that is read. Keys and values are read in turns, and the
 * hardware's own prefetching would start anew at every turn. So while rows of one are used, the other is fetched. */
typedef struct {
    const char *data; /* NULL: nothing */
    int64_t row, bytes;
} fetch_ahead;

/* s (rows, n) = q (rows, depth) k (n, head_dim)^T */
typedef struct {
    const char *k;
    int64_t k_row, n, head_dim, depth;
    const lane *q;
    fetch_ahead next; /* beside the first rows */
    lane *s;          /* (rows, BLOCK_K) */
} few_score_product;

/* Scores of nr rows from r0 on and LANES / nr keys from j0 on: one vector of sums. */
INLINE void few_sums(fa_dtype dtype, int nr, const few_score_product *p, int64_t r0, int64_t j0)
{
    const int keys = LANES / nr;
    const int64_t size = dtype_size(dtype), depth = p->depth, whole = p->head_dim / LANES * LANES;
    const char *k = p->k + j0 * p->k_row;
    const lane *q = p->q + r0 * depth;
    v_t acc[LANES];
    UNROLL_FOR(int i = 0; i < LANES; i++) acc[i] = v_splat(0);
    for (int64_t d = 0; d < whole; d += LANES)
        UNROLL_FOR(int j = 0; j < keys; j++) {
            const v_t key = v_load_as(dtype, k + j * p->k_row + d * size);
            UNROLL_FOR(int r = 0; r < nr; r++)
                acc[r * keys + j] = v_fma(key, v_load(q + r * depth + d), acc[r * keys + j]);
        }
    if (whole < p->head_dim)
        for (int j = 0; j < keys; j++) {
            const v_t key = v_load_as_n(dtype, k + j * p->k_row + whole * size, p->head_dim - whole);
            for (int r = 0; r < nr; r++)
                acc[r * keys + j] = v_fma(key, v_load(q + r * depth + whole), acc[r * keys + j]);
        }
    const v_t sums = v_sum_each(acc);
    lane each[LANES];
    v_store(each, sums);
    UNROLL_FOR(int r = 0; r < nr; r++) memcpy(p->s + (r0 + r) * BLOCK_K + j0, each + r * keys, keys * sizeof(lane));
}

/* As v_sum_each adds the lanes: a key's score must not depend on how many keys stand behind it. */
INLINE lane sum_as_each(v_t acc)
{
    lane x[LANES];
    v_store(x, acc);
    UNROLL_FOR(int n = LANES / 2; n; n /= 2)
        UNROLL_FOR(int i = 0; i < n; i++) x[i] += x[i + n];
    return x[0];
}

/* All scores of nr rows from r0 on. Keys past the last whole tile go one by one. */
INLINE void few_scores(fa_dtype dtype, int nr, const few_score_product *p, int64_t r0)
{
    const int keys = LANES / nr, fetch = r0 == 0 && p->next.data;
    int64_t j = 0;
    for (; j + keys <= p->n; j += keys) {
        if (fetch) prefetch_rows(p->next.data + j * p->next.row, p->next.row, keys, p->next.bytes);
        /* The next tile's keys, into the first-level cache. The hardware's prefetching alone finds them or not by where
         * the loop happens to lie in memory: 16 heads of 4096 keys for 64 queries took 2.0 ms or 2.7. */
        for (int64_t i = j + keys; i < smaller(j + 2 * keys, p->n); i++)
            for (int64_t d = 0; d < p->head_dim * dtype_size(dtype); d += 64)
                __builtin_prefetch(p->k + i * p->k_row + d, 0, 3);
        few_sums(dtype, nr, p, r0, j);
    }
    for (; j < p->n; j++)
        for (int64_t r = r0; r < r0 + nr; r++) {
            const char *k = p->k + j * p->k_row;
            const lane *q = p->q + r * p->depth;
            v_t acc = v_splat(0);
            int64_t d = 0;
            for (; d + LANES <= p->head_dim; d += LANES)
                acc = v_fma(v_load_as(dtype, k + d * dtype_size(dtype)), v_load(q + d), acc);
            if (d < p->head_dim)
                acc = v_fma(v_load_as_n(dtype, k + d * dtype_size(dtype), p->head_dim - d), v_load(q + d), acc);
            p->s[r * BLOCK_K + j] = sum_as_each(acc);
        }
}

/* A block's keys in runs, number i up to end[i], whose rows are at one distance: of K, of V, and of the keys that are
 * fetched while V is read, or NULL. */
typedef struct {
    int64_t n, end[BLOCK_K / FEW_RUN + 1];
    const char *k[BLOCK_K / FEW_RUN + 1], *v[BLOCK_K / FEW_RUN + 1], *ahead[BLOCK_K / FEW_RUN + 1];
} key_runs;

/* Those of n keys from j0 on. Of the next n keys, the same runs are fetched. */
INLINE void find_runs(const fa_attention_args *a, const row_block *rows, int64_t j0, int64_t n, key_runs *runs)
{
    const int more = j0 + 2 * n <= a->len_k;
    runs->n = 0;
    for (int64_t j = 0; j < n; runs->n++) {
        runs->k[runs->n] = at_key(&a->k, rows, j0 + j), runs->v[runs->n] = at_key(&a->v, rows, j0 + j);
        runs->ahead[runs->n] = more ? at_key(&a->k, rows, j0 + n + j) : NULL;
        if (a->k.blocks && j0 + j + 3 * n <= a->len_k) { /* first lines of pages: their addresses are then known */
            prefetch_rows(at_key(&a->k, rows, j0 + j + 2 * n), 0, 1, 1);
            prefetch_rows(at_key(&a->v, rows, j0 + j + n), 0, 1, 1);
        }
        runs->end[runs->n] = j += run_of_rows(&a->k, j0 + j, n - j);
    }
}

/* acc (rows, head_dim_v) = alpha acc + probs (rows, n) v (n, head_dim_v) */
typedef struct {
    const key_runs *runs;
    int64_t v_row, ahead_row, ahead_bytes, head_dim_v;
    const lane *probs, *alpha; /* (rows, BLOCK_K), (rows) */
    lane *acc;
    int64_t acc_row;
} few_value_product;

/* acc of nr rows from r0 on: nd vectors from dimension d on. The last has `last` lanes, or all where that is 0. */
INLINE void few_values(fa_dtype dtype, int nr, int nd, const few_value_product *p, int64_t r0, int64_t d, int64_t last)
{
    const int fetch = r0 == 0 && d == 0;
    const lane *probs = p->probs + r0 * BLOCK_K;
    v_t sum[4][FEW_NV];
    UNROLL_FOR(int r = 0; r < nr; r++)
        UNROLL_FOR(int c = 0; c < nd; c++) sum[r][c] = v_splat(0); /* added at the end, as in tile_values */
    const int64_t v_row = p->v_row, ahead_row = p->ahead_row, ahead_bytes = p->ahead_bytes;
    for (int64_t run = 0, j = 0; run < p->runs->n; run++) {
        const int64_t end = p->runs->end[run];
        const char *v = p->runs->v[run] + d * dtype_size(dtype), *ahead = fetch ? p->runs->ahead[run] : NULL;
        for (; j < end; j++, v += v_row) {
            if (ahead) prefetch_rows(ahead, ahead_row, 1, ahead_bytes), ahead += ahead_row;
            UNROLL_FOR(int c = 0; c < nd; c++) {
                const char *from = v + c * LANES * dtype_size(dtype);
                const v_t value = last && c == nd - 1 ? v_load_as_n(dtype, from, last) : v_load_as(dtype, from);
                UNROLL_FOR(int r = 0; r < nr; r++) sum[r][c] = v_fma(v_splat(probs[r * BLOCK_K + j]), value, sum[r][c]);
            }
        }
    }
    UNROLL_FOR(int r = 0; r < nr; r++)
        UNROLL_FOR(int c = 0; c < nd; c++) {
            lane *to = p->acc + (r0 + r) * p->acc_row + d + c * LANES;
            v_store(to, v_fma(v_load(to), v_splat(p->alpha[r0 + r]), sum[r][c]));
        }
}

/* All of acc of nr rows from r0 on. */
INLINE void few_accumulate(fa_dtype dtype, int nr, const few_value_product *p, int64_t r0)
{
    const int64_t width = p->head_dim_v;
    int64_t d = 0;
    for (; d + FEW_NV * LANES <= width; d += FEW_NV * LANES) few_values(dtype, nr, FEW_NV, p, r0, d, 0);
    for (; d + LANES <= width; d += LANES) few_values(dtype, nr, 1, p, r0, d, 0);
    if (d < width) few_values(dtype, nr, 1, p, r0, d, width - d);
}

/* One row's online softmax over s (n), as softmax_update; returns alpha. In whole vectors, what is past n becomes 0. */
INLINE lane few_softmax(lane *s, int64_t n, lane *row_max, lane *row_sum, lane *row_log)
{
    v_t max = v_splat(*row_max), sum = v_splat(0), log = v_splat(0);
    for (int64_t j = n; j < round_up(n, LANES); j++) s[j] = -INFINITY;
    for (int64_t j = 0; j < n; j += LANES) max = v_max(max, v_load(s + j));
    const lane new_max = v_max_lanes(max), base = new_max == -(lane)INFINITY ? 0 : new_max;
    for (int64_t j = 0; j < n; j += LANES) {
        const v_t x = v_load(s + j) - v_splat(base), prob = v_exp_prob(x);
        sum += prob;
        if (row_log) log = v_fma(prob, v_log_weight(x), log);
        v_store(s + j, prob);
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

/* Second pass, as weigh_tile. */
static void weigh_rows(const fa_attention_args *a, const score_tile *scores, const few_scratch *scratch)
{
    const row_block *rows = scores->rows;
    const int64_t n = scores->n;
    for (int64_t r = 0; r < rows->n; r++) {
        lane *s = scores->s + r * BLOCK_K;
        const lane base = scratch->base[r], factor = scratch->factor[r];
        for (int64_t j = 0; j < n; j += LANES)
            v_store(s + j, v_exp_prob(v_load(s + j) - v_splat(base)) * v_splat(factor));
        for (int64_t j = 0; hides(scores->kind) && factor != factor && j < n; j++)
            if (!row_attends(scores, r, j)) s[j] = 0;
    }
    if (a->stats.key_sums.data) add_rows_to_key_sums(a, rows, scores->s, scores->j0, n);
    if (a->stats.mean_weights.data) add_rows_to_mean(a, rows, scores->s, scores->j0, n);
}

/* Scores of int8 keys, of which s holds the products with q / WIDEST_I8: so these do not overflow before those would, if
 * scales are at least 1 / WIDEST_I8. A key whose scaled elements may not be finite, or whose scale is not, is scored as
 * it is defined. */
static void scale_scores(const fa_attention_args *a, const row_block *rows, int64_t j0, int64_t n,
                         const few_scratch *scratch)
{
    const int all = load_scales(&a->k_scale, rows, j0, n, WIDEST_I8, 0, scratch->scale);
    for (int64_t r = 0; r < rows->n; r++) {
        lane *s = scratch->s + r * BLOCK_K;
        for (int64_t j = 0; j < n; j += LANES) v_store(s + j, v_load(s + j) * v_load(scratch->scale + j));
    }
    for (int64_t j = 0; !all && j < n; j++) {
        const int8_t *k = (const int8_t *)at_key(&a->k, rows, j0 + j);
        const lane scale = scale_of(&a->k_scale, rows, j0 + j);
        if (is_plain(scale, 0)) continue;
        for (int64_t r = 0; r < rows->n; r++) {
            lane sum = 0;
            for (int64_t d = 0; d < a->head_dim; d++) sum += scratch->q[r * scratch->depth + d] * (k[d] * scale);
            scratch->s[r * BLOCK_K + j] = sum * WIDEST_I8;
        }
    }
}

/* The keys of a block whose int8 values would not be finite, or too small to be exact, with their scales in the
 * probabilities: they are added one by one. */
static void find_odd_scales(const fa_attention_args *a, const row_block *rows, int64_t j0, int64_t n,
                            const few_scratch *scratch, bad_rows *bad)
{
    bad->n = 0;
    if (load_scales(&a->v_scale, rows, j0, n, 1, LEAST_SCALE, scratch->scale)) return;
    for (int64_t j = 0; j < n; j++)
        if (!is_plain(scratch->scale[j], LEAST_SCALE)) bad->row[bad->n++] = j, scratch->scale[j] = 0;
}

/* weights (rows, n) = probabilities times the scales of int8 values. */
INLINE const lane *scaled_probs(const row_block *rows, int64_t n, const few_scratch *scratch, lane *weights)
{
    for (int64_t r = 0; r < rows->n; r++)
        for (int64_t j = 0; j < n; j += LANES)
            v_store(weights + r * BLOCK_K + j, v_load(scratch->s + r * BLOCK_K + j) * v_load(scratch->scale + j));
    return weights;
}

/* A run of keys, one block at most. */
INLINE void few_block(const fa_attention_args *a, fa_dtype dtype, const modifiers *mods, const row_block *rows,
                      key_run run, few_scratch *scratch, const partial *part)
{
    const int64_t j0 = run.j0, n = run.n, width = a->head_dim_v, size = dtype_size(dtype);
    block_kind kind = range_kind(rows, j0, n);
    if (adds(a, rows, run.mask)) kind |= BLOCK_ADDS | additive_rows(a, rows, j0, n, scratch->add);
    if (kind & BLOCK_EMPTY) return;
    const score_tile scores = {rows, NULL, j0, n, kind, scratch->s, scratch->add};

    const int gathers = dtype != FA_I4 && a->k.blocks && a->k.block_size < FEW_RUN;
    const int fetches = !gathers && !a->stats.second_pass;
    key_runs runs;
    few_score_product product = {.k_row = a->k.row, .head_dim = a->head_dim, .depth = scratch->depth, .q = scratch->q};
    if (dtype == FA_I4) {
        runs.n = 0;
        int4_scores(a, rows, j0, n, &scratch->int4, scratch->s);
    } else if (gathers) {
        prefetch_keys(&a->v, rows, j0, n, width);
        runs.n = 1, runs.end[0] = n, runs.ahead[0] = NULL;
        runs.k[0] = key_rows(&a->k, rows, j0, n, a->head_dim, scratch->listed_k, &product.k_row);
    } else find_runs(a, rows, j0, n, &runs);
    for (int64_t i = 0, j = 0; i < runs.n; j = runs.end[i++]) {
        product.k = runs.k[i], product.n = runs.end[i] - j, product.s = scratch->s + j;
        product.next = (fetch_ahead){fetches ? runs.v[i] : NULL, a->v.row, width * size};
#define SCORES(nr) few_scores(dtype, nr, &product, r)
        IN_FOURS_TWOS_ONES(rows, r, SCORES);
#undef SCORES
    }
    if (dtype == FA_I8) scale_scores(a, rows, j0, n, scratch);
    modify_rows(a, mods, &scores);
    if (a->stats.second_pass) {
        weigh_rows(a, &scores, scratch);
        return;
    }
    int64_t v_row = a->v.row;
    if (gathers || (hides(kind) && runs.n > 1)) { /* values that are taken out are looked for in one piece */
        runs.n = 1, runs.end[0] = n;
        runs.v[0] = key_rows(&a->v, rows, j0, n, width, scratch->listed_v, &v_row);
    }
    bad_rows bad;
    bad.n = 0; /* an initialiser would clear all of it, which shows in the time of a block */
    uint8_t attends[BLOCK_K][FEW_ROWS];
    if (dtype == FA_I8) find_odd_scales(a, rows, j0, n, scratch, &bad); /* the integers themselves are finite */
    else if (dtype == FA_I4) int4_value_scales(n, &scratch->int4, &bad);
    else if (hides(kind)) find_bad_rows(dtype, runs.v[0], v_row, n, width, &bad);
    if (dtype != FA_I8 && dtype != FA_I4 && bad.n) {
        copy_good_rows(&bad, runs.v[0], v_row, n, width * size, (char *)scratch->v);
        runs.v[0] = (const char *)scratch->v, v_row = width * size;
    }
    for (int64_t i = 0; i < bad.n; i++)
        for (int64_t r = 0; r < rows->n; r++) attends[i][r] = row_attends(&scores, r, bad.row[i]);

    lane alpha[FEW_ROWS];
    for (int64_t r = 0; r < rows->n; r++) {
        lane *s = scratch->s + r * BLOCK_K, *row_log = part->row_log ? part->row_log + r : NULL;
        if (a->stats.n_top) top_insert_row(a->stats.n_top, s, n, j0, row_top(a, part, r));
        alpha[r] = 1;
        if (a->sigmoid) few_sigmoid(s, n, (lane)a->sigmoid_bias);
        else alpha[r] = few_softmax(s, n, part->row_max + r, part->row_sum + r, row_log);
        for (int64_t j = 0; j < n && part->row_max[r] == -(lane)INFINITY; j++)
            if (row_attends(&scores, r, j)) part->row_max[r] = -LANE_MAX; /* as in mark_rows */
    }
    if (a->dropout > 0) drop_rows(a, rows, &scratch->drop, j0, n, scratch->s);
    few_value_product values = {
        .runs = &runs, .v_row = v_row, .head_dim_v = width, .probs = scratch->s, .alpha = alpha};
    if (dtype == FA_I8) values.probs = scaled_probs(rows, n, scratch, scratch->add); /* which is free by now */
    values.acc = part->acc, values.acc_row = part->acc_row;
    values.ahead_row = a->k.row, values.ahead_bytes = a->head_dim * size;
    if (dtype == FA_I4) int4_values(a, rows, j0, n, &scratch->int4, scratch->s, alpha, part->acc, part->acc_row);
    else {
        if (gathers) prefetch_keys(&a->k, rows, j0 + n, smaller(n, a->len_k - j0 - n), a->head_dim);
#define VALUES(nr) few_accumulate(dtype, nr, &values, r)
        IN_FOURS_TWOS_ONES(rows, r, VALUES);
#undef VALUES
    }
    for (int64_t i = 0; i < bad.n; i++)
        for (int64_t r = 0; r < rows->n; r++) {
            const char *v = at_key(&a->v, rows, j0 + bad.row[i]);
            const lane prob = scratch->s[r * BLOCK_K + bad.row[i]],
                       scale = scale_of(&a->v_scale, rows, j0 + bad.row[i]);
            for (int64_t d = 0; d < width && attends[i][r]; d++)
                part->acc[r * part->acc_row + d] += prob * (load_value(dtype, v, d) * scale);
        }
}

/* The state of the KV head's rows over keys [key_begin, key_end), as a partial. */
INLINE void few_attend_as(const fa_attention_args *a, fa_dtype dtype, row_block *rows, int64_t key_begin,
                          int64_t key_end, few_scratch *scratch, const partial *part)
{
    const modifiers mods = modifiers_of(a, 0);
    const lane q_share = dtype == FA_I8 ? (lane)1 / WIDEST_I8 : 1; /* scale_scores */
    ranges_begin(a, rows, key_begin, key_end);
    if (a->stats.second_pass) load_row_norm(a, rows, scratch->base, scratch->factor);
    if (a->dropout > 0) scratch->drop = philox_key_of(a);
    EACH_ROW(rows, r, id) {
        lane *q = scratch->q + r * scratch->depth;
        for (int64_t d = a->head_dim; d < scratch->depth; d++) q[d] = 0;
        load_row(a->q.dtype, at_row(&a->q, rows, id), a->head_dim, mods.q_factor * q_share, q);
        if (dtype == FA_I4) int4_query(&scratch->int4, r, q);
        if (a->stats.second_pass) continue;
        part->row_max[r] = a->sigmoid ? 0 : -INFINITY;
        part->row_sum[r] = 0;
        if (part->row_log) part->row_log[r] = 0;
        for (int64_t i = 0; i < a->stats.n_top; i++) row_top(a, part, r).score[i] = -INFINITY;
        for (int64_t d = 0; d < part->acc_row; d++) part->acc[r * part->acc_row + d] = 0;
    }
    for (key_walk walk = walk_begin(rows, 1, 0, a->masks.ranges != NULL, 1, key_end); walk_next(&walk);) {
        const key_run run = masked_run(a, rows, 1, walk.begin, walk.end - walk.begin);
        if (run.mask != BLOCK_EMPTY) few_block(a, dtype, &mods, rows, run, scratch, part);
    }
}

static void few_attend(const fa_attention_args *a, row_block *rows, int64_t key_begin, int64_t key_end,
                       few_scratch *scratch, const partial *part)
{
    if (a->k.dtype == FA_I8) few_attend_as(a, FA_I8, rows, key_begin, key_end, scratch, part);
    else if (LANE_BITS == 32 && a->k.dtype == FA_I4) few_attend_as(a, FA_I4, rows, key_begin, key_end, scratch, part);
    else WITH_DTYPE(a->k.dtype, dtype, few_attend_as(a, dtype, rows, key_begin, key_end, scratch, part));
}
