/* Linear maps. */
#pragma once
#include "arrays.h"

#define FA_PANEL_BYTES                                                                                                 \
    128 /* that a panel holds of each input feature: of two in bfloat16, 4 in int8 and Q8, 8 in 4 bits */

/* out (m, n) = activation(x (m, k) w^T + bias) + residual; gated: activation(gate) * up + residual. Transposed: x w in
 * place of x w^T, so that n counts what w has as input features, and x has the output features of one map or of two. */
typedef struct {
    const char *x, *residual;
    char *out;
    const char *panels;  /* n_panels x k x columns, as _args/packed.py says; gated: gate, up, gate, ... */
    const void *scales;  /* int8: lanes, (n_panels, columns); in blocks: float16, (n_panels, blocks, columns) */
    const void *minima;  /* in blocks: as scales, optional */
    const void *table;   /* 16 lanes: values of 4 bits; a weight is its value times the scale, plus the minimum */
    const int8_t *codes; /* the same as int8, times `unit` */
    const void *sums;    /* lanes, (n_panels, columns): of w's rows, as int8 multiplies them; read with x_int8 alone */
    double unit;
    const void *bias; /* lanes, (n), gated (2, n); optional, as residual */
    char *pre;        /* (m, n), gated (m, 2, n), optional: receives what the activation is applied to */
    int64_t x_row, residual_row, out_row, pre_row, m, n, k;
    fa_dtype dtype, out_dtype, weight; /* of x; of residual, out, pre; of the panels */
    int block;                         /* weights in blocks, 4 bits or Q8: features that share a scale, 16 or 32 */
    int gated, x_int8; /* x_int8: rows of x are rounded to int8, on their grids; weights are integers, too */
    int transposed;    /* the maps of w, 1 or 2; 0: not transposed. Then neither gated nor x_int8. */
    fa_activation activation;
    const fa_watch *watch; /* optional */
} fa_linear_args;

/* A task is some rows against some panels: a matter of scheduling alone. Input features are taken in `blocks` of
 * `features`. The first 8 bytes of a thread's scratch must be 0 before its first task: a task leaves there which rows
 * of x it has made ready. */
typedef struct {
    int rows, panels, widen;
    int64_t blocks, features;
    int64_t panel_tasks, n_tasks, scratch_bytes;
    double flops;
} fa_linear_plan;

typedef struct {
    void (*plan)(const fa_linear_args *, int threads, fa_linear_plan *);
    void (*run)(const fa_linear_args *, const fa_linear_plan *, int64_t task, void *scratch);
    /* What float32 may become where attention and products of int8 alone read it: bfloat16 where its dot product is. */
    fa_dtype (*between)(void);
} fa_linear_kernels;
