/* The gradient of the selective scan. A task goes through its tokens once to keep the state before every block, and then
 * through the blocks, the last one first: it computes a block's states and decays again, and carries dh back.
 *
 *     dh_t += dout_t c_t;  dc_t = sum over channels of dout_t h_t;  dskip += dout_t x_t
 *     db_t = sum over channels of dh_t step_t x_t;  g = dh_t decay_t h_{t-1}
 *     drates += g step_t;  dstep = sum of g a + x_t (dh_t . b_t);  dx_t = skip dout_t + step_t (dh_t . b_t)
 *     ddt_t = dstep or, through softplus, dstep sigmoid(dt_t + dt_bias);  dbias += ddt_t;  dh_{t-1} = decay_t dh_t
 *
 * The sums over channels are those of a task, and whoever runs the tasks adds them in order.
 *
 * Exports   scan_grad_scratch_bytes, scan_grad_run. */
#pragma once
#include "scan.inc.h"

typedef struct {
    scan_scratch s;
    lane *kept;            /* (blocks, vectors, states, LANES): the states before them */
    lane *states, *decays; /* of a block, one vector of channels: (SCAN_TOKENS + 1, states, LANES), without + 1 */
    lane *dh, *drates;     /* (vectors, states, LANES) */
    lane *db, *dc;         /* (SCAN_TOKENS, states, LANES): lanes not yet added up */
    lane *dskip, *dbias;   /* (SCAN_CHANNELS) */
} scan_grad_scratch;

static int64_t take_scan_grad_scratch(arena *from, const fa_scan_args *a, scan_grad_scratch *g)
{
    const int64_t block = SCAN_TOKENS * a->states * LANES, whole = SCAN_CHANNELS * a->states;
    take_scan_scratch(from, a, &g->s);
    CUT_LANES(from, block, &g->decays, &g->db, &g->dc);
    CUT_LANES(from, whole, &g->dh, &g->drates);
    CUT_LANES(from, SCAN_CHANNELS, &g->dskip, &g->dbias);
    CUT(from, g->states, block + a->states * LANES);
    CUT(from, g->kept, ceil_div(a->longest, SCAN_TOKENS) * whole);
    return from->used;
}

static int64_t scan_grad_scratch_bytes(const fa_scan_grad_args *x)
{
    return take_scan_grad_scratch(&(arena){0}, &x->forward, &(scan_grad_scratch){0});
}

/* The states of vector v of channels after each of n tokens of the block at hand, and their decays, from the state h. */
static void scan_states(const fa_scan_args *a, int64_t n, int64_t v, const lane *h, const scan_grad_scratch *g)
{
    const int64_t states = a->states, row = states * LANES;
    const lane *rates = g->s.rates + v * row;
    memcpy(g->states, h, row * sizeof(lane));
    for (int64_t i = 0; i < n; i++) {
        const int64_t place = i * SCAN_CHANNELS + v * LANES;
        const v_t step = v_load(g->s.step + place), written = step * v_load(g->s.x + place);
        lane *state = g->states + i * row;
        for (int64_t d = 0; d < states; d++) {
            const v_t decay = v_decay(step * v_load(rates + d * LANES));
            v_store(g->decays + i * row + d * LANES, decay);
            v_store(state + row + d * LANES,
                    v_fma(decay, v_load(state + d * LANES), written * v_splat(g->s.b[i * states + d])));
        }
    }
    lane *last = g->states + n * row; /* as the forward pass carries it on */
    for (int64_t d = 0; d < states; d++) v_store(last + d * LANES, v_flush(v_load(last + d * LANES)));
}

/* The gradients of vector v of channels over n tokens of the block at hand: dx in place of x, ddt of step. g->db and g->dc
 * are added to. */
static void scan_block_back(const fa_scan_args *a, int64_t n, int64_t v, const scan_grad_scratch *g)
{
    const int64_t states = a->states, row = states * LANES;
    const lane *rates = g->s.rates + v * row;
    lane *dh = g->dh + v * row, *drates = g->drates + v * row;
    const v_t skip = v_load(g->s.skip + v * LANES);
    v_t dskip = v_load(g->dskip + v * LANES), dbias = v_load(g->dbias + v * LANES);
    for (int64_t i = n - 1; i >= 0; i--) {
        const int64_t place = i * SCAN_CHANNELS + v * LANES;
        const v_t x = v_load(g->s.x + place), step = v_load(g->s.step + place), dout = v_load(g->s.out + place);
        const v_t written = step * x;
        const lane *b = g->s.b + i * states, *c = g->s.c + i * states, *state = g->states + i * row;
        v_t of_written = v_splat(0), of_decays = v_splat(0);
        for (int64_t d = 0; d < states; d++) {
            lane *db = g->db + i * row + d * LANES, *dc = g->dc + i * row + d * LANES;
            const v_t decay = v_load(g->decays + i * row + d * LANES);
            const v_t total = v_fma(dout, v_splat(c[d]), v_load(dh + d * LANES));
            v_store(dc, v_fma(dout, v_load(state + row + d * LANES), v_load(dc)));
            v_store(db, v_fma(total, written, v_load(db)));
            of_written = v_fma(total, v_splat(b[d]), of_written);
            const v_t before = total * decay, of_decay = before * v_load(state + d * LANES);
            of_decays = v_fma(of_decay, v_load(rates + d * LANES), of_decays);
            v_store(drates + d * LANES, v_fma(of_decay, step, v_load(drates + d * LANES)));
            v_store(dh + d * LANES, before);
        }
        v_t ddt = v_fma(x, of_written, of_decays);
        if (a->softplus) ddt = ddt * v_sigmoid(LANE_DTYPE, v_load(g->s.raw + place));
        dbias += ddt, dskip = v_fma(dout, x, dskip);
        v_store(g->s.x + place, v_fma(step, of_written, skip * dout));
        v_store(g->s.step + place, ddt);
    }
    for (int64_t d = 0; d < states; d++) v_store(dh + d * LANES, v_flush(v_load(dh + d * LANES)));
    v_store(g->dskip + v * LANES, dskip), v_store(g->dbias + v * LANES, dbias);
}

/* Makes lanes from n on of x (count, LANES) 0. */
static void clear_lanes(lane *x, int64_t count, int64_t n)
{
    for (int64_t i = 0; i < count; i++, x += LANES) v_store(x, v_load_n(x, n));
}

/* to (count) = the sums over lanes of (count, LANES). */
static void add_lanes(const lane *from, int64_t count, lane *to)
{
    v_t part[LANES];
    for (int64_t j = 0; j < count; j += LANES) {
        for (int64_t i = 0; i < LANES; i++) part[i] = j + i < count ? v_load(from + (j + i) * LANES) : v_splat(0);
        v_store_part(to + j, v_sum_each(part), count - j);
    }
}

static void scan_grad_run(const fa_scan_grad_args *x, int64_t number, void *scratch)
{
    const fa_scan_args *a = &x->forward;
    const scan_task task = scan_task_of(a, number);
    const int64_t states = a->states, row = states * LANES, whole = SCAN_CHANNELS * states;
    const int64_t between_asks = larger(1, SCAN_ASKS / (SCAN_TOKENS * SCAN_CHANNELS * states));
    const int64_t tokens = a->begins[a->sequences];
    scan_grad_scratch g;
    take_scan_grad_scratch(&(arena){.memory = scratch}, a, &g);
    load_scan_terms(a, &task, &g.s);
    load_scan_rates(a, &task, &g.s);
    load_states(a, &task, &a->state, g.s.h);
    load_states(a, &task, &x->dstate_out, g.dh);
    memset(g.s.out, 0, SCAN_TOKENS * SCAN_CHANNELS * sizeof(lane));
    memset(g.drates, 0, whole * sizeof(lane));
    memset(g.dskip, 0, SCAN_CHANNELS * sizeof(lane)), memset(g.dbias, 0, SCAN_CHANNELS * sizeof(lane));
    const int64_t blocks = ceil_div(task.length, SCAN_TOKENS);
    for (int64_t block = 0; block < blocks; block++) { /* forth, to keep the state before each */
        memcpy(g.kept + block * whole, g.s.h, whole * sizeof(lane));
        if (block == blocks - 1) break; /* nobody needs the state after the last one */
        if (block % between_asks == between_asks - 1 && given_up(a->watch)) return;
        load_scan_block(a, &task, block * SCAN_TOKENS, SCAN_TOKENS, &g.s);
        for (int64_t v = 0; v * LANES < task.n; v++) {
            scan_states(a, SCAN_TOKENS, v, g.s.h + v * row, &g);
            memcpy(g.s.h + v * row, g.states + SCAN_TOKENS * row, row * sizeof(lane));
        }
    }
    for (int64_t block = blocks - 1; block >= 0; block--) { /* and back */
        const int64_t token = block * SCAN_TOKENS, n = smaller(SCAN_TOKENS, task.length - token);
        if (block % between_asks == between_asks - 1 && given_up(a->watch)) return;
        load_scan_block(a, &task, token, n, &g.s);
        load_channels(a, &task, &x->dout, token, n, g.s.out);
        memset(g.db, 0, n * row * sizeof(lane)), memset(g.dc, 0, n * row * sizeof(lane));
        for (int64_t v = ceil_div(task.n, LANES) - 1; v >= 0; v--) {
            scan_states(a, n, v, g.kept + block * whole + v * row, &g);
            scan_block_back(a, n, v, &g);
            const int64_t left = task.n - v * LANES; /* lanes without a channel: 0 times b and c, which may be NaN */
            if (left < LANES) clear_lanes(g.db, n * states, left), clear_lanes(g.dc, n * states, left);
        }
        if (x->dx.data) store_channels(a, &task, &x->dx, token, n, g.s.x);
        if (x->ddt.data) store_channels(a, &task, &x->ddt, token, n, g.s.step);
        const int64_t to = (task.block * tokens + task.first + token) * states;
        if (x->db) add_lanes(g.db, n * states, (lane *)x->db + to);
        if (x->dc) add_lanes(g.dc, n * states, (lane *)x->dc + to);
    }
    if (x->drates.data) store_states(a, &task, &x->drates, g.drates);
    if (x->dstate.data) store_states(a, &task, &x->dstate, g.dh);
    if (x->dskip.data) memcpy(at(&x->dskip, task.sequence, 0, 0, task.channel), g.dskip, task.n * sizeof(lane));
    if (x->dbias.data) memcpy(at(&x->dbias, task.sequence, 0, 0, task.channel), g.dbias, task.n * sizeof(lane));
}
