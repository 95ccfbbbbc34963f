/* The rows of k that are nearest to each query: those whose products with it are largest. Products are
 *
 *     FA_LANES  of lanes; a row of k that is no lanes is widened
 *     FA_WHOLE  of signed bytes, whole numbers
 *     FA_BITS   of bits: minus the number of those that differ
 *
 * A task is some queries and a run of rows:
 *
 *     for each block of rows:
 *         for each few of them, for each few queries:  s = q k^T    lanes along the row
 *         for each query:  rows whose s is above the least of its best join its candidates
 *                          of many candidates, the best stay
 *
 * finish() then chooses from the best of all runs. A product adds the same numbers in the same order whatever is
 * computed beside it, and of equal ones the first row is nearer: neither the cut into tasks nor other queries change
 * anything.
 *
 * Literals  whole: 1 of FA_WHOLE; n_rows, n_queries.
 * Exports   nearest_plan, nearest_run, nearest_finish. */
#pragma once
#include "interface/selection.h"
#include "largest.inc.h"

#define NEAREST_BLOCK 64
#define NEAREST_ROWS 4 /* by NEAREST_QUERIES sums, the queries and a row: all registers */
#define NEAREST_QUERIES ((V_REGISTERS - 1) / (NEAREST_ROWS + 1))
/* The same of bytes: where no instruction multiplies and adds, a product takes one register more. */
#define NEAREST_WHOLE (V_REGISTERS == 16 && !V_I8_OFFSET ? 2 : NEAREST_QUERIES)
#define NEAREST_SUMS ((NEAREST_ROWS * NEAREST_QUERIES + LANES - 1) / LANES * LANES)
#define NEAREST_AHEAD                                                                                                  \
    (2 << 10) /* bytes, if few queries ask for rows ahead: 20% on a Zen 3 in int8; up to 16 KB level */
#define NEAREST_BYTES (128 << 10) /* of a task's queries, which stay in a second-level cache; a few rows in the first */
_Static_assert(NEAREST_QUERIES <= 6 && NEAREST_BLOCK % LANES == 0, "see products_of");

typedef struct {
    int64_t n;  /* so many, by the numbers of their rows */
    lane least; /* no score up to this one is among the best; NaN until there are too many */
    lane *scores;
    ilane *rows; /* counted from the first of the run */
} candidates;

typedef struct {
    char *q;               /* (queries, q_pitch) */
    lane *k, *factors, *s; /* (NEAREST_BLOCK, depth); (NEAREST_BLOCK); (queries, NEAREST_BLOCK) */
    candidates *best;      /* (queries) */
    largest_scratch choice;
    int64_t *chosen;
} nearest_scratch;

INLINE int64_t most_candidates(const fa_nearest_args *a) { return 2 * a->kept + NEAREST_BLOCK; }

/* Bytes from one query to the next: whole steps, filled up with 0. Bytes are held as 16 bits. */
INLINE int64_t q_pitch(const fa_nearest_args *a)
{
    if (a->kind == FA_BITS) return round_up(a->depth, 8);
    return a->kind == FA_WHOLE ? 2 * round_up(a->depth, 2 * LANES) : round_up(a->depth, LANES) * (int64_t)sizeof(lane);
}

static int64_t cut_nearest(arena *from, const fa_nearest_args *a, const fa_nearest_plan *plan, nearest_scratch *scratch)
{
    const int64_t most = larger(most_candidates(a), plan->runs * a->kept);
    cut_largest(from, most, &scratch->choice);
    CUT(from, scratch->chosen, larger(a->kept, a->top_k));
    CUT(from, scratch->q, plan->queries * q_pitch(a));
    CUT_LANES(from, NEAREST_BLOCK * round_up(a->depth, LANES), &scratch->k);
    CUT_LANES(from, NEAREST_BLOCK, &scratch->factors);
    CUT_LANES(from, plan->queries * NEAREST_BLOCK, &scratch->s);
    CUT(from, scratch->best, plan->queries);
    for (int64_t i = 0; i < plan->queries; i++) {
        candidates some = {0}; /* while bytes are counted, there are none */
        CUT_LANES(from, most_candidates(a), &some.scores);
        CUT(from, some.rows, most_candidates(a));
        if (from->memory) scratch->best[i] = some;
    }
    return from->used;
}

static void nearest_plan(const fa_nearest_args *a, fa_nearest_plan *plan)
{
    const int64_t fit = larger(1, NEAREST_BYTES / larger(1, q_pitch(a)) / NEAREST_QUERIES) * NEAREST_QUERIES;
    plan->queries = larger(1, smaller(fit, a->len_q));
    plan->runs = ceil_div(a->len_k, a->run);
    plan->n_tasks = plan->runs * ceil_div(a->len_q, plan->queries);
    plan->flops = 2.0 * a->len_q * a->len_k * a->depth;
    plan->scratch_bytes = cut_nearest(&(arena){0}, a, plan, &(nearest_scratch){0});
}

static void load_nearest_query(const fa_nearest_args *a, int64_t i, char *to)
{
    const char *from = a->q + i * a->q_row;
    memset(to, 0, q_pitch(a));
    if (a->kind == FA_LANES) load_row(a->q_dtype, from, a->depth, 1, (lane *)to);
    else if (a->kind == FA_BITS) memcpy(to, from, a->depth);
    else
        for (int64_t d = 0; d < a->depth; d++) ((int16_t *)to)[d] = ((const int8_t *)from)[d];
}

/* The next bytes of a row that has n left, as 16 bits; beyond them 0. */
INLINE v_t v_pairs_part(const char *from, int64_t n)
{
    int8_t part[2 * LANES] = {0};
    if (n < 2 * LANES) memcpy(part, from, n);
    return (v_t)v_pairs_i8(n < 2 * LANES ? (const char *)part : from);
}

/* sums (n_queries, n_rows) += the products of `left` elements or, where more are left, of a vector of them. */
INLINE void add_row_products(int whole, int n_rows, int n_queries, const char *k, int64_t k_row, const char *q,
                             int64_t q_row, int64_t left, v_t *sums)
{
    v_t y[NEAREST_QUERIES];
    UNROLL_FOR(int i = 0; i < n_queries; i++) y[i] = v_load(q + i * q_row);
    UNROLL_FOR(int r = 0; r < n_rows; r++) {
        const v_t x = whole ? v_pairs_part(k + r * k_row, left) : v_load_part(k + r * k_row, left);
        UNROLL_FOR(int i = 0; i < n_queries; i++) {
            v_t *sum = sums + i * n_rows + r;
            *sum = whole ? (v_t)v_dot_i16((vi_t)x, (vi_t)y[i], (vi_t)*sum) : v_fma(x, y[i], *sum);
        }
    }
}

/* Products of rows k with queries q, to s (n_queries, NEAREST_BLOCK). */
INLINE void products_as(int whole, int n_rows, int n_queries, const char *k, int64_t k_row, const char *q,
                        int64_t q_row, int64_t depth, lane *s)
{
    const int64_t step = whole ? 2 * LANES : LANES, k_step = whole ? step : V_BYTES;
    v_t sums[NEAREST_SUMS];
    lane found[NEAREST_SUMS];
    UNROLL_FOR(int i = 0; i < NEAREST_SUMS; i++) sums[i] = v_splat(0);
    int64_t d = 0;
    for (; d + step <= depth; d += step, k += k_step, q += V_BYTES)
        add_row_products(whole, n_rows, n_queries, k, k_row, q, q_row, step, sums);
    if (d < depth) add_row_products(whole, n_rows, n_queries, k, k_row, q, q_row, depth - d, sums);
    UNROLL_FOR(int c = 0; c < n_rows * n_queries; c += LANES) {
        vi_t each[LANES];
        if (!whole) {
            v_store(found + c, v_sum_each(sums + c));
            continue;
        }
        UNROLL_FOR(int i = 0; i < LANES; i++) each[i] = (vi_t)sums[c + i];
        v_store(found + c, __builtin_convertvector(v_sum_each_i(each), v_t));
    }
    UNROLL_FOR(int i = 0; i < n_queries; i++) memcpy(s + i * NEAREST_BLOCK, found + i * n_rows, n_rows * sizeof(lane));
}

/* n_rows is 1 or NEAREST_ROWS, n_queries up to NEAREST_QUERIES. */
INLINE void products_of(int whole, int n_rows, int64_t n_queries, const char *k, int64_t k_row, const char *q,
                        int64_t q_row, int64_t depth, lane *s)
{
#define PRODUCTS(n)                                                                                                    \
    case n: products_as(whole, n_rows, n < NEAREST_QUERIES ? n : NEAREST_QUERIES, k, k_row, q, q_row, depth, s); break;
    switch (n_queries) {
        PRODUCTS(1)
        PRODUCTS(2)
        PRODUCTS(3)
        PRODUCTS(4)
        PRODUCTS(5)
        PRODUCTS(6)
    }
#undef PRODUCTS
}

NOINLINE void score_rows(int whole, int several, int64_t n_queries, const char *k, int64_t k_row, const char *q,
                         int64_t q_row, int64_t depth, lane *s)
{
    WITH_FLAG(
        LANE_BITS == 32 && whole, bytes,
        WITH_FLAG(several, rows, products_of(bytes, rows ? NEAREST_ROWS : 1, n_queries, k, k_row, q, q_row, depth, s)));
}

/* Minus the number of bits of n bytes that differ, for each of n_rows. */
static void count_bits(const char *k, int64_t k_row, int64_t n_rows, const char *q, int64_t n, lane *s)
{
    for (int64_t r = 0; r < n_rows; r++, k += k_row) {
        int64_t d = 0, count = 0;
        uint64_t x = 0, y;
        for (; d + 8 <= n; d += 8) {
            memcpy(&x, k + d, 8), memcpy(&y, q + d, 8);
            count += __builtin_popcountll(x ^ y);
        }
        if (d < n) {
            x = 0, memcpy(&x, k + d, n - d), memcpy(&y, q + d, 8);
            count += __builtin_popcountll(x ^ y);
        }
        s[r] = -(lane)count;
    }
}

/* Whether rows of k are read where they are, and not widened first. */
INLINE int rows_in_place(const fa_nearest_args *a) { return a->kind != FA_LANES || a->k_dtype == LANE_DTYPE; }

/* s (n_queries, NEAREST_BLOCK): scores of n rows of k. */
static void score_block(const fa_nearest_args *a, const char *k, int64_t k_row, int64_t n, const char *q,
                        int64_t n_queries, lane *s)
{
    const int64_t pitch = q_pitch(a);
    const int whole = a->kind == FA_WHOLE;
    if (a->kind == FA_BITS) {
        for (int64_t i = 0; i < n_queries; i++) count_bits(k, k_row, n, q + i * pitch, a->depth, s + i * NEAREST_BLOCK);
        return;
    }
    const int64_t some = whole ? NEAREST_WHOLE : NEAREST_QUERIES;
    const int64_t row = a->depth * (whole ? 1 : (int64_t)sizeof(lane));
    const int64_t ahead = larger(NEAREST_ROWS, ceil_div(NEAREST_AHEAD, larger(1, row)));
    /* Long rows are found by the hardware. Copied ones are there. */
    const int asks = n_queries <= some && row <= NEAREST_AHEAD && rows_in_place(a);
    for (int64_t j = 0, rows; j < n; j += rows, k += rows * k_row) {
        rows = j + NEAREST_ROWS <= n ? NEAREST_ROWS : 1;
        if (asks) prefetch_rows(k + ahead * k_row, k_row, rows, row);
        for (int64_t i = 0; i < n_queries; i += some)
            score_rows(whole, rows > 1, smaller(some, n_queries - i), k, k_row, q + i * pitch, pitch, a->depth,
                       s + i * NEAREST_BLOCK + j);
    }
}

/* 1 / the length of each of n rows; one of almost 0 counts as 1e-12 long. */
static void length_factors(const fa_nearest_args *a, const char *k, int64_t k_row, int64_t n, lane *factors)
{
    const int whole = a->kind == FA_WHOLE;
    const int64_t step = whole ? 2 * LANES : LANES;
    for (int64_t j = 0; j < n; j++, k += k_row) {
        v_t sum = v_splat(0);
        for (int64_t d = 0; d < a->depth; d += step) {
            const int64_t at_byte = whole ? d : d * (int64_t)sizeof(lane);
            const v_t x = whole ? v_pairs_part(k + at_byte, a->depth - d) : v_load_part(k + at_byte, a->depth - d);
            sum = whole ? (v_t)v_dot_i16((vi_t)x, (vi_t)x, (vi_t)sum) : v_fma(x, x, sum);
        }
        const lane length = LANE_SQRT(whole ? v_sum(__builtin_convertvector((vi_t)sum, v_t)) : v_sum(sum));
        factors[j] = 1 / (length > (lane)1e-12 ? length : (lane)1e-12);
    }
}

/* Keeps the best of the candidates, of as many as are kept. */
static void drop_others(const fa_nearest_args *a, candidates *some, nearest_scratch *scratch)
{
    if (some->n <= a->kept) return;
    list_largest(NULL, some->scores, some->n, a->kept, 0, &scratch->choice, scratch->chosen);
    some->n = a->kept, some->least = INFINITY;
    for (int64_t i = 0; i < a->kept; i++) {
        const int64_t from = scratch->chosen[i];
        some->scores[i] = some->scores[from], some->rows[i] = some->rows[from];
        if (some->scores[i] < some->least) some->least = some->scores[i];
    }
}

/* Lets rows [first, first + n) of a run join a query's candidates, by their scores s. NaN is larger than all. */
static void add_candidates(const fa_nearest_args *a, const lane *s, int64_t first, int64_t n, candidates *some,
                           nearest_scratch *scratch)
{
    if (some->n + n > most_candidates(a)) drop_others(a, some, scratch);
    for (int64_t j = 0; j < n; j += LANES) {
        const vi_t joins = ~((vi_t)(v_load(s + j) <= v_splat(some->least)));
        if (!v_any(joins)) continue;
        for (int64_t i = j; i < smaller(j + LANES, n); i++) {
            if (s[i] <= some->least) continue;
            some->scores[some->n] = s[i], some->rows[some->n++] = (ilane)(first + i);
        }
    }
}

static void nearest_run(const fa_nearest_args *a, const fa_nearest_plan *plan, int64_t task, void *memory)
{
    nearest_scratch scratch;
    cut_nearest(&(arena){.memory = memory}, a, plan, &scratch);
    const int64_t parts = ceil_div(a->len_q, plan->queries), run = task / parts;
    const int64_t query = task % parts * plan->queries, n_queries = smaller(plan->queries, a->len_q - query);
    const int64_t begin = run * a->run, end = smaller(begin + a->run, a->len_k);
    for (int64_t i = 0; i < n_queries; i++) {
        load_nearest_query(a, query + i, scratch.q + i * q_pitch(a));
        scratch.best[i].n = 0, scratch.best[i].least = NAN;
    }
    for (int64_t j0 = begin; j0 < end; j0 += NEAREST_BLOCK) {
        const int64_t n = smaller(NEAREST_BLOCK, end - j0);
        const char *k = a->k + j0 * a->k_row;
        int64_t k_row = a->k_row;
        if (!rows_in_place(a)) {
            k_row = a->depth * (int64_t)sizeof(lane);
            for (int64_t j = 0; j < n; j++)
                load_row(a->k_dtype, k + j * a->k_row, a->depth, 1, scratch.k + j * a->depth);
            k = (const char *)scratch.k;
        }
        score_block(a, k, k_row, n, scratch.q, n_queries, scratch.s);
        if (a->by_length) length_factors(a, k, k_row, n, scratch.factors);
        for (int64_t i = 0; i < n_queries; i++) {
            lane *s = scratch.s + i * NEAREST_BLOCK;
            for (int64_t j = 0; a->by_length && j < n; j += LANES)
                v_store(s + j, v_load(s + j) * v_load(scratch.factors + j));
            add_candidates(a, s, j0 - begin, n, scratch.best + i, &scratch);
        }
        if (given_up(a->watch)) return;
    }
    for (int64_t i = 0; i < n_queries; i++) {
        candidates *some = scratch.best + i;
        const int64_t to = ((query + i) * plan->runs + run) * a->kept;
        drop_others(a, some, &scratch);
        for (int64_t c = 0; c < some->n; c++) {
            a->run_rows[to + c] = begin + some->rows[c];
            ((lane *)a->run_scores)[to + c] = some->scores[c];
        }
    }
}

/* The nearest rows of a query, by their numbers, once all runs are done. The last one may have fewer than are kept. */
static void nearest_finish(const fa_nearest_args *a, const fa_nearest_plan *plan, int64_t query, void *memory)
{
    nearest_scratch scratch;
    cut_nearest(&(arena){.memory = memory}, a, plan, &scratch);
    const int64_t begin = query * plan->runs * a->kept, last = a->len_k - (plan->runs - 1) * a->run;
    const int64_t n = (plan->runs - 1) * a->kept + smaller(last, a->kept);
    const lane *scores = (const lane *)a->run_scores + begin;
    for (int64_t i = 0; i < a->top_k; i++) scratch.chosen[i] = i;
    if (a->top_k < n) list_largest(a->watch, scores, n, a->top_k, 0, &scratch.choice, scratch.chosen);
    if (given_up(a->watch)) return; /* then nothing may have been chosen */
    for (int64_t i = 0; i < a->top_k; i++) {
        a->rows[query * a->top_k + i] = a->run_rows[begin + scratch.chosen[i]];
        ((lane *)a->scores)[query * a->top_k + i] = scores[scratch.chosen[i]];
    }
}
