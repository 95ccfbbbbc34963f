/* Gradients of what goes row by row: norms, softmax, activations. A row is widened to lanes in scratch, where it stays
 * in the first-level cache for the passes over it. So results may lie where inputs do.
 *
 *   softmax      dx = y (dout - sum(dout y)), y being the result
 *   activation   dx = dout slope(x) up, dup = dout activation(x)
 *   norm         y = (x - mean) factor, g = dout weight:  dx = factor (g - mean(g) - y mean(g y)) + dsum
 *                dweight = the sum over rows of dout y, dbias of dout; FA_RMS_NORM has no mean and no mean(g)
 *   gated norm   of out = norm(x) s, s = activation(up): dx with dout s for dout, dup = dout slope(up) weight y
 *                of out = norm(x s): with dz the gradient of x s, dx = dz s, dup = dz x slope(up)
 *
 * Sums over rows are those of the rows of a task, and whoever runs the tasks adds them in order.
 *
 * Literals  activation: any fa_activation.
 * Exports   SLOPE_PIECE, slope_row_of; rows_grad_scratch_bytes, rows_grad_run, rows_grad_add. */
#pragma once
#include "rows.inc.h"

/* x = the normalised row, dout = its gradient times the weight; returns the factor. sums (2, n), optional: += dout y, and
 * += dout. means: of g and of g y. */
INLINE lane normalise_row(const fa_rows_grad_args *a, lane *x, lane *dout, lane *sums, lane means[2])
{
    const int64_t n = a->n;
    const lane *weight = (const lane *)a->weight;
    const lane eps = (lane)a->eps;
    lane mean;
    const lane factor = a->kind == FA_LAYER_NORM ? norm_factor(a->watch, 1, x, n, eps, &mean)
                                                 : norm_factor(a->watch, 0, x, n, eps, &mean);
    v_t sum[2] = {v_splat(0), v_splat(0)};
    EACH_BLOCK(a->watch, n, begin, end)
        for (int64_t j = begin; j < end; j += LANES) {
            const int64_t left = n - j;
            const v_t y = (v_load_part(x + j, left) - v_splat(mean)) * v_splat(factor);
            v_t g = v_load_part(dout + j, left);
            if (sums) {
                v_store_part(sums + j, v_fma(g, y, v_load_part(sums + j, left)), left);
                v_store_part(sums + n + j, v_load_part(sums + n + j, left) + g, left);
            }
            if (weight) g = g * v_load_part(weight + j, left); /* lanes past the end are 0 in g */
            sum[0] += g, sum[1] = v_fma(g, y, sum[1]);
            v_store_part(x + j, y, left), v_store_part(dout + j, g, left);
        }
    means[0] = a->kind == FA_LAYER_NORM ? v_sum(sum[0]) / (lane)n : 0, means[1] = v_sum(sum[1]) / (lane)n;
    return factor;
}

/* dout = the gradient of x; y is the normalised row. */
INLINE void norm_grad_row(const fa_rows_grad_args *a, int64_t r, lane *x, lane *dout, lane *sums)
{
    lane means[2];
    const lane factor = normalise_row(a, x, dout, sums, means);
    EACH_BLOCK(a->watch, a->n, begin, end)
        for (int64_t j = begin; j < end; j += LANES) {
            const v_t g = v_load_part(dout + j, a->n - j) - v_splat(means[0]);
            const v_t dx = v_fma(v_load_part(x + j, a->n - j), v_splat(-means[1]), g) * v_splat(factor);
            v_store_part(dout + j, dx, a->n - j);
        }
    if (a->dsum) add_row(a->dtype, a->dsum + r * a->dsum_row, a->n, dout);
}

INLINE void softmax_grad_row(const fa_rows_grad_args *a, const lane *y, lane *dout)
{
    v_t sum = v_splat(0);
    EACH_BLOCK(a->watch, a->n, begin, end)
        for (int64_t j = begin; j < end; j += LANES)
            sum = v_fma(v_load_part(y + j, a->n - j), v_load_part(dout + j, a->n - j), sum);
    const v_t total = v_splat(v_sum(sum));
    EACH_BLOCK(a->watch, a->n, begin, end)
        for (int64_t j = begin; j < end; j += LANES) {
            const v_t dx = v_load_part(y + j, a->n - j) * (v_load_part(dout + j, a->n - j) - total);
            v_store_part(dout + j, dx, a->n - j);
        }
}

/* dout = dout slope(x), and x = dout activation(x) where it is asked for: whole vectors. */
INLINE void slope_row(fa_activation activation, int both, lane *x, lane *dout, int64_t n)
{
    for (int64_t j = 0; j < n; j += LANES) {
        const v_t value = v_load(x + j), g = v_load(dout + j);
        if (both) v_store(x + j, g * v_activate(activation, LANE_DTYPE, value));
        v_store(dout + j, g * v_slope(activation, value));
    }
}

static void slope_row_of(fa_activation activation, int both, lane *x, lane *dout, int64_t n)
{
    switch (activation) {
#define FA_ACTIVATION(constant, name, formula, slope)                                                                  \
    case constant:                                                                                                     \
        if (both) slope_row(constant, 1, x, dout, n);                                                                  \
        else slope_row(constant, 0, x, dout, n);                                                                       \
        break;
#include "activations.inc"
    default:
        if (both) slope_row(FA_NONE, 1, x, dout, n);
    }
}

/* Row r of an activation, piece by piece: each in the first-level cache. */
#define SLOPE_PIECE 1024
_Static_assert(SLOPE_PIECE % LANES == 0 && ROW_ASKS % SLOPE_PIECE == 0,
               "pieces are whole vectors, blocks whole pieces");

INLINE void activate_grad_row(const fa_rows_grad_args *a, int64_t r, lane *memory)
{
    lane *x = memory, *dout = x + SLOPE_PIECE, *up = dout + SLOPE_PIECE;
    const int64_t size = dtype_size(a->dtype), width = a->n * size;
    const int64_t of_up = up_offset(r, a->up_each, a->up_row, width);
    const int64_t of_dup = up_offset(r, a->up_each, a->dup_row, width);
    for (int64_t j = 0; j < a->n; j += SLOPE_PIECE) {
        const int64_t n = smaller(a->n - j, SLOPE_PIECE), whole = round_up(n, LANES);
        if (j && j % ROW_ASKS == 0 && given_up(a->watch)) return;
        v_store(x + whole - LANES, v_splat(0)), v_store(dout + whole - LANES, v_splat(0));
        load_row(a->dtype, a->x + r * a->x_row + j * size, n, 1, x);
        load_row(a->dtype, a->dout + r * a->dout_row + j * size, n, 1, dout);
        if (a->up) load_row(a->dtype, a->up + of_up + j * size, n, 1, up);
        slope_row_of(a->activation, a->dup != NULL, x, dout, whole);
        for (int64_t i = 0; a->up && i < n; i += LANES)
            v_store_part(dout + i, v_load_part(dout + i, n - i) * v_load_part(up + i, n - i), n - i);
        if (a->dup) store_row(a->dtype, x, n, 1, a->dup + of_dup + j * size);
        if (a->dx) store_row(a->dtype, dout, n, 1, a->dx + r * a->dx_row + j * size);
    }
}

/* Row r of a gated norm. Behind dout lie two more rows; padded lanes of x and dout are 0. */
static void gated_grad_row(const fa_rows_grad_args *a, int64_t r, lane *x, lane *dout, lane *sums)
{
    const int64_t n = a->n, padded = round_up(n, LANES), size = dtype_size(a->dtype);
    lane *up = dout + padded, *z = up + padded;
    v_store(up + padded - LANES, v_splat(0));
    load_row(a->dtype, a->up + up_offset(r, a->up_each, a->up_row, n * size), n, 1, up);
    if (a->gate_first) {
        memcpy(z, up, padded * sizeof(lane));
        activate_row_of(a->watch, a->activation, z, z, padded);
        times_row(a->watch, z, x, padded);
        norm_grad_row(a, r, z, dout, sums);
    }
    EACH_BLOCK(a->watch, n, j, stop) /* dout slope(up), and in place of up dout activation(up) */
        slope_row_of(a->activation, 1, up + j, dout + j, round_up(stop - j, LANES));
    if (!a->gate_first) {
        norm_grad_row(a, r, x, up, sums); /* x becomes the normalised row */
        for (int64_t j = 0; a->weight && j < n; j += LANES)
            v_store(x + j, v_load(x + j) * v_load_part((const lane *)a->weight + j, n - j));
    }
    times_row(a->watch, dout, x, padded);
    if (a->dup) store_row(a->dtype, dout, n, 1, a->dup + up_offset(r, a->up_each, a->dup_row, n * size));
    memcpy(dout, up, n * sizeof(lane));
}

/* Bytes of scratch for rows of n elements. */
static int64_t rows_grad_scratch_bytes(int64_t n)
{
    return larger(4 * round_up(n, LANES), 3 * SLOPE_PIECE) * (int64_t)sizeof(lane);
}

/* Rows [begin, end). sums (2, n), optional: the sums over these rows of dout y, and of dout. */
static void rows_grad_run(const fa_rows_grad_args *a, int64_t begin, int64_t end, void *sums, void *scratch)
{
    const int64_t n = a->n, size = dtype_size(a->dtype), each = larger(1, ROW_ASKS / larger(1, n));
    lane *x = scratch, *dout = x + round_up(n, LANES);
    for (int64_t j = 0; sums && j < 2 * n; j++) ((lane *)sums)[j] = 0;
    for (int64_t r = begin; r < end; r++) {
        if ((r - begin) % each == each - 1 && given_up(a->watch)) return;
        if (a->kind == FA_ACTIVATE) {
            activate_grad_row(a, r, x);
            continue;
        }
        const int64_t padded = round_up(n, LANES);
        if (padded != n) v_store(x + padded - LANES, v_splat(0)), v_store(dout + padded - LANES, v_splat(0));
        EACH_BLOCK(a->watch, n, j, stop) {
            load_row(a->dtype, a->x + r * a->x_row + j * size, stop - j, 1, x + j);
            load_row(a->dtype, a->dout + r * a->dout_row + j * size, stop - j, 1, dout + j);
            if (a->residual) add_row(a->dtype, a->residual + r * a->residual_row + j * size, stop - j, x + j);
        }
        if (a->kind == FA_SOFTMAX) softmax_grad_row(a, x, dout);
        else if (a->up) gated_grad_row(a, r, x, dout, sums);
        else norm_grad_row(a, r, x, dout, sums);
        if (a->dx) store_row(a->dtype, dout, n, 1, a->dx + r * a->dx_row);
    }
}

/* out (n) = the sum of `count` rows of lanes, in order. */
static void rows_grad_add(const void *sums, int64_t count, int64_t row, int64_t n, void *out)
{
    for (int64_t j = 0; j < n; j += LANES) {
        v_t total = v_splat(0);
        for (int64_t i = 0; i < count; i++) total += v_load_part((const lane *)sums + i * row + j, n - j);
        v_store_part((lane *)out + j, total, n - j);
    }
}
