/* Linear attention: the arrays of a chunk of tokens, its decays and its scores. Tokens are counted from the chunk's
 * first; a_i, the decay of token i, is a number, or a vector over the dimensions.
 *
 *     carry (i) = a_0 ... a_i                    what is left at token i of the state before the chunk
 *     between (i, j) = a_{j+1} ... a_i           what is left at token i of key j
 *     scores (i, j) = x_i k_j between (i, j)     for j <= i
 *
 * All are products of decays, never quotients: they are at most 1, and a decay of 0 does no harm.
 *
 * Scalar and vector decays are told apart here alone. With scalar decays, scores are the matrix product x k^T times
 * `between`. Vector decays differ from term to term of a score's sum: vector_scores() multiplies the keys themselves.
 *
 * Exports   CHUNK, GATED_CHUNK, CHUNK_DEPTH, CHUNK_LANES, CHUNK_BLOCK; chunk_scratch, take_chunk_scratch; product_of,
 *           lane_numbers, element_at, load_rows, transpose_keys; load_decays, carry_rows, decayed_scores, fade_keys, decay_over. */
#pragma once
#include "recurrent_task.inc.h"

/* Tokens of a chunk. On AVX-512, 64 is 3 to 15% slower, 128 another 10 to 25%: the scores grow with it. Chunks with
 * vector decays are shorter yet (32 is 3 to 13% slower), since their scores are no matrix product. */
#define CHUNK 32
#define GATED_CHUNK 16

/* Rows of q, keys and scores are CHUNK_LANES apart: a constant, so that one register addresses all rows of a pass, and
 * an odd number of lines, so that rows do not meet in the same sets of the cache. Longer rows are cut into blocks of
 * CHUNK_DEPTH dimensions, which are CHUNK_BLOCK lanes apart. */
#define CHUNK_DEPTH 128
#define CHUNK_LANES (CHUNK_DEPTH + 64 / (int64_t)sizeof(lane))
#define CHUNK_ROW (CHUNK_LANES * (int64_t)sizeof(lane))
#define CHUNK_BLOCK (CHUNK * CHUNK_LANES)
_Static_assert(GATED_CHUNK <= CHUNK && CHUNK <= CHUNK_DEPTH && CHUNK_ROW / 64 % 2, "rows of any matrix hold a chunk");
_Static_assert(CHUNK % GROUP == 0 && GATED_CHUNK % LANES == 0 && PANEL % GROUP == 0, "whole vectors");

typedef struct {
    lane *q, *keys;     /* (blocks of dimensions, CHUNK, CHUNK_LANES); read_chunk() multiplies q by carry */
    lane *erase;        /* the same: what the delta rule reads by, the keys themselves if the call has no others */
    lane *carried_keys; /* the same, erase times carry: for the delta rule with decays */
    lane *keys_t; /* (head_dim, CHUNK_LANES): keys transposed; update_state() needs them faded to the chunk's end */
    lane *gate, *carry;  /* (CHUNK, decay_row): a_i and carry (i); that of dimension d stands at d * decay_step */
    lane *between;       /* (CHUNK, CHUNK_LANES): of scalar decays */
    lane *scores;        /* (CHUNK, CHUNK_LANES) */
    lane *writes, *beta; /* (CHUNK, CHUNK_LANES), (CHUNK): of the delta rule; beta is -b */
    lane *divisor;       /* (CHUNK): what rows of out are divided by */
    lane *norm;          /* (head_dim): the sum of the keys */
    lane *u, *out;       /* (panels, CHUNK, PANEL), (CHUNK, PANEL) */
    lane *state;         /* (panels, head_dim, PANEL) */
    int64_t decay_row, decay_step;
} chunk_scratch;

static int64_t take_chunk_scratch(arena *from, const fa_recurrent_args *a, int64_t panels, chunk_scratch *scratch)
{
    const int64_t dims = round_up(a->head_dim, LANES), rows = ceil_div(a->head_dim, CHUNK_DEPTH) * CHUNK_BLOCK;
    scratch->decay_row = a->gated ? dims : LANES;
    scratch->decay_step = a->gated ? 1 : 0;
    CUT_LANES(from, rows, &scratch->q, &scratch->keys);
    scratch->erase = scratch->keys;
    if (a->erase.data) CUT(from, scratch->erase, rows);
    CUT(from, scratch->carried_keys, a->beta.data && a->log_decay.data ? rows : 0);
    CUT(from, scratch->keys_t, dims * CHUNK_LANES);
    CUT_LANES(from, CHUNK * scratch->decay_row, &scratch->gate, &scratch->carry);
    CUT_LANES(from, CHUNK_BLOCK, &scratch->between, &scratch->scores, &scratch->writes);
    CUT_LANES(from, CHUNK, &scratch->beta, &scratch->divisor);
    CUT(from, scratch->norm, dims);
    CUT(from, scratch->u, panels * CHUNK * PANEL);
    CUT(from, scratch->out, CHUNK * PANEL);
    CUT(from, scratch->state, panels * a->head_dim * PANEL);
    return from->used;
}

/* out = or += x y, rows of x being CHUNK_LANES apart, those of y and out `pitch`. */
INLINE outer_product product_of(int more, const lane *x, const lane *y, int64_t pitch, int64_t depth, lane *out)
{
    return (outer_product){(const char *)x, CHUNK_ROW, y, pitch, depth, .factor = 1, .more = more, .out = out};
}

/* first, first + 1, ... */
INLINE vi_t lane_numbers(int64_t first)
{
    vi_t i;
    UNROLL_FOR(int u = 0; u < LANES; u++) i[u] = (ilane)(first + u);
    return i;
}

/* Where dimension d of row i stands, of rows in blocks of dimensions. */
INLINE int64_t element_at(int64_t i, int64_t d)
{
    return d / CHUNK_DEPTH * CHUNK_BLOCK + i * CHUNK_LANES + d % CHUNK_DEPTH;
}

/* to = factor * n rows of x from `from` on, in blocks of dimensions. */
static void load_rows(const fa_array *x, const char *from, int64_t n, int64_t head_dim, lane factor, lane *to)
{
    for (int64_t d = 0; d < head_dim; d += CHUNK_DEPTH, to += CHUNK_BLOCK, from += CHUNK_DEPTH * dtype_size(x->dtype))
        for (int64_t i = 0; i < n; i++)
            load_row(x->dtype, from + i * x->row, smaller(head_dim - d, CHUNK_DEPTH), factor, to + i * CHUNK_LANES);
}

static void transpose_keys(const lane *keys, int64_t n, int64_t head_dim, lane *keys_t)
{
    for (int64_t d = 0; d < head_dim; d += CHUNK_DEPTH, keys += CHUNK_BLOCK)
        transpose(keys, CHUNK_LANES, n, smaller(head_dim - d, CHUNK_DEPTH), keys_t + d * CHUNK_LANES, CHUNK_LANES);
}

/* gate and carry of n tokens from `first` on; between, if decays are scalar. */
static void load_decays(const fa_recurrent_args *a, const recurrent_task *task, int64_t first, int64_t n,
                        chunk_scratch *scratch)
{
    const int64_t row = scratch->decay_row;
    const char *log_decay = at(&a->log_decay, task->b, task->h, first, 0);
    for (int64_t i = 0; i < n; i++, log_decay += a->log_decay.row) {
        lane *gate = scratch->gate + i * row, *carry = scratch->carry + i * row;
        for (int64_t d = 0; d < row; d += LANES) {
            const v_t decay = decay_at(a, log_decay, d);
            v_store(gate + d, decay);
            v_store(carry + d, i ? v_flush(v_load(carry - row + d) * decay) : decay);
        }
        for (int64_t j = 0; !a->gated && j <= i; j += LANES) {
            lane *to = scratch->between + i * CHUNK_LANES + j;
            const v_t product = j < i ? v_flush(v_load(to - CHUNK_LANES) * v_load(gate)) : v_splat(1);
            v_store(to, v_select(lane_numbers(j) < (ilane)i, product, v_splat(1)));
        }
    }
}

/* Returns carry * rows, for products with the state before the chunk: in `to`, or without decays `rows` itself. */
static const lane *carry_rows(const fa_recurrent_args *a, const chunk_scratch *scratch, const lane *rows, int64_t n,
                              lane *to)
{
    const int64_t head_dim = a->head_dim, row = scratch->decay_row, step = scratch->decay_step;
    const lane *carry = scratch->carry;
    if (!a->log_decay.data) return rows;
    for (int64_t i = 0; i < n; i++, carry += row)
        for (int64_t d = 0; d < head_dim; d += LANES)
            v_store(to + element_at(i, d), v_load(rows + element_at(i, d)) * v_load(carry + d * step));
    return to;
}

/* scores (n, n) = x k^T on and below the diagonal. */
static void plain_scores(const chunk_scratch *scratch, const lane *x, int64_t n, int64_t head_dim, lane *scores)
{
    for (int64_t d = 0; d < head_dim; d += CHUNK_DEPTH, x += CHUNK_BLOCK)
        for (int64_t c = 0; c < n; c += GROUP) {
            const lane *keys_t = scratch->keys_t + d * CHUNK_LANES + c;
            const int64_t depth = smaller(head_dim - d, CHUNK_DEPTH);
            const outer_product product = product_of(d > 0, x + c * CHUNK_LANES, keys_t, CHUNK_LANES, depth,
                                                     scores + c * CHUNK_LANES + c);
            multiply(GROUP, 0, 0, n - c, &product);
        }
}

/* The same, times vector decays. Before row i, keys_t is multiplied by the decays of token i, so that every key has
 * those between its own token and i. In the end keys_t is as fade_keys() must leave it. */
static void vector_scores(const chunk_scratch *scratch, const lane *x, int64_t n, int64_t head_dim, lane *scores)
{
    lane *keys_t = scratch->keys_t;
    transpose_keys(scratch->keys, n, head_dim, keys_t);
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j <= i; j += LANES) {
            const vi_t before = lane_numbers(j) < (ilane)i;
            v_t sum[4] = {v_splat(0), v_splat(0), v_splat(0), v_splat(0)};
            const lane *gate = scratch->gate + i * scratch->decay_row;
            for (int64_t d = 0; d < head_dim; d += 4)
                UNROLL_FOR(int64_t e = 0; e < 4; e++) {
                    if (d + e >= head_dim) break;
                    lane *keys = keys_t + (d + e) * CHUNK_LANES + j;
                    const v_t faded = v_load(keys) * v_select(before, v_splat(gate[d + e]), v_splat(1));
                    v_store(keys, faded);
                    sum[e] = v_fma(v_splat(x[element_at(i, d + e)]), faded, sum[e]);
                }
            v_store(scores + i * CHUNK_LANES + j, (sum[0] + sum[1]) + (sum[2] + sum[3]));
        }
}

/* scores (n, n) = factor_i x_i k_j between (i, j) for j < i + inclusive. The others are 0, even where x_i k_j is NaN.
 * `factor` may be NULL. */
static void decayed_scores(const fa_recurrent_args *a, chunk_scratch *scratch, const lane *x, int64_t n,
                           const lane *factor, int inclusive, lane *scores)
{
    const lane *between = a->log_decay.data && !a->gated ? scratch->between : NULL;
    if (a->gated) vector_scores(scratch, x, n, a->head_dim, scores);
    else plain_scores(scratch, x, n, a->head_dim, scores);
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < n; j += LANES) {
            lane *to = scores + i * CHUNK_LANES + j;
            v_t score = v_splat(0);
            if (j <= i) {
                score = v_load(to);
                if (between) score = score * v_load(between + i * CHUNK_LANES + j);
                if (factor) score = score * v_splat(factor[i]);
                score = v_select(lane_numbers(j) < (ilane)(i + inclusive), score, v_splat(0));
            }
            v_store(to, score);
        }
}

/* Gives every key in keys_t the decays between its token and the chunk's end. vector_scores() has done so already:
 * calls with decays are causal, and so it runs for every chunk. */
static void fade_keys(const fa_recurrent_args *a, int64_t n, chunk_scratch *scratch)
{
    if (!a->log_decay.data || a->gated) return;
    const lane *between = scratch->between + (n - 1) * CHUNK_LANES;
    lane *keys = scratch->keys_t;
    for (int64_t left = a->head_dim; left; left--, keys += CHUNK_LANES)
        for (int64_t j = 0; j < n; j += LANES) v_store(keys + j, v_load(keys + j) * v_load(between + j));
}

/* The decay of dimension d over all n tokens. */
INLINE lane decay_over(const fa_recurrent_args *a, const chunk_scratch *scratch, int64_t n, int64_t d)
{
    return a->log_decay.data ? scratch->carry[(n - 1) * scratch->decay_row + d * scratch->decay_step] : 1;
}
