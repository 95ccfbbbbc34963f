/* The gradient of linear attention: products of triangles, and what scores of a chunk give back to queries, keys and
 * decays.
 *
 * The scores are decayed ones, s_ij = x_i k_j between (i, j). With ds_ij their gradients, those of x, k and of the
 * logarithms of decays are
 *
 *     dx_i = sum over j of ds_ij k_j between (i, j)       dk_j = sum over i of ds_ij x_i between (i, j)
 *     dlog a_t = sum over j < t <= i of ds_ij s_ij
 *
 * The last one is summed term by term. As a difference of running sums of x dx and of k dk, it would be off by the
 * rounding of sums over tokens that a decay has long hidden from each other.
 *
 * Scalar and vector decays are told apart here, as in recurrent_decay.inc.h.
 *
 * Exports   token_product, upper_product, from_lanes; decay_sums, gradients_of_scores, gradients_of_decays. */
#pragma once
#include "recurrent_chunk.inc.h"

/* to (rows, n) = or += x (rows, depth) y (depth, n): the lanes are tokens, and so rows of y and `to` CHUNK_LANES apart.
 * Rows of x are x_row lanes apart. */
static void token_product(int more, const lane *x, int64_t x_row, int64_t rows, const lane *y, int64_t depth, int64_t n,
                          lane *to)
{
    outer_product product = {
        (const char *)x, x_row * (int64_t)sizeof(lane), y, CHUNK_LANES, depth, .factor = 1, .more = more, .out = to};
    if (n > LANES) {
        multiply(round_up(n, GROUP), 0, 0, rows, &product);
        return;
    }
    for (int64_t r = 0, passes = ceil_div(rows, LINEAR_ROWS); passes; passes--) { /* one vector is enough */
        const int64_t of_pass = ceil_div(rows - r, passes);
        WITH_ROWS(of_pass, LINEAR_ROWS, tile_outer, 1, 0, 0, &product, 0);
        product.x += of_pass * product.x_row, product.out += of_pass * CHUNK_LANES;
        r += of_pass;
    }
}

/* out += scores (n, n) y for `columns`, of scores that are 0 above the diagonal. That shields no row from a later y that
 * is not finite: if there is one, rows go one by one. */
static void lower_product(int64_t columns, const lane *scores, int64_t n, int finite, const lane *y, int64_t pitch,
                          lane *out)
{
    const int64_t rows = finite ? n : 1;
    for (int64_t i = 0; i < n; i += rows) {
        const outer_product product = product_of(1, scores + i * CHUNK_LANES, y, pitch, i, out + i * pitch);
        multiply(columns, 0, 1, rows, &product);
    }
}

/* The same with scores that are 0 below the diagonal: row i needs y from there on. */
static void upper_product(int64_t columns, const lane *scores, int64_t n, int finite, const lane *y, int64_t pitch,
                          lane *out)
{
    const int64_t most = finite ? LINEAR_ROWS : 1;
    for (int64_t i = 0; i < n; i += most) {
        const outer_product product = product_of(1, scores + i * CHUNK_LANES + i, y + i * pitch, pitch, n - i,
                                                 out + i * pitch);
        multiply(columns, 0, 0, smaller(most, n - i), &product);
    }
}

/* rows (n, head_dim), in blocks of dimensions, = x_t (head_dim, n) transposed. */
static void from_lanes(const lane *x_t, int64_t n, int64_t head_dim, lane *rows)
{
    for (int64_t d = 0; d < head_dim; d += CHUNK_DEPTH, rows += CHUNK_BLOCK)
        transpose(x_t + d * CHUNK_LANES, CHUNK_LANES, smaller(head_dim - d, CHUNK_DEPTH), n, rows, CHUNK_LANES);
}

/* What decays of a chunk get back. Of vector decays, rows of dims lanes; of scalar ones, the first lane of each. */
typedef struct {
    lane *earlier; /* (CHUNK, row): of token i, by what it reads of the state before the chunk */
    lane *later;   /* (CHUNK, row): of token j, by what it leaves to the state behind the chunk */
    lane *through; /* (row): of all tokens, by what is left of the state before the chunk in that behind it */
    lane *terms;   /* (CHUNK, CHUNK_LANES): ds_ij s_ij, of scalar decays */
    lane *inside;  /* (CHUNK, row): dlog a_t, by scores of the chunk */
    int64_t row;
} decay_sums;

/* The gradients of scores with vector decays. Of each vector of dimensions, keys are first faded from token to token, as
 * vector_scores() does. Then their gradients are faded back, from the last token to the first; what is met on the way is
 * the gradient of a token's decay. */
static void vector_gradients(const chunk_scratch *scratch, const lane *x, const lane *dscores, int64_t n,
                             int64_t head_dim, int inclusive, lane *dx, lane *dk, const decay_sums *sums)
{
    for (int64_t d = 0; d < head_dim; d += LANES) {
        v_t faded[GATED_CHUNK][GATED_CHUNK], back[GATED_CHUNK];
        for (int64_t i = 0; i < n; i++) {
            const v_t gate = v_load(scratch->gate + i * scratch->decay_row + d);
            v_t sum = v_load(dx + element_at(i, d));
            faded[i][i] = v_load(scratch->keys + element_at(i, d));
            for (int64_t j = 0; j < i; j++) {
                faded[i][j] = faded[i - 1][j] * gate;
                sum = v_fma(v_splat(dscores[i * CHUNK_LANES + j]), faded[i][j], sum);
            }
            if (inclusive) sum = v_fma(v_splat(dscores[i * CHUNK_LANES + i]), faded[i][i], sum);
            v_store(dx + element_at(i, d), sum);
            back[i] = v_splat(0);
        }
        for (int64_t i = n - 1; i >= 0; i--) {
            const v_t gate = v_load(scratch->gate + i * scratch->decay_row + d);
            const v_t from = v_load(x + element_at(i, d));
            lane *of_key = dk + element_at(i, d), *inside = sums->inside + i * sums->row + d;
            v_t sum = v_load(inside);
            if (inclusive) back[i] = v_fma(v_splat(dscores[i * CHUNK_LANES + i]), from, back[i]);
            v_store(of_key, v_load(of_key) + back[i]);
            for (int64_t j = 0; j < i; j++) {
                back[j] = v_fma(v_splat(dscores[i * CHUNK_LANES + j]), from, back[j]);
                sum = v_fma(back[j], faded[i][j], sum);
                back[j] = back[j] * gate;
            }
            v_store(inside, sum);
        }
    }
}

/* dx and dk (n, head_dim) += the gradients of x and of the keys, by dscores (n, n): those of decayed `scores` of x, which
 * are 0 where they do not count. dscores and `turned` (n, n) are not what they were afterwards. */
static void gradients_of_scores(const fa_recurrent_args *a, const chunk_scratch *scratch, const lane *x, int x_finite,
                                int keys_finite, const lane *scores, lane *dscores, int64_t n, int inclusive,
                                lane *turned, lane *dx, lane *dk, const decay_sums *sums)
{
    if (a->gated) {
        vector_gradients(scratch, x, dscores, n, a->head_dim, inclusive, dx, dk, sums);
        return;
    }
    for (int64_t i = 0; a->log_decay.data && i < n; i++)
        for (int64_t j = 0; j <= i; j += LANES) {
            const int64_t place = i * CHUNK_LANES + j;
            const v_t dscore = v_load(dscores + place);
            v_store(sums->terms + place, v_fma(dscore, v_load(scores + place), v_load(sums->terms + place)));
            const v_t decayed = dscore * v_load(scratch->between + place);
            v_store(dscores + place, v_select(lane_numbers(j) < (ilane)(i + inclusive), decayed, v_splat(0)));
        }
    transpose(dscores, CHUNK_LANES, n, n, turned, CHUNK_LANES);
    for (int64_t d = 0; d < a->head_dim; d += CHUNK_DEPTH) {
        const int64_t block = element_at(0, d), columns = round_up(smaller(a->head_dim - d, CHUNK_DEPTH), GROUP);
        lower_product(columns, dscores, n, keys_finite, scratch->keys + block, CHUNK_LANES, dx + block);
        upper_product(columns, turned, n, x_finite, x + block, CHUNK_LANES, dk + block);
    }
}

/* sums->inside of scalar decays: for each t, the terms with j < t <= i, row by row from the last one. */
static void sum_terms(const decay_sums *sums, int64_t n)
{
    v_t column[CHUNK / LANES];
    UNROLL_FOR(int u = 0; u < CHUNK / LANES; u++) column[u] = v_splat(0);
    for (int64_t t = n - 1; t >= 0; t--) {
        v_t sum = v_splat(0);
        for (int64_t j = 0; j < t; j += LANES) {
            column[j / LANES] += v_load(sums->terms + t * CHUNK_LANES + j);
            sum += v_select(lane_numbers(j) < (ilane)t, column[j / LANES], v_splat(0));
        }
        sums->inside[t * sums->row] += v_sum(sum);
    }
}

/* dlog_decay of n tokens from `to` on, rows of `to` being `row` bytes apart. */
static void gradients_of_decays(const fa_recurrent_args *a, const decay_sums *sums, int64_t n, char *to, int64_t row)
{
    const int64_t width = a->gated ? a->head_dim : 1;
    if (!a->gated) sum_terms(sums, n);
    for (int64_t d = 0; d < width; d += LANES) {
        v_t before = v_splat(0), after = v_load(sums->through + d);
        for (int64_t t = n - 1; t >= 0; t--) {
            lane *inside = sums->inside + t * sums->row + d;
            after += v_load(sums->earlier + t * sums->row + d);
            v_store(inside, v_load(inside) + after);
        }
        for (int64_t t = 0; t < n; t++) {
            const v_t sum = v_load(sums->inside + t * sums->row + d) + before;
            v_store_part(to + t * row + d * (int64_t)sizeof(lane), sum, width - d);
            before += v_load(sums->later + t * sums->row + d);
        }
    }
}
