/* What goes over rows once, and its gradients. */
#pragma once
#include "arrays.h"

/* out (m, n) = kind(x (m, n) + residual), row by row. */
typedef enum { FA_LAYER_NORM, FA_RMS_NORM, FA_SOFTMAX, FA_ACTIVATE } fa_rows_kind;

typedef struct {
    fa_rows_kind kind;
    fa_dtype dtype; /* of x, residual, up, total, out */
    fa_activation activation;
    const char *x, *residual;  /* rows (m, n); residual optional */
    const char *up;            /* rows (m / up_each, n * up_each), optional: multiplies what FA_ACTIVATE gives, and
                                  FA_RMS_NORM's input (gate_first) or result is multiplied by activation(up) */
    char *total, *out;         /* rows (m, n); total, optional, receives x + residual */
    const void *weight, *bias; /* lanes (n), optional: of the norms */
    int64_t x_row, residual_row, up_row, total_row, out_row, m, n;
    int64_t up_each; /* so many rows of up lie side by side, and up_row is the distance of the next ones */
    double eps;
    int gate_first;
    const fa_watch *watch; /* optional */
} fa_rows_args;

/* The gradient of one such pass: rows_grad.inc.h. Results are optional, and may lie where inputs do. */
typedef struct {
    fa_rows_kind kind;
    fa_dtype dtype; /* of all arrays (m, n) */
    fa_activation activation;
    const char *dout, *x;        /* rows (m, n); x: of FA_SOFTMAX its result */
    const char *residual, *dsum; /* rows (m, n), optional: the norms' x is x + residual, and dsum is added to dx */
    const char *up;              /* rows (m / up_each, n * up_each), optional, as dup */
    char *dx;                    /* rows (m, n), optional */
    char *dup;                   /* rows (m / up_each, n * up_each) */
    const void *weight;          /* lanes (n), optional: of the norms */
    int64_t dout_row, x_row, residual_row, dsum_row, up_row, dx_row, dup_row, m, n;
    int64_t up_each; /* of up and dup, as fa_rows_args has it; norms with up have no residual and no dsum */
    double eps;
    int gate_first;
    const fa_watch *watch; /* optional */
} fa_rows_grad_args;

/* Cross-entropy of logits (m, n), lanes, which become its gradient: logits.inc.h. */
typedef struct {
    char *logits;           /* lanes (m, n) */
    const int64_t *targets; /* int64 (m): each in [0, n) */
    void *loss;             /* lanes (m) */
    const void *factor;     /* lanes (m): of each row's gradient; NULL: logits end up as anything */
    int64_t row, m, n;
    double label_smoothing;
    const fa_watch *watch; /* optional */
} fa_logits_args;

/* out (m, n) = x, each element 0 or times `scale`: dropout.inc.h. out may be x. */
typedef struct {
    const char *x; /* rows (m, n) */
    char *out;     /* rows (m, n) */
    int64_t x_row, out_row, m, n;
    fa_dtype dtype;
    double rate, scale;
    uint64_t seed;
    int64_t stream;
    const fa_watch *watch; /* optional */
} fa_dropout_args;

/* Row places[p] of out += rows order[firsts[p]] .. order[firsts[p + 1] - 1] of x: scatter.inc.h. */
typedef struct {
    const char *x;         /* rows (m, n) */
    char *out;             /* lanes (rows, n) */
    const int64_t *order;  /* int64 (m) */
    const int64_t *firsts; /* int64 (n_places + 1) */
    const int64_t *places; /* int64 (n_places) */
    int64_t x_row, out_row, n;
    fa_dtype dtype;        /* of x */
    const fa_watch *watch; /* optional */
} fa_scatter_args;

/* out = x, (batch, heads, length, head_dim), rotated by positions; may be x. Dimensions from 2 pairs on are copied. Then each
 * row may be multiplied by a Hadamard matrix: hadamard.inc.h. Of x in float32 out may have 16 bits. Or out is int8: each row
 * is rounded, and times its scale it is what it was, to scale / 2. Or it is FA_I4: int4.inc.h. */
typedef struct {
    fa_array x;        /* rows (batch, heads, length, head_dim) */
    fa_array out;      /* rows (batch, heads, length, head_dim), or int8 with scale */
    fa_array cos, sin; /* lanes (batch, 1, length, pairs), contiguous */
    fa_array scale;    /* lanes (batch, heads, length): of an out in FA_I8 */
    int64_t batch, heads, length, head_dim, pairs;
    int interleaved;
    int hadamard;
} fa_rope_args;

/* What an optimizer does to parameters: optimizer.inc.h. All arrays are lanes, side by side; no two of them overlap. */
#define FA_UPDATE_BLOCK 4096
typedef enum { FA_SQUARES, FA_SGD, FA_ADAMW } fa_update_kind; /* squares: of gradients, their sums by block */

typedef struct {
    void *param; /* (n), as all that follow; FA_SQUARES reads grad alone */
    const void *grad;
    void *first, *second; /* moments: second of FA_ADAMW; first of FA_SGD is optional */
    int64_t n, block;     /* block: how many blocks of FA_UPDATE_BLOCK the parameters before it have */
} fa_parameter;

typedef struct {
    fa_update_kind kind;
    const fa_parameter *parameters;
    double *sums; /* of FA_SQUARES, (blocks) */
    int64_t n_parameters;
    double scale;                                  /* of gradients */
    double lr, weight_decay, momentum, beta2, eps; /* momentum: beta1 of FA_ADAMW */
    double first_correction, second_correction;    /* of FA_ADAMW: 1 - beta1^t, and the root of 1 - beta2^t */
    int nesterov;
} fa_update_args;

typedef struct {
    int64_t (*scratch_bytes)(int64_t n);
    void (*run)(const fa_rows_args *, int64_t begin, int64_t end, void *scratch);
    int64_t (*grad_scratch_bytes)(int64_t n);
    void (*grad_run)(const fa_rows_grad_args *, int64_t begin, int64_t end, void *sums, void *scratch);
    void (*grad_add)(const void *sums, int64_t count, int64_t row, int64_t n, void *out);
    void (*logits_run)(const fa_logits_args *, int64_t begin, int64_t end);
    void (*dropout_run)(const fa_dropout_args *, int64_t begin, int64_t end);
    int64_t (*scatter_scratch_bytes)(int64_t n);
    void (*scatter_run)(const fa_scatter_args *, int64_t begin, int64_t end, void *scratch);
    void (*rope_run)(const fa_rope_args *, int64_t begin, int64_t end, void *scratch); /* rows of batch * length */
    void (*update_run)(const fa_update_args *, int64_t begin, int64_t end);            /* blocks of all parameters */
} fa_rows_kernels;
