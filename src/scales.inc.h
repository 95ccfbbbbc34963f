/* int8 keys and values: row j of k stands for k_scale[j] times its integers, and v likewise. The tile kernels widen and
 * scale rows in the copy that they make anyway. The few-row kernel reads the bytes in place, and applies the scales of keys
 * to their scores, and those of values to the probabilities.
 *
 * Exports   WIDEST_I8, LEAST_SCALE, scale_of, is_plain, load_scales; load_block_scales. */
#pragma once
#include "ranges.inc.h"

#define LEAST_SCALE ((lane)0x1p-100) /* of values: with smaller ones in the probabilities, sums lose digits */
#define WIDEST_I8 128                /* no int8 is larger; a power of two, by which every number is divided exactly */

/* Of row `key`; 1 if the array needs none. */
INLINE lane scale_of(const fa_array *scale, const row_block *rows, int64_t key)
{
    return scale->data ? *(const lane_u *)at_key(scale, rows, key) : 1;
}

/* Whether x is 0, or its magnitude is from `least` to what times WIDEST_I8 is finite. */
INLINE int is_plain(lane x, lane least)
{
    const lane size = x < 0 ? -x : x;
    return x == 0 || (least <= size && size <= LANE_MAX / WIDEST_I8);
}

/* to (n), filled up with 0 to whole vectors, = factor times the scales of n keys from j0 on. Those of the next block
 * are prefetched. Returns whether all are plain, as is_plain says. */
INLINE int load_scales(const fa_array *scale, const row_block *rows, int64_t j0, int64_t n, lane factor, lane least,
                       lane *to)
{
    vi_t odd = {0};
    for (int64_t j = 0; j < n; j += LANES) {
        const int64_t left = smaller(LANES, n - j);
        v_t x = v_splat(0);
        if (scale->row == sizeof(lane) && in_a_row(scale, j0 + j, left))
            x = v_load_part(at_key(scale, rows, j0 + j), left);
        else EACH_KEY(scale, rows, j0 + j, left, i, from) x[i] = *(const lane_u *)from;
        const v_t size = v_select(x < v_splat(0), -x, x);
        odd |= ~((size >= v_splat(least)) & (size <= v_splat(LANE_MAX / WIDEST_I8))) & (x != v_splat(0));
        v_store(to + j, x * v_splat(factor));
    }
    if (!scale->blocks) prefetch_rows(at_key(scale, rows, j0 + n), scale->row * LANES, ceil_div(BLOCK_K, LANES), 64);
    return !v_any(odd);
}

#if LANE_BITS == 32
/* to (blocks, BLOCK_K), filled up with 0, = the scales of n rows of FA_I4, `row` bytes apart; whole vectors of rows can be read.
 * Returns whether all are finite. */
static int load_block_scales(const char *from, int64_t row, int64_t n, int64_t blocks, lane *to)
{
    v_t zero = v_splat(0); /* becomes NaN, as in row_finite */
    for (int64_t j = 0; j < n; j += LANES)
        for (int64_t b = 0; b < blocks; b += 4) { /* past the last one are codes, which nobody uses */
            vq_t even, odd;                       /* four scales of each row */
            UNROLL_FOR(int i = 0; i < LANES / 2; i++) {
                const char *two_rows = from + (j + 2 * i) * row + 2 * b;
                uint64_t first, second;
                memcpy(&first, two_rows, sizeof first), memcpy(&second, two_rows + row, sizeof second);
                even[i] = first, odd[i] = second;
            }
            for (int i = 0; i < 4 && b + i < blocks; i++) {
                v_t scale = v_from_f16((vw_t)((even >> 16 * i & 0xffff) | (odd >> 16 * i & 0xffff) << 32));
                for (int64_t past = n - j; past < LANES; past++) scale[past] = 0;
                zero += scale * v_splat(0);
                v_store(to + (b + i) * BLOCK_K + j, scale);
            }
        }
    return !v_any(zero != zero);
}
#endif
