/* Which keys have the largest scores, and which vectors. */
#pragma once
#include "attention.h"

/* The numbers of the rows of k that have the largest scores: selection.inc.h. Of `attention` q, k, k_scale, their sizes,
 * masks.row_end and watch: a query may select keys before row_end alone, which is (batch, 1, len_q). */
typedef struct {
    fa_attention_args attention;
    fa_array weights;           /* lanes (batch, heads_q, len_q); optional */
    fa_array selected;          /* (batch, heads_kv, len_q, top_k), int64, the last axis contiguous */
    fa_array scores;            /* lanes (batch, heads_kv, len_q, len_k), contiguous: in place of q and k; optional */
    int64_t top_k, first, last; /* of top_k, at least 1: the first and the last that a query may select */
    int relu;
} fa_selection_args;

/* With `runs`, whoever runs the tasks gives `scores` memory, whose rows are `pitch` lanes; score() first, which has `runs`
 * tasks for each of run(): scheduling, which alone depends on batch and threads. */
typedef struct {
    int by_pairs; /* rows of a tile are (query, head) pairs, and not queries */
    int64_t queries, tiles;
    int64_t runs, run_k, pitch;
    int64_t n_tasks, scratch_bytes;
    double flops;
} fa_selection_plan;

typedef enum { FA_LANES, FA_WHOLE, FA_BITS } fa_nearest_kind; /* what rows hold: nearest.inc.h */

/* The rows of k nearest to each query. Elements of a row are side by side; q_dtype and k_dtype are lanes or what is widened
 * to them, and of FA_WHOLE and FA_BITS bytes. */
typedef struct {
    const char *q, *k; /* (len_q, depth), (len_k, depth) */
    int64_t q_row, k_row, len_q, len_k, depth;
    fa_dtype q_dtype, k_dtype;
    fa_nearest_kind kind;
    int by_length;     /* scores are divided by the length of k's row */
    int64_t top_k;     /* at most len_k */
    int64_t run, kept; /* rows of a run; the best of it that are kept: top_k, or all */
    void *run_scores;  /* (len_q, runs, kept), lanes; their rows likewise */
    int64_t *run_rows;
    void *scores; /* (len_q, top_k), lanes; in ascending order of `rows` */
    int64_t *rows;
    const fa_watch *watch;
} fa_nearest_args;

/* n_tasks of run(); then finish(), a task for each query. */
typedef struct {
    int64_t queries, runs, n_tasks, scratch_bytes;
    double flops;
} fa_nearest_plan;

typedef struct {
    void (*plan)(const fa_selection_args *, int threads, fa_selection_plan *);
    void (*score)(const fa_selection_args *, const fa_selection_plan *, int64_t task, void *scratch);
    void (*run)(const fa_selection_args *, const fa_selection_plan *, int64_t task, void *scratch);
    void (*nearest_plan)(const fa_nearest_args *, fa_nearest_plan *);
    void (*nearest_run)(const fa_nearest_args *, const fa_nearest_plan *, int64_t task, void *scratch);
    void (*nearest_finish)(const fa_nearest_args *, const fa_nearest_plan *, int64_t query, void *scratch);
} fa_selection_kernels;
