/* Sigmoid attention (Ramapuram et al. 2024): p = 1 / (1 + exp(-(s + bias))) takes the place of the online softmax. It
 * has no maximum, no sum, nothing to rescale: keys do not compete. A masked key, -inf, gives 0; NaN stays NaN.
 *
 * Exports   SIGMOID_MAX; sigmoid_update (queries on the lanes), few_sigmoid (keys on the lanes). */
#pragma once
#include "softmax.inc.h"

#define SIGMOID_MAX 43 /* from here on 1, even in float64; two denominators' product is still finite in float32 */

/* x and y become their sigmoids, e^x / (1 + e^x) and so for y. They share one division: the loop waits for each. */
INLINE void v_sigmoid_pair(v_t *x, v_t *y)
{
    const v_t most = v_splat(SIGMOID_MAX), exp_x = v_exp_prob(v_min(most, *x)), exp_y = v_exp_prob(v_min(most, *y));
    const v_t below_x = 1 + exp_x, below_y = 1 + exp_y, inverse = 1 / (below_x * below_y);
    *x = exp_x * (below_y * inverse);
    *y = exp_y * (below_x * inverse);
}

/* s (n, nv vectors) becomes probabilities. Keys go in pairs, an odd last one with a masked key. */
INLINE void sigmoid_update(int nv, lane *s, int64_t n, lane bias)
{
    for (int64_t j = 0; j < n; j += 2)
        UNROLL_FOR(int u = 0; u < nv; u++) {
            lane *to = s + j * BLOCK_Q + u * LANES;
            v_t x = v_load(to) + v_splat(bias), y = v_splat(-INFINITY);
            if (j + 1 < n) y = v_load(to + BLOCK_Q) + v_splat(bias);
            v_sigmoid_pair(&x, &y);
            v_store(to, x);
            if (j + 1 < n) v_store(to + BLOCK_Q, y);
        }
}

/* The same for s (n) of one row, in pairs of vectors: s holds BLOCK_K. */
INLINE void few_sigmoid(lane *s, int64_t n, lane bias)
{
    _Static_assert(BLOCK_K % (2 * LANES) == 0, "a block is whole pairs of vectors");
    for (int64_t j = n; j < round_up(n, 2 * LANES); j++) s[j] = -INFINITY;
    for (int64_t j = 0; j < n; j += 2 * LANES) {
        v_t x = v_load(s + j) + v_splat(bias), y = v_load(s + j + LANES) + v_splat(bias);
        v_sigmoid_pair(&x, &y);
        v_store(s + j, x);
        v_store(s + j + LANES, y);
    }
}
