/* Causal depthwise convolution over tokens, and its gradient:
 *
 *     pre_t = bias + sum over w of weight_w x_{t - width + 1 + w},   out_t = activation(pre_t)
 *     dpre_t = dout_t slope(pre_t),   dx_t = sum over w of weight_w dpre_{t + width - 1 - w}
 *     dweight_w = sum over t of dpre_t x_{t - width + 1 + w},   dbias = sum over t of dpre_t
 *
 * where x_t with t < 0 is a row of the state. The lanes are channels. A task is some tokens of all sequences end to end,
 * a piece at a time: the tokens of one sequence among them. Rows of x are read `width` times, from the caches.
 *
 * Literals  dtype. rows: CONV_ROWS or 1.
 * Exports   conv_scratch_bytes, conv_run; conv_grad_scratch_bytes, conv_grad_run. */
#pragma once
#include "rows_grad.inc.h"

#define CONV_ROWS 8    /* accumulators: 4 cycles of latency, 2 multiply-adds a cycle */
#define CONV_PIECE 256 /* channels: CONV_ROWS rows of lanes take 8 KB of the first-level cache */
#define CONV_TOKENS 32 /* of a piece of the gradient, which computes up to FA_MOST_WIDTH - 1 more */
_Static_assert(CONV_PIECE % LANES == 0 && SLOPE_PIECE % CONV_PIECE == 0, "pieces are whole vectors");

/* Tokens [begin, end) of a sequence, whose `length` tokens are numbered from 0. */
typedef struct {
    int64_t sequence, begin, end, length;
} conv_piece;

/* The tokens of the sequence of token `begin` that are before `end`; both count through all sequences. */
static conv_piece conv_piece_of(const fa_conv_args *a, int64_t begin, int64_t end)
{
    int64_t low = 0, high = a->sequences; /* begins[low] <= begin < begins[high]; of empty sequences the last */
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        if (a->begins[middle] <= begin) low = middle;
        else high = middle;
    }
    const int64_t first = a->begins[low], length = a->begins[low + 1] - first;
    return (conv_piece){low, begin - first, smaller(end - first, length), length};
}

/* Channels from `channel` on of the inputs of a token, one before the first among them; NULL: they are 0. */
static const char *conv_input(const fa_conv_args *a, int64_t sequence, int64_t token, int64_t channel)
{
    const int64_t offset = channel * dtype_size(a->x.dtype);
    if (token >= 0) return at(&a->x, sequence, 0, token, 0) + offset;
    return a->state.data ? at(&a->state, sequence, 0, a->width - 1 + token, 0) + offset : NULL;
}

/* sums (rows, CONV_PIECE) = bias + the products of taps (width, CONV_PIECE) with the inputs, n channels. */
INLINE void conv_sums(fa_dtype dtype, int rows, const char *const *inputs, int width, const lane *taps,
                      const lane *bias, int64_t n, lane *sums)
{
    const int64_t size = dtype_size(dtype);
    for (int64_t j = 0; j < n; j += LANES) {
        v_t sum[CONV_ROWS];
        UNROLL_FOR(int r = 0; r < rows; r++) sum[r] = v_load(bias + j);
        for (int w = 0; w < width; w++) {
            const v_t tap = v_load(taps + w * CONV_PIECE + j);
            UNROLL_FOR(int r = 0; r < rows; r++)
                sum[r] = v_fma(tap, v_load_as_part(dtype, inputs[r + w] + j * size, n - j), sum[r]);
        }
        UNROLL_FOR(int r = 0; r < rows; r++) v_store(sums + r * CONV_PIECE + j, sum[r]);
    }
}

typedef struct {
    lane *taps, *bias;  /* of a piece of channels: (width, CONV_PIECE), (CONV_PIECE) */
    lane *zeros;        /* (CONV_PIECE), the inputs before the first */
    lane *sums;         /* (CONV_ROWS, CONV_PIECE) */
    lane *dpre, *turned; /* of the gradient: (CONV_TOKENS + width - 1, CONV_PIECE), a row of x or dout */
} conv_scratch;

static int64_t take_conv_scratch(arena *from, const fa_conv_args *a, int gradient, conv_scratch *s)
{
    CUT_LANES(from, CONV_PIECE, &s->bias, &s->zeros);
    CUT(from, s->taps, a->width * CONV_PIECE);
    CUT(from, s->sums, CONV_ROWS * CONV_PIECE);
    if (gradient) {
        CUT(from, s->dpre, (CONV_TOKENS + a->width - 1) * CONV_PIECE);
        CUT(from, s->turned, CONV_PIECE);
    }
    return from->used;
}

/* taps (width, CONV_PIECE) = the weights (n, width), transposed. */
INLINE void turn_taps(int width, const lane *weight, int64_t n, lane *taps)
{
    for (int64_t j = 0; j < n; j++)
        for (int w = 0; w < width; w++) taps[w * CONV_PIECE + j] = weight[j * width + w];
}

/* Taps and bias of n channels from `channel` on, and zeros where there are none. */
static void load_taps(const fa_conv_args *a, int64_t channel, int64_t n, conv_scratch *s)
{
    const lane *weight = (const lane *)a->weight + channel * a->width, *bias = (const lane *)a->bias;
    if (n < CONV_PIECE) memset(s->taps, 0, a->width * CONV_PIECE * sizeof(lane));
    memset(s->bias, 0, CONV_PIECE * sizeof(lane));
    if (bias) memcpy(s->bias, bias + channel, n * sizeof(lane));
    if (a->width == 4) turn_taps(4, weight, n, s->taps); /* the usual one, which compilers do in vectors */
    else turn_taps(a->width, weight, n, s->taps);
}

/* sums = pre of `rows` tokens from `token` on, n channels from `channel` on. */
static void conv_rows(const fa_conv_args *a, int64_t sequence, int64_t token, int rows, int64_t channel, int64_t n,
                      const conv_scratch *s, lane *sums)
{
    const char *inputs[CONV_ROWS + FA_MOST_WIDTH - 1];
    for (int i = 0; i < rows + a->width - 1; i++) {
        inputs[i] = conv_input(a, sequence, token - (a->width - 1) + i, channel);
        if (!inputs[i]) inputs[i] = (const char *)s->zeros;
    }
    if (rows == CONV_ROWS)
        WITH_DTYPE(a->x.dtype, dtype, conv_sums(dtype, CONV_ROWS, inputs, a->width, s->taps, s->bias, n, sums));
    else
        for (int r = 0; r < rows; r++)
            WITH_DTYPE(a->x.dtype, dtype,
                       conv_sums(dtype, 1, inputs + r, a->width, s->taps, s->bias, n, sums + r * CONV_PIECE));
}

static void conv_activate(const fa_conv_args *a, lane *sums, int64_t n)
{
    switch (a->activation) {
#define FA_ACTIVATION(constant, name, formula, slope)                                                                  \
    case constant: activate_row(NULL, constant, sums, n); break;
#include "activations.inc"
    default: break;
    }
}

/* Cut from memory, with zeros for inputs that are not there. */
static void ready_conv_scratch(void *memory, const fa_conv_args *a, int gradient, conv_scratch *s)
{
    take_conv_scratch(&(arena){.memory = memory}, a, gradient, s);
    memset(s->zeros, 0, CONV_PIECE * sizeof(lane));
}

static int64_t conv_scratch_bytes(const fa_conv_args *a)
{
    return take_conv_scratch(&(arena){0}, a, 0, &(conv_scratch){0});
}

/* Tokens [begin, end) of all sequences end to end. */
static void conv_run(const fa_conv_args *a, int64_t begin, int64_t end, void *scratch)
{
    conv_scratch s;
    ready_conv_scratch(scratch, a, 0, &s);
    const int64_t between_asks = larger(1, ROW_ASKS / CONV_PIECE / a->width / CONV_ROWS);
    int64_t groups = 0;
    for (int64_t channel = 0; channel < a->channels; channel += CONV_PIECE) {
        const int64_t n = smaller(a->channels - channel, CONV_PIECE), offset = channel * dtype_size(a->x.dtype);
        load_taps(a, channel, n, &s);
        for (int64_t t = begin; t < end;) {
            const conv_piece p = conv_piece_of(a, t, end);
            for (int64_t i = p.begin; i < p.end; i += CONV_ROWS) {
                const int rows = (int)smaller(CONV_ROWS, p.end - i);
                if (++groups % between_asks == 0 && given_up(a->watch)) return;
                conv_rows(a, p.sequence, i, rows, channel, n, &s, s.sums);
                for (int r = 0; r < rows; r++) {
                    conv_activate(a, s.sums + r * CONV_PIECE, round_up(n, LANES));
                    store_row(a->x.dtype, s.sums + r * CONV_PIECE, n, 1, at(&a->out, p.sequence, 0, i + r, 0) + offset);
                }
            }
            t += p.end - p.begin;
        }
    }
}

static int64_t conv_grad_scratch_bytes(const fa_conv_grad_args *g)
{
    return take_conv_scratch(&(arena){0}, &g->forward, 1, &(conv_scratch){0});
}

/* dpre of tokens [begin, end) of a sequence, n channels. */
static void conv_dpre(const fa_conv_grad_args *g, int64_t sequence, int64_t begin, int64_t end, int64_t channel,
                      int64_t n, conv_scratch *s)
{
    const fa_conv_args *a = &g->forward;
    const int64_t offset = channel * dtype_size(a->x.dtype), whole = round_up(n, LANES);
    for (int64_t t = begin; t < end; t += CONV_ROWS) {
        const int rows = (int)smaller(CONV_ROWS, end - t);
        if (a->activation != FA_NONE) conv_rows(a, sequence, t, rows, channel, n, s, s->sums);
        for (int r = 0; r < rows; r++) {
            lane *dpre = s->dpre + (t + r - begin) * CONV_PIECE;
            v_store(dpre + whole - LANES, v_splat(0));
            load_row(a->x.dtype, at(&g->dout, sequence, 0, t + r, 0) + offset, n, 1, dpre);
            slope_row_of(a->activation, 0, s->sums + r * CONV_PIECE, dpre, whole);
        }
    }
}

/* Row `token` of dx, one before the first of dstate; the first row of s->dpre is that of token `begin`, before `end`. */
static void conv_dx(const fa_conv_grad_args *g, int64_t token, int64_t begin, int64_t end, int64_t n,
                    const conv_scratch *s, char *to)
{
    const fa_conv_args *a = &g->forward;
    for (int64_t j = 0; j < n; j += LANES) {
        v_t sum = v_splat(0);
        for (int w = 0; w < a->width; w++) {
            const int64_t of = token + a->width - 1 - w;
            if (of < begin || of >= end) continue;
            sum = v_fma(v_load(s->taps + w * CONV_PIECE + j), v_load(s->dpre + (of - begin) * CONV_PIECE + j), sum);
        }
        v_store(s->turned + j, sum);
    }
    store_row(a->x.dtype, s->turned, n, 1, to);
}

/* sums (width + 1, channels) += dweight and dbias of tokens [begin, end) of a sequence, s->dpre being theirs. */
static void conv_sums_of_parameters(const fa_conv_args *a, const conv_piece *p, int64_t begin, int64_t end,
                                    int64_t channel, int64_t n, const conv_scratch *s, lane *sums)
{
    sums += channel;
    for (int64_t t = begin; t < end; t++) {
        const lane *dpre = s->dpre + (t - begin) * CONV_PIECE;
        for (int w = 0; w < a->width; w++) {
            const char *input = conv_input(a, p->sequence, t - (a->width - 1) + w, channel);
            if (!input) continue;
            load_row(a->x.dtype, input, n, 1, s->turned);
            lane *to = sums + w * a->channels;
            for (int64_t j = 0; j < n; j += LANES)
                v_store_part(to + j, v_fma(v_load(dpre + j), v_load(s->turned + j), v_load_part(to + j, n - j)), n - j);
        }
        lane *to = sums + a->width * a->channels;
        for (int64_t j = 0; j < n; j += LANES)
            v_store_part(to + j, v_load(dpre + j) + v_load_part(to + j, n - j), n - j);
    }
}

/* dx and dstate of tokens [begin, end) of all sequences; sums (width + 1, channels), optional: of these tokens. */
static void conv_grad_run(const fa_conv_grad_args *g, int64_t begin, int64_t end, void *sums, void *scratch)
{
    const fa_conv_args *a = &g->forward;
    conv_scratch s;
    ready_conv_scratch(scratch, a, 1, &s);
    if (sums) memset(sums, 0, (a->width + 1) * a->channels * sizeof(lane));
    for (int64_t channel = 0; channel < a->channels; channel += CONV_PIECE) {
        const int64_t n = smaller(a->channels - channel, CONV_PIECE), offset = channel * dtype_size(a->x.dtype);
        load_taps(a, channel, n, &s);
        for (int64_t t = begin; t < end;) {
            const conv_piece p = conv_piece_of(a, t, smaller(end, t + CONV_TOKENS));
            const int64_t last = smaller(p.length, p.end + a->width - 1); /* dx needs dpre of later tokens */
            if (given_up(a->watch)) return;
            conv_dpre(g, p.sequence, p.begin, last, channel, n, &s);
            for (int64_t i = p.begin; g->dx.data && i < p.end; i++)
                conv_dx(g, i, p.begin, last, n, &s, at(&g->dx, p.sequence, 0, i, 0) + offset);
            for (int64_t i = 0; g->dstate.data && p.begin == 0 && i < a->width - 1; i++)
                conv_dx(g, i - (a->width - 1), 0, last, n, &s, at(&g->dstate, p.sequence, 0, i, 0) + offset);
            if (sums) conv_sums_of_parameters(a, &p, p.begin, p.end, channel, n, &s, sums);
            t += p.end - p.begin;
        }
    }
}
