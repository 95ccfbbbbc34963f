/* Gradients of linear maps' weights. */
#pragma once
#include "arrays.h"

/* out (n, k) = or += a (m, n)^T b (m, k), sums (n) = or += the sum of the rows of a: gradients of a linear map. Rows of a
 * and b are contiguous. */
typedef struct {
    const char *a; /* rows (m, n) */
    const char *b; /* rows (m, k), with out */
    char *out;     /* lanes (n, k), optional */
    void *sums;    /* lanes (n), optional */
    int64_t a_row, b_row, out_row, m, n, k;
    fa_dtype a_dtype, b_dtype;
    int pairs;             /* round both to bfloat16 where there is a dot product of pairs */
    int more;              /* += */
    const fa_watch *watch; /* optional */
} fa_outer_args;

/* A task is some columns of a and some of b: a matter of scheduling alone. */
typedef struct {
    int64_t a_columns, b_columns, b_tasks, n_tasks, scratch_bytes;
    double flops;
} fa_outer_plan;

typedef struct {
    void (*plan)(const fa_outer_args *, int threads, fa_outer_plan *);
    void (*run)(const fa_outer_args *, const fa_outer_plan *, int64_t task, void *scratch);
} fa_outer_kernels;
