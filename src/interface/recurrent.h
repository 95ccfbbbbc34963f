/* Linear attention, and its gradients. */
#pragma once
#include "arrays.h"

/* Linear attention, as recurrent_task.inc.h says. There are `heads` states; heads_k and heads_v divide them; heads_q
 * does, or is a multiple. Not causal, without decay and beta: every q reads the last state, and lengths may differ. */
typedef struct {
    fa_array q;         /* rows (batch, heads_q, len_q, head_dim) */
    fa_array k;         /* rows (batch, heads_k, len_k, head_dim) */
    fa_array v;         /* rows (batch, heads_v, len_k, head_dim_v) */
    fa_array out;       /* rows (batch, max(heads_q, heads), len_q, head_dim_v) */
    fa_array log_decay; /* lanes, at most 0: (batch, heads, length), gated (..., head_dim); optional */
    fa_array beta;      /* lanes (batch, heads, len_k): the delta rule; optional */
    fa_array strength;  /* lanes (batch, heads, len_k): what v is times as it is written; optional, without beta */
    const void *skip;   /* lanes (heads): out += skip v; optional. As strength of the forward pass alone */
    fa_array erase;     /* rows (batch, heads_k, len_k, head_dim): what the delta rule reads the state by; optional */
    fa_array state,
        state_out; /* lanes (batch, heads, head_dim, head_dim_v), contiguous; state optional, may be state_out */
    fa_array norm, norm_out; /* lanes (batch, heads, head_dim), contiguous: apart; norm_out: divide by q . norm + eps */
    /* (batch + 1): tokens of sequence b are begins[b] to begins[b + 1] of all, len_q = len_k is the longest one's number,
     * and batch tables lead to the first token of each. NULL: all have len_q and len_k. */
    const int64_t *begins;
    const int64_t *order; /* (batch): with begins, the numbers of the sequences, those of most tokens first */
    int64_t batch, heads, heads_q, heads_k, heads_v, len_q, len_k, head_dim, head_dim_v;
    int gated, causal;
    double scale, eps;
    const fa_watch *watch; /* optional */
} fa_recurrent_args;

/* A task is a state, or some panels of its columns: a matter of scheduling alone. */
typedef struct {
    int panels, steps; /* steps: token by token, all of its sequences; lengths and `causal` alone decide it */
    int64_t n_tasks, scratch_bytes;
    double flops;
} fa_recurrent_plan;

/* The gradient of linear attention: recurrent_backward.inc.h. Of `forward` the results are not touched, but norm_out.data
 * says that they were divided. Gradients are those of each state; the caller adds up what states share. */
typedef struct {
    fa_recurrent_args forward;
    fa_array dout; /* rows (batch, max(heads_q, heads), len_q, head_dim_v) */
    fa_array dstate_out,
        dstate; /* lanes (batch, heads, head_dim, head_dim_v), contiguous; optional, as all that follow */
    fa_array dnorm_out, dnorm; /* lanes (batch, heads, head_dim), contiguous */
    fa_array dq;               /* rows (batch, max(heads_q, heads), len_q, head_dim) */
    fa_array dk;               /* rows (batch, heads, len_k, head_dim) */
    fa_array dv;               /* rows (batch, heads, len_k, head_dim_v) */
    fa_array dlog_decay;       /* lanes, as log_decay with nothing broadcast */
    fa_array dbeta;            /* lanes (batch, heads, len_k) */
    fa_array derase;           /* rows (batch, heads, len_k, head_dim): dk then lacks it; of calls with erase */
    double dq_factor;          /* of dq: the scale, or 1 for the gradients of queries times the scale */
} fa_recurrent_backward_args;

/* A task is a state. Its scratch holds one state for every so many chunks of tokens. */
typedef struct {
    int64_t chunks, segments; /* of a segment; of the longest sequence */
    int64_t n_tasks, scratch_bytes;
    double flops;
} fa_recurrent_backward_plan;

typedef struct {
    void (*plan)(const fa_recurrent_args *, int threads, fa_recurrent_plan *);
    void (*run)(const fa_recurrent_args *, const fa_recurrent_plan *, int64_t task, void *scratch);
    void (*backward_plan)(const fa_recurrent_backward_args *, fa_recurrent_backward_plan *);
    void (*backward_run)(const fa_recurrent_backward_args *, const fa_recurrent_backward_plan *, int64_t task,
                         void *scratch);
} fa_recurrent_kernels;
