/* The gradient of linear attention: a chunk of tokens, and what reads it. Tokens of the chunk write u to the state, as
 * recurrent_chunk.inc.h says; r is what the delta rule finds missing, u = b r. With S before the chunk and dS behind it:
 *
 *     a reader x, of heads of q              its gradients
 *     out = (scores of x) u + carry x S      dscores = dout u^T on and below the diagonal
 *                                            dx = carry S dout + dscores' keys; dk += dscores'^T x
 *                                            du += scores^T dout; dS += (carry x)^T dout
 *     the delta rule
 *     r = v - carry e S - (scores of e) u    it reads, too: below the diagonal alone, with x = e and dout = -y,
 *                                            where y = b (du - (scores of e)^T y), and then du = y
 *
 * Results that were divided by q norm + eps have one column more, in which every u is 1: its gradient is the divisor's.
 *
 * Exports   gradient_scratch, take_gradient_scratch, state_lanes; write_tokens, next_state, turn_panels, state_product,
 *           add_products; chunk_reader, read_back, solve_back. */
#pragma once
#include "recurrent_gradients.inc.h"

typedef struct {
    chunk_scratch c; /* c.state is dS, c.norm the gradient of the sum of the keys; c.q and c.beta as in a call */
    const lane *state, *norm; /* S before the chunk, (panels, head_dim, PANEL), and the sum of the keys (head_dim) */
    lane *kept, *states;      /* states, each with its sum of keys: before segments, before chunks of a segment */
    lane *fade, *faded;       /* (CHUNK, decay_row): what is left of a key at the chunk's end; keys times that */
    lane *carried;            /* x or erase times carry */
    lane *x_t, *dx_t;         /* (head_dim, CHUNK_LANES) */
    lane *dx, *dk;            /* rows as those of keys */
    lane *u_t, *dout_t;       /* (panels, PANEL, CHUNK_LANES) */
    lane *dout, *du;          /* (panels, CHUNK, PANEL), as u */
    lane *missing, *r;      /* of the delta rule: r of all chunks of a segment, each as u; that of the chunk at hand */
    lane *dscores, *turned; /* (CHUNK, CHUNK_LANES) */
    decay_sums sums;
    int keys_finite;
} gradient_scratch;

/* Lanes of a state and the sum of its keys. */
INLINE int64_t state_lanes(const fa_recurrent_args *a)
{
    return ceil_div(a->head_dim_v, PANEL) * a->head_dim * PANEL + round_up(a->head_dim, LANES);
}

static int64_t take_gradient_scratch(arena *from, const fa_recurrent_args *a, int64_t chunks, int64_t segments,
                                     gradient_scratch *g)
{
    const int64_t panels = ceil_div(a->head_dim_v, PANEL), dims = round_up(a->head_dim, LANES);
    const int64_t rows = ceil_div(a->head_dim, CHUNK_DEPTH) * CHUNK_BLOCK;
    take_chunk_scratch(from, a, panels, &g->c);
    g->sums.row = g->c.decay_row;
    CUT(from, g->kept, segments * state_lanes(a));
    CUT(from, g->states, (chunks + 1) * state_lanes(a));
    CUT_LANES(from, CHUNK * g->c.decay_row, &g->fade, &g->sums.earlier, &g->sums.later, &g->sums.inside);
    CUT(from, g->sums.through, g->c.decay_row);
    CUT_LANES(from, rows, &g->faded, &g->carried, &g->dx, &g->dk);
    CUT_LANES(from, dims * CHUNK_LANES, &g->x_t, &g->dx_t);
    CUT_LANES(from, panels * PANEL * CHUNK_LANES, &g->u_t, &g->dout_t);
    CUT_LANES(from, panels * CHUNK * PANEL, &g->dout, &g->du);
    CUT(from, g->missing, a->beta.data ? chunks * panels * CHUNK * PANEL : 0);
    CUT_LANES(from, CHUNK_BLOCK, &g->dscores, &g->turned, &g->sums.terms);
    return from->used;
}

/* fade, and keys times it. */
static const lane *load_faded(const fa_recurrent_args *a, int64_t n, gradient_scratch *g)
{
    const int64_t row = g->c.decay_row, step = g->c.decay_step;
    if (!a->log_decay.data) return g->c.keys;
    for (int64_t i = n - 1; i >= 0; i--) {
        lane *fade = g->fade + i * row;
        for (int64_t d = 0; d < row; d += LANES)
            v_store(fade + d,
                    i < n - 1 ? v_flush(v_load(fade + row + d) * v_load(g->c.gate + (i + 1) * row + d)) : v_splat(1));
        for (int64_t d = 0; d < a->head_dim; d += LANES)
            v_store(g->faded + element_at(i, d), v_load(g->c.keys + element_at(i, d)) * v_load(fade + d * step));
    }
    return g->faded;
}

/* r = (1 - turned)^-1 (v - carry e S), v being u */
static void solve_missing(const fa_recurrent_args *a, const recurrent_task *task, int64_t n, gradient_scratch *g)
{
    chunk_scratch *c = &g->c;
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < i; j += LANES) {
            const int64_t place = i * CHUNK_LANES + j;
            v_store(g->turned + place, v_load(c->writes + place) * v_load(c->beta + j));
        }
    const lane *keys = carry_rows(a, c, c->erase, n, g->carried);
    for (int64_t panel = 0; panel < task->panels; panel++) {
        lane *u = c->u + panel * CHUNK * PANEL, *r = g->r + panel * CHUNK * PANEL;
        deep_product(0, keys, n, g->state + panel * a->head_dim * PANEL, a->head_dim, c->out);
        for (int64_t i = 0; i < n * PANEL; i += LANES) v_store(r + i, v_load(u + i) - v_load(c->out + i));
        solve(g->turned, n, r);
    }
}

/* What n tokens from `first` on write to g->state: keys, faded ones (which are returned), decays, u; of the delta rule
 * writes and, unless it is known, r. */
static const lane *write_tokens(const fa_recurrent_args *a, const recurrent_task *task, int64_t first, int64_t n,
                                int known, gradient_scratch *g)
{
    chunk_scratch *c = &g->c;
    load_tokens(a, task, first, n, c);
    const lane *faded = load_faded(a, n, g);
    if (!a->beta.data) return faded;
    memset(c->beta, 0, CHUNK * sizeof(lane));
    for (int64_t i = 0; i < n; i++) c->beta[i] = -*(const lane_u *)at(&a->beta, task->b, task->h, first + i, 0);
    decayed_scores(a, c, c->erase, n, NULL, 0, c->writes);
    if (!known) solve_missing(a, task, n, g);
    for (int64_t panel = 0; panel < task->panels; panel++)
        for (int64_t i = panel * CHUNK * PANEL, row = 0; row < n; row++)
            for (int64_t end = i + PANEL; i < end; i += LANES)
                v_store(c->u + i, v_load(g->r + i) * v_splat(-c->beta[row]));
    return faded;
}

/* The state behind the chunk, from g->state. */
static void next_state(const fa_recurrent_args *a, const recurrent_task *task, int64_t n, const lane *faded,
                       gradient_scratch *g, lane *next)
{
    const int64_t of_panel = a->head_dim * PANEL;
    transpose_keys(faded, n, a->head_dim, g->c.keys_t);
    if (!a->log_decay.data) memcpy(next, g->state, task->panels * of_panel * sizeof(lane));
    for (int64_t d = 0; a->log_decay.data && d < a->head_dim; d++) {
        const v_t decay = v_splat(decay_over(a, &g->c, n, d));
        for (int64_t panel = 0; panel < task->panels; panel++)
            for (int64_t c = panel * of_panel + d * PANEL, end = c + PANEL; c < end; c += LANES)
                v_store(next + c, v_flush(v_load(g->state + c) * decay));
    }
    for (int64_t panel = 0; panel < task->panels; panel++)
        panel_product(1, 0, g->c.keys_t, a->head_dim, g->c.u + panel * CHUNK * PANEL, n, next + panel * of_panel);
    lane *norm = next + task->panels * of_panel;
    memset(norm, 0, round_up(a->head_dim, LANES) * sizeof(lane)); /* load_divisors() reads whole vectors */
    for (int64_t d = 0; a->norm_out.data && d < a->head_dim; d++) {
        v_t sum = v_splat(0);
        for (int64_t j = 0; j < n; j += LANES) sum += v_load_part(g->c.keys_t + d * CHUNK_LANES + j, n - j);
        norm[d] = g->norm[d] * decay_over(a, &g->c, n, d) + v_sum(sum);
    }
}

/* u (panels, CHUNK, PANEL) to u_t (panels, PANEL, CHUNK_LANES) */
static void turn_panels(const lane *u, int64_t panels, int64_t n, lane *u_t)
{
    for (int64_t panel = 0; panel < panels; panel++)
        transpose(u + panel * CHUNK * PANEL, PANEL, n, PANEL, u_t + panel * PANEL * CHUNK_LANES, CHUNK_LANES);
}

/* (head_dim, n) = S (head_dim, head_dim_v) x_t (head_dim_v, n) */
static void state_product(const fa_recurrent_args *a, const recurrent_task *task, const lane *state, const lane *x_t,
                          int64_t n, lane *to)
{
    for (int64_t panel = 0; panel < task->panels; panel++)
        token_product(panel > 0, state + panel * a->head_dim * PANEL, PANEL, a->head_dim,
                      x_t + panel * PANEL * CHUNK_LANES, panel_width(a, panel * PANEL), n, to);
}

/* sums (n, row) = or += x y: of vector decays each dimension, of scalar ones their sum. */
static void add_products(const fa_recurrent_args *a, int more, const lane *x, const lane *y, int64_t n, int64_t row,
                         lane *sums)
{
    for (int64_t i = 0; i < n; i++) {
        lane *to = sums + i * row;
        v_t sum = v_splat(0);
        for (int64_t d = 0; d < a->head_dim; d += LANES) {
            const int64_t left = a->head_dim - d;
            const v_t product = v_load_part(x + element_at(i, d), left) * v_load_part(y + element_at(i, d), left);
            sum += product;
            if (a->gated) v_store(to + d, more ? v_load(to + d) + product : product);
        }
        if (!a->gated) to[0] = (more ? to[0] : 0) + v_sum(sum);
    }
}

/* Who reads a chunk. */
typedef struct {
    const lane *x;      /* (n, head_dim), in blocks of dimensions; queries are scaled */
    const lane *scores; /* (n, n), decayed, 0 where they do not count; NULL: the reader reads the state alone */
    int inclusive;      /* scores on the diagonal count */
    int normalised;
    lane *dk; /* (n, head_dim): is added to */
    lane *dx; /* is written */
} chunk_reader;

/* The gradient of the divisor of each row, and what it adds to dscores, dx and that of the sum of the keys. Rows of dout
 * are divided already. dx is carry S dout. */
static void divide_back(const fa_recurrent_args *a, const chunk_reader *reader, const lane *carried, int64_t n,
                        gradient_scratch *g)
{
    const int64_t head_dim = a->head_dim, row = g->c.decay_row, step = g->c.decay_step;
    for (int64_t i = 0; i < n; i++) {
        v_t sum = v_splat(0);
        for (int64_t j = 0; reader->scores && j <= i; j += LANES) {
            const int64_t place = i * CHUNK_LANES + j;
            const v_t term = v_load(reader->scores + place) * v_load(g->dscores + place);
            sum += v_select(lane_numbers(j) < (ilane)(i + 1), term, v_splat(0));
        }
        for (int64_t d = 0; d < head_dim; d += LANES) {
            const v_t x = v_load_part(reader->x + element_at(i, d), head_dim - d);
            sum = v_fma(x, v_load_part(reader->dx + element_at(i, d), head_dim - d), sum);
        }
        const v_t dsum = v_splat(-v_sum(sum) / g->c.divisor[i]);
        for (int64_t j = 0; reader->scores && j <= i; j += LANES)
            v_store(g->dscores + i * CHUNK_LANES + j, v_load(g->dscores + i * CHUNK_LANES + j) + dsum);
        for (int64_t d = 0; d < head_dim; d += LANES) {
            const int64_t place = element_at(i, d);
            v_t factor = dsum;
            if (a->log_decay.data) factor = factor * v_load(g->c.carry + i * row + d * step);
            v_store(reader->dx + place, v_fma(factor, v_load(g->norm + d), v_load(reader->dx + place)));
            v_store(g->c.norm + d, v_fma(dsum, v_load(carried + place), v_load(g->c.norm + d)));
        }
    }
}

/* All that one reader gives back; g->dout are the gradients of what it read, and g->dscores and g->du its scratch and
 * result. The gradient of its decays is added to g->sums. */
static void read_back(const fa_recurrent_args *a, const recurrent_task *task, const chunk_reader *reader, int64_t n,
                      gradient_scratch *g)
{
    chunk_scratch *c = &g->c;
    const int64_t head_dim = a->head_dim, row = c->decay_row, step = c->decay_step, of_panel = CHUNK * PANEL;
    const lane *carried = carry_rows(a, c, reader->x, n, g->carried);
    if (reader->normalised) {
        load_divisors(a, carried, g->norm, n, c);
        for (int64_t panel = 0; panel < task->panels; panel++)
            for (int64_t j = 0; j < n * PANEL; j += LANES) {
                lane *dout = g->dout + panel * of_panel + j;
                v_store(dout, v_load(dout) * v_splat(1 / c->divisor[j / PANEL]));
            }
    }
    turn_panels(g->dout, task->panels, n, g->dout_t);
    for (int64_t panel = 0; reader->scores && panel < task->panels; panel++)
        token_product(panel > 0, g->dout + panel * of_panel, PANEL, n, g->u_t + panel * PANEL * CHUNK_LANES,
                      panel_width(a, panel * PANEL), n, g->dscores);
    state_product(a, task, g->state, g->dout_t, n, g->dx_t);
    from_lanes(g->dx_t, n, head_dim, reader->dx);
    if (a->log_decay.data)
        for (int64_t i = 0; i < n; i++)
            for (int64_t d = 0; d < head_dim; d += LANES) {
                lane *dx = reader->dx + element_at(i, d);
                v_store(dx, v_load(dx) * v_load(c->carry + i * row + d * step));
            }
    if (reader->normalised) divide_back(a, reader, carried, n, g);
    if (a->log_decay.data) add_products(a, 1, reader->x, reader->dx, n, g->sums.row, g->sums.earlier);
    transpose_keys(carried, n, head_dim, g->x_t);
    for (int64_t panel = 0; panel < task->panels; panel++)
        panel_product(1, 0, g->x_t, head_dim, g->dout + panel * of_panel, n, c->state + panel * head_dim * PANEL);
    if (!reader->scores) return;
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < n; j += LANES) {
            lane *dscore = g->dscores + i * CHUNK_LANES + j;
            v_store(dscore, v_select(lane_numbers(j) < (ilane)(i + reader->inclusive), v_load(dscore), v_splat(0)));
        }
    if (reader->inclusive) { /* the delta rule has solved for du */
        transpose(reader->scores, CHUNK_LANES, n, n, g->turned, CHUNK_LANES);
        for (int64_t panel = 0; panel < task->panels; panel++) {
            const lane *dout = g->dout + panel * of_panel;
            const int finite = row_finite(LANE_DTYPE, (const char *)dout, n * PANEL);
            upper_product(PANEL, g->turned, n, finite, dout, PANEL, g->du + panel * of_panel);
        }
    }
    int x_finite = 1;
    for (int64_t i = 0; i < n; i++)
        for (int64_t d = 0; d < head_dim; d += CHUNK_DEPTH)
            x_finite &= row_finite(LANE_DTYPE, (const char *)(reader->x + element_at(i, d)),
                                   smaller(head_dim - d, CHUNK_DEPTH));
    gradients_of_scores(a, c, reader->x, x_finite, g->keys_finite, reader->scores, g->dscores, n, reader->inclusive,
                        g->turned, reader->dx, reader->dk, &g->sums);
}

/* du becomes du - (scores of e)^T y, dout = -y = -b du; both from the last token to the first. */
static void solve_back(const recurrent_task *task, int64_t n, gradient_scratch *g)
{
    transpose(g->c.writes, CHUNK_LANES, n, n, g->turned, CHUNK_LANES);
    for (int64_t panel = 0; panel < task->panels; panel++) {
        lane *du = g->du + panel * CHUNK * PANEL, *dout = g->dout + panel * CHUNK * PANEL;
        for (int64_t end = n, r; end > 0; end = r) {
            r = larger(0, end - SOLVE_ROWS);
            if (end < n)
                panel_product(1, 0, g->turned + r * CHUNK_LANES + end, end - r, dout + end * PANEL, n - end,
                              du + r * PANEL);
            for (int64_t i = end - 1; i >= r; i--) {
                for (int64_t c = 0; c < PANEL; c += LANES) {
                    v_t sum = v_load(du + i * PANEL + c);
                    for (int64_t j = i + 1; j < end; j++)
                        sum = v_fma(v_splat(g->turned[i * CHUNK_LANES + j]), v_load(dout + j * PANEL + c), sum);
                    v_store(du + i * PANEL + c, sum);
                    v_store(dout + i * PANEL + c, sum * v_splat(g->c.beta[i]));
                }
            }
        }
    }
}
