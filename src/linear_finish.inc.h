/* What becomes of a linear map's sums: out = activation(acc scale + bias) [up] + residual, while they are in the caches.
 *
 * Literals  activation, dtype.
 * Exports   finish_panels. */
#pragma once
#include "activation.inc.h"
#include "linear_input.inc.h"

/* Where a row's results of one panel come from. */
typedef struct {
    const lane *acc, *up; /* of a gated pair, acc is the gate's */
    row_grid x;           /* of int8 x */
} panel_sums;

/* The product's vector at column c of a panel, scaled and with its bias. `sums` are those of the weights. */
INLINE v_t v_scaled(const fa_linear_args *a, const lane *acc, row_grid x, const lane *scale, const lane *sums,
                    const lane *bias, int64_t n)
{
    v_t y = v_load(acc);
#if LANE_BITS == 32
    if (multiplication_of(a) == BY_BYTES) y = __builtin_convertvector((vi_t)y, v_t);
#endif
    if (scale) y = y * v_load(scale);
    /* The scale of x last: of large x, the sum times it could overflow. */
    if (a->x_int8) y = v_fma(v_load(sums), v_splat(x.middle), y * v_splat(x.scale));
    return bias ? y + v_load_part(bias, n) : y;
}

/* out = activation(acc scale + bias) [(up scale + bias)] + residual: one row of n output features of one panel. */
INLINE void finish_panel_as(fa_dtype dtype, int64_t n, const fa_linear_args *a, fa_activation activation, int64_t row,
                            int64_t panel, panel_sums sums)
{
    const int64_t first = panel / (1 + a->gated) * PANEL, size = dtype_size(dtype);
    const lane *scale = a->weight == FA_I8 && !a->transposed ? (const lane *)a->scales + panel * PANEL : NULL;
    const lane *weights = a->x_int8 ? (const lane *)a->sums + panel * PANEL : NULL;
    const lane *bias = a->bias ? (const lane *)a->bias + first : NULL;
    const char *residual = a->residual ? a->residual + row * a->residual_row + first * size : NULL;
    char *out = a->out + row * a->out_row + first * size,
         *pre = a->pre ? a->pre + row * a->pre_row + first * size : NULL;
    UNROLL_FOR(int64_t c = 0; c < PANEL; c += LANES) {
        if (c >= n) break;
        v_t y = v_scaled(a, sums.acc + c, sums.x, scale ? scale + c : NULL, weights ? weights + c : NULL,
                         bias ? bias + c : NULL, n - c);
        if (pre) v_store_as_part(dtype, pre + c * size, y, n - c);
        y = v_activate(activation, y);
        if (a->gated) {
            const v_t up = v_scaled(a, sums.up + c, sums.x, scale ? scale + PANEL + c : NULL,
                                    weights ? weights + PANEL + c : NULL, bias ? bias + a->n + c : NULL, n - c);
            if (pre) v_store_as_part(dtype, pre + (a->n + c) * size, up, n - c);
            y = y * up;
        }
        if (residual) y = y + v_load_as_part(dtype, residual + c * size, n - c);
        v_store_as_part(dtype, out + c * size, y, n - c);
    }
}

/* The same; whole panels of the common types have both as literals. */
INLINE void finish_panel(const fa_linear_args *a, fa_activation activation, int64_t row, int64_t panel, panel_sums sums)
{
    const int64_t n = smaller(a->n - panel / (1 + a->gated) * PANEL, PANEL);
    if (n == PANEL && a->dtype == LANE_DTYPE) finish_panel_as(LANE_DTYPE, PANEL, a, activation, row, panel, sums);
    else if (n == PANEL && a->dtype == FA_BF16) finish_panel_as(FA_BF16, PANEL, a, activation, row, panel, sums);
    else finish_panel_as(a->dtype, n, a, activation, row, panel, sums);
}

/* Rows of one panel, or of a gated pair: acc and up are (rows, PANEL). */
INLINE void finish_rows(const fa_linear_args *a, fa_activation activation, int64_t row, int64_t rows, int64_t panel,
                        const lane *acc, const lane *up, const row_grid *grid)
{
    for (int64_t r = 0; r < rows; r++)
        finish_panel(a, activation, row + r, panel,
                     (panel_sums){acc + r * PANEL, up + r * PANEL, a->x_int8 ? grid[r] : (row_grid){1, 0}});
}

static void finish_panels(const fa_linear_args *a, int64_t row, int64_t rows, int64_t panel, const lane *acc,
                          const lane *up, const row_grid *grid)
{
    switch (a->activation) {
#define FA_ACTIVATION(constant, name, formula, slope)                                                                  \
    case constant: finish_rows(a, constant, row, rows, panel, acc, up, grid); break;
#include "activations.inc"
    default: finish_rows(a, FA_NONE, row, rows, panel, acc, up, grid);
    }
}
