/* What becomes of a linear map's sums: out = activation(acc scale + bias) [up] + residual, while they are in the caches.
 *
 * Literals  activation, dtype.
 * Exports   panel_rows, rows_of_panel, finish_rows. */
#pragma once
#include "activation.inc.h"
#include "linear_input.inc.h"
_Static_assert(PANEL % (2 * LANES) == 0, "a row's vectors are stored by two");

/* Rows of a panel, or of a gated pair, that wait to be finished. The pointers are at the first of them. */
typedef struct {
    const fa_linear_args *a;
    int last;                        /* no panel of the row follows */
    int gated, bytes;                /* of a, which is read once a panel: a store may change it, for all gcc knows */
    int64_t outputs;                 /* of a map, also */
    int64_t rows, n;                 /* output features of the panel */
    const lane *acc, *up;            /* (rows, PANEL): of a gated pair, acc is the gate's */
    const row_grid *grid;            /* (rows): of int8 x */
    const lane *scale, *sums, *bias; /* of the panel, or NULL: of the weights, and their sums */
    const char *residual;            /* or NULL */
    char *out, *pre;                 /* pre may be NULL */
} panel_rows;

static panel_rows rows_of_panel(const fa_linear_args *a, int64_t row, int64_t rows, int64_t panel, const lane *acc,
                                const lane *up, const row_grid *grid)
{
    const int64_t first = panel / (1 + a->gated) * PANEL, size = dtype_size(a->dtype);
    return (panel_rows){
        .a = a,
        .last = a->n - first <= PANEL,
        .gated = a->gated,
        .bytes = multiplication_of(a) == BY_BYTES,
        .outputs = a->n,
        .rows = rows,
        .n = smaller(a->n - first, PANEL),
        .acc = acc,
        .up = up,
        .grid = grid,
        .scale = a->weight == FA_I8 && !a->transposed ? (const lane *)a->scales + panel * PANEL : NULL,
        .sums = a->x_int8 ? (const lane *)a->sums + panel * PANEL : NULL,
        .bias = a->bias ? (const lane *)a->bias + first : NULL,
        .residual = a->residual ? a->residual + row * a->residual_row + first * size : NULL,
        .out = a->out + row * a->out_row + first * size,
        .pre = a->pre ? a->pre + row * a->pre_row + first * size : NULL,
    };
}

/* The product's vector at column c of a panel, n columns before its end, scaled and with its bias; `up`: of a pair's
 * second panel. */
INLINE v_t v_scaled(const panel_rows *p, int up, const lane *acc, row_grid x, int64_t c, int64_t n)
{
    const int64_t at = c + up * PANEL;
    v_t y = v_load(acc + c);
#if LANE_BITS == 32
    if (p->bytes) y = __builtin_convertvector((vi_t)y, v_t);
#endif
    if (p->scale) y = y * v_load(p->scale + at);
    /* The scale of x last: of large x, the sum times it could overflow. */
    if (p->sums) y = v_fma(v_load(p->sums + at), v_splat(x.middle), y * v_splat(x.scale));
    return p->bias ? y + v_load_part(p->bias + c + up * p->outputs, n) : y;
}

/* The results of one row at column c of the panel, but for their dtype. */
INLINE v_t v_finished(fa_dtype dtype, fa_activation activation, const panel_rows *p, int64_t c, int64_t n)
{
    const int64_t size = dtype_size(dtype);
    const row_grid x = p->sums ? *p->grid : (row_grid){1, 0};
    v_t y = v_scaled(p, 0, p->acc, x, c, n);
    if (p->pre) v_store_as_part(dtype, p->pre + c * size, y, n);
    y = v_activate(activation, y);
    if (p->gated) {
        const v_t up = v_scaled(p, 1, p->up, x, c, n);
        if (p->pre) v_store_as_part(dtype, p->pre + (p->outputs + c) * size, up, n);
        y = y * up;
    }
    return p->residual ? y + v_load_as_part(dtype, p->residual + c * size, n) : y;
}

/* Finishes `rows` of them. p is the caller's copy, which no store can change: it stays in registers. Asks for what the
 * row's next panel will read and write. */
INLINE void finish_rows_as(fa_dtype dtype, int64_t n, fa_activation activation, panel_rows p, int64_t rows)
{
    const int64_t size = dtype_size(dtype), out_row = p.a->out_row, residual_row = p.a->residual_row;
    const int64_t pre_row = p.a->pre_row;
    for (; rows > 0; rows--) {
        UNROLL_FOR(int64_t b = PANEL * size; b < 2 * PANEL * size; b += 64) {
            if (p.last) break;
            __builtin_prefetch(p.out + b, 1, 3);
            if (p.residual) __builtin_prefetch(p.residual + b, 0, 3);
        }
        UNROLL_FOR(int64_t c = 0; c < PANEL; c += 2 * LANES) {
            if (c >= n) break;
            const int two = c + LANES < n;
            const v_t y = v_finished(dtype, activation, &p, c, n - c);
            const v_t next = two ? v_finished(dtype, activation, &p, c + LANES, n - c - LANES) : y;
            v_store_two_as_part(dtype, p.out + c * size, y, next, n - c);
        }
        p.acc += PANEL, p.up += PANEL, p.grid += p.sums != NULL, p.out += out_row;
        if (p.residual) p.residual += residual_row;
        if (p.pre) p.pre += pre_row;
    }
}

/* The same; whole panels of the common types have both as literals, and those of sums and a bias alone what they lack. */
INLINE void finish_rows_by(fa_activation activation, const panel_rows *p, int64_t rows)
{
    const fa_dtype dtype = p->a->dtype;
    panel_rows simple = *p;
    simple.gated = simple.bytes = 0;
    simple.scale = simple.sums = NULL, simple.pre = NULL;
    if (p->n < PANEL || (dtype != LANE_DTYPE && dtype != FA_BF16)) finish_rows_as(dtype, p->n, activation, *p, rows);
    else if (p->scale || p->sums || p->gated || p->pre) {
        if (dtype == LANE_DTYPE) finish_rows_as(LANE_DTYPE, PANEL, activation, *p, rows);
        else finish_rows_as(FA_BF16, PANEL, activation, *p, rows);
    } else if (dtype == LANE_DTYPE) finish_rows_as(LANE_DTYPE, PANEL, activation, simple, rows);
    else finish_rows_as(FA_BF16, PANEL, activation, simple, rows);
}

/* One function for each activation: in one for all, every call would load what any of them needs. */
#define FA_ACTIVATION(constant, name, formula, slope)                                                                  \
    NOINLINE void finish_##constant(const panel_rows *p, int64_t rows) { finish_rows_by(constant, p, rows); }
#include "activations.inc"
NOINLINE void finish_FA_NONE(const panel_rows *p, int64_t rows) { finish_rows_by(FA_NONE, p, rows); }

/* Finishes `rows` of those that wait, and moves p to the others. */
NOINLINE void finish_rows(panel_rows *p, int64_t rows)
{
    const fa_linear_args *a = p->a;
    switch (a->activation) {
#define FA_ACTIVATION(constant, name, formula, slope)                                                                  \
    case constant: finish_##constant(p, rows); break;
#include "activations.inc"
    default: finish_FA_NONE(p, rows);
    }
    p->rows -= rows, p->acc += rows * PANEL, p->up += rows * PANEL, p->out += rows * a->out_row;
    if (p->sums) p->grid += rows;
    if (p->residual) p->residual += rows * a->residual_row;
    if (p->pre) p->pre += rows * a->pre_row;
}
