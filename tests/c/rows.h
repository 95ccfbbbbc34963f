/* Norms, softmax and activations of rows, against plain C in double precision. */
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

static void make_rows(int number)
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

/* Element j of row i of up, of which `each` rows of n lie side by side. */
static double up_at(const fa_array *up, int64_t each, int64_t n, int64_t i, int64_t j)
{
    return get(up, 0, 0, i / each, i % each * n + j);
}

/* Row i of total (n) and of out (n), as they must be. */
static void expect_rows(const rows_case *c, int64_t i, near *total, near *out)
{
    const fa_rows_args *a = &c->args;
    const int64_t n = a->n;
    const double eps = eps_of(lane_of(a->dtype)), steps = 4 + sqrt((double)n);
    double max = -INFINITY, largest = 0, mean = 0, squares = 0, sum = 0, off = 0;
    near z[300], gate[300];
    FOR(j, n)
    {
        const double x = get(&c->x, 0, 0, i, j) + (a->residual ? get(&c->residual, 0, 0, i, j) : 0);
        z[j] = total[j] = (near){x, a->residual ? eps / 2 * fabs(x) : 0};
        if (a->up && a->kind == FA_RMS_NORM) {
            gate[j] = activated(a->activation, (near){up_at(&c->up, a->up_each, n, i, j), 0}, eps);
            if (a->gate_first) z[j] = product(z[j], gate[j], eps), off = fmax(off, z[j].error);
        }
        max = fmax(max, x);
        if (isfinite(x)) largest = fmax(largest, fabs(z[j].value));
        if (a->kind == FA_LAYER_NORM) mean += x / (double)n;
    }
    FOR(j, n) squares += (z[j].value - mean) * (z[j].value - mean);
    FOR(j, n) sum += max == -INFINITY ? 0 : exp(total[j].value - max);
    const double factor = 1 / sqrt(squares / (double)n + a->eps);
    FOR(j, n)
    {
        near y = z[j];
        if (a->kind == FA_SOFTMAX) {
            y.value = sum == 0 ? 0 : exp(y.value - max) / sum;
            y.error = eps * (steps + 4 * largest) * y.value;
        } else if (a->kind == FA_ACTIVATE) {
            y = activated(a->activation, y, eps);
            if (a->up) y = product(y, (near){up_at(&c->up, a->up_each, n, i, j), 0}, eps);
        } else { /* the mean errs by some units in the last place of the largest, and so do the variance's terms */
            y.value = (y.value - mean) * factor;
            y.error = n == 1 && a->kind == FA_LAYER_NORM ? 0 : eps * steps * (largest * factor + fabs(y.value));
            y.error += factor * off * (1 + fabs(y.value)); /* the input's */
            if (a->weight) y = product(y, (near){get(&c->weight, 0, 0, 0, j), 0}, eps);
            if (a->bias) y.value += get(&c->bias, 0, 0, 0, j), y.error += eps * fabs(y.value);
            if (a->up && !a->gate_first) y = product(y, gate[j], eps);
        }
        out[j] = stored(y, a->dtype);
        total[j] = stored(total[j], a->dtype);
    }
}

/* Computes twice, the second time row by row, the last one first, and without total. */
static const char *check_rows(int isa, const fa_kernels *kernels)
{
    fa_rows_args a = rows_now.args;
    near want[2][300];
    const fa_array total = new_floats(a.dtype, 1, 1, a.m, a.n, GAP);
    const size_t size = (size_t)kernels->rows->scratch_bytes(a.n);
    char *scratch = allocate(size);
    fa_array out[2];
    (void)isa;
    FOR(again, 2)
    {
        out[again] = new_floats(a.dtype, 1, 1, a.m, a.n, again ? GAP : REVERSED);
        a.out = out[again].data, a.out_row = out[again].row;
        a.total = again ? NULL : total.data, a.total_row = total.row;
        if (!again) kernels->rows->run(&a, 0, a.m, scratch);
        else
            for (int64_t i = a.m - 1; i >= 0; i--) kernels->rows->run(&a, i, i + 1, memset(scratch, 0x55, size));
    }
    FOR(i, a.m)
    {
        expect_rows(&rows_now, i, want[0], want[1]);
        FOR(j, a.n)
        {
            const char *wrong = differs("total", &total, &total, 0, 0, i, j, want[0][j]);
            if (!wrong) wrong = differs("out", out, out + 1, 0, 0, i, j, want[1][j]);
            if (wrong) return wrong;
        }
    }
    return only_rows(out + 1, 1, 1, a.m, a.n) ? NULL : BETWEEN_ROWS;
}

static void describe_rows(void)
{
    const fa_rows_args *a = &rows_now.args;
    printf("kind %d, dtype %d, n %d, activation %d%s%s%s", a->kind, a->dtype, (int)a->n, a->activation,
           a->residual ? ", residual" : "", a->up ? ", up" : "", a->gate_first ? " first" : "");
}

static void drop_nothing(void) {}

FAMILY(rows, ROWS_CASES, make_rows, rows_now.args.dtype, describe_rows, drop_nothing);

#endif
