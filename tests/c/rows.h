/* Norms, softmax and activations of rows. */
#ifndef ROWS_H
#define ROWS_H

#include "linear.h"

static const int64_t rows_n[] = {1, 15, 17, 64, 300};
enum { ROWS = 5, ROWS_REPEATS = 12, ROWS_CASES = 4 * COUNT(rows_n) * COUNT(floats) * ROWS_REPEATS };

typedef struct {
    fa_rows_args args;
    fa_array x, residual, up, weight, bias;
} rows_case;

static rows_case rows_now;
static fa_rows_args rows_wide;

static void draw_rows(int number)
{
    int i = number;
    rows_case c = {0};
    fa_rows_args *a = &c.args;
    seed = (uint64_t)number << 32 | 2;
    a->kind = (fa_rows_kind)(i % 4), i /= 4;
    a->dtype = floats[i % COUNT(floats)], i /= COUNT(floats);
    a->n = rows_n[i % COUNT(rows_n)], i /= COUNT(rows_n);
    a->activation = (fa_activation)(i % FA_N_ACTIVATIONS);
    a->m = ROWS, a->eps = 1e-5;
    c.x = random_floats(a->dtype, a->m, a->n, -2, 3);
    if (a->kind == FA_SOFTMAX) FOR(j, a->n)
        {
            set(&c.x, 0, 0, 3, j, -INFINITY);
            if (below(4) == 0) set(&c.x, 0, 0, 1, j, -INFINITY);
        }
    if (a->kind == FA_ACTIVATE) set(&c.x, 0, 0, 2, below(a->n), NAN);
    a->x = c.x.data, a->x_row = c.x.row;
    if (below(2)) {
        c.residual = random_floats(a->dtype, a->m, a->n, -1, 1);
        a->residual = c.residual.data, a->residual_row = c.residual.row;
    }
    if ((a->kind == FA_ACTIVATE || a->kind == FA_RMS_NORM) && below(2)) {
        a->up_each = below(2) ? 1 : a->m, a->gate_first = a->kind == FA_RMS_NORM && below(2);
        c.up = random_floats(a->dtype, a->m / a->up_each, a->n * a->up_each, -2, 2);
        a->up = c.up.data, a->up_row = c.up.row;
    }
    if (a->kind <= FA_RMS_NORM && below(4)) {
        c.weight = random_floats(lane_of(a->dtype), 1, a->n, -2, 2);
        a->weight = c.weight.data;
    }
    if (a->kind <= FA_RMS_NORM && below(2)) {
        c.bias = random_floats(lane_of(a->dtype), 1, a->n, -1, 1);
        a->bias = c.bias.data;
    }
    rows_now = c;
}

/* The data and the row of an array's twin. */
static const char *of_twin(fa_array x, int64_t *row)
{
    x = twin(x), *row = x.row;
    return x.data;
}

/* The second time row by row, the last one first, and without total. */
static int run_rows(const fa_kernels *kernels, int again, int wide)
{
    fa_rows_args a = wide ? rows_wide : rows_now.args;
    const fa_array *out = results[0].got + again, *total = results[1].got + again;
    const size_t size = (size_t)kernels->rows->scratch_bytes(a.n);
    char *scratch = allocate(size);
    a.out = out->data, a.out_row = out->row;
    a.total = total->data, a.total_row = total->row;
    if (!again) kernels->rows->run(&a, 0, a.m, scratch);
    for (int64_t i = a.m; again && i-- > 0;) kernels->rows->run(&a, i, i + 1, memset(scratch, 0x55, size));
    return 1;
}

static void make_rows(int number)
{
    draw_rows(number);
    const rows_case *c = &rows_now;
    const fa_rows_args *a = &c->args;
    fa_rows_args *w = &rows_wide;
    *w = *a, w->dtype = FA_F64, n_results = 0;
    w->x = of_twin(c->x, &w->x_row), w->residual = of_twin(c->residual, &w->residual_row);
    w->up = of_twin(c->up, &w->up_row), w->weight = twin(c->weight).data, w->bias = twin(c->bias).data;
    add_result("out", 1, a->dtype, 1, 1, a->m, a->n, GAP)->first = REVERSED;
    add_result("total", number % 3 != 0, a->dtype, 1, 1, a->m, a->n, GAP);
    expect_results(run_rows);
}

CHECK(rows, run_rows, 4000)

FAMILY(rows, ROWS_CASES, make_rows, rows_now.args.dtype, NULL);

#endif
