/* Gradients of weights, sums of outer products. */
#ifndef OUTER_H
#define OUTER_H

#include "rows.h"

static const int64_t outer_m[] = {1, 2, 7, 256, 257, 513, 700}, outer_n[] = {1, 5, 12, 13, 40};
static const int64_t outer_k[] = {0, 1, 17, 32, 33, 70, 400};
enum { OUTER_CASES = COUNT(outer_m) * COUNT(outer_n) * COUNT(outer_k) * COUNT(floats) };

typedef struct {
    fa_outer_args args;
    fa_array a, b, before; /* before: what is added to, and in row n that of sums */
} outer_case;

static outer_case outer_now;
static fa_outer_args outer_wide;

/* The second time cut for many threads, the last task first. */
static int run_outer(const fa_kernels *kernels, int again, int wide)
{
    const fa_array *out = results[0].got + again, *sums = results[1].got + again;
    fa_outer_args a = wide ? outer_wide : outer_now.args;
    fa_outer_plan p;
    FOR(i, a.more ? a.n : 0) FOR(j, a.k) set(out, 0, 0, i, j, get(&outer_now.before, 0, 0, i, j));
    FOR(j, a.more ? a.n : 0) set(sums, 0, 0, 0, j, get(&outer_now.before, 0, 0, a.n, j));
    a.out = out->data, a.out_row = out->row, a.sums = sums->data;
    kernels->outer->plan(&a, again ? 64 : 1, &p);
    char *scratch = allocate((size_t)p.scratch_bytes);
    FOR(task, p.n_tasks) kernels->outer->run(&a, &p, again ? p.n_tasks - 1 - task : task, scratch);
    return p.scratch_bytes % 64 == 0;
}

static void make_outer(int number)
{
    int i = number;
    outer_case c = {0};
    fa_outer_args *a = &c.args;
    seed = (uint64_t)number << 32 | 7;
    a->a_dtype = a->b_dtype = floats[i % COUNT(floats)], i /= COUNT(floats);
    a->m = outer_m[i % COUNT(outer_m)], i /= COUNT(outer_m);
    a->n = outer_n[i % COUNT(outer_n)], i /= COUNT(outer_n);
    a->k = outer_k[i];
    if (a->a_dtype != FA_F64 && below(4) == 0) a->b_dtype = floats[below(3)];
    a->pairs = (int)below(2), a->more = (int)below(2);
    c.a = random_floats(a->a_dtype, a->m, a->n, -1, 1), c.b = random_floats(a->b_dtype, a->m, a->k, -1, 1);
    a->a = c.a.data, a->a_row = c.a.row, a->b = c.b.data, a->b_row = c.b.row;
    c.before = random_floats(lane_of(a->a_dtype), a->n + 1, larger(a->n, a->k), -1, 1);
    outer_now = c;
    outer_wide = *a, outer_wide.a_dtype = outer_wide.b_dtype = FA_F64, n_results = 0;
    outer_wide.a = of_twin(c.a, &outer_wide.a_row), outer_wide.b = of_twin(c.b, &outer_wide.b_row);
    add_result("out", 1, lane_of(a->a_dtype), 1, 1, a->n, a->k, GAP)->first = REVERSED;
    add_result("sums", 1, lane_of(a->a_dtype), 1, 1, 1, a->n, 0);
    expect_results(run_outer);
}

static const char *check_outer(const fa_kernels *kernels)
{
    const int pairs = outer_now.args.pairs && kernels->linear->between() == FA_BF16;
    return check_results(run_outer, kernels, 400, pairs && lane_of(outer_now.args.a_dtype) == FA_F32 ? 0x1p-5 : 0);
}

FAMILY(outer, OUTER_CASES, make_outer, outer_now.args.a_dtype, NULL);

#endif
