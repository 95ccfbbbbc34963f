/* Attention with other normalisers and other scores, and its gradients. */
#pragma once
#include "attention.h"

/* Attention with another normaliser than softmax over all keys, or another score than a product: rowwise.inc.h and
 * talking.inc.h. Of `attention` neither lse nor sinks. Matrices are lanes, C-contiguous. */
typedef enum { FA_SPARSEMAX, FA_ENTMAX15, FA_TOP_K, FA_ADDITIVE, FA_TALKING_HEADS } fa_rowwise_kind;

typedef struct {
    fa_attention_args attention;
    fa_rowwise_kind kind;
    int64_t k_keys;     /* of FA_TOP_K, at least 1 */
    const void *weight; /* lanes (heads_q, head_dim): of FA_ADDITIVE */
    const void *pre,
        *post; /* lanes (heads_q, heads_q): of FA_TALKING_HEADS, optional: head h's share of head g is [h][g] */
} fa_rowwise_args;

/* A task is a tile of rows against all keys. Scratch, except FA_TALKING_HEADS's, grows with the number of keys. */
typedef struct {
    int64_t n_tasks, scratch_bytes;
    double flops;
} fa_rowwise_plan;

/* Gradients of the same; those that are not wanted are NULL. Sums of a head's rows are double. */
typedef struct {
    fa_rowwise_args forward;  /* `attention.out` and `lse` play no part */
    fa_array dout;            /* rows (batch, heads_q, len_q, head_dim_v), q's dtype */
    fa_array dq;              /* rows (batch, heads_q, len_q, head_dim), of q or lanes */
    fa_array dk;              /* lanes (batch, heads_kv, len_k, head_dim), contiguous; added to, as all that follow */
    fa_array dv;              /* lanes (batch, heads_kv, len_k, head_dim_v), contiguous */
    fa_array dbias;           /* lanes (batch, heads_q, len_q, len_k) */
    fa_array dbias_diagonals; /* lanes (batch, heads_q, len_q + len_k - 1): j - i + len_q - 1 counts */
    fa_modifier_gradients dmods;
    double *dweight;               /* float64 (batch, heads_q, head_dim) */
    double *dpre, *dpost;          /* float64 (batch, heads_q, heads_q) */
    double dq_factor;              /* of dq: the scale, or 1 */
    int batch_shares, heads_share; /* several batch items, several KV heads, have the same elements of dbias */
    int64_t *turns;                /* (n_turns), 0 before the first task: how many have passed each */
} fa_rowwise_backward_args;

/* A task is a tile of rows, or talking heads' of all heads. Threads take them in order of their numbers, since a task
 * may wait for one with a lower number. */
typedef struct {
    int64_t n_tasks, n_turns, scratch_bytes;
    int64_t units, owners; /* whatever adds to the same elements of dk and dv; and of dbias, too */
    double flops;
} fa_rowwise_backward_plan;

typedef struct {
    void (*plan)(const fa_rowwise_args *, fa_rowwise_plan *);
    void (*run)(const fa_rowwise_args *, const fa_rowwise_plan *, int64_t task, void *scratch);
    void (*backward_plan)(const fa_rowwise_backward_args *, fa_rowwise_backward_plan *);
    void (*backward_run)(const fa_rowwise_backward_args *, const fa_rowwise_backward_plan *, int64_t task,
                         void *scratch);
} fa_rowwise_kernels;
