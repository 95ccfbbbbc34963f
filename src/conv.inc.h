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
#define CONV_TOKENS 32 /* of a block, whose inputs are up to FA_MOST_WIDTH - 1 more */
#define CONV_INPUTS (CONV_TOKENS + 2 * (FA_MOST_WIDTH - 1)) /* the gradient's blocks have width - 1 more tokens, too */
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
    lane *taps, *bias;               /* of a piece of channels: (width, CONV_PIECE), (CONV_PIECE) */
    lane *zeros;                     /* (CONV_PIECE), the inputs before the first */
    lane *sums;                      /* (CONV_ROWS, CONV_PIECE) */
    lane *block;                     /* (CONV_INPUTS, CONV_PIECE), of inputs whose tokens lie side by side */
    lane *dpre, *row;                /* of the gradient: (CONV_TOKENS + width - 1, CONV_PIECE), (CONV_PIECE) */
    int by_channels;                 /* tokens of x lie side by side, and not channels */
    const char *inputs[CONV_INPUTS]; /* rows of a block's inputs, in x's dtype, or in lanes if by_channels */
} conv_scratch;

static int64_t take_conv_scratch(arena *from, const fa_conv_args *a, int gradient, conv_scratch *s)
{
    CUT_LANES(from, CONV_PIECE, &s->bias, &s->zeros);
    CUT(from, s->taps, a->width * CONV_PIECE);
    CUT(from, s->sums, CONV_ROWS * CONV_PIECE);
    s->by_channels = a->x.col != dtype_size(a->x.dtype) && a->channels > 1;
    if (s->by_channels) CUT(from, s->block, CONV_INPUTS * CONV_PIECE);
    if (gradient) {
        CUT(from, s->dpre, (CONV_TOKENS + a->width - 1) * CONV_PIECE);
        CUT(from, s->row, CONV_PIECE);
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

/* Rows of s->block from `row` on = inputs of n tokens from `token` on, transposed. */
INLINE void turn_inputs(fa_dtype dtype, const fa_conv_args *a, int64_t sequence, int64_t token, int64_t n,
                        int64_t channel, int64_t channels, lane *row)
{
    const char *from = at(&a->x, sequence, 0, token, channel);
    v_t part[LANES];
    for (int64_t t = 0; t < n; t += LANES, row += LANES * CONV_PIECE, from += LANES * a->x.row)
        for (int64_t j = 0; j < channels; j += LANES) {
            for (int64_t i = 0; i < LANES; i++)
                part[i] = j + i < channels ? v_load_as_part(dtype, from + (j + i) * a->x.col, n - t) : v_splat(0);
            v_transpose(part);
            for (int64_t i = 0; i < smaller(LANES, n - t); i++) v_store(row + i * CONV_PIECE + j, part[i]);
        }
}

/* s->inputs = rows of the inputs of `count` tokens from `token` on, n channels from `channel` on: width - 1 more, which
 * before the first token are those of the state, or 0. */
static void find_inputs(const fa_conv_args *a, int64_t sequence, int64_t token, int64_t count, int64_t channel,
                        int64_t n, conv_scratch *s)
{
    const int64_t before = a->width - 1, offset = channel * dtype_size(a->x.dtype);
    for (int64_t i = 0; i < count + before; i++) {
        const int64_t t = token - before + i;
        if (t < 0 && !a->state.data) s->inputs[i] = (const char *)s->zeros;
        else if (t < 0) s->inputs[i] = at(&a->state, sequence, 0, before + t, 0) + offset;
        else if (!s->by_channels) s->inputs[i] = at(&a->x, sequence, 0, t, 0) + offset;
    }
    if (!s->by_channels) return;
    const int64_t first = larger(0, before - token); /* of the inputs that x has */
    for (int64_t i = 0; i < count + before; i++) {
        lane *row = s->block + i * CONV_PIECE;
        if (i < first && a->state.data) load_row(a->x.dtype, s->inputs[i], n, 1, row);
        if (i >= first || a->state.data) s->inputs[i] = (const char *)row;
    }
    WITH_DTYPE(a->x.dtype, dtype,
               turn_inputs(dtype, a, sequence, token - before + first, count + before - first, channel, n,
                           s->block + first * CONV_PIECE));
}

/* sums = pre of `rows` tokens, number `token` of the block and later ones. */
static void conv_rows(const fa_conv_args *a, int64_t token, int rows, int64_t n, const conv_scratch *s, lane *sums)
{
    const fa_dtype of_rows = s->by_channels ? LANE_DTYPE : a->x.dtype;
    const char *const *inputs = s->inputs + token;
    if (rows == CONV_ROWS)
        WITH_DTYPE(of_rows, dtype, conv_sums(dtype, CONV_ROWS, inputs, a->width, s->taps, s->bias, n, sums));
    else
        for (int r = 0; r < rows; r++)
            WITH_DTYPE(of_rows, dtype,
                       conv_sums(dtype, 1, inputs + r, a->width, s->taps, s->bias, n, sums + r * CONV_PIECE));
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
    const int64_t between_asks = larger(1, ROW_ASKS / (CONV_PIECE * CONV_TOKENS));
    int64_t blocks = 0;
    for (int64_t channel = 0; channel < a->channels; channel += CONV_PIECE) {
        const int64_t n = smaller(a->channels - channel, CONV_PIECE), offset = channel * dtype_size(a->x.dtype);
        load_taps(a, channel, n, &s);
        for (int64_t t = begin; t < end;) {
            const conv_piece p = conv_piece_of(a, t, smaller(end, t + CONV_TOKENS));
            const int64_t tokens = p.end - p.begin;
            if (++blocks % between_asks == 0 && given_up(a->watch)) return;
            find_inputs(a, p.sequence, p.begin, tokens, channel, n, &s);
            for (int64_t i = 0; i < tokens; i += CONV_ROWS) {
                const int rows = (int)smaller(CONV_ROWS, tokens - i);
                conv_rows(a, i, rows, n, &s, s.sums);
                for (int r = 0; r < rows; r++) {
                    activate_row_of(NULL, a->activation, s.sums + r * CONV_PIECE, round_up(n, LANES));
                    store_row(a->x.dtype, s.sums + r * CONV_PIECE, n, 1,
                              at(&a->out, p.sequence, 0, p.begin + i + r, 0) + offset);
                }
            }
            t += tokens;
        }
    }
}

static int64_t conv_grad_scratch_bytes(const fa_conv_grad_args *g)
{
    return take_conv_scratch(&(arena){0}, &g->forward, 1, &(conv_scratch){0});
}

/* dpre of tokens [begin, end) of a sequence, whose inputs have been found, n channels. */
static void conv_dpre(const fa_conv_grad_args *g, int64_t sequence, int64_t begin, int64_t end, int64_t channel,
                      int64_t n, conv_scratch *s)
{
    const fa_conv_args *a = &g->forward;
    const int64_t offset = channel * dtype_size(a->x.dtype), whole = round_up(n, LANES);
    for (int64_t t = begin; t < end; t += CONV_ROWS) {
        const int rows = (int)smaller(CONV_ROWS, end - t);
        if (a->activation != FA_NONE) conv_rows(a, t - begin, rows, n, s, s->sums);
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
        v_store(s->row + j, sum);
    }
    store_row(a->x.dtype, s->row, n, 1, to);
}

/* sums (width + 1, channels) += dweight and dbias of the block's first `tokens`. */
static void conv_parameters(const fa_conv_args *a, int64_t tokens, int64_t channel, int64_t n, const conv_scratch *s,
                            lane *sums)
{
    const fa_dtype of_rows = s->by_channels ? LANE_DTYPE : a->x.dtype;
    sums += channel;
    for (int64_t t = 0; t < tokens; t++) {
        const lane *dpre = s->dpre + t * CONV_PIECE;
        for (int w = 0; w < a->width; w++) {
            const char *input = s->inputs[t + w];
            if (input == (const char *)s->zeros) continue;
            load_row(of_rows, input, n, 1, s->row);
            lane *to = sums + w * a->channels;
            for (int64_t j = 0; j < n; j += LANES)
                v_store_part(to + j, v_fma(v_load(dpre + j), v_load(s->row + j), v_load_part(to + j, n - j)), n - j);
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
            /* dx needs dpre of width - 1 later tokens. */
            const int64_t last = smaller(p.length, p.end + a->width - 1), tokens = p.end - p.begin;
            if (given_up(a->watch)) return;
            find_inputs(a, p.sequence, p.begin, last - p.begin, channel, n, &s);
            conv_dpre(g, p.sequence, p.begin, last, channel, n, &s);
            for (int64_t i = p.begin; g->dx.data && i < p.end; i++)
                conv_dx(g, i, p.begin, last, n, &s, at(&g->dx, p.sequence, 0, i, 0) + offset);
            for (int64_t i = 0; g->dstate.data && p.begin == 0 && i < a->width - 1; i++)
                conv_dx(g, i - (a->width - 1), 0, last, n, &s, at(&g->dstate, p.sequence, 0, i, 0) + offset);
            if (sums) conv_parameters(a, tokens, channel, n, &s, sums);
            t += tokens;
        }
    }
}
