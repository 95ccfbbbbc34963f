/* Products with Hadamard matrices, H_1 = (1) and H_2n = (H_n H_n; H_n -H_n) / sqrt(2): H x spreads what stands out in x over
 * all elements, so that rounding them by one scale loses less (QuaRot, Ashkboos et al. 2024), and (H x) (H y) = x y.
 *
 * Exports   hadamard_row; hadamard_columns, of vectors. */
#pragma once
#include "basics.inc.h"

#define HADAMARD_MOST 256 /* elements of a block */

/* x (n vectors) = sqrt(size) H x by Pease's algorithm: log2(size) times, sums and differences of its halves, in turn. A
 * literal n keeps them in registers. */
INLINE void hadamard_vectors(int n, lane *x)
{
    v_t from[HADAMARD_MOST / LANES], to[HADAMARD_MOST / LANES];
    UNROLL_FOR(int i = 0; i < n; i++) from[i] = v_load(x + i * LANES);
    UNROLL_FOR(int done = 1; done < n * LANES; done *= 2) {
        UNROLL_FOR(int i = 0; i < n / 2; i++) {
            const v_t sum = from[i] + from[i + n / 2], difference = from[i] - from[i + n / 2];
            to[2 * i] = (v_t)V_ZIP_LOW(sum, difference), to[2 * i + 1] = (v_t)V_ZIP_HIGH(sum, difference);
        }
        UNROLL_FOR(int i = 0; i < n; i++) from[i] = to[i];
    }
    UNROLL_FOR(int i = 0; i < n; i++) v_store(x + i * LANES, from[i]);
}

/* x (n) = H x, in blocks of the largest powers of two that fit. */
static void hadamard_row(int64_t n, lane *x)
{
    for (int64_t size = HADAMARD_MOST; n > 0; x += size, n -= size) {
        while (size > n) size /= 2;
        switch (size / LANES) {
        case 2: hadamard_vectors(2, x); break;
        case 4: hadamard_vectors(4, x); break;
        case 8: hadamard_vectors(8, x); break;
        default:
            for (int64_t half = 1; half < size; half *= 2)
                for (int64_t first = 0; first < size; first += 2 * half)
                    for (int64_t j = first; j < first + half; j++) {
                        const lane a = x[j], b = x[j + half];
                        x[j] = a + b, x[j + half] = a - b;
                    }
        }
        const lane factor = 1 / LANE_SQRT((lane)size);
        for (int64_t j = 0; j < size; j++) x[j] *= factor;
    }
}

/* x (n, width) = H x: the same of its columns. `width` is whole vectors. */
static void hadamard_columns(int64_t n, int64_t width, lane *x)
{
    for (int64_t size = HADAMARD_MOST; n > 0; x += size * width, n -= size) {
        while (size > n) size /= 2;
        const v_t factor = v_splat(1 / LANE_SQRT((lane)size));
        for (int64_t half = width; half < size * width; half *= 2)
            for (int64_t first = 0; first < size * width; first += 2 * half)
                for (int64_t i = first; i < first + half; i += LANES) {
                    const v_t a = v_load(x + i), b = v_load(x + i + half);
                    v_store(x + i, a + b), v_store(x + i + half, a - b);
                }
        for (int64_t i = 0; i < size * width; i += LANES) v_store(x + i, v_load(x + i) * factor);
    }
}
