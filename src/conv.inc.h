/* Causal depthwise convolution over tokens, and its gradient:
 *
 *     pre_t = bias + sum over w of weight_w x_{t - width + 1 + w},   out_t = activation(pre_t)
 *     dpre_t = dout_t slope(pre_t),   dx_t = sum over w of weight_w dpre_{t + width - 1 - w}
 *     dweight_w = sum over t of dpre_t x_{t - width + 1 + w},   dbias = sum over t of dpre_t
 *
 * where x_t with t < 0 is a row of the state. The lanes are channels. A task is some tokens of all sequences end to end,
 * a piece at a time: the tokens of one sequence among them. Rows of x are read `width` times, from the caches.
 *
 * Literals  dtype. rows: CONV_ROWS or 1. width: 4, the usual one, or not.
 * Exports   conv_scratch_bytes, conv_run; conv_grad_scratch_bytes, conv_grad_run. */
#pragma once
#include "interface/channels.h"
#include "rows_grad.inc.h"

#define CONV_ROWS 8    /* accumulators: 4 cycles of latency, 2 multiply-adds a cycle */
#define CONV_PIECE 64  /* channels: with 256, rows of x 4 KB apart drive each other out of the second-level cache */
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
    lane *dpre, *reversed;           /* of the gradient: (CONV_TOKENS + width - 1, CONV_PIECE); taps, the last first */
    conv_piece kept;                 /* the inputs in `block` */
    int64_t kept_channel;            /* and their first channel */
    int by_channels;                 /* tokens of x lie side by side, and not channels */
    fa_dtype of_inputs;              /* x's dtype, or lanes if by_channels */
    const char *inputs[CONV_INPUTS]; /* rows of a block's inputs */
} conv_scratch;

static int64_t take_conv_scratch(arena *from, const fa_conv_args *a, int gradient, conv_scratch *s)
{
    CUT_LANES(from, CONV_PIECE, &s->bias, &s->zeros);
    CUT(from, s->taps, a->width * CONV_PIECE);
    CUT(from, s->sums, CONV_ROWS * CONV_PIECE);
    s->by_channels = a->x.col != dtype_size(a->x.dtype) && a->channels > 1;
    s->of_inputs = s->by_channels ? LANE_DTYPE : a->x.dtype;
    if (s->by_channels) CUT(from, s->block, CONV_INPUTS * CONV_PIECE);
    if (gradient) {
        CUT(from, s->dpre, (CONV_TOKENS + a->width - 1) * CONV_PIECE);
        CUT(from, s->reversed, a->width * CONV_PIECE);
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

/* Rows (n, CONV_PIECE) of up to LANES tokens = those of up to LANES channels, `col` bytes apart, transposed. */
INLINE void turn_channels(fa_dtype dtype, const char *from, int64_t col, int64_t channels, int64_t n, lane *row)
{
    v_t part[LANES];
    UNROLL_FOR(int i = 0; i < LANES; i++)
        part[i] = i < channels ? v_load_as_part(dtype, from + i * col, n) : v_splat(0);
    v_transpose(part);
    UNROLL_FOR(int i = 0; i < LANES; i++)
        if (i < n) v_store(row + i * CONV_PIECE, part[i]);
}

/* Rows of s->block from `row` on = inputs of n tokens from `token` on, transposed. Prefetches those of the next
 * block: a few from the row of each channel, which the processor does not predict. */
INLINE void turn_inputs(fa_dtype dtype, const fa_conv_args *a, int64_t sequence, int64_t token, int64_t n,
                        int64_t channel, int64_t channels, lane *row)
{
    const char *from = at(&a->x, sequence, 0, token, channel);
    const int64_t col = a->x.col, step = LANES * a->x.row;
    for (int64_t j = 0; j < channels; j += LANES, from += LANES * col) {
        for (int64_t i = 0; i < LANES; i++)
            for (int64_t l = 0; l < CONV_TOKENS * dtype_size(dtype); l += 64)
                __builtin_prefetch(from + i * col + n * a->x.row + l, 0, 2);
        int64_t t = 0;
        for (; t + LANES <= n && j + LANES <= channels; t += LANES)
            turn_channels(dtype, from + t / LANES * step, col, LANES, LANES, row + t * CONV_PIECE + j);
        for (; t < n; t += LANES)
            turn_channels(dtype, from + t / LANES * step, col, channels - j, n - t, row + t * CONV_PIECE + j);
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
    int64_t known = 0;                               /* rows that the block before has */
    if (s->kept.sequence == sequence && s->kept_channel == channel && s->kept.begin <= token - before) {
        known = larger(0, s->kept.end - (token - before));
        memmove(s->block, s->block + (token - before - s->kept.begin) * CONV_PIECE, known * CONV_PIECE * sizeof(lane));
    }
    s->kept = (conv_piece){sequence, token - before, token + count, 0};
    s->kept_channel = channel;
    for (int64_t i = 0; i < count + before; i++) {
        lane *row = s->block + i * CONV_PIECE;
        if (i < first && a->state.data) load_row(a->x.dtype, s->inputs[i], n, 1, row);
        if (i >= first || a->state.data) s->inputs[i] = (const char *)row;
    }
    const int64_t next = larger(first, known);
    WITH_DTYPE(a->x.dtype, dtype,
               turn_inputs(dtype, a, sequence, token - before + next, count + before - next, channel, n,
                           s->block + next * CONV_PIECE));
}

/* sums (rows, CONV_PIECE), up to CONV_ROWS of them, as in conv_sums. */
static void conv_rows(fa_dtype of_inputs, int64_t rows, const char *const *inputs, int width, const lane *taps,
                      const lane *bias, int64_t n, lane *sums)
{
    if (rows >= CONV_ROWS)
        WITH_DTYPE(of_inputs, dtype, conv_sums(dtype, CONV_ROWS, inputs, width, taps, bias, n, sums));
    else
        for (int64_t r = 0; r < rows; r++)
            WITH_DTYPE(of_inputs, dtype, conv_sums(dtype, 1, inputs + r, width, taps, bias, n, sums + r * CONV_PIECE));
}

/* Cut from memory, with zeros for inputs that are not there. */
static void ready_conv_scratch(void *memory, const fa_conv_args *a, int gradient, conv_scratch *s)
{
    take_conv_scratch(&(arena){.memory = memory}, a, gradient, s);
    s->kept.sequence = -1;
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
                conv_rows(s.of_inputs, tokens - i, s.inputs + i, a->width, s.taps, s.bias, n, s.sums);
                for (int64_t r = 0; r < smaller(CONV_ROWS, tokens - i); r++) {
                    lane *sums = s.sums + r * CONV_PIECE;
                    activate_row_of(NULL, a->activation, sums, sums, round_up(n, LANES));
                    store_row(a->x.dtype, sums, n, 1, at(&a->out, p.sequence, 0, p.begin + i + r, 0) + offset);
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
        if (a->activation != FA_NONE)
            conv_rows(s->of_inputs, end - t, s->inputs + t - begin, a->width, s->taps, s->bias, n, s->sums);
        for (int64_t r = 0; r < smaller(CONV_ROWS, end - t); r++) {
            lane *dpre = s->dpre + (t + r - begin) * CONV_PIECE;
            v_store(dpre + whole - LANES, v_splat(0));
            load_row(a->x.dtype, at(&g->dout, sequence, 0, t + r, 0) + offset, n, 1, dpre);
            slope_row_of(a->activation, 0, s->sums + r * CONV_PIECE, dpre, whole);
        }
    }
}

/* `count` rows of dx or dstate = those of dpre, convolved with the reversed taps. Where dpre has no rows, at both ends, taps
 * take no part, as they may be infinite. */
static void conv_dx(const fa_conv_grad_args *g, int64_t count, const char *const *dpre, int64_t n,
                    const conv_scratch *s, char *to, int64_t row)
{
    const int width = g->forward.width;
    const char *none = (const char *)s->zeros;
    for (int64_t i = 0; i < count; i += CONV_ROWS) {
        const int64_t last = smaller(CONV_ROWS, count - i) - 1;
        const int whole = dpre[i] != none && dpre[i + last + width - 1] != none;
        if (whole) conv_rows(LANE_DTYPE, last + 1, dpre + i, width, s->reversed, s->zeros, n, s->sums);
        for (int64_t r = 0; !whole && r <= last; r++) {
            int low = 0, high = width;
            while (low < high && dpre[i + r + low] == none) low++;
            while (high > low && dpre[i + r + high - 1] == none) high--;
            conv_rows(LANE_DTYPE, 1, dpre + i + r + low, high - low, s->reversed + low * CONV_PIECE, s->zeros, n,
                      s->sums + r * CONV_PIECE);
        }
        for (int64_t r = 0; r <= last; r++)
            store_row(g->forward.x.dtype, s->sums + r * CONV_PIECE, n, 1, to + (i + r) * row);
    }
}

/* sums (width + 1, channels) += dweight and dbias of the block's first `tokens`. Tokens before the first add nothing. */
INLINE void conv_parameters(fa_dtype dtype, int width, const fa_conv_args *a, int64_t tokens, int64_t channel,
                            int64_t n, const conv_scratch *s, lane *sums)
{
    const int64_t size = dtype_size(dtype);
    for (int64_t j = 0; j < n; j += LANES) {
        v_t sum[FA_MOST_WIDTH + 1];
        for (int w = 0; w <= width; w++) sum[w] = v_splat(0);
        for (int64_t t = 0; t < tokens; t++) {
            const v_t dpre = v_load(s->dpre + t * CONV_PIECE + j);
            UNROLL_FOR(int w = 0; w < width; w++)
                if (s->inputs[t + w] != (const char *)s->zeros)
                    sum[w] = v_fma(dpre, v_load_as_part(dtype, s->inputs[t + w] + j * size, n - j), sum[w]);
            sum[width] += dpre;
        }
        lane *to = sums + channel + j;
        for (int w = 0; w <= width; w++, to += a->channels) v_store_part(to, v_load_part(to, n - j) + sum[w], n - j);
    }
}

/* dx and dstate of tokens [begin, end) of all sequences; sums (width + 1, channels), optional: of these tokens. */
static void conv_grad_run(const fa_conv_grad_args *g, int64_t begin, int64_t end, void *sums, void *scratch)
{
    const fa_conv_args *a = &g->forward;
    conv_scratch s;
    ready_conv_scratch(scratch, a, 1, &s);
    const int64_t before = a->width - 1;
    const char *dpre[CONV_INPUTS];
    if (sums) memset(sums, 0, (a->width + 1) * a->channels * sizeof(lane));
    for (int64_t channel = 0; channel < a->channels; channel += CONV_PIECE) {
        const int64_t n = smaller(a->channels - channel, CONV_PIECE), offset = channel * dtype_size(a->x.dtype);
        load_taps(a, channel, n, &s);
        for (int64_t w = 0; w < a->width; w++)
            memcpy(s.reversed + w * CONV_PIECE, s.taps + (before - w) * CONV_PIECE, CONV_PIECE * sizeof(lane));
        for (int64_t t = begin; t < end;) {
            const conv_piece p = conv_piece_of(a, t, smaller(end, t + CONV_TOKENS));
            /* dx needs dpre of width - 1 later tokens. */
            const int64_t last = smaller(p.length, p.end + before), tokens = p.end - p.begin;
            if (given_up(a->watch)) return;
            find_inputs(a, p.sequence, p.begin, last - p.begin, channel, n, &s);
            conv_dpre(g, p.sequence, p.begin, last, channel, n, &s);
            for (int64_t i = 0; i < tokens + 2 * before; i++) { /* from `before` tokens before the block on */
                const int64_t of = i - before;
                dpre[i] = (const char *)(of >= 0 && p.begin + of < last ? s.dpre + of * CONV_PIECE : s.zeros);
            }
            if (g->dx.data)
                conv_dx(g, tokens, dpre + before, n, &s, at(&g->dx, p.sequence, 0, p.begin, 0) + offset, g->dx.row);
            if (g->dstate.data && p.begin == 0)
                conv_dx(g, before, dpre, n, &s, at(&g->dstate, p.sequence, 0, 0, 0) + offset, g->dstate.row);
            if (sums && a->width == 4)
                WITH_DTYPE(s.of_inputs, dtype, conv_parameters(dtype, 4, a, tokens, channel, n, &s, sums));
            else if (sums)
                WITH_DTYPE(s.of_inputs, dtype, conv_parameters(dtype, a->width, a, tokens, channel, n, &s, sums));
            t += tokens;
        }
    }
}
