/* Linear attention with a carried state: what its two kernels share.
 *
 * A state S is a matrix (head_dim, head_dim_v). Token t changes it, then reads it:
 *
 *     S_t = A_t S_{t-1} + k_t u_t^T,   out_t = scale S_t^T q_t
 *     A_t = 1, a_t or diag(a_t)                        log_decay: none; scalar: one number a token; vector (`gated`):
 *                                                      one for every dimension
 *     u_t = v_t, or b_t (v_t - (A_t S_{t-1})^T e_t)    beta: none, or the delta rule
 *     e_t = k_t, or a key of its own                   erase: none, or what the delta rule reads by
 *
 * The lanes are columns of S, which do not depend on one another. A task is one state, or some panels of its columns;
 * the bits of a column do not depend on which.
 *
 * Exports   RECURRENT_ASKS, recurrent_task, recurrent_task_of, tokens_of, query_group, panel_width, add_skipped, strength_of;
 *           load_state, store_state, load_norm, store_norm; decay_at. */
#pragma once
#include "interface/recurrent.h"
#include "softmax.inc.h"
#include "linear_pass.inc.h"

#define RECURRENT_ASKS (1 << 24) /* multiplications between two calls of given_up(): no more than milliseconds */

/* `panels` panels of columns, from `column` on, of the state of batch item b, head h. */
typedef struct {
    int64_t b, h, column, panels;
    int64_t len_q, len_k;
    int64_t head_k, head_v; /* the heads of k and v that write to the state */
    int64_t head_q, group;  /* and of q that read it: head_q is the first of `group` */
} recurrent_task;

/* Tokens of all sequences together. */
INLINE int64_t tokens_of(const fa_recurrent_args *a) { return a->begins ? a->begins[a->batch] : a->batch * a->len_k; }

/* Heads of q that read one state. Where states are more than heads of q, several of them share one. */
INLINE int64_t query_group(const fa_recurrent_args *a) { return a->heads_q > a->heads ? a->heads_q / a->heads : 1; }

static recurrent_task recurrent_task_of(const fa_recurrent_args *a, const fa_recurrent_plan *plan, int64_t number)
{
    const int64_t panels = ceil_div(a->head_dim_v, PANEL), parts = ceil_div(panels, plan->panels);
    const int64_t state = number / parts, h = state % a->heads, first = number % parts * plan->panels;
    const int64_t item = state / a->heads, b = a->order ? a->order[item] : item, *begins = a->begins;
    return (recurrent_task){
        .b = b,
        .h = h,
        .column = first * PANEL,
        .panels = smaller(panels - first, plan->panels),
        .len_q = begins ? begins[b + 1] - begins[b] : a->len_q,
        .len_k = begins ? begins[b + 1] - begins[b] : a->len_k,
        .head_k = h / (a->heads / a->heads_k),
        .head_v = h / (a->heads / a->heads_v),
        .head_q = a->heads_q > a->heads ? h * query_group(a) : h / (a->heads / a->heads_q),
        .group = query_group(a),
    };
}

/* out (n) += skip v, columns from `column` on of token i. */
static void add_skipped(const fa_recurrent_args *a, const recurrent_task *task, int64_t i, int64_t column, int64_t n,
                        lane *out)
{
    const char *v = at(&a->v, task->b, task->head_v, i, column);
    const v_t skip = v_splat(((const lane *)a->skip)[task->h]);
    for (int64_t j = 0; j < n; j += LANES) {
        const v_t x = v_load_as_part(a->v.dtype, v + j * dtype_size(a->v.dtype), n - j);
        v_store_part(out + j, v_fma(skip, x, v_load_part(out + j, n - j)), n - j);
    }
}

/* What v is times as token i writes it. */
INLINE lane strength_of(const fa_recurrent_args *a, const recurrent_task *task, int64_t i)
{
    return a->strength.data ? *(const lane_u *)at(&a->strength, task->b, task->h, i, 0) : 1;
}

/* Columns from `column` on that are in one panel: of a state's last panel, some may be missing. */
INLINE int64_t panel_width(const fa_recurrent_args *a, int64_t column)
{
    return smaller(a->head_dim_v - column, PANEL);
}

/* The task's columns of the state to and from scratch, (panels, head_dim, PANEL). */
static void load_state(const fa_recurrent_args *a, const recurrent_task *task, lane *state)
{
    for (int64_t panel = 0, column = task->column; panel < task->panels; panel++, column += PANEL)
        for (int64_t d = 0; d < a->head_dim; d++, state += PANEL) {
            memset(state, 0, FA_PANEL_BYTES);
            if (a->state.data)
                memcpy(state, at(&a->state, task->b, task->h, d, column), panel_width(a, column) * sizeof(lane));
        }
}

static void store_state(const fa_recurrent_args *a, const recurrent_task *task, const lane *state)
{
    for (int64_t panel = 0, column = task->column; panel < task->panels; panel++, column += PANEL)
        for (int64_t d = 0; d < a->head_dim; d++, state += PANEL)
            memcpy(at(&a->state_out, task->b, task->h, d, column), state, panel_width(a, column) * sizeof(lane));
}

/* The sum of the keys to and from scratch. All tasks of a state compute it; the one of its first columns writes it. */
static void load_norm(const fa_recurrent_args *a, const recurrent_task *task, lane *norm)
{
    memset(norm, 0, round_up(a->head_dim, LANES) * sizeof(lane));
    if (a->norm.data) memcpy(norm, at(&a->norm, task->b, task->h, 0, 0), a->head_dim * sizeof(lane));
}

static void store_norm(const fa_recurrent_args *a, const recurrent_task *task, const lane *norm)
{
    if (a->norm_out.data && task->column == 0)
        memcpy(at(&a->norm_out, task->b, task->h, 0, 0), norm, a->head_dim * sizeof(lane));
}

/* A token's decays of dimensions d, d + 1, ..., from its row of log_decay. A scalar decay is that of all of them. */
INLINE v_t decay_at(const fa_recurrent_args *a, const char *log_decay, int64_t d)
{
    if (!a->gated) return v_exp(v_splat(*(const lane_u *)log_decay));
    return v_exp(v_load_part(log_decay + d * (int64_t)sizeof(lane), a->head_dim - d));
}
