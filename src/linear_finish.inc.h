/* What becomes of a linear map's sums: out = activation(acc scale + bias) [up] + residual, while they are in the caches.
 *
 * Literals  any: 1 where activation and dtype are no literals. activation, dtype.
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
    int flush;                       /* denormal results in bfloat16 may become 0, as inputs of the products do */
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
    const int64_t first = panel / (1 + a->gated) * PANEL, size = dtype_size(a->out_dtype);
    return (panel_rows){
        .a = a,
        .last = a->n - first <= PANEL,
        .gated = a->gated,
        .bytes = multiplication_of(a) == BY_BYTES,
        .flush = multiplication_of(a) == BY_BYTES || multiplication_of(a) == BY_PAIRS,
        .outputs = a->n,
        .rows = rows,
        .n = smaller(a->n - first, PANEL),
        .acc = acc,
        .up = up,
        .grid = grid,
        .scale = by_row(a->weight) && !a->transposed ? (const lane *)a->scales + panel * PANEL : NULL,
        .sums = a->x_int8 ? (const lane *)a->sums + panel * PANEL : NULL,
        .bias = a->bias ? (const lane *)a->bias + first : NULL,
        .residual = a->residual ? a->residual + row * a->residual_row + first * size : NULL,
        .out = a->out + row * a->out_row + first * size,
        .pre = a->pre ? a->pre + row * a->pre_row + first * size : NULL,
    };
}

/* The product's vector at column c of a panel, scaled and with its bias; `up`: of a pair's second panel. From c on the
 * panel has n columns: if that is 0 or less, nobody stores the vector. */
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
    return p->bias && n > 0 ? y + v_load_part(p->bias + c + up * p->outputs, n) : y;
}

/* v_activate_each of FEW vectors, for any activation. */
NOINLINE void activate_any(fa_activation activation, fa_dtype to, v_t *y)
{
    switch (activation) {
#define FA_ACTIVATION(constant, name, formula, slope)                                                                  \
    case constant: v_activate_each(constant, to, FEW, y); break;
#include "activations.inc"
    default: break;
    }
}

/* The results of `rows` rows, 1 or 2, at two vectors of columns from c on, n columns before the panel's end. A vector
 * waits for each of its steps: so four take them together. */
INLINE void finish_few(int any, fa_dtype dtype, fa_activation activation, int rows, const panel_rows *p, int64_t c,
                       int64_t n)
{
    const int64_t size = dtype_size(dtype), out_row = p->a->out_row, residual_row = p->a->residual_row;
    const int64_t pre_row = p->a->pre_row;
    const row_grid none = {1, 0};
    v_t y[FEW] = {0};
    UNROLL_FOR(int i = 0; i < 2 * rows; i++) {
        const int64_t r = i / 2, at = i % 2 * LANES;
        y[i] = v_scaled(p, 0, p->acc + r * PANEL, p->sums ? p->grid[r] : none, c + at, n - at);
        if (p->pre && n > at) v_store_as_part(dtype, p->pre + r * pre_row + (c + at) * size, y[i], n - at);
    }
    /* The error of a short GELU, which is small beside its largest results, would be multiplied. */
    const fa_dtype to = activation == FA_GELU && p->gated ? LANE_DTYPE : dtype;
    if (any) activate_any(activation, to, y);
    else v_activate_each(activation, to, 2 * rows, y);
    UNROLL_FOR(int i = 0; i < 2 * rows; i++) {
        const int64_t r = i / 2, at = i % 2 * LANES;
        if (p->gated) {
            const v_t up = v_scaled(p, 1, p->up + r * PANEL, p->sums ? p->grid[r] : none, c + at, n - at);
            char *pre = p->pre + r * pre_row + (p->outputs + c + at) * size;
            if (p->pre && n > at) v_store_as_part(dtype, pre, up, n - at);
            y[i] = y[i] * up;
        }
        if (p->residual && n > at)
            y[i] = y[i] + v_load_as_part(dtype, p->residual + r * residual_row + (c + at) * size, n - at);
    }
    UNROLL_FOR(int r = 0; r < rows; r++) {
        char *out = p->out + r * out_row + c * size;
        if (dtype == FA_BF16 && p->flush) v_store_pairs_as_part(out, y[2 * r], y[2 * r + 1], n);
        else v_store_two_as_part(dtype, out, y[2 * r], y[2 * r + 1], n);
    }
}
_Static_assert(FEW == 4, "two rows of two vectors");

/* Finishes `rows` of them. p is the caller's copy, which no store can change: it stays in registers. Asks for what the
 * row's next panel will read and write. */
INLINE void finish_rows_as(int any, fa_dtype dtype, int64_t n, fa_activation activation, panel_rows p, int64_t rows)
{
    const int64_t size = dtype_size(dtype), out_row = p.a->out_row, residual_row = p.a->residual_row;
    const int64_t pre_row = p.a->pre_row;
    while (rows > 0) {
        const int64_t here = smaller(2, rows);
        for (int64_t r = 0; r < here && !p.last; r++)
            UNROLL_FOR(int64_t b = PANEL * size; b < 2 * PANEL * size; b += 64) {
                __builtin_prefetch(p.out + r * out_row + b, 1, 3);
                if (p.residual) __builtin_prefetch(p.residual + r * residual_row + b, 0, 3);
            }
        for (int64_t c = 0; c < n; c += 2 * LANES) {
            if (here == 2) finish_few(any, dtype, activation, 2, &p, c, n - c);
            else finish_few(any, dtype, activation, 1, &p, c, n - c);
        }
        rows -= here;
        p.acc += here * PANEL, p.up += here * PANEL, p.grid += p.sums ? here : 0, p.out += here * out_row;
        if (p.residual) p.residual += here * residual_row;
        if (p.pre) p.pre += here * pre_row;
    }
}

/* Any rows, in one function for all activations, dtypes and parts of panels. */
NOINLINE void finish_any(const panel_rows *p, int64_t rows)
{
    finish_rows_as(1, p->a->out_dtype, p->n, p->a->activation, *p, rows);
}

#if LANE_BITS == 32 && !defined FA_GENERIC
/* Whole panels of the common types. Two cases are compiled with what they have as literals: floats, and bytes by bytes,
 * neither with a gate nor with `pre`. */
INLINE void finish_rows_by(fa_activation activation, const panel_rows *p, int64_t rows)
{
    const fa_dtype dtype = p->a->out_dtype;
    const int plain = !p->gated && !p->pre;
    panel_rows simple = *p, bytes = *p;
    simple.gated = simple.bytes = bytes.gated = 0, bytes.bytes = bytes.flush = 1;
    simple.scale = simple.sums = NULL, simple.pre = bytes.pre = NULL;
    if (plain && p->bytes) {
        if (!p->scale || !p->sums) __builtin_unreachable();
        if (dtype == LANE_DTYPE) finish_rows_as(0, LANE_DTYPE, PANEL, activation, bytes, rows);
        else finish_rows_as(0, FA_BF16, PANEL, activation, bytes, rows);
    } else if (p->scale || p->sums || !plain) {
        if (dtype == LANE_DTYPE) finish_rows_as(0, LANE_DTYPE, PANEL, activation, *p, rows);
        else finish_rows_as(0, FA_BF16, PANEL, activation, *p, rows);
    } else if (dtype == LANE_DTYPE) finish_rows_as(0, LANE_DTYPE, PANEL, activation, simple, rows);
    else finish_rows_as(0, FA_BF16, PANEL, activation, simple, rows);
}

/* One function for each activation: in one for all, every call would load what any of them needs. */
#define FA_ACTIVATION(constant, name, formula, slope)                                                                  \
    NOINLINE void finish_##constant(const panel_rows *p, int64_t rows) { finish_rows_by(constant, p, rows); }
#include "activations.inc"
NOINLINE void finish_FA_NONE(const panel_rows *p, int64_t rows) { finish_rows_by(FA_NONE, p, rows); }

NOINLINE void finish_panels(const panel_rows *p, int64_t rows)
{
    const fa_dtype dtype = p->a->out_dtype;
    if (p->n < PANEL || (dtype != LANE_DTYPE && dtype != FA_BF16)) {
        finish_any(p, rows);
        return;
    }
    switch (p->a->activation) {
#define FA_ACTIVATION(constant, name, formula, slope)                                                                  \
    case constant: finish_##constant(p, rows); break;
#include "activations.inc"
    default: finish_FA_NONE(p, rows);
    }
}
#else /* doubles, and the set for CPUs without AVX2 or NEON: rare, and a sixth of the time to compile */
#define finish_panels finish_any
#endif

/* Finishes `rows` of those that wait, and moves p to the others. */
NOINLINE void finish_rows(panel_rows *p, int64_t rows)
{
    const fa_linear_args *a = p->a;
    finish_panels(p, rows);
    p->rows -= rows, p->acc += rows * PANEL, p->up += rows * PANEL, p->out += rows * a->out_row;
    if (p->sums) p->grid += rows;
    if (p->residual) p->residual += rows * a->residual_row;
    if (p->pre) p->pre += rows * a->pre_row;
}
