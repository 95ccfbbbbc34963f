/* The rows nearest to each query, of whole numbers, whose products are exact. */
#ifndef NEAREST_H
#define NEAREST_H

#include "results.h"

static const int64_t nearest_depth[] = {1, 7, 16, 33, 64, 100, 384}, nearest_q[] = {1, 2, 3, 5, 7, 40};
static const int64_t nearest_k[] = {1, 3, 64, 65, 300};
/* What rows of k hold, of lanes; of bytes and bits FA_I8. */
static const fa_dtype nearest_rows[] = {FA_F32, FA_F64, FA_F16, FA_BF16, FA_I8};
enum {
    NEAREST_KINDS = COUNT(nearest_rows) + 2,
    NEAREST_CASES = COUNT(nearest_depth) * COUNT(nearest_q) * COUNT(nearest_k) * NEAREST_KINDS
};

static fa_nearest_args nearest_now;

/* The second time the last task first, with other garbage in the scratch memory. */
static int run_nearest(const fa_kernels *kernels, int again, int wide)
{
    fa_nearest_args call = nearest_now;
    fa_nearest_plan p;
    kernels->selection->nearest_plan(&call, &p);
    const int64_t found = call.len_q * p.runs * call.kept;
    call.run_rows = (int64_t *)allocate((size_t)found * 8);
    call.run_scores = allocate((size_t)(found * bytes_of(lane_of(call.q_dtype))));
    call.rows = (int64_t *)(results[0].there ? results[0].got[again].data
                                             : allocate((size_t)(call.len_q * call.top_k) * 8));
    call.scores = results[1].got[again].data;
    char *scratch = allocate((size_t)p.scratch_bytes);
    if (again) memset(scratch, 0x55, (size_t)p.scratch_bytes);
    FOR(task, p.n_tasks) kernels->selection->nearest_run(&call, &p, again ? p.n_tasks - 1 - task : task, scratch);
    FOR(query, call.len_q) kernels->selection->nearest_finish(&call, &p, query, scratch);
    return p.scratch_bytes % 64 == 0 && !wide;
}

static void make_nearest(int number)
{
    fa_nearest_args *a = &nearest_now;
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
    n_results = 0; /* a score by length is rounded, and rounding decides between equals */
    add_bytes("rows", !a->by_length, a->len_q * a->top_k * 8);
    add_result("scores", 1, lane_of(a->q_dtype), 1, 1, a->len_q, a->top_k, 0);
    expect_same(run_nearest, lane_of(a->q_dtype));
}

CHECK(nearest, run_nearest, nearest_now.by_length ? 64 : 0)

FAMILY(nearest, NEAREST_CASES, make_nearest, nearest_now.q_dtype, NULL);

#endif
