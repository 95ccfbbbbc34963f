/* Deformable attention, and its gradient. */
#pragma once
#include "arrays.h"

/* Deformable attention: deformable.inc.h. Levels are grids of rows of v, one after the other. */
#define FA_DEFORMABLE_QUERIES 16 /* of a unit of work: of one head */
typedef struct {
    int64_t height, width; /* at most 2^24, which lanes hold */
    int64_t row;           /* the first row of v; row + height * width <= len_v */
    int64_t end;           /* the number of the first point that is of later levels */
} fa_level;

typedef struct {
    fa_array v;                                              /* rows (batch, heads, len_v, head_dim) */
    fa_array out;                                            /* rows (batch, heads, len_q, head_dim), v's dtype */
    fa_array locations;                                      /* lanes (batch, heads, len_q, 2 * points), contiguous */
    fa_array weights;                                        /* lanes (batch, heads, len_q, points), contiguous */
    const fa_level *levels;                                  /* (n_levels); the last one's `end` is `points` */
    int64_t batch, heads, len_q, head_dim, n_levels, points; /* points of a query, level after level */
    int discrete;
    const fa_watch *watch; /* optional */
} fa_deformable_args;

typedef struct {
    fa_deformable_args forward; /* `out` plays no part */
    fa_array dout;              /* rows (batch, heads, len_q, head_dim), v's dtype */
    fa_array dv; /* lanes (batch, heads, len_v, head_dim), contiguous; added to. Optional, as those that follow */
    fa_array dlocations; /* lanes (batch, heads, len_q, 2 * points), contiguous; written, as dweights */
    fa_array dweights;   /* lanes (batch, heads, len_q, points), contiguous */
} fa_deformable_grad_args;

typedef struct {
    int64_t (*scratch_bytes)(const fa_deformable_args *);
    void (*run)(const fa_deformable_args *, int64_t begin, int64_t end, void *scratch); /* units */
    int64_t (*grad_scratch_bytes)(const fa_deformable_grad_args *);
    void (*grad_run)(const fa_deformable_grad_args *, int64_t task, int64_t first_head, int64_t end_head,
                     void *scratch);
} fa_deformable_kernels;
