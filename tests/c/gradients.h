/* Gradients of what goes row by row, cross-entropy, dropout and sums of rows by place. */
#ifndef GRADIENTS_H
#define GRADIENTS_H

#include "rows.h"

enum { GRAD_ROWS = 5, GRAD_CASES = 4 * COUNT(rows_n) * COUNT(floats) * ROWS_REPEATS };

typedef struct {
    fa_rows_grad_args args;
    fa_array dout, x, residual, dsum, up, weight;
} rows_grad_case;

static rows_grad_case rows_grad_now;
static fa_rows_grad_args rows_grad_wide;

static fa_array optional(int there, fa_dtype dtype, int64_t rows, int64_t n, const char **data, int64_t *row)
{
    fa_array x = {0};
    if (!there) return x;
    x = random_floats(dtype, rows, n, -1, 1);
    *data = x.data, *row = x.row;
    return x;
}

static void draw_rows_grad(int number)
{
    int i = number;
    rows_grad_case c = {0};
    fa_rows_grad_args *a = &c.args;
    int64_t row;
    seed = (uint64_t)number << 32 | 8;
    a->kind = (fa_rows_kind)(i % 4), i /= 4;
    a->dtype = floats[i % COUNT(floats)], i /= COUNT(floats);
    a->n = rows_n[i % COUNT(rows_n)], i /= COUNT(rows_n);
    a->activation = (fa_activation)(i % FA_N_ACTIVATIONS);
    a->m = GRAD_ROWS, a->eps = 1e-2;
    c.dout = optional(1, a->dtype, a->m, a->n, &a->dout, &a->dout_row);
    c.x = random_floats(a->dtype, a->m, a->n, a->kind == FA_SOFTMAX ? 0 : -2, a->kind == FA_SOFTMAX ? 0.01 : 3);
    a->x = c.x.data, a->x_row = c.x.row;
    const int norm = a->kind <= FA_RMS_NORM, up = a->kind >= FA_RMS_NORM && a->kind != FA_SOFTMAX && below(2);
    a->up_each = below(2) ? 1 : a->m, a->gate_first = up && a->kind == FA_RMS_NORM && below(2);
    c.residual = optional(norm && !up && below(2), a->dtype, a->m, a->n, &a->residual, &a->residual_row);
    c.dsum = optional(norm && !up && below(2), a->dtype, a->m, a->n, &a->dsum, &a->dsum_row);
    c.up = optional(up, a->dtype, a->m / a->up_each, a->n * a->up_each, &a->up, &a->up_row);
    c.weight = optional(norm && below(4), lane_of(a->dtype), 1, a->n, (const char **)&a->weight, &row);
    rows_grad_now = c;
}

/* The second time where dout is. Sums are of all rows in one task, and of two rows and the others. */
static int run_rows_grad(const fa_kernels *kernels, int again, int wide)
{
    const rows_grad_case *c = &rows_grad_now;
    fa_rows_grad_args a = wide ? rows_grad_wide : c->args;
    const int64_t split = 2, n = a.n, lane = bytes_of(lane_of(a.dtype));
    const fa_array *dx = results[0].got + again, *dup = results[1].got + again;
    char *scratch = allocate((size_t)kernels->rows->grad_scratch_bytes(n));
    char *sums = results[2].there ? allocate((size_t)(4 * n * lane)) : NULL, *other = sums ? sums + 2 * n * lane : NULL;
    if (again) {
        copy(&c->dout, dx, 1, 1, a.m, n);
        a.dout = dx->data, a.dout_row = dx->row;
    }
    a.dx = dx->data, a.dx_row = dx->row;
    if (results[1].there) a.dup = dup->data, a.dup_row = dup->row;
    kernels->rows->grad_run(&a, split, a.m, other, scratch);
    kernels->rows->grad_run(&a, 0, split, sums, scratch);
    if (sums) kernels->rows->grad_add(sums, 2, 2 * n, 2 * n, results[2].got[again].data);
    return 1;
}

static void make_rows_grad(int number)
{
    draw_rows_grad(number);
    const rows_grad_case *c = &rows_grad_now;
    const fa_rows_grad_args *a = &c->args;
    fa_rows_grad_args *w = &rows_grad_wide;
    const int norm = a->kind <= FA_RMS_NORM;
    *w = *a, w->dtype = FA_F64, n_results = 0;
    w->dout = of_twin(c->dout, &w->dout_row), w->x = of_twin(c->x, &w->x_row);
    w->residual = of_twin(c->residual, &w->residual_row), w->dsum = of_twin(c->dsum, &w->dsum_row);
    w->up = of_twin(c->up, &w->up_row), w->weight = twin(c->weight).data;
    add_result("dx", 1, a->dtype, 1, 1, a->m, a->n, GAP)->first = REVERSED;
    add_result("dup", a->kind == FA_ACTIVATE || a->up, a->dtype, 1, 1, a->m / a->up_each, a->n * a->up_each, REVERSED);
    add_result("dweight and dbias", norm, lane_of(a->dtype), 1, 1, 1, 2 * a->n, 0);
    expect_results(run_rows_grad);
}

CHECK(rows_grad, run_rows_grad, 4000)

FAMILY(rows_grad, GRAD_CASES, make_rows_grad, rows_grad_now.args.dtype, NULL);

/* Cross-entropy. */
static const int64_t logits_n[] = {1, 3, 16, 65, 300};
static const fa_dtype lanes[] = {FA_F32, FA_F64};
enum { LOGITS_CASES = COUNT(logits_n) * COUNT(lanes) * 12 };

static struct {
    fa_logits_args args;
    fa_dtype dtype;
    fa_array x, factor;
    int64_t targets[GRAD_ROWS];
} logits_now;

static int run_logits(const fa_kernels *kernels, int again, int wide)
{
    fa_logits_args a = logits_now.args;
    const fa_array *x = results[0].got + again;
    copy(&logits_now.x, x, 1, 1, a.m, a.n);
    a.logits = x->data, a.row = x->row, a.loss = results[1].got[again].data;
    if (wide) a.factor = twin_of_lanes(a.factor, logits_now.dtype);
    if (!again) kernels->rows->logits_run(&a, 0, a.m);
    for (int64_t i = a.m; again && i-- > 0;) kernels->rows->logits_run(&a, i, i + 1);
    return 1;
}

static void make_logits(int number)
{
    fa_logits_args *a = &logits_now.args;
    seed = (uint64_t)number << 32 | 9;
    *a = (fa_logits_args){.m = GRAD_ROWS, .n = logits_n[number % COUNT(logits_n)]};
    logits_now.dtype = lanes[number / COUNT(logits_n) % COUNT(lanes)];
    logits_now.x = random_floats(logits_now.dtype, a->m, a->n, -4, 4);
    FOR(j, a->n) set(&logits_now.x, 0, 0, 1, j, get(&logits_now.x, 0, 0, 1, j) + 300); /* exp() would overflow */
    logits_now.factor = new_floats(logits_now.dtype, 1, 1, 1, a->m, 0);
    FOR(i, a->m) logits_now.targets[i] = below(a->n), set(&logits_now.factor, 0, 0, 0, i, uniform(-1, 1));
    if (below(3)) a->factor = logits_now.factor.data;
    a->label_smoothing = below(2) ? uniform(0, 1) : 0;
    a->targets = logits_now.targets;
    n_results = 0;
    add_result("gradient", 1, logits_now.dtype, 1, 1, a->m, a->n, GAP)->first = REVERSED;
    add_result("loss", 1, logits_now.dtype, 1, 1, 1, a->m, 0);
    expect_results(run_logits);
}

CHECK(logits, run_logits, 4000)

FAMILY(logits, LOGITS_CASES, make_logits, logits_now.dtype, NULL);

/* Dropout. */
static const int64_t dropout_n[] = {1, 15, 64, 130};
enum { DROPOUT_CASES = COUNT(dropout_n) * COUNT(floats) * 4 };

static struct {
    fa_dropout_args args;
    fa_array x;
} dropout_now;

static int run_dropout(const fa_kernels *kernels, int again, int wide)
{
    fa_dropout_args a = dropout_now.args;
    const fa_array x = wide ? twin(dropout_now.x) : dropout_now.x, *out = results->got + again;
    a.dtype = x.dtype, a.x = x.data, a.x_row = x.row, a.out = out->data, a.out_row = out->row;
    if (!again) kernels->rows->dropout_run(&a, 0, a.m);
    for (int64_t i = a.m; again && i-- > 0;) kernels->rows->dropout_run(&a, i, i + 1);
    return 1;
}

static void make_dropout(int number)
{
    fa_dropout_args *a = &dropout_now.args;
    seed = (uint64_t)number << 32 | 10;
    *a = (fa_dropout_args){.m = GRAD_ROWS, .n = dropout_n[number % COUNT(dropout_n)], .stream = below(9)};
    a->dtype = floats[number / COUNT(dropout_n) % COUNT(floats)];
    a->rate = uniform(0, 1), a->scale = 1 / (1 - a->rate), a->seed = (uint64_t)below(INT64_MAX) * 2 + 1;
    dropout_now.x = random_floats(a->dtype, a->m, a->n, -1, 1);
    n_results = 0;
    add_result("out", 1, a->dtype, 1, 1, a->m, a->n, GAP)->first = REVERSED;
    expect_results(run_dropout);
}

CHECK(dropout, run_dropout, 4)

FAMILY(dropout, DROPOUT_CASES, make_dropout, dropout_now.args.dtype, NULL);

/* Sums of rows by their place: place 0 gets most of them, some places one, one none. */
enum { SCATTERED = 600, SCATTER_PLACES = 4, SCATTER_CASES = COUNT(rows_n) * COUNT(floats) };

static struct {
    fa_scatter_args args;
    fa_array x;
    int64_t order[SCATTERED];
} scatter_now;

static const int64_t scatter_firsts[] = {0, SCATTERED - 3, SCATTERED - 2, SCATTERED - 2, SCATTERED};
static const int64_t scatter_places[] = {2, 0, 3, 1};

static int run_scatter(const fa_kernels *kernels, int again, int wide)
{
    fa_scatter_args a = scatter_now.args;
    const fa_array x = wide ? twin(scatter_now.x) : scatter_now.x, *out = results->got + again;
    char *scratch = allocate((size_t)kernels->rows->scatter_scratch_bytes(a.n));
    FOR(i, SCATTER_PLACES) FOR(j, a.n) set(out, 0, 0, i, j, 0.5);
    a.dtype = x.dtype, a.x = x.data, a.x_row = x.row, a.out = out->data, a.out_row = out->row;
    kernels->rows->scatter_run(&a, 0, again ? 1 : SCATTER_PLACES, scratch);
    if (again) kernels->rows->scatter_run(&a, 1, SCATTER_PLACES, scratch);
    return 1;
}

static void make_scatter(int number)
{
    fa_scatter_args *a = &scatter_now.args;
    seed = (uint64_t)number << 32 | 11;
    *a = (fa_scatter_args){.n = rows_n[number % COUNT(rows_n)], .firsts = scatter_firsts, .places = scatter_places};
    a->dtype = floats[number / COUNT(rows_n)];
    scatter_now.x = random_floats(a->dtype, SCATTERED, a->n, -1, 1);
    a->order = scatter_now.order;
    FOR(i, SCATTERED) scatter_now.order[i] = (i * 7 + number) % SCATTERED;
    n_results = 0;
    add_result("out", 1, lane_of(a->dtype), 1, 1, SCATTER_PLACES, a->n, GAP)->first = REVERSED;
    expect_results(run_scatter);
}

CHECK(scatter, run_scatter, 400)

FAMILY(scatter, SCATTER_CASES, make_scatter, scatter_now.args.dtype, NULL);

#endif
