/* Row by row: norms, softmax, activations. A row of whole vectors of lanes is read and written where it lies; any other
 * row, and x + residual, is widened to lanes in scratch. It stays in the first-level cache for the passes over it.
 *
 * Literals  squares, centers: 0, 1. activation: any fa_activation.
 * Exports   ROW_ASKS, EACH_BLOCK, row_sums_of, norm_factor, activate_row_of, times_row, up_offset; rows_scratch_bytes, rows_run. */
#pragma once
#include "interface/rows.h"
#include "activation.inc.h"

#define ROW_ASKS (1 << 18) /* elements of a row between two calls of given_up(): a fraction of a millisecond */
_Static_assert(ROW_ASKS % (4 * LANES) == 0, "a block is a whole number of row_sums_of's rounds");

/* Walks over n elements in blocks [begin, end), and ends early if the call is given up: nobody reads the results. */
#define EACH_BLOCK(watch, n, begin, end)                                                                               \
    for (int64_t begin = 0, end = smaller(n, ROW_ASKS); begin < (n) && !(begin && given_up(watch));                    \
         begin = end, end = smaller(n, end + ROW_ASKS))

typedef struct {
    lane sum, squares;
} row_sums;

/* The sum of x - center over a row and, with `squares`, of its squares. An addition waits for the one before: four
 * accumulators of each. */
INLINE row_sums row_sums_of(const fa_watch *watch, int squares, const lane *x, int64_t n, lane center)
{
    v_t sum[4] = {v_splat(0), v_splat(0), v_splat(0), v_splat(0)}, square[4] = {sum[0], sum[0], sum[0], sum[0]};
    int64_t j = 0;
    EACH_BLOCK(watch, n, begin, end)
        for (; j + 4 * LANES <= end; j += 4 * LANES)
            UNROLL_FOR(int u = 0; u < 4; u++) {
                const v_t y = v_load(x + j + u * LANES) - v_splat(center);
                sum[u] += y;
                if (squares) square[u] = v_fma(y, y, square[u]);
            }
    if (n - j >= 4 * LANES) return (row_sums){0, 0}; /* given up */
    for (; j + LANES <= n; j += LANES) {
        const v_t y = v_load(x + j) - v_splat(center);
        sum[0] += y;
        if (squares) square[0] = v_fma(y, y, square[0]);
    }
    row_sums total = {v_sum((sum[0] + sum[1]) + (sum[2] + sum[3])), 0};
    if (squares) total.squares = v_sum((square[0] + square[1]) + (square[2] + square[3]));
    for (; j < n; j++) {
        const lane y = x[j] - center;
        total.sum += y;
        if (squares) total.squares += y * y;
    }
    return total;
}

/* The mean of a row, 0 for FA_RMS_NORM, and 1 / sqrt(variance + eps). What rounding left of the mean is added to it, and
 * taken out of the variance (Chan et al. 1983): so in a row of equal numbers all become 0. */
INLINE lane norm_factor(const fa_watch *watch, int centers, const lane *x, int64_t n, lane eps, lane *mean)
{
    *mean = centers ? row_sums_of(watch, 0, x, n, 0).sum / (lane)n : 0;
    const row_sums rest = row_sums_of(watch, 1, x, n, *mean);
    const lane left = centers ? rest.sum / (lane)n : 0, variance = rest.squares / (lane)n - left * left;
    *mean += left;
    return 1 / LANE_SQRT((variance < 0 ? 0 : variance) + eps); /* NaN stays */
}

/* y = (x - mean) / sqrt(variance + eps) weight + bias, with mean = 0 for FA_RMS_NORM. y may be x, here and below. */
INLINE void norm_row(const fa_rows_args *a, const lane *x, lane *y)
{
    const lane *weight = (const lane *)a->weight, *bias = (const lane *)a->bias;
    const int64_t n = a->n;
    const lane eps = (lane)a->eps;
    lane mean;
    const lane factor = a->kind == FA_LAYER_NORM ? norm_factor(a->watch, 1, x, n, eps, &mean)
                                                 : norm_factor(a->watch, 0, x, n, eps, &mean);
    EACH_BLOCK(a->watch, n, begin, end)
        for (int64_t j = begin; j < end; j += LANES) {
            v_t to = (v_load_part(x + j, n - j) - v_splat(mean)) * v_splat(factor);
            if (weight) to = to * v_load_part(weight + j, n - j);
            if (bias) to = to + v_load_part(bias + j, n - j);
            v_store_part(y + j, to, n - j);
        }
}

/* y = softmax(x); a row of nothing but -inf becomes 0. The last vector is filled up with -inf. */
INLINE void softmax_row(const fa_watch *watch, const lane *x, lane *y, int64_t n)
{
    v_t max = v_splat(-INFINITY), sum = v_splat(0);
    EACH_BLOCK(watch, n, begin, end)
        for (int64_t j = begin; j < end; j += LANES) max = v_max(max, v_load(x + j));
    const lane row_max = v_max_lanes(max);
    const v_t base = v_splat(row_max == -INFINITY ? 0 : row_max);
    EACH_BLOCK(watch, n, begin, end)
        for (int64_t j = begin; j < end; j += LANES) {
            const v_t power = v_exp(v_load(x + j) - base);
            sum += power;
            v_store(y + j, power);
        }
    const lane row_sum = v_sum(sum);
    const v_t factor = v_splat(row_sum == 0 ? 0 : 1 / row_sum);
    EACH_BLOCK(watch, n, begin, end)
        for (int64_t j = begin; j < end; j += LANES) v_store(y + j, v_load(y + j) * factor);
}

INLINE void activate_row(const fa_watch *watch, fa_activation activation, const lane *x, lane *y, int64_t n)
{
    EACH_BLOCK(watch, n, begin, end)
        for (int64_t j = begin; j < end; j += LANES) v_store(y + j, v_activate(activation, LANE_DTYPE, v_load(x + j)));
}

/* y = activation(x), whole vectors. */
static void activate_row_of(const fa_watch *watch, fa_activation activation, const lane *x, lane *y, int64_t n)
{
    switch (activation) {
#define FA_ACTIVATION(constant, name, formula, slope)                                                                  \
    case constant: activate_row(watch, constant, x, y, n); break;
#include "activations.inc"
    default:
        if (y != x) memcpy(y, x, n * sizeof(lane));
    }
}

/* x *= y, whole vectors. */
INLINE void times_row(const fa_watch *watch, lane *x, const lane *y, int64_t n)
{
    EACH_BLOCK(watch, n, begin, end)
        for (int64_t j = begin; j < end; j += LANES) v_store(x + j, v_load(x + j) * v_load(y + j));
}

/* Where row r of `width` bytes begins, if `each` rows lie side by side and the next ones `row` bytes away. */
INLINE int64_t up_offset(int64_t r, int64_t each, int64_t row, int64_t width)
{
    return r / each * row + r % each * width;
}

/* x *= row r of up, which is activated or not. */
static void times_up(const fa_rows_args *a, int64_t r, int activated, lane *x)
{
    const int64_t padded = round_up(a->n, LANES), size = dtype_size(a->dtype);
    const char *from = a->up + up_offset(r, a->up_each, a->up_row, a->n * size);
    lane *up = x + padded;
    v_store(up + padded - LANES, v_splat(0));
    EACH_BLOCK(a->watch, a->n, j, stop) load_row(a->dtype, from + j * size, stop - j, 1, up + j);
    if (activated) activate_row_of(a->watch, a->activation, up, up, padded);
    times_row(a->watch, x, up, padded);
}

/* Bytes of scratch for rows of n elements: two rows of lanes, each filled up to whole vectors. */
static int64_t rows_scratch_bytes(int64_t n) { return 2 * (round_up(n, LANES) * (int64_t)sizeof(lane)); }

static void rows_run(const fa_rows_args *a, int64_t begin, int64_t end, void *scratch)
{
    const int64_t n = a->n, padded = round_up(n, LANES), size = dtype_size(a->dtype);
    const int writes = a->dtype == LANE_DTYPE && padded == n && !a->up, reads = writes && !a->residual && !a->total;
    lane *row = scratch;
    if (!n) return;
    for (int64_t r = begin; r < end; r++) {
        const char *from = a->x + r * a->x_row;
        char *to = a->out + r * a->out_row;
        const lane *x = reads ? (const lane *)from : row;
        lane *y = writes ? (lane *)to : row;
        if (padded != n) v_store(row + padded - LANES, v_splat(a->kind == FA_SOFTMAX ? -INFINITY : 0));
        EACH_BLOCK(a->watch, reads ? 0 : n, j, stop) {
            const int64_t offset = j * size, count = stop - j;
            load_row(a->dtype, from + offset, count, 1, row + j);
            if (a->residual) add_row(a->dtype, a->residual + r * a->residual_row + offset, count, row + j);
            if (a->total) store_row(a->dtype, row + j, count, 1, a->total + r * a->total_row + offset);
        }
        switch (a->kind) {
        case FA_SOFTMAX: softmax_row(a->watch, x, y, n); break;
        case FA_ACTIVATE:
            activate_row_of(a->watch, a->activation, x, y, padded);
            if (a->up) times_up(a, r, 0, row);
            break;
        default:
            if (a->up && a->gate_first) times_up(a, r, 1, row);
            norm_row(a, x, y);
            if (a->up && !a->gate_first) times_up(a, r, 1, row);
        }
        EACH_BLOCK(a->watch, writes ? 0 : n, j, stop) store_row(a->dtype, row + j, stop - j, 1, to + j * size);
    }
}
