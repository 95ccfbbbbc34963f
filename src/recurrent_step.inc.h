/* Linear attention, a token at a time: decoding reads and writes the state and does little else. For each token
 *
 *     u = v, or b (v - (A S)^T e)              delta rule: S is read once more, from the cache; e = k without erase
 *     S = A S + k u^T, out = S^T q             for more heads of q, S is read again, from the cache
 *
 * in place in state_out, a few vectors of columns after the other.
 *
 * Literals  nv, vectors of columns, held in registers: 1 or STEP_NV. n, columns of each: LANES, or fewer with nv = 1.
 * Exports   by_steps, step_scratch, take_step_scratch, recurrent_steps. */
#pragma once
#include "recurrent_task.inc.h"

#define STEPS 4 /* sequences of up to so many tokens go this way */

static int by_steps(const fa_recurrent_args *a, int64_t len_q) { return a->causal && len_q && len_q <= STEPS; }

typedef struct {
    lane *gate, *k, *q, *norm; /* (head_dim): decays, key, query, the sum of the keys */
    lane *faded;               /* (head_dim): gate e */
    lane *v, *out;             /* the task's columns, in whole panels */
    lane of_nothing;           /* what e reads where there is no state: 0, or NaN if e is not finite */
    const char *from;          /* the task's columns of the state before the token; NULL: it is 0 */
    char *to;                  /* and after it */
    int64_t from_row, to_row, head_dim;
    const lane_u *beta; /* NULL without the delta rule */
} step_scratch;

static int64_t take_step_scratch(arena *from, const fa_recurrent_args *a, int64_t panels, step_scratch *step)
{
    const int64_t dims = round_up(a->head_dim, LANES);
    CUT_LANES(from, dims, &step->gate, &step->k, &step->q, &step->norm, &step->faded);
    CUT_LANES(from, panels * PANEL, &step->v, &step->out);
    return from->used;
}

/* sum (n) = x (head_dim) S (head_dim, n) */
INLINE void step_read(int nv, int64_t n, const char *state, int64_t row, const lane *x, int64_t head_dim, v_t *sum)
{
    UNROLL_FOR(int c = 0; c < nv; c++) sum[c] = v_splat(0);
    for (int64_t d = 0; d < head_dim; d++, state += row)
        UNROLL_FOR(int c = 0; c < nv; c++) sum[c] = v_fma(v_splat(x[d]), v_load_part(state + c * V_BYTES, n), sum[c]);
}

/* S (head_dim, n) = gate S + k u, of the columns `offset` bytes behind the task's first; sum (n) = q S. */
INLINE void step_write(const step_scratch *step, int nv, int64_t n, int64_t offset, const v_t *u, v_t *sum)
{
    const lane *gate = step->gate, *k = step->k, *q = step->q;
    const char *from = step->from ? step->from + offset : NULL;
    char *to = step->to + offset;
    UNROLL_FOR(int c = 0; c < nv; c++) sum[c] = v_splat(0);
    for (int64_t d = 0; d < step->head_dim; d++, to += step->to_row) {
        UNROLL_FOR(int c = 0; c < nv; c++) {
            v_t s = v_splat(0);
            if (from) s = v_flush(v_load_part(from + d * step->from_row + c * V_BYTES, n) * v_splat(gate[d]));
            s = v_fma(v_splat(k[d]), u[c], s);
            v_store_part(to + c * V_BYTES, s, n);
            sum[c] = v_fma(v_splat(q[d]), s, sum[c]);
        }
    }
}

/* out of columns [column, column + nv n). With `write` the token writes to the state first: once for all heads of q. */
INLINE void step_columns(const step_scratch *step, int nv, int64_t n, int64_t column, int write)
{
    const int64_t offset = column * (int64_t)sizeof(lane);
    v_t u[STEP_NV], sum[STEP_NV];
    if (write) {
        UNROLL_FOR(int c = 0; c < nv; c++) u[c] = v_load(step->v + column + c * LANES);
        if (step->beta) {
            UNROLL_FOR(int c = 0; c < nv; c++) sum[c] = v_splat(step->of_nothing);
            if (step->from) step_read(nv, n, step->from + offset, step->from_row, step->faded, step->head_dim, sum);
            UNROLL_FOR(int c = 0; c < nv; c++) u[c] = v_splat(*step->beta) * (u[c] - sum[c]);
        }
        step_write(step, nv, n, offset, u, sum);
    } else step_read(nv, n, step->to + offset, step->to_row, step->q, step->head_dim, sum);
    UNROLL_FOR(int c = 0; c < nv; c++) v_store(step->out + column + c * LANES, sum[c]);
}

static void recurrent_steps(const fa_recurrent_args *a, const recurrent_task *task, step_scratch *step)
{
    const int64_t head_dim = a->head_dim, columns = smaller(a->head_dim_v - task->column, task->panels * PANEL);
    step->from = a->state.data ? at(&a->state, task->b, task->h, 0, task->column) : NULL;
    step->to = at(&a->state_out, task->b, task->h, 0, task->column);
    step->from_row = a->state.row, step->to_row = a->state_out.row;
    step->head_dim = head_dim;
    load_norm(a, task, step->norm);
    for (int64_t i = 0; i < task->len_q; i++, step->from = step->to, step->from_row = step->to_row) {
        const char *log_decay = a->log_decay.data ? at(&a->log_decay, task->b, task->h, i, 0) : NULL;
        for (int64_t d = 0; d < head_dim; d += LANES)
            v_store(step->gate + d, log_decay ? decay_at(a, log_decay, d) : v_splat(1));
        load_row(a->k.dtype, at(&a->k, task->b, task->head_k, i, 0), head_dim, 1, step->k);
        load_row(a->v.dtype, at(&a->v, task->b, task->head_v, i, task->column), columns, strength_of(a, task, i),
                 step->v);
        const lane *erase = a->erase.data ? step->faded : step->k;
        if (a->erase.data)
            load_row(a->erase.dtype, at(&a->erase, task->b, task->head_k, i, 0), head_dim, 1, step->faded);
        for (int64_t d = 0; d < head_dim; d++) step->faded[d] = step->gate[d] * erase[d];
        step->of_nothing = 0; /* k, if it is not finite, shows where it writes */
        for (int64_t d = 0; a->erase.data && !step->from && d < head_dim; d++) step->of_nothing += 0 * erase[d];
        for (int64_t d = 0; a->norm_out.data && d < head_dim; d++)
            step->norm[d] = step->gate[d] * step->norm[d] + step->k[d];
        step->beta = a->beta.data ? (const lane_u *)at(&a->beta, task->b, task->h, i, 0) : NULL;
        for (int64_t g = 0; g < task->group; g++) {
            int64_t c = 0;
            lane divisor = (lane)a->eps;
            load_row(a->q.dtype, at(&a->q, task->b, task->head_q + g, i, 0), head_dim, (lane)a->scale, step->q);
            for (; c + STEP_NV * LANES <= columns; c += STEP_NV * LANES) step_columns(step, STEP_NV, LANES, c, g == 0);
            for (; c + LANES <= columns; c += LANES) step_columns(step, 1, LANES, c, g == 0);
            if (c < columns) step_columns(step, 1, columns - c, c, g == 0);
            for (int64_t d = 0; a->norm_out.data && d < head_dim; d++) divisor += step->q[d] * step->norm[d];
            if (a->skip) add_skipped(a, task, i, task->column, columns, step->out);
            store_row(a->out.dtype, step->out, columns, a->norm_out.data ? 1 / divisor : 1,
                      at(&a->out, task->b, task->h * task->group + g, i, task->column));
        }
    }
    store_norm(a, task, step->norm);
}
