/* The gradient of linear attention: the plan of a call, and its tasks.
 *
 *     for each chunk: the state behind it; the state before each segment of chunks is kept
 *     where a call is not causal: dS = what all queries give back
 *     for each segment, the last one first: its states once more, but for the last
 *         for each chunk, the last one first
 *             dk = fade dS u; du = fade k dS                                    (what acts behind the chunk)
 *             dS = carry (last) dS
 *             each reader gives back: dq, dk, du, dS                            (recurrent_reader.inc.h)
 *             dv = du
 *
 * The products are those of the forward pass with their roles exchanged. Where a sum is over columns of the state, the
 * lanes are tokens, and the state is broadcast: so that it is never transposed.
 *
 * Exports   recurrent_backward_plan, recurrent_backward_run. */
#pragma once
#include "recurrent_reader.inc.h"

/* What a thread keeps of the chunks of a segment. States are written and read once, from any cache, in less time than it
 * takes to compute them again: with segments that fit the second-level cache, calls took 8 to 17% longer. */
#define SEGMENT_BYTES (1 << 23)
#define LEAST_SEGMENT 4 /* chunks */

/* Rows of n tokens from `first` on of a gradient. */
static void store_gradient(const fa_array *to, int64_t b, int64_t h, int64_t first, int64_t n, int64_t head_dim,
                           const lane *rows, lane factor)
{
    for (int64_t i = 0; to->data && i < n; i++)
        for (int64_t d = 0; d < head_dim; d += CHUNK_DEPTH)
            store_row(to->dtype, rows + element_at(i, d), smaller(head_dim - d, CHUNK_DEPTH), factor,
                      at(to, b, h, first + i, 0) + d * dtype_size(to->dtype));
}

/* Tokens from `first` on of all heads of q read: a chunk with its scores or, where a call is not causal, the state. */
static void queries_back(const fa_recurrent_backward_args *x, const recurrent_task *task, int64_t first, int64_t n,
                         gradient_scratch *g)
{
    const fa_recurrent_args *a = &x->forward;
    const int64_t before = larger(0, first - (a->gated ? GATED_CHUNK : CHUNK));
    chunk_scratch *c = &g->c;
    for (int64_t head = 0; head < task->group; head++) {
        const chunk_reader reader = {c->q, a->causal ? c->scores : NULL, 1, a->norm_out.data != NULL, g->dk, g->dx};
        const int64_t h = task->h * task->group + head;
        load_rows(&a->q, at(&a->q, task->b, task->head_q + head, first, 0), n, a->head_dim, (lane)a->scale, c->q);
        load_panels(a, task, &x->dout, at(&x->dout, task->b, h, first, 0), n, g->dout);
        if (a->causal) decayed_scores(a, c, c->q, n, NULL, 1, c->scores);
        if (a->causal && before < first) {
            prefetch_rows(at(&a->q, task->b, task->head_q + head, before, 0), a->q.row, first - before,
                          a->head_dim * dtype_size(a->q.dtype));
            prefetch_rows(at(&x->dout, task->b, h, before, 0), x->dout.row, first - before,
                          a->head_dim_v * dtype_size(a->q.dtype));
        }
        read_back(a, task, &reader, n, g);
        store_gradient(&x->dq, task->b, h, first, n, a->head_dim, g->dx, (lane)x->dq_factor);
    }
}

/* The delta rule reads the chunk, by keys of its own: derase; or by those that write: then dk collects both uses. */
static void delta_back(const fa_recurrent_backward_args *x, const recurrent_task *task, int64_t first, int64_t n,
                       gradient_scratch *g)
{
    const fa_recurrent_args *a = &x->forward;
    const chunk_reader reader = {g->c.erase, g->c.writes, 0, 0, g->dk, g->dx};
    solve_back(task, n, g);
    for (int64_t i = 0; x->dbeta.data && i < n; i++) {
        v_t sum = v_splat(0);
        for (int64_t panel = 0; panel < task->panels; panel++)
            for (int64_t c = i * PANEL; c < (i + 1) * PANEL; c += LANES)
                sum = v_fma(v_load(g->r + panel * CHUNK * PANEL + c), v_load(g->du + panel * CHUNK * PANEL + c), sum);
        *(lane_u *)at(&x->dbeta, task->b, task->h, first + i, 0) = v_sum(sum);
    }
    read_back(a, task, &reader, n, g);
    store_gradient(&x->derase, task->b, task->h, first, n, a->head_dim, g->dx, 1);
    for (int64_t i = 0; !a->erase.data && i < n; i++)
        for (int64_t d = 0; d < a->head_dim; d += LANES) {
            const int64_t place = element_at(i, d);
            v_store(g->dk + place, v_load(g->dk + place) + v_load(g->dx + place));
        }
}

/* dk, du, and what decays get back, by what acts behind the chunk; then dS is that before it. */
static void behind_back(const fa_recurrent_args *a, const recurrent_task *task, int64_t n, const lane *faded,
                        gradient_scratch *g)
{
    chunk_scratch *c = &g->c;
    const int64_t head_dim = a->head_dim, row = c->decay_row, step = c->decay_step;
    state_product(a, task, c->state, g->u_t, n, g->dx_t);
    from_lanes(g->dx_t, n, head_dim, g->dk);
    for (int64_t i = 0; i < n; i++)
        for (int64_t d = 0; d < head_dim; d += LANES) {
            lane *dk = g->dk + element_at(i, d);
            v_t sum = v_load(dk);
            if (a->norm_out.data) sum += v_load(c->norm + d);
            if (a->log_decay.data) sum = sum * v_load(g->fade + i * row + d * step);
            v_store(dk, sum);
        }
    for (int64_t panel = 0; panel < task->panels; panel++)
        deep_product(0, faded, n, c->state + panel * head_dim * PANEL, head_dim, g->du + panel * CHUNK * PANEL);
    if (!a->log_decay.data) return;
    add_products(a, 0, c->keys, g->dk, n, g->sums.row, g->sums.later);
    memset(g->sums.earlier, 0, n * row * sizeof(lane));
    memset(g->sums.inside, 0, n * row * sizeof(lane));
    memset(g->sums.terms, 0, CHUNK_BLOCK * sizeof(lane));
    memset(g->sums.through, 0, row * sizeof(lane));
    for (int64_t d = 0; d < head_dim; d++) {
        const lane decay = decay_over(a, c, n, d);
        v_t sum = v_splat(0);
        for (int64_t panel = 0; panel < task->panels; panel++)
            for (int64_t at = (panel * head_dim + d) * PANEL, end = at + PANEL; at < end; at += LANES) {
                const v_t dstate = v_flush(v_load(c->state + at) * v_splat(decay));
                sum = v_fma(dstate, v_load(g->state + at), sum);
                v_store(c->state + at, dstate);
            }
        c->norm[d] *= decay;
        g->sums.through[d * step] += v_sum(sum) + (a->norm_out.data ? c->norm[d] * g->norm[d] : 0);
    }
}

/* Asks for n tokens of k, v and erase: the arrays are read from the last chunk to the first, as no processor foresees. */
static void ask_for_keys(const fa_recurrent_args *a, const recurrent_task *task, int64_t first, int64_t n)
{
    if (n <= 0) return;
    prefetch_rows(at(&a->k, task->b, task->head_k, first, 0), a->k.row, n, a->head_dim * dtype_size(a->k.dtype));
    prefetch_rows(at(&a->v, task->b, task->head_v, first, 0), a->v.row, n, a->head_dim_v * dtype_size(a->v.dtype));
    if (a->erase.data)
        prefetch_rows(at(&a->erase, task->b, task->head_k, first, 0), a->erase.row, n,
                      a->head_dim * dtype_size(a->erase.dtype));
}

/* The gradients of n tokens from `first` on that write to the state g->state. */
static void chunk_back(const fa_recurrent_backward_args *x, const recurrent_task *task, int64_t first, int64_t n,
                       gradient_scratch *g)
{
    const int64_t before = larger(0, first - (x->forward.gated ? GATED_CHUNK : CHUNK));
    const fa_recurrent_args *a = &x->forward;
    const lane *faded = write_tokens(a, task, first, n, 1, g);
    ask_for_keys(a, task, before, first - before);
    g->keys_finite = 1;
    for (int64_t i = 0; i < n; i++)
        for (int64_t d = 0; d < a->head_dim; d += CHUNK_DEPTH)
            g->keys_finite &= row_finite(LANE_DTYPE, (const char *)(g->c.keys + element_at(i, d)),
                                         smaller(a->head_dim - d, CHUNK_DEPTH));
    turn_panels(g->c.u, task->panels, n, g->u_t);
    behind_back(a, task, n, faded, g);
    if (a->causal) queries_back(x, task, first, n, g);
    if (a->beta.data) delta_back(x, task, first, n, g);
    store_gradient(&x->dk, task->b, task->h, first, n, a->head_dim, g->dk, 1);
    for (int64_t panel = 0; x->dv.data && panel < task->panels; panel++)
        for (int64_t i = 0; i < n; i++)
            store_row(x->dv.dtype, (a->beta.data ? g->dout : g->du) + (panel * CHUNK + i) * PANEL,
                      panel_width(a, panel * PANEL), a->beta.data ? -1 : 1,
                      at(&x->dv, task->b, task->h, first + i, panel * PANEL));
    if (x->dlog_decay.data)
        gradients_of_decays(a, &g->sums, n, at(&x->dlog_decay, task->b, task->h, first, 0), x->dlog_decay.row);
}

/* A state, and the sum of its keys if results are divided by it, to and from scratch. */
static void load_pair(const fa_recurrent_args *a, const recurrent_task *task, const fa_array *state,
                      const fa_array *norm, lane *to, lane *to_norm)
{
    const fa_recurrent_args of_pair = {
        .head_dim = a->head_dim, .head_dim_v = a->head_dim_v, .state = *state, .norm = *norm};
    load_state(&of_pair, task, to);
    load_norm(&of_pair, task, to_norm);
}

/* Chunk number i of a segment becomes the one at hand. */
static void look_at(const fa_recurrent_args *a, int64_t i, gradient_scratch *g)
{
    g->state = g->states + i * state_lanes(a);
    g->norm = g->state + state_lanes(a) - round_up(a->head_dim, LANES);
    g->r = g->missing + i * ceil_div(a->head_dim_v, PANEL) * CHUNK * PANEL;
}

/* The chunks of one segment, and how often to ask whether the call is given up. */
typedef struct {
    int64_t chunk, first, count, between_asks;
} segment;

static segment segment_of(const fa_recurrent_args *a, const recurrent_task *task,
                          const fa_recurrent_backward_plan *plan, int64_t number)
{
    const int64_t chunk = a->gated ? GATED_CHUNK : CHUNK, first = number * plan->chunks;
    const int64_t work = 4 * query_group(a) * chunk * a->head_dim * round_up(a->head_dim_v, PANEL);
    return (segment){chunk, first * chunk, smaller(plan->chunks, ceil_div(task->len_k, chunk) - first),
                     larger(1, RECURRENT_ASKS / larger(1, work))};
}

/* The states behind all chunks of a segment, from the one before it. Returns 0 if the call is given up. */
static int fill_segment(const fa_recurrent_args *a, const recurrent_task *task, const segment *s, gradient_scratch *g)
{
    for (int64_t i = 0; i < s->count; i++) {
        const int64_t first = s->first + i * s->chunk, n = smaller(s->chunk, task->len_k - first);
        if (i % s->between_asks == 0 && given_up(a->watch)) return 0;
        look_at(a, i, g);
        next_state(a, task, n, write_tokens(a, task, first, n, 0, g), g, g->states + (i + 1) * state_lanes(a));
    }
    return 1;
}

static void recurrent_backward_run(const fa_recurrent_backward_args *x, const fa_recurrent_backward_plan *plan,
                                   int64_t number, void *memory)
{
    const fa_recurrent_args *a = &x->forward;
    const fa_recurrent_plan whole = {.panels = (int)ceil_div(a->head_dim_v, PANEL)};
    const recurrent_task task = recurrent_task_of(a, &whole, number);
    const int64_t lanes = state_lanes(a), bytes = lanes * (int64_t)sizeof(lane);
    gradient_scratch g;
    take_gradient_scratch(&(arena){.memory = memory}, a, plan->chunks, plan->segments, &g);
    segment s = segment_of(a, &task, plan, 0);
    const int64_t segments = plan->chunks ? ceil_div(task.len_k, s.chunk * plan->chunks) : 0;
    load_pair(a, &task, &a->state, &a->norm, g.states, g.states + lanes - round_up(a->head_dim, LANES));
    load_pair(a, &task, &x->dstate_out, &x->dnorm_out, g.c.state, g.c.norm);
    for (int64_t i = 0; i < segments; i++) {
        if (i) memcpy(g.states, g.states + s.count * lanes, bytes);
        memcpy(g.kept + i * lanes, g.states, bytes);
        s = segment_of(a, &task, plan, i);
        if (!fill_segment(a, &task, &s, &g)) return;
    }
    look_at(a, s.count, &g);
    for (int64_t first = 0; !a->causal && first < task.len_q; first += CHUNK) {
        if (first / CHUNK % s.between_asks == 0 && given_up(a->watch)) return;
        queries_back(x, &task, first, smaller(CHUNK, task.len_q - first), &g);
    }
    for (int64_t i = segments - 1; i >= 0; i--) {
        s = segment_of(a, &task, plan, i);
        if (i + 1 < segments) {
            memcpy(g.states, g.kept + i * lanes, bytes);
            if (!fill_segment(a, &task, &s, &g)) return;
        }
        for (int64_t j = s.count - 1; j >= 0; j--) {
            const int64_t first = s.first + j * s.chunk;
            if (j % s.between_asks == 0 && given_up(a->watch)) return;
            look_at(a, j, &g);
            chunk_back(x, &task, first, smaller(s.chunk, task.len_k - first), &g);
        }
    }
    const fa_recurrent_args results = {
        .head_dim = a->head_dim, .head_dim_v = a->head_dim_v, .state_out = x->dstate, .norm_out = x->dnorm};
    if (x->dstate.data) store_state(&results, &task, g.c.state);
    store_norm(&results, &task, g.c.norm);
}

static void recurrent_backward_plan(const fa_recurrent_backward_args *x, fa_recurrent_backward_plan *plan)
{
    const fa_recurrent_args *a = &x->forward;
    const int64_t n_chunks = ceil_div(a->len_k, a->gated ? GATED_CHUNK : CHUNK);
    const int64_t missing = a->beta.data ? ceil_div(a->head_dim_v, PANEL) * CHUNK * PANEL : 0;
    const int64_t of_chunk = (state_lanes(a) + missing) * (int64_t)sizeof(lane);
    const double products = (a->beta.data ? 10 : 4) + 2 * (double)query_group(a);
    plan->chunks = smaller(n_chunks, larger(LEAST_SEGMENT, SEGMENT_BYTES / of_chunk));
    plan->segments = plan->chunks ? ceil_div(n_chunks, plan->chunks) : 0;
    plan->n_tasks = a->batch * a->heads;
    plan->scratch_bytes = take_gradient_scratch(&(arena){0}, a, plan->chunks, plan->segments, &(gradient_scratch){0});
    plan->flops = 2 * products * (double)(tokens_of(a) * a->heads) * (double)a->head_dim *
                  (double)(a->head_dim_v + CHUNK);
}
