/* Dropout of rows: each element becomes 0, or is multiplied by `scale`, as the counter of its place decides. Row i is what
 * philox.inc.h calls a query, column j a key.
 *
 * Literals  dtype.
 * Exports   dropout_run. */
#pragma once
#include "interface/rows.h"
#include "philox.inc.h"

#define DROP_ROWS (DROP_VECTORS / PHILOX_PARTS) /* at a time: a product waits for the one before */

INLINE void drop_vectors(fa_dtype dtype, const fa_dropout_args *a, int64_t i, int64_t j0, const vi_t *keep)
{
    const int64_t size = dtype_size(dtype);
    for (int64_t j = j0; j < smaller(a->n, j0 + KEEP_KEYS); j += LANES) {
        const v_t x = v_load_as_part(dtype, a->x + i * a->x_row + j * size, a->n - j) * v_splat((lane)a->scale);
        v_store_as_part(dtype, a->out + i * a->out_row + j * size, (v_t)((vi_t)x & keep[(j - j0) / LANES]), a->n - j);
    }
}

static void dropout_run(const fa_dropout_args *a, int64_t begin, int64_t end)
{
    const philox_key key = philox_key_from(a->rate, a->seed);
    for (int64_t i = begin; i < end; i += DROP_ROWS) {
        philox_row rows[DROP_ROWS];
        UNROLL_FOR(int r = 0; r < DROP_ROWS; r++) rows[r] = row_of_query(&key, i + r, a->stream);
        for (int64_t j0 = 0, done = 1; j0 < a->n; j0 += KEEP_KEYS, done++) {
            vi_t keep[DROP_ROWS][KEEP_KEYS / LANES];
            if (done % (1 << 14) == 0 && given_up(a->watch)) return;
            keep_of_keys(DROP_ROWS, &key, rows, j0, keep);
            for (int64_t r = 0; r < smaller(DROP_ROWS, end - i); r++)
                WITH_DTYPE(a->dtype, dtype, drop_vectors(dtype, a, i + r, j0, keep[r]));
        }
    }
}
