/* Linear attention, chunk by chunk of tokens. With carry, between and scores of recurrent_decay.inc.h, for each chunk:
 *
 *     writes = -b (scores of x = e)                 strictly lower triangular; of the delta rule
 *     u = v, or (1 - writes)^-1 b (v - carry e S)   delta rule: forward substitution, no inverse
 *     out = (scores of x = q) u + carry q S         scores on the diagonal, too
 *     S = carry (last) S + (k between (last))^T u
 *
 * (Yang et al. 2024, arXiv:2312.06635, 2406.06484, 2412.06464.) Where a call is not causal, every chunk of k and v
 * comes first, and then q reads the last state: out = q S.
 *
 * Exports   SOLVE_ROWS, panel_product, deep_product, solve; load_panels, load_tokens, write_chunk, load_divisors, read_chunk,
 *           update_state. */
#pragma once
#include "recurrent_decay.inc.h"

#define SOLVE_ROWS 8 /* rows solved one by one; what earlier rows add to them is a matrix product */

/* to (rows, PANEL) = or += x (rows, depth) y (depth, PANEL). See multiply(). */
static void panel_product(int more, int triangular, const lane *x, int64_t rows, const lane *y, int64_t depth, lane *to)
{
    const outer_product product = product_of(more, x, y, PANEL, depth, to);
    multiply(PANEL, 0, triangular, rows, &product);
}

/* acc (rows, PANEL) = or += x (rows, head_dim) y (head_dim, PANEL), x being in blocks of dimensions. */
static void deep_product(int more, const lane *x, int64_t rows, const lane *y, int64_t head_dim, lane *acc)
{
    for (int64_t d = 0; d < head_dim; d += CHUNK_DEPTH, x += CHUNK_BLOCK)
        panel_product(more || d, 0, x, rows, y + d * PANEL, smaller(head_dim - d, CHUNK_DEPTH), acc);
}

/* u (n, PANEL) = (1 - writes)^-1 u */
static void solve(const lane *writes, int64_t n, lane *u)
{
    for (int64_t r = 0; r < n; r += SOLVE_ROWS) {
        const int64_t end = smaller(n, r + SOLVE_ROWS);
        if (r) panel_product(1, 0, writes + r * CHUNK_LANES, end - r, u, r, u + r * PANEL);
        for (int64_t i = r + 1; i < end; i++) {
            v_t sum[PANEL / LANES];
            UNROLL_FOR(int c = 0; c < PANEL / LANES; c++) sum[c] = v_load(u + i * PANEL + c * LANES);
            for (int64_t j = r; j < i; j++) {
                const v_t factor = v_splat(writes[i * CHUNK_LANES + j]);
                UNROLL_FOR(int c = 0; c < PANEL / LANES; c++)
                    sum[c] = v_fma(factor, v_load(u + j * PANEL + c * LANES), sum[c]);
            }
            UNROLL_FOR(int c = 0; c < PANEL / LANES; c++) v_store(u + i * PANEL + c * LANES, sum[c]);
        }
    }
}

/* u holds v, and becomes what the delta rule writes: (1 - writes)^-1 b (v - carry e S). */
static void apply_delta_rule(const fa_recurrent_args *a, const recurrent_task *task, int64_t first, int64_t n,
                             chunk_scratch *scratch)
{
    for (int64_t i = 0; i < n; i++) scratch->beta[i] = -*(const lane_u *)at(&a->beta, task->b, task->h, first + i, 0);
    decayed_scores(a, scratch, scratch->erase, n, scratch->beta, 0, scratch->writes);
    const lane *keys = carry_rows(a, scratch, scratch->erase, n, scratch->carried_keys);
    for (int64_t panel = 0; panel < task->panels; panel++) {
        lane *u = scratch->u + panel * CHUNK * PANEL;
        deep_product(0, keys, n, scratch->state + panel * a->head_dim * PANEL, a->head_dim, scratch->out);
        for (int64_t i = 0; i < n; i++)
            for (int64_t c = i * PANEL; c < (i + 1) * PANEL; c += LANES)
                v_store(u + c, (v_load(scratch->out + c) - v_load(u + c)) * v_splat(scratch->beta[i]));
        solve(scratch->writes, n, u);
    }
}

/* to (panels, CHUNK, PANEL) = n rows of x from `from` on, the task's columns. */
static void load_panels(const fa_recurrent_args *a, const recurrent_task *task, const fa_array *x, const char *from,
                        int64_t n, lane *to)
{
    for (int64_t panel = 0; panel < task->panels; panel++, from += PANEL * dtype_size(x->dtype)) {
        const int64_t width = panel_width(a, task->column + panel * PANEL);
        const char *row = from;
        lane *u = to + panel * CHUNK * PANEL;
        for (int64_t i = 0; i < n; i++, row += x->row, u += PANEL) {
            load_row(x->dtype, row, width, 1, u);
            if (width < PANEL) memset(u + width, 0, (PANEL - width) * sizeof(lane));
        }
    }
}

/* Keys and decays of n tokens from `first` on, and u = v. */
static void load_tokens(const fa_recurrent_args *a, const recurrent_task *task, int64_t first, int64_t n,
                        chunk_scratch *scratch)
{
    load_rows(&a->k, at(&a->k, task->b, task->head_k, first, 0), n, a->head_dim, 1, scratch->keys);
    if (a->erase.data)
        load_rows(&a->erase, at(&a->erase, task->b, task->head_k, first, 0), n, a->head_dim, 1, scratch->erase);
    if (!a->gated) transpose_keys(scratch->keys, n, a->head_dim, scratch->keys_t); /* else vector_scores() does */
    if (a->log_decay.data) load_decays(a, task, first, n, scratch);
    load_panels(a, task, &a->v, at(&a->v, task->b, task->head_v, first, task->column), n, scratch->u);
    for (int64_t panel = 0; a->strength.data && panel < task->panels; panel++)
        for (int64_t i = 0; i < n; i++) {
            lane *u = scratch->u + (panel * CHUNK + i) * PANEL;
            const v_t strength = v_splat(strength_of(a, task, first + i));
            for (int64_t c = 0; c < PANEL; c += LANES) v_store(u + c, v_load(u + c) * strength);
        }
}

/* What n tokens from `first` on write: keys, decays and u. */
static void write_chunk(const fa_recurrent_args *a, const recurrent_task *task, int64_t first, int64_t n,
                        chunk_scratch *scratch)
{
    load_tokens(a, task, first, n, scratch);
    if (a->beta.data) apply_delta_rule(a, task, first, n, scratch);
}

/* divisor (n) = q norm + eps, and in causal calls the sums of scores; q is times carry. */
static void load_divisors(const fa_recurrent_args *a, const lane *q, const lane *norm, int64_t n,
                          chunk_scratch *scratch)
{
    for (int64_t i = 0; i < n; i++) {
        v_t sum = v_splat(0);
        for (int64_t j = 0; a->causal && j <= i; j += LANES) sum += v_load(scratch->scores + i * CHUNK_LANES + j);
        for (int64_t d = 0; d < a->head_dim; d += LANES) {
            sum = v_fma(v_load_part(q + element_at(i, d), a->head_dim - d), v_load(norm + d), sum);
        }
        scratch->divisor[i] = v_sum(sum) + (lane)a->eps;
    }
}

/* What n tokens from `first` on read, by all heads of q. */
static void read_chunk(const fa_recurrent_args *a, const recurrent_task *task, int64_t first, int64_t n,
                       chunk_scratch *scratch)
{
    for (int64_t g = 0; g < task->group; g++) {
        load_rows(&a->q, at(&a->q, task->b, task->head_q + g, first, 0), n, a->head_dim, (lane)a->scale, scratch->q);
        if (a->causal) decayed_scores(a, scratch, scratch->q, n, NULL, 1, scratch->scores);
        carry_rows(a, scratch, scratch->q, n, scratch->q);
        if (a->norm_out.data) load_divisors(a, scratch->q, scratch->norm, n, scratch);
        for (int64_t panel = 0; panel < task->panels; panel++) {
            const int64_t column = task->column + panel * PANEL;
            const lane *u = scratch->u + panel * CHUNK * PANEL;
            char *out = at(&a->out, task->b, task->h * task->group + g, first, column);
            /* A score of 0 does not shield a row from a later u that is not finite: rows then go one by one. */
            const int64_t rows = a->causal && row_finite(LANE_DTYPE, (const char *)u, n * PANEL) ? n : 1;
            for (int64_t i = 0; a->causal && i < n; i += rows)
                panel_product(0, 1, scratch->scores + i * CHUNK_LANES, rows, u, i, scratch->out + i * PANEL);
            deep_product(a->causal, scratch->q, n, scratch->state + panel * a->head_dim * PANEL, a->head_dim,
                         scratch->out);
            for (int64_t i = 0; a->skip && i < n; i++)
                add_skipped(a, task, first + i, column, panel_width(a, column), scratch->out + i * PANEL);
            for (int64_t i = 0; i < n; i++, out += a->out.row)
                store_row(a->out.dtype, scratch->out + i * PANEL, panel_width(a, column),
                          a->norm_out.data ? 1 / scratch->divisor[i] : 1, out);
        }
    }
}

/* S = carry (last) S + faded keys^T u. The sum of the keys is a column of S whose u are all 1. */
static void update_state(const fa_recurrent_args *a, const recurrent_task *task, int64_t n, chunk_scratch *scratch)
{
    fade_keys(a, n, scratch);
    for (int64_t panel = 0; panel < task->panels; panel++) {
        lane *state = scratch->state + panel * a->head_dim * PANEL;
        for (int64_t d = 0; a->log_decay.data && d < a->head_dim; d++) {
            const v_t decay = v_splat(decay_over(a, scratch, n, d));
            for (int64_t c = d * PANEL; c < (d + 1) * PANEL; c += LANES)
                v_store(state + c, v_flush(v_load(state + c) * decay));
        }
        panel_product(1, 0, scratch->keys_t, a->head_dim, scratch->u + panel * CHUNK * PANEL, n, state);
    }
    for (int64_t d = 0; a->norm_out.data && d < a->head_dim; d++) {
        v_t sum = v_splat(0);
        for (int64_t j = 0; j < n; j += LANES) sum += v_load_part(scratch->keys_t + d * CHUNK_LANES + j, n - j);
        scratch->norm[d] = scratch->norm[d] * decay_over(a, scratch, n, d) + v_sum(sum);
    }
}
