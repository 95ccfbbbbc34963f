/* The gradients of attention. */
#pragma once
#include "attention.h"

/* The gradients of an attention call, of which `attention` has the results: out and lse. What is not given is not asked
 * for. dq, dk and dv are of lanes or of their input's dtype, and written; the others are added to. */
typedef struct {
    fa_attention_args attention;
    fa_array dout;            /* rows (batch, heads_q, len_q, head_dim_v), q's dtype, as out */
    fa_array dlse;            /* lanes (batch, heads_q, len_q); optional */
    fa_array dq;              /* rows (batch, heads_q, len_q, head_dim), of q or lanes */
    fa_array dk;              /* rows (batch, heads_kv, len_k, head_dim), of k or lanes */
    fa_array dv;              /* rows (batch, heads_kv, len_k, head_dim_v), of v or lanes */
    double dq_factor;         /* what the sum over keys of dS K is multiplied by */
    fa_array dbias;           /* lanes, as the bias: a stride of 0 sums */
    int bias_shared;          /* several heads, or items of the batch, have one dbias */
    fa_array dbias_diagonals; /* lanes, (batch, heads_q, 1, len_q + len_k - 1), number j - i + len_q - 1 */
    fa_array dsinks;          /* float64 (batch, heads_q) */
    fa_modifier_gradients dmods;
} fa_backward_args;

/* With `few`, sums() first, whose tasks are those of run(). The tasks of begin(), in any order; then those of run(); then
 * those of end(). Threads take run's in order of their numbers, since a task may wait for one with a lower number. begin()
 * and end() have a task for each head of q.
 * `shared` is memory of all threads, as large for a call whatever the threads are. */
typedef struct {
    int whole_heads; /* a task is a KV head, and waits for none; else a block of keys of one: scheduling */
    int few;         /* of queries: P is normalised again */
    int64_t n_heads, n_blocks, n_tasks;
    int64_t scratch_bytes, shared_bytes;
    double flops;
} fa_backward_plan;

typedef struct {
    void (*plan)(const fa_backward_args *, int threads, fa_backward_plan *);
    void (*sums)(const fa_backward_args *, const fa_backward_plan *, int64_t task, void *shared, void *scratch);
    void (*begin)(const fa_backward_args *, const fa_backward_plan *, int64_t task, void *shared, void *scratch);
    void (*run)(const fa_backward_args *, const fa_backward_plan *, int64_t task, void *shared, void *scratch);
    void (*end)(const fa_backward_args *, const fa_backward_plan *, int64_t task, void *shared);
} fa_backward_kernels;
