/* The selective scan of a state space model (Mamba, Gu & Dao 2023), channel by channel with `states` numbers each:
 *
 *     step_t = dt_t + dt_bias, or softplus of it
 *     h_t = exp(step_t a) h_{t-1} + step_t x_t b_t          h, a (channels, states); b_t (states)
 *     out_t = h_t . c_t + skip x_t
 *
 * The lanes are channels, which share b and c and nothing else; of a sequence of one token, the numbers of a channel. A
 * task is some channels of one sequence. Tokens come in blocks, so that b and c are widened once for all of them.
 *
 * Literals  states: 16, or not.
 * Exports   SCAN_CHANNELS, SCAN_TOKENS, SCAN_ASKS; v_decay; scan_task, scan_task_of, scan_scratch, take_scan_scratch;
 *           load_states, store_states, load_scan_terms, load_scan_rates, load_channels, store_channels, load_scan_block;
 *           scan_scratch_bytes, scan_tasks, scan_run. */
#pragma once
#include "interface/channels.h"
#include "activation.inc.h"

#define SCAN_CHANNELS 128   /* of a task: with 64, rows of 256 bytes cost two thirds more time than the arithmetic */
#define SCAN_TOKENS 32      /* of a block: the gradient keeps 32 KB of states of 16 numbers, and as much of decays */
#define SCAN_ASKS (1 << 20) /* exponentials of lanes between two calls of given_up() */
_Static_assert(SCAN_CHANNELS % LANES == 0, "a task has whole vectors");

#ifdef FA_LANE_F64
INLINE v_t v_log1p(v_t x)
{
    UNROLL_FOR(int i = 0; i < LANES; i++) x[i] = log1p(x[i]); /* libm's, as erf */
    return x;
}
#else
/* log(1 + x) = x p(x) / q(x) for 0 <= x <= 1; tools/polynomials.py derives the coefficients. Their relative error is
 * 2.8e-9, a twentieth of a unit in the last place. */
static const lane log1p_p[] = {0.99999999700627251299f, 1.0536157278881839004f, 0.23098594932963623969f,
                               0.0032073298419550646354f};
static const lane log1p_q[] = {1.f, 1.5536154283341461909f, 0.67446563757134197419f, 0.072529637841568042302f};
INLINE v_t v_log1p(v_t x) { return x * v_horner(log1p_p, COUNT(log1p_p), x) / v_horner(log1p_q, COUNT(log1p_q), x); }
#endif

/* log(1 + e^x), from e^-|x|, which cannot overflow. NaN stays NaN. */
INLINE v_t v_softplus(v_t x) { return v_max(v_splat(0), x) + v_log1p(v_exp(-v_abs(x))); }

/* e^x, infinite from x = 88.4 on with float lanes: v_exp would wrap around far beyond that. */
INLINE v_t v_decay(v_t x) { return v_exp(v_min(v_splat((lane)((EXP_BIAS + 1.4) * LN_2)), x)); }

/* Channels [channel, channel + n) of a sequence, whose `length` tokens are numbered from 0; `first` is the number of
 * its first token among those of all sequences. */
typedef struct {
    int64_t sequence, channel, n, first, length, block;
} scan_task;

/* Tasks that follow one another are of the same channels, whose rates a thread then has already. */
static scan_task scan_task_of(const fa_scan_args *a, int64_t number)
{
    const int64_t s = number % a->sequences, block = number / a->sequences;
    const int64_t channel = block * SCAN_CHANNELS;
    return (scan_task){
        s,    channel, smaller(a->channels - channel, SCAN_CHANNELS), a->begins[s], a->begins[s + 1] - a->begins[s],
        block};
}

typedef struct {
    int64_t *ready;             /* the block of channels whose rates it has, and 1; 0: none */
    lane *rates, *h;            /* (vectors, states, LANES): a, the state */
    lane *b, *c;                /* (SCAN_TOKENS, states) */
    lane *x, *raw, *step, *out; /* (SCAN_TOKENS, SCAN_CHANNELS); raw: what softplus is applied to */
    lane *skip, *bias;          /* (SCAN_CHANNELS) */
} scan_scratch;

static int64_t take_scan_scratch(arena *from, const fa_scan_args *a, scan_scratch *s)
{
    CUT(from, s->ready, 1);
    CUT_LANES(from, SCAN_CHANNELS * a->states, &s->rates, &s->h);
    CUT_LANES(from, SCAN_TOKENS * a->states, &s->b, &s->c);
    CUT_LANES(from, SCAN_TOKENS * SCAN_CHANNELS, &s->x, &s->raw, &s->step, &s->out);
    CUT_LANES(from, SCAN_CHANNELS, &s->skip, &s->bias);
    return from->used;
}

static int64_t scan_scratch_bytes(const fa_scan_args *a)
{
    return take_scan_scratch(&(arena){0}, a, &(scan_scratch){0});
}
static int64_t scan_tasks(const fa_scan_args *a) { return a->sequences * ceil_div(a->channels, SCAN_CHANNELS); }

/* to (states, LANES) = rows (n, states) of channels, `row` bytes apart. Lanes without a channel are 0. */
static void turn_states_in(const char *rows, int64_t row, int64_t n, int64_t states, lane *to)
{
    v_t part[LANES];
    for (int64_t d = 0; d < states; d += LANES) {
        for (int i = 0; i < LANES; i++)
            part[i] = i < n ? v_load_part(rows + i * row + d * (int64_t)sizeof(lane), states - d) : v_splat(0);
        v_transpose(part);
        for (int64_t i = 0; i < smaller(LANES, states - d); i++) v_store(to + (d + i) * LANES, part[i]);
    }
}

/* And back. */
static void turn_states_out(const lane *from, int64_t n, int64_t states, char *rows, int64_t row)
{
    v_t part[LANES];
    for (int64_t d = 0; d < states; d += LANES) {
        for (int64_t i = 0; i < LANES; i++) part[i] = d + i < states ? v_load(from + (d + i) * LANES) : v_splat(0);
        v_transpose(part);
        for (int64_t i = 0; i < n; i++) v_store_part(rows + i * row + d * (int64_t)sizeof(lane), part[i], states - d);
    }
}

/* The task's channels of states to scratch; 0 where there are none. */
static void load_states(const fa_scan_args *a, const scan_task *task, const fa_array *states, lane *to)
{
    for (int64_t v = 0; v * LANES < task->n; v++, to += a->states * LANES) {
        const int64_t channel = task->channel + v * LANES, n = smaller(LANES, task->n - v * LANES);
        if (states->data) turn_states_in(at(states, task->sequence, 0, channel, 0), states->row, n, a->states, to);
        else memset(to, 0, a->states * LANES * sizeof(lane));
    }
}

static void store_states(const fa_scan_args *a, const scan_task *task, const fa_array *states, const lane *from)
{
    for (int64_t v = 0; v * LANES < task->n; v++, from += a->states * LANES)
        turn_states_out(from, smaller(LANES, task->n - v * LANES), a->states,
                        at(states, task->sequence, 0, task->channel + v * LANES, 0), states->row);
}

/* The numbers of a channel that all tokens share but its rates, and zeros where there are no channels. */
static void load_scan_terms(const fa_scan_args *a, const scan_task *task, scan_scratch *s)
{
    memset(s->skip, 0, SCAN_CHANNELS * sizeof(lane)), memset(s->bias, 0, SCAN_CHANNELS * sizeof(lane));
    if (task->n < SCAN_CHANNELS) {
        memset(s->x, 0, SCAN_TOKENS * SCAN_CHANNELS * sizeof(lane));
        memset(s->raw, 0, SCAN_TOKENS * SCAN_CHANNELS * sizeof(lane));
    }
    if (a->skip) memcpy(s->skip, (const lane *)a->skip + task->channel, task->n * sizeof(lane));
    if (a->dt_bias) memcpy(s->bias, (const lane *)a->dt_bias + task->channel, task->n * sizeof(lane));
}

static void load_scan_rates(const fa_scan_args *a, const scan_task *task, scan_scratch *s)
{
    const int64_t row = a->states * (int64_t)sizeof(lane);
    for (int64_t v = 0; v * LANES < task->n; v++)
        turn_states_in((const char *)a->rates + (task->channel + v * LANES) * row, row,
                       smaller(LANES, task->n - v * LANES), a->states, s->rates + v * a->states * LANES);
}

/* Rows of the block that comes next, which no processor foresees: they lie far apart. While a block is computed, each
 * token and vector of channels asks for what it has the place of. */
typedef struct {
    const char *rows[3];
    int64_t row[3], tokens;
    int count;
} scan_ahead;

static void look_ahead(const fa_scan_args *a, const scan_task *task, const fa_array *x, int64_t token,
                       scan_ahead *ahead)
{
    ahead->tokens = smaller(SCAN_TOKENS, task->length - token);
    if (!x->data || ahead->tokens <= 0) return;
    ahead->row[ahead->count] = x->row;
    ahead->rows[ahead->count++] = at(x, task->sequence, 0, token, 0) + task->channel * dtype_size(a->x.dtype);
}

INLINE void ask_ahead(const scan_ahead *ahead, int64_t token, int64_t offset)
{
    for (int i = 0; i < ahead->count && token < ahead->tokens; i++)
        __builtin_prefetch(ahead->rows[i] + token * ahead->row[i] + offset, 0, 2);
}

/* to (n, SCAN_CHANNELS) = the task's channels of n tokens from `token` on. */
static void load_channels(const fa_scan_args *a, const scan_task *task, const fa_array *x, int64_t token, int64_t n,
                          lane *to)
{
    const int64_t offset = task->channel * dtype_size(a->x.dtype);
    for (int64_t i = 0; i < n; i++, to += SCAN_CHANNELS)
        load_row(a->x.dtype, at(x, task->sequence, 0, token + i, 0) + offset, task->n, 1, to);
}

static void store_channels(const fa_scan_args *a, const scan_task *task, const fa_array *x, int64_t token, int64_t n,
                           const lane *from)
{
    const int64_t offset = task->channel * dtype_size(a->x.dtype);
    for (int64_t i = 0; i < n; i++, from += SCAN_CHANNELS)
        store_row(a->x.dtype, from, task->n, 1, at(x, task->sequence, 0, token + i, 0) + offset);
}

/* x, raw, step, b and c of n tokens from `token` on. */
static void load_scan_block(const fa_scan_args *a, const scan_task *task, int64_t token, int64_t n, scan_scratch *s)
{
    load_channels(a, task, &a->x, token, n, s->x);
    load_channels(a, task, &a->dt, token, n, s->raw);
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < task->n; j += LANES) {
            const int64_t place = i * SCAN_CHANNELS + j;
            const v_t raw = v_load(s->raw + place) + v_load(s->bias + j);
            v_store(s->raw + place, raw);
            v_store(s->step + place, a->softplus ? v_softplus(raw) : raw);
        }
    for (int64_t i = 0; i < n; i++) {
        load_row(a->x.dtype, at(&a->b, task->sequence, 0, token + i, 0), a->states, 1, s->b + i * a->states);
        load_row(a->x.dtype, at(&a->c, task->sequence, 0, token + i, 0), a->states, 1, s->c + i * a->states);
    }
}

/* out and h of vector v of channels, over n tokens of the block at hand. */
static void scan_block(const fa_scan_args *a, int64_t n, int64_t v, const scan_ahead *ahead, const scan_scratch *s)
{
    const int64_t states = a->states;
    const lane *rates = s->rates + v * states * LANES;
    lane *h = s->h + v * states * LANES;
    const v_t skip = v_load(s->skip + v * LANES);
    for (int64_t i = 0; i < n; i++) {
        const int64_t place = i * SCAN_CHANNELS + v * LANES;
        const v_t x = v_load(s->x + place), step = v_load(s->step + place), written = step * x;
        const lane *b = s->b + i * states, *c = s->c + i * states;
        v_t sum = skip * x;
        ask_ahead(ahead, i, v * LANES * dtype_size(a->x.dtype));
        for (int64_t d = 0; d < states; d++) {
            const v_t decay = v_decay(step * v_load(rates + d * LANES));
            const v_t state = v_fma(decay, v_load(h + d * LANES), written * v_splat(b[d]));
            v_store(h + d * LANES, state);
            sum = v_fma(state, v_splat(c[d]), sum);
        }
        v_store(s->out + place, sum);
    }
    for (int64_t d = 0; d < states; d++) v_store(h + d * LANES, v_flush(v_load(h + d * LANES)));
}

/* Numbers (n) of a channel's state after one token, beside those before it or NULL; returns their products with c. */
INLINE v_t advance_state(int64_t n, v_t step, v_t written, const lane *rates, const lane *before, const lane *b,
                         const lane *c, lane *after)
{
    const v_t h = before ? v_load_part(before, n) : v_splat(0);
    const v_t state = v_fma(v_decay(step * v_load_part(rates, n)), h, written * v_load_part(b, n));
    v_store_part(after, v_flush(state), n);
    return (n < LANES ? v_load_n(after, n) : state) * v_load_part(c, n); /* lanes without a number may be inf 0 */
}

/* The same of a sequence of one token. Its lanes are the numbers of a channel's state, which lie side by side: nothing is
 * transposed, which would take as long as half of the exponentials. */
INLINE void scan_token(const fa_scan_args *a, int64_t states, const scan_task *task, const scan_scratch *s)
{
    const lane *rates = (const lane *)a->rates + task->channel * states;
    const lane *before = a->state.data ? (const lane *)at(&a->state, task->sequence, 0, task->channel, 0) : NULL;
    lane *after = (lane *)at(&a->state_out, task->sequence, 0, task->channel, 0);
    const int64_t row = a->state.row / (int64_t)sizeof(lane), row_out = a->state_out.row / (int64_t)sizeof(lane);
    for (int64_t v = 0; v < task->n; v += LANES) {
        v_t sums[LANES];
        for (int i = 0; i < LANES; i++) {
            sums[i] = v_splat(0);
            if (v + i >= task->n) continue;
            const v_t step = v_splat(s->step[v + i]), written = step * v_splat(s->x[v + i]);
            for (int64_t d = 0; d < states; d += LANES)
                sums[i] += advance_state(states - d, step, written, rates + d, before ? before + d : NULL, s->b + d,
                                         s->c + d, after + d);
            rates += states, after += row_out;
            if (before) before += row;
        }
        v_store(s->out + v, v_fma(v_load(s->skip + v), v_load(s->x + v), v_sum_each(sums)));
    }
}

static void scan_run(const fa_scan_args *a, int64_t number, void *scratch)
{
    const scan_task task = scan_task_of(a, number);
    scan_scratch s;
    take_scan_scratch(&(arena){.memory = scratch}, a, &s);
    load_scan_terms(a, &task, &s);
    if (task.length == 1) {
        load_scan_block(a, &task, 0, 1, &s);
        if (a->states == 16) scan_token(a, 16, &task, &s);
        else scan_token(a, a->states, &task, &s);
        store_channels(a, &task, &a->out, 0, 1, s.out);
        return;
    }
    if (*s.ready != task.block + 1) load_scan_rates(a, &task, &s);
    *s.ready = task.block + 1;
    load_states(a, &task, &a->state, s.h);
    const int64_t between_asks = larger(1, SCAN_ASKS / (SCAN_TOKENS * SCAN_CHANNELS * a->states)) * SCAN_TOKENS;
    for (int64_t token = 0; token < task.length; token += SCAN_TOKENS) {
        if (token && token % between_asks == 0 && given_up(a->watch)) return;
        const int64_t n = smaller(SCAN_TOKENS, task.length - token);
        load_scan_block(a, &task, token, n, &s);
        scan_ahead ahead = {.count = 0};
        look_ahead(a, &task, &a->x, token + SCAN_TOKENS, &ahead);
        look_ahead(a, &task, &a->dt, token + SCAN_TOKENS, &ahead);
        look_ahead(a, &task, &a->out, token + SCAN_TOKENS, &ahead);
        for (int64_t v = 0; v * LANES < task.n; v++) scan_block(a, n, v, &ahead, &s);
        store_channels(a, &task, &a->out, token, n, s.out);
    }
    store_states(a, &task, &a->state_out, s.h);
}
