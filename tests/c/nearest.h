/* The rows nearest to each query, of whole numbers, whose products are exact. */
#ifndef NEAREST_H
#define NEAREST_H

#include "linear.h"

static const int64_t nearest_depth[] = {1, 7, 16, 33, 64, 100, 384}, nearest_q[] = {1, 2, 3, 5, 7, 40};
static const int64_t nearest_k[] = {1, 3, 64, 65, 300};
/* What rows of k hold, of lanes; of bytes and bits FA_I8. */
static const fa_dtype nearest_rows[] = {FA_F32, FA_F64, FA_F16, FA_BF16, FA_I8};
enum {
    NEAREST_KINDS = COUNT(nearest_rows) + 2,
    NEAREST_CASES = COUNT(nearest_depth) * COUNT(nearest_q) * COUNT(nearest_k) * NEAREST_KINDS
};

static struct {
    fa_nearest_args args;
    double *scores; /* (len_q, len_k) */
} nearest_now;

/* The score of a row; bits are those of its bytes. */
static double nearest_score(const fa_nearest_args *a, const fa_array *q, const fa_array *k, int64_t i, int64_t j)
{
    double sum = 0, square = 0;
    FOR(d, a->depth)
    {
        const double x = get(q, 0, 0, i, d), y = get(k, 0, 0, j, d);
        if (a->kind == FA_BITS) sum -= __builtin_popcount(((int)x ^ (int)y) & 255);
        else sum += x * y, square += y * y;
    }
    return a->by_length ? sum / fmax(sqrt(square), 1e-12) : sum;
}

static void make_nearest(int number)
{
    fa_nearest_args *a = &nearest_now.args;
    int i = number;
    seed = (uint64_t)number << 32 | 33;
    *a = (fa_nearest_args){0};
    const int kind = i % NEAREST_KINDS, bytes = kind >= COUNT(nearest_rows);
    i /= NEAREST_KINDS;
    a->depth = nearest_depth[i % COUNT(nearest_depth)], i /= COUNT(nearest_depth);
    a->len_q = nearest_q[i % COUNT(nearest_q)], i /= COUNT(nearest_q);
    a->len_k = nearest_k[i];
    a->kind = !bytes ? FA_LANES : kind == COUNT(nearest_rows) ? FA_WHOLE : FA_BITS;
    a->k_dtype = bytes ? FA_I8 : nearest_rows[kind], a->q_dtype = bytes ? FA_I8 : lane_of(a->k_dtype);
    a->by_length = a->kind != FA_BITS && below(2);
    a->top_k = 1 + below(below(2) ? a->len_k : smaller(a->len_k, 9));
    a->run = 1 + below(2 * a->len_k), a->kept = smaller(a->top_k, a->run);
    const int64_t most = bytes ? 128 : 2;
    const fa_array q = new_floats(a->q_dtype, 1, 1, a->len_q, a->depth, (int)below(8) & (GAP | REVERSED));
    const fa_array k = new_floats(a->k_dtype, 1, 1, a->len_k, a->depth, (int)below(8) & (GAP | REVERSED));
    FOR(r, a->len_q) FOR(d, a->depth) set(&q, 0, 0, r, d, (double)(below(2 * most) - most));
    FOR(r, a->len_k) FOR(d, a->depth) set(&k, 0, 0, r, d, below(4) ? (double)(below(2 * most) - most) : (double)-most);
    /* Rows whose every score is -INFINITY are there, too. */
    const int64_t infinite = a->kind == FA_LANES && !a->by_length && below(4) == 0 ? below(a->len_k + 1) : 0;
    FOR(r, infinite) set(&k, 0, 0, r, 0, -INFINITY);
    FOR(r, infinite ? a->len_q : 0) set(&q, 0, 0, r, 0, 1);
    a->q = q.data, a->q_row = q.row, a->k = k.data, a->k_row = k.row;
    nearest_now.scores = calloc((size_t)a->len_q * (size_t)a->len_k, sizeof(double));
    FOR(r, a->len_q) FOR(j, a->len_k) nearest_now.scores[r * a->len_k + j] = nearest_score(a, &q, &k, r, j);
}

/* What was found for a query of `scores`: rows in order, and none left out that is nearer, or comes first of equals. */
static const char *wrong_nearest(const fa_nearest_args *a, const fa_array *found, int64_t query, const double *scores)
{
    const double slack = a->by_length ? 16 * eps_of(lane_of(a->q_dtype)) : 0;
    const int64_t *rows = a->rows + query * a->top_k;
    double least = INFINITY;
    int64_t last = -1, next = 0;
    FOR(c, a->top_k)
    {
        if (rows[c] < 0 || rows[c] >= a->len_k || (c && rows[c] <= rows[c - 1])) return "no list";
        const double score = scores[rows[c]];
        const double got = get(found, 0, 0, query, c);
        if (got != score && !(fabs(got - score) <= slack * (1 + fabs(score)))) return "another score";
        if (score <= least) least = score, last = rows[c];
    }
    FOR(j, a->len_k)
    {
        if (next < a->top_k && rows[next] == j) next++;
        else if (scores[j] > least && !(scores[j] <= least + slack * (1 + fabs(least)))) return "a nearer one is left";
        else if (!a->by_length && scores[j] == least && j < last) return "not the first of equal ones";
    }
    return NULL;
}

/* Twice: the last task first, with other garbage in the scratch memory. */
static const char *check_nearest(const fa_kernels *kernels)
{
    const fa_dtype lane = lane_of(nearest_now.args.q_dtype);
    const char *wrong = NULL;
    FOR(again, 2)
    {
        fa_nearest_args call = nearest_now.args;
        fa_nearest_plan p;
        kernels->nearest_plan(&call, &p);
        if (p.scratch_bytes % 64) return UNALIGNED;
        const int64_t found = call.len_q * p.runs * call.kept;
        const fa_array scores = new_floats(lane, 1, 1, call.len_q, call.top_k, 0);
        call.run_rows = (int64_t *)allocate((size_t)found * 8),
        call.run_scores = allocate((size_t)(found * bytes_of(lane)));
        call.rows = (int64_t *)allocate((size_t)(call.len_q * call.top_k) * 8), call.scores = scores.data;
        char *scratch = allocate((size_t)p.scratch_bytes);
        if (again) memset(scratch, 0x55, (size_t)p.scratch_bytes);
        FOR(task, p.n_tasks) kernels->nearest_run(&call, &p, again ? p.n_tasks - 1 - task : task, scratch);
        FOR(query, call.len_q) kernels->nearest_finish(&call, &p, query, scratch);
        FOR(query, call.len_q)
        if (!wrong) wrong = wrong_nearest(&call, &scores, query, nearest_now.scores + query * call.len_k);
    }
    return wrong;
}

static void drop_nearest(void) { free(nearest_now.scores); }

FAMILY(nearest, NEAREST_CASES, make_nearest, nearest_now.args.q_dtype, NULL, drop_nearest);

#endif
