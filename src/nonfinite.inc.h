/* Rows of V that are not finite. A probability of 0 is no shield: 0 times NaN or Inf is NaN. Where some query does not
 * attend some key, 0 takes their place, and they are added at the end to those rows that attend them.
 *
 * Literals  dtype: of V. fused: 1 if only a sum is rounded, 0 if its product is, too.
 * Exports   bad_rows, load_value, find_bad_rows, find_bad_rows_of, copy_good_rows, gather_values, add_bad_value. */
#pragma once
#include "scales.inc.h"

typedef struct {
    int64_t row[BLOCK_K], n;
} bad_rows;

/* Element d of a row of V that is not finite: of blocks of 4 bits, all of it. */
INLINE lane load_value(fa_dtype dtype, const char *v, int64_t d)
{
    return dtype == FA_I4 ? NAN : load_element(dtype, v + d * dtype_size(dtype));
}

/* Which of n rows of V are not finite. */
INLINE void find_bad_rows(fa_dtype dtype, const char *v, int64_t v_row, int64_t n, int64_t width, bad_rows *bad)
{
    v_t sum[4] = {v_splat(0), v_splat(0), v_splat(0), v_splat(0)}; /* as in row_finite; one would wait for each row */
    for (int64_t j = 0; j < n; j += 4)
        for (int64_t d = 0; d < width; d += LANES)
            UNROLL_FOR(int i = 0; i < 4; i++) {
                const char *from = v + smaller(j + i, n - 1) * v_row + d * dtype_size(dtype);
                sum[i] += v_load_as_part(dtype, from, width - d) * v_splat(0);
            }
    const v_t all = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    bad->n = 0;
    for (int64_t j = 0; v_any(all != all) && j < n; j++)
        if (!row_finite(dtype, v + j * v_row, width)) bad->row[bad->n++] = j;
}

static void find_bad_rows_of(fa_dtype from, const char *v, int64_t v_row, int64_t n, int64_t width, bad_rows *bad)
{
    WITH_DTYPE(from, dtype, find_bad_rows(dtype, v, v_row, n, width, bad));
}

/* A copy of n rows of `bytes`, side by side, with 0 in place of the bad ones. */
INLINE void copy_good_rows(const bad_rows *bad, const char *v, int64_t v_row, int64_t n, int64_t bytes, char *to)
{
    for (int64_t j = 0; j < n; j++) memcpy(to + j * bytes, v + j * v_row, bytes);
    for (int64_t i = 0; i < bad->n; i++) memset(to + bad->row[i] * bytes, 0, bytes);
}

/* The same as lanes, for any n keys of the KV head that `rows` names. */
INLINE void gather_values(const fa_attention_args *a, const row_block *rows, const int64_t *key, int64_t n, lane *to,
                          bad_rows *bad)
{
    const int64_t bytes = a->head_dim_v * (int64_t)sizeof(lane);
    for (int64_t j = 0; j < n; j++)
        load_row(a->v.dtype, at_key(&a->v, rows, key[j]), a->head_dim_v, scale_of(&a->v_scale, rows, key[j]),
                 to + j * a->head_dim_v);
    find_bad_rows(LANE_DTYPE, (const char *)to, bytes, n, a->head_dim_v, bad);
    for (int64_t i = 0; i < bad->n; i++) memset(to + bad->row[i] * a->head_dim_v, 0, bytes);
}

/* ot (head_dim_v, nv) += probs (nv) times the value of a key that was taken out, in the lanes of the mask `attends`, or
 * in all of them if that is NULL. Kernels round the sum once (`fused`), or the product and the sum. */
INLINE void add_bad_value(const fa_attention_args *a, int nv, int fused, const row_block *rows, int64_t key,
                          const lane *probs, const lane *attends, lane *ot)
{
    const char *v = at_key(&a->v, rows, key);
    const lane scale = scale_of(&a->v_scale, rows, key);
    for (int64_t d = 0; d < a->head_dim_v; d++) {
        const v_t value = v_splat(load_value(a->v.dtype, v, d) * scale);
        for (int u = 0; u < nv; u++) {
            lane *to = ot + d * BLOCK_Q + u * LANES;
            const v_t prob = v_load(probs + u * LANES), old = v_load(to);
            const vi_t takes = attends ? (vi_t)v_load(attends + u * LANES) : ~(vi_t){0};
            v_store(to, fused ? v_select(takes, v_fma(prob, value, old), old)
                              : old + v_select(takes, prob * value, v_splat(0)));
        }
    }
}
