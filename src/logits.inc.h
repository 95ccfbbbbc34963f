/* Cross-entropy of rows of logits, and its gradient in their place:
 *
 *   loss = log(sum(exp(x))) - (1 - smoothing) x[target] - smoothing mean(x)
 *   x = (softmax(x) - (1 - smoothing) [j = target] - smoothing / n) factor
 *
 * A row of a large vocabulary is read from memory once and then stays in the second-level cache.
 *
 * Literals  squares.
 * Exports   logits_run. */
#pragma once
#include "rows.inc.h"

/* x = exp(x - max); returns the sum. Four accumulators, as an addition waits for the one before. */
INLINE lane exponentials(const fa_watch *watch, lane *x, int64_t n, lane max)
{
    v_t sum[4] = {v_splat(0), v_splat(0), v_splat(0), v_splat(0)};
    EACH_BLOCK(watch, n, begin, end)
        for (int64_t j = begin; j < end; j += 4 * LANES)
            UNROLL_FOR(int u = 0; u < 4; u++) {
                const int64_t left = n - j - u * LANES;
                if (left <= 0) break;
                lane *at = x + j + u * LANES;
                const v_t power = v_exp(v_load_part(at, left) - v_splat(max));
                v_store_part(at, power, left);
                sum[u] += left < LANES ? v_load_part(at, left) : power;
            }
    return v_sum((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

static void logits_run(const fa_logits_args *a, int64_t begin, int64_t end)
{
    const int64_t n = a->n;
    const double smoothing = a->label_smoothing;
    for (int64_t r = begin; r < end; r++) {
        lane *x = (lane *)(a->logits + r * a->row);
        const int64_t target = a->targets[r];
        v_t most = v_splat(-INFINITY);
        int64_t j = 0;
        EACH_BLOCK(a->watch, n, first, stop)
            for (; j + LANES <= stop; j += LANES) most = v_max(most, v_load(x + j));
        if (n - j >= LANES) return; /* given up */
        lane max = v_max_lanes(most);
        for (; j < n; j++) max = x[j] > max ? x[j] : max;
        const double at_target = (double)x[target] - (double)max;
        /* Without smoothing nothing is summed: -inf would make it NaN. */
        const double mean = smoothing > 0 ? (double)row_sums_of(a->watch, 0, x, n, max).sum / (double)n : 0;
        const double sum = (double)exponentials(a->watch, x, n, max);
        const double chosen = smoothing < 1 ? (1 - smoothing) * at_target : 0;
        ((lane *)a->loss)[r] = (lane)(log(sum) - chosen - (smoothing > 0 ? smoothing * mean : 0));
        if (!a->factor) continue;
        const lane factor = ((const lane *)a->factor)[r];
        const v_t scale = v_splat((lane)(1 / sum)), share = v_splat((lane)(smoothing / (double)n));
        const lane probability = (lane)((double)x[target] / sum - (1 - smoothing) - smoothing / (double)n);
        EACH_BLOCK(a->watch, n, first, stop)
            for (int64_t i = first; i < stop; i += LANES) {
                const v_t gradient = v_load_part(x + i, n - i) * scale - share;
                v_store_part(x + i, gradient * v_splat(factor), n - i);
            }
        x[target] = probability * factor;
    }
}
